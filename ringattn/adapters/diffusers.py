"""diffusers: attention processors over a ring, for image tokens that attend to each other and to text.

`RingFluxAttnProcessor` is for blocks whose text and image attend jointly (Flux), `RingAttnProcessor` for those of
diffusers' `Attention` with self- and cross attention (PixArt, DiT and others). Both find the sequence that
`Ring.activate` names, see `context.sequence_of`; see docs/embedding-diffusers.md.
Guarantees: text that is sharded is never taken for whole text, or the other way round, without being told which it is.
Not covered: embeddings of patches and positions; a caller shards tokens and their ids.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal

import torch
from diffusers.models.attention_processor import AttnProcessor2_0
from diffusers.models.embeddings import apply_rotary_emb
from torch import Tensor

from ringattn.adapters.attend import attend
from ringattn.adapters.context import sequence_of
from ringattn.adapters.hosts import require_checked
from ringattn.core.layout import Layout
from ringattn.errors import InputError
from ringattn.ring import Ring
from ringattn.runtime.activation import activate, active_sequence
from ringattn.sequence import Sequence

__all__ = ["JointSequence", "RingAttnProcessor", "RingFluxAttnProcessor"]

CHECKED = ("0.42",)
require_checked("diffusers", *CHECKED)


class JointSequence(Sequence):
    """Text tokens and image tokens as one sequence, of which every rank has a part of both, its text first.

    To be activated for models with joint attention. Ranks' parts of a stream differ by one token at the most.

    Example:
        joint = JointSequence(ring, text_tokens=512, image_tokens=4096)
        with ring.activate(joint):
            (out,) = model(hidden_states=joint.shard_image(image), encoder_hidden_states=joint.shard_text(text), **rest)
        whole = joint.gather_image(out)
    """

    def __init__(self, ring: Ring, text_tokens: int, image_tokens: int) -> None:
        """Lay both streams over the ranks.

        Args:
            ring: The ring.
            text_tokens: Tokens of the whole text.
            image_tokens: Tokens of the whole image.

        Raises:
            Nothing.
        """
        total = text_tokens + image_tokens
        super().__init__(ring, Layout("contiguous", total, ring.world_size, (0, text_tokens, total)), None)
        self.text_tokens, self.image_tokens = text_tokens, image_tokens

    def shard_text(self, x: Tensor, dim: int = 1) -> Tensor:
        """This rank's rows of what belongs to all text tokens; differentiable.

        Args:
            x: The whole tensor.
            dim: The dimension of the tokens.

        Returns:
            A tensor like x with this rank's text tokens in `dim`.

        Raises:
            InputError: `x` has not as many tokens there.
        """
        return self._part(x, dim, 0, self.text_tokens)

    def shard_image(self, x: Tensor, dim: int = 1) -> Tensor:
        """This rank's rows of what belongs to all image tokens; differentiable.

        Args:
            x: The whole tensor.
            dim: The dimension of the tokens.

        Returns:
            A tensor like x with this rank's image tokens in `dim`.

        Raises:
            InputError: `x` has not as many tokens there.
        """
        return self._part(x, dim, self.text_tokens, self.length)

    def gather_image(self, x: Tensor, dim: int = 1) -> Tensor:
        """All image tokens of the ranks' parts, in order; differentiable as `Sequence.gather` is. A collective call.

        Args:
            x: This rank's image tokens.
            dim: The dimension of the tokens, from 0 on.

        Returns:
            A tensor like x with all image tokens in `dim`.

        Raises:
            RingError: What `Sequence.gather` raises.
        """
        text = int((self.positions() < self.text_tokens).sum())
        whole = self.gather(torch.cat([x.new_zeros(*x.shape[:dim], text, *x.shape[dim + 1 :]), x], dim), dim)
        return whole.narrow(dim, self.text_tokens, self.image_tokens)

    def _part(self, x: Tensor, dim: int, start: int, stop: int) -> Tensor:
        if x.shape[dim] != stop - start:
            raise InputError(f"{tuple(x.shape)} has not the {stop - start} tokens of its stream in dimension {dim}")
        positions = self.positions()
        return x.index_select(dim, positions[(positions >= start) & (positions < stop)].to(x.device) - start)


class RingFluxAttnProcessor:
    """For `FluxAttention`, in place of `FluxAttnProcessor`: joint attention of text and image, not causal.

    The active sequence is a `JointSequence`, or any other that counts a rank's text and image tokens together.

    Example:
        model.set_attn_processor(RingFluxAttnProcessor())
    """

    def __call__(
        self,
        attn: Any,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor | None = None,
        attention_mask: Tensor | None = None,
        image_rotary_emb: tuple[Tensor, Tensor] | None = None,
        ip_hidden_states: list[Tensor] | None = None,  # named, or diffusers drops them before they could be refused
        ip_adapter_masks: Tensor | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Shapes are those of diffusers, of this rank's tokens.

        Raises `InputError` for a mask, fused projections and an IP adapter.
        """
        with _refused_by_all():
            if ip_hidden_states is not None or ip_adapter_masks is not None:
                raise InputError(
                    "ip_hidden_states and ip_adapter_masks: an IP adapter is not known here; call unload_ip_adapter() "
                    "on the pipeline, or give its blocks diffusers' own processors, without a ring"
                )
            if attention_mask is not None:
                raise InputError("attention_mask: joint attention takes no mask here; leave padding out of the text")
            if getattr(attn, "fused_projections", False):
                raise InputError("fused projections are not known here; call unfuse_qkv_projections() on the model")
        q, k, v = (to(hidden_states).unflatten(-1, (-1, attn.head_dim)) for to in (attn.to_q, attn.to_k, attn.to_v))
        q, k = attn.norm_q(q), attn.norm_k(k)
        text = 0
        if encoder_hidden_states is not None:
            text = encoder_hidden_states.shape[1]
            added = (attn.add_q_proj, attn.add_k_proj, attn.add_v_proj)
            tq, tk, tv = (to(encoder_hidden_states).unflatten(-1, (-1, attn.head_dim)) for to in added)
            tq, tk = attn.norm_added_q(tq), attn.norm_added_k(tk)
            q, k, v = (torch.cat(pair, 1) for pair in ((tq, q), (tk, k), (tv, v)))
        if image_rotary_emb is not None:
            q, k = (apply_rotary_emb(x, image_rotary_emb, sequence_dim=1) for x in (q, k))
        out = attend(sequence_of(), q, k, v).flatten(2)
        if encoder_hidden_states is None:
            return out
        image = attn.to_out[1](attn.to_out[0](out[:, text:]))
        return image, attn.to_add_out(out[:, :text])


class RingAttnProcessor(AttnProcessor2_0):
    """For `Attention`, in place of `AttnProcessor2_0`: self-attention over the active sequence, and cross attention.

    Cross attention over a ring is told by `cross_attention_kwargs={"kv_seq": ...}` what its text is: a Sequence whose
    shards the ranks hold, or "whole", which every rank holds and attends to by itself; its gradient is then a part.

    Example:
        attention.set_processor(RingAttnProcessor())
    """

    def __call__(
        self,
        attn: Any,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor | None = None,
        attention_mask: Tensor | None = None,
        temb: Tensor | None = None,
        kv_seq: Sequence | Literal["whole"] | None = None,
    ) -> Tensor:
        """(batch, tokens, dim) of this rank. Raises `InputError` for masks over a ring, and for norms over tokens."""
        seq = sequence_of()
        is_cross = encoder_hidden_states is not None
        is_whole = is_cross and isinstance(kv_seq, str) and kv_seq == "whole"
        if seq is not None:
            with seq.ring.refused_by_all():
                _refuse(attn, attention_mask, kv_seq if is_cross else seq, is_whole)
        if seq is None or is_whole:
            with activate(None):
                alone: Tensor = super().__call__(attn, hidden_states, encoder_hidden_states, attention_mask, temb)
            return alone
        source = hidden_states if encoder_hidden_states is None else encoder_hidden_states
        if is_cross and attn.norm_cross:
            source = attn.norm_encoder_hidden_states(source)
        other = kv_seq if isinstance(kv_seq, Sequence) and is_cross else seq
        q, k, v = attn.to_q(hidden_states), attn.to_k(source), attn.to_v(source)
        q, k, v = (x.unflatten(-1, (attn.heads, -1)) for x in (q, k, v))
        q = q if attn.norm_q is None else attn.norm_q(q)
        k = k if attn.norm_k is None else attn.norm_k(k)
        out = attn.to_out[1](attn.to_out[0](attend(seq, q, k, v, kv_seq=other).flatten(2)))
        return (out + hidden_states if attn.residual_connection else out) / attn.rescale_output_factor


def _refused_by_all() -> AbstractContextManager[None]:
    """For what a processor refuses before it has asked for its sequence."""
    seq = active_sequence()
    return nullcontext() if seq is None else seq.ring.refused_by_all()


def _refuse(attn: Any, mask: Tensor | None, kv_seq: object, is_whole: bool) -> None:
    if attn.spatial_norm is not None or attn.group_norm is not None:
        raise InputError("group_norm and spatial_norm go over all tokens, of which this rank has a part")
    if is_whole:
        return
    if mask is not None:
        raise InputError("attention_mask: attention over a ring takes no mask; leave padding out of the text")
    if not isinstance(kv_seq, Sequence):
        raise InputError('cross attention over a ring needs cross_attention_kwargs={"kv_seq": its Sequence or "whole"}')
