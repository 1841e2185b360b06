"""Attention over a ring with the signature of `torch.nn.attention.flex_attention.flex_attention`.

A mask_mod or score_mod may be any code, so its name proves nothing. A few of its values determine the only mask or
score that it can be, the candidate. The candidate is then compared with the function at every relevant pair of query
and key. A mask that is not its candidate is evaluated at all pairs and lowered to slices. Local attention is torch's
own function.

Guarantees: the result is that of flex_attention on one process with the same arguments. A function that is not proven
to equal its candidate is refused by name, unless the caller passes `trust=True`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
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
from ringattn.adapters.tables import check_size, connects, slices_of
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
    """Compute `torch.nn.attention.flex_attention.flex_attention` over the active sequence; differentiable.

    If attention is local (see `adapters.context.sequence_of`), torch's function gets these arguments unchanged.
    Compiled code breaks its graph here. block_mask and score_mod are evaluated at their first use. Later calls run
    their functions at a single pair, compare the tensors that these use, and evaluate again only after a change.

    Args:
        query: This rank's shard of the active sequence.
        key: Like query.
        value: Like query.
        score_mod: None, or one of: softcap * tanh(score / softcap) with a number; ALiBi, score - slope[head] *
            abs(query - key); ALiBi after a softcap. If all keys precede the query, the distance may be written without
            abs. Slopes must be the same for all rows of the batch.
        block_mask: A mask of the whole sequence, as one process would pass it: its mask_mod gets positions in the whole
            sequence. Supported: full, causal, a window, or causal after a prefix, also within documents, and any mask
            that is a few slices (see `adapters.tables`). It must be the same for all heads, but may differ between rows
            of the batch. It must separate the documents of the sequence. None: every pair.
        scale: Factor of the scores. None: 1 / sqrt(head_dim).
        enable_gqa: Key and value may have fewer heads.
        return_lse: Also return the log-sum-exp of the scores.
        kernel_options: Must be None: they are options of torch's kernels.
        return_aux: AuxRequest(lse=True) returns the log-sum-exp in an AuxOutput. None: out only.
        trust: If there are more pairs to evaluate than `pair_functions.MOST_PAIRS`, evaluate a sample instead of
            raising. The caller vouches for the other pairs. Smaller masks and score_mods are still proven.

    Shape:
        query: (batch, heads, tokens, head_dim)
        key: (batch, kv_heads, tokens, head_dim)
        value: (batch, kv_heads, tokens, value_dim)

    Returns:
        (batch, heads, tokens, value_dim), and if requested lse, (batch, heads, tokens) in the accumulator's dtype.

    Raises:
        UnsupportedError: The mask, the score_mod or an option is not supported over a ring, the mask is not one of the
            whole sequence, or there are too many pairs to evaluate and trust is False.
        InputError: Head counts do not match, the mask connects documents of the sequence, or nothing is active while a
            ring of several ranks is open.

    Example:
        mask = create_block_mask(lambda b, h, q, k: q >= k, None, None, seq.length, seq.length)
        with ring.activate(seq):
            out = flex_attention(seq.shard(q, 2), seq.shard(k, 2), seq.shard(v, 2), block_mask=mask)
    """
    seq = sequence_of()
    if seq is None:
        return host.flex_attention(
            query, key, value, score_mod, block_mask, scale, enable_gqa, return_lse, kernel_options,
            return_aux=return_aux,  # type: ignore[arg-type]  # torch has one overload for None and one for a request
        )  # fmt: skip
    with seq.ring.refused_by_all():
        _refuse(query, key, value, enable_gqa, return_lse, kernel_options, return_aux)
        batch, heads = query.shape[:2]
        row_masks = _cached(
            block_mask, _record_mask, (seq.length, batch, heads, trust),
            lambda: recognise_masks(block_mask, seq.length, batch, heads, trust),
        )  # fmt: skip
        rows: dict[FoundMask, list[int]] = {}
        for row, mask in enumerate(row_masks):
            _check_documents(mask, seq)
            rows.setdefault(mask, []).append(row)
        facts = (row_masks, seq.length, heads, query.device, trust)
        score = _cached(
            score_mod, lambda mod: record(mod, query.device, True), facts, lambda: recognise_score(score_mod, *facts)
        )
    q, k, v = (as_autocast(x).transpose(1, 2) for x in (query, key, value))
    parts: list[tuple[Tensor, Tensor]] = []
    # One call for each different mask. An empty batch makes a call too, because ranks must make the same calls.
    for mask, members in rows.items() or {FoundMask(False, None, None): list[int]()}.items():
        mask_seq = seq.with_documents(mask.documents) if mask.needs_documents else seq
        mask_q, mask_k, mask_v = (x if len(members) == batch else x[members] for x in (q, k, v))
        parts.append(seq.ring.attention(
            mask_q, mask_k, mask_v, mask_seq, causal=mask.causal, window=mask.window, scale=scale,
            mask=mask.slices if mask.prefix is None else masks.prefix(mask.prefix),
            softcap=score.softcap, alibi_slopes=score.alibi_slopes, return_lse=True,
        ))  # fmt: skip
    out, lse = parts[0]
    if len(parts) > 1:
        order = torch.tensor([row for members in rows.values() for row in members], device=q.device).argsort()
        out, lse = (torch.cat(x)[order] for x in zip(*parts, strict=True))
    out = out.transpose(1, 2)
    if not torch.is_grad_enabled():  # return no view, for the reason given in `ring_sdpa`
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
        raise UnsupportedError(f"kernel_options={kernel_options}: these are options of torch's kernels, leave them out")
    if return_aux is not None and return_aux.max_scores:
        raise UnsupportedError("return_aux: a ring does not compute max_scores; request lse only")
    if return_lse and return_aux is not None:
        raise InputError("return_lse and return_aux: pass one of them")


def _check_documents(mask: FoundMask, seq: Sequence) -> None:
    if not mask.needs_documents or set(seq.documents or ()) <= {0, *(mask.documents or ()), seq.length}:
        return
    if mask.slices is not None and not connects(mask.slices, seq.bounds):
        return
    raise InputError(
        f"the active sequence has documents, cut at {seq.documents}, but block_mask connects them: make a mask of "
        "these documents, or the sequence without cu_seqlens"
    )


# --- cached analyses -------------------------------------------------------------------------------------------------


class _Analysis(NamedTuple):
    facts: tuple[Any, ...]
    recording: Recording
    result: Any


_analyses: WeakKeyDictionary[Any, list[_Analysis]] = WeakKeyDictionary()
"""The analyses of each BlockMask or score_mod. A result is valid only for equal facts and an equal recording."""

KEPT = 16
"""Limit of recent analyses per function. One score_mod may be used with the masks of several kinds of layers."""


def _cached(
    subject: Any, record_subject: Callable[[Any], Recording | None], facts: tuple[Any, ...], analyse: Callable[[], T]
) -> T:
    """Return `analyse()`, or an earlier result for the same facts and an equal recording of `subject`."""
    recording = None if subject is None else record_subject(subject)
    if recording is None:
        return analyse()
    try:
        # Each access to a bound method makes a new object, so its function is the key.
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
        return None  # the analysis refuses it
    *tables, mask_mod = mask.as_tuple()
    return record(mask_mod, mask.kv_indices.device, False, *tables)


# --- Masks ------------------------------------------------------------------------------------------------------------
# A few rows of mask_mod determine the only possible window and documents, the candidate. Two comparisons prove it. The
# tables of full and of partial blocks must equal those of the candidate, and mask_mod must agree with it at all pairs
# of the partial blocks. In other blocks, torch's kernels do not evaluate mask_mod either. A mask that is not its
# candidate is evaluated in all blocks and lowered to slices.

ALL_BLOCKS_TOKENS = 1024
"""Up to this length, mask_mod is evaluated in all blocks. This detects tables that are older than the data it reads."""

_POSSIBLE = (
    "over a ring, flex_attention supports full, causal and sliding-window masks, also within documents (such as chunks "
    "of equal length), causal masks after a prefix (prefix-LM), and masks that are a few slices, the same for all heads"
)


class _OtherMaskError(UnsupportedError):
    """A mask is not its candidate."""


@dataclass(frozen=True)
class FoundMask:
    """A mask as arguments of `Ring.attention`.

    `documents`: cumulative lengths, or None for one document. `prefix`: for each document, the number of first keys
    that all its queries attend to, or None for no prefix. `slices`: another mask, or None; without causal, a window,
    documents and a prefix.
    """

    causal: bool
    window: tuple[int | None, int | None] | None
    documents: tuple[int, ...] | None
    prefix: tuple[int, ...] | None = None
    slices: masks.Slices | None = None

    @property
    def needs_documents(self) -> bool:
        """Documents change the mask, unless every token attends to itself only."""
        return self.window != (0, 0)

    def ranges(self, length: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return each query's first key and the key after its last one, (length,) int64. Both never decrease."""
        q = torch.arange(length, device=device)
        cuts = torch.tensor(self.documents or (0, length), device=device)
        document = torch.searchsorted(cuts, q, right=True)
        left, right = self.window or (None, None)
        right = 0 if self.causal else right
        first, last = cuts[document - 1], cuts[document]
        first = first if left is None else torch.maximum(first, q - left)
        after = last if right is None else torch.minimum(last, q + right + 1)
        if self.prefix is not None:
            prefix = cuts[:-1] + torch.tensor(self.prefix, device=device)
            after = torch.maximum(after, torch.minimum(last, prefix[document - 1]))
        return first, after


def recognise_masks(
    mask: BlockMask | None, length: int, batch: int, heads: int, trust: bool = False
) -> tuple[FoundMask, ...]:
    """Return the mask of each row of the batch, proven equal to `mask`.

    Raises UnsupportedError if no `FoundMask` can express `mask`, if it is not a mask of the whole sequence, or if there
    are too many pairs to evaluate and `trust` is False.
    """
    if mask is None or length == 0:
        return (FoundMask(False, None, None),) * batch
    if not isinstance(mask, BlockMask):
        raise UnsupportedError(f"block_mask is a {type(mask).__name__}; pass a BlockMask from create_block_mask")
    if tuple(mask.seq_lengths) != (length, length):
        raise UnsupportedError(
            f"block_mask has {mask.seq_lengths[0]} queries and {mask.seq_lengths[1]} keys, the active sequence has "
            f"{length} tokens: make the mask of the whole sequence, as for one process, with "
            f"create_block_mask(mask_mod, B, H, {length}, {length}); its mask_mod gets positions in the whole sequence"
        )
    if mask.kv_indices.dim() != 4 or mask.kv_indices.shape[0] not in (1, batch):
        raise UnsupportedError(
            f"block_mask has tables of shape {tuple(mask.kv_indices.shape)}, but the batch has {batch} rows"
        )
    if mask.kv_indices.shape[1] not in (1, heads):
        raise UnsupportedError(f"block_mask has {mask.kv_indices.shape[1]} heads, but there are {heads} query heads")
    pairs = _MaskFunction(mask)
    try:
        return _recognise_candidates(pairs, mask, length, batch, heads, trust)
    except _OtherMaskError as error:
        try:
            return _recognise_slices(pairs, mask, length, batch, heads)
        except UnsupportedError as reason:
            raise UnsupportedError(f"{error}; it is not a few slices either: {reason}") from reason


def _recognise_candidates(
    pairs: _MaskFunction, mask: BlockMask, length: int, batch: int, heads: int, trust: bool
) -> tuple[FoundMask, ...]:
    """Return the candidate of each row. Raises `_OtherMaskError` if the mask is another one."""
    candidates = _candidates(pairs, batch, length)
    reads_row = pairs.reads(0)
    partial: dict[int, Tensor] = {}  # blocks to evaluate, by row; 0 for all rows if the function does not read rows
    for row in range(batch if reads_row or len(mask.kv_indices) > 1 else 1):
        blocks = blocks_of(candidates[row], length, mask.BLOCK_SIZE, pairs.device)
        listed = _check_blocks(mask, row, *blocks, f"could only be {_description(candidates[row])}, which has")
        listed |= length <= ALL_BLOCKS_TOKENS
        key = row if reads_row else 0
        partial[key] = partial[key] | listed if key in partial else listed
    _check_mask(pairs, partial, length, heads if pairs.reads(1) else 1, candidates, mask.BLOCK_SIZE, trust)
    return candidates


def _recognise_slices(
    pairs: _MaskFunction, mask: BlockMask, length: int, batch: int, heads: int
) -> tuple[FoundMask, ...]:
    """Return the slices of each row: mask_mod is evaluated at all pairs, for each row and head that it reads."""
    reads_row, reads_head = pairs.reads(0), pairs.reads(1)
    check_size(length, length)
    count = length**2 * (batch if reads_row else 1) * (heads if reads_head else 1)
    if count > pair_functions.MOST_PAIRS:
        raise UnsupportedError(
            f"mask_mod reads rows or heads, so there are {count:,} values to evaluate, the limit is "
            f"{pair_functions.MOST_PAIRS:,}"
        )
    row_masks: list[FoundMask] = []
    for row in range(batch if reads_row or len(mask.kv_indices) > 1 else 1):
        if row == 0 or reads_row:
            table = _table(pairs, row, heads if reads_head else 1, length)
            slices = slices_of(table)
        _check_blocks(mask, row, *_blocks_of_table(table, mask.BLOCK_SIZE), "has")
        row_masks.append(FoundMask(False, None, None, slices=slices))
    return (*row_masks, *row_masks[-1:] * (batch - len(row_masks)))


def _table(pairs: _MaskFunction, row: int, heads: int, length: int) -> Tensor:
    """Return mask_mod at all pairs of a row, (length, length) bool. Raises UnsupportedError if its heads differ."""
    positions = torch.arange(length, device=pairs.device)
    table = torch.empty(length, length, dtype=torch.bool, device=pairs.device)
    for q in positions.split(max(1, pair_functions.PIECE_PAIRS // length)):
        for head in torch.arange(heads, device=pairs.device).split(1):
            values = pairs.on_tiles(torch.tensor(row, device=pairs.device), head, q[None], positions[None])
            values = pairs.checked(values)[0, 0]
            if head == 0:
                table[q] = values
            elif not torch.equal(table[q], values):
                raise UnsupportedError(f"head {int(head)} has another mask than head 0; make a call for each of them")
    return table


class _MaskFunction(PairFunction):
    def __init__(self, mask: BlockMask) -> None:
        def refusal(reason: str) -> UnsupportedError:
            return UnsupportedError(
                f"mask_mod {_name(mask.mask_mod)} {reason}; a sliced BlockMask has no usable mask_mod: pass the whole "
                "mask, or call create_block_mask again"
            )

        super().__init__(mask.mask_mod, mask.kv_indices.device, refusal)

    def __call__(self, row: Tensor, head: Tensor, q: Tensor, k: Tensor) -> Tensor:
        """Return whether the query of each pair attends to its key, (pairs,) bool."""
        return self.checked(self.on_pairs(row, head, q, k)) if len(q) else torch.empty_like(q, dtype=torch.bool)

    def checked(self, values: Tensor) -> Tensor:
        """Return `values`. Raises UnsupportedError unless they are bools."""
        if values.dtype != torch.bool:
            raise UnsupportedError(
                f"mask_mod {_name(self.function)} returns {values.dtype}, not one bool for each pair"
            )
        return values


def _name(function: object) -> str:
    return repr(getattr(function, "__name__", function))


def _candidates(pairs: _MaskFunction, batch: int, length: int) -> tuple[FoundMask, ...]:
    """Return the candidate of each row: the only mask that it can be.

    Pairs of neighboring tokens determine its documents, and the longest document determines its window.
    """
    rows, positions = torch.arange(batch, device=pairs.device), torch.arange(length, device=pairs.device)

    def everywhere(q: Tensor, k: Tensor) -> Tensor:
        row, pair = (x.flatten() for x in torch.meshgrid(rows, torch.arange(len(q), device=rows.device), indexing="ij"))
        return pairs(row, torch.zeros_like(row), q[pair], k[pair]).view(batch, len(q))

    without_self = ~everywhere(positions, positions)
    if without_self.any():
        row, query = without_self.nonzero()[0].tolist()
        raise _OtherMaskError(
            f"mask_mod {_name(pairs.function)}: query {query} of row {row} does not attend to its own key. Make "
            f"padding a separate document instead of masking it out; {_POSSIBLE}"
        )
    # In every supported mask, neighbors in a document attend in at least one direction, unless all attend to themselves
    # only. So a pair of neighbors without attention is a cut.
    connected = everywhere(positions[1:], positions[:-1]) | everywhere(positions[:-1], positions[1:])
    return tuple(_candidate(pairs, row, positions, connected[row]) for row in range(batch))


def _candidate(pairs: _MaskFunction, row: int, positions: Tensor, connected: Tensor) -> FoundMask:
    """Return the candidate of one row. `connected`: whether each token and the next one attend in any direction."""
    if not connected.any():
        return FoundMask(False, (0, 0) if len(positions) > 1 else None, None)
    cuts = torch.cat([positions[:1], positions[1:][~connected], positions[-1:] + 1])
    longest = int(cuts.diff().argmax())
    document = positions[int(cuts[longest]) : int(cuts[longest + 1])]
    # The last query of the longest document shows the left side of a window, and its first query the right side.
    q = torch.cat([document[-1:].expand_as(document), document[:1].expand_as(document)])
    attended = pairs(torch.full_like(q, row), torch.zeros_like(q), q, torch.cat([document.flip(0), document]))
    sides = tuple(None if side == len(document) - 1 else side for side in map(_keys_beyond_first, attended.chunk(2)))
    window = None if sides in ((None, None), (None, 0)) else (sides[0], sides[1])
    mask = FoundMask(sides[1] == 0, window, tuple(cuts.tolist()) if len(cuts) > 2 else None)
    return mask if sides[0] is not None else _with_prefix(pairs, row, positions, cuts, mask)


def _with_prefix(pairs: _MaskFunction, row: int, positions: Tensor, cuts: Tensor, mask: FoundMask) -> FoundMask:
    """Return `mask`, or a mask that is causal after a prefix if the keys of each document's first query show one."""
    # The number of keys that each document's first query attends to: 1 if causal, the whole prefix otherwise.
    lengths = cuts.diff()
    starts = torch.repeat_interleave(cuts[:-1], lengths)
    attended = pairs(torch.full_like(positions, row), torch.zeros_like(positions), starts, positions)
    prefix = torch.stack([part.to(torch.uint8).cumprod(0).sum() for part in attended.split(lengths.tolist())]).long()
    ends = mask.ranges(len(positions), positions.device)[1]
    if torch.equal(ends[cuts[:-1]], cuts[:-1] + prefix):
        # The right side of a window has the same first rows. The second query decides: a window moves with the query,
        # a prefix does not.
        undecided = ((prefix > 1) & (prefix < lengths)).nonzero().flatten()
        if not len(undecided):
            return mask
        k = cuts[undecided[:1]] + prefix[undecided[:1]]
        if pairs(torch.full_like(k, row), torch.zeros_like(k), cuts[undecided[:1]] + 1, k).any():
            return mask
    return FoundMask(True, None, mask.documents, tuple(prefix.tolist()))


def _keys_beyond_first(attended: Tensor) -> int:
    """Return the number of consecutive attended keys after the first one."""
    return int(attended.to(torch.uint8).cumprod(0).sum()) - 1


# --- blocks ----------------------------------------------------------------------------------------------------------


def blocks_of(mask: FoundMask, length: int, size: tuple[int, int], device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the blocks in which the mask allows some pairs, and those in which it allows all: (rows, columns) bool."""
    first, last = mask.ranges(length, device)
    q0, k0 = (torch.arange(-(-length // side), device=device) * side for side in size)
    q1 = (q0 + size[0]).clamp(max=length) - 1  # the last query of each block
    k1 = (k0 + size[1]).clamp(max=length)
    # Both ends of the key range never decrease from query to query, and each query attends to itself. So the keys of a
    # block of queries are one range, from the first key of its first query to the last key of its last query. The keys
    # that all of these queries attend to are one range too.
    some = (first[q0, None] < k1) & (last[q1, None] > k0)
    return some, (first[q1, None] <= k0) & (last[q0, None] >= k1)


def _blocks_of_table(table: Tensor, size: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """Return the blocks in which a table has some pairs, and those in which it has all: (rows, columns) bool."""
    padding = (0, -table.shape[1] % size[1], 0, -table.shape[0] % size[0])

    def blocks(value: bool) -> Tensor:
        """Return the blocks, (rows, columns, queries, keys). `value`: that of pairs after the end of the sequence."""
        return F.pad(table, padding, value=value).unfold(0, size[0], size[0]).unfold(1, size[1], size[1])

    return blocks(False).any(-1).any(-1), blocks(True).all(-1).all(-1)


def _check_blocks(mask: BlockMask, row: int, nonempty: Tensor, complete: Tensor, description: str) -> Tensor:
    """Return the partial blocks, (rows, columns) bool.

    Raises `_OtherMaskError` unless the tables list exactly the blocks `nonempty` in which a mask has pairs, and as full
    only the blocks `complete` in which it has all pairs. `description`: what the message says before "every pair".
    """
    q_block, k_block = mask.BLOCK_SIZE
    rows, columns = nonempty.shape
    evaluated = torch.zeros_like(nonempty)
    table_row = min(row, mask.kv_indices.shape[0] - 1)  # tables may be shared by all rows
    for head in range(mask.kv_indices.shape[1]):
        partial = _listed(mask.kv_num_blocks[table_row, head], mask.kv_indices[table_row, head], rows, columns)
        full = torch.zeros_like(partial)
        if mask.full_kv_num_blocks is not None and mask.full_kv_indices is not None:
            full = _listed(
                mask.full_kv_num_blocks[table_row, head], mask.full_kv_indices[table_row, head], rows, columns
            )
        wrong = ((partial + full) != nonempty.int()) | (full.bool() & ~complete)
        tables = [(mask.q_num_blocks, mask.q_indices, partial), (mask.full_q_num_blocks, mask.full_q_indices, full)]
        for counts, indices, expected in tables:  # transposed tables, which torch's backward pass reads
            if counts is not None and indices is not None:
                wrong |= _listed(counts[table_row, head], indices[table_row, head], columns, rows).T != expected
        evaluated |= partial.bool()
        if wrong.any():
            i, j = wrong.nonzero()[0].tolist()
            what = "no pair" if not nonempty[i, j] else "every pair" if complete[i, j] else "some pairs"
            raise _OtherMaskError(
                f"block_mask: mask_mod {_name(mask.mask_mod)} {description} {what} in block ({i}, {j}) of "
                f"{q_block} queries and {k_block} keys, but the tables of row {row}, head {head} differ; {_POSSIBLE}"
            )
    return evaluated


def _listed(counts: Tensor, indices: Tensor, rows: int, columns: int) -> Tensor:
    """Return how often a table lists each block, (rows, columns) int32."""
    used = torch.arange(indices.shape[1], device=indices.device) < counts[:, None]
    legal = len(counts) == rows and bool((counts <= indices.shape[1]).all())
    if not legal or bool(((indices < 0) | (indices >= columns))[used].any()):
        raise UnsupportedError(
            f"block_mask has an invalid table of {len(counts)} rows and {indices.shape[1]} entries for {rows} by "
            f"{columns} blocks: make it with create_block_mask"
        )
    times = torch.zeros(rows, columns, dtype=torch.int32, device=indices.device)
    return times.scatter_add_(1, torch.where(used, indices, 0).long(), used.int())


# --- pairs -----------------------------------------------------------------------------------------------------------


def _check_mask(
    pairs: _MaskFunction, blocks: dict[int, Tensor], length: int, heads: int, candidates: tuple[FoundMask, ...],
    size: tuple[int, int], trust: bool,
) -> None:  # fmt: skip
    """Raise UnsupportedError unless mask_mod equals the candidate at all pairs of these blocks of each row."""
    tiles = {row: tiles_of(chosen, size, length) for row, chosen in blocks.items()}
    tiles = checked_tiles(tiles, heads, trust, f"block_mask: mask_mod {_name(pairs.function)}")
    every_head = torch.arange(heads, device=pairs.device)
    for row, part in tiles.items():
        first, last = candidates[row].ranges(length, pairs.device)
        for head_group, q, k in part.pieces(every_head):
            allowed = pairs.checked(pairs.on_tiles(torch.tensor(row, device=pairs.device), head_group, q, k))
            keys = k[:, None, :]
            wrong = allowed != ((keys >= first[q][..., None]) & (keys < last[q][..., None]))[:, None]
            if wrong.any():
                tile, head, i, j = wrong.nonzero()[0].tolist()
                raise _OtherMaskError(
                    f"block_mask: mask_mod {_name(pairs.function)} returns {bool(allowed[tile, head, i, j])} at query "
                    f"{int(q[tile, i])}, key {int(k[tile, j])} of row {row}, head {int(head_group[head])}, but could "
                    f"only be {_description(candidates[row])}; {_POSSIBLE}"
                )


def _description(mask: FoundMask) -> str:
    """Return a description of a mask for a message."""
    cuts = mask.documents
    documents = (
        ""
        if cuts is None
        else f" in {len(cuts) - 1} documents cut at {', '.join(map(str, cuts[1:5]))}"
        + (", ..." if len(cuts) > 5 else "")
    )
    if mask.window is not None:
        return f"a {'causal ' if mask.causal else ''}window {mask.window}{documents}"
    if mask.prefix is not None:
        more = ", ..." if len(mask.prefix) > 4 else ""
        return f"causal after a prefix of {', '.join(map(str, mask.prefix[:4]))}{more} tokens{documents}"
    return ("causal" if mask.causal else "full") + documents


# --- Scores -----------------------------------------------------------------------------------------------------------
# A score_mod is a softcap, ALiBi, or both. It is first evaluated on a grid of scores, with positions that raise when
# they are read. A function that passes can only be a softcap or the identity. A function that reads positions can only
# be ALiBi. Pairs of a query and its own key determine its softcap, and pairs of neighbors its slopes. It must then
# agree at every pair that the mask allows, in every head, each with a random score.

ROUNDING = 2.0**-22
"""Relative tolerance of a bias against slope * distance, for score_mods that compute it in float32 in 2 or 3 steps."""


class FoundScore(NamedTuple):
    """A score_mod as arguments of `Ring.attention`. `alibi_slopes`: one for each query head."""

    softcap: float | None = None
    alibi_slopes: tuple[float, ...] | None = None


def recognise_score(
    score_mod: Callable[..., Tensor] | None, masks: tuple[FoundMask, ...], length: int, heads: int,
    device: torch.device, trust: bool = False,
) -> FoundScore:  # fmt: skip
    """Return the softcap and slopes of a score_mod, proven at all pairs of `masks` (one mask for each batch row).

    Raises UnsupportedError for any other score_mod, and if there are too many pairs to evaluate and `trust` is False.
    """
    if score_mod is None or length == 0 or not masks:
        return FoundScore()
    unread = torch.zeros((), dtype=torch.int64).as_subclass(Unread)
    try:
        return FoundScore(_softcap(score_mod, unread, device))
    except ReadError:
        pass
    if any(mask.slices is not None for mask in masks):
        raise UnsupportedError(
            f"score_mod {_name(score_mod)} reads positions, rows or heads, which over a ring is supported for full, "
            "causal, window and prefix masks, and block_mask is another mask that is a few slices; leave score_mod out"
        )
    mod = _ScoreFunction(score_mod, device)
    # At distance 0, ALiBi adds nothing, so only the softcap remains.
    softcap = _softcap(score_mod, torch.zeros((), dtype=torch.int64, device=device), device)
    slopes = _slopes(mod, masks, length, heads)
    _check_score(mod, masks, length, slopes, softcap, trust)
    return FoundScore(softcap, tuple(slopes.tolist()) if slopes.any() else None)


def _check_score(
    mod: _ScoreFunction, masks: tuple[FoundMask, ...], length: int, slopes: Tensor, softcap: float | None, trust: bool
) -> None:
    """Raise UnsupportedError unless score_mod is this softcap and ALiBi at all pairs that the masks allow."""
    device, single = mod.device, torch.zeros(1, dtype=torch.float64, device=mod.device)
    # If several rows share a mask, one of them is enough, unless score_mod depends on the row.
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
        for head_group, q, k in part.pieces(heads):
            biased = mod.on_tiles(torch.tensor(row, device=device), head_group, q, k, scores).double()
            queries, keys, slope = q[:, None, :, None], k[:, None, None, :], slopes[head_group][:, None, None]
            distances = (queries - keys).abs().double()
            expected = torch.addcmul(capped, slope, distances, value=-1)
            allowed = (keys >= first[q][:, None, :, None]) & (keys < last[q][:, None, :, None])
            error = (biased - expected).abs_()
            wrong = ~(error <= (ROUNDING * slope.abs()) * distances) & allowed
            if wrong.any():  # rare, so the more expensive tolerance is computed only now
                # A function may be written as slope * key - slope * query, which rounds each product.
                cancellation = 2.0**-50 * (slope * (queries + keys)).abs()
                wrong &= ~(error <= ROUNDING * slope.abs() * distances + 1e-14 * expected.abs() + cancellation)
            if wrong.any():
                tile, head, i, j = wrong.nonzero()[0].tolist()
                raise _unknown(
                    mod.function,
                    f"it turns the score {scores[i, j]:.6g} into {biased[tile, head, i, j]:.6g} at query "
                    f"{int(q[tile, i])}, key {int(k[tile, j])} of row {row}, head {int(head_group[head])}, but ALiBi "
                    f"with its slope between neighbors, {slopes[head_group[head]]:.6g}, would give "
                    f"{expected[tile, head, i, j]:.6g}",
                )


def _tiles_of_pairs(mask: FoundMask, length: int, device: torch.device) -> Tiles:
    """Return tiles that hold all pairs of a mask."""
    size = min(pair_functions.TILE_TOKENS, length), min(pair_functions.TILE_TOKENS, length)
    return tiles_of(blocks_of(mask, length, size, device)[0], size, length)


def _tiles_of_distances(mask: FoundMask, length: int, device: torch.device) -> Tiles:
    """Return tiles with all distances of a mask, for a score_mod that depends on distances only.

    Two queries are enough: those whose first and whose last key are farthest away. The keys of a query are a range
    around it, so every distance in between occurs as well.
    """
    first, last = mask.ranges(length, device)
    positions = torch.arange(length, device=device)
    starts, ends = [], []
    for q in ((positions - first).argmax(), (last - positions).argmax()):
        keys = torch.arange(int(first[q]), int(last[q]), pair_functions.TILE_TOKENS, device=device)
        starts.append(torch.stack([q.expand_as(keys), keys], 1))
        ends.append(torch.stack([q, last[q] - 1]).expand(len(keys), 2))
    return Tiles(torch.cat(starts), torch.cat(ends), (1, min(pair_functions.TILE_TOKENS, length)))


def _drawn_scores(size: tuple[int, int], device: torch.device) -> Tensor:
    """Draw random scores for a tile, float64: most of them moderate, some up to 100,000."""
    generator = torch.Generator().manual_seed(0)  # the same on every rank
    moderate = 12 * torch.rand(size, generator=generator, dtype=torch.float64) - 6
    scale = 10 ** (6 * torch.rand(size, generator=generator, dtype=torch.float64) - 1)
    return torch.where(scale < 1e3, moderate, moderate.sign() * scale).to(device)


def _softcap(score_mod: Callable[..., Tensor], index: Tensor, device: torch.device) -> float | None:
    """Return the softcap of a score_mod if row, head, query and key are `index`, or None if it returns the score."""

    def modified(scores: Tensor) -> Tensor:
        return torch.vmap(lambda score: score_mod(score, index, index, index, index))(scores.to(device))

    with torch.inference_mode(False), torch.enable_grad(), TransformGetItemToIndex():
        try:
            # A huge score is capped to the softcap itself, which is then checked on a grid.
            cap = modified(torch.tensor([1e30], dtype=torch.float64)).detach().double().cpu()
            steps = torch.linspace(-6, 6, 4097, dtype=torch.float64)
            grid = torch.cat([steps * cap.clamp(-1e4, 1e4), steps, 1e-6 * steps, 1e6 * steps])
            out = modified(grid).cpu()
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
        raise _unknown(score_mod, "without a bias, it is neither the score itself nor softcap * tanh(score / softcap)")
    return value


def _unknown(score_mod: object, why: str) -> UnsupportedError:
    return UnsupportedError(
        f"score_mod {_name(score_mod)} is not supported over a ring, which computes softcap * tanh(score / softcap) "
        f"with a number and ALiBi, - slope[head] * abs(query - key): {why}. Put masks into block_mask"
    )


class _ScoreFunction(PairFunction):
    def __init__(self, score_mod: Callable[..., Tensor], device: torch.device) -> None:
        super().__init__(score_mod, device, lambda reason: _unknown(score_mod, f"it {reason}"))


def _slopes(mod: _ScoreFunction, masks: tuple[FoundMask, ...], length: int, heads: int) -> Tensor:
    """Return each head's slope, (heads,) float64: minus the bias between neighbors, or 0 if no token attends to one."""
    slopes: Tensor | None = None
    for row, mask in enumerate(masks):
        first, last = mask.ranges(length, mod.device)
        positions = torch.arange(length, device=mod.device)
        # Key ranges contain the query. So if any query attends to another key, some query attends to a neighbor.
        behind, ahead = (first < positions).nonzero().flatten(), (last > positions + 1).nonzero().flatten()
        if not len(behind) and not len(ahead):
            continue
        q = behind[0] if len(behind) else ahead[0]
        head = torch.arange(heads, device=mod.device)
        q, k = q.expand(heads), (q + (-1 if len(behind) else 1)).expand(heads)
        zeros = torch.zeros(heads, dtype=torch.float64, device=mod.device)
        row_slopes = 0 - mod.on_pairs(zeros, torch.full_like(head, row), head, q, k).double()
        if slopes is not None and not torch.equal(row_slopes, slopes):
            raise _unknown(mod.function, f"row {row} of the batch has other slopes than the rows before it")
        slopes = row_slopes
    return torch.zeros(heads, dtype=torch.float64, device=mod.device) if slopes is None else slopes
