"""What the runtime asks of a binding to NCCL, and nothing more.

A binding passes calls on to one loaded libnccl. It promises: every status that is not success is seen by the caller;
what the library lacks is absent from `capabilities` and refused by name; nothing is ever destroyed unasked, neither at
garbage collection nor at exit; every call lets other Python threads run.
Sources: nccl.h of 2.23 to 2.32; NCCL user guide, "API" and "Fault tolerance".
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum, IntEnum
from typing import NamedTuple, Protocol

from ringattn.errors import InputError, TransportError, UnsupportedError

UNIQUE_ID_BYTES = 128
FLOOR_VERSION = 22300
"""The oldest library that is accepted, 2.23, as `ncclGetVersion` counts."""


class Status(IntEnum):
    """`ncclResult_t`."""

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
    """What a binding may be unable to do, by the name of the C function or config field behind it."""

    NONBLOCKING = "config.blocking"
    """Communicators that open and launch without blocking the host; needs IN_PROGRESS to be a status, not an error."""
    MAX_CTAS = "config.maxCTAs"
    CGA = "config.cgaClusterSize"
    NET_CHANNELS = "config.nChannelsPerNetPeer"
    NAME = "config.commName"
    FINALIZE = "ncclCommFinalize"
    MEMORY = "ncclMemAlloc"
    REGISTER = "ncclCommRegister"
    LAST_ERROR = "ncclGetLastError"


class CommConfig(NamedTuple):
    """How a communicator is made; None leaves a field undefined, which is NCCL's own choice.

    `max_ctas`: thread blocks a launch may hold. `cga_cluster_size`: of them that start together in one GPC of the GPU.
    `channels_per_net_peer`: connections to a rank on another machine.
    """

    blocking: bool = False
    max_ctas: int | None = None
    name: str | None = None
    cga_cluster_size: int | None = None
    channels_per_net_peer: int | None = None

    def needs(self) -> tuple[Capability, ...]:
        """What a library must have for it."""
        asked = (
            (Capability.NONBLOCKING, not self.blocking),
            (Capability.MAX_CTAS, self.max_ctas is not None),
            (Capability.NAME, self.name is not None),
            (Capability.CGA, self.cga_cluster_size is not None),
            (Capability.NET_CHANNELS, self.channels_per_net_peer is not None),
        )
        return tuple(capability for capability, needed in asked if needed)


class NcclError(TransportError):
    """A call of NCCL that failed: which function, the status, and the library's own last words."""

    def __init__(self, function: str, status: int, text: str) -> None:
        super().__init__(f"{function}: {status_name(status)} ({status}){': ' if text else ''}{text}")
        self.function, self.status, self.text = function, status, text

    def __reduce__(self) -> tuple[type[NcclError], tuple[str, int, str]]:
        return NcclError, (self.function, self.status, self.text)


class MissingError(UnsupportedError):
    """The library or the binding cannot do what was asked; says which and since when."""


class Binding(Protocol):
    """NCCL, as one binding offers it. A communicator is an int handle, 0 is none.

    `init` and `finalize` return the status SUCCESS or IN_PROGRESS through `state`; methods raise `NcclError`
    for any other status and `MissingError` for what the capabilities lack. The four calls of a hop (`send`, `recv`,
    `group_start`, `group_end`) raise nothing and return the bare status as an int, for they are on the fast path.
    A class that lacks optional calls inherits their refusals from here.
    """

    name: str
    path: str
    version: int
    """As `ncclGetVersion` counts, e.g. 22809."""
    capabilities: frozenset[Capability]

    def unique_id(self) -> bytes:
        """`UNIQUE_ID_BYTES` that let ranks find each other, once."""
        ...

    def init(self, world_size: int, unique_id: bytes, rank: int, config: CommConfig) -> int:
        """A new communicator; with a non-blocking config it is ready when `state` says SUCCESS."""
        ...

    def state(self, comm: int) -> int:
        """The asynchronous status of a communicator: SUCCESS, IN_PROGRESS, or what went wrong. Never raises for it."""
        ...

    def group_start(self) -> int: ...

    def send(self, pointer: int, nbytes: int, peer: int, comm: int, stream: int) -> int:
        """Queue `nbytes` at device address `pointer` for `peer`, as bytes, on the CUDA stream `stream`."""
        ...

    def recv(self, pointer: int, nbytes: int, peer: int, comm: int, stream: int) -> int: ...

    def group_end(self) -> int: ...

    def finalize(self, comm: int) -> None:
        """Flush a healthy communicator before `destroy`. May be in progress; see `state`."""
        raise not_offered(self.name, Capability.FINALIZE)

    def destroy(self, comm: int) -> None:
        """Free a healthy communicator. A collective of the node: with a dead peer it hangs, use `abort`."""
        ...

    def abort(self, comm: int) -> None:
        """Stop whatever runs on a communicator and free it."""
        ...

    def mem_alloc(self, nbytes: int) -> int:
        """Device memory that transports can map; returns its address."""
        raise not_offered(self.name, Capability.MEMORY)

    def mem_free(self, pointer: int) -> None:
        """Free what `mem_alloc` returned."""
        raise not_offered(self.name, Capability.MEMORY)

    def register(self, comm: int, pointer: int, nbytes: int) -> int:
        """Tell `comm` about memory that will be sent from or received into; returns a handle for `deregister`."""
        raise not_offered(self.name, Capability.REGISTER)

    def deregister(self, comm: int, handle: int) -> None:
        """Undo `register`."""
        raise not_offered(self.name, Capability.REGISTER)

    def last_error(self, comm: int) -> str:
        """The library's last words, on a communicator or (0) on this thread; empty where it cannot say."""
        return ""


def not_offered(name: str, capability: Capability) -> MissingError:
    """The error for what the binding `name` cannot do with any library."""
    return MissingError(f"{capability.value} is not offered by the {name} binding; use the ctypes binding")


def check_unique_id(unique_id: bytes) -> None:
    """Raise `InputError` for bytes of another length."""
    if len(unique_id) != UNIQUE_ID_BYTES:
        raise InputError(f"a unique id has {UNIQUE_ID_BYTES} bytes, got {len(unique_id)}; pass what unique_id() gave")


def dead_handle(function: str, comm: int) -> NcclError:
    """What `function` raises for a handle that is not alive."""
    text = f"communicator {comm:#x} was not made by this binding, or was destroyed or aborted; open a new one"
    return NcclError(function, Status.INVALID_ARGUMENT, text)


def end_leaked_groups(group_end: Callable[[], int]) -> None:
    """End the groups that a failed `init` has left open on this thread; such a call stands in no group.

    `ncclCommInitRankConfig` that fails early returns with the group depth raised (seen with 2.28.9, 2.29.7 and 2.32.3),
    and whatever the thread calls later would be queued and never run.
    """
    for _ in range(8):  # one level is what was seen; bounded, should the library answer something else for ever
        if group_end() == Status.INVALID_USAGE:
            return


def status_name(status: int) -> str:
    """For messages; also for a status that this table does not know."""
    return Status(status).name.lower().replace("_", " ") if status in Status._value2member_map_ else "unknown status"


def version_text(version: int) -> str:
    """22809 is 2.28.9."""
    return f"{version // 10000}.{version // 100 % 100}.{version % 100}"
