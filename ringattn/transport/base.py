"""What the runtime asks of a transport, and nothing more.

A transport moves bytes between the ranks of one ring. It promises: all messages of one `exchange` are in flight at
once; the k-th message sent to a peer meets the k-th message received from it; every wait has a deadline; a failure is
an error that names rank, peer, label and bytes, on every rank.
Does not know: attention, schedules, blocks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch


class Message(NamedTuple):
    """One buffer to or from one peer. `buffer` is contiguous; `label` says what it is in errors and traces."""

    peer: int
    buffer: torch.Tensor
    label: str = ""


class Ticket(Protocol):
    """An exchange in flight."""

    def wait(self) -> None:
        """Return when every message of the exchange has left and arrived.

        Raises `DeadlineError` after the transport's timeout and `PeerLostError` when a peer fails.
        On a device, orders the current stream after the exchange instead of blocking the host.
        """
        ...


class Transport(Protocol):
    """One rank's end of the ring. Used by one thread at a time."""

    name: str
    rank: int
    world_size: int
    device: torch.device

    def allocate(self, nbytes: int) -> torch.Tensor:
        """A flat uint8 tensor of `nbytes` that `exchange` can send from and receive into."""
        ...

    def exchange(self, sends: Sequence[Message], recvs: Sequence[Message]) -> Ticket:
        """Start all sends and receives at once. Buffers belong to the transport until the ticket's `wait` returns."""
        ...

    def agree(self, payload: bytes) -> list[bytes]:
        """Every rank's payload, by rank: a small all-gather on the control plane, with the deadline."""
        ...

    def abort(self, cause: BaseException) -> None:
        """Publish `cause` as the reason, drop every connection and refuse further use. Idempotent, never raises."""
        ...

    def close(self) -> None:
        """Leave in good order. Idempotent."""
        ...
