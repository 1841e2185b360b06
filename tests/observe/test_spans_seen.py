"""Recordings where others look on: profilers see phases by name, and on a device moments are events.

CUDA is stood in for by streams that count microseconds.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from ringattn import PeerLostError, Ring, UnsupportedError
from ringattn.bench import recording
from ringattn.bench.clock import Sample
from ringattn.bench.recording import PASSES
from ringattn.observe.spans import Recording
from ringattn.testing import run_ranks
from tests.contract.threads import on_threads
from tests.observe.test_spans import TOKENS, Hours, SlowEngine, both_passes, forward


def names_of(profile: Any) -> set[str]:
    return {event.name for event in profile.events() if event.name.startswith("ringattn")}


@pytest.mark.parametrize("recorded", [False, True])
def test_a_profiler_sees_our_steps_by_name(recorded: bool) -> None:
    def body(ring: Ring) -> set[str]:
        both_passes(ring, "ring")
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            if recorded:
                with ring.recording():
                    both_passes(ring, "ring")
            else:
                both_passes(ring, "ring")
        return names_of(profile)

    (found,) = run_ranks(1, body)  # a profiler watches one thread
    assert {"ringattn forward step 0 attend", "ringattn backward step 1 attend"} <= found


# --- what it costs ---------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_benchmark_measures_both(tmp_path: Path) -> None:
    sizes = ["length_tokens=128", "heads=2", "kv_heads=2", "head_dim=16", "repeats=2", f"results={tmp_path}"]
    data = recording.main(sizes)
    assert all(len(data["samples"][mode][name]) == 2 for mode in ("off", "on", "off, again") for name in PASSES)
    assert data["largest_error"] < 1e-5
    assert all(0 < alone["recorder_s"] < 0.01 for alone in data["alone"].values())
    assert "of the pass" in (tmp_path / "recording.md").read_text()


def test_the_verdict_trusts_times_only_where_they_tell(monkeypatch: pytest.MonkeyPatch) -> None:
    def told(off_s: float, on_s: float, again_s: float, recorder_s: float) -> str:
        seconds = {"off": off_s, "on": on_s, "off, again": again_s}
        found = {mode: {name: [Sample(one, one, 0.0)] * 3 for name in PASSES} for mode, one in seconds.items()}
        alone = {name: {"steps": 4, "recorder_s": recorder_s} for name in PASSES}
        return recording.cost_table(recording.RecordingOptions(), found, alone).notes[-1]

    monkeypatch.setattr(recording, "comparison_ns", lambda: 50.0)
    assert ": met. Off, 4 comparisons of 50 ns each are 2.0e-07 of the pass" in told(1.0, 1.01, 1.005, 1e-4)
    assert ": MISSED." in told(1.0, 1.03, 1.005, 1e-4)
    assert ": MISSED." in told(1.0, 1.01, 1.005, 0.03)
    assert ": met by the recorder alone, undecided by times." in told(1.0, 1.2, 0.9, 1e-4)
    assert ": MISSED." in told(1.0, 1.2, 0.9, 0.03)


# --- NVTX, devices ---------------------------------------------------------------------------------------------------


@pytest.fixture
def nvtx(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Stands in for NVTX and for a GPU that is not capturing; what was pushed and popped."""
    told: list[str] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch.cuda.nvtx, "range_push", told.append)
    monkeypatch.setattr(torch.cuda.nvtx, "range_pop", lambda: told.append("pop"))
    return told


def on_rank_0(body: Callable[[Ring], None]) -> Callable[[Ring], None]:
    """`body` on rank 0, its passes on every rank."""
    return lambda ring: body(ring) if ring.rank == 0 else both_passes(ring)


def test_nvtx_names_every_phase_and_ends_it(nvtx: list[str]) -> None:
    def body(ring: Ring) -> None:
        with ring.recording(nvtx=True):
            both_passes(ring)

    run_ranks(2, on_rank_0(body))
    assert nvtx[0] == "ringattn forward step 0 pack" and "ringattn backward step 1 attend" in nvtx
    assert nvtx[1::2] == ["pop"] * (len(nvtx) // 2) and "pop" not in nvtx[::2]


def test_a_pass_that_fails_leaves_no_open_range(nvtx: list[str]) -> None:
    class Broken(SlowEngine):
        def attend(self, *arguments: Any) -> None:
            raise ZeroDivisionError

    def body(ring: Ring) -> None:
        ring.engine = Broken(Hours(), 0.0)  # type: ignore[assignment]
        with ring.recording(nvtx=True), pytest.raises(ZeroDivisionError):
            forward(ring)

    with pytest.raises(PeerLostError):  # rank 1 hears of it
        run_ranks(2, on_rank_0(body), engine="plain")
    assert nvtx[-2:] == ["ringattn forward step 0 attend", "pop"]


def test_nvtx_needs_a_gpu() -> None:
    with Ring() as ring, pytest.raises(UnsupportedError, match="nvtx"), ring.recording(nvtx=True):
        pass


def test_a_capture_is_refused_and_the_ring_lives(nvtx: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def body(ring: Ring) -> None:
        seq = ring.sequence(TOKENS)
        x = torch.ones(1, seq.counts[ring.rank], 2, 8)
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        with ring.recording() as recorded, pytest.raises(UnsupportedError, match="captured into a CUDA graph"):
            ring.attention(x, x, x, seq)
        assert recorded.passes == ()
        ring.barrier()
        ring.attention(x, x, x, seq)

    run_ranks(2, body)


class Stream:
    """A queue of device work: so many microseconds of it have been put there."""

    def __init__(self) -> None:
        self.us = 0.0


class Event:
    """A moment of a stream that may be read only when it has been waited for."""

    waits = 0

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing
        self.reached = False

    def record(self, stream: Stream) -> None:
        self.us = stream.us

    def synchronize(self) -> None:
        Event.waits += 1
        self.reached = True

    def elapsed_time(self, other: Event) -> float:
        assert other.reached
        return (other.us - self.us) / 1e3


def test_on_a_device_moments_are_events_that_are_read_behind_the_pass(
    nvtx: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    compute, lanes = Stream(), Stream()
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: compute)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    waits: list[int] = []

    class DeviceHop:
        """As on a device: posted at once; it takes 100 us on its stream, and the wait orders the compute stream."""

        arrived_s = None

        def __init__(self, hop: Any) -> None:
            self.hop = hop

        def start(self) -> DeviceHop:
            self.ticket = self.hop.start()
            lanes.us = compute.us + 100.0
            return self

        def wait(self) -> None:
            self.ticket.wait()
            compute.us = max(compute.us, lanes.us)

    class DeviceEngine(SlowEngine):
        def attend(self, *arguments: Any) -> None:
            compute.us += 70.0
            self.inner.attend(*arguments)

    def body(transport: Any) -> Recording | None:
        if transport.rank:
            with Ring(transport=transport, engine="plain") as ring:
                forward(ring)
            return None
        with Ring(transport=transport, engine=DeviceEngine(Hours(), 0.0)) as ring:  # type: ignore[arg-type]
            monkeypatch.setattr(transport, "bind", lambda *ends: DeviceHop(type(transport).bind(transport, *ends)))
            transport.stream, transport.device = lanes, torch.device("cuda")
            with ring.recording() as recorded:
                transport.device = torch.device("cpu")
                before = Event.waits
                forward(ring)
                waits.append(Event.waits - before)
            return recorded

    found = on_threads(2, body)[0]
    assert found is not None and waits == [0]
    (one,) = found.passes
    assert [(span.name, span.end_us - span.start_us) for span in one.spans] == [
        ("step 0 pack", 0.0), ("step 0 attend", 70.0), ("step 1 attend", 70.0), ("step 0 exchange", 100.0),
    ]  # fmt: skip
    assert (one.exposed_us, one.comm_us) == (pytest.approx(30.0), pytest.approx(100.0))
    assert found.overlap == pytest.approx(0.7) and found.arrivals_known
