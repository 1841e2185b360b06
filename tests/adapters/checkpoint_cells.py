"""Activation checkpointing in training loops over two ranks, against one process, in float64.

One process computes without checkpoints, without `torch.compile` and with eager attention. Loops over `ring_attention`
and `attend` are those of `tests.adapters.test_recomputation`; Trainers are cases of `tests.adapters.trainer`.
"""

from __future__ import annotations

import copy
from contextlib import nullcontext
from functools import cache
from itertools import product
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ringattn import Ring
from ringattn.adapters.transformers import prepare, shard_batch
from tests.adapters.models import tiny_model
from tests.adapters.processes import forked, forked_ranks, worst_error
from tests.adapters.ranks import in_double, restarting

STEPS = 3
BACKEND = "aot_eager_decomp_partition"
"""Its partitioner recomputes, as that of the default backend does, and it generates no code."""


class Cell(NamedTuple):
    """One combination of checkpoint kind, compilation, batches and number of passes.

    `compiled`: whether torch.compile is applied inside or around the checkpointed region. `passes`: the number of
    forward passes that precede their backward passes.
    """

    kind: str
    compiled: str
    data: str
    passes: int = 1

    @property
    def reference(self) -> Cell:
        """The cell that one process computes for comparison, without checkpoints and torch.compile."""
        return self._replace(kind="plain", compiled="none")


KINDS, COMPILED, DATA = ("reentrant", "non-reentrant"), ("none", "inside", "around"), ("plain", "packed", "changing")
CELLS = [Cell(*values) for values in product(KINDS, COMPILED, DATA, (1, 2, 3))]


def make_batch(data: str, number: int) -> dict[str, Tensor]:
    """Return batch `number`, of one row. Packed batches have equal token counts, but different documents."""
    if data == "packed":
        cuts = [0, 2 + number % 7, 12 + number % 5, 24]
    else:
        cuts = [0, 24 if data == "plain" else 16 + 7 * number % 12]
    tokens = torch.randint(3, 64, (1, cuts[-1]), generator=torch.Generator().manual_seed(number))
    labels = tokens.clone()
    labels[:, cuts[:-1]] = -100
    return {"input_ids": tokens, "labels": labels, "position_ids": restarting(cuts)}


@cache
def make_model(kind: str, compiled: str) -> tuple[Any, Any, Any]:
    """Return the model, the callable that a training loop runs (the model or its compiled form), and initial weights.

    Cells share them, because compilation takes most of the time.
    """
    torch._dynamo.reset()
    model: Any = tiny_model("llama", "eager", num_hidden_layers=1)
    if kind != "plain":
        model.gradient_checkpointing_enable({"use_reentrant": kind == "reentrant"})
        prepare(model)
    if compiled == "inside":
        for layer in model.model.layers:
            layer.self_attn.compile(backend=BACKEND)
            layer.mlp.compile(backend=BACKEND)
    step = torch.compile(model, backend=BACKEND) if compiled == "around" else model
    return model, step, copy.deepcopy(model.state_dict())


def loss_of(cell: Cell, ring: Ring | None, number: int) -> Any:
    """Return the loss of batch `number`. Evaluations are checkpointed too, because the model stays in training mode."""
    model, step, _ = make_model(cell.kind, cell.compiled)
    batch = make_batch(cell.data, number)
    labels = int((batch["labels"][:, 1:] != -100).sum())
    if ring is None:
        return model(**batch, num_items_in_batch=labels).loss
    seq, shard = shard_batch(ring, batch, model=model)
    with ring.activate(seq):
        return step(**shard, num_items_in_batch=labels).loss


@in_double()
def run_loop(cell: Cell, ring: Ring | None) -> list[Tensor]:
    """Return for each step the loss of an evaluation between its forward and backward passes, and the gradients.

    The backward passes run in reverse order: under no activation in step 0, under another sequence in step 1, under
    `activate(None)` in step 2.
    """
    model, _, start = make_model(cell.kind, cell.compiled)
    model.load_state_dict(start)
    weights, results = list(model.parameters()), list[Tensor]()
    for step in range(STEPS):
        losses = [loss_of(cell, ring, cell.passes * step + index) for index in range(cell.passes)]
        with torch.no_grad():
            results.append(loss_of(cell, ring, 9 + step))
        active = None if ring is None or step == 2 else ring.sequence(24, layout="zigzag")
        with nullcontext() if ring is None or step == 0 else ring.activate(active):
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


def compute_errors(*values: list[Any]) -> list[float]:
    """Return the largest error of each cell over both ranks. `values`: the fields of each cell."""
    cells = [Cell(*value) for value in values]
    tiny_model("llama", "eager")  # imports its module, so that no forked process has to
    references = dict.fromkeys(cell.reference for cell in cells)
    (expected,) = forked(lambda: {cell: run_loop(cell, None) for cell in references})

    def rank(number: int) -> list[float]:
        with Ring(timeout_s=60.0) as ring:
            results = ((run_loop(cell, ring), expected[cell.reference]) for cell in cells)
            return [worst_error(zip(*pair, strict=True)) for pair in results]

    return [max(errors) for errors in zip(*forked_ranks(2, rank), strict=True)]
