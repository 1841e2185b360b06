"""Which rank a verdict names, and which it does not: a table of everything that a rank may know."""

from __future__ import annotations

from typing import Any

import pytest

from ringattn.transport.health.verdict import Beat, Evidence, Place, Waits, at_fault, explain
from tests.transport.attribution import named_at_fault

HOST, LAUNCH, COMPUTE, PEERS = Waits.HOST, Waits.LAUNCH, Waits.COMPUTE, Waits.PEERS
Ranks = dict[int, tuple[int, Waits, set[int] | None]]
RING: Ranks = {rank: (5, PEERS, {(rank - 1) % 4, (rank + 1) % 4}) for rank in range(4)}
STORE = "the store's host (rank 0 of the job, or torchrun's agent, at h:1) did not answer within 0.8 s"
CAUSE = "rank 3 failed first: ValueError: k has no heads"


def places(ranks: Ranks) -> dict[int, Place]:
    return {
        rank: Place("forward step 1", call, waits, None if peers is None else frozenset(peers))
        for rank, (call, waits, peers) in ranks.items()
    }


def evidence(ranks: Ranks = RING, **facts: Any) -> Evidence:
    return Evidence(rank=0, places=places(ranks), **facts)


BEHIND = RING | {1: (4, HOST, set())}

CASES: list[tuple[str, Evidence, set[int]]] = [
    ("all only wait", evidence(), set()),
    ("silent", evidence(silent={1}), {1}),
    ("two silent", evidence(silent={1, 2}), {1, 2}),
    ("gone", evidence(gone={2}), {2}),
    ("gone and silent", evidence(gone={2}, silent={1, 2}), {1, 2}),
    # In the first pass of `direct` others connect to the one that is gone.
    ("silent before launches", evidence(RING | {0: (5, LAUNCH, {1}), 3: (5, LAUNCH, {1})}, silent={1}), {1}),
    ("silent before computing", evidence(RING | {0: (5, COMPUTE, {1})}, silent={1}), {1}),
    ("silent before behind", evidence(BEHIND, silent={2}), {2}),
    ("behind before launches", evidence(BEHIND | {0: (5, LAUNCH, {1}), 2: (5, LAUNCH, {1})}), {1}),
    ("computing", evidence(RING | {1: (5, COMPUTE, {2}), 0: (5, LAUNCH, {1})}), {1}),
    ("in a launch", evidence(RING | {1: (5, LAUNCH, {0, 2})}), {1}),
    # Behind, but in an exchange: it waits as all do.
    ("behind in an exchange", evidence(RING | {1: (4, PEERS, {0})}), set()),
    ("behind without a deadline", evidence(BEHIND, at_deadline=False), set()),
    ("behind and closed", evidence(BEHIND, closed={1}), set()),
    ("behind and failed", evidence(BEHIND | {2: (0, HOST, set())}, failed={2}), {1}),
    ("in a launch and failed", evidence(RING | {1: (5, LAUNCH, {0, 2})}, failed={1}), set()),
    ("missing", evidence(RING | {3: (5, HOST, set())}, missing={3}), {3}),
    ("missing, but it waits", evidence(missing={3}), set()),
    ("cause before silent", evidence(cause=CAUSE, silent={1}), {3}),
    ("cause before gone", evidence(cause=CAUSE, gone={1}), {3}),
    ("own standstill before all", evidence(stood_still_s=4.0, gone={1}, silent={2}, store=STORE), set()),
    ("own standstill and cause", evidence(stood_still_s=4.0, silent={2}, cause=CAUSE), {3}),
    # What the store said of places is old where it does not answer.
    ("no store", evidence(BEHIND, store=STORE), set()),
    ("no store, silent for the neighbours", evidence(store=STORE, silent={0}), {0}),
    ("lost and silent", evidence(lost=(2, "reset"), silent={2}, at_deadline=False), {2}),
    ("lost and alive", evidence(lost=(2, "reset"), at_deadline=False), set()),
    ("lost because of another", evidence(lost=(2, "reset"), silent={1}, at_deadline=False), {1}),
    ("lost and closed", evidence(lost=(2, "reset"), closed={2}, at_deadline=False), set()),
    ("lost without a store", evidence(lost=(2, "reset"), store=STORE, at_deadline=False), set()),
    ("late, but not for long", evidence(unheard={1}), set()),
]


@pytest.mark.parametrize(("given", "named"), [case[1:] for case in CASES], ids=[case[0] for case in CASES])
def test_only_ranks_that_nothing_else_explains_are_named(given: Evidence, named: set[int]) -> None:
    assert named_at_fault("; ".join(at_fault(given))) == named
    assert named_at_fault(explain(given)) == named, explain(given)


@pytest.mark.parametrize("peers", [{1, 2, 3}, None])
def test_of_ranks_that_connect_to_each_other_none_is_accused(peers: set[int] | None) -> None:
    both = RING | {1: (5, LAUNCH, {2} if peers else None), 2: (5, LAUNCH, {1} if peers else None)}
    (words,) = at_fault(evidence(both))
    assert words == "one of ranks [1, 2] is stuck in a launch, and the others of them wait for it there"
    assert named_at_fault(words) == set()


def test_the_host_of_a_store_that_does_not_answer_is_named_beside_the_ranks() -> None:
    assert at_fault(evidence(silent={1}, store=STORE))[-1] == STORE
    assert explain(evidence(store=STORE, waited_for={2})).startswith(f"{STORE}; rank 2 is alive in 'forward step 1'")


def test_who_is_not_at_fault_is_placed() -> None:
    assert explain(evidence(waited_for={1, 3}, closed={3})) == (
        "rank 1 is alive in 'forward step 1' of call 5; rank 3 has left its ring"
    )
    assert explain(evidence(waited_for={1}, failed={1})) == "rank 1 has failed as well"
    assert explain(evidence(unheard={1}, waited_for={2})).startswith("rank 1 is not heard at the moment, last in")
    assert "silent" not in explain(evidence(unheard={1}))
    assert explain(evidence({}, waited_for={1})) == "rank 1 was never heard"
    assert "never heard" in explain(evidence({}, silent={1}))


def test_a_rank_that_stood_still_says_so_and_for_how_long() -> None:
    alone = explain(evidence(stood_still_s=4.25, silent={1}))
    assert alone == "rank 0 itself stood still for 4.2 s (stopped, or starved); so it names no other rank"


@pytest.mark.parametrize("place", [Place(), Place("ü" * 120, 7, PEERS, frozenset({3, 1})), Place("x", 1, LAUNCH, None)])
def test_a_beat_is_read_as_it_was_sent(place: Place) -> None:
    beat = Beat(3, place, True, {"call": 2})
    assert Beat.parse(beat.text()) == Beat.parse(beat.text().encode()) == beat
    assert Place.make("x" * 500, 1, PEERS, range(17)) == Place("x" * 120, 1, PEERS, None)


NO_BEATS = ["", "1", "{}", "[1]", '[1,"a",1,"nothing",[],false,null]', "[[],1,1,1,1,1,1]", "0 poison", "[" * 5000]


@pytest.mark.parametrize("text", NO_BEATS, ids=range(len(NO_BEATS)))
def test_what_is_no_beat_is_refused(text: str) -> None:
    with pytest.raises((ValueError, TypeError, RecursionError)):
        Beat.parse(text)
    assert Beat.parse_or_none(text) is Beat.parse_or_none(None) is None
