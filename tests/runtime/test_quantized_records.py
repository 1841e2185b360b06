"""K and V in eight bits have errors within the bound, are relayed unchanged, and are restored before they are read."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor

from ringattn.core.geometry import StridedRange
from ringattn.core.problem import EIGHT_BIT
from ringattn.errors import PlanError
from ringattn.planner.choose import plan_of
from ringattn.planner.plan import AttendOp, Pack, Plan, RecordLayout
from ringattn.runtime.records import TORCH_DTYPE, LocalTensors, PackedBuffer, pack, quantize, restore
from ringattn.schedule.content import HeadRows
from ringattn.schedule.routes import ROUTES
from tests.kernels.eight_bits import E4M3, LARGEST, rounded
from tests.planner.placement_verifier import verify_placement
from tests.strategies import simple

each_code = pytest.mark.parametrize("code", EIGHT_BIT)

# --- values ----------------------------------------------------------------------------------------------------------


def quantize_and_restore(x: Tensor, code: str) -> Tensor:
    """Return x (rows, batch, heads, dim), quantized to `code` and restored, as K and V that another rank receives."""
    values, scales = torch.empty(x.shape, dtype=TORCH_DTYPE[code]), torch.empty(x.shape[:3])
    quantize(x, values, scales)
    restore(values, scales, back := torch.full_like(x, 77.0))
    return back


def bound(x: Tensor, code: str) -> Tensor:
    """Return the error bound that `ringattn.kernels.rows` documents, plus the rounding to x's dtype if it is half."""
    wide, largest = x.double().abs(), x.double().abs().amax(-1, keepdim=True)
    step = (largest / LARGEST[code]).clamp_min(2.0**-126)
    limit = (step / 2).expand_as(wide) if code == "int8" else wide * 2.0**-4 + step * 2.0**-10
    limit = limit * (1 + 2.0**-13)
    info = torch.finfo(x.dtype)
    return limit if x.dtype == torch.float32 else limit + ((wide + limit) * info.eps + info.tiny * info.eps) / 2


FINITE = st.floats(-(2.0**127), 2.0**127, width=32)
HEADS = st.one_of(
    st.lists(FINITE, min_size=1, max_size=20),
    st.lists(st.floats(-1, 1, width=32), min_size=17, max_size=17),
    st.lists(st.floats(-(2.0**-120), 2.0**-120, width=32), min_size=1, max_size=5),
)


@each_code
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@given(head=HEADS)
@example(head=[0.0, -0.0, 0.0])
@example(head=[1e-45, -1e-45, 3e-39])
@example(head=[3.4e38, -3.4e38, 1.0])
@example(head=[127.0, *(n + 0.5 for n in range(-127, 127))])
@example(head=[448.0, *((E4M3[1:] + E4M3[:-1]) / 2).tolist()])
def test_every_value_is_restored_within_its_bound(code: str, dtype: torch.dtype, head: list[float]) -> None:
    x = torch.tensor(head).clamp(-torch.finfo(dtype).max, torch.finfo(dtype).max).to(dtype).view(1, 1, 1, -1)
    back = quantize_and_restore(x, code)
    assert torch.equal(back, rounded(x, code))
    assert ((back.double() - x.double()).abs() <= bound(x, code)).all()


@each_code
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_a_head_that_is_not_finite_is_restored_as_nan(code: str, bad: float) -> None:
    x = torch.randn(3, 2, 2, 5)
    x[1, 0, 1, 3] = bad
    values, scales = torch.empty(x.shape, dtype=TORCH_DTYPE[code]), torch.empty(3, 2, 2)
    quantize(x, values, scales)
    assert scales[1, 0, 1].isnan() and scales.isnan().sum() == 1  # the codes do not matter
    back = quantize_and_restore(x, code)
    assert back[1, 0, 1].isnan().all() and back.isnan().sum() == 5


# --- buffers and plans -----------------------------------------------------------------------------------------------

CASE = simple("zigzag", 32, 4, heads=4, causal=True).problem


@each_code
def test_relayed_records_are_unchanged(code: str) -> None:
    k, v = torch.randn(12, 2, 3, 5), torch.randn(12, 2, 3, 2)
    heads = StridedRange(0, 1), StridedRange(1, 2)
    whole = tuple(HeadRows(head_range, (StridedRange(0, 12),)) for head_range in heads)
    part_content = (
        HeadRows(heads[0], (StridedRange(1, 3), StridedRange(7, 1))),
        HeadRows(heads[1], (StridedRange(4, 2), StridedRange(10, 2))),
    )

    def records(content: tuple[HeadRows, ...], dtype: str | None) -> PackedBuffer:
        count = 2 * sum(part.heads.count * part.row_count for part in content)
        flat = torch.full((count * (7 + 1 + 8),), 0xFF, dtype=torch.uint8) if dtype else torch.full((count * 7,), 77.0)
        return PackedBuffer(flat, content, 2, RecordLayout((5, 2), 1 if dtype else 0), TORCH_DTYPE[dtype or "float32"])

    received, gathered, packed = records(whole, code), records(part_content, code), records(part_content, code)
    pack(LocalTensors(k, v), received)
    pack(received, gathered)
    pack(LocalTensors(k, v), packed)
    assert torch.equal(gathered.flat, packed.flat)
    pack(gathered, unpacked := records(part_content, None))
    for part in part_content:
        rows = [row for run in part.rows for row in run.members()]
        for x, restored in ((k, unpacked.part(part.heads).k), (v, unpacked.part(part.heads).v)):
            assert torch.equal(restored, rounded(x[rows][:, :, part.heads.start : part.heads.stop], code))


def change_step(whole: Plan, index: int, **changes: Any) -> Plan:
    """Return the plan with `changes` to the fields of one step."""
    return replace(
        whole, steps=(*whole.steps[:index], whole.steps[index]._replace(**changes), *whole.steps[index + 1 :])
    )


@pytest.mark.parametrize("route", [name for name, way in ROUTES.items() if way.undoes_steps])  # they restore local keys
@pytest.mark.parametrize("backward", [False, True])
def test_broken_restores_are_found(route: str, backward: bool) -> None:
    whole = plan_of(replace(CASE, kv_wire_dtype="int8"), ROUTES[route], 1, backward)
    verify_placement(whole)
    index = next(index for index, step in enumerate(whole.steps) if step.restores)
    step, restored = whole.steps[index], whole.steps[index].restores[0]
    with pytest.raises(PlanError, match=r"KV\d\S* (restored|in .*) is read too early"):
        verify_placement(change_step(whole, index, restores=()))
    arrival = next(n for n, step_ in enumerate(whole.steps) if restored.source in [recv.buffer for recv in step_.recvs])
    early = change_step(change_step(whole, index, restores=step.restores[1:]), arrival, restores=(restored,))
    with pytest.raises(PlanError, match=r"KV\d\S* from rank \d is read too early"):
        verify_placement(early)
    with pytest.raises(PlanError, match=r"KV\d\S* (restored|in .*) is filled twice"):
        verify_placement(change_step(whole, index, restores=(*step.restores, restored)))
    buffers = list(whole.buffers)
    if buffers[restored.into].inside is None:
        check_that_raw_reads_are_found(whole, index, restored)
    buffers[restored.into] = buffers[restored.into]._replace(offset_bytes=buffers[restored.source].offset_bytes)
    with pytest.raises(PlanError, match=r"live at the same time in the same bytes"):
        verify_placement(replace(whole, buffers=tuple(buffers)))


def check_that_raw_reads_are_found(whole: Plan, index: int, restored: Pack) -> None:
    """Check that the plan is refused if an attention update reads the eight-bit buffer instead of the restored one."""
    raw = tuple(
        item._replace(kv=restored.source) if isinstance(item, AttendOp) and item.kv == restored.into else item
        for item in whole.steps[index].work
    )
    with pytest.raises(PlanError, match=r"step \d: KV\d\S* from rank \d is not restored"):
        verify_placement(change_step(whole, index, work=raw))
