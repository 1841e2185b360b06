"""NCCL through ctypes: direct calls of the C functions, with every capability that the library has.

Guarantees: see `Binding`. A handle that is not alive is refused before the library sees it, except in the four calls of
a hop, which go directly to C. Nothing is destroyed unless `destroy` or `abort` is called. Sources: `nccl.h` of 2.28 and
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
"""`ncclUint8`, as a ctypes object, because ctypes passes an object faster than it converts an int."""
CONFIG_MAGIC = 0xCAFEBEEF
CONFIG_VERSION = 22800
"""The version whose fields are exactly those of `Config`. Newer libraries fill in the rest, older ones read less."""
UNDEFINED_INT = -(2**31)


class UniqueId(ctypes.Structure):
    """`ncclUniqueId`, passed by value. Its field is an array of bytes: ctypes would cut chars at the first zero."""

    _fields_ = (("internal", c_uint8 * UNIQUE_ID_BYTES),)


class Config(ctypes.Structure):
    """`ncclConfig_t` of 2.28. Later versions add fields at its end."""

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
"""The argument types of every function used. All return `ncclResult_t`, except `ncclGetLastError`: a string."""


class Transfer(Protocol):
    """The signature of `Binding.send` and `Binding.recv`."""

    def __call__(self, pointer: int, nbytes: int, peer: int, comm: int, stream: int) -> int: ...


class CtypesBinding:
    """A binding that calls the C functions of one NCCL library; see `Binding`."""

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
        new_id = UniqueId()
        self._call("ncclGetUniqueId", byref(new_id))
        return bytes(new_id)

    def init(self, world_size: int, unique_id: bytes, rank: int, config: CommConfig) -> int:
        """See `Binding.init`. After an error no group of this thread stays open."""
        check_unique_id(unique_id)
        handle, passed = c_void_p(), UniqueId.from_buffer_copy(unique_id)
        arguments = byref(handle), world_size, passed, rank, byref(self._config(config))
        try:
            self._call("ncclCommInitRankConfig", *arguments)
        except NcclError:
            end_leaked_groups(self.group_end)
            raise
        assert handle.value is not None  # set before the call returns, even while it is in progress
        self._live.add(handle.value)
        return handle.value

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
        """See `Binding.destroy`. The handle is dead whatever the library returns."""
        if not self._forget(comm):
            raise dead_handle("ncclCommDestroy", comm)
        self._call("ncclCommDestroy", comm)

    def abort(self, comm: int) -> None:
        """See `Binding.abort`. A handle that is not alive is ignored, so of two threads only one aborts."""
        if self._forget(comm):
            self._call("ncclCommAbort", comm)

    def mem_alloc(self, nbytes: int) -> int:
        """See `Binding.mem_alloc`."""
        self._library.require(Capability.MEMORY)
        pointer = c_void_p()
        self._call("ncclMemAlloc", byref(pointer), nbytes)
        return pointer.value or 0

    def mem_free(self, pointer: int) -> None:
        """See `Binding.mem_free`."""
        self._library.require(Capability.MEMORY)
        self._call("ncclMemFree", pointer)

    def register(self, comm: int, pointer: int, nbytes: int) -> int:
        """See `Binding.register`. The handle is 0 if NCCL has nothing to register; `deregister` accepts it."""
        self._library.require(Capability.REGISTER)
        self._living("ncclCommRegister", comm)
        handle = c_void_p()
        self._call("ncclCommRegister", comm, pointer, nbytes, byref(handle))
        return handle.value or 0

    def deregister(self, comm: int, handle: int) -> None:
        """See `Binding.deregister`."""
        self._library.require(Capability.REGISTER)
        self._living("ncclCommDeregister", comm)
        self._call("ncclCommDeregister", comm, handle)

    def last_error(self, comm: int) -> str:
        """See `Binding.last_error`. NCCL keeps one text per process, which may describe an earlier failure."""
        if Capability.LAST_ERROR not in self.capabilities:
            return ""
        text = self._functions["ncclGetLastError"](comm if comm in self._live else None)
        return (text or b"").decode(errors="replace")

    def _call(self, name: str, *arguments: object) -> None:
        """Call a function of the library. Raises `NcclError` unless it returns SUCCESS or IN_PROGRESS."""
        status = self._functions[name](*arguments)
        if status not in (Status.SUCCESS, Status.IN_PROGRESS):
            raise NcclError(name, status, self.last_error(0))

    def _living(self, name: str, comm: int) -> None:
        if comm not in self._live:
            raise dead_handle(name, comm)

    def _forget(self, comm: int) -> bool:
        """Return whether the handle was alive until now. Of several threads only one gets True."""
        try:
            self._live.remove(comm)
        except KeyError:
            return False
        return True

    def _config(self, config: CommConfig) -> Config:
        struct = Config(ctypes.sizeof(Config), CONFIG_MAGIC, CONFIG_VERSION)
        for field, kind in Config._fields_[3:]:
            setattr(struct, field, UNDEFINED_INT if kind is c_int else None)
        for capability in config.needs():
            self._library.require(capability)
        struct.blocking = int(config.blocking)
        for field, value in (
            ("maxCTAs", config.max_ctas),
            ("cgaClusterSize", config.cga_cluster_size),
            ("nChannelsPerNetPeer", config.channels_per_net_peer),
            ("commName", None if config.name is None else _kept(config.name)),
        ):
            if value is not None:
                setattr(struct, field, value)
        return struct


def _function(cdll: ctypes.CDLL, name: str) -> Any:
    """Return a C function of the library, with its argument and result types set."""
    function = cdll[name]  # a separate object, so that two bindings of one library do not share types
    function.argtypes = SIGNATURES[name]
    function.restype = c_char_p if name == "ncclGetLastError" else c_int
    return function


def _as_bytes(function: Any) -> Transfer:
    """Return `ncclSend` or `ncclRecv` with the datatype filled in."""

    def transfer(pointer: int, nbytes: int, peer: int, comm: int, stream: int) -> int:
        return function(pointer, nbytes, UINT8, peer, comm, stream)

    return transfer


@cache
def _kept(name: str) -> bytes:
    """Return a communicator's name as bytes that are never freed: NCCL reads them while the communicator lives."""
    return name.encode()
