"""The fault table judges outcomes correctly, and benchmarks for several GPUs and two nodes run (over gloo)."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.attention import SDPBackend

from ringattn.bench import faults, many, many_ranks, two_nodes
from ringattn.bench.clock import Sample
from ringattn.bench.fault_ranks import Answer
from ringattn.bench.faults import COLUMNS, FAULTS, FaultsOptions, Outcome, applies, blamed, judge, run_fault, tabulate
from ringattn.bench.hosts import RailedNodes, TwoHosts, _end_in_time, _shares, address
from ringattn.bench.many import PARTS, ManyOptions, cases_of, measure
from ringattn.bench.processes import Ended
from ringattn.bench.timed_calls import PASSES, plans_of
from ringattn.bench.two_nodes import CALLS, PLACES, RANKS, SCHEDULES, TwoNodesOptions, cluster_of, crossing_bytes
from ringattn.errors import InputError, RingError, UnsupportedError
from ringattn.launch.measure.calibrate import FAR, MESSAGE_BYTES, NEAR
from ringattn.planner.cluster import Cluster
from ringattn.planner.simulate import simulate
from ringattn.ring import Ring
from ringattn.transport.base import Message
from ringattn.transport.nccl.options import NcclOptions
from tests.launch.test_calibrate import REFERENCE, times_of
from tests.transport.nccl_rings import on_rings, results
from tests.transport.simulated.world import SimWorld

GRACE_S = 5.0
"""The time that an error may take after a deadline. The table allows two seconds; tests may share their machine."""

KILL, STOP, LINK = FAULTS["kill between passes"], FAULTS["stop 2.5 T between passes"], FAULTS["link cut"]
SILENT = "no answer from ranks [1] within 4 s; rank 1 is silent (stopped, stuck, gone or out of reach)"


@pytest.fixture(scope="module", autouse=True)
def forkserver() -> None:
    faults.start_forkserver()


def run_cells(cells: Sequence[tuple[str, str]]) -> list[Outcome]:
    """Run cells (fault, column) of the table, four at a time because they mostly wait. Return their outcomes."""

    def run(cell: tuple[str, str]) -> Outcome:
        return run_fault(FAULTS[cell[0]], cell[1], 1, grace_s=GRACE_S)

    with ThreadPoolExecutor(4) as pool:
        return list(pool.map(run, cells))


def assert_good(cells: Sequence[tuple[str, str]]) -> None:
    failed = [
        f"{outcome.fault} over {outcome.column}: {outcome.complaints}"
        for outcome in run_cells(cells)
        if outcome.complaints
    ]
    assert not failed, "\n".join(failed)


@pytest.fixture(scope="module")
def hosts() -> None:
    try:
        with TwoHosts():
            pass
    except UnsupportedError as error:
        pytest.skip(str(error))


@pytest.mark.slow
@pytest.mark.parametrize("column", ["shm", "gloo"])
def test_cells_of_one_machine(column: str) -> None:
    names = (
        "kill in a pass", "kill in a pass (rank 0)", "exit in backward", "stop 2.5 T in a pass",
        "stop 2.5 T in a pass (rank 0)", "stop 0.5 T between passes", "sleep 2.5 T between passes",
        "hold the interpreter 2.5 T between passes", "raise in backward", "wrong shape on rank 0",
        "other mask on rank 1", "child uses the ring",
    )  # fmt: skip
    assert_good([(name, column) for name in names])


@pytest.mark.slow
def test_cells_of_two_hosts(hosts: None) -> None:
    names = ("kill in a pass", "stop 2.5 T in a pass (rank 0)", "link cut", "other direction lost")
    links = ("link cut", "one direction lost", "30 % loss", "200 ms delay")
    assert_good([*((name, "nodes") for name in names), *((name, "hosts") for name in links)])


# --- the judge -------------------------------------------------------------------------------------------------------


def complaints(name: str, *answers: Answer | None, column: str = "gloo") -> list[str]:
    by_rank = {rank: answer for rank, answer in enumerate(answers) if answer is not None}
    return judge(FAULTS[name], COLUMNS[column], 10.0, by_rank, 4.0)


def error(message: str, at_s: float = 11.0, kind: str = "PeerLostError", **more: object) -> Answer:
    return Answer(kind, message, at_s, 9.0, **more)  # type: ignore[arg-type]


def test_every_other_rank_must_name_only_the_guilty_rank_in_time() -> None:
    good = error("rank 1 is gone")
    assert complaints(KILL.name, good, None, good) == []
    assert complaints(KILL.name, good, None, None) == ["rank 2 gave no answer"]
    assert complaints(KILL.name, good, None, Answer()) == ["rank 2 noticed nothing"]
    late = complaints(KILL.name, good, None, replace(good, at_s=12.5))
    assert late == ["rank 2 took 2.50 s: PeerLostError: rank 1 is gone"]
    assert "rank 2 blames ranks [2]" in complaints(KILL.name, good, None, error("rank 2 is gone"))[0]
    both = error("rank 1 is gone; rank 0 is silent (stopped)")
    assert "rank 2 blames ranks [0, 1]" in complaints(KILL.name, good, None, both)[0]
    assert "rank 2 blames ranks []" in complaints(KILL.name, good, None, error("no answer from ranks [1]"))[0]
    assert "rank 2 RuntimeError" in complaints(KILL.name, good, None, replace(good, kind="RuntimeError"))[0]


def test_a_stopped_rank_may_take_the_deadline_and_must_blame_no_other() -> None:
    good = error(SILENT, 15.9, "DeadlineError")
    assert complaints(STOP.name, good, Answer(), good) == []
    assert complaints(STOP.name, good, error("rank 0 failed first: DeadlineError: rank 1 is silent"), good) == []
    assert "rank 1 blames ranks [0]" in complaints(STOP.name, good, error("rank 0 is silent"), good)[0]
    assert "rank 0 took 6.10 s" in complaints(STOP.name, replace(good, at_s=16.1), Answer(), good)[0]
    assert complaints(STOP.name, good, None, good) == ["rank 1 gave no answer"]


def test_a_wrong_result_is_never_accepted() -> None:
    wrong = error("pass 4 was not exact", kind="wrong")
    for name in ("stop 0.5 T between passes", STOP.name, "other mask on rank 1"):
        answers = [error(SILENT, 15.0, "DisagreementError")] * 2
        assert "rank 2 wrong: pass 4 was not exact" in complaints(name, *answers, wrong)


def test_a_refused_call_is_refused_on_every_rank() -> None:
    differ = error("the ranks made different calls", kind="DisagreementError")
    assert complaints("other mask on rank 1", differ, differ, differ) == []
    assert complaints("other mask on rank 1", differ, differ, Answer()) == ["rank 2 right: "]


def test_a_forked_child_must_be_refused_and_must_end() -> None:
    name = "child uses the ring"
    assert complaints(name, Answer(), Answer(child="ClosedError"), Answer()) == []
    assert "child that raised nothing" in complaints(name, Answer(), Answer(child="nothing"), Answer())[0]
    assert "; hung" in complaints("child exits", Answer(), Answer(child="nothing; hung"), Answer())[0]


def test_after_a_link_cut_no_rank_of_the_same_host_is_blamed() -> None:
    good = [error(f"rank {peer} is silent (x)", 14.0, "DeadlineError") for peer in (2, 3, 1, 0)]
    good[2:] = [error("the store's host (rank 0 of the job, at 10.77.0.1:29500) did not answer within 0.8 s", 14.0)] * 2
    assert complaints(LINK.name, *good, column="hosts") == []
    for rank, peer in ((0, 1), (1, 0), (2, 3)):
        answers = [*good[:rank], error(f"rank {peer} is gone", 14.0), *good[rank + 1 :]]
        assert f"rank {rank} blames ranks [{peer}]" in complaints(LINK.name, *answers, column="hosts")[0]


def test_over_a_slow_link_only_a_rank_without_the_store_may_blame_a_rank_of_its_host() -> None:
    verdict = error("rank 2 is silent (x)", 14.0, "DeadlineError")
    store = "; the store's host (rank 0 of the job, at 10.77.0.1:29500) did not answer within 0.8 s"
    for message, wrong in (
        (f"rank 1 is silent (x), last heard in 'step 2' of call 18{store}", ""),
        ("rank 1 is silent (x), last heard in 'step 2' of call 18", "rank 3 blames ranks [1]"),
        (f"rank 2 is silent (x){store}", "rank 3 blames ranks [2]"),
    ):
        reported = complaints("30 % loss", verdict, verdict, verdict, error(message, 14.0), column="hosts")
        assert [complaint.partition(":")[0] for complaint in reported] == [wrong] * bool(wrong), message


@pytest.mark.parametrize(
    ("message", "ranks"),
    [
        ("rank 0: no answer from ranks [1]; rank 2 is silent (stopped), last heard in 'idle'", {2}),
        ("rank 2 failed first: DeadlineError: rank 2: no answer from ranks [0]; rank 1 is gone", {1}),
        ("rank 1 failed first: ValueError: the model is wrong", {1}),
        ("no answer from ranks [1]; rank 1 is behind, in 'idle' of call 6, others in call 7", {1}),
        ("no answer from ranks [1]; rank 1 is alive in 'idle after backward step 5'", set()),
        ("no answer from ranks [1]; rank 1 is alive in 'all-gather 3'", set()),
        ("the store's host (rank 0 of the job) is gone", {0}),
        ("rank 1 closed its ring", {1}),
    ],
)
def test_blamed_ranks_are_read_from_messages(message: str, ranks: set[int]) -> None:
    assert blamed(message) == ranks


def test_a_missed_bar_is_reported() -> None:
    good = Outcome(KILL.name, "gloo", {0: 1.2})
    bad = Outcome(KILL.name, "shm", {0: 9.0}, complaints=["rank 0 took 9.00 s"])
    options = FaultsOptions(transports=("shm", "gloo"))
    page = tabulate(options, [good, bad]).markdown()
    assert "1 of 2 as required. The bar is all of them: MISSED." in page and "rank 0 took 9.00 s" in page
    assert "MISSED 0/1 9.0 s" in page and "| 1/1 1.2 s" in page
    assert "The bar is all of them: met." in tabulate(options, [good]).markdown()


def test_columns_without_a_link_have_no_faults_of_the_link() -> None:
    assert not applies(LINK, "shm") and applies(LINK, "nodes") and applies(LINK, "hosts")
    assert applies(KILL, "nodes") and not applies(KILL, "hosts")


def test_an_unknown_fault_or_transport_is_refused() -> None:
    with pytest.raises(InputError, match="only=tsunami: matches no fault; choose from kill between passes"):
        faults.main(["only=tsunami"])
    with pytest.raises(InputError, match="transports: tcp is not one of shm, gloo, nodes, hosts"):
        faults.main(["transports=tcp"])


# --- several GPUs ----------------------------------------------------------------------------------------------------


SMALL = (
    "ranks=2", "transports=gloo", "engines=plain", "bytes=4096,65536", "rows=64", "tokens=128", "heads=2",
    "kv_heads=1", "head_dim=16", "dtype=float32", "count=2", "cycles=2",
)  # fmt: skip


@pytest.mark.parametrize("part", PARTS)
def test_every_case_is_valid_and_defaults_come_first(part: str) -> None:
    """Every case has valid options, the first cases use the defaults of every transport, and no case occurs twice."""
    cases = list(cases_of(ManyOptions(part=part)))
    assert [case["transport"] for case in cases if not case["nccl"]][:2] in (["nccl", "peer"], ["nccl", "nccl"])
    first_varied = next((index for index, case in enumerate(cases) if case["nccl"]), len(cases))
    assert not any(not case["nccl"] for case in cases[first_varied:])
    assert len({json.dumps(case) for case in cases}) == len(cases)
    chosen = [NcclOptions(**case["nccl"]) for case in cases if case["nccl"]]
    if part in ("hops", "overlap"):
        assert {options.sm_margin for options in chosen} >= {0, 4, 8, 16} and {
            options.cga_cluster_size for options in chosen
        } >= {1, 4}
    if part == "hops":
        assert any(not options.register for options in chosen) and any(options.blocking for options in chosen)
    if part == "ring":
        assert {case["kind"] for case in cases} == {"ring", "fsdp"}
    if part == "life":
        assert {case["kind"] for case in cases} == {"life", "abort"} and cases[0]["cycles"] == 20


def test_invalid_options_are_refused(tmp_path: Path) -> None:
    for arguments, message in (
        (["part=hop"], "part=hop: choose one of hops, overlap, ring, life, report"),
        (["ranks=1"], "ranks=1: .* use two GPUs"),
        (["part=report", f"results={tmp_path}"], "no part has been measured there"),
    ):
        with pytest.raises(InputError, match=message):
            many.main(arguments)


def stub_torchrun(monkeypatch: pytest.MonkeyPatch, answers: list[dict[int, dict[str, Any]]]) -> list[int]:
    """Replace torchrun by a stub. `answers`: for each start, the answer of all ranks to each case, by its number.

    Return a list to which each start appends the number of cases that it received.
    """
    case_counts: list[int] = []

    def run(program: list[str], job: Path, meanwhile: Any, ranks: int, job_s: float) -> Ended:
        case_counts.append(len(json.loads(job.read_text())))
        for case, answer in answers[len(case_counts) - 1].items():
            for rank in range(ranks):
                (job.parent / f"answer-{case}-{rank}.json").write_text(json.dumps(answer))
            meanwhile()
        meanwhile()
        return Ended(3, "the last words")

    monkeypatch.setattr(many, "run_torchrun", run)
    return case_counts


def test_a_failing_case_loses_only_its_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    good, bad, refused = {"x": 1}, {"failed": "ArithmeticError"}, {"failed": "no fa3", "goes on": True}
    case_counts = stub_torchrun(monkeypatch, [{0: good, 1: bad}, {0: refused, 1: good}, {0: good}])
    answers: list[Any] = []
    measure([{"n": n} for n in range(6)], 2, ManyOptions(), lambda case, answer: answers.append((case["n"], answer)))
    died = {"failed": "its processes ended with exit code 3: the last words"}
    assert answers == [(0, good), (1, bad), (2, refused), (3, good), (4, died), (5, good)]
    assert case_counts == [6, 4, 1]


def test_a_hanging_case_loses_only_its_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    stub_torchrun(monkeypatch, [{}, {0: {"x": 1}}])
    answers: list[Any] = []
    measure([{"n": 0}, {"n": 1}], 2, ManyOptions(limit_s=0.0), lambda case, answer: answers.append(answer))
    assert answers[0]["failed"].startswith("no answer within 0 s") and answers[1] == {"x": 1}


def test_cases_beyond_the_budget_say_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(*_: Any, **__: Any) -> Ended:
        raise AssertionError("started")

    monkeypatch.setattr(many, "run_torchrun", run)
    reasons: list[Any] = []
    measure([{"n": 0}, {"n": 1}], 2, ManyOptions(budget_s=-1.0), lambda case, answer: reasons.append(answer["failed"]))
    assert reasons == ["not tried: the -1 s of budget_s are spent"] * 2


@pytest.mark.slow
def test_every_part_runs_and_is_on_the_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for part in PARTS:
        many.main([*SMALL, f"part={part}", f"results={tmp_path}"])
        kept = json.loads((tmp_path / f"many_{part}.json").read_text())
        assert kept["complete"] and not [case for case in kept["cases"] if "failed" in case["found"]], kept
    many.main(["part=report", f"results={tmp_path}"])
    assert "not measured: faults" in (tmp_path / "many.md").read_text()
    kept = {"measured on": {"device": "2 x GPU"}, "seconds to the named error, stop": {"rank 0": 11.2}, "other": [1]}
    (tmp_path / "nccl_processes.json").write_text(json.dumps(kept))
    capsys.readouterr()
    many.main(["part=report", f"results={tmp_path}"])
    page = (tmp_path / "many.md").read_text()
    assert re.search(r"nccl +\| 2 x GPU +\| seconds to the named error, stop +\| rank 0: 11\.2", page)
    titles = ("A hop, GB/s", "A hop during", "A causal pass", "A training step", "Openings", "An abort", "Faults")
    assert all(f"### {title}" in page for title in titles) and "not measured" not in page
    assert page in capsys.readouterr().out


def test_every_nccl_option_hops_over_the_simulated_library(monkeypatch: pytest.MonkeyPatch) -> None:
    """The benchmarks of a hop and of an overlap run on the simulated library with the NCCL options of each case."""
    cases = [case for case in cases_of(ManyOptions(transports=("nccl",))) if case["kind"] == "hop"]
    assert len(cases) == 11
    shape = {"heads": 2, "kv_heads": 1, "head_dim": 8, "rows": 16, "dtype": "float32", "count": 2}
    local = threading.local()
    monkeypatch.setattr(many_ranks, "open_ring", lambda case: nullcontext(local.ring))

    def body(ring: Ring) -> tuple[Any, Any]:
        local.ring = ring
        hops = many_ranks.hop({"kind": "hop", "bytes": [256, 4096], "count": 2})
        return hops, many_ranks.overlap({"kind": "overlap", **shape})

    for case in cases:
        world = SimWorld(2, any_memory=True)
        answers = results(on_rings(world, body, ring={"engine": "plain"}, options=NcclOptions(**case["nccl"])))
        assert world.violations == []
        for hops, both in answers:
            assert (
                set(hops) == {"256", "4096"}
                and all(figure["us"] > 0 for figure in hops.values())
                and both["both_us"] > 0
            )


def test_one_gpu_is_measured_with_the_fastest_kernel_of_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """A ring is compared with cuDNN where torch has it, which torch prefers only on request."""
    first, attention = list[int](), many_ranks.scaled_dot_product_attention

    def recorded(*args: Any, **options: Any) -> Any:
        first.append(torch._C._get_sdp_priority_order()[0])
        return attention(*args, **options)

    monkeypatch.setattr(many_ranks, "scaled_dot_product_attention", recorded)
    shape = {"heads": 2, "kv_heads": 1, "head_dim": 8, "tokens": 32, "dtype": "float32", "count": 1}
    with Ring(engine="plain") as ring:
        monkeypatch.setattr(many_ranks, "open_ring", lambda case: nullcontext(ring))
        figures = many_ranks.ring(shape)
    assert figures["one_us"] > 0 and len(first) > 1
    assert set(first) == {SDPBackend.CUDNN_ATTENTION.value} != {torch._C._get_sdp_priority_order()[0]}


# --- two nodes with slow links between their ranks -------------------------------------------------------------------


NODES = replace(REFERENCE, cores=1, ranks_per_node=PLACES, node_bandwidth=25e6, node_latency_s=1e-4)
OPTIONS = TwoNodesOptions(calls=1, repeats=1, results="")
SHARD = 4096 // RANKS * 8 * 2 * 64 * 4  # bytes of K and V that a rank owns in the first call


@pytest.mark.parametrize(
    ("schedule", "forward", "backward"),
    # In backward, gradients cross between nodes as often as the tensors they belong to. Ulysses sends queries, keys and
    # values, and returns outputs: a quarter of each to either rank of the other node.
    [
        ("ring", 3, 6),
        ("double_ring", 1, 2),
        ("all_gather", 2, 4),
        ("direct", 2, 4),
        ("ulysses", 1, None),
        ("ulysses_ring", 1, 2),
    ],
)
def test_what_crosses_between_the_nodes(schedule: str, forward: int, backward: int | None) -> None:
    for back, shards in ((False, forward), (True, backward)):
        plans = plans_of(CALLS[0]._replace(schedule=schedule), RANKS, back, NODES)
        if shards is not None:
            assert crossing_bytes(plans, NODES) == pytest.approx(shards * SHARD, rel=0.01), (schedule, back)


def test_constants_of_both_kinds_of_messages_are_recovered() -> None:
    seconds = times_of(NODES)
    for nbytes in MESSAGE_BYTES:
        seconds[f"{FAR} {nbytes}"] = 1e-4 + nbytes / 25e6
    assert f"{NEAR} {MESSAGE_BYTES[0]}" in seconds
    by_rank = [{"seconds": {name: [value] for name, value in seconds.items()}, "jobs": 4}] * RANKS
    cluster = cluster_of(by_rank, 1, 25.0)
    assert cluster.node_bandwidth == pytest.approx(25e6) and cluster.node_latency_s == pytest.approx(1e-4)
    assert (
        cluster.bandwidth == pytest.approx(NODES.bandwidth) and cluster.cores == 1 and cluster.ranks_per_node == PLACES
    )


def samples(cluster: Cluster, slower: dict[str, float]) -> list[dict[str, list[Sample]]]:
    """Return measurements that equal the predictions, multiplied by a factor for the schedules in `slower`."""
    by_shape = []
    for shape in two_nodes.shapes(OPTIONS.calls):
        times = slower.get(shape.schedule, 1.0)
        seconds = {
            name: simulate(plans_of(shape, RANKS, name == "backward", cluster), cluster).total_us / 1e6 * times
            for name in PASSES
        }
        by_shape.append({name: [Sample(value, value, 0.0)] for name, value in seconds.items()})
    return by_shape


def test_the_table_says_how_far_off_and_whether_the_choice_was_right() -> None:
    exact = two_nodes.table_of(OPTIONS, NODES, samples(NODES, {}))
    assert len(exact.rows) == len(SCHEDULES) * len(PASSES)
    assert {row[6] for row in exact.rows} == {"+0.0%"} and all(row[7] == row[8] for row in exact.rows)
    assert "median error 0.0%" in exact.notes[-1] and "in 2 of 2 passes" in exact.notes[-1]
    gains = {row[2]: float(row[7]) for row in exact.rows if row[1] == "forward"}
    assert gains["ring"] == 1.0 and gains["double_ring"] > 1.5 * gains["direct"]
    wrong = two_nodes.table_of(
        OPTIONS, NODES, samples(NODES, {"double_ring": 4.0, "ulysses": 4.0, "ulysses_ring": 4.0})
    )
    assert "greatest 75.0%" in wrong.notes[-1] and "in 0 of 2 passes" in wrong.notes[-1]


@pytest.mark.parametrize("word", ["rate_mb=0", "repeats=0", "rounds=0", "calls=0", "calls=9"])
def test_bad_options_are_refused(word: str) -> None:
    with pytest.raises(InputError, match="must be positive"):
        two_nodes.main([word, "results="])


def test_nodes_share_processors_and_node_1_connects() -> None:
    assert _shares([3, 4, 5, 7]) == [[3, 4], [5, 7]] and _shares([2]) == [[2], [2]] and _shares([1, 2, 3]) == [[1], [2]]
    # Gloo connects from the larger address to the smaller one.
    assert max(address(0, place) for place in range(9)) < min(address(1, place) for place in range(9))


def probe(ring: Ring, nbytes: int) -> list[int]:
    """Send `nbytes` to each rank of the other node. Return the last byte that was received from each of them."""
    peers = [rank for rank in range(RANKS) if rank // PLACES != ring.rank // PLACES]
    sent = ring.transport.allocate(nbytes)
    sent.fill_(ring.rank)
    received = [ring.transport.allocate(nbytes) for _ in peers]
    sends = [Message(peer, sent, "probe") for peer in peers]
    ring.transport.exchange(sends, [Message(*pair, "probe") for pair in zip(peers, received, strict=True)]).wait()
    return [int(x.view(torch.uint8)[-1]) for x in received]


def fail_on_rank_3(ring: Ring) -> None:
    """Fail on rank 3. The other ranks run for longer than the test may."""
    if ring.rank == 3:
        raise RuntimeError("no room")
    time.sleep(290)


@pytest.mark.slow
def test_a_rank_that_fails_on_two_nodes_ends_the_others_and_is_reported_alone() -> None:
    try:
        nodes = RailedNodes(PLACES, 100e6)
    except UnsupportedError as error:
        pytest.skip(str(error))
    with nodes, pytest.raises(RingError) as failed:
        nodes.run("tests.bench.test_faults:fail_on_rank_3", {}, str, "shm", 280.0)
    reports = re.findall(r"^rank (\d): ((?:.|\n(?!rank \d))*)", str(failed.value), re.MULTILINE)
    assert [rank for rank, _ in reports] == ["3"] and "no room" in reports[0][1], failed.value


def test_processes_that_run_too_long_end_with_their_stacks() -> None:
    program = "def too_long():\n    print(flush=True)\n    import time; time.sleep(100)\ntoo_long()"
    process = subprocess.Popen(
        [sys.executable, "-X", "faulthandler", "-c", program],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    with process:
        assert process.stdout is not None and process.stdout.readline() == "\n"
        _end_in_time([process], 0.0)
        assert process.stderr is not None and "in too_long" in process.stderr.read()
    assert process.returncode == -signal.SIGABRT


@pytest.mark.slow
def test_rails_carry_equal_bytes_and_nothing_is_left() -> None:
    try:
        nodes = RailedNodes(PLACES, 100e6)
    except UnsupportedError as error:
        pytest.skip(str(error))
    nbytes = 1 << 20

    def silent(line: str) -> None:
        """Ignore a line of output."""

    with nodes:
        received: list[Any] = nodes.run("tests.bench.test_faults:probe", {"nbytes": nbytes}, silent, "shm", 240.0)
        assert received == [[2, 3], [2, 3], [0, 1], [0, 1]]
        for by_place in nodes.sent_bytes():
            assert all(2 * nbytes <= sent <= 2.1 * nbytes for sent in by_place), nodes.sent_bytes()
    with pytest.raises(Exception, match=r"No such file|Cannot open|does not exist|non-zero"):
        nodes.sent_bytes()
