"""The block tables of a pass: made for the cut of a kernel's blocks when it is first known, and kept on the device.

Guarantees: a table is made once for each side, cut and device; its flags say which launches meet a row first and last
(see `history`), all steps together or none.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import torch

from ringattn.core.geometry import Tile
from ringattn.engine.base import Softmax
from ringattn.engine.blocks import Blocks, key_blocks, query_blocks
from ringattn.engine.history import FLAGS, flagged
from ringattn.kernels.experimental.attention_specialized import one_entry_each
from ringattn.kernels.launch_call import FIRST, LAST, Config, Table


class Tables(NamedTuple):
    """The block tables of a pass, one a step. `flagged`: they say which blocks meet their rows first and last.

    `alone`: every block is both, so that nothing is carried. `single`: the steps whose blocks meet one entry each.
    """

    steps: list[Table]
    flagged: bool
    alone: bool
    single: list[bool]


class PassTables:
    """The tiles of a pass's steps with the block tables that were made of them so far."""

    def __init__(
        self, steps: Sequence[Sequence[Tile]], softmax: Softmax, rows: int, heads: int, more: bool = False
    ) -> None:
        """`more`: no step of these is the last that adds to a row."""
        self.steps, self.softmax, self.rows, self.heads = [tuple(tiles) for tiles in steps], softmax, rows, heads
        self.more = more
        self._made: dict[tuple[str, int, int, torch.device], Tables] = {}

    def by_query(self, config: Config, device: torch.device) -> Tables:
        """Query blocks of `config.block_m` rows that meet key blocks of `config.block_n`."""
        return self._kept("query", query_blocks, config.block_m, config.block_n, device)

    def by_key(self, config: Config, device: torch.device) -> Tables:
        """Key blocks of `config.block_n` rows that meet query blocks of `config.block_m`."""
        make = partial(key_blocks, group=self.softmax.group)
        return self._kept("key", make, config.block_n, config.block_m, device)

    def _kept(self, side: str, make: Callable[..., Blocks], own: int, other: int, device: torch.device) -> Tables:
        key = (side, own, other, device)
        if key not in self._made:
            made = [make(tiles, own_rows=own, other_rows=other) for tiles in self.steps]
            known = side == "query" and not self.more and flagged(made, self.rows, self.heads)
            alone = known and all((one.blocks[:, FLAGS] == FIRST | LAST).all() for one in made)
            single = [one_entry_each(torch.from_numpy(one.blocks)) for one in made]
            tables = [
                Table(torch.from_numpy(one.blocks).to(device), torch.from_numpy(one.entries).to(device), one.slots)
                for one in made
            ]
            self._made[key] = Tables(tables, known, alone, single)
        return self._made[key]
