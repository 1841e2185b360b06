"""Rates of attention kernels on known GPUs, by which `engine="auto"` compares engines.

Guarantees: a GPU, kernel or head dimension without an entry has no rate. A measured rate replaces a published one.
"""

from __future__ import annotations

from typing import NamedTuple

BACKWARD_FLOPS = 2.5
"""FLOPs of a backward pass, as a multiple of those of forward."""


class Rate(NamedTuple):
    """TFLOP/s of a kernel, and where they come from."""

    forward: float
    backward: float
    source: str

    @property
    def both(self) -> float:
        """TFLOP/s of a forward and a backward pass together."""
        return (1 + BACKWARD_FLOPS) / (1 / self.forward + BACKWARD_FLOPS / self.backward)


class KnownGpu(NamedTuple):
    """A GPU with rates. `names`: parts of its name, of which one must be in the name that the driver reports.

    `rates`: by kernel and head dimension, for half precision.
    """

    names: tuple[str, ...]
    sms: int
    rates: dict[tuple[str, int], Rate]


_H200 = "measured on one H200, full mask, "
GPUS = (
    KnownGpu(
        # An H100 SXM has the same multiprocessors as an H200, which is up to 5 % away from it in either direction
        # (Dao-AILab/flash-attention issue 1438).
        ("H200", "H100 80GB HBM3"),
        132,
        {
            ("cudnn", 128): Rate(604, 549, _H200 + "32,768 tokens"),
            ("cuda-flash", 128): Rate(352, 312, _H200 + "32,768 tokens"),
            # The backward's programs share their blocks by a counter since then.
            ("gluon", 128): Rate(623, 496, _H200 + "32,768 tokens"),
            ("descriptors", 128): Rate(406, 346, _H200 + "8,192 tokens"),
        },
    ),
    KnownGpu(
        ("B200",),
        148,
        {("cudnn", 128): Rate(1326, 864, "published by MagiAttention (cp_benchmark, v1.1.0), 32,768 tokens")},
    ),
)


def rate_of(gpu: str, kernel: str, dim: int, sm_margin: int = 0) -> Rate | None:
    """Return the rate of a kernel on the GPU named `gpu`, which leaves `sm_margin` multiprocessors free.

    Return None if the GPU, the kernel or the head dimension has no entry.
    """
    for entry in GPUS:
        if any(name in gpu for name in entry.names) and (rate := entry.rates.get((kernel, dim))):
            share = max(1, entry.sms - sm_margin) / entry.sms
            return rate._replace(forward=rate.forward * share, backward=rate.backward * share)
    return None
