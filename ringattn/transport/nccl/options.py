"""NCCL options of the user, the choice of the binding, and checks of the environment.

Sources: NCCL user guide, environment variables and "Using multiple NCCL communicators concurrently"; NCCL's init.cc for
the defaults (clusters of 4, one thread block per channel) and for the environment, which overrides a config;
MagiAttention's "kernel overlap" for 4 to 8 free multiprocessors with clusters of 0 or 1; Megatron-LM, which sets
CUDA_DEVICE_MAX_CONNECTIONS=1.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Literal, TypeVar

import torch.distributed as dist
from torch.distributed.distributed_c10d import _world

from ringattn.errors import InputError
from ringattn.planner.cluster import DEFAULT_SM_MARGIN
from ringattn.transport.nccl.binding import Binding, Capability, CommConfig, version_text

BINDINGS = ("ctypes", "cupy")
BindingName = Literal["ctypes", "cupy"]

DEFAULT_CGA_CLUSTER_SIZE = 1
DEFAULT_NAME = "ringattn"
MOST_CTAS = 64
"""NCCL's MAXCHANNELS."""

T = TypeVar("T")


@dataclass(frozen=True)
class NcclOptions:
    """Options for NCCL. They must be equal on all ranks of a ring, or opening it raises.

    Args:
        binding: ctypes, or cupy (blocking communicators only).
        library: Path of a libnccl. None: the one that this process has loaded, else the system's, else the wheel's.
        sm_margin: Multiprocessors of the GPU reserved for exchanges. An exchange uses at most this number of thread
            blocks (`maxCTAs`), and engines that support it leave this number of multiprocessors free. 0: NCCL chooses,
            no engine leaves any free, and an exchange may wait for the kernels that fill the GPU. None: 8.
        cga_cluster_size: Thread blocks that start together in one GPC of the GPU, 0 to 8. NCCL's own choice on Hopper
            is 4: the blocks wait until four multiprocessors of one GPC are free. None: 1.
        channels_per_net_peer: Connections to each rank on another machine, 1 to 64. None: NCCL's choice.
        name: The name of the communicators in NCCL's log. None: "ringattn" if the library supports names.
        register: Take staging buffers from `ncclMemAlloc`, registered, if the libraries of all ranks can; else use
            plain memory.
        blocking: Use a blocking communicator, which saves the host NCCL's launch thread at every hop. A launch that is
            stuck inside it cannot be aborted, and ends the process instead.

    Raises:
        InputError: `binding` is unknown, or a number is out of range.
    """

    binding: BindingName = "ctypes"
    library: str | None = None
    sm_margin: int | None = None
    cga_cluster_size: int | None = None
    channels_per_net_peer: int | None = None
    name: str | None = None
    register: bool = True
    blocking: bool = False

    def __post_init__(self) -> None:
        """Check the values. Raises `InputError`."""
        if self.binding not in BINDINGS:
            raise InputError(f"binding={self.binding!r} is not known; choose one of {', '.join(BINDINGS)}")
        for name, least, most in (
            ("sm_margin", 0, MOST_CTAS), ("cga_cluster_size", 0, 8), ("channels_per_net_peer", 1, MOST_CTAS)
        ):  # fmt: skip
            value = getattr(self, name)
            if value is not None and not least <= value <= most:
                raise InputError(f"{name} must lie between {least} and {most}, got {value}")

    @property
    def margin(self) -> int:
        """`sm_margin`, or its default."""
        return DEFAULT_SM_MARGIN if self.sm_margin is None else self.sm_margin


def config_of(options: NcclOptions, capabilities: Collection[Capability]) -> CommConfig:
    """Return the communicator's config: the user's values, and defaults for those that the library supports."""

    def chosen(requested: T | None, default: T, needed: Capability) -> T | None:
        return default if requested is None and needed in capabilities else requested

    return CommConfig(
        options.blocking,
        chosen(options.sm_margin, DEFAULT_SM_MARGIN, Capability.MAX_CTAS) or None,
        chosen(options.name, DEFAULT_NAME, Capability.NAME),
        chosen(options.cga_cluster_size, DEFAULT_CGA_CLUSTER_SIZE, Capability.CGA),
        options.channels_per_net_peer,
    )


LAUNCH_ORDER_SINCE = 22600


def check_environment(environment: Mapping[str, str]) -> None:
    """Raise `InputError` for `NCCL_COMM_ID`, which gives all communicators of all rings one id, and for
    `NCCL_COMM_BLOCKING`, which disables the deadline of opening."""
    if environment.get("NCCL_COMM_ID"):
        raise InputError(
            "NCCL_COMM_ID is set, and gives every communicator the same id; unset it: ranks meet through the store"
        )
    if environment.get("NCCL_COMM_BLOCKING"):
        raise InputError(
            "NCCL_COMM_BLOCKING is set, and overrides how every communicator is made; unset it, and use "
            "NcclOptions(blocking=...)"
        )


def warnings_beside_torch(environment: Mapping[str, str], nccl_version: int) -> list[str]:
    """Return warnings for a ring in a process that also has torch's NCCL process groups."""
    warnings = []
    if nccl_version >= LAUNCH_ORDER_SINCE and environment.get("NCCL_LAUNCH_ORDER_IMPLICIT") != "1":
        warnings.append(
            "torch's NCCL process groups and this ring launch on one GPU: set NCCL_LAUNCH_ORDER_IMPLICIT=1 before the "
            "first of them is opened, so that NCCL keeps one order on all ranks"
        )
    if nccl_version < LAUNCH_ORDER_SINCE:
        warnings.append(
            f"torch's NCCL process groups and this ring launch on one GPU, and NCCL {version_text(nccl_version)} keeps "
            "no order among communicators (2.26 does): do not let them overlap"
        )
    if environment.get("CUDA_DEVICE_MAX_CONNECTIONS") == "1":
        warnings.append(
            "CUDA_DEVICE_MAX_CONNECTIONS=1 with two communicators can let one wait behind the other indefinitely; set "
            "it to 8 or more"
        )
    return warnings


def _nccl_groups() -> bool:
    """Return whether torch has an NCCL process group in this process, the default one or another."""
    if not dist.is_initialized():
        return False
    return any("nccl" in str(config) for config in (dist.get_backend_config(), *_world.pg_backend_config.values()))


class LateGroups:
    """A detector of torch's NCCL process groups, including groups that are opened after a ring.

    It calls `callback` once, at the first `check` after torch has opened such a group.
    """

    def __init__(self, callback: Callable[[], None]) -> None:
        self._callback: Callable[[], None] | None = callback
        self._groups = -1

    def check(self) -> None:
        """Check for new groups. Each call of a ring does so, which is cheap: it compares the length of a dict first."""
        if self._callback is None or len(_world.pg_map) == self._groups:
            return
        self._groups = len(_world.pg_map)
        if _nccl_groups():
            callback, self._callback = self._callback, None
            callback()


def overlap_warnings(
    environment: Mapping[str, str], options: NcclOptions, capabilities: Collection[Capability]
) -> list[str]:
    """Return warnings if the environment or the binding lets an exchange need more multiprocessors than are free."""
    config, margin = config_of(options, capabilities), options.margin
    if not margin:
        return []
    warnings = []
    for variable, limit, limited, what in (
        ("NCCL_MAX_CTAS", margin, config.max_ctas is not None, "thread blocks carry an exchange"),
        ("NCCL_MIN_CTAS", margin, True, "thread blocks carry an exchange at least"),
        ("NCCL_CGA_CLUSTER_SIZE", max(1, options.cga_cluster_size or DEFAULT_CGA_CLUSTER_SIZE),
         config.cga_cluster_size is not None, "thread blocks begin together"),
    ):  # fmt: skip
        value = environment.get(variable, "")
        if value.isdecimal() and int(value) > limit:
            warnings.append(
                f"{variable}={value} overrides the ring's own {limit}: {value} {what}, and may wait for kernels, which "
                f"leave only sm_margin={margin} multiprocessors free; unset it, or choose by NcclOptions"
            )
        elif not value and not limited:
            warnings.append(
                f"binding={options.binding!r} cannot limit how many {what}; set {variable}={limit} before anything "
                "opens NCCL, so that an exchange can start while kernels run, or use binding='ctypes'"
            )
    return warnings


def open_binding(options: NcclOptions) -> Binding:
    """Open the binding that `options` names. Raises `UnsupportedError` if libnccl or cupy is missing or unsuitable."""
    if options.binding == "cupy":
        from ringattn.transport.nccl.cupy_binding import CupyBinding

        return CupyBinding(options.library)
    from ringattn.transport.nccl.ctypes_binding import CtypesBinding
    from ringattn.transport.nccl.library import load_library

    return CtypesBinding(load_library(options.library))
