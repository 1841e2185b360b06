"""What to refuse and what to warn of before NCCL is opened in this environment, beside other communicators.

Pure functions of the environment and of what else runs in the process. Sources: NCCL user guide, environment variables
and "Using multiple NCCL communicators concurrently"; Megatron-LM's habit of CUDA_DEVICE_MAX_CONNECTIONS=1.
"""

from __future__ import annotations

from collections.abc import Mapping

from ringattn.errors import InputError
from ringattn.transport.nccl.binding import version_text

LAUNCH_ORDER_SINCE = 22600


def warnings_for(environment: Mapping[str, str], nccl_version: int, other_nccl_groups: bool) -> list[str]:
    """What a user should hear. `other_nccl_groups`: torch has NCCL process groups in this process.

    Raises `InputError` for `NCCL_COMM_ID`, which makes all communicators of all rings one, and for
    `NCCL_COMM_BLOCKING`, which takes the deadline from opening.
    """
    if environment.get("NCCL_COMM_ID"):
        raise InputError(
            "NCCL_COMM_ID is set, and gives every communicator the same id; unset it: ranks meet through the store"
        )
    if environment.get("NCCL_COMM_BLOCKING"):
        raise InputError(
            "NCCL_COMM_BLOCKING is set, and overrides how every communicator is made; unset it, and use "
            "NcclOptions(blocking=...)"
        )
    if not other_nccl_groups:
        return []
    found = []
    if nccl_version >= LAUNCH_ORDER_SINCE and environment.get("NCCL_LAUNCH_ORDER_IMPLICIT") != "1":
        found.append(
            "torch's NCCL process groups and this ring launch on one GPU: set NCCL_LAUNCH_ORDER_IMPLICIT=1 before the "
            "first of them is opened, so that NCCL keeps one order on all ranks"
        )
    if nccl_version < LAUNCH_ORDER_SINCE:
        found.append(
            f"torch's NCCL process groups and this ring launch on one GPU, and NCCL {version_text(nccl_version)} keeps "
            "no order among communicators (2.26 does): let neither overlap the other"
        )
    if environment.get("CUDA_DEVICE_MAX_CONNECTIONS") == "1":
        found.append(
            "CUDA_DEVICE_MAX_CONNECTIONS=1 with two communicators lets one wait behind the other for ever; set it to 8 "
            "or more"
        )
    return found
