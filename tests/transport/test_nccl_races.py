"""The order of a pass's work on a GPU: no schedule has a race, and each mutation of the order is detected.

The executor, the plan and the NCCL transport are the real ones. Packing, additions and kernels report the bytes that
they access to the simulated device. The race detector checks that events and rendezvous order these accesses.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

import ringattn.runtime.executor
import ringattn.runtime.runtime
from ringattn import Ring
from ringattn.engine.base import KV
from ringattn.engine.plain import PlainEngine
from ringattn.errors import DisagreementError
from ringattn.planner.plan import Plan
from ringattn.runtime.consistency import ComparedCall
from ringattn.runtime.records import LocalTensors, PackedBuffer
from ringattn.schedule.routes import ROUTES
from ringattn.transport.device import StreamWorkHandle
from ringattn.transport.nccl.communicator import Communicator, PeerCall
from tests.covering import thinned
from tests.schedules import NEWER
from tests.transport.nccl_rings import Outcome, on_rings
from tests.transport.simulated.device import SimDevice, SimStream
from tests.transport.simulated.library import SimLibrary
from tests.transport.simulated.races import Race, find_races
from tests.transport.simulated.streams import Range
from tests.transport.simulated.world import SimWorld
from tests.trial import Trial, greatest_error, joined, on_rank, reference

TRIALS = {
    "zigzag": Trial(causal=True, heads=(4, 2)),
    "striped": Trial(window=(6, 2)),
    "per_document": Trial(causal=True, documents=(0, 5, 5, 18, 19, 37)),
}
current_rank = threading.local()


def extent(x: Tensor) -> list[Range]:
    """Return a list of the range from the first to the last byte of a strided view; an empty list for an empty view."""
    if not x.numel():
        return []
    last = sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))
    return [(x.data_ptr(), (last + 1) * x.element_size())]


def packed_range(buffer: PackedBuffer | LocalTensors) -> list[Range]:
    """Return the range of a packed buffer, as a list. It is empty for local tensors, which are never exchanged."""
    return extent(buffer.flat) if isinstance(buffer, PackedBuffer) else []


class Touching:
    """An engine that reports its accesses to K/V and dK/dV to the simulated device."""

    def __init__(self, inner: Any, gpu: SimDevice) -> None:
        self._inner, self._gpu = inner, gpu

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def attend(self, q: Tensor, kv: KV, *rest: Any) -> None:
        self._gpu.touch(reads=[*extent(kv.k), *extent(kv.v)], label="attend")
        self._inner.attend(q, kv, *rest)

    def attend_grad(self, q: Tensor, kv: KV, inputs: Any, dq: Any, dkv: Any, work: Any, result: Any = None) -> None:
        sums = [*extent((dkv or result).k), *extent((dkv or result).v)]
        self._gpu.touch(reads=[*extent(kv.k), *extent(kv.v), *sums], writes=sums, label="attend_grad")
        self._inner.attend_grad(q, kv, inputs, dq, dkv, work, result)


@pytest.fixture
def touching(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the executor's packing and additions report their accesses too."""
    pack, add = ringattn.runtime.executor.pack, ringattn.runtime.executor.add

    def touched_pack(source: PackedBuffer | LocalTensors, into: PackedBuffer) -> None:
        current_rank.gpu.touch(reads=packed_range(source), writes=packed_range(into), label="pack")
        pack(source, into)

    def touched_add(part: PackedBuffer, into: PackedBuffer | LocalTensors, first: bool) -> None:
        current_rank.gpu.touch(reads=packed_range(part) + packed_range(into), writes=packed_range(into), label="add")
        add(part, into, first)

    monkeypatch.setattr(ringattn.runtime.executor, "pack", touched_pack)
    monkeypatch.setattr(ringattn.runtime.executor, "add", touched_add)


RunResult = tuple[list[Outcome], SimWorld, list[Race]]


def run_passes(ranks: int, layout: str, schedule: str, timeout_s: float = 20.0) -> RunResult:
    """Run two calls, each forward and backward. The second call reuses the staging buffers of the first."""
    world = SimWorld(ranks)

    def body(ring: Ring) -> Any:
        current_rank.gpu = ring.transport.gpu  # type: ignore[attr-defined]
        engine = Touching(PlainEngine(), current_rank.gpu)
        ring.engine_for = lambda *_: engine  # type: ignore[method-assign, assignment, return-value]
        return [on_rank(ring, TRIALS[layout], layout, schedule, torch.float64) for _ in range(2)][1]

    outcomes = on_rings(world, body, ring={"engine": "plain", "poison": True}, timeout_s=timeout_s)
    return outcomes, world, find_races([world.trace[rank] for rank in range(ranks)])


def is_correct(layout: str, outcomes: list[Outcome], world: SimWorld, races: list[Race]) -> bool:
    """Return whether the results are exact, and the run had no error, violation or race."""
    if world.violations or races or any(outcome.error for outcome in outcomes):
        return False
    output = joined([outcome.result for outcome in outcomes])
    return greatest_error(output, reference(TRIALS[layout], torch.float64)) <= 1e-10


@pytest.mark.usefixtures("touching")
@pytest.mark.parametrize(
    ("layout", "schedule", "ranks"),
    thinned(product(TRIALS, ROUTES, (2, 3, 4)), quick=lambda cell: cell[1] not in NEWER or cell[1] == "double_ring"),
)
def test_nothing_races(layout: str, schedule: str, ranks: int) -> None:
    outcomes, world, races = run_passes(ranks, layout, schedule)
    assert [str(race) for race in races[:3]] == [] and world.violations == []
    assert is_correct(layout, outcomes, world, races)
    touched = [entry for entry in world.trace[0] if type(entry).__name__ == "Touch"]
    assert {entry.label for entry in touched} >= {"pack", "attend", "attend_grad", "add"}  # type: ignore[attr-defined]


# --- mutations of the order are detected -----------------------------------------------------------------------------

Mutation = Callable[[pytest.MonkeyPatch], None]


def no_wait_for_arrival(patch: pytest.MonkeyPatch) -> None:
    """Drop the wait for an exchange, so that compute begins before the bytes have arrived."""
    patch.setattr(StreamWorkHandle, "wait", lambda self: setattr(self, "waited", True))


def no_wait_for_compute(patch: pytest.MonkeyPatch) -> None:
    """Drop the wait for compute, so that an exchange begins before its buffers are packed or free."""
    wait = SimStream.wait_event
    patch.setattr(SimStream, "wait_event", lambda self, event: wait(self, event) if self.name == "compute" else None)


def swapped_slots(patch: pytest.MonkeyPatch) -> None:
    """Give two buffers of a plan with overlapping lifetimes the same memory."""
    plan_of = ringattn.runtime.runtime.plan_of

    def broken_plan(*facts: Any) -> Plan:
        plan = plan_of(*facts)
        first, second = next(
            (a, b)
            for a in plan.buffers
            for b in plan.buffers
            if a is not b and a.first <= b.last and b.first <= a.last and a.offset_bytes != b.offset_bytes
        )
        moved = second._replace(offset_bytes=first.offset_bytes)
        return replace(plan, buffers=tuple(moved if buffer is second else buffer for buffer in plan.buffers))

    patch.setattr(ringattn.runtime.runtime, "plan_of", broken_plan)


def ungrouped(patch: pytest.MonkeyPatch) -> None:
    """Issue the sends and receives of a hop without a group around them."""
    patch.setattr(SimLibrary, "group_start", lambda self: 0)
    patch.setattr(SimLibrary, "group_end", lambda self: 0)


def reversed_on_one_rank(patch: pytest.MonkeyPatch) -> None:
    """Let rank 1 launch its first two hops in reversed order."""
    launch = Communicator.launch
    deferred: list[Any] = []

    def launch_reversed(self: Communicator, calls: Any, stream: int, watch: Any) -> None:
        if self.rank != 1 or len(calls) < 2 or "done" in deferred:
            return launch(self, calls, stream, watch)
        deferred.append((calls, stream))
        if len(deferred) == 2:
            (first, _), (second, _) = deferred
            deferred[:] = ["done"]
            launch(self, second, stream, watch)
            launch(self, first, stream, watch)
        return None

    patch.setattr(Communicator, "launch", launch_reversed)


def wrong_count_on_one_rank(patch: pytest.MonkeyPatch) -> None:
    """Let rank 1 receive eight bytes fewer than its peer sends."""
    launch = Communicator.launch

    def short(self: Communicator, calls: Any, stream: int, watch: Any) -> None:
        if self.rank == 1:
            calls = [
                c if c.sends or c.nbytes < 64 else PeerCall(c.sends, c.pointer, c.nbytes - 8, c.peer) for c in calls
            ]
        launch(self, calls, stream, watch)

    patch.setattr(Communicator, "launch", short)


MUTATIONS: list[Mutation] = [
    no_wait_for_arrival, no_wait_for_compute, swapped_slots, ungrouped, reversed_on_one_rank, wrong_count_on_one_rank,
]  # fmt: skip


@contextmanager
def mutated(mutation: Mutation) -> Iterator[None]:
    """Apply a mutation while the context is active."""
    with pytest.MonkeyPatch.context() as patch:
        mutation(patch)
        yield


@pytest.mark.usefixtures("touching")
@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.__name__)
def test_a_wrong_order_is_detected(mutation: Mutation) -> None:
    assert is_correct("zigzag", *run_passes(3, "zigzag", "ring"))
    with mutated(mutation):
        assert not is_correct("zigzag", *run_passes(3, "zigzag", "ring", timeout_s=1.0))


@pytest.mark.usefixtures("touching")
@pytest.mark.parametrize(
    "mutation", [no_wait_for_arrival, no_wait_for_compute, swapped_slots], ids=lambda mutation: mutation.__name__
)
def test_a_wrong_order_that_may_give_correct_results_is_a_race(mutation: Mutation) -> None:
    with mutated(mutation):
        _, _, races = run_passes(3, "zigzag", "ring", timeout_s=1.0)
    assert races


def run_with_different_lengths() -> tuple[list[Outcome], SimWorld]:
    """Run a call in which rank 1 has a longer sequence than the other ranks, so that its messages have other sizes."""
    world = SimWorld(3)

    def body(ring: Ring) -> None:
        seq = ring.sequence(24 + 6 * (ring.rank == 1), layout="contiguous")
        q = torch.ones(1, seq.counts[ring.rank], 2, 8)
        ring.attention(q, q, q, seq, causal=True)
        ring.synchronize()

    return on_rings(world, body, timeout_s=1.0), world


def test_a_missing_consistency_check_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    outcomes, world = run_with_different_lengths()
    assert world.violations == [] and all(isinstance(outcome.error, DisagreementError) for outcome in outcomes)
    monkeypatch.setattr(Ring, "check_consistency", lambda self, *_, **__: ComparedCall(0, False))
    outcomes, world = run_with_different_lengths()
    assert any("the bytes of both ends differ" in violation for violation in world.violations)
    assert not any(isinstance(outcome.error, DisagreementError) for outcome in outcomes)
