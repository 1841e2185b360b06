"""Attention layers for models whose tokens lie over a ring.

A layer is given this rank's tokens and the `Sequence` that says which they are; the ring comes from the sequence, so
the same layer trains alone and on many ranks.
Guarantees: weights are plain parameters, alike on every rank; gradients are this rank's part, to be summed over the
ranks (`ring.all_reduce`).
"""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import Unpack

import torch
from torch import Tensor, nn

from ringattn.attention import attend
from ringattn.errors import InputError
from ringattn.layers.overlapped import Heads, projected_attention
from ringattn.layers.rotary import Rope
from ringattn.runtime.spec import AttentionSpec, SoftmaxOptions, Window
from ringattn.sequence import Sequence


class Reports:
    """What a layer over a ring says of its memory."""

    def own_memory(self) -> dict[str, int]:
        """Bytes of the weights, for layers with projections."""
        return {}

    def get_memory_info(self, seq: Sequence | None = None) -> dict[str, int]:
        """The layer's own bytes; with `seq` also its ring's memory, which all layers share: see `Ring.memory_info`."""
        return self.own_memory() | ({} if seq is None else seq.ring.memory_info())


class RingAttention(Reports, nn.Module):
    """`Ring.attention` as a module that keeps the mask and the softmax's options; see there for their meaning.

    `sink_heads`: the number of query heads, for learned sinks (parameter `sinks`, zeros at first); None for no sinks.
    """

    def __init__(
        self,
        *,
        causal: bool = False,
        window: Window = None,
        sink_heads: int | None = None,
        **softmax: Unpack[SoftmaxOptions],
    ) -> None:
        super().__init__()
        self._spec = AttentionSpec.banded(causal, window, **softmax)
        self.sinks = None if sink_heads is None else nn.Parameter(torch.zeros(sink_heads))

    def forward(self, q: Tensor, k: Tensor, v: Tensor, seq: Sequence) -> Tensor:
        """q (batch, tokens, q_heads, d_k), k and v (batch, tokens, kv_heads, ...): this rank's shards of `seq`.

        Returns (batch, tokens, q_heads, d_v). Raises like `Ring.attention`.
        """
        return attend(seq.ring, q, k, v, seq, None, self.spec)[0]

    @property
    def spec(self) -> AttentionSpec:
        """What the layer computes, its sinks included."""
        return replace(self._spec, sinks=self.sinks)

    def extra_repr(self) -> str:
        """The options, in the layer's line of a printed model."""
        facts = asdict(self._spec.mask) | {"softcap": self._spec.softcap, "schedule": self._spec.schedule}
        return ", ".join(f"{name}={value!r}" for name, value in facts.items())


class Projections(Reports, nn.Module):
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
        """Raises `InputError` for heads that do not fit each other, and rotary positions that do not fit heads."""
        super().__init__()
        num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        if num_heads < 1 or num_kv_heads < 1 or num_heads % num_kv_heads:
            raise InputError(f"num_kv_heads must divide num_heads; got {num_kv_heads} and {num_heads}")
        if head_dim is None and embed_dim % num_heads:
            raise InputError(f"embed_dim {embed_dim} is no multiple of num_heads {num_heads}; give head_dim")
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
        """Draw new weights, as `torch.nn.MultiheadAttention` does; biases 0, norms 1."""
        nn.init.xavier_uniform_(self.in_proj_weight)
        self.out_proj.reset_parameters()
        for biases in (self.in_proj_bias, self.out_proj.bias):
            if biases is not None:
                nn.init.zeros_(biases)
        for norm in (self.q_norm, self.k_norm):
            if norm is not None:
                nn.init.ones_(norm)

    def own_memory(self) -> dict[str, int]:
        """Bytes of the parameters, and of the keys and values of one token."""
        kv_bytes = 2 * self.num_kv_heads * self.head_dim * self.in_proj_weight.element_size()
        parameter_bytes = sum(weight.numel() * weight.element_size() for weight in self.parameters())
        return {"parameter_bytes": parameter_bytes, "kv_bytes_per_token": kv_bytes}


class RingMultiheadAttention(Projections):
    """Self-attention with its projections: x to queries, keys and values by one weight, attention, output projection.

    The parameters have the names and, for equal heads, the shapes of `torch.nn.MultiheadAttention`, so its state
    dictionaries load. `num_kv_heads`: fewer key and value heads (GQA); it divides `num_heads`, which is its default.
    `head_dim`: embed_dim / num_heads if None. `qk_norm`: RMS normalization of each query and key head, learned weights
    `q_norm` and `k_norm`. `rope`: "neox" or "interleaved" rotary positions, which are global ones. `sinks`: one learned
    logit per query head that takes weight and gives no value. The other options are those of `Ring.attention`.
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        num_kv_heads: int | None = None,
        head_dim: int | None = None,
        *,
        bias: bool = False,
        qk_norm: bool = False,
        norm_eps: float = 1e-6,
        rope: str | None = None,
        rope_base: float = 10_000.0,
        causal: bool = False,
        window: Window = None,
        sinks: bool = False,
        **softmax: Unpack[SoftmaxOptions],
    ) -> None:
        """Raises `InputError` for heads that do not fit each other, and for an unknown `rope`."""
        super().__init__(
            embed_dim, num_heads, num_kv_heads, head_dim, bias=bias, qk_norm=qk_norm, norm_eps=norm_eps,
            rope=None if rope is None else Rope(rope, rope_base), device=None, dtype=None,
        )  # fmt: skip
        self.attention = RingAttention(causal=causal, window=window, sink_heads=num_heads if sinks else None, **softmax)
        self.reset_parameters()

    def forward(self, x: Tensor, seq: Sequence) -> Tensor:
        """x (batch, tokens, embed_dim), this rank's shard of `seq`, to the same shape. All ranks call it together.

        Raises `InputError` on every rank where one rank's x does not fit.
        """
        attended = projected_attention(
            x, self.in_proj_weight, self.in_proj_bias, seq, Heads(self.num_heads, self.num_kv_heads, self.head_dim),
            q_norm=self.q_norm, k_norm=self.k_norm, norm_eps=self.norm_eps, rope=self.rope, spec=self.attention.spec,
        )  # fmt: skip
        out: Tensor = self.out_proj(attended.flatten(2))
        return out
