"""What `ringattn doctor` says of networks: planted /sys and /proc trees, ranks of several nodes, two hosts."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ringattn.launch.doctor import doctor
from ringattn.launch.doctor import ranks as doctor_ranks
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
    ports,
    rails,
)
from ringattn.launch.doctor.network_facts import network_facts
from ringattn.launch.doctor.probes import ERROR, LEVELS, NOTE, OK, WARNING, Finding
from ringattn.launch.doctor.ranks import examine, rounds
from ringattn.planner.links import LinkClass, Links
from ringattn.ring import Ring
from ringattn.testing import run_ranks
from ringattn.transport.location import Location

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


# --- ranks of several nodes ------------------------------------------------------------------------------------------


def test_pairs_that_are_measured_are_apart() -> None:
    pcie = LinkClass.PCIE
    links = Links((0, 0, 0, 1, 2, 2), LinkClass.NVLINK, ((0, 2, pcie), (1, 2, pcie)))
    assert rounds(links) == [[(0, 1), (4, 5)], [(0, 2)], [(0, 3)], [(3, 4)]]
    assert rounds(Links((0, 0))) == [[(0, 1)]]
    assert rounds(Links((0, 1, 0))) == [[(0, 2)], [(0, 1)]]
    for one in rounds(Links((0, 0, 1, 1, 2, 2, 3, 3))):
        ranks = [rank for pair in one for rank in pair]
        assert len(set(ranks)) == len(ranks)


def test_ranks_of_two_nodes_measure_inside_and_between(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("REPEATS", "PAIR_REPEATS"):
        monkeypatch.setattr(doctor_ranks, name, dict.fromkeys(getattr(doctor_ranks, name), 1))
    locations = tuple(Location(f"host-{name}", name, rank, 0) for rank, name in enumerate("aba"))

    def body(ring: Ring) -> dict[str, Any]:
        ring.transport.locations = locations
        ring.links = Links((0, 1, 0), LinkClass.MEMORY)
        return examine(ring)

    answers = run_ranks(3, body)
    assert [[(pair["peer"], pair["link"], pair["across"]) for pair in one["pairs"]] for one in answers] == [
        [(2, "host memory", False), (1, "network", True)], [], [],
    ]  # fmt: skip
    found = {one.topic: one for one in doctor.judged(answers)}
    assert (
        found["links"].text.startswith("inside a node ") and "over host memory (ranks 0 and 2)" in found["links"].text
    )
    assert "between nodes" in found["links"].text and "a factor of " in found["links"].text
    # Three ranks of two nodes cross twice in whatever order.
    assert "rank order" not in found and answers[1]["network"] and not answers[0]["network"] + answers[2]["network"]


def answer(rank: int, **more: Any) -> dict[str, Any]:
    """What a rank of its own node answers."""
    return {"rank": rank, "host": f"h{rank}", "device": f"cuda:{rank}", "transport": "nccl", "torch": "2",
            "python": "3", "ringattn": "0", "message_bytes": 2**24, "bandwidth": 1e9,
            "latency_us": 1.0, "error": 0.0, "nics": [], **more}  # fmt: skip


def test_speed_beside_what_the_port_says() -> None:
    inside = {"peer": 1, "link": "NVLink", "bandwidth": 300e9, "latency_us": 10.0, "across": False}
    between = {"peer": 2, "link": "network", "bandwidth": 20e9, "latency_us": 30.0, "across": True}
    slow = {**between, "bandwidth": 10e9}
    nics = [["mlx5_0:1", 400.0]]

    def told(*pairs: dict[str, Any]) -> Finding:
        found = doctor.judged([answer(0, pairs=pairs, nics=nics), answer(1), answer(2)])
        return next(one for one in found if one.topic == "links")

    assert told(inside, between).text == (
        "inside a node 300.00 GB/s and 10 µs over NVLink (ranks 0 and 1); "
        "between nodes 20.00 GB/s and 30 µs over network (ranks 0 and 2); a factor of 15"
    )
    assert told(inside, between).level == NOTE and "a port of rank 0 says 50 GB/s" in told(inside, between).advice
    assert told(inside, {**between, "bandwidth": 30e9}).level == OK
    assert "10.00 GB/s" in told(between, slow).text  # the slowest of a class counts
    assert doctor.judged([answer(0), answer(1)])[-1].topic == "exchange"


def test_order_and_other_nodes_are_told() -> None:
    trouble = Finding("memlock", ERROR, "a process may lock 64 KiB", "ulimit -l unlimited", "why")._asdict()
    fine = Finding("ACS", OK, "no bridge")._asdict()
    order = "ranks 0, 2 on node 0; 1, 3 on node 1: too often (node 0 is h0). Number the ranks of a node"
    found = doctor.judged([answer(0, order=order), answer(1, network=[trouble, fine])])
    told = {one.topic: one for one in found}
    assert told["memlock, h1"].level == ERROR and "ACS, h1" not in told
    assert told["rank order"].level == WARNING and told["rank order"].advice == "Number the ranks of a node"


# --- two hosts -------------------------------------------------------------------------------------------------------

MBIT = 200


class Hosts:
    """Two network namespaces, joined by a pair of interfaces that pass so many Mbit/s each way."""

    def __init__(self) -> None:
        self.names = [f"doctor-{os.getpid()}-{side}" for side in "ab"]

    def command(self, *words: str) -> None:
        subprocess.run(words, check=True, capture_output=True, timeout=20)

    def open(self) -> None:
        for name in self.names:
            self.command("ip", "netns", "add", name)
        ends = [f"rd{os.getpid() % 100000}{side}" for side in "ab"]
        self.command("ip", "link", "add", ends[0], "type", "veth", "peer", "name", ends[1])
        for number, (name, end) in enumerate(zip(self.names, ends, strict=True), 1):
            self.command("ip", "link", "set", end, "netns", name)
            inside = "ip", "-n", name
            self.command(*inside, "addr", "add", f"10.77.0.{number}/24", "dev", end)
            self.command(*inside, "link", "set", end, "up")
            self.command(*inside, "link", "set", "lo", "up")
            self.command("tc", "-n", name, "qdisc", "add", "dev", end, "root", "tbf", "rate", f"{MBIT}mbit",
                         "burst", "256kb", "latency", "200ms")  # fmt: skip

    def close(self) -> None:
        for name in self.names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True, timeout=20)


@pytest.fixture
def hosts() -> Iterator[list[str]]:
    """The names of two hosts."""
    if shutil.which("ip") is None or shutil.which("tc") is None:
        pytest.skip("needs ip and tc of iproute2 for network namespaces")
    made = Hosts()
    try:
        made.open()
    except subprocess.CalledProcessError as error:
        made.close()
        pytest.skip(f"network namespaces are not permitted here: {error.stderr.decode().strip()}")
    yield made.names
    made.close()


@pytest.mark.slow
def test_two_hosts_with_a_slow_link_between(hosts: list[str], tmp_path: Path) -> None:
    placed = [hosts[0], hosts[1], hosts[0]]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "WORLD_SIZE": "3", "MASTER_ADDR": "10.77.0.1",
                   "MASTER_PORT": "29511", "OMP_NUM_THREADS": "1"}  # fmt: skip
    started = []
    for rank, host in enumerate(placed):
        command = ["ip", "netns", "exec", host, sys.executable, "-m", "ringattn", "doctor", "--json"]
        out = (tmp_path / f"{rank}.out").open("w")
        started.append(subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT if rank else None, cwd=tmp_path,
                                        env={**environment, "RANK": str(rank), "LOCAL_RANK": "0"},
                                        start_new_session=True))  # fmt: skip
    try:
        codes = [one.wait(150) for one in started]
    finally:
        for one in started:
            if one.poll() is None:
                os.killpg(one.pid, signal.SIGKILL)
    assert codes == [0, 0, 0], [(tmp_path / f"{rank}.out").read_text()[-2000:] for rank in range(3)]
    document = json.loads((tmp_path / "0.out").read_text())
    pairs = {(one["rank"], pair["peer"]): pair for one in document["ranks"] for pair in one["pairs"]}
    inside, between = pairs[0, 2], pairs[0, 1]
    assert (inside["link"], inside["across"]) == ("host memory", False)
    assert (between["link"], between["across"]) == ("network", True)
    line = MBIT * 1e6 / 8
    assert line / 10 < between["bandwidth"] < 1.5 * line  # the burst passes at once
    assert inside["bandwidth"] > 4 * between["bandwidth"]
    told = {one["topic"]: one for one in document["findings"]}
    assert "between nodes 0.0" in told["links"]["text"] and "a factor of" in told["links"]["text"]
