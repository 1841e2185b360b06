"""What a checkpoint keeps, the input of a layer, waits in host memory until its backward.

Saved-tensor hooks around the checkpoint: those inside, which forget what the layer saves, are the checkpoint's own, so
nothing but its inputs is moved. Copies to the host travel on a stream of their own, beside the next layer's work.
Guarantees: the same bits come back.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from ringattn.errors import InputError


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
    return saved_tensors_hooks(_pack, _unpack)


def check_device(device: torch.device | str, option: str) -> None:
    """Raise `InputError` where there is no memory but the host's."""
    if torch.device(device).type == "cpu":
        raise InputError(
            f"{option}: moves inputs of layers from a GPU to host memory, and this model is on a CPU; leave it out"
        )


def _pack(x: Tensor) -> Tensor | Waiting:
    # Numbers and positions that layers share are not theirs; they would be copied once for each.
    return to_host(x) if x.is_floating_point() and x.dim() >= 2 and not isinstance(x, torch.nn.Parameter) else x


def _unpack(saved: Tensor | Waiting) -> Tensor:
    return saved if isinstance(saved, Tensor) else from_host(saved)


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
