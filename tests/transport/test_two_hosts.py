"""gloo between two hosts, which are network namespaces: faults of the link in mid-pass, and a stopped rank 0.

`python -m ringattn.bench link_faults` repeats each of them 20 times.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest

from ringattn.bench import link_faults
from ringattn.bench.hosts import ADDRESSES, HOST_NAME, TwoHosts
from ringattn.bench.link_faults import KINDS, RANKS, SLOW, LinkOutcome, innocent, judged, named_at_fault
from ringattn.errors import UnsupportedError

ERRORS = {"DeadlineError", "PeerLostError"}
GRACE_S = 5.0
"""The bench grants two seconds after a deadline; a test may run on a machine that is busy with others."""
SLOW_S = 12.0
"""Deadline where the link is only slow. A connection that loses 30 % may stand still for longer."""


@pytest.fixture(scope="module")
def hosts() -> None:
    try:
        TwoHosts().__enter__().__exit__(None, None, None)
    except UnsupportedError as error:
        pytest.skip(str(error))
    link_faults.start_forkserver()


def suffered(kinds: Sequence[str], transport: str) -> dict[str, LinkOutcome]:
    """The outcome of each kind, on hosts of its own. Three at once: nearly all of their time is waiting."""

    def one(kind: str) -> LinkOutcome:
        return link_faults.suffer(kind, 1, SLOW_S if kind in SLOW else 4.0, grace_s=GRACE_S, transport=transport)

    with ThreadPoolExecutor(3) as pool:
        outcomes = dict(zip(kinds, pool.map(one, kinds), strict=True))
    assert not any(one.complaints for one in outcomes.values()), outcomes
    return outcomes


@pytest.mark.slow
def test_every_rank_raises_in_time_and_accuses_no_innocent(hosts: None) -> None:
    for kind, outcome in suffered(KINDS, "gloo").items():
        ended = {"200 ms delay": {"right"}, "30 % loss": {"right", *ERRORS}}.get(kind, ERRORS)
        assert set(outcome.errors.values()) <= ended, outcome
        assert len(outcome.errors) == RANKS - (kind == "rank 0 stopped"), outcome


@pytest.mark.slow
def test_so_does_every_rank_that_shares_memory_with_its_own_host(hosts: None) -> None:
    for outcome in suffered(("link cut", "other direction lost", "rank 0 stopped"), "shm").values():
        assert set(outcome.errors.values()) <= ERRORS, outcome


@pytest.mark.slow
def test_a_host_whose_own_name_is_a_loopback_address_hosts_the_store(hosts: None) -> None:
    # Rank 0's host knows itself by a name that resolves to 127.0.0.1; the other host knows its address.
    outcome = link_faults.suffer("200 ms delay", 2, SLOW_S, meeting=(HOST_NAME, ADDRESSES[0]))
    assert set(outcome.errors.values()) == {"right"}, outcome


def test_the_judge_sees_what_is_wrong() -> None:
    def answer(kind: str, message: str = "", at_s: float = 12.0) -> dict[str, object]:
        return {"kind": kind, "message": message, "at_s": at_s, "wait_s": 9.0}

    good = {rank: answer("DeadlineError", "no answer from ranks [2]; rank 3 is silent (x)") for rank in (0, 1)}
    good |= {rank: answer("PeerLostError", "the store's host (rank 0 of the job) did not answer") for rank in (2, 3)}
    assert judged("link cut", 0, 10.0, good, 4.0).complaints == []
    for rank, wrong, words in (
        (2, answer("DeadlineError", "rank 3 is silent (stopped)"), "blames ranks [3]"),
        (1, answer("DeadlineError", "rank 0 is gone"), "blames ranks [0]"),
        (3, answer("DeadlineError", at_s=16.1), "rank 3 took 6.10 s"),
        (0, answer("outside the pass, DeadlineError"), "outside the pass"),
        (0, answer("right"), "rank 0 noticed nothing"),
        (0, None, "rank 0 gave no answer"),
    ):
        answers = {**good, rank: wrong}
        complaints = judged("link cut", 0, 10.0, answers, 4.0).complaints  # type: ignore[arg-type]
        assert any(words in complaint for complaint in complaints), complaints
    assert named_at_fault("no answer from ranks [1]; rank 2 is silent (stopped), rank 3 is alive in 'idle'") == {2}
    assert innocent("rank 0 stopped", 1) == {1, 2, 3} and innocent("200 ms delay", 0) == {0, 1, 2, 3}
    assert innocent("30 % loss", 3) == {0, 1} and innocent("link cut", 3) == {2, 3}
