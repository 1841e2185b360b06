"""The attention function and the mask function that transformers calls, with the checks of their arguments.

transformers builds masks from small functions of (batch, head, query, key) indices. `mask_spec` recognises these
functions by name and never evaluates them. The result is a `MaskSpec` of constant size, whatever the number of tokens.
Everything that differs between the supported versions of transformers (`CHECKED`) is in the first section.

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
from ringattn.adapters.hosts import local_sinks, require_checked
from ringattn.adapters.transformers.calls import PART, ModelCall, attending
from ringattn.adapters.transformers.checks import (
    check_encoder,
    check_tokens,
    depends_on_length,
    may_count_by_itself,
    refuse_layers,
    short,
    takes_positions,
)
from ringattn.errors import InputError, UnsupportedError
from ringattn.runtime.activation import activate, active_sequence, attended
from ringattn.sequence import Sequence

# --- Versions of transformers -----------------------------------------------------------------------------------------
# 4.57 and 5.18 to 5.23. Code outside this section uses no version number, and no name that one of these versions
# lacks.

CHECKED = ("4.57", "5.18", "5.19", "5.20", "5.21", "5.22", "5.23")
"""Minor versions; docs/embedding-transformers.md has a table of what was tried with each."""


def require_known() -> None:
    """Raise `UnsupportedError` unless the installed transformers is one of these."""
    require_checked("transformers", *CHECKED)


def query_places(arguments: Mapping[str, Any]) -> tuple[int, int | Tensor]:
    """How many queries a mask function is asked for, and where the first of them is.

    4.57 gives the places of all of them instead of the two numbers.
    """
    places = arguments.get("cache_position")
    if places is None:
        return arguments["q_length"], arguments.get("q_offset", 0)
    return len(places), int(places[0])


def mask_functions() -> Mapping[Callable[..., Any], str]:
    """The functions that masks are made of, and what each means. Documents are those of the sequence."""
    from transformers import masking_utils as host

    nothing: Any = None
    meanings = {
        host.causal_mask_function: "causal",
        host.sliding_window_overlay(nothing): "window",
        host.chunked_overlay(nothing, nothing): "chunks",
        host.packed_sequence_mask_function(nothing): "documents",
        host.and_masks(): "and",
    }
    # Not of 4.57, whose encoders make their masks by themselves.
    if hasattr(host, "bidirectional_mask_function"):
        meanings[host.bidirectional_mask_function] = "full"
    if hasattr(host, "sliding_window_bidirectional_overlay"):
        meanings[host.sliding_window_bidirectional_overlay(nothing)] = "both ways"
    if chunks_begin_with_documents():
        meanings[host.remap_positions_for_packed_sequence(nothing, nothing)] = "documents"
    return meanings


def chunks_begin_with_documents() -> bool:
    """Whether chunks of packed documents are counted from the start of each. Before 5.23: from that of the row."""
    from transformers import masking_utils as host

    return hasattr(host, "remap_positions_for_packed_sequence")


# --- Masks ------------------------------------------------------------------------------------------------------------

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
    """An attention function for transformers' `AttentionInterface`, over the active sequence or locally.

    Args:
        module: The attention module of the model.
        query: This rank's shard of the active sequence.
        key: Like query.
        value: Like query.
        attention_mask: What `mask_spec` made, or a mask tensor of local attention.
        dropout: Each weight is dropped with this probability, over a ring by a seed drawn from the activation's.
        scaling: Factor of the scores. None: 1 / sqrt(d_k).
        kwargs: What else transformers passes: softcap, s_aux, position_ids and others. Unknown ones are refused.

    Shape:
        query: (batch, q_heads, tokens, d_k)
        key: (batch, kv_heads, tokens, d_k)
        value: (batch, kv_heads, tokens, d_v)

    Returns:
        (batch, tokens, q_heads, d_v) in query's dtype, under autocast in its, and None for the weights.

    Raises:
        InputError: A mask, an option or a number of tokens is refused, on every rank; or nothing is active while a ring
            of several ranks is open.
    """
    if is_tower(module, query, attention_mask):
        attended()
        with activate(None):
            return _locally(module, query, key, value, attention_mask, dropout, scaling, kwargs), None
    active = active_sequence()
    if active is not None and isinstance(attention_mask, MaskSpec):
        with active.ring.refused_by_all():
            attention_mask.refuse()  # before the number of tokens of a decoding step is called wrong
    seq = sequence_of()
    if seq is None:
        return _locally(module, query, key, value, attention_mask, dropout, scaling, kwargs), None
    with seq.ring.refused_by_all():
        spec = known_mask(module, attention_mask)
        refuse_options(module, dropout, kwargs)
        check_tokens(seq, query.shape[2])
        if is_cross_attention(module):
            check_encoder(seq, spec.padding)
        seed = drawn_seed(seq.ring) if dropout else None
    call = attending()
    q, k, v = (as_autocast(x).transpose(1, 2) for x in (query, key, value))
    sinks = kwargs.get("s_aux")
    options = {"causal": spec.causal, "window": spec.window, "scale": scaling, "softcap": kwargs.get("softcap"),
               "sinks": None if sinks is None else local_sinks(sinks, q.shape[2]).to(q.dtype),
               "dropout_p": dropout}  # fmt: skip
    ids = kwargs.get("position_ids")  # some models hand on None
    if ids is None and call is not None:
        ids = call.given.get("position_ids")
    rows = spec.rows(seq, lambda found: refuse_inputs(spec, found, seq, module, ids, kwargs, call))
    return _by_rows(rows, q, k, v, seed, options).contiguous(), None


def _by_rows(rows: Rows, q: Tensor, k: Tensor, v: Tensor, seed: int | None, options: dict[str, Any]) -> Tensor:
    """Rows with other documents are attended one after the other.

    `seed`: of dropout; each part has its own, for its rows count from 0.
    """
    if len(rows) == 1:
        return attend(rows[0][0], q, k, v, dropout_seed=seed, **options)
    seeds = [None if seed is None else seed_from(seed, part) for part in range(len(rows))]
    parts = [attend(cut, *(x[list(mine)] for x in (q, k, v)), dropout_seed=one, **options)
             for (cut, mine), one in zip(rows, seeds, strict=True)]  # fmt: skip
    order = torch.tensor([row for _, mine in rows for row in mine], device=q.device)
    return torch.cat(parts)[order.argsort()]


def _locally(
    module: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: object, dropout: float, scaling: float | None,
    kwargs: dict[str, Any],
) -> Tensor:  # fmt: skip
    """Attention of this process alone, (batch, tokens, heads, dim): `sdpa`, or by the definition where it cannot."""
    from transformers import AttentionInterface

    softcap, sinks = kwargs.get("softcap"), kwargs.get("s_aux")
    plain = softcap is None and sinks is None
    if isinstance(mask, MaskSpec):
        is_causal = mask.causal
        mask = mask.local(may_be_none=plain)
        # Some versions hand it to torch as it is, which takes no mask beside it, and shows a lone query the first key.
        kwargs = {**kwargs, "is_causal": is_causal and mask is None and q.shape[2] > 1}
    if plain:
        sdpa = cast(Any, AttentionInterface()["sdpa"])
        return sdpa(module, q, k, v, mask, dropout=dropout, scaling=scaling, **kwargs)[0]
    sinks = None if sinks is None else local_sinks(sinks, q.shape[1])
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
    weights = nn.functional.dropout(scores.softmax(-1), dropout)[..., : k.shape[2]]
    return (weights @ v).transpose(1, 2).contiguous()


# --- Parts of a model: text and towers --------------------------------------------------------------------------------


def is_tower(module: nn.Module, query: Tensor, mask: object) -> bool:
    """Whether it attends over an image or sound, of which every rank has the whole.

    Known of modules that `prepare` has marked. Of others only what looks like a tower and gets other numbers of tokens
    than a shard has is one: raises `InputError` on all ranks where it gets as many.
    """
    if (part := getattr(module, PART, None)) is not None:
        return bool(part == "tower")
    if not _looks_like_tower(module, mask):
        return False
    if torch._C._current_graph_task_id() != -1:  # inside backward, of a forward pass that was checked
        return True
    seq = active_sequence()
    if seq is None:
        return False  # attention is local where `sequence_of` allows that
    if seq.ring.world_size > 1 and query.shape[2] == seq.counts[seq.ring.rank]:
        with seq.ring.refused_by_all():
            raise InputError(
                f"rank {seq.ring.rank}: {type(module).__name__} may be a tower that sees a whole image, or text of "
                f"which the {query.shape[2]} tokens are this rank's: call ringattn.adapters.transformers.prepare("
                "model) once, which tells them apart, or call a tower inside `with ring.activate(None):`"
            )
    return True


def _looks_like_tower(module: nn.Module, mask: object) -> bool:
    if getattr(module, "is_causal", False) or (isinstance(mask, MaskSpec) and mask.causal):
        return False
    config: Any = getattr(module, "config", None)
    kind = str(getattr(config, "model_type", ""))
    seen = any(hasattr(config, name) for name in ("patch_size", "image_size", "num_mel_bins"))
    return seen or any(word in kind for word in ("vision", "audio", "siglip", "clip_vision"))


# --- Checks -----------------------------------------------------------------------------------------------------------


def known_mask(module: nn.Module, mask: object) -> MaskSpec:
    if not isinstance(mask, MaskSpec):
        raise UnsupportedError(
            f"{type(module).__name__} got {'no mask' if mask is None else 'a mask of its own'}, not one that "
            "transformers made for the attention implementation; its meaning over ranks is not known"
        )
    return mask


def refuse_options(module: nn.Module, dropout: float, kwargs: dict[str, Any]) -> None:
    if dropout:
        refuse_without_seed(f"attention dropout is {dropout}", _without_dropout(module, dropout))
    if kwargs.get("output_attentions") or getattr(getattr(module, "config", None), "output_attentions", False):
        raise UnsupportedError("output_attentions: ring attention never holds attention weights; leave it out")
    if kwargs.get("position_bias") is not None:
        raise UnsupportedError("this model adds a bias to its scores, which ring attention cannot")


def _without_dropout(module: nn.Module, dropout: float) -> str:
    """What to set, by the names that configurations have for it."""
    config = getattr(module, "config", None)
    known = {} if config is None else vars(config)
    same = [name for name, value in known.items() if "drop" in name and value == dropout]
    names = [name for name in same if "att" in name] or same or ["attention_dropout"]
    return f"make the model with {' or '.join(f'config.{name}=0.0' for name in names)}, or call model.eval()"


def is_cross_attention(module: nn.Module) -> bool:
    """Whether its keys are an encoder's, by what transformers' modules say of themselves."""
    return bool(getattr(module, "is_cross_attention", "CrossAttention" in type(module).__name__))


def refuse_inputs(
    spec: MaskSpec, rows: Rows, seq: Sequence, module: nn.Module, ids: Tensor | None, kwargs: dict[str, Any],
    call: ModelCall | None,
) -> None:  # fmt: skip
    """What may be wrong on one rank alone, once for each mask; all ranks raise. `call`: of a prepared model."""
    refusal = None
    try:
        refuse_layers(getattr(module, "config", None))
        if not takes_positions(type(module).__mro__):
            raise UnsupportedError(
                f"the models of {type(module).__name__} take no position_ids, so they count places from 0 on every rank"
            )
        _check_documents(seq, kwargs)
        if seq.ring.world_size > 1:
            _check_rotary(module, call is not None and call.has_chosen)
        if call is None and (ids is not None or seq.ring.world_size > 1) and may_count_by_itself(type(module).__mro__):
            raise UnsupportedError(
                f"the models of {type(module).__name__} may count places by their padding or mask, which is not known "
                "here: call ringattn.adapters.transformers.prepare(model) once"
            )
        if call is not None and call.is_placed:
            pass
        elif ids is not None:
            _check_positions(ids, spec, rows, seq)
        elif seq.ring.world_size > 1:
            raise InputError(
                f"no position_ids came to {type(module).__name__}: pass position_ids=seq.positions()[None], and if the "
                "model does not hand them to attention, call ringattn.adapters.transformers.prepare(model) once"
            )
    except InputError as error:
        refusal = error
    seq.ring.check_consistency(f"forward of {type(module).__name__} over {seq!r}", refusal)


def _check_rotary(module: nn.Module, is_chosen: bool) -> None:
    """Raise `UnsupportedError` where an attention module's rotary embedding was chosen by this rank's tokens alone."""
    config: Any = getattr(module, "config", None)
    rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    ropes: list[dict[str, Any]] = [rope, *(one for one in rope.values() if isinstance(one, dict))]
    kinds = sorted({str(one.get("rope_type", one.get("type", ""))) for one in ropes} - {""})
    if not is_chosen and depends_on_length(kinds):
        raise UnsupportedError(
            f"{type(config).__name__} has rotary embeddings of type {', '.join(kinds)}, whose frequencies depend on "
            "the length, and this rank chose them by its own tokens: call ringattn.adapters.transformers.prepare("
            "model) once, before the model is copied or compiled, or take another rope_type"
        )


def _check_documents(seq: Sequence, kwargs: dict[str, Any]) -> None:
    """Raise `InputError` unless the cu_seq_lens given to the model, if any, are the documents of the sequence."""
    for name in ("cu_seq_lens_q", "cu_seq_lens_k"):
        if (given := kwargs.get(name)) is not None:
            cuts = tuple(sorted(set(given.flatten().tolist())))
            if cuts != tuple(sorted(set(seq.documents or (0, seq.length)))):
                raise InputError(
                    f"rank {seq.ring.rank}: {name} cuts at {cuts[:8]}, the active sequence at {seq.documents}; make "
                    f"the sequence with ring.sequence(cu_seqlens={name}) of the whole batch"
                )


def _check_positions(ids: Tensor, spec: MaskSpec, rows: Rows, seq: Sequence) -> None:
    """Raise `InputError` unless `ids`, (batch or 1, tokens), are positions of this rank's tokens.

    Global ones, or counted from the start of the token's document, or of its row's real tokens. Rotary positions with
    more dimensions (of images) are left unchecked.
    """
    if ids.dim() != 2:
        return
    places, starts = (seq.positions(per_document).to(ids.device) for per_document in (False, True))
    if any(torch.equal(ids, one.expand_as(ids)) for one in (places, starts)):
        return
    if spec.padding is not None:
        wanted = torch.empty_like(spec.padding, dtype=torch.int64)
        for cut, mine in rows:
            wanted[list(mine)] = cut.positions(per_document=True).to(wanted.device)
        if torch.equal(ids.expand_as(wanted)[spec.padding], wanted[spec.padding]):
            return
    raise InputError(
        f"rank {seq.ring.rank}: position_ids are {short(ids[0])}, this rank's tokens of {seq!r} have {short(places)}"
        + ("" if seq.documents is None else f" or, in their documents, {short(starts)}")
        + "; pass position_ids=seq.positions()[None], or seq.positions(per_document=True)[None] for packed documents, "
        "which the sequence must know too: ring.sequence(cu_seqlens=...)"
    )
