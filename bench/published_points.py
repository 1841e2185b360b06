"""Published figures of context-parallel attention, their sources, and the behaviour of each implementation.

Times are in milliseconds. Figures read from charts are accurate to 3 (H100) or 8 (B200) TFLOP/s. Causal FLOPs count
half unless a source counts otherwise; a backward pass is 2.5 forward passes.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from ringattn.launch.capacity.model_shapes import model_shape
from ringattn.launch.capacity.training_bytes import TrainingSetup
from ringattn.planner.cluster import CLUSTERS, Cluster

MAGI = "SandAI-org/MagiAttention, cp_benchmark, charts of v1.1.0 (February 2026), read off"
ZHUZILIN = "zhuzilin/ring-flash-attention, README of October 2024"
BURST = "MayDomine/Burst-Attention, README of August 2024"
ENGINE = "thunlp/BurstEngine, evaluation/kernel_bench, README (2025)"
YUNCHANG = "feifeibear/long-context-attention, tables of the README (2024)"
TITAN = "torchtitan, benchmarks/llama3_h100_202412"
NEMO = "NeMo 25.04, long-sequence table, DGX-B200"


class Kernel(NamedTuple):
    """Published rates of an attention kernel on one GPU.

    `forward` and `backward` are FLOP/s on long sequences; `causal` and `causal_backward` are the shares of these rates
    with a causal mask. `call_s` is the minimum time of a forward call, and `launches_s` the additional time of
    backward's launches. For each element of the queries, `row_bytes` bytes move through memory in forward (Q and O) and
    `back_row_bytes` in backward (also dO, dQ as a float32 accumulator that is zeroed and converted, and delta). For
    head dimensions other than 128, `softmax_dims` are added as in `Cluster`; the value of FlashAttention-2 comes from
    two of YUNCHANG's rows.
    """

    forward: float
    backward: float
    causal: float = 1.0
    causal_backward: float = 1.0
    call_s: float = 60e-6
    launches_s: float = 50e-6
    row_bytes: float = 4
    back_row_bytes: float = 24
    softmax_dims: float = 0.0


def of_preset(name: str) -> Kernel:
    """Return the kernel with the rates of a preset."""
    cluster = CLUSTERS[name]
    return Kernel(cluster.flops, cluster.backward_flops or cluster.flops)


FA3 = of_preset("h100")
FA2_A100 = Kernel(217e12, 193e12, 0.94, 0.94, softmax_dims=16)  # one GPU, 64k, of BURST; causal: one GPU of ZHUZILIN
FA2_H800 = Kernel(346e12, 306e12, 0.94, 0.94, softmax_dims=16)  # one GPU, 8k, causal, of ZHUZILIN
CUDNN_B200 = Kernel(1326e12, 864e12, 0.97, 0.93, 130e-6, 100e-6)  # the same charts, 32k; causal from 32k to 128k
FFA_H100 = Kernel(634e12, 576e12, 0.98, 0.97, 150e-6)
FFA_B200 = Kernel(1398e12, 1135e12, 0.98, 0.98, 170e-6, 400e-6)
FA2_L20 = Kernel(100e12, 85e12, softmax_dims=16)  # 84 % of the datasheet's 119.5 TFLOP/s; no published figure

CHART_KERNELS = {"FA3, H100": FA3._replace(forward=702e12, backward=605e12),
                 "FA4, B200": Kernel(1388e12, 1125e12, 1.0, 1.0, 170e-6, 450e-6)}  # fmt: skip
CHART_TOKENS = (1024, 2048, 4096, 8192, 16384, 32768)
CHART = {
    ("FA3, H100", "full", "forward"): (558, 673, 678, 674, 687, 702),
    ("FA3, H100", "full", "backward"): (335, 454, 517, 556, 587, 601),
    ("FA3, H100", "causal", "forward"): (283, 584, 663, 659, 673, 680),
    ("FA3, H100", "causal", "backward"): (209, 353, 462, 518, 562, 586),
    ("FA4, B200", "full", "forward"): (205, 834, 1379, 1335, 1300, 1296),
    ("FA4, B200", "full", "backward"): (149, 439, 845, 1044, 1110, 1122),
    ("FA4, B200", "causal", "forward"): (100, 388, 1331, 1376, 1369, 1388),
    ("FA4, B200", "causal", "backward"): (76, 248, 612, 938, 1032, 1091),
}
"""TFLOP/s on one GPU (MagiAttention's kernel charts): batch 1, 64:8 heads of 128."""

H800 = replace(CLUSTERS["h100"], name="H800", bandwidth=160e9, peer_bandwidth=None)
A800 = replace(CLUSTERS["a100"], name="A800, 4 NICs of 200G a node", bandwidth=160e9, peer_bandwidth=None,
               node_bandwidth=12.5e9)  # fmt: skip
L20 = Cluster("L20 over PCIe", 100e12, 8e9, 15e-6, copy_bytes_s=0.864e12, ranks_per_node=8, node_bandwidth=12.5e9)
MACHINES: dict[str, Cluster] = {
    "H100": CLUSTERS["h100"], "B200": CLUSTERS["b200"], "A100": CLUSTERS["a100"], "H800": H800, "A800": A800, "L20": L20
}  # fmt: skip


class Implementation(NamedTuple):
    """The cost of a step in an implementation of the ring, in addition to its kernel and messages.

    Only these constants are fitted. `sync_s` is a constant time per step, and `host_s` the minimum time of a step,
    because Python must launch it. `out_bytes` and `dq_bytes` are the bytes that the merging launches move through
    memory per element of the step's outputs, and of dq, dk and dv. `backward_messages` is the number of K/V blocks that
    a backward step sends, including gradients. `call_s` is the minimum time of a call.
    """

    name: str
    why: str
    sync_s: float = 0.0
    host_s: float = 0.0
    out_bytes: float = 0.0
    dq_bytes: float = 0.0
    backward_messages: float = 2.0
    call_s: float = 0.0


MAGI_RING = Implementation(
    "ring, send and receive, FA3",
    "P launches, unmerged outputs kept, P corrections of 3 passes in bf16 after the loop; 0.45 ms: fitted to all of "
    "its forward rows at once",
    sync_s=0.45e-3, out_bytes=6, dq_bytes=10,
)  # fmt: skip
TE_RING = Implementation(
    "ring, send and receive, TransformerEngine", "a launch a step that corrects; 0.12 ms: fitted to the B200 rows",
    sync_s=0.12e-3, out_bytes=6, dq_bytes=10,
)  # fmt: skip
GATHER = Implementation("all-gather", "one collective before all work; one reduce-scatter after the backward")
HEADS = Implementation("Ulysses", "all-to-all before and after; nothing of it is hidden")
TORCH_RING = Implementation(
    "ring of torch operations",
    "four elementwise launches in float32 merge: 38 bytes an element of out; 0.6 ms of Python a step and 3.2 ms a "
    "call: the shortest rows of yunchang's table",
    host_s=0.6e-3, sync_s=0.05e-3, out_bytes=38, dq_bytes=16, backward_messages=3, call_s=3.2e-3,
)  # fmt: skip
BURST_RING = Implementation(
    "BurstAttention's ring", "2.4 ms a step, fitted to the shortest of its rows; its code was not read",
    sync_s=2.4e-3, backward_messages=3,
)  # fmt: skip

RANKS = (8, 16, 32, 64)
MAGI_ROWS: dict[tuple[str, str, str, str], tuple[float, ...]] = {
    ("H100", "full", "forward", "ulysses"): (606, 576, 584, 620),
    ("H100", "full", "forward", "ring"): (512, 536, 518, 514),
    ("H100", "full", "forward", "all_gather"): (603, 595, 587, 584),
    ("H100", "full", "forward", "ulysses_ring"): (580, 597, 594, 602),
    ("H100", "full", "forward", "double_ring"): (579, 602, 592, 604),
    ("H100", "full", "backward", "ulysses"): (577, 573, 584, 573),
    ("H100", "full", "backward", "ring"): (498, 512, 513, 506),
    ("H100", "full", "backward", "all_gather"): (534, 539, 541, 537),
    ("H100", "full", "backward", "ulysses_ring"): (571, 589, 584, 579),
    ("H100", "full", "backward", "double_ring"): (571, 578, 573, 577),
    ("H100", "causal", "forward", "ulysses"): (601, 558, 580, 573),
    ("H100", "causal", "forward", "ring"): (422, 455, 452, 447),
    ("H100", "causal", "forward", "all_gather"): (601, 586, 591, 576),
    ("H100", "causal", "forward", "ulysses_ring"): (588, 585, 590, 586),
    ("H100", "causal", "forward", "double_ring"): (587, 587, 578, 589),
    ("H100", "causal", "backward", "ulysses"): (582, 555, 571, 585),
    ("H100", "causal", "backward", "ring"): (432, 475, 470, 458),
    ("H100", "causal", "backward", "all_gather"): (517, 526, 523, 523),
    ("H100", "causal", "backward", "ulysses_ring"): (572, 567, 575, 572),
    ("H100", "causal", "backward", "double_ring"): (567, 549, 547, 561),
    ("B200", "full", "forward", "ulysses"): (1239, 1191, 1249, 1257),
    ("B200", "full", "forward", "ring"): (1213, 1212, 1218, 1216),
    ("B200", "full", "forward", "all_gather"): (1258, 1254, 1275, 1286),
    ("B200", "full", "forward", "ulysses_ring"): (1209, 1257, 1309, 1315),
    ("B200", "full", "forward", "double_ring"): (1209, 1266, 1273, 1323),
    ("B200", "full", "backward", "ulysses"): (920, 912, 910, 915),
    ("B200", "full", "backward", "ring"): (809, 811, 809, 807),
    ("B200", "full", "backward", "all_gather"): (841, 844, 845, 841),
    ("B200", "full", "backward", "ulysses_ring"): (914, 911, 927, 918),
    ("B200", "full", "backward", "double_ring"): (912, 916, 913, 921),
    ("B200", "causal", "forward", "ulysses"): (1165, 1001, 977, 970),
    ("B200", "causal", "forward", "ring"): (1140, 1138, 1127, 1139),
    ("B200", "causal", "forward", "all_gather"): (1200, 1182, 1205, 1229),
    ("B200", "causal", "forward", "ulysses_ring"): (1137, 1203, 1237, 1285),
    ("B200", "causal", "forward", "double_ring"): (1136, 1210, 1242, 1294),
    ("B200", "causal", "backward", "ulysses"): (820, 829, 854, 866),
    ("B200", "causal", "backward", "ring"): (757, 769, 772, 772),
    ("B200", "causal", "backward", "all_gather"): (692, 696, 698, 696),
    ("B200", "causal", "backward", "ulysses_ring"): (814, 857, 895, 911),
    ("B200", "causal", "backward", "double_ring"): (815, 837, 859, 899),
}
"""TFLOP/s per GPU; 64:8 heads of 128, 8192 (H100) and 16384 (B200) tokens per rank; double_ring is LoongTrain's."""

DOCUMENT_SHARE = {65536: 0.125, 131072: 0.103, 262144: 0.075, 524288: 0.058, 1 << 20: 0.035}
"""Pairs of packed documents over all pairs, from the benchmark's histogram of lengths, uncertain by a fifth."""
DOCUMENT_STEPS = {"H100": (1.72, 1.67, 1.79, 2.26), "B200": (1.30, 3.37, 4.25, 4.16)}
"""Milliseconds per step of a ring over packed documents, in forward."""

ZHUZILIN_ROWS = {
    ("H800", "contiguous"): (38.5, 10.4), ("H800", "zigzag"): (63.0, 17.4), ("H800", "striped"): (55.0, 16.0),
    ("A100", "contiguous"): (24.0, 6.2), ("A100", "zigzag"): (38.2, 10.6), ("A100", "striped"): (32.5, 9.75),
}  # fmt: skip
"""Passes per second: forward alone, and forward with backward; 8 ranks of 8192 tokens, 32:8 heads of 128, causal."""

BURST_ROWS = {65536: (60, 181), 131072: (184, 668), 262144: (695, 2578), 524288: (2659, 10107), 1 << 20: (10868, 40276)}
"""Milliseconds: forward alone, and forward with backward; 8 A100, 32:32 heads of 128, no mask."""

ENGINE_ROWS: dict[tuple[str, str], dict[int, float]] = {
    ("ulysses_ring", "heads inside"): {131072: 140.66, 262144: 447.32, 524288: 1985.43},
    ("ulysses_ring", "ring inside"): {131072: 310.01, 262144: 898.68, 524288: 3347.21},
    ("double_ring", ""): {131072: 148.48, 262144: 463.70, 524288: 1939.78},
    ("ring", ""): {131072: 362.4, 262144: 735.8},
}
"""Milliseconds forward and backward; 4 x 8 A800, 40:40 heads of 128, causal; ring: TransformerEngine, computed from the
53.1 and 104.6 TFLOP/s of the README's summary."""

YUNCHANG_ROWS: dict[tuple[str, int, int, int, int, int], dict[int, float]] = {
    ("A100", 131072, 8, 128, 8, 2): {8: 21.00, 4: 21.46, 2: 21.20, 1: 17.78},
    ("A100", 131072, 32, 32, 32, 2): {8: 15.83, 4: 15.70, 2: 15.24, 1: 12.45},
    ("A100", 8192, 32, 32, 32, 2): {8: 306, 4: 314, 2: 279, 1: 202},
    ("L20", 131072, 32, 128, 8, 1): {8: 2.59, 4: 4.24, 2: 5.48, 1: 5.19},
    ("L20", 32768, 32, 128, 8, 1): {8: 14.3, 4: 32.8, 2: 62.8, 1: 58.4},
}
"""Forward passes a second by Ulysses degree, zigzag; machine, tokens, heads, head_dim, K/V heads, batch; 8 GPUs."""

LLAMA = model_shape("llama3-8b")
TITAN_ROWS = [
    (
        f"8B, 8 GPUs, CP{ranks}",
        TrainingSetup(LLAMA, 32768 * ranks, ranks, zero_degree=8, zero_stage=3, recompute="full"),
        tokens_s,
    )
    for ranks, tokens_s in ((1, 3890), (2, 2540), (4, 1071), (8, 548))
]
"""A training step of Llama-3 8B, and tokens/s of one GPU: H100 96 GB at 500 W, Float8 products, full recompute."""
NEMO_ROW = (
    "8B, TP4 CP16, 1M, recompute full taken",
    TrainingSetup(LLAMA, 2**20, 16, tensor_ranks=4, zero_stage=1, zero_degree=64, recompute="full"),
    1608,
)
"""TFLOP/s of one B200, masked pairs counted, FP8 products."""
