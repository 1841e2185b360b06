"""Threads of operations, words, slots and copies that land late.

A thread is a rank's host, its caller's stream or its lane; an operation runs when what it depends on has run. A copy is
two events: it begins, with its thread, and is performed at any time after that; between the two its target is torn.
A slot holds the tag of what was written last, so a read that any order can spoil is seen in that order.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from tests.transport.peer_model.endings import ABORT, EndStep
from tests.transport.peer_model.state import (
    CALLER,
    HOST,
    LANE,
    LAUNCHED,
    NOBODY,
    OVERWRITTEN,
    TORN,
    At,
    Kind,
    Life,
    Op,
    State,
    Violation,
    put,
)


@dataclass
class Threads:
    """What does not change in a run, and what its operations do."""

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
