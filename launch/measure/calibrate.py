"""`ringattn calibrate`: measures the constants of the machine at hand into a file that predictions can be made with."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ringattn.errors import InputError
from ringattn.launch.measure.environment import CALIBRATION_FILE, hardware
from ringattn.launch.options import help_text, load_plain, option
from ringattn.launch.outputs import writing
from ringattn.launch.ranks import run_ranks_in_processes
from ringattn.observe.files import write_file
from ringattn.planner.cluster import UNITS, Cluster

if TYPE_CHECKING:
    from ringattn.launch.measure.constants import Fit

PURPOSE = """\
Measures on this machine what prediction needs: attention FLOP/s, copies, latency and bandwidth of messages, processors.
Run it while nothing else runs; it takes about a minute. `run`, `sweep` and `explain` in
this folder then predict for this machine."""


@dataclass
class CalibrateConfig:
    """What is measured."""

    ranks: int = option(2, "ranks, each a process of one thread, on a GPU of its own with nccl", least=2)
    out: str = option(CALIBRATION_FILE, "file to write (JSON)", writes="file")
    transport: str = option("auto", "what carries messages", choices=("auto", "shm", "gloo", "nccl"))
    dtype: str | None = option(
        None,
        "of the inputs; if not set float32 on the CPU, bfloat16 with nccl",
        choices=("float32", "bfloat16", "float16"),
    )
    rounds: int = option(30, "how often everything is measured", least=1)
    timeout_s: float = option(120.0, "deadline of every wait for another rank, in seconds", above=0.0)


def main(argv: Sequence[str]) -> int:
    """The command. Raises `InputError` for bad options, `RanksError` if a rank fails."""
    if "--help" in argv or "-h" in argv:
        print(help_text("calibrate", PURPOSE, CalibrateConfig))
        return 0
    import torch

    config = load_plain(argv, CalibrateConfig)
    gpus = torch.cuda.device_count()
    nccl = config.transport == "nccl" or (config.transport == "auto" and gpus > 0)
    if nccl and config.ranks > gpus:
        raise InputError(f"ranks={config.ranks}: there are {gpus} GPUs; take fewer ranks, or transport=shm")
    dtype = config.dtype or ("bfloat16" if nccl else "float32")
    out = Path(config.out)
    spec = {
        "rounds": config.rounds, "dtype": dtype, "transport": "nccl" if nccl else config.transport,
        "timeout_s": config.timeout_s,
    }  # fmt: skip
    by_rank = run_ranks_in_processes("ringattn.launch.measure.calibration:worker", spec, config.ranks, None, 1)
    described = description(by_rank, spec)
    with writing("out", out):
        write_file(out, json.dumps(described, indent=1) + "\n")
    _show(described)
    processors = len(os.sched_getaffinity(0))
    if not nccl and described["constants"]["cores"] < processors:
        print(f"only {described['constants']['cores']} of {processors} processors were free: calibrate again when "
              "nothing else runs, unless that is a limit of this machine")  # fmt: skip
    here = config.out == CALIBRATION_FILE
    use = "predictions in this folder are made with it" if here else f"use it as cluster={out}"
    print(f"written to {out}; {use}")
    return 0


def description(by_rank: list[dict[str, Any]], spec: dict[str, Any]) -> dict[str, Any]:
    """What the file holds: constants with their units, where and when they were measured, how well they fit."""
    import torch

    from ringattn.launch.measure.calibration import GPU_SCALE, MESSAGE_BYTES, SHAPES, finalized
    from ringattn.launch.measure.constants import constants_of

    scale = GPU_SCALE if spec["transport"] == "nccl" else 1
    seconds = finalized(by_rank)
    constants, kernel, link = constants_of(seconds, spec["dtype"], scale, by_rank[0]["jobs"])
    date, machine = datetime.now(UTC).date().isoformat(), hardware()
    cluster = Cluster(
        name=f"{machine}, {by_rank[0]['transport']}, {spec['dtype']} (calibrated {date})",
        source=f"ringattn calibrate, {len(by_rank)} ranks of one thread, engine {by_rank[0]['engine']}, {date}",
        calibrated=True,
        **constants,
    )
    return {
        "constants": asdict(cluster), "units": UNITS, "date": date, "hardware": machine, "torch": torch.__version__,
        "ranks": len(by_rank), "transport": by_rank[0]["transport"], "engine": by_rank[0]["engine"],
        "dtype": spec["dtype"], "fit": {"kernel": _told(kernel), "messages": _told(link)}, "shapes": SHAPES,
        "message_bytes": MESSAGE_BYTES, "seconds": seconds,
    }  # fmt: skip


def _told(fit: Fit) -> dict[str, Any]:
    """How far measured times are from what the constants say, as shares."""
    return {"median_error": fit.median_error, "greatest_error": max(map(abs, fit.errors)), "errors": fit.errors}


def _show(described: dict[str, Any]) -> None:
    """The constants as a table, and how well they fit."""
    from rich.console import Console
    from rich.table import Table

    table = Table(title=described["constants"]["name"])
    for column in ("constant", "value", "unit"):
        table.add_column(column, justify="right" if column == "value" else "left")
    for key, unit in UNITS.items():
        if (value := described["constants"][key]) is not None:
            table.add_row(key, f"{value:.4g}", unit)
    Console().print(table)
    for name, fit in described["fit"].items():
        print(f"{name}: measured and fitted differ by {fit['median_error']:.1%}, at most {fit['greatest_error']:.1%}")
