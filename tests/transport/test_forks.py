"""A program that forks with its ring open: the child ends as programs end, and the ranks go on without it."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.contract.ports import free_port

PROGRAM = """
import gc, os, signal, sys
import torch, ringattn
from ringattn.errors import ClosedError
from ringattn.transport.base import Message, Opening
from tests.contract.meeting import rendezvous_store
from ringattn.transport.location import Location
from ringattn.transport.nodes import open_shm_and_gloo

rank, transport = int(os.environ["RANK"]), sys.argv[1]
if transport == "shm+gloo":
    nodes = [Location(f"host-{node}", f"boot/{node}", os.getpid(), os.getuid()) for node in (0, 0, 1)]
    transport = open_shm_and_gloo(Opening(rendezvous_store(rank, 3, 60.0), rank, 3, 60.0, locations=nodes))
ring = ringattn.Ring(transport=transport, timeout_s=60.0)
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


@pytest.mark.parametrize(
    "transport", ["gloo", pytest.param("shm", marks=pytest.mark.slow), pytest.param("shm+gloo", marks=pytest.mark.slow)]
)
def test_a_forked_child_collects_and_exits(transport: str) -> None:
    common = {"WORLD_SIZE": "3", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", PROGRAM, transport]
    ranks = [
        subprocess.Popen(command, env={**os.environ, **common, "RANK": str(rank)}, stderr=subprocess.PIPE, text=True)
        for rank in range(3)
    ]
    errors = [process.communicate(timeout=100)[1] for process in ranks]
    assert [process.returncode for process in ranks] == [0, 0, 0], "\n".join(errors)
