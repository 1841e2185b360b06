"""What the ranks of a model do: scripts of hosts, turned into the threads of a machine with the transports' programs.

A script starts and waits for exchanges between kernels, as the executor does. What a start enqueues and in which order
comes from the program that the transport would run; `change` may break it. The uses are small enough for every order.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field, replace

from ringattn.transport.peer.program import (
    Copy,
    Event,
    FindBuffer,
    LogStart,
    Memops,
    Pair,
    PairNumbers,
    Program,
    RecordEvent,
    Stream,
    Wait,
    WaitEvent,
    Word,
    Write,
    push_exchange,
)
from tests.transport.peer_model.machine import CALLER, CLOSE, DRAIN, HOST, LANE, At, EndStep, Kind, Machine, Op

# --- scripts ----------------------------------------------------------------------------------------------------------


NEVER: At = (0, 1 << 30)


@dataclass(frozen=True, slots=True)
class ExactWait(Wait):
    """A wait for one value and no other."""


@dataclass(frozen=True, slots=True)
class UnfencedWrite(Write):
    """A store that does not wait for what was written before it."""


@dataclass(frozen=True, slots=True)
class LooseCopy(Copy):
    """A copy whose batch keeps no order: it begins whenever it likes."""


@dataclass(frozen=True, slots=True)
class HostBlock:
    """The host waits until the lane has run what it was given."""


@dataclass(frozen=True, slots=True)
class OnCaller:
    """An operation on the caller's stream."""

    op: Write | Wait


Change = Callable[[Program], Program]


@dataclass(frozen=True)
class Sent:
    """A message of a hop: to or from `peer`, in this slot of the rank."""

    peer: int
    slot: int


@dataclass(frozen=True)
class BoundHop:
    """What `bind` was given. Hops of a rank are numbered as they are bound."""

    sends: tuple[Sent, ...]
    recvs: tuple[Sent, ...]


@dataclass
class Protocol:
    """How exchanges run, and what is broken about it."""

    change: Change = lambda program: program
    one_queue: bool = False
    drain: tuple[EndStep, ...] = DRAIN
    numbers: Callable[[], PairNumbers] = PairNumbers
    swap_book: bool = False
    """The receiver logs the buffers of its first two starts the wrong way round."""
    by_bind_order: bool = False
    """The k-th start is paired with the k-th bound hop."""
    first_words: int = 0
    """What the pages hold at first."""
    machine: dict[str, object] = field(default_factory=dict)
    """Options of the machine."""


@dataclass(frozen=True)
class Draft:
    """An operation whose neighbors on other threads may not be written yet: they are named."""

    op: Op
    name: Hashable = None
    after: tuple[Hashable, ...] = ()
    target: Hashable = None


class Script:
    """One rank's host, as it is written."""

    def __init__(self, model: Model, rank: int) -> None:
        self.model, self.rank = model, rank
        self.numbers = model.protocol.numbers()
        self._started: list[tuple[BoundHop, Program, dict[Pair, int]]] = []

    def bind(self, sends: Sequence[Sent], recvs: Sequence[Sent]) -> BoundHop:
        """A hop that may be started again and again."""
        hop = BoundHop(tuple(sends), tuple(recvs))
        for each in hop.recvs:
            self.model.bound.setdefault((each.peer, self.rank), []).append(each.slot)
        return hop

    def kernel(self, what: str, reads: Sequence[tuple[int, int]] = (), writes: Sequence[tuple[int, int]] = ()) -> None:
        """Work of the caller's stream: slots that must hold these tags, and slots that get them."""
        reads, writes = ([(self.model.slot(self.rank, each), tag) for each, tag in part] for part in (reads, writes))
        self._enqueue([(CALLER, Draft(Op(Kind.KERNEL, what, reads=tuple(reads), writes=tuple(writes))))])

    def start(self, hop: BoundHop) -> int:
        """Start an exchange; what `wait` needs."""
        protocol = self.model.protocol
        peers = [each.peer for each in hop.sends], [each.peer for each in hop.recvs]
        program = protocol.change(push_exchange(self.rank, *peers))
        self._started.append((hop, program, self.numbers.bases(program)))
        self._run(program.start, len(self._started) - 1)
        self.numbers.advance(program)
        return len(self._started) - 1

    def wait(self, started: int) -> None:
        """What the caller does after this comes behind the exchange."""
        self._run(self._started[started][1].wait, started)

    def drain(self) -> None:
        """Make sure of everything so far, and say so."""
        for step in self.model.protocol.drain:
            self._host_step(step)
        self._host(Draft(Op(Kind.SUCCESS, "return from drain")))

    def close(self) -> None:
        """Drain and leave."""
        self.drain()
        for step in CLOSE[len(DRAIN) :]:
            self._host_step(step)
        self._host(Draft(Op(Kind.CLOSED, "close")))

    def _run(self, steps: Sequence[object], number: int) -> None:
        """Neighboring operations of the device are enqueued at once: one that is enqueued may always run late."""
        queued: list[tuple[int, Draft]] = []
        for step in steps:
            on_device = self._on_device(step, number)
            queued += on_device
            if not on_device:
                self._enqueue(queued)
                queued = []
                self._on_host(step, number)
        self._enqueue(queued)

    def _on_device(self, step: object, number: int) -> list[tuple[int, Draft]]:
        """What a step puts on streams."""
        if isinstance(step, Memops):
            return [(LANE, self._memop(op, number)) for op in step.ops]
        if isinstance(step, OnCaller):
            return [(CALLER, self._memop(step.op, number))]
        if isinstance(step, Copy):
            return [(LANE, self._copy(step, number))]
        if isinstance(step, RecordEvent | WaitEvent):
            key = ("event", self.rank, number, step.event)
            stream = CALLER if step.stream is Stream.CALLER else LANE
            if isinstance(step, RecordEvent):
                return [(stream, Draft(Op(Kind.PASS, f"record {step.event.value}"), name=key))]
            return [(stream, Draft(Op(Kind.PASS, f"wait for {step.event.value}"), after=(key,)))]
        return []

    def _on_host(self, step: object, number: int) -> None:
        """What the host itself does."""
        if isinstance(step, LogStart):
            self._log(step, number)
        elif isinstance(step, FindBuffer):
            other, message = step.dst if step.src == self.rank else step.src, self._number(step, number)
            key = ("log", other, step.pair, message)
            self._host(Draft(Op(Kind.PASS, f"find message {message} at rank {other}"), after=(key,)))
        elif isinstance(step, HostBlock):
            self._host(Draft(Op(Kind.PASS, "block in start", (self.model.end(self.rank, LANE),))))
        else:
            raise TypeError(step)

    def _host_step(self, step: EndStep) -> None:
        what = step.name.lower()
        if step is EndStep.AWAIT_DONE:
            keys = tuple(("event", self.rank, number, Event.DONE) for number in range(len(self._started)))
            self._host(Draft(Op(Kind.PASS, what), after=keys))
        elif step is EndStep.AWAIT_COMPUTED:
            self._host(Draft(Op(Kind.PASS, what, (self.model.end(self.rank, CALLER),))))
        else:
            self._host(Draft(Op(Kind[step.name], what)))

    def _log(self, step: LogStart, number: int) -> None:
        """The start log, which says of a receive also where it goes."""
        hop, message = self._started[number][0], self._number(step, number)
        messages = hop.sends if step.sends else hop.recvs
        self.model.book.setdefault((self.rank, step.pair, message), messages[step.message].slot)
        self._host(Draft(Op(Kind.PASS, f"log message {message}"), name=("log", self.rank, step.pair, message)))

    def _copy(self, step: Copy, number: int) -> Draft:
        hop, message = self._started[number][0], self._number(step, number)
        op = Op(Kind.COPY, f"copy message {message} to rank {step.dst}", detached=isinstance(step, LooseCopy))
        source = self.model.slot(self.rank, hop.sends[step.message].slot)
        return Draft(op._replace(source=source), target=(step.dst, step.pair, message))

    def _memop(self, op: Write | Wait, number: int) -> Draft:
        value, word = self._number(op, number), self.model.word(op.word)
        if isinstance(op, Write):
            fence = not isinstance(op, UnfencedWrite)
            return Draft(Op(Kind.WRITE, f"{op.word} := {value}", word=word, value=value, fence=fence))
        exact = isinstance(op, ExactWait)
        return Draft(Op(Kind.WAIT, f"wait for {op.word} >= {value}", word=word, value=value, exact=exact))

    def _number(self, step: Write | Wait | Copy | LogStart | FindBuffer, number: int) -> int:
        return self._started[number][2][step.pair] + step.nth

    def _host(self, draft: Draft) -> None:
        self.model.threads[self.model.thread(self.rank, HOST)].append(draft)

    def _enqueue(self, drafts: Sequence[tuple[int, Draft]]) -> None:
        if not drafts:
            return
        host = self.model.thread(self.rank, HOST)
        gate = host, len(self.model.threads[host])
        starts = any(stream == LANE for stream, _ in drafts)
        self._host(Draft(Op(Kind.START if starts else Kind.PASS, "enqueue")))
        for stream, draft in drafts:
            op = draft.op._replace(needs=(gate, *draft.op.needs))
            self.model.threads[self.model.thread(self.rank, stream)].append(replace(draft, op=op))


class Model:
    """Scripts of all ranks, and the machine that they make."""

    def __init__(self, world: int, slots: int, protocol: Protocol) -> None:
        self.world, self.slots, self.protocol = world, slots, protocol
        self.threads: list[list[Draft]] = [[] for _ in range(world * 3)]
        self.book: dict[tuple[int, Pair, int], int] = {}
        """By rank, pair and number: the slot of that message."""
        self.bound: dict[Pair, list[int]] = {}
        """By pair: the slots of its receives, as they were bound."""
        self._words: dict[Word, int] = {}
        self.scripts = [Script(self, rank) for rank in range(world)]

    def thread(self, rank: int, stream: int) -> int:
        """Its index. With one hardware queue all streams of a rank are one."""
        return rank * 3 + (CALLER if self.protocol.one_queue and stream == LANE else stream)

    def end(self, rank: int, stream: int) -> At:
        """The last operation that a stream has now."""
        thread = self.thread(rank, stream)
        return thread, len(self.threads[thread]) - 1

    def slot(self, rank: int, slot: int) -> int:
        """Its index among all ranks' slots."""
        return rank * self.slots + slot

    def word(self, word: Word) -> int:
        """Its index."""
        return self._words.setdefault(word, len(self._words))

    def machine(self) -> Machine:
        """With everything that was named in its place."""
        places: dict[Hashable, At] = {}
        for thread, drafts in enumerate(self.threads):
            for at, draft in enumerate(drafts):
                if draft.name is not None:
                    places.setdefault(draft.name, (thread, at))
        threads = [[self._placed(draft, places) for draft in drafts]
                   for thread, drafts in enumerate(self.threads)]  # fmt: skip
        page = [word.page for word in self._words]
        words = [self.protocol.first_words] * len(page)
        return Machine(self.world, threads, page, self.world * self.slots, words, **self.protocol.machine)  # type: ignore[arg-type]

    def _placed(self, draft: Draft, places: dict[Hashable, At]) -> Op:
        op = draft.op._replace(needs=(*draft.op.needs, *(places.get(key, NEVER) for key in draft.after)))
        if draft.target is not None:
            op = op._replace(target=self._found(*draft.target))  # type: ignore[misc]
        return op

    def _found(self, rank: int, pair: Pair, number: int) -> int:
        """The slot of a message at one of its ends, as the other end finds it."""
        if self.protocol.by_bind_order:
            return self.slot(rank, self.bound[pair][(number - 1) % len(self.bound[pair])])
        if self.protocol.swap_book and number <= 2:
            number = 3 - number
        return self.slot(rank, self.book.get((rank, pair, number), 0))


# --- uses of a transport ----------------------------------------------------------------------------------------------


def ring(protocol: Protocol, world: int, hops: int, passes: int = 1) -> Machine:
    """Each rank's block goes round through two slots, as a ring's executor lets it; a drain ends each pass."""
    model = Model(world, 2, protocol)
    for me in model.scripts:
        after, before = (me.rank + 1) % world, (me.rank - 1) % world
        bound = [me.bind([Sent(after, h % 2)], [Sent(before, (h + 1) % 2)]) for h in range(hops)]
        for n in range(passes):
            tags = [n * world + (me.rank - h) % world + 1 for h in range(hops + 1)]
            me.kernel("pack", writes=[(0, tags[0])])
            for h in range(hops):
                started = me.start(bound[h])
                me.kernel(f"attend {h}", reads=[(h % 2, tags[h])])
                me.wait(started)
            me.kernel(f"attend {hops}", reads=[(hops % 2, tags[hops])])
            if n < passes - 1:
                me.drain()
        me.close()
    return model.machine()


def star(protocol: Protocol, world: int) -> Machine:
    """Rank 0 sends to each other rank, then they answer: pairs with unequal numbers."""
    model = Model(world, world, protocol)
    root, others = model.scripts[0], model.scripts[1:]
    root.kernel("pack", writes=[(0, 1)])
    waits = [root.start(root.bind([Sent(me.rank, 0)], [])) for me in others]
    waits += [root.start(root.bind([], [Sent(me.rank, me.rank)])) for me in others]
    for each in waits:
        root.wait(each)
    root.kernel("attend", reads=[(me.rank, me.rank + 1) for me in others])
    for me in others:
        me.wait(me.start(me.bind([], [Sent(0, 0)])))
        me.kernel("attend", reads=[(0, 1)], writes=[(1, me.rank + 1)])
        me.wait(me.start(me.bind([Sent(0, 1)], [])))
    for me in model.scripts:
        me.close()
    return model.machine()


def two_messages(protocol: Protocol) -> Machine:
    """Two messages of a pair in one exchange, both ways, twice."""
    model = Model(2, 4, protocol)
    for me in model.scripts:
        peer = 1 - me.rank
        bound = me.bind([Sent(peer, 0), Sent(peer, 1)], [Sent(peer, 2), Sent(peer, 3)])
        for n in (1, 2):
            mine, theirs = 100 * n + 10 * me.rank, 100 * n + 10 * peer
            me.kernel("pack", writes=[(0, mine), (1, mine + 1)])
            me.wait(me.start(bound))
            me.kernel("attend", reads=[(2, theirs), (3, theirs + 1)])
        me.close()
    return model.machine()


def ahead(protocol: Protocol) -> Machine:
    """Two exchanges are started before either is waited for."""
    model = Model(2, 4, protocol)
    for me in model.scripts:
        peer = 1 - me.rank
        me.kernel("pack", writes=[(0, 10 + me.rank), (1, 20 + me.rank)])
        started = [me.start(me.bind([Sent(peer, n)], [Sent(peer, 2 + n)])) for n in (0, 1)]
        for n, each in enumerate(started):
            me.wait(each)
            me.kernel(f"attend {n}", reads=[(2 + n, 10 * (n + 1) + peer)])
        me.close()
    return model.machine()


def other_order(protocol: Protocol) -> Machine:
    """Rank 1 binds two receives and starts the second one first."""
    model = Model(2, 2, protocol)
    root, me = model.scripts
    root.kernel("pack", writes=[(0, 1), (1, 2)])
    for each in [root.start(root.bind([Sent(1, slot)], [])) for slot in (0, 1)]:
        root.wait(each)
    bound = [me.bind([], [Sent(0, slot)]) for slot in (0, 1)]
    for each in [me.start(bound[1]), me.start(bound[0])]:
        me.wait(each)
    me.kernel("attend", reads=[(1, 1), (0, 2)])
    for script in model.scripts:
        script.close()
    return model.machine()
