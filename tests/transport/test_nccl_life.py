"""The life of an NCCL ring over simulated GPUs: opening, closing, threads, and failures that must be reported.

Not covered: the contract of all transports (`test_contract.py`), scripted faults (`test_nccl_faults.py`).
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.distributed import HashStore

from ringattn import Ring
from ringattn.errors import ClosedError, DeadlineError, PeerLostError, RingError
from ringattn.launch.doctor.flight import divergences, read_records
from ringattn.transport.base import Opening
from ringattn.transport.deadline import Deadline
from ringattn.transport.nccl import supervisor, transport
from ringattn.transport.nccl.bootstrap import StoreAllGather
from ringattn.transport.nccl.communicator import State
from ringattn.transport.nccl.transport import NcclTransport
from tests.transport.attribution import named_at_fault
from tests.transport.nccl_rings import attend, on_gpus, on_rings, open_on, results, ring_error, ring_hop
from tests.transport.simulated.library import SimLibrary
from tests.transport.simulated.world import Died, SimWorld, Stall
from tests.transport.threads import on_each_rank

# --- life ------------------------------------------------------------------------------------------------------------


def test_calls_that_were_compared_are_not_compared_again() -> None:
    world = SimWorld(2)

    def body(ring: Ring) -> list[int]:
        counts = []
        for _ in range(4):
            ring.all_reduce([torch.ones(3)])
            counts.append(ring.transport._all_gather._number)  # type: ignore[attr-defined]
        ring.barrier()
        ring.barrier()
        return [*counts, ring.transport._all_gather._number]  # type: ignore[attr-defined]

    world = SimWorld(2, any_memory=True)
    assert results(on_rings(world, body)) == [[1, 1, 1, 1, 3]] * 2


def test_close_does_not_raise_a_failure_that_a_launch_has_raised() -> None:
    def body(ring: NcclTransport) -> str:
        slots = ring.allocate(1024).view(2, 512)

        def launch(calls: Any, stream: int, watch: Callable[[], None]) -> None:
            ring.supervisor.fail(PeerLostError("rank 1 is gone"))
            watch()

        ring.communicator.launch = launch  # type: ignore[method-assign]
        with pytest.raises(PeerLostError, match="rank 1 is gone"):
            ring_hop(ring, slots[0], slots[1]).start()
        with pytest.raises(ClosedError):
            ring.check()
        return "failed once"  # `on_gpus` closes the ring

    assert results(on_gpus(SimWorld(2, any_memory=True), body)) == ["failed once"] * 2


def test_a_second_thread_is_refused() -> None:
    world = SimWorld(2, faults=[Stall(0, "send", 2)], limit_s=10.0)

    def body(ring: NcclTransport) -> None:
        slots = ring.allocate(1024).view(2, 512)
        hop = ring_hop(ring, slots[0], slots[1])
        if ring.rank == 0:
            threading.Timer(0.4, lambda: world.release(0)).start()
            threading.Thread(target=lambda: time.sleep(0.2) or refused.append(ring_error(hop.start))).start()
        hop.start().wait()
        ring.all_gather_bytes(b"")

    refused: list[str] = []
    results(on_gpus(world, body))
    assert len(refused) == 1 and "two threads use one ring at once" in refused[0]


def test_close_of_one_rank_aborts_after_its_linger_time() -> None:
    world = SimWorld(2, any_memory=True)
    store, seconds, messages = HashStore(), {}, []

    def run_rank(rank: int) -> None:
        ring = open_on(world, rank, store.clone())
        if rank == 0:
            start = time.monotonic()
            ring.close(linger_s=0.5)
            ring.close()
            seconds[rank] = time.monotonic() - start
            assert ring.communicator.state is State.FAILED  # aborted: a destroy would wait for rank 1
        else:
            time.sleep(1.5)
            slots = torch.zeros(2, 8, dtype=torch.uint8)
            messages.append(ring_error(lambda: ring_hop(ring, slots[0], slots[1]).start().wait()))
            ring.abort(ValueError("done"))

    assert on_each_rank(2, run_rank) == [None, None]
    assert 0.4 < seconds[0] < 2.0
    assert "rank 0 closed its ring" in messages[0] and named_at_fault(messages[0]) == set()


def test_close_raises_an_unreported_failure() -> None:
    world = SimWorld(2, lazy=True, any_memory=True)

    def body(ring: NcclTransport) -> None:
        if ring.rank == 0:
            slots = torch.zeros(2, 8, dtype=torch.uint8)
            ring_hop(ring, slots[0], slots[1]).start()  # never waited for
            time.sleep(1.2)
            with pytest.raises(DeadlineError, match="no answer from ranks"):
                ring.close()
            with pytest.raises(ClosedError):
                ring.all_gather_bytes(b"")
        else:
            time.sleep(1.2)

    on_gpus(world, body, timeout_s=0.5)


def test_a_missing_rank_is_named_at_opening() -> None:
    world = SimWorld(3)
    store = HashStore()
    errors = on_each_rank(3, lambda rank: open_on(world, rank, store.clone(), timeout_s=0.6) if rank != 1 else None)
    for error in (errors[0], errors[2]):
        assert isinstance(error, RingError) and "ranks [1] did not arrive" in str(error)
        assert named_at_fault(str(error)) <= {1}


def test_a_rank_that_dies_while_opening_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    world, init = SimWorld(3), SimLibrary.init

    def init_or_die(self: SimLibrary, world_size: int, unique_id: bytes, rank: int, config: Any) -> int:
        if rank == 1:
            world.dead.add(1)
            raise Died("rank 1 died")
        return init(self, world_size, unique_id, rank, config)

    monkeypatch.setattr(SimLibrary, "init", init_or_die)
    outcomes = on_gpus(world, lambda ring: None, timeout_s=1.0)
    for rank in (0, 2):
        assert isinstance(outcomes[rank].error, RingError) and named_at_fault(str(outcomes[rank].error)) == {1}
        assert outcomes[rank].ended_s - outcomes[rank].began_s < 3.0


# --- failures that must be reported ----------------------------------------------------------------------------------


def test_different_calls_of_equal_sizes_are_detected() -> None:
    # Both calls were compared when the ranks first made them, and their messages have equal sizes. So no exchange hangs
    # or fails when rank 1 swaps them.
    world = SimWorld(3)

    def body(ring: Ring) -> None:
        seq = ring.sequence(24)
        x = seq.shard(torch.ones(1, 24, 2, 8))
        for n in range(60):
            odd = n > 2 and ring.rank == 1
            ring.attention(x, x, x, seq, causal=True, scale=0.5 if n % 2 == odd else 0.25)
            time.sleep(0.05)

    outcomes = on_rings(world, body, ring={"engine": "plain"})
    errors = [str(outcome.error) for outcome in outcomes]
    assert all("make different calls: call 4" in error for error in errors), errors
    assert all(outcome.ended_s - outcome.began_s < 3.0 for outcome in outcomes)


class Frozen:
    """A connection to a store whose host seems stopped once `stopped` is set: no call returns before `going` is set."""

    def __init__(self, store: Any, stopped: threading.Event, going: threading.Event) -> None:
        self._store, self._stopped, self._going = store, stopped, going

    def clone(self) -> Frozen:
        return Frozen(self._store.clone(), self._stopped, self._going)

    def __getattr__(self, name: str) -> Any:
        if self._stopped.is_set():
            self._going.wait(30)
        return getattr(self._store, name)


def test_a_lost_device_ends_the_ring_everywhere() -> None:
    world = SimWorld(3)

    def body(ring: NcclTransport) -> None:
        slots = ring.allocate(1024).view(2, 512)
        hop = ring_hop(ring, slots[0], slots[1])
        if ring.rank == 1:
            broken = SimpleNamespace(query=lambda: (_ for _ in ()).throw(RuntimeError("an illegal memory access")))
            handle = hop.start()
            handle.done = broken  # torch raises this for every event after a kernel has faulted
            time.sleep(1.0)
            ring.check()
        else:
            for _ in range(100):
                hop.start().wait()
                time.sleep(0.05)

    outcomes = on_gpus(world, body)
    assert "an illegal memory access" in str(outcomes[1].error)
    for rank in (0, 2):
        assert "rank 1 failed first: RuntimeError: an illegal memory access" in str(outcomes[rank].error)
        assert named_at_fault(str(outcomes[rank].error)) == {1}


def test_the_flight_records_name_the_rank_that_is_stuck_in_a_launch(tmp_path: Path) -> None:
    world = SimWorld(3, faults=[Stall(1, "group_end", 4)], limit_s=10.0)
    threading.Timer(4.0, lambda: world.release(1)).start()

    def body(ring: NcclTransport) -> None:
        slots = ring.allocate(1024).view(2, 512)
        for _ in range(5):
            ring_hop(ring, slots[0], slots[1]).start().wait()

    outcomes = on_gpus(world, body, deadline_s=0.6, flight_dir=tmp_path)
    assert all(isinstance(outcome.error, RingError) for outcome in outcomes)
    assert all(named_at_fault(str(outcomes[rank].error)) == {1} for rank in (0, 2)), outcomes
    assert f"flight record: {tmp_path / 'flight-0.json'}" in outcomes[0].error.__notes__  # type: ignore[union-attr]
    first = divergences(read_records(tmp_path))[0]
    assert "rank 1 never posted" in first and first.endswith("it is inside the launch of exchange 4"), first


LOST_S = 1.0


@pytest.fixture
def soon_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shorten the time after which a closing rank regards a silent rank as lost."""
    monkeypatch.setattr(supervisor, "LOST_S", LOST_S)


def dies(world: SimWorld, rank: int) -> None:
    """Let the simulated process of `rank`, the caller, die."""
    world.dead.add(rank)
    raise Died(f"rank {rank} died")


# --- a peer that has closed ------------------------------------------------------------------------------------------


def test_bytes_of_a_peer_that_has_closed_may_still_arrive(monkeypatch: pytest.MonkeyPatch) -> None:
    world = SimWorld(2)
    monkeypatch.setattr(supervisor, "STANDSTILL_S", 1.5)

    def body(ring: NcclTransport) -> bool:
        slots = ring.allocate(1024).view(2, 512)
        slots.fill_(ring.rank)
        hop = ring_hop(ring, slots[0], slots[1])
        if ring.rank == 0:
            # Rank 0 says that it closes while its bytes are sent but not yet delivered.
            ring.supervisor.leave(Deadline(5.0))
            time.sleep(0.8)
        hop.start().wait()
        ring.drain()
        return bool((slots[1] == 1 - ring.rank).all())

    assert results(on_gpus(world, body)) == [True, True]


def test_an_exchange_with_a_peer_that_has_closed_ends_without_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    world = SimWorld(2)
    monkeypatch.setattr(supervisor, "STANDSTILL_S", 0.6)

    def body(ring: NcclTransport) -> float:
        slots = ring.allocate(1024).view(2, 512)
        if ring.rank == 0:
            ring.close(linger_s=5.0)
            return 0.0
        began_s = time.monotonic()
        with pytest.raises(PeerLostError, match="rank 0 closed its ring"):
            ring_hop(ring, slots[0], slots[1]).start().wait()
        return time.monotonic() - began_s

    took_s = [outcome.result for outcome in on_gpus(world, body)][1]
    assert 0.6 <= took_s < 5.0


# --- a peer that does not close --------------------------------------------------------------------------------------


@pytest.mark.usefixtures("soon_lost")
@pytest.mark.parametrize("lost", [0, 1, 2])
def test_close_names_a_rank_that_died_after_its_last_exchange(lost: int) -> None:
    world = SimWorld(3)

    def body(ring: Ring) -> None:
        attend(ring)
        ring.synchronize()
        if ring.rank == lost:
            dies(world, lost)

    outcomes = on_rings(world, body, ring={"engine": "plain"}, timeout_s=30.0)
    for rank in {0, 1, 2} - {lost}:
        error, took_s = outcomes[rank].error, outcomes[rank].ended_s - outcomes[rank].began_s
        assert isinstance(error, PeerLostError) and took_s < 15.0
        assert f"rank {lost} is silent (stopped, stuck or gone) and has not closed its ring" in str(error)
        assert named_at_fault(str(error)) == {lost}
    assert world.violations == []


@pytest.mark.usefixtures("soon_lost")
def test_close_waits_for_a_late_rank_that_is_alive() -> None:
    world = SimWorld(3)

    def body(ring: Ring) -> None:
        attend(ring)
        ring.synchronize()
        if ring.rank == 1:
            time.sleep(2.5 * LOST_S)

    assert results(on_rings(world, body, ring={"engine": "plain"}, timeout_s=30.0)) == [None] * 3
    assert world.violations == []


@pytest.mark.usefixtures("soon_lost")
def test_close_blames_no_rank_if_the_store_hangs() -> None:
    world, store = SimWorld(2), HashStore()
    stopped, going, opened, errors = threading.Event(), threading.Event(), threading.Barrier(2), {}

    def run_rank(rank: int) -> None:
        ring = open_on(world, rank, Frozen(store.clone(), stopped, going), timeout_s=20.0)
        opened.wait(10)
        if rank == 0:
            # The store's host stops while rank 0 closes and waits for rank 1.
            threading.Timer(1.0, stopped.set).start()
            threading.Timer(1.0 + 2.0 * LOST_S, going.set).start()
        else:
            going.wait(10)
            time.sleep(0.5)
        try:
            ring.close()
        except BaseException as error:
            errors[rank] = error

    assert on_each_rank(2, run_rank) == [None, None]
    assert errors == {} and world.violations == []


def test_a_rank_that_arrived_and_closed_meanwhile_is_not_missing() -> None:
    opening = Opening(HashStore(), 0, 2, 20.0)
    control = opening.control
    watched: Any = SimpleNamespace(raise_failure=lambda: None, missing=frozenset({1}), closed={1})
    gather = StoreAllGather(opening, watched)
    gather._next_look = Deadline(60.0)
    with pytest.raises(PeerLostError, match="rank 1 closed its ring"):
        gather._watch("all_gather/0")
    control.set("all_gather/0/1", "here")
    gather._watch("all_gather/0")
    assert watched.missing == {1}


@pytest.mark.usefixtures("soon_lost")
def test_a_rank_that_raises_a_user_error_is_not_silent() -> None:
    world = SimWorld(3)

    def body(ring: Ring) -> None:
        attend(ring)
        ring.synchronize()
        if ring.rank == 2:
            time.sleep(0.5)
            raise ValueError("the user's own")

    first, second, third = on_rings(world, body, ring={"engine": "plain"}, timeout_s=30.0)
    assert isinstance(third.error, ValueError)
    assert (first.error, second.error) == (None, None)  # all their data had arrived
    assert max(outcome.ended_s - outcome.began_s for outcome in (first, second)) < 10.0
    assert world.violations == []


# --- backlog of the local GPU ----------------------------------------------------------------------------------------


def backlog(world: SimWorld, ring: NcclTransport, behind: bool, end_s: float) -> Callable[[], Any]:
    """Start an exchange and compute that takes `end_s` seconds. If `behind`, the exchange is queued after the compute.

    Return a function that ends the compute early.
    """
    gpu: Any = ring.gpu
    slots = ring.allocate(1024).view(2, 512)
    with gpu.on(gpu.user_stream()):
        ring.begin_pass()
        if behind:
            compute = gpu.kernel(label="before", held=True)
        ring_hop(ring, slots[0], slots[1]).start().wait()
        if not behind:
            compute = gpu.kernel(label="after", held=True)
        ring.end_pass()
    timer = threading.Timer(end_s, lambda: world.finish(compute))
    timer.daemon = True
    timer.start()
    return lambda: world.finish(compute)


class Shrinking(deque[Any]):
    """A deque whose elements another thread removes just after this thread has seen that there are some."""

    def __bool__(self) -> bool:
        self.clear()
        return True


def test_a_heartbeat_reads_an_exchange_that_arrives_at_this_moment() -> None:
    def body(ring: NcclTransport) -> list[frozenset[int] | None]:
        watch = ring.supervisor
        handle = ring_hop(ring, *(torch.zeros(8, dtype=torch.uint8) for _ in range(2))).start()
        handle.wait()
        ring.drain()
        watch.tick()  # releases the hop
        watch.stop()
        arrived, awaited = watch.handles, []
        for handles in (Shrinking([handle]), deque([handle])):
            watch.handles = handles
            awaited.append(watch._place().peers)
        watch.handles = arrived
        return awaited

    world = SimWorld(2, any_memory=True)
    assert results(on_gpus(world, body)) == [[frozenset(), frozenset()]] * 2


@pytest.mark.parametrize("how", ["drain", "close"])
def test_a_backlog_longer_than_the_deadline_is_not_a_fault(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    world = SimWorld(2)
    monkeypatch.setattr(transport, "GRACE_S", 0.1)

    def body(ring: NcclTransport) -> bool:
        backlog(world, ring, behind=True, end_s=1.5)
        handle = ring.supervisor.handles[-1]
        getattr(ring, how)()
        return handle.done.query()

    assert results(on_gpus(world, body, deadline_s=0.5)) == [True, True]
    assert world.violations == []


def test_close_with_a_short_linger_time_does_not_wait_for_a_backlog() -> None:
    world, took_s = SimWorld(2), []

    def body(ring: NcclTransport) -> None:
        finish = backlog(world, ring, behind=True, end_s=60.0)
        began_s = time.monotonic()
        with pytest.raises(transport.DeadlineError, match=r"the GPU was still computing after 0\.3 s, before rank"):
            ring.close(linger_s=0.3)
        took_s.append(time.monotonic() - began_s)
        finish()

    on_gpus(world, body)
    assert len(took_s) >= 1 and took_s[0] < 10.0 and world.violations == []
