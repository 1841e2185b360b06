"""What training memory comes to: every switch saves what the sizes say, and the benchmark that weighs them runs.

Storages of one rank, seen by a dispatch mode.
"""

from __future__ import annotations

from dataclasses import astuple, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from ringattn import Ring
from ringattn.bench import training_memory
from ringattn.bench.gate import GateError
from ringattn.bench.storage_meter import StorageMeter
from ringattn.launch.capacity.model_shapes import ModelShape
from ringattn.launch.capacity.training_bytes import TrainingSetup, training_bytes
from ringattn.launch.train import loop
from ringattn.launch.train.config import ModelConfig, TrainConfig
from ringattn.launch.train.data import BatchPart
from ringattn.layers import tiled
from ringattn.testing import run_ranks

BIG = TrainConfig(tokens=512, steps=1, dtype="fp32", model=ModelConfig(4, 64, 4, 2, 192))
ROWS, DIM, HIDDEN, FLOAT_BYTES = 512, 64, 192, 4


def peak_bytes(config: TrainConfig) -> int:
    """The most that the storages of one step take at once, weights aside."""
    batch = torch.randint(0, 256, (config.batch, config.tokens), generator=torch.Generator().manual_seed(1))

    def of_rank(ring: Ring) -> int:
        model, optimizer = loop.make_model(ring, config)
        seq = ring.sequence(config.tokens)
        loop.backward(ring, ring, [BatchPart(seq, batch)], model, config)  # the ring's pool is made here
        optimizer.zero_grad()
        with StorageMeter() as storages:
            loop.backward(ring, ring, [BatchPart(seq, batch)], model, config)
        return storages.peak_bytes

    return run_ranks(1, of_rank)[0]


def predicted_bytes(config: TrainConfig) -> float:
    """What the capacity planner says of one step, weights and optimizer aside."""
    shape = ModelShape(*astuple(config.model)[:5], 256, tied=True)
    peak = training_bytes(TrainingSetup(
        shape, config.tokens, precision="fp32", recompute=config.recompute, gradients_kept=False,
        saved_activations=config.saved_activations, chunked_loss_tokens=config.chunked_loss_tokens or 0,
        tiled_mlp_tokens=config.tiled_mlp_tokens or 0,
    )).peak  # fmt: skip
    return peak.total - peak.parameters - peak.optimizer


@pytest.mark.parametrize(
    "change",
    [
        {}, {"recompute": "selective"}, {"recompute": "full"}, {"saved_activations": "int8"},
        {"saved_activations": "fp8"}, {"recompute": "full", "saved_activations": "int8"}, {"chunked_loss_tokens": 64},
        {"tiled_mlp_tokens": 64}, {"tiled_mlp_tokens": 64, "recompute": "selective"},
        {"tiled_mlp_tokens": 64, "recompute": "full"}, {"recompute": "offloaded"},
        {"recompute": "full", "tiled_mlp_tokens": 64, "chunked_loss_tokens": 64},
        {"recompute": "offloaded", "tiled_mlp_tokens": 64, "chunked_loss_tokens": 64},
    ],
    ids=str,
)  # fmt: skip
def test_the_planner_says_what_a_switch_leaves(change: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    # Host memory of a GPU: what waits there is in no storage of the device.
    monkeypatch.setattr(tiled, "to_host", lambda x: x.detach().numpy().copy())
    monkeypatch.setattr(tiled, "from_host", lambda waiting: torch.from_numpy(waiting).clone())
    config = replace(BIG, **change)
    assert peak_bytes(config) == pytest.approx(predicted_bytes(config), rel=0.1)


# --- the benchmark ---------------------------------------------------------------------------------------------------


def test_other_losses_stop_the_benchmark() -> None:
    def record(optimizer: str, *losses: float) -> dict[str, Any]:
        return {"optimizer": optimizer, "by_rank": [{"losses": [5.0, 4.0]}, {"losses": list(losses)}]}

    first = {"optimizer": "adamw", "by_rank": [{"losses": [5.0, 4.0]}]}
    training_memory.check_losses([first, record("adamw", 5.00001, 4.0)], "right")
    training_memory.check_losses([first, record("sgd", 5.0, 4.9)], "right")
    for wrong in (record("adamw", 5.0, 4.001), record("sgd", 5.001, 4.0), record("adamw", float("nan"), 4.0)):
        with pytest.raises(GateError, match="nothing is measured"):
            training_memory.check_losses([first, wrong], "wrong")


@pytest.mark.slow
def test_training_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runs = training_memory.Combination("none", "adamw", 1), training_memory.Combination("full", "sgd", 2)
    monkeypatch.setattr(training_memory, "COMBINATIONS", runs)
    data = training_memory.main([f"results={tmp_path}"])
    alone, shared = data["runs"]
    assert len(shared["by_rank"]) == 2
    for rank in (*alone["by_rank"], *shared["by_rank"]):
        assert rank["resident_bytes"] >= 0.9 * rank["storage_bytes"] > rank["kept_bytes"]
    assert shared["by_rank"][0]["storage_bytes"] < alone["by_rank"][0]["storage_bytes"] / 2
    for record in data["runs"]:
        greatest = max(rank["resident_bytes"] for rank in record["by_rank"])
        assert record["predicted_bytes"] == pytest.approx(greatest, rel=0.1)
    assert "predicted / resident" in (tmp_path / "training_memory.md").read_text()
