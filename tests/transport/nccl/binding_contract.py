"""The contract of all bindings to NCCL, checked with a stub of libnccl.

Guarantees: a check uses only the `Binding` protocol, and leaves no scripted answer pending in the stub. What it expects
depends on the binding only through the binding's name and capabilities.
Not covered: GPUs, the real library.
"""

from __future__ import annotations

import gc
import threading
import time
import traceback
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import pytest

from ringattn.errors import InputError
from ringattn.transport.nccl.binding import Binding, Capability, CommConfig, MissingError, NcclError, Status
from tests.transport.nccl.stub import Stub

BLOCKING = CommConfig(blocking=True)
FAILURES = [status for status in (*Status, 99) if status not in (Status.SUCCESS, Status.IN_PROGRESS)]


class Bench(NamedTuple):
    """The stub library at `path`, and a binding to it. `make` creates another binding."""

    stub: Stub
    path: str
    make: Callable[[], Binding]
    binding: Binding

    def open(self, world_size: int = 1, rank: int = 0) -> int:
        """Open a blocking communicator, and clear the log."""
        comm = self.binding.init(world_size, self.binding.unique_id(), rank, BLOCKING)
        self.stub.clear()
        return comm


Check = Callable[[Bench], None]


def failure(call: Callable[[], object]) -> NcclError:
    """Return the `NcclError` that `call` must raise."""
    with pytest.raises(NcclError) as caught:
        call()
    return caught.value


def refusal(call: Callable[[], object], kind: type[Exception]) -> str:
    """Return the message of the error of type `kind` that `call` must raise."""
    with pytest.raises(kind) as caught:
        call()
    return str(caught.value)


# --- checks of every binding -----------------------------------------------------------------------------------------


def library_is_named(bench: Bench) -> None:
    assert (bench.binding.path, bench.binding.version) == (bench.path, bench.stub.version())


def unique_id_arrives_by_value(bench: Bench) -> None:
    unique_id = bench.binding.unique_id()
    assert len(unique_id) == 128 and 0 in unique_id[:-1] and max(unique_id) > 127
    assert unique_id != bench.binding.unique_id()
    bench.binding.init(8, unique_id, 5, BLOCKING)
    assert bench.stub.calls("ncclCommInitRankConfig")[0].split()[1:4] == ["8", unique_id.hex(), "5"]


def unique_id_of_another_length_is_refused(bench: Bench) -> None:
    for length in (0, 127, 129):
        text = refusal(lambda length=length: bench.binding.init(1, bytes(length), 0, BLOCKING), InputError)
        assert f"got {length}" in text
    assert bench.stub.log() == []


def every_value_of_a_transfer_arrives(bench: Bench) -> None:
    comm = bench.open(world_size=8)
    pointer, nbytes, stream = 0x7F1234567001, 2**33 + 5, 0x55D0DEADBEEF
    assert bench.binding.group_start() == 0
    assert bench.binding.send(pointer, nbytes, 6, comm, stream) == 0
    assert bench.binding.recv(pointer + 2, nbytes - 1, 7, comm, 0) == 0
    assert bench.binding.group_end() == 0
    assert bench.stub.log() == [
        "ncclGroupStart",
        f"ncclSend {pointer:#x} {nbytes} 1 6 {comm:#x} {stream:#x}",  # 1 is ncclUint8
        f"ncclRecv {pointer + 2:#x} {nbytes - 1} 1 7 {comm:#x} (nil)",
        "ncclGroupEnd",
    ]


def calls_of_a_hop_return_the_bare_status(bench: Bench) -> None:
    comm = bench.open(world_size=2)
    hop = {
        "ncclGroupStart": lambda: bench.binding.group_start(),
        "ncclSend": lambda: bench.binding.send(64, 1, 1, comm, 0),
        "ncclRecv": lambda: bench.binding.recv(64, 1, 1, comm, 0),
        "ncclGroupEnd": lambda: bench.binding.group_end(),
    }
    for status in (*FAILURES, Status.IN_PROGRESS):
        for function, call in hop.items():
            bench.binding.group_start()
            bench.stub.answer(function, 1, status)
            assert call() == status, (function, status)
            bench.binding.group_end()
    assert [call() for call in hop.values()] == [0, 0, 0, 0]


def failures_are_typed(bench: Bench) -> None:
    for status in FAILURES:
        for function, call in {
            "ncclGetUniqueId": lambda: bench.binding.unique_id(),
            "ncclCommInitRankConfig": lambda: bench.binding.init(1, bytes(128), 0, BLOCKING),
        }.items():
            bench.stub.answer(function, 1, status)
            error = failure(call)
            assert (error.function, error.status) == (function, status)
            if Capability.LAST_ERROR in bench.binding.capabilities:
                assert error.text == f"scripted end of {function}"
            elif bench.binding.name == "cupy" and status <= Status.REMOTE_ERROR:
                assert error.text.startswith("NCCL_ERROR_")


def failing_init_leaves_no_group_open(bench: Bench) -> None:
    bench.stub.answer("ncclCommInitRankConfig", 1, Status.UNHANDLED_CUDA_ERROR)
    failure(lambda: bench.binding.init(1, bytes(128), 0, BLOCKING))
    assert bench.stub.calls("ncclGroupEnd") == ["ncclGroupEnd"] * 2
    assert bench.binding.group_end() == Status.INVALID_USAGE
    assert failure(lambda: bench.binding.init(2, bytes(128), 2, BLOCKING)).status == Status.INVALID_ARGUMENT
    assert bench.binding.group_end() == Status.INVALID_USAGE


def asynchronous_errors_are_returned(bench: Bench) -> None:
    comm = bench.open()
    assert bench.binding.state(comm) == 0
    for status in (Status.REMOTE_ERROR, Status.IN_PROGRESS, Status.TIMEOUT):
        bench.stub.set_async(comm, status)
        assert bench.binding.state(comm) == status
    bench.stub.answer("ncclCommGetAsyncError", 1, Status.SYSTEM_ERROR)
    assert bench.binding.state(comm) == Status.SYSTEM_ERROR


def dead_handles_are_refused(bench: Bench) -> None:
    comm, aborted = bench.open(), bench.open()
    bench.binding.destroy(comm)
    error = failure(lambda: bench.binding.destroy(comm))
    assert error.status == Status.INVALID_ARGUMENT and f"{comm:#x}" in error.text
    bench.binding.abort(comm)
    bench.binding.abort(aborted)
    bench.binding.abort(aborted)
    bench.binding.abort(0)
    assert failure(lambda: bench.binding.destroy(aborted)).status == Status.INVALID_ARGUMENT
    assert bench.binding.state(comm) == bench.binding.state(0) == Status.INVALID_ARGUMENT
    assert bench.stub.log() == [f"ncclCommDestroy {comm:#x}", f"ncclCommAbort {aborted:#x}"]


def two_threads_abort_once(bench: Bench) -> None:
    comm = bench.open()
    bench.stub.block("ncclCommAbort")
    first = threading.Thread(target=bench.binding.abort, args=(comm,))
    first.start()
    wait_until(bench.stub.is_inside)
    bench.binding.abort(comm)
    bench.stub.release()
    first.join()
    assert bench.stub.log() == [f"ncclCommAbort {comm:#x}"]


def nothing_is_destroyed_at_collection(bench: Bench) -> None:
    binding = bench.make()
    comms = [binding.init(1, bytes(128), 0, BLOCKING) for _ in range(2)]
    binding.destroy(comms.pop())
    bench.stub.clear()
    del binding
    gc.collect()
    assert bench.stub.log() == []


def other_threads_run_during_a_call(bench: Bench) -> None:
    comm, doomed, healthy = bench.open(world_size=2), bench.open(), bench.open()
    for function, call in {
        "ncclGetUniqueId": lambda: bench.binding.unique_id(),
        "ncclCommInitRankConfig": lambda: bench.binding.init(1, bytes(128), 0, BLOCKING),
        "ncclCommGetAsyncError": lambda: bench.binding.state(comm),
        "ncclGroupStart": lambda: bench.binding.group_start(),
        "ncclSend": lambda: bench.binding.send(64, 1, 1, comm, 0),
        "ncclRecv": lambda: bench.binding.recv(64, 1, 1, comm, 0),
        "ncclGroupEnd": lambda: (bench.binding.group_start(), bench.binding.group_end())[1],
        "ncclCommAbort": lambda: bench.binding.abort(doomed),
        "ncclCommDestroy": lambda: bench.binding.destroy(healthy),
    }.items():
        answers: list[object] = []
        bench.stub.block(function)
        thread = threading.Thread(target=lambda call=call, answers=answers: answers.append(call()))
        thread.start()
        wait_until(bench.stub.is_inside)  # if the call held the GIL, this would run only after the call has timed out
        bench.stub.release()
        thread.join()
        assert answers and answers[0] != Status.TIMEOUT, function


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 10.0
    while not condition():
        assert time.monotonic() < deadline, "the call never reached the stub"
        time.sleep(0.001)


def missing_capabilities_are_refused_by_name(bench: Bench) -> None:
    binding, comm, plain = bench.binding, bench.open(), BLOCKING
    uses: dict[Capability, list[Callable[[], object]]] = {
        Capability.NONBLOCKING: [lambda: binding.init(1, bytes(128), 0, plain._replace(blocking=False))],
        Capability.MAX_CTAS: [lambda: binding.init(1, bytes(128), 0, plain._replace(max_ctas=2))],
        Capability.CGA: [lambda: binding.init(1, bytes(128), 0, plain._replace(cga_cluster_size=1))],
        Capability.NET_CHANNELS: [lambda: binding.init(1, bytes(128), 0, plain._replace(channels_per_net_peer=1))],
        Capability.NAME: [lambda: binding.init(1, bytes(128), 0, plain._replace(name="ring"))],
        Capability.FINALIZE: [lambda: binding.finalize(comm)],
        Capability.MEMORY: [lambda: binding.mem_alloc(64), lambda: binding.mem_free(64)],
        Capability.REGISTER: [lambda: binding.register(comm, 64, 64), lambda: binding.deregister(comm, 64)],
    }
    for capability, calls in uses.items():
        if capability not in binding.capabilities:
            for call in calls:
                assert refusal(call, MissingError).startswith(f"{capability.value} ")
    if Capability.LAST_ERROR not in binding.capabilities:
        binding.group_end()
        assert binding.last_error(comm) == binding.last_error(0) == ""
    assert bench.stub.log() in ([], ["ncclGroupEnd"])


COMMON: tuple[Check, ...] = (
    library_is_named,
    unique_id_arrives_by_value,
    unique_id_of_another_length_is_refused,
    every_value_of_a_transfer_arrives,
    calls_of_a_hop_return_the_bare_status,
    failures_are_typed,
    failing_init_leaves_no_group_open,
    asynchronous_errors_are_returned,
    dead_handles_are_refused,
    two_threads_abort_once,
    nothing_is_destroyed_at_collection,
    other_threads_run_during_a_call,
    missing_capabilities_are_refused_by_name,
)


def tracebacks(checks: Iterable[Callable[..., None]], *arguments: Any) -> dict[str, str | None]:
    """Call each check with `arguments`. Return, by name, the traceback of its exception, or None if it passed."""
    tracebacks_by_name: dict[str, str | None] = {}
    for check in checks:
        try:
            check(*arguments)
            tracebacks_by_name[check.__name__] = None
        except Exception:
            tracebacks_by_name[check.__name__] = traceback.format_exc()
    return tracebacks_by_name
