"""Files that a command writes where an option says: refused before the work where they cannot be written."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ringattn.errors import InputError

PICTURES = (".png", ".svg", ".pdf")


def check_output(key: str, path: str, kind: str) -> None:
    """Raise `InputError` if no file can be written at `path`; `kind` is file or picture."""
    target = Path(path)
    folder = target.absolute().parent
    if kind == "picture" and target.suffix not in PICTURES:
        raise InputError(f"{key}={path}: a picture's name ends in one of {', '.join(PICTURES)}")
    if target.is_dir():
        raise InputError(f"{key}={path}: is a folder; name a file")
    if not folder.is_dir():
        raise InputError(f"{key}={path}: its folder does not exist; make it, or write elsewhere")
    if not os.access(target if target.exists() else folder, os.W_OK):
        raise InputError(f"{key}={path}: cannot be written; choose a place that you may write")


@contextmanager
def writing(key: str, path: str | Path) -> Iterator[None]:
    """What writes `path`: an `OSError` in the block becomes an `InputError` that begins with the key."""
    try:
        yield
    except OSError as error:
        raise InputError(f"{key}={path}: cannot be written ({error.strerror or error}); write elsewhere") from error
