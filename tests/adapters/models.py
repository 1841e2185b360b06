"""Tiny configurations of language models from transformers, one for each architecture that the adapter is tested with.

Windows are shorter than a shard in the tests and longer than one token, heads are grouped, and the special features of
an architecture are on: softcap, sinks, values of another size, experts, layers without rotary positions.
"""

from __future__ import annotations

from typing import Any

import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM, BertConfig

WINDOW_TOKENS = 5

_SMALL = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 128, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2, "attention_dropout": 0.0, "use_cache": False,
}  # fmt: skip
_HYBRID = {"sliding_window": WINDOW_TOKENS, "layer_types": ["sliding_attention", "full_attention"]}
_EXPERTS = {"num_experts_per_tok": 2, "router_aux_loss_coef": 0.0}
_LATENT = {
    "q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 6,
    "num_key_value_heads": 4, "moe_intermediate_size": 24, "n_routed_experts": 4, "n_group": 2, "topk_group": 1,
    "first_k_dense_replace": 1, "num_experts_per_tok": 2, "head_dim": 4,
}  # fmt: skip

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "qwen2": ("qwen2", {"use_sliding_window": True, **_HYBRID}),
    "qwen3": ("qwen3", {}),
    "mistral": ("mistral", {"sliding_window": WINDOW_TOKENS}),
    "gemma2": ("gemma2", {"query_pre_attn_scalar": 8, "attn_logit_softcapping": 2.0, **_HYBRID}),
    "gemma3_text": ("gemma3_text", {"query_pre_attn_scalar": 8, **_HYBRID}),
    "gpt_oss": ("gpt_oss", {"num_local_experts": 4, **_EXPERTS, **_HYBRID}),
    "phi3": ("phi3", {"sliding_window": WINDOW_TOKENS}),
    "olmo3": ("olmo3", _HYBRID),
    "cohere2": ("cohere2", _HYBRID),
    "granite": ("granite", {"attention_multiplier": 0.3}),
    "deepseek_v3": ("deepseek_v3", _LATENT),
    "starcoder2": ("starcoder2", {"sliding_window": WINDOW_TOKENS, "residual_dropout": 0.0, "embedding_dropout": 0.0}),
    "glm": ("glm", {}),
    "smollm3": ("smollm3", {"no_rope_layers": [1, 0], "use_sliding_window": False}),
}
"""By name: the model type, and the options that differ from `_SMALL`."""

REFUSED: dict[str, tuple[str, dict[str, Any]]] = {
    "llama4_text": (
        "llama4_text",
        {
            "attention_chunk_size": 7, "num_local_experts": 2, "intermediate_size_mlp": 48, "no_rope_layers": [1, 0],
            "layer_types": ["chunked_attention", "full_attention"],
        },
    ),
    "qwen3_next": (
        "qwen3_next",
        {"layer_types": ["full_attention", "linear_attention"], "num_experts": 2, "num_experts_per_tok": 1},
    ),
}  # fmt: skip
"""Models that are refused, in the same form."""


def tiny_model(name: str, attention: str, **options: Any) -> Any:
    """Return a causal language model with the same random float64 weights for every `attention`, in training mode.

    The weights have a large variance, so that attention is far from uniform and every parameter matters.
    """
    kind, differs = (MODELS | REFUSED)[name]
    config = AutoConfig.for_model(kind, **{**_SMALL, **differs, **options})
    # The grouped implementation of experts does not support float64. transformers 4.57 has only the eager one.
    eager = {"experts_implementation": "eager"} if hasattr(config, "_experts_implementation") else {}
    return filled(AutoModelForCausalLM.from_config(config, attn_implementation=attention, **eager))


def filled(model: Any) -> Any:
    """Fill the model with random float64 weights that depend only on their shapes and order. Return the model."""
    model = model.double().train()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            parameter.copy_(0.3 * noise + (parameter.dim() == 1))  # norms, biases and sinks around one
    return model


def with_lora(model: Any) -> Any:
    """Add LoRA adapters to two projections, with random weights, because LoRA starts with zeros."""
    from peft import LoraConfig, get_peft_model

    wrapped = get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj", "v_proj"], lora_dropout=0.0))
    generator = torch.Generator().manual_seed(4)
    for name, parameter in wrapped.named_parameters():
        if "lora_" in name:
            parameter.data = 0.3 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
    return wrapped


def bert_config(**options: Any) -> BertConfig:
    """Return the configuration of a small encoder without dropout."""
    return BertConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        max_position_embeddings=64, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, **options,
    )  # fmt: skip


def build_model(of: str, config: str, **options: Any) -> Any:
    """Build a transformers model from the names of its class and of its configuration's class."""
    return filled(getattr(transformers, of)(getattr(transformers, config)(**options)))


ROTARY_TOKENS = 16
"""The length from which the models of `rotary` use other frequencies."""


def rotary(kind: str) -> Any:
    """Return Phi-3 for kind "longrope", Llama for "dynamic". Their rotary frequencies depend on the sequence length."""
    rope: dict[str, Any] = {"rope_type": kind, "rope_theta": 100.0}
    if kind == "dynamic":
        rope |= {"factor": 4.0}
        return tiny_model("llama", "eager", **rope_options(rope), max_position_embeddings=ROTARY_TOKENS)
    rope |= {"original_max_position_embeddings": ROTARY_TOKENS, "short_factor": [1.0, 1.5, 1.0, 2.0],
             "long_factor": [4.0, 3.0, 9.0, 5.0]}  # fmt: skip
    return tiny_model("phi3", "eager", **rope_options(rope), original_max_position_embeddings=ROTARY_TOKENS,
                      sliding_window=None)  # fmt: skip


def rope_options(rope: dict[str, Any]) -> dict[str, Any]:
    """Return the options of a configuration for these RoPE parameters, which transformers 4.57 spells differently."""
    if hasattr(transformers.LlamaConfig(), "rope_parameters"):
        return {"rope_parameters": rope}
    kept = {k: v for k, v in rope.items() if k in ("factor", "short_factor", "long_factor")}
    return {"rope_scaling": {"type": rope["rope_type"], **kept}, "rope_theta": rope["rope_theta"]}
