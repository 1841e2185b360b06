"""The GPU benchmarks rehearsed in Triton's interpreter: that they run, gate and keep; their figures mean nothing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent


def rehearsed(module: str, folder: Path, *words: str, code: str | None = None) -> Any:
    """What a benchmark keeps, run in a process of its own on the CPU."""
    name = module.rpartition(".")[2]
    program = ["-c", code] if code else ["-m", module]
    command = [sys.executable, *program, *words, f"results={folder}"]
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return json.loads((folder / f"{name}.json").read_text())


SIZES = ("tokens=64", "total=64", "heads=2", "head_dim=16", "steps=2", "step_tokens=32")
SMALL = (*SIZES, "dtype=float16", "masks=causal")


@pytest.mark.slow
def test_kernels(tmp_path: Path) -> None:
    found = rehearsed("ringattn.bench.kernels", tmp_path, *SMALL, "only=pointers,fused,cudnn,gluon")
    assert [row["engine"] for row in found["speed"]] == ["pointers", "fused"]
    assert all(row["forward_us"] > 0 and row["backward_us"] > 0 and "failed" not in row for row in found["speed"])
    assert set(found["ring steps"]) == {"pointers", "fused"} and found["launch"]["engine call by kept handle"] > 0
    assert found["refused"]["cudnn"] == "needs a CUDA device" and "sm_90, not sm_80" in found["refused"]["gluon"]


WRONG = """
import sys
from ringattn.bench import contestants, kernels
right = contestants.ours
def wrong(name, engine):
    one = right(name, engine)
    def passes(inputs, causal):
        forward, backward = one.passes(inputs, causal)
        return (lambda: forward() * 1.01), backward
    return one._replace(passes=passes) if name == "fused" else one
contestants.ours = wrong
kernels.main(sys.argv[1:])
"""


@pytest.mark.slow
def test_who_is_wrong_is_not_timed(tmp_path: Path) -> None:
    found = rehearsed("kernels", tmp_path, *SMALL, "only=pointers,fused", code=WRONG)
    assert [row["engine"] for row in found["speed"]] == ["pointers"]
    assert found["refused"]["fused"].startswith("full mask: out ")


@pytest.mark.slow
def test_tune(tmp_path: Path) -> None:
    words = ("tokens=64", "batch=1", "heads=1", "dims=64", "forms=pointers,gluon", "kernels=forward,grad_q", "limit=2")
    found = rehearsed("ringattn.bench.tune", tmp_path, *words, "workers=0", "dtype=float16")
    assert set(found["candidates"]) == {"forward/64/pointers", "grad_q/64/pointers"}
    for rows in found["candidates"].values():
        assert len(rows) == 2 and all(len(row["us"]) == 2 for row in rows)
        assert sum(rows[0]["us"]) <= sum(rows[1]["us"])


NEVER_RIGHT = """
import sys
from ringattn.bench import tune
right = tune.ours
def wrong(name, engine):
    one = right(name, engine)
    def passes(inputs, causal):
        forward, backward = one.passes(inputs, causal)
        return (lambda: forward() * 1.01), backward
    return one._replace(passes=passes)
tune.ours, tune.put_config = wrong, lambda *entry: sys.exit(f"wrote {entry}")
tune.main(sys.argv[1:])
"""


@pytest.mark.slow
def test_what_is_wrong_is_not_written(tmp_path: Path) -> None:
    words = ("tokens=64", "batch=1", "heads=1", "dims=64", "forms=pointers", "kernels=forward", "limit=1")
    found = rehearsed("tune", tmp_path, *words, "workers=0", "dtype=float16", "write=true", code=NEVER_RIGHT)
    (row,) = found["candidates"]["forward/64/pointers"]
    assert row["us"] == [] and row["failed"].startswith("full mask: out ")
