"""Words that are no key=value, as users of argparse, Hydra and torchrun write them: what to write instead is told."""

from __future__ import annotations

import os
from collections.abc import Sequence
from types import SimpleNamespace

import pytest

from ringattn import cli
from ringattn.errors import InputError
from ringattn.launch.capacity.plan import PlanConfig
from ringattn.launch.config import load
from ringattn.launch.measure.calibrate import CalibrateConfig
from ringattn.launch.measure.sweep import described
from ringattn.launch.report import compare
from ringattn.launch.words import given_twice, load_plain, that_count


def told(words: str, schema: type = PlanConfig) -> str:
    """What a command says of its words; what it says where there is no Hydra is the same."""
    with pytest.raises(InputError) as refused:
        load(words.split(), schema)
    if schema is CalibrateConfig:
        with pytest.raises(InputError) as plain:
            load_plain(words.split(), schema)
        assert str(plain.value) == str(refused.value)
    return str(refused.value)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("--tokens 128k", "--tokens 128k: write tokens=128k"),
        ("--tokens=128k", "--tokens=128k: write tokens=128k"),
        ("--tokens", "--tokens: write tokens=VALUE"),
        ("--tokens batch=2", "--tokens: write tokens=VALUE"),
        ("--kv-heads 8", "--kv-heads 8: write kv_heads=8"),
        ("tokens 128k", "tokens 128k: write tokens=128k"),
        ("tokens = 128k", "tokens = 128k: write tokens=128k, without spaces"),
        ("tokens =128k", "tokens =128k: write tokens=128k, without spaces"),
        ("tokens= 128k", "tokens= 128k: write tokens=128k, without a space"),
        ("tokens: 128k", "tokens: 128k: write tokens=128k"),
        ("--nproc_per_node=2", "--nproc_per_node=2: write ranks=2"),
        ("-np 2", "-np 2: write ranks=2"),
        ("-m batch=1,2", "-m: of all commands `ringattn run` takes it; `ringattn sweep` measures every combination of"),
        ("--cfg job", "--cfg: of all commands `ringattn run` takes Hydra's flags; here --help lists keys and defaults"),
        ("--version", "--version: `ringattn --version` says it"),
        ("--dry-run", "--dry-run: `ringattn run` and `ringattn sweep` have it"),
        ("--verbose", "--verbose: write options as key=value; --help lists the keys"),
        ("verbose", "verbose: write options as key=value; --help lists the keys"),
        ("=5", "=5: write options as key=value; --help lists the keys"),
    ],
)
def test_what_to_write_instead(words: str, says: str) -> None:
    assert told(words).startswith(says)


@pytest.mark.parametrize("words", ["--out x", "--ranks=2", "ranks = 2", "ranks 2", "-m", "--nproc=2", "--fast"])
def test_commands_without_hydra_say_the_same(words: str) -> None:
    assert told(words, CalibrateConfig)


def test_a_sweep_and_a_comparison_say_so_too() -> None:
    with pytest.raises(InputError, match=r"^--multirun: of all commands .* without it$"):
        described(["--multirun", "tokens=64,96"])
    with pytest.raises(InputError, match=r"^--heads 4: write heads=4$"):
        described(["--heads", "4"])
    with pytest.raises(InputError, match=r"^--threshold 0\.1: write threshold=0\.1$"):
        compare.main(["--threshold", "0.1", "a", "b"])


def test_which_of_two_values_counts_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["tokens=1k", "batch=2", "tokens=2k", "-m", "tokens=3k", "heads=4", "heads=8"]
    assert list(given_twice(words)) == [
        "tokens is given 3 times: tokens=3k counts",
        "heads is given twice: heads=8 counts",
    ]
    assert that_count(words) == ["tokens=3k", "batch=2", "heads=8"]
    assert load(words[:3], PlanConfig).tokens == 2000
    assert cli.main(["plan", "tokens=1k", "tokens=2k", "tokn=1"]) == 2
    said = capsys.readouterr().err
    assert "plan: tokens is given twice: tokens=2k counts\n" in said and "tokens=1k is" not in said


def test_a_command_comes_first(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["help", "plan"]) == 0 and capsys.readouterr().out.startswith("usage: ringattn plan [key=value")
    assert cli.main(["tokens=128k"]) == 2
    assert "is not a command; a command comes first, as ringattn run tokens=128k\n" in capsys.readouterr().err


@pytest.mark.parametrize("unread", [True, False])
def test_a_pipe_that_nobody_reads_ends_a_command_without_a_traceback(
    unread: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As `ringattn explain | head`; where it is another pipe that broke, that is told."""

    def run(words: Sequence[str]) -> int:
        print("many lines")
        if not unread:
            raise BrokenPipeError("of a socket")
        return 0

    read, write = os.pipe()
    monkeypatch.setattr(cli, "import_module", lambda name: SimpleNamespace(main=run))
    with os.fdopen(write, "w") as out:
        monkeypatch.setattr("sys.stdout", out)
        if unread:
            os.close(read)
            assert cli.main(["plan"]) == 141
            return
        with pytest.raises(BrokenPipeError, match="of a socket"):
            cli.main(["plan"])
    os.close(read)
