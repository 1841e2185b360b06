"""Faults of the link between two hosts, and a stopped rank 0: does every rank that can still run raise in time?

Four ranks over gloo, two on each of two hosts that are network namespaces; with `transport=shm` those of a host share
memory, and gloo goes between the hosts. In the middle of a pass the link is cut, loses one direction, loses 30 % of its
packets or delays them by 200 ms, or rank 0, which hosts the store, is stopped. The bar: every rank raises a named error
within its deadline and two seconds and blames none that it can reach, or finishes right where the link is only slow.
"""

from __future__ import annotations

import multiprocessing
import os
import re
import signal
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from multiprocessing.connection import Connection, wait
from typing import Any

from ringattn.bench.hosts import ADDRESSES, LinkState, TwoHosts
from ringattn.bench.link_ranks import live
from ringattn.bench.options import parse
from ringattn.bench.report import RESULTS, Table, finish, progress
from ringattn.errors import InputError

RANKS = 4
HOST_OF = (0, 0, 1, 1)
HOPS = 6  # exchanges of a pass of four ranks, forward and backward
GRACE_S = 2.0
JOB_S = 240.0
LINKS = {
    "link cut": LinkState(lost=(1.0, 1.0)),
    "one direction lost": LinkState(lost=(1.0, 0.0)),
    "other direction lost": LinkState(lost=(0.0, 1.0)),
    "30 % loss": LinkState(lost=(0.3, 0.3)),
    "200 ms delay": LinkState(delay_s=0.2),
}
SLOW = ("30 % loss", "200 ms delay")
KINDS = (*LINKS, "rank 0 stopped")


@dataclass(frozen=True)
class LinkFaultsOptions:
    """What can be asked for."""

    repetitions: int = 20
    timeout_s: float = 4.0
    slow_timeout_s: float = 30.0
    at_once: int = 2
    transport: str = "gloo"
    results: str = RESULTS


@dataclass
class LinkOutcome:
    """What the ranks saw of one fault. `seconds`: from the fault, or a later wait's beginning, to the error."""

    kind: str
    number: int
    seconds: dict[int, float] = field(default_factory=dict)
    errors: dict[int, str] = field(default_factory=dict)
    complaints: list[str] = field(default_factory=list)


def named_at_fault(message: str) -> set[int]:
    """The ranks that an error message blames."""
    return set(map(int, re.findall(r"rank (\d+) is (?:gone|silent|stuck|behind)", message)))


def innocent(kind: str, rank: int) -> set[int]:
    """Whom `rank` must not call silent: every rank that it can reach; of a stopped rank 0, all others.

    A connection that loses 30 % of its packets in both directions stands still for ten seconds and more now and then,
    because TCP doubles its patience each time. Only ranks beside the store are then in reach for certain.
    """
    if kind == "rank 0 stopped":
        return set(range(1, RANKS))
    if kind == "30 % loss":
        return {other for other in range(RANKS) if HOST_OF[other] == HOST_OF[0]}
    if kind in SLOW:
        return set(range(RANKS))
    return {other for other in range(RANKS) if HOST_OF[other] == HOST_OF[rank]}


def judged(
    kind: str,
    number: int,
    fault_s: float,
    answers: dict[int, dict[str, Any]],
    timeout_s: float,
    grace_s: float = GRACE_S,
) -> LinkOutcome:
    """The outcome of one fault from the answers; `complaints` says what is not good."""
    outcome = LinkOutcome(kind, number)
    for rank in range(1 if kind == "rank 0 stopped" else 0, RANKS):
        answer = answers.get(rank)
        if answer is None:
            outcome.complaints.append(f"rank {rank} gave no answer")
            continue
        outcome.errors[rank] = answer["kind"]
        outcome.seconds[rank] = answer["at_s"] - max(fault_s, answer["wait_s"])
        said = f"rank {rank}: {answer['kind']}: {answer['message']}"
        if answer["kind"] == "right":
            if kind not in SLOW:
                outcome.complaints.append(f"rank {rank} noticed nothing")
            continue
        if answer["kind"] not in ("DeadlineError", "PeerLostError"):
            outcome.complaints.append(said)
        if outcome.seconds[rank] > timeout_s + grace_s:
            outcome.complaints.append(f"rank {rank} took {outcome.seconds[rank]:.2f} s: {said}")
        if wrongly := named_at_fault(answer["message"]) & innocent(kind, rank):
            outcome.complaints.append(f"blames ranks {sorted(wrongly)}: {said}")
    return outcome


def suffer(
    kind: str,
    number: int,
    timeout_s: float,
    meeting: tuple[str, str] = (ADDRESSES[0], ADDRESSES[0]),
    grace_s: float = GRACE_S,
    transport: str = "gloo",
) -> LinkOutcome:
    """One fault, in the middle of a pass of fresh processes on fresh hosts.

    `meeting`: the address of rank 0's host, as each host names it.
    """
    context = multiprocessing.get_context("forkserver")
    with TwoHosts(seed=number) as hosts:
        pipes: list[Connection] = []
        processes = []
        for rank in range(RANKS):
            mine, theirs = context.Pipe()
            host = HOST_OF[rank]
            facts = (hosts.namespaces[host], meeting[host], rank, RANKS, number % HOPS, timeout_s, theirs, transport)
            processes.append(context.Process(target=live, args=facts, daemon=True))
            processes[-1].start()
            theirs.close()
            pipes.append(mine)
        try:
            answers: dict[int, dict[str, Any]] = {}
            fault_s, until = 0.0, time.monotonic() + JOB_S
            expected = set(range(RANKS))
            while expected - set(answers) and time.monotonic() < until:
                for ready in wait([pipes[rank] for rank in expected - set(answers)], 1.0):
                    rank = pipes.index(ready)  # type: ignore[arg-type]
                    said = pipes[rank].recv()
                    if said != "now":
                        answers[rank] = said
                        continue
                    if kind in LINKS:
                        hosts.state = LINKS[kind]
                    else:
                        os.kill(processes[0].pid or 0, signal.SIGSTOP)
                        expected = set(range(1, RANKS))
                    fault_s = time.monotonic()
                    pipes[0].send("go on")
        finally:
            for process in processes:
                process.kill()
                process.join()
    return judged(kind, number, fault_s, answers, timeout_s, grace_s)


def start_forkserver() -> None:
    """Processes begin as forks of one that has imported torch."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["ringattn.bench.link_ranks"])


def tabulate(options: LinkFaultsOptions, outcomes: Sequence[LinkOutcome]) -> Table:
    """One row a kind of fault."""
    table = Table(
        "Faults of the link between two hosts", ("fault", "good", "finished right", "errors", "slowest error")
    )
    for kind in KINDS:
        mine = [outcome for outcome in outcomes if outcome.kind == kind]
        good = sum(not outcome.complaints for outcome in mine)
        errors = [error for outcome in mine for error in outcome.errors.values()]
        seconds = [
            outcome.seconds[rank] for outcome in mine for rank, error in outcome.errors.items() if error != "right"
        ]
        slowest = f"{max(seconds):.2f} s" if seconds else "-"
        right = errors.count("right")
        table.rows.append((kind, f"{good} of {len(mine)}", f"{right} ranks", f"{len(errors) - right} ranks", slowest))
    good = sum(not outcome.complaints for outcome in outcomes)
    table.notes += [
        f"- {good} of {len(outcomes)}: every rank that could run raised a named error within its deadline of "
        f"{options.timeout_s:g} s ({options.slow_timeout_s:g} s for {' and '.join(SLOW)}) and {GRACE_S:g} s, and "
        "blamed no rank that it could reach, or finished right where the link was only slow. The bar is all of them: "
        f"{'met' if good == len(outcomes) else 'MISSED'}.",
        "- Two ranks on each host; the name of each host resolves to a loopback address. Seconds: from the fault, or "
        "from the beginning of a later wait, to the error.",
        *(
            f"- {outcome.kind} {outcome.number}: {complaint}"
            for outcome in outcomes
            for complaint in outcome.complaints
        ),
    ]
    return table


def main(words: Sequence[str]) -> dict[str, Any]:
    """Run, print, keep; returns what is kept. Raises `UnsupportedError` where namespaces are not permitted."""
    options = parse(LinkFaultsOptions(), words)
    if options.repetitions < 1 or options.timeout_s <= 0 or options.at_once < 1:
        raise InputError("repetitions, timeout_s and at_once must be positive")
    start_forkserver()
    with progress("link_faults") as say, ThreadPoolExecutor(options.at_once) as pool:

        def one(fault: tuple[int, str]) -> LinkOutcome:
            number, kind = fault
            timeout_s = options.slow_timeout_s if kind in SLOW else options.timeout_s
            outcome = suffer(kind, number, timeout_s, transport=options.transport)
            say(f"{kind} {number}: {'; '.join(outcome.complaints) or 'good'}")
            return outcome

        outcomes = list(pool.map(one, [(number, kind) for number in range(options.repetitions) for kind in KINDS]))
    data: dict[str, Any] = {"outcomes": [asdict(outcome) for outcome in outcomes]}
    finish("link_faults", options, [tabulate(options, outcomes)], data, options.results)
    return data


if __name__ == "__main__":
    main(sys.argv[1:])
