"""Runs a plan, forward and backward alike: wait, pack, exchange, compute, and nothing else.

A step's messages travel while its work runs; the next step begins when they have arrived. All memory is bound before
the pass, so a pass allocates nothing here.
Does not know: masks, layouts, routes, which rank it is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from ringattn.engine.base import KV, Engine, Softmax
from ringattn.plan import HOME, Add, Fold, Plan, PlanStep, record_elements
from ringattn.pool import Pool
from ringattn.records import TORCH_DTYPE, Home, Place, Records, add, from_row, pack
from ringattn.schedule.content import size
from ringattn.transport.base import Hop, Message, Transport


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
        self.prepared = {
            id(item): engine.prepare(tuple(item.tiles), softmax)
            for step in plan.steps
            for item in step.work
            if isinstance(item, Fold)
        }
        self._bound: _Bound | None = None

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
        pool.begin_pass(self.plan.arena_bytes)
        try:
            if self._bound is None or self._bound.pool_bytes != pool.nbytes:
                self._bound = self._bind(transport, pool)
            buffers = self._bound.buffers

            def place(buffer: int, at_home: Home | None) -> Place:
                if buffer != HOME:
                    return buffers[buffer]
                assert at_home is not None
                return at_home

            ticket = None
            for step, hop in zip(self.plan.steps, self._bound.hops, strict=True):
                if ticket is not None:
                    ticket.wait()
                for gather in step.packs:
                    pack(place(gather.source, home), buffers[gather.into])
                ticket = hop.start() if hop is not None else None
                for buffer in step.zeros:
                    buffers[buffer].flat.zero_()
                for item in step.work:
                    if isinstance(item, Add):
                        add(buffers[item.part], place(item.into, grads))
                    else:
                        heads = self.plan.problem.parts[item.part].kv_heads
                        kv = from_row(place(item.kv, home).part(heads), item.kv_row)
                        dkv = from_row(place(item.dkv, grads).part(heads), item.dkv_row) if grads else None
                        fold(kv, dkv, self.prepared[id(item)])
            if ticket is not None:
                ticket.wait()
        finally:
            pool.end_pass()
        counters.passes += 1
        counters.messages += self.plan.messages
        counters.bytes_sent += self.plan.bytes_sent

    def unbind(self) -> None:
        """Let go of the pool's memory; the next pass binds anew."""
        self._bound = None

    def _bind(self, transport: Transport, pool: Pool) -> _Bound:
        """The plan's buffers as views of the pool, and its hops over them; made again only when the pool has grown."""
        problem, buffers = self.plan.problem, []
        for buffer in self.plan.buffers:
            count = size(buffer.content) * record_elements(problem)
            flat = pool.slot(buffer.offset_bytes, (count,), TORCH_DTYPE[buffer.dtype])
            buffers.append(Records(flat, buffer.content, problem.batch, problem.head_dim, problem.value_dim))
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
