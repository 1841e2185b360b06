"""The memory of an attention pass that is predicted from plans agrees with the memory that the pass takes.

The reference for a kernel's internal buffers is torch's profiler, which records every allocation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from ringattn.bench import attention_memory
from ringattn.bench.attention_memory import Drawn, attention_scratch_bytes, drawn, greatest_deviation, on_rank
from ringattn.bench.storage_meter import StorageMeter
from ringattn.core.geometry import CAUSAL, FULL, Band, StridedRange, Tile, TokenRange
from ringattn.engine.aten import AtenEngine, kernel_bytes
from ringattn.engine.base import KV, BackwardInputs, Engine, Sizes, Softmax, accumulator_dtype
from ringattn.engine.plain import PlainEngine
from ringattn.planner.memory import MemoryPlan
from ringattn.ring import Ring
from ringattn.testing import run_ranks
from tests.covering import thinned_by

SEED, COUNT, WITHIN = 6, 20, 0.02
LARGE = Drawn(2, 1200, 1, 4, 2, 64, 64, "float32", "causal", "zigzag", "ring", "aten")


def allocated(fn: Callable[[], Any]) -> int:
    """Return the peak of the live bytes that torch's CPU allocator allocates while `fn` runs."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as record:
        kept = fn()
    events = sorted((e for e in record.profiler.kineto_results.events() if e.name() == "[memory]"), key=_when)
    del kept
    live = most = 0
    for event in events:
        live += event.nbytes()
        most = max(most, live)
    return most


def _when(event: Any) -> int:
    return int(event.start_ns())


def bytes_on_ranks(configuration: Drawn) -> list[dict[str, int]]:
    return run_ranks(configuration.ranks, lambda ring: on_rank(ring, **asdict(configuration)))


# --- the pass --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "call",
    thinned_by(lambda call: (call.ranks, call.mask, call.schedule, call.engine, call.dtype), drawn(COUNT, SEED)),
    ids=lambda call: f"{call.ranks} ranks {call}",
)
def test_predicted_and_measured_peaks_agree(call: Drawn) -> None:
    by_rank = bytes_on_ranks(call)
    assert greatest_deviation(by_rank) <= WITHIN
    for rank in by_rank:
        assert rank["saved_bytes"] == rank["saved_predicted_bytes"]
        assert rank["forward_high_water_bytes"] == rank["forward_slots_bytes"]
        assert rank["high_water_bytes"] == rank["slots_bytes"]


def test_the_fused_engine_is_predicted_to_the_byte() -> None:
    assert greatest_deviation(bytes_on_ranks(LARGE)) == 0.0


@pytest.mark.parametrize("engine", ["aten", "plain"])
def test_received_queries_are_counted(engine: str) -> None:
    call = replace(LARGE, ranks=4, length_tokens=4096, mask="dilated", layout="contiguous", schedule="all_to_all",
                   engine=engine)  # fmt: skip
    assert greatest_deviation(bytes_on_ranks(call)) <= WITHIN


def test_a_call_without_gradients_saves_nothing() -> None:
    """`memory_plan` equals the measurement to the byte, on every rank, and `print` shows it."""

    def body(ring: Ring) -> tuple[MemoryPlan, int]:
        seq = ring.sequence(1200, layout="contiguous")
        q = torch.randn(1, seq.counts[ring.rank], 4, 64, dtype=torch.bfloat16)
        options: dict[str, Any] = {"schedule": "all_gather", "causal": True, "window": (35, 0)}
        planned = ring.memory_plan(seq, q=q, k=q, v=q, backward=False, **options)
        with StorageMeter(attention_scratch_bytes) as meter:
            ring.attention(q, q, q, seq, **options)
        return planned, meter.peak_bytes

    by_rank = run_ranks(3, body)
    planned = by_rank[0][0]
    assert planned.peak_bytes == tuple(peak for _, peak in by_rank) and planned.saved_bytes == (0, 0, 0)
    assert planned.backward == () and planned.forward[1].inputs_bytes == 3 * 400 * 4 * 64 * 2
    assert "memory of backward" not in str(planned) and f"{by_rank[2][1] / 2**20:,.3f}" in str(planned)


@pytest.mark.slow
def test_the_bench_prints_a_row_for_each_configuration(tmp_path: Any, capsys: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(attention_memory, "drawn", lambda count, seed: [replace(LARGE, ranks=1)] * count)
    data = attention_memory.main(["configurations=1", f"results={tmp_path}"])
    (record,) = data["configurations"]
    assert all(rank["resident_growth_bytes"] > 0 for rank in record["ranks"])
    for shown in ((tmp_path / "attention_memory.md").read_text(), capsys.readouterr().out):
        assert record["name"] in shown


# --- engines ---------------------------------------------------------------------------------------------------------

SHAPES = [  # query rows, key rows, batch, query heads, K/V heads, dims
    (300, 300, 1, 4, 2, 64, 64), (300, 300, 2, 4, 4, 32, 64), (900, 200, 2, 2, 1, 64, 64), (100, 900, 1, 2, 1, 64, 32),
    (30, 20, 2, 4, 4, 8, 8),
]  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("band", [FULL, CAUSAL, Band(-(1 << 60), 0), Band(0, 90)], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize(
    ("engine", "scale"),
    [(AtenEngine(torch.device("cpu")), 0.1), (AtenEngine(torch.device("cpu")), -0.1), (PlainEngine(), 0.1)],
    ids=["aten", "aten-negative-scale", "plain"],
)
def test_workspace_equals_the_allocated_bytes(
    engine: Engine, scale: float, shape: tuple[int, ...], band: Band, dtype: torch.dtype
) -> None:
    """An engine's `workspace_bytes` equals what it allocates, except for two 0-dimensional tensors of torch.where."""
    check_workspace(engine, Softmax(scale), shape, band, dtype)


@pytest.mark.parametrize("band", [FULL, Band(0, 90)], ids=str)
@pytest.mark.parametrize(("shape", "dtype"), [(SHAPES[1], torch.float32), (SHAPES[2], torch.bfloat16)], ids=str)
def test_workspace_with_options(shape: tuple[int, ...], dtype: torch.dtype, band: Band) -> None:
    alibi = Softmax(0.1, alibi_slopes=(0.5, 0.25, 0.125, 0.0)[: shape[3]])
    dropout = Softmax(0.1, dropout_p=0.3)
    for softmax in (alibi, alibi._replace(softcap=2.0), dropout, alibi._replace(softcap=2.0, dropout_p=0.1)):
        check_workspace(PlainEngine(), softmax, shape, band, dtype)


def check_workspace(engine: Engine, softmax: Softmax, shape: tuple[int, ...], band: Band, dtype: torch.dtype) -> None:
    n, m, batch, heads, kv_heads, dim, value_dim = shape

    def normal(rows: int, count: int, width: int) -> torch.Tensor:
        return torch.randn(batch, rows, count, width).to(dtype).transpose(0, 1)

    q, kv = normal(n, heads, dim), KV(normal(m, kv_heads, dim), normal(m, kv_heads, value_dim))
    tile = Tile(
        TokenRange(StridedRange(0, n), StridedRange(0, n)),
        TokenRange(StridedRange(0, m), StridedRange(0, m)),
        band,
        StridedRange(0, heads),
    )
    (work,) = engine.prepare([[tile]], softmax._replace(group=heads // kv_heads), n, heads)
    state, sizes = engine.begin([work], q, value_dim, None), Sizes(n, batch, heads, dim, value_dim, dtype)
    forward_bytes = allocated(lambda: engine.attend(q, kv, state, work))
    assert forward_bytes - 2 * 8 <= engine.workspace_bytes(work, sizes, backward=False) <= forward_bytes
    dout, out = normal(n, heads, value_dim), state.out.finalized(dtype)
    inputs = BackwardInputs(dout, out, state.lse, None, engine.delta(dout, out, None))
    dq, into = engine.begin_grad([work], q, value_dim), KV(*(x.to(accumulator_dtype(dtype)).clone() for x in kv[:2]))
    backward_bytes = allocated(lambda: engine.attend_grad(q, kv, inputs, dq, into, work))
    assert backward_bytes - 2 * 8 <= engine.workspace_bytes(work, sizes, backward=True) <= backward_bytes


@pytest.fixture
def threads(request: pytest.FixtureRequest) -> Iterator[None]:
    """Set torch's number of intra-op threads for one test."""
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("threads", [1, 2, 3], indirect=True)
@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize(("n", "m"), [(1000, 700), (200, 64), (31, 700), (1, 1)])
def test_scratch_of_the_cpu_kernel(n: int, m: int, backward: bool, threads: None) -> None:
    heads, dim, aten = 2, 16, torch.ops.aten
    q, k = torch.randn(1, n, heads, dim).transpose(1, 2), torch.randn(1, m, heads, dim).transpose(1, 2)
    out, lse = aten._scaled_dot_product_flash_attention_for_cpu(q, k, k)
    result_bytes = (out.numel() if not backward else 2 * k.numel() + q.numel()) * 4 + (
        0 if backward else lse.numel() * 4
    )

    def call() -> Any:
        if not backward:
            return aten._scaled_dot_product_flash_attention_for_cpu(q, k, k)
        return aten._scaled_dot_product_flash_attention_for_cpu_backward(out, q, k, k, out, lse, 0.0, False)

    assert allocated(call) == result_bytes + kernel_bytes(n, m, dim, 4, backward)


# --- the meter -------------------------------------------------------------------------------------------------------


def test_a_storage_counts_once_while_it_lives() -> None:
    before = torch.zeros(100)
    with StorageMeter() as meter:
        assert before.view(10, 10).sum(0).shape == (10,)
        assert meter.live_bytes == 0 and meter.peak_bytes == 40  # an older tensor's view counts 0, its sums 40
        first = torch.zeros(1000)
        views = [first[:10], first.view(10, 100).t()]
        assert meter.live_bytes == 4000
        del first
        assert meter.live_bytes == 4000
        views.clear()
        assert meter.live_bytes == 0 and meter.peak_bytes == 4000
        second = torch.ones(10)
        meter.restart()
        assert meter.peak_bytes == meter.live_bytes == 40
        second.add_(1)
    assert meter.peak_bytes == 40


def test_the_meter_sees_a_backward_pass_and_scratch() -> None:
    q = torch.randn(1, 2, 64, 16, requires_grad=True)
    attend = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    with StorageMeter(attention_scratch_bytes) as meter:
        out, lse = attend(q, q, q)
        output_bytes = (out.numel() + lse.numel()) * 4
        assert meter.peak_bytes == output_bytes + kernel_bytes(64, 64, 16, 4, backward=False)
        meter.restart()
        out.backward(torch.ones(1, 2, 64, 16))  # in another memory layout than the kernel needs, so it is copied
    grads = 3 * q.numel() * 4
    assert meter.peak_bytes == output_bytes + 2 * q.numel() * 4 + grads + kernel_bytes(64, 64, 16, 4, backward=True)
