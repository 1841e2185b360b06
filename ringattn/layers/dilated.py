"""Dilated attention as layers, each in two forms: of whole sequences on one device, and over a ring.

Guarantees: the two forms of a layer have the same parameters, so that state dictionaries load either way; on one device
a layer needs no ring of the caller's, and its copies and pickles carry none along; branches that cannot reach every
query are warned of once per layer.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from dataclasses import asdict
from typing import Any, Unpack

import torch
from torch import Tensor, nn

from ringattn.core.dilation import Dilated
from ringattn.core.presets import check, coverage_warnings
from ringattn.errors import InputError
from ringattn.layers.attention import Projections, Reports
from ringattn.layers.overlapped import Heads, projected_attention
from ringattn.layers.projection import project_qkv
from ringattn.layers.rotary import Rope
from ringattn.ring import Ring
from ringattn.runtime.spec import AttentionSpec, SoftmaxOptions
from ringattn.sequence import Sequence
from ringattn.transport.local import LocalWorld


class Alone(Reports):
    """What a layer on one device has besides: a ring of its own, of one rank whatever other processes there are."""

    _ring: Ring | None = None

    @property
    def ring(self) -> Ring:
        """The layer's ring, opened at its first use."""
        if self._ring is None:
            self._ring = Ring(transport=LocalWorld(1).transport(0))
        return self._ring

    def get_memory_info(self, seq: Sequence | None = None) -> dict[str, int]:
        """The layer's own bytes and the memory that it keeps between calls; `seq` is of its own ring."""
        return self.own_memory() | self.ring.memory_info()

    def whole(self, x: Tensor) -> Sequence:
        """The sequence that is all of dimension 1 of `x`. Raises `InputError` where there is no such dimension."""
        if not isinstance(x, Tensor) or x.dim() < 3:
            got = tuple(x.shape) if isinstance(x, Tensor) else type(x).__name__
            raise InputError(f"a layer of whole sequences takes (batch, tokens, ...) tensors, got {got}")
        return self.ring.sequence(x.shape[1])

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_ring"}


class Dilation(Reports, nn.Module):
    """The branches and the options of `Ring.dilated_attention`, kept; see there for their meaning."""

    def __init__(
        self,
        segment_lengths: Iterable[int],
        dilation_rates: Iterable[int],
        *,
        causal: bool = False,
        offset: str = "mod",
        grad: str = "exact",
        tail: str = "ragged",
        layer: int | None = None,
        **softmax: Unpack[SoftmaxOptions],
    ) -> None:
        """Raises `InputError` for branches, an offset or a layer that are wrong; a call checks the other options."""
        super().__init__()
        self.branches = check(segment_lengths, dilation_rates)
        self.pairs = Dilated(*self.branches, causal, offset, layer)
        self.spec = AttentionSpec(self.pairs, **softmax)
        self.grad, self.tail, self._softmax = grad, tail, softmax
        self.warned = False

    def attend(self, q: Tensor, k: Tensor, v: Tensor, seq: Sequence) -> Tensor:
        """`Ring.dilated_attention` of this rank's shards of `seq`."""
        out: Tensor = seq.ring.dilated_attention(
            q, k, v, seq, **asdict(self.pairs), grad=self.grad, tail=self.tail, **self._softmax
        )  # fmt: skip
        self.warn_once(q.shape[2], k.shape[2])  # after the call, which has checked the shapes
        return out

    def warn_once(self, q_heads: int, kv_heads: int) -> None:
        """Warn of branches that cannot reach every query of so many heads; a second time nothing."""
        found = () if self.warned else coverage_warnings(self.branches, q_heads, self.pairs.offset, kv_heads)
        self.warned = True
        for warning in found:
            warnings.warn(warning, stacklevel=3)

    def extra_repr(self) -> str:
        """The options, in the layer's line of a printed model."""
        facts = asdict(self.pairs) | {"grad": self.grad, "tail": self.tail, "schedule": self.spec.schedule}
        return ", ".join(f"{name}={value!r}" for name, value in facts.items())


class RingDilatedAttention(Dilation):
    """`Ring.dilated_attention` as a module; see there for the options."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, seq: Sequence) -> Tensor:
        """q (batch, tokens, q_heads, d_k), k and v (batch, tokens, kv_heads, ...): this rank's shards of `seq`.

        Returns (batch, tokens, q_heads, d_v). Raises like `Ring.dilated_attention`.
        """
        return self.attend(q, k, v, seq)


class DilatedAttention(Alone, Dilation):
    """`RingDilatedAttention` on one device."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q (batch, tokens, q_heads, d_k), k and v (batch, tokens, kv_heads, ...), whole sequences.

        Returns (batch, tokens, q_heads, d_v). Raises like `Ring.dilated_attention`.
        """
        return self.attend(q, k, v, self.whole(q))


class MultiheadDilation(Projections):
    """Dilated self-attention with its projections: one weight for queries, keys and values, and one for the output.

    `num_kv_heads`: fewer key and value heads (GQA); it divides `num_heads`, its default. `head_dim`: embed_dim /
    num_heads if None. `qk_norm`: RMS normalization of each query and key head, with `norm_eps`. `rope`: "neox" or
    "interleaved" rotary positions, which are global ones; with `xpos_scale` (tokens) they are XPos, see `Rope`.
    `layer_norm`: normalizes the heads together before the output projection, as LongNet does (the sub-layer norm of
    MAGNETO, arXiv:2210.06423). The other options are those of `Ring.dilated_attention`.
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        segment_lengths: Iterable[int],
        dilation_rates: Iterable[int],
        *,
        num_kv_heads: int | None = None,
        head_dim: int | None = None,
        bias: bool = True,
        qk_norm: bool = False,
        norm_eps: float = 1e-6,
        rope: str | None = None,
        rope_base: float = 10_000.0,
        xpos_scale: float | None = None,
        layer_norm: bool = False,
        causal: bool = False,
        offset: str = "mod",
        grad: str = "exact",
        tail: str = "ragged",
        layer: int | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        **softmax: Unpack[SoftmaxOptions],
    ) -> None:
        """Raises `InputError` for heads, branches, an offset and rotary positions that are unknown or do not fit."""
        if rope is None and xpos_scale is not None:
            raise InputError(f"xpos_scale={xpos_scale} needs rotary positions; give rope='interleaved' or 'neox'")
        super().__init__(
            embed_dim, num_heads, num_kv_heads, head_dim, bias=bias, qk_norm=qk_norm, norm_eps=norm_eps,
            rope=None if rope is None else Rope(rope, rope_base, xpos_scale), device=device, dtype=dtype,
        )  # fmt: skip
        columns = num_heads * self.head_dim
        self.layer_norm = nn.LayerNorm(columns, device=device, dtype=dtype) if layer_norm else None
        self.attention = RingDilatedAttention(
            segment_lengths, dilation_rates, causal=causal, offset=offset, grad=grad, tail=tail, layer=layer,
            **softmax,
        )  # fmt: skip
        self.attention.warn_once(self.num_heads, self.num_kv_heads)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw new weights, as `torch.nn.MultiheadAttention` does; biases 0, norms 1."""
        super().reset_parameters()
        if self.layer_norm is not None:
            self.layer_norm.reset_parameters()

    def attend(self, x: Tensor, seq: Sequence) -> Tensor:
        """This rank's shard of `seq`, (batch, tokens, embed_dim), to the same shape."""
        heads = self._attended(x, seq).flatten(2)
        out: Tensor = self.out_proj(heads if self.layer_norm is None else self.layer_norm(heads))
        return out

    def _attended(self, x: Tensor, seq: Sequence) -> Tensor:
        """The heads' outputs; keys and values are projected first and travel under the queries, where one call does."""
        options = self.attention
        if (options.grad, options.tail) == ("exact", "ragged"):
            return projected_attention(
                x, self.in_proj_weight, self.in_proj_bias, seq, Heads(self.num_heads, self.num_kv_heads, self.head_dim),
                q_norm=self.q_norm, k_norm=self.k_norm, norm_eps=self.norm_eps, rope=self.rope, spec=options.spec,
            )  # fmt: skip
        with seq.ring.refused_by_all():  # the others are about to agree on their call, and hear of it there
            q, k, v = self._projected(x, seq)
        return options(q, k, v, seq)

    def _projected(self, x: Tensor, seq: Sequence) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values. Raises `InputError` unless x is this rank's shard."""
        ring, tokens = seq.ring, seq.counts[seq.ring.rank]
        if x.dim() != 3 or x.shape[1:] != (tokens, self.embed_dim):
            raise InputError(
                f"rank {ring.rank}: x must be (batch, {tokens}, {self.embed_dim}), this rank's shard, got "
                f"{tuple(x.shape)}; pass seq.shard(x)"
            )
        return project_qkv(
            x, self.in_proj_weight, self.in_proj_bias, self.num_heads, self.num_kv_heads, self.head_dim,
            q_norm=self.q_norm, k_norm=self.k_norm, norm_eps=self.norm_eps, rope=self.rope,
            positions=None if self.rope is None else seq.positions().to(x.device),
            length=seq.length,
        )  # fmt: skip


class RingMultiheadDilatedAttention(MultiheadDilation):
    """Multi-head dilated attention over a ring; see `MultiheadDilation` for the options."""

    def forward(self, x: Tensor, seq: Sequence) -> Tensor:
        """x (batch, tokens, embed_dim), this rank's shard of `seq`, to the same shape. All ranks call it together.

        Gradients are this rank's part, to be summed over the ranks (`ring.all_reduce`). Raises `InputError` on every
        rank where one rank's x does not fit.
        """
        return self.attend(x, seq)


class MultiheadDilatedAttention(Alone, MultiheadDilation):
    """Multi-head dilated attention on one device; see `MultiheadDilation` for the options."""

    def forward(self, x: Tensor) -> Tensor:
        """x (batch, tokens, embed_dim), whole sequences, to the same shape. Raises `InputError` for another shape."""
        return self.attend(x, self.whole(x))
