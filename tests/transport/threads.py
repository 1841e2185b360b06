"""Runs the ranks of a test as threads of this process."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from ringattn.errors import RingError


def on_each_rank(world_size: int, body: Callable[[int], Any]) -> list[Any]:
    """What `body(rank)` returns, or the `RingError` that it raises, by rank. Raises any other error."""

    def live(rank: int) -> Any:
        try:
            return body(rank)
        except RingError as error:
            return error

    with ThreadPoolExecutor(world_size) as pool:
        return list(pool.map(live, range(world_size)))
