"""While a command of a single machine runs, none of its processes listens anywhere but on loopback.

Processes are those below the command; their sockets are those of /proc/PID/fd that /proc/net/tcp has in state LISTEN.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
LISTEN = "0A"
LOOPBACK = re.compile(r"^(0{24}|0{16}F{4}0{4})?[0-9A-F]{6}7F$|^0{24}01000000$")
"""127.0.0.0/8, the same as an IPv6 address, and ::1, as /proc/net has them: words of four bytes, each reversed."""

COMMANDS = {
    "run": "run ranks=2 tokens=64 shape=small warmup=1 repeats=1 transport=gloo",
    "run by shared memory": "run ranks=2 tokens=64 shape=small warmup=1 repeats=1",
    "sweep": "sweep out=points ranks=2 tokens=64 shape=small warmup=1 repeats=1 transport=gloo schedule=ring",
    "check": "check ranks=2 transport=gloo tokens=23 combinations=pairs",
    "train": "train ranks=2 replicas=2 batch=2 model=tiny tokens=64 steps=2 checkpoint_every_steps=1 transport=gloo",
    "timeline": "timeline ranks=2 tokens=64 picture=",
    "calibrate": "calibrate ranks=2 transport=gloo rounds=1",
    "doctor": "doctor --json",
    "demo": "demo ranks=2 steps=2 tokens=64 model=tiny",
}


def is_loopback(address: str) -> bool:
    return LOOPBACK.match(address) is not None


def listening(command: int) -> set[str]:
    """The addresses on which the process `command` and those below it listen, as in /proc/net."""
    sockets = set()
    for process in below(command):
        for descriptor in Path(f"/proc/{process}/fd").glob("*"):
            with suppress(OSError):
                sockets.add(os.readlink(descriptor))
    addresses = set()
    for name in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{name}").read_text(encoding="ascii").splitlines()[1:]:
            fields = line.split()
            if fields[3] == LISTEN and f"socket:[{fields[9]}]" in sockets:
                addresses.add(fields[1].partition(":")[0])
    return addresses


def below(command: int) -> list[int]:
    """The process and all that it started, directly or not."""
    processes = [command]
    for process in processes:
        for children in Path(f"/proc/{process}/task").glob("*/children"):
            with suppress(OSError):
                processes += map(int, children.read_text(encoding="ascii").split())
    return processes


def test_a_listening_process_is_seen() -> None:
    """The test of the test: a child that listens on every interface, on loopback, and on both kinds of addresses."""
    code = (
        "import socket, sys\nlisteners = [socket.create_server((host, 0), family=family) for host, family in "
        "(('127.0.0.1', 2), ('::1', 10), ('', 2), ('::', 10))]\nprint(flush=True)\nsys.stdin.read()"
    )
    starts = f"import subprocess, sys\nsubprocess.run([sys.executable, '-c', {code!r}])"
    command = subprocess.Popen([sys.executable, "-c", starts], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert command.stdout is not None and command.stdout.readline()
    addresses = listening(command.pid)
    command.communicate()
    assert {address for address in addresses if is_loopback(address)} == {"0100007F", "0" * 24 + "01000000"}
    assert {address for address in addresses if not is_loopback(address)} == {"0" * 8, "0" * 32}
    assert is_loopback("0" * 16 + "FFFF0000" + "0100007F") and not is_loopback("0100000A")


@pytest.mark.slow
@pytest.mark.parametrize("words", COMMANDS.values(), ids=COMMANDS)
def test_commands_listen_on_loopback_only(tmp_path: Path, words: str) -> None:
    environment = {name: value for name, value in os.environ.items() if not name.endswith("SOCKET_IFNAME")}
    with (tmp_path / "printed").open("wb") as printed:
        command = subprocess.Popen(
            [sys.executable, "-m", "ringattn", *words.split()],
            cwd=tmp_path, env={**environment, "PYTHONPATH": str(ROOT)}, stdout=printed, stderr=printed,
        )  # fmt: skip
    seen: set[str] = set()
    try:
        while command.poll() is None:
            seen |= listening(command.pid)
            time.sleep(0.02)
    finally:
        command.terminate()
        command.wait()
    assert command.returncode == 0, (tmp_path / "printed").read_text()
    assert seen and all(map(is_loopback, seen)), seen
