"""Translate a BlockMask of torch's flex_attention into options of `Ring.attention`.

A mask_mod may be any code, so its name proves nothing. A few of its rows are evaluated; they leave one candidate for
the window and the documents. This candidate is then proven: the tables of full and of listed blocks must equal those
of the candidate, and mask_mod must agree with it at all pairs of the blocks that are listed as partial. In the other
blocks torch's kernels do not evaluate mask_mod either.
Guarantees: a mask that is not proven is refused by name, unless the caller passes `trust=True`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from ringattn.adapters.flex_functions import PairFunction, checked_tiles, tiles_of
from ringattn.errors import UnsupportedError

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
    _check_pairs(pairs, partial, length, heads if pairs.reads(1) else 1, candidates, mask.BLOCK_SIZE, trust)
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


def _check_pairs(
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
