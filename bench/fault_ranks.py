"""What the ranks of a scripted fault do, started by torchrun: `python -m ringattn.bench.fault_ranks JOB.json`.

A pass of attention, forward and backward, goes well; in the next one rank does something wrong, and the others write
down which error they got and when. Survivors ignore SIGTERM, for torchrun ends them as soon as a rank dies.
Guarantees: nothing is reported unless the first pass was exact.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from ringattn.bench.gate import GateError
from ringattn.ring import Ring
from ringattn.testing import dense_attention

FATAL = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}
KINDS = (*FATAL, "refuse", "shape", "plan")
TOKENS = 40
OPEN_S = 60.0
TRIES = 3  # a rank that needs nothing more from the lost one hears of it in its next call


@dataclass(frozen=True)
class Fault:
    """`rank` does what `kind` says; a fatal one right after its `hop`-th exchange of the pass has been posted."""

    kind: str
    rank: int
    hop: int = 0


def one_pass(ring: Ring, tokens: int = TOKENS, extra: int = 0, causal: bool = True) -> torch.Tensor:
    """Forward and backward of one call; the output. `extra` rows in this rank's queries make it refuse the call."""
    seq = ring.sequence(tokens, layout="zigzag")
    x = torch.randn(1, tokens, 2, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(7))
    q = seq.shard(x).detach()
    q = torch.cat([q, q[:, :extra]], 1).requires_grad_()
    out = ring.attention(q, q, q, seq, causal=causal)
    out.sum().backward()
    return out.detach()


def open_gate(ring: Ring) -> None:
    """One exact pass. Raises `GateError`."""
    x = torch.randn(1, TOKENS, 2, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(7))
    seq = ring.sequence(TOKENS, layout="zigzag")
    error = (one_pass(ring) - seq.shard(dense_attention(x, x, x, causal=True)[0])).abs().max().item()
    if not error < 1e-10:
        raise GateError(f"rank {ring.rank}: off by {error:.1e} before any fault; nothing is measured")


def suffer(fault: Fault, timeout_s: float, note: Path, transport: str = "gloo") -> dict[str, Any]:
    """One fault in a fresh ring: which error this rank got, when, and whether the ring still works.

    The faulty rank writes when it happened, in seconds of the host's monotonic clock, and its process id to `note`.
    """
    with Ring(transport=transport, timeout_s=OPEN_S) as meeting:
        open_gate(meeting)  # a deadline of a few seconds is no measure for processes that still import
    with Ring(transport=transport, timeout_s=timeout_s) as ring:
        before = one_pass(ring)
        faulty = ring.rank == fault.rank

        def happens() -> None:
            _write(note, {"at_s": time.monotonic(), "pid": os.getpid()})
            if fault.kind in FATAL:
                os.kill(os.getpid(), FATAL[fault.kind])

        if faulty and fault.kind in FATAL:
            _after_exchange(ring.transport, fault.hop, happens)
        elif faulty:
            happens()
        # What the faulty rank asks for; the others ask for what they asked before.
        odd: dict[str, dict[str, Any]] = {
            "refuse": {"extra": 1},
            "shape": {"tokens": TOKENS + 1},
            "plan": {"causal": False},
        }
        asked: dict[str, Any] = odd.get(fault.kind, {}) if faulty else {}
        seen: dict[str, Any] = {"kind": "nothing", "message": ""}
        for _ in range(TRIES):
            try:
                one_pass(ring, **asked)
            except Exception as error:
                seen = {"kind": type(error).__name__, "message": str(error)}
                break
        seen["at_s"] = time.monotonic()
        if fault.kind not in FATAL:
            seen["works_on"] = torch.equal(one_pass(ring), before)
        return seen


def _after_exchange(transport: Any, hop: int, happens: Callable[[], None]) -> None:
    """Let it happen when the `hop`-th exchange from now has been posted."""
    # What each start of an exchange passes through, bound before or not.
    name = "_start" if transport.name == "shm" else "exchange"
    post, posted = getattr(transport, name), [0]

    def exchange(*messages: Any) -> Any:
        ticket = post(*messages)
        if posted[0] == hop:
            happens()
        posted[0] += 1
        return ticket

    setattr(transport, name, exchange)


def _write(path: Path, content: Any) -> None:
    """All of it or nothing, for the reader looks while this rank writes."""
    partial = path.with_suffix(f".partial-{os.getpid()}")
    partial.write_text(json.dumps(content), encoding="utf-8")
    partial.rename(path)


def main(job: Path) -> int:
    """One rank's life: every fault of the job. 1 after a fatal one, as a program that raises."""
    torch.set_num_threads(1)
    described = json.loads(job.read_text(encoding="utf-8"))
    faults, rank = [Fault(**fault) for fault in described["faults"]], int(os.environ["RANK"])
    if not any(fault.kind in FATAL and fault.rank == rank for fault in faults):
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    answers = []
    for number, fault in enumerate(faults):
        note = job.parent / f"fault-{number}.json"
        answers.append({**asdict(fault), **suffer(fault, described["timeout_s"], note, described["transport"])})
    _write(job.parent / f"answer-{rank}.json", answers)
    return int(any(fault.kind in FATAL for fault in faults))


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
