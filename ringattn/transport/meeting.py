"""The rendezvous of one more ring: its store, in which each rank has a number and says why it cannot open the ring.

Guarantees: no ring opens with two processes of one rank number; a rank that cannot open publishes the cause before it
raises, also if only its arguments are wrong, and every rank that waits for it raises that cause within about a second;
the process that hosts the store does not end before the others have read the cause, or `LINGER_S` have passed.
"""

from __future__ import annotations

import atexit
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any

import torch.distributed as dist

from ringattn.errors import DeadlineError, PeerLostError, RingError
from ringattn.observe.files import descriptor_shortage
from ringattn.transport.bounded_store import host_of
from ringattn.transport.claims import claim_rank
from ringattn.transport.control_store import GRACE_S, LOST, RESTATED, ControlStore, group_store, ring_store
from ringattn.transport.deadline import Deadline, wait_until
from ringattn.transport.job import Job, PortInUseError, connect, is_gone, job_of, job_store

PUBLISH_S = 0.2
"""How long a rank that cannot open tries to publish why."""
CONTEST_S = 2.0
"""How long a rank 0 whose port is in use looks for another job's ring there."""
LINGER_S = 5.0
"""How long the process that hosts the store waits at its end until the others have read why the ring cannot open."""
INFORMED = "informed"
"""The counter of the ranks that know that the ring cannot open."""


class Meeting:
    """The store of one more ring, and this rank's number there. `job`: None unless the environment describes it."""

    def __init__(
        self, store: dist.Store, rank: int, world_size: int, deadline: Deadline, job: Job | None = None
    ) -> None:
        """`deadline`: of the whole opening, which began before the connection to `store`."""
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
        """This rank's view of the store, over a connection that no transport uses."""
        if self._control is None:
            shared = ControlStore(self.store, self.rank, self.world_size, self.deadline.timeout_s)
            self._control = shared.until(self.deadline.plus(GRACE_S)).clone()
        return self._control

    def claim(self) -> None:
        """Claim this rank's number, before any rank sends anything. Raises what `claim_rank` raises."""
        if self.world_size > 1:
            claim_rank(self.control, self.job.run_id if self.job else "")
            self._claimed = True

    def fail(self, error: Exception) -> Exception:
        """Publish why this rank cannot open the ring. Returns the error to raise."""
        failure = self._restated(error)
        if words := descriptor_shortage():
            kind = type(failure) if isinstance(failure, RingError) else RingError
            failure = kind(f"{failure}; {words}")
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
        """Say of a missed deadline and of a lost store what it means for the ring."""
        text, opens = str(error), f"the ring of {self.world_size} ranks cannot open: "
        if isinstance(error, LOST):
            host, timeout_s = host_of(self.store), self.deadline.timeout_s
            # Torch also raises this error when a new connection takes too long.
            if "timed out" in text and not (self.job and is_gone(self.job)):
                return DeadlineError(f"rank {self.rank}: {opens}{host} did not answer within {timeout_s:g} s")
            return PeerLostError(f"rank {self.rank}: {opens}{host} is gone")
        if not isinstance(error, DeadlineError) or RESTATED.search(text):
            return error
        for prefix in (f"rank {self.rank} opened a ring of {self.world_size}: ", f"rank {self.rank}: "):
            text = text.removeprefix(prefix)
        address = f" (store at {self.job})" if self.job and str(self.job) not in text else ""
        return DeadlineError(f"rank {self.rank}: {opens}{text}{address}")


def publish_refusal(group: Any, error: Exception, timeout_s: float, environment: Mapping[str, str]) -> None:
    """Tell the ranks of the ring that was to be opened that this one's arguments are refused. Never raises."""
    with suppress(Exception):  # `error` is raised in any case
        meeting = Meeting.of(group, timeout_s, environment)
        meeting.claim()
        meeting.fail(error)


def _contest(job: Job, origin: str) -> None:
    """Raise which process has this one's number, if a ring waits or works at its port, and fail that ring.

    Ranks of this job may have joined that ring already: they cannot know.
    """
    limit = Deadline(CONTEST_S)
    with suppress(DeadlineError, *LOST):
        shared = connect(replace(job, agent=True), limit)
        control = ControlStore(ring_store(origin, shared, job.rank, limit), job.rank, job.world_size, CONTEST_S)
        if control.appears(f"claim/{job.rank}", limit):
            claim_rank(control, job.run_id)


_failed: list[ControlStore] = []
"""The rings that this process could not open and whose store it hosts."""


@atexit.register
def _linger() -> None:
    """Keep the store until the other ranks know why the ring cannot open."""
    deadline = Deadline(LINGER_S)
    for control in _failed:
        view = control.until(deadline)
        with suppress(RuntimeError):
            wait_until(lambda view=view: view.add(INFORMED, 0) >= view.world_size, deadline)  # type: ignore[misc]
