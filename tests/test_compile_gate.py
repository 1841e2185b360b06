"""The compile gate: the attention kernels as machine code, for GPUs that are not here.

Every entry of the block-size tables for sm_80, sm_90 and sm_100 is compiled through the library's own launch wrappers
with a driver that launches nothing. Limits: CUDA C Programming Guide, "Technical Specifications per Compute
Capability"; tensor memory of sm_100 is 512 columns. Half entries must not spill; float32, whose products run without
matrix units, and dK, dV with a softcap must not spill more than the golden table says.
`python -m tests.compile_gate.compiling renew`, by hand after a change of a kernel or an entry, compiles all
architectures and writes the golden table; `test_the_golden_table_is_whole` then says what is wrong with it.
Does not know: numerics, speed.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import triton

from tests.compile_gate.cases import ENTRIES, PURPOSES, TESTED, arch_of
from tests.compile_gate.compiling import GOLDEN, Found

ROOT = Path(__file__).resolve().parent.parent
SHARED_BYTES = {80: 166_912, 86: 101_376, 89: 101_376, 90: 232_448, 100: 232_448, 120: 101_376}
TENSOR_COLUMNS = 512
SLACK_REGISTERS = 8
MATRIX = {80: ("HMMA",), 86: ("HMMA",), 89: ("HMMA",), 90: ("HGMMA", "HMMA"), 100: ("UTC", "HMMA"), 120: ("HMMA",)}
Finding = dict[str, Any] | str


def may_spill(name: str) -> bool:
    """Whether only the golden table bounds a case's spills."""
    return "/single/" in name or name.endswith("grad_kv/softcap")


def units(name: str) -> tuple[str, ...]:
    """The matrix units that a case may run on."""
    if "/single/" in name:
        return ("FFMA",)
    # The warp group's unit wants 64 rows of keys, which a block of dK and dV at dimension 256 does not have.
    if name.startswith("sm_90") and "/pointers/" not in name and not ("/256/" in name and "/grad_kv" in name):
        return ("HGMMA",) if "/256/descriptors/grad_fused" not in name else ("HMMA",)
    return MATRIX[arch_of(name)]


def faults(name: str, finding: Finding) -> list[str]:
    """What is wrong with a compiled case, whatever the golden table says."""
    if isinstance(finding, str):
        return [f"did not compile: {finding}"]
    found, arch = Found(**finding), arch_of(name)
    wrong = []
    if found.spills and not may_spill(name):
        wrong.append(f"{found.spills} spill instructions")
    if found.shared_bytes > SHARED_BYTES[arch]:
        wrong.append(f"{found.shared_bytes} bytes of shared memory, more than {SHARED_BYTES[arch]}")
    if found.tensor_columns > TENSOR_COLUMNS:
        wrong.append(f"{found.tensor_columns} columns of tensor memory, more than {TENSOR_COLUMNS}")
    if found.matrix not in units(name):
        wrong.append(f"multiplies matrices by {found.matrix or 'nothing'}: its body may be a trap")
    if bool(found.bulk_loads) != ("/pointers/" not in name):
        wrong.append(f"{found.bulk_loads} loads through tensor descriptors")
    if bool(found.handovers) != ("/specialized/" in name):
        wrong.append(f"{found.handovers} handovers of registers between groups of warps")
    return wrong


def drift(finding: Found, golden: Found) -> list[str]:
    """How a case differs from the golden table, beyond the slack."""
    wrong = []
    if finding.spills > golden.spills:
        wrong.append(f"{finding.spills} spill instructions, {golden.spills} in the golden table")
    if abs(finding.registers - golden.registers) > SLACK_REGISTERS:
        wrong.append(f"{finding.registers} registers, {golden.registers} in the golden table")
    if finding.matrix != golden.matrix:
        wrong.append(f"{finding.matrix}, {golden.matrix} in the golden table")
    return wrong


def findings(names: tuple[str, ...], folder: Path) -> dict[str, Finding]:
    """The cases compiled in a process of their own, which may set a driver and fork."""
    result = folder / "found.json"
    command = [sys.executable, "-m", "tests.compile_gate.compiling", str(result), *names]
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    child = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=580)
    assert child.returncode == 0, child.stdout + child.stderr
    found: dict[str, Finding] = json.loads(result.read_text(encoding="utf-8"))
    assert tuple(sorted(found)) == tuple(sorted(names))
    return found


@pytest.fixture(scope="module")
def entries(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Finding]:
    return findings(TESTED, tmp_path_factory.mktemp("entries"))


@pytest.fixture(scope="module")
def purposes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Finding]:
    return findings(tuple(PURPOSES), tmp_path_factory.mktemp("purposes"))


@pytest.fixture(scope="module")
def golden() -> dict[str, Any]:
    read: dict[str, Any] = json.loads(GOLDEN.read_text(encoding="utf-8"))
    return read


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("name", TESTED)
def test_an_entry(name: str, entries: dict[str, Finding], golden: dict[str, Any]) -> None:
    finding = entries[name]
    assert not faults(name, finding) and not isinstance(finding, str)
    if golden["triton"] == triton.__version__:  # each brings its own assembler, which allots registers in its own way
        assert not drift(Found(**finding), Found(**golden["entries"][name]))


def test_the_golden_table_is_whole(golden: dict[str, Any]) -> None:
    """Every entry, of the architectures that are not compiled here too, and none that is at fault."""
    assert tuple(golden["entries"]) == ENTRIES
    assert not {name: wrong for name in ENTRIES if (wrong := faults(name, golden["entries"][name]))}


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("good", ""),
        ("spilling", "spill instructions"),
        ("too_much_shared", "bytes of shared memory, more than 166912"),
        ("crashing", "did not compile: status 6"),
    ],
)
def test_the_gate_sees(name: str, wrong: str, purposes: dict[str, Finding]) -> None:
    found = faults(case := f"sm_80/purpose/0/pointers/{name}", purposes[case])
    assert any(wrong in one for one in found) if wrong else not found


def test_the_gate_reads_numbers() -> None:
    """What no small kernel brings about by itself."""
    case, good = "sm_100/half/128/descriptors/forward", Found(200, 0, 1000, 512, "UTC", 4, 0)
    assert not faults(case, good._asdict())
    assert "576 columns" in faults(case, good._replace(tensor_columns=576)._asdict())[0]
    assert "nothing: its body may be a trap" in faults(case, good._replace(matrix="")._asdict())[0]
    assert "by FFMA" in faults(case, good._replace(matrix="FFMA")._asdict())[0]
    assert not drift(good, good._replace(registers=192)) and drift(good, good._replace(registers=191))
    assert drift(good, good._replace(matrix="HMMA"))
    assert "0 loads" in faults(case, good._replace(bulk_loads=0)._asdict())[0]
    assert "4 loads" in faults("sm_100/half/128/pointers/forward", good._asdict())[0]
    split, warps = "sm_90/half/128/specialized/forward", good._replace(matrix="HGMMA", handovers=8)
    assert not faults(split, warps._asdict())
    assert "0 handovers" in faults(split, warps._replace(handovers=0)._asdict())[0]
    assert "by HMMA" in faults(split, warps._replace(matrix="HMMA")._asdict())[0]
    spilling = good._replace(spills=1)
    assert "1 spill instructions" in faults(case, spilling._asdict())[0]
    single = spilling._replace(matrix="FFMA", bulk_loads=0)
    assert not faults("sm_100/single/128/pointers/forward", single._asdict())
    assert not faults("sm_100/half/128/descriptors/grad_kv/softcap", spilling._asdict())
    assert drift(spilling, good) and not drift(good, spilling)
