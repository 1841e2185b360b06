"""The constants of the machine at hand: the file that `ringattn calibrate` left, if it is of such a machine.

Guarantees: a prediction that nobody asked another cluster for is of this machine, or there is none.
"""

from __future__ import annotations

import json
import os

from ringattn.planner.cluster import CALIBRATED, Cluster

FILE = CALIBRATED
"""What `ringattn calibrate` writes if it is not told otherwise."""
NONE = "none: this machine is not calibrated; run `ringattn calibrate` here, or name other machines, as cluster=h100"


def own_cluster() -> Cluster | None:
    """This machine's constants; None where it was not calibrated, or where the file is of another kind of machine.

    Raises `InputError` for a file that `RINGATTN_CALIBRATION` names and that cannot be read.
    """
    from ringattn.transport.location import VARIABLE, own_calibration  # imports torch

    found = json.loads(own_calibration(os.environ.get(VARIABLE)) or "{}")
    return Cluster(**found["constants"]) if "constants" in found else None


def hardware() -> str:
    """The class of this machine, without its name."""
    from ringattn.transport import location  # imports torch

    return location.hardware()
