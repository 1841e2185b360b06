"""All-reduce and broadcast on rings of one to five threads are correct, with the same bits on all ranks."""

from __future__ import annotations

import pytest
import torch

from ringattn.errors import InputError
from ringattn.transport.collectives import all_reduce, broadcast
from ringattn.transport.local import LocalTransport
from tests.contract.threads import on_threads

WORLD_SIZES = [1, 2, 3, 5]
SHAPES: list[tuple[int, ...]] = [(), (1,), (7,), (3, 5), (0, 4), (2, 3, 11)]


def values(rank: int, dtype: torch.dtype) -> list[torch.Tensor]:
    """Return tensors of many shapes, including a transposed view. The values depend only on the rank."""
    generator = torch.Generator().manual_seed(rank)
    tensors = [(torch.randn(shape, generator=generator, dtype=torch.float64) * 100).to(dtype) for shape in SHAPES]
    return [*tensors, (torch.randn(6, 4, generator=generator, dtype=torch.float64) * 100).to(dtype).t()]


@pytest.mark.parametrize("world_size", WORLD_SIZES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.int64, torch.complex64])
def test_all_reduce_sums(world_size: int, dtype: torch.dtype) -> None:
    def fn(ring: LocalTransport) -> list[torch.Tensor]:
        tensors = values(ring.rank, dtype)
        all_reduce(ring, tensors)
        return tensors

    results = on_threads(world_size, fn)
    wide = torch.float32 if dtype == torch.bfloat16 else dtype
    for index, tensor in enumerate(results[0]):
        # The reference is summed in rank order in the accumulator dtype, and rounded once.
        reference = torch.zeros(tensor.shape, dtype=wide)
        for rank in range(world_size):
            reference += values(rank, dtype)[index].to(wide)
        assert all(torch.equal(result[index], reference.to(dtype)) for result in results)


def test_all_reduce_mixes_dtypes_strides_and_leaves() -> None:
    def fn(ring: LocalTransport) -> tuple[torch.Tensor, ...]:
        leaf = torch.full((3,), 1.0 + ring.rank, requires_grad=True)
        base = torch.zeros(4, 6)
        every_other = base[:, ::2]
        every_other.fill_(2.0)
        counts = torch.tensor(ring.rank)
        all_reduce(ring, [leaf, every_other, counts])
        all_reduce(ring, [])
        return leaf.detach(), base, counts

    for leaf, base, counts in on_threads(3, fn):
        assert leaf.tolist() == [6.0] * 3
        assert base.tolist() == [[6.0, 0.0] * 3] * 4
        assert counts.item() == 3


def test_all_reduce_refuses_bool_before_it_changes_a_tensor() -> None:
    def fn(ring: LocalTransport) -> float:
        value = torch.ones(1)
        with pytest.raises(InputError, match="bool"):
            all_reduce(ring, [value, torch.ones(1, dtype=torch.bool)])
        return value.item()

    assert on_threads(2, fn) == [1.0, 1.0]


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_broadcast_copies(world_size: int) -> None:
    src = world_size - 1

    def fn(ring: LocalTransport) -> list[torch.Tensor]:
        tensors = [*values(ring.rank, torch.float16), torch.tensor([ring.rank == src, True]), torch.tensor(ring.rank)]
        broadcast(ring, tensors, src)
        broadcast(ring, [], src)
        return tensors

    results = on_threads(world_size, fn)
    reference = [*values(src, torch.float16), torch.tensor([True, True]), torch.tensor(src)]
    assert all(torch.equal(a, b) for result in results for a, b in zip(result, reference, strict=True))


def test_broadcast_refuses_an_invalid_source_rank() -> None:
    def fn(ring: LocalTransport) -> None:
        for src in (-1, 2):
            with pytest.raises(InputError, match=f"cannot broadcast from rank {src}: the ring has ranks 0 to 1"):
                broadcast(ring, [torch.ones(1)], src)

    on_threads(2, fn)
