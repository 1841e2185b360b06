"""Which transport a ring opens, and on which GPU. The CUDA calls of torch are fakes; the rest is real."""

from __future__ import annotations

import json
import re
import threading
import time
import warnings
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

import ringattn
from ringattn import Ring
from ringattn.errors import DisagreementError, InputError, UnsupportedError
from ringattn.planner.cluster import Cluster
from ringattn.transport import location, meeting
from ringattn.transport import rendezvous as opening
from ringattn.transport.control_store import ControlStore, first_cause
from ringattn.transport.local import LocalTransport
from ringattn.transport.location import Location, links_of, my_location
from ringattn.transport.meeting import claim_rank
from ringattn.transport.nccl import options as nccl_options
from ringattn.transport.nccl.options import NcclOptions
from tests.transport.simulated.device import SimDevice
from tests.transport.simulated.library import SimLibrary
from tests.transport.simulated.world import SimWorld
from tests.transport.threads import on_each_rank


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Simulate a machine with four GPUs. Return a list to which the index of each opened GPU is appended."""
    world, opened = SimWorld(1), []

    def device(index: int) -> SimDevice:
        opened.append(index)
        return SimDevice(world, 0)

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    facts = {"name": "NVIDIA H200", "multi_processor_count": 132}
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda index: SimpleNamespace(uuid=f"uuid-{index}", **facts)
    )
    monkeypatch.setattr(opening, "CudaDevice", device)
    monkeypatch.setattr(opening, "open_binding", lambda options: SimLibrary(world, 0))
    for name in ("LOCAL_RANK", "WORLD_SIZE", "RANK", "NCCL_COMM_ID", "RINGATTN_FLIGHT_DIR"):
        monkeypatch.delenv(name, raising=False)
    return opened


def test_wheels_that_do_not_fit_are_named(gpus: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    versions = []

    def unfit(build: str | None) -> str:
        versions.append(build)
        return "installed: cupy-cuda12x 14.0; this torch has CUDA 13.0"

    monkeypatch.setattr(opening, "mismatch", unfit)
    with pytest.warns(UserWarning, match=r"^rank 0: installed: cupy-cuda12x 14\.0; this torch has CUDA 13\.0"):
        Ring(transport="nccl").close()
    assert versions == [torch.version.cuda]


def test_the_gpu_of_a_rank(gpus: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_RANK", "3")
    Ring(transport="nccl").close()
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 2)  # the caller's own choice is kept
    Ring(transport="nccl").close()
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    Ring(transport="nccl").close()
    assert gpus == [3, 2, 0]
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(InputError, match="LOCAL_RANK is 3, but this host shows 2 GPUs"):
        Ring(transport="nccl")


def test_a_warning_about_other_communicators(gpus: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_world_size", lambda: 1)
    monkeypatch.setattr(dist, "get_backend_config", lambda: "cpu:gloo,cuda:nccl")
    monkeypatch.setattr(meeting, "group_store", lambda group, timeout_s: (dist.HashStore(), 0, 1))
    monkeypatch.delenv("NCCL_LAUNCH_ORDER_IMPLICIT", raising=False)
    with pytest.warns(UserWarning, match="rank 0: .*NCCL_LAUNCH_ORDER_IMPLICIT=1"):
        Ring(transport="nccl").close()


def test_nccl_groups_opened_after_the_ring_are_warned_of_once(gpus: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NCCL_LAUNCH_ORDER_IMPLICIT", raising=False)
    with warnings.catch_warnings(record=True) as warned, Ring(transport="nccl") as ring:
        warnings.simplefilter("always")
        calls = iter(range(1, 10))

        def call() -> int:
            ring.transport.announce(next(calls), b"", "a call")
            return len(warned)

        assert call() == 0
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        try:
            assert call() == 0
            later = dist.new_group([0], backend="gloo")
            # FSDP may create an NCCL group although the default group is gloo. Without a GPU the test can only fake
            # that.
            monkeypatch.setitem(nccl_options._world.pg_backend_config, later, "cuda:nccl")
            assert [call(), call()] == [1, 1]
        finally:
            dist.destroy_process_group()
    assert "rank 0: torch's NCCL process groups and this ring launch on one GPU" in str(warned[0].message)


def test_auto_uses_the_gpu_only_if_there_is_one(gpus: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[str] = []
    monkeypatch.setattr(meeting, "group_store", lambda group, timeout_s: (dist.HashStore(), 0, 2))
    location = replace(my_location(), host="one", machine="boot/1", uid=7)
    places = [location, location]
    monkeypatch.setattr(opening, "_located", lambda *_: tuple(places))
    monkeypatch.setattr(opening, "_open_nccl", lambda *facts: opened.append("nccl"))
    monkeypatch.setattr(
        opening.GlooTransport, "open", lambda *facts, **more: (opened.append("gloo"), SimpleNamespace())[1]
    )
    shm = opening.ShmTransport.open
    monkeypatch.setattr(
        opening.ShmTransport, "open", lambda *facts, **more: (opened.append("shm"), SimpleNamespace())[1]
    )
    opening.open_transport(0, "auto", 1.0)
    opening.open_transport(0, "gloo", 1.0)
    opening.open_transport(0, "shm", 1.0)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    opening.open_transport(0, "auto", 1.0)
    assert opened == ["nccl", "gloo", "shm", "shm"]
    # A known obstacle to shared memory: auto chooses gloo, and shm by name is refused on every rank.
    monkeypatch.setattr(opening.ShmTransport, "open", shm)
    for peer_location, reason in (
        (replace(location, machine="boot/2"), "no two ranks share a machine"),
        (replace(location, machine=None), r"rank 1 cannot determine which machine it is on \(one\)"),
        (replace(location, uid=8), "rank 0 belongs to user 7 and rank 1 to user 8"),
    ):
        places[1] = peer_location
        opened.clear()
        opening.open_transport(0, "auto", 1.0)
        assert opened == ["gloo"]
        with pytest.raises(UnsupportedError, match=f"{reason}.*use gloo"):
            opening.open_transport(0, "shm", 1.0)


def test_a_transport_that_auto_has_chosen_is_not_replaced(gpus: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str, nbytes: int) -> None:
        raise OSError(38, "Function not implemented", "memfd_create")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr("ringattn.transport.shared.group.Segment.create", missing)
    location, store = my_location(), dist.HashStore()
    monkeypatch.setattr(opening, "_located", lambda *_: (location, location))
    monkeypatch.setattr(meeting, "group_store", lambda group, timeout_s: (store, group, 2))
    failures = on_each_rank(2, lambda rank: opening.open_transport(rank, "auto", 10.0))
    assert [type(failure) for failure in failures] == [UnsupportedError] * 2
    errors = list(map(str, failures))
    assert errors[0] == errors[1]
    for part in ("rank 0: OSError", "rank 1: OSError", "memfd_create", "use transport='gloo' instead"):
        assert part in errors[0]


@pytest.mark.parametrize(
    ("options", "kind", "message"),
    [
        ({"transport": "nccl"}, UnsupportedError, "needs a CUDA device, and torch finds none; use gloo"),
        ({"transport": "gloo", "nccl": NcclOptions()}, InputError, "transport='gloo' takes no NCCL options"),
    ],
)
def test_refused_on_cpu(options: dict[str, Any], kind: type[Exception], message: str) -> None:
    if torch.cuda.is_available():
        pytest.skip("this machine has a CUDA device")
    with pytest.raises(kind, match=message):
        ringattn.Ring(**options)


def test_a_ring_that_fails_after_it_has_opened_ends_its_transport(monkeypatch: pytest.MonkeyPatch) -> None:
    class Opened(LocalTransport):
        ended: BaseException | None = None

        @property
        def locations(self) -> Any:  # type: ignore[override]
            raise InputError("no such machines")

        def abort(self, cause: BaseException) -> None:
            type(self).ended = cause

    transport = object.__new__(Opened)
    monkeypatch.setattr("ringattn.ring.open_transport", lambda *facts, **more: transport)
    with pytest.raises(InputError, match="no such machines") as caught:
        Ring()
    assert Opened.ended is caught.value


# --- nodes -----------------------------------------------------------------------------------------------------------


def opened_on(
    nodes: str,
    monkeypatch: pytest.MonkeyPatch,
    fails: dict[int, Exception] | None = None,
    timeout_s: float = 20.0,
    calibrated: bool = False,
) -> tuple[list[Any], list[str]]:
    """Open gloo on one thread per rank. Return the transport or the error of each rank, and the warnings.

    `nodes`: a string with one letter per rank, which names the node of the rank. `fails`: errors that ranks raise when
    they determine their location.
    """
    store, placed = dist.HashStore(), threading.local()

    def rank_location(gpu: int | None) -> Location:
        if error := (fails or {}).get(placed.rank):
            raise error
        return Location(f"host-{nodes[placed.rank]}", nodes[placed.rank], placed.rank, 0)

    def run(rank: int) -> Any:
        placed.rank = rank
        return opening.open_transport(rank, "gloo", timeout_s, calibrated=calibrated)

    monkeypatch.setattr(opening, "my_location", rank_location)
    monkeypatch.setattr(meeting, "group_store", lambda group, timeout_s: (store.clone(), group, len(nodes)))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        results = on_each_rank(len(nodes), run)
    return results, [str(warning.message) for warning in caught]


@pytest.mark.parametrize(
    ("nodes", "text"),
    [
        ("aab", None),
        ("abbca", None),  # a ring may begin inside a node
        ("abab", "ranks 0,2 on node 0; 1,3 on node 1: the ring crosses between nodes 4 times, but 2 would be enough"),
        ("aabcac", "ranks 0,1,4 on node 0; 2 on node 1; 3,5 on node 2: the ring crosses between nodes 5 times"),
    ],
    ids=["two nodes", "begins inside", "in turn", "three nodes"],
)
def test_an_order_that_crosses_nodes_too_often_is_warned_of_once(
    nodes: str, text: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    rings, warned = opened_on(nodes, monkeypatch)
    for ring in rings:
        assert [rank_location.machine for rank_location in ring.locations] == list(nodes)
        ring.close()
    if text is None:
        assert warned == []
    else:
        (warning,) = warned
        assert warning.startswith(f"rank 0: {text}") and "node 1 is host-b" in warning
        assert "Number the ranks of a node one after another" in warning


def test_an_opening_has_one_deadline_for_all_its_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    located, late_s = opening._located, 1.7

    def late(control: ControlStore, *more: Any) -> Any:
        if control.rank == 1:
            time.sleep(late_s)
        locations = located(control, *more)
        if control.rank == 1:
            raise InputError("unheard")
        return locations

    monkeypatch.setattr(opening, "_located", late)
    monkeypatch.setattr(opening.ControlStore, "publish_cause", lambda control, error: None)
    began_s = time.monotonic()
    results, _ = opened_on("aa", monkeypatch, timeout_s=2.0)
    assert time.monotonic() - began_s < late_s + 2.0
    assert "ranks [1] did not arrive within 2.0 s" in str(results[0])


def test_the_job_is_larger_than_a_ring(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    assert opening.job_size(8) == 8
    monkeypatch.setenv("WORLD_SIZE", "1024")
    assert opening.job_size(8) == 1024


def test_the_calibration_is_gathered_if_a_ring_uses_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    constants = {"name": "these", "flops": 1e12, "bandwidth": 1e9, "latency_s": 1e-6}
    described = {"constants": constants, "hardware": location.hardware(), "transport": "gloo"}
    Path("mine.json").write_text(json.dumps(described))
    monkeypatch.setenv("RINGATTN_CALIBRATION", "mine.json")
    for calibrated in (True, False):
        transports, _ = opened_on("aa", monkeypatch, calibrated=calibrated)
        for transport in transports:
            recognised = location.recognise(transport.locations, links_of(transport.locations), transport.name)
            assert (recognised.cluster == Cluster(**constants)) == calibrated  # type: ignore[arg-type]
            transport.close()
    monkeypatch.setenv("RINGATTN_CALIBRATION", "none.json")
    failed, _ = opened_on("aa", monkeypatch, calibrated=True)
    assert all("none.json: there is no such file" in str(error) for error in failed)


PROCESS = r"process \d+ on \S+ \(at [\d:]+ UTC\)"
SIZES = rf"rank 0, {PROCESS}, opened a ring of 2 ranks, and rank 1, {PROCESS}, a ring of 3"
JOBS = rf"rank 0, {PROCESS}, belongs to job 'job', and rank 1, {PROCESS}, to job 'other'"


def test_each_rank_claims_its_number_in_each_ring() -> None:
    store = dist.HashStore()
    for ring in ("0", "1"):
        for rank, run_id in enumerate(("job", "", "job")):  # an empty id matches every job
            claim_rank(ControlStore(dist.PrefixStore(ring, store), rank, 3), run_id)


@pytest.mark.parametrize(
    ("rank", "world_size", "run_id", "kind", "message"),
    [
        (0, 2, "job", InputError, rf"two processes claim rank 0, {PROCESS} and {PROCESS}"),
        (1, 3, "job", DisagreementError, SIZES),
        (1, 2, "other", DisagreementError, JOBS),
    ],
    ids=["number", "world size", "job"],
)
def test_a_process_that_does_not_fit_ends_the_ring(
    rank: int, world_size: int, run_id: str, kind: type[InputError], message: str
) -> None:
    store = dist.HashStore()
    first = ControlStore(store, 0, 2)
    claim_rank(first, "job")
    with pytest.raises(kind) as caught:
        claim_rank(ControlStore(store, rank, world_size), run_id)
    cause = first.cause()
    assert cause is not None and re.match(f"the ring of 2 ranks cannot go on: {message}; the store's host ", cause)
    assert str(caught.value) == f"rank {rank}: {cause}" and first_cause(1, caught.value) == cause
