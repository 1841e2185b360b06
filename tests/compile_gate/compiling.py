"""Compiles the gate's cases without a GPU, each in a forked child, and reads what came out of the machine code.

`python -m tests.compile_gate.compiling FILE [case ...]` writes what it finds to FILE, for the test.
`python -m tests.compile_gate.compiling renew` compiles every entry and writes the golden table.
Promises: a compiler that crashes, on a failed assertion say, takes its own case with it and no other; nothing is left
in Triton's cache.
Does not know: which findings are good.
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
from tests.compile_gate.cases import ENTRIES, arch_of, call_of

GOLDEN = Path(__file__).with_name("golden.json")
TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
AT_ONCE = 2
MATRIX = re.compile(r"\b(HGMMA|HMMA|UTC\w*MMA|FFMA)\b")
RANKED = ("UTC", "HGMMA", "HMMA", "FFMA")


class Found(NamedTuple):
    """Of one compiled kernel. `matrix`: the strongest unit it multiplies matrices on, "" for none.

    `bulk_loads`: instructions that load through a tensor descriptor (UTMALDG); `handovers`: of registers between groups
    of warps (USETMAXREG), which only a kernel that was split between them has.
    """

    registers: int
    spills: int
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
        spills=len(re.findall(r"\b(?:LDL|STL)\b", code)),
        shared_bytes=kernel.metadata.shared,
        tensor_columns=getattr(kernel.metadata, "tmem_size", 0) or 0,
        matrix=next((rank for rank in RANKED if any(unit.startswith(rank) for unit in units)), ""),
        bulk_loads=len(re.findall(r"\bUTMALDG\b", code)),
        handovers=len(re.findall(r"\bUSETMAXREG\b", code)),
    )


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


def main(words: Sequence[str]) -> None:
    """Compile the named cases, or all entries, and write the findings."""
    renewing = words[0] == "renew"
    found = {}
    for name, finding in all_compiled(ENTRIES if renewing else words[1:]):
        print(name, finding, flush=True)
        found[name] = finding
    if renewing:
        lines = ",\n".join(f"{json.dumps(name)}: {json.dumps(found[name])}" for name in ENTRIES)
        GOLDEN.write_text(f'{{"triton": "{triton.__version__}", "entries": {{\n{lines}\n}}}}\n', encoding="utf-8")
    else:
        Path(words[0]).write_text(json.dumps(found), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
