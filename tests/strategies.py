"""Hypothesis strategies for attention problems, each with a reference that follows directly from the definition.

A reference is an array (query heads, q tokens, k tokens) of how often each pair must be computed. Tests derive from it
by brute force what each rank sends and reads. The only code under test that the references use is that of the positions
of a rank, which `test_layout.py` compares with separate definitions.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
from hypothesis import example, given
from hypothesis import strategies as st

from ringattn import masks
from ringattn.core.dilation import Dilated
from ringattn.core.geometry import UNBOUNDED, Band, StridedRange, Tile, TokenRange
from ringattn.core.layout import LAYOUTS, OF_DOCUMENTS, Layout, make_layout
from ringattn.core.mask import Branch, Mask, make_mask
from ringattn.core.problem import Problem
from ringattn.core.rectangles import Rectangles, segments
from ringattn.errors import InputError
from ringattn.schedule.content import Content

WORLD_SIZES = (1, 2, 3, 4, 5, 8)
LENGTHS = st.one_of(st.integers(0, 9), st.sampled_from([13, 16, 24, 31]))
SIDES = st.one_of(st.none(), st.just(-1), st.integers(0, 9))

Spots = frozenset[tuple[int, int]]
"""(K/V head, row of the owner's shard): the smallest unit that can be sent."""


class Case(NamedTuple):
    """A problem and its reference."""

    problem: Problem
    reference: np.ndarray

    @property
    def ranks(self) -> int:
        """The number of ranks of the ring."""
        return self.problem.world_size

    def reads(self, owner: int, reader: int) -> Spots:
        """Return the (head, row) pairs of the shard of `owner` that the queries of `reader` attend to."""
        problem = self.problem
        q, k = problem.q_layout.positions(reader), problem.kv_layout.positions(owner)
        needed = self.reference[:, q][:, :, k].any(1).reshape(problem.kv_heads, problem.group, len(k)).any(1)
        return frozenset((int(head), int(row)) for head, row in zip(*np.nonzero(needed), strict=True))

    def reads_beyond(self, owner: int, distance: int) -> Spots:
        """Return the (head, row) pairs of `owner` that any reader at `distance` or farther along the ring reads."""
        readers = [(owner + d) % self.ranks for d in range(distance, self.ranks)]
        return frozenset[tuple[int, int]]().union(*(self.reads(owner, reader) for reader in readers))


def spots(content: Content) -> Spots:
    """Return the set of (head, row) pairs in the content of a buffer."""
    return frozenset((head, row) for head, row in wire_order(content))


def wire_order(content: Content) -> list[tuple[int, int]]:
    """Return the (head, row) pairs of a content in the order of the packed records: by part, row, then head."""
    return [
        (head, row) for part in content for run in part.rows for row in run.members() for head in part.heads.members()
    ]


def reference_of(mask: Mask, q_heads: int, length: int, kv_length: int) -> np.ndarray:
    """Return how often the rectangles of a mask allow each pair, (query heads, q tokens, k tokens)."""
    counts = np.zeros((q_heads, length, kv_length), np.int64)
    for branch in mask.branches:
        heads = slice(None) if branch.heads is None else slice(branch.heads.start, branch.heads.stop)
        for row in branch.rectangles.array.tolist():
            q, q_stop, k, k_stop, lo, hi, copies, period = row
            for first in range(0, copies * max(period, 1), max(period, 1)):
                queries = np.arange(q + first + branch.offset, q_stop + first, branch.dilation)
                keys = np.arange(k + first + branch.offset, k_stop + first, branch.dilation)
                distance = queries[:, None] - keys[None, :]
                counts[heads, queries[:, None], keys[None, :]] += (distance >= lo) & (distance <= hi)
    return counts


def cuts(length: int, documents: int | None = None) -> st.SearchStrategy[tuple[int, ...]]:
    """Draw document boundaries (0, ..., length); documents may be empty."""
    size = {"max_size": 4} if documents is None else {"min_size": documents - 1, "max_size": documents - 1}
    inner = st.lists(st.integers(0, length), **size)
    return inner.map(lambda borders: (0, *sorted(borders), length))


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    """Draw any layout of any length."""
    length, name = draw(LENGTHS), draw(st.sampled_from(LAYOUTS))
    documents = draw(cuts(length)) if name in OF_DOCUMENTS else None
    return make_layout(name, length, draw(st.sampled_from(WORLD_SIZES)), documents)


@st.composite
def windows(draw: st.DrawFn, causal: bool) -> tuple[int | None, int | None] | None:
    """Draw a window that is valid with `causal`."""
    left, right = draw(SIDES), draw(st.sampled_from([None, -1, 0])) if causal else draw(SIDES)
    return draw(st.sampled_from([None, (left, right)]))


@st.composite
def blocks(draw: st.DrawFn, bounds: tuple[int, ...]) -> masks.BidirectionalBlocks:
    """Draw blocks that attend in both directions, up to two in each document with these bounds."""
    drawn = [sorted(draw(st.lists(st.integers(*document), max_size=4))) for document in pairwise(bounds)]
    edges = [edge for numbers in drawn for edge in numbers[: len(numbers) // 2 * 2]]
    return masks.BidirectionalBlocks(tuple(edges or (0, 0)))


@st.composite
def trees(draw: st.DrawFn, tokens: int) -> masks.Tree:
    """Draw a tree with this number of tokens. Nodes may be empty, and there may be several roots."""
    cut_at = draw(cuts(tokens, draw(st.integers(1, 7))))
    parents: list[int] = []
    path = [-1]
    for node in range(len(cut_at) - 1):
        del path[draw(st.integers(1, len(path))) :]
        parents.append(path[-1])
        path.append(node)
    return masks.Tree(tuple(parents), tuple(stop - start for start, stop in pairwise(cut_at)))


@st.composite
def slice_sets(draw: st.DrawFn, length: int, kv_length: int) -> masks.Slices:
    """Draw slices of all kinds. A slice that overlaps one before it is left out."""
    drawn: list[tuple[tuple[int, int], tuple[int, int], str]] = []
    for _ in range(draw(st.integers(0, 5))):
        sides = [sorted(draw(st.tuples(st.integers(0, end), st.integers(0, end)))) for end in (length, kv_length)]
        kind = draw(st.sampled_from(["full", "causal", "causal_from_start", "inverse_causal", "bi_causal"]))
        try:
            masks.slices(*zip(*drawn, ((*sides[0],), (*sides[1],), kind), strict=True))
        except InputError:
            continue
        drawn.append(((sides[0][0], sides[0][1]), (sides[1][0], sides[1][1]), kind))
    return masks.slices(*zip(*drawn, strict=True)) if drawn else masks.slices([], [])


@st.composite
def mask_options(draw: st.DrawFn, documents: int = 1, bounds: tuple[int, ...] | None = None) -> dict[str, Any]:
    """Draw options of `make_mask` for this number of documents. `bounds`: those of queries and keys, if they are equal.

    Most are plain bands, because the code computes their read sets by a separate path.
    """
    causal = draw(st.booleans())
    window, count = draw(windows(causal)), st.integers(0, 12)
    options: dict[str, Any] = {"causal": causal, "window": window}
    several = [st.integers(1, 12).map(masks.chunked)]
    if causal:
        several.append(st.one_of(count, st.tuples(*[count] * documents)).map(masks.prefix))
    if causal and bounds is not None:
        several.append(blocks(bounds))
    if window is not None:
        several.append(st.integers(1, 12).map(masks.global_tokens))
    if bounds is not None and len(bounds) == 2 and (window is None or window[1] in (None, -1, 0)):
        several.append(trees(bounds[-1]))
    mask = draw(st.sampled_from([None, None, None, *several]))
    return options if mask is None else options | {"mask": draw(mask)}


@st.composite
def masks_by_head(draw: st.DrawFn, length: int, kv_length: int) -> masks.ByHead:
    """Draw groups of four query heads, each with slices, a chunk, no mask, or a tree."""
    sizes = draw(st.sampled_from([(4,), (1, 3), (2, 2), (1, 1, 2)]))
    kinds = [slice_sets(length, kv_length), st.integers(1, 12).map(masks.chunked), st.none()]
    if length == kv_length:
        kinds.append(trees(length))
    return masks.by_head([(heads, draw(draw(st.sampled_from(kinds)))) for heads in sizes])


def _bands() -> st.SearchStrategy[Band]:
    return st.builds(
        lambda lo, width: Band(lo, UNBOUNDED if width is None else lo + width),
        st.integers(-6, 6), st.one_of(st.none(), st.integers(0, 9)),
    )  # fmt: skip


def _layout_of(draw: st.DrawFn, length: int, ranks: int, documents: tuple[int, ...] | None) -> Layout:
    names = LAYOUTS if documents is not None else [name for name in LAYOUTS if name not in OF_DOCUMENTS]
    return make_layout(draw(st.sampled_from(names)), length, ranks, documents)


@st.composite
def plain_cases(draw: st.DrawFn) -> Case:
    """Draw calls of `Ring.attention` on one sequence."""
    length, ranks = draw(LENGTHS), draw(st.sampled_from(WORLD_SIZES))
    documents = draw(st.one_of(st.none(), cuts(length)))
    options = draw(mask_options(1 if documents is None else len(documents) - 1, documents or (0, length)))
    if documents is None and draw(st.integers(0, 3)) == 0:
        options = {"mask": draw(st.one_of(slice_sets(length, length), masks_by_head(length, length)))}
    mask = make_mask(length, length, documents=documents, kv_documents=documents, q_heads=4, **options)
    layout = _layout_of(draw, length, ranks, documents)
    return _case(draw, layout, layout, mask)


@st.composite
def cross_cases(draw: st.DrawFn) -> Case:
    """Draw calls of `Ring.attention` with K/V of another sequence, of a different length, layout and documents."""
    length, kv_length, ranks = draw(LENGTHS), draw(LENGTHS), draw(st.sampled_from(WORLD_SIZES))
    documents = draw(st.one_of(st.none(), cuts(length)))
    kv_documents = None if documents is None else draw(cuts(kv_length, len(documents) - 1))
    options = draw(mask_options(1 if documents is None else len(documents) - 1))
    if documents is None and draw(st.integers(0, 3)) == 0:
        options = {"mask": draw(st.one_of(slice_sets(length, kv_length), masks_by_head(length, kv_length)))}
    mask = make_mask(length, kv_length, documents=documents, kv_documents=kv_documents, q_heads=4, **options)
    layout = _layout_of(draw, length, ranks, documents)
    return _case(draw, layout, _layout_of(draw, kv_length, ranks, kv_documents), mask)


@st.composite
def branched_cases(draw: st.DrawFn) -> Case:
    """Draw cases of several branches, each with its own heads, segments, rate and band.

    A pair may count twice, and a head may attend to nothing.
    """
    length, ranks = draw(LENGTHS), draw(st.sampled_from(WORLD_SIZES))
    branches = []
    for _ in range(draw(st.integers(1, 3))):
        bounds, first = draw(cuts(length)), draw(st.integers(0, 3))
        heads = draw(
            st.one_of(st.none(), st.integers(0, 4 - first).map(lambda count, first=first: StridedRange(first, count)))
        )
        segment, dilation = draw(st.one_of(st.none(), st.integers(1, 30))), draw(st.sampled_from([1, 1, 2, 3, 4, 6]))
        offset = draw(st.integers(0, dilation - 1))
        documents = [(*document, *document) for document in pairwise(bounds)]
        rectangles = Rectangles(segments(documents, draw(_bands()), segment))
        branches.append(Branch(rectangles, heads, dilation, offset))
    layout = _layout_of(draw, length, ranks, draw(st.one_of(st.none(), cuts(length))))
    return _case(draw, layout, layout, Mask(tuple(branches)))


def _case(draw: st.DrawFn, layout: Layout, kv_layout: Layout, mask: Mask) -> Case:
    kv_heads = draw(st.sampled_from([1, 2, 4]))
    dtype, wire = draw(st.sampled_from(["bfloat16", "float32"])), draw(st.sampled_from([None, "bfloat16"]))
    problem = Problem(layout, kv_layout, mask, draw(st.integers(1, 2)), 4, kv_heads, 8, 4, dtype, wire)
    return Case(problem, reference_of(mask, 4, layout.length, kv_layout.length))


def cases() -> st.SearchStrategy[Case]:
    """Draw cases of every kind."""
    return st.one_of(plain_cases(), cross_cases(), branched_cases())


def simple(
    name: str, length: int, ranks: int, documents: tuple[int, ...] | None = None, heads: int = 1, **options: object
) -> Case:
    """Return a case on one sequence. `name`: the layout. `options`: those of `make_mask`."""
    layout = make_layout(name, length, ranks, documents)
    mask = make_mask(length, length, documents=documents, kv_documents=documents, **options)  # type: ignore[arg-type]
    return Case(
        Problem(layout, layout, mask, 1, heads, heads, 64, 64, "bfloat16"), reference_of(mask, heads, length, length)
    )


def cross(
    names: tuple[str, str], documents: tuple[int, ...], kv_documents: tuple[int, ...], ranks: int, **options: object
) -> Case:
    """Return a case whose K/V are from another sequence, causal by default, with two query heads per K/V head."""
    options = options or {"causal": True}
    mask = make_mask(documents[-1], kv_documents[-1], documents=documents, kv_documents=kv_documents, **options)  # type: ignore[arg-type]
    sides = zip(names, (documents, kv_documents), strict=True)
    q_layout, kv_layout = (make_layout(name, cuts[-1], ranks, cuts) for name, cuts in sides)
    problem = Problem(q_layout, kv_layout, mask, 1, 4, 2, 8, 4, "bfloat16")
    return Case(problem, reference_of(mask, 4, documents[-1], kv_documents[-1]))


def branched(name: str, length: int, ranks: int, *branches: tuple[Band, StridedRange | None]) -> Case:
    """Return a case of branches on the whole sequence, with two query heads per K/V head."""
    layout, whole = make_layout(name, length, ranks), (0, length, 0, length)
    mask = Mask(tuple(Branch(Rectangles(segments([whole], band)), heads) for band, heads in branches))
    return Case(Problem(layout, layout, mask, 2, 4, 2, 8, 4, "bfloat16"), reference_of(mask, 4, length, length))


NOTABLE = (
    simple("striped", 31, 8, window=(0, 0)),  # a band narrower than the stride
    simple("striped", 31, 5, window=(2, 1)),
    simple("striped", 24, 4, (0, 3, 3, 13, 24), causal=True, window=(2, 0)),
    simple("zigzag", 31, 4, window=(3, 4)),  # reads with gaps; relays that carry more than the rank reads
    simple("zigzag", 24, 8, (0, 5, 24), causal=True),
    simple("contiguous", 31, 3, window=(2, 3)),  # two readers need disjoint rows
    simple("zigzag", 32, 2, window=(11, 2)),  # one reader needs disjoint rows
    simple("contiguous", 31, 5, window=(2, 9)),  # the farthest reader reads the most
    simple("contiguous", 31, 8, causal=True),
    simple("per_document", 31, 4, (0, 1, 9, 9, 31), causal=True),
    simple("per_document", 31, 3, (0, 11, 12, 31), window=(4, 0)),
    simple("documents", 31, 4, (0, 1, 9, 9, 31), causal=True),
    simple("zigzag", 3, 8, causal=True),
    simple("contiguous", 0, 3),
    cross(("striped", "zigzag"), (0, 5, 16), (0, 11, 31), 4),  # segments with different starts on the two sides
    cross(("zigzag", "contiguous"), (0, 9, 9, 16), (0, 2, 8, 9), 5),
    cross(("striped", "zigzag"), (0, 31), (0, 24), 5, window=(2, 1)),  # a window across two strides
    cross(("contiguous", "striped"), (0, 5, 24), (0, 11, 31), 8, window=(0, 0)),
    cross(("striped", "striped"), (0, 7, 16), (0, 2, 31), 4, window=(1, 2)),
    branched("zigzag", 16, 4, (Band(0, UNBOUNDED), StridedRange(0, 2)), (Band(0, 3), StridedRange(2, 2))),
    branched("contiguous", 16, 4, (Band(0, UNBOUNDED), StridedRange(0, 2)), (Band(-6, -2), StridedRange(2, 1))),
    branched("striped", 16, 4, (Band(2, 3), None), (Band(-5, 2), StridedRange(1, 2))),
    branched(
        "contiguous", 16, 2, (Band(0, 5), StridedRange(0, 1)), (Band(0, 5), StridedRange(0, 1))
    ),  # both branches have these pairs, so they count twice
)
"""Cases that every run includes, in addition to random ones."""


def covering(test: Callable[..., None]) -> Callable[..., None]:
    """Decorate a test that takes a `case`: it runs with all `NOTABLE` cases, then with random cases."""
    for case in NOTABLE:
        test = example(case=case)(test)
    return given(case=cases())(test)


def geometric(ranks: int = 8) -> Problem:
    """Return a large dilated problem: 2^20 tokens and 12 bfloat16 heads of head_dim 64.

    Its branches are w = 2048 * 2^i and r = 2^i for i = 0 .. 9.
    """
    tokens, powers = 1 << 20, [1 << i for i in range(10)]
    layout = make_layout("contiguous", tokens, ranks)
    pairs = Dilated(tuple(2048 * power for power in powers), tuple(powers))
    return Problem(layout, layout, pairs.mask(tokens, tokens, None, None, 12, 12), 1, 12, 12, 64, 64, "bfloat16")


# --- tiles of any shape ----------------------------------------------------------------------------------------------

runs = st.builds(StridedRange, st.integers(-30, 30), st.integers(0, 20), st.integers(1, 9))
tight_or_open = st.integers(-50, 50)
bands = st.builds(Band, st.one_of(st.just(-UNBOUNDED), tight_or_open), st.one_of(st.just(UNBOUNDED), tight_or_open))


@st.composite
def tiles(draw: st.DrawFn) -> Tile:
    """Draw any tile of up to 20 queries and 20 keys, with one to four heads."""
    strips = []
    for _ in range(2):
        positions = draw(runs)
        strips.append(
            TokenRange(positions, StridedRange(draw(st.integers(0, 9)), positions.count, draw(st.integers(1, 3))))
        )
    return Tile(strips[0], strips[1], draw(bands), StridedRange(0, draw(st.integers(1, 4))))


def row_pairs(tile: Tile) -> list[tuple[int, int]]:
    """Return the (q row, k row) pairs that the band of a tile allows."""
    q = list(zip(tile.q.positions.members(), tile.q.rows.members(), strict=True))
    k = list(zip(tile.k.positions.members(), tile.k.rows.members(), strict=True))
    return [(qr, kr) for qp, qr in q for kp, kr in k if tile.band.lo <= qp - kp <= tile.band.hi]
