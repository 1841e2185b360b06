"""The folders of checkpoints, and digests of their files: damage is found and named before anything is loaded.

`run.json`, written last, lists every other file with its bytes and digest, and has a digest of itself.
Guarantees: a file that is missing, shorter, longer or other than when it was written is named.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from pathlib import Path
from typing import Any

RUN = "run.json"


class DamagedError(Exception):
    """A checkpoint is not what was written; the message names the file."""


def latest(folder: Path) -> Path | None:
    """The newest complete checkpoint in the `out_dir` of a run, or None. What it holds is not looked at."""
    return next((path for path in named(folder / "checkpoints") if (path / RUN).exists()), None)


def named(folder: Path) -> list[Path]:
    """What has the name of a checkpoint there, the newest first."""
    return sorted(
        (path for path in folder.glob("step-*") if re.fullmatch(r"step-\d+", path.name)), key=step_of, reverse=True
    )


def step_of(path: Path) -> int:
    return int(path.name.removeprefix("step-"))


def remove(path: Path) -> None:
    """Take a checkpoint away: under another name first, so that what is half removed has no checkpoint's name."""
    shutil.rmtree(path.rename(path.with_suffix(".deleted")))


def described(path: Path) -> tuple[int, str]:
    """Bytes and digest of a file."""
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16)).hexdigest()
        return file.tell(), digest


def write_run(folder: Path, content: dict[str, Any], files: dict[str, tuple[int, str]]) -> None:
    """Write `run.json`, which makes a checkpoint of what is in `folder`: facts of the run, and all other files."""
    content = {**content, "files": files}
    with (folder / RUN).open("x", encoding="utf-8") as run:
        json.dump({**content, "digest": _digest(content)}, run, allow_nan=False)
        run.flush()
        os.fsync(run.fileno())


def read_run(folder: Path) -> dict[str, Any]:
    """What `run.json` says. Raises `DamagedError` if it is not there, or not what was written."""
    path = folder / RUN
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        digest = content.pop("digest")
    except FileNotFoundError:
        raise DamagedError(f"{path} is missing") from None
    except OSError as error:
        raise DamagedError(f"{path} cannot be read ({error.strerror})") from error
    except (ValueError, KeyError, AttributeError, TypeError):
        raise DamagedError(f"{path} is damaged (truncated, or written by a version without digests)") from None
    if digest != _digest(content):
        raise DamagedError(f"{path} is damaged (its digest differs)")
    return dict(content)


def check_files(folder: Path, files: dict[str, tuple[int, str]], part: int = 0, parts: int = 1) -> None:
    """Raise `DamagedError` for the first file that is not as it was written; of all of them every `parts`-th."""
    for name in sorted(files)[part::parts]:
        path, (size, digest) = folder / name, files[name]
        try:
            found, now = described(path)
        except FileNotFoundError:
            raise DamagedError(f"{path} is missing") from None
        except OSError as error:
            raise DamagedError(f"{path} cannot be read ({error.strerror})") from error
        if found != size:
            raise DamagedError(f"{path} is {'truncated' if found < size else 'too long'} ({found} bytes of {size})")
        if now != digest:
            raise DamagedError(f"{path} is damaged (its digest differs)")


def _digest(content: dict[str, Any]) -> str:
    return hashlib.blake2b(json.dumps(content, sort_keys=True).encode(), digest_size=16).hexdigest()
