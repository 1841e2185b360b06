"""Folders that only one process at a time may write to, and atomic writes of files.

Guarantees: a lock is released when the process that holds it ends, for whatever reason. The error for a locked folder
names the process that holds the lock. If a disk is full or refuses a write, the incomplete file is removed, and the
error names the disk, the path and the bytes. An output file that an option names is checked before the work begins, and
refused if it cannot be written.
"""

from __future__ import annotations

import errno
import fcntl
import io
import json
import math
import os
import shutil
import socket
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, redirect_stdout, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from ringattn.errors import InputError, RingError
from ringattn.observe.files import is_stream, write_file

if TYPE_CHECKING:
    from matplotlib.figure import Figure

LOCK = ".lock"
OPEN_LOCK = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
LOOK_S = 0.1
"""Seconds between two tries to get a lock."""


class FolderLock:
    """The lock of a folder, held by this process; see `locked`."""

    def __init__(self, path: Path, file: TextIO) -> None:
        self.path, self._file = path, file

    def lost(self) -> str | None:
        """Return why this process no longer holds the folder, or None if it does.

        The lock is lost if the folder or its lock file was moved, replaced or removed.
        """
        with suppress(OSError):
            if os.path.samestat((self.path / LOCK).stat(), os.fstat(self._file.fileno())):
                return None
        return (
            f"the folder was removed or replaced while this process wrote to it (its {LOCK} belongs to another process)"
        )


@contextmanager
def locked(path: Path, key: str, what: str, instead: str, wait_s: float = 0.0) -> Iterator[FolderLock]:
    """Lock the folder at `path` for this process until the end of the block. Create the folder if it does not exist.

    `key`: the option that names the folder. `what`: the kind of process that writes there, such as "run", for the
    message. `instead`: advice for the message. Raises `InputError` if the folder cannot be written, or if another
    process still holds the lock after `wait_s`.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
        file = os.fdopen(os.open(path / LOCK, OPEN_LOCK, 0o666), "r+", encoding="utf-8")
    except OSError as error:
        if error.errno == errno.ELOOP:
            message = f"{key}={path}: {LOCK} there is a symbolic link; remove it, or {instead}"
            raise InputError(message) from None
        raise InputError(
            f"{key}={path}: cannot be written ({error.strerror}); choose a folder where you may write"
        ) from error
    with file:
        ends = time.monotonic() + wait_s
        while not _taken(file):
            if time.monotonic() >= ends:
                file.seek(0)
                holder = file.read().strip() or "a process that has just started"
                raise InputError(
                    f"{key}={path}: another {what} is writing there, {holder}; wait until it ends, or {instead}"
                )
            time.sleep(LOOK_S)
        since = datetime.now(UTC).isoformat(" ", "seconds")
        # Write with `os`, not through the buffer of `file`: on a full disk, closing `file` would fail to flush it. The
        # text only helps readers; the lock works without it.
        with suppress(OSError):
            os.ftruncate(file.fileno(), 0)
            os.pwrite(file.fileno(), f"process {os.getpid()} on {socket.gethostname()} since {since}\n".encode(), 0)
        yield FolderLock(path, file)


def _taken(file: TextIO) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def write_json(path: Path, content: Any, indent: int = 2) -> Path:
    """Write `content` to `path` atomically, even if this process is killed. Create the folder if it does not exist.

    Raises `RingError` if the file cannot be written, and ValueError for NaN and infinities, which JSON does not have.
    """
    text = json.dumps(content, indent=indent, allow_nan=False) + "\n"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        return write_file(path, text)
    except OSError as error:
        raise not_written(path, error, len(text)) from error


def not_written(path: Path, error: BaseException, needed_bytes: int) -> RingError:
    """Return the error for a failed write: the path, the reason, the bytes needed, and the bytes free on the disk."""
    there = path
    while not there.exists():
        there = there.parent
    disk = there.resolve()
    while not disk.is_mount():
        disk = disk.parent
    free_bytes = shutil.disk_usage(there).free
    if isinstance(error, OSError) and error.strerror:
        why = error.strerror
    elif free_bytes < needed_bytes:  # torch's own writer raises errors of other kinds on a full disk
        why = os.strerror(errno.ENOSPC)
    else:
        why = f"{type(error).__name__}: {error}".splitlines()[0]
    return RingError(
        f"{path} could not be written: {why}; it needs about {_size(needed_bytes)}, and the disk at {disk} has "
        f"{_size(free_bytes)} free; the incomplete file was removed"
    )


def _size(size_bytes: int) -> str:
    return f"{size_bytes / 2**20:,.1f} MiB" if size_bytes >= 2**20 else f"{size_bytes / 2**10:,.1f} KiB"


# --- files of the user -----------------------------------------------------------------------------------------------


PICTURES = (".png", ".svg", ".pdf")
STANDARD_OUTPUT = "-"
"""The value of `json` for which a command prints its figures."""


def check_output(key: str, path: str, kind: str) -> None:
    """Raise `InputError` if no file can be written at `path`.

    `kind`: "file", "picture" or "data". Data can also be written to `-`, the standard output.
    """
    if kind == "data" and path == STANDARD_OUTPUT:
        return
    target = Path(path)
    folder = target.absolute().parent
    if kind == "picture" and target.suffix not in PICTURES:
        raise InputError(f"{key}={path}: the name of a picture must end in one of {', '.join(PICTURES)}")
    if is_stream(target):
        return
    if target.is_dir():
        raise InputError(f"{key}={path}: is a folder; name a file")
    if target.exists() and not target.is_file():
        raise InputError(f"{key}={path}: is not a regular file; name a regular file or /dev/stdout")
    if not folder.is_dir():
        raise InputError(f"{key}={path}: its folder does not exist; create it, or choose another path")
    # The file is replaced by a rename, so its folder must be writable.
    if not os.access(folder, os.W_OK):
        raise InputError(f"{key}={path}: cannot be written; choose a path where you may write")


def save_picture(figure: Figure, path: str | Path, dpi: int) -> None:
    """Write a figure to `path`, in the format of its ending, and close it. Raises `OSError`."""
    import matplotlib.pyplot as plt

    picture = io.BytesIO()
    figure.savefig(picture, dpi=dpi, format=Path(path).suffix.removeprefix(".") or None)
    plt.close(figure)
    write_file(Path(path), picture.getvalue())


@contextmanager
def writing(key: str, path: str | Path) -> Iterator[None]:
    """Turn an `OSError` of the block, which writes `path`, into an `InputError` that begins with the key."""
    try:
        yield
    except OSError as error:
        raise InputError(f"{key}={path}: cannot be written ({error.strerror or error}); choose another path") from error


@contextmanager
def json_output(path: str) -> Iterator[Callable[[Any], None]]:
    """Yield a function that receives the figures of a command; write them to `path` as JSON at the end of the block.

    `path` is the value of the command's key `json`. If it is `-`, the standard output carries only the JSON document,
    and all other text goes to standard error. If it is empty, nothing is written. Raises `InputError` if the file
    cannot be written.
    """
    figures: list[Any] = []
    if path == STANDARD_OUTPUT:
        with redirect_stdout(sys.stderr):
            yield figures.append
    else:
        yield figures.append
    for content in figures if path else ():
        text = json.dumps(_finite(content), indent=1, allow_nan=False, default=str)
        if path == STANDARD_OUTPUT:
            print(text, flush=True)
        else:
            with writing("json", path):
                write_file(Path(path), text + "\n")
            print(f"written: {path}")


def _finite(content: Any) -> Any:
    """Return `content` with None in place of NaN and infinities, which JSON does not have."""
    if isinstance(content, Mapping):
        return {key: _finite(value) for key, value in content.items()}
    if isinstance(content, (list, tuple)):
        return [_finite(value) for value in content]
    return None if isinstance(content, float) and not math.isfinite(content) else content
