"""The machine that programs run on, with ranks that fail and supervisors that end them.

A failing rank's supervisor works through the steps of `ABORT`; so does that of each rank that notices.
Not modeled: torn words, the host's caches, how a rank finds out who is silent, deadlines (a rank may notice any time).
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

from ringattn.transport.peer.program import PAINTED
from tests.transport.peer_model.endings import EndStep
from tests.transport.peer_model.state import (
    CALLER,
    CALM,
    LANE,
    LAUNCHED,
    NOBODY,
    OVERWRITTEN,
    Kind,
    Life,
    State,
    Violation,
    put,
)
from tests.transport.peer_model.threads import Threads


class Machine(Threads):
    """Threads and supervisors."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._told = max(n for n, (step, _) in enumerate(self._steps, 1) if step is EndStep.POISON)
        order = list(self.abort)
        self._drains = EndStep.PAINT in order and order.index(EndStep.PAINT) < order.index(EndStep.UNMAP)
        # Whatever is written over a painted word is painted again: all orders come to the same end.
        self._confluent = self.reduced and self._drains and not self.paint_once and self.guarded and not self._exact()
        self._calm = not self.fault and self._monotone()

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
