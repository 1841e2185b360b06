"""Parts of the Triton engine that need no GPU. `tests/kernels/test_interpreted.py` runs the engine contract."""

from __future__ import annotations

import sys

import pytest
import torch

import ringattn.engine.triton as engine_module
from ringattn.engine import select
from ringattn.engine.base import Engine, Softmax
from ringattn.engine.triton import PassTables, TritonEngine
from ringattn.errors import UnsupportedError
from ringattn.kernels.launch import Config
from tests.contract.engine_scenarios import SCENARIOS

HOST = torch.device("cpu")


def choose_triton(device: torch.device, dim: int = 64, softcap: float | None = None) -> Engine:
    softmax = Softmax(1.0, 1, softcap)
    call = select._Call(device, torch.float32, (dim, dim), softmax, 6, repeats=False)
    return select._choose.__wrapped__("triton", call).engine


def test_triton_is_refused_by_name_without_a_gpu() -> None:
    with pytest.raises(UnsupportedError, match="engine='triton' needs a CUDA device, not cpu; use engine='auto'"):
        choose_triton(HOST)


def test_triton_is_chosen_by_name_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    engine = choose_triton(torch.device("cuda", 0), softcap=30.0)
    assert engine.name == "triton" and isinstance(engine, TritonEngine) and engine.sm_margin == 6


def test_without_the_package_the_refusal_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "triton", None)
    for name in [name for name in sys.modules if name.startswith(("ringattn.engine.triton", "ringattn.kernels"))]:
        monkeypatch.delitem(sys.modules, name)
    with pytest.raises(UnsupportedError, match="needs the package triton, which is not installed"):
        choose_triton(torch.device("cuda", 1))


def test_tables_are_made_once_for_each_block_size(monkeypatch: pytest.MonkeyPatch) -> None:
    scenario = SCENARIOS["zigzag"]
    whole = PassTables([step.tiles for step in scenario.steps], Softmax(0.3, 2), scenario.q_rows, 4)
    first = whole.by_query(Config(16, 32, 4, 1), HOST), whole.by_key(Config(16, 32, 4, 1), HOST)

    def fail(*_: object, **__: object) -> None:
        raise AssertionError("made again")

    monkeypatch.setattr(engine_module, "query_blocks", fail)
    monkeypatch.setattr(engine_module, "key_blocks", fail)
    # A table depends on the block sizes only, not on the numbers of warps and stages.
    again = whole.by_query(Config(16, 32, 8, 3), HOST), whole.by_key(Config(16, 32, 8, 3), HOST)
    assert again[0] is first[0] and again[1] is first[1] and first[0] is not first[1]
    with pytest.raises(AssertionError, match="made again"):
        whole.by_query(Config(32, 16, 4, 1), HOST)


@pytest.mark.parametrize(
    ("capability", "expected"), [((8, 0), 80), ((8, 7), 86), ((9, 0), 90), ((10, 3), 100), ((12, 1), 120)]
)
def test_block_sizes_of_the_nearest_architecture_below(
    capability: tuple[int, int], expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert engine_module.architecture.__wrapped__(torch.device("cuda", 0)) == expected


def test_a_gpu_without_block_sizes_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    with pytest.raises(UnsupportedError, match="from sm_80 on, not sm_75; use engine='plain'"):
        engine_module.architecture.__wrapped__(torch.device("cuda", 0))
