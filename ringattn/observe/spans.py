"""A recording: what one rank computed and sent, and how long it waited, pass by pass.

Guarantees: recording never delays a pass. The pass only sets marks, which become spans when the recording is read.
An exchange is in flight from the call that posts it until its last message has arrived. If the transport does not
report arrivals, the exchange counts as in flight until the wait for it returns; then `Recording.arrivals_known` is
False, and `comm_us` and `overlap` are upper bounds. The exposed part of that time is the part outside all compute
spans: posting and waiting. It is exact on every transport, because a wait begins when the rank has nothing else to do.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from itertools import pairwise
from threading import Lock
from typing import Any, NamedTuple, Protocol

import torch

from ringattn.core.span import COMM, COMPUTE, Span, exposed, overlap, total_us, under_way
from ringattn.errors import UnsupportedError
from ringattn.planner.plan import AttendOp, AttendReceivedOp, Plan, PlanStep

WAIT, PACK, POST, WORK, PROJECT, END = "wait", "pack", "post", "work", "project", "end"
"""The activities of a rank. PROJECT: project keys before the first messages leave, and queries while they travel."""


class Clock(Protocol):
    """A clock for a rank's work. `origin` is its first mark, set when `time.perf_counter()` was `origin_s`."""

    origin: Any
    origin_s: float

    def mark(self) -> Any:
        """Return a mark of the current point of this rank's work."""
        ...

    def departed(self) -> Any:
        """Return a mark of a posted exchange's future arrival, or None. Called right after the exchange is posted."""
        ...

    def arrived(self, handle: Any) -> Any:
        """Return a mark of an exchange's arrival, or None if `handle` does not know it. Called after the wait."""
        ...

    def us(self, since: Any, until: Any) -> float:
        """Return the microseconds between two marks. This may wait until both marks have been reached."""
        ...


class Link(NamedTuple):
    """One message of an exchange, as this rank sends or receives it. `step`: the plan step; `peer`: the other rank."""

    step: int
    sends: bool
    peer: int


@dataclass(frozen=True)
class RecordedPass:
    """One pass of one rank. `name`: forward or backward. Times are in microseconds since the recording began.

    The times of `spans` are relative to the start of the pass. `links`: the messages of the pass, in the order in which
    they were posted.
    """

    name: str
    start_us: float
    end_us: float
    spans: tuple[Span, ...]
    links: tuple[Link, ...] = ()

    @property
    def comm_us(self) -> float:
        """The time in which messages were in flight, in microseconds."""
        return total_us(under_way(self.spans))

    @property
    def exposed_us(self) -> float:
        """The part of `comm_us` in which this rank computed nothing."""
        return total_us(exposed(self.spans))

    @property
    def overlap(self) -> float:
        """The share of `comm_us` that computation hides; 1.0 if there was no communication."""
        return overlap(self.comm_us, self.exposed_us)

    @property
    def messages(self) -> int:
        """The number of messages sent."""
        return sum(link.sends for link in self.links)

    @property
    def bytes_sent(self) -> int:
        """The total size of the messages sent."""
        return sum(span.nbytes for span in self.spans)


class Exchange(NamedTuple):
    """The marks of one step's exchange: when it was posted, when its messages arrived, and when the wait ended.

    `arrival`: None if the transport does not report it; the messages had then arrived by the end of the wait.
    """

    step: PlanStep
    posted: Any
    arrival: Any
    waited: Any


@dataclass
class Marks:
    """The marks of one pass.

    `moments`: (phase, plan step, mark) for the start of each phase. A phase lasts until the next phase starts.
    """

    plan: Plan
    moments: list[tuple[str, int, Any]]
    exchanges: list[Exchange]


@dataclass
class Recording:
    """The result of `Ring.recording`: this rank's passes that ended while recording was on.

    Reading the passes waits until the device has completed them. `transport`: the name of the ring's transport.
    """

    rank: int
    world_size: int
    clock: Clock
    nvtx: bool = False
    transport: str = ""
    arrivals_known: bool = True
    _ended: list[Marks] = field(default_factory=list)
    _passes: list[RecordedPass] = field(default_factory=list)
    _lock: Lock = field(default_factory=Lock)

    def add(self, marks: Marks) -> None:
        """Add a pass. Any thread may call this."""
        with self._lock:
            self._ended.append(marks)
            self.arrivals_known &= all(exchange.arrival is not None for exchange in marks.exchanges)

    @property
    def passes(self) -> tuple[RecordedPass, ...]:
        """The passes, in the order in which they ended."""
        with self._lock:
            self._passes += [_to_spans(self.clock, marks) for marks in self._ended]
            self._ended.clear()
            return tuple(self._passes)

    @property
    def spans(self) -> tuple[Span, ...]:
        """The spans of all passes, with times relative to the start of the first pass."""
        passes = self.passes
        return tuple(
            span._replace(start_us=span.start_us + offset_us, end_us=span.end_us + offset_us)
            for recorded in passes
            for offset_us in [recorded.start_us - passes[0].start_us]
            for span in recorded.spans
        )

    @property
    def comm_us(self) -> float:
        """The time in which messages were in flight, over all passes, in microseconds; see `arrivals_known`."""
        return sum(recorded.comm_us for recorded in self.passes)

    @property
    def exposed_us(self) -> float:
        """The part of `comm_us` in which this rank computed nothing, over all passes."""
        return sum(recorded.exposed_us for recorded in self.passes)

    @property
    def overlap(self) -> float:
        """The share of `comm_us` that computation hides; 1.0 if there was no communication; see `arrivals_known`."""
        return overlap(self.comm_us, self.exposed_us)

    @property
    def messages(self) -> int:
        """The number of messages sent, over all passes."""
        return sum(recorded.messages for recorded in self.passes)

    @property
    def bytes_sent(self) -> int:
        """The total size of the messages sent, over all passes."""
        return sum(recorded.bytes_sent for recorded in self.passes)


def _to_spans(clock: Clock, marks: Marks) -> RecordedPass:
    """Convert the marks of a pass to spans."""
    plan, moments = marks.plan, marks.moments
    first, last = moments[0][2], moments[-1][2]
    duration = clock.us(first, last)  # on a device this waits for the last mark, and so for all

    def span(name: str, lane: str, since: Any, until: Any, nbytes: int = 0) -> Span:
        start = clock.us(first, since)
        return Span(name, lane, start, max(start, clock.us(first, until)), nbytes)

    spans = [
        span(name, COMPUTE, since, until)
        for (phase, number, since), (_, _, until) in pairwise(moments)
        for name, computes in [describe_phase(plan, phase, number)]
        if computes
    ]
    links: list[Link] = []
    for step, posted, arrival, waited in marks.exchanges:
        nbytes = sum(send.elements * plan.element_bytes(send.buffer) for send in step.sends)
        spans.append(span(f"step {step.number} exchange", COMM, posted, waited if arrival is None else arrival, nbytes))
        links += [Link(step.number, True, send.peer) for send in step.sends]
        links += [Link(step.number, False, recv.peer) for recv in step.recvs]
    start_us = clock.us(clock.origin, first)
    name = "backward" if plan.backward else "forward"
    return RecordedPass(name, start_us, start_us + duration, tuple(spans), tuple(links))


def describe_phase(plan: Plan, phase: str, number: int) -> tuple[str, bool]:
    """Return the name of a phase of a plan step, and whether the phase computes.

    The name of the WORK phase is "attend" if the step computes attention, and "merge" if it only merges.
    """
    if number >= len(plan.steps):
        return f"end {phase}", False
    step, computes = plan.steps[number], phase == PROJECT
    if phase == PACK:
        computes = bool(step.packs)
    elif phase == WORK:
        computes = bool(step.work or step.zeros or step.restores)
        phase = "attend" if any(isinstance(item, (AttendOp, AttendReceivedOp)) for item in step.work) else "merge"
    return f"step {step.number} {phase}", computes


# --- clocks and named ranges -----------------------------------------------------------------------------------------


class HostClock:
    """A clock for work on the host. Its marks are seconds of `time.perf_counter()`."""

    def __init__(self) -> None:
        self.origin = self.origin_s = self.mark()

    def mark(self) -> float:
        """See `Clock.mark`."""
        return time.perf_counter()

    def departed(self) -> None:
        """See `Clock.departed`. Return None: only the work handle may know the time of arrival."""

    def arrived(self, handle: Any) -> float | None:
        """See `Clock.arrived`."""
        arrived_s: float | None = handle.arrived_s
        return arrived_s

    def us(self, since: float, until: float) -> float:
        """See `Clock.us`."""
        return (until - since) * 1e6


class DeviceClock:
    """A clock for work on a GPU. Its marks are events on the current stream, or on `lane`, the stream of exchanges."""

    def __init__(self, lane: torch.cuda.Stream | None) -> None:
        """Wait once for the device, so that `origin` and `origin_s` are the same moment."""
        self._lane = lane
        torch.cuda.synchronize()
        self.origin = self.mark()
        self.origin.synchronize()
        self.origin_s = time.perf_counter()

    def mark(self) -> torch.cuda.Event:
        """See `Clock.mark`."""
        return self._event(torch.cuda.current_stream())

    def departed(self) -> torch.cuda.Event | None:
        """See `Clock.departed`."""
        return None if self._lane is None else self._event(self._lane)

    def arrived(self, handle: Any) -> None:
        """See `Clock.arrived`. Return None: `departed` has already marked the arrival on `lane`."""

    def us(self, since: torch.cuda.Event, until: torch.cuda.Event) -> float:
        """See `Clock.us`. CUDA counts in steps of about half a microsecond."""
        until.synchronize()
        return since.elapsed_time(until) * 1e3

    def _event(self, stream: torch.cuda.Stream) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record(stream)
        return event


class ProfilerRanges:
    """Named ranges in `torch.profiler`."""

    def __init__(self) -> None:
        self._open: Any = None

    def enter(self, name: str) -> None:
        """Begin a range, after ending the previous one."""
        self.leave()
        self._open = torch.profiler.record_function(name)
        self._open.__enter__()

    def leave(self) -> None:
        """End the range, if one is open."""
        if self._open is not None:
            self._open.__exit__(None, None, None)
            self._open = None


class NvtxRanges:
    """Named ranges in NVIDIA's tools (NVTX)."""

    def __init__(self) -> None:
        self._open = False

    def enter(self, name: str) -> None:
        """Begin a range, after ending the previous one."""
        self.leave()
        torch.cuda.nvtx.range_push(name)
        self._open = True

    def leave(self) -> None:
        """End the range, if one is open."""
        if self._open:
            torch.cuda.nvtx.range_pop()
            self._open = False


def new_recording(rank: int, world_size: int, device: torch.device, lane: Any, nvtx: bool, transport: str) -> Recording:
    """Return an empty recording of work on `device`. Raises `UnsupportedError` for `nvtx` without CUDA."""
    if nvtx and not torch.cuda.is_available():
        raise UnsupportedError("recording(nvtx=True) needs a CUDA device: NVTX names ranges for NVIDIA's tools only")
    clock = DeviceClock(lane) if device.type == "cuda" else HostClock()
    return Recording(rank, world_size, clock, nvtx, transport)
