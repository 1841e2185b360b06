"""Two nodes on one machine: network namespaces joined by slow links, one for each of a node's ranks (rails).

The kernel holds each direction of a rail to a rate (a token bucket, `tc`). What the ranks of node 0 send takes the rail
of the sender; what they receive, the rail of the receiver. A link without a limit joins the nodes beside the rails, for
the store. Each node has an equal share of the machine's processors.
Guarantees: no namespace and no process is left when the context ends; a rank's failure raises with what it printed.
"""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

from ringattn.bench.processes import LAST_CHARACTERS, SPEC, result_file
from ringattn.errors import RingError, UnsupportedError

NODES = 2
MTU = 9000
WAITING_BYTES = 64 << 20
"""How much may wait at a rail before packets are dropped: more than TCP has under way."""
BURST_S = 0.001
"""How long a rail may send at full speed after it was idle: the kernel's clock needs some."""
STORE, PORT = "10.76.1.1", "29500"
SETTINGS = {
    "net/ipv4/tcp_congestion_control": "reno",
    "net/ipv4/tcp_slow_start_after_idle": "0",
    "net/ipv4/conf/all/rp_filter": "0",
}


def address(node: int, place: int) -> str:
    """Of a rank: node 0 has the lower ones, so it is node 1 that connects, over the rail of its peer."""
    return f"10.77.{1 + node}.{1 + place}"


class RailedNodes:
    """Two nodes of `places` ranks each. A context manager, for root."""

    _numbers = itertools.count()

    def __init__(self, places: int, rate: float) -> None:
        """`rate`: bytes/s of a rail, each way. Raises `UnsupportedError` where namespaces or `tc` are not permitted."""
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
            said = getattr(error, "stderr", b"") or b""
            raise UnsupportedError(
                f"two nodes need root, network namespaces, veth and tc: {error} {said.decode().strip()}"
            ) from error

    def __enter__(self) -> RailedNodes:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._remove()

    def run(self, target: str, spec: dict[str, Any], say: Callable[[str], None], transport: str) -> list[Any]:
        """Run `target` ("module:function") as `function(ring, **spec)` on every rank; the results by rank.

        What rank 0 prints is shown. Raises `RingError` when a rank fails.
        """
        ranks = NODES * self.places
        with tempfile.TemporaryDirectory() as folder:
            Path(folder, SPEC).write_text(json.dumps(spec), encoding="utf-8")
            processes = [self._start(rank, target, folder, transport) for rank in range(ranks)]
            try:
                assert processes[0].stdout is not None
                for line in processes[0].stdout:
                    say(line.rstrip())
                codes = [process.wait() for process in processes]
            finally:
                for process in processes:
                    process.kill()
                    process.wait()
            if any(codes):
                said = [Path(folder, f"errors{rank}").read_text(encoding="utf-8") for rank in range(ranks)]
                words = "\n".join(f"rank {rank}: {one[-LAST_CHARACTERS:]}" for rank, one in enumerate(said) if one)
                raise RingError(f"{target} on two nodes failed:\n{words}")
            return [json.loads(result_file(folder, rank).read_text(encoding="utf-8")) for rank in range(ranks)]

    def sent_bytes(self) -> list[list[int]]:
        """What each rail has carried since it was made, by node that sent it and place."""
        return [
            [self._statistic(namespace, f"rail{place}") for place in range(self.places)]
            for namespace in self.namespaces
        ]

    def _statistic(self, namespace: str, device: str) -> int:
        words = ["ip", "-n", namespace, "-s", "-j", "link", "show", "dev", device]
        found = json.loads(subprocess.run(words, check=True, capture_output=True).stdout)
        return int(found[0]["stats64"]["tx"]["bytes"])

    def _start(self, rank: int, target: str, folder: str, transport: str) -> subprocess.Popen[str]:
        """One rank, on its node and its node's processors."""
        node, place = divmod(rank, self.places)
        own = ",".join(map(str, self.processors[node]))
        command = ["ip", "netns", "exec", self.namespaces[node], "taskset", "-c", own]
        environment = {
            **os.environ, "RANK": str(rank), "WORLD_SIZE": str(NODES * self.places), "LOCAL_RANK": str(place),
            "MASTER_ADDR": STORE, "MASTER_PORT": PORT, "GLOO_SOCKET_IFNAME": f"rail{place}",
        }  # fmt: skip
        with Path(folder, f"errors{rank}").open("w", encoding="utf-8") as errors:
            return subprocess.Popen(
                [*command, sys.executable, "-m", "ringattn.bench.processes", target, folder, transport],
                stdout=errors if rank else subprocess.PIPE, stderr=errors, text=True, env=environment,
                cwd=Path(__file__).parents[2],
            )  # fmt: skip

    def _join(self, device: str, ends: tuple[str, str], rate: float = 0.0) -> None:
        """A link between the nodes, held to `rate` bytes/s each way; 0: not at all."""
        one, other = self.namespaces
        _run("ip", "-n", one, "link", "add", device, "type", "veth", "peer", "name", device, "netns", other)
        for namespace, mine, theirs in zip(self.namespaces, ends, reversed(ends), strict=True):
            _run("ip", "-n", namespace, "addr", "add", mine, "peer", theirs, "dev", device)
            _run("ip", "-n", namespace, "link", "set", device, "mtu", str(MTU), "up")
            if rate:
                bits, burst = f"{round(8 * rate)}bit", str(round(max(rate * BURST_S, 2 * MTU)))
                _run("tc", "-n", namespace, "qdisc", "add", "dev", device, "root", "tbf",
                     "rate", bits, "burst", burst, "limit", str(WAITING_BYTES))  # fmt: skip

    def _remove(self) -> None:
        for namespace in self.namespaces:
            subprocess.run(["ip", "netns", "del", namespace], check=False, capture_output=True)


def _shares(processors: list[int]) -> list[list[int]]:
    """As many processors for each node; where there is one, they share it."""
    share = len(processors) // NODES
    return [processors[node * share : (node + 1) * share] or processors for node in range(NODES)]


def _run(*words: str) -> None:
    subprocess.run(words, check=True, capture_output=True)
