"""Flight records: their content, the records that a failed ring leaves, and the report of `ringattn flight`."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from ringattn import cli
from ringattn.errors import ClosedError, DeadlineError, InputError, PeerLostError
from ringattn.launch.doctor.flight import divergences, first_unfinished, main, read_records
from ringattn.observe.flight import (
    CAPACITY,
    CAPTURED,
    CONTROL_LANE,
    DONE,
    FAILED,
    LAUNCHING,
    RUNNING,
    FlightRecord,
    MessageRecord,
)
from ringattn.transport.base import Message, Opening
from ringattn.transport.gloo import GlooTransport
from ringattn.transport.shared.transport import ShmTransport
from tests.contract.processes import Processes, rendezvous_store


def post(
    record: FlightRecord, op: str, peer: int, label: str, nbytes: int = 8, state: str = DONE, lane: int = 0
) -> None:
    """Add an exchange with one message to `record`."""
    flight = record.begin(lane, (MessageRecord(op, peer, nbytes, 0, label),))
    flight.state = state
    flight.done_s = time.time() if state == DONE else 0.0


def pair() -> tuple[FlightRecord, FlightRecord]:
    return FlightRecord(0, 2, "gloo"), FlightRecord(1, 2, "gloo")


def mismatches(folder: Path, *records: FlightRecord) -> list[str]:
    """Write the records to `folder`. Return the mismatches between them, one line each."""
    for record in records:
        record.dump(folder, "broken")
    return divergences(read_records(folder))


# --- the record ------------------------------------------------------------------------------------------------------


def test_the_newest_exchanges_are_kept_and_the_dropped_counted(tmp_path: Path) -> None:
    record = FlightRecord(1, 3, "gloo")
    assert record.where() == "idle"
    for n in range(CAPACITY + 5):
        post(record, "send" if n % 2 else "recv", 2, f"n {n}", lane=n % 3)
    assert record.where() == f"idle after n {CAPACITY + 4}"
    written = json.loads(record.dump(tmp_path / "new" / "folder", "broken").read_text())
    assert [flight["sequence"] for flight in written["flights"]] == list(range(5, CAPACITY + 5))
    assert (written["exchanges"], written["rank"], written["world_size"]) == (CAPACITY + 5, 1, 3)
    dropped = {(gone["lane"], gone["op"], gone["peer"]): gone["messages"] for gone in written["dropped"]}
    assert dropped == {(0, "recv", 2): 1, (1, "send", 2): 1, (2, "recv", 2): 1, (0, "send", 2): 1, (1, "recv", 2): 1}
    post(record, "send", 2, "last", state=RUNNING)
    assert record.where() == "last"


# --- mismatches ------------------------------------------------------------------------------------------------------


def test_equal_records_do_not_diverge(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a, b = pair()
    for n in range(3):
        post(a, "send", 1, f"n {n}", 8 + n)
        post(b, "recv", 0, f"m {n}", 8 + n)
    assert mismatches(tmp_path, a, b) == []
    assert main([str(tmp_path)]) == 0
    assert "no divergence" in capsys.readouterr().out


def test_bytes_that_differ_name_both_ends(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a, b = pair()
    for n in range(3):
        post(a, "send", 1, f"n {n}", 8 if n else 4)
        post(b, "recv", 0, f"m {n}", 4 if n < 2 else 16, state=FAILED if n else DONE)
    assert mismatches(tmp_path, a, b) == [
        "bytes differ: rank 0 send to rank 1 'n 1' (8 bytes, exchange 1); "
        "rank 1 recv from rank 0 'm 1' (4 bytes, exchange 1)"
    ]
    assert main([str(tmp_path)]) == 1
    assert "divergence: bytes differ" in capsys.readouterr().out


def test_the_rank_that_never_posted_is_named_before_those_that_wait(tmp_path: Path) -> None:
    # Rank 0 waits for rank 2, rank 2 waits for rank 1, and rank 1 is not in an exchange. So rank 1 is to blame.
    a, b, c = (FlightRecord(rank, 3, "gloo") for rank in range(3))
    for n in range(3):
        post(b, "recv", 2, f"step {n}")
        post(c, "send", 1, f"step {n}")
    post(c, "recv", 1, "step 3", state=FAILED)
    post(a, "recv", 2, "step 0", state=FAILED)
    assert mismatches(tmp_path, a, b, c) == [
        "no partner: rank 2 recv from rank 1 'step 3' (8 bytes, exchange 3); rank 1 never posted its send to rank 2; "
        "its last posted exchange: exchange 2, 'step 2'",
        "no partner: rank 0 recv from rank 2 'step 0' (8 bytes, exchange 0); rank 2 never posted its send to rank 0; "
        "its last posted exchange: exchange 3, 'step 3'",
    ]


def test_a_rank_inside_a_launch_has_not_posted(tmp_path: Path) -> None:
    a, b = pair()
    post(a, "send", 1, "n 0")
    post(b, "recv", 0, "m 0")
    post(a, "send", 1, "n 1", state=RUNNING)
    post(b, "recv", 0, "m 1", state=LAUNCHING)
    (mismatch,) = mismatches(tmp_path, a, b)
    assert "rank 1 never posted its recv from rank 0; its last posted exchange: exchange 0, 'm 0'" in mismatch
    assert mismatch.endswith("it is inside the launch of exchange 1")


def test_captured_exchanges_are_not_under_way(tmp_path: Path) -> None:
    a, b = pair()
    post(a, "send", 1, "n 0", state=CAPTURED)
    post(b, "recv", 0, "m 0", state=CAPTURED)
    post(a, "send", 1, "n 1", state=RUNNING)
    assert mismatches(tmp_path, a, b)[0].startswith("no partner: rank 0 send to rank 1 'n 1'")
    assert first_unfinished(read_records(tmp_path)[1]) is None


def test_what_is_posted_after_the_peer_gave_up_answers_nothing(tmp_path: Path) -> None:
    a, b = pair()
    post(a, "recv", 1, "step 0", state=FAILED)
    a.dump(tmp_path, "broken")
    time.sleep(0.01)
    post(b, "send", 0, "step 0")
    assert mismatches(tmp_path, b) == [
        "no partner: rank 0 recv from rank 1 'step 0' (8 bytes, exchange 0); rank 1 never posted its send to rank 0; "
        "its last posted exchange: none"
    ]


def test_lanes_do_not_meet(tmp_path: Path) -> None:
    # One rank may post its part of an exchange before an all-gather, and the other rank after it.
    a, b = pair()
    post(a, "send", 1, "all-gather 0", 256, lane=CONTROL_LANE)
    post(a, "send", 1, "kv", 64)
    post(b, "recv", 0, "kv", 64)
    post(b, "recv", 0, "all-gather 0", 256, lane=CONTROL_LANE)
    assert mismatches(tmp_path, a, b) == []


@pytest.mark.parametrize("extra", [0, 1])
def test_dropped_messages_are_counted(tmp_path: Path, extra: int) -> None:
    # The messages of two lanes advance independently, so an exchange's number is not the ordinal of its message.
    a, b = pair()
    for n in range(CAPACITY + 10):
        post(a, "send", 1, f"n {n}", n + 1)
        post(b, "recv", 0, f"n {n}", n + 1)
        if n % 2:
            post(b, "send", 0, "back", lane=1)
            post(a, "recv", 1, "back", lane=1)
    for _ in range(extra):
        post(a, "send", 1, "one more", state=FAILED)
    lines = mismatches(tmp_path, a, b)
    assert lines == [] if not extra else "rank 0 send to rank 1 'one more'" in lines[0] and len(lines) == 1


def test_a_partner_that_is_no_longer_held_is_said(tmp_path: Path) -> None:
    a, b = pair()
    post(a, "send", 1, "n 0")
    post(b, "recv", 0, "n 0")
    for _ in range(CAPACITY + 1):
        post(a, "send", 1, "more")
    (lines,) = mismatches(tmp_path, a, b)
    assert "rank 0 has dropped the first of them, from before exchange 2" in lines
    assert "rank 1 never posted its recv from rank 0; its last posted exchange: exchange 0, 'n 0'" in lines


def test_ranks_without_a_record_are_named_first(tmp_path: Path) -> None:
    a, b = FlightRecord(0, 4, "gloo"), FlightRecord(2, 4, "gloo")
    post(a, "send", 2, "kv")
    lines = mismatches(tmp_path, a, b)
    assert [line.split(":")[0] for line in lines] == [
        "there is no record of rank 1", "there is no record of rank 3", "no partner"
    ]  # fmt: skip


# --- the command -----------------------------------------------------------------------------------------------------


def test_the_table_says_how_far_each_rank_came(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a, b = pair()
    post(a, "send", 1, "step 0")
    post(b, "recv", 0, "step 0")
    post(a, "recv", 1, "step [1]", state=FAILED)
    a.dump(tmp_path, "DeadlineError: [no] answer")
    b.dump(tmp_path, "ValueError: odd")
    assert main([str(tmp_path)]) == 1
    rows = [line for line in capsys.readouterr().out.splitlines() if line.startswith("│")]
    for word in ("0", "2", "0: step 0", "1: step [1]", "failed", "0.00 s", "DeadlineError: [no] answer"):
        assert word in rows[0]
    for word in ("1", "0: step 0", "-", "ValueError: odd"):
        assert word in rows[1]


def spoil(text: str) -> Callable[[Path], object]:
    return lambda folder: (folder / "flight-0.json").write_text(text)


def odd(*path: str | int, value: object = None) -> Callable[[Path], object]:
    """Return a function that writes a record to a folder, with the value at `path` in its JSON replaced by `value`."""

    def write(folder: Path) -> None:
        record = FlightRecord(0, 2, "gloo")
        for n in range(CAPACITY + 1):
            post(record, "send", 1, f"step {n}")
        file = record.dump(folder, "x")
        content = inner = json.loads(file.read_text())
        for key in path[:-1]:
            inner = inner[key]
        inner[path[-1]] = value
        file.write_text(json.dumps(content))

    return write


def double(folder: Path) -> None:
    file = FlightRecord(0, 2, "gloo").dump(folder, "x")
    (folder / "flight-1.json").write_bytes(file.read_bytes())


def mix(folder: Path) -> None:
    FlightRecord(0, 2, "gloo").dump(folder, "x")
    FlightRecord(1, 3, "gloo").dump(folder, "x")


@pytest.mark.parametrize(
    ("prepare", "why"),
    [
        (lambda folder: None, "holds no flight-<rank>.json; set RINGATTN_FLIGHT_DIR before a run"),
        (lambda folder: folder.rmdir(), "is not a folder"),
        (spoil("{"), "flight-0.json cannot be read"),
        (spoil('{"rank": 0}'), "flight-0.json is not a flight record"),
        (spoil("3"), "is not a flight record of this version of ringattn: int instead of an object"),
        (spoil("[" * 10**5), "flight-0.json cannot be read: maximum recursion"),
        (lambda folder: (folder / "flight-0.json").write_bytes(b"\xff\xfe{"), "flight-0.json cannot be read: .*utf-8"),
        (odd("rank", value="0"), "rank is '0'"),
        (odd("rank", value=2), "rank 2 of 2"),
        (odd("rank", value=True), "rank is True"),
        (odd("world_size", value=10**18), "rank 0 of 1000000000000000000"),
        (odd("cause"), "cause is None"),
        (odd("flights", value={}), "flights is {}"),
        (odd("flights", 0, value=1), "flights: int instead of an object"),
        (odd("flights", 0, "posted_s", value="now"), "flights: posted_s is 'now'"),
        (odd("flights", 3, "parts", value=[[]]), "flights: parts: list instead of an object"),
        (odd("flights", 3, "parts", value=[{"op": "send"}]), "flights: parts: peer is missing"),
        (odd("dropped", 0, value={"lane": 0, "op": "send", "peer": 1}), "dropped: messages is missing"),
        (double, "has two records of rank 0"),
        (mix, r"mixes runs of \[2, 3\] ranks"),
    ],
)
def test_bad_folders_are_refused(tmp_path: Path, prepare: Callable[[Path], object], why: str) -> None:
    folder = tmp_path / "records"
    folder.mkdir()
    prepare(folder)
    with pytest.raises(InputError, match=why):
        main([str(folder)])
    assert cli.main(["flight", str(folder)]) == 2


def test_help_and_words(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["flight", "--help"]) == 0
    assert capsys.readouterr().out.startswith("usage: ringattn flight DIR\n\nMerge")
    for arguments in ([], ["one", "two"]):
        assert cli.main(["flight", *arguments]) == 2
        assert "ringattn flight: expected one folder" in capsys.readouterr().err


# --- records of gloo --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def processes() -> Iterator[Processes]:
    with Processes(3) as started:
        yield started


def opened(rank: int, world_size: int, folder: Path | None) -> GlooTransport:
    """Open a ring over gloo. No rank returns before all have opened it, so that a later abort interrupts no opening."""
    store = rendezvous_store(rank, world_size, 60.0)
    ring = GlooTransport.open(Opening(store, rank, world_size, 20.0, folder))
    ring.all_gather_bytes(b"")
    store.set(f"gathered/{rank}", "1")
    store.wait([f"gathered/{peer}" for peer in range(world_size)])
    return ring


def never_sends(rank: int, world_size: int, folder: Path) -> str:
    """Run step 0 on all ranks. Then run step 1, which rank 1 joins only after the deadline.

    Return the message of this rank's error.
    """
    ring = opened(rank, world_size, folder)
    after, before = (rank + 1) % world_size, (rank - 1) % world_size
    kv = torch.zeros(16)
    ring.exchange([Message(after, kv, "step 0: KV")], [Message(before, torch.zeros(16), "step 0: KV")]).wait()
    ring.opening.timeout_s = 2.0
    if rank == 1:
        time.sleep(5.0)
    with pytest.raises((DeadlineError, PeerLostError)) as caught:
        ring.exchange([Message(after, kv, "step 1: KV")], [Message(before, torch.zeros(16), "step 1: KV")]).wait()
    return str(caught.value)


@pytest.mark.slow
def test_the_records_of_a_stalled_ring_name_the_rank(processes: Processes, tmp_path: Path) -> None:
    messages = processes.run(never_sends, tmp_path)
    for rank, message in messages.items():
        assert f"flight record of rank {rank}: {tmp_path / f'flight-{rank}.json'}" in message
    records = read_records(tmp_path)
    for rank in (0, 2):
        lanes = [(flight["lane"], flight["parts"][0]["label"]) for flight in records[rank]["flights"]]
        assert lanes == [(CONTROL_LANE, "all-gather 0"), (0, "step 0: KV"), (0, "step 1: KV")]
        assert [flight["state"] for flight in records[rank]["flights"]] == [DONE, DONE, FAILED]
        done = records[rank]["flights"][1]
        assert done["posted_s"] <= done["started_s"] <= done["done_s"] <= records[rank]["written_s"]
        ends = {(part["op"], part["peer"], part["nbytes"]) for part in done["parts"]}
        assert ends == {("send", (rank + 1) % 3, 64), ("recv", (rank - 1) % 3, 64)}
        assert all(part["slot"] for part in done["parts"])
    first = divergences(records)[0]
    assert "'step 1: KV' (64 bytes, exchange 2); rank 1 never posted its" in first
    assert "its last posted exchange: exchange 1, 'step 0: KV'" in first


def ends_otherwise(rank: int, world_size: int, folder: Path) -> None:
    cause = ValueError("k has no heads")
    ring = opened(rank, world_size, folder / "foreign")
    ring.abort(cause)
    assert cause.__notes__ == [f"flight record of rank {rank}: {folder / 'foreign' / f'flight-{rank}.json'}"]
    assert json.loads((folder / "foreign" / f"flight-{rank}.json").read_text())["cause"] == f"ValueError: {cause}"
    opened(rank, world_size, folder / "closed").close()
    opened(rank, world_size, folder / "closed").abort(ClosedError("used after its end"))
    assert not (folder / "closed").exists()
    cause = ValueError("nobody asked")
    opened(rank, world_size, None).abort(cause)
    assert not hasattr(cause, "__notes__")
    (folder / f"file-{rank}").touch()
    opened(rank, world_size, folder / f"file-{rank}").abort(cause)
    assert cause.__notes__[0].startswith(f"rank {rank} could not write its flight record: ")


def test_only_failures_leave_a_record_and_only_where_asked(processes: Processes, tmp_path: Path) -> None:
    processes.run(ends_otherwise, tmp_path)


# --- records of shared memory -----------------------------------------------------------------------------------------


def leaves_early(rank: int, world_size: int, folder: Path) -> None:
    """Open two rings. In the first, all ranks gather payloads of different lengths and then abort.

    In the second, rank 1 does not join the second all-gather, and aborts when the other ranks have failed.
    """
    ring = ShmTransport.open(
        Opening(rendezvous_store(rank, world_size, 60.0), rank, world_size, 20.0, folder / "together")
    )
    assert [*map(len, ring.all_gather_bytes(b"x" * (rank + 1) * 10_000))] == [10_000, 20_000, 30_000]
    ring.abort(ValueError("refused by all"))
    store = rendezvous_store(rank, world_size, 60.0)
    ring = ShmTransport.open(Opening(store, rank, world_size, 20.0, folder / "apart"))
    ring.all_gather_bytes(b"x" * rank)
    ring.opening.timeout_s = 0.5
    if rank == 1:
        store.wait(["left/0", "left/2"])
        ring.abort(ValueError("did not come"))
    else:
        with pytest.raises((DeadlineError, PeerLostError)):
            ring.all_gather_bytes(b"")
        store.set(f"left/{rank}", "1")


def test_gatherings_over_shared_memory_meet_in_the_records(processes: Processes, tmp_path: Path) -> None:
    processes.run(leaves_early, tmp_path)
    assert divergences(read_records(tmp_path / "together")) == []
    first, *others = divergences(read_records(tmp_path / "apart"))
    assert "in all-gather 1'" in first and "; rank 1 never posted its" in first and not others


ROOT = Path(__file__).parents[2]
BEGIN = """
import ctypes, os, signal, sys, time
from pathlib import Path
from ringattn.observe.flight import FlightRecord, MessageRecord
from ringattn.observe.flight import leave_records
folder = Path(sys.argv[1])
def opened():
    record = FlightRecord(0, 2, "gloo")
    record.begin(0, (MessageRecord("recv", 1, 64, 0, "KV1"),))
    leave_records(record, folder)
    return record
record = opened()
def ready():
    print("ready", flush=True)
"""
IN_C = """
ready()
mutex = ctypes.create_string_buffer(64)
for _ in range(2):  # the second time for good, and no signal ends it
    ctypes.CDLL(None).pthread_mutex_lock(mutex)
"""
IN_PYTHON = "ready()\ntime.sleep(60)\n"


def told_to_end(folder: Path, program: str, before: str = "") -> tuple[int, str]:
    """Run a process, and send it SIGTERM when it has printed "ready". Return its exit code and its output.

    `program`: the code of the process after it has made its flight record. `before`: its code before that.
    """
    begin = BEGIN.replace("record = opened()", before + "record = opened()")
    command = [sys.executable, "-c", begin + program, str(folder)]
    with subprocess.Popen(command, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}, text=True,
                          stdout=subprocess.PIPE) as running:  # fmt: skip
        assert running.stdout is not None and running.stdout.readline() == "ready\n"
        running.terminate()
        try:
            printed, _ = running.communicate(timeout=20)
        finally:
            running.kill()
        return running.returncode, printed


def left(folder: Path) -> dict[str, Any]:
    """Return the flight record that the process wrote to `folder`."""
    record: dict[str, Any] = json.loads((folder / "flight-0.json").read_text())
    return record


@pytest.mark.parametrize("program", [IN_C, IN_PYTHON], ids=["in C", "in Python"])
def test_the_record_is_left_and_the_process_ends_by_the_signal(program: str, tmp_path: Path) -> None:
    code, _ = told_to_end(tmp_path, program)
    assert code == -signal.SIGTERM
    assert left(tmp_path)["cause"].startswith("received SIGTERM")
    (flight,) = left(tmp_path)["flights"]
    assert flight["state"] == "posted" and flight["parts"][0]["label"] == "KV1"


def test_a_handler_that_was_there_runs_after_the_record_is_left(tmp_path: Path) -> None:
    handler = """
def mine(number, frame):
    print("mine", (folder / "flight-0.json").exists(), flush=True)
    os._exit(7)
signal.signal(signal.SIGTERM, mine)
"""
    assert told_to_end(tmp_path, IN_PYTHON, handler) == (7, "mine True\n")


def test_what_was_written_or_closed_is_left_alone(tmp_path: Path) -> None:
    code, _ = told_to_end(tmp_path, "record.dump(folder, 'a deadline')\n" + IN_PYTHON)
    assert code == -signal.SIGTERM and left(tmp_path)["cause"] == "a deadline"
    told_to_end(tmp_path / "closed", "record.over = True\n" + IN_PYTHON)
    assert not (tmp_path / "closed").exists()


def test_of_two_rings_the_one_that_waits_is_left(tmp_path: Path) -> None:
    idle_ring = "other = opened()\nother.last().state = 'done'\nother.transport = 'idle'\n"
    told_to_end(tmp_path, idle_ring + IN_PYTHON)
    assert left(tmp_path)["transport"] == "gloo"


def test_the_end_of_a_fork_is_not_that_of_its_parent(tmp_path: Path) -> None:
    fork = """
child = os.fork()
if child == 0:
    time.sleep(60)
time.sleep(0.2)
os.kill(child, signal.SIGTERM)
_, status = os.waitpid(child, 0)
time.sleep(0.2)
print(-os.WTERMSIG(status), (folder / "flight-0.json").exists(), flush=True)
"""
    command = [sys.executable, "-c", BEGIN + fork, str(tmp_path)]
    done = subprocess.run(
        command, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True
    )
    assert (done.returncode, done.stdout) == (0, "-15 False\n"), done.stderr
