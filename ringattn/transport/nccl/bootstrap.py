"""Exchanges of an NCCL ring through the control store: at opening, and in all-gathers.

Opening compares each rank's facts; then rank 0 shares the communicator's unique id. Missing ranks are named at the
deadline. Ranks that do not fit together are refused before any NCCL call, with the same error on every rank.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

from ringattn.errors import DeadlineError, DisagreementError, InputError, PeerLostError, RingError
from ringattn.transport.base import Opening
from ringattn.transport.control_store import ControlStore
from ringattn.transport.deadline import Deadline
from ringattn.transport.location import Location
from ringattn.transport.nccl.binding import version_text
from ringattn.transport.nccl.options import NcclOptions
from ringattn.transport.nccl.supervisor import LOOK_PER_RANK_S, LOOK_S, Supervisor

FailureCheck = Callable[[], None]


@dataclass(frozen=True)
class Arrival:
    """The facts that a rank publishes at opening. `nccl_id`: NCCL's identifier of the host, see `NCCL_HOSTID`."""

    rank: int
    nccl_id: str
    gpu_uuid: str
    nccl_version: int
    ringattn_version: str
    registers: bool
    options: NcclOptions

    @classmethod
    def parse(cls, text: bytes) -> Arrival:
        """Return the arrival that another rank published as its `text()`."""
        facts = json.loads(text)
        return cls(**{**facts, "options": NcclOptions(**facts["options"])})

    def text(self) -> str:
        """Return the facts as text for the store."""
        return json.dumps(asdict(self))


def meet(
    control: ControlStore, arrival: Arrival, locations: Sequence[Location], deadline: Deadline, watch: FailureCheck
) -> None:
    """Return when all ranks have arrived and fit together.

    One rank compares the facts for all. Raises `DeadlineError`, which names the missing ranks, and the errors of
    `check_fit`.
    """

    def refusal_of(texts: list[bytes]) -> bytes:
        """Return the error class and message that every rank raises; empty if the ranks fit together."""
        try:
            check_fit([Arrival.parse(text) for text in texts], locations)
        except InputError as error:
            return f"{type(error).__name__} {error}".encode()
        return b""

    try:
        refusal = control.combine("arrived", arrival.text().encode(), refusal_of, deadline, watch).decode()
    except DeadlineError as error:
        raise DeadlineError(f"rank {arrival.rank} opened a ring of {control.world_size}: {error}") from error
    if refusal:
        kind, _, message = refusal.partition(" ")
        raise (DisagreementError if kind == DisagreementError.__name__ else InputError)(message)


def check_fit(arrivals: list[Arrival], locations: Sequence[Location]) -> None:
    """Raise `DisagreementError` or `InputError`, the same on every rank, if these ranks cannot share a communicator."""
    for fact in _compared(arrivals[0]):
        ranks = defaultdict(list)
        for arrival in arrivals:
            ranks[_compared(arrival)[fact]].append(arrival.rank)
        if len(ranks) > 1:
            listed = "; ".join(f"{value} on ranks {ranks_of_value}" for value, ranks_of_value in ranks.items())
            raise DisagreementError(f"the ranks differ in {fact}: {listed}")
    gpus = defaultdict(list)
    for arrival in arrivals:
        gpus[arrival.nccl_id, arrival.gpu_uuid].append(arrival)
    for shared in gpus.values():
        if len(shared) > 1:
            users = ", ".join(f"rank {arrival.rank} (process {locations[arrival.rank].pid})" for arrival in shared)
            raise InputError(
                f"{users} use the same GPU {shared[0].gpu_uuid} of {locations[shared[0].rank].host}, and NCCL refuses "
                "that; start one process per GPU under torchrun, which sets LOCAL_RANK (for a test on one GPU see "
                "docs/nccl.md)"
            )


def _compared(arrival: Arrival) -> dict[str, str]:
    """Return the facts that must be equal on all ranks."""
    compared = {"NCCL version": version_text(arrival.nccl_version), "ringattn version": arrival.ringattn_version}
    for name in ("binding", "sm_margin", "cga_cluster_size", "channels_per_net_peer", "name", "blocking"):
        compared[name] = str(getattr(arrival.options, name))
    return {**compared, "registered buffers": str(arrival.registers)}


def share_unique_id(control: ControlStore, make: Callable[[], bytes], deadline: Deadline, watch: FailureCheck) -> bytes:
    """Return on every rank the id that `make` returns on rank 0. Raises `DeadlineError`, and the errors of `make`."""
    if control.rank == 0:
        unique_id = make()
        control.set("unique_id", unique_id)
        return unique_id
    if not control.appears("unique_id", deadline, watch):
        raise DeadlineError(f"rank {control.rank}: rank 0 created no unique id within {deadline.timeout_s} s")
    return control.get("unique_id")


def all_ready(control: ControlStore, deadline: Deadline, watch: FailureCheck) -> None:
    """Return when every rank's communicator works, and delete the unique id. Raises `DeadlineError`."""
    try:
        control.gather("ready", b"", deadline, watch)
    except DeadlineError as error:
        raise DeadlineError(f"rank {control.rank}: not all communicators became ready: {error}") from error
    if control.rank == 0:
        control.delete_key("unique_id")


class StoreAllGather:
    """All-gathers of a few bytes through the control store, numbered from 0.

    Guarantees: each all-gather ends at the deadline, at the first failure of any rank, or when a rank makes a different
    call. The store holds the bytes of at most two all-gathers.
    """

    def __init__(self, opening: Opening, supervisor: Supervisor) -> None:
        self._opening, self._control, self._supervisor = opening, opening.control, supervisor
        self._number = 0
        # All waiting ranks poll for the missing ones, so each polls less often the more ranks there are.
        self._look_s = max(LOOK_S, LOOK_PER_RANK_S * opening.world_size)
        self._next_look = Deadline(0.0)

    def all_gather_bytes(self, payload: bytes) -> list[bytes]:
        """Return all payloads, by rank. Raises `DeadlineError`, `PeerLostError`, and the supervisor's failure."""
        control, supervisor, stem = self._control, self._supervisor, f"all_gather/{self._number}"
        label = f"rank {control.rank} in all-gather {self._number}"
        supervisor.where, supervisor.gathering = f"all-gather {self._number}", True
        self._next_look = Deadline(self._look_s)
        try:
            answers = control.gather(stem, payload, Deadline(self._opening.timeout_s), lambda: self._watch(stem))
            if self._number:  # every rank has reached this all-gather, so nothing reads the previous one any more
                control.forget(f"all_gather/{self._number - 1}")
        except DeadlineError as error:
            raise DeadlineError(f"{label}: {self._late(stem)}") from error
        except RingError as error:
            kind = type(error) if isinstance(error, DisagreementError) else PeerLostError
            raise kind(f"{label}: {error}") from error
        except RuntimeError as error:
            raise PeerLostError(f"{label}: the store's host is gone: {error}") from error
        # Only after success: after an error, the attribution of the failure still needs the missing ranks.
        supervisor.gathering, supervisor.missing = False, frozenset()
        self._number += 1
        return answers

    def _late(self, stem: str) -> str:
        """Describe the ranks that are missing at the deadline: those without an entry `stem/RANK`."""
        try:
            missing = self._control.missing(stem)
        except RuntimeError as unanswered:
            return str(unanswered)
        self._supervisor.missing = frozenset(missing)
        return f"no answer from ranks {missing} within {self._opening.timeout_s} s"

    def _watch(self, stem: str) -> None:
        """Raise the ring's failure, such as a difference between calls, or an error if a missing rank has closed.

        A rank is missing as long as it has no entry `stem/RANK`.
        """
        supervisor = self._supervisor
        supervisor.raise_failure()
        if self._next_look.passed:
            self._next_look = Deadline(self._look_s)
            supervisor.missing = frozenset(self._control.missing(stem))
        for rank in sorted(supervisor.missing & supervisor.closed):
            # The rank may have joined the all-gather after the last check, and closed after that.
            if not self._control.holds(f"{stem}/{rank}"):
                raise PeerLostError(f"rank {rank} closed its ring")
