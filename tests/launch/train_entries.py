"""Entries for `run_ranks_in_processes` in the tests of training: they kill a rank, or count reductions."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode

from ringattn.launch.train import loop, train
from ringattn.launch.train.config import from_spec
from ringattn.launch.train.data import BatchPart, Draws, drawn, load
from ringattn.launch.train.mesh import opened_mesh, replica_of


class Reductions(TorchDispatchMode):
    """A mode that counts the reduce-scatter calls inside its `with` block."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function: Any, types: Any, arguments: Any = (), keywords: Any = None) -> Any:
        self.count += "reduce_scatter" in function.name()
        return function(*arguments, **(keywords or {}))


def train_and_count(spec: dict[str, Any]) -> dict[str, Any]:
    """Train `spec["runs"]`, then count the gradient reduce-scatters in a step of the sharded run `spec["counted"]`."""
    report = loop.train_rank(spec)
    config = from_spec(spec["counted"])
    with opened_mesh(config) as (ring, everyone):
        model, _ = loop.make_model(everyone, config)
        parts = drawn(ring, replica_of(everyone, ring), load(config), 0, config)
        with Reductions() as reductions:
            loop.backward(ring, everyone, parts, model, config)
    return {**report, "reductions": reductions.count, "sharded_parts": config.model.layers + 1}


def kill_once(step: int, rank: int) -> None:
    """Patch the trainer so that `rank` kills itself before step number `step`, once: not again after a restart."""
    of_step = Draws.of_step

    def kill_or_draw(draws: Draws, now: int) -> list[BatchPart]:
        died = Path(draws.config.out) / "died"
        if now == step and int(os.environ["RANK"]) == rank and not died.exists():
            died.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return of_step(draws, now)

    Draws.of_step = kill_or_draw  # type: ignore[method-assign]


def train_and_die_once(spec: dict[str, Any]) -> dict[str, Any]:
    """Train `spec["runs"]`. Rank 1 dies at step 5, but not after a restart."""
    kill_once(step=5, rank=1)
    return loop.train_rank(spec)


if __name__ == "__main__":
    kill_once(step=5, rank=1)
    sys.exit(train.main(sys.argv[1:]))
