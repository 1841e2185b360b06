"""The fault table: what its judge accepts, and some of its cells in real processes.

`python -m ringattn.bench faults` runs all of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest

from ringattn.bench import faults
from ringattn.bench.fault_ranks import Answer
from ringattn.bench.faults import COLUMNS, FAULTS, FaultsOptions, Outcome, applies, blamed, judged, suffer, tabulate
from ringattn.bench.hosts import TwoHosts
from ringattn.errors import InputError, UnsupportedError

GRACE_S = 5.0
"""The table grants two seconds after a deadline; a test may share its machine with other tests."""

KILL, STOP, LINK = FAULTS["kill between passes"], FAULTS["stop 2.5 T between passes"], FAULTS["link cut"]
SILENT = "no answer from ranks [1] within 4 s; rank 1 is silent (stopped, stuck, gone or out of reach)"


@pytest.fixture(scope="module", autouse=True)
def forkserver() -> None:
    faults.start_forkserver()


def run_cells(cells: Sequence[tuple[str, str]]) -> list[Outcome]:
    """The outcome of each (fault, column). Three at once: nearly all of their time is waiting."""

    def run(cell: tuple[str, str]) -> Outcome:
        return suffer(FAULTS[cell[0]], cell[1], 1, grace_s=GRACE_S)

    with ThreadPoolExecutor(3) as pool:
        return list(pool.map(run, cells))


def assert_good(cells: Sequence[tuple[str, str]]) -> None:
    failed = [f"{each.fault} over {each.column}: {each.complaints}" for each in run_cells(cells) if each.complaints]
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
    given = {rank: answer for rank, answer in enumerate(answers) if answer is not None}
    return judged(FAULTS[name], COLUMNS[column], 10.0, given, 4.0)


def error(message: str, at_s: float = 11.0, kind: str = "PeerLostError", **more: object) -> Answer:
    return Answer(kind, message, at_s, 9.0, **more)  # type: ignore[arg-type]


def test_every_other_rank_must_name_the_guilty_rank_alone_and_in_time() -> None:
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


def test_a_stopped_rank_may_take_the_deadline_and_blames_nobody() -> None:
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
    differ = error("the ranks do not ask for the same", kind="DisagreementError")
    assert complaints("other mask on rank 1", differ, differ, differ) == []
    assert complaints("other mask on rank 1", differ, differ, Answer()) == ["rank 2 right: "]


def test_a_forked_child_must_be_refused_and_must_end() -> None:
    name = "child uses the ring"
    assert complaints(name, Answer(), Answer(child="ClosedError"), Answer()) == []
    assert "child that raised nothing" in complaints(name, Answer(), Answer(child="nothing"), Answer())[0]
    assert "; hung" in complaints("child exits", Answer(), Answer(child="nothing; hung"), Answer())[0]


def test_a_cut_link_blames_no_rank_of_the_own_host() -> None:
    good = [error(f"rank {other} is silent (x)", 14.0, "DeadlineError") for other in (2, 3, 1, 0)]
    good[2:] = [error("the store's host (rank 0 of the job, at 10.77.0.1:29500) did not answer within 0.8 s", 14.0)] * 2
    assert complaints(LINK.name, *good, column="hosts") == []
    for rank, other in ((0, 1), (1, 0), (2, 3)):
        answers = [*good[:rank], error(f"rank {other} is gone", 14.0), *good[rank + 1 :]]
        assert f"rank {rank} blames ranks [{other}]" in complaints(LINK.name, *answers, column="hosts")[0]


def test_over_a_slow_link_only_a_rank_without_the_store_may_blame_a_rank_of_its_host() -> None:
    verdict = error("rank 2 is silent (x)", 14.0, "DeadlineError")
    store = "; the store's host (rank 0 of the job, at 10.77.0.1:29500) did not answer within 0.8 s"
    for message, wrong in (
        (f"rank 1 is silent (x), last heard in 'step 2' of call 18{store}", ""),
        ("rank 1 is silent (x), last heard in 'step 2' of call 18", "rank 3 blames ranks [1]"),
        (f"rank 2 is silent (x){store}", "rank 3 blames ranks [2]"),
    ):
        found = complaints("30 % loss", verdict, verdict, verdict, error(message, 14.0), column="hosts")
        assert [each.partition(":")[0] for each in found] == [wrong] * bool(wrong), message


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


def test_a_missed_bar_is_said() -> None:
    good = Outcome(KILL.name, "gloo", {0: 1.2})
    bad = Outcome(KILL.name, "shm", {0: 9.0}, complaints=["rank 0 took 9.00 s"])
    options = FaultsOptions(transports=("shm", "gloo"))
    page = tabulate(options, [good, bad]).markdown()
    assert "1 of 2 as they must be. The bar is all of them: MISSED." in page and "rank 0 took 9.00 s" in page
    assert "MISSED 0/1 9.0 s" in page and "| 1/1 1.2 s" in page
    assert "The bar is all of them: met." in tabulate(options, [good]).markdown()


def test_columns_without_a_link_have_no_faults_of_the_link() -> None:
    assert not applies(LINK, "shm") and applies(LINK, "nodes") and applies(LINK, "hosts")
    assert applies(KILL, "nodes") and not applies(KILL, "hosts")


def test_an_unknown_fault_or_transport_is_refused() -> None:
    with pytest.raises(InputError, match="only=tsunami: no fault has such a name; choose from kill between passes"):
        faults.main(["only=tsunami"])
    with pytest.raises(InputError, match="transports: tcp is not one of shm, gloo, nodes, hosts"):
        faults.main(["transports=tcp"])
