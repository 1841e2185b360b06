"""What the figures of `ringattn.bench.shm` are said to show."""

from __future__ import annotations

import random

import pytest

from ringattn.bench.shm import SIZES, calls_table, calls_verdict, messages_verdict, paired

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
