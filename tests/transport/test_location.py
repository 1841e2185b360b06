"""Locations of ranks (machine, GPU, links), read from fake /proc and /sys trees and a fake of NVML."""

from __future__ import annotations

import ctypes
import json
import re
import threading
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist
from torch.distributed import HashStore

from ringattn.errors import DeadlineError, InputError
from ringattn.planner.cluster import CLUSTERS, REFERENCE, Cluster, LinkClass
from ringattn.ring import Ring
from ringattn.testing import run_ranks
from ringattn.transport import gloo, location
from ringattn.transport.base import Opening
from ringattn.transport.control_store import ControlStore
from ringattn.transport.deadline import Deadline
from ringattn.transport.gloo import GlooTransport
from ringattn.transport.local import LocalTransport
from ringattn.transport.location import (
    DEVICES,
    OVER_PCIE,
    Address,
    Gpu,
    Location,
    Nic,
    Recognised,
    find_address,
    gather_locations,
    gpu_links,
    links_of,
    machine_id,
    my_location,
    nics,
    one_machine,
    own_calibration,
    reachable,
    recognise,
    torch_gpu,
)
from tests.transport.threads import on_each_rank


def plant(root: Path, files: dict[str, str]) -> Path:
    """Write files below `root`. `files`: the text of each file, by its path."""
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text + "\n")
    return root


def machine(root: Path, boot: str = "b00t", network: int = 4026531840, **files: str) -> Path:
    """Write the /proc files of a machine with this boot id and network namespace below `root`, and return `root`."""
    plant(root, {"proc/sys/kernel/random/boot_id": boot, **files})
    (root / "proc/self/ns").mkdir(parents=True)
    (root / "proc/self/ns/net").symlink_to(f"net:[{network}]")
    return root


def rank_on(machine: str | None, gpu: str | None = None, **more: Any) -> Location:
    return Location("host", machine, 1, 0, gpu, **more)


def test_a_machine_is_its_boot_and_its_network_namespace(tmp_path: Path) -> None:
    first = machine_id(machine(tmp_path / "a"))
    assert first == "b00t/4026531840" == machine_id(machine(tmp_path / "b"))
    assert machine_id(machine(tmp_path / "container", network=4026532000)) != first
    assert machine_id(machine(tmp_path / "other", boot="b11t")) != first
    assert machine_id(tmp_path / "nothing") is None
    assert machine_id() == machine_id() is not None


def test_unknown_machines_are_never_the_same() -> None:
    assert rank_on("m").same_machine(rank_on("m")) and not rank_on("m").same_machine(rank_on("n"))
    assert not rank_on(None).same_machine(rank_on(None))
    assert one_machine([rank_on("m"), rank_on("m")]) and not one_machine([rank_on("m"), rank_on("m"), rank_on("n")])
    assert not one_machine([rank_on(None), rank_on(None)]) and not one_machine([])


def test_active_rdma_ports_have_priority_over_interfaces(tmp_path: Path) -> None:
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
    local = my_location(3, root=root, gpu_of=gpu_of, links=lambda uuid: links)
    assert (local.gpu, local.bus, local.links) == ("gpu 3", "0000:1b:00.0", links)
    assert (local.device, local.sms, local.calibration) == ("NVIDIA H200", 132, None)
    local = replace(local, calibration='{"constants": 1}')
    assert Location.parse(local.text()) == local
    on_cpu = my_location(root=root)
    assert on_cpu.gpu is None and on_cpu.links == () and on_cpu.nics == (Nic("eth0", None),)
    for sample in (on_cpu, replace(on_cpu, machine=None, uid=0)):
        assert Location.parse(sample.text()) == sample
    assert len(on_cpu.text()) < 400  # every rank reads the locations of up to 1,024 ranks


def test_the_properties_of_a_gpu_come_from_torch(monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_the_gathered_locations_are_small() -> None:
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
    assert sum(len(place.text()) for place in everyone) > 64 * 500 > 5 * len(controls[1].get("opening/all"))
    controls[0].add("opening/count", -ranks)  # so that no rank counts as the last
    assert gather_locations(controls[0], of(0), Deadline(5)) == everyone


# --- links -----------------------------------------------------------------------------------------------------------


class Library:
    """A fake of NVML for `gpu_links`.

    `status`: the P2P status that NVML returns for each pair of GPUs, or None if the call fails.
    """

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

    def nvmlDeviceGetP2PStatus(self, gpu: ctypes.c_void_p, peer: ctypes.c_void_p, index: Any, status: Any) -> int:
        assert index.value == 2 and gpu.value is not None and peer.value is not None
        link_status = self.status[frozenset((self.uuids[gpu.value - 1], self.uuids[peer.value - 1]))]
        status._obj.value = link_status or 0
        return 999 if link_status is None else 0


def test_links_of_a_gpu_come_from_the_driver() -> None:
    status = {frozenset("ab"): 0, frozenset("ac"): 5, frozenset("ad"): 6, frozenset("ae"): None}
    library = Library(["a", "b", "c", "d", "e", "lost"], status)
    assert gpu_links("a", library) == [
        ("b", LinkClass.NVLINK), ("c", LinkClass.PCIE), ("d", LinkClass.UNKNOWN), ("e", LinkClass.UNKNOWN)
    ]  # fmt: skip
    assert gpu_links("a slice of a", library) == [] and library.users == 0
    assert gpu_links("a", Library(["a", "b"], status, down=True)) == []


def test_links_of_gpus_of_two_nodes() -> None:
    first = rank_on("m", "a", links=(("b", LinkClass.NVLINK), ("c", LinkClass.PCIE)))
    links = links_of([first, rank_on("m", "b"), rank_on("n", "d"), rank_on("m", "c"), first])
    assert links.nodes == (0, 0, 1, 0, 0)
    classes = {(rank, peer): links.of(rank, peer) for rank in range(5) for peer in range(rank)}
    assert classes == {
        (1, 0): LinkClass.NVLINK, (3, 0): LinkClass.PCIE, (4, 0): LinkClass.SAME_GPU, (4, 1): LinkClass.NVLINK,
        (3, 1): LinkClass.UNKNOWN, (4, 3): LinkClass.PCIE,  # neither b nor c has reported the link between them
        **{(max(2, peer), min(2, peer)): LinkClass.NETWORK for peer in (0, 1, 3, 4)},
    }  # fmt: skip
    assert links.of(0, 1) is LinkClass.NVLINK


@pytest.mark.parametrize(
    ("machines", "nodes", "inside", "outside"),
    [
        ("mmnnn", (0, 0, 1, 1, 1), LinkClass.MEMORY, LinkClass.NETWORK),
        ("mnmn", (0, 1, 0, 1), LinkClass.MEMORY, LinkClass.NETWORK),
        ([None, "m"], (0, 1), LinkClass.UNKNOWN, LinkClass.UNKNOWN),
    ],
)  # fmt: skip
def test_links_of_ranks_on_cpu(machines: Any, nodes: tuple[int, ...], inside: LinkClass, outside: LinkClass) -> None:
    links = links_of([rank_on(machine) for machine in machines])
    assert (links.nodes, links.inside, links.outside, links.exceptions) == (nodes, inside, outside, ())


def opened(stores: list[dist.Store], timeout_s: float, interface: str = "") -> list[Any]:
    """Open a gloo ring with one thread per store. Return each rank's transport, or the error that it raised."""
    ranks = len(stores)
    return on_each_rank(
        ranks, lambda rank: GlooTransport.open(Opening(stores[rank], rank, ranks, timeout_s, interface=interface))
    )


def test_the_address_is_the_source_address_of_the_route_to_the_store() -> None:
    host = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    assert find_address(dist.PrefixStore("ring", host), "") == Address("127.0.0.1", "127.0.0.1", "")
    assert find_address(host, "lo") == Address("", "", "lo")
    assert find_address(dist.HashStore(), "") == Address("", "", "")


def test_a_loopback_address_is_replaced_by_the_address_that_other_hosts_use() -> None:
    addresses = [
        Address("127.0.1.1", "127.0.1.1", ""),
        Address("127.0.1.1", "127.0.1.1", ""),
        Address("10.0.0.2", "10.0.0.1", ""),
    ]
    assert [reachable(rank, addresses).own for rank in range(3)] == ["10.0.0.1", "10.0.0.1", "10.0.0.2"]
    one_host = addresses[:2]
    assert [reachable(rank, one_host) for rank in range(2)] == one_host
    named = [Address("", "", "eth1"), Address("10.0.0.2", "10.0.0.1", "")]
    assert reachable(0, named) == named[0]


def test_a_missing_interface_is_refused_on_all_ranks() -> None:
    shared = dist.HashStore()
    for rank, error in enumerate(opened([shared, shared], 20.0, interface="nope0")):
        assert isinstance(error, InputError)
        assert str(error) == (
            f"rank {rank} opened a ring of 2: rank 0: GLOO_SOCKET_IFNAME=nope0 names no interface with an address; "
            "rank 1: GLOO_SOCKET_IFNAME=nope0 names no interface with an address"
        )


def test_an_opening_that_cannot_connect_lists_the_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*facts: Any) -> None:
        raise RuntimeError("connection refused")

    monkeypatch.setattr(gloo, "_connect", refuse)
    host = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    for rank, error in enumerate(opened([host.clone(), host.clone()], 5.0)):
        assert isinstance(error, DeadlineError)
        reason, advice = str(error).split("; ")
        assert reason == (
            f"rank {rank} opened a ring of 2: all ranks arrived, but could not connect within 5.0 s "
            "(rank 0 at 127.0.0.1, rank 1 at 127.0.0.1)"
        )
        assert "set GLOO_SOCKET_IFNAME on every rank to the network interface" in advice


def test_a_name_that_is_not_resolved_in_time_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    gate = threading.Event()
    monkeypatch.setattr(gloo, "find_address", lambda store, interface: gate.wait(20.0))
    monkeypatch.setattr(gloo, "GRACE_S", 0.1)
    (error,) = opened([dist.HashStore()], 0.1)
    gate.set()
    assert isinstance(error, DeadlineError)
    assert re.fullmatch(
        r"rank 0 opened a ring of 1: the name of the store's host .* is not resolved within 0.1 s", str(error)
    )


H100 = "NVIDIA H100 80GB HBM3"
RDMA = tuple(Nic(f"mlx5_{port}:1", 400.0) for port in range(8))
OWN = Cluster("4 cores (calibrated)", 1e11, 1e9, 1e-4, calibrated=True, cores=4)
CALIBRATION = json.dumps({"constants": asdict(OWN), "transport": "shm"})


def gpus(nodes: Sequence[int], kind: LinkClass = LinkClass.NVLINK, **facts: Any) -> tuple[Location, ...]:
    """Return the location of each rank. Each has a GPU of its own; links of class `kind` connect the GPUs of a node.

    `nodes`: the node of each rank.
    """
    facts = {"device": H100, "sms": 132, "nics": RDMA, **facts}
    return tuple(
        Location(
            f"host-{node}", f"boot/{node}", rank, 0, f"gpu-{rank}", **facts,
            links=tuple((f"gpu-{peer}", kind) for peer, each in enumerate(nodes) if each == node and peer != rank),
        )
        for rank, node in enumerate(nodes)
    )  # fmt: skip


def of(locations: Sequence[Location], transport: str = "nccl") -> Recognised:
    return recognise(locations, links_of(locations), transport)


def test_a_preset_is_recognised_by_the_names_of_its_gpus_and_their_links() -> None:
    two = of(gpus([0] * 8 + [1] * 8))
    assert two == (
        replace(CLUSTERS["h100"], recognised=True),
        "recognised: 16 x NVIDIA H100 80GB HBM3 on 2 nodes, NVLink inside; preset h100",
    )
    assert (
        of(gpus([0] * 4, device="NVIDIA H200"))[1]
        == "recognised: 4 x NVIDIA H200 on 1 node, NVLink inside; preset h200"
    )
    # With one rank per node, there are no links inside a node.
    assert of(gpus([0, 1]))[1] == "recognised: 2 x NVIDIA H100 80GB HBM3 on 2 nodes; preset h100"
    assert {DEVICES[name] for name in DEVICES} | {"cpu"} == set(CLUSTERS)
    for device, name in DEVICES.items():
        recognised = of(gpus([0] * 4, device=device, sms=CLUSTERS[name].sms))
        assert (recognised.cluster is None) == (name in OVER_PCIE), device


def test_only_slower_network_ports_change_the_preset() -> None:
    slow = of(gpus([0, 0, 1, 1], nics=(Nic("eth0", 100.0),)))
    assert slow.cluster is not None and slow.cluster.node_bandwidth == pytest.approx(100e9 / 8 / 2)
    assert slow.why.endswith("preset h100, but 6.25 GB/s a rank between nodes by the rates of their ports")
    locations = gpus([0, 0, 1, 1])
    least = of((*locations[:2], *(replace(rank, nics=RDMA[:1]) for rank in locations[2:]))).cluster
    assert least is not None and least.node_bandwidth == pytest.approx(25e9)
    first = of((*(replace(rank, nics=RDMA[:1]) for rank in locations[:2]), *locations[2:])).cluster
    assert first is not None and first.node_bandwidth == least.node_bandwidth


@pytest.mark.parametrize(
    ("locations", "reason"),
    [
        (gpus([0] * 4, device="NVIDIA H100 PCIe", sms=114), "there is no preset of NVIDIA H100 PCIe"),
        (gpus([0] * 4, sms=16), "has 16 multiprocessors, but the preset has 132"),
        (gpus([0] * 4, LinkClass.PCIE), "GPUs of a node are connected by PCIe, but the preset has NVLink"),
        (gpus([0] * 4, LinkClass.UNKNOWN), "GPUs of a node are connected by unknown"),
        (gpus([0] * 4, device="NVIDIA L20", sms=92), "host bridges that GPUs over PCIe share"),
        (gpus([0] * 4 + [1] * 4, device="NVIDIA GB200", sms=148), "whether NVLink connects the nodes"),
        (gpus([0, 1], nics=()), "a node does not report the rate of its network ports"),
        (gpus([0, 1], nics=(Nic("eth0", None),)), "a node does not report the rate of its network ports"),
        (tuple(replace(rank, machine=None) for rank in gpus([0, 1])), "a rank cannot determine which machine it is on"),
        (
            (*gpus([0] * 4)[:3], replace(gpus([0] * 4)[3], device="NVIDIA A100-SXM4-80GB", sms=108)),
            "rank 3 has NVIDIA A100-SXM4-80GB with 108 multiprocessors, and rank 0 has NVIDIA H100 80GB HBM3 with 132",
        ),
        ((*gpus([0] * 2)[:1], Location("host-0", "boot/0", 1, 0)), "rank 1 has no GPU"),
        (tuple(Location("host", "boot", rank, 0) for rank in range(2)), "the ranks have no GPU"),
    ],
)  # fmt: skip
def test_ranks_that_fit_no_preset_are_not_recognised(locations: tuple[Location, ...], reason: str) -> None:
    recognised = of(locations)
    assert recognised.cluster is None and recognised.why.startswith("not recognised: ") and reason in recognised.why


def test_a_calibration_that_all_ranks_have_is_preferred_to_a_preset() -> None:
    ranks = tuple(replace(rank, calibration=CALIBRATION) for rank in gpus([0] * 3))
    assert of(ranks, "shm") == (OWN, "calibrated: 4 cores (calibrated)")
    for others, transport, why in (
        ((ranks[0], ranks[1], replace(ranks[2], calibration=None)), "shm", "rank 2 has another calibration than rank"),
        (ranks, "gloo", "the calibration is for shm, but messages use gloo"),
        ((*ranks[:2], replace(ranks[2], machine="boot/1")), "shm", "the ring has several"),
        (tuple(replace(rank, calibration='{"unfit": "of another"}') for rank in ranks), "shm", "of another"),
    ):
        on_cpu = tuple(replace(rank, device=None, sms=None) for rank in others)
        assert of(on_cpu, transport).cluster is None and why in of(on_cpu, transport).why, why
        # If the ranks have GPUs, the preset of the GPUs is used instead.
        preset = of(others, transport)
        assert preset.cluster is not None and preset.cluster.recognised and "preset h100" in preset.why


def test_a_calibration_file_applies_only_to_the_same_hardware(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert own_calibration(None) is None
    with pytest.raises(InputError, match=r"RINGATTN_CALIBRATION=there\.json: there is no such file"):
        own_calibration("there.json")
    written = {"constants": asdict(OWN), "hardware": location.hardware(), "transport": "shm"}
    Path("calibrated.json").write_text(json.dumps(written))
    calibration = json.loads(own_calibration(None) or "")
    assert Cluster(**calibration["constants"]) == OWN and calibration["transport"] == "shm"
    Path("calibrated.json").write_text(json.dumps({**written, "hardware": "8 x another GPU"}))
    assert "is for 8 x another GPU, but this is" in json.loads(own_calibration(None) or "")["unfit"]
    Path("calibrated.json").write_text("{")
    with pytest.raises(InputError, match="not JSON"):
        own_calibration(None)


Rings = Callable[..., list[Any]]


@pytest.fixture
def rings(monkeypatch: pytest.MonkeyPatch) -> Rings:
    """Return a function that runs `run_ranks` as if the ranks had given locations."""

    def run(locations: tuple[Location, ...], body: Callable[[Ring], Any], **options: Any) -> list[Any]:
        monkeypatch.setattr(LocalTransport, "locations", locations)
        return run_ranks(len(locations), body, **options)

    return run


def test_a_ring_chooses_for_its_transport_and_its_margin(rings: Rings, monkeypatch: pytest.MonkeyPatch) -> None:
    def machines_and_text(ring: Ring) -> tuple[Cluster, str]:
        seq = ring.sequence(256, layout="contiguous")
        return ring.machines, str(ring.explain(seq, q_heads=2, head_dim=64, dtype="float32"))

    ranks = gpus([0, 0])
    cluster = replace(CLUSTERS["h100"], recognised=True, links=links_of(ranks))
    monkeypatch.setattr(LocalTransport, "stream", "a queue of a device")
    for name, margin, machines, columns in (
        ("nccl", 4, cluster.leaving(4), "nccl, 4 SMs  nccl, 8 SMs  nccl, 0 SMs   peer"),
        ("peer", 0, cluster.by_copy_engines(), "peer  nccl, 8 SMs  nccl, 0 SMs"),
    ):
        monkeypatch.setattr(LocalTransport, "name", name)
        monkeypatch.setattr(LocalTransport, "sm_margin", margin)
        for cluster_used, text in rings(ranks, machines_and_text):
            assert cluster_used == machines
            assert f"  {columns}  staged MiB" in next(line for line in text.splitlines() if "staged MiB" in line)


def test_rings_recognise_the_cluster_if_none_is_named(rings: Rings) -> None:
    def cluster_and_line(ring: Ring) -> tuple[Cluster, str]:
        text = str(ring.explain(ring.sequence(4096), q_heads=8, head_dim=64, causal=True, schedule="ring"))
        return ring.cluster, next(line for line in text.splitlines() if line.startswith("machines "))

    ranks = gpus([0, 0, 1, 1])
    links = links_of(ranks)
    expected = replace(CLUSTERS["h100"], recognised=True, links=links)
    line = "machines recognised: 4 x NVIDIA H100 80GB HBM3 on 2 nodes, NVLink inside; preset h100"
    assert rings(ranks, cluster_and_line) == [(expected, line)] * 4
    named = rings(ranks, cluster_and_line, cluster="b200")
    assert named == [(replace(CLUSTERS["b200"], links=links), f"machines named: {CLUSTERS['b200'].name}")] * 4
    without = (REFERENCE.joined(links), "machines not determined, because cluster=None")
    assert rings(ranks, cluster_and_line, cluster=None) == [without] * 4
    odd = (*ranks[:3], replace(ranks[3], device="NVIDIA H200"))
    (cluster, why), *others = rings(odd, cluster_and_line)
    assert cluster == REFERENCE.joined(links) and why.startswith("machines not recognised: rank 3 has NVIDIA H200")
    assert others == [(cluster, why)] * 3
