"""Command lines: key=value options, names, token counts, help texts, and the errors of wrong options."""

from __future__ import annotations

import errno
import json
import os
import re
import signal
import socket
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ringattn import cli
from ringattn.engine import select
from ringattn.errors import InputError
from ringattn.launch import options
from ringattn.launch.calls import RunConfig
from ringattn.launch.capacity import plan
from ringattn.launch.capacity.plan import PlanConfig
from ringattn.launch.config import load
from ringattn.launch.measure import exactness, run
from ringattn.launch.measure.calibrate import CalibrateConfig
from ringattn.launch.measure.check import CheckConfig
from ringattn.launch.measure.environment import code_version
from ringattn.launch.measure.points import opened
from ringattn.launch.measure.sweep import SweepConfig, described
from ringattn.launch.options import (
    ELSEWHERE,
    SAME_NAMES,
    help_text,
    leaves,
    load_plain,
    no_such_key,
    notes_on,
    spelled,
    with_lengths,
    wrapped,
)
from ringattn.launch.pictures.show import ExplainConfig
from ringattn.launch.pictures.timeline import TimelineConfig
from ringattn.launch.report import compare
from ringattn.launch.train.config import TrainConfig
from ringattn.planner.cluster import cluster_named
from ringattn.transport import rendezvous
from tests.contract.processes import free_port
from tests.doc_code import example
from tests.launch.commands import process_of_rank, python, ringattn, started, wait_for_line

COMMANDS = (RunConfig, CheckConfig, ExplainConfig, PlanConfig, TrainConfig, TimelineConfig)


@pytest.mark.parametrize("read", [load, load_plain])
def test_the_documented_example_of_a_new_key_works(read: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    schema = example("WarmedCall")["WarmedCall"]
    assert (read(["warmups=5", "heads=4"], schema).warmups, read([], schema).warmups) == (5, 2)
    for argument, message in {
        "warmups=-1": "warmups=-1: must be at least 0",
        "warmups=few": "warmups=few: should be a whole number",
        "warmup=5": "did you mean warmups",
    }.items():
        with pytest.raises(InputError, match=message):
            read([argument], schema)
    assert re.search(r"^ +warmups +2 +calls before those that are timed$", help_text("run", "", schema), re.MULTILINE)


# --- arguments that are not key=value --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
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
        ("-m batch=1,2", "-m: only `ringattn run` accepts it; `ringattn sweep` measures every combination of"),
        (
            "--cfg job",
            ("--cfg: only `ringattn run` accepts Hydra's flags; --help lists the keys and defaults of this command"),
        ),
        ("--version", "--version: `ringattn --version` prints the version"),
        ("--dry-run", "--dry-run: only `ringattn run` and `ringattn sweep` have this flag"),
        ("verbose", "verbose: write options as key=value; --help lists the keys"),
        ("=5", "=5: write options as key=value; --help lists the keys"),
        ("zero_stage=two", "zero_stage=two: should be a whole number"),
        ("framework_gib=lots", "framework_gib=lots: should be a number"),
        ("tied=maybe", "tied=maybe: should be true or false"),
        ("segment_lengths=2048", "segment_lengths: should be a list, as [1,2]"),
        ("batch=null", "batch=null: has to have a value"),
        *((f"tokens={text}", f"tokens={text}: is not a length; write 131072, 128k, 128Ki") for text in ("abc", "1.5")),
    ],
)
def test_the_error_of_a_malformed_argument_says_what_to_write_instead(arguments: str, message: str) -> None:
    with pytest.raises(InputError) as refused:
        load(arguments.split(), PlanConfig)
    assert str(refused.value).startswith(message)


@pytest.mark.parametrize(
    "arguments", ["--out x", "--ranks=2", "ranks = 2", "-m", "--nproc=2", "--fast", "ranks=two", "rank=2", "rounds=0"]
)
def test_commands_without_hydra_raise_the_same_errors(arguments: str) -> None:
    messages = set()
    for read in (load, load_plain):
        with pytest.raises(InputError) as refused:
            read(arguments.split(), CalibrateConfig)
        messages.add(str(refused.value))
    assert len(messages) == 1


def test_sweep_and_compare_reject_malformed_arguments_too() -> None:
    with pytest.raises(InputError, match=r"^--multirun: only `ringattn run` accepts it; .* without it$"):
        described(["--multirun", "tokens=64,96"])
    with pytest.raises(InputError, match=r"^--heads 4: write heads=4$"):
        described(["--heads", "4"])
    with pytest.raises(InputError, match=r"^--threshold 0\.1: write threshold=0\.1$"):
        compare.main(["--threshold", "0.1", "a", "b"])


def test_repeated_keys_and_token_counts_are_reported(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["tokens=1k", "batch=2", "tokens=2k", "-m", "tokens=128k", "heads=4", "heads=8", "window_tokens=1Ki,64"]
    assert list(notes_on(arguments)) == [
        "tokens is given 3 times: tokens=128k is used",
        "heads is given twice: heads=8 is used",
        "tokens=128k is 128,000 tokens (128Ki: 131,072)",
        "window_tokens=1Ki is 1,024 tokens",
    ]
    assert load(arguments[:3], PlanConfig).tokens == 2000
    slices = "mask='slices:0-8x0-8b,0-8x9-16f'"  # the letters are kinds, not units
    assert not list(notes_on([slices])) and load([slices], ExplainConfig).mask == slices[6:-1]
    assert cli.main(["plan", "tokens=1k", "tokens=2k", "tokn=1"]) == 2
    errors = capsys.readouterr().err
    assert "plan: tokens is given twice: tokens=2k is used\n" in errors and "tokens=1k is" not in errors


def test_the_first_argument_must_be_a_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["help", "plan"]) == 0 and capsys.readouterr().out.startswith("usage: ringattn plan [key=value")
    assert cli.main(["tokens=128k"]) == 2
    assert "is not a command; a command comes first, as ringattn run tokens=128k\n" in capsys.readouterr().err


@pytest.mark.parametrize(("closed", "flushed"), [(True, False), (True, True), (False, False)])
def test_a_closed_output_pipe_ends_a_command_without_a_traceback(
    closed: bool, flushed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If standard output is a closed pipe, as in `ringattn explain | head`, the command exits with 141.

    The command raises the error of any other broken pipe.
    """

    def run(arguments: Sequence[str]) -> int:
        print("many lines", flush=flushed)
        if not closed:
            raise BrokenPipeError("of a socket")
        return 0

    read, write = os.pipe()
    monkeypatch.setattr(cli, "import_module", lambda name: SimpleNamespace(main=run))
    with os.fdopen(write, "w") as out:
        monkeypatch.setattr("sys.stdout", out)
        if closed:
            os.close(read)
            assert cli.main(["plan"]) == 141
            return
        with pytest.raises(BrokenPipeError, match="of a socket"):
            cli.main(["plan"])
    os.close(read)


def test_a_full_disk_behind_the_standard_output_is_one_line_of_error() -> None:
    with open("/dev/full", "w") as full:
        running = started("-m", "ringattn", "simulate", "--help", stdout=full)
        _, errors = running.communicate()
    # There is one line of error: the command prevents Python from writing the rest of its buffer again at exit.
    assert running.returncode == 2
    assert errors.splitlines() == [
        "ringattn simulate: the standard output or a file could not be written: No space left on device; free some "
        "space on its disk, or write elsewhere"
    ]


def test_other_file_errors_are_not_reported_as_a_full_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(arguments: Sequence[str]) -> int:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(cli, "import_module", lambda name: SimpleNamespace(main=run))
    with pytest.raises(OSError, match="Input/output error"):
        cli.main(["plan"])


# --- token counts ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("key", "text", "count"),
    [
        *(("tokens", text, count) for text, count in (
            ("128k", "128000"), ("128K", "128000"), ("1M", "1000000"), ("1.5M", "1500000"), ("1e6", "1000000"),
            ("2G", "2000000000"), ("1B", "1000000000"), ("128Ki", "131072"), ("128ki", "131072"), ("1Mi", "1048576"),
            ("4096", "4096"), ("0.5Ki", "512"), ("64k,128Ki,4096", "64000,131072,4096"), ("64,128", "64,128"),
            ("range(1k,4k,1k)", "range(1000,4000,1000)"), ("1_000_000", "1_000_000"), ("128,0", "128,0"),
        )),
        ("segment_lengths", "[2k,8Ki]", "[2000,8192]"),
        ("out", "8k", "8k"), ("repeats", "1e1", "1e1"), ("seed", "1k", "1k"),
    ],
)  # fmt: skip
def test_suffixes_of_token_counts_are_expanded(key: str, text: str, count: str) -> None:
    assert spelled([f"{key}={text}"], RunConfig) == [f"{key}={count}"]


def test_commands_receive_the_expanded_token_counts() -> None:
    assert load(["tokens=128Ki"], RunConfig, "run").tokens == 131_072
    assert load(["curriculum_start_tokens=1Ki"], TrainConfig, "train").curriculum_start_tokens == 1024
    assert [point.config.tokens for point in described(["tokens=1k,1Ki"])[1]] == [1000, 1024]


@pytest.mark.parametrize(
    ("value", "message"),
    [
        *((text, "is not a length; write 131072, 128k, 128Ki, 1M, 1Mi, 1e6 or 1B") for text in (
            "128x", "5kg", "1e-3", "0x20", "64,128x", "range(1k,4x)")),
        ("1.0005k", r"is 1000\.5 tokens; write a whole number"),
        ("128,000", "write 128000, without commas"), ("1,024,000", "write 1024000, without commas"),
    ],
)  # fmt: skip
def test_a_wrong_token_count_is_an_error(value: str, message: str) -> None:
    with pytest.raises(InputError, match=rf"^tokens=\w+.*: {message}"):
        with_lengths("tokens", value)


# --- keys and names --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("schema", "argument", "normalized"),
    [
        (PlanConfig, "hardware=H100", "hardware=h100"),
        (PlanConfig, "preset=LLAMA3-8B", "preset=llama3-8b"),
        (PlanConfig, "mask=Causal", "mask=causal"),
        (RunConfig, "dtype=BF16", "dtype=bf16"),
        (RunConfig, "cluster=A100", "cluster=a100"),
        (ExplainConfig, "dtype=BFLOAT16", "dtype=bf16"),
        (RunConfig, "schedule=ALL_TO_ALL", "schedule=ulysses"),
        (RunConfig, "schedule=Double_Ring:2", "schedule=double_ring:2"),
        (RunConfig, "schedule=ring,double_ring:2,all_to_all", "schedule=ring,double_ring:2,ulysses"),
        *((RunConfig, word, word) for word in ("-m", "~mask", "hydra.sweep.dir=128k", "hydra/launcher=basic")),
        (RunConfig, "++tokens=8k", "++tokens=8000"),
        (PlanConfig, "warm_ups=1", "warm_ups=1"),
    ],
)
def test_names_are_normalized(schema: Any, argument: str, normalized: str) -> None:
    assert spelled([argument], schema) == [normalized]


@pytest.mark.parametrize("schema", [schema for schema in COMMANDS if schema is not CheckConfig])
def test_double_ring_takes_a_number(schema: Any) -> None:
    command = {RunConfig: "run", TrainConfig: "train"}.get(schema)
    assert load(["schedule=double_ring:2"], schema, command).schedule == "double_ring:2"
    for wrong in ("double_ring:two", "double_ring:02", "double_ring:", "double_ring:N", "ring:2"):
        with pytest.raises(InputError, match=f"^schedule={wrong}.*choose one of auto, ring, .*, double_ring:N"):
            load([f"schedule={wrong}"], schema, command)


@pytest.mark.parametrize("schema", [RunConfig, TrainConfig, CalibrateConfig, CheckConfig])
def test_both_names_of_a_dtype_are_accepted(schema: Any) -> None:
    declared = next(described.metadata["choices"] for key, _, described in leaves(schema()) if key == "dtype")
    for pair in SAME_NAMES[:4]:
        normalized = {spelled([f"dtype={name}"], schema)[0] for name in pair}
        assert len(normalized) == 1 if set(pair) & set(declared) else len(normalized) == 2
    assert load(["dtype=bf16"], schema) == load(["dtype=bfloat16"], schema)


@pytest.mark.parametrize(
    ("schema", "argument", "replacement"),
    [
        (RunConfig, "nproc=3", "ranks=3"),
        (RunConfig, "q_heads=4", "heads=4"),
        (RunConfig, "precision=bf16", "dtype=bf16"),
        (PlanConfig, "dtype=bf16", "precision=bf16"),
        (PlanConfig, "attention=full", "mask"),
        (PlanConfig, "cluster=h100", "hardware=h100"),
        (RunConfig, "hardware=h100", "cluster=h100"),
        (TimelineConfig, "window_tokens=7", "window=[LEFT,RIGHT] without the query's own key"),
    ],
)
def test_the_error_of_another_commands_key_names_this_commands_key(
    schema: Any, argument: str, replacement: str
) -> None:
    with pytest.raises(InputError) as refused:
        spelled([argument], schema)
    assert str(refused.value).startswith(f"{argument}: this command calls the key differently; write {replacement}")


def test_every_replacement_key_exists_in_a_command() -> None:
    keys = {leaf for schema in (*COMMANDS, CalibrateConfig, SweepConfig) for leaf, _, _ in leaves(schema())}
    assert {new.partition("=")[0] for new in ELSEWHERE.values()} <= keys


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("preset=8B", "preset=8B: did you mean llama3-8b?"),
        ("preset=lama3-8b", "preset=lama3-8b: did you mean llama3-8b?"),
        ("hardware=a100", "hardware=a100: did you mean a100-40 or a100-80? one of "),
        ("hardware=nvidia-h200-sxm", "hardware=nvidia-h200-sxm: did you mean h200? one of "),
        ("hardware=4090", "hardware=4090: did you mean rtx4090? one of "),
        ("hardware=v100", "hardware=v100: unknown machine; one of "),
    ],
)
def test_the_error_of_a_wrong_name_suggests_a_valid_name(argument: str, message: str) -> None:
    with pytest.raises(InputError) as refused:
        plan.main([argument])
    assert str(refused.value).startswith(message)
    assert str(no_such_key("heads", ["model.heads", "tokens"])) == "heads: no such key; did you mean model.heads?"


@pytest.mark.parametrize(
    ("name", "suggestion"),
    [("GB200-NVL72", "gb200"), ("h100-80", "h100"), ("b2", "b200 or gb200"), ("HGX B200", "b200")],
)
def test_the_error_of_a_wrong_cluster_suggests_the_gpu_model(name: str, suggestion: str) -> None:
    with pytest.raises(InputError, match=f"^cluster={name}: did you mean {suggestion}[?] one of "):
        cluster_named(name)


# --- help and output before slow imports -----------------------------------------------------------------------------


SLOW = ("torch", "hydra", "matplotlib", "jinja2")
"""Packages that take half a second or more to import."""


def test_the_choices_of_options_match_the_code_they_select() -> None:
    assert (options.ENGINES, options.TRANSPORTS, options.DTYPES) == (
        select.ENGINES, rendezvous.TRANSPORTS, tuple(exactness.DTYPES)
    )  # fmt: skip


def test_help_imports_no_slow_package() -> None:
    program = f"""
import contextlib, io, json, sys
from ringattn import cli
results = {{}}
for command in cli.COMMANDS:
    with contextlib.redirect_stdout(io.StringIO()) as output:
        assert cli.main([command, "--help"]) == 0
    results[command] = [output.getvalue()[:6], *(name for name in {SLOW!r} if name in sys.modules)]
print(json.dumps(results))
"""
    done = python("-c", program)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == {command: ["usage:"] for command in cli.COMMANDS}


@pytest.mark.parametrize("width", [60, 120])
@pytest.mark.parametrize("command", ["", *cli.COMMANDS])
def test_help_fits_the_width_of_the_terminal(
    command: str, width: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "1000")
    assert cli.main([command, "--help"] if command else ["--help"]) == 0
    widest = capsys.readouterr().out
    monkeypatch.setenv("COLUMNS", str(width))
    assert cli.main([command, "--help"] if command else ["--help"]) == 0
    text = capsys.readouterr().out
    assert [line for line in text.splitlines() if len(line) > width and " " in line.strip()] == []
    assert text.replace("\\\n", "").split() == widest.replace("\\\n", "").split(), "a word is missing"


def test_help_without_a_terminal_has_a_fixed_width() -> None:
    done = python("-m", "ringattn", "train", "--help", env={"COLUMNS": ""})
    assert 90 < max(map(len, done.stdout.splitlines())) <= 100


def test_wrapped_commands_can_be_pasted_into_a_shell(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    command = "ringattn plan tokens=1000000000 recompute=full picture=plan.png"
    lines = wrapped(f"Examples: ringattn plan\n          {command}")
    assert lines[0] == "Examples: ringattn plan" and len(lines) > 2
    assert all(line.endswith(" \\") for line in lines[1:-1]) and max(map(len, lines)) <= 40
    assert "".join(lines[1:]).replace("\\", "").split() == command.split()


def test_paragraphs_of_the_help_are_wrapped_to_the_width(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    text = "One two three four five six seven eight nine ten\neleven.\n\n  DIR  folder of one or more points of a sweep"
    assert wrapped(text) == ["One two three four five six seven eight", "nine ten eleven.", "",
                             "  DIR  folder of one or more points of a", "       sweep"]  # fmt: skip


def test_newlines_in_defaults_are_escaped_in_the_help(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    (line,) = (line for line in help_text("train", "", TrainConfig).splitlines() if "separator" in line)
    assert r"\n\n" in line and "text that ends each document" in line


@pytest.mark.parametrize("command", ["run", "sweep", "train", "check"])
def test_the_start_is_announced_before_slow_imports(
    command: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    messages: list[str] = []

    def load(name: str) -> object:
        messages.append(capsys.readouterr().err)
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "import_module", load)
    assert cli.main([command, "tokens=8k"]) == 130
    assert messages[0].startswith(f"ringattn {command}: {cli.STARTS[command]}")
    assert "tokens=8k is 8,000 tokens" in messages[0]
    monkeypatch.setenv("RANK", "1")
    assert cli.main([command]) == 130 and messages[1] == ""  # only rank 0 prints it


@pytest.mark.parametrize(
    ("command", "advice"),
    [("run", "nothing is saved; run the same command again"), ("sweep", "finished points are saved"),
     ("train", "to continue from the last checkpoint in out")],
)  # fmt: skip
def test_ctrl_c_interrupts_slow_imports_at_once(
    command: str, advice: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def load(name: str) -> object:
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(10)
        raise AssertionError("not interrupted")

    monkeypatch.setattr(cli, "import_module", load)
    # Set Python's default handler: a process that was started in the background ignores SIGINT.
    previous = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        assert cli.main([command]) == 130
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, previous)
    printed = capsys.readouterr()
    assert f"ringattn {command}: interrupted; " in printed.err and advice in printed.err
    assert "Traceback" not in printed.err


def accept_ctrl_c() -> None:
    """Reset SIGINT to its default, as in a foreground process. Background processes ignore SIGINT."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


@pytest.mark.slow
def test_ctrl_c_ends_a_run_before_the_agent_times_out() -> None:
    arguments = "-m", "ringattn", "run", "ranks=2", "tokens=256", "shape=small", "repeats=100000"
    running = started(*arguments, start_new_session=True, preexec_fn=accept_ctrl_c)
    wait_for_line(running, "pass 1 ")
    start = time.monotonic()
    running.send_signal(signal.SIGINT)
    _, errors = running.communicate(timeout=60)
    duration_s = time.monotonic() - start
    assert running.returncode == 130 and "interrupted; nothing is saved" in errors and "Traceback" not in errors
    # If a rank did not end, torch's agent would wait 30 s for it. The limit leaves time for a busy machine.
    assert duration_s < 20.0


def test_torchrun_reports_an_error_of_all_ranks_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 0 writes its error into the error file of torchrun and exits with 2.

    Rank 1 waits. It exits with 0 if torchrun ends it, and with 2 if torchrun does not.
    """
    file = tmp_path / "error.json"
    for name, value in {"TORCHELASTIC_RUN_ID": "none", "LOCAL_RANK": "0", "TORCHELASTIC_ERROR_FILE": str(file)}.items():
        monkeypatch.setenv(name, value)
    assert cli.main(["plan", "tokn=1"]) == 2
    assert json.loads(file.read_text())["message"] == "ringattn plan refused its arguments, see above"
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setattr(cli, "REFUSED_S", 0.0)
    file.unlink()
    before = signal.getsignal(signal.SIGTERM)
    try:
        assert cli.main(["plan", "tokn=1"]) == 2 and not file.exists()
    finally:
        signal.signal(signal.SIGTERM, before)
    program = "import sys\nfrom ringattn import cli\nsys.exit(cli.main(['plan', 'tokn=1']))"
    with started("-c", program, env=dict(os.environ)) as waiting:
        assert waiting.stderr is not None and "no such key" in waiting.stderr.readline()
        time.sleep(0.5)
        waiting.terminate()
        assert waiting.wait(20) == 0
    assert "no such key" in capsys.readouterr().err


# --- likely mistakes of users ----------------------------------------------------------------------------------------


SMALL = ("tokens=64", "shape=small", "repeats=1", "warmup=1")
INSIDE = {"RANK": "0", "WORLD_SIZE": "4", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
"""The variables that torchrun sets for rank 0 of 4. The mistakes below are reported before the ranks connect."""


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("sweep out=/proc/nowhere tokens=64,128", "out=/proc/nowhere: cannot be written"),
        ("sweeep ranks=1,2", "'sweeep' is not a command; did you mean sweep?"),
    ],
)
def test_mistakes_in_arguments(arguments: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(arguments.split()) == 2
    printed = capsys.readouterr()
    assert message in printed.err and not printed.out


@pytest.mark.slow
def test_a_misspelled_key_exits_with_2() -> None:
    done = ringattn("run", "shedule=ring")
    assert done.returncode == 2 and "shedule: no such key; did you mean schedule?" in done.stderr, done.stderr
    assert "Traceback" not in done.stderr and not done.stdout


@pytest.mark.parametrize(
    ("main", "arguments", "message"),
    [
        (run.main, ["ranks=8", "tokens=64"], "ranks=8: torchrun started 4 ranks; leave ranks out"),
        (run.main, ["tokens=64,128"], "without torchrun, because it starts its own ranks"),
        (cli.main, ["sweep", "tokens=64,128"], "run it without torchrun"),
    ],
)
def test_mistakes_under_torchrun(
    main: Callable[[list[str]], int], arguments: list[str], message: str, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    for name, value in INSIDE.items():
        monkeypatch.setenv(name, value)
    assert main(arguments) == 2 and message in capsys.readouterr().err
    monkeypatch.setenv("RANK", "1")
    assert main(arguments) == 2 and ("sweep" in arguments or not capsys.readouterr().err)  # only rank 0 prints it


@pytest.mark.slow
def test_a_mistake_under_torchrun_exits_with_2() -> None:
    done = ringattn("run", "ranks=8", "tokens=64", env=INSIDE)
    assert done.returncode == 2 and "torchrun started 4 ranks; leave ranks out" in done.stderr, done.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["ranks=2", "transport=nccl"], "transport='nccl' needs a CUDA device, and torch finds none; use gloo"),
        (["engine=triton"], "engine='triton' "),
    ],
)
def test_gpu_options_on_a_machine_without_a_gpu(arguments: list[str], message: str) -> None:
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    done = ringattn("run", *arguments, *SMALL)
    assert done.returncode == 2 and message in done.stderr, done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.slow
def test_an_unreachable_host() -> None:
    nodes = "nnodes=2", "node_rank=1", "timeout_s=2"
    for host in ("127.0.0.1", "no.such.host.invalid"):
        port = free_port()
        done = ringattn("run", *nodes, f"rdzv_endpoint={host}:{port}", *SMALL)
        assert done.returncode == 1
        assert f"node 0 does not answer at {host}:{port}: check the host and port" in done.stderr


@pytest.mark.slow
def test_a_missing_node() -> None:
    nodes = "nnodes=2", "node_rank=0", f"rdzv_endpoint=127.0.0.1:{free_port()}"
    done = ringattn("run", *nodes, "timeout_s=2", *SMALL)
    assert done.returncode == 1 and "nodes [1] of 2 did not arrive within 2 s: start `ringattn run`" in done.stderr


@pytest.mark.slow
def test_a_port_in_use() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        endpoint = f"rdzv_endpoint=127.0.0.1:{taken.getsockname()[1]}"
        done = ringattn("run", "nnodes=2", "node_rank=0", endpoint, "timeout_s=2", *SMALL)
    assert done.returncode == 1 and "is in use on node 0: choose another" in done.stderr


@pytest.mark.slow
def test_a_missing_nccl(tmp_path: Path) -> None:
    # The program simulates a machine with a GPU and without libnccl: torch reports a GPU, and the library's names
    # match no file.
    program = tmp_path / "program.py"
    program.write_text(
        "import sys, torch\n"
        "from ringattn.transport import location\n"
        "from ringattn.transport.nccl import library\n"
        "torch.cuda.is_available = lambda: True\n"
        "torch.cuda.set_device = lambda device: None\n"
        "torch.cuda.device_count, torch.cuda.current_device = lambda: 1, lambda: 0\n"
        "location.torch_gpu = lambda index: location.Gpu('a GPU', None)\n"
        "library.SONAME, library.WHEEL = 'libnone.so.2', 'none.such'\n"
        "import ringattn\n"
        "try:\n    ringattn.Ring(transport='nccl', timeout_s=5)\n"
        "except ringattn.errors.RingError as error:\n    sys.exit(f'{type(error).__name__}: {error}')\n"
    )
    done = python(str(program))
    assert done.returncode == 1 and "UnsupportedError: no libnccl in this process" in done.stderr
    assert "install a CUDA build" in done.stderr and "`ringattn[cu13]`" in done.stderr


@pytest.mark.slow
def test_the_folder_of_another_sweep(tmp_path: Path) -> None:
    with opened(tmp_path) as folder:
        folder.claim(["tokens=64,128"], ["0123456789ab"], code_version())
    done = ringattn("sweep", f"out={tmp_path}", *SMALL, "seed=1,2")
    assert done.returncode == 2 and "holds the points of another sweep (tokens=64,128)" in done.stderr
    assert "give this sweep a separate folder with out=" in done.stderr


@pytest.mark.slow
def test_a_killed_rank(tmp_path: Path) -> None:
    environment = {"RINGATTN_FLIGHT_DIR": str(tmp_path)}
    running = started("-m", "ringattn", "run", "ranks=2", "tokens=2048", "repeats=100000", env=environment)
    wait_for_line(running, "pass 1 ")
    os.kill(process_of_rank(1, running.pid), signal.SIGKILL)
    start = time.monotonic()
    _, errors = running.communicate(timeout=120)
    assert running.returncode == 1 and time.monotonic() - start < 60
    assert "rank 1 was killed (SIGKILL)" in errors and "use fewer tokens" in errors
    (record,) = tmp_path.iterdir()  # rank 0 wrote it
    assert record.name == "flight-0.json" and json.loads(record.read_text())["exchanges"] > 0
    assert cli.main(["flight", str(tmp_path)]) == 1
