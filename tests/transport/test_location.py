"""Where a rank runs, read from planted /proc and /sys trees and a stand-in for NVIDIA's library."""

from __future__ import annotations

import ctypes
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torch.distributed import HashStore

from ringattn.planner.cluster import LinkClass
from ringattn.transport.control_store import ControlStore
from ringattn.transport.deadline import Deadline
from ringattn.transport.location import (
    Gpu,
    Location,
    Nic,
    gather_locations,
    gpu_links,
    links_of,
    machine_id,
    my_location,
    nics,
    one_machine,
    torch_gpu,
)


def plant(root: Path, files: dict[str, str]) -> Path:
    """A tree of files below `root`."""
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text + "\n")
    return root


def machine(root: Path, boot: str = "b00t", network: int = 4026531840, **files: str) -> Path:
    """A machine that tells its boot and its network namespace."""
    plant(root, {"proc/sys/kernel/random/boot_id": boot, **files})
    (root / "proc/self/ns").mkdir(parents=True)
    (root / "proc/self/ns/net").symlink_to(f"net:[{network}]")
    return root


def at(machine: str | None, gpu: str | None = None, **more: Any) -> Location:
    return Location("host", machine, 1, 0, gpu, **more)


def test_a_machine_is_its_boot_and_its_network_namespace(tmp_path: Path) -> None:
    first = machine_id(machine(tmp_path / "a"))
    assert first == "b00t/4026531840" == machine_id(machine(tmp_path / "b"))
    assert machine_id(machine(tmp_path / "container", network=4026532000)) != first
    assert machine_id(machine(tmp_path / "other", boot="b11t")) != first
    assert machine_id(tmp_path / "nothing") is None
    assert machine_id() == machine_id() is not None


def test_machines_that_are_not_known_are_never_the_same() -> None:
    assert at("m").same_machine(at("m")) and not at("m").same_machine(at("n"))
    assert not at(None).same_machine(at(None))
    assert one_machine([at("m"), at("m")]) and not one_machine([at("m"), at("m"), at("n")])
    assert not one_machine([at(None), at(None)]) and not one_machine([])


def test_active_rdma_ports_go_before_interfaces(tmp_path: Path) -> None:
    plant(tmp_path, {
        "sys/class/net/lo/operstate": "unknown",
        "sys/class/net/eth0/operstate": "up", "sys/class/net/eth0/speed": "25000",
        "sys/class/net/eth1/operstate": "down", "sys/class/net/eth1/speed": "-1",
        "sys/class/net/veth0/operstate": "up", "sys/class/net/veth0/speed": "-1",
    })  # fmt: skip
    assert nics(tmp_path) == (Nic("eth0", 25.0), Nic("veth0", None))
    plant(tmp_path, {
        "sys/class/infiniband/mlx5_0/ports/1/state": "4: ACTIVE",
        "sys/class/infiniband/mlx5_0/ports/1/rate": "400 Gb/sec (4X NDR)",
        "sys/class/infiniband/mlx5_1/ports/1/state": "1: DOWN",
        "sys/class/infiniband/mlx5_1/ports/1/rate": "10 Gb/sec (4X)",
    })  # fmt: skip
    assert nics(tmp_path) == (Nic("mlx5_0:1", 400.0),)


def test_a_location_passes_through_the_store(tmp_path: Path) -> None:
    root = machine(tmp_path, **{"sys/class/net/eth0/operstate": "up"})
    links = (("GPU-b", LinkClass.NVLINK), ("GPU-c", LinkClass.UNKNOWN))
    gpu_of = lambda index: Gpu(f"gpu {index}", "0000:1b:00.0", "NVIDIA H200", 132)  # noqa: E731
    mine = my_location(3, root=root, gpu_of=gpu_of, links=lambda uuid: links)
    assert (mine.gpu, mine.bus, mine.links) == ("gpu 3", "0000:1b:00.0", links)
    assert (mine.device, mine.sms, mine.calibration) == ("NVIDIA H200", 132, None)
    mine = replace(mine, calibration='{"constants": 1}')
    assert Location.parse(mine.text()) == mine
    on_cpu = my_location(root=root)
    assert on_cpu.gpu is None and on_cpu.links == () and on_cpu.nics == (Nic("eth0", None),)
    for one in (on_cpu, replace(on_cpu, machine=None, uid=0)):
        assert Location.parse(one.text()) == one
    assert len(on_cpu.text()) < 400  # of 1,024 ranks, each reads all


def test_a_gpu_as_torch_tells_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    facts = SimpleNamespace(
        uuid="GPU-3a8d",
        pci_domain_id=0,
        pci_bus_id=0x1B,
        pci_device_id=0,
        name="NVIDIA H200",
        multi_processor_count=132,
    )
    monkeypatch.setattr("torch.cuda.get_device_properties", lambda index: facts)
    assert torch_gpu(0) == Gpu("3a8d", "0000:1b:00.0", "NVIDIA H200", 132)
    del facts.pci_domain_id
    assert torch_gpu(0) == Gpu("3a8d", None, "NVIDIA H200", 132)


def test_what_every_rank_reads_of_all_others_is_small() -> None:
    ranks, store = 64, HashStore()

    def of(rank: int) -> Location:
        gpus = [f"{node_gpu:08x}-0000-0000-0000-00000000000a" for node_gpu in range(rank // 8 * 8, rank // 8 * 8 + 8)]
        links = tuple((gpu, LinkClass.NVLINK) for gpu in gpus if gpu != gpus[rank % 8])
        ports = tuple(Nic(f"mlx5_{n}:1", 400.0) for n in range(8))
        return Location(
            f"node-{rank // 8}", f"boot-{rank // 8}/4026531840", rank, 1000, gpus[rank % 8], None, ports, links
        )

    controls = [ControlStore(store, rank, ranks) for rank in (0, ranks - 1)]
    for rank in range(ranks - 1):
        controls[0].set(f"opening/{rank}", of(rank).text())
        controls[0].add("opening/count")
    everyone = tuple(map(of, range(ranks)))
    assert gather_locations(controls[1], of(ranks - 1), Deadline(5)) == everyone
    assert sum(len(one.text()) for one in everyone) > 64 * 500 > 5 * len(controls[1].get("opening/all"))
    controls[0].add("opening/count", -ranks)  # for a rank that was not the last
    assert gather_locations(controls[0], of(0), Deadline(5)) == everyone


# --- links -----------------------------------------------------------------------------------------------------------


class Library:
    """NVIDIA's library as `gpu_links` calls it. `status`: of each pair, as NVML numbers it; None: the call fails."""

    def __init__(self, uuids: list[str], status: dict[frozenset[str], int | None], down: bool = False) -> None:
        self.uuids, self.status, self.down, self.users = uuids, status, down, 0

    def nvmlInit_v2(self) -> int:
        self.users += not self.down
        return int(self.down)

    def nvmlShutdown(self) -> int:
        self.users -= 1
        return 0

    def nvmlDeviceGetCount_v2(self, count: Any) -> int:
        count._obj.value = len(self.uuids)
        return 0

    def nvmlDeviceGetHandleByIndex_v2(self, index: ctypes.c_uint, handle: Any) -> int:
        handle._obj.value = index.value + 1
        return 15 if self.uuids[index.value] == "lost" else 0

    def nvmlDeviceGetUUID(self, handle: ctypes.c_void_p, text: Any, size: ctypes.c_uint) -> int:
        assert handle.value is not None
        text.value = f"GPU-{self.uuids[handle.value - 1]}".encode()
        return 0

    def nvmlDeviceGetP2PStatus(self, one: ctypes.c_void_p, other: ctypes.c_void_p, index: Any, status: Any) -> int:
        assert index.value == 2 and one.value is not None and other.value is not None
        found = self.status[frozenset((self.uuids[one.value - 1], self.uuids[other.value - 1]))]
        status._obj.value = found or 0
        return 999 if found is None else 0


def test_links_of_a_gpu_are_what_the_driver_says() -> None:
    status = {frozenset("ab"): 0, frozenset("ac"): 5, frozenset("ad"): 6, frozenset("ae"): None}
    library = Library(["a", "b", "c", "d", "e", "lost"], status)
    assert gpu_links("a", library) == [
        ("b", LinkClass.NVLINK), ("c", LinkClass.PCIE), ("d", LinkClass.UNKNOWN), ("e", LinkClass.UNKNOWN)
    ]  # fmt: skip
    assert gpu_links("a slice of a", library) == [] and library.users == 0
    assert gpu_links("a", Library(["a", "b"], status, down=True)) == []


def test_links_of_gpus_of_two_nodes() -> None:
    links = (("b", LinkClass.NVLINK), ("c", LinkClass.PCIE))
    found = links_of([at("m", "a", links=links), at("m", "b"), at("n", "d"), at("m", "c"), at("m", "a", links=links)])
    assert found.nodes == (0, 0, 1, 0, 0)
    told = {(rank, peer): found.of(rank, peer) for rank in range(5) for peer in range(rank)}
    assert told == {
        (1, 0): LinkClass.NVLINK, (3, 0): LinkClass.PCIE, (4, 0): LinkClass.SAME_GPU, (4, 1): LinkClass.NVLINK,
        (3, 1): LinkClass.UNKNOWN, (4, 3): LinkClass.PCIE,  # b told nothing, and c nothing of b
        **{(max(2, other), min(2, other)): LinkClass.NETWORK for other in (0, 1, 3, 4)},
    }  # fmt: skip
    assert found.of(0, 1) is LinkClass.NVLINK


@pytest.mark.parametrize(
    ("machines", "nodes", "inside", "outside"),
    [
        ("mmnnn", (0, 0, 1, 1, 1), LinkClass.MEMORY, LinkClass.NETWORK),
        ("mnmn", (0, 1, 0, 1), LinkClass.MEMORY, LinkClass.NETWORK),
        ([None, "m"], (0, 1), LinkClass.UNKNOWN, LinkClass.UNKNOWN),
    ],
)  # fmt: skip
def test_links_of_ranks_on_cpu(machines: Any, nodes: tuple[int, ...], inside: LinkClass, outside: LinkClass) -> None:
    found = links_of([at(machine) for machine in machines])
    assert (found.nodes, found.inside, found.outside, found.exceptions) == (nodes, inside, outside, ())
