"""What the ranks of a ring tell each other through the control store: at opening, at each call, after a failure.

Opening: each rank's facts are compared, then rank 0 shares the communicator's unique id. Ranks that do not arrive are
named at the deadline; ranks that do not fit together are refused before NCCL is asked, on every rank alike.
Calls: each heartbeat carries the rank's newest calls, so that ranks need not check a call again that they have checked
once. Failure attribution: a rank that is alive and merely waits is never named as the cause.
"""

from __future__ import annotations

import json
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from hashlib import sha256

from ringattn.errors import DeadlineError, DisagreementError, InputError
from ringattn.transport.control_store import ControlStore
from ringattn.transport.heartbeat import ENDED, INTERVAL_S, PER_RANK_S, Heartbeat
from ringattn.transport.location import Location
from ringattn.transport.nccl.binding import version_text
from ringattn.transport.nccl.device import Deadline, wait_until
from ringattn.transport.nccl.options import NcclOptions

FailureCheck = Callable[[], None]


@dataclass(frozen=True)
class Arrival:
    """What a rank says of itself. `nccl_id`: what NCCL takes for its host, which `NCCL_HOSTID` may set."""

    rank: int
    nccl_id: str
    gpu_uuid: str
    nccl_version: int
    ringattn_version: str
    registers: bool
    options: NcclOptions

    @classmethod
    def parse(cls, text: bytes) -> Arrival:
        """The inverse of `text`."""
        facts = json.loads(text)
        return cls(**{**facts, "options": NcclOptions(**facts["options"])})

    def text(self) -> str:
        """For the store."""
        return json.dumps(asdict(self))


def gather_arrivals(control: ControlStore, mine: Arrival, deadline: Deadline, watch: FailureCheck) -> list[Arrival]:
    """Put up this rank's arrival and return everyone's. Raises `DeadlineError` that names who is missing."""
    control.write(f"arrived/{mine.rank}", mine.text())
    if not wait_until(lambda: control.complete("arrived"), deadline, watch):
        missing = control.missing("arrived")
        raise DeadlineError(
            f"rank {mine.rank} opened a ring of {control.world_size}: ranks {missing} did not arrive within "
            f"{deadline.timeout_s} s"
        )
    return [Arrival.parse(control.read(f"arrived/{rank}")) for rank in control.everyone()]


def check_fit(arrivals: list[Arrival], locations: Sequence[Location]) -> None:
    """Raise `DisagreementError` or `InputError`, the same on every rank, if these ranks cannot share a communicator."""
    for what, values in (
        ("NCCL version", [version_text(arrival.nccl_version) for arrival in arrivals]),
        ("ringattn version", [arrival.ringattn_version for arrival in arrivals]),
        ("binding", [arrival.options.binding for arrival in arrivals]),
        ("sm_margin", [str(arrival.options.sm_margin) for arrival in arrivals]),
        ("cga_cluster_size", [str(arrival.options.cga_cluster_size) for arrival in arrivals]),
        ("channels_per_net_peer", [str(arrival.options.channels_per_net_peer) for arrival in arrivals]),
        ("name", [arrival.options.name for arrival in arrivals]),
        ("registered slots", [str(arrival.registers) for arrival in arrivals]),
        ("blocking", [str(arrival.options.blocking) for arrival in arrivals]),
    ):
        if len(set(values)) > 1:
            ranks = defaultdict(list)
            for arrival, value in zip(arrivals, values, strict=True):
                ranks[value].append(arrival.rank)
            listed = "; ".join(f"{value} on ranks {which}" for value, which in ranks.items())
            raise DisagreementError(f"the ranks differ in {what}: {listed}")
    gpus = defaultdict(list)
    for arrival in arrivals:
        gpus[arrival.nccl_id, arrival.gpu_uuid].append(arrival)
    for shared in gpus.values():
        if len(shared) > 1:
            who = ", ".join(f"rank {arrival.rank} (process {locations[arrival.rank].pid})" for arrival in shared)
            raise InputError(
                f"{who} use the same GPU {shared[0].gpu_uuid} of {locations[shared[0].rank].host}, and NCCL refuses "
                "that; start one process per GPU under torchrun, which sets LOCAL_RANK (for a test on one GPU see "
                "docs/nccl.md)"
            )


def share_unique_id(control: ControlStore, make: Callable[[], bytes], deadline: Deadline, watch: FailureCheck) -> bytes:
    """The id that rank 0 makes, on every rank. Raises `DeadlineError`, and on rank 0 what `make` raises."""
    if control.rank == 0:
        made = make()
        control.write("unique_id", made)
        return made
    if not wait_until(lambda: control.holds("unique_id"), deadline, watch):
        raise DeadlineError(f"rank {control.rank}: rank 0 made no unique id within {deadline.timeout_s} s")
    return control.read("unique_id")


def all_ready(control: ControlStore, deadline: Deadline, watch: FailureCheck) -> None:
    """Return when every rank's communicator works; the unique id is then gone. Raises `DeadlineError`."""
    control.write(f"ready/{control.rank}", "1")
    if not wait_until(lambda: control.complete("ready"), deadline, watch):
        missing = control.missing("ready")
        raise DeadlineError(
            f"rank {control.rank}: the communicators of ranks {missing} were not ready within {deadline.timeout_s} s"
        )
    if control.rank == 0:
        control.store.delete_key("unique_id")


WINDOW = 64
"""Newest calls that are kept one by one."""
MILESTONE = 64
MILESTONES = 64
WORDS = 400


class CallWindow:
    """Written by the thread that makes the calls, read by the supervisor and the heartbeat thread."""

    def __init__(self) -> None:
        self._newest: deque[tuple[int, str]] = deque(maxlen=WINDOW)
        self._milestones: deque[tuple[int, str]] = deque(maxlen=MILESTONES)
        self._chain = b""
        self._words = ""
        self.number = 0

    def announce(self, number: int, digest: bytes, words: str) -> None:
        """This rank now makes its call `number`."""
        self._chain = sha256(self._chain + digest).digest()[:8]
        self._words, self.number = words, number
        entry = number, self._chain.hex()
        self._newest.append(entry)
        if number % MILESTONE == 0:
            self._milestones.append(entry)

    def status(self, **place: object) -> str:
        """For the heartbeat; `place` is what `places` gives back."""
        calls = [*self._milestones, *self._newest]
        return json.dumps({**place, "call": self.number, "words": self._words[:WORDS], "calls": calls})

    def differs(self, status: str) -> str | None:
        """The first call that a peer with this `status` is known to have made otherwise, in words; None if none."""
        there = json.loads(status)
        theirs = dict(map(tuple, there["calls"]))
        for number, chain in [*self._milestones, *self._newest]:
            if theirs.get(number, chain) != chain:
                return f"call {number} is another there (now at '{there['words']}', here '{self._words[:WORDS]}')"
        return None

    @staticmethod
    def places(status: str) -> dict[str, object]:
        """What `status` was given, and `call`, the number of the rank's newest call."""
        return json.loads(status)


SILENCE_S = 5 * INTERVAL_S
"""How long a heartbeat must not change, in small rings; in larger ones the interval is longer."""


def attribute_failure(control: ControlStore, calls: CallWindow, waited_for: set[int]) -> str:
    """For an error, beginning with `; `: the ranks at fault, or else those behind; then the live ones of `waited_for`.

    A rank that is behind may itself only wait for the rank at fault.
    """
    others = [rank for rank in control.everyone() if rank != control.rank]
    reader = Heartbeat(control.store, control.rank)
    try:
        silent = reader.silent(others, SILENCE_S + 3 * PER_RANK_S * control.world_size)
        heartbeats = {rank: newest for rank in others if (newest := reader.last(rank)) is not None}
    except RuntimeError as error:
        return f"; the store's host is gone: {error}"
    at_fault, behind, alive = [], [], []
    for rank in others:
        place = calls.places(heartbeats[rank].status) if rank in heartbeats else None
        at = f"'{place['at']}' of call {place['call']}" if place else ""
        if rank in silent:
            last = f"last heard in {at}" if at else "never heard"
            at_fault.append(f"rank {rank} is silent (stopped, stuck or gone), {last}")
        elif place is None or heartbeats[rank].count == ENDED:
            continue
        elif place["launching"]:
            at_fault.append(f"rank {rank} is stuck in a launch, in {at}")
        elif place["computing"]:
            at_fault.append(
                f"rank {rank} is still computing: its GPU has not reached its oldest exchange; host in {at}"
            )
        elif int(str(place["call"])) < calls.number:
            behind.append(f"rank {rank} is behind, in {at}, this rank in call {calls.number}")
        elif rank in waited_for:
            alive.append(f"rank {rank} lives, in {at}")
    return "".join(f"; {each}" for each in [*(at_fault or behind), *alive])
