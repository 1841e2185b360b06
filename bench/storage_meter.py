"""Counts the memory of tensors operator by operator, to compare it with the prediction of a plan or a formula."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

Scratch = Callable[[Any, tuple[Any, ...]], int]
"""From an operator (`OpOverload`) and its arguments: bytes that live only inside the call."""


class StorageMeter(TorchDispatchMode):
    """Counts tensor memory while it is active: `live_bytes` now, and `peak_bytes`, the highest value so far.

    Guarantees: a storage that an operation of this thread returns counts once, until nothing refers to it, however many
    views it has; storages that existed before do not count. Not covered: resized storages (`resize_`); memory that a
    kernel allocates and frees within one call, unless `scratch_bytes` returns its size. The bookkeeping is that of
    torch's `torch.distributed._tools.mem_tracker.MemTracker`, which handles modules and optimizers but not threads.
    """

    def __init__(self, scratch_bytes: Scratch | None = None) -> None:
        """`scratch_bytes`: counted in addition to what is live when the operator returns."""
        super().__init__()
        self.live_bytes = self.peak_bytes = 0
        self._scratch_bytes = scratch_bytes
        self._known: dict[int, Any] = {}

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Keep compiled code compiled; otherwise overlapping meters of two threads leave a torch flag set for good."""
        return True

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run the operator and count the storages that it returns."""
        for storage in _storages((args, kwargs)):
            self._add(storage, counted=False)
        result = func(*args, **(kwargs or {}))
        for storage in _storages(result):
            self._add(storage, counted=True)
        inside = self._scratch_bytes(func, args) if self._scratch_bytes is not None else 0
        self.peak_bytes = max(self.peak_bytes, self.live_bytes + inside)
        return result

    def restart(self) -> None:
        """Forget the peak so far; live storages stay counted."""
        self.peak_bytes = self.live_bytes

    def _add(self, storage: torch.UntypedStorage, counted: bool) -> None:
        key = storage._cdata
        if key in self._known:
            return
        nbytes = storage.nbytes() if counted else 0
        self.live_bytes += nbytes
        self._known[key] = weakref.finalize(storage, self._leave, key, nbytes)
        self._known[key].atexit = False

    def _leave(self, key: int, nbytes: int) -> None:
        self._known.pop(key)
        self.live_bytes -= nbytes


def _storages(tree: Any) -> list[torch.UntypedStorage]:
    return [leaf.untyped_storage() for leaf in tree_iter(tree) if isinstance(leaf, torch.Tensor)]
