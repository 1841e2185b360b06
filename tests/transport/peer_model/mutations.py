"""Mutations of the protocol, each with a use case in which some order of operations violates a rule."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

from ringattn.transport.peer.program import (
    Copy,
    Event,
    LogStart,
    Memops,
    Pair,
    PairNumbers,
    Program,
    RecordEvent,
    Wait,
    WaitEvent,
    WordKind,
    Write,
)
from tests.transport.peer_model.machine import DRAIN, EndStep, Machine
from tests.transport.peer_model.scripts import (
    ExactWait,
    HostBlock,
    LooseCopy,
    OnCaller,
    Protocol,
    UnfencedWrite,
    other_order,
    ring,
    star,
    two_messages,
)


class Mutation(NamedTuple):
    """A protocol with a mistake, and a use case that detects it.

    With the protocol `broken`, the use case `use` violates `rule`. With the correct protocol, it violates no rule.
    """

    name: str
    broken: Protocol
    use: Callable[[Protocol], Machine]
    rule: str


# --- changes of a program --------------------------------------------------------------------------------------------


def flat(program: Program) -> list[Any]:
    """Return the steps that start an exchange, with each memory operation (store or wait) in a batch of its own."""
    steps: list[Any] = []
    for step in program.start:
        steps += [Memops((op,)) for op in step.ops] if isinstance(step, Memops) else [step]
    return steps


def is_op(step: Any, kind: WordKind, op: type) -> bool:
    """Return whether a step is a store to, or a wait for, a word of this kind."""
    return isinstance(step, Memops) and step.ops[0].word.kind is kind and isinstance(step.ops[0], op)


def without(kind: WordKind, op: type, program: Program) -> Program:
    """Return the program without the stores to words of this kind, or without the waits for them."""
    return replace(program, start=tuple(step for step in flat(program) if not is_op(step, kind, op)))


def moved(kind: WordKind, op: type, before: Callable[[Any], bool], program: Program) -> Program:
    """Return the program with the stores or waits moved to before the first step that satisfies `before`."""
    steps = [step for step in flat(program) if not is_op(step, kind, op)]
    target = next((n for n, step in enumerate(steps) if before(step)), len(steps))
    steps[target:target] = [step for step in flat(program) if is_op(step, kind, op)]
    return replace(program, start=tuple(steps))


def mapped(change: Callable[[Any], Any], program: Program) -> Program:
    """Return the program with `change` applied to each step."""
    return replace(program, start=tuple(change(step) for step in flat(program)))


def unfenced(step: Any) -> Any:
    """Return the step without the fence if it stores an arrival flag, which may then be visible before its data."""
    if is_op(step, WordKind.ARRIVAL, Write):
        return Memops((UnfencedWrite(step.ops[0].word, step.ops[0].nth),))
    return step


def loose(step: Any) -> Any:
    """Return the step, as a `LooseCopy` if it is a copy. A loose copy may begin at any later time."""
    return LooseCopy(step.message, step.src, step.dst, step.nth) if isinstance(step, Copy) else step


def exact(step: Any) -> Any:
    """Return the step, as an `ExactWait` if it is a wait. It then waits for exactly its value, not for at least it."""
    if isinstance(step, Memops) and isinstance(step.ops[0], Wait):
        return Memops((ExactWait(step.ops[0].word, step.ops[0].nth),))
    return step


def flags_of_each(program: Program) -> Program:
    """Return a program that stores and waits once per message, instead of once per pair of ranks."""
    steps: list[Any] = []
    for step in flat(program):
        op = step.ops[0] if isinstance(step, Memops) else None
        nths = range(1, op.nth + 1) if op else ()
        steps += [Memops((replace(op, nth=nth),)) for nth in nths] if op else [step]
    return replace(program, start=tuple(steps))


def arrivals_on_caller(program: Program) -> Program:
    """Return a program in which the caller's stream waits for arrivals right after it has recorded READY."""
    steps: list[Any] = []
    waits = [OnCaller(step.ops[0]) for step in flat(program) if is_op(step, WordKind.ARRIVAL, Wait)]
    for step in flat(program):
        if not is_op(step, WordKind.ARRIVAL, Wait):
            steps.append(step)
        if isinstance(step, RecordEvent) and step.event is Event.READY:
            steps += waits
    return replace(program, start=tuple(steps))


def block_before(kind: WordKind, op: type, program: Program) -> Program:
    """Return a program in which the host blocks before the first operation `op` on a word of this kind.

    The host waits there until the lane has run all earlier operations.
    """
    steps = flat(program)
    first = next((n for n, step in enumerate(steps) if is_op(step, kind, op)), len(steps))
    return replace(program, start=(*steps[:first], HostBlock(), *steps[first:]))  # type: ignore[arg-type]


def receive_by_host(program: Program) -> Program:
    """Return a program in which the host waits for its receives before it enqueues the flags of its sends."""
    arrivals_first = moved(WordKind.ARRIVAL, Wait, lambda step: is_op(step, WordKind.ARRIVAL, Write), program)
    return block_before(WordKind.ARRIVAL, Write, arrivals_first)


def log_late(program: Program) -> Program:
    """Return a program that logs the start of an exchange after it has enqueued the operations of the exchange."""
    logs = tuple(step for step in program.start if isinstance(step, LogStart))
    return replace(program, start=(*(step for step in program.start if not isinstance(step, LogStart)), *logs))


class Reused(PairNumbers):
    """Message numbers that are the same in the second exchange as in the first."""

    def __init__(self) -> None:
        super().__init__()
        self._first = True

    def advance(self, program: Program) -> None:
        """Advance the numbers after each exchange except the first."""
        if not self._first:
            super().advance(program)
        self._first = False


class OfRank(PairNumbers):
    """Message numbers that count all messages that this rank sends, and all that it receives, instead of per pair."""

    def bases(self, program: Program) -> dict[Pair, int]:
        """Return for each pair how many messages this rank has started in the same direction, with any peer."""
        rank = program.rank
        return {pair: sum(count for each, count in self._started.items() if (each[0] == rank) == (pair[0] == rank))
                for pair, _ in program.counts}  # fmt: skip


def before_ready(step: Any) -> bool:
    """Return whether this step makes the lane wait for the event READY of the caller's stream."""
    return isinstance(step, WaitEvent) and step.event is Event.READY


def is_copy(step: Any) -> bool:
    """Return whether a step copies data."""
    return isinstance(step, Copy)


def changed(function: Callable[..., Program], *arguments: Any, **options: Any) -> Protocol:
    """Return a protocol whose programs are changed by `function`."""
    return Protocol(change=partial(function, *arguments), **options)


def failing(fault: str, drain: tuple[EndStep, ...] = DRAIN, **options: Any) -> Protocol:
    """Return a protocol in which rank 0 may have `fault` (see `Machine.fault`). `options`: options of `Machine`."""
    return Protocol(drain=drain, machine={"fault": fault, **options})


two, three = partial(ring, world=2, hops=3), partial(ring, world=3, hops=3)
passes = partial(ring, world=2, hops=1, passes=2)
short = partial(ring, world=2, hops=2)
CREDIT, ARRIVAL = WordKind.CREDIT, WordKind.ARRIVAL


MUTATIONS = [
    Mutation("credit dropped", changed(without, CREDIT, Wait), two, "ordered"),
    Mutation("credit never given", changed(without, CREDIT, Write), two, "liveness"),
    Mutation("credit before ready", changed(moved, CREDIT, Write, before_ready), two, "ordered"),
    Mutation("flag before data", changed(moved, ARRIVAL, Write, is_copy), two, "ordered"),
    Mutation("data and flag in one unordered batch", changed(mapped, loose), two, "ordered"),
    Mutation("arrival wait dropped", changed(without, ARRIVAL, Wait), two, "ordered"),
    Mutation("flag written without fence", changed(mapped, unfenced), two, "ordered"),
    Mutation("sequence number reused", Protocol(numbers=Reused), two, "ordered"),
    Mutation("number per rank instead of per pair", Protocol(numbers=OfRank), partial(star, world=3), "liveness"),
    Mutation(
        "EQ instead of GEQ with two messages in flight",
        Protocol(change=lambda program: mapped(exact, flags_of_each(program))),
        two_messages,
        "liveness",
    ),
    Mutation("slots swapped in the book", Protocol(swap_book=True), two, "ordered"),
    Mutation(
        "wait on the caller's stream with one hardware queue",
        changed(arrivals_on_caller, one_queue=True),
        two,
        "liveness",
    ),
    Mutation("host block inside start", changed(receive_by_host), two, "liveness"),
    Mutation("start logged behind what it enqueues", changed(log_late), two, "liveness"),
    Mutation("paint once only", failing("raise", paint_once=True), short, "liveness"),
    Mutation(
        "paint before poison",
        failing("raise", abort=(EndStep.PAINT, EndStep.POISON, EndStep.UNMAP)),
        short,
        "true success",
    ),
    Mutation(
        "check before done",
        failing("raise", drain=(EndStep.CHECK, EndStep.AWAIT_DONE, EndStep.AWAIT_COMPUTED)),
        short,
        "true success",
    ),
    Mutation(
        "drain looks at exchanges and not at the caller's stream",
        failing("raise", drain=(EndStep.AWAIT_DONE, EndStep.CHECK)),
        passes,
        "true success",
    ),
    Mutation(
        "unmap before drained",
        failing("raise", abort=(EndStep.POISON, EndStep.UNMAP, EndStep.PAINT)),
        short,
        "mapped",
    ),
    Mutation("abort during a start", failing("raise", guarded=False), short, "mapped"),
    Mutation("error raised before poison", failing("raise", raises_early=True), short, "true success"),
    Mutation(
        "poison names the rank that poisons",
        failing("die", names_origin=False),
        partial(ring, world=3, hops=1),
        "no innocent named",
    ),
    Mutation(
        "EQ instead of GEQ, and an abort",
        Protocol(change=partial(mapped, exact), machine={"fault": "raise"}),
        short,
        "liveness",
    ),
    Mutation("stale page of an earlier ring", Protocol(first_words=3), two, "ordered"),
    Mutation("k-th start paired by bind order", Protocol(by_bind_order=True), other_order, "ordered"),
]
"""All mutations. `docs/testing.md` lists them too."""
