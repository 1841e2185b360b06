"""Which machines a ring takes itself to be on: presets and calibrations that fit in every point, or why none."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from ringattn.errors import InputError
from ringattn.planner.cluster import CLUSTERS, REFERENCE, Cluster, LinkClass
from ringattn.ring import Ring
from ringattn.testing import run_ranks
from ringattn.transport import location
from ringattn.transport.local import LocalTransport
from ringattn.transport.location import (
    DEVICES,
    OVER_PCIE,
    Location,
    Nic,
    Recognised,
    links_of,
    own_calibration,
    recognise,
)

H100 = "NVIDIA H100 80GB HBM3"
RDMA = tuple(Nic(f"mlx5_{port}:1", 400.0) for port in range(8))
OWN = Cluster("4 cores (calibrated)", 1e11, 1e9, 1e-4, calibrated=True, cores=4)
CALIBRATION = json.dumps({"constants": asdict(OWN), "transport": "shm"})


def gpus(nodes: Sequence[int], kind: LinkClass = LinkClass.NVLINK, **facts: Any) -> tuple[Location, ...]:
    """A GPU a rank, on these nodes; on each all are joined by links of this class."""
    facts = {"device": H100, "sms": 132, "nics": RDMA, **facts}
    return tuple(
        Location(
            f"host-{node}", f"boot/{node}", rank, 0, f"gpu-{rank}", **facts,
            links=tuple((f"gpu-{peer}", kind) for peer, other in enumerate(nodes) if other == node and peer != rank),
        )
        for rank, node in enumerate(nodes)
    )  # fmt: skip


def of(locations: Sequence[Location], transport: str = "nccl") -> Recognised:
    return recognise(locations, links_of(locations), transport)


def test_a_preset_is_recognised_by_the_names_of_its_gpus_and_their_links() -> None:
    two = of(gpus([0] * 8 + [1] * 8))
    assert two == (
        replace(CLUSTERS["h100"], recognised=True),
        "recognised: 16 x NVIDIA H100 80GB HBM3 on 2 nodes, NVLink inside; preset h100",
    )
    assert (
        of(gpus([0] * 4, device="NVIDIA H200"))[1]
        == "recognised: 4 x NVIDIA H200 on 1 node, NVLink inside; preset h200"
    )
    # A rank a node: nothing is inside.
    assert of(gpus([0, 1]))[1] == "recognised: 2 x NVIDIA H100 80GB HBM3 on 2 nodes; preset h100"
    assert {DEVICES[name] for name in DEVICES} | {"cpu"} == set(CLUSTERS)
    for device, name in DEVICES.items():
        found = of(gpus([0] * 4, device=device, sms=CLUSTERS[name].sms))
        assert (found.cluster is None) == (name in OVER_PCIE), device


def test_slower_network_ports_are_counted_and_faster_ones_are_not() -> None:
    slow = of(gpus([0, 0, 1, 1], nics=(Nic("eth0", 100.0),)))
    assert slow.cluster is not None and slow.cluster.node_bandwidth == pytest.approx(100e9 / 8 / 2)
    assert slow.why.endswith("preset h100, but 6.25 GB/s a rank between nodes by the rates of their ports")
    one = gpus([0, 0, 1, 1])
    least = of((*one[:2], *(replace(other, nics=RDMA[:1]) for other in one[2:]))).cluster
    assert least is not None and least.node_bandwidth == pytest.approx(25e9)
    first = of((*(replace(other, nics=RDMA[:1]) for other in one[:2]), *one[2:])).cluster
    assert first is not None and first.node_bandwidth == least.node_bandwidth


@pytest.mark.parametrize(
    ("locations", "reason"),
    [
        (gpus([0] * 4, device="NVIDIA H100 PCIe", sms=114), "there is no preset of NVIDIA H100 PCIe"),
        (gpus([0] * 4, sms=16), "has 16 multiprocessors, and the preset has 132"),
        (gpus([0] * 4, LinkClass.PCIE), "GPUs of a node are joined by: PCIe; the preset has NVLink"),
        (gpus([0] * 4, LinkClass.UNKNOWN), "GPUs of a node are joined by: unknown"),
        (gpus([0] * 4, device="NVIDIA L20", sms=92), "host bridges that GPUs over PCIe share"),
        (gpus([0] * 4 + [1] * 4, device="NVIDIA GB200", sms=148), "whether NVLink joins the nodes"),
        (gpus([0, 1], nics=()), "a node does not tell the rate of its network ports"),
        (gpus([0, 1], nics=(Nic("eth0", None),)), "a node does not tell the rate of its network ports"),
        (tuple(replace(one, machine=None) for one in gpus([0, 1])), "a rank cannot tell which machine it is on"),
        (
            (*gpus([0] * 4)[:3], replace(gpus([0] * 4)[3], device="NVIDIA A100-SXM4-80GB", sms=108)),
            "rank 3 has NVIDIA A100-SXM4-80GB of 108 multiprocessors, and rank 0 has NVIDIA H100 80GB HBM3 of 132",
        ),
        ((*gpus([0] * 2)[:1], Location("host-0", "boot/0", 1, 0)), "rank 1 has no GPU"),
        (tuple(Location("host", "boot", rank, 0) for rank in range(2)), "the ranks have no GPU"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_not_recognised(locations: tuple[Location, ...], reason: str) -> None:
    found = of(locations)
    assert found.cluster is None and found.why.startswith("not recognised: ") and reason in found.why


def test_a_calibration_goes_before_a_preset_where_all_ranks_have_it() -> None:
    here = tuple(replace(one, calibration=CALIBRATION) for one in gpus([0] * 3))
    assert of(here, "shm") == (OWN, "calibrated: 4 cores (calibrated)")
    for others, transport, why in (
        ((here[0], here[1], replace(here[2], calibration=None)), "shm", "rank 2 has another calibration than rank 0"),
        (here, "gloo", "the calibration is of shm, and messages go over gloo"),
        ((*here[:2], replace(here[2], machine="boot/1")), "shm", "the ring has several"),
        (tuple(replace(one, calibration='{"unfit": "of another"}') for one in here), "shm", "of another"),
    ):
        on_cpu = tuple(replace(one, device=None, sms=None) for one in others)
        assert of(on_cpu, transport).cluster is None and why in of(on_cpu, transport).why, why
        # With GPUs their preset is left.
        preset = of(others, transport)
        assert preset.cluster is not None and preset.cluster.recognised and "preset h100" in preset.why


def test_the_file_of_calibrate_counts_for_such_a_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert own_calibration(None) is None
    with pytest.raises(InputError, match=r"RINGATTN_CALIBRATION=there\.json: there is no such file"):
        own_calibration("there.json")
    written = {"constants": asdict(OWN), "hardware": location.hardware(), "transport": "shm"}
    Path("calibrated.json").write_text(json.dumps(written))
    found = json.loads(own_calibration(None) or "")
    assert Cluster(**found["constants"]) == OWN and found["transport"] == "shm"
    Path("calibrated.json").write_text(json.dumps({**written, "hardware": "8 x another GPU"}))
    assert "is of 8 x another GPU, and this is" in json.loads(own_calibration(None) or "")["unfit"]
    Path("calibrated.json").write_text("{")
    with pytest.raises(InputError, match="not JSON"):
        own_calibration(None)


Rings = Callable[..., list[Any]]


@pytest.fixture
def rings(monkeypatch: pytest.MonkeyPatch) -> Rings:
    """`run_ranks` on these locations."""

    def run(locations: tuple[Location, ...], body: Callable[[Ring], Any], **options: Any) -> list[Any]:
        monkeypatch.setattr(LocalTransport, "locations", locations)
        return run_ranks(len(locations), body, **options)

    return run


def test_a_ring_chooses_for_its_transport_and_its_margin(rings: Rings, monkeypatch: pytest.MonkeyPatch) -> None:
    def chooses(ring: Ring) -> tuple[Cluster, str]:
        seq = ring.sequence(256, layout="contiguous")
        return ring.machines, str(ring.explain(seq, q_heads=2, head_dim=64, dtype="float32"))

    here = gpus([0, 0])
    known = replace(CLUSTERS["h100"], recognised=True, links=links_of(here))
    monkeypatch.setattr(LocalTransport, "stream", "a queue of a device")
    for name, margin, machines, columns in (
        ("nccl", 4, known.leaving(4), "nccl, 4 SMs  nccl, 8 SMs  nccl, 0 SMs   peer"),
        ("peer", 0, known.by_copy_engines(), "peer  nccl, 8 SMs  nccl, 0 SMs"),
    ):
        monkeypatch.setattr(LocalTransport, "name", name)
        monkeypatch.setattr(LocalTransport, "sm_margin", margin)
        for found, text in rings(here, chooses):
            assert found == machines
            assert f"  {columns}  staged MiB" in next(line for line in text.splitlines() if "staged MiB" in line)


def test_rings_recognise_what_nobody_named(rings: Rings) -> None:
    def told(ring: Ring) -> tuple[Cluster, str]:
        text = str(ring.explain(ring.sequence(4096), q_heads=8, head_dim=64, causal=True, schedule="ring"))
        return ring.cluster, next(line for line in text.splitlines() if line.startswith("machines "))

    here = gpus([0, 0, 1, 1])
    links = links_of(here)
    expected = replace(CLUSTERS["h100"], recognised=True, links=links)
    line = "machines recognised: 4 x NVIDIA H100 80GB HBM3 on 2 nodes, NVLink inside; preset h100"
    assert rings(here, told) == [(expected, line)] * 4
    named = rings(here, told, cluster="b200")
    assert named == [(replace(CLUSTERS["b200"], links=links), f"machines named: {CLUSTERS['b200'].name}")] * 4
    without = (REFERENCE.joined(links), "machines not looked for: cluster=None")
    assert rings(here, told, cluster=None) == [without] * 4
    odd = (*here[:3], replace(here[3], device="NVIDIA H200"))
    (cluster, why), *others = rings(odd, told)
    assert cluster == REFERENCE.joined(links) and why.startswith("machines not recognised: rank 3 has NVIDIA H200")
    assert others == [(cluster, why)] * 3
