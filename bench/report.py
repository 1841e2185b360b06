"""The output of a benchmark: progress while it runs, tables at its end, a JSON and a Markdown file.

Guarantees: results name the class of hardware and the date, and no machine, user or path.
"""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Any

import torch
from rich.console import Console

RESULTS = "bench/results/cpu"

Say = Callable[[str], None]
"""A function that shows one line of progress."""


@dataclass
class Table:
    """A table with a title, rows of text, and notes below."""

    title: str
    columns: Sequence[str]
    rows: list[Sequence[str]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def markdown(self) -> str:
        """Return the table as Markdown, with aligned columns so that it is readable as plain text too."""
        lines = [self.columns, *self.rows]
        widths = [max(len(line[n]) for line in lines) for n in range(len(self.columns))]
        rule = ["-" * width for width in widths]
        body = ["| " + " | ".join(map(str.ljust, line, widths)) + " |" for line in (self.columns, rule, *self.rows)]
        return "\n".join([f"### {self.title}", "", *body, *([""] if self.notes else []), *self.notes])


@contextmanager
def progress(title: str) -> Iterator[Say]:
    """Yield a function that shows lines of progress: one changing line on a terminal, plain lines elsewhere."""
    console = Console()
    if console.is_terminal:
        with console.status(title) as status:
            yield lambda line: status.update(f"{title}: {line}")
    else:
        yield lambda line: print(f"{title}: {line}", flush=True)


def hardware() -> str:
    """Return the class of the machine: cores, architecture, processor family, and the GPU if there is one."""
    family = ""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        family = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")
    except OSError:
        pass  # not Linux: the architecture must suffice
    gpu = f", {torch.cuda.get_device_name()}" if torch.cuda.is_available() else ""
    return f"{os.cpu_count()} cores, {platform.machine()} {family}".strip() + gpu


def finish(name: str, options: Any, tables: Sequence[Table], data: dict[str, Any], folder: str, file: str = "") -> None:
    """Print the tables, and write them and `data` to files as `keep` does."""
    print("\n" + _page(name, options, tables), end="", flush=True)
    keep(name, options, tables, data, folder, file)


def keep(name: str, options: Any, tables: Sequence[Table], data: dict[str, Any], folder: str, file: str = "") -> None:
    """Write the tables and `data` to `file`.md and `file`.json (default: `name`) in `folder`, unless `folder` is empty.

    Each file is replaced atomically, so that a reader sees either the old or the new file. The same files are written
    to the folder that the environment variable GPU_CHECK_COPY names.
    """
    texts = {
        "md": _page(name, options, tables),
        "json": json.dumps({**_facts(options), **data}, indent=1) + "\n",
    }
    for place in (folder, os.environ.get("GPU_CHECK_COPY", "")) if folder else ():
        if place:
            Path(place).mkdir(parents=True, exist_ok=True)
            for ending, text in texts.items():
                new = Path(place, f"{file or name}.{ending}.new")
                new.write_text(text, encoding="utf-8")
                new.replace(new.with_suffix(""))


def _facts(options: Any) -> dict[str, Any]:
    return {
        "hardware": hardware(),
        "torch": torch.__version__,
        "date": datetime.now(UTC).date().isoformat(),
        **({"commit": commit} if (commit := os.environ.get("GPU_CHECK_COMMIT")) else {}),
        "options": {key: value for key, value in asdict(options).items() if key != "results"},
    }


def _page(name: str, options: Any, tables: Sequence[Table]) -> str:
    facts = _facts(options)
    chosen = " ".join(f"{k}={','.join(map(str, v)) if isinstance(v, (tuple, list)) else v}"
                      for k, v in facts["options"].items())  # fmt: skip
    head = [
        f"# {name}",
        f"{facts['hardware']}; torch {facts['torch']}; {facts['date']}",
        f"`python -m ringattn.bench.{name} {chosen}`",
    ]
    return "\n\n".join([*head, *(table.markdown() for table in tables)]) + "\n"


def spread(values: Sequence[float], digits: int = 3) -> str:
    """Format the minimum, median and maximum."""
    return " / ".join(f"{value:.{digits}f}" for value in (min(values), median(values), max(values)))


def mib(nbytes: float) -> str:
    """Format bytes as MiB."""
    return f"{nbytes / 2**20:.1f}"
