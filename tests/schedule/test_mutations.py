"""Mutation tests: `verify` refuses each of these schedules with one fault, with the message that names the fault."""

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
UNREAD = r"sends rows of KV\d\S* to rank \d that are not read there"
NOT_RECEIVED = r"merges DK?[QV]\d@\d\S*, which was not received"


def sound(route: str, backward: bool, case: Any = CASE) -> Schedule:
    """Return a correct schedule, to be mutated."""
    whole = schedule_of(case.problem, ROUTES[route], backward)
    verify(whole)
    return whole


def with_step(whole: Schedule, index: int, **changes: Any) -> Schedule:
    """Return the schedule with `changes` to the fields of one step."""
    return replace(
        whole, steps=(*whole.steps[:index], whole.steps[index]._replace(**changes), *whole.steps[index + 1 :])
    )


def first(whole: Schedule, matches: Callable[[Step], object]) -> int:
    """Return the index of the first step for which `matches` returns a true value."""
    return next(index for index, step in enumerate(whole.steps) if matches(step))


def with_work(whole: Schedule, index: int, item: Any, *instead: Any) -> Schedule:
    """Return the schedule with the work item `item` of a step replaced by the items `instead`."""
    return with_step(whole, index, work=(*(work for work in whole.steps[index].work if work is not item), *instead))


def with_tiles(change: Callable[[list], list]) -> Callable[[Schedule], Schedule]:
    """Return a mutation that applies `change` to the tiles of the first work item that has several tiles."""

    def changed(whole: Schedule) -> Schedule:
        index, item = next((index, item) for index, step in enumerate(whole.steps) for item in step.work
                           if not isinstance(item, Merge) and len(item.tiles[0].tiles) > 1)  # fmt: skip
        tiles = HeadTiles(item.tiles[0].heads, TileTable.of(change(list(item.tiles[0].tiles))))
        return with_work(whole, index, item, item._replace(tiles=(tiles,)))

    return changed


def with_copy(kind: Kind, change: Callable[[Copy], Copy | None]) -> Callable[[Schedule], Schedule]:
    """Return a mutation that replaces the first copy of a kind by `change(copy)`, or drops it if that is None."""

    def changed(whole: Schedule) -> Schedule:
        index, target = first_copy(whole, kind)
        copies = (change(copy) if copy is target else copy for copy in whole.steps[index].copies)
        return with_step(whole, index, copies=tuple(copy for copy in copies if copy is not None))

    return changed


def first_copy(whole: Schedule, kind: Kind) -> tuple[int, Copy]:
    """Return the first copy of a kind, with the index of its step."""
    copies = ((index, copy) for index, step in enumerate(whole.steps) for copy in step.copies)
    return next((index, copy) for index, copy in copies if copy.block.kind is kind)


def resized(rows: int) -> Callable[[Copy], Copy]:
    """Return a change that makes the last range of a copy longer by `rows`."""

    def changed(copy: Copy) -> Copy:
        *parts, last = copy.content
        *runs, run = last.rows
        return copy._replace(content=(*parts, HeadRows(last.heads, (*runs, run._replace(count=run.count + rows)))))

    return changed


def row_before(copy: Copy) -> Copy:
    """Return the copy with one more row at its beginning."""
    (run,) = copy.content[0].rows
    return copy._replace(content=(HeadRows(copy.content[0].heads, (StridedRange(run.start - 1, run.count + 1),)),))


def sent_again(whole: Schedule) -> Schedule:
    """Return the schedule that sends the first copy of keys again in the last step."""
    return with_step(whole, len(whole.steps) - 1, copies=(first_copy(whole, Kind.KV)[1],))


def read_at_once(whole: Schedule) -> Schedule:
    """Return the schedule in which some work is in the step whose copies deliver its keys, which is too early."""
    start, _ = first_copy(whole, Kind.KV)
    arriving = {(copy.dst, copy.block.owner) for copy in whole.steps[start].copies}
    after, item = next((after, item) for after, step in enumerate(whole.steps) if after > start for item in step.work
                       if not isinstance(item, Merge) and (item.rank, item.kv.owner) in arriving)  # fmt: skip
    return with_work(with_work(whole, after, item), start, None, item)


def merging(change: Callable[[Schedule, int, Merge], Schedule]) -> Callable[[Schedule], Schedule]:
    """Return a mutation that calls `change` with the first merge of a received sum, and the index of its step."""

    def changed(whole: Schedule) -> Schedule:
        index, merge = next((index, item) for index, step in enumerate(whole.steps) for item in step.work
                            if isinstance(item, Merge) and item.part.origin != item.rank)  # fmt: skip
        return change(whole, index, merge)

    return changed


def lost_sum(whole: Schedule) -> Schedule:
    """Return the schedule without the first copy of a sum and without its merge."""
    _, copy = first_copy(whole, Kind.DKV)
    unsent = with_copy(Kind.DKV, lambda _: None)(whole)
    index, merge = next((index, item) for index, step in enumerate(unsent.steps) for item in step.work
                        if isinstance(item, Merge) and item.part == copy.block)  # fmt: skip
    return with_work(unsent, index, merge)


def added_late(whole: Schedule) -> Schedule:
    """Return the schedule in which work is split into its two tiles, and the second is added after the sum was sent.

    Both tiles add to the same rows.
    """

    def halves(item: AttendGrad) -> list[AttendGrad]:
        (part,) = item.tiles
        sides = list(part.tiles)[:1], list(part.tiles)[1:]
        return [item._replace(tiles=(HeadTiles(part.heads, TileTable.of(side)),)) for side in sides]

    start, item = next(
        (index, item) for index, step in enumerate(whole.steps) for item in step.work
        if isinstance(item, AttendGrad) and item.kv.owner != item.rank and len(item.tiles[0].tiles) > 1
        and rows_read(item.tiles) == rows_read(halves(item)[0].tiles)
    )  # fmt: skip
    early, late = halves(item)
    sent = first(whole, lambda step: any(copy.block == item.dkv for copy in step.copies))
    return with_work(with_work(whole, start, item, early), sent, None, late)


def stolen(twice: bool) -> Callable[[Schedule], Schedule]:
    """Return a mutation that sends a sum twice, or first from another rank."""

    def changed(whole: Schedule) -> Schedule:
        index, sent = first_copy(whole, Kind.DKV)
        copies = whole.steps[index].copies
        return with_step(whole, index, copies=(*copies, sent) if twice else (
            sent._replace(src=(sent.src + 1) % 4), *copies))  # fmt: skip

    return changed


BOTH, BACKWARD = (False, True), (True,)
FAULTS: dict[str, tuple[tuple[bool, ...], Callable[[Schedule], Schedule], str]] = {
    "the other direction": (BOTH, lambda whole: replace(whole, backward=not whole.backward),
                            r"works on KV\d\S* as Attend(Grad)?, which a (back|for)ward pass does not have"),
    "a tile dropped": (BOTH, with_tiles(lambda tiles: tiles[1:]),
                       r"rank \d: \d tiles of KV\d\S* are never worked on"),
    "a tile doubled": (BOTH, with_tiles(lambda tiles: [*tiles, tiles[0]]), "works on a tile of .* too often"),
    "a tile that the mask forbids": (
        BOTH, with_tiles(lambda tiles: [tiles[0]._replace(heads=StridedRange(7, 1)), *tiles[1:]]),
        r"works on a tile of KV\d\S* that the mask does not have"),
    "a row of keys too few": (BOTH, with_copy(Kind.KV, resized(-1)), MISSING),
    "a copy left out": (BOTH, with_copy(Kind.KV, lambda _: None), MISSING),
    "a copy sent again": (BOTH, sent_again, UNREAD),
    "read in the step that delivers": (BOTH, read_at_once, r"reads rows of KV\d\S* that have not arrived"),
    "a merge dropped": (BACKWARD, merging(with_work), "arrived and was never merged|never returned|nothing was added"),
    "a merge too early": (
        BACKWARD, merging(lambda whole, step, merge: with_work(with_work(whole, step, merge), step - 1, None, merge)),
        NOT_RECEIVED),
    "a merge twice": (BACKWARD, merging(lambda whole, step, merge: with_work(whole, step, None, merge)), NOT_RECEIVED),
    "a row of gradients too few": (BACKWARD, with_copy(Kind.DKV, resized(-1)), "leaves rows of"),
    "a row of gradients too many": (BACKWARD, with_copy(Kind.DKV, resized(1)), "that nothing was added to"),
    "a sum that is not sent": (BACKWARD, with_copy(Kind.DKV, lambda _: None), NOT_RECEIVED),
    "a sum that is lost": (BACKWARD, lost_sum, "was never returned to its owner|nothing was added"),
    "an addition after the sum was sent": (BACKWARD, added_late, r"adds to DKV\d\S* after it was sent"),
    "a sum sent twice": (BACKWARD, stolen(True), r"sends DKV\d\S* twice or for another rank"),
    "a sum sent by another rank": (BACKWARD, stolen(False), r"sends DKV\d\S* twice or for another rank"),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("route", [name for name in ROUTES if name != "pass_q"])  # pass_q moves no keys
def test_a_fault_is_refused(route: str, fault: str) -> None:
    passes, change, message = FAULTS[fault]
    for backward in passes:
        with pytest.raises(PlanError, match=message):
            verify(change(sound(route, backward)))


@pytest.mark.parametrize("route", ROUTES)
def test_work_on_queries_of_an_unrelated_rank_is_refused(route: str) -> None:
    whole = schedule_of(simple("contiguous", 32, 4, causal=True).problem, ROUTES[route], False)
    foreign = next(item for item in whole.steps[0].work if item.rank == 3)
    with pytest.raises(PlanError, match=r"step 0, rank 0: works on Q3, which is not local and was not sent"):
        verify(with_work(whole, 0, None, foreign._replace(rank=0)))


@pytest.mark.parametrize("route", [name for name in ROUTES if name != "pass_q"])
@pytest.mark.parametrize("backward", BOTH)
def test_a_row_of_keys_too_many_is_refused(route: str, backward: bool) -> None:
    with pytest.raises(PlanError, match=UNREAD):
        verify(with_copy(Kind.KV, row_before)(sound(route, backward, WINDOW)))


def test_a_sum_of_received_queries_that_is_neither_merged_nor_sent_is_refused() -> None:
    whole = sound("ulysses", True)
    merges = [(index, item) for index, step in enumerate(whole.steps) for item in step.work if isinstance(item, Merge)]
    for kind in (Kind.DQ, Kind.DKV):
        index, merge = next(
            (index, item) for index, item in merges if item.part.kind is kind and item.part.origin == item.rank
        )
        with pytest.raises(PlanError, match=rf"{merge.part} was never merged"):
            verify(with_work(whole, index, merge))
    with pytest.raises(PlanError, match=r"reads rows of Q\d/0 that have not arrived"):
        verify(with_copy(Kind.Q, lambda _: None)(sound("ulysses", False)))
    more = HeadRows(StridedRange(9, 1), (StridedRange(0, 1),))
    with pytest.raises(PlanError, match=r"sends rows of GRAD_OUT\d/0 to rank \d that are not read there"):
        verify(with_copy(Kind.GRAD_OUT, lambda copy: copy._replace(content=(*copy.content, more)))(whole))


def test_a_key_too_many_in_a_split_block_is_refused() -> None:
    whole = schedule_of(simple("contiguous", 64, 4, causal=True).problem, replace(RING, prologue="split"), True)
    index, item = next((index, item) for index, step in enumerate(whole.steps) for item in step.work
                       if isinstance(item, AttendGrad) and item.rank == item.kv.owner == 3)  # fmt: skip
    ((heads, table),) = item.tiles
    grown = item._replace(tiles=(HeadTiles(heads, table.replaced(k_count=table.k_count + 1)),))
    with pytest.raises(PlanError, match=r"works on a tile of KV3 (too often|that the mask)"):
        verify(with_work(whole, index, item, grown))
