"""The ranks of a scripted fault: processes that run attention passes until one of them fails on purpose.

Guarantees: nothing is reported unless the first pass was exact. Every later result is compared with that of the first.
"""

from __future__ import annotations

import atexit
import ctypes
import os
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any

import torch

from ringattn.bench.gate import GateError
from ringattn.bench.hosts import enter
from ringattn.errors import RingError
from ringattn.ring import Ring
from ringattn.testing import dense_attention

TOKENS = 40
OPEN_S = 60.0
PASSES = 8
"""Passes that each rank runs. The fault happens in the third."""
FAULT_PASS = 2
CHILD_S = 5.0
"""How long a forked child may take."""

BETWEEN, IN_PASS, IN_BACKWARD, AT_CLOSE = "between passes", "in a pass", "in backward", "before close"


@dataclass(frozen=True)
class Fault:
    """A scripted fault: rank `rank` does `act` at `moment`.

    `deadlines` is the duration of the act as a multiple of the ring's deadline. `outcome` states how the ranks must
    react, see `faults.judge`.
    """

    name: str
    act: str
    outcome: str
    rank: int = 1
    moment: str = BETWEEN
    deadlines: float = 0.0


@dataclass(frozen=True)
class Seat:
    """The place of one rank: its number, its ring, and where it runs.

    `namespace` is its network namespace, or empty for that of this machine. `meeting` and `port` are the address at
    which the ranks connect.
    """

    rank: int
    ranks: int
    meeting: str
    port: int
    transport: str
    timeout_s: float
    namespace: str = ""
    hop: int = 0
    """The exchange of the pass after which a fault in a pass happens."""


@dataclass
class Answer:
    """A rank's report of how it ended.

    `kind` is "right" if all its results were right, else the class name of its error. Times are those of the monotonic
    clock.
    """

    kind: str = "right"
    message: str = ""
    at_s: float = 0.0
    waits_s: float = 0.0
    """When the wait that failed began: a fault that happened earlier cannot be noticed before."""
    child: str = ""
    """What a forked child of this rank raised, and whether it ended."""


def one_pass(
    ring: Ring, tokens: int = TOKENS, extra: int = 0, strike: Callable[[], None] | None = None, **options: Any
) -> torch.Tensor:
    """Run one call forward and backward; return its output and the gradient of the queries.

    With `extra` surplus rows in its queries, this rank refuses the call. `strike` is called when backward begins.
    """
    seq = ring.sequence(tokens, layout="zigzag")
    x = torch.randn(1, tokens, 2, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(7))
    q = seq.shard(x).detach()
    q = torch.cat([q, q[:, :extra]], 1).requires_grad_()
    out = ring.attention(q, q, q, seq, **{"causal": True, **options})
    if strike is not None:
        out.register_hook(lambda grad: strike())
    out.sum().backward()
    return torch.cat([out.detach().flatten(), q.grad.flatten()])  # type: ignore[union-attr]


def open_gate(ring: Ring) -> None:
    """Compare one pass with dense attention. Raises `GateError` if it is not exact."""
    x = torch.randn(1, TOKENS, 2, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(7)).requires_grad_()
    seq = ring.sequence(TOKENS, layout="zigzag")
    out = dense_attention(x, x, x, causal=True)[0]
    out.sum().backward()
    expected = torch.cat([seq.shard(out.detach()).flatten(), seq.shard(x.grad).flatten()])  # type: ignore[arg-type]
    error = (one_pass(ring) - expected).abs().max().item()
    if not error < 1e-10:
        raise GateError(f"rank {ring.rank}: off by {error:.1e} before any fault; nothing is measured")


def live(seat: Seat, fault: Fault, pipe: Connection) -> None:
    """Run one rank. Send "now" when the fault happens, then an `Answer`, and exit as a program would."""
    if seat.namespace:
        enter(seat.namespace)
    os.environ.update(
        RANK=str(seat.rank), WORLD_SIZE=str(seat.ranks), MASTER_ADDR=seat.meeting, MASTER_PORT=str(seat.port),
        RES_OPTIONS="timeout:1 attempts:1",
    )  # fmt: skip
    torch.set_num_threads(1)
    # torchrun sends SIGTERM to all ranks once one has failed. Survivors ignore it here, because their own errors are to
    # be measured.
    if seat.rank != fault.rank:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        pipe.send(_Rank(seat, fault, pipe).run())
    except (SystemExit, KeyboardInterrupt):
        pass
    if fault.act in LEAVING and seat.rank == fault.rank:
        atexit._run_exitfuncs()  # a process of `multiprocessing` skips them
        return
    # The store's host must not end before the other ranks have answered.
    with suppress(EOFError):
        pipe.recv()


@dataclass
class _Rank:
    """One rank with its ring, its fault and its answer."""

    seat: Seat
    fault: Fault
    pipe: Connection
    answer: Answer = field(default_factory=Answer)

    def run(self) -> Answer:
        """Run the passes of this rank and return its answer."""
        seat = self.seat
        with Ring(transport=seat.transport, timeout_s=OPEN_S) as first:
            open_gate(first)
        self.ring = Ring(transport=seat.transport, timeout_s=seat.timeout_s)
        self.expected = one_pass(self.ring)
        self._watch_waits()
        try:
            for number in range(PASSES):
                self._pass(number)
            self._strike(AT_CLOSE)
            self.ring.close()
        except RingError as error:
            self._say(type(error).__name__, str(error))
        except Exception as error:
            self._say(type(error).__name__, str(error))
        return self.answer

    def strike(self) -> None:
        """Tell the parent that the fault happens now, and perform the act on this rank."""
        self.pipe.send("now")
        self.pipe.recv()  # the parent has recorded the time, or has degraded the link
        ACTS[self.fault.act](self)

    def lasts_s(self) -> float:
        """Return how many seconds the fault lasts."""
        return self.fault.deadlines * self.seat.timeout_s

    def _pass(self, number: int) -> None:
        self.answer.waits_s = time.monotonic()
        struck = number == FAULT_PASS and self.seat.rank == self.fault.rank
        if struck:
            self._strike(BETWEEN)
        if struck and self.fault.moment == IN_PASS:
            after_exchange(self.ring.transport, self.seat.hop, self.strike)
        changes = CHANGES.get(self.fault.act, {}) if struck else {}
        in_backward = self.strike if struck and self.fault.moment == IN_BACKWARD else None
        result = one_pass(self.ring, strike=in_backward, **changes)
        if not torch.equal(result, self.expected) and not changes:
            self._say("wrong", f"pass {number} was not exact")

    def _strike(self, moment: str) -> None:
        if self.seat.rank == self.fault.rank and self.fault.moment == moment:
            self.strike()

    def _say(self, kind: str, message: str) -> None:
        self.answer.kind, self.answer.message, self.answer.at_s = kind, message, time.monotonic()

    def _watch_waits(self) -> None:
        """Record when each wait of the transport begins, because each has a separate deadline."""
        transport = self.ring.transport
        for name in ("await_both", "_finish"):
            if hasattr(transport, name):
                finish = getattr(transport, name)

                def waits(*arguments: Any, finish: Any = finish) -> None:
                    self.answer.waits_s = time.monotonic()
                    finish(*arguments)

                setattr(transport, name, waits)
                return


def after_exchange(transport: Any, hop: int, strike: Callable[[], None]) -> None:
    """Call `strike()` once the `hop`-th exchange from now has been posted."""
    transport = getattr(transport, "between", transport)
    # Every exchange goes through this method, whether it was bound earlier or not.
    name = "_start" if transport.name == "shm" else "exchange"
    post, posted = getattr(transport, name), [0]

    def exchange(*messages: Any) -> Any:
        ticket = post(*messages)
        posted[0] += 1
        if posted[0] == hop + 1:
            strike()
        return ticket

    setattr(transport, name, exchange)


# --- acts ------------------------------------------------------------------------------------------------------------


def _hold_interpreter(rank: _Rank) -> None:
    ctypes.PyDLL(None).usleep(int(rank.lasts_s() * 1e6))  # PyDLL keeps the global interpreter lock


def _raise_error(error: BaseException) -> Callable[[_Rank], None]:
    def act(rank: _Rank) -> None:
        raise error

    return act


def _raise_in_with(rank: _Rank) -> None:
    with rank.ring:
        raise ValueError("the model is wrong")


def _send_signal(number: int) -> Callable[[_Rank], None]:
    return lambda rank: os.kill(os.getpid(), number)


def _fork(use: Callable[[_Rank], None]) -> Callable[[_Rank], None]:
    """Return an act that forks a child, which runs `use`, and records how the child ends."""

    def act(rank: _Rank) -> None:
        readable, writable = os.pipe()
        child = os.fork()
        if not child:
            outcome = "nothing"
            try:
                use(rank)
            except RingError as error:
                outcome = type(error).__name__
            except BaseException as error:
                outcome = f"{type(error).__name__}: {error}"
            os.write(writable, outcome.encode())
            atexit._run_exitfuncs()
            os._exit(0)
        os.close(writable)
        deadline_s = time.monotonic() + CHILD_S
        while not (ended := os.waitpid(child, os.WNOHANG)[0]) and time.monotonic() < deadline_s:
            time.sleep(0.01)
        if not ended:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
        os.set_blocking(readable, False)
        with suppress(BlockingIOError):
            rank.answer.child = os.read(readable, 400).decode()
        rank.answer.child += "" if ended else "; hung"
        os.close(readable)

    return act


ACTS: dict[str, Callable[[_Rank], None]] = {
    "kill": _send_signal(signal.SIGKILL),
    "terminate": _send_signal(signal.SIGTERM),
    "interrupt": _send_signal(signal.SIGINT),
    "stop": _send_signal(signal.SIGSTOP),
    "exit": _raise_error(SystemExit(3)),
    "raise": _raise_error(ValueError("the model is wrong")),
    "raise in with": _raise_in_with,
    "out of memory": _raise_error(MemoryError("no room")),
    "close": lambda rank: rank.ring.close(),
    "sleep": lambda rank: time.sleep(rank.lasts_s()),
    "hold the interpreter": _hold_interpreter,
    "extra call": lambda rank: (one_pass(rank.ring, causal=False), None)[1],
    "barrier": lambda rank: rank.ring.barrier(),
    "child uses the ring": _fork(lambda rank: rank.ring.barrier()),
    "child closes the ring": _fork(lambda rank: rank.ring.close()),
    "child exits": _fork(lambda rank: None),
    "other mask": lambda rank: None,
    "other length": lambda rank: None,
    "wrong shape": lambda rank: None,
    "spoil the link": lambda rank: None,
}
CHANGES: dict[str, dict[str, Any]] = {
    "other mask": {"causal": False},
    "other length": {"tokens": TOKENS + 1},
    "wrong shape": {"extra": 1},
}
"""Acts that change the rank's call instead of stopping it."""
LEAVING = ("exit", "terminate", "interrupt", "out of memory", "raise", "raise in with")
"""Acts that end the program. `sys.exit`, SIGTERM and Ctrl-C end it immediately."""
