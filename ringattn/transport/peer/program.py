"""An exchange by copy engines: its operations, the numbers of its messages, and the order of both.

An exchange is a value: a tuple of operations, built once when a hop is bound. The transport runs it, and the race model
of the tests explores it, so the tests verify the order that runs. Messages of an ordered pair of ranks are numbered
from 1 for the life of a ring. An operation stores only the index of its message within the exchange, `nth`, and
`PairNumbers` adds the number of earlier messages. This module does not import torch.

The sender's copy engine writes the receiver's buffer (push). The order is safe for the following reasons. For the k-th
message of a pair, each of the first three lists steps of which each happens before the next:
- The receiver never reads before the write: copy, fence of the store, arrival >= k, DONE, consumer.
- The sender never overwrites before the last read: last reader, READY, credit >= k, copy.
- The source is kept until it has been read: copy, DONE, caller.
- There is no deadlock: credits depend only on READY, copies on credits, arrivals on copies, and READY on earlier
  exchanges. So every wait is for a smaller (exchange, phase), even if all streams of a device share one hardware queue.
Therefore stores precede waits in each batch, data and flags never share a word, and the host waits for nothing between
the first operation it enqueues and the last. `tests/transport/peer_model` verifies this order, and that a violation of
any of these rules is detected.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

# --- operations ------------------------------------------------------------------------------------------------------


PAINTED = 1 << 62
"""The value an abort stores into a word to satisfy every wait on it. Message numbers never get that large.

It is not the largest word, because the device compares signed differences: to a wait for 1, 2^63 + 1 is less than 1.
"""
Pair = tuple[int, int]
"""The sending rank and the receiving rank."""


class WordKind(Enum):
    """The two kinds of words. One rank of the pair writes the word, the other rank waits for it."""

    CREDIT = "credit"
    """Written by the receiver: the last message it has a buffer for. The sender must not write a later one yet."""
    ARRIVAL = "arrival"
    """Written by the sender: the last message that is complete in the receiver's memory."""


class Stream(Enum):
    """A queue of the device."""

    CALLER = "caller"
    LANE = "lane"


class Event(Enum):
    """An event of one exchange."""

    READY = "ready"
    """The caller's stream has reached the start: the buffers may be sent from and received into."""
    DONE = "done"
    """Every message of the exchange has left and arrived."""


@dataclass(frozen=True, slots=True)
class Word:
    """A 64-bit word in the page of the rank that waits for it. Its only writer is the other rank of the pair."""

    kind: WordKind
    src: int
    dst: int

    @property
    def page(self) -> int:
        """The rank whose page holds the word."""
        # A rank waits only for words of its own page. So an abort can release all its waits by painting that page.
        return self.src if self.kind is WordKind.CREDIT else self.dst

    @property
    def writer(self) -> int:
        """The rank that writes the word. It is also the word's index among the words of that kind in the page."""
        return self.dst if self.kind is WordKind.CREDIT else self.src

    def __str__(self) -> str:
        return f"{self.kind.value}[{self.writer}] of rank {self.page}"


@dataclass(frozen=True, slots=True)
class Write:
    """A store of a message number into `word`: the number of the pair's `nth` message of this exchange.

    The store happens after all earlier steps have completed.
    """

    word: Word
    nth: int

    @property
    def pair(self) -> Pair:
        """The pair whose messages the number counts."""
        return self.word.src, self.word.dst


@dataclass(frozen=True, slots=True)
class Wait:
    """A wait until the word is at least the number of the pair's `nth` message of this exchange.

    The device compares cyclically: the signed difference must not be negative.
    """

    word: Word
    nth: int
    data: bool = False
    """Whether bytes are read after it. A device that must flush remote writes (attribute 98) does so here."""

    @property
    def pair(self) -> Pair:
        """The pair whose messages the number counts."""
        return self.word.src, self.word.dst


@dataclass(frozen=True, slots=True)
class Memops:
    """Stores and waits of the lane in one driver batch, which runs them in this order."""

    ops: tuple[Write | Wait, ...]


@dataclass(frozen=True, slots=True)
class _OfMessage:
    """A step for one message: `message` is its index among the sends or receives of the exchange."""

    message: int
    src: int
    dst: int
    nth: int

    @property
    def pair(self) -> Pair:
        """The pair that the message belongs to."""
        return self.src, self.dst


@dataclass(frozen=True, slots=True)
class Copy(_OfMessage):
    """A copy of the bytes of a message into the receiver's memory."""


@dataclass(frozen=True, slots=True)
class LogStart(_OfMessage):
    """A host step that publishes the start of a message in this rank's log, under the message's number.

    The entry says where the buffer is, and what the message contains. `FindBuffer` on the sender reads the entry.
    """

    sends: bool


@dataclass(frozen=True, slots=True)
class FindBuffer(_OfMessage):
    """A host step that looks up the receiver's buffer for a message, in the receiver's log of started messages.

    This is the only step in which the host waits for another rank: a receiver may start its bound messages in any
    order, so the sender waits until the receiver has logged the start of exactly this message number.
    """


@dataclass(frozen=True, slots=True)
class RecordEvent:
    """The record of an event, which completes when everything before it on its stream has completed."""

    event: Event
    stream: Stream


@dataclass(frozen=True, slots=True)
class WaitEvent:
    """A wait of a stream: everything after it on its stream runs after the event."""

    event: Event
    stream: Stream


Step = LogStart | FindBuffer | RecordEvent | WaitEvent | Memops | Copy


@dataclass(frozen=True, slots=True)
class Program:
    """One rank's part of one exchange: the steps of `start` and of `wait`, in this order."""

    rank: int
    start: tuple[Step, ...]
    wait: tuple[Step, ...]
    counts: tuple[tuple[Pair, int], ...]
    """The number of messages of each pair in the exchange."""


class PairNumbers:
    """The number of messages that one rank has started, for each ordered pair of ranks."""

    def __init__(self) -> None:
        # Both ranks of a pair count its messages in the same order, so they agree on each number without a message.
        self._started: defaultdict[Pair, int] = defaultdict(int)

    def of(self, step: Write | Wait | Copy | LogStart | FindBuffer) -> int:
        """Return the message number of a step of the exchange that is being started."""
        return self._started[step.pair] + step.nth

    def bases(self, program: Program) -> dict[Pair, int]:
        """Return, for each pair, the number to add to `nth` in this exchange. Later starts do not change the result."""
        return {pair: self._started[pair] for pair, _ in program.counts}

    def advance(self, program: Program) -> None:
        """Count the messages of an exchange that has started, so that the next one is numbered after it."""
        for pair, count in program.counts:
            self._started[pair] += count


class PairMessage(NamedTuple):
    """A message of an exchange: its index among the sends or receives, its pair, and its index within the pair."""

    message: int
    src: int
    dst: int
    nth: int


def sent(rank: int, peers: Sequence[int]) -> list[PairMessage]:
    """Return the messages that `rank` sends to these peers in one exchange."""
    count: Counter[int] = Counter()
    return [PairMessage(n, rank, dst, _next(count, dst)) for n, dst in enumerate(peers)]


def received(rank: int, peers: Sequence[int]) -> list[PairMessage]:
    """Return the messages that `rank` receives from these peers in one exchange."""
    count: Counter[int] = Counter()
    return [PairMessage(n, src, rank, _next(count, src)) for n, src in enumerate(peers)]


def last(messages: Sequence[PairMessage]) -> list[PairMessage]:
    """Return each pair's last message, in the order of the pairs' first messages.

    The number of the last message is enough: it covers all messages of the pair.
    """
    # Copies of one stream complete in order, so the last message of a pair implies all earlier messages.
    # A dict keeps each key where it was first inserted, with the value that was inserted last.
    return list({(message.src, message.dst): message for message in messages}.values())


def counted(*groups: Sequence[PairMessage]) -> tuple[tuple[Pair, int], ...]:
    """Return the number of messages of each pair."""
    return tuple(Counter((message.src, message.dst) for group in groups for message in group).items())


def _next(count: Counter[int], peer: int) -> int:
    count[peer] += 1
    return count[peer]


# --- the exchange ----------------------------------------------------------------------------------------------------


MAX_MEMOPS = 255
"""The most operations in one driver batch. The cut is made here, so that the model explores the batches that run."""


def push_exchange(rank: int, sends: Sequence[int], recvs: Sequence[int]) -> Program:
    """Return the program by which `rank` sends a message to each of `sends` and receives one from each of `recvs`.

    A peer may occur several times. If both sequences are empty, the program has no steps.
    """
    out, into = sent(rank, sends), received(rank, recvs)
    if not out and not into:
        return Program(rank, (), (), ())
    # Log the receives first: the peers' hosts wait for these entries. They wait for no entry of a send.
    logged = [LogStart(*message, sends=False) for message in into] + [LogStart(*message, sends=True) for message in out]
    # In both batches the stores precede the waits. Two ranks that wait before they store would block each other.
    allowed: list[Write | Wait] = [
        *(Write(_word(WordKind.CREDIT, message), message.nth) for message in last(into)),
        *(Wait(_word(WordKind.CREDIT, message), message.nth) for message in last(out)),
    ]
    arrived: list[Write | Wait] = [
        *(Write(_word(WordKind.ARRIVAL, message), message.nth) for message in last(out)),
        *(Wait(_word(WordKind.ARRIVAL, message), message.nth, data=True) for message in last(into)),
    ]
    start: list[Step] = [
        # Host steps. All waits of the host for other ranks are here, before anything is enqueued.
        *logged,
        *(FindBuffer(*message) for message in out),
        # Earlier kernels of the caller may still read the receive buffers and write the send buffers.
        RecordEvent(Event.READY, Stream.CALLER),
        WaitEvent(Event.READY, Stream.LANE),
        *_batches(allowed),
        *(Copy(*message) for message in out),
        # The store of an arrival follows the copies on the same stream, so the receiver sees the bytes before the word.
        *_batches(arrived),
        RecordEvent(Event.DONE, Stream.LANE),
    ]
    return Program(rank, tuple(start), (WaitEvent(Event.DONE, Stream.CALLER),), counted(out, into))


def _word(kind: WordKind, message: PairMessage) -> Word:
    return Word(kind, message.src, message.dst)


def _batches(ops: list[Write | Wait]) -> list[Memops]:
    # Cutting keeps the order, so all stores of an exchange still precede its first wait, in whichever batch that is.
    return [Memops(tuple(ops[start : start + MAX_MEMOPS])) for start in range(0, len(ops), MAX_MEMOPS)]
