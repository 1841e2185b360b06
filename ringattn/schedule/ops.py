"""The vocabulary of schedules: blocks, four operations, steps.

A schedule is global: a send and its receive are one `Copy`, so they match by construction. Copies and work of a step
are concurrent: both read the results of earlier steps, and rows delivered by a step's copies may be read from the next
step on. A fifth operation needs a decision record.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import NamedTuple

from ringattn.core.geometry import StridedRange
from ringattn.core.problem import Problem
from ringattn.core.tiling import TileTable, tiles_of
from ringattn.schedule.content import Content

NONE = StridedRange(0, 0)


class Kind(StrEnum):
    """The kind of data in a block. K and V are one block, and so are dK and dV."""

    Q = "Q"
    KV = "KV"
    OUT = "OUT"
    GRAD_OUT = "GRAD_OUT"
    DQ = "DQ"
    DKV = "DKV"


INPUTS = Kind.Q, Kind.KV, Kind.GRAD_OUT
"""The kinds that a rank has at the beginning of a pass. The others are sums that a pass computes."""


class Block(NamedTuple):
    """The name of some data: its kind and its owner. `origin`: for a partial sum, the rank that computed it, else None.

    `ring`: the sub-ring in which the block is sent, if its owner has several; None if there is only one ring.
    """

    kind: Kind
    owner: int
    origin: int | None = None
    ring: int | None = None

    def __str__(self) -> str:
        origin = "" if self.origin is None else f"@{self.origin}"
        return f"{self.kind}{self.owner}{origin}" + ("" if self.ring is None else f"/{self.ring}")


class HeadTiles(NamedTuple):
    """Tiles that all read the K/V `heads` of a block; key rows are rows of the owner's shard."""

    heads: StridedRange
    tiles: TileTable


class Copy(NamedTuple):
    """An operation that sends `content` of `block` from `src`, which keeps it, to `dst`."""

    block: Block
    src: int
    dst: int
    content: Content
    lane: int = 0


class Attend(NamedTuple):
    """An operation of `rank` that attends `q` to `kv` in these tiles and accumulates into the softmax state `out`."""

    rank: int
    q: Block
    kv: Block
    out: Block
    tiles: tuple[HeadTiles, ...]


class AttendGrad(NamedTuple):
    """An operation of `rank` that adds the gradients of these tiles to `dq` and `dkv`."""

    rank: int
    q: Block
    kv: Block
    inputs: Block
    dq: Block
    dkv: Block
    tiles: tuple[HeadTiles, ...]


class Merge(NamedTuple):
    """An operation of `rank` that adds the received `part` to `into`, row by row."""

    rank: int
    into: Block
    part: Block


Work = Attend | AttendGrad | Merge


class Step(NamedTuple):
    """Copies and work that run concurrently."""

    copies: tuple[Copy, ...] = ()
    work: tuple[Work, ...] = ()


def ordered_step(copies: Iterable[Copy], work: Iterable[Work]) -> Step:
    """Return a step in canonical order, so that equal schedules are equal values and peers order messages equally."""
    return Step(tuple(sorted(copies, key=_copy_order)), tuple(sorted(work, key=_work_order)))


def _copy_order(copy: Copy) -> tuple[bool, int, int, int, int, Kind]:
    block = copy.block
    return block.kind is not Kind.KV, block.owner, copy.src, copy.dst, block.ring or 0, block.kind


def _work_order(item: Work) -> tuple[int, int, int, int, Kind, int, StridedRange]:
    if isinstance(item, Merge):
        _, owner, origin, ring = part = item.part
        return item.rank, owner, -1 if origin is None else origin, ring or 0, part.kind, 0, NONE
    heads = item.tiles[0].heads if item.tiles else NONE
    return item.rank, item.kv.owner, -1, item.kv.ring or 0, item.kv.kind, item.q.owner, heads


@dataclass(frozen=True)
class Schedule:
    """The steps of all ranks in one pass. Steps may be empty, because the functions in `passes` rely on step numbers.

    `backward`: the direction of the pass, the same on all ranks; the work and copies of a single rank may not show it.
    `kept`: (rank, block, rows) of remote inputs that ranks hold at the beginning, because the forward pass kept them.
    """

    problem: Problem
    name: str
    backward: bool
    steps: tuple[Step, ...]
    kept: tuple[tuple[int, Block, Content], ...] = ()

    def restricted_to(self, rank: int) -> Schedule:
        """Return the part of the schedule that `rank` sends, receives and computes."""
        steps = tuple(
            Step(
                tuple(copy for copy in step.copies if rank in (copy.src, copy.dst)),
                tuple(work for work in step.work if work.rank == rank),
            )
            for step in self.steps
        )
        return replace(self, steps=steps, kept=tuple(block for block in self.kept if block[0] == rank))


def attend(rank: int, owner: int, tiles: tuple[HeadTiles, ...], ring: int | None = None) -> Attend:
    """Return the work of `rank` that attends its local queries to `owner`'s keys, received in sub-ring `ring`."""
    return Attend(rank, Block(Kind.Q, rank), Block(Kind.KV, owner, ring=ring), Block(Kind.OUT, rank), tiles)


def attend_grad(item: Attend) -> AttendGrad:
    """Return the backward work of `item`. Its dK and dV are partial sums, and so is its dQ if queries are received."""
    rank, q, kv = item.rank, item.q, item.kv
    inputs, dq = (
        Block(Kind.GRAD_OUT, q.owner, ring=q.ring),
        Block(Kind.DQ, q.owner, q.ring if q.ring is None else rank, q.ring),
    )
    return AttendGrad(rank, q, kv, inputs, dq, Block(Kind.DKV, kv.owner, rank, kv.ring), item.tiles)


def work_of(problem: Problem, rank: int, *, keys: bool = False) -> dict[int, tuple[HeadTiles, ...]]:
    """Return the tiles of `rank`'s queries by owner of the keys; with `keys`, of its keys by owner of the queries."""
    by_owner: dict[int, tuple[HeadTiles, ...]] = {}
    for (owner, part), table in tiles_of(problem, rank, keys=keys).items():
        by_owner[owner] = (*by_owner.get(owner, ()), HeadTiles(problem.parts[part].kv_heads, table))
    return by_owner
