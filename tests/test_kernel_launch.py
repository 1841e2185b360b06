"""Kept handles against Triton's own launch, with a driver that launches nothing; and the look-up of block sizes.

The kernel is one of the compile gate's, so that nothing compiled here for a GPU that is not there stays in a kernel of
the library.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from triton.runtime import driver

from ringattn.bench.launch import StubDriver
from ringattn.kernels import launch
from ringattn.kernels.configs import configs_for
from ringattn.kernels.launch import Kept
from ringattn.kernels.launch_call import LaunchCall
from tests.compile_gate.purpose import product

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture
def stub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[StubDriver]:
    """In the place of the process's driver."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    stub = StubDriver(80)
    monkeypatch.setattr(driver, "_active", stub)
    product.device_caches.clear()
    yield stub
    product.device_caches.clear()


def call_with(
    dtype: torch.dtype = torch.float16, offset: int = 0, size: int = 32, scale: float = 48, warps: int = 4
) -> LaunchCall:
    """A small matrix product; `offset`: elements from an aligned address."""
    a, b = (torch.zeros(size * 16 + 16, dtype=dtype)[start:] for start in (offset, 0))
    meta = {"SIZE": size, "DEPTH": 16, "num_warps": warps, "num_stages": 1}
    return LaunchCall(product, (3,), (a, b, torch.zeros(size, size), 4, scale), meta)


def test_launches_what_triton_launches(stub: StubDriver) -> None:
    """Grid, stream, function, and all arguments in the kernel's order; but the metadata and hooks of profilers."""
    stub.launched, stub.stream, call = [], 7, call_with()
    call.run()
    Kept().launch(call)
    theirs, ours = (one[:6] + one[9:] for one in stub.launched)
    assert theirs[:4] == (3, 1, 1, 7) and len(theirs) == 6 + len(product.arg_names)
    assert all(x is y or x == y for x, y in zip(theirs, ours, strict=True))


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({}, {"dtype": torch.bfloat16}),
        ({}, {"offset": 1}),
        ({}, {"size": 16}),
        ({}, {"warps": 8}),
        ({}, {"scale": 47}),
        ({}, {"scale": 1}),
        ({}, {"scale": 48.0}),
        ({}, {"scale": 1 << 40}),
        ({"scale": 1}, {"scale": True}),
        ({"scale": 1.0}, {"scale": True}),
    ],
    ids=str,
)
def test_what_triton_tells_apart_is_told_apart(one: dict[str, Any], other: dict[str, Any], stub: StubDriver) -> None:
    kept, first, second = Kept(), call_with(**one), call_with(**other)
    handles = [kept.compile(first), kept.compile(second)]
    assert handles[0].run is not handles[1].run
    for call, handle in zip((first, second), handles, strict=True):
        assert handle.run is call.kernel.warmup(*call.args, grid=call.grid, **call.meta).run


def test_what_was_seen_is_not_bound_again(stub: StubDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = Kept()
    kept.compile(call_with())
    with monkeypatch.context() as patch:
        patch.setattr(launch, "_compiled", lambda call: pytest.fail("bound again"))
        kept.launch(call_with())
        stub.device = 1
        with pytest.raises(pytest.fail.Exception, match="bound again"):
            kept.launch(call_with())


def test_handles_do_not_grow_without_end(stub: StubDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "MOST_HANDLES", 2)
    stub.launched, kept = [], Kept()
    for scale in (16, 32, 48, 16):
        kept.launch(call_with(scale=scale))
        assert len(kept._handles) <= 2
    assert len(stub.launched) == 4


def test_the_smallest_entry_that_holds_the_dimension() -> None:
    assert configs_for(90, torch.float16, 65) is configs_for(90, torch.bfloat16, 128)
    assert configs_for(90, torch.float16, 64) is not configs_for(90, torch.float16, 65)
    assert configs_for(90, torch.float32, 128) is not configs_for(90, torch.float16, 128)


@pytest.mark.parametrize(
    ("arch", "dtype", "dim", "why"),
    [
        (75, torch.float16, 64, "sm_75; there are some for sm_80, sm_86, sm_89, sm_90, sm_100, sm_120"),
        (90, torch.float64, 64, "torch.float64; there are some for float32, float16 and bfloat16"),
        (90, torch.float16, 257, "head dimension 257; there are some for dimensions to 256"),
    ],
)
def test_what_has_no_entry_is_refused_by_name(arch: int, dtype: torch.dtype, dim: int, why: str) -> None:
    with pytest.raises(LookupError, match=why):
        configs_for(arch, dtype, dim)


@pytest.mark.slow
def test_the_benchmark_runs(tmp_path: Path) -> None:
    """In a process of its own, since it compiles the library's kernel for a GPU that is not there."""
    command = [sys.executable, "-m", "ringattn.bench.launch", "rounds=1"]
    environment = os.environ | {"TRITON_CACHE_DIR": str(tmp_path)}
    lines = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True).stdout
    assert [line.split("  ")[0] for line in lines.splitlines()] == [
        "kernel[grid](...)",
        "kept handle",
        "handle, arguments at hand",
        "describing the call",
        "describing and kept handle",
    ]
