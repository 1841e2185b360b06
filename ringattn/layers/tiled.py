"""Less memory for activations: functions of single tokens over tiles of them, and inputs of checkpoints on the host.

A function of single tokens runs on one tile at a time, so what it computes in between exists for one tile. Forward
keeps the function's input alone; backward computes each tile again, writes the input's gradient in place and sums those
of the weights in the accumulator's dtype. So a feed-forward of any length takes the memory of a tile (TiledMLP of
Arctic Long Sequence Training, arXiv:2506.13996), and so does the loss with its logits.
Guarantees: the function's values and gradients up to rounding; random numbers that it draws are the same in backward;
what waits in host memory comes back bit by bit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.autograd.graph import saved_tensors_hooks

from ringattn.engine.base import accumulator_dtype
from ringattn.errors import InputError

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
    call = _Call(tiling, tuple(other.flatten() for other in others), wanted, x)
    # Saved by an operation of its own, before the function runs: where a checkpoint computes all this again, it stops
    # behind the last thing saved, and so does not run the function a time more.
    rows = _Keep.apply(call, x.flatten(0, -2), *wanted)
    out: Tensor = _Tiled.apply(call, rows, *wanted)
    return out if tiling.summed else out.view(*x.shape[:-1], *out.shape[1:])


class _Call:
    """One call: what is computed, and what its values depend on besides the rows. `kept`: the context that saves these.

    Weights are not saved, for hooks may give back copies, which the function does not use; that they are still the same
    is checked as autograd does.
    """

    def __init__(self, tiling: Tiling, others: tuple[Tensor, ...], weights: tuple[Tensor, ...], x: Tensor) -> None:
        self.tiling, self.others, self.weights, self.needs_grad = tiling, others, weights, x.requires_grad
        self.versions = [weight._version for weight in weights]
        self.kept: Any = None
        kind = x.device.type
        # Without its cache, in which casts made under no_grad would lose their gradient.
        self.autocast = partial(
            torch.autocast, kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind), cache_enabled=False
        )
        self.states: list[Tensor] = []
        if tiling.draws:
            self.states = [torch.get_rng_state(), *([torch.cuda.get_rng_state(x.device)] if x.is_cuda else ())]

    def tiles(self, rows: Tensor) -> list[slice]:
        """Cut the rows. One tile if there are none, so that the function runs on every rank."""
        step = self.tiling.tile_rows
        return [slice(start, start + step) for start in range(0, max(1, len(rows)), step)]

    def run(self, part: Tensor, tile: slice) -> Tensor:
        """Return the function of a tile."""
        with self.autocast():
            return self.tiling.function(part, *(other[tile] for other in self.others))

    @contextmanager
    def generators(self, device: torch.device) -> Iterator[None]:
        """Inside, the generators begin where they began in forward; afterwards they are where they were."""
        if not self.states:
            yield
            return
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            torch.set_rng_state(self.states[0])
            for state in self.states[1:]:
                torch.cuda.set_rng_state(state, device)
            yield


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
        out: Tensor | None = None
        for tile in call.tiles(rows):
            part = call.run(rows[tile], tile)
            if call.tiling.summed:
                out = part if out is None else out + part
                continue
            if out is None:
                out = part.new_empty(len(rows), *part.shape[1:])
            out[tile] = part
        assert out is not None
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        call: _Call = ctx.call
        if [weight._version for weight in call.weights] != call.versions:
            raise RuntimeError("a weight has changed in place between forward and backward of a tiled function")
        (rows,) = call.kept.saved_tensors
        drows = torch.empty_like(rows) if call.needs_grad else None
        sums: list[Tensor | None] = [None] * len(call.weights)
        with call.generators(rows.device):
            for tile in call.tiles(rows):
                part = rows[tile].detach().requires_grad_(call.needs_grad)
                with torch.enable_grad():
                    out = call.run(part, tile)
                inputs = [part, *call.weights] if call.needs_grad else list(call.weights)
                grads = _gradients(out, inputs, grad if call.tiling.summed else grad[tile])
                if drows is not None:
                    drows[tile] = 0 if grads[0] is None else grads[0]
                    grads = grads[1:]
                del out, part
                sums = [_added(total, dweight) for total, dweight in zip(sums, grads, strict=True)]
        pairs = zip(sums, call.weights, strict=True)
        return None, drows, *(None if total is None else total.to(weight.dtype) for total, weight in pairs)


def _gradients(out: Tensor, inputs: list[Tensor], grad: Tensor) -> list[Tensor | None]:
    """Those of a tile; None for what it does not depend on, as a loss without labels on nothing."""
    if not out.requires_grad:
        return [None] * len(inputs)
    return list(torch.autograd.grad(out, inputs, grad, allow_unused=True))


def _added(total: Tensor | None, gradient: Tensor | None) -> Tensor | None:
    """Sums of many tiles are kept as wide as an accumulator of attention: in 16 bits each addition would round."""
    if gradient is None:
        return total
    if total is None:
        total = torch.zeros_like(gradient, dtype=accumulator_dtype(gradient.dtype))
    return total.add_(gradient)


# --- inputs of checkpoints on the host -------------------------------------------------------------------------------
# A checkpoint keeps the input of a layer until its backward. Saved-tensor hooks around the checkpoint move nothing but
# its inputs, because the hooks inside, which forget what the layer saves, are the checkpoint's own. Copies to the host
# run on their own stream, next to the work of the following layer.


class Waiting(NamedTuple):
    """A tensor in host memory, the device it came from, and the event after which the copy is whole."""

    host: Tensor
    device: torch.device
    arrived: torch.cuda.Event | None


_streams: dict[torch.device, torch.cuda.Stream] = {}


def inputs_on_host() -> saved_tensors_hooks:
    """Floating tensors of rows that are saved inside wait in host memory, pinned where they come from CUDA.

    For the call of a checkpoint: `with inputs_on_host(): checkpoint(layer, x)`.
    """
    return saved_tensors_hooks(_pack, lambda saved: saved if isinstance(saved, Tensor) else from_host(saved))


def check_device(device: torch.device | str, option: str) -> None:
    """Raise `InputError` where there is no memory but the host's."""
    if torch.device(device).type == "cpu":
        raise InputError(
            f"{option}: moves inputs of layers from a GPU to host memory, and this model is on a CPU; leave it out"
        )


def _pack(x: Tensor) -> Tensor | Waiting:
    # Numbers and positions that layers share are not theirs; they would be copied once for each.
    return to_host(x) if x.is_floating_point() and x.dim() >= 2 and not isinstance(x, torch.nn.Parameter) else x


def to_host(x: Tensor) -> Waiting:
    """A copy of `x` in host memory; the device works on meanwhile."""
    x = x.detach()
    if not x.is_cuda:
        return Waiting(x.to("cpu", copy=True), x.device, None)
    host = torch.empty_like(x, device="cpu", pin_memory=True)
    if x.device not in _streams:
        _streams[x.device] = torch.cuda.Stream(x.device)
    stream = _streams[x.device]
    stream.wait_stream(torch.cuda.current_stream(x.device))
    with torch.cuda.stream(stream):
        host.copy_(x, non_blocking=True)
        x.record_stream(stream)
        arrived = torch.cuda.Event()
        arrived.record(stream)
    return Waiting(host, x.device, arrived)


def from_host(waiting: Waiting) -> Tensor:
    """The tensor on its device again."""
    if waiting.arrived is not None:
        waiting.arrived.wait(torch.cuda.current_stream(waiting.device))
    return waiting.host.to(waiting.device, non_blocking=True)
