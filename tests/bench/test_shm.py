"""What the figures of `ringattn.bench.shm` are said to show."""

from __future__ import annotations

import math
import random
from itertools import product

import pytest

from ringattn.bench.paired import paired
from ringattn.bench.shm import SIZES, calls_table, calls_verdict, messages_table, messages_verdict

LARGE = str(SIZES[-1])


def messages(shm_s: float, gloo_s: float, copy_s: float) -> dict[str, dict[str, list[float]]]:
    """Ten times each at the largest size; all others are met."""
    found = {name: {str(size): [s] * 10 for size in SIZES} for name, s in (("shm", 1.0), ("gloo", 9.0), ("copy", 0.5))}
    for name, s in (("shm", shm_s), ("gloo", gloo_s), ("copy", copy_s)):
        found[name][LARGE] = [s] * 10
    return found


@pytest.mark.parametrize(
    ("seconds", "words"),
    [
        ((1.0, 4.0, 0.9), "At least 4.0 times gloo, the bar is 4 at every size: met."),
        # Twice as fast as copying would be enough here, so the copy must not be counted as shm's.
        ((1.0, 4.0, 2.0), "At least 4.0 times gloo, the bar is 4 at every size: met."),
        ((1.0, 3.9, 0.9), "every size: MISSED at 65536 KiB (3.9 times, the bare copy 4.3)."),
        ((1.0, 3.6, 0.9), "every size: MISSED at 65536 KiB (3.6 times, the bare copy 4.0)."),
        (
            (1.0, 3.5, 0.9),
            "At least 3.5 times gloo, the bar is 4 at every size: above what copying allows here, so not met either, "
            "at 65536 KiB (3.5 times, the bare copy 3.9).",
        ),
    ],
)
def test_a_size_that_copying_cannot_reach_is_told_apart_and_is_not_met(
    seconds: tuple[float, float, float], words: str
) -> None:
    assert messages_verdict(messages(*seconds)).endswith(words)


def test_copying_must_miss_in_every_measure_in_which_shm_does() -> None:
    """By the medians copying allows less than the bar, by the fastest tenths it allows the bar, and shm misses both."""
    found = messages(1.0, 3.5, 0.9)
    found["copy"][LARGE][:2] = [0.5, 0.5]
    assert "MISSED at 65536 KiB (3.5 times, the bare copy 7.0)." in messages_verdict(found)
    # Where shm misses only by the medians, only they count.
    found["shm"][LARGE][:2] = [0.8, 0.8]
    assert "above what copying allows here" in messages_verdict(found)
    # A second size is missed for good: both are told.
    found["shm"][str(SIZES[0])] = [3.0] * 10
    said = messages_verdict(found)
    assert "At least 3.0 times" in said and "MISSED at 64 KiB (3.0 times, the bare copy 18.0); above what" in said


def test_a_row_has_the_bare_copy_and_what_shm_takes_over_it() -> None:
    table = messages_table(4, messages(0.0015, 0.006, 0.001))
    assert table.columns[-3:] == ("bare copy, µs", "p10", "shm / copy")
    assert table.rows[-1][-3:] == ("1000", "1000", "1.50")


@pytest.mark.parametrize("count", [1, 5, 6, 7, 20, 60, 121])
def test_the_interval_is_the_narrowest_that_holds_the_median_19_times_of_20(count: int) -> None:
    """By enumeration of which rounds are below the median, up to 2^7; above that by the binomial's known ranks."""
    ratio = paired([1.0] * count, [float(n) for n in range(1, count + 1)])
    if count <= 7:
        # Values 1..n: with b of them below the true median, it is between the b-th and the next.
        def misses(outside: int) -> float:
            sides = [sum(below) for below in product((0, 1), repeat=count)]
            return sum(b < outside or count - b < outside for b in sides) / len(sides)

        outside = max(k for k in range((count + 1) // 2 + 1) if not k or misses(k) <= 0.05)
        assert (ratio.low, ratio.high) == ((outside, count + 1 - outside) if outside else (0.0, math.inf))
    else:
        # Tables of the sign test leave out 5, 21 and 49 values at either end.
        outside = {20: 6, 60: 22, 121: 50}[count]
        assert (ratio.low, ratio.high) == (outside, count + 1 - outside)


def rounds(by: float, count: int = 60) -> tuple[list[float], list[float]]:
    """Seconds of ours and of another that takes `by` times as long, on a machine whose speed wanders threefold."""
    draw = random.Random(7)
    speed = [1 + 2 * draw.random() for _ in range(count)]
    ours, other = ([s * (1 + 0.02 * draw.random()) for s in speed] for _ in range(2))
    return ours, [by * s for s in other]


@pytest.mark.parametrize(("by", "word"), [(0.97, "slower"), (1.0, "level"), (1.03, "faster")])
def test_three_percent_show_where_both_take_turns(by: float, word: str) -> None:
    ratio = paired(*rounds(by))
    assert ratio.words == word
    assert ratio.low < ratio.median < ratio.high and ratio.median == pytest.approx(by, rel=0.01)


def test_rounds_that_differ_too_much_or_are_too_few_decide_nothing() -> None:
    assert paired([1.0] * 9, [0.9] * 4 + [1.1] * 5).words == "undecided"
    assert paired([1.0] * 9, [0.96] * 4 + [1.1] * 5).words == "level"  # slower by less than one in twenty at most
    assert paired([1.0] * 5, [1.0] * 5).words == "undecided"


def test_unlike_numbers_of_rounds_are_no_pairs() -> None:
    with pytest.raises(ValueError, match="zip"):
        paired([1.0, 1.0], [1.0])


def calls(forward: float, backward: float) -> dict[str, dict[str, list[float]]]:
    ours, peer = {}, {}
    for name, by in (("forward", forward), ("backward", backward)):
        ours[name], peer[name] = rounds(by)
    return {"ringattn over shm": ours, "ringattn over gloo": ours, "torch ring (alltoall)": peer}


@pytest.mark.parametrize(
    ("by", "words"),
    [
        ((1.0, 1.05), "ring: met; forward"),
        ((0.95, 1.05), "ring: MISSED; forward"),
        ((1.05, 0.95), "ring: MISSED; forward"),
    ],
)
def test_level_is_missed_only_where_a_pass_is_slower_beyond_doubt(by: tuple[float, float], words: str) -> None:
    said = calls_verdict(calls(*by))
    assert words in said
    assert str(paired(*rounds(by[0]))) in said and str(paired(*rounds(by[1]))) in said
    few = {name: {one: times[:5] for one, times in by_pass.items()} for name, by_pass in calls(*by).items()}
    assert "ring: OPEN; forward" in calls_verdict(few)
    table = calls_table(1024, calls(*by))
    assert [row[-1] for row in table.rows[:3]] == [
        "",
        str(paired(*[rounds(by[0])[0]] * 2)),
        str(paired(*rounds(by[0]))),
    ]
