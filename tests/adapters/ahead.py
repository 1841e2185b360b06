"""Trainings over two ranks with and without batches that are planned ahead: weights, losses, and times of steps."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from statistics import median
from typing import Any

import torch
from torch import Tensor
from transformers import DataCollatorWithFlattening, TrainerCallback, TrainingArguments

from ringattn import Ring
from ringattn.core import bounded_cache
from tests.adapters.models import tiny_model
from tests.adapters.processes import forked_ranks
from tests.adapters.trainer import RingTrainer

RANKS, DOCUMENTS, BLOCK, UNCOUNTED = 2, 64, 8, 2
"""Processes; documents of a step; steps in a row with or without plans ahead, and the first of them, not counted."""

PLANNING = ("sequence", "batch", "executor_of", "plan_ahead")
"""The methods of a ring that place and plan, or start the thread."""


class Alone(RingTrainer):
    """A Trainer that plans no batch ahead."""

    def get_batch_samples(self, *args: Any, **kwargs: Any) -> tuple[list[Any], Any]:
        batches = super().get_batch_samples(*args, **kwargs)
        self._upcoming = iter(())
        return batches


class Alternating(RingTrainer):
    """A Trainer that plans batches ahead in every second block of steps."""

    def get_batch_samples(self, *args: Any, **kwargs: Any) -> tuple[list[Any], Any]:
        batches = super().get_batch_samples(*args, **kwargs)
        if self.state.global_step // BLOCK % 2 == 0:
            self._upcoming = iter(())
        return batches


class Times(TrainerCallback):
    """A callback that reads the clocks at the end of each step: of the step, and of planning in the calling thread."""

    def __init__(self) -> None:
        self.ends: list[list[float]] = []
        self.planning, self.is_planning = [0.0, 0.0], False

    def watch(self, trainer: RingTrainer, ring: Ring) -> None:
        """Count the time in calls that place, plan, or wait for the thread that does."""
        for owner, name in ((trainer, "_await_plans"), *((ring, name) for name in PLANNING)):
            setattr(owner, name, partial(self.timed, getattr(owner, name)))

    def timed(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call `function`, and add its times if this thread calls it outside of another timed call."""
        if self.is_planning or threading.current_thread() is not threading.main_thread():
            return function(*args, **kwargs)
        self.is_planning, start = True, clocks()
        try:
            return function(*args, **kwargs)
        finally:
            self.is_planning = False
            self.planning = [
                sum(times) for times in zip(self.planning, clocks(), map(float.__neg__, start), strict=True)
            ]

    def on_step_end(self, *args: Any, **others: Any) -> None:
        self.ends.append([*clocks(), *self.planning])

    def medians_ms(self) -> dict[str, list[float]]:
        """Return the medians of wall time and of this thread's processor time, without and with plans ahead."""
        steps: list[list[list[float]]] = [[], []]
        for step, (start, end) in enumerate(pairwise(self.ends), start=1):
            if step % BLOCK >= UNCOUNTED:
                steps[step // BLOCK % 2].append([b - a for a, b in zip(start, end, strict=True)])
        names = "step", "step, processor", "planning", "planning, processor"
        return {
            name: [round(1e3 * median(times[clock] for times in block), 2) for block in steps]
            for clock, name in enumerate(names)
        }


def clocks() -> list[float]:
    """Return the wall time and the processor time of this thread."""
    return [time.perf_counter(), time.thread_time()]


def documents(steps: int, tokens: int) -> list[dict[str, list[int]]]:
    """Return the documents of all steps, of which `DOCUMENTS` have about `tokens` tokens together."""
    generator = torch.Generator().manual_seed(5)
    lengths = torch.randint(4, 2 * tokens // DOCUMENTS - 4, (steps * DOCUMENTS,), generator=generator).tolist()
    return [{"input_ids": torch.randint(3, 64, (length,), generator=generator).tolist()} for length in lengths]


def train(folder: str, ring: Ring, kind: type, steps: int, tokens: int, limit: int | None) -> tuple[Any, Times]:
    """Train, and return the losses, the weights and the times of this rank, from empty caches of plans."""
    bounded_cache._shared.clear()
    times = Times()
    args = TrainingArguments(
        output_dir=folder, use_cpu=True, report_to=[], save_strategy="no", disable_tqdm=True, max_steps=steps,
        per_device_train_batch_size=DOCUMENTS, logging_steps=1, learning_rate=1e-2, optim="sgd",
    )  # fmt: skip
    trainer = kind(
        model=tiny_model("llama", "eager"), args=args, train_dataset=documents(steps, tokens), callbacks=[times],
        data_collator=DataCollatorWithFlattening(), ring=ring, max_tokens_per_rank=limit,
    )  # fmt: skip
    times.watch(trainer, ring)
    torch.manual_seed(0)
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    weights: list[Tensor] = [p.detach().clone() for p in trainer.model.parameters()]
    return (losses, weights), times


def compare(folder: str, blocks: int, tokens: int, limit: int | None, number: int) -> dict[str, Any]:
    """Return whether the results of this rank are equal, the number of losses, and the medians of its steps."""
    torch.set_num_threads(1)
    TrainingArguments(output_dir=folder, use_cpu=True)  # opens the process group
    results = []
    for kind in (Alone, Alternating):
        with Ring(timeout_s=60.0) as ring:
            result, times = train(folder, ring, kind, 2 * BLOCK * blocks, tokens, limit)
            results.append(result)
    (losses, weights), (losses_ahead, weights_ahead) = results
    equal = losses == losses_ahead and all(map(torch.equal, weights, weights_ahead))
    return {"equal": equal, "losses": len(set(losses)), **times.medians_ms()}


def compared(folder: str, blocks: int, tokens: int, limit: int | None) -> list[dict[str, Any]]:
    """Return what `compare` returns on each of `RANKS` processes."""
    tiny_model("llama", "eager")  # imported here, so that no forked process has to
    return forked_ranks(RANKS, partial(compare, folder, blocks, tokens, limit))
