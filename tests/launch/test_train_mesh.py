"""Training on a mesh of replicas and rings gives the losses of one process, with any shape, sharding and accumulation.

The tests without torch's process group run ranks as threads, and one test runs everything else in four processes. The
dtype is float64 unless stated otherwise.
"""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from ringattn import Ring
from ringattn.bench.storage_meter import StorageMeter
from ringattn.errors import InputError
from ringattn.launch.ranks import run_ranks_in_processes
from ringattn.launch.train import loop, train
from ringattn.launch.train.config import TrainConfig, load_train
from ringattn.launch.train.data import BatchPart
from ringattn.launch.train.mesh import agreed_ranks_of_ring
from ringattn.launch.train.model import Transformer
from ringattn.testing import run_ranks
from tests.launch.training import TINY, alone, run, same

MESH = replace(TINY, batch=4, steps=6)
CLIPPED: dict[str, Any] = {"optimizer": "sgd", "learning_rate": 0.5, "clip_norm": 0.1, "weight_decay": 0.0}
"""Plain SGD, because the scale of the gradients hardly changes the updates of AdamW."""
FEW_LABELS: dict[str, Any] = {"prompt_tokens": 40, "layout": "contiguous"}
DILATED: dict[str, Any] = {"attention": "dilated", "segment_lengths": [8, 64], "dilation_rates": [1, 3]}


# --- threads ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("replicas", "ranks", "change"),
    [
        (2, 2, {}),
        (2, 2, {"micro_batch": 1}),
        (4, 1, {}),
        (1, 2, {"micro_batch": 3}),  # parts of three sequences and of one
        (2, 2, FEW_LABELS),
        (2, 1, {**CLIPPED, "micro_batch": 1}),
        (2, 2, DILATED),
        (1, 3, DILATED),
        (2, 1, {"saved_activations": "int8", "micro_batch": 1}),
    ],
)
def test_a_mesh_of_threads_trains_like_one_process(replicas: int, ranks: int, change: dict[str, Any]) -> None:
    config = replace(MESH, replicas=replicas, steps=4, **change)
    result = run(config, ranks)
    same(result, alone(config))
    assert (result["replicas"], result["ranks"]) == (replicas, ranks)
    assert len(result["memory_growth_bytes"]) == replicas * ranks


def test_the_attention_option_selects_dilated_attention() -> None:
    full, dilated = alone(MESH), alone(replace(MESH, **DILATED))
    assert dilated["losses"][-1] != pytest.approx(full["losses"][-1], rel=1e-6)
    # A branch with one segment and a rate of 1 is full attention.
    undilated = replace(MESH, attention="dilated", segment_lengths=[61], dilation_rates=[1])
    same(alone(undilated), full)


@pytest.mark.slow
def test_gradient_accumulation_holds_the_activations_of_one_part() -> None:
    big = replace(MESH, batch=8, tokens=512, dtype="fp32")
    batch = torch.randint(0, 256, (8, 512), generator=torch.Generator().manual_seed(1))

    def peak_bytes(config: TrainConfig) -> int:
        def of_rank(ring: Ring) -> int:
            model, _ = loop.make_model(ring, config)
            parts = [BatchPart(ring.sequence(512), tokens) for tokens in batch.split(config.micro_batch or 8)]
            loop.backward(ring, ring, parts, model, config)  # the first call allocates the memory pool of the ring
            with StorageMeter() as storages:
                loop.backward(ring, ring, parts, model, config)
            return storages.peak_bytes

        return run_ranks(1, of_rank)[0]

    # An eighth of the activations, and the same gradients and tokens.
    assert peak_bytes(replace(big, micro_batch=1)) < peak_bytes(big) / 4


# --- refused options -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["replicas=2", "batch=3"], "batch=3: must be a multiple of replicas=2"),
        (["segment_lengths=[8]"], r"segment_lengths=\[8\]: attention=full has no branches"),
        (
            ["attention=dilated", "dilation_rates=[1]"],
            "segment_lengths: is missing; attention=dilated needs one number",
        ),
        (
            ["attention=dilated", "segment_lengths=[8]"],
            "dilation_rates: is missing; attention=dilated needs one number",
        ),
        (
            ["attention=dilated", "segment_lengths=[8,16]", "dilation_rates=[1]"],
            r"segment_lengths=\[8, 16\]: every branch needs",
        ),
        (["attention=dilated", "segment_lengths=[8]", "dilation_rates=[0]"], r"segment_lengths=\[8\]: dilation_rates"),
        (["attention=window"], "attention=window: choose one of full, dilated"),
        (["micro_batch=0"], "micro_batch=0: must be at least 1"),
        (["restarts=1"], "restarts=1: needs checkpoints to restart from"),
    ],
)
def test_the_error_of_incompatible_options_begins_with_a_key(arguments: list[str], message: str) -> None:
    with pytest.raises(InputError, match=f"^{message}"):
        load_train(arguments)


def test_branches_that_skip_offsets_print_a_warning(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(train, "_run", lambda config: (_ for _ in ()).throw(InputError("no rank is started")))
    assert train.main(["attention=dilated", "segment_lengths=[16]", "dilation_rates=[8]"]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert lines[0].startswith("ringattn train: branch (w=16, r=8): 4 heads have 4 of 8 offsets") and len(lines) > 1
    assert train.main(["attention=dilated", "segment_lengths=[16]", "dilation_rates=[1]"]) == 2
    assert capsys.readouterr().err == "ringattn train: no rank is started\n"


def test_a_mesh_of_another_size_is_refused() -> None:
    with pytest.raises(InputError, match=r"^replicas=2: 2 ranks train in rings of 2"):
        run_ranks(2, lambda ring: loop.train(ring, replace(MESH, replicas=2)))


def test_ranks_and_replicas_must_multiply_to_the_processes_of_torchrun(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert (agreed_ranks_of_ring(None, 3), agreed_ranks_of_ring(4, 2)) == (1, 4)
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "6")
    assert (agreed_ranks_of_ring(None, 3), agreed_ranks_of_ring(3, 2), agreed_ranks_of_ring(None, 1)) == (2, 3, 6)
    with pytest.raises(InputError, match=r"^replicas=4: torchrun started 6 processes"):
        agreed_ranks_of_ring(None, 4)
    with pytest.raises(InputError, match=r"^ranks=4: with replicas=2 this needs 8 processes, but torchrun started 6"):
        agreed_ranks_of_ring(4, 2)
    assert train.main(["replicas=4", "batch=4"]) == 2
    assert train.main(["restarts=1", "checkpoint_every_steps=1"]) == 2
    assert "restarts=1: has no effect under torchrun" in capsys.readouterr().err


# --- processes -------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_four_processes_on_any_mesh_train_like_one(tmp_path: Path) -> None:
    saved = str(tmp_path / "first" / "checkpoints" / "step-00000003")
    mesh = replace(MESH, replicas=2, ranks=2, transport="gloo")
    first = replace(mesh, sharding="zero3", micro_batch=1, checkpoint_every_steps=3, out=str(tmp_path / "first"))
    resumed = replace(mesh, resume=saved, out=str(tmp_path / "second"))
    divided = replace(mesh, replicas=1, ranks=4, pack_documents=True, separator="\n", max_tokens_per_rank=20)
    configs = [
        first,
        replace(resumed, replicas=4, ranks=1, sharding="zero2"),
        replace(resumed, replicas=1, ranks=4, sharding="none", micro_batch=2),
        replace(resumed, sharding="zero3", recompute="full", layout="striped"),
        replace(mesh, sharding="none", micro_batch=1, **CLIPPED),
        replace(mesh, sharding="zero2", micro_batch=1, **CLIPPED),
        replace(mesh, sharding="zero3", **CLIPPED),
        replace(mesh, sharding="zero3", **FEW_LABELS),
        replace(mesh, sharding="zero2", **DILATED),
        replace(mesh, sharding="zero3", chunked_loss_tokens=7, tiled_mlp_tokens=7, saved_activations="int8"),
        replace(mesh, sharding="zero3", recompute="full", chunked_loss_tokens=7, head_groups=2),
        replace(mesh, sharding="zero2", recompute="selective", micro_batch=1, head_groups=2),
        # FSDP reduces these dtypes in another way than float64.
        replace(mesh, sharding="zero2", dtype="fp32", micro_batch=1, steps=2),
        replace(mesh, sharding="zero3", dtype="bf16", steps=2),
        replace(divided, sharding="zero2"),
        replace(divided, sharding="zero3", transport="shm"),
    ]
    spec = {
        "runs": [asdict(config) for config in configs],
        "counted": asdict(replace(mesh, sharding="zero3", micro_batch=1)),
    }
    reports = run_ranks_in_processes("tests.launch.train_entries:train_and_count", spec, 4, limit_s=200)
    expected = [alone(config) for config in configs]
    sizes = [weight.numel() for weight in Transformer(MESH.model, 256, torch.float64, 0).parameters()]
    step_bytes = 4 * len(sizes)  # AdamW counts steps in a float32 for each weight
    # Weights, gradients and two moments, each sharded over four processes without padding.
    assert reports[0]["runs"][0]["replicated_bytes"] == 4 * 8 * sum(sizes) // 4 + step_bytes
    assert expected[0]["replicated_bytes"] == 4 * 8 * sum(sizes) + step_bytes
    assert max(expected[4]["grad_norms"]) > 3 * CLIPPED["clip_norm"]  # gradients are clipped
    for report in reports:
        for result, reference in zip(report["runs"], expected, strict=True):
            same(result, reference)
        assert [result["first_step"] for result in report["runs"]] == [0, 3, 3, 3, *[0] * 12]
        assert report["reductions"] == report["sharded_parts"]  # two micro-batches, one reduction of each part
    resumed_alone = run(replace(MESH, resume=saved))
    assert resumed_alone["first_step"] == 3
    same(resumed_alone, expected[0])
