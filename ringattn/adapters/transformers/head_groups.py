"""Attention of transformers models in groups of heads: the option `prepare(model, head_groups=...)`.

The forward of an attention module runs once for each group, on a view of the module. The projections of the view are
slices of those of the module, and its output projection returns its input. `layers.head_groups` joins the outputs,
applies the output projection, and runs the groups again in backward. With tensor parallelism, a rank divides its own
heads into groups, and the sums over ranks are those of all heads: one in forward and one in backward.

Guarantees: loss and gradients equal those without the option up to rounding. A module whose parameters are not known to
belong to single heads is refused by name when the model is prepared, and weights that are sharded in a way that is not
known when the module is called.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ringattn.adapters.transformers.calls import PART
from ringattn.adapters.transformers.module_state import module_state, refuse_updates
from ringattn.adapters.transformers.sharded_weights import (
    TensorParallel,
    gather_for,
    local,
    refuse_extended,
    refuse_hidden,
    refuse_partitioned,
    tensor_parallel_of,
)
from ringattn.errors import InputError, UnsupportedError
from ringattn.layers.head_groups import HeadGroups, check_head_groups, in_head_groups

PROJECTIONS = ("q_proj", "k_proj", "v_proj")
OUTPUT = "o_proj"
NORMS = ("q_norm", "k_norm")
ATTENTION = ("self_attn", "attention", "attn")
"""Names of the attention module in decoder layers of transformers."""
NAME = "ringattn_head_groups"
"""The name of the part of an attention module that attends in groups."""


def grouped_attention(model: Any, groups: int) -> list[GroupedAttention]:
    """Return the forwards in `groups` groups of all attention modules of the text part. Changes nothing.

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
        heads, parallel = _kv_heads(module), _tensor_parallel(module)
        ranks = 1 if parallel is None else parallel.mesh.size()
        if heads % ranks:
            raise UnsupportedError(
                f"head_groups: tensor parallelism shards {heads} K/V heads over {ranks} ranks unevenly; leave "
                "head_groups out"
            )
        check_head_groups(groups, heads // ranks)
    return [GroupedAttention(module, groups) for module in modules]


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
        shape = getattr(parameter, "ds_shape", parameter.shape)  # ZeRO 3 keeps the shape of a partitioned weight there
        is_norm = name.partition(".")[0] in NORMS and shape == (head_dim,)
        if name not in of_projections and not is_norm:
            raise refused(f"has the parameter {name}, which may not belong to single heads")
    q, k, v, out = (getattr(module, name) for name in (*PROJECTIONS, OUTPUT))
    if not head_dim or q.out_features != out.in_features or k.out_features != v.out_features:
        raise refused("projects queries, keys and values to other widths than those of its heads")
    return int(k.out_features) // int(head_dim)


def _refuse_dropout(module: nn.Module) -> None:
    """Raise `UnsupportedError` if the attention module or a part of it draws random numbers in training."""
    rates: dict[str, Any] = {}
    for path, part in module.named_modules():
        if not part.training:
            continue
        # transformers keeps rates as attributes for F.dropout and for functions of attention.
        names = [name for name in vars(part) if "drop" in name.lower()]
        if isinstance(part, nn.Dropout):
            names.append("p")
        rates |= {f"{path}.{name}" if path else name: getattr(part, name) for name in names}
    for name, rate in rates.items():
        if not isinstance(rate, (int, float)) or isinstance(rate, bool) or not rate:
            continue
        if name == "attention_dropout":
            raise UnsupportedError(
                "head_groups: attention dropout numbers the heads of a call, and a group counts its heads from 0; set "
                "attention_dropout=0.0"
            )
        raise UnsupportedError(
            f"head_groups: {type(module).__name__} has {name}={rate}, but groups would draw other random numbers than "
            f"all heads at once, and others again in backward; set {name}=0.0, or leave head_groups out"
        )


def _tensor_parallel(module: Any) -> TensorParallel | None:
    return tensor_parallel_of([getattr(module, name) for name in PROJECTIONS], getattr(module, OUTPUT))


class GroupedAttention(nn.Module):
    """The forward of an attention module, in groups of heads.

    It is a part of that module, without weights. ZeRO 3 gathers the weights of the attention module for calls of this
    one, because nothing calls the projections.
    """

    def __init__(self, module: nn.Module, groups: int) -> None:
        super().__init__()
        self.whole = (module,)  # not as a part of this module, because this one is a part of it
        self.groups = groups

    def install(self) -> None:
        """Replace the forward of the attention module."""
        (module,) = self.whole
        module.add_module(NAME, self)
        module.forward = self.run

    @torch.compiler.disable
    def run(self, hidden_states: Tensor, *others: Any, **named: Any) -> Any:
        """Return the result of the attention module."""
        gather_for(self, self.whole[0].parameters())
        return self(hidden_states, *others, **named)

    def forward(self, hidden_states: Tensor, *others: Any, **named: Any) -> tuple[Tensor, None]:
        """Return the output of the attention module, (batch, tokens, dim), and None for the weights."""
        module: Any = self.whole[0]
        if torch.is_grad_enabled() and named.get("past_key_values") is not None:
            raise InputError("head_groups: a cache keeps the keys and values of all heads; call with use_cache=False")
        if named.get("past_key_values") is not None:  # without gradients, nothing is kept for a backward pass
            result: tuple[Tensor, None] = type(module).forward(module, hidden_states, *others, **named)
            return result
        _refuse_dropout(module)
        refuse_partitioned(module, "head_groups")
        refuse_hidden(module, "head_groups", frozen=True)
        parallel = _tensor_parallel(module)
        if parallel is None:
            refuse_extended([getattr(module, name) for name in (*PROJECTIONS, OUTPUT)], "head_groups")
        weights = {name: local(weight) for name, weight in module.named_parameters(remove_duplicate=False)}
        norms = [weight for name, weight in weights.items() if name.partition(".")[0] in NORMS]
        projections = {name: (weights[f"{name}.weight"], weights.get(f"{name}.bias")) for name in PROJECTIONS}
        out_weight, out_bias = weights[f"{OUTPUT}.weight"], weights.get(f"{OUTPUT}.bias")

        def attention(x: Tensor, group: int) -> Tensor:
            out: Tensor = type(module).forward(self.view(projections, group), x, *others, **named)[0]
            return out

        inside = [*norms, *(tensor for pair in projections.values() for tensor in pair if tensor is not None)]
        heads = HeadGroups(attention, self.groups, partial(module_state, module))
        with refuse_updates(module, "head_groups"):
            if parallel is None:
                return in_head_groups(heads, hidden_states, inside, out_weight, out_bias), None
            out = parallel.summed(in_head_groups(heads, parallel.replicated(hidden_states), inside, out_weight))
        return out if out_bias is None else out + out_bias.to(out.dtype), None

    def view(self, projections: dict[str, tuple[Tensor, Tensor | None]], group: int) -> Any:
        """Return a copy of the module that has only the heads of a group, of projections with these tensors."""
        module = self.whole[0]
        view = object.__new__(type(module))
        vars(view).update(vars(module))
        sliced: dict[str, Any] = {name: self._slice(*tensors, group) for name, tensors in projections.items()}
        vars(view)["_modules"] = {**module._modules, **sliced, OUTPUT: lambda x: x}
        return view

    def _slice(self, weight: Tensor, bias: Tensor | None, group: int) -> Callable[[Tensor], Tensor]:
        """Return the projection to the heads of a group."""

        def project(x: Tensor) -> Tensor:
            part = None if bias is None else bias.chunk(self.groups)[group]
            return F.linear(x, weight.chunk(self.groups)[group], part)

        return project
