"""Activation checkpointing over two ranks: `python -m tests.adapters.checkpoint_cells FOLDER [CELL ...]`.

Writes cells.json to the folder: for each cell the largest relative error, or the text of what it raised. Needs trl,
peft and datasets, which `tests.adapters.environments` installs. One process computes without checkpoints, without
`torch.compile` and with eager attention. Everything is computed in float64. Loops over `ring_attention` and `attend`
are those of `tests.adapters.test_recomputation`.
"""

from __future__ import annotations

import copy
import json
import sys
import time
from contextlib import nullcontext
from functools import cache, partial
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import Trainer, TrainingArguments

from ringattn import Ring
from ringattn.adapters.accelerate import RingParallelismConfig
from ringattn.adapters.transformers import prepare, shard_batch
from tests.adapters.models import tiny_model
from tests.adapters.processes import forked, forked_ranks, worst_error
from tests.adapters.ranks import in_double, restarting
from tests.adapters.trainer import RingTrainer

LOOP = "transformers"
"""An own training loop over a model of transformers."""
TRAINERS = "RingTrainerMixin", "RingParallelismConfig", "RingSFTTrainer"
DATA = "plain", "packed", "changing"
KINDS = "reentrant", "non-reentrant"
COMPILED = "none", "inside", "around"
"""Where torch.compile is, seen from the checkpoint."""
PASSES = 1, 2, 3
STEPS = 3
BACKEND = "aot_eager_decomp_partition"
"""Its partitioner recomputes, as that of the default backend does, and it generates no code."""


class Cell(NamedTuple):
    """One combination. `passes`: forward passes before their backward passes; Trainers take strict turns."""

    host: str
    kind: str
    compiled: str
    data: str
    passes: int = 1

    @property
    def reference(self) -> Cell:
        """The cell that one process computes for comparison."""
        return self._replace(kind="plain", compiled="none")

    def __str__(self) -> str:
        return " | ".join(str(value) for value in self)


CELLS = [Cell(*values) for values in product([LOOP], KINDS, COMPILED, DATA, PASSES)]
CELLS += [Cell(*values) for values in product(TRAINERS, KINDS, COMPILED, DATA)]


def documents(data: str, number: int) -> list[int]:
    """The cumulative lengths of row `number`; packed rows have as many tokens and other documents."""
    if data == "packed":
        return [0, 2 + number % 7, 12 + number % 5, 24]
    return [0, 24 if data == "plain" else 16 + 7 * number % 12]


def row(data: str, number: int) -> dict[str, Tensor]:
    """A batch of one row for a model of transformers."""
    cuts = documents(data, number)
    tokens = torch.randint(3, 64, (1, cuts[-1]), generator=torch.Generator().manual_seed(number))
    labels = tokens.clone()
    labels[:, cuts[:-1]] = -100
    return {"input_ids": tokens, "labels": labels, "position_ids": restarting(cuts)}


# --- training loops --------------------------------------------------------------------------------------------------


def run_loop(cell: Cell, ring: Ring | None) -> list[Tensor]:
    """The gradients of each step and the loss of an evaluation between its forward and backward passes.

    Backward runs the last pass first, under no activation, then under another sequence, then under `activate(None)`.
    """
    weights = list(make_model(*cell[:3])[0].parameters())
    loss_of = partial(transformers_loss, cell, ring)
    results = []
    for step in range(STEPS):
        losses = [loss_of(cell.passes * step + index) for index in range(cell.passes)]
        with torch.no_grad():
            results.append(loss_of(9 + step))
        other = None if ring is None or step == 2 else ring.sequence(24, layout="zigzag")
        with nullcontext() if ring is None or step == 0 else ring.activate(other):
            for loss in reversed(losses):
                loss.backward()
        gradients = [weight.grad for weight in weights if weight.grad is not None]
        if ring is not None:
            ring.all_reduce([results[-1], *gradients])
        results += gradients
        with torch.no_grad():
            for weight in weights:
                weight -= 0.01 * weight.grad
                weight.grad = None
    return results


@cache
def make_model(host: str, kind: str, compiled: str) -> tuple[Any, Any, Any]:
    """The model, what a training loop calls, and the weights to begin with.

    Cells share it, because compiling is the most of their work.
    """
    torch._dynamo.reset()
    model: Any = tiny_model("llama", "eager", num_hidden_layers=1)
    if host == LOOP and kind != "plain":
        model.gradient_checkpointing_enable({"use_reentrant": kind == "reentrant"})
        prepare(model)
    if compiled == "inside":
        for layer in model.model.layers:
            layer.self_attn.compile(backend=BACKEND)
            layer.mlp.compile(backend=BACKEND)
    step = torch.compile(model, backend=BACKEND) if compiled == "around" and host == LOOP else model
    return model, step, copy.deepcopy(model.state_dict())


def transformers_loss(cell: Cell, ring: Ring | None, number: int) -> Tensor:
    """The loss of row `number`. Evaluations are checkpointed too, because the model stays in training mode."""
    model, step, _ = make_model(*cell[:3])
    batch = row(cell.data, number)
    labels = int((batch["labels"][:, 1:] != -100).sum())
    if ring is None:
        return model(**batch, num_items_in_batch=labels).loss
    seq, shard = shard_batch(ring, batch, model=model)
    with ring.activate(seq):
        return step(**shard, num_items_in_batch=labels).loss


# --- trainers --------------------------------------------------------------------------------------------------------


def stacked(rows: list[dict[str, list[int]]]) -> dict[str, Tensor]:
    """A batch of rows of one length."""
    return {name: torch.tensor([row[name] for row in rows]) for name in rows[0]}


def train(folder: Path, cell: Cell, ring: Ring | None) -> list[Tensor]:
    """The loss of an evaluation after each of three steps of two passes, and how all steps changed the weights."""
    model, _, start = make_model(*cell[:3])
    rows = [{name: x[0].tolist() for name, x in row(cell.data, number).items()} for number in range(2 * STEPS + 2)]
    options: dict[str, Any] = {
        "output_dir": str(folder), "per_device_train_batch_size": 1, "per_device_eval_batch_size": 1,
        "gradient_accumulation_steps": 2, "max_steps": STEPS, "eval_strategy": "steps", "eval_steps": 1,
        "learning_rate": 1e-2, "optim": "sgd", "report_to": [], "save_strategy": "no", "disable_tqdm": True,
        "use_cpu": True, "remove_unused_columns": False, "gradient_checkpointing": cell.kind != "plain",
    }  # fmt: skip
    if cell.kind != "plain":
        options["gradient_checkpointing_kwargs"] = {"use_reentrant": cell.kind == "reentrant"}
    if cell.compiled == "around":
        options |= {"torch_compile": True, "torch_compile_backend": "aot_eager"}
    datasets: Any = rows[: 2 * STEPS], rows[2 * STEPS :]
    arguments: dict[str, Any] = {"model": model, "data_collator": stacked}
    make_options: Any = TrainingArguments
    make: Any = Trainer
    make_over_ring: Any = RingTrainer
    if cell.host == "RingSFTTrainer":
        from datasets import Dataset
        from trl import SFTConfig, SFTTrainer

        from ringattn.adapters.trl import RingSFTTrainer
        from tests.adapters.sft import tokenizer

        make_options, make, make_over_ring = SFTConfig, SFTTrainer, RingSFTTrainer
        datasets = [Dataset.from_list(part) for part in datasets]
        options |= {"dataset_kwargs": {"skip_prepare_dataset": True}, "bf16": False, "max_length": None}
        arguments["processing_class"] = tokenizer()
    if ring is not None and cell.host == "RingParallelismConfig":
        options["parallelism_config"] = RingParallelismConfig(cp_size=ring.world_size)
    elif ring is not None:
        make, arguments["ring"] = make_over_ring, ring
    train_dataset, eval_dataset = datasets
    args = make_options(**options)
    trainer = make(args=args, train_dataset=train_dataset, eval_dataset=eval_dataset, **arguments)
    trainer.train()
    losses = [entry["eval_loss"] for entry in trainer.state.log_history if "eval_loss" in entry]
    changes = [weight.detach() - start[name] for name, weight in trainer.model.named_parameters()]
    return [torch.tensor(losses), *changes]


# --- processes -------------------------------------------------------------------------------------------------------


def run_cell(folder: Path, cell: Cell, ring: Ring | None) -> list[Tensor]:
    """What the host of the cell computes over the ring, or in one process without checkpoints and compilation."""
    with in_double():
        model, _, weights = make_model(*cell[:3])
        model.load_state_dict(weights)
        return run_loop(cell, ring) if cell.host == LOOP else train(folder, cell, ring)


def compute_references(folder: Path, cells: list[Cell]) -> None:
    """Save what one process computes for these cells."""
    torch.save({str(cell): run_cell(folder, cell, None) for cell in cells}, folder / "references.pt")


def compute_cells(folder: Path, cells: list[Cell], number: int) -> dict[str, float | str]:
    """Return what each cell is on this rank: its largest error, or the text of what was raised."""
    references = torch.load(folder / "references.pt")
    verdicts: dict[str, float | str] = {}
    for cell in cells:
        start = time.monotonic()
        try:
            with Ring(timeout_s=60.0) as ring:
                tensors = run_cell(folder, cell, ring)
            pairs = zip(tensors, references[str(cell.reference)], strict=True)
            verdicts[str(cell)] = worst_error(pairs)
        except Exception as error:
            verdicts[str(cell)] = f"{type(error).__name__}: {error}"
        print(f"{number} {cell}: {verdicts[str(cell)]} ({time.monotonic() - start:.1f} s)", file=sys.stderr, flush=True)
    return verdicts


def main(folder: Path, *names: str) -> None:
    """Compute these cells, or all, and save and print the worse verdict of both ranks."""
    torch.set_num_threads(1)
    by_name = {str(cell): cell for cell in CELLS}
    cells = [by_name[name] for name in names or by_name]
    tiny_model("llama", "eager")  # imports its module, so that no forked process has to
    forked(partial(compute_references, folder, list(dict.fromkeys(cell.reference for cell in cells))))
    first, second = forked_ranks(2, partial(compute_cells, folder, cells))
    verdicts = {name: max(first[name], second[name], key=lambda x: (isinstance(x, str), x)) for name in first}
    (folder / "cells.json").write_text(json.dumps(verdicts, indent=1), encoding="utf-8")
    print(json.dumps(verdicts, indent=1))


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
