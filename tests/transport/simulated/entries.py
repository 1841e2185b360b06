"""What a rank puts on its streams: the entries of queues, traces and graphs.

Guarantees: entries are objects with an identity; an entry knows its rank and its stream and whether it has run.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.transport.simulated.communicators import Communicator

COMPUTE = "compute"
"""The caller's stream where it has made no other one current: here the host thread itself, so nothing on it waits."""


Range = tuple[int, int]
"""(address, bytes) of a piece of device memory."""


@dataclass(eq=False)
class Entry:
    """Work on `stream` of `rank`."""

    rank: int
    stream: str
    complete: bool = field(default=False, init=False)


@dataclass(eq=False)
class Touch(Entry):
    """Compute that reads and writes (address, bytes) ranges when its stream comes to it and it is not `held`."""

    reads: tuple[Range, ...]
    writes: tuple[Range, ...]
    label: str
    held: bool = False

    def __str__(self) -> str:
        return f"compute '{self.label}'"


@dataclass(eq=False)
class Record(Entry):
    """An event's record: complete when everything before it on its stream is."""

    captured: bool

    def __str__(self) -> str:
        return f"record of an event on stream {self.stream}"


@dataclass(eq=False)
class Wait(Entry):
    """Later work of the stream runs after `record`."""

    record: Record

    def __str__(self) -> str:
        return f"wait for an event of stream {self.record.stream}"


@dataclass(eq=False)
class Op:
    """One send or receive. `peer` is a rank of the communicator; `number` counts the ops of this kind to this peer."""

    kind: str
    peer: int
    nbytes: int
    address: int
    number: int = -1
    partner: Op | None = None
    launch: Launch = field(init=False)

    def __str__(self) -> str:
        return f"{self.kind} of {self.nbytes} bytes {'to' if self.kind == 'send' else 'from'} rank {self.peer}"


@dataclass(eq=False)
class Launch(Entry):
    """The ops that one group gives one communicator. `group` counts the groups of the rank; `captured`: in a graph."""

    comm: Communicator
    ops: tuple[Op, ...]
    group: int
    captured: bool = False
    started: bool = field(default=False, init=False)
    aborted: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        for op in self.ops:
            op.launch = self

    def again(self, group: int) -> Launch:
        """The same ops once more, as the replay of a graph launches them."""
        ops = tuple(Op(op.kind, op.peer, op.nbytes, op.address) for op in self.ops)
        return Launch(self.rank, self.stream, self.comm, ops, group, captured=True)

    def pending(self) -> list[Op]:
        """The ops that have not found their partner."""
        return [op for op in self.ops if op.partner is None]

    def __str__(self) -> str:
        return f"{'; '.join(map(str, self.pending() or self.ops))} on {self.comm}, stream {self.stream}"
