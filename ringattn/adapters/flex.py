"""Attention over a ring with the signature of `torch.nn.attention.flex_attention.flex_attention`.

Guarantees: what one process's flex_attention computes with the same arguments, or an error that names what is refused:
a `block_mask` is that of the whole sequence, and it and a `score_mod` are proven to be what a ring computes
(`flex_masks`, `flex_scores`), never guessed. Local attention is torch's own function.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.nn.attention import flex_attention as host
from torch.nn.attention.flex_attention import AuxOutput, AuxRequest, BlockMask

from ringattn.adapters.alike import refused_by_all
from ringattn.adapters.attend import as_autocast
from ringattn.adapters.context import sequence_of
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
) -> Tensor | tuple[Tensor, Tensor] | tuple[Tensor, AuxOutput]:
    """`torch.nn.attention.flex_attention.flex_attention` over the active sequence; differentiable.

    Where local attention is asked for (see `adapters.context.sequence_of`) it is torch's function of these arguments.
    Compiled code breaks its graph here. What a block_mask says is found at its first use, and again when its tables or
    what its mask_mod reads have changed.

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

    Shape:
        query: (batch, heads, tokens, head_dim)
        key: (batch, kv_heads, tokens, head_dim)
        value: (batch, kv_heads, tokens, value_dim)

    Returns:
        (batch, heads, tokens, value_dim), and where asked for lse, (batch, heads, tokens) in the accumulator's dtype.

    Raises:
        UnsupportedError: The mask, the score_mod or an option is not computed over a ring, or the mask is not of the
            whole sequence.
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
        found = _kept(block_mask, (seq.length, batch, heads), lambda: found_masks(block_mask, seq.length, batch, heads))
        rows: dict[FoundMask, list[int]] = {}
        for row, one in enumerate(found):
            _check_documents(one, seq)
            rows.setdefault(one, []).append(row)
        facts = (found, seq.length, heads, query.device)
        score = _kept(score_mod, facts, lambda: found_score(score_mod, *facts))
    q, k, v = (as_autocast(x).transpose(1, 2) for x in (query, key, value))
    parts: list[tuple[Tensor, Tensor]] = []
    for one, mine in rows.items() or {FoundMask(False, None, None): list[int]()}.items():
        cut = seq.with_documents(one.documents) if one.says_documents else seq
        some_q, some_k, some_v = (x if len(mine) == batch else x[mine] for x in (q, k, v))
        parts.append(seq.ring.attention(
            some_q, some_k, some_v, cut, causal=one.causal, window=one.window, prefix=one.prefix, scale=scale,
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


# --- what was found, kept as long as it holds ------------------------------------------------------------------------

_found: WeakKeyDictionary[Any, tuple[list[Any], dict[Any, Any]]] = WeakKeyDictionary()
"""Of a BlockMask or a score_mod what it reads, and what was found under which facts."""
KEPT = 16
"""Findings of one, those made last: a score_mod may stand beside the masks of several kinds of layers."""


def _kept(of: Any, facts: tuple[Any, ...], find: Callable[[], T]) -> T:
    """`find()`, or what it gave before under these facts where nothing that it read has changed since."""
    if of is None:
        return find()
    reads: list[Any] = []
    try:
        _collect(of, reads, set())
        known = _found.get(of)
    except (_OpaqueError, TypeError, ValueError):  # it may read anything, not be referred to weakly, or not be made yet
        return find()
    if known is None or not _alike(known[0], reads):
        known = _found[of] = reads, {}
    findings: dict[Any, T] = known[1]
    try:
        return findings[facts]
    except KeyError:
        found = findings[facts] = find()
    for facts in list(findings)[:-KEPT]:
        findings.pop(facts, None)  # gone already where another thread did it
    return found


class _OpaqueError(Exception):
    """It cannot be known what a function reads."""


_CONSTANTS = (
    int,
    float,
    bool,
    str,
    bytes,
    type(None),
    type,
    ModuleType,
    BuiltinFunctionType,
    torch._ops.OpOverloadPacket,
)


def _collect(one: Any, reads: list[Any], seen: set[int]) -> None:
    """All tensors, with their versions, and numbers that a BlockMask or a function reads. Raises `_OpaqueError`."""
    if isinstance(one, Tensor):
        if one.is_inference():
            raise _OpaqueError  # it has no versions
        reads.append((one, one._version))
    elif isinstance(one, _CONSTANTS):
        reads.append(one)
    elif id(one) in seen:
        return
    elif isinstance(one, FunctionType):
        seen.add(id(one))
        cells = [cell.cell_contents for cell in one.__closure__ or ()]
        names = () if str(one.__module__).startswith("torch.") else one.__code__.co_names
        if any(hasattr(constant, "co_names") for constant in one.__code__.co_consts):
            raise _OpaqueError  # a function in it, with names of its own
        own = [one.__globals__[name] for name in names if name in one.__globals__]
        for read in (*cells, *own, *(one.__defaults__ or ()), *(one.__kwdefaults__ or {}).values()):
            _collect(read, reads, seen)
    elif isinstance(one, partial):
        for read in (one.func, *one.args, *one.keywords.values()):
            _collect(read, reads, seen)
    elif isinstance(one, tuple):
        for read in one:
            _collect(read, reads, seen)
    elif isinstance(one, BlockMask):
        _collect(one.as_tuple(), reads, seen)
    else:
        raise _OpaqueError


def _alike(before: list[Any], now: list[Any]) -> bool:
    if len(before) != len(now):
        return False
    for one, other in zip(before, now, strict=True):
        if isinstance(one, tuple) != isinstance(other, tuple):
            return False
        if isinstance(one, tuple):
            if one[0] is not other[0] or one[1] != other[1]:
                return False
        elif type(one) is not type(other) or one != other:
            return False
    return True
