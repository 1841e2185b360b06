"""What each rank does in `link_faults`: passes of attention over two hosts, and a fault in the middle of one."""

from __future__ import annotations

import os
import time
from multiprocessing.connection import Connection
from typing import Any

import torch

from ringattn.bench.fault_ranks import _after_exchange, one_pass, open_gate
from ringattn.bench.hosts import enter
from ringattn.ring import Ring

OPEN_S = 30.0
TRIES = 3  # a rank that needs nothing more from the lost one hears of it in its next call


def live(
    namespace: str,
    meeting: str,
    rank: int,
    ranks: int,
    hop: int,
    timeout_s: float,
    pipe: Connection,
    transport: str = "gloo",
) -> None:
    """One rank, on its host, until the parent ends it. Sends "now" (rank 0 only), then what it saw.

    `meeting` is the address of rank 0's host, as this rank names it.
    """
    enter(namespace)
    os.environ.update(
        RANK=str(rank), WORLD_SIZE=str(ranks), MASTER_ADDR=meeting, MASTER_PORT="29500", RES_OPTIONS="timeout:1"
    )
    torch.set_num_threads(1)
    try:
        pipe.send(_suffer(rank, hop, timeout_s, pipe, transport))
    except Exception as error:
        outside = f"outside the pass, {type(error).__name__}"
        pipe.send({"kind": outside, "message": str(error), "at_s": 0.0, "wait_s": 0.0})
    pipe.recv()  # the store's host must not end before the others have answered


def _suffer(rank: int, hop: int, timeout_s: float, pipe: Connection, transport: str) -> dict[str, Any]:
    """The first error after the fault, or that all passes were right."""
    with Ring(transport=transport, timeout_s=OPEN_S) as meeting:
        open_gate(meeting)
    ring = Ring(transport=transport, timeout_s=timeout_s)
    before = one_pass(ring)

    def happens() -> None:
        pipe.send("now")
        pipe.recv()

    if rank == 0:
        _after_exchange(getattr(ring.transport, "between", ring.transport), hop, happens)
    waits = _waits_of(ring.transport)
    for _ in range(TRIES):
        waits.append(time.monotonic())
        try:
            if not torch.equal(one_pass(ring), before):
                return {
                    "kind": "wrong",
                    "message": "the pass was not exact",
                    "at_s": time.monotonic(),
                    "wait_s": waits[-1],
                }
        except Exception as error:
            return {"kind": type(error).__name__, "message": str(error), "at_s": time.monotonic(), "wait_s": waits[-1]}
    return {"kind": "right", "message": "", "at_s": time.monotonic(), "wait_s": waits[-1]}


def _waits_of(transport: Any) -> list[float]:
    """When the waits of a transport began, from now on. Each has a deadline of its own."""
    name = "await_both" if hasattr(transport, "between") else "_finish"
    finish, began = getattr(transport, name), list[float]()

    def waits(*arguments: Any) -> None:
        began.append(time.monotonic())
        finish(*arguments)

    setattr(transport, name, waits)
    return began
