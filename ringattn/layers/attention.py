"""Attention layers for models whose tokens are sharded over a ring.

A layer gets this rank's tokens and their `Sequence`. The ring belongs to the sequence, so the same layer trains on one
rank or on many.

Guarantees: weights are plain parameters, the same on every rank. Gradients are this rank's part, to be summed over
ranks (`ring.all_reduce`).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Unpack

import torch
from torch import Tensor, nn

from ringattn.attention import attend
from ringattn.core.mask import check_causal
from ringattn.errors import InputError, UnsupportedError
from ringattn.layers.base import Layer, Projections, check_sequence, shown
from ringattn.layers.rotary import Rope, RopeStyle
from ringattn.options import AttentionOptions, LayerKeywords, takes_options
from ringattn.sequence import Sequence

REFUSED = {
    "sinks": "they are a parameter of this layer; pass sink_heads",
    "dropout_seed": "every call needs a different seed; pass it to the call",
}
"""Options of attention that `RingAttention` refuses, each with the advice for its error."""
MULTIHEAD_REFUSED = REFUSED | {"dropout_p": "in this layer it is called dropout, as in torch"}
"""Options of attention that `RingMultiheadAttention` refuses under these names, each with the advice for its error."""


class RingAttention(Layer):
    """`Ring.attention` as a module that stores the mask and the softmax options.

    Example:
        layer = ringattn.RingAttention(causal=True, window=(4095, 0))
        out = layer(q, k, v, seq)
    """

    @takes_options(REFUSED)
    def __init__(self, *, sink_heads: int | None = None, **options: Unpack[LayerKeywords]) -> None:
        """Store the options. `schedule` is checked by the first call.

        Args:
            sink_heads: The number of query heads, for learned sinks (parameter `sinks`, initially zeros). None: no
                sinks.
            options: See `ringattn.options.AttentionOptions`. Dropout applies in training mode, where each call needs a
                seed.

        Raises:
            InputError: An option is invalid or not supported by layers.
        """
        super().__init__()
        self.options = AttentionOptions.of(options, REFUSED)
        self.sinks = None if sink_heads is None else nn.Parameter(torch.empty(sink_heads))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Set the sinks to 0."""
        if self.sinks is not None:
            nn.init.zeros_(self.sinks)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, seq: Sequence, *, dropout_seed: int | None = None) -> Tensor:
        """Compute attention of this rank's queries over the keys of all ranks. A collective call.

        Args:
            q: Queries, this rank's shard of `seq`.
            k: Keys, this rank's shard of `seq`.
            v: Values, this rank's shard of `seq`.
            seq: The sequence, with its ring.
            dropout_seed: Required for dropout in training mode: from 0 to 2**64 - 1, the same on all ranks, different
                for each layer and step.

        Shape:
            q: (batch, tokens, q_heads, d_k)
            k: (batch, tokens, kv_heads, d_k)
            v: (batch, tokens, kv_heads, d_v)
            out: (batch, tokens, q_heads, d_v)

        Returns:
            out in q's dtype.

        Raises:
            InputError: A tensor or an option is invalid on any rank; every rank raises.
            UnsupportedError: The engine does not compute this call.
            DisagreementError: The ranks make different calls.
            ClosedError: The ring was closed or has failed.
            TransportError: A message failed, a peer was lost (PeerLostError) or a deadline passed (DeadlineError).
            OutOfMemoryError: A rank had not enough memory for the pass.
        """
        check_sequence(seq)
        with seq.ring.refused_by_all():
            options = self.options_of_call(dropout_seed)
        return attend(seq.ring, q, k, v, seq, None, options)[0]

    def options_of_call(self, dropout_seed: int | None) -> AttentionOptions:
        """Return the options of one call: the layer's options and sinks, with dropout in training mode only.

        Args:
            dropout_seed: The seed of the call, or None.

        Returns:
            The options.

        Raises:
            InputError: `dropout_seed` is not a seed.
        """
        dropout_p = self.options.dropout_p if self.training else 0.0
        return replace(self.options, sinks=self.sinks, dropout_p=dropout_p, dropout_seed=dropout_seed)

    def extra_repr(self) -> str:
        """Describe the layer in a printed model.

        Returns:
            The options that differ from their defaults.
        """
        return shown(self.options)


class RingMultiheadAttention(Projections):
    """Self-attention with its projections: one weight for queries, keys and values, and one for the output.

    The parameters have the names and, for equal heads, the shapes of `torch.nn.MultiheadAttention`, so its state
    dictionaries load. Its options have the same names; those that a ring does not support are refused. Weights must be
    the same on all ranks. Gradients are this rank's part, to be summed (`Ring.all_reduce`).

    Example:
        layer = ringattn.RingMultiheadAttention(4096, 32, num_kv_heads=8, bias=False, rope="neox", causal=True)
        y = layer(seq.shard(x), seq)
    """

    @takes_options(MULTIHEAD_REFUSED)
    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        num_kv_heads: int | None = None,
        head_dim: int | None = None,
        *,
        dropout: float = 0.0,
        bias: bool = True,
        add_bias_kv: bool = False,
        add_zero_attn: bool = False,
        kdim: int | None = None,
        vdim: int | None = None,
        batch_first: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        qk_norm: bool = False,
        norm_eps: float = 1e-6,
        rope: RopeStyle | None = None,
        rope_base: float = 10_000.0,
        sinks: bool = False,
        **options: Unpack[LayerKeywords],
    ) -> None:
        """Create the weights. `schedule` is checked by the first call.

        Args:
            embed_dim: Elements of a token.
            num_heads: Query heads.
            num_kv_heads: Key and value heads (GQA), a divisor of `num_heads`. None: `num_heads`.
            head_dim: Elements of a head. None: embed_dim / num_heads.
            dropout: Probability of dropping each weight in training mode, where each call needs a seed.
            bias: Give the projections biases.
            add_bias_kv: Must be False; no key is added to those of the tokens.
            add_zero_attn: Must be False, for the same reason.
            kdim: None or `embed_dim`; keys are projected from the tokens.
            vdim: None or `embed_dim`.
            batch_first: Must be True; tensors are (batch, tokens, embed_dim).
            device: Device of the weights. None: torch's default.
            dtype: Dtype of the weights. None: torch's default.
            qk_norm: RMS normalization of each query and key head, with learned weights `q_norm` and `k_norm`.
            norm_eps: Added to the mean square in that normalization.
            rope: Rotary embedding, neox or interleaved, by positions in the sequence, or with the mask of a tree along
                its paths. None: no rotation.
            rope_base: Base of the rotary angles.
            sinks: One learned logit per query head, which takes part in the softmax but has no value.
            options: See `ringattn.options.AttentionOptions`.

        Raises:
            InputError: Head counts do not match, `rope` is unknown or does not match the heads, or an option is invalid
                or not supported by layers.
            UnsupportedError: An option of `torch.nn.MultiheadAttention` is not supported over a ring.
        """
        _refuse_options({
            "add_bias_kv": add_bias_kv, "add_zero_attn": add_zero_attn,
            "kdim": kdim not in (None, embed_dim), "vdim": vdim not in (None, embed_dim),
            "batch_first": not batch_first,
        })  # fmt: skip
        super().__init__(
            embed_dim, num_heads, num_kv_heads, head_dim, bias=bias, qk_norm=qk_norm, norm_eps=norm_eps,
            rope=None if rope is None else Rope(rope, rope_base), device=device, dtype=dtype,
        )  # fmt: skip
        AttentionOptions.of(options, MULTIHEAD_REFUSED)
        options["dropout_p"] = dropout
        self.attention = RingAttention(sink_heads=num_heads if sinks else None, **options)
        if device is not None or dtype is not None:
            self.attention.to(device=device, dtype=dtype)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw new weights like `torch.nn.MultiheadAttention`; biases and sinks are 0, norms 1."""
        super().reset_parameters()
        self.attention.reset_parameters()

    def forward(
        self,
        x: Tensor,
        seq: Sequence,
        *,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = False,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
        dropout_seed: int | None = None,
    ) -> Tensor:
        """Compute self-attention of this rank's tokens over those of all ranks. A collective call.

        Args:
            x: This rank's shard of `seq`.
            seq: The sequence, with its ring.
            key_padding_mask: Must be None; make padding a separate document (`Sequence.with_documents`).
            need_weights: Must be False; a ring never stores the weights.
            attn_mask: Must be None; masks are set by the layer's options and the documents of `seq`.
            average_attn_weights: Ignored; it only matters with need_weights=True.
            is_causal: True: causal in this call, even if the layer is not.
            dropout_seed: Required for dropout in training mode: from 0 to 2**64 - 1, the same on all ranks, different
                for each layer and step.

        Shape:
            x: (batch, tokens, embed_dim)

        Returns:
            (batch, tokens, embed_dim).

        Raises:
            InputError: A tensor or an option is invalid on any rank; every rank raises.
            UnsupportedError: The engine does not compute this call, or an option of `torch.nn.MultiheadAttention` is
                not supported over a ring.
            DisagreementError: The ranks make different calls.
            ClosedError: The ring was closed or has failed.
            TransportError: A message failed, a peer was lost (PeerLostError) or a deadline passed (DeadlineError).
            OutOfMemoryError: A rank had not enough memory for the pass.
        """
        if not isinstance(seq, Sequence):
            raise InputError(
                f"seq: the second argument is a {type(seq).__name__}; this layer projects queries, keys and values "
                "from x itself: call it with (x, seq), where seq is ring.sequence(...)"
            )
        with seq.ring.refused_by_all():
            options = self.attention.options_of_call(dropout_seed)
            _refuse_options({
                "key_padding_mask": key_padding_mask is not None, "need_weights": need_weights,
                "attn_mask": attn_mask is not None,
            })  # fmt: skip
            check_causal(is_causal)
        if is_causal:
            options = replace(options, causal=True)
        out: Tensor = self.out_proj(self._attended(x, seq, options).flatten(2))
        return out


_INSTEAD = {
    "add_bias_kv": "no key is added to those of the tokens; leave it out",
    "add_zero_attn": "no key is added to those of the tokens; sinks=True adds a learned logit per head, initially zero",
    "kdim": "keys are projected from the tokens, with embed_dim numbers; for keys of another sequence call "
    "ring.attention(q, k, v, seq, kv_seq=...)",
    "vdim": "values are projected from the tokens, with embed_dim numbers; project them yourself, and call "
    "ring.attention",
    "batch_first": "tensors are (batch, tokens, embed_dim) here; pass batch_first=True and transpose before and after",
    "key_padding_mask": "a ring takes no mask tensors; make padding a separate document, with "
    "ring.sequence(cu_seqlens=...) for all rows, or seq.with_documents(...)",
    "need_weights": "a ring never stores the weights; pass need_weights=False",
    "attn_mask": "a ring takes no mask tensors; use causal= and window= of the layer, and documents of the sequence",
}
"""Advice for each refused option of `torch.nn.MultiheadAttention`."""


def _refuse_options(options: dict[str, Any]) -> None:
    """Raise `UnsupportedError` for the first option that is set."""
    for name, value in options.items():
        if value:
            raise UnsupportedError(f"{name}: {_INSTEAD[name]}")
