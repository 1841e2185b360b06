"""A small decoder-only transformer that is independent of the sharding of its tokens, and options that save memory.

The model has RMSNorm, rotary positions, grouped-query attention and SwiGLU. The caller passes the *global* positions of
the tokens and the attention function, so the same code trains a whole sequence or one shard of it.
Guarantees: the same seed gives the same weights in every process and, up to their rounding, in every dtype.

The rest of the module has the options that trade time for memory.

Sharding: zero2 gathers the weights once for forward and backward together. zero3 drops the weights of each block after
its forward pass and gathers them a second time. Both shard gradients and optimizer state (ZeRO, arXiv:1910.02054) over
all ranks of a run, replicas times ranks of a ring, because weights are the same everywhere.

Optimizers: the bytes of state for each float32 weight are 8 for adamw, 4 for lion, 2 and a scale for each block for
adamw8bit, and 0 for sgd. adafactor has two vectors for each matrix (rows and columns).

Saved activations: autograd's saved-tensor hooks pack an activation when an operation saves it and unpack it when
backward needs it. Forward computes with the exact values, so the loss of a step is unchanged and only gradients are
rounded. Measured on 2 layers of width 32 in float64: the relative error of a step's gradients is 0.13 % of their norm
in int8 and 0.57 % in fp8 (0.46 % with bf16 activations throughout). The relative error of 30 losses at the default
learning rate is at most 8e-6 in int8 and 8e-5 in fp8 (1.2e-4 with bf16).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from typing import Any, NamedTuple, ParamSpec, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.optim import Optimizer
from torch.utils.checkpoint import checkpoint

from ringattn import Ring
from ringattn.engine.base import accumulator_dtype
from ringattn.launch.train.config import PROJECTION_ROWS, ModelConfig, head_dim, optimizer_source
from ringattn.launch.train.mesh import join_process_group
from ringattn.layers.head_groups import HeadGroups, in_head_groups
from ringattn.layers.projection import project_qkv
from ringattn.layers.rotary import Rope
from ringattn.layers.tiled import Tiling, inputs_on_host, tiled

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Causal attention: from q (batch, tokens, heads, head_dim) and k, v (batch, tokens, kv_heads, head_dim), the output,
which has the shape of q."""

Head = Callable[[Tensor, nn.Module, nn.Module], Tensor]
"""A function of the hidden states (batch, tokens, dim), of their norm, and of the layer that computes logits from
normalized states. It returns, for example, a loss."""


class Linear(nn.Linear):
    """A linear layer without bias whose weights take the dtype of its input, so that they may stay in float32."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return `x` (..., inputs) times the weights: (..., outputs), in the dtype of `x`."""
        return F.linear(x, self.weight.to(x.dtype))


class RMSNorm(nn.RMSNorm):
    """A root-mean-square norm, computed and learned in the dtype of its weight, with results in the input's dtype."""

    def forward(self, x: Tensor) -> Tensor:
        """Return `x` (..., dim) normalized, in the dtype of `x`."""
        assert self.weight is not None
        return super().forward(x.to(self.weight.dtype)).to(x.dtype)


class Block(nn.Module):
    """A transformer block: attention, then SwiGLU, each on a normalized residual stream.

    `recompute` selects the activations that backward computes again instead of keeping them. full: the whole block is
    recomputed from its input, so ring attention runs and communicates again on all ranks. selective: everything except
    attention is recomputed, and attention's inputs and output are kept. Attention is the only part that grows with the
    square of the length and the only one that communicates, and a fused kernel keeps no scores that recomputation could
    save. offloaded: as full, with the block's input in host memory until backward.

    `head_groups` is the number of groups of heads that norm, projection and attention process one after another, see
    `layers.head_groups`. Norm and projection are then always recomputed, and process `PROJECTION_ROWS` tokens at a
    time. 1 stands for all heads at once.

    `tile_tokens` is the number of tokens that pass through norm and SwiGLU at a time. They are computed again in
    backward. None stands for all tokens at once, without recomputation.
    """

    def __init__(
        self, config: ModelConfig, recompute: str = "none", tile_tokens: int | None = None, head_groups: int = 1
    ) -> None:
        super().__init__()
        self.recompute, self.tile_tokens, self.head_groups = recompute, tile_tokens, head_groups
        self.heads, self.kv_heads, self.head_dim = config.heads, config.kv_heads, head_dim(config)
        self.rope = Rope(base=config.rope_base)
        self.attention_norm = RMSNorm(config.dim, eps=1e-6)
        self.qkv = Linear(config.dim, (config.heads + 2 * config.kv_heads) * self.head_dim)
        self.attention_out = Linear(config.heads * self.head_dim, config.dim)
        self.hidden_norm = RMSNorm(config.dim, eps=1e-6)
        self.hidden_in = Linear(config.dim, 2 * config.hidden_dim)
        self.hidden_out = Linear(config.hidden_dim, config.dim)

    def forward(self, x: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """Return the block's output for `x`, both (batch, tokens, dim). `positions` has shape (tokens,)."""
        if self.recompute == "offloaded":
            with inputs_on_host():
                return self._run("offloaded", self._attend_and_feed, x, positions, attend)
        return self._run("full", self._attend_and_feed, x, positions, attend)

    def _attend_and_feed(self, x: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        if self.head_groups > 1:
            return self._run("selective", self._hidden_in_tiles, x + self._attend_in_groups(x, positions, attend))
        q, k, v = self._run("selective", self._project, x, positions)
        return self._run("selective", self._feed, x, attend(q, k, v))

    def _project(self, x: Tensor, positions: Tensor) -> tuple[Tensor, ...]:
        return project_qkv(
            self.attention_norm(x), self.qkv.weight.to(x.dtype), None, self.heads, self.kv_heads, self.head_dim,
            rope=self.rope, positions=positions,
        )  # fmt: skip

    def _attend_in_groups(self, x: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        def attention(x: Tensor, group: int) -> Tensor:
            # The rows of a tile may be of several sequences, so each row has its position.
            tiling = Tiling(partial(self._project_group, group), PROJECTION_ROWS)
            projected = tiled(tiling, x, weights, [positions.expand(x.shape[:-1])])
            return attend(*projected.unflatten(-1, (-1, self.head_dim)).split(self._heads_of_group, 2)).flatten(2)

        weights = [*self.attention_norm.parameters(), self.qkv.weight]
        return in_head_groups(HeadGroups(attention, self.head_groups), x, weights, self.attention_out.weight)

    @property
    def _heads_of_group(self) -> list[int]:
        """The number of query, key and value heads of a group."""
        return [heads // self.head_groups for heads in (self.heads, self.kv_heads, self.kv_heads)]

    def _project_group(self, group: int, x: Tensor, positions: Tensor) -> Tensor:
        """Return the queries, keys and values of a group for rows x (tokens, dim), side by side."""
        sections = self.qkv.weight.split([heads * self.head_dim for heads in (self.heads, *2 * [self.kv_heads])])
        weight = torch.cat([section.chunk(self.head_groups)[group] for section in sections])
        heads, kv_heads, _ = self._heads_of_group
        qkv = project_qkv(
            self.attention_norm(x)[None], weight.to(x.dtype), None, heads, kv_heads, self.head_dim,
            rope=self.rope, positions=positions,
        )  # fmt: skip
        return torch.cat(qkv, 2)[0].flatten(1)

    def _feed(self, x: Tensor, attended: Tensor) -> Tensor:
        return self._hidden_in_tiles(x + self.attention_out(attended.flatten(2)))

    def _hidden_in_tiles(self, x: Tensor) -> Tensor:
        if self.tile_tokens is None:
            return self._hidden(x)
        parts = self.hidden_norm, self.hidden_in, self.hidden_out
        weights = [weight for part in parts for weight in part.parameters()]
        return tiled(Tiling(self._hidden, self.tile_tokens), x, weights)

    def _hidden(self, x: Tensor) -> Tensor:
        gate, up = self.hidden_in(self.hidden_norm(x)).chunk(2, dim=-1)
        return x + self.hidden_out(F.silu(gate) * up)

    def _run(self, recompute: str, part: Callable[..., Any], *inputs: Any) -> Any:
        """Run a part of the block. If the block's policy is `recompute`, drop its activations and recompute them."""
        if self.recompute != recompute:
            return part(*inputs)
        return checkpoint(part, *inputs, use_reentrant=False, preserve_rng_state=False)  # nothing is random


class Transformer(nn.Module):
    """A language model over `vocabulary` tokens.

    Activations have the dtype `dtype`. Weights are float64 if `dtype` is, else float32. The model is made on the CPU;
    move it with `.to(device)`. For `recompute`, `tile_tokens` and `head_groups` see `Block`.
    """

    def __init__(
        self,
        config: ModelConfig,
        vocabulary: int,
        dtype: torch.dtype,
        seed: int,
        recompute: str = "none",
        tile_tokens: int | None = None,
        head_groups: int = 1,
    ) -> None:
        super().__init__()
        self.config, self.dtype = config, dtype
        self.embedding = nn.Embedding(vocabulary, config.dim)
        self.blocks = nn.ModuleList(Block(config, recompute, tile_tokens, head_groups) for _ in range(config.layers))
        self.norm = RMSNorm(config.dim, eps=1e-6)
        self.unembedding = Linear(config.dim, vocabulary)
        if config.tied:
            self.unembedding.weight = self.embedding.weight
        self._draw_weights(seed)
        if dtype == torch.float64:
            self.double()

    def _draw_weights(self, seed: int) -> None:
        # Draw on the CPU in float32, before the model gets its device and dtype, so that a seed determines the weights.
        generator = torch.Generator().manual_seed(seed)
        for name, weight in self.named_parameters():
            if weight.dim() == 2:
                # Layers that write to the residual stream get smaller weights, so that depth does not raise its norm.
                shrink = math.sqrt(2 * self.config.layers) if name.endswith("_out.weight") else 1.0
                nn.init.normal_(weight, std=0.02 / shrink, generator=generator)

    def forward(self, tokens: Tensor, positions: Tensor, attend: Attend, head: Head | None = None) -> Tensor:
        """Return the logits (batch, tokens, vocabulary), in `dtype`, of tokens (batch, tokens).

        `positions` (tokens,) are the global positions. With a `head`, return its result instead, for example a loss
        that never holds the logits of all tokens at once.
        """
        x = self.embedding(tokens).to(self.dtype)
        for block in self.blocks:
            x = block(x, positions, attend)
        return self.unembedding(self.norm(x)) if head is None else head(x, self.norm, self.unembedding)


# --- the weights of a rank --------------------------------------------------------------------------------------------


def place_model(everyone: Ring, model: Transformer, sharding: str, timeout_s: float) -> None:
    """Move the model to this rank's device, copy the weights of rank 0 to all ranks, and shard them. A collective call.

    The seed is the same on all ranks, but another version of torch may draw other numbers from it. Blocks follow one
    after another. The device therefore never has a second copy of more than one block or of the weights outside of the
    blocks, and with sharding it never has the whole model. Raises `InputError` if `sharding` is not none and the ranks
    are threads.
    """
    shard = _sharder(everyone, sharding, timeout_s) if sharding != "none" else None
    others = nn.ModuleList(part for part in model.children() if part is not model.blocks)
    # The model is the last part: to shard it shards the weights outside of the blocks.
    for weights, part in (*((block, block) for block in model.blocks), (others, model)):
        weights.to(everyone.device)
        everyone.broadcast([weight.data for weight in weights.parameters()], src=0)
        if shard is not None:
            shard(part)


def _sharder(everyone: Ring, sharding: str, timeout_s: float) -> Callable[[nn.Module], None]:
    """Return a function that shards a part of a model over all ranks by FSDP2, in place. All have the same weights.

    FSDP then sums gradients over the ranks, as `Ring.all_reduce` does, instead of averaging them. Raises `InputError`
    if the ranks are threads, because FSDP uses torch's process group, of which a process has only one.
    """
    # Import these here, because they take half a second.
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    join_process_group(everyone, "sharding", timeout_s)
    mesh = init_device_mesh(everyone.device.type, (everyone.world_size,), mesh_dim_names=("dp_cp",))

    def shard(part: nn.Module) -> None:
        # The weights outside of the blocks are not dropped after forward, because their backward begins immediately.
        drops = sharding == "zero3" and isinstance(part, Block)
        sharded = fully_shard(part, mesh=mesh, reshard_after_forward=drops)
        sharded.set_gradient_divide_factor(1.0)  # for this part only; the default divides by the number of ranks
        # Without this, float32 and bf16 gradients would be reduced by PREMUL_SUM, which gloo does not have.
        sharded.set_force_sum_reduction_for_comms(True)

    return shard


# --- optimizers ------------------------------------------------------------------------------------------------------


def make_optimizer(name: str, weights: Iterable[Tensor], lr: float, weight_decay: float) -> Optimizer:
    """Return the optimizer `name` of `config.OPTIMIZERS`. Raises `InputError` if its package is not installed.

    sgd is without momentum. adafactor is torch's, whose steps are `lr` times the root mean square of each weight. None
    of torch's optimizers updates all weights at once, as they do on a GPU if they are not told otherwise: that would
    take temporary tensors of the size of all weights. AdamW has a fused kernel there, which takes none.
    """
    module, _, kind = optimizer_source(name).partition(":")
    weights = list(weights)
    options: dict[str, Any] = {"betas": (0.9, 0.95)} if name in ("adamw", "adamw8bit") else {}
    if module == "torch.optim":
        fused = name == "adamw" and any(weight.is_cuda for weight in weights)
        options |= {"fused": True} if fused else {"foreach": False}
    optimizer: Optimizer = getattr(import_module(module), kind)(weights, lr=lr, weight_decay=weight_decay, **options)
    return optimizer


def state_bytes(optimizer: Optimizer) -> int:
    """Return the bytes of the tensors that the optimizer keeps on this rank."""
    kept = (tensor for state in optimizer.state.values() for tensor in state.values() if isinstance(tensor, Tensor))
    return sum(local_bytes(tensor) for tensor in kept)


def local_bytes(tensor: Tensor) -> int:
    """Return the bytes of a tensor on this rank. Under FSDP only its shard counts; in eight bits, codes and scales."""
    if hasattr(tensor, "__tensor_flatten__"):
        names, _ = tensor.__tensor_flatten__()
        inner = (getattr(tensor, name) for name in names)
        return sum(local_bytes(part) for part in inner if isinstance(part, Tensor))  # a DTensor also names its mesh
    return tensor.numel() * tensor.element_size()


# --- saved activations -----------------------------------------------------------------------------------------------


P = ParamSpec("P")
T = TypeVar("T")

EIGHT_BIT = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}
LARGEST = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}
"""The value to which the largest element of a row is scaled. OCP 8-bit floating point specification for e4m3: 448."""


class PackedRows(NamedTuple):
    """A tensor whose rows were packed in eight bits.

    `values` has the shape of the tensor, `scales` (..., 1) has the accumulator dtype, and `dtype` is the tensor's own.
    """

    values: Tensor
    scales: Tensor
    dtype: torch.dtype


def pack_rows(x: Tensor, dtype: torch.dtype) -> PackedRows:
    """Pack the rows (last dimension) of a floating `x` in int8 or float8_e4m3fn, with a scale for each row.

    Let a be the largest magnitude of a row. In int8, the error of an element is at most a / 254, which is half a step.
    In float8_e4m3fn, it is at most 1/16 of the element (3 bits of mantissa) or a / 448 / 1024 (half the smallest
    subnormal, 2**-9), whichever is larger. The rounding of `x`'s own dtype is added. A row with a NaN or an infinity
    becomes NaN.
    """
    wide = x.to(accumulator_dtype(x.dtype))
    scales = wide.abs().amax(-1, keepdim=True) / LARGEST[dtype]
    # Clamp the scales. Otherwise a row of zeros would be divided by 0, and a tiny row by a scale without reciprocal.
    scaled = wide / scales.clamp_min(torch.finfo(scales.dtype).tiny)
    return PackedRows((scaled.round() if dtype == torch.int8 else scaled).to(dtype), scales, x.dtype)


def unpack_rows(packed: PackedRows) -> Tensor:
    """Return the tensor that was packed, with the errors that `pack_rows` describes."""
    return (packed.values.to(packed.scales.dtype) * packed.scales).to(packed.dtype)


@dataclass(frozen=True)
class _Packed:
    """A packed activation. Its type distinguishes it from tensors that are saved unchanged."""

    content: Any


class SavedActivations:
    """A packer of the activations that one forward pass saves for its backward pass. Each step makes a new one.

    `how` is keep, offload (from a GPU to pinned host memory), int8 or fp8. A tensor counts as an activation if it is a
    floating tensor of `rows` rows (batch times tokens of this rank) with at least `row_elements` elements each; shorter
    rows are angles and norms.
    Guarantees: nothing else is packed. The `weights`, integers and angles are saved unchanged, and so are the tensors
    that a function wrapped by `exactly` saves. Attention needs this, because it recomputes its probabilities as
    exp(score - lse), which would not sum to one with rounded keys or lse.
    """

    def __init__(self, how: str, weights: Iterable[Tensor], rows: int, row_elements: int) -> None:
        self._how, self._rows, self._row_elements = how, rows, row_elements
        self._exact = {_address(weight) for weight in weights} if how != "keep" else set()
        self._to_host = save_on_cpu(pin_memory=True) if how == "offload" else None

    def packing(self) -> AbstractContextManager[Any]:
        """Return a context in which activations that are saved for backward are packed."""
        return nullcontext() if self._how == "keep" else saved_tensors_hooks(self._pack, self._unpack)

    def exactly(self, function: Callable[P, T]) -> Callable[P, T]:
        """Return `function`, wrapped so that the tensors it saves are not packed, even if other operations save them.

        Do not use it for a function that is called under activation checkpointing, because its tensors would then be
        kept instead of recomputed.
        """

        def run(*arguments: P.args, **named: P.kwargs) -> T:
            with saved_tensors_hooks(self._keep, lambda tensor: tensor):
                return function(*arguments, **named)

        return function if self._how == "keep" else run

    def _keep(self, tensor: Tensor) -> Tensor:
        self._exact.add(_address(tensor))
        return tensor

    def _is_activation(self, tensor: Tensor) -> bool:
        if not tensor.is_floating_point() or tensor.dim() < 2 or _address(tensor) in self._exact:
            return False
        rows, elements = tensor.shape[:-1].numel(), tensor.shape[-1]
        # Matrix products save weights, and their casts, transposed. The stride excludes them: their rows are not
        # contiguous.
        return rows == self._rows and elements >= self._row_elements and tensor.stride(-1) == 1

    def _pack(self, tensor: Tensor) -> Tensor | _Packed:
        if not self._is_activation(tensor):
            return tensor
        return _Packed(self._to_host.pack_hook(tensor) if self._to_host else pack_rows(tensor, EIGHT_BIT[self._how]))

    def _unpack(self, saved: Tensor | _Packed) -> Tensor:
        if isinstance(saved, Tensor):
            return saved
        unpacked: Tensor = self._to_host.unpack_hook(saved.content) if self._to_host else unpack_rows(saved.content)
        return unpacked


def _address(tensor: Tensor) -> int:
    """Return the address of a tensor's storage. It is the same for all views, and unique while the tensor is alive."""
    return tensor.untyped_storage().data_ptr()
