"""Ranks that are processes forked from this one, and how far their values are from those of one process.

What is imported before forking is imported once. A process that has started threads must not fork.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.distributed import TCPStore

ROOT = Path(__file__).resolve().parents[2]


def forked(*functions: Callable[[], None]) -> None:
    """Call each function in a process of its own, all at once. Exits this process unless all of them succeed."""
    pids = []
    for function in functions:
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                function()
                code = 0
            except BaseException:
                sys.excepthook(*sys.exc_info())
            finally:
                os._exit(code)
        pids.append(pid)
    if any(os.waitpid(pid, 0)[1] for pid in pids):
        sys.exit(1)


def forked_ranks(count: int, rank: Callable[[int], Any]) -> list[Any]:
    """Return what `rank(number)` returns on each of `count` processes; they find each other as those of torchrun do.

    Values are passed as JSON.
    """
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port)}
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"

    def run(folder: Path, number: int) -> None:
        os.environ |= {"RANK": str(number), "LOCAL_RANK": str(number)}
        os.environ |= {"WORLD_SIZE": str(count), "LOCAL_WORLD_SIZE": str(count)}
        (folder / f"{number}.json").write_text(json.dumps(rank(number)), encoding="utf-8")

    with tempfile.TemporaryDirectory() as folder:
        forked(*(partial(run, Path(folder), number) for number in range(count)))
        return [json.loads((Path(folder) / f"{number}.json").read_text(encoding="utf-8")) for number in range(count)]


def run_program(*arguments: str, folder: Path = ROOT, timeout_s: float = 280.0, **env: str) -> str:
    """What `python ARGUMENTS` prints in `folder`. Raises AssertionError where it fails. `env`: more variables."""
    variables = {**os.environ, "PYTHONPATH": str(ROOT), **env}
    done = subprocess.run(
        [sys.executable, *arguments], cwd=folder, env=variables, capture_output=True, text=True, timeout=timeout_s
    )
    assert done.returncode == 0, done.stdout[-1000:] + done.stderr[-4000:]
    return done.stdout


def worst_error(pairs: Iterable[tuple[Tensor, Tensor]], floor: float = 0.0) -> float:
    """Return the largest difference of a value from its reference, relative to the reference's largest number.

    `floor`: references are taken to be at least this large. A NaN in any value is infinitely far off.
    """
    worst = 0.0
    for value, reference in pairs:
        difference, largest = float((value - reference).abs().max()), max(float(reference.abs().max()), floor)
        if math.isnan(difference) or (difference and not largest):
            return math.inf
        worst = max(worst, difference / largest if difference else 0.0)
    return worst
