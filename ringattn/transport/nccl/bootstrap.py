"""How the ranks of a ring find each other: who has come, whether they fit together, and the communicator's unique id.

Keys lie under the ring's own prefix (run, restart, opening), so an id of a former life cannot be read. Guarantees:
ranks that do not come are named at the deadline; ranks that cannot work together are refused before NCCL is asked, on
every rank alike.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import NamedTuple

from ringattn.errors import DeadlineError, DisagreementError, InputError
from ringattn.transport.board import Board
from ringattn.transport.nccl.binding import version_text
from ringattn.transport.nccl.options import NcclOptions
from ringattn.transport.nccl.waiting import Deadline, wait_until

PassProfiler = Callable[[], None]


class Host(NamedTuple):
    """Where a process runs. `nccl_id`: what NCCL takes for the host, which `NCCL_HOSTID` may set."""

    name: str
    nccl_id: str
    pid: int


@dataclass(frozen=True)
class Arrival:
    """What a rank says of itself."""

    rank: int
    host: Host
    gpu_uuid: str
    nccl_version: int
    ringattn_version: str
    registers: bool
    options: NcclOptions

    @classmethod
    def parse(cls, text: bytes) -> Arrival:
        """The inverse of `text`."""
        facts = json.loads(text)
        return cls(**{**facts, "host": Host(*facts["host"]), "options": NcclOptions(**facts["options"])})

    def text(self) -> str:
        """For the store."""
        return json.dumps(asdict(self))


def arrive(board: Board, mine: Arrival, deadline: Deadline, watch: PassProfiler) -> list[Arrival]:
    """Put up this rank's arrival and return everyone's. Raises `DeadlineError` that names who is missing."""
    board.write(f"arrived/{mine.rank}", mine.text())
    if not wait_until(lambda: board.complete("arrived"), deadline, watch):
        missing = board.missing("arrived")
        raise DeadlineError(
            f"rank {mine.rank} opened a ring of {board.world_size}: ranks {missing} did not come within "
            f"{deadline.timeout_s} s"
        )
    return [Arrival.parse(board.read(f"arrived/{rank}")) for rank in board.everyone()]


def check_fit(arrivals: list[Arrival]) -> None:
    """Raise `DisagreementError` or `InputError`, the same on every rank, if these ranks cannot share a communicator."""
    for what, told in (
        ("NCCL version", [version_text(arrival.nccl_version) for arrival in arrivals]),
        ("ringattn version", [arrival.ringattn_version for arrival in arrivals]),
        ("binding", [arrival.options.binding for arrival in arrivals]),
        ("max_ctas", [str(arrival.options.max_ctas) for arrival in arrivals]),
        ("name", [arrival.options.name for arrival in arrivals]),
        ("registered slots", [str(arrival.registers) for arrival in arrivals]),
        ("blocking", [str(arrival.options.blocking) for arrival in arrivals]),
    ):
        if len(set(told)) > 1:
            ranks = defaultdict(list)
            for arrival, value in zip(arrivals, told, strict=True):
                ranks[value].append(arrival.rank)
            listed = "; ".join(f"{value} on ranks {which}" for value, which in ranks.items())
            raise DisagreementError(f"the ranks differ in {what}: {listed}")
    gpus = defaultdict(list)
    for arrival in arrivals:
        gpus[arrival.host.nccl_id, arrival.gpu_uuid].append(arrival)
    for shared in gpus.values():
        if len(shared) > 1:
            who = ", ".join(f"rank {arrival.rank} (process {arrival.host.pid})" for arrival in shared)
            raise InputError(
                f"{who} use the same GPU {shared[0].gpu_uuid} of {shared[0].host.name}, and NCCL refuses that; start "
                "one process per GPU under torchrun, which sets LOCAL_RANK (for a test on one GPU see docs/nccl.md)"
            )


def share_unique_id(board: Board, make: Callable[[], bytes], deadline: Deadline, watch: PassProfiler) -> bytes:
    """The id that rank 0 makes, on every rank. Raises `DeadlineError`, and on rank 0 what `make` raises."""
    if board.rank == 0:
        made = make()
        board.write("unique_id", made)
        return made
    if not wait_until(lambda: board.holds("unique_id"), deadline, watch):
        raise DeadlineError(f"rank {board.rank}: rank 0 made no unique id within {deadline.timeout_s} s")
    return board.read("unique_id")


def all_ready(board: Board, deadline: Deadline, watch: PassProfiler) -> None:
    """Return when every rank's communicator works; the unique id is then gone. Raises `DeadlineError`."""
    board.write(f"ready/{board.rank}", "1")
    if not wait_until(lambda: board.complete("ready"), deadline, watch):
        missing = board.missing("ready")
        raise DeadlineError(
            f"rank {board.rank}: the communicators of ranks {missing} were not ready within {deadline.timeout_s} s"
        )
    if board.rank == 0:
        board.store.delete_key("unique_id")
