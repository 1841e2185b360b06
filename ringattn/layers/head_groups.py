"""Less memory for attention: the heads of a layer in groups, of which one at a time has its tensors.

For each group, queries, keys and values are projected and the ring attends. Forward keeps the layer's input, and the
output and log-sum-exp of each group. Backward projects each group again, but the ring's forward pass does not run
again. So queries, keys, values, their gradients and the buffers of the ring exist for one group (head-wise chunks as in
Untied Ulysses, arXiv:2602.21196, here over any schedule).

Guarantees: values equal those of all heads at once, and gradients up to the rounding of sums over groups. An activation
checkpoint around the layer drops what forward keeps.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ringattn.attention import KeptResults
from ringattn.errors import InputError
from ringattn.gradients import once_differentiable
from ringattn.integers import whole_number
from ringattn.layers.tiled import AtForward, State, added, autocast_of, gradients_of

PRODUCT_ROWS = 4096
"""Rows of the outputs of all groups that are joined at a time for the output projection."""

Attention = Callable[[Tensor, int], Tensor]
"""The function of a group: from x (batch, tokens, dim) and the number of the group, the output of its heads,
(batch, tokens, heads of a group * head_dim)."""


def check_head_groups(groups: object, kv_heads: int, name: str = "head_groups") -> int:
    """Return the number of groups. Raises `InputError` unless it divides the K/V heads."""
    number = whole_number(groups, f"{name} must be a number of groups of K/V heads, at least 1", 1)
    if kv_heads % number:
        raise InputError(f"{name}={number}: must divide the {kv_heads} K/V heads of a rank")
    return number


@dataclass(frozen=True)
class HeadGroups:
    """The function of a group of heads, and the number of groups.

    `state`: what the function reads in addition to its arguments. Backward raises if something else than the function
    has changed it.
    """

    attention: Attention
    groups: int
    state: State = dict


@torch.compiler.disable
def in_head_groups(
    heads: HeadGroups, x: Tensor, weights: Sequence[Tensor], out_weight: Tensor, out_bias: Tensor | None = None
) -> Tensor:
    """Apply attention group by group, and the output projection. A collective call, like its backward pass.

    Args:
        heads: The function. Its only gradients are those of x and `weights`, and it draws no random numbers.
        x: The input of the layer.
        weights: Every weight that `heads.attention` reads, also those that are frozen.
        out_weight: The weight of the output projection, whose columns are those of the groups in order.
        out_bias: Its bias, or None.

    Shape:
        x: (batch, tokens, dim)
        out_weight: (model, heads * head_dim)
        out_bias: (model,)

    Returns:
        (batch, tokens, model).

    Raises:
        RingError: What the function raises.
        RuntimeError: In backward, if a weight has changed in place since forward, or `heads.state` returns something
            else.
    """
    trained = tuple(weight for weight in weights if weight.requires_grad)
    inputs = (x, out_weight, out_bias, *trained)
    if not torch.is_grad_enabled() or not any(tensor is not None and tensor.requires_grad for tensor in inputs):
        # If only other ranks need gradients, autograd runs the backward passes of the groups in the order of `backward`
        # below.
        return _product([heads.attention(x, group) for group in range(heads.groups)], out_weight, out_bias)
    out: Tensor = _Grouped.apply(_Call(heads, trained, AtForward(weights, heads.state), x), *inputs)
    return out


def _product(outs: Sequence[Tensor], weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return the output projection of the joined outputs, which exist for `PRODUCT_ROWS` rows at a time."""
    shape, parts = outs[0].shape, [out.flatten(0, -2) for out in outs]
    weight, bias = weight.to(outs[0].dtype), None if bias is None else bias.to(outs[0].dtype)
    count = len(parts[0])
    tiles = [slice(start, start + PRODUCT_ROWS) for start in range(0, max(1, count), PRODUCT_ROWS)]
    if torch.is_grad_enabled() or len(tiles) == 1:
        return F.linear(torch.cat(parts, -1), weight, bias).view(*shape[:-1], len(weight))
    product = parts[0].new_empty(count, len(weight))
    for tile in tiles:
        product[tile] = F.linear(torch.cat([part[tile] for part in parts], -1), weight, bias)
    return product.view(*shape[:-1], len(weight))


class _Call:
    """One call of `in_head_groups`: its function, and the calls of each group."""

    def __init__(self, heads: HeadGroups, trained: tuple[Tensor, ...], at_forward: AtForward, x: Tensor) -> None:
        self.heads, self.trained, self.at_forward = heads, trained, at_forward
        self.autocast = autocast_of(x.device.type)
        self.results = [KeptResults() for _ in range(heads.groups)]

    def run(self, x: Tensor, group: int) -> Tensor:
        """Return the output of a group."""
        with self.autocast():
            return self.heads.attention(x, group)


class _Grouped(torch.autograd.Function):
    """Attention in groups of heads with the output projection, and its backward."""

    @staticmethod
    def forward(
        ctx: Any, call: _Call, x: Tensor, out_weight: Tensor, out_bias: Tensor | None, *weights: Tensor
    ) -> Tensor:
        outs = []
        for group, results in enumerate(call.results):
            with results.keeping():
                outs.append(call.run(x, group))
        call.at_forward.leave_out_own_changes()
        kept = [tensor for results in call.results for tensor in results.tensors]
        for results in call.results:
            results.tensors = []
        ctx.call = call
        ctx.save_for_backward(x, out_weight, *kept)
        return _product(outs, out_weight, out_bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        call: _Call = ctx.call
        call.at_forward.refuse_changed()
        needs_x, needs_out, needs_bias = ctx.needs_input_grad[1:4]
        x, out_weight, *kept = ctx.saved_tensors
        groups, columns = call.heads.groups, out_weight.shape[1] // call.heads.groups
        dx: Tensor | None = None
        dout_weight = torch.empty_like(out_weight) if needs_out else None
        sums: list[Tensor | None] = [None] * len(call.trained)
        rows = grad.flatten(0, -2)
        # Without another input that has a gradient, x joins this rank in the backward passes of the ring.
        reaches_x = needs_x or not call.trained
        for group in reversed(range(groups)):
            results, part = call.results[group], slice(group * columns, (group + 1) * columns)
            count = 3 * len(results.calls)
            results.tensors = [kept.pop() for _ in range(count)][::-1]
            shared = x.detach().requires_grad_(reaches_x)
            with results.returning():
                out = call.run(shared, group)
            results.tensors = []
            if dout_weight is not None:
                dout_weight[:, part] = rows.T @ out.detach().flatten(0, -2)
            inputs = [shared, *call.trained] if reaches_x else list(call.trained)
            grads = gradients_of(out, inputs, grad @ out_weight[:, part].to(grad.dtype))
            del out, shared
            if reaches_x:
                dx_of_group, *grads = grads
                if needs_x:
                    assert dx_of_group is not None
                    dx = dx_of_group if dx is None else dx.add_(dx_of_group)
                del dx_of_group
            sums = [added(total, dweight) for total, dweight in zip(sums, grads, strict=True)]
        pairs = zip(sums, call.trained, strict=True)
        dout_bias = rows.sum(0) if needs_bias else None
        dweights = (None if total is None else total.to(weight.dtype) for total, weight in pairs)
        return None, dx, dout_weight, dout_bias, *dweights
