"""Write the recordings of all ranks on one time axis as a trace for Perfetto (ui.perfetto.dev) and chrome://tracing.

Each rank is a process of the trace, with a thread for each lane and a thread for whole passes. An arrow leads from the
exchange that sends a message to the exchange that receives it, and a counter shows the bytes in flight. Predicted ranks
are additional processes. A predicted pass starts when the first measured rank starts the pass. Ranks on different hosts
read different clocks, so `clock_offset` estimates their difference.
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
    """The microseconds to add to the time of this rank's clock to get that of rank 0's, and their uncertainty."""

    offset_us: float
    uncertainty_us: float


def host_clock() -> str:
    """Return a name of the clock that `time.perf_counter()` reads. Ranks that share the clock get the same name."""
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
    """Estimate the offset of this rank's clock to that of rank 0. This is a collective call.

    `agree` gathers the bytes of all ranks, by rank, as `Transport.all_gather_bytes` does. `now` reads the clock in
    seconds, and `clock` is the clock's name, by default `host_clock()`.
    """
    name, rounds = host_clock() if clock is None else clock, []
    for _ in range(ROUNDS):
        entered = now()
        agree(b"")
        rounds.append((entered, now()))
    by_rank = [json.loads(reply) for reply in agree(json.dumps({"clock": name, "rounds": rounds}).encode())]
    first, local = by_rank[0], by_rank[rank]
    pairs = list(zip(first["rounds"], local["rounds"], strict=True))
    least = max(first_entered - left for (first_entered, _), (_, left) in pairs)
    most = min(first_left - entered for (_, first_left), (entered, _) in pairs)
    # Containers of one host have the same clock name but may have different clocks. Then 0 is outside the bounds.
    if first["clock"] == local["clock"] and least <= 0 <= most:
        return Offset(0.0, 0.0)
    return Offset((least + most) / 2 * 1e6, (most - least) / 2 * 1e6)


PASSES = "passes"
LANES = {PASSES: 0, COMPUTE: 1, COMM: 2}
"""The thread of each lane in a process of the trace."""

ByRank = Sequence[Sequence[Span]]
"""The spans of one pass, by rank, with times from the start of the pass."""


class Track(NamedTuple):
    """The passes of one rank, on the clock of rank 0.

    For `arrivals_known` see `Recording`. `transport` is the name of the transport of the messages; it is empty in
    recordings that do not name it.
    """

    rank: int
    passes: tuple[RecordedPass, ...]
    arrivals_known: bool
    uncertainty_us: float
    transport: str = ""

    @property
    def overlap(self) -> float:
        """Return the hidden share of the communication of all passes."""
        communication_us = sum(recorded.comm_us for recorded in self.passes)
        return overlap(communication_us, sum(recorded.exposed_us for recorded in self.passes))

    def as_dict(self) -> dict[str, Any]:
        """Return the track as plain data for JSON."""
        return {**self._asdict(), "passes": [asdict(recorded) for recorded in self.passes]}

    @classmethod
    def of(cls, recording: Recording, offset: Offset) -> Track:
        """Return the track of a recording, moved to the clock of rank 0."""
        shift_us = recording.clock.origin_s * 1e6 + offset.offset_us
        moved = (
            replace(recorded, start_us=recorded.start_us + shift_us, end_us=recorded.end_us + shift_us)
            for recorded in recording.passes
        )
        return cls(recording.rank, tuple(moved), recording.arrivals_known, offset.uncertainty_us, recording.transport)

    @classmethod
    def from_dict(cls, kept: Mapping[str, Any]) -> Track:
        """Return the track from the result of `as_dict`. Raises `KeyError` or `TypeError` for other data."""
        passes = (
            RecordedPass(
                recorded["name"], recorded["start_us"], recorded["end_us"],
                tuple(Span(*span) for span in recorded["spans"]), tuple(Link(*link) for link in recorded["links"]),
            )
            for recorded in kept["passes"]
        )  # fmt: skip
        return cls(
            kept["rank"], tuple(passes), kept["arrivals_known"], kept["uncertainty_us"], kept.get("transport", "")
        )


def chrome_trace(tracks: Sequence[Track], predicted: Sequence[ByRank] = (), predictor: str = "") -> dict[str, Any]:
    """Return the trace as a JSON object, with `predicted` spans for each pass of the tracks if there are any.

    `predictor` names the predicted machines. Raises `InputError` if the ranks recorded different passes, or if the
    number of predicted passes is another.
    """
    check_alike(tracks, predicted)
    origin = beginning(tracks)
    events: list[dict[str, Any]] = []
    for track in tracks:
        events += _named(track.rank, f"rank {track.rank}")
        for number, recorded in enumerate(track.passes):
            start, end = recorded.start_us - origin, recorded.end_us - origin
            events += _pass(track.rank, f"{recorded.name} {number}", start, end, recorded.spans)
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
        "predicted by": predictor or None,
        "transport": tracks[0].transport or None if tracks else None,
    }
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": facts}


def beginning(tracks: Sequence[Track]) -> float:
    """Return the earliest start of a pass on any rank, in microseconds."""
    return min((recorded.start_us for track in tracks for recorded in track.passes), default=0.0)


def check_alike(tracks: Sequence[Track], predicted: Sequence[ByRank]) -> None:
    """Raise `InputError` unless all ranks recorded the same passes, and `predicted` is empty or has as many passes."""
    if [track.rank for track in tracks] != list(range(len(tracks))):
        raise InputError(f"tracks must be of ranks 0, 1, ... in order, got {[track.rank for track in tracks]}")
    recorded = {track.rank: [each.name for each in track.passes] for track in tracks}
    for rank, names in recorded.items():
        if names != recorded[0]:
            raise InputError(
                f"rank {rank} recorded {len(names)} passes and rank 0 {len(recorded[0])}, or their names differ; "
                "enter and leave ring.recording() at the same calls on every rank"
            )
    if predicted and len(predicted) != len(recorded.get(0, ())):
        raise InputError(f"{len(recorded.get(0, ()))} passes were recorded and {len(predicted)} predicted")


def _named(process: int, name: str) -> Iterator[dict[str, Any]]:
    """Yield the events that name a process and its threads, and give the process its position in the trace."""
    for event, args in (("process_name", {"name": name}), ("process_sort_index", {"sort_index": process})):
        yield {"ph": "M", "name": event, "pid": process, "tid": 0, "ts": 0, "args": args}
    for lane, thread in LANES.items():
        yield {"ph": "M", "name": "thread_name", "pid": process, "tid": thread, "ts": 0, "args": {"name": lane}}


def _pass(process: int, name: str, start: float, end: float, spans: Sequence[Span]) -> Iterator[dict[str, Any]]:
    """Yield the events of a pass: the pass, its spans, and the bytes in flight."""
    yield _slice(process, PASSES, name, start, end, {})
    for span in spans:
        args = {"bytes": span.nbytes} if span.lane == COMM else {}
        yield _slice(process, span.lane, span.name, start + span.start_us, start + span.end_us, args)
        if span.lane == COMM:
            for when, nbytes in ((span.start_us, span.nbytes), (span.end_us, 0)):
                yield {"ph": "C", "name": "bytes in flight", "pid": process, "tid": 0, "ts": start + when,
                       "args": {"bytes": nbytes}}  # fmt: skip


def _slice(process: int, lane: str, name: str, start: float, end: float, args: dict[str, int]) -> dict[str, Any]:
    return {"ph": "X", "cat": lane, "name": name, "pid": process, "tid": LANES[lane], "ts": start, "dur": end - start,
            "args": args}  # fmt: skip


def _arrows(tracks: Sequence[Track], origin: float) -> Iterator[dict[str, Any]]:
    """Yield the start and the end of an arrow for each message.

    The k-th message that rank a sends to rank b in a pass is the k-th message that b receives from a.
    """
    count = 0
    for number in range(len(tracks[0].passes) if tracks else 0):
        receives: dict[tuple[int, int], list[tuple[float, float]]] = defaultdict(list)
        for track in tracks:
            for link, interval in _linked(track.passes[number]):
                if not link.sends:
                    receives[link.peer, track.rank].append(interval)
        for track in tracks:
            sent: dict[int, int] = defaultdict(int)
            for link, (start, _) in _linked(track.passes[number]):
                if not link.sends:
                    continue
                receive = receives[track.rank, link.peer][sent[link.peer]]
                sent[link.peer] += 1
                count += 1
                arrow = {"name": "message", "cat": "message", "id": count, "tid": LANES[COMM]}
                yield {**arrow, "ph": "s", "pid": track.rank, "ts": start - origin}
                # An arrow must not lead back in time, and must end inside a slice.
                end = max(start, sum(receive) / 2) - origin
                yield {**arrow, "ph": "f", "bp": "e", "pid": link.peer, "ts": end}


def _linked(recorded: RecordedPass) -> Iterator[tuple[Link, tuple[float, float]]]:
    """Yield each message of a pass with the start and end of its exchange."""
    exchanges = {span.name: span for span in recorded.spans if span.lane == COMM}
    for link in recorded.links:
        span = exchanges[f"step {link.step} exchange"]
        yield link, (recorded.start_us + span.start_us, recorded.start_us + span.end_us)
