"""Losses of labels that are not shifted: masked language models, token classification and encoder-decoders.

Few of these models use `model.loss_function`. Most of them call torch's cross entropy, with a mean over the labels that
they get. So a model gets a rank's labels as `TokenLabels`, which only a cross entropy accepts.

Guarantees: the losses of all ranks add up to the loss of one process. A model that does anything else with its labels,
or adds a term to the loss, is refused.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ringattn.adapters.transformers.checks import LEAVE_OUT
from ringattn.errors import UnsupportedError
from ringattn.sequence import Sequence

LOSSES = ("ForMaskedLMLoss", "ForTokenClassification")
"""Names of the loss functions of transformers with one label per token, for the output at this token."""

_mean_scale: ContextVar[int] = ContextVar("ringattn_mean_scale", default=1)


@contextmanager
def scaled_means(scale: int) -> Iterator[None]:
    """Return a context in which a rank's part of a mean is multiplied by `scale`, for trainers that average losses."""
    token = _mean_scale.set(scale)
    try:
        yield
    finally:
        _mean_scale.reset(token)


def mean_scale() -> int:
    """Return the factor of `scaled_means`, or 1 outside of it."""
    return _mean_scale.get()


def loss_name(model: Any) -> str:
    """Return the name of the loss function of a model, or of the model that PEFT wraps; empty if it has none."""
    return getattr(getattr(model, "loss_function", None), "__name__", "")


def shifts_labels(model: Any) -> bool:
    """Return whether a model predicts the label of the next token. None, and unknown losses, are taken to do so.

    An encoder-decoder does not: the inputs of its decoder are the labels of the tokens before.
    """
    is_encoder_decoder = getattr(getattr(model, "config", None), "is_encoder_decoder", False)
    return loss_name(model) not in LOSSES and not is_encoder_decoder


class TokenLabels:
    """A rank's labels inside a model: they can be flattened and passed to a cross entropy, and nothing else.

    The cross entropy returns this rank's part of the mean over all ranks, and is then a collective call. A sum, which
    transformers' loss functions divide by `num_items_in_batch`, is that of this rank's labels.
    """

    def __init__(self, model: Any, seq: Sequence, labels: Tensor, losses: list[Tensor] | None = None) -> None:
        self._model, self._seq, self._labels = model, seq, labels
        self.losses: list[Tensor] = [] if losses is None else losses
        """The losses of these labels. The last of them must be the loss that the model returns."""

    def _with(self, labels: Tensor) -> TokenLabels:
        return TokenLabels(self._model, self._seq, labels, self.losses)

    @property
    def shape(self) -> torch.Size:
        return self._labels.shape

    @property
    def device(self) -> torch.device:
        return self._labels.device

    @property
    def dtype(self) -> torch.dtype:
        return self._labels.dtype

    def view(self, *shape: Any) -> TokenLabels:
        return self._with(self._labels.reshape(*shape))

    reshape = view

    def flatten(self) -> TokenLabels:
        return self._with(self._labels.flatten())

    def contiguous(self) -> TokenLabels:
        return self

    def long(self) -> TokenLabels:
        return self._with(self._labels.long())

    def to(self, *args: Any, **kwargs: Any) -> TokenLabels:
        return self._with(self._labels.to(*args, **kwargs))

    def refused(self, what: str) -> UnsupportedError:
        """Return the error of a model that uses its labels in another way."""
        remedy = LEAVE_OUT
        if getattr(self._model.config, "sparse_prediction", False):  # ModernBERT selects the tokens with labels
            remedy = "set config.sparse_prediction=False"
        return UnsupportedError(
            f"{type(self._model).__name__} computes its loss in its own way ({what}), and a rank has only its own "
            f"labels for it, which a model can only pass to a cross entropy: {remedy}"
        )

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise self.refused(f"labels.{name}")

    def _refuse(self, *_: object) -> Any:
        raise self.refused("an operator on labels")

    __getitem__ = __setitem__ = __len__ = __iter__ = __bool__ = __invert__ = __neg__ = _refuse
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __and__ = __rand__ = __or__ = _refuse
    __lt__ = __le__ = __gt__ = __ge__ = __eq__ = __ne__ = _refuse
    __hash__ = object.__hash__

    @classmethod
    @torch.compiler.disable
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Compute a cross entropy. Raise `UnsupportedError` for every other torch function of labels."""
        if function is F.cross_entropy:
            return _cross_entropy(*args, **(kwargs or {}))
        labels = next(x for x in [*args, *(kwargs or {}).values()] if isinstance(x, cls))
        raise labels.refused(getattr(function, "__name__", str(function)))


def _cross_entropy(
    input: Tensor, target: Any, weight: Any = None, size_average: Any = None, ignore_index: int = -100,
    reduce: Any = None, reduction: str = "mean", label_smoothing: float = 0.0,
) -> Tensor:  # fmt: skip
    """Compute torch's cross entropy, whose parameters these are, of `TokenLabels`."""
    if not isinstance(target, TokenLabels):
        raise UnsupportedError("labels are the predictions of a cross entropy; leave them out of the call")
    if weight is not None or (size_average, reduce) != (None, None) or reduction not in ("mean", "sum"):
        raise target.refused("a weighted cross entropy, or one for each token")
    labels = target._labels
    total = F.cross_entropy(input, labels, ignore_index=ignore_index, reduction="sum", label_smoothing=label_smoothing)
    if reduction == "sum":
        return total  # the loss functions of transformers divide it by the number of all labels
    count = (labels != ignore_index).sum()
    target._seq.ring.all_reduce([count])
    loss = total * mean_scale() / count
    target.losses.append(loss)
    return loss
