"""What the NCCL transport asks of torch, where no GPU answers.

Not covered: CUDA (`tests/gpu/test_lifetimes.py`).
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ringattn.transport.device import CudaDevice


class Streams:
    """As `torch.cuda.Stream` of a GPU with six levels, of which torch has four."""

    made: list[Any] = []  # noqa: RUF012

    def __init__(self, device: torch.device, priority: int = 0) -> None:
        self.made.append((device, priority))

    @staticmethod
    def priority_range() -> tuple[int, int]:
        return 0, -3


def test_the_communication_stream_has_the_highest_priority(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: SimpleNamespace(uuid="GPU-0"))
    monkeypatch.setattr(torch.cuda, "Stream", Streams)
    CudaDevice(0).new_stream()
    assert Streams.made == [(torch.device("cuda", 0), -3)]
