"""The compile gate: checks of the attention kernels' machine code, for GPUs that this machine does not have.

Every entry of the block-size tables for sm_80, sm_90 and sm_100 is compiled through the library's launch functions with
a driver that launches nothing. Limits: CUDA C Programming Guide, "Technical Specifications per Compute Capability";
tensor memory of sm_100 is 512 columns. Kernels of half precision, except one, must not spill in the loop over matrix
products. Spills elsewhere, and those of float32, whose products run without matrix units, must not exceed the golden
table. There is a table for each tested Triton version, because each has another assembler. A separate table has the
instruction counts of the inner loops, which may change by a margin (`test_performance_gate.py`).
After a change of a kernel or an entry, run `python -m tests.kernels.compile_gate.compiling renew` with each of these
versions (`pip install --no-deps --target FOLDER triton==VERSION` and PYTHONPATH=FOLDER). It compiles all architectures
and writes both tables; `test_the_golden_tables_are_whole` then reports what is wrong with them. If there are arguments
after `renew`, it compiles only the cases whose names contain one of them.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import triton

from ringattn.bench.kernel_code import KernelCode
from ringattn.kernels.configs import ARCHITECTURES
from tests.kernels.compile_gate.cases import TESTED, arch_of, entries_of, may_spill
from tests.kernels.compile_gate.compiling import GOLDEN, Found, golden_tables
from tests.kernels.compile_gate.gluon_code import gluon_faults, hasty_arrivals
from tests.kernels.compile_gate.loops import table, worse
from tests.kernels.once import once, written_by

ROOT = Path(__file__).resolve().parents[2]
SHARED_BYTES = {80: 166_912, 86: 101_376, 89: 101_376, 90: 232_448, 100: 232_448, 120: 101_376}
TENSOR_COLUMNS = 512
SLACK_REGISTERS = 8
MATRIX = {80: ("HMMA",), 86: ("HMMA",), 89: ("HMMA",), 90: ("HGMMA", "HMMA"), 100: ("UTC", "HMMA"), 120: ("HMMA",)}
Finding = dict[str, Any] | str


def units(name: str) -> tuple[str, ...]:
    """Return the instructions for matrix products that a case may use."""
    if "/single/" in name:
        return ("FFMA",)
    # HGMMA needs 64 rows of keys, and a block of the fused backward at dimension 256 has fewer.
    if name.startswith("sm_90") and "/pointers/" not in name:
        return ("HGMMA",) if "/256/descriptors/grad_fused" not in name else ("HMMA",)
    return MATRIX[arch_of(name)]


def faults(name: str, finding: Finding, version: str = triton.__version__) -> list[str]:
    """Return which rules a compiled case breaks, except those that compare it with the golden table."""
    if isinstance(finding, str):
        return [f"did not compile: {finding}"]
    compiled_case, arch = Found(**finding), arch_of(name)
    wrong = []
    if compiled_case.loop_spills and not may_spill(name, version):
        wrong.append(f"{compiled_case.loop_spills} spill instructions in the loop over matrix products")
    if compiled_case.shared_bytes > SHARED_BYTES[arch]:
        wrong.append(f"{compiled_case.shared_bytes} bytes of shared memory, more than {SHARED_BYTES[arch]}")
    if compiled_case.tensor_columns > TENSOR_COLUMNS:
        wrong.append(f"{compiled_case.tensor_columns} columns of tensor memory, more than {TENSOR_COLUMNS}")
    if compiled_case.matrix not in units(name):
        wrong.append(f"multiplies matrices by {compiled_case.matrix or 'nothing'}: its body may be a trap")
    if bool(compiled_case.bulk_loads) != ("/pointers/" not in name):
        wrong.append(f"{compiled_case.bulk_loads} loads through tensor descriptors")
    if bool(compiled_case.handovers) != ("/gluon/" in name):
        wrong.append(f"{compiled_case.handovers} handovers of registers between groups of warps")
    if compiled_case.gluon is not None:
        wrong += gluon_faults(name, compiled_case.registers, compiled_case.gluon)
    return wrong


def drift(finding: Found, golden: Found) -> list[str]:
    """Return how a case differs from the golden table by more than the tolerance."""
    wrong = []
    for part in ("spills", "loop_spills"):
        if getattr(finding, part) > getattr(golden, part):
            wrong.append(f"{getattr(finding, part)} {part}, {getattr(golden, part)} in the golden table")
    if abs(finding.registers - golden.registers) > SLACK_REGISTERS:
        wrong.append(f"{finding.registers} registers, {golden.registers} in the golden table")
    if finding.matrix != golden.matrix:
        wrong.append(f"{finding.matrix}, {golden.matrix} in the golden table")
    return wrong


def compiled(folder: Path, names: Iterable[str]) -> dict[str, Finding]:
    """Compile cases in a separate process, because it replaces Triton's driver and forks."""
    return written_by("tests.kernels.compile_gate.compiling", folder, *names, timeout_s=1700)


@pytest.fixture(scope="module")
def entries(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Finding]:
    return dict(once(tmp_path_factory, "entries", lambda folder: compiled(folder, TESTED)))


TABLES = golden_tables(GOLDEN)


@pytest.mark.unchanged("compile gate")
@pytest.mark.timeout(1800)  # six times the usual duration on one core, to end a hang
@pytest.mark.parametrize("name", TESTED)
def test_an_entry(name: str, entries: dict[str, Finding]) -> None:
    finding = entries[name]
    assert not faults(name, finding) and not isinstance(finding, str)
    if golden := TABLES.get(triton.__version__):
        assert not drift(Found(**finding), Found(**golden[name]))
    if (row := finding["row"]) and (counts := table("attention", triton.__version__)):
        assert not worse(row, counts[name])


@pytest.mark.parametrize("version", ["3.6.0", "3.7.1", "3.9.0"])
def test_the_golden_tables_are_whole(version: str) -> None:
    """The tables have every entry, also for architectures that the tests do not compile, and no entry breaks a rule.

    torch 2.11 has Triton 3.6.0 and torch 2.15 has 3.9.0; these tests run with 3.7.1.
    """
    golden = TABLES[version]
    assert tuple(golden) == entries_of(version)
    assert not {name: wrong for name in golden if (wrong := faults(name, golden[name], version))}


def test_the_gate_detects_faults() -> None:
    """`faults` and `drift` report each kind of fault.

    They are called with made-up findings, because no small kernel has these faults.
    """
    case, good = "sm_100/half/128/descriptors/forward", Found(200, 0, 0, 1000, 512, "UTC", 4, 0)
    assert not faults(case, good._asdict())
    assert "576 columns" in faults(case, good._replace(tensor_columns=576)._asdict())[0]
    assert "nothing: its body may be a trap" in faults(case, good._replace(matrix="")._asdict())[0]
    assert "by FFMA" in faults(case, good._replace(matrix="FFMA")._asdict())[0]
    assert not drift(good, good._replace(registers=192)) and drift(good, good._replace(registers=191))
    assert drift(good, good._replace(matrix="HMMA"))
    assert "0 loads" in faults(case, good._replace(bulk_loads=0)._asdict())[0]
    assert "4 loads" in faults("sm_100/half/128/pointers/forward", good._asdict())[0]
    split, warps = "sm_90/half/128/gluon/forward", good._replace(matrix="HGMMA", handovers=8)
    assert not faults(split, warps._asdict())
    assert "0 handovers" in faults(split, warps._replace(handovers=0)._asdict())[0]
    assert "by HMMA" in faults(split, warps._replace(matrix="HMMA")._asdict())[0]
    spilling = good._replace(spills=1, loop_spills=1)
    assert "1 spill instructions" in faults(case, spilling._asdict())[0]
    assert not faults(case, good._replace(spills=1)._asdict()) and len(drift(good._replace(spills=1), good)) == 1
    single = spilling._replace(matrix="FFMA", bulk_loads=0)
    assert not faults("sm_100/single/128/pointers/forward", single._asdict())
    assert drift(spilling, good) and not drift(good, spilling)


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_how_many_blocks_each_architecture_holds(arch: int) -> None:
    """`KernelCode.resident` knows the limits of each architecture that the tables have.

    Two blocks that together fill the shared memory are resident at once. With one byte more, only one block is.
    """
    small = KernelCode("", 16, 0, 128, 0, "")
    assert small.resident(arch) == (12 if arch in (86, 89, 120) else 16)
    half = (SHARED_BYTES[arch] + 1024) // 2 - 1024
    assert [small._replace(shared_bytes=half + more).resident(arch) for more in (0, 1)] == [2, 1]


def test_the_gate_detects_hasty_arrivals() -> None:
    """`hasty_arrivals` counts the arrivals without a synchronisation before them, in made-up code."""
    left, wrote = "wgmma.wait_group.sync.aligned 0;", "st.shared.v2.b32 [%r1], {%r2, %r3};"
    met, warp, arrived = "bar.sync 2, 128;", "bar.warp.sync -1;", "mbarrier.arrive.shared::cta.b64 _;"
    matrix = "stmatrix.sync.aligned.m8n8.x1.shared.b16 [%r1], {%r2};"
    assert hasty_arrivals(left + met + arrived + wrote + warp + arrived + matrix + warp + arrived) == 0
    assert hasty_arrivals(matrix + arrived) == 1
    assert (
        hasty_arrivals(left + arrived) == hasty_arrivals(left + warp + arrived) == hasty_arrivals(wrote + arrived) == 1
    )
