"""What NVIDIA's management library tells of the links between GPUs. It comes with the driver.

Source: nvml.h, `nvmlGpuP2PCapsIndex_t` and `nvmlGpuP2PStatus_t`.
"""

from __future__ import annotations

import ctypes
from typing import Any

from ringattn.planner.links import LinkClass

LIBRARY = "libnvidia-ml.so.1"
NVLINK = 2
"""`NVML_P2P_CAPS_INDEX_NVLINK`."""
P2P_OK, P2P_UNKNOWN = 0, 6
UUID_BYTES = 96


def gpu_links(uuid: str, library: Any = None) -> list[tuple[str, LinkClass]]:
    """From the GPU with this UUID to each other of the machine, by UUID: NVLink, PCIe, or unknown.

    Empty where there is no driver, or it does not know the GPU (a MIG slice). `library`: None for the driver's own.
    """
    try:
        nvml = library or ctypes.CDLL(LIBRARY)
    except OSError:
        return []
    if nvml.nvmlInit_v2():
        return []
    try:
        gpus = _handles(nvml)
        return [(other, _link(nvml, gpus[uuid], gpus[other])) for other in gpus if other != uuid and uuid in gpus]
    finally:
        nvml.nvmlShutdown()


def _handles(nvml: Any) -> dict[str, ctypes.c_void_p]:
    """The GPUs that the driver shows, by UUID as torch spells it: without "GPU-"."""
    count, found = ctypes.c_uint(), {}
    if nvml.nvmlDeviceGetCount_v2(ctypes.byref(count)):
        return {}
    for index in range(count.value):
        handle, uuid = ctypes.c_void_p(), ctypes.create_string_buffer(UUID_BYTES)
        if nvml.nvmlDeviceGetHandleByIndex_v2(ctypes.c_uint(index), ctypes.byref(handle)):
            continue  # lost, or not for this container
        if not nvml.nvmlDeviceGetUUID(handle, uuid, ctypes.c_uint(UUID_BYTES)):
            found[uuid.value.decode().removeprefix("GPU-")] = handle
    return found


def _link(nvml: Any, one: ctypes.c_void_p, other: ctypes.c_void_p) -> LinkClass:
    status = ctypes.c_int(P2P_UNKNOWN)
    if nvml.nvmlDeviceGetP2PStatus(one, other, ctypes.c_int(NVLINK), ctypes.byref(status)):
        return LinkClass.UNKNOWN
    if status.value == P2P_UNKNOWN:
        return LinkClass.UNKNOWN
    return LinkClass.NVLINK if status.value == P2P_OK else LinkClass.PCIE
