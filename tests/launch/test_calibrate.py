"""Calibration: constants that made up the times are found again, and the command measures, writes and refuses."""

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


def made_up(cluster: Cluster) -> dict[str, float]:
    """What a machine with these constants would take."""
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
def test_constants_are_found_again(reference: Cluster) -> None:
    found, kernel, link = constants_of(made_up(reference), "float32", 1, 4)
    for key, value in found.items():
        assert value == pytest.approx(getattr(reference, key), rel=1e-6, abs=1e-9), key
    assert max(map(abs, (*kernel.errors, *link.errors))) < 1e-6
    fixed = {"ranks_per_node", "node_bandwidth", "node_latency_s", "pcie_bandwidth", "sms",
             "peer_bandwidth", "node_peer_bandwidth", "sync_s", "message_sms", "state_passes"}  # fmt: skip
    assert set(found) == set(UNITS) - fixed


def test_noise_moves_rates_little() -> None:
    rng = np.random.default_rng(0)
    noisy = {name: value * (1 + 0.05 * rng.standard_normal()) for name, value in made_up(REFERENCE).items()}
    found, kernel, _ = constants_of(noisy, "float32", 1, 4)
    assert found["block_keys"] == 512
    # 36 samples with an error of 5 %, five costs: a rate is off by some 5 % / sqrt(7), dims and rate trade off.
    for sizes in (64, 128):
        rate = found["flops"] / (sizes + found["softmax_dims"])
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
    columns, wanted = np.array([[1.0], [1.0]]), np.array([1.0, 1000.0])
    # The relative squares (c - 1)^2 + (c / 1000 - 1)^2 are least at (1 + 1 / 1000) / (1 + 1 / 1000^2).
    assert least_squares(columns, wanted, wanted)[0] == pytest.approx(1.001 / 1.000001)


def test_a_figure_is_the_median_of_its_rounds() -> None:
    ranks = [{"seconds": {"copy": [1.0, 9.0, 3.0, 2.0]}}, {"seconds": {"copy": [3.0, 9.0, 3.0, 2.0]}}]
    assert finalized(ranks) == {"copy": 2.5}  # means 2, 9, 3, 2


def test_shapes_tell_costs_apart() -> None:
    assert {shape.dim for shape in SHAPES} == {32, 64, 128} and {shape.causal for shape in SHAPES} == {False, True}
    sixteen = Shape(64, 64, tiles=16)
    work = call_work(sixteen.problem("float32"), sixteen.table(), False, 0)
    assert (work.tiles, work.calls, work.pairs) == (16, 1, 16 * 64 * 64 * 4)
    (tile,) = Shape(512, 512, causal=True).table()
    assert computed_pairs(tile.q.positions, tile.k.positions, tile.band, 512) == 512 * 512


def test_received_queries_are_measured_as_passes_compute_them(monkeypatch: pytest.MonkeyPatch) -> None:
    # The output of a received query stays with its owner: delta comes, as the gradient of its lse.
    engine, seeds = AtenEngine(torch.device("cpu")), list[BackwardInputs]()
    monkeypatch.setattr(engine, "attend_grad", lambda q, kv, seed, *rest: seeds.append(seed))
    for received in (False, True):
        shape = Shape(16, 16, 1, 1, received=received)
        calibration._passes(engine, shape, torch.device("cpu"), "float32")[1]()
    own, other = seeds
    assert own.dlse is None and own.out.any()
    assert other.dlse is not None and torch.equal(other.dlse, -other.delta) and not other.out.any()


def test_everything_that_is_fitted_is_measured() -> None:
    def on_rank(ring: Ring) -> set[str]:
        works = calibration._works(ring, "float32", {NEAR: (1 - ring.rank, 1 - ring.rank)})
        for name in ("forward 0", "backward 0", "backward 14", "copy", "message 1024", "pass", "crowd"):
            works[name]()
        assert ring.counters()["messages"] == 0  # an empty pass sends nothing
        return set(works)

    assert run_ranks(2, on_rank) == [{name for name in made_up(REFERENCE) if not name.startswith("processor")}] * 2


@pytest.mark.slow
def test_the_command(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "here.json"
    assert main(["calibrate", "rounds=1", "transport=gloo", f"out='{out}'"]) == 0
    shown = capfd.readouterr().out
    assert "round 1 of 1" in shown and "FLOP/s" in shown and f"cluster={out}" in shown
    described = json.loads(out.read_text())
    cluster = cluster_named(str(out))
    assert cluster.calibrated and cluster.flops > 0 and cluster.cores and "calibrated" in cluster.name
    assert described["units"] == UNITS and described["torch"] == torch.__version__ and described["ranks"] == 2
    assert len(described["fit"]["kernel"]["errors"]) == 2 * len(SHAPES)


def test_what_cannot_be_measured_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(InputError, match="ranks=2: there are 1 GPUs; use fewer ranks, or transport=shm"):
        calibrate.main(["transport=nccl"])
    with pytest.raises(InputError, match="ranks=1"):
        calibrate.main(["ranks=1"])
    with pytest.raises(InputError, match="dtype=float8: choose one of"):
        calibrate.main(["transport=gloo", "dtype=float8"])
    with pytest.raises(InputError, match="its folder does not exist"):
        calibrate.main(["transport=gloo", f"out='{tmp_path / 'no' / 'file.json'}'"])


def test_words_are_read_as_hydra_reads_them() -> None:
    """`calibrate` runs where there is no Hydra, and understands what other commands do."""
    for words in (
        ["ranks=3", "dtype=bf16", "rounds=2"],
        ["dtype=null", "out='with a blank.json'"],
        ["transport=gloo", 'out="x.json"'],
    ):
        assert load_plain(words, CalibrateConfig) == load(words, CalibrateConfig), words


@pytest.mark.slow
def test_no_hydra_is_needed() -> None:
    """On a GPU machine without a network there is none."""
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


def test_fits_say_how_far_they_are_off() -> None:
    seconds = made_up(REFERENCE)
    seconds["forward 3"] *= 2
    _, kernel, _ = constants_of(seconds, "float32", 1, 4)
    assert max(kernel.errors) == kernel.errors[6] > 0.5  # forward and backward alternate
    assert calibrate._errors(kernel)["greatest_error"] == kernel.errors[6]


def test_the_bench_predicts_what_the_ranks_run(monkeypatch: pytest.MonkeyPatch) -> None:
    assert len(prediction.SHAPES) == 10
    for shape in prediction.SHAPES:
        for backward in (False, True):
            plans = timed_calls.plans_of(shape, 2, backward)
            assert all(plan.backward == backward for plan in plans)
            alone = simulate(plans, REFERENCE)
            assert alone.total_us / 1e6 >= timed_calls.processor_s(plans, replace(REFERENCE, wire_cores=0.0)) - 1e-9
    error = run_ranks(2, lambda ring: timed_calls.TimedCall(ring, prediction.SHAPES[6].small(2)).gate())
    assert max(error) < 1e-5
    monkeypatch.setitem(timed_calls.BOUND, torch.float32, min(error) / 2)
    with pytest.raises(GateError, match="nothing is measured"):
        run_ranks(2, lambda ring: timed_calls.TimedCall(ring, prediction.SHAPES[6].small(2)).gate())


@pytest.mark.slow
def test_the_bench_runs(tmp_path: Path) -> None:
    constants = tmp_path / "constants.json"
    constants.write_text(json.dumps({"constants": asdict(REFERENCE)}))
    data = prediction.main([f"cluster={constants}", "ranks=2", "shapes=1", "repeats=1", f"results={tmp_path}"])
    page = (tmp_path / "prediction.md").read_text()
    assert "the bar is 10%" in page and "made up" in page and len(data["samples"][2]) == 1
