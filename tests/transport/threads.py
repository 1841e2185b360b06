"""Run the ranks of a test as threads of one process."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from ringattn.errors import RingError


def on_each_rank(world_size: int, body: Callable[[int], Any]) -> list[Any]:
    """Run `body(rank)` on every rank. Return its result, or the `RingError` that it raised, by rank."""

    def run_rank(rank: int) -> Any:
        try:
            return body(rank)
        except RingError as error:
            return error

    with ThreadPoolExecutor(world_size) as pool:
        return list(pool.map(run_rank, range(world_size)))
