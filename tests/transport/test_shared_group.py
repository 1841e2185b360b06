"""The group that meets through shared pages: opening, first causes, agreement, silence; nothing is left afterwards."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
from torch.distributed import HashStore

from ringattn.errors import DeadlineError, DisagreementError, PeerLostError, RingError, UnsupportedError
from ringattn.transport.control_store import ControlStore
from ringattn.transport.shared import group as group_module
from ringattn.transport.shared.group import SharedGroup
from ringattn.transport.shared.page import ARRIVAL, CLOSED, POISON, VERSION, Segment
from tests.transport.test_shared import descriptors, mappings


def on_ranks(body: Callable[[SharedGroup], Any], world_size: int = 3, timeout_s: float = 10.0) -> dict[int, Any]:
    """What `body(group)` returns or raises on each rank of a group of threads."""
    store, results = HashStore(), {}

    def live(rank: int) -> None:
        try:
            group = SharedGroup.open(ControlStore(store, rank, world_size), rank, world_size, timeout_s)
            try:
                results[rank] = body(group)
            finally:
                group.leave()
        except Exception as error:
            results[rank] = error

    threads = [threading.Thread(target=live, args=(rank,)) for rank in range(world_size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30.0)
    assert sorted(results) == list(range(world_size))
    return results


def gathered(group: SharedGroup, payload: bytes = b"") -> list[bytes]:
    where = f"rank {group.rank} in all-gather"
    return group.all_gather(payload, lambda: None, lambda: where, time.monotonic() + group.timeout_s)


def gather_on(group: SharedGroup) -> None:
    """Until it raises."""
    while True:
        gathered(group)


def test_an_all_gather_takes_any_length() -> None:
    def body(group: SharedGroup) -> bool:
        sizes = (0, 5, 16375, 16376, 16377, 40000)
        return all(
            gathered(group, bytes([group.rank]) * (size * group.rank + 1))
            == [bytes([rank]) * (size * rank + 1) for rank in range(3)]
            for size in sizes
        )

    assert on_ranks(body) == {0: True, 1: True, 2: True}


def test_opening_is_refused_on_all_ranks_with_the_failing_step(monkeypatch: pytest.MonkeyPatch) -> None:
    create = Segment.create

    def fails_once(name: str, nbytes: int) -> Segment:
        if name == "page-1":
            raise OSError(38, "Function not implemented", "memfd_create")
        return create(name, nbytes)

    gc.collect()
    before = descriptors()
    monkeypatch.setattr(group_module.Segment, "create", fails_once)
    results = on_ranks(lambda group: None)
    assert {type(error) for error in results.values()} == {UnsupportedError}
    texts = {str(error) for error in results.values()}
    assert len(texts) == 1 and "rank 1: OSError" in texts.copy().pop() and "transport='gloo'" in texts.copy().pop()
    assert "memfd_create" in texts.pop()
    del results
    gc.collect()
    assert descriptors() <= before


def test_a_page_of_another_version_is_refused_on_all_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    header = group_module._header
    monkeypatch.setattr(
        group_module,
        "_header",
        lambda rank, size, nonce: (
            header(rank, size, nonce)._replace(version=VERSION + 1)
            if rank == 1 and threading.current_thread().name == "one"
            else header(rank, size, nonce)
        ),
    )
    create = Segment.create

    def named(name: str, nbytes: int) -> Segment:
        threading.current_thread().name = "one" if name == "page-1" else "other"
        return create(name, nbytes)

    monkeypatch.setattr(group_module.Segment, "create", named)
    results = on_ranks(lambda group: None)
    assert {type(error) for error in results.values()} == {UnsupportedError}
    assert all("the page of rank 1" in str(error) and "version" in str(error) for error in results.values())


def test_who_does_not_open_is_named() -> None:
    store = HashStore()
    with pytest.raises(DeadlineError, match=r"\[1\]"):
        SharedGroup.open(ControlStore(store, 0, 2), 0, 2, 0.3)


def test_the_first_cause_is_told_by_all_however_many_fail() -> None:
    through = threading.Barrier(3)  # no rank fails while another is still in this gathering

    def body(group: SharedGroup) -> str:
        gathered(group)
        through.wait(10.0)
        if group.rank == 1:
            group.fail(ValueError("first"))
            group.fail(KeyError("of the same rank"))
        if group.rank == 2:
            while not group.own.load(POISON, 1):
                time.sleep(0.01)
            group.fail(KeyError("second"))
        with pytest.raises(PeerLostError) as caught:
            gather_on(group)
        return str(caught.value)

    for text in on_ranks(body).values():
        assert "rank 1 failed first: ValueError: first" in text and "second" not in text


def test_of_two_independent_causes_the_earlier_is_told() -> None:
    def body(group: SharedGroup) -> str | None:
        gathered(group)
        if group.rank < 2:  # rank 0 finds its reason earlier, and tells it later
            group.own.write_cause(100 + group.rank, f"rank {group.rank} failed first: of its own")
            for page in group.pages.values():
                page.store(POISON, 1 + group.rank, group.rank)
        while not (group.own.load(POISON, 0) and group.own.load(POISON, 1)):
            time.sleep(0.01)
        return group.trouble()

    assert set(on_ranks(body).values()) == {"rank 0 failed first: of its own"}


def test_a_disagreement_is_one_on_all_ranks() -> None:
    through = threading.Barrier(3)  # no rank fails while another is still in this gathering

    def body(group: SharedGroup) -> type:
        gathered(group)
        through.wait(10.0)
        if group.rank == 0:
            group.fail(DisagreementError("two ends differ"))
        with pytest.raises(RingError, match="two ends differ") as caught:
            gather_on(group)
        return caught.type

    assert set(on_ranks(body).values()) == {DisagreementError}


def test_who_closed_matters_only_to_who_waits_for_it() -> None:
    def body(group: SharedGroup) -> str:
        gathered(group)
        if group.rank == 1:
            return ""
        other = 2 - group.rank
        while not group.own.load(CLOSED, 1):
            time.sleep(0.01)
        group.tell(other, ARRIVAL, 5)
        until = time.monotonic() + 5.0
        group.hold(lambda: group.own.load(ARRIVAL, other) == 5, lambda: [other], lambda: "waits", until)
        with pytest.raises(PeerLostError) as caught:
            group.hold(lambda: False, lambda: [1], lambda: "waits", until)
        return str(caught.value)

    results = on_ranks(body)
    assert results[0] == results[2] == "waits: rank 1 closed its ring"


def test_what_came_before_a_rank_closed_is_found() -> None:
    # Looked for, then it comes, then its sender closes: all before the one who waits looks why it was rung.
    def body(group: SharedGroup) -> int:
        gathered(group)
        if group.rank == 1:
            looked.wait(10.0)
            group.tell(0, ARRIVAL, 5)
            return 0
        looks = 0

        def ready() -> bool:
            nonlocal looks
            looks += 1
            if looks > 1:
                return group.own.load(ARRIVAL, 1) == 5
            looked.set()
            while not group.own.load(CLOSED, 1):
                time.sleep(0.01)
            return False

        if group.rank == 0:
            group.hold(ready, lambda: [1], lambda: "waits", time.monotonic() + 10.0)
        return looks

    looked = threading.Event()
    assert on_ranks(body) == {0: 2, 1: 0, 2: 0}


def stop(group: SharedGroup) -> None:
    """End all threads of this rank, as those of a process that is stopped."""
    group._left = True
    group._service.wake()
    group.health._stopped.set()
    for thread in (group._thread, group.health._thread):
        assert thread is not None
        thread.join()


def test_a_deadline_names_who_is_silent_and_who_is_not() -> None:
    quiet = threading.Event()

    def body(group: SharedGroup) -> str:
        if group.rank == 1:
            gathered(group)
            stop(group)
            quiet.wait(20.0)
            return ""
        gathered(group)
        try:
            with pytest.raises(DeadlineError) as caught:
                group.hold(lambda: False, lambda: [2 - group.rank], lambda: "waits", time.monotonic() + 0.2)
            gate.wait()
        finally:
            quiet.set()
        return str(caught.value)

    gate = threading.Barrier(2)
    results = on_ranks(body)
    for rank in (0, 2):
        assert f"no answer from ranks [{2 - rank}]" in results[rank]
        assert "rank 1 is silent (stopped, stuck, gone or out of reach), last heard in 'opening'" in results[rank]
        assert f"rank {2 - rank} is silent" not in results[rank]


def test_a_stopped_rank_that_hands_nothing_out_is_silent_and_not_gone() -> None:
    quiet = threading.Event()

    def body(group: SharedGroup) -> str:
        gathered(group)
        if group.rank == 1:
            stop(group)
            stopped.set()
            quiet.wait(20.0)
            return ""
        stopped.wait(20.0)
        with pytest.raises(DeadlineError) as caught:
            group.pull(1, 0, time.monotonic() + 0.2, lambda: "recv 'kv'")
        quiet.set()
        return str(caught.value)

    stopped = threading.Event()
    told = on_ranks(body, world_size=2)[0]
    assert told.startswith("recv 'kv': no answer from ranks [1] within 10 s") and "gone (" not in told
    assert "rank 1 is silent (stopped, stuck, gone or out of reach), last heard in 'opening'" in told


def test_groups_leave_no_descriptor_and_no_mapping() -> None:
    on_ranks(gathered)
    gc.collect()
    before, mapped = descriptors(), mappings()
    for _ in range(5):
        assert on_ranks(gathered)[0] == [b""] * 3
    gc.collect()
    assert descriptors() <= before and mappings() <= mapped
