"""Machines that attend together, described by a handful of constants, each with its unit and where it comes from.

Does not know: plans, torch, what is installed here.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Cluster:
    """What the planner and the simulator know of the machines.

    `flops`: FLOP/s that the attention kernel of one rank achieves forward; `backward_flops`: backward, None for the
    same. `bandwidth`: bytes/s that one rank sends, and as many that it receives. `latency_s`: seconds of a step's
    messages beside their bytes. `call_s`: seconds of one engine call beside its arithmetic. `copy_bytes_s`: bytes/s at
    which rows are packed, merged and added, read and written bytes together; None: not counted. `cores`: ranks that
    compute at full speed at once, None: all. `ranks_per_node` ranks share a machine; messages between machines have
    `node_bandwidth` and `node_latency_s`. `source`: where the constants come from.
    """

    name: str
    flops: float
    bandwidth: float
    latency_s: float
    backward_flops: float | None = None
    call_s: float = 0.0
    copy_bytes_s: float | None = None
    cores: int | None = None
    ranks_per_node: int | None = None
    node_bandwidth: float | None = None
    node_latency_s: float | None = None
    source: str = ""


REFERENCE = Cluster(
    "H100 with NVLink (published: 600 TFLOP/s, 400 GB/s, 15 us a message)", 600e12, 400e9, 15e-6,
    source="a stated point of reference, not a measurement of the machine at hand",
)  # fmt: skip
