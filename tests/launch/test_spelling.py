"""One key for one concept on every command, names in any case, and counts of tokens."""

from __future__ import annotations

from typing import Any

import pytest

from ringattn import cli
from ringattn.errors import InputError
from ringattn.launch.calls import FORMER_MASKS
from ringattn.launch.capacity import plan
from ringattn.launch.capacity.plan import PlanConfig
from ringattn.launch.config import load
from ringattn.launch.measure.calibrate import CalibrateConfig
from ringattn.launch.measure.check import CheckConfig
from ringattn.launch.measure.run import RunConfig
from ringattn.launch.measure.sweep import SweepConfig, described
from ringattn.launch.options import leaves
from ringattn.launch.pictures.show import ExplainConfig
from ringattn.launch.pictures.timeline import TimelineConfig
from ringattn.launch.train.config import TrainConfig
from ringattn.launch.words import DTYPES, REPLACED, lengths_told, no_such_key, spelled, with_lengths
from ringattn.planner.cluster import cluster_named

CONFIGS = {RunConfig: "run", TrainConfig: "train"}
COMMANDS = (RunConfig, CheckConfig, ExplainConfig, PlanConfig, TrainConfig, TimelineConfig)


def read(schema: Any, *words: str) -> dict[str, Any]:
    """Every option by its key."""
    return {key: value for key, value, _ in leaves(load(words, schema, CONFIGS.get(schema)))}


def same_words(schema: Any, words: str, same: str) -> bool:
    """Whether a command reads them alike; Hydra, which is slow, gets what `spelled` says."""
    found = sorted(spelled(words.split(), schema))
    return found == sorted(spelled(same.split(), schema)) == sorted(same.split())


@pytest.mark.parametrize(
    ("text", "count"),
    [("128k", 128_000), ("128K", 128_000), ("1M", 10**6), ("1.5M", 1_500_000), ("1e6", 10**6), ("2G", 2 * 10**9),
     ("128Ki", 131_072), ("128ki", 131_072), ("1Mi", 2**20), ("4096", 4096), ("1.5e3", 1500), ("0.5Ki", 512)],
)  # fmt: skip
def test_counts_of_tokens(text: str, count: int) -> None:
    for schema in COMMANDS:
        assert same_words(schema, f"tokens={text}", f"tokens={count}")
    if text == "128Ki":
        assert read(RunConfig, f"tokens={text}")["tokens"] == count


def test_counts_within_other_values() -> None:
    assert with_lengths("tokens", "64k,128Ki,4096") == "64000,131072,4096"
    assert with_lengths("segment_lengths", "[2k,8Ki]") == "[2000,8192]"
    assert with_lengths("tokens", "range(1k,4k,1k)") == "range(1000,4000,1000)"
    assert with_lengths("tokens", "1_000_000") == "1_000_000" and with_lengths("tokens", "0.5") == "0.5"
    assert read(TrainConfig, "curriculum_start_tokens=1Ki", "curriculum_steps=2")["curriculum_start_tokens"] == 1024
    assert [point.config.tokens for point in described(["tokens=1k,1Ki"])[1]] == [1000, 1024]
    with pytest.raises(InputError, match=r"^tokens=1\.0005k: is 1000\.5 tokens; write a whole number"):
        spelled(["tokens=1.0005k"], RunConfig)


@pytest.mark.parametrize("wrong", ["128x", "5kg", "128kb", "1e-3", "0x20", "64,128x", "[1k,2q]", "range(1k,4x)"])
def test_a_count_with_other_letters_is_refused_with_those_that_there_are(wrong: str) -> None:
    for schema in COMMANDS:
        with pytest.raises(
            InputError, match=r"^tokens=\w+.*: is no length; write 131072, 128k, 128Ki, 1M, 1Mi, 1e6 or 1B$"
        ):
            spelled([f"tokens={wrong}"], schema)


@pytest.mark.parametrize("text", ["abc", "1.5", "''", "[1,2]"])
def test_what_is_no_count_is_refused_in_the_same_words(text: str) -> None:
    with pytest.raises(InputError, match=r"^tokens=.*: is no length; write 131072, 128k, 128Ki"):
        load([f"tokens={text}"], PlanConfig)


def test_thousands_have_no_commas() -> None:
    for wrong in ("128,000", "1,000,000", "1,024,000"):
        with pytest.raises(InputError, match=f"^tokens={wrong}: write {wrong.replace(',', '')}, without commas"):
            spelled([f"tokens={wrong}"], RunConfig)
    assert spelled(["tokens=64,128", "tokens=128,0"], RunConfig) == ["tokens=64,128", "tokens=128,0"]


@pytest.mark.parametrize(
    ("word", "told"),
    [
        ("zero_stage=two", "zero_stage=two: should be a whole number"),
        ("framework_gib=lots", "framework_gib=lots: should be a number"),
        ("tied=maybe", "tied=maybe: should be true or false"),
        ("segment_lengths=2048", "segment_lengths: should be a list, as [1,2]"),
        ("batch=null", "batch=null: has to have a value"),
    ],
)
def test_a_value_of_the_wrong_kind(word: str, told: str) -> None:
    with pytest.raises(InputError) as refused:
        load([word], PlanConfig)
    assert str(refused.value) == told


def test_other_options_take_no_letters() -> None:
    assert spelled(["out=8k", "repeats=1e1", "seed=1k"], RunConfig) == ["out=8k", "repeats=1e1", "seed=1k"]


def test_what_a_length_came_to_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    assert list(lengths_told(["tokens=128k", "ranks=2", "window_tokens=1Ki,64", "tokens=1e6"])) == [
        "tokens=128k is 128,000 tokens (128Ki: 131,072)", "window_tokens=1Ki is 1,024 tokens",
    ]  # fmt: skip
    assert cli.main(["plan", "tokens=8k", "tokn=1"]) == 2
    assert "ringattn plan: tokens=8k is 8,000 tokens (8Ki: 8,192)" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("schema", "words", "same"),
    [
        (PlanConfig, "hardware=H100", "hardware=h100"),
        (PlanConfig, "preset=70b", "preset=70B"),
        (PlanConfig, "preset=LLAMA3-8B", "preset=llama3-8b"),
        (PlanConfig, "precision=BF16", "precision=bf16"),
        (RunConfig, "dtype=BF16", "dtype=bf16"),
        (PlanConfig, "mask=Causal", "mask=causal"),
        (RunConfig, "schedule=RING", "schedule=ring"),
        (RunConfig, "cluster=A100", "cluster=a100"),
        (ExplainConfig, "cluster=H100", "cluster=h100"),
        (ExplainConfig, "dtype=BFLOAT16", "dtype=bf16"),
        (TrainConfig, "layout=ZigZag", "layout=zigzag"),
    ],
)
def test_names_in_any_case(schema: Any, words: str, same: str) -> None:
    assert same_words(schema, words, same)


@pytest.mark.parametrize(
    ("schema", "word", "new"),
    [
        (RunConfig, "nproc=3", "ranks=3"),
        (CalibrateConfig, "nproc=3", "ranks=3"),
        (PlanConfig, "ring=3", "ranks=3"),
        (PlanConfig, "attention=full", "mask"),
        (ExplainConfig, "length_tokens=77", "tokens=77"),
        (RunConfig, "q_heads=4", "heads=4"),
        (RunConfig, "shape.heads=4", "heads=4"),
        (RunConfig, "schedule.name=ring", "schedule=ring"),
        (RunConfig, "transport.timeout_s=4", "timeout_s=4"),
        (RunConfig, "precision=bf16", "dtype=bf16"),
        (PlanConfig, "dtype=bf16", "precision=bf16"),
        (PlanConfig, "cluster=h100", "hardware=h100"),
        (RunConfig, "hardware=h100", "cluster=h100"),
        (ExplainConfig, "left=511", "window=[LEFT,RIGHT]"),
        (ExplainConfig, "right=0", "window=[LEFT,RIGHT]"),
        (TimelineConfig, "window_tokens=7", "window=[LEFT,RIGHT] without the query's own key"),
        (RunConfig, "mask.kind=full", "mask"),
        (RunConfig, "mask.documents=4", "documents=4"),
        (RunConfig, "mask.ratio=4", "segment_lengths=[2048,8192] dilation_rates=[1,4]"),
        (TimelineConfig, "warm_ups=1", "warmup=1"),
        (SweepConfig, "out_dir=x", "out=x"),
    ],
)
def test_a_former_key_is_refused_with_the_new_name(schema: Any, word: str, new: str) -> None:
    with pytest.raises(InputError) as refused:
        spelled([word], schema)
    assert str(refused.value).startswith(f"{word}: this key has another name here; write {new}")
    assert not {leaf for leaf, _, _ in leaves(schema())} & {word.partition("=")[0]}


def test_every_replaced_key_leads_to_a_key_of_some_command() -> None:
    commands = (*COMMANDS, CalibrateConfig, SweepConfig)
    keys = {leaf for schema in commands for leaf, _, _ in leaves(schema())}
    assert {new.partition("=")[0] for new in REPLACED.values()} <= keys


def test_a_key_that_only_another_command_has_is_no_such_key() -> None:
    assert spelled(["warm_ups=1"], PlanConfig) == ["warm_ups=1"]
    assert str(no_such_key("heads", ["model.heads", "tokens"])) == "heads: no such key; did you mean model.heads?"


@pytest.mark.parametrize("kind", FORMER_MASKS)
def test_the_former_values_of_mask_are_refused_with_what_to_write(kind: str) -> None:
    with pytest.raises(InputError, match=f"^mask={kind}: is not a mask here; write ") as refused:
        ExplainConfig(mask=kind).check()
    load(str(refused.value).partition("; write ")[2].split(), ExplainConfig).check()


@pytest.mark.parametrize("word", ["-m", "--cfg", "~mask", "hydra.sweep.dir=128k", "hydra/launcher=basic", "tokens"])
def test_words_of_hydra_are_left_alone(word: str) -> None:
    assert spelled([word], RunConfig) == [word]


def test_a_prefix_of_hydra_is_kept() -> None:
    assert spelled(["++tokens=8k", "+heads=4"], RunConfig) == ["++tokens=8000", "+heads=4"]


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("preset=8B", "preset=8B: did you mean llama3-8b?"),
        ("preset=lama3-8b", "preset=lama3-8b: did you mean llama3-8b?"),
        ("hardware=a100", "hardware=a100: did you mean a100-40 or a100-80? one of "),
        ("hardware=H100-80", "hardware=H100-80: did you mean h100? one of "),
        ("hardware=nvidia-h200-sxm", "hardware=nvidia-h200-sxm: did you mean h200? one of "),
        ("hardware=4090", "hardware=4090: did you mean rtx4090? one of "),
        ("hardware=L40", "hardware=L40: no such machine here; one of "),
        ("hardware=v100", "hardware=v100: no such machine here; one of "),
    ],
)
def test_a_wrong_name_is_answered_with_one_that_makes_sense(words: str, told: str) -> None:
    with pytest.raises(InputError) as refused:
        plan.main([words])
    assert str(refused.value).startswith(told)


@pytest.mark.parametrize(
    ("name", "meant"), [("GB200-NVL72", "gb200"), ("h100-80", "h100"), ("cpus", "cpu"), ("b2", "b200 or gb200"),
                        ("HGX B200", "b200")],
)  # fmt: skip
def test_a_machine_is_its_model(name: str, meant: str) -> None:
    with pytest.raises(InputError, match=f"^cluster={name}: did you mean {meant}[?] one of "):
        cluster_named(name)


# --- names of schedules ----------------------------------------------------------------------------------------------

WITH_SCHEDULE = [schema for schema in COMMANDS if schema is not CheckConfig]


@pytest.mark.parametrize("schema", WITH_SCHEDULE)
def test_a_schedule_has_its_other_name_and_a_number(schema: Any) -> None:
    assert same_words(schema, "schedule=all_to_all", "schedule=ulysses")
    assert same_words(schema, "schedule=ALL_TO_ALL", "schedule=ulysses")
    assert same_words(schema, "schedule=Double_Ring:2", "schedule=double_ring:2")
    assert read(schema, "schedule=double_ring:2")["schedule"] == "double_ring:2"
    for wrong in ("double_ring:two", "double_ring:02", "double_ring:", "ring:2"):
        with pytest.raises(InputError, match=f"^schedule={wrong}.*choose one of auto, ring, "):
            read(schema, f"schedule={wrong}")


def test_a_sweep_takes_a_numbered_schedule_beside_others() -> None:
    words = spelled(["schedule=ring,double_ring:2,all_to_all"], RunConfig)
    assert words == ["schedule=ring,double_ring:2,ulysses"]


# --- names of dtypes --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "schema",
    [
        RunConfig,
        TrainConfig,
        *(
            pytest.param(one, marks=pytest.mark.slow)
            for one in (CalibrateConfig, CheckConfig, ExplainConfig, TimelineConfig)
        ),
    ],
)
def test_either_name_of_a_dtype_is_taken(schema: Any) -> None:
    for long, short in DTYPES.items():
        names = [name for name in (long, short) if _refusal(f"dtype={name}", schema) is None]
        assert names in ([], [long, short])
    assert load(["dtype=bf16"], schema) == load(["dtype=bfloat16"], schema)
    assert "choose one of" in str(_refusal("dtype=int8", schema))


def _refusal(word: str, schema: Any) -> InputError | None:
    try:
        load([word], schema)
    except InputError as error:
        return error
    return None


def test_a_sweep_takes_either_name_of_a_dtype() -> None:
    long, short = (described([f"dtype={names}", "tokens=64"])[1] for names in ("float32,bfloat16", "fp32,bf16"))
    assert long == short
