"""Which machines a ring runs on: the constants that `ringattn calibrate` has left there, or a preset of their GPUs.

Guarantees: all ranks find the same, for it follows from the locations that all of them have. What does not fit in every
point is not recognised, and the reason is told.
"""

from __future__ import annotations

import json
import os
import platform
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ringattn.errors import InputError
from ringattn.planner.cluster import CALIBRATED, CLUSTERS, Cluster, cluster_named
from ringattn.planner.links import LinkClass, Links
from ringattn.transport.location import Location

VARIABLE = "RINGATTN_CALIBRATION"
"""Where else the file of `ringattn calibrate` lies."""

DEVICES = {
    "NVIDIA A100-SXM4-80GB": "a100",
    "NVIDIA H100 80GB HBM3": "h100",
    "NVIDIA H200": "h200",
    "NVIDIA B200": "b200",
    "NVIDIA GB200": "gb200",
    "NVIDIA L20": "l20",
    "NVIDIA GeForce RTX 4090": "rtx4090",
}
"""The preset of a GPU by its name in CUDA, in full: the H100 PCIe, NVL and the H20 are other machines."""
OVER_PCIE = ("l20", "rtx4090")
"""Presets of boxes without NVLink."""
RACKS = ("gb200",)
"""Presets whose NVLink may join nodes."""


class Recognised(NamedTuple):
    """`cluster`: None where these machines are not known. `why`: what was recognised, or why nothing was."""

    cluster: Cluster | None
    why: str


def recognise(locations: Sequence[Location], links: Links | None, transport: str) -> Recognised:
    """The machines of a ring: a calibration that fits goes before a preset. `transport`: the name of the ring's."""
    if links is None:
        return Recognised(None, "not recognised: the transport does not tell where ranks run")
    calibrated = _calibrated(locations, links, transport)
    if calibrated.cluster:
        return calibrated
    preset = _preset(locations, links)
    return preset if preset.cluster else Recognised(None, f"not recognised: {preset.why}; {calibrated.why}")


def _calibrated(locations: Sequence[Location], links: Links, transport: str) -> Recognised:
    first = locations[0].calibration
    for rank, one in enumerate(locations):
        if one.calibration != first:
            return Recognised(None, f"rank {rank} has another calibration than rank 0, or only one of them has any")
    if first is None:
        return Recognised(None, "`ringattn calibrate` has left no constants here")
    found: dict[str, Any] = json.loads(first)
    if "unfit" in found:
        return Recognised(None, found["unfit"])
    if max(links.nodes):
        return Recognised(None, "the calibration is of one machine, and the ring has several")
    if found["transport"] != transport:
        return Recognised(None, f"the calibration is of {found['transport']}, and messages go over {transport}")
    cluster = Cluster(**found["constants"])
    return Recognised(cluster, f"calibrated: {cluster.name}")


def _preset(locations: Sequence[Location], links: Links) -> Recognised:
    device, sms = locations[0].device, locations[0].sms
    for rank, one in enumerate(locations):
        if (one.device, one.sms) != (device, sms):
            return Recognised(None, f"rank {rank} has {_gpu(one)}, and rank 0 has {_gpu(locations[0])}")
    if device is None:
        return Recognised(None, "the ranks have no GPU")
    if (name := DEVICES.get(device)) is None:
        return Recognised(None, f"there is no preset of {device}")
    preset, nodes, inside = CLUSTERS[name], 1 + max(links.nodes), links.classes_inside()
    obstacle = None
    if sms != preset.sms:  # a slice of it, or a variant
        obstacle = f"this {device} has {sms} multiprocessors, and the preset has {preset.sms}"
    elif name in OVER_PCIE:
        obstacle = "the host bridges that GPUs over PCIe share are not in the preset"
    elif inside - {LinkClass.NVLINK}:
        found = ", ".join(sorted(kind.value for kind in inside))
        obstacle = f"GPUs of a node are joined by: {found}; the preset has NVLink"
    elif nodes > 1 and name in RACKS:
        obstacle = "whether NVLink joins the nodes is not found out"
    elif nodes > 1 and links.outside is not LinkClass.NETWORK:
        obstacle = "a rank cannot tell which machine it is on"
    rate = _network_bytes_s(locations, links) if nodes > 1 and not obstacle else None
    if nodes > 1 and rate is None:
        obstacle = obstacle or "a node does not tell the rate of its network ports"
    if obstacle:
        return Recognised(None, f"{device}: {obstacle} (cluster={name!r} names it all the same)")
    told = f"recognised: {len(locations)} x {device} on {nodes} node{'s' * (nodes > 1)}"
    told += f"{', NVLink inside' if inside else ''}; preset {name}"
    if rate is not None and preset.node_bandwidth is not None and rate < preset.node_bandwidth:
        preset = replace(preset, node_bandwidth=rate)
        told += f", but {rate / 1e9:.3g} GB/s a rank between nodes by the rates of their ports"
    return Recognised(replace(preset, recognised=True), told)


def _gpu(one: Location) -> str:
    return "no GPU" if one.device is None else f"{one.device} of {one.sms} multiprocessors"


def _network_bytes_s(locations: Sequence[Location], links: Links) -> float | None:
    """Line rate of a rank's share of its node's ports, on the node that has least; None where a port does not tell."""
    ranks, least = Counter(links.nodes), float("inf")
    for node, one in zip(links.nodes, locations, strict=True):
        rates = [nic.gbps for nic in one.nics]
        if not rates or None in rates:
            return None
        least = min(least, sum(rate or 0.0 for rate in rates) * 1e9 / 8 / ranks[node])
    return least


def own_calibration(named: str | None) -> str | None:
    """What `ringattn calibrate` has left here, for the other ranks to compare: JSON with `constants` and `transport`.

    Or with `unfit`, why these are of no use on this machine; None where there is no file. `named`: the file that
    `RINGATTN_CALIBRATION` names. Raises `InputError` where that is missing, and for a file that cannot be read.
    """
    path = Path(named or CALIBRATED)
    if not path.is_file():
        if named:
            raise InputError(f"{VARIABLE}={path}: there is no such file; `ringattn calibrate out={path}` writes one")
        return None
    constants = asdict(cluster_named(str(path)))
    described = json.loads(path.read_text(encoding="utf-8"))
    if described.get("hardware") != hardware():
        return json.dumps({"unfit": f"{path} is of {described.get('hardware')}, and this is {hardware()}"})
    return json.dumps({"constants": constants, "transport": described.get("transport")}, sort_keys=True)


def hardware() -> str:
    """The class of this machine, without its name."""
    if torch.cuda.is_available():
        return f"{torch.cuda.device_count()} x {torch.cuda.get_device_name()}"
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:  # not Linux: the architecture must do
        lines = []
    family = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")
    return f"{len(os.sched_getaffinity(0))} cores, {family or platform.machine()}"
