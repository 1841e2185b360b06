"""Clusters: valid constants, presets with their sources, and files that are read, or refused for a wrong constant."""

from __future__ import annotations

import json
import re
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringattn.cli import main
from ringattn.core.geometry import UNBOUNDED, Band, StridedRange, Tile, TokenRange
from ringattn.core.tiling import TileTable
from ringattn.errors import InputError
from ringattn.launch.capacity.hardware import PRESETS
from ringattn.launch.measure.environment import hardware
from ringattn.planner.cluster import (
    CLUSTERS,
    REFERENCE,
    UNITS,
    Cluster,
    LinkClass,
    Links,
    call_work,
    cluster_named,
    different_rows,
    numbered,
    pair_s,
    work_s,
)
from tests.strategies import simple

GOOD: dict[str, Any] = {"name": "mine", "flops": 1e12, "bandwidth": 10**9, "latency_s": 0, "cores": None}


def written(folder: Path, constants: Any) -> str:
    """Write a file of constants as `ringattn calibrate` does, and return its path."""
    file = folder / "mine.json"
    file.write_text(json.dumps({"constants": constants, "date": "2026-11-21"}))
    return str(file)


def test_presets_say_where_they_come_from() -> None:
    assert {"a100", "h100", "h200", "b200", "gb200", "l20", "rtx4090", "cpu"} == set(CLUSTERS)
    for name, cluster in CLUSTERS.items():
        assert cluster_named(name) is cluster
        assert cluster.source and not cluster.calibrated  # a preset is not measured on the user's machine
        assert re.search(r"\((published|derived|measured)", cluster.name), "a prediction shows what it rests on"
    assert len({cluster.name for cluster in CLUSTERS.values()}) == len(CLUSTERS)


@pytest.mark.parametrize(("name", "hardware"), [("a100", "a100-80"), ("h100", "h100"), ("h200", "h200"),
                                                ("b200", "b200"), ("gb200", "b200"),
                                                ("rtx4090", "rtx4090")])  # fmt: skip
def test_no_preset_is_above_the_makers_peaks(name: str, hardware: str) -> None:
    cluster, peak = CLUSTERS[name], PRESETS[hardware]
    assert cluster.flops < peak.flops and cluster.backward_flops is not None and cluster.backward_flops < cluster.flops
    assert cluster.bandwidth <= peak.link_bytes_s
    assert cluster.node_bandwidth is not None and cluster.node_bandwidth < cluster.bandwidth


def test_every_number_has_a_unit() -> None:
    numbers = {field.name for field in fields(Cluster)} - {"name", "source", "calibrated", "links", "recognised"}
    assert set(UNITS) == numbers
    assert [field.name for field in fields(Cluster)][:4] == ["name", "flops", "bandwidth", "latency_s"]


@pytest.mark.parametrize("key", list(UNITS))
def test_impossible_constants_are_refused(key: str) -> None:
    facts = asdict(REFERENCE)
    for value in (-1, float("nan")):
        with pytest.raises(InputError, match=f"{key}="):
            Cluster(**{**facts, key: value})
    if key in ("flops", "bandwidth", "cores", "copy_bytes_s"):
        with pytest.raises(InputError, match="more than 0"):
            Cluster(**{**facts, key: 0})


def test_machines_and_links() -> None:
    cluster = Cluster("two a machine", 1, 100, 1, ranks_per_node=2, node_bandwidth=10, pcie_bandwidth=40)
    assert [cluster.node_of(rank) for rank in range(5)] == [0, 0, 1, 1, 2]
    assert cluster.link_class(0, 1) is LinkClass.UNKNOWN and cluster.link_class(1, 2) is LinkClass.NETWORK
    assert cluster.link(LinkClass.UNKNOWN) == cluster.link(LinkClass.NVLINK) == (1, 100)
    assert cluster.link(LinkClass.NETWORK) == (1, 10) and cluster.link(LinkClass.PCIE) == (1, 40)
    assert cluster.slowest([LinkClass.NVLINK, LinkClass.PCIE]) == (1, 40)
    plain = Cluster("plain", 1, 100, 1)
    assert plain.link_class(0, 999) is LinkClass.UNKNOWN
    assert {plain.link(kind) for kind in LinkClass} == {(1, 100)}


def test_a_pair_has_less_than_all_peers_together() -> None:
    cluster = Cluster(
        "pairs", 1, 100, 1, ranks_per_node=2, node_bandwidth=10, node_peer_bandwidth=4, peer_bandwidth=50,
        pcie_bandwidth=20,
    )  # fmt: skip
    # A rank sends 600 bytes to one peer, or 100 bytes to each of six peers.
    assert cluster.travel_s(LinkClass.NVLINK, 600, 600) == 1 + 12 and cluster.travel_s(LinkClass.NVLINK, 600, 100) == 7
    assert cluster.travel_s(LinkClass.NETWORK, 600, 600) == 151 and cluster.travel_s(LinkClass.NETWORK, 600, 100) == 61
    assert cluster.travel_s(LinkClass.PCIE, 600, 600) == 31
    assert cluster.by_copy_engines().travel_s(LinkClass.UNKNOWN, 600, 600) == 7
    plain = Cluster("plain", 1, 100, 1)
    assert {plain.travel_s(kind, 600, 600) for kind in LinkClass} == {7}


def test_links_of_a_ring_join_machines_that_tell_no_nodes() -> None:
    links = Links((0, 0, 1), LinkClass.NVLINK)
    joined = REFERENCE.joined(links)
    assert [joined.node_of(rank) for rank in range(3)] == [0, 0, 1]
    assert [joined.link_class(rank, 0) for rank in (1, 2)] == [LinkClass.NVLINK, LinkClass.NETWORK]
    assert joined.joined(Links((0, 1, 2))) is joined and REFERENCE.joined(None) is REFERENCE
    assert CLUSTERS["h100"].joined(links) is CLUSTERS["h100"]  # a preset has its own nodes of eight ranks
    with pytest.raises(InputError, match=r"cluster='no machine, .*': its links join 3 ranks, but there are 4"):
        joined.check_ranks(4)


def test_a_file_is_read(tmp_path: Path) -> None:
    assert cluster_named(written(tmp_path, GOOD)) == Cluster("mine", 1e12, 1e9, 0)
    everything = asdict(Cluster("all", 1e12, 1e9, 1e-6, cores=2, calibrated=True, block_keys=512, sync_s=1e-5,
                                peer_bandwidth=5e8, message_sms=2, state_passes=2))  # fmt: skip
    assert asdict(cluster_named(written(tmp_path, everything))) == everything
    bare = tmp_path / "no_suffix"
    bare.write_text(json.dumps({"constants": GOOD}))
    assert cluster_named(str(bare)).name == "mine"


@pytest.mark.parametrize(
    ("constants", "complaint"),
    [
        ({**GOOD, "flop": 1}, "flop is not a constant"),
        ({**GOOD, "flops": "fast"}, "flops='fast' should be float"),
        ({**GOOD, "cores": 1.5}, "cores=1.5 should be int"),
        ({**GOOD, "flops": None}, "flops=None should be float"),
        ({**GOOD, "flops": True}, "flops=True should be float"),
        ({**GOOD, "calibrated": 1}, "calibrated=1 should be bool"),
        ({**GOOD, "flops": 0}, "flops=0: must be more than 0"),
        ({key: value for key, value in GOOD.items() if key != "bandwidth"}, "bandwidth is missing"),
        ([1, 2], "has no constants"),
    ],
)
def test_a_wrong_file_is_refused(tmp_path: Path, constants: Any, complaint: str) -> None:
    with pytest.raises(InputError, match=re.escape(complaint)):
        cluster_named(written(tmp_path, constants))


def test_names_that_are_none(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"cluster=h10: did you mean h100\?"):
        cluster_named("h10")
    with pytest.raises(InputError, match=r"No such file.*ringattn calibrate out="):
        cluster_named(str(tmp_path / "absent.json"))
    broken = tmp_path / "broken.json"
    broken.write_text("{")
    with pytest.raises(InputError, match="not JSON"):
        cluster_named(str(broken))


def test_explain_predicts_for_no_machine_that_nobody_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)

    def explained() -> str:
        assert main(["explain", "ranks=2", "tokens=4096"]) == 0
        return capsys.readouterr().out

    without = explained()
    assert "predicted: none: this machine is not calibrated" in without and not re.search(r"predicted \d", without)
    calibration = {"constants": GOOD, "hardware": hardware()}
    (tmp_path / "calibrated.json").write_text(json.dumps(calibration))
    assert re.search(r"predicted [\d.]+ [mu]?s on mine", explained())
    (tmp_path / "calibrated.json").write_text(json.dumps({**calibration, "hardware": "8 x another GPU"}))
    assert "predicted: none" in explained()
    (tmp_path / "elsewhere.json").write_text(json.dumps(calibration))
    monkeypatch.setenv("RINGATTN_CALIBRATION", "elsewhere.json")
    assert re.search(r"predicted [\d.]+ [mu]?s on mine", explained())
    monkeypatch.setenv("RINGATTN_CALIBRATION", "none.json")
    assert main(["explain", "ranks=2", "tokens=4096"]) == 2
    assert "RINGATTN_CALIBRATION=none.json: there is no such file" in capsys.readouterr().err


def test_explain_predicts_for_a_preset_or_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ["ranks=2", "tokens=4096"]
    shown = {}
    for name in ("h100", "a100", written(tmp_path, {**GOOD, "source": "a stopwatch"})):
        assert main(["explain", *sizes, f"cluster='{name}'"]) == 0
        shown[name] = capsys.readouterr().out
        cluster = cluster_named(name)
        assert f"s on {cluster.name}\n" in shown[name] and f"is based on {cluster.source}" in shown[name]
    assert len({re.search(r"predicted ([\d.]+ [mu]?s) on", text)[1] for text in shown.values()}) == 3  # type: ignore[index]
    assert main(["explain", *sizes, "cluster=h20"]) == 2
    assert "did you mean h200?" in capsys.readouterr().err


# --- reserved multiprocessors ----------------------------------------------------------------------------------------


@given(
    st.lists(
        st.tuples(st.integers(1, 6), st.integers(0, 12), st.integers(1, 3), st.integers(0, 2), st.integers(1, 2)),
        max_size=8,
    )
)
def test_different_rows_count_once_for_each_heads_and_stride(
    tiles: list[tuple[int, int, int, int, int]],
) -> None:
    columns = np.array(tiles, np.int64).reshape(-1, 5)
    seen = {
        (head, heads, stride if count > 1 else 1, first + number * stride, served)
        for count, first, stride, head, heads in tiles for number in range(count) for served in range(heads)
    }  # fmt: skip
    assert different_rows(columns[:, :3], columns[:, 3], columns[:, 4]) == len(seen)


def test_a_kernel_that_accumulates_inside_moves_a_row_once_per_call() -> None:
    problem = simple("contiguous", 64, 1).problem
    queries, band = TokenRange(StridedRange(0, 64), StridedRange(0, 64)), Band(-UNBOUNDED, UNBOUNDED)
    keys = [TokenRange(rows, rows) for rows in (StridedRange(0, 32), StridedRange(32, 32))]
    halves = TileTable.of([Tile(queries, half, band, StridedRange(0, 1)) for half in keys])
    torch_kernels = Cluster("torch", 1e12, 1e9, 0, copy_bytes_s=1e9)
    inside = replace(torch_kernels, state_passes=2)
    work = call_work(problem, halves, False, 0)
    rows = 64 * 64 * 4  # a row of dQ in float32
    arithmetic_s = work.pairs * pair_s(problem, inside, False)
    assert work_s(problem, work, inside, False) == pytest.approx(arithmetic_s + 2 * rows / 1e9)
    assert work_s(problem, work, torch_kernels, False) == pytest.approx(arithmetic_s + 3 * 2 * rows / 1e9)


def test_a_margin_takes_its_share_of_the_arithmetic_and_of_nothing_else() -> None:
    h100 = CLUSTERS["h100"]
    left = h100.leaving(8)
    assert (left.flops, left.backward_flops) == (648e12 * 124 / 132, 561e12 * 124 / 132)
    # Messages use the reserved multiprocessors first.
    assert [h100.leaving(margin).message_sms for margin in (0, 3, 8, 20)] == [8, 5, 0, 0]
    assert replace(left, flops=h100.flops, backward_flops=h100.backward_flops, message_sms=8) == h100
    assert REFERENCE.leaving(4).backward_flops is None and h100.leaving(0) is h100
    assert {name: cluster.sms for name, cluster in CLUSTERS.items()} == {
        "a100": 108, "h100": 132, "h200": 132, "b200": 148, "gb200": 148, "l20": 92, "rtx4090": 128, "cpu": None
    }  # fmt: skip


@pytest.mark.parametrize(
    ("name", "margin", "total"),
    [("h100", 132, "SMs of 132"), ("h100", -1, "of 132"), ("cpu", 4, "of an unknown number")],
)
def test_an_impossible_margin_is_refused(name: str, margin: int, total: str) -> None:
    with pytest.raises(InputError, match=f"sm_margin={margin}: cannot reserve this number of .*{total}"):
        CLUSTERS[name].leaving(margin)


# --- links between ranks ---------------------------------------------------------------------------------------------


def test_the_class_of_a_pair() -> None:
    links = Links((0, 0, 0, 1), LinkClass.NVLINK, ((0, 2, LinkClass.PCIE),))
    assert links.of(0, 1) is links.of(1, 0) is links.of(2, 1) is LinkClass.NVLINK
    assert links.of(0, 2) is links.of(2, 0) is LinkClass.PCIE
    assert links.of(3, 2) is links.of(1, 3) is LinkClass.NETWORK
    assert links.hops() == (LinkClass.NVLINK, LinkClass.NVLINK, LinkClass.NETWORK, LinkClass.NETWORK)
    assert Links((0,)).hops() == ()
    assert hash(links) == hash(Links((0, 0, 0, 1), LinkClass.NVLINK, ((0, 2, LinkClass.PCIE),)))


@pytest.mark.parametrize(
    ("nodes", "crossings", "least"),
    [
        ((0,), 0, 0),
        ((0, 0, 0), 0, 0),
        ((0, 0, 1, 1), 2, 2),
        ((0, 1, 0, 1), 4, 2),
        ((0, 1, 1, 0), 2, 2),  # the ring enters each node once; ranks 3 and 0 share a node
        ((0, 0, 0, 1), 2, 2),
        ((0, 0, 1, 2, 2, 2), 3, 3),
        ((0, 1, 2, 0, 1, 2, 0), 6, 3),
        ((0, 0, 1, 2, 0), 3, 3),
    ],
)
def test_crossings(nodes: tuple[int, ...], crossings: int, least: int) -> None:
    assert (Links(nodes).crossings, Links(nodes).least_crossings) == (crossings, least)


def test_nodes_are_counted_as_they_appear() -> None:
    assert numbered(["b", "a", "b", "c"]) == (0, 1, 0, 2)
    for wrong in ((1, 0), (0, 2), (0, 1, 3)):
        with pytest.raises(InputError, match="number the nodes from 0"):
            Links(wrong)


def test_the_classes_inside_of_nodes() -> None:
    nvlink, pcie = LinkClass.NVLINK, LinkClass.PCIE
    assert Links((0, 1, 2), nvlink).classes_inside() == set()
    assert Links((0, 0, 1), nvlink).classes_inside() == {nvlink}
    assert Links((0, 0, 1), nvlink, ((0, 1, pcie),)).classes_inside() == {pcie}
    assert Links((0, 0, 0, 1), nvlink, ((0, 2, pcie), (0, 3, nvlink))).classes_inside() == {nvlink, pcie}
