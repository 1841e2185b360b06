"""Gloo between processes: opening, several rings, the user's process groups, and causes of failures.

`test_contract.py` runs the contract of all transports over gloo.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from datetime import timedelta
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from ringattn.errors import DeadlineError, InputError, PeerLostError
from ringattn.transport import gloo
from ringattn.transport.base import Message, Opening
from ringattn.transport.control_store import group_store
from ringattn.transport.gloo import GlooTransport, _Operation
from tests.contract import transport_contract as contract
from tests.contract.processes import Processes, store_of
from tests.transport.process_rings import meet_gloo as meet


@pytest.fixture(scope="module")
def processes() -> Iterator[Processes]:
    with Processes(contract.WORLD_SIZE) as started:
        yield started


# --- opening ---------------------------------------------------------------------------------------------------------


def opened_before_the_last(rank: int, world_size: int) -> bool:
    """Return whether this rank's opening has returned while rank 0, which is made slow, is still connecting."""
    store = store_of(rank, world_size)

    def connect_slowly(*arguments: Any) -> dist.ProcessGroupGloo:
        group = gloo_connect(*arguments)
        time.sleep(0.3)
        store.set("rank 0 has connected", "1")
        return group

    gloo_connect = gloo._connect
    with patch.object(gloo, "_connect", connect_slowly if rank == 0 else gloo_connect):
        ring = GlooTransport.open(Opening(dist.PrefixStore("slowly", store), rank, world_size, 20.0))
    early = not store.check(["rank 0 has connected"])
    ring.close()
    return early


def test_no_rank_continues_while_another_connects(processes: Processes) -> None:
    assert set(processes.run(opened_before_the_last).values()) == {False}


# --- several rings, and process groups -------------------------------------------------------------------------------


def all_reduced_ones(group: dist.ProcessGroup | None = None) -> float:
    value = torch.ones(1)
    dist.all_reduce(value, group=group)
    return value.item()


def several_rings(rank: int, world_size: int) -> None:
    first = meet(rank, world_size, 20.0)
    second = meet(rank, world_size, 20.0)
    after, before = (rank + 1) % world_size, (rank - 1) % world_size
    received = [torch.zeros(1), torch.zeros(1)]
    pending = first.exchange([Message(after, torch.tensor([1.0]))], [Message(before, received[0])])
    second.exchange([Message(after, torch.tensor([2.0]))], [Message(before, received[1])]).wait()
    pending.wait()
    assert [buffer.item() for buffer in received] == [1.0, 2.0]
    first.close()
    third = meet(rank, world_size, 20.0)
    contract.shift_around(second)
    contract.shift_around(third)
    second.close()
    third.close()


def test_rings_may_be_open_together_and_one_after_another(processes: Processes) -> None:
    processes.run(several_rings)


def rings_and_process_groups(rank: int, world_size: int) -> None:
    before = meet(rank, world_size, 20.0)
    dist.init_process_group("gloo", rank=rank, world_size=world_size, timeout=timedelta(seconds=20))
    try:
        after = meet(rank, world_size, 20.0)
        for ring in (before, after):
            contract.shift_around(ring)
            assert all_reduced_ones() == 3.0
        default = [GlooTransport.open(Opening(*group_store(), 20.0)) for _ in range(2)]
        for ring in default:
            assert (ring.rank, ring.world_size) == (rank, world_size)
            contract.shift_around(ring)
        pair = dist.new_group([0, 2])
        if rank == 1:
            with pytest.raises(InputError, match=r"rank 1 is not in the group of ranks \[0, 2\]"):
                group_store(pair)
        else:
            ring = GlooTransport.open(Opening(*group_store(pair), 20.0))
            assert (ring.rank, ring.world_size) == ([0, None, 1][rank], 2)
            assert ring.all_gather_bytes(bytes([rank])) == [b"\x00", b"\x02"]
            ring.abort(ValueError("only this ring"))
            assert all_reduced_ones(pair) == 2.0
        contract.shift_around(default[0])
        assert all_reduced_ones() == 3.0
    finally:
        dist.destroy_process_group()
    contract.shift_around(before)
    contract.shift_around(default[1])
    for ring in (before, after, *default):
        ring.close()


def test_rings_and_process_groups_do_not_interfere(processes: Processes) -> None:
    processes.run(rings_and_process_groups)


def without_a_group(rank: int, world_size: int) -> None:
    with pytest.raises(InputError, match="no default process group"):
        group_store()


def test_a_missing_default_group_is_reported(processes: Processes) -> None:
    processes.run(without_a_group)


# --- lengths that differ ---------------------------------------------------------------------------------------------


def lengths_differ(rank: int, world_size: int, sent: int, received: int) -> None:
    ring = meet(rank, world_size, 1.0)
    failures = (DeadlineError, PeerLostError)  # PeerLostError if the peer reaches its deadline first
    if rank == 0:
        with pytest.raises(failures, match=rf"rank 0 send to rank 1 'kv' \({sent} bytes"):
            ring.exchange([Message(1, torch.zeros(sent, dtype=torch.uint8), "kv")], []).wait()
    elif rank == 1:
        with pytest.raises(failures, match=rf"rank 1 recv from rank 0 'kv' \({received} bytes"):
            ring.exchange([], [Message(0, torch.zeros(received, dtype=torch.uint8), "kv")]).wait()


@pytest.mark.parametrize(("sent", "received"), [(64, 128), (128, 64)])
def test_lengths_that_differ_never_pass(processes: Processes, sent: int, received: int) -> None:
    processes.run(lengths_differ, sent, received)


# --- causes ----------------------------------------------------------------------------------------------------------


def deadline_wakes_the_neighbor(rank: int, world_size: int) -> None:
    # Gloo drops the connection when rank 0 reaches its deadline, before rank 0 publishes the cause. So rank 1 must read
    # the store again until the cause is there.
    ring = meet(rank, world_size, 1.0 if rank == 0 else 20.0)
    if rank == 0:
        with pytest.raises(DeadlineError, match="kv 0"):
            ring.exchange([], [Message(peer, torch.zeros(4), "kv 0") for peer in (1, 2)]).wait()
    else:
        with pytest.raises(PeerLostError, match=r"rank 0 failed first: DeadlineError.*kv 0"):
            contract.receive(ring, 0)


def test_neighbors_name_a_deadline_as_the_cause(processes: Processes) -> None:
    processes.run(deadline_wakes_the_neighbor)


class FakeWork:
    """A fake of gloo's work handle that records the timeout of its wait."""

    def wait(self, timeout: timedelta) -> bool:
        self.timeout, self.ends = timeout, time.monotonic() + timeout.total_seconds()
        return True


@pytest.mark.parametrize("timeout_s", [0.0004, 0.02095, 1.0, -1.0, 0.0])
def test_no_wait_ends_before_its_deadline(timeout_s: float) -> None:
    # Gloo takes timeouts in whole milliseconds and takes 0 for no limit. A wait that ends before the deadline would
    # look like a lost connection.
    operation, work = _Operation(0, False, Message(1, torch.zeros(1))), FakeWork()
    operation.work = work  # type: ignore[assignment]
    deadline = time.monotonic() + timeout_s
    operation.wait(deadline)
    assert work.ends >= deadline
    assert work.timeout.microseconds % 1000 == 0
    assert timedelta(0) < work.timeout <= timedelta(seconds=max(timeout_s, 0.0) + 0.001)
