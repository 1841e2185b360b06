"""Ranks that would train other runs than each other are told before the first step, all of them, by key.

Threads, each with a configuration of its own.
"""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ringattn import Ring
from ringattn.errors import DisagreementError, InputError
from ringattn.launch.options import leaves
from ringattn.launch.train import loop, mesh
from ringattn.launch.train.config import ModelConfig, TrainConfig
from ringattn.launch.train.data import Documents, load
from ringattn.launch.train.mesh import PROCESS_KEYS
from ringattn.testing import run_ranks
from ringattn.transport.local import LocalWorld

TINY = TrainConfig(tokens=41, batch=2, steps=2, dtype="fp64", model=ModelConfig(1, 16, 2, 1, 24))


def refusals(config: TrainConfig, odd: TrainConfig) -> list[InputError]:
    """What each of two ranks, of one ring or of two replicas, is told where rank 1 has the configuration `odd`."""
    worlds = [LocalWorld(1, 20.0) for _ in range(2)]

    def of_rank(everyone: Ring) -> InputError:
        mine = odd if everyone.rank == 1 else config
        shared = everyone if config.replicas == 1 else Ring(transport=worlds[everyone.rank].transport(0))
        with pytest.raises(InputError) as raised:
            loop.train(shared, mine, everyone=everyone)
        return raised.value

    return run_ranks(2, of_rank, timeout_s=20.0)


@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"learning_rate": 0.5}, "learning_rate: rank 1 has 0.5 and rank 0 0.001; start all ranks with the same words"),
        ({"seed": 1}, "seed: rank 1 has 1 and rank 0 0"),
        ({"steps": 3}, "steps: rank 1 has 3 and rank 0 2"),
        ({"clip_norm": 2.0}, "clip_norm: rank 1 has 2.0 and rank 0 1.0"),
        ({"model": replace(TINY.model, tied=False)}, "model.tied: rank 1 has False and rank 0 True"),
        ({"text": __file__}, "text=.*: rank 1 reads other tokens or documents than rank 0"),
    ],
    ids=str,
)
def test_another_run_on_one_rank_is_refused_on_all(replicas: int, change: dict[str, Any], message: str) -> None:
    config = replace(TINY, replicas=replicas)
    for error in refusals(config, replace(config, **change)):
        assert isinstance(error, DisagreementError) and re.match(message, str(error))


def test_other_documents_of_the_same_tokens_are_another_text(monkeypatch: pytest.MonkeyPatch) -> None:
    def without_the_first_cut(config: TrainConfig) -> Documents:
        text = load(config)
        return replace(text, cuts=(0, *text.cuts[2:])) if config.timeout_s == 1.0 else text

    monkeypatch.setattr(mesh, "load", without_the_first_cut)
    config = replace(TINY, pack_documents=True)
    for error in refusals(config, replace(config, timeout_s=1.0, limit_s=2.0)):
        assert str(error).startswith("text=: rank 1 reads other tokens or documents than rank 0")


def test_a_folder_that_rank_0_cannot_write_is_refused_on_all(tmp_path: Path) -> None:
    (tmp_path / "taken").touch()
    config = replace(TINY, out=str(tmp_path / "taken"), checkpoint_every_steps=1)
    first, second = refusals(config, config)
    assert str(first).startswith(f"out={config.out}: cannot be written (File exists)")
    assert str(second).startswith(f"rank 0 refused the call, so all ranks do: out={config.out}: ")


@pytest.mark.parametrize("change", [{"text": "nowhere.txt"}, {"tokens": 10**9}, {"replicas": 2}], ids=str)
def test_what_one_rank_cannot_load_is_refused_on_all(change: dict[str, Any]) -> None:
    first, second = refusals(TINY, replace(TINY, **change))
    key, value = next(iter(change.items()))
    assert str(second).startswith(f"{key}={value}: ")
    assert str(first).startswith(f"rank 1 refused the call, so all ranks do: {key}={value}: ")


def test_a_file_may_lie_elsewhere_on_another_machine(tmp_path: Path) -> None:
    files = [tmp_path / "here", tmp_path / "there"]
    for file in files:
        file.write_bytes(bytes(range(256)))

    def of_rank(ring: Ring) -> list[float]:
        config = replace(TINY, text=str(files[ring.rank]), timeout_s=60.0 + ring.rank, threads_per_rank=1 + ring.rank)
        return list(loop.train(ring, config)["losses"])

    first, second = run_ranks(2, of_rank)
    assert first == second


def test_every_key_is_compared_or_a_process_own() -> None:
    assert {key for key, _, _ in leaves(TINY)} > PROCESS_KEYS
