"""The machines of one job, and the store through which their ranks find each other.

The launcher of node 0 hosts the store on a socket that it binds itself: to loopback if the job has a single machine,
else to the address of `endpoint`. torch itself would bind all interfaces, even for `TCPStore("127.0.0.1", ...)`.
Several nodes register in the store before any rank starts. Guarantees: two launchers with the same `node_rank`, and
launchers with different numbers of nodes or ranks, are refused. The error for a node that was not started names its
number.
"""

from __future__ import annotations

import errno
import ipaddress
import json
import socket
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, NamedTuple, NoReturn

from ringattn.launch.processes import RanksError

if TYPE_CHECKING:  # torch is imported after the ranks were started
    from torch.distributed import TCPStore

    from ringattn.transport.control_store import BoundedStore

LOOPBACK = "127.0.0.1"
LOOK_S = 0.1
LEAVE_S = 10.0
"""How long node 0 keeps the store for nodes that are still closing their rings."""


@dataclass(frozen=True)
class Nodes:
    """The machines of one job: their number, and the `rank` of this machine among them.

    `endpoint`: host:port of node 0, where all nodes register within `timeout_s`; empty if there is a single machine.
    """

    count: int = 1
    rank: int = 0
    endpoint: str = ""
    timeout_s: float = 600.0


ALONE = Nodes()


class Meeting(NamedTuple):
    """The address of a job's store. `run_id` is unique to the job and the same on all nodes."""

    host: str
    port: int
    run_id: str
    open_store: Callable[[], object]
    """A function that hosts the store, if there is a single node. Call it after the ranks are started, because it
    imports torch, which is slow. With several nodes it does nothing: the store is already open.
    """


@contextmanager
def meeting(nodes: Nodes, ranks: int) -> Iterator[Meeting]:
    """Register with the other nodes, each of which starts `ranks` ranks, and yield the address of the store.

    At the end of the block, node 0 waits for the other nodes before it closes the store. Raises `RanksError` if a node
    does not register in time.
    """
    if not nodes.endpoint:
        stores: list[TCPStore] = []
        with _listening(LOOPBACK, 0) as listener:
            port = listener.getsockname()[1]
            yield Meeting(LOOPBACK, port, uuid.uuid4().hex, lambda: stores.append(_hosted(listener)))
        return
    from torch.distributed import PrefixStore

    from ringattn.transport.control_store import BoundedStore

    host, port = _parsed(nodes.endpoint)
    opened = _hosted(_listening(host, port)) if nodes.rank == 0 else _joined(host, port, nodes)
    store = BoundedStore(PrefixStore("ringattn/nodes", opened), nodes.timeout_s)
    try:
        run_id = _met(store, nodes, ranks)
    except RanksError:
        time.sleep(5 * LOOK_S)  # gives the other nodes time to read the reason in the store
        raise
    except RuntimeError as error:
        raise RanksError(f"node 0 has ended; see its message ({error})", "nodes") from error
    yield Meeting(host, port, run_id, lambda: None)
    with suppress(RuntimeError):  # node 0 may have ended, but no answer of a rank is missing
        store.set(f"left/{nodes.rank}", "")
        if nodes.rank == 0:
            _wait(store, "left", nodes.count, LEAVE_S)


def _parsed(endpoint: str) -> tuple[str, int]:
    host, _, port = endpoint.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 2**16:
        raise RanksError(f"rdzv_endpoint={endpoint}: write host:port, with a free port of node 0", "nodes", True)
    return host.strip("[]"), int(port)


def _listening(host: str, port: int) -> socket.socket:
    """Return a socket that listens only on the address of `host`, or on all interfaces if this machine lacks it.

    A machine lacks the address behind address translation, and if /etc/hosts maps the machine's name to loopback.
    """
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except socket.gaierror as error:
        raise RanksError(f"the host of rdzv_endpoint, {host}, has no address ({error.strerror})", "nodes") from None
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        if ipaddress.ip_address(address[0]).is_loopback and not _is_loopback_name(host):
            raise OSError(errno.EADDRNOTAVAIL, f"{host} is {address[0]} here")
        listener.bind(address)
    except OSError as error:
        if error.errno != errno.EADDRNOTAVAIL:
            raise _not_bound(port, error) from None
        print(
            f"ringattn: {host} is not an address of this machine, so the store listens on all addresses",
            file=sys.stderr,
        )
        try:
            listener.bind(("", port))
        except OSError as second:
            raise _not_bound(port, second) from None
    listener.listen()
    return listener


def _not_bound(port: int, error: OSError) -> RanksError:
    """Return the error for a port on which node 0 cannot listen."""
    if error.errno == errno.EADDRINUSE:
        return RanksError(
            f"the port of rdzv_endpoint, {port}, is in use on node 0: choose another port, the same on all nodes, or "
            "end the process that uses it. If this is not node 0, give this node a different node_rank",
            "nodes",
        )
    return RanksError(
        f"node 0 cannot listen on the port of rdzv_endpoint, {port} ({error.strerror}): choose another port, the "
        "same on all nodes",
        "nodes",
    )


def _is_loopback_name(host: str) -> bool:
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _hosted(listener: socket.socket) -> TCPStore:
    """Return a store that this process hosts on the socket."""
    from torch.distributed import TCPStore

    host, port = listener.getsockname()[:2]
    if ipaddress.ip_address(host).is_unspecified:
        host = LOOPBACK
    return TCPStore(host, port, None, True, wait_for_workers=False, master_listen_fd=listener.detach())


def _joined(host: str, port: int, nodes: Nodes) -> TCPStore:
    """Connect to the store of node 0, retrying until `nodes.timeout_s`. Raises `RanksError` if it does not answer."""
    from torch.distributed import TCPStore

    ends, limit = time.monotonic() + nodes.timeout_s, timedelta(seconds=nodes.timeout_s)
    while True:
        try:
            socket.create_connection((host, port), timeout=max(1.0, ends - time.monotonic())).close()
            return TCPStore(host, port, None, False, limit)
        except (OSError, RuntimeError) as error:
            if time.monotonic() > ends:
                raise RanksError(
                    f"node 0 does not answer at {host}:{port}: check the host and port of rdzv_endpoint, that "
                    f"node_rank=0 is started there, and that no firewall blocks the connection ({error})",
                    "nodes",
                ) from None
            time.sleep(LOOK_S)


def _met(store: BoundedStore, nodes: Nodes, ranks: int) -> str:
    """Register this node and wait until all nodes have registered. Return the job's run id, which node 0 draws.

    Raises `RanksError` on all waiting nodes if two nodes contradict each other or one does not register in time.
    """
    sizes = {"nnodes": nodes.count, "ranks": ranks}
    if nodes.rank == 0:
        store.set("job", json.dumps({**sizes, "run_id": uuid.uuid4().hex}))
    elif not _appears(store, "job", nodes.timeout_s):
        raise RanksError(
            "node 0 hosts the store but started no job: end the command on node 0, then start all nodes again", "nodes"
        )
    job = json.loads(store.get("job"))
    for key, value in sizes.items():
        if value != job[key]:
            _refuse(
                store,
                (f"{key}={value} on node {nodes.rank}, but {key}={job[key]} on node 0: give all nodes the same value"),
            )
    claim = uuid.uuid4().hex
    if store.compare_set(f"arrived/{nodes.rank}", "", claim).decode() != claim:
        _refuse(store, f"node_rank={nodes.rank} was given to two nodes: give each node a different number")
    if missing := _wait(store, "arrived", nodes.count, nodes.timeout_s):
        _refuse(
            store,
            f"nodes {missing} of {nodes.count} did not arrive within {nodes.timeout_s:g} s: start `ringattn run` on "
            "each with the same rdzv_endpoint and nnodes and its own node_rank, or raise timeout_s",
            refused=False,
        )
    return str(job["run_id"])


def _refuse(store: BoundedStore, message: str, refused: bool = True) -> NoReturn:
    """Raise `RanksError` here, and leave `message` in the store, so that all waiting nodes raise it too."""
    store.set("refusal", json.dumps({"message": message, "refused": refused}))
    raise RanksError(message, "nodes", refused)


def _appears(store: BoundedStore, key: str, seconds: float) -> bool:
    """Wait until the store has `key`; return False if it has not after `seconds`. Raises `RanksError` on a refusal."""
    ends = time.monotonic() + seconds
    while not store.check([key]):
        if store.check(["refusal"]):
            _refuse(store, **json.loads(store.get("refusal")))
        if time.monotonic() > ends:
            return False
        time.sleep(LOOK_S)
    return True


def _wait(store: BoundedStore, stem: str, count: int, seconds: float) -> list[int]:
    """Wait until the store has the key `stem/NODE` of each of `count` nodes.

    Return the nodes whose key is missing at the end.
    """
    ends = time.monotonic() + seconds
    return [node for node in range(count) if not _appears(store, f"{stem}/{node}", ends - time.monotonic())]
