"""A process that does not fit into a ring is refused, and the ring's store says why."""

from __future__ import annotations

import re

import pytest
import torch.distributed as dist

from ringattn.errors import DisagreementError, InputError
from ringattn.transport.control_store import ControlStore, first_cause
from ringattn.transport.meeting import claim_rank

PROCESS = r"process \d+ on \S+ \(at [\d:]+ UTC\)"
SIZES = rf"rank 0, {PROCESS}, opened a ring of 2 ranks, and rank 1, {PROCESS}, a ring of 3"
JOBS = rf"rank 0, {PROCESS}, belongs to job 'job', and rank 1, {PROCESS}, to job 'other'"


def test_each_rank_claims_its_number_in_each_ring() -> None:
    store = dist.HashStore()
    for ring in ("0", "1"):
        for rank, run_id in enumerate(("job", "", "job")):  # an unknown job may be the same
            claim_rank(ControlStore(dist.PrefixStore(ring, store), rank, 3), run_id)


@pytest.mark.parametrize(
    ("rank", "world_size", "run_id", "kind", "words"),
    [
        (0, 2, "job", InputError, rf"two processes claim rank 0, {PROCESS} and {PROCESS}"),
        (1, 3, "job", DisagreementError, SIZES),
        (1, 2, "other", DisagreementError, JOBS),
    ],
    ids=["number", "world size", "job"],
)
def test_a_process_that_does_not_fit_ends_the_ring(
    rank: int, world_size: int, run_id: str, kind: type[InputError], words: str
) -> None:
    store = dist.HashStore()
    first = ControlStore(store, 0, 2)
    claim_rank(first, "job")
    with pytest.raises(kind) as caught:
        claim_rank(ControlStore(store, rank, world_size), run_id)
    cause = first.cause()
    assert cause is not None and re.match(f"the ring of 2 ranks cannot go on: {words}; the store's host ", cause)
    assert str(caught.value) == f"rank {rank}: {cause}" and first_cause(1, caught.value) == cause
