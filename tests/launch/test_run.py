"""`ringattn run`: its options, what it measures and what it does not time, on threads; then processes, and nodes."""

from __future__ import annotations

import os
import shlex
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ringattn.engine.select import ENGINES
from ringattn.errors import InputError, OutOfMemoryError
from ringattn.launch.measure import point
from ringattn.launch.measure.environment import code_version, environment
from ringattn.launch.measure.points import MEASURED
from ringattn.launch.measure.run import load_here, main
from ringattn.launch.measure.run_config import (
    MaskConfig,
    MeasuredCall,
    RunConfig,
    call_of,
    from_spec,
    load_run,
    resolved,
    spec_of,
    words_of,
)
from ringattn.launch.measure.sweep import SweepConfig
from ringattn.launch.options import leaves, presets_of
from ringattn.launch.train.config import load_train
from ringattn.ring import Ring
from ringattn.schedule.routes import ROUTES
from ringattn.testing import run_ranks
from tests.contract.ports import free_port

ROOT = Path(__file__).resolve().parents[2]
TINY = ["shape=small", "tokens=120", "warmup=1", "repeats=2"]

OPTIONS = """
ranks nnodes node_rank rdzv_endpoint tokens tokens_per_rank batch layout dtype backward warmup repeats seed
threads_per_rank timeout_s limit_s cluster shape.heads shape.kv_heads shape.head_dim mask.kind mask.window_tokens
mask.documents mask.branches mask.segment_tokens mask.ratio schedule.name transport.name engine.name
""".split()
SWEEP_OPTIONS = """
out launcher preset slurm.partition slurm.account slurm.gpus_per_node slurm.cpus_per_task slurm.mem_gb
slurm.array_parallelism slurm.setup
""".split()


def ringattn(
    *words: str, env: dict[str, str] | None = None, module: Sequence[str] = ("ringattn",)
) -> subprocess.CompletedProcess[str]:
    """The command as a user runs it."""
    inside = {"RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"}
    clean = {key: value for key, value in os.environ.items() if key not in inside}
    return subprocess.run(
        [sys.executable, "-m", *module, *words], cwd=ROOT, env={**clean, "PYTHONPATH": str(ROOT), **(env or {})},
        capture_output=True, text=True, timeout=280,
    )  # fmt: skip


# --- options ---------------------------------------------------------------------------------------------------------


def test_the_options_are_these() -> None:
    # They are a promise to scripts: a new one belongs here, an old one leaves with a decision.
    assert [leaf for leaf, _, _ in leaves(RunConfig())] == OPTIONS
    assert [leaf for leaf, _, _ in leaves(SweepConfig())] == SWEEP_OPTIONS


def test_groups_are_the_lists_of_the_runtime() -> None:
    assert presets_of(RunConfig, "schedule") == ["auto", *ROUTES]
    assert presets_of(RunConfig, "engine") == list(ENGINES)
    assert presets_of(RunConfig, "transport") == ["auto", "shm", "gloo", "nccl", "peer"]
    assert presets_of(RunConfig, "shape") == ["llama70b", "llama8b", "small"]
    for group in ("schedule", "engine", "transport", "mask", "shape"):
        for name in presets_of(RunConfig, group):
            chosen = getattr(load_run([f"{group}={name}"]), group)
            assert group == "shape" or name in (getattr(chosen, "name", None), getattr(chosen, "kind", None))


@pytest.mark.parametrize("words", [["mask=window", "mask.window_tokens=7"], ["mask.window_tokens=7", "mask=window"]])
def test_a_key_is_laid_over_its_preset(words: list[str]) -> None:
    assert load_run(words).mask == MaskConfig("window", window_tokens=7)


def test_a_group_of_one_command_leaves_the_keys_of_another() -> None:
    assert load_run(["schedule=direct"]).schedule.name == "direct"
    assert load_train(["schedule=direct"]).schedule == "direct"  # a plain key there, a group here


def test_words_and_specs_give_the_same_run_again() -> None:
    words = ["mask=dilated", "mask.branches=2", "shape=llama8b", "tokens_per_rank=40", "ranks=3", "backward=false",
             "engine=plain", "threads_per_rank=2", "rdzv_endpoint=node0:29400"]  # fmt: skip
    config = load_run(words)
    assert config.tokens == 120
    assert load_run(words_of(config)) == config == from_spec(spec_of(config))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("shedule=ring", "shedule: no such key; did you mean schedule?"),
        ("mask.window_tokens=5", "mask.window_tokens=5: has no effect with mask=causal; it goes with mask=window"),
        ("mask=full mask.documents=16", "mask.documents=16: has no effect with mask=full; it goes with mask=documents"),
        ("mask.windowtokens=3", "mask.windowtokens: no such key; did you mean mask.window_tokens?"),
        ("schedule=rign", "schedule=rign: choose one of auto, ring, all_gather"),
        ("repeats=0", "repeats=0: must be at least 1"),
        ("shape.heads=6 shape.kv_heads=4", "shape.kv_heads=4: does not divide shape.heads=6"),
        ("ranks=9 tokens=8", "ranks=9: 9 ranks are more than tokens=8"),
        ("ranks=3 nnodes=3 rdzv_endpoint=a:1 tokens=8", "9 ranks are more than tokens=8"),
        ("tokens=8 tokens_per_rank=4", "give it or tokens=8, not both"),
        ("layout=per_document", "layout=per_document: needs documents; use mask=documents"),
        ("nnodes=2 node_rank=2 rdzv_endpoint=a:1", "nodes are numbered from 0"),
        ("nnodes=2", "nnodes=2: needs rdzv_endpoint=host:port"),
        ("rdzv_endpoint=node0", "rdzv_endpoint=node0: write host:port"),
        ("cluster=h1000", "cluster=h1000: "),
        ("tokens=8,16", "tokens: one value at a time; run `ringattn sweep` instead"),
    ],
)
def test_mistakes_in_options(words: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words.split()) == 2
    assert message in capsys.readouterr().err


def test_torchrun_says_how_many_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "4")
    place = point_place()
    assert load_here(["tokens_per_rank=10"], place).tokens == 40
    assert load_here(["ranks=2", "nnodes=2", "tokens=40"], place).world_size == 4
    with pytest.raises(InputError, match="ranks=2: torchrun started 4"):
        load_here(["ranks=2"], place)
    with pytest.raises(InputError, match="without torchrun, for it starts its own ranks"):
        load_here(["tokens=8,16"], place)


def point_place() -> Any:
    from ringattn.launch.ranks import place_in_torchrun

    return place_in_torchrun()


# --- what is measured ------------------------------------------------------------------------------------------------


def measured(words: Sequence[str], ranks: int) -> list[dict[str, Any]]:
    config = load_run([*TINY, *words, f"ranks={ranks}"])
    return run_ranks(ranks, lambda ring: point.measure(ring, config, lambda line: None), engine=config.engine.name)


def kept_pairs(mask: str, tokens: int) -> int:
    """Pairs of a head, counted one by one."""
    return {
        "full": sum(1 for _ in range(tokens) for _ in range(tokens)),
        "causal": sum(1 for q in range(tokens) for k in range(tokens) if k <= q),
        "window": sum(1 for q in range(tokens) for k in range(tokens) if 0 <= q - k < 50),
        "documents": sum(1 for q in range(tokens) for k in range(tokens) if k <= q and k // 15 == q // 15),
    }[mask]


@pytest.mark.parametrize("mask", ["full", "causal", "window", "documents"])
def test_facts_of_a_point(mask: str) -> None:
    size = ["mask.window_tokens=50"] if mask == "window" else []
    config = load_run([*TINY, f"mask={mask}", *size, "schedule=ring", "ranks=2", "cluster=h100"])
    planned = []

    def on_rank(ring: Ring) -> dict[str, Any]:
        found = point.measure(ring, config, lambda line: None)
        if ring.rank == 0:
            options, documents = call_of(config).options(120), call_of(config).documents(120)
            seq = ring.sequence(120, cu_seqlens=documents, for_="causal" if documents else mask)
            shape = {"q_heads": 4, "kv_heads": 2, "head_dim": 32, "dtype": torch.float32}
            planned.append(ring.explain(seq, schedule="ring", **shape, **options))
        return found

    facts = run_ranks(2, on_rank)
    assert facts[0] == facts[1]
    found, told = facts[0], planned[0]
    assert set(found) == {*MEASURED, "environment"}
    assert found["bytes_sent"] == list(told.bytes_sent) and found["messages"] == list(told.messages)
    slots = [max(plan.arena_bytes for plan in plans) for plans in zip(*told.plans, strict=True)]
    assert found["predicted"]["pool_bytes"] == slots
    assert max(found["error"].values()) <= 1e-5 and set(found["error"]) == {"out", "dq", "dk", "dv"}
    both_s = 120 / found["tokens_per_s"]
    assert found["pass_ms"]["median"] == pytest.approx(both_s * 1e3)  # one definition of the time and of the rate
    assert found["tflops"] == pytest.approx(3.5 * 4 * 32 * 4 * kept_pairs(mask, 120) / both_s / 1e12)
    assert found["forward_ms"]["samples"] == found["backward_ms"]["samples"] == 2


def test_no_backward_is_asked_for() -> None:
    found = measured(["backward=false", "schedule=ring", "cluster=h100"], 2)[0]
    assert found["backward_ms"] is None and found["predicted"]["backward_ms"] is None
    with_backward = measured(["schedule=ring"], 2)[0]
    assert all(mine < both for mine, both in zip(found["bytes_sent"], with_backward["bytes_sent"], strict=True))


@pytest.mark.parametrize("words", [["mask=dilated", "schedule=sub_rings"], ["dtype=bf16"], ["dtype=fp64"]])
def test_other_calls_are_measured_too(words: list[str]) -> None:
    found = measured(words, 3)[0]
    assert max(found["error"].values()) < (0.1 if words == ["dtype=bf16"] else 1e-5)
    assert len(found["peak_bytes"]) == 3


def test_times_are_of_the_slowest_rank() -> None:
    planned = {"pairs": 1, "predicted": {}}
    exposed = {"forward": 0.0, "backward": 0.0, "overlap": 1.0, "arrivals_known": True}
    rank = {"exposed": exposed, "planned": planned, "environment": {}, "bytes_sent": 0, "messages": 0, "peak_bytes": 0,
            "pool_bytes": 0}  # fmt: skip
    times_s = [[0.001, 0.002], [0.004, 0.002]], [[0.003, 0.001], [0.002, 0.005]]
    found = point._facts(resolved(RunConfig(tokens=10)), [{**rank, "times_s": one} for one in times_s])
    assert found["forward_ms"] == pytest.approx({"median": 3.5, "p10": 3.1, "p90": 3.9, "samples": 2})
    assert found["backward_ms"]["median"] == pytest.approx(3.5)
    assert found["pass_ms"]["median"] == pytest.approx(7.0) and found["tokens_per_s"] == pytest.approx(10 / 0.007)


def test_what_a_recorder_heard_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    @contextmanager
    def recording(ring: Ring) -> Iterator[SimpleNamespace]:
        yield SimpleNamespace(exposed_us=1000.0 * (ring.rank + 1), overlap=0.5 - ring.rank / 4,
                              arrivals_known=ring.rank == 0)  # fmt: skip

    monkeypatch.setattr(Ring, "recording", recording)
    found = measured([], 2)[0]
    assert found["exposed_ms"] == {"forward": [1.0, 2.0], "backward": [1.0, 2.0]} and found["overlap"] == 0.25
    assert found["arrivals_known"] is False  # not on all ranks
    found = measured(["backward=false"], 2)[0]
    assert found["exposed_ms"] == {"forward": [1.0, 2.0], "backward": None} and found["overlap"] == 0.25


@pytest.mark.parametrize("wrong", [1e-4, float("nan")])
def test_nothing_is_timed_behind_a_closed_gate(monkeypatch: pytest.MonkeyPatch, wrong: float) -> None:
    exact = point.attended
    timed: list[object] = []
    monkeypatch.setattr(point, "attended", lambda *given: [exact(*given)[0], *(x + wrong for x in exact(*given)[1:])])
    monkeypatch.setattr(point, "_timed_pass", lambda *given: timed.append(given))
    with pytest.raises(point.GateError, match=r"off are dq by .*, dk by .*, dv by .*; nothing is measured"):
        measured([], 2)
    assert not timed


def test_the_gate_sees_a_smaller_mask_of_the_same_kind() -> None:
    window = MeasuredCall(MaskConfig("window", window_tokens=1024), "zigzag", "ring", 4096)
    assert window.options(4096) == {"causal": True, "window": (1023, 0)}
    assert window.options(256) == {"causal": True, "window": (63, 0)}
    dilated = MeasuredCall(MaskConfig("dilated", segment_tokens=2048, ratio=4, branches=2), "zigzag", "ring", 8192)
    assert dilated.options(256) == {"causal": True, "segment_lengths": (64, 256), "dilation_rates": (1, 4)}
    documents = MeasuredCall(MaskConfig("documents", documents=3), "zigzag", "ring", 8192)
    assert documents.documents(251) == [0, 83, 167, 251]


def test_a_shortage_of_memory_is_called_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def short(*given: object) -> None:
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes")

    monkeypatch.setattr(point, "_inputs", short)
    with pytest.raises(OutOfMemoryError, match=r"no memory for 120 tokens on 1 ranks.*use fewer tokens or more ranks"):
        point.on_rank({"config": spec_of(load_run(TINY)), "quiet": True})


def test_the_environment_names_no_machine() -> None:
    told = str(environment()) + code_version()
    assert socket.gethostname() not in told and str(Path.home()) not in told and str(ROOT) not in told


def test_the_code_version_is_the_commit_only_of_this_checkout(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from ringattn.launch.measure import environment as room

    monkeypatch.setattr(room, "PACKAGE", tmp_path)
    subprocess.run(["git", "init", "-q", tmp_path], check=True)  # a wheel in somebody else's checkout
    assert code_version.__wrapped__() == (room._version("ringattn") or "unknown")


# --- processes -------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_printed_command_does_what_run_does() -> None:
    words = ["run", "ranks=2", *TINY, "schedule=ring"]
    done = ringattn(*words, "--dry-run")
    command = done.stdout.strip()
    assert "-m torch.distributed.run --standalone --nproc-per-node=2 -m ringattn.launch.run" in command, done.stderr
    repeated = subprocess.run(["bash", "-c", command], cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)},
                              capture_output=True, text=True, timeout=280)  # fmt: skip
    assert repeated.returncode == 0, repeated.stderr
    for line in ("gate: exact at a small size", "ranks         2\n", "tokens        120\n", "pass 3 of 3"):
        assert repeated.stdout.count(line) == 1  # by one rank alone


@pytest.mark.slow
def test_two_nodes_meet_at_an_endpoint() -> None:
    meeting = f"rdzv_endpoint=127.0.0.2:{free_port()}"
    words = ["-m", "ringattn", "run", "ranks=1", "nnodes=2", meeting, *TINY]
    agents = [
        subprocess.Popen([sys.executable, *words, f"node_rank={rank}"], cwd=ROOT, text=True, stdout=subprocess.PIPE,
                         stderr=subprocess.PIPE, env={**os.environ, "PYTHONPATH": str(ROOT)})
        for rank in (1, 0)
    ]  # fmt: skip
    (other, _), (first, errors) = (agent.communicate(timeout=280) for agent in agents)
    assert [agent.returncode for agent in agents] == [0, 0], errors
    assert "ranks         2\n" in first and other == ""
    assert shlex.split(first.partition("sent")[2].partition("MiB")[0])[0] != "0.0"
