"""Signs of life, what is told from their silence, and how a gloo ring names the rank that stands still."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path

import pytest
import torch
from torch.distributed import HashStore

from ringattn.errors import ClosedError, DeadlineError, PeerLostError
from ringattn.transport.base import Message
from ringattn.transport.control_store import ControlStore
from ringattn.transport.diagnosis import CAUSE_S, SILENCE_S, Diagnosis, Wait
from ringattn.transport.gloo import GlooTransport
from ringattn.transport.heartbeat import ENDED, Heartbeat, HeartbeatThread, LastHeartbeat
from tests.contract.meeting import rendezvous_store
from tests.contract.processes import Processes

ROOT = Path(__file__).resolve().parents[2]
FAST_S = 0.02
Left = Callable[[], set[threading.Thread]]


class LostStore:
    """A store whose host is gone."""

    def __getattr__(self, name: str) -> object:
        raise RuntimeError("connection reset")


def heartbeat_threads() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name.startswith("ringattn-heartbeat")}


@pytest.fixture
def left() -> Left:
    """The heartbeat threads of this test that still run; other tests leave those of dead ranks behind."""
    before = heartbeat_threads()
    return lambda: heartbeat_threads() - before


# --- heartbeats ------------------------------------------------------------------------------------------------------


def test_a_heartbeat_is_read_with_its_status() -> None:
    store = HashStore()
    one, other = Heartbeat(store, 1), Heartbeat(store, 0)
    assert other.last(1) is None
    one.send("forward step 3: KV0 from rank 2")
    assert other.last(1) == LastHeartbeat(1, "forward step 3: KV0 from rank 2")
    one.send("")
    assert other.last(1) == LastHeartbeat(2, "")
    one.end("all-gather 4")
    assert other.last(1) == LastHeartbeat(ENDED, "all-gather 4")


def test_only_those_who_stand_still_are_silent() -> None:
    store = HashStore()
    Heartbeat(store, 1).send("stuck")
    Heartbeat(store, 2).end("closed")
    living = HeartbeatThread(store, 3, FAST_S, lambda: "busy")
    monitor = Heartbeat(store, 0)
    assert monitor.silent(range(1, 5), 20 * FAST_S) == [1, 4]
    start = time.monotonic()
    assert monitor.silent([2, 3], 30.0) == []
    assert time.monotonic() - start < 5.0
    living.stop()
    assert monitor.silent([3], 5 * FAST_S) == []


def test_a_status_is_asked_for_at_every_beat(left: Left) -> None:
    store, status = HashStore(), ["first"]
    beating = HeartbeatThread(store, 0, FAST_S, lambda: status[0])
    status[0] = "second"
    store_time = time.monotonic() + 5.0
    while (newest := Heartbeat(store, 1).last(0)) is None or newest.status != "second":
        assert time.monotonic() < store_time
        time.sleep(FAST_S)
    beating.stop()
    beating.stop()
    assert not left()


def test_leaving_without_a_word_is_silence(left: Left) -> None:
    store = HashStore()
    beating = HeartbeatThread(store, 1, FAST_S, lambda: "pass")
    beating._halt()
    assert Heartbeat(store, 0).silent([1], 5 * FAST_S) == [1]
    beating.stop()
    assert not left()


def test_a_lost_store_ends_the_thread_quietly(capfd: pytest.CaptureFixture[str]) -> None:
    beating = HeartbeatThread(LostStore(), 0, FAST_S, lambda: "pass")  # type: ignore[arg-type]
    beating._thread.join(5.0)
    assert not beating._thread.is_alive()
    beating.stop()
    assert capfd.readouterr().err == ""


LEAVES = """
from torch.distributed import TCPStore
from ringattn.transport.heartbeat import HeartbeatThread
store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
beatings = [HeartbeatThread(store.clone(), rank, 1e-6, lambda: "busy") for rank in range(16)]
store.wait([f"heartbeat/{rank}" for rank in range(16)])
"""


def test_a_process_leaves_in_the_middle_of_a_heartbeat() -> None:
    # A thread that is inside the store when the interpreter ends takes the process down; one of many always is.
    done = subprocess.run([sys.executable, "-c", LEAVES], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")


# --- what silence tells ----------------------------------------------------------------------------------------------


class Scene:
    """Ranks 1 to 3 as rank 0 sees them: 1 stands still in step 1, 2 is alive in step 2, 3 has closed its ring."""

    def __init__(self) -> None:
        self.store = HashStore()
        Heartbeat(self.store, 1).send("forward step 1: KV0")
        self.living = HeartbeatThread(self.store, 2, FAST_S, lambda: "forward step 2: KV1")
        Heartbeat(self.store, 3).end("idle")
        self.boards = [ControlStore(self.store, rank, 4) for rank in range(4)]
        self.boards[3].leave()
        self.diagnosis = Diagnosis(self.boards[0])


@pytest.fixture
def scene() -> Iterator[Scene]:
    made = Scene()
    yield made
    made.living.stop()


SILENT = "rank 1 is silent (stopped, stuck, gone or out of reach), last heard in 'forward step 1: KV0'"


def test_a_deadline_names_the_silent_among_all(scene: Scene) -> None:
    start = time.monotonic()
    alive = "rank 2 is alive in 'forward step 2: KV1'"
    assert scene.diagnosis.of_deadline([2]) == f"{SILENT}; {alive}"
    assert SILENCE_S <= time.monotonic() - start < 1.0
    assert scene.diagnosis.of_deadline([1, 3]) == f"{SILENT}; rank 3 has left its ring"


def test_who_was_heard_in_the_second_half_of_the_wait_is_not_called_silent(scene: Scene) -> None:
    reader, one = Heartbeat(scene.store, 0), Heartbeat(scene.store, 1)
    wait = Wait(0.0)
    wait.look(reader, [1, 2, 3])
    assert scene.diagnosis.of_deadline([2], wait).startswith(SILENT)  # it has sent nothing since
    one.send("forward step 1: KV0")
    one.send("forward step 1: KV0")
    told = scene.diagnosis.of_deadline([1, 2], wait)
    assert told.startswith("rank 1 is not heard at the moment, last in 'forward step 1: KV0'; rank 2 is alive")
    assert "silent" not in told
    unread = Wait(20.0)
    unread.look(reader, [1, 2, 3])
    assert unread.heartbeats is None
    assert "silent" not in scene.diagnosis.of_deadline([1], unread)  # nothing is known of the time before


def test_a_deadline_tells_an_earlier_cause(scene: Scene) -> None:
    scene.boards[2].publish_cause(ValueError("no heads"))
    assert scene.diagnosis.of_deadline([]) == f"{SILENT}; rank 2 failed first: ValueError: no heads"


def test_who_was_never_heard_is_silent() -> None:
    told = Diagnosis(ControlStore(HashStore(), 0, 2)).of_deadline([1])
    assert told == "rank 1 is silent (stopped, stuck, gone or out of reach), never heard"


def test_a_lost_peer_that_is_silent_is_gone(scene: Scene) -> None:
    start = time.monotonic()
    assert scene.diagnosis.of_loss(1, OSError("reset")) == f"rank 1 is gone (reset); {SILENT}"
    assert CAUSE_S <= time.monotonic() - start < CAUSE_S + 0.3


def test_a_lost_peer_that_lives_fell_because_of_the_silent_one(scene: Scene) -> None:
    assert scene.diagnosis.of_loss(2, OSError("reset")) == f"rank 2 dropped its connection (reset); {SILENT}"


def test_a_lost_peer_that_closed_is_not_blamed(scene: Scene) -> None:
    start = time.monotonic()
    assert scene.diagnosis.of_loss(3, OSError("reset")) == "rank 3 closed its ring"
    assert time.monotonic() - start < 0.3


def test_a_cause_that_is_published_late_is_found(scene: Scene) -> None:
    # A neighbor at its own deadline listens before it publishes, and gloo has dropped its pair by then.
    late = threading.Timer(SILENCE_S + 0.1, scene.boards[2].publish_cause, [ValueError("no heads")])
    late.start()
    assert scene.diagnosis.of_loss(2, OSError("reset")) == "rank 2 failed first: ValueError: no heads"
    late.join()


def test_a_lost_host_is_said() -> None:
    lost = Diagnosis(ControlStore(LostStore(), 0, 2))  # type: ignore[arg-type]
    assert lost.of_deadline([1]) == "the store's host (rank 0) is gone"
    # The peer may have fallen because the store's host did.
    told = lost.of_loss(1, OSError("reset"))
    assert told.startswith("the connection to rank 1 was lost (reset), and the store's host (rank 0) is gone")


# --- on processes ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def processes() -> Iterator[Processes]:
    with Processes(3) as started:
        yield started


def opened(rank: int, world_size: int, timeout_s: float) -> GlooTransport:
    store = rendezvous_store(rank, world_size, 60.0)
    ring = GlooTransport.open(store, rank, world_size, 20.0)
    ring.all_gather_bytes(b"")  # all are there
    ring._timeout_s = timeout_s
    return ring


def received(ring: GlooTransport, peer: int, label: str) -> None:
    ring.exchange([], [Message(peer, torch.zeros(4), label)]).wait()


def waits_in_a_chain(rank: int, world_size: int, stops: bool) -> tuple[str, str, float]:
    """0 waits for 2, which waits for 1, which is stopped or sleeps; (error, message, seconds)."""
    ring = opened(rank, world_size, 2.0)
    store = ring._control.store._connection.store  # torch's own, which can wait
    if rank == 1:
        store.set("pid", str(os.getpid()))
        handle = ring.exchange([], [Message(0, torch.zeros(4), "step 1: KV0")])
        time.sleep(0.6)  # the heartbeat says where it is
        if stops:
            os.kill(os.getpid(), signal.SIGSTOP)
        else:
            time.sleep(4.0)
        with pytest.raises(PeerLostError, match="failed first: DeadlineError"):
            handle.wait()
        return "", "", 0.0
    time.sleep(0.6)
    start = time.monotonic()
    with pytest.raises((DeadlineError, PeerLostError)) as caught:
        received(ring, 2 if rank == 0 else 1, "step 2: KV1" if rank == 0 else "step 1: KV1")
    seconds = time.monotonic() - start
    store.set(f"answered/{rank}", "1")
    if rank == 0 and stops:
        store.wait(["answered/2"], timedelta(seconds=10.0))
        os.kill(int(store.get("pid")), signal.SIGCONT)
    return type(caught.value).__name__, str(caught.value), seconds


@pytest.mark.slow
def test_a_stopped_rank_is_named_at_the_end_of_the_chain(processes: Processes) -> None:
    told = processes.run(waits_in_a_chain, True)
    for rank in (0, 2):
        kind, message, seconds = told[rank]
        assert kind in ("DeadlineError", "PeerLostError")
        assert "rank 1 is silent (stopped, stuck, gone or out of reach), last heard in 'step 1: KV0'" in message, told
        assert "rank 2 is silent" not in message and "rank 0 is silent" not in message, told
        assert seconds < 4.0, told


@pytest.mark.slow
def test_a_rank_that_is_busy_is_not_called_silent(processes: Processes) -> None:
    told = processes.run(waits_in_a_chain, False)
    messages = [told[rank][1] for rank in (0, 2)]
    assert all("silent" not in message for message in messages), told
    assert any("rank 1 is alive in 'step 1: KV0'" in message for message in messages), told


def ends_its_threads(rank: int, world_size: int) -> None:
    ring = opened(rank, world_size, 20.0)
    assert [thread.name for thread in heartbeat_threads()] == [f"ringattn-heartbeat-{rank}"]
    second = opened(rank, world_size, 20.0)
    assert len(heartbeat_threads()) == 2
    ring.close()
    assert len(heartbeat_threads()) == 1
    second.abort(ValueError("enough"))
    assert not heartbeat_threads()
    with pytest.raises(ClosedError):
        second.all_gather_bytes(b"")
    alone = GlooTransport.open(HashStore(), 0, 1, 5.0)
    assert not heartbeat_threads()
    alone.close()


@pytest.mark.slow
def test_no_thread_outlives_its_ring(processes: Processes) -> None:
    processes.run(ends_its_threads)
