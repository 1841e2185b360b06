"""The picture of a timeline: a row a rank, its work above its messages, what was predicted beneath, in milliseconds.

Each pass has a panel, as wide as it lasts. Where messages were under way and the rank computed nothing, the row is
hatched. Colors are Okabe and Ito's ("Color Universal Design", 2008), told apart by color-blind readers.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.patches import Patch

from ringattn.core.span import COMM, COMPUTE, Span, exposed
from ringattn.launch.outputs import save_picture
from ringattn.launch.pictures.trace import ByRank, Track

INK, QUIET, GRID = "#22303c", "#5b6b79", "#dfe4e8"
ATTEND, OTHER, MESSAGES, EXPOSED = "#0072B2", "#56B4E9", "#C9CED3", "#D55E00"
BAND = "#f4f6f8"
FAINT = 0.45
"""How strongly predicted bars are drawn."""
LEAST_SHARE = 0.2
"""Of the width, which the shortest pass gets at least."""
FEW_RANKS = 8
"""Up to so many, bars have room for the numbers of their steps."""


def draw_timeline(path: str | Path, tracks: Sequence[Track], predicted: Sequence[ByRank] = (), words: str = "") -> None:
    """Write a PNG. `predicted`: for each pass of the tracks, spans by rank; `words`: what predicted them."""
    ranks, passes = len(tracks), tracks[0].passes
    lasts = [max(track.passes[n].end_us - track.passes[n].start_us for track in tracks) for n in range(len(passes))]
    widths = [max(one / sum(lasts), LEAST_SHARE) for one in lasts]
    height = 2.1 + ranks * ((0.62 if predicted else 0.42) if ranks > FEW_RANKS else (0.95 if predicted else 0.65))
    figure, axes = plt.subplots(
        1, len(passes), figsize=(13, height), squeeze=False, width_ratios=widths, sharey=True, layout="constrained"
    )
    for number, ax in enumerate(axes[0]):
        begin = min(track.passes[number].start_us for track in tracks)
        ends = [0.0]
        for track in tracks:
            one = track.passes[number]
            later = one.start_us - begin
            foretold = predicted[number][track.rank] if predicted else ()
            _draw_rank(ax, track.rank, one.spans, later, foretold, numbered=ranks <= FEW_RANKS)
            ends += [one.end_us - begin, *(span.end_us for span in foretold)]
            ax.annotate(
                f"{one.exposed_us / 1e3:.2f} ms", (1.0, track.rank), xycoords=("axes fraction", "data"),
                xytext=(6, 0), textcoords="offset points", va="center", fontsize=8, color=EXPOSED,
            )  # fmt: skip
        _finish(ax, passes[number].name, max(ends) / 1e3, ranks)
    axes[0][0].set_yticks(range(ranks), [f"rank {track.rank}" for track in tracks])
    _describe(figure, tracks, bool(predicted), words)
    save_picture(figure, path, 150)
    plt.close(figure)


def _draw_rank(
    ax: Axes, rank: int, spans: Sequence[Span], later_us: float, foretold: Sequence[Span], numbered: bool
) -> None:
    """One row: measured, and what was predicted below it."""
    if rank % 2:
        ax.axhspan(rank - 0.5, rank + 0.5, color=BAND, zorder=0)
    if not foretold:
        _draw_spans(ax, spans, later_us, top=rank - 0.4, lane=0.4, strong=True, numbered=numbered)
        return
    _draw_spans(ax, spans, later_us, top=rank - 0.42, lane=0.25, strong=True, numbered=numbered)
    _draw_spans(ax, foretold, 0.0, top=rank + 0.14, lane=0.14, strong=False, numbered=False)


def _draw_spans(
    ax: Axes, spans: Sequence[Span], later_us: float, top: float, lane: float, strong: bool, numbered: bool
) -> None:
    """Work from `top` on, `lane` high, and messages below it."""
    alpha = 1.0 if strong else FAINT

    def bars(found: list[tuple[float, float]], y: float, color: str, hatch: str | None = None) -> None:
        ax.broken_barh(
            [((start + later_us) / 1e3, (end - start) / 1e3) for start, end in found], (y, lane * 0.94),
            facecolor=color, edgecolor="white", linewidth=0.4, alpha=alpha, hatch=hatch, zorder=2,
        )  # fmt: skip

    for attends, color in ((True, ATTEND), (False, OTHER)):
        work = (span for span in spans if span.lane == COMPUTE and span.name.endswith("attend") == attends)
        bars([(span.start_us, span.end_us) for span in work], top, color)
    bars([(span.start_us, span.end_us) for span in spans if span.lane == COMM], top + lane, MESSAGES)
    bars(exposed(spans), top + lane, EXPOSED, "//////")
    least_us = max((span.end_us for span in spans), default=0.0) / 30
    for span in spans:
        if numbered and span.name.endswith("attend") and span.end_us - span.start_us > least_us:
            middle = (span.start_us + span.end_us) / 2 + later_us
            ax.text(middle / 1e3, top + lane * 0.47, span.name.split()[1], ha="center", va="center", fontsize=8,
                    color="white", zorder=3)  # fmt: skip


def _finish(ax: Axes, title: str, last_ms: float, ranks: int) -> None:
    ax.set(xlim=(0, last_ms * 1.005 or 1.0), ylim=(ranks - 0.5, -0.5), xlabel="milliseconds from the pass's beginning")
    ax.set_title(title, loc="left", color=INK, fontsize=11)
    ax.annotate("exposed", (1.0, 1.0), xycoords="axes fraction", xytext=(6, 4), textcoords="offset points", fontsize=8,
                color=EXPOSED)  # fmt: skip
    ax.grid(axis="x", color=GRID, linewidth=0.8)
    ax.set_axisbelow(True)
    ax.tick_params(colors=INK, labelcolor=INK, length=0)
    ax.spines[["top", "right", "left"]].set_visible(False)


def _describe(figure: plt.Figure, tracks: Sequence[Track], predicted: bool, words: str) -> None:
    """Title and legend."""
    least = min(track.overlap for track in tracks)
    sign = "" if all(track.arrivals_known for track in tracks) else "at most "
    unsure_us = max(track.uncertainty_us for track in tracks)
    aligned = f"; clocks of the ranks agree within {unsure_us:.0f} us" if unsure_us else ""
    figure.suptitle(
        f"What {len(tracks)} ranks did, and when: {sign}{least:.1%} of the communication is hidden on the rank that "
        f"hides least{aligned}", x=0.01, ha="left", color=INK, fontsize=12.5,
    )  # fmt: skip
    handles = [
        Patch(facecolor=ATTEND, label="attention" + (", with its step" if len(tracks) <= FEW_RANKS else "")),
        Patch(facecolor=OTHER, label="packing, merging"),
        Patch(facecolor=MESSAGES, label="messages under way" + (", at most" if sign else "")),
        Patch(facecolor=EXPOSED, edgecolor="white", hatch="//////", label="exposed: messages, and nothing else"),
    ]
    if predicted:
        about = f"beneath, pale: predicted for {words}" if words else "beneath, pale: predicted"
        handles.append(Patch(facecolor=ATTEND, alpha=FAINT, label=about))
    figure.legend(handles=handles, loc="outside lower left", ncols=min(4, len(handles)), frameon=False, fontsize=8.5,
                  labelcolor=INK)  # fmt: skip
