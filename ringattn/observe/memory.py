"""Memory of a rank: readings and levels of all ranks, a meter of tensors, and errors of a rank that found none.

Guarantees: every rank reads the readings of all and computes the same level, so an action that raises does so on all
of them; no byte is counted twice, whether the ring's pool lies in torch's allocator or not; every error that reports a
lack of memory, whatever torch or Python calls it, becomes one `OutOfMemoryError` with the first error as its cause.
Not covered: ranks that are threads of one process each report the memory of the whole process.
"""

from __future__ import annotations

import gc
import json
import logging
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from enum import IntEnum
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol

import torch

from ringattn.errors import InputError, OutOfMemoryError, TransportError
from ringattn.planner.plan import Plan, account, mib, remedies

LOGGER = logging.getLogger("ringattn")


class Level(IntEnum):
    """How full the fullest rank is."""

    NORMAL = 0
    WARNING = 1
    CRITICAL = 2
    EMERGENCY = 3


class Profile(NamedTuple):
    """Shares of a rank's memory: what to aim at, and from where on a level begins."""

    target: float
    warning: float
    critical: float
    emergency: float

    def level(self, used: float) -> Level:
        """The level of a share in use."""
        return Level(sum(used >= bound for bound in (self.warning, self.critical, self.emergency)))


ProfileName = Literal["aggressive", "balanced", "conservative"]
PROFILES = {
    "aggressive": Profile(0.92, 0.94, 0.96, 0.98),
    "balanced": Profile(0.90, 0.92, 0.95, 0.97),
    "conservative": Profile(0.85, 0.88, 0.92, 0.95),
}
"""A policy and no measurement: that of the training guide which users of dilated attention know."""


@dataclass(frozen=True)
class Reading:
    """One rank's memory, in bytes.

    `allocated_bytes`: tensors, the pool left out. `pool_bytes`, `pool_high_water_bytes`: the ring's pool.
    `reserved_bytes`: held by allocators, the pool included; on a CPU the process's resident size. `resident_bytes`: the
    process's. `used_bytes` of `capacity_bytes`: on CUDA what the device says of all its users; on a CPU the resident
    size, of the machine's or the control group's memory.
    """

    rank: int
    device: str
    allocated_bytes: int
    reserved_bytes: int
    pool_bytes: int
    pool_high_water_bytes: int
    resident_bytes: int
    used_bytes: int
    capacity_bytes: int

    @property
    def used(self) -> float:
        """The share of the capacity in use."""
        return self.used_bytes / self.capacity_bytes

    @property
    def fragmentation(self) -> float | None:
        """The share of what is reserved that no tensor has; None on a CPU, where the rest is the whole program."""
        if self.device == "cpu" or not self.reserved_bytes:
            return None
        return 1 - (self.allocated_bytes + self.pool_bytes) / self.reserved_bytes

    def __str__(self) -> str:
        gaps = "" if self.fragmentation is None else f", {self.fragmentation:.1%} of it gaps"
        return (
            f"rank {self.rank}: {self.used:.1%} of {_mib(self.capacity_bytes)}; tensors {_mib(self.allocated_bytes)}, "
            f"pool {_mib(self.pool_bytes)}, reserved {_mib(self.reserved_bytes)}{gaps}, "
            f"resident {_mib(self.resident_bytes)}"
        )


class Arena(Protocol):
    """What a monitor asks of a ring's pool, see `ringattn.runtime.records`."""

    high_water_bytes: int

    @property
    def nbytes(self) -> int:
        """Bytes that a pass can use without growth."""
        ...

    def view(self, offset: int, nbytes: int) -> torch.Tensor:
        """Some of its bytes."""
        ...


Action = Callable[[Level, Sequence[Reading]], None]
"""What to do at a level, with the readings of all ranks."""


class MemoryMonitor:
    """The memory of this rank, and of all through `gather`. `Ring.memory_monitor` makes one."""

    def __init__(
        self,
        pool: Arena,
        device: torch.device,
        rank: int = 0,
        gather: Callable[[str], Sequence[str]] | None = None,
        profile: ProfileName | Profile = "balanced",
        actions: Mapping[Level, Iterable[Action]] | None = None,
        capacity_bytes: int | None = None,
    ) -> None:
        """Observes the memory of one rank; `Ring.memory_monitor` makes one with the first four arguments filled in.

        Args:
            pool: The ring's memory pool.
            device: The rank's device.
            rank: The rank.
            gather: From this rank's text to the texts of all ranks, by rank. None: alone.
            profile: aggressive, balanced or conservative, or a `Profile` of shares of the memory.
            actions: For each `Level` the functions of (level, readings) to call from that level on. None: no actions.
            capacity_bytes: Memory of this rank. None: what the device has, on a CPU the machine or its control group.

        Raises:
            InputError: The profile is not known or its shares do not ascend within 0 to 1; the capacity is not a whole
                number of bytes from 1 on; the actions are not lists of functions by `Level`.
        """
        self.profile = _profile(profile, rank)
        self._pool, self._device, self._rank, self._gather = pool, device, rank, gather
        self._actions = _actions({} if actions is None else actions, rank)
        if capacity_bytes is not None and (type(capacity_bytes) is not int or capacity_bytes < 1):
            raise InputError(
                f"rank {rank}: capacity_bytes={capacity_bytes!r}: expected a whole number of bytes from 1 on, or None "
                "for what the device has"
            )
        self._capacity_bytes = capacity_bytes

    def read(self) -> Reading:
        """This rank's memory now. Local; on a CPU it walks over all tensors of the process.

        Returns:
            The reading, in bytes.
        """
        pool, resident = self._pool, status_bytes("VmRSS")
        if self._device.type == "cuda":
            stats = torch.cuda.memory_stats(self._device)
            inside = pool.nbytes if lies_in(pool.view(0, 0).data_ptr(), torch.cuda.memory_snapshot()) else 0
            free, total = torch.cuda.mem_get_info(self._device)
            allocated, used = stats["allocated_bytes.all.current"] - inside, total - free
            reserved = stats["reserved_bytes.all.current"] + pool.nbytes - inside
        else:
            allocated = max(0, tensor_bytes(self._device) - pool.nbytes)
            reserved, used, total = resident, resident, cpu_capacity_bytes()
        return Reading(
            self._rank, self._device.type, allocated, reserved, pool.nbytes, pool.high_water_bytes, resident, used,
            self._capacity_bytes or total,
        )  # fmt: skip

    def report(self) -> list[Reading]:
        """The readings of all ranks. A collective call.

        Returns:
            One `Reading` for each rank, by rank.
        """
        mine = self.read()
        if self._gather is None:
            return [mine]
        return [Reading(**json.loads(words)) for words in self._gather(json.dumps(asdict(mine)))]

    def check(self) -> Level:
        """Reads all ranks, and takes the actions of every level that the fullest rank has reached. A collective call.

        Returns:
            The level, the same on every rank.
        """
        readings = self.report()
        level = self.profile.level(max(one.used for one in readings))
        for reached in sorted(one for one in self._actions if one <= level):
            for action in self._actions[reached]:
                action(level, readings)
        return level


def _profile(profile: ProfileName | Profile, rank: int) -> Profile:
    if isinstance(profile, str) and profile in PROFILES:
        return PROFILES[profile]
    if not isinstance(profile, Profile):
        known = ", ".join(PROFILES)
        raise InputError(f"rank {rank}: profile={profile!r} is not known; choose one of {known}, or give a Profile")
    numbers = all(isinstance(share, (int, float)) and not isinstance(share, bool) for share in profile)
    if not numbers or not 0 < profile.target <= profile.warning <= profile.critical <= profile.emergency <= 1:
        raise InputError(
            f"rank {rank}: profile={profile!r}: expected shares of the memory that ascend, "
            "0 < target <= warning <= critical <= emergency <= 1"
        )
    return profile


def _actions(actions: Mapping[Level, Iterable[Action]], rank: int) -> dict[Level, tuple[Action, ...]]:
    shape = "expected actions={Level.WARNING: [log], ...}, lists of functions of (level, readings) by Level"
    if not isinstance(actions, Mapping):
        raise InputError(f"rank {rank}: actions={actions!r}: {shape}")
    found = {}
    for level, some in actions.items():
        if not isinstance(level, Level) or isinstance(some, str) or not isinstance(some, Iterable):
            raise InputError(f"rank {rank}: actions has {level!r}: {some!r}; {shape}")
        found[level] = tuple(some)
        if wrong := [action for action in found[level] if not callable(action)]:
            raise InputError(f"rank {rank}: actions[{level!r}] has {wrong[0]!r}, which is no function; {shape}")
    return found


def greatest(readings: Sequence[Reading]) -> dict[str, int]:
    """The greatest figure of any rank, by name."""
    names = [name for name, value in asdict(readings[0]).items() if isinstance(value, int) and name != "rank"]
    return {name: max(getattr(one, name) for one in readings) for name in names}


# --- actions ---------------------------------------------------------------------------------------------------------


def log(level: Level, readings: Sequence[Reading]) -> None:
    """One line for the fullest rank, to the logger `ringattn`."""
    fullest = max(readings, key=lambda one: one.used)
    LOGGER.warning("memory %s: %s", level.name.lower(), fullest)


def stop(level: Level, readings: Sequence[Reading]) -> None:
    """Raises `OutOfMemoryError` before the allocator does, on every rank."""
    fullest = max(readings, key=lambda one: one.used)
    raise OutOfMemoryError(f"memory is at the level {level.name.lower()}: {fullest}; use a smaller batch or more ranks")


# --- figures ---------------------------------------------------------------------------------------------------------


def tensor_bytes(device: torch.device) -> int:
    """Bytes of all storages on `device` that a Python object refers to; what only autograd refers to is not counted."""
    sizes = {}
    for one in gc.get_objects():
        if type(one) in (torch.Tensor, torch.nn.Parameter) and one.device == device and one.layout == torch.strided:
            # A wrapper of torch.func has no storage; the tensor inside it is counted.
            with suppress(NotImplementedError):
                storage = one.untyped_storage()
                sizes[storage._cdata] = storage.nbytes()
    return sum(sizes.values())


def lies_in(pointer: int, segments: Iterable[Mapping[str, Any]]) -> bool:
    """Whether an address lies in a segment of `torch.cuda.memory_snapshot()`."""
    return any(one["address"] <= pointer < one["address"] + one["total_size"] for one in segments)


def _mib(nbytes: int) -> str:
    return f"{nbytes / 2**20:.1f} MiB"


# --- the kernel ------------------------------------------------------------------------------------------------------


STATUS, MEMINFO, CGROUP = (Path(name) for name in ("/proc/self/status", "/proc/meminfo", "/sys/fs/cgroup/memory.max"))
CLEAR_REFS = Path("/proc/self/clear_refs")


def status_bytes(name: str, path: Path = STATUS) -> int:
    """Return a field of /proc/self/status or /proc/meminfo in bytes. Raises `OSError` if the file has no such field.

    VmRSS is the resident size now, VmHWM the largest since the start or the last `reset_peak`.
    """
    match = re.search(rf"^{name}:\s+(\d+) kB$", path.read_text(encoding="ascii"), re.MULTILINE)
    if match is None:
        raise OSError(f"{path} has no {name}")
    return int(match[1]) * 1024


def reset_peak() -> None:
    """Reset VmHWM to the resident size of now (man 5 proc). Raises `OSError` where the kernel forbids it."""
    CLEAR_REFS.write_text("5", encoding="ascii")


def cpu_capacity_bytes() -> int:
    """The machine's memory, or less where a control group (v2) allows less."""
    total = status_bytes("MemTotal", MEMINFO)
    try:
        allowed = CGROUP.read_text(encoding="ascii").strip()
    except OSError:  # no control groups here
        return total
    return min(total, int(allowed)) if allowed.isdigit() else total


# --- no memory -------------------------------------------------------------------------------------------------------


CPU_ALLOCATOR = ("DefaultCPUAllocator: can't allocate memory", "DefaultCPUAllocator: not enough memory")
"""How torch's CPU allocator says it, in a plain RuntimeError (c10/core/impl/alloc_cpu.cpp)."""
NCCL_ALLOCATOR = ("ncclMemAlloc", "out of memory")
"""The function of an `NcclError`, and CUDA's words in it, which NCCL passes on (NCCL 2.28, allocator.cc)."""


def is_shortage(error: BaseException) -> bool:
    """Whether an error says that there was no memory, and is not yet one of ours."""
    if isinstance(error, OutOfMemoryError):
        return False
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return True
    # The transport may quote the shortage of another rank, so the words alone do not tell.
    if isinstance(error, TransportError):
        function, words = NCCL_ALLOCATOR
        return getattr(error, "function", None) == function and words in str(error)
    return isinstance(error, RuntimeError) and any(words in str(error) for words in CPU_ALLOCATOR)


def out_of_memory_error(
    error: BaseException, plan: Plan, step: int | None, workspace_bytes: int, pool_bytes: int
) -> OutOfMemoryError:
    """Return the error with what was live and what to change. `pool_bytes`: what the ring's pool holds now."""
    advice = "\n".join(f"  - {remedy}" for remedy in remedies(plan))
    first = (str(error) or repr(error)).splitlines()[0]
    return OutOfMemoryError(
        f"rank {plan.rank}: out of memory in an attention pass: {first}\n"
        f"{account(plan, step, workspace_bytes)}\nthe pool holds {mib(pool_bytes)}\nto change:\n{advice}"
    )
