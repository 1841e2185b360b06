"""A model of the machine that programs run on: threads, words, slots, copies that complete late, and failing ranks.

Each rank has three threads: the host, the caller's stream and the lane (the stream on which exchanges run). An
operation runs after the operations that it needs. A copy is two events: it begins as an operation of its thread, and
completes at any later time. Between the two events its target slot is torn. A slot is a buffer; its content is modeled
as a tag, the number that the last write gave it, and a kernel states the tags that it must read. The supervisors of a
failed rank, and of each rank that notices the failure, run the steps of `ABORT`.
Not modeled: torn words, caches of the host, how a rank detects a silent peer, and deadlines (a rank may notice a
failure at any time).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum, IntEnum
from itertools import islice
from typing import NamedTuple

from ringattn.transport.peer.program import PAINTED

# --- operations, states and violations -------------------------------------------------------------------------------


TORN, LAUNCHED, OVERWRITTEN = -1, -2, -3
"""Special tags. `TORN`: a copy is writing the slot. `LAUNCHED`: a detached copy has not begun. `OVERWRITTEN - r`: the
caller on failed rank r has overwritten the slot."""
NOBODY = -1
HOST, CALLER, LANE = range(3)
"""The threads of a rank have the indices `rank * 3` plus these."""
Position = tuple[int, int]
"""A thread and the index of an operation on it."""


class Kind(IntEnum):
    """The kind of an operation."""

    PASS = 0
    """No effect except its order: enqueue, log, look up, record an event, wait for an event."""
    KERNEL = 1
    WRITE = 2
    WAIT = 3
    COPY = 4
    CHECK = 5
    SUCCESS = 6
    UNMAP = 7
    CLOSED = 8
    START = 9
    """Enqueue an exchange. A rank that fails before it never runs it."""


COMMUTING = frozenset({Kind.START, Kind.WRITE, Kind.WAIT})
"""Kinds that commute with every operation if no rank fails and words only increase."""


class Op(NamedTuple):
    """One operation of a thread. It runs after the operations in `needs`."""

    kind: Kind
    what: str
    needs: tuple[Position, ...] = ()
    word: int = -1
    value: int = 0
    exact: bool = False
    fence: bool = True
    reads: tuple[tuple[int, int], ...] = ()
    """Pairs of a slot that a kernel reads and the tag that the slot must hold."""
    writes: tuple[tuple[int, int], ...] = ()
    source: int = -1
    target: int = -1
    detached: bool = False
    """Whether a copy may begin at any later time, without order with the later operations of its thread."""


class Life(IntEnum):
    """The state of a rank's host."""

    RUNS = 0
    ENDED = 1
    RAISED = 2
    DEAD = 3
    STOPPED = 4


class State(NamedTuple):
    """The complete state of a run."""

    positions: tuple[int, ...]
    """For each thread, the index of its next operation."""
    words: tuple[int, ...]
    slots: tuple[int, ...]
    landing: tuple[tuple[Position, int], ...]
    """Copies that have not completed, with the tag that they carry."""
    life: tuple[int, ...]
    phase: tuple[int, ...]
    """The number of the next abort step of each rank, from 1; 0 if the rank has not failed."""
    origin: tuple[int, ...]
    """For each failed rank, the rank that it names as the culprit."""
    poison: tuple[int, ...]
    """For each rank's page, the rank that its poison words name as the culprit."""
    spoiled: int
    """A bit mask of the ranks that have read data that no rank sent to them."""
    culprit: int


class Violation(Exception):
    """A rule of the protocol that a state or an operation breaks."""

    def __init__(self, rule: str, text: str) -> None:
        super().__init__(f"{rule}: {text}")
        self.rule = rule


def replaced(values: tuple[int, ...], index: int, value: int) -> tuple[int, ...]:
    """Return the tuple `values` with `value` at `index`."""
    return (*values[:index], value, *values[index + 1 :])


# --- steps of drain, abort and close ---------------------------------------------------------------------------------


class EndStep(Enum):
    """A step of drain, abort or close on the host."""

    AWAIT_DONE = "wait until the DONE of every exchange has passed"
    AWAIT_COMPUTED = "record an event on the caller's stream now and wait until it has passed"
    CHECK = "raise unless every poison word of this rank's page is 0"
    POISON = "store the rank at fault into this rank's poison word of every page"
    PAINT = "store PAINTED into every word of this rank's page, repeatedly, until no operation of this rank waits"
    UNMAP = "unmap the other ranks' memory"


DRAIN = (EndStep.AWAIT_DONE, EndStep.AWAIT_COMPUTED, EndStep.CHECK)
"""The steps of a drain. When a failed rank releases its queue, its queued copies may write to buffers for which no
receiver gave a credit. The rank poisons every page before it releases the queue. So a rank that finds no poison after
its last kernel has run knows that the kernel read no such bytes. A check right after DONE would be too early: once the
next exchange has started, a copy without a credit may write to a buffer that a queued kernel still reads."""
ABORT = (EndStep.POISON, EndStep.PAINT, EndStep.UNMAP)
"""The steps of an abort. Painting overwrites the words that queued operations wait for, and so releases the queues,
including copies without a credit. So every page is poisoned before that. It is also poisoned before the caller gets the
error, because the caller may then overwrite buffers that are being sent. Other ranks may overwrite a painted word with
a lower number, so painting is repeated until no operation of this rank waits. Only then can no copy touch unmapped
memory. A start that has begun to enqueue an exchange finishes before the abort, and no start begins after it."""
CLOSE = (*DRAIN, EndStep.UNMAP)


# --- the machine ----------------------------------------------------------------------------------------------------


@dataclass
class Machine:
    """The threads and supervisors of all ranks: their operations, and the transitions between states."""

    world: int
    threads: list[list[Op]]
    page: list[int]
    """For each word, the rank whose page holds it."""
    slots: int
    words: list[int] = field(default_factory=list)
    """The initial values of the words."""
    fault: str = ""
    """The fault that rank 0 may have at any time: "raise", "die", "stop", or "" for none."""
    abort: tuple[EndStep, ...] = ABORT
    paint_once: bool = False
    names_origin: bool = True
    guarded: bool = True
    """Whether a rank enqueues nothing more once it has failed."""
    raises_early: bool = False
    """Whether the caller may get the error before every page is poisoned."""
    reduced: bool = True
    """Whether to omit orders that lead to the same results."""

    def __post_init__(self) -> None:
        self._successes = [[n for n, op in enumerate(self.threads[rank * 3]) if op.kind == Kind.SUCCESS]
                           for rank in range(self.world)]  # fmt: skip
        self._steps: list[tuple[EndStep, int]] = []
        """The steps of an abort, each with the page that it poisons, or 0 if it does not poison a page."""
        for step in self.abort:
            self._steps += [(step, page) for page in (range(self.world) if step is EndStep.POISON else [0])]
        unmaps = [n for n, (step, _) in enumerate(self._steps, 1) if step is EndStep.UNMAP]
        self._unmapped = unmaps[0]
        self._all_poisoned = max(n for n, (step, _) in enumerate(self._steps, 1) if step is EndStep.POISON)
        order = list(self.abort)
        self._drains = EndStep.PAINT in order and order.index(EndStep.PAINT) < order.index(EndStep.UNMAP)
        # A painted word that is overwritten is painted again, so all orders end in the same state.
        self._confluent = self.reduced and self._drains and not self.paint_once and self.guarded and not self._exact()
        self._commuting = not self.fault and self._monotone()

    def first(self) -> State:
        """Return the state before any operation has run."""
        n = self.world
        return State(
            tuple(0 for _ in self.threads), tuple(self.words), (0,) * self.slots, (), (Life.RUNS,) * n, (0,) * n,
            (NOBODY,) * n, (NOBODY,) * n, 0, NOBODY,
        )  # fmt: skip

    def enabled(self, state: State, thread: int) -> bool:
        """Return whether the next operation of a thread can run."""
        ops, index = self.threads[thread], state.positions[thread]
        if index >= len(ops):
            return False
        op, rank = ops[index], thread // 3
        life = state.life[rank]
        if life == Life.DEAD:
            return False
        if thread % 3 == HOST and (life != Life.RUNS or (state.phase[rank] and self.guarded)):
            return False
        for where, needed in op.needs:
            if state.positions[where] <= needed:
                return False
        if op.kind == Kind.WAIT:
            return self.satisfied(state, op)
        if op.kind == Kind.WRITE:
            return not (op.fence and any(each[0][0] == thread and each[1] != LAUNCHED for each in state.landing))
        if op.kind == Kind.CHECK:
            return state.poison[rank] == NOBODY and not state.phase[rank]
        return True

    @staticmethod
    def satisfied(state: State, op: Op) -> bool:
        """Return whether the word of a wait has the value that it waits for."""
        value = state.words[op.word]
        return value == op.value if op.exact else value >= op.value

    def run(self, state: State, thread: int) -> State:
        """Run the next operation of a thread."""
        index = state.positions[thread]
        op, rank = self.threads[thread][index], thread // 3
        state = state._replace(positions=replaced(state.positions, thread, index + 1))
        if op.kind == Kind.WRITE:
            return state._replace(words=replaced(state.words, op.word, op.value))
        if op.kind == Kind.KERNEL:
            return self._kernel(state, op, rank)
        if op.kind == Kind.COPY:
            if state.phase[rank] > self._unmapped:
                raise Violation("mapped", f"rank {rank}: {op.what} into memory that is no longer mapped")
            if op.detached:
                return state._replace(landing=(*state.landing, ((thread, index), LAUNCHED)))
            return self._begin(state, (thread, index), op)
        if op.kind == Kind.SUCCESS and state.spoiled >> rank & 1:
            text = f"rank {rank} returns from drain, but has read data that no rank sent to it"
            raise Violation("true success", text)
        if op.kind == Kind.UNMAP:
            self._unmap(state, rank)
        if op.kind == Kind.CLOSED:
            return state._replace(life=replaced(state.life, rank, Life.ENDED))
        return state

    def land(self, state: State, copy: tuple[Position, int]) -> State:
        """Complete a copy, or begin it if it is detached and has not begun."""
        (thread, index), tag = copy
        op = self.threads[thread][index]
        state = state._replace(landing=tuple(each for each in state.landing if each != copy))
        if tag == LAUNCHED:
            return self._begin(state, (thread, index), op)
        return state._replace(slots=replaced(state.slots, op.target, tag))

    def _begin(self, state: State, where: Position, op: Op) -> State:
        carried = state.slots[op.source]
        slots = replaced(state.slots, op.target, TORN)
        return state._replace(slots=slots, landing=tuple(sorted((*state.landing, (where, carried)))))

    def _kernel(self, state: State, op: Op, rank: int) -> State:
        for slot, tag in op.reads:
            if state.slots[slot] != tag:
                if not self.fault:
                    raise Violation("ordered", f"rank {rank}: {op.what} reads {state.slots[slot]} instead of {tag}")
                state = state._replace(spoiled=state.spoiled | 1 << rank)
                if self._reported(state, rank, op) and state.slots[slot] != OVERWRITTEN - rank:
                    text = f"rank {rank} has returned from drain, but {op.what} reads data that no rank sent to it"
                    raise Violation("true success", text)
        for slot, tag in op.writes:
            state = state._replace(slots=replaced(state.slots, slot, tag))
        return state

    def _reported(self, state: State, rank: int, op: Op) -> bool:
        """Return whether a drain that comes after this kernel has already reported success on this rank."""
        index = state.positions[rank * 3]
        return any(op.needs[0][1] < success < index for success in self._successes[rank]) if op.needs else False

    def queued(self, state: State, thread: int) -> list[Op]:
        """Return the operations that the host has enqueued on a stream, `thread`, and that have not run."""
        host = state.positions[thread // 3 * 3]
        return [op for op in self.threads[thread][state.positions[thread] :] if op.needs[0][1] < host]

    def _unmap(self, state: State, rank: int) -> None:
        copies = [where for where, _ in state.landing if where[0] // 3 == rank]
        later = [
            op for stream in (CALLER, LANE) for op in self.queued(state, rank * 3 + stream) if op.kind == Kind.COPY
        ]
        if copies or later:
            raise Violation("mapped", f"rank {rank} unmaps while {len(copies) + len(later)} of its copies are queued")

    def _exact(self) -> bool:
        return any(op.exact for ops in self.threads for op in ops)

    def _monotone(self) -> bool:
        """Return whether each word is written by one thread and only increases, and no wait is for an exact value."""
        writer: dict[int, int] = {}
        value = dict(enumerate(self.words))
        if self._exact():
            return False
        for thread, ops in enumerate(self.threads):
            for op in ops:
                if op.kind == Kind.WRITE:
                    if writer.setdefault(op.word, thread) != thread or op.value <= value[op.word]:
                        return False
                    value[op.word] = op.value
        return True

    # --- ranks that fail ---------------------------------------------------------------------------------------------

    def moves(self, state: State) -> Iterator[tuple[str, State]]:
        """Yield the description and the next state of each move, except faults.

        If all orders of the moves end in the same state, yield only one of them.
        """
        if self._confluent and state.culprit != NOBODY and self._no_rank_reports_more(state):
            yield from islice(self._moves(state), 1)
        else:
            yield from self._moves(state)

    def _moves(self, state: State) -> Iterator[tuple[str, State]]:
        for thread in range(len(self.threads)):
            if self.enabled(state, thread):
                yield (
                    f"{thread // 3}.{thread % 3} {self.threads[thread][state.positions[thread]].what}",
                    self.run(state, thread),
                )
        for each in state.landing:
            yield f"copy {each[0]} lands", self.land(state, each)
        if state.culprit != NOBODY:
            yield from self._supervisors(state)

    def faults(self, state: State) -> Iterator[tuple[str, State]]:
        """Yield the fault of rank 0, or the recovery of a stopped rank 0."""
        if self.fault and state.culprit == NOBODY and state.life[0] == Life.RUNS:
            if self.fault == "raise":
                yield "rank 0 raises", self._fail(state._replace(culprit=0), 0, 0)
            else:
                life = Life.DEAD if self.fault == "die" else Life.STOPPED
                yield f"rank 0: {self.fault}", state._replace(culprit=0, life=replaced(state.life, 0, life))
        elif state.life[0] == Life.STOPPED:
            yield "rank 0 goes on", state._replace(life=replaced(state.life, 0, Life.RUNS))

    def stuck(self, state: State) -> str:
        """Describe the ranks that hang in `state`, from which no move is possible. Return "" if all have ended."""
        left = []
        for rank, life in enumerate(state.life):
            if life >= Life.DEAD or life == Life.ENDED:
                continue
            if life == Life.RAISED and state.phase[rank] > len(self._steps):
                continue
            heads = [
                self.threads[thread][state.positions[thread]].what
                for thread in range(rank * 3, rank * 3 + 3)
                if state.positions[thread] < len(self.threads[thread])
            ]
            left.append(f"rank {rank} hangs in {', '.join(heads)}")
        return "; ".join(left)

    def _supervisors(self, state: State) -> Iterator[tuple[str, State]]:
        for rank in range(self.world):
            life, phase = state.life[rank], state.phase[rank]
            if life >= Life.DEAD or (life == Life.ENDED and not phase):
                continue
            if not phase:
                if state.poison[rank] != NOBODY:
                    yield f"rank {rank} sees poison", self._fail(state, rank, state.poison[rank])
                elif state.culprit != rank and state.life[state.culprit] >= Life.DEAD:
                    yield f"rank {rank} notices", self._fail(state, rank, state.culprit)
                continue
            if life == Life.RUNS:
                self._check_named(state, rank)
                if self.raises_early or phase > self._all_poisoned:
                    yield f"rank {rank} raises", self._raise(state, rank)
            yield from self._abort_step(state, rank, phase)

    def _abort_step(self, state: State, rank: int, phase: int) -> Iterator[tuple[str, State]]:
        """Yield the next abort step of the rank, and a move for each word that painting may overwrite again."""
        after = state._replace(phase=replaced(state.phase, rank, phase + 1))
        if phase <= len(self._steps):
            step, page = self._steps[phase - 1]
            if step is EndStep.POISON:
                name = state.origin[rank] if self.names_origin else rank
                if state.poison[page] == NOBODY:
                    after = after._replace(poison=replaced(after.poison, page, name))
                yield f"rank {rank} poisons page {page}", after
            elif step is EndStep.PAINT:
                if self.paint_once:
                    after = after._replace(
                        words=tuple(
                            PAINTED if owner == rank else value
                            for owner, value in zip(self.page, state.words, strict=True)
                        )
                    )
                yield f"rank {rank} paints", after
            elif step is EndStep.UNMAP and (not self._drains or self.drained(state, rank)):
                self._unmap(state, rank)
                yield f"rank {rank} unmaps", after
        if phase > self._step(EndStep.PAINT) and not self.paint_once:
            for thread in (rank * 3 + CALLER, rank * 3 + LANE):
                if self._blocked(state, thread):
                    word = self.threads[thread][state.positions[thread]].word
                    yield f"rank {rank} paints {word}", state._replace(words=replaced(state.words, word, PAINTED))

    def _step(self, step: EndStep) -> int:
        """Return the abort phase (see `State.phase`) whose next step is `step`."""
        return next((n for n, (each, _) in enumerate(self._steps, 1) if each is step), len(self._steps) + 1)

    def _blocked(self, state: State, thread: int) -> bool:
        """Return whether a thread is blocked in a wait whose word is not painted."""
        ops, index = self.threads[thread], state.positions[thread]
        return (
            index < len(ops)
            and ops[index].kind == Kind.WAIT
            and all(state.positions[where] > needed for where, needed in ops[index].needs)
            and state.words[ops[index].word] != PAINTED
            and not self.satisfied(state, ops[index])
        )

    def _raise(self, state: State, rank: int) -> State:
        """Let the rank raise its error to the caller, which then overwrites all slots of the rank."""
        local = range(rank * self.slots // self.world, (rank + 1) * self.slots // self.world)
        slots = tuple(OVERWRITTEN - rank if slot in local else tag for slot, tag in enumerate(state.slots))
        return state._replace(slots=slots, life=replaced(state.life, rank, Life.RAISED))

    def _check_named(self, state: State, rank: int) -> None:
        if state.origin[rank] != state.culprit:
            text = f"rank {rank} names rank {state.origin[rank]}, but rank {state.culprit} is at fault"
            raise Violation("no innocent named", text)

    def _fail(self, state: State, rank: int, origin: int) -> State:
        return state._replace(phase=replaced(state.phase, rank, 1), origin=replaced(state.origin, rank, origin))

    def drained(self, state: State, rank: int) -> bool:
        """Return whether all work that this rank has enqueued is complete."""
        if any(where[0] // 3 == rank for where, _ in state.landing):
            return False
        return not any(self.queued(state, rank * 3 + stream) for stream in (CALLER, LANE))

    def settle(self, state: State) -> State:
        """Run all operations whose order does not matter, so that fewer orders remain to be explored."""
        moved = self.reduced
        while moved:
            moved = False
            for thread in range(len(self.threads)):
                while state.positions[thread] < len(self.threads[thread]):
                    kind = self.threads[thread][state.positions[thread]].kind
                    commutes = kind == Kind.PASS or (self._commuting and kind in COMMUTING)
                    if not commutes or not self.enabled(state, thread):
                        break
                    state, moved = self.run(state, thread), True
            if state.culprit != NOBODY and not moved:
                after = self._settle_failure(state)
                state, moved = after, after != state
        return state

    def _settle_failure(self, state: State) -> State:
        """Run abort steps that no other rank can observe. Clear the slots once no rank can report success any more."""
        for rank in range(self.world):
            phase = state.phase[rank]
            if not 0 < phase <= len(self._steps) or state.life[rank] >= Life.DEAD:
                continue
            step, page = self._steps[phase - 1]
            if (
                (step is EndStep.POISON and (page == rank or state.poison[page] != NOBODY))
                or (step is EndStep.PAINT and not self.paint_once)
                or (step is EndStep.UNMAP and self._drains and self.drained(state, rank))
            ):
                state = state._replace(phase=replaced(state.phase, rank, phase + 1))
        if self._no_rank_reports_more(state):
            landing = tuple((where, tag if tag == LAUNCHED else 0) for where, tag in state.landing)
            state = state._replace(slots=(0,) * self.slots, spoiled=0, landing=landing)
            for rank, life in enumerate(state.life):
                if life == Life.RUNS and self.guarded and state.phase[rank] > self._all_poisoned:
                    self._check_named(state, rank)
                    state = state._replace(life=replaced(state.life, rank, Life.RAISED))
        return state

    def _no_rank_reports_more(self, state: State) -> bool:
        return all(self._reports_no_more(state, rank) for rank in range(self.world))

    def _reports_no_more(self, state: State, rank: int) -> bool:
        """Return whether this rank will not report success for any further kernel."""
        if state.life[rank] == Life.DEAD:
            return True
        kernels = (op for op in self.queued(state, rank * 3 + CALLER) if op.kind == Kind.KERNEL)
        if any(self._reported(state, rank, op) for op in kernels):
            return False
        if state.life[rank] in (Life.ENDED, Life.RAISED) or state.phase[rank]:
            return True
        ops = self.threads[rank * 3][state.positions[rank * 3] :]
        ahead = (op.kind for op in ops if op.kind in (Kind.CHECK, Kind.SUCCESS))
        return state.poison[rank] != NOBODY and next(ahead, Kind.CHECK) == Kind.CHECK
