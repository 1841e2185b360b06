"""Model checking of the peer transport: every order of its operations is correct, and each mutation fails in some."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from types import ModuleType

import pytest

from ringattn.transport.peer import program as peer_program
from ringattn.transport.peer import program as steps
from ringattn.transport.peer.program import (
    MAX_MEMOPS,
    Copy,
    Event,
    FindBuffer,
    LogStart,
    Memops,
    PairNumbers,
    Program,
    RecordEvent,
    Stream,
    Wait,
    WaitEvent,
    Word,
    WordKind,
    Write,
    push_exchange,
)
from tests.transport.peer_model.explore import explore, races, random_order
from tests.transport.peer_model.machine import Machine, Violation
from tests.transport.peer_model.mutations import (
    MUTATIONS,
    Mutation,
    three,
    two,
)
from tests.transport.peer_model.scripts import Protocol, ahead, other_order, ring, star, two_messages

PUSH, ONE_QUEUE = Protocol(), Protocol(one_queue=True)
FAULTS = ["raise", "die", "stop"]
slow = pytest.mark.slow
Use = Callable[[Protocol], Machine]


def failing(protocol: Protocol, fault: str) -> Protocol:
    return replace(protocol, machine={**protocol.machine, "fault": fault})


@pytest.mark.parametrize("protocol", [PUSH, ONE_QUEUE], ids=["push", "one queue"])
@pytest.mark.parametrize(
    "use",
    [two, three, partial(ring, world=2, hops=2, passes=2), partial(star, world=3), two_messages, ahead, other_order],
    ids=["2 ranks", "3 ranks", "2 passes", "star", "two messages", "ahead", "other order"],
)
def test_every_order_holds(use: Use, protocol: Protocol) -> None:
    machine = use(protocol)
    assert explore(machine) > len(machine.threads[0])


@pytest.mark.parametrize(
    ("protocol", "ranks", "hops", "passes", "fault"),
    [
        *((PUSH, 2, 1, 2, fault) for fault in FAULTS),
        (PUSH, 2, 2, 1, "raise"),
        (PUSH, 2, 2, 1, "die"),
        (ONE_QUEUE, 2, 2, 1, "raise"),
        *(pytest.param(PUSH, 2, 2, 2, fault, marks=slow) for fault in FAULTS),
        *(pytest.param(ONE_QUEUE, 2, 3, 1, fault, marks=slow) for fault in FAULTS),
        pytest.param(PUSH, 2, 3, 1, "raise", marks=slow),
        pytest.param(PUSH, 3, 1, 1, "die", marks=slow),
        pytest.param(PUSH, 3, 1, 1, "raise", marks=slow),
        pytest.param(ONE_QUEUE, 3, 2, 1, "raise", marks=slow),
    ],
)
def test_a_rank_that_fails_at_any_time_spoils_no_result_and_blocks_no_rank(
    protocol: Protocol, ranks: int, hops: int, passes: int, fault: str
) -> None:
    machine = ring(failing(protocol, fault), ranks, hops, passes)
    assert explore(machine) > explore(ring(protocol, ranks, hops, passes))


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.name)
def test_each_mutation_fails_in_some_order(mutation: Mutation) -> None:
    with pytest.raises(Violation) as caught:
        explore(mutation.use(mutation.broken))
    assert caught.value.rule == mutation.rule


@pytest.mark.parametrize("name", sorted({mutation.name for mutation in MUTATIONS}))
def test_the_page_on_tests_names_each_mutation(name: str) -> None:
    page = Path(__file__).parents[2] / "docs" / "testing.md"
    assert f"| {name} |" in page.read_text(encoding="utf-8")


@pytest.mark.parametrize("protocol", [PUSH, ONE_QUEUE], ids=["push", "one queue"])
def test_eight_ranks_have_no_race_and_no_deadlock_in_a_random_order(protocol: Protocol) -> None:
    machine = ring(protocol, 8, 7)
    events, end = random_order(machine, seed=0)
    assert machine.stuck(end) == "" and races(machine, events) == []


@pytest.mark.parametrize(
    "mutation",
    [each for each in MUTATIONS if each.rule == "ordered" and each.use is two and not each.broken.first_words],
    ids=lambda mutation: mutation.name,
)
def test_clocks_find_the_race_of_a_mutation_in_any_order(mutation: Mutation) -> None:
    machine = ring(mutation.broken, 4, 3)
    for seed in range(2):
        order, _ = random_order(machine, seed)
        assert any("copy message" in str(race) for race in races(machine, order))


@pytest.mark.parametrize(
    ("use", "protocol"),
    [
        (partial(ring, world=2, hops=1), PUSH),
        pytest.param(partial(ring, world=2, hops=2), PUSH, marks=slow),
        pytest.param(partial(ring, world=2, hops=1), failing(PUSH, "die"), marks=slow),
    ],
)
def test_the_omitted_orders_change_no_verdict(use: Use, protocol: Protocol) -> None:
    every = replace(protocol, machine={**protocol.machine, "reduced": False})
    assert explore(use(every)) > 2 * explore(use(protocol))


def credit(src: int, dst: int) -> Word:
    return Word(WordKind.CREDIT, src, dst)


def arrival(src: int, dst: int) -> Word:
    return Word(WordKind.ARRIVAL, src, dst)


def test_a_hop_of_a_ring() -> None:
    program = push_exchange(1, [2], [0])
    assert program.start == (
        LogStart(0, 0, 1, 1, sends=False),
        LogStart(0, 1, 2, 1, sends=True),
        FindBuffer(0, 1, 2, 1),
        RecordEvent(Event.READY, Stream.CALLER),
        WaitEvent(Event.READY, Stream.LANE),
        Memops((Write(credit(0, 1), 1), Wait(credit(1, 2), 1))),
        Copy(0, 1, 2, 1),
        Memops((Write(arrival(1, 2), 1), Wait(arrival(0, 1), 1, data=True))),
        RecordEvent(Event.DONE, Stream.LANE),
    )
    assert program.wait == (WaitEvent(Event.DONE, Stream.CALLER),)
    assert dict(program.counts) == {(0, 1): 1, (1, 2): 1}


def test_a_word_is_in_the_page_of_the_rank_that_waits() -> None:
    assert (credit(3, 5).page, credit(3, 5).writer) == (3, 5)
    assert (arrival(3, 5).page, arrival(3, 5).writer) == (5, 3)


def test_several_messages_of_a_pair_share_one_word() -> None:
    program = push_exchange(0, [1, 2, 1], [1])
    batches = [step.ops for step in program.start if isinstance(step, Memops)]
    assert batches[0] == (Write(credit(1, 0), 1), Wait(credit(0, 1), 2), Wait(credit(0, 2), 1))
    assert batches[1][:2] == (Write(arrival(0, 1), 2), Write(arrival(0, 2), 1))
    copies = [step for step in program.start if isinstance(step, Copy)]
    assert copies == [Copy(0, 0, 1, 1), Copy(1, 0, 2, 1), Copy(2, 0, 1, 2)]


def test_messages_are_numbered_per_pair_for_the_life_of_the_ring() -> None:
    numbers, both, send = PairNumbers(), push_exchange(0, [1, 1, 2], [2]), push_exchange(0, [1], [])
    copies = [step for step in both.start if isinstance(step, Copy)]
    assert [numbers.of(copy) for copy in copies] == [1, 2, 1]
    numbers.advance(both)
    assert numbers.of(send.start[0]) == 3  # type: ignore[arg-type]
    numbers.advance(send)
    assert [numbers.of(copy) for copy in copies] == [4, 5, 2]
    assert numbers.bases(both) == {(0, 1): 3, (0, 2): 1, (2, 0): 1}


def test_an_empty_exchange_has_no_steps() -> None:
    assert push_exchange(0, [], []) == Program(0, (), (), ())


def test_long_batches_are_cut_with_all_stores_before_the_waits() -> None:
    peers = range(1, 201)
    batches = [step.ops for step in push_exchange(0, peers, peers).start if isinstance(step, Memops)]
    assert [len(ops) for ops in batches] == [MAX_MEMOPS, 400 - MAX_MEMOPS] * 2
    for ops in (batches[0] + batches[1], batches[2] + batches[3]):
        assert all(isinstance(first, Write) or isinstance(second, Wait) for first, second in pairwise(ops))


@pytest.mark.parametrize("module", [steps, peer_program])
def test_programs_need_neither_torch_nor_a_driver(module: ModuleType) -> None:
    tree = ast.parse(inspect.getsource(module))
    names = [node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    assert not [node for node in ast.walk(tree) if isinstance(node, ast.Import)]
    assert all(
        name.split(".")[0] in ("__future__", "collections", "dataclasses", "enum", "typing", "ringattn")
        for name in names
    )
    assert not any(name.startswith("ringattn.") and ".shared" not in name for name in names)
