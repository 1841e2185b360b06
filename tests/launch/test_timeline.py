"""`ringattn timeline`: recordings, their trace and picture, predictions, and the clocks of ranks."""

from __future__ import annotations

import json
import random
import threading
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import matplotlib.image
import matplotlib.pyplot as plt
import numpy as np
import pytest
import torch
from matplotlib.colors import to_rgb

from ringattn import InputError, Ring
from ringattn.cli import main
from ringattn.core.span import COMM, COMPUTE, Span
from ringattn.launch.measure.environment import NOT_CALIBRATED
from ringattn.launch.pictures import trace as pictures_trace
from ringattn.launch.pictures.charts import ATTEND, EXPOSED, MESSAGES, draw_timeline, timeline_figure
from ringattn.launch.pictures.timeline import (
    Prediction,
    TimelineConfig,
    difference_of,
    explanation_on,
    predict,
    predicted_spans,
    read_tracks,
    record_rank,
    table,
    write_tracks,
)
from ringattn.launch.pictures.trace import LANES, Offset, Track, chrome_trace, clock_offset
from ringattn.observe.spans import RecordedPass
from ringattn.planner.cluster import CLUSTERS
from ringattn.planner.simulate import simulate
from ringattn.testing import run_ranks
from ringattn.transport.location import VARIABLE
from tests.launch.commands import write_calibration


def scripted(ranks: int, exposed: bool = True, arrivals_known: bool = True) -> list[Track]:
    """Return tracks of two passes of 8 ms with 4 ms of work.

    The messages of a pass last 4 ms longer than the work if they are `exposed`; otherwise the work hides them.
    """
    end = 8000.0 if exposed else 3900.0
    spans = Span("step 0 attend", COMPUTE, 0.0, 4000.0), Span("step 0 exchange", COMM, 100.0, end, 64)
    passes = tuple(RecordedPass(name, 0.0, 8000.0, spans) for name in ("forward", "backward"))
    return [Track(rank, passes, arrivals_known, 0.0) for rank in range(ranks)]


def shares(path: Path) -> dict[str, float]:
    """Return the fraction of the picture's pixels that have each color."""
    pixels = matplotlib.image.imread(path)[:, :, :3]
    colors = ATTEND, MESSAGES, EXPOSED
    return {color: float((np.abs(pixels - to_rgb(color)).max(2) < 0.01).mean()) for color in colors}


@pytest.mark.parametrize("ranks", [2, pytest.param(16, marks=pytest.mark.slow)])
def test_the_picture_shows_work_and_hidden_and_exposed_messages(tmp_path: Path, ranks: int) -> None:
    hidden, exposed = tmp_path / "hidden.png", tmp_path / "exposed.png"
    draw_timeline(hidden, scripted(ranks, exposed=False))
    draw_timeline(exposed, scripted(ranks))
    before, after = shares(hidden), shares(exposed)
    assert before[ATTEND] > 0.05 and after[ATTEND] == pytest.approx(before[ATTEND], rel=0.02)
    assert before[MESSAGES] == pytest.approx(before[ATTEND], rel=0.15)  # 3900 us and 4000 us; only work has labels
    # Half of a hatched bar is white. The orange of the legend and the labels is the same in both pictures.
    assert after[EXPOSED] - before[EXPOSED] > 0.3 * before[ATTEND]


@pytest.mark.parametrize("lasts_us", [(8000.0, 20000.0), (100.0, 20000.0), (3000.0, 3000.0), (0.0, 0.0)])
@pytest.mark.parametrize("predicted_ratio", [1.0, 1.6])
def test_a_millisecond_has_the_same_width_in_all_panels(lasts_us: tuple[float, float], predicted_ratio: float) -> None:
    """All panels have the same scale, also if a prediction ends later than the recording or a pass is short."""
    spans = [(Span("step 0 attend", COMPUTE, 0.0, last), Span("step 0 exchange", COMM, 0.0, last)) for last in lasts_us]
    passes = tuple(
        RecordedPass(name, 50.0, 50.0 + last, of_pass)
        for name, last, of_pass in zip(("forward", "backward"), lasts_us, spans, strict=True)
    )
    tracks = [Track(rank, passes, True, 0.0) for rank in range(2)]
    later = (Span("step 0 attend", COMPUTE, 0.0, predicted_ratio * lasts_us[0]),)
    predictions = [[later] * 2, [spans[1]] * 2] if predicted_ratio > 1 else []
    figure = timeline_figure(tracks, predictions, "a made-up machine")
    figure.canvas.draw()
    scales = [ax.get_xlim()[1] / ax.get_window_extent().width for ax in figure.axes]
    assert scales[0] == pytest.approx(scales[1], rel=0.01)
    shown_ms = [ax.get_xlim()[1] for ax in figure.axes]
    assert shown_ms[0] >= predicted_ratio * lasts_us[0] / 1e3 and shown_ms[1] >= lasts_us[1] / 1e3
    gaps = {round(b - a, 9) for ax in figure.axes for a, b in pairwise(ax.get_xticks())}
    assert len(gaps) == 1
    plt.close(figure)


def test_a_long_name_of_the_predicted_machine_fits_into_the_picture() -> None:
    tracks, machine = scripted(2), "2 cores of a made-up processor with a long name, " * 6
    figure = timeline_figure(tracks, [[track.passes[0].spans for track in tracks]] * 2, machine)
    figure.canvas.draw()
    assert figure.legends[0].get_title().get_text().replace("\n", " ") == f"predicted for {machine.strip()}"
    boxes = [legend.get_window_extent() for legend in figure.legends]
    boxes += [text.get_window_extent() for text in (*figure.texts, *(text for ax in figure.axes for text in ax.texts))]
    assert all(figure.bbox.x0 <= box.x0 and box.x1 <= figure.bbox.x1 for box in boxes)
    plt.close(figure)


@pytest.mark.slow
def test_predictions_are_drawn_below_in_paler_colors(tmp_path: Path) -> None:
    tracks, files = scripted(4), (tmp_path / "recorded.png", tmp_path / "predicted.png")
    draw_timeline(files[0], tracks)
    draw_timeline(files[1], tracks, [[track.passes[0].spans for track in tracks]] * 2, "a made-up machine")
    recorded, predicted = map(matplotlib.image.imread, files)
    assert predicted.shape[0] > recorded.shape[0] and recorded.shape[1] == predicted.shape[1]
    pale = np.abs(predicted[:, :, :3] - (0.45 * np.array(to_rgb(ATTEND)) + 0.55)).max(2) < 0.02
    assert pale.mean() > 0.01


@pytest.mark.slow
def test_the_command_records_and_reads_its_recordings(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # a folder without a calibration
    monkeypatch.delenv(VARIABLE, raising=False)
    files = [f"trace={tmp_path / 'a.json'}", f"picture={tmp_path / 'a.png'}", f"keep={tmp_path / 'kept'}"]
    assert main(["timeline", "ranks=2", "tokens=64", "warmup=1", "head_dim=8", *files]) == 0
    printed = capfd.readouterr().out
    for text in ("starting 2 processes", "call 1 of 2", "call 2 of 2", "upper bounds", "ui.perfetto.dev",
                 "transport: shm", f"predicted: {NOT_CALIBRATED}"):  # fmt: skip
        assert text in printed
    trace = json.loads((tmp_path / "a.json").read_text())
    slices = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    assert {event["pid"] for event in slices} == {0, 1}
    assert trace["otherData"]["overlap is"] == "an upper bound" and trace["otherData"]["transport"] == "shm"
    assert matplotlib.image.imread(tmp_path / "a.png").shape[1] == 1950
    assert sorted(file.name for file in (tmp_path / "kept").iterdir()) == ["recording-0.json", "recording-1.json"]

    again = tmp_path / "b.json"
    assert main(["timeline", f"recorded={tmp_path / 'kept'}", f"trace={again}", "picture="]) == 0
    assert json.loads(again.read_text()) == trace
    rows = [line for line in printed.splitlines() if line.startswith(("forward", "backward"))]
    assert len(rows) == 4 and all(row in capfd.readouterr().out.splitlines() for row in rows[:1])
    assert not (tmp_path / "b.png").exists()


def test_without_backward_only_forward_is_recorded() -> None:
    config = TimelineConfig(tokens=40, head_dim=8, backward=False, warmup=0)
    for track in run_ranks(2, lambda ring: record_rank(ring, config)):
        assert [recorded.name for recorded in track.passes] == ["forward"]


def test_the_table_shows_the_exposed_time_of_each_rank() -> None:
    lines = table(scripted(2), []).splitlines()
    assert len(lines) == 5 and lines[1].split() == ["forward", "0", "8.00", "7.90", "4.00", "49.4%"]
    assert "upper bounds" in table(scripted(2, arrivals_known=False), [])


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, r"holds no recording-<rank>\.json"),
        ({"recording-0.json": "{"}, "recording-0.json is not a recording"),
        ({"recording-0.json": '{"rank": 0}'}, "recording-0.json is not a recording"),
        ({"recording-0.json": "[]"}, "recording-0.json is not a recording"),
    ],
)
def test_the_error_names_a_file_that_is_not_a_recording(
    tmp_path: Path, content: dict[str, str] | None, message: str
) -> None:
    for name, text in (content or {}).items():
        (tmp_path / name).write_text(text)
    with pytest.raises(InputError, match=message):
        read_tracks(tmp_path)


def test_recordings_of_all_ranks_are_needed(tmp_path: Path) -> None:
    write_tracks(tmp_path, scripted(11)[1:])
    with pytest.raises(InputError, match="in order, got"):
        read_tracks(tmp_path)
    write_tracks(tmp_path, scripted(11))
    assert [track.rank for track in read_tracks(tmp_path)] == list(range(11))


# --- predictions -----------------------------------------------------------------------------------------------------


@pytest.fixture
def recordings(tmp_path: Path) -> Path:
    """Write the recordings of a call on two ranks into a folder, and return the folder."""
    config = TimelineConfig(ranks=2, tokens=64, head_dim=8, schedule="ring", warmup=0)
    write_tracks(tmp_path / "recordings", run_ranks(2, lambda ring: record_rank(ring, config)))
    return tmp_path / "recordings"


CALL = ["ranks=2", "tokens=64", "head_dim=8", "schedule=ring", "cluster=a100"]


def test_the_prediction_is_in_the_table_the_trace_and_the_picture(
    recordings: Path, tmp_path: Path, capsys: Any
) -> None:
    trace, picture = tmp_path / "a.json", tmp_path / "a.png"
    assert main(["timeline", f"recorded={recordings}", *CALL, f"trace={trace}", f"picture={picture}"]) == 0
    printed = capsys.readouterr().out
    rows = [line.split() for line in printed.splitlines() if line.startswith(("forward", "backward"))]
    config = TimelineConfig(ranks=2, tokens=64, head_dim=8, schedule="ring")
    predicted = predicted_spans(config, CLUSTERS["a100"], read_tracks(recordings))
    ends_ms = [max(span.end_us for span in spans) / 1e3 for by_rank in predicted for spans in by_rank]
    assert "predicted ms" in printed and [float(row[-1]) for row in rows] == pytest.approx(ends_ms, abs=0.006)
    events = json.loads(trace.read_text())
    names = [event["args"]["name"] for event in events["traceEvents"] if event["name"] == "process_name"]
    assert names == ["rank 0", "rank 1", "predicted rank 0", "predicted rank 1"]
    assert events["otherData"]["predicted by"] == CLUSTERS["a100"].name
    assert picture.exists()


def test_predicted_and_measured_steps_have_the_same_names(recordings: Path) -> None:
    config = TimelineConfig(ranks=2, tokens=64, head_dim=8, schedule="ring")
    tracks = read_tracks(recordings)
    for number, by_rank in enumerate(predicted_spans(config, CLUSTERS["a100"], tracks)):
        for track, spans in zip(tracks, by_rank, strict=True):
            measured = {span.name: span for span in track.passes[number].spans}
            predicted = {span.name: span for span in spans}
            assert {name for name in measured if name.endswith("attend")} <= predicted.keys()
            assert {name: span.nbytes for name, span in measured.items() if span.lane == COMM} == {
                name: span.nbytes for name, span in predicted.items() if span.lane == COMM
            }


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("ranks=3", "ranks=3: 2 ranks were recorded; describe the recorded call"),
        ("backward=false", "2 passes were recorded and 1 predicted"),
        ("cluster=a10", "a100"),
        ("tokens=128", "in the forward pass rank 0 sent 2,048 bytes in 1 exchanges, not 4,096 bytes in 1"),
        ("transport=gloo", "transport=gloo: has no effect with recorded="),
    ],
)
def test_a_prediction_of_another_call_than_the_recorded_one_is_refused(
    recordings: Path, option: str, message: str, capsys: Any
) -> None:
    call = [setting for setting in CALL if setting.split("=")[0] != option.split("=")[0]]
    assert main(["timeline", f"recorded={recordings}", "trace=", "picture=", *call, option]) == 2
    assert message in capsys.readouterr().err


def test_a_calibration_predicts_only_the_transport_that_it_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    monkeypatch.chdir(tmp_path)
    config = TimelineConfig(ranks=2, tokens=64, head_dim=8)

    def prediction() -> Prediction:
        return run_ranks(2, lambda ring: predict(ring, config))[0]

    assert prediction() == ([], "", NOT_CALIBRATED)
    write_calibration(tmp_path, "shm")
    passes, _, basis = prediction()
    assert passes == [] and "calibrated for shm, but messages use local; run `ringattn" in basis
    write_calibration(tmp_path, "local")
    passes, cluster, basis = prediction()
    plans = run_ranks(2, lambda ring: explanation_on(ring, config))[0].plans
    assert passes == [simulate(plan, CLUSTERS["cpu"]).spans for plan in plans]
    assert cluster == "this machine" and basis == (
        "for this machine, with the constants of its calibration: this machine"
    )


def test_the_plans_that_ran_are_predicted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # On a calibrated machine, a ring caches more blocks for backward and sends fewer messages.
    monkeypatch.chdir(tmp_path)
    config = TimelineConfig(ranks=2, tokens=64, head_dim=8, cluster="a100", warmup=0)
    calibration = replace(CLUSTERS["cpu"], name="this machine", calibrated=True)

    def body(ring: Ring) -> tuple[Track, Prediction]:
        return record_rank(ring, config), predict(ring, config)

    messages = set()
    for cluster in (None, calibration):
        results = run_ranks(2, body, cluster=cluster)
        tracks, prediction = [track for track, _ in results], results[0][1]
        assert not difference_of(tracks, prediction.passes)
        assert prediction.basis.startswith("with the constants of a preset")
        messages.add(tracks[0].passes[1].messages)
        if cluster is not None:
            write_calibration(tmp_path, "shm")
        # Recordings do not name the cluster for which their ring planned.
        assert predicted_spans(config, CLUSTERS["a100"], tracks) == prediction.passes
    assert len(messages) == 2


@pytest.mark.parametrize(
    ("arguments", "basis"),
    [
        ([], "predicted: none: recordings do not name their machine; give cluster="),
        (CALL, "predicted: with the constants of a preset, which were not measured on this machine: A100"),
        ([*CALL[:-1], "cluster=calibrated.json"], "predicted: with the constants of the calibration: this machine"),
    ],
)
def test_the_basis_of_a_prediction_is_printed(
    recordings: Path, tmp_path: Path, arguments: list[str], basis: str, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    write_calibration(tmp_path, "shm")
    assert main(["timeline", f"recorded={recordings}", "trace=", "picture=", *arguments]) == 0
    printed = capsys.readouterr().out
    assert basis in printed and "transport: local" in printed
    assert ("predicted ms" in printed) == bool(arguments)


def test_recordings_without_a_transport_can_be_read(recordings: Path, capsys: Any) -> None:
    for file in recordings.iterdir():
        content = json.loads(file.read_text())
        del content["transport"]
        file.write_text(json.dumps(content))
    assert main(["timeline", f"recorded={recordings}", "trace=", "picture="]) == 0
    assert "transport: not named in the recordings" in capsys.readouterr().out


def test_the_code_of_the_documentation_works(tmp_path: Path, capsys: Any) -> None:
    page = (Path(__file__).parents[2] / "docs" / "tracing.md").read_text()
    code = page.split("```python\n")[1].split("```")[0]
    names: dict[str, Any] = {"folder": tmp_path, "clock_offset": clock_offset}
    names |= {"Track": Track, "write_tracks": write_tracks}
    exec(code, names)

    def body(ring: Ring) -> None:
        seq = ring.sequence(40)
        q = torch.ones(1, seq.counts[ring.rank], 2, 8).requires_grad_()
        names["recorded"](ring, q, q, q, seq)

    run_ranks(2, body)
    assert capsys.readouterr().out.count("exposed, overlap") == 2
    assert main(["timeline", f"recorded={tmp_path}", "trace=", "picture="]) == 0


# --- traces in the trace event format --------------------------------------------------------------------------------


NUMBERS = (int, float)
CLOSE_US = 1e-3
"""The rounding error of a few additions of floats that count the microseconds since the start of a machine."""


def record(ranks: int, schedule: str = "ring", calls: int = 2) -> list[Track]:
    """Record a few small calls, forward and backward, on threads. Return the track of each rank."""

    def body(ring: Ring) -> Track:
        seq = ring.sequence(41, layout="zigzag")
        x = torch.ones(1, seq.counts[ring.rank], 4, 8).requires_grad_()
        with ring.recording() as recording:
            for _ in range(calls):
                ring.attention(x, x, x, seq, causal=True, schedule=schedule).sum().backward()
        return Track.of(recording, clock_offset(ring.transport.all_gather_bytes, ring.rank))

    return run_ranks(ranks, body)


def checked_events(trace: dict[str, Any]) -> list[dict[str, Any]]:
    """Check that the events have the format that viewers read, and return them."""
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
    for sent, received in flows.values():
        assert (sent["ph"], received["ph"], received["bp"]) == ("s", "f", "e")
        assert sent["ts"] <= received["ts"] and sent["pid"] != received["pid"]
        for event in (sent, received):
            slices = lanes[event["pid"], event["tid"]]
            assert any(began - CLOSE_US <= event["ts"] <= ended + CLOSE_US for began, ended in slices)
    return events


def names(events: Sequence[dict[str, Any]], what: str) -> dict[tuple[int, int], str]:
    return {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["ph"] == "M" and e["name"] == what}


@pytest.mark.parametrize("schedule", ["ring", "all_gather", "all_to_all"])
@pytest.mark.parametrize("ranks", [1, 4])
def test_a_trace_is_well_formed(ranks: int, schedule: str) -> None:
    tracks = record(ranks, schedule)
    trace = chrome_trace(tracks)
    events = checked_events(trace)
    assert names(events, "process_name") == {(rank, 0): f"rank {rank}" for rank in range(ranks)}
    threads = {(rank, thread): lane for rank in range(ranks) for lane, thread in LANES.items()}
    assert names(events, "thread_name") == threads
    slices = [e for e in events if e["ph"] == "X"]
    passes = [recorded for track in tracks for recorded in track.passes]
    spans = [span for recorded in passes for span in recorded.spans]
    assert len(slices) == len(spans) + 4 * ranks  # two calls, forward and backward
    assert {e["pid"] for e in slices} == set(range(ranks))
    assert min(e["ts"] for e in slices) == 0
    assert sum(e["ph"] == "s" for e in events) == sum(recorded.messages for recorded in passes)
    assert trace["otherData"]["overlap is"] == "measured"


def test_a_counter_shows_the_bytes_in_flight() -> None:
    tracks = record(3)
    counters = [e for e in checked_events(chrome_trace(tracks)) if e["ph"] == "C"]
    for track in tracks:
        values = [e["args"]["bytes"] for e in counters if e["pid"] == track.rank]
        assert sum(values) == sum(recorded.bytes_sent for recorded in track.passes) > 0
        assert values[1::2] == [0] * (len(values) // 2)


def test_predicted_ranks_are_separate_processes_of_a_trace() -> None:
    tracks = record(2, calls=1)
    predicted = (Span("step 0 attend", COMPUTE, 0.0, 50.0), Span("step 0 exchange", COMM, 5.0, 60.0, 128))
    trace = chrome_trace(tracks, [[predicted, predicted], [predicted, ()]], "a made-up machine")
    events = checked_events(trace)
    predicted_names = {2: "predicted rank 0", 3: "predicted rank 1"}
    assert {pid: name for (pid, _), name in names(events, "process_name").items() if pid > 1} == predicted_names
    first = [e for e in events if e["ph"] == "X" and e["pid"] == 2]
    steps = ["step 0 attend", "step 0 exchange"]
    assert [e["name"] for e in first] == ["predicted forward 0", *steps, "predicted backward 1", *steps]
    assert first[0]["dur"] == pytest.approx(60.0) and first[0]["ts"] == 0
    assert trace["otherData"]["predicted by"] == "a made-up machine"
    with pytest.raises(InputError, match="2 passes were recorded and 1 predicted"):
        chrome_trace(tracks, [[predicted, predicted]])


def test_ranks_must_have_recorded_the_same_passes() -> None:
    tracks = record(2, calls=1)
    with pytest.raises(InputError, match="rank 1 recorded 1 passes and rank 0 2"):
        chrome_trace([tracks[0], tracks[1]._replace(passes=tracks[1].passes[:1])])
    with pytest.raises(InputError, match=r"in order, got \[1, 0\]"):
        chrome_trace(tracks[::-1])


def test_a_track_survives_json() -> None:
    for track in record(2):
        assert Track.from_dict(json.loads(json.dumps(track.as_dict()))) == track


def test_without_arrival_times_the_overlap_is_an_upper_bound() -> None:
    forward = RecordedPass("forward", 0.0, 10.0, (Span("step 0 exchange", COMM, 0.0, 9.0),))
    trace = chrome_trace([Track(0, (forward,), arrivals_known=False, uncertainty_us=3.0)])
    assert trace["otherData"]["overlap is"] == "an upper bound"
    assert trace["otherData"]["clock uncertainty, us"] == 3.0


# --- clocks ----------------------------------------------------------------------------------------------------------


def measure_offsets(
    skews_s: Sequence[float], clocks: Sequence[str | None], delay_s: Callable[[int], float]
) -> list[Offset]:
    """Return the offsets that ranks measure if their clocks run ahead by `skews_s`.

    Each all-gather delays a rank by `delay_s(rank)`, once before all ranks have arrived and once after.
    """
    barrier = threading.Barrier(len(skews_s))
    payloads: list[bytes] = [b""] * len(skews_s)
    offsets: list[Offset] = [Offset(0.0, 0.0)] * len(skews_s)
    times = [0.0] * len(skews_s)

    def measure(rank: int) -> None:
        def all_gather(payload: bytes) -> list[bytes]:
            times[rank] += delay_s(rank)
            payloads[rank] = payload
            barrier.wait()
            arrived = max(times)
            gathered = list(payloads)
            barrier.wait()
            times[rank] = arrived + delay_s(rank)
            return gathered

        offsets[rank] = clock_offset(all_gather, rank, now=lambda: times[rank] + skews_s[rank], clock=clocks[rank])

    threads = [threading.Thread(target=measure, args=(rank,)) for rank in range(len(skews_s))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return offsets


@pytest.mark.parametrize("seed", range(5))
def test_the_error_of_an_offset_is_within_the_uncertainty(seed: int) -> None:
    draw = random.Random(seed)
    skews = [draw.uniform(-1000, 1000) for _ in range(4)]
    # One direction may take much longer than the other, as on a congested network.
    offsets = measure_offsets(skews, ["a", "b", "c", "d"], lambda rank: draw.uniform(1e-6, 1e-3 * (1 + rank)))
    assert offsets[0] == Offset(0.0, 0.0)
    for skew, offset in zip(skews[1:], offsets[1:], strict=True):
        reference_us = (skews[0] - skew) * 1e6
        assert abs(offset.offset_us - reference_us) <= offset.uncertainty_us + 1e-3
        assert 0 < offset.uncertainty_us <= 10_000


def test_ranks_of_one_host_share_their_clock() -> None:
    assert measure_offsets([5.0, 5.0, 7.0], ["a", "a", "b"], lambda rank: 1e-4)[:2] == [Offset(0.0, 0.0)] * 2
    assert all(track.uncertainty_us == 0.0 for track in record(2))


def test_an_offset_is_measured_if_clocks_with_the_same_id_differ() -> None:
    # Two containers of one host can have the same boot id, although one of them has its own time namespace.
    _, offset = measure_offsets([0.0, 3.0], ["a", "a"], lambda rank: 1e-4)
    assert offset.offset_us == pytest.approx(-3e6, abs=1e3)


def test_without_a_boot_id_the_host_name_identifies_the_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(*_: Any, **__: Any) -> str:
        raise FileNotFoundError

    monkeypatch.setattr(pictures_trace.Path, "read_text", missing)
    monkeypatch.setattr(pictures_trace.socket, "gethostname", lambda: "node7")
    assert pictures_trace.host_clock() == "node7"
