"""The plan of one rank: its part of a schedule, with an offset in the arena for every buffer before anything runs.

The executor follows the plan. Each step lists what to pack, send, receive, zero, compute and merge, and names the
buffers involved.
"""

from __future__ import annotations

from collections.abc import Sequence
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
"""Used as a buffer index: the rank's local tensor of the kind in question, by default K/V or dK/dV."""

ONE = StridedRange(0, 1)
"""The heads of a buffer with a single head, each of whose rows belongs to some K/V head."""

ALIGNMENT_BYTES = 256


class Inside(NamedTuple):
    """The position of a buffer inside another buffer: it begins at `row`, counted in records."""

    buffer: int
    row: int


class Buffer(NamedTuple):
    """Memory for the rows of a block that are held or sent. Live in plan steps first .. last (both included)."""

    label: str
    content: Content
    dtype: str
    first: int
    last: int
    offset_bytes: int = -1
    kind: Kind = Kind.KV
    inside: Inside | None = None


class Pack(NamedTuple):
    """An operation that gathers the content of `into` from `source` (a buffer or LOCAL) in the dtype of `into`.

    See `runtime/records.py`.
    """

    source: int
    into: int


class Send(NamedTuple):
    """A message to `peer`: `elements` elements of a buffer, starting at element `first`."""

    peer: int
    buffer: int
    first: int
    elements: int
    label: str


class Recv(NamedTuple):
    """A message from `peer` into `elements` elements of a buffer, starting at element `first`.

    All messages into a buffer together fill it.
    """

    peer: int
    buffer: int
    first: int
    elements: int
    label: str


class AttendOp(NamedTuple):
    """Work on tiles that read K/V heads `heads`: one head part of an owner, or all heads of the local tensors.

    `owner` is None if the tiles read rows of several owners in a fused buffer. If `heads` is `ONE` there, each row
    belongs to one head.

    Key row r of a tile is row kv_row + r * kv_step of `kv` (a buffer or LOCAL). In backward, the gradients of key row r
    are added to row dkv_row + r * dkv_step of `dkv`. `overwrite`: no earlier work has set these rows of any tile, so
    the gradients overwrite them. `last`: no later work adds to these rows, so the sum is final.
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
    overwrite: bool = False
    last: bool = False


class AttendReceivedOp(NamedTuple):
    """Work on received queries and received keys. No two heads share a row, so the buffers have a single head.

    All operations with the same buffer `q` share one state. The first of them initializes it (backward: from `inputs`),
    and the last fills `result` with out and lse (backward: with dQ). An operation without `inputs` or `result` has
    LOCAL there. In backward, the operation adds dK and dV to `dkv`, or with `overwrite` overwrites the rows of its
    tiles.
    """

    tiles: TileTable
    q: int
    kv: int
    result: int = LOCAL
    inputs: int = LOCAL
    dkv: int = LOCAL
    overwrite: bool = False


class Add(NamedTuple):
    """An operation that adds the whole buffer `part` to the same rows of `into` (a buffer or LOCAL).

    Partial outputs are merged instead of added.

    `overwrite`: nothing in the pass has set these rows of `into` yet, so copy `part` instead of adding it.
    """

    part: int
    into: int
    overwrite: bool = False


class Zero(NamedTuple):
    """An operation that sets rows of a dK/dV buffer to zero. `rows`: the rows of each head part of the buffer."""

    buffer: int
    rows: Content


class OwnSums(StrEnum):
    """The initial state of the accumulators of the rank's local dK and dV."""

    ZEROED = "zeroed"
    UNSET = "unset"
    """The accumulators are uninitialized: the first work on each row overwrites it."""
    NONE = "none"
    """There are no accumulators: the first work on each row is also the last, and writes the result."""


class PlanStep(NamedTuple):
    """One step of one rank. `number` is the step's number in the schedule of all ranks.

    `restores`: packs from eight bits to the inputs' dtype, executed while the step's messages travel.
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
    """Everything that one rank does in one pass. `backward` decides the meaning of an `AttendOp`.

    `kept`: the buffers that a forward pass keeps for its backward pass, or that a backward pass begins with, in the
    same order. `own_sums`: in backward, the initial state of the sums for the rank's local keys and values.
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
        """Count the messages and bytes that the pass sends."""
        sends = [send for step in self.steps for send in step.sends]
        nbytes = sum(send.elements * self.element_bytes(send.buffer) for send in sends)
        object.__setattr__(self, "messages", len(sends))
        object.__setattr__(self, "bytes_sent", nbytes)

    @property
    def kept_bytes(self) -> int:
        """Bytes of remote inputs that are kept between the passes, outside the arena."""
        return sum(buffer_bytes(self.problem, self.buffers[buffer]) for buffer in self.kept)

    def element_bytes(self, buffer: int) -> int:
        """Return the bytes of an element: the unit in which messages of a buffer are counted."""
        described = self.buffers[buffer]
        return record_layout_of(self.problem, described.kind, described.dtype).element_bytes(described.dtype)


class RecordLayout(NamedTuple):
    """The layout of a record: the data of one row and head of one batch.

    A record has a value vector for each of `dims`, next to each other, in the buffer's dtype. `scalars` numbers in
    `scalar_dtype` follow each vector. A record with scalars is counted in bytes, and its values are padded so that the
    scalars are aligned; a record without scalars is counted in values.
    """

    dims: tuple[int, ...]
    scalars: int = 0
    scalar_dtype: str = "float32"

    def elements(self, dtype: str) -> int:
        """Return the number of elements of a record with values of `dtype`."""
        if not self.scalars:
            return sum(self.dims)
        step = ITEM_BYTES[self.scalar_dtype]
        values = sum(self.dims) * ITEM_BYTES[dtype]
        return values + -values % step + len(self.dims) * self.scalars * step

    def element_bytes(self, dtype: str) -> int:
        """Return the bytes of an element."""
        return 1 if self.scalars else ITEM_BYTES[dtype]


def record_layout_of(problem: Problem, kind: Kind, dtype: str) -> RecordLayout:
    """Return the record layout of a block of `kind` in a buffer of `dtype`.

    A record of a KV or DKV block has K next to V, in eight bits each with a float32 scale. A record of out also has its
    lse, and a record of dout has lse and delta.
    """
    key, value = problem.record_dims if kind in (Kind.KV, Kind.DKV) else (problem.head_dim, problem.value_dim)
    return _cached_layout(kind, dtype, key, value, problem.accumulator_dtype)


@cache
def _cached_layout(kind: Kind, dtype: str, q: int, v: int, accumulator_dtype: str) -> RecordLayout:
    if kind in (Kind.KV, Kind.DKV):
        return RecordLayout((q, v), 1 if dtype in EIGHT_BIT else 0)
    if kind in (Kind.Q, Kind.DQ):
        return RecordLayout((q,))
    return RecordLayout((v,), 1 if kind is Kind.OUT else 2, accumulator_dtype)


def record_elements(problem: Problem, dtype: str, kind: Kind = Kind.KV) -> int:
    """Return the elements of one row of one head in a buffer of `dtype`, for all batches."""
    return problem.batch * record_layout_of(problem, kind, dtype).elements(dtype)


def record_bytes(problem: Problem, dtype: str, kind: Kind = Kind.KV) -> int:
    """Return the bytes of one row of one head in a buffer of `dtype`, for all batches."""
    return record_elements(problem, dtype, kind) * record_layout_of(problem, kind, dtype).element_bytes(dtype)


def buffer_bytes(problem: Problem, buffer: Buffer) -> int:
    """Return the bytes of a buffer's packed content."""
    return size(buffer.content) * record_bytes(problem, buffer.dtype, buffer.kind)


# --- offsets of buffers in the arena ---------------------------------------------------------------------------------
# Double buffering needs no mechanism here. A buffer lives from the step that fills it to the last step that reads or
# sends it, both included, and buffers that live in the same step get disjoint bytes.


def lay_out(problem: Problem, buffers: list[Buffer]) -> tuple[tuple[Buffer, ...], int]:
    """Return the buffers with their offsets, and the bytes of the arena.

    Offsets are assigned by first fit, in the order of the buffers' first steps. A buffer lives at least as long as any
    buffer inside it.
    """
    # Steps may use a part without naming the whole buffer, so the whole lives as long as any part.
    placed = list(buffers)
    for buffer in buffers:
        if buffer.inside is not None:
            whole = placed[buffer.inside.buffer]
            first, last = min(whole.first, buffer.first), max(whole.last, buffer.last)
            placed[buffer.inside.buffer] = whole._replace(first=first, last=last)
    # Only whole buffers are placed.
    roots = [index for index, buffer in enumerate(buffers) if buffer.inside is None]
    live: list[tuple[int, int, int]] = []  # (offset, end, last step)
    peak = 0
    # First fit in order of the first step. Bytes run to the right, steps down:
    #    step 0   [ A ][ B ]
    #    step 1   [ C ][ B ]     A ended in step 0: C takes its place
    for index in sorted(roots, key=lambda i: placed[i].first):
        buffer = placed[index]
        # Round up, so that every offset is aligned.
        nbytes = _aligned_bytes(problem, buffer)
        # Both ends are included: a buffer whose last step is this buffer's first step still occupies its bytes.
        live = sorted(entry for entry in live if entry[2] >= buffer.first)
        offset = 0
        for start, end, _ in live:
            # Stop if the gap before this entry is large enough.
            if offset + nbytes <= start:
                break
            offset = max(offset, end)
        live.append((offset, offset + nbytes, buffer.last))
        placed[index] = buffer._replace(offset_bytes=offset)
        peak = max(peak, offset + nbytes)
    for index, buffer in enumerate(buffers):
        if buffer.inside is not None:
            before = buffer.inside.row * record_bytes(problem, buffer.dtype, buffer.kind)
            placed[index] = buffer._replace(offset_bytes=placed[buffer.inside.buffer].offset_bytes + before)
    return tuple(placed), peak


# --- live buffers, for reports and for errors ------------------------------------------------------------------------
# Each buffer that lives in a step counts once, rounded up to the alignment, as in `lay_out`.


def slot_bytes(plan: Plan, buffer: Buffer) -> int:
    """Return the bytes of the arena that a buffer occupies."""
    return _aligned_bytes(plan.problem, buffer)


def _aligned_bytes(problem: Problem, buffer: Buffer) -> int:
    return -(-buffer_bytes(problem, buffer) // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


def live(plan: Plan, step: int) -> list[Buffer]:
    """Return the buffers that live in a plan step, without those inside other buffers, in order of their offsets."""
    buffers = [buffer for buffer in plan.buffers if buffer.inside is None and buffer.first <= step <= buffer.last]
    return sorted(buffers, key=lambda buffer: buffer.offset_bytes)


def live_bytes(plan: Plan) -> int:
    """Return the largest number of bytes that live in one step."""
    by_step = (sum(slot_bytes(plan, buffer) for buffer in live(plan, step)) for step in range(len(plan.steps)))
    return max(by_step, default=0)


def fragmentation(plan: Plan) -> float:
    """Return the share of the arena that is unused even in the fullest step; 0 if the arena cannot be smaller."""
    return 1 - live_bytes(plan) / plan.arena_bytes if plan.arena_bytes else 0.0


def placements(plans: Sequence[Plan]) -> dict[str, int]:
    """Return counts and bytes of a ring's cached plans. Forward and backward plans count separately.

    `slots` and `pool_gap_bytes`: the number of buffers in the largest arena, and its bytes that are unused even in the
    fullest step. `kept_bytes`: the most bytes of remote tensors that a forward pass keeps for its backward pass.
    """
    largest = max(plans, key=lambda plan: plan.arena_bytes, default=None)
    return {
        "plans": len(plans),
        "slots": 0 if largest is None else sum(buffer.inside is None for buffer in largest.buffers),
        "pool_gap_bytes": 0 if largest is None else largest.arena_bytes - live_bytes(largest),
        "kept_bytes": max((plan.kept_bytes for plan in plans), default=0),
    }


def account(plan: Plan, step: int | None, workspace_bytes: int) -> str:
    """Describe the memory of a pass in lines of text, with the buffers that live in `step`.

    `step` is None before the first step of the plan.
    """
    direction = "backward" if plan.backward else "forward"
    head = (
        f"{plan.name} {direction}: staging buffers {mib(plan.arena_bytes)}, kept for backward {mib(plan.kept_bytes)}, "
        f"the engine's workspace {mib(workspace_bytes)}"
    )
    if step is None:
        return f"{head}; its first step had not begun"
    lines = [
        f"  {mib(slot_bytes(plan, buffer)):>12}  {buffer.label} ({buffer.kind.name}, {buffer.dtype})"
        for buffer in live(plan, step)
    ]
    return "\n".join([f"{head}; live in step {plan.steps[step].number}:", *(lines or ["  no buffer"])])


def mib(nbytes: int) -> str:
    """Format bytes as MiB."""
    return f"{nbytes / 2**20:.3f} MiB"
