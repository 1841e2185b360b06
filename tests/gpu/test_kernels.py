"""The compiled attention kernels: engine contract, passes of several steps, kernel forms and graphs.

`make gpu-first` runs the tests. Errors are recorded in bench/results/gpu/kernels_exact.json. The tests check the
guarantees of each form of the kernels (such as plain pointers or descriptors), not its speed.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from typing import Any

import pytest
import torch

from tests.contract.engine_contract import EngineContract
from tests.contract.engine_scenarios import SCENARIOS, Scenario
from tests.gpu.kept import ROOT, keep

pytestmark = pytest.mark.gpu

FORMS = ("pointers", "descriptors")
HALVES = {"bf16": torch.bfloat16, "fp16": torch.float16}


@pytest.fixture(autouse=True)
def _form_fits(request: pytest.FixtureRequest) -> None:
    form = getattr(getattr(request.node, "callspec", None), "params", {}).get("form")
    if form in ("descriptors", "gluon") and torch.cuda.get_device_capability() < (9, 0):
        pytest.skip(f"{form}: needs sm_90")


def engine(form: str | None = None, **options: Any) -> Any:
    from ringattn.engine.triton import TritonEngine

    return TritonEngine(form=form, **options)


class TestScenarios(EngineContract):
    """The engine contract on CUDA tensors, without float64 and random tiles, which the interpreter's tests cover."""

    device, places = "cuda", True

    def engine(self) -> Any:
        return engine()

    def tried(self, scenario: Scenario, dtype: torch.dtype, with_dlse: bool, seed: int = 0) -> None:
        if dtype == torch.float64:
            pytest.skip("the interpreted suite shows the refusal")
        super().tried(scenario, dtype, with_dlse, seed)

    @pytest.mark.skip("each case has other sizes to compile: the interpreted suite runs them")
    def test_random_tiles(self, seed: int) -> None: ...


@pytest.mark.parametrize("steps", [2, 4, 8])
@pytest.mark.parametrize("form", [*FORMS, "gluon"])
@pytest.mark.parametrize("dtype", HALVES)
def test_more_steps_lose_no_accuracy(dtype: str, form: str, steps: int) -> None:
    from tests.gpu.kernel_checks import ring_errors

    errors = ring_errors(engine(form), HALVES[dtype], "cuda", 4096, 128, steps)
    keep("kernels_exact", f"ring of {steps}, {form}, {dtype}: error of the ring, of one step", errors)
    assert 0 < errors[0] <= 1.25 * errors[1] < 1.25 * torch.finfo(HALVES[dtype]).eps


SCENARIOS_OF_FORMS = [
    *((form, name) for form in (*FORMS, "fused") for name in ("whole-pass", "whole-zigzag-pass", "window", "striped")),
    *(("gluon", name) for name in ("whole-call", "softcap", "alibi", "alibi-documents")),
]


@pytest.mark.parametrize(("form", "name"), SCENARIOS_OF_FORMS)
@pytest.mark.parametrize("dtype", HALVES)
def test_forms_are_as_good_as_plain_loads(dtype: str, form: str, name: str) -> None:
    """In half precision, the error of each result is at most 1.25 times that of the engine with plain loads."""
    from tests.contract.engine_trial import Trial

    scenario = SCENARIOS[name]._replace(d_k=64, d_v=64)
    trial = Trial(scenario, HALVES[dtype], True, 0, "cuda")
    reference = trial.reference()
    form_engine = engine(deterministic=False) if form == "fused" else engine(form)
    actual, bound = (
        {k: v.nan_to_num(0.0) for k, v in trial.run(compared).items()} for compared in (form_engine, engine("pointers"))
    )
    for part, expected in reference.items():
        finite = expected.isfinite()
        error, bound_error = ((x[part].double() - expected)[finite].norm() for x in (actual, bound))
        assert error <= 1.25 * bound_error + 1e-12, f"{part}: {error:.2e}, with plain loads {bound_error:.2e}"


@pytest.mark.parametrize("form", [*FORMS, "gluon"])
def test_graphs_captured_on_one_stream_replay_at_once(form: str) -> None:
    """Two graphs of forward and backward that were captured on one stream may be replayed at the same time.

    The tensor descriptors of a launch belong to its graph and are freed with the graph.
    """
    from ringattn.engine.base import Softmax
    from tests.gpu.kernel_checks import HEADS, SCALE, inputs, ring_tiles, whole_pass

    form_engine, first = engine(form), inputs(torch.bfloat16, "cuda", 2048, 128)
    works, sets = (
        form_engine.prepare(ring_tiles(2048, 1), Softmax(SCALE), 2048, HEADS),
        [first, [-x.flip(0) for x in first]],
    )
    expected = [whole_pass(form_engine, works, *each) for each in sets]  # compiles and makes the tables
    stream, replay_streams = torch.cuda.Stream(), [torch.cuda.Stream(), torch.cuda.Stream()]
    torch.cuda.synchronize()
    before, graphs, results = torch.cuda.memory_allocated(), [], []
    for each in sets:
        graphs.append(torch.cuda.CUDAGraph())
        with torch.cuda.graph(graphs[-1], stream=stream):
            results.append(whole_pass(form_engine, works, *each))
    for _ in range(20):
        for x in (x for pair in results for x in pair):
            x.fill_(float("nan"))
        torch.cuda.synchronize()
        for graph, replay_stream in zip(graphs, replay_streams, strict=True):
            with torch.cuda.stream(replay_stream):
                graph.replay()
        torch.cuda.synchronize()
        for ours, theirs in zip(results, expected, strict=True):
            assert torch.equal(ours[0], theirs[0]) and torch.equal(ours[1], theirs[1])
    del graphs, results, graph, ours, x
    assert torch.cuda.memory_allocated() == before


def test_the_workspace_is_what_a_launch_allocates() -> None:
    """`workspace_bytes` returns what torch counts for a launch, both before and after the first call.

    The first call is not counted, because it also makes tables and handles.
    """
    from ringattn.engine.base import KV, Sizes, Softmax
    from tests.gpu.kernel_checks import HEADS, SCALE, inputs, ring_tiles

    form_engine, (q, k, v) = engine("descriptors"), inputs(torch.bfloat16, "cuda", 4096, 128)
    works, sizes = (
        form_engine.prepare(ring_tiles(4096, 1), Softmax(SCALE), 4096, HEADS),
        Sizes(4096, 2, HEADS, 128, 128, q.dtype),
    )
    foreseen = form_engine.workspace_bytes(works[0], sizes, False)
    state = form_engine.begin(works, q, 128, None)
    form_engine.attend(q, KV(k, v), state, works[0])
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    form_engine.attend(q, KV(k, v), state, works[0])
    taken = torch.cuda.max_memory_allocated() - before
    reported = form_engine.workspace_bytes(works[0], sizes, False)
    keep("kernels_exact", "descriptors of 4,096 tokens: bytes told, taken", [reported, taken])
    assert 0 < foreseen == reported <= taken < reported + 512


def test_a_margin_of_multiprocessors_changes_no_bit() -> None:
    from tests.gpu.kernel_checks import inputs, ring_tiles, run_forward

    q, k, v = inputs(torch.bfloat16, "cuda", 4096, 128)
    whole, limited = (run_forward(engine(sm_margin=sm_margin), q, k, v, ring_tiles(4096, 1)) for sm_margin in (0, 8))
    assert torch.equal(whole, limited)


def test_no_forward_kernel_of_half_precision_spills() -> None:
    """The driver reports no spills for the loaded kernels, as the compile gate expects for this architecture."""
    from ringattn.engine.triton import kept
    from tests.gpu.kernel_checks import ring_errors

    kept.clear()
    for form in FORMS:
        ring_errors(engine(form), torch.bfloat16, "cuda", 512, 128, 2)
    spills = [handle.spills for handle in kept.handles()]
    keep("kernels_exact", "spills of the loaded kernels", spills)
    assert spills and not any(spills)


@pytest.mark.skipif(shutil.which("compute-sanitizer") is None, reason="compute-sanitizer is not installed here")
@pytest.mark.parametrize("tool", ["memcheck", "racecheck"])
def test_under_compute_sanitizer(tool: str) -> None:
    """In one scenario, compute-sanitizer finds no bad access and no hazard in shared memory for any form."""
    this = "tests/gpu/test_kernels.py::test_forms_are_as_good_as_plain_loads"
    command = ["compute-sanitizer", "--tool", tool, "--error-exitcode", "9", sys.executable, "-m", "pytest", "-q", this]
    options = ["-m", "gpu", "-k", "whole-pass and bf16", "-p", "no:cacheprovider"]
    done = subprocess.run(
        [*command, *options], cwd=ROOT, env=os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"},
        capture_output=True, text=True, timeout=240,
    )  # fmt: skip
    keep("kernels_exact", f"compute-sanitizer {tool}", done.stdout.splitlines()[-1:])
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-2000:]
