"""`ringattn doctor`: check this machine, its packages and its ranks, and suggest fixes.

It starts two processes that connect, exchange messages and compute attention. Under torchrun, all ranks do so instead.
They use the transport that a ring would choose on this machine, or that of the option `transport`, and the findings
name it. Each rank measures message times and bandwidth, and compares one attention call with a float64 reference.
Guarantees: it ends, with a finding for each fact that it cannot determine. It returns 1 only for a finding of level
error. A missing or broken package or driver is a fact, not an exception.
Not covered: the judgement of facts, which is in `probes` and `network`.
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
"""If large messages take longer than `LONG_S`, pairs of ranks exchange messages of `MEDIUM_BYTES` instead."""
REPEATS = {LARGE_BYTES: 5, SMALL_BYTES: 30}
PAIR_REPEATS = {LARGE_BYTES: 3, MEDIUM_BYTES: 3, SMALL_BYTES: 10}
TOKENS, HEADS, KV_HEADS, HEAD_DIM = 257, 4, 2, 32


def examined(spec: dict[str, Any]) -> dict[str, Any]:
    """Run one process on this machine; `spec` has `transport` and `timeout_s`. See `examine`."""
    with Ring(transport=spec["transport"], timeout_s=spec["timeout_s"]) as ring:
        return examine(ring)


def examine(ring: Ring) -> dict[str, Any]:
    """Measure on this rank; return its host and device, bandwidth, latency, and largest absolute error of attention."""
    large_s, small_s = (_neighbors_s(ring, nbytes) for nbytes in (LARGE_BYTES, SMALL_BYTES))
    location = ring.locations[ring.rank] if ring.locations else None
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
        "nics": list(location.nics) if location else [],
        "order": order_advice(ring.locations),
        "pairs": _pairs(ring, large_s),
        "network": _network(ring),
    }


def _network(ring: Ring) -> list[dict[str, Any]]:
    """Return findings about the network of this node if this is its first rank, else an empty list.

    On rank 0 the list is also empty, because `_checked` reports the findings of its node.
    """
    if ring.links is None or ring.rank == 0 or ring.links.nodes.index(ring.links.nodes[ring.rank]) != ring.rank:
        return []
    findings = network.network(network_facts(), os.environ, nccl_library().version)
    return [finding._asdict() for finding in findings]


def _neighbors_s(ring: Ring, nbytes: int) -> float | None:
    """Return the median seconds of an exchange in which each rank sends `nbytes` to the next; None for one rank."""
    if ring.world_size == 1:
        return None
    after, before = (ring.rank + 1) % ring.world_size, (ring.rank - 1) % ring.world_size
    return _exchange_s(ring, nbytes, REPEATS[nbytes], after, before)


def _exchange_s(ring: Ring, nbytes: int, repeats: int, after: int | None, before: int | None) -> float | None:
    """Return the median seconds of an exchange that all ranks start together.

    A rank without peers takes part only in the barriers, and gets None.
    """
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
    return median(times[1:]) if times else None  # the first exchange also connects


def _pairs(ring: Ring, large_s: float | None) -> list[dict[str, Any]]:
    """Measure messages between pairs of ranks: for each class of link, and between neighboring nodes.

    `large_s` is the time of a large message on this rank; None if it was not measured. The lower rank of a pair returns
    the figures.
    """
    if ring.links is None or large_s is None:
        return []
    slowest_s = max(map(float, ring.all_gather_text(repr(large_s))))
    nbytes = LARGE_BYTES if slowest_s < LONG_S else MEDIUM_BYTES
    results = []
    for pairs in rounds(ring.links):
        peer = next((sum(pair) - ring.rank for pair in pairs if ring.rank in pair), None)
        seconds, small_s = (_exchange_s(ring, size, PAIR_REPEATS[size], peer, peer) for size in (nbytes, SMALL_BYTES))
        if seconds is not None and small_s is not None and peer is not None and peer > ring.rank:
            results.append({
                "peer": peer, "link": ring.links.of(ring.rank, peer).value, "bandwidth": nbytes / seconds,
                "latency_us": small_s * 1e6, "across": ring.links.nodes[ring.rank] != ring.links.nodes[peer],
            })  # fmt: skip
    return results


def rounds(links: Links) -> list[list[tuple[int, int]]]:
    """Return the pairs of ranks to measure, in rounds. The pairs of a round exchange at the same time.

    A rank is in at most one pair of a round. The first round has one pair of each node. Each of the following rounds
    has one pair for a class of link that is not in the first round. The last two rounds pair each node with the next.
    """
    members: dict[int, list[int]] = {}
    for rank, node in enumerate(links.nodes):
        members.setdefault(node, []).append(rank)
    inside = [(ranks[0], ranks[1]) for ranks in members.values() if len(ranks) > 1]
    seen = {links.of(*pair) for pair in inside}
    unlike = {kind: (first, second) for first, second, kind in reversed(links.exceptions) if kind not in seen}
    leaders = [ranks[0] for ranks in members.values()]
    between = list(pairwise(leaders))
    return [pairs for pairs in (inside, *([pair] for pair in unlike.values()), between[::2], between[1::2]) if pairs]


def _parity(ring: Ring) -> float:
    """Return the largest absolute error of out, dq, dk and dv of a float32 call compared with float64."""
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
    errors = [(shard.double() - seq.shard(reference)).abs().max() for shard, reference in zip(got, want, strict=True)]
    return float(torch.stack(errors).max())


# --- the command ------------------------------------------------------------------------------------------------------


LOOPBACK_RANKS = 2
STYLES = {OK: "green", NOTE: "cyan", WARNING: "yellow", ERROR: "bold red"}
WIDTH = 160
"""Columns of the table if the output is not a terminal."""

Say = Callable[[str], None]


@dataclass
class DoctorConfig:
    """The options of the doctor."""

    transport: str = option("auto", "transport of the messages; auto: that of Ring", choices=TRANSPORT_NAMES)
    timeout_s: float = option(30.0, "deadline of every wait for another rank, in seconds", above=0.0)
    json: str = json_option()


def main(argv: Sequence[str]) -> int:
    """Run the command. Raises `InputError` for bad options."""
    if "--json" in argv:
        raise InputError("--json: write json=- to print the figures, or json=FILE")
    config = load_plain(argv, DoctorConfig)
    place = place_in_torchrun()
    silent = place is not None and place.rank != 0
    findings: list[Finding] = []
    system: dict[str, Any] = {}
    # The checks mostly wait for other programs, so they run in a thread. The ranks start in the main thread, which
    # receives Ctrl-C and ends them.
    with _progress(silent) as say, ThreadPoolExecutor(1) as pool:
        checks = None if silent else pool.submit(_checked, say)
        answers, of_ranks = (_under_torchrun if place else _loopback)(say, config.transport, config.timeout_s)
        if checks is not None:
            findings, system = checks.result()
    findings += of_ranks
    if not silent:
        with json_output(config.json) as write:
            write(_shown(findings, system, answers))
    return int(any(finding.level == ERROR for finding in findings))


@contextmanager
def _progress(silent: bool) -> Iterator[Say]:
    """Show progress on standard error: one changing line on a terminal, plain lines elsewhere."""
    console = _console(stderr=True)
    if silent:
        yield lambda line: None
    elif console is not None and console.is_terminal:
        with console.status("doctor") as status:
            yield lambda line: status.update(f"doctor: {line}")
    else:
        yield lambda line: print(f"doctor: {line}", file=sys.stderr, flush=True)


def _checked(say: Say) -> tuple[list[Finding], dict[str, Any]]:
    """Return all findings that need no other rank, and torch's description of the system."""
    build = torch.version.cuda
    description: dict[str, Any] = {}
    findings: list[Finding] = []

    def describe_system() -> list[Finding]:
        description.update(system())
        return []

    def devices() -> list[Finding]:
        driver, gpus, links = nvml()
        driver = driver or description.get("nvidia_driver_version")
        on_gpu = probes.cuda(build, driver, torch.cuda.is_available())
        forms = [Finding("kernels' forms", OK, text) for text in kernel_forms(gpus)]
        if gpus:
            forms += compiler()
        return [on_gpu, *probes.devices(gpus, torch.cuda.is_available()), *forms, *probes.topology(links)]

    checks: dict[str, Callable[[], Sequence[Finding]]] = {
        "packages": lambda: probes.versions(package_versions()),
        "system": describe_system,
        "devices": devices,
        "processors": lambda: probes.processors(*cores(), os.environ.get("OMP_NUM_THREADS")),
        "NCCL": lambda: probes.nccl(nccl_library(), torch_nccl()),
        "NCCL wheels": lambda: probes.wheels(nccl_wheels(), build),
        "CUDA wheels": lambda: probes.fitting(mismatch(build)),
        "network": lambda: network.network(network_facts(), os.environ, nccl_library().version),
        "environment": lambda: probes.variables(os.environ),
        "kernels": lambda: [probes.kernels_name(installed("kernels"), kernels_origin())],
    }
    for topic, check in checks.items():
        say(topic)
        try:
            findings += check()
        except Exception as error:  # on an unexpected machine, the other findings still help
            text = f"could not be checked: {type(error).__name__}: {error}"
            findings.append(Finding(topic, WARNING, text, "report this with the output of `ringattn doctor json=-`"))
    return findings, description


def _loopback(say: Say, transport: str, timeout_s: float) -> tuple[list[dict[str, Any]], list[Finding]]:
    """Start two ranks on this machine. Return their answers and the findings about them."""
    transport = _transport_of_loopback(transport, torch.cuda.device_count() if torch.cuda.is_available() else 0)
    say(f"two processes connect over {transport_text(transport)}, exchange messages and attend")
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
    # Auto chooses NCCL if there is a GPU, but NCCL needs a GPU for each rank.
    return "shm" if transport == "auto" and 0 < gpus < LOOPBACK_RANKS else transport


def transport_text(transport: str) -> str:
    """Return the name of the transport as it appears in a sentence."""
    return "the transport that a ring takes here" if transport == "auto" else transport


def _under_torchrun(say: Say, transport: str, timeout_s: float) -> tuple[list[dict[str, Any]], list[Finding]]:
    """Check all ranks that torchrun started. Return the answers of all ranks and the findings about them."""
    say("all ranks connect, exchange messages and attend")
    try:
        with ringattn.Ring(transport=transport, timeout_s=timeout_s) as ring:
            answers = [json.loads(answer) for answer in ring.all_gather_text(json.dumps(examine(ring)))]
    except Exception as error:  # whatever a device or its driver raises
        return [], [_apart(error)]
    return answers, judged(answers)


def judged(answers: Sequence[dict[str, Any]]) -> list[Finding]:
    """Return the findings about connected ranks."""
    return [*probes.meeting(answers), *probes.exchange(answers), *probes.speeds(answers), *probes.other_nodes(answers)]


def _apart(error: Exception) -> Finding:
    advice = "check that every machine can connect to MASTER_ADDR and MASTER_PORT, and that no firewall blocks the port"
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
    for finding in findings:
        texts = escape(finding.text), escape(finding.why), escape(finding.advice)
        table.add_row(finding.topic, f"[{STYLES[finding.level]}]{finding.level}[/]", *texts)
    console.print(table)


def _print_lines(findings: Sequence[Finding]) -> None:
    """Print the findings without rich."""
    for finding in findings:
        print(f"{finding.topic:<14} {finding.level:<8} {finding.text}")
        for text in filter(None, (finding.why, finding.advice)):
            print(f"{'':<24}{text}")


def _console(**options: Any) -> Console | None:
    """Return a console of rich, or None without rich, because the doctor must also run with torch alone."""
    try:
        from rich.console import Console
    except ImportError:
        return None
    return Console(**options)


# --- facts: a missing or broken package or driver is a fact, not an exception ----------------------------------------


PACKAGES = ("torch", "numpy", "triton", "hydra-core")
CUPY = ("cupy-cuda13x", "cupy-cuda12x", "cupy")
ANCESTORS = ((0, "one board"), (10, "one PCIe switch"), (20, "several PCIe switches"), (30, "a PCIe host bridge"),
             (40, "the NUMA node"), (50, "the whole system"))  # fmt: skip
"""The levels of topology of NVML."""


def package_versions() -> dict[str, str | None]:
    """Return the versions of packages by name, None for missing ones; cupy under the name of its wheel."""
    cupy = next(((name, version) for name in CUPY if (version := installed(name))), ("cupy", None))
    return {"python": platform.python_version(), **{name: installed(name) for name in PACKAGES}, cupy[0]: cupy[1]}


def system() -> dict[str, Any]:
    """Return the facts that `python -m torch.utils.collect_env` prints, by name. This takes one or two seconds."""
    return dict(collect_env.get_env_info()._asdict())


def nccl_library() -> Nccl:
    """Return path and version of this process's libnccl, after loading it if necessary."""
    try:
        library = load_library()
    except RingError as error:
        return Nccl(error=str(error))
    return Nccl(library.path, library.version)


def torch_nccl() -> int | None:
    """Return the NCCL version that torch was built with, as in `ncclGetVersion`; None for a CPU build."""
    if torch.version.cuda is None:
        return None
    major, minor, patch = torch.cuda.nccl.version()[:3]
    return int(major * 10000 + minor * 100 + patch)


def nccl_wheels(distributions: Iterable[metadata.Distribution] | None = None) -> list[Wheel]:
    """Return the installed nvidia-nccl-* distributions, each with whether it installed the libnccl on disk."""
    wheels = []
    for distribution in metadata.distributions() if distributions is None else distributions:
        name = distribution.metadata["Name"] or ""
        if not name.startswith("nvidia-nccl"):
            continue
        for file in distribution.files or ():
            if file.name.startswith("libnccl.so"):
                path = Path(str(distribution.locate_file(file)))
                wheels.append(Wheel(name, distribution.version, str(path), _intact(path, file.hash)))
    return sorted(wheels, key=lambda wheel: wheel.name)


def _intact(path: Path, recorded: metadata.FileHash | None) -> bool | None:
    """Return whether the file has the hash recorded at its installation (PEP 376: base64 without padding)."""
    if not path.exists():
        return False
    if recorded is None:
        return None
    with path.open("rb") as content:
        digest = hashlib.file_digest(content, recorded.mode).digest()
    return urlsafe_b64encode(digest).decode().rstrip("=") == recorded.value


def nvml() -> tuple[str | None, list[Gpu], list[Link]]:
    """Return the driver's version, the devices and their connections from NVML; (None, [], []) without NVML."""
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
    """Return a sentence for each compute capability that names the forms of ringattn's kernels that run on it."""
    try:
        import ringattn.engine.forms as forms
    except ModuleNotFoundError as error:  # only CUDA builds of torch install triton
        return [f"engine='triton' does not run here: {error.name} is not installed"]
    visible = range(torch.cuda.device_count())
    kinds = {gpu.capability for gpu in gpus} or {torch.cuda.get_device_capability(n) for n in visible}
    return [forms.on_device(kind) for kind in sorted(kinds)] or ["engine='triton' does not run here: no GPU"]


def compiler() -> list[Finding]:
    """Check for the C compiler with which Triton builds its launcher; no finding without Triton."""
    try:
        from ringattn.kernels.launch import compiler_missing
    except ModuleNotFoundError:
        return []
    missing = compiler_missing()
    text, _, advice = (missing or "Triton can build its launcher").partition(": ")
    return [Finding("C compiler", WARNING if missing else OK, text, advice)]


def _link(pynvml: Any, first: int, second: int, handles: list[Any]) -> Link:
    pair = handles[first], handles[second]
    try:
        return _connection(pynvml, first, second, pair)
    except pynvml.NVMLError as error:  # virtual machines hide the topology
        return Link(first, second, f"an unknown way ({error})", True)


def _connection(pynvml: Any, first: int, second: int, pair: tuple[Any, Any]) -> Link:
    peer = pynvml.nvmlDeviceGetP2PStatus(*pair, pynvml.NVML_P2P_CAPS_INDEX_READ) == pynvml.NVML_P2P_STATUS_OK
    if pynvml.nvmlDeviceGetP2PStatus(*pair, pynvml.NVML_P2P_CAPS_INDEX_NVLINK) == pynvml.NVML_P2P_STATUS_OK:
        return Link(first, second, "NVLink", peer)
    level = pynvml.nvmlDeviceGetTopologyCommonAncestor(*pair)
    return Link(first, second, dict(ANCESTORS).get(level, f"level {level}"), peer)


def cores() -> tuple[int, int, int]:
    """Return the numbers of cores of the machine, of cores that this process may use, and of NUMA nodes."""
    nodes = list(Path("/sys/devices/system/node").glob("node[0-9]*"))
    return os.cpu_count() or 1, len(os.sched_getaffinity(0)), max(1, len(nodes))


def kernels_origin() -> str | None:
    """Return the file that `import kernels` would load; None if it finds nothing or a folder without `__init__.py`."""
    spec = importlib.util.find_spec("kernels")
    return None if spec is None else spec.origin
