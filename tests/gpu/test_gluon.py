"""The Gluon kernels on a Hopper GPU agree with the Triton kernels with plain loads, launch by launch.

Without a GPU, `tests/kernels/test_attention_gluon.py` runs their source in a simulation.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from ringattn.core.geometry import CAUSAL, FULL, Band, StridedRange, Tile, TokenRange
from ringattn.engine.blocks import key_blocks, query_blocks, set_flags

pytestmark = pytest.mark.gpu

ROWS = 1024
SCALE = 0.11
Steps = Sequence[Sequence[Tile]]


class Case(NamedTuple):
    """A pass with `rows` query rows and `heads` query heads. The K/V buffer of each step has `k_rows` rows.

    `steps`: the tiles of each step; `group`: the query heads per K/V head.
    """

    steps: Steps
    rows: int = ROWS
    k_rows: int = ROWS
    heads: int = 4
    group: int = 1


def rows(count: int, position: int = 0, stride: int = 1, row: int = 0, row_stride: int = 1) -> TokenRange:
    return TokenRange(StridedRange(position, count, stride), StridedRange(row, count, row_stride))


def one_tile(q: TokenRange, k: TokenRange, band: Band, heads: int = 4) -> Steps:
    return [[Tile(q, k, band, StridedRange(0, heads))]]


LAST_ROWS = rows(512, 1536)
CASES = {
    "full": Case(one_tile(rows(ROWS), rows(ROWS), FULL)),
    "causal": Case(one_tile(rows(ROWS), rows(ROWS), CAUSAL)),
    "window": Case(one_tile(rows(ROWS), rows(ROWS), Band(0, 300))),
    "both sides": Case(one_tile(rows(ROWS), rows(ROWS), Band(-200, 333))),
    "grouped": Case(one_tile(rows(ROWS), rows(ROWS), CAUSAL, 8), heads=8, group=4),
    "ragged": Case(one_tile(rows(517), rows(517), CAUSAL), rows=517, k_rows=517),
    "striped": Case(one_tile(rows(500, 1, 4), rows(500, 2, 4), CAUSAL), rows=500, k_rows=500),
    "strided": Case(one_tile(rows(340, 3, 6, 1, 3), rows(500, 1, 4, 5, 2), Band(-9, 700))),
    "documents": Case([[Tile(rows(300, row=n * 300), rows(300, row=n * 300), CAUSAL, StridedRange(0, 4))
                        for n in range(3)]]),
    "unequal heads": Case([[Tile(rows(300), rows(200, row=n * 200), FULL, StridedRange(n, 1 + n))
                            for n in range(2)]], heads=3),
    "blind": Case(one_tile(rows(400), rows(400, 200), CAUSAL)),
    "ring": Case([one_tile(LAST_ROWS, rows(512, start), CAUSAL)[0] for start in (1536, 1024, 512, 0)],
                 rows=512, k_rows=512),
}  # fmt: skip


class State(NamedTuple):
    out: Tensor
    lse: Tensor


def run_forward(case: Case, kernel: Any, config: Any, inputs: Sequence[Tensor], **how: Any) -> State:
    """Run all launches of a forward pass, and return its out and lse. `how`: more keywords of `kernel`.

    If the blocks can have flags (FIRST, LAST), the state is NaN before the first launch.
    """
    from ringattn.kernels.launch import Kept, Table

    q, keys, values = inputs
    kept, tables = Kept(), [query_blocks(step, config.block_m, config.block_n) for step in case.steps]
    out = torch.zeros(*q.shape[:3], values.shape[4], device="cuda")
    lse = torch.full((2, case.heads, case.rows), -torch.inf, device="cuda")
    result = None
    if set_flags(tables, case.rows, case.heads):
        out.fill_(torch.nan)
        lse.fill_(torch.nan)
        result = torch.full_like(out, torch.nan, dtype=q.dtype)
    for blocks, k, v in zip(tables, keys, values, strict=True):
        table = Table(torch.from_numpy(blocks.blocks).cuda(), torch.from_numpy(blocks.entries).cuda(), blocks.slots)
        call = kernel(q, k, v, out, lse, table, config, scale=SCALE, group=case.group, result=result, **how)
        kept.repeat(call, ())(())
    torch.cuda.synchronize()
    return State(out if result is None else result, lse)


def inputs_of(case: Case, dtype: torch.dtype, dim: int) -> list[Tensor]:
    """Return q, and K and V of all steps. K/V rows that no tile reads are NaN. Keys of 192 have values of 128."""
    make = torch.Generator().manual_seed(dim)
    kv_shape = len(case.steps), case.k_rows, 2, case.heads // case.group
    q, k, v = (
        torch.randn(shape, generator=make).to("cuda", dtype)
        for shape in ((case.rows, 2, case.heads, dim), (*kv_shape, dim), (*kv_shape, 128 if dim == 192 else dim))
    )
    for index, step in enumerate(case.steps):
        read = {row for tile in step for row in tile.k.rows.members()}
        unread = [row for row in range(case.k_rows) if row not in read]
        k[index, unread] = v[index, unread] = torch.nan
    return [q, k, v]


@pytest.fixture(autouse=True)
def _hopper() -> None:
    pytest.importorskip("triton")
    from ringattn.kernels.attention_gluon import gluon_missing

    major, minor = torch.cuda.get_device_capability()
    if why := gluon_missing(10 * major + minor):
        pytest.skip(why)


@pytest.mark.parametrize("programs", [None, 7], ids=["", "7 programs"])
@pytest.mark.parametrize("dim", [64, 128, 192, 256])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("name", CASES)
def test_the_forward_equals_the_triton_kernel(name: str, dtype: torch.dtype, dim: int, programs: int | None) -> None:
    """The outputs of both kernels differ by rounding only.

    Both kernels round each probability by at most half a unit in the last place, sum in float32, and round the result.
    """
    from ringattn.kernels.attention_forward import forward
    from ringattn.kernels.attention_gluon import forward_gluon, gluon_configs, gluon_takes
    from ringattn.kernels.configs import configs_for

    case = CASES[name]
    inputs = inputs_of(case, dtype, dim)
    assert gluon_takes(inputs[0], inputs[1][0], inputs[2][0], 90) is None
    sinks = torch.linspace(-1, 2, case.heads, device="cuda") if name in ("ring", "causal") else None
    plain = configs_for(90, dtype, dim).forward
    theirs = run_forward(case, forward, plain._replace(form="pointers"), inputs, sinks=sinks)
    config = gluon_configs(dim).forward
    ours = run_forward(case, forward_gluon, config, inputs, sinks=sinks, programs=programs)
    unit = torch.finfo(dtype).eps
    largest = float(inputs[2].nan_to_num(0).abs().max())
    torch.testing.assert_close(ours.lse, theirs.lse, rtol=0, atol=2e-5)
    torch.testing.assert_close(ours.out.float(), theirs.out.float(), rtol=unit, atol=largest * unit)


@pytest.mark.parametrize("name", ["causal", "ring", "strided"])
def test_the_forward_has_the_same_bits_each_time(name: str) -> None:
    """The results have the same bits in each run and for each number of programs.

    They would vary if a kernel read a buffer before it was filled.
    """
    from ringattn.kernels.attention_gluon import CONFIG, forward_gluon

    inputs = inputs_of(CASES[name], torch.bfloat16, 128)
    first = run_forward(CASES[name], forward_gluon, CONFIG, inputs)
    for programs in (None, 1, 5, 131, None):
        again = run_forward(CASES[name], forward_gluon, CONFIG, inputs, programs=programs)
        assert torch.equal(again.out, first.out) and torch.equal(again.lse, first.lse)


# --- the backward kernels against the Triton kernels with plain loads, launch by launch -------------------------------


Launches = tuple[Callable[..., Any] | None, Any, Callable[..., Any], Any]
"""The function that makes the launch of dQ, its block sizes, and both for dK and dV.

If there is no launch of dQ, the launch of dK and dV adds to dQ.
"""


def rows_of(case: Case, q: Tensor, keys: Tensor, values: Tensor, dout: Tensor) -> tuple[Tensor, Tensor]:
    """Return lse and delta of the pass. The Triton kernel computes out and lse in float32."""
    from ringattn.kernels.attention_forward import forward
    from ringattn.kernels.configs import configs_for
    from ringattn.kernels.launch import Table

    config = configs_for(90, torch.float32, q.shape[3]).forward
    out = torch.zeros(dout.shape, device=q.device)
    lse = torch.full((q.shape[1], case.heads, case.rows), -torch.inf, device=q.device)
    for step, k, v in zip(case.steps, keys.float(), values.float(), strict=True):
        blocks = query_blocks(step, config.block_m, config.block_n)
        table = Table(*(torch.from_numpy(x).to(q.device) for x in blocks[:2]), blocks.slots)
        forward(q.float(), k, v, out, lse, table, config, scale=SCALE, group=case.group).run()
    return lse, torch.einsum("nbhd,nbhd->bhn", out, dout.float()).contiguous()


def run_backward(
    case: Case, launches: Launches, inputs: Sequence[Tensor], per_row: Sequence[Tensor], **how: Any
) -> list[Tensor]:
    """Run all launches of a backward pass. Return [dQ, dK, dV], with dK and dV of all steps, in float32.

    `per_row`: lse and delta.
    """
    from ringattn.kernels.launch import Table

    q, keys, values, dout = inputs
    by_query, query_config, by_key, key_config = launches
    dq, dk, dv = (torch.zeros(x.shape, device=q.device) for x in (q, keys, values))
    for index, step in enumerate(case.steps):
        queries = query_blocks(step, query_config.block_m, query_config.block_n)
        by_keys = key_blocks(step, case.group, key_config.block_n, key_config.block_m)
        tables = [
            Table(*(torch.from_numpy(x).to(q.device) for x in side[:2]), side.slots) for side in (queries, by_keys)
        ]
        rows = q, keys[index], values[index], dout, *per_row
        options = {"scale": SCALE, "group": case.group, **how}
        if by_query is None:
            options["dq"] = dq
        else:
            by_query(*rows, dq, tables[0], query_config, **options).run()
        by_key(*rows, dk[index], dv[index], tables[1], key_config, **options).run()
    return [dq, dk, dv]


def triton_launches(dtype: torch.dtype, dim: int) -> Launches:
    from ringattn.kernels.attention_backward import grad_kv, grad_q
    from ringattn.kernels.configs import configs_for

    table = configs_for(90, dtype, dim, "pointers")
    return grad_q, table.grad_q, grad_kv, table.grad_kv


def gluon_launches(dim: int, fused: bool = False) -> Launches:
    from ringattn.kernels.attention_gluon import gluon_configs, grad_kv_gluon, grad_q_gluon

    configs = gluon_configs(dim)
    return None if fused else grad_q_gluon, configs.grad_q, grad_kv_gluon, configs.grad_kv


def errors(gradients: Sequence[Tensor], references: Sequence[Tensor]) -> list[float]:
    """Return the relative error of each gradient in the Frobenius norm."""
    return [
        float((gradient - reference).norm() / reference.norm())
        for gradient, reference in zip(gradients, references, strict=True)
    ]


@pytest.mark.parametrize("programs", [None, 7], ids=["", "7 programs"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize(
    ("dim", "fused"), [(64, False), (128, False), (192, False), (256, False), (64, True), (128, True)],
    ids=["64", "128", "192", "256", "64-fused", "128-fused"],
)  # fmt: skip
@pytest.mark.parametrize("name", CASES)
def test_the_backward_is_as_exact_as_the_triton_kernels(
    name: str, fused: bool, dtype: torch.dtype, dim: int, programs: int | None
) -> None:
    """Compared with float32 kernels, the Gluon kernels' error is at most 1.25 times that of the Triton kernels."""
    case = CASES[name]
    q, keys, values = inputs_of(case, dtype, dim)
    inputs = q, keys, values, torch.randn_like(q[..., : values.shape[4]])
    per_row = rows_of(case, *inputs)
    exact = run_backward(case, triton_launches(torch.float32, dim), [x.float() for x in inputs], per_row)
    theirs = errors(run_backward(case, triton_launches(dtype, dim), inputs, per_row), exact)
    ours = errors(run_backward(case, gluon_launches(dim, fused), inputs, per_row, programs=programs), exact)
    assert all(our_error <= 1.25 * their_error for our_error, their_error in zip(ours, theirs, strict=True)), (
        ours,
        theirs,
    )


@pytest.mark.parametrize("name", ["causal", "ring", "strided"])
def test_gradients_have_the_same_bits_each_time(name: str) -> None:
    """The gradients have the same bits in each run and for each number of programs.

    They would vary if a kernel read a buffer before it was filled.
    """
    case = CASES[name]
    q, keys, values = inputs_of(case, torch.bfloat16, 128)
    inputs = q, keys, values, torch.randn_like(q)
    per_row = rows_of(case, *inputs)
    first = run_backward(case, gluon_launches(128), inputs, per_row)
    for programs in (None, 1, 5, 131, None):
        again = run_backward(case, gluon_launches(128), inputs, per_row, programs=programs)
        assert all(torch.equal(x, y) for x, y in zip(again, first, strict=True))
