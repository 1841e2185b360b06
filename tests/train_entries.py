"""What the processes of the tests of training do: entries for `run_ranks_in_processes` that plant a fault or count."""

from __future__ import annotations

from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode

from ringattn.launch import loop
from ringattn.launch.batches import drawn
from ringattn.launch.mesh import opened_mesh, replica_of
from ringattn.launch.text import load_text
from ringattn.launch.train_config import from_spec


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
        seq, batch = drawn(ring, replica_of(everyone, ring), load_text(), 0, config)
        with Reductions() as reductions:
            loop.backward(everyone, seq, model, batch, config)
    return {**answer, "reductions": reductions.count, "sharded_parts": config.model.layers + 1}
