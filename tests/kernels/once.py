"""Share slow results between test processes: one process computes the result, and the others read it."""

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
    """Return the result of `make`, which only one process of a test run computes. It is converted to JSON and back.

    The first process calls `make` with an empty folder; the others wait and read the result. If `make` fails, the next
    process tries again. `name` identifies the result.
    """
    base = folders.getbasetemp()
    # With pytest-xdist each worker's temporary folder is inside the folder of the test run, which all workers share.
    shared = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    kept = shared / f"once-{name}.json"
    with (shared / f"once-{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not kept.exists():
            text = json.dumps(make(folders.mktemp(name)))
            # Write atomically: a process that is killed while writing leaves nothing to read.
            part = kept.with_suffix(".part")
            part.write_text(text, encoding="utf-8")
            part.replace(kept)
    return json.loads(kept.read_text(encoding="utf-8"))


def written_by(module: str, folder: Path, *arguments: str, timeout_s: float = 280) -> dict[str, Any]:
    """Run `python -m MODULE FILE ARGUMENTS` and return the JSON that it writes to FILE.

    The module runs in a child process, because a failed assertion of the compiler ends the process.
    """
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(folder)
    command = [sys.executable, "-m", module, str(folder / "found"), *arguments]
    root = Path(__file__).resolve().parents[2]
    child = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, timeout=timeout_s)
    assert child.returncode == 0, child.stdout + child.stderr
    results: dict[str, Any] = json.loads((folder / "found").read_text(encoding="utf-8"))
    return results
