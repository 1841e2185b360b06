"""What `ringattn doctor` says of networks: planted /sys and /proc trees."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest

from ringattn.launch.doctor.network import (
    BRIDGE,
    NUMA,
    SWITCH,
    SYSTEM,
    UNKNOWN,
    Interface,
    Near,
    Network,
    Port,
    acs,
    distances,
    gpudirect,
    launches,
    memlock,
    mtu,
    named,
    network,
    network_facts,
    ports,
    rails,
)
from ringattn.launch.doctor.probes import ERROR, LEVELS, NOTE, OK, WARNING, Finding

ROOT = Path(__file__).resolve().parents[2]


def worst(findings: list[Finding]) -> Finding:
    """The finding of the highest level."""
    return max(findings, key=lambda finding: LEVELS.index(finding.level))


# --- facts -----------------------------------------------------------------------------------------------------------

BRIDGE_CLASS, GPU_CLASS, NIC_CLASS = "0x060400", "0x030200", "0x020700"


def registers(control: int | None) -> bytes:
    """The configuration space of a bridge: another extended capability, then ACS with this control register."""
    made = bytearray(4096)
    made[0x100:0x104] = (0x0001 | 1 << 16 | 0x148 << 20).to_bytes(4, "little")
    if control is not None:
        made[0x148:0x14C] = (0x000D | 1 << 16).to_bytes(4, "little")
        made[0x14E:0x150] = control.to_bytes(2, "little")
    return bytes(made)


def device(root: Path, way: str, kind: str, numa: int = 0, config: bytes | None = None, **files: str) -> Path:
    """A PCI device below its bridges, with its link among all devices."""
    folder = root / "sys/devices" / way
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in {"class": kind, "numa_node": str(numa), **files}.items():
        (folder / name).write_text(text + "\n")
    if config is not None:
        (folder / "config").write_bytes(config)
    links = root / "sys/bus/pci/devices"
    links.mkdir(parents=True, exist_ok=True)
    (links / folder.name).symlink_to(Path(os.path.relpath(folder, links)))
    return folder


def port(root: Path, name: str, at: Path, state: str = "4: ACTIVE", layer: str = "InfiniBand", **files: str) -> None:
    """An RDMA device with one port, whose PCI function is `at`."""
    folder = root / "sys/class/infiniband" / name
    (folder / "ports/1").mkdir(parents=True)
    (folder / "device").symlink_to(Path(os.path.relpath(at, folder)))
    for file, text in {"state": state, "link_layer": layer, "rate": "400 Gb/sec (4X NDR)", **files}.items():
        (folder / "ports/1" / file).write_text(text + "\n")


def plant(root: Path, acs: int | None = 0, readable: bool = True) -> Path:
    """Two GPUs, of which one shares a switch with a port, and one is on the other processor, beside a RoCE port."""
    config = registers(acs) if readable else registers(acs)[:64]
    left, right = "pci0000:00/0000:00:01.0", "pci0000:80/0000:80:01.0"
    for bridge in (left, f"{left}/0000:01:00.0", right):
        device(root, bridge, BRIDGE_CLASS, config=config)
    device(root, f"{left}/0000:01:00.0/0000:02:00.0", GPU_CLASS, vendor="0x10de")
    device(root, f"{right}/0000:81:00.0", GPU_CLASS, 1, vendor="0x10de")
    device(root, f"{right}/0000:83:00.0", "0x010802", 1, vendor="0x144d")  # neither a GPU nor NVIDIA's
    near = device(root, f"{left}/0000:01:00.0/0000:03:00.0", NIC_CLASS, vendor="0x15b3")
    far = device(root, "pci0000:80/0000:80:02.0", NIC_CLASS, 1, vendor="0x15b3")
    (far / "net/eth1").mkdir(parents=True)
    (far / "net/eth1/mtu").write_text("1500\n")
    port(root, "mlx5_0", near)
    port(root, "mlx5_1", far, layer="Ethernet", rate="100 Gb/sec (4X EDR)")
    port(root, "mlx5_2", far, state="1: DOWN")
    for name, state in (("lo", "unknown"), ("eth0", "up"), ("eth1", "down"), ("docker0", "up")):
        (root / "sys/class/net" / name).mkdir(parents=True)
        (root / "sys/class/net" / name / "operstate").write_text(state + "\n")
        (root / "sys/class/net" / name / "mtu").write_text("1500\n")
    (root / "proc/driver/nvidia").mkdir(parents=True)
    (root / "proc/sys/kernel").mkdir(parents=True)
    (root / "proc/self").mkdir()
    (root / "proc/modules").write_text("nvidia_peermem 16384 0 - Live 0x0\nib_core 1 2 - Live 0x0\n")
    (root / "proc/driver/nvidia/version").write_text("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.1\n")
    (root / "proc/sys/kernel/osrelease").write_text("5.15.0-91-generic\n")
    (root / "proc/self/limits").write_text(
        "Limit                     Soft Limit           Hard Limit           Units     \n"
        "Max locked memory         65536                unlimited            bytes     \n"
    )
    return root


def test_facts_of_a_planted_machine(tmp_path: Path) -> None:
    found = network_facts(plant(tmp_path))
    assert found.ports == (
        Port("mlx5_0", "1", "ACTIVE", "InfiniBand", 400.0),
        Port("mlx5_1", "1", "ACTIVE", "Ethernet", 100.0, 1500),
        Port("mlx5_2", "1", "DOWN", "InfiniBand", 400.0),
    )
    assert found.interfaces == (
        Interface("docker0", True, 1500), Interface("eth0", True, 1500), Interface("eth1", False, 1500)
    )  # fmt: skip
    assert found.gpus == ("0000:02:00.0", "0000:81:00.0")
    assert found.nearest == (
        Near("0000:02:00.0", "mlx5_0", SWITCH),
        Near("0000:81:00.0", "mlx5_1", BRIDGE),
    )
    assert (found.peermem, found.dmabuf, found.redirecting, found.memlock) == (True, True, (), 65536)


@pytest.mark.parametrize(
    ("control", "redirects"), [(None, False), (0, False), (0x11, False), (0x04, True), (0x08, True)]
)
def test_acs_is_read_from_the_bridges(control: int | None, redirects: bool, tmp_path: Path) -> None:
    found = network_facts(plant(tmp_path, acs=control)).redirecting
    assert found == (("0000:00:01.0", "0000:01:00.0", "0000:80:01.0") if redirects else ())


def test_what_cannot_be_read_is_not_known(tmp_path: Path) -> None:
    assert network_facts(plant(tmp_path / "a", readable=False)).redirecting is None
    assert network_facts(tmp_path / "nothing") == Network()
    root = plant(tmp_path / "b")
    (root / "proc/driver/nvidia/version").write_text("NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.1\n")
    (root / "proc/modules").write_text("nvidia 1 0 - Live 0x0\n")
    (root / "proc/self/limits").write_text(
        "Max locked memory         unlimited            unlimited            bytes\n"
    )
    found = network_facts(root)
    assert (found.dmabuf, found.peermem, found.memlock) == (False, False, None)
    (root / "proc/driver/nvidia/version").write_text("NVIDIA UNIX Open Kernel Module\n")
    (root / "proc/sys/kernel/osrelease").write_text("5.4.0\n")
    assert network_facts(root).dmabuf is False
    (root / "proc/driver/nvidia/version").unlink()
    assert network_facts(root).dmabuf is None


def test_distances_by_numa_node(tmp_path: Path) -> None:
    gpu = device(tmp_path, "pci0000:00/0000:00:01.0/0000:01:00.0", GPU_CLASS, 0, vendor="0x10de")
    nic = device(tmp_path, "pci0000:40/0000:40:01.0/0000:41:00.0", NIC_CLASS, 0)
    port(tmp_path, "mlx5_0", nic)
    assert network_facts(tmp_path).nearest == (Near("0000:01:00.0", "mlx5_0", NUMA),)
    (nic / "numa_node").write_text("1\n")
    assert network_facts(tmp_path).nearest[0].distance == SYSTEM
    (gpu / "numa_node").unlink()
    assert network_facts(tmp_path).nearest[0].distance == UNKNOWN


# --- findings --------------------------------------------------------------------------------------------------------

FAST, SLOW = Port("mlx5_0", "1", "ACTIVE", "InfiniBand", 400.0), Port("mlx5_9", "1", "ACTIVE", "Ethernet", 25.0, 9000)
DOWN = Port("mlx5_1", "1", "DOWN", "InfiniBand", 400.0)


def test_findings_of_a_planted_machine(tmp_path: Path) -> None:
    environment = {"NCCL_CGA_CLUSTER_SIZE": "4", "CUDA_DEVICE_MAX_CONNECTIONS": "1"}
    found = network(network_facts(plant(tmp_path, acs=0x0C)), environment, 22809)
    told = {(one.topic, one.level) for one in found}
    assert told == {
        ("RDMA ports", WARNING), ("MTU", WARNING), ("NCCL_SOCKET_IFNAME", NOTE), ("memlock", ERROR),
        ("NIC to GPU", NOTE), ("GPUDirect", OK), ("ACS", WARNING), ("CTAs and CGA", WARNING), ("launch order", NOTE),
    }  # fmt: skip
    assert all(one.why for one in found if one.level in (WARNING, ERROR))


@pytest.mark.parametrize(
    ("finding", "level", "words"),
    [
        (ports(Network()), NOTE, "bytes go over TCP"),
        (ports(Network((FAST,))), OK, "active: mlx5_0:1 400 Gb/s InfiniBand"),
        (ports(Network((FAST, DOWN))), WARNING, "mlx5_1:1 is DOWN"),
        (ports(Network((FAST, SLOW))), WARNING, "of different rates: mlx5_0:1 400 Gb/s"),
        (mtu(Network((SLOW,))), OK, "mlx5_9:1 9000"),
        (mtu(Network((replace(SLOW, mtu=1500),))), WARNING, "mlx5_9:1 1500"),
        ([memlock(Network())], OK, "no limit"),
        ([memlock(Network(memlock=2**26))], OK, "64 MiB"),
        ([memlock(Network(memlock=65536))], ERROR, "may lock 64 KiB"),
        (distances(Network(nearest=(Near("g", "mlx5_0", SWITCH),))), OK, "GPU g to mlx5_0 over one PCIe switch"),
        (distances(Network(nearest=(Near("g", "mlx5_0", BRIDGE),))), NOTE, "one host bridge"),
        (distances(Network(nearest=(Near("g", "mlx5_0", SYSTEM),))), WARNING, "another NUMA node"),
        ([gpudirect(Network(peermem=True), {})], OK, "by nvidia-peermem"),
        ([gpudirect(Network(dmabuf=True), {})], OK, "by DMABUF"),
        ([gpudirect(Network(dmabuf=True), {"NCCL_DMABUF_ENABLE": "0"})], WARNING, "no DMABUF"),
        ([gpudirect(Network(), {})], WARNING, "whether DMABUF works is not known"),
        ([gpudirect(Network(peermem=True), {"NCCL_NET_GDR_LEVEL": "LOC"})], WARNING, "turned off"),
        ([acs(Network())], OK, "no bridge"),
        ([acs(Network(redirecting=None))], NOTE, "only root reads"),
        ([acs(Network(redirecting=("0000:00:01.0",)))], WARNING, "redirects at 0000:00:01.0"),
        (rails(Network((FAST, SLOW), gpus=("a", "b")), {"NCCL_PXN_DISABLE": "1"}), WARNING, "NCCL_PXN_DISABLE=1"),
        (rails(Network((FAST,), gpus=("a",)), {"NCCL_PXN_DISABLE": "1"}), NOTE, "NCCL_PXN_DISABLE=1"),
        (launches({}, 22809), NOTE, "NCCL_LAUNCH_ORDER_IMPLICIT=1"),
        (launches({"NCCL_LAUNCH_ORDER_IMPLICIT": "1", "NCCL_COMM_ID": "a:1"}, 22809), OK, "one order"),
        (launches({"NCCL_LAUNCH_ORDER_IMPLICIT": "1", "CUDA_DEVICE_MAX_CONNECTIONS": "1"}, 22809), NOTE, "to 8"),
    ],
)  # fmt: skip
def test_findings(finding: list[Finding], level: str, words: str) -> None:
    found = worst(finding)
    assert found.level == level and words in found.text
    if level in (WARNING, ERROR):
        assert found.advice and found.why


@pytest.mark.parametrize(
    ("variable", "value", "level", "words"),
    [
        ("NCCL_IB_HCA", "mlx5", OK, "leaves mlx5_0:1, mlx5_9:1"),
        ("NCCL_IB_HCA", "mlx5_0", OK, "leaves mlx5_0:1"),
        ("NCCL_IB_HCA", "=mlx5_0:1,mlx5_7", WARNING, "there is no RDMA port mlx5_7"),
        ("NCCL_IB_HCA", "=mlx5", ERROR, "leaves no RDMA port that works"),
        ("NCCL_IB_HCA", "mlx5_1", ERROR, "there are: mlx5_0:1, mlx5_9:1"),  # it is down
        ("NCCL_IB_HCA", "^mlx5_0", OK, "leaves mlx5_9:1"),
        ("NCCL_IB_HCA", "^mlx5", ERROR, "leaves no RDMA port"),
        ("NCCL_SOCKET_IFNAME", "eth", OK, "leaves eth0"),
        ("NCCL_SOCKET_IFNAME", "ib0", ERROR, "leaves no interface that works; there are: eth0, docker0"),
        ("NCCL_SOCKET_IFNAME", "lo", NOTE, "only ranks of this machine"),
        ("GLOO_SOCKET_IFNAME", "eth0", OK, "leaves eth0"),
        ("GLOO_SOCKET_IFNAME", "eth", ERROR, "leaves no interface"),  # whole names only
        ("NCCL_IB_DISABLE", "1", WARNING, "there are active RDMA ports"),
    ],
)  # fmt: skip
def test_variables_that_choose(variable: str, value: str, level: str, words: str) -> None:
    interfaces = Interface("eth0", True), Interface("eth1", False), Interface("docker0", True)
    found = [one for one in named(Network((FAST, DOWN, SLOW), interfaces), {variable: value}) if one.topic == variable]
    assert [one.level for one in found] == [level] and words in found[0].text


def test_virtual_interfaces_are_told_where_none_is_chosen() -> None:
    facts = Network(interfaces=(Interface("docker0", True), Interface("ens3", True)), gpus=("g",))
    (found,) = named(facts, {})
    assert found.level == NOTE and found.advice.endswith("NCCL_SOCKET_IFNAME=ens3") and "docker0" in found.text
    assert named(replace(facts, gpus=()), {}) == []
