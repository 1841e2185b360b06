"""What every transport between processes says of a rank that was killed, stopped or closed, and of a store that hangs.

`suffer` runs on each rank of a ring; `assert_told` checks what the ranks answered.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import threading
import time
from typing import Any, NamedTuple

import torch

from ringattn.errors import InputError, RingError
from ringattn.transport.base import Message, Transport
from ringattn.transport.health.health import Health
from tests.contract.transport_contract import neighbors
from tests.transport.attribution import named_at_fault

DEADLINE_S = 2.0
STOPPED_S = DEADLINE_S + 5.0
BUSY_S = 4.0
"""What a busy machine needs besides the two seconds that are promised after the deadline."""
STORE = "the store's host (rank 0"
CASES = {"killed": 1, "stopped": 1, "store's host stopped": 0, "closed": 1, "cause in the store": 1}
"""Each with the rank that suffers it."""


class Told(NamedTuple):
    """What one rank was told, and when; of the victim when it happened."""

    message: str
    at_s: float


def exchange_until_error(ring: Transport) -> str:
    """Exchange with both neighbours again and again."""
    after, before = neighbors(ring)
    while True:
        try:
            sent, into = ring.allocate(1 << 12), ring.allocate(1 << 12)
            ring.exchange([Message(after, sent, "hop")], [Message(before, into, "hop")]).wait()
            ring.drain()
        except RingError as error:
            return str(error)


def suffer(ring: Transport, health: Health, case: str) -> Told:
    """What this rank is told after the victim of `case` has suffered it in the middle of exchanges."""
    ring.all_gather_bytes(b"")
    torch.set_num_threads(1)
    happened: list[float] = []
    victim = CASES[case]

    def act() -> None:
        happened.append(time.monotonic())
        if case == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        elif case == "cause in the store":
            health.publish(InputError("this rank belongs to another job"))
        else:
            subprocess.Popen(["sh", "-c", f"sleep {STOPPED_S}; kill -CONT {os.getpid()}"])
            os.kill(os.getpid(), signal.SIGSTOP)

    if case == "closed" and ring.rank == victim:
        time.sleep(0.5)
        happened.append(time.monotonic())
        ring.close()
        return Told("", happened[0])
    if case == "killed" and ring.rank == 0:
        # Holds the interpreter, so that no other thread of this rank runs, before it waits for anybody.
        ctypes.PyDLL(None).usleep(1_500_000)
    if ring.rank == victim:
        threading.Timer(0.7, act).start()  # heartbeats and datagrams have gone to and fro
    message = exchange_until_error(ring)
    told_s = happened[0] if ring.rank == victim else time.monotonic()
    ring.close()
    return Told(message, told_s)


def assert_told(case: str, told: dict[int, Any]) -> None:
    """Each rank names the victim and no other, in time."""
    victim = CASES[case]
    for rank, (message, at_s) in told.items():
        named = named_at_fault(message)
        if rank == victim:
            # It was stopped itself: it says so, or re-states a first cause that names it, and blames no other rank.
            assert named <= {victim}, told
            stood_still = f"rank {victim} itself stood still" in message
            assert case in ("closed", "cause in the store") or stood_still or named == {victim}, told
            continue
        if case == "closed":
            assert named == set() and f"rank {victim} closed its ring" in message, told
        else:
            assert named == {victim}, told
        if case == "cause in the store":
            assert "rank 1 failed first: InputError: this rank belongs to another job" in message, told
        if case != "killed":
            limit_s = 1.0 if case in ("closed", "cause in the store") else DEADLINE_S + 2.0
            assert at_s - told[victim][1] < limit_s + BUSY_S, told
