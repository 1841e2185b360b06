"""Small encoder-decoders of transformers, one for each family that the adapter supports."""

from __future__ import annotations

from typing import Any

import transformers

from tests.adapters.models import filled

BART_OPTIONS = {"vocab_size": 64, "d_model": 32, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 4,
      "decoder_attention_heads": 4, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32, "max_position_embeddings": 64,
      "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1, "dropout": 0.0,
      "attention_dropout": 0.0, "activation_dropout": 0.0, "encoder_layerdrop": 0.0, "decoder_layerdrop": 0.0,
      "scale_embedding": True}  # fmt: skip
T5_OPTIONS = {"vocab_size": 64, "d_model": 32, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_heads": 4,
       "dropout_rate": 0.0, "relative_attention_num_buckets": 8, "relative_attention_max_distance": 12,
       "pad_token_id": 0, "decoder_start_token_id": 0}  # fmt: skip
WHISPER_OPTIONS = {"num_mel_bins": 8, "max_source_positions": 20, "max_target_positions": 64}
LED_OPTIONS = {**{name: BART_OPTIONS[name] for name in BART_OPTIONS if name != "max_position_embeddings"},
        "attention_window": 4, "max_encoder_position_embeddings": 64,
        "max_decoder_position_embeddings": 64}  # fmt: skip
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "BartForConditionalGeneration": ("BartConfig", BART_OPTIONS),
    "BlenderbotForConditionalGeneration": ("BlenderbotConfig", BART_OPTIONS),
    "BlenderbotSmallForConditionalGeneration": ("BlenderbotSmallConfig", BART_OPTIONS),
    "M2M100ForConditionalGeneration": ("M2M100Config", BART_OPTIONS),
    "MarianMTModel": ("MarianConfig", BART_OPTIONS),
    "MBartForConditionalGeneration": ("MBartConfig", BART_OPTIONS),
    "MT5ForConditionalGeneration": ("MT5Config", T5_OPTIONS),
    "PegasusForConditionalGeneration": ("PegasusConfig", BART_OPTIONS),
    "PLBartForConditionalGeneration": ("PLBartConfig", BART_OPTIONS),
    "T5ForConditionalGeneration": ("T5Config", T5_OPTIONS),
    "UMT5ForConditionalGeneration": ("UMT5Config", T5_OPTIONS),
    "WhisperForConditionalGeneration": ("WhisperConfig", {**BART_OPTIONS, **WHISPER_OPTIONS}),
}
"""Classes with the class of their configuration and its options."""


def build(of: str, **options: Any) -> Any:
    """Return a small model of a class with random float64 weights."""
    kind, defaults = MODELS[of]
    config = getattr(transformers, kind)(**{**defaults, **options})
    config._attn_implementation = "eager"
    return filled(getattr(transformers, of)(config))
