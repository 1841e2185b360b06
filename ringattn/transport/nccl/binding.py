"""The interface of an NCCL binding: the calls that the runtime makes, and no others.

A binding forwards calls to one loaded libnccl. Guarantees: the caller sees every status other than success. A feature
that the library lacks is absent from `capabilities`, and calls that need the feature raise an error that names it.
Nothing is destroyed without a call, neither by garbage collection nor at exit. Every call releases Python's GIL.
Sources: nccl.h of 2.23 to 2.32; NCCL user guide, "API" and "Fault tolerance".
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum, IntEnum
from typing import NamedTuple, Protocol

from ringattn.errors import InputError, TransportError, UnsupportedError

UNIQUE_ID_BYTES = 128
FLOOR_VERSION = 22300
"""The oldest supported library, 2.23, as `ncclGetVersion` counts."""


class Status(IntEnum):
    """The status of an NCCL call: the values of `ncclResult_t`."""

    SUCCESS = 0
    UNHANDLED_CUDA_ERROR = 1
    SYSTEM_ERROR = 2
    INTERNAL_ERROR = 3
    INVALID_ARGUMENT = 4
    INVALID_USAGE = 5
    REMOTE_ERROR = 6
    IN_PROGRESS = 7
    TIMEOUT = 8


class Capability(Enum):
    """Optional features of a binding, by the name of the C function or config field they need."""

    NONBLOCKING = "config.blocking"
    """Communicators that open and launch without blocking the host. IN_PROGRESS must be a status, not an error."""
    MAX_CTAS = "config.maxCTAs"
    CGA = "config.cgaClusterSize"
    NET_CHANNELS = "config.nChannelsPerNetPeer"
    NAME = "config.commName"
    FINALIZE = "ncclCommFinalize"
    MEMORY = "ncclMemAlloc"
    REGISTER = "ncclCommRegister"
    LAST_ERROR = "ncclGetLastError"


class CommConfig(NamedTuple):
    """The configuration of a communicator. None leaves a field undefined, so NCCL chooses.

    `max_ctas`: the largest number of thread blocks of a launch. `cga_cluster_size`: the number of thread blocks that
    start together in one GPC of the GPU. `channels_per_net_peer`: the number of connections to each rank on another
    machine.
    """

    blocking: bool = False
    max_ctas: int | None = None
    name: str | None = None
    cga_cluster_size: int | None = None
    channels_per_net_peer: int | None = None

    def needs(self) -> tuple[Capability, ...]:
        """Return the capabilities that a library needs for this config."""
        requirements = (
            (Capability.NONBLOCKING, not self.blocking),
            (Capability.MAX_CTAS, self.max_ctas is not None),
            (Capability.NAME, self.name is not None),
            (Capability.CGA, self.cga_cluster_size is not None),
            (Capability.NET_CHANNELS, self.channels_per_net_peer is not None),
        )
        return tuple(capability for capability, needed in requirements if needed)


class NcclError(TransportError):
    """A failed NCCL call: the function, the status, and the library's own error text."""

    def __init__(self, function: str, status: int, text: str) -> None:
        super().__init__(f"{function}: {status_name(status)} ({status}){': ' if text else ''}{text}")
        self.function, self.status, self.text = function, status, text

    def __reduce__(self) -> tuple[type[NcclError], tuple[str, int, str]]:
        return NcclError, (self.function, self.status, self.text)


class MissingError(UnsupportedError):
    """The error for a requested feature that the library or the binding lacks. The message names the feature."""


class Binding(Protocol):
    """The NCCL calls that every binding provides. A communicator is an int handle; 0 means none.

    `init` and `finalize` may return before they are complete: poll `state`, which returns IN_PROGRESS until then, and
    SUCCESS afterwards. Methods raise `NcclError` for any other status and `MissingError` for missing capabilities. The
    four calls of a hop (`send`, `recv`, `group_start`, `group_end`) raise nothing and return the bare status as an int,
    because they are on the fast path. A binding without the optional calls inherits from this class the methods that
    raise `MissingError`.
    """

    name: str
    path: str
    version: int
    """As `ncclGetVersion` counts, e.g. 22809."""
    capabilities: frozenset[Capability]

    def unique_id(self) -> bytes:
        """Return a new id of `UNIQUE_ID_BYTES` bytes, by which the ranks of one communicator find each other."""
        ...

    def init(self, world_size: int, unique_id: bytes, rank: int, config: CommConfig) -> int:
        """Create a communicator. With a non-blocking config it is ready when `state` returns SUCCESS."""
        ...

    def state(self, comm: int) -> int:
        """Return the asynchronous status of a communicator: SUCCESS, IN_PROGRESS, or an error, which is not raised."""
        ...

    def group_start(self) -> int: ...

    def send(self, pointer: int, nbytes: int, peer: int, comm: int, stream: int) -> int:
        """Enqueue a send of `nbytes` at device address `pointer` to `peer`, as bytes, on the CUDA stream `stream`."""
        ...

    def recv(self, pointer: int, nbytes: int, peer: int, comm: int, stream: int) -> int: ...

    def group_end(self) -> int: ...

    def finalize(self, comm: int) -> None:
        """Flush a healthy communicator before `destroy`. The flush is complete when `state` returns SUCCESS."""
        raise not_offered(self.name, Capability.FINALIZE)

    def destroy(self, comm: int) -> None:
        """Free a healthy communicator, collectively within the node. Hangs if a peer is dead: use `abort` instead."""
        ...

    def abort(self, comm: int) -> None:
        """Stop everything on a communicator and free it."""
        ...

    def mem_alloc(self, nbytes: int) -> int:
        """Allocate device memory that transports can map; return its address."""
        raise not_offered(self.name, Capability.MEMORY)

    def mem_free(self, pointer: int) -> None:
        """Free memory that `mem_alloc` allocated."""
        raise not_offered(self.name, Capability.MEMORY)

    def register(self, comm: int, pointer: int, nbytes: int) -> int:
        """Register memory that will be sent from or received into; return a handle for `deregister`."""
        raise not_offered(self.name, Capability.REGISTER)

    def deregister(self, comm: int, handle: int) -> None:
        """Undo `register`."""
        raise not_offered(self.name, Capability.REGISTER)

    def last_error(self, comm: int) -> str:
        """Return the library's last error text for `comm`, or for this thread if `comm` is 0; empty if none."""
        return ""


def not_offered(name: str, capability: Capability) -> MissingError:
    """Return the error for a feature that the binding `name` does not offer, whichever library it loads."""
    return MissingError(f"{capability.value} is not offered by the {name} binding; use the ctypes binding")


def check_unique_id(unique_id: bytes) -> None:
    """Raise `InputError` if the id does not have `UNIQUE_ID_BYTES` bytes."""
    if len(unique_id) != UNIQUE_ID_BYTES:
        raise InputError(f"a unique id has {UNIQUE_ID_BYTES} bytes, got {len(unique_id)}; pass the one of unique_id()")


def dead_handle(function: str, comm: int) -> NcclError:
    """Return the error of `function` for a handle that is not alive."""
    text = f"communicator {comm:#x} was not created by this binding, or was destroyed or aborted; open a new one"
    return NcclError(function, Status.INVALID_ARGUMENT, text)


def end_leaked_groups(group_end: Callable[[], int]) -> None:
    """End the groups that a failed `init` has left open on this thread. No `init` is made inside a group.

    `ncclCommInitRankConfig` that fails early returns with the group depth raised (seen with 2.28.9, 2.29.7 and 2.32.3).
    Without this, all later calls of the thread would be queued and never run.
    """
    for _ in range(8):  # one level was seen; bounded, in case the library never returns INVALID_USAGE
        if group_end() == Status.INVALID_USAGE:
            return


def status_name(status: int) -> str:
    """Return the name of a status for messages; "unknown status" if it is not a `Status`."""
    return Status(status).name.lower().replace("_", " ") if status in Status._value2member_map_ else "unknown status"


def version_text(version: int) -> str:
    """Format a version: 22809 is 2.28.9."""
    return f"{version // 10000}.{version // 100 % 100}.{version % 100}"
