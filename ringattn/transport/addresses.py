"""Which address a rank of a gloo ring is reached at.

Gloo takes what the name of the host resolves to, which on many machines is a loopback address that no other host can
reach. Here a rank takes its address on the route to the meeting point, the store's host, which every rank reaches.
"""

from __future__ import annotations

import fcntl
import json
import socket
import struct
from collections.abc import Sequence
from ipaddress import ip_address
from typing import NamedTuple

import torch.distributed as dist

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
