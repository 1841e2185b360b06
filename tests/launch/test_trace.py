"""Traces: structure after the trace event format, clocks of ranks laid over each other, nothing lost on disk."""

from __future__ import annotations

import json
import random
import threading
from collections import defaultdict
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import pytest
import torch

from ringattn import InputError, Ring
from ringattn.core.span import COMM, COMPUTE, Span
from ringattn.launch.pictures import trace as pictures_trace
from ringattn.launch.pictures.trace import LANES, Offset, Track, chrome_trace, clock_offset
from ringattn.observe.spans import RecordedPass
from ringattn.testing import run_ranks

NUMBERS = (int, float)
CLOSE_US = 1e-3
"""What floats of microseconds since a machine's start, up to some months, may lose in a few additions."""


def recorded(ranks: int, schedule: str = "ring", calls: int = 2) -> list[Track]:
    """Tracks of a few small calls, forward and backward, on threads."""

    def body(ring: Ring) -> Track:
        seq = ring.sequence(41, layout="zigzag")
        x = torch.ones(1, seq.counts[ring.rank], 4, 8).requires_grad_()
        with ring.recording() as recording:
            for _ in range(calls):
                ring.attention(x, x, x, seq, causal=True, schedule=schedule).sum().backward()
        return Track.of(recording, clock_offset(ring.transport.all_gather_bytes, ring.rank))

    return run_ranks(ranks, body)


def checked(trace: dict[str, Any]) -> list[dict[str, Any]]:
    """The events, if they are what viewers read."""
    events = json.loads(json.dumps(trace, allow_nan=False))["traceEvents"]
    lanes: dict[tuple[int, int], list[tuple[float, float]]] = defaultdict(list)
    flows: dict[int, list[dict[str, Any]]] = defaultdict(list)
    for event in events:
        assert event["ph"] in "XMCsf" and isinstance(event["name"], str)
        assert all(type(event[key]) in NUMBERS for key in ("ts", "pid", "tid"))
        assert event["ts"] >= 0
        if event["ph"] == "X":
            assert type(event["dur"]) in NUMBERS and event["dur"] >= 0
            lanes[event["pid"], event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
        elif event["ph"] in "sf":
            flows[event["id"]].append(event)
    for slices in lanes.values():
        for (_, ended), (began, _) in pairwise(sorted(slices)):
            assert ended <= began + CLOSE_US, "slices of a lane overlap"
    for sent, heard in flows.values():
        assert (sent["ph"], heard["ph"], heard["bp"]) == ("s", "f", "e")
        assert sent["ts"] <= heard["ts"] and sent["pid"] != heard["pid"]
        for one in (sent, heard):
            slices = lanes[one["pid"], one["tid"]]
            assert any(began - CLOSE_US <= one["ts"] <= ended + CLOSE_US for began, ended in slices)
    return events


def names(events: Sequence[dict[str, Any]], what: str) -> dict[tuple[int, int], str]:
    return {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["ph"] == "M" and e["name"] == what}


@pytest.mark.parametrize("schedule", ["ring", "all_gather", "all_to_all"])
@pytest.mark.parametrize("ranks", [1, 4])
def test_a_trace_is_well_formed(ranks: int, schedule: str) -> None:
    tracks = recorded(ranks, schedule)
    trace = chrome_trace(tracks)
    events = checked(trace)
    assert names(events, "process_name") == {(rank, 0): f"rank {rank}" for rank in range(ranks)}
    threads = {(rank, thread): lane for rank in range(ranks) for lane, thread in LANES.items()}
    assert names(events, "thread_name") == threads
    slices = [e for e in events if e["ph"] == "X"]
    spans = [span for track in tracks for one in track.passes for span in one.spans]
    assert len(slices) == len(spans) + 4 * ranks  # two calls, forward and backward
    assert {e["pid"] for e in slices} == set(range(ranks))
    assert min(e["ts"] for e in slices) == 0
    assert sum(e["ph"] == "s" for e in events) == sum(one.messages for track in tracks for one in track.passes)
    assert trace["otherData"]["overlap is"] == "measured"


def test_a_counter_shows_the_bytes_under_way() -> None:
    tracks = recorded(3)
    counters = [e for e in checked(chrome_trace(tracks)) if e["ph"] == "C"]
    for track in tracks:
        values = [e["args"]["bytes"] for e in counters if e["pid"] == track.rank]
        assert sum(values) == sum(one.bytes_sent for one in track.passes) > 0
        assert values[1::2] == [0] * (len(values) // 2)


def test_predicted_ranks_are_processes_of_their_own() -> None:
    tracks = recorded(2, calls=1)
    foretold = (Span("step 0 attend", COMPUTE, 0.0, 50.0), Span("step 0 exchange", COMM, 5.0, 60.0, 128))
    trace = chrome_trace(tracks, [[foretold, foretold], [foretold, ()]], "a made-up machine")
    events = checked(trace)
    called = {2: "predicted rank 0", 3: "predicted rank 1"}
    assert {pid: name for (pid, _), name in names(events, "process_name").items() if pid > 1} == called
    first = [e for e in events if e["ph"] == "X" and e["pid"] == 2]
    steps = ["step 0 attend", "step 0 exchange"]
    assert [e["name"] for e in first] == ["predicted forward 0", *steps, "predicted backward 1", *steps]
    assert first[0]["dur"] == pytest.approx(60.0) and first[0]["ts"] == 0
    assert trace["otherData"]["predicted by"] == "a made-up machine"
    with pytest.raises(InputError, match="2 passes were recorded and 1 predicted"):
        chrome_trace(tracks, [[foretold, foretold]])


def test_ranks_must_have_recorded_the_same_passes() -> None:
    tracks = recorded(2, calls=1)
    with pytest.raises(InputError, match="rank 1 recorded 1 passes and rank 0 2"):
        chrome_trace([tracks[0], tracks[1]._replace(passes=tracks[1].passes[:1])])
    with pytest.raises(InputError, match=r"in order, got \[1, 0\]"):
        chrome_trace(tracks[::-1])


def test_a_track_survives_json() -> None:
    for track in recorded(2):
        assert Track.from_dict(json.loads(json.dumps(track.as_dict()))) == track


def test_an_unknown_arrival_makes_the_overlap_a_bound() -> None:
    one = RecordedPass("forward", 0.0, 10.0, (Span("step 0 exchange", COMM, 0.0, 9.0),))
    trace = chrome_trace([Track(0, (one,), arrivals_known=False, uncertainty_us=3.0)])
    assert trace["otherData"]["overlap is"] == "an upper bound"
    assert trace["otherData"]["clock uncertainty, us"] == 3.0


# --- clocks ----------------------------------------------------------------------------------------------------------


def offsets(skews_s: Sequence[float], clocks: Sequence[str | None], delay_s: Callable[[int], float]) -> list[Offset]:
    """What ranks whose clocks run ahead by `skews_s` find out, over an agreement that takes a while for each."""
    barrier = threading.Barrier(len(skews_s))
    rows: list[bytes] = [b""] * len(skews_s)
    found: list[Offset] = [Offset(0.0, 0.0)] * len(skews_s)
    times = [0.0] * len(skews_s)

    def life(rank: int) -> None:
        def agree(payload: bytes) -> list[bytes]:
            times[rank] += delay_s(rank)
            rows[rank] = payload
            barrier.wait()
            arrived = max(times)
            answer = list(rows)
            barrier.wait()
            times[rank] = arrived + delay_s(rank)
            return answer

        found[rank] = clock_offset(agree, rank, now=lambda: times[rank] + skews_s[rank], clock=clocks[rank])

    threads = [threading.Thread(target=life, args=(rank,)) for rank in range(len(skews_s))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


@pytest.mark.parametrize("seed", range(5))
def test_the_true_offset_lies_within_the_uncertainty(seed: int) -> None:
    draw = random.Random(seed)
    skews = [draw.uniform(-1000, 1000) for _ in range(4)]
    # One way may take much longer than the other, as on a crowded network.
    found = offsets(skews, ["a", "b", "c", "d"], lambda rank: draw.uniform(1e-6, 1e-3 * (1 + rank)))
    assert found[0] == Offset(0.0, 0.0)
    for skew, offset in zip(skews[1:], found[1:], strict=True):
        reference_us = (skews[0] - skew) * 1e6
        assert abs(offset.offset_us - reference_us) <= offset.uncertainty_us + 1e-3
        assert 0 < offset.uncertainty_us <= 10_000


def test_ranks_of_one_host_share_their_clock() -> None:
    assert offsets([5.0, 5.0, 7.0], ["a", "a", "b"], lambda rank: 1e-4)[:2] == [Offset(0.0, 0.0)] * 2
    assert all(track.uncertainty_us == 0.0 for track in recorded(2))


def test_clocks_that_differ_are_not_taken_for_one() -> None:
    # Two containers of one host, of which one was given a clock of its own.
    _, offset = offsets([0.0, 3.0], ["a", "a"], lambda rank: 1e-4)
    assert offset.offset_us == pytest.approx(-3e6, abs=1e3)


def test_without_a_boot_id_the_host_names_its_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(*_: Any, **__: Any) -> str:
        raise FileNotFoundError

    monkeypatch.setattr(pictures_trace.Path, "read_text", missing)
    monkeypatch.setattr(pictures_trace.socket, "gethostname", lambda: "node7")
    assert pictures_trace.host_clock() == "node7"
