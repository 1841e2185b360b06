"""Batches for models of transformers: how they are sharded over a ring, and which are refused on all ranks."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("transformers", reason="transformers is not installed")

from ringattn import DisagreementError, Ring, Sequence
from ringattn.adapters.transformers import prepare, shard_batch
from ringattn.testing import run_ranks
from tests.adapters.models import tiny_model
from tests.adapters.ranks import far_from_one, refused, restarting

CUTS = [0, 5, 12]
IDS, PLACES = torch.arange(1, 13)[None], restarting(CUTS)
MARKS = torch.repeat_interleave(torch.tensor(CUTS).diff())[None]
ONES, RIGHT = torch.ones_like(IDS), (torch.arange(12) < 9).long()[None]
ROWS = torch.arange(24).reshape(2, 12)


def refuses(match: str, **batch: Any) -> None:
    refused(lambda seq: shard_batch(seq.ring, {"input_ids": IDS, **batch}), match)


def test_a_batch_is_sharded_with_its_documents_and_labels() -> None:
    labels = torch.where(PLACES == 0, -100, IDS)
    whole = {"input_ids": IDS, "position_ids": PLACES, "labels": labels, "max_length_q": 7}

    def body(ring: Ring) -> None:
        seq, shards = shard_batch(ring, whole, layout="zigzag")
        assert seq.documents == tuple(CUTS) and shards["max_length_q"] == 7
        assert torch.equal(shards["position_ids"], seq.shard(PLACES))
        following = torch.tensor([[2, 3, 4, 5, -100, 7, 8, 9, 10, 11, 12, -100]])
        assert torch.equal(seq.gather(shards["shift_labels"]), following)
        assert shards["labels"] is shards["shift_labels"]
        rows = {"input_ids": IDS.repeat(2, 1), "position_ids": torch.arange(12).repeat(2, 1)}
        assert shard_batch(ring, rows)[0].documents is None

    run_ranks(2, body)


def test_ways_to_tell_of_documents() -> None:
    left = ONES.clone()
    left[:, :2] = 0

    def body(ring: Ring) -> None:
        for inputs in ({"cu_seq_lens_q": torch.tensor(CUTS)}, {"position_ids": PLACES, "attention_mask": ONES},
                      {"seq_idx": MARKS}, {"position_ids": PLACES, "seq_idx": MARKS}):  # fmt: skip
            seq, shards = shard_batch(ring, {"input_ids": IDS, **inputs})
            assert seq.documents == tuple(CUTS) and torch.equal(shards["position_ids"], seq.shard(PLACES))
        counted = torch.arange(12)[None] - 2
        seq, shards = shard_batch(ring, {"input_ids": IDS, "position_ids": counted, "attention_mask": left})
        assert seq.documents is None and torch.equal(shards["position_ids"], seq.shard(counted))

    run_ranks(2, body)


@pytest.mark.parametrize(
    ("match", "batch"),
    [
        ("neither those of whole rows nor of documents", {"input_ids": ROWS, "position_ids": PLACES.repeat(2, 1)}),
        ("cannot shard the inputs pixels", {"pixels": IDS}),
        ("position_ids with a padded attention_mask", {"position_ids": PLACES, "attention_mask": RIGHT}),
        ("define different documents", {"position_ids": PLACES, "seq_idx": ONES.cumsum(1) // 4}),
        ("define different documents", {"position_ids": PLACES, "cu_seq_lens_q": torch.tensor([0, 12])}),
        ("define different documents", {"position_ids": PLACES, "seq_idx": torch.zeros_like(IDS)}),
        (re.escape("labels has shape (2,)"), {"input_ids": ROWS, "labels": torch.tensor([0, 1])}),
        (re.escape("labels has shape (2, 3)"), {"input_ids": ROWS, "labels": ROWS[:, :3]}),
        (re.escape("input_ids has shape (2, 3, 4)"), {"input_ids": ROWS.reshape(2, 3, 4)}),
        (re.escape("attention_mask has shape (2, 13)"), {"input_ids": ROWS, "attention_mask": torch.ones(2, 13)}),
        (re.escape("position_ids has shape (1, 11)"), {"input_ids": ROWS, "position_ids": torch.arange(11)[None]}),
        (r"documents begin with labels, at \[5\]: .* set these labels to -100", {"labels": IDS, "seq_idx": MARKS}),
        ("begin with labels, at", {"labels": IDS, "position_ids": PLACES}),
    ],
)
def test_batches_that_cannot_be_sharded(match: str, batch: dict[str, Tensor]) -> None:
    refuses(match, **batch)


def test_embeddings_without_numbers() -> None:
    wrong = {"inputs_embeds": ROWS.double()}
    refused(lambda seq: shard_batch(seq.ring, wrong), r"inputs_embeds has shape \(2, 12\)")


def test_batches_that_differ_between_ranks() -> None:
    for name in ("input_ids", "labels", "attention_mask", "pixels"):

        def call(seq: Sequence, name: str = name) -> Any:
            return shard_batch(seq.ring, {"input_ids": IDS, name: (IDS + seq.ring.rank).bfloat16()})

        refused(call, f"different batches, {name} differ; every rank", DisagreementError)
    refused(lambda seq: shard_batch(seq.ring, {"input_ids": IDS, **({"pixels": IDS} if seq.ring.rank else {})}),
            "different batches, pixels differ")  # fmt: skip


def test_documents_that_begin_without_a_label() -> None:
    """Packed documents are exact if their first tokens have no label.

    One process would predict such a label from the last token of the previous document, the ring would not.
    """
    cuts = [0, 4, 9, 15, 20, 26]
    ids = torch.randint(3, 64, (1, cuts[-1]), generator=torch.Generator().manual_seed(1))
    places = restarting(cuts)
    batch = {"input_ids": ids, "labels": torch.where(places == 0, -100, ids), "position_ids": places}
    assert far_from_one(lambda: tiny_model("llama", "eager"), batch) < 1e-9


def test_fewer_tokens_than_ranks() -> None:
    """A batch with fewer tokens than ranks is refused on all ranks; none waits for a rank without tokens."""
    refuses("rank 1 has no token of Sequence.1 tokens", input_ids=torch.ones(2, 1, dtype=torch.int64))
    pair = {"input_ids": torch.ones(2, 2, dtype=torch.int64)}
    assert run_ranks(2, lambda ring: shard_batch(ring, pair)[0].counts) == [(1, 1)] * 2


@pytest.mark.parametrize("side", ["left", "right"])
def test_labels_that_padding_predicts(side: str) -> None:
    """Labels that are predicted from padded positions are refused.

    Collators make them if the tokenizer pads on the left, or if they keep the labels of padding.
    """
    ids = torch.arange(3, 15).reshape(1, 12).repeat(2, 1)
    mask = torch.ones_like(ids)
    row, token = (1, 4) if side == "left" else (0, 9)
    mask[row, slice(token + 1) if side == "left" else slice(token, None)] = 0
    labels = ids.masked_fill(mask == 0, -100) if side == "left" else ids.clone()
    says = (
        rf"row {row} has a label that is predicted from a padded position, token {token}, .* to -100: labels\[:, 1:\]"
    )
    refuses(says, input_ids=ids, attention_mask=mask, labels=labels)
    shifted = torch.nn.functional.pad(labels, (0, 1), value=-100)[:, 1:]
    inputs = {"input_ids": ids, "attention_mask": mask, "shift_labels": shifted}
    refuses(says, **inputs)

    def call(seq: Sequence) -> Any:
        seq = seq.ring.sequence(12)
        shards = {name: seq.shard(x) for name, x in inputs.items()}
        shards |= {"labels": shards["shift_labels"], "position_ids": seq.positions()[None].expand(2, -1)}
        with seq.ring.activate(seq):
            return prepare(tiny_model("llama", "eager"))(**shards, num_items_in_batch=20)

    refused(call, "shift_labels has labels at padded positions of attention_mask")
    labels[:, 1:][mask[:, :-1] == 0] = -100
    run_ranks(2, lambda ring: shard_batch(ring, {"input_ids": ids, "attention_mask": mask, "labels": labels}))
