"""The simulator's rules of memory and of CUDA graphs. One test a rule.

Not covered: the rules of a hop (`test_simulated_nccl.py`), communicators' lives, races.
"""

from __future__ import annotations

import gc
import weakref

import pytest
import torch

from ringattn.transport.nccl.binding import NcclError, Status
from tests.transport.simulated.exchange import Rank, on_ranks, open_ranks
from tests.transport.simulated.world import SimWorld


def refused(world: SimWorld, words: str, count: int = 1) -> bool:
    """Whether exactly `count` rules were broken, the last one in these words."""
    return len(world.violations) == count and words in world.violations[-1]


# --- memory ----------------------------------------------------------------------------------------------------------


def nccl_buffer(me: Rank, nbytes: int = 16) -> torch.Tensor:
    pointer = me.library.mem_alloc(nbytes)
    return me.device.wrap(pointer, nbytes, None)


@pytest.mark.parametrize("whose", ["nobody", "peer", "freed", "too long"])
def test_an_address_that_is_not_the_ranks_own_is_illegal(whose: str) -> None:
    world = SimWorld(2)
    a, b = open_ranks(world)
    foreign, own = b.filled(0), nccl_buffer(a)
    a.library.mem_free(own.data_ptr())
    pointer, nbytes = {
        "nobody": (64, 16),
        "peer": (foreign.data_ptr(), 16),
        "freed": (own.data_ptr(), 16),
        "too long": ((short := a.filled(0)).data_ptr(), short.nbytes + 1),
    }[whose]
    assert a.library.send(pointer, nbytes, 1, a.comm, a.lane.cuda_stream) == Status.INVALID_ARGUMENT
    assert refused(world, "illegal address")
    with pytest.raises(NcclError):
        a.library.register(a.comm, pointer, nbytes)
    assert refused(world, "illegal address", 2)


def test_any_memory_is_taken_where_the_world_says_so() -> None:
    a, b = open_ranks(SimWorld(2, any_memory=True))
    sent, came = torch.full((16,), 7, dtype=torch.uint8), torch.zeros(16, dtype=torch.uint8)
    a.group([("send", sent, 1)])
    b.group([("recv", came, 0)])
    assert torch.equal(came, sent) and a.world.violations == []


def test_plain_memory_that_is_dropped_in_flight_is_an_illegal_address() -> None:
    world = SimWorld(2)
    a, b = open_ranks(world)
    dropped = a.device.empty(16).fill_(1)
    a.group([("send", dropped, 1)])
    del dropped
    gc.collect()
    came = b.filled(0)
    b.group([("recv", came, 0)])
    assert refused(world, "freed while in flight: send of 16 bytes to rank 1")
    assert a.library.state(a.comm) == Status.UNHANDLED_CUDA_ERROR and int(came[0]) == 0


@pytest.mark.parametrize("state", ["registered", "in flight", "free"])
def test_memory_is_not_freed_while_nccl_has_it(state: str) -> None:
    world = SimWorld(2)
    a, b = open_ranks(world)
    buffer = nccl_buffer(a).fill_(7)
    pointer = buffer.data_ptr()
    if state == "registered":
        handle = a.library.register(a.comm, pointer, 16)
    elif state == "in flight":
        a.group([("send", buffer, 1)])
    else:
        a.library.mem_free(pointer)
    with pytest.raises(NcclError):
        a.library.mem_free(pointer)
    assert refused(world, {"free": "is no living NCCL memory"}.get(state, f"is still {state}"))
    if state == "registered":
        a.library.deregister(a.comm, handle)
    elif state == "in flight":
        b.group([("recv", b.filled(0), 0)])
    if state != "free":
        a.library.mem_free(pointer)
    assert len(world.violations) == 1


def test_registrations_end_once_and_not_in_flight() -> None:
    world = SimWorld(2)
    a, b = open_ranks(world)
    buffers = [nccl_buffer(me) for me in (a, b)]
    handles = [me.library.register(me.comm, each.data_ptr(), 16) for me, each in zip((a, b), buffers, strict=True)]
    a.group([("send", buffers[0], 1)])
    with pytest.raises(NcclError):
        a.library.deregister(a.comm, handles[0])
    assert refused(world, "is still in flight")
    b.group([("recv", buffers[1], 0)])
    a.library.deregister(a.comm, handles[0])
    with pytest.raises(NcclError):
        a.library.deregister(a.comm, handles[0])
    assert refused(world, "is no registration", 2)


@pytest.mark.parametrize("registered", [(0, 1), (0,), (1,), ()])
def test_both_ends_are_registered_or_neither(registered: tuple[int, ...]) -> None:
    world = SimWorld(2)
    ranks = open_ranks(world)
    buffers = [nccl_buffer(me) for me in ranks]
    for rank in registered:
        ranks[rank].library.register(ranks[rank].comm, buffers[rank].data_ptr(), 16)
    ranks[0].group([("send", buffers[0][4:], 1)])
    ranks[1].group([("recv", buffers[1][:12], 0)])
    assert bool(world.violations) == (len(registered) == 1)
    assert all("only one end is registered" in words for words in world.violations)


def test_wrapped_memory_keeps_its_owner() -> None:
    class Owner:
        pass

    me = open_ranks(SimWorld(1))[0]
    owner = Owner()
    alive = weakref.ref(owner)
    view = me.device.wrap(me.library.mem_alloc(16), 16, owner)[4:8]
    del owner
    gc.collect()
    assert alive() is not None and view.nbytes == 4
    del view
    gc.collect()
    assert alive() is None and me.device.wrap(0, 0, None).nbytes == 0


# --- graphs ----------------------------------------------------------------------------------------------------------


def test_a_capture_runs_nothing_and_each_replay_moves_the_bytes() -> None:
    world = SimWorld(2, supervised=False)

    def body(me: Rank) -> list[int]:
        sent, came = me.filled(0), me.filled(99)
        seen = []
        with world.capture(me.rank) as graph:
            assert me.device.is_capturing()
            ready = me.device.new_event()
            ready.record(me.compute)
            me.lane.wait_event(ready)
            me.group([("send", sent, me.after), ("recv", came, me.before)])
            me.wait()
            me.device.touch(reads=[(came.data_ptr(), 16)], label="attend")
            seen.append(int(came[0]))
        assert not me.device.is_capturing() and world.calls(me.rank) == []
        for turn in (1, 2):
            sent.fill_(10 * turn + me.rank)
            graph.replay()
            seen.append(int(came[0]))
        graph.reset()
        me.library.destroy(me.comm)
        return seen

    assert on_ranks(world, body) == [[99, 11, 21], [99, 10, 20]]
    assert world.violations == []
    assert [type(entry).__name__ for entry in world.trace[0]] == 2 * [
        "Record", "Wait", "Launch", "Record", "Wait", "Touch"
    ]  # fmt: skip


def test_an_event_of_a_capture_is_not_queried() -> None:
    me = open_ranks(SimWorld(1))[0]
    with me.world.capture(0):
        event = me.recorded()
    assert not event.query() and refused(me.world, "query of an event that was recorded in a capture")


def test_a_capture_waits_for_no_event_from_outside() -> None:
    me = open_ranks(SimWorld(1))[0]
    event = me.recorded()
    with me.world.capture(0):
        me.lane.wait_event(event)
    assert refused(me.world, "outside of the capture")


def test_a_capture_holds_whole_groups() -> None:
    me = open_ranks(SimWorld(1))[0]
    with me.world.capture(0):
        me.library.group_start()
        me.post([("send", me.filled(1), 0), ("recv", me.filled(0), 0)])
        assert me.library.group_end() == Status.IN_PROGRESS
    assert refused(me.world, "the capture ends while a group is still in progress")


@pytest.mark.parametrize("call", ["abort", "destroy"])
def test_a_communicator_outlives_its_graphs(call: str) -> None:
    me = open_ranks(SimWorld(1))[0]
    with me.world.capture(0) as graph:
        me.group([("send", me.filled(1), 0), ("recv", me.filled(0), 0)])
    with pytest.raises(NcclError):
        getattr(me.library, call)(me.comm)
    assert refused(me.world, "reset the graph first")
    graph.reset()
    getattr(me.library, call)(me.comm)
    assert len(me.world.violations) == 1


def test_both_ends_are_captured_or_neither() -> None:
    world = SimWorld(2)
    a, b = open_ranks(world)
    buffer = a.filled(1)
    with world.capture(0) as graph:
        a.group([("send", buffer, 1)])
    b.group([("recv", b.filled(0), 0)])
    graph.replay()
    assert refused(world, "only one end is in a graph")
