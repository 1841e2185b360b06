"""What the doctor makes of facts about a machine: findings, each with its level and what to do.

Pure functions of facts, so that every one of them is tested with machines that are not at hand.
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
"""Greatest absolute error of float32 against float64, on unit normal inputs; the project's own bound."""


class Finding(NamedTuple):
    """What was found about a topic, how bad it is, what to do about it, and why it matters."""

    topic: str
    level: str
    text: str
    advice: str = ""
    why: str = ""


@dataclass(frozen=True)
class Gpu:
    """One device. `capability`: (major, minor) of its architecture."""

    name: str
    capability: tuple[int, int]
    memory_bytes: int = 0


@dataclass(frozen=True)
class Link:
    """How two devices reach each other. `kind`: NVLink, or the lowest part of the machine that both hang on; `peer`:
    whether one may read the other's memory."""

    first: int
    second: int
    kind: str
    peer: bool


@dataclass(frozen=True)
class Wheel:
    """An installed distribution that brings a libnccl. `intact`: the file is the one that it brought; None: unknown."""

    name: str
    version: str
    file: str
    intact: bool | None


@dataclass(frozen=True)
class Nccl:
    """The library that this process loads, or why there is none. Versions count as `ncclGetVersion` does."""

    path: str = ""
    version: int = 0
    error: str = ""


def versions(found: Mapping[str, str | None]) -> list[Finding]:
    """Packages by name with their versions, None where one is missing."""
    findings = []
    for name, version in found.items():
        least = LEAST.get(name)
        if version is None:
            needed = name in ("torch", "numpy")
            advice = f"pip install {name}" if needed else ""
            findings.append(Finding(name, ERROR if needed else NOTE, "not installed", advice))
        elif least and _numbers(version) < least:
            wanted = ".".join(map(str, least))
            level = WARNING if name == "triton" else ERROR
            findings.append(Finding(name, level, version, f"ringattn needs {wanted} or newer: upgrade it"))
        else:
            findings.append(Finding(name, OK, version))
    return findings


def _numbers(version: str) -> tuple[int, ...]:
    """The leading numbers of a version: 2.13.0+cpu is (2, 13, 0)."""
    numbers = []
    for part in version.split("+")[0].split("."):
        if not part.isdigit():
            break
        numbers.append(int(part))
    return tuple(numbers)


def cuda(build: str | None, driver: str | None, available: bool) -> Finding:
    """Whether torch and the driver are for each other. `build`: the CUDA of this torch, None for a CPU build."""
    if build is None and driver is None:
        return Finding("CUDA", NOTE, "torch without CUDA, no NVIDIA driver: rings run on CPUs, over shared memory "
                       "within a machine and gloo between machines")  # fmt: skip
    if build is None:
        return Finding("CUDA", ERROR, f"driver {driver} is here, and this torch is a CPU build, so no GPU is used",
                       "install a CUDA build of torch (https://pytorch.org/get-started/locally)")  # fmt: skip
    if driver is None:
        return Finding("CUDA", WARNING, f"torch for CUDA {build}, and no NVIDIA driver: no GPU is used",
                       "install the driver, or start the container with its GPUs (--gpus all)")  # fmt: skip
    if not available:
        return Finding("CUDA", ERROR, f"torch for CUDA {build} finds no device under driver {driver}",
                       "look at CUDA_VISIBLE_DEVICES, and whether the driver is new enough for this CUDA")  # fmt: skip
    return Finding("CUDA", OK, f"torch for CUDA {build}, driver {driver}")


def nccl(found: Nccl, torch_version: int | None) -> list[Finding]:
    """The library against the one that torch was built with; `torch_version` is None for a CPU build."""
    if found.error:
        return [Finding("NCCL", NOTE if torch_version is None else ERROR, found.error)]
    text = f"{version_text(found.version)} from {found.path}"
    if torch_version is not None and torch_version // 100 != found.version // 100:
        was = version_text(torch_version)
        return [Finding("NCCL", WARNING, f"{text}, and torch was built with {was}",
                        "reinstall torch, so that its own NCCL wheel comes back; see the wheels below")]  # fmt: skip
    return [Finding("NCCL", OK, text)]


def wheels(found: Sequence[Wheel], cuda_build: str | None) -> list[Finding]:
    """Whether one NCCL wheel has overwritten another, or was overwritten by one that is gone."""
    if not found:
        level = NOTE if cuda_build is None else WARNING
        return [Finding("NCCL wheels", level, "none installed", "" if level == NOTE else _extra(cuda_build))]
    listed = ", ".join(f"{wheel.name} {wheel.version}" for wheel in found)
    by_file: dict[str, list[Wheel]] = {}
    for wheel in found:
        by_file.setdefault(wheel.file, []).append(wheel)
    clashes = [group for group in by_file.values() if len(group) > 1]
    for group in clashes:
        names = " and ".join(wheel.name for wheel in group)
        owner = next((wheel.name for wheel in group if wheel.intact), "neither of them")
        spare = [wheel.name for wheel in group if cuda_build and f"cu{cuda_build.split('.')[0]}" not in wheel.name]
        remove = " ".join(spare or [wheel.name for wheel in group])
        return [Finding("NCCL wheels", ERROR, f"{names} bring the same file, which is now that of {owner}",
                        f"pip uninstall {remove}, then pip install --force-reinstall --no-deps the one that torch "
                        "needs")]  # fmt: skip
    if broken := [wheel for wheel in found if wheel.intact is False]:
        names = ", ".join(wheel.name for wheel in broken)
        return [Finding("NCCL wheels", ERROR, f"the libnccl of {names} is not the file that it brought",
                        f"pip install --force-reinstall --no-deps {broken[0].name}=={broken[0].version}")]  # fmt: skip
    return [Finding("NCCL wheels", OK, listed)]


def fitting(unfit: str | None) -> list[Finding]:
    """Whether the wheels of cupy and NCCL are for this torch; `unfit`: see `transport.nccl.library.mismatch`."""
    if unfit is None:
        return []
    text, _, advice = unfit.partition(": pip ")
    return [Finding("CUDA wheels", WARNING, text, f"pip {advice}")]


def _extra(cuda_build: str | None) -> str:
    return f"pip install 'ringattn[cu{(cuda_build or '13').split('.')[0]}]'"


def devices(gpus: Sequence[Gpu], usable: bool) -> list[Finding]:
    """Each GPU with the dtypes that its generation computes in, and which engines it can run.

    `usable`: whether torch finds any, so that one that NVML does not tell of is not passed over.
    """
    if usable and not gpus:
        return [Finding("GPUs", WARNING, "torch uses a GPU, and NVML says nothing of it: no dtypes, no topology here",
                        "pip install nvidia-ml-py, or let the container see the driver's libraries")]  # fmt: skip
    findings = []
    for number, gpu in enumerate(gpus):
        topic, text = f"GPU {number}", f"{gpu.name}, {gpu.memory_bytes / 2**30:.0f} GiB, sm_{_arch(gpu)}"
        if gpu.capability < BF16_SINCE:
            findings.append(Finding(topic, WARNING, f"{text}: no bf16, and the Triton kernels need sm_80",
                                    "use dtype float16 or float32, and engine=aten or plain"))  # fmt: skip
        elif gpu.capability < FP8_SINCE:
            findings.append(Finding(topic, OK, f"{text}: bf16", "no fp8 before sm_89; kv_wire_dtype=int8 halves "
                                    "what K and V cost on the wire instead"))  # fmt: skip
        else:
            findings.append(Finding(topic, OK, f"{text}: bf16 and fp8"))
    if len({gpu.capability for gpu in gpus}) > 1:
        findings.append(Finding("GPUs", WARNING, "of different generations: every step waits for the slowest",
                                "give a ring equal devices with CUDA_VISIBLE_DEVICES"))  # fmt: skip
    return findings


def _arch(gpu: Gpu) -> str:
    return f"{gpu.capability[0]}{gpu.capability[1]}"


def topology(links: Sequence[Link]) -> list[Finding]:
    """How the devices of this machine reach each other."""
    if not links:
        return []
    text = ", ".join(f"{count} over {kind}" for kind, count in Counter(link.kind for link in links).items())
    text = f"pairs of devices: {text}"
    if apart := [f"{link.first} and {link.second}" for link in links if not link.peer]:
        advice = "messages go through the host: look at the IOMMU and ACS settings, or at the container"
        text += f"; without access to each other's memory: {', '.join(apart)}"
        return [Finding("topology", WARNING, text, advice)]
    return [Finding("topology", OK, text)]


def processors(cores: int, allowed: int, numa_nodes: int, threads: str | None) -> list[Finding]:
    """Cores of the machine and those that this process may use; `threads`: OMP_NUM_THREADS."""
    text = f"{allowed} of {cores} cores, {numa_nodes} NUMA node{'s' if numa_nodes > 1 else ''}"
    if threads is not None and threads.isdigit() and int(threads) > allowed:
        return [Finding("processors", WARNING, f"{text}; OMP_NUM_THREADS={threads} is more than there are",
                        f"set it to cores over ranks, at most {allowed}")]  # fmt: skip
    advice = "bind each rank to the node of its GPU (torchrun --numa-binding=node)" if numa_nodes > 1 else ""
    return [Finding("processors", OK, text, advice)]


def variables(environment: Mapping[str, str]) -> list[Finding]:
    """What NCCL and torch are told by the environment, and what of it does harm."""
    told = {key: value for key, value in environment.items() if key.startswith(("NCCL_", "TORCH_", "RINGATTN_"))}
    findings = []
    try:
        check_environment(environment)
    except InputError as error:
        findings.append(Finding("environment", ERROR, str(error)))
    if told.get("NCCL_P2P_DISABLE") == "1":
        findings.append(Finding("environment", WARNING, "NCCL_P2P_DISABLE=1 sends everything through the host",
                                "unset it unless it works around a fault of this machine"))  # fmt: skip
    listed = ", ".join(f"{key}={value}" for key, value in sorted(told.items()))
    return [*findings, Finding("environment", NOTE if told else OK, listed or "no NCCL_ or TORCH_ variable is set")]


def kernels_name(installed: str | None, origin: str | None) -> Finding:
    """Hugging Face's `kernels` must be what `import kernels` finds. `origin`: the file that is found, None for none."""
    if installed is None:
        return Finding("kernels", OK, "Hugging Face's package of that name is not installed, nothing can clash")
    if origin is None:
        return Finding("kernels", ERROR, f"kernels {installed} is installed, and `import kernels` finds another folder",
                       "transformers would fail: start elsewhere, or take the folder that holds kernels/ off "
                       "PYTHONPATH")  # fmt: skip
    return Finding("kernels", OK, f"Hugging Face's kernels {installed} is found")


def meeting(answers: Sequence[Mapping[str, Any]]) -> list[Finding]:
    """All ranks have met: where each is, and whether they fit together. Answers are those of `doctor_ranks`."""
    places = ", ".join(f"rank {one['rank']} on {one['host']} {one['device']}" for one in answers)
    findings = [Finding("ranks", OK, f"{len(answers)} ranks met over {answers[0]['transport']}: {places}")]
    for fact in ("torch", "ringattn", "python"):
        told = {str(one[fact]) for one in answers}
        if len(told) > 1:
            text = f"ranks have different versions of {fact}: {', '.join(sorted(told))}"
            findings.append(Finding("ranks", ERROR, text, "install the same environment on every machine"))
    gpus = [(one["host"], one["device"]) for one in answers if str(one["device"]).startswith("cuda")]
    if len(set(gpus)) < len(gpus):
        findings.append(Finding("ranks", ERROR, "two ranks share a GPU",
                                "start at most as many ranks on a machine as it has GPUs"))  # fmt: skip
    return findings


def exchange(answers: Sequence[Mapping[str, Any]]) -> list[Finding]:
    """How fast the slowest rank exchanges with its neighbors, and whether attention over all ranks is right."""
    errors = [float(one["error"]) for one in answers]
    error = next(filter(isnan, errors), max(errors))  # no comparison finds a NaN
    text = f"attention on {len(answers)} ranks over {answers[0]['transport']} differs from float64 by {error:.1e}"
    if error <= PARITY_BOUND:
        findings = [Finding("parity", OK, f"{text} (float32, forward and gradients)")]
    else:
        findings = [Finding("parity", ERROR, f"{text}, more than {PARITY_BOUND:.0e}",
                            "run `ringattn check`, and do not train on this machine before it is exact")]  # fmt: skip
    speeds = [one for one in answers if one["bandwidth"] is not None]
    if speeds:
        slowest, latency_us = min(one["bandwidth"] for one in speeds), max(one["latency_us"] for one in speeds)
        size = f"{speeds[0]['message_bytes'] / 2**20:.0f} MiB"
        text = (f"over {answers[0]['transport']}: {slowest / 1e9:.2f} GB/s each way in messages of {size}, "
                f"{latency_us:,.0f} µs for a small one")  # fmt: skip
        findings.append(Finding("exchange", OK, text))
    return findings


# --- speeds between ranks --------------------------------------------------------------------------------------------


WHY = "each step of a ring waits for its slowest pair"


def other_nodes(answers: Sequence[Mapping[str, Any]]) -> list[Finding]:
    """What is wrong with the network of the other nodes, of each as its first rank told."""
    told = [(one["host"], Finding(**each)) for one in answers for each in one.get("network", ())]
    return [each._replace(topic=f"{each.topic}, {host}") for host, each in told if each.level in (WARNING, ERROR)]


def speeds(answers: Sequence[Mapping[str, Any]]) -> list[Finding]:
    """What was measured between ranks of a node and of two, and whether the ranks' order suits a ring."""
    findings = []
    if order := next((one["order"] for one in answers if one.get("order")), None):
        text, advice = str(order).split(". ", 1)
        findings.append(Finding("rank order", WARNING, text, advice, WHY))
    pairs = [
        {**pair, "rank": one["rank"], "nics": one.get("nics", ())} for one in answers for pair in one.get("pairs", ())
    ]
    if not pairs:
        return findings
    slowest: dict[tuple[bool, str], dict[str, Any]] = {}
    for pair in pairs:
        key = pair["across"], pair["link"]
        if key not in slowest or pair["bandwidth"] < slowest[key]["bandwidth"]:
            slowest[key] = pair
    told = [
        f"{'between nodes' if across else 'inside a node'} {pair['bandwidth'] / 1e9:.2f} GB/s and "
        f"{pair['latency_us']:,.0f} µs over {link} (ranks {pair['rank']} and {pair['peer']})"
        for (across, link), pair in sorted(slowest.items())
    ]
    inside = [pair["bandwidth"] for (across, _), pair in slowest.items() if not across]
    between = [pair for (across, _), pair in slowest.items() if across]
    if inside and between:
        told.append(f"a factor of {min(inside) / min(pair['bandwidth'] for pair in between):.3g}")
    level, advice = OK, ""
    for pair in between:
        stated = max((gbps or 0.0 for _, gbps in pair["nics"]), default=0.0) / 8 * 1e9
        if pair["bandwidth"] < stated / 2:
            level = NOTE
            advice = (f"a port of rank {pair['rank']} says {stated / 1e9:.3g} GB/s: look at the findings about ports, "
                      "GPUDirect and the chosen interface on both machines")  # fmt: skip
    findings.append(Finding("links", level, "; ".join(told), advice, WHY))
    return findings
