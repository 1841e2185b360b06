"""Reasons why a ring cannot open, with the error that each rank must raise and the time that it may take."""

from __future__ import annotations

import os
import re
import signal
import socket
import time
from dataclasses import dataclass, field
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any

import torch

import ringattn
from ringattn.transport import location, rendezvous
from ringattn.transport.control_store import ControlStore
from ringattn.transport.deadline import Deadline, wait_until
from ringattn.transport.meeting import Meeting
from tests.contract.processes import forked, free_port
from tests.transport.store_hosts import StoreHost, is_stopped

RANKS = 3
TIMEOUT_S = 2.0
"""The deadline of most causes. Torch resolves names for each connection, and a lost DNS query costs the one second that
the conftest sets."""
LONG_S = 20.0
SOON_S = 1.0
"""The time in which the error of a rank that refuses its arguments must reach the other ranks."""
GRACE_S = 2.0
"""The time by which an error may exceed the deadline."""
TRANSPORTS = {"gloo": "gloo", "shm": "shm", "shm over two hosts": "shm"}


@dataclass(frozen=True)
class Cause:
    """A reason why a ring of three ranks cannot open.

    `says`: for each rank that must raise, regular expressions for the type of its error and for the whole message after
    "rank N: ". The ranks in `absent` are not started. `fault`, environment `variables` and `arguments` of `Ring` apply
    to rank `culprit`.
    """

    says: dict[int, tuple[str, str]]
    culprit: int = 1
    absent: tuple[int, ...] = ()
    fault: str = ""
    variables: dict[str, str] = field(default_factory=dict)
    arguments: dict[str, Any] = field(default_factory=dict)
    agent: str = ""
    """torchrun's agent, which hosts the store: "runs", "stops" or "is missing". Empty: rank 0 hosts the store."""
    occupied: bool = False
    """Whether another program uses the port."""
    timeout_s: float = TIMEOUT_S


def all_but(rank: int, kinds: str, pattern: str) -> dict[int, tuple[str, str]]:
    """Return the value of `Cause.says` if all ranks except `rank` raise the same error."""
    return {each: (kinds, pattern) for each in range(RANKS) if each != rank}


START = "start the ranks with torchrun, or set RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT for each of them"
LATE = "DeadlineError|PeerLostError"
"""The errors after a deadline. The first rank that reaches its deadline raises DeadlineError and publishes it. The
others may read the published error before they reach their own deadlines, and then raise PeerLostError."""
AT = r"127\.0\.0\.1:PORT"
OPEN = r"the ring of 3 ranks cannot open: "
MISSING = all_but(1, LATE, OPEN + rf"ranks \[1\] did not arrive at 'opening' within 2\.0 s \(store at {AT}\)")
LATER = all_but(1, LATE, OPEN + rf"ranks \[1\] did not arrive( at 'shared/offer')? within 2\.0 s \(store at {AT}\)")
NO_NAME = f"MASTER_ADDR is not set; it must be the host name or address of rank 0; {START}"
NOT_THERE = "nothing listens at {}: {} has not started, or has ended; waited 2 s"
TAKES = r"{} takes the connection and does not answer: {} is stopped, or another program has the port; waited 2 s"
SILENT = OPEN + r"the store's host \({}, at {}\) did not answer within [\d.]+ s \(stopped, or out of reach\)"
GONE = OPEN + r"the store's host \({}, at {}\) is gone"
AGENT = "torchrun's agent"
PROCESS = r"process \d+ on \S+ \(at [\d:]+ UTC\)"
ADVICE = r"two jobs share this address and port, or a rank was started twice; give each job a different MASTER_PORT"
HOST = rf"the store's host \(rank 0, at {AT}\); {ADVICE}"
REFUSED = r"rank {} failed first: InputError: {}"


def refused(rank: int, pattern: str, **arguments: Any) -> Cause:
    """Return the cause that `rank` refuses one of its arguments. The other ranks must report its error."""
    says = all_but(rank, "PeerLostError", REFUSED.format(rank, pattern)) | {rank: ("InputError", pattern)}
    return Cause(says, rank, arguments=arguments, timeout_s=LONG_S)


def mixed(pattern: str, **variables: str) -> Cause:
    """Return the cause that environment `variables` give rank 2 a wrong rank number, world size or job."""
    says = ("InputError|DisagreementError|PeerLostError", rf"the ring of \d ranks cannot go on: {pattern}; {HOST}")
    return Cause(dict.fromkeys(range(RANKS), says), 2, variables=variables, timeout_s=LONG_S)


CAUSES = {
    "rank 1 missing": Cause(MISSING, absent=(1,)),
    "rank 0 missing": Cause(all_but(0, "DeadlineError", NOT_THERE.format(AT, "rank 0")), 0, absent=(0,)),
    "rank 1 killed": Cause(MISSING, fault="killed"),
    "rank 1 stopped": Cause(MISSING, fault="stopped"),
    "rank 1 killed later": Cause(LATER, fault="killed later"),
    "rank 1 stopped later": Cause(LATER, fault="stopped later"),
    "rank 0 killed": Cause(all_but(0, "PeerLostError", GONE.format("rank 0", AT)), 0, fault="killed"),
    "rank 0 killed later": Cause(all_but(0, "PeerLostError", GONE.format("rank 0", AT)), 0, fault="killed later"),
    "rank 0 stopped": Cause(all_but(0, "DeadlineError", SILENT.format("rank 0", AT)), 0, fault="stopped"),
    "rank 0 stopped later": Cause(all_but(0, "DeadlineError", SILENT.format("rank 0", AT)), 0, fault="stopped later"),
    "rank 0 stopped early": Cause(all_but(0, "DeadlineError", TAKES.format(AT, "rank 0")), 0, fault="stopped early"),
    "agent missing": Cause(all_but(-1, "DeadlineError", NOT_THERE.format(AT, AGENT)), -1, agent="is missing"),
    "agent stopped": Cause(all_but(-1, "DeadlineError", TAKES.format(AT, AGENT)), -1, agent="stops"),
    "agent ended": Cause(all_but(0, "PeerLostError", GONE.format(AGENT, AT)), 0, fault="ends the agent", agent="runs"),
    "rank 1 missing at an agent": Cause(MISSING, absent=(1,), agent="runs"),
    "port in use": Cause(
        {0: ("PortInUseError", r"port PORT of 127\.0\.0\.1 is in use, by another job or program; give this job a "
             "different MASTER_PORT")} | all_but(0, "DeadlineError", TAKES.format(AT, "rank 0")), 0, occupied=True),
    "name of the host": Cause(
        MISSING | {1: ("InputError", r"MASTER_ADDR=nohost\.invalid is not resolved on \S+ \(.*\); it must be the host "
                       r"name or address of rank 0; waited 2 s")}, variables={"MASTER_ADDR": "nohost.invalid"}),
    "no name": Cause(
        MISSING | {1: ("InputError", NO_NAME)}, variables={"MASTER_ADDR": ""}),
    "RANK=5": Cause(
        MISSING | {1: ("InputError", rf"RANK is '5'; it must be an integer from 0 to 2, since WORLD_SIZE=3; {START}")},
        variables={"RANK": "5"}),
    "transport": refused(1, r"transport='foo' is not known; choose one of .*", transport="foo"),
    "transport of rank 0": refused(0, r"transport='foo' is not known; choose one of .*", transport="foo"),
    "options of NCCL": refused(1, r"nccl=.* was given, but transport='gloo' takes no .*", transport="gloo",
                               nccl=ringattn.NcclOptions()),
    "engine": refused(1, r"engine='foo' is not known; choose one of .*", engine="foo"),
    "timeout": refused(1, r"timeout_s must be a positive, finite number, got -1", timeout_s=-1),
    "dtype": refused(1, r"kv_wire_dtype=float64 is not supported; use one of .*", kv_wire_dtype="float64"),
    "cluster": refused(1, r"cluster=foo: .*", cluster="foo"),
    "rank 1 twice": mixed(rf"two processes claim rank 1, {PROCESS} and {PROCESS}", RANK="1"),
    "WORLD_SIZE": mixed(
        rf"rank \d, {PROCESS}, opened a ring of \d ranks, and rank \d, {PROCESS}, a ring of \d", WORLD_SIZE="4"),
    "job of torchrun": mixed(
        rf"rank \d, {PROCESS}, belongs to job '[ab]', and rank \d, {PROCESS}, to job '[ab]'", TORCHELASTIC_RUN_ID="b"),
    "job of Slurm": mixed(
        rf"rank \d, {PROCESS}, belongs to job '[67]', and rank \d, {PROCESS}, to job '[67]'", SLURM_JOB_ID="7"),
}  # fmt: skip


@dataclass(frozen=True)
class Answer:
    """The type and message of a rank's error, and the seconds from the beginning of its opening to the error."""

    kind: str
    message: str
    seconds: float


class Rank:
    """A process that opens a ring when the test calls `go`."""

    def __init__(
        self, variables: dict[str, str], arguments: dict[str, Any], fault: str = "", machine: str = ""
    ) -> None:
        self.pipe, child_end = Pipe()
        self.process = forked(_open_ring, child_end, variables, arguments, fault, machine)
        child_end.close()

    def ready(self) -> None:
        """Wait until the process has started."""
        assert self.pipe.recv() == "ready"

    def go(self) -> None:
        """Let the process open its ring."""
        self.pipe.send("go")

    def answer(self, within_s: float) -> Answer | None:
        """Return the error that the process raised, or None if it raised none in time."""
        if not self.pipe.poll(within_s):
            return None
        answer: Answer = self.pipe.recv()
        return answer

    def stopped(self) -> bool:
        """Return whether the process is stopped, as by SIGSTOP."""
        assert self.process.pid is not None
        return is_stopped(self.process.pid)

    def end(self) -> None:
        """Kill the process."""
        self.process.kill()
        self.process.join()
        self.pipe.close()


def _open_ring(
    pipe: Connection, variables: dict[str, str], arguments: dict[str, Any], fault: str, machine: str
) -> None:
    os.environ.update(variables)
    torch.set_num_threads(1)
    if machine:
        location.machine_id = lambda root=None: machine
    if fault:
        _plant(fault)
    pipe.send("ready")
    pipe.recv()
    began_s = time.monotonic()
    try:
        ring = ringattn.Ring(**arguments)
        if fault == SHOWS:
            wait_until(lambda: _controls[0].cause() is not None, Deadline(arguments["timeout_s"]))
        pipe.send(Answer("opened", str(_controls and _controls[0].cause()), time.monotonic() - began_s))
        ring.close()
    except Exception as error:
        pipe.send(Answer(type(error).__name__, str(error), time.monotonic() - began_s))
    pipe.poll(None)  # stay alive: this process may host the store


_controls: list[ControlStore] = []
SHOWS = "shows the cause"
"""Not a fault: the process opens its ring, and answers with the cause that another process publishes in the store."""


def _plant(fault: str) -> None:
    """Patch the library so that `fault` occurs in this process while it opens the ring."""
    number = signal.SIGSTOP if "stopped" in fault else signal.SIGKILL

    def trigger(control: ControlStore) -> None:
        # Wait until all ranks are connected to the store.
        claims = [f"claim/{rank}" for rank in control.everyone()]
        assert wait_until(lambda: all(map(control.holds, claims)), Deadline(LONG_S))
        os.kill(int(os.environ.get("AGENT_PID", os.getpid())), number)

    original = rendezvous._located

    def located(control: ControlStore, *more: Any) -> Any:
        answer = original(control, *more) if "later" in fault else None
        trigger(control)
        return answer or original(control, *more)

    claim = Meeting.claim

    def claimed(meeting: Meeting) -> None:
        claim(meeting)
        _controls.append(meeting.control)

    if fault == SHOWS:
        Meeting.claim = claimed  # type: ignore[method-assign, assignment]
    elif fault == "stopped early":
        Meeting.claim = lambda meeting: os.kill(os.getpid(), number)  # type: ignore[method-assign, assignment]
    else:
        rendezvous._located = located  # type: ignore[assignment]


def suffer(cause: Cause, transport: str) -> dict[int, Answer | None]:
    """Let three processes open a ring although `cause` prevents it. Return the answer of each rank that must raise."""
    port, host, other_program = free_port(), None, None
    if cause.agent in ("runs", "stops"):
        host = StoreHost()
        port = host.port
        if cause.agent == "stops":
            host.stop()
    if cause.occupied:
        other_program = socket.create_server(("127.0.0.1", port))
    ranks: dict[int, Rank] = {}
    try:
        for rank in set(range(RANKS)) - set(cause.absent):
            variables = {
                "RANK": str(rank),
                "WORLD_SIZE": str(RANKS),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
            }
            variables |= {"TORCHELASTIC_RUN_ID": "a" if "TORCHELASTIC_RUN_ID" in cause.variables else ""}
            variables |= {"SLURM_JOB_ID": "6" if "SLURM" in str(cause) else ""}
            if cause.agent:
                variables |= {"TORCHELASTIC_USE_AGENT_STORE": "True"}
            if host and cause.fault:
                variables |= {"AGENT_PID": str(host.pid)}
            arguments = {"transport": TRANSPORTS[transport], "timeout_s": cause.timeout_s}
            machine = f"boot/{rank // 2}" if "two" in transport else ""
            guilty = rank == cause.culprit
            ranks[rank] = Rank(
                variables | (cause.variables if guilty else {}),
                arguments | (cause.arguments if guilty else {}),
                cause.fault if guilty else "",
                machine,
            )
        for process in ranks.values():
            process.ready()
        if cause.fault == "stopped early":
            ranks[cause.culprit].go()
            assert wait_until(ranks[cause.culprit].stopped, Deadline(LONG_S))
        for process in ranks.values():
            process.go()
        return {rank: ranks[rank].answer(LONG_S) for rank in cause.says}
    finally:
        for process in ranks.values():
            process.end()
        if host:
            host.end()
        if other_program:
            other_program.close()


def complaints(cause: Cause, answers: dict[int, Answer | None], slack_s: float) -> list[str]:
    """Return a line for each answer that is wrong or late."""
    limit_s = GRACE_S + (cause.timeout_s if cause.timeout_s == TIMEOUT_S else SOON_S) + slack_s
    lines = []
    for rank, (kinds, pattern) in cause.says.items():
        answer, number = answers[rank], cause.variables.get("RANK", rank) if rank == cause.culprit else rank
        if answer is None:
            lines.append(f"rank {rank} raised nothing")
            continue
        message = re.sub(r"\b(?<=:)\d{5}\b|(?<=port )\d{5}\b", "PORT", answer.message).removeprefix(f"rank {number}: ")
        if not re.fullmatch(kinds, answer.kind) or not re.fullmatch(pattern, message):
            lines.append(f"rank {rank}: {answer.kind}: {message}")
        if answer.seconds > limit_s:
            lines.append(f"rank {rank} took {answer.seconds:.1f} s of {limit_s:.1f} s")
    return lines
