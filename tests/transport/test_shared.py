"""Shared memory between processes of one machine: segments, words, pages, descriptors, and the group that uses them."""

from __future__ import annotations

import gc
import os
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
from torch.distributed import HashStore

from ringattn.errors import (
    DeadlineError,
    DisagreementError,
    InputError,
    PeerLostError,
    RingError,
    UnsupportedError,
)
from ringattn.transport.base import Opening
from ringattn.transport.shared import group as group_module
from ringattn.transport.shared.group import ARENA, GREETING, GREETING_WORDS, NAME, Service, SharedGroup
from ringattn.transport.shared.page import (
    ARRIVAL,
    BELL,
    CLOSED,
    LOG_ENTRIES,
    POISON,
    VERSION,
    AtomicWords,
    Entry,
    Page,
    PlainWords,
    Segment,
    pause,
    wake,
    words_of,
)
from tests.transport.threads import on_each_rank


def mappings(name: str = "") -> int:
    """Count the segments of this name, or of all names, that this process maps."""
    with open("/proc/self/maps", encoding="utf-8") as maps:
        return sum(f"ringattn-{name}" in line for line in maps)


def descriptors() -> frozenset[tuple[str, str]]:
    """Return number and file of each open descriptor. Descriptors that earlier tests left may close at any time."""
    descriptors = set()
    for number in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):  # the listing's own descriptor, and those that are closing now
            descriptors.add((number, os.readlink(f"/proc/self/fd/{number}")))
    return frozenset(descriptors)


def segments(name: str = "") -> int:
    """Count the segments of this name, or of all names, whose descriptors this process holds."""
    return sum(f"ringattn-{name}" in file for _, file in descriptors())


# --- segments and words ----------------------------------------------------------------------------------------------


def test_a_segment_is_shared_and_cannot_change_its_size() -> None:
    segment = Segment.create("sized", 5000)
    assert segment.fd is not None and segment.nbytes == 8192
    assert not os.get_inheritable(segment.fd)
    with pytest.raises(PermissionError):
        os.ftruncate(segment.fd, 4096)
    attached = Segment.attach(os.dup(segment.fd))
    segment.buffer()[4999] = 7
    assert attached.buffer()[4999] == 7 and attached.nbytes == 8192


def test_a_segment_that_could_shrink_is_refused() -> None:
    before, fd = descriptors(), os.memfd_create("ringattn-open", os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, 4096)
    with pytest.raises(InputError, match="seals"):
        Segment.attach(fd)
    assert descriptors() <= before


def test_a_segment_lives_as_long_as_its_views() -> None:
    view = memoryview(Segment.create("brief", 1 << 16).buffer()).cast("B")
    assert (segments("brief"), mappings("brief")) == (1, 1)
    assert view[-1] == 0
    del view
    gc.collect()
    assert (segments("brief"), mappings("brief")) == (0, 0)


@pytest.mark.parametrize("kind", [PlainWords, AtomicWords])
def test_words_keep_all_their_bits(kind: type[PlainWords] | type[AtomicWords]) -> None:
    words = kind(Segment.create("words", 4096))
    for index, value in ((0, 1), (7, 2**64 - 1), (511, 2**63 + 5)):
        words.store(index, value)
        assert words.load(index) == value


def test_an_unknown_processor_is_refused_by_name() -> None:
    with pytest.raises(UnsupportedError, match="not riscv64"):
        words_of(Segment.create("words", 4096), "riscv64")


def test_a_pause_ends_when_the_word_changes_and_not_later_than_a_slice() -> None:
    page = Page(Segment.create("page", Page.size(1)), range(1))
    index, ended = page.index(BELL), []

    def wait() -> None:
        pause(page.words, index, page.bell_address, 0, time.monotonic() + 30.0)
        ended.append(page.load(BELL))

    start = time.monotonic()
    wait()
    assert ended == [0] and time.monotonic() - start < 5.0  # the pause ended after a slice
    page.store(BELL, 9)
    wait()
    assert ended == [0, 9]
    # `wake` ends a pause early. Without it, each of the 100 pauses would take a whole time slice.
    start = time.monotonic()
    for n in range(9, 109):
        thread = threading.Thread(target=lambda n=n: (page.store(BELL, n + 1), wake(page.bell_address)))
        thread.start()
        while page.load(BELL) == n:
            pause(page.words, index, page.bell_address, n, time.monotonic() + 30.0)
        thread.join()
    assert time.monotonic() - start < 1.5


def test_a_rank_that_fails_after_an_all_gather_does_not_fail_it_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    # Rank 1 rings rank 0, and before it rings rank 2, rank 0 completes the all-gather and reports a failure to rank 2.
    ring, slow = SharedGroup.ring, False
    failed, refused = threading.Event(), threading.Event()

    def rings(group: SharedGroup, rank: int) -> None:
        ring(group, rank)
        if slow and (group.rank, rank) == (1, 0):
            failed.wait(10.0)
            refused.wait(0.5)

    def body(group: SharedGroup) -> list[bytes]:
        nonlocal slow
        gathered(group)
        slow = True
        try:
            return gathered(group, bytes([group.rank]))
        except PeerLostError:
            refused.set()
            raise
        finally:
            if group.rank == 0:
                group.fail(ValueError("after the all-gather"))
                failed.set()

    monkeypatch.setattr(SharedGroup, "ring", rings)
    parts = [bytes([rank]) for rank in range(3)]
    assert on_ranks(body) == dict.fromkeys(range(3), parts)


# --- pages -----------------------------------------------------------------------------------------------------------


def test_words_of_a_page_do_not_overlap() -> None:
    page = Page(Segment.create("page", Page.size(3)), range(3))
    names = [(word, 0) for word in range(1, 6)] + [(word, rank) for word in range(6, 10) for rank in range(3)]
    for n, (word, rank) in enumerate(names):
        page.store(word, n + 1, rank)
    page.write_cause(7, "why" * 5000)
    page.write_part(1, b"\xff" * 16384)
    for sends in (False, True):
        for peer in range(3):
            for number in range(1, LOG_ENTRIES + 1):
                page.log(sends, peer).write(number, Entry(number, peer, 2**40, 5, "torch.int8", "x" * 500).packed())
    assert [page.load(word, rank) for word, rank in names] == list(range(1, len(names) + 1))
    assert {page.index(word, rank) * 8 % 128 for word, rank in names} == {0}
    page.write_beat(3, "ü" * 500)
    with pytest.raises(ValueError, match="does not fit"):
        page.write_beat(4, "ü" * 512)
    assert page.beat == "ü" * 500 and page.cause[0] == 7 and page.cause[1].startswith("whywhy")
    assert page.read_part(1, 16384) == b"\xff" * 16384 and page.read_part(0, 4) == bytes(4)
    assert page.log(True, 2).read(64) == Entry(64, 2, 2**40, 5, "torch.int8", "x" * 198)


def test_a_log_keeps_only_the_last_messages() -> None:
    log = Page(Segment.create("page", Page.size(2)), range(2)).log(True, 1)
    assert log.read(1) is None
    for number in range(1, 2 * LOG_ENTRIES):
        log.write(number, Entry(number, 1, 2, 3, "torch.float32", f"KV{number}").packed())
    assert log.read(LOG_ENTRIES - 1) is None and log.read(2 * LOG_ENTRIES) is None
    assert log.read(LOG_ENTRIES) == Entry(LOG_ENTRIES, 1, 2, 3, "torch.float32", f"KV{LOG_ENTRIES}")


# --- descriptors -----------------------------------------------------------------------------------------------------


@pytest.fixture
def served() -> Any:
    """Start a service that shares one segment, and a thread that answers its requests."""
    service, segment, stop = Service(0), Segment.create("shared", 4096), threading.Event()
    service.share(segment)

    def run_service() -> None:
        while not stop.is_set():
            service.round(0.1)

    thread = threading.Thread(target=run_service)
    thread.start()
    yield service
    stop.set()
    service.wake()
    thread.join()
    service.close()
    del segment


def test_a_pulled_descriptor_is_closed_by_exec(served: Service) -> None:
    caller = Service(1)
    caller.connect(0, served.name, served.nonce, time.monotonic() + 5.0)
    fd = caller.pull(0, 0, time.monotonic() + 5.0)
    assert os.fstat(fd).st_size == 4096 and not os.get_inheritable(fd)
    os.close(fd)
    with pytest.raises(PeerLostError, match="rank 0 no longer shares its arena 5"):
        caller.pull(0, 5, time.monotonic() + 5.0)
    caller.close()


def test_a_caller_without_the_nonce_of_the_ring_is_refused(served: Service) -> None:
    stranger = Service(1)
    stranger.connect(0, served.name, bytes(16), time.monotonic() + 5.0)
    with pytest.raises(ConnectionError):
        stranger.pull(0, 0, time.monotonic() + 5.0)
    stranger.close()
    # A caller that sends a request before its greeting is refused too.
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as client:
        client.settimeout(5.0)
        client.connect(NAME + served.name)
        client.send(ARENA.pack(0))
        assert client.recv(16) == b""


def test_another_user_is_refused(served: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(group_module, "_user_of", lambda end: os.getuid() + 1)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as client:
        client.settimeout(5.0)
        client.connect(NAME + served.name)
        try:
            client.send(GREETING.pack(GREETING_WORDS, served.nonce, 1))
            client.send(ARENA.pack(0))
            assert client.recv(16) == b""
        except ConnectionError:
            pass  # the listener closed the connection before the request
    with pytest.raises(RingError, match=f"rank 0's socket belongs to user {os.getuid() + 1}"):
        Service(2).connect(0, served.name, served.nonce, time.monotonic() + 5.0)


def on_ranks(body: Callable[[SharedGroup], Any], world_size: int = 3, timeout_s: float = 10.0) -> dict[int, Any]:
    """Run `body(group)` on each rank of a group of threads. Return its result, or the error that it raised, by rank."""
    store = HashStore()

    def run_rank(rank: int) -> Any:
        group = SharedGroup.open(Opening(store, rank, world_size, timeout_s, interface=None))
        try:
            return body(group)
        finally:
            group.leave()

    return dict(enumerate(on_each_rank(world_size, run_rank)))


def gathered(group: SharedGroup, payload: bytes = b"") -> list[bytes]:
    where = f"rank {group.rank} in all-gather"
    return group.all_gather(payload, lambda: None, lambda: where, time.monotonic() + group.timeout_s)


def gather_until_failure(group: SharedGroup) -> None:
    """Repeat an all-gather until it raises."""
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
            if rank == 1 and threading.current_thread().name == "rank 1"
            else header(rank, size, nonce)
        ),
    )
    create = Segment.create

    def create_and_name_thread(name: str, nbytes: int) -> Segment:
        threading.current_thread().name = "rank 1" if name == "page-1" else "another rank"
        return create(name, nbytes)

    monkeypatch.setattr(group_module.Segment, "create", create_and_name_thread)
    results = on_ranks(lambda group: None)
    assert {type(error) for error in results.values()} == {UnsupportedError}
    assert all("the page of rank 1" in str(error) and "version" in str(error) for error in results.values())


def test_all_ranks_report_the_first_cause_if_several_fail() -> None:
    def body(group: SharedGroup) -> str:
        gathered(group)
        if group.rank == 1:
            group.fail(ValueError("first"))
            group.fail(KeyError("of the same rank"))
        if group.rank == 2:
            while not group.own_page.load(POISON, 1):
                time.sleep(0.01)
            group.fail(KeyError("second"))
        with pytest.raises(PeerLostError) as caught:
            gather_until_failure(group)
        return str(caught.value)

    for text in on_ranks(body).values():
        assert "rank 1 failed first: ValueError: first" in text and "second" not in text


def test_the_earlier_of_two_independent_causes_is_reported() -> None:
    def body(group: SharedGroup) -> str | None:
        gathered(group)
        if group.rank < 2:  # rank 0 fails before rank 1, and may report its failure later
            group.own_page.write_cause(100 + group.rank, f"rank {group.rank} failed first: independent")
            for page in group.pages.values():
                page.store(POISON, 1 + group.rank, group.rank)
        while not (group.own_page.load(POISON, 0) and group.own_page.load(POISON, 1)):
            time.sleep(0.01)
        return group.trouble()

    assert set(on_ranks(body).values()) == {"rank 0 failed first: independent"}


def test_a_disagreement_is_raised_as_such_on_all_ranks() -> None:
    over = threading.Barrier(3)

    def body(group: SharedGroup) -> type:
        gathered(group)
        if group.rank == 0:
            group.fail(DisagreementError("two ends differ"))
        with pytest.raises(RingError, match="two ends differ") as caught:
            gather_until_failure(group)
        over.wait(10.0)  # no rank closes before all have seen the failure
        return caught.type

    assert set(on_ranks(body).values()) == {DisagreementError}


def test_a_closed_rank_fails_only_waits_for_it() -> None:
    def body(group: SharedGroup) -> str:
        gathered(group)
        if group.rank == 1:
            return ""
        peer = 2 - group.rank
        while not group.own_page.load(CLOSED, 1):
            time.sleep(0.01)
        group.tell(peer, ARRIVAL, 5)
        until = time.monotonic() + 5.0
        group.hold(lambda: group.own_page.load(ARRIVAL, peer) == 5, lambda: [peer], lambda: "waits", until)
        with pytest.raises(PeerLostError) as caught:
            group.hold(lambda: False, lambda: [1], lambda: "waits", until)
        return str(caught.value)

    results = on_ranks(body)
    assert results[0] == results[2] == "waits: rank 1 closed its ring"


def test_a_word_that_arrived_before_its_sender_closed_is_seen() -> None:
    # The waiting rank checks its condition. Then the word arrives and its sender closes, before the rank checks again.
    def body(group: SharedGroup) -> int:
        gathered(group)
        if group.rank == 1:
            checked.wait(10.0)
            group.tell(0, ARRIVAL, 5)
            return 0
        checks = 0

        def ready() -> bool:
            nonlocal checks
            checks += 1
            if checks > 1:
                return group.own_page.load(ARRIVAL, 1) == 5
            checked.set()
            while not group.own_page.load(CLOSED, 1):
                time.sleep(0.01)
            return False

        if group.rank == 0:
            group.hold(ready, lambda: [1], lambda: "waits", time.monotonic() + 10.0)
        return checks

    checked = threading.Event()
    assert on_ranks(body) == {0: 2, 1: 0, 2: 0}


def stop(group: SharedGroup) -> None:
    """End all threads of this rank, as if its process were stopped."""
    group._left = True
    group._service.wake()
    group.health._stopped.set()
    for thread in (group._thread, group.health._thread):
        assert thread is not None
        thread.join()


def test_a_deadline_names_only_the_silent_rank() -> None:
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


def test_a_stopped_rank_that_answers_no_pull_is_silent_and_not_gone() -> None:
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
    outcome = on_ranks(body, world_size=2)[0]
    assert outcome.startswith("recv 'kv': no answer from ranks [1] within 10 s") and "gone (" not in outcome
    assert "rank 1 is silent (stopped, stuck, gone or out of reach), last heard in 'opening'" in outcome
