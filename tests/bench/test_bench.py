"""The benchmarks: the gate bites, every contender is exact, and every entry runs at a tiny size."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from ringattn.bench import clock, dilated, memory, speed
from ringattn.bench.baselines import Flash, OurRing, independent, one_process
from ringattn.bench.gate import Baseline, GateError, open_gate, random_inputs, reference
from ringattn.bench.options import parse
from ringattn.bench.processes import run_in_processes
from ringattn.bench.report import Table
from ringattn.bench.speed import STAGES, stages
from ringattn.errors import InputError, RingError
from ringattn.ring import Ring
from ringattn.testing import run_ranks

SMALL = random_inputs(24, 4, 2, 8, torch.float32)


def silent(line: str) -> None:
    """Shows nothing."""


# --- the gate --------------------------------------------------------------------------------------------------------


def spoil_out(out: Tensor, grads: list[Tensor]) -> None:
    out[0, 5, 1, 3] += 1e-3


def spoil_dv(out: Tensor, grads: list[Tensor]) -> None:
    grads[2][0, 2, 1, 0] += 1e-3


def put_nan(out: Tensor, grads: list[Tensor]) -> None:
    out[0, 0] = float("nan")


def lose_a_row(out: Tensor, grads: list[Tensor]) -> None:
    grads[0] = grads[0][:, 1:]


class Spoiled(Flash):
    """One process with something wrong in its answer."""

    def __init__(self, spoil: Callable[[Tensor, list[Tensor]], None]) -> None:
        super().__init__("spoiled", slice(None), slice(None))
        self._spoil = spoil

    def forward(self) -> Tensor:
        out, self._grads = super().forward().clone(), [x.clone() for x in super().backward()]
        self._spoil(out, self._grads)
        return out

    def backward(self) -> tuple[Tensor, Tensor, Tensor]:
        dq, dk, dv = self._grads
        return dq, dk, dv


def test_gate_is_green_for_what_is_right() -> None:
    errors = open_gate([one_process(0), Spoiled(lambda out, grads: None)], SMALL)
    assert max(errors.values()) < 1e-5


@pytest.mark.parametrize("spoil", [spoil_out, spoil_dv, put_nan, lose_a_row])
def test_gate_bites(spoil: Callable[[Tensor, list[Tensor]], None]) -> None:
    with pytest.raises(GateError, match="nothing is measured"):
        open_gate([Spoiled(spoil)], SMALL)


# --- baselines ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "make",
    [
        OurRing,
        lambda ring: OurRing(ring, "striped", "all_gather"),
        lambda ring: OurRing(ring, backward=False),
        lambda ring: one_process(ring.rank),
        lambda ring: independent(ring.rank, ring.world_size, 4, 2),
    ],
)
def test_contenders_are_exact(make: Callable[[Ring], Baseline]) -> None:
    errors = run_ranks(2, lambda ring: open_gate([make(ring)], SMALL))
    assert all(error < 1e-5 for by_name in errors for error in by_name.values())


def test_stages_add_up_and_go_away() -> None:
    together = threading.Barrier(2, timeout=30)

    def on_rank(ring: Ring) -> tuple[dict[str, float], Tensor, Tensor]:
        ours = OurRing(ring)
        ours.load(SMALL)
        # Stages are of a process: of two ranks that are threads of one, only one may wrap its functions.
        with stages(ring) if ring.rank == 0 else nullcontext({}) as seconds:
            out = ours.forward()
            ours.backward()
            together.wait()
        together.wait()
        before = dict(seconds)
        ours.forward()
        assert seconds == before
        return seconds, out, ours.positions

    # Two ranks, for one has nothing to merge.
    found = run_ranks(2, on_rank)
    assert tuple(found[0][0]) == STAGES
    assert found[0][0]["block kernel"] > 0 and found[0][0]["merge"] > 0
    for _, out, positions in found:
        torch.testing.assert_close(out.double(), reference(SMALL).out[:, positions], atol=1e-5, rtol=0.0)


# --- clock, options, processes ---------------------------------------------------------------------------------------


def test_disturbed_samples_are_set_aside() -> None:
    quiet, loud = clock.Sample(1.0, 1.0, 0.01), clock.Sample(3.0, 1.1, 0.9)
    assert clock.kept([loud, quiet, quiet, quiet, loud]) == [quiet] * 3
    assert clock.kept([loud, loud]) == [loud]
    assert clock.wall([loud, quiet, loud, quiet]) == 1.0


def test_samples_join_the_ranks() -> None:
    [sample] = clock.samples([[(2.0, 1.5, 3.5)], [(2.1, 1.0, 0.0)]])
    assert sample == clock.Sample(2.0, 1.5, 0.5)


def test_options() -> None:
    options = parse(speed.SpeedOptions(), ["length_tokens=64", "layout=striped"])
    assert options == replace(speed.SpeedOptions(), length_tokens=64, layout="striped")
    assert parse(memory.MemoryOptions(), ["pool_ranks=2,4"]).pool_ranks == (2, 4)
    with pytest.raises(InputError, match=r"^lenght_tokens: .*length_tokens="):
        parse(speed.SpeedOptions(), ["lenght_tokens=3"])
    with pytest.raises(InputError, match=r"^repeats: expected int, got 'many'"):
        parse(speed.SpeedOptions(), ["repeats=many"])


@pytest.mark.slow
def test_failing_ranks_raise_here() -> None:
    with pytest.raises(RingError, match="no_such_function"):
        run_in_processes(1, "ringattn.bench.speed:no_such_function", {}, silent)


def test_table_is_markdown() -> None:
    lines = Table("t", ("a", "bb"), [("ccc", "d")], ["- n"]).markdown().splitlines()
    assert lines == ["### t", "", "| a   | bb |", "| --- | -- |", "| ccc | d  |", "", "- n"]


# --- the entries, tiny -----------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_speed(tmp_path: Path) -> None:
    data = speed.main(["length_tokens=256", "heads=2", "kv_heads=2", "head_dim=16", "repeats=2", f"results={tmp_path}"])
    assert set(data["samples"]) == {"one process", "ringattn ring", "torch ring (alltoall)", "no exchange"}
    assert all(len(by_pass[name]) == 2 for by_pass in data["samples"].values() for name in speed.PASSES)
    assert max(data["largest_error"].values()) < 1e-5
    page = (tmp_path / "speed.md").read_text()
    assert "by processor time" in page and str(tmp_path) not in page


@pytest.mark.slow
def test_dilated(tmp_path: Path) -> None:
    words = ["length_tokens=512", "ranks=2", "heads=2", "head_dim=16", "base_length=64", "long_tokens=1024",
             "repeats=1", "tokens_per_rank=256", "memory_ranks=2"]  # fmt: skip
    data = dilated.main([*words, f"results={tmp_path}"])
    rows = {row["schedule"]: (row["rows_a_head"], row["bytes_sent"]) for row in data["planned"]}
    assert rows == {
        "ring": (5376, 16_515_072),
        "all_gather": (3072, 9_437_184),
        "direct": (3072, 9_437_184),
        "sub_rings": (4352, 13_369_344),
        # (2048 + 1536 + 896) / 2; a quarter are outputs, in float32 or bfloat16, each with its lse
        "all_to_all": (2240, 6_881_280 + 12 * 1120 * (128 + 4)),
        "all_to_all, outputs in bfloat16": (2240, 6_881_280 + 12 * 1120 * 4),
        "full attention, ring": (917_504, 2_818_572_288),
    }
    (found,) = data["by_ranks"].values()
    # Half the tokens' pairs of 64 with 64 and their branches, against all pairs.
    assert [rank["pairs"]["full"] for rank in found] == [2 * 256 * 512] * 2
    assert sum(rank["pairs"]["dilated"] for rank in found) == 2 * 512 * (64 + 32 + 16 + 8)
    assert (tmp_path / "dilated.md").read_text().count("### ") == 4
    assert all(rank["slot_bytes"] > 0 for ranks in data["memory"].values() for rank in ranks)


@pytest.mark.slow
def test_memory(tmp_path: Path) -> None:
    words = ["length_tokens=1024", "methods=ring,ring with backward", "pool_ranks=4,8",
             "pool_tokens_per_rank=32", f"results={tmp_path}"]  # fmt: skip
    data = memory.main(words)
    forward, both = data["weights"]
    assert forward["storages_bytes"] < both["storages_bytes"]
    for record in (forward, both):
        assert 0.8 < record["storages_bytes"] / sum(record["predicted"].values()) < 1.2
    assert (tmp_path / "memory.png").stat().st_size > 10_000
    small, large = data["pools"]
    assert small["measured"] == large["measured"] == large["ring backward"]
