"""Verify that a plan never uses a buffer outside its lifetime. No code is shared with the placement that is checked."""

from __future__ import annotations

from collections import defaultdict

from ringattn.core.problem import EIGHT_BIT
from ringattn.errors import PlanError
from ringattn.planner.plan import (
    LOCAL,
    Add,
    AttendOp,
    AttendReceivedOp,
    Plan,
    Recv,
    buffer_bytes,
    record_bytes,
    record_elements,
)
from ringattn.schedule.content import size


def verify_placement(plan: Plan) -> None:
    """Raise `PlanError` if the plan uses a buffer wrongly.

    A buffer must not be read before it is filled, filled twice, outside the arena, or share bytes with another buffer
    while both live. Messages must fit into their buffers. The lifetimes of buffers are derived from the steps alone.
    For a fused buffer, its parts are checked.
    """
    # The steps in which each buffer is first filled (`written`), completely filled (`whole`) and last used. A buffer
    # that messages fill can be read after the step of the last message.
    written: dict[int, int] = {}
    whole: dict[int, int] = {}
    used: dict[int, int] = defaultdict(int)
    arrived: dict[int, int] = defaultdict(int)  # the number of elements that each buffer has received
    ended = set[int]()  # buffers of received queries whose result is complete

    parts: dict[int, list[int]] = defaultdict(list)
    for index, inner in enumerate(plan.buffers):
        if inner.inside is not None:
            parts[inner.inside.buffer].append(index)

    def write(buffer: int, now: int) -> None:
        for part in parts[buffer]:
            write(part, now)
        if parts[buffer]:
            return
        if buffer in written:
            raise PlanError(f"rank {plan.rank}, step {now}: {plan.buffers[buffer].label} is filled twice")
        written[buffer] = whole[buffer] = used[buffer] = now

    def elements(buffer: int) -> int:
        described = plan.buffers[buffer]
        return size(described.content) * record_elements(plan.problem, described.dtype, described.kind)

    def receive(recv: Recv, now: int) -> None:
        message = f"rank {plan.rank}, step {now}: the message {recv.label}"
        if not arrived[recv.buffer]:
            write(recv.buffer, now)
        if recv.first < arrived[recv.buffer]:
            raise PlanError(f"{message}: {plan.buffers[recv.buffer].label} is filled twice")
        if recv.first > arrived[recv.buffer]:
            raise PlanError(f"{message} leaves a gap in its buffer")
        arrived[recv.buffer] += recv.elements
        if arrived[recv.buffer] > elements(recv.buffer):
            raise PlanError(f"{message} ends outside its buffer")
        used[recv.buffer] = now
        whole[recv.buffer] = now if arrived[recv.buffer] == elements(recv.buffer) else len(plan.steps)

    def read(buffer: int, now: int, after: int = 0) -> None:
        for part in parts[buffer] if buffer != LOCAL else ():
            read(part, now, after if part in received else 0)
        if buffer != LOCAL and not parts[buffer]:
            # If `after` is 1, a message of this step fills the buffer, which can be read only in the next step. A
            # buffer that is never filled counts as filled in step now + 1, so reading it is an error.
            if whole.get(buffer, now + 1) > now - after:
                raise PlanError(f"rank {plan.rank}, step {now}: {plan.buffers[buffer].label} is read too early")
            used[buffer] = now

    for buffer in plan.kept if plan.backward else ():
        write(buffer, 0)
    for now, step in enumerate(plan.steps):
        received = {recv.buffer for recv in step.recvs}
        for pack in step.packs:
            read(pack.source, now)
            write(pack.into, now)
        # The order within a step: pack, send and receive, zero, restore, compute.
        for send in step.sends:
            read(send.buffer, now, after=send.buffer in received)
            if not 0 <= send.first <= send.first + send.elements <= elements(send.buffer):
                raise PlanError(f"rank {plan.rank}, step {now}: the message {send.label} ends outside its buffer")
        for recv in step.recvs:
            receive(recv, now)
        # Zeroing and overwriting work fill a dK/dV buffer together: each sets some of its rows (see
        # `check_overwrites`).
        firsts = {item.dkv for item in step.work if isinstance(item, (AttendOp, AttendReceivedOp)) and item.overwrite}
        for buffer in sorted({zero.buffer for zero in step.zeros} | firsts - {LOCAL}):
            write(buffer, now)
        for pack in step.restores:
            read(pack.source, now, after=pack.source in received)
            write(pack.into, now)
        for item in step.work:
            if isinstance(item, AttendReceivedOp):
                if item.q in ended:
                    raise PlanError(f"rank {plan.rank}, step {now}: {plan.buffers[item.q].label} have their result")
                if item.result != LOCAL:
                    ended.add(item.q)
                    write(item.result, now)
                for source in (item.q, item.kv, item.inputs, item.dkv):
                    read(source, now)
                continue
            sources = (item.part, item.into) if isinstance(item, Add) else (item.kv, item.dkv)
            if isinstance(item, AttendOp) and item.kv != LOCAL and plan.buffers[item.kv].dtype in EIGHT_BIT:
                raise PlanError(f"rank {plan.rank}, step {now}: {plan.buffers[item.kv].label} is not restored")
            for source in sources:
                read(source, now, after=source in received)
    for buffer in () if plan.backward else plan.kept:
        read(buffer, len(plan.steps) - 1)
    sums = {item.into for step in plan.steps for item in step.work if isinstance(item, Add)} - {LOCAL}
    sent = {send.buffer for step in plan.steps for send in step.sends}
    for buffer in sorted(sums - sent - {pack.source for step in plan.steps for pack in step.packs}):
        raise PlanError(f"rank {plan.rank}: {plan.buffers[buffer].label} is added to and never sent")
    # Any two buffers that live in the same step must have disjoint bytes.
    spans = [(plan.buffers[b].offset_bytes, buffer_bytes(plan.problem, plan.buffers[b]), b) for b in written]
    for n, (start, nbytes, this) in enumerate(spans):
        if start < 0 or start + nbytes > plan.arena_bytes:
            raise PlanError(f"rank {plan.rank}: {plan.buffers[this].label} is outside the arena")
        for other_start, other_bytes, second in spans[:n]:
            # Intervals of steps include both ends; intervals of bytes are half-open.
            concurrent = written[this] <= used[second] and written[second] <= used[this]
            if concurrent and start < other_start + other_bytes and other_start < start + nbytes:
                labels = f"{plan.buffers[this].label} and {plan.buffers[second].label}"
                raise PlanError(f"rank {plan.rank}: {labels} live at the same time in the same bytes")
    for inner in plan.buffers:
        if inner.inside is None:
            continue
        outer = plan.buffers[inner.inside.buffer]
        before = inner.inside.row * record_bytes(plan.problem, inner.dtype, inner.kind)
        if inner.offset_bytes != outer.offset_bytes + before:
            raise PlanError(f"rank {plan.rank}: {inner.label} is not inside {outer.label}")
