"""What an attention call computes, as one value that passes from the public entries to the engine.

A new softmax option is a field of `AttentionSpec` and of `SoftmaxOptions`, and goes into `Softmax` here, which the
engines read. (`adapters/torch_ops` repeats it: an operator's schema has numbers only. An option that some engine lacks
also passes through `engine/select.py` and `explain`, which choose one.)
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence as Many
from dataclasses import dataclass, field, replace
from typing import TypedDict, Unpack

from torch import Tensor

from ringattn.core.dilation import Dilated
from ringattn.core.mask import Banded
from ringattn.core.presets import Offset, check
from ringattn.core.problem import FLOATS, Problem
from ringattn.engine.base import Softmax
from ringattn.engine.philox import MOST_TOKENS
from ringattn.errors import InputError
from ringattn.masks import AttentionMask, refuse_removed
from ringattn.sequence import Sequence

Window = tuple[int | None, int | None] | None
MaskSpec = Banded | Dilated
"""Which pairs meet, before it is known over which sequences."""


class SoftmaxOptions(TypedDict, total=False):
    """The options that every attention takes by these names; see `AttentionSpec` for their meaning."""

    scale: float | None
    softcap: float | None
    alibi_slopes: Tensor | Many[float] | None
    schedule: str


class DropoutOptions(SoftmaxOptions, total=False):
    """Those, and dropout: taken by calls, and by the layers that have it."""

    dropout_p: float
    dropout_seed: int | None


class BandedOptions(DropoutOptions, total=False):
    """Those, and a mask besides `causal` and `window`: taken by ordinary attention."""

    mask: AttentionMask | None


class AttentionOptions(BandedOptions, total=False):
    """The options of `Ring.attention` but `return_lse`."""

    causal: bool
    window: Window
    sinks: Tensor | None
    kv_seq: Sequence | None


@dataclass(frozen=True)
class AttentionSpec:
    """Everything about an attention call but q, k, v and their sequences.

    `scale`: any finite number, None for 1/sqrt(head_dim). `softcap`: scores become softcap * tanh(score / softcap).
    `alibi_slopes`: (q_heads,) finite numbers, a tensor of any float dtype or a sequence; then score -= slope *
    |q position - k position|, after the scale and the softcap, as in flash-attn. Positions count from the starts of the
    documents, and with `kv_seq` from 0 in both sequences. They get no gradient, are read once here and kept as numbers.
    `dropout_p`: each weight is dropped with this probability, the others are divided by 1 - p, and lse is that of all
    weights; which ones depends on `dropout_seed`, from 0 to 2**64 - 1, and on the places of pairs alone.
    `sinks`: (q_heads,) logits of any float dtype that take weight and give no value. `schedule`: a name of
    docs/schedules.md, or double_ring:M, ulysses_ring:M for M ranks that belong together.
    """

    mask: MaskSpec = field(default_factory=Banded)
    scale: float | None = None
    softcap: float | None = None
    alibi_slopes: Tensor | Many[float] | None = None
    dropout_p: float = 0.0
    dropout_seed: int | None = None
    schedule: str = "auto"
    sinks: Tensor | None = field(default=None, compare=False)

    def __post_init__(self) -> None:
        """Read the slopes. Raises `InputError` for what are none."""
        if self.alibi_slopes is not None:
            object.__setattr__(self, "alibi_slopes", _slopes(self.alibi_slopes))

    @classmethod
    def banded(
        cls, causal: bool = False, window: Window = None, *, sinks: Tensor | None = None,
        mask: AttentionMask | None = None, **softmax: Unpack[DropoutOptions],
    ) -> AttentionSpec:  # fmt: skip
        """Return the spec of ordinary attention. Raises `InputError` for options that masks have replaced."""
        refuse_removed({name: value for name, value in softmax.items() if name not in DropoutOptions.__annotations__})
        return cls(Banded(causal, window, mask), sinks=sinks, **softmax)

    @classmethod
    def dilated(
        cls, segment_lengths: Many[int], dilation_rates: Many[int], causal: bool = False, offset: Offset | str = "mod",
        layer: int | None = None, *, sinks: Tensor | None = None, **softmax: Unpack[DropoutOptions],
    ) -> AttentionSpec:  # fmt: skip
        """Of dilated attention. Raises `InputError` for branches, an offset or a layer that make no sense."""
        mask = Dilated(*check(segment_lengths, dilation_rates), causal, offset, layer)
        return cls(mask, sinks=sinks, **softmax)

    def of_layer(self, dropout: bool = True) -> AttentionSpec:
        """What a layer keeps. Raises `InputError` for a seed, and for dropout where a layer has none."""
        if self.dropout_p and not dropout:
            raise InputError("this layer has no dropout; call ring.dilated_attention with dropout_p and dropout_seed")
        if self.dropout_seed is not None:
            raise InputError("dropout_seed belongs to a call, for each needs another one; give it there")
        return self

    def softmax(
        self, head_dim: int, q_heads: int, kv_heads: int,
        documents: tuple[int, ...] = (), kv_documents: tuple[int, ...] = (),
    ) -> Softmax:  # fmt: skip
        """How scores become weights. `documents`, `kv_documents`: of two sequences, their bounds.

        Raises `InputError` for no number, and for slopes that are not one for each query head.
        """
        softmax = Softmax(_scale(self.scale, head_dim), q_heads // kv_heads, _softcap(self.softcap))
        softmax = softmax._replace(dropout_p=_dropout(self.dropout_p))
        if self.alibi_slopes is None:
            return softmax
        slopes = tuple(self.alibi_slopes)
        if len(slopes) != q_heads:
            raise InputError(f"alibi_slopes must be {q_heads} numbers, one for each query head, got {len(slopes)}")
        starts = () if documents == kv_documents else tuple(zip(documents[:-1], kv_documents[:-1], strict=True))
        return softmax._replace(alibi_slopes=slopes, starts=starts)

    def seed(self, softmax: Softmax, problem: Problem) -> int:
        """The seed of dropout; 0 without dropout. Raises `InputError` for none, and for sequences too long."""
        seed = self.dropout_seed
        check_dropout_seed(seed)
        if softmax.dropout_p is None:
            return 0
        if seed is None:
            raise InputError(
                f"dropout_p={softmax.dropout_p} needs a dropout_seed, the same on all ranks and another one at each "
                "call: what is dropped must not depend on the number of ranks, as generators of the ranks would"
            )
        if max(problem.q_layout.length, problem.kv_layout.length) > MOST_TOKENS:
            raise InputError(f"dropout_p={softmax.dropout_p}: it takes sequences of at most 2**32 tokens")
        return seed


def with_mask_of(seq: Sequence, kv_seq: Sequence | None, mask_spec: MaskSpec) -> MaskSpec:
    """Return the spec with the mask that `seq` carries. Raises `InputError` if two masks are given."""
    if kv_seq is not None and kv_seq.mask is not None:
        raise InputError(f"kv_seq carries mask={kv_seq.mask.text}; give the mask to seq, whose queries it is for")
    if seq.mask is None:
        return mask_spec
    if isinstance(mask_spec, Dilated):
        raise InputError(f"seq carries mask={seq.mask.text}, and dilated attention takes no mask")
    if mask_spec.within is not None:
        raise InputError(
            f"seq carries mask={seq.mask.text}, and mask={mask_spec.within.text} is given too; give only one of them"
        )
    return replace(mask_spec, within=seq.mask)


def check_dropout_seed(seed: object) -> None:
    """Raise `InputError` for what is neither a seed of dropout nor None."""
    if seed is not None and (isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed < 2**64):
        raise InputError(f"dropout_seed must be a whole number from 0 to 2**64 - 1, or None, got {seed!r}")


def _dropout(p: float) -> float | None:
    if not _is_finite(p) or not 0 <= p < 1:
        raise InputError(f"dropout_p must be a probability from 0 to less than 1, got {p!r}")
    return float(p) or None


def _scale(scale: float | None, head_dim: int) -> float:
    if scale is None:
        return 1 / math.sqrt(head_dim)
    if not _is_finite(scale):
        raise InputError(f"scale must be a finite number or None, got {scale!r}")
    return float(scale)


def _softcap(softcap: float | None) -> float | None:
    if softcap is None:
        return None
    if not _is_finite(softcap) or softcap <= 0:
        raise InputError(f"softcap must be positive and finite, or None, got {softcap!r}")
    return float(softcap)


def _slopes(slopes: Tensor | Many[float]) -> tuple[float, ...]:
    if not isinstance(slopes, Tensor):
        if not isinstance(slopes, (tuple, list)) or not all(map(_is_finite, slopes)):
            raise InputError(f"alibi_slopes must be a tensor or finite numbers, one for each head, got {slopes!r}")
        return tuple(map(float, slopes))
    if hasattr(slopes, "to_local"):
        raise InputError("alibi_slopes are a DTensor; give those of this rank's heads, alibi_slopes.to_local()")
    if slopes.requires_grad:
        raise InputError("alibi_slopes require a gradient, and attention gives them none; pass alibi_slopes.detach()")
    if slopes.dim() != 1 or slopes.is_meta or str(slopes.dtype).removeprefix("torch.") not in FLOATS:
        raise InputError(
            f"alibi_slopes must be a tensor of shape (q_heads,) and one of {', '.join(FLOATS)}, alike for all batches, "
            f"got {slopes.dtype} of {tuple(slopes.shape)} on {slopes.device}"
        )
    return _slopes(slopes.tolist())


def _is_finite(x: object) -> bool:
    """Whether it is a number that a float can hold; True is none, and nan compares with nothing."""
    return isinstance(x, (int, float)) and not isinstance(x, bool) and abs(x) <= sys.float_info.max
