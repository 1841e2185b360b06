"""One process that calls the real libnccl on a machine without a CUDA device.

`python -m tests.transport.nccl.real_library BINDING` prints, as JSON, what the library answered through one binding.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable

from ringattn.transport.nccl.binding import Binding, Capability, CommConfig, NcclError
from ringattn.transport.nccl.ctypes_binding import CtypesBinding
from ringattn.transport.nccl.cupy_binding import CupyBinding
from ringattn.transport.nccl.library import load_library


def answer(call: Callable[[], object]) -> list[object]:
    """[status, function, text] of the `NcclError` of a call; empty if it raised none."""
    try:
        call()
    except NcclError as error:
        return [error.status, error.function, error.text]
    return []


def transcript(binding: Binding) -> dict[str, object]:
    """What can be called without a device."""
    ids = [binding.unique_id() for _ in range(3)]
    told: dict[str, object] = {
        "path": binding.path,
        "version": binding.version,
        "id_bytes": [len(made) for made in ids],
        "ids": len(set(ids)),
        "balanced": [binding.group_start(), binding.group_start(), binding.group_end(), binding.group_end()],
        "unbalanced": binding.group_end(),
        "no_communicator": [binding.send(64, 1, 0, 0, 0), binding.recv(64, 1, 0, 0, 0)],
        "init": answer(lambda: binding.init(1, ids[0], 0, CommConfig(blocking=True))),
        "after_init": binding.group_end(),
    }
    if Capability.NONBLOCKING in binding.capabilities:
        config = CommConfig(False, 2, "ring", cga_cluster_size=1, channels_per_net_peer=2)
        told["nonblocking_init"] = answer(lambda: binding.init(1, ids[1], 0, config))
        told["after_nonblocking_init"] = binding.group_end()
    if Capability.MEMORY in binding.capabilities:
        told["mem_alloc"] = answer(lambda: binding.mem_alloc(1 << 20))
    return told


def raw() -> dict[str, object]:
    """What the library says to no communicator, and where its functions are."""
    cdll = load_library().cdll
    return {
        "raw": [cdll.ncclCommAbort(None), cdll.ncclCommDestroy(None), cdll.ncclCommFinalize(None)],
        "raw_state": cdll.ncclCommGetAsyncError(None, None),
    }


def main(name: str) -> None:
    """See the module."""
    told = transcript(CupyBinding()) if name == "cupy" else transcript(CtypesBinding(load_library())) | raw()
    print(json.dumps(told))


if __name__ == "__main__":
    main(sys.argv[1])
