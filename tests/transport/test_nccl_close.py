"""How an NCCL ring ends: who waits for whom, for how long, and who is not blamed for it.

Not covered: when memory is given back (`test_nccl_memory.py`), ranks that fail in a pass (`test_nccl_faults.py`).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from torch.distributed import HashStore

from ringattn import Ring
from ringattn.errors import PeerLostError
from ringattn.transport.control_store import ControlStore
from ringattn.transport.deadline import Deadline
from ringattn.transport.nccl import supervisor, transport
from ringattn.transport.nccl.bootstrap import StoreAllGather
from ringattn.transport.nccl.transport import NcclTransport
from tests.transport.attribution import named_at_fault
from tests.transport.nccl_rings import on_gpus, on_rings, open_on, results
from tests.transport.simulated.faults import Died
from tests.transport.simulated.world import SimWorld
from tests.transport.test_nccl_life import Frozen, around
from tests.transport.test_nccl_memory import attend

LOST_S = 1.0


@pytest.fixture
def soon_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank that is only to close counts as lost after a second."""
    monkeypatch.setattr(supervisor, "LOST_S", LOST_S)


def dies(world: SimWorld, rank: int) -> None:
    """The process of `rank` ends here."""
    world.dead.add(rank)
    raise Died(f"rank {rank} died")


# --- a peer that has closed ------------------------------------------------------------------------------------------


def test_bytes_of_a_peer_that_has_closed_may_still_arrive(monkeypatch: pytest.MonkeyPatch) -> None:
    world = SimWorld(2)
    monkeypatch.setattr(supervisor, "STANDSTILL_S", 1.5)

    def body(ring: NcclTransport) -> bool:
        slots = ring.allocate(1024).view(2, 512)
        slots.fill_(ring.rank)
        hop = around(ring, slots[0], slots[1])
        if ring.rank == 0:
            # Its bytes have left, and wait on their way.
            ring.supervisor.leave(Deadline(5.0))
            time.sleep(0.8)
        hop.start().wait()
        ring.drain()
        return bool((slots[1] == 1 - ring.rank).all())

    assert results(on_gpus(world, body)) == [True, True]


def test_an_exchange_with_a_peer_that_has_closed_ends_when_it_stands_still(monkeypatch: pytest.MonkeyPatch) -> None:
    world = SimWorld(2)
    monkeypatch.setattr(supervisor, "STANDSTILL_S", 0.6)

    def body(ring: NcclTransport) -> float:
        slots = ring.allocate(1024).view(2, 512)
        if ring.rank == 0:
            ring.close(linger_s=5.0)
            return 0.0
        began_s = time.monotonic()
        with pytest.raises(PeerLostError, match="rank 0 closed its ring"):
            around(ring, slots[0], slots[1]).start().wait()
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
def test_close_waits_for_a_rank_that_is_late_and_lives() -> None:
    world = SimWorld(3)

    def body(ring: Ring) -> None:
        attend(ring)
        ring.synchronize()
        if ring.rank == 1:
            time.sleep(2.5 * LOST_S)

    assert results(on_rings(world, body, ring={"engine": "plain"}, timeout_s=30.0)) == [None] * 3
    assert world.violations == []


@pytest.mark.usefixtures("soon_lost")
def test_close_blames_nobody_for_a_store_that_stands_still() -> None:
    world, store = SimWorld(2), HashStore()
    stopped, going, opened, said = threading.Event(), threading.Event(), threading.Barrier(2), {}

    def live(rank: int) -> None:
        ring = open_on(world, rank, Frozen(store.clone(), stopped, going), timeout_s=20.0)
        opened.wait(10)
        if rank == 0:
            # When this rank has closed, and watches the other one.
            threading.Timer(1.0, stopped.set).start()
            threading.Timer(1.0 + 2.0 * LOST_S, going.set).start()
        else:
            going.wait(10)
            time.sleep(0.5)
        try:
            ring.close()
        except BaseException as error:
            said[rank] = error

    threads = [threading.Thread(target=live, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert said == {} and world.violations == []


def test_close_waits_for_a_store_that_stands_still_no_longer_than_it_is_told() -> None:
    world, store = SimWorld(2), HashStore()
    stopped, going, opened, took_s = threading.Event(), threading.Event(), threading.Barrier(2), {}

    def live(rank: int) -> None:
        ring = open_on(world, rank, Frozen(store.clone(), stopped, going), timeout_s=20.0)
        opened.wait(10)
        stopped.set()
        began_s = time.monotonic()
        ring.close(linger_s=0.5)
        took_s[rank] = time.monotonic() - began_s

    threads = [threading.Thread(target=live, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    going.set()
    assert len(took_s) == 2 and max(took_s.values()) < 8.0, took_s


def test_a_rank_that_arrived_and_closed_meanwhile_is_not_missing() -> None:
    control = ControlStore(HashStore(), 0, 2)
    watched: Any = SimpleNamespace(raise_failure=lambda: None, missing=frozenset({1}), closed={1})
    gather = StoreAllGather(control, watched, 20.0)
    gather._next_look = Deadline(60.0)
    with pytest.raises(PeerLostError, match="rank 1 closed its ring"):
        gather._watch("all_gather/0")
    control.set("all_gather/0/1", "here")
    gather._watch("all_gather/0")
    assert watched.missing == {1}


@pytest.mark.usefixtures("soon_lost")
def test_a_failure_of_the_users_is_no_silence() -> None:
    world = SimWorld(3)

    def body(ring: Ring) -> None:
        attend(ring)
        ring.synchronize()
        if ring.rank == 2:
            time.sleep(0.5)
            raise ValueError("the user's own")

    first, second, third = on_rings(world, body, ring={"engine": "plain"}, timeout_s=30.0)
    assert isinstance(third.error, ValueError)
    assert (first.error, second.error) == (None, None)  # what they asked for had all arrived
    assert max(one.ended_s - one.began_s for one in (first, second)) < 10.0
    assert world.violations == []


# --- own backlog -----------------------------------------------------------------------------------------------------


def backlog(world: SimWorld, ring: NcclTransport, behind: bool, end_s: float) -> Callable[[], Any]:
    """Starts an exchange on a stream whose compute before it (`behind`) or after it takes `end_s`; how to end early."""
    gpu: Any = ring.gpu
    slots = ring.allocate(1024).view(2, 512)
    with gpu.on(gpu.user_stream()):
        ring.begin_pass()
        if behind:
            held = gpu.kernel(label="before", held=True)
        around(ring, slots[0], slots[1]).start().wait()
        if not behind:
            held = gpu.kernel(label="after", held=True)
        ring.end_pass()
    timer = threading.Timer(end_s, lambda: world.finish(held))
    timer.daemon = True
    timer.start()
    return lambda: world.finish(held)


@pytest.mark.parametrize("how", ["drain", "close"])
def test_a_backlog_longer_than_the_deadline_is_no_fault(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    world = SimWorld(2)
    monkeypatch.setattr(transport, "GRACE_S", 0.1)

    def body(ring: NcclTransport) -> bool:
        backlog(world, ring, behind=True, end_s=1.5)
        handle = ring.supervisor.handles[-1]
        getattr(ring, how)()
        return handle.done.query()

    assert results(on_gpus(world, body, deadline_s=0.5)) == [True, True]
    assert world.violations == []


def test_the_end_of_the_process_waits_for_no_backlog() -> None:
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
