"""Packed records to and from a rank's own tensors by one kernel for each value, however many runs the content has.

A list of rows is made once for a buffer and kept on the device. Where every part has one head, a row of a head counts
as a row of its own, so all parts are moved together.
Guarantees: what `records.pack` and `records.add` do by copies of runs, bit for bit.
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from ringattn.core.geometry import StridedRange

if TYPE_CHECKING:
    from ringattn.runtime.records import LocalTensors, PackedBuffer


class Side(NamedTuple):
    """A value in the rank's own tensor and in the records, (rows, batch, heads, dim) each, and which rows these hold.

    `rows`: int64 indices into `own`, one for each row of `packed`.
    """

    own: Tensor
    packed: Tensor
    rows: Tensor


def is_faster(records: PackedBuffer, device: torch.device) -> bool:
    """Whether the kernel is faster: several runs on a CUDA device, with Triton there."""
    # One range is one strided copy already; many would be as many small kernels.
    several = sum(len(part.rows) for part in records.content) > 1
    return several and device.type == "cuda" and find_spec("triton") is not None


def gather(local: LocalTensors, records: PackedBuffer) -> None:
    """Fill the records, values of any floating dtype without scalars, from the rank's own tensors."""
    from ringattn.kernels.rows import move_rows_call

    for own, packed, rows in _sides(local, records):
        move_rows_call(own, packed, gather=rows).run()


def scatter_add(records: PackedBuffer, local: LocalTensors, first: bool = False) -> None:
    """Add the records to the rank's own tensors; where they are the `first`, write them."""
    from ringattn.kernels.rows import move_rows_call

    for own, packed, rows in _sides(local, records):
        move_rows_call(packed, own, scatter=rows, add=not first).run()


def _sides(local: LocalTensors, records: PackedBuffer) -> Iterator[Side]:
    # All parts at once: with (row, head) as one index, row * ratio + head addresses the local tensor flat.
    #    x[row, batch, head]  ->  flat[row * ratio + head]      ratio = row stride / head stride
    # Requires row strides that are multiples of the head stride; else part by part below.
    if len(records.content) > 1 and all(part.heads.count == 1 for part in records.content):
        if all(_step(value.x) and value.x.stride(0) % _step(value.x) == 0 for value in local.values):
            for value, packed in zip(local.values, records.flattened(), strict=True):
                own, ratio = value.x, value.x.stride(0) // _step(value.x)
                # The last index is (rows - 1) * ratio + heads - 1, so the view ends inside the tensor.
                size = ((own.shape[0] - 1) * ratio + own.shape[2], own.shape[1], 1, own.shape[3])
                flat = own.as_strided(size, (_step(own), own.stride(1), 0, 1))
                yield Side(flat, packed.x, _list(records, None, ratio, own.device))
            return
    for number, value in enumerate(local.values):
        yield from _by_part(value.x, records, number)


def _step(x: Tensor) -> int:
    """Elements from one head of (rows, batch, heads, dim) to the next, or where there is one from row to row."""
    return x.stride(2) if x.shape[2] > 1 else x.stride(0)


def _by_part(x: Tensor, records: PackedBuffer, number: int) -> Iterator[Side]:
    for part in records.content:
        heads = slice(part.heads.start, part.heads.stop)
        rows = _list(records, part.heads, 1, x.device)
        yield Side(x[:, :, heads], records.parts[part.heads][number].x, rows)


def _list(records: PackedBuffer, heads: StridedRange | None, ratio: int, device: torch.device) -> Tensor:
    """int64: the owner's rows of one part in order, or of all, each times `ratio` plus its head."""
    # Kept with the buffer: made on the first pass, then read by every one.
    key = heads, ratio, device
    if key not in records.lists:
        rows = [
            # Content order is wire order: part after part, range after range.
            torch.arange(run.start, run.stop, run.stride) * ratio + (part.heads.start if heads is None else 0)
            for part in records.content
            if heads in (None, part.heads)
            for run in part.rows
        ]
        records.lists[key] = torch.cat(rows).to(device)
    return records.lists[key]
