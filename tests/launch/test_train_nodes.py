"""What one machine of several gets wrong is told on all of them at once, not when a deadline has passed.

Two agents of torchrun on this machine stand for two machines.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.contract.ports import free_port

ROOT = Path(__file__).resolve().parents[2]
DEADLINE_S = 120.0
WORDS = ["model=tiny", "tokens=64", "steps=2", "batch=2", "transport=gloo", f"timeout_s={DEADLINE_S:g}"]


def train_on_nodes(folder: Path, words: list[list[str]]) -> list[tuple[int, str]]:
    """Exit code and printed words of `ringattn train` on each node, whose own words are given; one rank a node.

    Node n runs in `folder`/n. Raises where a node takes half of the deadline.
    """
    port = free_port()
    agents, printed = [], [folder / str(number) / "printed" for number in range(len(words))]
    for number, own in enumerate(words):
        meeting = [
            f"--nnodes={len(words)}",
            f"--node-rank={number}",
            "--master-addr=127.0.0.1",
            f"--master-port={port}",
        ]
        with printed[number].open("wb") as output:
            agents.append(subprocess.Popen(
                [sys.executable, "-m", "torch.distributed.run", *meeting, "--nproc-per-node=1", "-m", "ringattn",
                 "train", *WORDS, *own],
                cwd=folder / str(number), env={**os.environ, "PYTHONPATH": str(ROOT)}, stdout=output,
                stderr=subprocess.STDOUT,
            ))  # fmt: skip
    ends = time.monotonic() + DEADLINE_S / 2
    try:
        for agent in agents:
            agent.wait(ends - time.monotonic())
    finally:
        for agent in agents:
            agent.terminate()  # it ends its ranks
            agent.wait()
    return [(agent.returncode, file.read_text()) for agent, file in zip(agents, printed, strict=True)]


FOR_ALL = "so all ranks do: "
SAME = "; start all ranks with the same words"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "told"),
    [
        ([[], ["text=nowhere"]], [f"rank 1 refused the call, {FOR_ALL}text=nowhere: No such", "text=nowhere: No such"]),
        ([["replicas=1"], ["replicas=2"]], [f"replicas: rank 1 has 2 and rank 0 1{SAME}"] * 2),
        (
            [["out=taken"]] * 2,
            ["out=taken: cannot be written (File exists)", f"rank 0 refused the call, {FOR_ALL}out=taken: "],
        ),
    ],
    ids=["text", "replicas", "out"],
)
def test_what_one_node_gets_wrong_is_told_on_all(tmp_path: Path, words: list[list[str]], told: list[str]) -> None:
    for number in range(2):
        (tmp_path / str(number)).mkdir()
    (tmp_path / "0" / "taken").touch()
    for (code, printed), message in zip(train_on_nodes(tmp_path, words), told, strict=True):
        assert code != 0 and f"ringattn train: {message}" in printed, printed
