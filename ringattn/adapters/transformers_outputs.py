"""What a call of a prepared model returns over a ring of several ranks: of this rank's tokens, or of whole rows.

Outputs are told apart by their shapes: those of tokens begin with the shape of the tokens that the call was given.
Guarantees: what one process would make of other ranks' tokens too is refused or left out, under whatever name.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any
from weakref import WeakKeyDictionary

from torch import Tensor, nn

from ringattn.errors import InputError, UnsupportedError

OF_THIS_RANK = "has only this rank's tokens for it"
LEAVE_OUT = (
    "leave labels out and make the loss of the logits of every token, added over ranks and divided by the number of "
    "labels of all"
)


_known: WeakKeyDictionary[nn.Module, frozenset[str]] = WeakKeyDictionary()


def know_outputs(model: nn.Module, *names: str) -> None:
    """Tell that a model makes these outputs of its tokens, and `loss` as a part of that of all ranks."""
    _known[model] = frozenset(names)


def token_shape(given: Mapping[str, Any]) -> tuple[int, ...]:
    """The shape of a call's tokens: (rows, tokens), or with choices between."""
    ids, embeds = given.get("input_ids"), given.get("inputs_embeds")
    if isinstance(ids, Tensor):
        return tuple(ids.shape)
    return tuple(embeds.shape[:-1]) if isinstance(embeds, Tensor) else ()


def check_output(model: nn.Module, out: Any, tokens: tuple[int, ...], makes_loss: bool) -> Any:
    """The output without what was made of whole rows beside it.

    `tokens`: see `token_shape`. `makes_loss`: whether its loss is this rank's part of that of the whole batch. Raises
    `InputError` on this rank where all that the model is called for would be of whole rows.
    """
    name = type(model).__name__
    if isinstance(out, tuple):
        raise InputError("return_dict=False: outputs of whole rows cannot be told from those of tokens; leave it out")
    if not hasattr(out, "items"):
        return out
    known = _known.get(model, frozenset())
    if out.get("loss") is not None and not makes_loss and "loss" not in known:
        raise UnsupportedError(
            f"{name} made its loss by itself, of labels, start_positions or whatever asked for it, and {OF_THIS_RANK}: "
            f"{LEAVE_OUT}"
        )
    left_out = {"pooler_output"} - _required(type(out))
    for of, x in out.items():
        if not isinstance(x, Tensor) or not x.is_floating_point() or of in left_out | known | {"loss"}:
            continue
        if x.dim() == 0:
            left_out.add(of)  # such as a loss of routers
        elif _is_of_rows(model, x, tokens):
            raise UnsupportedError(
                f"{name} makes {of} of a whole row, out of one of its tokens or all, and {OF_THIS_RANK}; call the "
                "model beneath it, pool seq.gather(last_hidden_state, dim=1) on every rank, and divide the loss by "
                "the ranks"
            )
    left_out = {of for of in left_out if out.get(of) is not None}
    return type(out)(**{of: x for of, x in out.items() if of not in left_out}) if left_out else out


def _required(kind: type[Any]) -> set[str]:
    """What an output of this class is never without."""
    fields = dataclasses.fields(kind) if dataclasses.is_dataclass(kind) else ()
    return {one.name for one in fields if one.default is one.default_factory is dataclasses.MISSING}


def _is_of_rows(model: nn.Module, x: Tensor, tokens: tuple[int, ...]) -> bool:
    if x.dim() > len(tokens) or x.shape[0] != tokens[0]:  # of tokens, with features, or of images
        return False
    return tuple(x.shape) != tokens or tokens[-1] in _features(model)


def _features(model: Any) -> set[int]:
    """How many numbers the heads of a model make; as many as a rank has tokens cannot be told from one a token."""
    heads = [child for child in model.children() if child is not model.base_model]
    linear = [[part for part in head.modules() if isinstance(part, nn.Linear)] for head in heads]
    return {parts[-1].out_features for parts in linear if parts}
