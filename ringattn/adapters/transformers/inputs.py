"""The checks of a forward pass that may fail on one rank only: positions, documents, rotary frequencies and trees.

Guarantees: if a check fails on any rank, all ranks raise.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor, nn

from ringattn import masks
from ringattn.adapters.transformers.calls import STATES, ModelCall
from ringattn.adapters.transformers.checks import (
    check_documents,
    depends_on_length,
    has_tree,
    may_compute_positions,
    positions_call,
    refuse_layers,
    short,
    takes_positions,
    text_positions,
)
from ringattn.adapters.transformers.table_masks import Rows, TableMask
from ringattn.errors import InputError, UnsupportedError
from ringattn.sequence import Sequence


class Mask(Protocol):
    """The mask of some layers in one forward pass: a `MaskSpec` or a `TableMask`.

    `padding`: (batch, keys) bool, True for this rank's real tokens, or None.
    """

    @property
    def causal(self) -> bool: ...
    @property
    def padding(self) -> Tensor | None: ...


def refuse_inputs(
    spec: Mask, rows: Rows, seq: Sequence, module: nn.Module, ids: Tensor | None,
    kwargs: dict[str, Any], call: ModelCall | None,
) -> None:  # fmt: skip
    """Check everything that may be wrong on one rank only, once for each mask. If a check fails, all ranks raise.

    `call`: the forward pass of a prepared model, or None.
    """
    refusal = None
    # A rank that refuses its inputs must still reach the exchange at the end, because the other ranks wait there.
    try:
        refuse_layers(getattr(module, "config", None), getattr(module, STATES, ()))
        is_counted = call is not None and call.has_checked_positions
        if not is_counted and not takes_positions(type(module).__mro__):
            raise UnsupportedError(
                f"the models of {type(module).__name__} take no position_ids, so they count positions from 0 on every "
                "rank; an encoder-decoder is prepared and called as a whole, and inside `with ring.activate(None):` "
                "for generate()"
            )
        check_documents(seq, kwargs)
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
        if has_tree(seq):
            _check_tree(spec, rows, seq)
        if is_counted:
            pass
        elif ids is not None:
            _check_positions(ids, spec, rows, seq)
        elif seq.ring.world_size > 1 or has_tree(seq):
            raise InputError(
                f"{type(module).__name__} got no position_ids: pass position_ids={positions_call(seq)}, and if the "
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


def _check_positions(ids: Tensor, spec: Mask, rows: Rows, seq: Sequence) -> None:
    """Raise `InputError` unless `ids`, (batch or 1, tokens), are positions of this rank's tokens.

    Positions may be those of `text_positions`, counted from the start of the row's real tokens, or counted by the keys
    of a table. Rotary positions with more dimensions (for images) are checked here in a tree only, where images have
    none.
    """
    if ids.dim() != 2 and not has_tree(seq):
        return
    expected_of_text = [expected.to(ids.device) for expected in text_positions(seq)]
    if any(torch.equal(ids, expected.expand_as(ids)) for expected in expected_of_text):
        return
    # Positions along the paths of a tree that is given as a table. Those of padding may be anything.
    if isinstance(spec, TableMask):
        counted, attends = spec.positions(seq)
        fits = ((ids == counted) | ~attends).all(-1)
        for expected in expected_of_text:
            fits = fits | (ids == expected).all(-1)
        if fits.all():
            return
        expected_of_text.append(counted[0])
    # Each group of rows counts from its own first real token.
    if spec.padding is not None:
        expected_ids = torch.empty_like(spec.padding, dtype=torch.int64)
        for group_seq, members in rows:
            expected_ids[list(members)] = group_seq.positions(per_document=True).to(expected_ids.device)
        if torch.equal(ids.expand_as(expected_ids)[spec.padding], expected_ids[spec.padding]):
            return
    expected_texts = [short(expected) for expected in expected_of_text]
    message = f"rank {seq.ring.rank}: position_ids are {short(ids.flatten())}, this rank's tokens of {seq!r} have "
    if has_tree(seq):
        raise InputError(
            f"{message}{expected_texts[0]} along the paths of its tree; pass position_ids={positions_call(seq)}"
        )
    raise InputError(
        f"{message}{expected_texts[0]}"
        + ("" if seq.documents is None else f" or, in their documents, {expected_texts[1]}")
        + (f" or, by attention_mask, {expected_texts[2]}" if isinstance(spec, TableMask) else "")
        + "; pass position_ids=seq.positions()[None], or seq.positions(per_document=True)[None] for packed documents "
        "and trees, which the sequence must know too: ring.sequence(cu_seqlens=...), or seq.with_mask(tree)"
    )


def _check_tree(spec: Mask, rows: Rows, seq: Sequence) -> None:
    """Raise unless the model's own mask and the tree of `seq` are one mask: causal along the paths of the tree."""
    if not isinstance(seq.mask, masks.Tree):
        raise UnsupportedError(
            "masks.by_head with a tree: a model has the same positions for all heads; give the sequence one tree"
        )
    if not spec.causal:
        raise UnsupportedError(
            "the model attends in both directions, and in a tree tokens attend to earlier tokens only; give each "
            "sequence its own row"
        )
    for group_seq, members in rows:
        if group_seq.documents is not None:
            raise InputError(
                f"padding, chunks or documents cut row {members[0]} at {group_seq.documents[:8]}, and a tree is one "
                "sequence: leave padding out, give the tree several roots instead of documents, and use a model "
                "without chunked attention"
            )
