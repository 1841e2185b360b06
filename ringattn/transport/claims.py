"""Each rank claims its number in the ring's store, so that two jobs at one port never form a ring unnoticed.

Guarantees: of two processes with one rank number, the second raises; so does a process with another world size or of
another job. It publishes the reason in the ring's store before it raises, so that all ranks of the ring fail with the
same sentence: ranks that are opening the ring while they wait, ranks of an open ring when they next read its cause.
"""

from __future__ import annotations

import json
import os
import secrets
import socket
import time
from dataclasses import asdict, dataclass

from ringattn.errors import DisagreementError, InputError
from ringattn.transport.control_store import ControlStore

ADVICE = "two jobs share this address and port, or a rank was started twice; give each job a different MASTER_PORT"


@dataclass(frozen=True)
class Claim:
    """A process that takes part in a ring as `rank` of `world_size`. `clock`: its time; `nonce`: unique."""

    rank: int
    world_size: int
    run_id: str
    host: str
    pid: int
    clock: str
    nonce: str

    @classmethod
    def of_this_process(cls, rank: int, world_size: int, run_id: str) -> Claim:
        """A new claim."""
        clock = time.strftime("%H:%M:%S", time.gmtime())
        return cls(rank, world_size, run_id, socket.gethostname(), os.getpid(), clock, secrets.token_hex(8))

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host} (at {self.clock} UTC)"


def claim_rank(control: ControlStore, run_id: str) -> None:
    """Claim this rank's number. `run_id`: of the job, empty if unknown.

    Raises `InputError` if another process has the number, and `DisagreementError` if the first process of the ring has
    another world size or belongs to another job; the reason is published.
    """
    claim = Claim.of_this_process(control.rank, control.world_size, run_id)
    first = _put_first(control, "job", claim)
    if difference := _difference(first, claim):
        _refuse(control, first, DisagreementError, difference)
    holder = _put_first(control, f"claim/{claim.rank}", claim)
    if holder != claim:
        _refuse(control, first, InputError, f"two processes claim rank {claim.rank}, {holder} and {claim}")


def _difference(first: Claim, claim: Claim) -> str:
    """Why two processes cannot be ranks of one ring; empty if they can."""
    sides = f"rank {first.rank}, {first}, {{}}, and rank {claim.rank}, {claim}, {{}}"
    if first.world_size != claim.world_size:
        return sides.format(f"opened a ring of {first.world_size} ranks", f"a ring of {claim.world_size}")
    if first.run_id and claim.run_id and first.run_id != claim.run_id:
        return sides.format(f"belongs to job {first.run_id!r}", f"to job {claim.run_id!r}")
    return ""


def _refuse(control: ControlStore, first: Claim, kind: type[InputError], reason: str) -> None:
    ring = f"rank {control.rank}: the ring of {first.world_size} ranks cannot go on"
    error = kind(f"{ring}: {reason}; {control.store.host}; {ADVICE}")
    control.publish_cause(error)
    raise error


def _put_first(control: ControlStore, key: str, claim: Claim) -> Claim:
    return Claim(**json.loads(control.put_first(key, json.dumps(asdict(claim)))))
