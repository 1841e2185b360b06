"""What transports between processes must report about a killed, stopped or closed rank, or a store that hangs.

`suffer` runs on each rank of a ring; `assert_victim_named` checks the outcomes of the ranks.
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
"""The extra time for a busy machine. The library guarantees an error within two seconds after the deadline."""
STORE = "the store's host (rank 0"
CASES = {"killed": 1, "stopped": 1, "store's host stopped": 0, "closed": 1, "cause in the store": 1}
"""For each case, the rank that is the victim."""


class Outcome(NamedTuple):
    """The error message of one rank, and when it was raised. For the victim, `at_s` is when the event happened."""

    message: str
    at_s: float


def exchange_until_error(ring: Transport) -> str:
    """Exchange with both neighbours until an error is raised. Return the message of the error."""
    after, before = neighbors(ring)
    while True:
        try:
            sent, into = ring.allocate(1 << 12), ring.allocate(1 << 12)
            ring.exchange([Message(after, sent, "hop")], [Message(before, into, "hop")]).wait()
            ring.drain()
        except RingError as error:
            return str(error)


def suffer(ring: Transport, health: Health, case: str) -> Outcome:
    """Exchange with both neighbors until an error is raised, and return this rank's outcome.

    The victim of `case` also does what the case names: it is killed or stopped, closes the ring, or reports a cause.
    """
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
        return Outcome("", happened[0])
    if case == "killed" and ring.rank == 0:
        # PyDLL holds the interpreter lock during the call, so no other thread of this rank runs in this time.
        ctypes.PyDLL(None).usleep(1_500_000)
    if ring.rank == victim:
        threading.Timer(0.7, act).start()  # by then heartbeats and datagrams have been exchanged
    message = exchange_until_error(ring)
    end_s = happened[0] if ring.rank == victim else time.monotonic()
    ring.close()
    return Outcome(message, end_s)


def assert_victim_named(case: str, outcomes: dict[int, Any]) -> None:
    """Assert that each rank names the victim, and no other rank, within the time limit."""
    victim = CASES[case]
    for rank, (message, at_s) in outcomes.items():
        named = named_at_fault(message)
        if rank == victim:
            # The victim was stopped. It says that it stood still, or repeats a cause that names it. It blames no other
            # rank.
            assert named <= {victim}, outcomes
            stood_still = f"rank {victim} itself was stopped or got no processor time" in message
            assert case in ("closed", "cause in the store") or stood_still or named == {victim}, outcomes
            continue
        if case == "closed":
            assert named == set() and f"rank {victim} closed its ring" in message, outcomes
        else:
            assert named == {victim}, outcomes
        if case == "cause in the store":
            assert "rank 1 failed first: InputError: this rank belongs to another job" in message, outcomes
        if case != "killed":
            limit_s = 1.0 if case in ("closed", "cause in the store") else DEADLINE_S + 2.0
            assert at_s - outcomes[victim][1] < limit_s + BUSY_S, outcomes
