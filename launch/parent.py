"""A process that ends with the one that started it, however that ends: also by a SIGKILL, which nobody can answer.

As a script it is torchrun's agent: `python -P parent.py PARENT words of torchrun`. ReadSets nothing beyond the standard
library, because it must be at work before torch is imported, which takes seconds.
Guarantees: the signal comes within `LOOK_S` of the parent's end; at once on Linux.
"""

from __future__ import annotations

import ctypes
import os
import runpy
import signal
import sys
import threading
import time

AGENT = "RINGATTN_AGENT"
"""Variable with the process id of the agent that starts the ranks."""
LOOK_S = 1.0
PR_SET_PDEATHSIG = 1


def end_with_parent(parent: int, number: int = signal.SIGKILL) -> None:
    """Send this process the signal `number` when the process `parent`, which started it, has ended, or if it has."""
    if not _asked_the_kernel(number):
        threading.Thread(target=_watch, args=(parent, number), daemon=True).start()
    if os.getppid() != parent:  # it ended before anybody was asked
        os.kill(os.getpid(), number)


def _asked_the_kernel(number: int) -> bool:
    """Whether the kernel will send the signal; only Linux can be asked."""
    try:
        return ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, int(number), 0, 0, 0) == 0
    except (OSError, AttributeError):
        return False


def _watch(parent: int, number: int) -> None:
    while os.getppid() == parent:
        time.sleep(LOOK_S)
    os.kill(os.getpid(), number)


if __name__ == "__main__":
    # SIGTERM: torchrun ends its ranks and takes its files away.
    end_with_parent(int(sys.argv.pop(1)), signal.SIGTERM)
    os.environ[AGENT] = str(os.getpid())
    sys.path.insert(0, os.getcwd())  # as `python -m` has it
    runpy.run_module("torch.distributed.run", run_name="__main__", alter_sys=True)
