"""What an executor tells of one pass while it is recorded or profiled: what it does now, step by step.

Guarantees: off, there is no watch, and an executor pays one comparison with None a step; a pass that fails leaves
nothing in the recording and no open range.
"""

from __future__ import annotations

from typing import Any

import torch

from ringattn.errors import UnsupportedError
from ringattn.observe.spans import (
    END,
    PACK,
    POST,
    PROJECT,
    WAIT,
    WORK,
    Exchange,
    Marks,
    NvtxRanges,
    ProfilerRanges,
    Recording,
    named,
)
from ringattn.planner.plan import Plan
from ringattn.transport.base import Hop, WorkHandle


class PassProfiler:
    """One pass. Marks moments where there is a recording, and names ranges where somebody profiles."""

    def __init__(self, plan: Plan, recording: Recording | None, ranges: ProfilerRanges | NvtxRanges | None) -> None:
        self._plan, self._recording, self._ranges = plan, recording, ranges
        self._pass = "backward" if plan.backward else "forward"
        self._marks = Marks(plan, [], [])

    def begin(self, phase: str = PACK) -> None:
        """The pass begins, with PACK or PROJECT."""
        self._enter(phase, 0)

    def depart(self, number: int, hop: Hop | None) -> WorkHandle:
        """Start the messages of a plan step, if it has any; then its work begins."""
        ticket, exchange = None, None
        if hop is not None:
            posted = self._enter(POST, number)
            ticket = hop.start()
            if self._recording is not None:
                exchange = Exchange(self._plan.steps[number], posted, self._recording.clock.departed(), None)
        self._enter(WORK, number)
        return _Watched(self, number, ticket, exchange)

    def project(self) -> None:
        """The first step's messages have left, and its work has not begun, as `depart` took for granted."""
        if self._recording is not None:
            self._marks.moments.pop()
        self._enter(PROJECT, 0)

    def resume(self) -> None:
        """Now it does."""
        self._enter(WORK, 0)

    def arrive(self, number: int, ticket: WorkHandle | None, exchange: Exchange | None) -> None:
        """Wait for a step's messages, if it has any; then the packing of the next step's begins."""
        if ticket is not None:
            self._enter(WAIT, number)
            ticket.wait()
        waited = self._enter(PACK, number + 1)
        if exchange is not None and self._recording is not None:
            arrival = self._recording.clock.arrived(ticket) if exchange.arrival is None else exchange.arrival
            self._marks.exchanges.append(exchange._replace(arrival=arrival, waited=waited))

    def done(self) -> None:
        """The pass has ended well."""
        if self._recording is not None:
            self._marks.moments.append((END, len(self._plan.steps), self._recording.clock.mark()))
            self._recording.add(self._marks)

    def leave(self) -> None:
        """The pass has ended, well or not."""
        if self._ranges is not None:
            self._ranges.leave()

    def _enter(self, phase: str, number: int) -> Any:
        """A phase of a plan step begins and the phase before ends; the mark, if there is a recording."""
        if self._ranges is not None:
            self._ranges.enter(f"ringattn {self._pass} {named(self._plan, phase, number)[0]}")
        if self._recording is None:
            return None
        mark = self._recording.clock.mark()
        self._marks.moments.append((phase, number, mark))
        return mark


class _Watched:
    """The ticket of a step, of whose wait the watch hears."""

    __slots__ = ("_exchange", "_number", "_ticket", "_watch")

    def __init__(self, watch: PassProfiler, number: int, ticket: WorkHandle | None, exchange: Exchange | None) -> None:
        self._watch, self._number, self._ticket, self._exchange = watch, number, ticket, exchange

    @property
    def arrived_s(self) -> float | None:
        """See `WorkHandle.arrived_s`."""
        return None if self._ticket is None else self._ticket.arrived_s

    def wait(self) -> None:
        """See `WorkHandle.wait`."""
        self._watch.arrive(self._number, self._ticket, self._exchange)


def profiler_of(plan: Plan, recording: Recording | None) -> PassProfiler | None:
    """The watch over one pass, None where nobody looks. Raises `UnsupportedError` in the capture of a CUDA graph."""
    ranges: ProfilerRanges | NvtxRanges | None = None
    if recording is not None and torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
        raise UnsupportedError(
            "a pass cannot be recorded while it is captured into a CUDA graph, where events have no times; "
            "leave ring.recording() before the capture, and record a pass that is not captured"
        )
    if recording is not None and recording.nvtx:
        ranges = NvtxRanges()
    elif torch.autograd._profiler_enabled():
        ranges = ProfilerRanges()
    return None if recording is None and ranges is None else PassProfiler(plan, recording, ranges)
