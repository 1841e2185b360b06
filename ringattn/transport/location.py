"""Where each rank runs: its machine, GPU, network cards and address, and which known cluster the ranks are on.

Guarantees: a fact that the system does not tell is None or empty, never an error and never guessed. Two ranks with the
same machine id can pass file descriptors over abstract Unix sockets, which a network namespace keeps to itself. Gloo
would take the address that the name of the host resolves to, which on many machines is a loopback address that no other
host can reach; here a rank takes its address on the route to the store's host, which every rank reaches. All ranks
recognise the same cluster, because it follows from the locations that all of them have; a cluster that does not match
in every point is not recognised, and the reason is given.
"""

from __future__ import annotations

import ctypes
import fcntl
import json
import os
import platform
import socket
import struct
import zlib
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from ipaddress import ip_address
from itertools import combinations
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from ringattn.errors import InputError
from ringattn.planner.cluster import CALIBRATED, CLUSTERS, Cluster, LinkClass, Links, cluster_named, numbered, placement
from ringattn.transport.control_store import ControlStore
from ringattn.transport.deadline import Deadline

# --- links between GPUs, from nvml.h (`nvmlGpuP2PCapsIndex_t`, `nvmlGpuP2PStatus_t`) ---------------------------------


LIBRARY = "libnvidia-ml.so.1"
NVLINK = 2
"""`NVML_P2P_CAPS_INDEX_NVLINK`."""
P2P_OK, P2P_UNKNOWN = 0, 6
UUID_BYTES = 96


def gpu_links(uuid: str, library: Any = None) -> list[tuple[str, LinkClass]]:
    """From the GPU with this UUID to each other of the machine, by UUID: NVLink, PCIe, or unknown.

    Empty where there is no driver, or it does not know the GPU (a MIG slice). `library`: None for the driver's own.
    """
    try:
        nvml = library or ctypes.CDLL(LIBRARY)
    except OSError:
        return []
    if nvml.nvmlInit_v2():
        return []
    try:
        gpus = _handles(nvml)
        return [(other, _link(nvml, gpus[uuid], gpus[other])) for other in gpus if other != uuid and uuid in gpus]
    finally:
        nvml.nvmlShutdown()


def _handles(nvml: Any) -> dict[str, ctypes.c_void_p]:
    """The GPUs that the driver shows, by UUID as torch spells it: without "GPU-"."""
    count, found = ctypes.c_uint(), {}
    if nvml.nvmlDeviceGetCount_v2(ctypes.byref(count)):
        return {}
    for index in range(count.value):
        handle, uuid = ctypes.c_void_p(), ctypes.create_string_buffer(UUID_BYTES)
        if nvml.nvmlDeviceGetHandleByIndex_v2(ctypes.c_uint(index), ctypes.byref(handle)):
            continue  # lost, or not for this container
        if not nvml.nvmlDeviceGetUUID(handle, uuid, ctypes.c_uint(UUID_BYTES)):
            found[uuid.value.decode().removeprefix("GPU-")] = handle
    return found


def _link(nvml: Any, one: ctypes.c_void_p, other: ctypes.c_void_p) -> LinkClass:
    status = ctypes.c_int(P2P_UNKNOWN)
    if nvml.nvmlDeviceGetP2PStatus(one, other, ctypes.c_int(NVLINK), ctypes.byref(status)):
        return LinkClass.UNKNOWN
    if status.value == P2P_UNKNOWN:
        return LinkClass.UNKNOWN
    return LinkClass.NVLINK if status.value == P2P_OK else LinkClass.PCIE


# --- addresses -------------------------------------------------------------------------------------------------------


SIOCGIFADDR = 0x8915
ADVICE = "set GLOO_SOCKET_IFNAME on every rank to the network interface through which the others reach it"


class Address(NamedTuple):
    """What a rank says of itself."""

    own: str
    """Its address on the route to the meeting point; empty: left to gloo."""
    meeting: str
    """The address of the meeting point, as this rank reaches it."""
    interface: str
    """The names of network interfaces, where the user gave some."""
    trouble: str = ""
    """Why this rank cannot connect."""

    def text(self) -> bytes:
        """For the store."""
        return json.dumps(self).encode()

    @classmethod
    def parse(cls, text: bytes) -> Address:
        """The inverse of `text`."""
        return cls(*json.loads(text))

    def __str__(self) -> str:
        return self.own or (f"interface {self.interface}" if self.interface else "what its host's name resolves to")


def find_address(store: dist.Store, interface: str) -> Address:
    """This rank's address. Asks the resolver, which may take long."""
    if interface:
        try:
            devices("", interface)
        except RuntimeError:
            return Address("", "", interface, f"GLOO_SOCKET_IFNAME={interface} names no interface with an address")
        return Address("", "", interface)
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    if not isinstance(store, dist.TCPStore):
        return Address("", "", "")
    try:
        found = socket.getaddrinfo(store.host, store.port, type=socket.SOCK_DGRAM)
    except OSError as error:
        return Address("", "", "", f"the store's host {store.host} cannot be resolved: {error}")
    for family, kind, protocol, _, target in found:
        try:
            with socket.socket(family, kind, protocol) as probe:
                probe.connect(target)  # sends nothing, and chooses the route
                return Address(probe.getsockname()[0], str(target[0]), "")
        except OSError:
            continue  # this machine has no route of that family
    return Address("", "", "", f"no route leads to the store's host {store.host}")


def reachable(rank: int, addresses: Sequence[Address]) -> Address:
    """The address of `rank` that the others can reach.

    The name of the meeting point may resolve to a loopback address on its own host. The other hosts know better.
    """
    mine = addresses[rank]
    if mine.own and _is_loopback(mine.own):
        for other in addresses:
            if other.own and not _is_loopback(other.own) and not _is_loopback(other.meeting):
                return mine._replace(own=other.meeting)
    return mine


def devices(own: str, interface: str) -> list[dist.ProcessGroupGloo.Device]:
    """Gloo's devices at an address, at named interfaces, or by gloo's own choice. Raises `RuntimeError`."""
    make = dist.ProcessGroupGloo
    if own:
        return [make.create_device(hostname=own)]
    if interface:
        return [make.create_device(interface=name) for name in interface.split(",")]
    return [make.create_default_device()]


def address_of_interface(name: str) -> str:
    """The IPv4 address of a network interface, or of the first of several with commas between; empty if it has none."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            request = struct.pack("256s", name.partition(",")[0].encode()[:15])
            return socket.inet_ntoa(fcntl.ioctl(probe, SIOCGIFADDR, request)[20:24])
        except OSError:
            return ""


def _is_loopback(address: str) -> bool:
    return ip_address(address.partition("%")[0]).is_loopback


# --- recognition -----------------------------------------------------------------------------------------------------


VARIABLE = "RINGATTN_CALIBRATION"
"""Where else the file of `ringattn calibrate` lies."""

DEVICES = {
    "NVIDIA A100-SXM4-80GB": "a100",
    "NVIDIA H100 80GB HBM3": "h100",
    "NVIDIA H200": "h200",
    "NVIDIA B200": "b200",
    "NVIDIA GB200": "gb200",
    "NVIDIA L20": "l20",
    "NVIDIA GeForce RTX 4090": "rtx4090",
}
"""The preset of a GPU by its name in CUDA, in full: the H100 PCIe, NVL and the H20 are other machines."""
OVER_PCIE = ("l20", "rtx4090")
"""Presets of boxes without NVLink."""
RACKS = ("gb200",)
"""Presets whose NVLink may join nodes."""


class Recognised(NamedTuple):
    """`cluster`: None where these machines are not known. `why`: what was recognised, or why nothing was."""

    cluster: Cluster | None
    why: str


def recognise(locations: Sequence[Location], links: Links | None, transport: str) -> Recognised:
    """The machines of a ring: a calibration that fits goes before a preset. `transport`: the name of the ring's."""
    if links is None:
        return Recognised(None, "not recognised: the transport does not tell where ranks run")
    calibrated = _calibrated(locations, links, transport)
    if calibrated.cluster:
        return calibrated
    preset = _preset(locations, links)
    return preset if preset.cluster else Recognised(None, f"not recognised: {preset.why}; {calibrated.why}")


def _calibrated(locations: Sequence[Location], links: Links, transport: str) -> Recognised:
    first = locations[0].calibration
    for rank, one in enumerate(locations):
        if one.calibration != first:
            return Recognised(None, f"rank {rank} has another calibration than rank 0, or only one of them has any")
    if first is None:
        return Recognised(None, "`ringattn calibrate` has left no constants here")
    found: dict[str, Any] = json.loads(first)
    if "unfit" in found:
        return Recognised(None, found["unfit"])
    if max(links.nodes):
        return Recognised(None, "the calibration is of one machine, and the ring has several")
    if found["transport"] != transport:
        return Recognised(None, f"the calibration is of {found['transport']}, and messages go over {transport}")
    cluster = Cluster(**found["constants"])
    return Recognised(cluster, f"calibrated: {cluster.name}")


def _preset(locations: Sequence[Location], links: Links) -> Recognised:
    device, sms = locations[0].device, locations[0].sms
    for rank, one in enumerate(locations):
        if (one.device, one.sms) != (device, sms):
            return Recognised(None, f"rank {rank} has {_gpu(one)}, and rank 0 has {_gpu(locations[0])}")
    if device is None:
        return Recognised(None, "the ranks have no GPU")
    if (name := DEVICES.get(device)) is None:
        return Recognised(None, f"there is no preset of {device}")
    preset, nodes, inside = CLUSTERS[name], 1 + max(links.nodes), links.classes_inside()
    obstacle = None
    if sms != preset.sms:  # a slice of it, or a variant
        obstacle = f"this {device} has {sms} multiprocessors, and the preset has {preset.sms}"
    elif name in OVER_PCIE:
        obstacle = "the host bridges that GPUs over PCIe share are not in the preset"
    elif inside - {LinkClass.NVLINK}:
        found = ", ".join(sorted(kind.value for kind in inside))
        obstacle = f"GPUs of a node are joined by: {found}; the preset has NVLink"
    elif nodes > 1 and name in RACKS:
        obstacle = "whether NVLink joins the nodes is not found out"
    elif nodes > 1 and links.outside is not LinkClass.NETWORK:
        obstacle = "a rank cannot tell which machine it is on"
    rate = _network_bytes_s(locations, links) if nodes > 1 and not obstacle else None
    if nodes > 1 and rate is None:
        obstacle = obstacle or "a node does not tell the rate of its network ports"
    if obstacle:
        return Recognised(None, f"{device}: {obstacle} (cluster={name!r} names it all the same)")
    told = f"recognised: {len(locations)} x {device} on {nodes} node{'s' * (nodes > 1)}"
    told += f"{', NVLink inside' if inside else ''}; preset {name}"
    if rate is not None and preset.node_bandwidth is not None and rate < preset.node_bandwidth:
        preset = replace(preset, node_bandwidth=rate)
        told += f", but {rate / 1e9:.3g} GB/s a rank between nodes by the rates of their ports"
    return Recognised(replace(preset, recognised=True), told)


def _gpu(one: Location) -> str:
    return "no GPU" if one.device is None else f"{one.device} of {one.sms} multiprocessors"


def _network_bytes_s(locations: Sequence[Location], links: Links) -> float | None:
    """Line rate of a rank's share of its node's ports, on the node that has least; None where a port does not tell."""
    ranks, least = Counter(links.nodes), float("inf")
    for node, one in zip(links.nodes, locations, strict=True):
        rates = [nic.gbps for nic in one.nics]
        if not rates or None in rates:
            return None
        least = min(least, sum(rate or 0.0 for rate in rates) * 1e9 / 8 / ranks[node])
    return least


def own_calibration(named: str | None) -> str | None:
    """What `ringattn calibrate` has left here, for the other ranks to compare: JSON with `constants` and `transport`.

    Or with `unfit`, why these are of no use on this machine; None where there is no file. `named`: the file that
    `RINGATTN_CALIBRATION` names. Raises `InputError` where that is missing, and for a file that cannot be read.
    """
    path = Path(named or CALIBRATED)
    if not path.is_file():
        if named:
            raise InputError(f"{VARIABLE}={path}: there is no such file; `ringattn calibrate out={path}` writes one")
        return None
    constants = asdict(cluster_named(str(path)))
    described = json.loads(path.read_text(encoding="utf-8"))
    if described.get("hardware") != hardware():
        return json.dumps({"unfit": f"{path} is of {described.get('hardware')}, and this is {hardware()}"})
    return json.dumps({"constants": constants, "transport": described.get("transport")}, sort_keys=True)


def hardware() -> str:
    """The class of this machine, without its name."""
    if torch.cuda.is_available():
        return f"{torch.cuda.device_count()} x {torch.cuda.get_device_name()}"
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:  # not Linux: the architecture must do
        lines = []
    family = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")
    return f"{len(os.sched_getaffinity(0))} cores, {family or platform.machine()}"


# --- locations -------------------------------------------------------------------------------------------------------


class Nic(NamedTuple):
    """A network port that is up. `gbps`: its rate, None where the driver does not say."""

    name: str
    gbps: float | None


class Gpu(NamedTuple):
    """The GPU of a rank: `uuid` and `name` as torch spells them, `bus` as /sys does, None where it is not known.

    `sms`: its multiprocessors.
    """

    uuid: str
    bus: str | None
    name: str | None = None
    sms: int | None = None


@dataclass(frozen=True)
class Location:
    """Where a rank runs.

    `machine`: boot id and network namespace, None where /proc does not tell. `gpu`, `bus`: None on the CPU. `nics`:
    RDMA ports where there are any, else network interfaces. `links`: from this GPU to the others of the machine, by
    UUID; empty where the driver does not tell. `device`, `sms`: the name of the GPU and its multiprocessors.
    `calibration`: what `ringattn calibrate` has left here, as `recognition.own_calibration` has it; None:
    nothing, or nobody asked.
    """

    host: str
    machine: str | None
    pid: int
    uid: int
    gpu: str | None = None
    bus: str | None = None
    nics: tuple[Nic, ...] = ()
    links: tuple[tuple[str, LinkClass], ...] = ()
    device: str | None = None
    sms: int | None = None
    calibration: str | None = None

    def same_machine(self, other: Location) -> bool:
        """Whether both are known to be on one machine, where they can share memory."""
        return self.machine is not None and self.machine == other.machine

    def text(self) -> str:
        """For the store."""
        facts = asdict(self)
        facts["links"] = [(uuid, kind.name) for uuid, kind in self.links]
        return json.dumps({key: value for key, value in facts.items() if value}, separators=(",", ":"))

    @classmethod
    def parse(cls, text: str | bytes) -> Location:
        """The inverse of `text`."""
        facts = {"machine": None, "uid": 0, "pid": 0, **json.loads(text)}
        facts["nics"] = tuple(Nic(*each) for each in facts.get("nics", ()))
        facts["links"] = tuple((uuid, LinkClass[kind]) for uuid, kind in facts.get("links", ()))
        return cls(**facts)


def my_location(
    gpu: int | None = None,
    *,
    root: Path = Path("/"),
    gpu_of: Callable[[int], Gpu] | None = None,
    links: Callable[[str], Sequence[tuple[str, LinkClass]]] = gpu_links,
) -> Location:
    """This process's location. `gpu`: the index of its CUDA device, None on the CPU.

    `root` holds `proc` and `sys`; `gpu_of` gives the GPU of an index, torch's where it is None; `links` the links of
    a GPU to the machine's others.
    """
    mine = None if gpu is None else (gpu_of or torch_gpu)(gpu)
    return Location(
        socket.gethostname(),
        machine_id(root),
        os.getpid(),
        os.getuid(),
        mine and mine.uuid,
        mine and mine.bus,
        nics(root),
        tuple(links(mine.uuid)) if mine else (),
        mine and mine.name,
        mine and mine.sms,
    )


def torch_gpu(index: int) -> Gpu:
    """A CUDA device as torch knows it."""
    found: Any = torch.cuda.get_device_properties(index)
    uuid = str(found.uuid).removeprefix("GPU-")  # as `nvml` has it
    try:
        bus = f"{found.pci_domain_id:04x}:{found.pci_bus_id:02x}:{found.pci_device_id:02x}.0"
    except AttributeError:  # older torch does not tell
        bus = None
    return Gpu(uuid, bus, found.name, found.multi_processor_count)


def machine_id(root: Path = Path("/")) -> str | None:
    """The kernel's boot and the network namespace: containers with a network of their own are machines of their own."""
    try:
        boot = (root / "proc/sys/kernel/random/boot_id").read_text().strip()
        network = os.readlink(root / "proc/self/ns/net")
    except OSError:
        return None
    return f"{boot}/{network.removeprefix('net:[').removesuffix(']')}"


def nics(root: Path = Path("/")) -> tuple[Nic, ...]:
    """RDMA ports that are active, or without any the network interfaces that are up; loopback is none."""
    ports = sorted((root / "sys/class/infiniband").glob("*/ports/*"))
    active = [port for port in ports if read(port / "state").endswith("ACTIVE")]
    if active:
        return tuple(Nic(f"{port.parts[-3]}:{port.name}", _number(read(port / "rate"))) for port in active)
    found = []
    for interface in sorted((root / "sys/class/net").glob("*")):
        # "unknown" is what drivers without a carrier say while they work.
        if interface.name != "lo" and read(interface / "operstate") in ("up", "unknown"):
            speed = _number(read(interface / "speed"))  # Mb/s, -1 where there is none
            found.append(Nic(interface.name, speed / 1000 if speed and speed > 0 else None))
    return tuple(found)


def read(file: Path) -> str:
    """A file of /sys or /proc, empty where it is not there or does not answer."""
    try:
        return file.read_text().strip()
    except (OSError, UnicodeDecodeError):
        return ""


def _number(text: str) -> float | None:
    """The number that a text like "400 Gb/sec (4X NDR)" begins with."""
    try:
        return float(text.split()[0])
    except (IndexError, ValueError):
        return None


def gather_locations(control: ControlStore, mine: Location, deadline: Deadline) -> tuple[Location, ...]:
    """Every rank's location, by rank; a ring's first meeting.

    Raises `DeadlineError` that names the ranks which are missing, and `PeerLostError` with the cause of a rank that
    failed.
    """
    gathered = control.combine("opening", mine.text().encode(), _packed, deadline)
    return tuple(map(Location.parse, zlib.decompress(gathered).splitlines()))


def _packed(texts: list[bytes]) -> bytes:
    """All ranks' texts in the entry that every rank reads; ranks of a node say much alike."""
    return zlib.compress(b"\n".join(texts), 1)


def one_machine(locations: Sequence[Location]) -> bool:
    """Whether all ranks are known to be on one machine."""
    return bool(locations) and all(locations[0].same_machine(other) for other in locations)


def node_of(rank: int, locations: Sequence[Location]) -> tuple[int, ...]:
    """The ranks that are on one machine with `rank`, and `rank` itself."""
    mine = locations[rank]
    return tuple(at for at, one in enumerate(locations) if at == rank or one.same_machine(mine))


def sharing_obstacle(locations: Sequence[Location]) -> str | None:
    """Why ranks cannot share memory node by node, the same on every rank; None where those of each node can."""
    for rank, one in enumerate(locations):
        if one.machine is None:
            return f"rank {rank} cannot tell which machine it is on ({one.host})"
        first = node_of(rank, locations)[0]
        if one.uid != locations[first].uid:
            return f"ranks {first} and {rank} belong to different users, {locations[first].uid} and {one.uid}"
    if len({one.machine for one in locations}) == len(locations) > 1:
        return "no two ranks share a machine and its network namespace, and memory is shared there only"
    return None


def links_of(locations: Sequence[Location]) -> Links:
    """The links between ranks; the same on every rank, for all have the same locations."""
    nodes = numbered(one.machine or f"host {one.host}" for one in locations)
    known = all(one.machine is not None for one in locations)
    outside = LinkClass.NETWORK if known else LinkClass.UNKNOWN
    if not any(one.gpu for one in locations):  # many on a machine, and all alike
        return Links(nodes, LinkClass.MEMORY if known else LinkClass.UNKNOWN, (), outside)
    members: dict[int, list[int]] = {}
    for rank, node in enumerate(nodes):
        members.setdefault(node, []).append(rank)
    found = [
        (first, second, _between(locations[first], locations[second]))
        for ranks in members.values()
        for first, second in combinations(ranks, 2)
    ]
    counts = Counter(kind for *_, kind in found)
    inside = counts.most_common(1)[0][0] if counts else LinkClass.UNKNOWN
    return Links(nodes, inside, tuple(pair for pair in found if pair[2] is not inside), outside)


def _between(one: Location, other: Location) -> LinkClass:
    """The class of two ranks of a node where some have GPUs."""
    if one.gpu is None or other.gpu is None:
        return LinkClass.UNKNOWN
    if one.gpu == other.gpu:
        return LinkClass.SAME_GPU
    return dict(one.links).get(other.gpu) or dict(other.links).get(one.gpu) or LinkClass.UNKNOWN


def order_advice(locations: Sequence[Location]) -> str | None:
    """What to do about ranks in an order whose ring crosses between nodes more often than it must; None: it does not.

    A ring goes from rank to rank, and each of its steps waits for the slowest pair.
    """
    links = links_of(locations)
    if links.crossings == links.least_crossings:
        return None
    hosts = dict(zip(links.nodes, (one.host for one in locations), strict=True))
    named = ", ".join(f"node {node} is {host}" for node, host in sorted(hosts.items()))
    return (
        f"{placement(links)} ({named}). Number the ranks of a node one after another: torchrun does, and so does Slurm "
        "with --distribution=block; give a ProcessGroup or a DeviceMesh whose ranks are listed node by node"
    )
