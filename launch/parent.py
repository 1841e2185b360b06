"""A process that ends with the process that started it, however that ends, also by SIGKILL.

Guarantees: the signal is sent within `LOOK_S` of the parent's end; at once on Linux.
"""

from __future__ import annotations

import ctypes
import os
import signal
import threading
import time

LAUNCHER = "RINGATTN_LAUNCHER"
"""Variable with the process id of the launcher, which starts the ranks."""
LOOK_S = 1.0
PR_SET_PDEATHSIG = 1


def end_with_parent(parent: int, number: int = signal.SIGKILL) -> None:
    """Send this process the signal `number` when the process `parent`, which started it, has ended, or if it has."""
    if not _asked_the_kernel(number):
        threading.Thread(target=_watch, args=(parent, number), daemon=True).start()
    if os.getppid() != parent:  # it ended before the kernel knew what to do
        os.kill(os.getpid(), number)


def _asked_the_kernel(number: int) -> bool:
    """Whether the kernel will send the signal; only Linux can."""
    try:
        return ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, int(number), 0, 0, 0) == 0
    except (OSError, AttributeError):
        return False


def _watch(parent: int, number: int) -> None:
    while os.getppid() == parent:
        time.sleep(LOOK_S)
    os.kill(os.getpid(), number)
