"""Gloo between processes: openings, sudden exits, a lost store, the user's own groups. The contract: test_contract."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from datetime import timedelta
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from ringattn.errors import ClosedError, DeadlineError, InputError, PeerLostError
from ringattn.transport import control_store, gloo
from ringattn.transport.base import Message, Opening
from ringattn.transport.control_store import group_store
from ringattn.transport.gloo import GlooTransport, _Operation
from tests.contract import transport_contract as contract
from tests.contract.meeting import rendezvous_store, store_of
from tests.contract.processes import Processes
from tests.transport.process_rings import meet_gloo as meet


@pytest.fixture(scope="module")
def processes() -> Iterator[Processes]:
    with Processes(contract.WORLD_SIZE) as started:
        yield started


# --- opening ---------------------------------------------------------------------------------------------------------


def opened_before_the_last(rank: int, world_size: int) -> bool:
    """Whether this rank has its ring while rank 0, which is slow, still connects."""
    store = store_of(rank, world_size, list(range(world_size)))

    def slowly(*arguments: Any) -> dist.ProcessGroupGloo:
        group = gloo_connect(*arguments)
        time.sleep(0.3)
        store.set("rank 0 has connected", "1")
        return group

    gloo_connect = gloo._connect
    with patch.object(gloo, "_connect", slowly if rank == 0 else gloo_connect):
        ring = GlooTransport.open(Opening(dist.PrefixStore("slowly", store), rank, world_size, 20.0))
    early = not store.check(["rank 0 has connected"])
    ring.close()
    return early


def test_no_rank_goes_on_while_another_connects(processes: Processes) -> None:
    assert set(processes.run(opened_before_the_last).values()) == {False}


# --- rings beside rings and groups -----------------------------------------------------------------------------------


def summed(group: dist.ProcessGroup | None = None) -> float:
    value = torch.ones(1)
    dist.all_reduce(value, group=group)
    return value.item()


def several_rings(rank: int, world_size: int) -> None:
    everyone = list(range(world_size))
    first = meet(rank, world_size, everyone, 20.0)
    second = meet(rank, world_size, everyone, 20.0)
    after, before = (rank + 1) % world_size, (rank - 1) % world_size
    came = [torch.zeros(1), torch.zeros(1)]
    pending = first.exchange([Message(after, torch.tensor([1.0]))], [Message(before, came[0])])
    second.exchange([Message(after, torch.tensor([2.0]))], [Message(before, came[1])]).wait()
    pending.wait()
    assert [buffer.item() for buffer in came] == [1.0, 2.0]
    first.close()
    third = meet(rank, world_size, everyone, 20.0)
    contract.shift_around(second)
    contract.shift_around(third)
    second.close()
    third.close()


def test_rings_follow_and_accompany_each_other(processes: Processes) -> None:
    processes.run(several_rings)


def beside_the_users_groups(rank: int, world_size: int) -> None:
    everyone = list(range(world_size))
    before = meet(rank, world_size, everyone, 20.0)
    dist.init_process_group("gloo", rank=rank, world_size=world_size, timeout=timedelta(seconds=20))
    try:
        after = meet(rank, world_size, everyone, 20.0)
        for ring in (before, after):
            contract.shift_around(ring)
            assert summed() == 3.0
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
            ring.abort(ValueError("only this one"))
            assert summed(pair) == 2.0
        contract.shift_around(default[0])
        assert summed() == 3.0
    finally:
        dist.destroy_process_group()
    contract.shift_around(before)
    contract.shift_around(default[1])
    for ring in (before, after, *default):
        ring.close()


def test_rings_and_the_users_groups_do_not_meet(processes: Processes) -> None:
    processes.run(beside_the_users_groups)


def without_a_group(rank: int, world_size: int) -> None:
    with pytest.raises(InputError, match="no default process group"):
        group_store()


def test_no_default_group_is_said(processes: Processes) -> None:
    processes.run(without_a_group)


def lives_apart(rank: int, world_size: int) -> None:
    def opened(restart_count: str) -> dist.Store:
        control_store._openings.clear()  # as in a new process
        return rendezvous_store(rank, world_size, 20.0, TORCHELASTIC_RESTART_COUNT=restart_count)

    counts = dict(control_store._openings)
    try:
        opened("0").set("cause", "of the former life")
        assert opened("0").check(["cause"])
        assert not opened("1").check(["cause"])
    finally:
        control_store._openings.update(counts)


def test_a_restarted_job_finds_no_old_keys(processes: Processes) -> None:
    processes.run(lives_apart)


def opens_with_one_missing(rank: int, world_size: int) -> None:
    store = rendezvous_store(rank, world_size, 20.0)
    if rank != 1:
        # Both begin together: one that its processor is late for would be missing as well.
        store.set(f"test {rank}", "here")
        store.wait(["test 0", "test 2"])
        start = time.monotonic()
        with pytest.raises(DeadlineError, match=rf"rank {rank} opened a ring of 3: ranks \[1\] did not arrive"):
            GlooTransport.open(Opening(store, rank, world_size, 2.0))
        assert time.monotonic() - start < 7.0


def test_a_rank_that_never_opens_is_named(processes: Processes) -> None:
    processes.run(opens_with_one_missing)


# --- lengths that differ ---------------------------------------------------------------------------------------------


def lengths_differ(rank: int, world_size: int, sent: int, received: int) -> None:
    ring = meet(rank, world_size, list(range(world_size)), 1.0)
    failures = (DeadlineError, PeerLostError)  # the second, when the other rank's deadline came first
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
    # Gloo drops the connection at rank 0's deadline, before rank 0 can say why; rank 1 has to look twice.
    ring = meet(rank, world_size, list(range(world_size)), 1.0 if rank == 0 else 20.0)
    if rank == 0:
        with pytest.raises(DeadlineError, match="kv 0"):
            ring.exchange([], [Message(peer, torch.zeros(4), "kv 0") for peer in (1, 2)]).wait()
    else:
        with pytest.raises(PeerLostError, match=r"rank 0 failed first: DeadlineError.*kv 0"):
            contract.receive(ring, 0)


def test_a_deadline_is_the_cause_that_its_neighbors_tell(processes: Processes) -> None:
    processes.run(deadline_wakes_the_neighbor)


class Asked:
    """Stands in for gloo's handle and keeps the timeout it is asked to wait."""

    def wait(self, timeout: timedelta) -> bool:
        self.timeout, self.ends = timeout, time.monotonic() + timeout.total_seconds()
        return True


@pytest.mark.parametrize("timeout_s", [0.0004, 0.02095, 1.0, -1.0, 0.0])
def test_no_wait_ends_before_its_deadline(timeout_s: float) -> None:
    # Gloo counts whole milliseconds, 0 is endless, and a wait that fails early would be taken for a lost connection.
    operation, asked = _Operation(0, False, Message(1, torch.zeros(1))), Asked()
    operation.work = asked  # type: ignore[assignment]
    deadline = time.monotonic() + timeout_s
    operation.wait(deadline)
    assert asked.ends >= deadline
    assert asked.timeout.microseconds % 1000 == 0
    assert timedelta(0) < asked.timeout <= timedelta(seconds=max(timeout_s, 0.0) + 0.001)


def cause_in_a_wait(rank: int, world_size: int) -> None:
    ring = meet(rank, world_size, list(range(world_size)), 20.0)
    ring.all_gather_bytes(b"")
    if rank == 0:
        start = time.monotonic()
        with pytest.raises(PeerLostError, match=r"recv from rank 1.*rank 2 failed first: ValueError: no heads"):
            contract.receive(ring, 1)
        assert time.monotonic() - start < 4.0  # far below its deadline, far above what a busy machine needs
    elif rank == 1:
        time.sleep(5.0)
    else:
        time.sleep(0.5)  # rank 0 waits for rank 1 already
        ring.abort(ValueError("no heads"))


def test_a_cause_ends_a_wait_for_another_rank(processes: Processes) -> None:
    processes.run(cause_in_a_wait)


# --- sudden ends -----------------------------------------------------------------------------------------------------


def exits_mid_exchange(rank: int, world_size: int, members: list[int]) -> str:
    ring = meet(rank, world_size, members, 20.0)
    after, before = contract.neighbors(ring)
    handle = ring.exchange(
        [Message(after, torch.ones(16), "kv")], [Message(before, torch.zeros(16), "kv") for _ in range(2)]
    )
    ring.all_gather_bytes(b"")  # all have posted their exchange
    if rank == 3:
        os._exit(1)
    start = time.monotonic()
    with pytest.raises(PeerLostError) as caught:
        handle.wait()
    assert time.monotonic() - start < 8.0
    with pytest.raises(ClosedError, match="is gone"):
        ring.exchange([], [])
    return str(caught.value)


def exit_is_named_by_all(mortals: Processes) -> None:
    told = mortals.run(exits_mid_exchange, mortals.ranks, exits=3)
    assert sorted(told) == [0, 1, 2]
    for rank, text in told.items():
        assert f"rank {rank} recv from rank {(rank - 1) % 4} 'kv' (64 bytes of torch.float32)" in text
        assert "rank 3 is gone" in text and "rank 3 is silent (stopped, stuck, gone or out of reach)" in text


def exits_mid_write(rank: int, world_size: int, members: list[int]) -> str:
    ring = meet(rank, world_size, members, 3.0)
    last = len(members) - 1
    big = torch.zeros(2**26)
    if ring.rank == last:
        ring.exchange([], [Message(0, big, "big")])
        os._exit(1)
    start = time.monotonic()
    message = ""
    if ring.rank == 0:
        with pytest.raises((DeadlineError, PeerLostError)) as caught:
            ring.exchange([Message(last, big, "big")], []).wait()
        message = str(caught.value)
    assert time.monotonic() - start < 6.0
    ring.close()
    return message


def exit_mid_write_is_named_in_time(mortals: Processes) -> None:
    told = mortals.run(exits_mid_write, mortals.ranks, exits=mortals.ranks[-1])
    assert f"rank 0 send to rank {len(told)} 'big' ({2**28} bytes of torch.float32)" in told[0]
    assert f"rank {len(told)} is silent (stopped, stuck, gone or out of reach)" in told[0]


def loses_the_host(rank: int, world_size: int, members: list[int]) -> str:
    ring = meet(rank, world_size, members, 20.0)
    ring.all_gather_bytes(b"")
    if rank == 0:
        os._exit(1)
    start = time.monotonic()
    with pytest.raises(PeerLostError) as caught:
        contract.receive(ring, 0, "kv 5")
    assert time.monotonic() - start < 8.0
    ring.close()
    return str(caught.value)


def lost_store_is_said(mortals: Processes) -> None:
    told = mortals.run(loses_the_host, mortals.ranks, exits=0)
    assert "rank 1 recv from rank 0 'kv 5' (64 bytes of torch.float32)" in told[1]
    for text in told.values():
        assert "the store's host (rank 0" in text and "is gone" in text


@pytest.mark.slow
def test_ranks_that_exit_are_named() -> None:
    """One set of processes, which die one after another; rank 0, the store's host, is the last."""
    with Processes(4) as mortals:
        exit_is_named_by_all(mortals)
        exit_mid_write_is_named_in_time(mortals)
        lost_store_is_said(mortals)
