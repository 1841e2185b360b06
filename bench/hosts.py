"""Two hosts on one machine: network namespaces, and a link between them that a program can degrade.

Each host has a network interface. A thread of this process carries its packets to the other host, or drops or delays
them. The link therefore needs only namespaces and TUN devices from the kernel.
Guarantees: nothing is left when the context ends; a seed determines which packets are dropped.
"""

from __future__ import annotations

import ctypes
import fcntl
import heapq
import itertools
import json
import os
import random
import select
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

from ringattn.bench.processes import LAST_CHARACTERS, POLL_S, SPEC, result_file
from ringattn.errors import RingError, UnsupportedError

NEW_NETWORK, NEW_NAMES = 0x40000000, 0x04000000
TUN_SET_INTERFACE, TUN, NO_HEADER = 0x400454CA, 0x0001, 0x1000
ADDRESSES = ("10.77.0.1", "10.77.0.2")
PACKET_BYTES = 65536
HOST_NAME = "localhost"
"""Name of both hosts. It resolves to a loopback address, as on many machines."""


class LinkState(NamedTuple):
    """The state of the link. `lost` is the fraction of packets dropped, from the first and from the second host."""

    lost: tuple[float, float] = (0.0, 0.0)
    delay_s: float = 0.0


class TwoHosts:
    """Two network namespaces and the link between them, as a context manager. It needs root."""

    _numbers = itertools.count()

    def __init__(self, seed: int = 0) -> None:
        """Create the hosts. Raises `UnsupportedError` if namespaces or TUN devices are not permitted."""
        self.state = LinkState()
        stem = f"ringattn-{os.getpid()}-{next(self._numbers)}"
        self.namespaces = [f"{stem}-a", f"{stem}-b"]
        self._random = random.Random(seed)
        self._devices: list[int] = []
        self._wake = os.pipe()
        try:
            for namespace, address_, peer_address in zip(self.namespaces, ADDRESSES, reversed(ADDRESSES), strict=True):
                _ip("netns", "add", namespace)
                self._devices.append(_tun(namespace))
                _ip("-n", namespace, "addr", "add", address_, "peer", peer_address, "dev", "link0")
                for device in ("lo", "link0"):
                    _ip("-n", namespace, "link", "set", device, "up")
        except (OSError, subprocess.CalledProcessError) as error:
            self._remove()
            raise UnsupportedError(f"two hosts need root, network namespaces and /dev/net/tun: {error}") from error
        self._carrier = threading.Thread(target=self._carry, name="link", daemon=True)
        self._carrier.start()

    def __enter__(self) -> TwoHosts:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        os.write(self._wake[1], b"x")
        self._carrier.join()
        self._remove()

    def _carry(self) -> None:
        """Move packets from one device to the other until the context ends."""
        under_way: list[tuple[float, int, int, bytes]] = []
        count = itertools.count()
        while True:
            wait_s = max(under_way[0][0] - time.monotonic(), 0.0) if under_way else None
            readable, _, _ = select.select([*self._devices, self._wake[0]], [], [], wait_s)
            if self._wake[0] in readable:
                return
            for device in readable:
                packet, source, state = os.read(device, PACKET_BYTES), self._devices.index(device), self.state
                if self._random.random() >= state.lost[source]:
                    heapq.heappush(under_way, (time.monotonic() + state.delay_s, next(count), 1 - source, packet))
            while under_way and under_way[0][0] <= time.monotonic():
                _, _, target, packet = heapq.heappop(under_way)
                os.write(self._devices[target], packet)

    def _remove(self) -> None:
        for device in (*self._devices, *self._wake):
            os.close(device)
        for namespace in self.namespaces:
            subprocess.run(["ip", "netns", "del", namespace], check=False, capture_output=True)


def enter(namespace: str) -> None:
    """Move the calling thread into a namespace, and give its host a name that resolves to a loopback address.

    Call it before the process starts other threads.
    """
    _system("unshare", NEW_NAMES)
    socket.sethostname(HOST_NAME)
    _enter_network(namespace)


def _enter_network(namespace: str) -> None:
    with open(f"/run/netns/{namespace}") as place:
        _system("setns", place.fileno(), NEW_NETWORK)


def _system(name: str, *arguments: int) -> None:
    library = ctypes.CDLL(None, use_errno=True)
    if getattr(library, name)(*arguments):
        raise OSError(ctypes.get_errno(), f"{name}: {os.strerror(ctypes.get_errno())}")


def _tun(namespace: str) -> int:
    """Create a device `link0` in a namespace; return the descriptor through which its packets are read and written."""
    result: list[int | OSError] = []

    def create_device() -> None:
        try:
            _enter_network(namespace)
            device = os.open("/dev/net/tun", os.O_RDWR)
            fcntl.ioctl(device, TUN_SET_INTERFACE, struct.pack("16sH22x", b"link0", TUN | NO_HEADER))
            result.append(device)
        except OSError as error:
            result.append(error)

    thread = threading.Thread(target=create_device)  # a namespace belongs to a thread, so the caller stays in its own
    thread.start()
    thread.join()
    if isinstance(result[0], OSError):
        raise result[0]
    return result[0]


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)


# --- two nodes with a slow link for each rank -------------------------------------------------------------------------


NODES = 2
MTU = 9000
WAITING_BYTES = 64 << 20
"""How many bytes may queue at a rail before packets are dropped: more than TCP has in flight."""
BURST_S = 0.001
"""How long a rail may send at full speed after it was idle, to allow for the kernel's clock."""
GRACE_S = 10.0
"""How long ranks may run after one of them has failed."""
STORE, PORT = "10.76.1.1", "29500"
SETTINGS = {
    "net/ipv4/tcp_congestion_control": "reno",
    "net/ipv4/tcp_slow_start_after_idle": "0",
    "net/ipv4/conf/all/rp_filter": "0",
}


def address(node: int, place: int) -> str:
    """Return the address of the rank at `place` of `node`.

    Node 0 has the lower addresses, so each rank of node 1 opens the connection, over the rail of its peer.
    """
    return f"10.77.{1 + node}.{1 + place}"


class RailedNodes:
    """Two nodes of `places` ranks each, as a context manager. It needs root.

    A rail, a link of limited rate, joins each rank with the rank at the same place of the other node.
    """

    _numbers = itertools.count()

    def __init__(self, places: int, rate: float) -> None:
        """Create the nodes. `rate` is the bytes/s of a rail in each direction.

        Raises `UnsupportedError` if namespaces or `tc` are not permitted.
        """
        self.places = places
        self.processors = _shares(sorted(os.sched_getaffinity(0)))
        stem = f"ringattn-{os.getpid()}-{next(self._numbers)}"
        self.namespaces = [f"{stem}-{node}" for node in range(NODES)]
        try:
            for namespace in self.namespaces:
                _run("ip", "netns", "add", namespace)
                for name, value in SETTINGS.items():
                    _run("ip", "netns", "exec", namespace, "sysctl", "-qw", f"{name.replace('/', '.')}={value}")
                _run("ip", "-n", namespace, "link", "set", "lo", "up")
            self._join("store0", (STORE, "10.76.2.1"))
            for place in range(places):
                self._join(f"rail{place}", (address(0, place), address(1, place)), rate)
        except (OSError, subprocess.CalledProcessError) as error:
            self._remove()
            stderr = getattr(error, "stderr", b"") or b""
            raise UnsupportedError(
                f"two nodes need root, network namespaces, veth and tc: {error} {stderr.decode().strip()}"
            ) from error

    def __enter__(self) -> RailedNodes:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._remove()

    def run(
        self, target: str, spec: dict[str, Any], say: Callable[[str], None], transport: str, limit_s: float = 3600.0
    ) -> list[Any]:
        """Run `target` ("module:function") as `function(ring, **spec)` on every rank; return the results by rank.

        `say` gets each line that rank 0 prints. Raises `RingError` if a rank fails, at the latest `GRACE_S` seconds
        later, or if a rank runs longer than `limit_s`, with the stacks of the ranks.
        """
        ranks = NODES * self.places
        with tempfile.TemporaryDirectory() as folder:
            Path(folder, SPEC).write_text(json.dumps(spec), encoding="utf-8")
            processes = [self._start(rank, target, folder, transport) for rank in range(ranks)]
            watcher = threading.Thread(target=_end_in_time, args=(processes, limit_s), daemon=True)
            watcher.start()
            try:
                assert processes[0].stdout is not None
                for line in processes[0].stdout:
                    say(line.rstrip())
                codes = [process.wait() for process in processes]
            finally:
                for process in processes:
                    process.kill()
                    process.wait()
                watcher.join()
            if any(codes):
                errors = [Path(folder, f"errors{rank}").read_text(encoding="utf-8") for rank in range(ranks)]
                report = "\n".join(
                    f"rank {rank}: {error[-LAST_CHARACTERS:]}" for rank, error in enumerate(errors) if error
                )
                raise RingError(f"{target} on two nodes failed:\n{report}")
            return [json.loads(result_file(folder, rank).read_text(encoding="utf-8")) for rank in range(ranks)]

    def sent_bytes(self) -> list[list[int]]:
        """Return the bytes that each rail has sent so far, by sending node and place of the rail."""
        return [
            [self._statistic(namespace, f"rail{place}") for place in range(self.places)]
            for namespace in self.namespaces
        ]

    def _statistic(self, namespace: str, device: str) -> int:
        command = ["ip", "-n", namespace, "-s", "-j", "link", "show", "dev", device]
        links = json.loads(subprocess.run(command, check=True, capture_output=True).stdout)
        return int(links[0]["stats64"]["tx"]["bytes"])

    def _start(self, rank: int, target: str, folder: str, transport: str) -> subprocess.Popen[str]:
        """Start one rank on its node, with the processors of that node."""
        node, place = divmod(rank, self.places)
        processors = ",".join(map(str, self.processors[node]))
        command = ["ip", "netns", "exec", self.namespaces[node], "taskset", "-c", processors]
        environment = {
            **os.environ, "RANK": str(rank), "WORLD_SIZE": str(NODES * self.places), "LOCAL_RANK": str(place),
            "MASTER_ADDR": STORE, "MASTER_PORT": PORT, "PYTHONFAULTHANDLER": "1", "GLOO_SOCKET_IFNAME": f"rail{place}",
            "TORCHELASTIC_USE_AGENT_STORE": "False",
        }  # fmt: skip
        with Path(folder, f"errors{rank}").open("w", encoding="utf-8") as errors:
            return subprocess.Popen(
                [*command, sys.executable, "-m", "ringattn.bench.processes", target, folder, transport],
                stdout=errors if rank else subprocess.PIPE, stderr=errors, text=True, env=environment,
                cwd=Path(__file__).parents[2],
            )  # fmt: skip

    def _join(self, device: str, ends: tuple[str, str], rate: float = 0.0) -> None:
        """Create a link `device` between the nodes. `rate` limits the bytes/s in each direction; 0 is no limit."""
        first, second = self.namespaces
        _run("ip", "-n", first, "link", "add", device, "type", "veth", "peer", "name", device, "netns", second)
        for namespace, address_, peer_address in zip(self.namespaces, ends, reversed(ends), strict=True):
            _run("ip", "-n", namespace, "addr", "add", address_, "peer", peer_address, "dev", device)
            _run("ip", "-n", namespace, "link", "set", device, "mtu", str(MTU), "up")
            if rate:
                bits, burst = f"{round(8 * rate)}bit", str(round(max(rate * BURST_S, 2 * MTU)))
                _run("tc", "-n", namespace, "qdisc", "add", "dev", device, "root", "tbf",
                     "rate", bits, "burst", burst, "limit", str(WAITING_BYTES))  # fmt: skip

    def _remove(self) -> None:
        for namespace in self.namespaces:
            subprocess.run(["ip", "netns", "del", namespace], check=False, capture_output=True)


def _end_in_time(processes: Sequence[subprocess.Popen[str]], limit_s: float) -> None:
    """Wait for the end of the processes. Kill them `GRACE_S` after one has failed, and abort them after `limit_s`.

    Python prints the stacks of a process that is aborted.
    """
    last, end_s = signal.SIGABRT, time.monotonic() + limit_s
    while None in (codes := [process.poll() for process in processes]):
        if any(codes) and last == signal.SIGABRT:
            last, end_s = signal.SIGKILL, time.monotonic() + GRACE_S
        if time.monotonic() > end_s:
            for process in processes:
                process.send_signal(last)
            return
        time.sleep(POLL_S)


def _shares(processors: list[int]) -> list[list[int]]:
    """Divide the processors equally between the nodes. If there is only one processor, both nodes use it."""
    share = len(processors) // NODES
    return [processors[node * share : (node + 1) * share] or processors for node in range(NODES)]


def _run(*arguments: str) -> None:
    subprocess.run(arguments, check=True, capture_output=True)
