"""Opening and ending the peer transport: refusals, abort and drain, and the calls to the CUDA driver."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.distributed import HashStore

from ringattn.errors import RingError, UnsupportedError
from ringattn.observe.flight import FAILED, Flight
from ringattn.planner.cluster import LinkClass
from ringattn.transport.base import Message, Opening
from ringattn.transport.location import Location
from ringattn.transport.peer.driver import (
    OUT_OF_MEMORY,
    AccessDescription,
    AllocationProp,
    Attribute,
    BatchOperation,
    CudaDriver,
    DriverError,
    WordOperation,
)
from ringattn.transport.peer.opening import Facts, refusal, warnings_of
from ringattn.transport.peer.program import PAINTED, push_exchange
from ringattn.transport.peer.transport import Lane, PeerTransport, Watch
from ringattn.transport.rendezvous import open_transport
from tests.contract.processes import Processes
from tests.transport.peer_model.machine import ABORT, DRAIN, EndStep
from tests.transport.peers.sim_driver import SimGpu
from tests.transport.process_rings import meet_peer

GOOD = Facts(version=13000)
HERE = Location("a", "boot/1", 1, 1000, "one")


def over(link: LinkClass) -> Location:
    return replace(HERE, gpu="two", links=(("one", link),))


@pytest.mark.parametrize(
    ("facts", "place", "reason"),
    [
        (GOOD, HERE, None),
        (GOOD, over(LinkClass.NVLINK), None),
        (Facts("no CUDA driver"), HERE, "rank 1: no CUDA driver"),
        (GOOD, replace(HERE, machine="boot/2", host="b"), "no two ranks share a machine"),
        (GOOD, replace(HERE, machine=None), "rank 1 cannot determine which machine it is on (a)"),
        (GOOD, replace(HERE, uid=1001), "different users, 1000 and 1001"),
        (replace(GOOD, version=11080), HERE, "rank 1: the CUDA driver is version 11.8, but 12.0 is required"),
        (replace(GOOD, partition=True), HERE, "rank 1 has an instance of a partitioned GPU"),
        (replace(GOOD, lacks=("stream memory",)), HERE, "rank 1: the GPU lacks stream memory"),
        (GOOD, over(LinkClass.PCIE), "ranks 0 and 1 are connected by PCIe"),
        (GOOD, over(LinkClass.UNKNOWN), "ranks 0 and 1 are connected by unknown"),
    ],
)
def test_ranks_that_copy_engines_cannot_join(facts: Facts, place: Location, reason: str | None) -> None:
    refused = refusal([GOOD, facts], [HERE, place])
    assert refused is None if reason is None else refused is not None and reason in refused


def test_settings_that_cost_time_are_warned_of() -> None:
    assert warnings_of({}, SimGpu().driver) == []
    assert warnings_of({"CUDA_DEVICE_MAX_CONNECTIONS": "8"}, SimGpu().driver) == []
    (slow,) = warnings_of({"CUDA_DEVICE_MAX_CONNECTIONS": "1"}, SimGpu().driver)
    assert "CUDA_DEVICE_MAX_CONNECTIONS=1" in slow
    (shared,) = warnings_of({}, SimGpu(attributes={Attribute.MULTI_PROCESS_SERVER: 1}).driver)
    assert "MPS" in shared


def test_links_matter_only_inside_a_node() -> None:
    # Two nodes of two ranks: no link between the nodes is known, and none is needed.
    places = [replace(HERE, machine=f"boot/{node}", gpu=f"gpu-{node}") for node in (1, 1, 2, 2)]
    assert refusal([GOOD] * 4, places) is None
    places[3] = replace(places[3], gpu="another", links=(("gpu-2", LinkClass.PCIE),))
    assert "ranks 2 and 3 are connected by PCIe" in (refusal([GOOD] * 4, places) or "")


# --- in processes ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def two() -> Iterator[Processes]:
    with Processes(2) as started:
        yield started


def open_with_fault(rank: int, world_size: int, fault: str) -> dict[str, Any]:
    """Open a ring although rank 1 has a fault. Return the error of this rank."""
    gpu = SimGpu(attributes={Attribute.STREAM_MEMORY_OPERATIONS_64: 0} if rank and fault == "memops" else None)
    driver: Any = gpu.driver

    def fails(*arguments: Any) -> Any:
        raise DriverError(f"cu{fault}", 101, "CUDA_ERROR_INVALID_DEVICE", "invalid device ordinal")

    if rank and fault in ("adopt", "register"):
        setattr(driver, fault, fails)
    if rank and fault == "bytes":
        copy = driver.copy
        driver.copy = lambda dst, src, nbytes, stream: copy(dst, src, nbytes - 1, stream)
    try:
        ring = meet_peer(rank, world_size, gpu=gpu)
    except RingError as error:
        return {"kind": type(error).__name__, "message": str(error), "left": driver.leftovers()["registered"]}
    ring.close()
    return {"kind": "", "message": "", "left": 0}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        ("memops", "rank 1: the GPU lacks stream memory operations on 64-bit words"),
        ("register", "rank 1: registering the shared pages: curegister: CUDA_ERROR_INVALID_DEVICE (101)"),
        ("adopt", "rank 1: the memory of rank 0: cuadopt: CUDA_ERROR_INVALID_DEVICE (101)"),
        ("bytes", "rank 0: self-test patterns arrived with differences"),
    ],
)
def test_all_ranks_raise_the_same_refusal(two: Processes, fault: str, reason: str) -> None:
    answers = two.run(open_with_fault, fault)
    assert answers[0]["message"] == answers[1]["message"]
    for answer in answers.values():
        assert answer["kind"] == "UnsupportedError"
        assert reason in answer["message"] and answer["message"].endswith("use transport='nccl' instead")


def open_by_name(rank: int, world_size: int) -> str:
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world_size))
    try:
        open_transport(None, "peer", 20.0)
    except RingError as error:
        return f"{type(error).__name__}: {error}"
    return "opened"


@pytest.mark.slow
def test_processes_without_a_gpu_are_refused_by_name(two: Processes) -> None:
    answers = two.run(open_by_name)
    assert answers[0] == answers[1]
    assert (
        "UnsupportedError: transport='peer' cannot connect these ranks: rank 0: torch finds no CUDA device"
        in answers[0]
    )


def captured(rank: int, world_size: int) -> list[str]:
    gpu = SimGpu()
    ring = meet_peer(rank, world_size, gpu=gpu)
    hop = ring.bind(*_pair(ring))
    messages = []
    gpu.capturing = True
    pair = _pair(ring)
    for call in (hop.start, lambda: ring.exchange(*pair), lambda: ring.allocate(8), lambda: ring.replay(lambda: None)):
        try:
            call()
        except RingError as error:
            messages.append(f"{type(error).__name__}: {error}")
    gpu.capturing = False
    ring.exchange(*pair).wait()  # no part of the refused exchanges has started
    hop.start().wait()
    ring.close()
    return messages


def _pair(ring: Any) -> Any:
    peer, buffers = 1 - ring.rank, torch.zeros(2, 8)
    return [Message(peer, buffers[0], "k")], [Message(peer, buffers[1], "k")]


@pytest.mark.slow
def test_graphs_are_refused(two: Processes) -> None:
    for messages in two.run(captured).values():
        assert len(messages) == 4
        assert all("cannot be captured" in message and "transport='nccl'" in message for message in messages)


class FakeEvent:
    """A fake event that completes after `after` queries since its record. Each query appends `step` to `steps`."""

    def __init__(self, steps: list[EndStep], step: EndStep | None = None, after: int = 0) -> None:
        self.recorded, self._steps, self._step, self._left = False, steps, step, after

    def record(self, stream: object) -> None:
        self.recorded = True

    def query(self) -> bool:
        if self._step is not None:
            self._steps.append(self._step)
        self._left -= self.recorded
        return not self.recorded or self._left < 0


class Rank:
    """The real `Lane` and `Watch` of a rank, with a fake group, GPU and driver that record the steps of its end."""

    def __init__(self, driver: Any = None) -> None:
        self.steps: list[EndStep] = []
        words = SimpleNamespace(store=self._store, load=lambda word, peer=0: 0)
        page = SimpleNamespace(segment=SimpleNamespace(address=0, nbytes=64), load=lambda word, peer=0: 0)
        self.group: Any = SimpleNamespace(
            opening=Opening(HashStore(), 0, 2, 1.0), rank=0, ranks=(0, 1), own_page=words, pages={0: page, 1: page},
            fail=self._poison, trouble=self._check,
        )  # fmt: skip
        self.gpu: Any = SimpleNamespace(
            activate=lambda: None, new_stream=lambda: SimpleNamespace(cuda_stream=0, wait_event=lambda event: None),
            current_stream=lambda: None, new_event=lambda: FakeEvent(self.steps, EndStep.AWAIT_COMPUTED),
        )  # fmt: skip
        driver = driver or SimpleNamespace(attribute=lambda which: 0, register=lambda address, nbytes: 0)
        self.lane = Lane(driver, self.gpu, self.group)
        self.lane.imports.drop = lambda: self.steps.append(EndStep.UNMAP)  # type: ignore[method-assign]
        self.watch = Watch(self.group, self.lane, self.gpu, lambda why: None)
        self.poisoning = threading.Event()
        self.poisoning.set()

    def _store(self, word: int, value: int, peer: int = 0) -> None:
        assert value == PAINTED
        self.steps.append(EndStep.PAINT)

    def _poison(self, error: BaseException) -> None:
        self.poisoning.wait(10.0)
        self.steps.append(EndStep.POISON)

    def _check(self, awaited: object = ()) -> None:
        self.steps.append(EndStep.CHECK)

    @property
    def order(self) -> list[EndStep]:
        """The recorded steps, without immediate repetitions."""
        return [step for n, step in enumerate(self.steps) if n == 0 or self.steps[n - 1] is not step]


def test_an_abort_poisons_then_paints_until_the_lane_is_empty_then_unmaps() -> None:
    rank = Rank()
    rank.lane.newest = FakeEvent(rank.steps, after=3)
    rank.lane.newest.record(None)
    rank.watch.fail(RingError("broken"))
    assert rank.watch.ended.wait(5.0)
    assert rank.order == list(ABORT)
    # The words of two kinds on two pages are painted once, and again after each of the three queries that find pending
    # work.
    assert rank.steps.count(EndStep.PAINT) == 4 * (1 + 3)


def test_a_drain_checks_for_poison_after_the_computation() -> None:
    rank = Rank()
    done = FakeEvent(rank.steps, EndStep.AWAIT_DONE, after=2)
    done.record(None)
    rank.watch.handles.append(SimpleNamespace(done=done))  # type: ignore[arg-type]
    transport: Any = object.__new__(PeerTransport)
    transport.rank, transport.group, transport.gpu, transport.watch = 0, rank.group, rank.gpu, rank.watch
    transport.check, transport.order = lambda: None, SimpleNamespace(passed=lambda: True)
    transport.drain()
    assert rank.order == list(DRAIN)


def test_an_interrupted_start_is_painted_until_its_operations_have_run() -> None:
    batches: list[object] = []

    def operate(operations: object, stream: int) -> None:
        batches.append(operations)
        if len(batches) == 2:
            raise DriverError("cuStreamBatchMemOp", 1, "CUDA_ERROR_INVALID_VALUE", "an argument is wrong")

    driver = SimpleNamespace(attribute=lambda which: 0, register=lambda address, nbytes: 0, operate=operate)
    rank = Rank(driver)
    program = push_exchange(0, [], [1])
    without_log = program.start[1:]
    hop: Any = SimpleNamespace(program=SimpleNamespace(start=without_log, counts=()), sends=[], recvs=[], unstaged=[])
    done = FakeEvent(rank.steps, after=2)
    rank.lane._operation = lambda op: op  # type: ignore[assignment,method-assign]
    with pytest.raises(DriverError):
        rank.lane.start(hop, FakeEvent(rank.steps), done, lambda: None)
    rank.watch.fail(RingError("broken"))
    assert rank.watch.ended.wait(5.0)
    assert done.recorded and rank.order == list(ABORT)
    assert rank.steps.count(EndStep.PAINT) == 4 * (1 + 2)


def test_no_caller_gets_the_error_before_every_page_is_poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Watch, "stop_s", 0.01)
    rank = Rank()
    rank.poisoning.clear()
    failing = threading.Thread(target=rank.watch.fail, args=(RingError("broken"),))
    steps_at_error: list[list[EndStep]] = []

    def caller() -> None:
        with pytest.raises(RingError):
            rank.watch.raise_failure()
        steps_at_error.append(list(rank.steps))

    failing.start()
    while not rank.watch._first.locked():
        pass
    calling = threading.Thread(target=caller)
    calling.start()
    calling.join(0.1)
    assert not steps_at_error
    rank.poisoning.set()
    calling.join(10.0)
    failing.join(10.0)
    assert EndStep.POISON in steps_at_error[0]


def completed_exchange(rank: Rank) -> Any:
    """Add an exchange that has completed, and that the caller has waited for."""
    done = FakeEvent([])
    done.record(None)
    handle = SimpleNamespace(
        ready=FakeEvent([]), done=done, waited=True, flight=Flight(0, 0, ()), release=lambda: None
    )  # fmt: skip
    rank.watch.handles.append(handle)  # type: ignore[arg-type]
    return handle


def test_an_exchange_pending_at_the_failure_stays_failed_after_the_abort() -> None:
    rank = Rank()
    handle = completed_exchange(rank)
    rank.watch.fail(RingError("broken"))
    assert rank.watch.ended.wait(5.0)
    rank.watch.tick()
    assert not rank.watch.handles and handle.flight.state == FAILED


def test_all_events_but_the_newest_are_reused() -> None:
    # The newest event is kept, because it shows whether the lane is empty.
    rank = Rank()
    older, newest = completed_exchange(rank), completed_exchange(rank)
    rank.lane.newest = newest.done
    rank.watch.tick()
    assert list(rank.watch.free) == [(older.ready, older.done)]


COMPILER = shutil.which("cc") or shutil.which("gcc")
SOURCE = Path(__file__).with_name("peers") / "cuda.c"
TWO_MIB = 2 << 20


@pytest.mark.parametrize(
    ("struct", "size", "offsets"),
    [
        (AllocationProp, 32, {"location_type": 8, "win32": 16, "compression": 24, "usage": 26, "reserved": 28}),
        (AccessDescription, 12, {"location_id": 4, "flags": 8}),
        (BatchOperation, 48, {"operation": 0, "address": 8, "value": 16, "flags": 24, "alias": 32}),
    ],
)
def test_structs_have_the_layout_of_the_header(
    struct: type[ctypes.Structure], size: int, offsets: dict[str, int]
) -> None:
    assert ctypes.sizeof(struct) == size
    assert {name: getattr(struct, name).offset for name in offsets} == offsets


class Stub:
    """The loaded stub of libcuda."""

    def __init__(self, path: str) -> None:
        self.path, self._library = path, ctypes.CDLL(path)
        self._library.stub_log.restype = ctypes.c_char_p

    def lines(self) -> list[str]:
        """Return the calls since the previous call of `lines`."""
        text = self._library.stub_log().decode().splitlines()
        self._library.stub_clear()
        return text

    def version(self, version: int) -> None:
        self._library.stub_version(version)

    def fail(self, code: int) -> None:
        """Let the next call of a function that can fail return the error `code`."""
        self._library.stub_fail(code)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    if COMPILER is None:
        pytest.skip("needs a C compiler")
    library = tmp_path_factory.mktemp("cuda") / "libcuda_stub.so"
    subprocess.run([COMPILER, "-shared", "-fPIC", "-D_GNU_SOURCE", "-o", str(library), str(SOURCE)], check=True)
    return str(library)


@pytest.fixture
def stub(path: str) -> Iterator[Stub]:
    loaded = Stub(path)
    loaded.lines()
    yield loaded
    loaded.version(13000)


def test_memory_is_created_mapped_exported_and_released(stub: Stub) -> None:
    driver = CudaDriver(3, stub.path)
    assert driver.version == 13000 and driver.granularity() == TWO_MIB
    handle = driver.create(TWO_MIB)
    address = driver.map(handle, TWO_MIB)
    fd = driver.export(handle)
    assert not os.get_inheritable(fd)
    assert driver.adopt(fd) == 0xAABB
    os.close(fd)
    driver.unmap(address, TWO_MIB)
    driver.release(handle)
    assert stub.lines() == [
        "granularity 1 1 1 13 1",
        f"create {TWO_MIB} 1 1 1 13 0 0",
        f"reserve {TWO_MIB} 0 0 0",
        f"map 7f0000000000 {TWO_MIB} 0 1122334455667788 0",
        f"access 7f0000000000 {TWO_MIB} 1 13 3 1",
        "export 1122334455667788 1 0",
        f"import {fd} 1",
        f"unmap 7f0000000000 {TWO_MIB}",
        f"unreserve 7f0000000000 {TWO_MIB}",
        "release 1122334455667788",
    ]


def test_copies_and_word_operations_are_enqueued_on_streams(stub: Stub) -> None:
    driver = CudaDriver(0, stub.path)
    assert driver.register(4096, 8192) == 8192
    driver.unregister(4096)
    driver.copy(0x7F0000000001, 0x7F0000000002, 5 << 32, 0x55)
    driver.operate(
        [WordOperation(False, 1 << 60, 1 << 62), WordOperation(True, 8, 9), WordOperation(True, 16, 7, True)], 5
    )
    driver.operate([WordOperation(False, 8, 1)] * 300, 5)
    assert stub.lines() == [
        "register 8192 3", "address 0", "unregister",
        f"copy 7f0000000001 7f0000000002 {5 << 32} 55",
        "batch 5 3 0", "op 5 1000000000000000 4000000000000000 0", "op 4 8 9 0", f"op 4 10 7 {1 << 30}",
        "batch 5 255 0", *3 * ["op 5 8 1 0"], "batch 5 45 0", *3 * ["op 5 8 1 0"],
    ]  # fmt: skip


def test_attributes_of_a_device_and_whether_it_is_a_partition(stub: Stub) -> None:
    driver = CudaDriver(3, stub.path)
    assert driver.attribute(Attribute.STREAM_MEMORY_OPERATIONS_64) == 122
    assert stub.lines() == ["attribute 122 13"]
    assert driver.is_partition()  # the stub returns UUID 7 for the whole GPU and 13 for this device
    assert not CudaDriver(-3, stub.path).is_partition()


def test_a_failed_call_is_named_and_undone(stub: Stub) -> None:
    driver = CudaDriver(0, stub.path)
    stub.fail(OUT_OF_MEMORY)
    with pytest.raises(DriverError, match=r"cuMemCreate: CUDA_ERROR_OUT_OF_MEMORY \(2\): words") as caught:
        driver.create(TWO_MIB)
    assert caught.value.code == OUT_OF_MEMORY
    stub.fail(101)
    with pytest.raises(DriverError, match="cuMemSetAccess"):
        driver.map(5, TWO_MIB)
    assert stub.lines()[-2:] == [f"unmap 7f0000000000 {TWO_MIB}", f"unreserve 7f0000000000 {TWO_MIB}"]


def test_no_driver_and_an_old_one_are_refused(stub: Stub) -> None:
    with pytest.raises(UnsupportedError, match="no CUDA driver"):
        CudaDriver(0, "libno_such_cuda.so.1")
    stub.version(11080)
    with pytest.raises(UnsupportedError, match=r"version 11\.8, but 12\.0 is required"):
        CudaDriver(0, stub.path)
