"""Batches of a Trainer divided into micro-batches: every token and label once, under the limit; or refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("transformers", reason="transformers is not installed")
pytest.importorskip("accelerate", reason="accelerate is not installed, which Trainer needs")

import transformers
from transformers import DataCollatorWithFlattening

from ringattn import InputError, Ring
from ringattn.adapters.transformers.micro_batches import micro_batches, pairs_per_token
from ringattn.adapters.transformers.trainer import RingTrainerMixin
from ringattn.errors import UnsupportedError
from ringattn.planner.cluster import REFERENCE
from ringattn.testing import run_ranks
from tests.adapters.encoder_decoders import build
from tests.adapters.models import tiny_model
from tests.adapters.ranks import refused
from tests.adapters.test_transformers_trainer import build_trainer
from tests.adapters.trainer import left_padded, padded, texts

PACKED = DataCollatorWithFlattening()(texts()[:5])
PADDED = padded(texts()[:5])


@pytest.mark.parametrize("batch", [PACKED, PADDED, {**PADDED, "position_ids": torch.arange(17).expand(5, 17)}])
def test_micro_batches_have_every_token_and_label_once(batch: dict[str, Tensor]) -> None:
    """The texts have 9, 11, ..., 17 tokens. The first token of a text has no label in a packed row."""

    def body(ring: Ring) -> list[dict[str, Tensor]]:
        return micro_batches(ring, batch, 12, 5.0)

    first, *others = run_ranks(2, body)
    seen = []
    for micro in first:
        assert micro["input_ids"].shape[1] <= 24
        for number in range(int(micro["seq_idx"].max()) + 1):
            text = micro["seq_idx"] == number
            ids, length = micro["input_ids"][text].tolist(), int(text.sum())
            assert micro["position_ids"][text].tolist() == list(range(length))
            assert micro["labels"][text].tolist() == [-100, *ids[1:]]
            seen.append(ids)
    assert sorted(seen, key=len) == [text["input_ids"] for text in texts()[:5]]
    for ranks_batch in others:
        for micro, same in zip(ranks_batch, first, strict=True):
            assert micro.keys() == same.keys() and all(torch.equal(micro[name], same[name]) for name in same)


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "padding on the left": (left_padded(texts()[:3]), r"padded on the right, or one packed row .*padding_side"),
    "labels of padding": ({**PADDED, "labels": PADDED["input_ids"]}, r"the padding of a row has labels; set them to"),
    "first labels": ({**PACKED, "labels": PACKED["input_ids"]}, r"documents begin with labels, at \[9, 20, 33, 48\]"),
    "images": (
        {**PADDED, "pixel_values": torch.zeros(1)},
        r"max_tokens_per_rank divides batches of input_ids, .*got a",
    ),
    "embeddings": ({"inputs_embeds": torch.zeros(1, 4, 8)}, r"max_tokens_per_rank divides .* got inputs_embeds"),
    "a long text": (padded(texts()[-1:]), r"sample 0 has 31 tokens, .* raise max_tokens_per_rank to 16"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_batches_that_are_refused(case: str) -> None:
    batch, message = REFUSED[case]
    refused(lambda seq: micro_batches(seq.ring, batch, 12, 5.0), message)


def test_the_time_of_a_token_follows_from_the_model() -> None:
    """Linear weights by hand: projections of q, k, v and the output, three of the feed-forward, and the logits."""
    attention, feed, logits = 32 * 32 * 2 + 32 * 16 * 2, 3 * 32 * 48, 64 * 32
    pair = 14 * 4 * 8 / 6
    llama = tiny_model("llama", "eager")
    assert pairs_per_token(llama, REFERENCE) == pytest.approx((2 * (attention + feed) + logits) / (2 * pair))
    windowed = tiny_model("gemma2", "eager")  # its embedding is tied, and one of two layers has a window
    assert pairs_per_token(windowed, REFERENCE) == pytest.approx((2 * (attention + feed) + logits) / pair)
    routed = tiny_model("mixtral", "eager")
    total, active = routed.config.num_local_experts, routed.config.num_experts_per_tok
    weights = 2 * (attention + active * feed + total * 32) + logits
    assert pairs_per_token(routed, REFERENCE) == pytest.approx(weights / (2 * pair))


@pytest.mark.slow
def test_a_trainer_divides_each_batch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each batch has four texts; gradients are reduced once for each batch."""
    with Ring() as ring:
        options = {"per_device_train_batch_size": 4, "max_steps": 2, "logging_steps": 1}
        whole, divided = (
            build_trainer(tmp_path, ring, args=options, model=tiny_model("llama", "eager"), max_tokens_per_rank=limit)
            for limit in (None, 40)
        )
        seen, inner, deferred, no_sync = [], ring.activate, [], divided.accelerator.no_sync
        whole.train()
        monkeypatch.setattr(ring, "activate", lambda seq, **others: seen.append(seq) or inner(seq, **others))
        monkeypatch.setattr(divided.accelerator, "no_sync", lambda model: deferred.append(model) or no_sync(model))
        divided.train()
    assert all(max(seq.counts) <= 40 and seq.layout.name == "documents" for seq in seen)
    assert len(seen) > 2 and len(deferred) == len(seen) - 2
    losses, expected = (
        [entry["loss"] for entry in trainer.state.log_history if "loss" in entry] for trainer in (divided, whole)
    )
    assert losses == pytest.approx(expected, rel=1e-5)


class OwnLoss(transformers.Trainer):
    def compute_loss(self, model: Any, inputs: Any, **others: Any) -> Any:
        return model(**inputs).loss ** 2


class Means(transformers.Trainer):
    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.model_accepts_loss_kwargs = False


TRAINERS: dict[str, tuple[dict[str, Any], type, str]] = {
    "layout": ({"layout": "zigzag"}, transformers.Trainer, r"layout='zigzag' was passed; leave layout out"),
    "own loss": ({}, OwnLoss, r"may not be a sum over samples"),
    "mean": ({}, Means, r"the mean over each batch, because model_accepts_loss_kwargs is False"),
    "routed": (
        {"model": "mixtral"},
        transformers.Trainer,
        r"a router loss is that of a whole batch; set output_router",
    ),
    "pair": ({"model": "t5"}, transformers.Trainer, r"is not a causal language model"),
}


@pytest.mark.parametrize("case", TRAINERS)
def test_trainers_that_cannot_divide_batches(case: str, tmp_path: Path) -> None:
    options, kind, message = TRAINERS[case]
    options = dict(options)
    if "model" in options:
        options["model"] = build("T5ForConditionalGeneration") if case == "pair" else tiny_model("mixtral", "eager")
    with Ring() as ring, pytest.raises(UnsupportedError, match=rf"^max_tokens_per_rank=40: .*{message}"):
        build_trainer(tmp_path, ring, type("Ours", (RingTrainerMixin, kind), {}), max_tokens_per_rank=40, **options)


def test_a_trainer_of_several_rings_cannot_divide_batches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RingTrainerMixin, "_rings", lambda self: (2, 0))
    with Ring() as ring, pytest.raises(UnsupportedError, match=r"there are 2 rings, .*; pass a ring of all processes"):
        build_trainer(tmp_path, ring, max_tokens_per_rank=40)


def test_a_limit_that_is_no_number_of_tokens(tmp_path: Path) -> None:
    with Ring() as ring, pytest.raises(InputError, match=r"max_tokens_per_rank must be a positive integer or None"):
        build_trainer(tmp_path, ring, max_tokens_per_rank=0).train()
