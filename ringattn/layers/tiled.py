"""Less memory for activations: token-wise functions over tiles, and inputs of checkpoints in host memory.

A token-wise function runs on one tile of tokens at a time, so its intermediate tensors exist for one tile only. Forward
keeps only the function's input. Backward recomputes each tile, writes the input's gradient in place, and sums the
gradients of weights in the accumulator's dtype. So a feed-forward of any length takes the memory of one tile (TiledMLP
of Arctic Long Sequence Training, arXiv:2506.13996), and so does the loss with its logits.

Guarantees: values and gradients equal those of the function up to rounding. Backward draws the same random numbers as
forward. Tensors that return from host memory are equal bit by bit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple
from weakref import ref

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from ringattn.engine.base import accumulator_dtype
from ringattn.errors import InputError
from ringattn.gradients import once_differentiable
from ringattn.layers import PREFETCH_BYTES

Function = Callable[..., Tensor]
State = Callable[[], Mapping[str, object]]
"""A function that returns the values, by name, that another function reads in addition to its arguments."""


@dataclass(frozen=True)
class Tiling:
    """A function, and the number of rows that it gets at a time.

    `summed`: the function returns one number per tile, and the numbers are added. Otherwise it returns one output row
    per row. `draws`: the function may draw random numbers. `state`: what the function reads in addition to its
    arguments. Backward raises if something else than the function has changed it.
    """

    function: Function
    tile_rows: int
    summed: bool = False
    draws: bool = False
    state: State = dict


@torch.compiler.disable
def tiled(tiling: Tiling, x: Tensor, weights: Sequence[Tensor], others: Sequence[Tensor] = ()) -> Tensor:
    """Apply `tiling.function` to the rows of `x`, tile by tile.

    Args:
        tiling: The function. It takes some rows of x, (rows, dim), and the same rows of each of `others`. It returns
            one output row per row, or one number.
        x: The input. All dimensions but the last are rows.
        weights: Every weight that the function reads, in its state while the function runs. Gradients are those of the
            weights that require them, and a frozen weight may not change before backward either.
        others: Integers for each row, such as labels.

    Shape:
        x: (..., dim)
        others: (...)

    Returns:
        (..., dimensions of an output row), or the sum of the tiles' numbers.

    Raises:
        Exception: Errors of the function.
        RuntimeError: In backward, if a weight has changed in place since forward, or `tiling.state` returns something
            else.
    """
    call = _Call(tiling, tuple(integers.flatten() for integers in others), weights, x)
    # A separate operation saves the rows before the function runs. Recomputation of a checkpoint stops after the last
    # saved tensor, so it does not run the function an additional time.
    rows = _Keep.apply(call, x.flatten(0, -2), *call.trained)
    out: Tensor = _Tiled.apply(call, rows, *call.trained)
    return out if tiling.summed else out.view(*x.shape[:-1], *out.shape[1:])


class _Call:
    """One call of `tiled`: its function, and all inputs except the rows.

    `kept`: the autograd context that saves the rows.

    Weights are not saved, because hooks may return copies of saved tensors, but the function uses the originals. Their
    version counters are compared instead, like in autograd, and the state of the function.
    """

    def __init__(self, tiling: Tiling, others: tuple[Tensor, ...], weights: Sequence[Tensor], x: Tensor) -> None:
        self.tiling, self.others, self.needs_grad = tiling, others, x.requires_grad
        self.trained = tuple(weight for weight in weights if weight.requires_grad)
        has_backward = torch.is_grad_enabled() and bool(self.needs_grad or self.trained)
        self.at_forward = AtForward(weights, tiling.state if has_backward else dict)
        self.kept: Any = None
        self.autocast = autocast_of(x.device.type)
        self.states: list[Tensor] = []
        if tiling.draws:
            self.states = [torch.get_rng_state(), *([torch.cuda.get_rng_state(x.device)] if x.is_cuda else ())]

    def tiles(self, rows: Tensor) -> list[slice]:
        """Cut the rows into tiles. Without rows there is one empty tile, so that the function runs on every rank."""
        step = self.tiling.tile_rows
        return [slice(start, start + step) for start in range(0, max(1, len(rows)), step)]

    def run(self, part: Tensor, tile: slice) -> Tensor:
        """Return the function's result for the rows `part` of a tile."""
        with self.autocast():
            return self.tiling.function(part, *(integers[tile] for integers in self.others))

    @contextmanager
    def generators(self, device: torch.device) -> Iterator[None]:
        """Return a context in which random generators start in the state of forward. They are restored afterwards."""
        if not self.states:
            yield
            return
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            torch.set_rng_state(self.states[0])
            for state in self.states[1:]:
                torch.cuda.set_rng_state(state, device)
            yield


class _Keep(torch.autograd.Function):
    """An identity function that saves the rows for the backward of `_Tiled`."""

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
            if len(part) != len(rows[tile]):
                raise InputError(f"a tile of {len(rows[tile])} rows became {len(part)} rows; it needs one for each")
            if out is None:
                out = part.new_empty(len(rows), *part.shape[1:])
            out[tile] = part
        assert out is not None
        call.at_forward.leave_out_own_changes()
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        call: _Call = ctx.call
        call.at_forward.refuse_changed()
        (rows,) = call.kept.saved_tensors
        drows = torch.empty_like(rows) if call.needs_grad else None
        sums: list[Tensor | None] = [None] * len(call.trained)
        with call.generators(rows.device):
            for tile in call.tiles(rows):
                part = rows[tile].detach().requires_grad_(call.needs_grad)
                with torch.enable_grad():
                    out = call.run(part, tile)
                inputs = [part, *call.trained] if call.needs_grad else list(call.trained)
                grads = gradients_of(out, inputs, grad if call.tiling.summed else grad[tile])
                if drows is not None:
                    drows[tile] = 0 if grads[0] is None else grads[0]
                    grads = grads[1:]
                del out, part
                # Gradients are added tile by tile. Those of all tiles at once would take the memory that tiling saves.
                sums = [added(total, dweight) for total, dweight in zip(sums, grads, strict=True)]
        pairs = zip(sums, call.trained, strict=True)
        return None, drows, *(None if total is None else total.to(weight.dtype) for total, weight in pairs)


def autocast_of(kind: str) -> Callable[[], torch.autocast]:
    """Return the present state of autocast for a type of device, as a function that makes a context."""
    # The cache of autocast is off, because it would return casts made under no_grad, which have no gradient.
    return partial(
        torch.autocast, kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind), cache_enabled=False
    )


class AtForward:
    """What a recomputed function read in forward: the version counters of weights, and its state.

    Those of frozen weights count too: backward computes the function again, so a change of any weight changes the
    gradients of all others.
    """

    def __init__(self, weights: Sequence[Tensor], state: State) -> None:
        # Inference tensors have no counter. Autograd refuses to save them, so they have no backward pass.
        self.weights = [weight for weight in weights if not weight.is_inference()]
        self.counters = [weight._version for weight in self.weights]
        self.state = state
        self.values = state()
        self.own_changes: set[str] = set()

    def leave_out_own_changes(self) -> None:
        """Stop comparing the values that the function itself has changed, such as a counter of its calls."""
        self.own_changes = set(_changes(self.values, self.state()))
        self.values = {name: value for name, value in self.values.items() if name not in self.own_changes}

    def refuse_changed(self) -> None:
        """Raise `RuntimeError` unless weights and state are those of forward."""
        if [weight._version for weight in self.weights] != self.counters:
            raise RuntimeError("a weight has changed in place between forward and backward of a recomputed function")
        changed = [name for name in _changes(self.values, self.state()) if name not in self.own_changes]
        if changed:
            raise RuntimeError(
                f"{', '.join(changed[:3])}{' and others' if len(changed) > 3 else ''} changed between forward and "
                "backward of a function that backward recomputes; run backward before the change, or compute without "
                "recomputation"
            )


def _changes(before: Mapping[str, object], now: Mapping[str, object]) -> list[str]:
    """Return the names with different values, or with a value in only one mapping. Tensors compare by identity."""

    def is_same(old: object, new: object) -> bool:
        return old is new or not (isinstance(old, Tensor) or isinstance(new, Tensor) or old != new)

    return [name for name in {**before, **now} if not is_same(before.get(name), now.get(name))]


def gradients_of(out: Tensor, inputs: list[Tensor], grad: Tensor) -> list[Tensor | None]:
    """Return the gradients of an output, or None for inputs that it does not depend on, as in a loss without labels.

    Hooks of the inputs do not run. Autograd runs them when the caller returns the sums of these gradients.
    """
    if not out.requires_grad:
        return [None] * len(inputs)
    with _without_hooks(inputs):
        return list(torch.autograd.grad(out, inputs, grad, allow_unused=True))


@contextmanager
def _without_hooks(tensors: Sequence[Tensor]) -> Iterator[None]:
    """Return a context in which autograd does not run the hooks of `Tensor.register_hook` on these tensors.

    Backward passes of one tensor must not run in several threads at the same time, because the context covers them all.
    """
    # torch has no public function for this. Its engine reads the hooks from this dict for each gradient.
    saved = [(hooks, dict(hooks)) for tensor in tensors if (hooks := tensor._backward_hooks)]
    try:
        for hooks, _ in saved:
            hooks.clear()
        yield
    finally:
        for hooks, items in saved:
            hooks.update(items)


def added(total: Tensor | None, gradient: Tensor | None) -> Tensor | None:
    """Add a gradient to the total. The total has an accumulator dtype, because in 16 bits each addition would round."""
    if gradient is None:
        return total
    if total is None:
        total = torch.zeros_like(gradient, dtype=accumulator_dtype(gradient.dtype))
    return total.add_(gradient)


# --- inputs of checkpoints on the host -------------------------------------------------------------------------------
# A checkpoint keeps the input of a layer until backward. Saved-tensor hooks around a checkpoint see only its inputs,
# because the checkpoint's inner hooks discard the tensors that the layer saves. Copies run on a separate stream: to the
# host in parallel to the next layer, and back in parallel to the backward of the next layer.
#       forward    layer 0     layer 1     layer 2       backward   layer 2     layer 1     layer 0
#       copies     input 0 ->  input 1 ->  input 2 ->    <- input 2 <- input 1  <- input 0


class HostCopy(NamedTuple):
    """A tensor in host memory, its original device, and the event that marks the end of the copy."""

    host: Tensor
    device: torch.device
    arrived: torch.cuda.Event | None


class DeviceCopy(NamedTuple):
    """A tensor on its original device again, and the event that marks the end of the copy."""

    tensor: Tensor
    arrived: torch.cuda.Event | None


class Offloaded:
    """A tensor in host memory. The use of a tensor starts the copy of the one that was offloaded before it.

    Tensors of more than `PREFETCH_BYTES` are copied when they are used.
    """

    def __init__(self, x: Tensor) -> None:
        """Copy `x` to host memory."""
        self._is_small = x.nbytes <= PREFETCH_BYTES
        self._host = to_host(x)
        self._fetched: DeviceCopy | None = None
        # Weak, because the graph of the tensor before may have been freed without a backward pass.
        self._before = _latest.get(x.device)
        _latest[x.device] = ref(self)

    def fetch(self) -> None:
        """Start the copy back to the device, unless it has started already."""
        if self._fetched is None:
            self._fetched = from_host(self._host)

    def tensor(self) -> Tensor:
        """Return the tensor on its device, in the order of the current stream."""
        self.fetch()
        fetched, self._fetched = self._fetched, None  # a second backward pass of the same graph copies again
        before = self._before() if self._before is not None else None
        if before is not None and before._is_small:
            before.fetch()
        assert fetched is not None
        if fetched.arrived is not None:
            stream = torch.cuda.current_stream(fetched.tensor.device)
            fetched.arrived.wait(stream)
            fetched.tensor.record_stream(stream)  # its memory belongs to the stream of the copies
        return fetched.tensor


_latest: dict[torch.device, ref[Offloaded]] = {}
_streams: dict[torch.device, torch.cuda.Stream] = {}


def inputs_on_host() -> saved_tensors_hooks:
    """Return a context in which floating-point tensors that autograd saves move to host memory.

    Parameters and tensors of one dimension stay. For CUDA tensors, the host memory is pinned. Use the context around
    the call of a checkpoint: `with inputs_on_host(): checkpoint(layer, x)`. In backward, two inputs of up to
    `PREFETCH_BYTES` are on the device at the same time.
    """
    return saved_tensors_hooks(_pack, lambda saved: saved if isinstance(saved, Tensor) else saved.tensor())


def check_device(device: torch.device | str, option: str) -> None:
    """Raise an `InputError` that names `option` if the device is the CPU, whose tensors are in host memory already."""
    if torch.device(device).type == "cpu":
        raise InputError(
            f"{option}: this moves inputs of layers from a GPU to host memory, but the model is on a CPU; leave it out"
        )


def _pack(x: Tensor) -> Tensor | Offloaded:
    # Numbers, masks and positions stay, because all layers share them, and each layer would copy them again.
    return Offloaded(x) if x.is_floating_point() and x.dim() >= 2 and not isinstance(x, torch.nn.Parameter) else x


def to_host(x: Tensor) -> HostCopy:
    """Copy `x` to host memory, without blocking the device."""
    x = x.detach()
    if not x.is_cuda:
        return HostCopy(x.to("cpu", copy=True), x.device, None)
    host = torch.empty_like(x, device="cpu", pin_memory=True)
    stream = _stream(x.device)
    stream.wait_stream(torch.cuda.current_stream(x.device))
    with torch.cuda.stream(stream):
        host.copy_(x, non_blocking=True)
        x.record_stream(stream)  # keeps x's memory from being reused before the copy is done
        return HostCopy(host, x.device, stream.record_event())


def from_host(copy: HostCopy) -> DeviceCopy:
    """Copy the tensor back to its device, without blocking the device."""
    if copy.arrived is None:
        return DeviceCopy(copy.host.to(copy.device), None)
    stream = _stream(copy.device)
    copy.arrived.wait(stream)
    with torch.cuda.stream(stream):
        return DeviceCopy(copy.host.to(copy.device, non_blocking=True), stream.record_event())


def _stream(device: torch.device) -> torch.cuda.Stream:
    """Return the stream of a device's copies."""
    if device not in _streams:
        _streams[device] = torch.cuda.Stream(device)
    return _streams[device]
