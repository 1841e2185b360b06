"""The machine that programs run on: threads of operations, words, slots, copies that land late, and ranks that fail.

A thread is a rank's host, its caller's stream or its lane; an operation runs when what it depends on has run. A copy is
two events: it begins, with its thread, and is performed at any time after that; between the two its target is torn.
A slot holds the tag of what was written last, so a read that any order can spoil is seen in that order.
A failing rank's supervisor works through the steps of `ABORT`; so does that of each rank that notices.
Not modeled: torn words, the host's caches, how a rank finds out who is silent, deadlines (a rank may notice any time).
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
"""In the place of a tag: being written; not begun yet; this and less: by the caller of a rank that has failed."""
NOBODY = -1
HOST, CALLER, LANE = range(3)
"""Threads of a rank: `rank * 3` and these."""
At = tuple[int, int]
"""A thread and a position on it."""


class Kind(IntEnum):
    """What an operation does."""

    PASS = 0
    """Nothing but be in order: enqueue, log, look up, record, wait for an event."""
    KERNEL = 1
    WRITE = 2
    WAIT = 3
    COPY = 4
    CHECK = 5
    SUCCESS = 6
    UNMAP = 7
    CLOSED = 8
    START = 9
    """Enqueue an exchange: what a rank that fails before it never does."""


CALM = frozenset({Kind.START, Kind.WRITE, Kind.WAIT})
"""What commutes with everything where nobody fails and words only rise."""


class Op(NamedTuple):
    """One operation of a thread. `needs` has run before it does."""

    kind: Kind
    what: str
    needs: tuple[At, ...] = ()
    word: int = -1
    value: int = 0
    exact: bool = False
    fence: bool = True
    reads: tuple[tuple[int, int], ...] = ()
    """Slots and the tags that they must hold."""
    writes: tuple[tuple[int, int], ...] = ()
    source: int = -1
    target: int = -1
    detached: bool = False
    """The copy is not ordered with what follows on its thread."""


class Life(IntEnum):
    """What has become of a rank's host."""

    RUNS = 0
    ENDED = 1
    RAISED = 2
    DEAD = 3
    STOPPED = 4


class State(NamedTuple):
    """Everything that may differ between two moments of a run."""

    at: tuple[int, ...]
    words: tuple[int, ...]
    slots: tuple[int, ...]
    landing: tuple[tuple[At, int], ...]
    """Copies that are not performed, with the tag that they carry."""
    life: tuple[int, ...]
    phase: tuple[int, ...]
    """How far each rank's abort has come; 0: it has not failed."""
    origin: tuple[int, ...]
    """Whom each failed rank names."""
    poison: tuple[int, ...]
    """Whom the poison words of each page name."""
    spoiled: int
    """A bit for each rank that has read something else than was sent."""
    culprit: int


class Violation(Exception):
    """A property that does not hold."""

    def __init__(self, rule: str, words: str) -> None:
        super().__init__(f"{rule}: {words}")
        self.rule = rule


def put(values: tuple[int, ...], at: int, value: int) -> tuple[int, ...]:
    """The values with one of them replaced."""
    return (*values[:at], value, *values[at + 1 :])


# --- what a host does at an end -------------------------------------------------------------------------------------


class EndStep(Enum):
    """A step of the host."""

    AWAIT_DONE = "wait until the DONE of every exchange has passed"
    AWAIT_COMPUTED = "record an event on the caller's stream now and wait until it has passed"
    CHECK = "raise unless every poison word of the own page is 0"
    POISON = "store who is at fault into the own poison word of every page"
    PAINT = "store PAINTED into every word of the own page, again and again until nothing of this rank waits"
    UNMAP = "unmap the other ranks' memory"


DRAIN = (EndStep.AWAIT_DONE, EndStep.AWAIT_COMPUTED, EndStep.CHECK)
"""A failed rank's queued copies may run into buffers that nobody permitted. It poisons before it lets them, so who
checks behind its last reader knows that the reader saw no such bytes. Behind DONE would be too early: when the next
exchange is started, a copy that nobody permitted may run into what a queued kernel still reads."""
ABORT = (EndStep.POISON, EndStep.PAINT, EndStep.UNMAP)
"""Painting lets the queues run on, unpermitted copies included: first everybody must be able to know, and also before
the caller gets the error and may overwrite what is being sent. Other ranks may overwrite a painted word with a lower
number, so it is painted until nothing of this rank waits. Only then can no copy touch what is unmapped. A start that
has begun to enqueue is let finish before that; none begins after it."""
CLOSE = (*DRAIN, EndStep.UNMAP)


# --- the machine ----------------------------------------------------------------------------------------------------


@dataclass
class Machine:
    """Threads and supervisors: what does not change in a run, and what its operations do."""

    world: int
    threads: list[list[Op]]
    page: list[int]
    """By word: the rank in whose page it lies."""
    slots: int
    words: list[int] = field(default_factory=list)
    """What they hold at first."""
    fault: str = ""
    """raise, die, stop: what rank 0 may do at any time."""
    abort: tuple[EndStep, ...] = ABORT
    paint_once: bool = False
    names_origin: bool = True
    guarded: bool = True
    """A rank that has failed enqueues nothing more."""
    raises_early: bool = False
    """The caller has the error before every page is poisoned."""
    reduced: bool = True
    """Leave out orders that cannot matter."""

    def __post_init__(self) -> None:
        self._successes = [[n for n, op in enumerate(self.threads[rank * 3]) if op.kind == Kind.SUCCESS]
                           for rank in range(self.world)]  # fmt: skip
        self._steps: list[tuple[EndStep, int]] = []
        """Of an abort, with the page that each touches."""
        for step in self.abort:
            self._steps += [(step, page) for page in (range(self.world) if step is EndStep.POISON else [0])]
        unmaps = [n for n, (step, _) in enumerate(self._steps, 1) if step is EndStep.UNMAP]
        self._unmapped = unmaps[0]
        self._told = max(n for n, (step, _) in enumerate(self._steps, 1) if step is EndStep.POISON)
        order = list(self.abort)
        self._drains = EndStep.PAINT in order and order.index(EndStep.PAINT) < order.index(EndStep.UNMAP)
        # Whatever is written over a painted word is painted again: all orders come to the same end.
        self._confluent = self.reduced and self._drains and not self.paint_once and self.guarded and not self._exact()
        self._calm = not self.fault and self._monotone()

    def first(self) -> State:
        """Nothing has run."""
        n = self.world
        return State(
            tuple(0 for _ in self.threads), tuple(self.words), (0,) * self.slots, (), (Life.RUNS,) * n, (0,) * n,
            (NOBODY,) * n, (NOBODY,) * n, 0, NOBODY,
        )  # fmt: skip

    def enabled(self, state: State, thread: int) -> bool:
        """Whether the next operation of a thread can run."""
        ops, at = self.threads[thread], state.at[thread]
        if at >= len(ops):
            return False
        op, rank = ops[at], thread // 3
        life = state.life[rank]
        if life == Life.DEAD:
            return False
        if thread % 3 == HOST and (life != Life.RUNS or (state.phase[rank] and self.guarded)):
            return False
        for where, position in op.needs:
            if state.at[where] <= position:
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
        """Whether a wait's word lets it pass."""
        value = state.words[op.word]
        return value == op.value if op.exact else value >= op.value

    def run(self, state: State, thread: int) -> State:
        """Run the next operation of a thread."""
        at = state.at[thread]
        op, rank = self.threads[thread][at], thread // 3
        state = state._replace(at=put(state.at, thread, at + 1))
        if op.kind == Kind.WRITE:
            return state._replace(words=put(state.words, op.word, op.value))
        if op.kind == Kind.KERNEL:
            return self._kernel(state, op, rank)
        if op.kind == Kind.COPY:
            if state.phase[rank] > self._unmapped:
                raise Violation("mapped", f"rank {rank}: {op.what} into memory that is no longer mapped")
            if op.detached:
                return state._replace(landing=(*state.landing, ((thread, at), LAUNCHED)))
            return self._begin(state, (thread, at), op)
        if op.kind == Kind.SUCCESS and state.spoiled >> rank & 1:
            raise Violation("true success", f"rank {rank} returns from drain, and has read what nobody sent it")
        if op.kind == Kind.UNMAP:
            self._unmap(state, rank)
        if op.kind == Kind.CLOSED:
            return state._replace(life=put(state.life, rank, Life.ENDED))
        return state

    def land(self, state: State, each: tuple[At, int]) -> State:
        """A copy is performed, or begins where it was detached."""
        (thread, at), tag = each
        op = self.threads[thread][at]
        state = state._replace(landing=tuple(other for other in state.landing if other != each))
        if tag == LAUNCHED:
            return self._begin(state, (thread, at), op)
        return state._replace(slots=put(state.slots, op.target, tag))

    def _begin(self, state: State, where: At, op: Op) -> State:
        carried = state.slots[op.source]
        slots = put(state.slots, op.target, TORN)
        return state._replace(slots=slots, landing=tuple(sorted((*state.landing, (where, carried)))))

    def _kernel(self, state: State, op: Op, rank: int) -> State:
        for slot, tag in op.reads:
            if state.slots[slot] != tag:
                if not self.fault:
                    raise Violation("ordered", f"rank {rank}: {op.what} finds {state.slots[slot]} instead of {tag}")
                state = state._replace(spoiled=state.spoiled | 1 << rank)
                if self._reported(state, rank, op) and state.slots[slot] != OVERWRITTEN - rank:
                    words = f"rank {rank} has returned from drain, and {op.what} finds what nobody sent it"
                    raise Violation("true success", words)
        for slot, tag in op.writes:
            state = state._replace(slots=put(state.slots, slot, tag))
        return state

    def _reported(self, state: State, rank: int, op: Op) -> bool:
        """Whether the rank has said that everything is well up to this kernel and further."""
        at = state.at[rank * 3]
        return any(op.needs[0][1] < success < at for success in self._successes[rank]) if op.needs else False

    def queued(self, state: State, thread: int) -> list[Op]:
        """What the host has enqueued on a stream and has not run."""
        host = state.at[thread // 3 * 3]
        return [op for op in self.threads[thread][state.at[thread] :] if op.needs[0][1] < host]

    def _unmap(self, state: State, rank: int) -> None:
        copies = [where for where, _ in state.landing if where[0] // 3 == rank]
        later = [
            op for stream in (CALLER, LANE) for op in self.queued(state, rank * 3 + stream) if op.kind == Kind.COPY
        ]
        if copies or later:
            raise Violation("mapped", f"rank {rank} unmaps, and {len(copies) + len(later)} of its copies are queued")

    def _exact(self) -> bool:
        return any(op.exact for ops in self.threads for op in ops)

    def _monotone(self) -> bool:
        """Whether words only rise, each by one thread, and waits only look for that."""
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
        """Every next moment but the fault, with what happened; one of them where all orders come to the same end."""
        if self._confluent and state.culprit != NOBODY and all(self._knows(state, rank) for rank in range(self.world)):
            yield from islice(self._moves(state), 1)
        else:
            yield from self._moves(state)

    def _moves(self, state: State) -> Iterator[tuple[str, State]]:
        for thread in range(len(self.threads)):
            if self.enabled(state, thread):
                yield (
                    f"{thread // 3}.{thread % 3} {self.threads[thread][state.at[thread]].what}",
                    self.run(state, thread),
                )
        for each in state.landing:
            yield f"copy {each[0]} lands", self.land(state, each)
        if state.culprit != NOBODY:
            yield from self._supervisors(state)

    def faults(self, state: State) -> Iterator[tuple[str, State]]:
        """What rank 0 may suffer, or a stopped rank 0 recover from."""
        if self.fault and state.culprit == NOBODY and state.life[0] == Life.RUNS:
            if self.fault == "raise":
                yield "rank 0 raises", self._fail(state._replace(culprit=0), 0, 0)
            else:
                life = Life.DEAD if self.fault == "die" else Life.STOPPED
                yield f"rank 0: {self.fault}", state._replace(culprit=0, life=put(state.life, 0, life))
        elif state.life[0] == Life.STOPPED:
            yield "rank 0 goes on", state._replace(life=put(state.life, 0, Life.RUNS))

    def stuck(self, state: State) -> str:
        """Where nothing more can happen: who has not come to an end, in words; empty if all have."""
        left = []
        for rank, life in enumerate(state.life):
            if life >= Life.DEAD or life == Life.ENDED:
                continue
            if life == Life.RAISED and state.phase[rank] > len(self._steps):
                continue
            heads = [
                self.threads[thread][state.at[thread]].what
                for thread in range(rank * 3, rank * 3 + 3)
                if state.at[thread] < len(self.threads[thread])
            ]
            left.append(f"rank {rank} stands at {', '.join(heads)}")
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
                self._innocent(state, rank)
                if self.raises_early or phase > self._told:
                    yield f"rank {rank} raises", self._raise(state, rank)
            yield from self._abort_step(state, rank, phase)

    def _abort_step(self, state: State, rank: int, phase: int) -> Iterator[tuple[str, State]]:
        """The supervisor's next step, and the painting that goes on beside it."""
        onward = state._replace(phase=put(state.phase, rank, phase + 1))
        if phase <= len(self._steps):
            step, page = self._steps[phase - 1]
            if step is EndStep.POISON:
                name = state.origin[rank] if self.names_origin else rank
                if state.poison[page] == NOBODY:
                    onward = onward._replace(poison=put(onward.poison, page, name))
                yield f"rank {rank} poisons page {page}", onward
            elif step is EndStep.PAINT:
                if self.paint_once:
                    mine = [word for word, owner in enumerate(self.page) if owner == rank]
                    onward = onward._replace(
                        words=tuple(PAINTED if w in mine else v for w, v in enumerate(state.words))
                    )
                yield f"rank {rank} paints", onward
            elif step is EndStep.UNMAP and (not self._drains or self.drained(state, rank)):
                self._unmap(state, rank)
                yield f"rank {rank} unmaps", onward
        if phase > self._step(EndStep.PAINT) and not self.paint_once:
            for thread in (rank * 3 + CALLER, rank * 3 + LANE):
                if self._blocked(state, thread):
                    word = self.threads[thread][state.at[thread]].word
                    yield f"rank {rank} paints {word}", state._replace(words=put(state.words, word, PAINTED))

    def _step(self, step: EndStep) -> int:
        """The phase whose next step this is."""
        return next((n for n, (each, _) in enumerate(self._steps, 1) if each is step), len(self._steps) + 1)

    def _blocked(self, state: State, thread: int) -> bool:
        """Whether a thread stands at a wait whose word is not painted."""
        ops, at = self.threads[thread], state.at[thread]
        return (
            at < len(ops)
            and ops[at].kind == Kind.WAIT
            and all(state.at[where] > position for where, position in ops[at].needs)
            and state.words[ops[at].word] != PAINTED
            and not self.satisfied(state, ops[at])
        )

    def _raise(self, state: State, rank: int) -> State:
        """Its caller has the error, and may write to the slots."""
        own = range(rank * self.slots // self.world, (rank + 1) * self.slots // self.world)
        slots = tuple(OVERWRITTEN - rank if slot in own else tag for slot, tag in enumerate(state.slots))
        return state._replace(slots=slots, life=put(state.life, rank, Life.RAISED))

    def _innocent(self, state: State, rank: int) -> None:
        if state.origin[rank] != state.culprit:
            words = f"rank {rank} names rank {state.origin[rank]}, and rank {state.culprit} is at fault"
            raise Violation("no innocent named", words)

    def _fail(self, state: State, rank: int, origin: int) -> State:
        return state._replace(phase=put(state.phase, rank, 1), origin=put(state.origin, rank, origin))

    def drained(self, state: State, rank: int) -> bool:
        """Whether everything that this rank has enqueued is complete."""
        if any(where[0] // 3 == rank for where, _ in state.landing):
            return False
        return not any(self.queued(state, rank * 3 + stream) for stream in (CALLER, LANE))

    def settle(self, state: State) -> State:
        """Run what orders nothing else and cannot be undone, so that fewer orders remain to be explored."""
        moved = self.reduced
        while moved:
            moved = False
            for thread in range(len(self.threads)):
                while state.at[thread] < len(self.threads[thread]):
                    kind = self.threads[thread][state.at[thread]].kind
                    quiet = kind == Kind.PASS
                    if not (quiet or (self._calm and kind in CALM)) or not self.enabled(state, thread):
                        break
                    state, moved = self.run(state, thread), True
            if state.culprit != NOBODY and not moved:
                after = self._settle_failure(state)
                state, moved = after, after != state
        return state

    def _settle_failure(self, state: State) -> State:
        """Steps of an abort that no other rank can tell from none; and bytes that nobody can report any more."""
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
                state = state._replace(phase=put(state.phase, rank, phase + 1))
        if all(self._knows(state, rank) for rank in range(self.world)):
            landing = tuple((where, tag if tag == LAUNCHED else 0) for where, tag in state.landing)
            state = state._replace(slots=(0,) * self.slots, spoiled=0, landing=landing)
            for rank, life in enumerate(state.life):
                if life == Life.RUNS and self.guarded and state.phase[rank] > self._told:
                    self._innocent(state, rank)
                    state = state._replace(life=put(state.life, rank, Life.RAISED))
        return state

    def _knows(self, state: State, rank: int) -> bool:
        """Whether this rank will never report a result that it has not reported yet."""
        if state.life[rank] == Life.DEAD:
            return True
        kernels = (op for op in self.queued(state, rank * 3 + CALLER) if op.kind == Kind.KERNEL)
        if any(self._reported(state, rank, op) for op in kernels):
            return False
        if state.life[rank] in (Life.ENDED, Life.RAISED) or state.phase[rank]:
            return True
        ahead = (
            op.kind for op in self.threads[rank * 3][state.at[rank * 3] :] if op.kind in (Kind.CHECK, Kind.SUCCESS)
        )
        return state.poison[rank] != NOBODY and next(ahead, Kind.CHECK) == Kind.CHECK
