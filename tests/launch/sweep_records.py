"""Folders like those of `ringattn sweep`. The times in their records follow a simple formula with seeded noise."""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Callable, Iterable
from itertools import product
from pathlib import Path
from typing import Any

Record = dict[str, Any]

SLOWER = {"ring": 1.0, "all_gather": 1.12, "direct": 1.05}
HEADS, HEAD_DIM, FLOPS = 8, 64, 90e9
"""`FLOPS` is the rate of one rank, a core of a CPU."""
ENVIRONMENT = {"python": "3.11.7", "torch": "2.13.0", "hardware": "4 cores", "variables": {"OMP_NUM_THREADS": "1"}}


def record(
    ranks: int, tokens: int, schedule: str = "ring", layout: str = "zigzag", dtype: str = "float32", *,
    status: str = "ok", message: str | None = None, seed: int = 0, backward: bool = True,
) -> Record:  # fmt: skip
    """Return a record for `points.jsonl`. The same arguments always give the same record."""
    config = {
        "ranks": ranks, "tokens": tokens, "layout": layout, "dtype": dtype, "batch": 1, "repeats": 10,
        "schedule": schedule, "transport": "gloo", "engine": "aten", "heads": HEADS, "kv_heads": 2,
        "head_dim": HEAD_DIM, "causal": True, "window": None, "mask": None,
        "cluster": "cpu-core",
    }  # fmt: skip
    shared = {
        "hash": hashlib.sha256(json.dumps(config).encode()).hexdigest()[:12], "status": status, "message": message,
        "config": config, "started": "2026-11-21T10:00:00+00:00", "wall_s": 12.5, "environment": "e1",
        "commit": "ab12cd34ef56ab12cd34ef56ab12cd34ef56ab12", "world_size": ranks, "tokens": tokens,
        "command": f"ringattn run ranks={ranks} tokens={tokens} schedule={schedule} layout={layout} dtype={dtype}",
    }  # fmt: skip
    unknown = ("forward_ms", "backward_ms", "tokens_per_s", "tflops", "bytes_sent", "messages", "exposed_ms", "overlap",
               "arrivals_known", "pass_ms", "peak_bytes", "pool_bytes", "error", "predicted",
               "not_predicted")  # fmt: skip
    if status != "ok":
        return {**shared, **dict.fromkeys(unknown)}
    return {**shared, **_results(ranks, tokens, schedule, layout, dtype, seed, backward)}


def _results(ranks: int, tokens: int, schedule: str, layout: str, dtype: str, seed: int, backward: bool) -> Record:
    noise = random.Random(f"{ranks} {tokens} {schedule} {layout} {dtype} {seed}")
    pairs = tokens * (tokens + 1) / 2
    flops = pairs * 4 * HEAD_DIM * HEADS
    shard_bytes = tokens // ranks * 2 * 2 * HEAD_DIM * (2 if dtype == "bfloat16" else 4)
    wait_ms = 0.0 if ranks == 1 else 0.35 * (ranks - 1) + shard_bytes * (ranks - 1) / 2e9 * 1e3
    lost = (1.0 if layout == "zigzag" or ranks == 1 else 1.6) * (0.8 if dtype == "bfloat16" else 1.0)
    ideal_ms = flops / FLOPS / ranks * 1e3 * lost
    forward_ms = ideal_ms * SLOWER[schedule] * noise.uniform(0.98, 1.06) + wait_ms
    times = {"forward": forward_ms, "backward": forward_ms * 2.4}
    passes = times if backward else {"forward": forward_ms}
    timed = {f"{name}_ms": _timed(ms, noise) for name, ms in passes.items()}
    total_s, work = sum(passes.values()) / 1e3, 3.5 if backward else 1.0
    total = {name: sum(times[name] for times in timed.values()) for name in ("median", "p10", "p90")}
    return {
        "backward_ms": None, **timed, "pass_ms": {**total, "samples": 10}, "arrivals_known": ranks == 1,
        "tokens_per_s": tokens / total_s, "tflops": flops * work / total_s / 1e12,
        "bytes_sent": [shard_bytes * 3 * (ranks - 1)] * ranks, "messages": [3 * (ranks - 1)] * ranks,
        "exposed_ms": {name: [wait_ms * (1 + 0.1 * rank) for rank in range(ranks)] for name in ("forward", "backward")},
        "overlap": max(0.0, 1 - wait_ms / (wait_ms + 2 + ideal_ms / 10)),
        "peak_bytes": [int(shard_bytes * 14 + 3e6 + 1e5 * rank) for rank in range(ranks)],
        "pool_bytes": [0 if ranks == 1 else int(shard_bytes * 2.75)] * ranks,
        "error": {"out": 3e-7, "dq": 4e-7, "dk": 6e-7, "dv": 5e-7},
        "predicted": {
            "cluster": "cpu-core", "calibrated": True, "forward_ms": ideal_ms + wait_ms,
            "backward_ms": 2.5 * ideal_ms + wait_ms, "exposed_ms": wait_ms, "pool_bytes": shard_bytes * 2.75,
        },
        "not_predicted": "",
    }  # fmt: skip


def _timed(median_ms: float, noise: random.Random) -> Record:
    low, high = noise.uniform(0.93, 0.99), noise.uniform(1.02, 1.12)
    return {"median": median_ms, "p10": median_ms * low, "p90": median_ms * high, "samples": 10}


def quiet(line: Record) -> Record:
    """Return the record without noise in `pass_ms`: every percentile is the sum of the two passes' medians."""
    if line["status"] != "ok":
        return line
    total = line["forward_ms"]["median"] + line["backward_ms"]["median"]
    return {**line, "pass_ms": {"median": total, "p10": total, "p90": total, "samples": 10}}


def strong() -> list[Record]:
    """Return records of three schedules on 1, 2, 4 and 8 ranks. One ran out of memory, and one timed out."""
    records = [record(ranks, 16384, schedule) for schedule, ranks in product(SLOWER, (1, 2, 4, 8))]
    gone = "rank 0 failed first: OutOfMemoryError: no memory for <slots> of 1.25 GiB | choose schedule=ring"
    records[4] = record(1, 16384, "all_gather", status="oom", message=gone)
    records[11] = record(8, 16384, "direct", status="timeout", message="8 ranks did not end within 60 s")
    return records


def weak() -> list[Record]:
    """Return records of two layouts on 1, 2, 4 and 8 ranks with 4,096 tokens each."""
    pairs = product(("zigzag", "contiguous"), (1, 2, 4, 8))
    return [record(ranks, 4096 * ranks, layout=layout) for layout, ranks in pairs]


def grid() -> list[Record]:
    """Return 200 records with various world sizes, lengths, schedules, layouts and dtypes."""
    ranks, tokens = (1, 2, 4, 8, 16), (4096, 8192, 16384, 32768, 65536)
    options = [("ring", "zigzag"), ("ring", "contiguous"), ("all_gather", "zigzag"), ("direct", "zigzag")]
    return [
        record(p, n, schedule, layout, dtype)
        for p, n, (schedule, layout), dtype in product(ranks, tokens, options, ("float32", "bfloat16"))
    ]


def folder(path: Path, records: Iterable[Record], change: Callable[[Record], Record] = lambda line: line) -> Path:
    """Write the records, each changed by `change`, into `path` like a sweep. Return `path`."""
    path.mkdir(parents=True, exist_ok=True)
    lines = [json.dumps(change(line)) for line in records]
    (path / "points.jsonl").write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    (path / "environments.json").write_text(json.dumps({"e1": ENVIRONMENT}), encoding="utf-8")
    return path
