"""How far the clocks of the ranks are apart, so that their recordings lie on one axis.

Guarantees: the true offset lies within the stated uncertainty, whatever the network does: it follows from nothing but
that no rank leaves an agreement before all have entered it. Ranks of one host share `time.perf_counter()`, and their
offset is exactly 0. Clocks that drift apart while a recording lasts are not corrected.
"""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

ROUNDS = 8


class Offset(NamedTuple):
    """What to add to this rank's microseconds to get rank 0's, and by how much that may be wrong."""

    offset_us: float
    uncertainty_us: float


def host_clock() -> str:
    """Names the clock that `time.perf_counter()` reads: equal on ranks that share it."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return socket.gethostname()


def clock_offset(
    agree: Callable[[bytes], list[bytes]],
    rank: int,
    now: Callable[[], float] = time.perf_counter,
    clock: str | None = None,
) -> Offset:
    """This rank's offset to rank 0. All ranks call it together.

    `agree` gathers every rank's payload, by rank (`Transport.all_gather_bytes`); `now` is in
    seconds; `clock` None: `host_clock`.
    """
    name, rounds = host_clock() if clock is None else clock, []
    for _ in range(ROUNDS):
        entered = now()
        agree(b"")
        rounds.append((entered, now()))
    told = [json.loads(one) for one in agree(json.dumps({"clock": name, "rounds": rounds}).encode())]
    first, mine = told[0], told[rank]
    pairs = list(zip(first["rounds"], mine["rounds"], strict=True))
    least = max(first_entered - left for (first_entered, _), (_, left) in pairs)
    most = min(first_left - entered for (_, first_left), (entered, _) in pairs)
    # Containers of one host may be given clocks that differ; then 0 is not possible.
    if first["clock"] == mine["clock"] and least <= 0 <= most:
        return Offset(0.0, 0.0)
    return Offset((least + most) / 2 * 1e6, (most - least) / 2 * 1e6)
