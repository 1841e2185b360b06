"""Whether an error says who is at fault."""

from __future__ import annotations

import re

VERBS = "|".join((
    "is silent", "is behind", "is stuck in a launch", "is still computing", "is gone", "failed first", "refused",
    "does not ask", "and rank . do not ask", "do not ask",
))  # fmt: skip


def names_as_culprit(culprit: int, message: str) -> bool:
    """Whether a message says that `culprit` is at fault, and does not only list it among the peers."""
    return re.search(rf"rank {culprit} ({VERBS})", message) is not None
