"""Helpers that fork ranks, call a function in a new process, or return the largest error of values.

Forked processes share the modules that this process has imported. A process that has started threads must not fork.
"""

from __future__ import annotations

import math
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed import TCPStore
from torch.distributed.tensor import DTensor

from tests.adapters import server
from tests.adapters.environments import ROOT, search_path


def forked(*functions: Callable[[], Any], meanwhile: Callable[[], object] | None = None) -> list[Any]:
    """Call each function in a child process, all in parallel, and return their values. Exits as soon as one fails.

    `meanwhile` is called here after the last fork, and its value is kept until all children have ended.
    """
    with tempfile.TemporaryDirectory() as folder:
        files = [Path(folder) / f"{number}.pt" for number in range(len(functions))]
        pids = []
        for function, file in zip(functions, files, strict=True):
            pid = os.fork()
            if pid == 0:
                code = 1
                try:
                    torch.save(function(), file)
                    code = 0
                except BaseException:
                    sys.excepthook(*sys.exc_info())
                finally:
                    os._exit(code)
            pids.append(pid)
        kept = meanwhile() if meanwhile else None
        while pids:
            pid, status = os.wait()
            if pid in pids:
                pids.remove(pid)
                if status:
                    sys.exit(1)
        del kept
        return [torch.load(file, weights_only=False) for file in files]


def forked_ranks(count: int, rank: Callable[[int], Any]) -> list[Any]:
    """Fork `count` processes and return the value of `rank(number)` on each of them.

    Their environment variables are those that torchrun sets, so that they find each other through a TCPStore.
    """
    listener = socket.create_server(("127.0.0.1", 0))
    address, port = listener.getsockname()

    def run(number: int) -> Any:
        os.environ |= {"MASTER_ADDR": address, "MASTER_PORT": str(port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
        os.environ |= {"RANK": str(number), "LOCAL_RANK": str(number)}
        os.environ |= {"WORLD_SIZE": str(count), "LOCAL_WORLD_SIZE": str(count)}
        return rank(number)

    def host() -> TCPStore:
        """Start the store after the forks. Its thread locks the resolver, and a child would inherit the locked lock."""
        return TCPStore(address, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())

    return forked(*(partial(run, number) for number in range(count)), meanwhile=host)


def call_in_program(entry: str, *arguments: Any, timeout_s: float = 280.0, **env: str) -> Any:
    """Call a function of a test module in a program that is forked from a server of the module; see `server.call`.

    `env`: additional environment variables, which may replace PYTHONPATH.
    """
    return server.call(entry, *arguments, variables={"PYTHONPATH": search_path(), **env}, timeout_s=timeout_s)


def run_program(*arguments: str, folder: Path = ROOT, timeout_s: float = 280.0, **env: str) -> None:
    """Run `python ARGUMENTS` in `folder`. Raises AssertionError if it fails. `env`: extra environment variables."""
    variables = {**os.environ, "PYTHONPATH": search_path(), **env}
    ended = subprocess.run(
        [sys.executable, *arguments], cwd=folder, env=variables, capture_output=True, text=True, timeout=timeout_s
    )
    assert ended.returncode == 0, ended.stdout[-1000:] + ended.stderr[-4000:]


def whole(x: Tensor) -> Tensor:
    """Return a copy of a tensor, or the full tensor of a DTensor."""
    return x.full_tensor() if isinstance(x, DTensor) else x.clone()


def worst_error(pairs: Iterable[tuple[Tensor, Tensor]], floor: float = 0.0) -> float:
    """Return the largest difference of a value from its reference, relative to the reference's largest number.

    `floor`: the smallest denominator of the relative error. Returns infinity if a value contains a NaN.
    """
    worst = 0.0
    for value, reference in pairs:
        difference, largest = float((value - reference).abs().max()), max(float(reference.abs().max()), floor)
        if math.isnan(difference) or (difference and not largest):
            return math.inf
        worst = max(worst, difference / largest if difference else 0.0)
    return worst
