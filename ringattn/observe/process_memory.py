"""The kernel's account of this process's memory, and of the memory there is (Linux)."""

from __future__ import annotations

import re
from pathlib import Path

STATUS, MEMINFO, CGROUP = (Path(name) for name in ("/proc/self/status", "/proc/meminfo", "/sys/fs/cgroup/memory.max"))
CLEAR_REFS = Path("/proc/self/clear_refs")


def status_bytes(name: str, path: Path = STATUS) -> int:
    """A field of /proc/self/status or /proc/meminfo, which count in kB of 1024 bytes. Raises `OSError` without it.

    VmRSS is what is resident now; VmHWM the most that was since the start or the last `reset_peak`.
    """
    found = re.search(rf"^{name}:\s+(\d+) kB$", path.read_text(encoding="ascii"), re.MULTILINE)
    if found is None:
        raise OSError(f"{path} has no {name}")
    return int(found[1]) * 1024


def reset_peak() -> None:
    """Let VmHWM start from what is resident now (man 5 proc). Raises `OSError` where the kernel forbids it."""
    CLEAR_REFS.write_text("5", encoding="ascii")


def cpu_capacity_bytes() -> int:
    """The machine's memory, or less where a control group (v2) allows less."""
    total = status_bytes("MemTotal", MEMINFO)
    try:
        allowed = CGROUP.read_text(encoding="ascii").strip()
    except OSError:  # no control groups here
        return total
    return min(total, int(allowed)) if allowed.isdigit() else total
