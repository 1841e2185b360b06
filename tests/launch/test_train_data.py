"""What a training step is given: packed documents, a tokenizer, short sequences first; the same on any mesh."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from ringattn import Ring
from ringattn.errors import InputError
from ringattn.launch.train import loop
from ringattn.launch.train.config import TrainConfig, load_train
from ringattn.launch.train.data import BatchPart, drawn, load
from ringattn.testing import run_ranks
from tests.launch.test_train_mesh import TINY, alone, on_threads, same

PACKED: dict[str, Any] = {"pack_documents": True, "separator": "\n"}
GROWING: dict[str, Any] = {"tokens": 64, "curriculum_start_tokens": 16, "curriculum_steps": 3}


@pytest.mark.parametrize(
    ("replicas", "ranks", "change"),
    [
        (1, 2, PACKED),
        (2, 2, PACKED),
        (1, 3, {**PACKED, "layout": "contiguous", "prompt_tokens": 5}),
        (2, 1, {**PACKED, "layout": "zigzag", "dtype": "fp64", "recompute": "full"}),
        (1, 2, {**PACKED, "attention": "dilated", "segment_lengths": [8, 64], "dilation_rates": [1, 3]}),
        (1, 2, GROWING),
        (2, 2, {**GROWING, "micro_batch": 1}),
        (2, 2, {**GROWING, **PACKED}),
    ],
)
def test_any_mesh_trains_like_one_process(replicas: int, ranks: int, change: dict[str, Any]) -> None:
    config = replace(TINY, replicas=replicas, steps=4, **change)
    expected = alone(config)
    for result in on_threads(config, ranks):
        same(result, expected)


def test_packed_documents_do_not_see_each_other() -> None:
    """A packed step's loss is that of each document alone, weighed by its labels."""
    config = replace(TINY, batch=1, pack_documents=True, separator=" ")

    def of_rank(ring: Ring) -> tuple[Tensor, Tensor]:
        text = load(config)
        (part,) = drawn(ring, 0, text, 2, config)
        assert part.seq.documents is not None and len(part.seq.documents) > 2
        model, _ = loop.make_model(ring, config)
        whole = loop.backward(ring, ring, [part], model, config)
        summed = torch.zeros((), dtype=torch.float64)
        for start, stop in pairwise(part.seq.documents):
            document = part.tokens[:, start:stop]
            mean = loop.backward(ring, ring, [BatchPart(ring.sequence(stop - start), document)], model, config)
            summed += mean * (stop - start - 1)
        labels = config.tokens - (len(part.seq.documents) - 1)
        return whole, summed / labels

    for whole, expected in run_ranks(2, of_rank):
        torch.testing.assert_close(whole, expected, rtol=1e-12, atol=0)


def test_a_step_has_as_many_tokens_throughout_and_leaves_none_out() -> None:
    growing = replace(TINY, **GROWING, **PACKED)
    whole = replace(growing, curriculum_start_tokens=None, curriculum_steps=0)

    def steps(config: TrainConfig) -> list[list[Tensor]]:
        def of_rank(ring: Ring) -> list[list[Tensor]]:
            text = load(config)
            return [[part.tokens for part in drawn(ring, 0, text, step, config)] for step in range(4)]

        return run_ranks(1, of_rank)[0]

    found, expected = steps(growing), steps(whole)
    assert [[tokens.shape[1] for tokens in step] for step in found] == [[16] * 16, [16] * 16, [32] * 8, [64] * 4]
    for some, others in zip(found, expected, strict=True):
        assert torch.equal(torch.cat(some, 1), torch.cat(others, 1))


def test_a_tokenizer_gives_the_model_its_vocabulary(tmp_path: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    words = {word: number for number, word in enumerate(["?", "the", "of", "a", "is"])}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="?"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    made.save(str(tmp_path / "tokenizer.json"))
    config = replace(TINY, tokenizer=str(tmp_path / "tokenizer.json"), pack_documents=True, steps=2)
    results = on_threads(replace(config, replicas=2), 2)
    same(results[0], alone(config))
    assert results[0]["losses"][0] < 2.0 < alone(replace(TINY, steps=1))["losses"][0]  # of 5 words, and of 256 bytes


def test_a_vocabulary_goes_up_to_the_greatest_id(tmp_path: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel({"?": 0, "the": 3, "of": 9}, unk_token="?"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    made.save(str(tmp_path / "tokenizer.json"))
    config = replace(TINY, tokenizer=str(tmp_path / "tokenizer.json"), steps=2)
    text = load(config)
    assert (text.vocabulary, int(text.tokens.max())) == (10, 9)
    assert len(alone(config)["losses"]) == 2


def test_what_a_tokenizer_carries_for_batches_leaves_no_token_out(tmp_path: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel({"?": 0, "a": 1, "b": 2}, unk_token="?"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    parts = ["a b a b a b\n\n", "b"]
    whole = [made.encode(part, add_special_tokens=False).ids for part in parts]
    made.enable_truncation(4)
    made.enable_padding(length=8)
    made.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "text").write_text("".join(parts))
    config = TrainConfig(text=str(tmp_path / "text"), tokenizer=str(tmp_path / "tokenizer.json"), pack_documents=True)
    text = load(config)
    assert text.tokens.tolist() == whole[0] + whole[1] == [1, 2, 1, 2, 1, 2, 2] and text.cuts == (0, 6, 7)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["curriculum_start_tokens=512"], "curriculum_steps: goes with curriculum_start_tokens"),
        (["curriculum_steps=5"], "curriculum_steps: goes with curriculum_start_tokens"),
        (
            ["curriculum_start_tokens=500", "curriculum_steps=5"],
            "curriculum_start_tokens=500: must be tokens=2048",
        ),
        (["curriculum_start_tokens=2", "curriculum_steps=5", "ranks=4"], "ranks=4: more ranks than tokens"),
        (["pack_documents=true", "micro_batch=2"], "micro_batch=2: sequences of packed documents pass one by one"),
        (["prompt_tokens=2048"], "prompt_tokens=2048: leaves nothing to learn of a sequence of tokens=2048"),
        (
            ["prompt_tokens=256", "curriculum_start_tokens=256", "curriculum_steps=5"],
            "prompt_tokens=256: leaves nothing to learn of a sequence of curriculum_start_tokens=256",
        ),
        (["layout=per_document"], "layout=per_document: there are no documents"),
    ],
)
def test_what_does_not_go_together_is_refused_by_key(words: list[str], message: str) -> None:
    with pytest.raises(InputError, match=f"^{message}"):
        load_train(words)


def test_a_short_text_is_refused_unless_it_is_packed(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("short")
    config = TrainConfig(text=str(tmp_path / "text"))
    with pytest.raises(InputError, match=r"^tokens=2048: the text has only 5 tokens"):
        load(config)
    assert load(replace(config, pack_documents=True)).cuts == (0, 5)


def test_all_but_one_token_may_be_a_prompt() -> None:
    load_train(["prompt_tokens=2047"])
    load_train(["prompt_tokens=255", "curriculum_start_tokens=256", "curriculum_steps=5"])


def test_a_text_without_tokens_is_refused(tmp_path: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel({"?": 0}, unk_token="?"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    made.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "text").write_text(" \n\n ")
    config = TrainConfig(text=str(tmp_path / "text"), tokenizer=str(tmp_path / "tokenizer.json"), pack_documents=True)
    with pytest.raises(InputError, match=r"^tokenizer=.*tokenizer\.json: makes no token of the text"):
        load(config)
    with pytest.raises(InputError, match=r"^tokenizer=.*tokenizer\.json: makes no token of the text"):
        load(replace(config, pack_documents=False))
