"""Where each rank runs: its machine, its GPU and its network cards, gathered once when a ring opens.

Guarantees: a fact that the system does not tell is None or empty, never an error and never guessed. Two ranks with the
same machine id can pass file descriptors over abstract Unix sockets, which a network namespace keeps to itself.
"""

from __future__ import annotations

import json
import os
import socket
import zlib
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from itertools import combinations
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ringattn.planner.links import LinkClass, Links, numbered, placement
from ringattn.transport.control_store import ControlStore
from ringattn.transport.deadline import Deadline
from ringattn.transport.nvml import gpu_links


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
