"""Packed records: how a content lies in a flat buffer, and the copies into and out of it.

Wire order has head part after part, in each rows outermost, then batches, heads, and K beside V; in eight bits padding
to a multiple of 4 bytes and the float32 scales of K and V follow. Every view is row-first, (rows, batch, heads, dim),
and strided: nothing here allocates, but for quantizing and restoring without a kernel.
Promises: a block is rounded when it is packed to eight bits, and what is relayed is copied bit by bit, so every reader
of a block restores the same values.
Does not know: schedules, ranks, tiles.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from importlib.util import find_spec
from typing import NamedTuple

import torch
from torch import Tensor

from ringattn.engine.base import KV
from ringattn.geometry import Run
from ringattn.schedule.content import Content, Part, Spot

TORCH_DTYPE = {name: getattr(torch, name) for name in ("float64", "float32", "float16", "bfloat16")}
CODES = {name: getattr(torch, name) for name in ("int8", "float8_e4m3fn")}
LARGEST = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}
SMALLEST_SCALE = 2.0**-126
"""The smallest normal float32: division is defined for zeros and accurate for tiny values."""


class Rows(NamedTuple):
    """K, or V, of some rows: (rows, batch, heads, dim); `scales` (rows, batch, heads) where they are codes."""

    x: Tensor
    scales: Tensor | None = None


class Records:
    """A buffer's flat tensor with one `KV` view for each head part of its content."""

    def __init__(
        self,
        flat: Tensor,
        content: Content,
        batch: int,
        head_dim: int,
        value_dim: int,
        code: torch.dtype | None = None,
    ) -> None:
        """`flat`: contiguous, exactly as many elements as the content has; bytes where `code` is an eight-bit dtype."""
        self.flat, self.content = flat, content
        self.parts: dict[Run, KV] = {}
        self.scales: dict[Run, KV] = {}
        records = sum(part.row_count * part.heads.count for part in content) * batch
        width = flat.numel() // records if records else 0
        at = 0
        for part in content:
            shape = part.row_count, batch, part.heads.count, width
            count = part.row_count * batch * part.heads.count * width
            block = flat[at : at + count].view(shape)
            values = block[..., : head_dim + value_dim].view(code or flat.dtype)
            self.parts[part.heads] = KV(values[..., :head_dim], values[..., head_dim:], part.heads.start)
            if code is not None:
                scales = block.view(torch.float32)[..., -2:]
                self.scales[part.heads] = KV(scales[..., 0], scales[..., 1], part.heads.start)
            at += count

    def part(self, heads: Run) -> KV:
        """The rows of one head part."""
        return self.parts[heads]

    def spots(self, part: Part) -> Iterator[list[Spot]]:
        """Where the rows of a part lie here, run by run."""
        return next(mine for mine in self.content if mine.heads == part.heads).locate(part.rows)

    def rows(self, heads: Run, packed: Run) -> tuple[Rows, Rows]:
        """K and V of some packed rows of one head part."""
        at = slice(packed.start, packed.stop, packed.stride)
        k, v, _ = self.parts[heads]
        if heads not in self.scales:
            return Rows(k[at]), Rows(v[at])
        k_scales, v_scales, _ = self.scales[heads]
        return Rows(k[at], k_scales[at]), Rows(v[at], v_scales[at])


class Home:
    """The rank's own K and V (or dK and dV), row-first views of the caller's tensors, addressed like `Records`."""

    def __init__(self, k: Tensor, v: Tensor) -> None:
        """`k`: (rows, batch, kv_heads, d_k); `v`: (rows, batch, kv_heads, d_v)."""
        self.k, self.v = k, v

    def part(self, heads: Run) -> KV:
        """All rows of one head part."""
        at = slice(heads.start, heads.stop)
        return KV(self.k[:, :, at], self.v[:, :, at], heads.start)

    def spots(self, part: Part) -> Iterator[list[Spot]]:
        """Where the rows of a part lie here, run by run: where they say."""
        return ([Spot(Run(0, run.count), run)] for run in part.rows)

    def rows(self, heads: Run, packed: Run) -> tuple[Rows, Rows]:
        """K and V of some rows, for the heads of one part."""
        k, v, _ = self.part(heads)
        at = slice(packed.start, packed.stop, packed.stride)
        return Rows(k[at]), Rows(v[at])


Place = Records | Home


def pack(source: Place, into: Records) -> None:
    """Gather `into`'s content out of `source`: copied, converted, quantized to eight bits or restored from them."""
    for have, want in _pairs(source, into, into.content):
        if have.scales is not None and want.scales is not None:
            want.x.copy_(have.x)
            want.scales.copy_(have.scales)
        elif have.scales is not None:
            restore(have.x, have.scales, want.x)
        elif want.scales is not None:
            quantize(have.x, want.x, want.scales)
        else:
            want.x.copy_(have.x)


def add(part: Records, into: Place) -> None:
    """Add an arrived content into the same rows of `into`."""
    for have, want in _pairs(part, into, part.content):
        want.x.add_(have.x)


def _pairs(source: Place, into: Place, content: Content) -> Iterator[tuple[Rows, Rows]]:
    """The same rows of both, where they are evenly spaced in both; one of them holds `content` and nothing else."""
    for part in content:
        for ours, theirs in zip(source.spots(part), into.spots(part), strict=True):
            for one in ours:
                for other in theirs:
                    if both := one.meeting(other):
                        yield from zip(
                            source.rows(part.heads, both[0]), into.rows(part.heads, both[1]), strict=True
                        )


def from_row(kv: KV, row: int, step: int = 1) -> KV:
    """The same block from `row` on, every `step`-th row."""
    return KV(kv.k[row::step], kv.v[row::step], kv.first_head) if row or step > 1 else kv


def quantize(x: Tensor, values: Tensor, scales: Tensor) -> None:
    """x (rows, batch, heads, dim) as `values`, alike in int8 or float8_e4m3fn, times `scales` (rows, batch, heads).

    What `ringattn.kernels.quantize` does and promises about errors: by its kernel on CUDA, elsewhere in plain torch
    with the same bits.
    """
    if _kernel_serves(x.device, values.dtype):
        from ringattn.kernels.quantize import quantize_call

        quantize_call(x, values, scales).run()
        return
    full = x.float()
    scale = (full.abs().amax(-1) / LARGEST[values.dtype]).clamp_min(SMALLEST_SCALE)
    scale += (full * 0.0).sum(-1)  # NaN where a value is not finite
    steps = full / scale[..., None]
    values.copy_(torch.floor(steps + 0.5) if values.dtype == torch.int8 else steps)
    scales.copy_(scale)


def restore(values: Tensor, scales: Tensor, x: Tensor) -> None:
    """The inverse of `quantize`: x gets values * scales, rounded to its own dtype."""
    if _kernel_serves(x.device, values.dtype):
        from ringattn.kernels.quantize import restore_call

        restore_call(values, scales, x).run()
        return
    x.copy_(values.float() * scales[..., None])


@lru_cache
def _kernel_serves(device: torch.device, code: torch.dtype) -> bool:
    """Triton is optional, and its float8_e4m3fn needs sm_89."""
    if device.type != "cuda" or find_spec("triton") is None:
        return False
    return code == torch.int8 or torch.cuda.get_device_capability(device) >= (8, 9)
