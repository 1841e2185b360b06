"""An exchange by copy engines: its operations, the numbers of its messages, and the order of both.

An exchange is a value: a tuple of operations, made once when a hop is bound. The transport runs it and the race model
of the tests explores it, so what the tests prove is what runs. Messages of an ordered pair of ranks are numbered from 1
for the life of a ring; an operation says only which message of its own exchange it means, `nth`, and `PairNumbers` adds
how many came before. Nothing here imports torch.

The sender's copy engine writes the receiver's buffer (push). Why this order, of the k-th message of a pair:
no read before the write: copy, fence of the store, arrival >= k, DONE, consumer;
no overwrite before the last read: last reader, READY, credit >= k, copy;
source kept until it is read: copy, DONE, caller;
no deadlock: credits depend only on READY, copies on credits, arrivals on copies, and READY on earlier exchanges, so
every wait is for a smaller (exchange, phase), also where all streams of a device share one hardware queue.
Therefore stores stand before waits in each batch, data and flags never share one, and between the first operation that
is enqueued and the last the host waits for nothing. `tests/transport/peer_model` proves it and breaks each rule.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

# --- operations ------------------------------------------------------------------------------------------------------


PAINTED = 1 << 62
"""What an abort stores into a word to satisfy every wait for it: no message has so high a number."""
Pair = tuple[int, int]
"""The rank that sends and the rank that receives."""


class WordKind(Enum):
    """What a word counts. Each is written by one end of the pair and waited for by the other."""

    CREDIT = "credit"
    """Written by the receiver: the last message that it has room for. Until then its buffer may not be written."""
    ARRIVAL = "arrival"
    """Written by the sender: the last message that is complete in the receiver's memory."""


class Stream(Enum):
    """A queue of the device."""

    CALLER = "caller"
    LANE = "lane"


class Event(Enum):
    """An event of one exchange."""

    READY = "ready"
    """The caller's stream has come to the start: buffers may be sent from and received into."""
    DONE = "done"
    """Every message of the exchange has left and arrived."""


@dataclass(frozen=True, slots=True)
class Word:
    """A 64-bit word in the page of the rank that waits for it; the other end of `src` to `dst` is its only writer."""

    kind: WordKind
    src: int
    dst: int

    @property
    def page(self) -> int:
        """The rank in whose page it lies."""
        return self.src if self.kind is WordKind.CREDIT else self.dst

    @property
    def writer(self) -> int:
        """The rank that writes it, and its index among the words of that kind in the page."""
        return self.dst if self.kind is WordKind.CREDIT else self.src

    def __str__(self) -> str:
        return f"{self.kind.value}[{self.writer}] of rank {self.page}"


@dataclass(frozen=True, slots=True)
class Write:
    """Store the number of the pair's `nth` message of this exchange, after everything before it is performed."""

    word: Word
    nth: int

    @property
    def pair(self) -> Pair:
        """Whose messages the number counts."""
        return self.word.src, self.word.dst


@dataclass(frozen=True, slots=True)
class Wait:
    """Go on when the word is at least (cyclically, signed) the number of the pair's `nth` message of this exchange."""

    word: Word
    nth: int
    data: bool = False
    """Bytes are read behind it: a device that must flush remote writes (attribute 98) does it here."""

    @property
    def pair(self) -> Pair:
        """Whose messages the number counts."""
        return self.word.src, self.word.dst


@dataclass(frozen=True, slots=True)
class Memops:
    """Stores and waits of the lane in one batch of the driver, which runs them in this order."""

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
        """Whose message it is."""
        return self.src, self.dst


@dataclass(frozen=True, slots=True)
class Copy(_OfMessage):
    """Move the bytes of a message: `message` is its index among the sends of the exchange."""


@dataclass(frozen=True, slots=True)
class LogStart(_OfMessage):
    """The host stores, in its own start log, which bound message the pair's `nth` message of this exchange is."""

    sends: bool


@dataclass(frozen=True, slots=True)
class FindBuffer(_OfMessage):
    """The host finds the receiver's buffer of a message, by that rank's start log.

    The one step at which it waits for another rank: until that rank has logged the start of this very number, for a
    receiver may start what it has bound in any order.
    """


@dataclass(frozen=True, slots=True)
class RecordEvent:
    """Passed when everything before it on its stream is complete."""

    event: Event
    stream: Stream


@dataclass(frozen=True, slots=True)
class WaitEvent:
    """What follows on its stream runs after the event."""

    event: Event
    stream: Stream


Step = LogStart | FindBuffer | RecordEvent | WaitEvent | Memops | Copy


@dataclass(frozen=True, slots=True)
class Program:
    """One rank's part of one exchange: what `start` does and what `wait` does, in this order."""

    rank: int
    start: tuple[Step, ...]
    wait: tuple[Step, ...]
    counts: tuple[tuple[Pair, int], ...]
    """How many messages of each pair it moves."""


class PairNumbers:
    """How many messages of each ordered pair one rank has started."""

    def __init__(self) -> None:
        self._started: defaultdict[Pair, int] = defaultdict(int)

    def of(self, step: Write | Wait | Copy | LogStart | FindBuffer) -> int:
        """The number that a step of the exchange that starts now means."""
        return self._started[step.pair] + step.nth

    def bases(self, program: Program) -> dict[Pair, int]:
        """What to add to every `nth` of this exchange, also after later ones have started."""
        return {pair: self._started[pair] for pair, _ in program.counts}

    def advance(self, program: Program) -> None:
        """The exchange has started: the next one counts from behind it."""
        for pair, count in program.counts:
            self._started[pair] += count


class PairMessage(NamedTuple):
    """A message of an exchange: its index among the sends or receives, its pair, and which of the pair's it is."""

    message: int
    src: int
    dst: int
    nth: int


def sent(rank: int, peers: Sequence[int]) -> list[PairMessage]:
    """The messages that `rank` sends to these peers in one exchange."""
    count: Counter[int] = Counter()
    return [PairMessage(n, rank, dst, _next(count, dst)) for n, dst in enumerate(peers)]


def received(rank: int, peers: Sequence[int]) -> list[PairMessage]:
    """The messages that `rank` receives from these peers in one exchange."""
    count: Counter[int] = Counter()
    return [PairMessage(n, src, rank, _next(count, src)) for n, src in enumerate(peers)]


def last(messages: Sequence[PairMessage]) -> list[PairMessage]:
    """The last message of each pair, in the order of the pairs' first ones: one word speaks for all of a pair."""
    return list({(each.src, each.dst): each for each in messages}.values())


def counted(*groups: Sequence[PairMessage]) -> tuple[tuple[Pair, int], ...]:
    """How many messages of each pair these are."""
    return tuple(Counter((each.src, each.dst) for group in groups for each in group).items())


def _next(count: Counter[int], peer: int) -> int:
    count[peer] += 1
    return count[peer]


# --- the exchange ----------------------------------------------------------------------------------------------------


MAX_MEMOPS = 255
"""Operations in one batch of the driver."""


def push_exchange(rank: int, sends: Sequence[int], recvs: Sequence[int]) -> Program:
    """What `rank` does to send a message to each peer of `sends` and receive one from each of `recvs`.

    A peer may stand there several times. Nothing at all where both are empty.
    """
    out, into = sent(rank, sends), received(rank, recvs)
    if not out and not into:
        return Program(rank, (), (), ())
    logged = [LogStart(*each, sends=False) for each in into] + [LogStart(*each, sends=True) for each in out]
    allowed: list[Write | Wait] = [
        *(Write(_word(WordKind.CREDIT, each), each.nth) for each in last(into)),
        *(Wait(_word(WordKind.CREDIT, each), each.nth) for each in last(out)),
    ]
    arrived: list[Write | Wait] = [
        *(Write(_word(WordKind.ARRIVAL, each), each.nth) for each in last(out)),
        *(Wait(_word(WordKind.ARRIVAL, each), each.nth, data=True) for each in last(into)),
    ]
    start: list[Step] = [
        *logged,
        *(FindBuffer(*each) for each in out),
        RecordEvent(Event.READY, Stream.CALLER),
        WaitEvent(Event.READY, Stream.LANE),
        *_batches(allowed),
        *(Copy(*each) for each in out),
        *_batches(arrived),
        RecordEvent(Event.DONE, Stream.LANE),
    ]
    return Program(rank, tuple(start), (WaitEvent(Event.DONE, Stream.CALLER),), counted(out, into))


def _word(kind: WordKind, message: PairMessage) -> Word:
    return Word(kind, message.src, message.dst)


def _batches(ops: list[Write | Wait]) -> list[Memops]:
    return [Memops(tuple(ops[at : at + MAX_MEMOPS])) for at in range(0, len(ops), MAX_MEMOPS)]
