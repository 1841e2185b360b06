"""Places that a model of transformers counts by itself where it is given no position_ids: what they are for whole rows.

Most models count 0, 1, ...; RoBERTa's family starts behind its padding index and skips padding, OPT counts the real
tokens of its mask. Which places these are is asked of the model: the forward pass of a copy runs as far as the table of
its positions, every table it passes on the way replaced by zeros, and what it would look up there is what is wanted.
Guarantees: no weight is read, nothing is computed beyond the places, and the model stays as it was.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ringattn.adapters.transformers_checks import may_count_by_itself
from ringattn.adapters.transformers_probe import ProbeEndedError, probe_copy
from ringattn.errors import UnsupportedError
from ringattn.runtime.activation import activate

_PROBE_TOKENS = 8
_COMPUTING = (F.linear, F.layer_norm, F.dropout, F.conv1d, torch.matmul)
"""A model has looked up its positions before the first of these, and before its first layer."""


class _Counting(NamedTuple):
    """A model whose places are not 0, 1, ...: which look-up they are, and what it adds to those that it is given."""

    lookup: int
    """From the last one, -1, since a model that is given inputs_embeds looks up no tokens."""
    added: int


_known: WeakKeyDictionary[nn.Module, _Counting | None] = WeakKeyDictionary()


class _Lookups(TorchFunctionMode):
    """What is looked up in tables, of tokens and others, up to the first operation that computes."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[Tensor] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _COMPUTING:
            raise ProbeEndedError
        if func is not F.embedding:
            return func(*args, **(kwargs or {}))
        places, table = args[:2]
        self.found.append(places)
        return torch.zeros((), dtype=table.dtype, device=places.device).expand(*places.shape, table.shape[-1])


def counts_by_itself(model: Any) -> bool:
    """Whether the places that `model` makes of whole rows are others than 0, 1, ... in every row."""
    if model not in _known:
        _known[model] = _counting(model)
    return _known[model] is not None


def own_places(model: Any, given: dict[str, Tensor], documents: Sequence[int] | None = None) -> Tensor | None:
    """The position_ids, (rows, tokens), with which `model` computes what it does without, or None for 0, 1, ....

    `given`: input_ids or inputs_embeds, and attention_mask where there is one, of whole rows. `documents`: cumulative
    lengths; each is then a row of its own. Raises `UnsupportedError` for a model that may make others, and cannot be
    asked.
    """
    if not counts_by_itself(model):
        return None
    counting = _known[model]
    assert counting is not None
    tokens = given["input_ids" if "input_ids" in given else "inputs_embeds"].shape[1]
    cuts = documents or (0, tokens)
    parts = []
    for start, stop in pairwise(cuts):
        found = _lookups(model, {name: x[:, start:stop] for name, x in given.items()})
        if len(found) < -counting.lookup:
            return None  # embeddings of ESM hold their places already, and it looks up none
        parts.append(found[counting.lookup] - counting.added)
    return torch.cat(parts, 1)


def _counting(model: Any) -> _Counting | None:
    """Asked with rows that are padded in their tokens, in their mask, in both and not at all."""
    pad = getattr(model.config.get_text_config(decoder=True), "pad_token_id", None)
    pad = 1 if pad is None else pad
    padding = torch.zeros(4, _PROBE_TOKENS, dtype=torch.bool)
    padding[1:, :2], padding[1:, -1] = True, True
    in_tokens, in_mask = padding.clone(), padding.clone()
    in_tokens[2], in_mask[3] = False, False
    device = next(model.parameters()).device
    device = torch.device("cpu") if device.type == "meta" else device
    rows = {"input_ids": torch.where(in_tokens, pad, 5 if pad != 5 else 6), "attention_mask": (~in_mask).long()}
    rows = {name: x.to(device) for name, x in rows.items()}
    plain = torch.arange(_PROBE_TOKENS, device=device).expand(4, -1)
    told, found = _lookups(model, {**rows, "position_ids": plain}), _lookups(model, rows)
    if len(told) != len(found):
        return None
    for number, (given, places) in enumerate(zip(told, found, strict=True)):
        added = int(given.flatten()[0])
        if given.dim() == 2 and torch.equal(given.expand(4, -1), plain + added):  # the table of places
            is_plain = torch.equal(places.expand(4, -1)[~in_mask], given.expand(4, -1)[~in_mask])
            return None if is_plain else _Counting(number - len(found), added)
    return None


def _lookups(model: Any, given: dict[str, Tensor]) -> list[Tensor]:
    """What a forward pass looks up in each of its tables, one after the other."""
    copied = probe_copy(model)
    with torch.random.fork_rng(devices=[]), torch.no_grad(), activate(None), _Lookups() as lookups:
        try:
            copied(**given)
        except ProbeEndedError:
            pass
        except Exception as error:
            if may_count_by_itself(type(model).__mro__):
                raise UnsupportedError(
                    f"{type(model).__name__} may count places by its padding or mask, and cannot be asked for "
                    "them with input_ids and attention_mask alone; take another model"
                ) from error
            return []  # what cannot be called like this makes no places by itself
    return lookups.found
