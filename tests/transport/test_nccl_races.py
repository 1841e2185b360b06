"""The order of everything a pass does on a GPU: no race in any schedule, and every way to break the order is caught.

The executor, the plan and the NCCL transport are the real ones; packs, merges and kernels tell the simulated device
which bytes they touch, and the race detector says whether events and rendezvous order them.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
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
from ringattn.transport.device import StreamWorkHandle
from ringattn.transport.nccl.communicator import Communicator, PeerCall
from tests.schedules import schedule_params
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
here = threading.local()


def extent(x: Tensor) -> list[Range]:
    """From the first byte of a strided view to its last."""
    if not x.numel():
        return []
    last = sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))
    return [(x.data_ptr(), (last + 1) * x.element_size())]


def flat(place: PackedBuffer | LocalTensors) -> list[Range]:
    """The bytes of a packed buffer; nobody exchanges a local."""
    return extent(place.flat) if isinstance(place, PackedBuffer) else []


class Touching:
    """An engine that says what it reads and writes."""

    def __init__(self, inner: Any, gpu: SimDevice) -> None:
        self._inner, self._gpu = inner, gpu

    def __getattr__(self, other: str) -> Any:
        return getattr(self._inner, other)

    def attend(self, q: Tensor, kv: KV, *rest: Any) -> None:
        self._gpu.touch(reads=[*extent(kv.k), *extent(kv.v)], label="attend")
        self._inner.attend(q, kv, *rest)

    def attend_grad(self, q: Tensor, kv: KV, seed: Any, dq: Any, dkv: Any, work: Any, result: Any = None) -> None:
        sums = [*extent((dkv or result).k), *extent((dkv or result).v)]
        self._gpu.touch(reads=[*extent(kv.k), *extent(kv.v), *sums], writes=sums, label="attend_grad")
        self._inner.attend_grad(q, kv, seed, dq, dkv, work, result)


@pytest.fixture
def touching(monkeypatch: pytest.MonkeyPatch) -> None:
    """Packs, merges and zeros say what they touch too."""
    pack, add = ringattn.runtime.executor.pack, ringattn.runtime.executor.add

    def touched_pack(source: PackedBuffer | LocalTensors, into: PackedBuffer) -> None:
        here.gpu.touch(reads=flat(source), writes=flat(into), label="pack")
        pack(source, into)

    def touched_add(part: PackedBuffer, into: PackedBuffer | LocalTensors, first: bool) -> None:
        here.gpu.touch(reads=flat(part) + flat(into), writes=flat(into), label="add")
        add(part, into, first)

    monkeypatch.setattr(ringattn.runtime.executor, "pack", touched_pack)
    monkeypatch.setattr(ringattn.runtime.executor, "add", touched_add)


Passed = tuple[list[Outcome], SimWorld, list[Race]]


def passes(ranks: int, layout: str, schedule: str, timeout_s: float = 20.0) -> Passed:
    """Two calls, forward and backward, so that the second meets the slots of the first."""
    world = SimWorld(ranks)

    def body(ring: Ring) -> Any:
        here.gpu = ring.transport.gpu  # type: ignore[attr-defined]
        engine = Touching(PlainEngine(), here.gpu)
        ring.engine_for = lambda *_: engine  # type: ignore[method-assign, assignment, return-value]
        return [on_rank(ring, TRIALS[layout], layout, schedule, torch.float64) for _ in range(2)][1]

    outcomes = on_rings(world, body, ring={"engine": "plain", "poison": True}, timeout_s=timeout_s)
    return outcomes, world, find_races([world.trace[rank] for rank in range(ranks)])


def all_went_well(layout: str, outcomes: list[Outcome], world: SimWorld, races: list[Race]) -> bool:
    """Exact, and by no accident."""
    if world.violations or races or any(outcome.error for outcome in outcomes):
        return False
    found = joined([outcome.result for outcome in outcomes])
    return greatest_error(found, reference(TRIALS[layout], torch.float64)) <= 1e-10


@pytest.mark.usefixtures("touching")
@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("schedule", schedule_params(quick=["double_ring"]))
@pytest.mark.parametrize("layout", list(TRIALS))
def test_nothing_races(layout: str, schedule: str, ranks: int) -> None:
    outcomes, world, races = passes(ranks, layout, schedule)
    assert [str(race) for race in races[:3]] == [] and world.violations == []
    assert all_went_well(layout, outcomes, world, races)
    touched = [entry for entry in world.trace[0] if type(entry).__name__ == "Touch"]
    assert {entry.label for entry in touched} >= {"pack", "attend", "attend_grad", "add"}  # type: ignore[attr-defined]


# --- every way to break the order is caught --------------------------------------------------------------------------

Break = Callable[[pytest.MonkeyPatch], None]


def no_wait_for_arrival(patch: pytest.MonkeyPatch) -> None:
    """A dropped wait: work begins before the bytes are there."""
    patch.setattr(StreamWorkHandle, "wait", lambda self: setattr(self, "waited", True))


def no_wait_for_compute(patch: pytest.MonkeyPatch) -> None:
    """The other dropped wait: an exchange begins before its slots are packed and free."""
    wait = SimStream.wait_event
    patch.setattr(SimStream, "wait_event", lambda self, event: wait(self, event) if self.name == "compute" else None)


def swapped_slots(patch: pytest.MonkeyPatch) -> None:
    """Two slots that live together lie in one place."""
    plan_of = ringattn.runtime.runtime.plan_of

    def swapped(*facts: Any) -> Plan:
        plan = plan_of(*facts)
        first, second = next(
            (a, b)
            for a in plan.buffers
            for b in plan.buffers
            if a is not b and a.first <= b.last and b.first <= a.last and a.offset_bytes != b.offset_bytes
        )
        moved = second._replace(offset_bytes=first.offset_bytes)
        return replace(plan, buffers=tuple(moved if buffer is second else buffer for buffer in plan.buffers))

    patch.setattr(ringattn.runtime.runtime, "plan_of", swapped)


def ungrouped(patch: pytest.MonkeyPatch) -> None:
    """Sends and receives of a hop one by one."""
    patch.setattr(SimLibrary, "group_start", lambda self: 0)
    patch.setattr(SimLibrary, "group_end", lambda self: 0)


def reversed_on_one_rank(patch: pytest.MonkeyPatch) -> None:
    """Rank 1 issues its receives and sends of a hop, and its hops, in another order than its peers."""
    launch = Communicator.launch
    held: list[Any] = []

    def swapped(self: Communicator, calls: Any, stream: int, watch: Any) -> None:
        if self.rank != 1 or len(calls) < 2 or "warm" in held:
            return launch(self, calls, stream, watch)
        held.append((calls, stream))
        if len(held) == 2:
            (first, _), (second, _) = held
            held[:] = ["warm"]
            launch(self, second, stream, watch)
            launch(self, first, stream, watch)
        return None

    patch.setattr(Communicator, "launch", swapped)


def wrong_count_on_one_rank(patch: pytest.MonkeyPatch) -> None:
    """Rank 1 receives eight bytes less than are sent."""
    launch = Communicator.launch

    def short(self: Communicator, calls: Any, stream: int, watch: Any) -> None:
        if self.rank == 1:
            calls = [
                c if c.sends or c.nbytes < 64 else PeerCall(c.sends, c.pointer, c.nbytes - 8, c.peer) for c in calls
            ]
        launch(self, calls, stream, watch)

    patch.setattr(Communicator, "launch", short)


BREAKS: list[Break] = [
    no_wait_for_arrival, no_wait_for_compute, swapped_slots, ungrouped, reversed_on_one_rank, wrong_count_on_one_rank,
]  # fmt: skip


@contextmanager
def broken(how: Break) -> Iterator[None]:
    """Inside, the order is broken."""
    with pytest.MonkeyPatch.context() as patch:
        how(patch)
        yield


@pytest.mark.usefixtures("touching")
@pytest.mark.parametrize("how", BREAKS, ids=lambda how: how.__name__)
def test_a_broken_order_is_caught(how: Break) -> None:
    assert all_went_well("zigzag", *passes(3, "zigzag", "ring"))
    with broken(how):
        assert not all_went_well("zigzag", *passes(3, "zigzag", "ring", timeout_s=1.0))


@pytest.mark.usefixtures("touching")
@pytest.mark.parametrize("how", [no_wait_for_arrival, no_wait_for_compute, swapped_slots], ids=lambda how: how.__name__)
def test_what_may_go_well_by_accident_is_a_race(how: Break) -> None:
    with broken(how):
        _, _, races = passes(3, "zigzag", "ring", timeout_s=1.0)
    assert races


def other_lengths() -> tuple[list[Outcome], SimWorld]:
    """Rank 1 asks for another length, so its messages have other sizes."""
    world = SimWorld(3)

    def body(ring: Ring) -> None:
        seq = ring.sequence(24 + 6 * (ring.rank == 1), layout="contiguous")
        q = torch.ones(1, seq.counts[ring.rank], 2, 8)
        ring.attention(q, q, q, seq, causal=True)
        ring.synchronize()

    return on_rings(world, body, timeout_s=1.0), world


def test_a_missing_digest_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    outcomes, world = other_lengths()
    assert world.violations == [] and all(isinstance(one.error, DisagreementError) for one in outcomes)
    monkeypatch.setattr(Ring, "check_consistency", lambda self, *_, **__: ComparedCall(0, False))
    outcomes, world = other_lengths()
    assert any("the bytes of both ends differ" in violation for violation in world.violations)
    assert not any(isinstance(one.error, DisagreementError) for one in outcomes)
