"""The programs of an exchange: which words, in which order, with which numbers."""

from __future__ import annotations

import ast
import inspect
from itertools import pairwise
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


def test_a_word_lies_with_the_rank_that_waits() -> None:
    assert (credit(3, 5).page, credit(3, 5).writer) == (3, 5)
    assert (arrival(3, 5).page, arrival(3, 5).writer) == (5, 3)


def test_several_messages_of_a_pair_share_one_word_by_push() -> None:
    program = push_exchange(0, [1, 2, 1], [1])
    batches = [step.ops for step in program.start if isinstance(step, Memops)]
    assert batches[0] == (Write(credit(1, 0), 1), Wait(credit(0, 1), 2), Wait(credit(0, 2), 1))
    assert batches[1][:2] == (Write(arrival(0, 1), 2), Write(arrival(0, 2), 1))
    copies = [step for step in program.start if isinstance(step, Copy)]
    assert copies == [Copy(0, 0, 1, 1), Copy(1, 0, 2, 1), Copy(2, 0, 1, 2)]


def test_numbers_are_of_pairs_and_last_as_long_as_the_ring() -> None:
    numbers, both, one = PairNumbers(), push_exchange(0, [1, 1, 2], [2]), push_exchange(0, [1], [])
    copies = [step for step in both.start if isinstance(step, Copy)]
    assert [numbers.of(copy) for copy in copies] == [1, 2, 1]
    numbers.advance(both)
    assert numbers.of(one.start[0]) == 3  # type: ignore[arg-type]
    numbers.advance(one)
    assert [numbers.of(copy) for copy in copies] == [4, 5, 2]
    assert numbers.bases(both) == {(0, 1): 3, (0, 2): 1, (2, 0): 1}


def test_an_exchange_of_nothing_has_no_step() -> None:
    assert push_exchange(0, [], []) == Program(0, (), (), ())


def test_long_batches_are_cut_with_all_stores_before_the_waits() -> None:
    peers = range(1, 201)
    batches = [step.ops for step in push_exchange(0, peers, peers).start if isinstance(step, Memops)]
    assert [len(ops) for ops in batches] == [MAX_MEMOPS, 400 - MAX_MEMOPS] * 2
    for ops in (batches[0] + batches[1], batches[2] + batches[3]):
        assert all(isinstance(one, Write) or isinstance(other, Wait) for one, other in pairwise(ops))


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
