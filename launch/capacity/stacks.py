"""Implementations of training other than `ringattn train`: what each keeps and how fast it is, as data with sources.

A `Stack` has one `Fact` per difference from our trainer: a value and where it was looked up. The formulas that read the
facts are in `ringattn.launch.capacity.stack_bytes` and `step_time`; no formula asks for the name of a stack.

Guarantees: every fact was read in the source code, the documentation or a published table that it names. None is fitted
to a published step, except rates whose source says so; the rows that they come from are not counted as planned.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, NamedTuple, TypeVar

Value = TypeVar("Value")


class Fact(NamedTuple, Generic[Value]):
    """One looked-up property of a stack and its source."""

    value: Value
    source: str


class Exchange(NamedTuple):
    """Bytes at the largest moment of a pass of attention, in addition to the tensors that the layer keeps.

    `query` and `key` are bytes per element of a token's queries and keys. `all_queries` and `all_keys` are the same for
    the tokens of each rank of the ring. The bytes of backward include the gradients of queries, keys and values. Those
    of both passes include the workspace of the kernel, and those of forward the output.
    """

    query: float
    key: float
    all_keys: float = 0
    all_queries: float = 0


class Rates(NamedTuple):
    """FLOP/s of the attention kernel on long sequences."""

    forward: float
    backward: float


class Merge(NamedTuple):
    """Bytes per element that merging a block moves through memory: of the output in forward, of dQ in backward."""

    forward: float
    backward: float


@dataclass(frozen=True)
class Stack:
    """What one implementation of training keeps, exchanges and reaches.

    Memory of a layer: `norm_wide` and `norm_narrow` are the float32 and the 16-bit copies that a norm keeps of its
    input, besides its output. `repeats_kv`: K and V are repeated to the number of query heads before attention.
    `output_copies` are kept besides the output of attention. A feed-forward keeps `feed_kept` tensors of its inner
    width, and `feed_live` more exist at the largest moment of its backward. `tiles_kept`: a tiled feed-forward still
    keeps its tensors for all tiles. `selective`: recompute=selective keeps the output of every second matrix product
    and of attention. `alone` is the exchange of backward on one rank; `forward` and `backward` are those of a ring.

    Memory of the state: `gathered_layers` is the number of layers whose whole weights exist, and `head_gathered` that
    of tables (embedding, output matrix) that stay gathered through a step. `gradient_bytes` are those of one gradient
    (0: those of the precision), and `reduce_bytes` those of one gradient of a layer while it is reduced. If
    `pipeline_bytes` is not 0, pipeline stages keep weights gathered, with this number of bytes each, and gradients
    accumulate whole in float32. `gradients_stay`: at the loss, the memory of the last step's gradients is still taken.
    `logit_bytes` is per logit at the loss.

    Time: `kernel` is the attention kernel that the stack chooses, and `products` are FLOP/s by name of the hardware;
    hardware without an entry there or in `KERNELS` has its own rates. `merge` is None if kernels merge. `exposed`:
    attention does not hide its exchange.

    `figure` says which peak the stack's published tables have: allocated by tensors, or reserved by the allocator.
    """

    name: str
    precisions: Fact[tuple[str, ...]]
    norm_wide: Fact[int]
    norm_narrow: Fact[int]
    repeats_kv: Fact[bool]
    output_copies: Fact[int]
    feed_kept: Fact[int]
    feed_live: Fact[int]
    tiles_kept: Fact[bool]
    selective: Fact[bool]
    alone: Fact[Exchange]
    forward: Fact[Exchange]
    backward: Fact[Exchange]
    logit_bytes: Fact[int]
    gathered_layers: Fact[int]
    head_gathered: Fact[int]
    gradient_bytes: Fact[int]
    reduce_bytes: Fact[int]
    pipeline_bytes: Fact[int]
    gradients_stay: Fact[bool]
    kernel: Fact[str]
    products: Fact[dict[str, float]]
    merge: Fact[Merge | None]
    exposed: Fact[bool]
    figure: Fact[str]


HF = "transformers 5.23"
CP = "torch 2.13, distributed/tensor/experimental/_context_parallel/_attention.py"
TITAN = "torchtitan 9dec370 (26 December 2024)"
CHARTS = "MagiAttention's kernel charts, 64:8 heads of 128, 32K tokens, no mask (docs/source/blog/cp_benchmark.md)"
FSDP2 = "torch 2.13, distributed/fsdp/_fully_shard"
CUDNN = (
    "cuDNN's backward also takes dQ in float32, and dK and dV of all query heads in 16 bits "
    "(cudnn-frontend, CompositeSDPABackwardNode)"
)

KERNELS: dict[str, dict[str, Rates]] = {
    "cudnn": {"h100": Rates(584e12, 488e12), "b200": Rates(1326e12, 864e12)},
    "fa2": {"h100": Rates(376e12, 335e12)},
    "fa3": {"h100": Rates(702e12, 601e12)},
}
"""Rates of attention kernels by name and hardware: MagiAttention's kernel charts (see `CHARTS`)."""

EAGER_LOGITS = "log-probabilities, their gradient and the logits' gradient in float32 (F.cross_entropy in eager mode)"
NO_TABLE = "no rate of this stack was found; those of the hardware"

NORM_WIDE = Fact(1, f"{HF}, Qwen3RMSNorm: pow and the product keep the input in float32, one tensor")
NORM_NARROW = Fact(1, f"{HF}, Qwen3RMSNorm: the normalized input, for the gradient of the weight")
FEED_KEPT = Fact(4, f"{HF}, Qwen3MLP: gate, up, silu(gate) and the product")
FEED_LIVE = Fact(2, "torch autograd: the product is freed, its gradient and those of both factors exist")
GATHERS_FORWARD = Fact(
    Exchange(18, 0, 4),
    f"{CP}, _templated_ring_attention with all-gather (the default): K and V of all ranks, and the merge of outputs in "
    "float32. Counted by running this code (tests)",
)
GATHERS_BACKWARD = Fact(
    Exchange(14, 34, 4),
    f"{CP}, _templated_ring_attention_backward: K and V of all ranks; dQ, dK and dV in float32, each also as received, "
    f"sent and updated; {CUDNN}. Counted by running this code (tests)",
)
ALONE = Fact(Exchange(10, 4), f"dQ, dK and dV in 16 bits; {CUDNN}")

TRL = Stack(
    name="trl",
    precisions=Fact(
        ("bf16_cast", "bf16"),
        "accelerate 1.15, fsdp_utils.py: mixed_precision=bf16 casts the weights to float32 first (bf16_cast); without "
        "it, a model loaded in bf16 stays so",
    ),
    norm_wide=NORM_WIDE,
    norm_narrow=NORM_NARROW,
    feed_kept=FEED_KEPT,
    feed_live=FEED_LIVE,
    repeats_kv=Fact(False, f"{HF}, use_gqa_in_sdpa: without a mask, SDPA receives the K/V heads"),
    output_copies=Fact(1, f"{CP}, _partial_update: the concatenated output has another layout, so o_proj copies it"),
    tiles_kept=Fact(
        True, "TRL, pull request 6846: tiles are a plain torch.cat inside a checkpoint; autograd keeps all of them"
    ),
    selective=Fact(False, "accelerate and transformers checkpoint whole layers"),
    alone=ALONE,
    forward=GATHERS_FORWARD,
    backward=GATHERS_BACKWARD,
    logit_bytes=Fact(12, f"TRL, sft_trainer.py, _chunk: {EAGER_LOGITS}, of 256 tokens at a time"),
    gathered_layers=Fact(2, f"{FSDP2}: the layer that runs and the next, prefetched"),
    head_gathered=Fact(1, "accelerate 1.15, fsdp_utils.py: the last norm and lm_head are a group with reshard=False"),
    gradient_bytes=Fact(0, f"{FSDP2}: the shard of a gradient has the dtype of the weight"),
    reduce_bytes=Fact(4, "accelerate 1.15 reduces in bf16: a layer's gradients and the input of reduce-scatter"),
    pipeline_bytes=Fact(0, "no pipeline"),
    gradients_stay=Fact(False, "the published peaks are those of tensors"),
    kernel=Fact("cudnn", f"TRL, pull request 6846: torch prefers cuDNN on Hopper, and takes fa2 without it; {CHARTS}"),
    products=Fact({}, NO_TABLE),
    merge=Fact(
        Merge(38, 16),
        f"{CP}, _SDPAMerger: five elementwise launches on float32 outputs; dQ is added in float32",
    ),
    exposed=Fact(True, f"{CP}: one blocking all-gather before the second block; dK and dV wait in every step"),
    figure=Fact("allocated", "TRL, pull request 6846: GB of 1e9 bytes"),
)

TORCHTITAN = Stack(
    name="torchtitan",
    precisions=Fact(("bf16_cast",), f"{TITAN}, apply_fsdp: float32 weights, gathered in bf16"),
    norm_wide=NORM_WIDE,
    norm_narrow=NORM_NARROW,
    feed_kept=FEED_KEPT,
    feed_live=FEED_LIVE,
    repeats_kv=Fact(True, f"{TITAN}, models/llama/model.py: repeat_kv before scaled_dot_product_attention"),
    output_copies=TRL.output_copies,
    tiles_kept=Fact(True, "torchtitan has no tiled feed-forward"),
    selective=Fact(True, f"{TITAN}, parallelize_llama.py, selective_ac_option=op"),
    alone=Fact(Exchange(6, 4), "FlashAttention 2 (SDPA's default): dQ also in float32; dQ, dK, dV in 16 bits"),
    forward=GATHERS_FORWARD,
    backward=Fact(Exchange(12, 34, 4), f"{CP}: as TRL's, without the gradients of all query heads"),
    logit_bytes=Fact(12, f"{TITAN}, train.py: the loss is not compiled and casts logits to float32; {EAGER_LOGITS}"),
    gathered_layers=TRL.gathered_layers,
    head_gathered=Fact(2, f"{TITAN}, apply_fsdp: embedding and output are in the root group, gathered for the step"),
    gradient_bytes=TRL.gradient_bytes,
    reduce_bytes=Fact(6, f"{TITAN}, apply_fsdp: bf16 gradients, and the float32 input of reduce-scatter"),
    pipeline_bytes=Fact(
        1,
        f"{TITAN}, apply_fsdp: no reshard with pipeline stages; llama3_405b.toml gathers weights in Float8; torch's "
        "stages reduce gradients only in the last micro batch, and FSDP2 accumulates in reduce_dtype (float32)",
    ),
    gradients_stay=Fact(True, f"{FSDP2}: shards come from the pool of the reduce stream, which stays reserved"),
    kernel=Fact("fa2", f"SDPA's default of December 2024; {CHARTS}"),
    products=Fact(
        {"h100": 529e12},
        "Float8 products: calibrated with torchtitan's 8,532 tokens/s (table 1, row 3), which is not counted",
    ),
    merge=TRL.merge,
    exposed=TRL.exposed,
    figure=Fact("reserved", f"{TITAN}, metrics.py: max_reserved_gib"),
)

MEGATRON = Stack(
    name="megatron",
    precisions=Fact(("bf16_master",), "Megatron-Core 0.16, DistributedOptimizer: bf16 weights, float32 masters"),
    norm_wide=Fact(0, "TransformerEngine's RMSNorm keeps its 16-bit input and one scalar a token"),
    norm_narrow=Fact(1, "TransformerEngine's RMSNorm keeps its 16-bit input and one scalar a token"),
    repeats_kv=Fact(False, "TransformerEngine's DotProductAttention receives the K/V heads"),
    output_copies=Fact(0, "TransformerEngine: o_proj keeps the output that attention keeps"),
    feed_kept=Fact(3, "Megatron-Core 0.16, fused_bias_swiglu.py: gate and up as one tensor, and the product"),
    feed_live=Fact(2, "fused_bias_swiglu.py: the gradients of the product and of gate and up, the product freed"),
    tiles_kept=Fact(True, "Megatron-Core 0.16 has no tiled feed-forward"),
    selective=Fact(False, "Megatron's selective recomputation is of attention or of named modules, not of products"),
    alone=ALONE,
    forward=Fact(
        Exchange(0, 0, 4, 2),
        "TransformerEngine d0067d0, context_parallel.py, AttnFuncWithCPAndKVP2P: p2p_comm_buffers has the blocks of "
        "all steps, and the outputs of all steps exist until they are merged",
    ),
    backward=Fact(
        Exchange(12, 20),
        "TransformerEngine d0067d0, context_parallel.py: dq_buffer in 16 bits, two buffers of K, V, dK and dV, and the "
        f"results of a step; {CUDNN}",
    ),
    logit_bytes=Fact(6, "Megatron-Core 0.16, cross_entropy.py: softmax in place in float32, and 16-bit logits"),
    gathered_layers=Fact(0, "the distributed optimizer keeps whole weights"),
    head_gathered=Fact(0, "the distributed optimizer keeps whole weights"),
    gradient_bytes=Fact(4, "Megatron-Core 0.16, arguments: bf16 accumulates and reduces gradients in float32"),
    reduce_bytes=Fact(0, "gradients are reduced in place, in the buffer of main gradients"),
    pipeline_bytes=Fact(0, "weights and main gradients are whole anyway"),
    gradients_stay=Fact(True, "Megatron-Core 0.16, param_and_grad_buffer.py: main gradients exist for the whole run"),
    kernel=Fact("cudnn", f"TransformerEngine's FusedAttention; {CHARTS}"),
    products=Fact({}, NO_TABLE),
    merge=Fact(None, "TransformerEngine corrects outputs in one launch a step; not counted"),
    exposed=Fact(False, "TransformerEngine: the next block is received while one is computed"),
    figure=Fact("allocated", "published tables have TFLOP/s only"),
)

LIGER = "Liger-Kernel ead96b6, ops"
ULYSSES = "DeepSpeed, runtime/sequence_parallel/ulysses_sp.py"

DEEPSPEED = Stack(
    name="deepspeed",
    precisions=Fact(("bf16_master",), "ZeRO with bf16: bf16 weights and gradients, float32 masters (arXiv:1910.02054)"),
    norm_wide=Fact(0, f"{LIGER}/rms_norm.py keeps the 16-bit input and one scalar a token"),
    norm_narrow=Fact(1, f"{LIGER}/rms_norm.py keeps the 16-bit input and one scalar a token"),
    repeats_kv=Fact(False, f"{ULYSSES}: K and V are replicated only for more ranks than K/V heads"),
    output_copies=Fact(1, f"{ULYSSES}: the output after its all-to-all, which o_proj keeps"),
    feed_kept=Fact(3, f"{LIGER}/swiglu.py: gate and up; the product is kept by down"),
    feed_live=Fact(0, f"{LIGER}/swiglu.py: the gradients replace gate and up; the product's gradient replaces it"),
    tiles_kept=Fact(False, f"{ULYSSES}, TiledMLP: backward runs the forward of each tile again"),
    selective=Fact(False, "DeepSpeed and transformers checkpoint whole layers"),
    alone=ALONE,
    forward=Fact(Exchange(6, 4), f"{ULYSSES}: an all-to-all has its input, its output and a contiguous copy"),
    backward=Fact(
        Exchange(14, 8),
        f"{ULYSSES}: the same of gradients; FlashAttention 2 also has dQ in float32, and dK and dV of all query heads",
    ),
    logit_bytes=Fact(2, f"{LIGER}/fused_linear_cross_entropy.py: the gradient replaces 16-bit logits, in chunks"),
    gathered_layers=TRL.gathered_layers,
    head_gathered=Fact(1, "ZeRO 3: the module that runs; stage3_max_live_parameters is 1e9"),
    gradient_bytes=Fact(0, "ZeRO 3: the shard of a gradient has the dtype of the weight"),
    reduce_bytes=Fact(4, "ZeRO 3: the gradient of a layer and the reduction bucket, in bf16"),
    pipeline_bytes=Fact(0, "no pipeline"),
    gradients_stay=Fact(True, "ZeRO 3 allocates its partition of gradients once"),
    kernel=Fact("fa2", f"ALST (arXiv:2506.13996, 5.2): flash_attn 2.7.4; {CHARTS}"),
    products=Fact({}, NO_TABLE),
    merge=Fact(None, "all-to-all needs no merge"),
    exposed=Fact(True, f"{ULYSSES}: blocking all-to-alls; their bytes are counted as those of a ring, which are more"),
    figure=Fact("allocated", "ALST has the longest sequence on cards of 80 GiB"),
)

STACKS = {stack.name: stack for stack in (TRL, TORCHTITAN, MEGATRON, DEEPSPEED)}
"""The stacks by name. "ringattn" is `ringattn train`, whose formulas are those of `training_bytes`."""

NAMES = ("ringattn", *STACKS)
