"""torchtitan over a ring: a Llama 3 sharded by the adapter's versions of torchtitan's functions equals one process."""

from __future__ import annotations

import inspect
import json
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from ringattn import InputError, Ring
from ringattn.errors import DisagreementError, UnsupportedError
from ringattn.launch.ranks import run_ranks_in_processes
from ringattn.testing import dense_attention, run_ranks
from tests.contract.mesh import on_mesh

pytest.importorskip("torchtitan", reason="needs torchtitan")
pytest.importorskip("spmd_types", reason="needs spmd_types, which torchtitan imports")

from torch.utils.checkpoint import checkpoint
from torchtitan.components.lora import LoRAConverter
from torchtitan.distributed import context_parallel
from torchtitan.distributed.utils import set_spmd_backend
from torchtitan.models.common import ComplexRoPE, Embedding, Linear, RMSNorm
from torchtitan.models.common.attention import BaseAttention, FlexAttention, ScaledDotProductAttention
from torchtitan.models.common.decoder_sharding import set_gqa_inner_attention_local_map
from torchtitan.models.llama3 import Llama3Model, _build_llama3_layers

from ringattn.adapters import torchtitan as adapter
from ringattn.adapters.groups import close_rings
from tests.adapters.processes import ROOT, run_program, worst_error

DIM, HEADS, VOCABULARY, TOKENS = 32, 4, 50, 22
STARTS = ((0, 7, 13), (0, 18))
"""The first token of each document, by row."""


def model(inner: Any, adapters: bool = False) -> nn.Module:
    """Return a Llama 3 of two layers by torchtitan's builders, in float64, with equal random weights on every rank.

    `adapters` adds torchtitan's LoRA; only its weights then have gradients.
    """
    rope = ComplexRoPE.Config(dim=DIM // HEADS, max_seq_len=64, theta=10000, scaling="none")
    layers = _build_llama3_layers(
        n_layers=2, dim=DIM, n_heads=HEADS, n_kv_heads=2, hidden_dim=48, rope=rope, fuse_qkv=False, attn_backend="flex"
    )
    for layer in layers:
        layer.attention.inner_attention = inner
    config = Llama3Model.Config(
        dim=DIM,
        vocab_size=VOCABULARY,
        tok_embeddings=Embedding.Config(num_embeddings=VOCABULARY, embedding_dim=DIM),
        norm=RMSNorm.Config(normalized_shape=DIM),
        lm_head=Linear.Config(in_features=DIM, out_features=VOCABULARY),
        layers=layers,
    )
    converted = LoRAConverter(LoRAConverter.Config(rank=2)).convert(config) if adapters else config
    built = converted.build().double()
    for _, module in built.named_modules():
        if isinstance(module, ComplexRoPE):  # double() made its complex table real
            module._init_self_buffers()
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for weight in built.parameters():
            weight.copy_(torch.randn(weight.shape, dtype=weight.dtype, generator=generator) * 0.1)
    return built


def batch() -> tuple[Tensor, Tensor, Tensor]:
    """Return tokens, labels and positions, (2, tokens)."""
    tokens = torch.randint(VOCABULARY, (2, TOKENS + 1), generator=torch.Generator().manual_seed(5))
    places = torch.arange(TOKENS).repeat(2, 1)
    for row, starts in zip(places, STARTS, strict=True):
        for start in starts:
            row[start:] = torch.arange(TOKENS - start)
    return tokens[:, :-1], tokens[:, 1:], places


def loss_of(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the loss summed over tokens, divided by the tokens of the whole batch, as torchtitan does."""
    return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum") / (2 * TOKENS)


def learned(of: nn.Module) -> list[nn.Parameter]:
    return [weight for weight in of.parameters() if weight.requires_grad]


def reference(adapters: bool = False) -> tuple[Tensor, list[Tensor]]:
    """Return the loss and gradients of one process, which runs each document separately with torchtitan's attention."""
    alone, (tokens, labels, _) = model(ScaledDotProductAttention.Config(), adapters), batch()
    total = torch.zeros((), dtype=torch.float64)
    for row, starts in enumerate(STARTS):
        for start, stop in zip(starts, (*starts[1:], TOKENS), strict=True):
            part = slice(start, stop)
            total = total + loss_of(alone(tokens[row : row + 1, part]), labels[row : row + 1, part])
    return total.detach(), list(torch.autograd.grad(total, learned(alone)))


def of_processes(spec: dict[str, Any]) -> dict[str, Any]:
    """Return the results of `of_a_model` and `of_half_a_recipe` by name, on one of two ranks.

    One pair of processes runs both, because the import of torchtitan takes seconds.
    """
    dist.init_process_group("gloo", timeout=timedelta(seconds=40))
    mesh, answers = init_device_mesh("cpu", (2,), mesh_dim_names=("cp",)), {}
    for case in (of_a_model, of_half_a_recipe):
        answers[case.__name__] = case(mesh)
        close_rings()
    dist.destroy_process_group()
    return answers


@pytest.fixture(scope="module")
def answers() -> list[dict[str, Any]]:
    """Return the results of `of_processes` on each of two processes."""
    return run_ranks_in_processes("tests.adapters.test_torchtitan:of_processes", {}, 2, 200, 1)


def of_a_model(mesh: DeviceMesh) -> dict[str, float]:
    """Return the largest relative error of loss and gradients for each load balancer, and with LoRA."""
    set_spmd_backend("partial_dtensor")
    tokens, labels, positions = batch()
    device, errors = torch.device("cpu"), dict[str, float]()
    for case, balancer, adapters in (("headtail", "headtail", False), ("None", None, False), ("LoRA", None, True)):
        sharded = model(adapter.RingAttention.Config(), adapters)
        context_parallel.apply_cp_to_forward([b.attention.inner_attention for b in sharded.layers.values()], mesh)
        expected_loss, expected = reference(adapters)
        extra = {"positions": positions}
        inputs, targets, extra = adapter.prepare_context_parallel_input(tokens, labels, extra, mesh, device, balancer)
        loss = loss_of(sharded(inputs, **extra), targets)
        grads = [*torch.autograd.grad(loss, learned(sharded)), loss.detach()]
        for grad in grads:
            torch.distributed.all_reduce(grad)
        pairs = zip(grads, [*expected, expected_loss], strict=True)
        errors[case] = worst_error(pairs)
    return errors


@pytest.mark.slow
def test_a_model_over_two_processes_equals_one(answers: list[dict[str, Any]]) -> None:
    for errors in (answer["of_a_model"] for answer in answers):
        assert set(errors) == {"headtail", "None", "LoRA"} and max(errors.values()) < 1e-10, errors


def of_half_a_recipe(mesh: DeviceMesh) -> list[str]:
    """Return the errors of a model whose shards torchtitan's function made, before and after a ring is open.

    Then call the model under `activate(None)`, which is allowed, with and without checkpoints.
    """
    set_spmd_backend("partial_dtensor")
    half, (tokens, labels, positions) = model(adapter.RingAttention.Config()), batch()
    context_parallel.apply_cp_to_forward([b.attention.inner_attention for b in half.layers.values()], mesh)
    messages = []
    even = tokens[:, :20], labels[:, :20], {"positions": positions[:, :20]}
    inputs, _, extra = context_parallel.prepare_context_parallel_input(*even, mesh, torch.device("cpu"), "headtail")
    for _ in range(2):  # before a ring is open, and after
        try:
            half(inputs, **extra)
            messages.append("attended")
        except InputError as error:
            messages.append(str(error))
        ring = adapter.ring_of(mesh)
    with ring.activate(None):  # explicitly local attention is allowed
        alone = half(inputs, **extra)
    for block in half.layers.values():
        block.forward = lambda *args, run=block.forward: checkpoint(run, *args, use_reentrant=False)
    with ring.activate(None):
        again = half(inputs, **extra)
    again.sum().backward()
    messages.append(str(torch.equal(again, alone)))
    return messages


@pytest.mark.slow
def test_half_of_the_recipe_is_refused(answers: list[dict[str, Any]]) -> None:
    for before, after, local in (answer["of_half_a_recipe"] for answer in answers):
        assert "shard over the 2 ranks of cp" in before and "torchtitan.prepare_context_parallel_input" in before
        assert after == before and local == "True"


def test_recomputation_has_its_sequence_as_an_argument() -> None:
    tokens, labels, positions = batch()
    expected_loss, expected = reference()

    def body(ring: Ring) -> None:
        sharded = model(adapter.RingAttention.Config())
        shard, targets, extra = adapter.prepare_context_parallel_input(
            tokens, labels, {"positions": positions}, ring, ring.device
        )
        for name, block in sharded.layers.items():
            sharded.layers[name].forward = lambda *args, run=block.forward: checkpoint(run, *args, use_reentrant=False)
        loss = loss_of(sharded(shard, **extra), targets)
        grads = [*torch.autograd.grad(loss, list(sharded.parameters())), loss.detach()]
        ring.all_reduce(grads)
        for actual, reference in zip(grads, [*expected, expected_loss], strict=True):
            torch.testing.assert_close(actual, reference, rtol=1e-10, atol=1e-12)

    run_ranks(3, body)


def test_windows_and_what_is_made_of_lse() -> None:
    generator = torch.Generator().manual_seed(9)
    q, k, v = (torch.randn(1, 13, heads, 8, dtype=torch.float64, generator=generator) for heads in (4, 2, 2))
    out, lse = dense_attention(q, k, v, causal=True, window=(3, 0), scale=0.2)

    def body(ring: Ring) -> None:
        seq = ring.sequence(13)
        module = adapter.RingAttention.Config(window_size=(3, 0)).build()
        with ring.activate(seq):
            shards = map(seq.shard, (q, k, v))
            transformed = module(
                *shards, scale=0.2, enable_gqa=True, out_transform=lambda out, lse: out * lse[..., None]
            )
        torch.testing.assert_close(
            seq.gather(transformed), out * lse.transpose(1, 2)[..., None], rtol=1e-10, atol=1e-10
        )

    run_ranks(2, body)
    both_ways = adapter.RingAttention.Config(window_size=(-1, -1)).build()
    assert torch.allclose(both_ways(q, k, v), dense_attention(q, k, v)[0], atol=1e-12)


def test_autocast_casts_like_torchtitans_own() -> None:
    torchtitans, x = ScaledDotProductAttention(ScaledDotProductAttention.Config()), torch.randn(1, 8, 2, 16)
    with Ring() as ring, torch.autocast("cpu", torch.bfloat16):
        for tensors in ((x, x, x.bfloat16()), (x, x, x), (x.double(),) * 3):
            with ring.activate(ring.sequence(8)):
                out = adapter.RingAttention(adapter.RingAttention.Config())(*tensors)
            torch.testing.assert_close(out, torchtitans(*tensors), rtol=0.02, atol=0.02)  # also compares dtypes


def test_arguments_are_those_of_torchtitan() -> None:
    theirs = inspect.signature(context_parallel.prepare_context_parallel_input).parameters
    ours = inspect.signature(adapter.prepare_context_parallel_input).parameters
    assert [(p.name, p.default) for p in theirs.values()] == [(p.name, p.default) for p in ours.values()]
    accepted = set(inspect.signature(adapter.RingAttention.forward).parameters)
    assert set(inspect.signature(ScaledDotProductAttention.forward).parameters) - accepted == {"is_causal"}


def test_what_is_refused() -> None:
    tokens, labels, positions = batch()
    x = torch.zeros(2, 5, 1, 8)
    module = adapter.RingAttention.Config().build()

    def prepare(ring: Ring, extra: dict[str, Any], *rest: Any) -> Any:
        return adapter.prepare_context_parallel_input(tokens, labels, extra, ring, ring.device, *rest)

    with Ring() as ring:
        with pytest.raises(InputError, match="load_balancer_type='ptrr': a ring supports 'headtail' and None"):
            prepare(ring, {"positions": positions}, "ptrr")
        with pytest.raises(InputError, match="has attention_masks"):
            prepare(ring, {"positions": positions, "attention_masks": object()})
        with pytest.raises(InputError, match=r"positions.* is missing"):
            prepare(ring, {})
        with pytest.raises(InputError, match="attention_masks is a dict"):
            module(x, x, x, attention_masks={"full": None})
        with pytest.raises(InputError, match="attention_masks has 1 rows, the batch has 2"):
            module(x, x, x, attention_masks=(ring.sequence(5),))
        with pytest.raises(InputError, match="RingAttention does not support the arguments score_mod"):
            module(x, x, x, score_mod=abs)


def test_what_one_rank_alone_gets_wrong() -> None:
    """If one rank passes wrong arguments, all ranks raise, and none waits for the deadline."""
    tokens, labels, positions = batch()
    module = adapter.RingAttention.Config().build()

    def body(ring: Ring) -> None:
        extra = {} if ring.rank else {"positions": positions}
        with pytest.raises(InputError, match=r"positions.* is missing"):
            adapter.prepare_context_parallel_input(tokens, labels, extra, ring, ring.device)
        shortened = [x[:, : TOKENS - ring.rank] for x in (tokens, labels, positions)]
        with pytest.raises(DisagreementError, match=r"batch of \(2, 22\) tokens, zigzag\n.*batch of \(2, 21\) tokens"):
            adapter.prepare_context_parallel_input(*shortened[:2], {"positions": shortened[2]}, ring, ring.device)
        x = torch.zeros(2, 5, 1, 8)
        with pytest.raises(InputError, match="attention_masks has 1 rows, the batch has 2"):
            module(x, x, x, attention_masks=(ring.sequence(10),) * (2 - ring.rank))

    run_ranks(2, body, timeout_s=10.0)


def test_keys_stay_where_they_are_and_shards_are_known() -> None:
    """Keys and values stay sharded, although torchtitan's layouts would gather them.

    With `spmd_types`, where shards are plain tensors, attention raises if RingTrainerMixin did not shard the batch.
    """
    config = adapter.RingAttention.Config()
    set_gqa_inner_attention_local_map(config)
    module, x = config.build(), torch.zeros(1, 5, 1, 8)
    assert not isinstance(module, ScaledDotProductAttention)  # which spmd_types refuses over cp
    kept = adapter._keeping_shards(config.sharding_config)
    assert kept.in_dst_shardings == kept.in_src_shardings == config.sharding_config.in_src_shardings
    assert kept.local_map.in_grad_placements == tuple(kept.in_src_shardings.values())
    module = adapter.RingAttention.Config().build()
    module.parallelize(SimpleNamespace(cp=2, spmd_backend="spmd_types"))
    with pytest.raises(InputError, match=r"shard over the 2 ranks of cp, .*RingTrainerMixin before torchtitan's"):
        module(x, x, x)
    with pytest.raises(UnsupportedError, match="no in_src_shardings of k_BLNH, v_BLNH"):
        adapter._keeping_shards(replace(config.sharding_config, in_src_shardings={"q_BLNH": None}))


def test_what_the_trainer_may_not_ask_for() -> None:
    class Host(adapter.RingTrainerMixin):
        def __init__(self, component: str, graphs: bool) -> None:
            self.config = SimpleNamespace(
                parallelism=SimpleNamespace(context_parallel_load_balancer=None, spmd_backend="partial_dtensor"),
                compile=SimpleNamespace(enable=True, components=[component]),
                training=SimpleNamespace(disable_cuda_graphs=not graphs),
            )
            self.parallel_dims, self.ntokens_seen = SimpleNamespace(cp_enabled=False), 0

    tokens, labels, positions = batch()
    batches = {"input": tokens, "positions": positions}
    with pytest.raises(UnsupportedError, match=r"compile.enable with component 'model'"):
        Host("model", False).post_dataloading_process(batches, labels)
    with pytest.raises(UnsupportedError, match=r"set --training.disable_cuda_graphs"):
        adapter._refuse(Host("loss", True).config, SimpleNamespace(is_cuda=True))  # type: ignore[arg-type]
    with pytest.raises(UnsupportedError, match=r"spmd_backend='full_dtensor': .* spmd_types"):
        adapter.RingAttention.Config().build().parallelize(SimpleNamespace(cp=2, spmd_backend="full_dtensor"))
    host = Host("loss", True)
    inputs, targets, extra = host.post_dataloading_process(batches, labels)
    assert torch.equal(inputs, tokens) and torch.equal(targets, labels) and host.ntokens_seen == labels.numel()
    assert [row.documents for row in extra["attention_masks"]] == [(*starts, TOKENS) for starts in STARTS]


@on_mesh
def test_heads_over_ranks_of_tensor_parallelism(mesh: DeviceMesh) -> None:
    generator = torch.Generator().manual_seed(5)
    q, k, v = (torch.randn(1, 6, 2, 8, dtype=torch.float64, generator=generator) for _ in range(3))
    module = adapter.RingAttention.Config().build()
    heads = [DTensor.from_local(x, mesh, [Shard(2)]) for x in (q, k, v)]
    out = module(*heads, out_transform=lambda out, lse: out * lse[..., None])
    assert isinstance(out, DTensor) and out.placements == (Shard(2),)
    reference, lse = dense_attention(q, k, v, causal=True)
    expected = reference * lse.transpose(1, 2)[..., None]
    torch.testing.assert_close(out.to_local(), expected, rtol=1e-10, atol=1e-10)
    with pytest.raises(InputError, match=r"attention over a ring takes Shard\(2\), heads over ranks"):
        module(*(DTensor.from_local(x, mesh, [Shard(1)]) for x in (q, k, v)))


# --- the Trainer -----------------------------------------------------------------------------------------------------

STEPS = 10
AT_TWO = ("plain", "packed", "by over_ring", "full checkpointing", "partial_dtensor")


def trained(folder: Path, ranks: int, *cases: str) -> dict[str, Any]:
    """Run torchtitan_train.py under torchrun. Return the loss and gradient norm of each step, by case."""
    file = folder / f"{ranks}.json"
    script = [str(ROOT / "tests" / "adapters" / "torchtitan_train.py"), str(file), *cases]
    torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    run_program(*torchrun, *script, folder=folder)
    losses: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    return losses


@pytest.fixture(scope="module")
def alone_trained(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Return the results of one process, with torchtitan's attention and with dense attention within each document."""
    return trained(tmp_path_factory.mktemp("alone"), 1, "torchtitan", "dense, packed")


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "cases"), [(2, AT_TWO), (4, ("plain", "packed"))])
def test_ten_steps_over_a_ring_equal_one_process(
    alone_trained: dict[str, Any], tmp_path: Path, ranks: int, cases: tuple[str, ...]
) -> None:
    losses = trained(tmp_path, ranks, *cases)
    worst = {}
    for case, steps in losses.items():
        expected = alone_trained["torchtitan" if case == "plain" else "dense, packed"]
        assert len(steps) == len(expected) == STEPS
        pairs = [pair for step in zip(steps, expected, strict=True) for pair in zip(*step, strict=True)]
        worst[case] = max(abs(ours - theirs) / theirs for ours, theirs in pairs)
    assert max(worst.values()) < 1e-5, worst  # the losses are float32


def test_over_ring_refuses_masks_that_it_does_not_know() -> None:
    def config(inner: Any, model: Any = Llama3Model) -> Any:
        attention = BaseAttention.Config(n_heads=2, inner_attention=inner)
        settings = SimpleNamespace(_owner=model, traverse=lambda kind: [("layers.0", attention, None, None)])
        return SimpleNamespace(model_spec=SimpleNamespace(model=settings))

    with pytest.raises(UnsupportedError, match=r"layers\.0 has the inner attention ScaledDotProductAttention"):
        adapter.over_ring(config(ScaledDotProductAttention.Config()))
    masked = type("Windows", (Llama3Model,), {"get_attention_masks": None})
    with pytest.raises(UnsupportedError, match="Windows makes its own attention masks"):
        adapter.over_ring(config(FlexAttention.Config(), masked))
