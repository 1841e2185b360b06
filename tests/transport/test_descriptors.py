"""A rank that runs out of file descriptors says so in its error, and the other ranks do not hang."""

from __future__ import annotations

import os
import resource

import pytest

from ringattn import Ring
from ringattn.errors import RingError
from ringattn.observe.files import descriptor_shortage
from tests.contract.processes import Processes


def open_with_few(rank: int, world_size: int, transport: str) -> str:
    """Open a ring although rank 1 may open only three more files. Return this rank's error, or "opened"."""
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world_size))
    if rank == 1:
        _, hard_limit = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + 3, hard_limit))
    try:
        Ring(transport=transport, timeout_s=4.0).barrier()
    except RingError as error:
        return str(error)
    return "opened"


@pytest.mark.parametrize("transport", ["gloo", "shm"])
def test_a_rank_without_descriptors_reports_it(transport: str) -> None:
    with Processes(2) as processes:
        messages = processes.run(open_with_few, transport)
    assert "too many open files" in messages[1].lower(), messages
    assert "ulimit -n" in messages[1], messages
    assert messages[0] != "opened", messages


def test_a_process_with_enough_descriptors_reports_nothing() -> None:
    assert descriptor_shortage() == ""


def test_few_free_descriptors_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "listdir", lambda path: ["fd"] * 60)
    monkeypatch.setattr(resource, "getrlimit", lambda which: (64, 4096))
    expected = "too many open files: 4 of 64 descriptors are free; raise the limit with `ulimit -n`"
    assert descriptor_shortage() == expected
