"""Tiny hybrid models of transformers, and one process as their reference.

Decays are weak, so that a state reaches all later tokens of a document. Experts, grouped heads and groups of states
are on where an architecture has them.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.nn.functional import cross_entropy
from transformers import AutoConfig, AutoModelForCausalLM

from ringattn import Ring
from ringattn.adapters.local import local_attention
from ringattn.adapters.transformers import prepare
from tests.adapters.models import filled
from tests.adapters.processes import forked_ranks, whole
from tests.adapters.ranks import far_off_sharded, in_double

_SMALL = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
_BOTH = {"layer_types": ["linear_attention", "full_attention", "linear_attention"], "num_hidden_layers": 3}
_CONVOLUTIONS = {"layer_types": ["conv", "full_attention", "conv"], "num_hidden_layers": 3}
_DELTA = {
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 6, "linear_value_head_dim": 5,
    "linear_conv_kernel_dim": 4, "head_dim": 8, **_BOTH,
}  # fmt: skip
_EXPERTS = {
    "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16,
}  # fmt: skip
_LATENT = {
    "q_lora_rank": None, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 6,
    "num_key_value_heads": 4, "moe_intermediate_size": 16, "num_local_experts": 4, "n_shared_experts": 1,
    "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "mlp_layer_types": ["dense", "sparse", "sparse"], **_BOTH,
}  # fmt: skip
_MAMBA2 = {
    "mamba_d_state": 6, "mamba_d_conv": 4, "mamba_expand": 2, "mamba_n_heads": 8, "mamba_d_head": 8,
    "mamba_n_groups": 2, "mamba_chunk_size": 8,
}  # fmt: skip
_ZAMBA = {
    "mamba_d_state": 6, "mamba_d_conv": 4, "mamba_expand": 2, "n_mamba_heads": 2, "mamba_ngroups": 2, "chunk_size": 8,
    "layers_block_type": ["linear_attention", "hybrid"], "num_key_value_heads": 4, "num_hidden_layers": 2,
}  # fmt: skip
_ONLY_STATES = {"state_size": 6, "conv_kernel": 4, "chunk_size": 8, "n_groups": 2, "num_heads": 8, "head_dim": 8}

HYBRIDS: dict[str, dict[str, Any]] = {
    "qwen3_5_text": _DELTA,
    "qwen3_next": _DELTA | _EXPERTS,
    "qwen3_5_moe_text": _DELTA | _EXPERTS,
    "olmo_hybrid": _DELTA | {"linear_num_key_heads": 4, "linear_allow_neg_eigval": True},
    "lfm2": _CONVOLUTIONS | {"conv_bias": True, "block_auto_adjust_ff_dim": False},
    "lfm2_moe": _CONVOLUTIONS | _EXPERTS | {"num_dense_layers": 1},
    "lfm3": {"layer_types": ["conv", "sliding_attention"], "sliding_window": 7},
    "bamba": _MAMBA2 | {"attn_layer_indices": [1]},
    "falcon_h1": _MAMBA2 | {"mamba_d_ssm": 64},
    "nemotron_h": {
        "mamba_num_heads": 8, "mamba_head_dim": 8, "n_groups": 2, "ssm_state_size": 6, "chunk_size": 8, "head_dim": 8,
        **_BOTH,
    },
    "granitemoehybrid": _MAMBA2 | _BOTH | {
        "num_local_experts": 4, "num_experts_per_tok": 2, "shared_intermediate_size": 16,
    },
    "zamba2": _ZAMBA,
    "mamba2": _ONLY_STATES,
    "kimi_linear": _LATENT | {"linear_head_dim": 6, "linear_num_heads": 4, "linear_conv_kernel_dim": 4},
    "bailing_hybrid": _LATENT | {"head_dim": 6, "num_mtp_layers": 0},
    "jamba": {
        "mamba_d_state": 6, "mamba_d_conv": 4, "mamba_dt_rank": 4, "num_experts": 4, "num_experts_per_tok": 2,
        "attn_layer_period": 2, "attn_layer_offset": 1,
    },
    "zamba": _ZAMBA | {
        "mamba_dt_rank": 4, "use_associative_scan": False, "num_hidden_layers": 3,
        "layers_block_type": ["linear_attention", "hybrid", "hybrid"],
    },
    "mamba": _ONLY_STATES,
    "falcon_mamba": _ONLY_STATES,
    "minimax": {
        **_BOTH, "block_size": 8, "num_local_experts": 4, "head_dim": 8,
        "num_experts_per_tok": 2,
    },
    "recurrent_gemma": {
        "block_types": ["recurrent", "attention", "recurrent"], "num_hidden_layers": 3, "lru_width": 32,
        "attention_window_size": 7, "conv1d_width": 4,
    },
    "zaya": {
        "num_experts": 4, "num_experts_per_tok": 1, "moe_intermediate_size": 16, "head_dim": 8, "router_hidden_size": 8,
        "cca_time0": 2, "cca_time1": 3,
    },
}  # fmt: skip
"""By model type: the options that differ from `_SMALL`."""


def hybrid_model(name: str, attention: str = "eager") -> Any:
    """Return a causal language model with the same random float64 weights at every call, in training mode."""
    config = AutoConfig.for_model(name, **{**_SMALL, **HYBRIDS[name]})
    config._experts_implementation = "eager"  # the grouped implementation does not support float64
    model = filled(AutoModelForCausalLM.from_config(config, attn_implementation=attention))
    for parameter_name, parameter in model.named_parameters():
        last = parameter_name.rpartition(".")[2]
        if last in ("A_log", "dt_bias", "recurrent_param"):
            parameter.data = parameter.data * 0.3 - (3.0 if last == "A_log" else 1.0)
    for module in model.modules():
        if hasattr(module, "decay_factors"):  # constants of MiniMax that it has computed in float32
            module.query_decay, module.key_decay, module.diagonal_decay = module.decay_factors(module.slope_rate)
    return model


@contextmanager
def wide() -> Iterator[None]:
    """Compute in float64 what transformers' own code computes in float32, whatever the dtype of the model."""
    from transformers.models.recurrent_gemma.modeling_recurrent_gemma import RecurrentGemmaRglru

    scan: Any = inspect.unwrap(RecurrentGemmaRglru._rnn_scan)
    with in_double(), patch.object(scan, "__defaults__", (torch.float64,)):
        yield


class Batch(NamedTuple):
    """Two rows of tokens with labels that are already shifted, packed documents, and padding or None."""

    tokens: Tensor
    labels: Tensor
    bounds: tuple[int, ...]
    padding: Tensor | None = None

    @property
    def count(self) -> Tensor:
        """The number of labels."""
        return (self.labels != -100).sum()


def batch(bounds: tuple[int, ...], padded: bool = False) -> Batch:
    """Return a batch of these documents. `padded`: the first row has padding before its tokens, the second after."""
    tokens = torch.randint(3, 64, (2, bounds[-1]), generator=torch.Generator().manual_seed(bounds[-1]))
    labels, padding = torch.full_like(tokens, -100), None
    for start, stop in pairwise(bounds):
        labels[:, start : stop - 1] = tokens[:, start + 1 : stop]
    if padded:
        padding = torch.ones_like(tokens)
        padding[0, :3] = padding[1, -5:] = 0
        labels[padding == 0] = -100
        labels[1, -6] = -100  # the label of the last real token is padding
    return Batch(tokens, labels, bounds, padding)


class Results(NamedTuple):
    """The logits, the loss, and the gradients of parameters by name."""

    logits: Tensor
    loss: Tensor
    gradients: dict[str, Tensor]


def one_process(model: Any, data: Batch) -> Results:
    """Return the results of one process that reads each document from an empty state."""
    model = copy.deepcopy(model)
    logits = []
    with local_attention():
        for start, stop in pairwise(data.bounds):
            mask = {} if data.padding is None else {"attention_mask": data.padding[:, start:stop]}
            ids = torch.arange(stop - start)[None]
            logits.append(model(input_ids=data.tokens[:, start:stop], position_ids=ids, **mask).logits)
        joined = torch.cat(logits, 1)
        loss = cross_entropy(joined.flatten(0, 1), data.labels.flatten(), reduction="sum") / data.count
        loss.backward()
    return Results(joined.detach(), loss.detach(), gradients(model))


def over_ring(ring: Any, model: Any, data: Batch, layout: str) -> Results:
    """Return the results over a ring: the logits of all ranks, and this rank's part of the loss and the gradients."""
    return step_over_ring(ring, copy.deepcopy(model), data, layout)


def step_over_ring(ring: Any, model: Any, data: Batch, layout: str) -> Results:
    """Return the results of `over_ring`. Ranks that are threads need a copy of the model each."""
    seq = ring.sequence(cu_seqlens=data.bounds, layout=layout)
    mask = {} if data.padding is None else {"attention_mask": seq.shard(data.padding)}
    with ring.activate(seq):
        out = model(
            input_ids=seq.shard(data.tokens), position_ids=seq.positions(per_document=True)[None],
            labels=seq.shard(data.tokens), shift_labels=seq.shard(data.labels), num_items_in_batch=data.count, **mask,
        )  # fmt: skip
        out.loss.backward()
    return Results(seq.gather(out.logits.detach()), out.loss.detach(), gradients(model))


def batch_over_ring(ring: Any, model: Any, data: Batch, most_tokens: int) -> Results:
    """Return the results of `over_ring`, with each document a sample in micro-batches of up to `most_tokens` tokens."""
    model, lengths = copy.deepcopy(model), torch.tensor(data.bounds).diff().tolist()
    texts, labels = ([part.T for part in x.split(lengths, 1)] for x in (data.tokens, data.labels))
    logits, loss = [torch.empty(0)] * len(lengths), torch.zeros((), dtype=torch.float64)
    micro_batches = ring.batch(lengths, max_tokens_per_rank=-(-most_tokens // ring.world_size))
    assert len(micro_batches) > 1
    for micro in micro_batches:
        tokens, targets = (micro.shard(x)[0].T.contiguous() for x in (texts, labels))
        with ring.activate(micro.seq):
            out = model(
                input_ids=tokens, position_ids=micro.seq.positions(per_document=True)[None], labels=tokens,
                shift_labels=targets, num_items_in_batch=data.count,
            )  # fmt: skip
            out.loss.backward()
        loss += out.loss.detach()
        whole_logits = micro.seq.gather(out.logits.detach()).split([lengths[sample] for sample in micro.samples], 1)
        for sample, part in zip(micro.samples, whole_logits, strict=True):
            logits[sample] = part
    return Results(torch.cat(logits, 1), loss, gradients(model))


def gradients(model: Any) -> dict[str, Tensor]:
    """Return the gradients of a model's parameters."""
    return {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}


def errors(expected: Results, ranks: list[Results], data: Batch) -> dict[str, float]:
    """Return the largest errors relative to the largest value: of real logits, of the loss, and of all gradients."""
    real = torch.ones_like(data.tokens) if data.padding is None else data.padding
    results = {
        "logits": _error(ranks[0].logits[real == 1], expected.logits[real == 1]),
        "loss": _error(sum(each.loss for each in ranks), expected.loss),
    }
    for name, gradient in expected.gradients.items():
        parts = [each.gradients[name] for each in ranks if name in each.gradients]
        results[name] = _error(sum(parts), gradient) if parts else float("inf")
    return results


def _error(actual: Any, expected: Tensor) -> float:
    return float((actual - expected).abs().max() / expected.abs().max().clamp(min=1e-30))


def tensor_parallel_errors(names: list[str]) -> dict[str, float]:
    """Return the largest error of each model over four processes: a ring of two, and two ranks of tensor parallelism.

    The weights are sharded as the model's plan says, by the function that `from_pretrained` calls.
    """
    ranks = forked_ranks(4, partial(_errors_of_rank, names))
    return {name: max(results[name] for results in ranks) for name in names}


def _errors_of_rank(names: list[str], _: int) -> dict[str, float]:
    from transformers.distributed import DistributedConfig
    from transformers.distributed.tensor_parallel import apply_tensor_parallelism

    dist.init_process_group("gloo")
    mesh, data = init_device_mesh("cpu", (2, 2), mesh_dim_names=("cp", "tp")), batch((0, 1, 2, 20, 21, 33))
    results = {}
    for name in names:
        with wide(), Ring(mesh, timeout_s=60.0) as ring:
            model = hybrid_model(name)
            expected = one_process(model, data)
            plan, _, _ = model._resolve_parallel_plans(DistributedConfig(tp_size=2))
            prepare(apply_tensor_parallelism(model, mesh["tp"], plan))
            actual = step_over_ring(ring, model, data, "zigzag")
            assert any(isinstance(parameter, DTensor) for parameter in model.parameters())
            parts = [x.to_local() if isinstance(x, DTensor) else x for x in (actual.loss, *actual.gradients.values())]
            ring.all_reduce(parts)
            actual = actual._replace(gradients={key: whole(x) for key, x in actual.gradients.items()})
            results[name] = max(errors(expected, [actual], data).values())
    dist.destroy_process_group()
    return results


def sharded_errors(names: list[str], compiled: bool = False) -> dict[str, float]:
    """Return the largest error of each model in some steps with weights that FSDP2 shards over two processes.

    Models make two steps if they are `compiled`, and else twenty. With a learning rate of 1e-2, each step would
    multiply rounding errors: 4e-14 after 4 steps, 5e-5 after 20.
    """
    data = batch((0, 29))
    whole_batch = {"input_ids": data.tokens, "labels": data.tokens}
    steps: dict[str, Any] = {"steps": 2, "compiled": True} if compiled else {"steps": 20, "rate": 1e-3}
    return {name: far_off_sharded(partial(hybrid_model, name), whole_batch, **steps) for name in names}
