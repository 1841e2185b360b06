"""The peer transport ends in the order that the model has proved: `peer_model/endings.py`, on the real classes."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest

from ringattn.errors import RingError
from ringattn.observe.flight import FAILED, Flight, FlightRecord
from ringattn.transport.peer.driver import DriverError
from ringattn.transport.peer.lane import Lane
from ringattn.transport.peer.program import PAINTED, push_exchange
from ringattn.transport.peer.transport import PeerTransport, Watch
from tests.transport.peer_model.endings import ABORT, DRAIN, EndStep


class FakeEvent:
    """Passes at its `after`-th query once it is recorded."""

    def __init__(self, steps: list[EndStep], asked: EndStep | None = None, after: int = 0) -> None:
        self.recorded, self._steps, self._asked, self._left = False, steps, asked, after

    def record(self, stream: object) -> None:
        self.recorded = True

    def query(self) -> bool:
        if self._asked is not None:
            self._steps.append(self._asked)
        self._left -= self.recorded
        return not self.recorded or self._left < 0


class Rank:
    """A lane, its watch and its transport, whose group, GPU and driver only say what they were asked."""

    def __init__(self, driver: Any = None) -> None:
        self.steps: list[EndStep] = []
        words = SimpleNamespace(store=self._store, load=lambda word, peer=0: 0)
        page = SimpleNamespace(segment=SimpleNamespace(address=0, nbytes=64), load=lambda word, peer=0: 0)
        self.group: Any = SimpleNamespace(
            rank=0, ranks=(0, 1), own=words, pages={0: page, 1: page}, fail=self._poison, trouble=self._check
        )
        self.gpu: Any = SimpleNamespace(
            activate=lambda: None, new_stream=lambda: SimpleNamespace(cuda_stream=0, wait_event=lambda event: None),
            current_stream=lambda: None, new_event=lambda: FakeEvent(self.steps, EndStep.AWAIT_COMPUTED),
        )  # fmt: skip
        driver = driver or SimpleNamespace(attribute=lambda which: 0, register=lambda address, nbytes: 0)
        self.lane = Lane(driver, self.gpu, self.group, 1.0)
        self.lane.imports.drop = lambda: self.steps.append(EndStep.UNMAP)  # type: ignore[method-assign]
        self.watch = Watch(
            self.group, self.lane, self.gpu, FlightRecord(0, 2, "peer"), 1.0, None, lambda why: None
        )  # fmt: skip
        self.poisoning = threading.Event()
        self.poisoning.set()

    def _store(self, word: int, value: int, peer: int = 0) -> None:
        assert value == PAINTED
        self.steps.append(EndStep.PAINT)

    def _poison(self, error: BaseException) -> None:
        self.poisoning.wait(10.0)
        self.steps.append(EndStep.POISON)

    def _check(self, awaited: object = ()) -> None:
        self.steps.append(EndStep.CHECK)

    @property
    def order(self) -> list[EndStep]:
        """What was done, without what is done again at once."""
        return [step for n, step in enumerate(self.steps) if n == 0 or self.steps[n - 1] is not step]


def test_an_abort_poisons_then_paints_until_it_has_run_empty_then_unmaps() -> None:
    rank = Rank()
    rank.lane.newest = FakeEvent(rank.steps, after=3)
    rank.lane.newest.record(None)
    rank.watch.fail(RingError("broken"))
    assert rank.watch.ended.wait(5.0)
    assert rank.order == list(ABORT)
    # Two pages of two kinds of words, once and after each look that finds something under way.
    assert rank.steps.count(EndStep.PAINT) == 4 * (1 + 3)


def test_a_drain_checks_behind_what_was_computed() -> None:
    rank = Rank()
    done = FakeEvent(rank.steps, EndStep.AWAIT_DONE, after=2)
    done.record(None)
    rank.watch.handles.append(SimpleNamespace(done=done))  # type: ignore[arg-type]
    transport: Any = object.__new__(PeerTransport)
    transport.rank, transport.group, transport.gpu, transport.watch = 0, rank.group, rank.gpu, rank.watch
    transport.check, transport.order = lambda: None, SimpleNamespace(passed=lambda: True)
    transport.drain()
    assert rank.order == list(DRAIN)


def test_a_start_that_breaks_off_is_painted_until_what_it_enqueued_has_run() -> None:
    batches: list[object] = []

    def operate(operations: object, stream: int) -> None:
        batches.append(operations)
        if len(batches) == 2:
            raise DriverError("cuStreamBatchMemOp", 1, "CUDA_ERROR_INVALID_VALUE", "an argument is wrong")

    driver = SimpleNamespace(attribute=lambda which: 0, register=lambda address, nbytes: 0, operate=operate)
    rank = Rank(driver)
    program = push_exchange(0, [], [1])
    without_log = program.start[1:]
    hop: Any = SimpleNamespace(program=SimpleNamespace(start=without_log, counts=()), sends=[], recvs=[], unstaged=[])
    done = FakeEvent(rank.steps, after=2)
    rank.lane._operation = lambda op: op  # type: ignore[assignment,method-assign]
    with pytest.raises(DriverError):
        rank.lane.start(hop, FakeEvent(rank.steps), done, lambda: None)
    rank.watch.fail(RingError("broken"))
    assert rank.watch.ended.wait(5.0)
    assert done.recorded and rank.order == list(ABORT)
    assert rank.steps.count(EndStep.PAINT) == 4 * (1 + 2)


def test_no_caller_has_the_error_before_the_poison_is_everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Watch, "stop_s", 0.01)
    rank = Rank()
    rank.poisoning.clear()
    failing = threading.Thread(target=rank.watch.fail, args=(RingError("broken"),))
    told: list[list[EndStep]] = []

    def caller() -> None:
        with pytest.raises(RingError):
            rank.watch.raise_failure()
        told.append(list(rank.steps))

    failing.start()
    while not rank.watch._first.locked():
        pass
    calling = threading.Thread(target=caller)
    calling.start()
    calling.join(0.1)
    assert not told
    rank.poisoning.set()
    calling.join(10.0)
    failing.join(10.0)
    assert EndStep.POISON in told[0]


def started(rank: Rank) -> Any:
    """An exchange that has arrived, and that the caller has waited for."""
    done = FakeEvent([])
    done.record(None)
    handle = SimpleNamespace(
        ready=FakeEvent([]), done=done, waited=True, flight=Flight(0, 0, ()), release=lambda: None
    )  # fmt: skip
    rank.watch.handles.append(handle)  # type: ignore[arg-type]
    return handle


def test_what_had_not_arrived_at_the_failure_stays_failed_though_an_abort_lets_it_pass() -> None:
    rank = Rank()
    handle = started(rank)
    rank.watch.fail(RingError("broken"))
    assert rank.watch.ended.wait(5.0)
    rank.watch.tick()
    assert not rank.watch.handles and handle.flight.state == FAILED


def test_events_are_used_again_but_for_the_newest_which_says_whether_the_lane_is_empty() -> None:
    rank = Rank()
    older, newest = started(rank), started(rank)
    rank.lane.newest = newest.done
    rank.watch.tick()
    assert list(rank.watch.free) == [(older.ready, older.done)]
