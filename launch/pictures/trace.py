"""Recordings of all ranks on one time axis, as a trace for Perfetto (ui.perfetto.dev) and chrome://tracing.

Each rank is a process of the trace with a thread for each lane, and a thread for whole passes. Arrows lead from the
exchange that sends to the exchange that receives; a counter shows the bytes under way. Predicted ranks are further
processes; each predicted pass starts when the first measured rank starts it. Ranks of several hosts read different
clocks: `clock_offset` estimates the difference.
Format: "Trace Event Format", Google, 2016; times in microseconds.
"""

from __future__ import annotations

import json
import socket
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, NamedTuple

from ringattn.core.span import COMM, COMPUTE, Span, overlap
from ringattn.errors import InputError
from ringattn.observe.spans import Link, RecordedPass, Recording

ROUNDS = 8


class Offset(NamedTuple):
    """What to add to this rank's microseconds to get rank 0's, and by how much that may be wrong."""

    offset_us: float
    uncertainty_us: float


def host_clock() -> str:
    """Names the clock that `time.perf_counter()` reads: equal on ranks that share it."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return socket.gethostname()


def clock_offset(
    agree: Callable[[bytes], list[bytes]],
    rank: int,
    now: Callable[[], float] = time.perf_counter,
    clock: str | None = None,
) -> Offset:
    """This rank's offset to rank 0. All ranks call it together.

    `agree` gathers every rank's payload, by rank (`Transport.all_gather_bytes`); `now` is in
    seconds; `clock` None: `host_clock`.
    """
    name, rounds = host_clock() if clock is None else clock, []
    for _ in range(ROUNDS):
        entered = now()
        agree(b"")
        rounds.append((entered, now()))
    told = [json.loads(one) for one in agree(json.dumps({"clock": name, "rounds": rounds}).encode())]
    first, mine = told[0], told[rank]
    pairs = list(zip(first["rounds"], mine["rounds"], strict=True))
    least = max(first_entered - left for (first_entered, _), (_, left) in pairs)
    most = min(first_left - entered for (_, first_left), (entered, _) in pairs)
    # Containers of one host may be given clocks that differ; then 0 is not possible.
    if first["clock"] == mine["clock"] and least <= 0 <= most:
        return Offset(0.0, 0.0)
    return Offset((least + most) / 2 * 1e6, (most - least) / 2 * 1e6)


PASSES = "passes"
LANES = {PASSES: 0, COMPUTE: 1, COMM: 2}
"""The threads of a process."""

ByRank = Sequence[Sequence[Span]]
"""The spans of one pass, by rank; times from the pass's beginning."""


class Track(NamedTuple):
    """One rank's passes, on the clock of rank 0. `arrivals_known`: see `Recording`.

    `transport`: the name of the transport that carried the messages; empty in recordings that do not name it.
    """

    rank: int
    passes: tuple[RecordedPass, ...]
    arrivals_known: bool
    uncertainty_us: float
    transport: str = ""

    @property
    def overlap(self) -> float:
        """Hidden over total communication of all passes."""
        return overlap(sum(one.comm_us for one in self.passes), sum(one.exposed_us for one in self.passes))

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {**self._asdict(), "passes": [asdict(one) for one in self.passes]}

    @classmethod
    def of(cls, recording: Recording, offset: Offset) -> Track:
        """A recording, moved onto the clock of rank 0."""
        later = recording.clock.origin_s * 1e6 + offset.offset_us
        moved = (replace(one, start_us=one.start_us + later, end_us=one.end_us + later) for one in recording.passes)
        return cls(recording.rank, tuple(moved), recording.arrivals_known, offset.uncertainty_us, recording.transport)

    @classmethod
    def from_dict(cls, kept: Mapping[str, Any]) -> Track:
        """What `as_dict` gave. Raises `KeyError`, `TypeError` for anything else."""
        passes = (
            RecordedPass(
                one["name"], one["start_us"], one["end_us"],
                tuple(Span(*span) for span in one["spans"]), tuple(Link(*link) for link in one["links"]),
            )
            for one in kept["passes"]
        )  # fmt: skip
        return cls(
            kept["rank"], tuple(passes), kept["arrivals_known"], kept["uncertainty_us"], kept.get("transport", "")
        )


def chrome_trace(tracks: Sequence[Track], predicted: Sequence[ByRank] = (), words: str = "") -> dict[str, Any]:
    """The trace as a JSON object. `predicted`: for each pass of the tracks; `words`: what predicted it.

    Raises `InputError` where the ranks did not record the same passes, or other passes were predicted.
    """
    check_alike(tracks, predicted)
    origin = beginning(tracks)
    events: list[dict[str, Any]] = []
    for track in tracks:
        events += _named(track.rank, f"rank {track.rank}")
        for number, one in enumerate(track.passes):
            events += _pass(track.rank, f"{one.name} {number}", one.start_us - origin, one.end_us - origin, one.spans)
    events += _arrows(tracks, origin)
    for rank in range(len(predicted[0]) if predicted else 0):
        process = len(tracks) + rank
        events += _named(process, f"predicted rank {rank}")
        for number, by_rank in enumerate(predicted):
            start = min(track.passes[number].start_us for track in tracks) - origin
            end = start + max((span.end_us for span in by_rank[rank]), default=0.0)
            events += _pass(process, f"predicted {tracks[0].passes[number].name} {number}", start, end, by_rank[rank])
    facts = {
        "overlap by rank": [track.overlap for track in tracks],
        "overlap is": "measured" if all(track.arrivals_known for track in tracks) else "an upper bound",
        "clock uncertainty, us": max((track.uncertainty_us for track in tracks), default=0.0),
        "predicted by": words or None,
        "transport": tracks[0].transport or None if tracks else None,
    }
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": facts}


def beginning(tracks: Sequence[Track]) -> float:
    """When the first rank begins its first pass."""
    return min((one.start_us for track in tracks for one in track.passes), default=0.0)


def check_alike(tracks: Sequence[Track], predicted: Sequence[ByRank]) -> None:
    """Raise `InputError` unless all ranks recorded the same passes, and these are the predicted ones."""
    if [track.rank for track in tracks] != list(range(len(tracks))):
        raise InputError(f"tracks must be of ranks 0, 1, ... in order, got {[track.rank for track in tracks]}")
    recorded = {track.rank: [one.name for one in track.passes] for track in tracks}
    for rank, names in recorded.items():
        if names != recorded[0]:
            raise InputError(
                f"rank {rank} recorded {len(names)} passes and rank 0 {len(recorded[0])}, or others; "
                "enter and leave ring.recording() at the same calls on every rank"
            )
    if predicted and len(predicted) != len(recorded.get(0, ())):
        raise InputError(f"{len(recorded.get(0, ()))} passes were recorded and {len(predicted)} predicted")


def _named(process: int, name: str) -> Iterator[dict[str, Any]]:
    """What a process and its threads are called, and their order."""
    for what, args in (("process_name", {"name": name}), ("process_sort_index", {"sort_index": process})):
        yield {"ph": "M", "name": what, "pid": process, "tid": 0, "ts": 0, "args": args}
    for lane, thread in LANES.items():
        yield {"ph": "M", "name": "thread_name", "pid": process, "tid": thread, "ts": 0, "args": {"name": lane}}


def _pass(process: int, name: str, start: float, end: float, spans: Sequence[Span]) -> Iterator[dict[str, Any]]:
    """A pass, its spans, and its bytes under way."""
    yield _slice(process, PASSES, name, start, end, {})
    for span in spans:
        args = {"bytes": span.nbytes} if span.lane == COMM else {}
        yield _slice(process, span.lane, span.name, start + span.start_us, start + span.end_us, args)
        if span.lane == COMM:
            for when, nbytes in ((span.start_us, span.nbytes), (span.end_us, 0)):
                yield {"ph": "C", "name": "bytes under way", "pid": process, "tid": 0, "ts": start + when,
                       "args": {"bytes": nbytes}}  # fmt: skip


def _slice(process: int, lane: str, name: str, start: float, end: float, args: dict[str, int]) -> dict[str, Any]:
    return {"ph": "X", "cat": lane, "name": name, "pid": process, "tid": LANES[lane], "ts": start, "dur": end - start,
            "args": args}  # fmt: skip


def _arrows(tracks: Sequence[Track], origin: float) -> Iterator[dict[str, Any]]:
    """From each exchange that sends to the one that receives: the k-th message to a rank meets the k-th from it."""
    count = 0
    for number in range(len(tracks[0].passes) if tracks else 0):
        heard: dict[tuple[int, int], list[tuple[float, float]]] = defaultdict(list)
        for track in tracks:
            for link, interval in _linked(track.passes[number]):
                if not link.sends:
                    heard[link.peer, track.rank].append(interval)
        for track in tracks:
            seen: dict[int, int] = defaultdict(int)
            for link, (start, _) in _linked(track.passes[number]):
                if not link.sends:
                    continue
                there = heard[track.rank, link.peer][seen[link.peer]]
                seen[link.peer] += 1
                count += 1
                arrow = {"name": "message", "cat": "message", "id": count, "tid": LANES[COMM]}
                yield {**arrow, "ph": "s", "pid": track.rank, "ts": start - origin}
                # An arrow may not lead back in time, and ends inside a slice.
                end = max(start, sum(there) / 2) - origin
                yield {**arrow, "ph": "f", "bp": "e", "pid": link.peer, "ts": end}


def _linked(one: RecordedPass) -> Iterator[tuple[Link, tuple[float, float]]]:
    """Each message of a pass, with when its exchange was under way."""
    exchanges = {span.name: span for span in one.spans if span.lane == COMM}
    for link in one.links:
        span = exchanges[f"step {link.step} exchange"]
        yield link, (one.start_us + span.start_us, one.start_us + span.end_us)
