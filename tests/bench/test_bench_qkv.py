"""The benchmark of the projection: its gate bites, its table is whole, and a small rehearsal runs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason="needs triton")
if find_spec("triton") is not None:
    from ringattn.bench import qkv
    from ringattn.bench.crash_proof import JobFailed
    from ringattn.bench.qkv import Inputs, QkvOptions, eager, fault, main

ROOT = Path(__file__).resolve().parents[2]
SMALL = ["tokens=40", "models=64", "head_dim=16", "dtype=float16"]  # bfloat16 is not right in the stock interpreter


@pytest.mark.slow
def test_a_rehearsal_in_the_interpreter(tmp_path: Path) -> None:
    """Every baseline passes the gate and is timed, in the order of the table."""
    command = [sys.executable, "-m", "ringattn.bench.qkv", *SMALL, f"results={tmp_path}"]
    environment = {**os.environ, "TRITON_INTERPRET": "1", "TRITON_CACHE_DIR": str(tmp_path)}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    kept = json.loads((tmp_path / "qkv.json").read_text(encoding="utf-8"))
    assert kept["refused"] == {} and kept["measured on"] == {"device": "none: a rehearsal"}
    assert [row["backend"] for row in kept["times"]] == ["eager", "epilogue", "fused"]
    assert all(row["columns"] == 96 and row["forward_us"] > 0 and row["backward_us"] > 0 for row in kept["times"])


@pytest.mark.parametrize("part", ["q", "the message", "dweight"])
def test_the_gate_sees(part: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def spoiled(given: Inputs) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = eager(given)
        if part == "the message":
            given.message[3, 0, 0, 20] += 0.5
        return (q * (1.02 if part == "q" else 1.0), k, v.detach() * v if part == "dweight" else v)

    monkeypatch.setattr(qkv, "BASELINES", {"eager": eager, "spoiled": spoiled})
    small = QkvOptions(tokens=40, head_dim=16, dtype="float16")
    assert fault(small, 64, "eager") is None and str(fault(small, 64, "spoiled")).startswith("model 64: ")
    monkeypatch.setattr(
        qkv, "BASELINES", {"unwritten": lambda given: eager(given._replace(message=given.message.clone()))}
    )
    assert "the message is off by nan" in str(fault(small, 64, "unwritten"))


@pytest.mark.parametrize("job", ["fault", "times"])
def test_what_hangs_or_is_wrong_costs_its_own_figures(
    job: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """eager hangs at its second model, so that the others have nothing to be compared with; epilogue is wrong."""

    class Answers:
        def __enter__(self) -> Answers:
            return self

        def __exit__(self, *_: object) -> None:
            pass

        def ask(self, asked: Any, options: QkvOptions, model: int, name: str, *, limit_s: float) -> Any:
            assert 0 < limit_s <= 60
            rows = json.loads((tmp_path / "qkv.json").read_text())["times"] if (tmp_path / "qkv.json").exists() else []
            before.append(len(rows))
            if name == "eager" and model == 2 and asked.__name__ == job:
                raise JobFailed("no answer within 60 s")
            if asked is qkv.fault:
                return "model 1: q is off" if name == "epilogue" else None
            return {"model": model, "columns": 3, "backend": name, "forward_us": 1.0, "backward_us": 2.0}

    before: list[int] = []
    monkeypatch.setattr(qkv, "Worker", Answers)
    main(["models=1,2,3", f"results={tmp_path}"])
    kept = json.loads((tmp_path / "qkv.json").read_text())
    assert [(row["model"], row["backend"]) for row in kept["times"]] == [
        (1, "eager"), *((model, "fused") for model in (1, 2, 3)),
    ]  # fmt: skip
    assert kept["refused"] == {"eager": "no answer within 60 s", "epilogue": "model 1: q is off"} and kept["complete"]
    asked_of_eager = 3 if job == "fault" else 4
    assert before == [*[0, 0, 1, 1][:asked_of_eager], 1, 1, 1, 2, 2, 3, 3]
