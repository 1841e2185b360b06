"""Which address a gloo rank is reached at, and what an opening says that cannot connect."""

from __future__ import annotations

import re
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch.distributed as dist

from ringattn.errors import DeadlineError, InputError
from ringattn.transport import gloo
from ringattn.transport.gloo import GlooTransport
from ringattn.transport.location import Address, find_address, reachable


def opened(stores: list[dist.Store], timeout_s: float, interface: str = "") -> list[Any]:
    """Each rank's transport, or what it raised."""

    def one(rank: int) -> Any:
        try:
            return GlooTransport.open(stores[rank], rank, len(stores), timeout_s, interface=interface)
        except (DeadlineError, InputError) as error:
            return error

    with ThreadPoolExecutor(len(stores)) as pool:
        return list(pool.map(one, range(len(stores))))


def test_the_address_is_that_of_the_route_to_the_store() -> None:
    host = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    assert find_address(dist.PrefixStore("ring", host), "") == Address("127.0.0.1", "127.0.0.1", "")
    assert find_address(host, "lo") == Address("", "", "lo")
    assert find_address(dist.HashStore(), "") == Address("", "", "")


def test_a_loopback_address_gives_way_to_what_the_other_hosts_use() -> None:
    met = [
        Address("127.0.1.1", "127.0.1.1", ""),
        Address("127.0.1.1", "127.0.1.1", ""),
        Address("10.0.0.2", "10.0.0.1", ""),
    ]
    assert [reachable(rank, met).own for rank in range(3)] == ["10.0.0.1", "10.0.0.1", "10.0.0.2"]
    alone = met[:2]
    assert [reachable(rank, alone) for rank in range(2)] == alone
    named = [Address("", "", "eth1"), Address("10.0.0.2", "10.0.0.1", "")]
    assert reachable(0, named) == named[0]


def test_an_interface_that_is_not_there_is_refused_on_all_ranks() -> None:
    shared = dist.HashStore()
    for rank, error in enumerate(opened([shared, shared], 20.0, interface="nope0")):
        assert isinstance(error, InputError)
        assert str(error) == (
            f"rank {rank} opened a ring of 2: rank 0: GLOO_SOCKET_IFNAME=nope0 names no interface with an address; "
            "rank 1: GLOO_SOCKET_IFNAME=nope0 names no interface with an address"
        )


def test_an_opening_that_cannot_connect_lists_the_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*facts: Any) -> None:
        raise RuntimeError("connection refused")

    monkeypatch.setattr(gloo, "_connect", never)
    host = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    for rank, error in enumerate(opened([host.clone(), host.clone()], 5.0)):
        assert isinstance(error, DeadlineError)
        said, advice = str(error).split("; ")
        assert said == (
            f"rank {rank} opened a ring of 2: all ranks arrived, but could not connect within 5.0 s "
            "(rank 0 at 127.0.0.1, rank 1 at 127.0.0.1)"
        )
        assert "set GLOO_SOCKET_IFNAME on every rank to the network interface" in advice


def test_a_name_that_is_not_resolved_in_time_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    gate = threading.Event()
    monkeypatch.setattr(gloo, "find_address", lambda store, interface: gate.wait(20.0))
    monkeypatch.setattr(gloo, "GRACE_S", 0.1)
    (error,) = opened([dist.HashStore()], 0.1)
    gate.set()
    assert isinstance(error, DeadlineError)
    assert re.fullmatch(
        r"rank 0 opened a ring of 1: the name of the store's host .* is not resolved within 0.1 s", str(error)
    )
