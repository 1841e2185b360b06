"""The compiled PTX of the kernels, executed without a GPU (tests/kernels/ptx).

The engine runs scenarios of its contract, forward and backward, on kernels in the interpreter; the kernels of rows and
of projections run by themselves. Results must match a float64 reference, and no launch may have a race, a deadlock or
an access outside its tensors.
`docs/internals/ptx-interpreter.md` says what this proves.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.kernels.once import once, written_by
from tests.kernels.ptx.cases import CASES, LSE_TOLERANCE, STRICT_CASES, TENSOR_MEMORY_CASES, TOLERANCE, TRITON_CASES
from tests.kernels.ptx.memory import Accessor, GlobalMemory
from tests.kernels.ptx.row_cases import CASES as ROW_CASES
from tests.kernels.ptx.row_cases import TOLERANCES

pytestmark = [pytest.mark.unchanged("compiled kernels in the PTX interpreter"), pytest.mark.timeout(1800)]


MUTANTS = ("forward/1/5", "grad_q/2/5", "grad_kv/3/5", "grad_all/4/5", "sm_100/gluon/forward/0/5", "planted")
"""A fifth of the mutants of Gluon; `python -m tests.kernels.ptx.mutants table` runs every one."""
MUTANTS_OF_TRITON = (
    "sm_80/pointers/forward/1/6", "sm_80/pointers/grad_kv/2/15", "sm_90/pointers/grad_q/1/4",
    "sm_90/descriptors/forward/2/5", "sm_90/descriptors/grad_kv/3/12",
    "sm_100/descriptors/forward/0/8", "sm_100/descriptors/grad_kv/3/30",
    "sm_100/gluon/grad_q/3/12", "sm_100/gluon/grad_kv/3/12",
    "sm_90/move_rows/128/scatter,add,wider/0/1", "sm_90/row_sums/128/dlse/0/1",
    "sm_90/epilogue_grad/128/neox,norm,two/0/1", "sm_90/project_heads/64/neox,norm,bias,rows,two/1/4",
    "sm_80/project_heads/64/neox,norm,bias,rows,two/2/4",
)  # fmt: skip
"""Mutants of kernels without Gluon and for sm_100; those of attention, forward and backward, are a share."""


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    def run_all(folder: Path) -> dict[str, Any]:
        passes = written_by("tests.kernels.ptx.cases", folder, timeout_s=1700)
        passes |= written_by("tests.kernels.ptx.row_cases", folder, timeout_s=1700)
        return passes | written_by("tests.kernels.ptx.mutants", folder, *MUTANTS, *MUTANTS_OF_TRITON, timeout_s=1700)

    return dict(once(tmp_path_factory, "ptx", run_all))


@pytest.mark.parametrize("name", CASES + TENSOR_MEMORY_CASES + TRITON_CASES)
def test_a_pass_on_compiled_kernels(name: str, outcomes: dict[str, Any]) -> None:
    """Forward and backward run without a fault, and every result is as exact as its dtype allows."""
    outcome = outcomes[name]
    assert not isinstance(outcome, str), outcome
    kernels = {"forward_kernel"} if name in CASES else {"_forward", "row_sums"}
    fused = "grad_all_kernel" if name in CASES else "grad_kv_kernel"
    kernels |= {fused} if "fused" in name else {"grad_q_kernel", "grad_kv_kernel"}
    if name in TENSOR_MEMORY_CASES:
        kernels = {"tcgen05_forward_kernel", "tcgen05_grad_q_kernel", "tcgen05_grad_kv_kernel"}
    assert set(outcome["launches"]) == kernels
    tolerance = TOLERANCE[torch.float16 if "float16" in name else torch.bfloat16]
    wrong = {x: error for x, error in outcome["errors"].items() if error > (LSE_TOLERANCE if x == "lse" else tolerance)}
    assert not wrong


@pytest.mark.parametrize("name", ROW_CASES)
def test_a_kernel_of_rows_or_projections(name: str, outcomes: dict[str, Any]) -> None:
    """Each result is as exact as float32, and a rounding to bfloat16 where there is one, allow."""
    outcome = outcomes[name]
    assert not isinstance(outcome, str), outcome
    assert set(outcome["launches"]) == {name.split("/")[0]}
    assert outcome["errors"] and all(error <= TOLERANCES[x] for x, error in outcome["errors"].items()), outcome


@pytest.mark.parametrize(("name", "fault"), STRICT_CASES.items())
def test_what_triton_leaves_to_the_assembler(name: str, fault: str, outcomes: dict[str, Any]) -> None:
    """Each relaxed rule is needed: kernels without Gluon do not obey it."""
    assert fault in outcomes[name]


@pytest.mark.parametrize("name", MUTANTS[:-1])
def test_kernels_without_a_barrier_fence_or_wait(name: str, outcomes: dict[str, Any]) -> None:
    """Each mutant ends by a fault or with other results, or `mutants.EXPLAINED` says why it need not."""
    outcome = outcomes[name]
    assert not isinstance(outcome, str), outcome
    assert not outcome["survivors"]
    assert sum(outcome["ways"].values()) >= 30 and outcome["ways"]["race"] > 0


@pytest.mark.parametrize("name", MUTANTS_OF_TRITON)
def test_kernels_without_gluon_and_without_a_barrier_or_wait(name: str, outcomes: dict[str, Any]) -> None:
    """The same for the kernels without Gluon, see `mutants.EXPLAINED_OF_TRITON`."""
    outcome = outcomes[name]
    assert not isinstance(outcome, str), outcome
    assert not outcome["survivors"]
    assert sum(outcome["ways"].values()) > outcome["ways"].get("survived", 0)


def test_another_access_to_words_that_are_added_to() -> None:
    """Two additions to a word are no race. A load of it by a thread is one, because nothing orders it."""
    memory, words = GlobalMemory(), torch.zeros(16)
    memory.add("words", words)
    address = np.array([words.data_ptr() + 8], np.uint64)
    for _ in range(2):
        memory.add_values(address, np.full(1, 1.5, np.float32))
    assert words[2] == 3 and not memory.conflicts()
    thread = Accessor(0, 0, np.zeros(1, int), np.ones(1, int), np.ones(1, int))
    memory.load(address + np.uint64(4), np.float32, thread)
    assert not memory.conflicts()
    memory.load(address, np.float32, thread)
    assert memory.conflicts() == ["1 accesses to words of global memory that are added to"]


def test_a_race_that_changes_no_result(outcomes: dict[str, Any]) -> None:
    """Race detection alone finds a missing barrier that changes no bit of the results."""
    assert outcomes["planted"]["ways"]["with"].startswith("race")
    assert outcomes["planted"]["ways"]["without"] == ""
