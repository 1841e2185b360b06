"""The router loss of mixtures of experts, from the tokens of all ranks.

The load balancing loss of transformers is the number of experts times the sum over experts of f * P. f is the fraction
of tokens that chose an expert, and P its mean probability, both over all tokens of the batch and all layers. Fractions
have no gradient, so with f and the number of tokens summed over ranks, the loss is a sum of one part for each rank.

Guarantees: the parts of all ranks add up to the loss of one process, and so do their gradients. A model that computes
its router loss in another way is refused.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from functools import cache, wraps
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from ringattn.adapters.host_versions import source_digest
from ringattn.adapters.transformers.calls import ROUTER_LOSS, ModelCall, current_call
from ringattn.adapters.transformers.token_labels import mean_scale

_FUNCTION = "load_balancing_loss_func"
_REVIEWED = frozenset({"78363a4c", "135a09ab", "7feb38ae", "4e8cfb13", "470dfc6d", "0ed5651c"})
"""Digests of the function in transformers 5.23 to 5.24, 5.16 to 5.22, 5.0 to 5.15, and of its three forms in 4.57.

They differ in the order of sums and in memory only.
"""

_PART = "ringattn_part_of_router_loss"
"""The attribute that marks a function of transformers as replaced."""


def replace_router_loss(model: Any) -> None:
    """Let the forward of a model compute its router loss from the tokens of all ranks, if the function was reviewed.

    Every module of transformers defines the function, and its models read it as a global name. So the global is
    replaced. Outside calls over a ring, the replacement calls the function.
    """
    scopes = list(_scopes(model))
    if scopes:  # TRL's fused head computes the router loss of every model with the function of Mixtral
        _replace(vars(import_module("transformers.models.mixtral.modeling_mixtral")))
    were_reviewed = [_replace(scope) for scope in scopes]
    setattr(model, ROUTER_LOSS, any(were_reviewed))


def _scopes(model: Any) -> Iterator[dict[str, Any]]:
    """Yield the global names of each function that may be the model's forward and computes a router loss."""
    # Liger may have replaced the forward of the model or of its class.
    forwards = [model.forward, *(vars(kind)["forward"] for kind in type(model).__mro__ if "forward" in vars(kind))]
    for forward in map(inspect.unwrap, forwards):
        function = getattr(forward, "__func__", forward)
        if _FUNCTION in getattr(getattr(function, "__code__", None), "co_names", ()):
            yield function.__globals__


def _replace(scope: dict[str, Any]) -> bool:
    """Replace the function among these global names. Return whether it was reviewed."""
    function = scope[_FUNCTION]
    if hasattr(function, _PART):
        return True
    if _digest(function) not in _REVIEWED:
        return False
    scope[_FUNCTION] = _over_ring(function)
    return True


@cache
def _digest(function: Any) -> str:
    try:
        return source_digest(function)
    except (OSError, TypeError):
        return ""


def _over_ring(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that computes this rank's part in a call over a ring, and otherwise calls `function`."""

    @wraps(function)
    @torch.compiler.disable
    def balance(gate_logits: Any, num_experts: Any = None, top_k: int = 2, attention_mask: Tensor | None = None) -> Any:
        call = current_call()
        if call is None or call.seq.ring.world_size == 1 or not isinstance(gate_logits, tuple):
            return function(gate_logits, num_experts, top_k, attention_mask)
        loss = _part(call, gate_logits, num_experts, top_k, attention_mask)
        call.router_losses.append(loss)
        return loss

    setattr(balance, _PART, True)
    return balance


def _part(
    call: ModelCall, gate_logits: tuple[Tensor, ...], experts: int, top_k: int, attention_mask: Tensor | None
) -> Tensor:
    """Return this rank's part of the router loss. A collective call.

    `gate_logits`: (rows * tokens, experts) for each layer. `attention_mask`: (rows, tokens), 0 for padding.
    """
    device, tokens = gate_logits[0].device, gate_logits[0].shape[0]
    mask = torch.ones(tokens, device=device) if attention_mask is None else attention_mask.reshape(-1).to(device)
    mask = mask.double()  # float64 counts the tokens of many layers exactly
    counts = torch.zeros(experts + 1, dtype=torch.float64, device=device)
    probabilities = torch.zeros((), device=device)
    for logits in gate_logits:
        weights = logits.to(device).softmax(-1)
        chosen = weights.topk(top_k, -1).indices
        counts[:-1].index_add_(0, chosen.flatten(), mask.repeat_interleave(top_k))
        counts[-1] += mask.sum()
        weights = weights.to(torch.promote_types(weights.dtype, torch.float32))
        probabilities = probabilities + (weights * mask[:, None].to(weights.dtype)).sum(0)
    call.seq.ring.all_reduce([counts])
    factors = counts[:-1] * (experts * mean_scale() / counts[-1] ** 2)
    return (factors.to(probabilities.dtype) * probabilities).sum()
