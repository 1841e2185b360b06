"""Documents, the sequences packed with them, and short sequences first."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ringattn.errors import InputError
from ringattn.launch.train.config import doublings
from ringattn.launch.train.data import Documents, load_documents, packed, shortened


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
