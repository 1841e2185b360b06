"""How processes and rings end: forks of a process with an open ring, signals during a wait, and dropped rings.

A forked child exits normally, and the ranks continue. A signal ends a rank that waits for a stopped peer long before
the deadline. Rings that are dropped without a close leave no descriptor, no thread and no mapping.
"""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch

from ringattn import Ring
from tests.contract.liveness_contract import BUSY_S
from tests.contract.processes import Processes, free_port
from tests.transport.process_rings import LATE, meet
from tests.transport.test_shared import descriptors, mappings

OPENS = """
import gc, os, signal, sys
import torch, ringattn
from ringattn.errors import ClosedError
from ringattn.transport.base import Message
from tests.transport.process_rings import LATE, meet_nodes

rank, transport = int(os.environ["RANK"]), sys.argv[1]
if transport == "shm+gloo":
    transport = meet_nodes(rank, 3, LATE, 60.0)
ring = ringattn.Ring(transport=transport, timeout_s=60.0)
"""


TRANSPORTS = ("gloo", "shm", "shm+gloo")
"""The CPU transports that connect processes."""


def started(program: str, transport: str, **streams: int) -> list[subprocess.Popen[str]]:
    """Start three ranks that run `OPENS` and then `program`."""
    common = {"WORLD_SIZE": "3", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", OPENS + program, transport]
    environments = [{**os.environ, **common, "RANK": str(rank)} for rank in range(3)]
    return [subprocess.Popen(command, env=env, text=True, **streams) for env in environments]  # type: ignore[call-overload]


# --- forks -----------------------------------------------------------------------------------------------------------

FORKS = """
seq = ring.sequence(24)
q = torch.ones(1, 8, 1, 4)
ring.attention(q, q, q, seq)
received = torch.zeros(4)
handle = ring.transport.exchange([], [Message((rank - 1) % 3, received)])
child = os.fork()
if child == 0:
    signal.alarm(20)
    for call in (ring.barrier, lambda: ring.attention(q, q, q, seq), lambda: ring.all_reduce([q])):
        try:
            call()
        except ClosedError as error:
            assert "a forked process cannot use the ring of its parent" in str(error)
        else:
            sys.exit("a call of the child was not refused")
    ring.close()
    for part in (ring.transport, getattr(ring.transport, "between", None)):
        if part is not None:
            part._group = None  # whatever else refers to it
    del part, ring, seq, handle, transport, call
    gc.collect()
    sys.exit(3)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 3
ring.transport.exchange([Message((rank + 1) % 3, torch.full((4,), float(rank)))], []).wait()
handle.wait()
assert received.tolist() == [(rank - 1) % 3] * 4
ring.attention(q, q, q, seq)
ring.close()
"""


@pytest.mark.slow
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_forked_child_collects_and_exits(transport: str) -> None:
    ranks = started(FORKS, transport, stderr=subprocess.PIPE)
    errors = [process.communicate(timeout=100)[1] for process in ranks]
    assert [process.returncode for process in ranks] == [0, 0, 0], "\n".join(errors)


# --- signals ---------------------------------------------------------------------------------------------------------

WAITS = """
def leave(number, frame):
    raise SystemExit(7)

signal.signal(signal.SIGTERM, leave)
signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job of a shell ignores it
ring.barrier()
print("ready", flush=True)
if rank == 2:
    os.kill(os.getpid(), signal.SIGSTOP)
ring.barrier()
"""
LIMIT_S = 2.0 + BUSY_S
"""The time within which a waiting rank must end: two seconds are promised. The deadline of the ring is a minute."""


@pytest.mark.parametrize(
    ("transport", "number", "code"),
    [
        ("gloo", signal.SIGINT, -signal.SIGINT),
        pytest.param("shm", signal.SIGINT, -signal.SIGINT, marks=pytest.mark.slow),
        pytest.param("shm+gloo", signal.SIGTERM, 7, marks=pytest.mark.slow),
    ],
)
def test_a_waiting_rank_ends_soon(transport: str, number: signal.Signals, code: int) -> None:
    ranks = started(WAITS, transport, stdout=subprocess.PIPE)
    try:
        for process in ranks:
            assert process.stdout is not None and process.stdout.readline() == "ready\n"
        time.sleep(1.0)  # until the rank waits
        ranks[0].send_signal(number)
        assert ranks[0].wait(LIMIT_S) == code
    finally:
        for process in ranks:
            process.kill()
            process.communicate()


def rank_of_job(mark: str, rank: int) -> int:
    """Wait for the process of `rank` with TEST_MARK=`mark` in its environment, and return its process id."""
    until = time.monotonic() + 60.0
    while time.monotonic() < until:
        for process in Path("/proc").glob("[0-9]*"):
            try:
                environment = (process / "environ").read_bytes().split(b"\0")
            except OSError:  # the process has ended, or belongs to another user
                continue
            if f"TEST_MARK={mark}".encode() in environment and f"RANK={rank}".encode() in environment:
                return int(process.name)
        time.sleep(0.1)
    raise AssertionError(f"rank {rank} did not start")


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_training_ends_soon(tmp_path: Path, number: signal.Signals) -> None:
    options = ["ranks=2", "tokens=64", "steps=100000", "transport=gloo", f"out={tmp_path}", "timeout_s=60"]
    command = [sys.executable, "-u", "-m", "ringattn", "train", *options]
    training = subprocess.Popen(
        command,
        env={**os.environ, "TEST_MARK": str(tmp_path)},
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a background job of a shell ignores it
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        assert training.stdout is not None
        while "step 1/" not in training.stdout.readline():
            assert training.poll() is None
        os.kill(rank_of_job(str(tmp_path), 1), signal.SIGSTOP)
        time.sleep(1.0)  # until the other rank waits for it
        training.send_signal(number)
        assert training.wait(LIMIT_S) == 128 + number
    finally:
        training.kill()
        training.communicate()


# --- dropped rings ----------------------------------------------------------------------------------------------------

RINGS = 15
SETTLE_S = 20.0
MOST = (80, 12, 12)
"""The largest allowed numbers of descriptors, threads and mappings of a process that has dropped all its rings."""


def counted() -> tuple[int, int, int]:
    """Count the descriptors, threads and mappings of this process."""
    gc.collect()  # dropped transports are in reference cycles
    return len(descriptors()), threading.active_count(), mappings()


def drops(rank: int, world_size: int, name: str) -> list[tuple[int, int, int]]:
    """Open and drop rings in two rounds, and return the counts after each round.

    After the first round, wait up to `SETTLE_S` until the counts are at most `MOST`; after the second round, until they
    are at most those of the first.
    """
    rounds: list[tuple[int, int, int]] = []
    for _ in range(2):
        for _ in range(RINGS):
            ring = Ring(transport=meet(name, rank, world_size, 60.0, LATE)[0], timeout_s=60.0)
            seq = ring.sequence(24)
            q = torch.ones(1, 8, 1, 4, requires_grad=True)
            ring.attention(q, q, q, seq, causal=True).sum().backward()
            del ring, seq, q
        until = time.monotonic() + SETTLE_S
        counts = counted()
        while time.monotonic() < until and not within(counts, rounds[0] if rounds else MOST):
            time.sleep(0.05)
            counts = counted()
        rounds.append(counts)
    return rounds


def within(counts: tuple[int, ...], limits: tuple[int, ...]) -> bool:
    return all(count <= limit for count, limit in zip(counts, limits, strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_dropped_rings_leave_nothing(transport: str) -> None:
    with Processes(3) as processes:
        for first, last in processes.run(drops, transport, hard_s=120.0).values():
            assert within(last, first), (first, last)
            assert within(first, MOST), first
