"""Fragments, rows of history and scans of all ranks, simulated with numbers and compared with their definitions."""

from __future__ import annotations

import random
from collections import Counter

import numpy as np
import pytest

from ringattn.core.fragments import Fragments, fragments_of, halo_of, halo_rows_of, scan_of, transfers_of
from ringattn.core.layout import Layout, make_layout
from ringattn.errors import UnsupportedError

DRAWS = 400


def drawn_layout(draw: random.Random) -> tuple[Layout, tuple[int, ...], tuple[int, ...]]:
    """Draw a layout, the bounds of documents, and the node of each rank. Documents may be empty."""
    ranks = draw.choice([1, 2, 3, 4, 5, 8, 9, 12, 16, 24, 33])
    length = draw.choice([0, 1, 3, ranks, 50, 200, 997])
    bounds = (0, *sorted(draw.randint(0, length) for _ in range(draw.choice([0, 0, 1, 4, 29]))), length)
    name = draw.choice(["contiguous", "zigzag", "per_document", "documents"])
    per_node = draw.choice([1, 2, 3, 4, 8, 100])
    regular = tuple(rank // per_node for rank in range(ranks))
    mixed = tuple(draw.randrange(3) for _ in range(ranks))
    return make_layout(name, length, ranks, bounds), bounds, draw.choice([regular, regular, mixed])


def test_fragments_are_the_contiguous_ranges_of_one_document_on_one_rank():
    draw = random.Random(1)
    for _ in range(DRAWS):
        layout, bounds, _ = drawn_layout(draw)
        fragments = fragments_of(layout, bounds)
        for rank in range(layout.world_size):
            positions = layout.positions(rank)
            rows = np.arange(len(positions))
            new = np.diff(positions, prepend=-2) != 1
            new |= np.isin(positions, bounds)
            local = fragments.of(rank)
            assert fragments.row[local].tolist() == rows[new].tolist()
            assert fragments.start[local].tolist() == positions[new].tolist()
        counts = fragments.stop - fragments.start
        assert (counts > 0).all() and counts.sum() == layout.length
        assert set(fragments.start[fragments.first]) <= set(bounds) and set(fragments.stop[fragments.last]) <= set(
            bounds
        )


@pytest.mark.parametrize("width", [0, 1, 2, 3, 7])
def test_history_is_the_tokens_before_a_fragment_in_its_document(width: int):
    draw = random.Random(width)
    for _ in range(DRAWS // 4):
        layout, bounds, _ = drawn_layout(draw)
        fragments = fragments_of(layout, bounds)
        halos = [halo_of(layout, bounds, width, rank) for rank in range(layout.world_size)]
        for rank, halo in enumerate(halos):
            padded = np.full(halo.rows, -1)
            padded[halo.local] = layout.positions(rank)
            for peer, rows in halo.receives.items():
                assert (padded[rows] == -1).all(), "a row is written twice"
                padded[rows] = layout.positions(peer)[halos[peer].sends[rank]]
            expected: list[int] = []
            for fragment in fragments.of(rank):
                start, stop = int(fragments.start[fragment]), int(fragments.stop[fragment])
                before = range(start - width, start)
                expected += [token if token >= fragments.document_start[fragment] else -1 for token in before]
                expected += range(start, stop)
            assert padded.tolist() == expected
            assert set(halo.sends) == {peer for peer, other in enumerate(halos) if rank in other.receives}


@pytest.mark.parametrize("reverse", [False, True])
def test_a_scan_gives_each_fragment_the_state_before_it(reverse: bool):
    draw = random.Random(reverse)
    most_rounds = 0
    for _ in range(DRAWS // 2):
        layout, bounds, nodes = drawn_layout(draw)
        fragments = fragments_of(layout, bounds)
        transitions, states = np.random.default_rng(draw.randrange(2**32)).uniform(-1, 1, (2, len(fragments.start)))
        expected = sequential_scan(fragments, transitions, states, reverse)
        actual, rounds = simulated_scan(layout, bounds, nodes, transitions, states, reverse)
        most_rounds = max(most_rounds, rounds)
        np.testing.assert_allclose(actual, expected, rtol=1e-12, atol=1e-12)
    assert most_rounds > 4, "no chain was long enough for doubling over nodes"


def sequential_scan(fragments: Fragments, transitions: np.ndarray, states: np.ndarray, reverse: bool) -> np.ndarray:
    before = np.zeros(len(states))
    step = -1 if reverse else 1
    ends = fragments.last if reverse else fragments.first
    for index in range(len(states))[::step]:
        if index != ends[index]:
            before[index] = transitions[index - step] * before[index - step] + states[index - step]
    return before


def simulated_scan(
    layout: Layout,
    bounds: tuple[int, ...],
    nodes: tuple[int, ...],
    transitions: np.ndarray,
    states: np.ndarray,
    reverse: bool,
) -> tuple[np.ndarray, int]:
    """Run the scans of all ranks with one number per state. Entries that a rank must not read are NaN."""
    fragments = fragments_of(layout, bounds)
    ranks = range(layout.world_size)
    are_parts = fragments.first < fragments.last
    local = [each[are_parts[each]] for each in map(fragments.of, ranks)]
    scans = [scan_of(layout, bounds, nodes, rank, reverse) for rank in ranks]
    tables = [np.full((2, scan.entries), np.nan) for scan in scans]
    for rank in ranks:
        tables[rank][:, : len(local[rank])] = transitions[local[rank]], states[local[rank]]
    (rounds,) = {len(scan.rounds) for scan in scans}
    for number in range(rounds):
        messages = {}
        for rank, scan in enumerate(scans):
            for part in scan.rounds[number].sends:
                assert part.peer != rank and (rank, part.peer) not in messages
                messages[rank, part.peer] = tables[rank][0, part.transitions], tables[rank][1, part.states]
        for rank, scan in enumerate(scans):
            table = tables[rank]
            table[:, scan.local :] = np.nan  # what an earlier round received
            for part in scan.rounds[number].receives:
                table[0, part.transitions], table[1, part.states] = messages.pop((part.peer, rank))
            for update in scan.rounds[number].updates:
                (factor, state), (earlier, before) = table[:, update.right], table[:, update.left]
                table[0, update.right] = np.where(update.whole, factor * earlier, np.nan)
                table[1, update.right] = factor * before + state
        assert not messages, "a message has no receiver"
    actual = np.zeros(len(states))
    for rank, scan in enumerate(scans):
        known = scan.initial >= 0
        actual[local[rank][known]] = tables[rank][1, scan.initial[known]]
    return actual, rounds


def test_documents_that_are_not_cut_exchange_nothing():
    layout = make_layout("documents", 40, 4, (0, 10, 20, 30, 40))
    for rank in range(4):
        assert scan_of(layout, layout.cuts, (0,) * 4, rank, False).sent() == (0, 0)
        assert not halo_of(layout, layout.cuts, 3, rank).sends


def test_zigzag_sends_fewer_states_by_doubling_than_directly_from_nine_ranks_on():
    sent = {}
    for ranks in (8, 9, 64):
        layout = make_layout("zigzag", 64 * ranks, ranks)
        scans = [scan_of(layout, layout.cuts, (0,) * ranks, rank, False) for rank in range(ranks)]
        sent[ranks] = sum(scan.sent()[1] for scan in scans)
    # Direct: 15 fragments (the middle two are one), each is sent to the other ranks with a later fragment.
    assert sent[8] == 7 * 7 + sum(range(8))
    assert sent[64] < 2 * 64 * 8


def test_striped_layouts_have_no_fragments():
    with pytest.raises(UnsupportedError, match=r"striped.*contiguous tokens"):
        fragments_of(make_layout("striped", 40, 4), (0, 40))


@pytest.mark.parametrize("reverse", [False, True])
def test_messages_of_all_ranks_are_those_of_their_plans(reverse: bool):
    draw = random.Random(7)
    for _ in range(DRAWS // 4):
        layout, bounds, nodes = drawn_layout(draw)
        ranks = range(layout.world_size)
        scans = [scan_of(layout, bounds, nodes, rank, reverse) for rank in ranks]
        transfers = transfers_of(layout, bounds, nodes, reverse)
        assert {len(scan.rounds) for scan in scans} == {len(transfers)}
        for number, each in enumerate(transfers):
            counted = Counter(zip(each.source.tolist(), each.target.tolist(), strict=True))
            moved = Counter(dict.fromkeys(counted, 0))
            moved.update(zip(each.source[each.transition].tolist(), each.target[each.transition].tolist(), strict=True))
            parts = [(rank, part) for rank in ranks for part in scans[rank].rounds[number].sends]
            assert counted == {(rank, part.peer): len(part.states) for rank, part in parts}
            assert moved == {(rank, part.peer): len(part.transitions) for rank, part in parts}
        width = draw.choice([0, 1, 3])
        rows: Counter[tuple[int, int]] = Counter()
        for sender, receiver, count in zip(*halo_rows_of(layout, bounds, width), strict=True):
            rows[int(sender), int(receiver)] += int(count)
        halos = [halo_of(layout, bounds, width, rank) for rank in ranks]
        assert rows == {
            (rank, peer): len(sent) for rank in ranks for peer, sent in halos[rank].sends.items() if peer != rank
        }
