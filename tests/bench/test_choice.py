"""Drawn calls and the judgement of what prediction chooses for them."""

from __future__ import annotations

from itertools import pairwise

import pytest

from ringattn.bench import choice
from ringattn.bench.choice import FORWARD_FLOPS, Case, ChoiceOptions, different, drawn, flops, judged, tables_of
from ringattn.bench.clock import Sample
from ringattn.bench.timed_calls import PASSES, Shape, TimedCall, plans_of
from ringattn.errors import InputError
from ringattn.planner.simulate import simulate
from ringattn.testing import run_ranks
from tests.launch.test_calibrate import REFERENCE

CALL = Shape(1024, 4, 4, 64, "zigzag", "ring")


def test_calls_are_drawn_alike_and_of_every_kind() -> None:
    assert drawn(10, 23) == drawn(10, 23) and drawn(10, 23)[:2] == drawn(2, 23) != drawn(2, 24)
    calls = [call for _, call in drawn(10, 23)]
    assert {ranks for ranks, _ in drawn(10, 23)} == {2, 3, 4}
    assert {bool(call.documents) for call in calls} == {bool(call.window) for call in calls} == {True, False}
    for call in calls:
        assert FORWARD_FLOPS[0] <= flops(call) <= FORWARD_FLOPS[1]
        assert not call.documents or sum(call.documents) == call.tokens


def test_schedules_with_the_same_plans_are_measured_once() -> None:
    two, four = ({shape.schedule for shape in different(CALL, ranks)} for ranks in (2, 4))
    # On two ranks one exchange brings everything, whatever it is called.
    assert not two & {"direct", "all_gather", "double_ring"} and {"ring", "pass_q"} <= two
    assert {"ring", "direct", "all_gather", "bidirectional", "double_ring"} <= four


def test_packed_documents_are_exact_and_small_ones_stay_documents() -> None:
    shape = Shape(2048, 4, 2, 32, "per_document", "direct", documents=(300, 1500, 248))
    small = shape.small(2)
    assert small.tokens == sum(small.documents) == 128 and len(small.documents) == 3
    assert max(run_ranks(2, lambda ring: TimedCall(ring, small).gate())) < 1e-5
    assert Shape.read([*shape[:-1], list(shape.documents)]) == shape


def samples(case: Case, slower: dict[str, float]) -> list[dict[str, list[Sample]]]:
    """What ranks would measure that take just what is predicted, times `slower` by schedule."""
    found = []
    for shape in case.shapes:
        by_pass = {}
        for name in PASSES:
            said = simulate(plans_of(shape, case.ranks, name == "backward", REFERENCE), REFERENCE).total_us / 1e6
            by_pass[name] = [Sample(said * slower.get(shape.schedule, 1.0), said, 0.0)]
        found.append(by_pass)
    return found


def test_a_choice_is_judged_by_what_was_measured() -> None:
    case = Case(3, different(CALL, 3))
    right = judged(case, samples(case, {}), REFERENCE)
    assert right.chosen == right.fastest and right.over_fastest(right.chosen) == 1
    assert max(map(abs, right.errors())) == pytest.approx(0)
    assert right.auto in right.took
    # What is chosen turns out slow: another is the fastest, and the errors say so.
    spoiled = judged(case, samples(case, {right.chosen: 1.5}), REFERENCE)
    assert spoiled.chosen == right.chosen != spoiled.fastest and spoiled.over_fastest(spoiled.chosen) > 1.1
    assert min(spoiled.errors()) == pytest.approx(-1 / 3)


def test_the_bar_is_nine_in_ten() -> None:
    cases = [Case(3, different(CALL, 3))] * 10
    good = samples(cases[0], {})
    bad = samples(cases[0], {judged(cases[0], good, REFERENCE).chosen: 1.5})
    for wrong, word in ((1, "met"), (2, "MISSED")):
        found = [bad] * wrong + [good] * (10 - wrong)
        choices, passes = tables_of(ChoiceOptions(results=""), REFERENCE, found, cases)
        assert f"in {10 - wrong} of 10; the bar is 90%: {word}." in choices.notes[0]
        assert "the bar is 10%: met" in choices.notes[1]
        assert len(passes.rows) == sum(len(case.shapes) for case in cases) * len(PASSES)
    assert all(a[0] <= b[0] for a, b in pairwise(choices.rows))


@pytest.mark.parametrize("word", ["cases=0", "repeats=0"])
def test_bad_options_are_refused(word: str) -> None:
    with pytest.raises(InputError, match="must be positive"):
        choice.main([word, "results="])
