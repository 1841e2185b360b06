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

ADVICE = "two jobs share this address and port, or a rank was started twice; give each job a MASTER_PORT of its own"


@dataclass(frozen=True)
class Claim:
    """A process that takes part in a ring as `rank` of `world_size`."""

    rank: int
    world_size: int
    run_id: str
    host: str
    pid: int
    at: str
    nonce: str

    @classmethod
    def mine(cls, rank: int, world_size: int, run_id: str) -> Claim:
        """This process's claim, unlike any other."""
        clock = time.strftime("%H:%M:%S", time.gmtime())
        return cls(rank, world_size, run_id, socket.gethostname(), os.getpid(), clock, secrets.token_hex(8))

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host} (at {self.at} UTC)"


def claim_rank(control: ControlStore, run_id: str) -> None:
    """Claim this rank's number. `run_id`: of the job, empty if unknown.

    Raises `InputError` if another process has the number, and `DisagreementError` if the first process of the ring has
    another world size or belongs to another job; the reason is published.
    """
    mine = Claim.mine(control.rank, control.world_size, run_id)
    first = _put_first(control, "job", mine)
    other, this = f"rank {first.rank}, {first},", f"rank {mine.rank}, {mine},"
    if first.world_size != mine.world_size:
        words = f"{other} opened a ring of {first.world_size} ranks, and {this} a ring of {mine.world_size}"
        _refuse(control, DisagreementError, words, first)
    if first.run_id and mine.run_id and first.run_id != mine.run_id:
        words = f"{other} belongs to job {first.run_id!r}, and {this} to job {mine.run_id!r}"
        _refuse(control, DisagreementError, words, first)
    holder = _put_first(control, f"claim/{mine.rank}", mine)
    if holder != mine:
        _refuse(control, InputError, f"two processes claim rank {mine.rank}, {holder} and {mine}", first)


def _put_first(control: ControlStore, key: str, mine: Claim) -> Claim:
    return Claim(**json.loads(control.put_first(key, json.dumps(asdict(mine)))))


def _refuse(control: ControlStore, kind: type[InputError], words: str, first: Claim) -> None:
    ring = f"rank {control.rank}: the ring of {first.world_size} ranks cannot go on"
    error = kind(f"{ring}: {words}; {control.store.host}; {ADVICE}")
    control.publish_cause(error)
    raise error
