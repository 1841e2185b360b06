"""Run a function on several threads, each of which is a rank of a `LocalWorld`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from ringattn.testing import run_ranks

Result = TypeVar("Result")


def on_threads(world_size: int, function: Callable[[Any], Result], timeout_s: float = 20.0) -> list[Result]:
    """Run `function(transport)` on all ranks. Return the results in rank order, or raise the first error."""
    return run_ranks(world_size, lambda ring: function(ring.transport), timeout_s=timeout_s)
