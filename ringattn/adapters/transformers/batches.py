"""Whole batches over the ranks of a ring: sharded for a model, and whole again for a loss.

`shard_batch` turns a whole batch, the same on every rank, into this rank's inputs. Inside `whole_calls` a model shards
the batch that it is called with, and returns outputs of the whole batch on every rank: the loss at once, logits and
each hidden state when they are first read from the outputs. So code that was written for one process computes the value
of one process.

Guarantees: the loss and gradients of one process. Labels are shifted before they are sharded. The backward of a whole
output sums the gradients of all ranks, so the mean over ranks of each parameter's gradient (DDP, FSDP) is that of one
process. An output that cannot be made whole raises when it is used.
"""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from ringattn.adapters.hosts import check_alike
from ringattn.adapters.transformers.checks import check_nobody_is_empty
from ringattn.adapters.transformers.positions import IMAGE_INPUTS, image_places, own_places
from ringattn.core.layout import LayoutName
from ringattn.errors import InputError, UnsupportedError
from ringattn.ring import Ring
from ringattn.sequence import Sequence

# --- Sharded batches --------------------------------------------------------------------------------------------------

SHARDED = ("input_ids", "inputs_embeds", "attention_mask", "token_type_ids", "mm_token_type_ids", "shift_labels")
"""Inputs with one entry a token in dimension 1."""

WHOLE = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "num_items_in_batch", *IMAGE_INPUTS)
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
    pictured = image_places(model, batch)
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


# --- Whole batches and whole outputs ----------------------------------------------------------------------------------


class _Later:
    """An output of this rank's tokens, (rows, tokens, ...), that is gathered when it is first read. Collective then."""

    def __init__(self, seq: Sequence, local: Tensor) -> None:
        self.seq, self.local = seq, local
        self.gathered: Tensor | None = None

    def read(self) -> Tensor:
        """Return the whole output, the same tensor at each call, so that changes of it in place are seen."""
        if self.gathered is None:
            with torch.enable_grad():
                self.gathered = self.seq.gather(self.local, dim=1)
        return self.gathered


def _read(output: Any) -> Any:
    return output.read() if isinstance(output, _Later) else output


class _WholeTuple(tuple[Any, ...]):
    """Outputs of several layers, each gathered when it is first read."""

    def __getitem__(self, index: Any) -> Any:
        found = super().__getitem__(index)
        return tuple(map(_read, found)) if isinstance(index, slice) else _read(found)

    def __iter__(self) -> Iterator[Any]:
        return map(_read, super().__iter__())


class WholeOutput(OrderedDict[str, Any]):
    """A model's outputs of the whole batch, each gathered when it is first read. Stands before a class of outputs."""

    def __getattribute__(self, name: str) -> Any:
        return _read(super().__getattribute__(name))

    def __getitem__(self, key: Any) -> Any:
        if isinstance(key, str):
            return _read(OrderedDict.__getitem__(self, key))
        return _WholeTuple(OrderedDict.values(self))[key]

    def get(self, key: str, default: Any = None) -> Any:
        return self[key] if key in self else default

    def values(self) -> Any:
        return [*_WholeTuple(OrderedDict.values(self))]

    def items(self) -> Any:
        return [*zip(self.keys(), self.values(), strict=True)]


@cache
def _whole_class(kind: Any) -> Any:
    return type(kind.__name__, (WholeOutput, kind), {"__module__": kind.__module__})


class _Sum(torch.autograd.Function):
    """The sum over ranks; so is its gradient."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, ring: Ring) -> Tensor:
        ctx.ring = ring
        return _summed(part, ring)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _summed(grad, ctx.ring), None


def _summed(x: Tensor, ring: Ring) -> Tensor:
    total = x.detach().clone()
    ring.all_reduce([total])
    return total


class NotWhole:
    """Stands for an output that is not made whole: whoever uses it gets an `UnsupportedError`."""

    def __init__(self, name: str) -> None:
        self._name = name

    def _refuse(self, *args: Any, **kwargs: Any) -> Any:
        raise UnsupportedError(
            f"{self._name} of a model over a ring is not made whole for a loss, only the loss and outputs of (rows, "
            "tokens, ...) are; leave it out of the loss, or train without a ring"
        )

    def __getattr__(self, name: str) -> Any:
        return self._refuse()

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        tree_map_only(cls, cls._refuse, (args, kwargs))


for _operator in (
    "add radd sub rsub mul rmul truediv rtruediv pow matmul rmatmul neg abs getitem iter len bool float int lt le gt ge"
).split():
    setattr(NotWhole, f"__{_operator}__", NotWhole._refuse)


def _whole_outputs(seq: Sequence, out: Any) -> Any:
    """Return a model's outputs of the whole batch, given those of this rank's tokens."""
    kind: Any = type(out)
    found = _whole_class(kind)(**out)
    for name, x in out.items():
        found[name] = _whole_output(name, seq, x)
    if "logits" in getattr(type(out), "__dataclass_fields__", {}) and "logits" not in out:
        found["logits"] = NotWhole("logits")  # of chunked_loss, which makes none
    return found


def _whole_output(name: str, seq: Sequence, x: Any) -> Any:
    if isinstance(x, tuple | list):
        return _WholeTuple(_whole_output(name, seq, part) for part in x)
    if isinstance(x, Tensor) and name == "loss" and x.dim() == 0:
        return _Sum.apply(x, seq.ring)
    if isinstance(x, Tensor) and x.dim() >= 2 and x.shape[1] == seq.counts[seq.ring.rank]:
        return _Later(seq, x)
    return None if x is None else NotWhole(name)


class WholeCalls:
    """The calls of one model inside of `whole_calls`."""

    def __init__(self, ring: Ring, model: Any, layout: LayoutName | str, dropout_seed: int) -> None:
        self.ring, self.model, self.layout, self.dropout_seed = ring, model, layout, dropout_seed
        self.seq: Sequence | None = None
        self.active = ExitStack()

    def _activate(self, seq: Sequence) -> AbstractContextManager[None]:
        return self.ring.activate(seq, dropout_seed=self.dropout_seed)

    def enter(self, outer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Shard the inputs of a call, and activate their sequence until it ends. A collective call."""
        if torch._C._current_graph_task_id() != -1:
            return None
        if args:
            raise InputError("inputs without names: call the model with keywords, as Trainer does")
        batch = {name: x for name, x in kwargs.items() if isinstance(x, Tensor)}
        self.seq, sharded = shard_batch(self.ring, batch, self.layout, model=self.model)
        if "shift_labels" in sharded and kwargs.get("num_items_in_batch") is None:
            labels = batch["shift_labels"] if "shift_labels" in batch else batch["labels"][:, 1:]
            sharded["num_items_in_batch"] = (labels != -100).sum()  # the model's loss is the mean over this batch then
        self.active.enter_context(self._activate(self.seq))
        return args, {**kwargs, **sharded}

    def leave(self, outer: nn.Module, args: Any, out: Any) -> Any:
        """End the activation, and make the outputs whole. A collective call."""
        if torch._C._current_graph_task_id() != -1:
            return None
        failure = sys.exc_info() if out is None else (None, None, None)
        self.active.__exit__(*failure)
        self.active = ExitStack()
        if out is None:
            return None
        if not hasattr(out, "items"):
            raise InputError("return_dict=False: outputs without names cannot be made whole; leave it out")
        assert self.seq is not None
        return _whole_outputs(self.seq, out)


@contextmanager
def whole_calls(
    ring: Ring, outer: nn.Module, model: Any, layout: LayoutName | str, dropout_seed: int
) -> Iterator[None]:
    """Inside, `outer` takes whole batches, the same on every rank, and returns whole outputs.

    Args:
        ring: The ring.
        outer: What is called: the model, or what DDP, FSDP or a compiler made of it.
        model: The prepared model inside of `outer`.
        layout: As in `Ring.sequence`.
        dropout_seed: As in `Ring.activate`.

    Returns:
        A context manager.

    Raises:
        DisagreementError: The ranks' batches differ.
        InputError: A batch cannot be sharded, see `shard_batch`.
    """
    calls = WholeCalls(ring, model, layout, dropout_seed)
    hooks = [
        outer.register_forward_pre_hook(calls.enter, with_kwargs=True, prepend=True),
        outer.register_forward_hook(calls.leave, always_call=True),
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
