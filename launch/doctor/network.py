"""The doctor's findings about the network of a machine: ports, distances, GPUDirect and NCCL's variables.

`network_facts` reads the facts from `/proc` and `/sys`. All other functions judge these facts and read nothing.
Sources: NCCL user guide (environment variables; troubleshooting: ACS, memlock, containers); NVIDIA GPUDirect RDMA and
"Support for peer memory" for nvidia-peermem and DMABUF.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ringattn.launch.doctor.probes import ERROR, NOTE, OK, WARNING, Finding
from ringattn.transport.location import read
from ringattn.transport.nccl.binding import Capability
from ringattn.transport.nccl.options import NcclOptions, overlap_warnings, warnings_beside_torch

SWITCH, BRIDGE, NUMA, SYSTEM, UNKNOWN = range(5)
DISTANCES = ("one PCIe switch", "one host bridge", "one NUMA node", "another NUMA node", "unknown ways")
ETHERNET_MTU = 9000
LEAST_MEMLOCK_BYTES = 2**26
VIRTUAL = ("docker", "virbr", "veth", "cni", "flannel", "br-")


@dataclass(frozen=True)
class Port:
    """A port of an RDMA device. `layer` is InfiniBand or Ethernet (RoCE); `mtu` is that of its Ethernet interface."""

    device: str
    number: str
    state: str
    layer: str
    gbps: float | None = None
    mtu: int | None = None

    @property
    def name(self) -> str:
        """Return the name as in NCCL_IB_HCA."""
        return f"{self.device}:{self.number}"

    @property
    def active(self) -> bool:
        """Return whether the port is active."""
        return self.state == "ACTIVE"


@dataclass(frozen=True)
class Interface:
    """A network interface other than loopback."""

    name: str
    up: bool
    mtu: int | None = None


@dataclass(frozen=True)
class Near:
    """The RDMA device nearest to a GPU."""

    gpu: str
    device: str
    distance: int


@dataclass(frozen=True)
class Network:
    """Facts about the network of one machine.

    `gpus` are PCI bus ids. `dmabuf` says whether kernel and driver export GPU memory, or is None if unknown.
    `redirecting` are the bridges above GPUs and ports that send peer-to-peer traffic up to the root, or None if their
    registers cannot be read. `memlock` is the number of bytes that a process may lock, or None for no limit.
    """

    ports: tuple[Port, ...] = ()
    interfaces: tuple[Interface, ...] = ()
    gpus: tuple[str, ...] = ()
    nearest: tuple[Near, ...] = ()
    peermem: bool = False
    dmabuf: bool | None = None
    redirecting: tuple[str, ...] | None = ()
    memlock: int | None = None


def network(facts: Network, environment: Mapping[str, str], nccl_version: int) -> list[Finding]:
    """Return all findings about the network; those about NCCL only if there are GPUs."""
    findings = [*ports(facts), *mtu(facts), *named(facts, environment)]
    if facts.ports:
        findings += [memlock(facts), *rails(facts, environment)]
    if facts.ports and facts.gpus:
        findings += [*distances(facts), gpudirect(facts, environment)]
    if facts.gpus:
        findings += [acs(facts), *blocks(environment), *launches(environment, nccl_version)]
    return findings


def ports(facts: Network) -> list[Finding]:
    """Check the states and rates of RDMA ports."""
    if not facts.ports:
        return [Finding("RDMA ports", NOTE, "no InfiniBand or RoCE port: messages between machines use TCP",
                        "on several machines: start the container with --device=/dev/infiniband",
                        "TCP takes processor time and does not reach the line rate")]  # fmt: skip
    findings = []
    active = [port for port in facts.ports if port.active]
    for port in facts.ports:
        if not port.active:
            findings.append(Finding(
                "RDMA ports", WARNING, f"{port.name} is {port.state or 'in an unknown state'}",
                "check the cable, the switch and the subnet manager (ibstat), or name the other ports in NCCL_IB_HCA",
                "NCCL does not use it, so there is less bandwidth between nodes",
            ))  # fmt: skip
    rates = {port.gbps for port in active}
    text = ", ".join(f"{port.name} {_rate(port.gbps)} {port.layer}" for port in active)
    if len(rates) > 1:
        fastest = max(rate or 0 for rate in rates)
        names = ",".join(port.name for port in active if port.gbps == fastest)
        findings.append(Finding("RDMA ports", WARNING, f"of different rates: {text}", f"NCCL_IB_HCA={names}",
                                "a channel on the slow port delays all other channels"))  # fmt: skip
    elif active:
        findings.append(Finding("RDMA ports", OK, f"active: {text}"))
    return findings


def _rate(gbps: float | None) -> str:
    return "of unknown rate" if gbps is None else f"{gbps:g} Gb/s"


def mtu(facts: Network) -> list[Finding]:
    """Check the frame size of Ethernet interfaces with RoCE."""
    roce = [port for port in facts.ports if port.active and port.mtu is not None]
    small = [port for port in roce if port.mtu is not None and port.mtu < ETHERNET_MTU]
    if small:
        listed = ", ".join(f"{port.name} {port.mtu}" for port in small)
        return [Finding("MTU", WARNING, f"of RoCE ports below {ETHERNET_MTU}: {listed}",
                        "ip link set dev INTERFACE mtu 9000, on the switch and on all nodes",
                        "RDMA packets hold 1 KiB instead of 4, so the same bytes need more packets")]  # fmt: skip
    return [Finding("MTU", OK, ", ".join(f"{port.name} {port.mtu}" for port in roce))] if roce else []


def named(facts: Network, environment: Mapping[str, str]) -> list[Finding]:
    """Check that environment variables that choose ports and interfaces leave at least one that works."""
    findings = []
    if environment.get("NCCL_IB_DISABLE") == "1" and any(port.active for port in facts.ports):
        findings.append(Finding("NCCL_IB_DISABLE", WARNING, "=1, and there are active RDMA ports", "unset it",
                                "between nodes NCCL uses sockets, at a fraction of the bandwidth"))  # fmt: skip
    usable = [port.name for port in facts.ports if port.active]
    findings += _chosen("NCCL_IB_HCA", environment, [port.name for port in facts.ports], usable, "RDMA port",
                        "NCCL falls back to sockets if no port is left")  # fmt: skip
    interfaces = [interface.name for interface in facts.interfaces]
    up = [interface.name for interface in facts.interfaces if interface.up]
    for variable, why in (("NCCL_SOCKET_IFNAME", "NCCL's ranks first connect over it, even if messages use RDMA"),
                          ("GLOO_SOCKET_IFNAME", "all messages of a ring on CPUs use it")):  # fmt: skip
        if environment.get(variable) == "lo":
            findings.append(Finding(variable, NOTE, "=lo: connects only ranks of this machine", "", why))
        else:
            findings += _chosen(variable, environment, interfaces, up, "interface", why)
    virtual = [name for name in up if name.startswith(VIRTUAL)]
    if "NCCL_SOCKET_IFNAME" not in environment and virtual and facts.gpus:
        real = next((name for name in up if name not in virtual), "eth0")
        findings.append(Finding("NCCL_SOCKET_IFNAME", NOTE, f"not set, and there are virtual interfaces: "
                                f"{', '.join(virtual)}", f"on several nodes NCCL_SOCKET_IFNAME={real}",
                                "other nodes cannot connect to an address of a virtual interface"))  # fmt: skip
    return findings


def _chosen(
    variable: str, environment: Mapping[str, str], present: Sequence[str], usable: Sequence[str], kind: str, why: str
) -> list[Finding]:
    """Check a variable that lists names or prefixes; = marks exact names, and ^ names to leave out.

    `present`, `usable`: the names of all devices, and of those that work. `kind`: the word for such a device in
    findings. `why`: why the choice matters.
    """
    value = environment.get(variable, "")
    if not value:
        return []
    without = value.startswith("^")
    exact = value.lstrip("^").startswith("=") or variable == "GLOO_SOCKET_IFNAME"
    names = [name for name in value.lstrip("^=").split(",") if name]

    def matches(entry: str, candidate: str) -> bool:
        """Return whether `entry` selects `candidate`. An entry without a port stands for all ports of a device."""
        return candidate in (entry, f"{entry}:{candidate.split(':')[-1]}") or (
            not exact and candidate.startswith(entry)
        )

    left = [candidate for candidate in usable if any(matches(name, candidate) for name in names) != without]
    listed = ", ".join(usable) or "none"
    if not left:
        return [Finding(variable, ERROR, f"={value} leaves no {kind} that works; there are: {listed}",
                        f"name one of those, or unset {variable}", why)]  # fmt: skip
    absent = [] if without else [name for name in names if not any(matches(name, entry) for entry in present)]
    if absent:
        text = f"={value}: there is no {kind} {', '.join(absent)}; the usable ones are {', '.join(left)}"
        return [Finding(variable, WARNING, text, "remove these names, or find out why the devices are missing", why)]
    return [Finding(variable, OK, f"={value} selects {', '.join(left)}")]


def memlock(facts: Network) -> Finding:
    """Check how much memory a process may lock, because RDMA registers locked memory."""
    if facts.memlock is not None and facts.memlock < LEAST_MEMLOCK_BYTES:
        return Finding("memlock", ERROR, f"a process may lock {facts.memlock // 1024} KiB",
                       "ulimit -l unlimited (in a container --ulimit memlock=-1; for Slurm in slurmd's unit)",
                       "RDMA registers locked memory: opening fails with 'ibv_reg_mr failed' or 'unhandled system "
                       "error'")  # fmt: skip
    limit = "no limit" if facts.memlock is None else f"{facts.memlock / 2**20:.0f} MiB"
    return Finding("memlock", OK, f"locked memory: {limit}")


def rails(facts: Network, environment: Mapping[str, str]) -> list[Finding]:
    """Check that PXN is on, which lets a message use the port of another GPU."""
    if environment.get("NCCL_PXN_DISABLE") != "1":
        return []
    level = WARNING if len(facts.ports) > 1 and len(facts.gpus) > 1 else NOTE
    why = "messages of a GPU whose port is not on the receiver's rail then cross the spine of the network"
    return [Finding("PXN", level, "NCCL_PXN_DISABLE=1", "unset it, unless it works around a fault", why)]


def distances(facts: Network) -> list[Finding]:
    """Check how far each GPU is from its nearest port."""
    far = [near for near in facts.nearest if near.distance > SWITCH]
    text = ", ".join(f"GPU {near.gpu} to {near.device} over {DISTANCES[near.distance]}" for near in facts.nearest)
    why = (
        "GPUDirect RDMA is slow through a host bridge. Beyond a host bridge it is off, and messages pass through "
        "host memory"
    )
    if any(near.distance >= NUMA for near in far):
        return [Finding("NIC to GPU", WARNING, text, "use the GPUs near a port, or NCCL_NET_GDR_LEVEL=SYS if it "
                        "measures faster", why)]  # fmt: skip
    return [Finding("NIC to GPU", NOTE if far else OK, text, "", why if far else "")]


def gpudirect(facts: Network, environment: Mapping[str, str]) -> Finding:
    """Check whether a port can read and write GPU memory directly."""
    why = "without it each message is copied through host memory"
    if environment.get("NCCL_NET_GDR_LEVEL") in ("0", "LOC"):
        return Finding("GPUDirect", WARNING, "turned off by NCCL_NET_GDR_LEVEL", "unset it", why)
    dmabuf = facts.dmabuf and environment.get("NCCL_DMABUF_ENABLE") != "0"
    methods = [name for name, works in (("nvidia-peermem", facts.peermem), ("DMABUF", dmabuf)) if works]
    if methods:
        return Finding("GPUDirect", OK, f"RDMA by {' and '.join(methods)}")
    unknown = "; whether DMABUF works is unknown" if facts.dmabuf is None else ""
    advice = "modprobe nvidia-peermem, or the driver's open kernel modules on Linux 5.12 or newer"
    return Finding("GPUDirect", WARNING, f"nvidia-peermem is not loaded, and no DMABUF{unknown}", advice, why)


def acs(facts: Network) -> Finding:
    """Check the access control services of PCIe, which send peer-to-peer traffic through the root."""
    why = "peer-to-peer traffic between GPUs and ports passes through the root: slow, and wrong on some machines"
    if facts.redirecting is None:
        advice = "sudo ringattn doctor, or sudo lspci -vvv | grep ACSCtl: it should print ReqRedir- CmpltRedir-"
        return Finding("ACS", NOTE, "unknown: only root can read the registers of PCIe bridges", advice, why)
    if facts.redirecting:
        advice = "turn ACS off in the BIOS, or on these bridges by setpci (a virtual machine needs it, and then ATS)"
        return Finding("ACS", WARNING, f"redirects at {', '.join(facts.redirecting)}", advice, why)
    return Finding("ACS", OK, "no bridge above a GPU or a port redirects")


def blocks(environment: Mapping[str, str]) -> list[Finding]:
    """Check that an exchange needs no more thread blocks and clusters than the kernels leave free."""
    why = (
        "an exchange that needs more multiprocessors than kernels leave free starts when the kernels have ended, "
        "without overlap"
    )
    warnings = overlap_warnings(environment, NcclOptions(), frozenset(Capability))
    margin = NcclOptions().margin
    return [Finding("CTAs and CGA", WARNING, text, "", why) for text in warnings] or [
        Finding("CTAs and CGA", OK, f"exchanges use at most {margin} thread blocks, clusters of 1")
    ]


def launches(environment: Mapping[str, str], nccl_version: int) -> list[Finding]:
    """Check that launches have the same order on all ranks if other communicators, as of DDP and FSDP, are in use."""
    warnings = warnings_beside_torch(environment, nccl_version)
    why = "two communicators that launch in different orders on two ranks can deadlock"
    return [Finding("launch order", NOTE, f"with DDP or FSDP: {text}", "", why) for text in warnings] or [
        Finding("launch order", OK, "the same order on all ranks, also with DDP or FSDP")
    ]


# --- facts -----------------------------------------------------------------------------------------------------------


NVIDIA, DISPLAYS, BRIDGES = "0x10de", ("0x0300", "0x0302"), "0x0604"
ACS_CAPABILITY, EXTENDED = 0x000D, 0x100
REDIRECTS = 0x04 | 0x08
"""Bits of the ACS control register: peer requests and completions are redirected up."""
DMABUF_SINCE = (5, 12)


def network_facts(root: Path = Path("/")) -> Network:
    """Read the facts about the network of this machine."""
    ports = _ports(root)
    gpus = _gpus(root)
    devices = {port.device: (root / "sys/class/infiniband" / port.device / "device").resolve() for port in ports}
    gpu_paths = [(root / "sys/bus/pci/devices" / gpu).resolve() for gpu in gpus]
    return Network(
        ports,
        _interfaces(root),
        gpus,
        tuple(_nearest(gpu, path, devices) for gpu, path in zip(gpus, gpu_paths, strict=True) if devices),
        any(line.startswith("nvidia_peermem ") for line in read(root / "proc/modules").splitlines()),
        _dmabuf(root),
        _redirecting([*gpu_paths, *devices.values()]),
        _memlock(root),
    )


def _ports(root: Path) -> tuple[Port, ...]:
    ports = []
    for folder in sorted((root / "sys/class/infiniband").glob("*/ports/*")):
        device, layer = folder.parents[1], read(folder / "link_layer")
        sizes = [_whole(read(file)) for file in sorted((device / "device/net").glob("*/mtu"))]
        mtu = min((size for size in sizes if size is not None), default=None) if layer == "Ethernet" else None
        rate = read(folder / "rate").split()
        state = read(folder / "state").split(": ")[-1]
        ports.append(Port(device.name, folder.name, state, layer, float(rate[0]) if rate else None, mtu))
    return tuple(ports)


def _interfaces(root: Path) -> tuple[Interface, ...]:
    folders = [folder for folder in sorted((root / "sys/class/net").glob("*")) if folder.name != "lo"]
    return tuple(
        Interface(folder.name, read(folder / "operstate") in ("up", "unknown"), _whole(read(folder / "mtu")))
        for folder in folders
    )


def _gpus(root: Path) -> tuple[str, ...]:
    """Return the PCI bus ids of NVIDIA's GPUs."""
    devices = sorted((root / "sys/bus/pci/devices").glob("*"))
    return tuple(
        device.name for device in devices
        if read(device / "vendor") == NVIDIA and read(device / "class").startswith(DISPLAYS)
    )  # fmt: skip


def _nearest(gpu: str, gpu_path: Path, devices: dict[str, Path]) -> Near:
    distance, device = min((_distance(gpu_path, path), name) for name, path in devices.items())
    return Near(gpu, device, distance)


def _distance(gpu: Path, port: Path) -> int:
    """Return the distance between two PCI devices (`DISTANCES`)."""
    of_gpu, of_port = _bridges(gpu), _bridges(port)
    if not of_gpu or not of_port:
        return UNKNOWN
    if of_gpu[0] == of_port[0]:  # the same host bridge; a common bridge below it is a switch
        return SWITCH if len(of_gpu) > 2 and of_gpu[1] == of_port[1] else BRIDGE
    nodes = [_whole(read(device / "numa_node")) for device in (gpu, port)]
    if None in nodes:
        return UNKNOWN
    return NUMA if nodes[0] == nodes[1] else SYSTEM


def _bridges(device: Path) -> tuple[str, ...]:
    """Return the PCI components on the path from the host bridge to the device, both included."""
    parts = device.parts
    first = next((n for n, part in enumerate(parts) if part.startswith("pci") and ":" in part), None)
    return () if first is None else parts[first:]


def _dmabuf(root: Path) -> bool | None:
    """Return whether kernel and driver export GPU memory: a new enough kernel and the driver's open module.

    The result is None if it cannot be determined.
    """
    driver, release = read(root / "proc/driver/nvidia/version"), read(root / "proc/sys/kernel/osrelease")
    numbers = release.split(".")[:2]
    if not driver or len(numbers) < 2 or not all(number.isdecimal() for number in numbers):
        return None
    return "Open Kernel Module" in driver and (int(numbers[0]), int(numbers[1])) >= DMABUF_SINCE


def _redirecting(devices: list[Path]) -> tuple[str, ...] | None:
    """Return the bridges above these devices that redirect peer-to-peer traffic to the root.

    The result is None if the registers of a bridge cannot be read.
    """
    bridges = {bridge for path in devices for bridge in path.parents if read(bridge / "class").startswith(BRIDGES)}
    redirecting = []
    for bridge in sorted(bridges):
        try:
            registers = (bridge / "config").read_bytes()
        except OSError:
            return None
        if len(registers) <= EXTENDED:  # users other than root can read only these
            return None
        if _acs_control(registers) & REDIRECTS:
            redirecting.append(bridge.name)
    return tuple(redirecting)


def _acs_control(registers: bytes) -> int:
    """Return the ACS control register of a PCI function, or 0 if it has none."""
    offset, seen = EXTENDED, set()
    while offset and offset not in seen and offset + 8 <= len(registers):
        seen.add(offset)
        header = int.from_bytes(registers[offset : offset + 4], "little")
        if header & 0xFFFF == ACS_CAPABILITY:
            return int.from_bytes(registers[offset + 6 : offset + 8], "little")
        offset = header >> 20
    return 0


def _memlock(root: Path) -> int | None:
    """Return the soft limit of locked memory in bytes, or None if there is no limit or it is unknown."""
    for line in read(root / "proc/self/limits").splitlines():
        if line.startswith("Max locked memory"):
            return _whole(line.split()[3])
    return None


def _whole(text: str) -> int | None:
    try:
        return int(text)
    except ValueError:
        return None
