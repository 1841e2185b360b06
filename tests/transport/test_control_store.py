"""Calls of the control store keep their deadlines even if the store's host hangs, and a gather needs few requests."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from ringattn.errors import DeadlineError, InputError, PeerLostError
from ringattn.transport import control_store, meeting
from ringattn.transport.control_store import BoundedStore, ControlStore, bounded, group_store
from ringattn.transport.deadline import Deadline
from tests.contract.processes import rendezvous_store
from tests.transport.store_hosts import StoreHost
from tests.transport.threads import on_each_rank

ROOT = Path(__file__).resolve().parents[2]
CALL_S = 0.3
SLACK_S = 1.5
"""The delay that a busy machine may add to a deadline."""


def control_of(host: StoreHost, rank: int = 0, world_size: int = 4) -> ControlStore:
    return ControlStore(dist.PrefixStore("ring", host.client()), rank, world_size, CALL_S)


def refused_in_time(call: Callable[[], Any], limit_s: float = CALL_S) -> str:
    start = time.monotonic()
    with pytest.raises(DeadlineError) as caught:
        call()
    assert time.monotonic() - start < limit_s + SLACK_S
    return str(caught.value)


CALLS: list[Callable[[ControlStore], Any]] = [
    lambda control: control.get("up"),
    lambda control: control.multi_get(["up", "up"]),
    lambda control: control.holds("key"),
    lambda control: control.missing("stem"),
    lambda control: control.add("counter"),
    lambda control: control.cause(),
    lambda control: control.clone(),
    lambda control: control.set("big", bytes(2**26)),  # larger than the buffers of a socket, so that the call blocks
    lambda control: control.delete_key("up"),
    lambda control: control.gather("facts", b"mine", Deadline(CALL_S)),
]


def test_every_call_ends_in_time_when_the_host_is_stopped(host: StoreHost) -> None:
    controls = [control_of(host) for _ in CALLS]
    controls[0].set("up", "1")
    host.stop()
    with ThreadPoolExecutor(len(CALLS)) as pool:
        messages = list(pool.map(lambda call, control: refused_in_time(lambda: call(control)), CALLS, controls))
    for text in messages:
        assert f"the store's host (rank 0 of the job, or torchrun's agent, at 127.0.0.1:{host.port})" in text
        assert f"did not answer within {CALL_S} s" in text


def test_a_lost_connection_is_not_used_again(host: StoreHost) -> None:
    control = control_of(host)
    host.stop()
    refused_in_time(lambda: control.holds("key"))
    host.resume()
    start = time.monotonic()
    for again in (control, control.until(Deadline(20.0))):
        with pytest.raises(DeadlineError, match="did not answer within"):
            again.holds("key")
    control.publish_cause(ValueError("no heads"))  # neither raises nor waits
    control.leave()
    assert time.monotonic() - start < CALL_S
    fresh = control_of(host)
    assert fresh.cause() is None and not fresh.holds("closed/0")


def test_a_nearer_deadline_wins(host: StoreHost) -> None:
    near, far = Deadline(CALL_S), Deadline(40.0)
    controls = [ControlStore(host.client(), 0, 1, 60.0) for _ in range(3)]
    views = [controls[0].until(near), controls[1].until(near).until(far), controls[2].until(far).until(near)]
    host.stop()
    with ThreadPoolExecutor(3) as pool:
        list(pool.map(lambda view: refused_in_time(lambda: view.holds("key")), views))


def test_a_deadline_that_has_passed_does_not_blame_the_host(host: StoreHost) -> None:
    control = control_of(host)
    with pytest.raises(DeadlineError, match="was not called"):
        control.until(Deadline(0.0)).holds("key")
    assert not control.holds("key")


def test_a_host_that_is_gone_raises_no_deadline_error() -> None:
    host = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    control = ControlStore(host.clone(), 0, 1, CALL_S)
    control.set("key", "value")
    control.get("key")
    del host
    with pytest.raises(RuntimeError) as caught:
        control.get("key")
    assert not isinstance(caught.value, DeadlineError)
    control.publish_cause(ValueError("no heads"))
    control.leave()


def test_a_host_that_is_stopped_ends_an_opening(host: StoreHost, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(host.port))
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    monkeypatch.setattr(meeting, "GRACE_S", 0.1)
    connected = host.client()
    host.stop()
    for stores, reason in (
        ({("127.0.0.1", host.port): connected}, "accepts a connection but does not answer"),
        ({}, f"rank 1: 127.0.0.1:{host.port} takes the connection and does not answer: torchrun's agent is stopped"),
    ):
        monkeypatch.setattr(meeting, "_stores", stores)
        assert reason in refused_in_time(lambda: rendezvous_store(1, 3, CALL_S))


def test_a_late_result_is_dropped() -> None:
    gate, late = threading.Event(), []
    assert refused_in_time(lambda: bounded(lambda: late.append(gate.wait(20.0)), Deadline(0.05), "late")) == "late"
    gate.set()
    with pytest.raises(ZeroDivisionError):
        bounded(lambda: 1 // 0, Deadline(20.0), "late")


LEAVES = """
import threading
from torch.distributed import TCPStore
from ringattn.transport.control_store import ControlStore
store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
def ask(control):
    while True:
        control.set("key", "value")
controls = [ControlStore(store.clone(), rank, 16) for rank in range(16)]
for control in controls:
    threading.Thread(target=ask, args=(control,), daemon=True).start()
controls[0].clone().get("key")
"""


def test_a_process_can_exit_during_a_call() -> None:
    done = subprocess.run([sys.executable, "-c", LEAVES], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and "terminate" not in done.stderr


def test_an_unused_connection_ends_its_thread() -> None:
    before = set(threading.enumerate())
    control = ControlStore(dist.HashStore(), 0, 1)
    control.set("key", "value")
    assert control.until(Deadline(20.0)).get("key") == b"value"
    (thread,) = set(threading.enumerate()) - before
    del control
    thread.join(20.0)
    assert not thread.is_alive()


def test_a_fork_is_refused() -> None:
    control = ControlStore(dist.HashStore(), 0, 1)
    control.set("key", "value")
    child = os.fork()
    if child == 0:
        try:
            control.holds("key")
        except RuntimeError as error:
            os._exit(17 if "forked" in str(error) else 1)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 17


# --- gather ----------------------------------------------------------------------------------------------------------


class CountingStore:
    """A store that records the method of each request."""

    def __init__(self, store: dist.Store, requests: list[str]) -> None:
        self._store, self._requests = store, requests

    def __getattr__(self, name: str) -> Any:
        self._requests.append(name)
        return getattr(self._store, name)


def gathered(stores: list[Any], payload: Callable[[int], bytes]) -> list[Any]:
    def gather(rank: int) -> Any:
        return ControlStore(stores[rank], rank, len(stores)).gather("facts", payload(rank), Deadline(20.0))

    return on_each_rank(len(stores), gather)


@pytest.mark.parametrize("ranks", [1, 2, 5])
def test_gather_returns_every_payload_by_rank(tmp_path: Path, ranks: int) -> None:
    def payload(rank: int) -> bytes:
        return bytes([rank, 0, 255]) * (rank * 1000)  # the payload of rank 0 is empty

    expected = [[payload(rank) for rank in range(ranks)]] * ranks
    tcp = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    shared = dist.HashStore()
    assert gathered([dist.PrefixStore("ring", tcp.clone()) for _ in range(ranks)], payload) == expected
    assert gathered([dist.PrefixStore("ring", shared) for _ in range(ranks)], payload) == expected
    assert gathered([dist.FileStore(str(tmp_path / "file"), ranks) for _ in range(ranks)], payload) == expected


def test_the_requests_of_gather_grow_linearly_with_the_ranks() -> None:
    shared, requests = dist.HashStore(), []  # type: ignore[var-annotated]
    gathered([CountingStore(shared, requests) for _ in range(24)], lambda rank: b"x")
    counts = {name: requests.count(name) for name in set(requests)}
    assert (counts["set"], counts["add"], counts["multi_get"]) == (25, 24, 1)
    assert counts["get"] == 23


def test_gather_names_the_missing_ranks() -> None:
    shared = dist.HashStore()
    ControlStore(shared, 4, 9).set("facts/4", b"")
    control = ControlStore(shared, 0, 9)
    with pytest.raises(DeadlineError) as caught:
        control.gather("facts", b"", Deadline(0.05))
    assert str(caught.value) == "rank 0: ranks [1, 2, 3, 5, 6, 7, 8] did not arrive at 'facts' within 0.05 s"


def test_gather_works_without_the_rank_that_reads_for_all() -> None:
    shared = dist.HashStore()
    shared.add("facts/count", 1)
    shared.set("facts/1", b"one")  # type: ignore[arg-type]
    shared.add("facts/count", -1)  # as if rank 1 had ended after it wrote its payload and before it counted itself
    assert ControlStore(shared, 0, 2).gather("facts", b"zero", Deadline(0.05)) == [b"zero", b"one"]


def test_gather_calls_the_watch_while_it_waits() -> None:
    def watch() -> None:
        raise ValueError("the ring has failed")

    with pytest.raises(ValueError, match="the ring has failed"):
        ControlStore(dist.HashStore(), 0, 2).gather("facts", b"", Deadline(20.0), watch)


def test_gather_refuses_more_processes_than_ranks() -> None:
    shared = dist.HashStore()
    gathered([shared, shared], lambda rank: b"x")
    with pytest.raises(InputError, match=r"rank 1: the ring of 2 ranks cannot open: 3 processes arrived at 'facts'"):
        ControlStore(shared, 1, 2).gather("facts", b"x", Deadline(20.0))


def test_a_wait_ends_with_the_cause_of_another_rank() -> None:
    shared = dist.HashStore()
    ControlStore(shared, 1, 2).publish_cause(InputError("no heads"))
    with pytest.raises(PeerLostError, match=r"^rank 0: rank 1 failed first: InputError: no heads$"):
        ControlStore(shared, 0, 2).gather("facts", b"x", Deadline(20.0))


def test_a_process_that_was_stopped_names_the_missing_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control_store, "GRACE_S", 0.2)
    control = ControlStore(dist.HashStore(), 0, 2)
    with pytest.raises(DeadlineError, match=r"^rank 0: ranks \[1\] did not arrive at 'facts' within 0\.05 s$"):
        control.gather("facts", b"", Deadline(0.05), lambda: time.sleep(0.4))


def test_missing_needs_few_requests() -> None:
    requests: list[str] = []
    control = ControlStore(CountingStore(dist.HashStore(), requests), 0, 1024)  # type: ignore[arg-type]
    for rank in set(control.everyone()) - {700}:
        control.set(f"arrived/{rank}", "1")
    requests.clear()
    assert control.missing("arrived") == [700]
    assert len(requests) == 21


# --- groups ----------------------------------------------------------------------------------------------------------


def test_the_key_of_a_group_is_short_and_unique(monkeypatch: pytest.MonkeyPatch) -> None:
    origins: dict[tuple[int, ...], str] = {}
    for members in (tuple(range(1024)), tuple(range(1, 1025)), (0, 1), (0, 11)):
        monkeypatch.setattr(dist, "is_initialized", lambda: True)
        monkeypatch.setattr(dist, "get_rank", lambda members=members: members[0])
        monkeypatch.setattr(dist, "get_process_group_ranks", lambda group, members=members: list(members))
        monkeypatch.setattr(dist.distributed_c10d, "_get_process_group_name", lambda group: "cp")
        monkeypatch.setattr(dist.distributed_c10d, "_get_default_group", lambda: None)
        monkeypatch.setattr(control_store, "_get_default_store", dist.HashStore)
        store, rank, world_size = group_store()
        assert (rank, world_size) == (0, len(members))
        assert isinstance(store, dist.PrefixStore)
        store.set("key", "value")
        origins[members] = store.prefix if hasattr(store, "prefix") else next(reversed(control_store._openings))
    assert len(set(origins.values())) == len(origins)
    assert all(len(origin) < 40 for origin in origins.values())


def test_views_of_a_bounded_store_use_its_connection() -> None:
    store = BoundedStore(dist.HashStore(), 1.0)
    first, second = ControlStore(store, 0, 2), ControlStore(store, 1, 2)
    assert first._connection is second._connection is store._connection and first.rank != second.rank
    assert first.clone()._connection is not store._connection
