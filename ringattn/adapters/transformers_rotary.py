"""Rotary embeddings whose frequencies depend on the length of the text, `dynamic` and `longrope`, on a part of it.

transformers takes the greatest of the positions that a rotary module gets as the length, and a rank has only its own.
So under a sequence each gets one position more, the greatest of all ranks, and its cosines are dropped again.
Checked with transformers 5.23.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor, nn

from ringattn.adapters.alike import refused_by_all
from ringattn.adapters.transformers_calls import under_way
from ringattn.adapters.transformers_checks import depends_on_length
from ringattn.adapters.transformers_towers import PART
from ringattn.errors import InputError

USED = "ringattn_rotary_used"
"""Marks a module that has chosen frequencies by a sequence of several ranks."""


def watch_rotary(model: nn.Module) -> None:
    """Let the rotary modules of a model's text choose by the whole length from now on."""
    for module in model.modules():
        if getattr(module, PART, None) == "tower" or not depends_on_length(getattr(module, "rope_type", None)):
            continue
        if "position_ids" in inspect.signature(module.forward).parameters:
            module.register_forward_pre_hook(_with_the_last, with_kwargs=True)
            module.register_forward_hook(_without_it)


@torch.compiler.disable
def _with_the_last(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if torch._C._current_graph_task_id() != -1:
        if getattr(module, USED, False):
            raise InputError(
                f"backward computes {type(module).__name__} again, which chose its frequencies by the length of a "
                "whole sequence; checkpoint layers, as gradient_checkpointing_enable does, and not the whole model"
            )
        return None
    if (call := under_way()) is None:
        return None
    bound = inspect.signature(module.forward).bind(*args, **kwargs)
    ids: Tensor = bound.arguments["position_ids"]
    with refused_by_all(call.seq.ring):
        if ids.shape[-1] != call.seq.counts[call.seq.ring.rank]:
            raise InputError(
                f"{type(module).__name__} got positions {tuple(ids.shape)}, not those of this rank's tokens"
            )
    last = call.seq.gather(ids, dim=ids.dim() - 1).max()
    bound.arguments["position_ids"] = torch.cat([ids, last.expand(*ids.shape[:-1], 1)], -1)
    setattr(module, USED, True)
    call.has_chosen = True
    return bound.args, bound.kwargs


@torch.compiler.disable
def _without_it(module: nn.Module, args: tuple[Any, ...], out: Any) -> Any:
    if torch._C._current_graph_task_id() != -1 or under_way() is None:
        return None
    return tuple(x[..., :-1, :] for x in out) if isinstance(out, tuple) else out[..., :-1, :]
