"""Fills uninitialised memory of torch with NaN, as a ring's pool does with `poison`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def unset_is_nan() -> Iterator[None]:
    """Fill uninitialised memory with NaN in all threads of the process, by torch's deterministic mode.

    On a CPU, this mode has no other effect.
    """
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        assert torch.empty(1).isnan().all()
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
