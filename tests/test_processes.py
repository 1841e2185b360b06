"""Rings of processes are exact for 1, 2 and 4 ranks, and do not hang if a process fails.

`tests/gpu/test_rehearsal.py` runs the cases over gloo, `tests/transport/test_contract.py` over peer, and
`tests/bench/test_faults.py` runs more faults.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed import DeviceMesh, TCPStore
from torch.distributed.tensor import Shard, distribute_tensor

from ringattn import ClosedError, PeerLostError, Ring
from ringattn.engine.plain import PlainEngine
from ringattn.launch.measure import check
from tests.contract.mesh import on_mesh
from tests.contract.processes import Processes
from tests.gpu.test_processes import every_schedule_is_exact

ROOT = Path(__file__).resolve().parent.parent
MASKS = ("full", "causal", "window", "documents", "slices", "dilated")


@pytest.mark.slow
def test_check_is_exact_on_four_processes() -> None:
    arguments = "check dtype=fp32 transport=shm tokens=61 combinations=pairs verbose=true json=-".split()
    done = subprocess.run(
        [sys.executable, "-m", "ringattn", *arguments], cwd=ROOT, capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "4 ranks over shm, 61 tokens, fp32" in done.stderr
    rows, tried = [line for line in done.stderr.splitlines() if line.startswith(MASKS)], len(list(check.paired_cases()))
    assert len(rows) == tried and f"{tried} cases, all exact" in done.stderr
    # Standard output has only the figures, although rank 0 prints from another process.
    figures = json.loads(done.stdout)
    assert figures["cases"] == tried and figures["failed"] == 0


@pytest.mark.slow
def test_check_is_exact_on_two_nodes(tmp_path: Path) -> None:
    # The ring uses shared memory within each pair of processes and gloo between the pairs. It is opened as users open
    # it.
    every_schedule_is_exact(tmp_path, 4, "fp64", "shm", pairs=True, nodes=[0, 0, 1, 1])


class Exiting(PlainEngine):
    """An engine that ends its process in the middle of a pass.

    The keys of this rank have been sent by then; those of other ranks have not arrived.
    """

    def attend(self, *arguments: Any) -> None:
        os._exit(0)


def passes_until_lost(rank: int, world_size: int, port: int) -> tuple[int, str, float, str]:
    """Run passes until one fails. Return the number of complete passes, and the error's type, duration and message."""
    environment = {"RANK": rank, "WORLD_SIZE": world_size, "MASTER_PORT": port, "TORCHELASTIC_USE_AGENT_STORE": True}
    os.environ.update({name: str(value) for name, value in environment.items()})
    with Ring(timeout_s=6.0) as ring:
        seq = ring.sequence(40, layout="zigzag")
        q = torch.ones(1, seq.counts[rank], 2, 8, dtype=torch.float64)
        ring.attention(q, q, q, seq, causal=True)  # all ranks are connected
        if rank == 1:
            ring.engine_for = lambda *_: Exiting()  # type: ignore[method-assign]
        for passes in range(3):
            start = time.monotonic()
            try:
                ring.attention(q, q, q, seq, causal=True)
            except PeerLostError as error:
                with pytest.raises(ClosedError):
                    ring.attention(q, q, q, seq, causal=True)
                return passes, type(error).__name__, time.monotonic() - start, str(error)
    return 3, "", 0.0, ""


def test_a_rank_that_exits_is_named_by_the_others() -> None:
    """Ranks 0 and 2 raise an error that names rank 1.

    Rank 2 waits for data from rank 1. Rank 0 does not, and may notice only in its next call.
    """
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # the store is in this process
    with Processes(3) as started:
        answers = started.run(passes_until_lost, store.port, exits=1)
    for _, kind, seconds, message in (answers[0], answers[2]):
        assert kind == "PeerLostError" and seconds < 7 and "rank 1 is gone" in message, message
    assert answers[2][0] == 0


@on_mesh
def use_dtensors(mesh: DeviceMesh) -> None:
    for _ in range(2):
        torch.nn.Parameter(distribute_tensor(torch.ones(6), mesh, [Shard(0)]))


def test_a_process_forked_after_a_test_with_dtensors_ends() -> None:
    importlib.import_module("torch._dynamo")  # only then does torch keep meshes in variables of threads

    use_dtensors()
    with ThreadPoolExecutor(1) as pool:  # the thread's fork destroys the variables of this thread
        child = pool.submit(forked_child).result()
    until = time.monotonic() + 10
    while not (ended := os.waitpid(child, os.WNOHANG)[0]) and time.monotonic() < until:
        time.sleep(0.01)
    if not ended:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    assert ended


def forked_child() -> int:
    """Fork a process that exits at once, and return its number."""
    child = os.fork()
    if not child:
        os._exit(0)
    return child
