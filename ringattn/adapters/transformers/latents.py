"""Multi-head latent attention (MLA) of transformers models: latents travel between ranks, and not keys of all heads.

These models expand their latents in `expand_kv` just before attention. `keep_latents` replaces that method on a module,
so that the attention function receives the latents and decides who expands them.
"""

from __future__ import annotations

from functools import partial
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ringattn.adapters.attend import UNTRACED, as_autocast
from ringattn.adapters.host_versions import source_digest
from ringattn.sequence import Sequence

EXPAND_KV = "1112ea4d"
"""The digest of the reviewed `expand_kv`, which all models with this method share."""
_LATENTS = "_ringattn_latents"


def keep_latents(model: nn.Module) -> None:
    """Make the modules with latents pass them to the attention function. Idempotent.

    Left out are modules whose `expand_kv` is not the reviewed one, and those whose projection is not a plain linear
    layer (for example one with LoRA).
    """
    for module in model.modules():
        expand = getattr(type(module), "expand_kv", None)
        # A method that was replaced already, by this function or by the user, is left as it is.
        is_original = getattr(getattr(module, "expand_kv", None), "__func__", None) is expand
        if expand is None or not is_original:
            continue
        projection: Any = getattr(module, "kv_b_proj", None)
        if type(projection) is nn.Linear and projection.bias is None and source_digest(expand) == EXPAND_KV:
            vars(module)["expand_kv"] = MethodType(expand_kv, module)


def expand_kv(module: Any, latents: Tensor, rotary: Tensor) -> tuple[Tensor, Tensor]:
    """Return rotary keys and latents in place of keys and values, and mark them for the attention function."""
    if module.config._attn_implementation != "ringattn":
        return type(module).expand_kv(module, latents, rotary)
    vars(module)[_LATENTS] = latents
    return rotary, latents


def has_latents(module: nn.Module, value: Tensor) -> bool:
    """Return whether `value`, which the attention function received, holds latents. Forgets the mark of the module."""
    return vars(module).pop(_LATENTS, None) is value


def expanded(module: Any, rotary: Tensor, latents: Tensor) -> tuple[Tensor, Tensor]:
    """Return the keys and values that the model itself computes."""
    return type(module).expand_kv(module, latents, rotary)


def is_sharded(module: Any) -> bool:
    """Return whether tensor parallelism shards the weights that expand latents: then the model expands them."""
    return isinstance(module.kv_b_proj.weight, DTensor)


def latent_attention(module: Any) -> Any:
    """Return a function with the parameters of `attend`, whose k and v are rotary keys and latents of one head."""
    return partial(_attend, module)


@torch.compiler.disable(reason=UNTRACED)
def _attend(module: Any, seq: Sequence, q: Tensor, rotary: Tensor, latents: Tensor, **options: Any) -> Tensor:
    weight = as_autocast(module.kv_b_proj.weight).unflatten(0, (q.shape[2], -1))
    w_k, w_v = weight.split([module.qk_nope_head_dim, module.v_head_dim], 1)
    return seq.ring.latent_attention(as_autocast(q), rotary[:, :, 0], latents[:, :, 0], w_k, w_v, seq, **options)
