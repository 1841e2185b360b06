"""`ringattn doctor`: looks at this machine, its packages and its ranks, and says what to do about what it finds.

Alone it starts two processes that meet, exchange and attend; under torchrun all of its ranks do. They use the transport
that a ring takes on this machine, or the one of the option `transport`, and the findings name it.
Guarantees: it ends, with a finding for whatever cannot be found out; returns 1 only for a finding of level error.
Each rank measures message times and bandwidth, and compares one attention call with a float64 reference.
A package or a driver that is missing or broken is a fact, never an error.
Not covered: the meaning of a fact (`probes`, `network`).
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import platform
import socket
import sys
from base64 import urlsafe_b64encode
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import metadata
from itertools import combinations, pairwise
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import TYPE_CHECKING, Any

import torch
from torch.utils import collect_env

import ringattn
from ringattn.errors import InputError, RingError
from ringattn.launch.calls import TRANSPORT_NAMES
from ringattn.launch.doctor import network, probes
from ringattn.launch.doctor.network import network_facts
from ringattn.launch.doctor.probes import ERROR, LEVELS, NOTE, OK, WARNING, Finding, Gpu, Link, Nccl, Wheel
from ringattn.launch.folders import json_output
from ringattn.launch.options import json_option, load_plain, option
from ringattn.launch.ranks import place_in_torchrun, run_ranks_in_processes
from ringattn.planner.cluster import Links
from ringattn.ring import Ring
from ringattn.testing import dense_attention
from ringattn.transport.base import Message
from ringattn.transport.location import order_advice
from ringattn.transport.nccl.library import installed, load_library, mismatch
from ringattn.transport.nodes import NodesTransport

if TYPE_CHECKING:
    from rich.console import Console

# --- what the ranks measure -------------------------------------------------------------------------------------------


LARGE_BYTES, SMALL_BYTES = 16 * 2**20, 64
MEDIUM_BYTES, LONG_S = 2**20, 0.25
"""Where large messages take longer than that, pairs exchange smaller ones."""
REPEATS = {LARGE_BYTES: 5, SMALL_BYTES: 30}
PAIR_REPEATS = {LARGE_BYTES: 3, MEDIUM_BYTES: 3, SMALL_BYTES: 10}
TOKENS, HEADS, KV_HEADS, HEAD_DIM = 257, 4, 2, 32


def examined(spec: dict[str, Any]) -> dict[str, Any]:
    """One process of a loopback; `spec` has `transport` and `timeout_s`. See `examine`."""
    with Ring(transport=spec["transport"], timeout_s=spec["timeout_s"]) as ring:
        return examine(ring)


def examine(ring: Ring) -> dict[str, Any]:
    """This rank's answer: where it is, bytes/s, microseconds, and its greatest absolute error."""
    large_s, small_s = (_neighbors_s(ring, nbytes) for nbytes in (LARGE_BYTES, SMALL_BYTES))
    here = ring.locations[ring.rank] if ring.locations else None
    return {
        "rank": ring.rank,
        "host": socket.gethostname(),
        "device": str(ring.device),
        "transport": ring.transport.ways if isinstance(ring.transport, NodesTransport) else ring.transport.name,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "ringattn": installed("ringattn"),
        "message_bytes": LARGE_BYTES,
        "bandwidth": None if large_s is None else LARGE_BYTES / large_s,
        "latency_us": None if small_s is None else small_s * 1e6,
        "error": _parity(ring),
        "nics": list(here.nics) if here else [],
        "order": order_advice(ring.locations),
        "pairs": _pairs(ring, large_s),
        "network": _network(ring),
    }


def _network(ring: Ring) -> list[dict[str, Any]]:
    """The findings about the network of this rank's node, from its first rank; rank 0's node is looked at anyway."""
    if ring.links is None or ring.rank == 0 or ring.links.nodes.index(ring.links.nodes[ring.rank]) != ring.rank:
        return []
    return [one._asdict() for one in network.network(network_facts(), os.environ, nccl_library().version)]


def _neighbors_s(ring: Ring, nbytes: int) -> float | None:
    """Median seconds in which every rank sends `nbytes` to the next one; None for a rank that is alone."""
    if ring.world_size == 1:
        return None
    after, before = (ring.rank + 1) % ring.world_size, (ring.rank - 1) % ring.world_size
    return _exchange_s(ring, nbytes, REPEATS[nbytes], after, before)


def _exchange_s(ring: Ring, nbytes: int, repeats: int, after: int | None, before: int | None) -> float | None:
    """Median seconds of an exchange, which all ranks begin together; a rank without peers only waits for the others."""
    transport, times = ring.transport, []
    sent, received = transport.allocate(nbytes), transport.allocate(nbytes)
    for _ in range(1 + repeats):
        ring.barrier()
        if after is None or before is None:
            continue
        with ring.guarded():
            start = perf_counter()
            transport.exchange([Message(after, sent, "doctor")], [Message(before, received, "doctor")]).wait()
            transport.drain()
            times.append(perf_counter() - start)
    return median(times[1:]) if times else None  # the first one connects


def _pairs(ring: Ring, large_s: float | None) -> list[dict[str, Any]]:
    """What this rank measured with ranks of higher number, of each class of link and between neighboring nodes."""
    if ring.links is None or large_s is None:
        return []
    slowest_s = max(map(float, ring.all_gather_text(repr(large_s))))
    nbytes = LARGE_BYTES if slowest_s < LONG_S else MEDIUM_BYTES
    found = []
    for measured in rounds(ring.links):
        peer = next((sum(pair) - ring.rank for pair in measured if ring.rank in pair), None)
        seconds, small_s = (_exchange_s(ring, size, PAIR_REPEATS[size], peer, peer) for size in (nbytes, SMALL_BYTES))
        if seconds is not None and small_s is not None and peer is not None and peer > ring.rank:
            found.append({
                "peer": peer, "link": ring.links.of(ring.rank, peer).value, "bandwidth": nbytes / seconds,
                "latency_us": small_s * 1e6, "across": ring.links.nodes[ring.rank] != ring.links.nodes[peer],
            })  # fmt: skip
    return found


def rounds(links: Links) -> list[list[tuple[int, int]]]:
    """Pairs of ranks that exchange at the same time, each rank in one of them at most.

    First a pair of every node, then one of each class that only some pairs of a node have, then each node with the
    next.
    """
    members: dict[int, list[int]] = {}
    for rank, node in enumerate(links.nodes):
        members.setdefault(node, []).append(rank)
    inside = [(ranks[0], ranks[1]) for ranks in members.values() if len(ranks) > 1]
    seen = {links.of(*pair) for pair in inside}
    unlike = {kind: (first, second) for first, second, kind in reversed(links.exceptions) if kind not in seen}
    leaders = [ranks[0] for ranks in members.values()]
    between = list(pairwise(leaders))
    return [one for one in (inside, *([pair] for pair in unlike.values()), between[::2], between[1::2]) if one]


def _parity(ring: Ring) -> float:
    """The greatest absolute error of out, dq, dk and dv: float32, causal, zigzag, against dense float64."""
    generator = torch.Generator().manual_seed(0)
    whole = [
        torch.randn(1, TOKENS, heads, HEAD_DIM, generator=generator).to(ring.device)
        for heads in (HEADS, KV_HEADS, KV_HEADS, HEADS)
    ]
    seq = ring.sequence(TOKENS, layout="zigzag")
    q, k, v = leaves = [seq.shard(x).clone().requires_grad_() for x in whole[:3]]
    out = ring.attention(q, k, v, seq, causal=True)
    assert isinstance(out, torch.Tensor)
    got = [out.detach(), *torch.autograd.grad(out, leaves, seq.shard(whole[3]))]
    ring.synchronize()
    exact = [x.double().requires_grad_() for x in whole[:3]]
    dense, _ = dense_attention(*exact, causal=True)
    want = [dense.detach(), *torch.autograd.grad(dense, exact, whole[3].double())]
    errors = [(mine.double() - seq.shard(reference)).abs().max() for mine, reference in zip(got, want, strict=True)]
    return float(torch.stack(errors).max())


# --- the command ------------------------------------------------------------------------------------------------------


LOOPBACK_RANKS = 2
STYLES = {OK: "green", NOTE: "cyan", WARNING: "yellow", ERROR: "bold red"}
WIDTH = 160
"""Columns of the table where the output has no width of its own."""

Say = Callable[[str], None]


@dataclass
class DoctorConfig:
    """The transport of the ranks, how long they take at most, and where the figures go."""

    transport: str = option("auto", "what carries the messages; auto: what Ring takes here", choices=TRANSPORT_NAMES)
    timeout_s: float = option(30.0, "deadline of every wait for another rank, in seconds", above=0.0)
    json: str = json_option()


def main(argv: Sequence[str]) -> int:
    """The command. Raises `InputError` for bad options."""
    if "--json" in argv:
        raise InputError("--json: write json=- to print the figures, or json=FILE")
    config = load_plain(argv, DoctorConfig)
    place = place_in_torchrun()
    silent = place is not None and place.rank != 0
    findings: list[Finding] = []
    system: dict[str, Any] = {}
    # Looking waits for other programs most of the time; the ranks are started here, where an interrupt ends them.
    with _progress(silent) as say, ThreadPoolExecutor(1) as aside:
        looking = None if silent else aside.submit(_looked, say)
        answers, met = (_under_torchrun if place else _loopback)(say, config.transport, config.timeout_s)
        if looking is not None:
            findings, system = looking.result()
    findings += met
    if not silent:
        with json_output(config.json) as write:
            write(_shown(findings, system, answers))
    return int(any(finding.level == ERROR for finding in findings))


@contextmanager
def _progress(silent: bool) -> Iterator[Say]:
    """Lines on standard error, so that standard output is the document alone; one that changes on a terminal."""
    console = _console(stderr=True)
    if silent:
        yield lambda line: None
    elif console is not None and console.is_terminal:
        with console.status("doctor") as status:
            yield lambda line: status.update(f"doctor: {line}")
    else:
        yield lambda line: print(f"doctor: {line}", file=sys.stderr, flush=True)


def _looked(say: Say) -> tuple[list[Finding], dict[str, Any]]:
    """All findings that need no other process, and torch's own account of the system."""
    build = torch.version.cuda
    account: dict[str, Any] = {}
    found: list[Finding] = []

    def look_at_system() -> list[Finding]:
        account.update(system())
        return []

    def devices() -> list[Finding]:
        driver, gpus, links = nvml()
        driver = driver or account.get("nvidia_driver_version")
        on_gpu = probes.cuda(build, driver, torch.cuda.is_available())
        forms = [Finding("kernels' forms", OK, told) for told in kernel_forms(gpus)]
        return [on_gpu, *probes.devices(gpus, torch.cuda.is_available()), *forms, *probes.topology(links)]

    looks: dict[str, Callable[[], Sequence[Finding]]] = {
        "packages": lambda: probes.versions(package_versions()),
        "system": look_at_system,
        "devices": devices,
        "processors": lambda: probes.processors(*cores(), os.environ.get("OMP_NUM_THREADS")),
        "NCCL": lambda: probes.nccl(nccl_library(), torch_nccl()),
        "NCCL wheels": lambda: probes.wheels(nccl_wheels(), build),
        "CUDA wheels": lambda: probes.fitting(mismatch(build)),
        "network": lambda: network.network(network_facts(), os.environ, nccl_library().version),
        "environment": lambda: probes.variables(os.environ),
        "kernels": lambda: [probes.kernels_name(installed("kernels"), kernels_origin())],
    }
    for topic, look in looks.items():
        say(topic)
        try:
            found += look()
        except Exception as error:  # on a machine that nobody has thought of, the other findings still help
            text = f"could not be looked at: {type(error).__name__}: {error}"
            found.append(Finding(topic, WARNING, text, "report this with the output of `ringattn doctor json=-`"))
    return found, account


def _loopback(say: Say, transport: str, timeout_s: float) -> tuple[list[dict[str, Any]], list[Finding]]:
    """Two processes of this machine."""
    transport = _transport_of_loopback(transport, torch.cuda.device_count() if torch.cuda.is_available() else 0)
    say(f"two processes meet over {transport_text(transport)}, exchange, and attend")
    spec = {"transport": transport, "timeout_s": timeout_s}
    try:
        answers = run_ranks_in_processes(
            "ringattn.launch.doctor.doctor:examined", spec, LOOPBACK_RANKS, 2 * timeout_s, limit_key="timeout_s"
        )
    except RingError as error:
        return [], [_apart(error)]
    return answers, judged(answers)


def _transport_of_loopback(transport: str, gpus: int) -> str:
    """Return the transport for two processes on a machine with `gpus` devices."""
    # A rank needs a GPU of its own, and auto takes NCCL where there is one.
    return "shm" if transport == "auto" and 0 < gpus < LOOPBACK_RANKS else transport


def transport_text(transport: str) -> str:
    """Return the transport for a sentence."""
    return "the transport that a ring takes here" if transport == "auto" else transport


def _under_torchrun(say: Say, transport: str, timeout_s: float) -> tuple[list[dict[str, Any]], list[Finding]]:
    """All ranks that torchrun started; every one of them has all answers."""
    say("all ranks meet, exchange, and attend")
    try:
        with ringattn.Ring(transport=transport, timeout_s=timeout_s) as ring:
            answers = [json.loads(told) for told in ring.all_gather_text(json.dumps(examine(ring)))]
    except Exception as error:  # whatever a device or its driver raises
        return [], [_apart(error)]
    return answers, judged(answers)


def judged(answers: Sequence[dict[str, Any]]) -> list[Finding]:
    """The findings about ranks that have met."""
    return [*probes.meeting(answers), *probes.exchange(answers), *probes.speeds(answers), *probes.other_nodes(answers)]


def _apart(error: Exception) -> Finding:
    advice = "are MASTER_ADDR and its port reachable from every machine, and does a firewall stand between them?"
    return Finding("ranks", ERROR, str(error), advice)


def _shown(findings: Sequence[Finding], system: dict[str, Any], answers: Sequence[Any]) -> dict[str, Any]:
    """Print the findings and return all figures."""
    counts = Counter(finding.level for finding in findings)
    console = _console()
    if console is None:
        _print_lines(findings)
    else:
        _print_table(findings, console if console.is_terminal else _console(width=WIDTH))
    print(", ".join(f"{counts[level]} {level}" for level in LEVELS if counts[level]))
    return {
        "passed": not counts[ERROR],
        "counts": {level: counts[level] for level in LEVELS},
        "findings": [finding._asdict() for finding in findings],
        "ranks": answers,
        "system": system,
    }


def _print_table(findings: Sequence[Finding], console: Any) -> None:
    from rich import box
    from rich.markup import escape
    from rich.table import Table

    table = Table("about", "", box=box.SIMPLE_HEAD)
    for name in ("found", "why it matters", "what to do"):
        table.add_column(name, overflow="fold")
    for one in findings:
        words = escape(one.text), escape(one.why), escape(one.advice)
        table.add_row(one.topic, f"[{STYLES[one.level]}]{one.level}[/]", *words)
    console.print(table)


def _print_lines(findings: Sequence[Finding]) -> None:
    """The same where rich is not installed."""
    for one in findings:
        print(f"{one.topic:<14} {one.level:<8} {one.text}")
        for words in filter(None, (one.why, one.advice)):
            print(f"{'':<24}{words}")


def _console(**options: Any) -> Console | None:
    """A console of rich; None where that is not installed, for the doctor is run where little is."""
    try:
        from rich.console import Console
    except ImportError:
        return None
    return Console(**options)


# --- facts: a package or a driver that is missing or broken is one, never an error -----------------------------------


PACKAGES = ("torch", "numpy", "triton", "hydra-core")
CUPY = ("cupy-cuda13x", "cupy-cuda12x", "cupy")
ANCESTORS = ((0, "one board"), (10, "one PCIe switch"), (20, "several PCIe switches"), (30, "a PCIe host bridge"),
             (40, "the NUMA node"), (50, "the whole system"))  # fmt: skip
"""Levels of topology as NVML counts them, in words."""


def package_versions() -> dict[str, str | None]:
    """Versions by name, None for what is missing; cupy under whichever name it has."""
    cupy = next(((name, version) for name in CUPY if (version := installed(name))), ("cupy", None))
    return {"python": platform.python_version(), **{name: installed(name) for name in PACKAGES}, cupy[0]: cupy[1]}


def system() -> dict[str, Any]:
    """What `python -m torch.utils.collect_env` prints, by name; takes a second or two."""
    return dict(collect_env.get_env_info()._asdict())


def nccl_library() -> Nccl:
    """The libnccl that this process has or loads now."""
    try:
        library = load_library()
    except RingError as error:
        return Nccl(error=str(error))
    return Nccl(library.path, library.version)


def torch_nccl() -> int | None:
    """The version that torch was built with, as `ncclGetVersion` counts; None for a CPU build."""
    if torch.version.cuda is None:
        return None
    major, minor, patch = torch.cuda.nccl.version()[:3]
    return int(major * 10000 + minor * 100 + patch)


def nccl_wheels(distributions: Iterable[metadata.Distribution] | None = None) -> list[Wheel]:
    """The installed nvidia-nccl-* distributions, and whether the libnccl on disk is the one that each brought."""
    found = []
    for distribution in metadata.distributions() if distributions is None else distributions:
        name = distribution.metadata["Name"] or ""
        if not name.startswith("nvidia-nccl"):
            continue
        for file in distribution.files or ():
            if file.name.startswith("libnccl.so"):
                path = Path(str(distribution.locate_file(file)))
                found.append(Wheel(name, distribution.version, str(path), _intact(path, file.hash)))
    return sorted(found, key=lambda wheel: wheel.name)


def _intact(path: Path, recorded: metadata.FileHash | None) -> bool | None:
    """Whether the file has the hash that was recorded when it was installed (PEP 376: base64 without padding)."""
    if not path.exists():
        return False
    if recorded is None:
        return None
    with path.open("rb") as content:
        digest = hashlib.file_digest(content, recorded.mode).digest()
    return urlsafe_b64encode(digest).decode().rstrip("=") == recorded.value


def nvml() -> tuple[str | None, list[Gpu], list[Link]]:
    """The driver, the devices and how they reach each other, from NVML; no driver, nothing."""
    try:
        import pynvml

        pynvml.nvmlInit()
    except Exception:  # no package, no driver, or one without the other
        return None, [], []
    handles = [pynvml.nvmlDeviceGetHandleByIndex(n) for n in range(pynvml.nvmlDeviceGetCount())]
    gpus = [
        Gpu(
            pynvml.nvmlDeviceGetName(handle),
            tuple(pynvml.nvmlDeviceGetCudaComputeCapability(handle)),
            pynvml.nvmlDeviceGetMemoryInfo(handle).total,
        )
        for handle in handles
    ]
    links = [_link(pynvml, first, second, handles) for first, second in combinations(range(len(handles)), 2)]
    return pynvml.nvmlSystemGetDriverVersion(), gpus, links


def kernel_forms(gpus: Sequence[Gpu]) -> list[str]:
    """Which forms of our own kernels would run on each kind of device, in words."""
    try:
        import ringattn.engine.forms as forms
    except ModuleNotFoundError as error:  # triton comes with CUDA builds of torch alone
        return [f"engine='triton' does not run here: no {error.name}"]
    visible = range(torch.cuda.device_count())
    kinds = {gpu.capability for gpu in gpus} or {torch.cuda.get_device_capability(n) for n in visible}
    return [forms.on_device(kind) for kind in sorted(kinds)] or ["engine='triton' does not run here: no GPU"]


def _link(pynvml: Any, first: int, second: int, handles: list[Any]) -> Link:
    pair = handles[first], handles[second]
    try:
        return _connection(pynvml, first, second, pair)
    except pynvml.NVMLError as error:  # virtual machines hide what lies between devices
        return Link(first, second, f"an unknown way ({error})", True)


def _connection(pynvml: Any, first: int, second: int, pair: tuple[Any, Any]) -> Link:
    peer = pynvml.nvmlDeviceGetP2PStatus(*pair, pynvml.NVML_P2P_CAPS_INDEX_READ) == pynvml.NVML_P2P_STATUS_OK
    if pynvml.nvmlDeviceGetP2PStatus(*pair, pynvml.NVML_P2P_CAPS_INDEX_NVLINK) == pynvml.NVML_P2P_STATUS_OK:
        return Link(first, second, "NVLink", peer)
    level = pynvml.nvmlDeviceGetTopologyCommonAncestor(*pair)
    return Link(first, second, dict(ANCESTORS).get(level, f"level {level}"), peer)


def cores() -> tuple[int, int, int]:
    """Cores of the machine, cores that this process may use, NUMA nodes."""
    nodes = list(Path("/sys/devices/system/node").glob("node[0-9]*"))
    return os.cpu_count() or 1, len(os.sched_getaffinity(0)), max(1, len(nodes))


def kernels_origin() -> str | None:
    """The file that `import kernels` would load; None for nothing, or for a folder without `__init__.py`."""
    spec = importlib.util.find_spec("kernels")
    return None if spec is None else spec.origin
