"""The words of a command line: one key for one concept, names in any case, counts of tokens, and what is refused."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from ringattn import cli
from ringattn.errors import InputError
from ringattn.launch.calls import RunConfig
from ringattn.launch.capacity import plan
from ringattn.launch.capacity.plan import PlanConfig
from ringattn.launch.config import load
from ringattn.launch.measure.calibrate import CalibrateConfig
from ringattn.launch.measure.check import CheckConfig
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
)
from ringattn.launch.pictures.show import ExplainConfig
from ringattn.launch.pictures.timeline import TimelineConfig
from ringattn.launch.report import compare
from ringattn.launch.train.config import TrainConfig
from ringattn.planner.cluster import cluster_named
from tests.contributing import example

COMMANDS = (RunConfig, CheckConfig, ExplainConfig, PlanConfig, TrainConfig, TimelineConfig)


@pytest.mark.parametrize("read", [load, load_plain])
def test_the_worked_example_of_a_key_is_read_limited_suggested_and_shown(read: Any) -> None:
    schema = example("WarmedCall")["WarmedCall"]
    assert (read(["warmups=5", "heads=4"], schema).warmups, read([], schema).warmups) == (5, 2)
    for words, message in {
        "warmups=-1": "warmups=-1: must be at least 0",
        "warmups=few": "warmups=few: should be a whole number",
        "warmup=5": "did you mean warmups",
    }.items():
        with pytest.raises(InputError, match=message):
            read([words], schema)
    assert re.search(r"^ +warmups +2 +calls before those that are timed$", help_text("run", "", schema), re.MULTILINE)


# --- words that are not key=value ------------------------------------------------------------------------------------


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
        ("verbose", "verbose: write options as key=value; --help lists the keys"),
        ("=5", "=5: write options as key=value; --help lists the keys"),
        ("zero_stage=two", "zero_stage=two: should be a whole number"),
        ("framework_gib=lots", "framework_gib=lots: should be a number"),
        ("tied=maybe", "tied=maybe: should be true or false"),
        ("segment_lengths=2048", "segment_lengths: should be a list, as [1,2]"),
        ("batch=null", "batch=null: has to have a value"),
        *((f"tokens={text}", f"tokens={text}: is no length; write 131072, 128k, 128Ki") for text in ("abc", "1.5")),
    ],
)
def test_what_to_write_instead(words: str, says: str) -> None:
    with pytest.raises(InputError) as refused:
        load(words.split(), PlanConfig)
    assert str(refused.value).startswith(says)


@pytest.mark.parametrize(
    "words", ["--out x", "--ranks=2", "ranks = 2", "-m", "--nproc=2", "--fast", "ranks=two", "rank=2", "rounds=0"]
)
def test_commands_without_hydra_say_the_same(words: str) -> None:
    said = set()
    for read in (load, load_plain):
        with pytest.raises(InputError) as refused:
            read(words.split(), CalibrateConfig)
        said.add(str(refused.value))
    assert len(said) == 1


def test_a_sweep_and_a_comparison_say_so_too() -> None:
    with pytest.raises(InputError, match=r"^--multirun: of all commands .* without it$"):
        described(["--multirun", "tokens=64,96"])
    with pytest.raises(InputError, match=r"^--heads 4: write heads=4$"):
        described(["--heads", "4"])
    with pytest.raises(InputError, match=r"^--threshold 0\.1: write threshold=0\.1$"):
        compare.main(["--threshold", "0.1", "a", "b"])


def test_what_words_come_to_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["tokens=1k", "batch=2", "tokens=2k", "-m", "tokens=128k", "heads=4", "heads=8", "window_tokens=1Ki,64"]
    assert list(notes_on(words)) == [
        "tokens is given 3 times: tokens=128k counts",
        "heads is given twice: heads=8 counts",
        "tokens=128k is 128,000 tokens (128Ki: 131,072)",
        "window_tokens=1Ki is 1,024 tokens",
    ]
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


# --- counts of tokens ------------------------------------------------------------------------------------------------


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
def test_counts_of_tokens(key: str, text: str, count: str) -> None:
    assert spelled([f"{key}={text}"], RunConfig) == [f"{key}={count}"]


def test_counts_reach_commands() -> None:
    assert load(["tokens=128Ki"], RunConfig, "run").tokens == 131_072
    assert load(["curriculum_start_tokens=1Ki"], TrainConfig, "train").curriculum_start_tokens == 1024
    assert [point.config.tokens for point in described(["tokens=1k,1Ki"])[1]] == [1000, 1024]


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        *((text, "is no length; write 131072, 128k, 128Ki, 1M, 1Mi, 1e6 or 1B") for text in (
            "128x", "5kg", "1e-3", "0x20", "64,128x", "range(1k,4x)")),
        ("1.0005k", r"is 1000\.5 tokens; write a whole number"),
        ("128,000", "write 128000, without commas"), ("1,024,000", "write 1024000, without commas"),
    ],
)  # fmt: skip
def test_what_is_no_count_is_refused(wrong: str, says: str) -> None:
    with pytest.raises(InputError, match=rf"^tokens=\w+.*: {says}"):
        with_lengths("tokens", wrong)


# --- keys and names --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("schema", "words", "same"),
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
def test_names_in_any_case(schema: Any, words: str, same: str) -> None:
    assert spelled([words], schema) == [same]


@pytest.mark.parametrize("schema", [schema for schema in COMMANDS if schema is not CheckConfig])
def test_a_schedule_may_have_a_number(schema: Any) -> None:
    name = {RunConfig: "run", TrainConfig: "train"}.get(schema)
    assert load(["schedule=double_ring:2"], schema, name).schedule == "double_ring:2"
    for wrong in ("double_ring:two", "double_ring:02", "double_ring:", "double_ring:N", "ring:2"):
        with pytest.raises(InputError, match=f"^schedule={wrong}.*choose one of auto, ring, .*, double_ring:N"):
            load([f"schedule={wrong}"], schema, name)


@pytest.mark.parametrize("schema", [RunConfig, TrainConfig, CalibrateConfig, CheckConfig])
def test_either_name_of_a_dtype_is_taken(schema: Any) -> None:
    declared = next(described.metadata["choices"] for key, _, described in leaves(schema()) if key == "dtype")
    for pair in SAME_NAMES[:4]:
        found = {spelled([f"dtype={name}"], schema)[0] for name in pair}
        assert len(found) == 1 if set(pair) & set(declared) else len(found) == 2
    assert load(["dtype=bf16"], schema) == load(["dtype=bfloat16"], schema)


@pytest.mark.parametrize(
    ("schema", "word", "new"),
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
def test_a_key_of_another_command_is_refused_with_the_one_here(schema: Any, word: str, new: str) -> None:
    with pytest.raises(InputError) as refused:
        spelled([word], schema)
    assert str(refused.value).startswith(f"{word}: this key has another name here; write {new}")


def test_every_key_of_elsewhere_leads_to_a_key_of_some_command() -> None:
    keys = {leaf for schema in (*COMMANDS, CalibrateConfig, SweepConfig) for leaf, _, _ in leaves(schema())}
    assert {new.partition("=")[0] for new in ELSEWHERE.values()} <= keys


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("preset=8B", "preset=8B: did you mean llama3-8b?"),
        ("preset=lama3-8b", "preset=lama3-8b: did you mean llama3-8b?"),
        ("hardware=a100", "hardware=a100: did you mean a100-40 or a100-80? one of "),
        ("hardware=nvidia-h200-sxm", "hardware=nvidia-h200-sxm: did you mean h200? one of "),
        ("hardware=4090", "hardware=4090: did you mean rtx4090? one of "),
        ("hardware=v100", "hardware=v100: no such machine here; one of "),
    ],
)
def test_a_wrong_name_is_answered_with_one_that_makes_sense(words: str, told: str) -> None:
    with pytest.raises(InputError) as refused:
        plan.main([words])
    assert str(refused.value).startswith(told)
    assert str(no_such_key("heads", ["model.heads", "tokens"])) == "heads: no such key; did you mean model.heads?"


@pytest.mark.parametrize(
    ("name", "meant"), [("GB200-NVL72", "gb200"), ("h100-80", "h100"), ("b2", "b200 or gb200"), ("HGX B200", "b200")]
)
def test_a_machine_is_its_model(name: str, meant: str) -> None:
    with pytest.raises(InputError, match=f"^cluster={name}: did you mean {meant}[?] one of "):
        cluster_named(name)
