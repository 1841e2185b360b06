"""Compile the gate's cases without a GPU, each in a forked child, and read the resulting machine code.

`python -m tests.kernels.compile_gate.compiling FILE [case ...]` writes its findings to FILE, for the test.
`python -m tests.kernels.compile_gate.compiling renew [PART ...]` compiles every entry, or those with a PART in their
names, and writes them to the golden table of the installed Triton and to the table of inner loops (`loops.py`);
`renew counted` compiles only the entries in the table of inner loops. `row_cases` has the same commands for the row
kernels.
Guarantees: a crash of the compiler, for example by a failed assertion, affects only its case; nothing is left in
Triton's cache.
"""

from __future__ import annotations

import json
import os
import re
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import triton

from ringattn.bench.kernel_code import code_of
from ringattn.bench.sass import instructions
from tests.kernels.compile_gate import gluon_code, loops
from tests.kernels.compile_gate.cases import COUNTED, ENTRIES, GLUON, arch_of, call_of

GOLDEN = Path(__file__).with_name("golden")
"""This folder has a table for each tested Triton version, because each version has a different assembler."""
AT_ONCE = 2
MATRIX = re.compile(r"\b(HGMMA|HMMA|UTC\w*MMA|FFMA)\b")
RANKED = ("UTC", "HGMMA", "HMMA", "FFMA")


class Found(NamedTuple):
    """What the machine code of a compiled kernel shows.

    `matrix`: the most powerful unit that multiplies its matrices, "" for none. `spills`: the number of instructions
    that store registers to memory or load them back; `loop_spills`: those in the innermost loops that multiply
    matrices, which run for every block of keys or queries. `bulk_loads`: the instructions that load through a tensor
    descriptor (UTMALDG). `handovers`: the transfers of registers between warp groups (USETMAXREG), which only
    warp-specialized kernels have. `row`: the row of the table of inner loops, for cases in that table. `gluon`: the
    facts that `gluon_code.read` returns, for Gluon kernels.
    """

    registers: int
    spills: int
    loop_spills: int
    shared_bytes: int
    tensor_columns: int
    matrix: str
    bulk_loads: int
    handovers: int
    row: loops.Row | None = None
    gluon: dict[str, Any] | None = None


def compiled(name: str) -> Found:
    """Compile a case through its launch wrapper, for the GPU that it names."""
    code = code_of(call_of(name), arch_of(name))
    units = set(MATRIX.findall(code.listing))
    row = loops.row_of(code, arch_of(name))
    return Found(
        registers=code.registers,
        spills=sum(instruction.spills for instruction in instructions(code.listing)),
        loop_spills=row["spills_inside"],
        shared_bytes=code.shared_bytes,
        tensor_columns=code.tensor_columns,
        matrix=next((rank for rank in RANKED if any(unit.startswith(rank) for unit in units)), ""),
        bulk_loads=len(re.findall(r"\bUTMALDG\b", code.listing)),
        handovers=len(re.findall(r"\bUSETMAXREG\b", code.listing)),
        row=row if name in COUNTED else None,
        gluon=gluon_code.read(code) if name in GLUON else None,
    )


class Gate(NamedTuple):
    """A set of cases, and how to compile one. `kind`: one of `loops.KINDS`, which names the table of inner loops.

    `counted`: the cases in that table.
    """

    kind: str
    golden: Path
    cases: Sequence[str]
    counted: Sequence[str]
    compiled: Callable[[str], Any]


def all_compiled(names: Sequence[str], gate: Gate) -> Iterator[tuple[str, dict[str, Any] | str]]:
    """Compile the cases in child processes. Yield pairs of a name and what was found, in the order of completion.

    What was found is a `Found` (or `FoundRows`) as a dict, or a text with the reason why there is none.
    """
    waiting, running = list(names), dict[int, str]()
    with tempfile.TemporaryDirectory() as folder:
        triton.knobs.cache.dir = folder
        while waiting or running:
            while waiting and len(running) < AT_ONCE:
                name = waiting.pop(0)
                running[_forked(name, Path(folder, name.replace("/", ";")), gate)] = name
            child, status = os.wait()
            name = running.pop(child)
            output = Path(folder, name.replace("/", ";")).read_text(encoding="utf-8")
            yield name, json.loads(output.splitlines()[-1]) if status == 0 else f"status {status}: {output[-2000:]}"


def _forked(name: str, output: Path, gate: Gate) -> int:
    """Fork a child that compiles a case, and return its process id.

    All output of the child goes to the file `output`. If it succeeds, the last line is what was found, as JSON.
    """
    child = os.fork()
    if child:
        return child
    try:
        with output.open("wb") as file:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
        os.write(1, f"\n{json.dumps(gate.compiled(name)._asdict())}\n".encode())
        os._exit(0)
    except BaseException as error:
        os.write(2, repr(error).encode())
        os._exit(1)


def golden_tables(folder: Path) -> dict[str, dict[str, Any]]:
    """Return the entries of each table in a folder, by Triton's version."""
    return {file.stem: json.loads(file.read_text(encoding="utf-8")) for file in sorted(folder.glob("*.json"))}


def renew(parts: Sequence[str], gate: Gate) -> None:
    """Compile every case, or only those with one of `parts` in their names, and write the tables."""
    counted = list(parts) == ["counted"]
    names = gate.counted if counted else [x for x in gate.cases if not parts or any(part in x for part in parts)]
    findings = golden_tables(gate.golden).get(triton.__version__, {})
    rows: dict[str, loops.Row] = {}
    for name, finding in all_compiled(names, gate):
        print(name, finding, flush=True)
        findings[name] = finding
        if isinstance(finding, dict):
            finding.pop("gluon", None)
            if row := finding.pop("row"):
                rows[name] = row
    lines = ",\n".join(f"{json.dumps(name)}: {json.dumps(findings[name])}" for name in gate.cases if name in findings)
    (gate.golden / f"{triton.__version__}.json").write_text(f"{{\n{lines}\n}}\n", encoding="utf-8")
    loops.renew(gate.kind, triton.__version__, rows, gate.counted)


def main(arguments: Sequence[str], gate: Gate) -> None:
    """Compile the named cases and write the findings to a file, or renew the tables."""
    if arguments[0] == "renew":
        renew(arguments[1:], gate)
    else:
        Path(arguments[0]).write_text(json.dumps(dict(all_compiled(arguments[1:], gate))), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:], Gate("attention", GOLDEN, ENTRIES, COUNTED, compiled))
