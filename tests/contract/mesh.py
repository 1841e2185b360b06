"""DTensors in a test of one process."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import torch.distributed as dist
from torch.distributed import DeviceMesh, init_device_mesh


def on_mesh(test: Callable[[DeviceMesh], None]) -> Callable[[], None]:
    """Run a test with a device mesh of this process alone. A decorator.

    The test runs in a thread, which ends: torch keeps meshes in variables of the thread that used DTensors. A process
    that another thread forks destroys these variables, and then waits forever for threads of gloo that it lacks.
    """

    def run() -> None:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        try:
            test(init_device_mesh("cpu", (1,)))
        finally:
            dist.destroy_process_group()

    def in_thread() -> None:
        with ThreadPoolExecutor(1) as pool:
            pool.submit(run).result()

    in_thread.__name__, in_thread.__doc__ = test.__name__, test.__doc__
    return in_thread
