"""The attention kernels launch by launch: their suite in the interpreter."""

from __future__ import annotations

import pytest
import torch

from ringattn.kernels.attention_forward import specialized_configs
from ringattn.kernels.configs import configs_for
from tests.kernels.interpreted import outcomes_of

pytestmark = pytest.mark.alone

CASES = [f"tests/kernels/interpreter/{name}_cases.py" for name in ("kernel", "backward", "mutation")]


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Each case of the interpreted suite: why it failed, with the seed that repeats it, or nothing."""
    return outcomes_of(CASES, tmp_path_factory.mktemp("kernels"))


@pytest.mark.unchanged("attention kernels in the interpreter")
@pytest.mark.timeout(1200)
def test_the_suite_passes_in_the_interpreter(outcomes: dict[str, str]) -> None:
    failed = {name: why for name, why in outcomes.items() if why}
    assert not failed, "\n".join(f"{name}: {why}" for name, why in failed.items())


@pytest.mark.unchanged("attention kernels in the interpreter")
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    ("prefix", "cases"),
    [
        ("test_one_launch_is_right", 12),
        ("test_carried_steps_equal_one_launch", 18),
        ("test_gradients_are_right", 12),
        ("test_a_wrong_kernel_is_seen", 14),
    ],
)
def test_every_form_and_dtype_was_tried(prefix: str, cases: int, outcomes: dict[str, str]) -> None:
    assert sum(f"::{prefix}_" in name or f"::{prefix}[" in name for name in outcomes) == cases


def test_descriptors_are_the_default_where_there_are_some() -> None:
    assert configs_for(90, torch.bfloat16, 100) is configs_for(90, torch.bfloat16, 128, "descriptors")
    assert configs_for(80, torch.float16, 128) is configs_for(80, torch.float16, 128, "pointers")
    assert {config.form for config in configs_for(100, torch.float32, 64)} == {"pointers"}
    assert {config.form for config in configs_for(90, torch.float16, 64, "pointers")} == {"pointers"}


def test_only_the_forward_kernel_is_specialized() -> None:
    found = specialized_configs(90, torch.float16, 128)
    assert [config.form for config in found] == ["specialized", *3 * ["descriptors"]]


@pytest.mark.parametrize(
    ("arch", "dtype", "dim", "form", "there"),
    [
        (80, torch.float16, 64, "descriptors", "pointers"),
        (90, torch.float32, 64, "descriptors", "pointers"),
    ],
)
def test_a_form_without_an_entry_is_refused(arch: int, dtype: torch.dtype, dim: int, form: str, there: str) -> None:
    with pytest.raises(LookupError, match=f"form '{form}' for sm_{arch}, {dtype}.*; there are some of {there}$"):
        configs_for(arch, dtype, dim, form)


@pytest.mark.parametrize(
    ("arch", "dtype", "dim"), [(80, torch.float16, 64), (90, torch.float32, 64), (90, torch.float16, 129)]
)
def test_a_specialized_launch_is_refused_by_name(arch: int, dtype: torch.dtype, dim: int) -> None:
    told = f"sm_90, half precision and head dimensions to 128, not sm_{arch}, {dtype} and {dim}"
    with pytest.raises(LookupError, match=told):
        specialized_configs(arch, dtype, dim)
