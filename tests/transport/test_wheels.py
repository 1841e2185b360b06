"""A warning of one line names installed wheels for another CUDA version than torch's, or for two, and the remedy."""

from __future__ import annotations

import pytest

from ringattn.transport.nccl.library import mismatch

FITTING = {"cupy-cuda13x": "14.2.0", "nvidia-nccl-cu13": "2.29.7"}


@pytest.mark.parametrize(
    ("build", "installed"),
    [
        ("13.0", FITTING),
        (None, FITTING),
        ("13.0", {}),
        ("12.8", {"cupy-cuda12x": "14.0", "nvidia-nccl-cu12": "2.27.3"}),
        ("13.0", {"cupy": "14.0"}),
    ],
)
def test_wheels_that_fit(build: str | None, installed: dict[str, str]) -> None:
    assert mismatch(build, installed.get) is None


@pytest.mark.parametrize(
    ("build", "installed", "message"),
    [
        (
            "13.0",
            {"cupy-cuda12x": "14.0", "nvidia-nccl-cu13": "2.29.7"},
            "installed: cupy-cuda12x 14.0, nvidia-nccl-cu13 2.29.7; this torch has CUDA 13.0: pip uninstall -y "
            "cupy-cuda12x, then pip install --force-reinstall --no-deps cupy-cuda13x",
        ),
        (
            "13.0",
            {**FITTING, "nvidia-nccl-cu12": "2.27.3"},
            "installed: cupy-cuda13x 14.2.0, nvidia-nccl-cu13 2.29.7, nvidia-nccl-cu12 2.27.3; this torch has CUDA "
            "13.0: pip uninstall -y nvidia-nccl-cu12, then pip install --force-reinstall --no-deps "
            "nvidia-nccl-cu13==2.29.7",
        ),
        (
            None,
            {"cupy-cuda13x": "14.2.0", "cupy": "14.0"},
            "installed: cupy-cuda13x 14.2.0, cupy 14.0; wheels of one kind install the same files: "
            "pip uninstall -y cupy, "
            "then pip install --force-reinstall --no-deps cupy-cuda13x==14.2.0",
        ),
        (
            "12.8",
            FITTING,
            "installed: cupy-cuda13x 14.2.0, nvidia-nccl-cu13 2.29.7; this torch has CUDA 12.8: pip uninstall -y "
            "cupy-cuda13x nvidia-nccl-cu13, then pip install --force-reinstall --no-deps cupy-cuda12x nvidia-nccl-cu12",
        ),
    ],
)
def test_wheels_that_do_not_fit(build: str | None, installed: dict[str, str], message: str) -> None:
    assert mismatch(build, installed.get) == message
