"""The constants of the machine at hand: the file that `ringattn calibrate` left, if it is of such a machine.

Guarantees: a prediction that nobody asked another cluster for is of this machine, or there is none.
"""

from __future__ import annotations

import json
import os
import platform
from pathlib import Path

from ringattn.errors import InputError
from ringattn.planner.cluster import Cluster, cluster_named

FILE = "calibrated.json"
"""What `ringattn calibrate` writes if it is not told otherwise."""
VARIABLE = "RINGATTN_CALIBRATION"
"""Where else that file lies."""
NONE = "none: this machine is not calibrated; run `ringattn calibrate` here, or name other machines, as cluster=h100"


def own_cluster() -> Cluster | None:
    """This machine's constants; None where it was not calibrated, or where the file is of another kind of machine.

    Raises `InputError` for a file that `RINGATTN_CALIBRATION` names and that cannot be read.
    """
    path = Path(os.environ.get(VARIABLE) or FILE)
    if not path.is_file():
        if VARIABLE in os.environ:
            raise InputError(f"{VARIABLE}={path}: there is no such file; `ringattn calibrate out={path}` writes one")
        return None
    cluster = cluster_named(str(path))
    return cluster if json.loads(path.read_text(encoding="utf-8")).get("hardware") == hardware() else None


def hardware() -> str:
    """The class of this machine, without its name."""
    import torch

    if torch.cuda.is_available():
        return f"{torch.cuda.device_count()} x {torch.cuda.get_device_name()}"
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:  # not Linux: the architecture must do
        lines = []
    family = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")
    return f"{len(os.sched_getaffinity(0))} cores, {family or platform.machine()}"
