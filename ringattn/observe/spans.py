"""A recording: what one rank computed, what it sent, and for how long it stood still, pass by pass.

Guarantees: a pass is never held up: its moments are marked, and turned into spans when somebody reads them.
An exchange is under way from the call that posts it until its last message has arrived, or, where the transport cannot
tell, until the wait for it returns; then `Recording.arrivals_known` is False, `comm_us` is an upper bound, and so is
`overlap`. Of that time is exposed what the rank spends in no compute span: posting, waiting. This is measured
on every transport: a wait begins when the rank has nothing else to do.
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
"""What a rank does at a moment. PROJECT: makes keys before the first messages leave, and queries while they travel."""


class Clock(Protocol):
    """Marks moments of a rank's work. `origin_s`: `time.perf_counter()` seconds at `origin`, the first mark."""

    origin: Any
    origin_s: float

    def mark(self) -> Any:
        """Now, as far as this rank's work has come."""
        ...

    def departed(self) -> Any:
        """Called when an exchange has been posted: a mark of its arrival to come, or None."""
        ...

    def arrived(self, ticket: Any) -> Any:
        """Called when an exchange was waited for: a mark of its arrival, or None where the ticket cannot tell."""
        ...

    def us(self, since: Any, until: Any) -> float:
        """Microseconds between two marks. May wait until both have been reached."""
        ...


class Link(NamedTuple):
    """One message of an exchange, at this end: `peer` receives or has sent it."""

    step: int
    sends: bool
    peer: int


@dataclass(frozen=True)
class RecordedPass:
    """One pass of one rank. `name`: forward or backward; times in microseconds from the recording's beginning.

    `spans` count from the pass's own beginning. `links`: its messages in the order in which they were posted.
    """

    name: str
    start_us: float
    end_us: float
    spans: tuple[Span, ...]
    links: tuple[Link, ...] = ()

    @property
    def comm_us(self) -> float:
        """Time in which messages were under way."""
        return total_us(under_way(self.spans))

    @property
    def exposed_us(self) -> float:
        """The part of it in which this rank computed nothing."""
        return total_us(exposed(self.spans))

    @property
    def overlap(self) -> float:
        """Hidden over total communication, 1.0 without any."""
        return overlap(self.comm_us, self.exposed_us)

    @property
    def messages(self) -> int:
        """Messages sent."""
        return sum(link.sends for link in self.links)

    @property
    def bytes_sent(self) -> int:
        """Payload of the same."""
        return sum(span.nbytes for span in self.spans)


class Exchange(NamedTuple):
    """One step's messages; `arrival` None: with the wait that follows."""

    step: PlanStep
    posted: Any
    arrival: Any
    waited: Any


@dataclass
class Marks:
    """A pass as marks: (phase, plan step, when) of all that began, each until the next."""

    plan: Plan
    moments: list[tuple[str, int, Any]]
    exchanges: list[Exchange]


@dataclass
class Recording:
    """What `Ring.recording` gives: the passes that ended inside it, on this rank. Reading waits for the device.

    `transport`: the name of the ring's transport.
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
        """Keep a pass; any thread may."""
        with self._lock:
            self._ended.append(marks)
            self.arrivals_known &= all(one.arrival is not None for one in marks.exchanges)

    @property
    def passes(self) -> tuple[RecordedPass, ...]:
        """In the order in which they ended."""
        with self._lock:
            self._passes += [_recorded(self.clock, marks) for marks in self._ended]
            self._ended.clear()
            return tuple(self._passes)

    @property
    def spans(self) -> tuple[Span, ...]:
        """Of all passes, from the beginning of the first."""
        passes = self.passes
        return tuple(
            span._replace(start_us=span.start_us + later, end_us=span.end_us + later)
            for one in passes
            for later in [one.start_us - passes[0].start_us]
            for span in one.spans
        )

    @property
    def comm_us(self) -> float:
        """Time in which messages were under way, of all passes; see `arrivals_known`."""
        return sum(one.comm_us for one in self.passes)

    @property
    def exposed_us(self) -> float:
        """Time in which this rank stood still for messages, of all passes."""
        return sum(one.exposed_us for one in self.passes)

    @property
    def overlap(self) -> float:
        """Hidden over total communication, 1.0 without any; see `arrivals_known`."""
        return overlap(self.comm_us, self.exposed_us)

    @property
    def messages(self) -> int:
        """Messages sent."""
        return sum(one.messages for one in self.passes)

    @property
    def bytes_sent(self) -> int:
        """Payload of the same."""
        return sum(one.bytes_sent for one in self.passes)


def _recorded(clock: Clock, marks: Marks) -> RecordedPass:
    """A pass's marks as spans."""
    plan, moments = marks.plan, marks.moments
    first, last = moments[0][2], moments[-1][2]
    duration = clock.us(first, last)  # on a device, waits for the last mark, and so for all

    def span(name: str, lane: str, since: Any, until: Any, nbytes: int = 0) -> Span:
        start = clock.us(first, since)
        return Span(name, lane, start, max(start, clock.us(first, until)), nbytes)

    spans = [
        span(name, COMPUTE, since, until)
        for (phase, number, since), (_, _, until) in pairwise(moments)
        for name, computes in [named(plan, phase, number)]
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


def named(plan: Plan, phase: str, number: int) -> tuple[str, bool]:
    """What a phase of a plan step is called, and whether it computes anything. Work attends, or merges only."""
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
    """Moments of the host: seconds of `time.perf_counter()`."""

    def __init__(self) -> None:
        self.origin = self.origin_s = self.mark()

    def mark(self) -> float:
        """See `Clock.mark`."""
        return time.perf_counter()

    def departed(self) -> None:
        """See `Clock.departed`: only the ticket may know."""

    def arrived(self, ticket: Any) -> float | None:
        """See `Clock.arrived`."""
        arrived_s: float | None = ticket.arrived_s
        return arrived_s

    def us(self, since: float, until: float) -> float:
        """See `Clock.us`."""
        return (until - since) * 1e6


class DeviceClock:
    """Moments of the current CUDA stream; arrivals are those of `lane`, the stream that exchanges run on."""

    def __init__(self, lane: torch.cuda.Stream | None) -> None:
        """Waits once for the device, so that `origin` is now on both clocks."""
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

    def arrived(self, ticket: Any) -> None:
        """See `Clock.arrived`: the lane's own mark says it."""

    def us(self, since: torch.cuda.Event, until: torch.cuda.Event) -> float:
        """See `Clock.us`. CUDA counts in steps of about half a microsecond."""
        until.synchronize()
        return since.elapsed_time(until) * 1e3

    def _event(self, stream: torch.cuda.Stream) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record(stream)
        return event


class ProfilerRanges:
    """Ranges that `torch.profiler` shows."""

    def __init__(self) -> None:
        self._open: Any = None

    def enter(self, name: str) -> None:
        """A range begins, and the one before ends."""
        self.leave()
        self._open = torch.profiler.record_function(name)
        self._open.__enter__()

    def leave(self) -> None:
        """The range ends, if there is one."""
        if self._open is not None:
            self._open.__exit__(None, None, None)
            self._open = None


class NvtxRanges:
    """Ranges that NVIDIA's tools show."""

    def __init__(self) -> None:
        self._open = False

    def enter(self, name: str) -> None:
        """A range begins, and the one before ends."""
        self.leave()
        torch.cuda.nvtx.range_push(name)
        self._open = True

    def leave(self) -> None:
        """The range ends, if there is one."""
        if self._open:
            torch.cuda.nvtx.range_pop()
            self._open = False


def new_recording(rank: int, world_size: int, device: torch.device, lane: Any, nvtx: bool, transport: str) -> Recording:
    """Return an empty recording of work on `device`. Raises `UnsupportedError` for `nvtx` without CUDA."""
    if nvtx and not torch.cuda.is_available():
        raise UnsupportedError("recording(nvtx=True) needs a CUDA device: NVTX names ranges for NVIDIA's tools only")
    clock = DeviceClock(lane) if device.type == "cuda" else HostClock()
    return Recording(rank, world_size, clock, nvtx, transport)
