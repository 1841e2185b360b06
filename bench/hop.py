"""What one hop costs the host: an event, a group of one send and one receive, another event, and the two waits.

`python -m ringattn.bench.hop` needs a C compiler and no GPU. The real transport runs over the stub of the tests, a C
library with NCCL's interface that moves nothing between ranks, and over events that do nothing; the stub's own share,
timed by itself through the same binding, is set apart. What CUDA's events cost is not in it: a GPU must tell.
The gate: the stub has seen exactly the group of every hop.
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
LOG_HOPS = 500  # what the stub's log has room for


@dataclass(frozen=True)
class HopOptions:
    """`hops` are timed in blocks of `LOG_HOPS`; a figure is of one block."""

    hops: int = 20_000
    bytes: int = 1 << 20
    results: str = RESULTS


class NoEvent(Event):
    """An event that has always happened."""

    def record(self, stream: Stream) -> None:
        """Nothing."""

    def query(self) -> bool:
        """Always."""
        return True


class NoStream(Stream):
    """A stream that never has anything to do."""

    @property
    def cuda_stream(self) -> int:
        """A handle that nobody follows."""
        return 0x5EAF

    def wait_event(self, event: Event) -> None:
        """Nothing."""


class NoDevice(CudaDevice):
    """A GPU whose streams and events cost nothing; its memory is the host's."""

    torch_device = torch.device("cpu")

    def __init__(self, rank: int) -> None:
        self.uuid = f"none-{rank}"
        self._current = NoStream()

    def activate(self) -> None:
        """Nothing."""

    def watch_captures(self) -> None:
        """Nothing."""

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
        """Never asked: slots are not registered here."""
        raise UnsupportedError("this device wraps no memory")

    def release_cached(self) -> None:
        """See `CudaDevice.release_cached`."""

    def is_capturing(self) -> bool:
        """See `CudaDevice.is_capturing`."""
        return False


def main(words: Sequence[str] = ()) -> None:
    """Time, print, and keep the table. Raises `GateError` when the stub has seen anything but the hops."""
    options = parse(HopOptions(), words)
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
        f"Host cost of one hop, µs (least / median / greatest of {len(whole_us)} blocks of {LOG_HOPS} hops)",
        ("part", "µs", "bar"),
        [
            ("start and wait, all of it", spread(whole_us, 2), ""),
            ("the binding's four calls, the stub in C included", spread(alone_us, 2), ""),
            ("the difference: Python of this package", spread(python_us, 2), f"{BAR_US:g}"),
        ],
        ["Events do nothing here; on a GPU four event calls of CUDA come on top."],
    )
    data = {"whole_us": whole_us, "binding_us": alone_us, "python_us": median(python_us), "bar_us": BAR_US}
    finish("hop", options, [table], data, options.results)


def build_stub(folder: Path) -> Path:
    """The stub as a shared library. Raises `UnsupportedError` without its source or without a compiler."""
    if not STUB.exists():
        raise UnsupportedError(f"{STUB} is missing: this benchmark runs from a checkout")
    library = folder / "libnccl.so.2"
    command = ["cc", "-O2", "-shared", "-fPIC", "-pthread", "-Wl,-soname,libnccl.so.2", "-o", str(library), str(STUB)]
    try:
        subprocess.run(command, check=True)
    except FileNotFoundError:
        raise UnsupportedError("this benchmark compiles a small C library and finds no cc") from None
    return library


def open_pair(binding: Binding) -> list[NcclTransport]:
    """Both ranks of a ring of two, opened in this process."""
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
    """They wait for each other."""
    _on_both(lambda rank: rings[rank].close())


def _on_both(body: Callable[[int], None]) -> None:
    threads = [threading.Thread(target=body, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def _block_us(hop: Callable[[], None], stub: ctypes.CDLL) -> float:
    """Microseconds of one hop, over a block of them; the gate counts what the stub has seen."""
    stub.stub_clear()
    start = time.perf_counter()
    for _ in range(LOG_HOPS):
        hop()
    took_us = (time.perf_counter() - start) / LOG_HOPS * 1e6
    text = ctypes.create_string_buffer(1 << 19)
    stub.stub_log(text, ctypes.c_size_t(len(text)))
    seen = [line.split()[0] for line in text.value.decode().splitlines()]
    called = [name for name in seen if name != "ncclCommGetAsyncError"]  # the supervisor asks beside
    if called != ["ncclGroupStart", "ncclRecv", "ncclSend", "ncclGroupEnd"] * LOG_HOPS:
        raise GateError(f"the stub has not seen {LOG_HOPS} hops but {len(called)} calls: {called[:12]}")
    return took_us


if __name__ == "__main__":
    main(sys.argv[1:])
