"""Masks that the caller of a model gives as a table: `attention_mask` of shape (batch, 1, tokens, tokens).

transformers passes such a mask to every attention unchanged, in place of its own masks and windows. Over a ring, every
rank passes the table of the whole sequence. Each row of the batch is lowered to slices (see `adapters.tables`), once in
a call of the model.

Guarantees: the pairs of the table and no others, or an error by name.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from hashlib import sha256
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from ringattn.adapters.tables import connects, slices_of
from ringattn.adapters.transformers.calls import ModelCall
from ringattn.core.bounded_cache import BoundedCache
from ringattn.errors import InputError, UnsupportedError
from ringattn.masks import Slices
from ringattn.sequence import Sequence

Rows = tuple[tuple[Sequence, tuple[int, ...]], ...]
"""The rows of a batch, grouped by their masks: the sequence of each group, and the indices of its rows."""

_slices: BoundedCache[bytes, Slices] = BoundedCache(lambda digest, mask: mask.rectangles.array.nbytes)
"""The slices of tables, by the digest of the table: recomputation in backward gets the same tables again."""


class TableMask:
    """A table of pairs as a mask, with the part of the interface of `MaskSpec` that attention uses."""

    causal, window, padding = False, None, None

    def __init__(self, table: Tensor, batch: int) -> None:
        self.table, self.batch = table, batch
        self._rows: dict[Sequence, Rows] = {}

    def rows(self, seq: Sequence, check: Callable[[Rows], None]) -> Rows:
        """Group the rows of the batch by their masks. At the first use, pass the result to `check`."""
        if torch._C._current_graph_task_id() != -1:  # recomputation of a forward pass that was checked
            return self._groups(seq)
        if seq not in self._rows:
            with seq.ring.refused_by_all():
                groups = self._groups(seq)
            check(groups)
            self._rows[seq] = groups
        return self._rows[seq]

    def key_ranges(self, module: nn.Module, *_: Any, **others: Any) -> NoReturn:
        """Raise `UnsupportedError`: layers that select or compress keys read masks as a range of keys."""
        raise UnsupportedError(
            f"{type(module).__name__} selects or compresses keys, which over a ring is supported for causal attention "
            "within documents; leave the attention_mask of four dimensions out"
        )

    def positions(self, seq: Sequence) -> tuple[Tensor, Tensor]:
        """Return how many keys each of this rank's tokens attends to before itself, and which tokens attend to any.

        In a tree, and in packed documents, these are the positions of the tokens. Both are (batch or 1, tokens).
        """
        counts = seq.shard(self.table[:, 0].sum(-1))
        return counts - 1, counts > 0

    def _groups(self, seq: Sequence) -> Rows:
        if seq.mask is not None:
            raise UnsupportedError(
                f"seq carries mask={seq.mask.text}, and attention_mask has four dimensions; give only one of them"
            )
        members: dict[Slices, list[int]] = {}
        for row in range(self.batch):
            table = self.table[row % len(self.table), 0]
            digest = sha256(str(tuple(table.shape)).encode() + table.contiguous().cpu().numpy().tobytes()).digest()
            try:
                mask = _slices.get(digest, partial(slices_of, table))
            except UnsupportedError as error:
                raise UnsupportedError(f"attention_mask of row {row}: {error}") from error
            members.setdefault(mask, []).append(row)
        for mask, rows in members.items():
            if seq.documents is not None and connects(mask, seq.bounds):
                raise InputError(
                    f"attention_mask of row {rows[0]} connects documents of the sequence, cut at {seq.documents[:8]}; "
                    "make the sequence without cu_seqlens"
                )
        whole = seq.with_documents(None)
        return tuple((whole.with_mask(mask), tuple(rows)) for mask, rows in members.items())


def table_mask(table: Tensor, batch: int, seq: Sequence, call: ModelCall | None) -> TableMask:
    """Return the mask of a table, the same for all layers that get it in a call of a prepared model.

    Raises `UnsupportedError` for a table that is not one of bools for all pairs of the sequence.
    """
    size = (1, seq.length, seq.length)
    if table.dtype != torch.bool or tuple(table.shape[1:]) != size or len(table) not in (1, batch):
        raise UnsupportedError(
            f"attention_mask of four dimensions has {table.dtype} of shape {tuple(table.shape)}; over a ring, every "
            "rank passes one bool for each pair of the whole sequence, "
            f"(batch or 1, 1, {seq.length}, {seq.length})"
        )
    if call is None:
        return TableMask(table, batch)
    # A change in place gives another version; tensors of inference mode have none.
    key = id(table), 0 if table.is_inference() else table._version
    mask: TableMask = call.tables.setdefault(key, TableMask(table, batch))
    return mask
