"""The table of hosts: with which version, in which mode, a model over a ring equals one process or is refused by name.

A test that has compared or seen a refusal calls `record`, which leaves a file in build/hosts.
`python -m tests.adapters.hosts` merges these files into hosts.json and writes the table of docs/embedding.md.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any, Literal

ROOT = Path(__file__).resolve().parents[2]
CELLS = Path(__file__).with_suffix(".json")
LEFT = ROOT / "build" / "hosts"
PAGE = ROOT / "docs" / "embedding.md"
MODES = ("plain", "packed", "PEFT", "Trainer", "SFTTrainer", "DPOTrainer", "FSDP2", "compile", "checkpointing")
_TRL = dict.fromkeys(("SFTTrainer", "DPOTrainer"), "a trainer of TRL's, for models of transformers")
NONE: dict[str, dict[str, str]] = {
    "accelerate": _TRL,
    "diffusers": {
        "packed": "images are no documents in a row",
        "Trainer": "it has scripts, each with a loop of its own",
        **_TRL,
    },
    "Liger": dict.fromkeys(
        ("PEFT", "Trainer", "SFTTrainer", "DPOTrainer", "FSDP2", "compile", "checkpointing"),
        "kernels inside of a model of transformers, in whose rows this mode is",
    ),
    "Lightning": {"PEFT": "it has no adapters of its own", **_TRL},
    "Megatron Core": {
        "PEFT": "its adapters are those of Megatron Bridge",
        "Trainer": "a loop is written around its schedules",
        **_TRL,
    },
    "NeMo Automodel": {"Trainer": "it has recipes, whose step is what the other cells run", **_TRL},
    "PyTorch": {"PEFT": "it has no adapters", "Trainer": "it has none", **_TRL},
    "torchtitan": _TRL,
    "TRL": {"Trainer": "it has one for each kind of training"},
}
"""By host and mode, why there is no such thing: in the table a dash."""
_TABLE = re.compile(r"(^## Hosts\n.*?\n)(^\| host .*?\n)(?=\n)", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True, order=True)
class Cell:
    """One host, version and mode, and what a test found.

    `worst`: the greatest relative difference from one process. `words`: what was compared, or what a refusal says.
    """

    host: str
    version: str
    mode: str
    outcome: str
    ranks: int
    worst: float
    words: str
    test: str

    def __post_init__(self) -> None:
        if self.mode not in MODES or self.outcome not in ("exact", "refused"):
            raise ValueError(f"{self} has another mode than {MODES}, or another outcome than exact and refused")
        if self.mode in NONE.get(self.host, ()):
            raise ValueError(
                f"{self}: {self.host} has no {self.mode} ({NONE[self.host][self.mode]}); take it out of NONE"
            )
        if (self.outcome == "exact") != (self.ranks > 0) or not self.words:
            raise ValueError(f"{self}: exact has ranks, a refusal has none, both have words")


def record(
    host: str,
    version: str,
    mode: str,
    outcome: Literal["exact", "refused"],
    *,
    words: str,
    ranks: int = 0,
    worst: float = 0.0,
) -> None:
    """Leave a cell for the table, of the test that runs."""
    test = os.environ["PYTEST_CURRENT_TEST"].rsplit(" (", 1)[0].split("[", 1)[0]
    cell = Cell(host, version, mode, outcome, ranks, worst, words, test)
    LEFT.mkdir(parents=True, exist_ok=True)
    name = sha256(f"{host} {version} {mode} {ranks} {test}".encode()).hexdigest()[:16]
    (LEFT / f"{name}.json").write_text(json.dumps(asdict(cell)), encoding="utf-8")


def read() -> list[Cell]:
    """The cells that were merged last."""
    return [Cell(**one) for one in json.loads(CELLS.read_text(encoding="utf-8"))]


def merged(before: Iterable[Cell], found: Iterable[Cell]) -> list[Cell]:
    """`found` in place of what the same tests said before; one cell a test, host, version and mode, the worst one."""
    found = list(found)
    renewed = {(cell.host, cell.version, cell.mode, cell.test) for cell in found}
    cells: dict[tuple[str, ...], Cell] = {}
    for cell in (*before, *found):
        key = cell.host, cell.version, cell.mode, cell.test
        if key in renewed and cell not in found:
            continue
        other = cells.get(key)
        if other is None or (cell.worst, cell.ranks) > (other.worst, other.ranks):
            cells[key] = cell
    return sorted(cells.values(), key=_place)


def shown(cells: Iterable[Cell]) -> dict[tuple[str, str], dict[str, str]]:
    """By host and version, and by mode, what the table shows; an empty string where nothing was tried."""
    rows: dict[tuple[str, str], dict[str, str]] = {}
    found: dict[tuple[str, str, str], set[str]] = {}
    for cell in cells:
        rows[cell.host, cell.version] = {}
        found.setdefault((cell.host, cell.version, cell.mode), set()).add(cell.outcome)
    for (host, version), row in rows.items():
        for mode in MODES:
            said = " and ".join(sorted(found.get((host, version, mode), ())))
            row[mode] = "–" if mode in NONE.get(host, ()) else said
    return rows


def table(cells: Iterable[Cell]) -> str:
    """The table as Markdown: a row for each host and version."""
    cells = list(cells)
    lines = [f"| host | version | {' | '.join(MODES)} | worst |", "|" + "---|" * (len(MODES) + 3)]
    for (host, version), row in shown(cells).items():
        exact = [cell.worst for cell in cells if (cell.host, cell.version) == (host, version) and cell.ranks]
        lines.append(f"| {host} | {version} | {' | '.join(row.values())} | {f'{max(exact):.0e}' if exact else ''} |")
    return "\n".join(lines) + "\n"


def renewed(page: str, cells: Iterable[Cell]) -> str:
    """The page with the table as it should be."""
    return _TABLE.sub(lambda found: found[1] + table(cells), page)


def _place(cell: Cell) -> tuple[Any, ...]:
    numbers = [int(part) for part in re.findall(r"\d+", cell.version)]
    return cell.host.lower(), numbers, MODES.index(cell.mode), cell.test


def main() -> None:
    """Merge what tests left, and write the table."""
    left = [Cell(**json.loads(file.read_text(encoding="utf-8"))) for file in sorted(LEFT.glob("*.json"))]
    cells = merged(read() if CELLS.exists() else [], left)
    lines = ",\n".join(json.dumps(asdict(cell), ensure_ascii=False) for cell in cells)
    CELLS.write_text(f"[\n{lines}\n]\n", encoding="utf-8")
    PAGE.write_text(renewed(PAGE.read_text(encoding="utf-8"), cells), encoding="utf-8")


if __name__ == "__main__":
    main()
