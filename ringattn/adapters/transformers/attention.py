"""The attention function and the mask function that transformers calls, with the checks of their arguments.

transformers builds masks from small functions of (batch, head, query, key) indices. `mask_spec` recognises these
functions by name and never evaluates them. The result is a `MaskSpec` of constant size, whatever the number of tokens.
Everything that differs between the supported versions of transformers is in the first section.

Guarantees: a mask function with an unknown name is refused, so that no mask is dropped or guessed. Every refusal says
what to do instead.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from itertools import pairwise
from typing import Any, cast

import torch
from torch import Tensor, nn

from ringattn.adapters.attend import as_autocast, attend
from ringattn.adapters.context import sequence_of
from ringattn.adapters.dropout import drawn_seed, refuse_without_seed, seed_from
from ringattn.adapters.host_versions import ABSENT, Host
from ringattn.adapters.hosts import local_sinks
from ringattn.adapters.transformers.calls import PART, ModelCall, attending_call
from ringattn.adapters.transformers.checks import (
    check_encoder,
    check_tokens,
    depends_on_length,
    may_compute_positions,
    refuse_layers,
    short,
    takes_positions,
)
from ringattn.errors import InputError, UnsupportedError
from ringattn.runtime.activation import activate, active_sequence, attended
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

Rows = tuple[tuple[Sequence, tuple[int, ...]], ...]
"""The rows of a batch, grouped by their documents: the sequence of each group, and the indices of its rows."""


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
    `padding`: (batch, keys) bool, True for this rank's real tokens, or None. `unknown`: functions in the mask whose
    meaning is unknown. `keys`: tokens of K and V, more than `queries` with a cache. `arguments`: the arguments of
    transformers' mask functions.
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

    # A model that indexes, combines or compares the mask needs a table. Every such operator raises with the reason.
    def _refuse_table(self, *_: object) -> Any:
        raise _NoTableError(_NO_TABLE)

    __getitem__ = __len__ = __bool__ = __invert__ = __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = _refuse_table
    __rmul__ = __and__ = __rand__ = __or__ = __ror__ = _refuse_table
    __lt__ = __le__ = __gt__ = __ge__ = __eq__ = __ne__ = _refuse_table
    __hash__ = object.__hash__

    @classmethod
    def __torch_function__(cls, *_: object) -> Any:
        """Raise for every torch function that gets a mask among its arguments, also in a list."""
        raise _NoTableError(_NO_TABLE)

    def __getattr__(self, name: str) -> Any:
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

        At the first use of this mask, the result is passed to `check`. If there is padding, this first use is a
        collective call. Raises `InputError` on every rank; `check` must do the same.
        """
        if seq not in self._rows:
            self.refuse()
            real_ranges = [None] if self.padding is None else _real_ranges(seq, self.padding)
            batch: int = self.arguments["batch_size"]
            by_cuts: dict[tuple[int, ...] | None, list[int]] = {}
            for row, real in enumerate(real_ranges * (batch if self.padding is None else 1)):
                by_cuts.setdefault(self._cuts(seq, real), []).append(row)
            groups = tuple((seq.with_documents(cuts), tuple(rows)) for cuts, rows in by_cuts.items())
            check(groups)
            self._rows[seq] = groups
        return self._rows[seq]

    def refuse(self) -> None:
        """Raise `UnsupportedError` for a mask that ranks cannot share."""
        if self.queries != self.keys or self.is_offset:
            raise UnsupportedError(
                f"{self.queries} queries and {self.keys} keys: decoding with a cache that is sharded over ranks is not "
                "supported, nor are a static cache and cross attention; for generate() pass the whole prompt "
                "inside `with ring.activate(None):`"
            )
        if self.unknown:
            raise UnsupportedError(
                f"the mask of this model is made with {', '.join(self.unknown)}, which is neither causal, "
                "bidirectional, a window, chunks nor documents; ring attention has no form for it"
            )

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

    This is the mask function for transformers' `AttentionMaskInterface`. It refuses nothing, because attention may be
    local.
    """
    known, names = _known_functions(), _names(mask_function)
    meanings = {known[name] for name in names if name in known}
    # transformers passes the size of windows and chunks apart from the functions. A causal window includes the query.
    window = chunk = None
    if local_size is not None:
        if "window" in meanings:
            window = (local_size - 1, 0)
        elif "both ways" in meanings:
            window = (local_size, local_size)
        elif "chunks" in meanings:
            chunk = local_size
    queries, offset = query_range(others)
    arguments = {
        "kv_length": kv_length, "mask_function": mask_function, "attention_mask": attention_mask,
        "local_size": local_size, "config": config, **others,
    }  # fmt: skip
    spec = MaskSpec(
        "causal" in meanings, window, chunk, attention_mask, tuple(sorted(names - set(known))), queries, kv_length,
        isinstance(offset, Tensor) or offset != 0, config, arguments,
    )  # fmt: skip
    # A static cache has room for more keys than the tokens so far, or its offset is a tensor. From 5.24 on, `generate`
    # makes the mask of such a cache before it calls the model. The model reads the dimensions of the mask, which only a
    # table has.
    has_room = isinstance(offset, Tensor) or queries + offset != kv_length
    return spec.local(may_be_none=False) if has_room and active_sequence() is None else spec


@cache
def _known_functions() -> Mapping[str, str]:
    """Return the meanings of transformers' mask functions by name."""
    return {_name(function): meaning for function, meaning in mask_functions().items()}


def _name(function: Callable[..., Any]) -> str:
    return f"{function.__module__}.{getattr(function, '__qualname__', type(function).__name__)}"


def _names(function: Callable[..., Any]) -> set[str]:
    """Return the names of a mask function and of the functions that it is composed of."""
    names = {_name(function)}
    # transformers composes masks by closures (`and_masks` and others), so the parts are in the closure's cells.
    for cell in getattr(function, "__closure__", None) or ():
        content = cell.cell_contents
        for part in content if isinstance(content, tuple) else (content,):
            if callable(part):
                names |= _names(part)
    return names


def _real_ranges(seq: Sequence, padding: Tensor) -> list[tuple[int, int] | None]:
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


# --- The attention function -------------------------------------------------------------------------------------------


@torch.compiler.disable
def attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: MaskSpec | Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Compute attention over the active sequence, or locally: the function for transformers' `AttentionInterface`.

    Args:
        module: The attention module of the model.
        query: This rank's shard of the active sequence.
        key: Like query.
        value: Like query.
        attention_mask: The result of `mask_spec`, or for local attention a mask tensor.
        dropout: Probability of dropping each weight. Over a ring, the seed is derived from the activation's seed.
        scaling: Factor of the scores. None: 1 / sqrt(d_k).
        kwargs: Other arguments from transformers: softcap, s_aux, position_ids and others.

    Shape:
        query: (batch, q_heads, tokens, d_k)
        key: (batch, kv_heads, tokens, d_k)
        value: (batch, kv_heads, tokens, d_v)

    Returns:
        (batch, tokens, q_heads, d_v) in query's dtype, or autocast's where that is on, and None for the weights.

    Raises:
        InputError: A mask, an option or the number of tokens is refused, on every rank; or nothing is active while a
            ring of several ranks is open.
    """
    if is_tower(module, query, attention_mask):
        # Local on purpose: without this, the activation would report that nothing attended over the ring.
        attended()
        with activate(None):
            return _attend_locally(module, query, key, value, attention_mask, dropout, scaling, kwargs), None
    active = active_sequence()
    if active is not None and isinstance(attention_mask, MaskSpec):
        with active.ring.refused_by_all():
            attention_mask.refuse()  # first: for a decoding step, the check of token counts would give a wrong reason
    seq = sequence_of()
    if seq is None:
        return _attend_locally(module, query, key, value, attention_mask, dropout, scaling, kwargs), None
    with seq.ring.refused_by_all():
        spec = check_mask(module, attention_mask)
        refuse_options(module, dropout, kwargs)
        check_tokens(seq, query.shape[2])
        if is_cross_attention(module):
            check_encoder(seq, spec.padding)
        seed = drawn_seed(seq.ring) if dropout else None
    call = attending_call()
    # transformers has heads before tokens; a ring has tokens first.
    q, k, v = (as_autocast(x).transpose(1, 2) for x in (query, key, value))
    sinks = kwargs.get("s_aux")
    options = {"causal": spec.causal, "window": spec.window, "scale": scaling, "softcap": kwargs.get("softcap"),
               "sinks": None if sinks is None else local_sinks(sinks, q.shape[2]).to(q.dtype),
               "dropout_p": dropout}  # fmt: skip
    ids = kwargs.get("position_ids")  # some models pass None to attention
    if ids is None and call is not None:
        ids = call.arguments.get("position_ids")
    # The inputs are checked once for each mask, which all layers of one kind share.
    rows = spec.rows(seq, lambda groups: refuse_inputs(spec, groups, seq, module, ids, kwargs, call))
    return _by_rows(rows, q, k, v, seed, options).contiguous(), None


def _by_rows(rows: Rows, q: Tensor, k: Tensor, v: Tensor, seed: int | None, options: dict[str, Any]) -> Tensor:
    """Attend to each group of rows with equal documents in turn, and put the rows back in order.

    `seed`: the dropout seed. Each group gets a seed derived from it, because its rows are numbered from 0 again.
    """
    if len(rows) == 1:
        return attend(rows[0][0], q, k, v, dropout_seed=seed, **options)
    seeds = [None if seed is None else seed_from(seed, part) for part in range(len(rows))]
    parts = [attend(group_seq, *(x[list(members)] for x in (q, k, v)), dropout_seed=group_seed, **options)
             for (group_seq, members), group_seed in zip(rows, seeds, strict=True)]  # fmt: skip
    # `order` maps rows of the result to rows of the batch; its argsort is the inverse.
    order = torch.tensor([row for _, members in rows for row in members], device=q.device)
    return torch.cat(parts)[order.argsort()]


def _attend_locally(
    module: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: object, dropout: float, scaling: float | None,
    kwargs: dict[str, Any],
) -> Tensor:  # fmt: skip
    """Return local attention, (batch, tokens, heads, dim): by `sdpa`, or written out for softcap and sinks."""
    from transformers import AttentionInterface

    softcap, sinks = kwargs.get("softcap"), kwargs.get("s_aux")
    plain = softcap is None and sinks is None
    if isinstance(mask, MaskSpec):
        is_causal = mask.causal
        mask = mask.local(may_be_none=plain)
        # Some versions pass is_causal to torch unchanged. torch allows no mask with it, and gives a single query after
        # a cache the first key only. So set it only where it is right.
        kwargs = {**kwargs, "is_causal": is_causal and mask is None and q.shape[2] > 1}
    if plain:
        sdpa = cast(Any, AttentionInterface()["sdpa"])
        return sdpa(module, q, k, v, mask, dropout=dropout, scaling=scaling, **kwargs)[0]
    sinks = None if sinks is None else local_sinks(sinks, q.shape[1])
    # Written out like transformers' eager attention: grouped heads repeated, softcap, mask, sinks as one more column.
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    scores = q @ k.mT * (q.shape[-1] ** -0.5 if scaling is None else scaling)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if isinstance(mask, Tensor):
        mask = mask[..., : k.shape[2]]
        least = torch.finfo(scores.dtype).min
        scores = scores.masked_fill(~mask, least) if mask.dtype == torch.bool else scores + mask
    if sinks is not None:
        scores = torch.cat([scores, sinks.to(scores.dtype)[None, :, None, None].expand(*scores.shape[:3], 1)], -1)
    # The column of the sinks has taken its weight in the softmax, and has no value to add.
    weights = nn.functional.dropout(scores.softmax(-1), dropout)[..., : k.shape[2]]
    return (weights @ v).transpose(1, 2).contiguous()


# --- Parts of a model: text and towers --------------------------------------------------------------------------------


def is_tower(module: nn.Module, query: Tensor, mask: object) -> bool:
    """Return whether an attention module belongs to a tower (images, sound), whose whole input every rank has.

    `prepare` marks the modules of a model. An unmarked module is a tower if it looks like one and its number of tokens
    differs from this rank's shard. Raises `InputError` on all ranks if it looks like one and the numbers are equal.
    """
    if (part := getattr(module, PART, None)) is not None:
        return bool(part == "tower")
    if not _looks_like_tower(module, mask):
        return False
    if torch._C._current_graph_task_id() != -1:  # recomputation of a forward pass that was checked
        return True
    seq = active_sequence()
    if seq is None:
        return False  # `sequence_of` decides whether attention may be local
    if seq.ring.world_size > 1 and query.shape[2] == seq.counts[seq.ring.rank]:
        with seq.ring.refused_by_all():
            raise InputError(
                f"rank {seq.ring.rank}: {type(module).__name__} may be a tower with a whole image, or text with this "
                f"rank's {query.shape[2]} tokens: call ringattn.adapters.transformers.prepare(model) once, which "
                "distinguishes them, or call a tower inside `with ring.activate(None):`"
            )
    return True


def _looks_like_tower(module: nn.Module, mask: object) -> bool:
    # The towers of transformers attend in both directions.
    if getattr(module, "is_causal", False) or (isinstance(mask, MaskSpec) and mask.causal):
        return False
    config: Any = getattr(module, "config", None)
    kind = str(getattr(config, "model_type", ""))
    has_input_size = any(hasattr(config, name) for name in ("patch_size", "image_size", "num_mel_bins"))
    return has_input_size or any(word in kind for word in ("vision", "audio", "siglip", "clip_vision"))


# --- Checks -----------------------------------------------------------------------------------------------------------


def check_mask(module: nn.Module, mask: object) -> MaskSpec:
    """Return the mask. Raises UnsupportedError unless `mask_spec` made it."""
    if not isinstance(mask, MaskSpec):
        raise UnsupportedError(
            f"{type(module).__name__} got {'no mask' if mask is None else f'a {type(mask).__name__} as its mask'}, "
            "not one that transformers made for the attention implementation; its meaning over ranks is not known"
        )
    return mask


def refuse_options(module: nn.Module, dropout: float, kwargs: dict[str, Any]) -> None:
    """Raise for dropout without a seed, for attention weights, and for a bias of the scores."""
    if dropout:
        refuse_without_seed(f"attention dropout is {dropout}", _without_dropout(module, dropout))
    if kwargs.get("output_attentions") or getattr(getattr(module, "config", None), "output_attentions", False):
        raise UnsupportedError("output_attentions: ring attention never stores attention weights; leave it out")
    if kwargs.get("position_bias") is not None:
        raise UnsupportedError("this model adds a position bias to its scores, which ring attention does not support")


def _without_dropout(module: nn.Module, dropout: float) -> str:
    """Return advice that names the entry of the configuration that sets this dropout."""
    config = getattr(module, "config", None)
    entries = {} if config is None else vars(config)
    matches = [name for name, value in entries.items() if "drop" in name and value == dropout]
    names = [name for name in matches if "att" in name] or matches or ["attention_dropout"]
    return f"make the model with {' or '.join(f'config.{name}=0.0' for name in names)}, or call model.eval()"


def is_cross_attention(module: nn.Module) -> bool:
    """Return whether the module's keys come from an encoder, by its attribute or its class name."""
    return bool(getattr(module, "is_cross_attention", "CrossAttention" in type(module).__name__))


def refuse_inputs(
    spec: MaskSpec, rows: Rows, seq: Sequence, module: nn.Module, ids: Tensor | None, kwargs: dict[str, Any],
    call: ModelCall | None,
) -> None:  # fmt: skip
    """Check everything that may be wrong on one rank only, once for each mask. If a check fails, all ranks raise.

    `call`: the forward pass of a prepared model, or None.
    """
    refusal = None
    # A rank that refuses its inputs must still reach the exchange at the end, because the other ranks wait there.
    try:
        refuse_layers(getattr(module, "config", None))
        if not takes_positions(type(module).__mro__):
            raise UnsupportedError(
                f"the models of {type(module).__name__} take no position_ids, so they count positions from 0 on every "
                "rank"
            )
        _check_documents(seq, kwargs)
        if seq.ring.world_size > 1:
            _check_rotary(module, call is not None and call.has_whole_length)
        if (
            call is None
            and (ids is not None or seq.ring.world_size > 1)
            and may_compute_positions(type(module).__mro__)
        ):
            raise UnsupportedError(
                f"the models of {type(module).__name__} may count positions from padding or the mask, which cannot be "
                "checked here: call ringattn.adapters.transformers.prepare(model) once"
            )
        if call is not None and call.has_checked_positions:
            pass
        elif ids is not None:
            _check_positions(ids, spec, rows, seq)
        elif seq.ring.world_size > 1:
            raise InputError(
                f"{type(module).__name__} got no position_ids: pass position_ids=seq.positions()[None], and if the "
                "model does not pass them to attention, call ringattn.adapters.transformers.prepare(model) once"
            )
    except InputError as error:
        refusal = error
    # `refused_by_all` is not enough, because this exchange also compares the module and the sequence of all ranks.
    seq.ring.check_consistency(f"forward of {type(module).__name__} over {seq!r}", refusal)


def _check_rotary(module: nn.Module, has_whole_length: bool) -> None:
    """Raise `UnsupportedError` if the rotary frequencies were chosen from the length of this rank's shard."""
    config: Any = getattr(module, "config", None)
    rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    ropes: list[dict[str, Any]] = [rope, *(value for value in rope.values() if isinstance(value, dict))]
    kinds = sorted({str(entry.get("rope_type", entry.get("type", ""))) for entry in ropes} - {""})
    if not has_whole_length and depends_on_length(kinds):
        raise UnsupportedError(
            f"{type(config).__name__} has rotary embeddings of type {', '.join(kinds)}, whose frequencies depend on "
            "the length, and this rank chose them from its shard only: call ringattn.adapters.transformers.prepare("
            "model) once, before the model is copied or compiled, or use another rope_type"
        )


def _check_documents(seq: Sequence, kwargs: dict[str, Any]) -> None:
    """Raise `InputError` if the model got cu_seq_lens that differ from the documents of the sequence."""
    for name in ("cu_seq_lens_q", "cu_seq_lens_k"):
        if (cu_seqlens := kwargs.get(name)) is not None:
            cuts = tuple(sorted(set(cu_seqlens.flatten().tolist())))
            if cuts != tuple(sorted(set(seq.documents or (0, seq.length)))):
                raise InputError(
                    f"rank {seq.ring.rank}: {name} cuts at {cuts[:8]}, the active sequence at {seq.documents}; make "
                    f"the sequence with ring.sequence(cu_seqlens={name}) of the whole batch"
                )


def _check_positions(ids: Tensor, spec: MaskSpec, rows: Rows, seq: Sequence) -> None:
    """Raise `InputError` unless `ids`, (batch or 1, tokens), are positions of this rank's tokens.

    Positions may be global, or counted from the start of the token's document or of the row's real tokens. Rotary
    positions with more dimensions (for images) are not checked here.
    """
    if ids.dim() != 2:
        return
    global_ids, document_ids = (seq.positions(per_document).to(ids.device) for per_document in (False, True))
    if any(torch.equal(ids, expected.expand_as(ids)) for expected in (global_ids, document_ids)):
        return
    # Each group of rows counts from its own first real token. Positions of padding may be anything.
    if spec.padding is not None:
        expected_ids = torch.empty_like(spec.padding, dtype=torch.int64)
        for group_seq, members in rows:
            expected_ids[list(members)] = group_seq.positions(per_document=True).to(expected_ids.device)
        if torch.equal(ids.expand_as(expected_ids)[spec.padding], expected_ids[spec.padding]):
            return
    raise InputError(
        f"rank {seq.ring.rank}: position_ids are {short(ids[0])}, this rank's tokens of {seq!r} have "
        f"{short(global_ids)}"
        + ("" if seq.documents is None else f" or, in their documents, {short(document_ids)}")
        + "; pass position_ids=seq.positions()[None], or seq.positions(per_document=True)[None] for packed documents, "
        "which the sequence must know too: ring.sequence(cu_seqlens=...)"
    )
