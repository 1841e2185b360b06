"""A span: what one rank did, or what its messages did, between two moments of a pass.

Measured and predicted spans are alike.
Does not know: clocks, plans, who measured or predicted.
"""

from __future__ import annotations

from typing import NamedTuple

COMPUTE, COMM = "compute", "comm"


class Span(NamedTuple):
    """Times in microseconds from the pass's beginning; `lane`: compute or comm.

    `name` is such as "step 2 attend" or "step 2 exchange". `nbytes`: what an exchange sends, 0 for work.
    """

    name: str
    lane: str
    start_us: float
    end_us: float
    nbytes: int = 0
