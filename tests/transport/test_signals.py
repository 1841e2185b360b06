"""Ctrl-C and SIGTERM reach a rank that waits for a stopped peer, long before its deadline."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.contract.liveness_contract import BUSY_S
from tests.contract.ports import free_port

PROGRAM = """
import os, signal, sys
import torch, ringattn
from tests.contract.meeting import rendezvous_store
from ringattn.transport.base import Opening
from ringattn.transport.location import Location
from ringattn.transport.nodes import open_shm_and_gloo

def leave(number, frame):
    raise SystemExit(7)

signal.signal(signal.SIGTERM, leave)
signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job of a shell ignores it
rank, transport = int(os.environ["RANK"]), sys.argv[1]
if transport == "shm+gloo":
    nodes = [Location(f"host-{node}", f"boot/{node}", os.getpid(), os.getuid()) for node in (0, 0, 1)]
    transport = open_shm_and_gloo(Opening(rendezvous_store(rank, 3, 60.0), rank, 3, 60.0, locations=nodes))
ring = ringattn.Ring(transport=transport, timeout_s=60.0)
ring.barrier()
print("ready", flush=True)
if rank == 2:
    os.kill(os.getpid(), signal.SIGSTOP)
ring.barrier()
"""
LIMIT_S = 2.0 + BUSY_S
"""Two seconds are promised; the peer's deadline, which a rank waited for before, is a minute."""


@pytest.mark.parametrize(
    "transport", ["gloo", pytest.param("shm", marks=pytest.mark.slow), pytest.param("shm+gloo", marks=pytest.mark.slow)]
)
@pytest.mark.parametrize(
    ("number", "code"),
    [(signal.SIGINT, -signal.SIGINT), pytest.param(signal.SIGTERM, 7, marks=pytest.mark.slow)],
)
def test_a_waiting_rank_ends_soon(transport: str, number: signal.Signals, code: int) -> None:
    common = {"WORLD_SIZE": "3", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "OMP_NUM_THREADS": "1"}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", PROGRAM, transport],
            env={**os.environ, **common, "RANK": str(rank)}, stdout=subprocess.PIPE, text=True,
        )
        for rank in range(3)
    ]  # fmt: skip
    try:
        for process in ranks:
            assert process.stdout is not None and process.stdout.readline() == "ready\n"
        time.sleep(1.0)  # until it waits
        ranks[0].send_signal(number)
        assert ranks[0].wait(LIMIT_S) == code
    finally:
        for process in ranks:
            process.kill()
            process.communicate()


def rank_of_job(mark: str, rank: int) -> int:
    """The process that is `rank` of the job whose environment has `mark`; waits for it."""
    until = time.monotonic() + 60.0
    while time.monotonic() < until:
        for process in Path("/proc").glob("[0-9]*"):
            try:
                environment = (process / "environ").read_bytes().split(b"\0")
            except OSError:  # it has ended, or it is another user's
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
