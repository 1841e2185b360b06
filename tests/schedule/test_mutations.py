"""Broken on purpose: real schedules, plans and transports with one fault each, and the checker that must find it.

Not covered: what a good schedule looks like (see test_schedule.py).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from ringattn.core.geometry import StridedRange
from ringattn.core.tiling import TileTable
from ringattn.errors import PlanError
from ringattn.schedule.content import HeadRows
from ringattn.schedule.ops import AttendGrad, Block, Copy, HeadTiles, Kind, Merge, Schedule, Step
from ringattn.schedule.passes import rows_read
from ringattn.schedule.routes import ROUTES, schedule_of
from tests.schedule.schedule_verifier import verify
from tests.strategies import simple

CASE = simple("zigzag", 32, 4, heads=4, causal=True)
each_route = pytest.mark.parametrize("route", [name for name in ROUTES if name != "pass_q"])
"""`pass_q` moves no keys and no gradients of keys; what it moves `ulysses` moves as well."""
MISSING = r"reads rows of KV\d\S* that have not arrived|sends rows of KV\d\S* that it does not hold"
each_pass = pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])


def schedule(route: str, backward: bool) -> Schedule:
    """A sound schedule to break."""
    found = schedule_of(CASE.problem, ROUTES[route], backward)
    verify(found)
    return found


def with_step(whole: Schedule, at: int, **changes: Any) -> Schedule:
    """The schedule with one step changed."""
    return replace(whole, steps=(*whole.steps[:at], whole.steps[at]._replace(**changes), *whole.steps[at + 1 :]))


def first(whole: Schedule, wanted: Callable[[Step], object]) -> int:
    """The number of the first step that `wanted` accepts."""
    return next(at for at, step in enumerate(whole.steps) if wanted(step))


def worked(whole: Schedule) -> tuple[int, Any]:
    """A step with a piece of work on several tiles, and the piece."""
    spots = [(at, item) for at, step in enumerate(whole.steps) for item in step.work if not isinstance(item, Merge)]
    return next((at, item) for at, item in spots if len(item.tiles[0].tiles) > 1)


def with_tiles(whole: Schedule, change: Callable[[list], list]) -> Schedule:
    """The schedule with the tiles of one piece of work changed."""
    at, item = worked(whole)
    tiles = HeadTiles(item.tiles[0].heads, TileTable.of(change(list(item.tiles[0].tiles))))
    work = tuple(item._replace(tiles=(tiles,)) if each is item else each for each in whole.steps[at].work)
    return with_step(whole, at, work=work)


# --- schedules: verify -----------------------------------------------------------------------------------------------


@each_route
@each_pass
def test_a_schedule_that_names_the_other_direction(route: str, backward: bool) -> None:
    with pytest.raises(
        PlanError, match=r"works on KV\d\S* as Attend(Grad)?, which a (back|for)ward pass does not have"
    ):
        verify(replace(schedule(route, backward), backward=not backward))


@each_route
@each_pass
def test_a_dropped_tile(route: str, backward: bool) -> None:
    with pytest.raises(PlanError, match=r"(?s)rank \d: \d tiles of KV\d\S* are never worked on.*>>rank"):
        verify(with_tiles(schedule(route, backward), lambda tiles: tiles[1:]))


@each_route
@each_pass
def test_a_doubled_tile(route: str, backward: bool) -> None:
    with pytest.raises(PlanError, match=r"works on a tile of KV\d\S* once too often"):
        verify(with_tiles(schedule(route, backward), lambda tiles: [*tiles, tiles[0]]))


@each_route
@each_pass
def test_a_tile_of_pairs_that_the_mask_forbids(route: str, backward: bool) -> None:
    with pytest.raises(PlanError, match=r"works on a tile of KV\d\S* that the mask does not have"):
        verify(
            with_tiles(
                schedule(route, backward), lambda tiles: [tiles[0]._replace(heads=StridedRange(7, 1)), *tiles[1:]]
            )
        )


@each_route
def test_work_on_a_block_that_the_rank_has_nothing_to_do_with(route: str) -> None:
    whole = schedule_of(simple("contiguous", 32, 4, causal=True).problem, ROUTES[route], False)
    foreign = next(item for item in whole.steps[0].work if item.rank == 3)
    work = (*whole.steps[0].work, foreign._replace(rank=0))
    with pytest.raises(PlanError, match=r"step 0, rank 0: works on Q3, which is not its own and was not sent"):
        verify(with_step(whole, 0, work=work))


def resized(copy: Copy, rows: int) -> Copy:
    """The copy with its last run longer by `rows`."""
    *parts, last = copy.content
    *runs, run = last.rows
    return copy._replace(content=(*parts, HeadRows(last.heads, (*runs, StridedRange(run.start, run.count + rows)))))


def with_first_copy(whole: Schedule, kind: Kind, change: Callable[[Copy], Copy | None]) -> Schedule:
    """The schedule with its first copy of some kind changed, or left out."""
    at = first(whole, lambda step: any(copy.block.kind is kind for copy in step.copies))
    target = next(copy for copy in whole.steps[at].copies if copy.block.kind is kind)
    changed = change(target)
    copies = tuple(changed if copy is target else copy for copy in whole.steps[at].copies)
    return with_step(whole, at, copies=tuple(copy for copy in copies if copy is not None))


@each_route
@each_pass
def test_a_row_of_keys_too_few(route: str, backward: bool) -> None:
    with pytest.raises(PlanError, match=MISSING):
        verify(with_first_copy(schedule(route, backward), Kind.KV, lambda copy: resized(copy, -1)))


@each_route
@each_pass
def test_a_row_of_keys_too_many(route: str, backward: bool) -> None:
    whole = schedule_of(simple("contiguous", 32, 4, window=(3, 0)).problem, ROUTES[route], backward)
    verify(whole)

    def earlier(copy: Copy) -> Copy:
        (run,) = copy.content[0].rows
        return copy._replace(content=(HeadRows(copy.content[0].heads, (StridedRange(run.start - 1, run.count + 1),)),))

    with pytest.raises(PlanError, match=r"sends rows of KV\d\S* to rank \d that nobody reads there"):
        verify(with_first_copy(whole, Kind.KV, earlier))


@each_route
@each_pass
def test_a_copy_left_out(route: str, backward: bool) -> None:
    with pytest.raises(PlanError, match=MISSING):
        verify(with_first_copy(schedule(route, backward), Kind.KV, lambda _: None))


@each_route
@each_pass
def test_a_copy_sent_twice(route: str, backward: bool) -> None:
    whole = schedule(route, backward)
    at = first(whole, lambda step: any(copy.block.kind is Kind.KV for copy in step.copies))
    again = next(copy for copy in whole.steps[at].copies if copy.block.kind is Kind.KV)
    with pytest.raises(PlanError, match=r"sends rows of KV\d\S* to rank \d that nobody reads there"):
        verify(with_step(whole, len(whole.steps) - 1, copies=(again,)))


@each_route
@each_pass
def test_reading_in_the_step_that_delivers(route: str, backward: bool) -> None:
    whole = schedule(route, backward)
    at = first(whole, lambda step: any(copy.block.kind is Kind.KV for copy in step.copies))
    arriving = {(copy.dst, copy.block.owner) for copy in whole.steps[at].copies}
    reading = ((after, item) for after, step in enumerate(whole.steps) if after > at for item in step.work
               if not isinstance(item, Merge) and (item.rank, item.kv.owner) in arriving)  # fmt: skip
    after, early = next(reading)
    moved = with_step(whole, at, work=(*whole.steps[at].work, early))
    moved = with_step(moved, after, work=tuple(item for item in whole.steps[after].work if item is not early))
    with pytest.raises(PlanError, match=r"reads rows of KV\d\S* that have not arrived"):
        verify(moved)


# --- sums of gradients: verify ---------------------------------------------------------------------------------------


def merge_step(whole: Schedule) -> tuple[int, Merge]:
    """The first step that merges, and the first of its merges of what came."""

    def came(step: Step) -> list[Merge]:
        return [item for item in step.work if isinstance(item, Merge) and item.part.origin != item.rank]

    at = first(whole, came)
    return at, came(whole.steps[at])[0]


@each_route
def test_a_dropped_merge(route: str) -> None:
    whole = schedule(route, True)
    at, merge = merge_step(whole)
    work = tuple(item for item in whole.steps[at].work if item is not merge)
    told = r"DK?[QV]\d@\d\S* arrived and was never merged|was never returned to its owner|nothing was added"
    with pytest.raises(PlanError, match=told):
        verify(with_step(whole, at, work=work))


@each_route
def test_a_merge_before_arrival(route: str) -> None:
    whole = schedule(route, True)
    at, merge = merge_step(whole)
    moved = with_step(whole, at, work=tuple(item for item in whole.steps[at].work if item is not merge))
    moved = with_step(moved, at - 1, work=(*whole.steps[at - 1].work, merge))
    with pytest.raises(PlanError, match=r"merges DK?[QV]\d@\d\S*, which is not there"):
        verify(moved)


@each_route
def test_a_merge_done_twice(route: str) -> None:
    whole = schedule(route, True)
    at, merge = merge_step(whole)
    with pytest.raises(PlanError, match=r"merges DK?[QV]\d@\d\S*, which is not there"):
        verify(with_step(whole, at, work=(*whole.steps[at].work, merge)))


@each_route
@pytest.mark.parametrize(("rows", "message"), [(-1, "leaves rows of"), (1, "that nothing was added to")])
def test_a_row_of_gradients_too_few_or_too_many(route: str, rows: int, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        verify(with_first_copy(schedule(route, True), Kind.DKV, lambda copy: resized(copy, rows)))


@each_route
def test_a_sum_that_stays_away(route: str) -> None:
    whole = with_first_copy(schedule(route, True), Kind.DKV, lambda _: None)
    with pytest.raises(PlanError, match=r"merges DK?[QV]\d@\d\S*, which is not there"):
        verify(whole)
    orphans = {copy.block for step in whole.steps for copy in step.copies if copy.block.kind is Kind.DKV}
    steps = [
        step._replace(work=tuple(i for i in step.work if not (isinstance(i, Merge) and lost(i.part, orphans))))
        for step in whole.steps
    ]
    with pytest.raises(PlanError, match=r"DKV\d@\d\S* was never returned to its owner"):
        verify(replace(whole, steps=tuple(steps)))


def lost(part: Block, sent: set[Block]) -> bool:
    """Whether a sum of dK and dV neither came nor was made where it is merged."""
    return part.kind is Kind.DKV and part not in sent and part.origin != part.owner


def test_a_sum_made_at_home_that_nobody_merges() -> None:
    whole = schedule("ulysses", True)
    merges = [(at, item) for at, step in enumerate(whole.steps) for item in step.work if isinstance(item, Merge)]
    for kind in (Kind.DQ, Kind.DKV):
        at, merge = next(one for one in merges if one[1].part.kind is kind and one[1].part.origin == one[1].rank)
        work = tuple(item for item in whole.steps[at].work if item is not merge)
        with pytest.raises(PlanError, match=rf"{merge.part} was never merged"):
            verify(with_step(whole, at, work=work))


def test_a_query_that_was_not_sent() -> None:
    whole = with_first_copy(schedule("ulysses", False), Kind.Q, lambda _: None)
    with pytest.raises(PlanError, match=r"reads rows of Q\d/0 that have not arrived"):
        verify(whole)
    more = HeadRows(StridedRange(9, 1), (StridedRange(0, 1),))
    whole = with_first_copy(
        schedule("ulysses", True), Kind.GRAD_OUT, lambda copy: copy._replace(content=(*copy.content, more))
    )
    with pytest.raises(PlanError, match=r"sends rows of GRAD_OUT\d/0 to rank \d that nobody reads there"):
        verify(whole)


@each_route
def test_an_addition_after_the_sum_has_left(route: str) -> None:
    # Of two tiles that add to the same rows the second comes too late: the rows that leave are all there.
    whole = schedule(route, True)
    spot, item = next(
        (at, item) for at, step in enumerate(whole.steps) for item in step.work
        if isinstance(item, AttendGrad) and item.kv.owner != item.rank and len(item.tiles[0].tiles) > 1
        and rows_read(item.tiles) == rows_read(halves(item)[0])
    )  # fmt: skip
    early, late = (item._replace(tiles=half) for half in halves(item))
    moved = with_step(whole, spot, work=tuple(early if each is item else each for each in whole.steps[spot].work))
    at = first(whole, lambda step: any(copy.block == item.dkv for copy in step.copies))
    moved = with_step(moved, at, work=(*moved.steps[at].work, late))
    with pytest.raises(PlanError, match=rf"adds to {item.dkv} after it was sent"):
        verify(moved)


def halves(item: AttendGrad) -> tuple[tuple[HeadTiles], tuple[HeadTiles]]:
    """The first tile, and the others."""
    (part,) = item.tiles
    tiles = list(part.tiles)
    return (HeadTiles(part.heads, TileTable.of(tiles[:1])),), (HeadTiles(part.heads, TileTable.of(tiles[1:])),)


@each_route
def test_a_sum_sent_twice_or_by_somebody_else(route: str) -> None:
    whole = schedule(route, True)
    at = first(whole, lambda step: any(copy.block.kind is Kind.DKV for copy in step.copies))
    sent = next(copy for copy in whole.steps[at].copies if copy.block.kind is Kind.DKV)
    stolen = sent._replace(src=(sent.src + 1) % 4)
    for copies in ((*whole.steps[at].copies, sent), (stolen, *whole.steps[at].copies)):
        with pytest.raises(PlanError, match=rf"sends {sent.block} twice or for somebody else"):
            verify(with_step(whole, at, copies=copies))
