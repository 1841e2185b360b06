"""The capacity planner: against hand calculations, published counts, what autograd keeps, and the real placement."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from ringattn.bench.storage_meter import StorageMeter
from ringattn.errors import InputError
from ringattn.launch.capacity.fitting import longest_tokens
from ringattn.launch.capacity.hardware import hardware
from ringattn.launch.capacity.model_shapes import ModelShape, model_shape
from ringattn.launch.capacity.training_bytes import (
    PRECISIONS,
    AttentionSetup,
    TrainingSetup,
    _planned,
    cast_bytes,
    head_kept,
    layer_parts,
    optimizer_bytes,
    ring_slots_bytes,
    staging_bytes,
    training_bytes,
)
from ringattn.launch.train.config import ModelConfig, TrainConfig
from ringattn.launch.train.data import VOCABULARY, BatchPart, windows
from ringattn.launch.train.loop import backward, clip, local_loss, make_model, update
from ringattn.launch.train.model import Transformer
from ringattn.ring import Ring
from ringattn.testing import run_ranks

GIB = 2**30
TRAINED = ModelShape(2, 96, 6, 2, 200, VOCABULARY, True)
TRAIN_PRECISION = {"fp32": "fp32", "fp64": "fp64", "bf16": "bf16_cast"}
TORCH = {"fp32": torch.float32, "fp64": torch.float64, "bf16": torch.bfloat16}


# --- hand calculations -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "layers", "width", "heads", "none_k", "full_m"),
    [("125M", 12, 768, 12, 265, 1.76), ("350M", 24, 1024, 16, 95, 0.91), ("1.3B", 24, 2048, 16, 38, 0.37)],
)
def test_capacity_of_80_gib_by_hand(name: str, layers: int, width: int, heads: int, none_k: int, full_m: float) -> None:
    # 16 bytes a parameter; 34 L d a token, or 2 L d and one live layer; 4 d for the last norm and the output product.
    parameters = 12 * layers * width**2 + 50_257 * width
    none, full = 34 * layers * width + 4 * width, 2 * layers * width + 34 * width + 4 * width
    assert int((80 * GIB - 16 * parameters) / none / 1e3) == none_k
    assert round((80 * GIB - 16 * parameters) / full / 1e6, 2) == full_m
    # What that leaves out: biases and norms (13 d a layer, 2 d), the normalizer of each head, ids, labels, positions.
    fixed = 16 * (parameters + 13 * layers * width + 2 * width)
    for recompute, per_token in (("none", none + 4 * heads * layers + 24), ("full", full + 4 * heads + 24)):
        run = TrainingSetup(model_shape(name), 1, recompute=recompute, transients=False)
        assert longest_tokens(run, 80 * GIB) == (80 * GIB - fixed) // per_token


@pytest.mark.parametrize(
    ("name", "count"),
    [
        ("125M", 124_439_808 - 1024 * 768),  # GPT-2's released model, less its table of positions
        ("7B", 6_738_415_616),
        ("13B", 13_015_864_320),
        ("70B", 68_976_648_192),
        ("405B", 405_853_388_800),
        ("llama3-8b", 8_030_261_248),
        ("llama3-70b", 70_553_706_496),
        ("qwen3-4b", 4_022_468_096 - 36 * 2 * 128),  # less the norms of queries and keys
        ("qwen3-30b-a3b", 30_532_122_624 - 48 * 2 * 128),
        ("mixtral-8x7b", 46_702_792_704),
    ],
)
def test_presets_have_the_parameters_of_the_released_models(name: str, count: int) -> None:
    assert model_shape(name).parameters == count


def test_adafactor_keeps_what_torch_keeps() -> None:
    model = Transformer(ModelConfig(2, 96, 6, 2, 200), VOCABULARY, torch.float32, 0)
    optimizer = torch.optim.Adafactor(model.parameters())
    for weight in model.parameters():
        weight.grad = torch.ones_like(weight)
    optimizer.step()
    held = [x for state in optimizer.state.values() for key, x in state.items() if key != "step"]
    kept = sum(x.nbytes for x in held if isinstance(x, torch.Tensor))
    assert optimizer_bytes(TrainingSetup(TRAINED, 1, precision="fp32", optimizer="adafactor")) == kept


# --- the model that is really trained --------------------------------------------------------------------------------


def saved_bytes(ring: Ring, dtype: str, layers: int, length: int) -> dict[str, int]:
    """Bytes of all storages that autograd keeps after a forward pass, but for parameters: model and loss."""
    config = ModelConfig(layers, TRAINED.width, TRAINED.heads, TRAINED.kv_heads, TRAINED.ffn)
    model, seq = Transformer(config, VOCABULARY, TORCH[dtype], 0), ring.sequence(length)
    own = {weight.untyped_storage().data_ptr() for weight in model.parameters()}
    seen: dict[int, torch.UntypedStorage] = {}

    def keep(x: torch.Tensor) -> torch.Tensor:
        storage = x.untyped_storage()
        if storage.data_ptr() not in own:
            seen[storage.data_ptr()] = storage
        return x

    tokens = torch.randint(VOCABULARY, (1, length))
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        logits = model(seq.shard(tokens), seq.positions(), lambda q, k, v: ring.attention(q, k, v, seq, causal=True))
        of_model = sum(storage.nbytes() for storage in seen.values())
        local_loss(logits, seq.shard_labels(tokens), 1)
    return {"model": of_model, "all": sum(storage.nbytes() for storage in seen.values())}


@pytest.mark.parametrize("dtype", ["fp32", "fp64", "bf16"])
def test_a_layer_keeps_what_autograd_keeps(dtype: str) -> None:
    shape, numbers, tokens = TRAINED, PRECISIONS[TRAIN_PRECISION[dtype]], 64
    two, three = (run_ranks(2, lambda ring, n=n: saved_bytes(ring, dtype, n, 2 * tokens))[0] for n in (2, 3))
    casts = cast_bytes(TrainingSetup(shape, 1, precision=TRAIN_PRECISION[dtype]))
    of_layer = casts - cast_bytes(TrainingSetup(replace(shape, layers=1), 1, precision=TRAIN_PRECISION[dtype]))
    assert three["model"] - two["model"] == tokens * layer_parts(shape, numbers).all.total + of_layer
    kept = tokens * (2 * layer_parts(shape, numbers).all.total + head_kept(shape, numbers).total) + casts
    ids = tokens * 8
    assert two["model"] == kept + ids


@pytest.mark.parametrize(
    ("dtype", "layers", "length", "moment"),
    [("fp32", 2, 1024, "loss"), ("bf16", 3, 1024, "loss"), ("fp64", 2, 512, "loss"), ("fp32", 4, 64, "first layer")],
)
def test_peak_of_a_training_step_on_one_rank(dtype: str, layers: int, length: int, moment: str) -> None:
    config = TrainConfig(tokens=length, dtype=dtype, model=ModelConfig(layers, 128, 4, 2, 384))
    text = torch.randint(VOCABULARY, (2 * length,), dtype=torch.uint8)

    def steps(ring: Ring) -> int:
        seq = ring.sequence(length)
        with StorageMeter() as storages:
            model, optimizer = make_model(ring, config)
            for step in range(2):  # the optimizer's state is there from the second on
                backward(ring, ring, [BatchPart(seq, windows(text, step, 1, length, 0))], model, config)
                clip(model, config)
                update(model, optimizer)
        return storages.peak_bytes

    shape = ModelShape(layers, 128, 4, 2, 384, VOCABULARY, True)
    run = TrainingSetup(shape, length, precision=TRAIN_PRECISION[dtype], gradients_kept=False, data="whole")
    account = training_bytes(run)
    assert account.moment == moment
    assert account.peak.total == pytest.approx(run_ranks(1, steps)[0], rel=0.02)  # issue's bound for storages


# --- slots -----------------------------------------------------------------------------------------------------------


def call_of(
    attention: AttentionSetup, tokens: int, ranks: int, batch: int = 1, dtype: str = "bfloat16"
) -> TrainingSetup:
    """A run whose layers attend with 4:2 heads of 32."""
    shape, precision = ModelShape(1, 128, 4, 2, 128, 256, True), {"bfloat16": "bf16", "float32": "fp32"}[dtype]
    return TrainingSetup(shape, tokens, ranks, batch, attention, precision=precision)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("kind", ["causal", "full"])
@pytest.mark.parametrize("ranks", [4, 5, 16, 40])
def test_a_ring_takes_what_the_closed_form_says(ranks: int, kind: str, dtype: str) -> None:
    placed = _planned(AttentionSetup(kind), 256 * ranks, ranks, 4, 2, 32, dtype, "ring")
    assert (placed.forward, placed.backward) == ring_slots_bytes(256, 64, dtype, kind == "causal")
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
def test_slots_scale_with_the_lengths(attention: AttentionSetup, ranks: int) -> None:
    facts = 4, 2, 32, "bfloat16"
    real = _planned(attention, 4096 * ranks, ranks, *facts, "auto")
    assert real.arena > 0
    assert staging_bytes(call_of(attention, 4096 * ranks, ranks)) == real


def test_one_rank_has_no_slots_and_wide_segments_travel_round() -> None:
    assert staging_bytes(call_of(AttentionSetup(), 4096, 1)).arena == 0
    wide = AttentionSetup("dilated", 0, (2**20,), (64,))
    slots = staging_bytes(call_of(wide, 2**20, 64))
    assert (slots.route, slots.forward, slots.backward) == ("ring", *ring_slots_bytes(2**14, 64, "bfloat16", False))


# --- switches --------------------------------------------------------------------------------------------------------

LONG = TrainingSetup(model_shape("1.3B"), 8 * 65536, 8)


@pytest.mark.parametrize(
    ("wrong", "said"),
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
        (lambda: replace(TRAINED, heads=5), "heads=5: does not divide width"),
        (lambda: replace(TRAINED, experts=4), "experts_per_token=0: of experts=4"),
        (lambda: replace(TRAINED, experts_per_token=1), "experts_per_token=1: of experts=0"),
        (lambda: TrainingSetup(TRAINED, 8, tensor_ranks=3), "tensor_ranks=3: does not divide kv_heads=2"),
        (lambda: TrainingSetup(TRAINED, 8, pipeline_ranks=3), "pipeline_ranks=3: .* more than layers=2"),
        (lambda: TrainingSetup(TRAINED, 8, pipeline_chunks=2), "pipeline_chunks=2: there is one stage"),
        (lambda: TrainingSetup(TRAINED, 8, micro_batches=0), "micro_batches=0"),
        (lambda: replace(TRAINED, kv_heads=4), "kv_heads=4: does not divide heads"),
        (lambda: replace(TRAINED, layers=0), "layers=0"),
        (lambda: replace(TRAINED, block="swigelu"), "block=swigelu: did you mean swiglu"),
        (lambda: replace(hardware("h100"), flops=0.0), "flops=0.0"),
    ],
)  # fmt: skip
def test_wrong_words_and_sizes_are_refused(wrong: Any, said: str) -> None:
    with pytest.raises(InputError, match=said):
        wrong()
