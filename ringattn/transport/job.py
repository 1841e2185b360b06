"""The job that a rank belongs to: what its environment says, and the connection to the job's store.

Guarantees: a variable that is missing or wrong is refused by name before anything is connected; if MASTER_ADDR is a
loopback address or "localhost", the store listens on loopback only; every wait ends by its deadline; an error names the
process that hosts the store, the address and the port, and says whether that process is missing, gone or hung.
"""

from __future__ import annotations

import errno
import socket
import time
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from ipaddress import ip_address

import torch.distributed as dist

from ringattn.errors import DeadlineError, InputError
from ringattn.transport import bounded_store
from ringattn.transport.bounded_store import bounded
from ringattn.transport.deadline import Deadline

GRACE_S = 1.0
"""What the store has to answer after the deadline, if it took the connection just before."""
NAP_S = 0.05
"""How long a rank waits before it tries to connect again."""
PROBE_S = 0.5
"""How long to look whether the host of the store is still there."""
CONNECT_S = 5.0
"""The limit of one attempt to connect."""
WARN_S = 2.0
"""After which a name that is not resolved is warned of."""
START = "start the ranks with torchrun, or set RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT for each of them"


@dataclass(frozen=True)
class Job:
    """The job of this process. `agent`: torchrun's agent hosts the store, else rank 0 does.

    `run_id`: what torchrun or Slurm calls the job, empty if neither started it; `restart_count`: torchrun's.
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
        """Whether this process is to host the store."""
        return self.rank == 0 and not self.agent

    @property
    def host(self) -> str:
        """The process that hosts the store, in words."""
        return "torchrun's agent" if self.agent else "rank 0"

    def __str__(self) -> str:
        return f"{self.address}:{self.port}"


def job_of(environment: Mapping[str, str]) -> Job | None:
    """Return the job that the environment describes, None for a process that is alone.

    Raises `InputError` that names the variable, its value and what it must be.
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
"""The process that hosts a store keeps it for its other rings when one of them closes."""


def job_store(job: Job, deadline: Deadline) -> dist.Store:
    """Return this process's connection to the job's store, which rank 0 opens unless torchrun's agent has.

    Raises `InputError` if MASTER_ADDR cannot be resolved, `PortInUseError`, and `DeadlineError` if the process that
    hosts the store is missing, gone or hung.
    """
    place = job.address, job.port
    if place not in _stores:
        bounded_store.hosts[place] = job.host
        _stores[place] = connect(job, deadline)
    return _stores[place]


def connect(job: Job, deadline: Deadline) -> dist.Store:
    """Return a new connection to the job's store. Raises what `job_store` raises."""
    attempt = _Attempt(job, deadline)
    try:
        # The resolver and a connection to a hung host block without end, so they run on another thread.
        return bounded(attempt.run, deadline.plus(GRACE_S), "")
    except DeadlineError:
        raise attempt.error() from None


def is_gone(job: Job) -> bool:
    """Whether nothing listens any more where the store was."""
    try:
        socket.create_connection((job.address, job.port), PROBE_S).close()
    except OSError as error:
        return isinstance(error, ConnectionRefusedError)
    return False


class PortInUseError(InputError):
    """Another process listens at the port where this one is to host the store."""


class _Attempt:
    """One process's way to the store, and how far it got."""

    def __init__(self, job: Job, deadline: Deadline) -> None:
        self.job, self.deadline = job, deadline
        self._kind: type[DeadlineError] | type[InputError] = InputError
        self._reason = ""
        self._reached = self._warned = False

    def error(self) -> DeadlineError | InputError:
        """Why there is no connection at the deadline."""
        return self._kind(f"rank {self.job.rank}: {self._reason}; waited {self.deadline.timeout_s:g} s")

    def run(self) -> dist.Store:
        """Resolve the address, then open the store or connect to it. Tries again until the deadline."""
        job = self.job
        while True:
            try:
                self._blame(f"MASTER_ADDR={job.address} is not resolved: the name service does not answer", InputError)
                families = [each[0] for each in socket.getaddrinfo(job.address, job.port, type=socket.SOCK_STREAM)]
                return self._host(min(families)) if job.hosts_store else self._join()
            except socket.gaierror as error:
                # The name of a container is not there before the container.
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
        what = f"{self.job.host} is stopped, or another program has the port"
        return f"{self.job} takes the connection and does not answer: {what}"

    def _warn(self) -> None:
        if not self._warned and self.deadline.timeout_s - self.deadline.left_s > WARN_S:
            self._warned = True
            warnings.warn(f"{self.error()}; tries again", stacklevel=2)

    def _join(self) -> dist.Store:
        """Connect to the store of another process. A plain connection first: torch prints its failed attempts."""
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
        """Open the store, or join the one that this process has open at this port."""
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
                wait_for_workers=False,  # so that rank 0 can say who is missing
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
    """Return the loopback address that MASTER_ADDR stands for, None for other hosts.

    A host's own name counts as another host, also where it resolves to a loopback address: other hosts resolve it to an
    address that they can reach.
    """
    if name == "localhost" or name.endswith(".localhost"):
        return "::1" if family == socket.AF_INET6 else "127.0.0.1"
    try:
        return name if ip_address(name).is_loopback else None
    except ValueError:
        return None


def _bound_socket(address: str, port: int, family: int) -> socket.socket:
    """Return a socket that is bound to `address`, at `port` if it is free and else at any port.

    Torch refuses the second kind, unless this process has a store open at `port`, which it then uses instead.
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
