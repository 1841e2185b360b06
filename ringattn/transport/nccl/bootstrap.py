"""What the ranks of a ring tell each other through the control store: at opening, and at each call.

Opening: each rank's facts are compared, then rank 0 shares the communicator's unique id. Ranks that do not arrive are
named at the deadline; ranks that do not fit together are refused before NCCL is asked, on every rank alike.
Calls: each heartbeat tells of some of the rank's calls, so that ranks need not check a call again that they have
checked once.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from hashlib import sha256
from typing import Any

from ringattn.errors import DeadlineError, DisagreementError, InputError
from ringattn.transport.control_store import ControlStore
from ringattn.transport.deadline import Deadline
from ringattn.transport.location import Location
from ringattn.transport.nccl.binding import version_text
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


def meet(
    control: ControlStore, mine: Arrival, locations: Sequence[Location], deadline: Deadline, watch: FailureCheck
) -> None:
    """Return when all ranks have arrived and fit together.

    One rank compares them for all. Raises `DeadlineError` that names who is missing, and what `check_fit` raises.
    """

    def refusal_of(texts: list[bytes]) -> bytes:
        """Why the ranks do not fit together, as every rank reads it: empty if they do."""
        try:
            check_fit([Arrival.parse(text) for text in texts], locations)
        except InputError as error:
            return f"{type(error).__name__} {error}".encode()
        return b""

    try:
        refusal = control.combine("arrived", mine.text().encode(), refusal_of, deadline, watch).decode()
    except DeadlineError as error:
        raise DeadlineError(f"rank {mine.rank} opened a ring of {control.world_size}: {error}") from error
    if refusal:
        kind, _, words = refusal.partition(" ")
        raise (DisagreementError if kind == DisagreementError.__name__ else InputError)(words)


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
    if not control.appears("unique_id", deadline, watch):
        raise DeadlineError(f"rank {control.rank}: rank 0 made no unique id within {deadline.timeout_s} s")
    return control.read("unique_id")


def all_ready(control: ControlStore, deadline: Deadline, watch: FailureCheck) -> None:
    """Return when every rank's communicator works; the unique id is then gone. Raises `DeadlineError`."""
    try:
        control.gather("ready", b"", deadline, watch)
    except DeadlineError as error:
        raise DeadlineError(f"rank {control.rank}: not all communicators became ready: {error}") from error
    if control.rank == 0:
        control.store.delete_key("unique_id")


KEPT = 8192
"""Calls that a rank remembers."""
BACK = (0, 1, 2, 3, 5, 8, 16, 64, 256, 1024, 4096)
"""How far the calls lie back that a heartbeat tells of, besides the first: ranks are compared however far one is
ahead."""
WORDS = 120


class CallHistory:
    """Written by the thread that makes the calls, read by the supervisor and the heartbeat thread.

    The chain of a call is a digest of it and of all before it, so that one that is equal vouches for all before it.
    """

    def __init__(self) -> None:
        self._chains: dict[int, str] = {}
        self._chain = b""
        self.words = ""
        self.number = 0

    def announce(self, number: int, digest: bytes, words: str) -> None:
        """This rank now makes its call `number`."""
        self._chain = sha256(self._chain + digest).digest()[:8]
        self._chains[number] = self._chain.hex()
        self._chains.pop(number - KEPT, None)
        self.words, self.number = words[:WORDS], number

    def told(self) -> dict[str, object]:
        """For the heartbeat: a few hundred bytes, however many calls there were."""
        number = self.number
        return {"call": number, "words": self.words, "calls": [self._chains.get(n, "") for n in _told_of(number)]}

    def differs(self, theirs: dict[str, Any]) -> str | None:
        """The first call that the rank which told `theirs` is known to have made otherwise, in words; None if none."""
        equal = 0
        for number, chain in zip(_told_of(theirs["call"]), theirs["calls"], strict=True):
            mine = self._chains.get(number, "")
            if mine and chain and mine != chain:
                which = f"call {number}" if number == equal + 1 else f"one of calls {equal + 1} to {number}"
                return f"{which} is another there (now at '{theirs['words']}', here '{self.words}')"
            equal = number if mine and chain else equal
        return None


def _told_of(number: int) -> list[int]:
    """The calls of which a rank tells that makes its call `number`, ascending."""
    return sorted({max(number - back, 1) for back in BACK}) if number else []
