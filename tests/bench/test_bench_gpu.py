"""The GPU benchmarks rehearsed in Triton's interpreter: that they run, gate and keep; their figures mean nothing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, ClassVar

import pytest

pytest.importorskip("triton")
from triton.runtime.driver import driver

from ringattn.bench import kernel_code, kernels
from ringattn.bench.crash_proof import JobFailed
from ringattn.bench.kernel_baselines import KernelBaseline
from ringattn.kernels.launch import LaunchCall

ROOT = Path(__file__).resolve().parents[2]


def rehearsed(module: str, folder: Path, *words: str, code: str | None = None) -> Any:
    """What a benchmark keeps, run in a process of its own on the CPU."""
    name = module.rpartition(".")[2]
    program = ["-m", module]
    if code:  # a file, which worker processes import as well
        (folder / "changed.py").write_text(code)
        program = [str(folder / "changed.py")]
    command = [sys.executable, *program, *words, f"results={folder}"]
    environment = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return json.loads((folder / f"{name}.json").read_text())


def test_a_kernel_is_compiled_anew_for_another_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton keeps what it compiled by device, and the stub device has the same number for every GPU."""

    class Kernel:
        def __init__(self) -> None:
            self.device_caches: dict[int, int] = {}

        def warmup(self, grid: tuple[int]) -> int:
            return self.device_caches.setdefault(0, driver.active.get_current_target().arch)

    monkeypatch.setattr(driver, "_active", None)
    monkeypatch.setattr(kernel_code, "read", lambda kernel: kernel)
    call = LaunchCall(Kernel(), (1,), (), {})
    assert [kernel_code.code_of(call, arch) for arch in (90, 100)] == [90, 100]


SIZES = ("tokens=64", "total=64", "heads=2", "head_dim=16", "steps=2", "step_tokens=32")
SMALL = (*SIZES, "dtype=float16", "masks=causal")


@pytest.mark.slow
def test_kernels(tmp_path: Path) -> None:
    found = rehearsed("ringattn.bench.kernels", tmp_path, *SMALL, "only=pointers,fused,cudnn,gluon")
    assert [row["engine"] for row in found["speed"]] == ["pointers", "fused"]
    assert all(row["forward_us"] > 0 and row["backward_us"] > 0 and "failed" not in row for row in found["speed"])
    assert set(found["ring steps"]) == {"pointers", "fused"} and found["launch"]["engine call by kept handle"] > 0
    assert found["refused"]["cudnn"] == "needs a CUDA device" and "sm_90, not sm_80" in found["refused"]["gluon"]


FAULTY = """
import os, sys, time
from ringattn.bench import kernel_baselines, kernels
right = kernel_baselines.ours
class Impatient(kernels.Worker):
    def ask(self, job, *given, limit_s):
        hangs = given[1:3] + given[4:] == ("engine triton", "causal", "forward")
        return super().ask(job, *given, limit_s=2.0 if hangs else limit_s)
def faulty(name, engine):
    one = right(name, engine)
    def passes(inputs, causal):
        forward, backward = one.passes(inputs, causal)
        timed = inputs.q.shape[1] == 64
        if name == "fused":
            return (lambda: forward() * 1.01), backward
        if name == "pointers":
            return forward, (lambda: os._exit(9)) if timed else backward
        return (lambda: time.sleep(1000)) if timed and causal else forward, backward
    return one._replace(passes=passes)
kernel_baselines.ours, kernels.Worker = faulty, Impatient
if __name__ == "__main__":
    kernels.main(sys.argv[1:])
"""


@pytest.mark.slow
def test_what_is_wrong_dies_or_hangs_costs_its_own_figures(tmp_path: Path) -> None:
    """A wrong output, a process that ends in backward, a forward that does not end."""
    words = (*SIZES, "dtype=float16", "only=fused,pointers,engine triton", "limit_s=200")
    found = rehearsed("kernels", tmp_path, *words, code=FAULTY)
    rows = {(row["engine"], row["mask"]): row for row in found["speed"]}
    assert len(rows) == len(found["speed"]) == 4 and found["complete"]
    assert found["refused"]["fused"].startswith("full mask: out ")
    for mask in ("full", "causal"):
        died = rows["pointers", mask]
        assert died["failed"] == "its process ended with exit code 9" and died["forward_us"] > 0
    assert rows["engine triton", "full"]["backward_us"] > 0
    assert rows["engine triton", "causal"]["failed"] == "no answer within 2 s"
    assert set(found["ring steps"]) == {"pointers"}


class Answers:
    """In the place of a worker: `speed` of "cudnn" answers, all else as `says` has it; notes what was kept before."""

    says: ClassVar[dict[str, str]] = {}
    kept: ClassVar[list[int]] = []
    file: ClassVar[Path]

    def __enter__(self) -> Answers:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def ask(self, job: Any, *given: Any, limit_s: float) -> Any:
        assert 0 < limit_s <= 60
        name = given[1] if len(given) > 1 else ""
        self.kept.append(len(json.loads(self.file.read_text())["speed"]) if self.file.exists() else -1)
        if why := self.says.get(f"{job.__name__} {name}".strip()):
            raise JobFailed(why)
        if job is kernels.speed:
            return {f"{given[-1]}_us": 2.0, f"{given[-1]}_tflops": 3.0}
        return {"a": 1.0} if job is kernels.launch_costs else None


@pytest.fixture
def answers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> type[Answers]:
    made = [KernelBaseline(name, lambda inputs, causal: (None, None)) for name in ("cudnn", "hangs", "not here")]  # type: ignore[arg-type, return-value]
    monkeypatch.setattr(kernels, "kernel_baselines", lambda dim, dtype, only: (made, {"flash4": "is not installed"}))
    monkeypatch.setattr(kernels, "Worker", Answers)
    monkeypatch.setattr(Answers, "kept", [])
    monkeypatch.setattr(Answers, "says", {})
    monkeypatch.setattr(Answers, "file", tmp_path / "first.json", raising=False)
    return Answers


def test_what_is_measured_is_kept_at_once(answers: type[Answers], tmp_path: Path) -> None:
    answers.says |= {"gate not here": "RuntimeError: refuses", "speed hangs": "no answer within 60 s"}
    answers.says |= {"launch_costs": "its process ended with exit code -9"}
    copy = tmp_path / "copy"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GPU_CHECK_COPY", str(copy))
        kernels.main([f"results={tmp_path}", "file=first", "tokens=1,2,3,4"])
    found = json.loads((tmp_path / "first.json").read_text())
    assert [row.get("failed") for row in found["speed"]] == [
        *[None] * 8, *["no answer within 60 s"] * 2, *["not tried: 2 sizes have failed"] * 6,
    ]  # fmt: skip
    assert found["refused"] == {
        "flash4": "is not installed", "not here": "RuntimeError: refuses",
        "launch cost": "its process ended with exit code -9",
    }  # fmt: skip
    # Before each question: the gate, forward and backward of eight sizes; one gate and two sizes; a gate, the costs.
    sizes = [rows for rows in range(1, 8) for _ in ("forward", "backward")]
    assert answers.kept == [-1, -1, -1, *sizes, 8, 8, 9, 16, 16]
    page = (tmp_path / "first.md").read_text()
    assert "failed: hangs, full, 1: no answer within 60 s" in page and "not timed: not here: RuntimeError" in page
    for file in ("first.json", "first.md"):
        assert (copy / file).read_text() == (tmp_path / file).read_text()


def test_a_spent_budget_leaves_the_rest_out(answers: type[Answers], tmp_path: Path) -> None:
    kernels.main([f"results={tmp_path}", "file=first", "budget_s=0"])
    found = json.loads((tmp_path / "first.json").read_text())
    assert answers.kept == [] and found["speed"] == [] and found["complete"]
    assert found["refused"]["cudnn"] == "not tried: the 0 s of budget_s are spent"
