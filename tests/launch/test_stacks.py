"""Other stacks in the capacity planner: their facts, hand calculations, verdicts, and the tensors of the real code."""

from __future__ import annotations

from dataclasses import fields, replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ringattn.bench.storage_meter import StorageMeter
from ringattn.cli import main
from ringattn.errors import InputError
from ringattn.launch.capacity.account import training_bytes
from ringattn.launch.capacity.hardware import hardware
from ringattn.launch.capacity.model_shapes import ModelShape, model_shape
from ringattn.launch.capacity.search import advice, longest_tokens, with_steps
from ringattn.launch.capacity.stack_bytes import LayerBytes, layer_bytes
from ringattn.launch.capacity.stacks import KERNELS, NAMES, STACKS, TORCHTITAN, TRL, Fact, Stack
from ringattn.launch.capacity.step_time import attention_flops, estimate, flops_of, rates_of, ring_bytes
from ringattn.launch.capacity.training_bytes import AttentionSetup, TrainingSetup

SMALL = ModelShape(3, 64, 8, 2, 160, 1000, False, head_size=16, head_norms=True)
MILLION = 2**20
H100 = hardware("h100")


def trl(name: str, tokens: int = MILLION, ranks: int = 8, **changed: Any) -> TrainingSetup:
    """Return a run of TRL's long-context guide: FSDP2, the loss in chunks of 256, layer inputs on the host."""
    settings: dict[str, Any] = {"precision": "bf16_cast", "recompute": "offloaded", "zero_stage": 3}
    settings |= {"chunked_loss_tokens": 256, **changed}
    return TrainingSetup(model_shape(name), tokens, ranks, stack="trl", **settings)


@pytest.mark.parametrize("stack", STACKS.values(), ids=list(STACKS))
def test_every_fact_has_a_source(stack: Stack) -> None:
    facts = {field.name: getattr(stack, field.name) for field in fields(stack) if field.name != "name"}
    assert all(isinstance(fact, Fact) and len(fact.source) > 10 for fact in facts.values())
    assert stack.kernel.value in KERNELS and stack.figure.value in ("allocated", "reserved")
    assert NAMES == ("ringattn", *STACKS) and STACKS[stack.name] is stack


def test_the_tensors_of_a_layer_by_hand() -> None:
    """A layer of transformers on a ring of four, tensor by tensor in elements of a token and bytes of an element."""
    width, queries, keys, inner = 64, 128, 32, 160
    norm = [(width, 4), (width, 2), (1, 4), (width, 2)]  # float32 input, normalized, scalar, output
    heads = [(queries + keys, 4), (queries + keys, 2), (8 + 2, 4)]
    kept = [
        *norm,
        *heads,
        (queries, 2),
        (keys, 2),
        (keys, 2),
        (queries, 2),
        (8, 4),
        (queries, 2),
        *norm,
        *[(inner, 2)] * 4,
    ]
    gradients = [(width, 2), (inner, 2), (inner, 2), (inner, 2)]
    layer = layer_bytes(SMALL, TRL, 4)
    assert layer.all == sum(count * size for count, size in kept)
    product = inner * 2
    assert layer.all + layer.feed_live == sum(count * size for count, size in [*kept, *gradients]) - product
    assert layer.backward == 2 * (width + queries) + 14 * queries + 34 * keys + 4 * 4 * keys
    assert layer_bytes(SMALL, TORCHTITAN, 4).attention == 2 * 4 * queries + 4 * 8  # K and V of all query heads
    assert layer_bytes(SMALL, TRL, 1).copies == 0


def test_the_state_of_a_rank_by_hand() -> None:
    """Qwen3-8B on eight ranks: shards of 4 + 8 + 4 bytes, two gathered layers and the output matrix in 16 bits."""
    peak = training_bytes(trl("qwen3-8b")).peak
    count, layer = model_shape("qwen3-8b").parameters, model_shape("qwen3-8b").layer_parameters
    assert peak.parameters == pytest.approx(count * 4 / 8 + 2 * (2 * layer + 151936 * 4096))
    assert peak.optimizer == pytest.approx(count * 8 / 8)
    assert peak.gradients == pytest.approx(count * 4 / 8 + 4 * layer)
    assert peak.activations == 2 * 4096 * MILLION / 8


def test_gradients_of_pipeline_stages_accumulate_whole() -> None:
    """With pipeline stages torchtitan gathers one byte per weight for the step, and sums gradients in float32."""
    run = TrainingSetup(
        model_shape("405B"), 32768, stack="torchtitan", precision="bf16_cast", recompute="full", zero_stage=3,
        zero_degree=8, tensor_ranks=8, pipeline_ranks=8, micro_batches=8,
    )  # fmt: skip
    peak, stage = training_bytes(run).peak, run.share.parameters
    assert peak.gradients == pytest.approx(stage * (4 + 4 / 8)) and peak.parameters == pytest.approx(
        stage * (1 + 4 / 8)
    )


@pytest.mark.parametrize(
    ("name", "changed"),
    [
        ("qwen3-8b", {}),
        ("qwen3-32b", {"offload": "parameters", "tiled_mlp_tokens": 16384}),
        ("qwen3-30b-a3b", {"offload": "parameters"}),
    ],
)
def test_runs_that_were_trained_fit(name: str, changed: dict[str, Any]) -> None:
    """The models that TRL trained with a million tokens on 8 H100 fit with the reserve, with the settings it names."""
    usable = replace(H100, memory_bytes=int(H100.memory_bytes * (1 - 0.124)))
    run = trl(name, framework_bytes=2**30, **changed)
    assert longest_tokens(run, usable.memory_bytes) >= MILLION
    if changed:
        plain = replace(run, offload="none", tiled_mlp_tokens=0, recompute="full")
        steps = advice(plain, usable)
        assert (
            training_bytes(plain).peak.total > usable.memory_bytes > training_bytes(with_steps(plain, steps)).peak.total
        )
        assert {step.switch.key for step in steps} <= {"recompute", "offload", "tiled_mlp_tokens", "zero_stage"}


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (
            {"precision": "bf16_master"},
            "precision=bf16_master: stack=trl has no such setting; use precision=bf16_cast or",
        ),
        ({"recompute": "selective"}, "recompute=selective: .*use recompute=full"),
        ({"schedule": "ring"}, "schedule=ring: .*use schedule=auto"),
        ({"saved_activations": "int8"}, "saved_activations=int8: .*keep"),
        ({"head_groups": 2}, "head_groups=2: .*use head_groups=1"),
        ({"attention": AttentionSetup("full")}, "mask=full: .*use mask=causal"),
        ({"gradients_kept": False}, "gradients_kept=false: .*true"),
        ({"transients": False}, "transients=false: .*true"),
        ({"model": model_shape("1.3B")}, "block=gelu: .*use block=swiglu"),
    ],
)
def test_settings_that_a_stack_does_not_have_are_errors(changed: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        replace(trl("qwen3-8b"), **changed)


def test_the_time_of_a_step_by_hand() -> None:
    """TRL's attention at cuDNN's published rates, with an exposed gather and merges of 38 and 16 bytes an element."""
    run = trl("qwen3-8b")
    step, forward = estimate(run, H100), attention_flops(run)
    assert step.attention == pytest.approx(2 * forward / 584e12 + 2.5 * forward / 488e12)
    merges = 8 * 36 * (MILLION / 8) * 4096 * (2 * 38 + 16)
    assert step.ring == pytest.approx(ring_bytes(run) / 371e9 + merges / 3.35e12)
    slower = estimate(replace(run, kernel="fa2"), H100)
    assert slower.attention == pytest.approx(2 * forward / 376e12 + 2.5 * forward / 335e12)
    with pytest.raises(InputError, match="kernel=fa3: no rate is known for hardware=a100-80"):
        rates_of(replace(run, kernel="fa3"), hardware("a100-80"))


def test_every_second_product_is_repeated_in_selective_recomputation() -> None:
    """Of Q, K, V, output, gate, up and down: K, output and up."""
    run = TrainingSetup(
        model_shape("llama3-8b"), 8192, stack="torchtitan", precision="bf16_cast", recompute="selective", zero_stage=3,
        zero_degree=8,
    )  # fmt: skip
    again = 32 * (1024 + 4096 + 14336) * 4096 * 2 * 8192
    products = 2 * 8192 * (32 * (4096 * (2 * 4096 + 2 * 1024) + 3 * 14336 * 4096) + 128256 * 4096)
    assert flops_of(run).products == pytest.approx(3 * products + again)


def test_the_command_plans_a_stack(capsys: pytest.CaptureFixture[str]) -> None:
    options = "preset=qwen3-8b stack=trl ranks=8 tokens=1048576 precision=bf16_cast recompute=offloaded zero_stage=3"
    assert main(["plan", *options.split(), "chunked_loss_tokens=256"]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("fits: ") and "stack trl" in printed and "attention 584 forward, 488 backward" in printed
    assert main(["plan", "preset=qwen3-8b", "stack=trl", "ranks=8", "recommended=true"]) == 0
    assert "bf16_cast, adamw, recompute full, ZeRO 3" in capsys.readouterr().out


# --- the real code ----------------------------------------------------------------------------------------------------


class _Ring(torch.autograd.Function):
    """Attention as torch's context parallelism runs it: its own loop, with kernels that only allocate."""

    @staticmethod
    def forward(ctx: Any, context: Any, *tensors: torch.Tensor) -> Any:
        query, key, value = tensors
        out, lse = context.forward(query=query, key=key, value=value)[:2]
        ctx.save_for_backward(query, key, value, out, lse)
        ctx.context = context
        return out

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        query, key, value, out, lse = ctx.saved_tensors
        passed = {"query": query, "key": key, "value": value, "out": out, "logsumexp": lse, "grad_out": grads[0]}
        return None, *ctx.context.backward(**passed)[:3]


def _allocate_forward(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **options: Any) -> Any:
    return torch.empty_like(query), query.new_empty((*query.shape[:-1], 1), dtype=torch.float32)


def _allocate_backward(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **options: Any) -> Any:
    """Allocate what cuDNN does: dQ in float32, delta, and dK and dV of all query heads; then the three results."""
    heads = (*query.shape[:2], *key.shape[2:])
    space = [torch.empty_like(query, dtype=torch.float32), query.new_empty(query.shape[:-1], dtype=torch.float32)]
    if query.shape[1] != key.shape[1]:
        space += [query.new_empty(heads), query.new_empty(heads)]
    return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "rank"), [(2, 1), (4, 2), (8, 1), (8, 7), (16, 5)])
@pytest.mark.parametrize("name", ["qwen3-0.6b", "qwen3-4b", "qwen3-8b", "qwen3-32b"])
def test_the_tensors_of_transformers_under_context_parallelism(
    name: str, ranks: int, rank: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Run a layer of transformers and torch's ring on meta tensors, count every tensor, and compare the peak."""
    cp = pytest.importorskip("torch.distributed.tensor.experimental._context_parallel._attention")
    qwen3 = pytest.importorskip("transformers.models.qwen3.modeling_qwen3")
    functional = SimpleNamespace(
        all_gather_single=lambda tensor, gather_dim, group: tensor.new_empty((ranks * tensor.shape[0],)),
        permute_tensor=lambda tensor, targets, group: torch.empty_like(tensor), AsyncCollectiveTensor=SimpleNamespace,
    )  # fmt: skip
    group = SimpleNamespace(get_rank=lambda _: rank, get_world_size=lambda _: ranks, ProcessGroup=object)
    monkeypatch.setattr(cp, "ft_c", functional)
    monkeypatch.setattr(cp, "dist", group)
    ring = SimpleNamespace(
        forward=lambda **kw: cp._templated_ring_attention(object(), 2, _allocate_forward, is_causal=True, **kw),
        backward=lambda **kw: cp._templated_ring_attention_backward(
            object(), 2, _allocate_backward, grad_out_name="grad_out", is_causal=True, **kw
        ),
    )  # fmt: skip

    def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **options: Any) -> Any:
        return _Ring.apply(ring, query, key, value)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", attend)
    shape, tokens = model_shape(name), MILLION
    config = qwen3.Qwen3Config(
        hidden_size=shape.width, num_attention_heads=shape.heads, num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_dim, intermediate_size=shape.ffn, num_hidden_layers=1, vocab_size=8,
        attn_implementation="sdpa",
    )  # fmt: skip
    with torch.device("meta"):
        layer = qwen3.Qwen3DecoderLayer(config, 0).to(torch.bfloat16)
        hidden = torch.empty(1, tokens, shape.width, dtype=torch.bfloat16, requires_grad=True)
        table = torch.empty(1, tokens, shape.head_dim, dtype=torch.bfloat16)
        gradient = torch.empty_like(hidden)
    with StorageMeter() as meter:
        out = layer(hidden, position_embeddings=(table, table))
        kept = meter.live_bytes
        out.backward(gradient)
    planned = layer_bytes(shape, TRL, ranks)
    # The layer's output exists here, and is not recomputed in a run; the gradient of the output exists in a run.
    weights = 2 * sum(weight.numel() for weight in layer.parameters())
    # A rank whose last block is merged whole keeps the layout of the projection, and its output is not copied.
    copied = kept - tokens * (planned.all - planned.copies + planned.input) > tokens * planned.copies / 2
    whole = planned if copied else planned._replace(copies=0)
    assert kept == pytest.approx(tokens * (whole.all + whole.input), rel=2e-3)
    peak = tokens * max(whole.all + whole.feed_live, _attention(whole) + whole.input)
    assert peak <= meter.peak_bytes * 1.002 and meter.peak_bytes <= 1.002 * peak + weights


def _attention(layer: LayerBytes) -> float:
    return layer.before + layer.attention + max(layer.forward, layer.backward)
