"""Turn facts about a machine into the doctor's findings, each with its level and advice.

All functions are pure, so each can be tested with the facts of other machines.
Sources: NVIDIA's CUDA programming guide, "Compute capabilities" (bf16 from 8.0, fp8 from 8.9); `pyproject.toml` for the
versions that ringattn accepts; `nvml.h` for the levels of topology.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import isnan
from typing import Any, NamedTuple

from ringattn.errors import InputError
from ringattn.transport.nccl.binding import version_text
from ringattn.transport.nccl.options import check_environment

OK, NOTE, WARNING, ERROR = "ok", "note", "warning", "error"
LEVELS = (OK, NOTE, WARNING, ERROR)

LEAST = {"python": (3, 11), "torch": (2, 11), "numpy": (1, 26), "triton": (3, 6)}
"""The oldest versions that ringattn accepts."""
BF16_SINCE, FP8_SINCE, KERNELS_SINCE = (8, 0), (8, 9), (8, 0)
PARITY_BOUND = 1e-5
"""Bound of the absolute error of float32 compared with float64, on unit normal inputs, as in all tests."""


class Finding(NamedTuple):
    """A fact about a topic: its level, the `text` that states it, the advice, and `why` it matters."""

    topic: str
    level: str
    text: str
    advice: str = ""
    why: str = ""


@dataclass(frozen=True)
class Gpu:
    """A device. `capability` is the (major, minor) of its architecture."""

    name: str
    capability: tuple[int, int]
    memory_bytes: int = 0


@dataclass(frozen=True)
class Link:
    """The connection of two devices.

    `kind` is NVLink, or the lowest component of the machine to which both devices are connected. `peer` says whether
    each device can read the memory of the other.
    """

    first: int
    second: int
    kind: str
    peer: bool


@dataclass(frozen=True)
class Wheel:
    """An installed distribution with a libnccl.

    `intact` says whether the file on disk is the one that the distribution installed; None if this is unknown.
    """

    name: str
    version: str
    file: str
    intact: bool | None


@dataclass(frozen=True)
class Nccl:
    """The NCCL library that this process loads, or the error if it loads none. `version` is as in `ncclGetVersion`."""

    path: str = ""
    version: int = 0
    error: str = ""


def versions(packages: Mapping[str, str | None]) -> list[Finding]:
    """Check the versions of packages, by name; None stands for a missing package."""
    findings = []
    for name, version in packages.items():
        least = LEAST.get(name)
        if version is None:
            needed = name in ("torch", "numpy")
            advice = f"pip install {name}" if needed else ""
            findings.append(Finding(name, ERROR if needed else NOTE, "not installed", advice))
        elif least and _numbers(version) < least:
            required = ".".join(map(str, least))
            level = WARNING if name == "triton" else ERROR
            findings.append(Finding(name, level, version, f"ringattn needs {required} or newer: upgrade it"))
        else:
            findings.append(Finding(name, OK, version))
    return findings


def _numbers(version: str) -> tuple[int, ...]:
    """Return the leading numbers of a version: (2, 13, 0) for 2.13.0+cpu."""
    numbers = []
    for part in version.split("+")[0].split("."):
        if not part.isdigit():
            break
        numbers.append(int(part))
    return tuple(numbers)


def cuda(build: str | None, driver: str | None, available: bool) -> Finding:
    """Check that torch and the driver fit together. `build` is the CUDA version of torch, None for a CPU build."""
    if build is None and driver is None:
        return Finding("CUDA", NOTE, (
            "torch has no CUDA and there is no NVIDIA driver: rings run on CPUs, over shared memory within a "
            "machine and gloo between machines"
        ))  # fmt: skip
    if build is None:
        return Finding("CUDA", ERROR, f"driver {driver} is installed, but torch is a CPU build, so no GPU is used",
                       "install a CUDA build of torch (https://pytorch.org/get-started/locally)")  # fmt: skip
    if driver is None:
        return Finding("CUDA", WARNING, f"torch is built for CUDA {build}, but there is no NVIDIA driver",
                       "install the driver, or start the container with its GPUs (--gpus all)")  # fmt: skip
    if not available:
        return Finding("CUDA", ERROR, f"torch, built for CUDA {build}, finds no device with driver {driver}",
                       "check CUDA_VISIBLE_DEVICES, and that the driver is new enough for this CUDA")  # fmt: skip
    return Finding("CUDA", OK, f"torch for CUDA {build}, driver {driver}")


def nccl(library: Nccl, torch_version: int | None) -> list[Finding]:
    """Compare the loaded NCCL with the version that torch was built with; `torch_version` is None for a CPU build."""
    if library.error:
        return [Finding("NCCL", NOTE if torch_version is None else ERROR, library.error)]
    text = f"{version_text(library.version)} from {library.path}"
    if torch_version is not None and torch_version // 100 != library.version // 100:
        was = version_text(torch_version)
        return [Finding("NCCL", WARNING, f"{text}, but torch was built with {was}",
                        "reinstall torch to restore its NCCL wheel; see the wheels below")]  # fmt: skip
    return [Finding("NCCL", OK, text)]


def wheels(installed: Sequence[Wheel], cuda_build: str | None) -> list[Finding]:
    """Check that each installed NCCL wheel still has its own file. Installing or removing another may overwrite it."""
    if not installed:
        level = NOTE if cuda_build is None else WARNING
        return [Finding("NCCL wheels", level, "none installed", "" if level == NOTE else _extra(cuda_build))]
    listed = ", ".join(f"{wheel.name} {wheel.version}" for wheel in installed)
    by_file: dict[str, list[Wheel]] = {}
    for wheel in installed:
        by_file.setdefault(wheel.file, []).append(wheel)
    clashes = [group for group in by_file.values() if len(group) > 1]
    for group in clashes:
        names = " and ".join(wheel.name for wheel in group)
        owner = next((wheel.name for wheel in group if wheel.intact), "neither of them")
        spare = [wheel.name for wheel in group if cuda_build and f"cu{cuda_build.split('.')[0]}" not in wheel.name]
        remove = " ".join(spare or [wheel.name for wheel in group])
        return [Finding("NCCL wheels", ERROR, f"{names} install the same file, whose current version is from {owner}",
                        f"pip uninstall {remove}, then pip install --force-reinstall --no-deps the one that torch "
                        "needs")]  # fmt: skip
    if broken := [wheel for wheel in installed if wheel.intact is False]:
        names = ", ".join(wheel.name for wheel in broken)
        return [Finding("NCCL wheels", ERROR, f"the libnccl of {names} is not the file that it installed",
                        f"pip install --force-reinstall --no-deps {broken[0].name}=={broken[0].version}")]  # fmt: skip
    return [Finding("NCCL wheels", OK, listed)]


def fitting(unfit: str | None) -> list[Finding]:
    """Check that the wheels of cupy and NCCL fit torch. For `unfit` see `transport.nccl.library.mismatch`."""
    if unfit is None:
        return []
    text, _, advice = unfit.partition(": pip ")
    return [Finding("CUDA wheels", WARNING, text, f"pip {advice}")]


def _extra(cuda_build: str | None) -> str:
    return f"pip install 'ringattn[cu{(cuda_build or '13').split('.')[0]}]'"


def devices(gpus: Sequence[Gpu], usable: bool) -> list[Finding]:
    """Report each GPU with the dtypes and engines that it supports.

    `usable` says whether torch finds a GPU. If NVML reports none in this case, a warning is returned.
    """
    if usable and not gpus:
        return [Finding("GPUs", WARNING, "torch uses a GPU that NVML does not report: no dtypes, no topology here",
                        "pip install nvidia-ml-py, or mount the driver's libraries into the container")]  # fmt: skip
    findings = []
    for number, gpu in enumerate(gpus):
        topic, text = f"GPU {number}", f"{gpu.name}, {gpu.memory_bytes / 2**30:.0f} GiB, sm_{_arch(gpu)}"
        if gpu.capability < BF16_SINCE:
            findings.append(Finding(topic, WARNING, f"{text}: no bf16, and the Triton kernels need sm_80",
                                    "use dtype float16 or float32, and engine=aten or plain"))  # fmt: skip
        elif gpu.capability < FP8_SINCE:
            findings.append(Finding(topic, OK, f"{text}: bf16", "no fp8 before sm_89; kv_wire_dtype=int8 halves "
                                    "the bytes of K and V instead"))  # fmt: skip
        else:
            findings.append(Finding(topic, OK, f"{text}: bf16 and fp8"))
    if len({gpu.capability for gpu in gpus}) > 1:
        findings.append(Finding("GPUs", WARNING, "of different generations: every step waits for the slowest",
                                "use equal devices in a ring (CUDA_VISIBLE_DEVICES)"))  # fmt: skip
    return findings


def _arch(gpu: Gpu) -> str:
    return f"{gpu.capability[0]}{gpu.capability[1]}"


def topology(links: Sequence[Link]) -> list[Finding]:
    """Report the connections between the devices of this machine."""
    if not links:
        return []
    text = ", ".join(f"{count} over {kind}" for kind, count in Counter(link.kind for link in links).items())
    text = f"pairs of devices: {text}"
    if apart := [f"{link.first} and {link.second}" for link in links if not link.peer]:
        advice = "messages pass through the host: check the IOMMU and ACS settings, or the container"
        text += f"; without access to each other's memory: {', '.join(apart)}"
        return [Finding("topology", WARNING, text, advice)]
    return [Finding("topology", OK, text)]


def processors(cores: int, allowed: int, numa_nodes: int, threads: str | None) -> list[Finding]:
    """Report the cores of the machine and those that this process may use; `threads` is OMP_NUM_THREADS."""
    text = f"{allowed} of {cores} cores, {numa_nodes} NUMA node{'s' if numa_nodes > 1 else ''}"
    if threads is not None and threads.isdigit() and int(threads) > allowed:
        return [Finding("processors", WARNING, f"{text}; OMP_NUM_THREADS={threads} is more than the number of cores",
                        f"set it to cores / ranks, at most {allowed}")]  # fmt: skip
    advice = "bind each rank to the node of its GPU (torchrun --numa-binding=node)" if numa_nodes > 1 else ""
    return [Finding("processors", OK, text, advice)]


def variables(environment: Mapping[str, str]) -> list[Finding]:
    """Report the environment variables of NCCL, torch and ringattn, and warn of harmful ones."""
    settings = {key: value for key, value in environment.items() if key.startswith(("NCCL_", "TORCH_", "RINGATTN_"))}
    findings = []
    try:
        check_environment(environment)
    except InputError as error:
        findings.append(Finding("environment", ERROR, str(error)))
    if settings.get("NCCL_P2P_DISABLE") == "1":
        findings.append(Finding("environment", WARNING, "NCCL_P2P_DISABLE=1 sends all messages through the host",
                                "unset it, unless it works around a fault of this machine"))  # fmt: skip
    listed = ", ".join(f"{key}={value}" for key, value in sorted(settings.items()))
    return [*findings, Finding("environment", NOTE if settings else OK, listed or "no NCCL_ or TORCH_ variable is set")]


def kernels_name(installed: str | None, origin: str | None) -> Finding:
    """Check that `import kernels` finds Hugging Face's package. `origin` is the file that it finds, or None."""
    if installed is None:
        return Finding("kernels", OK, "Hugging Face's package `kernels` is not installed, so there is no conflict")
    if origin is None:
        return Finding("kernels", ERROR, f"kernels {installed} is installed, and `import kernels` finds another folder",
                       "transformers would fail: start in another folder, or remove the folder that holds kernels/ "
                       "from PYTHONPATH")  # fmt: skip
    return Finding("kernels", OK, f"Hugging Face's kernels {installed} is found")


def meeting(answers: Sequence[Mapping[str, Any]]) -> list[Finding]:
    """Report where each connected rank is, and check that the ranks fit together. `answers` are those of `examine`."""
    places = ", ".join(f"rank {answer['rank']} on {answer['host']} {answer['device']}" for answer in answers)
    findings = [Finding("ranks", OK, f"{len(answers)} ranks connected over {answers[0]['transport']}: {places}")]
    for fact in ("torch", "ringattn", "python"):
        values = {str(answer[fact]) for answer in answers}
        if len(values) > 1:
            text = f"ranks have different versions of {fact}: {', '.join(sorted(values))}"
            findings.append(Finding("ranks", ERROR, text, "install the same environment on every machine"))
    gpus = [(answer["host"], answer["device"]) for answer in answers if str(answer["device"]).startswith("cuda")]
    if len(set(gpus)) < len(gpus):
        findings.append(Finding("ranks", ERROR, "two ranks share a GPU",
                                "start at most one rank per GPU"))  # fmt: skip
    return findings


def exchange(answers: Sequence[Mapping[str, Any]]) -> list[Finding]:
    """Report the speed of the slowest rank with its neighbors, and check that attention on all ranks is exact."""
    errors = [float(answer["error"]) for answer in answers]
    error = next(filter(isnan, errors), max(errors))  # comparisons do not find a NaN
    text = f"attention on {len(answers)} ranks over {answers[0]['transport']} differs from float64 by {error:.1e}"
    if error <= PARITY_BOUND:
        findings = [Finding("parity", OK, f"{text} (float32, forward and gradients)")]
    else:
        findings = [Finding("parity", ERROR, f"{text}, more than {PARITY_BOUND:.0e}",
                            "run `ringattn check`, and do not train on this machine until it is exact")]  # fmt: skip
    speeds = [answer for answer in answers if answer["bandwidth"] is not None]
    if speeds:
        slowest = min(answer["bandwidth"] for answer in speeds)
        latency_us = max(answer["latency_us"] for answer in speeds)
        size = f"{speeds[0]['message_bytes'] / 2**20:.0f} MiB"
        text = (f"over {answers[0]['transport']}: {slowest / 1e9:.2f} GB/s each way in messages of {size}, "
            f"{latency_us:,.0f} µs for a small message")  # fmt: skip
        findings.append(Finding("exchange", OK, text))
    return findings


# --- speeds between ranks --------------------------------------------------------------------------------------------


WHY = "each step of a ring waits for its slowest pair"


def other_nodes(answers: Sequence[Mapping[str, Any]]) -> list[Finding]:
    """Return the warnings and errors about the networks of other nodes, which the first rank of each node found."""
    return [
        finding._replace(topic=f"{finding.topic}, {answer['host']}")
        for answer in answers
        for finding in (Finding(**fields) for fields in answer.get("network", ()))
        if finding.level in (WARNING, ERROR)
    ]


def speeds(answers: Sequence[Mapping[str, Any]]) -> list[Finding]:
    """Report the speeds between ranks within and between nodes, and check that the order of ranks suits a ring."""
    findings = []
    if order := next((answer["order"] for answer in answers if answer.get("order")), None):
        text, advice = str(order).split(". ", 1)
        findings.append(Finding("rank order", WARNING, text, advice, WHY))
    pairs = [
        {**pair, "rank": answer["rank"], "nics": answer.get("nics", ())}
        for answer in answers
        for pair in answer.get("pairs", ())
    ]
    if not pairs:
        return findings
    slowest: dict[tuple[bool, str], dict[str, Any]] = {}
    for pair in pairs:
        key = pair["across"], pair["link"]
        if key not in slowest or pair["bandwidth"] < slowest[key]["bandwidth"]:
            slowest[key] = pair
    texts = [
        f"{'between nodes' if across else 'inside a node'} {pair['bandwidth'] / 1e9:.2f} GB/s and "
        f"{pair['latency_us']:,.0f} µs over {link} (ranks {pair['rank']} and {pair['peer']})"
        for (across, link), pair in sorted(slowest.items())
    ]
    inside = [pair["bandwidth"] for (across, _), pair in slowest.items() if not across]
    between = [pair for (across, _), pair in slowest.items() if across]
    if inside and between:
        texts.append(f"a factor of {min(inside) / min(pair['bandwidth'] for pair in between):.3g}")
    level, advice = OK, ""
    for pair in between:
        stated = max((gbps or 0.0 for _, gbps in pair["nics"]), default=0.0) / 8 * 1e9
        if pair["bandwidth"] < stated / 2:
            level = NOTE
            advice = (f"a port of rank {pair['rank']} reports {stated / 1e9:.3g} GB/s: check the findings about ports, "
                      "GPUDirect and the chosen interface on both machines")  # fmt: skip
    findings.append(Finding("links", level, "; ".join(texts), advice, WHY))
    return findings
