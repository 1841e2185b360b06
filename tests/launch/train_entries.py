"""What the processes of the tests of training do: entries for `run_ranks_in_processes` that plant a fault or count."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from ringattn import Ring, Sequence
from ringattn.launch.train import loop, train
from ringattn.launch.train.config import TrainConfig, from_spec
from ringattn.launch.train.data import drawn, load
from ringattn.launch.train.mesh import opened_mesh, replica_of


class Reductions(TorchDispatchMode):
    """Counts the reduce-scatters inside."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function: Any, types: Any, arguments: Any = (), named: Any = None) -> Any:
        self.count += "reduce_scatter" in function.name()
        return function(*arguments, **(named or {}))


def train_and_count(spec: dict[str, Any]) -> dict[str, Any]:
    """Train `spec["runs"]`, then count the reductions of gradients in one step of `spec["counted"]`, a sharded run."""
    answer = loop.train_rank(spec)
    config = from_spec(spec["counted"])
    with opened_mesh(config) as (ring, everyone):
        model, _ = loop.make_model(everyone, config)
        parts = drawn(ring, replica_of(everyone, ring), load(config), 0, config)
        with Reductions() as reductions:
            loop.backward(ring, everyone, parts, model, config)
    return {**answer, "reductions": reductions.count, "sharded_parts": config.model.layers + 1}


def dies_once(step: int, rank: int) -> None:
    """From here on, the process of `rank` kills itself when it is about to train step number `step` the first time."""
    draw = loop.drawn

    def drawn_or_dead(ring: Ring, replica: int, text: Tensor, at: int, config: TrainConfig) -> tuple[Sequence, Tensor]:
        died = Path(config.out) / "died"
        if at == step and int(os.environ["RANK"]) == rank and not died.exists():
            died.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return draw(ring, replica, text, at, config)

    loop.drawn = drawn_or_dead


def train_and_die_once(spec: dict[str, Any]) -> dict[str, Any]:
    """Train `spec["runs"]`; rank 1 dies at step 5, in its first life."""
    dies_once(step=5, rank=1)
    return loop.train_rank(spec)


if __name__ == "__main__":
    dies_once(step=5, rank=1)
    sys.exit(train.main(sys.argv[1:]))
