"""The doctor's findings on a machine's network: ports, distances, GPUDirect, NCCL's variables, speed between ranks.

`network_facts` reads the facts from `/proc` and `/sys`; the other functions judge them and read nothing.
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
    """A port of an RDMA device. `layer`: InfiniBand, or Ethernet (RoCE); `mtu`: of its Ethernet interface."""

    device: str
    number: str
    state: str
    layer: str
    gbps: float | None = None
    mtu: int | None = None

    @property
    def name(self) -> str:
        """As NCCL_IB_HCA spells it."""
        return f"{self.device}:{self.number}"

    @property
    def active(self) -> bool:
        """Whether bytes can pass."""
        return self.state == "ACTIVE"


@dataclass(frozen=True)
class Interface:
    """A network interface other than loopback."""

    name: str
    up: bool
    mtu: int | None = None


@dataclass(frozen=True)
class Near:
    """The RDMA device that a GPU reaches by the shortest way."""

    gpu: str
    device: str
    distance: int


@dataclass(frozen=True)
class Network:
    """Facts of one machine.

    `gpus`: PCI bus ids. `dmabuf`: whether kernel and driver export GPU memory; None: not known. `redirecting`: bridges
    above GPUs and ports that send peers' traffic up to the root; None: their registers cannot be read. `memlock`:
    bytes that a process may lock, None: no limit.
    """

    ports: tuple[Port, ...] = ()
    interfaces: tuple[Interface, ...] = ()
    gpus: tuple[str, ...] = ()
    nearest: tuple[Near, ...] = ()
    peermem: bool = False
    dmabuf: bool | None = None
    redirecting: tuple[str, ...] | None = ()
    memlock: int | None = None


def network(found: Network, environment: Mapping[str, str], nccl_version: int) -> list[Finding]:
    """All findings about the network; those of NCCL alone only where there are GPUs."""
    findings = [*ports(found), *mtu(found), *named(found, environment)]
    if found.ports:
        findings += [memlock(found), *rails(found, environment)]
    if found.ports and found.gpus:
        findings += [*distances(found), gpudirect(found, environment)]
    if found.gpus:
        findings += [acs(found), *blocks(environment), *launches(environment, nccl_version)]
    return findings


def ports(found: Network) -> list[Finding]:
    """States and rates of RDMA ports."""
    if not found.ports:
        return [Finding("RDMA ports", NOTE, "no InfiniBand or RoCE port: between machines bytes go over TCP",
                        "on several machines: start the container with --device=/dev/infiniband",
                        "TCP takes processor time and reaches a part of the line rate")]  # fmt: skip
    findings = []
    active = [port for port in found.ports if port.active]
    for port in found.ports:
        if not port.active:
            findings.append(Finding(
                "RDMA ports", WARNING, f"{port.name} is {port.state or 'in an unknown state'}",
                "look at the cable, the switch and the subnet manager (ibstat), or name the others in NCCL_IB_HCA",
                "NCCL leaves it out: so much less bandwidth between nodes",
            ))  # fmt: skip
    rates = {port.gbps for port in active}
    text = ", ".join(f"{port.name} {_rate(port.gbps)} {port.layer}" for port in active)
    if len(rates) > 1:
        fastest = max(rate or 0 for rate in rates)
        names = ",".join(port.name for port in active if port.gbps == fastest)
        findings.append(Finding("RDMA ports", WARNING, f"of different rates: {text}", f"NCCL_IB_HCA={names}",
                                "a channel on the slow port makes all others wait"))  # fmt: skip
    elif active:
        findings.append(Finding("RDMA ports", OK, f"active: {text}"))
    return findings


def _rate(gbps: float | None) -> str:
    return "of unknown rate" if gbps is None else f"{gbps:g} Gb/s"


def mtu(found: Network) -> list[Finding]:
    """Frames of the Ethernet interfaces that carry RoCE."""
    roce = [port for port in found.ports if port.active and port.mtu is not None]
    small = [port for port in roce if port.mtu is not None and port.mtu < ETHERNET_MTU]
    if small:
        listed = ", ".join(f"{port.name} {port.mtu}" for port in small)
        return [Finding("MTU", WARNING, f"of RoCE ports below {ETHERNET_MTU}: {listed}",
                        "ip link set dev INTERFACE mtu 9000, on the switch and all nodes alike",
                        "RDMA packets then hold 1 KiB instead of 4: more packets for the same bytes")]  # fmt: skip
    return [Finding("MTU", OK, ", ".join(f"{port.name} {port.mtu}" for port in roce))] if roce else []


def named(found: Network, environment: Mapping[str, str]) -> list[Finding]:
    """Whether the variables that choose ports and interfaces choose any that work."""
    findings = []
    if environment.get("NCCL_IB_DISABLE") == "1" and any(port.active for port in found.ports):
        findings.append(Finding("NCCL_IB_DISABLE", WARNING, "=1, and there are active RDMA ports", "unset it",
                                "between nodes NCCL takes sockets: a fraction of the bandwidth"))  # fmt: skip
    usable = [port.name for port in found.ports if port.active]
    findings += _chosen("NCCL_IB_HCA", environment, [port.name for port in found.ports], usable, "RDMA port",
                        "NCCL falls back to sockets where no port is left")  # fmt: skip
    interfaces = [one.name for one in found.interfaces]
    up = [one.name for one in found.interfaces if one.up]
    for variable, why in (("NCCL_SOCKET_IFNAME", "NCCL's ranks first meet over it, also where bytes go over RDMA"),
                          ("GLOO_SOCKET_IFNAME", "all bytes of a ring on CPU go over it")):  # fmt: skip
        if environment.get(variable) == "lo":
            findings.append(Finding(variable, NOTE, "=lo: only ranks of this machine meet over it", "", why))
        else:
            findings += _chosen(variable, environment, interfaces, up, "interface", why)
    virtual = [name for name in up if name.startswith(VIRTUAL)]
    if "NCCL_SOCKET_IFNAME" not in environment and virtual and found.gpus:
        real = next((name for name in up if name not in virtual), "eth0")
        findings.append(Finding("NCCL_SOCKET_IFNAME", NOTE, f"not set, and there are virtual interfaces: "
                                f"{', '.join(virtual)}", f"on several nodes NCCL_SOCKET_IFNAME={real}",
                                "ranks cannot meet over an address that other nodes do not reach"))  # fmt: skip
    return findings


def _chosen(
    variable: str, environment: Mapping[str, str], present: Sequence[str], usable: Sequence[str], kind: str, why: str
) -> list[Finding]:
    """What a list of names, of beginnings of names, with = of exact names, or with ^ of those to leave out, leaves."""
    value = environment.get(variable, "")
    if not value:
        return []
    without = value.startswith("^")
    exact = value.lstrip("^").startswith("=") or variable == "GLOO_SOCKET_IFNAME"
    names = [name for name in value.lstrip("^=").split(",") if name]

    def meets(name: str, one: str) -> bool:
        """An entry without a port means all ports of a device."""
        return one in (name, f"{name}:{one.split(':')[-1]}") or (not exact and one.startswith(name))

    left = [one for one in usable if any(meets(name, one) for name in names) != without]
    here = ", ".join(usable) or "none"
    if not left:
        return [Finding(variable, ERROR, f"={value} leaves no {kind} that works; there are: {here}",
                        f"name one of those, or unset {variable}", why)]  # fmt: skip
    absent = [] if without else [name for name in names if not any(meets(name, one) for one in present)]
    if absent:
        text = f"={value}: there is no {kind} {', '.join(absent)}; it leaves {', '.join(left)}"
        return [Finding(variable, WARNING, text, "take them out, or look why they are missing", why)]
    return [Finding(variable, OK, f"={value} leaves {', '.join(left)}")]


def memlock(found: Network) -> Finding:
    """Memory that may be locked, which RDMA registers."""
    if found.memlock is not None and found.memlock < LEAST_MEMLOCK_BYTES:
        return Finding("memlock", ERROR, f"a process may lock {found.memlock // 1024} KiB",
                       "ulimit -l unlimited (in a container --ulimit memlock=-1; for Slurm in slurmd's unit)",
                       "RDMA registers locked memory: opening fails with 'ibv_reg_mr failed' or 'unhandled system "
                       "error'")  # fmt: skip
    limit = "no limit" if found.memlock is None else f"{found.memlock / 2**20:.0f} MiB"
    return Finding("memlock", OK, f"locked memory: {limit}")


def rails(found: Network, environment: Mapping[str, str]) -> list[Finding]:
    """PXN: whether a message may take another GPU's port."""
    if environment.get("NCCL_PXN_DISABLE") != "1":
        return []
    level = WARNING if len(found.ports) > 1 and len(found.gpus) > 1 else NOTE
    why = "a GPU whose own port is not the receiver's rail then crosses the spine of the network"
    return [Finding("PXN", level, "NCCL_PXN_DISABLE=1", "unset it, unless it works around a fault", why)]


def distances(found: Network) -> list[Finding]:
    """How far each GPU is from its nearest port."""
    far = [one for one in found.nearest if one.distance > SWITCH]
    text = ", ".join(f"GPU {one.gpu} to {one.device} over {DISTANCES[one.distance]}" for one in found.nearest)
    why = "GPUDirect RDMA is off beyond a host bridge, and slow through one: bytes then pass host memory"
    if any(one.distance >= NUMA for one in far):
        return [Finding("NIC to GPU", WARNING, text, "give the ring the GPUs beside a port, or NCCL_NET_GDR_LEVEL=SYS "
                        "where a measurement says so", why)]  # fmt: skip
    return [Finding("NIC to GPU", NOTE if far else OK, text, "", why if far else "")]


def gpudirect(found: Network, environment: Mapping[str, str]) -> Finding:
    """Whether a port can read and write GPU memory itself."""
    why = "without it each message is copied through host memory"
    if environment.get("NCCL_NET_GDR_LEVEL") in ("0", "LOC"):
        return Finding("GPUDirect", WARNING, "turned off by NCCL_NET_GDR_LEVEL", "unset it", why)
    dmabuf = found.dmabuf and environment.get("NCCL_DMABUF_ENABLE") != "0"
    ways = [name for name, there in (("nvidia-peermem", found.peermem), ("DMABUF", dmabuf)) if there]
    if ways:
        return Finding("GPUDirect", OK, f"RDMA by {' and '.join(ways)}")
    unknown = "; whether DMABUF works is not known" if found.dmabuf is None else ""
    advice = "modprobe nvidia-peermem, or the driver's open kernel modules on Linux 5.12 or newer"
    return Finding("GPUDirect", WARNING, f"nvidia-peermem is not loaded, and no DMABUF{unknown}", advice, why)


def acs(found: Network) -> Finding:
    """Access control of PCIe, which sends the traffic of peers through the root."""
    why = "peer-to-peer between GPUs and ports then passes the root: slow, and on some machines wrong"
    if found.redirecting is None:
        advice = "sudo ringattn doctor, or sudo lspci -vvv | grep ACSCtl: want ReqRedir- CmpltRedir-"
        return Finding("ACS", NOTE, "not known: only root reads the registers of PCIe bridges", advice, why)
    if found.redirecting:
        advice = "turn ACS off in the BIOS, or on these bridges by setpci (a virtual machine needs it, and then ATS)"
        return Finding("ACS", WARNING, f"redirects at {', '.join(found.redirecting)}", advice, why)
    return Finding("ACS", OK, "no bridge above a GPU or a port redirects")


def blocks(environment: Mapping[str, str]) -> list[Finding]:
    """Thread blocks and clusters that an exchange holds."""
    told = overlap_warnings(environment, NcclOptions(), frozenset(Capability))
    why = "an exchange that wants more multiprocessors than kernels leave free begins when they end: no overlap"
    found = [Finding("CTAs and CGA", WARNING, text, "", why) for text in told]
    margin = NcclOptions().margin
    return found or [Finding("CTAs and CGA", OK, f"exchanges hold at most {margin} thread blocks, clusters of 1")]


def launches(environment: Mapping[str, str], nccl_version: int) -> list[Finding]:
    """The order of launches beside other communicators, as DDP and FSDP open them."""
    told = warnings_beside_torch(environment, nccl_version)
    why = "two communicators that launch in different orders on two ranks wait for each other for ever"
    return [Finding("launch order", NOTE, f"beside DDP or FSDP: {text}", "", why) for text in told] or [
        Finding("launch order", OK, "one order on all ranks, also beside DDP or FSDP")
    ]


# --- facts -----------------------------------------------------------------------------------------------------------


NVIDIA, DISPLAYS, BRIDGES = "0x10de", ("0x0300", "0x0302"), "0x0604"
ACS_CAPABILITY, EXTENDED = 0x000D, 0x100
REDIRECTS = 0x04 | 0x08
"""Of the ACS control register: requests and completions of peers go up."""
DMABUF_SINCE = (5, 12)


def network_facts(root: Path = Path("/")) -> Network:
    """The machine's network."""
    ports = _ports(root)
    gpus = _gpus(root)
    devices = {port.device: (root / "sys/class/infiniband" / port.device / "device").resolve() for port in ports}
    ways = [(root / "sys/bus/pci/devices" / gpu).resolve() for gpu in gpus]
    return Network(
        ports,
        _interfaces(root),
        gpus,
        tuple(_nearest(gpu, way, devices) for gpu, way in zip(gpus, ways, strict=True) if devices),
        any(line.startswith("nvidia_peermem ") for line in read(root / "proc/modules").splitlines()),
        _dmabuf(root),
        _redirecting([*ways, *devices.values()]),
        _memlock(root),
    )


def _ports(root: Path) -> tuple[Port, ...]:
    found = []
    for folder in sorted((root / "sys/class/infiniband").glob("*/ports/*")):
        device, layer = folder.parents[1], read(folder / "link_layer")
        sizes = [_whole(read(each)) for each in sorted((device / "device/net").glob("*/mtu"))]
        mtu = min((size for size in sizes if size is not None), default=None) if layer == "Ethernet" else None
        rate = read(folder / "rate").split()
        state = read(folder / "state").split(": ")[-1]
        found.append(Port(device.name, folder.name, state, layer, float(rate[0]) if rate else None, mtu))
    return tuple(found)


def _interfaces(root: Path) -> tuple[Interface, ...]:
    folders = [folder for folder in sorted((root / "sys/class/net").glob("*")) if folder.name != "lo"]
    return tuple(
        Interface(one.name, read(one / "operstate") in ("up", "unknown"), _whole(read(one / "mtu"))) for one in folders
    )


def _gpus(root: Path) -> tuple[str, ...]:
    """PCI bus ids of NVIDIA's GPUs."""
    devices = sorted((root / "sys/bus/pci/devices").glob("*"))
    return tuple(
        one.name for one in devices
        if read(one / "vendor") == NVIDIA and read(one / "class").startswith(DISPLAYS)
    )  # fmt: skip


def _nearest(gpu: str, way: Path, devices: dict[str, Path]) -> Near:
    distance, device = min((_distance(way, other), name) for name, other in devices.items())
    return Near(gpu, device, distance)


def _distance(one: Path, other: Path) -> int:
    """How much of the machine lies between two PCI devices."""
    mine, theirs = (_bridges(device) for device in (one, other))
    if not mine or not theirs:
        return UNKNOWN
    if mine[0] == theirs[0]:  # the host bridge; a bridge below it that both hang on is a switch
        return SWITCH if len(mine) > 2 and mine[1] == theirs[1] else BRIDGE
    nodes = [_whole(read(device / "numa_node")) for device in (one, other)]
    if None in nodes:
        return UNKNOWN
    return NUMA if nodes[0] == nodes[1] else SYSTEM


def _bridges(device: Path) -> tuple[str, ...]:
    """From the host bridge down to the device."""
    parts = device.parts
    first = next((n for n, part in enumerate(parts) if part.startswith("pci") and ":" in part), None)
    return () if first is None else parts[first:]


def _dmabuf(root: Path) -> bool | None:
    """Whether the kernel is new enough and the driver is the open one, which alone exports GPU memory."""
    driver, release = read(root / "proc/driver/nvidia/version"), read(root / "proc/sys/kernel/osrelease")
    numbers = release.split(".")[:2]
    if not driver or len(numbers) < 2 or not all(number.isdecimal() for number in numbers):
        return None
    return "Open Kernel Module" in driver and (int(numbers[0]), int(numbers[1])) >= DMABUF_SINCE


def _redirecting(ways: list[Path]) -> tuple[str, ...] | None:
    """The bridges above these devices that redirect; None where one's registers cannot be read."""
    bridges = {bridge for way in ways for bridge in way.parents if read(bridge / "class").startswith(BRIDGES)}
    found = []
    for bridge in sorted(bridges):
        try:
            registers = (bridge / "config").read_bytes()
        except OSError:
            return None
        if len(registers) <= EXTENDED:  # what others than root are given
            return None
        if _acs_control(registers) & REDIRECTS:
            found.append(bridge.name)
    return tuple(found)


def _acs_control(registers: bytes) -> int:
    """The ACS control register of a PCI function, 0 where it has none."""
    at, seen = EXTENDED, set()
    while at and at not in seen and at + 8 <= len(registers):
        seen.add(at)
        header = int.from_bytes(registers[at : at + 4], "little")
        if header & 0xFFFF == ACS_CAPABILITY:
            return int.from_bytes(registers[at + 6 : at + 8], "little")
        at = header >> 20
    return 0


def _memlock(root: Path) -> int | None:
    """The soft limit in bytes; None where there is none, or it is not told."""
    for line in read(root / "proc/self/limits").splitlines():
        if line.startswith("Max locked memory"):
            return _whole(line.split()[3])
    return None


def _whole(text: str) -> int | None:
    try:
        return int(text)
    except ValueError:
        return None
