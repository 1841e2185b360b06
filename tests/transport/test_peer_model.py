"""The order of operations of `peer` and `shm`, in every order that a machine may run them, and each way to break it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from ringattn.transport.peer.program import Wait, WordKind, Write
from tests.transport.peer_model.clocks import races
from tests.transport.peer_model.explore import drawn, explore
from tests.transport.peer_model.machine import Machine
from tests.transport.peer_model.mutations import (
    MUTATIONS,
    Mutation,
    arrivals_on_caller,
    block_before,
    changed,
    exact,
    flags_of_each,
    mapped,
    three,
    two,
)
from tests.transport.peer_model.pull_mutations import PULL, PULL_MUTATIONS
from tests.transport.peer_model.scenarios import ahead, other_order, ring, star, two_messages
from tests.transport.peer_model.scripts import Protocol
from tests.transport.peer_model.state import Violation

PUSH, ONE_QUEUE = Protocol(), Protocol(one_queue=True)
FAULTS = ["raise", "die", "stop"]
slow = pytest.mark.slow
Use = Callable[[Protocol], Machine]


def failing(protocol: Protocol, fault: str) -> Protocol:
    return replace(protocol, machine={**protocol.machine, "fault": fault})


@pytest.mark.parametrize("protocol", [PUSH, ONE_QUEUE, PULL], ids=["push", "one queue", "pull"])
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
        *((PULL, 2, 2, 1, fault) for fault in FAULTS),
        (PUSH, 2, 2, 1, "raise"),
        (PUSH, 2, 2, 1, "die"),
        (ONE_QUEUE, 2, 2, 1, "raise"),
        *(pytest.param(PUSH, 2, 2, 2, fault, marks=slow) for fault in FAULTS),
        *(pytest.param(ONE_QUEUE, 2, 3, 1, fault, marks=slow) for fault in FAULTS),
        pytest.param(PUSH, 2, 3, 1, "raise", marks=slow),
        pytest.param(PUSH, 3, 1, 1, "die", marks=slow),
        pytest.param(PUSH, 3, 1, 1, "raise", marks=slow),
        pytest.param(ONE_QUEUE, 3, 2, 1, "raise", marks=slow),
        *(pytest.param(PULL, 3, 1, 1, fault, marks=slow) for fault in FAULTS),
    ],
)
def test_a_rank_that_fails_at_any_time_spoils_no_result_and_holds_up_nobody(
    protocol: Protocol, ranks: int, hops: int, passes: int, fault: str
) -> None:
    machine = ring(failing(protocol, fault), ranks, hops, passes)
    assert explore(machine) > explore(ring(protocol, ranks, hops, passes))


@pytest.mark.parametrize("mutation", [*MUTATIONS, *PULL_MUTATIONS], ids=lambda mutation: mutation.name)
def test_each_mistake_goes_wrong_in_some_order(mutation: Mutation) -> None:
    with pytest.raises(Violation) as found:
        explore(mutation.use(mutation.broken))
    assert found.value.rule == mutation.rule


@pytest.mark.parametrize("name", sorted({mutation.name for mutation in [*MUTATIONS, *PULL_MUTATIONS]}))
def test_the_page_on_tests_names_each_mistake(name: str) -> None:
    page = Path(__file__).parents[2] / "docs" / "testing.md"
    assert f"| {name} |" in page.read_text(encoding="utf-8")


# --- what is no mistake ----------------------------------------------------------------------------------------------


def test_at_least_lets_two_messages_have_a_flag_each() -> None:
    assert explore(two_messages(Protocol(change=flags_of_each))) > 100


def test_equal_would_do_while_a_pair_has_one_flag_an_exchange() -> None:
    # The lane of the waiting rank stands there before the next flag can be raised; only an abort's paint is another.
    assert explore(two(Protocol(change=partial(mapped, exact)))) > 100


def test_a_wait_on_the_callers_stream_is_safe_only_with_several_queues() -> None:
    assert explore(two(changed(arrivals_on_caller))) > 50


@pytest.mark.parametrize("op", [Write, Wait])
@pytest.mark.parametrize("kind", list(WordKind))
def test_a_host_that_blocks_between_the_phases_loses_only_time(kind: WordKind, op: type) -> None:
    assert explore(two(changed(block_before, kind, op))) > 50


# --- larger rings, and the reductions --------------------------------------------------------------------------------


@pytest.mark.parametrize("protocol", [PUSH, ONE_QUEUE, PULL], ids=["push", "one queue", "pull"])
def test_eight_ranks_have_no_race_in_orders_drawn_by_chance(protocol: Protocol) -> None:
    machine = ring(protocol, 8, 7)
    events, end = drawn(machine, seed=0)
    assert machine.stuck(end) == "" and races(machine, events) == []


@pytest.mark.parametrize(
    "mutation",
    [each for each in MUTATIONS if each.rule == "ordered" and each.use is two and not each.broken.first_words],
    ids=lambda mutation: mutation.name,
)
def test_clocks_find_the_race_of_a_mistake_in_any_order(mutation: Mutation) -> None:
    machine = ring(mutation.broken, 4, 3)
    for seed in range(2):
        found = races(machine, drawn(machine, seed)[0])
        assert any("copy message" in str(race) for race in found)


@pytest.mark.parametrize(
    ("use", "protocol"),
    [
        (partial(ring, world=2, hops=1), PUSH),
        pytest.param(partial(ring, world=2, hops=2), PUSH, marks=slow),
        pytest.param(partial(ring, world=2, hops=1), failing(PUSH, "die"), marks=slow),
        pytest.param(partial(ring, world=2, hops=1), failing(PULL, "raise"), marks=slow),
    ],
)
def test_orders_that_are_left_out_matter_to_nothing(use: Use, protocol: Protocol) -> None:
    every = replace(protocol, machine={**protocol.machine, "reduced": False})
    assert explore(use(every)) > 2 * explore(use(protocol))


@slow
@pytest.mark.parametrize(
    "mutation", [each for each in MUTATIONS if not each.broken.machine], ids=lambda each: each.name
)
def test_a_mistake_is_found_among_all_orders_too(mutation: Mutation) -> None:
    broken = replace(mutation.broken, machine={"reduced": False})
    with pytest.raises(Violation) as found:
        explore(mutation.use(broken))
    # A flag before its data lets a rank also close beside its copies: which comes first is chance.
    assert found.value.rule in (mutation.rule, "mapped")
