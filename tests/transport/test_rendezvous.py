"""Which transport a ring opens, and on which GPU: torch's CUDA calls are stood in for, the rest is real."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

import ringattn
from ringattn import InputError, Ring, UnsupportedError
from ringattn.transport import rendezvous as opening
from ringattn.transport.nccl.options import NcclOptions
from ringattn.transport.nccl.transport import NcclTransport
from tests.transport.simulated.device import SimDevice
from tests.transport.simulated.library import SimLibrary
from tests.transport.simulated.world import SimWorld


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A machine of four simulated GPUs; the indices that were opened."""
    world, opened = SimWorld(1), []

    def device(index: int) -> SimDevice:
        opened.append(index)
        return SimDevice(world, 0)

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(opening, "CudaDevice", device)
    monkeypatch.setattr(opening, "open_binding", lambda options: SimLibrary(world, 0))
    for name in ("LOCAL_RANK", "WORLD_SIZE", "RANK", "NCCL_COMM_ID", "RINGATTN_FLIGHT_DIR"):
        monkeypatch.delenv(name, raising=False)
    return opened


def test_nccl_alone(gpus: list[int]) -> None:
    with Ring(transport="nccl", nccl=NcclOptions(sm_margin=2)) as ring:
        assert isinstance(ring.transport, NcclTransport) and ring.world_size == 1
        assert ring.transport.options.sm_margin == 2
        ring.barrier()
    assert gpus == [0]


def test_the_gpu_of_a_rank(gpus: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_RANK", "3")
    Ring(transport="nccl").close()
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 2)  # who has chosen is not overruled
    Ring(transport="nccl").close()
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    Ring(transport="nccl").close()
    assert gpus == [3, 2, 0]
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(InputError, match="LOCAL_RANK is 3, but this host shows 2 GPUs"):
        Ring(transport="nccl")


def test_a_common_id_for_all_communicators_is_refused(gpus: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCL_COMM_ID", "127.0.0.1:1")
    with pytest.raises(InputError, match="NCCL_COMM_ID is set"):
        Ring(transport="nccl")


def test_warnings_beside_other_communicators(gpus: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_world_size", lambda: 1)
    monkeypatch.setattr(dist, "get_backend_config", lambda: "cpu:gloo,cuda:nccl")
    monkeypatch.setattr(opening, "group_store", lambda group, timeout_s: (dist.HashStore(), 0, 1))
    monkeypatch.delenv("NCCL_LAUNCH_ORDER_IMPLICIT", raising=False)
    with pytest.warns(UserWarning, match="rank 0: .*NCCL_LAUNCH_ORDER_IMPLICIT=1"):
        Ring(transport="nccl").close()


def test_auto_takes_the_gpu_only_where_there_is_one(gpus: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    monkeypatch.setattr(opening, "rendezvous_store", lambda *facts, **more: dist.HashStore())
    monkeypatch.setattr(opening, "_open_nccl", lambda *facts: asked.append("nccl"))
    monkeypatch.setattr(opening.GlooTransport, "open", lambda *facts: asked.append("gloo"))
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "0")
    opening.open_transport(None, "auto", 1.0)
    opening.open_transport(None, "gloo", 1.0)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    opening.open_transport(None, "auto", 1.0)
    assert asked == ["nccl", "gloo", "gloo"]


@pytest.mark.parametrize(
    ("options", "kind", "words"),
    [
        ({"transport": "nccl"}, UnsupportedError, "needs a CUDA device, and torch finds none; use gloo"),
        ({"transport": "gloo", "nccl": NcclOptions()}, InputError, "transport='gloo' takes no such options"),
    ],
)
def test_refused_on_cpu(options: dict[str, Any], kind: type[Exception], words: str) -> None:
    if torch.cuda.is_available():
        pytest.skip("this machine has a CUDA device")
    with pytest.raises(kind, match=words):
        ringattn.Ring(**options)


def test_the_job_is_larger_than_a_ring(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    assert opening.job_size(8) == 8
    monkeypatch.setenv("WORLD_SIZE", "1024")
    assert opening.job_size(8) == 1024
