"""Whether a process runs out of file descriptors, which libraries report as anything but that."""

from __future__ import annotations

import os
import resource

SPARE = 16
"""Descriptors that one step of opening a ring may need."""


def shortage() -> str:
    """Return that few descriptors are free, with the remedy; empty if there are enough, or if nobody can tell."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        free = limit - len(os.listdir("/proc/self/fd"))
    except FileNotFoundError:  # not Linux
        return ""
    except OSError:  # not even one for this question
        free = 0
    if limit == resource.RLIM_INFINITY or free >= SPARE:
        return ""
    return f"too many open files: {max(free, 0)} of {limit} descriptors are free; raise the limit with `ulimit -n`"
