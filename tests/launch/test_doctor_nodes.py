"""What `ringattn doctor` measures and says of ranks of several nodes, and of two hosts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ringattn.bench.hosts import RailedNodes
from ringattn.errors import UnsupportedError
from ringattn.launch.doctor import doctor
from ringattn.launch.doctor import doctor as doctor_module
from ringattn.launch.doctor.doctor import examine, rounds
from ringattn.launch.doctor.probes import ERROR, NOTE, OK, WARNING, Finding
from ringattn.planner.cluster import LinkClass, Links
from ringattn.ring import Ring
from ringattn.testing import run_ranks
from ringattn.transport.location import Location

ROOT = Path(__file__).resolve().parents[2]

# --- ranks of several nodes ------------------------------------------------------------------------------------------


def test_pairs_that_are_measured_are_apart() -> None:
    pcie = LinkClass.PCIE
    links = Links((0, 0, 0, 1, 2, 2), LinkClass.NVLINK, ((0, 2, pcie), (1, 2, pcie)))
    assert rounds(links) == [[(0, 1), (4, 5)], [(0, 2)], [(0, 3)], [(3, 4)]]
    assert rounds(Links((0, 0))) == [[(0, 1)]]
    assert rounds(Links((0, 1, 0))) == [[(0, 2)], [(0, 1)]]
    for one in rounds(Links((0, 0, 1, 1, 2, 2, 3, 3))):
        ranks = [rank for pair in one for rank in pair]
        assert len(set(ranks)) == len(ranks)


def test_ranks_of_two_nodes_measure_inside_and_between(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("REPEATS", "PAIR_REPEATS"):
        monkeypatch.setattr(doctor_module, name, dict.fromkeys(getattr(doctor_module, name), 1))
    locations = tuple(Location(f"host-{name}", name, rank, 0) for rank, name in enumerate("aba"))

    def body(ring: Ring) -> dict[str, Any]:
        ring.transport.locations = locations
        ring.links = Links((0, 1, 0), LinkClass.MEMORY)
        return examine(ring)

    answers = run_ranks(3, body)
    assert [[(pair["peer"], pair["link"], pair["across"]) for pair in one["pairs"]] for one in answers] == [
        [(2, "host memory", False), (1, "network", True)], [], [],
    ]  # fmt: skip
    found = {one.topic: one for one in doctor.judged(answers)}
    assert (
        found["links"].text.startswith("inside a node ") and "over host memory (ranks 0 and 2)" in found["links"].text
    )
    assert "between nodes" in found["links"].text and "a factor of " in found["links"].text
    # Three ranks of two nodes cross twice in whatever order.
    assert "rank order" not in found and answers[1]["network"] and not answers[0]["network"] + answers[2]["network"]


def answer(rank: int, **more: Any) -> dict[str, Any]:
    """What a rank of its own node answers."""
    return {"rank": rank, "host": f"h{rank}", "device": f"cuda:{rank}", "transport": "nccl", "torch": "2",
            "python": "3", "ringattn": "0", "message_bytes": 2**24, "bandwidth": 1e9,
            "latency_us": 1.0, "error": 0.0, "nics": [], **more}  # fmt: skip


def test_speed_beside_what_the_port_says() -> None:
    inside = {"peer": 1, "link": "NVLink", "bandwidth": 300e9, "latency_us": 10.0, "across": False}
    between = {"peer": 2, "link": "network", "bandwidth": 20e9, "latency_us": 30.0, "across": True}
    slow = {**between, "bandwidth": 10e9}
    nics = [["mlx5_0:1", 400.0]]

    def told(*pairs: dict[str, Any]) -> Finding:
        found = doctor.judged([answer(0, pairs=pairs, nics=nics), answer(1), answer(2)])
        return next(one for one in found if one.topic == "links")

    assert told(inside, between).text == (
        "inside a node 300.00 GB/s and 10 µs over NVLink (ranks 0 and 1); "
        "between nodes 20.00 GB/s and 30 µs over network (ranks 0 and 2); a factor of 15"
    )
    assert told(inside, between).level == NOTE and "a port of rank 0 says 50 GB/s" in told(inside, between).advice
    assert told(inside, {**between, "bandwidth": 30e9}).level == OK
    assert "10.00 GB/s" in told(between, slow).text  # the slowest of a class counts
    assert doctor.judged([answer(0), answer(1)])[-1].topic == "exchange"


def test_order_and_other_nodes_are_told() -> None:
    trouble = Finding("memlock", ERROR, "a process may lock 64 KiB", "ulimit -l unlimited", "why")._asdict()
    fine = Finding("ACS", OK, "no bridge")._asdict()
    order = "ranks 0,2 on node 0; 1,3 on node 1: too often (node 0 is h0). Number the ranks of a node"
    found = doctor.judged([answer(0, order=order), answer(1, network=[trouble, fine])])
    told = {one.topic: one for one in found}
    assert told["memlock, h1"].level == ERROR and "ACS, h1" not in told
    assert told["rank order"].level == WARNING and told["rank order"].advice == "Number the ranks of a node"


# --- two hosts -------------------------------------------------------------------------------------------------------

BYTES_S = 25e6


@pytest.mark.slow
def test_two_hosts_with_a_slow_link_between() -> None:
    try:
        hosts = RailedNodes(2, BYTES_S)
    except UnsupportedError as error:
        pytest.skip(str(error))
    with hosts:
        answers = hosts.run("ringattn.launch.doctor.doctor:examine", {}, print, "auto")
    pairs = {(one["rank"], pair["peer"]): pair for one in answers for pair in one["pairs"]}
    inside, between = pairs[0, 1], pairs[0, 2]
    assert (inside["link"], inside["across"]) == ("host memory", False)
    assert (between["link"], between["across"]) == ("network", True)
    assert BYTES_S / 10 < between["bandwidth"] < 1.5 * BYTES_S  # the burst passes at once
    assert inside["bandwidth"] > 4 * between["bandwidth"]
    told = {finding.topic: finding for finding in doctor.judged(answers)}
    assert "between nodes 0.0" in told["links"].text and "a factor of" in told["links"].text
