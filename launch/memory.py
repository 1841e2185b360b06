"""How much memory training takes, measured so that runs can be compared.

On a CPU it is the growth of the process's resident memory: the highest value since `start`, less the value at `start`.
The kernel's high-water mark is reset at `start` (`/proc/self/clear_refs`), because `ru_maxrss` also remembers imports
and the process it was forked from. On CUDA it is the growth of what torch's allocator has handed out.
"""

from __future__ import annotations

import torch

from ringattn.observe.memory import reset_peak, status_bytes


class PeakMemory:
    """Peak growth of one process's memory since `start`, in bytes; `method` says what exactly is measured."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.method = "torch's CUDA allocator: most allocated at once, less allocated at the start"
        self._base_bytes = 0
        self.start()

    def start(self) -> None:
        """Forget the peak so far; growth counts from here."""
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
        """Peak since `start`, less what was in use at `start`."""
        if self.device.type == "cuda":
            return torch.cuda.max_memory_allocated(self.device) - self._base_bytes
        return max(0, status_bytes("VmHWM") - self._base_bytes)
