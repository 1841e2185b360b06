"""Ways to break shm's order, as `mutations.py` breaks the copy engines'."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from ringattn.transport.peer.program import LogStart, Program, Wait, WordKind, Write
from tests.transport.peer_model.endings import PULL_ABORT, EndStep
from tests.transport.peer_model.mutations import ARRIVAL, CREDIT, Mutation, OfRank, is_copy, passes, short, two
from tests.transport.peer_model.pull import pull_exchange
from tests.transport.peer_model.scenarios import star
from tests.transport.peer_model.scripts import Protocol

PULL = Protocol(exchange=pull_exchange, drain=(), machine={"abort": PULL_ABORT})


def waits_changed(change: Callable[[list[Any]], list[Any]], start: Callable[[list[Any]], list[Any]] = list) -> Protocol:
    """shm with another order in its waits, or starts."""

    def changed_pull(program: Program) -> Program:
        return replace(program, wait=tuple(change(list(program.wait))), start=tuple(start(list(program.start))))

    return replace(PULL, change=changed_pull)


def brought(what: Callable[[Any], bool], before: Callable[[Any], bool], steps: list[Any]) -> list[Any]:
    """Each step of one sort before the last of another that stands before it."""
    steps = list(steps)
    for at, step in enumerate(steps):
        if what(step):
            to = next((n for n in range(at - 1, -1, -1) if before(steps[n])), at)
            steps.insert(to, steps.pop(at))
    return steps


def is_check(step: Any) -> bool:
    """Where shm looks for poison."""
    return step is EndStep.CHECK


def is_wait(kind: WordKind, step: Any) -> bool:
    """A wait of the host."""
    return isinstance(step, Wait) and step.word.kind is kind


def is_write(kind: WordKind, step: Any) -> bool:
    """A store of the host."""
    return isinstance(step, Write) and step.word.kind is kind


def own_credits_first(steps: list[Any]) -> list[Any]:
    """Wait until the sends have been taken, and then take."""
    return sorted(steps, key=lambda step: not is_wait(WordKind.CREDIT, step))


def failing_pull(protocol: Protocol, **options: Any) -> Protocol:
    """The same where rank 0 raises."""
    return replace(protocol, machine={"abort": PULL_ABORT, "fault": "raise", **options})


PULL_MUTATIONS = [
    Mutation(
        "credit before copy",
        waits_changed(partial(brought, partial(is_write, CREDIT), is_copy)),
        passes,
        "ordered",
    ),
    Mutation(
        "arrival before log entry",
        waits_changed(list, partial(brought, partial(is_write, ARRIVAL), lambda step: isinstance(step, LogStart))),
        two,
        "found",
    ),
    Mutation(
        "arrival wait dropped",
        waits_changed(lambda steps: [step for step in steps if not is_wait(ARRIVAL, step)]),
        two,
        "found",
    ),
    Mutation(
        "credit wait dropped",
        waits_changed(lambda steps: [step for step in steps if not is_wait(CREDIT, step)]),
        passes,
        "ordered",
    ),
    Mutation("sends awaited before receives are taken", waits_changed(own_credits_first), two, "liveness"),
    Mutation("number per rank instead of per pair", replace(PULL, numbers=OfRank), partial(star, world=3), "found"),
    Mutation("stale page of an earlier ring", replace(PULL, first_words=3), two, "found"),
    Mutation(
        "check before copy",
        failing_pull(waits_changed(partial(brought, is_check, is_copy))),
        short,
        "true success",
    ),
    Mutation(
        "check dropped",
        failing_pull(waits_changed(lambda steps: [step for step in steps if not is_check(step)])),
        short,
        "true success",
    ),
    Mutation("error told before poison", failing_pull(PULL, raises_early=True), short, "true success"),
]
"""The same for shm."""
