"""What the tests of training share: two small runs, how threads train them, and what their curves are compared by."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ringattn import Ring
from ringattn.launch.train import loop
from ringattn.launch.train.config import ModelConfig, TrainConfig
from ringattn.testing import run_ranks
from ringattn.transport.local import LocalWorld

SMALL = TrainConfig(tokens=41, batch=2, steps=6, dtype="fp64", warmup_steps=4, model=ModelConfig(1, 16, 2, 1, 24))
TINY = TrainConfig(tokens=61, batch=2, steps=4, dtype="fp64", warmup_steps=2, model=ModelConfig(2, 32, 4, 2, 48))
"""61 is a prime number, so that the ranks of a ring have different counts."""


def run(config: TrainConfig, ranks: int = 1) -> dict[str, Any]:
    """Train on threads, `config.replicas` rings of `ranks`; return the result, whose curves all ranks must report."""
    rings = [LocalWorld(ranks, 60.0) for _ in range(config.replicas)]

    def of_rank(everyone: Ring) -> dict[str, Any]:
        if config.replicas == 1:
            return loop.train(everyone, config)
        replica, rank = divmod(everyone.rank, ranks)
        with Ring(transport=rings[replica].transport(rank)) as ring:
            return loop.train(ring, config, everyone=everyone)

    first, *others = run_ranks(config.replicas * ranks, of_rank)
    for key in ("losses", "grad_norms", "skipped_steps", "replicas", "ranks"):
        assert all(result[key] == first[key] for result in others), key
    return first


def alone(config: TrainConfig) -> dict[str, Any]:
    """Train the same in one process, from its first step."""
    return run(replace(config, ranks=1, replicas=1, micro_batch=None, sharding="none", checkpoint_every_steps=None,
                       resume="never", out=TrainConfig().out))  # fmt: skip


def same(found: dict[str, Any], expected: dict[str, Any]) -> None:
    """Losses and norms before clipping agree to 1e-10 in float64, in other dtypes as far as these go."""
    rel = {"fp64": 1e-10, "fp32": 1e-5, "bf16": 1e-2}[expected["config"]["dtype"]]
    for key in ("losses", "grad_norms"):
        assert found[key] == pytest.approx(expected[key], rel=rel)


def names(folder: str | Path) -> list[str]:
    """What is in the folder of checkpoints."""
    return sorted(path.name for path in (Path(folder) / "checkpoints").iterdir())
