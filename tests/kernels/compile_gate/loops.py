"""The instruction counts of the kernels' inner loops, in tables from which a kernel may differ only by a margin.

There is a table `golden_loops/KIND-VERSION.json` for each kind of kernels (attention, rows) and each tested version of
Triton. A documentation page shows the tables of the version that GPU machines have. `compiling renew` and `row_cases
renew` write the tables. A row has registers, shared memory, resident thread blocks, spills inside and outside the
innermost loops over matrix products, and for each such loop the instructions of the shortest and of the longest path
through it, by class. For a kernel without such a loop, the row has the instructions of the whole kernel.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from ringattn.bench import sass
from ringattn.bench.kernel_code import KernelCode

ROOT = Path(__file__).resolve().parents[3]
TABLES = Path(__file__).with_name("golden_loops")
PAGE = ROOT / "docs" / "internals" / "kernel-counts.md"
PAGE_OF = "3.6.0"
MARGIN, FEW = 0.03, 4
"""A count may differ from the table by the fraction `MARGIN`, or by `FEW` instructions if that is more."""

KINDS = ("attention", "rows")
Row = dict[str, Any]


def row_of(code: KernelCode, arch: int) -> Row:
    """Return the row of the table for a kernel compiled for the architecture `arch`."""
    loops = sass.product_loops(code.listing)
    spills = sum(count.spills for count in sass.instructions(code.listing))
    inside = sum(count.spills for loop in loops for count in loop.body)
    counts = [{"least": sass.count_by_class(loop.least), "most": sass.count_by_class(loop.most)} for loop in loops]
    return {
        "registers": code.registers,
        "shared_bytes": code.shared_bytes,
        "resident": code.resident(arch),
        "spills_inside": inside,
        "spills_outside": spills - inside,
        "loops": [count for index, count in enumerate(counts) if count not in counts[:index]]
        or [{"whole": sass.count_by_class(sass.instructions(code.listing))}],
    }


def worse(row: Row, kept: Row) -> list[str]:
    """Return how a kernel's row differs from the row `kept` in the table.

    More spills and fewer resident blocks count, and instruction counts that differ in either direction by more than the
    margin.
    """
    wrong = []
    for part in ("spills_inside", "spills_outside"):
        if row[part] > kept[part]:
            wrong.append(f"{part} {row[part]}, {kept[part]} in the table")
    if row["resident"] < kept["resident"]:
        wrong.append(f"{row['resident']} thread blocks on a multiprocessor, {kept['resident']} in the table")
    if len(row["loops"]) != len(kept["loops"]):
        return [*wrong, f"{len(row['loops'])} different innermost loops, {len(kept['loops'])} in the table"]
    for index, (new, old) in enumerate(zip(row["loops"], kept["loops"], strict=True)):
        for way in old:
            for kind, count in old[way].items():
                if abs(new[way][kind] - count) > max(FEW, MARGIN * count):
                    better = "" if new[way][kind] > count else ": renew the table"
                    wrong.append(f"loop {index}, {way}: {new[way][kind]} {kind}, {count} in the table{better}")
    return wrong


def table(kind: str, version: str) -> dict[str, Row]:
    """Return the table of one of `KINDS` for a version of Triton, or an empty dict if the version was not tested."""
    file = TABLES / f"{kind}-{version}.json"
    return json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}


def renew(kind: str, version: str, rows: Mapping[str, Row], names: Iterable[str]) -> None:
    """Replace these rows in a table, drop rows that are not in `names`, and write the page."""
    kept = table(kind, version) | dict(rows)
    lines = ",\n".join(f"{json.dumps(name)}: {json.dumps(kept[name])}" for name in names if name in kept)
    TABLES.mkdir(exist_ok=True)
    (TABLES / f"{kind}-{version}.json").write_text(f"{{\n{lines}\n}}\n", encoding="utf-8")
    PAGE.write_text(page(), encoding="utf-8")


def page() -> str:
    """Return the tables as a Markdown page with a line for each path through each loop."""
    head = ("case", "loop", *sass.CLASSES, "all", "registers", "spills in / out", "shared KiB", "blocks per SM")
    lines = [
        "# What the kernels' inner loops are made of",
        "",
        "Instructions of a warp in one pass through an innermost loop over matrix products, from machine code",
        f"(Triton {PAGE_OF}). `least` and `most`: the shortest and the longest way through the loop, without and with",
        "the mask of a band's edge; `whole`: a kernel without such a loop. Loops that are alike stand once.",
        "Written by `python -m tests.kernels.compile_gate.compiling renew`, and held to 3 % by the compile gate.",
        "",
        "| " + " | ".join(head) + " |",
        "|" + " --- |" * len(head),
    ]
    for name, row in (pair for kind in KINDS for pair in table(kind, PAGE_OF).items()):
        facts = (
            str(row["registers"]), f"{row['spills_inside']} / {row['spills_outside']}",
            f"{row['shared_bytes'] / 1024:.0f}", str(row["resident"]),
        )  # fmt: skip
        for index, loop in enumerate(row["loops"]):
            for way in [way for way in loop if way == "least" or loop[way] != loop.get("least")]:
                counts = [str(loop[way][kind]) for kind in (*sass.CLASSES, "all")]
                which = f"{index + 1} {way}" if len(row["loops"]) > 1 else way
                lines.append("| " + " | ".join((name, which, *counts, *facts)) + " |")
                name, facts = "", ("", "", "", "")
    return "\n".join(lines) + "\n"
