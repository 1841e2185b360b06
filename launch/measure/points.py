"""The folder of a sweep: one JSON line for each point that ended, and what makes two sweeps the same.

`points.jsonl` has a line a point, appended at once and whole; of several with one `hash` the last counts.
`environments.json` holds each environment once, by id; `sweep.json` says which sweep owns the folder.
Guarantees: a process killed at any moment leaves every line but perhaps the last readable, and that one is passed over;
one sweep at a time writes, and no record twice; points of another sweep or of other code are never added.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from ringattn.errors import InputError
from ringattn.launch.folders import locked, write_json
from ringattn.launch.measure.run_config import RunConfig, spec_of

STATUSES = ("ok", "oom", "error", "timeout")
MEASURED = (
    "forward_ms", "backward_ms", "pass_ms", "tokens_per_s", "tflops", "bytes_sent", "messages", "exposed_ms", "overlap",
    "arrivals_known", "peak_bytes", "pool_bytes", "error", "predicted",
)  # fmt: skip
"""Keys that a point has only after it ran; null in a record of a failure."""
BESIDE = ("node_rank", "rdzv_endpoint", "limit_s")
"""Options that leave the result as it is."""
POINTS, ENVIRONMENTS, SWEEP = "points.jsonl", "environments.json", "sweep.json"


def hash_of(config: RunConfig) -> str:
    """12 hex digits that differ where any option differs that may change the result."""
    options = {key: value for key, value in spec_of(config).items() if key not in BESIDE}
    return _digest(options)


def make_record(
    config: RunConfig,
    status: str,
    message: str,
    facts: Mapping[str, Any],
    started: datetime,
    wall_s: float,
    commit: str,
    command: str,
) -> dict[str, Any]:
    """A point's record with every key; `facts` are those of `point.measure`, empty for a failure.

    Its `environment` still is the environment itself; `Folder.append` makes it an id.
    """  # fmt: skip
    return {
        "hash": hash_of(config),
        "status": status,
        "message": message,
        "config": spec_of(config),
        "started": started.astimezone(UTC).isoformat(timespec="seconds"),
        "wall_s": round(wall_s, 3),
        "environment": facts.get("environment"),
        "commit": commit,
        "world_size": config.world_size,
        "tokens": config.tokens,
        **{key: facts.get(key) for key in MEASURED},
        "command": command,
    }


def read_points(folder: Path) -> dict[str, dict[str, Any]]:
    """The records of a folder by hash, the last of each; {} where there are none."""
    found: dict[str, dict[str, Any]] = {}
    try:
        text = (folder / POINTS).read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        return found
    for line in text.splitlines():
        try:
            record = json.loads(line)
        except ValueError:
            continue  # the line that was being written when a process was killed
        if not isinstance(record, dict) or not isinstance(record.get("hash"), str):
            continue  # no record of ours
        found.pop(record["hash"], None)
        found[record["hash"]] = record
    return found


class Folder:
    """A folder that this process may write: see `opened`."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def append(self, record: Mapping[str, Any]) -> None:
        """Add a point's line, and its environment if that is new.

        A record that is there already is not added again: whoever left it may have been killed before taking it away.
        """
        environment = record["environment"]
        name = None if environment is None else _digest(environment)
        if name is not None:
            known = _read_json(self.path / ENVIRONMENTS) or {}
            if name not in known:
                write_json(self.path / ENVIRONMENTS, {**known, name: environment}, indent=1)
        line = json.dumps({**record, "environment": name}) + "\n"
        if read_points(self.path).get(record["hash"]) == json.loads(line):
            return
        if _ends_within_a_line(self.path / POINTS):
            line = "\n" + line
        file = os.open(self.path / POINTS, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW, 0o666)
        try:
            os.write(file, line.encode())  # one call, so that no reader sees half a line
            os.fsync(file)
        finally:
            os.close(file)

    def claim(self, words: Sequence[str], hashes: Sequence[str], code: str) -> None:
        """Make this folder the sweep's that has these points and this code. Raises `InputError` if it is another's."""
        mine = {"words": list(words), "points": sorted(hashes), "code": code}
        owner = _read_json(self.path / SWEEP)
        if owner is None:
            if (self.path / POINTS).exists():
                raise InputError(f"out={self.path}: holds points, and no {SWEEP} says whose they are; {OTHER}")
            write_json(self.path / SWEEP, mine, indent=1)
        elif owner["points"] != mine["points"]:
            raise InputError(
                f"out={self.path}: holds the points of another sweep ({' '.join(owner['words'])}); "
                f"give the same options to resume that one, or {OTHER}"
            )
        elif owner["code"] != code:
            raise InputError(
                f"out={self.path}: its points were measured with the code at {owner['code']}, and this is {code}; "
                f"go back to that to resume, or {OTHER}"
            )


OTHER = "give this sweep a folder of its own with out="


@contextmanager
def opened(path: Path) -> Iterator[Folder]:
    """The folder at `path`, made if need be, for this process alone until the end of the block.

    Raises `InputError` where it cannot be written, or while another process has it.
    """
    with locked(path, "out", "sweep", OTHER):
        yield Folder(path)


def _digest(content: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:12]


def _read_json(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else None


def _ends_within_a_line(path: Path) -> bool:
    try:
        with path.open("rb") as file:
            file.seek(-1, os.SEEK_END)
            return file.read(1) != b"\n"
    except OSError:  # none yet, or an empty one
        return False
