"""Runs of `faulty_trainers.py` as `ringattn verify-trainer` makes them, in forked processes."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from ringattn.launch.verify import observer
from ringattn.launch.verify.comparison import compare
from tests.adapters.processes import forked_ranks

SCRIPT, WRAPPED, PUBLIC = (
    str(Path(__file__).with_name(name)) for name in ("faulty_trainers.py", "wrapped_trainer.py", "public_faults.py")
)


def verdicts(faults: list[str], ranks: int, double: bool) -> dict[str, Any]:
    """Return the verdict on each fault, as a dictionary. On one process no fault shows, so one reference is enough."""
    torch.set_num_threads(1)
    found: dict[str, Any] = {}
    references = {
        clipped: [records(f"{clipped}right", 1, double, other)[0] for other in (False, True)]
        for clipped in ("", "clipped ")
    }
    for fault in faults:
        one, otherwise = references["clipped " if "clipped" in fault else ""]
        found[fault] = asdict(compare(one, otherwise, records(fault, ranks, double), double))
    return found


def wrapped_verdicts() -> dict[str, Any]:
    """Return the verdicts on the right script with FSDP2, and compiled."""
    torch.set_num_threads(1)
    one, otherwise = (records("ddp", 1, False, other, WRAPPED)[0] for other in (False, True))
    return {
        kind: asdict(compare(one, otherwise, records(kind, 2, False, script=WRAPPED))) for kind in ("fsdp", "compiled")
    }


def public_verdict(project: str) -> dict[str, Any]:
    """Return the verdict on a run of `public_faults.py` on two ranks."""
    torch.set_num_threads(1)
    import_module("diffusers.models.transformers" if project == "diffusers" else "accelerate")
    import_module("transformers.models.llama.modeling_llama")  # imported here, so that no forked process has to
    one, otherwise = (records(project, 1, False, other, PUBLIC)[0] for other in (False, True))
    return asdict(compare(one, otherwise, records(project, 2, False, script=PUBLIC)))


def records(
    fault: str, ranks: int, double: bool, rounds_otherwise: bool = False, script: str = SCRIPT
) -> list[list[dict[str, Any]]]:
    """Run the script as the command does, and return the records of each rank."""
    with tempfile.TemporaryDirectory() as folder:
        spec = {
            "name": "run", "folder": folder, "words": [script, fault], "is_module": False, "steps": 2, "seed": 0,
            "double": double, "rounds_otherwise": rounds_otherwise, "ring": False,
        }  # fmt: skip
        run: Callable[[int], Any] = partial(_run, spec)
        forked_ranks(ranks, run)
        return [torch.load(Path(folder) / f"run-{rank}.pt") for rank in range(ranks)]


def _run(spec: dict[str, Any], rank: int) -> Any:
    return observer.run(spec)
