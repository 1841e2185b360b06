"""The memory monitor's readings, levels and actions are right, in one process and over a ring."""

from __future__ import annotations

import logging
import math
import mmap
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from ringattn.errors import InputError, OutOfMemoryError
from ringattn.observe import memory
from ringattn.observe.memory import (
    PROFILES,
    Level,
    MemoryMonitor,
    Profile,
    Reading,
    largest,
    lies_in,
    log,
    stop,
    tensor_bytes,
)
from ringattn.ring import Ring
from ringattn.runtime.records import Pool
from ringattn.testing import run_ranks
from tests.face import RANKS, TOKENS, X

CPU = torch.device("cpu")
MIB = 1 << 20
ONE = Reading(0, "cuda", 600, 1000, 300, 200, 50, 950, 1000)


def alone(**options: Any) -> MemoryMonitor:
    return MemoryMonitor(Pool(lambda nbytes: torch.empty(nbytes, dtype=torch.uint8)), CPU, **options)


@pytest.mark.parametrize(("name", "bounds"), [
    ("aggressive", (0.92, 0.94, 0.96, 0.98)), ("balanced", (0.90, 0.92, 0.95, 0.97)),
    ("conservative", (0.85, 0.88, 0.92, 0.95)),
])  # fmt: skip
def test_a_profile_has_a_level_from_each_of_its_bounds(name: str, bounds: tuple[float, ...]) -> None:
    profile = PROFILES[name]
    assert tuple(profile) == bounds
    for number, bound in enumerate(bounds[1:]):
        assert profile.level(bound - 1e-9) == number and profile.level(bound) == number + 1
    assert profile.level(1.0) is Level.EMERGENCY


def test_a_reading_counts_views_once_and_the_pool_separately() -> None:
    monitor = alone()
    before = monitor.read()
    # New pages: malloc would first reuse the memory that earlier tests have freed.
    storage = torch.frombuffer(mmap.mmap(-1, 64 * MIB), dtype=torch.uint8).fill_(1)
    views = [storage[:MIB], storage.view(2, -1)]
    monitor._pool.reserve(4 * MIB)
    after = monitor.read()
    # The alignment padding of the pool is counted as tensors, so there may be up to 256 bytes more.
    assert 0 <= after.allocated_bytes - before.allocated_bytes - 64 * MIB <= 256
    assert (after.pool_bytes, before.pool_bytes) == (4 * MIB, 0)
    assert after.resident_bytes - before.resident_bytes >= 63 * MIB
    assert after.used_bytes == after.reserved_bytes == after.resident_bytes < after.capacity_bytes
    assert after.fragmentation is None and f"{after.used:.1%}" in str(after)
    del storage, views
    assert monitor.read().allocated_bytes <= before.allocated_bytes + 256


def test_fragmentation_is_the_share_of_reserved_bytes_without_tensors() -> None:
    assert ONE.fragmentation == pytest.approx(0.1) and "10.0% of it gaps" in str(ONE)
    assert replace(ONE, reserved_bytes=0).fragmentation is None
    segments = [{"address": 1000, "total_size": 24}, {"address": 4096, "total_size": 512}]
    addresses = (999, 1000, 1023, 1024, 4096, 4607, 4608)
    assert [address for address in addresses if lies_in(address, segments)] == [1000, 1023, 4096, 4607]


def test_a_cuda_reading_counts_the_pool_once_inside_and_outside_torchs_allocator(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monitor = alone()
    monitor._device = torch.device("cuda")
    monitor._pool.reserve(300)
    pool_address = monitor._pool.view(0, 0).data_ptr()
    stats = {"allocated_bytes.all.current": 900, "reserved_bytes.all.current": 1200}
    monkeypatch.setattr(torch.cuda, "memory_stats", lambda device: stats)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (200, 2000))
    readings = []
    for address in (pool_address, pool_address + 1):  # the pool inside torch's allocator, and outside it
        monkeypatch.setattr(torch.cuda, ("memory_snapshot"), lambda: [{"address": address, "total_size": 300}])  # noqa: B023
        readings.append(monitor.read())
    inside, outside = readings
    assert (inside.allocated_bytes, inside.reserved_bytes) == (600, 1200)
    assert (outside.allocated_bytes, outside.reserved_bytes) == (900, 1500)
    assert inside.used_bytes == outside.used_bytes == 1800 and inside.capacity_bytes == 2000


@pytest.mark.parametrize(("allowed", "capacity"), [("max\n", 64 * 1024), ("4096\n", 4096), (None, 64 * 1024)])
def test_the_capacity_of_a_cpu_is_limited_by_its_cgroup(
    tmp_path: Path, monkeypatch: Any, allowed: str | None, capacity: int
) -> None:
    (tmp_path / "meminfo").write_text("MemFree:  1 kB\nMemTotal:       64 kB\n")
    if allowed is not None:
        (tmp_path / "max").write_text(allowed)
    monkeypatch.setattr(memory, "MEMINFO", tmp_path / "meminfo")
    monkeypatch.setattr(memory, "CGROUP", tmp_path / "max")
    assert memory.cpu_capacity_bytes() == capacity
    with pytest.raises(OSError, match="has no Swap"):
        memory.status_bytes("Swap", tmp_path / "meminfo")


@pytest.mark.parametrize(("group", "address_space", "free"), [
    ("max\n", memory.resource.RLIM_INFINITY, 100), (None, memory.resource.RLIM_INFINITY, 100),
    ("5000\n", memory.resource.RLIM_INFINITY, 100), ("1070\n", memory.resource.RLIM_INFINITY, 70),
    ("900\n", memory.resource.RLIM_INFINITY, 0), ("1070\n", 50, 30),
])  # fmt: skip
def test_the_free_memory_of_a_cpu_is_the_lowest_of_its_limits(
    tmp_path: Path, monkeypatch: Any, group: str | None, address_space: int, free: int
) -> None:
    for name, text in (("CGROUP", group), ("CGROUP_NOW", "1000\n")):
        monkeypatch.setattr(memory, name, tmp_path / name)
        if text is not None:
            (tmp_path / name).write_text(text)
    monkeypatch.setattr(memory.resource, "getrlimit", lambda _: (address_space, address_space))
    monkeypatch.setattr(memory, "status_bytes", lambda name, *_: {"VmSize": 20, "MemAvailable": 100}[name])
    assert memory.free_bytes(torch.device("cpu")) == free


def test_an_unknown_profile_is_refused_and_a_custom_one_accepted() -> None:
    with pytest.raises(InputError, match="aggressive, balanced, conservative"):
        alone(profile="brave")
    assert alone(profile=Profile(0.1, 0.2, 0.3, 0.4)).profile.critical == 0.3


@pytest.mark.parametrize(
    ("options", "message"),
    [
        *(({"capacity_bytes": bad}, rf"capacity_bytes must be a whole number of bytes from 1 on, or None, got {bad!r}")
          for bad in (0, -1, math.nan, math.inf, 1e9, True, "80GiB")),
        *(({"profile": Profile(*bad)}, r"expected ascending shares of the memory, 0 < target")
          for bad in ((0.9, 0.95, 0.92, 0.97), (0.95, 0.92, 0.95, 0.97), (0.9, 0.92, 0.97, 0.95), (90, 92, 95, 97),
                      (0, 0.92, 0.95, 0.97), (0.9, 0.92, math.nan, 0.97), (0.9, 0.92, 0.95, "1"))),
        ({"profile": (0.9, 0.92, 0.95, 0.97)}, "profile=.* is not known"),
        ({"profile": None}, "profile=None is not known"),
        ({"actions": [stop]}, r"actions=\[<function stop .*: expected actions=\{Level.WARNING: \[log\]"),
        ({"actions": {Level.WARNING: stop}}, r"actions has <Level.WARNING: 1>: <function stop"),
        ({"actions": {Level.WARNING: "log"}}, r"actions has <Level.WARNING: 1>: 'log'"),
        ({"actions": {"warning": [stop]}}, r"actions has 'warning': \["),
        ({"actions": {1: [stop]}}, r"actions has 1: \["),
        ({"actions": {Level.CRITICAL: [log, None]}}, r"actions\[<Level.CRITICAL: 2>\] has None, which is not"),
    ],
)  # fmt: skip
def test_wrong_options_are_refused_at_construction(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match="rank 3: .*" + message):
        alone(rank=3, **options)


# --- levels and actions ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("used", "level", "taken"), [
    (0.5, Level.NORMAL, []), (0.93, Level.WARNING, ["w"]), (0.955, Level.CRITICAL, ["w", "c"]),
    (0.99, Level.EMERGENCY, ["w", "c", "e"]),
])  # fmt: skip
def test_the_actions_of_all_levels_up_to_the_current_one_run(
    used: float, level: Level, taken: list[str], monkeypatch: Any
) -> None:
    done: list[str] = []
    actions = {
        Level.EMERGENCY: [lambda *_: done.append("e")], Level.WARNING: [lambda *_: done.append("w")],
        Level.CRITICAL: [lambda *_: done.append("c")],
    }  # fmt: skip
    monitor = alone(actions=actions)
    monkeypatch.setattr(monitor, "read", lambda: replace(ONE, used_bytes=int(1e6 * used), capacity_bytes=10**6))
    assert monitor.check() is level and done == taken


def test_log_warns_and_stop_raises(caplog: pytest.LogCaptureFixture) -> None:
    readings = [replace(ONE, device="cpu", used_bytes=1), replace(ONE, rank=1, device="cpu")]
    with caplog.at_level(logging.WARNING, logger="ringattn"):
        log(Level.WARNING, readings)
    assert "memory warning: rank 1: 95.0%" in caplog.text
    with pytest.raises(OutOfMemoryError, match=r"emergency: rank 1: 95.0% .*smaller batch"):
        stop(Level.EMERGENCY, readings)


# --- over a ring -----------------------------------------------------------------------------------------------------


def test_all_ranks_raise_for_the_fullest_rank() -> None:
    def body(ring: Ring) -> tuple[list[Reading], list[Reading]]:
        seq = ring.sequence(TOKENS)
        ring.attention(*(seq.shard(X) for _ in range(3)), seq)
        monitor = ring.memory_monitor()
        report = monitor.report()
        assert monitor.check() is Level.NORMAL
        full = ring.memory_monitor(actions={Level.EMERGENCY: [stop]}, capacity_bytes=1 if ring.rank == 2 else None)
        with pytest.raises(OutOfMemoryError, match="rank 2"):
            full.check()
        ring.barrier()  # all ranks raised, so the ring is still usable
        return report, monitor.report()

    for first, again in run_ranks(RANKS, body):
        assert [reading.rank for reading in first] == list(range(RANKS))
        assert largest(again)["pool_bytes"] == max(reading.pool_bytes for reading in again) > 0
        assert "rank" not in largest(again) and "device" not in largest(again)


def test_tensors_inside_vmap_have_no_storage_and_are_ignored() -> None:
    def check_bytes(x: torch.Tensor) -> torch.Tensor:
        assert tensor_bytes(torch.device("cpu")) >= 4096
        return x

    torch.vmap(check_bytes)(torch.zeros(1024))
