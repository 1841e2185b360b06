"""`ringattn run` and `check`: options, measurements, processes and nodes; `timeout_s` of every command."""

from __future__ import annotations

import inspect
import os
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import ringattn as package
from ringattn import masks
from ringattn.engine.select import ENGINES
from ringattn.errors import InputError, OutOfMemoryError
from ringattn.explain import Explanation
from ringattn.launch.calls import RunConfig, load_run, resolved, words_of
from ringattn.launch.capacity.plan import PlanConfig
from ringattn.launch.config import load
from ringattn.launch.doctor.doctor import DoctorConfig
from ringattn.launch.measure import calibration, check, exactness, point
from ringattn.launch.measure.calibrate import CalibrateConfig
from ringattn.launch.measure.check import Case, CheckConfig
from ringattn.launch.measure.environment import code_version, environment
from ringattn.launch.measure.points import MEASURED
from ringattn.launch.measure.run import load_here, main
from ringattn.launch.measure.run import table as table_of_point
from ringattn.launch.measure.sweep import SweepConfig
from ringattn.launch.options import leaves, presets_of
from ringattn.launch.pictures import show, timeline
from ringattn.launch.pictures.show import ExplainConfig
from ringattn.launch.pictures.timeline import TimelineConfig
from ringattn.launch.ranks import place_in_torchrun
from ringattn.launch.train.config import TrainConfig
from ringattn.launch.train.mesh import opened_mesh
from ringattn.options import AttentionOptions
from ringattn.ring import Ring
from ringattn.schedule.routes import NUMBERED, ROUTES
from ringattn.testing import run_ranks
from ringattn.transport.local import LocalTransport
from ringattn.transport.location import VARIABLE, Location
from tests.contract.processes import free_port
from tests.covering import parts
from tests.launch.commands import environment as environment_of
from tests.launch.commands import process_of_rank, ringattn, started, wait_for_line, write_calibration

ROOT = Path(__file__).resolve().parents[2]
TINY = ["shape=small", "tokens=120", "warmup=1", "repeats=2"]

OPTIONS = """
tokens batch heads kv_heads head_dim dtype causal window layout schedule backward scale softcap sinks alibi_slopes
dropout_p dropout_seed mask documents cu_seqlens
segment_lengths dilation_rates ranks tokens_per_rank engine transport warmup repeats seed nnodes node_rank
rdzv_endpoint threads_per_rank timeout_s limit_s cluster json
""".split()
SWEEP_OPTIONS = """
out launcher preset slurm.partition slurm.account slurm.gpus_per_node slurm.cpus_per_task slurm.mem_gb
slurm.array_parallelism slurm.setup
""".split()


# --- options ---------------------------------------------------------------------------------------------------------


def test_the_options_of_run_and_sweep() -> None:
    # Scripts depend on these keys. List a new key here; removing a key needs a decision record.
    assert [leaf for leaf, _, _ in leaves(RunConfig())] == OPTIONS
    assert [leaf for leaf, _, _ in leaves(SweepConfig())] == SWEEP_OPTIONS


def test_every_softmax_option_is_a_key_of_every_call() -> None:
    """Every command with calls has every option of `AttentionOptions` as a key."""
    names = {option.name for option in fields(AttentionOptions)}
    for schema in (RunConfig, ExplainConfig, TimelineConfig):
        assert names <= {leaf for leaf, _, _ in leaves(schema())}
    config = load_run(["softcap=2", "sinks=[1,2]", "heads=2"])
    assert config.softmax() == {"softcap": 2.0, "sinks": [1.0, 2.0]} and load_run(words_of(config)) == config


def test_choices_are_those_of_the_runtime() -> None:
    choices = {key: field.metadata.get("choices") for key, _, field in leaves(RunConfig())}
    assert (
        choices["schedule"] == ("auto", *ROUTES, *(f"{name}:N" for name in NUMBERED)) and choices["engine"] == ENGINES
    )
    assert choices["transport"] == ("auto", "shm", "gloo", "nccl", "peer")


def test_a_key_overrides_its_preset() -> None:
    assert presets_of("shape") == ["llama70b", "llama8b", "small"]
    for options in (["shape=llama8b", "heads=16"], ["heads=16", "shape=llama8b"]):
        config = load_run(options)
        assert (config.heads, config.kv_heads, config.head_dim) == (16, 8, 128)


@pytest.mark.parametrize("schema", [RunConfig, CheckConfig, ExplainConfig, PlanConfig, TrainConfig, TimelineConfig])
def test_no_key_has_the_name_of_a_folder_of_presets(schema: Any) -> None:
    """Hydra would read such a key as the choice of a preset."""
    keys = {leaf for leaf, _, _ in leaves(schema())}
    assert not keys & {folder.name for folder in (ROOT / "launch" / "conf").iterdir()}


def test_the_words_of_a_run_load_the_same_run() -> None:
    options = ["segment_lengths=[64,128]", "dilation_rates=[1,2]", "shape=llama8b", "tokens_per_rank=40", "ranks=3",
               "backward=false", "engine=plain", "threads_per_rank=2", "nnodes=2",
               "rdzv_endpoint=node0:29400"]  # fmt: skip
    config = load_run(options)
    assert config.tokens == 240
    assert load_run(words_of(config)) == config


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("mask=window", "mask='window': 'window' is not a mask; choose one of chunked"),
        ("mask=prefixes:3", "mask='prefixes:3': 'prefixes' is not a mask"),
        ("mask=prefix:3 causal=false", "mask=prefix:3: has no effect with causal=false"),
        (
            "mask='bidirectional_blocks:3,9' causal=false",
            "mask=bidirectional_blocks:3,9: has no effect with causal=false",
        ),
        ("mask=global_tokens:3", "mask=global_tokens:3: has no effect without a window"),
        ("layout=mask", "layout=mask: places tokens for a mask that needs no window; set mask"),
        ("layout=mask mask=global_tokens:3 window=[5,0]", "layout=mask: places tokens for a mask that needs no window"),
        ("mask='slices:0-5x0-5f'", "mask=slices:0-5x0-5f: attends to later keys; set causal=false"),
        ("mask='slices:0-5x0-5b'", "this mask has no smaller form; use ringattn explain"),
        ("mask='by_head:4=;4=chunked:3'", "this mask has no smaller form; use ringattn explain"),
        ("mask=tree:0", "mask=tree:0: a tree of 0 tokens"),
        ("mask='tree:20(10,10)' tokens=7", "tokens=7: mask=tree:20(10,10) has 40 tokens; leave tokens out"),
        ("window=[5]", "window=[5]: write the keys before and after the query"),
        ("segment_lengths=[64]", "segment_lengths: needs dilation_rates; give both or neither"),
        ("dilation_rates=[1]", "dilation_rates: needs segment_lengths; give both or neither"),
        (
            "segment_lengths=[64] dilation_rates=[1] window=[5,0]",
            ("dilated branches cannot be combined with a mask or a window"),
        ),
        ("cu_seqlens=[0,9] documents=2", "cu_seqlens=[0,9]: give either it or documents=2"),
        ("cu_seqlens=[0,9] tokens=8", "tokens=8: cu_seqlens ends at 9; leave tokens out"),
        ("segment_lengths=[0] dilation_rates=[1]", "segment_lengths must be positive whole numbers, got 0"),
        ("cu_seqlens=[]", "cu_seqlens=[]: write the boundaries"),
        ("dropout_p=0.5", "dropout_p=0.5: give both dropout_p and dropout_seed, a number, or neither"),
        ("sinks=[1,2]", "sinks: 2 numbers for heads=8; give one for each query head"),
        ("softcap=-1", "softcap must be positive and finite"),
        ("repeats=0", "repeats=0: must be at least 1"),
        ("heads=6 kv_heads=4", "kv_heads=4: must divide heads=6"),
        ("ranks=9 tokens=8", "ranks=9: 9 ranks are more than tokens=8"),
        ("ranks=3 nnodes=3 rdzv_endpoint=a:1 tokens=8", "9 ranks are more than tokens=8"),
        ("tokens=8 tokens_per_rank=4", "give either it or tokens=8"),
        ("layout=per_document", "layout=per_document: needs documents; use documents=8"),
        ("nnodes=2 node_rank=2 rdzv_endpoint=a:1", "must be from 0 to 1, because nnodes=2"),
        ("nnodes=2", "nnodes=2: node_rank and rdzv_endpoint are missing. "),
        ("nnodes=2 node_rank=1", "`ringattn run tokens=4096 ranks=1 nnodes=2 node_rank=0 rdzv_endpoint=HOST:PORT`"),
        ("ranks=3 nnodes=2 rdzv_endpoint=a:1 tokens=64", "nnodes=2: node_rank is missing. Each node has its own"),
        (
            "ranks=3 nnodes=2 rdzv_endpoint=a:1 tokens=64",
            "Run on node 0: `ringattn run tokens=64 ranks=3 nnodes=2 node_rank=0 rdzv_endpoint=a:1`, and on each other "
            "node the same command with node_rank=1",
        ),
        ("nnodes=3 rdzv_endpoint=a:1", "with node_rank=1 to node_rank=2"),
        ("nnodes=2 rdzv_endpoint=node0", "rdzv_endpoint=node0: write host:port"),
        ("rdzv_endpoint=a:1", "rdzv_endpoint=a:1: applies only to several nodes; add nnodes="),
        ("node_rank=0", "node_rank=0: applies only to several nodes; add nnodes="),
        ("cluster=h1000", "cluster=h1000: "),
        ("tokens=8,16", "tokens: one value at a time; run `ringattn sweep` instead"),
    ],
)
def test_mistakes_in_options(options: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(options.split()) == 2
    assert message in capsys.readouterr().err


def test_the_number_of_ranks_comes_from_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "4")
    place = place_in_torchrun()
    assert load_here(["tokens_per_rank=10"], place).tokens == 40
    assert load_here(["ranks=2", "nnodes=2", "tokens=40"], place).world_size == 4
    two_nodes = ["ranks=2", "nnodes=2", "node_rank=1", "rdzv_endpoint=a:1", "tokens=40"]  # as --dry-run prints them
    assert load_here(two_nodes, place).rdzv_endpoint == ""
    with pytest.raises(InputError, match=r"^rdzv_endpoint=a:1: applies only to several nodes"):
        load_here(["rdzv_endpoint=a:1"], place)
    with pytest.raises(InputError, match="ranks=2: torchrun started 4"):
        load_here(["ranks=2"], place)
    with pytest.raises(InputError, match="without torchrun, because it starts its own ranks"):
        load_here(["tokens=8,16"], place)


# --- measurements ----------------------------------------------------------------------------------------------------


def measure(options: Sequence[str], ranks: int) -> list[dict[str, Any]]:
    """Measure a point on ranks that are threads, and return each rank's result."""
    config = load_run([*TINY, *options, f"ranks={ranks}"])
    return run_ranks(ranks, lambda ring: point.measure(ring, config, lambda line: None), engine=config.engine)


def count_pairs(mask: str, tokens: int) -> int:
    """Return the number of pairs of query and key that a mask allows in a head, counted one by one."""
    return {
        "full": sum(1 for _ in range(tokens) for _ in range(tokens)),
        "causal": sum(1 for q in range(tokens) for k in range(tokens) if k <= q),
        "window": sum(1 for q in range(tokens) for k in range(tokens) if 0 <= q - k < 50),
        "documents": sum(1 for q in range(tokens) for k in range(tokens) if k <= q and k // 15 == q // 15),
    }[mask]


@pytest.mark.parametrize("mask", ["full", "causal", "window", "documents"])
def test_the_facts_of_a_point_match_its_plan(mask: str) -> None:
    by_mask = {"full": "causal=false", "causal": "causal=true", "window": "window=[49,0]", "documents": "documents=8"}
    config = load_run([*TINY, by_mask[mask], "schedule=ring", "ranks=2", "cluster=h100"])
    explanations = []

    def on_rank(ring: Ring) -> dict[str, Any]:
        facts = point.measure(ring, config, lambda line: None)
        if ring.rank == 0:
            options, documents = config.options(120), config.cu_seqlens_at(120)
            seq = ring.sequence(120, cu_seqlens=documents, for_="causal" if documents else mask)
            shape = {"q_heads": 4, "kv_heads": 2, "head_dim": 32, "dtype": torch.float32}
            explanations.append(ring.explain(seq, schedule="ring", **shape, **options))
        return facts

    facts, facts_of_rank_1 = run_ranks(2, on_rank)
    assert facts == facts_of_rank_1
    (explanation,) = explanations
    assert set(facts) == {*MEASURED, "environment"}
    assert facts["bytes_sent"] == list(explanation.bytes_sent) and facts["messages"] == list(explanation.messages)
    slots = [max(plan.arena_bytes for plan in plans) for plans in zip(*explanation.plans, strict=True)]
    assert facts["predicted"]["pool_bytes"] == slots
    assert max(facts["error"].values()) <= 1e-5 and set(facts["error"]) == {"out", "dq", "dk", "dv"}
    both_s = 120 / facts["tokens_per_s"]
    assert facts["pass_ms"]["median"] == pytest.approx(both_s * 1e3)  # the rate uses the same time
    assert facts["tflops"] == pytest.approx(3.5 * 4 * 32 * 4 * count_pairs(mask, 120) / both_s / 1e12)
    assert facts["forward_ms"]["samples"] == facts["backward_ms"]["samples"] == 2


KINDS: list[dict[str, Any]] = [
    {"causal": False}, {"window": [9, 0]}, {"documents": 3}, {"segment_lengths": [24], "dilation_rates": [1]},
]  # fmt: skip


@pytest.mark.parametrize("mask", KINDS, ids=lambda mask: next(iter(mask)))
def test_commands_with_the_same_keys_plan_the_same_call(mask: dict[str, Any]) -> None:
    """With layout=auto, `explain` and `timeline` choose the layout that `run` measures."""
    call = {"tokens": 120, "heads": 4, "kv_heads": 2, "head_dim": 8, "dtype": "fp32", "ranks": 2, **mask}
    config = RunConfig(**call, warmup=1, repeats=1)

    def on_rank(ring: Ring) -> tuple[dict[str, Any], Explanation]:
        return point.measure(ring, config, lambda line: None), timeline.explanation_on(ring, TimelineConfig(**call))

    facts, recorded = run_ranks(2, on_rank)[0]
    for explanation in (show.explanation_of(ExplainConfig(**call)), recorded):
        planned = {"layout": explanation.problem.q_layout.name, "schedule": explanation.schedule}
        assert planned == {key: facts["resolved"][key] for key in planned}
        assert list(explanation.bytes_sent) == facts["bytes_sent"]


def test_backward_false_measures_only_forward() -> None:
    facts = measure(["backward=false", "schedule=ring", "cluster=h100"], 2)[0]
    assert facts["backward_ms"] is None and facts["predicted"]["backward_ms"] is None
    with_backward = measure(["schedule=ring"], 2)[0]
    assert all(forward < both for forward, both in zip(facts["bytes_sent"], with_backward["bytes_sent"], strict=True))


def test_a_calibration_predicts_only_its_transport(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    monkeypatch.chdir(tmp_path)
    write_calibration(tmp_path, "shm")
    facts = measure([], 2)[0]  # ranks are threads, whose transport is "local"
    assert facts["predicted"] is None
    assert "calibrated for shm, but messages use local; run `ringattn calibrate" in facts["not_predicted"]
    table = table_of_point(load_run([*TINY, "ranks=2"]), facts)
    assert f"predicted     {facts['not_predicted']}" in table
    write_calibration(tmp_path, "local")
    facts = measure([], 2)[0]
    assert facts["predicted"]["cluster"] == "this machine" and facts["not_predicted"] == ""
    single = measure(["schedule=ring"], 1)[0]  # sends no messages, so every calibration applies
    assert single["predicted"]["cluster"] == "this machine"


def test_a_calibration_predicts_no_ring_on_several_nodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    monkeypatch.chdir(tmp_path)
    write_calibration(tmp_path, "local")
    locations = tuple(Location(f"host-{rank}", f"boot/{rank}", rank, 0) for rank in range(2))
    monkeypatch.setattr(LocalTransport, "locations", locations)
    facts = measure([], 2)[0]
    assert facts["predicted"] is None
    assert facts["not_predicted"].startswith("none: a calibration covers one machine, and these ranks run on several")


@pytest.mark.parametrize(
    "options",
    [
        ["segment_lengths=[64,256]", "dilation_rates=[1,4]", "schedule=sub_rings"],
        ["dtype=bf16"],
        ["dtype=fp64"],
        ["mask=chunked:32"],
        ["mask=prefix:16"],
        ["mask='prefix:16,3'", "documents=2"],
        ["mask='tree:40(50,30)'", "layout=mask", "schedule=all_gather"],
        ["mask=global_tokens:4", "window=[15,0]"],
        ["mask='bidirectional_blocks:3,19,30,110'", "window=[15,0]"],
        ["softcap=2.0", "sinks=[0.5,-1,2,0]", "alibi_slopes=[0.5,0.25,0.125,0.0625]", "documents=2"],
        ["dropout_p=0.3", "dropout_seed=7", "scale=0.5"],
        ["segment_lengths=[64,256]", "dilation_rates=[1,4]", "softcap=2.0"],
    ],
)
def test_calls_with_other_options_are_measured(options: list[str]) -> None:
    facts = measure(options, 3)[0]  # raises GateError if the call is not exact
    assert set(facts["error"]) == {"out", "dq", "dk", "dv"} and all(error > 0 for error in facts["error"].values())
    assert len(facts["peak_bytes"]) == 3


def test_times_are_those_of_the_slowest_rank() -> None:
    planned = {"pairs": 1, "predicted": {}, "not_predicted": "", "resolved": {}}
    exposed = {"forward": 0.0, "backward": 0.0, "overlap": 1.0, "arrivals_known": True}
    rank = {"exposed": exposed, "planned": planned, "environment": {}, "bytes_sent": 0, "messages": 0, "peak_bytes": 0,
            "pool_bytes": 0}  # fmt: skip
    times_s = [[0.001, 0.002], [0.004, 0.002]], [[0.003, 0.001], [0.002, 0.005]]
    facts = point._facts(resolved(RunConfig(tokens=10)), [{**rank, "times_s": times} for times in times_s])
    assert facts["forward_ms"] == pytest.approx({"median": 3.5, "p10": 3.1, "p90": 3.9, "samples": 2})
    assert facts["backward_ms"]["median"] == pytest.approx(3.5)
    assert facts["pass_ms"]["median"] == pytest.approx(7.0) and facts["tokens_per_s"] == pytest.approx(10 / 0.007)


def test_the_facts_include_recorded_waits_and_overlap(monkeypatch: pytest.MonkeyPatch) -> None:
    @contextmanager
    def recording(ring: Ring) -> Iterator[SimpleNamespace]:
        yield SimpleNamespace(exposed_us=1000.0 * (ring.rank + 1), overlap=0.5 - ring.rank / 4,
                              arrivals_known=ring.rank == 0)  # fmt: skip

    monkeypatch.setattr(Ring, "recording", recording)
    facts = measure([], 2)[0]
    assert facts["exposed_ms"] == {"forward": [1.0, 2.0], "backward": [1.0, 2.0]} and facts["overlap"] == 0.25
    assert facts["arrivals_known"] is False  # only rank 0 knows them
    facts = measure(["backward=false"], 2)[0]
    assert facts["exposed_ms"] == {"forward": [1.0, 2.0], "backward": None} and facts["overlap"] == 0.25


@pytest.mark.parametrize("error", [1e-4, float("nan")])
def test_nothing_is_timed_if_the_gate_fails(monkeypatch: pytest.MonkeyPatch, error: float) -> None:
    exact = point.attended
    timed: list[object] = []
    monkeypatch.setattr(point, "attended", lambda *args: [exact(*args)[0], *(x + error for x in exact(*args)[1:])])
    monkeypatch.setattr(point, "_timed_pass", lambda *args: timed.append(args))
    with pytest.raises(point.GateError, match=r"the error is .* in dq, .* in dk, .* in dv; nothing is measured"):
        measure([], 2)
    assert not timed


def test_the_gate_uses_a_smaller_mask_of_the_same_kind() -> None:
    window = load_run(["window=[1023,0]", "tokens=4096"])
    assert window.options(4096) == {"causal": True, "window": (1023, 0)}
    assert window.options(256) == {"causal": True, "window": (63, 0)}
    open_ended = load_run(["window=[-1,99]", "tokens=1k", "causal=false"])
    assert open_ended.options(100) == {"causal": False, "window": (None, 9)}
    dilated = load_run(["segment_lengths=[2048,8192]", "dilation_rates=[1,4]", "tokens=8192"])
    assert dilated.options(256) == {"causal": True, "segment_lengths": [64, 256], "dilation_rates": [1, 4]}
    assert load_run(["documents=3", "tokens=8192"]).cu_seqlens_at(251) == [0, 83, 167, 251]
    assert load_run(["cu_seqlens=[0,100,1000]"]).cu_seqlens_at(500) == [0, 50, 500]
    for text, smaller in (("chunked:8k", "chunked:250"), ("prefix:100", "prefix:3"), ("prefix:0", "prefix:0")):
        assert load_run([f"mask={text}", "tokens=32k"]).options(1000)["mask"] == masks.from_text(smaller)
    assert load_run(["mask='prefix:100,'", "tokens=32k"]).options(1000)["mask"] == masks.prefix([3])
    tree = load_run(["mask='tree:1k(2*500(100),0)'"])
    assert tree.tokens == 2200 and load_run(words_of(tree)) == tree
    assert tree.options(110)["mask"] == masks.tree([-1, 0, 1, 0, 3, 0], [50, 25, 5, 25, 5, 0])


def test_a_failed_allocation_is_an_out_of_memory_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: object) -> None:
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes")

    monkeypatch.setattr(point, "_inputs", fail)
    with pytest.raises(OutOfMemoryError, match=r"no memory for 120 tokens on 1 ranks.*use fewer tokens or more ranks"):
        point.on_rank({"config": asdict(load_run(TINY)), "quiet": True})


def test_the_environment_names_no_machine() -> None:
    text = str(environment()) + code_version()
    assert socket.gethostname() not in text and str(Path.home()) not in text and str(ROOT) not in text


def test_the_code_version_is_a_commit_only_in_this_checkout(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from ringattn.launch.measure import environment as environment_module

    monkeypatch.setattr(environment_module, "PACKAGE", tmp_path)
    subprocess.run(["git", "init", "-q", tmp_path], check=True)  # a wheel inside another repository
    assert code_version.__wrapped__() == (environment_module._version("ringattn") or "unknown")


# --- processes -------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_command_of_dry_run_measures_the_same_point() -> None:
    done = ringattn("run", "ranks=2", *TINY, "schedule=ring", "--dry-run")
    command = done.stdout.strip()
    assert "-m torch.distributed.run --standalone --nproc-per-node=2 -m ringattn run " in command, done.stderr
    repeated = subprocess.run(["bash", "-c", command], cwd=ROOT, env=environment_of(), capture_output=True, text=True,
                              timeout=280)  # fmt: skip
    assert repeated.returncode == 0, repeated.stderr
    for line in ("exactness check at a small size: exact", "ranks         2\n", "tokens        120\n", "pass 3 of 3"):
        assert repeated.stdout.count(line) == 1  # only rank 0 prints


@pytest.mark.slow
def test_two_nodes_connect_at_an_endpoint() -> None:
    endpoint = f"rdzv_endpoint=127.0.0.2:{free_port()}"
    arguments = ["-m", "ringattn", "run", "ranks=1", "nnodes=2", endpoint, *TINY]
    agents = [started(*arguments, f"node_rank={rank}") for rank in (1, 0)]
    (output_1, _), (output_0, errors) = (agent.communicate(timeout=280) for agent in agents)
    assert [agent.returncode for agent in agents] == [0, 0], errors
    assert "ranks         2\n" in output_0 and output_1 == ""
    assert shlex.split(output_0.partition("sent")[2].partition("MiB")[0])[0] != "0.0"


# --- `ringattn check` ------------------------------------------------------------------------------------------------


ALL_CASES, PAIRED_CASES = list(check.cases()), list(check.paired_cases())
FEW_CASES = [
    Case("full", "contiguous", "ring"),
    Case("causal", "contiguous", "ring"),
    Case("causal", "zigzag", "ring"),
    Case("causal", "zigzag", "direct"),
]
CHECK_OPTIONS = ["transport=local", "ranks=2", "tokens=13", "dtype=fp64", "head_dim=8", "value_dim=8"]


@pytest.fixture(autouse=True)
def few_cases(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let `ringattn check` run only `FEW_CASES`."""
    monkeypatch.setattr(check, "cases", lambda: iter(FEW_CASES))


def run_check(capsys: pytest.CaptureFixture[str], *options: str, code: int) -> list[list[str]]:
    """Run the command, assert its exit code, and return the columns of each printed line."""
    assert check.main([*CHECK_OPTIONS, *options]) == code
    return [line.split() for line in capsys.readouterr().out.splitlines()]


def test_check_prints_a_line_for_each_schedule(capsys: pytest.CaptureFixture[str]) -> None:
    lines = run_check(capsys, code=0)
    assert [line[:4] for line in lines[2:]] == [
        ["ring", "2", "2", "3"],  # masks, layouts, cases
        ["direct", "1", "1", "1"],
        ["4", "cases,", "all", "exact"],
    ]
    for line in lines[2:4]:
        assert all(float(error) < 1e-10 for error in line[4:8]) and line[8] == "exact"


def test_check_places_tokens_for_trees_and_slices() -> None:
    layouts = {mask: {case.layout for case in ALL_CASES if case.mask == mask} for mask in ("causal tree", "slices")}
    assert all(names == {"contiguous", "zigzag", "striped", "mask"} for names in layouts.values())


def test_paired_cases_cover_every_pair_of_values_of_all_cases() -> None:
    pairs, covered = (set().union(*(parts(case, 2) for case in cases)) for cases in (ALL_CASES, PAIRED_CASES))
    assert covered == pairs and len(PAIRED_CASES) < len(ALL_CASES) / 3


def test_combinations_pairs_checks_the_paired_cases(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(check, "paired_cases", lambda: iter(FEW_CASES[:1]))
    assert run_check(capsys, "combinations=pairs", code=0)[-1] == ["1", "cases,", "all", "exact"]


def test_verbose_prints_every_case(capsys: pytest.CaptureFixture[str]) -> None:
    rows = [line[:3] for line in run_check(capsys, "verbose=true", code=0)[2:-1]]
    assert rows == [[case.mask, case.layout, case.schedule] for case in FEW_CASES]


def test_a_wrong_case_shows_the_cases_of_its_schedule(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    exact = exactness.attended

    def wrong_with_direct(ring, case, *rest):  # type: ignore[no-untyped-def]
        out, *grads = exact(ring, case, *rest)
        return [out * float("nan") if case.schedule == "direct" else out, *grads]

    monkeypatch.setattr(exactness, "attended", wrong_with_direct)
    lines = run_check(capsys, code=1)
    assert lines[2][0] == "ring" and lines[2][-1] == "exact"
    assert lines[3][:5] == ["direct", "1", "1", "1", "nan"] and lines[3][-4:] == ["1", "OVER", "THEIR", "BOUND"]
    assert lines[5][:4] == ["causal", "zigzag", "direct", "nan"] and lines[5][-1] == "OVER"
    assert lines[-1] == ["4", "cases,", "1", "exceed", "their", "bound"]


class Opened(Exception):
    """Raised instead of opening a ring. Its argument is the option of the ring that a test compares."""


@pytest.mark.parametrize(("option", "opened"), [("nccl", "nccl"), ("peer", "peer"), ("gloo", "gloo"), ("local", "shm")])
def test_processes_open_the_given_transport(option: str, opened: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def open_ring(transport: str, **_: object) -> None:
        raise Opened(transport)

    monkeypatch.setattr("ringattn.Ring", open_ring)
    with pytest.raises(Opened, match=f"^{opened}$"):
        check.worker({"transport": option, "engine": "plain", "timeout_s": 5.0})


# --- `timeout_s` of every command that starts ranks ------------------------------------------------------------------


CONFIGS = (RunConfig, TrainConfig, CheckConfig, TimelineConfig, CalibrateConfig, DoctorConfig)


@pytest.mark.parametrize("schema", CONFIGS)
def test_every_command_has_the_timeout_of_ring(schema: Any) -> None:
    keys = {key: field for key, _, field in leaves(schema()) if key.rpartition(".")[2] == "timeout_s"}
    assert list(keys) == ["timeout_s"] and "timeout_s" in inspect.signature(package.Ring).parameters
    assert keys["timeout_s"].metadata["about"] == "deadline of every wait for another rank, in seconds"


WORKERS: Mapping[str, Callable[[], Any]] = {
    "run": lambda: point.on_rank({"config": asdict(load_run(["timeout_s=7"])), "quiet": True}),
    "check": lambda: check.worker({"transport": "shm", "engine": "plain", "timeout_s": 7.0}),
    "timeline": lambda: timeline.worker({"timeout_s": 7.0, "transport": "auto"}),
    "calibrate": lambda: calibration.worker({"timeout_s": 7.0, "transport": "auto"}),
    "train": lambda: opened_mesh(load(["timeout_s=7"], TrainConfig, "train")).__enter__(),
}


@pytest.mark.parametrize("open_ring", WORKERS.values(), ids=WORKERS)
def test_the_ring_receives_timeout_s(open_ring: Callable[[], Any], monkeypatch: pytest.MonkeyPatch) -> None:
    def raise_opened(*_: Any, **options: Any) -> None:
        raise Opened(options["timeout_s"])

    for module in (package, point, sys.modules[opened_mesh.__module__]):
        monkeypatch.setattr(module, "Ring", raise_opened)
    with pytest.raises(Opened, match=r"^7"):
        open_ring()


@pytest.mark.slow
@pytest.mark.parametrize(
    "arguments",
    [
        "run ranks=2 tokens=64 shape=small repeats=1000000 transport=shm",
        "train ranks=2 tokens=64 model=tiny steps=1000000 transport=gloo",
    ],
)
def test_a_stopped_rank_of_a_command_is_reported_as_silent(tmp_path: Path, arguments: str) -> None:
    command = started("-m", "ringattn", *arguments.split(), "timeout_s=10", "threads_per_rank=1", cwd=tmp_path)
    wait_for_line(command, "pass " if arguments.startswith("run") else "2 x fp32  step ")  # the ranks exchange messages
    os.kill(process_of_rank(1, command.pid), signal.SIGSTOP)
    stopped_s = time.monotonic()
    _, errors = command.communicate()
    assert command.wait() == 1 and time.monotonic() - stopped_s < 40.0
    assert "rank 0 failed first: DeadlineError: " in errors and "rank 1 is silent" in errors, errors
    assert not any(word in errors for word in ("killed", "memory ran out", "SIGKILL"))
