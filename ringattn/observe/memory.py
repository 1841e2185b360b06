"""Memory of a rank: readings and levels of all ranks, a count of tensor bytes, and errors for a lack of memory.

Guarantees: every rank reads the readings of all ranks and computes the same level, so an action that raises does so on
all of them. No byte is counted twice, whether or not the ring's pool is in torch's allocator. Every error that reports
a lack of memory, under any name of torch or Python, becomes one `OutOfMemoryError` with the first error as its cause.
Not covered: ranks that are threads of one process each report the memory of the whole process.
"""

from __future__ import annotations

import gc
import json
import logging
import re
import resource
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from enum import IntEnum
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol

import torch

from ringattn.errors import InputError, OutOfMemoryError, TransportError
from ringattn.integers import whole_number
from ringattn.planner.plan import Plan, account, mib

LOGGER = logging.getLogger("ringattn")


class Level(IntEnum):
    """A memory level: how full the fullest rank is."""

    NORMAL = 0
    WARNING = 1
    CRITICAL = 2
    EMERGENCY = 3


class Profile(NamedTuple):
    """Shares of a rank's memory: the target, and the start of each level."""

    target: float
    warning: float
    critical: float
    emergency: float

    def level(self, used: float) -> Level:
        """Return the level for the share `used` of a rank's memory."""
        return Level(sum(used >= bound for bound in (self.warning, self.critical, self.emergency)))


ProfileName = Literal["aggressive", "balanced", "conservative"]
PROFILES = {
    "aggressive": Profile(0.92, 0.94, 0.96, 0.98),
    "balanced": Profile(0.90, 0.92, 0.95, 0.97),
    "conservative": Profile(0.85, 0.88, 0.92, 0.95),
}
"""These thresholds were not measured. They are the values of a training guide that users of dilated attention know."""


@dataclass(frozen=True)
class Reading:
    """One rank's memory, in bytes.

    `allocated_bytes`: tensors, without the pool. `pool_bytes`, `pool_high_water_bytes`: the ring's pool, its size and
    the most that a pass has used. `reserved_bytes`: memory of the allocators including the pool; on a CPU, the
    process's resident size. `resident_bytes`: the process's resident size. `used_bytes`: on CUDA, the device's memory
    in use by all processes; on a CPU, the resident size. `capacity_bytes`: the memory of the device; on a CPU, of the
    machine or the control group.
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
        """The used share of the capacity."""
        return self.used_bytes / self.capacity_bytes

    @property
    def fragmentation(self) -> float | None:
        """The share of the reserved memory that no tensor uses; None on a CPU, where it would include the program."""
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
    """The part of a ring's pool that a monitor uses; see `ringattn.runtime.records`."""

    high_water_bytes: int

    @property
    def nbytes(self) -> int:
        """Bytes that a pass can use without growing the pool."""
        ...

    def view(self, offset: int, nbytes: int) -> torch.Tensor:
        """Return a part of the pool's bytes."""
        ...


Action = Callable[[Level, Sequence[Reading]], None]
"""Called at a level with the readings of all ranks."""


class MemoryMonitor:
    """A monitor of this rank's memory and, through `gather`, of all ranks' memory. See `Ring.memory_monitor`."""

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
        """Observe the memory of one rank. `Ring.memory_monitor` fills in the first four arguments.

        Args:
            pool: The ring's memory pool.
            device: The rank's device.
            rank: The rank.
            gather: A function that takes this rank's text and returns the texts of all ranks, in rank order. None: the
                monitor reads this rank only.
            profile: aggressive, balanced or conservative, or a `Profile` with shares of the memory.
            actions: For each `Level`, the functions of (level, readings) to call from that level on. None: no actions.
            capacity_bytes: The memory of this rank. None: the device's; on a CPU, the machine's or its control group's.

        Raises:
            InputError: The profile is unknown or its shares do not ascend within 0 to 1; the capacity is not a whole
                positive number of bytes; the actions are not lists of functions by `Level`.
        """
        self.profile = _profile(profile, rank)
        self._pool, self._device, self._rank, self._gather = pool, device, rank, gather
        self._actions = _actions({} if actions is None else actions, rank)
        if capacity_bytes is not None:
            needed = f"rank {rank}: capacity_bytes must be a whole number of bytes from 1 on, or None"
            capacity_bytes = whole_number(capacity_bytes, needed, 1)
        self._capacity_bytes = capacity_bytes

    def read(self) -> Reading:
        """Read this rank's memory now. This is local; on a CPU it visits all tensors of the process.

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
        """Gather the readings of all ranks. This is a collective call.

        Returns:
            One `Reading` for each rank, in rank order.
        """
        reading = self.read()
        if self._gather is None:
            return [reading]
        return [Reading(**json.loads(text)) for text in self._gather(json.dumps(asdict(reading)))]

    def check(self) -> Level:
        """Read the memory of all ranks, and run the actions of every level that the fullest rank has reached.

        This is a collective call.

        Returns:
            The level, the same on every rank.
        """
        readings = self.report()
        level = self.profile.level(max(reading.used for reading in readings))
        for reached in sorted(action_level for action_level in self._actions if action_level <= level):
            for action in self._actions[reached]:
                action(level, readings)
        return level


def _profile(profile: ProfileName | Profile, rank: int) -> Profile:
    if isinstance(profile, str) and profile in PROFILES:
        return PROFILES[profile]
    if not isinstance(profile, Profile):
        names = ", ".join(PROFILES)
        raise InputError(f"rank {rank}: profile={profile!r} is not known; choose one of {names}, or give a Profile")
    numbers = all(isinstance(share, (int, float)) and not isinstance(share, bool) for share in profile)
    if not numbers or not 0 < profile.target <= profile.warning <= profile.critical <= profile.emergency <= 1:
        raise InputError(
            f"rank {rank}: profile={profile!r}: expected ascending shares of the memory, 0 < target <= warning <= "
            "critical <= emergency <= 1"
        )
    return profile


def _actions(actions: Mapping[Level, Iterable[Action]], rank: int) -> dict[Level, tuple[Action, ...]]:
    shape = "expected actions={Level.WARNING: [log], ...}, lists of functions of (level, readings) by Level"
    if not isinstance(actions, Mapping):
        raise InputError(f"rank {rank}: actions={actions!r}: {shape}")
    valid = {}
    for level, functions in actions.items():
        if not isinstance(level, Level) or isinstance(functions, str) or not isinstance(functions, Iterable):
            raise InputError(f"rank {rank}: actions has {level!r}: {functions!r}; {shape}")
        valid[level] = tuple(functions)
        if wrong := [action for action in valid[level] if not callable(action)]:
            raise InputError(f"rank {rank}: actions[{level!r}] has {wrong[0]!r}, which is not a function; {shape}")
    return valid


def largest(readings: Sequence[Reading]) -> dict[str, int]:
    """Return the largest value of any rank for each field."""
    names = [name for name, value in asdict(readings[0]).items() if isinstance(value, int) and name != "rank"]
    return {name: max(getattr(reading, name) for reading in readings) for name in names}


# --- actions ---------------------------------------------------------------------------------------------------------


def log(level: Level, readings: Sequence[Reading]) -> None:
    """Log one line about the fullest rank to the logger `ringattn`."""
    fullest = max(readings, key=lambda reading: reading.used)
    LOGGER.warning("memory %s: %s", level.name.lower(), fullest)


def stop(level: Level, readings: Sequence[Reading]) -> None:
    """Raise `OutOfMemoryError` on every rank, before the allocator does."""
    fullest = max(readings, key=lambda reading: reading.used)
    raise OutOfMemoryError(f"memory is at the level {level.name.lower()}: {fullest}; use a smaller batch or more ranks")


# --- figures ---------------------------------------------------------------------------------------------------------


def tensor_bytes(device: torch.device) -> int:
    """Return the bytes of all storages on `device` that Python tensors use, without those that only autograd keeps."""
    sizes = {}
    for obj in gc.get_objects():
        if type(obj) in (torch.Tensor, torch.nn.Parameter) and obj.device == device and obj.layout == torch.strided:
            # A wrapper of torch.func has no storage. The tensor inside it is counted.
            with suppress(NotImplementedError):
                storage = obj.untyped_storage()
                sizes[storage._cdata] = storage.nbytes()
    return sum(sizes.values())


def lies_in(pointer: int, segments: Iterable[Mapping[str, Any]]) -> bool:
    """Return whether an address is in a segment of `torch.cuda.memory_snapshot()`."""
    return any(segment["address"] <= pointer < segment["address"] + segment["total_size"] for segment in segments)


def _mib(nbytes: int) -> str:
    return f"{nbytes / 2**20:.1f} MiB"


# --- the kernel ------------------------------------------------------------------------------------------------------


STATUS, MEMINFO, CGROUP = (Path(name) for name in ("/proc/self/status", "/proc/meminfo", "/sys/fs/cgroup/memory.max"))
CGROUP_NOW = Path("/sys/fs/cgroup/memory.current")
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
    """Reset VmHWM to the current resident size (man 5 proc). Raises `OSError` if the kernel forbids it."""
    CLEAR_REFS.write_text("5", encoding="ascii")


def cpu_capacity_bytes() -> int:
    """Return the machine's memory, or the limit of its control group (v2) if that is lower."""
    total = status_bytes("MemTotal", MEMINFO)
    try:
        allowed = CGROUP.read_text(encoding="ascii").strip()
    except OSError:  # there are no control groups
        return total
    return min(total, int(allowed)) if allowed.isdigit() else total


def free_bytes(device: torch.device) -> int:
    """Return the bytes that this process can still allocate on `device`, gaps of the allocator included."""
    if device.type == "cuda":
        stats = torch.cuda.memory_stats(device)
        gaps = stats["reserved_bytes.all.current"] - stats["allocated_bytes.all.current"]
        return int(torch.cuda.mem_get_info(device)[0] + gaps)
    limits = [status_bytes("MemAvailable", MEMINFO)]
    with suppress(OSError, ValueError):  # there are no control groups, or they set no limit
        limits.append(int(CGROUP.read_text(encoding="ascii")) - int(CGROUP_NOW.read_text(encoding="ascii")))
    address_space, _ = resource.getrlimit(resource.RLIMIT_AS)
    if address_space != resource.RLIM_INFINITY:
        limits.append(address_space - status_bytes("VmSize"))
    return max(0, min(limits))


# --- out of memory ---------------------------------------------------------------------------------------------------


CPU_ALLOCATOR = ("DefaultCPUAllocator: can't allocate memory", "DefaultCPUAllocator: not enough memory")
"""The messages of torch's CPU allocator, in a plain RuntimeError (c10/core/impl/alloc_cpu.cpp)."""
NCCL_ALLOCATOR = ("ncclMemAlloc", "out of memory")
"""The function of an `NcclError`, and CUDA's message in it, which NCCL forwards (NCCL 2.28, allocator.cc)."""


def is_shortage(error: BaseException) -> bool:
    """Return whether an error reports a lack of memory and is not yet an `OutOfMemoryError` of ringattn."""
    if isinstance(error, OutOfMemoryError):
        return False
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return True
    # The transport may quote another rank's shortage, so the text alone is not enough.
    if isinstance(error, TransportError):
        function, text = NCCL_ALLOCATOR
        return getattr(error, "function", None) == function and text in str(error)
    return isinstance(error, RuntimeError) and any(text in str(error) for text in CPU_ALLOCATOR)


def out_of_memory_error(
    error: BaseException,
    plan: Plan,
    step: int | None,
    workspace_bytes: int,
    pool_bytes: int,
    advise: Callable[[], list[str]],
) -> OutOfMemoryError:
    """Return `error` as an `OutOfMemoryError` that lists the memory in use and what to change.

    `workspace_bytes`, `pool_bytes`: the current sizes of the engine's workspace and of the ring's pool. `advise`
    returns the changes; planning them may itself fail for lack of memory.
    """
    try:
        changes = advise()
    except Exception as second:
        if not is_shortage(second):
            raise
        changes = ["no memory was left to plan changes; use fewer tokens, a smaller batch or more ranks"]
    advice = "\n".join(f"  - {change}" for change in changes)
    first = (str(error) or repr(error)).splitlines()[0]
    return OutOfMemoryError(
        f"rank {plan.rank}: out of memory in an attention pass: {first}\n"
        f"{account(plan, step, workspace_bytes)}\nthe pool holds {mib(pool_bytes)}\nto change:\n{advice}"
    )
