"""Masks as values: the argument `mask=` of attention, in addition to `causal` and `window`.

    out = ring.attention(q, k, v, seq, causal=True, mask=masks.chunked(8192))

A mask lowers itself to rectangles over the sequences of a call, and has a text that `from_text` reads. Attention,
layers, the compiled operator, `explain` and the adapters pass it on without checking its kind. A new mask is a class
and a constructor here, a row in docs/masks.md, and a line in the reference of `ringattn.testing`.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from itertools import accumulate, groupby, pairwise
from numbers import Integral
from typing import Any

import numpy as np

from ringattn.core.geometry import CAUSAL, FULL, MOST_TOKENS, UNBOUNDED, Band, StridedRange
from ringattn.core.mask import AttentionMask, Branch, Frame, Mask
from ringattn.core.rectangles import Rectangle, Rectangles, rectangle, segments
from ringattn.errors import InputError
from ringattn.integers import whole_number

__all__ = [
    "AttentionMask", "BidirectionalBlocks", "ByHead", "Chunked", "GlobalTokens", "Prefix", "Slices", "Tree",
    "bidirectional_blocks", "by_head", "chunked", "from_text", "global_tokens", "prefix", "slices", "tree",
]  # fmt: skip


def chunked(tokens: int) -> Chunked:
    """Cut each document into chunks; a query attends only to keys of the same chunk (Llama 4's chunked attention).

    Args:
        tokens: Tokens of a chunk. Chunks start at the start of each document.

    Returns:
        The mask. It combines with `causal` and `window`.

    Raises:
        InputError: `tokens` is not an integer of at least 1.

    Example:
        ring.attention(q, k, v, seq, causal=True, mask=masks.chunked(8192))
    """
    return Chunked(tokens)


def prefix(tokens: int | Sequence[int]) -> Prefix:
    """Let all queries of a document attend to its first keys, whatever `causal` and `window` exclude (prefix-LM).

    Args:
        tokens: The number of first keys, or one number per document.

    Returns:
        The mask. It needs `causal=True`.

    Raises:
        InputError: A number is not an integer of at least 0.

    Example:
        ring.attention(q, k, v, seq, causal=True, mask=masks.prefix(128))
    """
    return Prefix(tuple(tokens) if isinstance(tokens, Iterable) else tokens)


def global_tokens(tokens: int) -> GlobalTokens:
    """Let the first tokens of a document attend to all its tokens, and all tokens to them, whatever `window` excludes.

    With `causal`, only later tokens attend to the first tokens (StreamingLLM); without `causal`, all tokens do
    (Longformer).

    Args:
        tokens: The number of first tokens.

    Returns:
        The mask. It needs a `window`.

    Raises:
        InputError: `tokens` is not an integer of at least 1.

    Example:
        ring.attention(q, k, v, seq, causal=True, window=(4095, 0), mask=masks.global_tokens(64))
    """
    return GlobalTokens(tokens)


def bidirectional_blocks(blocks: Iterable[tuple[int, int]]) -> BidirectionalBlocks:
    """Let the tokens of a block attend to later keys of the same block too, which `causal` excludes (Gemma 3's images).

    Args:
        blocks: The first token of each block and the token after its last, counted over the whole sequence. Blocks are
            in order, do not overlap, and do not cross documents.

    Returns:
        The mask. It needs `causal=True`, and queries and keys of the same sequence. A window still limits the keys
        before a query.

    Raises:
        InputError: There is no block, or the numbers are not integers in order.

    Example:
        ring.attention(q, k, v, seq, causal=True, mask=masks.bidirectional_blocks([(5, 261), (300, 556)]))
    """
    pairs = _pairs("masks.bidirectional_blocks takes pairs (first token, token after the last)", blocks)
    return BidirectionalBlocks(tuple(edge for pair in pairs for edge in pair))


def slices(
    q_ranges: Iterable[tuple[int, int]], k_ranges: Iterable[tuple[int, int]], kinds: str | Iterable[str] = "full"
) -> Slices:
    """Let the queries of each range attend to the keys of the range of the same index: a mask of any rectangles.

    Args:
        q_ranges: For each slice its first query, and the position after its last query.
        k_ranges: For each slice its first key, and the position after its last key.
        kinds: One kind for all slices, or one per slice. full: all pairs. causal: a query attends to its own key and to
            earlier keys, where the last query is aligned with the last key. causal_from_start: the same, where the
            first query is aligned with the first key. inverse_causal: a query attends to its own key and to later keys,
            where the first query is aligned with the first key. bi_causal: both causal and inverse_causal.

    Returns:
        The mask. Tokens in no slice attend to nothing. It takes no window, sequences without documents, and `causal`
        only if no slice has a key after its query; with `kv_seq`, k_ranges are positions of that sequence.

    Raises:
        InputError: The arguments have different lengths, a range is not two ordered positions, a kind is unknown, or a
            pair of a query and a key is in two slices.

    Example:
        # 4,096 tokens, then two answers of 512 tokens that attend to them, each to itself, not to each other
        mask = masks.slices(
            [(0, 5120), (4096, 4608), (4608, 5120)], [(0, 4096), (4096, 4608), (4608, 5120)],
            ["causal_from_start", "causal", "causal"],
        )
        ring.attention(q, k, v, seq, mask=mask)
    """
    sides = [_ranges("masks.slices", name, side) for name, side in (("q_ranges", q_ranges), ("k_ranges", k_ranges))]
    names = [kinds] * len(sides[0]) if isinstance(kinds, str) else list(kinds)
    if not len(sides[0]) == len(sides[1]) == len(names):
        raise InputError(
            f"masks.slices has {len(sides[0])} q_ranges, {len(sides[1])} k_ranges and {len(names)} kinds; give one of "
            "each per slice"
        )
    for name in names:
        if name not in _KINDS:
            raise InputError(f"masks.slices: kind {name!r} is not known; choose one of {', '.join(_KINDS)}")
    (q, q_stop), (k, k_stop) = (side.T for side in sides)
    flags = np.array([_KINDS[name] for name in names], bool).reshape(-1, 3)
    from_end, from_start, later = flags.T
    # Kinds as bounds of the distance q - k: causal bounds it from below, inverse_causal from above.
    lo = np.where(from_end, q_stop - k_stop, np.where(from_start, q - k, -UNBOUNDED))
    hi = np.where(later, q - k, UNBOUNDED)
    rows = np.stack([q, q_stop, k, k_stop, lo, hi, np.ones_like(q), np.zeros_like(q)], axis=1)[lo <= hi]
    return Slices(Rectangles(rows[np.lexsort(rows.T[::-1])]))


def tree(parents: Iterable[int], lengths: Iterable[int]) -> Tree:
    """Let the tokens of each node attend to those before them in the node, and to all tokens of the node's ancestors.

    Use it for sequences that share prefixes, such as many answers to one prompt, without repeating the prefix. The
    tokens of the nodes follow one another in the order of the nodes. `ringattn.adapters.trees` merges batches of
    sequences into trees; `seq.positions(per_document=True)` counts positions from the root, and `seq.edges()` returns
    the labels.

    Args:
        parents: For each node the number of its parent; -1 for a root. The nodes are in depth-first order: a node
            follows its parent, and all its descendants follow it before any other node does.
        lengths: The number of tokens of each node, from 0 on.

    Returns:
        The mask. `causal=True` changes nothing. A window counts distances along the path from the root, not in the
        packed order. It has no documents: a tree may have several roots instead.

    Raises:
        InputError: The arguments have different lengths, the numbers are not whole numbers, or the order is not
            depth-first.

    Example:
        # a prompt of 1,024 tokens, and three answers
        mask = masks.tree([-1, 0, 0, 0], [1024, 512, 256, 512])
        seq = ring.sequence(2304).with_mask(mask)
    """
    for name, numbers in (("parents", parents), ("lengths", lengths)):
        if not isinstance(numbers, Iterable):
            raise InputError(f"masks.tree: {name} must list one number per node, got {numbers!r}")
    return Tree(tuple(parents), tuple(lengths))


def by_head(groups: Iterable[tuple[int, AttentionMask | None]]) -> ByHead:
    """Give groups of query heads different masks.

    Args:
        groups: For each group of consecutive query heads their number and their mask; None: `causal` and window alone.

    Returns:
        The mask. It combines with `causal` and a window if the masks of all groups do.

    Raises:
        InputError: A number of heads is not at least 1, or a mask is not a mask.

    Example:
        ring.attention(q, k, v, seq, causal=True, mask=masks.by_head([(4, masks.chunked(8192)), (4, None)]))
    """
    pairs = _pairs("masks.by_head takes pairs (number of heads, mask)", groups)
    return ByHead(tuple((heads, mask) for heads, mask in pairs))


def from_text(text: str) -> AttentionMask:
    """Read the text of a mask: `from_text(mask.text) == mask`.

    Args:
        text: A name and its numbers, such as `chunked:8192`, `prefix:100,30`, `tree:1024(2*512,256)` or
            `slices:0-64x0-32f,64-96x0-96c`.

    Returns:
        The mask.

    Raises:
        InputError: The name is not a mask, or what follows it cannot be read.

    Example:
        masks.from_text("chunked:8192")
    """
    if not isinstance(text, str):
        raise InputError(f"mask={text!r} is not a text; write the name of a mask and its numbers, as in chunked:128")
    name, _, rest = text.partition(":")
    if name not in _PARSERS:
        raise InputError(f"mask={text!r}: {name!r} is not a mask; choose one of {', '.join(_PARSERS)}")
    try:
        return _PARSERS[name](rest)
    except InputError:
        raise
    except ValueError:
        expected = _FORMS.get(name, f"expected whole numbers after {name}:, as in {name}:128")
        raise InputError(f"mask={text!r}: {expected}") from None


def check_mask(mask: AttentionMask | None) -> AttentionMask | None:
    """Return the mask. Raises InputError if it is neither a mask nor None."""
    if mask is not None and not isinstance(mask, AttentionMask):
        raise InputError(f"mask={mask!r} is not a mask; make one with ringattn.masks, as masks.chunked(8192)")
    return mask


def refuse_removed(options: Mapping[str, object]) -> None:
    """Raise InputError for an option that a mask has replaced, with the line to write instead.

    Args:
        options: Keyword arguments that a function does not have.

    Raises:
        InputError: A mask has replaced one of the options.
        TypeError: One of the options does not exist.
    """
    for name, value in options.items():
        if name not in _REPLACED:
            raise TypeError(f"{name!r} is not an option of attention")
        if value is not None:
            call = f"mask=masks.{_REPLACED[name]}({value!r})"
            raise InputError(f"{name}={value!r} is now a mask: write {call}, after `from ringattn import masks`")


@dataclass(frozen=True)
class Chunked(AttentionMask):
    """See `chunked`."""

    tokens: int
    text: str = field(init=False, repr=False)

    def __post_init__(self) -> None:
        _set(self, "tokens", _tokens("masks.chunked", self.tokens, 1))
        _set_text(self, f"chunked:{self.tokens}")

    def lower(self, frame: Frame) -> Mask:
        """See `AttentionMask.lower`. The n-th chunks of two paired documents pair."""
        return Mask.of(segments(frame.documents, frame.band, self.tokens))


@dataclass(frozen=True)
class Prefix(AttentionMask):
    """See `prefix`."""

    tokens: int | tuple[int, ...]
    text: str = field(init=False, repr=False)

    def __post_init__(self) -> None:
        is_tuple = isinstance(self.tokens, tuple)
        listed = self.tokens if isinstance(self.tokens, tuple) else (self.tokens,)
        counts = tuple(_tokens("masks.prefix", count, 0) for count in listed)
        _set(self, "tokens", counts if is_tuple else counts[0])
        # A trailing comma marks one number per document of a single document.
        comma = "," if is_tuple and len(counts) == 1 else ""
        _set_text(self, f"prefix:{','.join(map(str, counts))}{comma}")

    def lower(self, frame: Frame) -> Mask:
        """See `AttentionMask.lower`."""
        documents = len(frame.documents)
        counts = self.tokens if isinstance(self.tokens, tuple) else (self.tokens,) * documents
        if len(counts) != documents:
            raise InputError(
                f"masks.prefix has {len(counts)} numbers for {documents} documents; give one, or one per document"
            )
        if not frame.causal:
            raise InputError("masks.prefix needs causal=True: without it, all queries attend to all keys already")
        return _with_first(frame, counts, FULL, None)


@dataclass(frozen=True)
class GlobalTokens(AttentionMask):
    """See `global_tokens`."""

    tokens: int
    text: str = field(init=False, repr=False)

    def __post_init__(self) -> None:
        _set(self, "tokens", _tokens("masks.global_tokens", self.tokens, 1))
        _set_text(self, f"global_tokens:{self.tokens}")

    def lower(self, frame: Frame) -> Mask:
        """See `AttentionMask.lower`."""
        if not frame.windowed:
            raise InputError("masks.global_tokens needs a window: without one, all tokens attend to all tokens already")
        # Under a causal mask the global tokens attend to all keys before them, which their own window may exclude.
        seen, seeing = (CAUSAL, None) if frame.causal else (FULL, FULL)
        return _with_first(frame, (self.tokens,) * len(frame.documents), seen, seeing)


@dataclass(frozen=True)
class BidirectionalBlocks(AttentionMask):
    """See `bidirectional_blocks`. `edges`: first token and end of each block in turn."""

    edges: tuple[int, ...]
    text: str = field(init=False, repr=False)

    def __post_init__(self) -> None:
        listed = self.edges if isinstance(self.edges, tuple) else ()
        edges = tuple(_tokens("masks.bidirectional_blocks", edge, 0) for edge in listed)
        if not edges or len(edges) % 2 or any(edge > after for edge, after in pairwise(edges)):
            raise InputError(
                f"masks.bidirectional_blocks needs blocks in order that do not overlap, got {self.edges!r}"
            )
        _set(self, "edges", edges)
        _set_text(self, f"bidirectional_blocks:{','.join(map(str, edges))}")

    def lower(self, frame: Frame) -> Mask:
        """See `AttentionMask.lower`."""
        if not frame.causal:
            raise InputError(
                "masks.bidirectional_blocks needs causal=True: it allows later keys, which only causal excludes"
            )
        if frame.bounds != frame.kv_bounds:
            raise InputError(
                "masks.bidirectional_blocks needs queries and keys of the same tokens, so leave kv_seq out"
            )
        rectangles = [*segments(frame.documents, frame.band)]
        # A block of one token has no later key.
        for start, stop in ((a, b) for a, b in zip(self.edges[::2], self.edges[1::2], strict=True) if b - a > 1):
            document = bisect_right(frame.bounds, start)
            if document == len(frame.bounds) or stop > frame.bounds[document]:
                raise InputError(
                    f"masks.bidirectional_blocks: the block from {start} to {stop} is not inside one document of "
                    f"{frame.bounds[-1]} tokens with bounds {frame.bounds[:8]}"
                )
            rectangles.append(Rectangle(start, stop, start, stop, hi=-1))
        return Mask.of(rectangles)


@dataclass(frozen=True)
class Slices(AttentionMask):
    """See `slices`. `rectangles`: the slices in ascending order, without those that allow no pair."""

    rectangles: Rectangles

    def __post_init__(self) -> None:
        if overlap := self.rectangles.overlap():
            (first, second), (q, k) = overlap
            rows = [Rectangle(*row) for row in self.rectangles.array[[first, second]].tolist()]
            raise InputError(
                f"masks.slices: query {q} attends to key {k} in two slices, {rows[0]} and {rows[1]}; a pair may be in "
                "one slice only"
            )

    @cached_property
    def text(self) -> str:  # type: ignore[override]
        """See `AttentionMask.text`."""
        return "slices:" + ",".join(
            f"{q}-{q_stop}x{k}-{k_stop}{_letter(q, q_stop, k, k_stop, lo, hi)}"
            for q, q_stop, k, k_stop, lo, hi, *_ in self.rectangles.array.tolist()
        )

    @property
    def takes_causal(self) -> bool:  # type: ignore[override]
        """See `AttentionMask.takes_causal`."""
        return self.later_key is None

    @cached_property
    def later_key(self) -> tuple[int, int] | None:
        """A query and a key after it to which it attends, or None if `causal` excludes no pair of the slices."""
        q, _, k, k_stop, lo, *_ = self.rectangles.array.T
        least = np.maximum(lo, q - k_stop + 1)  # the smallest distance q - k of a pair; every slice has pairs
        later = np.flatnonzero(least < 0)
        if not len(later):
            return None
        n = later[0]
        query = int(max(q[n], k[n] + least[n]))
        return query, query - int(least[n])

    def check_causal(self, remedy: str) -> None:
        """Raise InputError, which ends with the remedy, if `causal` excludes a pair of the slices."""
        if self.later_key is not None:
            query, key = self.later_key
            raise InputError(
                f"masks.slices: query {query} attends to the later key {key}, which causal excludes; {remedy}"
            )

    def lower(self, frame: Frame) -> Mask:
        """See `AttentionMask.lower`. If `causal` excludes no pair, the slices are the same with it and without."""
        if frame.windowed:
            raise InputError("masks.slices says which pairs are allowed; leave the window out")
        if frame.causal:
            self.check_causal("leave causal out")
        if len(frame.documents) != 1:
            raise InputError("masks.slices needs sequences without documents; give each document slices of its own")
        array = self.rectangles.array
        for name, stop, length in (("q", 1, frame.bounds[-1]), ("k", 3, frame.kv_bounds[-1])):
            if array[:, stop].max(initial=0) > length:
                raise InputError(
                    f"masks.slices: {name}_ranges end at {array[:, stop].max()}, and the sequence has {length} tokens"
                )
        return Mask((Branch(self.rectangles),))


@dataclass(frozen=True)
class Tree(AttentionMask):
    """See `tree`. `starts`: the first token of each node. `ends`: the token after the last of its subtree."""

    parents: tuple[int, ...]
    lengths: tuple[int, ...]
    by_depth = True

    def __post_init__(self) -> None:
        if len(self.parents) != len(self.lengths):
            raise InputError(f"masks.tree has {len(self.parents)} parents and {len(self.lengths)} lengths")
        _set(self, "lengths", tuple(_tokens("masks.tree", length, 0) for length in self.lengths))
        needed = "masks.tree: the parent of node {} must be the number of a node, or -1"
        _set(self, "parents", tuple(whole_number(n, needed.format(i)) for i, n in enumerate(self.parents)))
        path: list[int] = []
        for node, parent in enumerate(self.parents):
            while path and path[-1] != parent:
                path.pop()
            if not path and parent != -1:
                raise InputError(
                    f"masks.tree: node {node} has the parent {parent}, which is not on the path from the root to node "
                    f"{node - 1}; list the nodes in depth-first order, with -1 as the parent of a root"
                )
            path.append(node)

    @property
    def tokens(self) -> int:
        """The number of tokens of all nodes."""
        return sum(self.lengths)

    @cached_property
    def starts(self) -> tuple[int, ...]:
        """The first token of each node."""
        return (*accumulate(self.lengths[:-1], initial=0),) if self.lengths else ()

    @cached_property
    def ends(self) -> tuple[int, ...]:
        """For each node the token after the last of its descendants."""
        ends = [start + length for start, length in zip(self.starts, self.lengths, strict=True)]
        for node in reversed(range(len(ends))):
            if self.parents[node] >= 0:
                ends[self.parents[node]] = max(ends[self.parents[node]], ends[node])
        return tuple(ends)

    @cached_property
    def depths(self) -> tuple[int, ...]:
        """For each node the number of tokens of its ancestors: the position of its first token."""
        depths: list[int] = []
        for parent in self.parents:
            depths.append(0 if parent < 0 else depths[parent] + self.lengths[parent])
        return tuple(depths)

    @cached_property
    def text(self) -> str:  # type: ignore[override]
        """See `AttentionMask.text`: lengths, with the children of a node in brackets."""
        children: list[list[str]] = [[] for _ in self.parents]
        roots: list[str] = []
        for node in reversed(range(len(self.parents))):
            inner = f"({_repeated(children[node][::-1])})" if children[node] else ""
            siblings = roots if self.parents[node] < 0 else children[self.parents[node]]
            siblings.append(f"{self.lengths[node]}{inner}")
        return f"tree:{_repeated(roots[::-1])}"

    def parent_tokens(self) -> np.ndarray:
        """Return for each token the token before it on its path; -1 for the first token of a path. int64, (tokens,)."""
        parents = np.arange(-1, self.tokens - 1)
        last: list[int] = []  # the last token of each node or, if it is empty, of its nearest ancestor that is not
        for parent, start, length in zip(self.parents, self.starts, self.lengths, strict=True):
            before = last[parent] if parent >= 0 else -1
            last.append(start + length - 1 if length else before)
            if length:
                parents[start] = before
        return parents

    def check_length(self, tokens: int) -> None:
        """Raise `InputError` unless `tokens` is the number of tokens of the tree."""
        if tokens != self.tokens:
            raise InputError(f"masks.tree has {self.tokens} tokens, and the sequence has {tokens}")

    def lower(self, frame: Frame) -> Mask:
        """See `AttentionMask.lower`. Each node is one causal rectangle: its keys, and the queries of its subtree."""
        if frame.bounds != frame.kv_bounds:
            raise InputError("masks.tree needs queries and keys of the same tokens, so leave kv_seq out")
        self.check_length(frame.bounds[-1])
        if len(frame.documents) != 1:
            raise InputError("masks.tree takes a sequence without documents; a tree may have several roots instead")
        if -UNBOUNDED < frame.band.lo < 0:
            raise InputError("masks.tree never looks ahead; use a window with a right side of 0")
        if frame.band.hi < UNBOUNDED:
            return Mask.of(self._within(frame.band.hi))
        rows: list[Rectangle] = []
        for start, length, end in zip(self.starts, self.lengths, self.ends, strict=True):
            # A node that ends where its parent does, and follows it at once, continues the parent's rectangle.
            if rows and rows[-1].k_stop == start and rows[-1].q_stop == end:
                rows[-1] = rows[-1]._replace(k_stop=start + length)
            elif length:
                rows.append(Rectangle(start, end, start, start + length, 0))
        return Mask.of(rows)

    def _within(self, left: int) -> Iterator[Rectangle]:
        """Yield a rectangle for each node and each of its ancestors at most `left` tokens before it on the path."""
        for node, start in enumerate(self.starts):
            ancestor = node
            while ancestor >= 0 and self.depths[node] - (self.depths[ancestor] + self.lengths[ancestor] - 1) <= left:
                # q - k is the distance on the path and the number of tokens between them that are not on it.
                skipped = (start - self.depths[node]) - (self.starts[ancestor] - self.depths[ancestor])
                k, k_stop = self.starts[ancestor], self.starts[ancestor] + self.lengths[ancestor]
                yield Rectangle(start, start + self.lengths[node], k, k_stop, skipped, skipped + left)
                ancestor = self.parents[ancestor]


@dataclass(frozen=True)
class ByHead(AttentionMask):
    """See `by_head`."""

    groups: tuple[tuple[int, AttentionMask | None], ...]
    text: str = field(init=False, repr=False)

    def __post_init__(self) -> None:
        needed = "masks.by_head: a group needs a number of heads, at least 1"
        _set(self, "groups", tuple((whole_number(heads, needed, 1), mask) for heads, mask in self.groups))
        for _, mask in self.groups:
            if isinstance(check_mask(mask), ByHead):
                raise InputError("masks.by_head: the mask of a group is by_head itself; list its groups instead")
        groups = (f"{heads}={'' if mask is None else mask.text}" for heads, mask in self.groups)
        _set_text(self, f"by_head:{';'.join(groups)}")

    @property
    def by_depth(self) -> bool:  # type: ignore[override]
        """See `AttentionMask.by_depth`."""
        return any(mask is not None and mask.by_depth for _, mask in self.groups)

    @property
    def takes_causal(self) -> bool:  # type: ignore[override]
        """See `AttentionMask.takes_causal`."""
        return all(mask is None or mask.takes_causal for _, mask in self.groups)

    @property
    def q_heads(self) -> int:  # type: ignore[override]
        """See `AttentionMask.q_heads`."""
        return sum(heads for heads, _ in self.groups)

    def lower(self, frame: Frame) -> Mask:
        """See `AttentionMask.lower`."""
        if self.q_heads != frame.q_heads:
            raise InputError(
                f"masks.by_head has masks for {self.q_heads} query heads, and the call has {frame.q_heads}"
            )
        branches, first = [], 0
        for heads, mask in self.groups:
            lowered = Mask.of(segments(frame.documents, frame.band)) if mask is None else mask.lower(frame)
            branches += [replace(branch, heads=StridedRange(first, heads)) for branch in lowered.branches]
            first += heads
        return Mask(tuple(branches))


def _with_first(frame: Frame, firsts: tuple[int, ...], seen: Band, seeing: Band | None) -> Mask:
    """Return a mask in which the first tokens of each document have separate bands.

    All queries attend to the first keys in the band `seen`; the first queries attend to later keys in `seeing`, or in
    the frame's band if that is None; later queries attend to later keys in the frame's band. `firsts`: first tokens
    per document.
    """
    # Rectangles do not overlap:
    #    keys           F F L L L     F: first, L: later
    #    queries F      s s g g g     s: seen, queries of the whole document to first keys
    #            L      s s r r r     g: seeing, first queries to later keys; r: the frame's band
    #            L      s s r r r
    rectangles = []
    for (q, q_stop, k, k_stop), first in zip(frame.documents, firsts, strict=True):
        q_after, k_after = min(q + first, q_stop), min(k + first, k_stop)
        rectangles.append(rectangle(q, q_stop, k, k_after, seen))
        if seeing is not None:
            rectangles.append(rectangle(q, q_after, k_after, k_stop, seeing))
        rectangles.append(rectangle(q_after, q_stop, k_after, k_stop, frame.band))
    return Mask.of(rectangles)


def _set_text(mask: AttentionMask, text: str) -> None:
    """Set the text of a frozen mask when it is created.

    torch.compile treats a stored string as a constant, but makes a number that has changed symbolic.
    """
    _set(mask, "text", text)


def _set(mask: AttentionMask, name: str, value: object) -> None:
    """Set an attribute of a frozen mask when it is created."""
    object.__setattr__(mask, name, value)


def _tokens(name: str, tokens: object, least: int) -> int:
    return whole_number(tokens, f"{name} takes whole numbers of tokens from {least} on", least)


_KINDS = {
    "full": (False, False, False),
    "causal": (True, False, False),
    "causal_from_start": (False, True, False),
    "inverse_causal": (False, False, True),
    "bi_causal": (True, False, True),
}
"""For each kind of a slice: whether it is causal from the end, causal from the start, and inverse causal."""
_LETTERS = {"f": "full", "c": "causal", "s": "causal_from_start", "i": "inverse_causal", "b": "bi_causal"}
_SLICE = re.compile(r"(\d+)-(\d+)x(\d+)-(\d+)([fcsib])")
_NODE = re.compile(r"(?:(\d+)\*)?(\d+)|([(),])")


def _pairs(needed: str, pairs: Iterable[tuple[Any, Any]]) -> list[tuple[Any, ...]]:
    """Return the pairs in a list. Raises InputError, whose message begins with `needed`, unless all are pairs."""
    try:
        listed = [tuple(pair) for pair in pairs]
    except TypeError:  # not iterable
        raise InputError(f"{needed}, got {pairs!r}") from None
    if any(len(pair) != 2 for pair in listed):
        raise InputError(f"{needed}, got {listed!r}")
    return listed


def _ranges(name: str, argument: str, ranges: Iterable[tuple[int, int]]) -> np.ndarray:
    """Return ranges as an array (n, 2). Raises InputError unless they are ordered pairs of positions."""
    pairs = _pairs(f"{name}: {argument} are pairs (first position, position after the last)", ranges)
    for pair in pairs:
        if any(isinstance(n, bool) or not isinstance(n, Integral) for n in pair):
            raise InputError(f"{name}: {argument} are pairs (first position, position after the last), got {pair!r}")
        if not 0 <= pair[0] <= pair[1] <= MOST_TOKENS:
            raise InputError(f"{name}: {argument} has {pair!r}, where 0 <= first <= stop is needed")
    return np.array(pairs, np.int64).reshape(-1, 2)


def _letter(q: int, q_stop: int, k: int, k_stop: int, lo: int, hi: int) -> str:
    """Return the letter of the kind of a slice."""
    if hi < UNBOUNDED:
        return "b" if lo > -UNBOUNDED else "i"
    if lo > -UNBOUNDED:
        return "c" if lo == q_stop - k_stop else "s"
    return "f"


def _repeated(items: list[str]) -> str:
    """Return texts of nodes, separated by commas; `3*512` for three equal nodes in succession."""
    counted = ((text, len([*alike])) for text, alike in groupby(items))
    return ",".join(f"{count}*{text}" if count > 1 else text for text, count in counted)


def _read_numbers(make: Callable[[Any], AttentionMask], text: str) -> AttentionMask:
    values = tuple(int(number) for number in text.removesuffix(",").split(","))
    return make(values if "," in text else values[0])


def _read_slices(text: str) -> Slices:
    matches = [_SLICE.fullmatch(item) for item in text.split(",")] if text else []
    rows = [match.groups() for match in matches if match]
    if len(rows) != len(matches):
        raise ValueError(text)
    ranges = [(int(q), int(q_stop), int(k), int(k_stop)) for q, q_stop, k, k_stop, _ in rows]
    return slices([row[:2] for row in ranges], [row[2:] for row in ranges], [_LETTERS[row[4]] for row in rows])


def _read_tree(text: str) -> Tree:
    if _NODE.sub("", text):
        raise ValueError(text)
    # Nodes as (depth, length): one list for each open bracket. `heads`: count and length of the nodes before brackets.
    levels: list[list[tuple[int, int]]] = [[]]
    heads: list[tuple[int, int]] = []
    last: tuple[int, int] | None = None
    for count, length, sign in _NODE.findall(f"{text}," if text else ""):
        if sign == "(" and last:
            heads.append(last)
            levels.append([])
        elif sign == ")" and heads:
            levels[-1] += [(0, last[1])] * last[0] if last else []
            children, (times, inner) = levels.pop(), heads.pop()
            levels[-1] += [(0, inner), *((depth + 1, each) for depth, each in children)] * times
        elif sign == ",":
            levels[-1] += [(0, last[1])] * last[0] if last else []
        elif sign:
            raise ValueError(text)
        last = None if sign else (int(count or 1), int(length))
    if heads:
        raise ValueError(text)
    parents, path = [], [-1]
    for node, (depth, _) in enumerate(levels[0]):
        del path[depth + 1 :]
        parents.append(path[-1])
        path.append(node)
    return Tree(tuple(parents), tuple(length for _, length in levels[0]))


def _read_by_head(text: str) -> ByHead:
    groups = (group.partition("=") for group in text.split(";"))
    return by_head([(int(heads), from_text(mask) if mask else None) for heads, _, mask in groups])


_PARSERS: dict[str, Callable[[str], AttentionMask]] = {
    "chunked": partial(_read_numbers, Chunked), "prefix": partial(_read_numbers, Prefix),
    "global_tokens": partial(_read_numbers, GlobalTokens),
    "bidirectional_blocks": partial(_read_numbers, BidirectionalBlocks),
    "slices": _read_slices, "tree": _read_tree, "by_head": _read_by_head,
}  # fmt: skip
_FORMS = {
    "slices": "expected slices such as 0-64x0-32f, with one of f, c, s, i, b for the kind",
    "tree": "expected lengths with the children of a node in brackets, such as 1024(2*512,256)",
    "by_head": "expected groups such as 4=chunked:64;4=",
}
_REPLACED = {"chunk": "chunked", "prefix": "prefix", "global_tokens": "global_tokens"}
"""Options that attention once had, and the masks that replaced them."""
