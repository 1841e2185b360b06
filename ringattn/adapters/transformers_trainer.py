"""Batches of transformers over the ranks of a ring: for loops of one's own, and for its Trainer.

`shard_batch` needs public names only. `RingTrainerMixin` overrides one private method of Trainer, the one that shards
batches for context parallelism, and refuses a Trainer that has it in another form.
Promises: the loss and gradients of one process; labels are shifted before they are sharded, and counted whole.
Does not know: attention, models.
Checked with transformers 5.23 and accelerate 1.15.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ringattn.adapters.alike import check_alike
from ringattn.adapters.transformers import prepare
from ringattn.errors import InputError, UnsupportedError
from ringattn.ring import Ring
from ringattn.sequence import Sequence

SHARDED = ("input_ids", "inputs_embeds", "attention_mask", "token_type_ids", "shift_labels")
"""Inputs with one entry a token in dimension 1."""

WHOLE = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "num_items_in_batch")
"""Inputs that every rank gets as they are."""


def shard_batch(ring: Ring, batch: Mapping[str, Any], layout: str = "auto") -> tuple[Sequence, dict[str, Any]]:
    """How a whole batch, the same on every rank, lies over the ring, and this rank's inputs for a model.

    Tensors are (rows, tokens). Documents are those of `cu_seq_lens_q`, begin where `position_ids` of a lone row are 0,
    or where its `seq_idx` changes; where several of these are given they have to agree. `position_ids` are sharded as
    they are given, and made where they are not. `labels` are shifted over the whole sequence, and given back as
    `labels` and as `shift_labels`. Raises `InputError`, on every rank, where anything in the batches differs, for
    inputs that it does not know, and for positions that are neither those of rows, of documents nor of real tokens.
    """
    check_alike(ring, batch, "every rank of a ring has to read the same examples")  # from here on, all raise or none
    others = set(batch) - {*SHARDED, *WHOLE, "labels", "position_ids", "seq_idx"}
    if others:
        raise InputError(f"how {', '.join(sorted(others))} lies over ranks is not known; take it out of the batch")
    tokens: Tensor = batch["inputs_embeds" if "input_ids" not in batch else "input_ids"]
    seq = ring.sequence(tokens.shape[1], cu_seqlens=_documents(batch), layout=layout)
    mine = {name: value for name, value in batch.items() if name in WHOLE}
    mine |= {name: seq.shard(batch[name]) for name in SHARDED if batch.get(name) is not None}
    places = batch.get("position_ids")
    shard = seq.positions(per_document=True)[None] if places is None else seq.shard(places)
    mine["position_ids"] = shard.expand(len(tokens), -1)
    if batch.get("labels") is not None:
        mine.setdefault("shift_labels", seq.shard_labels(batch["labels"]))
    if "shift_labels" in mine:
        mine["labels"] = mine["shift_labels"]
    return seq, mine


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

    Raises `InputError` beside padding for any others, and for positions of more than one number a token.
    """
    if places.dim() != 2:
        raise InputError(
            f"position_ids of shape {tuple(places.shape)} are not (rows, tokens); take them out of the batch"
        )
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


class RingTrainerMixin:
    """Put before transformers' Trainer: `class RingTrainer(RingTrainerMixin, Trainer)`; every batch lies over `ring`.

    `ring`: its ranks follow each other in the order of processes. Ranks of one ring get the same batches, rings other
    ones. `layout`: as in `Ring.sequence`. Raises `UnsupportedError` for a Trainer of another form and for
    `compute_metrics`, since no rank has all logits. accelerate's cp_size and sp_size stay 1.
    """

    def __init__(self, *args: Any, ring: Ring, layout: str = "auto", **kwargs: Any) -> None:
        check_trainer(type(self))
        self.ring, self.layout = ring, layout
        super().__init__(*args, **kwargs)
        host: Any = self
        if host.compute_metrics is not None:
            raise UnsupportedError("compute_metrics needs logits of whole texts, which no rank has; leave it out")
        prepare(host.model)

    def get_cp_size(self) -> int:
        """Processes that share a batch: what Trainer divides its counts of labels and of batches by."""
        return self.ring.world_size

    def get_train_dataloader(self) -> Any:
        """Trainer's own, which all ranks of a ring read alike."""
        return self._read_alike(super().get_train_dataloader())  # type: ignore[misc]

    def get_eval_dataloader(self, eval_dataset: Any = None) -> Any:
        """Trainer's own, which all ranks of a ring read alike."""
        return self._read_alike(super().get_eval_dataloader(eval_dataset))  # type: ignore[misc]

    def _read_alike(self, loader: Any) -> Any:
        host: Any = self
        if host.args.world_size > 1:
            shards: tuple[Any, ...] = (getattr(loader, "batch_sampler", None), getattr(loader, "dataset", None))
            for shard in shards:
                if hasattr(shard, "num_processes") and hasattr(shard, "process_index"):
                    shard.num_processes = host.args.world_size // self.ring.world_size
                    shard.process_index = host.args.process_index // self.ring.world_size
        return loader

    def _prepare_context_parallel_inputs(
        self, model: Any, inputs: Mapping[str, Any]
    ) -> tuple[Callable[[], Any], dict[str, Any]]:
        seq, mine = shard_batch(self.ring, inputs, self.layout)
        return partial(self.ring.activate, seq), mine


def check_trainer(kind: type) -> None:
    """Raise `UnsupportedError` unless this Trainer shards its batches where the mixin expects it."""
    import transformers

    method = getattr(transformers.Trainer, "_prepare_context_parallel_inputs", None)
    if not issubclass(kind, transformers.Trainer):
        raise UnsupportedError(f"{kind.__name__} must inherit from RingTrainerMixin and then from transformers.Trainer")
    if method is None or list(inspect.signature(method).parameters) != ["self", "model", "inputs"]:
        raise UnsupportedError(
            f"the Trainer of transformers {transformers.__version__} shards batches in another way than that of 5.23, "
            "which this was checked with; write the loop with shard_batch, or take that version"
        )
