"""Two nodes with slow links between their ranks: what crosses, what is predicted with, what the table says."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from ringattn.bench import two_nodes
from ringattn.bench.clock import Sample
from ringattn.bench.hosts import RailedNodes, _shares, address
from ringattn.bench.timed_calls import PASSES, plans_of
from ringattn.bench.two_nodes import CALLS, PLACES, RANKS, SCHEDULES, TwoNodesOptions, cluster_of, crossing_bytes
from ringattn.errors import InputError, UnsupportedError
from ringattn.launch.measure.calibrate import FAR, MESSAGE_BYTES, NEAR
from ringattn.planner.cluster import Cluster
from ringattn.planner.simulate import simulate
from ringattn.ring import Ring
from ringattn.transport.base import Message
from tests.launch.test_calibrate import REFERENCE, made_up

NODES = replace(REFERENCE, cores=1, ranks_per_node=PLACES, node_bandwidth=25e6, node_latency_s=1e-4)
OPTIONS = TwoNodesOptions(calls=1, repeats=1, results="")
SHARD = 4096 // RANKS * 8 * 2 * 64 * 4  # bytes of K and V that a rank owns in the first call


@pytest.mark.parametrize(
    ("schedule", "forward", "backward"),
    # Backward gradients cross as often as what they are gradients of; Ulysses' queries, keys and values there, outputs
    # back, a quarter of each to either rank of the other node.
    [
        ("ring", 3, 6),
        ("double_ring", 1, 2),
        ("all_gather", 2, 4),
        ("direct", 2, 4),
        ("ulysses", 1, None),
        ("ulysses_ring", 1, 2),
    ],
)
def test_what_crosses_between_the_nodes(schedule: str, forward: int, backward: int | None) -> None:
    for back, shards in ((False, forward), (True, backward)):
        plans = plans_of(CALLS[0]._replace(schedule=schedule), RANKS, back, NODES)
        if shards is not None:
            assert crossing_bytes(plans, NODES) == pytest.approx(shards * SHARD, rel=0.01), (schedule, back)


def test_constants_of_both_kinds_of_messages_are_found_again() -> None:
    seconds = made_up(NODES)
    for nbytes in MESSAGE_BYTES:
        seconds[f"{FAR} {nbytes}"] = 1e-4 + nbytes / 25e6
    assert f"{NEAR} {MESSAGE_BYTES[0]}" in seconds
    by_rank = [{"seconds": {name: [value] for name, value in seconds.items()}, "jobs": 4}] * RANKS
    found = cluster_of(by_rank, 1, 25.0)
    assert found.node_bandwidth == pytest.approx(25e6) and found.node_latency_s == pytest.approx(1e-4)
    assert found.bandwidth == pytest.approx(NODES.bandwidth) and found.cores == 1 and found.ranks_per_node == PLACES


def samples(cluster: Cluster, slower: dict[str, float]) -> list[dict[str, list[Sample]]]:
    """What nodes would measure that take just what is predicted, times `slower` by schedule."""
    found = []
    for shape in two_nodes.shapes(OPTIONS.calls):
        times = slower.get(shape.schedule, 1.0)
        seconds = {
            name: simulate(plans_of(shape, RANKS, name == "backward", cluster), cluster).total_us / 1e6 * times
            for name in PASSES
        }
        found.append({name: [Sample(value, value, 0.0)] for name, value in seconds.items()})
    return found


def test_the_table_says_how_far_off_and_whether_the_choice_was_right() -> None:
    exact = two_nodes.table_of(OPTIONS, NODES, samples(NODES, {}))
    assert len(exact.rows) == len(SCHEDULES) * len(PASSES)
    assert {row[6] for row in exact.rows} == {"+0.0%"} and all(row[7] == row[8] for row in exact.rows)
    assert "median error 0.0%" in exact.notes[-1] and "in 2 of 2 passes" in exact.notes[-1]
    gains = {row[2]: float(row[7]) for row in exact.rows if row[1] == "forward"}
    assert gains["ring"] == 1.0 and gains["double_ring"] > 1.5 * gains["direct"]
    wrong = two_nodes.table_of(
        OPTIONS, NODES, samples(NODES, {"double_ring": 4.0, "ulysses": 4.0, "ulysses_ring": 4.0})
    )
    assert "greatest 75.0%" in wrong.notes[-1] and "in 0 of 2 passes" in wrong.notes[-1]


@pytest.mark.parametrize("word", ["rate_mb=0", "repeats=0", "rounds=0", "calls=0", "calls=9"])
def test_bad_options_are_refused(word: str) -> None:
    with pytest.raises(InputError, match="must be positive"):
        two_nodes.main([word, "results="])


def test_nodes_share_processors_and_node_1_connects() -> None:
    assert _shares([3, 4, 5, 7]) == [[3, 4], [5, 7]] and _shares([2]) == [[2], [2]] and _shares([1, 2, 3]) == [[1], [2]]
    # Gloo connects from the greater address to the smaller one.
    assert max(address(0, place) for place in range(9)) < min(address(1, place) for place in range(9))


def probe(ring: Ring, nbytes: int) -> list[int]:
    """Every rank sends `nbytes` to each rank of the other node; the last byte of each, and this rank's node."""
    peers = [rank for rank in range(RANKS) if rank // PLACES != ring.rank // PLACES]
    sent = ring.transport.allocate(nbytes)
    sent.fill_(ring.rank)
    received = [ring.transport.allocate(nbytes) for _ in peers]
    sends = [Message(peer, sent, "probe") for peer in peers]
    ring.transport.exchange(sends, [Message(*one, "probe") for one in zip(peers, received, strict=True)]).wait()
    return [int(x.view(torch.uint8)[-1]) for x in received]


@pytest.mark.slow
def test_every_rail_carries_as_much_and_nothing_is_left() -> None:
    try:
        nodes = RailedNodes(PLACES, 100e6)
    except UnsupportedError as error:
        pytest.skip(str(error))
    nbytes = 1 << 20

    def silent(line: str) -> None:
        """Shows nothing."""

    with nodes:
        found: list[Any] = nodes.run("tests.bench.test_two_nodes:probe", {"nbytes": nbytes}, silent, "shm")
        assert found == [[2, 3], [2, 3], [0, 1], [0, 1]]
        for by_place in nodes.sent_bytes():
            assert all(2 * nbytes <= sent <= 2.1 * nbytes for sent in by_place), nodes.sent_bytes()
    with pytest.raises(Exception, match=r"No such file|Cannot open|does not exist|non-zero"):
        nodes.sent_bytes()
