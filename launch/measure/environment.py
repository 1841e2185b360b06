"""This machine: its class, the versions of packages, the commit of this package, and the calibrated constants.

Guarantees: no host, user or path appears in the result. If no cluster is named, a prediction uses the calibrated
constants of this machine; without a calibration there is no prediction.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ringattn.planner.cluster import CALIBRATED, Cluster

if TYPE_CHECKING:
    from ringattn.ring import Ring

PACKAGES = ("torch", "numpy", "triton", "nvidia-nccl-cu12", "nvidia-nccl-cu13", "hydra-core")
PACKAGE = Path(__file__).resolve().parents[2]
"""The checkout, or the folder of the installed package."""


def environment() -> dict[str, Any]:
    """Return the facts of this machine that may change a measurement, as plain data.

    They are processors, memory, GPUs, versions, and the environment variables of NCCL and OpenMP.
    """
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
    """Return the commit of the running checkout, with `-dirty` if files differ; without git, the package's version.

    The result of the first call in this process is cached.
    """
    try:
        _git("ls-files", "--error-unmatch", "launch/measure/environment.py")  # fails in another project's checkout
        return _git("describe", "--always", "--dirty", "--abbrev=12", "--exclude=*")
    except (OSError, subprocess.CalledProcessError):
        return _version("ringattn") or "unknown"


def _git(*arguments: str) -> str:
    done = subprocess.run(["git", "-C", str(PACKAGE), *arguments], capture_output=True, text=True, check=True)
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


# --- constants of this machine ---------------------------------------------------------------------------------------


CALIBRATION_FILE = CALIBRATED
"""Default output file of `ringattn calibrate`."""
NOT_CALIBRATED = (
    "none: this machine is not calibrated; run `ringattn calibrate` here, or name a cluster, as cluster=h100"
)


def own_cluster() -> Cluster | None:
    """Return this machine's constants, or None if it is not calibrated or the file is of another kind of machine.

    Raises `InputError` if `RINGATTN_CALIBRATION` names a file that cannot be read.
    """
    from ringattn.transport.location import VARIABLE, own_calibration  # imports torch

    calibration = json.loads(own_calibration(os.environ.get(VARIABLE)) or "{}")
    return Cluster(**calibration["constants"]) if "constants" in calibration else None


def cluster_over(transport: str) -> tuple[Cluster | None, str]:
    """Return this machine's constants for messages over `transport`, or None and the reason as a sentence.

    A calibration measures the messages of one transport and cannot predict those of another. An empty `transport` means
    that no messages are sent. Raises `InputError` as `own_cluster` does.
    """
    from ringattn.transport.location import VARIABLE, own_calibration  # imports torch

    calibration = json.loads(own_calibration(os.environ.get(VARIABLE)) or "{}")
    if "unfit" in calibration:
        return None, f"none: {calibration['unfit']}; run `ringattn calibrate` here"
    if not calibration:
        return None, NOT_CALIBRATED
    if transport and transport != calibration["transport"]:
        return None, (
            f"none: this machine is calibrated for {calibration['transport']}, but messages use {transport}; run "
            f"`ringattn calibrate transport={transport}`"
        )
    return Cluster(**calibration["constants"]), ""


def cluster_for(ring: Ring) -> tuple[Cluster | None, str]:
    """Return this machine's constants for the messages of `ring`, or None and the reason, as `cluster_over` does.

    For a ring on several nodes the constants are None, because a calibration covers one machine.
    """
    if ring.links is not None and max(ring.links.nodes):
        return None, "none: a calibration covers one machine, and these ranks run on several; name cluster="
    return cluster_over(ring.transport.name if ring.world_size > 1 else "")


def hardware() -> str:
    """Return the class of this machine, without its name."""
    from ringattn.transport import location  # imports torch

    return location.hardware()
