"""Where a pass of this package spends its time: the block kernel, the merge, copies, waiting, agreeing.

Wraps the few functions that do a stage's work with a stopwatch while a `with` block lasts, and puts them back.
Guarantees: a stage's seconds hold no other stage's; what no stage names is the remainder.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

from ringattn.engine import aten
from ringattn.ring import Ring
from ringattn.runtime import executor
from ringattn.transport.base import Message, WorkHandle

STAGES = ("block kernel", "merge", "pack", "add dK/dV", "post messages", "wait for messages", "agree")


class _TimedTicket:
    """A ticket whose wait counts as waiting."""

    def __init__(self, ticket: WorkHandle, timed: Callable[..., Any]) -> None:
        self._wait = timed("wait for messages", ticket.wait)

    def wait(self) -> None:
        self._wait()


@contextmanager
def stages(ring: Ring) -> Iterator[dict[str, float]]:
    """Seconds by stage of what this rank runs inside the block, on torch's CPU flash engine.

    A process has one such block at a time: what it wraps is the process's, so ranks that are threads cannot each have
    one.
    """
    seconds = dict.fromkeys(STAGES, 0.0)

    def timed(stage: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any) -> Any:
            start = time.perf_counter()
            try:
                return function(*args)
            finally:
                seconds[stage] += time.perf_counter() - start

        return run

    exchange = timed("post messages", ring.transport.exchange)

    def timed_exchange(sends: list[Message], recvs: list[Message]) -> _TimedTicket:
        return _TimedTicket(exchange(sends, recvs), timed)

    block = aten.CPU._replace(
        forward=timed("block kernel", aten.CPU.forward), backward=timed("block kernel", aten.CPU.backward)
    )
    with ExitStack() as wrapped:
        wrapped.enter_context(patch.object(aten, "CPU", block))
        wrapped.enter_context(patch.object(aten, "merge_", timed("merge", aten.merge_)))
        wrapped.enter_context(patch.object(executor, "pack", timed("pack", executor.pack)))
        wrapped.enter_context(patch.object(executor, "add", timed("add dK/dV", executor.add)))
        wrapped.enter_context(patch.object(ring.transport, "exchange", timed_exchange))
        wrapped.enter_context(
            patch.object(ring.transport, "all_gather_bytes", timed("agree", ring.transport.all_gather_bytes))
        )
        yield seconds
