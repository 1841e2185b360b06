"""The block tables of a pass: made for the cut of a kernel's blocks when it is first known, and kept on the device.

Guarantees: a table is made once for each side, block size and device; its flags say which launches are the first and
the last to update a row: a query row by `history`, for all steps or for none, a key row as the step's `Visit` says.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from ringattn.core.geometry import Tile
from ringattn.engine.base import Softmax, Visit
from ringattn.engine.blocks import Blocks, Ints, key_blocks, query_blocks
from ringattn.engine.history import FLAGS, flagged
from ringattn.engine.philox import KEYS_OF_A_COUNTER
from ringattn.kernels.experimental.attention_specialized import one_entry_each
from ringattn.kernels.launch_call import FIRST, LAST, Config, Table


class Tables(NamedTuple):
    """The block tables of a pass, one a step. `flagged`: they say which blocks are the first and last on their rows.

    `alone`: every block is both, so that nothing is carried. `single`: the steps whose blocks have one entry each.
    """

    steps: list[Table]
    flagged: bool
    alone: bool
    single: list[bool]


class PassTables:
    """The tiles of a pass's steps with the block tables that were made of them so far."""

    def __init__(
        self,
        steps: Sequence[Sequence[Tile]],
        softmax: Softmax,
        rows: int,
        heads: int,
        more: bool = False,
        visits: Sequence[Visit] = (),
    ) -> None:
        """`more`: no step of these is the last that adds to a row. `visits`: of each step to its dK/dV."""
        self.steps, self.softmax, self.rows, self.heads = [tuple(tiles) for tiles in steps], softmax, rows, heads
        # Outputs of other ranks are still merged after these steps, so the state must be kept.
        self.more = more
        self.visits = visits or [Visit()] * len(self.steps)
        self._made: dict[tuple[str, int, int, torch.device], Tables] = {}
        self._slopes: dict[torch.device, Tensor] = {}

    def slopes(self, device: torch.device) -> Tensor | None:
        """Those of ALiBi, one for each query head of the call."""
        if self.softmax.alibi_slopes is None:
            return None
        if device not in self._slopes:
            self._slopes[device] = torch.tensor(self.softmax.alibi_slopes, dtype=torch.float32, device=device)
        return self._slopes[device]

    def by_query(self, config: Config, device: torch.device) -> Tables:
        """Query blocks of `config.block_m` rows; their entries are in key blocks of `config.block_n`."""
        own, other = config.block_m, config.block_n
        make = [partial(query_blocks, tiles, softmax=self.softmax) for tiles in self.steps]
        return self._kept("query", make, own, other, device)

    def by_key(self, config: Config, device: torch.device) -> Tables:
        """Key blocks of `config.block_n` rows; their entries are in query blocks of `config.block_m`."""
        # K/V heads own the blocks here, so an entry also says which query heads of its group. Rows that no query sees
        # have a block where they must be set, or converted.
        make = [
            partial(key_blocks, tiles, self.softmax.group, unseen=any(visit), softmax=self.softmax)
            for tiles, visit in zip(self.steps, self.visits, strict=True)
        ]
        return self._kept("key", make, config.block_n, config.block_m, device)

    def _kept(
        self, side: str, make: Sequence[Callable[..., Blocks]], own: int, other: int, device: torch.device
    ) -> Tables:
        # Kernels of equal block sizes share a table.
        key = (side, own, other, device)
        if key not in self._made:
            made = [one(own_rows=own, other_rows=other) for one in make]
            if side == "key":
                # A step is the first, or the last, on all rows of its tiles.
                for one, visit in zip(made, self.visits, strict=True):
                    one.blocks[:, FLAGS] = FIRST * visit.first | LAST * visit.last
            # Only query rows carry a state between steps; with `more` to come none of these steps is the last.
            known = side == "query" and not self.more and flagged(made, self.rows, self.heads)
            # Every block the first and last on its rows: one step does all its work.
            alone = known and all((one.blocks[:, FLAGS] == FIRST | LAST).all() for one in made)
            # What the specialized kernel can take: at most one entry in a block.
            single = [one_entry_each(torch.from_numpy(one.blocks)) for one in made]
            # Copied after `flagged`, which writes the flags into the host arrays.
            tables = [_table_on(device, one, side == "key") for one in made]
            self._made[key] = Tables(tables, known, alone, single)
        return self._made[key]


def _table_on(device: torch.device, made: Blocks, keys_own: bool) -> Table:
    places, positions = (None if one is None else _on(device, one) for one in (made.places, made.positions))
    together = 1 if made.positions is None else _together(made.positions[:, 0 if keys_own else 2 :])
    return Table(_on(device, made.blocks), _on(device, made.entries), made.slots, places, positions, together)


def _together(keys: Ints) -> int:
    """`Table.together` of entries whose first key has the position of the first column, the stride being the second."""
    # Blocks have 16 keys or a multiple of it.
    return 1 if (keys[:, 1] != 1).any() or (keys[:, 0] % KEYS_OF_A_COUNTER).any() else KEYS_OF_A_COUNTER


def _on(device: torch.device, columns: Ints) -> Tensor:
    return torch.from_numpy(columns).to(device)
