"""Wrong Triton kernels in the interpreter: each is an edit of a kernel's source that a test case must detect.

pytest collects the file only by its name, as for kernel_cases.py.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import pytest
import torch

from ringattn.kernels import attention_backward, launch
from tests.kernels.interpreter import backward_cases, kernel_cases
from tests.kernels.interpreter.kernel_cases import ALL, MANY, WINDOW, seed

__all__ = ["seed"]

KERNELS = Path(launch.__file__).parent
FORWARD, BACKWARD = "attention_forward", "attention_backward"


class Wrong(NamedTuple):
    """An edit of a module's source from `old` to `new`, which `case` must detect."""

    module: str
    old: str
    new: str
    case: Callable[[], None]


def gradients(pairs: kernel_cases.Pairs) -> Callable[[], None]:
    return lambda: backward_cases.test_gradients_are_right(pairs, torch.float32, "pointers")


def numbers(*rows: int) -> Callable[[], None]:
    return lambda: backward_cases.test_lse_and_delta_are_read_from_the_rows_of_the_run((rows[0], rows[1], rows[2]))


def windowed() -> None:
    kernel_cases.test_one_launch_is_right(WINDOW, torch.float32, "pointers")


def silent() -> None:
    kernel_cases.test_rows_whose_logits_are_all_minus_infinity_see_nothing(ALL, "pointers", torch.float32)


def silent_gradients() -> None:
    backward_cases.test_rows_whose_logits_are_all_minus_infinity_add_nothing(ALL, "pointers", torch.float32)


def ends() -> None:
    backward_cases.test_dq_follows_the_flags_of_its_blocks("pointers")


without_an_entry = backward_cases.test_key_blocks_without_an_entry_follow_their_flags
SUMS = "store_rows(base + offset, rows * row, live & (ends == 0), total, DIM, PADDED)"
MASKED = "(n_block < full) | (n_block >= full_end)"
EDGES = "tl.where(edge < full, edge, edge + (full_end - full))"

WRONG = {
    "a FIRST block reads": Wrong(BACKWARD, "live & (begins == 0), DIM", "live, DIM", without_an_entry),
    "a LAST block writes the sum too": Wrong(
        BACKWARD, SUMS, SUMS.replace("live & (ends == 0)", "live"), without_an_entry
    ),
    "a block that is not LAST delivers": Wrong(
        BACKWARD, "rows * result_row, live & ends, total, DIM", "rows * result_row, live, total, DIM", without_an_entry
    ),
    "a FIRST block of dQ reads": Wrong(BACKWARD, "live & (begins == 0), D_K", "live, D_K", ends),
    "numbers of the next row": Wrong(
        BACKWARD, "before * source[2] + (tl", "before * source[2] + 1 + (tl", numbers(0, 3, 13)
    ),
    "the stride of a run is forgotten": Wrong(
        BACKWARD, "(tl.arange(0, ROWS) * source[1])", "tl.arange(0, ROWS)", numbers(1, 2, 19)
    ),
    "edge blocks have no mask": Wrong(BACKWARD, "COPIES, True,", "COPIES, False,", numbers(0, 3, 13)),
    "an edge block is left out": Wrong(
        BACKWARD, "end - (full_end - full), disable", "end - (full_end - full) - 1, disable", numbers(0, 3, 13)
    ),
    # A case with edge blocks after full blocks detects this mistake: a full block is processed twice, and an edge block
    # never.
    "edge blocks are mapped wrongly": Wrong(BACKWARD, EDGES, "edge", gradients(MANY)),
    "edge blocks of dQ have no mask": Wrong(BACKWARD, MASKED, "False", gradients(WINDOW)),
    "rows without a logit weigh": Wrong(
        BACKWARD, "tl.maximum(lse * LOG2_E, LOWEST, propagate_nan=tl.PropagateNan.ALL)", "lse * LOG2_E",
        silent_gradients,
    ),
    "rows without a logit have a peak": Wrong(FORWARD, "tl.maximum(new_peak, LOWEST)", "new_peak", silent),
    "edge blocks have no mask forward": Wrong(FORWARD, MASKED, "False", windowed),
    "the peak is not scaled": Wrong(
        FORWARD, "tl.max(s, 1) * factor if RAW_PEAK", "tl.max(s, 1) if RAW_PEAK",
        kernel_cases.test_large_logits_keep_their_weights,
    ),
}  # fmt: skip


def edited(wrong: Wrong, folder: Path) -> ModuleType:
    """Import the edited module from a file, because Triton reads the source that it interprets."""
    source = (KERNELS / f"{wrong.module}.py").read_text(encoding="utf-8")
    assert source.count(wrong.old) == 1
    file = folder / f"wrong_{wrong.module}.py"
    file.write_text(source.replace(wrong.old, wrong.new), encoding="utf-8")
    spec = spec_from_file_location(file.stem, file)
    assert spec is not None and spec.loader is not None
    module = module_from_spec(spec)
    sys.modules[file.stem] = module
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_kernel_is_detected(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = WRONG[name]
    wrong_module = edited(wrong, tmp_path)
    if wrong.module == FORWARD:
        monkeypatch.setattr(kernel_cases, "forward", wrong_module.forward)
    else:
        for kernel in ("grad_q_kernel", "grad_kv_kernel"):
            monkeypatch.setattr(attention_backward, kernel, getattr(wrong_module, kernel))
    with pytest.raises(AssertionError):
        wrong.case()
