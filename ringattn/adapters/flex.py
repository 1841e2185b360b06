"""Attention over a ring with the signature of `torch.nn.attention.flex_attention.flex_attention`.

A mask_mod or score_mod may be any code, so its name proves nothing. A few of its values leave one candidate for what it
is; the candidate is then compared with the function at every pair of query and key that counts. Local attention is
torch's own function.

Guarantees: the result is that of one process's flex_attention with the same arguments. A mask or score that is not
proven to be the candidate is refused by name, unless the caller passes `trust=True`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch._dynamo._trace_wrapped_higher_order_op import TransformGetItemToIndex
from torch.nn.attention import flex_attention as host
from torch.nn.attention.flex_attention import AuxOutput, AuxRequest, BlockMask

from ringattn import masks
from ringattn.adapters import pair_functions
from ringattn.adapters.attend import as_autocast
from ringattn.adapters.context import sequence_of
from ringattn.adapters.pair_functions import (
    PairFunction,
    ReadError,
    Recording,
    Tiles,
    Unread,
    checked_tiles,
    record,
    tiles_of,
)
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
        trust: With more pairs to evaluate than `pair_functions.MOST_PAIRS`, evaluate a sample instead of raising. The
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
    with seq.ring.refused_by_all():
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


# --- Masks ------------------------------------------------------------------------------------------------------------
# A few rows of mask_mod leave one candidate for the window and the documents. To prove it, the tables of full and of
# listed blocks must equal those of the candidate, and mask_mod must agree with it at all pairs of the blocks that are
# listed as partial. In the other blocks torch's kernels do not evaluate mask_mod either.

ALL_BLOCKS_TOKENS = 1024
"""Up to this length mask_mod is evaluated in all blocks, so that tables older than what it reads are noticed."""

_POSSIBLE = (
    "a ring computes full, causal and sliding-window masks, also cut into documents (so chunks of equal length too), "
    "and causal ones after a prefix (prefix-LM), alike for all heads; here it is given no other masks"
)


@dataclass(frozen=True)
class FoundMask:
    """A mask in the words of `Ring.attention`; `documents`: cumulative lengths, None for one.

    `prefix`: of each document the first keys that all its queries see, None where causal is all that is said.
    """

    causal: bool
    window: tuple[int | None, int | None] | None
    documents: tuple[int, ...] | None
    prefix: tuple[int, ...] | None = None

    @property
    def says_documents(self) -> bool:
        """Whether tokens of different documents would meet if it had none; not where each meets itself alone."""
        return self.window != (0, 0)

    def ranges(self, length: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """Of each query the first key and the one after the last, (length,) int64; both ascend."""
        q = torch.arange(length, device=device)
        cuts = torch.tensor(self.documents or (0, length), device=device)
        which = torch.searchsorted(cuts, q, right=True)
        left, right = self.window or (None, None)
        right = 0 if self.causal else right
        first, last = cuts[which - 1], cuts[which]
        first = first if left is None else torch.maximum(first, q - left)
        after = last if right is None else torch.minimum(last, q + right + 1)
        if self.prefix is not None:
            prefix = cuts[:-1] + torch.tensor(self.prefix, device=device)
            after = torch.maximum(after, torch.minimum(last, prefix[which - 1]))
        return first, after


def found_masks(
    mask: BlockMask | None, length: int, batch: int, heads: int, trust: bool = False
) -> tuple[FoundMask, ...]:
    """Return the mask of each row of the batch.

    Raises UnsupportedError for a mask that is not a `FoundMask` or not of the whole sequence, and for too many pairs to
    evaluate unless the caller says `trust`.
    """
    if mask is None or length == 0:
        return (FoundMask(False, None, None),) * batch
    if not isinstance(mask, BlockMask):
        raise UnsupportedError(f"block_mask is a {type(mask).__name__}; make a BlockMask with create_block_mask")
    if tuple(mask.seq_lengths) != (length, length):
        raise UnsupportedError(
            f"block_mask is of {mask.seq_lengths[0]} queries and {mask.seq_lengths[1]} keys, the active sequence has "
            f"{length} tokens: make the mask of the whole sequence, as for one process, with "
            f"create_block_mask(mask_mod, B, H, {length}, {length}); its mask_mod gets positions in the whole sequence"
        )
    if mask.kv_indices.dim() != 4 or mask.kv_indices.shape[0] not in (1, batch):
        raise UnsupportedError(
            f"block_mask has tables of shape {tuple(mask.kv_indices.shape)}, the batch has {batch} rows"
        )
    if mask.kv_indices.shape[1] not in (1, heads):
        raise UnsupportedError(f"block_mask is of {mask.kv_indices.shape[1]} heads, there are {heads} query heads")
    pairs = _MaskFunction(mask)
    candidates = _only_candidates(pairs, batch, length)
    reads_row = pairs.reads(0)
    partial: dict[int, Tensor] = {}  # blocks to evaluate, in the rows of the batch that may differ
    for row in range(batch if reads_row or len(mask.kv_indices) > 1 else 1):
        listed = _check_blocks(mask, row, length, candidates[row])
        key = row if reads_row else 0
        partial[key] = partial[key] | listed if key in partial else listed
    _check_mask(pairs, partial, length, heads if pairs.reads(1) else 1, candidates, mask.BLOCK_SIZE, trust)
    return candidates


class _MaskFunction(PairFunction):
    def __init__(self, mask: BlockMask) -> None:
        def refusal(reason: str) -> UnsupportedError:
            return UnsupportedError(
                f"mask_mod {_name(mask.mask_mod)} {reason}; a sliced BlockMask has none: pass the whole one, or call "
                "create_block_mask again"
            )

        super().__init__(mask.mask_mod, mask.kv_indices.device, refusal)

    def __call__(self, row: Tensor, head: Tensor, q: Tensor, k: Tensor) -> Tensor:
        """Return whether the query of each pair attends to its key, (pairs,) bool."""
        return self.checked(self.at(row, head, q, k)) if len(q) else torch.empty_like(q, dtype=torch.bool)

    def checked(self, values: Tensor) -> Tensor:
        """Raise UnsupportedError unless mask_mod returned bools."""
        if values.dtype != torch.bool:
            raise UnsupportedError(
                f"mask_mod {_name(self.function)} returns {values.dtype}, not one bool for each pair"
            )
        return values


def _name(function: object) -> str:
    return repr(getattr(function, "__name__", function))


def _only_candidates(pairs: _MaskFunction, batch: int, length: int) -> tuple[FoundMask, ...]:
    """Of each row the one mask that it can be, if any: neighbors tell the documents, the longest one the window."""
    rows, places = torch.arange(batch, device=pairs.device), torch.arange(length, device=pairs.device)

    def everywhere(q: Tensor, k: Tensor) -> Tensor:
        row, at = (x.flatten() for x in torch.meshgrid(rows, torch.arange(len(q), device=rows.device), indexing="ij"))
        return pairs(row, torch.zeros_like(row), q[at], k[at]).view(batch, len(q))

    lonely = ~everywhere(places, places)
    if lonely.any():
        row, query = lonely.nonzero()[0].tolist()
        raise UnsupportedError(
            f"mask_mod {_name(pairs.function)}: query {query} of row {row} does not see its own key. Padding that sees "
            f"nothing is made a document of its own instead; {_POSSIBLE}"
        )
    # Neighbors of one document see each other, one the other or both, unless every token sees itself alone.
    meets = everywhere(places[1:], places[:-1]) | everywhere(places[:-1], places[1:])
    return tuple(_candidate(pairs, row, places, meets[row]) for row in range(batch))


def _candidate(pairs: _MaskFunction, row: int, places: Tensor, meets: Tensor) -> FoundMask:
    if not meets.any():
        return FoundMask(False, (0, 0) if len(places) > 1 else None, None)
    cuts = torch.cat([places[:1], places[1:][~meets], places[-1:] + 1])
    longest = int(cuts.diff().argmax())
    own = places[int(cuts[longest]) : int(cuts[longest + 1])]
    # What its last query sees before it, and its first one after it.
    q = torch.cat([own[-1:].expand_as(own), own[:1].expand_as(own)])
    seen = pairs(torch.full_like(q, row), torch.zeros_like(q), q, torch.cat([own.flip(0), own]))
    sides = tuple(None if side == len(own) - 1 else side for side in map(_run, seen.chunk(2)))
    window = None if sides in ((None, None), (None, 0)) else (sides[0], sides[1])
    found = FoundMask(sides[1] == 0, window, tuple(cuts.tolist()) if len(cuts) > 2 else None)
    return found if sides[0] is not None else _with_prefix(pairs, row, places, cuts, found)


def _with_prefix(pairs: _MaskFunction, row: int, places: Tensor, cuts: Tensor, found: FoundMask) -> FoundMask:
    """`found`, or a prefix in each document and causal after it, where the first queries of documents say so."""
    # How many keys the first query of each document sees: one where it is causal, of a prefix all.
    lengths = cuts.diff()
    starts = torch.repeat_interleave(cuts[:-1], lengths)
    seen = pairs(torch.full_like(places, row), torch.zeros_like(places), starts, places)
    prefix = torch.stack([part.to(torch.uint8).cumprod(0).sum() for part in seen.split(lengths.tolist())]).long()
    ends = found.ranges(len(places), places.device)[1]
    if torch.equal(ends[cuts[:-1]], cuts[:-1] + prefix):
        # A window's right side says as much of them; the second query tells, for the window moves on with it.
        some = ((prefix > 1) & (prefix < lengths)).nonzero().flatten()
        if not len(some):
            return found
        k = cuts[some[:1]] + prefix[some[:1]]
        if pairs(torch.full_like(k, row), torch.zeros_like(k), cuts[some[:1]] + 1, k).any():
            return found
    return FoundMask(True, None, found.documents, tuple(prefix.tolist()))


def _run(seen: Tensor) -> int:
    """How many keys after the first are seen before one is not."""
    return int(seen.to(torch.uint8).cumprod(0).sum()) - 1


# --- blocks ----------------------------------------------------------------------------------------------------------


def met_blocks(found: FoundMask, length: int, size: tuple[int, int], device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the blocks in which the mask allows some pairs, and those in which it allows all: (rows, columns) bool."""
    first, last = found.ranges(length, device)
    q0, k0 = (torch.arange(-(-length // side), device=device) * side for side in size)
    q1 = (q0 + size[0]).clamp(max=length) - 1  # the last query of each block
    k1 = (k0 + size[1]).clamp(max=length)
    # Both ends of the keys ascend from query to query, and each query sees itself: what a block of queries sees is one
    # range, from the first key of its first to the last key of its last one; what all of them see is one too.
    some = (first[q0, None] < k1) & (last[q1, None] > k0)
    return some, (first[q1, None] <= k0) & (last[q0, None] >= k1)


def _check_blocks(mask: BlockMask, row: int, length: int, found: FoundMask) -> Tensor:
    """Return the blocks in which mask_mod has to be evaluated, (rows, columns) bool.

    Raises UnsupportedError unless each block is listed just where `found` has pairs in it, and full only where all.
    """
    q_block, k_block = mask.BLOCK_SIZE
    some, every = met_blocks(found, length, mask.BLOCK_SIZE, mask.kv_indices.device)
    rows, columns = some.shape
    evaluated = torch.full_like(some, length <= ALL_BLOCKS_TOKENS)
    of = min(row, mask.kv_indices.shape[0] - 1)
    for head in range(mask.kv_indices.shape[1]):
        partial = _listed(mask.kv_num_blocks[of, head], mask.kv_indices[of, head], rows, columns)
        full = torch.zeros_like(partial)
        if mask.full_kv_num_blocks is not None and mask.full_kv_indices is not None:
            full = _listed(mask.full_kv_num_blocks[of, head], mask.full_kv_indices[of, head], rows, columns)
        wrong = ((partial + full) != some.int()) | (full.bool() & ~every)
        tables = [(mask.q_num_blocks, mask.q_indices, partial), (mask.full_q_num_blocks, mask.full_q_indices, full)]
        for counts, indices, wanted in tables:  # what torch's backward pass reads
            if counts is not None and indices is not None:
                wrong |= _listed(counts[of, head], indices[of, head], columns, rows).T != wanted
        evaluated |= partial.bool()
        if wrong.any():
            i, j = wrong.nonzero()[0].tolist()
            what = "no pair" if not some[i, j] else "every pair" if every[i, j] else "some pairs"
            raise UnsupportedError(
                f"block_mask: mask_mod {_name(mask.mask_mod)} would be {_words(found)}, which has {what} in block "
                f"({i}, {j}) of {q_block} queries and {k_block} keys, and the tables of row {row}, head {head} say "
                f"otherwise; {_POSSIBLE}"
            )
    return evaluated


def _listed(counts: Tensor, indices: Tensor, rows: int, columns: int) -> Tensor:
    """How often each block is in a table, (rows, columns) int32."""
    used = torch.arange(indices.shape[1], device=indices.device) < counts[:, None]
    legal = len(counts) == rows and bool((counts <= indices.shape[1]).all())
    if not legal or bool(((indices < 0) | (indices >= columns))[used].any()):
        raise UnsupportedError(
            f"block_mask has a table of {len(counts)} rows and {indices.shape[1]} entries, for {rows} by {columns} "
            "blocks: make it with create_block_mask"
        )
    times = torch.zeros(rows, columns, dtype=torch.int32, device=indices.device)
    return times.scatter_add_(1, torch.where(used, indices, 0).long(), used.int())


# --- pairs -----------------------------------------------------------------------------------------------------------


def _check_mask(
    pairs: _MaskFunction, blocks: dict[int, Tensor], length: int, heads: int, candidates: tuple[FoundMask, ...],
    size: tuple[int, int], trust: bool,
) -> None:  # fmt: skip
    """Raise UnsupportedError unless mask_mod is the candidate at all pairs of these blocks of each row."""
    tiles = {row: tiles_of(chosen, size, length) for row, chosen in blocks.items()}
    tiles = checked_tiles(tiles, heads, trust, f"block_mask: mask_mod {_name(pairs.function)}")
    every_head = torch.arange(heads, device=pairs.device)
    for row, part in tiles.items():
        first, last = candidates[row].ranges(length, pairs.device)
        for some_heads, q, k in part.pieces(every_head):
            said = pairs.checked(pairs.on_tiles(torch.tensor(row, device=pairs.device), some_heads, q, k))
            keys = k[:, None, :]
            wrong = said != ((keys >= first[q][..., None]) & (keys < last[q][..., None]))[:, None]
            if wrong.any():
                tile, head, i, j = wrong.nonzero()[0].tolist()
                raise UnsupportedError(
                    f"block_mask: mask_mod {_name(pairs.function)} says {bool(said[tile, head, i, j])} at query "
                    f"{int(q[tile, i])}, key {int(k[tile, j])} of row {row}, head {int(some_heads[head])}, and would "
                    f"else be {_words(candidates[row])}; {_POSSIBLE}"
                )


def _words(found: FoundMask) -> str:
    """A mask, for a message."""
    cuts = found.documents
    documents = (
        ""
        if cuts is None
        else f" in {len(cuts) - 1} documents cut at {', '.join(map(str, cuts[1:5]))}"
        + (", ..." if len(cuts) > 5 else "")
    )
    if found.window is not None:
        return f"a {'causal ' if found.causal else ''}window {found.window}{documents}"
    if found.prefix is not None:
        more = ", ..." if len(found.prefix) > 4 else ""
        return f"causal after a prefix of {', '.join(map(str, found.prefix[:4]))}{more} tokens{documents}"
    return ("causal" if found.causal else "full") + documents


# --- Scores -----------------------------------------------------------------------------------------------------------
# A score_mod is a softcap, ALiBi, or both. It is first evaluated on a grid of scores, with positions that raise when
# they are read: a function that passes is a softcap or the identity. A function that reads positions can only be
# ALiBi. Its softcap follows from pairs of a query and its own key, its slopes from neighbouring pairs. It must then
# agree at every pair that the mask allows, in every head, each with a drawn score.

ROUNDING = 2.0**-22
"""How far a bias may be from slope * distance, relative: score_mods compute it in float32, in two steps or three."""


class FoundScore(NamedTuple):
    """A score_mod in the words of `Ring.attention`; `alibi_slopes`: one for each query head."""

    softcap: float | None = None
    alibi_slopes: tuple[float, ...] | None = None


def found_score(
    score_mod: Callable[..., Tensor] | None, masks: tuple[FoundMask, ...], length: int, heads: int,
    device: torch.device, trust: bool = False,
) -> FoundScore:  # fmt: skip
    """Return what a score_mod is under these masks, one of each row of the batch.

    Raises UnsupportedError for any other, and for too many pairs to evaluate unless the caller says `trust`.
    """
    if score_mod is None or length == 0 or not masks:
        return FoundScore()
    nowhere = torch.zeros((), dtype=torch.int64).as_subclass(Unread)
    try:
        return FoundScore(_softcap(score_mod, nowhere))
    except ReadError:
        pass
    mod = _ScoreFunction(score_mod, device)
    # Where a query meets itself, ALiBi adds nothing.
    softcap = _softcap(score_mod, torch.zeros((), dtype=torch.int64, device=device))
    slopes = _slopes(mod, masks, length, heads)
    _check_score(mod, masks, length, slopes, softcap, trust)
    return FoundScore(softcap, tuple(slopes.tolist()) if slopes.any() else None)


def _check_score(
    mod: _ScoreFunction, masks: tuple[FoundMask, ...], length: int, slopes: Tensor, softcap: float | None, trust: bool
) -> None:
    """Raise UnsupportedError unless score_mod is this softcap and ALiBi at all pairs that the masks let meet."""
    device, single = mod.device, torch.zeros(1, dtype=torch.float64, device=mod.device)
    # A mask that several rows have is evaluated in the first of them, unless score_mod tells rows apart.
    rows = range(len(masks)) if mod.reads(0, single) else [masks.index(mask) for mask in dict.fromkeys(masks)]
    heads = torch.arange(len(slopes) if mod.reads(1, single) else 1, device=device)
    recording = record(mod.function, device, True)
    tiles_of_mask = _tiles_of_distances if recording is not None and recording.is_of_distance() else _tiles_of_pairs
    tiles = {row: tiles_of_mask(masks[row], length, device) for row in rows}
    tiles = checked_tiles(tiles, len(heads), trust, f"score_mod {_name(mod.function)}")
    for row, part in tiles.items():
        first, last = masks[row].ranges(length, device)
        scores = _drawn_scores(part.size, device)
        capped = scores if softcap is None else softcap * torch.tanh(scores / softcap)
        for some_heads, q, k in part.pieces(heads):
            said = mod.on_tiles(torch.tensor(row, device=device), some_heads, q, k, scores).double()
            queries, keys, slope = q[:, None, :, None], k[:, None, None, :], slopes[some_heads][:, None, None]
            distances = (queries - keys).abs().double()
            wanted = torch.addcmul(capped, slope, distances, value=-1)
            met = (keys >= first[q][:, None, :, None]) & (keys < last[q][:, None, :, None])
            error = (said - wanted).abs_()
            wrong = ~(error <= (ROUNDING * slope.abs()) * distances) & met
            if wrong.any():  # unlikely; so the rest of the rounding that is allowed is not computed for all pairs
                # slope * key - slope * query, where that is how it is written, rounds each of the two.
                apart = 2.0**-50 * (slope * (queries + keys)).abs()
                wrong &= ~(error <= ROUNDING * slope.abs() * distances + 1e-14 * wanted.abs() + apart)
            if wrong.any():
                tile, head, i, j = wrong.nonzero()[0].tolist()
                raise _unknown(
                    mod.function,
                    f"of the score {scores[i, j]:.6g} it makes {said[tile, head, i, j]:.6g} at query "
                    f"{int(q[tile, i])}, key {int(k[tile, j])} of row {row}, head {int(some_heads[head])}, where ALiBi "
                    f"with its slope between neighbors, {slopes[some_heads[head]]:.6g}, makes "
                    f"{wanted[tile, head, i, j]:.6g}",
                )


def _tiles_of_pairs(mask: FoundMask, length: int, device: torch.device) -> Tiles:
    """Return tiles that hold all pairs of a mask."""
    size = min(pair_functions.TILE_TOKENS, length), min(pair_functions.TILE_TOKENS, length)
    return tiles_of(met_blocks(mask, length, size, device)[0], size, length)


def _tiles_of_distances(mask: FoundMask, length: int, device: torch.device) -> Tiles:
    """Return tiles that hold all distances of a mask: those of the queries with the first and the last key farthest.

    The keys of each query are a range around it, so no distance between is left out.
    """
    first, last = mask.ranges(length, device)
    places = torch.arange(length, device=device)
    starts, ends = [], []
    for q in ((places - first).argmax(), (last - places).argmax()):
        keys = torch.arange(int(first[q]), int(last[q]), pair_functions.TILE_TOKENS, device=device)
        starts.append(torch.stack([q.expand_as(keys), keys], 1))
        ends.append(torch.stack([q, last[q] - 1]).expand(len(keys), 2))
    return Tiles(torch.cat(starts), torch.cat(ends), (1, min(pair_functions.TILE_TOKENS, length)))


def _drawn_scores(size: tuple[int, int], device: torch.device) -> Tensor:
    """Draw the scores of a tile, float64: most of them moderate, some up to 100,000."""
    generator = torch.Generator().manual_seed(0)  # the same on every rank
    moderate = 12 * torch.rand(size, generator=generator, dtype=torch.float64) - 6
    scale = 10 ** (6 * torch.rand(size, generator=generator, dtype=torch.float64) - 1)
    return torch.where(scale < 1e3, moderate, moderate.sign() * scale).to(device)


def _softcap(score_mod: Callable[..., Tensor], place: Tensor) -> float | None:
    """The softcap that a score_mod is where row, head, query and key are this number, None for the score itself."""

    def of(scores: Tensor) -> Tensor:
        return torch.vmap(lambda score: score_mod(score, place, place, place, place))(scores.to(place.device))

    with torch.inference_mode(False), torch.enable_grad(), TransformGetItemToIndex():
        try:
            cap = of(torch.tensor([1e30], dtype=torch.float64)).detach().double().cpu()
            steps = torch.linspace(-6, 6, 4097, dtype=torch.float64)
            grid = torch.cat([steps * cap.clamp(-1e4, 1e4), steps, 1e-6 * steps, 1e6 * steps])
            out = of(grid).cpu()
        except ReadError:
            raise
        except Exception as error:
            raise _unknown(score_mod, f"it could not be evaluated ({type(error).__name__}: {error})") from error
    if out.requires_grad:
        raise _unknown(score_mod, "it has a learned parameter, which would get no gradient")
    if torch.equal(out, grid):
        return None
    value = cap.item()
    capped = value * torch.tanh(grid / value)
    if not (0 < value < 1e28 and ((out - capped).abs() <= 1e-14 * capped.abs()).all()):
        raise _unknown(score_mod, "without a bias it is neither the score itself nor softcap * tanh(score / softcap)")
    return value


def _unknown(score_mod: object, why: str) -> UnsupportedError:
    return UnsupportedError(
        f"score_mod {_name(score_mod)} is not what a ring computes: no score_mod, softcap * "
        f"tanh(score / softcap) with a number, and after it ALiBi, - slope[head] * abs(query - key): {why}. Masks go "
        "into block_mask"
    )


class _ScoreFunction(PairFunction):
    def __init__(self, score_mod: Callable[..., Tensor], device: torch.device) -> None:
        super().__init__(score_mod, device, lambda reason: _unknown(score_mod, f"it {reason}"))


def _slopes(mod: _ScoreFunction, masks: tuple[FoundMask, ...], length: int, heads: int) -> Tensor:
    """Of each head what the bias of neighbors says, (heads,) float64; 0 where no token meets its neighbor."""
    slopes: Tensor | None = None
    for row, mask in enumerate(masks):
        first, last = mask.ranges(length, mod.device)
        places = torch.arange(length, device=mod.device)
        # Behind or ahead, by what the mask allows: where a query meets any other key, some query meets its neighbor.
        behind, ahead = (first < places).nonzero().flatten(), (last > places + 1).nonzero().flatten()
        if not len(behind) and not len(ahead):
            continue
        q = behind[0] if len(behind) else ahead[0]
        head = torch.arange(heads, device=mod.device)
        q, k = q.expand(heads), (q + (-1 if len(behind) else 1)).expand(heads)
        zeros = torch.zeros(heads, dtype=torch.float64, device=mod.device)
        found = 0 - mod.at(zeros, torch.full_like(head, row), head, q, k).double()
        if slopes is not None and not torch.equal(found, slopes):
            raise _unknown(mod.function, f"row {row} of the batch has other slopes than those before it")
        slopes = found
    return torch.zeros(heads, dtype=torch.float64, device=mod.device) if slopes is None else slopes
