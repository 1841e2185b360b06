"""What the mask arguments of a transformers model mean, in terms of a sequence that lies over ranks.

transformers builds masks out of small functions of (batch, head, query, key) indices. Here they are recognized by name,
never evaluated: what comes out is a `MaskSpec` of constant size, whatever the number of tokens.
Guarantees: every function of the host that is not known by name is refused, so that no mask is dropped or guessed.
The names are those of `transformers.masking_utils`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from ringattn.adapters.transformers_versions import chunks_begin_with_documents, mask_functions, query_places
from ringattn.errors import InputError, UnsupportedError
from ringattn.runtime.activation import active_sequence
from ringattn.sequence import Sequence

Rows = tuple[tuple[Sequence, tuple[int, ...]], ...]
"""The rows of a batch by the documents that they are cut into."""


_NO_TABLE = (
    "this model reads its mask as a table by itself, to choose tokens, and here a mask is a few numbers; only models "
    "that hand it to their attention function can attend through a ring: keep its own attn_implementation"
)


class _NoTableError(UnsupportedError, AttributeError):
    """Also what `hasattr` expects."""


@dataclass(frozen=True, eq=False)
class MaskSpec:
    """The mask of some layers in one forward pass; what a model hands from the mask function to the attention function.

    `window`: (left, right) tokens besides the query. `chunk_tokens`: causal attention inside of chunks of so many.
    `padding`: (batch, keys) bool, True for real tokens of this rank, or None where none was given. `unknown`: functions
    of the mask that have no meaning here. `keys`: tokens of K and V, more than `queries` beside a cache.
    `arguments`: what transformers' own mask functions take.
    """

    causal: bool
    window: tuple[int, int] | None
    chunk_tokens: int | None
    padding: Tensor | None
    unknown: tuple[str, ...]
    queries: int
    keys: int
    is_offset: bool
    config: Any
    arguments: Mapping[str, Any]
    _rows: dict[Sequence, Rows] = field(default_factory=dict, repr=False)

    def _is_no_table(self, *_: object) -> Any:
        raise _NoTableError(_NO_TABLE)

    __getitem__ = __len__ = __bool__ = __invert__ = __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = _is_no_table
    __rmul__ = __and__ = __rand__ = __or__ = __ror__ = _is_no_table
    __lt__ = __le__ = __gt__ = __ge__ = __eq__ = __ne__ = _is_no_table
    __hash__ = object.__hash__

    @classmethod
    def __torch_function__(cls, *_: object) -> Any:
        """Of every function of torch that gets one among its arguments, also in a list."""
        raise _NoTableError(_NO_TABLE)

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(name) if name.startswith("__") else _NoTableError(_NO_TABLE)

    def contiguous(self) -> Tensor | None:
        """The table that `generate` hands to a compiled model beside a static cache, where attention is local."""
        if active_sequence() is not None:
            raise _NoTableError(
                "generate() makes the table of a mask for a static cache, which does not lie over ranks; generate from "
                "whole prompts inside `with ring.activate(None):`"
            )
        return self.local(may_be_none=False)

    def rows(self, seq: Sequence, check: Callable[[Rows], None]) -> Rows:
        """Which rows of the batch attend over which documents of `seq`: those of `seq`, padding apart, chunks apart.

        At the first use of this mask a collective call where there is padding, then `check` of what was found. Raises
        `InputError` alike on every rank, as `check` has to.
        """
        if seq not in self._rows:
            self.refuse()
            starts_stops = [None] if self.padding is None else _real_runs(seq, self.padding)
            batch: int = self.arguments["batch_size"]
            by_cuts: dict[tuple[int, ...] | None, list[int]] = {}
            for row, real in enumerate(starts_stops * (batch if self.padding is None else 1)):
                by_cuts.setdefault(self._cuts(seq, real), []).append(row)
            found = tuple((seq.with_documents(cuts), tuple(rows)) for cuts, rows in by_cuts.items())
            check(found)
            self._rows[seq] = found
        return self._rows[seq]

    def refuse(self) -> None:
        """Raise `UnsupportedError` for a mask that ranks cannot share."""
        if self.queries != self.keys or self.is_offset:
            raise UnsupportedError(
                f"{self.queries} queries meet {self.keys} keys: decoding on a cache that lies over ranks is not "
                "supported, nor are a static cache and cross attention; for generate() pass the whole prompt "
                "inside `with ring.activate(None):`"
            )
        if self.unknown:
            raise UnsupportedError(
                f"the mask of this model is made with {', '.join(self.unknown)}, which is neither causal, "
                "bidirectional, a window, chunks nor documents; ring attention has no form for it"
            )

    def _cuts(self, seq: Sequence, real: tuple[int, int] | None) -> tuple[int, ...] | None:
        edges = set(seq.documents or (0, seq.length))
        if real is not None and real[0] < real[1]:
            edges |= {real[0]} if self.causal else set(real)  # causal: real tokens do not see what follows them
        if self.chunk_tokens is not None:
            first = real[0] if real is not None and real[0] < real[1] else 0
            parts = sorted(edges) if chunks_begin_with_documents() else [first, seq.length]
            for start, stop in pairwise(parts):
                edges |= set(range(start, stop, self.chunk_tokens))
        return None if edges <= {0, seq.length} else tuple(sorted(edges))

    def local(self, may_be_none: bool) -> Tensor | None:
        """The mask for attention on this process alone, (batch, 1, queries, keys) bool; transformers' own.

        `may_be_none`: None where the plain causal or the full mask says as much.
        """
        from transformers.masking_utils import sdpa_mask

        skip = {"allow_is_causal_skip", "allow_is_bidirectional_skip"}
        may = {name: may_be_none and bool(self.arguments.get(name)) for name in skip}
        return sdpa_mask(**{**self.arguments, **may})


@torch.compiler.disable
def mask_spec(
    *,
    kv_length: int,
    mask_function: Callable[..., Any],
    attention_mask: Tensor | None = None,
    local_size: int | None = None,
    config: Any = None,
    **others: Any,
) -> MaskSpec:
    """A mask function for transformers' `AttentionMaskInterface`; refuses nothing yet, attention may be local."""
    known, found = _known_functions(), _names(mask_function)
    meanings = {known[name] for name in found if name in known}
    window = chunk = None
    if local_size is not None:
        if "window" in meanings:
            window = (local_size - 1, 0)
        elif "both ways" in meanings:
            window = (local_size, local_size)
        elif "chunks" in meanings:
            chunk = local_size
    queries, offset = query_places(others)
    arguments = {
        "kv_length": kv_length, "mask_function": mask_function, "attention_mask": attention_mask,
        "local_size": local_size, "config": config, **others,
    }  # fmt: skip
    return MaskSpec(
        "causal" in meanings, window, chunk, attention_mask, tuple(sorted(found - set(known))), queries, kv_length,
        isinstance(offset, Tensor) or offset != 0, config, arguments,
    )  # fmt: skip


@cache
def _known_functions() -> Mapping[str, str]:
    """What the host's functions mean, by name."""
    return {_name(function): meaning for function, meaning in mask_functions().items()}


def _name(function: Callable[..., Any]) -> str:
    return f"{function.__module__}.{getattr(function, '__qualname__', type(function).__name__)}"


def _names(function: Callable[..., Any]) -> set[str]:
    """The functions that a mask function is made of, itself included."""
    found = {_name(function)}
    for cell in getattr(function, "__closure__", None) or ():
        held = cell.cell_contents
        for one in held if isinstance(held, tuple) else (held,):
            if callable(one):
                found |= _names(one)
    return found


def _real_runs(seq: Sequence, padding: Tensor) -> list[tuple[int, int] | None]:
    """Where the real tokens of each row start and stop, of all ranks."""
    full = seq.gather(padding.to(torch.uint8), dim=1).bool()
    counts, starts = full.sum(1), full.to(torch.uint8).argmax(1)
    places = torch.arange(seq.length, device=full.device)
    runs = (places >= starts[:, None]) & (places < (starts + counts)[:, None])
    for row in (full != runs).any(1).nonzero().flatten().tolist():
        raise InputError(
            f"attention_mask of row {row} has holes: {int(counts[row])} real tokens that are not one run; ring "
            "attention takes padding before and after a row's tokens. Pack several texts as documents, "
            "ring.sequence(cu_seqlens=...)"
        )
    return list(zip(starts.tolist(), (starts + counts).tolist(), strict=True))
