"""Models with adapters of PEFT: which part attends, and which adapters work on one token at a time.

An adapter that only changes the linear layers of a model (LoRA and its kin) needs nothing over a ring: its gradient is
a sum over tokens, like that of any weight. Others look at whole texts, or add to the loss, and are refused.
Checked with PEFT 0.21.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any

from ringattn.errors import UnsupportedError

OF_ONE_TOKEN = frozenset({
    "LORA", "IA3", "LOHA", "LOKR", "OFT", "VERA", "LN_TUNING", "TRAINABLE_TOKENS",
})  # fmt: skip
"""Kinds of adapters that change what is made of each token by itself."""

_REASONS = {
    "ADALORA": "adds its regularization to every rank's loss, which counts it as often as there are ranks",
    "XLORA": "weighs its adapters by what a whole text gives",
    "ADAPTION_PROMPT": "attends to a prompt of its own inside of attention",
}


def base_of(model: Any) -> Any:
    """The model of transformers inside of a `PeftModel`; any other model as it is.

    Raises `UnsupportedError` for adapters that no ring computes.
    """
    peft = sys.modules.get("peft")
    if peft is None or not isinstance(model, peft.PeftModel | peft.PeftMixedModel):
        return model
    refuse_adapters(model)
    return model.get_base_model()


def refuse_adapters(model: Any) -> None:
    """Raise `UnsupportedError` for adapters, in `model.peft_config`, that do not work on one token at a time."""
    told = getattr(model, "peft_config", None)
    configs: Iterable[Any] = told.values() if isinstance(told, dict) else ()
    for config in configs:
        kind = getattr(config.peft_type, "value", str(config.peft_type))
        if getattr(config, "is_prompt_learning", False):
            raise UnsupportedError(
                f"PEFT's {kind} puts tokens of its own before those of the text, on every rank; take LoRA or another "
                "adapter of linear layers"
            )
        if kind not in OF_ONE_TOKEN:
            reason = _REASONS.get(kind, "was not compared with one process")
            raise UnsupportedError(f"PEFT's {kind} {reason}; take one of {', '.join(sorted(OF_ONE_TOKEN))}")
        if getattr(config, "alora_invocation_tokens", None):
            raise UnsupportedError(
                "alora_invocation_tokens: activated LoRA looks for these tokens in the texts, of which a rank has a "
                "part; leave them out"
            )
