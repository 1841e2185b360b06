"""Programs of `test_script.py` in forked processes: what they import is loaded before the forks."""

from __future__ import annotations

import runpy
import sys
from functools import partial
from pathlib import Path

import ringattn.adapters.auto  # noqa: F401
import tests.adapters.user_scripts  # noqa: F401
from tests.adapters.processes import forked_ranks


def run(arguments: list[str], processes: int) -> None:
    """Run `python ARGUMENTS` in this process, or on several forked ranks."""
    if processes == 1:
        start(arguments)
    else:
        forked_ranks(processes, partial(start, arguments))


def start(arguments: list[str], number: int = 0) -> None:
    """Run a script or, after -m, a module as `__main__` in this process. Raises SystemExit if it fails."""
    is_module = arguments[0] == "-m"
    sys.argv = arguments[is_module:]
    sys.path[0] = str(Path.cwd() if is_module else Path(sys.argv[0]).parent)
    try:
        if is_module:
            runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(sys.argv[0], run_name="__main__")
    except SystemExit as end:
        if end.code:
            raise
