"""Attention of transformers models in groups of heads: the option `prepare(model, head_groups=...)`.

The forward of an attention module runs once for each group, on a view of the module. The projections of the view are
slices of those of the module, and its output projection returns its input. `layers.head_groups` joins the outputs,
applies the output projection, and runs the groups again in backward.

Guarantees: loss and gradients equal those without the option up to rounding. A module whose parameters are not known to
belong to single heads is refused by name when the model is prepared.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ringattn.adapters.transformers.calls import PART
from ringattn.errors import InputError, UnsupportedError
from ringattn.layers.head_groups import HeadGroups, check_head_groups, in_head_groups

PROJECTIONS = ("q_proj", "k_proj", "v_proj")
OUTPUT = "o_proj"
NORMS = ("q_norm", "k_norm")
ATTENTION = ("self_attn", "attention", "attn")
"""Names of the attention module in decoder layers of transformers."""


def grouped_attention(model: Any, groups: int) -> list[tuple[nn.Module, GroupedAttention]]:
    """Return the attention modules of the text part, each with its forward in `groups` groups. Changes nothing.

    Raises `InputError` if `groups` does not divide the K/V heads, and `UnsupportedError` for a module that cannot be
    divided.
    """
    from transformers.modeling_layers import GradientCheckpointingLayer

    text = model.get_decoder() if hasattr(model, "get_decoder") else model
    modules = []
    for layer in text.modules():
        if not isinstance(layer, GradientCheckpointingLayer) or getattr(layer, PART, None) == "tower":
            continue
        module = next((getattr(layer, name) for name in ATTENTION if hasattr(layer, name)), None)
        if module is None:
            raise UnsupportedError(
                f"head_groups: {type(layer).__name__} has no module named {' or '.join(ATTENTION)}; leave it out"
            )
        modules.append(module)
    if not modules:
        raise UnsupportedError(f"head_groups: {type(model).__name__} has no layers that transformers can checkpoint")
    for module in modules:
        check_head_groups(groups, _kv_heads(module))
    return [(module, GroupedAttention(module, groups)) for module in modules]


def _kv_heads(module: Any) -> int:
    """Return the K/V heads of an attention module. Raises `UnsupportedError` unless it can be divided by heads."""

    def refused(reason: str) -> UnsupportedError:
        return UnsupportedError(f"head_groups: {type(module).__name__} {reason}; leave head_groups out")

    for name in (*PROJECTIONS, OUTPUT):
        if type(getattr(module, name, None)) is not nn.Linear:
            raise refused(f"has no plain nn.Linear {name}, which could be divided by heads")
    if "forward" in vars(module):
        raise refused("has a forward that was replaced")
    head_dim = getattr(module, "head_dim", None)
    of_projections = {f"{name}.{kind}" for name in (*PROJECTIONS, OUTPUT) for kind in ("weight", "bias")}
    for name, parameter in module.named_parameters():
        is_norm = name.partition(".")[0] in NORMS and parameter.shape == (head_dim,)
        if name not in of_projections and not is_norm:
            raise refused(f"has the parameter {name}, which may not belong to single heads")
    q, k, v, out = (getattr(module, name) for name in (*PROJECTIONS, OUTPUT))
    if not head_dim or q.out_features != out.in_features or k.out_features != v.out_features:
        raise refused("projects queries, keys and values to other widths than those of its heads")
    return int(k.out_features) // int(head_dim)


class GroupedAttention:
    """The forward of an attention module, in groups of heads."""

    def __init__(self, module: Any, groups: int) -> None:
        self.module, self.groups = module, groups

    def __call__(self, hidden_states: Tensor, *others: Any, **named: Any) -> tuple[Tensor, None]:
        """Return the output of the module, (batch, tokens, dim), and None for the weights."""
        module = self.module
        if torch.is_grad_enabled() and named.get("past_key_values") is not None:
            raise InputError("head_groups: a cache keeps the keys and values of all heads; call with use_cache=False")
        if named.get("past_key_values") is not None:  # without gradients, nothing is kept for a backward pass
            result: tuple[Tensor, None] = type(module).forward(module, hidden_states, *others, **named)
            return result
        if module.training and getattr(module, "attention_dropout", 0.0):
            raise UnsupportedError(
                "head_groups: attention dropout numbers the heads of a call, and a group counts its heads from 0; set "
                "attention_dropout=0.0"
            )
        weights = dict(module.named_parameters())
        if any(isinstance(weight, DTensor) or hasattr(weight, "ds_id") for weight in weights.values()):
            raise UnsupportedError(
                "head_groups: the projections are sharded by tensor parallelism or DeepSpeed's ZeRO 3; leave "
                "head_groups out, or shard weights by FSDP2 or ZeRO 2"
            )
        output = getattr(module, OUTPUT)

        def attention(x: Tensor, group: int) -> Tensor:
            out: Tensor = type(module).forward(self.view(group), x, *others, **named)[0]
            return out

        inside = [weight for name, weight in weights.items() if name.partition(".")[0] != OUTPUT]
        heads = HeadGroups(attention, self.groups)
        return in_head_groups(heads, hidden_states, inside, output.weight, output.bias), None

    def view(self, group: int) -> Any:
        """Return a copy of the module, with the same tensors, that has only the heads of a group."""
        module = self.module
        view = object.__new__(type(module))
        vars(view).update(vars(module))
        sliced: dict[str, Any] = {name: self._slice(getattr(module, name), group) for name in PROJECTIONS}
        vars(view)["_modules"] = {**module._modules, **sliced, OUTPUT: lambda x: x}
        return view

    def _slice(self, projection: nn.Linear, group: int) -> Callable[[Tensor], Tensor]:
        """Return the projection to the heads of a group."""

        def project(x: Tensor) -> Tensor:
            bias = projection.bias
            part = None if bias is None else bias.chunk(self.groups)[group]
            return F.linear(x, projection.weight.chunk(self.groups)[group], part)

        return project
