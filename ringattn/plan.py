"""One rank's part of a schedule, with every byte placed before anything runs.

A plan is what the executor follows: per step what to pack, send, receive, zero, compute and merge, each naming the
buffer it touches; each buffer has its offset in the arena.
Does not know: how the schedule was made, torch.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from ringattn.problem import EIGHT_BIT, ITEM_BYTES, Problem
from ringattn.schedule.content import Content, size
from ringattn.sweep import TileTable

HOME = -1
"""Stands for a buffer: the rank's own K/V tensors, or its own dK/dV accumulators."""

ALIGNMENT_BYTES = 256

SCALE_BYTES = 4
"""Of the float32 scale that K, or V, of one token and head has in eight bits."""


class Buffer(NamedTuple):
    """A held or travelling piece of a block. Live in plan steps first .. last (both included)."""

    label: str
    content: Content
    dtype: str
    first: int
    last: int
    offset_bytes: int = -1


class Pack(NamedTuple):
    """Gather `into`'s content out of `source` (a buffer or HOME), converting to its dtype (see `ringattn.records`)."""

    source: int
    into: int


class Send(NamedTuple):
    """Send some elements of a buffer, from element `first` on."""

    peer: int
    buffer: int
    first: int
    elements: int
    label: str


class Recv(NamedTuple):
    """Receive a whole buffer."""

    peer: int
    buffer: int
    label: str


class Fold(NamedTuple):
    """Work on the tiles of one head part, or of all (None) in the rank's own tensors.

    Key row r of a tile is row kv_row + r * kv_step of `kv` (a buffer or HOME). Backward: gradients of key row r are
    added to row dkv_row + r * dkv_step of `dkv`.
    """

    owner: int
    part: int | None
    tiles: TileTable
    kv: int
    kv_row: int = 0
    dkv: int = HOME
    dkv_row: int = 0
    kv_step: int = 1
    dkv_step: int = 1


class Add(NamedTuple):
    """Add a whole arrived buffer into the same rows of another (or HOME)."""

    part: int
    into: int


class PlanStep(NamedTuple):
    """One step of one rank. `number` is the step's place in the global schedule.

    `restores` are packs from eight bits to the inputs' dtype, done while the step's messages travel.
    """

    number: int
    packs: tuple[Pack, ...] = ()
    sends: tuple[Send, ...] = ()
    recvs: tuple[Recv, ...] = ()
    zeros: tuple[int, ...] = ()
    restores: tuple[Pack, ...] = ()
    work: tuple[Fold | Add, ...] = ()


@dataclass(frozen=True)
class Plan:
    """What one rank does in one pass. `backward` tells what Folds mean."""

    problem: Problem
    name: str
    rank: int
    backward: bool
    steps: tuple[PlanStep, ...]
    buffers: tuple[Buffer, ...]
    arena_bytes: int
    messages: int = field(init=False)
    bytes_sent: int = field(init=False)

    def __post_init__(self) -> None:
        """Counts what the pass will send."""
        sends = [send for step in self.steps for send in step.sends]
        nbytes = sum(send.elements * ITEM_BYTES[self.buffers[send.buffer].dtype] for send in sends)
        object.__setattr__(self, "messages", len(sends))
        object.__setattr__(self, "bytes_sent", nbytes)


def record_elements(problem: Problem, dtype: str) -> int:
    """Elements of one row of one K/V head in a buffer of `dtype`: all batches, in each K beside V.

    In eight bits elements are bytes, and after K and V come up to 3 bytes of padding and two float32 scales.
    """
    values = problem.head_dim + problem.value_dim
    if dtype in EIGHT_BIT:
        values += -values % SCALE_BYTES + 2 * SCALE_BYTES
    return problem.batch * values


def buffer_bytes(problem: Problem, content: Content, dtype: str) -> int:
    """Bytes of a packed content."""
    return size(content) * record_elements(problem, dtype) * ITEM_BYTES[dtype]
