"""Scripted faults: check that all other ranks raise in time, and that they name the guilty rank and no other.

Ranks are processes on this machine (shared memory, or gloo), or on two hosts that are network namespaces (`nodes`:
shared memory within a host and gloo between hosts; `hosts`: gloo only). One rank is killed, stopped, slow, exits, makes
a different call or forks; or the link between the hosts is cut, loses packets or delays them. Each row of the table is
a fault, each column a transport.
Guarantees: no process is left behind; a fault that did not happen is an error.
"""

from __future__ import annotations

import multiprocessing
import os
import re
import signal
import socket
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

from ringattn.bench.fault_ranks import AT_CLOSE, BETWEEN, IN_BACKWARD, IN_PASS, LEAVING, Answer, Fault, Seat, live
from ringattn.bench.hosts import ADDRESSES, LinkState, TwoHosts
from ringattn.bench.options import parse
from ringattn.bench.report import RESULTS, Table, finish, progress
from ringattn.errors import InputError, RingError

GRACE_S = 2.0
"""How long after its deadline a rank may still raise."""
JOB_S = 240.0
SLOW_S = 30.0
"""The deadline on a slow link: a connection with 30 % loss may make no progress for ten seconds."""
LINKS = {
    "link cut": LinkState(lost=(1.0, 1.0)),
    "one direction lost": LinkState(lost=(1.0, 0.0)),
    "other direction lost": LinkState(lost=(0.0, 1.0)),
    "30 % loss": LinkState(lost=(0.3, 0.3)),
    "200 ms delay": LinkState(delay_s=0.2),
}
SLOW_LINKS = ("30 % loss", "200 ms delay")
SPOIL = "spoil the link"

NAMED, PROMPT, DIFFER, RIGHT, CHILD, LINK, SLOW_LINK = (
    "named", "named at once", "refused on all ranks", "right", "right, and the child is refused",
    "the other host is lost", "right or lost",
)  # fmt: skip
"""The outcomes that faults require. `NAMED`: every other rank raises and names the guilty rank, within the deadline
plus `GRACE_S`. `PROMPT`: the same within `GRACE_S`. `DIFFER`: every rank refuses the call. `RIGHT`: all results are
right. `CHILD`: the same, and the forked child's use of the ring is refused. `LINK`: every rank raises in time and
blames no rank of its own host. `SLOW_LINK`: as `RIGHT` or as `LINK`.
"""


def _faults() -> list[Fault]:
    lost = [
        Fault(f"{act} {moment}{' (rank 0)' if not rank else ''}", act, PROMPT, rank, moment)
        for act, rank, moment in (
            ("kill", 1, BETWEEN), ("kill", 1, IN_BACKWARD), ("kill", 1, IN_PASS), ("kill", 0, BETWEEN),
            ("kill", 0, IN_PASS), ("terminate", 1, BETWEEN), ("interrupt", 1, BETWEEN), ("exit", 1, BETWEEN),
            ("exit", 1, IN_BACKWARD), ("exit", 0, BETWEEN), ("raise", 1, BETWEEN), ("raise", 1, IN_BACKWARD),
            ("raise in with", 1, BETWEEN), ("out of memory", 1, BETWEEN), ("close", 1, BETWEEN),
            ("close", 1, IN_BACKWARD),
        )
    ]  # fmt: skip
    silent = [
        Fault(f"{act} {deadlines:g} T {moment}{' (rank 0)' if not rank else ''}", act, outcome, rank, moment, deadlines)
        for act, rank, moment, deadlines, outcome in (
            ("hold the interpreter", 1, BETWEEN, 2.5, NAMED), ("sleep", 1, BETWEEN, 0.6, RIGHT),
            ("sleep", 1, BETWEEN, 2.5, NAMED), ("sleep", 1, IN_BACKWARD, 2.5, NAMED), ("stop", 1, BETWEEN, 0.5, RIGHT),
            ("stop", 0, BETWEEN, 0.5, RIGHT), ("stop", 1, BETWEEN, 2.5, NAMED), ("stop", 0, BETWEEN, 2.5, NAMED),
            ("stop", 1, IN_PASS, 2.5, NAMED), ("stop", 0, IN_PASS, 2.5, NAMED),
        )
    ]  # fmt: skip
    different = [
        Fault(f"{act} on rank {rank}", act, DIFFER, rank)
        for act, rank in (
            ("other mask", 1), ("other length", 2), ("wrong shape", 0), ("extra call", 1), ("barrier", 2),
        )
    ]  # fmt: skip
    forked = [Fault(act, act, outcome) for act, outcome in (
        ("child uses the ring", CHILD), ("child closes the ring", RIGHT), ("child exits", RIGHT),
    )]  # fmt: skip
    closing = [
        Fault(f"{act} {AT_CLOSE}{' (rank 0)' if not rank else ''}", act, RIGHT, rank, AT_CLOSE, deadlines)
        for act, rank, deadlines in (("kill", 1, 0.0), ("kill", 0, 0.0), ("stop", 1, 2.5), ("sleep", 1, 2.5))
    ]
    links = [Fault(name, SPOIL, SLOW_LINK if name in SLOW_LINKS else LINK, 0, IN_PASS) for name in LINKS]
    links.append(Fault(f"link cut {AT_CLOSE}", SPOIL, RIGHT, 0, AT_CLOSE))
    return [*lost, *silent, *different, *forked, *closing, *links]


FAULTS = {fault.name: fault for fault in _faults()}


@dataclass(frozen=True)
class Where:
    """The ranks of one column of the table: their transport, and the host of each rank."""

    transport: str
    hosts: tuple[int, ...]

    @property
    def linked(self) -> bool:
        """Return whether the ranks are on two hosts, which a link joins."""
        return len(set(self.hosts)) > 1


COLUMNS = {
    "shm": Where("shm", (0, 0, 0)),
    "gloo": Where("gloo", (0, 0, 0)),
    "nodes": Where("shm", (0, 0, 1, 1)),
    "hosts": Where("gloo", (0, 0, 1, 1)),
}


@dataclass(frozen=True)
class FaultsOptions:
    """The options of the benchmark.

    Faults run if their name contains one of the texts in `only`; an empty text selects all. `at_once` is the number of
    faults that run at the same time.
    """

    transports: tuple[str, ...] = tuple(COLUMNS)
    only: tuple[str, ...] = ("",)
    repeats: int = 1
    timeout_s: float = 4.0
    at_once: int = 2
    results: str = RESULTS


@dataclass
class Outcome:
    """The answers of the ranks after one fault, and the complaints about them.

    `seconds` has, by rank, the time from the fault to the error, or from the start of the failed wait if that was
    later.
    """

    fault: str
    column: str
    seconds: dict[int, float] = field(default_factory=dict)
    kinds: dict[int, str] = field(default_factory=dict)
    complaints: list[str] = field(default_factory=list)


def applies(fault: Fault, column: str) -> bool:
    """Return whether a fault is run in this column.

    Faults of the link run only in columns with two hosts, and the column `hosts` has only faults of the link.
    """
    return (fault.act == SPOIL) == (column == "hosts") or (fault.act == SPOIL and COLUMNS[column].linked)


# --- judging ---------------------------------------------------------------------------------------------------------

AT_FAULT = re.compile(
    r"rank (\d+) (?:is (?:gone|silent|stuck|behind|still computing)|has left|closed its ring"
    r"|failed first: (?!DeadlineError|PeerLostError)\w+|refused the call)"
)


def blamed(message: str) -> set[int]:
    """Return the ranks that an error message holds responsible."""
    ranks = set(map(int, AT_FAULT.findall(message)))
    return ranks | ({0} if "the store's host (rank 0" in message and not ranks else set())


def judge(
    fault: Fault, where: Where, fault_s: float, answers: dict[int, Answer], timeout_s: float, grace_s: float = GRACE_S
) -> list[str]:
    """Return a sentence for each answer that differs from the outcome that the fault requires.

    `where`: the transport and the hosts of the ranks.
    """
    complaints = []
    for rank in range(len(where.hosts)):
        complaints += [
            f"rank {rank} {complaint}"
            for complaint in _complaints(fault, where, rank, fault_s, answers.get(rank), timeout_s, grace_s)
        ]
    return complaints


def _complaints(
    fault: Fault, where: Where, rank: int, fault_s: float, answer: Answer | None, timeout_s: float, grace_s: float
) -> list[str]:
    guilty = rank == fault.rank and fault.act != SPOIL
    if answer is None:
        return [] if guilty and may_end(fault) else ["gave no answer"]
    answer_text = f"{answer.kind}: {answer.message}"
    if answer.kind == "wrong":
        return [answer_text]
    if fault.outcome == CHILD and guilty and answer.child != "ClosedError":
        return [f"has a child that raised {answer.child}"]
    if guilty and answer.child.endswith("hung"):
        return [f"has a child that raised {answer.child}"]
    if fault.outcome in (RIGHT, CHILD) or (fault.outcome == SLOW_LINK and answer.kind == "right"):
        return [] if answer.kind == "right" else [answer_text]
    if fault.outcome == DIFFER:
        return [] if answer.kind in ("DisagreementError", "InputError") else [answer_text]
    if guilty:
        # A rank that was itself stopped or slow must blame no other rank.
        wrongly = blamed(answer.message) - {rank}
        return [f"blames ranks {sorted(wrongly)}, although it is at fault: {answer_text}"] if wrongly else []
    if answer.kind == "right":
        return ["noticed nothing"]
    wrong = [] if answer.kind in ("DeadlineError", "PeerLostError") else [answer_text]
    limit_s = grace_s + (0.0 if fault.outcome == PROMPT else timeout_s)
    if (seconds := seconds_of(answer, fault_s)) > limit_s:
        wrong.append(f"took {seconds:.2f} s: {answer_text}")
    if fault.outcome in (LINK, SLOW_LINK):
        # Over a slow link, all ranks read the same verdict from the store, which blames no rank of the store's host.
        # For a rank that cannot reach the store, the other host is lost, as if the link were cut.
        reads_store = fault.outcome == SLOW_LINK and "the store's host" not in answer.message
        innocent_host = where.hosts[0 if reads_store else rank]
        innocent = {peer for peer, host in enumerate(where.hosts) if host == innocent_host}
        if wrongly := blamed(answer.message) & innocent - ({0} if "the store's host" in answer.message else set()):
            wrong.append(f"blames ranks {sorted(wrongly)}: {answer_text}")
    elif blamed(answer.message) != {fault.rank}:
        wrong.append(f"blames ranks {sorted(blamed(answer.message))}: {answer_text}")
    return wrong


def seconds_of(answer: Answer, fault_s: float) -> float:
    """Return the seconds from the fault to the error, or from the start of the failed wait if that was later."""
    return answer.at_s - max(fault_s, answer.waits_s)


def may_end(fault: Fault) -> bool:
    """Return whether the guilty rank may end without an answer."""
    return fault.act == "kill" or fault.act in LEAVING


# --- running ---------------------------------------------------------------------------------------------------------


def run_fault(
    fault: Fault,
    column: str,
    number: int = 0,
    timeout_s: float = 4.0,
    grace_s: float = GRACE_S,
) -> Outcome:
    """Run one fault in new processes, and judge the answers.

    `number` seeds the link and selects the exchange at which a fault in a pass happens. Raises `RingError` if the fault
    did not happen.
    """
    where, context = COLUMNS[column], multiprocessing.get_context("forkserver")
    timeout_s = SLOW_S if fault.outcome == SLOW_LINK else timeout_s
    with ExitStack() as stack:
        hosts = stack.enter_context(TwoHosts(seed=number)) if where.linked else None
        port = 29500 if where.linked else free_port()
        pipes: list[Connection] = []
        processes: list[BaseProcess] = []
        stack.callback(_end, processes, pipes)
        for rank, host in enumerate(where.hosts):
            address, namespace = (ADDRESSES[0], hosts.namespaces[host]) if hosts else ("127.0.0.1", "")
            seat = Seat(rank, len(where.hosts), address, port, where.transport, timeout_s, namespace, number % 4)
            parent_end, child_end = context.Pipe()
            processes.append(context.Process(target=live, args=(seat, fault, child_end), daemon=False))
            processes[-1].start()
            child_end.close()
            pipes.append(parent_end)

        def strikes() -> None:
            if hosts and fault.act == SPOIL:
                hosts.state = LINKS[fault.name.removesuffix(f" {AT_CLOSE}")]

        fault_s, answers = _collect_answers(fault, timeout_s, pipes, processes, strikes)
    if not fault_s:
        raise RingError(f"{fault.name} on {column} never happened: {answers}")
    outcome = Outcome(fault.name, column)
    outcome.complaints = judge(fault, where, fault_s, answers, timeout_s, grace_s)
    for rank, answer in answers.items():
        outcome.kinds[rank] = answer.kind
        if answer.at_s and rank != fault.rank:
            outcome.seconds[rank] = seconds_of(answer, fault_s)
    return outcome


def _collect_answers(
    fault: Fault, timeout_s: float, pipes: list[Connection], processes: list[BaseProcess], strikes: Callable[[], None]
) -> tuple[float, dict[int, Answer]]:
    """Return the time at which the fault happened (0 if it did not), and the answers by rank.

    `strikes` is called when the fault happens.
    """
    answers: dict[int, Answer] = {}
    fault_s, end_s = 0.0, time.monotonic() + JOB_S
    open_pipes = dict(enumerate(pipes))
    resume_s = float("inf")
    while open_pipes and time.monotonic() < end_s:
        if fault_s and not set(open_pipes) - {fault.rank} and may_end(fault):
            break
        for ready in wait(list(open_pipes.values()), 0.1):
            rank = pipes.index(ready)  # type: ignore[arg-type]
            try:
                message = pipes[rank].recv()
            except (EOFError, ConnectionResetError):
                del open_pipes[rank]
                continue
            if isinstance(message, Answer):
                answers[rank] = message
                del open_pipes[rank]
                continue
            strikes()
            fault_s = time.monotonic()
            resume_s = fault_s + fault.deadlines * timeout_s if fault.act == "stop" else resume_s
            pipes[rank].send("go on")
        if time.monotonic() >= resume_s:
            os.kill(processes[fault.rank].pid or 0, signal.SIGCONT)
            resume_s = float("inf")
    return fault_s, answers


def _end(processes: list[BaseProcess], pipes: list[Connection]) -> None:
    for process in processes:
        process.kill()
        process.join()
    for pipe in pipes:
        pipe.close()


def free_port() -> int:
    """Return an unused TCP port of the loopback address."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def start_forkserver() -> None:
    """Fork the processes from a server that has already imported torch."""
    os.environ["TORCH_CPP_LOG_LEVEL"] = "FATAL"  # torch's own traces of lost stores
    multiprocessing.get_context("forkserver").set_forkserver_preload(["ringattn.bench.fault_ranks"])


# --- showing ---------------------------------------------------------------------------------------------------------


def tabulate(options: FaultsOptions, outcomes: Sequence[Outcome]) -> Table:
    """Return a table with a row per fault and a column per transport."""
    table = Table("Faults of one rank, and what the others did", ("fault", "must follow", *options.transports))
    for name, fault in FAULTS.items():
        cells = [
            _cell([outcome for outcome in outcomes if (outcome.fault, outcome.column) == (name, c)])
            for c in options.transports
        ]
        if any(cells):
            table.rows.append((name, fault.outcome, *cells))
    good = sum(not outcome.complaints for outcome in outcomes)
    table.notes += [
        f"- {good} of {len(outcomes)} as required. The bar is all of them: "
        f"{'met' if good == len(outcomes) else 'MISSED'}.",
        f"- T, the deadline, is {options.timeout_s:g} s ({SLOW_S:g} s for {' and '.join(SLOW_LINKS)}); a rank may take "
        f"{GRACE_S:g} s more. Cells: runs that ended as required, and the slowest error in seconds after the fault.",
        *(
            f"- {outcome.fault}, {outcome.column}: {complaint}"
            for outcome in outcomes
            for complaint in outcome.complaints
        ),
    ]
    return table


def _cell(outcomes: Sequence[Outcome]) -> str:
    if not outcomes:
        return ""
    good = sum(not outcome.complaints for outcome in outcomes)
    seconds = [error_s for outcome in outcomes for error_s in outcome.seconds.values()]
    slowest = f" {max(seconds):.1f} s" if seconds else ""
    return f"{'' if good == len(outcomes) else 'MISSED '}{good}/{len(outcomes)}{slowest}"


def main(arguments: Sequence[str]) -> dict[str, Any]:
    """Run, print, save and return the record. Raises `UnsupportedError` if two hosts are not permitted."""
    options = parse(FaultsOptions(), arguments)
    if options.repeats < 1 or options.timeout_s <= 0 or options.at_once < 1:
        raise InputError("repeats, timeout_s and at_once must be positive")
    if unknown := set(options.transports) - set(COLUMNS):
        raise InputError(f"transports: {', '.join(sorted(unknown))} is not one of {', '.join(COLUMNS)}")
    chosen = [
        (fault, column, number)
        for number in range(options.repeats)
        for name, fault in FAULTS.items()
        if any(part in name for part in options.only)
        for column in options.transports
        if applies(fault, column)
    ]
    if not chosen:
        raise InputError(f"only={','.join(options.only)}: matches no fault; choose from {', '.join(FAULTS)}")
    start_forkserver()
    with progress("faults") as say, ThreadPoolExecutor(options.at_once) as pool:

        def run(cell: tuple[Fault, str, int]) -> Outcome:
            fault, column, number = cell
            outcome = run_fault(fault, column, number, options.timeout_s)
            say(f"{fault.name}, {column}: {'; '.join(outcome.complaints) or 'as required'}")
            return outcome

        outcomes = list(pool.map(run, chosen))
    data: dict[str, Any] = {"outcomes": [asdict(outcome) for outcome in outcomes]}
    finish("faults", options, [tabulate(options, outcomes)], data, options.results)
    return data


if __name__ == "__main__":
    main(sys.argv[1:])
