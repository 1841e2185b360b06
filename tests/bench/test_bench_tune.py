"""Tuning of block sizes: what is tried, what is kept, what it goes on from; and a rehearsal in Triton's interpreter."""

from __future__ import annotations

import json
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch

pytest.importorskip("triton")
from ringattn.bench import tune
from ringattn.bench.crash_proof import JobFailed
from ringattn.bench.tune import Case, Timed, TuneOptions, cost, promising
from ringattn.engine.plain import PlainEngine
from ringattn.kernels.launch import Config
from tests.bench.test_bench_gpu import rehearsed

TUNED = ["dims=64", "forms=pointers", "kernels=forward,grad_kv", "limit=3", "workers=0"]
FASTEST = Config(128, 128, 8, 2, "pointers")


class Tries:
    """In the place of a worker: times of candidates by their blocks; of those that hang, none. Notes what was asked."""

    asked: ClassVar[list[tuple[str, Config]]] = []
    hang: ClassVar[set[Config]] = set()
    wrong: ClassVar[set[Config]] = set()

    def __enter__(self) -> Tries:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def ask(self, job: Any, case: Case, config: Config, *given: Any, limit_s: float) -> Any:
        self.asked.append((job.__name__, config))
        if job is tune.wrong:
            return "full mask: out is off" if config in self.wrong else None
        if config in self.hang:
            raise JobFailed("no answer within 60 s")
        return Timed(config, (1e6 / config.block_m, 1e6 / config.block_n), spills=8)


@pytest.fixture
def tries(monkeypatch: pytest.MonkeyPatch) -> type[Tries]:
    monkeypatch.setattr(tune, "Worker", Tries)
    for name, empty in (("asked", []), ("hang", set()), ("wrong", set())):
        monkeypatch.setattr(Tries, name, empty)
    return Tries


def tuned(folder: Path, *words: str) -> Any:
    tune.main([*TUNED, f"results={folder}", *words])
    return json.loads((folder / "tune.json").read_text())["candidates"]


def test_spills_reject_no_candidate(monkeypatch: pytest.MonkeyPatch) -> None:
    """Times decide: the table's own dK/dV entry spills with one compiler, and those that spill may be the fastest."""
    handles = [SimpleNamespace(name=name, spills=n) for name, n in (("_forward", 2), ("_grad_q", 99), ("_grad_kv", 8))]
    spilling = SimpleNamespace(handles=lambda: handles, clear=lambda: None)
    monkeypatch.setattr(tune, "kept", spilling)
    monkeypatch.setattr(tune, "with_config", lambda case, config: PlainEngine())
    small = TuneOptions(tokens=8, heads=2, batch=1, dtype="float32")
    found = tune.run(Case("grad_kv", 16, "pointers"), FASTEST, small, True)
    assert len(found.us) == 2 and min(found.us) > 0 and found.spills == 8 and not found.failed
    assert tune.run(Case("forward", 16, "pointers"), FASTEST, small, False).spills == 2


def test_a_broken_context_ends_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """A candidate that fails is a result; where the device fails from then on, the error leaves the job."""
    monkeypatch.setattr(tune, "with_config", lambda case, config: 1 / 0)
    small = TuneOptions(tokens=8, heads=2, batch=1, dtype="float32")
    given = Case("forward", 16, "pointers"), FASTEST, small, True
    assert tune.run(*given).failed == "ZeroDivisionError: division by zero"

    def synchronize() -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", synchronize)
    with pytest.raises(RuntimeError, match="illegal memory access"):
        tune.run(*given)


def test_tuning_goes_on_where_it_ended(tries: type[Tries], tmp_path: Path) -> None:
    tries.hang.add(FASTEST)
    first = tuned(tmp_path)
    assert {name: len(rows) for name, rows in first.items()} == {"forward/64/pointers": 3, "grad_kv/64/pointers": 3}
    (hung,) = (row for row in first["forward/64/pointers"] if tuple(row["config"]) == FASTEST)
    assert hung["us"] == [] and hung["failed"] == "no answer within 60 s"
    tries.asked.clear()
    assert tuned(tmp_path) == first and tries.asked == []
    more = tuned(tmp_path, "limit=5")
    assert [name for name, _ in tries.asked].count("run") == 4 and len(more["forward/64/pointers"]) == 5
    tries.asked.clear()
    tuned(tmp_path, "tokens=4096")
    assert [name for name, _ in tries.asked].count("run") == 6


def test_each_candidate_is_kept_at_once(tries: type[Tries], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def stopped(self: Tries, job: Any, case: Case, config: Config, *given: Any, limit_s: float) -> Any:
        if len(self.asked) == 2:
            raise KeyboardInterrupt
        return asked(self, job, case, config, *given, limit_s=limit_s)

    asked = Tries.ask
    monkeypatch.setattr(Tries, "ask", stopped)
    with pytest.raises(KeyboardInterrupt):
        tuned(tmp_path)
    (rows,) = json.loads((tmp_path / "tune.json").read_text())["candidates"].values()
    assert [Config(*row["config"]) for row in rows] == [config for _, config in tries.asked] and len(rows) == 2


def test_what_the_budget_cuts_off_has_not_failed(
    tries: type[Tries], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def slow(self: Tries, *given: Any, limit_s: float) -> Any:
        assert limit_s <= 0.2
        time.sleep(limit_s)
        raise JobFailed(f"no answer within {limit_s:.0f} s")

    monkeypatch.setattr(Tries, "ask", slow)
    assert tuned(tmp_path, "budget_s=0.2") == {}


def test_the_fastest_right_one_is_written(tries: type[Tries], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written: dict[str, Config] = {}
    monkeypatch.setattr(tune, "put_config", lambda arch, dim, form, kernel, config: written.update({kernel: config}))
    found = tuned(tmp_path, "write=true", "kernels=forward")["forward/64/pointers"]
    fastest = min(found, key=lambda row: sum(row["us"]))
    assert written == {"forward": Config(*fastest["config"])} and fastest["right"] and fastest["spills"] == 8
    assert fastest["config"][:2] == [128, 128]
    tries.wrong.add(Config(*fastest["config"]))
    again = tuned(tmp_path, "write=true", "kernels=forward", "ms=21")["forward/64/pointers"]
    (bad,) = (row for row in again if row["config"] == fastest["config"])
    assert written["forward"] != Config(*fastest["config"]) and bad["failed"] == "full mask: out is off"


@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize(("kernel", "blocks"), [("forward", (128, 128)), ("grad_kv", (64, 128)), ("grad_q", (128, 64))])
def test_what_promises_most_is_tried_first(kernel: str, blocks: tuple[int, int], dim: int) -> None:
    """dK and dV with 64 key rows for each group of warps, out and dQ with 64 query rows: within the first ten."""
    order = promising(kernel, dim, "descriptors")
    assert (*blocks, 8, 2, "descriptors") in order[:10]
    assert len(order) == len(set(order)) == 64
    assert [cost(kernel, dim, config) for config in order] == sorted(cost(kernel, dim, config) for config in order)


@pytest.mark.slow
def test_tune(tmp_path: Path) -> None:
    words = ("tokens=64", "batch=1", "heads=1", "dims=64", "forms=pointers,gluon", "kernels=forward,grad_q", "limit=2")
    found = rehearsed("ringattn.bench.tune", tmp_path, *words, "workers=1", "dtype=float16")
    assert set(found["candidates"]) == {"forward/64/pointers", "grad_q/64/pointers"}
    for rows in found["candidates"].values():
        assert len(rows) == 2 and all(len(row["us"]) == 2 for row in rows)
        assert [row["right"] for row in sorted(rows, key=lambda row: sum(row["us"]))] == [True, False]
