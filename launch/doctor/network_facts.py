"""Facts about a machine's network, from /sys and /proc below a root that tests plant.

Guarantees: a file that is not there or cannot be read is an unknown fact, never an error.
"""

from __future__ import annotations

from pathlib import Path

from ringattn.launch.doctor.network import BRIDGE, NUMA, SWITCH, SYSTEM, UNKNOWN, Interface, Near, Network, Port
from ringattn.transport.location import read

NVIDIA, DISPLAYS, BRIDGES = "0x10de", ("0x0300", "0x0302"), "0x0604"
ACS_CAPABILITY, EXTENDED = 0x000D, 0x100
REDIRECTS = 0x04 | 0x08
"""Of the ACS control register: requests and completions of peers go up."""
DMABUF_SINCE = (5, 12)


def network_facts(root: Path = Path("/")) -> Network:
    """The machine's network."""
    ports = _ports(root)
    gpus = _gpus(root)
    devices = {port.device: _path(root / "sys/class/infiniband" / port.device / "device") for port in ports}
    ways = [_path(root / "sys/bus/pci/devices" / gpu) for gpu in gpus]
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


def _path(device: Path) -> Path:
    """The device in the tree of bridges."""
    return device.resolve()


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
