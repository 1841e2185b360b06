"""A checkpoint of a stranger runs no code: it is refused by the name of the class that it holds.

The checkpoints here are good ones of a run, into which something is planted; their digests are right.
"""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import Metadata

from ringattn.errors import InputError
from ringattn.launch.train import checkpoints, loop
from ringattn.launch.train.checkpoint_reader import INSTANCES, MetadataUnpickler
from ringattn.launch.train.checkpoints import RUN, described, latest, read_run, write_run
from ringattn.launch.train.config import ModelConfig, TrainConfig
from ringattn.testing import run_ranks

TINY = TrainConfig(
    tokens=41, batch=2, steps=3, dtype="fp64", checkpoint_every_steps=3, model=ModelConfig(1, 16, 2, 1, 24)
)


class Calls:
    """Unpickled, it calls `function(argument)`."""

    def __init__(self, function: Callable[..., Any], *arguments: Any) -> None:
        self.call = function, arguments

    def __reduce__(self) -> Any:
        return self.call


@pytest.fixture
def marker(tmp_path: Path) -> Path:
    """A file that planted code makes."""
    return tmp_path / "code has run"


def run(config: TrainConfig) -> dict[str, Any]:
    return run_ranks(1, lambda ring: loop.train(ring, config))[0]


def saved(folder: Path) -> Path:
    """The checkpoint of a run."""
    run(replace(TINY, out=str(folder / "foreign")))
    path = latest(folder / "foreign")
    assert path is not None
    return path


def sealed(path: Path) -> TrainConfig:
    """A run that resumes from the checkpoint, after its digests were made those of its files."""
    content = read_run(path)
    del content["files"]
    (path / RUN).unlink()
    write_run(path, content, {file.name: described(file) for file in path.iterdir()})
    return replace(TINY, steps=5, out=str(path.parents[2] / "mine"), resume=str(path))


def refused(path: Path, reason: str) -> None:
    config = sealed(path)
    with pytest.raises(InputError) as raised:
        run(config)
    message = str(raised.value)
    assert message.startswith(f"resume={path}: {path}: {reason}"), message
    assert message.endswith("load only checkpoints that you trust") and "\n" not in message


def test_a_good_checkpoint_is_loaded(tmp_path: Path) -> None:
    assert run(sealed(saved(tmp_path)))["first_step"] == 3


@pytest.mark.parametrize(
    "function", ["os.system", "builtins.exec", "builtins.getattr", "torch.load", "pathlib.Path.touch"]
)
def test_metadata_that_calls_a_function_is_refused(tmp_path: Path, marker: Path, function: str) -> None:
    path = saved(tmp_path)
    metadata = pickle.loads((path / ".metadata").read_bytes())
    calls, name = {
        "os.system": (Calls(os.system, f"touch '{marker}'"), "posix.system"),
        "builtins.exec": (Calls(exec, f"open({str(marker)!r}, 'w')"), "builtins.exec"),
        "builtins.getattr": (Calls(getattr, str, "upper"), "builtins.getattr"),
        "torch.load": (Calls(torch.load, str(marker)), "torch.serialization.load"),
        "pathlib.Path.touch": (Calls(Path.touch, marker), "pathlib.Path.touch"),
    }[function]
    metadata.planner_data = [calls]
    (path / ".metadata").write_bytes(pickle.dumps(metadata))
    refused(path, f".metadata names {name}; it might run code")
    assert not marker.exists()


def test_a_whole_metadata_that_is_none_is_refused(tmp_path: Path) -> None:
    path = saved(tmp_path)
    (path / ".metadata").write_bytes(pickle.dumps({"state_dict_metadata": {}}))
    refused(path, ".metadata holds a dict; ")


@pytest.mark.parametrize(
    "target", ["torch.distributed.checkpoint.metadata Metadata", "torch.serialization _get_layout"]
)
def test_metadata_changes_no_class_or_function(tmp_path: Path, target: str) -> None:
    path = saved(tmp_path)
    # The name of the target, None as its first state, and {"planted": 1} to be set by setattr, BUILD.
    code = f"c{target.replace(' ', chr(10))}\n".encode() + b"N}X\x07\x00\x00\x00plantedK\x01s\x86b."
    (path / ".metadata").write_bytes(code)
    refused(path, ".metadata sets attributes of <")
    assert not hasattr(Metadata, "planted") and not hasattr(torch.serialization._get_layout, "planted")


def test_an_entry_that_calls_a_function_is_refused(
    tmp_path: Path, marker: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    good = checkpoints._state

    def planted(*given: Any) -> dict[str, Any]:
        state = good(*given)
        state["optimizer"]["param_groups"][0]["weight_decay"] = Calls(os.system, f"touch '{marker}'")
        return state

    monkeypatch.setattr(checkpoints, "_state", planted)
    monkeypatch.setattr(checkpoints, "all_finite", lambda *_: True)
    path = saved(tmp_path)
    monkeypatch.undo()
    refused(path, "its entry optimizer.param_groups.0.weight_decay holds posix.system; it might run code")
    assert not marker.exists()


def test_every_class_that_torch_writes_is_taken(tmp_path: Path) -> None:
    """Tensors of every dtype, and entries of every kind that weights are made of."""
    state = {
        **{
            str(dtype): torch.zeros(2, dtype=dtype)
            for dtype in (torch.float32, torch.bfloat16, torch.int64, torch.bool)
        },
        "numbers": {"lr": 0.1, "betas": (0.9, 0.99), "foreach": None, "names": ["a", "b"]},
    }
    dcp.save(state, checkpoint_id=tmp_path / "checkpoint", no_dist=True)
    with (tmp_path / "checkpoint" / ".metadata").open("rb") as file:
        metadata = MetadataUnpickler(file).load()
    assert isinstance(metadata, Metadata)
    with (tmp_path / "checkpoint" / ".metadata").open("rb") as file:
        true = pickle.load(file)
    assert metadata.state_dict_metadata == true.state_dict_metadata and metadata.storage_data == true.storage_data
    assert {type(each) for each in metadata.state_dict_metadata.values()} <= set(INSTANCES)
