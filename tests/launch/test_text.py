"""The text, its windows, and the options that choose them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from ringattn.errors import InputError
from ringattn.launch.options import help_text
from ringattn.launch.train.config import TrainConfig, load_train
from ringattn.launch.train.data import load_documents, windows


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
        (["tokns=3"], "tokns: no such key; did you mean tokens?"),
        (["model.layres=3"], "model.layres: no such key; did you mean model.layers?"),
        (["hydra.run.dir=x"], "hydra.run.dir: no such key"),
        (["steps=1,2"], "steps: one value at a time"),
        (["--steps=3"], "--steps=3: write steps=3"),
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
