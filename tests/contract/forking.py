"""Processes in milliseconds: forked from one that has loaded what they need.

They share its hash seed: that ranks with seeds of their own agree is seen where torchrun starts them.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable
from multiprocessing import forkserver
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch

LOADED = ("pytest", "tests.launch.fuzz_train.ranks")
"""What every process has: torch, its compiler, which the deterministic mode loads too, and ringattn."""


def forked(target: Callable[..., None], *arguments: Any, daemon: bool = True) -> BaseProcess:
    """A started process that calls `target(*arguments)`, with this process's environment of now."""
    # A fork of a process that has seen a GPU cannot use it; there, each is started anew.
    context: Any = multiprocessing.get_context("spawn" if torch.cuda.is_available() else "forkserver")
    multiprocessing.set_forkserver_preload(list(LOADED))
    process = context.Process(target=_live, args=(dict(os.environ), target, arguments), daemon=daemon)
    process.start()
    return process  # type: ignore[no-any-return]


def _live(environment: dict[str, str], target: Callable[..., None], arguments: tuple[Any, ...]) -> None:
    os.environ.clear()
    os.environ.update(environment)
    target(*arguments)


def core_s() -> float:
    """Seconds of a core of the process that they are forked from, and of those that have ended."""
    pid = getattr(forkserver._forkserver, "_forkserver_pid", None)  # type: ignore[attr-defined]
    if pid is None:
        return 0.0
    # After the name, which may hold anything: the state, then numbers; the 12th to 15th are its and its children's.
    fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    return sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")
