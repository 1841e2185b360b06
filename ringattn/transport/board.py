"""What the ranks of one ring tell each other through the store, besides their pulses.

Keys, all under the prefix of one ring: `arrived/RANK`, `cause`, `closed/RANK`, `agree/N/RANK`, and what a transport
adds. Guarantees: the first cause wins and never changes; reading one's own board never waits, except `read`.
"""

from __future__ import annotations

import torch.distributed as dist

from ringattn.transport.messages import first_cause


class Board:
    """One rank's view. Used by one thread at a time: `clone` makes another. All methods but `publish_cause` and
    `leave` raise `RuntimeError` when the store's host is gone."""

    def __init__(self, store: dist.Store, rank: int, world_size: int) -> None:
        self.store, self.rank, self.world_size = store, rank, world_size

    def clone(self) -> Board:
        """The same board over a connection of its own."""
        return Board(self.store.clone(), self.rank, self.world_size)  # type: ignore[attr-defined]

    def write(self, key: str, value: str | bytes) -> None:
        """Put one entry up."""
        self.store.set(key, value)  # type: ignore[arg-type]

    def read(self, key: str) -> bytes:
        """An entry that is known to be up."""
        return self.store.get(key)

    def holds(self, key: str) -> bool:
        """Whether an entry is up."""
        return self.store.check([key])

    def complete(self, stem: str) -> bool:
        """Whether every rank's entry `stem/RANK` is up."""
        return self.store.check([f"{stem}/{rank}" for rank in self.everyone()])

    def missing(self, stem: str) -> list[int]:
        """The ranks whose entry `stem/RANK` is not up."""
        return [rank for rank in self.everyone() if not self.holds(f"{stem}/{rank}")]

    def everyone(self) -> range:
        """All ranks."""
        return range(self.world_size)

    def publish_cause(self, error: BaseException) -> None:
        """Say why this rank fails, unless another was first. Never raises."""
        try:
            self.store.compare_set("cause", "", first_cause(self.rank, error))
        except RuntimeError:
            pass  # the store's host is gone, and nobody can be told

    def cause(self) -> str | None:
        """The first cause."""
        return self.read("cause").decode() if self.holds("cause") else None

    def leave(self) -> None:
        """Say that this rank closes in good order. Never raises."""
        try:
            self.store.set(f"closed/{self.rank}", "1")
        except RuntimeError:
            pass
