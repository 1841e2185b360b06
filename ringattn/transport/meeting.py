"""The meeting of a new ring's ranks: the job, its store, each rank's number, and failures to open the ring.

Guarantees for the job's store: a missing or wrong variable is refused by name before anything is connected. If
MASTER_ADDR is a loopback address or "localhost", the store listens on loopback only. Every wait ends by its deadline.
An error names the process that hosts the store, the address and the port, and says whether that process is missing,
gone or hung.
Guarantees for rank numbers: each rank claims its number in the ring's store, so two jobs at one port never form a ring
unnoticed. If two processes have the same rank number, the second raises, and so does a process that has another world
size or belongs to another job. It publishes the reason before it raises, so all ranks of the ring fail with the same
sentence: ranks that are opening the ring raise it during their wait, and ranks of an open ring when they next read the
ring's cause of failure.
Guarantees for causes: a rank that cannot open the ring publishes the cause before it raises, even if only its arguments
are wrong. Every rank that waits for it raises that cause within about a second. The process that hosts the store does
not end before the other ranks have read the cause or `LINGER_S` have passed.
"""

from __future__ import annotations

import atexit
import errno
import json
import os
import secrets
import socket
import time
import warnings
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from ipaddress import ip_address
from typing import Any

import torch.distributed as dist

from ringattn.errors import DeadlineError, DisagreementError, InputError, PeerLostError, RingError
from ringattn.observe.files import descriptor_shortage
from ringattn.transport.control_store import (
    GRACE_S,
    LOST,
    RESTATED,
    ControlStore,
    bounded,
    group_store,
    host_of,
    hosts,
    refuses,
    ring_store,
)
from ringattn.transport.deadline import Deadline, wait_until

# --- the job and its store -------------------------------------------------------------------------------------------


NAP_S = 0.05
"""How long a rank waits before it tries again to connect."""
CONNECT_S = 5.0
"""The limit of one attempt to connect."""
WARN_S = 2.0
"""The time after which a warning says that a name has not been resolved."""
START = "start the ranks with torchrun, or set RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT for each of them"


@dataclass(frozen=True)
class Job:
    """The job of this process. `agent`: whether torchrun's agent hosts the store; otherwise rank 0 does.

    `run_id`: the job's name in torchrun or Slurm, empty if neither started the job. `restart_count`: the number of
    restarts, as torchrun reports it; empty without torchrun.
    """

    rank: int
    world_size: int
    address: str
    port: int
    agent: bool = False
    run_id: str = ""
    restart_count: str = ""

    @property
    def hosts_store(self) -> bool:
        """Whether this process hosts the store, rather than connects to it."""
        return self.rank == 0 and not self.agent

    @property
    def host(self) -> str:
        """A description of the process that hosts the store."""
        return "torchrun's agent" if self.agent else "rank 0"

    def __str__(self) -> str:
        return f"{self.address}:{self.port}"


def job_of(environment: Mapping[str, str]) -> Job | None:
    """Return the job that the environment describes, or None if this process is alone.

    Raises `InputError` that names the wrong variable, its value and the values that it may have.
    """
    if "WORLD_SIZE" not in environment and "RANK" not in environment:
        return None
    world_size = _number(environment, "WORLD_SIZE", 1)
    if world_size > 1 or "RANK" in environment:
        rank = _number(environment, "RANK", 0, world_size - 1)
    if world_size == 1:
        return None
    address = environment.get("MASTER_ADDR", "").strip()
    if not address:
        raise InputError(f"rank {rank}: MASTER_ADDR is not set; it must be the host name or address of rank 0; {START}")
    return Job(
        rank,
        world_size,
        address,
        _number(environment, "MASTER_PORT", 1, 65535),
        agent=environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
        run_id=environment.get("TORCHELASTIC_RUN_ID") or environment.get("SLURM_JOB_ID", ""),
        restart_count=environment.get("TORCHELASTIC_RESTART_COUNT", ""),
    )


def _number(environment: Mapping[str, str], name: str, lowest: int, highest: int | None = None) -> int:
    value = environment.get(name)
    range_text = f"an integer of at least {lowest}" if highest is None else f"an integer from {lowest} to {highest}"
    if name == "RANK" and highest is not None:
        range_text += f", since WORLD_SIZE={environment['WORLD_SIZE']}"
    try:
        number = int(value or "")
    except ValueError:
        number = lowest - 1
    if number < lowest or (highest is not None and number > highest):
        state = "is not set" if value is None else f"is {value!r}"
        raise InputError(f"{name} {state}; it must be {range_text}; {START}")
    return number


_stores: dict[tuple[str, int], dist.Store] = {}
"""This process's stores by address and port. A process that hosts a store keeps it open for its other rings when one
ring closes.
"""


def job_store(job: Job, deadline: Deadline) -> dist.Store:
    """Return this process's connection to the job's store, which rank 0 opens unless torchrun's agent has.

    Raises `InputError` if MASTER_ADDR cannot be resolved, `PortInUseError`, and `DeadlineError` if the process that
    hosts the store is missing, gone or hung.
    """
    place = job.address, job.port
    if place not in _stores:
        hosts[place] = job.host
        _stores[place] = connect(job, deadline)
    return _stores[place]


def connect(job: Job, deadline: Deadline) -> dist.Store:
    """Return a new connection to the job's store. Raises what `job_store` raises."""
    attempt = _Attempt(job, deadline)
    try:
        # The name resolver and a connection to a hung host may block indefinitely, so they run on another thread.
        return bounded(attempt.run, deadline.plus(GRACE_S), "")
    except DeadlineError:
        raise attempt.error() from None


class PortInUseError(InputError):
    """The error if another process already listens at the port where this process must host the store."""


class _Attempt:
    """One process's attempt to reach the store, and its progress."""

    def __init__(self, job: Job, deadline: Deadline) -> None:
        self.job, self.deadline = job, deadline
        self._kind: type[DeadlineError] | type[InputError] = InputError
        self._reason = ""
        self._reached = self._warned = False

    def error(self) -> DeadlineError | InputError:
        """Return the error to raise at the deadline. It says why there is no connection."""
        return self._kind(f"rank {self.job.rank}: {self._reason}; waited {self.deadline.timeout_s:g} s")

    def run(self) -> dist.Store:
        """Resolve the address, then open the store or connect to it. Repeat this until the deadline."""
        job = self.job
        while True:
            try:
                self._blame(f"MASTER_ADDR={job.address} is not resolved: the name service does not answer", InputError)
                families = [each[0] for each in socket.getaddrinfo(job.address, job.port, type=socket.SOCK_STREAM)]
                return self._host(min(families)) if job.hosts_store else self._join()
            except socket.gaierror as error:
                # A container's name cannot be resolved before the container exists.
                self._blame(
                    f"MASTER_ADDR={job.address} is not resolved on {socket.gethostname()} ({error.strerror}); it must "
                    "be the host name or address of rank 0",
                    InputError,
                )
                self._warn()
            except ConnectionRefusedError:
                self._blame(
                    f"{job.host} hosted the store at {job} and is gone"
                    if self._reached
                    else f"nothing listens at {job}: {job.host} has not started, or has ended"
                )
            except OSError as error:
                self._blame(f"{job.host} is not reached at {job} ({error.strerror or error})")
            except dist.DistError:
                self._blame(self._unanswered)
            if self.deadline.passed:
                raise self.error()
            time.sleep(NAP_S)

    def _blame(self, reason: str, kind: type[DeadlineError] | type[InputError] = DeadlineError) -> None:
        self._reason, self._kind = reason, kind

    @property
    def _unanswered(self) -> str:
        reason = f"{self.job.host} is stopped, or another program has the port"
        return f"{self.job} takes the connection and does not answer: {reason}"

    def _warn(self) -> None:
        if not self._warned and self.deadline.timeout_s - self.deadline.left_s > WARN_S:
            self._warned = True
            warnings.warn(f"{self.error()}; tries again", stacklevel=2)

    def _join(self) -> dist.Store:
        """Connect to the store of another process. Probe with a plain socket first: torch prints failed attempts."""
        job = self.job
        self._blame(f"{job.host} is not reached at {job}")
        with socket.create_connection((job.address, job.port), CONNECT_S) as probe:
            if probe.getsockname() == probe.getpeername():  # the system gave this end the port itself
                raise ConnectionRefusedError
        self._reached = True
        self._blame(self._unanswered)
        limit = timedelta(seconds=max(min(self.deadline.left_s, CONNECT_S), 0.1))
        store = dist.TCPStore(job.address, job.port, is_master=False, timeout=limit, wait_for_workers=False)
        store.set_timeout(timedelta(seconds=self.deadline.timeout_s))
        return store

    def _host(self, family: int) -> dist.Store:
        """Open the store, or join the store that this process already has open at this port."""
        job, listener = self.job, None
        self._blame(f"rank 0 listens at port {job.port}, and {job} does not lead to it: correct MASTER_ADDR")
        options: dict[str, int] = {}
        if address := loopback_of(job.address, family):
            listener = _bound_socket(address, job.port, family)
            options["master_listen_fd"] = listener.fileno()
        try:
            store = dist.TCPStore(
                job.address,
                job.port,
                is_master=True,
                wait_for_workers=False,  # so that rank 0 can say which ranks are missing
                multi_tenant=True,
                timeout=timedelta(seconds=max(self.deadline.left_s, 0.1)),
                **options,  # type: ignore[arg-type]
            )
        except dist.DistError as error:
            if listener is not None:
                listener.close()
            text = str(error).partition("\n")[0]
            if "EADDRINUSE" in text or "expected to be bound to port" in text:
                raise PortInUseError(
                    f"rank 0: port {job.port} of {job.address} is in use, by another job or program; give this job a "
                    "different MASTER_PORT"
                ) from None
            if "failed to listen" in text:
                raise InputError(f"rank 0 cannot listen at {job}: {text}") from None
            raise self.error() from error
        if listener is not None:
            if listener.getsockname()[1] == job.port:
                listener.detach()  # the store has taken it over
            listener.close()
        return store


def loopback_of(name: str, family: int) -> str | None:
    """Return the loopback address that `name`, the value of MASTER_ADDR, stands for, or None if it stands for none.

    Any other host name stands for none, even if this host resolves it to a loopback address: other hosts resolve it to
    an address that they can reach.
    """
    if name == "localhost" or name.endswith(".localhost"):
        return "::1" if family == socket.AF_INET6 else "127.0.0.1"
    try:
        return name if ip_address(name).is_loopback else None
    except ValueError:
        return None


def _bound_socket(address: str, port: int, family: int) -> socket.socket:
    """Return a socket that is bound to `address`, at `port` if that port is free, otherwise at any free port.

    Torch refuses a socket at another port, unless this process has a store open at `port`: then torch uses that store.
    """
    bound = socket.socket(family)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # a port that was just left is free
    try:
        bound.bind((address, port))
    except OSError as error:
        if error.errno != errno.EADDRINUSE:
            bound.close()
            raise InputError(f"rank 0 cannot listen at {address}:{port}: {error.strerror}") from None
        bound.bind((address, 0))
    return bound


# --- rank numbers ----------------------------------------------------------------------------------------------------


ADVICE = "two jobs share this address and port, or a rank was started twice; give each job a different MASTER_PORT"


@dataclass(frozen=True)
class Claim:
    """A process's claim to be `rank` of a ring of `world_size` ranks.

    `clock`: the time of the claim, in UTC. `nonce`: random, so that no two claims are equal.
    """

    rank: int
    world_size: int
    run_id: str
    host: str
    pid: int
    clock: str
    nonce: str

    @classmethod
    def of_this_process(cls, rank: int, world_size: int, run_id: str) -> Claim:
        """Return a new claim of this process."""
        clock = time.strftime("%H:%M:%S", time.gmtime())
        return cls(rank, world_size, run_id, socket.gethostname(), os.getpid(), clock, secrets.token_hex(8))

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host} (at {self.clock} UTC)"


def claim_rank(control: ControlStore, run_id: str) -> None:
    """Claim this rank's number in the ring. `run_id`: the name of the job, empty if unknown.

    Raises `InputError` if another process has the number, and `DisagreementError` if the first process of the ring has
    another world size or belongs to another job. The reason is published first.
    """
    claim = Claim.of_this_process(control.rank, control.world_size, run_id)
    first = _put_first(control, "job", claim)
    if difference := _difference(first, claim):
        _refuse(control, first, DisagreementError, difference)
    holder = _put_first(control, f"claim/{claim.rank}", claim)
    if holder != claim:
        _refuse(control, first, InputError, f"two processes claim rank {claim.rank}, {holder} and {claim}")


def _difference(first: Claim, claim: Claim) -> str:
    """Return why two processes cannot be ranks of one ring; empty if they can."""
    sides = f"rank {first.rank}, {first}, {{}}, and rank {claim.rank}, {claim}, {{}}"
    if first.world_size != claim.world_size:
        return sides.format(f"opened a ring of {first.world_size} ranks", f"a ring of {claim.world_size}")
    if first.run_id and claim.run_id and first.run_id != claim.run_id:
        return sides.format(f"belongs to job {first.run_id!r}", f"to job {claim.run_id!r}")
    return ""


def _refuse(control: ControlStore, first: Claim, kind: type[InputError], reason: str) -> None:
    ring = f"rank {control.rank}: the ring of {first.world_size} ranks cannot go on"
    error = kind(f"{ring}: {reason}; {control.host}; {ADVICE}")
    control.publish_cause(error)
    raise error


def _put_first(control: ControlStore, key: str, claim: Claim) -> Claim:
    return Claim(**json.loads(control.put_first(key, json.dumps(asdict(claim)))))


# --- the meeting of one ring -----------------------------------------------------------------------------------------


PUBLISH_S = 0.2
"""How long a rank that cannot open tries to publish why."""
CONTEST_S = 2.0
"""How long a rank 0 whose port is in use looks for another job's ring there."""
LINGER_S = 5.0
"""How long the process that hosts the store waits at its end for the others to read why the ring cannot open."""
INFORMED = "informed"
"""The counter of ranks that know that the ring cannot open."""


class Meeting:
    """The store of a new ring, and this rank's number in it. `job`: None if the environment describes none."""

    def __init__(
        self, store: dist.Store, rank: int, world_size: int, deadline: Deadline, job: Job | None = None
    ) -> None:
        """`deadline`: the deadline of the whole opening, which began before the connection to `store`."""
        self.store, self.rank, self.world_size, self.deadline, self.job = store, rank, world_size, deadline, job
        self._control: ControlStore | None = None
        self._claimed = False

    @classmethod
    def of(cls, group: Any, timeout_s: float, environment: Mapping[str, str]) -> Meeting:
        """Connect to the store of `group`, of torch's default group, or of the job that the environment describes.

        Raises `InputError` if the group or a variable is wrong, and what `job_store` raises.
        """
        deadline = Deadline(timeout_s)
        if isinstance(group, dist.DeviceMesh):
            group = group.get_group("cp" if group.mesh_dim_names and "cp" in group.mesh_dim_names else None)
        if group is not None or (dist.is_available() and dist.is_initialized()):
            return cls(*group_store(group, timeout_s), deadline)
        job = job_of(environment)
        if job is None:
            return cls(dist.HashStore(), 0, 1, deadline)
        origin = f"ringattn/{job.restart_count}"
        try:
            shared = job_store(job, deadline)
            store = ring_store(origin, shared, job.rank, deadline.plus(GRACE_S))
        except PortInUseError:
            _contest(job, origin)
            raise
        except LOST as error:
            raise PeerLostError(f"rank {job.rank}: {job.host} hosted the store at {job} and is gone") from error
        return cls(store, job.rank, job.world_size, deadline, job)

    @property
    def control(self) -> ControlStore:
        """This rank's client of the store, over a connection that no transport uses."""
        if self._control is None:
            shared = ControlStore(self.store, self.rank, self.world_size, self.deadline.timeout_s)
            self._control = shared.until(self.deadline.plus(GRACE_S)).clone()
        return self._control

    def claim(self) -> None:
        """Claim this rank's number before any rank sends anything. Raises what `claim_rank` raises."""
        if self.world_size > 1:
            claim_rank(self.control, self.job.run_id if self.job else "")
            self._claimed = True

    def fail(self, error: Exception) -> Exception:
        """Publish why this rank cannot open the ring. Return the error to raise."""
        failure = self._restated(error)
        if shortage := descriptor_shortage():
            kind = type(failure) if isinstance(failure, RingError) else RingError
            failure = kind(f"{failure}; {shortage}")
        if self.world_size > 1 and self._control is not None:
            control = self._control.until(Deadline(PUBLISH_S))
            control.publish_cause(failure)
            if self._claimed:
                with suppress(RuntimeError):
                    control.add(INFORMED)
            if self.job and self.job.hosts_store:
                _failed.append(self._control)
        return failure

    def _restated(self, error: Exception) -> Exception:
        """Restate a missed deadline or a lost store as its consequence for the ring."""
        text, opens = str(error), f"the ring of {self.world_size} ranks cannot open: "
        if isinstance(error, LOST):
            host, timeout_s = host_of(self.store), self.deadline.timeout_s
            # Torch also raises this error when a new connection takes too long.
            if "timed out" in text and not refuses(self.store):
                return DeadlineError(f"rank {self.rank}: {opens}{host} did not answer within {timeout_s:g} s")
            return PeerLostError(f"rank {self.rank}: {opens}{host} is gone")
        if not isinstance(error, DeadlineError) or RESTATED.search(text):
            return error
        for prefix in (f"rank {self.rank} opened a ring of {self.world_size}: ", f"rank {self.rank}: "):
            text = text.removeprefix(prefix)
        address = f" (store at {self.job})" if self.job and str(self.job) not in text else ""
        return DeadlineError(f"rank {self.rank}: {opens}{text}{address}")


def publish_refusal(group: Any, error: Exception, timeout_s: float, environment: Mapping[str, str]) -> None:
    """Report to the ranks of the ring that this rank's arguments are refused. Never raises."""
    with suppress(Exception):  # `error` is raised in any case
        meeting = Meeting.of(group, timeout_s, environment)
        meeting.claim()
        meeting.fail(error)


def _contest(job: Job, origin: str) -> None:
    """Find out whether another job's ring is open at this job's port. If so, fail that ring and raise an error.

    The error names the process that has this rank's number. The other job's ring must fail because ranks of this job
    may have joined it: they cannot tell the two rings apart.
    """
    limit = Deadline(CONTEST_S)
    with suppress(DeadlineError, *LOST):
        shared = connect(replace(job, agent=True), limit)
        control = ControlStore(ring_store(origin, shared, job.rank, limit), job.rank, job.world_size, CONTEST_S)
        if control.appears(f"claim/{job.rank}", limit):
            claim_rank(control, job.run_id)


_failed: list[ControlStore] = []
"""The rings that this process could not open although it hosts their store."""


@atexit.register
def _linger() -> None:
    """Keep the store open until the other ranks have read why the ring cannot open."""
    deadline = Deadline(LINGER_S)
    for control in _failed:
        view = control.until(deadline)
        with suppress(RuntimeError):
            wait_until(lambda view=view: view.add(INFORMED, 0) >= view.world_size, deadline)  # type: ignore[misc]
