"""How evenly the launches of a step fill the SMs: the ratio of their makespan and the ideal, without a GPU.

Run `python -m ringattn.bench.makespan`. The tile tables are those of the engine. The work of an item is counted in
visited blocks of rows, and each SM runs one program. The ideal is an equal share for each program; `least` is a lower
bound for every order of the items.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heapreplace
from typing import NamedTuple

import numpy as np

from ringattn.bench.options import parse
from ringattn.bench.report import RESULTS, Table, finish
from ringattn.core.layout import make_layout
from ringattn.core.mask import make_mask
from ringattn.core.problem import Problem
from ringattn.core.tiling import tiles_of
from ringattn.engine.blocks import Blocks, Ints, key_blocks, query_blocks
from ringattn.kernels.attention_tiles import H100, Gpu, section_of
from ringattn.kernels.launch import BlockColumn, EntryColumn

HEADS, DIM, RANKS, WINDOW, DOCUMENTS = 16, 128, 4, 1024, 16
BLOCK_SIDES = "query", "key"
STEPS = (
    ("causal", 4096), ("causal", 8192), ("causal", 16384), ("window", 16384), ("documents", 16384),
    ("zigzag 1", 8192), ("zigzag 0", 8192), ("zigzag 3", 8192), ("striped 1", 8192), ("striped 2", 8192),
)  # fmt: skip
GPUS = {"H100, H200": H100, "A100": Gpu(40 << 20, 108), "B200": Gpu(126 << 20, 148)}


@dataclass(frozen=True)
class MakespanOptions:
    """The options of the benchmark. `results` is the folder for the figures; if it is empty, none are saved."""

    results: str = RESULTS


class Launch(NamedTuple):
    """The items of a launch: one for each of `blocks` and each of `heads` heads, counted over all batches.

    Each head reads `head_bytes` bytes block by block, and `sharing` heads read the same bytes.
    """

    blocks: Blocks
    heads: int
    head_bytes: int
    sharing: int

    def section(self, gpu: Gpu) -> int:
        """Return the section size, as `attention_tiles.section_for` does."""
        return section_of(self.heads, len(self.blocks.blocks), self.head_bytes, gpu, self.sharing)


def work_of(blocks: Blocks) -> Ints:
    """Return the work of each block for one head of the table: the visited blocks of rows times query heads."""
    entries = blocks.entries.astype(np.int64)
    visited = entries[:, EntryColumn.END_VISIBLE] - entries[:, EntryColumn.FIRST_VISIBLE]
    sums = np.concatenate(([0], np.cumsum(visited * entries[:, EntryColumn.Q_HEADS])))
    return sums[blocks.blocks[:, BlockColumn.END_ENTRY]] - sums[blocks.blocks[:, BlockColumn.FIRST_ENTRY]]


def order(block_count: int, heads: int, section: int) -> Ints:
    """Return an (items, 2) array: block and head of each item, in the order of `attention_tiles.item_of`."""
    return np.array(
        [
            (block, head)
            for end in range(heads % section or section, heads + 1, section)
            for block in range(block_count)
            for head in range(max(0, end - section), end)
        ]
    ).reshape(-1, 2)


def items_of(launch: Launch, section: int) -> Ints:
    """Return the work of each item, in grid order; 0 for a head that the block does not have."""
    block_and_head = order(len(launch.blocks.blocks), launch.heads, section)
    slot = block_and_head[:, 1] % max(launch.blocks.slots, 1)
    return work_of(launch.blocks)[block_and_head[:, 0]] * (slot < launch.blocks.blocks[block_and_head[:, 0], 4])


def makespan(items: Ints, programs: int) -> int:
    """Return when the last of `programs` programs ends, if each takes the next item as soon as it is free."""
    ends = [0] * programs
    for work in items.tolist():
        heapreplace(ends, ends[0] + work)
    return max(ends)


def strided(items: Ints, programs: int) -> int:
    """Return the makespan if program p takes the items p, p + programs, and so on."""
    return int(max(items[first::programs].sum() for first in range(programs)))


def least(items: Ints, programs: int) -> float:
    """Return a lower bound of the makespan for every order of the items.

    It is an equal share of the work, or more. Of the longest n * programs + 1 items, some program must run at least
    n + 1, so the makespan is at least the work of the shortest n + 1 of these items.
    """
    longest = -np.sort(-items)
    sums = np.concatenate(([0], np.cumsum(longest)))
    shortest = [sums[n * programs + 1] - sums[n * programs - n] for n in range(1 + max(0, len(items) - 1) // programs)]
    return max(float(items.sum()) / programs, *(float(together_work) for together_work in shortest))


def ratio(items: Ints, programs: int) -> float:
    """Return the ratio of makespan and ideal."""
    return makespan(items, programs) * programs / float(items.sum())


def step_of(name: str, tokens: int, side: str = "query", kv_heads: int = HEADS, batch: int = 1) -> Launch:
    """Return the launch of a causal step with `tokens` rows per rank.

    `name` is "causal", "window" or "documents" for a step on one rank, or "LAYOUT OWNER" for the step in which rank 1
    of four attends to the keys of rank OWNER. If `side` is "query", blocks of 128 query rows read 128 keys at a time.
    Otherwise the launch is that of dK and dV, whose blocks of 128 key rows read 64 queries at a time.
    """
    layout, _, owner = name.partition(" ")
    ranks = RANKS if owner else 1
    length = tokens * ranks
    borders = (0, *sorted(random.Random(0).sample(range(1, length), DOCUMENTS - 1)), length)
    documents = borders if name == "documents" else None
    mask = make_mask(
        length, length, causal=True,
        window=(WINDOW - 1, 0) if name == "window" else None, documents=documents, kv_documents=documents,
    )  # fmt: skip
    token_layout = make_layout(layout if owner else "contiguous", length, ranks)
    problem = Problem(token_layout, token_layout, mask, batch, HEADS, kv_heads, DIM, DIM, "bfloat16")
    tables = tiles_of(problem, 1 % ranks).items()
    tiles = [tile for (owner_, _), table in tables if owner_ == int(owner or 0) for tile in table]
    # The bytes of K and V, or of q and dout, of one head in half precision.
    head_operand_bytes = tokens * 2 * DIM * 2
    if side == "query":
        blocks, head_bytes, sharing = query_blocks(tiles, 128, 128), head_operand_bytes, problem.group
    else:
        blocks, head_bytes, sharing = key_blocks(tiles, problem.group, 128, 64), head_operand_bytes * problem.group, 1
    return Launch(blocks, blocks.slots * batch, head_bytes, sharing)


def figures(launch: Launch, gpu: Gpu) -> dict[str, float]:
    """Return the ratios of makespan and ideal of a launch, for our order, the lower bound, and other orders."""
    programs, ours, by_head = gpu.multiprocessors, items_of(launch, launch.section(gpu)), items_of(launch, 1)
    ideal = float(ours.sum()) / programs
    makespans = {
        "ours": makespan(ours, programs),
        "least": least(ours, programs),
        "by_head": makespan(by_head, programs),
        "strided": strided(ours, programs),
        "by_head_strided": strided(by_head, programs),
    }
    return {kind: round(makespan_ / ideal, 4) for kind, makespan_ in makespans.items()}


def all_steps() -> dict[str, dict[str, float]]:
    """Return the figures of all steps, by "step, tokens, side, multiprocessors"."""
    return {
        f"{name}, {tokens}, {side}, {gpu.multiprocessors}": figures(launch, gpu)
        for name, tokens in STEPS
        for side in BLOCK_SIDES
        for launch in [step_of(name, tokens, side)]
        for gpu in GPUS.values()
    }


def main(arguments: Sequence[str]) -> None:
    """Print and save the figures."""
    options, all_figures = parse(MakespanOptions(), arguments), all_steps()
    table = Table(
        "Makespan over ideal, 16 heads, batch 1",
        ("step, tokens a rank, blocks of, multiprocessors", "ours", "least", "head by head", "strided", "both"),
        [(name, *(f"{figure:.3f}" for figure in step_figures.values())) for name, step_figures in all_figures.items()],
        ["Ours and head by head: a free program takes the next item. Strided: program p takes each n-th item from p."],
    )
    finish("makespan", options, [table], {"figures": all_figures}, options.results)


if __name__ == "__main__":
    main(sys.argv[1:])
