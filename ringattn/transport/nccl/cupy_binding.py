"""NCCL through `cupy.cuda.nccl`: blocking communicators, without the optional capabilities of `Binding`.

Guarantees: see `Binding`. A garbage-collected cupy communicator calls ncclCommDestroy, a collective that hangs if a
peer is dead. So each communicator is kept from collection, also at exit, until `destroy` or `abort` has emptied it.
Cupy discards the results of ncclCommDestroy and ncclCommAbort, so neither raises.
Sources: cupy_backends/cuda/libs/nccl.pyx of cupy 14.
"""

from __future__ import annotations

import ctypes
import importlib
from collections.abc import Callable
from types import ModuleType
from typing import Any

from ringattn.errors import UnsupportedError
from ringattn.transport.base import never_destroy
from ringattn.transport.nccl.binding import (
    Binding,
    Capability,
    CommConfig,
    NcclError,
    Status,
    check_unique_id,
    dead_handle,
    end_leaked_groups,
    not_offered,
    version_text,
)
from ringattn.transport.nccl.library import load_library, refuse_copies

FLOOR_CUPY = 14
"""The first major version whose unique ids are bytes; those of 13 are tuples of signed ints."""


class CupyBinding(Binding):
    """The communicators of cupy behind int handles; see `Binding`.

    `path` names the libnccl, see `load_library`. It is loaded before cupy, so that cupy finds it in the process.
    Raises `UnsupportedError` if cupy is missing, is too old, or uses another libnccl.
    """

    name = "cupy"
    capabilities: frozenset[Capability] = frozenset()

    def __init__(self, path: str | None = None) -> None:
        library = load_library(path)
        self._nccl = _cupy_nccl()
        refuse_copies(library.path)
        self.path, self.version = library.path, self._nccl.get_version()
        if self.version != library.version:
            raise UnsupportedError(
                f"cupy uses NCCL {version_text(self.version)} and {self.path} is {version_text(library.version)}; "
                "use the ctypes binding, or reinstall cupy"
            )
        self._uint8 = self._nccl.NCCL_UINT8
        self._communicators: dict[int, Any] = {}

    def unique_id(self) -> bytes:
        """See `Binding.unique_id`."""
        try:
            return self._nccl.get_unique_id()
        except (RuntimeError, KeyError) as error:
            raise _typed("ncclGetUniqueId", error) from error

    def init(self, world_size: int, unique_id: bytes, rank: int, config: CommConfig) -> int:
        """See `Binding.init`; `config` must be blocking and otherwise empty."""
        for capability in config.needs():
            raise not_offered(self.name, capability)
        check_unique_id(unique_id)
        communicator = self._nccl.NcclCommunicator.__new__(self._nccl.NcclCommunicator)
        never_destroy(communicator)  # before `__init__`, because a failed init may leave a handle behind
        try:
            communicator.__init__(world_size, unique_id, rank)
        except (RuntimeError, KeyError) as error:
            end_leaked_groups(self.group_end)
            communicator.abort()
            _release(communicator)
            raise _typed("ncclCommInitRankConfig", error) from error
        self._communicators[communicator.comm] = communicator
        return communicator.comm

    def state(self, comm: int) -> int:
        """See `Binding.state`; INVALID_ARGUMENT for a handle that is not alive."""
        communicator = self._communicators.get(comm)
        return Status.INVALID_ARGUMENT if communicator is None else _status(communicator.check_async_error)

    def group_start(self) -> int:
        """See `Binding.group_start`."""
        return _status(self._nccl.groupStart)

    def send(self, pointer: int, nbytes: int, peer: int, comm: int, stream: int) -> int:
        """See `Binding.send`; INVALID_ARGUMENT for a handle that is not alive."""
        communicator = self._communicators.get(comm)
        if communicator is None:
            return Status.INVALID_ARGUMENT
        return _status(lambda: communicator.send(pointer, nbytes, self._uint8, peer, stream))

    def recv(self, pointer: int, nbytes: int, peer: int, comm: int, stream: int) -> int:
        """See `Binding.recv`; INVALID_ARGUMENT for a handle that is not alive."""
        communicator = self._communicators.get(comm)
        if communicator is None:
            return Status.INVALID_ARGUMENT
        return _status(lambda: communicator.recv(pointer, nbytes, self._uint8, peer, stream))

    def group_end(self) -> int:
        """See `Binding.group_end`."""
        return _status(self._nccl.groupEnd)

    def destroy(self, comm: int) -> None:
        """See `Binding.destroy`."""
        communicator = self._communicators.pop(comm, None)
        if communicator is None:
            raise dead_handle("ncclCommDestroy", comm)
        communicator.destroy()
        _release(communicator)

    def abort(self, comm: int) -> None:
        """See `Binding.abort`. A handle that is not alive is ignored, so of two threads only one aborts."""
        communicator = self._communicators.pop(comm, None)
        if communicator is not None:
            communicator.abort()
            _release(communicator)


def _cupy_nccl() -> ModuleType:
    try:
        cupy = importlib.import_module("cupy")
        nccl = importlib.import_module("cupy.cuda.nccl")
    except ImportError as error:
        raise UnsupportedError(
            f"the cupy binding needs cupy ({error}): pip install 'ringattn[cu13]' or 'ringattn[cu12]', whichever "
            "matches torch.version.cuda, or use the ctypes binding"
        ) from error
    if int(cupy.__version__.split(".")[0]) < FLOOR_CUPY:
        raise UnsupportedError(
            f"the cupy binding needs cupy {FLOOR_CUPY} or newer, not {cupy.__version__}; install that"
        )
    if not nccl.available:
        raise UnsupportedError("this cupy was built without NCCL; install its wheel, or use the ctypes binding")
    return nccl


def _status(function: Callable[[], object]) -> int:
    """Call `function` and return NCCL's status, taken from the error that cupy raises; 0 if it raises none."""
    try:
        function()
    except (RuntimeError, KeyError) as error:
        return _status_of(error)
    return 0


def _status_of(error: RuntimeError | KeyError) -> int:
    """Return the NCCL status of an error of cupy.

    Cupy raises its own NcclError, or a KeyError for a status that it has no name for (7 and 8). Any other error is
    raised again.
    """
    status = error.args[0] if isinstance(error, KeyError) else getattr(error, "status", None)
    if not isinstance(status, int):
        raise error
    return status


def _typed(function: str, error: RuntimeError | KeyError) -> NcclError:
    """Return cupy's error as an `NcclError`, with cupy's text, which is NCCL's description of the status."""
    return NcclError(function, _status_of(error), "" if isinstance(error, KeyError) else str(error))


def _release(communicator: object) -> None:
    """Undo `never_destroy` once the communicator holds nothing to destroy."""
    ctypes.pythonapi.Py_DecRef(ctypes.py_object(communicator))
