"""How large a plan would be, counted before any of it is made: pieces of the layout, tiles of work.

A plan holds ranges, so its size does not follow the tokens; many segments, documents or ranks make it large all the
same.
"""

from __future__ import annotations

import numpy as np

from ringattn.core.problem import Problem
from ringattn.core.tiling import meeting_pieces, spanned
from ringattn.errors import InputError

MOST_PIECES = 2**18
"""Of all branches, on all ranks: some hundred bytes each."""

MOST_TILES = 2**18
"""Of all ranks, before a band hides any: a kilobyte each, and a fraction of a millisecond."""

REMEDY = "plan a sequence whose length, segments and documents are all shorter by one factor, on as few ranks"


def check_extent(problem: Problem, by_head: bool = False, groups: int = 1) -> None:
    """Raise `InputError` with the count if a plan of all ranks would be too large; see `excess`."""
    if found := excess(problem, by_head, groups):
        raise InputError(f"{found}; {REMEDY}")


def excess(problem: Problem, by_head: bool = False, groups: int = 1) -> str | None:
    """What a plan of all ranks would have too many of; None if it can be made.

    `by_head`: each head has its tiles. `groups`: of so many groups of ranks one is planned at a time.
    """
    name, ranks = problem.q_layout.name, problem.world_size
    pieces = sum(
        spanned(layout, bounds, branch.segment)
        for branch in problem.mask.branches
        for layout, bounds in ((problem.q_layout, branch.bounds), (problem.kv_layout, branch.kv_bounds))
    )
    if pieces > 2 * MOST_PIECES:  # queries and keys
        return (
            f"{len(problem.mask.branches)} branches cut the {name} layout of {problem.q_layout.length} tokens on "
            f"{ranks} ranks into {pieces // 2} pieces, and {MOST_PIECES} can be planned"
        )
    tiles = 0
    for branch in problem.mask.branches:
        q, k = (pieces.segment for pieces in meeting_pieces(problem, branch))
        least = max(q.max(initial=0), k.max(initial=0)) + 1
        meetings = int(np.bincount(q, minlength=least) @ np.bincount(k, minlength=least))
        shared = [part.q_heads if branch.heads is None else part.q_heads.intersect(branch.heads)
                  for part in problem.parts]  # fmt: skip
        tiles += meetings * sum(heads.count if by_head else heads.count > 0 for heads in shared)
    if tiles > MOST_TILES * groups:
        return (
            f"queries and keys of {ranks} ranks in {name} layout meet in {tiles // groups} tiles"
            f"{f' for each of {groups} groups' if groups > 1 else ''}"
            f"{', one for each head,' if by_head else ''} and {MOST_TILES} can be planned"
        )
    return None
