"""`ringattn report` and `compare`: reading sweeps, series of points, figures, the written files, comparisons."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from html import unescape
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import matplotlib.image
import numpy as np
import pytest
from matplotlib.colors import to_rgb

from ringattn.cli import main
from ringattn.errors import InputError
from ringattn.launch.report import page as page_module
from ringattn.launch.report.page import COLORS, Line, charts_of, line_chart, metrics_of, page_of, simulated_panel
from ringattn.launch.report.points import LINES, SINGLE, STRONG, panels_of, read_sweep, scaling, series_of
from ringattn.launch.report.report import summary_of, title_of
from ringattn.launch.report.tables import BEST, UNKNOWN, Table, results, shared_options
from tests.launch.sweep_records import ENVIRONMENT, Record, folder, grid, quiet, record, strong, weak

# --- reading ---------------------------------------------------------------------------------------------------------


def test_a_killed_sweep_is_read_up_to_its_unfinished_line(tmp_path: Path) -> None:
    path = folder(tmp_path, strong()) / "points.jsonl"
    path.write_text(path.read_text() + '{"hash": "abc", "stat')
    sweep = read_sweep(tmp_path)
    assert (len(sweep.points), sweep.unreadable, sweep.repeated) == (12, 1, 0)


def test_the_last_line_of_a_configuration_counts(tmp_path: Path) -> None:
    failed, done = record(2, 4096, status="error", message="lost"), record(2, 4096)
    sweep = read_sweep(folder(tmp_path, [failed, record(1, 4096), done]))
    assert (len(sweep.points), sweep.repeated, len(sweep.failed)) == (2, 1, 0)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "holds no points.jsonl"),
        ("", "none of its 0 lines is a point of a sweep"),
        ('{"hash": "a"}\n3\nx\n', "none of its 3 lines is a point of a sweep"),
        (b"\xff\xfe\n{}\n", "none of its 2 lines is a point of a sweep"),
    ],
)
def test_a_folder_without_points_is_an_error(
    tmp_path: Path, content: str | bytes | None, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    if content is not None:
        (tmp_path / "points.jsonl").write_bytes(content.encode() if isinstance(content, str) else content)
    assert main(["report", str(tmp_path)]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "report.html").exists()


def test_help_and_bad_arguments_of_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", "--help"]) == 0 and "usage: ringattn report DIR" in capsys.readouterr().out
    assert main(["report"]) == 2 and main(["report", "a", "b"]) == 2
    assert main(["report", str(tmp_path / "none")]) == 2
    assert "is not a folder; name the folder that `ringattn sweep` wrote" in capsys.readouterr().err


# --- series ----------------------------------------------------------------------------------------------------------


def lines_of(path: Path, records: list[Record]) -> dict[str, list[tuple[int, int]]]:
    """Return the points of each series as (ranks, tokens), by the view and the label of the series."""
    all_series = series_of(read_sweep(folder(path, records)))
    return {f"{s.view.name}: {s.label}": [(p.world_size, p.tokens) for p in s.points] for s in all_series}


def test_series_of_a_strong_sweep(tmp_path: Path) -> None:
    name = "strong: schedule {}, tokens 16,384"
    assert lines_of(tmp_path, strong()) == {
        name.format("all_gather"): [(1, 16384), (2, 16384), (4, 16384), (8, 16384)],  # the point of one rank is shared
        name.format("direct"): [(1, 16384), (2, 16384), (4, 16384)],  # eight ranks timed out
        name.format("ring"): [(1, 16384), (2, 16384), (4, 16384), (8, 16384)],
    }


def test_series_of_a_weak_sweep_and_of_lengths(tmp_path: Path) -> None:
    expected = [(1, 4096), (2, 8192), (4, 16384), (8, 32768)]
    assert lines_of(tmp_path, weak()) == {
        f"weak: layout {layout}, tokens per rank 4,096": expected for layout in ("contiguous", "zigzag")
    }
    records = [record(2, tokens) for tokens in (8192, 4096)]
    assert lines_of(tmp_path, records) == {"length: ranks 2": [(2, 4096), (2, 8192)]}


def test_a_weak_and_a_strong_series_can_share_a_point(tmp_path: Path) -> None:
    records = [record(1, 16384), record(2, 16384), record(4, 16384), record(1, 4096), record(2, 8192)]
    assert lines_of(tmp_path, records) == {
        "strong: tokens 16,384": [(1, 16384), (2, 16384), (4, 16384)],
        "weak: tokens per rank 4,096": [(1, 4096), (2, 8192), (4, 16384)],
    }


def test_all_series_of_a_grid_are_strong(tmp_path: Path) -> None:
    all_series = series_of(read_sweep(folder(tmp_path, grid())))
    assert {series.view for series in all_series} == {STRONG}
    assert [len(series.points) for series in all_series] == [5] * 40
    panels = panels_of(all_series)
    assert sum(len(panel.lines) for panel in panels) == 40
    assert len({panel.title for panel in panels}) == len(panels) == 10
    for panel in panels:
        assert len({name for name, _ in panel.lines}) == len(panel.lines) == 4


def test_lines_beyond_the_number_of_colors_go_to_further_panels(tmp_path: Path) -> None:
    records = [dict(record(p, 4096), hash=f"{p}-{n}") for n in range(15) for p in (1, 2)]
    for line, n in zip(records, [n for n in range(15) for _ in (1, 2)], strict=True):
        line["config"] = {**line["config"], "schedule": {"name": f"s{n}"}}
    panels = panels_of(series_of(read_sweep(folder(tmp_path, records))))
    assert [len(panel.lines) for panel in panels] == [LINES, LINES, 3]


def test_single_points_share_a_panel(tmp_path: Path) -> None:
    all_series = series_of(read_sweep(folder(tmp_path, [record(2, 4096), record(2, 4096, "direct")])))
    assert [series.view for series in all_series] == [SINGLE, SINGLE]
    assert [name for name, _ in panels_of(all_series)[0].lines] == ["schedule direct", "schedule ring"]


# --- figures ---------------------------------------------------------------------------------------------------------


def timed_record(line: Record, forward: float, backward: float, tflops: float | None) -> Record:
    """Return the record with these times of forward and backward in milliseconds and this rate in TFLOP/s."""
    times = {
        f"{name}_ms": {"median": ms, "p10": ms, "p90": ms, "samples": 3}
        for name, ms in (("forward", forward), ("backward", backward))
    }
    return {**line, **times, "pass_ms": {**times["forward_ms"], "median": forward + backward}, "tflops": tflops}


def test_strong_speed_up_is_a_ratio_of_times(tmp_path: Path) -> None:
    records = [timed_record(record(p, 4096), 100 / p + 5, 200 / p, None) for p in (2, 4, 8)]
    sweep = read_sweep(folder(tmp_path, records))
    points = scaling(sweep, series_of(sweep)[0])
    times = [155.0, 80.0, 42.5]
    assert [point and point.speed_up for point in points] == pytest.approx([2 * times[0] / t for t in times])
    assert [point and point.efficiency for point in points] == pytest.approx(
        [times[0] / t * 2 / p for t, p in zip(times, (2, 4, 8), strict=True)]
    )


def test_weak_speed_up_is_a_ratio_of_rates(tmp_path: Path) -> None:
    # Causal work grows with the square of the tokens, so p ranks of the same speed take p times as long as one rank.
    records = [timed_record(record(p, 1024 * p), 10.0 * p, 20.0 * p, 0.5 * p) for p in (1, 2, 4)]
    sweep = read_sweep(folder(tmp_path, records))
    points = scaling(sweep, series_of(sweep)[0])
    assert [point and point.efficiency for point in points] == pytest.approx([1.0, 1.0, 1.0])
    unknown = read_sweep(folder(tmp_path, records, lambda line: {**line, "tflops": None}))
    assert scaling(unknown, series_of(unknown)[0]) == [None, None, None]


def test_scaling_uses_only_forward_if_a_backward_time_is_missing(tmp_path: Path) -> None:
    records = [
        timed_record(record(1, 4096), 8.0, 90.0, None),
        {**timed_record(record(2, 4096), 4.0, 1.0, None), "backward_ms": None},
    ]
    sweep = read_sweep(folder(tmp_path, records))
    assert sweep.passes == ("forward",)
    points = scaling(sweep, series_of(sweep)[0])
    assert [point and point.speed_up for point in points] == [1.0, 2.0]


def test_results_mark_the_best_of_each_group_and_omit_unknown_columns(tmp_path: Path) -> None:
    sweep = read_sweep(folder(tmp_path, strong(), lambda line: quiet({**line, "overlap": None})))
    table = results(sweep)
    rows = [dict(zip(table.columns, row, strict=True)) for row in table.rows]
    assert [row["schedule"] for row in rows if row["best"] == BEST] == ["ring"] * 3
    assert {row["schedule"] for row in rows if row["ranks"] == "1"} == {"any"}
    assert [n for n, row in enumerate(rows) if row["best"]] == sorted(table.marked)
    assert "overlap" not in table.columns and "exposed ms" in table.columns
    assert rows[-1]["largest error"] == "6.0e-07"
    single = results(read_sweep(folder(tmp_path, [record(2, 4096)])))
    assert "best" not in single.columns and not single.marked


def test_no_point_is_marked_best_within_the_noise(tmp_path: Path) -> None:
    ring, direct = (
        timed_record(record(2, 4096), 10.0, 20.0, None),
        timed_record(record(2, 4096, "direct"), 11.0, 21.0, None),
    )

    def table_of(low: float, high: float) -> Table:
        for line, middle in ((ring, 30.0), (direct, 32.0)):
            line["pass_ms"] = {"median": middle, "p10": middle * low, "p90": middle * high, "samples": 10}
        return results(read_sweep(folder(tmp_path, [ring, direct])))

    assert table_of(0.99, 1.01).marked == {0}
    noisy = table_of(0.9, 1.1)
    assert not noisy.marked and "best" not in noisy.columns
    assert (
        "No point is marked as the fastest, because p10 to p90 of the two fastest points of each group overlap."
    ) in noisy.note
    one_rank = [
        timed_record(record(1, 4096, name), *times, None) for name, *times in (("ring", 9.0, 9.0), ("direct", 1.0, 2.0))
    ]
    assert not results(read_sweep(folder(tmp_path, one_rank))).marked  # on one rank both schedules do the same


def test_one_rank_is_the_baseline_of_every_schedule(tmp_path: Path) -> None:
    """If several points have one rank, the fastest of them is the baseline."""
    times = {(1, "ring"): 560.0, (1, "direct"): 298.0, (2, "ring"): 149.0, (2, "direct"): 298.0}
    records = [timed_record(record(p, 4096, name), ms, 0.0, None) for (p, name), ms in times.items()]
    sweep = read_sweep(folder(tmp_path, records))
    by_label = {series.label: series for series in series_of(sweep)}
    assert set(by_label) == {"schedule ring, tokens 4,096", "schedule direct, tokens 4,096"}
    points = {label: scaling(sweep, series) for label, series in by_label.items()}
    speed_ups = {label: [point and point.speed_up for point in scaled] for label, scaled in points.items()}
    assert speed_ups == {"schedule ring, tokens 4,096": [1.0, 2.0], "schedule direct, tokens 4,096": [1.0, 1.0]}


def test_tokens_per_second_use_the_time_of_the_whole_pass(tmp_path: Path) -> None:
    line = {**timed_record(record(2, 4096), 1000.0, 1100.0, None), "tokens_per_s": 4096 / 1.771}
    line["pass_ms"] = {"median": 1771.0, "p10": 1700.0, "p90": 1800.0, "samples": 10}  # not the sum of both medians
    sweep = read_sweep(folder(tmp_path, [line]))
    assert sweep.pass_ms(sweep.ok[0]) == 1771.0 and sweep.tokens_per_s(sweep.ok[0]) == pytest.approx(4096 / 1.771)


def test_an_upper_bound_of_the_overlap_is_labeled_at_most(tmp_path: Path) -> None:
    exact = read_sweep(folder(tmp_path, [{**record(2, 4096), "arrivals_known": True}]))
    assert "overlap" in results(exact).columns
    bound = read_sweep(folder(tmp_path, [{**record(2, 4096), "arrivals_known": False}]))
    assert "overlap, at most" in results(bound).columns
    note = metrics_of(bound)[-1].note  # names no transport, because a record may come from any
    assert "An upper bound" in note and not any(name in note for name in ("gloo", "shm", "nccl"))


def test_options_that_a_point_lacks_are_not_listed(tmp_path: Path) -> None:
    def windowed(line: Record) -> Record:
        return {**line, "config": {**line["config"], "window": None if line["world_size"] == 1 else [63, 0]}}

    sweep = read_sweep(folder(tmp_path, [record(1, 4096), record(2, 4096)], windowed))
    assert sweep.varying == ["window"]
    assert [sweep.option(point, "window") for point in sweep.points] == ["", "[63, 0]"]
    assert not {"window", "mask"} & {key for key, _ in shared_options(sweep)}


def test_bytes_and_waits_are_those_of_the_worst_rank(tmp_path: Path) -> None:
    uneven = {"bytes_sent": [2**20, 3 * 2**20], "exposed_ms": {"forward": [1.0, 2.0], "backward": [5.0, 1.5]}}
    table = results(read_sweep(folder(tmp_path, [{**record(2, 4096), **uneven}])))
    row = dict(zip(table.columns, table.rows[0], strict=True))
    assert (row["sent MiB"], row["exposed ms"]) == ("3", "6")


def test_charts_use_the_line_colors_and_the_text_color_of_the_page(tmp_path: Path) -> None:
    sweep = read_sweep(folder(tmp_path, strong()))
    (panel,) = panels_of(series_of(sweep))
    charts = {chart.title: chart for chart in charts_of(sweep, panel)}
    assert list(charts) == [
        "Speed-up", "Efficiency", "Throughput", "Time of a pass, and its prediction", "Prediction",
        "Exposed communication", "Memory of a rank", "Sent by a rank", "Overlap, at most",
    ]  # fmt: skip
    for chart in charts.values():
        assert all(color in chart.svg for color in COLORS[:3]) and COLORS[3] not in chart.svg
        assert "currentColor" in chart.svg and "0badf0" not in chart.svg
    for title in ("Time of a pass, and its prediction", "Prediction"):
        assert "Predictions are for: cpu-core (calibrated)." in charts[title].note


def test_charts_without_values_are_left_out(tmp_path: Path) -> None:
    missing = {"predicted": None, "exposed_ms": None, "peak_bytes": None, "pool_bytes": None, "overlap": None}
    sweep = read_sweep(folder(tmp_path, weak(), lambda line: {**line, **missing, "tflops": None, "bytes_sent": None}))
    titles = [chart.title for chart in charts_of(sweep, panels_of(series_of(sweep))[0])]
    assert titles == ["Throughput", "Time of a pass"]


def test_predictions_for_other_machines_are_noted_and_not_drawn(tmp_path: Path) -> None:
    def elsewhere(line: Record) -> Record:
        predicted = {"cluster": "H100", "calibrated": False, "forward_ms": 1e-4, "backward_ms": 2e-4}
        return {**line, "predicted": predicted if line["predicted"] else None}

    sweep = read_sweep(folder(tmp_path, strong(), elsewhere))
    charts = {chart.title: chart for chart in charts_of(sweep, panels_of(series_of(sweep))[0])}
    assert "Prediction" not in charts
    note = "Predictions are for: H100 (not calibrated)."
    assert f"{note} They are far from the measured times, so they are not drawn." in charts["Time of a pass"].note
    table = results(sweep)
    assert note in table.note and "0.0001" in table.rows[0]


def test_options_for_starting_ranks_do_not_split_series(tmp_path: Path) -> None:
    def started(line: Record) -> Record:
        nodes = line["world_size"] // 2 or 1
        start = {"nnodes": nodes, "rdzv_endpoint": f"node0:{nodes}", "threads_per_rank": nodes, "tokens_per_rank": 1}
        return {**line, "config": {**line["config"], **start}}

    sweep = read_sweep(folder(tmp_path, [record(p, 4096) for p in (1, 2, 4)], started))
    assert sweep.varying == [] and [len(series.points) for series in series_of(sweep)] == [3]


def slower(line: Record, factor: float, **options: Any) -> Record:
    """Return the record of another configuration, with `factor` times the time of a pass."""
    config = {**line["config"], **options}
    pass_ms = {key: value * factor for key, value in line["pass_ms"].items()}
    return {**line, "config": config, "hash": json.dumps(config), "pass_ms": pass_ms}


def test_a_swept_option_for_starting_ranks_splits_series(tmp_path: Path) -> None:
    """Points with other threads or nodes on the same ranks are in other series, each with its own speed-up."""
    worlds = 1, 2, 4
    threads = [slower(quiet(record(p, 4096)), 1 / n, threads_per_rank=n) for p in worlds for n in (2, 1)]
    nodes = [slower(quiet(record(p * n, 4096)), 4 ** (n - 1), ranks=p, nnodes=n) for p in worlds for n in (1, 2)]
    for option, records, starts in (("threads_per_rank", threads, (1, 1)), ("nnodes", nodes, (1, 0.25))):
        sweep = read_sweep(folder(tmp_path / option, records))
        every = series_of(sweep)
        assert sweep.varying == [option] and [series.key[option] for series in every] == ["1", "2"]
        assert {point.record["hash"] for series in every for point in series.points} == {r["hash"] for r in records}
        alone = quiet(record(1, 4096))["pass_ms"]["median"]
        for series, start in zip(every, starts, strict=True):
            for point, ratio in zip(series.points[1:], scaling(sweep, series)[1:], strict=True):
                expected = start * alone / quiet(record(point.world_size, 4096))["pass_ms"]["median"]
                assert ratio is not None and ratio.speed_up == pytest.approx(expected)
        table = results(sweep)
        assert option in table.columns and len(set(table.rows)) == 6 and "differ only in ." not in table.note


def test_the_second_environment_is_printed_as_differences_from_the_first(tmp_path: Path) -> None:
    second = {**ENVIRONMENT, "variables": {"OMP_NUM_THREADS": "2"}}
    folder(tmp_path, [record(1, 4096), {**record(2, 4096), "environment": "e2"}])
    (tmp_path / "environments.json").write_text(json.dumps({"e1": ENVIRONMENT, "e2": second}))
    assert main(["report", str(tmp_path)]) == 0
    markdown = (tmp_path / "report.md").read_text()
    assert "in 2 environments that differ in variables.OMP_NUM_THREADS." in markdown
    assert markdown.count("- python: 3.11.7") == 1 and "- variables.OMP_NUM_THREADS: 2" in markdown
    (tmp_path / "environments.json").unlink()
    assert main(["report", str(tmp_path)]) == 0
    (tmp_path / "environments.json").write_text("{")
    assert main(["report", str(tmp_path)]) == 2


def test_the_summary_names_a_dirty_commit(tmp_path: Path) -> None:
    sweep = read_sweep(folder(tmp_path, [record(1, 4096)], lambda line: {**line, "commit": "ab12cd34ef56-dirty"}))
    assert summary_of(sweep).endswith("commit ab12cd34ef56-dirty.")


# --- the report ------------------------------------------------------------------------------------------------------


def write_report(path: Path, records: list[Record]) -> tuple[str, str]:
    """Run the command, and return the Markdown and the HTML."""
    assert main(["report", str(folder(path, records))]) == 0
    return (path / "report.md").read_text(), (path / "report.html").read_text()


def test_the_contents_of_a_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(folder(tmp_path, strong(), quiet))]) == 0
    markdown, page = ((tmp_path / f"report.{kind}").read_text() for kind in ("md", "html"))
    printed = capsys.readouterr().out
    for text in (markdown, page, printed):
        assert "12 points: 10 with results, 2 without results. Run 2026-11-21, commit ab12cd34ef56." in text
        assert "timeout" in text and "8 ranks did not end within 60 s" in text
        assert "Predictions are for: cpu-core (calibrated)" in text
    for text in (markdown, page):
        assert "ringattn run ranks=8 tokens=16384 schedule=ring layout=zigzag dtype=float32" in text
        assert "OMP_NUM_THREADS" in text
    assert "| ★ | ring | 16,384 | 8 |" in markdown
    assert "1.25 GiB \\| choose schedule=ring" in markdown  # the bar of the message is escaped
    assert "&lt;slots&gt;" in page and "<slots>" not in page


def test_results_come_before_the_configuration(tmp_path: Path) -> None:
    """Charts and tables come first, on the page and in Markdown. Options, commands and environments follow."""
    markdown, page = write_report(tmp_path, strong())
    parts = ["</h1>", "<h2>Strong scaling", "<figure", "<h2>Results", "<h2>Scaling", "<h2>Points without results",
             "<h2>Configuration", ">Swept<", ">To repeat a point<", "<h2>Environment"]  # fmt: skip
    positions = [page.index(part) for part in parts]
    assert positions == sorted(positions)
    headings = re.findall(r"^## (.+)$", markdown, re.MULTILINE)
    assert headings == ["Results", "Scaling", "Points without results", "Swept", "The same in all points",
                        "Environment e1", "To repeat a point"]  # fmt: skip


@pytest.mark.parametrize(("values", "labels"), [((0.1, 1e8), {"1", "100", "10k", "1M", "100M"}),
                                                ((1500.0, 12000.0), {"2k", "5k", "10k"}),
                                                ((3.0, 700.0), {"10", "100"})])  # fmt: skip
def test_a_logarithmic_axis_has_labels_at_every_range(values: tuple[float, float], labels: set[str]) -> None:
    chart = line_chart("Time", "", "ranks", "s", [Line(0, (1, 4), values)], log_base=10)
    assert chart is not None
    texts = {text.strip() for text in re.findall(r"<text[^>]*>([^<]+)</text>", chart.svg)}
    assert labels <= texts


def test_a_report_of_failed_points_only(tmp_path: Path) -> None:
    markdown, page = write_report(tmp_path, [record(2, 4096, status="oom", message="no memory")])
    assert "1 point: 0 with results, 1 without" in markdown and "no memory" in page and "<figure" not in page


@pytest.mark.slow
def test_a_report_of_one_point_and_of_two_hundred(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, page = write_report(tmp_path / "one", [record(2, 4096)])
    assert "<figure" not in page and UNKNOWN not in results(read_sweep(tmp_path / "one")).rows[0]
    monkeypatch.setattr(page_module, "OPEN_PANELS", 1)
    monkeypatch.setattr(page_module, "DRAWN_PANELS", 3)
    _, page = write_report(tmp_path / "many", [quiet(line) for line in grid()])
    assert page.count("<figure") == 27 and page.count('<tr class="best">') == 40 and page.count("<tr") == 402
    assert "<summary>2 more panels</summary>" in page
    assert "7 more panels are not drawn; their points are in the tables." in page


class Links(HTMLParser):
    """A parser that collects the resources that a page would load."""

    def __init__(self) -> None:
        super().__init__()
        self.loaded: list[str] = []

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        for name, value in attributes:
            if name in ("src", "href", "xlink:href", "data", "srcset") and not (value or "").startswith(("#", "data:")):
                self.loaded.append(f"{tag} {value}")
        if tag in ("script", "iframe", "object"):
            self.loaded.append(tag)


def test_the_page_loads_no_other_file(tmp_path: Path) -> None:
    _, page = write_report(tmp_path, strong())
    links = Links()
    links.feed(page)
    assert links.loaded == []
    assert "@import" not in page and not re.search(r"url\((?!#)", page)


# --- simulations -----------------------------------------------------------------------------------------------------


def test_the_page_shows_the_simulations_in_the_folder_of_a_sweep(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sweep = read_sweep(folder(tmp_path, strong()))
    assert "<h2>Simulated</h2>" not in page_of(sweep, "title", "summary", print)
    options = ["ranks=1,2,4", "tokens=4Ki", "scaling=both", "heads=4", "kv_heads=2"]
    assert main(["simulate", *options, f"json={sweep.folder / 'simulated-h100.json'}"]) == 0
    page = page_of(sweep, "title", "summary", print)
    assert "<h2>Simulated</h2>" in page and "ring, 4,096 tokens, H100 SXM" in page
    panel = simulated_panel(sweep.folder / "simulated-h100.json")
    assert [name for name, _, _ in panel["legend"]] == ["strong scaling", "weak scaling"]
    assert len(panel["charts"]) == 3 and all(chart.svg in page for chart in panel["charts"])
    assert "slow_rank" not in panel["title"]
    assert (
        main(["simulate", *options, "slow_rank=0:2", "jitter=0.1", f"json={sweep.folder / 'simulated-slow.json'}"]) == 0
    )
    assert simulated_panel(sweep.folder / "simulated-slow.json")["title"].endswith(", slow_rank=0:2, jitter=0.1")
    assert main(["simulate", *options, "layer=selective_state", f"json={sweep.folder / 'simulated-layer.json'}"]) == 0
    title = simulated_panel(sweep.folder / "simulated-layer.json")["title"]
    assert title.startswith("selective_state layer, 4,096 tokens, H100 SXM")
    capsys.readouterr()


def test_a_file_without_a_simulation_is_an_error(tmp_path: Path) -> None:
    for text in ("[]", "{", '{"curves": {}}'):
        (tmp_path / "simulated.json").write_text(text)
        with pytest.raises(InputError, match=r"simulated\.json is not a simulation of this version"):
            simulated_panel(tmp_path / "simulated.json")


# --- comparisons -----------------------------------------------------------------------------------------------------


def run_compare(tmp_path: Path, before: list[Record], after: list[Record], *options: str) -> tuple[int, dict[str, Any]]:
    """Run the command, and return the exit code and the JSON."""
    paths = [str(folder(tmp_path / name, records)) for name, records in (("a", before), ("b", after))]
    code = main(["compare", *paths, *options, f"json={tmp_path / 'compared.json'}"])
    return code, json.loads((tmp_path / "compared.json").read_text())


def timed(ms: float, p10: float, p90: float) -> Record:
    """Return a record whose forward pass has this median and these percentiles in milliseconds."""
    return {**record(2, 4096), "forward_ms": {"median": ms, "p10": p10, "p90": p90, "samples": 10}}


def test_a_sweep_compared_with_itself_is_the_same(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, figures = run_compare(tmp_path, strong(), strong())
    assert code == 0
    assert figures["counts"] == {"worse": 0, "better": 0, "same": 10, "no results": 2}
    assert "12 points: 0 worse, 0 better, 10 the same, 2 without results on both sides" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("before", "after", "verdict"),
    [
        ((100, 99, 101), (104, 103, 105), "same"),  # within the threshold
        ((100, 99, 101), (106, 105, 107), "worse"),
        ((100, 99, 101), (94, 93, 95), "better"),
        ((100, 99, 101), (110, 104, 116), "same"),  # the spread after is 12
        ((100, 94, 106), (110, 109, 111), "same"),  # the spread before is 12
        ((100, 96, 104), (110, 107, 113), "worse"),  # 10 exceeds the spreads 8 and 6
        ((100, 99, 101), (105, 105, 105), "same"),  # exactly at the threshold
    ],
)
def test_a_change_beyond_threshold_and_spread_counts(
    tmp_path: Path, before: tuple[float, float, float], after: tuple[float, float, float], verdict: str
) -> None:
    code, figures = run_compare(tmp_path, [timed(*before)], [timed(*after)])
    assert figures["points"][0]["changes"]["forward_ms"]["verdict"] == verdict == figures["points"][0]["verdict"]
    assert code == (verdict == "worse")


def test_the_threshold_can_be_chosen(tmp_path: Path) -> None:
    before, after = [timed(100, 99, 101)], [timed(115, 114, 116)]
    assert run_compare(tmp_path, before, after)[0] == 1
    assert run_compare(tmp_path, before, after, "threshold=0.2")[0] == 0


@pytest.mark.parametrize("key", ["peak_bytes", "bytes_sent"])
def test_bytes_are_compared_on_the_rank_with_the_most(tmp_path: Path, key: str) -> None:
    before, after = ({**record(2, 4096), key: by_rank} for by_rank in ([100, 200], [200, 100]))
    assert run_compare(tmp_path, [before], [after])[0] == 0
    code, figures = run_compare(tmp_path, [before], [{**after, key: [220, 100]}])
    assert code == 1 and figures["points"][0]["changes"][key]["verdict"] == "worse"
    assert run_compare(tmp_path, [{**before, key: [0, 0]}], [{**after, key: [1, 0]}])[0] == 1


def test_worse_outweighs_better(tmp_path: Path) -> None:
    faster_and_larger = {**timed(50, 49, 51), "peak_bytes": [1 << 40, 1 << 40]}
    code, figures = run_compare(tmp_path, [timed(100, 99, 101)], [faster_and_larger])
    assert code == 1 and figures["points"][0]["verdict"] == "worse"


@pytest.mark.parametrize("status", ["oom", "error", "timeout"])
def test_a_point_that_lost_its_results_is_worse(
    tmp_path: Path, status: str, capsys: pytest.CaptureFixture[str]
) -> None:
    good, bad = record(2, 4096), record(2, 4096, status=status, message="why")
    code, figures = run_compare(tmp_path, [good], [bad])
    assert code == 1 and figures["points"][0]["status"] == ["ok", status]
    assert f"worse: ok → {status}" in capsys.readouterr().out
    code, figures = run_compare(tmp_path, [bad], [good])
    assert code == 0 and figures["counts"]["better"] == 1


def test_points_in_only_one_sweep_are_listed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shared, old, new = record(2, 4096), record(4, 4096), record(8, 4096)
    code, figures = run_compare(tmp_path, [shared, old], [shared, new])
    assert code == 0 and len(figures["points"]) == 1
    assert (figures["only_before"], figures["only_after"]) == ([old["hash"]], [new["hash"]])
    printed = capsys.readouterr().out
    assert f"only in {tmp_path / 'a'}: 4,096 tokens, 4 ranks, ok" in printed
    assert f"only in {tmp_path / 'b'}: 4,096 tokens, 8 ranks, ok" in printed


def test_compare_names_points_of_one_rank_as_report_does(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`compare` shows the schedule and layout of a point on one rank as "any", whatever the record contains."""
    shared = [record(1, 4096, "direct", "contiguous"), record(2, 4096, "ring")]
    old, new = record(1, 8192, "direct"), record(2, 8192, "direct")
    assert run_compare(tmp_path, [*shared, old], [*shared, new])[0] == 0
    printed = capsys.readouterr().out
    rows = [line.split() for line in printed.splitlines() if "4,096" in line]
    assert [(row.count("any"), row.count("direct"), row.count("ring")) for row in rows] == [(2, 0, 0), (0, 0, 1)]
    assert f"only in {tmp_path / 'a'}: schedule any, layout any, 8,192 tokens, 1 ranks" in printed
    assert f"only in {tmp_path / 'b'}: schedule direct, layout zigzag, 8,192 tokens, 2 ranks" in printed


def automatic(schedule: str, ranks: int = 4) -> Record:
    """Return the record of a call with schedule=auto that ran with `schedule`."""
    line = record(ranks, 4096)
    resolved = {"schedule": schedule, "layout": "zigzag", "engine": "aten", "transport": "gloo", "sm_margin": 0}
    return {**line, "config": {**line["config"], "schedule": "auto"}, "resolved": resolved}


def test_the_first_line_says_that_auto_chose_another_schedule(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, figures = run_compare(
        tmp_path, [automatic("ring"), automatic("ring", 2)], [automatic("all_gather"), automatic("ring", 2)]
    )
    printed = capsys.readouterr().out
    assert printed.startswith(
        "note: auto chose another schedule (ring before, all_gather after) in 1 of 2 points, so their times belong to "
        "different calls\n"
    )
    assert code == 0 and figures["notes"][0] in printed
    schedules = [resolved["schedule"] for resolved in figures["points"][-1]["resolved"]]
    assert schedules in (["ring", "all_gather"], ["ring", "ring"])
    run_compare(tmp_path, [automatic("ring")], [automatic("ring")])
    assert "auto chose" not in capsys.readouterr().out


def test_a_line_with_nan_is_unreadable(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = folder(tmp_path, [record(2, 4096), record(4, 4096)])
    lines = (path / "points.jsonl").read_text().splitlines()
    (path / "points.jsonl").write_text("\n".join([re.sub('"median": [0-9.]+', '"median": NaN', lines[0]), lines[1]]))
    assert main(["report", str(path)]) == 0
    assert "1 point: 1 with results; 1 lines could not be read" in capsys.readouterr().out


def test_tables_show_the_schedule_that_auto_chose(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = folder(tmp_path, [automatic("ring", 2), automatic("all_gather", 4)])
    assert main(["report", str(path)]) == 0
    assert re.findall(r"auto: (\w+)", capsys.readouterr().out) == ["ring", "all_gather"]
    page = (path / "report.html").read_text()
    assert "auto: all_gather, ring" in page and "auto: all_gather, ring" in (path / "report.md").read_text()


def test_compare_names_different_environments(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    paths = [folder(tmp_path / name, [record(2, 4096)]) for name in ("a", "b")]
    (paths[1] / "environments.json").write_text(json.dumps({"e2": {"torch": "2.12.0"}}))
    assert main(["compare", *map(str, paths)]) == 0
    assert "note: the environments differ in hardware, python, torch, variables.OMP" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["a"], "expected two folders, got a"),
        (["a", "b", "c"], "expected two folders, got a b c"),
        (["a", "none"], "none is not a folder"),
        (["a", "b", "treshold=0.1"], "did you mean threshold"),
        (["a", "b", "threshold=0"], "threshold=0.0: must be more than 0.0"),
        (["a", "c"], "a and c have no configuration in common"),
    ],
)
def test_bad_input_exits_with_2(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], message: str,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    for name, line in (("a", record(2, 4096)), ("b", record(2, 4096)), ("c", record(4, 4096))):
        folder(tmp_path / name, [line])
    assert main(["compare", *arguments]) == 2
    assert message in capsys.readouterr().err


# --- the page in a real browser --------------------------------------------------------------------------------------


CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
in_browser = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on the path")

MEASURE = """<script>addEventListener("load", () => {
  const box = (element) => { const r = element.getBoundingClientRect();
    return [r.left, r.top, r.right, r.bottom].map(Math.round) };
  const unscrolled = (element) => !element.closest(".scroll") || element.classList.contains("scroll");
  const beyond = (element) => element.getBoundingClientRect().right > innerWidth + 1;
  const wide = [...document.querySelectorAll("body *")]
    .filter((element) => unscrolled(element) && !element.closest("svg") && beyond(element))
    .map((element) => element.outerHTML.slice(0, 80));
  const texts = (svg) => [...svg.querySelectorAll("text")];
  const clipped = [...document.querySelectorAll("svg")].flatMap((svg) => texts(svg).filter((text) => {
    const t = text.getBoundingClientRect(), s = svg.getBoundingClientRect();
    return t.left < s.left - 1 || t.right > s.right + 1 || t.top < s.top - 1 || t.bottom > s.bottom + 1 })
    .map((text) => text.textContent));
  const page = document.documentElement;
  const results = {viewport: innerWidth, page: [page.scrollWidth, page.scrollHeight],
    charts: [...document.querySelectorAll("figure svg")].map(box), wide, clipped,
    broken: [...document.images].filter((image) => !image.naturalWidth).length,
    dark: matchMedia("(prefers-color-scheme: dark)").matches };
  parent.postMessage(JSON.stringify(results), "*") })</script>"""
# The page is in a frame, because Chromium's windows are at least 500 pixels wide and a frame can be narrower.
FRAME = """<!doctype html><meta name="color-scheme" content="light dark"><body style="margin: 0">
<pre id="measured" hidden></pre>
<script>addEventListener("message", (event) => {
  document.getElementById("measured").textContent = event.data })</script>
<iframe src="measured.html" style="border: 0; display: block; width: WIDTHpx; height: HEIGHTpx"></iframe>"""


def browse(page: Path, size: tuple[int, int], *flags: str) -> str:
    """Open a file in headless Chromium, in a window of `size` pixels, and return what Chromium prints."""
    assert CHROMIUM is not None
    profile = f"--user-data-dir={page.parent / 'profile'}"
    command = [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--disable-dev-shm-usage",
               "--force-device-scale-factor=1", profile, f"--window-size={size[0]},{size[1]}", *flags]  # fmt: skip
    done = subprocess.run([*command, page.as_uri()], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


def draw(path: Path, html: str, width: int, *flags: str) -> tuple[dict[str, Any], np.ndarray]:
    """Open the page in Chromium. Return the measurements of the script `MEASURE`, and a picture of the whole page.

    The picture is (height, width, 3), with values from 0 to 255.
    """
    (path / "measured.html").write_text(html.replace("</body>", f"{MEASURE}</body>"), encoding="utf-8")
    frame, shot = path / "frame.html", path / f"page-{width}.png"
    frame.write_text(FRAME.replace("WIDTH", str(width)).replace("HEIGHT", "800"), encoding="utf-8")
    match = re.search(r'<pre id="measured"[^>]*>(.+?)</pre>', browse(frame, (1280, 800), *flags, "--dump-dom"))
    assert match, "the page's script did not run"
    measured = json.loads(unescape(match[1]))
    height = measured["page"][1]
    frame.write_text(FRAME.replace("WIDTH", str(width)).replace("HEIGHT", str(height)), encoding="utf-8")
    browse(frame, (1280, height), *flags, f"--screenshot={shot}")
    return measured, np.round(matplotlib.image.imread(shot)[:, :width, :3] * 255).astype(int)


def count_pixels(picture: np.ndarray, box: list[int], color: tuple[float, ...]) -> int:
    """Return the number of pixels in the box that have this color, within rounding."""
    left, top, right, bottom = box
    return int((np.abs(picture[top:bottom, left:right] - np.array(color)).max(-1) <= 2).sum())


DARK = ("--force-dark-mode", "--blink-settings=preferredColorScheme=0")


@in_browser
@pytest.mark.slow
@pytest.mark.parametrize(("width", "flags", "brightness"), [(1280, (), 1.0), (400, DARK, 1.3)])
def test_the_page_fits_a_browser(tmp_path: Path, width: int, flags: tuple[str, ...], brightness: float) -> None:
    sweep = read_sweep(folder(tmp_path, strong()))
    html = page_of(sweep, title_of(sweep), summary_of(sweep), lambda line: None)
    measured, picture = draw(tmp_path, html, width, *flags)
    assert measured["viewport"] == width == measured["page"][0]
    assert measured["wide"] == [] and measured["clipped"] == []
    assert measured["broken"] == 0
    assert measured["dark"] == bool(flags)
    page, ink = ([20, 24, 29], [228, 233, 238]) if flags else ([255, 255, 255], [29, 39, 51])
    assert picture[2, 2].tolist() == page
    assert len(measured["charts"]) == 9
    series = [tuple(min(255, 255 * part * brightness) for part in to_rgb(color)) for color in COLORS[:3]]
    text_color = tuple(min(255, part * brightness) for part in ink)
    for box in measured["charts"]:
        assert (box[2] - box[0]) * (box[3] - box[1]) > 50_000
        counts = [count_pixels(picture, box, color) for color in series]
        # The line on top shows at least three markers of 4 x 4 pixels. Lines under it show parts of their markers.
        assert max(counts) > 48 and sum(count > 0 for count in counts) >= 2, counts
        assert count_pixels(picture, box, text_color) > 0  # the inside of a stroke of a letter or an axis
