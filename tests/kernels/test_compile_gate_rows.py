"""The compile gate: checks of the projection and row kernels' machine code, for GPUs that this machine does not have.

Kernels must load and store rows as vectors. For a bf16 row of 128 elements, each instruction of a thread must move 16
bytes. Narrower accesses are allowed only for data with one number per row, such as lse, and for rotation angles in the
order of a matrix unit's results. No kernel may spill in a loop over products, or spill more elsewhere than the golden
table of the installed Triton allows.
`python -m tests.kernels.compile_gate.row_cases renew`, after a change of a kernel, compiles every case and writes the
golden table of the installed Triton; `test_the_golden_tables_are_whole` then reports what is wrong with it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import triton

from tests.kernels.compile_gate.compiling import golden_tables
from tests.kernels.compile_gate.loops import table, worse
from tests.kernels.compile_gate.row_cases import CASES, GOLDEN, FoundRows, widths
from tests.kernels.once import once, written_by
from tests.kernels.test_compile_gate import SHARED_BYTES, SLACK_REGISTERS

ROOT = Path(__file__).resolve().parents[2]
MATRIX = {80: "HMMA", 90: "HGMMA", 100: "UTC"}
EVERYTHING = "norm,bias,rows,two"
ON_ALL = (
    f"project_heads/128/neox,{EVERYTHING}",
    "epilogue_grad/128/interleaved,norm,two",
    "move_rows/128/scatter,add,wider",
)
ON_ONE = (
    f"project_heads/256/interleaved,{EVERYTHING}",
    "epilogue/128/neox,norm,two",
    "epilogue_grad/128/neox,norm,two",
    "move_rows/128/gather",
    "merge/128/",
    "row_sums/128/dlse",
    "quantize/128/int8",
    "quantize/128/fp8",
    "restore/128/fp8",
)
TESTED = (*(f"sm_{arch}/{case}" for arch in (80, 90, 100) for case in ON_ALL), *(f"sm_90/{case}" for case in ON_ONE))
"""The cases that the tests compile. Renewing the golden table compiles the other cases as well."""

FEW = 4
"""The number of loads or stores narrower than 32 bits that a kernel may have, such as loads of weights for all rows."""


def faults(name: str, finding: FoundRows) -> list[str]:
    """Return which rules a compiled case breaks, except those that compare it with the golden table."""
    arch, kernel = int(name.split("/")[0].removeprefix("sm_")), name.split("/")[1]
    wrong = []
    if finding.loop_spills:
        wrong.append(f"{finding.loop_spills} spill instructions in the loop over products")
    if finding.shared_bytes > SHARED_BYTES[arch]:
        wrong.append(f"{finding.shared_bytes} bytes of shared memory, more than {SHARED_BYTES[arch]}")
    if kernel == "project_heads" and finding.matrix != ("FFMA" if "single" in name else MATRIX[arch]):
        wrong.append(f"multiplies matrices by {finding.matrix or 'nothing'}")
    moved = {"loads": finding.loads, "stores": finding.stores}
    if kernel == "row_sums":
        del moved["stores"]  # the kernel stores one number per row
    for what, by_bits in moved.items():
        narrow = sum(count for bits, count in by_bits.items() if int(bits) < 32)
        if "128" not in by_bits or narrow > FEW:
            wrong.append(f"{what} by their bits: {by_bits}")
    return wrong


def drift(finding: FoundRows, golden: FoundRows) -> list[str]:
    """Return how a case differs from the golden table by more than the tolerance for registers."""
    wrong = []
    if abs(finding.registers - golden.registers) > SLACK_REGISTERS:
        wrong.append(f"{finding.registers} registers, {golden.registers} in the golden table")
    if finding.spills > golden.spills:
        wrong.append(f"{finding.spills} spills, {golden.spills} in the golden table")
    for part in ("shared_bytes", "matrix", "loads", "stores"):
        if getattr(finding, part) != getattr(golden, part):
            wrong.append(f"{part} {getattr(finding, part)}, {getattr(golden, part)} in the golden table")
    return wrong


@pytest.fixture(scope="module")
def findings(tmp_path_factory: pytest.TempPathFactory) -> dict[str, FoundRows]:
    """Compile the cases in a separate process, because it replaces Triton's driver and forks."""
    module = "tests.kernels.compile_gate.row_cases"
    results = once(tmp_path_factory, "rows", lambda folder: written_by(module, folder, *TESTED))
    assert not {name: why for name, why in results.items() if isinstance(why, str)}
    return {name: FoundRows(**fields) for name, fields in results.items()}


TABLES = golden_tables(GOLDEN)


@pytest.mark.unchanged("compile gate of rows")
@pytest.mark.parametrize("name", TESTED)
def test_a_case(name: str, findings: dict[str, FoundRows]) -> None:
    assert not faults(name, findings[name])
    if golden := TABLES.get(triton.__version__):  # each version has another assembler and register allocation
        assert not drift(findings[name], FoundRows(**golden[name]))
    if (row := findings[name].row) and (counts := table("rows", triton.__version__)):
        assert not worse(row, counts[name])


@pytest.mark.parametrize("version", ["3.6.0", "3.7.1", "3.9.0"])
def test_the_golden_tables_are_whole(version: str) -> None:
    """The golden table has exactly the cases, and no case breaks a rule."""
    golden = TABLES[version]
    assert tuple(golden) == CASES and set(TESTED) <= set(CASES)
    wrong = {name: faults(name, FoundRows(**golden[name])) for name in CASES}
    assert not {name: why for name, why in wrong.items() if why}


GOOD = FoundRows(200, 0, 0, 90_000, "HGMMA", {"64": 4, "128": 8}, {"128": 4})
PROJECTION = f"sm_90/project_heads/128/neox,{EVERYTHING}"


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ({"loop_spills": 2}, "2 spill instructions in the loop"),
        ({"shared_bytes": 232_449}, "232449 bytes of shared memory, more than 232448"),
        ({"matrix": "FFMA"}, "multiplies matrices by FFMA"),
        ({"matrix": ""}, "multiplies matrices by nothing"),
        ({"loads": {"16": 5, "128": 8}}, "loads by their bits"),
        ({"stores": {"64": 8}}, "stores by their bits"),
        ({"stores": {"16": 64, "128": 1}}, "stores by their bits"),
    ],
)
def test_the_gate_detects_faults(changed: dict[str, Any], expected: str) -> None:
    assert not faults(PROJECTION, GOOD)
    assert expected in faults(PROJECTION, GOOD._replace(**changed))[0]


def test_exceptions_for_some_kernels() -> None:
    """The kernel `row_sums` may store single numbers, which `merge` may not.

    Products of float32 must use FFMA, and a matrix unit is reported as a fault.
    """
    sums, single = "sm_90/row_sums/128/", f"sm_90/project_heads/128/single,neox,{EVERYTHING}"
    assert not faults(sums, GOOD._replace(stores={"32": 1})) and faults(
        "sm_90/merge/128/", GOOD._replace(stores={"32": 1})
    )
    assert not faults(single, GOOD._replace(matrix="FFMA")) and faults(single, GOOD)


@pytest.mark.parametrize(
    "changed",
    [
        {"spills": 1},
        {"registers": 209},
        {"registers": 191},
        {"shared_bytes": 1},
        {"matrix": "HMMA"},
        {"loads": {}},
        {"stores": {}},
    ],
)
def test_a_change_is_detected(changed: dict[str, Any]) -> None:
    assert not drift(GOOD, GOOD) and not drift(GOOD._replace(registers=208), GOOD)
    assert len(drift(GOOD._replace(**changed), GOOD)) == 1


def test_bits_of_an_instruction() -> None:
    code = (
        "LDG.E.U16.CONSTANT R1 ; @!P0 LDG.E.LTC128B.128 R4 ; LDG.E.U8 R1 ; LDG.E R2 ; LDG.E.64 R2 ; LDGSTS.E.128 [R1] ;"
    )
    code += "STG.E.128 [R2]"
    assert widths("LDG", code) == {"8": 1, "16": 1, "32": 1, "64": 1, "128": 1}
    assert widths("STG", code) == {"128": 1}
