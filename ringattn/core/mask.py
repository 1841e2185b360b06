"""Which pairs (query, key) are allowed: a mask is a sum of branches, each a band inside aligned segments.

Full, causal, windows and documents are single branches; branches with different heads sit side by side. A pair that
two branches allow for the same head counts twice (that is what mixing dilated branches means), so plain masks hold
disjoint branches.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

from ringattn.core.geometry import CAUSAL, FULL, MOST_TOKENS, UNBOUNDED, Band, StridedRange
from ringattn.errors import InputError


@dataclass(frozen=True)
class Branch:
    """The pairs (q, k) of equal segment whose distance lies in `band`, for the query heads in `heads` (None: all).

    Part i holds the q positions bounds[i]..bounds[i+1]-1 and the k positions kv_bounds[i]..kv_bounds[i+1]-1. A part is
    one segment or, with `segment`, is cut from its start into segments of so many positions, the last one shorter. Of
    each segment the positions start + offset, start + offset + dilation, ... take part, as queries and as keys.
    Distances are counted from the starts of the two segments, which coincide unless K/V is another sequence.
    """

    bounds: tuple[int, ...]
    kv_bounds: tuple[int, ...]
    band: Band = FULL
    heads: StridedRange | None = None
    segment: int | None = None
    dilation: int = 1
    offset: int = 0


class HeadPart(NamedTuple):
    """K/V heads that always travel together, and the query heads that read them."""

    kv_heads: StridedRange
    q_heads: StridedRange


@dataclass(frozen=True)
class Mask:
    """A tuple of branches."""

    branches: tuple[Branch, ...]

    def parts(self, q_heads: int, kv_heads: int) -> tuple[HeadPart, ...]:
        """The K/V heads cut where some branch starts or ends, so that every branch needs a part whole or not at all."""
        # Edges in K/V heads. A branch that starts inside a group of query heads still needs the group's whole K/V head:
        #    query heads  0 1 2 | 3 4 5 | 6 7 8     group 3, branch on query heads 2..4
        #    K/V heads      0   |   1   |   2       edges 0, 2, 3: start rounded down, end rounded up
        group = q_heads // kv_heads
        edges = {0, kv_heads}
        for branch in self.branches:
            # A branch for all heads, or for none, adds no edge.
            if branch.heads is not None and branch.heads.count:
                edges |= {branch.heads.start // group, -(-branch.heads.stop // group)}
        cuts = sorted(edges)
        # K/V heads a .. b - 1 are read by query heads a * group .. b * group - 1.
        return tuple(
            HeadPart(StridedRange(a, b - a), StridedRange(a * group, (b - a) * group)) for a, b in pairwise(cuts)
        )


@dataclass(frozen=True)
class Banded:
    """The mask options of ordinary attention; see `make_mask`."""

    causal: bool = False
    window: tuple[int | None, int | None] | None = None
    chunk: int | None = None
    prefix: int | tuple[int, ...] | None = None
    global_tokens: int | None = None

    def mask(
        self,
        length: int,
        kv_length: int,
        documents: tuple[int, ...] | None,
        kv_documents: tuple[int, ...] | None,
        q_heads: int,
        kv_heads: int,
    ) -> Mask:
        """The mask over these sequences, for all heads alike."""
        return make_mask(
            length, kv_length, causal=self.causal, window=self.window, chunk=self.chunk, prefix=self.prefix,
            global_tokens=self.global_tokens, documents=documents, kv_documents=kv_documents,
        )  # fmt: skip


def make_mask(
    length: int,
    kv_length: int,
    *,
    causal: bool = False,
    window: tuple[int | None, int | None] | None = None,
    chunk: int | None = None,
    prefix: int | Sequence[int] | None = None,
    global_tokens: int | None = None,
    documents: tuple[int, ...] | None = None,
    kv_documents: tuple[int, ...] | None = None,
) -> Mask:
    """The mask of one call. `window` = (left, right) tokens besides the query itself; None or -1 is unbounded.

    `chunk`: each document is cut from its start into chunks of so many tokens, which do not see each other.
    `prefix`: so many first keys of each document (one number, or one for each) are met by all its queries, besides
    what causal and the window say. `global_tokens`: so many first tokens of each document meet all others and are met
    by them, before and after or with causal after only, besides the window.
    Raises `InputError` for a `causal` that is no bool, a window of wrong sign, a right window beside causal, a chunk
    or global tokens of no token, options that do not go together, and documents that do not pair.
    """
    check_causal(causal)
    if (documents is None) != (kv_documents is None):
        has, none = ("seq", "kv_seq") if kv_documents is None else ("kv_seq", "seq")
        raise InputError(f"{has} has documents and {none} has none; give cu_seqlens to both sequences, or to neither")
    if documents is not None and kv_documents is not None and len(documents) != len(kv_documents):
        raise InputError(
            f"documents pair by index: seq has {len(documents) - 1} documents and kv_seq has {len(kv_documents) - 1}"
        )
    # A document pairs with the one of the same index, and distances count from the starts of the two.
    left, right = _window(window)
    # Causal may bound a right side that is unbounded; it contradicts one that is bounded and looks ahead.
    if causal and right not in (0, UNBOUNDED):
        raise InputError(f"window=({left}, {right}) looks ahead, causal=True forbids it; use a right side of 0")
    # q - k >= -right: keys up to `right` after the query; q - k <= left: keys up to `left` before it.
    #    q - k:   -right . . . 0 . . . left
    band = Band(0 if causal else -right, left)
    # Without documents each sequence is one part, from 0 to its length.
    bounds, kv_bounds = documents or (0, length), kv_documents or (0, kv_length)
    given = [
        name for name, of in (("chunk", chunk), ("prefix", prefix), ("global_tokens", global_tokens)) if of is not None
    ]
    if len(given) > 1:
        raise InputError(f"{given[0]} and {given[1]} do not go together; give one of them")
    if chunk is not None:
        return Mask((_chunked(bounds, kv_bounds, band, _tokens("chunk", chunk)),))
    if prefix is not None:
        if not causal:
            raise InputError("prefix needs causal=True: without it every key is met already, or a window says which")
        return _with_first(bounds, kv_bounds, _prefixes(prefix, len(bounds) - 1), FULL, None, band)
    if global_tokens is not None:
        if window is None:
            raise InputError("global_tokens needs a window: without one every token is met as these are")
        firsts = (_tokens("global_tokens", global_tokens),) * (len(bounds) - 1)
        # Under a causal mask they themselves see what is before them, which their own window may cut.
        return _with_first(bounds, kv_bounds, firsts, CAUSAL if causal else FULL, None if causal else FULL, band)
    return Mask((Branch(bounds, kv_bounds, band),))


def _with_first(
    bounds: tuple[int, ...],
    kv_bounds: tuple[int, ...],
    firsts: tuple[int, ...],
    seen: Band,
    seeing: Band | None,
    rest: Band,
) -> Mask:
    """Documents of which the first keys are met in the band `seen`, and the first queries meet later keys in `seeing`.

    Later queries meet later keys in `rest`. `firsts`: how many tokens of each document are its first ones.
    """
    documents = [
        (q, min(q + first, q_stop), q_stop, k, min(k + first, k_stop), k_stop)
        for (q, q_stop), (k, k_stop), first in zip(pairwise(bounds), pairwise(kv_bounds), firsts, strict=True)
    ]

    def branch(band: Band, q_starts: list[int], k_starts: list[int]) -> Branch:
        return Branch((*q_starts, bounds[-1]), (*k_starts, kv_bounds[-1]), band)

    if all(k_after == k_stop for *_, k_after, k_stop in documents):
        return Mask((Branch(bounds, kv_bounds, seen),))
    # Branches do not overlap. Parts pair by index, so what a branch leaves out meets an empty part:
    #    keys           F F L L L     F: first, L: later
    #    queries F      s s g g g     s: seen, queries of the whole document by first keys
    #            L      s s r r r     g: seeing, first queries by later keys; r: rest
    #            L      s s r r r
    found = [branch(seen, [at for q, _, end, *_ in documents for at in (q, end)],
                    [at for *_, k, k_after, _ in documents for at in (k, k_after)])]  # fmt: skip
    thirds = [at for q, q_after, *_ in documents for at in (q, q, q_after)]
    if seeing is not None:
        found.append(branch(seeing, thirds, [at for *_, k, k_after, end in documents for at in (k, k_after, end)]))
    found.append(branch(rest, thirds, [at for *_, k, k_after, _ in documents for at in (k, k_after, k_after)]))
    return Mask(tuple(found))


def _prefixes(prefix: int | Sequence[int], documents: int) -> tuple[int, ...]:
    """Tokens of the prefix of each document. Raises `InputError` for what is not one number, or one for each."""
    several = prefix if isinstance(prefix, (list, tuple)) else (prefix,) * documents
    if len(several) != documents:
        raise InputError(f"prefix has {len(several)} numbers for {documents} documents; give one, or one for each")
    for count in several:
        if isinstance(count, bool) or not isinstance(count, int) or count < 0:
            raise InputError(f"prefix must be a number of tokens from 0 on, or one for each document, got {count!r}")
    return tuple(several)


def _chunked(bounds: tuple[int, ...], kv_bounds: tuple[int, ...], band: Band, chunk: int) -> Branch:
    """The band in chunks of each document; the n-th chunks of two documents meet."""
    documents = [(*q, *k) for q, k in zip(pairwise(bounds), pairwise(kv_bounds), strict=True)]
    # A chunk that no document exceeds cuts nothing: None gives equal masks for equal pairs.
    if all(max(q_stop - q, k_stop - k) <= chunk for q, q_stop, k, k_stop in documents):
        return Branch(bounds, kv_bounds, band)
    if bounds == kv_bounds:
        return Branch(bounds, bounds, band, segment=chunk)
    # Documents of unlike length have unlike many chunks; empty ones make up for them, so that chunks pair by index:
    #    q    |0   |4   |8  10|          k    |0   |4 6||
    starts = [
        (min(q + at, q_stop), min(k + at, k_stop))
        for q, q_stop, k, k_stop in documents
        for at in range(0, max(q_stop - q, k_stop - k), chunk)
    ]
    q_starts, k_starts = zip(*starts, strict=True)
    return Branch((*q_starts, bounds[-1]), (*k_starts, kv_bounds[-1]), band)


def _tokens(name: str, count: object) -> int:
    """The count. Raises `InputError` for what is no number of tokens from 1 on."""
    if isinstance(count, bool) or not isinstance(count, int) or count < 1:
        raise InputError(f"{name} must be a number of tokens from 1 on, or None, got {count!r}")
    return count


def check_causal(causal: object) -> None:
    """Raise `InputError` for what is not True or False, such as "no" and a tensor, whose truth is not what is meant."""
    # The truth value of "no", or of a tensor, is not what the caller means.
    if not isinstance(causal, bool):
        raise InputError(f"causal must be True or False, got {causal!r} ({type(causal).__name__})")


def _window(window: tuple[int | None, int | None] | None) -> tuple[int, int]:
    """(left, right) with UNBOUNDED for None, -1 and what is longer than any sequence."""
    if window is None:
        return UNBOUNDED, UNBOUNDED
    if not isinstance(window, (tuple, list)) or len(window) != 2:
        raise InputError(f"window={window!r}: expected (left, right) in tokens, with None or -1 for unbounded")
    sides = []
    for name, side in zip(("left", "right"), window, strict=True):
        # bool is an int to Python, and True would be a window of one token.
        if side is not None and (isinstance(side, bool) or not isinstance(side, int) or side < -1):
            raise InputError(f"window {name} side is {side!r}: expected a number of tokens >= 0, or None or -1")
        # Longer than any sequence is unbounded, so equal masks compare equal.
        sides.append(UNBOUNDED if side is None or side == -1 or side >= MOST_TOKENS else side)
    return sides[0], sides[1]
