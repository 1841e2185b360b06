"""A function of single tokens over tiles of them, so that what it computes in between exists for one tile at a time.

Forward keeps the function's input alone; backward computes each tile again, and writes the input's gradient in place
and sums those of the weights in the accumulator's dtype. So a feed-forward of any length takes the memory of a tile
(TiledMLP of Arctic Long Sequence Training, arXiv:2506.13996), and so does the loss with its logits.
Guarantees: the function's values and gradients up to rounding; random numbers that it draws are the same in backward.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ringattn.engine.softmax_state import accumulator_dtype

Function = Callable[..., Tensor]


@dataclass(frozen=True)
class Tiling:
    """What is computed, over how many rows at once; `summed`: a number of each tile, else rows of it.

    `draws`: whether it may draw random numbers.
    """

    function: Function
    tile_rows: int
    summed: bool = False
    draws: bool = False


@torch.compiler.disable
def tiled(tiling: Tiling, x: Tensor, weights: Sequence[Tensor], others: Sequence[Tensor] = ()) -> Tensor:
    """`tiling.function` of the rows of `x`, tile by tile.

    Args:
        tiling: The function; it takes (rows, dim) of x, and as many rows of each of `others`. Of each row it makes one,
            or of all of them one number.
        x: Any leading dimensions are rows.
        weights: Every tensor beside x through which gradients flow, as they are while the function runs.
        others: Integers, such as labels, of as many rows.

    Shape:
        x: (..., dim)
        others: (...)

    Returns:
        (..., of one row), or the sum of the tiles' numbers.

    Raises:
        What the function raises.
    """
    wanted = tuple(weight for weight in weights if weight.requires_grad)
    call = _Call(tiling, tuple(other.flatten() for other in others), wanted, x.requires_grad)
    # Saved by an operation of its own, before the function runs: where a checkpoint computes all this again, it stops
    # behind the last thing saved, and so does not run the function a time more.
    rows = _Keep.apply(call, x.flatten(0, -2), *wanted)
    out: Tensor = _Tiled.apply(call, rows, *wanted)
    return out if tiling.summed else out.view(*x.shape[:-1], *out.shape[1:])


class _Call:
    """One call: what is computed, of what beside the rows, and `kept`, the context that saves these.

    Weights are not saved, for hooks may give back copies, which the function does not use; that they are still the same
    is checked as autograd does.
    """

    def __init__(self, tiling: Tiling, others: tuple[Tensor, ...], weights: tuple[Tensor, ...], learns: bool) -> None:
        self.tiling, self.others, self.weights, self.learns = tiling, others, weights, learns
        self.versions = [weight._version for weight in weights]
        self.kept: Any = None
        self.around: _Around | None = None

    def tiles(self, rows: Tensor) -> list[slice]:
        """Of so many rows; one where there are none, so that the function runs on every rank."""
        step = self.tiling.tile_rows
        return [slice(start, start + step) for start in range(0, max(1, len(rows)), step)]

    def of(self, part: Tensor, tile: slice) -> Tensor:
        """The function of a tile."""
        return self.tiling.function(part, *(other[tile] for other in self.others))


class _Keep(torch.autograd.Function):
    """Saves the rows for `_Tiled`."""

    @staticmethod
    def forward(ctx: Any, call: _Call, rows: Tensor, *weights: Tensor) -> Tensor:
        ctx.save_for_backward(rows)
        call.kept = ctx
        return rows.view_as(rows)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return (None, grad, *(None for _ in ctx.needs_input_grad[2:]))


class _Tiled(torch.autograd.Function):
    """The function over the tiles, and its backward."""

    @staticmethod
    def forward(ctx: Any, call: _Call, rows: Tensor, *weights: Tensor) -> Tensor:
        ctx.call = call
        call.around = _Around.of(rows, call.tiling.draws)
        with call.around.autocast():
            return _forward(call, rows)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        call: _Call = ctx.call
        if [weight._version for weight in call.weights] != call.versions:
            raise RuntimeError("a weight has changed in place between forward and backward of a tiled function")
        (rows,) = call.kept.saved_tensors
        into = torch.empty_like(rows) if call.learns else None
        sums: list[Tensor | None] = [None] * len(call.weights)
        assert call.around is not None
        with call.around.again():
            for tile in call.tiles(rows):
                part = rows[tile].detach().requires_grad_(call.learns)
                with torch.enable_grad(), call.around.autocast():
                    out = call.of(part, tile)
                found = _gradients(out, [part, *call.weights] if call.learns else list(call.weights),
                                   grad if call.tiling.summed else grad[tile])  # fmt: skip
                if into is not None:
                    into[tile] = 0 if found[0] is None else found[0]
                    found = found[1:]
                del out, part
                sums = [_added(total, one) for total, one in zip(sums, found, strict=True)]
        given = [None if one is None else one.to(weight.dtype) for one, weight in zip(sums, call.weights, strict=True)]
        return None, into, *given


def _gradients(out: Tensor, inputs: list[Tensor], grad: Tensor) -> list[Tensor | None]:
    """Those of a tile; None for what it does not depend on, as a loss without labels on nothing."""
    if not out.requires_grad:
        return [None] * len(inputs)
    return list(torch.autograd.grad(out, inputs, grad, allow_unused=True))


def _forward(call: _Call, rows: Tensor) -> Tensor:
    out: Tensor | None = None
    for tile in call.tiles(rows):
        made = call.of(rows[tile], tile)
        if call.tiling.summed:
            out = made if out is None else out + made
            continue
        if out is None:
            out = made.new_empty(len(rows), *made.shape[1:])
        out[tile] = made
    assert out is not None
    return out


def _added(total: Tensor | None, one: Tensor | None) -> Tensor | None:
    """Sums of many tiles are kept as wide as an accumulator of attention: in 16 bits each addition would round."""
    if one is None:
        return total
    if total is None:
        total = torch.zeros_like(one, dtype=accumulator_dtype(one.dtype))
    return total.add_(one)


@dataclass(frozen=True)
class _Around:
    """What the function's values depend on beside its inputs: autocast, and the states of the generators."""

    device: torch.device
    autocasts: bool
    dtype: torch.dtype
    states: tuple[Tensor, ...]

    @staticmethod
    def of(x: Tensor, draws: bool) -> _Around:
        """As it is now, where x is."""
        kind, states = x.device.type, []
        if draws:
            states = [torch.get_rng_state(), *([torch.cuda.get_rng_state(x.device)] if x.is_cuda else ())]
        return _Around(x.device, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind), tuple(states))

    def autocast(self) -> torch.autocast:
        """The same autocast; without its cache, in which casts made under no_grad would lose their gradient."""
        return torch.autocast(self.device.type, dtype=self.dtype, enabled=self.autocasts, cache_enabled=False)

    def again(self) -> ExitStack:
        """Inside, the generators begin where they began; afterwards they are where they were."""
        stack = ExitStack()
        if self.states:
            devices = [self.device] if self.device.type == "cuda" else []
            stack.enter_context(torch.random.fork_rng(devices))
            torch.set_rng_state(self.states[0])
            for state in self.states[1:]:
                torch.cuda.set_rng_state(state, self.device)
        return stack
