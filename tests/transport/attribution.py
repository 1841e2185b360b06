"""Find the ranks that an error message blames for a failure."""

from __future__ import annotations

import re

VERBS = "|".join((
    "is silent", "is behind", "is stuck in a launch", "is still computing", "is gone", "failed first", "refused",
    "does not ask", "and rank . make different calls", "make different calls",
))  # fmt: skip
# A rank that "failed first" with one of these errors only reported another rank's fault. The rest of the message names
# the culprit.
REPORTS = r"failed first: (?:DeadlineError|PeerLostError|DisagreementError)"


def names_as_culprit(culprit: int, message: str) -> bool:
    """Return whether a message blames `culprit`. It is not enough that the message mentions `culprit` as a peer."""
    return re.search(rf"rank {culprit} ({VERBS})", message) is not None


def named_at_fault(message: str) -> set[int]:
    """Return all ranks that a message blames. If it says that two ranks make different calls, it blames neither."""
    return {int(rank) for rank in re.findall(rf"rank (\d+) (?!{REPORTS}|and rank|make different)(?:{VERBS})", message)}
