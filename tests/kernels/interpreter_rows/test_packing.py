"""Kernels that gather rows from local tensors, and add rows to them, give the bits of a copy of each range of rows."""

from __future__ import annotations

import pytest
import torch

from ringattn.core.geometry import StridedRange
from ringattn.planner.plan import RecordLayout
from ringattn.runtime import records as packed_records
from ringattn.runtime.records import LocalTensors, PackedBuffer, add, pack
from ringattn.schedule.content import Content, HeadRows
from tests.kernels.interpreter_rows.canary import Canaries, random

BATCH, ROWS, HEADS = 2, 40, 3
CONTENTS: dict[str, Content] = {
    "one part": (HeadRows(StridedRange(0, 3), (StridedRange(1, 5), StridedRange(9, 4, 3), StridedRange(30, 1))),),
    "heads of their own": (
        HeadRows(StridedRange(0, 1), (StridedRange(0, 10, 4), StridedRange(1, 3))),
        HeadRows(StridedRange(2, 1), (StridedRange(3, 7, 5),)),
    ),
    "uneven parts": (
        HeadRows(StridedRange(0, 2), (StridedRange(2, 6, 2), StridedRange(25, 2))),
        HeadRows(StridedRange(2, 1), (StridedRange(5, 30),)),
    ),
}


def local_tensor(canaries: Canaries, fused: bool, seed: int) -> torch.Tensor:
    """Return a (rows, batch, heads, dim) tensor. If `fused`, it is every second head of a larger tensor."""
    if fused:
        return canaries.hold(random(BATCH, ROWS, 2 * HEADS, 16, seed=seed), in_place=True)[:, :, 1::2].transpose(0, 1)
    return canaries.hold(random(BATCH, ROWS, HEADS, 16, seed=seed), in_place=True).transpose(0, 1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("content", CONTENTS)
def test_gathered_and_added(canaries: Canaries, content: str, fused: bool, dtype: torch.dtype) -> None:
    parts = CONTENTS[content]
    count = BATCH * sum(part.row_count * part.heads.count for part in parts) * 32
    local = LocalTensors(local_tensor(canaries, fused, 0), local_tensor(canaries, fused, 1))
    layout = RecordLayout((16, 16))
    ours, expected = (
        PackedBuffer(canaries.out((count,), dtype, dense=True), parts, BATCH, layout, dtype) for _ in range(2)
    )
    packed_records.gather_by_kernel(local, ours)
    for value, theirs in zip(local.values, range(2), strict=True):
        for part in parts:
            rows = [row for run in part.rows for row in run.members()]
            expected.parts[part.heads][theirs].x.copy_(value.x[rows][:, :, part.heads.start : part.heads.stop])
    assert torch.equal(ours.flat, expected.flat)
    sums = [LocalTensors(local_tensor(canaries, fused, 2), local_tensor(canaries, fused, 3)) for _ in range(2)]
    packed_records.add_by_kernel(ours, sums[0])
    for number, value in enumerate(sums[1].values):
        for part in parts:
            rows = torch.tensor([row for run in part.rows for row in run.members()])
            head_rows = value.x[:, :, part.heads.start : part.heads.stop]
            head_rows.index_add_(0, rows, ours.parts[part.heads][number].x.float())
    assert all(torch.equal(a.x, b.x) for a, b in zip(sums[0].values, sums[1].values, strict=True))


def test_the_kernel_is_chosen_on_cuda_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    parts = CONTENTS["one part"]
    records = PackedBuffer(torch.zeros(BATCH * 30 * 32), parts, BATCH, RecordLayout((16, 16)), torch.float32)
    cuda = torch.device("cuda")
    assert packed_records.kernel_is_faster(records, cuda) and not packed_records.kernel_is_faster(
        records, torch.device("cpu")
    )
    one_run = (HeadRows(StridedRange(0, 1), (StridedRange(4, 3),)),)
    single = PackedBuffer(torch.zeros(BATCH * 3 * 32), one_run, BATCH, RecordLayout((16, 16)), torch.float32)
    assert not packed_records.kernel_is_faster(single, cuda)  # one run is one strided copy
    called = []
    monkeypatch.setattr(packed_records, "kernel_is_faster", lambda *_: True)
    monkeypatch.setattr(packed_records, "gather_by_kernel", lambda *_: called.append("gather"))
    monkeypatch.setattr(packed_records, "add_by_kernel", lambda *_: called.append("add"))
    local = LocalTensors(torch.zeros(ROWS, BATCH, HEADS, 16), torch.zeros(ROWS, BATCH, HEADS, 16))
    pack(local, records)
    add(records, local)
    assert called == ["gather", "add"]
