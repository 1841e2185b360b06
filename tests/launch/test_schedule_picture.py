"""The pictures of a schedule and of dilated branches: boxes, arrows, numbers and rows are those of the schedule."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import takewhile
from pathlib import Path
from typing import Any

import matplotlib.image
import matplotlib.pyplot as plt
import numpy as np
import pytest
from matplotlib.colors import to_hex, to_rgb
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch

from ringattn.cli import main
from ringattn.core.dilation import Dilated
from ringattn.core.layout import make_layout
from ringattn.core.problem import Problem
from ringattn.errors import InputError
from ringattn.explain import Explanation
from ringattn.launch.pictures import charts, show
from ringattn.launch.pictures.charts import (
    TRAVELS,
    bin_width,
    branches_of,
    draw_rows,
    drawn_rows,
    label_of,
    schedule_figure,
)
from ringattn.launch.pictures.charts import (
    rows_of as rows_of_branch,
)
from ringattn.launch.pictures.show import ExplainConfig, explanation_of
from ringattn.schedule.ops import Merge, Schedule
from ringattn.schedule.routes import ROUTES
from ringattn.schedule.text import idle_steps, spans
from tests.core.dilated_reference import coverage
from tests.schedules import NEWER

PICTURES = [
    pytest.param((name, ranks), marks=pytest.mark.slow if name in NEWER and ranks == 2 else (), id=f"{name}-{ranks}")
    for name in ROUTES
    for ranks in (2, 4)
]


@pytest.fixture(scope="module", params=PICTURES)
def explained(request: pytest.FixtureRequest) -> Iterator[tuple[Explanation, Figure]]:
    name, ranks = request.param
    segments = {"segment_lengths": [64, 256], "dilation_rates": [1, 4], "causal": False, "kv_heads": 8}
    more = segments if name == "sub_rings" else {}
    explanation = explanation_of(ExplainConfig(ranks=ranks, tokens=256, schedule=name, head_dim=8, **more))
    figure = schedule_figure(explanation)
    yield explanation, figure
    plt.close(figure)


def passes(explanation: Explanation) -> list[Schedule]:
    assert explanation.backward is not None
    return [explanation.forward, explanation.backward]


def rows_of(table: str) -> list[list[str]]:
    """Return the tables of steps in a text, one per pass. A row has the number of the step and one cell per rank."""
    lines = table.splitlines()
    heads = [number for number, line in enumerate(lines) if line.startswith("step  ")]
    tables = []
    for head in heads:
        starts = [0, *(gap.end() for gap in re.finditer(r"-  (?=-)", lines[head + 1]))]
        rows = list(takewhile(str.strip, lines[head + 2 :]))
        ends = [*starts[1:], None]
        tables.append([[row[start:end].strip() for start, end in zip(starts, ends, strict=True)] for row in rows])
    return tables


def test_the_table_has_the_step_numbers_of_the_plans(explained: tuple[Explanation, Figure]) -> None:
    """The table uses the plans' step numbers, so that a number in an error or a recording can be looked up in it."""
    explanation, _ = explained
    tables = rows_of(str(explanation))
    assert len(tables) == 2
    for schedule, rows, plans in zip(passes(explanation), tables, explanation.plans, strict=True):
        planned = {(step.number, plan.rank) for plan in plans for step in plan.steps}
        # A rank that only receives in a step has this step in its plan, but an empty cell.
        cells = {(int(row[0]), rank) for row in rows for rank, cell in enumerate(row[1:]) if cell != "-"}
        assert cells <= planned and {number for number, _ in planned} == {number for number, _ in cells}
        # The line above the table names the steps without a row.
        idle = set(range(len(schedule.steps))) - {number for number, _ in planned}
        remark = idle_steps(schedule)
        assert bool(remark) == bool(idle) and remark.endswith(spans(idle))
        assert not remark or f" ({remark})\nstep  " in str(explanation)


def test_the_picture_numbers_its_rows_and_has_every_operation(explained: tuple[Explanation, Figure]) -> None:
    """Idle steps have no row. A step that only merges is drawn in the row of the next step, or at the end."""
    explanation, figure = explained
    for ax, schedule in zip(figure.axes, passes(explanation), strict=True):
        rows = drawn_rows(schedule)
        names = [label.get_text() for label in ax.get_yticklabels()]
        assert len(names) == len(rows)
        assert names[:-1] == [f"step {y}" for y in range(len(rows) - 1)] and names[-1] in (
            "end",
            f"step {len(rows) - 1}",
        )
        operations = [
            [part for step in steps for part in (*step.copies, *step.work)] for steps in (rows, schedule.steps)
        ]
        assert len(operations[0]) == len(operations[1])
        assert all(step.copies or not all(isinstance(item, Merge) for item in step.work) for step in rows[:-1])
        boxes = {(round(text.get_position()[1]), round(text.get_position()[0])) for text in ax.texts}
        busy = [{item.rank for item in step.work} | {copy.src for copy in step.copies} for step in rows]
        assert boxes == {(y, rank) for y, ranks in enumerate(busy) for rank in ranks}


def test_a_box_of_half_a_local_block_is_labelled_as_a_part() -> None:
    figure = schedule_figure(explanation_of(ExplainConfig(ranks=4, tokens=256, schedule="ring", head_dim=8)))
    parts = [[text.get_text() for text in ax.texts if "part of" in text.get_text()] for ax in figure.axes]
    assert not parts[0]
    assert parts[1] == [f"part of KV{rank}" for rank in range(4)] + [
        f"part of KV{rank}\n+ dKV{(rank - 1) % 4}" for rank in range(4)
    ]
    plt.close(figure)


def test_every_box_has_a_label(explained: tuple[Explanation, Figure]) -> None:
    explanation, figure = explained
    for ax, schedule in zip(figure.axes, passes(explanation), strict=True):
        busy = sum(len({item.rank for item in step.work} | {copy.src for copy in step.copies})
                   for step in drawn_rows(schedule))  # fmt: skip
        assert len([patch for patch in ax.patches if isinstance(patch, FancyBboxPatch)]) == busy == len(ax.texts)
        assert all(text.get_text() for text in ax.texts)


def test_the_legend_names_the_colors_of_the_arrows(explained: tuple[Explanation, Figure]) -> None:
    explanation, figure = explained
    all_kinds = set()
    for ax, schedule in zip(figure.axes, passes(explanation), strict=True):
        kinds = [copy.block.kind for step in schedule.steps for copy in step.copies]
        colors = [to_hex(patch.get_edgecolor()) for patch in ax.patches if isinstance(patch, FancyArrowPatch)]
        assert sorted(colors) == sorted(TRAVELS[kind][0] for kind in kinds)
        all_kinds |= set(kinds)
    legend = figure.legends[0] if figure.legends else figure.axes[0].get_legend()
    entries = {text.get_text() for text in legend.get_texts()}
    arrows = {entry for entry in entries if not entry.startswith("box")}
    assert arrows == {f"arrow: {TRAVELS[kind][1]}" for kind in all_kinds}


def test_labels_fit_into_their_boxes(explained: tuple[Explanation, Figure]) -> None:
    _, figure = explained
    figure.canvas.draw()
    for ax in figure.axes:
        boxes = [patch.get_window_extent() for patch in ax.patches if isinstance(patch, FancyBboxPatch)]
        for text, box in zip(ax.texts, boxes, strict=True):
            label = text.get_window_extent()
            assert box.x0 <= label.x0 and label.x1 <= box.x1, text.get_text()
            assert box.y0 <= label.y0 and label.y1 <= box.y1, text.get_text()


@pytest.mark.parametrize("ranks", [2, 8, 9, 64])
def test_labels_are_readable_on_the_color_of_every_owner(ranks: int) -> None:
    """WCAG 2 requires a contrast of at least 4.5 for text."""

    def luminance(color: Any) -> float:
        parts = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in to_rgb(color)]
        return sum(weight * part for weight, part in zip((0.2126, 0.7152, 0.0722), parts, strict=True))

    ink = luminance(charts.INK)
    assert min((luminance(charts._color(owner, ranks)) + 0.05) / (ink + 0.05) for owner in range(ranks)) > 4.5


def test_labels_name_the_attended_and_the_merged_blocks(explained: tuple[Explanation, Figure]) -> None:
    explanation, _ = explained
    for schedule in passes(explanation):
        for step in schedule.steps:
            for rank in range(explanation.problem.world_size):
                work = [item for item in step.work if item.rank == rank]
                label = " ".join(label_of(work))
                names = {"OUT": "OUT", "DQ": "dQ", "DKV": "dKV"}
                for item in work:
                    if isinstance(item, Merge):
                        assert f"+ {names[item.into.kind]}" in label
                    else:
                        assert f"KV{item.kv.owner}" in label or "–" in label or "," in label
                        assert item.q.ring is None or "×" in label
                if not work:
                    assert label == "only sends"


@pytest.mark.parametrize(
    ("numbers", "text"), [([0], "0"), ([0, 1], "0,1"), ([3, 1, 2, 0], "0–3"), ([0, 1, 2, 5], "0–2,5"), ([1, 3], "1,3")]
)
def test_consecutive_numbers_are_printed_as_ranges(numbers: list[int], text: str) -> None:
    assert spans(numbers) == text


@pytest.mark.parametrize("rates", [(1, 4, 8), (1, 12), (3, 20), (1, 7, 49), (1, 1000)])
def test_rows_of_a_rate_have_equal_distances_in_the_picture(rates: tuple[int, ...]) -> None:
    """The bins of the picture that contain rows of a rate have equal distances."""
    layout = make_layout("contiguous", 9000, 2)
    mask = Dilated((500, 9000, 9000)[: len(rates)], rates).mask(9000, 9000, None, None, 1, 1)
    width = bin_width(Problem(layout, layout, mask, 1, 1, 1, 8, 8, "float32"))
    assert 9000 / width <= 1024
    for rate in rates:
        bins = np.unique(np.arange(0, 9000, rate) // width)
        assert len(set(np.diff(bins))) == 1


def test_bins_are_drawn_with_whole_pixels(tmp_path: Path) -> None:
    config = ExplainConfig(ranks=2, tokens=600, causal=False, segment_lengths=[100, 600], dilation_rates=[1, 8])
    draw_rows(explanation_of(config), tmp_path / "rows.png")
    image = matplotlib.image.imread(tmp_path / "rows.png")[:, :, :3]
    blue = (np.abs(image - to_rgb("#1f77b4")).max(2) < 0.02).astype(int)
    gaps = [np.diff(np.flatnonzero(np.diff(line) == 1)) for line in blue]
    striped = [line for line in gaps if len(line) > 20]  # every eighth of the 300 rows of the first rank
    assert striped and all(len(set(line.tolist())) == 1 for line in striped)


# --- rows of dilated branches ----------------------------------------------------------------------------------------


TOKENS, RANKS, HEADS = 61, 3, 4
BRANCHES = ((8, 30, 61), (1, 3, 4))


@pytest.mark.parametrize("head", range(HEADS))
@pytest.mark.parametrize("layout_name", ["contiguous", "striped"])
def test_drawn_rows_are_those_of_the_dense_reference(layout_name: str, head: int) -> None:
    layout = make_layout(layout_name, TOKENS, RANKS)
    mask = Dilated(*BRANCHES).mask(TOKENS, TOKENS, None, None, HEADS, HEADS)
    problem = Problem(layout, layout, mask, 1, HEADS, HEADS, 8, 8, "float32")
    kept_by_branch = coverage(TOKENS, HEADS, HEADS, *BRANCHES).numpy()[:, head]
    owner = np.empty(TOKENS, np.int64)
    for rank in range(RANKS):
        owner[layout.positions(rank)] = rank
    for width, kept, branch in zip(BRANCHES[0], kept_by_branch, branches_of(problem, head), strict=True):
        segments = np.arange(TOKENS) // width
        attends = kept[:, None] & kept[None, :] & (segments[:, None] == segments)
        for rank in range(RANKS):
            read, sent = rows_of_branch(problem, branch, rank)
            assert np.array_equal(read, np.where(attends[owner == rank].any(0), owner + 1, 0))
            assert np.array_equal(sent > 0, attends[owner != rank].any(0) & (owner == rank))


DILATED = ["ranks=4", "tokens=1024", "causal=false", "heads=4", "kv_heads=4", "segment_lengths=[128,512,1024]",
         "dilation_rates=[1,4,8]"]  # fmt: skip


@pytest.mark.slow
def test_the_command_draws_the_rows_of_branches(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", *DILATED, f"rows_picture={tmp_path / 'rows.png'}"]) == 0
    image = matplotlib.image.imread(tmp_path / "rows.png")
    assert image.shape[0] > 500 and len(np.unique(image.reshape(-1, image.shape[2]), axis=0)) > 20
    # The rows of K and of V that are sent: 512 of the branch with r = 4 cross one of two borders of ranks, and 64 of
    # the branch with r = 8 reach three ranks. Each row has 4 heads with head_dim 128.
    line = "forward sends 1.05MB in total; a full ring 6.29MB (6 times), an all-gather of the sparse rows 2.36MB"
    assert line in capsys.readouterr().out


def test_a_picture_of_rows_without_branches_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="give segment_lengths= and dilation_rates="):
        show.main(["tokens=64", f"rows_picture={tmp_path / 'rows.png'}"])


@pytest.mark.slow
def test_traffic_of_one_million_tokens_on_8_ranks() -> None:
    """A full ring sends 299 times the bytes of the chosen schedule, and LongNet's all-gather 4.08 times."""
    powers = [1 << i for i in range(10)]
    config = ExplainConfig(
        ranks=8, tokens=1 << 20, causal=False, heads=12, kv_heads=12, head_dim=64, backward=False,
        segment_lengths=[2048 * power for power in powers], dilation_rates=powers,
    )  # fmt: skip
    explanation = explanation_of(config)
    assert explanation.forward.name == "all_gather" and set(explanation.bytes_sent) == {9_437_184}
    assert "(299 times)" in str(explanation) and "all-gather of the sparse rows 308MB (4.08 times)" in str(explanation)
