"""Runs a plan, forward and backward alike: wait, pack, exchange, compute, and nothing else.

A step's messages travel while its work runs; the next step begins when they have arrived. All memory is bound before
the pass, so a pass allocates nothing here.
Does not know: masks, layouts, routes, which rank it is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from ringattn.engine.base import KV, Engine, Softmax
from ringattn.geometry import Run
from ringattn.plan import HOME, Add, Fold, Plan, PlanStep, record_elements
from ringattn.pool import Pool
from ringattn.records import CODES, TORCH_DTYPE, Home, Place, Records, add, from_row, pack
from ringattn.schedule.content import Part, size
from ringattn.transport.base import Hop, Message, Ticket, Transport


@dataclass
class Counters:
    """What has been sent since the last reset: payload of copies, no control traffic."""

    passes: int = 0
    messages: int = 0
    bytes_sent: int = 0


FoldInto = Callable[[KV, KV | None, Any], None]
"""(keys and values, their gradients in a backward pass, prepared tiles): one engine call."""


class _Bound(NamedTuple):
    """What a pass needs besides its tensors."""

    pool_bytes: int
    buffers: list[Records]
    hops: list[Hop | None]


class Executor:
    """A plan with its tiles prepared for an engine. Reusable; one pass at a time."""

    def __init__(self, plan: Plan, engine: Engine, softmax: Softmax) -> None:
        """Prepares every fold's tiles once."""
        self.plan = plan
        folds = [item for step in plan.steps for item in step.work if isinstance(item, Fold)]
        rows = plan.problem.q_layout.counts[plan.rank]
        self.works = engine.prepare([tuple(fold.tiles) for fold in folds], softmax, rows, plan.problem.q_heads)
        self._work_of = {id(fold): work for fold, work in zip(folds, self.works, strict=True)}
        self._bound: _Bound | None = None
        self._begun = False
        self._ticket: Ticket | None = None

    def begin(self, transport: Transport, pool: Pool, make: Callable[[KV | None], Home]) -> Home:
        """Begin a pass early: its first messages leave with the own K and V that `make` gives, and `run` goes on.

        `make` is told where they belong in the first message, (rows, batch, kv_heads, dim) each, if all of them leave
        in it as they are; there it must write them. Else it gets None, and they are copied.
        """
        pool.begin_pass(self.plan.arena_bytes)
        try:
            message = self._own_message()
            buffers = self._buffers(transport, pool)
            home = make(None if message is None else next(iter(buffers[message].parts.values())))
            self._depart(0, home, filled=message)
        except BaseException:
            pool.end_pass()
            raise
        self._begun = True
        return home

    def run(
        self,
        transport: Transport,
        pool: Pool,
        counters: Counters,
        fold: FoldInto,
        home: Home,
        grads: Home | None = None,
    ) -> None:
        """One pass: `home` holds the own K and V, `grads` the accumulators of their gradients in a backward pass."""
        begun, self._begun = self._begun, False
        if not begun:
            pool.begin_pass(self.plan.arena_bytes)
        try:
            buffers = self._buffers(transport, pool)

            def place(buffer: int, at_home: Home | None) -> Place:
                if buffer != HOME:
                    return buffers[buffer]
                assert at_home is not None
                return at_home

            problem = self.plan.problem
            for number, step in enumerate(self.plan.steps):
                if number or not begun:
                    self._depart(number, home)
                for buffer in step.zeros:
                    buffers[buffer].flat.zero_()
                for restore in step.restores:
                    pack(buffers[restore.source], buffers[restore.into])
                for item in step.work:
                    if isinstance(item, Add):
                        add(buffers[item.part], place(item.into, grads))
                    else:
                        heads = Run(0, problem.kv_heads) if item.part is None else problem.parts[item.part].kv_heads
                        kv = from_row(place(item.kv, home).part(heads), item.kv_row, item.kv_step)
                        dkv = (
                            from_row(place(item.dkv, grads).part(heads), item.dkv_row, item.dkv_step) if grads else None
                        )
                        fold(kv, dkv, self._work_of[id(item)])
            self._arrive()
        finally:
            pool.end_pass()
        counters.passes += 1
        counters.messages += self.plan.messages
        counters.bytes_sent += self.plan.bytes_sent

    def unbind(self) -> None:
        """Let go of the pool's memory; the next pass binds anew."""
        self._bound = None

    def _depart(self, number: int, home: Home, filled: int | None = None) -> None:
        """Wait for what travels, pack the step's messages but the `filled` one, and let them go."""
        self._arrive()
        assert self._bound is not None
        buffers = self._bound.buffers
        for gather in self.plan.steps[number].packs:
            if gather.into != filled:
                pack(home if gather.source == HOME else buffers[gather.source], buffers[gather.into])
        hop = self._bound.hops[number]
        self._ticket = hop.start() if hop is not None else None

    def _arrive(self) -> None:
        """Wait for what travels."""
        ticket, self._ticket = self._ticket, None
        if ticket is not None:
            ticket.wait()

    def _own_message(self) -> int | None:
        """The buffer that the first step packs with all of the own K and V in their own dtype, if there is one."""
        problem = self.plan.problem
        rows = Run(0, problem.kv_layout.counts[self.plan.rank])
        whole = (Part(Run(0, problem.kv_heads), (rows,)),)
        for gather in self.plan.steps[0].packs if self.plan.steps else ():
            into = self.plan.buffers[gather.into]
            if gather.source == HOME and into.content == whole and into.dtype == problem.dtype:
                return gather.into
        return None

    def _buffers(self, transport: Transport, pool: Pool) -> list[Records]:
        """The plan's buffers, bound to the pool's memory."""
        if self._bound is None or self._bound.pool_bytes != pool.nbytes:
            self._bound = self._bind(transport, pool)
        return self._bound.buffers

    def _bind(self, transport: Transport, pool: Pool) -> _Bound:
        """The plan's buffers as views of the pool, and its hops over them; made again only when the pool has grown."""
        problem, buffers = self.plan.problem, []
        for buffer in self.plan.buffers:
            count = size(buffer.content) * record_elements(problem, buffer.dtype)
            code = CODES.get(buffer.dtype)
            flat = pool.slot(buffer.offset_bytes, (count,), torch.uint8 if code else TORCH_DTYPE[buffer.dtype])
            buffers.append(Records(flat, buffer.content, problem.batch, problem.head_dim, problem.value_dim, code))
        hops = [
            transport.bind(*self._messages(step, buffers)) if step.sends or step.recvs else None
            for step in self.plan.steps
        ]
        return _Bound(pool.nbytes, buffers, hops)

    def _messages(self, step: PlanStep, buffers: Sequence[Records]) -> tuple[list[Message], list[Message]]:
        where = f"{'backward' if self.plan.backward else 'forward'} step {step.number}: "
        sends = [
            Message(send.peer, buffers[send.buffer].flat[send.first : send.first + send.elements], where + send.label)
            for send in step.sends
        ]
        return sends, [Message(recv.peer, buffers[recv.buffer].flat, where + recv.label) for recv in step.recvs]
