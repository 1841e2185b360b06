"""diffusers: attention processors over a ring, for image tokens that attend to each other and to text.

`RingFluxAttnProcessor` is for blocks with joint attention of text and image (Flux). `RingAttnProcessor` is for blocks
of diffusers' `Attention` with self- and cross attention (PixArt, DiT and others). Both attend over the active sequence,
see `context.sequence_of` and docs/embedding-diffusers.md.

Guarantees: the caller says whether text is sharded or whole; the processors never guess.
Not covered: embeddings of patches and positions. The caller shards tokens and their ids.
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
from ringattn.adapters.host_versions import Host
from ringattn.core.layout import Layout
from ringattn.errors import InputError
from ringattn.ring import Ring
from ringattn.runtime.activation import activate, active_sequence
from ringattn.sequence import Sequence

__all__ = ["JointSequence", "RingAttnProcessor", "RingFluxAttnProcessor"]

HOST = Host(
    "diffusers",
    ("0.40", "0.41", "0.42"),
    # The processors below repeat the code of these functions, except for the attention itself.
    sources={
        "diffusers.models.attention_processor:AttnProcessor2_0.__call__": ("389a5780",),
        "diffusers.models.embeddings:apply_rotary_emb": ("8cc02b3e",),
    },
)
HOST.require()
# This host is checked when a processor is created, because importing diffusers' Flux module loads far more code than
# importing its attention module.
FLUX = Host(
    "diffusers",
    HOST.tested,
    feature="RingFluxAttnProcessor",
    sources={"diffusers.models.transformers.transformer_flux:FluxAttnProcessor.__call__": ("8b663f42",)},
)


class JointSequence(Sequence):
    """Text and image tokens as one sequence. Every rank has a part of both, text first.

    Activate it for models with joint attention. The numbers of text tokens on two ranks differ by at most one, and so
    do the numbers of image tokens.

    Example:
        joint = JointSequence(ring, text_tokens=512, image_tokens=4096)
        with ring.activate(joint):
            (out,) = model(hidden_states=joint.shard_image(image), encoder_hidden_states=joint.shard_text(text), **rest)
        whole = joint.gather_image(out)
    """

    def __init__(self, ring: Ring, text_tokens: int, image_tokens: int) -> None:
        """Shard both streams over the ranks.

        Args:
            ring: The ring.
            text_tokens: Tokens of the whole text.
            image_tokens: Tokens of the whole image.

        Raises:
            Nothing.
        """
        # The layout has text and image as two "documents", so each is cut into equal parts by itself. The sequence has
        # no documents (the None below), so text and image attend to each other.
        total = text_tokens + image_tokens
        super().__init__(ring, Layout("contiguous", total, ring.world_size, (0, text_tokens, total)), None)
        self.text_tokens, self.image_tokens = text_tokens, image_tokens

    def shard_text(self, x: Tensor, dim: int = 1) -> Tensor:
        """Return this rank's rows of a tensor over all text tokens; differentiable.

        Args:
            x: The whole tensor.
            dim: The dimension of the tokens.

        Returns:
            A tensor like x with this rank's text tokens in `dim`.

        Raises:
            InputError: `x` has another number of tokens there.
        """
        return self._part(x, dim, 0, self.text_tokens)

    def shard_image(self, x: Tensor, dim: int = 1) -> Tensor:
        """Return this rank's rows of a tensor over all image tokens; differentiable.

        Args:
            x: The whole tensor.
            dim: The dimension of the tokens.

        Returns:
            A tensor like x with this rank's image tokens in `dim`.

        Raises:
            InputError: `x` has another number of tokens there.
        """
        return self._part(x, dim, self.text_tokens, self.length)

    def gather_image(self, x: Tensor, dim: int = 1) -> Tensor:
        """Gather the image tokens of all ranks, in order; differentiable like `Sequence.gather`. A collective call.

        Args:
            x: This rank's image tokens.
            dim: The dimension of the tokens, not negative.

        Returns:
            A tensor like x with all image tokens in `dim`.

        Raises:
            RingError: What `Sequence.gather` raises.
        """
        # `gather` expects a shard of the whole sequence, so this rank's text rows are filled with zeros first.
        text = int((self.positions() < self.text_tokens).sum())
        whole = self.gather(torch.cat([x.new_zeros(*x.shape[:dim], text, *x.shape[dim + 1 :]), x], dim), dim)
        return whole.narrow(dim, self.text_tokens, self.image_tokens)

    def _part(self, x: Tensor, dim: int, start: int, stop: int) -> Tensor:
        if x.shape[dim] != stop - start:
            raise InputError(f"{tuple(x.shape)} must have the {stop - start} tokens of its stream in dimension {dim}")
        # Positions are those in text and image together, but the rows of `x` are either text or image.
        positions = self.positions()
        return x.index_select(dim, positions[(positions >= start) & (positions < stop)].to(x.device) - start)


class RingFluxAttnProcessor:
    """The replacement of `FluxAttnProcessor` in `FluxAttention`: joint attention of text and image, not causal.

    Activate a `JointSequence`, or another sequence that counts a rank's text and image tokens together.

    Raises:
        UnsupportedError: The processor of the installed diffusers differs from the one that this class repeats.

    Example:
        model.set_attn_processor(RingFluxAttnProcessor())
    """

    def __init__(self) -> None:
        FLUX.require()

    def __call__(
        self,
        attn: Any,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor | None = None,
        attention_mask: Tensor | None = None,
        image_rotary_emb: tuple[Tensor, Tensor] | None = None,
        ip_hidden_states: list[Tensor] | None = None,  # diffusers drops arguments that the signature lacks
        ip_adapter_masks: Tensor | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Attend jointly over this rank's tokens, with the shapes of diffusers.

        Raises `InputError` for a mask, fused projections and an IP adapter.
        """
        with _refused_by_all():
            if ip_hidden_states is not None or ip_adapter_masks is not None:
                raise InputError(
                    "ip_hidden_states and ip_adapter_masks: IP adapters are not supported; call unload_ip_adapter() on "
                    "the pipeline, or give its blocks diffusers' processors, without a ring"
                )
            if attention_mask is not None:
                raise InputError("attention_mask: joint attention takes no mask here; leave padding out of the text")
            if getattr(attn, "fused_projections", False):
                raise InputError("fused projections are not supported; call unfuse_qkv_projections() on the model")
        q, k, v = (to(hidden_states).unflatten(-1, (-1, attn.head_dim)) for to in (attn.to_q, attn.to_k, attn.to_v))
        q, k = attn.norm_q(q), attn.norm_k(k)
        text = 0
        if encoder_hidden_states is not None:
            text = encoder_hidden_states.shape[1]
            added = (attn.add_q_proj, attn.add_k_proj, attn.add_v_proj)
            tq, tk, tv = (to(encoder_hidden_states).unflatten(-1, (-1, attn.head_dim)) for to in added)
            tq, tk = attn.norm_added_q(tq), attn.norm_added_k(tk)
            # Text first, as in diffusers and in `JointSequence`.
            q, k, v = (torch.cat(pair, 1) for pair in ((tq, q), (tk, k), (tv, v)))
        if image_rotary_emb is not None:
            # image_rotary_emb covers text and image tokens of this rank, because the caller shards the ids of both.
            q, k = (apply_rotary_emb(x, image_rotary_emb, sequence_dim=1) for x in (q, k))
        out = attend(sequence_of(), q, k, v).flatten(2)
        if encoder_hidden_states is None:
            return out
        image = attn.to_out[1](attn.to_out[0](out[:, text:]))
        return image, attn.to_add_out(out[:, :text])


class RingAttnProcessor(AttnProcessor2_0):
    """The replacement of `AttnProcessor2_0` in `Attention`: self-attention over the active sequence, cross attention.

    Cross attention over a ring needs `cross_attention_kwargs={"kv_seq": ...}` for its text: a Sequence if the text is
    sharded, or "whole" if every rank holds the whole text. Attention to a whole text is local, and the gradient of the
    text on a rank is then this rank's part of the total gradient.

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
        """Compute attention of this rank's tokens, (batch, tokens, dim).

        Raises `InputError` for masks over a ring and for norms over tokens.
        """
        seq = sequence_of()
        is_cross = encoder_hidden_states is not None
        is_whole = is_cross and isinstance(kv_seq, str) and kv_seq == "whole"
        if seq is not None:
            with seq.ring.refused_by_all():
                _refuse(attn, attention_mask, kv_seq if is_cross else seq, is_whole)
        if seq is None or is_whole:
            # diffusers' processor calls torch's SDPA, which an active sequence would refuse as attention to a shard.
            with activate(None):
                local: Tensor = super().__call__(attn, hidden_states, encoder_hidden_states, attention_mask, temb)
            return local
        source = hidden_states if encoder_hidden_states is None else encoder_hidden_states
        if is_cross and attn.norm_cross:
            source = attn.norm_encoder_hidden_states(source)
        source_seq = kv_seq if isinstance(kv_seq, Sequence) and is_cross else seq
        q, k, v = attn.to_q(hidden_states), attn.to_k(source), attn.to_v(source)
        q, k, v = (x.unflatten(-1, (attn.heads, -1)) for x in (q, k, v))
        q = q if attn.norm_q is None else attn.norm_q(q)
        k = k if attn.norm_k is None else attn.norm_k(k)
        # As in AttnProcessor2_0: the output projection, then its dropout.
        out = attn.to_out[1](attn.to_out[0](attend(seq, q, k, v, kv_seq=source_seq).flatten(2)))
        return (out + hidden_states if attn.residual_connection else out) / attn.rescale_output_factor


def _refused_by_all() -> AbstractContextManager[None]:
    """Return a context in which a refusal on one rank raises on all ranks of the active sequence, if there is one."""
    seq = active_sequence()
    return nullcontext() if seq is None else seq.ring.refused_by_all()


def _refuse(attn: Any, mask: Tensor | None, kv_seq: object, is_whole: bool) -> None:
    if attn.spatial_norm is not None or attn.group_norm is not None:
        raise InputError(
            "group_norm and spatial_norm normalize over all tokens, but this rank holds a part; use blocks without them"
        )
    if is_whole:
        return
    if mask is not None:
        raise InputError("attention_mask: attention over a ring takes no mask; leave padding out of the text")
    if not isinstance(kv_seq, Sequence):
        raise InputError('cross attention over a ring needs cross_attention_kwargs={"kv_seq": its Sequence or "whole"}')
