"""Attention over a ring with the signature of `torch.nn.attention.flex_attention.flex_attention`.

Guarantees: what one process's flex_attention computes with the same arguments, or an error that names what is refused:
a `block_mask` is that of the whole sequence, and it and a `score_mod` are proven to be what a ring computes
(`flex_masks`, `flex_scores`), never guessed. Local attention is torch's own function.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.nn.attention import flex_attention as host
from torch.nn.attention.flex_attention import AuxOutput, AuxRequest, BlockMask

from ringattn import masks
from ringattn.adapters.alike import refused_by_all
from ringattn.adapters.attend import as_autocast
from ringattn.adapters.context import sequence_of
from ringattn.adapters.flex_functions import Recording, record
from ringattn.adapters.flex_masks import FoundMask, found_masks
from ringattn.adapters.flex_scores import found_score
from ringattn.adapters.sdpa import check_heads_first
from ringattn.errors import InputError, UnsupportedError
from ringattn.sequence import Sequence

__all__ = ["flex_attention"]

T = TypeVar("T")


@torch.compiler.disable
def flex_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_mod: Callable[..., Tensor] | None = None,
    block_mask: BlockMask | None = None,
    scale: float | None = None,
    enable_gqa: bool = False,
    return_lse: bool = False,
    kernel_options: Any = None,
    *,
    return_aux: AuxRequest | None = None,
    trust: bool = False,
) -> Tensor | tuple[Tensor, Tensor] | tuple[Tensor, AuxOutput]:
    """`torch.nn.attention.flex_attention.flex_attention` over the active sequence; differentiable.

    Where local attention is asked for (see `adapters.context.sequence_of`) it is torch's function of these arguments.
    Compiled code breaks its graph here. block_mask and score_mod are evaluated at their first use; each call runs their
    functions at a single pair and reads the tensors that these use, and evaluates again if anything has changed.

    Args:
        query: This rank's shard of the active sequence.
        key: Like query.
        value: Like query.
        score_mod: None, or a function that is softcap * tanh(score / softcap) with a number, or score - slope[head] *
            abs(query - key), ALiBi, or the second of the first. Of keys before the query alone the distance may be
            spelled without abs. Slopes are alike for all rows of the batch.
        block_mask: A mask of the whole sequence, as one process would pass it: its mask_mod is given positions in the
            whole sequence, wherever a token lies. Full, causal, a window, or causal after a prefix, also in documents,
            alike for all heads; each row of the batch may have its own. It separates what the documents of the sequence
            separate. None: every pair.
        scale: Factor of the scores. None: 1 / sqrt(head_dim).
        enable_gqa: Key and value may have fewer heads.
        return_lse: Also return the logarithms of the sums of exp(score).
        kernel_options: None; they are of torch's kernels.
        return_aux: AuxRequest(lse=True) returns them in an AuxOutput. None: out only.
        trust: With more pairs to evaluate than `flex_functions.MOST_PAIRS`, evaluate a sample instead of raising. The
            caller answers for the other pairs. Smaller masks and score_mods are proven all the same.

    Shape:
        query: (batch, heads, tokens, head_dim)
        key: (batch, kv_heads, tokens, head_dim)
        value: (batch, kv_heads, tokens, value_dim)

    Returns:
        (batch, heads, tokens, value_dim), and where asked for lse, (batch, heads, tokens) in the accumulator's dtype.

    Raises:
        UnsupportedError: The mask, the score_mod or an option is not computed over a ring, or the mask is not of the
            whole sequence, or has too many pairs to evaluate and trust is False.
        InputError: Heads do not fit each other, the mask lets documents of the sequence meet, or nothing is active
            while a ring of several ranks is open.

    Example:
        mask = create_block_mask(lambda b, h, q, k: q >= k, None, None, seq.length, seq.length)
        with ring.activate(seq):
            out = flex_attention(seq.shard(q, 2), seq.shard(k, 2), seq.shard(v, 2), block_mask=mask)
    """
    seq = sequence_of()
    if seq is None:
        return host.flex_attention(
            query, key, value, score_mod, block_mask, scale, enable_gqa, return_lse, kernel_options,
            return_aux=return_aux,  # type: ignore[arg-type]  # None or not, which torch types one by one
        )  # fmt: skip
    with refused_by_all(seq.ring):
        _refuse(query, key, value, enable_gqa, return_lse, kernel_options, return_aux)
        batch, heads = query.shape[:2]
        found = _kept(
            block_mask, _record_mask, (seq.length, batch, heads, trust),
            lambda: found_masks(block_mask, seq.length, batch, heads, trust),
        )  # fmt: skip
        rows: dict[FoundMask, list[int]] = {}
        for row, one in enumerate(found):
            _check_documents(one, seq)
            rows.setdefault(one, []).append(row)
        facts = (found, seq.length, heads, query.device, trust)
        score = _kept(
            score_mod, lambda mod: record(mod, query.device, True), facts, lambda: found_score(score_mod, *facts)
        )
    q, k, v = (as_autocast(x).transpose(1, 2) for x in (query, key, value))
    parts: list[tuple[Tensor, Tensor]] = []
    for one, mine in rows.items() or {FoundMask(False, None, None): list[int]()}.items():
        cut = seq.with_documents(one.documents) if one.says_documents else seq
        some_q, some_k, some_v = (x if len(mine) == batch else x[mine] for x in (q, k, v))
        parts.append(seq.ring.attention(
            some_q, some_k, some_v, cut, causal=one.causal, window=one.window, scale=scale,
            mask=None if one.prefix is None else masks.prefix(one.prefix),
            softcap=score.softcap, alibi_slopes=score.alibi_slopes, return_lse=True,
        ))  # fmt: skip
    out, lse = parts[0]
    if len(parts) > 1:
        order = torch.tensor([row for mine in rows.values() for row in mine], device=q.device).argsort()
        out, lse = (torch.cat(x)[order] for x in zip(*parts, strict=True))
    out = out.transpose(1, 2)
    if not torch.is_grad_enabled():  # as in `ring_sdpa`
        out = out.detach()
    if return_aux is not None:
        return out, AuxOutput(lse=lse if return_aux.lse else None)
    return (out, lse) if return_lse else out


def _refuse(
    q: Tensor, k: Tensor, v: Tensor, enable_gqa: bool, return_lse: bool, kernel_options: Any,
    return_aux: AuxRequest | None,
) -> None:  # fmt: skip
    check_heads_first(q, k, v, enable_gqa)
    if kernel_options:
        raise UnsupportedError(f"kernel_options={kernel_options}: they are of torch's kernels, leave them out")
    if return_aux is not None and return_aux.max_scores:
        raise UnsupportedError("return_aux: a ring keeps no max_scores; ask for lse")
    if return_lse and return_aux is not None:
        raise InputError("return_lse and return_aux: give one of them")


def _check_documents(found: FoundMask, seq: Sequence) -> None:
    if not found.says_documents or set(seq.documents or ()) <= {0, *(found.documents or ()), seq.length}:
        return
    raise InputError(
        f"the active sequence has documents, cut at {seq.documents}, and block_mask lets them meet: make it a mask of "
        "these documents, or the sequence without cu_seqlens"
    )


# --- kept analyses ---------------------------------------------------------------------------------------------------


class _Analysis(NamedTuple):
    facts: tuple[Any, ...]
    recording: Recording
    result: Any


_analyses: WeakKeyDictionary[Any, list[_Analysis]] = WeakKeyDictionary()
"""The analyses of a BlockMask or score_mod. Each holds for its facts and its recording only."""
KEPT = 16
"""Analyses of each, the last ones: one score_mod may be used with the masks of several kinds of layers."""


def _kept(
    subject: Any, record_subject: Callable[[Any], Recording | None], facts: tuple[Any, ...], analyse: Callable[[], T]
) -> T:
    """Return `analyse()`, or an earlier result for the same facts and an equal recording of `subject`."""
    recording = None if subject is None else record_subject(subject)
    if recording is None:
        return analyse()
    try:
        # A bound method is a new object each time it is read.
        analyses = _analyses.setdefault(getattr(subject, "__func__", subject), [])
    except TypeError:  # no weak references, or no hash
        return analyse()
    for analysis in tuple(analyses):
        if analysis.facts == facts and analysis.recording.is_same(recording):
            return analysis.result
    recording = recording.copied()
    result = analyse()
    analyses.append(_Analysis(facts, recording, result))
    del analyses[:-KEPT]
    return result


def _record_mask(mask: Any) -> Recording | None:
    if not isinstance(mask, BlockMask):
        return None  # refused by its analysis
    *tables, mask_mod = mask.as_tuple()
    return record(mask_mod, mask.kv_indices.device, False, *tables)
