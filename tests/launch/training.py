"""Helpers of the tests of training: two small configurations, training on threads, and the comparison of curves."""

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
"""61 is a prime number, so the ranks of a ring have different numbers of tokens."""


def run(config: TrainConfig, ranks: int = 1) -> dict[str, Any]:
    """Train on threads, with `config.replicas` rings of `ranks`. Check that all ranks have one result; return it."""
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
    """Train the same run on one rank, from the first step, with whole batches, all heads at once and no checkpoints."""
    return run(replace(config, ranks=1, replicas=1, micro_batch=None, max_tokens_per_rank=None, sharding="none",
                       head_groups=1, checkpoint_every_steps=None, resume="never", out=TrainConfig().out))  # fmt: skip


def same(result: dict[str, Any], expected: dict[str, Any]) -> None:
    """Check that losses and gradient norms before clipping agree within the tolerance of the dtype."""
    rel = {"fp64": 1e-10, "fp32": 1e-5, "bf16": 1e-2}[expected["config"]["dtype"]]
    for key in ("losses", "grad_norms"):
        assert result[key] == pytest.approx(expected[key], rel=rel)


def names(folder: str | Path) -> list[str]:
    """Return the sorted names of the entries in the folder of checkpoints."""
    return sorted(path.name for path in (Path(folder) / "checkpoints").iterdir())
