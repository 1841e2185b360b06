"""Compiles the gate's cases without a GPU, each in a forked child, and reads what came out of the machine code.

`python -m tests.kernels.compile_gate.compiling FILE [case ...]` writes what it finds to FILE, for the test.
`python -m tests.kernels.compile_gate.compiling renew` compiles every entry and writes the golden table of the
installed Triton.
Guarantees: a compiler that crashes, on a failed assertion say, takes its own case with it and no other; nothing is left
in Triton's cache.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import triton
from triton.runtime import driver

from ringattn.bench.launch import StubDriver
from tests.kernels.compile_gate.cases import ENTRIES, arch_of, call_of

GOLDEN = Path(__file__).with_name("golden")
"""A folder with a table for each Triton version that was tried; each brings its own assembler."""
TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
AT_ONCE = 2
MATRIX = re.compile(r"\b(HGMMA|HMMA|UTC\w*MMA|FFMA)\b")
RANKED = ("UTC", "HGMMA", "HMMA", "FFMA")
SPILL = re.compile(r"\b(?:LDL|STL)\b")


class Found(NamedTuple):
    """Of one compiled kernel. `matrix`: the strongest unit it multiplies matrices on, "" for none.

    `spills`: instructions that put registers into memory or take them back; `loop_spills`: those of them in the
    innermost loops that multiply matrices, which run for every block of keys or queries.
    `bulk_loads`: instructions that load through a tensor descriptor (UTMALDG); `handovers`: of registers between groups
    of warps (USETMAXREG), which only a kernel that was split between them has.
    """

    registers: int
    spills: int
    loop_spills: int
    shared_bytes: int
    tensor_columns: int
    matrix: str
    bulk_loads: int
    handovers: int


def compiled(name: str) -> Found:
    """Compile a case through its launch wrapper, for the GPU that it names."""
    driver.set_active(StubDriver(arch_of(name)))
    call = call_of(name)
    kernel = call.kernel.warmup(*call.args, grid=call.grid, **call.meta)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        usage = _tool("cuobjdump", "-res-usage", file.name)
        code = _tool("nvdisasm", "-c", file.name)
    registers = re.search(r"REG:(\d+)", usage)
    assert registers, usage
    units = set(MATRIX.findall(code))
    return Found(
        registers=int(registers[1]),
        spills=len(SPILL.findall(code)),
        loop_spills=loop_spills(code),
        shared_bytes=kernel.metadata.shared,
        tensor_columns=getattr(kernel.metadata, "tmem_size", 0) or 0,
        matrix=next((rank for rank in RANKED if any(unit.startswith(rank) for unit in units)), ""),
        bulk_loads=len(re.findall(r"\bUTMALDG\b", code)),
        handovers=len(re.findall(r"\bUSETMAXREG\b", code)),
    )


def loop_spills(code: str) -> int:
    """Spills in those loops that multiply matrices and hold no other such loop."""
    lines, labels = list[str](), dict[str, int]()
    for line in code.splitlines():
        if label := re.match(r"\s*(\.L_\w+):", line):
            labels[label[1]] = len(lines)
        elif ";" in line:
            lines.append(line)
    # Behind the last EXIT are waits that did not succeed at once, which jump back into the body.
    body = max((at for at, line in enumerate(lines) if re.search(r"\bEXIT\b", line)), default=len(lines))
    jumps = ((at, re.search(r"\bBRA\b.*`\((\.L_\w+)\)", line)) for at, line in enumerate(lines[:body]))
    loops = [(labels[to[1]], at) for at, to in jumps if to and labels[to[1]] < at]
    loops = [(first, last) for first, last in loops if any(map(MATRIX.search, lines[first : last + 1]))]
    inner = [a for a in loops if not any(b != a and a[0] <= b[0] and b[1] <= a[1] for b in loops)]
    return sum(any(first <= at <= last for first, last in inner) for at in range(body) if SPILL.search(lines[at]))


def _tool(name: str, *args: str) -> str:
    return subprocess.run([TOOLS / name, *args], capture_output=True, text=True, check=True).stdout


def all_compiled(names: Sequence[str]) -> Iterator[tuple[str, dict[str, Any] | str]]:
    """(name, `Found` as a dict, or why there is none) in the order in which the children end."""
    waiting, running = list(names), dict[int, str]()
    with tempfile.TemporaryDirectory() as folder:
        triton.knobs.cache.dir = folder
        while waiting or running:
            while waiting and len(running) < AT_ONCE:
                name = waiting.pop(0)
                running[_forked(name, Path(folder, name.replace("/", ",")))] = name
            child, status = os.wait()
            name = running.pop(child)
            said = Path(folder, name.replace("/", ",")).read_text(encoding="utf-8")
            yield name, json.loads(said.splitlines()[-1]) if status == 0 else f"status {status}: {said[-2000:]}"


def _forked(name: str, said: Path) -> int:
    """The child that compiles a case; its output, the finding as the last line, goes to the file `said`."""
    child = os.fork()
    if child:
        return child
    try:
        with said.open("wb") as file:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
        os.write(1, f"\n{json.dumps(compiled(name)._asdict())}\n".encode())
        os._exit(0)
    except BaseException as error:
        os.write(2, repr(error).encode())
        os._exit(1)


def golden_tables(folder: Path) -> dict[str, dict[str, Any]]:
    """The entries of each table in a folder, by Triton's version."""
    return {file.stem: json.loads(file.read_text(encoding="utf-8")) for file in sorted(folder.glob("*.json"))}


def write_golden(folder: Path, found: dict[str, Any]) -> None:
    """The table of the installed Triton."""
    lines = ",\n".join(f"{json.dumps(name)}: {json.dumps(one)}" for name, one in found.items())
    (folder / f"{triton.__version__}.json").write_text(f"{{\n{lines}\n}}\n", encoding="utf-8")


def main(words: Sequence[str]) -> None:
    """Compile the named cases, or all entries, and write the findings."""
    renewing = words[0] == "renew"
    found = {}
    for name, finding in all_compiled(ENTRIES if renewing else words[1:]):
        print(name, finding, flush=True)
        found[name] = finding
    if renewing:
        write_golden(GOLDEN, {name: found[name] for name in ENTRIES})
    else:
        Path(words[0]).write_text(json.dumps(found), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
