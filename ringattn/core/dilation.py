"""Dilated attention as a mask of branches, in which a head keeps every r-th position; and named sets of branches.

LongNet (arXiv 2307.02486): a branch (w, r) cuts the sequence into segments of w positions. A head keeps the positions
at its offset modulo r, both as queries and as keys. Branches are mixed by their softmax denominators. This equals one
softmax over the keys of all branches, in which a key counts once for each branch that has it.
Guarantees: the mask has one branch for each range of heads with the same offset, with few integers for any length.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import groupby, pairwise
from math import lcm
from numbers import Integral
from typing import Any, Literal, NamedTuple

import numpy as np

from ringattn.core.geometry import CAUSAL, FULL, MOST_TOKENS, StridedRange
from ringattn.core.mask import Branch, Mask, check_causal
from ringattn.core.rectangles import Rectangles, segments
from ringattn.errors import InputError
from ringattn.integers import whole_number


@dataclass(frozen=True)
class Dilated:
    """The mask options of dilated attention. `offset`: the rule for the offset of each head modulo the rate.

    mod: head % rate (LongNet). block: each ceil(heads / rate) heads share an offset (torchscale). kv_head: the K/V
    head % rate, so that grouped heads read the same rows. layer_rotated: (head + layer * heads) % rate.
    """

    segment_lengths: tuple[int, ...]
    dilation_rates: tuple[int, ...]
    causal: bool = False
    offset: Offset | str = "mod"
    layer: int | None = None

    def __post_init__(self) -> None:
        """Raise `InputError` for invalid branches, `causal`, rule or layer."""
        check(self.segment_lengths, self.dilation_rates)
        check_causal(self.causal)
        if self.offset not in OFFSETS:
            raise InputError(f"offset={self.offset!r} is not known; choose one of {', '.join(OFFSETS)}")
        # Only 'layer_rotated' reads the layer; with another rule it would be an ignored option.
        if (self.layer is None) == (self.offset == "layer_rotated"):
            raise InputError(f"layer={self.layer} with offset={self.offset!r}: only 'layer_rotated' takes a layer")
        if self.layer is not None:
            layer = whole_number(self.layer, "layer must be a whole number of at least 0", 0)
            object.__setattr__(self, "layer", layer)

    def branches(self) -> list[Dilated]:
        """Return the options of each branch separately."""
        pairs = zip(self.segment_lengths, self.dilation_rates, strict=True)
        return [Dilated((length,), (rate,), self.causal, self.offset, self.layer) for length, rate in pairs]

    def mask(
        self,
        length: int,
        kv_length: int,
        documents: tuple[int, ...] | None,
        kv_documents: tuple[int, ...] | None,
        q_heads: int,
        kv_heads: int,
    ) -> Mask:
        """Return the mask over a sequence. Segments restart in each document. Raises `InputError` for two sequences."""
        if (length, documents) != (kv_length, kv_documents):
            raise InputError("kv_seq: dilated attention is self-attention, over one sequence; leave kv_seq out")
        # Segment 8, rate 2, offsets 0 and 1:
        #    positions   0 1 2 3 4 5 6 7 | 8 9 ...
        #    head 0      x . x . x . x . | x . ...
        #    head 1      . x . x . x . x | . x ...
        bounds = documents or (0, length)
        paired = [(start, stop, start, stop) for start, stop in pairwise(bounds)]
        band, branches = CAUSAL if self.causal else FULL, []
        for length, rate in zip(self.segment_lengths, self.dilation_rates, strict=True):
            rectangles = Rectangles(segments(paired, band, length))
            offsets = head_offsets(self.offset, rate, q_heads, kv_heads, self.layer or 0)
            # Consecutive heads with the same offset share a branch, so a branch has a single range of heads.
            for offset, members in groupby(range(q_heads), offsets.__getitem__):
                heads = list(members)
                # None stands for all heads, as in plain masks.
                run = None if len(heads) == q_heads else StridedRange(heads[0], len(heads))
                branches.append(Branch(rectangles, run, rate, offset))
        return Mask(tuple(branches))


# --- named sets of branches, and warnings about pairs that a set does not cover --------------------------------------
# A set that `check` returns has one positive rate for each positive segment length. A warning names the branch, the
# queries that it misses and a remedy. It is about a single sequence without documents.


OFFSETS = ("mod", "block", "kv_head", "layer_rotated")
Offset = Literal["mod", "block", "kv_head", "layer_rotated"]

TABLE_TOKENS = 1 << 20
"""The largest number of positions that a warning counts one by one."""


class Branches(NamedTuple):
    """Dilated branches: a head keeps each `dilation_rates[i]`-th row of every segment of `segment_lengths[i]` tokens.

    `**branches._asdict()` passes both to a call.
    """

    segment_lengths: tuple[int, ...]
    dilation_rates: tuple[int, ...]

    def pairs(self) -> list[tuple[int, int]]:
        """Return (segment length in tokens, rate) of each branch."""
        return list(zip(self.segment_lengths, self.dilation_rates, strict=True))


def check(segment_lengths: Iterable[Any], dilation_rates: Iterable[Any]) -> Branches:
    """Return the branches as plain tuples.

    Raises `InputError` unless there is at least one length, one rate for each length, and all are positive whole
    numbers of at most 2^50, the longest sequence.
    """
    checked = []
    for name, values in (("segment_lengths", segment_lengths), ("dilation_rates", dilation_rates)):
        if isinstance(values, str) or not isinstance(values, Iterable):
            raise InputError(f"{name} must be a list of positive whole numbers, got {values!r}")
        numbers = tuple(values)
        for number in numbers:
            if isinstance(number, bool) or not isinstance(number, Integral) or number < 1:
                raise InputError(f"{name} must be positive whole numbers, got {number!r} in {numbers}")
            if int(number) > MOST_TOKENS:
                raise InputError(f"{name} must be at most {MOST_TOKENS}, got {number} in {numbers}")
        checked.append(tuple(int(number) for number in numbers))
    lengths, rates = checked
    if not lengths or len(lengths) != len(rates):
        raise InputError(
            f"every branch needs a segment length and a dilation rate: got {len(lengths)} segment_lengths {lengths} "
            f"and {len(rates)} dilation_rates {rates}"
        )
    return Branches(lengths, rates)


def geometric(
    base_length: int = 2048, ratio: int = 2, *, length: int | None = None, branches: int | None = None
) -> Branches:
    """Return lengths base_length * ratio ** i with rates ratio ** i: LongNet's choice (arXiv:2307.02486, eq. 11, 12).

    The number of branches is `branches`, or the smallest number for which one segment holds a sequence of `length`
    tokens. Raises `InputError` unless exactly one of the two is given, all numbers are positive and whole, and `ratio`
    is at least 2.
    """
    if (length is None) == (branches is None):
        raise InputError(f"give either length (tokens) or branches (a number), got {length} and {branches}")
    first, factor, limit = (
        whole_number(number, f"{name} must be a whole number of at least {least}", least)
        for name, number, least in (
            ("base_length", base_length, 1), ("ratio", ratio, 2),
            ("length or branches", branches if length is None else length, 1),
        )
    )  # fmt: skip
    lengths = [first]
    while len(lengths) < limit if length is None else lengths[-1] < limit:
        lengths.append(lengths[-1] * factor)
    return Branches(tuple(lengths), tuple(segment // first for segment in lengths))


def longnet_32k() -> Branches:
    """Return the branches of LongNet's language model for 32,768 tokens, 12 heads (arXiv:2307.02486, section 4.1)."""
    return Branches((2048, 4096, 8192, 16384, 32768), (1, 2, 4, 6, 12))


def longvit_1m() -> Branches:
    """Return the branches of LongViT for 1,048,576 patches, 16 heads (arXiv:2312.03558; torchscale's example)."""
    return Branches((1024, 4096, 32768, 262144, 1048576), (1, 2, 4, 8, 16))


def head_offsets(offset: str, rate: int, q_heads: int, kv_heads: int, layer: int = 0) -> tuple[int, ...]:
    """Return for each query head its offset, that is, which of `rate` successive rows it keeps, by the rule `offset`.

    mod: h % rate (arXiv:2307.02486, eq. 13). block: h // ceil(q_heads / rate) (torchscale). kv_head: the number of its
    K/V head, modulo the rate. layer_rotated: (h + layer * q_heads) % rate. Raises `InputError` for an unknown rule.
    """
    if offset not in OFFSETS:
        raise InputError(f"offset={offset!r} is not known; choose one of {', '.join(OFFSETS)}")
    heads = range(q_heads)
    if offset == "block":
        return tuple(h // -(-q_heads // rate) for h in heads)
    if offset == "kv_head":
        return tuple(h // (q_heads // kv_heads) % rate for h in heads)
    return tuple((h + (layer * q_heads if offset == "layer_rotated" else 0)) % rate for h in heads)


def coverage_warnings(
    branches: Branches, q_heads: int, offset: str = "mod", kv_heads: int | None = None, length: int | None = None
) -> list[str]:
    """Return a warning for each branch that keeps only part of the queries, and one if rows attend to no key.

    `length`: length of the sequence in tokens; None for a sequence much longer than the segments. Raises `InputError`
    for an unknown `offset`.
    """
    kv_heads = q_heads if kv_heads is None else kv_heads
    warnings = []
    offsets = [head_offsets(offset, rate, q_heads, kv_heads) for rate in branches.dilation_rates]
    for (w, r), kept in zip(branches.pairs(), offsets, strict=True):
        reached = _reached(w, r, set(kept), w if length is None else length)
        if reached < 1:
            heads = f"{kv_heads} K/V heads" if offset == "kv_head" else f"{q_heads} heads"
            remedy = f"an r that divides {q_heads}" if offset == "block" else f"an r of at most {heads.split()[0]}"
            rotate = "" if offset == "layer_rotated" else ", or offset='layer_rotated', which changes in each layer"
            warnings.append(
                f"branch (w={w}, r={r}): {heads} have {len(set(kept))} of {r} offsets, so it reaches "
                f"{_percent(reached)} of the queries; use {remedy}{rotate}"
            )
    blind = 0.0 if 1 in branches.dilation_rates else _blind(branches, offsets, length)
    if blind:
        warnings.append(
            f"no branch has r=1: {_percent(blind)} of the rows (a token of a head) attend to no key and output 0; "
            "add a branch with r=1"
        )
    return warnings


def _reached(w: int, r: int, offsets: set[int], length: int) -> float:
    """Return the share of `length` positions that at least one of these offsets keeps."""

    def kept(tokens: int) -> int:
        return sum(len(range(start, tokens, r)) for start in offsets)

    return (length // w * kept(w) + kept(length % w)) / length if length else 1.0


def _blind(branches: Branches, offsets: list[tuple[int, ...]], length: int | None) -> float:
    """Return the share of all pairs (position, head) that no branch keeps.

    Count them over `length` positions, or over one period of the pattern if it is None; over at most `TABLE_TOKENS`.
    """
    period = lcm(*(w if w % r else r for w, r in branches.pairs()))
    tokens = min(period if length is None else length, TABLE_TOKENS)
    classes = [np.arange(tokens) % w % r for w, r in branches.pairs()]
    blind = 0
    for kept, heads in Counter(zip(*offsets, strict=True)).items():
        reached = np.zeros(tokens, dtype=bool)
        for position_class, start in zip(classes, kept, strict=True):
            reached |= position_class == start
        blind += heads * int(tokens - reached.sum())
    return blind / max(1, tokens * len(offsets[0]))


def _percent(part: float) -> str:
    return f"{100 * part:.3g} %"
