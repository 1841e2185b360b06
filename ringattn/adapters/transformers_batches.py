"""Batches for models of transformers: how a whole batch, the same on every rank, lies over the ranks of a ring.

Guarantees: the loss and gradients of one process; labels are shifted before they are sharded.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ringattn.adapters import transformers_images as images
from ringattn.adapters.alike import check_alike
from ringattn.adapters.transformers_checks import check_nobody_is_empty
from ringattn.adapters.transformers_places import own_places
from ringattn.core.layout import LayoutName
from ringattn.errors import InputError
from ringattn.ring import Ring
from ringattn.sequence import Sequence

SHARDED = ("input_ids", "inputs_embeds", "attention_mask", "token_type_ids", "mm_token_type_ids", "shift_labels")
"""Inputs with one entry a token in dimension 1."""

WHOLE = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "num_items_in_batch", *images.WHOLE)
"""Inputs that every rank gets as they are."""


def shard_batch(
    ring: Ring, batch: Mapping[str, Any], layout: LayoutName | str = "auto", *, model: Any = None
) -> tuple[Sequence, dict[str, Any]]:
    """How a whole batch, the same on every rank, lies over the ring, and this rank's inputs for a model.

    Documents are those of `cu_seq_lens_q`, begin where `position_ids` of a lone row are 0, or where its `seq_idx`
    changes; where several of these are given they have to agree. `position_ids` are sharded as they are given. Where
    they are not given they are 0, 1, ..., or what `model` would make of whole rows, which it has to beside images.
    `labels` are shifted over the whole sequence. A collective call, on the host.

    Args:
        ring: The ring.
        batch: Inputs of a model by name, whole. The names are those of `SHARDED` and `WHOLE`, labels, position_ids and
            seq_idx.
        layout: As in `Ring.sequence`.
        model: The model that gets the batch, where it counts positions by itself or sees images. None: positions are 0,
            1, ....

    Shape:
        inputs_embeds: (rows, tokens, numbers)
        every other input of tokens: (rows, tokens)

    Returns:
        The sequence, and this rank's inputs: those given, position_ids, and of labels both `labels` and `shift_labels`.

    Raises:
        DisagreementError: Anything in the batches differs between ranks; every rank raises.
        InputError: An input is not known or not (rows, tokens); positions are not those of rows, of documents, of real
            tokens or the model's own; there are fewer tokens than ranks; a document begins with a label; a label is
            predicted from a padded position. Every rank raises.
        UnsupportedError: The positions that `model` would make cannot be found; every rank raises.

    Example:
        seq, mine = shard_batch(ring, {"input_ids": tokens, "labels": tokens.clone()})
        with ring.activate(seq):
            loss = model(**mine, num_items_in_batch=labels).loss
    """
    check_alike(ring, batch, "every rank of a ring has to read the same examples")  # from here on, all raise or none
    others = set(batch) - {*SHARDED, *WHOLE, "labels", "position_ids", "seq_idx"}
    if others:
        raise InputError(f"how {', '.join(sorted(others))} lies over ranks is not known; take it out of the batch")
    tokens: Tensor = batch["inputs_embeds" if "input_ids" not in batch else "input_ids"]
    _check_shapes(batch, tokens)
    pictured = images.image_places(model, batch)
    places = batch.get("position_ids")
    cuts = _documents({name: x for name, x in batch.items() if name != "position_ids"})
    own = _own_places(model, batch, cuts)
    if own is None or places is None or not torch.equal(places.expand_as(own), own):
        cuts = _documents(batch)
    seq = ring.sequence(tokens.shape[1], cu_seqlens=cuts, layout=layout)
    check_nobody_is_empty(seq)
    mine = {name: value for name, value in batch.items() if name in WHOLE}
    mine |= {name: seq.shard(batch[name]) for name in SHARDED if batch.get(name) is not None}
    places = own if places is None else places
    shard = seq.positions(per_document=True)[None] if places is None else seq.shard(places)
    mine["position_ids"] = shard.expand(len(tokens), -1) if pictured is None else seq.shard(pictured, 2)
    if "shift_labels" not in mine and batch.get("labels") is not None:
        _refuse_first_labels(batch["labels"], seq.documents)
        mine["shift_labels"] = seq.shard_labels(batch["labels"])
    if "shift_labels" in mine:
        _refuse_padded_labels(batch)
        mine["labels"] = mine["shift_labels"]
    return seq, mine


def _check_shapes(batch: Mapping[str, Any], tokens: Tensor) -> None:
    """Raise `InputError` for an input of other dimensions, or of another number of tokens, than `tokens`."""
    for name in (*SHARDED, "labels", "position_ids"):
        x = batch.get(name)
        if x is None:
            continue
        features = 1 if name == "inputs_embeds" else 0
        if x.dim() != 2 + features or x.shape[1] != tokens.shape[1]:
            raise InputError(
                f"{name} of shape {tuple(x.shape)}, beside tokens of shape {tuple(tokens.shape)}, are not (rows, tokens"
                f"{', numbers' if features else ''}); take them out of the batch. A loss of whole rows is made of "
                "gathered states"
            )


def _own_places(model: Any, batch: Mapping[str, Any], cuts: list[int] | None) -> Tensor | None:
    """The places that the model would make of the whole batch, cut into these documents, where not 0, 1, ...."""
    if model is None:
        return None
    given = {name: batch.get(name) for name in ("input_ids", "inputs_embeds", "attention_mask")}
    return own_places(model, {name: x for name, x in given.items() if x is not None}, cuts)


def _refuse_first_labels(labels: Tensor, documents: tuple[int, ...] | None) -> None:
    """Raise `InputError` where a document after the first of the row, (rows, tokens), begins with a label."""
    starts = torch.tensor((documents or ())[1:-1], dtype=torch.int64, device=labels.device)
    wrong = starts[(labels[:, starts] != -100).any(0)].tolist()
    if wrong:
        raise InputError(
            f"documents begin with labels, at {wrong[:5]}{' and on' if len(wrong) > 5 else ''}: one process would ask "
            "the last token of the document before for them; set these labels to -100, as DataCollatorWithFlattening "
            "of transformers does"
        )


def _refuse_padded_labels(batch: Mapping[str, Any]) -> None:
    """Raise `InputError` where the whole batch's labels, (rows, tokens), are predicted from a padded position."""
    if (mask := batch.get("attention_mask")) is None:
        return
    shifted = batch.get("shift_labels")
    if shifted is None:
        shifted, mask = batch["labels"][:, 1:], mask[:, :-1]
    rows, tokens = ((shifted != -100) & (mask == 0)).nonzero(as_tuple=True)
    if len(rows):
        raise InputError(
            f"row {int(rows[0])} has a label that is predicted from a padded position, token {int(tokens[0])}, whose "
            "output is not defined: set the label of the first real token after padding, and those of padding, to "
            "-100: labels[:, 1:][attention_mask[:, :-1] == 0] = -100"
        )


def _documents(batch: Mapping[str, Any]) -> list[int] | None:
    """Cumulative lengths, or None for whole rows; what tells of documents agrees, and positions with it."""
    told = batch.get("cu_seq_lens_q")
    found: dict[str, list[int] | None] = {
        "cu_seq_lens_q": None if told is None else sorted(set(told.flatten().tolist()))
    }
    if (marks := batch.get("seq_idx")) is not None:
        found["seq_idx"] = _cuts_where("seq_idx", marks.diff() != 0)
    if (places := batch.get("position_ids")) is not None and not _are_of_rows(places, batch.get("attention_mask")):
        starts = places == 0
        if len(places) != 1 or not starts[0, 0] or ((places.diff() != 1) & ~starts[:, 1:]).any():
            raise InputError("position_ids are neither those of whole rows nor of documents packed into one row")
        found["position_ids"] = _cuts_where("position_ids", starts[:, 1:])
    known = {name: cuts for name, cuts in found.items() if cuts is not None}
    if any(cuts != next(iter(known.values())) for cuts in known.values()):
        raise InputError(f"the batch tells of several ways to cut it into documents: {known}; give one")
    return next(iter(known.values()), None)


def _cuts_where(name: str, begins: Tensor) -> list[int] | None:
    """Cumulative lengths of the documents that begin at tokens 1, 2, ... where this is true, (rows, tokens - 1)."""
    if not begins.any():
        return None if name == "position_ids" else [0, begins.shape[1] + 1]
    if len(begins) != 1:
        raise InputError(f"{name} tells of documents in one of {len(begins)} rows; pack them into one row")
    return [0, *(begins[0].nonzero().flatten() + 1).tolist(), begins.shape[1] + 1]


def _are_of_rows(places: Tensor, mask: Tensor | None) -> bool:
    """Whether positions count from the start of rows, or, beside padding, of their real tokens.

    Raises `InputError` beside padding for any others.
    """
    if torch.equal(places, torch.arange(places.shape[1], device=places.device).expand_as(places)):
        return True
    if mask is None or bool((mask != 0).all()):
        return False
    real = mask != 0
    if torch.equal(places.expand_as(real)[real], (real.cumsum(1) - 1)[real]):
        return True
    raise InputError(
        "position_ids beside an attention_mask with padding count neither rows nor their real tokens; pack documents "
        "without padding, or leave position_ids out"
    )
