"""Blocks side by side in one buffer, each row of a head a row of its own: one engine call reads them all.

Block A with head 0 rows 2..4 and head 1 rows 0..1, and block B with head 0 rows 7..8:
    buffer row    0 1 2 | 3 4 | 5 6
    holds         A0    | A1  | B0       starts: A 0, B 5
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from itertools import accumulate

from ringattn.core.geometry import StridedRange
from ringattn.core.tiling import TileTable
from ringattn.planner.packed_tiles import packed_rows, within_runs
from ringattn.schedule.content import Content, HeadRows, size
from ringattn.schedule.ops import Attend, AttendGrad, Block, Kind, Merge, Schedule
from ringattn.schedule.passes import is_on_received

# A row of a fused buffer is a row of one head already, so the buffer has a single head.
ONE = StridedRange(0, 1)


class FusedBuffer:
    """Blocks of one kind whose contents have a part for every head."""

    def __init__(self, label: str, kind: Kind, contents: Mapping[Block, Content]) -> None:
        """They lie in the order of `contents`."""
        self.label, self.kind, self.contents = label, kind, contents
        # Every part has one head, so a content's size is its number of buffer rows.
        rows = list(accumulate(map(size, contents.values()), initial=0))
        # `rows` has one border more than there are blocks: the last is the size of the buffer.
        self.starts = dict(zip(contents, rows, strict=False))
        self.content: Content = (HeadRows(ONE, (StridedRange(0, rows[-1]),)),)

    def parts(self, block: Block) -> Iterator[tuple[HeadRows, int]]:
        """Each part of a block with its first row in the buffer."""
        start = self.starts[block]
        for part in self.contents[block]:
            yield part, start
            # Parts follow one another as in a message, so what arrives fills the block's slice in place.
            start += part.row_count

    def tiles(self, items: Iterable[Attend | AttendGrad]) -> TileTable:
        """The tiles of all work on the buffer's blocks, keys as its rows."""
        tables = []
        for item in items:
            parts = {part.heads: (part, row) for part, row in self.parts(item.kv)}
            for heads, table in item.tiles:
                part, first = parts[heads]
                # Keys become buffer rows: their place in the packed part, plus the part's first row.
                cut = within_runs(table, [part])
                rows, steps = packed_rows(cut, part)
                tables.append(cut.replaced(k_row=rows + first, k_row_stride=steps))
        return TileTable.together(tables)


def alone(content: Content) -> bool:
    """Whether every part has one head."""
    return all(part.heads.count == 1 for part in content)


def arrivals_together(schedule: Schedule, rank: int, sums: Mapping[Block, Content]) -> Iterator[FusedBuffer]:
    """K/V that arrives at `rank` in one step and is read in one step, and in a backward pass the sums for it.

    Only where every part has one head and `sums`, what is returned to the owner of each, take the same rows.
    """
    steps = schedule.restricted_to(rank).steps
    work = [(at, item) for at, step in enumerate(steps) for item in step.work if not isinstance(item, Merge)]
    # Own keys are read in the caller's tensors; work on received queries has fused buffers of its own.
    reads = {item.kv: (at, item) for at, item in work if item.kv.owner != rank and not is_on_received(item)}
    # Kept blocks are there before step 0 and count as received in step -1.
    received = [
        (at, copy.block, copy.content) for at, step in enumerate(steps) for copy in step.copies if copy.dst == rank
    ]
    received += [(-1, block, content) for holder, block, content in schedule.kept if holder == rank]
    # A sum that others were merged into before the own work on it lies alone; it cannot begin in a fused buffer.
    merged = {item.into: at for at, step in reversed(list(enumerate(steps))) for item in step.work
              if isinstance(item, Merge)}  # fmt: skip
    reads = {
        kv: (at, item) for kv, (at, item) in reads.items()
        if isinstance(item, Attend) or merged.get(item.dkv, at) >= at
    }  # fmt: skip
    messages = Counter(block for _, block, _ in received)
    # Grouped by (step received, step read): only those live and are attended together. Of pieces no step brings all.
    groups: dict[tuple[int, int], dict[Block, Content]] = defaultdict(dict)
    for arrival, block, content in received:
        if block in reads and messages[block] == 1:
            groups[arrival, reads[block][0]][block] = content
    for (arrival, _), contents in groups.items():
        items = [reads[block][1] for block in contents]
        # Backward reads K/V and adds dK/dV at the same row numbers, so both contents must be equal, block by block.
        made = {item.dkv: sums.get(item.dkv) for item in items if isinstance(item, AttendGrad)}
        if all(map(alone, contents.values())) and (not made or list(made.values()) == list(contents.values())):
            yield FusedBuffer(f"KV of step {arrival}", Kind.KV, contents)
            if made:
                yield FusedBuffer(f"DKV of step {arrival}", Kind.DKV, dict(zip(made, contents.values(), strict=True)))
