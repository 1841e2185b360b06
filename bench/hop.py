"""The host cost of one hop: an event, a group of one send and one receive, another event, and the two waits.

`python -m ringattn.bench.hop` needs a C compiler and no GPU. The real transport runs with the stub of the tests, a C
library with NCCL's interface that moves nothing between ranks, and with events that do nothing. The stub is also timed
alone through the same binding, and this time is subtracted. The cost of CUDA's events is not included, because
measuring it needs a GPU.
The gate: the stub has recorded exactly the group of every hop.
"""

from __future__ import annotations

import ctypes
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import torch
from torch.distributed import HashStore

from ringattn.bench.gate import GateError
from ringattn.bench.options import parse
from ringattn.bench.report import RESULTS, Table, finish, progress, spread
from ringattn.errors import UnsupportedError
from ringattn.transport.base import Message, Opening
from ringattn.transport.device import CudaDevice, Event, Stream
from ringattn.transport.location import Location
from ringattn.transport.nccl.binding import Binding
from ringattn.transport.nccl.ctypes_binding import CtypesBinding
from ringattn.transport.nccl.library import load_library
from ringattn.transport.nccl.options import NcclOptions
from ringattn.transport.nccl.transport import NcclTransport

BAR_US = 15.0
STUB = Path(__file__).resolve().parent.parent / "tests" / "transport" / "nccl" / "stub.c"
LOG_HOPS = 500  # the capacity of the stub's log


@dataclass(frozen=True)
class HopOptions:
    """The options of the benchmark. `hops` hops are timed in blocks of `LOG_HOPS`, and each block gives one figure."""

    hops: int = 20_000
    bytes: int = 1 << 20
    results: str = RESULTS


class NoEvent(Event):
    """An event that is always complete."""

    def record(self, stream: Stream) -> None:
        """Do nothing."""

    def query(self) -> bool:
        """Return True."""
        return True


class NoStream(Stream):
    """A stream that is always idle."""

    @property
    def cuda_stream(self) -> int:
        """Return a handle that is never dereferenced."""
        return 0x5EAF

    def wait_event(self, event: Event) -> None:
        """Do nothing."""


class NoDevice(CudaDevice):
    """A GPU whose streams and events cost nothing; its memory is host memory."""

    torch_device = torch.device("cpu")

    def __init__(self, rank: int) -> None:
        self.uuid = f"none-{rank}"
        self._current = NoStream()

    def activate(self) -> None:
        """Do nothing."""

    def watch_captures(self) -> None:
        """Do nothing."""

    def new_stream(self) -> Stream:
        """See `CudaDevice.new_stream`."""
        return NoStream()

    def current_stream(self) -> Stream:
        """See `CudaDevice.current_stream`."""
        return self._current

    def new_event(self) -> Event:
        """See `CudaDevice.new_event`."""
        return NoEvent()

    def empty(self, nbytes: int) -> torch.Tensor:
        """See `CudaDevice.empty`."""
        return torch.empty(nbytes, dtype=torch.uint8)

    def wrap(self, pointer: int, nbytes: int, owner: object) -> torch.Tensor:
        """Raise `UnsupportedError`. This is never called, because staging buffers are not registered here."""
        raise UnsupportedError("this device wraps no memory")

    def release_cached(self) -> None:
        """See `CudaDevice.release_cached`."""

    def is_capturing(self) -> bool:
        """See `CudaDevice.is_capturing`."""
        return False


def main(arguments: Sequence[str] = ()) -> None:
    """Time, print and save the table. Raises `GateError` if the stub has recorded anything except the hops."""
    options = parse(HopOptions(), arguments)
    with tempfile.TemporaryDirectory() as folder, progress("hop") as say:
        say("building the stub")
        library = build_stub(Path(folder))
        binding = CtypesBinding(load_library(str(library)))
        rings = open_pair(binding)
        stub = ctypes.CDLL(str(library))
        buffers = torch.zeros(2, options.bytes, dtype=torch.uint8)
        hop = rings[0].bind([Message(1, buffers[0], "sent")], [Message(1, buffers[1], "received")])
        pointers = [buffers[0].data_ptr(), buffers[1].data_ptr()]
        lane, stream = rings[0].communicator.handle, rings[0].stream.cuda_stream

        def whole() -> None:
            hop.start().wait()

        def library_alone() -> None:
            binding.group_start()
            binding.recv(pointers[1], options.bytes, 1, lane, stream)
            binding.send(pointers[0], options.bytes, 1, lane, stream)
            binding.group_end()

        whole_us, alone_us = [], []
        for n in range(max(1, options.hops // LOG_HOPS)):
            say(f"{n * LOG_HOPS} of {options.hops} hops")
            whole_us.append(_block_us(whole, stub))
            alone_us.append(_block_us(library_alone, stub))
        close_pair(rings)
    python_us = [a - b for a, b in zip(whole_us, alone_us, strict=True)]
    table = Table(
        f"Host cost of one hop, µs (minimum / median / maximum of {len(whole_us)} blocks of {LOG_HOPS} hops)",
        ("part", "µs", "bar"),
        [
            ("start and wait, all of it", spread(whole_us, 2), ""),
            ("the binding's four calls, including the stub in C", spread(alone_us, 2), ""),
            ("the difference: Python of this package", spread(python_us, 2), f"{BAR_US:g}"),
        ],
        ["Events do nothing here; a GPU adds four event calls of CUDA."],
    )
    data = {"whole_us": whole_us, "binding_us": alone_us, "python_us": median(python_us), "bar_us": BAR_US}
    finish("hop", options, [table], data, options.results)


def build_stub(folder: Path) -> Path:
    """Compile the stub as a shared library. Raises `UnsupportedError` without its source or without a compiler."""
    if not STUB.exists():
        raise UnsupportedError(f"{STUB} is missing: this benchmark runs from a checkout")
    library = folder / "libnccl.so.2"
    command = ["cc", "-O2", "-shared", "-fPIC", "-pthread", "-Wl,-soname,libnccl.so.2", "-o", str(library), str(STUB)]
    try:
        subprocess.run(command, check=True)
    except FileNotFoundError:
        raise UnsupportedError("this benchmark compiles a small C library, but cc is not installed") from None
    return library


def open_pair(binding: Binding) -> list[NcclTransport]:
    """Open both ranks of a ring of two in this process."""
    store = HashStore()
    rings: dict[int, NcclTransport] = {}

    def live(rank: int) -> None:
        rings[rank] = NcclTransport.open(
            Opening(store, rank, 2, 20.0, interface=None, locations=[Location("none", None, n, 0) for n in range(2)]),
            binding=binding, gpu=NoDevice(rank), options=NcclOptions(register=False), nccl_id="none",
        )  # fmt: skip

    _on_both(live)
    return [rings[0], rings[1]]


def close_pair(rings: Sequence[NcclTransport]) -> None:
    """Close both ranks at the same time, because they wait for each other."""
    _on_both(lambda rank: rings[rank].close())


def _on_both(body: Callable[[int], None]) -> None:
    threads = [threading.Thread(target=body, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def _block_us(hop: Callable[[], None], stub: ctypes.CDLL) -> float:
    """Return the microseconds of one hop, averaged over a block.

    Raises `GateError` if the stub did not record exactly the calls of these hops.
    """
    stub.stub_clear()
    start = time.perf_counter()
    for _ in range(LOG_HOPS):
        hop()
    took_us = (time.perf_counter() - start) / LOG_HOPS * 1e6
    text = ctypes.create_string_buffer(1 << 19)
    stub.stub_log(text, ctypes.c_size_t(len(text)))
    seen = [line.split()[0] for line in text.value.decode().splitlines()]
    called = [name for name in seen if name != "ncclCommGetAsyncError"]  # the supervisor polls meanwhile
    if called != ["ncclGroupStart", "ncclRecv", "ncclSend", "ncclGroupEnd"] * LOG_HOPS:
        raise GateError(f"the stub recorded {len(called)} calls instead of {LOG_HOPS} hops: {called[:12]}")
    return took_us


if __name__ == "__main__":
    main(sys.argv[1:])
