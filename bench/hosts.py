"""Two hosts on one machine: network namespaces, and a link between them that a program can spoil.

Each host has a network interface whose packets a thread of this process carries to the other, or drops, or delays. So
the link needs nothing of the kernel but namespaces and TUN devices.
Guarantees: nothing is left when the context ends; the packets that are dropped follow from a seed.
"""

from __future__ import annotations

import ctypes
import fcntl
import heapq
import itertools
import os
import random
import select
import socket
import struct
import subprocess
import threading
import time
from types import TracebackType
from typing import NamedTuple

from ringattn.errors import UnsupportedError

NEW_NETWORK, NEW_NAMES = 0x40000000, 0x04000000
TUN_SET_INTERFACE, TUN, NO_HEADER = 0x400454CA, 0x0001, 0x1000
ADDRESSES = ("10.77.0.1", "10.77.0.2")
PACKET_BYTES = 65536
HOST_NAME = "localhost"
"""Name of both hosts. It resolves to a loopback address, as the names of many machines do."""


class LinkState(NamedTuple):
    """What happens to packets. `lost`: the part of them that is dropped, from the first host and from the second."""

    lost: tuple[float, float] = (0.0, 0.0)
    delay_s: float = 0.0


class TwoHosts:
    """Two network namespaces and the link between them. A context manager, for root."""

    _numbers = itertools.count()

    def __init__(self, seed: int = 0) -> None:
        """Raises `UnsupportedError` where namespaces or TUN devices are not permitted."""
        self.state = LinkState()
        stem = f"ringattn-{os.getpid()}-{next(self._numbers)}"
        self.namespaces = [f"{stem}-a", f"{stem}-b"]
        self._random = random.Random(seed)
        self._devices: list[int] = []
        self._wake = os.pipe()
        try:
            for namespace, mine, other in zip(self.namespaces, ADDRESSES, reversed(ADDRESSES), strict=True):
                _ip("netns", "add", namespace)
                self._devices.append(_tun(namespace))
                _ip("-n", namespace, "addr", "add", mine, "peer", other, "dev", "link0")
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
        """Hand packets from one device to the other until told to end."""
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

    Of a process only before it has other threads.
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
    """The end of a new device `link0` of a namespace, through which its packets are read and written."""
    made: list[int | OSError] = []

    def make() -> None:
        try:
            _enter_network(namespace)
            device = os.open("/dev/net/tun", os.O_RDWR)
            fcntl.ioctl(device, TUN_SET_INTERFACE, struct.pack("16sH22x", b"link0", TUN | NO_HEADER))
            made.append(device)
        except OSError as error:
            made.append(error)

    thread = threading.Thread(target=make)  # a namespace is a thread's, so this one stays where it is
    thread.start()
    thread.join()
    if isinstance(made[0], OSError):
        raise made[0]
    return made[0]


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)
