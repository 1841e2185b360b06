"""What the processes of `test_processes.py` do: each function is one rank's life and returns what it saw."""

from __future__ import annotations

import os
import time
from typing import Any

import torch

import ringattn
from ringattn.engine.plain import PlainEngine

TOKENS = 40


def _call(ring: ringattn.Ring, tokens: int = TOKENS) -> torch.Tensor:
    seq = ring.sequence(tokens, layout="zigzag")
    q = torch.ones(1, seq.counts[ring.rank], 2, 8, dtype=torch.float64)
    out = ring.attention(q, q, q, seq, causal=True)
    assert isinstance(out, torch.Tensor)
    return out


def _seen(what: Any) -> dict[str, Any]:
    """The error that `what()` raises, and how long it took."""
    start = time.monotonic()
    try:
        what()
    except Exception as error:
        return {"kind": type(error).__name__, "message": str(error), "seconds": time.monotonic() - start}
    return {"kind": "nothing", "message": "", "seconds": time.monotonic() - start}


class Faulty:
    """An engine that fails the first time it works: its own keys have left, and others' have not come."""

    name = "faulty"

    def __init__(self, inner: Any, fault: Any) -> None:
        self.inner, self.fault, self.calls = inner, fault, 0

    def __getattr__(self, other: str) -> Any:
        return getattr(self.inner, other)

    def attend(self, *arguments: Any) -> None:
        self.calls += 1
        if self.calls == 1:
            self.fault()
        self.inner.attend(*arguments)


def _with_fault(fault: Any) -> dict[str, Any]:
    with ringattn.Ring(timeout_s=6.0) as ring:
        _call(ring)  # everybody is connected and warm
        if ring.rank == 1:
            faulty = Faulty(PlainEngine(), fault)
            ring.engine_for = lambda *_: faulty  # type: ignore[method-assign, assignment, return-value]
        seen = [_seen(lambda: _call(ring)) for _ in range(3)]
        errors = [one for one in seen if one["kind"] != "nothing"]
        return {"first": errors[0], "after": errors[1], "passes_completed": 3 - len(errors)}


def exits_mid_pass() -> dict[str, Any]:
    """Rank 1 vanishes in the middle of a pass."""
    return _with_fault(lambda: os._exit(0))


def raises_mid_pass() -> dict[str, Any]:
    """Rank 1's engine fails in the middle of a pass."""

    def fail() -> None:
        raise ValueError("the engine of rank 1 broke")

    return _with_fault(fail)


def stalls_mid_pass() -> dict[str, Any]:
    """Rank 1 falls asleep in the middle of a pass, for longer than the deadline."""
    return _with_fault(lambda: time.sleep(12.0))


def validates() -> dict[str, Any]:
    """Two steps without and with validation in inference mode before each, of the same length and a longer one."""

    def step(ring: ringattn.Ring, tokens: int) -> torch.Tensor:
        seq = ring.sequence(tokens)
        x = seq.shard(torch.arange(tokens * 16.0, dtype=torch.float64).sin().view(1, tokens, 2, 8)).requires_grad_()
        seq.gather(ring.attention(x, x, x, seq, causal=True)).sin().sum().backward()
        assert x.grad is not None
        return x.grad

    with ringattn.Ring(timeout_s=20.0) as ring:
        plain = [step(ring, tokens) for tokens in (20, TOKENS)]
    with ringattn.Ring(timeout_s=20.0) as ring:
        validated = []
        for tokens in (20, TOKENS):
            with torch.inference_mode():
                for length in (3 * tokens, tokens):
                    seq = ring.sequence(length)
                    x = torch.ones(1, seq.counts[ring.rank], 2, 8, dtype=torch.float64)
                    ring.attention(x, x, x, seq, causal=True)
            validated.append(step(ring, tokens))
    alike = all(torch.equal(one, other) for one, other in zip(plain, validated, strict=True))
    return {"alike": alike, "sums": [float(grad.abs().sum()) for grad in plain]}


def disagrees() -> dict[str, Any]:
    """Rank 1 asks for another length, then all ask for the same."""
    with ringattn.Ring(timeout_s=20.0) as ring:
        first = _seen(lambda: _call(ring, TOKENS + (ring.rank == 1)))
        return {"first": first, "after": _seen(lambda: _call(ring))}


def lives(rank: int, world_size: int, entry: str, store: int) -> dict[str, Any]:
    """What a rank does whom an agent started: `entry`, of this module. The agent's store has port `store`."""
    place = {"RANK": rank, "WORLD_SIZE": world_size, "MASTER_PORT": store, "TORCHELASTIC_USE_AGENT_STORE": True}
    os.environ.update({name: str(value) for name, value in place.items()})
    seen: dict[str, Any] = globals()[entry]()
    return seen
