"""`ringattn check` with every pair of mask, layout and schedule in place of every combination.

All combinations are tried on four ranks of shared memory, by the command, and of NCCL's simulation. What another
number of ranks or another transport adds depends on what the plans send, not on three things at once.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import astuple
from typing import Any
from unittest.mock import patch

from ringattn.launch.measure import check
from ringattn.launch.measure.check import Case
from ringattn.ring import Ring
from tests.covering import covering_cells

PAIRED = [Case(*map(str, cell)) for cell in covering_cells([astuple(case) for case in check.cases()])]


@contextmanager
def pairs_only() -> Iterator[None]:
    """Within it the check has the cases `PAIRED`."""
    with patch.object(check, "cases", lambda: iter(PAIRED)):
        yield


def check_pairs(ring: Ring, spec: dict[str, Any]) -> dict[str, Any]:
    """`check_rank` of `PAIRED`."""
    with pairs_only():
        return check.check_rank(ring, spec)
