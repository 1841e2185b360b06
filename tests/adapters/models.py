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

_INDEXED = {
    **{name: value for name, value in _LATENT.items() if name != "first_k_dense_replace"},
    "index_topk": 5, "index_head_dim": 8, "index_n_heads": 8, "mlp_layer_types": ["dense", "sparse"],
}  # fmt: skip
_SHARED = {
    "num_hidden_layers": 3, "indexer_types": ["full", "shared", "full"], "mlp_layer_types": ["dense", *["sparse"] * 2],
}  # fmt: skip
_WITH_WINDOW = {
    "num_hidden_layers": 3, "sliding_window": WINDOW_TOKENS, "head_dim": 12, "n_group": 1, "use_dsa": True,
    "layer_types": ["indexed_attention", "sliding_attention", "indexed_attention"],
    "mlp_layer_types": ["dense", "dense", "sparse"], "shared_experts_intermediate_size": 24,
    **{f"swa_{name}": _LATENT[name] for name in ("q_lora_rank", "qk_nope_head_dim", "v_head_dim")},
    **{f"swa_num_{heads}": 4 for heads in ("attention_heads", "key_value_heads")}, "swa_kv_lora_rank": 8,
    "swa_head_dim": 12,
}  # fmt: skip

SELECTING: dict[str, tuple[str, dict[str, Any]]] = {
    "deepseek_v32": ("deepseek_v32", _INDEXED),
    "glm_moe_dsa": ("glm_moe_dsa", {**_INDEXED, **_SHARED}),
    "axk2": ("axk2", {**_INDEXED, "gated_norm_rank": 4}),
    "hy_v4": ("hy_v4", {**_INDEXED, **_SHARED, "hc_mult": 2}),
    "mistral_large4": (
        "mistral_large4_text",
        {
            **_INDEXED, "num_hidden_layers": 4, "mlp_layer_types": ["dense", *["sparse"] * 3],
            "indexer_types": ["full", "shared"] * 2, "no_rope_layers": [1, 0, 1, 0], "kv_source_layers": [0, 1, 0, 1],
        },
    ),
    "dots3_note": ("dots3_note_text", {**_INDEXED, **_WITH_WINDOW}),
}  # fmt: skip
"""Models whose layers select keys, in the same form. Some layers share the choice of an earlier one."""

SELECTING_BLOCKS: dict[str, tuple[str, dict[str, Any]]] = {
    "minimax_m3": (
        "minimax_m3_vl_text",
        {
            "num_hidden_layers": 3, "layer_types": ["minimax_m3_sparse", "full_attention", "minimax_m3_sparse"],
            "mlp_layer_types": ["dense", "sparse", "dense"], "dense_intermediate_size": 24, "index_n_heads": 2,
            "index_head_dim": 4, "index_block_size": 3, "index_topk_blocks": 3, "num_local_experts": 4, **_EXPERTS,
            "shared_intermediate_size": 24, "rope_parameters": {"rope_theta": 100.0, "partial_rotary_factor": 0.5},
        },
    ),
}  # fmt: skip
"""Models whose layers select blocks of keys, in the same form."""

COMPRESSING: dict[str, tuple[str, dict[str, Any]]] = {
    "deepseek_v4": (
        "deepseek_v4",
        {
            "num_hidden_layers": 3, "num_key_value_heads": 1, "head_dim": 16, "moe_intermediate_size": 24,
            "q_lora_rank": 16, "n_routed_experts": 4, **_EXPERTS, "hc_mult": 2, "sliding_window": WINDOW_TOKENS,
            "o_groups": 2, "o_lora_rank": 8, "index_n_heads": 4, "index_head_dim": 8, "index_topk": 3,
            "layer_types": ["sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"],
            "compress_rates": {"compressed_sparse_attention": 2, "heavily_compressed_attention": 5},
            "mlp_layer_types": ["hash_moe", "moe", "moe"], "partial_rotary_factor": 0.5,
        },
    ),
}  # fmt: skip
"""Models whose layers compress blocks of keys, in the same form."""

REFERENCE: dict[str, tuple[str, dict[str, Any]]] = {
    "unlimited_ocr": (
        "unlimited_ocr_text",
        {
            "sliding_window": WINDOW_TOKENS, "num_key_value_heads": 2, "moe_intermediate_size": 24,
            "n_routed_experts": 4, "n_group": 2, "topk_group": 1, "num_experts_per_tok": 2, "head_dim": None,
        },
    ),
}  # fmt: skip
"""Models whose generated tokens attend to the whole prompt, and to a window of other generated tokens."""

REFUSED: dict[str, tuple[str, dict[str, Any]]] = {
    "llama4_text": (
        "llama4_text",
        {
            "attention_chunk_size": 7, "num_local_experts": 2, "intermediate_size_mlp": 48, "no_rope_layers": [1, 0],
            "layer_types": ["chunked_attention", "full_attention"],
        },
    ),
}  # fmt: skip
"""Models that are refused, in the same form."""


_ROUTED = {
    "num_experts_per_tok": 2, "output_router_logits": True, "router_aux_loss_coef": 0.5, "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 24, "decoder_sparse_step": 1,
}  # fmt: skip
ROUTED: dict[str, tuple[str, dict[str, Any]]] = {
    "mixtral": ("mixtral", {"num_local_experts": 4, **_ROUTED}),
    "qwen2_moe": ("qwen2_moe", {"num_experts": 4, **_ROUTED}),
    "qwen3_moe": ("qwen3_moe", {"num_experts": 4, **_ROUTED}),
    "olmoe": ("olmoe", {"num_experts": 4, **_ROUTED}),
    "granitemoe": ("granitemoe", {"num_local_experts": 4, **_ROUTED}),
    "routed gpt_oss": ("gpt_oss", {"num_local_experts": 4, **_ROUTED, **_HYBRID}),
}
"""Mixtures of experts that add a router loss, in the same form."""


_LAYERS_OF_TOWER = {"num_hidden_layers": 1, "num_attention_heads": 2, "hidden_size": 16, "image_size": 32,
                    "patch_size": 16}  # fmt: skip
OCR_TOWERS = {
    "sam_config": {**_LAYERS_OF_TOWER, "output_channels": 8, "mlp_dim": 16, "downsample_channels": [8, 8]},
    "encoder_config": {**_LAYERS_OF_TOWER, "intermediate_size": 16},
}


def tiny_model(name: str, attention: str, **options: Any) -> Any:
    """Return a causal language model with the same random float64 weights for every `attention`, in training mode.

    The weights have a large variance, so that attention is far from uniform and every parameter matters.
    """
    kind, differs = (MODELS | REFUSED | ROUTED | SELECTING | SELECTING_BLOCKS | COMPRESSING | REFERENCE)[name]
    config = AutoConfig.for_model(kind, **{**_SMALL, **differs, **options})
    # The grouped implementation of experts does not support float64. transformers 4.57 has only the eager one.
    eager = {"experts_implementation": "eager"} if hasattr(config, "_experts_implementation") else {}
    if kind == "unlimited_ocr_text":  # it has no class without towers
        whole = transformers.UnlimitedOcrConfig(text_config=config.to_dict(), vision_config=OCR_TOWERS)
        return filled(transformers.UnlimitedOcrForConditionalGeneration._from_config(whole, **eager))
    if kind == "mistral_large4_text":
        tower = {"model_type": "pixtral", "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1,
                 "num_attention_heads": 2, "head_dim": 8, "image_size": 16, "patch_size": 4}  # fmt: skip
        whole = transformers.MistralLarge4Config(text_config=config.to_dict(), vision_config=tower)
        return filled(transformers.MistralLarge4ForConditionalGeneration._from_config(whole, **eager))
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
