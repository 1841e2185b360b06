"""Batches for models of transformers: how they lie over a ring, and which are refused on all ranks."""

from __future__ import annotations

import re
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("transformers", reason="transformers is not installed")

from ringattn import DisagreementError, Ring, Sequence
from ringattn.adapters import transformers as adapter
from ringattn.adapters.transformers import shard_batch
from ringattn.testing import run_ranks
from tests.adapters.models import tiny_model
from tests.adapters.test_transformers_refusals import refused


def test_a_batch_is_sharded_with_its_documents_and_labels() -> None:
    tokens, cuts = torch.arange(1, 13)[None], [0, 5, 12]
    places = torch.cat([torch.arange(5), torch.arange(7)])[None]
    labels = torch.where(places == 0, -100, tokens)
    whole = {"input_ids": tokens, "position_ids": places, "labels": labels, "max_length_q": 7}

    def body(ring: Ring) -> None:
        seq, mine = shard_batch(ring, whole, layout="zigzag")
        assert seq.documents == tuple(cuts) and mine["max_length_q"] == 7
        assert torch.equal(mine["position_ids"], seq.shard(places))
        following = torch.tensor([[2, 3, 4, 5, -100, 7, 8, 9, 10, 11, 12, -100]])
        assert torch.equal(seq.gather(mine["shift_labels"]), following)
        assert mine["labels"] is mine["shift_labels"]
        cu_seq_lens = shard_batch(ring, {"input_ids": tokens, "cu_seq_lens_q": torch.tensor(cuts)})[0]
        assert cu_seq_lens.documents == tuple(cuts)
        rows = {"input_ids": tokens.repeat(2, 1), "position_ids": torch.arange(12).repeat(2, 1)}
        assert shard_batch(ring, rows)[0].documents is None

    run_ranks(2, body)


def test_batches_that_cannot_be_sharded() -> None:
    tokens = torch.arange(12)[None]
    places = torch.cat([torch.arange(5), torch.arange(7)])[None]
    both = {"input_ids": tokens.repeat(2, 1), "position_ids": places.repeat(2, 1)}
    refused(lambda ring, seq: shard_batch(ring, both), "neither those of whole rows nor of documents")
    refused(lambda ring, seq: shard_batch(ring, {"input_ids": tokens, "pixels": tokens}), "how pixels lies over ranks")
    for name in ("input_ids", "labels", "attention_mask", "pixels"):

        def call(ring: Ring, seq: Sequence, name: str = name) -> Any:
            return shard_batch(ring, {"input_ids": tokens, name: (tokens + ring.rank).bfloat16()})

        refused(call, f"different batches, {name} differ; every rank", DisagreementError)
    more = {"input_ids": tokens, "pixels": tokens}
    differ = "different batches, pixels differ"
    refused(lambda ring, seq: shard_batch(ring, more if ring.rank else {"input_ids": tokens}), differ)


ROWS = torch.arange(24).reshape(2, 12)


@pytest.mark.parametrize(
    ("wrong", "given"),
    [
        ("labels of shape (2,)", {"input_ids": ROWS, "labels": torch.tensor([0, 1])}),
        ("labels of shape (2, 3)", {"input_ids": ROWS, "labels": ROWS[:, :3]}),
        ("input_ids of shape (2, 3, 4)", {"input_ids": ROWS.reshape(2, 3, 4)}),
        ("inputs_embeds of shape (2, 12)", {"inputs_embeds": ROWS.double()}),
        ("attention_mask of shape (2, 13)", {"input_ids": ROWS, "attention_mask": torch.ones(2, 13)}),
        ("position_ids of shape (1, 11)", {"input_ids": ROWS, "position_ids": torch.arange(11)[None]}),
    ],
)
def test_inputs_that_are_not_of_rows_and_tokens(wrong: str, given: dict[str, Tensor]) -> None:
    """Classes of rows, choices, other lengths."""
    refused(lambda ring, seq: shard_batch(ring, given), re.escape(wrong))


def test_documents_that_begin_with_a_label() -> None:
    """One process asks the last token of the document before for it, the ring cannot: its loss would be smaller."""
    cuts = [0, 4, 9, 15, 20, 26]
    tokens = torch.randint(3, 64, (1, cuts[-1]), generator=torch.Generator().manual_seed(1))
    told = {
        "position_ids": torch.cat([torch.arange(stop - start) for start, stop in pairwise(cuts)])[None],
        "cu_seq_lens_q": torch.tensor(cuts),
        "seq_idx": torch.repeat_interleave(torch.tensor(cuts).diff())[None],
    }
    for name, tells in told.items():

        def call(ring: Ring, seq: Sequence, name: str = name, tells: Tensor = tells) -> Any:
            return shard_batch(ring, {"input_ids": tokens, "labels": tokens, name: tells})

        refused(call, r"documents begin with labels, at \[4, 9, 15, 20\]: .* set these labels to -100")
    one = tokens.clone()
    one[:, [0, 4, 9, 20]] = -100
    batch = {"input_ids": tokens, "labels": one, "position_ids": told["position_ids"]}
    refused(lambda ring, seq: shard_batch(ring, batch), r"begin with labels, at \[15\]:")

    def body(ring: Ring) -> float:
        model = adapter.prepare(tiny_model("llama", "eager"))
        with torch.no_grad(), ring.activate((laid := shard_batch(ring, fitting))[0]):
            total = model(**laid[1], num_items_in_batch=(fitting["labels"][:, 1:] != -100).sum()).loss
        ring.all_reduce([total])
        return total.item()

    fitting = batch | {"labels": torch.where(told["position_ids"] == 0, -100, tokens)}
    true = tiny_model("llama", "eager")(**fitting, use_cache=False).loss.item()
    assert run_ranks(2, body) == pytest.approx([true, true], rel=1e-6)


def test_fewer_tokens_than_ranks() -> None:
    """Nobody waits for a rank that has no token."""

    def call(ring: Ring, tokens: int) -> Sequence:
        return shard_batch(ring, {"input_ids": torch.ones(2, tokens, dtype=torch.int64)})[0]

    refused(lambda ring, seq: call(ring, 1), "rank 1 has no token of Sequence.1 tokens")
    assert run_ranks(2, lambda ring: call(ring, 2).counts) == [(1, 1)] * 2


def test_what_tells_of_documents_agrees() -> None:
    tokens = torch.arange(1, 13)[None]
    places = torch.cat([torch.arange(5), torch.arange(7)])[None]
    marks = torch.tensor([[0] * 5 + [1] * 7])
    ones, padded = torch.ones_like(tokens), torch.ones_like(tokens)
    padded[:, -3:] = 0

    def call(ring: Ring, **more: Tensor) -> tuple[Sequence, Any]:
        return shard_batch(ring, {"input_ids": tokens, **more})

    def body(ring: Ring) -> None:
        for given in ({"position_ids": places, "attention_mask": ones}, {"seq_idx": marks},
                      {"position_ids": places, "seq_idx": marks}):  # fmt: skip
            seq, mine = call(ring, **given)
            assert seq.documents == (0, 5, 12) and torch.equal(mine["position_ids"], seq.shard(places))
        counted = torch.arange(12)[None] - 2
        left = ones.clone()
        left[:, :2] = 0
        seq, mine = call(ring, position_ids=counted, attention_mask=left)
        assert seq.documents is None and torch.equal(mine["position_ids"], seq.shard(counted))

    run_ranks(2, body)
    refused(lambda ring, seq: call(ring, position_ids=places, attention_mask=padded), "beside an attention_mask with")
    refused(lambda ring, seq: call(ring, position_ids=places, seq_idx=ones.cumsum(1) // 4), "several ways to cut it")
    refused(lambda ring, seq: call(ring, position_ids=places, cu_seq_lens_q=torch.tensor([0, 12])), "several ways")
    refused(lambda ring, seq: call(ring, seq_idx=torch.zeros_like(tokens), position_ids=places), "several ways to cut")
    refused(lambda ring, seq: call(ring, position_ids=places[None]), "are not \\(rows, tokens\\)")


def test_labels_that_padding_predicts() -> None:
    """As a collator makes them with a tokenizer that pads on the left, or that keeps labels of padding."""
    tokens = torch.arange(3, 15).reshape(1, 12).repeat(2, 1)
    left, right = torch.ones_like(tokens), torch.ones_like(tokens)
    left[1, :5] = right[0, 9:] = 0
    says = r"row {} has a label that is predicted from a padded position, token {}, .* to -100: labels\[:, 1:\]"
    for mask, row, token in ((left, 1, 4), (right, 0, 9)):
        labels = tokens.masked_fill(mask == 0, -100) if mask is left else tokens.clone()
        whole = {"input_ids": tokens, "attention_mask": mask, "labels": labels}
        refused(lambda ring, seq, whole=whole: shard_batch(ring, whole), says.format(row, token))
        shifted = torch.nn.functional.pad(labels, (0, 1), value=-100)[:, 1:]
        given = {"input_ids": tokens, "attention_mask": mask, "shift_labels": shifted}
        refused(lambda ring, seq, given=given: shard_batch(ring, given), says.format(row, token))

        def call(ring: Ring, seq: Sequence, given: dict[str, Tensor] = given) -> Any:
            model = adapter.prepare(tiny_model("llama", "eager"))
            seq = ring.sequence(12)
            mine = {name: seq.shard(x) for name, x in given.items()}
            mine |= {"labels": mine["shift_labels"], "position_ids": seq.positions()[None].expand(2, -1)}
            with ring.activate(seq):
                return model(**mine, num_items_in_batch=20)

        refused(call, "shift_labels has labels at padded positions of attention_mask")
        labels[:, 1:][mask[:, :-1] == 0] = -100
        run_ranks(2, lambda ring, whole=whole: shard_batch(ring, whole))
