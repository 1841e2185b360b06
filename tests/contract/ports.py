"""A port of this machine for processes that are still to start."""

from __future__ import annotations

import socket
from contextlib import suppress
from pathlib import Path
from random import SystemRandom

GIVEN_AWAY = Path("/proc/sys/net/ipv4/ip_local_port_range")
LEAST = 10_000


def free_port() -> int:
    """One that nobody holds, and that the system gives to none who asks for any port or connects somewhere.

    Such a one may be another's before the processes that are to meet there have loaded torch, and one who connects to
    it meets himself when the system gives it to his own end. Raises `OSError` where none is found.
    """
    first, last = map(int, GIVEN_AWAY.read_text(encoding="utf-8").split())
    others = [port for port in range(LEAST, 1 << 16) if not first <= port <= last]
    for port in SystemRandom().sample(others, 50):  # not the seeds of tests, which are alike in all processes
        with suppress(OSError), socket.socket() as probe:
            probe.bind(("127.0.0.1", port))
            return port
    raise OSError(f"no port from {LEAST} on is free beside {first} to {last}")
