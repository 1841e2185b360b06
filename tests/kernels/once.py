"""What takes minutes and several test processes need is computed by one of them."""

from __future__ import annotations

import fcntl
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest


def once(folders: pytest.TempPathFactory, name: str, make: Callable[[Path], Any]) -> Any:
    """What `make` returns, as JSON has it, computed once in a test run however many processes share its tests.

    The first that asks calls `make` with an empty folder; the others wait for it, and read. Of a `make` that fails the
    next one tries again.
    """
    base = folders.getbasetemp()
    # With pytest-xdist each worker's folder lies in that of the run.
    shared = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    kept = shared / f"once-{name}.json"
    with (shared / f"once-{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not kept.exists():
            made = json.dumps(make(folders.mktemp(name)))
            # Whole or not at all: who is killed while writing leaves nothing to be read.
            part = kept.with_suffix(".part")
            part.write_text(made, encoding="utf-8")
            part.replace(kept)
    return json.loads(kept.read_text(encoding="utf-8"))


def written_by(module: str, folder: Path, *words: str, timeout_s: float = 280) -> dict[str, Any]:
    """What `python -m MODULE FILE WORDS` writes: a child, since a compiler that fails an assertion ends its process."""
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(folder)
    command = [sys.executable, "-m", module, str(folder / "found"), *words]
    root = Path(__file__).resolve().parents[2]
    child = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, timeout=timeout_s)
    assert child.returncode == 0, child.stdout + child.stderr
    found: dict[str, Any] = json.loads((folder / "found").read_text(encoding="utf-8"))
    return found
