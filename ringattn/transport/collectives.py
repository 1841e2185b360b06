"""Sums, copies and meeting points over a ring, for whatever transport carries it.

Guarantees: every rank ends with the same bits; half precision is summed in float32 and rounded once; tensors of any
shape, stride and number. All ranks must pass the same shapes and dtypes in the same order (compare `summary` before).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from hashlib import sha256

import torch

from ringattn.errors import InputError
from ringattn.transport.base import Message, Transport

LISTED = 64
"""How many tensors a summary shows; its digest covers all of them."""
ARE_NONE = "None at "


def summary(entries: Sequence[torch.Tensor | None]) -> str:
    """What all ranks must have in common: the shape and dtype of each entry, and which entries are None.

    Raises `InputError` for an entry that is neither a tensor nor None.
    """
    for index, entry in enumerate(entries):
        if entry is not None and not isinstance(entry, torch.Tensor):
            raise InputError(f"tensors[{index}] is a {type(entry).__name__}; it must be a tensor")
    words = ["None" if entry is None else f"{tuple(entry.shape)} {entry.dtype}" for entry in entries]
    missing = [f"tensors[{index}]" for index, entry in enumerate(entries) if entry is None]
    none = f", {ARE_NONE}{_listed(missing)}" if missing else ""
    digest = sha256("\n".join(words).encode()).hexdigest()[:16]
    return f"{_listed(words)} ({len(entries)} tensors{none}) [{digest}]"


def _listed(words: list[str]) -> str:
    return ", ".join([*words[:LISTED], *(["..."] if len(words) > LISTED else [])])


def all_reduce(transport: Transport, tensors: Sequence[torch.Tensor]) -> None:
    """Replace each tensor by its sum over the ranks, in place. Raises `InputError` for bool.

    Rank r sums the r-th piece of all values, in the order of the ranks, and then hands the sum to all others: two hops,
    2 (P - 1) / P of the bytes sent per rank.
    """
    if any(tensor.dtype == torch.bool for tensor in tensors):
        raise InputError("all_reduce sums numbers; a bool has no sum, convert it to an integer first")
    if transport.world_size == 1:
        return
    for dtype, alike in _by_dtype(tensors):
        flat = _packed(transport, dtype, alike)
        pieces = list(flat.tensor_split(transport.world_size))
        _scatter_sums(transport, pieces)
        _hand_out(transport, pieces)
        _unpack(flat, alike)


def broadcast(transport: Transport, tensors: Sequence[torch.Tensor], src: int) -> None:
    """Replace each tensor by that of rank `src`, in place. Raises `InputError` for an `src` that is no rank."""
    if not 0 <= src < transport.world_size:
        raise InputError(f"cannot broadcast from rank {src}: the ring has ranks 0 to {transport.world_size - 1}")
    for dtype, alike in _by_dtype(tensors):
        flat = _packed(transport, dtype, alike)
        label = f"broadcast of {dtype}"
        if transport.rank == src:
            transport.exchange([Message(peer, flat, label) for peer in _others(transport)], []).wait()
        else:
            transport.exchange([], [Message(src, flat, label)]).wait()
            _unpack(flat, alike)


def barrier(transport: Transport) -> None:
    """Return when every rank has called it."""
    transport.all_gather_bytes(b"")


def _scatter_sums(transport: Transport, pieces: list[torch.Tensor]) -> None:
    """Replace this rank's piece by its sum over the ranks."""
    mine = pieces[transport.rank]
    peers = _others(transport)
    label = f"all_reduce of {mine.dtype}, parts"
    parts = {peer: _wire(transport, mine.numel(), mine.dtype) for peer in peers}
    transport.exchange(
        [Message(peer, pieces[peer], label) for peer in peers],
        [Message(peer, parts[peer], label) for peer in peers],
    ).wait()
    parts[transport.rank] = mine
    wide = torch.float32 if mine.is_floating_point() and mine.element_size() < 4 else mine.dtype
    total = torch.zeros(mine.numel(), dtype=wide, device=mine.device)
    for rank in range(transport.world_size):
        total += parts[rank].to(wide)
    mine.copy_(total)


def _hand_out(transport: Transport, pieces: list[torch.Tensor]) -> None:
    """Send this rank's piece to all others and receive theirs."""
    label = f"all_reduce of {pieces[0].dtype}, sums"
    transport.exchange(
        [Message(peer, pieces[transport.rank], label) for peer in _others(transport)],
        [Message(peer, pieces[peer], label) for peer in _others(transport)],
    ).wait()


def _others(transport: Transport) -> list[int]:
    return [rank for rank in range(transport.world_size) if rank != transport.rank]


def _by_dtype(tensors: Sequence[torch.Tensor]) -> Iterable[tuple[torch.dtype, list[torch.Tensor]]]:
    """The tensors of each dtype, in the order of the first of its kind."""
    groups: dict[torch.dtype, list[torch.Tensor]] = {}
    for tensor in tensors:
        groups.setdefault(tensor.dtype, []).append(tensor.detach())
    return groups.items()


def _wire(transport: Transport, count: int, dtype: torch.dtype) -> torch.Tensor:
    """`count` values for a moment, in plain memory: `allocate` is for what stays."""
    return torch.empty(count, dtype=dtype, device=transport.device)


def _packed(transport: Transport, dtype: torch.dtype, tensors: list[torch.Tensor]) -> torch.Tensor:
    """All values of the tensors in one flat wire buffer."""
    flat = _wire(transport, sum(tensor.numel() for tensor in tensors), dtype)
    for piece, tensor in zip(_split(flat, tensors), tensors, strict=True):
        piece.copy_(tensor)
    return flat


def _unpack(flat: torch.Tensor, tensors: list[torch.Tensor]) -> None:
    """The inverse of `_packed`."""
    for piece, tensor in zip(_split(flat, tensors), tensors, strict=True):
        tensor.copy_(piece)


def _split(flat: torch.Tensor, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """Views of `flat` in the shapes of the tensors."""
    counts = [tensor.numel() for tensor in tensors]
    return [piece.view(tensor.shape) for piece, tensor in zip(flat.split(counts), tensors, strict=True)]
