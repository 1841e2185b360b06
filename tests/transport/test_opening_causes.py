"""If a ring cannot open, every rank reports the cause, and none blames a healthy rank."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import permutations, product
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from ringattn.errors import DeadlineError, InputError, PeerLostError
from ringattn.transport.deadline import Deadline
from ringattn.transport.meeting import Job, Meeting, connect, job_of, loopback_of
from tests.contract.processes import free_port
from tests.transport.opening_causes import CAUSES, PROCESS, SHOWS, TRANSPORTS, Rank, complaints, suffer

SLACK_S = 4.0
"""The delay that other tests on the same machine may add to a deadline."""
INSIDE = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "node0", "MASTER_PORT": "29500"}
LATER = [name for name in CAUSES if "later" in name]
"""The faults that occur after the ranks have chosen a transport. Before that, the transports behave in the same way."""
AT_ONCE = 4
"""The number of rings that open at once. Their ranks wait for deadlines most of the time."""
Cell = tuple[str, str]
"""A cause and a transport."""


def batches() -> list[Any]:
    """Return pytest parameters of `AT_ONCE` cells each. Those that only repeat a cause over shm are marked slow."""
    params = []
    cells = list(product(CAUSES, TRANSPORTS))
    quick = [cell for cell in cells if cell[1] == "gloo" or cell[0] in LATER]
    for part, marks in ((quick, ()), ([cell for cell in cells if cell not in quick], pytest.mark.slow)):
        for first in range(0, len(part), AT_ONCE):
            batch = part[first : first + AT_ONCE]
            params.append(pytest.param(batch, marks=marks, id="from {} over {} on".format(*batch[0])))
    return params


@pytest.mark.parametrize("batch", batches())
def test_every_rank_reports_why_a_ring_does_not_open(batch: list[Cell]) -> None:
    def wrong(cell: Cell) -> list[str]:
        cause = CAUSES[cell[0]]
        return complaints(cause, suffer(cause, cell[1]), SLACK_S)

    with ThreadPoolExecutor(AT_ONCE) as pool:
        failed = {cell: lines for cell, lines in zip(batch, pool.map(wrong, batch), strict=True) if lines}
    assert failed == {}


# --- the environment -------------------------------------------------------------------------------------------------


def test_the_job_of_an_environment() -> None:
    assert (
        job_of({}) is None and job_of({"WORLD_SIZE": "1"}) is None and job_of({"WORLD_SIZE": "1", "RANK": "0"}) is None
    )
    assert job_of(INSIDE) == Job(1, 2, "node0", 29500)
    facts = {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RUN_ID": "run", "TORCHELASTIC_RESTART_COUNT": "3"}
    assert job_of(INSIDE | facts | {"SLURM_JOB_ID": "7"}) == Job(1, 2, "node0", 29500, True, "run", "3")
    assert job_of(INSIDE | {"SLURM_JOB_ID": "7"}) == Job(1, 2, "node0", 29500, run_id="7")


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("RANK", None, "RANK is not set; it must be an integer from 0 to 1, since WORLD_SIZE=2"),
        ("RANK", "x", "RANK is 'x'; it must be an integer from 0 to 1, since WORLD_SIZE=2"),
        ("RANK", "2", "RANK is '2'; it must be an integer from 0 to 1, since WORLD_SIZE=2"),
        ("RANK", "-1", "RANK is '-1'; it must be an integer from 0 to 1, since WORLD_SIZE=2"),
        ("RANK", "1.0", "RANK is '1.0'; it must be an integer from 0 to 1, since WORLD_SIZE=2"),
        ("WORLD_SIZE", None, "WORLD_SIZE is not set; it must be an integer of at least 1"),
        ("WORLD_SIZE", "0", "WORLD_SIZE is '0'; it must be an integer of at least 1"),
        ("WORLD_SIZE", "", "WORLD_SIZE is ''; it must be an integer of at least 1"),
        ("WORLD_SIZE", "1", "RANK is '1'; it must be an integer from 0 to 0, since WORLD_SIZE=1"),
        ("MASTER_ADDR", None, "rank 1: MASTER_ADDR is not set; it must be the host name or address of rank 0"),
        ("MASTER_PORT", None, "MASTER_PORT is not set; it must be an integer from 1 to 65535"),
        ("MASTER_PORT", "0", "MASTER_PORT is '0'; it must be an integer from 1 to 65535"),
        ("MASTER_PORT", "65536", "MASTER_PORT is '65536'; it must be an integer from 1 to 65535"),
    ],
)
def test_a_wrong_variable_is_named(name: str, value: str | None, text: str) -> None:
    environment = {key: each for key, each in (INSIDE | {name: value}).items() if each is not None}
    with pytest.raises(InputError) as caught:
        job_of(environment)
    assert str(caught.value).startswith(f"{text}; start the ranks with torchrun")


# --- where the store listens -----------------------------------------------------------------------------------------


def listening_at(port: int) -> set[str]:
    """Return the addresses on which this machine listens at a port, as the kernel formats them."""
    rows = [line.split() for table in ("tcp", "tcp6") for line in Path("/proc/net", table).read_text().splitlines()[1:]]
    local = [row[1].split(":") for row in rows if row[3] == "0A"]
    return {address for address, number in local if int(number, 16) == port}


@pytest.mark.parametrize("name", ["127.0.0.1", "localhost"])
def test_a_store_at_a_loopback_address_listens_only_there(name: str) -> None:
    port = free_port()
    store = connect(Job(0, 2, name, port), Deadline(20.0))
    assert listening_at(port) == {"0100007F"}
    again = connect(Job(0, 2, name, port), Deadline(20.0))  # this process already hosts the store
    store.set("key", "value")
    assert again.get("key") == b"value" and listening_at(port) == {"0100007F"}
    client = connect(Job(1, 2, name, port), Deadline(20.0))
    assert client.get("key") == b"value"


def test_only_loopback_names_resolve_to_loopback() -> None:
    v4, v6 = socket.AF_INET, socket.AF_INET6
    assert [loopback_of(name, v4) for name in ("127.0.0.1", "127.8.0.1", "localhost")] == [
        "127.0.0.1", "127.8.0.1", "127.0.0.1"
    ]  # fmt: skip
    assert [loopback_of(name, v6) for name in ("::1", "localhost")] == ["::1", "::1"]
    # Debian maps a host's own name to 127.0.1.1, but other hosts reach it at another address. So the name is no
    # loopback.
    assert [loopback_of(name, v4) for name in (socket.gethostname(), "10.0.0.1", "node0")] == [None, None, None]


# --- the host of the store ends --------------------------------------------------------------------------------------

REFUSED = "import ringattn; ringattn.Ring(transport='foo')"


def test_rank_0_does_not_exit_before_the_others_have_its_cause() -> None:
    port = free_port()
    variables = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    rank_1 = Rank(variables | {"RANK": "1"}, {"transport": "gloo", "timeout_s": 20.0}, "", "")
    rank_0 = subprocess.Popen([sys.executable, "-c", REFUSED], env=os.environ | variables, stderr=subprocess.PIPE)
    try:
        rank_1.ready()
        assert rank_0.stderr is not None
        while b"transport='foo' is not known" not in rank_0.stderr.readline():  # it has raised, and is about to exit
            assert rank_0.poll() is None
        rank_1.go()
        answer = rank_1.answer(20.0)
        assert answer is not None and answer.message.startswith(
            "rank 1: rank 0 failed first: InputError: transport='foo'"
        )
        assert rank_0.wait(20.0) == 1
    finally:
        rank_0.kill()
        rank_0.wait()
        rank_1.end()


@pytest.mark.parametrize(("listens", "kind", "ending"), [
    (True, DeadlineError, "did not answer within 2 s"), (False, PeerLostError, "is gone")
])  # fmt: skip
def test_a_connection_that_takes_too_long_is_not_a_host_that_is_gone(
    listens: bool, kind: type[Exception], ending: str
) -> None:
    host = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    meeting = Meeting(dist.PrefixStore("ring", host.clone()), 1, 2, Deadline(2.0))
    if not listens:
        del host
    error = meeting.fail(dist.DistNetworkError("The client socket has timed out after 2000ms"))
    assert isinstance(error, kind) and str(error).endswith(ending)
    assert str(error).startswith("rank 1: the ring of 2 ranks cannot open: the store's host ")


# --- two jobs at one port --------------------------------------------------------------------------------------------

ORDERS = [order for order in permutations(("A0", "A1", "B0", "B1")) if order[0][0] == "A"]
"""All orders in which two processes of job A and two of job B can start, up to a swap of the jobs."""
GAP_S = 0.15
"""The time between two starts. It is shorter than an opening, and longer than a rank takes to claim its number."""


@pytest.mark.parametrize("order", ORDERS, ids="-".join)
def test_two_jobs_at_one_port_never_form_a_ring_unnoticed(order: tuple[str, ...]) -> None:
    port, processes = free_port(), {}
    try:
        for name in order:
            variables = {"RANK": name[1], "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
            processes[name] = Rank(variables, {"transport": "auto", "timeout_s": 20.0}, SHOWS, "")
        for process in processes.values():
            process.ready()
        for process in processes.values():
            process.go()
            time.sleep(GAP_S)
        answers = {name: process.answer(20.0) for name, process in processes.items()}
    finally:
        for process in processes.values():
            process.end()
    for name, answer in answers.items():
        assert answer is not None, (name, answers)
        claimed = re.search(
            rf"the ring of 2 ranks cannot go on: two processes claim rank [01], {PROCESS} and", answer.message
        )
        assert claimed, (name, answers)
    # One of two processes with the same rank number is refused. If processes of both jobs have already formed a ring,
    # they read the cause in its store.
    assert sum(answer.kind == "InputError" for answer in answers.values() if answer) >= 1, answers
