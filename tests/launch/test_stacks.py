"""Other stacks in the capacity planner: their facts, hand calculations, verdicts, and the tensors of the real code."""

from __future__ import annotations

from dataclasses import fields, replace
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ringattn.bench.storage_meter import StorageMeter
from ringattn.cli import main
from ringattn.errors import InputError
from ringattn.launch.capacity.account import training_bytes
from ringattn.launch.capacity.hardware import hardware
from ringattn.launch.capacity.model_shapes import ModelShape, model_shape
from ringattn.launch.capacity.pipeline import schedule, stage_layers
from ringattn.launch.capacity.search import advice, longest_tokens, with_steps
from ringattn.launch.capacity.stack_bytes import LayerBytes, layer_bytes, pipeline_moments
from ringattn.launch.capacity.stacks import KERNELS, NAMES, STACKS, TORCHTITAN, TORCHTITAN_EAGER, TRL, Fact, Stack
from ringattn.launch.capacity.step_time import (
    attention_flops,
    estimate,
    flops_of,
    matrix_flops,
    merge_bytes,
    rates_of,
    ring_bytes,
    slowest_stage,
    state_bytes_moved,
    tensor_bytes,
    update_seconds,
)
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


def titan_pipeline(**changed: Any) -> TrainingSetup:
    """Return torchtitan's 405B on 512 GPUs: stages of 15 or 16 layers, eight micro batches of 32,768 tokens."""
    settings: dict[str, Any] = {
        "stack": "torchtitan_async", "precision": "bf16_cast", "recompute": "full", "zero_stage": 3, "zero_degree": 8,
        "tensor_ranks": 8, "pipeline_ranks": 8, "micro_batches": 8, **changed,
    }  # fmt: skip
    return TrainingSetup(model_shape("405B"), 32768, **settings)


def test_the_largest_rank_of_a_pipeline_by_hand() -> None:
    """1F1B: the second rank has 16 layers, and 7 micro batches in flight when all its gradients exist."""
    run = titan_pipeline()
    peak, layer, boundary = training_bytes(run).peak, run.share.layer, 2 * 16384 * 32768 / 8
    stage = 16 * layer
    assert peak.gradients == pytest.approx(stage * (4 + 4 / 8) + 2 * layer)
    assert peak.parameters == pytest.approx(stage * (1 + 4 / 8)) and peak.optimizer == pytest.approx(stage * 8 / 8)
    # Inputs of 7 x 16 layers; 8 outputs and buffers of gradients; an idle buffer of inputs; a gradient that was sent.
    assert peak.activations == pytest.approx(boundary * (7 * 16 + 8 + 8 + 1 + 1))


def test_a_pipeline_with_its_state_on_the_host() -> None:
    run, host = titan_pipeline(), titan_pipeline(offload="parameters")
    peak, saved = training_bytes(host).peak, training_bytes(run).peak
    assert peak.optimizer == 0 and peak.parameters == pytest.approx(16 * run.share.layer)
    assert saved.gradients - peak.gradients == pytest.approx(16 * run.share.layer * 4 / 8)


def test_outputs_do_not_stay_in_newer_stages() -> None:
    old, new = (training_bytes(titan_pipeline(stack=stack)).peak for stack in ("torchtitan", "torchtitan_2025"))
    assert old.activations - new.activations == pytest.approx(8 * 2 * 16384 * 32768 / 8)


def test_the_logits_of_all_micro_batches_stay_on_the_last_stage() -> None:
    """Interleaved: at its last loss, the last rank has the gradients of one chunk, and all logits."""
    run = titan_pipeline(pipeline_chunks=2)
    account = training_bytes(run)
    peak, layer, boundary, logits = account.peak, run.share.layer, 2 * 16384 * 32768 / 8, 32768 * 128256 / 8
    table = 128256 * 16384 / 8
    assert peak.total == max(account.totals.values()) == account.totals["loss"]
    assert peak.gradients == pytest.approx((15 * layer + table) / 2 + 4 * (7 * layer + table))
    inputs = 8 * 8 + 7  # all micro batches of the first chunk, and the last one of the other
    first_chunk = 8 + 8  # outputs, buffers of gradients
    last_chunk = 7 + 7  # idle buffers of inputs, sent gradients
    at_loss = 2 + 8  # the norm's input and output, and the output of a rank of tensor parallelism gathered
    assert peak.activations == pytest.approx(boundary * (inputs + first_chunk + last_chunk + at_loss) + 2 * 8 * logits)


def test_the_last_backward_of_a_stage_frees_its_gradients_and_weights() -> None:
    """Interleaved: the whole gradients and gathered weights of two chunks never exist at the same time in backward."""
    run, table = titan_pipeline(pipeline_chunks=2), 128256 * 16384 / 8
    chunk = 8 * run.share.layer + table
    for moment, bytes_of in pipeline_moments(run, STACKS["torchtitan_async"]).items():
        assert bytes_of.gradients <= 4 * chunk + 2 * chunk / 2 + 2 * run.share.layer, moment
    assert pipeline_moments(run, STACKS["torchtitan_async"])["update"].parameters == 16 * run.share.layer * 4 / 8


def test_weights_that_only_a_ring_shares_are_gathered_in_16_bits() -> None:
    def peak(**changed: Any) -> float:
        return training_bytes(titan_pipeline(**changed)).peak.parameters

    layer, run = titan_pipeline().share.layer, {"ranks": 8, "zero_degree": 8}
    assert peak(**run) - peak(**{**run, "ranks": 4}) == pytest.approx(16 * layer)


@pytest.mark.parametrize(("ranks", "chunks", "micro_batches"), [(8, 1, 8), (4, 1, 16), (8, 2, 8), (4, 3, 8)])
def test_the_schedules_are_those_of_torch(ranks: int, chunks: int, micro_batches: int) -> None:
    """Compare the passes, except micro batches of 1F1B's last rank, whose forwards torch's drawing counts from 1."""
    drawing = pytest.importorskip("torch.distributed.pipelining._schedule_visualizer")
    rows = drawing.get_schedule_ops("1F1B" if chunks == 1 else "Interleaved1F1B", ranks, micro_batches, chunks)
    for rank, row in enumerate(rows):
        actions = [action for action in row if action is not None and action.microbatch_index is not None]
        steps = list(schedule(rank, ranks, chunks, micro_batches))
        assert [(rank + ranks * step.chunk, step.is_backward) for step in steps] == [
            (action.stage_index, "BACKWARD" in action.computation_type.name) for action in actions
        ]
        if chunks > 1 or rank < ranks - 1:
            assert [step.micro_batch for step in steps] == [action.microbatch_index for action in actions]


def test_stages_that_torch_cannot_interleave_are_an_error() -> None:
    with pytest.raises(InputError, match="micro_batches=17: must be a multiple of 2 rounds"):
        training_bytes(titan_pipeline(pipeline_chunks=2, micro_batches=17))


def test_a_pipeline_waits_for_its_slowest_rank() -> None:
    """126 layers: six ranks have 16 and no output product, which the model's FLOPs average."""
    run = titan_pipeline()
    assert stage_layers(126, 8) == [15, *[16] * 6, 15] and stage_layers(126, 16) == [7, *[8] * 14, 7]
    assert slowest_stage(run) == (16, 0) and slowest_stage(replace(run, pipeline_chunks=2)) == (16, 0)
    assert slowest_stage(replace(run, pipeline_ranks=7)) == (18, 1)
    assert slowest_stage(replace(run, stack="megatron", precision="bf16_master")) == (126 / 8, 1 / 8)
    layer = 2 * 32768 / 8 * run.model.active_parameters
    down = 2 * 32768 / 8 * 53248 * 16384
    assert flops_of(run).products == pytest.approx(16 * (4 * layer - down))
    assert matrix_flops(run) == pytest.approx((126 * layer + 2 * 32768 / 8 * 128256 * 16384) / 8)


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
    """TRL's attention at cuDNN's rates, which hides its exchange, and merges of 38 and 16 bytes an element."""
    run = trl("qwen3-8b")
    step, forward = estimate(run, H100), attention_flops(run)
    assert step.attention == pytest.approx(2 * forward / 584e12 + 2.5 * forward / 488e12)
    merges = 8 * 36 * (MILLION / 8) * 4096 * (2 * 38 + 16)
    assert step.ring == pytest.approx(merges / 3.35e12)
    slower = estimate(replace(run, kernel="fa2"), H100)
    assert slower.attention == pytest.approx((2 * forward / 376e12 + 2.5 * forward / 335e12) / 0.88)
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


def test_what_recomputation_of_a_layer_repeats() -> None:
    """Every product except the last if recomputation stops early; tiles a third time if their backward runs forward."""
    tokens, layers, width, inner = 8192, 32, 4096, 14336
    layer = 2 * tokens * layers * width * (2 * width + 2 * 1024 + 3 * inner)
    output, feed = 2 * tokens * 128256 * width, 2 * tokens * layers * width * inner
    run = TrainingSetup(
        model_shape("llama3-8b"), tokens, stack="torchtitan", precision="bf16_cast", recompute="full", zero_stage=3,
        zero_degree=8,
    )  # fmt: skip
    assert flops_of(run).products == pytest.approx(3 * (layer + output) + layer - feed)
    whole = replace(run, stack="deepspeed", precision="bf16_master")
    assert flops_of(whole).products == pytest.approx(3 * (layer + output) + layer)
    assert flops_of(replace(whole, tiled_mlp_tokens=4096)).products == pytest.approx(
        3 * (layer + output) + layer + 3 * feed
    )
    experts = replace(trl("qwen3-30b-a3b"), chunked_loss_tokens=0)
    products = flops_of(experts).products - matrix_flops(experts) * 3
    assert products == pytest.approx(2 * MILLION / 8 * 48 * experts.model.active_parameters)


@pytest.mark.slow
@pytest.mark.parametrize("reentrant", [False, True])
def test_recomputation_without_reentry_skips_the_last_product(reentrant: bool) -> None:
    """Count the products that backward of a checkpointed feed-forward runs: four, and the recomputed ones."""
    from torch.utils.checkpoint import checkpoint

    class Products(TorchDispatchMode):
        count = 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.count += func == torch.ops.aten.mm.default
            return func(*args, **(kwargs or {}))

    up, down = torch.randn(8, 16, requires_grad=True), torch.randn(16, 8, requires_grad=True)
    source = torch.randn(4, 8, requires_grad=True)
    out = checkpoint(lambda rows: rows + torch.sigmoid(rows @ up) @ down, source, use_reentrant=reentrant)
    assert isinstance(out, torch.Tensor)
    with Products() as products:
        out.sum().backward()
    assert products.count == 4 + (2 if reentrant else 1)


def test_the_transfers_of_repeated_keys_and_of_gathers_in_eight_bits() -> None:
    """torchtitan's ring moves K and V of all query heads, and dK and dV back to their owner, to one neighbor at a time.

    Its products gather Float8 and scatter 16 bits.
    """
    run = TrainingSetup(
        model_shape("llama3-8b"), 4096, 2, stack="torchtitan", precision="bf16_cast", recompute="full", zero_stage=3,
        tensor_ranks=4,
    )  # fmt: skip
    rows = 2048 * 2 * 4096 / 4
    assert ring_bytes(run) == (32 * rows * 2 * 2, 2 * 32 * rows * 4)
    assert ring_bytes(replace(run, stack="torchtitan_eager")).gathered == 32 * rows * 3 * 2
    card = hardware("h100-96")
    sent = ring_bytes(run).gathered / 371e9 + ring_bytes(run).rotated / 180e9
    assert estimate(run, card).ring == pytest.approx(sent + merge_bytes(run) / (0.92 * 2.4e12))
    assert estimate(replace(run, stack="torchtitan_async"), card).tensor == pytest.approx(
        0.61 * estimate(run, card).tensor
    )
    eager = replace(run, stack="torchtitan_eager")
    # Forward, recomputation without the last scatter, and backward.
    assert tensor_bytes(eager) == (6 + 5) * 2 * 32 * 2048 * 4096 * 3 / 4
    assert tensor_bytes(run) == (6 * 1 + 5 * 2) * 32 * 2048 * 4096 * 3 / 4


def test_wider_products_are_faster() -> None:
    rates = {name: TORCHTITAN.products_of("h100-96", width) for name, width in (("8B", 4096), ("70B", 8192))}
    assert rates == {"8B": 573e12, "70B": 609e12}
    assert TORCHTITAN.products_of("h100-96", 1024) == 573e12 and TORCHTITAN.products_of("h100-96", 12288) == 609e12
    assert TORCHTITAN.products_of("h100", 4096) is None and TRL.products_of("h100-96", 4096) is None


def test_the_host_of_a_machine_updates_the_weights_of_its_ranks() -> None:
    """Two machines of eight ranks: each host updates half of the weights."""
    run = TrainingSetup(
        model_shape("llama3-8b"), 2**20, 16, stack="deepspeed", recompute="full", zero_stage=3, offload="optimizer",
    )  # fmt: skip
    assert update_seconds(run, 8) == pytest.approx(10 / (72.7e9 / 4) * run.model.parameters / 2)
    assert update_seconds(replace(run, ranks=1), 8) == pytest.approx(2 * update_seconds(run, 8))
    assert estimate(run, H100).host == pytest.approx(update_seconds(run, 8))
    assert update_seconds(replace(run, offload="none"), 8) == 0


def test_weights_are_gathered_in_16_bits() -> None:
    """FSDP2 casts float32 weights before it gathers them, twice, and reduces gradients in float32."""
    run = TrainingSetup(
        model_shape("llama3-8b"), 8192, stack="torchtitan", precision="bf16_cast", recompute="full", zero_stage=3,
        zero_degree=8,
    )  # fmt: skip
    assert state_bytes_moved(run) == pytest.approx(run.share.parameters * (2 * 2 + 4) * 7 / 8)


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


@pytest.mark.slow
def test_torch_awaits_the_exchange_after_the_next_block(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run torch's ring with collectives that record when they start and when they are awaited."""
    cp = pytest.importorskip("torch.distributed.tensor.experimental._context_parallel._attention")
    events: list[str] = []

    class Pending:
        def __init__(self, name: str, tensor: torch.Tensor) -> None:
            self.name, self.tensor = name, tensor
            events.append(f"start {name}")

        def wait(self) -> torch.Tensor:
            events.append(f"await {self.name}")
            return self.tensor

    ranks = 3
    functional = SimpleNamespace(
        all_gather_single=lambda tensor, gather_dim, group: Pending("gather", tensor.repeat(ranks)),
        permute_tensor=lambda tensor, targets, group: Pending("dkv", tensor), AsyncCollectiveTensor=Pending,
    )  # fmt: skip
    group = SimpleNamespace(get_rank=lambda _: 1, get_world_size=lambda _: ranks, ProcessGroup=object)
    monkeypatch.setattr(cp, "ft_c", functional)
    monkeypatch.setattr(cp, "dist", group)

    def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **options: Any) -> Any:
        events.append("block")
        return torch.zeros_like(query), torch.zeros(*query.shape[:-1], 1)

    def attend_grad(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **options: Any) -> Any:
        events.append("block")
        return torch.zeros_like(query), torch.zeros_like(key), torch.zeros_like(value)

    query, key, value = (torch.zeros(1, 2, 8, 4) for _ in range(3))
    cp._templated_ring_attention(object(), 2, attend, query=query, key=key, value=value, is_causal=True)
    assert events == ["start gather", "block", "await gather", "block", "block"]
    events.clear()
    cp._templated_ring_attention_backward(
        object(), 2, attend_grad, grad_out=query, grad_out_name="grad_out", query=query, key=key, value=value,
        out=query, logsumexp=torch.zeros(1, 2, 8, 1), is_causal=True,
    )  # fmt: skip
    assert events == [
        "start gather", "block", "start dkv", "await gather", "block", "await dkv", "start dkv", "block", "await dkv",
        "start dkv", "await dkv",
    ]  # fmt: skip


def test_a_traced_collective_is_awaited_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """What torch.compile sees of an exchange: its start, then its wait."""
    functional = pytest.importorskip("torch.distributed._functional_collectives")
    monkeypatch.setattr(functional, "_are_we_tracing", lambda: True)
    monkeypatch.setattr(functional, "wait_tensor", lambda tensor: ("awaited", tensor))
    assert functional._maybe_wrap_tensor("result") == ("awaited", "result")


def _block(shape: ModelShape, source: torch.Tensor, weights: list[torch.Tensor]) -> torch.Tensor:
    """Return the output of a layer with torchtitan's order of products: wq, wk, wv, wo, w1, w3, w2."""
    functional = torch.nn.functional
    wq, wk, wv, wo, w1, w3, w2 = weights

    def norm(tensor: torch.Tensor) -> torch.Tensor:
        wide = tensor.float()
        return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)).type_as(tensor)

    def heads(tensor: torch.Tensor, count: int) -> torch.Tensor:
        return tensor.view(1, -1, count, shape.head_dim).transpose(1, 2)

    hidden = norm(source)
    query, key, value = (heads(hidden @ matrix, shape.heads) for matrix in (wq, wk, wv))
    out = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
    residual = source + out.transpose(1, 2).reshape(1, -1, shape.query_width) @ wo
    hidden = norm(residual)
    return residual + (functional.silu(hidden @ w1) * (hidden @ w3)) @ w2


@pytest.mark.slow
@pytest.mark.parametrize("stack", [TORCHTITAN, TORCHTITAN_EAGER], ids=lambda stack: stack.name)
def test_the_tensors_that_selective_recomputation_keeps(stack: Stack) -> None:
    """Run torchtitan's policy on a layer, eager and compiled, and compare the bytes that exist before backward."""
    from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

    attention = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
    product = torch.ops.aten.mm.default

    def contexts() -> Any:
        counts = {True: 0, False: 0}

        def policy(context: Any, operator: Any, *args: Any, **options: Any) -> CheckpointPolicy:
            counts[context.is_recompute] += operator == product
            kept = operator == attention or (operator == product and counts[context.is_recompute] % 2)
            return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE

        return create_selective_checkpoint_contexts(policy)

    shape, tokens = ModelShape(1, 64, 4, 4, 192, 100, False, head_size=32), 256
    width, inner = shape.width, shape.ffn
    sizes = [(width, 128)] * 3 + [(128, width), (width, inner), (width, inner), (inner, width)]
    weights = [torch.randn(size, dtype=torch.bfloat16, requires_grad=True) for size in sizes]
    source = torch.randn(1, tokens, width, dtype=torch.bfloat16, requires_grad=True)

    def layer(tensor: torch.Tensor) -> torch.Tensor:
        out = checkpoint(lambda rows: _block(shape, rows, weights), tensor, use_reentrant=False, context_fn=contexts)
        assert isinstance(out, torch.Tensor)
        return out

    run = layer if stack is TORCHTITAN_EAGER else torch.compile(layer, backend="aot_eager_decomp_partition")
    run(source).sum().backward()  # compiles
    with StorageMeter() as meter:
        out = run(source)
        kept = meter.live_bytes - 2 * out.numel()
        out.sum().backward()
    assert kept == tokens * layer_bytes(shape, stack, 1).selective


@pytest.mark.slow
def test_the_tensors_of_a_loss_over_split_logits() -> None:
    """Run backward of torch's loss_parallel on the logits of one of two ranks, and compare the peak per logit."""
    loss = pytest.importorskip("torch.distributed.tensor.parallel.loss")
    mesh = MagicMock()
    mesh.size.return_value, mesh._sym_get_coordinate.return_value = 2, 0
    tokens, columns = 64, 4096
    log_probabilities = torch.randn(tokens, columns)
    target = torch.randint(2 * columns, (tokens,))
    with StorageMeter() as meter:
        loss._nll_loss_and_log_softmax_backward(
            torch.ones(()), log_probabilities, target, None, 1, -100, torch.tensor(64.0),
            torch.Size([tokens, 2 * columns]), 1, mesh, 0,
        )  # fmt: skip
    peak = meter.peak_bytes + 4 * log_probabilities.numel()
    assert peak / log_probabilities.numel() == pytest.approx(TORCHTITAN.split_logit_bytes.value, rel=2e-3)


def _attention(layer: LayerBytes) -> float:
    return layer.before + layer.attention + max(layer.forward, layer.backward)
