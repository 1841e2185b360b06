"""Batches that Trainer plans ahead: batches, random numbers, losses and weights are the same as without."""

from __future__ import annotations

import threading
from functools import partial
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers", reason="transformers is not installed")
pytest.importorskip("accelerate", reason="accelerate is not installed, which Trainer needs")

import torch
from transformers import DataCollatorWithFlattening, TrainerCallback, TrainingArguments

from ringattn import InputError, Ring
from tests.adapters.ahead import Alone
from tests.adapters.encoder_decoders import build
from tests.adapters.encoders import encoder
from tests.adapters.models import tiny_model
from tests.adapters.processes import call_in_program
from tests.adapters.test_transformers_trainer import build_trainer
from tests.adapters.trainer import RingTrainer, Stream, sum_of_squares, texts


class Noisy(DataCollatorWithFlattening):
    """A collator that replaces the last token of a batch by a random one, and may fail or return a bad batch."""

    def __init__(self, fails_at: int = 0, bad_at: int = 0) -> None:
        super().__init__()
        self.batches, self.fails_at, self.bad_at = 0, fails_at, bad_at

    def __call__(self, rows: Any, *args: Any, **options: Any) -> Any:
        self.batches += 1
        if self.batches == self.fails_at:
            raise ZeroDivisionError("no such batch")
        batch = super().__call__(rows, *args, **options)
        batch["input_ids"][0, -1] = torch.randint(3, 64, ())
        if self.batches == self.bad_at:
            batch["labels"] = batch["input_ids"].clone()  # labels at the first tokens of documents
        return batch


class Steps(TrainerCallback):
    """A callback that counts the executors that this thread makes in each step, and may stop the training."""

    def __init__(self, stops_at: int = 0) -> None:
        self.made: list[int] = []
        self.done, self.stops_at, self.is_running = 0, stops_at, False

    def count(self, ring: Ring, call: Any, backward: bool) -> Any:
        """Make an executor, in place of `Ring._new_executor`."""
        if self.is_running and threading.current_thread() is threading.main_thread():
            self.made[-1] += 1
        return type(ring)._new_executor(ring, call, backward)

    def on_step_begin(self, *args: Any, **others: Any) -> None:
        self.made.append(0)
        self.is_running = True

    def on_step_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        self.done, self.is_running = self.done + 1, False
        control.should_training_stop |= self.done == self.stops_at


def rows() -> list[dict[str, list[int]]]:
    """Return 20 texts of different lengths."""
    return [{"input_ids": row["input_ids"] * repeats} for repeats in (1, 2) for row in texts()][:20]


def train(
    folder: Path, kind: type, resume: Path | None = None, steps: Steps | None = None, args: Any = None, **given: Any
) -> tuple[Steps, tuple[Any, ...]]:
    """Train, and return the steps and what must not depend on planning. Check that no thread is left, also on errors.

    `resume`: the checkpoint to continue from. `args` and `given`: arguments that replace the usual ones.
    """
    options = {
        "output_dir": str(folder), "use_cpu": True, "report_to": [], "disable_tqdm": True, "save_strategy": "no",
        "max_steps": 6, "per_device_train_batch_size": 3, "logging_steps": 1, "learning_rate": 1e-2,
    }  # fmt: skip
    steps = steps or Steps()
    arguments: dict[str, Any] = {
        "model": tiny_model("llama", "eager", attention_dropout=0.3), "train_dataset": rows(),
        "data_collator": Noisy(),
    } | given  # fmt: skip
    with Ring() as ring:  # a new one, because the dropout seeds of a ring do not repeat
        trainer = kind(ring=ring, args=TrainingArguments(**options | (args or {})), callbacks=[steps], **arguments)
        torch.manual_seed(0)  # the first Trainer of a process draws more random numbers until here
        ring._new_executor = partial(steps.count, ring)  # type: ignore[method-assign]
        try:
            trainer.train(resume_from_checkpoint=resume and str(resume))
        finally:
            assert not [thread for thread in threading.enumerate() if thread.name == "ringattn-plan"]
    weights = [p.detach().clone() for p in trainer.model.parameters()]
    losses = [entry.get("loss", entry.get("eval_loss")) for entry in trainer.state.log_history]
    return steps, (losses, weights, torch.get_rng_state(), arguments["data_collator"].batches)


def check_same(ours: tuple[Any, ...], theirs: tuple[Any, ...]) -> None:
    """Check that losses, weights, the state of the generator and the number of read batches are equal."""
    assert ours[0] == theirs[0] and ours[3] == theirs[3]
    assert torch.equal(ours[2], theirs[2]) and all(map(torch.equal, ours[1], theirs[1]))


CASES: dict[str, tuple[dict[str, Any], dict[str, Any], list[int]]] = {
    "plain": ({}, {}, [1, 2]),
    "epochs": ({"max_steps": -1, "num_train_epochs": 2}, {}, [1, 2, 8]),
    "accumulated": ({"gradient_accumulation_steps": 2}, {}, [1, 5]),
    "evaluated": ({"eval_strategy": "steps", "eval_steps": 2}, {"eval_dataset": texts()[:2]}, [1, 2]),
    "streamed": ({"accelerator_config": {"dispatch_batches": False}}, {"train_dataset": Stream(rows())}, [1, 2]),
    "divided": ({}, {"max_tokens_per_rank": 80}, [1, 2]),
    "custom loss": ({}, {"compute_loss_func": sum_of_squares}, [1, 2]),
}
"""By name: the TrainingArguments and the arguments of Trainer that differ, and the steps that plan their batches.

Before the first two batches no pass has run, and the first batch of an epoch is not read before its step.
"""


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=[pytest.mark.slow] if case != "plain" else []) for case in CASES]
)
def test_steps_do_not_plan_and_nothing_else_changes(case: str, tmp_path: Path) -> None:
    args, given, planning = CASES[case]
    alone, expected = train(tmp_path, Alone, args=args, **given)
    ahead, results = train(tmp_path, RingTrainer, args=args, **given)
    check_same(results, expected)
    assert len(alone.made) == len(ahead.made) >= 6 and all(alone.made)
    assert [step for step, made in enumerate(ahead.made, start=1) if made] == planning


@pytest.mark.slow
def test_a_resumed_run_skips_the_same_batches_and_plans_ahead(tmp_path: Path) -> None:
    expected = train(tmp_path, Alone, args={"save_strategy": "steps", "save_steps": 2})[1]
    first = tmp_path / "checkpoint-2"
    alone = train(tmp_path, Alone, resume=first)[1]
    ahead, results = train(tmp_path, RingTrainer, resume=first)
    check_same(results, alone)
    assert results[0] == expected[0] and len(ahead.made) == 4
    assert [made > 0 for made in ahead.made] == [True, True, False, False]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("data", "error"), [({"fails_at": 4}, ZeroDivisionError), ({"bad_at": 4}, InputError)], ids=["fails", "bad"]
)
def test_a_bad_batch_fails_in_the_same_step(data: dict[str, int], error: type[Exception], tmp_path: Path) -> None:
    done = []
    for kind in (Alone, RingTrainer):
        steps = Steps()
        with pytest.raises(error):
            train(tmp_path, kind, steps=steps, data_collator=Noisy(**data))
        done.append(steps.done)
    assert done[0] == done[1] == (2 if "fails_at" in data else 3)  # accelerate reads one batch ahead


@pytest.mark.slow
def test_a_stopped_run_reads_no_more(tmp_path: Path) -> None:
    (alone, expected), (ahead, results) = (
        train(tmp_path, kind, steps=Steps(stops_at=3)) for kind in (Alone, RingTrainer)
    )
    check_same(results, expected)
    assert alone.done == ahead.done == 3


@pytest.mark.slow
def test_other_processes_that_collate_leave_the_batches_of_an_update(tmp_path: Path) -> None:
    args = {"dataloader_num_workers": 1, "gradient_accumulation_steps": 3, "max_steps": 2}
    (alone, expected), (ahead, results) = (train(tmp_path, kind, args=args) for kind in (Alone, RingTrainer))
    check_same(results, expected)
    assert alone.made == [6, 6] and ahead.made == [4, 2]  # two executors for each batch


@pytest.mark.parametrize(
    "model", [encoder("RobertaForMaskedLM"), build("T5ForConditionalGeneration")], ids=["positions", "pair"]
)
def test_models_whose_batches_a_thread_cannot_plan(model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """RoBERTa counts positions itself, and T5 attends from one sequence to another."""
    monkeypatch.setattr(Ring, "plan_ahead", lambda *_: 1 // 0)
    with Ring() as ring:
        build_trainer(tmp_path, ring, model=model, args={"max_steps": 2}).train()


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("limit", [None, 600])
def test_two_processes_with_other_documents_in_each_step(limit: int | None, tmp_path: Path) -> None:
    """Every rank gets the same losses and weights. `pytest -s` prints the medians of the steps, in ms."""
    ranks = call_in_program("tests.adapters.ahead:compared", str(tmp_path), 3, 2048, limit, timeout_s=560.0)
    print(f"max_tokens_per_rank={limit}: ms per step, without and with plans ahead: {ranks[0]}")
    assert all(rank["equal"] and rank["losses"] > 10 for rank in ranks)
