"""What a user may choose about NCCL, the binding that follows, and what the environment makes impossible.

Sources: NCCL user guide, environment variables and "Using multiple NCCL communicators concurrently"; Megatron-LM sets
CUDA_DEVICE_MAX_CONNECTIONS=1.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from ringattn.errors import InputError
from ringattn.transport.nccl.binding import Binding, version_text

BINDINGS = ("ctypes", "cupy")
BindingName = Literal["ctypes", "cupy"]


@dataclass(frozen=True)
class NcclOptions:
    """What a user may choose about NCCL. Equal on all ranks of a ring, or opening it raises.

    Args:
        binding: ctypes, or cupy (blocking communicators only).
        library: Path of a libnccl. None: the one that this process has loaded, else the wheel's.
        max_ctas: Thread blocks that an exchange may hold on the GPU, 1 to 64. None: NCCL's choice.
        name: Of the communicators in NCCL's log. None: "ringattn" where names are known.
        register: Take staging buffers from `ncclMemAlloc`, registered, where all ranks' libraries can; else plain
            memory.
        blocking: A blocking communicator, which spares the host NCCL's launch thread at every hop; a launch that is
            stuck inside it cannot be aborted, and ends the process instead.

    Raises:
        InputError: `binding` is not known, or `max_ctas` does not lie between 1 and 64.
    """

    binding: BindingName = "ctypes"
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


LAUNCH_ORDER_SINCE = 22600


def warnings_for(environment: Mapping[str, str], nccl_version: int, other_nccl_groups: bool) -> list[str]:
    """Warnings for the user. `other_nccl_groups`: torch has NCCL process groups in this process.

    Raises `InputError` for `NCCL_COMM_ID`, which makes all communicators of all rings one, and for
    `NCCL_COMM_BLOCKING`, which takes the deadline from opening.
    """
    if environment.get("NCCL_COMM_ID"):
        raise InputError(
            "NCCL_COMM_ID is set, and gives every communicator the same id; unset it: ranks meet through the store"
        )
    if environment.get("NCCL_COMM_BLOCKING"):
        raise InputError(
            "NCCL_COMM_BLOCKING is set, and overrides how every communicator is made; unset it, and use "
            "NcclOptions(blocking=...)"
        )
    if not other_nccl_groups:
        return []
    found = []
    if nccl_version >= LAUNCH_ORDER_SINCE and environment.get("NCCL_LAUNCH_ORDER_IMPLICIT") != "1":
        found.append(
            "torch's NCCL process groups and this ring launch on one GPU: set NCCL_LAUNCH_ORDER_IMPLICIT=1 before the "
            "first of them is opened, so that NCCL keeps one order on all ranks"
        )
    if nccl_version < LAUNCH_ORDER_SINCE:
        found.append(
            f"torch's NCCL process groups and this ring launch on one GPU, and NCCL {version_text(nccl_version)} keeps "
            "no order among communicators (2.26 does): let neither overlap the other"
        )
    if environment.get("CUDA_DEVICE_MAX_CONNECTIONS") == "1":
        found.append(
            "CUDA_DEVICE_MAX_CONNECTIONS=1 with two communicators lets one wait behind the other for ever; set it to 8 "
            "or more"
        )
    return found


def open_binding(options: NcclOptions) -> Binding:
    """The binding that `options` name. Raises `UnsupportedError` when the library or cupy is missing or unfit."""
    if options.binding == "cupy":
        from ringattn.transport.nccl.cupy_binding import CupyBinding

        return CupyBinding(options.library)
    from ringattn.transport.nccl.ctypes_binding import CtypesBinding
    from ringattn.transport.nccl.library import load_library

    return CtypesBinding(load_library(options.library))
