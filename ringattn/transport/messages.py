"""What every transport checks about its messages, and how it names them in errors.

Guarantees: a message that no transport could carry raises `InputError` before anything is posted; one operation reads
the same in every error of every transport.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import torch

from ringattn.errors import InputError
from ringattn.transport.base import Message


class Operation:
    """One end of one message: `rank` sends to or receives from `message.peer`."""

    def __init__(self, rank: int, sends: bool, message: Message) -> None:
        self.rank = rank
        self.sends = sends
        self.peer, self.buffer, self.label = message

    @property
    def nbytes(self) -> int:
        """Bytes on the wire."""
        return self.buffer.numel() * self.buffer.element_size()

    def __str__(self) -> str:
        verb = "send to" if self.sends else "recv from"
        return f"rank {self.rank} {verb} rank {self.peer} '{self.label}' ({self.nbytes} bytes of {self.buffer.dtype})"


AnyOperation = TypeVar("AnyOperation", bound=Operation)


def operations(
    make: Callable[[int, bool, Message], AnyOperation],
    rank: int,
    world_size: int,
    device: torch.device,
    sends: Sequence[Message],
    recvs: Sequence[Message],
) -> list[AnyOperation]:
    """The operations of one exchange, receives first, made by `make(rank, sends, message)`.

    Messages of zero bytes are left out on both sides alike. Raises `InputError` for a peer that is this rank or no rank
    of the ring, and for a buffer that is not contiguous or not on `device`.
    """
    found = [make(rank, False, message) for message in recvs] + [make(rank, True, message) for message in sends]
    for operation in found:
        if operation.peer == rank:
            raise InputError(f"{operation}: a rank cannot exchange with itself")
        if not 0 <= operation.peer < world_size:
            raise InputError(f"{operation}: the ring has ranks 0 to {world_size - 1}")
        if not operation.buffer.is_contiguous():
            raise InputError(f"{operation}: the buffer is not contiguous; pack it first")
        if operation.buffer.device.type != device.type:
            raise InputError(f"{operation}: the buffer is on {operation.buffer.device}, the transport on {device}")
    return [operation for operation in found if operation.nbytes]


def listed(pending: Sequence[Operation]) -> str:
    """The operations, in one line."""
    return "; ".join(str(operation) for operation in pending) or "nothing pending"


def first_cause(rank: int, cause: BaseException) -> str:
    """How all other ranks re-state the failure of `rank`."""
    return f"rank {rank} failed first: {type(cause).__name__}: {cause}"
