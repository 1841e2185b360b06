"""Runs one function on several threads, each a rank of a `LocalWorld`, with a hard deadline."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import TypeVar

from ringattn.transport.local import LocalTransport, LocalWorld

Result = TypeVar("Result")


def on_threads(
    world_size: int, function: Callable[[LocalTransport], Result], timeout_s: float = 20.0, hard_s: float = 60.0
) -> list[Result]:
    """The results by rank. Re-raises the first error in time; `TimeoutError` when a rank hangs beyond `hard_s`."""
    world = LocalWorld(world_size, timeout_s)
    results: dict[int, Result] = {}
    errors: list[BaseException] = []

    def work(rank: int) -> None:
        ring = world.transport(rank)
        try:
            results[rank] = function(ring)
        except BaseException as error:
            errors.append(error)
            ring.abort(error)
        finally:
            ring.close()

    threads = [threading.Thread(target=work, args=(rank,), daemon=True) for rank in range(world_size)]
    for thread in threads:
        thread.start()
    until = time.monotonic() + hard_s
    for thread in threads:
        thread.join(max(until - time.monotonic(), 0.0))
    if errors:
        raise errors[0]
    if len(results) != world_size:
        raise TimeoutError(f"ranks {sorted(set(range(world_size)) - set(results))} hang")
    return [results[rank] for rank in range(world_size)]
