"""`ringattn explain`: the schedule of one attention call, as text and as a picture, without running it.

Not covered: processes; the ranks are only planned.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from ringattn.core.layout import LAYOUTS
from ringattn.core.presets import OFFSETS
from ringattn.launch.measure.own_cluster import NONE, own_cluster
from ringattn.launch.options import MOST, help_text, option
from ringattn.launch.outputs import writing
from ringattn.launch.schedules import schedule_option
from ringattn.planner.cluster import CLUSTERS, REFERENCE, cluster_named
from ringattn.schedule.text import to_text

if TYPE_CHECKING:
    from ringattn.explain import Explanation
    from ringattn.ring import Ring

DTYPES = ("float32", "float64", "bfloat16", "float16")
MOST_RANKS, MOST_HEADS = 2**10, 2**16
"""Plans have an entry for each pair of ranks, dilated masks one for each head."""


@dataclass
class ExplainConfig:
    """One attention call. Sizes count the whole sequence."""

    ranks: int = option(4, "ranks to plan for", least=1, most=MOST_RANKS)
    tokens: int = option(8192, "tokens of the sequence", least=0)
    cu_seqlens: list[int] | None = option(None, "document boundaries, as cu_seqlens=[0,100,300]")
    layout: str = option("auto", "which rank owns which tokens", choices=("auto", *LAYOUTS))
    schedule: str = schedule_option()
    causal: bool = option(True, "keys after the query are hidden")
    left: int = option(-1, "window: keys before the query, -1 for all", least=-1)
    right: int = option(-1, "window: keys after the query, -1 for all", least=-1)
    segment_lengths: list[int] | None = option(None, "dilated: tokens of each branch's segments, as [2048,8192]")
    dilation_rates: list[int] | None = option(None, "dilated: every how-manieth row each branch keeps, as [1,4]")
    offset: str = option("mod", "dilated: which rows a head keeps", choices=OFFSETS[:3])
    batch: int = option(1, "sequences", least=1, most=MOST)
    heads: int = option(8, "query heads", least=1, most=MOST_HEADS)
    kv_heads: int = option(2, "key and value heads", least=1, most=MOST_HEADS)
    head_dim: int = option(128, "of queries, keys and values", least=1, most=MOST)
    dtype: str = option("bfloat16", "of the inputs", choices=DTYPES)
    backward: bool = option(True, "also the backward pass")
    cluster: str = option("", "what times are predicted for: a file of `ringattn calibrate`, or one of "
                          + ", ".join(CLUSTERS) + "; this machine if not set and calibrated",
                          names=tuple(CLUSTERS))  # fmt: skip
    sm_margin: int = option(0, "multiprocessors of a GPU that attention leaves to exchanges, as NCCL takes 8", least=0)
    operations: bool = option(False, "also list every operation, one a line")
    picture: str = option("", "file to draw the schedule into (PNG)", writes="picture")
    rows_picture: str = option("", "dilated: file to draw into which rows each rank keeps, sends and receives (PNG)",
                               writes="picture")  # fmt: skip


def main(argv: Sequence[str]) -> int:
    """The command. Raises `InputError` for bad options."""
    if "--help" in argv or "-h" in argv:
        print(help_text("explain", "Print who sends what to whom, when, and what it costs.", ExplainConfig))
        return 0
    from ringattn.launch.config import load

    config = load(argv, schema=ExplainConfig)
    explanation = explanation_of(config)
    print(explanation)
    if not explanation.predicts:
        print(f"predicted: {NONE}")
    if config.operations:
        passes = (explanation.forward, explanation.backward)
        print("\n" + "\n\n".join(to_text(schedule) for schedule in passes if schedule is not None))
    if config.picture:
        from ringattn.launch.pictures.schedule import draw_schedule

        with writing("picture", config.picture):
            draw_schedule(explanation, config.picture)
        print(f"drawn into {config.picture}")
    if config.rows_picture:
        from ringattn.launch.pictures.rows import draw_rows

        with writing("rows_picture", config.rows_picture):
            draw_rows(explanation, config.rows_picture)
        print(f"rows drawn into {config.rows_picture}")
    return 0


def explanation_of(config: ExplainConfig) -> Explanation:
    """What the configured call would do."""
    import torch

    from ringattn.testing import run_ranks

    cluster = cluster_named(config.cluster) if config.cluster else own_cluster()

    def of_rank(ring: Ring) -> Explanation | None:
        if ring.rank:
            return None
        seq = ring.sequence(
            None if config.cu_seqlens else config.tokens, cu_seqlens=config.cu_seqlens, layout=config.layout,
            for_="dilated" if config.segment_lengths else "causal",
        )  # fmt: skip
        return ring.explain(
            seq,
            batch=config.batch,
            q_heads=config.heads,
            kv_heads=config.kv_heads,
            head_dim=config.head_dim,
            dtype=getattr(torch, config.dtype),
            causal=config.causal,
            window=(config.left, config.right),
            segment_lengths=config.segment_lengths,
            dilation_rates=config.dilation_rates,
            offset=config.offset,
            schedule=config.schedule,
            backward=config.backward,
            cluster=cluster or REFERENCE,
            sm_margin=config.sm_margin,
        )

    explanation = run_ranks(config.ranks, of_rank)[0]
    assert explanation is not None
    return replace(explanation, predicts=cluster is not None)
