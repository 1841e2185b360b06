"""What a user may choose about NCCL, with the defaults of the runtime."""

from __future__ import annotations

from dataclasses import dataclass

from ringattn.errors import InputError

BINDINGS = ("ctypes", "cupy")


@dataclass(frozen=True)
class NcclOptions:
    """Equal on all ranks of a ring, or opening it raises.

    `binding`: ctypes, or cupy (blocking communicators only). `library`: path of a libnccl, None for the one that this
    process has loaded, else the wheel's. `max_ctas`: thread blocks that an exchange may hold on the GPU, None for
    NCCL's choice. `name`: of the communicators in NCCL's log, None for "ringattn" where names are known. `register`:
    slots from `ncclMemAlloc`, registered, where all ranks' libraries can; plain device memory otherwise.
    `blocking`: a blocking communicator, which spares the host NCCL's launch thread at every hop; a launch that is stuck
    inside it cannot be aborted, and ends the process instead.
    """

    binding: str = "ctypes"
    library: str | None = None
    max_ctas: int | None = None
    name: str | None = None
    register: bool = True
    blocking: bool = False

    def __post_init__(self) -> None:
        """Raises `InputError` for a value that cannot be."""
        if self.binding not in BINDINGS:
            raise InputError(f"binding={self.binding!r} is not known; choose one of {', '.join(BINDINGS)}")
        if self.max_ctas is not None and not 1 <= self.max_ctas <= 64:
            raise InputError(f"max_ctas must lie between 1 and 64, got {self.max_ctas}")
