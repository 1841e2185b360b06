"""The arena: the positions of buffers, when it may grow, and what poisoned memory reveals."""

from __future__ import annotations

import pytest
import torch

from ringattn.errors import PlanError, RingError
from ringattn.runtime.records import ALIGNMENT_BYTES, Pool


def allocate_plain(nbytes: int) -> torch.Tensor:
    return torch.empty(nbytes, dtype=torch.uint8)


def allocate_skewed(nbytes: int) -> torch.Tensor:
    """Return new memory that starts at an odd address."""
    return torch.empty(nbytes + 1, dtype=torch.uint8)[1:]


@pytest.mark.parametrize("allocate", [allocate_plain, allocate_skewed])
def test_slots_are_aligned_views_of_one_arena(allocate) -> None:  # type: ignore[no-untyped-def]
    pool = Pool(allocate)
    pool.begin_pass(2048)
    first = pool.slot(0, (3, 5), torch.float64)
    second = pool.slot(256, (7,), torch.bfloat16)
    assert (first.shape, first.dtype, first.is_contiguous()) == (torch.Size([3, 5]), torch.float64, True)
    assert first.data_ptr() % ALIGNMENT_BYTES == second.data_ptr() % ALIGNMENT_BYTES == 0
    assert second.data_ptr() - first.data_ptr() == 256
    second.fill_(2.0)
    assert torch.equal(pool.view(256, 14).view(torch.bfloat16), second)
    assert pool.slot(0, (), torch.float32).shape == ()
    assert pool.slot(2048, (0, 4), torch.float32).shape == (0, 4)


@pytest.mark.parametrize(("offset", "nbytes"), [(0, 1025), (1024, 1), (-256, 10), (256, -1), (128, 10), (1280, 0)])
def test_a_slot_outside_or_off_the_alignment_is_refused(offset: int, nbytes: int) -> None:
    pool = Pool(allocate_plain)
    pool.reserve(1024)
    with pytest.raises(PlanError, match=f"{nbytes} bytes at {offset}"):
        pool.view(offset, nbytes)


def test_the_pool_grows_only_when_needed_and_never_holds_two_arenas() -> None:
    live: list[int] = []
    pool = Pool(allocate_plain)

    def counting(nbytes: int) -> torch.Tensor:
        live.append(pool.nbytes)
        return allocate_plain(nbytes)

    pool._allocate = counting
    for requested, expected in [(1000, 1000), (500, 500 + 500), (1000, 1000), (3000, 3000)]:
        pool.reserve(requested)
        assert pool.nbytes == expected
    assert live == [0, 0]


def test_one_pass_at_a_time() -> None:
    pool = Pool(allocate_plain)
    pool.begin_pass(256)
    with pytest.raises(RingError, match="one pass at a time"):
        pool.begin_pass(256)
    with pytest.raises(RingError, match="cannot grow"):
        pool.reserve(512)
    pool.end_pass()
    with pytest.raises(RingError, match="no pass is running"):
        pool.end_pass()
    pool.begin_pass(512)
    pool.end_pass()


def test_a_pass_without_memory_does_not_begin() -> None:
    def allocate(nbytes: int) -> torch.Tensor:
        if nbytes > 4096:
            raise MemoryError
        return allocate_plain(nbytes)

    pool = Pool(allocate)
    with pytest.raises(MemoryError):
        pool.begin_pass(8192)
    pool.begin_pass(1024)
    assert pool.high_water_bytes == 1024


def test_high_water_is_the_largest_pass() -> None:
    pool = Pool(allocate_plain)
    pool.reserve(4096)
    assert pool.high_water_bytes == 0
    for nbytes in (512, 1024, 256):
        pool.begin_pass(nbytes)
        pool.end_pass()
    assert pool.high_water_bytes == 1024
    pool.reset_high_water()
    pool.begin_pass(256)
    assert pool.high_water_bytes == 256


FLOATS = [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2]


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_poison_reads_as_nan(dtype: torch.dtype) -> None:
    def zeros(nbytes: int) -> torch.Tensor:
        return torch.zeros(nbytes, dtype=torch.uint8)

    def all_nan(pool: Pool, offset: int) -> bool:
        return bool(pool.slot(offset, (32,), dtype).to(torch.float64).isnan().all())

    pool = Pool(zeros, poison=True)
    pool.reserve(1024)
    assert all_nan(pool, 0)  # newly bound
    pool.slot(0, (32,), dtype).copy_(torch.zeros(32))
    pool.begin_pass(1024)
    assert all_nan(pool, 0)  # written between passes, not in this pass
    for offset in (0, 512):
        pool.slot(offset, (32,), dtype).copy_(torch.zeros(32))
    pool.release(0, 256)
    assert all_nan(pool, 0)
    assert not all_nan(pool, 512)
    pool.end_pass()
    assert all_nan(pool, 512)

    unpoisoned = Pool(zeros)
    unpoisoned.begin_pass(1024)
    assert not all_nan(unpoisoned, 0)


# --- canaries, reuse -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("allocate", [allocate_plain, allocate_skewed])
@pytest.mark.parametrize("offset", [-1, 512, 1023, 1024])
def test_a_write_outside_the_pass_is_noticed(allocate, offset: int) -> None:  # type: ignore[no-untyped-def]
    """A write to a byte before or after the arena, or in the part that the pass did not request, raises an error."""
    allocations: list[torch.Tensor] = []

    def whole(nbytes: int) -> torch.Tensor:
        allocations.append(allocate(nbytes))
        return allocations[-1]

    pool = Pool(whole, poison=True)
    pool.reserve(1024)
    start = pool.view(0, 0).data_ptr() - allocations[-1].data_ptr()
    for _ in range(2):
        pool.begin_pass(512)
        pool.view(0, 512).zero_()
        pool.end_pass()
    if not 0 <= start + offset < allocations[-1].numel():
        return  # the allocation starts exactly at the arena
    pool.begin_pass(512)
    allocations[-1][start + offset] = 1
    with pytest.raises(PlanError, match="outside the bytes"):
        pool.end_pass()
    pool.begin_pass(512)  # the previous pass has ended
    pool.end_pass()


def test_reuses_of_the_arena_are_counted() -> None:
    pool = Pool(allocate_plain)
    for nbytes in (512, 256, 512, 1024, 0):
        pool.begin_pass(nbytes)
        pool.end_pass()
    assert (pool.passes, pool.growths, pool.reuses) == (5, 2, 3)


# --- plans in the pool -----------------------------------------------------------------------------------------------
