"""Masks: the allowed pairs (query, key). A mask is a sum of branches, each a table of rectangles with bands.

Full, causal, windowed and document masks are single branches. Branches may have different heads. A pair that two
branches, or two rectangles, allow for the same head counts twice, as in the mix of dilated branches; the rectangles of
plain masks are disjoint.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise
from typing import ClassVar, NamedTuple

from ringattn.core.bounded_cache import bounded
from ringattn.core.geometry import MOST_TOKENS, UNBOUNDED, Band, StridedRange
from ringattn.core.rectangles import Rectangle, Rectangles, segments
from ringattn.errors import InputError
from ringattn.integers import whole_number


@dataclass(frozen=True)
class Branch:
    """The pairs of some rectangles, for the query heads in `heads` (None: all).

    In each rectangle only the positions start + offset, start + offset + dilation, ... take part, as queries and as
    keys, where start is the first query or the first key of the rectangle.
    """

    rectangles: Rectangles
    heads: StridedRange | None = None
    dilation: int = 1
    offset: int = 0


class HeadPart(NamedTuple):
    """K/V heads that are always sent together, and the query heads that read them."""

    kv_heads: StridedRange
    q_heads: StridedRange


@dataclass(frozen=True)
class Mask:
    """A tuple of branches."""

    branches: tuple[Branch, ...]

    @staticmethod
    def of(rectangles: Iterable[Rectangle]) -> Mask:
        """Return the mask of these rectangles, the same for all heads."""
        return Mask((Branch(Rectangles(rectangles)),))

    def parts(self, q_heads: int, kv_heads: int) -> tuple[HeadPart, ...]:
        """Cut the K/V heads where a branch starts or ends, so that every branch reads all of a part or nothing."""
        # Edges in K/V heads. A branch that starts inside a group of query heads still reads the group's K/V head:
        #    query heads  0 1 2 | 3 4 5 | 6 7 8     group 3, branch on query heads 2..4
        #    K/V heads      0   |   1   |   2       edges 0, 2, 3: start rounded down, end rounded up
        group = q_heads // kv_heads
        edges = {0, kv_heads}
        for branch in self.branches:
            # A branch for all heads, or for no head, adds no edge.
            if branch.heads is not None and branch.heads.count:
                edges |= {branch.heads.start // group, -(-branch.heads.stop // group)}
        cuts = sorted(edges)
        # K/V heads a .. b - 1 are read by query heads a * group .. b * group - 1.
        return tuple(
            HeadPart(StridedRange(a, b - a), StridedRange(a * group, (b - a) * group)) for a, b in pairwise(cuts)
        )


class Frame(NamedTuple):
    """The input of `lower`: the documents of queries and keys, the band that `causal` and `window` allow, the heads."""

    bounds: tuple[int, ...]
    kv_bounds: tuple[int, ...]
    band: Band
    causal: bool
    windowed: bool
    q_heads: int

    @property
    def documents(self) -> list[tuple[int, int, int, int]]:
        """For each pair of documents: the start and end of its queries, then the start and end of its keys."""
        return [(*q, *k) for q, k in zip(pairwise(self.bounds), pairwise(self.kv_bounds), strict=True)]


class AttentionMask(ABC):
    """A mask that changes which pairs `causal` and `window` allow; see `ringattn.masks`.

    A subclass is a frozen dataclass, so that equal masks share their plans.
    """

    text: str
    """The mask as a word, which `masks.from_text` parses."""
    by_depth: ClassVar[bool] = False
    """Whether distances count along the paths of a tree, not in packed positions, so that ALiBi is refused."""
    takes_causal: ClassVar[bool] = True
    """Whether the mask combines with `causal`. Slices do if no query attends to a later key."""
    q_heads: ClassVar[int | None] = None
    """The number of query heads that the mask needs, or None for any."""

    @abstractmethod
    def lower(self, frame: Frame) -> Mask:
        """Return this mask over the documents and band of `frame`. Raises `InputError` if they do not combine."""


@dataclass(frozen=True)
class Banded:
    """The mask options of ordinary attention, before the sequences are known; see `make_mask`."""

    causal: bool = False
    window: tuple[int | None, int | None] | None = None
    within: AttentionMask | None = None

    def mask(
        self,
        length: int,
        kv_length: int,
        documents: tuple[int, ...] | None,
        kv_documents: tuple[int, ...] | None,
        q_heads: int,
        kv_heads: int,
    ) -> Mask:
        """Return the mask over these sequences."""
        return make_mask(
            length, kv_length, causal=self.causal, window=self.window, mask=self.within, documents=documents,
            kv_documents=kv_documents, q_heads=q_heads,
        )  # fmt: skip


def make_mask(
    length: int,
    kv_length: int,
    *,
    causal: bool = False,
    window: tuple[int | None, int | None] | None = None,
    mask: AttentionMask | None = None,
    documents: tuple[int, ...] | None = None,
    kv_documents: tuple[int, ...] | None = None,
    q_heads: int = 1,
) -> Mask:
    """Return the mask of one call. `window` = (left, right) tokens in addition to the query's; None or -1: unbounded.

    Raises `InputError` if `causal` is not a bool, a side of the window is negative, a right side contradicts `causal`,
    `mask` is not a mask or cannot be combined with the other options, or documents do not pair.
    """
    check_causal(causal)
    if (documents is None) != (kv_documents is None):
        packed, plain = ("seq", "kv_seq") if kv_documents is None else ("kv_seq", "seq")
        raise InputError(
            f"{packed} has documents and {plain} has none; give cu_seqlens to both sequences, or to neither"
        )
    if documents is not None and kv_documents is not None and len(documents) != len(kv_documents):
        raise InputError(
            f"documents pair by index: seq has {len(documents) - 1} documents and kv_seq has {len(kv_documents) - 1}"
        )
    # A document pairs with the document of the same index, and distances count from the starts of both.
    left, right = window_sides(window)
    # Causal may bound an unbounded right side; it contradicts a bounded right side that looks ahead.
    if causal and right not in (0, UNBOUNDED):
        raise InputError(f"window={window!r} looks ahead, causal=True forbids it; use a right side of 0")
    # q - k >= -right: keys up to `right` after the query; q - k <= left: keys up to `left` before it.
    #    q - k:   -right . . . 0 . . . left
    band = Band(0 if causal else -right, left)
    # Without documents each sequence is one part, from 0 to its length.
    frame = Frame(documents or (0, length), kv_documents or (0, kv_length), band, causal, window is not None, q_heads)
    if mask is None:
        return Mask.of(segments(frame.documents, band))
    if not isinstance(mask, AttentionMask):
        raise InputError(f"mask={mask!r} is not a mask; make one with ringattn.masks, for example masks.chunked(8192)")
    return _lowered(mask, frame)


@bounded
def _lowered(mask: AttentionMask, frame: Frame) -> Mask:
    return mask.lower(frame)


def check_causal(causal: object) -> None:
    """Raise `InputError` for a value that is not True or False."""
    # The truth value of "no", or of a tensor, is not what the caller means.
    if not isinstance(causal, bool):
        raise InputError(f"causal must be True or False, got {causal!r} ({type(causal).__name__})")


def window_sides(window: tuple[int | None, int | None] | None) -> tuple[int, int]:
    """Return (left, right), with UNBOUNDED for None, -1 and sides longer than any sequence.

    Raises InputError unless the window is None or two numbers of tokens.
    """
    if window is None:
        return UNBOUNDED, UNBOUNDED
    if not isinstance(window, (tuple, list)) or len(window) != 2:
        raise InputError(f"window={window!r}: expected (left, right) in tokens, with None or -1 for unbounded")
    sides = []
    for name, side in zip(("left", "right"), window, strict=True):
        tokens = -1 if side is None else whole_number(side, f"window {name} side must be tokens >= 0, None or -1", -1)
        # A side longer than any sequence counts as unbounded, so that equal masks compare equal.
        sides.append(UNBOUNDED if tokens == -1 or tokens >= MOST_TOKENS else tokens)
    return sides[0], sides[1]
