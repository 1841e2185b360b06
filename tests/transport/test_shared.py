"""What ranks of one machine share: segments, words, pages, descriptors, and the group that meets through them."""

from __future__ import annotations

import gc
import os
import socket
import threading
import time
from contextlib import suppress
from typing import Any

import pytest

from ringattn.errors import (
    InputError,
    PeerLostError,
    RingError,
    UnsupportedError,
)
from ringattn.transport.shared import group as group_module
from ringattn.transport.shared.group import ARENA, GREETING, GREETING_WORDS, NAME, Service
from ringattn.transport.shared.page import (
    BELL,
    LOG_ENTRIES,
    AtomicWords,
    Entry,
    Page,
    PlainWords,
    Segment,
    pause,
    wake,
    words_of,
)


def mappings() -> int:
    """Ringattn's segments that this process maps."""
    with open("/proc/self/maps", encoding="utf-8") as maps:
        return sum("ringattn-" in line for line in maps)


def descriptors() -> frozenset[tuple[str, str]]:
    """Number and file of each open descriptor; those that earlier tests left may close at any time."""
    found = set()
    for number in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):  # the listing's own, and what closes just now
            found.add((number, os.readlink(f"/proc/self/fd/{number}")))
    return frozenset(found)


def segments() -> int:
    """Ringattn's segments whose descriptors this process holds."""
    return sum("ringattn-" in file for _, file in descriptors())


# --- segments and words ----------------------------------------------------------------------------------------------


def test_a_segment_is_seen_by_who_attaches_it_and_cannot_change_its_size() -> None:
    segment = Segment.create("one", 5000)
    assert segment.fd is not None and segment.nbytes == 8192
    assert not os.get_inheritable(segment.fd)
    with pytest.raises(PermissionError):
        os.ftruncate(segment.fd, 4096)
    other = Segment.attach(os.dup(segment.fd))
    segment.buffer()[4999] = 7
    assert other.buffer()[4999] == 7 and other.nbytes == 8192


def test_a_segment_that_could_shrink_is_refused() -> None:
    before, fd = descriptors(), os.memfd_create("ringattn-open", os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, 4096)
    with pytest.raises(InputError, match="seals"):
        Segment.attach(fd)
    assert descriptors() <= before


def test_a_segment_lives_as_long_as_what_was_made_of_it() -> None:
    gc.collect()  # what earlier tests left
    before = segments(), mappings()
    view = memoryview(Segment.create("brief", 1 << 16).buffer()).cast("B")
    assert (segments(), mappings()) == (before[0] + 1, before[1] + 1)
    assert view[-1] == 0
    del view
    gc.collect()
    assert (segments(), mappings()) == before


@pytest.mark.parametrize("kind", [PlainWords, AtomicWords])
def test_words_keep_all_their_bits(kind: type[PlainWords] | type[AtomicWords]) -> None:
    words = kind(Segment.create("words", 4096))
    for index, value in ((0, 1), (7, 2**64 - 1), (511, 2**63 + 5)):
        words.store(index, value)
        assert words.load(index) == value


def test_an_unknown_processor_is_refused_by_name() -> None:
    with pytest.raises(UnsupportedError, match="not for riscv64"):
        words_of(Segment.create("words", 4096), "riscv64")


def test_a_pause_ends_when_the_word_changes_and_not_later_than_a_slice() -> None:
    page = Page(Segment.create("page", Page.size(1)), range(1))
    index, ended = page.index(BELL), []

    def wait() -> None:
        pause(page.words, index, page.bell_address, 0, time.monotonic() + 30.0)
        ended.append(page.load(BELL))

    start = time.monotonic()
    wait()
    assert ended == [0] and time.monotonic() - start < 5.0  # a slice
    page.store(BELL, 9)
    wait()
    assert ended == [0, 9]
    # Who sleeps is woken: many slices would be long, so most of these end by the call.
    start = time.monotonic()
    for n in range(9, 109):
        thread = threading.Thread(target=lambda n=n: (page.store(BELL, n + 1), wake(page.bell_address)))
        thread.start()
        while page.load(BELL) == n:
            pause(page.words, index, page.bell_address, n, time.monotonic() + 30.0)
        thread.join()
    assert time.monotonic() - start < 1.5


# --- pages -----------------------------------------------------------------------------------------------------------


def test_words_of_a_page_do_not_overlap() -> None:
    page = Page(Segment.create("page", Page.size(3)), range(3))
    names = [(word, 0) for word in range(1, 5)] + [(word, rank) for word in range(5, 10) for rank in range(3)]
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
    with pytest.raises(ValueError, match="no room"):
        page.write_beat(4, "ü" * 512)
    assert page.beat == "ü" * 500 and page.cause[0] == 7 and page.cause[1].startswith("whywhy")
    assert page.read_part(1, 16384) == b"\xff" * 16384 and page.read_part(0, 4) == bytes(4)
    assert page.log(True, 2).read(64) == Entry(64, 2, 2**40, 5, "torch.int8", "x" * 198)


def test_a_log_knows_the_last_messages_and_no_others() -> None:
    log = Page(Segment.create("page", Page.size(2)), range(2)).log(True, 1)
    assert log.read(1) is None
    for number in range(1, 2 * LOG_ENTRIES):
        log.write(number, Entry(number, 1, 2, 3, "torch.float32", f"KV{number}").packed())
    assert log.read(LOG_ENTRIES - 1) is None and log.read(2 * LOG_ENTRIES) is None
    assert log.read(LOG_ENTRIES) == Entry(LOG_ENTRIES, 1, 2, 3, "torch.float32", f"KV{LOG_ENTRIES}")


# --- descriptors -----------------------------------------------------------------------------------------------------


@pytest.fixture
def served() -> Any:
    """A service that hands out one segment, and a thread that serves."""
    service, segment, stop = Service(0), Segment.create("shared", 4096), threading.Event()
    service.share(segment)

    def live() -> None:
        while not stop.is_set():
            service.round(0.1)

    thread = threading.Thread(target=live)
    thread.start()
    yield service
    stop.set()
    service.wake()
    thread.join()
    service.close()
    del segment


def test_a_descriptor_is_pulled_and_does_not_outlive_an_exec(served: Service) -> None:
    caller = Service(1)
    caller.connect(0, served.name, served.nonce, time.monotonic() + 5.0)
    fd = caller.pull(0, 0, time.monotonic() + 5.0)
    assert os.fstat(fd).st_size == 4096 and not os.get_inheritable(fd)
    os.close(fd)
    with pytest.raises(PeerLostError, match="rank 0 shares its arena 5 no more"):
        caller.pull(0, 5, time.monotonic() + 5.0)
    caller.close()


def test_a_caller_that_does_not_know_the_ring_is_turned_away(served: Service) -> None:
    stranger = Service(1)
    stranger.connect(0, served.name, bytes(16), time.monotonic() + 5.0)
    with pytest.raises(ConnectionError):
        stranger.pull(0, 0, time.monotonic() + 5.0)
    stranger.close()
    # One that asks before it greets.
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as rude:
        rude.settimeout(5.0)
        rude.connect(NAME + served.name)
        rude.send(ARENA.pack(0))
        assert rude.recv(16) == b""


def test_another_user_is_turned_away(served: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(group_module, "_user_of", lambda end: os.getuid() + 1)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as other:
        other.settimeout(5.0)
        other.connect(NAME + served.name)
        try:
            other.send(GREETING.pack(GREETING_WORDS, served.nonce, 1))
            other.send(ARENA.pack(0))
            assert other.recv(16) == b""
        except ConnectionError:
            pass  # hung up on before it could ask
    with pytest.raises(RingError, match=f"rank 0's socket belongs to user {os.getuid() + 1}"):
        Service(2).connect(0, served.name, served.nonce, time.monotonic() + 5.0)
