"""A ring that cannot open says why, on every rank, and names no rank that is well."""

from __future__ import annotations

from pathlib import Path

import pytest

from ringattn.errors import InputError
from ringattn.transport.job import Job, job_of, loopback_of
from tests.transport.opening_causes import CAUSES, TRANSPORTS, complaints, suffer

SLACK_S = 4.0
"""What other tests that run next to these may add to a deadline."""
INSIDE = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "node0", "MASTER_PORT": "29500"}
LATER = [name for name in CAUSES if "later" in name]
"""The only causes that find a transport: all others come before, where the transports do not differ."""
CELLS = [
    pytest.param(name, transport, marks=[] if transport == "gloo" or name in LATER else pytest.mark.slow)
    for name in CAUSES
    for transport in TRANSPORTS
]


@pytest.mark.parametrize(("name", "transport"), CELLS)
def test_every_rank_says_why_a_ring_does_not_open(name: str, transport: str) -> None:
    cause = CAUSES[name]
    assert complaints(cause, suffer(cause, transport), SLACK_S) == []
