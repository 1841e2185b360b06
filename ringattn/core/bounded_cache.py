"""Caches bounded by bytes, so that the plans of different calls do not fill the memory of a long job.

Guarantees: the least recently used entries are dropped first. Entries kept on purpose, and the last `AT_LEAST` entries,
are never dropped, because a training step uses several plans in turn.
"""

from __future__ import annotations

import gc
import os
import sys
import threading
from collections.abc import Callable, Hashable
from functools import update_wrapper
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any, Generic, ParamSpec, TypeVar

CACHE_BYTES = 8 << 20
"""Limit of each cache in bytes: room for 100 to 200 plans of short sequences on a few ranks."""
AT_LEAST = 16
_SHARED = (type, FunctionType, MethodType, BuiltinFunctionType, ModuleType)
"""Types of objects that belong to the program and not to a value."""

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")
R = TypeVar("R")
P = ParamSpec("P")


class _Entry(Generic[V]):
    def __init__(self, value: V) -> None:
        self.value, self.nbytes, self.kept = value, 0, False


class BoundedCache(Generic[K, V]):
    """A cache of values by key, ordered from the least to the most recently used. Safe to use from several threads."""

    def __init__(self, weigh: Callable[[K, V], int]) -> None:
        """Create an empty cache. `weigh` returns the bytes of an entry."""
        self._weigh = weigh
        self._entries: dict[K, _Entry[V]] = {}
        self._newest: K | None = None
        self._lock = threading.RLock()
        self.nbytes = 0
        """Bytes of all entries except the newest, which is still growing."""

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, key: K) -> bool:
        return key in self._entries

    def values(self) -> list[V]:
        """Return all values, the least recently used first."""
        with self._lock:
            return [entry.value for entry in self._entries.values()]

    def get(self, key: K, make: Callable[[], V]) -> V:
        """Return the value of `key`; call `make` to create it if it is missing."""
        with self._lock:
            entry = self._entries.pop(key, None)
            if entry is not None:
                self._entries[key] = entry
                return entry.value
        value = make()  # without the lock, because it may take seconds and use this cache
        self._weigh_newest()  # without the lock, because it takes milliseconds for a large plan
        with self._lock:
            if key not in self._entries:
                self._add(key, value)
            return self._entries[key].value

    def keep(self, key: K) -> None:
        """Protect this entry from being dropped for lack of space."""
        with self._lock:
            self._entries[key].kept = True

    def clear(self) -> None:
        """Drop all entries."""
        with self._lock:
            self._entries.clear()
            self.nbytes, self._newest = 0, None

    def drop(self, matches: Callable[[K], bool]) -> None:
        """Drop the entries whose key matches."""
        with self._lock:
            for key in [key for key in self._entries if matches(key)]:
                self.nbytes -= self._entries.pop(key).nbytes

    def _weigh_newest(self) -> None:
        """Weigh the entry that was added last.

        This is done when the next entry is added, because plans and read sets grow while they are first used.
        """
        key = self._newest
        entry = None if key is None else self._entries.get(key)
        if key is None or entry is None or entry.nbytes:
            return
        nbytes = self._weigh(key, entry.value)
        with self._lock:
            if self._entries.get(key) is entry and not entry.nbytes:  # no other thread has weighed or dropped it
                entry.nbytes = nbytes
                self.nbytes += nbytes

    def _add(self, key: K, value: V) -> None:
        """Add an entry, and drop old entries beyond `CACHE_BYTES`."""
        self._weigh_newest()  # only if another thread has added it since `get` did this
        self._entries[key], self._newest = _Entry(value), key
        oldest = list(self._entries)[:-AT_LEAST] if self.nbytes > CACHE_BYTES else []
        for old in oldest:
            if self.nbytes <= CACHE_BYTES:
                break
            if not self._entries[old].kept:
                self.nbytes -= self._entries.pop(old).nbytes


_shared: BoundedCache[tuple[Any, ...], Any] = BoundedCache(lambda key, value: held_bytes(value))
# Another thread may hold the lock while this process is forked.
os.register_at_fork(after_in_child=lambda: setattr(_shared, "_lock", threading.RLock()))


class bounded(Generic[P, R]):
    """A decorator that caches the results of a pure function, like `functools.lru_cache`.

    The caches of all functions share `CACHE_BYTES`.
    """

    def __init__(self, function: Callable[P, R]) -> None:
        self._function = function
        update_wrapper(self, function)

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Return the result, from the cache if possible."""
        result: R = _shared.get((self, *args, *kwargs.items()), lambda: self._function(*args, **kwargs))
        return result

    def holds(self, *args: P.args, **kwargs: P.kwargs) -> bool:
        """Return whether the result is in the cache."""
        return (self, *args, *kwargs.items()) in _shared

    def cache_clear(self) -> None:
        """Drop the results of this function."""
        _shared.drop(lambda key: key[0] is self)


def held_bytes(value: Any) -> int:
    """Return the bytes of a value and of everything that it refers to, except classes, functions and modules."""
    seen, level, total = {id(value)}, [value], 0
    # Go level by level, because the collector returns all referents of a list of objects in a single call.
    while level:
        kinds = set(map(type, level))
        arrays = {kind for kind in kinds if hasattr(kind, "nbytes")}  # of numpy or torch
        if arrays:
            total += sum(part.nbytes for part in level if type(part) in arrays)
            level = [part for part in level if type(part) not in arrays]
        total += sum(map(sys.getsizeof, level))
        parts = {id(part): part for part in gc.get_referents(*level)}
        level = [part for number, part in parts.items() if number not in seen and not isinstance(part, _SHARED)]
        seen.update(parts)
    return total
