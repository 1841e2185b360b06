"""What transports on GPUs ask of CUDA: streams, events, memory, in torch's own words.

Guarantees: the NCCL transport touches no other CUDA call, so that a simulated device can stand in for a real one.
"""

from __future__ import annotations

import ctypes
from typing import Protocol, cast

import torch

from ringattn.errors import UnsupportedError

RELAXED = 2
"""`cudaStreamCaptureModeRelaxed`."""


class Event(Protocol):
    """A point in a stream."""

    def record(self, stream: Stream) -> None: ...

    def query(self) -> bool:
        """Whether everything before it has run. Never asked of an event that was recorded in a capture."""
        ...


class Stream(Protocol):
    """A queue of device work."""

    @property
    def cuda_stream(self) -> int:
        """The handle that NCCL is given."""
        ...

    def wait_event(self, event: Event) -> None:
        """Later work of this stream runs after `event`. Does not block the host."""
        ...


class Device(Protocol):
    """One GPU as this process sees it."""

    torch_device: torch.device
    uuid: str

    def activate(self) -> None:
        """Make it the current device of the calling thread."""
        ...

    def watch_captures(self) -> None:
        """Let the calling thread query events while other threads capture, whatever the mode of their capture."""
        ...

    def new_stream(self) -> Stream:
        """A stream of the highest priority."""
        ...

    def current_stream(self) -> Stream:
        """The stream that the caller computes on."""
        ...

    def new_event(self) -> Event: ...

    def empty(self, nbytes: int) -> torch.Tensor:
        """Plain device memory, a flat uint8 tensor."""
        ...

    def wrap(self, pointer: int, nbytes: int, owner: object) -> torch.Tensor:
        """Memory that another library allocated, as a flat uint8 tensor whose views keep `owner` alive."""
        ...

    def release_cached(self) -> None:
        """Give memory that torch has cached and nobody uses back to the device, where NCCL can take it."""
        ...

    def is_capturing(self) -> bool:
        """Whether the current stream is being captured into a CUDA graph."""
        ...


class _Memory:
    """Device memory with the interface that torch reads; every view of it keeps `owner` alive."""

    def __init__(self, pointer: int, nbytes: int, owner: object) -> None:
        self.owner = owner
        self.__cuda_array_interface__ = {
            "shape": (nbytes,), "typestr": "|u1", "data": (pointer, False), "strides": None, "version": 3,
        }  # fmt: skip


class CudaDevice:
    """A GPU through `torch.cuda`."""

    def __init__(self, index: int) -> None:
        self.torch_device = torch.device("cuda", index)
        self.uuid = str(torch.cuda.get_device_properties(index).uuid)

    def activate(self) -> None:
        """See `Device.activate`."""
        torch.cuda.set_device(self.torch_device)

    def watch_captures(self) -> None:
        """See `Device.watch_captures`. Torch has no name for it, so the runtime that torch has loaded is asked."""
        runtime = ctypes.CDLL(f"libcudart.so.{str(torch.version.cuda).split('.')[0]}")
        mode = ctypes.c_int(RELAXED)
        if status := runtime.cudaThreadExchangeStreamCaptureMode(ctypes.byref(mode)):
            raise UnsupportedError(f"cudaThreadExchangeStreamCaptureMode failed with CUDA error {status}")

    def new_stream(self) -> Stream:
        """See `Device.new_stream`. Of the levels that torch has, which may be fewer than the device's."""
        _, highest = torch.cuda.Stream.priority_range()  # type: ignore[call-arg]  # static, which its stub does not say
        return cast(Stream, torch.cuda.Stream(self.torch_device, priority=highest))

    def current_stream(self) -> Stream:
        """See `Device.current_stream`."""
        return cast(Stream, torch.cuda.current_stream(self.torch_device))

    def new_event(self) -> Event:
        """Without timing, which would cost the device time."""
        return cast(Event, torch.cuda.Event())

    def empty(self, nbytes: int) -> torch.Tensor:
        """See `Device.empty`."""
        return torch.empty(nbytes, dtype=torch.uint8, device=self.torch_device)

    def wrap(self, pointer: int, nbytes: int, owner: object) -> torch.Tensor:
        """See `Device.wrap`."""
        return torch.as_tensor(_Memory(pointer, nbytes, owner), device=self.torch_device)

    def release_cached(self) -> None:
        """See `Device.release_cached`."""
        torch.cuda.empty_cache()

    def is_capturing(self) -> bool:
        """See `Device.is_capturing`."""
        return torch.cuda.is_current_stream_capturing()


class PassOrder:
    """Orders passes that work in the same memory, on whichever of the caller's streams each of them runs.

    Not covered: passes on several streams within one capture of a graph.
    """

    def __init__(self, gpu: Device) -> None:
        self._gpu = gpu
        self._ended = gpu.new_event()
        # The handle of the stream that the last pass ran on; None before the first.
        self._stream: int | None = None

    def begin(self) -> None:
        """Later work of the current stream follows the last pass."""
        # A capture cannot wait for an event from outside of it; its replay is ordered instead.
        if self._stream is None or self._gpu.is_capturing():
            return
        current = self._gpu.current_stream()
        # A stream is in order with itself.
        if current.cuda_stream != self._stream:
            current.wait_event(self._ended)

    def end(self) -> None:
        """What the current stream holds now is the end of a pass."""
        if self._gpu.is_capturing():
            return
        current = self._gpu.current_stream()
        self._ended.record(current)
        self._stream = current.cuda_stream

    def passed(self) -> bool:
        """Whether the device has run the last pass, and with it all before."""
        return self._stream is None or self._ended.query()
