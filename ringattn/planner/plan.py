"""One rank's part of a schedule, with every byte placed before anything runs.

A plan is what the executor follows: per step what to pack, send, receive, zero, compute and merge, each naming the
buffer it touches; each buffer has its offset in the arena.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from functools import cache
from typing import NamedTuple

from ringattn.core.geometry import StridedRange
from ringattn.core.problem import EIGHT_BIT, ITEM_BYTES, Problem
from ringattn.core.tiling import TileTable
from ringattn.schedule.content import Content, size
from ringattn.schedule.ops import Kind

LOCAL = -1
"""Stands for a buffer: the rank's own tensor of the kind in question, K/V or dK/dV where it says nothing else."""

ALIGNMENT_BYTES = 256


class Inside(NamedTuple):
    """Where a buffer lies in another one: from `row` on, in records."""

    buffer: int
    row: int


class Buffer(NamedTuple):
    """A held or travelling piece of a block. Live in plan steps first .. last (both included)."""

    label: str
    content: Content
    dtype: str
    first: int
    last: int
    offset_bytes: int = -1
    kind: Kind = Kind.KV
    inside: Inside | None = None


class Pack(NamedTuple):
    """Gather `into`'s content out of `source` (a buffer or LOCAL), converting to its dtype (`runtime/records.py`)."""

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
    """Receive some elements of a buffer, from element `first` on; together the messages for a buffer fill all of it."""

    peer: int
    buffer: int
    first: int
    elements: int
    label: str


class AttendOp(NamedTuple):
    """Work on tiles that read some K/V heads: of one head part of an owner, or all in the rank's own tensors.

    `owner` None: of several owners and heads, in a fused buffer where every row has a head of its own.

    Key row r of a tile is row kv_row + r * kv_step of `kv` (a buffer or LOCAL). Backward: gradients of key row r are
    added to row dkv_row + r * dkv_step of `dkv`. `first`: nothing of the pass has set these rows, of any tile, before;
    `last`: nothing adds to them afterwards, so the sum is final.
    """

    owner: int | None
    heads: StridedRange
    tiles: TileTable
    kv: int
    kv_row: int = 0
    dkv: int = LOCAL
    dkv_row: int = 0
    kv_step: int = 1
    dkv_step: int = 1
    first: bool = False
    last: bool = False


class AttendReceivedOp(NamedTuple):
    """Work on queries that came, and on keys that came; no two heads share a row, so there is one head.

    The works with one buffer `q` carry one state: the first of them begins it, backward from `seed`, and the last
    fills `result` with out and lse, backward with dQ; elsewhere these are LOCAL, for none. Backward adds to `dkv`, or
    where it is the `first` on it sets the rows of its tiles.
    """

    tiles: TileTable
    q: int
    kv: int
    result: int = LOCAL
    seed: int = LOCAL
    dkv: int = LOCAL
    first: bool = False


class Add(NamedTuple):
    """Add a whole buffer into the same rows of another (or LOCAL); partial outputs are merged.

    `first`: nothing of the pass has set these rows before, so they are copied.
    """

    part: int
    into: int
    first: bool = False


class Zero(NamedTuple):
    """Rows of a dK/dV buffer that begin at zero. `rows`: of the buffer, for each of its head parts."""

    buffer: int
    rows: Content


class OwnSums(StrEnum):
    """How the accumulators of the rank's own dK and dV begin."""

    ZEROED = "zeroed"
    UNSET = "unset"
    """The first work on each row sets it."""
    NONE = "none"
    """There are none: the first work on each row is the last, and writes the result."""


class PlanStep(NamedTuple):
    """One step of one rank. `number` is the step's place in the global schedule.

    `restores` are packs from eight bits to the inputs' dtype, done while the step's messages travel.
    """

    number: int
    packs: tuple[Pack, ...] = ()
    sends: tuple[Send, ...] = ()
    recvs: tuple[Recv, ...] = ()
    zeros: tuple[Zero, ...] = ()
    restores: tuple[Pack, ...] = ()
    work: tuple[AttendOp | AttendReceivedOp | Add, ...] = ()


@dataclass(frozen=True)
class Plan:
    """What one rank does in one pass. `backward` tells what an `AttendOp` means.

    `kept`: buffers that a forward pass hands on to its backward, and that a backward pass begins with; in equal order.
    `own_sums`: of the rank's own keys and values, backward.
    """

    problem: Problem
    name: str
    rank: int
    backward: bool
    steps: tuple[PlanStep, ...]
    buffers: tuple[Buffer, ...]
    arena_bytes: int
    kept: tuple[int, ...] = ()
    own_sums: OwnSums = OwnSums.ZEROED
    messages: int = field(init=False)
    bytes_sent: int = field(init=False)

    def __post_init__(self) -> None:
        """Counts what the pass will send."""
        sends = [send for step in self.steps for send in step.sends]
        nbytes = sum(send.elements * self.element_bytes(send.buffer) for send in sends)
        object.__setattr__(self, "messages", len(sends))
        object.__setattr__(self, "bytes_sent", nbytes)

    @property
    def kept_bytes(self) -> int:
        """Bytes of others' inputs that lie between the passes, outside the arena."""
        return sum(buffer_bytes(self.problem, self.buffers[buffer]) for buffer in self.kept)

    def element_bytes(self, buffer: int) -> int:
        """Bytes of what messages of a buffer are counted in."""
        held = self.buffers[buffer]
        return record_layout_of(self.problem, held.kind, held.dtype).element_bytes(held.dtype)


class RecordLayout(NamedTuple):
    """What a record holds of one row and head of one batch: values of `dims` beside each other, in the buffer's dtype.

    After each come `scalars` numbers in `scalar_dtype`. A record with scalars is counted in bytes, values padded so
    that the scalars are aligned; others in values.
    """

    dims: tuple[int, ...]
    scalars: int = 0
    scalar_dtype: str = "float32"

    def elements(self, dtype: str) -> int:
        """Elements of a record with values of `dtype`."""
        if not self.scalars:
            return sum(self.dims)
        step = ITEM_BYTES[self.scalar_dtype]
        values = sum(self.dims) * ITEM_BYTES[dtype]
        return values + -values % step + len(self.dims) * self.scalars * step

    def element_bytes(self, dtype: str) -> int:
        """Bytes of an element."""
        return 1 if self.scalars else ITEM_BYTES[dtype]


def record_layout_of(problem: Problem, kind: Kind, dtype: str) -> RecordLayout:
    """How a block of `kind` lies in a buffer of `dtype`.

    K beside V, in eight bits each with a float32 scale; out with its lse; dout with lse and delta.
    """
    return _form(kind, dtype, problem.head_dim, problem.value_dim, problem.accumulator_dtype)


@cache
def _form(kind: Kind, dtype: str, q: int, v: int, accumulator_dtype: str) -> RecordLayout:
    if kind in (Kind.KV, Kind.DKV):
        return RecordLayout((q, v), 1 if dtype in EIGHT_BIT else 0)
    if kind in (Kind.Q, Kind.DQ):
        return RecordLayout((q,))
    return RecordLayout((v,), 1 if kind is Kind.OUT else 2, accumulator_dtype)


def record_elements(problem: Problem, dtype: str, kind: Kind = Kind.KV) -> int:
    """Elements of one row of one head in a buffer of `dtype`: all batches."""
    return problem.batch * record_layout_of(problem, kind, dtype).elements(dtype)


def record_bytes(problem: Problem, dtype: str, kind: Kind = Kind.KV) -> int:
    """Bytes of the same."""
    return record_elements(problem, dtype, kind) * record_layout_of(problem, kind, dtype).element_bytes(dtype)


def buffer_bytes(problem: Problem, buffer: Buffer) -> int:
    """Bytes of a packed content."""
    return size(buffer.content) * record_bytes(problem, buffer.dtype, buffer.kind)
