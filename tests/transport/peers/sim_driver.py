"""A simulated GPU for one process: `CudaDriver` and `CudaDevice` of the peer transport, in real processes on CPU.

An allocation is a memfd, and exporting it duplicates its file descriptor. A stream is a thread with a queue, a copy is
a memmove, and a wait polls its word. So file descriptors really pass between processes, and a process can be killed or
stopped. Guarantees: a word operation on unregistered memory, or an unmap under a queued copy, prints an error and ends
the process with `VIOLATION`. A copy to unmapped memory ends it with SIGSEGV. `leftovers` counts unreleased resources.
Not covered: reordering by hardware.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from ringattn.transport.device import CudaDevice
from ringattn.transport.peer.driver import OUT_OF_MEMORY, Attribute, CudaDriver, DriverError, WordOperation

VIOLATION = 99
GRANULARITY = 1 << 16
HOST_OFFSET = 1 << 60
"""The device address of registered host memory is its host address plus this offset, so that a mix-up is noticed."""
POLL_S = 50e-6

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [
    ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long,
]  # fmt: skip
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]


def violate(text: str) -> None:
    """Print an error and end the process with `VIOLATION`, because a real GPU would fault or corrupt memory here."""
    print(f"simulated GPU: {text}", file=sys.stderr, flush=True)
    os._exit(VIOLATION)


class _Item(NamedTuple):
    """One operation of a queue. `ready`: whether it may run; `spans`: the (address, bytes) ranges that it accesses."""

    ready: Callable[[], bool]
    run: Callable[[], None]
    spans: tuple[tuple[int, int], ...] = ()


class _Queue:
    """A queue whose items run one after another on a dedicated thread."""

    def __init__(self) -> None:
        self.items: deque[_Item] = deque()
        self._more = threading.Event()
        threading.Thread(target=self._run_items, daemon=True, name="sim-queue").start()

    def put(self, item: _Item) -> None:
        self.items.append(item)
        self._more.set()

    def _run_items(self) -> None:
        while True:
            if not self.items:
                self._more.clear()
                if not self.items:
                    self._more.wait()
                continue
            item = self.items[0]  # it stays in the queue until it has run
            nap_s = POLL_S
            while not item.ready():
                time.sleep(nap_s)
                nap_s = min(2 * nap_s, 1e-3)
            item.run()
            self.items.popleft()


def _at_once() -> bool:
    return True


class SimStream:
    """A stream of the GPU."""

    def __init__(self, gpu: SimGpu, queue: _Queue) -> None:
        self.gpu, self.queue = gpu, queue
        self.cuda_stream = len(gpu.streams) + 1
        gpu.streams[self.cuda_stream] = self

    def wait_event(self, event: SimEvent) -> None:
        """See `Stream.wait_event`. As in CUDA, wait for the newest record at the time of this call."""
        mark = event.mark
        self.queue.put(_Item(mark.is_set, lambda: None))

    def compute(self, body: Callable[[], None]) -> None:
        """Enqueue `body` on the stream."""
        self.queue.put(_Item(_at_once, body))


class HostStream:
    """The caller's stream if the host computes: work runs when it is issued, so none is ever pending."""

    cuda_stream = 0

    def wait_event(self, event: SimEvent) -> None:
        """Block the host until the event is complete."""
        while not event.query():
            time.sleep(POLL_S)


class SimEvent:
    """A simulated CUDA event. `mark` is set when the newest record is complete."""

    def __init__(self) -> None:
        self.mark = threading.Event()
        self.mark.set()

    def record(self, stream: SimStream | HostStream) -> None:
        """See `Event.record`."""
        self.mark = threading.Event()
        if isinstance(stream, HostStream):
            self.mark.set()
        else:
            stream.queue.put(_Item(_at_once, self.mark.set))

    def query(self) -> bool:
        """See `Event.query`."""
        return self.mark.is_set()


class SimGpu(CudaDevice):
    """`CudaDevice` of one process. `caller`: the stream that the caller computes on, initially a `HostStream`."""

    def __init__(
        self,
        *,
        async_engines: int = 3,
        one_queue: bool = False,
        attributes: dict[Attribute, int] | None = None,
        memory: int = 1 << 40,
    ) -> None:
        self.torch_device = torch.device("cpu")
        self.uuid = "GPU-0"
        self.capturing = False
        self.streams: dict[int, SimStream] = {}
        self._shared_queue = _Queue() if one_queue else None
        self.caller: SimStream | HostStream = HostStream()
        self.driver = SimDriver(self, async_engines, attributes or {}, memory)

    def activate(self) -> None:
        """See `CudaDevice.activate`."""

    def watch_captures(self) -> None:
        """See `CudaDevice.watch_captures`."""

    def new_stream(self) -> SimStream:
        """See `CudaDevice.new_stream`."""
        return SimStream(self, self._shared_queue or _Queue())

    def current_stream(self) -> SimStream | HostStream:
        """See `CudaDevice.current_stream`."""
        return self.caller

    def new_event(self) -> SimEvent:
        """See `CudaDevice.new_event`."""
        return SimEvent()

    def empty(self, nbytes: int) -> torch.Tensor:
        """See `CudaDevice.empty`."""
        return torch.empty(nbytes, dtype=torch.uint8, device=self.torch_device)

    def release_cached(self) -> None:
        """See `CudaDevice.release_cached`."""
        self.driver.released += 1

    def wrap(self, pointer: int, nbytes: int, owner: object) -> torch.Tensor:
        """See `CudaDevice.wrap`."""
        array = (ctypes.c_uint8 * nbytes).from_address(pointer)
        array.owner = owner  # type: ignore[attr-defined]
        return torch.frombuffer(array, dtype=torch.uint8)

    def is_capturing(self) -> bool:
        """See `CudaDevice.is_capturing`."""
        return self.capturing


class SimDriver(CudaDriver):
    """`CudaDriver` of one process."""

    version = 13000

    def __init__(self, gpu: SimGpu, async_engines: int, attributes: dict[Attribute, int], memory: int) -> None:
        self.released = 0
        self._gpu, self._free = gpu, memory
        self._engines = threading.Semaphore(max(async_engines, 1))
        self._attributes = {
            Attribute.ASYNC_ENGINES: async_engines,
            Attribute.FLUSHES_REMOTE_WRITES: 1,
            Attribute.VIRTUAL_MEMORY: 1,
            Attribute.POSIX_HANDLES: 1,
            Attribute.STREAM_MEMORY_OPERATIONS_64: 1,
            Attribute.MULTI_PROCESS_SERVER: 0,
            **attributes,
        }
        self._handles: dict[int, int] = {}
        self._own: dict[int, int] = {}
        self._mapped: dict[int, int] = {}
        self._registered: dict[int, int] = {}
        self._next = 1

    def leftovers(self) -> dict[str, int]:
        """Count the resources that were not released."""
        return {"handles": len(self._handles), "mappings": len(self._mapped), "registered": len(self._registered)}

    def attribute(self, which: Attribute) -> int:
        """See `CudaDriver.attribute`."""
        return self._attributes[which]

    def is_partition(self) -> bool:
        """See `CudaDriver.is_partition`."""
        return False

    def granularity(self) -> int:
        """See `CudaDriver.granularity`."""
        return GRANULARITY

    def create(self, nbytes: int) -> int:
        """See `CudaDriver.create`."""
        if nbytes % GRANULARITY:
            raise DriverError("cuMemCreate", 1, "CUDA_ERROR_INVALID_VALUE", f"{nbytes} bytes")
        if nbytes > self._free:
            raise DriverError("cuMemCreate", OUT_OF_MEMORY, "CUDA_ERROR_OUT_OF_MEMORY", "out of memory")
        fd = os.memfd_create("sim-gpu", os.MFD_CLOEXEC)
        os.ftruncate(fd, nbytes)
        self._free -= nbytes
        handle = self._keep(fd)
        self._own[handle] = nbytes
        return handle

    def release(self, handle: int) -> None:
        """See `CudaDriver.release`."""
        self._free += self._own.pop(handle, 0)
        os.close(self._handles.pop(handle))

    def export(self, handle: int) -> int:
        """See `CudaDriver.export`."""
        return os.dup(self._handles[handle])

    def adopt(self, fd: int) -> int:
        """See `CudaDriver.adopt`."""
        return self._keep(os.dup(fd))

    def map(self, handle: int, nbytes: int) -> int:
        """See `CudaDriver.map`."""
        fd = self._handles[handle]
        if os.fstat(fd).st_size != nbytes:
            raise DriverError("cuMemMap", 1, "CUDA_ERROR_INVALID_VALUE", f"{nbytes} bytes of {os.fstat(fd).st_size}")
        address = _libc.mmap(None, nbytes, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED, fd, 0)
        assert address not in (None, ctypes.c_void_p(-1).value), os.strerror(ctypes.get_errno())
        self._mapped[address] = nbytes
        return address

    def unmap(self, address: int, nbytes: int) -> None:
        """See `CudaDriver.unmap`."""
        assert self._mapped.pop(address) == nbytes
        for stream in list(self._gpu.streams.values()):
            for item in list(stream.queue.items):
                if any(start < address + nbytes and address < start + size for start, size in item.spans):
                    violate(f"unmapped {address:#x} under a queued copy")
        _libc.munmap(address, nbytes)

    def register(self, pointer: int, nbytes: int) -> int:
        """See `CudaDriver.register`."""
        if pointer in self._registered:
            raise DriverError("cuMemHostRegister", 712, "CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED", f"{pointer:#x}")
        self._registered[pointer] = nbytes
        return pointer + HOST_OFFSET

    def unregister(self, pointer: int) -> None:
        """See `CudaDriver.unregister`."""
        del self._registered[pointer]

    def copy(self, dst: int, src: int, nbytes: int, stream: int) -> None:
        """See `CudaDriver.copy`."""

        def run() -> None:
            with self._engines:
                ctypes.memmove(dst, src, nbytes)

        self._gpu.streams[stream].queue.put(_Item(_at_once, run, ((dst, nbytes), (src, nbytes))))

    def operate(self, operations: Sequence[WordOperation], stream: int) -> None:
        """See `CudaDriver.operate`."""
        for operation in operations:
            pointer = operation.address - HOST_OFFSET
            registered = list(self._registered.items())
            if not any(start <= pointer and pointer + 8 <= start + size for start, size in registered):
                violate(f"a word operation on {operation.address:#x}, which is not registered")
            self._gpu.streams[stream].queue.put(_operation(pointer, operation))

    def _keep(self, fd: int) -> int:
        self._next += 1
        self._handles[self._next] = fd
        return self._next


def _operation(pointer: int, operation: WordOperation) -> _Item:
    word = ctypes.c_uint64.from_address(pointer)
    if operation.waits:
        # The driver compares modulo 2^64.
        return _Item(lambda: (word.value - operation.value) & (1 << 63) == 0, lambda: None)

    def write() -> None:
        word.value = operation.value

    return _Item(_at_once, write)
