"""Whole batches over the ranks of a ring: sharding them for a model, and gathering whole outputs for a loss.

`shard_batch` turns a whole batch, the same on every rank, into this rank's inputs. Inside `whole_calls`, a model shards
the batch of each call and returns outputs of the whole batch on every rank. The loss is whole at once; logits and
hidden states are gathered when they are first read. So code that was written for one process computes the same values.

Guarantees: the loss and gradients of one process. Labels are shifted before they are sharded. The backward of a whole
output sums the gradients of all ranks, so the mean over ranks of each parameter's gradient (DDP, FSDP) is that of one
process. An output that cannot be made whole raises when it is used.
"""

from __future__ import annotations

import inspect
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import cache
from itertools import count, repeat
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.hooks import RemovableHandle

from ringattn.adapters.dropout import seed_from
from ringattn.adapters.hosts import check_alike
from ringattn.adapters.transformers.checks import check_every_rank_has_tokens
from ringattn.adapters.transformers.encoder_decoder import encoder_of, shard_pair
from ringattn.adapters.transformers.positions import IMAGE_INPUTS, image_positions, model_positions
from ringattn.adapters.transformers.token_labels import shifts_labels
from ringattn.core.layout import LayoutName
from ringattn.errors import InputError, UnsupportedError
from ringattn.gradients import once_differentiable
from ringattn.ring import Ring
from ringattn.sequence import Sequence

# --- Sharded batches --------------------------------------------------------------------------------------------------

SHARDED = ("input_ids", "inputs_embeds", "attention_mask", "token_type_ids", "mm_token_type_ids", "shift_labels")
"""Inputs with one entry per token in dimension 1."""

WHOLE = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "num_items_in_batch", *IMAGE_INPUTS)
"""Inputs that every rank gets unchanged."""


def shard_batch(
    ring: Ring, batch: Mapping[str, Any], layout: LayoutName | str = "auto", *, model: Any = None
) -> tuple[Sequence, dict[str, Any]]:
    """Return the sequence of a whole batch, and this rank's inputs for a model. A collective call, on the host.

    Documents come from `cu_seq_lens_q`, from zeros in the `position_ids` of a single row, or from changes in its
    `seq_idx`. If several of these are given, they must agree. Given `position_ids` are sharded unchanged. Otherwise
    positions are 0, 1, ..., or those that `model` computes for whole rows; with images, the model must compute them.
    `labels` are shifted over the whole sequence, unless the loss of `model` is that of a masked language model, of
    token classification or of an encoder-decoder. For the latter, the sequence is that of the decoder, `seq.encoder`
    that of a sharded encoder, and missing `decoder_input_ids` are made from the labels.

    Args:
        ring: The ring.
        batch: Whole inputs of a model by name, the same on every rank. Names: `SHARDED`, `WHOLE`, labels, position_ids
            and seq_idx; for an encoder-decoder input_ids, inputs_embeds, attention_mask, input_features and labels, and
            the first three with the prefix decoder_.
        layout: As in `Ring.sequence`.
        model: The model that gets the batch. Needed if it computes positions itself, takes images, has one label for
            each token, or is an encoder-decoder. None: positions are 0, 1, ..., and labels are shifted.

    Shape:
        inputs_embeds: (rows, tokens, numbers)
        every other input of tokens: (rows, tokens)

    Returns:
        The sequence, and this rank's inputs: the given ones and position_ids; with labels that are shifted, both
        `labels` and `shift_labels`.

    Raises:
        DisagreementError: The batches of the ranks differ; every rank raises.
        InputError: An input is unknown or not (rows, tokens); positions are not those of the model, and do not count
            the tokens of each row, the tokens of each document, or the real tokens; there are fewer tokens than ranks;
            a document begins with a label; or a label is predicted from a padded position. Every rank raises.
        UnsupportedError: The positions that `model` would compute cannot be determined; every rank raises.

    Example:
        seq, shards = shard_batch(ring, {"input_ids": tokens, "labels": tokens.clone()})
        with ring.activate(seq):
            loss = model(**shards, num_items_in_batch=labels).loss
    """
    # All ranks have equal batches after this check, so below either all ranks raise or none.
    check_alike(ring, batch, "every rank of a ring must read the same examples")
    if encoder_of(model) is not None:
        return shard_pair(ring, batch, layout, model)
    unknown = set(batch) - {*SHARDED, *WHOLE, "labels", "position_ids", "seq_idx"}
    if unknown:
        raise InputError(
            f"cannot shard the inputs {', '.join(sorted(unknown))}: unknown names; remove them from the batch, and "
            "pass the model if it is an encoder-decoder"
        )
    tokens: Tensor = batch["inputs_embeds" if "input_ids" not in batch else "input_ids"]
    check_shapes(batch, tokens)
    with_images = image_positions(model, batch)
    position_ids = batch.get("position_ids")
    # The documents are first determined without position_ids. Whether position_ids define documents depends on the
    # positions that the model computes itself.
    cuts = documents_of({name: x for name, x in batch.items() if name != "position_ids"})
    computed = _computed_positions(model, batch, cuts)
    # The model's own positions may restart for reasons other than documents, so they do not define documents.
    if computed is None or position_ids is None or not torch.equal(position_ids.expand_as(computed), computed):
        cuts = documents_of(batch)
    seq = ring.sequence(tokens.shape[1], cu_seqlens=cuts, layout=layout)
    check_every_rank_has_tokens(seq)
    shards = {name: value for name, value in batch.items() if name in WHOLE}
    shards |= {name: seq.shard(batch[name]) for name in SHARDED if batch.get(name) is not None}
    position_ids = computed if position_ids is None else position_ids
    shard = seq.positions(per_document=True)[None] if position_ids is None else seq.shard(position_ids)
    shards["position_ids"] = shard.expand(len(tokens), -1) if with_images is None else seq.shard(with_images, 2)
    shifts = shifts_labels(model)
    if "shift_labels" in shards and not shifts:
        raise InputError(
            f"{type(model).__name__} has one label for each token, but the batch has shift_labels, as for a causal "
            "model; pass labels instead"
        )
    if "shift_labels" not in shards and batch.get("labels") is not None:
        if shifts:
            refuse_first_labels(batch["labels"], seq.documents)
            shards["shift_labels"] = seq.shard_labels(batch["labels"])
        else:
            _refuse_padded_labels(batch, shifts)
            shards["labels"] = seq.shard(batch["labels"])
    if "shift_labels" in shards:
        _refuse_padded_labels(batch, shifts)
        shards["labels"] = shards["shift_labels"]  # the model's loss uses shift_labels, but requires labels as well
    return seq, shards


def check_shapes(batch: Mapping[str, Any], tokens: Tensor) -> None:
    """Raise `InputError` for an input whose dimensions or number of tokens differ from those of `tokens`."""
    for name in (*SHARDED, "labels", "position_ids"):
        x = batch.get(name)
        if x is None:
            continue
        features = 1 if name == "inputs_embeds" else 0
        if name == "attention_mask" and x.dim() == 4:
            raise InputError(
                "attention_mask of four dimensions is not sharded: remove it from the batch, and pass it whole to the "
                "model, model(**shards, attention_mask=attention_mask)"
            )
        if x.dim() != 2 + features or x.shape[1] != tokens.shape[1]:
            raise InputError(
                f"{name} has shape {tuple(x.shape)} and the tokens {tuple(tokens.shape)}, but {name} must be (rows, "
                f"tokens{', numbers' if features else ''}); remove it from the batch, and compute a loss of whole "
                "rows from gathered states"
            )


def _computed_positions(model: Any, batch: Mapping[str, Any], cuts: list[int] | None) -> Tensor | None:
    """Return the positions that the model computes for the whole batch with these documents, or None for 0, 1, ...."""
    if model is None:
        return None
    inputs = {name: batch.get(name) for name in ("input_ids", "inputs_embeds", "attention_mask")}
    return model_positions(model, {name: x for name, x in inputs.items() if x is not None}, cuts)


def refuse_first_labels(labels: Tensor, documents: tuple[int, ...] | None) -> None:
    """Raise `InputError` if a document other than the first begins with a label. `labels`: (rows, tokens)."""
    # Shifting moves the first label of a document to the last token of the document before.
    starts = torch.tensor((documents or ())[1:-1], dtype=torch.int64, device=labels.device)
    wrong = starts[(labels[:, starts] != -100).any(0)].tolist()
    if wrong:
        raise InputError(
            f"documents begin with labels, at {wrong[:5]}{' and on' if len(wrong) > 5 else ''}: one process would "
            "predict them from the last token of the previous document; set these labels to -100, as "
            "DataCollatorWithFlattening of transformers does"
        )


def _refuse_padded_labels(batch: Mapping[str, Any], shifts: bool) -> None:
    """Raise `InputError` if a label of the whole batch, (rows, tokens), is predicted from a padded position.

    `shifts`: the model predicts a label at the token before.
    """
    if (mask := batch.get("attention_mask")) is None:
        return
    labels = batch.get("shift_labels")
    if labels is None:
        labels = batch["labels"]
        if shifts:
            # Label n + 1 is predicted at token n, so the masks of the predicting tokens are those before the last.
            labels, mask = labels[:, 1:], mask[:, :-1]
    rows, tokens = ((labels != -100) & (mask == 0)).nonzero(as_tuple=True)
    if len(rows):
        remedy = "set the labels of padding to -100"
        if shifts:
            remedy = (
                "set the label of the first real token after padding, and those of padding, to -100: "
                "labels[:, 1:][attention_mask[:, :-1] == 0] = -100"
            )
        raise InputError(
            f"row {int(rows[0])} has a label that is predicted from a padded position, token {int(tokens[0])}, whose "
            f"output is undefined: {remedy}"
        )


def documents_of(batch: Mapping[str, Any]) -> list[int] | None:
    """Return the cumulative lengths of documents, or None for whole rows. Raises InputError if the inputs disagree."""
    cu_seqlens = batch.get("cu_seq_lens_q")
    cuts_by_input: dict[str, list[int] | None] = {
        "cu_seq_lens_q": None if cu_seqlens is None else sorted(set(cu_seqlens.flatten().tolist()))
    }
    if (seq_idx := batch.get("seq_idx")) is not None:
        cuts_by_input["seq_idx"] = _cuts_where("seq_idx", seq_idx.diff() != 0)
    if (position_ids := batch.get("position_ids")) is not None and not _count_rows(
        position_ids, batch.get("attention_mask")
    ):
        starts = position_ids == 0
        if len(position_ids) != 1 or not starts[0, 0] or ((position_ids.diff() != 1) & ~starts[:, 1:]).any():
            raise InputError(
                "position_ids are neither those of whole rows nor of documents packed into one row; for sequences that "
                "were merged into a tree, use ring.sequence(tokens).with_mask(tree) instead, as docs/masks.md shows"
            )
        cuts_by_input["position_ids"] = _cuts_where("position_ids", starts[:, 1:])
    given = {name: cuts for name, cuts in cuts_by_input.items() if cuts is not None}
    if any(cuts != next(iter(given.values())) for cuts in given.values()):
        raise InputError(f"the inputs of the batch define different documents: {given}; pass one of them")
    return next(iter(given.values()), None)


def _cuts_where(name: str, begins: Tensor) -> list[int] | None:
    """Return cumulative lengths from a mask (rows, tokens - 1): True if a document begins at token 1, 2, ...."""
    if not begins.any():
        return None if name == "position_ids" else [0, begins.shape[1] + 1]
    if len(begins) != 1:
        raise InputError(
            f"{name} defines documents, but the batch has {len(begins)} rows; pack the documents into one row"
        )
    return [0, *(begins[0].nonzero().flatten() + 1).tolist(), begins.shape[1] + 1]


def _count_rows(position_ids: Tensor, mask: Tensor | None) -> bool:
    """Return whether positions count the tokens of a row, or with padding its real tokens.

    Raises `InputError` for other positions with padding.
    """
    if torch.equal(
        position_ids, torch.arange(position_ids.shape[1], device=position_ids.device).expand_as(position_ids)
    ):
        return True
    if mask is None or bool((mask != 0).all()):
        return False
    real = mask != 0
    if torch.equal(position_ids.expand_as(real)[real], (real.cumsum(1) - 1)[real]):
        return True
    raise InputError(
        "position_ids with a padded attention_mask count neither the tokens of a row nor its real tokens; pack "
        "documents without padding, or leave position_ids out"
    )


# --- Whole batches and whole outputs ----------------------------------------------------------------------------------


class _Later:
    """An output of this rank's tokens, (rows, tokens, ...). The first read gathers it, and is a collective call."""

    def __init__(self, seq: Sequence, local: Tensor, tokens: int) -> None:
        self.seq, self.local, self.tokens = seq, local, tokens
        self.gathered: Tensor | None = None

    def read(self) -> Tensor:
        """Return the whole output. Every call returns the same tensor, so in-place changes persist."""
        if self.gathered is None:
            # The first read may be a metric's, under `no_grad`, and the result is kept for the loss.
            with torch.enable_grad():
                self.gathered = self.seq.gather(self.local, dim=1)[:, : self.tokens]
        return self.gathered


def _read(output: Any) -> Any:
    return output.read() if isinstance(output, _Later) else output


class _WholeTuple(tuple[Any, ...]):
    """Outputs of several layers. Each is gathered when it is first read."""

    def __getitem__(self, index: Any) -> Any:
        selected = super().__getitem__(index)
        return tuple(map(_read, selected)) if isinstance(index, slice) else _read(selected)

    def __iter__(self) -> Iterator[Any]:
        return map(_read, super().__iter__())


class WholeOutput(OrderedDict[str, Any]):
    """Mixin for a class of outputs: outputs of the whole batch, each gathered when it is first read."""

    # transformers' outputs can be read as attributes, keys and sequences. Every way of access has to gather.
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
    # A subclass with the same name, so that the caller's `isinstance` checks and messages do not change.
    return type(kind.__name__, (WholeOutput, kind), {"__module__": kind.__module__})


class _Sum(torch.autograd.Function):
    """The sum over ranks. The gradient is summed over ranks too."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, ring: Ring) -> Tensor:
        # Backward sums too: every rank has a copy of the user's loss, and DDP averages over ranks afterwards.
        ctx.ring = ring
        return _summed(part, ring)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _summed(grad, ctx.ring), None


def _summed(x: Tensor, ring: Ring) -> Tensor:
    total = x.detach().clone()
    ring.all_reduce([total])
    return total


class NotWhole:
    """A placeholder for an output that cannot be made whole. Any use raises `UnsupportedError`."""

    def __init__(self, name: str) -> None:
        self._name = name

    def _refuse(self, *args: Any, **kwargs: Any) -> Any:
        raise UnsupportedError(
            f"{self._name} of a model over a ring is not gathered for a loss: only the loss and outputs (rows, tokens, "
            "...) are; leave it out of the loss, or train without a ring"
        )

    def __getattr__(self, name: str) -> Any:
        return self._refuse()

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        tree_map_only(cls, cls._refuse, (args, kwargs))


# Python looks up operators on the class, not through `__getattr__`.
for _operator in (
    "add radd sub rsub mul rmul truediv rtruediv pow matmul rmatmul neg abs getitem iter len bool float int lt le gt ge"
).split():
    setattr(NotWhole, f"__{_operator}__", NotWhole._refuse)


def _whole_outputs(seq: Sequence, out: Any, tokens: int) -> Any:
    """Return a model's outputs of the first `tokens` tokens of the whole batch, given those of this rank's tokens."""
    kind: Any = type(out)
    outputs = _whole_class(kind)(**out)
    # The fields are replaced after construction, because the constructor reads the first field and would gather it.
    for name, x in out.items():
        if not name.startswith("encoder_"):
            outputs[name] = _whole_output(name, seq, x, tokens)
        elif seq.encoder is not None:
            outputs[name] = _whole_output(name, seq.encoder, x, seq.encoder.length)
        else:  # a replicated encoder returns whole outputs
            outputs[name] = x
    if "logits" in getattr(type(out), "__dataclass_fields__", {}) and "logits" not in out:
        outputs["logits"] = NotWhole("logits")  # chunked_loss computes none
    return outputs


def _whole_output(name: str, seq: Sequence, x: Any, tokens: int) -> Any:
    if isinstance(x, tuple | list):
        return _WholeTuple(_whole_output(name, seq, part, tokens) for part in x)
    # The model's losses are this rank's parts of means, so the sums are the whole losses.
    if isinstance(x, Tensor) and name in ("loss", "aux_loss") and x.dim() == 0:
        return _Sum.apply(x, seq.ring)
    # Router logits are (rows * tokens, experts).
    if isinstance(x, Tensor) and x.dim() >= 2 and name != "router_logits" and x.shape[1] == seq.counts[seq.ring.rank]:
        return _Later(seq, x, tokens)
    return None if x is None else NotWhole(name)


class WholeCalls:
    """The hooks that let one model take whole batches, the same on every rank, and return whole outputs.

    Each call activates its sequence with the next of `dropout_seeds`. While `is_in_loss` returns True, a backward pass
    through the outputs raises `UnsupportedError`.
    """

    def __init__(
        self,
        ring: Ring,
        model: Any,
        layout: LayoutName | str,
        dropout_seeds: Iterator[int],
        is_in_loss: Callable[[], bool] = lambda: False,
    ) -> None:
        self.ring, self.model, self.layout, self.dropout_seeds = ring, model, layout, dropout_seeds
        self.is_in_loss = is_in_loss
        self.seq: Sequence | None = None
        self.tokens = 0
        self.depth = 0
        self.active = ExitStack()

    def attach(self, outer: nn.Module) -> list[RemovableHandle]:
        """Let `outer`, the model or its wrapper by DDP, FSDP, PEFT or a compiler, take whole batches.

        Several modules around the same model can be attached. The outermost that is called shards the batch. Returns
        the hooks.
        """
        # These hooks run before the wrapper's own, so DDP and FSDP see shards and local outputs, as without a ring.
        return [
            outer.register_forward_pre_hook(self.enter, with_kwargs=True, prepend=True),
            outer.register_forward_hook(self.leave, always_call=True),
        ]

    def _activate(self, seq: Sequence) -> AbstractContextManager[None]:
        return self.ring.activate(seq, dropout_seed=next(self.dropout_seeds))

    def enter(self, outer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Shard the inputs of a call, and activate their sequence until the call ends. A collective call."""
        # Backward calls the model again to recompute: its inputs are then shards, and its outputs local.
        if torch._C._current_graph_task_id() != -1:
            return None
        self.depth += 1
        if self.depth > 1:  # the call of a module around this one has sharded the inputs
            return None
        if args and getattr(outer, "base_model", None) is outer:  # its head passes tokens as positional inputs
            kwargs |= zip(inspect.signature(outer.forward).parameters, args, strict=False)
        elif args:
            raise InputError("positional inputs: call the model with keywords, as Trainer does")
        batch = {name: x for name, x in kwargs.items() if isinstance(x, Tensor)}
        self.seq, sharded = shard_batch(self.ring, batch, self.layout, model=self.model)
        if "shift_labels" in sharded and kwargs.get("num_items_in_batch") is None:
            labels = batch["shift_labels"] if "shift_labels" in batch else batch["labels"][:, 1:]
            sharded["num_items_in_batch"] = (labels != -100).sum()  # a mean over this batch, as in one process
        # TRL's head shifts whole labels, and then returns nothing for the last token.
        self.tokens = self.seq.length - bool(kwargs.get("fused_lm_head") and "shift_labels" not in batch)
        self.active.enter_context(self._activate(self.seq))
        return (), {**kwargs, **sharded}

    def leave(self, outer: nn.Module, args: Any, out: Any) -> Any:
        """End the activation, and make the outputs whole. A collective call."""
        if torch._C._current_graph_task_id() != -1:
            return None
        self.depth -= 1
        if self.depth > 0:
            return None
        # `always_call` runs this hook after a failure too, without an output.
        failure = sys.exc_info() if out is None else (None, None, None)
        self.active.__exit__(*failure)
        self.active = ExitStack()
        if out is None:
            return None
        if not hasattr(out, "items"):
            raise InputError("return_dict=False: outputs without names cannot be gathered; leave it out")
        assert self.seq is not None
        for x in tree_leaves([*out.values()]):
            if isinstance(x, Tensor) and x.grad_fn is not None:
                x.grad_fn.register_prehook(self._refuse_in_loss)
        return _whole_outputs(self.seq, out, self.tokens)

    def _refuse_in_loss(self, grads: Any) -> None:
        """Raise `UnsupportedError` if backward reaches this rank's outputs before the loss is complete."""
        if self.is_in_loss():
            raise UnsupportedError(
                "the loss calls torch.autograd.grad or backward through the model: over a ring, this gives each rank a "
                "part of the gradient, and only the mean over ranks is that of one process; use gradients with respect "
                "to outputs.logits or other outputs, which are whole, or train without a ring"
            )


def seeds_of_calls(ring: Ring, ring_index: int) -> Iterator[int]:
    """Return a dropout seed for each call of a model, equal on the ranks of a ring. A collective call."""
    seed = torch.tensor([torch.initial_seed() % 2**62 if ring.rank == 0 else 0], device=ring.device)
    ring.all_reduce([seed])
    return (seed_from(int(seed), ring_index, call) for call in count())


@contextmanager
def whole_calls(
    ring: Ring,
    outers: Iterable[nn.Module],
    model: Any,
    layout: LayoutName | str,
    dropout_seed: int,
    is_in_loss: Callable[[], bool] = lambda: False,
) -> Iterator[None]:
    """Return a context in which a model takes whole batches, the same on every rank, and returns whole outputs.

    Args:
        ring: The ring.
        outers: The modules that are called: the model, or its wrappers by DDP, FSDP, PEFT or a compiler.
        model: The prepared model inside them.
        layout: As in `Ring.sequence`.
        dropout_seed: As in `Ring.activate`.
        is_in_loss: While it returns True, a backward pass through the outputs raises UnsupportedError.

    Returns:
        A context manager.

    Raises:
        DisagreementError: The batches of the ranks differ.
        InputError: A batch cannot be sharded, see `shard_batch`.
    """
    calls = WholeCalls(ring, model, layout, repeat(dropout_seed), is_in_loss)
    hooks = [hook for outer in outers for hook in calls.attach(outer)]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
