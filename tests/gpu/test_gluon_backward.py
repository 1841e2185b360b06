"""The Gluon kernels of the backward on a Hopper GPU against the Triton kernels by plain loads, launch by launch.

Without a GPU, `tests/kernels/test_attention_gluon_backward.py` runs their source in a simulation.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from ringattn.engine.blocks import key_blocks, query_blocks
from tests.gpu.test_gluon import CASES, SCALE, Case, inputs_of

pytestmark = pytest.mark.gpu

Launches = tuple[Callable[..., Any], Any, Callable[..., Any], Any]
"""What makes the launch of dQ and its blocks, and of dK with dV and its blocks."""


@pytest.fixture(autouse=True)
def _hopper() -> None:
    pytest.importorskip("triton")
    from ringattn.kernels.attention_gluon import gluon_missing

    major, minor = torch.cuda.get_device_capability()
    if why := gluon_missing(10 * major + minor):
        pytest.skip(why)


def rows_of(case: Case, q: Tensor, keys: Tensor, values: Tensor, dout: Tensor) -> tuple[Tensor, Tensor]:
    """lse and delta of the pass, by the Triton kernel in float32."""
    from ringattn.kernels.attention_forward import forward
    from ringattn.kernels.configs import configs_for
    from ringattn.kernels.launch import Table

    config = configs_for(90, torch.float32, q.shape[3]).forward
    out = torch.zeros(q.shape, device=q.device)
    lse = torch.full((q.shape[1], case.heads, case.rows), -torch.inf, device=q.device)
    for step, k, v in zip(case.steps, keys.float(), values.float(), strict=True):
        made = query_blocks(step, config.block_m, config.block_n)
        table = Table(*(torch.from_numpy(x).to(q.device) for x in made[:2]), made.slots)
        forward(q.float(), k, v, out, lse, table, config, scale=SCALE, group=case.group).run()
    return lse, torch.einsum("nbhd,nbhd->bhn", out, dout.float()).contiguous()


def differentiated(
    case: Case, launches: Launches, inputs: Sequence[Tensor], per_row: Sequence[Tensor], **how: Any
) -> list[Tensor]:
    """dQ, dK and dV of all steps, in float32, added to zeros."""
    from ringattn.kernels.launch import Table

    q, keys, values, dout = inputs
    by_query, query_config, by_key, key_config = launches
    dq, dk, dv = (torch.zeros(x.shape, device=q.device) for x in (q, keys, values))
    for at, step in enumerate(case.steps):
        queries = query_blocks(step, query_config.block_m, query_config.block_n)
        held = key_blocks(step, case.group, key_config.block_n, key_config.block_m)
        tables = [Table(*(torch.from_numpy(x).to(q.device) for x in made[:2]), made.slots) for made in (queries, held)]
        rows = q, keys[at], values[at], dout, *per_row
        facts = {"scale": SCALE, "group": case.group, **how}
        by_query(*rows, dq, tables[0], query_config, **facts).run()
        by_key(*rows, dk[at], dv[at], tables[1], key_config, **facts).run()
    return [dq, dk, dv]


def triton_launches(dtype: torch.dtype, dim: int) -> Launches:
    from ringattn.kernels.attention_backward import grad_kv, grad_q
    from ringattn.kernels.configs import configs_for

    table = configs_for(90, dtype, dim, "pointers")
    return grad_q, table.grad_q, grad_kv, table.grad_kv


def gluon_launches(dim: int) -> Launches:
    from ringattn.kernels.attention_gluon import GRAD_KV, GRAD_Q, grad_kv_gluon, grad_q_gluon

    return grad_q_gluon, GRAD_Q[dim], grad_kv_gluon, GRAD_KV[dim]


def errors(found: Sequence[Tensor], true: Sequence[Tensor]) -> list[float]:
    """Relative, over all of each gradient."""
    return [float((got - exact).norm() / exact.norm()) for got, exact in zip(found, true, strict=True)]


@pytest.mark.parametrize("programs", [None, 7], ids=["", "7 programs"])
@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("name", CASES)
def test_as_exact_as_the_triton_kernels(name: str, dtype: torch.dtype, dim: int, programs: int | None) -> None:
    """The same kernels in float32 are the reference; within 1.25 times the error of the Triton kernels."""
    case = CASES[name]
    q, keys, values = inputs_of(case, dtype, dim)
    inputs = q, keys, values, torch.randn_like(q)
    per_row = rows_of(case, *inputs)
    true = differentiated(case, triton_launches(torch.float32, dim), [x.float() for x in inputs], per_row)
    theirs = errors(differentiated(case, triton_launches(dtype, dim), inputs, per_row), true)
    ours = errors(differentiated(case, gluon_launches(dim), inputs, per_row, programs=programs), true)
    assert all(mine <= 1.25 * other for mine, other in zip(ours, theirs, strict=True)), (ours, theirs)


@pytest.mark.parametrize("name", ["causal", "ring", "strided"])
def test_the_same_bits_each_time(name: str) -> None:
    """A buffer that was read too early would hold other numbers at other times."""
    case = CASES[name]
    q, keys, values = inputs_of(case, torch.bfloat16, 128)
    inputs = q, keys, values, torch.randn_like(q)
    per_row = rows_of(case, *inputs)
    first = differentiated(case, gluon_launches(128), inputs, per_row)
    for programs in (None, 1, 5, 131, None):
        again = differentiated(case, gluon_launches(128), inputs, per_row, programs=programs)
        assert all(torch.equal(x, y) for x, y in zip(again, first, strict=True))
