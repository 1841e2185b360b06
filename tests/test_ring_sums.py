"""`Ring.all_reduce` and `Ring.broadcast`: results, entries that are None, and disagreement between ranks."""

from __future__ import annotations

import re

import pytest
import torch

import ringattn
from ringattn import InputError, Ring
from ringattn.testing import run_ranks
from tests.face import RANKS, errors


def test_sums_and_copies() -> None:
    def body(ring: Ring) -> tuple[torch.Tensor, ...]:
        floats, integers = torch.full((3,), ring.rank + 1.0), torch.tensor([ring.rank + 10], dtype=torch.int64)
        ring.all_reduce([floats, integers])
        broadcast_values = torch.full((2, 2), float(ring.rank))
        ring.broadcast([broadcast_values], src=2)
        return floats, integers, broadcast_values

    for floats, integers, broadcast_values in run_ranks(RANKS, body):
        assert (
            floats.tolist() == [6.0] * 3 and integers.tolist() == [33] and broadcast_values.unique().tolist() == [2.0]
        )
    for error in errors(lambda ring: ring.broadcast([torch.zeros(1)], src=3)):
        assert isinstance(error, InputError) and "broadcast: src must be a rank below 3, got 3" in str(error)
    for error in errors(lambda ring: ring.all_reduce([torch.zeros(1 + ring.rank)])):
        assert isinstance(error, ringattn.DisagreementError) and "rank 2: call 1: all_reduce of (3,)" in str(error)


def test_sums_skip_entries_that_are_none_on_all_ranks() -> None:
    def body(ring: Ring) -> list[torch.Tensor | None]:
        model = torch.nn.Sequential(*(torch.nn.Linear(1, 1, bias=False) for _ in range(3)))
        model[1].requires_grad_(False)
        model(torch.full((1, 1), ring.rank + 1.0)).sum().backward()
        with torch.no_grad():
            for layer in (model[0], model[2]):
                layer.weight.grad.fill_(ring.rank + 1.0)
        # `all_reduce` accepts a generator, which can be read only once.
        ring.all_reduce(weight.grad for weight in model.parameters())
        return [weight.grad for weight in model.parameters()]

    for ranks in (1, RANKS):
        for first, frozen, last in run_ranks(ranks, body):
            total = ranks * (ranks + 1) / 2
            assert first.item() == last.item() == total and frozen is None


def test_entries_that_are_none_on_some_ranks_are_named_with_the_ranks() -> None:
    def body(ring: Ring) -> None:
        ring.all_reduce([torch.ones(1)] * 70 + [None if ring.rank == 1 else torch.ones(2)])

    for error in errors(body):
        assert isinstance(error, ringattn.DisagreementError)
        assert re.search(r"rank 1: call 1: .*\(71 tensors, None at tensors\[70\]\)", str(error))
        assert re.search(r"rank 2: call 1: .*\(71 tensors\)", str(error))
        assert "pass torch.zeros_like(parameter)" in str(error)


@pytest.mark.parametrize("call", ["all_reduce", "broadcast"])
def test_shapes_that_differ_beyond_those_that_a_message_lists(call: str) -> None:
    def body(ring: Ring) -> None:
        getattr(ring, call)([torch.ones(1)] * 70 + [torch.ones(1 + ring.rank)])

    for error in errors(body):
        assert isinstance(error, ringattn.DisagreementError) and "zeros_like" not in str(error)


def test_sums_and_copies_of_other_types_are_refused() -> None:
    for error in errors(lambda ring: ring.all_reduce([torch.ones(1), 2.0])):
        assert isinstance(error, InputError) and re.search(r"rank \d: tensors\[1\] is a float", str(error))
    for error in errors(lambda ring: ring.broadcast([torch.ones(1), None])):
        assert isinstance(error, InputError) and re.search(r"rank \d: broadcast: tensors\[1\] is None", str(error))


@pytest.mark.parametrize("call", ["all_reduce", "broadcast"])
def test_a_number_on_one_rank_is_refused_by_all(call: str) -> None:
    def body(ring: Ring) -> None:
        with pytest.raises(InputError, match="rank 1: tensors must be a list of tensors, got int"):
            getattr(ring, call)(5 if ring.rank == 1 else [torch.ones(1)])
        ring.barrier()  # the ring is still open

    run_ranks(RANKS, body)


def test_a_replay_of_a_number_is_refused() -> None:
    def body(ring: Ring) -> None:
        with pytest.raises(InputError, match=r"graph must be a torch\.cuda\.CUDAGraph, got int"):
            ring.replay(5)
        ring.barrier()  # the ring is still open

    run_ranks(RANKS, body)


NOT_OVERWRITTEN = {
    "elements share memory": lambda: torch.ones(1).expand(3),
    "torch.sparse_coo": lambda: torch.ones(3).to_sparse(),
    "on the device meta": lambda: torch.ones(3, device="meta"),
}


@pytest.mark.parametrize("call", ["all_reduce", "broadcast"])
@pytest.mark.parametrize("reason", NOT_OVERWRITTEN)
def test_a_tensor_that_cannot_be_overwritten_on_one_rank_is_refused_by_all(call: str, reason: str) -> None:
    def body(ring: Ring) -> None:
        bad = NOT_OVERWRITTEN[reason]() if ring.rank == 1 else torch.ones(3)
        with pytest.raises(InputError, match=f"rank 1: tensors.1. .*{reason}"):
            getattr(ring, call)([torch.ones(2), bad])
        ring.barrier()  # the ring is still open

    run_ranks(RANKS, body)


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint16, torch.uint32, torch.uint64])
def test_sums_of_a_dtype_without_a_sum_are_refused_by_all(dtype: torch.dtype) -> None:
    def body(ring: Ring) -> None:
        with pytest.raises(InputError, match=f"tensors.1. is {dtype}, which has no sum"):
            ring.all_reduce([torch.ones(2), torch.zeros(3, dtype=dtype)])
        copied = torch.full((3,), ring.rank).to(dtype)
        ring.broadcast([copied], src=1)
        assert copied.to(torch.int64).tolist() == [1, 1, 1]

    run_ranks(RANKS, body)
