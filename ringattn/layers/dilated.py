"""Dilated attention as layers, each in two forms: for whole sequences on one device, and over a ring.

Guarantees: the two forms of a layer have the same parameters, so state dictionaries are interchangeable. On one device,
a layer needs no ring from the caller, and its copies and pickles contain no ring. Each layer warns once about branches
that cannot reach every query.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Iterable
from dataclasses import asdict, replace
from typing import Any, Unpack

import torch
from torch import Tensor, nn

from ringattn.core.dilation import Dilated, Offset, check, coverage_warnings
from ringattn.dilated import REFUSED as NOT_OF_DILATED
from ringattn.dilated import BranchGradient, Tail, attend_dilated
from ringattn.errors import InputError
from ringattn.layers.base import Layer, Projections, check_sequence, shown
from ringattn.layers.rotary import Rope, RopeStyle
from ringattn.options import AttentionOptions, LayerKeywords, takes_options
from ringattn.ring import Ring, ring_of_one
from ringattn.sequence import Sequence

REFUSED = NOT_OF_DILATED | {
    "sinks": "this layer has no sinks; call ring.dilated_attention with sinks",
    "dropout_p": "this layer has no dropout; call ring.dilated_attention with dropout_p and dropout_seed",
    "dropout_seed": "this layer has no dropout; call ring.dilated_attention with dropout_p and dropout_seed",
}
"""Options of attention that dilated layers refuse, each with the advice for its error."""


class Alone(Layer):
    """Mixin for layers on one device: a private ring of one rank per thread, whatever other processes exist.

    There is one ring per thread, because only one thread at a time may use a ring.
    """

    _rings: threading.local | None = None

    @property
    def ring(self) -> Ring:
        """The layer's ring of this thread, opened at its first use, and opened again if it was closed or has failed."""
        if self._rings is None:
            self._rings = threading.local()
        rings = self._rings
        rings.ring = ring_of_one(getattr(rings, "ring", None))
        ring: Ring = rings.ring
        return ring

    def get_memory_info(self, seq: Sequence | None = None) -> dict[str, int]:
        """Return the bytes of the layer's weights, and the memory that it keeps between calls.

        Args:
            seq: Ignored; the layer's ring is known.

        Returns:
            The figures of `own_memory` and of `Ring.memory_info`.

        Raises:
            Nothing.
        """
        return self.own_memory() | self.ring.memory_info()

    def whole(self, x: Tensor) -> Sequence:
        """Return the sequence of all tokens in dimension 1 of `x`, on the layer's ring.

        Args:
            x: (batch, tokens, ...).

        Returns:
            The sequence.

        Raises:
            InputError: `x` is not (batch, tokens, ...).
        """
        if not isinstance(x, Tensor) or x.dim() < 3:
            got = tuple(x.shape) if isinstance(x, Tensor) else type(x).__name__
            raise InputError(f"a layer of whole sequences takes (batch, tokens, ...) tensors, got {got}")
        return self.ring.sequence(x.shape[1])

    def __getstate__(self) -> dict[str, Any]:
        # A ring cannot be copied or pickled. A copy of the layer opens its own at its first use.
        return {name: value for name, value in self.__dict__.items() if name != "_rings"}


class Dilation(Layer):
    """The stored branches and options of a layer; see `Ring.dilated_attention` for their meaning."""

    @takes_options(REFUSED)
    def __init__(
        self,
        segment_lengths: Iterable[int],
        dilation_rates: Iterable[int],
        *,
        offset: Offset | str = "mod",
        grad: BranchGradient = "exact",
        tail: Tail = "ragged",
        layer: int | None = None,
        **options: Unpack[LayerKeywords],
    ) -> None:
        """Store the branches and options. `grad`, `tail` and `schedule` are checked by the first call.

        Args:
            segment_lengths: Tokens per segment, for each branch; positive.
            dilation_rates: For each branch, the number of tokens of which a head keeps one; positive.
            offset: Selects the token that a head keeps: mod, block, kv_head or layer_rotated; see
                `Ring.dilated_attention`.
            grad: exact, or detached to treat the weights of the branches as constants, like torchscale.
            tail: ragged, or zero_pad to attend to zero keys that fill short segments, like torchscale.
            layer: Index of the layer, from 0, with offset="layer_rotated"; None otherwise.
            options: See `ringattn.options.AttentionOptions`.

        Raises:
            InputError: Branches, the offset or the layer are invalid.
        """
        super().__init__()
        self.options = AttentionOptions.of(options, REFUSED)
        self.branches = check(segment_lengths, dilation_rates)
        self.pairs = Dilated(*self.branches, self.options.causal, offset, layer)
        self.grad, self.tail, self.warned = grad, tail, False

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, seq: Sequence) -> Tensor:
        """Call `Ring.dilated_attention` with the layer's options."""
        check_sequence(seq)
        out, _ = attend_dilated(seq.ring, q, k, v, seq, self.pairs, self.options, self.grad, self.tail)
        self.warn_once(q.shape[2], k.shape[2])  # after the call, which has checked the shapes
        return out

    def warn_once(self, q_heads: int, kv_heads: int) -> None:
        """Warn about branches that cannot reach every query. Later calls do nothing.

        Args:
            q_heads: Query heads.
            kv_heads: K/V heads.

        Raises:
            Nothing.
        """
        messages = () if self.warned else coverage_warnings(self.branches, q_heads, self.pairs.offset, kv_heads)
        self.warned = True
        for message in messages:
            warnings.warn(message, stacklevel=3)

    def extra_repr(self) -> str:
        """Describe the layer in a printed model.

        Returns:
            The branches, and the options that differ from their defaults.
        """
        options = replace(self.options, causal=False)  # shown with the branches
        return shown(options, **asdict(self.pairs), grad=self.grad, tail=self.tail)


class RingDilatedAttention(Dilation):
    """`Ring.dilated_attention` as a module that keeps its branches and options.

    Example:
        layer = ringattn.RingDilatedAttention([2048, 8192], [1, 4], causal=True)
        out = layer(q, k, v, seq)
    """

    def forward(self, q: Tensor, k: Tensor, v: Tensor, seq: Sequence) -> Tensor:
        """Compute dilated attention of this rank's queries over the keys of all ranks. A collective call.

        Args:
            q: Queries, this rank's shard of `seq`.
            k: Keys, this rank's shard of `seq`.
            v: Values, this rank's shard of `seq`.
            seq: The sequence, with its ring.

        Shape:
            q: (batch, tokens, q_heads, d_k)
            k: (batch, tokens, kv_heads, d_k)
            v: (batch, tokens, kv_heads, d_v)
            out: (batch, tokens, q_heads, d_v)

        Returns:
            out in q's dtype.

        Raises:
            InputError: A tensor or an option is invalid on any rank; every rank raises.
            RingError: Other errors of `Ring.dilated_attention`.
        """
        return self._attend(q, k, v, seq)


class DilatedAttention(Alone, Dilation):
    """`RingDilatedAttention` on one device."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Compute dilated attention of whole sequences on one device.

        Args:
            q: Queries, whole sequences.
            k: Keys, whole sequences.
            v: Values, whole sequences.

        Shape:
            q: (batch, tokens, q_heads, d_k)
            k: (batch, tokens, kv_heads, d_k)
            v: (batch, tokens, kv_heads, d_v)
            out: (batch, tokens, q_heads, d_v)

        Returns:
            out in q's dtype.

        Raises:
            InputError: A tensor or an option is invalid.
            RingError: Other errors of `Ring.dilated_attention`.
        """
        return self._attend(q, k, v, self.whole(q))


class MultiheadDilation(Projections):
    """Dilated self-attention with its projections: one weight for queries, keys and values, and one for the output."""

    @takes_options(REFUSED)
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
        rope: RopeStyle | None = None,
        rope_base: float = 10_000.0,
        xpos_scale: float | None = None,
        layer_norm: bool = False,
        offset: Offset | str = "mod",
        grad: BranchGradient = "exact",
        tail: Tail = "ragged",
        layer: int | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        **options: Unpack[LayerKeywords],
    ) -> None:
        """Create the weights. `grad`, `tail` and `schedule` are checked by the first call.

        Args:
            embed_dim: Elements of a token.
            num_heads: Query heads.
            segment_lengths: Tokens per segment, for each branch; positive.
            dilation_rates: For each branch, the number of tokens of which a head keeps one; positive.
            num_kv_heads: Key and value heads (GQA), a divisor of `num_heads`. None: `num_heads`.
            head_dim: Elements of a head. None: embed_dim / num_heads.
            bias: Give the projections biases.
            qk_norm: RMS normalization of each query and key head, with learned weights `q_norm` and `k_norm`.
            norm_eps: Added to the mean square in that normalization.
            rope: Rotary embedding by global positions: neox or interleaved. None: no rotation.
            rope_base: Base of the rotary angles.
            xpos_scale: The scale of XPos in tokens, see `Rope`. None: no XPos.
            layer_norm: Normalize the heads together before the output projection, as LongNet does (the sub-layer norm
                of MAGNETO, arXiv:2210.06423).
            offset: Selects the token that a head keeps: mod, block, kv_head or layer_rotated; see
                `Ring.dilated_attention`.
            grad: exact, or detached to treat the weights of the branches as constants, like torchscale.
            tail: ragged, or zero_pad to attend to zero keys that fill short segments, like torchscale.
            layer: Index of the layer, from 0, with offset="layer_rotated"; None otherwise.
            device: Device of the weights. None: torch's default.
            dtype: Dtype of the weights. None: torch's default.
            options: See `ringattn.options.AttentionOptions`.

        Raises:
            InputError: Heads, branches, the offset, the layer or rotary options are invalid or do not match.
        """
        if rope is None and xpos_scale is not None:
            raise InputError(f"xpos_scale={xpos_scale} needs rotary positions; give rope='interleaved' or 'neox'")
        super().__init__(
            embed_dim, num_heads, num_kv_heads, head_dim, bias=bias, qk_norm=qk_norm, norm_eps=norm_eps,
            rope=None if rope is None else Rope(rope, rope_base, xpos_scale), device=device, dtype=dtype,
        )  # fmt: skip
        columns = num_heads * self.head_dim
        self.layer_norm = nn.LayerNorm(columns, device=device, dtype=dtype) if layer_norm else None
        self.attention = RingDilatedAttention(
            segment_lengths, dilation_rates, offset=offset, grad=grad, tail=tail, layer=layer,
            **options,
        )  # fmt: skip
        self.attention.warn_once(self.num_heads, self.num_kv_heads)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw new weights like `torch.nn.MultiheadAttention`; biases are 0, norms 1."""
        super().reset_parameters()
        if self.layer_norm is not None:
            self.layer_norm.reset_parameters()

    def _attend(self, x: Tensor, seq: Sequence) -> Tensor:
        """Compute dilated self-attention with the layer's weights."""
        check_sequence(seq)
        attention = self.attention
        if (attention.grad, attention.tail) == ("exact", "ragged"):
            heads = self._attended(x, seq, attention.options, attention.pairs)
        else:  # several attention calls share the projections, so they are made first
            with seq.ring.refused_by_all():  # the other ranks learn of an error when they compare their calls
                q, k, v = self._projected(x, seq)
            heads = attention(q, k, v, seq)
        heads = heads.flatten(2)
        out: Tensor = self.out_proj(heads if self.layer_norm is None else self.layer_norm(heads))
        return out


class RingMultiheadDilatedAttention(MultiheadDilation):
    """Multi-head dilated attention over a ring.

    Weights must be the same on all ranks. Gradients are this rank's part, to be summed over ranks (`Ring.all_reduce`).

    Example:
        layer = ringattn.RingMultiheadDilatedAttention(768, 12, [2048, 8192], [1, 4], causal=True)
        y = layer(seq.shard(x), seq)
    """

    def forward(self, x: Tensor, seq: Sequence) -> Tensor:
        """Compute dilated self-attention of this rank's tokens over those of all ranks. A collective call.

        Args:
            x: This rank's shard of `seq`, (batch, tokens, embed_dim).
            seq: The sequence, with its ring.

        Returns:
            (batch, tokens, embed_dim).

        Raises:
            InputError: A tensor or an option is invalid on any rank; every rank raises.
            RingError: Other errors of `Ring.dilated_attention`.
        """
        return self._attend(x, seq)


class MultiheadDilatedAttention(Alone, MultiheadDilation):
    """Multi-head dilated attention for whole sequences on one device."""

    def forward(self, x: Tensor) -> Tensor:
        """Compute dilated self-attention of whole sequences.

        Args:
            x: Whole sequences, (batch, tokens, embed_dim).

        Returns:
            (batch, tokens, embed_dim).

        Raises:
            InputError: A tensor or an option is invalid.
            RingError: Other errors of `Ring.dilated_attention`.
        """
        return self._attend(x, self.whole(x))
