"""`ringattn simulate`: its table, its files and its refusals. The command does not need torch."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import matplotlib.pyplot as plt
import pytest

from ringattn.core.span import COMM, COMPUTE, Span
from ringattn.errors import InputError, UnsupportedError
from ringattn.launch.options import load_plain
from ringattn.launch.pictures.charts import curves_figure, point_figure, work_shares
from ringattn.launch.pictures.simulate import (
    TITLE_WIDTH,
    counts,
    factors,
    main,
    names_of,
    picture_title,
    shared_out,
    traced_ranks,
)
from ringattn.launch.pictures.simulation import SimulateConfig, Simulated, Simulator
from ringattn.planner.cluster import CLUSTERS
from ringattn.planner.simulate import Disturbance, duration
from tests.launch.commands import python

SMALL = ["heads=4", "kv_heads=2", "head_dim=64"]


def test_a_sweep_changes_from_plans_to_classes(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Few ranks are simulated by their plans, more ranks by classes. The strong and weak curves share a point."""
    run, simulated = Simulator.run, []
    monkeypatch.setattr(Simulator, "run", lambda self, *call: simulated.append(call[:2]) or run(self, *call))
    file, picture = tmp_path / "a.json", tmp_path / "a.png"
    assert main(["ranks=16,24", "tokens=24Ki", "scaling=both", *SMALL, f"json={file}", f"picture={picture}"]) == 0
    out = capsys.readouterr().out
    assert "strong scaling" in out and "weak scaling" in out
    assert out.count("by classes of ranks") == out.count("by the plan of each rank") == 2
    curves = json.loads(file.read_text())["curves"]
    assert [point["by"] for point in curves["strong"]] == ["plans", "classes"]
    assert [point["tokens"] for point in curves["weak"]] == [16384, 24576]
    assert curves["strong"][1]["total_s"] == curves["weak"][1]["total_s"]
    assert simulated == [(24576, 16), (24576, 24), (16384, 16)], "the point of both curves is simulated once"
    for point in curves["strong"]:
        assert point["total_s"] == pytest.approx(sum(times["total_s"] for times in point["passes"]))
        for times in point["passes"]:
            least, middle, most = times["busy_s"]
            assert 0 < least <= middle <= most <= times["total_s"]
    assert picture.stat().st_size > 10_000


def test_the_notes_report_tokens_that_are_rounded_up(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ranks=20", "tokens=10001", "backward=false", *SMALL]) == 0
    out = capsys.readouterr().out
    assert "10,040" in out and "tokens are rounded up: on 20 ranks 10,001 to 10,040, 0.3900% more" in out
    assert "forward   waiting " in out and "backward  work" not in out


def test_rounding_changes_the_time_by_at_most_a_row_per_shard() -> None:
    """The time of uneven shards is between the times of the next smaller and the next larger even shards."""
    simulator = Simulator(SimulateConfig(heads=4, kv_heads=2, head_dim=64), CLUSTERS["h100"])
    times = [simulator.run(tokens, 16).total_s for tokens in (32 * 250, 8011, 32 * 251)]
    assert times[0] <= times[1] <= times[2] * (1 + 1e-9)


def test_the_efficiency_of_ranks_that_share_processors_counts_the_processors() -> None:
    """Four ranks on two processors take twice as long as on four, with the same efficiency."""
    machines = replace(CLUSTERS["cpu"], cores=4, wire_cores=0.0)
    config = SimulateConfig(heads=4, kv_heads=2, head_dim=64)
    shares = [Simulator(config, replace(machines, cores=cores)).run(8192, 4) for cores in (4, 2)]
    assert shares[1].total_s > 1.9 * shares[0].total_s and shares[1].ideal_s == 2 * shares[0].ideal_s
    assert shares[1].efficiency == pytest.approx(shares[0].efficiency, rel=0.05)


def test_a_single_number_of_ranks_draws_a_timeline(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    picture = tmp_path / "a.png"
    options = ["ranks=20", "tokens=20Ki", "slow_rank=7:2", "jitter=0.1", "seed=3", f"picture={picture}", *SMALL]
    assert main(options) == 0
    assert picture.stat().st_size > 10_000
    capsys.readouterr()


def simulate_point(options: Sequence[str]) -> tuple[Simulator, Simulated, str]:
    """Simulate one number of ranks. Return the simulator, the point and the title of its picture."""
    config = load_plain([*options, *SMALL], SimulateConfig)
    slow_ranks = tuple((rank, factor) for (rank,), factor in factors("slow_rank", config.slow_rank, 1))
    slow_links = tuple((*pair, factor) for pair, factor in factors("slow_link", config.slow_link, 2))
    disturbance = Disturbance(slow_ranks, slow_links, config.jitter, config.seed)
    simulator = Simulator(config, CLUSTERS["h100"], disturbance)
    point = simulator.run(config.length, int(config.ranks), traced_ranks(int(config.ranks), disturbance))
    return simulator, point, picture_title(simulator, [point])


@pytest.mark.parametrize(
    ("options", "parts"),
    [
        ([], ["no stragglers, slow links or jitter"]),
        (["slow_rank=3:1.5", "slow_link=1-2:4", "jitter=0.05", "seed=7"],
         ["rank 3 computes 1.5 times as long", "messages between ranks 1 and 2 take 4 times as long",
          "jitter: computing takes up to 5 % longer, seed 7"]),
        (["slow_rank=3:1.5,4:2,5:3", "slow_link=1-2:4,2-3:5"],
         ["rank 3 computes 1.5 times as long, rank 4 computes 2 times as long and 1 more;",
          "messages between ranks 1 and 2 take 4 times as long, messages between ranks 2 and 3 take 5 times"]),
    ],
)  # fmt: skip
def test_the_title_of_the_picture_names_the_call_and_its_disturbances(options: list[str], parts: list[str]) -> None:
    simulator, point, title = simulate_point(["ranks=8", "tokens=8Ki", "backward=false", *options])
    assert "ring schedule, zigzag layout, on H100 SXM" in title
    assert "8,192 tokens on 8 ranks, 4 query and 2 K/V heads of 64, causal, bf16, forward\n" in title
    assert all(part in title.replace("\n", " ") for part in parts)
    assert max(map(len, title.splitlines())) <= TITLE_WIDTH
    figure = point_figure(point, title, names_of(simulator.disturbance))
    assert figure.get_suptitle() == title
    figure.canvas.draw()
    assert figure.bbox.x1 >= max(text.get_window_extent().x1 for text in figure.texts)
    plt.close(figure)


def test_the_timeline_of_a_layer_with_a_state_shows_all_of_its_steps() -> None:
    simulator, point, title = simulate_point(["layer=gated_delta_rule", "ranks=12", "tokens=8Ki", "key_dim=32"])
    assert title.startswith("gated_delta_rule layer, zigzag layout, on H100 SXM")
    assert "8,192 tokens on 12 ranks, 4 states of 32 x 64, 2 key heads, 4 taps, bf16, forward and backward" in title
    figure = point_figure(point, title, names_of(simulator.disturbance))
    for axes, times in zip(figure.axes[2:4], point.passes, strict=True):
        assert axes.get_title(loc="left") == "its steps"
        assert axes.get_xlim()[1] >= times.total_s * 1e3
    plt.close(figure)


def test_a_layer_with_a_state_prints_its_own_notes_and_bytes(capsys: pytest.CaptureFixture[str]) -> None:
    """Rank 0 sends its state of 4 heads of 64 x 64 numbers in float32, and 3 rows of 512 channels in bfloat16."""
    options = ["layer=selective_state", "ranks=2", "tokens=8Ki", "layout=contiguous", "backward=false"]
    assert main([*options, *SMALL]) == 0
    out = capsys.readouterr().out
    assert "the time of the layer in one process, divided evenly over the ranks" in out
    assert "at the rate of the attention kernel, and its tensors at the rate of copies; not measured" in out
    sent = next(line for line in out.splitlines() if "MiB sent" in line)
    assert sent.split()[-1] == f"{(4 * 64 * 64 * 4 + 3 * 512 * 2) / 2**20:.1f}" == "0.1"


def test_the_timeline_shows_disturbed_ranks_and_one_scale_of_time() -> None:
    simulator, point, title = simulate_point(["ranks=20", "tokens=20Ki", "slow_rank=7:2,9:3", "slow_link=11-12:4"])
    figure = point_figure(point, title, names_of(simulator.disturbance))
    figure.canvas.draw()
    panels = figure.axes[:4]  # the whole time of each of two passes, and below it its first steps
    labels = [label.get_text() for label in panels[0].get_yticklabels()]
    assert labels == ["rank 0", "rank 5", "rank 7, slow ×2", "rank 9, slow ×3", "rank 10", "rank 11, slow link",
                      "rank 12, slow link", "rank 15", "rank 19"]  # fmt: skip
    for row in (panels[:2], panels[2:]):
        scales = [axes.get_xlim()[1] / axes.get_window_extent().width for axes in row]
        assert scales[0] == pytest.approx(scales[1], rel=0.01)
    for axes, times in zip(panels[:2], point.passes, strict=True):
        assert axes.get_xlim()[1] >= times.total_s * 1e3
    plt.close(figure)


def test_axes_of_short_and_long_calls_are_readable() -> None:
    """A curve within a power of ten has several ticks, and the axis of a call of minutes counts seconds."""
    simulator = Simulator(SimulateConfig(schedule="all_gather", backward=False), CLUSTERS["cpu"])
    points = [simulator.run(8192, ranks) for ranks in (2, 4)]
    figure = curves_figure({"strong": points}, picture_title(simulator, points))
    figure.canvas.draw()
    low, high = figure.axes[0].get_ylim()
    assert high < 10 * low and sum(low <= tick <= high for tick in figure.axes[0].get_yticks()) >= 3
    assert [text.get_text() for text in figure.legends[0].get_texts()][1:] == ["simulated by the plan of each rank"]
    plt.close(figure)
    long = simulator.run(131072, 2, [0, 1])
    assert long.total_s > 60
    figure = point_figure(long, "title", {})
    figure.canvas.draw()
    above, below = figure.axes[:2]
    assert above.get_xlabel() == below.get_xlabel() == "s"
    last = float(above.get_xticklabels()[-1].get_text().replace(",", ""))
    assert last == pytest.approx(above.get_xticks()[-1] / 1e3) and last > 10
    assert above.get_title(loc="left") == f"forward, {duration(long.total_s)}"
    plt.close(figure)


def test_the_curves_show_every_measure() -> None:
    """Each measure has a panel with its values. The legend says how the points were simulated."""
    simulator = Simulator(SimulateConfig(heads=4, kv_heads=2, head_dim=64), CLUSTERS["h100"])
    points = [simulator.run(24576, ranks) for ranks in (1, 16, 24)]
    figure = curves_figure({"strong": points}, picture_title(simulator, points))
    panels = {axes.get_title(loc="left"): axes for axes in figure.axes}
    shown = {title: list(axes.get_lines()[0].get_ydata()) for title, axes in panels.items()}
    assert shown["time of a call"] == [point.total_s for point in points]
    assert shown["efficiency"] == [100 * point.efficiency for point in points]
    for title, name, unit in (("waiting, largest value of any rank", "waiting_s", 100),
                              ("exposed messages, largest value of any rank", "exposed_s", 100)):  # fmt: skip
        assert shown[title] == pytest.approx(
            [unit * sum(getattr(times, name).max() for times in point.passes) / point.total_s for point in points]
        )
    sent = shown["sent, largest value of any rank"]
    assert math.isnan(sent[0]) and sent[1:] == [
        sum(times.sent_bytes.max() for times in point.passes) / 2**30 for point in points[1:]
    ]
    buffers = shown["staging buffers, largest value of any rank"]
    assert math.isnan(buffers[0]) and buffers[1:] == [point.held_bytes[2] / 2**30 for point in points[1:]]
    assert "24,576 tokens on up to 24 ranks" in figure.get_suptitle()
    assert [text.get_text() for text in figure.legends[0].get_texts()] == [
        "strong scaling", "simulated by classes of ranks", "simulated by the plan of each rank"
    ]  # fmt: skip
    plt.close(figure)


def test_shares_of_work() -> None:
    spans = [Span("step 0 attend", COMPUTE, 0.0, 4.0), Span("step 0 exchange", COMM, 0.0, 6.0),
             Span("step 1 attend", COMPUTE, 6.0, 8.0)]  # fmt: skip
    assert work_shares(spans, 8.0, 4).tolist() == pytest.approx([1.0, 1.0, 0.0, 1.0])
    assert work_shares(spans, 8.0, 2).tolist() == pytest.approx([1.0, 0.5])


def test_options_are_parsed_or_refused() -> None:
    assert counts("64,1,8,8") == [1, 8, 64]
    assert factors("slow_rank", "3:1.5,9:2", 1) == [((3,), 1.5), ((9,), 2.0)]
    assert factors("slow_link", "[7-8:4]", 2) == [((7, 8), 4.0)]
    assert traced_ranks(4, Disturbance(((2, 1.5),))) == [0, 1, 2, 3]
    assert shared_out(1000, [1, 3, 10], weak=True) == [100, 300, 1000]
    for wrong, message in ((lambda: counts("8,0"), "ranks=8,0: give numbers from 1 to 16,384"),
                        (lambda: counts("16385"), "ranks=16385"), (lambda: counts("a"), "ranks=a"),
                        (lambda: factors("slow_rank", "3", 1), "slow_rank=3: write 3:1.5"),
                        (lambda: factors("slow_link", "3:2", 2), "slow_link=3:2: write 7-8:4"),
                        (lambda: shared_out(3, [1, 8], True), "ranks=8: 8 ranks are more than tokens=3"),
                        (lambda: shared_out(3, [1, 8], False), "ranks=8: 8 ranks are more than tokens=3")):  # fmt: skip
        with pytest.raises(InputError, match=message):
            wrong()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            ["schedule=ulysses", "ranks=128"],
            "schedule='ulysses' is simulated with a plan for each rank, up to 64",
        ),
        (
            ["schedule=ulysses", "ranks=4096"],
            "of 32 heads at most 32 ranks have work; use schedule='ulysses_ring'",
        ),
        (["cluster=cpu", "ranks=128"], "whose ranks share processors, is simulated with a plan for each rank"),
        (["window=[100,-1]", "layout=striped", "ranks=128"], "layout='striped' with a window"),
        (["window=[8191,-1]", "causal=false", "ranks=128"], "a window that is bounded on both sides"),
        (["window=[100000,-1]", "ranks=128"], "the window reaches 98 shards"),
        (["layer=selective_state", "ranks=2048"], "is simulated with a plan for each rank, up to 1,024"),
        (["layer=selective_state", "ranks=4", "layout=striped"], "a layer with a state needs contiguous tokens"),
    ],
)
def test_unsupported_calls_are_refused(options: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(UnsupportedError, match=message):
        main(options)
    assert "efficiency" not in capsys.readouterr().out, "a table without rows has no heading"


def test_true_and_false_are_parsed_as_booleans() -> None:
    for option, expected in (("causal=false", False), ("causal=True", True)):
        assert load_plain([option], SimulateConfig).causal is expected
    with pytest.raises(InputError, match="causal=no: should be true or false"):
        load_plain(["causal=no"], SimulateConfig)


def test_a_rank_outside_the_ring_is_refused() -> None:
    with pytest.raises(InputError, match="there is no rank 8, with ranks 0 to 7"):
        main(["ranks=8", "slow_rank=8:2"])


def test_the_command_runs_without_torch() -> None:
    code = ("import sys; from ringattn.cli import main; sys.modules['torch'] = sys.modules['hydra'] = None; "
            "raise SystemExit(main(['simulate', 'ranks=2', 'tokens=64', 'heads=2', 'kv_heads=2']))")  # fmt: skip
    done = python("-c", code)
    assert done.returncode == 0, done.stderr
    assert "simulated in" in done.stdout
