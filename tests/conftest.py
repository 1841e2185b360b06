"""Settings of every test run: one thread per rank, the same examples in every CI run, GPU tests only on a GPU."""

from __future__ import annotations

import atexit
import os
import shutil
import tempfile
from importlib.util import find_spec
from pathlib import Path

# Set before torch loads: the ranks of a test are threads or processes, each with one intra-op thread, unless
# OMP_NUM_THREADS says otherwise.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("MPLBACKEND", "Agg")
# For each connection to a store, torch resolves the name of the other end, in the client and in the store's host. By
# default, a lost DNS query costs five seconds, which is longer than many deadlines here.
os.environ["RES_OPTIONS"] = "timeout:1 attempts:1"
# Never reuse Inductor's disk cache of another run: its key ignores ATEN_CPU_CAPABILITY and changes of an operator's
# fake implementation.
if "TORCHINDUCTOR_CACHE_DIR" not in os.environ:
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = tempfile.mkdtemp(prefix="ringattn-inductor-")
    atexit.register(shutil.rmtree, os.environ["TORCHINDUCTOR_CACHE_DIR"], True)

import pytest
import torch

pytest_plugins = ("tests.running",)

torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))

# A GPU machine may have only torch and pytest; see pytest_ignore_collect.
if find_spec("hypothesis") is not None:
    from hypothesis import settings

    settings.register_profile("dev", deadline=None, max_examples=30)
    settings.register_profile("ci", deadline=None, max_examples=30, derandomize=True, print_blob=True)
    settings.load_profile("ci" if os.environ.get("CI") else "dev")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--part", default="1/1", help="run every N-th test, from the I-th on: I/N")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Under `-m gpu`, ignore files that do not name the marker, so that packages of other tests are not needed."""
    if config.option.markexpr != "gpu" or collection_path.suffix != ".py":
        return None
    return True if "mark.gpu" not in collection_path.read_text(encoding="utf-8") else None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keep the selected part, and skip tests marked `gpu` on a machine without a GPU."""
    part, parts = map(int, config.getoption("--part").split("/"))
    items[:] = items[part - 1 :: parts]
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device (make gpu-first)"))
