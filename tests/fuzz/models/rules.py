"""Rules that choose small values for the fields of a configuration by their names."""

from __future__ import annotations

import re
from typing import Any

HIDDEN = 32
HEADS = 4
HEAD_DIM = HIDDEN // HEADS
VOCABULARY = 64
TYPES = 2
WINDOW_TOKENS = 5
FIRST_SPECIAL = 52
"""Tokens from here on stand for images, sound and similar inputs; texts contain none of them."""

_RULES: tuple[tuple[str, Any], ...] = (
    (r"(.*_)?vocab(ulary)?_size(_per_layer_input)?", VOCABULARY),
    (r"type_vocab_size", TYPES),
    (r"(max|n)_(source_|target_)?position(s|_embeddings)|max_(seq|sequence)_len(gth)?|seq_length|n_ctx|"
     r"max_length", 128),
    (r"(hidden|embedding|embed|text_hidden|decoder_hidden|pooler_hidden|bottleneck)_(size|dim)|d_model|n_embd|dim|"
     r"emb_dim|model_dim|width|(word_)?embed_(proj_)?dim|hidden_dim|embed_dims|text_dim", "hidden"),
    (r".*(intermediate|ffn|feedforward|feed_forward|mlp|inner|ff)_?(size|dim|hidden_size|embed_dim)?s?|d_ff|d_inner|"
     r"(en|de)coder_ffn_dim|n_inner|hidden_dim_ffn|.*_ffn_dim", 48),
    (r"(.*_)?num_(hidden_)?layers|n_layers?|(en|de)coder_layers|num_(en|de)coder_layers|depth|num_blocks|"
     r"(en|de)coder_num_hidden_layers", "layers"),
    (r"(.*_)?num_(attention_)?heads|n_heads?|(en|de)coder_(num_)?attention_heads|(en|de)coder_heads", HEADS),
    (r"(.*_)?num_key_value_heads|num_kv_heads|n_head_kv|n_kv_heads|multi_query_group_num|"
     r"(en|de)coder_num_key_value_heads", "kv_heads"),
    (r"(.*_)?head_(dim|size)|d_kv|attention_head_(size|dim)|kv_channels|d_head", "head_dim"),
    (r"rotary_dim", 4),
    (r"q_lora_rank|kv_lora_rank|.*lora_rank|.*lora_dim", 16),
    (r"qk_nope_head_dim", 8), (r"qk_rope_head_dim", 4), (r"v_head_dim", 6), (r"qk_head_dim", 12),
    (r"sliding_window(_size)?|local_attention|attention_window_size|local_window_size", WINDOW_TOKENS),
    (r"attention_chunk_size", 7),
    (r"(num|n|moe_num)_(local_|routed_|total_)?experts|moe_num_experts", 4),
    (r"n_shared_experts|num_shared_experts|moe_num_shared_experts", 1),
    (r"num_experts_per_tok(en)?|moe_(top)?k|top_?k(_experts)?|router_top_k|moe_topk|num_selected_experts", 2),
    (r"n_group", 2), (r"topk_group", 1), (r"first_k_dense_replace", 1), (r"moe_layer_start_index", 1),
    (r"(mamba_)?(d_)?state_size|mamba_d_state|ssm_state_size", 8),
    (r"(mamba_)?n_groups|mamba_n_groups", 1), (r"mamba_n_heads|n_mamba_heads", 8),
    (r"image_size", 32), (r"patch_size", 16), (r"num_mel_bins", 16), (r"projection_dim", 24),
    (r"linear_(key|value)_head_dim", 8), (r"linear_num_(key|value)_heads", 4),
    (r"index_topk", 4), (r"index_head_dim", 8), (r"index_n_heads", 16),  # few heads give many scores of zero
    (r"index_block_size", 3), (r"index_topk_blocks", 2),
    (r"query_pre_attn_scalar", 8),
)  # fmt: skip

_NEVER_NONE = ("num_hidden_layers", "vocab_size", "sliding_window")

OTHER: dict[str, dict[str, Any]] = {
    "xmod": {"default_language": "en_XX"},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]], "window_size": 5, "num_layers": 2},
    "lfm2_moe": {"layer_types": ["full_attention", "conv"]},
    "lilt": {"hidden_size": 48},
    "gemma3n_text": {
        "num_kv_shared_layers": 1,
        "num_hidden_layers": 3,
        "activation_sparsity_pattern": None,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    },
    "musicgen_decoder": {"num_codebooks": 1},
    "bamba": {"attn_layer_indices": [1]},
    "granitemoehybrid": {"layer_types": ["linear_attention", "full_attention"]},
    "mamba2": {"num_heads": 16, "head_dim": 8, "n_groups": 2},
    "zamba": {"layers_block_type": ["linear_attention", "hybrid", "hybrid"], "num_hidden_layers": 3},
    "zamba2": {"layers_block_type": ["linear_attention", "hybrid"], "mamba_ngroups": 2, "n_mamba_heads": 2},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2, "expert_layer_offset": 1},
    "dbrx": {"attn_config": {"rope_theta": 10000.0, "clip_qkv": 8.0}},
    "reformer": {"axial_pos_embds": False},
    "layoutlmv3": {"coordinate_size": 6, "shape_size": 4},
}
"""Values by model type that do not follow from the field names. `...` keeps the published value of a field."""


def small(name: str, default: Any, fields: dict[str, Any], profile: dict[str, int]) -> Any:
    """Return a small value for a field, or None to keep its default."""
    if isinstance(default, float) and "drop" in name:
        return 0.0
    if isinstance(default, bool) or not (default is None or isinstance(default, int)):
        return None
    if (name.endswith(("_token_id", "_token_index", "_index")) and isinstance(default, int)) or name == "pad_token_id":
        return _special(name, default)
    if name == "head_dim" and "qk_rope_head_dim" in fields:
        return None if default is None else 4
    for pattern, value in _RULES:
        if re.fullmatch(pattern, name):
            if default is None and name not in _NEVER_NONE and "every" not in profile:
                return None
            if isinstance(value, str):
                value = {"layers": 2, "head_dim": HEAD_DIM, "hidden": HIDDEN, **profile}[value]
            if isinstance(default, int) and 0 <= default < value:
                return None
            return value
    return None


def _special(name: str, default: int | None) -> int | None:
    """Return a token id for a special token, outside of the ids that the cases draw.

    Ids of padding, begin and end are below the drawn ids, all others above them.
    """
    if default is None:
        return 0 if name == "pad_token_id" else None
    low_ids = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}
    if 0 <= default < 3 and name in low_ids:
        return None
    if name in low_ids:
        return low_ids[name]
    if not 0 <= default:
        return None
    return FIRST_SPECIAL + sum(map(ord, name)) % (VOCABULARY - FIRST_SPECIAL)
