"""The calls of a model class: whole batches with the arguments that its `forward` takes.

Guarantees: the same seed and class give the same cases.
"""

from __future__ import annotations

import inspect
import random
import zlib
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from ringattn.adapters.transformers.token_labels import shifts_labels
from tests.fuzz.models.rules import FIRST_SPECIAL, TYPES

ROWS, TOKENS = 2, 14
CHOICES = 2
DOCUMENTS = [0, 3, 9, TOKENS]

PER_TOKEN = {
    "token_type_ids": TYPES, "mm_token_type_ids": TYPES, "langs": TYPES, "lang_ids": TYPES, "task_type_ids": TYPES,
    "input_shape_ids": 20, "input_pronunciation_ids": 20, "global_attention_mask": 2, "moe_mm_token_type_ids": TYPES,
    "decoder_input_ids": FIRST_SPECIAL, "sequence_id": 1,
}  # fmt: skip
"""Arguments of integers, (rows, tokens), with these exclusive upper bounds."""

PER_ROW = {
    "start_positions": TOKENS, "end_positions": TOKENS, "next_sentence_label": 2, "sentence_order_label": 2,
    "lengths": 0,
}  # fmt: skip
"""Arguments of integers, (rows,), with these exclusive upper bounds."""

OPTIONS: dict[str, Any] = {
    "use_cache": True, "output_hidden_states": True, "output_attentions": True, "return_dict": False,
    "output_router_logits": True, "logits_to_keep": 1, "return_loss": True,
}  # fmt: skip
"""Arguments that request other outputs."""

COMMON = {"input_ids", "attention_mask", "position_ids", "inputs_embeds", "labels", "bbox", "self", "kwargs"}


ALWAYS: tuple[tuple[str, ...], ...] = ((), ("decoder_input_ids",), ("pixel_values",))
"""Arguments that some classes require."""


@dataclass
class Case:
    """One call of a model.

    `batch`: inputs for `shard_batch`. `beside`: other tensors per token, which are sharded directly. `rest`: arguments
    that are passed unsharded.
    """

    name: str
    batch: dict[str, Tensor]
    beside: dict[str, Tensor] = field(default_factory=dict)
    rest: dict[str, Any] = field(default_factory=dict)
    documents: list[int] | None = None
    layout: str = "zigzag"
    is_told: bool = True
    trains: bool = True

    @property
    def real(self) -> Tensor:
        """A mask of the tokens that are not padding, (rows, tokens)."""
        mask = self.batch.get("attention_mask")
        tokens_ = self.batch.get("input_ids", self.batch.get("inputs_embeds"))
        assert tokens_ is not None
        return torch.ones(len(tokens_), TOKENS, dtype=torch.bool) if mask is None else mask.bool()

    def labels_count(self, model: Any) -> int | None:
        """Return the number of labels that a model predicts, or None without labels of tokens."""
        labels = self.batch.get("labels")
        if labels is None or labels.dim() != 2:
            return None
        return int((labels[:, 1:] if shifts_labels(model) else labels).ne(-100).sum())


def cases_of(kind: type[Any], model: Any, seed: int, always: tuple[str, ...] = ()) -> list[Case]:
    """Return the usual cases of a class, one per input and option of its `forward`, and a few random cases.

    `always`: names of arguments that every case has if `forward` takes them.
    """
    name = kind.__name__
    draw = random.Random(zlib.crc32(f"{seed} {name}".encode()))
    takes = inspect.signature(kind.forward).parameters
    make = _CaseMaker(name, model, takes, always, torch.Generator().manual_seed(draw.randrange(2**31)))
    cases = [
        make("plain"),
        make("padded right", padding="right"),
        make("padded left", padding="left"),
        make("packed, position_ids", packing="position_ids"),
        make("packed, cu_seq_lens_q", packing="cu_seq_lens_q"),
        make("position_ids", positions="places"),
    ]
    if "labels" in takes:
        cases += [make("labels", labels=True), make("labels, padded left", labels=True, padding="left"),
                  make("labels, packed", labels=True, packing="position_ids")]  # fmt: skip
    if "inputs_embeds" in takes and make.embedded is not None:
        cases.append(make("inputs_embeds", embeds=True))
    spans = [name_ for name_ in ("start_positions", "end_positions") if name_ in takes]
    cases += [make(name_, extra=(name_,)) for name_ in (*PER_TOKEN, *PER_ROW) if name_ in takes and name_ not in spans]
    if spans:
        cases.append(make("start_positions", extra=tuple(spans)))
    cases += [
        make(name_, options=(name_,)) for name_ in OPTIONS if name_ in takes or name_ in ("use_cache", "return_dict")
    ]
    per_token = [name_ for name_ in PER_TOKEN if name_ in takes]
    for number in range(3):
        cases.append(
            make(
                f"drawn {number}",
                padding=draw.choice(["", "right", "left", "both"]),
                positions=draw.choice(["", "", "", "places", "real", "shifted"]),
                labels="labels" in takes and draw.random() < 0.4,
                embeds="inputs_embeds" in takes and make.embedded is not None and draw.random() < 0.2,
                extra=tuple(draw.sample(per_token, min(len(per_token), draw.randrange(2)))),
                options=tuple(draw.sample(["use_cache", "output_hidden_states"], draw.randrange(3))),
            )
        )
    for case in cases:
        case.layout = draw.choice(["zigzag", "contiguous"])
        case.is_told = draw.random() < 0.8
        case.trains = draw.random() < 0.5
    return cases


def not_given(kind: type[Any]) -> list[str]:
    """Return the arguments of `forward` that no case has."""
    takes = inspect.signature(kind.forward).parameters
    return [name for name in takes if name not in {*COMMON, *PER_TOKEN, *PER_ROW, *OPTIONS}]


class _CaseMaker:
    """A factory for the cases of one class."""

    def __init__(self, name: str, model: Any, takes: Any, always: tuple[str, ...], generator: Any) -> None:
        self.name, self.model, self.takes, self.generator = name, model, takes, generator
        self.always = tuple(name_ for name_ in always if name_ in takes)
        self.embedded = _embedded(model)
        eos = getattr(model.config.get_text_config(decoder=True), "eos_token_id", None)
        self.eos = eos if isinstance(eos, int) and eos < FIRST_SPECIAL else 2

    def __call__(
        self, name: str, padding: str = "", packing: str = "", positions: str = "", labels: bool = False,
        embeds: bool = False, extra: tuple[str, ...] = (), options: tuple[str, ...] = (),
    ) -> Case:  # fmt: skip
        rows = 1 if packing else ROWS
        choices = "MultipleChoice" in self.name
        shape = (rows, CHOICES, TOKENS) if choices else (rows, TOKENS)
        tokens = self._draw(shape, 3, FIRST_SPECIAL)
        tokens[..., -1] = self.eos  # some heads search for the end token
        mask = _mask(rows, padding)
        case = Case(name, {"input_ids": tokens}, documents=DOCUMENTS if packing else None)
        if mask is not None:
            pad = getattr(self.model.config.get_text_config(decoder=True), "pad_token_id", None)
            pad = 0 if pad is None else int(pad)
            last = TOKENS - 1 - mask.flip(1).int().argmax(1)
            tokens[torch.arange(rows), ..., last] = self.eos
            case.batch["input_ids"] = torch.where(mask[:, None] if choices else mask, tokens, pad)
            case.batch["attention_mask"] = mask[:, None].expand(shape).long() if choices else mask.long()
        real = torch.ones(rows, TOKENS, dtype=torch.bool) if mask is None else mask
        if embeds and self.embedded is not None:
            del case.batch["input_ids"]
            case.batch["inputs_embeds"] = 0.3 * torch.randn(
                *shape, self.embedded, generator=self.generator, dtype=torch.float64
            )
        self._place(case, real, packing, positions)
        if labels:
            case.batch["labels"] = self._labels(rows, real, case)
        for argument in {*extra, *self.always}:
            if argument in PER_TOKEN:
                target = case.batch if argument in ("token_type_ids", "decoder_input_ids") else case.beside
                target[argument] = self._draw(shape, 0, PER_TOKEN[argument])
            elif argument == "pixel_values":
                side = getattr(getattr(self.model.config, "vision_config", self.model.config), "image_size", 32)
                pixels = torch.randn(rows, 3, side, side, generator=self.generator, dtype=torch.float64)
                case.rest[argument] = pixels
            else:
                case.rest[argument] = (
                    real.sum(1) if argument == "lengths" else self._draw((rows,), 0, PER_ROW[argument])
                )
        if "bbox" in self.takes:
            corners = self._draw((*shape, 2), 0, 40)
            case.beside["bbox"] = torch.cat([corners, corners + self._draw((*shape, 2), 0, 20)], -1)
        case.rest |= {argument: OPTIONS[argument] for argument in options}
        return case

    def _draw(self, shape: tuple[int, ...], least: int, stop: int) -> Tensor:
        return torch.randint(least, max(stop, least + 1), shape, generator=self.generator)

    def _place(self, case: Case, real: Tensor, packing: str, positions: str) -> None:
        positions_ = torch.arange(TOKENS)[None]
        if packing == "position_ids":
            case.batch["position_ids"] = torch.cat([torch.arange(b - a) for a, b in pairwise(DOCUMENTS)])[None]
        elif packing:
            case.batch["cu_seq_lens_q"] = torch.tensor(DOCUMENTS, dtype=torch.int32)
        elif positions == "real":
            case.batch["position_ids"] = (real.cumsum(1) - 1).clamp(min=0)
        elif positions:
            case.batch["position_ids"] = positions_.expand(len(real), -1) + (2 if positions == "shifted" else 0)

    def _labels(self, rows: int, real: Tensor, case: Case) -> Tensor:
        if any(word in self.name for word in ("SequenceClassification", "MultipleChoice", "NextSentence")):
            return self._draw((rows,), 0, 2)
        few = "TokenClassification" in self.name or "PreTraining" in self.name
        labels = self._draw((rows, TOKENS), 0 if few else 3, 2 if few else FIRST_SPECIAL)
        labels[~(real & real.roll(1, 1))] = -100
        labels[:, 5] = -100
        if case.documents is not None:
            labels[:, case.documents[:-1]] = -100
        return labels


def _mask(rows: int, padding: str) -> Tensor | None:
    if not padding:
        return None
    mask = torch.ones(rows, TOKENS, dtype=torch.bool)
    if padding in ("left", "both"):
        mask[0, :3] = False
    if padding in ("right", "both"):
        mask[-1, -4:] = False
    return mask


def _embedded(model: Any) -> int | None:
    """Return the size of a token's embedding, or None."""
    try:
        table = model.get_input_embeddings()
        return int(table.weight.shape[1])
    except Exception:  # the model has no input embeddings, or they are not a table
        return None
