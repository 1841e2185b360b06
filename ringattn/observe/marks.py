"""Clocks and named ranges for recordings: of the host, of a CUDA device, of torch's profiler, of NVTX.

Guarantees: on a device a moment is a CUDA event, read after the pass; nothing waits inside it.
"""

from __future__ import annotations

import time
from typing import Any

import torch

from ringattn.errors import UnsupportedError
from ringattn.observe.spans import Recording


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


def new_recording(rank: int, world_size: int, device: torch.device, lane: Any, nvtx: bool) -> Recording:
    """An empty recording of work on `device`. Raises `UnsupportedError` for `nvtx` without CUDA."""
    if nvtx and not torch.cuda.is_available():
        raise UnsupportedError("recording(nvtx=True) needs a CUDA device: NVTX names ranges for NVIDIA's tools only")
    clock = DeviceClock(lane) if device.type == "cuda" else HostClock()
    return Recording(rank, world_size, clock, nvtx)
