"""A platform of verl for CPUs, which verl 0.9.1 lacks. verl imports the module that VERL_USE_EXTERNAL_MODULES names."""

from __future__ import annotations

from types import SimpleNamespace

from verl.plugin.platform.platform_cuda import PlatformCUDA
from verl.plugin.platform.platform_manager import PlatformRegistry
from verl.utils import import_utils

import_utils.is_trl_available = lambda: False  # verl imports a class that TRL 1.16 lacks


@PlatformRegistry.register(platform="cpu")
class PlatformCPU(PlatformCUDA):
    """The CPUs of this machine."""

    device_name = "cpu"
    device_module = SimpleNamespace(
        memory_allocated=int, memory_reserved=int, max_memory_allocated=int, max_memory_reserved=int,
        mem_get_info=lambda: (0, 0), empty_cache=int, get_device_name=lambda: "CPU",
    )  # fmt: skip

    def current_device(self) -> str:
        """Return the device that verl moves its tensors to."""
        return "cpu"
