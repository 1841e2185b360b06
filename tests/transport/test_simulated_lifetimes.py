"""The simulator's rules of how communicators begin and end. One test a rule.

Not covered: the rules of a hop (`test_simulated_nccl.py`), memory and graphs (`test_simulated_memory.py`), races.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

from ringattn.transport.nccl.binding import Capability, CommConfig, MissingError, NcclError, Status
from tests.transport.simulated.device import SimDevice
from tests.transport.simulated.exchange import Rank, on_ranks, open_ranks, until
from tests.transport.simulated.hosts import Deadlock
from tests.transport.simulated.library import SimLibrary
from tests.transport.simulated.world import SimWorld


def bare(world: SimWorld) -> list[SimLibrary]:
    """The libraries of all ranks, each with a device."""
    for rank in range(world.world_size):
        SimDevice(world, rank)
    return [SimLibrary(world, rank) for rank in range(world.world_size)]


def states(library: SimLibrary, comm: int, count: int) -> list[int]:
    return [library.state(comm) for _ in range(count)]


def refused(world: SimWorld, words: str, count: int = 1) -> bool:
    """Whether exactly `count` rules were broken, the last one in these words."""
    return len(world.violations) == count and words in world.violations[-1]


# --- opening ---------------------------------------------------------------------------------------------------------


def test_a_communicator_is_ready_some_polls_after_all_have_come() -> None:
    a, b = bare(SimWorld(2, polls=2))
    unique_id = a.unique_id()
    assert len(unique_id) == 128 and unique_id != a.unique_id()
    early = a.init(2, unique_id, 0, CommConfig())
    assert states(a, early, 5) == 5 * [Status.IN_PROGRESS]
    b.init(2, unique_id, 1, CommConfig())
    assert states(a, early, 3) == [Status.IN_PROGRESS, Status.IN_PROGRESS, Status.SUCCESS]


@pytest.mark.parametrize("wrong", ["id", "size", "rank"])
def test_a_communicator_of_others_is_never_ready(wrong: str) -> None:
    world = SimWorld(2)
    a, b = bare(world)
    unique_id = a.unique_id()
    comm = a.init(2, unique_id, 0, CommConfig())
    other = {
        "id": lambda: b.init(2, b.unique_id(), 1, CommConfig()),
        "size": lambda: b.init(3, unique_id, 1, CommConfig()),
        "rank": lambda: b.init(2, unique_id, 0, CommConfig()),
    }[wrong]()
    assert states(a, comm, 5) + states(b, other, 5) == 10 * [Status.IN_PROGRESS]
    assert bool(world.violations) == (wrong == "rank")


def test_a_blocking_communicator_is_ready_when_init_returns() -> None:
    world = SimWorld(2, supervised=False)
    a, b = bare(world)
    unique_id = a.unique_id()
    comms = world.run(lambda rank: (a, b)[rank].init(2, unique_id, rank, CommConfig(blocking=True)))
    assert [library.state(comm or 0) for library, comm in zip((a, b), comms, strict=True)] == 2 * [Status.SUCCESS]


def test_a_blocking_init_waits_for_all_ranks() -> None:
    world = SimWorld(2, supervised=False)
    a, _ = bare(world)
    with pytest.raises(Deadlock, match=r"rank 0: host: init of communicator #0\nrank 1: waits for nothing"):
        world.run(lambda rank: None if rank else a.init(2, a.unique_id(), 0, CommConfig(blocking=True)))


@pytest.mark.parametrize("allowed", [False, True])
def test_two_ranks_on_one_gpu(allowed: bool) -> None:
    world = SimWorld(2, allow_duplicates=allowed)
    for rank in range(2):
        SimDevice(world, rank, uuid="GPU-same")
    a, b = (SimLibrary(world, rank) for rank in range(2))
    unique_id = a.unique_id()
    comm = a.init(2, unique_id, 0, CommConfig())
    b.init(2, unique_id, 1, CommConfig())
    if allowed:
        assert states(a, comm, 3)[-1] == Status.SUCCESS
    else:
        assert a.state(comm) == Status.INVALID_USAGE and "Duplicate GPU" in a.last_error(comm)


def test_init_refuses_wrong_arguments_and_a_missing_device() -> None:
    library = SimLibrary(SimWorld(1), 0)
    for rank, unique_id, status in (
        (1, library.unique_id(), Status.INVALID_ARGUMENT),
        (0, b"short", Status.INVALID_ARGUMENT),
        (0, library.unique_id(), Status.UNHANDLED_CUDA_ERROR),
    ):
        with pytest.raises(NcclError) as error:
            library.init(1, unique_id, rank, CommConfig())
        assert error.value.status == status and library.last_error(0) == error.value.text


def test_nothing_may_use_a_communicator_that_opens() -> None:
    world = SimWorld(2)
    a, _ = bare(world)
    comm = a.init(2, a.unique_id(), 0, CommConfig())
    with pytest.raises(NcclError):
        a.destroy(comm)
    assert refused(world, "is opening")


def test_a_split_makes_children_by_color_in_the_order_of_their_keys() -> None:
    world = SimWorld(4)
    ranks = open_ranks(world)
    children = []
    for me in ranks:
        children.append(me.library.split(me.comm, me.rank % 2, -me.rank, CommConfig()))
        if me.rank < 3:
            assert ranks[0].library.state(children[0]) == Status.IN_PROGRESS
    for me, child in zip(ranks, children, strict=True):
        assert me.settle(child) == Status.SUCCESS
    came = ranks[0].filled(0)
    ranks[2].group([("send", ranks[2].filled(7), 1)], children[2])  # rank 2 is first of its child, rank 0 second
    ranks[0].group([("recv", came, 0)], children[0])
    assert int(came[0]) == 7 and world.violations == []


@pytest.mark.parametrize(
    ("missing", "call"),
    [
        (Capability.NONBLOCKING, lambda me: me.library.init(1, bytes(128), 0, CommConfig())),
        (Capability.MAX_CTAS, lambda me: me.library.init(1, bytes(128), 0, CommConfig(True, max_ctas=2))),
        (Capability.CGA, lambda me: me.library.init(1, bytes(128), 0, CommConfig(True, cga_cluster_size=1))),
        (Capability.NET_CHANNELS, lambda me: me.library.init(1, bytes(128), 0, CommConfig(True, None, None, None, 2))),
        (Capability.NAME, lambda me: me.library.init(1, bytes(128), 0, CommConfig(True, name="ring"))),
        (Capability.FINALIZE, lambda me: me.library.finalize(me.comm)),
        (Capability.MEMORY, lambda me: me.library.mem_alloc(8)),
        (Capability.MEMORY, lambda me: me.library.mem_free(8)),
        (Capability.REGISTER, lambda me: me.library.register(me.comm, 8, 8)),
        (Capability.REGISTER, lambda me: me.library.deregister(me.comm, 8)),
        (Capability.LAST_ERROR, lambda me: me.library.last_error(me.comm)),
    ],
)
def test_a_poorer_library_refuses_by_name(missing: Capability, call: Callable[[Rank], object]) -> None:
    poorer = frozenset(Capability) - {missing}
    me = open_ranks(SimWorld(1), blocking=True, capabilities=poorer)[0]
    with pytest.raises(MissingError, match=missing.value):
        call(me)


# --- ending ----------------------------------------------------------------------------------------------------------


def test_finalize_and_destroy_are_collective() -> None:
    world = SimWorld(2, supervised=False)
    a, b = open_ranks(world)
    a.library.finalize(a.comm)
    assert states(a.library, a.comm, 5) == 5 * [Status.IN_PROGRESS]
    b.library.finalize(b.comm)
    assert a.settle() == b.settle() == Status.SUCCESS
    world.run(lambda rank: (a, b)[rank].library.destroy((a, b)[rank].comm))
    assert world.violations == []
    assert a.library.state(a.comm) == Status.INVALID_ARGUMENT and refused(world, "is destroyed")


def test_finalize_waits_for_the_groups() -> None:
    a, b = open_ranks(SimWorld(2))
    a.group([("send", a.filled(1), 1)])
    for me in (a, b):
        me.library.finalize(me.comm)
    assert (a.settle(), b.settle()) == (Status.IN_PROGRESS, Status.SUCCESS)
    assert b.post([("recv", b.filled(0), 0)]) == [Status.INVALID_ARGUMENT]
    assert refused(a.world, "is finalized")


def test_destroy_hangs_while_a_peer_does_not_come() -> None:
    world = SimWorld(2, supervised=False)
    with pytest.raises(Deadlock, match=r"rank 0: host: destroy of communicator #0"):
        on_ranks(world, lambda me: None if me.rank else me.library.destroy(me.comm))


@pytest.mark.parametrize("lazy", [False, True])
def test_an_abort_wakes_the_waiters_of_its_rank_and_tells_no_peer(lazy: bool) -> None:
    world = SimWorld(2, lazy=lazy, limit_s=5.0)
    a, b = open_ranks(world)
    a.group([("recv", a.filled(0), 1)])
    returned: list[str] = []

    def wait() -> None:
        a.wait()
        returned.append("normally")

    woken = threading.Thread(target=wait)
    woken.start()
    until(lambda: "host: wait" in world.report())
    a.library.abort(a.comm)
    woken.join(10.0)
    assert returned == ["normally"] and world.violations == []
    b.group([("send", b.filled(1), 0)])
    assert b.library.state(b.comm) == Status.SUCCESS and not b.recorded().query()


def test_an_abort_ends_a_destroy_that_hangs() -> None:
    world = SimWorld(2)
    a, _ = open_ranks(world)
    errors: list[NcclError] = []

    def destroy() -> None:
        try:
            a.library.destroy(a.comm)
        except NcclError as error:
            errors.append(error)

    hanging = threading.Thread(target=destroy)
    hanging.start()
    until(lambda: "host: destroy" in world.report())
    a.library.abort(a.comm)
    hanging.join(10.0)
    assert [error.status for error in errors] == [Status.INTERNAL_ERROR] and world.violations == []


def test_an_abort_while_a_group_is_open_ends_the_group() -> None:
    world = SimWorld(1)
    me = open_ranks(world)[0]
    me.library.group_start()
    me.post([("send", me.filled(1), 0), ("recv", me.filled(0), 0)])
    aborting = threading.Thread(target=me.library.abort, args=(me.comm,))
    aborting.start()
    aborting.join()
    assert me.library.group_end() == Status.INVALID_USAGE
    assert world.calls(0) == [] and world.violations == []


@pytest.mark.parametrize("call", ["send", "state", "abort", "destroy", "finalize", "register", "split"])
def test_an_aborted_communicator_is_not_used(call: str) -> None:
    world = SimWorld(1)
    me = open_ranks(world)[0]
    buffer = me.filled(0)
    me.library.abort(me.comm)
    if call == "send":
        assert me.post([("send", buffer, 0)]) == [Status.INVALID_ARGUMENT]
    elif call == "state":
        assert me.library.state(me.comm) == Status.INVALID_ARGUMENT
    else:
        more = {"register": (buffer.data_ptr(), 16), "split": (0, 0, CommConfig())}.get(call, ())
        with pytest.raises(NcclError) as error:
            getattr(me.library, call)(me.comm, *more)
        assert error.value.status == Status.INVALID_ARGUMENT
    assert refused(world, f"{call}: communicator #0 is aborted")


def test_a_handle_of_another_rank_is_none() -> None:
    a, b = open_ranks(SimWorld(2))
    assert b.library.state(a.comm) == Status.INVALID_ARGUMENT
    assert refused(a.world, "is no communicator of this rank")
    assert b.library.state(0) == Status.INVALID_ARGUMENT and len(a.world.violations) == 1
