"""Implementations of training other than `ringattn train`: what each keeps and how fast it is, as data with sources.

A `Stack` has one `Fact` per difference from our trainer: a value and where it was looked up. The formulas that read the
facts are in `ringattn.launch.capacity.stack_bytes` and `step_time`; no formula asks for the name of a stack.

Guarantees: every fact was read in the source code, the documentation or a published table that it names. None is fitted
to a published step, except rates whose source says so; the rows that they come from are not counted as planned.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Generic, NamedTuple, TypeVar

from ringattn.launch.capacity.hardware import LIMITED

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
    keeps its tensors for all tiles. `selective` is None if the stack has no recompute=selective. Otherwise this setting
    keeps the outputs of attention and of every second matrix product that backward reads, and `selective` more tensors
    of the layer's width. `alone` is the exchange of backward on one rank; `forward` and `backward` are those of a ring.

    Memory of the state: `gathered_layers` is the number of layers whose whole weights exist, and `head_gathered` that
    of tables (embedding, output matrix) that stay gathered through a step. `gradient_bytes` are those of one gradient
    (0: those of the precision), and `reduce_bytes` those of one gradient of a layer while it is reduced. With several
    micro batches and sharded gradients, `whole_bytes` are those of one gradient that is whole until the last micro
    batch (0: each micro batch reduces gradients; see also `pipeline_bytes`).
    `gradients_stay`: at the loss, the memory of the last step's gradients is still taken.

    Pipelines: if `pipeline_bytes` is not 0, stages keep the weights of layers gathered, with this number of bytes each,
    and gradients accumulate whole in float32 (see `pipeline_moments`). `outputs_stay`: a stage keeps its outputs until
    the end of the step. `short_ends`: layers that do not divide evenly go to the stages after the first.

    Loss: `logit_bytes` is per logit at the loss, and `split_logit_bytes` if tensor parallelism splits the vocabulary.

    Time: `kernel` is the attention kernel that the stack chooses, and `products` are FLOP/s by name of the hardware and
    width of the model (see `products_of`). Hardware without an entry there or in `KERNELS` has its own rates. Tensor
    parallelism gathers `gather_bytes` per element of a product's input, and `tensor_exposed` is the share of its
    collectives that products do not hide. `repeats_last`: recomputation of a layer repeats its last product, whose
    output no backward reads. `merge` is None if kernels merge. `exposed`: attention does not hide its exchange.
    `rotates`: K and V are gathered, and dK and dV go to a neighbor in each step, the last time to their owner.
    `gathers_again`: recomputation of attention gathers K and V in addition to its backward. With an
    offloaded optimizer, the host of a machine updates a weight in `host_update` seconds, after backward.

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
    selective: Fact[int | None]
    alone: Fact[Exchange]
    forward: Fact[Exchange]
    backward: Fact[Exchange]
    logit_bytes: Fact[int]
    split_logit_bytes: Fact[int]
    gathered_layers: Fact[int]
    head_gathered: Fact[int]
    gradient_bytes: Fact[int]
    reduce_bytes: Fact[int]
    whole_bytes: Fact[int]
    pipeline_bytes: Fact[int]
    outputs_stay: Fact[bool]
    short_ends: Fact[bool]
    gradients_stay: Fact[bool]
    kernel: Fact[str]
    products: Fact[dict[str, dict[int, float]]]
    gather_bytes: Fact[int]
    tensor_exposed: Fact[float]
    repeats_last: Fact[bool]
    merge: Fact[Merge | None]
    exposed: Fact[bool]
    rotates: Fact[bool]
    gathers_again: Fact[bool]
    host_update: Fact[float]
    figure: Fact[str]

    def products_of(self, machine: str, width: int) -> float | None:
        """Return the rate of matrix products on `machine`, or None if no rate of the stack is known.

        Wider products are faster. A model has the rate of the widest published one that is not wider.
        """
        rates = self.products.value.get(machine)
        if not rates:
            return None
        return rates[max((entry for entry in rates if entry <= width), default=min(rates))]


HF = "transformers 5.23"
CP = "torch 2.13, distributed/tensor/experimental/_context_parallel/_attention.py"
TITAN = "torchtitan 9dec370 (26 December 2024)"
CHARTS = "MagiAttention's kernel charts, 64:8 heads of 128, 32K tokens, no mask (docs/source/blog/cp_benchmark.md)"
FSDP2 = "torch 2.13, distributed/fsdp/_fully_shard"
SUSTAINED = 0.88
"""The share of the chart's rate that FlashAttention 2 reaches on 8 GPUs that train."""

CUDNN = (
    "cuDNN's backward also takes dQ in float32, and dK and dV of all query heads in 16 bits "
    "(cudnn-frontend, CompositeSDPABackwardNode)"
)

FA2 = Rates(SUSTAINED * 376e12, SUSTAINED * 335e12)

KERNELS: dict[str, Fact[dict[str, Rates]]] = {
    "cudnn": Fact({"h100": Rates(584e12, 488e12), "b200": Rates(1326e12, 864e12)}, CHARTS),
    "fa2": Fact(
        {"h100": FA2, "h100-96": Rates(LIMITED * FA2.forward, LIMITED * FA2.backward)},
        f"{SUSTAINED:.0%} of {CHARTS}, calibrated with a step of 606 s (huggingface/transformers pull request 48324), "
        "which is not counted",
    ),
    "fa3": Fact({"h100": Rates(702e12, 601e12)}, CHARTS),
}
"""Rates of attention kernels by name and hardware."""

EAGER_LOGITS = "log-probabilities, their gradient and the logits' gradient in float32 (F.cross_entropy in eager mode)"
NO_TABLE = "no rate of this stack was found; those of the hardware"
NO_UPDATE = Fact(0.0, "no rate of this stack's optimizer on the host was found; not counted")
NO_GATHER = Fact(True, "K and V are not gathered")
IN_THE_OPEN = Fact(1.0, "a product waits for the whole collective")

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
    selective=Fact(None, "accelerate and transformers checkpoint whole layers"),
    alone=ALONE,
    forward=GATHERS_FORWARD,
    backward=GATHERS_BACKWARD,
    logit_bytes=Fact(12, f"TRL, sft_trainer.py, _chunk: {EAGER_LOGITS}, of 256 tokens at a time"),
    split_logit_bytes=Fact(12, "TRL does not split the vocabulary; as logit_bytes"),
    gathered_layers=Fact(2, f"{FSDP2}: the layer that runs and the next, prefetched"),
    head_gathered=Fact(1, "accelerate 1.15, fsdp_utils.py: the last norm and lm_head are a group with reshard=False"),
    gradient_bytes=Fact(0, f"{FSDP2}: the shard of a gradient has the dtype of the weight"),
    reduce_bytes=Fact(4, "accelerate 1.15 reduces in bf16: a layer's gradients and the input of reduce-scatter"),
    whole_bytes=Fact(
        2, "accelerate 1.15, accelerator.py, no_sync: set_requires_gradient_sync(False); gradients stay in bf16"
    ),
    pipeline_bytes=Fact(0, "no pipeline"),
    outputs_stay=Fact(False, "no pipeline"),
    short_ends=Fact(False, "no pipeline"),
    gradients_stay=Fact(False, "the published peaks are those of tensors"),
    kernel=Fact("cudnn", "TRL, pull request 6846: torch prefers cuDNN on Hopper, and takes fa2 without it"),
    products=Fact({}, NO_TABLE),
    gather_bytes=Fact(2, "TRL has no tensor parallelism; 16 bits"),
    tensor_exposed=IN_THE_OPEN,
    repeats_last=Fact(
        False, f"{HF}, modeling_utils.py: use_reentrant=False, which stops after the last tensor that backward needs"
    ),
    merge=Fact(
        Merge(38, 16),
        f"{CP}, _SDPAMerger: five elementwise launches on float32 outputs; dQ is added in float32",
    ),
    exposed=Fact(
        False,
        f"{CP}: the gather starts before the first block and dK and dV after each, and they are awaited after the next "
        "block, because functional collectives are asynchronous outside of torch.compile",
    ),
    rotates=Fact(True, f"{CP}: an all-gather of K and V; permute_tensor of dK and dV in each step"),
    gathers_again=Fact(True, "torch.utils.checkpoint runs the whole forward of attention again"),
    host_update=NO_UPDATE,
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
    selective=Fact(
        0,
        f"{TITAN}, parallelize_llama.py, selective_ac_option=op: outputs of wq, wv, w1 and attention. Backward "
        "does not read that of w2, and torch.compile does not keep it. Counted by compiling a layer (tests)",
    ),
    alone=Fact(Exchange(6, 4), "FlashAttention 2 (SDPA's default): dQ also in float32; dQ, dK, dV in 16 bits"),
    forward=GATHERS_FORWARD,
    backward=Fact(Exchange(12, 34, 4), f"{CP}: as TRL's, without the gradients of all query heads"),
    logit_bytes=Fact(12, f"{TITAN}, train.py: the loss is not compiled and casts logits to float32; {EAGER_LOGITS}"),
    split_logit_bytes=Fact(
        16,
        "torch 2.13, distributed/tensor/parallel/loss.py, _nll_loss_and_log_softmax_backward: log-probabilities, "
        "zeros, their sum with probabilities, and its product with the gradient, in float32. Counted (tests)",
    ),
    gathered_layers=TRL.gathered_layers,
    head_gathered=Fact(2, f"{TITAN}, apply_fsdp: embedding and output are in the root group, gathered for the step"),
    gradient_bytes=TRL.gradient_bytes,
    reduce_bytes=Fact(6, f"{TITAN}, apply_fsdp: bf16 gradients, and the float32 input of reduce-scatter"),
    whole_bytes=Fact(0, f"{TITAN}, train.py: a step without pipeline has one micro batch; 0.3.0 reduces each"),
    pipeline_bytes=Fact(
        1,
        f"{TITAN}, apply_fsdp: no reshard with pipeline stages; llama3_405b.toml gathers weights of layers in Float8, "
        "which float8.py turns off if only the ranks of a ring share weights (data_parallel_shard_degree=1). torch "
        "2.6, pipelining/schedules.py: a stage reduces gradients in its last micro batch; FSDP2 accumulates them in "
        "reduce_dtype (float32), and then frees them and the gathered weights",
    ),
    outputs_stay=Fact(True, "torch's stages, until pytorch pull request 153383 (May 2025)"),
    short_ends=Fact(True, f"{TITAN}, pipelining_utils.py, generate_split_points: 126 layers are 15, six times 16, 15"),
    gradients_stay=Fact(True, f"{FSDP2}: shards come from the pool of the reduce stream, which stays reserved"),
    kernel=Fact("fa2", "SDPA's default of December 2024"),
    products=Fact(
        {"h100-96": {4096: 573e12, 8192: 609e12, 16384: 678e12}},
        "Float8 products, with all launches of compiled layers, from runs that are not counted: 8B, 8,532 tokens/s "
        "(table 1, row 3); 70B, 809.8 (benchmarks/asyncTP_llama3_h100_2025-06); 405B without pipeline, 177 "
        "(docs/performance.md of August 2024)",
    ),
    gather_bytes=Fact(
        1, "torchao eab345c, float8/float8_tensor_parallel.py: inputs and gradients are gathered in Float8"
    ),
    tensor_exposed=IN_THE_OPEN,
    repeats_last=Fact(False, f"{TITAN}: as TRL; backward of a compiled layer lacks the product with w2, too"),
    merge=TRL.merge,
    exposed=Fact(
        True,
        "torch 2.13, distributed/_functional_collectives.py, _maybe_wrap_tensor: in a compiled layer, a collective is "
        "awaited as soon as it starts",
    ),
    rotates=TRL.rotates,
    gathers_again=Fact(
        False,
        "torch 2.6, _functorch/partitioners.py, min_cut_rematerialization_partition: with cse (_functorch/config.py), "
        "equal gathers of recomputation and backward become one. Counted for torch's ring on 2, 4 and 8 ranks",
    ),
    host_update=NO_UPDATE,
    figure=Fact("reserved", f"{TITAN}, metrics.py: max_reserved_gib"),
)

TORCHTITAN_EAGER = replace(
    TORCHTITAN,
    name="torchtitan_eager",
    selective=Fact(
        1, f"{TITAN}, parallelize_llama.py: the cache of torch.utils.checkpoint also keeps the output of w2"
    ),
    products=Fact(
        {"h100-96": {4096: 348e12}},
        "16-bit products, with all launches of eager layers: calibrated with torchtitan's 5,762 tokens/s (table 1, "
        "row 1), which is not counted",
    ),
    gather_bytes=Fact(2, f"{TITAN}: Float8 needs torch.compile"),
    exposed=TRL.exposed,
    gathers_again=TRL.gathers_again,
)

TORCHTITAN_ASYNC = replace(
    TORCHTITAN,
    name="torchtitan_async",
    tensor_exposed=Fact(
        0.61,
        "torch's fused products hide 39 % of the collectives: 405B without pipeline has 177 tokens/s without them, and "
        "185 with them (torchtitan, docs/performance.md of August 2024), which is not counted",
    ),
)

TORCHTITAN_2025 = replace(
    TORCHTITAN,
    name="torchtitan_2025",
    logit_bytes=Fact(
        4,
        "torchtitan e7c0cae (13 June 2025), components/loss.py: the loss is compiled, and has logits and their "
        "gradient in 16 bits only. Counted by compiling it",
    ),
    split_logit_bytes=Fact(16, "not looked up for a compiled loss; that of the eager one"),
    outputs_stay=Fact(False, "pytorch pull request 153383 (May 2025): only the last stage keeps its outputs"),
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
    selective=Fact(None, "Megatron's selective recomputation is of attention or of named modules, not of products"),
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
    split_logit_bytes=Fact(6, "Megatron-Core 0.16, cross_entropy.py: the same code with and without a split"),
    gathered_layers=Fact(0, "the distributed optimizer keeps whole weights"),
    head_gathered=Fact(0, "the distributed optimizer keeps whole weights"),
    gradient_bytes=Fact(4, "Megatron-Core 0.16, arguments: bf16 accumulates and reduces gradients in float32"),
    reduce_bytes=Fact(0, "gradients are reduced in place, in the buffer of main gradients"),
    whole_bytes=Fact(0, "main gradients are whole with zero_stage=1, which is the distributed optimizer"),
    pipeline_bytes=Fact(0, "weights and main gradients are whole anyway"),
    outputs_stay=Fact(False, "Megatron-Core 0.16, pipeline_parallel/schedules.py, deallocate_output_tensor"),
    short_ends=Fact(False, "Megatron-Core 0.16: the layers must divide evenly; the average of the stages is planned"),
    gradients_stay=Fact(True, "Megatron-Core 0.16, param_and_grad_buffer.py: main gradients exist for the whole run"),
    kernel=Fact("cudnn", "TransformerEngine's FusedAttention"),
    products=Fact({}, NO_TABLE),
    gather_bytes=Fact(2, "Megatron-Core 0.16, tensor_parallel/layers.py: the 16-bit input"),
    tensor_exposed=IN_THE_OPEN,
    repeats_last=Fact(True, "Megatron-Core 0.16, CheckpointFunction runs the whole forward again"),
    merge=Fact(None, "TransformerEngine corrects outputs in one launch a step; not counted"),
    exposed=Fact(False, "TransformerEngine: the next block is received while one is computed"),
    rotates=Fact(False, "TransformerEngine: K, V, dK and dV travel together; hidden"),
    gathers_again=NO_GATHER,
    host_update=NO_UPDATE,
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
    selective=Fact(None, "DeepSpeed and transformers checkpoint whole layers"),
    alone=ALONE,
    forward=Fact(Exchange(6, 4), f"{ULYSSES}: an all-to-all has its input, its output and a contiguous copy"),
    backward=Fact(
        Exchange(14, 8),
        f"{ULYSSES}: the same of gradients; FlashAttention 2 also has dQ in float32, and dK and dV of all query heads",
    ),
    logit_bytes=Fact(2, f"{LIGER}/fused_linear_cross_entropy.py: the gradient replaces 16-bit logits, in chunks"),
    split_logit_bytes=Fact(2, "DeepSpeed's ZeRO does not split the vocabulary; as logit_bytes"),
    gathered_layers=TRL.gathered_layers,
    head_gathered=Fact(1, "ZeRO 3: the module that runs; stage3_max_live_parameters is 1e9"),
    gradient_bytes=Fact(0, "ZeRO 3: the shard of a gradient has the dtype of the weight"),
    reduce_bytes=Fact(4, "ZeRO 3: the gradient of a layer and the reduction bucket, in bf16"),
    whole_bytes=Fact(0, "accelerate 1.15, accelerator.py, no_sync: not from ZeRO 2 on; each micro batch is reduced"),
    pipeline_bytes=Fact(0, "no pipeline"),
    outputs_stay=Fact(False, "no pipeline"),
    short_ends=Fact(False, "no pipeline"),
    gradients_stay=Fact(True, "ZeRO 3 allocates its partition of gradients once"),
    kernel=Fact("fa2", "ALST (arXiv:2506.13996, 5.2): flash_attn 2.7.4"),
    products=Fact({}, NO_TABLE),
    gather_bytes=Fact(2, "ALST has no tensor parallelism; 16 bits"),
    tensor_exposed=IN_THE_OPEN,
    repeats_last=Fact(
        True,
        "ArcticTraining b28638e, monkey_patches.py: torch's reentrant CheckpointFunction runs the whole forward",
    ),
    merge=Fact(None, "all-to-all needs no merge"),
    exposed=Fact(True, f"{ULYSSES}: blocking all-to-alls; their bytes are counted as those of a ring, which are more"),
    rotates=Fact(False, f"{ULYSSES}: all-to-alls"),
    gathers_again=NO_GATHER,
    host_update=Fact(
        10 / (72.7e9 / 4),
        "DeepSpeed issue 6834: about 10 s for Qwen's 72.7e9 weights on 4 nodes of A100, and 0.2 s without offload. Its "
        "pull request 735 of 2021 has 8.2 s for 11.6e9 weights",
    ),
    figure=Fact("allocated", "ALST has the longest sequence on cards of 80 GiB"),
)

STACKS = {
    stack.name: stack
    for stack in (TRL, TORCHTITAN, TORCHTITAN_EAGER, TORCHTITAN_ASYNC, TORCHTITAN_2025, MEGATRON, DEEPSPEED)
}
"""The stacks by name. "ringattn" is `ringattn train`, whose formulas are those of `training_bytes`."""

NAMES = ("ringattn", *STACKS)
