"""Base classes of the layers: printed options, memory, and projections that overlap with messages.

If all K and V of a rank are sent in one message, they are projected directly into the message's buffer. While the
message is sent, K and V are copied from the buffer for local use, and queries are projected. If queries are sent too,
they are projected before anything is sent.

Guarantees: results and gradients equal those of projecting first and attending afterwards. Refusals come before
anything is sent.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ringattn.attention import agreed, apply_attention, call_of, check_recordable, check_sinks
from ringattn.core.dilation import Dilated
from ringattn.core.mask import AttentionMask
from ringattn.engine.base import KV
from ringattn.errors import InputError
from ringattn.layers.projection import check_projection, project, project_qkv, stored_dtype
from ringattn.layers.rotary import Rope, Rotation
from ringattn.masks import Tree
from ringattn.options import AttentionOptions
from ringattn.runtime.call import AttentionCall
from ringattn.runtime.records import LocalTensors
from ringattn.sequence import Sequence


def check_sequence(seq: object) -> None:
    """Raise `InputError` unless `seq` is a sequence, which has the ring of a call."""
    if not isinstance(seq, Sequence):
        raise InputError(f"seq must come from ring.sequence(...), got {type(seq).__name__}")


def shown(options: AttentionOptions, **others: object) -> str:
    """Return a layer's line in a printed model: `others`, and the options that differ from their defaults."""
    facts = others | options.changed()
    texts = {name: value.text if isinstance(value, AttentionMask) else value for name, value in facts.items()}
    return ", ".join(f"{name}={value!r}" for name, value in texts.items())


class Layer(nn.Module):
    """The base class of all layers, with their memory reports."""

    def own_memory(self) -> dict[str, int]:
        """Return the bytes of the layer's weights.

        Returns:
            The figures by name; empty for layers without weights.
        """
        return {}

    def get_memory_info(self, seq: Sequence | None = None) -> dict[str, int]:
        """Return the layer's bytes, and the memory of its ring. Not a collective call.

        Args:
            seq: A sequence of the ring, whose memory all layers share. None: the layer's bytes only.

        Returns:
            The figures of `own_memory`, and with `seq` also those of `Ring.memory_info`.

        Raises:
            Nothing.
        """
        return self.own_memory() | ({} if seq is None else seq.ring.memory_info())


class Projections(Layer):
    """The weights of a multi-head layer: one for queries, keys and values, one for the output, and norms."""

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        num_kv_heads: int | None,
        head_dim: int | None,
        *,
        bias: bool,
        qk_norm: bool,
        norm_eps: float,
        rope: Rope | None,
        device: torch.device | str | None,
        dtype: torch.dtype | None,
    ) -> None:
        """Create the weights. Raises `InputError` if head counts or rotary positions do not match the heads."""
        super().__init__()
        if num_kv_heads is not None and not hasattr(num_kv_heads, "__index__"):
            raise InputError(f"num_kv_heads must be a number of heads, got {num_kv_heads!r}; pass options by name")
        num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        if num_heads < 1 or num_kv_heads < 1 or num_heads % num_kv_heads:
            raise InputError(f"num_kv_heads must divide num_heads; got {num_kv_heads} and {num_heads}")
        if head_dim is None and embed_dim % num_heads:
            raise InputError(f"embed_dim {embed_dim} is not a multiple of num_heads {num_heads}; pass head_dim")
        self.embed_dim, self.num_heads, self.num_kv_heads = embed_dim, num_heads, num_kv_heads
        self.head_dim = embed_dim // num_heads if head_dim is None else head_dim
        self.norm_eps, self.rope = norm_eps, rope
        if rope is not None:
            rope.check(self.head_dim)

        def weight(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.empty(shape, device=device, dtype=dtype))

        columns = (num_heads + 2 * num_kv_heads) * self.head_dim
        self.in_proj_weight = weight(columns, embed_dim)
        self.in_proj_bias = weight(columns) if bias else None
        self.q_norm = weight(self.head_dim) if qk_norm else None
        self.k_norm = weight(self.head_dim) if qk_norm else None
        self.out_proj = nn.Linear(num_heads * self.head_dim, embed_dim, bias=bias, device=device, dtype=dtype)

    def reset_parameters(self) -> None:
        """Draw new weights like `torch.nn.MultiheadAttention`; biases are 0, norms 1."""
        nn.init.xavier_uniform_(self.in_proj_weight)
        self.out_proj.reset_parameters()
        for biases in (self.in_proj_bias, self.out_proj.bias):
            if biases is not None:
                nn.init.zeros_(biases)
        for norm in (self.q_norm, self.k_norm):
            if norm is not None:
                nn.init.ones_(norm)

    def own_memory(self) -> dict[str, int]:
        """Return the bytes of the layer's weights, and of K and V per token.

        Returns:
            `parameter_bytes`, and `kv_bytes_per_token` for the keys and values of one token.
        """
        kv_bytes = 2 * self.num_kv_heads * self.head_dim * self.in_proj_weight.element_size()
        parameter_bytes = sum(weight.numel() * weight.element_size() for weight in self.parameters())
        return {"parameter_bytes": parameter_bytes, "kv_bytes_per_token": kv_bytes}

    def _attended(self, x: Tensor, seq: Sequence, options: AttentionOptions, dilated: Dilated | None = None) -> Tensor:
        """Return the heads' outputs, (batch, tokens, q_heads, head_dim). A collective call.

        Keys and values are projected first, and sent while queries are projected. `dilated`: the branches of dilated
        attention. Raises the errors of `project_qkv` and `Ring.attention`.
        """
        ring, weight, bias, norms = seq.ring, self.in_proj_weight, self.in_proj_bias, (self.q_norm, self.k_norm)
        cut = [self.num_heads * self.head_dim, 2 * self.num_kv_heads * self.head_dim]
        turns: tuple[Rotation | None, Rotation | None] = (None, None)

        def described() -> AttentionCall:
            nonlocal turns
            dtype, rank = stored_dtype(x), f"rank {ring.rank}: "
            check_shard(x, seq, self.embed_dim)
            try:
                check_projection(x, weight, bias, norms, sum(cut), self.head_dim)
            except InputError as error:
                raise InputError(f"{rank}{error}") from error
            check_recordable(rank, {"x": x, "weight": weight})
            check_sinks(rank, options.sinks, self.num_heads, x.device)
            if self.rope is not None:
                positions = rotary_positions(seq, options).to(x.device)
                turns = self.rope.turns(positions, self.head_dim, dtype, seq.length)
            sizes = x.shape[0], self.num_heads, self.num_kv_heads, self.head_dim, self.head_dim
            return call_of(ring, seq, None, sizes, dtype, x.device, options, dilated)

        # q, k and v do not exist yet, so the gradients that ranks need follow from the inputs of their projections.
        inputs = {"x": x, "weight": weight, "bias": bias, "q_norm": self.q_norm, "k_norm": self.k_norm}
        call = agreed(ring, described, options.sinks, inputs | {"sinks": options.sinks})
        # Each tensor is split once, so that autograd joins the gradients of its two parts by one copy.
        (q_weight, kv_weight), (q_bias, kv_bias) = weight.split(cut), (None, None) if bias is None else bias.split(cut)
        finish: dict[str, Any] = {"norms": norms, "norm_eps": self.norm_eps, "turns": turns}
        keys_values: tuple[Tensor, ...] = ()
        in_message = False

        def make(into: KV | None) -> LocalTensors:
            nonlocal keys_values, in_message
            in_message, places = into is not None, None if into is None else (into.k, into.v)
            keys_values = project(x, kv_weight, kv_bias, 0, self.num_kv_heads, self.head_dim, into=places, **finish)
            return LocalTensors(*(part.detach().transpose(0, 1) for part in keys_values))

        executor = ring.executor_of(call, backward=False)
        with ring.begun(executor, call, make):
            (q,) = project(x, q_weight, q_bias, self.num_heads, 0, self.head_dim, **finish)
            # If the keys and values are in a message, its buffer belongs to the ring.
            k, v = (part.clone() for part in keys_values) if in_message else keys_values
            return apply_attention(ring, call, q, k, v, options.sinks)[0]

    def _projected(self, x: Tensor, seq: Sequence) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries, keys and values. Raises `InputError` unless x is this rank's shard."""
        check_shard(x, seq, self.embed_dim)
        return project_qkv(
            x, self.in_proj_weight, self.in_proj_bias, self.num_heads, self.num_kv_heads, self.head_dim,
            q_norm=self.q_norm, k_norm=self.k_norm, norm_eps=self.norm_eps, rope=self.rope,
            positions=None if self.rope is None else seq.positions().to(x.device),
            length=seq.length,
        )  # fmt: skip


def rotary_positions(seq: Sequence, options: AttentionOptions) -> Tensor:
    """Return the positions by which this rank's tokens are rotated: along the paths of a tree, else in the sequence.

    Packed documents need no separate positions, because scores depend on differences of positions only.
    Raises `InputError` for a tree in a mask per head.
    """
    mask = options.mask or seq.mask
    if isinstance(mask, Tree):
        return (seq if mask is seq.mask else seq.with_mask(mask)).positions(per_document=True)
    if mask is not None and mask.by_depth:
        raise InputError(
            f"rank {seq.ring.rank}: rope rotates all heads by the same positions, and in {type(mask).__name__} the "
            "positions of some heads count along the paths of a tree; leave rope out, or give all heads one tree"
        )
    return seq.positions()


def check_shard(x: Tensor, seq: Sequence, model: int) -> None:
    """Raise `InputError` unless x is this rank's shard of `seq`, and its tokens have `model` elements."""
    rank, tokens = seq.ring.rank, seq.counts[seq.ring.rank]
    if x.dim() != 3 or x.shape[1:] != (tokens, model):
        raise InputError(
            f"rank {rank}: x must be (batch, {tokens}, {model}), this rank's shard, got {tuple(x.shape)}; "
            "pass seq.shard(x)"
        )
