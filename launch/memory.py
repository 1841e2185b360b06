"""The memory that training takes, measured so that runs can be compared.

On a CPU, the growth of the process's resident memory is measured: the highest value since `start` minus the value at
`start`. The kernel's high-water mark is reset at `start` (`/proc/self/clear_refs`), because `ru_maxrss` also includes
imports and the parent process before the fork. On CUDA, the growth of the bytes that torch's allocator has allocated is
measured.
"""

from __future__ import annotations

import torch

from ringattn.observe.memory import reset_peak, status_bytes


class PeakMemory:
    """A meter for the peak growth of one process's memory since `start`; `method` describes what is measured."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.method = "torch's CUDA allocator: most allocated at once, less allocated at the start"
        self._base_bytes = 0
        self.start()

    def start(self) -> None:
        """Reset the peak, so that growth is measured from the present memory."""
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
            self._base_bytes = torch.cuda.memory_allocated(self.device)
            return
        try:
            reset_peak()
            self.method = "resident memory of the process: highest since the start, less that at the start"
        except OSError:
            self.method = "resident memory of the process: highest ever, less that at the start (cannot be reset here)"
        self._base_bytes = status_bytes("VmRSS")

    def growth_bytes(self) -> int:
        """Return the peak since `start` minus the memory in use at `start`, in bytes."""
        if self.device.type == "cuda":
            return torch.cuda.max_memory_allocated(self.device) - self._base_bytes
        return max(0, status_bytes("VmHWM") - self._base_bytes)
