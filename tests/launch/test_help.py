"""What a command says at once: its help without what takes seconds to load, what it starts, and what Ctrl-C leaves."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ringattn import cli
from ringattn.engine import select
from ringattn.launch import options
from ringattn.launch.measure import exactness
from ringattn.launch.options import help_text
from ringattn.launch.train.config import TrainConfig
from ringattn.transport import rendezvous

ROOT = Path(__file__).parents[2]
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT)}
SLOW = ("torch", "hydra", "matplotlib", "jinja2")
"""Packages that take from half a second to several."""


def test_the_names_are_those_of_what_they_name() -> None:
    assert (options.ENGINES, options.TRANSPORTS, options.DTYPES) == (
        select.ENGINES, rendezvous.TRANSPORTS, tuple(exactness.DTYPES)
    )  # fmt: skip


def test_no_help_waits_for_what_is_slow_to_load() -> None:
    program = f"""
import contextlib, io, json, sys
from ringattn import cli
found = {{}}
for command in cli.COMMANDS:
    with contextlib.redirect_stdout(io.StringIO()) as told:
        assert cli.main([command, "--help"]) == 0
    found[command] = [told.getvalue()[:6], *(name for name in {SLOW!r} if name in sys.modules)]
print(json.dumps(found))
"""
    done = subprocess.run([sys.executable, "-c", program], env=ENVIRONMENT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == {command: ["usage:"] for command in cli.COMMANDS}


def test_no_default_of_the_help_breaks_its_line() -> None:
    (line,) = (line for line in help_text("train", "", TrainConfig).splitlines() if "separator" in line)
    assert r"\n\n" in line and "what documents of the text end with" in line


@pytest.mark.parametrize("command", ["run", "sweep", "train", "check"])
def test_what_starts_is_said_before_anything_slow_is_loaded(
    command: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []

    def load(name: str) -> object:
        said.append(capsys.readouterr().err)
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "import_module", load)
    assert cli.main([command, "tokens=8k"]) == 130
    assert said[0].startswith(f"ringattn {command}: {cli.STARTS[command]}")
    assert "tokens=8k is 8,000 tokens" in said[0]
    monkeypatch.setenv("RANK", "1")
    assert cli.main([command]) == 130 and said[1] == ""  # one rank says it


@pytest.mark.parametrize(
    ("command", "again"),
    [("run", "nothing is kept; give the same command again"), ("sweep", "what was measured is kept"),
     ("train", "goes on from the last checkpoint in the folder out")],
)  # fmt: skip
def test_ctrl_c_while_modules_are_loaded_is_answered_at_once(
    command: str, again: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def load(name: str) -> object:
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(10)
        raise AssertionError("not interrupted")

    monkeypatch.setattr(cli, "import_module", load)
    # Python's own handler, which a process that was started in the background lacks: there Ctrl-C is ignored.
    theirs, before = signal.signal(signal.SIGINT, signal.default_int_handler), signal.default_int_handler
    try:
        assert cli.main([command]) == 130
        assert signal.getsignal(signal.SIGINT) is before
    finally:
        signal.signal(signal.SIGINT, theirs)
    printed = capsys.readouterr()
    assert f"ringattn {command}: interrupted; " in printed.err and again in printed.err
    assert "Traceback" not in printed.err


def heeds_ctrl_c() -> None:
    """What a shell in the foreground does for a command; in the background SIGINT is ignored."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


@pytest.mark.slow
def test_ctrl_c_ends_ranks_at_once_and_leaves_none() -> None:
    words = [sys.executable, "-m", "ringattn", "run", "ranks=2", "tokens=256", "shape=small", "repeats=100000"]
    with subprocess.Popen(words, cwd=ROOT, env=ENVIRONMENT, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                          start_new_session=True, preexec_fn=heeds_ctrl_c) as running:  # fmt: skip
        assert running.stdout is not None
        for line in running.stdout:
            if line.startswith("pass 1 "):
                break
        start = time.monotonic()
        running.send_signal(signal.SIGINT)
        _, errors = running.communicate(timeout=60)
        took_s = time.monotonic() - start
    assert running.returncode == 130 and "interrupted; nothing is kept" in errors and "Traceback" not in errors
    assert took_s < 20.0  # torch's agent would wait 30 s for ranks that do not end; what is left is for a busy machine


def test_under_torchrun_what_all_ranks_refuse_is_one_failure(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 0 tells torchrun why; another one ends well when torchrun ends it, and as a failure if it was alone."""
    file = tmp_path / "error.json"
    for name, value in {"TORCHELASTIC_RUN_ID": "none", "LOCAL_RANK": "0", "TORCHELASTIC_ERROR_FILE": str(file)}.items():
        monkeypatch.setenv(name, value)
    assert cli.main(["plan", "tokn=1"]) == 2
    assert json.loads(file.read_text())["message"] == "ringattn plan refused its words, see above"
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setattr(cli, "REFUSED_S", 0.0)
    file.unlink()
    before = signal.getsignal(signal.SIGTERM)
    try:
        assert cli.main(["plan", "tokn=1"]) == 2 and not file.exists()
    finally:
        signal.signal(signal.SIGTERM, before)
    program = "import sys\nfrom ringattn import cli\nsys.exit(cli.main(['plan', 'tokn=1']))"
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    with subprocess.Popen([sys.executable, "-c", program], stderr=subprocess.PIPE, text=True) as waiting:
        assert waiting.stderr is not None and "no such key" in waiting.stderr.readline()
        time.sleep(0.5)
        waiting.terminate()
        assert waiting.wait(20) == 0
    assert "no such key" in capsys.readouterr().err
