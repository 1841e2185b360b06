"""The capacity planner: hand calculations, published counts, comparison with real training, searches and advice."""

from __future__ import annotations

import json
import re
from dataclasses import astuple, replace
from itertools import combinations, product
from pathlib import Path
from typing import Any

import matplotlib.image
import matplotlib.pyplot as plt
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ringattn import Ring
from ringattn.bench import training_memory
from ringattn.bench.gate import GateError
from ringattn.bench.report import RESULTS
from ringattn.bench.storage_meter import StorageMeter
from ringattn.cli import main
from ringattn.errors import InputError
from ringattn.launch.capacity.account import training_bytes
from ringattn.launch.capacity.hardware import GIB, Hardware, hardware
from ringattn.launch.capacity.hardware import PRESETS as MACHINES
from ringattn.launch.capacity.layer_bytes import PRECISIONS, head_kept, layer_parts
from ringattn.launch.capacity.model_shapes import PRESETS, ModelShape, model_shape
from ringattn.launch.capacity.picture import capacity_figure, spread
from ringattn.launch.capacity.plan import RESERVE, PlanConfig, machine_of, plan, run_of, shape_of, verdict
from ringattn.launch.capacity.search import advice, fits, longest_tokens, smallest_ring, with_steps
from ringattn.launch.capacity.step_time import attention_flops, compute_flops, matrix_flops, step_seconds
from ringattn.launch.capacity.training_bytes import (
    AttentionSetup,
    TrainingSetup,
    _planned,
    cast_bytes,
    moments,
    optimizer_bytes,
    ring_slots_bytes,
    staging_bytes,
)
from ringattn.launch.config import load
from ringattn.launch.train import loop
from ringattn.launch.train.config import ModelConfig, TrainConfig
from ringattn.launch.train.data import VOCABULARY, BatchPart, windows
from ringattn.launch.train.loop import backward, clip, local_loss, make_model, update
from ringattn.launch.train.model import Transformer
from ringattn.layers import tiled
from ringattn.testing import run_ranks
from tests.covering import thinned

TRAINED = ModelShape(2, 96, 6, 2, 200, VOCABULARY, True)
TRAIN_PRECISION = {"fp32": "fp32", "fp64": "fp64", "bf16": "bf16_cast"}
TORCH = {"fp32": torch.float32, "fp64": torch.float64, "bf16": torch.bfloat16}


# --- hand calculations -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "layers", "width", "heads", "none_k", "full_m"),
    [("125M", 12, 768, 12, 265, 1.76), ("350M", 24, 1024, 16, 95, 0.91), ("1.3B", 24, 2048, 16, 38, 0.37)],
)
def test_capacity_of_80_gib_by_hand(name: str, layers: int, width: int, heads: int, none_k: int, full_m: float) -> None:
    # With L layers of width d, each parameter takes 16 bytes. A token takes 34 L d bytes, or with recomputation 2 L d
    # and 34 d for the layer that is recomputed. The last norm and the output projection take 4 d.
    parameters = 12 * layers * width**2 + 50_257 * width
    none, full = 34 * layers * width + 4 * width, 2 * layers * width + 34 * width + 4 * width
    assert int((80 * GIB - 16 * parameters) / none / 1e3) == none_k
    assert round((80 * GIB - 16 * parameters) / full / 1e6, 2) == full_m
    # The planner adds biases and norms (13 d per layer, 2 d), the normalizer of each head, ids, labels and positions.
    fixed = 16 * (parameters + 13 * layers * width + 2 * width)
    for recompute, per_token in (("none", none + 4 * heads * layers + 24), ("full", full + 4 * heads + 24)):
        run = TrainingSetup(model_shape(name), 1, recompute=recompute, transients=False)
        assert longest_tokens(run, 80 * GIB) == (80 * GIB - fixed) // per_token


@pytest.mark.parametrize(
    ("name", "count"),
    [
        ("125M", 124_439_808 - 1024 * 768),  # GPT-2's released model without its position embeddings
        ("7B", 6_738_415_616),
        ("13B", 13_015_864_320),
        ("70B", 68_976_648_192),
        ("405B", 405_853_388_800),
        ("llama3-8b", 8_030_261_248),
        ("llama3-70b", 70_553_706_496),
        ("qwen3-4b", 4_022_468_096 - 36 * 2 * 128),  # without the norms of queries and keys
        ("qwen3-30b-a3b", 30_532_122_624 - 48 * 2 * 128),
        ("mixtral-8x7b", 46_702_792_704),
    ],
)
def test_presets_have_the_parameters_of_the_released_models(name: str, count: int) -> None:
    assert model_shape(name).parameters == count


def test_adafactor_state_bytes_match_torch() -> None:
    model = Transformer(ModelConfig(2, 96, 6, 2, 200), VOCABULARY, torch.float32, 0)
    optimizer = torch.optim.Adafactor(model.parameters())
    for weight in model.parameters():
        weight.grad = torch.ones_like(weight)
    optimizer.step()
    values = [x for state in optimizer.state.values() for key, x in state.items() if key != "step"]
    state_bytes = sum(x.nbytes for x in values if isinstance(x, torch.Tensor))
    assert optimizer_bytes(TrainingSetup(TRAINED, 1, precision="fp32", optimizer="adafactor")) == state_bytes


# --- predictions compared with real training -------------------------------------------------------------------------


def saved_bytes(ring: Ring, dtype: str, layers: int, length: int) -> dict[str, int]:
    """Return the bytes that autograd saves in forward, without parameters: of the model, and of model and loss."""
    config = ModelConfig(layers, TRAINED.width, TRAINED.heads, TRAINED.kv_heads, TRAINED.ffn)
    model, seq = Transformer(config, VOCABULARY, TORCH[dtype], 0), ring.sequence(length)
    parameters = {weight.untyped_storage().data_ptr() for weight in model.parameters()}
    saved: dict[int, torch.UntypedStorage] = {}

    def keep(x: torch.Tensor) -> torch.Tensor:
        storage = x.untyped_storage()
        if storage.data_ptr() not in parameters:
            saved[storage.data_ptr()] = storage
        return x

    tokens = torch.randint(VOCABULARY, (1, length))
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        logits = model(seq.shard(tokens), seq.positions(), lambda q, k, v: ring.attention(q, k, v, seq, causal=True))
        model_bytes = sum(storage.nbytes() for storage in saved.values())
        local_loss(logits, seq.shard_labels(tokens), 1)
    return {"model": model_bytes, "all": sum(storage.nbytes() for storage in saved.values())}


@pytest.mark.parametrize("dtype", ["fp32", "fp64", "bf16"])
def test_predicted_bytes_of_a_layer_match_autograd(dtype: str) -> None:
    shape, numbers, tokens = TRAINED, PRECISIONS[TRAIN_PRECISION[dtype]], 64
    by_layers = {n: run_ranks(2, lambda ring, n=n: saved_bytes(ring, dtype, n, 2 * tokens))[0] for n in (2, 3)}
    casts = cast_bytes(TrainingSetup(shape, 1, precision=TRAIN_PRECISION[dtype]))
    layer_casts = casts - cast_bytes(TrainingSetup(replace(shape, layers=1), 1, precision=TRAIN_PRECISION[dtype]))
    assert by_layers[3]["model"] - by_layers[2]["model"] == tokens * layer_parts(shape, numbers).all.total + layer_casts
    kept = tokens * (2 * layer_parts(shape, numbers).all.total + head_kept(shape, numbers).total) + casts
    ids = tokens * 8
    assert by_layers[2]["model"] == kept + ids


@pytest.mark.parametrize(
    ("dtype", "layers", "length", "recompute", "moment"),
    [
        ("fp32", 2, 1024, "none", "loss"), ("bf16", 3, 1024, "none", "loss"), ("fp64", 2, 512, "none", "loss"),
        ("fp32", 4, 64, "none", "update"), ("fp32", 4, 256, "full", "first layer"),
    ],
)  # fmt: skip
def test_peak_of_a_training_step_on_one_rank(dtype: str, layers: int, length: int, recompute: str, moment: str) -> None:
    config = TrainConfig(tokens=length, dtype=dtype, recompute=recompute, model=ModelConfig(layers, 128, 4, 2, 384))
    text = torch.randint(VOCABULARY, (2 * length,), dtype=torch.uint8)

    def steps(ring: Ring) -> int:
        seq = ring.sequence(length)
        with StorageMeter() as storages:
            model, optimizer = make_model(ring, config)
            for step in range(2):  # only the second step includes the optimizer state
                backward(ring, ring, [BatchPart(seq, windows(text, step, 1, length, 0))], model, config)
                clip(model, config)
                update(model, optimizer)
        return storages.peak_bytes

    shape = ModelShape(layers, 128, 4, 2, 384, VOCABULARY, True)
    run = TrainingSetup(
        shape, length, precision=TRAIN_PRECISION[dtype], recompute=recompute, gradients_kept=False, data="whole"
    )
    account = training_bytes(run)
    assert account.moment == moment
    assert account.peak.total == pytest.approx(run_ranks(1, steps)[0], rel=0.01)


# --- slots -----------------------------------------------------------------------------------------------------------


def call_of(
    attention: AttentionSetup, tokens: int, ranks: int, batch: int = 1, dtype: str = "bfloat16"
) -> TrainingSetup:
    """Return the setup of a run of a model with 4 query heads and 2 key-value heads of head_dim 32."""
    shape, precision = ModelShape(1, 128, 4, 2, 128, 256, True), {"bfloat16": "bf16", "float32": "fp32"}[dtype]
    return TrainingSetup(shape, tokens, ranks, batch, attention, precision=precision)


@pytest.mark.parametrize(
    ("ranks", "kind", "dtype"), thinned(product((4, 5, 16, 40), ("causal", "full"), ("bfloat16", "float32")))
)
def test_slots_of_a_ring_match_the_closed_form(ranks: int, kind: str, dtype: str) -> None:
    slots = _planned(AttentionSetup(kind), 256 * ranks, ranks, 4, 2, 32, dtype, "ring")
    assert (slots.forward, slots.backward) == ring_slots_bytes(256, 64, dtype, kind == "causal")
    scaled = staging_bytes(call_of(AttentionSetup(kind), 10**6 * ranks, ranks, 3, dtype))
    expected = ring_slots_bytes(10**6, 64, dtype, kind == "causal")
    assert (scaled.forward, scaled.backward) == (3 * expected[0], 3 * expected[1])


@pytest.mark.parametrize(
    ("attention", "ranks"),
    [
        (AttentionSetup("window", window_tokens=1536), 16),
        (AttentionSetup("window", window_tokens=6144), 8),
        (AttentionSetup("dilated", 0, (512, 16384), (1, 4)), 8),
        (AttentionSetup("dilated", 0, (512, 8192, 32768), (1, 4, 16)), 8),
    ],
)
def test_slots_scale_with_the_number_of_tokens(attention: AttentionSetup, ranks: int) -> None:
    sizes = 4, 2, 32, "bfloat16"
    real = _planned(attention, 4096 * ranks, ranks, *sizes, "auto")
    assert real.arena > 0
    assert staging_bytes(call_of(attention, 4096 * ranks, ranks)) == real


def test_one_rank_has_no_slots_and_wide_segments_use_the_ring() -> None:
    assert staging_bytes(call_of(AttentionSetup(), 4096, 1)).arena == 0
    wide = AttentionSetup("dilated", 0, (2**20,), (64,))
    slots = staging_bytes(call_of(wide, 2**20, 64))
    assert (slots.route, slots.forward, slots.backward) == ("ring", *ring_slots_bytes(2**14, 64, "bfloat16", False))


# --- wrong names and sizes -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: model_shape("1.3b"), "preset=1.3b: did you mean 1.3B"),
        (lambda: hardware("a100"), "hardware=a100: did you mean a100-40"),
        (lambda: TrainingSetup(TRAINED, 8, precision="bf16master"), "precision=bf16master: choose one of fp64"),
        (lambda: TrainingSetup(TRAINED, 8, zero_stage=4), "zero_stage=4"),
        (lambda: TrainingSetup(TRAINED, 8, offload="parameters"), "zero_stage=3"),
        (lambda: TrainingSetup(TRAINED, 8, 9), "ranks=9: more ranks than tokens"),
        (lambda: TrainingSetup(TRAINED, 8, batch=0), "batch=0"),
        (lambda: AttentionSetup("causual"), "mask=causual: did you mean causal"),
        (lambda: AttentionSetup("window"), "window_tokens=0"),
        (lambda: AttentionSetup("dilated", 0, (4,), ()), "dilation rate"),
        (lambda: TrainingSetup(TRAINED, 8, 2, schedule="rings"), "schedule=rings: choose one of auto"),
        (lambda: replace(TRAINED, heads=5), "heads=5: must divide width"),
        (lambda: replace(TRAINED, experts=4), "experts_per_token=0: must be from 1 to experts=4"),
        (lambda: replace(TRAINED, experts_per_token=1), "experts_per_token=1: has no effect without experts"),
        (lambda: TrainingSetup(TRAINED, 8, tensor_ranks=3), "tensor_ranks=3: must divide kv_heads=2"),
        (lambda: TrainingSetup(TRAINED, 8, head_groups=4), "head_groups=4: must divide the K/V heads of a rank, 2"),
        (lambda: TrainingSetup(TRAINED, 8, head_groups=2, tensor_ranks=2), "head_groups=2: .* of a rank, 1"),
        (lambda: TrainingSetup(TRAINED, 8, head_groups=2, saved_activations="int8"), "needs .*saved_activations=keep"),
        (lambda: TrainingSetup(TRAINED, 8, pipeline_ranks=3), "pipeline_ranks=3: .* more than layers=2"),
        (lambda: TrainingSetup(TRAINED, 8, pipeline_chunks=2), "pipeline_chunks=2: has no effect with one"),
        (lambda: TrainingSetup(TRAINED, 8, micro_batches=0), "micro_batches=0"),
        (lambda: replace(TRAINED, kv_heads=4), "kv_heads=4: must divide heads"),
        (lambda: replace(TRAINED, layers=0), "layers=0"),
        (lambda: replace(TRAINED, block="swigelu"), "block=swigelu: did you mean swiglu"),
        (lambda: replace(hardware("h100"), flops=0.0), "flops=0.0"),
    ],
)  # fmt: skip
def test_wrong_names_and_sizes_are_errors(make: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        make()


# --- peaks with savings ----------------------------------------------------------------------------------------------


BIG = TrainConfig(tokens=512, steps=1, dtype="fp32", model=ModelConfig(4, 64, 4, 2, 192))
ROWS, DIM, HIDDEN, FLOAT_BYTES = 512, 64, 192, 4


def measured_peak_bytes(config: TrainConfig) -> int:
    """Run two steps on one rank. Return the peak bytes of the second, without weights and optimizer state."""
    batch = torch.randint(0, 256, (config.batch, config.tokens), generator=torch.Generator().manual_seed(1))

    def peak_on_rank(ring: Ring) -> int:
        model, optimizer = loop.make_model(ring, config)
        seq = ring.sequence(config.tokens)
        loop.backward(ring, ring, [BatchPart(seq, batch)], model, config)  # creates the ring's pool
        optimizer.zero_grad()
        with StorageMeter() as storages:
            loop.backward(ring, ring, [BatchPart(seq, batch)], model, config)
        return storages.peak_bytes

    return run_ranks(1, peak_on_rank)[0]


def predicted_bytes(config: TrainConfig) -> float:
    """Return the planner's peak bytes of one step, without weights and optimizer state."""
    shape = ModelShape(*astuple(config.model)[:5], 256, tied=True)
    peak = training_bytes(TrainingSetup(
        shape, config.tokens, precision=TRAIN_PRECISION[config.dtype], recompute=config.recompute, gradients_kept=False,
        saved_activations=config.saved_activations, chunked_loss_tokens=config.chunked_loss_tokens or 0,
        tiled_mlp_tokens=config.tiled_mlp_tokens or 0, head_groups=config.head_groups,
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
        *(pytest.param({"head_groups": 2, "recompute": recompute}, marks=pytest.mark.slow)
          for recompute in ("none", "selective", "full")),
        {"head_groups": 2, "recompute": "offloaded", "tiled_mlp_tokens": 64, "chunked_loss_tokens": 64},
    ],
    ids=str,
)  # fmt: skip
def test_predicted_peaks_match_measured_peaks(change: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    # Offload to numpy arrays, which the meter does not count. They stand for a GPU's host memory.
    monkeypatch.setattr(tiled, "to_host", lambda x: x.detach().numpy().copy())
    monkeypatch.setattr(tiled, "from_host", lambda array: tiled.DeviceCopy(torch.from_numpy(array).clone(), None))
    config = replace(BIG, **change)
    assert measured_peak_bytes(config) == pytest.approx(predicted_bytes(config), rel=0.1)


@pytest.mark.parametrize(("saved", "dtype"), [("int8", "fp32"), ("fp8", "fp32"), ("int8", "bf16")])
def test_packed_activations_are_counted_while_they_are_packed_and_unpacked(saved: str, dtype: str) -> None:
    """With int8, the largest moment is the packing in forward; with fp8 in float32, the unpacking in backward."""
    model = ModelConfig(3, 128, 4, 2, 384)
    config = TrainConfig(tokens=1024, steps=1, dtype=dtype, saved_activations=saved, model=model)
    assert measured_peak_bytes(config) == pytest.approx(predicted_bytes(config), rel=0.02)


# --- the benchmark ---------------------------------------------------------------------------------------------------


def test_differing_losses_stop_the_benchmark() -> None:
    plain = {"is_long": False, "is_short": False, "dtype": "fp32"}

    def record(optimizer: str, *losses: float) -> dict[str, Any]:
        return {**plain, "optimizer": optimizer, "by_rank": [{"losses": [5.0, 4.0]}, {"losses": list(losses)}]}

    first = {**plain, "optimizer": "adamw", "by_rank": [{"losses": [5.0, 4.0]}]}
    training_memory.check_losses([first, record("adamw", 5.00001, 4.0)], "right")
    training_memory.check_losses([first, record("sgd", 5.0, 4.9)], "right")
    for wrong in (record("adamw", 5.0, 4.001), record("sgd", 5.001, 4.0), record("adamw", float("nan"), 4.0)):
        with pytest.raises(GateError, match="nothing is measured"):
            training_memory.check_losses([first, wrong], "wrong")


def test_measured_peaks_are_within_three_percent_of_the_plan() -> None:
    """Every recorded run, also with sharded weights and with micro batches, has the peak that is planned today."""
    recorded = json.loads((Path(__file__).parents[2] / RESULTS / "training_memory.json").read_text())["runs"]
    options = training_memory.TrainingMemoryOptions()
    for run, record in zip(training_memory.COMBINATIONS, recorded, strict=True):
        assert {key: record[key] for key in run._asdict()} == run._asdict()
        measured = max(rank["storage_bytes"] for rank in record["by_rank"])
        assert training_memory.planned(run, options).peak.total == pytest.approx(measured, rel=0.03), run


@pytest.mark.parametrize("stage", [2, 3])
def test_gradients_are_whole_until_the_last_micro_batch(stage: int) -> None:
    """FSDP2 reduces gradients in the last of several micro batches only, so that a rank has all of them before."""
    alone = TrainingSetup(model_shape("7B"), 65536, 8, precision="bf16_cast", recompute="full", zero_stage=stage,
                          chunked_loss_tokens=1024)  # fmt: skip
    whole = alone.model.parameters * 4
    for run, item in ((alone, 4), (replace(alone, stack="trl"), 2)):
        assert training_bytes(run).peak.gradients < whole / 3
        accumulating = training_bytes(replace(run, micro_batches=4)).peak.gradients
        assert whole * item / 4 <= accumulating < whole * item / 4 * 1.1
    deepspeed = replace(alone, stack="deepspeed", precision="bf16_master", micro_batches=4)
    assert training_bytes(deepspeed).peak.gradients < whole / 8


def test_sharded_weights_are_counted_with_their_gathered_copies() -> None:
    """ZeRO 2 has the shard and all weights in forward. Both stages have two buffers while a layer is gathered."""
    run = TrainingSetup(model_shape("7B"), 4096, 8, precision="fp32", zero_stage=2, gradients_kept=False)
    share = run.share
    two, three = (moments(replace(run, zero_stage=stage))["gather"].parameters / 4 for stage in (2, 3))
    assert two == share.parameters / 8 + share.parameters + 2 * share.layer
    assert three == share.parameters / 8 + 3 * share.layer + share.head
    assert moments(run)["update"].parameters == share.parameters / 8 * 4


@pytest.mark.slow
def test_training_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make = training_memory.Combination
    runs = (
        make("none", "adamw", 1),
        make("full", "sgd", 2),
        make("offloaded", "sgd", 1),
        make("full", "sgd", 2, dtype="bf16"),
        make("none", "sgd", 2, is_short=True, sharding="zero3", micro_batches=2),
    )
    monkeypatch.setattr(training_memory, "COMBINATIONS", runs)
    data = training_memory.main([f"results={tmp_path}"])
    one_rank, two_ranks, on_host, half, sharded = data["runs"]
    assert len(two_ranks["by_rank"]) == 2
    for rank in (*one_rank["by_rank"], *two_ranks["by_rank"]):
        assert rank["resident_bytes"] >= 0.9 * rank["storage_bytes"] > rank["kept_bytes"]
    assert two_ranks["by_rank"][0]["storage_bytes"] < one_rank["by_rank"][0]["storage_bytes"] / 2
    for record in (on_host, half, sharded):  # the resident size includes host memory, and buffers of gloo
        storages = max(rank["storage_bytes"] for rank in record["by_rank"])
        assert record["predicted_bytes"] == pytest.approx(storages, rel=0.03)
    for record in (one_rank, two_ranks):
        largest = max(rank["resident_bytes"] for rank in record["by_rank"])
        assert record["predicted_bytes"] == pytest.approx(largest, rel=0.1)
    assert "predicted / storages" in (tmp_path / "training_memory.md").read_text()
    assert (tmp_path / "training_memory.png").stat().st_size > 10_000
    assert training_memory.largest_of_parts([1, 5, 2, 7, 3], 2) == [5, 7]


# --- longest sequence and smallest ring ------------------------------------------------------------------------------


SHAPE = ModelShape(2, 96, 6, 2, 200, 256, True)

runs = st.builds(
    TrainingSetup,
    model=st.sampled_from([*PRESETS.values(), SHAPE]),
    tokens=st.integers(64, 10**7),
    ranks=st.integers(1, 40),
    batch=st.integers(1, 4),
    precision=st.sampled_from(list(PRECISIONS)),
    recompute=st.sampled_from(["none", "selective", "full", "offloaded"]),
    zero_stage=st.sampled_from([1, 2, 3]),
    chunked_loss_tokens=st.sampled_from([0, 1024]),
    saved_activations=st.sampled_from(["keep", "int8"]),
)


@pytest.mark.slow
@settings(max_examples=40, deadline=None)
@given(runs)
def test_memory_grows_with_work_and_never_with_ranks(run: TrainingSetup) -> None:
    total = training_bytes(run).peak.total
    assert training_bytes(replace(run, tokens=2 * run.tokens)).peak.total >= total
    assert training_bytes(replace(run, batch=run.batch + 1)).peak.total > total
    if 4 <= run.ranks and 2 * run.ranks <= run.tokens:  # from 4 ranks on, the slots are those of a full ring
        assert training_bytes(replace(run, ranks=2 * run.ranks)).peak.total <= total
    parts = training_bytes(run).peak
    assert sum(parts) == total and min(parts) >= 0


@pytest.mark.slow
@settings(max_examples=5, deadline=None)
@given(runs, st.sampled_from([24, 80, 141]))
def test_longest_tokens_is_the_largest_length_that_fits(run: TrainingSetup, gib: int) -> None:
    longest = longest_tokens(run, gib * GIB)
    assert longest % run.ranks == 0
    assert not longest or fits(replace(run, tokens=longest), gib * GIB)
    assert not fits(replace(run, tokens=longest + run.ranks), gib * GIB)


@pytest.mark.parametrize(
    ("name", "zero", "tokens"),
    [
        pytest.param("1.3B", 0, 10**7, marks=pytest.mark.slow),
        pytest.param("7B", 3, 10**6, marks=pytest.mark.slow),
        ("125M", 0, 1000),
    ],
)
def test_smallest_ring_is_the_fewest_ranks_that_fit(name: str, zero: int, tokens: int) -> None:
    run = TrainingSetup(model_shape(name), tokens, zero_stage=zero, recompute="full", chunked_loss_tokens=1024)
    ring = smallest_ring(run, 80 * GIB)
    assert ring is not None and fits(replace(run, ranks=ring), 80 * GIB)
    assert ring == 1 or not fits(replace(run, ranks=ring - 1), 80 * GIB)
    assert smallest_ring(replace(run, model=model_shape("405B"), zero_stage=0), 80 * GIB) is None


# --- advice, time, hardware ------------------------------------------------------------------------------------------


def test_advice_ends_with_the_first_setting_that_fits() -> None:
    run, machine = TrainingSetup(model_shape("llama3-8b"), 10**6, 8), hardware("h100")
    steps = advice(run, machine)
    totals = [training_bytes(run).peak.total, *(step.total_bytes for step in steps)]
    for before, after, step in zip(totals, totals[1:], steps, strict=False):
        assert before > machine.memory_bytes and before - after == pytest.approx(step.saves_bytes)
    advised = with_steps(run, steps)
    assert totals[-1] == pytest.approx(training_bytes(advised).peak.total) and totals[-1] < machine.memory_bytes
    assert steps[-1].time_factor == pytest.approx(step_seconds(advised, machine) / step_seconds(run, machine))
    assert advice(replace(run, tokens=8, model=model_shape("125M")), machine) == []
    one_rank = advice(TrainingSetup(model_shape("70B"), 10**6, 1), machine)
    assert one_rank and one_rank[-1].total_bytes > machine.memory_bytes
    keys = [step.switch.key for step in one_rank]
    assert "zero_stage" not in keys[: keys.index("offload")]  # before offload, one rank saves nothing with ZeRO
    with_savings = replace(
        run, tokens=3 * 10**6, recompute="full", chunked_loss_tokens=512, zero_stage=3, offload="parameters",
        tiled_mlp_tokens=512,
    )  # fmt: skip
    assert [step.switch.value for step in advice(with_savings, machine)] == [8, "offloaded"]


@pytest.mark.slow
def test_the_longest_sequence_of_llama_8b_on_eight_h100() -> None:
    """The longest sequence of Llama-3 8B on 8 H100 is more than 6 million tokens, and most of it is due to the groups.

    The run has all settings that save memory and do not round, and leaves the default reserve free.
    """
    run = TrainingSetup(
        model_shape("llama3-8b"), 6 * 10**6, 8, zero_stage=3, recompute="offloaded", chunked_loss_tokens=1024,
        tiled_mlp_tokens=4096, gradients_kept=False, framework_bytes=GIB, head_groups=8,
    )  # fmt: skip
    memory_bytes = (1 - 0.124) * hardware("h100").memory_bytes
    assert longest_tokens(run, memory_bytes) > 8 * 10**6
    assert longest_tokens(replace(run, head_groups=1), memory_bytes) < 3 * 10**6
    steps = advice(replace(run, head_groups=1), hardware("h100"))
    assert [step.switch.key for step in steps] == ["head_groups"]


def test_flops_of_a_step_by_hand() -> None:
    run = TrainingSetup(model_shape("7B"), 4096, chunked_loss_tokens=0)
    products = 2 * (run.model.parameters - 32000 * 4096 - 65 * 4096) * 4096  # without the embedding and norms
    pairs = 4096 * 4097 / 2
    assert matrix_flops(run) == products
    assert attention_flops(run) == 4 * 4096 * pairs * 32
    assert compute_flops(run) == 3 * products + 3.5 * attention_flops(run)
    layers = products - 2 * 32000 * 4096 * 4096
    projections = 2 * 3 * 4096**2 * 4096 * 32
    grouped = {mode: compute_flops(replace(run, recompute=mode, head_groups=2)) for mode in ("none", "full")}
    assert grouped["none"] == compute_flops(run) + projections
    assert grouped["full"] == compute_flops(replace(run, recompute="full")) + projections
    extra = {mode: compute_flops(replace(run, recompute=mode)) - compute_flops(run) for mode in ("selective", "full")}
    assert extra == {"selective": layers, "full": layers + attention_flops(run)}


@pytest.mark.parametrize("kind", ["full", "causal", "window"])
def test_the_number_of_pairs_matches_the_mask(kind: str) -> None:
    attention = AttentionSetup(kind, window_tokens=7 if kind == "window" else 0)
    q, k = torch.arange(50)[:, None], torch.arange(50)[None]
    allowed = {"full": q == q + 0 * k, "causal": q >= k, "window": (q >= k) & (q - k <= 7)}[kind]
    assert attention.pairs(50) == allowed.sum().item()


@pytest.mark.parametrize("machine", MACHINES.values(), ids=lambda machine: machine.name)
def test_recommended_settings_fit_a_small_model(machine: Hardware) -> None:
    model = "125M" if machine.memory_bytes < 16 * GIB else "1.3B"
    run = replace(TrainingSetup(model_shape(model), 8 * 8192, 8, framework_bytes=GIB), **dict(machine.start))
    assert fits(run, machine.memory_bytes)
    assert machine.bf16 or run.precision == "fp32"
    assert machine.source and machine.why


# --- the command -----------------------------------------------------------------------------------------------------


PLANS = Path(__file__).with_name("plans.json")
"""Recorded plans by their options. `python -m tests.launch.test_capacity` rewrites the file."""

LONG = (
    "preset=llama3-8b ranks=8 tokens=1000000", "preset=70B", "preset=mixtral-8x7b", "preset=350M ranks=3",
    "preset=405B",
    "preset=7B hardware=a100-80",
)  # fmt: skip
"""Options whose plans take seconds. The other plans have the same parts."""


def plan_of(options: str) -> dict[str, Any]:
    """Return the JSON that `ringattn plan` writes for these options."""
    config = load(options.split(), PlanConfig)
    result: dict[str, Any] = json.loads(json.dumps(plan(config, machine_of(config))))
    return result


@pytest.mark.parametrize(
    "options",
    [
        pytest.param(options, marks=pytest.mark.slow if options.startswith(LONG) else ())
        for options in json.loads(PLANS.read_text())
    ],
)
def test_plans_match_the_recorded_plans(options: str) -> None:
    recorded = json.loads(PLANS.read_text())[options]
    result = plan_of(options)
    assert {key for key in recorded if result[key] != recorded[key]} == set() and result.keys() == recorded.keys()


USABLE = int(80 * GIB * (1 - RESERVE))
"""The memory of an 80 GiB accelerator without the reserve."""


def run_plan(tmp_path: Path, *options: str) -> tuple[int, dict[str, Any]]:
    """Run the command, and return the exit code and the JSON."""
    path = tmp_path / "plan.json"
    code = main(["plan", *options, f"json={path}"])
    return code, json.loads(path.read_text())


def test_a_plan_for_a_billion_tokens(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, result = run_plan(tmp_path, "tokens=1000000000", "recompute=full", "chunked_loss_tokens=1024")
    run = TrainingSetup(model_shape("1.3B"), 10**9, result["smallest_ring"], recompute="full", chunked_loss_tokens=1024,
              framework_bytes=GIB)  # fmt: skip
    assert code == 0 and result["fits"]
    assert result["total_bytes"] == training_bytes(run).peak.total <= USABLE
    assert not fits(replace(run, ranks=run.ranks - 1), USABLE)
    printed = capsys.readouterr().out
    tokens, token_bytes = -(-(10**9) // run.ranks), result["bytes_per_token"]
    assert f"a ring of {run.ranks:,}: {tokens:,} tokens per rank" in printed
    assert f"memory of a rank: {tokens:,} tokens of {token_bytes:,.0f} bytes are" in printed
    assert result["longest_tokens"] >= 10**9


@pytest.mark.parametrize(
    ("options", "published"),
    [(("preset=125M",), 265), (("preset=350M",), 95), (("preset=1.3B",), 38),
     (("preset=125M", "recompute=full"), 1760), (("preset=350M", "recompute=full"), 910),
     (("preset=1.3B", "recompute=full"), 370)],
)  # fmt: skip
def test_corrected_capacities_of_80_gib(tmp_path: Path, options: tuple[str, ...], published: int) -> None:
    # Published values are rounded to thousands or ten thousands. They do not count normalizers and ids, which change
    # the value by less than its last digit.
    last_digit = 10 if published > 300 else 1
    _, result = run_plan(tmp_path, *options, "ranks=1", "hardware=a100-80", "transients=false", "framework_gib=0",
                         "reserve=0")  # fmt: skip
    assert abs(result["longest_tokens"] / 1000 - published) <= last_digit


def test_savings_are_suggested_for_a_run_that_does_not_fit(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, result = run_plan(tmp_path, "preset=llama3-8b", "ranks=8", "tokens=1000000")
    printed = capsys.readouterr().out
    assert code == 1 and not result["fits"] and printed.startswith("does not fit: ")
    assert result["longest_tokens"] == 0 and result["smallest_ring"] is None
    settings = [f"{step['key']}={step['value']}" for step in result["steps"]]
    assert all(setting in printed for setting in settings) and "then it fits" in printed
    assert "changes the arithmetic: optimizer=adamw8bit" in printed
    # No recommended settings are printed. The two smallest rings are those without and with the savings.
    assert "recommended" not in printed and printed.count("smallest ring") == 2
    assert result["after_steps"]["smallest_ring"] <= 8 and result["after_steps"]["longest_tokens"] >= 10**6
    chunks = [step["value"] for step in result["steps"] if step["key"] == "chunked_loss_tokens"]
    assert chunks == [dict(hardware("h100").start)["chunked_loss_tokens"]]
    assert "a step with all of these settings: about" in printed
    assert sum(result["bytes_by_component"].values()) == result["total_bytes"]
    saved = sum(step["saves_bytes"] for step in result["steps"])
    assert result["after_steps"]["total_bytes"] == pytest.approx(result["total_bytes"] - saved)
    code, advised = run_plan(tmp_path, "preset=llama3-8b", "ranks=8", "tokens=1000000", *last_values(settings))
    assert code == 0 and advised["total_bytes"] == pytest.approx(result["after_steps"]["total_bytes"])


def test_the_verdict_needs_the_reserve(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A run whose peak is within the memory but not within the reserve does not fit, and the exit code is 1."""
    assert RESERVE == 0.124  # 1 - 42.71 / 48.75, the largest gap of the published runs
    options = "preset=125M", "ranks=1", "tokens=4096"
    gib = training_bytes(TrainingSetup(model_shape("125M"), 4096, framework_bytes=GIB)).peak.total / GIB
    for memory, reserve, expected in ((gib / 0.9, 0.09, 0), (gib / 0.9, 0.11, 1), (gib * 0.9, 0.0, 1)):
        capsys.readouterr()
        code, figures = run_plan(tmp_path, *options, f"memory_gib={memory}", f"reserve={reserve}")
        first, peak, last = capsys.readouterr().out.splitlines()[:3]
        assert (code, figures["fits"]) == (expected, not expected)
        assert first.startswith("does not fit: " if expected else "fits: ")
        left = "stay free" if memory > gib else "GiB are missing"
        assert left in first and f"({reserve:.1%}) must stay free" in first
        ((name, largest), *_) = sorted(figures["bytes_by_component"].items(), key=lambda item: -item[1])
        assert peak.startswith(f"peak at the loss: {name.replace('_', ' ')} {largest / GIB:,.2f} GiB")
        assert last.startswith(f"longest sequence on a ring of 1: {figures['longest_tokens']:,} tokens")
        assert ("turn on first: " in last) == bool(expected)
        assert (figures["longest_tokens"] >= 4096) == (not expected)


def test_the_verdict_says_that_the_state_alone_does_not_fit(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The line names the bytes of one token per rank, and says why a ring was planned that the caller did not name."""
    _, result = run_plan(tmp_path, "preset=7B", "ranks=1", "tokens=4096")
    last = capsys.readouterr().out.splitlines()[2]
    state = training_bytes(TrainingSetup(model_shape("7B"), 1, 1, framework_bytes=GIB)).peak
    alone = f": with one token per rank a rank already takes {state.total / GIB:,.2f} GiB, optimizer "
    assert result["longest_tokens"] == 0 and last.startswith(f"no sequence fits on a ring of 1{alone}")
    recommended = verdict({**result, "ring_from": "recommended"})[2]
    chosen = "no ring fits this length; no sequence fits on a ring of 1, the smallest that fits with recommended=true"
    assert recommended.startswith(chosen + alone)


def last_values(settings: list[str]) -> list[str]:
    """Return the settings ("key=value") with only the last one of each key."""
    return [f"{key}={value}" for key, value in dict(setting.split("=") for setting in settings).items()]


def test_every_option_reaches_the_run() -> None:
    options = ("tokens=4096 ranks=4 batch=2 mask=window window_tokens=100 schedule=direct precision=fp32 "
               "optimizer=lion recompute=selective saved_activations=int8 zero_stage=3 zero_degree=16 "
               "offload=parameters chunked_loss_tokens=64 data=whole transients=false framework_gib=2 layers=3 "
               "width=64 heads=8 kv_heads=2 ffn=160 vocabulary=300 tied=true block=swiglu head_dim=16 experts=4 "
               "experts_per_token=2 shared_experts=1 tiled_mlp_tokens=32 tensor_ranks=2 pipeline_ranks=3 "
               "pipeline_chunks=1 micro_batches=5")  # fmt: skip
    shape = ModelShape(3, 64, 8, 2, 160, 300, True, "swiglu", 16, 4, 2, 1)
    assert run_of(load(options.split(), PlanConfig)) == TrainingSetup(
        shape, 4096, 4, 2, AttentionSetup("window", 99), 2 * GIB, schedule="direct", precision="fp32", optimizer="lion",
        recompute="selective", saved_activations="int8", zero_stage=3, zero_degree=16, offload="parameters",
        chunked_loss_tokens=64, data="whole", transients=False, tiled_mlp_tokens=32,
        tensor_ranks=2, pipeline_ranks=3, pipeline_chunks=1, micro_batches=5,
    )  # fmt: skip
    # Gradients of several micro batches are always kept.
    assert not run_of(load(["gradients_kept=false"], PlanConfig)).gradients_kept
    machine = machine_of(load(["memory_gib=10", "link_gb_s=7", "tflops=3"], PlanConfig))
    assert (machine.memory_bytes, machine.link_bytes_s, machine.flops) == (10 * GIB, 7e9, 3e12)


def test_dilated_branches_need_slots(tmp_path: Path) -> None:
    _, result = run_plan(tmp_path, "preset=125M", "ranks=2", "tokens=4096", "mask=dilated",
                         "segment_lengths=[1024,4096]", "dilation_rates=[1,4]", "hardware=h200")  # fmt: skip
    assert result["run"]["attention"]["segment_lengths"] == [1024, 4096]
    assert result["route"] == "all_gather" and result["bytes_by_component"]["slots"] > 0


def test_given_settings_override_recommended_settings(tmp_path: Path) -> None:
    start = dict(hardware("a100-80").start)
    options = "hardware=a100-80", "recommended=true", "ranks=8"
    _, result = run_plan(tmp_path, *options)
    assert {key: result["run"][key] for key in start} == start
    _, changed = run_plan(tmp_path, *options, "recompute=full")
    assert {key: changed["run"][key] for key in start} == {**start, "recompute": "full"}
    assert result["hardware"]["longest_tokens"] == result["longest_tokens"]


def test_head_dim_follows_from_a_given_width() -> None:
    assert shape_of(load(["preset=qwen3-4b"], PlanConfig)).head_dim == 128
    assert shape_of(load(["preset=qwen3-4b", "width=2048"], PlanConfig)).head_dim == 64
    assert shape_of(load(["preset=qwen3-4b", "width=2048", "head_dim=128"], PlanConfig)).head_dim == 128


@pytest.mark.slow
def test_the_step_time_of_405b_is_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ("preset=405B tokens=131072 ranks=16 tensor_ranks=8 pipeline_ranks=16 pipeline_chunks=7 "
               "micro_batches=16 zero_stage=2 zero_degree=128 recompute=full").split()  # fmt: skip
    code, result = run_plan(tmp_path, *options)
    step, printed = result["step"], capsys.readouterr().out
    assert code == 0 and f"a step: about {step['seconds']:,.2f} s (products" in printed
    assert "tokens/s on 2,048 accelerators" in printed and f"MFU {step['mfu']:.1%} of 989 TFLOP/s" in printed
    assert (
        "not measured: matrix products 720, attention 648 forward, 561 backward TFLOP/s; matrix products: 720"
    ) in printed
    assert "FlashAttention-3" in printed


def test_picture(tmp_path: Path) -> None:
    path = tmp_path / "plan.png"
    assert main(["plan", "preset=7B", "ranks=2", f"picture={path}"]) == 1
    pixels = matplotlib.image.imread(path)[..., :3]
    red, optimizer = (0.7529, 0.2235, 0.1686), (0.1725, 0.6275, 0.1725)  # the memory limit; the third color of tab10
    for color in (red, optimizer):
        assert (abs(pixels - color).max(-1) < 0.01).sum() > 50


@pytest.mark.parametrize(
    "options",
    ["preset=1.3B hardware=a100-80 ranks=8 tokens=1000000", "preset=7B ranks=2", "preset=125M ranks=1 tokens=1024",
     pytest.param("preset=70B ranks=4 hardware=gtx1080 precision=fp32 tokens=100000", marks=pytest.mark.slow)],
)  # fmt: skip
def test_every_value_of_the_picture_is_readable(options: str, tmp_path: Path) -> None:
    """The values of a bar add up to its total. Each is inside its segment or above the bar, and no two overlap."""
    _, result = run_plan(tmp_path, *options.split())
    figure = capacity_figure(result)
    (ax,) = figure.axes
    figure.canvas.draw()
    rows = 1 + bool(result["steps"])
    numbers = [text for text in ax.texts if re.fullmatch(r"[\d,.]+", text.get_text())]
    totals = [text for text in ax.texts if re.fullmatch(r"[\d,.]+ GiB", text.get_text())]
    assert len(totals) == rows
    for row, (total, key) in enumerate(zip(totals, ("bytes_by_component", "after_steps"), strict=False)):
        parts = result[key] if row == 0 else result[key]["bytes_by_component"]
        values = [text for text in numbers if abs(text.get_position()[1] - row) < 0.5]
        written = [float(text.get_text().replace(",", "")) for text in values]
        assert sum(written) == pytest.approx(sum(parts.values()) / 2**30, rel=0.02)
        assert float(total.get_text().split()[0].replace(",", "")) == pytest.approx(
            sum(parts.values()) / 2**30, abs=0.05
        )
    boxes = [text.get_window_extent() for text in (*numbers, *totals)]
    assert not any(first.overlaps(second) for first, second in combinations(boxes, 2))
    bars = [bar.get_window_extent() for bar in ax.patches if bar.get_width()]
    for text in numbers:
        box = text.get_window_extent()
        below = [bar for bar in bars if bar.overlaps(box)]
        assert not below or (len(below) == 1 and below[0].x0 <= box.x0 and box.x1 <= below[0].x1), text.get_text()
    plt.close(figure)


def test_overlapping_labels_are_spread() -> None:
    assert spread([1.0, 5.0, 9.0], [2.0, 2.0, 2.0]) == [1.0, 5.0, 9.0]
    assert spread([5.0, 5.0], [2.0, 4.0]) == [3.0, 6.0]
    assert spread([0.1, 0.2, 0.3, 20.0], [2.0, 2.0, 2.0, 2.0]) == [1.0, 3.0, 5.0, 20.0]


def test_help_names_every_key(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--help"]) == 0
    printed = capsys.readouterr().out
    assert all(f"  {name} " in printed for name in PlanConfig.__dataclass_fields__)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("hardware=gtx1080",), "precision=bf16_master: gtx1080 has no bf16 arithmetic; use precision=fp32"),
        (("mask=window",), "window_tokens=0: must be at least 2"),
        (("window_tokens=5",), "window_tokens=5: has no effect with mask=causal; set mask=window"),
        (("dilation_rates=[1]",), "dilation_rates=[1]: has no effect with mask=causal; set mask=dilated"),
        (("memory_gib=0",), "memory_gib=0.0: must be more than 0"),
        (("width=100",), "heads=16: must divide width=100"),
    ],
)
def test_wrong_options_exit_with_2(options: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", *options]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.slow  # it searches rings of up to 2^24 ranks three times
def test_the_plan_is_for_one_rank_if_no_ring_fits() -> None:
    result = plan(load(["preset=405B"], PlanConfig), hardware("rtx4090"))
    assert result["run"]["ranks"] == 1 and result["smallest_ring"] is None and not result["fits"]


def test_the_plan_is_for_the_ring_that_fits_with_recommended_settings(tmp_path: Path) -> None:
    code, result = run_plan(tmp_path, "preset=7B", "tokens=1000000")
    model, ring, limit = model_shape("7B"), result["hardware"]["smallest_ring"], USABLE
    assert code == 1 and result["smallest_ring"] is None and result["run"]["ranks"] == ring
    assert result["ring_from"] == "recommended"
    recommended = TrainingSetup(model, 10**6, ring, framework_bytes=GIB, **result["hardware"]["recommended"])
    assert fits(recommended, limit) and not fits(replace(recommended, ranks=ring - 1), limit)
    assert result["after_steps"]["total_bytes"] <= limit


if __name__ == "__main__":
    plans = {options: plan_of(options) for options in json.loads(PLANS.read_text())}
    PLANS.write_text(json.dumps(plans, indent=1) + "\n")
