"""Tiles whose keys are packed rows of a part."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from ringattn.core.tiling import TileTable
from ringattn.schedule.content import HeadRows


def within_runs(table: TileTable, places: Iterable[HeadRows | None]) -> TileTable:
    """The tiles cut so that the key rows of each lie in one run of each of the parts."""
    for part in places:
        # Contiguous keys lie in one of the merged contiguous ranges: nothing to cut.
        if part is not None and not (part.dense and (table.k_row_stride == 1).all()):
            # One tile for each held range that has some of its keys.
            found = part.locate(table.k_runs())
            table = TileTable.of(
                [
                    tile._replace(k=tile.k.pick(spot.indices))
                    for tile, spots in zip(table, found, strict=True)
                    for spot in spots
                ]
            )
    return table


def packed_rows(table: TileTable, part: HeadRows | None) -> tuple[np.ndarray, np.ndarray]:
    """The first key row of each tile and their step as rows of the part, of which one run holds them all."""
    rows, steps = table.k_row, table.k_row_stride
    if part is None:
        return rows, steps
    # Dense: the first row fixes the place, and the stride is kept. Else the overlap gives both.
    if part.dense:
        return part.offsets(rows), steps
    packed = [spot.packed for (spot,) in part.locate(table.k_runs())]
    return np.array([run.start for run in packed], np.int64), np.array([run.stride for run in packed], np.int64)
