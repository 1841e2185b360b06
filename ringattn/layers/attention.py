"""Attention layers for models whose tokens lie over a ring.

A layer is given this rank's tokens and the `Sequence` that says which they are; the ring comes from the sequence, so
the same layer trains alone and on many ranks.
Guarantees: weights are plain parameters, alike on every rank; gradients are this rank's part, to be summed over the
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
    "sinks": "they are a parameter of this layer; give sink_heads",
    "dropout_seed": "it belongs to a call, for each needs another one; give it there",
}
"""Options of attention that `RingAttention` does not take."""
MULTIHEAD_REFUSED = REFUSED | {"dropout_p": "this layer calls it dropout, as torch's does"}
"""Options of attention that `RingMultiheadAttention` does not take by these names."""


class RingAttention(Layer):
    """`Ring.attention` as a module that keeps the mask and the softmax's options.

    Example:
        layer = ringattn.RingAttention(causal=True, window=(4095, 0))
        out = layer(q, k, v, seq)
    """

    @takes_options(REFUSED)
    def __init__(self, *, sink_heads: int | None = None, **options: Unpack[LayerKeywords]) -> None:
        """Keeps the options; a call checks `schedule`.

        Args:
            sink_heads: The number of query heads, for learned sinks (parameter `sinks`, zeros at first). None: no
                sinks.
            options: See `ringattn.options.AttentionOptions`. Dropout applies in training mode, and then each call needs
                a seed.

        Raises:
            InputError: An option is wrong or is not an option of layers.
        """
        super().__init__()
        self.options = AttentionOptions.of(options, REFUSED)
        self.sinks = None if sink_heads is None else nn.Parameter(torch.zeros(sink_heads))

    def forward(self, q: Tensor, k: Tensor, v: Tensor, seq: Sequence, *, dropout_seed: int | None = None) -> Tensor:
        """Attention of this rank's queries to the keys of all ranks. A collective call.

        Args:
            q: Queries, this rank's shard of `seq`.
            k: Keys, this rank's shard of `seq`.
            v: Values, this rank's shard of `seq`.
            seq: The sequence, which brings the ring.
            dropout_seed: With dropout in training mode: from 0 to 2**64 - 1, the same on all ranks, another one for
                each layer and step.

        Shape:
            q: (batch, tokens, q_heads, d_k)
            k: (batch, tokens, kv_heads, d_k)
            v: (batch, tokens, kv_heads, d_v)
            out: (batch, tokens, q_heads, d_v)

        Returns:
            out in q's dtype.

        Raises:
            InputError: A tensor or an option is wrong, on any rank; every rank raises.
            UnsupportedError: The engine does not compute this call.
            DisagreementError: The ranks do not make the same call.
            ClosedError: The ring was closed or has failed.
            TransportError: A message failed, a peer was lost (PeerLostError) or a deadline passed (DeadlineError).
            OutOfMemoryError: A rank had no memory for the pass.
        """
        check_sequence(seq)
        with seq.ring.refused_by_all():
            options = self.options_of_call(dropout_seed)
        return attend(seq.ring, q, k, v, seq, None, options)[0]

    def options_of_call(self, dropout_seed: int | None) -> AttentionOptions:
        """Return the options of one call: those of the layer with its sinks, and with dropout in training mode only.

        Args:
            dropout_seed: The seed of the call. None: it has none.

        Returns:
            The options.

        Raises:
            InputError: It is not a seed.
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
    """Self-attention with its projections: x to queries, keys and values by one weight, attention, output projection.

    The parameters have the names and, for equal heads, the shapes of `torch.nn.MultiheadAttention`, so its state
    dictionaries load, and its options are known by their names: those that a ring does not compute are refused.
    Weights are alike on all ranks; gradients are this rank's part, to be summed (`Ring.all_reduce`).

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
        """Makes the weights; a call checks `schedule`.

        Args:
            embed_dim: Elements of a token.
            num_heads: Query heads.
            num_kv_heads: Key and value heads (GQA); they divide `num_heads`. None: as many.
            head_dim: Elements of a head. None: embed_dim / num_heads.
            dropout: Weights are dropped with this probability in training mode; then each call needs a seed.
            bias: The projections have biases.
            add_bias_kv: False; no key is added to the tokens'.
            add_zero_attn: False; the same.
            kdim: None or `embed_dim`; keys are made of the tokens.
            vdim: None or `embed_dim`.
            batch_first: True; tensors are (batch, tokens, embed_dim).
            device: Of the weights. None: torch's default.
            dtype: Of the weights. None: torch's default.
            qk_norm: RMS normalization of each query and key head, with learned weights `q_norm` and `k_norm`.
            norm_eps: Added to the mean square in that normalization.
            rope: Rotary positions, which are global ones: neox or interleaved. None: no rotation.
            rope_base: Base of the rotary angles.
            sinks: One learned logit per query head that takes weight and gives no value.
            options: See `ringattn.options.AttentionOptions`.

        Raises:
            InputError: Heads do not fit each other, `rope` is not known or does not fit heads, or an option is wrong
                or is not an option of layers.
            UnsupportedError: An option of `torch.nn.MultiheadAttention` is not what a ring computes.
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
        """Self-attention of this rank's tokens to those of all ranks. A collective call.

        Args:
            x: This rank's shard of `seq`.
            seq: The sequence, which brings the ring.
            key_padding_mask: None; padding is a document of its own (`Sequence.with_documents`).
            need_weights: False; a ring never holds the weights.
            attn_mask: None; masks are the layer's options and the documents of `seq`.
            average_attn_weights: Only beside need_weights=True.
            is_causal: True: causal in this call, whether or not the layer is.
            dropout_seed: With dropout in training mode: from 0 to 2**64 - 1, the same on all ranks, another one for
                each layer and step.

        Shape:
            x: (batch, tokens, embed_dim)

        Returns:
            (batch, tokens, embed_dim).

        Raises:
            InputError: A tensor or an option is wrong, on any rank; every rank raises.
            UnsupportedError: The engine does not compute this call, or an option of `torch.nn.MultiheadAttention` is
                not what a ring computes.
            DisagreementError: The ranks do not make the same call.
            ClosedError: The ring was closed or has failed.
            TransportError: A message failed, a peer was lost (PeerLostError) or a deadline passed (DeadlineError).
            OutOfMemoryError: A rank had no memory for the pass.
        """
        if not isinstance(seq, Sequence):
            raise InputError(
                f"seq: the second argument is a {type(seq).__name__}; this layer makes queries, keys and values of x "
                "itself and is called with (x, seq), seq being ring.sequence(...)"
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
    "add_bias_kv": "no key is added to the tokens'; leave it out",
    "add_zero_attn": "no key is added to the tokens'; sinks=True has a learned logit for each head, zero at first",
    "kdim": "keys are made of the tokens, with embed_dim numbers; for keys of another sequence call ring.attention("
    "q, k, v, seq, kv_seq=...)",
    "vdim": "values are made of the tokens, with embed_dim numbers; project them, and call ring.attention",
    "batch_first": "tensors are (batch, tokens, embed_dim) here; pass batch_first=True and transpose before and after",
    "key_padding_mask": "a ring takes no mask tensors; make padding a document of its own, with "
    "ring.sequence(cu_seqlens=...) for all rows alike, or seq.with_documents(...)",
    "need_weights": "the weights are never held; pass need_weights=False",
    "attn_mask": "a ring takes no mask tensors; causal=, window= of the layer and documents of the sequence say masks",
}
"""What to do instead of an option of `torch.nn.MultiheadAttention`."""


def _refuse_options(given: dict[str, Any]) -> None:
    """Raise `UnsupportedError` for the first option that is on."""
    for name, value in given.items():
        if value:
            raise UnsupportedError(f"{name}: {_INSTEAD[name]}")
