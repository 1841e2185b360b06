"""What `docs/training.md` shows works: its Python, and its commands with smaller numbers.

Not covered: whether the words around them are true; other tests show that.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from ringattn.launch.train import train
from ringattn.launch.train.checkpoints import MAY_CHANGE
from ringattn.launch.train.config import load_train

ROOT = Path(__file__).resolve().parent.parent
PAGE = (ROOT / "docs" / "training.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```(\w*)\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
LINES = [line for language, block in BLOCKS if not language for line in block.splitlines()]
COMMANDS = [shlex.split(line.partition(" train ")[2]) for line in LINES]
SMALL = ["model=tiny", "tokens=64", "transport=gloo", "timeout_s=120"]


def test_the_python_of_the_page(capsys: pytest.CaptureFixture[str]) -> None:
    (code,) = (block for language, block in BLOCKS if language == "python")
    exec(compile(code, "docs/training.md", "exec"), {})
    assert float(capsys.readouterr().out) < 1e-14


def test_every_command_is_understood() -> None:
    assert len(COMMANDS) == 10
    for words in COMMANDS:
        assert words
        load_train(words)


@pytest.mark.slow
def test_the_commands_of_one_process_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    monkeypatch.chdir(tmp_path)
    Path("corpus.txt").write_text("a word and another<|endoftext|>" * 9)
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel({"?": 0}, unk_token="?"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()  # else a document is one token: nothing to learn
    tokenizer.save("tokenizer.json")
    smaller = {"segment_lengths=[64,512]": "segment_lengths=[16,64]", "curriculum_start_tokens=256":
               "curriculum_start_tokens=16"}  # fmt: skip
    for words in COMMANDS:
        small = [smaller.get(word, word) for word in words if not word.startswith(("tokens=", "ranks="))]
        if not any(word.startswith(("replicas=", "restarts=")) for word in words):
            assert train.main([*small, *SMALL]) == 0, words
    assert "in 40 steps, 20 of them before" in capsys.readouterr().out


@pytest.mark.slow
def test_the_commands_of_a_mesh_run(tmp_path: Path) -> None:
    starts = {"ringattn": ["-m", "ringattn"], "torchrun": ["-m", "torch.distributed.run", "--standalone"]}
    lines = [shlex.split(line) for line in LINES if "replicas=" in line]
    assert [program for program, *_ in lines] == ["ringattn", "torchrun"]
    for program, *words in lines:
        done = subprocess.run(
            [sys.executable, *starts[program], *words, *SMALL, "steps=2"], cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=200,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        result = tmp_path / "outputs" / "mesh" / "result.json"
        assert len(json.loads(result.read_text())["losses"]) == 2
        result.unlink()


def test_the_table_of_the_page_says_what_is_refused() -> None:
    table = PAGE.partition("| may differ from the run before | must not |")[2].partition("\n\n")[0]
    rows = [row.split("|")[1:3] for row in table.splitlines() if "`" in row]
    may, must_not = (set(re.findall(r"`(\w+)`", " ".join(row[side] for row in rows))) for side in (0, 1))
    assert may < MAY_CHANGE and not must_not & MAY_CHANGE
