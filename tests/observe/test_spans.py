"""Recordings of a rank's work and waits (spans), on every schedule, on slow transports, and with recording off."""

from __future__ import annotations

import threading
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ringattn import InputError, PeerLostError, Ring, RingMultiheadAttention, UnsupportedError
from ringattn.bench import recording as bench_recording
from ringattn.bench.clock import Sample
from ringattn.bench.recording import PASSES
from ringattn.core.span import COMM, COMPUTE, Span, exposed, total_us, under_way
from ringattn.engine.plain import PlainEngine
from ringattn.observe import spans
from ringattn.observe.spans import Recording
from ringattn.runtime.executor import PassProfiler
from ringattn.schedule.routes import ROUTES
from ringattn.testing import run_ranks
from tests.contract.threads import on_threads

TOKENS = 37


def both_passes(ring: Ring, schedule: str = "auto") -> None:
    """Run the forward and the backward pass of a small attention call."""
    forward(ring, schedule).sum().backward()


def forward(ring: Ring, schedule: str = "auto") -> torch.Tensor:
    """Run the forward pass of a small attention call. Return its output, from which backward can be called."""
    seq = ring.sequence(TOKENS, layout="zigzag")
    q, k, v = (torch.ones(1, seq.counts[ring.rank], heads, 8).requires_grad_() for heads in (4, 4, 4))
    return ring.attention(q, k, v, seq, causal=True, schedule=schedule)


def lane(spans: tuple[Span, ...], name: str) -> list[Span]:
    """Return the spans of the lane `name`, in order."""
    return sorted((span for span in spans if span.lane == name), key=lambda span: span.start_us)


# --- hidden and exposed communication, from spans ---------------------------------------------------------------------


bounds = st.tuples(st.integers(0, 30), st.integers(0, 30)).map(sorted)


@given(st.lists(st.tuples(st.sampled_from([COMM, COMPUTE]), bounds), max_size=8))
def test_exposed_time_is_that_of_counted_microseconds(drawn: list[tuple[str, list[int]]]) -> None:
    spans = [Span("x", lane, *pair) for lane, pair in drawn]
    busy, sending = (
        {us for span in spans if span.lane == lane for us in range(int(span.start_us), int(span.end_us))}
        for lane in (COMPUTE, COMM)
    )
    intervals = exposed(spans)
    assert {us for start, end in intervals for us in range(int(start), int(end))} == sending - busy
    assert total_us(intervals) == len(sending - busy) and total_us(under_way(spans)) == len(sending)


# --- a pass ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("schedule", list(ROUTES))
@pytest.mark.parametrize("ranks", [1, 4])
def test_a_pass_records_the_spans_and_messages_of_its_plan(ranks: int, schedule: str) -> None:
    def body(ring: Ring) -> tuple[Recording, dict[str, int], list[Any]]:
        both_passes(ring, schedule)
        ring.reset_counters()
        with ring.recording() as recording:
            both_passes(ring, schedule)
        return recording, ring.counters(), [executor.plan for executor in ring._executors.values()]

    for rank, (recording, counters, plans) in enumerate(run_ranks(ranks, body)):
        assert (recording.rank, recording.world_size) == (rank, ranks)
        assert [recorded.name for recorded in recording.passes] == ["forward", "backward"]
        assert recording.bytes_sent == counters["bytes_sent"] and recording.messages == counters["messages"]
        for recorded, plan in zip(recording.passes, plans, strict=True):
            assert all(
                0 <= span.start_us <= span.end_us <= recorded.end_us - recorded.start_us for span in recorded.spans
            )
            compute, comm = lane(recorded.spans, COMPUTE), lane(recorded.spans, COMM)
            assert len(compute) + len(comm) == len(recorded.spans)
            for before, after in pairwise(compute):
                assert before.end_us <= after.start_us
            travelling = [step for step in plan.steps if step.sends or step.recvs]
            assert [span.name for span in comm] == [f"step {step.number} exchange" for step in travelling]
            working = [f"step {step.number}" for step in plan.steps if step.work]
            named = [span.name.rpartition(" ") for span in compute]
            assert [step for step, _, phase in named if phase in ("attend", "merge")] == working
            assert sum(link.sends for link in recorded.links) == plan.messages
        first, second = recording.passes
        assert 0 <= first.start_us < first.end_us <= second.start_us
        assert recording.arrivals_known and 0 <= recording.exposed_us <= recording.comm_us
        assert 0.0 <= recording.overlap <= 1.0
        if ranks == 1:
            assert (recording.exposed_us, recording.comm_us, recording.overlap) == (0.0, 0.0, 1.0)


def test_spans_of_several_passes_are_timed_from_the_start_of_the_first() -> None:
    with Ring() as ring, ring.recording() as recording:
        for _ in range(3):
            both_passes(ring)
        passes_before = len(recording.passes)
        both_passes(ring)
    assert passes_before == 6 and len(recording.passes) == 8
    first, *_, last = recording.passes
    assert recording.spans[0] == first.spans[0]
    assert recording.spans[-1].end_us == pytest.approx(last.spans[-1].end_us + last.start_us - first.start_us)


def test_projections_before_and_during_the_transfer_of_keys_are_recorded() -> None:
    def body(ring: Ring) -> Recording:
        seq = ring.sequence(TOKENS)
        layer = RingMultiheadAttention(16, 2)
        with ring.recording() as recording, torch.no_grad():
            layer(torch.ones(1, seq.counts[ring.rank], 16), seq)
        return recording

    for recording in run_ranks(2, body):
        spans = recording.passes[0].spans
        keys, queries = (span for span in spans if span.name == "step 0 project")
        (exchange,) = lane(spans, COMM)
        assert keys.end_us <= exchange.start_us <= queries.start_us
        assert [span.name for span in spans].count("step 0 attend") == 1


# --- waiting ---------------------------------------------------------------------------------------------------------


class FakeClock(threading.local):
    """A clock per rank, in seconds, which advances only when a test advances it."""

    now_s = 0.0

    def perf_counter(self) -> float:
        return self.now_s


class Slow:
    """A local transport whose exchanges take `delay_s` on the fake clock.

    If `reports_arrivals`, its work handles report when messages arrived.
    """

    def __init__(self, inner: Any, clock: FakeClock, delay_s: float, reports_arrivals: bool) -> None:
        self.inner, self.clock, self.delay_s, self.reports_arrivals = inner, clock, delay_s, reports_arrivals

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def bind(self, sends: Any, recvs: Any) -> Any:
        return SlowHop(self, self.inner.bind(sends, recvs))


class SlowHop:
    """A hop of `Slow`. It is also its own work handle, because only one exchange runs at a time."""

    def __init__(self, transport: Slow, hop: Any) -> None:
        self.transport, self.hop, self.arrived_s = transport, hop, None

    def start(self) -> SlowHop:
        self.arrives_s = self.transport.clock.now_s + self.transport.delay_s
        self.handle = self.hop.start()
        return self

    def wait(self) -> None:
        self.handle.wait()
        self.transport.clock.now_s = max(self.transport.clock.now_s, self.arrives_s)
        self.arrived_s = self.arrives_s if self.transport.reports_arrivals else None


class SlowEngine:
    """The plain engine, except that each attention update takes `work_s` on the fake clock."""

    name = "slow"

    def __init__(self, clock: FakeClock, work_s: float) -> None:
        self.inner, self.clock, self.work_s = PlainEngine(), clock, work_s

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def attend(self, *arguments: Any) -> None:
        self.clock.now_s += self.work_s
        self.inner.attend(*arguments)


@pytest.mark.parametrize("reports_arrivals", [True, False])
@pytest.mark.parametrize(
    ("delay_s", "work_s", "comm_s", "bound_s", "exposed_s"),
    [  # forward on two ranks: one exchange while the first of two steps of work runs
        (0.080, 0.0, 0.080, 0.080, 0.080),
        (0.100, 0.030, 0.100, 0.100, 0.070),
        (0.030, 0.030, 0.030, 0.030, 0.0),
        (0.020, 0.080, 0.020, 0.080, 0.0),  # messages arrive before the wait; its end is the bound without reports
    ],
)
def test_the_time_of_a_transfer_that_work_does_not_hide_is_exposed(
    monkeypatch: pytest.MonkeyPatch,
    delay_s: float, work_s: float, comm_s: float, bound_s: float, exposed_s: float, reports_arrivals: bool,
) -> None:  # fmt: skip
    clock = FakeClock()
    monkeypatch.setattr(spans, "time", clock)

    def body(transport: Any) -> Recording:
        slow = Slow(transport, clock, delay_s, reports_arrivals)
        with Ring(transport=slow, engine=SlowEngine(clock, work_s)) as ring, ring.recording() as recording:  # type: ignore[arg-type]
            forward(ring)
        return recording

    for recording in on_threads(2, body):
        assert recording.arrivals_known == reports_arrivals
        comm_us = 1e6 * (comm_s if reports_arrivals else bound_s)
        assert recording.comm_us == pytest.approx(comm_us)
        assert recording.exposed_us == pytest.approx(1e6 * exposed_s, abs=1e-6)
        assert recording.overlap == pytest.approx(1 - 1e6 * exposed_s / comm_us)


# --- off, nested, broken ---------------------------------------------------------------------------------------------


def test_nothing_is_recorded_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    created: list[Any] = []
    make = PassProfiler.__init__
    monkeypatch.setattr(PassProfiler, "__init__", lambda self, *args: created.append(args[1:]) or make(self, *args))
    run_ranks(2, lambda ring: both_passes(ring))
    assert created and set(created) == {(None, None)}


def test_recordings_end_with_their_block_and_do_not_nest() -> None:
    recordings: list[Recording] = []

    def interrupted(ring: Ring) -> None:
        with ring.recording() as recording:
            recordings.append(recording)
            both_passes(ring)
            with pytest.raises(InputError, match="cannot be nested"), ring.recording():
                pass
            raise ZeroDivisionError

    with Ring() as ring:
        for number in (1, 2):
            with pytest.raises(ZeroDivisionError):
                interrupted(ring)
            both_passes(ring)
            assert [len(recording.passes) for recording in recordings] == [2] * number and ring._recording is None


def test_a_failed_pass_is_not_recorded() -> None:
    class Broken(SlowEngine):
        def attend(self, *arguments: Any) -> None:
            raise ZeroDivisionError

    with Ring(engine=Broken(FakeClock(), 0.0)) as ring, ring.recording() as recording:  # type: ignore[arg-type]
        with pytest.raises(ZeroDivisionError):
            forward(ring)
        assert recording.passes == () and recording.overlap == 1.0


def test_backward_on_another_thread_is_recorded() -> None:
    def body(ring: Ring) -> Recording:
        with ring.recording() as recording:
            out = forward(ring)
            backward = threading.Thread(target=out.sum().backward)
            backward.start()
            backward.join()
        return recording

    for recording in run_ranks(2, body):
        assert [recorded.name for recorded in recording.passes] == ["forward", "backward"]


def names_of(profile: Any) -> set[str]:
    return {event.name for event in profile.events() if event.name.startswith("ringattn")}


@pytest.mark.parametrize("recorded", [False, True])
def test_the_torch_profiler_shows_the_names_of_steps(recorded: bool) -> None:
    def body(ring: Ring) -> set[str]:
        both_passes(ring, "ring")
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            if recorded:
                with ring.recording():
                    both_passes(ring, "ring")
            else:
                both_passes(ring, "ring")
        return names_of(profile)

    (names,) = run_ranks(1, body)  # the profiler sees only the thread that starts it
    assert {"ringattn forward step 0 attend", "ringattn backward step 1 attend"} <= names


# --- the cost of recording -------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_benchmark_measures_passes_with_and_without_recording(tmp_path: Path) -> None:
    sizes = ["length_tokens=128", "heads=2", "kv_heads=2", "head_dim=16", "repeats=2", f"results={tmp_path}"]
    data = bench_recording.main(sizes)
    assert all(len(data["samples"][mode][name]) == 2 for mode in ("off", "on", "off, again") for name in PASSES)
    assert data["largest_error"] < 1e-5
    assert all(0 < alone["recorder_s"] < 0.01 for alone in data["alone"].values())
    assert "of the pass" in (tmp_path / "recording.md").read_text()


def test_the_verdict_ignores_times_if_noise_exceeds_the_bound() -> None:
    def note(off_s: float, on_s: float, again_s: float, recorder_s: float) -> str:
        seconds = {"off": off_s, "on": on_s, "off, again": again_s}
        samples = {
            mode: {name: [Sample(measured_s, measured_s, 0.0)] * 3 for name in PASSES}
            for mode, measured_s in seconds.items()
        }
        alone = {name: {"steps": 4, "recorder_s": recorder_s, "off_s": 2e-7} for name in PASSES}
        return bench_recording.cost_table(bench_recording.RecordingOptions(), samples, alone).notes[-1]

    assert ": met. Off, the profiler takes 0 us, 0.000% of the pass" in note(1.0, 1.01, 1.005, 1e-4)
    assert ": MISSED." in note(1.0, 1.03, 1.005, 1e-4)
    assert ": MISSED." in note(1.0, 1.01, 1.005, 0.03)
    assert ": met by the recorder alone, undecided by times." in note(1.0, 1.2, 0.9, 1e-4)
    assert ": MISSED." in note(1.0, 1.2, 0.9, 0.03)


# --- NVTX, devices ---------------------------------------------------------------------------------------------------


@pytest.fixture
def nvtx(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Fake a GPU and NVTX. Return a list of the calls: the name for each push, and "pop" for each pop."""
    calls: list[str] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch.cuda.nvtx, "range_push", calls.append)
    monkeypatch.setattr(torch.cuda.nvtx, "range_pop", lambda: calls.append("pop"))
    return calls


def on_rank_0(body: Callable[[Ring], None]) -> Callable[[Ring], None]:
    """Return a function that runs `body` on rank 0 and `both_passes` on every other rank."""
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
        ring.engine = Broken(FakeClock(), 0.0)  # type: ignore[assignment]
        with ring.recording(nvtx=True), pytest.raises(ZeroDivisionError):
            forward(ring)

    with pytest.raises(PeerLostError):  # rank 1 gets the error too
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
    """A fake CUDA stream. `us`: the microseconds of work that were enqueued so far."""

    def __init__(self) -> None:
        self.us = 0.0


class Event:
    """A fake CUDA event. Its time may be read only after a wait for it."""

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


def test_events_of_a_device_are_read_only_after_the_pass(nvtx: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    compute, lanes = Stream(), Stream()
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: compute)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    waits: list[int] = []

    class DeviceHop:
        """A hop that takes 100 us on its own stream. A wait for it makes the compute stream wait."""

        arrived_s = None

        def __init__(self, hop: Any) -> None:
            self.hop = hop

        def start(self) -> DeviceHop:
            self.handle = self.hop.start()
            lanes.us = compute.us + 100.0
            return self

        def wait(self) -> None:
            self.handle.wait()
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
        with Ring(transport=transport, engine=DeviceEngine(FakeClock(), 0.0)) as ring:  # type: ignore[arg-type]
            monkeypatch.setattr(transport, "bind", lambda *ends: DeviceHop(type(transport).bind(transport, *ends)))
            transport.stream, transport.device = lanes, torch.device("cuda")
            with ring.recording() as recorded:
                transport.device = torch.device("cpu")
                before = Event.waits
                forward(ring)
                waits.append(Event.waits - before)
            return recorded

    recording = on_threads(2, body)[0]
    assert recording is not None and waits == [0]
    (recorded,) = recording.passes
    assert [(span.name, span.end_us - span.start_us) for span in recorded.spans] == [
        ("step 0 pack", 0.0), ("step 0 attend", 70.0), ("step 1 attend", 70.0), ("step 0 exchange", 100.0),
    ]  # fmt: skip
    assert (recorded.exposed_us, recorded.comm_us) == (pytest.approx(30.0), pytest.approx(100.0))
    assert recording.overlap == pytest.approx(0.7) and recording.arrivals_known
