"""Writing of whole files, never through a symbolic link, and sentences about full disks and missing file descriptors.

A record or a result has a predictable name. If other users may write to its folder, they could plant a link under that
name, and this process would overwrite the link's target. So a file is created exclusively under another name and then
renamed, which replaces a link and leaves its target unchanged.
"""

from __future__ import annotations

import errno
import os
import resource
from contextlib import suppress
from pathlib import Path

CREATE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
STREAMS = ("/dev", "/dev/fd", "/proc/self/fd")
"""Folders whose entries are devices and open files, such as /dev/stdout. They are written in place, never replaced."""


def write_file(path: Path, content: str | bytes) -> Path:
    """Write `content` to `path`: all of it or nothing, even if this process is killed. Return `path`.

    Raises `OSError`, and then leaves no part of the file behind.
    """
    data = content.encode() if isinstance(content, str) else content
    if is_stream(path):
        path.write_bytes(data)
        return path
    partial = path.with_name(f"{path.name}.partial")
    with suppress(FileNotFoundError):
        partial.unlink()  # left by a killed process, or a planted link, whose target stays
    with os.fdopen(os.open(partial, CREATE, 0o666), "wb") as file:
        try:
            file.write(data)
            file.flush()
            partial.rename(path)
        except BaseException:
            with suppress(OSError):
                partial.unlink()
            raise
    return path


def is_stream(path: Path) -> bool:
    """Return whether `path` names a device or an open file of the system."""
    return str(path.absolute().parent) in STREAMS


FULL = (errno.ENOSPC, errno.EDQUOT)


def full_disk(error: BaseException) -> str | None:
    """Return a sentence with the remedy if `error` reports a full disk or an exhausted quota, else None."""
    if not isinstance(error, OSError) or error.errno not in FULL:
        return None
    what = error.filename or "the standard output or a file"
    return f"{what} could not be written: {os.strerror(error.errno)}; free some space on its disk, or write elsewhere"


SPARE = 16
"""The number of descriptors that one step of opening a ring may need."""


def descriptor_shortage() -> str:
    """Return a sentence with the remedy if few descriptors are free, else an empty string.

    Libraries report such a shortage in many different errors, which often do not mention descriptors.
    """
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        free = limit - len(os.listdir("/proc/self/fd"))
    except FileNotFoundError:  # not Linux
        return ""
    except OSError:  # not even a descriptor for this query is free
        free = 0
    if limit == resource.RLIM_INFINITY or free >= SPARE:
        return ""
    return f"too many open files: {max(free, 0)} of {limit} descriptors are free; raise the limit with `ulimit -n`"
