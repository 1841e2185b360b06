"""accelerate's configuration of a ring: the Trainer that gets it, and refusals; tests.adapters.trainer trains."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers", reason="transformers is not installed")
pytest.importorskip("accelerate", reason="accelerate is not installed")

import transformers
from accelerate import Accelerator
from accelerate.state import AcceleratorState

from ringattn import InputError, Ring, UnsupportedError
from ringattn.adapters import accelerate as adapter
from ringattn.adapters.accelerate import RingParallelismConfig
from ringattn.adapters.transformers.trainer import RingTrainerMixin
from tests.adapters.models import tiny_model
from tests.adapters.trainer import Stream, padded, texts


@pytest.mark.parametrize("name", ["sp_size", "tp_size"])
def test_other_sizes(name: str) -> None:
    with pytest.raises(UnsupportedError, match=f"{name}=2 together with a ring; set cp_size"):
        RingParallelismConfig(cp_size=1, **{name: 2})


def test_ways_to_send() -> None:
    with pytest.raises(UnsupportedError, match="cp_backend is of another context parallelism"):
        RingParallelismConfig(cp_size=2, cp_backend="torch")
    config = RingParallelismConfig(cp_size=3)
    assert config.cp_enabled and config.cp_backend != "torch"  # which Trainer and accelerate act upon
    with pytest.raises(InputError, match="1 ranks are no multiple of cp_size and the other sizes, 3"):
        config.build_device_mesh("cpu")


class Alone(RingParallelismConfig):
    """As if this process were both ranks of a ring."""

    def build_device_mesh(self, device_type: str) -> Any:
        """The stand-in of a mesh."""
        return type("Mesh", (dict,), {"mesh_dim_names": ()})(cp=None)


@pytest.fixture
def config(monkeypatch: pytest.MonkeyPatch) -> Iterator[RingParallelismConfig]:
    """A configuration whose ring has one rank."""
    AcceleratorState._reset_state(True)
    with Ring() as ring:
        monkeypatch.setattr(adapter, "ring_of", lambda mesh: ring)
        yield Alone(cp_size=2)
    AcceleratorState._reset_state(True)


def make_trainer(folder: Path, config: RingParallelismConfig, kind: Any = transformers.Trainer, **options: Any) -> Any:
    """A Trainer that gets the configuration; `options` are those of TrainingArguments, and in `given` of Trainer."""
    given = {"model": tiny_model("llama", "eager"), "train_dataset": texts(), "data_collator": padded}
    given |= options.pop("given", {})
    settings = {
        "use_cpu": True,
        "report_to": [],
        "disable_tqdm": True,
        "max_steps": 1,
        "save_strategy": "no",
        **options,
    }
    return kind(args=transformers.TrainingArguments(str(folder), parallelism_config=config, **settings), **given)


def test_a_trainer_gets_the_ring(tmp_path: Path, config: RingParallelismConfig) -> None:
    class Theirs(transformers.Trainer):
        pass

    trainer = make_trainer(tmp_path, config, Theirs)
    assert isinstance(trainer, RingTrainerMixin) and isinstance(trainer, Theirs) and type(trainer).__name__ == "Theirs"
    assert not issubclass(Theirs, RingTrainerMixin) and trainer.ring.world_size == 1
    assert trainer.train().training_loss > 0


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"neftune_noise_alpha": 5.0}, "neftune_noise_alpha: the noise is scaled by the tokens of a row"),
        ({"given": {"train_dataset": Stream(texts())}}, r"Stream is an IterableDataset.*\"dispatch_batches\": False"),
    ],
)
def test_what_is_refused_when_the_trainer_is_made(
    options: dict[str, Any], says: str, tmp_path: Path, config: RingParallelismConfig
) -> None:
    with pytest.raises(UnsupportedError, match=says):
        make_trainer(tmp_path, config, **options)


def test_loops_of_ones_own(config: RingParallelismConfig) -> None:
    with pytest.raises(UnsupportedError, match="RingParallelismConfig is for a Trainer of transformers; in a loop of"):
        Accelerator(cpu=True, parallelism_config=config)
