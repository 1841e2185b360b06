"""Calibration: the fit recovers the constants from computed times, and the command measures, writes and refuses."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest
import torch

from ringattn.bench import prediction, timed_calls
from ringattn.bench.gate import GateError
from ringattn.cli import main
from ringattn.engine.aten import AtenEngine
from ringattn.engine.base import BackwardInputs
from ringattn.errors import InputError, RingError
from ringattn.launch.config import load
from ringattn.launch.measure import calibrate, calibration
from ringattn.launch.measure.calibrate import (
    COPY_BYTES,
    MESSAGE_BYTES,
    NEAR,
    SHAPES,
    CalibrateConfig,
    Shape,
    constants_of,
    finalized,
    least_squares,
    link_fit,
)
from ringattn.launch.options import load_plain
from ringattn.planner.cluster import COPIED, UNITS, Cluster, call_work, cluster_named, computed_pairs, work_s
from ringattn.planner.simulate import simulate
from ringattn.ring import Ring
from ringattn.testing import run_ranks
from tests.launch.commands import python

REFERENCE = Cluster(
    "made up", 6e10, 8e8, 3e-4, backward_flops=5e10, call_s=1e-4, copy_bytes_s=1.5e10, cores=2, tile_s=3e-4,
    block_keys=512, softmax_dims=16.0, pass_s=1e-3, wire_cores=0.5, received_dims=10.0,
)  # fmt: skip


def times_of(cluster: Cluster) -> dict[str, float]:
    """Return the seconds of every measurement on a machine with these constants."""
    seconds = {"copy": COPIED * COPY_BYTES / 1.5e10, "pass": cluster.pass_s, "alone": 0.01, "crowd": 0.02}
    for number, shape in enumerate(SHAPES):
        problem = shape.problem("float32")
        for name in ("forward", "backward"):
            work = call_work(problem, shape.table(), name == "backward", cluster.block_keys)
            seconds[f"{name} {number}"] = work_s(problem, work, cluster, name == "backward", shape.received)
    for nbytes in MESSAGE_BYTES:
        seconds[f"message {nbytes}"] = cluster.latency_s + nbytes / cluster.bandwidth
        seconds[f"processor message {nbytes}"] = seconds[f"message {nbytes}"] * cluster.wire_cores
    return seconds


@pytest.mark.parametrize(
    "reference", [REFERENCE, replace(REFERENCE, block_keys=0, softmax_dims=0.0, tile_s=0.0, received_dims=0.0)]
)
def test_the_fit_recovers_the_constants(reference: Cluster) -> None:
    constants, kernel, link = constants_of(times_of(reference), "float32", 1, 4)
    for key, value in constants.items():
        assert value == pytest.approx(getattr(reference, key), rel=1e-6, abs=1e-9), key
    assert max(map(abs, (*kernel.errors, *link.errors))) < 1e-6
    fixed = {"ranks_per_node", "node_bandwidth", "node_latency_s", "pcie_bandwidth", "sms",
             "peer_bandwidth", "node_peer_bandwidth", "sync_s", "message_sms", "state_passes"}  # fmt: skip
    assert set(constants) == set(UNITS) - fixed


def test_noise_changes_the_fitted_rates_little() -> None:
    rng = np.random.default_rng(0)
    noisy = {name: value * (1 + 0.05 * rng.standard_normal()) for name, value in times_of(REFERENCE).items()}
    constants, kernel, _ = constants_of(noisy, "float32", 1, 4)
    assert constants["block_keys"] == 512
    # Five costs are fitted to 36 samples with an error of 5 %, so the error of a rate is about 5 % / sqrt(7). The
    # errors of `flops` and `softmax_dims` compensate each other, so compare the rate that follows from both.
    for sizes in (64, 128):
        rate = constants["flops"] / (sizes + constants["softmax_dims"])
        assert rate == pytest.approx(REFERENCE.flops / (sizes + REFERENCE.softmax_dims), rel=0.1)
    assert 0.01 < kernel.median_error < 0.1


def test_costs_are_never_negative() -> None:
    columns = np.array([[1.0, 1.0], [1.0, 2.0], [1.0, 4.0]])
    falling = np.array([3.0, 2.0, 1.0])
    costs = least_squares(columns, falling, np.ones(3))
    assert costs[1] == 0 and costs[0] == pytest.approx(2)
    assert link_fit((0, 1000), (1e-3, 2e-3)).constants == pytest.approx({"latency_s": 1e-3, "bandwidth": 1e6})
    with pytest.raises(RingError, match="did not grow with the work"):
        link_fit((1000, 2000), (2e-3, 1e-3))


def test_short_calls_count_as_much_as_long_ones() -> None:
    columns, seconds = np.array([[1.0], [1.0]]), np.array([1.0, 1000.0])
    # The sum of the relative squared errors, (c - 1)^2 + (c / 1000 - 1)^2, has its minimum at
    # c = (1 + 1 / 1000) / (1 + 1 / 1000^2).
    assert least_squares(columns, seconds, seconds)[0] == pytest.approx(1.001 / 1.000001)


def test_a_result_is_the_median_over_rounds_of_the_mean_over_ranks() -> None:
    ranks = [{"seconds": {"copy": [1.0, 9.0, 3.0, 2.0]}}, {"seconds": {"copy": [3.0, 9.0, 3.0, 2.0]}}]
    assert finalized(ranks) == {"copy": 2.5}  # the means are 2, 9, 3 and 2


def test_the_shapes_vary_in_every_cost() -> None:
    assert {shape.dim for shape in SHAPES} == {32, 64, 128} and {shape.causal for shape in SHAPES} == {False, True}
    sixteen = Shape(64, 64, tiles=16)
    work = call_work(sixteen.problem("float32"), sixteen.table(), False, 0)
    assert (work.tiles, work.calls, work.pairs) == (16, 1, 16 * 64 * 64 * 4)
    (tile,) = Shape(512, 512, causal=True).table()
    assert computed_pairs(tile.q.positions, tile.k.positions, tile.band, 512) == 512 * 512


def test_received_queries_are_measured_as_passes_compute_them(monkeypatch: pytest.MonkeyPatch) -> None:
    # For received queries, their owner sends delta instead of the output, and the engine gets dlse = -delta.
    engine, calls = AtenEngine(torch.device("cpu")), list[BackwardInputs]()
    monkeypatch.setattr(engine, "attend_grad", lambda q, kv, inputs, *rest: calls.append(inputs))
    for is_received in (False, True):
        shape = Shape(16, 16, 1, 1, received=is_received)
        calibration._passes(engine, shape, torch.device("cpu"), "float32")[1]()
    local, received = calls
    assert local.dlse is None and local.out.any()
    assert received.dlse is not None and torch.equal(received.dlse, -received.delta) and not received.out.any()


def test_every_time_of_the_fit_is_measured() -> None:
    def on_rank(ring: Ring) -> set[str]:
        works = calibration._works(ring, "float32", {NEAR: (1 - ring.rank, 1 - ring.rank)})
        for name in ("forward 0", "backward 0", "backward 14", "copy", "message 1024", "pass", "crowd"):
            works[name]()
        assert ring.counters()["messages"] == 0  # an empty pass sends nothing
        return set(works)

    assert run_ranks(2, on_rank) == [{name for name in times_of(REFERENCE) if not name.startswith("processor")}] * 2


@pytest.mark.slow
def test_the_command_writes_a_calibrated_cluster(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "here.json"
    assert main(["calibrate", "rounds=1", "transport=gloo", f"out='{out}'"]) == 0
    printed = capfd.readouterr().out
    assert "round 1 of 1" in printed and "FLOP/s" in printed and f"cluster={out}" in printed
    content = json.loads(out.read_text())
    cluster = cluster_named(str(out))
    assert cluster.calibrated and cluster.flops > 0 and cluster.cores and "calibrated" in cluster.name
    assert content["units"] == UNITS and content["torch"] == torch.__version__ and content["ranks"] == 2
    assert len(content["fit"]["kernel"]["errors"]) == 2 * len(SHAPES)


def test_wrong_options_are_refused_before_measuring(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(InputError, match="ranks=2: there are 1 GPUs; use fewer ranks, or transport=shm"):
        calibrate.main(["transport=nccl"])
    with pytest.raises(InputError, match="ranks=1"):
        calibrate.main(["ranks=1"])
    with pytest.raises(InputError, match="dtype=float8: choose one of"):
        calibrate.main(["transport=gloo", "dtype=float8"])
    with pytest.raises(InputError, match="its folder does not exist"):
        calibrate.main(["transport=gloo", f"out='{tmp_path / 'no' / 'file.json'}'"])


def test_options_are_parsed_as_by_hydra() -> None:
    """Options have the same syntax without Hydra as with it: `calibrate` must run without Hydra."""
    for arguments in (
        ["ranks=3", "dtype=bf16", "rounds=2"],
        ["dtype=null", "out='with a blank.json'"],
        ["transport=gloo", 'out="x.json"'],
    ):
        assert load_plain(arguments, CalibrateConfig) == load(arguments, CalibrateConfig), arguments


@pytest.mark.slow
def test_the_command_runs_without_hydra() -> None:
    """`calibrate` runs where Hydra is not installed, because GPU machines without a network may not have it."""
    program = """
import sys
class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.split('.')[0] in ('hydra', 'omegaconf', 'matplotlib', 'jinja2'):
            raise ModuleNotFoundError(name)
sys.meta_path.insert(0, Absent())
from ringattn.cli import main
sys.exit(main(["calibrate", "ranks=1"]))
"""
    done = python("-c", program)
    assert done.returncode == 2
    assert done.stderr.splitlines()[1:] == ["ringattn calibrate: ranks=1: must be at least 2"]


def test_a_fit_reports_the_error_of_each_measurement() -> None:
    seconds = times_of(REFERENCE)
    seconds["forward 3"] *= 2
    _, kernel, _ = constants_of(seconds, "float32", 1, 4)
    assert max(kernel.errors) == kernel.errors[6] > 0.5  # forward and backward alternate
    assert calibrate._errors(kernel)["greatest_error"] == kernel.errors[6]


def test_the_benchmark_of_predictions_simulates_the_plans_that_run(monkeypatch: pytest.MonkeyPatch) -> None:
    assert len(prediction.SHAPES) == 10
    for shape in prediction.SHAPES:
        for backward in (False, True):
            plans = timed_calls.plans_of(shape, 2, backward)
            assert all(plan.backward == backward for plan in plans)
            simulated_s = simulate(plans, REFERENCE).total_us / 1e6
            assert simulated_s >= timed_calls.processor_s(plans, replace(REFERENCE, wire_cores=0.0)) - 1e-9
    errors = run_ranks(2, lambda ring: timed_calls.TimedCall(ring, prediction.SHAPES[6].small(2)).gate())
    assert max(errors) < 1e-5
    monkeypatch.setitem(timed_calls.BOUND, torch.float32, min(errors) / 2)
    with pytest.raises(GateError, match="nothing is measured"):
        run_ranks(2, lambda ring: timed_calls.TimedCall(ring, prediction.SHAPES[6].small(2)).gate())


@pytest.mark.slow
def test_the_benchmark_of_predictions_runs(tmp_path: Path) -> None:
    constants = tmp_path / "constants.json"
    constants.write_text(json.dumps({"constants": asdict(REFERENCE)}))
    data = prediction.main([f"cluster={constants}", "ranks=2", "shapes=1", "repeats=1", f"results={tmp_path}"])
    page = (tmp_path / "prediction.md").read_text()
    assert "the bar is 10%" in page and "made up" in page and len(data["samples"][2]) == 1
