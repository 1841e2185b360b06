"""The data of training steps, on any mesh: text, tokenizer, packed documents, windows and the curriculum."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from threading import current_thread
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from ringattn import Ring
from ringattn.errors import InputError
from ringattn.launch.options import help_text
from ringattn.launch.train import data, loop
from ringattn.launch.train.config import TrainConfig, doublings, load_train
from ringattn.launch.train.data import BatchPart, Documents, drawn, load, load_documents, packed, shortened, windows
from ringattn.testing import run_ranks
from tests.launch.test_train_mesh import MESH
from tests.launch.training import TINY, alone, run, same

PACKED: dict[str, Any] = {"pack_documents": True, "separator": "\n"}
CURRICULUM: dict[str, Any] = {"tokens": 64, "curriculum_start_tokens": 16, "curriculum_steps": 3}


@pytest.mark.parametrize(
    ("replicas", "ranks", "change"),
    [
        (1, 2, PACKED),
        (2, 2, PACKED),
        (1, 3, {**PACKED, "layout": "contiguous", "prompt_tokens": 5}),
        (2, 1, {**PACKED, "layout": "zigzag", "dtype": "fp64", "recompute": "full"}),
        (1, 2, {**PACKED, "attention": "dilated", "segment_lengths": [8, 64], "dilation_rates": [1, 3]}),
        (1, 2, CURRICULUM),
        (2, 2, {**CURRICULUM, "micro_batch": 1}),
        (2, 2, {**CURRICULUM, **PACKED}),
    ],
)
def test_any_mesh_trains_like_one_process(replicas: int, ranks: int, change: dict[str, Any]) -> None:
    config = replace(MESH, replicas=replicas, steps=4, **change)
    same(run(config, ranks), alone(config))


def test_a_thread_draws_the_next_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread draws each step after the first once, and none after the last. Its errors are raised."""
    drawings: list[tuple[int, bool]] = []

    def noted(ring: Ring, replica: int, text: Documents, step: int, config: TrainConfig) -> list[BatchPart]:
        drawings.append((step, current_thread().name == "ringattn-plan"))
        if step == 3:
            raise InputError("no fourth step")
        return drawn(ring, replica, text, step, config)

    monkeypatch.setattr(data, "drawn", noted)
    run(replace(TINY, steps=3, **PACKED))
    assert drawings == [(0, False), (1, True), (2, True)]
    with pytest.raises(InputError, match="no fourth step"):
        run(replace(TINY, steps=4, **PACKED))
    assert drawings[-1] == (3, True)


def test_packed_documents_do_not_attend_to_each_other() -> None:
    """The loss of a packed step is the mean of the losses of its separate documents, weighted by their labels."""
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


def test_a_curriculum_splits_the_sequences_of_a_step_and_keeps_its_tokens() -> None:
    curriculum = replace(MESH, **CURRICULUM, **PACKED)
    full_length = replace(curriculum, curriculum_start_tokens=None, curriculum_steps=0)

    def steps(config: TrainConfig) -> list[list[Tensor]]:
        def of_rank(ring: Ring) -> list[list[Tensor]]:
            text = load(config)
            return [[part.tokens for part in drawn(ring, 0, text, step, config)] for step in range(4)]

        return run_ranks(1, of_rank)[0]

    split, expected = steps(curriculum), steps(full_length)
    assert [[tokens.shape[1] for tokens in step] for step in split] == [[16] * 16, [16] * 16, [32] * 8, [64] * 4]
    for parts, whole in zip(split, expected, strict=True):
        assert torch.equal(torch.cat(parts, 1), torch.cat(whole, 1))


def word_tokenizer(vocabulary: dict[str, int]) -> Any:
    """Return a tokenizer that splits at white space and maps words outside the vocabulary to "?"."""
    tokenizers = pytest.importorskip("tokenizers")
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="?"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    return tokenizer


def test_the_model_has_the_vocabulary_of_the_tokenizer(tmp_path: Path) -> None:
    vocabulary = {word: number for number, word in enumerate(["?", "the", "of", "a", "is"])}
    word_tokenizer(vocabulary).save(str(tmp_path / "tokenizer.json"))
    config = replace(TINY, tokenizer=str(tmp_path / "tokenizer.json"), pack_documents=True, steps=2)
    result = run(replace(config, replicas=2), 2)
    same(result, alone(config))
    # The first loss is about log 5 with 5 words, and log 256 with bytes.
    assert result["losses"][0] < 2.0 < alone(replace(TINY, steps=1))["losses"][0]


def test_the_size_of_the_vocabulary_is_the_largest_id_plus_1(tmp_path: Path) -> None:
    word_tokenizer({"?": 0, "the": 3, "of": 9}).save(str(tmp_path / "tokenizer.json"))
    config = replace(TINY, tokenizer=str(tmp_path / "tokenizer.json"), steps=2)
    text = load(config)
    assert (text.vocabulary, int(text.tokens.max())) == (10, 9)
    assert len(alone(config)["losses"]) == 2


def test_truncation_and_padding_of_a_tokenizer_are_ignored(tmp_path: Path) -> None:
    tokenizer = word_tokenizer({"?": 0, "a": 1, "b": 2})
    parts = ["a b a b a b\n\n", "b"]
    ids = [tokenizer.encode(part, add_special_tokens=False).ids for part in parts]
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding(length=8)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "text").write_text("".join(parts))
    config = TrainConfig(text=str(tmp_path / "text"), tokenizer=str(tmp_path / "tokenizer.json"), pack_documents=True)
    text = load(config)
    assert text.tokens.tolist() == ids[0] + ids[1] == [1, 2, 1, 2, 1, 2, 2] and text.cuts == (0, 6, 7)


DIVIDED = ["pack_documents=true", "max_tokens_per_rank=9"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["curriculum_start_tokens=512"], "curriculum_steps: give both curriculum_steps and curriculum_start_tokens"),
        (["curriculum_steps=5"], "curriculum_steps: give both curriculum_steps and curriculum_start_tokens"),
        (
            ["curriculum_start_tokens=500", "curriculum_steps=5"],
            "curriculum_start_tokens=500: must be tokens=2048",
        ),
        (["curriculum_start_tokens=2", "curriculum_steps=5", "ranks=4"], "ranks=4: more ranks than tokens"),
        (["pack_documents=true", "micro_batch=2"], "micro_batch=2: packed sequences are processed one by one"),
        (["prompt_tokens=2048"], "prompt_tokens=2048: leaves no label in a sequence of tokens=2048"),
        (
            ["prompt_tokens=256", "curriculum_start_tokens=256", "curriculum_steps=5"],
            "prompt_tokens=256: leaves no label in a sequence of curriculum_start_tokens=256",
        ),
        (["layout=per_document"], "layout=per_document: needs documents"),
        (["max_tokens_per_rank=9"], "max_tokens_per_rank=9: divides documents .*; set pack_documents=true"),
        ([*DIVIDED, "replicas=2", "batch=2"], "max_tokens_per_rank=9: uses one ring .*; leave replicas out"),
        ([*DIVIDED, "micro_batch=1"], "max_tokens_per_rank=9: .* micro_batch=1 has no effect; leave one out"),
        ([*DIVIDED, "layout=zigzag"], "max_tokens_per_rank=9: places documents by layout=documents; leave layout=z"),
        ([*DIVIDED, "prompt_tokens=3"], "max_tokens_per_rank=9: takes sequences apart, in which prompt_tokens=3"),
        (
            [*DIVIDED, "attention=dilated", "segment_lengths=[64]", "dilation_rates=[1]"],
            "max_tokens_per_rank=9: .* leave attention=dilated out",
        ),
    ],
)
def test_the_error_of_incompatible_options_begins_with_a_key(arguments: list[str], message: str) -> None:
    with pytest.raises(InputError, match=f"^{message}"):
        load_train(arguments)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_divided_batches_train_like_whole_sequences_in_one_process(ranks: int) -> None:
    """Under a limit, each step has several micro-batches, in which documents of all sequences are mixed."""
    config = replace(TINY, **PACKED, batch=4, steps=3)
    limit = replace(config, max_tokens_per_rank=-(-80 // ranks))
    with Ring() as ring:
        parts = drawn(ring, 0, load(config), 1, replace(limit, max_tokens_per_rank=80))
    assert len(parts) > 3 and max(part.tokens.numel() for part in parts) <= 80
    assert sum(part.tokens.numel() for part in parts) == 4 * 61
    same(run(limit, ranks), alone(config))


@pytest.mark.slow
def test_divided_batches_train_with_a_curriculum_and_recomputation() -> None:
    config = replace(TINY, **PACKED, tokens=60, batch=2, curriculum_start_tokens=30, curriculum_steps=2, steps=3,
                     recompute="full", chunked_loss_tokens=7)  # fmt: skip
    same(run(replace(config, max_tokens_per_rank=20), 3), alone(config))


def test_a_document_that_exceeds_the_limit_on_all_ranks() -> None:
    config = replace(TINY, **PACKED, max_tokens_per_rank=20)
    with pytest.raises(
        InputError, match=r"^max_tokens_per_rank=20: .* a document of 61 tokens, .* 2 ranks .* to 31 or"
    ):
        run(config, 2)


def test_a_text_shorter_than_a_sequence_is_refused_unless_documents_are_packed(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("short")
    config = TrainConfig(text=str(tmp_path / "text"))
    with pytest.raises(InputError, match=r"^tokens=2048: the text has only 5 tokens"):
        load(config)
    assert load(replace(config, pack_documents=True)).cuts == (0, 5)


def test_a_prompt_may_leave_a_single_token_to_learn() -> None:
    load_train(["prompt_tokens=2047"])
    load_train(["prompt_tokens=255", "curriculum_start_tokens=256", "curriculum_steps=5"])


def test_a_text_without_tokens_is_refused(tmp_path: Path) -> None:
    word_tokenizer({"?": 0}).save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "text").write_text(" \n\n ")
    config = TrainConfig(text=str(tmp_path / "text"), tokenizer=str(tmp_path / "tokenizer.json"), pack_documents=True)
    with pytest.raises(InputError, match=r"^tokenizer=.*tokenizer\.json: produces no token from the text"):
        load(config)
    with pytest.raises(InputError, match=r"^tokenizer=.*tokenizer\.json: produces no token from the text"):
        load(replace(config, pack_documents=False))


# --- documents -------------------------------------------------------------------------------------------------------


def make_documents(lengths: list[int]) -> Documents:
    """Return documents of these lengths, whose tokens count up from 0."""
    cuts = [0, *torch.tensor(lengths).cumsum(0).tolist()]
    return Documents(torch.arange(cuts[-1], dtype=torch.int32), tuple(cuts), cuts[-1])


@given(st.lists(st.integers(1, 9), min_size=1, max_size=6), st.integers(1, 30), st.integers(0, 5))
def test_packing_keeps_all_tokens_and_separates_documents(lengths: list[int], length: int, seed: int) -> None:
    documents = make_documents(lengths)
    total, passes = documents.cuts[-1], 3
    sequences = -(-passes * total // length)
    stream, ends = [], []
    for index in range(sequences):
        tokens, cuts = packed(documents, index, length, seed)
        assert tokens.dtype == torch.int64 and len(tokens) == length and (cuts[0], cuts[-1]) == (0, length)
        for start, stop in pairwise(cuts):
            inside = tokens[start:stop]
            assert stop > start and (inside.diff() == 1).all()  # consecutive tokens of the text ...
            owners = torch.bucketize(inside, torch.tensor(documents.cuts[1:]), right=True)
            assert owners.unique().numel() == 1  # ... from a single document
            ends.append(index * length + stop)
        stream += tokens.tolist()
    for number in range(passes):  # each pass over the text has every token once
        assert sorted(stream[number * total : (number + 1) * total]) == list(range(total))


def test_a_long_document_continues_in_the_next_sequence() -> None:
    documents = make_documents([10])
    assert [packed(documents, index, 4, 0)[0].tolist() for index in range(3)] == [
        [0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 0, 1]]  # fmt: skip
    assert packed(documents, 2, 4, 0)[1] == (0, 2, 4)


def test_the_order_of_documents_changes_with_the_pass_and_the_seed() -> None:
    documents = make_documents([1] * 50)
    first = packed(documents, 0, 50, seed=0)[0].tolist()
    second_pass = packed(documents, 1, 50, seed=0)[0].tolist()
    other_seed = packed(documents, 0, 50, seed=1)[0].tolist()
    assert sorted(first) == sorted(second_pass) == sorted(other_seed)
    assert first != second_pass and first != other_seed
    assert packed(documents, 0, 50, seed=0)[0].tolist() == first


def test_documents_of_a_file_keep_every_byte(tmp_path: Path) -> None:
    file = tmp_path / "text.txt"
    file.write_bytes(b"one\n\ntwo, \xff\n\n\n\nthree")
    documents = load_documents(str(file))
    parts = [bytes(documents.tokens[a:b].tolist()) for a, b in pairwise(documents.cuts)]
    assert parts == [b"one\n\n", b"two, \xff\n\n", b"\n\n", b"three"] and documents.vocabulary == 256
    assert len(load_documents(str(file), separator="|").cuts) == 2
    with pytest.raises(InputError, match="separator: must not be empty"):
        load_documents(str(file), separator="")


def test_digests_depend_on_tokens_documents_and_vocabulary() -> None:
    documents = make_documents([3, 4])
    assert documents.digest() == make_documents([3, 4]).digest()
    variants = [
        make_documents([4, 3]),
        make_documents([7]),
        Documents(documents.tokens.flip(0), documents.cuts, documents.vocabulary),
        Documents(documents.tokens, documents.cuts, 256),
    ]
    assert len({variant.digest() for variant in (documents, *variants)}) == 5


def test_a_tokenizer_encodes_the_text_and_errors_name_the_file(tmp_path: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    word_tokenizer({"one": 0, "two": 1, "?": 2}).save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "text.txt").write_text("two one\n\n\n\none three two")
    documents = load_documents(str(tmp_path / "text.txt"), tokenizer=str(tmp_path / "tokenizer.json"))
    assert documents.tokens.tolist() == [1, 0, 0, 2, 1] and documents.tokens.dtype == torch.int32
    assert documents.cuts == (0, 2, 5) and documents.vocabulary == 3
    no_unknown = tokenizers.Tokenizer(tokenizers.models.WordLevel({"one": 0}, unk_token="?"))
    no_unknown.save(str(tmp_path / "no_unknown.json"))
    with pytest.raises(InputError, match=r"tokenizer=.*no_unknown\.json: cannot encode the text: "):
        load_documents(str(tmp_path / "text.txt"), tokenizer=str(tmp_path / "no_unknown.json"))
    with pytest.raises(InputError, match=r"tokenizer=nowhere\.json: this file does not exist"):
        load_documents(tokenizer="nowhere.json")
    (tmp_path / "bad.json").write_text(json.dumps({}))
    with pytest.raises(InputError, match=r"tokenizer=.*bad\.json: "):
        load_documents(tokenizer=str(tmp_path / "bad.json"))
    (tmp_path / "text.txt").write_bytes(b"\xff\xff")
    with pytest.raises(InputError, match=r"text=.*text\.txt: must be UTF-8 for a tokenizer"):
        load_documents(str(tmp_path / "text.txt"), tokenizer=str(tmp_path / "tokenizer.json"))


def test_short_sequences_come_first() -> None:
    parts = [shortened(step, 128, 1024, 9) for step in range(12)]
    assert parts == [8, 8, 8, 4, 4, 4, 2, 2, 2, 1, 1, 1]
    assert [shortened(step, 512, 1024, 3) for step in range(5)] == [2, 2, 2, 1, 1]
    assert {shortened(step, None, 1024, 9) for step in range(12)} == {1} == {shortened(0, 1024, 1024, 9)}
    assert [shortened(step, 128, 1024, 2) for step in range(3)] == [8, 4, 1]  # fewer steps than stages


@pytest.mark.parametrize(("start", "length"), [(100, 1024), (2048, 1024), (3, 1024), (341, 1024)])
def test_a_start_length_that_does_not_double_to_the_full_length_is_refused(start: int, length: int) -> None:
    with pytest.raises(InputError, match=f"curriculum_start_tokens={start}: must be tokens={length}, its half"):
        doublings(start, length)


# --- the text and its windows ----------------------------------------------------------------------------------------


def test_the_default_text_is_the_language_reference() -> None:
    text = load_documents().tokens
    assert text.dtype == torch.uint8 and len(text) > 300_000 and len(load_documents().cuts) > 1000
    assert b'The "while" statement' in bytes(text.tolist())


def test_windows_are_consecutive_tokens_of_the_text() -> None:
    text = torch.arange(100, dtype=torch.uint8)
    batch = windows(text, step=3, batch=5, tokens=8, seed=1)
    assert batch.dtype == torch.int64 and batch.shape == (5, 8)
    assert (batch.diff(dim=1) == 1).all()


def test_windows_reach_both_ends_of_the_text() -> None:
    text = torch.arange(5, dtype=torch.uint8)
    starts = windows(text, step=0, batch=100, tokens=4, seed=0)[:, 0]
    assert set(starts.tolist()) == {0, 1}


def test_the_error_of_an_unreadable_text_begins_with_its_key(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"^text=.*nowhere.txt: No such file"):
        load_documents(str(tmp_path / "nowhere.txt"))
    (tmp_path / "empty.txt").touch()
    with pytest.raises(InputError, match=r"^text=.*empty.txt: the file is empty"):
        load_documents(str(tmp_path / "empty.txt"))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["model.layres=3"], "model.layres: no such key; did you mean model.layers?"),
        (["hydra.run.dir=x"], "hydra.run.dir: no such key"),
        (["steps=1,2"], "steps: one value at a time"),
        (["text=a=b"], "text=a=b: "),
        (["+more=1"], "+more=1: keys can be set, not added"),
        (["model=huge"], "model=huge: choose one of medium, tiny"),
        (["steps=0"], "steps=0: must be at least 1"),
        (["clip_norm=0"], "clip_norm=0.0: must be more than 0.0"),
        (["dtype=fp8"], "dtype=fp8: choose one of fp32, fp64, bf16"),
        (["ranks=9", "tokens=4"], "ranks=9: more ranks than tokens"),
        (["model.kv_heads=3"], "model.kv_heads=3: must divide model.heads=4"),
        (["head_groups=4"], "head_groups=4: must divide model.kv_heads=2"),
        (["head_groups=2", "saved_activations=int8"], "head_groups=2: attention needs the exact outputs"),
        (
            ["head_groups=2", "attention=dilated", "segment_lengths=[8]", "dilation_rates=[1]"],
            "head_groups=2: the branches of attention=dilated",
        ),
        (["model.dim=20"], "model.dim=20: must be an even multiple of model.heads=4"),
    ],
)
def test_the_error_of_a_wrong_option_begins_with_its_key(arguments: list[str], message: str) -> None:
    with pytest.raises(InputError) as raised:
        load_train(arguments)
    assert str(raised.value).startswith(message)


def test_overrides_win_over_presets_and_presets_over_defaults() -> None:
    config = load_train(["model.dim=64", "model=tiny", "learning_rate=1e-2"])
    assert (config.model.dim, config.model.layers, config.learning_rate) == (64, 1, 1e-2)
    assert load_train([]) == TrainConfig()
    assert load_train(["ranks=2"], "demo").ranks == 2


def test_help_lists_every_key_with_default_and_meaning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    text = help_text("train", "Trains.", TrainConfig)
    lines = [" ".join(line.split()) for line in text.splitlines()]
    assert "tokens 2048 tokens of one sequence, over all ranks" in lines
    assert "model.kv_heads" in text and "presets; choose one from each list:\n  model=medium,tiny" in text
