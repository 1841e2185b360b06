"""What tuning tries and what it has found so far, which is kept with every candidate and gone on from.

Guarantees: times of another device, of other sizes or of other kernels are not gone on from.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ringattn.bench.device_clock import device_facts
from ringattn.bench.kernel_baselines import DEVICE
from ringattn.bench.report import Table, keep
from ringattn.bench.tune_order import promising
from ringattn.engine.triton import architecture
from ringattn.kernels import configs as configs_module
from ringattn.kernels.configs import configs_for
from ringattn.kernels.launch import Config


@dataclass(frozen=True)
class TuneKeptOptions:
    """`tokens`, `heads`, `batch`: of the timed call; `workers`: compiling processes; `limit`: candidates a kernel.

    `limit_s`: for one candidate to compile, and for one to be timed; `budget_s`: for all.
    """

    dims: tuple[int, ...] = (128, 64)
    forms: tuple[str, ...] = ("descriptors", "pointers")
    kernels: tuple[str, ...] = ("forward", "grad_kv", "grad_q", "grad_fused")
    tokens: int = 8192
    heads: int = 16
    batch: int = 2
    dtype: str = "bfloat16"
    ms: int = 20
    workers: int = 14
    limit: int = 25
    limit_s: float = 60.0
    budget_s: float = 420.0
    write: bool = False
    results: str = "bench/results/gpu"

    @property
    def sizes(self) -> tuple[Any, ...]:
        """Times of other sizes say nothing about these."""
        return self.tokens, self.heads, self.batch, self.dtype, self.ms


class Case(NamedTuple):
    """One kernel's entry of the table."""

    kernel: str
    dim: int
    form: str


class Timed(NamedTuple):
    """A candidate: microseconds of the full and of the causal call, or why it has none.

    `spills`: of its own kernel, wherever these are: they reject nothing. `right`: it has passed the gate.
    """

    config: Config
    us: tuple[float, ...]
    failed: str = ""
    spills: int = 0
    right: bool = False

    @property
    def total_us(self) -> float:
        """What candidates are compared by; infinite for one that failed."""
        return sum(self.us) if self.us else float("inf")


def cases(options: TuneKeptOptions) -> Iterator[Case]:
    """The entries that there are, of those asked for."""
    for form in options.forms:
        for dim in options.dims:
            try:
                configs_for(architecture(torch.device(DEVICE)), torch.bfloat16, dim, form)
            except LookupError:
                continue
            yield from (Case(kernel, dim, form) for kernel in options.kernels)


def candidates(case: Case, limit: int) -> list[Config]:
    """What is tried: the table's own entry first, then what promises most."""
    own = entry(case)
    return [own, *(config for config in promising(*case) if config != own)][:limit]


def entry(case: Case) -> Config:
    """The table's."""
    configs = configs_for(architecture(torch.device(DEVICE)), torch.bfloat16, case.dim, case.form)
    found: Config = getattr(configs, case.kernel)
    return found


class Found:
    """The candidates tried so far, by case, in the order in which they were."""

    def __init__(self, options: TuneKeptOptions) -> None:
        """With those of the kept results, where these are of the same device, sizes and kernels."""
        self.options = options
        self.rows: dict[Case, list[Timed]] = {}
        self.facts = device_facts() | {"kernels": sources(), "sizes": list(options.sizes)}
        file = Path(options.results, "tune.json")
        earlier = json.loads(file.read_text(encoding="utf-8")) if options.results and file.exists() else {}
        if earlier.get("measured on") == self.facts:
            for name, rows in earlier["candidates"].items():
                kernel, dim, form = name.split("/")
                read = [Timed(Config(*row.pop("config")), tuple(row.pop("us")), **row) for row in rows]
                self.rows[Case(kernel, int(dim), form)] = read

    def todo(self) -> dict[Case, list[Config]]:
        """What is still to be tried of the cases asked for."""
        found = {}
        for case in cases(self.options):
            tried = {row.config for row in self.rows.get(case, ())}
            found[case] = [config for config in candidates(case, self.options.limit) if config not in tried]
        return found

    def add(self, case: Case, row: Timed) -> None:
        """One more, or new facts about one."""
        rows = self.rows.setdefault(case, [])
        at = next((at for at, one in enumerate(rows) if one.config == row.config), len(rows))
        rows[at : at + 1] = [row]
        self.keep()

    def best(self, case: Case) -> Timed | None:
        """The fastest that has proved right."""
        return min((row for row in self.rows.get(case, ()) if row.right), key=lambda row: row.total_us, default=None)

    def keep(self, how: Callable[..., None] = keep) -> None:
        """By `how`: to files, or to the screen as well."""
        table = Table("block sizes", ["kernel", "dim", "form", "tried", "best", "full us", "causal us", "before", "us"])
        for case, rows in self.rows.items():
            best, own = self.best(case), entry(case)
            before = next((f"{row.total_us:.0f}" for row in rows if row.config == own), "-")
            cells = [sized(best.config), *(f"{us:.0f}" for us in best.us)] if best else ["-", "-", "-"]
            table.rows.append([case.kernel, str(case.dim), case.form, str(len(rows)), *cells, sized(own), before])
        written = {"/".join(map(str, case)): [row._asdict() for row in rows] for case, rows in self.rows.items()}
        data = {"measured on": self.facts, "candidates": written, "processors": os.cpu_count()}
        how("tune", self.options, [table], data, self.options.results)


def sized(config: Config) -> str:
    """Rows, warps and stages."""
    return "x".join(map(str, config[:4]))


def sources() -> str:
    """A digest of the attention kernels: times of others are not gone on from."""
    files = sorted(Path(configs_module.__file__).parent.glob("attention_*.py"))
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()[:16]
