"""Broken on purpose: sound schedules with one fault each, and the message with which `verify` must refuse them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from ringattn.core.geometry import StridedRange
from ringattn.core.tiling import TileTable
from ringattn.errors import PlanError
from ringattn.schedule.content import HeadRows
from ringattn.schedule.ops import AttendGrad, Copy, HeadTiles, Kind, Merge, Schedule, Step
from ringattn.schedule.passes import rows_read
from ringattn.schedule.routes import ROUTES, schedule_of
from tests.schedule.schedule_verifier import verify
from tests.schedules import RING
from tests.strategies import simple

CASE = simple("zigzag", 32, 4, heads=4, causal=True)
WINDOW = simple("contiguous", 32, 4, window=(3, 0))
MISSING = r"reads rows of KV\d\S* that have not arrived|sends rows of KV\d\S* that it does not hold"
NOBODY_READS = r"sends rows of KV\d\S* to rank \d that nobody reads there"
NOT_THERE = r"merges DK?[QV]\d@\d\S*, which is not there"


def sound(route: str, backward: bool, case: Any = CASE) -> Schedule:
    """A schedule to break."""
    whole = schedule_of(case.problem, ROUTES[route], backward)
    verify(whole)
    return whole


def with_step(whole: Schedule, at: int, **changes: Any) -> Schedule:
    """The schedule with one step changed."""
    return replace(whole, steps=(*whole.steps[:at], whole.steps[at]._replace(**changes), *whole.steps[at + 1 :]))


def first(whole: Schedule, wanted: Callable[[Step], object]) -> int:
    """The number of the first step that `wanted` accepts."""
    return next(at for at, step in enumerate(whole.steps) if wanted(step))


def with_work(whole: Schedule, at: int, item: Any, *instead: Any) -> Schedule:
    """The schedule with an item of a step's work replaced."""
    return with_step(whole, at, work=(*(each for each in whole.steps[at].work if each is not item), *instead))


def with_tiles(change: Callable[[list], list]) -> Callable[[Schedule], Schedule]:
    """Change the tiles of the first work that has several."""

    def changed(whole: Schedule) -> Schedule:
        at, item = next((at, item) for at, step in enumerate(whole.steps) for item in step.work
                        if not isinstance(item, Merge) and len(item.tiles[0].tiles) > 1)  # fmt: skip
        tiles = HeadTiles(item.tiles[0].heads, TileTable.of(change(list(item.tiles[0].tiles))))
        return with_work(whole, at, item, item._replace(tiles=(tiles,)))

    return changed


def with_copy(kind: Kind, change: Callable[[Copy], Copy | None]) -> Callable[[Schedule], Schedule]:
    """Change the first copy of a kind, or leave it out."""

    def changed(whole: Schedule) -> Schedule:
        at, target = first_copy(whole, kind)
        copies = (change(copy) if copy is target else copy for copy in whole.steps[at].copies)
        return with_step(whole, at, copies=tuple(copy for copy in copies if copy is not None))

    return changed


def first_copy(whole: Schedule, kind: Kind) -> tuple[int, Copy]:
    """The first copy of a kind, with its step."""
    return next((at, copy) for at, step in enumerate(whole.steps) for copy in step.copies if copy.block.kind is kind)


def resized(rows: int) -> Callable[[Copy], Copy]:
    """Make the last run of a copy longer by `rows`."""

    def changed(copy: Copy) -> Copy:
        *parts, last = copy.content
        *runs, run = last.rows
        return copy._replace(content=(*parts, HeadRows(last.heads, (*runs, run._replace(count=run.count + rows)))))

    return changed


def row_before(copy: Copy) -> Copy:
    """A copy with a row more at its beginning."""
    (run,) = copy.content[0].rows
    return copy._replace(content=(HeadRows(copy.content[0].heads, (StridedRange(run.start - 1, run.count + 1),)),))


def sent_again(whole: Schedule) -> Schedule:
    """The first copy of keys once more in the last step."""
    return with_step(whole, len(whole.steps) - 1, copies=(first_copy(whole, Kind.KV)[1],))


def read_at_once(whole: Schedule) -> Schedule:
    """Work moved into the step whose copies bring its keys."""
    at, _ = first_copy(whole, Kind.KV)
    arriving = {(copy.dst, copy.block.owner) for copy in whole.steps[at].copies}
    after, item = next((after, item) for after, step in enumerate(whole.steps) if after > at for item in step.work
                       if not isinstance(item, Merge) and (item.rank, item.kv.owner) in arriving)  # fmt: skip
    return with_work(with_work(whole, after, item), at, None, item)


def merging(change: Callable[[Schedule, int, Merge], Schedule]) -> Callable[[Schedule], Schedule]:
    """Change the first merge of a sum that arrived."""

    def changed(whole: Schedule) -> Schedule:
        at, merge = next((at, item) for at, step in enumerate(whole.steps) for item in step.work
                         if isinstance(item, Merge) and item.part.origin != item.rank)  # fmt: skip
        return change(whole, at, merge)

    return changed


def lost_sum(whole: Schedule) -> Schedule:
    """Neither the first copy of a sum nor its merge."""
    _, copy = first_copy(whole, Kind.DKV)
    found = with_copy(Kind.DKV, lambda _: None)(whole)
    at, merge = next((at, item) for at, step in enumerate(found.steps) for item in step.work
                     if isinstance(item, Merge) and item.part == copy.block)  # fmt: skip
    return with_work(found, at, merge)


def added_late(whole: Schedule) -> Schedule:
    """Of two tiles that add to the same rows the second comes when the sum has left."""

    def halves(item: AttendGrad) -> list[AttendGrad]:
        (part,) = item.tiles
        sides = list(part.tiles)[:1], list(part.tiles)[1:]
        return [item._replace(tiles=(HeadTiles(part.heads, TileTable.of(side)),)) for side in sides]

    spot, item = next(
        (at, item) for at, step in enumerate(whole.steps) for item in step.work
        if isinstance(item, AttendGrad) and item.kv.owner != item.rank and len(item.tiles[0].tiles) > 1
        and rows_read(item.tiles) == rows_read(halves(item)[0].tiles)
    )  # fmt: skip
    early, late = halves(item)
    at = first(whole, lambda step: any(copy.block == item.dkv for copy in step.copies))
    return with_work(with_work(whole, spot, item, early), at, None, late)


def stolen(twice: bool) -> Callable[[Schedule], Schedule]:
    """A sum sent twice, or by another rank first."""

    def changed(whole: Schedule) -> Schedule:
        at, sent = first_copy(whole, Kind.DKV)
        copies = whole.steps[at].copies
        return with_step(whole, at, copies=(*copies, sent) if twice else (
            sent._replace(src=(sent.src + 1) % 4), *copies))  # fmt: skip

    return changed


BOTH, BACKWARD = (False, True), (True,)
FAULTS: dict[str, tuple[tuple[bool, ...], Callable[[Schedule], Schedule], str]] = {
    "the other direction": (BOTH, lambda whole: replace(whole, backward=not whole.backward),
                            r"works on KV\d\S* as Attend(Grad)?, which a (back|for)ward pass does not have"),
    "a tile dropped": (BOTH, with_tiles(lambda tiles: tiles[1:]),
                       r"rank \d: \d tiles of KV\d\S* are never worked on"),
    "a tile doubled": (BOTH, with_tiles(lambda tiles: [*tiles, tiles[0]]), "works on a tile of .* once too often"),
    "a tile that the mask forbids": (
        BOTH, with_tiles(lambda tiles: [tiles[0]._replace(heads=StridedRange(7, 1)), *tiles[1:]]),
        r"works on a tile of KV\d\S* that the mask does not have"),
    "a row of keys too few": (BOTH, with_copy(Kind.KV, resized(-1)), MISSING),
    "a copy left out": (BOTH, with_copy(Kind.KV, lambda _: None), MISSING),
    "a copy sent again": (BOTH, sent_again, NOBODY_READS),
    "read in the step that delivers": (BOTH, read_at_once, r"reads rows of KV\d\S* that have not arrived"),
    "a merge dropped": (BACKWARD, merging(with_work), "arrived and was never merged|never returned|nothing was added"),
    "a merge too early": (
        BACKWARD, merging(lambda whole, at, merge: with_work(with_work(whole, at, merge), at - 1, None, merge)),
        NOT_THERE),
    "a merge twice": (BACKWARD, merging(lambda whole, at, merge: with_work(whole, at, None, merge)), NOT_THERE),
    "a row of gradients too few": (BACKWARD, with_copy(Kind.DKV, resized(-1)), "leaves rows of"),
    "a row of gradients too many": (BACKWARD, with_copy(Kind.DKV, resized(1)), "that nothing was added to"),
    "a sum that stays away": (BACKWARD, with_copy(Kind.DKV, lambda _: None), NOT_THERE),
    "a sum that is lost": (BACKWARD, lost_sum, "was never returned to its owner|nothing was added"),
    "an addition after the sum has left": (BACKWARD, added_late, r"adds to DKV\d\S* after it was sent"),
    "a sum sent twice": (BACKWARD, stolen(True), r"sends DKV\d\S* twice or for somebody else"),
    "a sum sent by somebody else": (BACKWARD, stolen(False), r"sends DKV\d\S* twice or for somebody else"),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("route", [name for name in ROUTES if name != "pass_q"])  # which moves no keys
def test_a_fault(route: str, fault: str) -> None:
    passes, change, message = FAULTS[fault]
    for backward in passes:
        with pytest.raises(PlanError, match=message):
            verify(change(sound(route, backward)))


@pytest.mark.parametrize("route", ROUTES)
def test_work_on_a_block_that_the_rank_has_nothing_to_do_with(route: str) -> None:
    whole = schedule_of(simple("contiguous", 32, 4, causal=True).problem, ROUTES[route], False)
    foreign = next(item for item in whole.steps[0].work if item.rank == 3)
    with pytest.raises(PlanError, match=r"step 0, rank 0: works on Q3, which is not its own and was not sent"):
        verify(with_work(whole, 0, None, foreign._replace(rank=0)))


@pytest.mark.parametrize("route", [name for name in ROUTES if name != "pass_q"])
@pytest.mark.parametrize("backward", BOTH)
def test_a_row_of_keys_too_many(route: str, backward: bool) -> None:
    with pytest.raises(PlanError, match=NOBODY_READS):
        verify(with_copy(Kind.KV, row_before)(sound(route, backward, WINDOW)))


def test_a_sum_of_received_queries_that_nobody_merges_or_sends() -> None:
    whole = sound("ulysses", True)
    merges = [(at, item) for at, step in enumerate(whole.steps) for item in step.work if isinstance(item, Merge)]
    for kind in (Kind.DQ, Kind.DKV):
        at, merge = next(each for each in merges if each[1].part.kind is kind and each[1].part.origin == each[1].rank)
        with pytest.raises(PlanError, match=rf"{merge.part} was never merged"):
            verify(with_work(whole, at, merge))
    with pytest.raises(PlanError, match=r"reads rows of Q\d/0 that have not arrived"):
        verify(with_copy(Kind.Q, lambda _: None)(sound("ulysses", False)))
    more = HeadRows(StridedRange(9, 1), (StridedRange(0, 1),))
    with pytest.raises(PlanError, match=r"sends rows of GRAD_OUT\d/0 to rank \d that nobody reads there"):
        verify(with_copy(Kind.GRAD_OUT, lambda copy: copy._replace(content=(*copy.content, more)))(whole))


def test_a_key_too_many_in_a_split_block() -> None:
    whole = schedule_of(simple("contiguous", 64, 4, causal=True).problem, replace(RING, prologue="split"), True)
    at, item = next((at, item) for at, step in enumerate(whole.steps) for item in step.work
                    if isinstance(item, AttendGrad) and item.rank == item.kv.owner == 3)  # fmt: skip
    ((heads, table),) = item.tiles
    grown = item._replace(tiles=(HeadTiles(heads, table.replaced(k_count=table.k_count + 1)),))
    with pytest.raises(PlanError, match=r"works on a tile of KV3 (once too often|that the mask)"):
        verify(with_work(whole, at, item, grown))
