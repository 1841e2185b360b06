"""Accelerators by name: memory, peak arithmetic and links, each with its source, and recommended settings.

Guarantees: peaks are those of the datasheets, dense and one-way. The rates that kernels reach come from one publication
for each accelerator. Nothing here was measured by us, and nothing is fitted to a published step.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from ringattn.errors import InputError
from ringattn.planner.cluster import CLUSTERS, Cluster, machine_named

GIB = 2**30


@dataclass(frozen=True)
class Reached:
    """Rates that kernels and links reach: FLOP/s of matrix products and attention, bytes per second one way.

    `machine` is the number of ranks in one machine, which `link` connects; `network` connects machines. `peer_bytes_s`
    is the rate of messages to a single other rank of the machine. `copy_bytes_s` is the rate of the accelerator's
    memory. They are None if no figure is used.
    """

    products: float
    attention_forward: float
    attention_backward: float
    link_bytes_s: float
    network_bytes_s: float
    machine: int
    source: str
    copy_bytes_s: float | None = None
    peer_bytes_s: float | None = None


def reached(products: float, source: str, cluster: Cluster) -> Reached:
    """Return the reached rates: `products` for matrix products, and those of `cluster` for attention and links."""
    return Reached(
        products, cluster.flops, cluster.backward_flops or cluster.flops, cluster.bandwidth,
        cluster.node_bandwidth or cluster.bandwidth, cluster.ranks_per_node or 8,
        f"matrix products: {source}; attention and links: {cluster.source}", cluster.copy_bytes_s,
        cluster.peer_bandwidth,
    )  # fmt: skip


SHARE = 0.73
"""The share of peak that matrix products of language models reach on an H100 (SEMIANALYSIS).

It is assumed for accelerators without a published rate.
"""
PRODUCTS = 720e12
SEMIANALYSIS = "720 TFLOP/s at shapes of language models (SemiAnalysis, MI300X vs H100 vs H200, December 2024)"
CUDA_TILE = (
    "1,448 to 1,562 TFLOP/s of cuBLAS at Llama-7B's feed-forward (arXiv:2604.23466), of which the lowest is used"
)
MAMF = "the best of all shapes (S. Bekman, ml-engineering, table of maximum achievable matmul FLOPS)"
TORCHAO = (
    "60 % of the peak, and 92 % of the memory's 2.4 TB/s, which torchao states for Meta's variant "
    "(float8/roofline_utils.py); attention slower than on an H100 of 700 W by the same factor as products"
)
ASSUMED = f"{SHARE:.0%} of peak, as on an H100; attention 73 and 63 % of it, as FlashAttention-2 reaches on an A100"


@dataclass(frozen=True)
class Hardware:
    """One accelerator.

    `flops` is the dense peak in bf16, or in fp32 if `bf16` is False. `link_bytes_s` is the one-way rate between two
    accelerators of a machine, and `host_bytes_s` the one-way rate between the accelerator and host memory. `start`
    holds the settings of `ringattn plan` that are recommended for it, and `why` is the reason.
    """

    name: str
    memory_bytes: int
    flops: float
    link_bytes_s: float
    host_bytes_s: float
    source: str
    start: tuple[tuple[str, Any], ...]
    why: str
    bf16: bool = True
    measured: Reached | None = None

    @property
    def reached(self) -> Reached:
        """Return the published rates, or shares of the peak if none are published."""
        link = self.link_bytes_s
        return self.measured or Reached(
            SHARE * self.flops, 0.73 * self.flops, 0.63 * self.flops, link, link, 8, ASSUMED
        )

    def with_peak(self, flops: float) -> Hardware:
        """Return the accelerator with the peak `flops`. Kernels reach the same share of it as of the present peak."""
        factor, rates = flops / self.flops, self.measured
        if rates is not None:
            rates = replace(rates, products=rates.products * factor, attention_forward=rates.attention_forward * factor,
                            attention_backward=rates.attention_backward * factor)  # fmt: skip
        return replace(self, flops=flops, measured=rates)

    def with_link(self, bytes_s: float) -> Hardware:
        """Return the accelerator with links of `bytes_s` within a machine. Messages are assumed to reach this rate."""
        rates = None if self.measured is None else replace(self.measured, link_bytes_s=bytes_s, peer_bytes_s=None)
        return replace(self, link_bytes_s=bytes_s, measured=rates)

    def __post_init__(self) -> None:
        """Raise `InputError` if a size is not positive."""
        for key in ("memory_bytes", "flops", "link_bytes_s", "host_bytes_s"):
            if getattr(self, key) <= 0:
                raise InputError(f"{key}={getattr(self, key)}: must be more than 0")


PCIE3, PCIE4, PCIE5 = 16e9, 32e9, 64e9
"""Bytes a second of sixteen lanes, one way, before coding overhead (PCI-SIG)."""

SMALL = (("precision", "fp32"), ("recompute", "full"), ("chunked_loss_tokens", 1024), ("zero_stage", 2))
CONSUMER = (("precision", "bf16_master"), ("recompute", "full"), ("chunked_loss_tokens", 1024), ("zero_stage", 2))
SERVER = (("precision", "bf16_master"), ("recompute", "selective"), ("chunked_loss_tokens", 1024), ("zero_stage", 3))
ROOMY = (("precision", "bf16_master"), ("recompute", "none"), ("chunked_loss_tokens", 1024), ("zero_stage", 3))

NO_BF16 = "no bf16 arithmetic and 8 GiB: fp32, every layer recomputed, logits in small chunks"
NO_NVLINK = "weights stay whole, because gathering them over PCIe in every layer (ZeRO 3) would cost more than it saves"
NVLINK = "NVLink is fast enough for ZeRO 3; attention dominates long sequences, so it is not recomputed"
MUCH = "the memory is large enough to keep activations; use recompute=selective for longer sequences"

H100 = reached(PRODUCTS, SEMIANALYSIS, CLUSTERS["h100"])
LIMITED = 0.6 * 989e12 / PRODUCTS
"""The rate of an H100 of 500 W over that of 700 W, for matrix products."""

A100 = reached(267.9e12, MAMF, CLUSTERS["a100"])

PRESETS: dict[str, Hardware] = {
    accelerator.name: accelerator
    for accelerator in (
        Hardware("gtx1080", 8 * GIB, 8.9e12, PCIE3, PCIE3, "GeForce GTX 1080 whitepaper (NVIDIA 2016)", SMALL, NO_BF16,
                 bf16=False),
        Hardware("rtx3090", 24 * GIB, 71e12, 56.25e9, PCIE4,
                 "Ampere GA102 whitepaper (NVIDIA 2021), NVLink bridge 112.5 GB/s both ways", CONSUMER,
                 "24 GiB: every layer recomputed; " + NO_NVLINK),
        Hardware("rtx4090", 24 * GIB, 165.2e12, PCIE4, PCIE4, "Ada whitepaper (NVIDIA 2022), no NVLink", CONSUMER,
                 "24 GiB: every layer recomputed; " + NO_NVLINK),
        Hardware("a100-40", 40 * GIB, 312e12, 300e9, PCIE4, "A100 datasheet (NVIDIA 2021), NVLink 600 GB/s both ways",
                 SERVER, NVLINK, measured=A100),
        Hardware("a100-80", 80 * GIB, 312e12, 300e9, PCIE4, "A100 datasheet (NVIDIA 2021), NVLink 600 GB/s both ways",
                 SERVER, NVLINK, measured=A100),
        Hardware("h100", 80 * GIB, 989e12, 450e9, PCIE5, "H100 SXM datasheet (NVIDIA 2023), NVLink 900 GB/s both ways",
                 SERVER, NVLINK, measured=H100),
        Hardware("h100-96", 95 * GIB, 989e12, 450e9, PCIE5,
                 "H100 SXM of 500 W with 96 GB of HBM2e (torchtitan, benchmarks/llama3_h100_202412)", SERVER, NVLINK,
                 measured=replace(H100, products=LIMITED * PRODUCTS, attention_forward=LIMITED * H100.attention_forward,
                                  attention_backward=LIMITED * H100.attention_backward, copy_bytes_s=0.92 * 2.4e12,
                                  source=f"{TORCHAO}; {H100.source}")),
        Hardware("h200", 141 * 10**9, 989e12, 450e9, PCIE5,
                 "H200 SXM datasheet (NVIDIA 2024), 141 GB, NVLink 900 GB/s both ways", ROOMY, MUCH,
                 measured=reached(PRODUCTS, SEMIANALYSIS, CLUSTERS["h200"])),
        Hardware("b200", 180 * 10**9, 2250e12, 900e9, PCIE5,
                 "HGX B200 datasheet (NVIDIA 2025), 180 GB, NVLink 1.8 TB/s both ways", ROOMY, MUCH,
                 measured=reached(1448e12, CUDA_TILE, CLUSTERS["b200"])),
    )
}  # fmt: skip
"""Sparse rates of datasheets are halved. 3090: products summed in float32. H200 and B200 are sold in decimal GB."""


def hardware(name: str) -> Hardware:
    """Return the accelerator `name`. Raises `InputError` with the possible names if it is unknown."""
    return PRESETS[machine_named(name, PRESETS, "hardware")]
