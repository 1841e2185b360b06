"""What a training step is given: the text, packed documents, a tokenizer, short sequences first; on any mesh."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from ringattn import Ring
from ringattn.errors import InputError
from ringattn.launch.options import help_text
from ringattn.launch.train import loop
from ringattn.launch.train.config import TrainConfig, doublings, load_train
from ringattn.launch.train.data import BatchPart, Documents, drawn, load, load_documents, packed, shortened, windows
from ringattn.testing import run_ranks
from tests.launch.test_train_mesh import MESH
from tests.launch.training import TINY, alone, run, same

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
    config = replace(MESH, replicas=replicas, steps=4, **change)
    same(run(config, ranks), alone(config))


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
    growing = replace(MESH, **GROWING, **PACKED)
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
    result = run(replace(config, replicas=2), 2)
    same(result, alone(config))
    assert result["losses"][0] < 2.0 < alone(replace(TINY, steps=1))["losses"][0]  # of 5 words, and of 256 bytes


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


# --- documents -------------------------------------------------------------------------------------------------------


def marked(lengths: list[int]) -> Documents:
    """Documents whose tokens are all different."""
    cuts = [0, *torch.tensor(lengths).cumsum(0).tolist()]
    return Documents(torch.arange(cuts[-1], dtype=torch.int32), tuple(cuts), cuts[-1])


@given(st.lists(st.integers(1, 9), min_size=1, max_size=6), st.integers(1, 30), st.integers(0, 5))
def test_packing_leaves_nothing_out_and_mixes_no_documents(lengths: list[int], length: int, seed: int) -> None:
    documents = marked(lengths)
    total, wanted = documents.cuts[-1], 3
    sequences = -(-wanted * total // length)
    stream, ends = [], []
    for index in range(sequences):
        tokens, cuts = packed(documents, index, length, seed)
        assert tokens.dtype == torch.int64 and len(tokens) == length and (cuts[0], cuts[-1]) == (0, length)
        for start, stop in pairwise(cuts):
            inside = tokens[start:stop]
            assert stop > start and (inside.diff() == 1).all()  # one piece of the text ...
            owners = torch.bucketize(inside, torch.tensor(documents.cuts[1:]), right=True)
            assert owners.unique().numel() == 1  # ... of one document
            ends.append(index * length + stop)
        stream += tokens.tolist()
    for round_ in range(wanted):  # each pass over the text has all of it
        assert sorted(stream[round_ * total : (round_ + 1) * total]) == list(range(total))


def test_a_document_that_is_too_long_goes_on_in_the_next_sequence() -> None:
    documents = marked([10])
    assert [packed(documents, index, 4, 0)[0].tolist() for index in range(3)] == [
        [0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 0, 1]]  # fmt: skip
    assert packed(documents, 2, 4, 0)[1] == (0, 2, 4)


def test_passes_and_seeds_have_other_orders() -> None:
    documents = marked([1] * 50)
    first, second, other = (packed(documents, *where)[0].tolist() for where in ((0, 50, 0), (1, 50, 0), (0, 50, 1)))
    assert sorted(first) == sorted(second) == sorted(other) and first != second and first != other
    assert packed(documents, 0, 50, 0)[0].tolist() == first


def test_documents_of_a_file_keep_every_byte(tmp_path: Path) -> None:
    file = tmp_path / "text.txt"
    file.write_bytes(b"one\n\ntwo, \xff\n\n\n\nthree")
    documents = load_documents(str(file))
    parts = [bytes(documents.tokens[a:b].tolist()) for a, b in pairwise(documents.cuts)]
    assert parts == [b"one\n\n", b"two, \xff\n\n", b"\n\n", b"three"] and documents.vocabulary == 256
    assert len(load_documents(str(file), separator="|").cuts) == 2
    with pytest.raises(InputError, match="separator: what documents end with must not be empty"):
        load_documents(str(file), separator="")


def test_a_digest_tells_tokens_and_documents_apart() -> None:
    documents = marked([3, 4])
    assert documents.digest() == marked([3, 4]).digest()
    others = [
        marked([4, 3]),
        marked([7]),
        Documents(documents.tokens.flip(0), documents.cuts, documents.vocabulary),
        Documents(documents.tokens, documents.cuts, 256),
    ]
    assert len({one.digest() for one in (documents, *others)}) == 5


def test_a_tokenizer_is_used_and_its_faults_are_named(tmp_path: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    model = tokenizers.models.WordLevel({"one": 0, "two": 1, "?": 2}, unk_token="?")
    made = tokenizers.Tokenizer(model)
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    made.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "text.txt").write_text("two one\n\n\n\none three two")
    documents = load_documents(str(tmp_path / "text.txt"), tokenizer=str(tmp_path / "tokenizer.json"))
    assert documents.tokens.tolist() == [1, 0, 0, 2, 1] and documents.tokens.dtype == torch.int32
    assert documents.cuts == (0, 2, 5) and documents.vocabulary == 3
    lacking = tokenizers.Tokenizer(tokenizers.models.WordLevel({"one": 0}, unk_token="?"))
    lacking.save(str(tmp_path / "lacking.json"))
    with pytest.raises(InputError, match=r"tokenizer=.*lacking\.json: cannot encode the text, "):
        load_documents(str(tmp_path / "text.txt"), tokenizer=str(tmp_path / "lacking.json"))
    with pytest.raises(InputError, match=r"tokenizer=nowhere\.json: there is no such file"):
        load_documents(tokenizer="nowhere.json")
    (tmp_path / "bad.json").write_text(json.dumps({}))
    with pytest.raises(InputError, match=r"tokenizer=.*bad\.json: "):
        load_documents(tokenizer=str(tmp_path / "bad.json"))
    (tmp_path / "text.txt").write_bytes(b"\xff\xff")
    with pytest.raises(InputError, match=r"text=.*text\.txt: a tokenizer needs UTF-8"):
        load_documents(str(tmp_path / "text.txt"), tokenizer=str(tmp_path / "tokenizer.json"))


def test_short_sequences_come_first() -> None:
    parts = [shortened(step, 128, 1024, 9) for step in range(12)]
    assert parts == [8, 8, 8, 4, 4, 4, 2, 2, 2, 1, 1, 1]
    assert [shortened(step, 512, 1024, 3) for step in range(5)] == [2, 2, 2, 1, 1]
    assert {shortened(step, None, 1024, 9) for step in range(12)} == {1} == {shortened(0, 1024, 1024, 9)}
    assert [shortened(step, 128, 1024, 2) for step in range(3)] == [8, 4, 1]  # fewer steps than stages


@pytest.mark.parametrize(("start", "length"), [(100, 1024), (2048, 1024), (3, 1024), (341, 1024)])
def test_lengths_that_do_not_double_into_the_whole_are_refused(start: int, length: int) -> None:
    with pytest.raises(InputError, match=f"curriculum_start_tokens={start}: must be tokens={length}, its half"):
        doublings(start, length)


# --- the text and its windows ----------------------------------------------------------------------------------------


def test_the_language_reference_is_real_text() -> None:
    text = load_documents().tokens
    assert text.dtype == torch.uint8 and len(text) > 300_000 and len(load_documents().cuts) > 1000
    assert b'The "while" statement' in bytes(text.tolist())


def test_windows_are_pieces_of_the_text() -> None:
    text = torch.arange(100, dtype=torch.uint8)
    batch = windows(text, step=3, batch=5, tokens=8, seed=1)
    assert batch.dtype == torch.int64 and batch.shape == (5, 8)
    assert (batch.diff(dim=1) == 1).all()


def test_windows_reach_both_ends_of_the_text() -> None:
    text = torch.arange(5, dtype=torch.uint8)
    starts = windows(text, step=0, batch=100, tokens=4, seed=0)[:, 0]
    assert set(starts.tolist()) == {0, 1}


def test_text_errors_name_their_key(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"^text=.*nowhere.txt: No such file"):
        load_documents(str(tmp_path / "nowhere.txt"))
    (tmp_path / "empty.txt").touch()
    with pytest.raises(InputError, match=r"^text=.*empty.txt: the file is empty"):
        load_documents(str(tmp_path / "empty.txt"))


@pytest.mark.parametrize(
    ("words", "message"),
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
        (["model.kv_heads=3"], "model.kv_heads=3: does not divide model.heads=4"),
        (["model.dim=20"], "model.dim=20: must be an even multiple of model.heads=4"),
    ],
)
def test_config_errors_begin_with_the_key(words: list[str], message: str) -> None:
    with pytest.raises(InputError) as raised:
        load_train(words)
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
    assert "model.kv_heads" in text and "presets, one of each list:\n  model=medium,tiny" in text
