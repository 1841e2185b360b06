"""Scripts: what each rank of a model does. A script runs the transport's programs and fills the threads of a machine.

A script starts exchanges and waits for them between kernels, as the executor does. The transport's own exchange program
determines which operations a start enqueues, and in which order; `Protocol.change` may break the program. The use cases
are small enough that every order can be explored.
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
from tests.transport.peer_model.machine import CALLER, CLOSE, DRAIN, HOST, LANE, EndStep, Kind, Machine, Op, Position

# --- scripts ----------------------------------------------------------------------------------------------------------


NEVER: Position = (0, 1 << 30)


@dataclass(frozen=True, slots=True)
class ExactWait(Wait):
    """A wait that only the exact value satisfies, while a `Wait` accepts any larger value."""


@dataclass(frozen=True, slots=True)
class UnfencedWrite(Write):
    """A store that does not wait for earlier copies."""


@dataclass(frozen=True, slots=True)
class LooseCopy(Copy):
    """A copy in an unordered batch: it may begin at any later time."""


@dataclass(frozen=True, slots=True)
class HostBlock:
    """A step in which the host waits until the lane has run all enqueued operations."""


@dataclass(frozen=True, slots=True)
class OnCaller:
    """An operation on the caller's stream."""

    op: Write | Wait


Change = Callable[[Program], Program]


@dataclass(frozen=True)
class Sent:
    """A message of a hop, sent or received: its peer, and its slot on this rank."""

    peer: int
    slot: int


@dataclass(frozen=True)
class BoundHop:
    """The messages that a rank sends and receives in one exchange."""

    sends: tuple[Sent, ...]
    recvs: tuple[Sent, ...]


@dataclass
class Protocol:
    """The rules by which exchanges run, with switches for mistakes in these rules."""

    change: Change = lambda program: program
    one_queue: bool = False
    drain: tuple[EndStep, ...] = DRAIN
    numbers: Callable[[], PairNumbers] = PairNumbers
    swap_book: bool = False
    """Mistake: the receiver logs the buffers of its first two messages of a pair in swapped order."""
    by_bind_order: bool = False
    """Mistake: the k-th message of a pair is written to the buffer of the k-th receive that was bound, not started."""
    first_words: int = 0
    """The initial value of all words."""
    machine: dict[str, object] = field(default_factory=dict)
    """Keyword arguments of `Machine`."""


@dataclass(frozen=True)
class Draft:
    """An operation that refers to operations of other threads by name, because they may not have been added yet.

    `name`: the name of this operation, if others refer to it; `after`: the operations that it needs; `target`: the
    message whose slot a copy writes.
    """

    op: Op
    name: Hashable = None
    after: tuple[Hashable, ...] = ()
    target: Hashable = None


class Script:
    """The program of one rank. Each method appends operations to the rank's threads."""

    def __init__(self, model: Model, rank: int) -> None:
        self.model, self.rank = model, rank
        self.numbers = model.protocol.numbers()
        self._started: list[tuple[BoundHop, Program, dict[Pair, int]]] = []

    def bind(self, sends: Sequence[Sent], recvs: Sequence[Sent]) -> BoundHop:
        """Bind a hop, which may be started repeatedly."""
        hop = BoundHop(tuple(sends), tuple(recvs))
        for each in hop.recvs:
            self.model.bound.setdefault((each.peer, self.rank), []).append(each.slot)
        return hop

    def kernel(self, what: str, reads: Sequence[tuple[int, int]] = (), writes: Sequence[tuple[int, int]] = ()) -> None:
        """Enqueue a kernel on the caller's stream.

        `reads`: pairs of a slot and the tag that it must hold. `writes`: pairs of a slot and the tag that it gets.
        """
        reads, writes = ([(self.model.slot(self.rank, each), tag) for each, tag in part] for part in (reads, writes))
        self._enqueue([(CALLER, Draft(Op(Kind.KERNEL, what, reads=tuple(reads), writes=tuple(writes))))])

    def start(self, hop: BoundHop) -> int:
        """Start an exchange, and return the handle for `wait`."""
        protocol = self.model.protocol
        peers = [each.peer for each in hop.sends], [each.peer for each in hop.recvs]
        program = protocol.change(push_exchange(self.rank, *peers))
        self._started.append((hop, program, self.numbers.bases(program)))
        self._run(program.start, len(self._started) - 1)
        self.numbers.advance(program)
        return len(self._started) - 1

    def wait(self, started: int) -> None:
        """Make later work of the caller's stream run after the exchange with the handle `started`."""
        self._run(self._started[started][1].wait, started)

    def drain(self) -> None:
        """Run the steps of a drain, and report success."""
        for step in self.model.protocol.drain:
            self._host_step(step)
        self._host(Draft(Op(Kind.SUCCESS, "return from drain")))

    def close(self) -> None:
        """Drain, unmap and close."""
        self.drain()
        for step in CLOSE[len(DRAIN) :]:
            self._host_step(step)
        self._host(Draft(Op(Kind.CLOSED, "close")))

    def _run(self, steps: Sequence[object], number: int) -> None:
        """Run the steps of exchange `number`. Consecutive device operations are enqueued as one operation of the host.

        This loses no order, because each operation on the device may run late in any case.
        """
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
        """Return pairs of a stream and an operation to enqueue on it, or an empty list for a step of the host."""
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
        """Run a step of the host."""
        if isinstance(step, LogStart):
            self._log(step, number)
        elif isinstance(step, FindBuffer):
            peer, message = step.dst if step.src == self.rank else step.src, self._number(step, number)
            key = ("log", peer, step.pair, message)
            self._host(Draft(Op(Kind.PASS, f"find message {message} at rank {peer}"), after=(key,)))
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
        """Log that a message of exchange `number` has started, with its slot, so that the peer can find the slot."""
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
    """The scripts of all ranks, and the machine built from them."""

    def __init__(self, world: int, slots: int, protocol: Protocol) -> None:
        self.world, self.slots, self.protocol = world, slots, protocol
        self.threads: list[list[Draft]] = [[] for _ in range(world * 3)]
        self.book: dict[tuple[int, Pair, int], int] = {}
        """The logs: the slot of each message on a rank, by (rank, pair, message number)."""
        self.bound: dict[Pair, list[int]] = {}
        """For each pair, the slots of its receives in the order in which they were bound."""
        self._words: dict[Word, int] = {}
        self.scripts = [Script(self, rank) for rank in range(world)]

    def thread(self, rank: int, stream: int) -> int:
        """Return the index of a thread. With one hardware queue, the caller's stream and the lane are one thread."""
        return rank * 3 + (CALLER if self.protocol.one_queue and stream == LANE else stream)

    def end(self, rank: int, stream: int) -> Position:
        """Return the position of the last operation of a stream."""
        thread = self.thread(rank, stream)
        return thread, len(self.threads[thread]) - 1

    def slot(self, rank: int, slot: int) -> int:
        """Return the index that `slot` of `rank` has among the slots of all ranks."""
        return rank * self.slots + slot

    def word(self, word: Word) -> int:
        """Return the index of a word in the machine; a new word gets the next index."""
        return self._words.setdefault(word, len(self._words))

    def machine(self) -> Machine:
        """Return the machine, with all names resolved."""
        positions: dict[Hashable, Position] = {}
        for thread, drafts in enumerate(self.threads):
            for index, draft in enumerate(drafts):
                if draft.name is not None:
                    positions.setdefault(draft.name, (thread, index))
        threads = [[self._resolved(draft, positions) for draft in drafts] for drafts in self.threads]
        page = [word.page for word in self._words]
        words = [self.protocol.first_words] * len(page)
        return Machine(self.world, threads, page, self.world * self.slots, words, **self.protocol.machine)  # type: ignore[arg-type]

    def _resolved(self, draft: Draft, positions: dict[Hashable, Position]) -> Op:
        op = draft.op._replace(needs=(*draft.op.needs, *(positions.get(key, NEVER) for key in draft.after)))
        if draft.target is not None:
            op = op._replace(target=self._slot_of_message(*draft.target))  # type: ignore[misc]
        return op

    def _slot_of_message(self, rank: int, pair: Pair, number: int) -> int:
        """Return the slot of a message on the receiver `rank`, as the sender finds it in the receiver's log."""
        if self.protocol.by_bind_order:
            return self.slot(rank, self.bound[pair][(number - 1) % len(self.bound[pair])])
        if self.protocol.swap_book and number <= 2:
            number = 3 - number
        return self.slot(rank, self.book.get((rank, pair, number), 0))


# --- use cases --------------------------------------------------------------------------------------------------------


def ring(protocol: Protocol, world: int, hops: int, passes: int = 1) -> Machine:
    """Pass the block of each rank around the ring through two slots, as the executor does.

    A drain ends each pass; the last pass ends with a close, which drains too.
    """
    model = Model(world, 2, protocol)
    for script in model.scripts:
        after, before = (script.rank + 1) % world, (script.rank - 1) % world
        bound = [script.bind([Sent(after, h % 2)], [Sent(before, (h + 1) % 2)]) for h in range(hops)]
        for n in range(passes):
            tags = [n * world + (script.rank - h) % world + 1 for h in range(hops + 1)]
            script.kernel("pack", writes=[(0, tags[0])])
            for h in range(hops):
                started = script.start(bound[h])
                script.kernel(f"attend {h}", reads=[(h % 2, tags[h])])
                script.wait(started)
            script.kernel(f"attend {hops}", reads=[(hops % 2, tags[hops])])
            if n < passes - 1:
                script.drain()
        script.close()
    return model.machine()


def star(protocol: Protocol, world: int) -> Machine:
    """Let rank 0 send to each other rank, and each other rank reply. The pairs have different message numbers."""
    model = Model(world, world, protocol)
    root, leaves = model.scripts[0], model.scripts[1:]
    root.kernel("pack", writes=[(0, 1)])
    waits = [root.start(root.bind([Sent(leaf.rank, 0)], [])) for leaf in leaves]
    waits += [root.start(root.bind([], [Sent(leaf.rank, leaf.rank)])) for leaf in leaves]
    for each in waits:
        root.wait(each)
    root.kernel("attend", reads=[(leaf.rank, leaf.rank + 1) for leaf in leaves])
    for leaf in leaves:
        leaf.wait(leaf.start(leaf.bind([], [Sent(0, 0)])))
        leaf.kernel("attend", reads=[(0, 1)], writes=[(1, leaf.rank + 1)])
        leaf.wait(leaf.start(leaf.bind([Sent(0, 1)], [])))
    for script in model.scripts:
        script.close()
    return model.machine()


def two_messages(protocol: Protocol) -> Machine:
    """Send two messages per exchange in both directions, in two exchanges."""
    model = Model(2, 4, protocol)
    for script in model.scripts:
        peer = 1 - script.rank
        bound = script.bind([Sent(peer, 0), Sent(peer, 1)], [Sent(peer, 2), Sent(peer, 3)])
        for n in (1, 2):
            sent, received = 100 * n + 10 * script.rank, 100 * n + 10 * peer
            script.kernel("pack", writes=[(0, sent), (1, sent + 1)])
            script.wait(script.start(bound))
            script.kernel("attend", reads=[(2, received), (3, received + 1)])
        script.close()
    return model.machine()


def ahead(protocol: Protocol) -> Machine:
    """Start two exchanges before waiting for either."""
    model = Model(2, 4, protocol)
    for script in model.scripts:
        peer = 1 - script.rank
        script.kernel("pack", writes=[(0, 10 + script.rank), (1, 20 + script.rank)])
        started = [script.start(script.bind([Sent(peer, n)], [Sent(peer, 2 + n)])) for n in (0, 1)]
        for n, each in enumerate(started):
            script.wait(each)
            script.kernel(f"attend {n}", reads=[(2 + n, 10 * (n + 1) + peer)])
        script.close()
    return model.machine()


def other_order(protocol: Protocol) -> Machine:
    """Let rank 1 bind two receives, and start the second receive before the first."""
    model = Model(2, 2, protocol)
    sender, receiver = model.scripts
    sender.kernel("pack", writes=[(0, 1), (1, 2)])
    for each in [sender.start(sender.bind([Sent(1, slot)], [])) for slot in (0, 1)]:
        sender.wait(each)
    bound = [receiver.bind([], [Sent(0, slot)]) for slot in (0, 1)]
    for each in [receiver.start(bound[1]), receiver.start(bound[0])]:
        receiver.wait(each)
    receiver.kernel("attend", reads=[(1, 1), (0, 2)])
    for script in model.scripts:
        script.close()
    return model.machine()
