"""Files that a command writes where an option says: refused before the work where they cannot be written."""

from __future__ import annotations

import io
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from ringattn.errors import InputError
from ringattn.observe.files import is_stream, write_file

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PICTURES = (".png", ".svg", ".pdf")


def check_output(key: str, path: str, kind: str) -> None:
    """Raise `InputError` if no file can be written at `path`; `kind` is file or picture."""
    target = Path(path)
    folder = target.absolute().parent
    if kind == "picture" and target.suffix not in PICTURES:
        raise InputError(f"{key}={path}: a picture's name ends in one of {', '.join(PICTURES)}")
    if is_stream(target):
        return
    if target.is_dir():
        raise InputError(f"{key}={path}: is a folder; name a file")
    if target.exists() and not target.is_file():
        raise InputError(f"{key}={path}: is no regular file; name one, or /dev/stdout")
    if not folder.is_dir():
        raise InputError(f"{key}={path}: its folder does not exist; make it, or write elsewhere")
    # The file is replaced, which needs its folder.
    if not os.access(folder, os.W_OK):
        raise InputError(f"{key}={path}: cannot be written; choose a place that you may write")


def save_picture(figure: Figure, path: str | Path, dpi: int) -> None:
    """Write a figure to `path`, in the format of its ending, and close it. Raises `OSError`."""
    import matplotlib.pyplot as plt

    picture = io.BytesIO()
    figure.savefig(picture, dpi=dpi, format=Path(path).suffix.removeprefix(".") or None)
    plt.close(figure)
    write_file(Path(path), picture.getvalue())


@contextmanager
def writing(key: str, path: str | Path) -> Iterator[None]:
    """What writes `path`: an `OSError` in the block becomes an `InputError` that begins with the key."""
    try:
        yield
    except OSError as error:
        raise InputError(f"{key}={path}: cannot be written ({error.strerror or error}); write elsewhere") from error
