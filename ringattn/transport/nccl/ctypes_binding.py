"""NCCL through ctypes: the C functions themselves, and every capability that the library has.

Guarantees: see `Binding`. A handle that is not alive is refused before the library sees it, except in the four calls of
a hop, which go straight to C. Nothing is destroyed unless `destroy` or `abort` is called. Sources: `nccl.h` of 2.28 and
2.29; `parseCommConfig` in NCCL's init.cc for how a config's size and version are read.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from ctypes import POINTER, byref, c_char_p, c_int, c_size_t, c_uint, c_uint8, c_void_p
from functools import cache
from typing import Any, Protocol

from ringattn.transport.nccl.binding import (
    UNIQUE_ID_BYTES,
    Capability,
    CommConfig,
    NcclError,
    Status,
    check_unique_id,
    dead_handle,
    end_leaked_groups,
)
from ringattn.transport.nccl.library import NEEDS, REQUIRED, Library

UINT8 = c_int(1)
"""`ncclUint8`. As an object, for ctypes passes one on faster than it converts an int."""
CONFIG_MAGIC = 0xCAFEBEEF
CONFIG_VERSION = 22800
"""The version that has just the fields of `Config`. A newer library fills in the rest, an older one reads less."""
UNDEFINED_INT = -(2**31)


class UniqueId(ctypes.Structure):
    """`ncclUniqueId`, passed by value. Bytes and not chars, which ctypes would cut at the first zero."""

    _fields_ = (("internal", c_uint8 * UNIQUE_ID_BYTES),)


class Config(ctypes.Structure):
    """`ncclConfig_t` as of 2.28; later fields are at its end."""

    _fields_ = (
        ("size", c_size_t),
        ("magic", c_uint),
        ("version", c_uint),
        ("blocking", c_int),
        ("cgaClusterSize", c_int),
        ("minCTAs", c_int),
        ("maxCTAs", c_int),
        ("netName", c_char_p),
        ("splitShare", c_int),
        ("trafficClass", c_int),
        ("commName", c_char_p),
        ("collnetEnable", c_int),
        ("CTAPolicy", c_int),
        ("shrinkShare", c_int),
        ("nvlsCTAs", c_int),
        ("nChannelsPerNetPeer", c_int),
        ("nvlinkCentricSched", c_int),
    )


# Handles and streams are plain addresses: c_void_p converts an int faster than any integer type does.
SIGNATURES: dict[str, tuple[type, ...]] = {
    "ncclGetVersion": (POINTER(c_int),),
    "ncclGetUniqueId": (POINTER(UniqueId),),
    "ncclGetLastError": (c_void_p,),
    "ncclCommInitRankConfig": (POINTER(c_void_p), c_int, UniqueId, c_int, POINTER(Config)),
    "ncclCommGetAsyncError": (c_void_p, POINTER(c_int)),
    "ncclCommFinalize": (c_void_p,),
    "ncclCommDestroy": (c_void_p,),
    "ncclCommAbort": (c_void_p,),
    "ncclCommRegister": (c_void_p, c_void_p, c_size_t, POINTER(c_void_p)),
    "ncclCommDeregister": (c_void_p, c_void_p),
    "ncclMemAlloc": (POINTER(c_void_p), c_size_t),
    "ncclMemFree": (c_void_p,),
    "ncclGroupStart": (),
    "ncclGroupEnd": (),
    "ncclSend": (c_void_p, c_size_t, c_int, c_int, c_void_p, c_void_p),
    "ncclRecv": (c_void_p, c_size_t, c_int, c_int, c_void_p, c_void_p),
}
"""Arguments of every function that is called. All return `ncclResult_t`, except `ncclGetLastError`: a string."""


class Transfer(Protocol):
    """The form of `Binding.send` and `Binding.recv`."""

    def __call__(self, pointer: int, nbytes: int, peer: int, comm: int, stream: int) -> int: ...


class CtypesBinding:
    """The functions of one library; see `Binding`."""

    name = "ctypes"

    def __init__(self, library: Library) -> None:
        self.path, self.version, self.capabilities = library.path, library.version, library.capabilities
        self._library = library
        self._live: set[int] = set()
        names = {*REQUIRED, *(name for can in library.capabilities for name in NEEDS[can].functions)}
        self._functions = {name: _function(library.cdll, name) for name in names}
        self.send: Transfer = _as_bytes(self._functions["ncclSend"])
        self.recv: Transfer = _as_bytes(self._functions["ncclRecv"])
        self.group_start: Callable[[], int] = self._functions["ncclGroupStart"]
        self.group_end: Callable[[], int] = self._functions["ncclGroupEnd"]

    def unique_id(self) -> bytes:
        """See `Binding.unique_id`."""
        made = UniqueId()
        self._call("ncclGetUniqueId", byref(made))
        return bytes(made)

    def init(self, world_size: int, unique_id: bytes, rank: int, config: CommConfig) -> int:
        """See `Binding.init`. On an error no group of this thread stays open."""
        check_unique_id(unique_id)
        made, passed = c_void_p(), UniqueId.from_buffer_copy(unique_id)
        arguments = byref(made), world_size, passed, rank, byref(self._config(config))
        try:
            self._call("ncclCommInitRankConfig", *arguments)
        except NcclError:
            end_leaked_groups(self.group_end)
            raise
        assert made.value is not None  # set before the call returns, also while it is in progress
        self._live.add(made.value)
        return made.value

    def state(self, comm: int) -> int:
        """See `Binding.state`; INVALID_ARGUMENT for a handle that is not alive."""
        if comm not in self._live:
            return Status.INVALID_ARGUMENT
        state = c_int()
        return self._functions["ncclCommGetAsyncError"](comm, byref(state)) or state.value

    def finalize(self, comm: int) -> None:
        """See `Binding.finalize`."""
        self._library.require(Capability.FINALIZE)
        self._living("ncclCommFinalize", comm)
        self._call("ncclCommFinalize", comm)

    def destroy(self, comm: int) -> None:
        """See `Binding.destroy`. The handle is dead whatever the library answers."""
        if not self._forget(comm):
            raise dead_handle("ncclCommDestroy", comm)
        self._call("ncclCommDestroy", comm)

    def abort(self, comm: int) -> None:
        """See `Binding.abort`. Nothing happens to a handle that is not alive; of two threads one aborts."""
        if self._forget(comm):
            self._call("ncclCommAbort", comm)

    def mem_alloc(self, nbytes: int) -> int:
        """See `Binding.mem_alloc`."""
        self._library.require(Capability.MEMORY)
        made = c_void_p()
        self._call("ncclMemAlloc", byref(made), nbytes)
        return made.value or 0

    def mem_free(self, pointer: int) -> None:
        """See `Binding.mem_free`."""
        self._library.require(Capability.MEMORY)
        self._call("ncclMemFree", pointer)

    def register(self, comm: int, pointer: int, nbytes: int) -> int:
        """See `Binding.register`. The handle is 0 where NCCL finds nothing to register; `deregister` takes it."""
        self._library.require(Capability.REGISTER)
        self._living("ncclCommRegister", comm)
        made = c_void_p()
        self._call("ncclCommRegister", comm, pointer, nbytes, byref(made))
        return made.value or 0

    def deregister(self, comm: int, handle: int) -> None:
        """See `Binding.deregister`."""
        self._library.require(Capability.REGISTER)
        self._living("ncclCommDeregister", comm)
        self._call("ncclCommDeregister", comm, handle)

    def last_error(self, comm: int) -> str:
        """See `Binding.last_error`. NCCL keeps one text for the process, which may be of an earlier failure."""
        if Capability.LAST_ERROR not in self.capabilities:
            return ""
        text = self._functions["ncclGetLastError"](comm if comm in self._live else None)
        return (text or b"").decode(errors="replace")

    def _call(self, name: str, *arguments: object) -> None:
        """Raises `NcclError`, except for IN_PROGRESS, which `state` tells too."""
        status = self._functions[name](*arguments)
        if status not in (Status.SUCCESS, Status.IN_PROGRESS):
            raise NcclError(name, status, self.last_error(0))

    def _living(self, name: str, comm: int) -> None:
        if comm not in self._live:
            raise dead_handle(name, comm)

    def _forget(self, comm: int) -> bool:
        """Whether the handle was alive until now; of several threads one gets True."""
        try:
            self._live.remove(comm)
        except KeyError:
            return False
        return True

    def _config(self, config: CommConfig) -> Config:
        made = Config(ctypes.sizeof(Config), CONFIG_MAGIC, CONFIG_VERSION)
        for field, kind in Config._fields_[3:]:
            setattr(made, field, UNDEFINED_INT if kind is c_int else None)
        for capability in config.needs():
            self._library.require(capability)
        made.blocking = int(config.blocking)
        for field, value in (
            ("maxCTAs", config.max_ctas),
            ("cgaClusterSize", config.cga_cluster_size),
            ("nChannelsPerNetPeer", config.channels_per_net_peer),
            ("commName", None if config.name is None else _kept(config.name)),
        ):
            if value is not None:
                setattr(made, field, value)
        return made


def _function(cdll: ctypes.CDLL, name: str) -> Any:
    """A C function of the library with its types, callable from Python."""
    found = cdll[name]  # an object of its own, so that two bindings of one library share no types
    found.argtypes = SIGNATURES[name]
    found.restype = c_char_p if name == "ncclGetLastError" else c_int
    return found


def _as_bytes(function: Any) -> Transfer:
    """`ncclSend` or `ncclRecv` with the datatype filled in."""

    def transfer(pointer: int, nbytes: int, peer: int, comm: int, stream: int) -> int:
        return function(pointer, nbytes, UINT8, peer, comm, stream)

    return transfer


@cache
def _kept(name: str) -> bytes:
    """A communicator's name, which NCCL reads for as long as the communicator lives; so it is never freed."""
    return name.encode()
