"""Count the memory of tensors at each operator, to compare it with the prediction of a plan or a formula."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

Scratch = Callable[[Any, tuple[Any, ...]], int]
"""A function of an operator (`OpOverload`) and its arguments: the bytes that are allocated only during the call."""


class StorageMeter(TorchDispatchMode):
    """A meter of tensor memory, which counts while it is active.

    `live_bytes` is the present value, `peak_bytes` the highest so far, and `history` has the value at each operator.
    Guarantees: a storage that an operation of this thread returns is counted once, whatever its number of views, until
    nothing refers to it. It has its size of the latest operator, as FSDP2 resizes the storages of gathered weights. Of
    a DTensor, the local tensor counts. Storages that existed before are not counted. Not covered: memory that a kernel
    allocates and frees within one call, unless `scratch_bytes` returns its size. The bookkeeping follows torch's
    `torch.distributed._tools.mem_tracker.MemTracker`, which handles modules and optimizers but not threads.
    """

    def __init__(self, scratch_bytes: Scratch | None = None) -> None:
        """Start at 0. `scratch_bytes` returns the bytes of an operator to count in addition to the live bytes."""
        super().__init__()
        self.live_bytes = self.peak_bytes = 0
        self.history: list[int] = []
        self._scratch_bytes = scratch_bytes
        self._known: dict[int, Any] = {}
        self._sizes: dict[int, tuple[weakref.ref[torch.UntypedStorage], int]] = {}

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Tell torch to switch this mode off while it compiles (True), so that compiled code stays compiled.

        Otherwise, overlapping meters of two threads would leave a flag of torch set permanently.
        """
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
        for key in list(self._sizes):
            self._resize(key)
        inside = self._scratch_bytes(func, args) if self._scratch_bytes is not None else 0
        self.history.append(self.live_bytes + inside)
        self.peak_bytes = max(self.peak_bytes, self.history[-1])
        return result

    def restart(self) -> None:
        """Reset the peak to the present value. Live storages remain counted."""
        self.peak_bytes = self.live_bytes

    def _add(self, storage: torch.UntypedStorage, counted: bool) -> None:
        key = storage._cdata
        if key in self._known:
            return
        self._known[key] = weakref.finalize(storage, self._leave, key)
        self._known[key].atexit = False
        if counted:
            self._sizes[key] = weakref.ref(storage), 0
            self._resize(key)

    def _resize(self, key: int) -> None:
        """Count a storage with its present size, unless it has been freed."""
        if key not in self._sizes:
            return
        reference, before = self._sizes[key]
        storage = reference()
        if storage is not None and (nbytes := storage.nbytes()) != before:
            self._sizes[key] = reference, nbytes
            self.live_bytes += nbytes - before

    def _leave(self, key: int) -> None:
        self._known.pop(key)
        _, nbytes = self._sizes.pop(key, (None, 0))
        self.live_bytes -= nbytes


def _storages(tree: Any) -> list[torch.UntypedStorage]:
    """Return the storages of all tensors in a tree; of a DTensor, that of its local tensor."""
    tensors = [leaf for leaf in tree_iter(tree) if isinstance(leaf, torch.Tensor)]
    return [getattr(tensor, "_local_tensor", tensor).untyped_storage() for tensor in tensors]
