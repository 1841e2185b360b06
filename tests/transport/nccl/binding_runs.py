"""Run the contract of one binding, and the checks of features that only one binding has.

`python -m tests.transport.nccl.binding_runs RUN LIBRARY EXIT_LOG` runs the checks `RUNS[RUN]` with the stub LIBRARY. It
prints a JSON object with the traceback of each check, or null for a check that passed. It leaves communicators open,
and writes to EXIT_LOG the library calls that are made while the interpreter exits. Each run needs a separate process,
because neither libnccl nor cupy can be unloaded.
"""

from __future__ import annotations

import json
import sys
from functools import wraps
from pathlib import Path

from ringattn.transport.nccl.binding import FLOOR_VERSION, Capability, CommConfig, Status
from ringattn.transport.nccl.ctypes_binding import CtypesBinding
from ringattn.transport.nccl.cupy_binding import CupyBinding
from ringattn.transport.nccl.library import load_library
from tests.transport.nccl.binding_contract import BLOCKING, COMMON, Bench, Check, failure, tracebacks
from tests.transport.nccl.stub import Stub

OPTIONAL = frozenset(
    {
        Capability.NAME,
        Capability.NET_CHANNELS,
        Capability.MEMORY,
        Capability.REGISTER,
        Capability.FINALIZE,
        Capability.LAST_ERROR,
    }
)
NONBLOCKING = CommConfig(blocking=False)
UNDEFINED = -(2**31)


# --- ctypes ----------------------------------------------------------------------------------------------------------


def the_config_arrives(bench: Bench) -> None:
    every = CommConfig(blocking=False, max_ctas=4, name="ring é", cga_cluster_size=1, channels_per_net_peer=3)
    bench.binding.init(2, bytes(128), 0, every)
    bench.binding.init(2, bytes(128), 0, BLOCKING)
    form = f"size=80 version=22800 blocking={{}} cga={{}} minCTAs={UNDEFINED} maxCTAs={{}} "
    form += f"netName=- commName={{}} net={{}} sched={UNDEFINED}"
    first, second = (line.split(" ", 4)[4] for line in bench.stub.calls("ncclCommInitRankConfig"))
    assert first == form.format(0, 1, 4, "ring é", 3)
    assert second == form.format(1, UNDEFINED, UNDEFINED, "-", UNDEFINED)


def in_progress_is_not_an_error(bench: Bench) -> None:
    bench.stub.set_polls(2)
    comm = bench.binding.init(2, bytes(128), 0, NONBLOCKING)
    waiting = [Status.IN_PROGRESS, Status.IN_PROGRESS, Status.SUCCESS]
    assert [bench.binding.state(comm) for _ in waiting] == waiting
    bench.binding.group_start()
    bench.binding.send(64, 1, 1, comm, 0)
    assert bench.binding.group_end() == Status.IN_PROGRESS
    assert bench.binding.send(64, 1, 1, comm, 0) == Status.INVALID_ARGUMENT  # the group is still in progress
    assert [bench.binding.state(comm) for _ in waiting] == waiting
    bench.binding.finalize(comm)
    assert [bench.binding.state(comm) for _ in waiting] == waiting
    bench.binding.destroy(comm)
    bench.stub.set_polls(0)


def memory_is_registered_and_freed(bench: Bench) -> None:
    comm = bench.open()
    pointer = bench.binding.mem_alloc(4097)
    handle = bench.binding.register(comm, pointer, 4097)
    bench.binding.deregister(comm, handle)
    bench.binding.deregister(comm, 0)
    bench.binding.mem_free(pointer)
    assert bench.stub.log() == [
        "ncclMemAlloc 4097",
        f"ncclCommRegister {comm:#x} {pointer:#x} 4097",
        f"ncclCommDeregister {comm:#x} {handle:#x}",
        f"ncclCommDeregister {comm:#x} (nil)",
        f"ncclMemFree {pointer:#x}",
    ]
    for call in (lambda: bench.binding.mem_free(pointer), lambda: bench.binding.deregister(comm, handle)):
        assert failure(call).status == Status.INVALID_USAGE
    bench.stub.answer("ncclMemAlloc", 1, Status.UNHANDLED_CUDA_ERROR)
    assert failure(lambda: bench.binding.mem_alloc(1)).text == "scripted end of ncclMemAlloc"


def dead_handles_are_not_passed_to_the_library(bench: Bench) -> None:
    comm = bench.open()
    bench.binding.abort(comm)
    bench.stub.clear()
    for name, call in {
        "ncclCommFinalize": lambda: bench.binding.finalize(comm),
        "ncclCommRegister": lambda: bench.binding.register(comm, 64, 64),
        "ncclCommDeregister": lambda: bench.binding.deregister(comm, 64),
    }.items():
        error = failure(call)
        assert (error.function, error.status) == (name, Status.INVALID_ARGUMENT)
    assert bench.stub.log() == []


def the_last_error_is_returned(bench: Bench) -> None:
    comm = bench.open()
    bench.stub.answer("ncclSend", 1, Status.REMOTE_ERROR)
    assert bench.binding.last_error(comm) == ""
    bench.binding.send(64, 1, 0, comm, 0)
    assert bench.binding.last_error(comm) == bench.binding.last_error(0) == "scripted end of ncclSend"
    bench.binding.abort(comm)
    assert bench.binding.last_error(comm) == "scripted end of ncclSend"


# --- cupy ------------------------------------------------------------------------------------------------------------


def failing_init_destroys_nothing(bench: Bench) -> None:
    # cupy treats a communicator that is in progress as a failure, and would destroy it with its Python object.
    bench.stub.answer("ncclCommInitRankConfig", 1, Status.IN_PROGRESS)
    assert failure(lambda: bench.binding.init(1, bytes(128), 0, BLOCKING)).status == Status.IN_PROGRESS
    assert len(bench.stub.calls("ncclCommAbort")) == 1
    assert bench.stub.calls("ncclCommDestroy") == []


def dead_handles_are_refused_in_a_hop(bench: Bench) -> None:
    comm = bench.open()
    bench.binding.abort(comm)
    assert bench.binding.send(64, 1, 0, comm, 0) == bench.binding.recv(64, 1, 0, comm, 0) == Status.INVALID_ARGUMENT
    assert bench.stub.log() == [f"ncclCommAbort {comm:#x}"]


RUNS: dict[str, tuple[Check, ...]] = {
    "ctypes": (
        *COMMON,
        the_config_arrives,
        in_progress_is_not_an_error,
        memory_is_registered_and_freed,
        dead_handles_are_not_passed_to_the_library,
        the_last_error_is_returned,
    ),
    "ctypes_poor": COMMON,
    "cupy": (*COMMON, failing_init_destroys_nothing, dead_handles_are_refused_in_a_hop),
}
"""The checks of each run. `ctypes_poor` uses a library of the oldest version without the functions of `OPTIONAL`."""
MISSING = {"ctypes": frozenset(), "ctypes_poor": OPTIONAL, "cupy": frozenset(Capability)}
"""The capabilities that the binding of a run lacks."""

left_open: Bench | None = None
"""Keeps the binding alive, with an open communicator, as in a program that ends without close()."""


def with_a_clean_log(check: Check) -> Check:
    """Return `check` with one more condition: the stub logged no call that makes the library access freed memory."""

    @wraps(check)
    def checked(bench: Bench) -> None:
        bench.stub.clear()
        check(bench)
        assert not [line for line in bench.stub.log() if line.startswith("FATAL")], bench.stub.log()

    return checked


def main(name: str, path: str, exit_log: str) -> None:
    """Run the checks of the run `name`. The docstring of the module describes the arguments."""
    global left_open
    if name == "ctypes_poor":
        Stub(path).set_version(FLOOR_VERSION)
    make = (lambda: CupyBinding(path)) if name == "cupy" else (lambda: CtypesBinding(load_library(path)))
    left_open = bench = Bench(Stub(path), path, make, make())

    def capabilities_are_those_of_the_library(bench: Bench) -> None:
        assert frozenset(Capability) - bench.binding.capabilities == MISSING[name]

    print(json.dumps(tracebacks(map(with_a_clean_log, (capabilities_are_those_of_the_library, *RUNS[name])), bench)))
    bench.open()
    bench.stub.log_to(Path(exit_log))


if __name__ == "__main__":
    main(*sys.argv[1:])
