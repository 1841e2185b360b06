"""The class of machine and the versions that a measurement was made with, and which commit of this package.

Guarantees: no machine, user or path is named.
"""

from __future__ import annotations

import os
import platform
import subprocess
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

PACKAGES = ("torch", "numpy", "triton", "nvidia-nccl-cu12", "nvidia-nccl-cu13", "hydra-core")
PACKAGE = Path(__file__).resolve().parents[2]
"""The checkout, or the folder of the installed package."""


def environment() -> dict[str, Any]:
    """What may change a measurement, as JSON: processors, memory, GPU, versions, variables of NCCL and threads."""
    import torch

    cuda = torch.cuda.is_available()
    return {
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "system": f"{platform.system()} {platform.machine()}",
        "gpu": torch.cuda.get_device_name() if cuda else None,
        "gpus": torch.cuda.device_count(),
        "cuda": torch.version.cuda,
        "python": platform.python_version(),
        "packages": {name: _version(name) for name in PACKAGES},
        "variables": {key: os.environ[key] for key in sorted(os.environ) if key.startswith(("NCCL_", "OMP_"))},
    }


@cache
def code_version() -> str:
    """The commit of the checkout that runs, `-dirty` after it where files differ; else the package's version.

    As it was when this process first asked.
    """
    try:
        _git("ls-files", "--error-unmatch", "launch/measure/environment.py")  # else it is another project's checkout
        return _git("describe", "--always", "--dirty", "--abbrev=12", "--exclude=*")
    except (OSError, subprocess.CalledProcessError):
        return _version("ringattn") or "unknown"


def _git(*words: str) -> str:
    done = subprocess.run(["git", "-C", str(PACKAGE), *words], capture_output=True, text=True, check=True)
    return done.stdout.strip()


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
