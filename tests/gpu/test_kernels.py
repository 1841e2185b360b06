"""The attention kernels un-interpreted: the engine contract, carried steps, forms, graphs. `make gpu-check` runs it.

Errors are kept in bench/results/gpu/kernels_exact.json. Each form is compared with what it promises, not with another's
speed.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from typing import Any

import pytest
import torch

from ringattn.errors import UnsupportedError
from tests.contract.engine_contract import EngineContract
from tests.contract.engine_scenarios import SCENARIOS, Scenario
from tests.gpu.kept import ROOT, keep

pytestmark = pytest.mark.gpu

FORMS = ("pointers", "descriptors", "specialized")
HALVES = {"bf16": torch.bfloat16, "fp16": torch.float16}


@pytest.fixture(autouse=True)
def _form_fits(request: pytest.FixtureRequest) -> None:
    form = getattr(getattr(request.node, "callspec", None), "params", {}).get("form")
    if form in ("descriptors", "specialized", "gluon") and torch.cuda.get_device_capability() < (9, 0):
        pytest.skip(f"{form}: needs sm_90")


def engine(form: str | None = None, **options: Any) -> Any:
    from ringattn.engine.triton import TritonEngine

    return TritonEngine(form=form, **options)


class TestScenarios(EngineContract):
    """The contract on CUDA tensors; float64 is refused, and random tiles are left to the interpreter."""

    device, places = "cuda", True

    def engine(self) -> Any:
        return engine()

    def tried(self, scenario: Scenario, dtype: torch.dtype, with_dlse: bool, seed: int = 0) -> None:
        if dtype == torch.float64:
            pytest.skip("the interpreted suite shows the refusal")
        super().tried(scenario, dtype, with_dlse, seed)

    @pytest.mark.skip("each has sizes of its own to compile: the interpreted suite runs them")
    def test_random_tiles(self, seed: int) -> None: ...


@pytest.mark.parametrize("steps", [2, 4, 8])
@pytest.mark.parametrize("form", [*FORMS, "gluon"])
@pytest.mark.parametrize("dtype", HALVES)
def test_more_steps_lose_no_accuracy(dtype: str, form: str, steps: int) -> None:
    from tests.gpu.kernel_checks import ring_errors

    found = ring_errors(engine(form), HALVES[dtype], "cuda", 4096, 128, steps)
    keep("kernels_exact", f"ring of {steps}, {form}, {dtype}: error of the ring, of one step", found)
    assert 0 < found[0] <= 1.25 * found[1]


@pytest.mark.parametrize("name", ["whole-pass", "whole-zigzag-pass", "window", "striped"])
@pytest.mark.parametrize("form", [*FORMS, "fused"])
@pytest.mark.parametrize("dtype", HALVES)
def test_forms_are_as_good_as_plain_loads(dtype: str, form: str, name: str) -> None:
    """Each gradient of every form within 1.25 times the error of the engine by plain loads, in half precision."""
    from tests.contract.engine_trial import Trial

    scenario = SCENARIOS[name]._replace(d_k=64, d_v=64)
    trial = Trial(scenario, HALVES[dtype], True, 0, "cuda")
    reference = trial.reference()
    made = engine(deterministic=False) if form == "fused" else engine(form)
    if form == "specialized":
        try:
            trial.run(made)
        except UnsupportedError as refusal:
            pytest.skip(str(refusal))
    found, bound = ({k: v.nan_to_num(0.0) for k, v in trial.run(one).items()} for one in (made, engine("pointers")))
    for part, expected in reference.items():
        seen = expected.isfinite()
        mine, theirs = ((x[part].double() - expected)[seen].norm() for x in (found, bound))
        assert mine <= 1.25 * theirs + 1e-12, f"{part}: {mine:.2e}, by plain loads {theirs:.2e}"


@pytest.mark.parametrize("form", [*FORMS, "gluon"])
def test_graphs_captured_on_one_stream_replay_at_once(form: str) -> None:
    """Forward and backward. The tensor descriptors of a launch are its graph's own, and go with it."""
    from ringattn.engine.base import Softmax
    from tests.gpu.kernel_checks import HEADS, SCALE, inputs, ring_tiles, whole_pass

    made, first = engine(form), inputs(torch.bfloat16, "cuda", 2048, 128)
    works, sets = made.prepare(ring_tiles(2048, 1), Softmax(SCALE), 2048, HEADS), [first, [-x.flip(0) for x in first]]
    wanted = [whole_pass(made, works, *each) for each in sets]  # which compiles, and makes the tables
    stream, others = torch.cuda.Stream(), [torch.cuda.Stream(), torch.cuda.Stream()]
    torch.cuda.synchronize()
    before, graphs, found = torch.cuda.memory_allocated(), [], []
    for each in sets:
        graphs.append(torch.cuda.CUDAGraph())
        with torch.cuda.graph(graphs[-1], stream=stream):
            found.append(whole_pass(made, works, *each))
    for _ in range(20):
        for x in (x for pair in found for x in pair):
            x.fill_(float("nan"))
        torch.cuda.synchronize()
        for one, other in zip(graphs, others, strict=True):
            with torch.cuda.stream(other):
                one.replay()
        torch.cuda.synchronize()
        for ours, theirs in zip(found, wanted, strict=True):
            assert torch.equal(ours[0], theirs[0]) and torch.equal(ours[1], theirs[1])
    del graphs, found, one, ours, x
    assert torch.cuda.memory_allocated() == before


def test_the_workspace_is_what_a_launch_takes() -> None:
    """By torch's own count, less the rows that it makes, and foreseen. The first call makes tables and describes."""
    from ringattn.engine.base import KV, Sizes, Softmax
    from tests.gpu.kernel_checks import HEADS, SCALE, inputs, ring_tiles

    made, (q, k, v) = engine("descriptors"), inputs(torch.bfloat16, "cuda", 4096, 128)
    works, sizes = (
        made.prepare(ring_tiles(4096, 1), Softmax(SCALE), 4096, HEADS),
        Sizes(4096, 2, HEADS, 128, 128, q.dtype),
    )
    foreseen = made.workspace_bytes(works[0], sizes, False)
    state = made.begin(works, q, 128, None)
    made.attend(q, KV(k, v), state, works[0])
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    made.attend(q, KV(k, v), state, works[0])
    taken = torch.cuda.max_memory_allocated() - before
    told = made.workspace_bytes(works[0], sizes, False)
    keep("kernels_exact", "descriptors of 4,096 tokens: bytes told, taken", [told, taken])
    assert 0 < foreseen == told <= taken < told + 512


def test_a_margin_of_multiprocessors_changes_no_bit() -> None:
    from tests.gpu.kernel_checks import attended, inputs, ring_tiles

    q, k, v = inputs(torch.bfloat16, "cuda", 4096, 128)
    whole, beside = (attended(engine(sm_margin=sm_margin), q, k, v, ring_tiles(4096, 1)) for sm_margin in (0, 8))
    assert torch.equal(whole, beside)


def test_no_forward_kernel_of_half_precision_spills() -> None:
    """As the driver says of the loaded kernels, which is what the compile gate claims for this architecture."""
    from ringattn.engine.triton import kept
    from tests.gpu.kernel_checks import ring_errors

    kept.clear()
    for form in FORMS:
        ring_errors(engine(form), torch.bfloat16, "cuda", 512, 128, 2)
    found = [handle.spills for handle in kept.handles()]
    keep("kernels_exact", "spills of the loaded kernels", found)
    assert found and not any(found)


@pytest.mark.skipif(shutil.which("compute-sanitizer") is None, reason="compute-sanitizer is not installed here")
@pytest.mark.parametrize("tool", ["memcheck", "racecheck"])
def test_under_compute_sanitizer(tool: str) -> None:
    """One scenario of each form: no access outside its memory, no hazard in shared memory."""
    this = "tests/gpu/test_kernels.py::test_forms_are_as_good_as_plain_loads"
    command = ["compute-sanitizer", "--tool", tool, "--error-exitcode", "9", sys.executable, "-m", "pytest", "-q", this]
    words = ["-m", "gpu", "-k", "whole-pass and bf16", "-p", "no:cacheprovider"]
    done = subprocess.run(
        [*command, *words], cwd=ROOT, env=os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"},
        capture_output=True, text=True, timeout=240,
    )  # fmt: skip
    keep("kernels_exact", f"compute-sanitizer {tool}", done.stdout.splitlines()[-1:])
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-2000:]
