"""Caches with a limit in bytes drop entries in the right order, and measure the sizes of values."""

from __future__ import annotations

import os
import signal
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import numpy as np
import pytest

from ringattn.core import bounded_cache
from ringattn.core.bounded_cache import BoundedCache, bounded, held_bytes


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> BoundedCache[int, bytes]:
    """Return a cache of 100 bytes that never drops the two entries that were used last."""
    monkeypatch.setattr(bounded_cache, "CACHE_BYTES", 100)
    monkeypatch.setattr(bounded_cache, "AT_LEAST", 2)
    return BoundedCache(lambda key, value: len(value))


def test_the_least_recently_used_is_dropped_first(small: BoundedCache[int, bytes]) -> None:
    for key in (1, 2, 3, 1, 4):
        small.get(key, lambda: bytes(40))
    assert len(small) == 3 and small.nbytes == 80  # 2 was dropped; the newest is not weighed yet
    assert [small.get(key, lambda: b"new") == b"new" for key in (1, 3, 4, 2)] == [False, False, False, True]


def test_the_last_entries_stay_whatever_they_weigh(small: BoundedCache[int, bytes]) -> None:
    for key in range(10):
        small.get(key, lambda: bytes(1000))
        assert len(small) <= 3
    assert small.get(8, bytes) == bytes(1000) and small.get(9, bytes) == bytes(1000)


def test_an_entry_that_is_kept_is_not_dropped(small: BoundedCache[int, bytes]) -> None:
    small.get(0, lambda: bytes(90))
    small.keep(0)
    for key in range(1, 10):
        small.get(key, lambda: bytes(50))
    assert small.get(0, bytes) == bytes(90)
    small.clear()
    assert len(small) == small.nbytes == 0 and small.get(0, lambda: b"new") == b"new"


def test_a_value_is_weighed_after_its_first_use(small: BoundedCache[int, list[int]]) -> None:
    cache: BoundedCache[int, list[int]] = BoundedCache(lambda key, value: sum(value))
    grows = cache.get(0, list)
    grows.append(70)
    cache.get(1, list)
    assert cache.nbytes == 70


def test_functions_share_the_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bounded_cache, "_shared", BoundedCache(lambda key, value: held_bytes(value)))
    monkeypatch.setattr(bounded_cache, "CACHE_BYTES", 100_000)
    monkeypatch.setattr(bounded_cache, "AT_LEAST", 2)
    calls = []

    @bounded
    def zeros(count: int) -> np.ndarray:
        calls.append(count)
        return np.zeros(count, np.int8)

    @bounded
    def ones(count: int) -> np.ndarray:
        return np.ones(count, np.int8)

    assert zeros(60_000) is zeros(60_000) and ones(60_000).sum() == 60_000
    for count in range(5):
        ones(count)
    zeros(60_000)
    assert calls == [60_000, 60_000]
    zeros.cache_clear()
    zeros(60_000)
    assert len(calls) == 3
    assert bounded_cache._shared.nbytes <= 100_000


def test_an_error_is_not_cached() -> None:
    cache: BoundedCache[int, int] = BoundedCache(lambda key, value: 1)
    with pytest.raises(ZeroDivisionError):
        cache.get(0, lambda: 1 // 0)
    assert cache.get(0, lambda: 5) == 5


class _Node(NamedTuple):
    array: np.ndarray
    others: tuple[object, ...]


def test_what_a_value_refers_to_is_weighed_once() -> None:
    array = np.zeros(10_000, np.int8)
    once = held_bytes(_Node(array, ()))
    assert 10_000 <= once < 10_600
    assert held_bytes(_Node(array, (array, {"again": array}))) < once + 1_000
    assert held_bytes(_Node(array, (array.copy(),))) > once + 10_000


def test_a_lock_that_is_held_at_a_fork_does_not_stop_the_child() -> None:
    with ThreadPoolExecutor() as pool:
        pool.submit(bounded_cache._shared._lock.acquire).result()  # never released by its thread in the child
        child = os.fork()
        if child == 0:
            signal.alarm(8)
            os._exit(bounded(abs)(-3))
        pool.submit(bounded_cache._shared._lock.release).result()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 3
