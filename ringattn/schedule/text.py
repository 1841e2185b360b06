"""Schedules for people: a text form, one operation a line, and a grid of steps by ranks."""

from __future__ import annotations

from collections.abc import Iterator

from ringattn.schedule.content import describe
from ringattn.schedule.ops import Attend, Block, Copy, Merge, Schedule, Step, Work
from ringattn.schedule.passes import is_on_received


def to_text(schedule: Schedule) -> str:
    """Every operation on a line of its own; equal texts mean equal schedules up to the inside of tiles."""
    lines = [f"{schedule.name} on {schedule.problem.world_size} ranks"]
    for index, step in enumerate(schedule.steps):
        if step.copies or step.work:
            lines.append(f"step {index}")
            lines += [f"  {_copy(copy)}" for copy in step.copies]
            lines += [f"  {_work(item)}" for item in step.work]
    return "\n".join(lines)


def grid(schedule: Schedule, mark: tuple[int, int] | None = None) -> str:
    """Steps downwards, ranks across: in each cell what the rank computes and what it sends while it does.

    `mark` = (step, rank) puts `>>` before one cell; step -1 marks the rank's name. Steps without anything are left out.
    """
    ranks = schedule.problem.world_size
    head = [("  >>" if mark == (-1, rank) else "") + f"rank {rank}" for rank in range(ranks)]
    rows = [["step", *head]]
    for index, step in enumerate(schedule.steps):
        if step.copies or step.work:
            cells = [cell(step, rank) for rank in range(ranks)]
            rows.append(
                [str(index), *(">>" + text if mark == (index, rank) else text for rank, text in enumerate(cells))]
            )
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    return "\n".join([lines[0], "  ".join("-" * width for width in widths), *lines[1:]])


def cell(step: Step, rank: int) -> str:
    """One rank's part of a step, as `KV1 | KV1>2`: attended or merged blocks, then what is sent to whom.

    `KV1>2,3` goes to two ranks. `Q0,1xKV0,2/3` are others' queries and keys of sub-ring 3, which meet here.
    """
    mine = [item for item in step.work if item.rank == rank]
    rest = (_short(item) for item in mine if isinstance(item, Merge) or not is_on_received(item))
    work = " ".join([*_received(mine), *rest])
    to: dict[Block, list[str]] = {}
    for copy in step.copies:
        if copy.src == rank:
            to.setdefault(copy.block, []).append(str(copy.dst))
    sends = " ".join(f"{block}>{','.join(ranks)}" for block, ranks in to.items())
    return f"{work or '-'} | {sends}" if sends else work or "-"


def _short(item: Work) -> str:
    return f"+{item.part}" if isinstance(item, Merge) else str(item.kv)


def _received(work: list[Work]) -> Iterator[str]:
    """What is computed for other ranks, a word for each sub-ring."""
    rings: dict[int | None, tuple[set[int], set[int]]] = {}
    for item in work:
        if not isinstance(item, Merge) and is_on_received(item):
            queries, keys = rings.setdefault(item.q.ring, (set(), set()))
            queries.add(item.q.owner)
            keys.add(item.kv.owner)
    for ring, sides in rings.items():
        askers, owners = (",".join(map(str, sorted(side))) for side in sides)
        yield f"Q{askers}xKV{owners}/{ring}"


def _copy(copy: Copy) -> str:
    return f"copy {copy.block} {copy.src}>{copy.dst} {describe(copy.content)}"


def _work(item: Work) -> str:
    if isinstance(item, Merge):
        return f"merge rank {item.rank}: {item.part} into {item.into}"
    name = "attend" if isinstance(item, Attend) else "attend_grad"
    tiles = sum(len(table) for _, table in item.tiles)
    pairs = sum(table.area() for _, table in item.tiles)
    return f"{name} rank {item.rank}: {item.q} x {item.kv}, {tiles} tiles, {pairs} pairs"
