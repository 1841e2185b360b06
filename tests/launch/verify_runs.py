"""Runs of `faulty_trainers.py` as `ringattn verify-trainer` makes them, in forked processes."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch

from ringattn.launch.verify import observer
from ringattn.launch.verify.comparison import compare
from tests.adapters.processes import forked_ranks

SCRIPT = str(Path(__file__).with_name("faulty_trainers.py"))


def verdicts(faults: list[str], ranks: int, double: bool) -> dict[str, Any]:
    """Return the verdict on each fault, as a dictionary."""
    torch.set_num_threads(1)
    return {fault: asdict(verdict_of(fault, ranks, double)) for fault in faults}


def verdict_of(fault: str, ranks: int, double: bool) -> Any:
    """Run the script three times and compare, as the command does."""
    with tempfile.TemporaryDirectory() as folder:
        records = {}
        for name, count in (("one", 1), ("otherwise", 1), ("ranks", ranks)):
            spec = {
                "name": name, "folder": folder, "words": [SCRIPT, fault], "is_module": False, "steps": 2, "seed": 0,
                "double": double, "rounds_otherwise": name == "otherwise", "ring": False,
            }  # fmt: skip
            run: Callable[[int], Any] = partial(_run, spec)
            forked_ranks(count, run)
            records[name] = [torch.load(Path(folder) / f"{name}-{rank}.pt") for rank in range(count)]
        return compare(records["one"][0], records["otherwise"][0], records["ranks"], double)


def _run(spec: dict[str, Any], rank: int) -> Any:
    return observer.run(spec)
