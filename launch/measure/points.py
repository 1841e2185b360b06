"""The folder of a sweep: one JSON line for each point that ended, and the identity of the sweep.

`points.jsonl` has a line for each point, appended in one write. If several lines have the same `hash`, the last counts.
`environments.json` holds each environment once, by id. `sweep.json` identifies the sweep that owns the folder. Jobs on
other machines write their records to the folder `jobs`. The sweep collects them there, also if it was killed and
resumed in between.
Guarantees: if a process is killed at any moment, every line is readable except perhaps the last, which readers then
skip. Only one sweep at a time writes, and it writes no record twice. Points of another sweep or of other code are never
added.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shlex
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from ringattn.errors import InputError, RingError
from ringattn.launch.calls import RunConfig, with_resolved, words_of
from ringattn.launch.folders import locked, write_json
from ringattn.launch.measure.environment import code_version
from ringattn.observe.files import full_disk, write_file
from ringattn.schedule.text import aligned

STATUSES = ("ok", "oom", "error", "timeout")
MEASURED = {
    "forward_ms": "forward pass: `median`, `p10`, `p90`, `samples`, of the slowest rank",
    "backward_ms": "backward pass, as `forward_ms`; null with backward=false",
    "pass_ms": "both passes together, as `forward_ms`: the median of the sums",
    "tokens_per_s": "tokens per second of all ranks together, by the median of `pass_ms`",
    "tflops": "TFLOP/s of all ranks together, by the median of `pass_ms`",
    "bytes_sent": "bytes that each rank sends in one forward and backward pass",
    "messages": "messages that each rank sends in one forward and backward pass",
    "exposed_ms": "communication that was not hidden by computation: `forward` and `backward`, by rank",
    "overlap": "share of the communication that was hidden, the lowest of the ranks",
    "arrivals_known": "whether `overlap` was measured; otherwise it is an upper bound",
    "peak_bytes": "peak memory of each rank beyond the start of the point",
    "pool_bytes": "most bytes of the memory pool in use, by rank",
    "error": "largest absolute difference of `out`, `dq`, `dk`, `dv` from the reference, at the size of the check",
    "predicted": "times and staging buffers by the plans, for `cluster` or a calibrated machine; otherwise null",
    "not_predicted": "why `predicted` is null; empty if it is not",
    "resolved": "schedule with its number, layout, engine, transport and SM margin that ran",
}
"""Keys that a point has only after it ran, with their meaning; null in a record of a failure."""
RECORD_KEYS = {
    "hash": "12 hex digits of the options that may change the result, `auto` included",
    "resolved_hash": "the `hash` with the values of `resolved` in place of `auto`",
    "status": "ok, oom, error or timeout",
    "message": "the error message of a point that failed",
    "config": "all options",
    "started": "start time in UTC",
    "wall_s": "seconds, including the start of the ranks",
    "environment": "id of an environment in environments.json",
    "commit": "version of the code",
    "world_size": "ranks of all nodes",
    "tokens": "tokens of the whole sequence",
    **MEASURED,
    "command": "the command that repeats the point, with the values of `resolved`",
}
"""Every key of a record, with its meaning."""
NOT_HASHED = ("node_rank", "rdzv_endpoint", "limit_s", "json")
"""Options that do not change the result."""
POINTS, ENVIRONMENTS, SWEEP, ARRIVALS = "points.jsonl", "environments.json", "sweep.json", "jobs"
OTHER = "give this sweep a separate folder with out="


def hash_of(config: RunConfig) -> str:
    """Return 12 hex digits that depend on every option that may change the result."""
    return _digest({key: value for key, value in asdict(config).items() if key not in NOT_HASHED})


def make_record(
    config: RunConfig, status: str, message: str, facts: Mapping[str, Any], started: datetime, wall_s: float
) -> dict[str, Any]:
    """Return a point's record with every key; `facts` is the result of `point.measure`, or empty for a failure.

    `hash` is that of the configuration, in which options may be auto. In `resolved_hash` and `command` they have the
    values that auto took. `environment` is the environment itself; `Folder.append` replaces it by an id.
    """
    resolved = with_resolved(config, facts.get("resolved") or {})
    # The address and number of this node do not belong to the command that repeats the point.
    command = ["ringattn", "run", *words_of(replace(resolved, node_rank=None, rdzv_endpoint="", json=""))]
    return {
        "hash": hash_of(config),
        "resolved_hash": hash_of(resolved),
        "status": status,
        "message": message,
        "config": asdict(config),
        "started": started.astimezone(UTC).isoformat(timespec="seconds"),
        "wall_s": round(wall_s, 3),
        "environment": facts.get("environment"),
        "commit": code_version(),
        "world_size": config.world_size,
        "tokens": config.tokens,
        **{key: facts.get(key) for key in MEASURED},
        "command": shlex.join(command),
    }


def read_lines(folder: Path) -> list[dict[str, Any] | None]:
    """Return the record of each line of a folder; None for a line that is not a record, as after a kill.

    Raises `FileNotFoundError` if no point has ended yet.
    """
    records = []
    for line in (folder / POINTS).read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            record = json.loads(line, parse_constant=_no_number)
        except ValueError:
            record = None
        is_record = isinstance(record, dict) and isinstance(record.get("hash"), str)
        records += [record if is_record else None] if line.strip() else []
    return records


def _no_number(text: str) -> float:
    raise ValueError(f"{text} is not a number in JSON")


def read_points(folder: Path) -> dict[str, dict[str, Any]]:
    """Return the records of a folder by hash, the last of each; {} if no point has ended yet."""
    try:
        return {record["hash"]: record for record in read_lines(folder) if record is not None}
    except FileNotFoundError:
        return {}


def table_of(records: Sequence[tuple[str, Mapping[str, Any]]]) -> str:
    """Return a table with a line for each labelled record: its status, times, speed and peak memory."""
    rows = [("point", "status", "forward ms", "backward ms", "tokens/s", "peak MiB")]
    for label, record in records:
        if record["status"] != "ok":
            rows.append((label, record["status"], "", "", "", ""))
            continue
        forward, backward = (each and f"{each['median']:.3f}" for each in (record["forward_ms"], record["backward_ms"]))
        peak = f"{max(record['peak_bytes']) / 2**20:.1f}"
        rows.append((label, "ok", forward, backward or "", f"{record['tokens_per_s']:,.0f}", peak))
    return "\n".join(aligned(rows, left=6))


def leave(folder: Path, record: Mapping[str, Any]) -> None:
    """Write a record atomically to the folder from which `Folder.collect` reads.

    Raises `RingError` if it cannot be written.
    """
    path = folder / ARRIVALS / f"{record['hash']}.json"
    try:
        path.parent.mkdir(exist_ok=True)
        write_file(path, json.dumps(record))
    except OSError as error:
        raise _not_recorded(path, error) from error


class Folder:
    """The folder of a sweep, to which only this process writes; see `opened`."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def append(self, record: Mapping[str, Any]) -> None:
        """Append the line of a point's record, and store its environment if it is new.

        A record that is already in the folder is not appended again: a sweep may have been killed after it appended a
        job's record and before it deleted the job's file. Raises `RingError` if the record cannot be written; earlier
        lines are unchanged.
        """
        environment = record["environment"]
        name = None if environment is None else _digest(environment)
        if name is not None:
            environments = _read_json(self.path / ENVIRONMENTS) or {}
            if name not in environments:
                write_json(self.path / ENVIRONMENTS, {**environments, name: environment}, indent=1)
        line = json.dumps({**record, "environment": name}) + "\n"
        if read_points(self.path).get(record["hash"]) == json.loads(line):
            return
        if _ends_within_a_line(self.path / POINTS):
            line = "\n" + line
        try:
            _append_line(self.path / POINTS, line.encode())
        except OSError as error:
            raise _not_recorded(self.path / POINTS, error) from error

    def collect(self) -> Iterator[dict[str, Any]]:
        """Append the records that jobs have left, and yield them in the order in which the jobs ended."""
        for file in sorted((self.path / ARRIVALS).glob("*.json"), key=lambda file: file.stat().st_mtime_ns):
            record = json.loads(file.read_text(encoding="utf-8"))
            self.append(record)
            file.unlink()
            yield record

    def claim(self, words: Sequence[str], hashes: Sequence[str], code: str) -> None:
        """Assign this folder to the sweep with these points and this code.

        Raises `InputError` if the folder belongs to a sweep with other points or other code.
        """
        sweep = {"words": list(words), "points": sorted(hashes), "code": code}
        owner = _read_json(self.path / SWEEP)
        if owner is None:
            if (self.path / POINTS).exists():
                raise InputError(f"out={self.path}: holds points, but no {SWEEP} that describes their sweep; {OTHER}")
            write_json(self.path / SWEEP, sweep, indent=1)
        elif owner["points"] != sweep["points"]:
            raise InputError(
                f"out={self.path}: holds the points of another sweep ({' '.join(owner['words'])}); give the same "
                f"options to resume that sweep, or {OTHER}"
            )
        elif owner["code"] != code:
            raise InputError(
                f"out={self.path}: its points were measured with the code at {owner['code']}, but this is {code}; "
                f"check out that version to resume, or {OTHER}"
            )


@contextmanager
def opened(path: Path) -> Iterator[Folder]:
    """Yield the folder at `path`, created if missing and locked by this process until the end of the block.

    Raises `InputError` if it cannot be written, or while another process has locked it.
    """
    with locked(path, "out", "sweep", OTHER):
        yield Folder(path)


def _append_line(path: Path, line: bytes) -> None:
    """Append `line` in one write, so that readers never see a part of it. On an `OSError` nothing is appended."""
    file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW, 0o666)
    try:
        before_bytes = os.fstat(file).st_size
        try:
            if os.write(file, line) < len(line):  # a disk that fills up accepts part of it, without an error
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
            os.fsync(file)
        except OSError:
            os.ftruncate(file, before_bytes)
            raise
    finally:
        os.close(file)


def _not_recorded(path: Path, error: OSError) -> RingError:
    """Return the error for a record that could not be written."""
    if error.errno == errno.ELOOP:
        return RingError(f"{path} is a symbolic link, and records are not written through links; remove it")
    remedy = "free some space on the disk" if full_disk(error) else "make the folder and its files writable"
    return RingError(
        f"{path}: the record of this point could not be written ({error.strerror}). The records before it are "
        f"complete; {remedy} and give the same command again"
    )


def _digest(content: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:12]


def _read_json(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else None


def _ends_within_a_line(path: Path) -> bool:
    return path.exists() and path.read_bytes()[-1:] not in (b"", b"\n")
