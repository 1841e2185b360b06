"""The CUDA driver calls of the peer transport, through ctypes.

Guarantees: every constant and struct layout of `cuda.h` that the transport uses is in this module. Only versioned
symbols are called, because the first versions of the stream memory operations need a kernel module parameter. A failed
call raises `DriverError` with CUDA's own name of the error. Streams and events are torch's.
Sources: `cuda.h` of CUDA 13.0; the driver manual on virtual memory, stream memory operations and `cuGetProcAddress`.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence
from ctypes import POINTER, byref, c_char_p, c_int, c_int32, c_size_t, c_uint32, c_uint64, c_void_p
from enum import IntEnum
from typing import NamedTuple

from ringattn.errors import RingError, UnsupportedError

FLOOR_VERSION = 12000
"""The oldest driver, as `cuDriverGetVersion` counts. Symbols are looked up in their form of this version."""
SONAME = "libcuda.so.1"  # the name without a number comes with development packages only
OUT_OF_MEMORY = 2  # CUDA_ERROR_OUT_OF_MEMORY
POSIX_FD = 1  # CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
READ_WRITE = 3  # CU_MEM_ACCESS_FLAGS_PROT_READWRITE
RECOMMENDED = 1  # CU_MEM_ALLOC_GRANULARITY_RECOMMENDED
PINNED = 1  # CU_MEM_ALLOCATION_TYPE_PINNED
DEVICE = 1  # CU_MEM_LOCATION_TYPE_DEVICE
PORTABLE_AND_MAPPED = 1 | 2  # CU_MEMHOSTREGISTER_PORTABLE, CU_MEMHOSTREGISTER_DEVICEMAP
WAIT_64, WRITE_64 = 4, 5  # CU_STREAM_MEM_OP_WAIT_VALUE_64, CU_STREAM_MEM_OP_WRITE_VALUE_64
AT_LEAST = 0  # CU_STREAM_WAIT_VALUE_GEQ
FLUSH = 1 << 30  # CU_STREAM_WAIT_VALUE_FLUSH
"""A flag of a wait: remote writes that preceded the store of the word are visible after the wait."""
LONGEST_BATCH = 255
"""The most operations that the manual allows in one `cuStreamBatchMemOp`."""
LEGACY_STREAM = 1  # CU_GET_PROC_ADDRESS_LEGACY_STREAM


class Attribute(IntEnum):
    """The device attributes that the transport reads, by their numbers in `CUdevice_attribute`."""

    ASYNC_ENGINES = 40
    FLUSHES_REMOTE_WRITES = 98
    VIRTUAL_MEMORY = 102
    POSIX_HANDLES = 103
    STREAM_MEMORY_OPERATIONS_64 = 122
    MULTI_PROCESS_SERVER = 133


class AllocationProp(ctypes.Structure):
    """The C struct `CUmemAllocationProp`."""

    _fields_ = (
        ("type", c_int32),
        ("handle_types", c_int32),
        ("location_type", c_int32),
        ("location_id", c_int32),
        ("win32", c_void_p),
        ("compression", ctypes.c_uint8),
        ("rdma", ctypes.c_uint8),
        ("usage", ctypes.c_uint16),
        ("reserved", ctypes.c_uint8 * 4),
    )


class AccessDescription(ctypes.Structure):
    """The C struct `CUmemAccessDesc`."""

    _fields_ = (("location_type", c_int32), ("location_id", c_int32), ("flags", c_int32))


class BatchOperation(ctypes.Structure):
    """The C union `CUstreamBatchMemOpParams` of 48 bytes, with the common layout of its 64-bit waits and writes."""

    _fields_ = (
        ("operation", c_int32),
        ("address", c_uint64),
        ("value", c_uint64),
        ("flags", c_uint32),
        ("alias", c_uint64),
        ("rest", c_uint64),
    )


class WordOperation(NamedTuple):
    """A stream operation on a 64-bit word: a write of `value`, or a wait until the word is at least `value`."""

    waits: bool
    address: int
    value: int
    flushes: bool = False


class DriverError(RingError):
    """A driver call failed. `code` is its `CUresult`."""

    def __init__(self, call: str, code: int, name: str, text: str) -> None:
        super().__init__(f"{call}: {name} ({code}): {text}")
        self.call, self.code = call, code


# The name and argument types of each function, as driver version `FLOOR_VERSION` defines it. All return a CUresult.
_CALLS: dict[str, tuple[object, ...]] = {
    "cuDeviceGet": (POINTER(c_int), c_int),
    "cuDeviceGetAttribute": (POINTER(c_int), c_int, c_int),
    "cuDeviceGetUuid": (c_void_p, c_int),
    "cuMemGetAllocationGranularity": (POINTER(c_size_t), POINTER(AllocationProp), c_int),
    "cuMemCreate": (POINTER(c_uint64), c_size_t, POINTER(AllocationProp), c_uint64),
    "cuMemRelease": (c_uint64,),
    "cuMemAddressReserve": (POINTER(c_uint64), c_size_t, c_size_t, c_uint64, c_uint64),
    "cuMemAddressFree": (c_uint64, c_size_t),
    "cuMemMap": (c_uint64, c_size_t, c_size_t, c_uint64, c_uint64),
    "cuMemUnmap": (c_uint64, c_size_t),
    "cuMemSetAccess": (c_uint64, c_size_t, POINTER(AccessDescription), c_size_t),
    "cuMemExportToShareableHandle": (c_void_p, c_uint64, c_int, c_uint64),
    "cuMemImportFromShareableHandle": (POINTER(c_uint64), c_void_p, c_int),
    "cuMemHostRegister": (c_void_p, c_size_t, c_uint32),
    "cuMemHostUnregister": (c_void_p,),
    "cuMemHostGetDevicePointer": (POINTER(c_uint64), c_void_p, c_uint32),
    "cuMemcpyDtoDAsync": (c_uint64, c_uint64, c_size_t, c_void_p),
    "cuStreamBatchMemOp": (c_void_p, c_uint32, POINTER(BatchOperation), c_uint32),
}


class CudaDriver:
    """The driver calls on device `index` of this process. Torch must have created the device's context before.

    Simulations override all methods. Addresses are device addresses unless stated otherwise.
    """

    version: int
    """As `cuDriverGetVersion` counts, e.g. 13000."""

    def __init__(self, index: int, path: str = SONAME) -> None:
        """Load the driver and look up its functions. Raises `UnsupportedError` if it is missing or too old."""
        try:
            self._library = ctypes.CDLL(path)
        except OSError as error:
            raise UnsupportedError(f"no CUDA driver ({error})") from error
        self._check("cuInit", self._library.cuInit(c_uint32(0)))
        # `cuDriverGetVersion` has the same signature in all versions, so it may be called before the version check.
        number = c_int()
        self._check("cuDriverGetVersion", self._library.cuDriverGetVersion(byref(number)))
        self.version = number.value
        if self.version < FLOOR_VERSION or not hasattr(self._library, "cuGetProcAddress_v2"):
            raise UnsupportedError(
                f"the CUDA driver is version {self.version // 1000}.{self.version % 1000 // 10}, but 12.0 is required"
            )
        self._functions = {name: self._function(name, types) for name, types in _CALLS.items()}
        self._call("cuDeviceGet", byref(number), index)
        self._device = number.value
        # Memory can be exported only if a handle type was requested at its allocation, so all allocations request one.
        self._prop = AllocationProp(
            type=PINNED, handle_types=POSIX_FD, location_type=DEVICE, location_id=self._device
        )  # fmt: skip
        # Every mapping grants access to this rank's device, also to memory of other ranks. So `cuCtxEnablePeerAccess`
        # is not needed.
        self._access = AccessDescription(DEVICE, self._device, READ_WRITE)

    def attribute(self, attribute: Attribute) -> int:
        """Return the value of a device attribute."""
        number = c_int()
        self._call("cuDeviceGetAttribute", byref(number), attribute, self._device)
        return number.value

    def is_partition(self) -> bool:
        """Return whether the device is an instance of a partitioned GPU (MIG).

        The first version of `cuDeviceGetUuid` returns the UUID of the whole GPU, the second the UUID of the instance.
        """
        whole, part = ctypes.create_string_buffer(16), ctypes.create_string_buffer(16)
        # The bare symbol is the first version. The lookup by driver version finds the second.
        self._check("cuDeviceGetUuid", self._library.cuDeviceGetUuid(whole, c_int(self._device)))
        self._call("cuDeviceGetUuid", part, self._device)
        return whole.raw != part.raw

    def granularity(self) -> int:
        """Return the number of bytes that allocation sizes must be multiples of."""
        number = c_size_t()
        self._call("cuMemGetAllocationGranularity", byref(number), byref(self._prop), RECOMMENDED)
        return number.value

    def create(self, nbytes: int) -> int:
        """Allocate exportable device memory; return its handle."""
        handle = c_uint64()
        self._call("cuMemCreate", byref(handle), nbytes, byref(self._prop), 0)
        return handle.value

    def release(self, handle: int) -> None:
        """Release a handle. The memory is freed with its last mapping, handle and file descriptor in any process."""
        self._call("cuMemRelease", handle)

    def export(self, handle: int) -> int:
        """Export the memory as a file descriptor that is closed on exec.

        Newer drivers set close-on-exec themselves; which version started to is not documented.
        """
        fd = c_int(-1)
        self._call("cuMemExportToShareableHandle", byref(fd), handle, POSIX_FD, 0)
        os.set_inheritable(fd.value, False)
        return fd.value

    def adopt(self, fd: int) -> int:
        """Import another process's memory; return a handle. The caller still owns `fd`."""
        handle = c_uint64()
        self._call("cuMemImportFromShareableHandle", byref(handle), c_void_p(fd), POSIX_FD)
        return handle.value

    def map(self, handle: int, nbytes: int) -> int:
        """Map the memory for reads and writes by this device; return its address. An error leaves nothing mapped."""
        # Three steps: reserve addresses, map the memory there, and grant access. Before the grant any access fails.
        address = c_uint64()
        self._call("cuMemAddressReserve", byref(address), nbytes, 0, 0, 0)
        try:
            self._call("cuMemMap", address.value, nbytes, 0, handle, 0)
            try:
                self._call("cuMemSetAccess", address.value, nbytes, byref(self._access), 1)
            except DriverError:
                self._call("cuMemUnmap", address.value, nbytes)
                raise
        except DriverError:
            self._call("cuMemAddressFree", address.value, nbytes)
            raise
        return address.value

    def unmap(self, address: int, nbytes: int) -> None:
        """Unmap memory. No operation on it may be in flight: the call does not wait for streams."""
        self._call("cuMemUnmap", address, nbytes)
        self._call("cuMemAddressFree", address, nbytes)

    def register(self, pointer: int, nbytes: int) -> int:
        """Make host memory accessible to streams of this device; return its device address."""
        self._call("cuMemHostRegister", pointer, nbytes, PORTABLE_AND_MAPPED)
        # The device address of registered host memory may differ from its host address.
        address = c_uint64()
        try:
            self._call("cuMemHostGetDevicePointer", byref(address), pointer, 0)
        except DriverError:
            self.unregister(pointer)
            raise
        return address.value

    def unregister(self, pointer: int) -> None:
        """Undo `register`."""
        self._call("cuMemHostUnregister", pointer)

    def copy(self, dst: int, src: int, nbytes: int, stream: int) -> None:
        """Enqueue a copy on a stream."""
        # `cuMemcpyPeerAsync` would need the other process's context. Both addresses are mapped in this process anyway.
        self._call("cuMemcpyDtoDAsync", dst, src, nbytes, stream)

    def operate(self, operations: Sequence[WordOperation], stream: int) -> None:
        """Enqueue word operations on a stream, in order."""
        # The driver takes a limited number of operations per call. A stream runs successive calls in order as well.
        for first in range(0, len(operations), LONGEST_BATCH):
            part = operations[first : first + LONGEST_BATCH]
            batch = (BatchOperation * len(part))()
            for entry, (waits, address, value, flushes) in zip(batch, part, strict=True):
                entry.operation = WAIT_64 if waits else WRITE_64
                entry.address, entry.value = address, value
                # A write with flags 0 has a memory barrier: earlier copies on the stream are visible before the word.
                entry.flags = AT_LEAST | (FLUSH if flushes else 0) if waits else 0
            self._call("cuStreamBatchMemOp", stream, len(part), batch, 0)

    def _function(self, name: str, types: tuple[object, ...]) -> ctypes._CFuncPtr:  # type: ignore[name-defined]
        """Return the function `name` as driver version `FLOOR_VERSION` defines it, whatever suffix its symbol has."""
        # LEGACY_STREAM selects the variants without per-thread default streams. The transport always names its stream.
        function, status = c_void_p(), c_int()
        code = self._library.cuGetProcAddress_v2(
            c_char_p(name.encode()), byref(function), c_int(FLOOR_VERSION), c_uint64(LEGACY_STREAM), byref(status)
        )
        if code or not function.value:
            raise UnsupportedError(f"CUDA driver {self.version} has no function {name} of version {FLOOR_VERSION}")
        # CFUNCTYPE releases the interpreter lock during calls, PYFUNCTYPE does not. A call that blocks on a full queue
        # must not hold the lock: an abort, which empties the queue from another thread, needs it.
        return ctypes.CFUNCTYPE(c_int, *types)(function.value)  # type: ignore[arg-type]

    def _call(self, name: str, *arguments: object) -> None:
        self._check(name, self._functions[name](*arguments))

    def _check(self, call: str, code: int) -> None:
        if code:
            name, text = c_char_p(), c_char_p()
            self._library.cuGetErrorName(c_int(code), byref(name))
            self._library.cuGetErrorString(c_int(code), byref(text))
            raise DriverError(call, code, (name.value or b"unknown error").decode(), (text.value or b"").decode())
