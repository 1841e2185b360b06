"""Checks of the kernels' guarantees on any device.

test_kernels.py runs them on a GPU, and tests/kernels/interpreter/engine_cases.py in Triton's interpreter.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ringattn.core.geometry import CAUSAL, StridedRange, Tile, TokenRange
from ringattn.engine.base import KV, BackwardInputs, Engine, Softmax
from ringattn.engine.plain import PlainEngine
from ringattn.engine.triton import TritonEngine

HEADS, SCALE = 4, 0.1


def inputs(dtype: torch.dtype, device: str, rows: int, dim: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return q, k and v, each (rows, batch, heads, dim), on a device; the numbers are the same on every device."""
    generator = torch.Generator().manual_seed(rows)
    q, k, v = (torch.randn(rows, 2, HEADS, dim, generator=generator).to(device, dtype) for _ in range(3))
    return q, k, v


def ring_tiles(rows: int, steps: int) -> list[tuple[Tile, ...]]:
    """Return the tiles of the last of `steps` ranks for each step of a causal ring. Its first step has its own keys.

    `rows`: the number of rows of all ranks together.
    """
    n = rows // steps
    q = TokenRange(StridedRange(rows - n, n), StridedRange(0, n))
    return [
        (Tile(q, TokenRange(StridedRange(start, n), StridedRange(start, n)), CAUSAL, StridedRange(0, HEADS)),)
        for start in reversed(range(0, rows, n))
    ]


def ring_errors(engine: TritonEngine, dtype: torch.dtype, device: str, rows: int, dim: int, steps: int) -> list[float]:
    """Return the relative errors (against float64) of a forward pass in `steps` steps and of the same pass in one."""
    q, k, v = inputs(dtype, device, rows, dim)
    n = rows // steps
    q, tiles = q[-n:], ring_tiles(rows, steps)
    reference = run_forward(PlainEngine(), *(x.double() for x in (q, k, v)), tiles)
    single_step = [(tiles[0][0]._replace(k=TokenRange(StridedRange(0, rows), StridedRange(0, rows))),)]
    results = [run_forward(engine, q, k, v, passed).double() for passed in (tiles, single_step)]
    return [float((x - reference).norm() / reference.norm()) for x in results]


def whole_pass(engine: Engine, works: Sequence[Any], q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Run forward and backward in a single step, with q as the gradient of out. Return out and dQ."""
    state = engine.begin(works, q, v.shape[3], None)
    engine.attend(q, KV(k, v), state, works[0])
    out = state.out.finalized(q.dtype)
    inputs = BackwardInputs(q, out, state.lse, None, engine.delta(q, out, None))
    dq, (dk, dv) = engine.begin_grad(works, q, v.shape[3]), (torch.zeros_like(x, dtype=state.lse.dtype) for x in (k, v))
    engine.attend_grad(q, KV(k, v), inputs, dq, KV(dk, dv), works[0])
    return out, dq.finalized(q.dtype)


def run_forward(
    engine: TritonEngine | PlainEngine, q: Tensor, k: Tensor, v: Tensor, steps: list[tuple[Tile, ...]]
) -> Tensor:
    works = engine.prepare(steps, Softmax(SCALE), q.shape[0], HEADS)
    state = engine.begin(works, q, v.shape[3], None)
    for work in works:
        engine.attend(q, KV(k, v), state, work)  # type: ignore[arg-type]
    return state.out.finalized(q.dtype)
