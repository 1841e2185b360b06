"""One rank's part of a schedule, with every byte placed before anything runs.

A plan is what the executor follows: per step what to pack, send, receive, zero, compute and merge, each naming the
buffer it touches; each buffer has its offset in the arena.
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
    added to row dkv_row + r * dkv_step of `dkv`. `overwrite`: nothing has set these rows, of any tile, so the gradients
    overwrite them; `last`: nothing adds to them afterwards, so the sum is final.
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
    """Work on queries that came, and on keys that came; no two heads share a row, so there is one head.

    The works with one buffer `q` carry one state: the first of them begins it, backward from `inputs`, and the last
    fills `result` with out and lse, backward with dQ; elsewhere these are LOCAL, for none. Backward accumulates into
    `dkv`, or overwrites the rows of its tiles.
    """

    tiles: TileTable
    q: int
    kv: int
    result: int = LOCAL
    inputs: int = LOCAL
    dkv: int = LOCAL
    overwrite: bool = False


class Add(NamedTuple):
    """Add a whole buffer into the same rows of another (or LOCAL); partial outputs are merged.

    `overwrite`: nothing of the pass has set these rows before, so they are copied.
    """

    part: int
    into: int
    overwrite: bool = False


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


# --- offsets of buffers in the arena ---------------------------------------------------------------------------------
# Double buffering is not a mechanism here but a result: a buffer lives from the step that fills it to the last step
# that reads or sends it, both included. Buffers that live in a common step get disjoint bytes.


def lay_out(problem: Problem, buffers: list[Buffer]) -> tuple[tuple[Buffer, ...], int]:
    """Offsets by first fit in order of birth, and the arena's bytes. What lies inside a buffer prolongs its life."""
    # Parts may be used outside the steps that name the whole: it lives as long as any of them.
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
    # First fit by birth. Bytes run to the right, steps down:
    #    step 0   [ A ][ B ]
    #    step 1   [ C ][ B ]     A ended in step 0: C takes its place
    for index in sorted(roots, key=lambda i: placed[i].first):
        buffer = placed[index]
        # Rounded up, so that every offset is aligned.
        nbytes = _aligned_bytes(problem, buffer)
        # Both ends are included: a buffer whose last step is this one's first still holds its bytes.
        live = sorted(entry for entry in live if entry[2] >= buffer.first)
        offset = 0
        for start, end, _ in live:
            # The gap before this entry is large enough.
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
# Counts each buffer that lives in a step once, rounded up to the alignment, as `lay_out` does.


def slot_bytes(plan: Plan, buffer: Buffer) -> int:
    """Return the bytes of the arena that a buffer takes."""
    return _aligned_bytes(plan.problem, buffer)


def _aligned_bytes(problem: Problem, buffer: Buffer) -> int:
    return -(-buffer_bytes(problem, buffer) // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


def live(plan: Plan, step: int) -> list[Buffer]:
    """The buffers that live in a plan step and lie in no other, in order of their place."""
    found = [one for one in plan.buffers if one.inside is None and one.first <= step <= one.last]
    return sorted(found, key=lambda one: one.offset_bytes)


def live_bytes(plan: Plan) -> int:
    """The most that lives in one step."""
    return max((sum(slot_bytes(plan, one) for one in live(plan, step)) for step in range(len(plan.steps))), default=0)


def fragmentation(plan: Plan) -> float:
    """The share of the arena that is a gap even in the fullest step; 0 for a placement that cannot be smaller."""
    return 1 - live_bytes(plan) / plan.arena_bytes if plan.arena_bytes else 0.0


def placements(plans: Sequence[Plan]) -> dict[str, int]:
    """Counts and bytes of a ring's cached plans, forward and backward apart.

    `slots` and `pool_gap_bytes`: of the largest arena, its buffers and what is a gap even in its fullest step.
    `kept_bytes`: the most that one forward pass keeps of others' tensors for its backward.
    """
    largest = max(plans, key=lambda plan: plan.arena_bytes, default=None)
    return {
        "plans": len(plans),
        "slots": 0 if largest is None else sum(one.inside is None for one in largest.buffers),
        "pool_gap_bytes": 0 if largest is None else largest.arena_bytes - live_bytes(largest),
        "kept_bytes": max((plan.kept_bytes for plan in plans), default=0),
    }


def account(plan: Plan, step: int | None, workspace_bytes: int) -> str:
    """Lines that say what the pass needs and, in a `step` of the plan, which buffers live; None: before its first."""
    direction = "backward" if plan.backward else "forward"
    head = (
        f"{plan.name} {direction}: staging buffers {mib(plan.arena_bytes)}, kept for backward {mib(plan.kept_bytes)}, "
        f"the engine's workspace {mib(workspace_bytes)}"
    )
    if step is None:
        return f"{head}; its first step had not begun"
    lines = [
        f"  {mib(slot_bytes(plan, one)):>12}  {one.label} ({one.kind.name}, {one.dtype})" for one in live(plan, step)
    ]
    return "\n".join([f"{head}; live in step {plan.steps[step].number}:", *(lines or ["  no buffer"])])


def remedies(plan: Plan) -> list[str]:
    """What to change, the cheapest first; only what applies to this plan."""
    found = []
    problem = plan.problem
    if plan.name != "ring" and problem.world_size > 1:
        found.append(f"schedule='ring' holds two blocks at a time, where {plan.name} may hold all that comes")
    if plan.kept_bytes:
        found.append("schedule='ring' keeps nothing between forward and backward")
    if problem.world_size > 1 and problem.kv_wire_dtype is None and problem.dtype in ("float16", "bfloat16"):
        found.append("kv_wire_dtype='int8' halves the staging buffers of keys and values that travel")
    if problem.batch > 1:
        found.append(f"a smaller batch: all figures are proportional to it, now {problem.batch}")
    found.append(f"more ranks: now {problem.world_size}, {problem.q_layout.counts[plan.rank]} tokens on this one")
    return found


def mib(nbytes: int) -> str:
    """Bytes as MiB."""
    return f"{nbytes / 2**20:.3f} MiB"
