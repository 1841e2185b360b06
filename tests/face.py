"""Helpers for tests of wrong arguments: a small valid call, and the errors of all ranks."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ringattn import Ring
from ringattn.testing import run_ranks

TOKENS, RANKS, DEADLINE_S = 12, 3, 20.0
X = torch.randn(1, TOKENS, 4, 8, generator=torch.Generator().manual_seed(1))

Change = Callable[[Ring, dict[str, Any]], None]
"""A function that makes the arguments of a valid call invalid, in place."""


def good_call(ring: Ring) -> dict[str, Any]:
    """Return the arguments of a valid call."""
    seq = ring.sequence(TOKENS)
    q = seq.shard(X)
    return {"q": q, "k": q[:, :, :2], "v": q[:, :, :2], "seq": seq, "causal": True}


def attend(ring: Ring, change: Change | None = None) -> Tensor:
    """Make the valid call, with its arguments changed by `change`."""
    arguments = good_call(ring)
    if change is not None:
        change(ring, arguments)
    return ring.attention(**arguments)


def errors(body: Callable[[Ring], object], ranks: int = RANKS, **options: Any) -> list[Exception]:
    """Run `body` on all ranks and return the error of each. Fails unless every rank raises before the deadline."""

    def caught(ring: Ring) -> Exception | None:
        try:
            body(ring)
        except Exception as error:
            return error
        return None

    began = time.monotonic()
    outcomes = run_ranks(ranks, caught, **{"engine": "plain", "timeout_s": DEADLINE_S, **options})
    assert time.monotonic() - began < DEADLINE_S
    missing = [rank for rank, error in enumerate(outcomes) if error is None]
    assert not missing, f"ranks {missing} raised nothing"
    return [error for error in outcomes if error is not None]
