"""Ranks as fresh processes with one thread each, so that a measurement meets no other measurement's memory.

The parent starts torchrun, which runs this module; each rank calls one function `f(ring, **spec)` and leaves its
result as JSON. What rank 0 prints is shown as progress.
Guarantees: no child outlives the call; a rank's failure raises with what it printed.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from ringattn.errors import RingError
from ringattn.ring import Ring

SPEC = "spec.json"
TIMEOUT_S = 600.0
LAST_CHARACTERS = 3000


def run_in_processes(
    world_size: int, target: str, spec: dict[str, Any], say: Callable[[str], None], transport: str = "auto"
) -> list[Any]:
    """Run `target` ("module:function") as `function(ring, **spec)` on fresh processes; the results by rank.

    `spec` and the results are JSON. Raises `RingError` when a rank fails.
    """
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, SPEC).write_text(json.dumps(spec), encoding="utf-8")
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(world_size),
                   "-m", __name__, target, folder, transport]  # fmt: skip
        root = Path(__file__).parents[2]  # where the package was found, so that the ranks find the same one
        with Path(folder, "errors").open("w+", encoding="utf-8") as errors:
            process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True, cwd=root)
            try:
                assert process.stdout is not None
                for line in process.stdout:
                    say(line.rstrip())
                code = process.wait()
            finally:
                process.terminate()
                process.wait()
            if code:
                errors.seek(0)
                raise RingError(f"{target} on {world_size} processes failed:\n{errors.read()[-LAST_CHARACTERS:]}")
        return [json.loads(result_file(folder, rank).read_text(encoding="utf-8")) for rank in range(world_size)]


def result_file(folder: str, rank: int) -> Path:
    """What a rank leaves behind."""
    return Path(folder, f"rank{rank}.json")


def main(target: str, folder: str, transport: str) -> None:
    """One rank: open the ring, call the function, leave the result."""
    torch.set_num_threads(1)
    module, _, name = target.partition(":")
    spec = json.loads(Path(folder, SPEC).read_text(encoding="utf-8"))
    function = getattr(import_module(module), name)
    with Ring(transport=transport, timeout_s=TIMEOUT_S) as ring:
        result = function(ring, **spec)
    result_file(folder, ring.rank).write_text(json.dumps(result), encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
