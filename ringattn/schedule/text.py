"""Readable forms of a schedule: a text with one operation per line, and a grid of steps by ranks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby

from ringattn.schedule.content import describe
from ringattn.schedule.ops import Attend, Block, Copy, Merge, Schedule, Step, Work
from ringattn.schedule.passes import is_on_received


def to_text(schedule: Schedule) -> str:
    """Return every operation on a separate line. Equal texts mean equal schedules, except for the inside of tiles."""
    lines = [f"{schedule.name} on {schedule.problem.world_size} ranks"]
    for index in busy_steps(schedule):
        step = schedule.steps[index]
        lines.append(f"step {index}")
        lines += [f"  {_copy(copy)}" for copy in step.copies]
        lines += [f"  {_work(item)}" for item in step.work]
    return "\n".join(lines)


def grid(schedule: Schedule, ranks: Sequence[int] = ()) -> str:
    """Return a table of steps by ranks. A cell shows the rank's work and its messages in the step.

    `ranks`: the columns; all ranks if empty. Steps in which nothing happens are left out.
    """
    ranks = ranks or range(schedule.problem.world_size)
    rows = [["step", *(f"rank {rank}" for rank in ranks)]]
    rows += [[str(index), *(cell(schedule.steps[index], rank) for rank in ranks)] for index in busy_steps(schedule)]
    rows.insert(1, ["-" * max(map(len, column)) for column in zip(*rows, strict=True)])
    return "\n".join(line.rstrip() for line in aligned(rows, left=len(rows[0])))


def aligned(rows: Sequence[Sequence[str]], left: int = 0) -> list[str]:
    """Return the rows as lines with aligned columns; the first `left` columns are aligned to the left."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    pads = [str.ljust if column < left else str.rjust for column in range(len(widths))]
    return ["  ".join(pad(cell, width) for pad, cell, width in zip(pads, row, widths, strict=True)) for row in rows]


def busy_steps(schedule: Schedule) -> list[int]:
    """Return the numbers of the steps in which any rank computes or sends. Texts, pictures and errors name these steps.

    A step's number is its index in the schedule, the same on every rank. A rank cannot know in which steps all other
    ranks are idle, so idle steps keep their numbers and are left out of texts.
    """
    return [number for number, step in enumerate(schedule.steps) if step.copies or step.work]


def idle_steps(schedule: Schedule) -> str:
    """Return a text that names the idle steps, such as `nothing happens in steps 0–2,4`; empty if there are none."""
    idle = sorted(set(range(len(schedule.steps))) - set(busy_steps(schedule)))
    return f"nothing happens in step{'s' * (len(idle) > 1)} {spans(idle)}" if idle else ""


def spans(numbers: Iterable[int]) -> str:
    """Format numbers briefly: 0–3, 0,2 or 0–2,5."""
    ranges = []
    for _, group in groupby(enumerate(sorted(numbers)), key=lambda pair: pair[1] - pair[0]):
        run = [number for _, number in group]
        ranges.append(f"{run[0]}–{run[-1]}" if len(run) > 2 else ",".join(map(str, run)))
    return ",".join(ranges)


def cell(step: Step, rank: int) -> str:
    """Return one rank's part of a step, for example `KV1 | KV1>2`: attended or merged blocks, then messages.

    `KV1>2,3` is sent to two ranks. `Q0,1xKV0,2/3` is work on received queries and keys of sub-ring 3.
    """
    rank_work = [item for item in step.work if item.rank == rank]
    rest = (_short(item) for item in rank_work if isinstance(item, Merge) or not is_on_received(item))
    work = " ".join([*_received(rank_work), *rest])
    receivers: dict[Block, list[str]] = {}
    for copy in step.copies:
        if copy.src == rank:
            receivers.setdefault(copy.block, []).append(str(copy.dst))
    sends = " ".join(f"{block}>{','.join(ranks)}" for block, ranks in receivers.items())
    return f"{work or '-'} | {sends}" if sends else work or "-"


def _short(item: Work) -> str:
    return f"+{item.part}" if isinstance(item, Merge) else str(item.kv)


def _received(work: list[Work]) -> Iterator[str]:
    """Yield the work on received queries as text, one word for each sub-ring."""
    rings: dict[int | None, tuple[set[int], set[int]]] = {}
    for item in work:
        if not isinstance(item, Merge) and is_on_received(item):
            queries, keys = rings.setdefault(item.q.ring, (set(), set()))
            queries.add(item.q.owner)
            keys.add(item.kv.owner)
    for ring, sides in rings.items():
        q_owners, owners = (",".join(map(str, sorted(side))) for side in sides)
        yield f"Q{q_owners}xKV{owners}/{ring}"


def _copy(copy: Copy) -> str:
    return f"copy {copy.block} {copy.src}>{copy.dst} {describe(copy.content)}"


def _work(item: Work) -> str:
    if isinstance(item, Merge):
        return f"merge rank {item.rank}: {item.part} into {item.into}"
    name = "attend" if isinstance(item, Attend) else "attend_grad"
    tiles = sum(len(table) for _, table in item.tiles)
    pairs = sum(table.area() for _, table in item.tiles)
    return f"{name} rank {item.rank}: {item.q} x {item.kv}, {tiles} tiles, {pairs} pairs"
