"""`ringattn explain`: print and draw the schedule of one attention call without running it.

The call is only planned. No processes are started.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from ringattn.core.dilation import OFFSETS
from ringattn.errors import InputError
from ringattn.launch.calls import TORCH_DTYPES, MaskedCallConfig, tokens_option
from ringattn.launch.folders import json_output, writing
from ringattn.launch.measure.environment import cluster_over
from ringattn.launch.options import DTYPES, MOST, help_text, json_option, option
from ringattn.planner.cluster import CLUSTERS, REFERENCE, cluster_named
from ringattn.schedule.text import to_text

if TYPE_CHECKING:
    from ringattn.explain import Explanation
    from ringattn.ring import Ring

QUICKLY_PLANNED = 16
"""With more ranks, planning takes long enough to announce it."""
MOST_RANKS = 2**10
"""Plans have an entry for each pair of ranks."""


@dataclass
class ExplainConfig(MaskedCallConfig):
    """One attention call to explain, and the files to write."""

    tokens: int | None = tokens_option(8192, least=0)
    head_dim: int = option(128, "of queries, keys and values", least=1, most=MOST)
    dtype: str = option("bf16", "of queries, keys and values", choices=DTYPES)
    offset: str = option("mod", "dilated attention: which rows a head keeps", choices=OFFSETS[:3])
    ranks: int = option(4, "ranks to plan for", least=1, most=MOST_RANKS)
    cluster: str = option("", "machines to predict for: a file of `ringattn calibrate`, or one of "
                          + ", ".join(CLUSTERS) + "; this machine if not set and calibrated",
                          names=tuple(CLUSTERS))  # fmt: skip
    sm_margin: int = option(0, "multiprocessors of a GPU that are reserved for exchanges; NCCL uses 8", least=0)
    operations: bool = option(False, "also list every operation, one per line")
    all_ranks: bool = option(False, "show every rank even if there are more than 16")
    json: str = json_option()
    picture: str = option("", "file for a picture of the schedule (PNG)", writes="picture")
    rows_picture: str = option("", "dilated attention: file for a picture (PNG) of the rows of each rank",
                               writes="picture")  # fmt: skip

    def check(self) -> None:
        """See `MaskedCallConfig.check`."""
        super().check()
        if self.offset != "mod" and not self.dilated:
            raise InputError(f"offset={self.offset}: has no effect without segment_lengths and dilation_rates")


def main(argv: Sequence[str]) -> int:
    """Run the command. Raises `InputError` for bad options."""
    if "--help" in argv or "-h" in argv:
        print(
            help_text("explain", "Print which ranks exchange which blocks in each step, and the costs.", ExplainConfig)
        )
        return 0
    from ringattn.launch.config import load

    config = load(argv, ExplainConfig)
    config.check()
    if config.ranks > QUICKLY_PLANNED:
        print(f"ringattn explain: planning {config.ranks} ranks", file=sys.stderr, flush=True)
    with json_output(config.json) as write:
        explanation = explanation_of(config)
        show(explanation, config)
        write({"command": "explain", **explanation.summary()})
    return 0


def show(explanation: Explanation, config: ExplainConfig) -> None:
    """Print the explanation, and draw the pictures that the options name."""
    print(explanation.text(config.all_ranks))
    if explanation.predicted_us is None:
        _, reason = cluster_over("")
        print(f"predicted: {reason}")
    if config.operations:
        passes = (explanation.forward, explanation.backward)
        print("\n" + "\n\n".join(to_text(schedule) for schedule in passes if schedule is not None))
    if config.picture:
        from ringattn.launch.pictures.charts import draw_schedule

        with writing("picture", config.picture):
            draw_schedule(explanation, config.picture)
        print(f"picture written: {config.picture}")
    if config.rows_picture:
        from ringattn.launch.pictures.charts import draw_rows

        with writing("rows_picture", config.rows_picture):
            draw_rows(explanation, config.rows_picture)
        print(f"picture of rows written: {config.rows_picture}")


def explanation_of(config: ExplainConfig) -> Explanation:
    """Plan the configured call, and return the explanation of its schedule and costs."""
    import torch

    from ringattn.testing import run_ranks

    # The command has no option `transport`, so the prediction is for the transport that was calibrated.
    cluster = cluster_named(config.cluster) if config.cluster else cluster_over("")[0]
    if cluster is None and config.sm_margin:
        raise InputError(
            f"sm_margin={config.sm_margin}: has no effect without a prediction; name a cluster, as cluster=h100"
        )

    def of_rank(ring: Ring) -> Explanation | None:
        if ring.rank:
            return None
        seq = config.sequence_on(ring, config.length)
        return ring.explain(
            seq,
            batch=config.batch,
            q_heads=config.heads,
            kv_heads=config.kv_heads,
            head_dim=config.head_dim,
            dtype=getattr(torch, TORCH_DTYPES[config.dtype]),
            offset=config.offset,
            **config.options(config.length),
            schedule=config.schedule,
            backward=config.backward,
            cluster=cluster or REFERENCE,
            sm_margin=config.sm_margin,
        )

    explanation = run_ranks(config.ranks, of_rank)[0]
    assert explanation is not None
    # Planning on threads does not recognise any machine, so do not name a source of the cluster.
    return explanation if cluster is not None else replace(explanation, cluster_from="")
