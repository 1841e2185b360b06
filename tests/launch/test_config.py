"""One spelling for each concept on every command, and the old ones read as the new."""

from typing import Any

import pytest

from ringattn.errors import InputError
from ringattn.launch.capacity.plan import PlanConfig
from ringattn.launch.config import load
from ringattn.launch.measure.calibrate import CalibrateConfig
from ringattn.launch.measure.check import CheckConfig
from ringattn.launch.measure.points import hash_of
from ringattn.launch.measure.run_config import RunConfig, load_run
from ringattn.launch.measure.sweep import described
from ringattn.launch.options import leaves
from ringattn.launch.pictures.show import ExplainConfig
from ringattn.launch.pictures.timeline import TimelineConfig
from ringattn.launch.spelling import ALIASES, DTYPES
from ringattn.launch.train.config import TrainConfig

OLD: list[tuple[type, str, str]] = [
    (RunConfig, "nproc=3", "ranks=3"),
    (CalibrateConfig, "nproc=3", "ranks=3"),
    (PlanConfig, "ring=3", "ranks=3"),
    (PlanConfig, "attention=full", "mask=full"),
    *((one, "length_tokens=77", "tokens=77") for one in (CheckConfig, ExplainConfig, PlanConfig, TimelineConfig)),
    (TrainConfig, "length_tokens=77", "tokens=77"),
    *((one, "q_heads=6", "heads=6") for one in (CheckConfig, ExplainConfig, TimelineConfig)),
]


@pytest.mark.parametrize(("schema", "old", "new"), OLD)
def test_an_old_spelling_gives_the_same(schema: Any, old: str, new: str) -> None:
    assert load([old], schema) == load([new], schema) != schema()


def test_every_old_spelling_is_tried() -> None:
    assert {old.partition("=")[0] for _, old, _ in OLD} == set(ALIASES)


@pytest.mark.parametrize(("schema", "old", "new"), OLD)
def test_both_spellings_are_refused(schema: Any, old: str, new: str) -> None:
    key, named = old.partition("=")[0], new.partition("=")[0]
    with pytest.raises(InputError, match=rf"^{key}: is another spelling of {named}, and {named} is given too"):
        load([old, new], schema)


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


def test_two_old_spellings_are_refused() -> None:
    with pytest.raises(InputError, match=r"^nproc: is another spelling of ranks, and ring is given too"):
        load(["nproc=2", "ring=2"], PlanConfig)


def test_a_sweep_takes_old_spellings() -> None:
    old, new = (described([f"{key}=1,2", "tokens=64"])[1] for key in ("nproc", "ranks"))
    assert old == new and [point.label for point in new] == ["ranks=1", "ranks=2"]
    with pytest.raises(InputError, match=r"^nproc: is another spelling of ranks"):
        described(["nproc=1,2", "ranks=1,2"])


def test_a_key_that_means_something_else_is_no_alias() -> None:
    assert load(["attention=full"], TrainConfig).attention == "full"
    with pytest.raises(InputError, match=r"^attention: no such key"):
        load(["attention=full"], RunConfig, "run")


def test_points_of_earlier_versions_have_the_same_hash() -> None:
    assert hash_of(load_run(["ranks=2", "tokens=64", "schedule=ring", "shape=small"])) == "1d5d8ab8100f"


@pytest.mark.parametrize(
    "schema", [RunConfig, CheckConfig, ExplainConfig, PlanConfig, TrainConfig, CalibrateConfig, TimelineConfig]
)
def test_no_command_has_an_old_spelling(schema: Any) -> None:
    keys = {leaf for leaf, _, _ in leaves(schema())}
    assert keys & set(ALIASES) <= ({"attention"} if schema is TrainConfig else set())
