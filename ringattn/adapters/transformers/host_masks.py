"""The mask function that transformers calls.

transformers builds masks from small functions of (batch, head, query, key) indices. `mask_spec` recognises these
functions by name and never evaluates them. The result is a `MaskSpec` of constant size, whatever the number of tokens.
Everything that differs between the supported versions of transformers is in the first section.

Guarantees: a mask function with an unknown name is refused, so that no mask is dropped or guessed. Every refusal says
what to do instead.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ringattn import masks
from ringattn.adapters.context import sequence_of
from ringattn.adapters.host_versions import ABSENT, Host
from ringattn.adapters.transformers.calls import current_call
from ringattn.adapters.transformers.inputs import refuse_inputs
from ringattn.adapters.transformers.selecting import selects_blocks, selects_keys
from ringattn.adapters.transformers.table_masks import Rows
from ringattn.errors import InputError, UnsupportedError
from ringattn.runtime.activation import active_sequence
from ringattn.sequence import Sequence

# --- Versions of transformers -----------------------------------------------------------------------------------------
# Code outside this section uses no version number, and only names that all these versions have.

_MASKS, _LOSSES = "transformers.masking_utils", "transformers.loss.loss_utils"
HOST = Host(
    "transformers",
    ("4.57", "5.0", "5.1", "5.2", "5.3", "5.4", "5.5", "5.6", "5.7", "5.8", "5.9", "5.10", "5.11", "5.12", "5.13",
     "5.14", "5.15", "5.16", "5.17", "5.18", "5.19", "5.20", "5.21", "5.22", "5.23", "5.24"),
    # `mask_spec` takes the meaning of a mask from the names of these functions, and never calls them.
    sources={
        f"{_MASKS}:causal_mask_function": ("71bbca9c",),
        f"{_MASKS}:bidirectional_mask_function": (ABSENT, "9d0131f1"),
        f"{_MASKS}:sliding_window_overlay": ("6cc6cc7f",),
        f"{_MASKS}:sliding_window_bidirectional_overlay": (ABSENT, "a5fa0edb"),
        f"{_MASKS}:chunked_overlay": ("5496dffb",),
        f"{_MASKS}:packed_sequence_mask_function": ("d61c7974",),
        f"{_MASKS}:remap_positions_for_packed_sequence": (ABSENT, "bf77d094"),
        f"{_MASKS}:and_masks": ("64b58f77",),
        # A rank's loss is a part of the sum, because these divide by `num_items_in_batch` and take shifted labels.
        f"{_LOSSES}:ForCausalLMLoss": ("b9e62288", "2d4495d9"),
        f"{_LOSSES}:ForMaskedLMLoss": ("435dea7e", "10dc8b92"),
        f"{_LOSSES}:ForTokenClassification": ("141deebe",),
        f"{_LOSSES}:fixed_cross_entropy": ("e2fa8f5c", "01b72230"),
    },
)  # fmt: skip
"""docs/host-versions.md shows what was tested with each version."""


BLOCKS = Host(
    "transformers",
    ("5.18", "5.23", "5.24"),
    "masks of image blocks",
    sources={
        f"{_MASKS}:or_masks": ("4c4ed2eb",),
        f"{_MASKS}:blockwise_overlay": ("c108367d",),
        "transformers.models.gemma3.modeling_gemma3:get_block_sequence_ids_for_mask": ("d5e347b9",),
    },
)
"""Needed by models in which the tokens of an image attend to each other in both directions."""

WITH_BLOCKS = ("gemma3_text",)
"""The text models, by `config.model_type`, in which each run of image tokens is such a block."""

_REFERENCE = "transformers.models.unlimited_ocr.modeling_unlimited_ocr:create_reference_sliding_window_causal_mask"
REFERENCE = Host(
    "transformers",
    ("5.23", "5.24"),
    "mask of Unlimited-OCR",
    sources={f"{_MASKS}:or_masks": ("4c4ed2eb",), _REFERENCE: ("9b23506f", "9abc296d")},
)
"""Needed by models in which tokens attend to the whole prompt, and to a window of generated tokens."""


def causal_without_reference(function: Callable[..., Any]) -> Callable[..., Any] | None:
    """Return the causal part of the mask function "in a causal window, or causal and in the prompt".

    None: it is another mask function, or not all tokens are in the prompt, because a cache has some of them.
    """
    from transformers import masking_utils as host

    parts = _parts(function)
    if not hasattr(host, "or_masks") or _name(function) != _name(host.or_masks()) or len(parts) != 2:
        return None
    window, prompt = parts
    inner = _parts(prompt)
    overlay = f"{_REFERENCE.replace(':', '.')}.<locals>.prefill_overlay"
    if [_name(prompt), *map(_name, inner)] != [_name(host.and_masks()), _name(host.causal_mask_function), overlay]:
        return None
    is_whole = inspect.getclosurevars(inner[1]).nonlocals["prefill_length"] == math.inf
    return inner[0] if is_whole and _is_causal(window, "window") else None


def split_blocks(function: Callable[..., Any]) -> tuple[Callable[..., Any], Tensor] | None:
    """Return the two parts of the mask function "this mask, or in the same block": the mask and the blocks.

    Blocks are a number for each token, (rows, tokens), negative outside of blocks. None: it is another mask function.
    """
    from transformers import masking_utils as host

    if not hasattr(host, "blockwise_overlay") or _name(function) != _name(host.or_masks()):
        return None
    parts = _parts(function)
    overlay: Any = host.blockwise_overlay
    if len(parts) != 2 or _name(parts[1]) != _name(overlay(None)):
        return None
    return parts[0], _contents(parts[1])[0]


def query_range(arguments: Mapping[str, Any]) -> tuple[int, int | Tensor]:
    """Return the number of queries that a mask is made for, and the position of the first one.

    transformers 4.57 passes the positions of all queries instead of these two numbers.
    """
    positions = arguments.get("cache_position")
    if positions is None:
        return arguments["q_length"], arguments.get("q_offset", 0)
    return len(positions), int(positions[0])


def mask_functions() -> Mapping[Callable[..., Any], str]:
    """Return the functions that masks are built from, and the meaning of each. Documents are those of the sequence."""
    from transformers import masking_utils as host

    nothing: Any = None
    meanings = {
        host.causal_mask_function: "causal",
        host.sliding_window_overlay(nothing): "window",
        host.chunked_overlay(nothing, nothing): "chunks",
        host.packed_sequence_mask_function(nothing): "documents",
        host.and_masks(): "and",
    }
    # 4.57 lacks these: its encoders make their masks themselves.
    if hasattr(host, "bidirectional_mask_function"):
        meanings[host.bidirectional_mask_function] = "full"
    if hasattr(host, "sliding_window_bidirectional_overlay"):
        meanings[host.sliding_window_bidirectional_overlay(nothing)] = "both ways"
    if chunks_begin_with_documents():
        meanings[host.remap_positions_for_packed_sequence(nothing, nothing)] = "documents"
    return meanings


def chunks_begin_with_documents() -> bool:
    """Return whether chunks start at each packed document. Before transformers 5.23, they start at the row."""
    from transformers import masking_utils as host

    return hasattr(host, "remap_positions_for_packed_sequence")


# --- Masks ------------------------------------------------------------------------------------------------------------

_NO_TABLE = (
    "this model reads its mask as a table of tokens, but over a ring a mask is a few numbers; only models that just "
    "pass the mask to their attention function can attend through a ring: keep this model's attn_implementation"
)


class _NoTableError(UnsupportedError, AttributeError):
    """The model has used the mask as a table. This is also an AttributeError, because `hasattr` expects one."""


@dataclass(frozen=True, eq=False)
class MaskSpec:
    """The mask of some layers in one forward pass. Models pass it from the mask function to the attention function.

    `window`: tokens left and right of the query. `chunk_tokens`: the length of chunks with causal attention inside.
    `padding`: (batch, keys) bool, True for this rank's real tokens, or None. `blocks`: (batch, keys) bool, True for
    this rank's tokens of blocks that attend in both directions, or None. `unknown`: functions in the mask whose meaning
    is unknown. `hosts`: the reviewed code of the mask. `keys`: tokens of K and V, more than `queries` with a cache.
    `arguments`: the arguments of transformers' mask functions.
    """

    causal: bool
    window: tuple[int, int] | None
    chunk_tokens: int | None
    padding: Tensor | None
    blocks: Tensor | None
    unknown: tuple[str, ...]
    hosts: tuple[Host, ...]
    queries: int
    keys: int
    is_offset: bool
    config: Any
    arguments: Mapping[str, Any]
    _rows: dict[Sequence, Rows] = field(default_factory=dict, repr=False)

    # A model that indexes, combines or compares the mask needs a table. Every such operator raises with the reason.
    def _refuse_table(self, *_: object) -> Any:
        raise _NoTableError(_NO_TABLE)

    def __getitem__(self, index: object) -> Any:
        """Return the mask itself to models that select keys, whose replaced indexers accept it. Others: raise."""
        return self if selects_keys(self.config) else self._refuse_table()

    __len__ = __bool__ = __invert__ = __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = _refuse_table
    __rmul__ = __and__ = __rand__ = __or__ = __ror__ = _refuse_table
    __lt__ = __le__ = __gt__ = __ge__ = __eq__ = __ne__ = _refuse_table
    __hash__ = object.__hash__

    @classmethod
    def __torch_function__(cls, *_: object) -> Any:
        """Raise for every torch function that gets a mask among its arguments, also in a list."""
        raise _NoTableError(_NO_TABLE)

    def __getattr__(self, name: str) -> Any:
        if name == "dtype" and selects_keys(self.config):
            raise _NoTableError("this model selects keys: call ringattn.adapters.transformers.prepare(model) once")
        raise AttributeError(name) if name.startswith("__") else _NoTableError(_NO_TABLE)

    def contiguous(self) -> Tensor | None:
        """Return the table that `generate` passes to a compiled model with a static cache. Local attention only."""
        if active_sequence() is not None:
            raise _NoTableError(
                "generate() makes a mask table for a static cache, which cannot be sharded over ranks; generate from "
                "whole prompts inside `with ring.activate(None):`"
            )
        return self.local(may_be_none=False)

    def rows(self, seq: Sequence, check: Callable[[Rows], None]) -> Rows:
        """Group the rows of the batch by their documents: those of `seq`, further cut at padding and at chunks.

        The sequence of a group also has the mask of its blocks. At the first use of this mask, the result is passed to
        `check`. If there is padding or there are blocks, this first use is a collective call. Raises `InputError` on
        every rank; `check` must do the same.
        """
        if seq not in self._rows:
            self.refuse()
            batch: int = self.arguments["batch_size"]
            real_ranges: list[tuple[int, int] | None] = [None] * batch
            if self.padding is not None:
                real_ranges = [*_real_ranges(seq, self.padding)]
            block_masks: list[masks.BidirectionalBlocks | None] = [None] * batch
            if self.blocks is not None:
                block_masks = _block_masks(seq, self.blocks, real_ranges)
            by_mask: dict[tuple[tuple[int, ...] | None, masks.BidirectionalBlocks | None], list[int]] = {}
            for row, (real, blocks) in enumerate(zip(real_ranges, block_masks, strict=True)):
                by_mask.setdefault((self._cuts(seq, real), blocks), []).append(row)
            groups = tuple(
                (seq.with_documents(cuts).with_mask(blocks or seq.mask), tuple(rows))
                for (cuts, blocks), rows in by_mask.items()
            )
            check(groups)
            self._rows[seq] = groups
        return self._rows[seq]

    def rows_of_encoder(self, seq: Sequence, encoder: Sequence) -> Rows:
        """Group the rows of the batch by the padding of the encoder, for attention from `seq` to it.

        A collective call at the first use of this mask, if there is padding.
        """
        if seq not in self._rows:
            self._refuse_unknown()
            by_range: dict[tuple[int, int], list[int]] = {}
            whole = [(0, encoder.length)] * self.arguments["batch_size"]
            for row, real in enumerate(whole if self.padding is None else _real_ranges(encoder, self.padding)):
                if real[0] == real[1]:
                    raise InputError(f"attention_mask of row {row} has no token, so the decoder attends to nothing")
                by_range.setdefault(real, []).append(row)
            # Documents pair by index. All tokens of the decoder are in the second, whose keys are the real tokens.
            self._rows[seq] = tuple(
                (
                    seq.with_documents([0, 0, seq.length, seq.length]).with_encoder(
                        encoder.with_documents([0, start, stop, encoder.length])
                    ),
                    tuple(rows),
                )
                for (start, stop), rows in by_range.items()
            )
        return self._rows[seq]

    def key_ranges(
        self, module: nn.Module, ids: Tensor | None, may_have_window: bool = False
    ) -> tuple[Sequence, Tensor, Tensor] | None:
        """Return the sequence, and the first and the last key of each query as numbers of all tokens, (batch, tokens).

        None: attention is local. `module`: the indexer that asks. `ids`: its position_ids. For masks that are causal
        within documents and nothing else; otherwise this raises `UnsupportedError` on every rank. `may_have_window`:
        the mask may have a window, which the result does not contain.
        """
        if (seq := sequence_of()) is None:
            return None
        has_other_window = self.window is not None and not may_have_window
        if not self.causal or has_other_window or self.blocks is not None or seq.mask is not None:
            with seq.ring.refused_by_all():
                raise UnsupportedError(
                    f"{type(module).__name__} selects keys, which over a ring is supported for causal attention within "
                    "documents; leave windows, masks of the sequence and blocks out"
                )
        call = current_call()
        arguments = {} if call is None else dict(call.arguments)
        ids = arguments.get("position_ids") if ids is None else ids
        rows = self.rows(seq, lambda groups: refuse_inputs(self, groups, seq, module, ids, arguments, call))
        last = seq.positions()
        first = last.new_empty(sum(len(members) for _, members in rows), len(last))
        for group_seq, members in rows:
            first[list(members)] = last - group_seq.positions(per_document=True)
        return seq, first, last.expand_as(first)

    def refuse(self) -> None:
        """Raise `UnsupportedError` for a mask that ranks cannot share."""
        if self.queries != self.keys or self.is_offset:
            raise UnsupportedError(
                f"{self.queries} queries and {self.keys} keys: decoding with a cache that is sharded over ranks is not "
                "supported, nor are a static cache and cross attention; for generate() pass the whole prompt "
                "inside `with ring.activate(None):`"
            )
        self._refuse_unknown()

    def _refuse_unknown(self) -> None:
        if self.unknown:
            raise UnsupportedError(
                f"the mask of this model is made with {', '.join(self.unknown)}, which is neither causal, "
                "bidirectional, a window, chunks nor documents; ring attention has no form for it"
            )
        for host in self.hosts:
            host.require()

    def _cuts(self, seq: Sequence, real: tuple[int, int] | None) -> tuple[int, ...] | None:
        """Return the document boundaries of one row, whose real tokens are the range `real`. None: one document.

        Padding and chunks become separate documents, because a ring keeps documents apart without any mask tensor.
        """
        edges = set(seq.documents or (0, seq.length))
        if real is not None and real[0] < real[1]:
            edges |= {real[0]} if self.causal else set(real)  # causal: real tokens never attend to later padding
        if self.chunk_tokens is not None:
            first = real[0] if real is not None and real[0] < real[1] else 0
            parts = sorted(edges) if chunks_begin_with_documents() else [first, seq.length]
            # Attention of a chunk is causal and stays inside the chunk, so a chunk is like a document.
            for start, stop in pairwise(parts):
                edges |= set(range(start, stop, self.chunk_tokens))
        return None if edges <= {0, seq.length} else tuple(sorted(edges))

    def local(self, may_be_none: bool) -> Tensor | None:
        """Return transformers' mask for local attention, (batch, 1, queries, keys) bool.

        `may_be_none`: return None if the plain causal or the full mask is equivalent.
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
) -> MaskSpec | Tensor | None:
    """Return the `MaskSpec` of a mask, or a table for local attention with a static cache.

    This is the mask function for transformers' `AttentionMaskInterface`. It refuses no mask, because attention may be
    local.
    """
    if selects_blocks(config):
        _refuse_unprepared()
    composition = _Composition(mask_function, getattr(config, "model_type", None) in WITH_BLOCKS)
    meanings = composition.meanings
    # transformers passes the size of windows and chunks apart from the functions, but not for a mask that a model
    # composes itself. A causal window includes the query.
    window = chunk = None
    if (size := local_size or min(composition.sizes, default=None)) is not None:
        if "window" in meanings:
            window = (size - 1, 0)
        elif "both ways" in meanings:
            window = (size, size)
        elif "chunks" in meanings:
            chunk = size
    queries, offset = query_range(others)
    arguments = {
        "kv_length": kv_length, "mask_function": mask_function, "attention_mask": attention_mask,
        "local_size": local_size, "config": config, **others,
    }  # fmt: skip
    spec = MaskSpec(
        "causal" in meanings, window, chunk, attention_mask, composition.blocks[0] >= 0 if composition.blocks else None,
        tuple(sorted(composition.names - set(_known_functions()))), tuple(composition.hosts), queries, kv_length,
        isinstance(offset, Tensor) or offset != 0, config, arguments,
    )  # fmt: skip
    # A static cache has room for more keys than the tokens so far, or its offset is a tensor. From 5.24 on, `generate`
    # makes the mask of such a cache before it calls the model. The model reads the dimensions of the mask, which only a
    # table has.
    has_room = isinstance(offset, Tensor) or queries + offset != kv_length
    return spec.local(may_be_none=False) if has_room and active_sequence() is None else spec


def _refuse_unprepared() -> None:
    """Raise `UnsupportedError` on every rank if the running model was not prepared, before an indexer runs.

    The indexer of an unprepared model would read blocks that this rank does not have.
    """
    seq, is_recomputing = active_sequence(), torch._C._current_graph_task_id() != -1
    if seq is None or seq.ring.world_size == 1 or is_recomputing or current_call() is not None:
        return
    with seq.ring.refused_by_all():
        raise UnsupportedError(
            "this model selects blocks of keys: call ringattn.adapters.transformers.prepare(model) once, and then call "
            "that model, not a part of it"
        )


@cache
def _known_functions() -> Mapping[str, str]:
    """Return the meanings of transformers' mask functions by name."""
    return {_name(function): meaning for function, meaning in mask_functions().items()}


def _name(function: Callable[..., Any]) -> str:
    return f"{function.__module__}.{getattr(function, '__qualname__', type(function).__name__)}"


class _Composition:
    """The functions that a mask function is composed of.

    `names`: their names. `sizes`: the numbers in windows and chunks. `blocks`: the blocks that are added to a causal
    mask, see `split_blocks`. Functions that add blocks have no name here, and those that add a prompt neither. Other
    unions of masks have one, so that they are refused: for example, the blocks of a window have pairs that are farther
    apart than the window. `hosts`: the reviewed code of the functions that have no name here.
    """

    def __init__(self, function: Callable[..., Any], may_have_blocks: bool) -> None:
        self.may_have_blocks = may_have_blocks
        self.names: set[str] = set()
        self.sizes: list[int] = []
        self.blocks: list[Tensor] = []
        self.hosts: list[Host] = []
        self._add(function)

    @property
    def meanings(self) -> set[str]:
        """The meanings of all functions that have one."""
        return {meaning for name, meaning in _known_functions().items() if name in self.names}

    def _add(self, function: Callable[..., Any]) -> None:
        if self.may_have_blocks and (split := split_blocks(function)) is not None and _is_causal(split[0]):
            self.blocks.append(split[1])
            self.hosts.append(BLOCKS)
            self._add(split[0])
            return
        if (causal := causal_without_reference(function)) is not None:
            self.hosts.append(REFERENCE)
            self._add(causal)
            return
        self.names.add(_name(function))
        if _known_functions().get(_name(function)) in ("window", "both ways", "chunks"):
            self.sizes += [x for x in _contents(function) if isinstance(x, int)]
        for part in _parts(function):
            self._add(part)


def _is_causal(function: Callable[..., Any], *others: str) -> bool:
    """Return whether a mask function is causal, perhaps in documents, without a window, chunks or blocks.

    `others`: meanings that it may have as well.
    """
    composition = _Composition(function, may_have_blocks=False)
    may_have = {"causal", "documents", "and", *others}
    return composition.names <= set(_known_functions()) and {"causal"} <= composition.meanings <= may_have


def _contents(function: Callable[..., Any]) -> list[Any]:
    """Return the values in a function's closure."""
    return [cell.cell_contents for cell in getattr(function, "__closure__", None) or ()]


def _parts(function: Callable[..., Any]) -> list[Callable[..., Any]]:
    """Return the functions that a mask function is directly composed of, which are in its closure."""
    return [part for x in _contents(function) for part in (x if isinstance(x, tuple) else (x,)) if callable(part)]


def _block_masks(
    seq: Sequence, blocks: Tensor, real_ranges: list[tuple[int, int] | None]
) -> list[masks.BidirectionalBlocks | None]:
    """Return the mask of each row's blocks, over all ranks: the runs of True in `blocks`. None: the row has no block.

    Raises UnsupportedError for packed documents, and for a sequence that has a mask.
    """
    with seq.ring.refused_by_all():
        if seq.documents is not None:
            raise UnsupportedError(
                "documents packed into a row with images that attend in both directions: in layers with a window, "
                "transformers looks for the images at the wrong tokens; give each document its own row"
            )
        if seq.mask is not None:
            raise UnsupportedError(f"the model attends in both directions in images, and seq has mask={seq.mask.text}")
    full = seq.gather(blocks.to(torch.uint8), dim=1)
    block_masks: list[masks.BidirectionalBlocks | None] = []
    for row, real in zip(full, real_ranges, strict=True):
        # Real tokens do not attend to padding, so a block ends there. An empty block has no effect.
        edges = F.pad(row.long(), (1, 1)).diff().nonzero().flatten().clamp(*(real or (0, seq.length))).tolist()
        block_masks.append(masks.BidirectionalBlocks(tuple(edges)) if edges[::2] != edges[1::2] else None)
    return block_masks


def _real_ranges(seq: Sequence, padding: Tensor) -> list[tuple[int, int]]:
    """Return the range of real tokens of each row, over all ranks. Raises InputError for padding between them."""
    full = seq.gather(padding.to(torch.uint8), dim=1).bool()
    # `argmax` is the first real token of a row, and 0 in a row of padding, where the count is 0 too.
    counts, starts = full.sum(1), full.to(torch.uint8).argmax(1)
    positions = torch.arange(seq.length, device=full.device)
    ranges = (positions >= starts[:, None]) & (positions < (starts + counts)[:, None])
    for row in (full != ranges).any(1).nonzero().flatten().tolist():
        raise InputError(
            f"attention_mask of row {row} has holes: its {int(counts[row])} real tokens are not contiguous; ring "
            "attention allows padding before and after a row's tokens. Pack several texts as documents, "
            "ring.sequence(cu_seqlens=...)"
        )
    return list(zip(starts.tolist(), (starts + counts).tolist(), strict=True))
