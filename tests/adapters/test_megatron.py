"""Megatron Core over a ring: a GPT model on two ranks, batched and packed, against the same model on one rank."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from ringattn import InputError, Ring
from ringattn.launch.ranks import run_ranks_in_processes
from ringattn.testing import dense_attention, run_ranks

pytest.importorskip("megatron.core", reason="needs megatron-core")
pytestmark = pytest.mark.filterwarnings("ignore")  # warnings about packages that are not installed

from megatron.core import parallel_state, utils
from megatron.core.distributed import (
    DistributedDataParallelConfig,
    TorchFullyShardedDataParallel,
    torch_fully_sharded_data_parallel,
)
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec, get_gpt_mtp_block_spec
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import random
from megatron.core.transformer import multi_latent_attention
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.moe import moe_utils
from megatron.core.transformer.multi_token_prediction import MTPLossAutoScaler, MTPLossLoggingHelper
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig
from megatron.core.utils import get_batch_on_this_cp_rank

from ringattn.adapters.groups import close_rings, ring_of
from ringattn.adapters.megatron import _SCALES_MTP, RingCoreAttention
from tests.adapters.processes import whole, worst_error

VOCABULARY, TOKENS, CUTS = 40, 16, [0, 4, 16]
REAL = [0, 3, 12]
"""Documents of 3 and 9 tokens, padded to 4 and 12."""
DISPATCHES = "is_hybrid_cp" in inspect.signature(get_batch_on_this_cp_rank).parameters
"""Whether Megatron's `get_batch_on_this_cp_rank` shards packed batches too: since 0.18."""

LOGS = next(name for name in vars(MTPLossLoggingHelper) if name.startswith("save_"))
"""Megatron's function that logs the losses of several tokens ahead on a GPU, by the name in this version."""


class DenseCore(nn.Module):
    """The causal reference attention, as a core attention for Megatron: (tokens, batch, heads, dim)."""

    def __init__(self, softmax_scale: float | None = None, **_: Any) -> None:
        super().__init__()
        self.scale = softmax_scale

    def forward(self, query: Tensor, key: Tensor, value: Tensor, attention_mask: None, **_: Any) -> Tensor:
        out, _ = dense_attention(*(x.transpose(0, 1) for x in (query, key, value)), causal=True, scale=self.scale)
        return out.transpose(0, 1).flatten(2).to(query.dtype)


OF_MODES: dict[str, dict[str, Any]] = {
    "checkpointing, full": {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
    "checkpointing, selective": {"recompute_granularity": "selective", "recompute_modules": ["core_attn"]},
    "compile": {},
    "FSDP2": {"transformer_impl": "local"},
}  # fmt: skip
"""The options of the config, by mode."""
OF_LOSSES: dict[str, dict[str, Any]] = {
    "several tokens ahead": {"mtp_num_layers": 1, "mtp_loss_scaling_factor": 0.3, "calculate_per_token_loss": True},
    "experts": {
        "num_moe_experts": 4, "moe_router_topk": 2, "moe_router_load_balancing_type": "aux_loss",
        "moe_aux_loss_coeff": 0.5, "add_bias_linear": False, "moe_router_dtype": "fp64",
    },
}  # fmt: skip
"""The options of the config, by losses that Megatron adds."""


@contextmanager
def on_a_cpu() -> Iterator[None]:
    """Patch Megatron to run without a GPU: it saves a GPU's random state with a checkpoint, and shards over GPUs."""
    mesh = SimpleNamespace(from_group=lambda group, _: DeviceMesh.from_group(group, "cpu"))
    with (
        mock.patch.object(torch.cuda, "current_device", return_value="cpu"),
        mock.patch.object(moe_utils, "te_general_gemm", None, create=True),  # without TransformerEngine
        mock.patch.object(MTPLossLoggingHelper, LOGS),
        mock.patch.object(torch.cuda.random, "get_rng_state", return_value=torch.zeros(1)),
        mock.patch.object(random, "_set_cuda_rng_state"),
        mock.patch.object(torch_fully_sharded_data_parallel, "DeviceMesh", mesh),
    ):
        yield


def config(**options: Any) -> TransformerConfig:
    return TransformerConfig(
        num_layers=2, hidden_size=32, num_attention_heads=4, num_query_groups=2, use_cpu_initialization=True,
        attention_dropout=0.0, hidden_dropout=0.0, params_dtype=torch.float64, masked_softmax_fusion=False,
        bias_dropout_fusion=False, gradient_accumulation_fusion=False, apply_rope_fusion=False, **options,
    )  # fmt: skip


def gpt(core: type, groups: ProcessGroupCollection, **options: Any) -> GPTModel:
    """Return a GPT model whose weights are equal on every rank and in both models."""
    spec = get_gpt_layer_local_spec(num_experts=options.get("num_moe_experts"), moe_grouped_gemm=False)
    spec.submodules.self_attention.submodules.core_attention = core
    positions, settings = "learned_absolute", config(**options)  # Megatron's rotary embeddings need a GPU over ranks
    further = get_gpt_mtp_block_spec(settings, spec, False) if "mtp_num_layers" in options else None
    model = GPTModel(
        settings, spec, VOCABULARY, 64, position_embedding_type=positions, pg_collection=groups, mtp_block_spec=further
    )
    for block in [model.mtp, *model.mtp.layers] if further is not None else []:
        block.cp_group = groups.cp  # the block reads Megatron's global groups
    model.double()  # Megatron creates norms in float32, whatever the config says
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for weight in model.parameters():
            weight.copy_(torch.randn(weight.shape, dtype=weight.dtype, generator=generator) * 0.2)
    return model


def cut(batch: dict[str, Any], **options: Any) -> dict[str, Any]:
    """Return this rank's shards of a batch from Megatron's function, whose arguments depend on the version."""
    if DISPATCHES:
        options.setdefault("is_hybrid_cp", False)
    part: dict[str, Any] = get_batch_on_this_cp_rank(batch, **options)
    return part


def indices(cuts: Tensor, tokens: int, ranks: int, rank: int) -> Tensor:
    """Return the rows of a rank in zigzag per document, like TransformerEngine's `thd_get_partitioned_indices`."""
    chunks = [torch.arange(start, stop).chunk(2 * ranks) for start, stop in pairwise(cuts.tolist())]
    return torch.cat([each[i] for each in chunks for i in (rank, 2 * ranks - 1 - rank)])


def results(model: GPTModel, loss: Tensor) -> list[Tensor]:
    """Run backward. Return every whole gradient, and the loss."""
    model.zero_grad()
    loss.backward()
    grads = [weight.grad for weight in model.parameters() if weight.grad is not None]
    return [*map(whole, grads), loss.detach()]


def error(actual: list[Tensor], expected: list[Tensor]) -> float:
    """Sum the tensors in `actual` over the ranks, in place. Return their largest relative error."""
    for grad in actual:
        torch.distributed.all_reduce(grad)
    return worst_error(zip(actual, expected, strict=True))


def of_processes(spec: dict[str, Any]) -> dict[str, float]:
    """Return the largest relative error of each case, on one of two ranks."""
    torch.distributed.init_process_group("gloo")
    parallel_state.initialize_model_parallel(context_parallel_size=2)
    groups = ProcessGroupCollection.use_mpu_process_groups()
    lone = ProcessGroupCollection.use_mpu_process_groups()
    lone.cp = groups.tp  # a group of this rank only
    alone = gpt(DenseCore, lone)
    tokens = torch.randint(VOCABULARY, (2, TOKENS + 1), generator=torch.Generator().manual_seed(1))
    places = torch.arange(TOKENS).repeat(2, 1)
    whole = {"tokens": tokens[:, :-1], "labels": tokens[:, 1:], "position_ids": places}
    errors: dict[str, float] = {}

    reference = results(alone, alone(whole["tokens"], places, None, labels=whole["labels"]).sum())
    for kind in (None, "p2p", "all_gather", "a2a", "a2a+p2p"):
        model = gpt(RingCoreAttention, groups, context_parallel_size=2, cp_comm_type=kind)
        shards = cut(dict(whole))
        loss = model(shards["tokens"], shards["position_ids"], None, labels=shards["labels"]).sum()
        errors[f"batch, {kind}"] = error(results(model, loss), reference)

    def step(run: Any, model: GPTModel) -> list[Tensor]:
        shards = cut(dict(whole))
        return results(model, run(shards["tokens"], shards["position_ids"], None, labels=shards["labels"]).sum())

    for name, options in OF_MODES.items():
        model = gpt(RingCoreAttention, groups, context_parallel_size=2, **options)
        with on_a_cpu():
            if name == "FSDP2":  # FSDP2 returns the mean over two ranks, and each rank gets the whole gradient
                sharded = TorchFullyShardedDataParallel(model.config, DistributedDataParallelConfig(), model)
                errors[name] = error(step(sharded, model), reference)
            elif name == "compile":
                model.decoder.layers[0].compile(backend="eager")
                errors[name] = max(error(step(model, model), reference) for _ in range(2))
            else:
                passes = ring_of(groups.cp).counters()["passes"]
                errors[name] = error(step(model, model), reference)
                assert ring_of(groups.cp).counters()["passes"] - passes == 2 * 3, name  # forward, again, and backward

    rank, packed = torch.distributed.get_rank(), {name: x[:1] for name, x in whole.items()}
    keep = torch.zeros(1, TOKENS)
    expected = torch.zeros((), dtype=torch.float64)
    for start, (begin, stop) in zip(CUTS, pairwise(REAL), strict=False):
        part = slice(start, start + stop - begin)
        keep[:, part] = 1
        document = {name: x[:, part] for name, x in packed.items()}
        expected = expected + alone(document["tokens"], document["position_ids"], None, labels=document["labels"]).sum()
    rows = indices(torch.tensor(CUTS), TOKENS, 2, rank)
    real, padded = torch.tensor(REAL, dtype=torch.int32), torch.tensor(CUTS, dtype=torch.int32)
    params = PackedSeqParams("thd", real, real, padded, padded, 12, 12)
    model = gpt(RingCoreAttention, groups, context_parallel_size=2)
    shards = {name: x[:, rows] for name, x in packed.items()}
    if DISPATCHES:
        tex = SimpleNamespace(thd_get_partitioned_indices=indices)
        with mock.patch.object(utils, "tex", tex, create=True):
            shards = cut({**packed, "cu_seqlens": real[None], "cu_seqlens_padded": padded[None]})
    losses = model(shards["tokens"], shards["position_ids"], None, labels=shards["labels"], packed_seq_params=params)
    errors["packed"] = error(results(model, (losses * keep[:, rows]).sum()), results(alone, expected))
    MTPLossAutoScaler.set_loss_scale(torch.ones(1, dtype=torch.float64))
    lone.tp_cp = groups.tp
    for name, options in OF_LOSSES.items():
        if _SCALES_MTP and "mtp_num_layers" in options:
            continue
        alone = gpt(DenseCore, lone, **options)
        model = gpt(RingCoreAttention, groups, context_parallel_size=2, **options)
        shards = cut(dict(whole))
        with on_a_cpu():  # Megatron's cross entropy is in float32
            expected = alone(whole["tokens"], places, None, labels=whole["labels"]).double().sum()
            loss = model(shards["tokens"], shards["position_ids"], None, labels=shards["labels"]).double().sum()
            errors[name] = error(results(model, loss), results(alone, expected))
        if name == "several tokens ahead":
            expected = torch.zeros((), dtype=torch.float64)
            shards = {entry: x[:1][:, rows] for entry, x in whole.items()}
            params = PackedSeqParams("thd", padded, padded, None, None, 12, 12)
            with on_a_cpu():
                for start, stop in pairwise(CUTS):
                    document = {entry: x[:1, start:stop] for entry, x in whole.items()}
                    losses = alone(document["tokens"], document["position_ids"], None, labels=document["labels"])
                    expected = expected + losses.double().sum()
                arguments = shards["tokens"], shards["position_ids"], None
                losses = model(*arguments, labels=shards["labels"], packed_seq_params=params).double()
                errors[f"{name}, packed"] = error(results(model, losses.sum()), results(alone, expected))
    torch.distributed.destroy_process_group()
    return errors


@pytest.mark.slow
def test_a_model_over_two_processes_equals_one() -> None:
    for errors in run_ranks_in_processes("tests.adapters.test_megatron:of_processes", {}, 2, 120, 1):
        assert len(errors) == (11 if _SCALES_MTP else 13) and max(errors.values()) < 1e-10, errors


# --- one layer, ranks as threads -------------------------------------------------------------------------------------


def core(
    ring: Ring, attention_type: str = "self", cp_comm_type: str | None = None, **options: Any
) -> RingCoreAttention:
    groups = SimpleNamespace(cp=ring, tp=SimpleNamespace(size=lambda: 1))
    return RingCoreAttention(
        config(**options), 1, AttnMaskType.causal, attention_type, cp_comm_type=cp_comm_type, pg_collection=groups
    )


def qkv(*shape: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(9)
    return [torch.randn(*shape, heads, 8, dtype=torch.float64, generator=generator) for heads in (4, 2, 2)]


@pytest.mark.parametrize("kind", [AttnMaskType.causal, AttnMaskType.no_mask])
def test_windows_of_the_layers_that_have_one(kind: AttnMaskType) -> None:
    tensors = qkv(2, 12)
    window = (3, 0 if kind is AttnMaskType.causal else 2)
    reference = dense_attention(*tensors, causal=kind is AttnMaskType.causal, window=window)[0]

    def body(ring: Ring) -> None:
        seq = ring.sequence(12, layout="zigzag")
        shards = [seq.shard(x).transpose(0, 1) for x in tensors]
        out = core(ring, window_size=(3, 2))(*shards, None, attn_mask_type=kind)
        assert out.shape == (6, 2, 32)
        torch.testing.assert_close(out, seq.shard(reference).transpose(0, 1).flatten(2), rtol=1e-10, atol=1e-10)

    run_ranks(2, body)
    with Ring() as ring:
        unwindowed = core(ring, window_size=(3, 2), window_attn_skip_freq=[0, 1])
        assert unwindowed.window_size == (-1, -1)


@pytest.mark.parametrize("kind", ["off-by-one", "learnable"])
def test_sinks(kind: str) -> None:
    tensors = [x.transpose(0, 1) for x in qkv(1, 12)]
    with Ring() as ring:
        module = core(ring, softmax_type=kind)
        assert module.softmax_offset is not None
        assert {name for name, _ in module.named_parameters()} == ({"softmax_offset"} if kind == "learnable" else set())
        out = module(*tensors, None)
        plain, lse = dense_attention(*(x.transpose(0, 1) for x in tensors), causal=True)
        share = torch.exp(lse) / (torch.exp(lse) + torch.exp(module.softmax_offset[None, :, None]))
        expected = plain * share.transpose(1, 2)[..., None]
        torch.testing.assert_close(out, expected.transpose(0, 1).flatten(2), rtol=1e-10, atol=1e-10)


def test_autocast_casts_as_megatrons_own_products() -> None:
    """Under autocast the output has autocast's dtype, also if norms left q and k in float32. float64 is kept."""
    q, k, v = qkv(6, 1)
    with Ring() as ring:
        expected = core(ring)(q, k, v, None)
        with torch.autocast("cpu", torch.bfloat16):
            for tensors in ((q.float(), k.float(), v.bfloat16()), (q.float(), k.float(), v.float())):
                out = core(ring)(*tensors, None)
                torch.testing.assert_close(out, expected.bfloat16(), rtol=0.02, atol=0.02)
            assert core(ring)(q, k, v, None).dtype == torch.float64


def test_padded_documents_with_several_tokens_ahead_are_refused() -> None:
    """Megatron shifts labels at the documents without padding, so they would be shifted in other places."""
    tensors = [x[0] for x in qkv(1, 16)]
    params = PackedSeqParams("thd", torch.tensor(REAL), torch.tensor(REAL), torch.tensor(CUTS), torch.tensor(CUTS))
    with Ring() as ring, pytest.raises(InputError, match="mtp_num_layers with padded documents"):
        core(ring, mtp_num_layers=1)(*tensors, None, packed_seq_params=params)


def test_padding_is_hidden_from_documents_both_ways() -> None:
    tensors = [x[0] for x in qkv(1, 16)]
    real, padded = torch.tensor(REAL), torch.tensor(CUTS)
    params = PackedSeqParams("thd", real, real, padded, padded, 12, 12)
    reference = dense_attention(*(x[None] for x in tensors), cu_seqlens=[0, 3, 4, 13, 16])[0][0]

    def body(ring: Ring) -> None:
        rows = ring.sequence(cu_seqlens=CUTS, layout="per_document").positions()
        shards = [x[rows] for x in tensors]
        module = core(ring)
        out = module(*shards, None, attn_mask_type=AttnMaskType.padding, packed_seq_params=params)
        torch.testing.assert_close(out, reference[rows].flatten(1), rtol=1e-10, atol=1e-10)
        uneven = PackedSeqParams("thd", real, real)
        with pytest.raises(InputError, match=r"\(0, 3, 12\) must each be padded to a multiple of 2 \* cp = 4"):
            module(*shards, None, packed_seq_params=uneven)
        with pytest.raises(InputError, match="3 local tokens do not form two equal chunks"):
            module(*(x[:3, None] for x in shards), None)

    run_ranks(2, body)


@pytest.mark.parametrize("kind", ["sbhd", "thd"])
@pytest.mark.parametrize(("size", "brings"), [(None, True), (1, True), (1, False)])
def test_a_batch_may_bring_its_own_group(kind: str, size: int | None, brings: bool) -> None:
    """A batch whose own context parallel group has one rank attends locally, inside a ring of two ranks."""
    cuts = torch.tensor([0, 15])

    def body(ring: Ring) -> None:
        tensors = [x + ring.rank for x in qkv(1, 15)]  # one rank does not need two equal chunks
        reference = dense_attention(*tensors, causal=True)[0][0].flatten(1)
        with Ring(transport="local") as group:
            shards = [x[0] if kind == "thd" else x.transpose(0, 1) for x in tensors]
            params = PackedSeqParams(kind, cuts, cuts, local_cp_size=size, cp_group=group if brings else None)
            out = core(ring)(*shards, None, packed_seq_params=params)
            assert group.counters()["passes"] == brings
        assert ring.counters()["passes"] == 0
        torch.testing.assert_close(out if kind == "thd" else out[:, 0], reference, rtol=1e-10, atol=1e-10)

    run_ranks(2, body, timeout_s=10.0)


@pytest.mark.parametrize("kind", ["sbhd", "thd"])
def test_a_group_of_another_size_than_the_batch_is_for(kind: str) -> None:
    cuts = torch.tensor([0, 16])

    def body(ring: Ring) -> None:
        shards = [x[0] if kind == "thd" else x.transpose(0, 1) for x in qkv(1, 8)]
        for group in (ring, None):
            params = PackedSeqParams(kind, cuts, cuts, local_cp_size=2 + 2 * ring.rank, cp_group=group)
            with pytest.raises(InputError, match="for local_cp_size=4 ranks and its group has 2: set the cp_group"):
                core(ring)(*shards, None, packed_seq_params=params)

    run_ranks(2, body, timeout_s=10.0)


def test_arguments_are_those_of_megatron() -> None:
    for method in ("__init__", "forward"):
        theirs, ours = (
            inspect.signature(getattr(of, method)).parameters for of in (DotProductAttention, RingCoreAttention)
        )
        ours_without_mla = [(p.name, p.default) for p in ours.values() if p.name not in ("k_channels", "v_channels")]
        assert [(p.name, p.default) for p in theirs.values()] == ours_without_mla


def test_latent_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    """Latent attention is exact: queries and keys have 12 elements per head, values 8."""
    monkeypatch.setattr(torch.cuda, "current_device", lambda: "cpu")
    monkeypatch.setattr(multi_latent_attention, "HAVE_TE", False)  # without TransformerEngine's modules
    latent = MLATransformerConfig(
        num_layers=1, hidden_size=32, num_attention_heads=4, use_cpu_initialization=True, attention_dropout=0.0,
        hidden_dropout=0.0, q_lora_rank=16, kv_lora_rank=16, qk_head_dim=8, qk_pos_emb_head_dim=4, v_head_dim=8,
        masked_softmax_fusion=False, bias_dropout_fusion=False, gradient_accumulation_fusion=False,
        apply_rope_fusion=False, rope_type="rope",
    )  # fmt: skip
    tokens, places = torch.randint(VOCABULARY, (2, TOKENS + 1)), torch.arange(TOKENS).repeat(2, 1)
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    try:
        by_core = []
        for kind in (DenseCore, RingCoreAttention):
            spec = get_gpt_layer_local_spec(multi_latent_attention=True)
            spec.submodules.self_attention.submodules.core_attention = kind
            torch.manual_seed(4)
            model = GPTModel(latent, spec, VOCABULARY, 64, position_embedding_type="rope")
            by_core.append(results(model, model(tokens[:, :-1], places, None, labels=tokens[:, 1:]).sum()))
        for actual, expected in zip(by_core[1], by_core[0], strict=True):
            torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)
    finally:
        close_rings()
        parallel_state.destroy_model_parallel()
        torch.distributed.destroy_process_group()


@pytest.mark.skipif(not _SCALES_MTP, reason="needs Megatron Core 0.17")
def test_several_tokens_ahead_over_several_ranks_are_refused() -> None:
    def body(ring: Ring) -> None:
        shards = [x.transpose(0, 1) for x in qkv(1, 8)]
        with pytest.raises(InputError, match=r"mtp_num_layers=1: since 0\.17, Megatron Core scales this loss"):
            core(ring, mtp_num_layers=1)(*shards, None)

    run_ranks(2, body, timeout_s=10.0)


@pytest.mark.skipif(not DISPATCHES, reason="needs Megatron Core 0.18")
def test_documents_that_megatron_would_shard_as_one_sequence_are_refused() -> None:
    """A row may be sharded as one sequence if it has one document, padded or not."""
    tokens = torch.arange(TOKENS)[None]
    options: dict[str, Any] = {"is_hybrid_cp": True, "hybrid_cp_group_func": lambda group_size: group_size}
    by_version: list[dict[str, Any]] = [options]
    if "use_per_sequence_balancing" in inspect.signature(get_batch_on_this_cp_rank).parameters:
        by_version.append({"use_per_sequence_balancing": True})
    with (
        Ring() as ring,
        mock.patch.object(torch.distributed, "get_world_size", return_value=2),
        mock.patch.object(torch.distributed, "get_rank", return_value=1),
    ):
        core(ring)
        core(ring)  # wraps Megatron's functions once only
        for cuts, padded, documents in (([0, 4, 16, 16], None, 2), ([0, 9], [0, 16, 16], 1)):
            batch = {
                "tokens": tokens, "cu_seqlens": torch.tensor([cuts]), "local_cp_size": torch.tensor([2]),
                "cu_seqlens_padded": None if padded is None else torch.tensor([padded]),
            }  # fmt: skip
            for arguments in by_version:
                if documents > 1:
                    with pytest.raises(InputError, match="a packed batch of 2 documents would be sharded as one"):
                        cut(dict(batch), **arguments)
                else:
                    assert cut(dict(batch), **arguments)["tokens"].tolist() == [list(range(4, 12))]


def test_what_is_refused() -> None:
    x = torch.zeros(4, 1, 4, 8, dtype=torch.float64)
    with Ring() as ring:
        with pytest.raises(InputError, match=r"attention_dropout=0\.1: .* set attention_dropout=0\.0"):
            RingCoreAttention(config(), 1, AttnMaskType.causal, "self", attention_dropout=0.1)
        with pytest.raises(InputError, match="attention_type='cross'"):
            core(ring, "cross")
        with pytest.raises(InputError, match=r"cp_comm_type='p2p\+a2a' is not known"):
            core(ring, cp_comm_type="p2p+a2a")
        with pytest.raises(InputError, match=r"qk_clip: attention over a ring does not report .* set qk_clip=False"):
            core(ring, qk_clip=True)
        with pytest.raises(InputError, match="set log_max_attention_logit=False"):
            core(ring, log_max_attention_logit=True)
        with pytest.raises(InputError, match="attention_mask and attention_bias must be None"):
            core(ring)(x, x, x, None, attention_bias=x)
        for kind in (AttnMaskType.padding, AttnMaskType.arbitrary):
            with pytest.raises(InputError, match=f"attn_mask_type={kind.name}: a ring supports causal and no_mask"):
                core(ring)(x, x, x, None, attn_mask_type=kind)


def test_what_one_rank_alone_gets_wrong() -> None:
    """If one rank passes wrong arguments, all ranks raise, and none waits for the deadline."""

    def body(ring: Ring) -> None:
        x, mask = torch.zeros(4 - ring.rank, 1, 4, 8, dtype=torch.float64), torch.ones(4, 4, dtype=torch.bool)
        with pytest.raises(InputError, match="3 local tokens do not form two equal chunks"):
            core(ring)(x, x[:, :, :2], x[:, :, :2], None)
        x = torch.zeros(4, 1, 4, 8, dtype=torch.float64)
        with pytest.raises(InputError, match="attention_mask and attention_bias must be None"):
            core(ring)(x, x[:, :, :2], x[:, :, :2], mask if ring.rank else None)
        real = torch.tensor([0, 8])
        uneven = PackedSeqParams("thd", torch.tensor([0, 3, 8]) if ring.rank else real, real)
        with pytest.raises(InputError, match="must each be padded to a multiple"):
            core(ring)(x[:, 0], x[:, 0, :2], x[:, 0, :2], None, packed_seq_params=uneven)

    run_ranks(2, body, timeout_s=10.0)
