"""The bell of a shared page, in every order: `SharedGroup.hold`, `tell` and `pause` lose no wake; each mistake does.

Steps of the rank that holds: read the bell, ask, sleep unless the bell has changed since. Steps of one that tells:
store its word, change the bell, wake. The real sleep ends after a slice; here it does not, so a lost wake is a hang.
"""

from __future__ import annotations

from typing import NamedTuple

import pytest

TOLD = ("word", "bell", "wake")
HOLDS = ("read", "ask", "sleep")
ROUNDS = 2
"""How often each rank tells."""


class Moment(NamedTuple):
    """Who stands where; `asleep` until somebody wakes."""

    holder: int
    seen: int
    asleep: bool
    bell: int
    words: tuple[int, ...]
    tellers: tuple[int, ...]


def lost(tells: tuple[str, ...] = TOLD, holds: tuple[str, ...] = HOLDS, ranks: int = 2, reused: bool = False) -> bool:
    """Whether some order leaves the holder asleep with everything told."""
    first = Moment(0, 0, False, 0, (0,) * ranks, (0,) * ranks)
    seen, todo = {first}, [first]
    while todo:
        now = todo.pop()
        after = [_tell(now, rank, tells, reused) for rank in range(ranks) if now.tellers[rank] < ROUNDS * len(tells)]
        holding = not now.asleep and now.holder < len(holds)
        if holding:
            after.append(_hold(now, holds))
        if not after and now.asleep:
            return True
        todo += [moment for moment in after if moment not in seen]
        seen.update(after)
    return False


def _tell(now: Moment, rank: int, tells: tuple[str, ...], reused: bool) -> Moment:
    at = now.tellers[rank]
    ring, step = at // len(tells) + 1, tells[at % len(tells)]
    now = now._replace(tellers=tuple(at + 1 if other == rank else each for other, each in enumerate(now.tellers)))
    if step == "word":
        return now._replace(words=tuple(ring if other == rank else each for other, each in enumerate(now.words)))
    if step == "bell":
        # As `SharedGroup.ring`: no two values of any rank are alike.
        return now._replace(bell=1 if reused else ring * len(now.words) + rank)
    return now._replace(asleep=False)


def _hold(now: Moment, holds: tuple[str, ...]) -> Moment:
    step, onward = holds[now.holder], now._replace(holder=(now.holder + 1) % len(holds))
    if step == "read":
        return onward._replace(seen=now.bell)
    if step == "ask":
        return now._replace(holder=len(holds)) if min(now.words) == ROUNDS else onward
    return onward._replace(asleep=now.bell == now.seen)


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_no_order_loses_a_wake(ranks: int) -> None:
    assert not lost(ranks=ranks)


@pytest.mark.parametrize(
    "mistake",
    [
        {"holds": ("ask", "read", "sleep")},
        {"tells": ("bell", "word", "wake")},
        {"tells": ("word", "wake", "bell")},
        {"tells": ("word", "bell")},
        {"tells": ("word", "wake")},
        {"reused": True},
    ],
    ids=["bell read after asking", "bell before word", "wake before bell", "no wake", "no bell", "one value for all"],
)
def test_each_mistake_loses_a_wake_in_some_order(mistake: dict) -> None:
    assert lost(**mistake)
