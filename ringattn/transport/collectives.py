"""Sums, broadcasts and barriers over a ring, on any transport.

Guarantees: every rank ends with the same bits. Half precision is summed in float32 and rounded once. Any number of
tensors is accepted, of any shape and stride. All ranks must pass the same shapes and dtypes in the same order, which
the caller checks by comparing the ranks' `summary` texts.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from hashlib import sha256
from typing import Any

import torch

from ringattn.errors import InputError
from ringattn.transport.base import Message, Transport

LISTED = 64
"""The number of tensors listed in a summary; its digest covers all of them."""
ARE_NONE = "None at "
NOT_SUMMED = {torch.bool, torch.uint16, torch.uint32, torch.uint64}
"""The dtypes of tensors that torch does not add, or whose sum is not a number."""


def listed(tensors: object) -> list[Any]:
    """Return the entries of an iterable. Raises `InputError` for anything else."""
    if not isinstance(tensors, Iterable):
        raise InputError(f"tensors must be a list of tensors, got {type(tensors).__name__}")
    return list(tensors)


def summary(entries: Sequence[torch.Tensor | None]) -> str:
    """Describe what must be equal on all ranks: the shape and dtype of each entry, and which entries are None.

    Raises `InputError` for an entry that is neither a tensor nor None, and for a tensor that cannot be overwritten.
    """
    for index, entry in enumerate(entries):
        if entry is not None and not isinstance(entry, torch.Tensor):
            raise InputError(f"tensors[{index}] is a {type(entry).__name__}; it must be a tensor")
        if entry is not None and (obstacle := _obstacle(entry)):
            raise InputError(f"tensors[{index}] {obstacle}")
    descriptions = ["None" if entry is None else f"{tuple(entry.shape)} {entry.dtype}" for entry in entries]
    missing = [f"tensors[{index}]" for index, entry in enumerate(entries) if entry is None]
    none = f", {ARE_NONE}{_listed(missing)}" if missing else ""
    digest = sha256("\n".join(descriptions).encode()).hexdigest()[:16]
    return f"{_listed(descriptions)} ({len(entries)} tensors{none}) [{digest}]"


def check_sums(entries: Sequence[torch.Tensor | None]) -> None:
    """Raise `InputError` for a tensor whose dtype has no sum."""
    for index, entry in enumerate(entries):
        if entry is not None and entry.dtype in NOT_SUMMED:
            raise InputError(f"tensors[{index}] is {entry.dtype}, which has no sum; convert it to int64 first")


def _obstacle(tensor: torch.Tensor) -> str:
    """Return the reason why the values of a tensor cannot be overwritten one by one, or ""."""
    if hasattr(tensor, "to_local"):  # a DTensor
        return f"is a {type(tensor).__name__}; give its to_local()"
    if tensor.layout != torch.strided:
        return f"is {tensor.layout}; give its to_dense()"
    if tensor.is_meta:
        return "is on the device meta, where tensors have no values"
    if any(size > 1 and stride == 0 for size, stride in zip(tensor.shape, tensor.stride(), strict=True)):
        return f"has strides {tensor.stride()}, so elements share memory; give its clone()"
    return ""


def _listed(descriptions: list[str]) -> str:
    return ", ".join([*descriptions[:LISTED], *(["..."] if len(descriptions) > LISTED else [])])


def all_reduce(transport: Transport, tensors: Sequence[torch.Tensor]) -> None:
    """Replace each tensor by its sum over the ranks, in place. Raises `InputError` for a dtype without a sum.

    The values are split into one piece per rank. Rank r receives the r-th piece of every rank, sums them in rank order,
    and sends the sum to all other ranks. Of P ranks, each sends 2 (P - 1) / P times the bytes of the tensors.
    """
    check_sums(tensors)
    if transport.world_size == 1:
        return
    for dtype, alike in _by_dtype(tensors):
        flat = _packed(transport, dtype, alike)
        pieces = list(flat.tensor_split(transport.world_size))
        _scatter_sums(transport, pieces)
        _all_gather(transport, pieces)
        _unpack(flat, alike)


def broadcast(transport: Transport, tensors: Sequence[torch.Tensor], src: int) -> None:
    """Overwrite each tensor with the one of rank `src`, in place. Raises `InputError` if `src` is not a rank."""
    if not 0 <= src < transport.world_size:
        raise InputError(f"cannot broadcast from rank {src}: the ring has ranks 0 to {transport.world_size - 1}")
    for dtype, alike in _by_dtype(tensors):
        flat = _packed(transport, dtype, alike)
        label = f"broadcast of {dtype}"
        if transport.rank == src:
            transport.exchange([Message(peer, flat, label) for peer in _peers(transport)], []).wait()
        else:
            transport.exchange([], [Message(src, flat, label)]).wait()
            _unpack(flat, alike)


def barrier(transport: Transport) -> None:
    """Wait until every rank has called this function."""
    transport.all_gather_bytes(b"")


def _scatter_sums(transport: Transport, pieces: list[torch.Tensor]) -> None:
    """Receive this rank's piece from every rank, and replace it by the sum.

    `pieces`: one piece of the values per rank.
    """
    local_piece = pieces[transport.rank]
    peers = _peers(transport)
    label = f"all_reduce of {local_piece.dtype}, parts"
    parts = {peer: _temporary(transport, local_piece.numel(), local_piece.dtype) for peer in peers}
    transport.exchange(
        [Message(peer, pieces[peer], label) for peer in peers],
        [Message(peer, parts[peer], label) for peer in peers],
    ).wait()
    parts[transport.rank] = local_piece
    wide = torch.float32 if local_piece.is_floating_point() and local_piece.element_size() < 4 else local_piece.dtype
    total = torch.zeros(local_piece.numel(), dtype=wide, device=local_piece.device)
    for rank in range(transport.world_size):
        total += parts[rank].to(wide)
    local_piece.copy_(total)


def _all_gather(transport: Transport, pieces: list[torch.Tensor]) -> None:
    """Send this rank's piece to all other ranks, and receive each other rank's piece. `pieces`: one piece per rank."""
    label = f"all_reduce of {pieces[0].dtype}, sums"
    transport.exchange(
        [Message(peer, pieces[transport.rank], label) for peer in _peers(transport)],
        [Message(peer, pieces[peer], label) for peer in _peers(transport)],
    ).wait()


def _peers(transport: Transport) -> list[int]:
    return [rank for rank in range(transport.world_size) if rank != transport.rank]


def _by_dtype(tensors: Sequence[torch.Tensor]) -> Iterable[tuple[torch.dtype, list[torch.Tensor]]]:
    """Group the tensors by dtype, in the order in which the dtypes first occur."""
    groups: dict[torch.dtype, list[torch.Tensor]] = {}
    for tensor in tensors:
        groups.setdefault(tensor.dtype, []).append(tensor.detach())
    return groups.items()


def _temporary(transport: Transport, count: int, dtype: torch.dtype) -> torch.Tensor:
    """Return an uninitialised buffer of `count` values in plain memory; `allocate` is for long-lived buffers."""
    return torch.empty(count, dtype=dtype, device=transport.device)


def _packed(transport: Transport, dtype: torch.dtype, tensors: list[torch.Tensor]) -> torch.Tensor:
    """Copy all values of the tensors into one flat buffer."""
    flat = _temporary(transport, sum(tensor.numel() for tensor in tensors), dtype)
    for piece, tensor in zip(_split(flat, tensors), tensors, strict=True):
        piece.copy_(tensor)
    return flat


def _unpack(flat: torch.Tensor, tensors: list[torch.Tensor]) -> None:
    """Copy the values of `flat`, a buffer made by `_packed`, back into the tensors."""
    for piece, tensor in zip(_split(flat, tensors), tensors, strict=True):
        tensor.copy_(piece)


def _split(flat: torch.Tensor, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """Return views of `flat` in the shapes of the tensors."""
    counts = [tensor.numel() for tensor in tensors]
    return [piece.view(tensor.shape) for piece, tensor in zip(flat.split(counts), tensors, strict=True)]
