"""Facts about this machine and its packages, for the doctor to judge.

Guarantees: a package or a driver that is missing or broken is a fact, never an error.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import platform
from base64 import urlsafe_b64encode
from collections.abc import Iterable, Sequence
from importlib import metadata
from itertools import combinations
from pathlib import Path
from typing import Any

import torch
from torch.utils import collect_env

from ringattn.errors import RingError
from ringattn.launch.doctor.probes import Gpu, Link, Nccl, Wheel
from ringattn.transport.nccl.library import installed, load_library

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
