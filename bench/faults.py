"""Scripted faults under torchrun: does every survivor name the guilty rank, and how soon?

Three gloo processes, one of which is killed, is stopped, refuses its input, asks for another shape or for another
plan. The bar: every survivor's error names that rank, and no other, within the deadline and two seconds.
Guarantees: no process is left behind; one that is, is ended and is an error.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from ringattn.bench.fault_ranks import FATAL, KINDS, Fault
from ringattn.bench.options import parse
from ringattn.bench.report import RESULTS, Table, finish, progress
from ringattn.errors import InputError, RingError

RANKS = 3
HOPS = 4  # of a pass of three ranks, forward and backward
GRACE_S = 2.0
"""How long after the deadline a survivor may speak."""
JOB_S = 120.0
END_S = 10.0
POLL_S = 0.05
PROGRAM = "ringattn.bench.fault_ranks"


@dataclass(frozen=True)
class FaultsOptions:
    """What can be asked for."""

    faults: int = 20
    timeout_s: float = 4.0
    results: str = RESULTS


@dataclass
class Outcome:
    """What the survivors of one fault said. `seconds`: from the fault to the error, by rank."""

    fault: Fault
    seconds: dict[int, float] = field(default_factory=dict)
    errors: dict[int, str] = field(default_factory=dict)
    complaints: list[str] = field(default_factory=list)


def script(count: int) -> list[Fault]:
    """`count` faults, all kinds in turn, over all ranks and hops."""
    return [
        Fault(KINDS[n % len(KINDS)], (n + 2 * (n // len(KINDS))) % RANKS, n // len(KINDS) % HOPS) for n in range(count)
    ]


def jobs_of(faults: Sequence[Fault]) -> list[list[Fault]]:
    """Which faults share a start of torchrun: all that leave the processes alive, and each of the others alone."""
    survivable = [fault for fault in faults if fault.kind not in FATAL]
    return [*([survivable] if survivable else []), *([fault] for fault in faults if fault.kind in FATAL)]


def named(kind: str, message: str) -> set[int]:
    """The ranks that an error message of a survivor blames."""
    if kind in FATAL:
        return set(map(int, re.findall(r"rank (\d+) is (?:gone|silent)", message)))
    if kind == "refuse":
        return set(map(int, re.findall(r"rank (\d+) refused the call", message)))
    asked = {int(rank): words for rank, words in re.findall(r"^  rank (\d+): (.*)$", message, re.MULTILINE)}
    return {rank for rank, words in asked.items() if list(asked.values()).count(words) == 1}


def judged(fault: Fault, happened_s: float, answers: dict[int, dict[str, Any]], timeout_s: float) -> Outcome:
    """The outcome of one fault from the survivors' answers; `complaints` says what is not good."""
    outcome = Outcome(fault)
    for rank in sorted(set(range(RANKS)) - {fault.rank}):
        answer = answers.get(rank)
        if answer is None:
            outcome.complaints.append(f"rank {rank} gave no answer")
            continue
        outcome.seconds[rank] = answer["at_s"] - happened_s
        outcome.errors[rank] = answer["kind"]
        if (blamed := named(fault.kind, answer["message"])) != {fault.rank}:
            outcome.complaints.append(f"rank {rank} blames {sorted(blamed)}: {answer['kind']}: {answer['message']}")
        if outcome.seconds[rank] > timeout_s + GRACE_S:
            outcome.complaints.append(f"rank {rank} took {outcome.seconds[rank]:.2f} s")
        if not answer.get("works_on", True):
            outcome.complaints.append(f"rank {rank}: the ring is not exact afterwards")
    return outcome


def run_job(faults: Sequence[Fault], timeout_s: float, transport: str = "gloo") -> list[Outcome]:
    """Start torchrun once, let the faults happen one after another, and judge what the survivors wrote.

    Raises `RingError` when a fault did not happen, or when a process outlived the job.
    """
    with tempfile.TemporaryDirectory(prefix="ringattn-faults-") as name:
        folder = Path(name)
        job = folder / "job.json"
        described = {"faults": [asdict(each) for each in faults], "timeout_s": timeout_s, "transport": transport}
        job.write_text(json.dumps(described))
        ended = run_torchrun(["-m", PROGRAM, str(job)], job, lambda: _wake(folder, faults))
        answers = {rank: _read(folder / f"answer-{rank}.json") for rank in range(RANKS)}
        outcomes = []
        for number, fault in enumerate(faults):
            note = _read(folder / f"fault-{number}.json")
            if note is None:
                raise RingError(f"{fault} never happened:\n{ended.printed}")
            given = {rank: answer[number] for rank, answer in answers.items() if answer is not None}
            outcomes.append(judged(fault, note["at_s"], given, timeout_s))
        return outcomes


class Ended(NamedTuple):
    """How torchrun ended, and the last of what its processes printed."""

    code: int
    printed: str


def run_torchrun(
    program: list[str],
    job: Path,
    meanwhile: Callable[[], None],
    ranks: int = RANKS,
    more: Sequence[str] = (),
    job_s: float = JOB_S,
) -> Ended:
    """Run `program` on `ranks` processes by torchrun with the options `more`, and `meanwhile()` now and then.

    `job` is a file that the program's command line names. Raises `RingError` when a process outlives torchrun or
    `job_s`, and what `meanwhile` raises; all are ended then.
    """
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--local-addr=127.0.0.1"]
    command += [f"--nproc-per-node={ranks}", *more]
    # For every connection to a store torch asks the name service who the other end is, and a question that is lost
    # costs five seconds by default: more than the deadline.
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "RES_OPTIONS": "timeout:1"}
    with (job.parent / "log").open("w+b") as log:
        agent = subprocess.Popen(
            [*command, *program], stdout=log, stderr=log, env=environment, start_new_session=True,
            cwd=Path(__file__).parents[2],
        )  # fmt: skip
        try:
            until = time.monotonic() + job_s
            while agent.poll() is None and time.monotonic() < until:
                meanwhile()
                time.sleep(POLL_S)
            late = agent.poll() is None
        finally:
            left = _end(agent, job)
        log.seek(0)
        printed = log.read()[-20000:].decode(errors="replace")
    if late or left:
        raise RingError(f"{'torchrun did not end' if late else f'processes {left} outlived torchrun'}:\n{printed}")
    return Ended(agent.returncode, printed)


def _wake(folder: Path, faults: Sequence[Fault]) -> None:
    """Let a stopped rank go on when all others have answered, so that torchrun's SIGTERM reaches it."""
    for number, fault in enumerate(faults):
        survivors = [rank for rank in range(RANKS) if rank != fault.rank]
        if fault.kind == "stop" and all((folder / f"answer-{rank}.json").exists() for rank in survivors):
            with suppress(ProcessLookupError):
                os.kill(_read(folder / f"fault-{number}.json")["pid"], signal.SIGCONT)


def _end(agent: subprocess.Popen[bytes], job: Path) -> list[int]:
    """End torchrun if it runs, and kill its ranks, which lead sessions of their own; returns those that outlived it."""
    if agent.poll() is None:
        agent.kill()
        agent.wait()
    outlived: set[int] = set()
    until = time.monotonic() + END_S
    while (left := processes_of(job)) and time.monotonic() < until:
        outlived.update(left)
        for pid in left:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(POLL_S)
    return sorted(outlived)


def processes_of(job: Path) -> list[int]:
    """Ids of the running processes whose command line names the job file; one that is ending has none."""
    found = []
    for line in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):
            if os.fsencode(job) in line.read_bytes().split(b"\0"):
                found.append(int(line.parent.name))
    return found


def _read(path: Path) -> Any:
    """The JSON in a file, None if there is no file."""
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else None


def tabulate(options: FaultsOptions, outcomes: Sequence[Outcome]) -> Table:
    """One row a fault."""
    table = Table("Faults, and what the survivors said", ("fault", "rank", "hop", "seconds", "errors", "verdict"))
    for outcome in outcomes:
        fault = outcome.fault
        seconds = ", ".join(f"rank {rank} {seconds:.2f}" for rank, seconds in outcome.seconds.items())
        kinds = ", ".join(outcome.errors[rank] for rank in outcome.errors)
        hop = str(fault.hop) if fault.kind in FATAL else "-"
        table.rows.append(
            (fault.kind, str(fault.rank), hop, seconds, kinds, "MISSED" if outcome.complaints else "named")
        )
    good = sum(not outcome.complaints for outcome in outcomes)
    table.notes += [
        f"- {good} of {len(outcomes)}: every survivor named the guilty rank and no other, within the deadline of "
        f"{options.timeout_s:g} s and {GRACE_S:g} s. The bar is all of them: "
        f"{'met' if good == len(outcomes) else 'MISSED'}.",
        "- seconds: from the fault to the survivor's error; hop: exchange of the pass after which the rank was lost.",
        *(f"- {outcome.fault}: {complaint}" for outcome in outcomes for complaint in outcome.complaints),
    ]
    return table


def main(words: Sequence[str]) -> dict[str, Any]:
    """Run, print, keep; returns what is kept. Raises `RingError` when a process is left behind."""
    options = parse(FaultsOptions(), words)
    if options.faults < 1 or options.timeout_s <= 0:
        raise InputError("faults and timeout_s must be positive")
    outcomes: list[Outcome] = []
    with progress("faults") as say:
        jobs = jobs_of(script(options.faults))
        for number, job in enumerate(jobs):
            say(f"torchrun {number + 1} of {len(jobs)}: {', '.join(sorted({fault.kind for fault in job}))}")
            outcomes += run_job(job, options.timeout_s)
    data: dict[str, Any] = {"outcomes": [asdict(outcome) for outcome in outcomes]}
    finish("faults", options, [tabulate(options, outcomes)], data, options.results)
    return data


if __name__ == "__main__":
    main(sys.argv[1:])
