"""The text, its windows, and the options that choose them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from ringattn.errors import InputError
from ringattn.launch.options import help_text
from ringattn.launch.train.config import TrainConfig, load_train
from ringattn.launch.train.data import VOCABULARY, load_documents, windows
from ringattn.testing import run_ranks


def test_the_language_reference_is_real_text() -> None:
    text = load_documents().tokens
    assert text.dtype == torch.uint8 and len(text) > 300_000
    assert b'The "while" statement' in bytes(text.tolist())


def test_a_file_is_read_byte_by_byte(tmp_path: Path) -> None:
    file = tmp_path / "some.txt"
    file.write_bytes(bytes(range(VOCABULARY)))
    assert load_documents(str(file)).tokens.tolist() == list(range(VOCABULARY))


def test_windows_are_pieces_of_the_text() -> None:
    text = torch.arange(100, dtype=torch.uint8)
    batch = windows(text, step=3, batch=5, tokens=8, seed=1)
    assert batch.dtype == torch.int64 and batch.shape == (5, 8)
    assert (batch.diff(dim=1) == 1).all()


def test_windows_reach_both_ends_of_the_text() -> None:
    text = torch.arange(5, dtype=torch.uint8)
    starts = windows(text, step=0, batch=100, tokens=4, seed=0)[:, 0]
    assert set(starts.tolist()) == {0, 1}


def test_every_rank_draws_the_same_windows_and_every_step_others() -> None:
    text = load_documents().tokens
    drawn = run_ranks(3, lambda ring: [windows(text, step, 2, 64, seed=7) for step in range(3)])
    for other in drawn[1:]:
        assert all(torch.equal(a, b) for a, b in zip(drawn[0], other, strict=True))
    assert not torch.equal(drawn[0][0], drawn[0][1])
    assert not torch.equal(drawn[0][0], windows(text, 0, 2, 64, seed=8))


def test_text_errors_name_their_key(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"^text=.*nowhere.txt: No such file"):
        load_documents(str(tmp_path / "nowhere.txt"))
    (tmp_path / "empty.txt").touch()
    with pytest.raises(InputError, match=r"^text=.*empty.txt: the file is empty"):
        load_documents(str(tmp_path / "empty.txt"))
    with pytest.raises(InputError, match=r"^tokens=9: the text has only 8 bytes"):
        windows(torch.zeros(8, dtype=torch.uint8), 0, 1, 9, 0)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["tokns=3"], "tokns: no such key; did you mean tokens?"),
        (["model.layres=3"], "model.layres: no such key; did you mean model.layers?"),
        (["hydra.run.dir=x"], "hydra.run.dir: no such key"),
        (["steps=many"], "steps=many: should be a whole number"),
        (["model.layers=2.5"], "model.layers=2.5: should be a whole number"),
        (["learning_rate=null"], "learning_rate=null: has to have a value"),
        (["steps=1,2"], "steps: one value at a time"),
        (["--steps=3"], "--steps=3: write steps=3"),
        (["steps"], "steps: write options as key=value"),
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


def test_help_lists_every_key_with_default_and_meaning() -> None:
    text = help_text("train", "Trains.", TrainConfig)
    lines = [" ".join(line.split()) for line in text.splitlines()]
    assert "tokens 2048 tokens of one sequence, over all ranks" in lines
    assert "model.kv_heads" in text and "presets, one of each list:\n  model=medium,tiny" in text
