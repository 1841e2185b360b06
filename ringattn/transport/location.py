"""Locations of ranks: machine, GPU, network cards and address, and recognition of the cluster they are on.

Guarantees: a fact that the system does not report is None or empty, never an error and never guessed. Two ranks with
the same machine id can pass file descriptors over abstract Unix sockets, which are private to a network namespace. By
default, gloo uses the address that the host's name resolves to. On many machines that is a loopback address, which no
other host can reach, so a rank uses its address on the route to the store's host, which every rank can reach. All ranks
recognise the same cluster, because recognition depends only on the locations, which all ranks have. A cluster that does
not match a preset in every respect is not recognised, and the reason is given.
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
    """Return the links from the GPU `uuid` to each other GPU of the machine, by UUID: NVLink, PCIe, or unknown.

    The list is empty if there is no driver, or if the driver does not list the GPU (a MIG slice). `library`: the NVML
    library; None: load the driver's.
    """
    try:
        nvml = library or ctypes.CDLL(LIBRARY)
    except OSError:
        return []
    if nvml.nvmlInit_v2():
        return []
    try:
        gpus = _handles(nvml)
        return [(peer, _link(nvml, gpus[uuid], gpus[peer])) for peer in gpus if peer != uuid and uuid in gpus]
    finally:
        nvml.nvmlShutdown()


def _handles(nvml: Any) -> dict[str, ctypes.c_void_p]:
    """Return the GPUs that the driver lists, by UUID without "GPU-", as torch writes it."""
    count, handles = ctypes.c_uint(), {}
    if nvml.nvmlDeviceGetCount_v2(ctypes.byref(count)):
        return {}
    for index in range(count.value):
        handle, uuid = ctypes.c_void_p(), ctypes.create_string_buffer(UUID_BYTES)
        if nvml.nvmlDeviceGetHandleByIndex_v2(ctypes.c_uint(index), ctypes.byref(handle)):
            continue  # the GPU is lost, or not available to this container
        if not nvml.nvmlDeviceGetUUID(handle, uuid, ctypes.c_uint(UUID_BYTES)):
            handles[uuid.value.decode().removeprefix("GPU-")] = handle
    return handles


def _link(nvml: Any, gpu: ctypes.c_void_p, peer: ctypes.c_void_p) -> LinkClass:
    status = ctypes.c_int(P2P_UNKNOWN)
    if nvml.nvmlDeviceGetP2PStatus(gpu, peer, ctypes.c_int(NVLINK), ctypes.byref(status)):
        return LinkClass.UNKNOWN
    if status.value == P2P_UNKNOWN:
        return LinkClass.UNKNOWN
    return LinkClass.NVLINK if status.value == P2P_OK else LinkClass.PCIE


# --- addresses -------------------------------------------------------------------------------------------------------


SIOCGIFADDR = 0x8915
ADVICE = "set GLOO_SOCKET_IFNAME on every rank to the network interface through which the other ranks reach it"


class Address(NamedTuple):
    """A rank's network address, as the rank reports it to the others. The meeting point is the host of the store."""

    own: str
    """The rank's address on the route to the meeting point. Empty: gloo chooses."""
    meeting: str
    """The address of the meeting point, as this rank reaches it."""
    interface: str
    """The names of network interfaces, if the user gave some."""
    trouble: str = ""
    """Why this rank cannot connect."""

    def text(self) -> bytes:
        """Return the address as text for the store."""
        return json.dumps(self).encode()

    @classmethod
    def parse(cls, text: bytes) -> Address:
        """Parse the result of `text`."""
        return cls(*json.loads(text))

    def __str__(self) -> str:
        return self.own or (f"interface {self.interface}" if self.interface else "the address of its host's name")


def find_address(store: dist.Store, interface: str) -> Address:
    """Return this rank's address. This queries the name resolver, which may take long."""
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
        candidates = socket.getaddrinfo(store.host, store.port, type=socket.SOCK_DGRAM)
    except OSError as error:
        return Address("", "", "", f"the store's host {store.host} cannot be resolved: {error}")
    for family, kind, protocol, _, target in candidates:
        try:
            with socket.socket(family, kind, protocol) as probe:
                probe.connect(target)  # sends nothing; it only selects the route
                return Address(probe.getsockname()[0], str(target[0]), "")
        except OSError:
            continue  # this machine has no route of that family
    return Address("", "", "", f"no route leads to the store's host {store.host}")


def reachable(rank: int, addresses: Sequence[Address]) -> Address:
    """Return the address of `rank` that the other ranks can reach.

    On the store's host itself, that host's name may resolve to a loopback address. Then return the address by which the
    other hosts reach the store's host.
    """
    address = addresses[rank]
    if address.own and _is_loopback(address.own):
        for peer in addresses:
            if peer.own and not _is_loopback(peer.own) and not _is_loopback(peer.meeting):
                return address._replace(own=peer.meeting)
    return address


def devices(own: str, interface: str) -> list[dist.ProcessGroupGloo.Device]:
    """Return gloo's devices for the address `own`, else for the named interfaces, else as gloo itself chooses them.

    Raises `RuntimeError` if gloo cannot create a device.
    """
    make = dist.ProcessGroupGloo
    if own:
        return [make.create_device(hostname=own)]
    if interface:
        return [make.create_device(interface=name) for name in interface.split(",")]
    return [make.create_default_device()]


def address_of_interface(name: str) -> str:
    """Return the IPv4 address of the first network interface in a comma-separated list; empty if it has none."""
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
"""The variable that names another location of the file of `ringattn calibrate`."""

DEVICES = {
    "NVIDIA A100-SXM4-80GB": "a100",
    "NVIDIA H100 80GB HBM3": "h100",
    "NVIDIA H200": "h200",
    "NVIDIA B200": "b200",
    "NVIDIA GB200": "gb200",
    "NVIDIA L20": "l20",
    "NVIDIA GeForce RTX 4090": "rtx4090",
}
"""The preset of a GPU by its full name in CUDA. The H100 PCIe, H100 NVL and H20 are different machines."""
OVER_PCIE = ("l20", "rtx4090")
"""Presets of boxes without NVLink."""
RACKS = ("gb200",)
"""Presets in which NVLink may connect GPUs of several nodes."""


class Recognised(NamedTuple):
    """The result of `recognise`. `cluster`: None if the machines are not known. `why`: the reason, for the user."""

    cluster: Cluster | None
    why: str


def recognise(locations: Sequence[Location], links: Links | None, transport: str) -> Recognised:
    """Recognise the machines of a ring: by a calibration if one matches, else by a preset.

    `links`: None if the transport does not report where its ranks run. `transport`: the name of the ring's transport.
    """
    if links is None:
        return Recognised(None, "not recognised: the transport does not report where ranks run")
    calibrated = _calibrated(locations, links, transport)
    if calibrated.cluster:
        return calibrated
    preset = _preset(locations, links)
    return preset if preset.cluster else Recognised(None, f"not recognised: {preset.why}; {calibrated.why}")


def _calibrated(locations: Sequence[Location], links: Links, transport: str) -> Recognised:
    first = locations[0].calibration
    for rank, location in enumerate(locations):
        if location.calibration != first:
            return Recognised(None, f"rank {rank} has another calibration than rank 0, or only one of them has one")
    if first is None:
        return Recognised(None, "`ringattn calibrate` has not stored constants here")
    calibration: dict[str, Any] = json.loads(first)
    if "unfit" in calibration:
        return Recognised(None, calibration["unfit"])
    if max(links.nodes):
        return Recognised(None, "the calibration is for one machine, but the ring has several")
    if calibration["transport"] != transport:
        return Recognised(None, f"the calibration is for {calibration['transport']}, but messages use {transport}")
    cluster = Cluster(**calibration["constants"])
    return Recognised(cluster, f"calibrated: {cluster.name}")


def _preset(locations: Sequence[Location], links: Links) -> Recognised:
    device, sms = locations[0].device, locations[0].sms
    for rank, location in enumerate(locations):
        if (location.device, location.sms) != (device, sms):
            return Recognised(None, f"rank {rank} has {_gpu(location)}, and rank 0 has {_gpu(locations[0])}")
    if device is None:
        return Recognised(None, "the ranks have no GPU")
    if (name := DEVICES.get(device)) is None:
        return Recognised(None, f"there is no preset of {device}")
    preset, nodes, inside = CLUSTERS[name], 1 + max(links.nodes), links.classes_inside()
    obstacle = None
    if sms != preset.sms:  # a slice of the GPU, or a variant
        obstacle = f"this {device} has {sms} multiprocessors, but the preset has {preset.sms}"
    elif name in OVER_PCIE:
        obstacle = "the preset does not model the host bridges that GPUs over PCIe share"
    elif inside - {LinkClass.NVLINK}:
        classes = ", ".join(sorted(kind.value for kind in inside))
        obstacle = f"GPUs of a node are connected by {classes}, but the preset has NVLink"
    elif nodes > 1 and name in RACKS:
        obstacle = "it is unknown whether NVLink connects the nodes"
    elif nodes > 1 and links.outside is not LinkClass.NETWORK:
        obstacle = "a rank cannot determine which machine it is on"
    rate = _network_bytes_s(locations, links) if nodes > 1 and not obstacle else None
    if nodes > 1 and rate is None:
        obstacle = obstacle or "a node does not report the rate of its network ports"
    if obstacle:
        return Recognised(None, f"{device}: {obstacle} (set cluster={name!r} to use it anyway)")
    description = f"recognised: {len(locations)} x {device} on {nodes} node{'s' * (nodes > 1)}"
    description += f"{', NVLink inside' if inside else ''}; preset {name}"
    if rate is not None and preset.node_bandwidth is not None and rate < preset.node_bandwidth:
        preset = replace(preset, node_bandwidth=rate)
        description += f", but {rate / 1e9:.3g} GB/s a rank between nodes by the rates of their ports"
    return Recognised(replace(preset, recognised=True), description)


def _gpu(location: Location) -> str:
    return "no GPU" if location.device is None else f"{location.device} with {location.sms} multiprocessors"


def _network_bytes_s(locations: Sequence[Location], links: Links) -> float | None:
    """Return a rank's share of its node's network bandwidth in bytes/s, on the node where it is smallest.

    It is the sum of the rates of the node's ports, divided by the node's ranks; None if any rate is unknown.
    """
    ranks, least = Counter(links.nodes), float("inf")
    for node, location in zip(links.nodes, locations, strict=True):
        rates = [nic.gbps for nic in location.nics]
        if not rates or None in rates:
            return None
        least = min(least, sum(rate or 0.0 for rate in rates) * 1e9 / 8 / ranks[node])
    return least


def own_calibration(named: str | None) -> str | None:
    """Return the constants that `ringattn calibrate` stored on this machine: JSON with `constants` and `transport`.

    If the constants are for other hardware, the JSON has only `unfit`, the reason. Return None if there is no file. The
    ranks compare their results. `named`: the file that `RINGATTN_CALIBRATION` names; None: the default file. Raises
    `InputError` if the named file is missing or a file cannot be read.
    """
    path = Path(named or CALIBRATED)
    if not path.is_file():
        if named:
            raise InputError(f"{VARIABLE}={path}: there is no such file; `ringattn calibrate out={path}` writes one")
        return None
    constants = asdict(cluster_named(str(path)))
    described = json.loads(path.read_text(encoding="utf-8"))
    if described.get("hardware") != hardware():
        return json.dumps({"unfit": f"{path} is for {described.get('hardware')}, but this is {hardware()}"})
    return json.dumps({"constants": constants, "transport": described.get("transport")}, sort_keys=True)


def hardware() -> str:
    """Describe the hardware of this machine, such as "8 x NVIDIA H100", without the machine's name."""
    if torch.cuda.is_available():
        return f"{torch.cuda.device_count()} x {torch.cuda.get_device_name()}"
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:  # not Linux: use the architecture instead
        lines = []
    family = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")
    return f"{len(os.sched_getaffinity(0))} cores, {family or platform.machine()}"


# --- locations -------------------------------------------------------------------------------------------------------


class Nic(NamedTuple):
    """A network port that is up. `gbps`: its rate, or None if the driver does not report it."""

    name: str
    gbps: float | None


class Gpu(NamedTuple):
    """The GPU of a rank, with `uuid` and `name` as torch writes them and `bus` as in /sys, or None if unknown.

    `sms`: the number of its multiprocessors.
    """

    uuid: str
    bus: str | None
    name: str | None = None
    sms: int | None = None


@dataclass(frozen=True)
class Location:
    """The location of a rank.

    `machine`: boot id and network namespace, None if /proc does not provide them. `gpu`, `bus`: the GPU's UUID and PCI
    address, None on the CPU. `nics`: RDMA ports if there are any, else network interfaces. `links`: the links from this
    GPU to the other GPUs of the machine, by UUID; empty if the driver does not report them. `device`, `sms`: the GPU's
    name and its number of multiprocessors. `calibration`: the result of `own_calibration`; None if there is no
    calibration or it was not requested.
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
        """Return whether both ranks are known to be on one machine, where they can share memory."""
        return self.machine is not None and self.machine == other.machine

    def text(self) -> str:
        """Return the location as text for the store."""
        facts = asdict(self)
        facts["links"] = [(uuid, kind.name) for uuid, kind in self.links]
        return json.dumps({key: value for key, value in facts.items() if value}, separators=(",", ":"))

    @classmethod
    def parse(cls, text: str | bytes) -> Location:
        """Parse the result of `text`."""
        facts = {"machine": None, "uid": 0, "pid": 0, **json.loads(text)}
        facts["nics"] = tuple(Nic(*fields) for fields in facts.get("nics", ()))
        facts["links"] = tuple((uuid, LinkClass[kind]) for uuid, kind in facts.get("links", ()))
        return cls(**facts)


def my_location(
    gpu: int | None = None,
    *,
    root: Path = Path("/"),
    gpu_of: Callable[[int], Gpu] | None = None,
    links: Callable[[str], Sequence[tuple[str, LinkClass]]] = gpu_links,
) -> Location:
    """Return this process's location. `gpu`: the index of its CUDA device, None on the CPU.

    `root` contains `proc` and `sys`. `gpu_of` returns the GPU with an index; None: use `torch_gpu`. `links` returns the
    links of a GPU to the other GPUs of the machine.
    """
    properties = None if gpu is None else (gpu_of or torch_gpu)(gpu)
    return Location(
        socket.gethostname(),
        machine_id(root),
        os.getpid(),
        os.getuid(),
        properties and properties.uuid,
        properties and properties.bus,
        nics(root),
        tuple(links(properties.uuid)) if properties else (),
        properties and properties.name,
        properties and properties.sms,
    )


def torch_gpu(index: int) -> Gpu:
    """Return the `Gpu` of a CUDA device, as torch describes it."""
    properties: Any = torch.cuda.get_device_properties(index)
    uuid = str(properties.uuid).removeprefix("GPU-")  # as NVML's UUIDs are written here
    try:
        bus = f"{properties.pci_domain_id:04x}:{properties.pci_bus_id:02x}:{properties.pci_device_id:02x}.0"
    except AttributeError:  # older versions of torch do not have these
        bus = None
    return Gpu(uuid, bus, properties.name, properties.multi_processor_count)


def machine_id(root: Path = Path("/")) -> str | None:
    """Return an id of the kernel's boot and the network namespace, or None if /proc does not provide them.

    A container with its own network therefore counts as a separate machine.
    """
    try:
        boot = (root / "proc/sys/kernel/random/boot_id").read_text().strip()
        network = os.readlink(root / "proc/self/ns/net")
    except OSError:
        return None
    return f"{boot}/{network.removeprefix('net:[').removesuffix(']')}"


def nics(root: Path = Path("/")) -> tuple[Nic, ...]:
    """Return the active RDMA ports. If there are none, return the network interfaces that are up, except loopback."""
    ports = sorted((root / "sys/class/infiniband").glob("*/ports/*"))
    active = [port for port in ports if read(port / "state").endswith("ACTIVE")]
    if active:
        return tuple(Nic(f"{port.parts[-3]}:{port.name}", _number(read(port / "rate"))) for port in active)
    interfaces = []
    for interface in sorted((root / "sys/class/net").glob("*")):
        # Drivers without a carrier state report "unknown" while they work.
        if interface.name != "lo" and read(interface / "operstate") in ("up", "unknown"):
            speed = _number(read(interface / "speed"))  # Mb/s, -1 if unknown
            interfaces.append(Nic(interface.name, speed / 1000 if speed and speed > 0 else None))
    return tuple(interfaces)


def read(file: Path) -> str:
    """Return the content of a file of /sys or /proc; empty if it is missing or cannot be read."""
    try:
        return file.read_text().strip()
    except (OSError, UnicodeDecodeError):
        return ""


def _number(text: str) -> float | None:
    """Return the number at the start of a text like "400 Gb/sec (4X NDR)"."""
    try:
        return float(text.split()[0])
    except (IndexError, ValueError):
        return None


def gather_locations(control: ControlStore, location: Location, deadline: Deadline) -> tuple[Location, ...]:
    """Return every rank's location, in rank order. This gather is the first step of opening a ring.

    Raises `DeadlineError` that names the missing ranks, and `PeerLostError` with the cause of a rank that failed.
    """
    gathered = control.combine("opening", location.text().encode(), _packed, deadline)
    return tuple(map(Location.parse, zlib.decompress(gathered).splitlines()))


def _packed(texts: list[bytes]) -> bytes:
    """Compress the texts of all ranks into the entry that every rank reads. Texts of one node are nearly the same."""
    return zlib.compress(b"\n".join(texts), 1)


def one_machine(locations: Sequence[Location]) -> bool:
    """Return whether all ranks are known to be on one machine."""
    return bool(locations) and all(locations[0].same_machine(other) for other in locations)


def node_of(rank: int, locations: Sequence[Location]) -> tuple[int, ...]:
    """Return the ranks on the machine of `rank`, including `rank`."""
    location = locations[rank]
    return tuple(
        peer for peer, peer_location in enumerate(locations) if peer == rank or peer_location.same_machine(location)
    )


def sharing_obstacle(locations: Sequence[Location]) -> str | None:
    """Return why the ranks cannot share memory within their nodes, or None if they can. All ranks return the same."""
    for rank, location in enumerate(locations):
        if location.machine is None:
            return f"rank {rank} cannot determine which machine it is on ({location.host})"
        first = node_of(rank, locations)[0]
        if location.uid != locations[first].uid:
            return f"ranks {first} and {rank} belong to different users, {locations[first].uid} and {location.uid}"
    if len({location.machine for location in locations}) == len(locations) > 1:
        return "no two ranks share a machine and its network namespace, and only there memory can be shared"
    return None


def links_of(locations: Sequence[Location]) -> Links:
    """Return the links between ranks. All ranks return the same links, because they have the same locations."""
    nodes = numbered(location.machine or f"host {location.host}" for location in locations)
    all_known = all(location.machine is not None for location in locations)
    outside = LinkClass.NETWORK if all_known else LinkClass.UNKNOWN
    if not any(location.gpu for location in locations):  # all links of a machine are alike
        return Links(nodes, LinkClass.MEMORY if all_known else LinkClass.UNKNOWN, (), outside)
    members: dict[int, list[int]] = {}
    for rank, node in enumerate(nodes):
        members.setdefault(node, []).append(rank)
    pairs = [
        (first, second, _between(locations[first], locations[second]))
        for ranks in members.values()
        for first, second in combinations(ranks, 2)
    ]
    counts = Counter(kind for *_, kind in pairs)
    inside = counts.most_common(1)[0][0] if counts else LinkClass.UNKNOWN
    return Links(nodes, inside, tuple(pair for pair in pairs if pair[2] is not inside), outside)


def _between(first: Location, second: Location) -> LinkClass:
    """Return the link class between two ranks of a node in which some ranks have GPUs."""
    if first.gpu is None or second.gpu is None:
        return LinkClass.UNKNOWN
    if first.gpu == second.gpu:
        return LinkClass.SAME_GPU
    return dict(first.links).get(second.gpu) or dict(second.links).get(first.gpu) or LinkClass.UNKNOWN


def order_advice(locations: Sequence[Location]) -> str | None:
    """Return advice if the order of the ranks makes a ring cross nodes more often than necessary, or None.

    A ring connects each rank with the next, and each of its steps waits for the slowest pair.
    """
    links = links_of(locations)
    if links.crossings == links.least_crossings:
        return None
    hosts = dict(zip(links.nodes, (location.host for location in locations), strict=True))
    named = ", ".join(f"node {node} is {host}" for node, host in sorted(hosts.items()))
    return (
        f"{placement(links)} ({named}). Number the ranks of a node one after another: torchrun does, and so does Slurm "
        "with --distribution=block; give a ProcessGroup or a DeviceMesh whose ranks are listed node by node"
    )
