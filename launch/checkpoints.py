"""Checkpoints of a training run, by `torch.distributed.checkpoint`: saved whole, found again, loaded anywhere.

A checkpoint is a folder `step-N` of the run's `out_dir/checkpoints`: the weights and the optimizer's state as all ranks
together wrote them, and `run.json`, which says of what run and step it is. On several machines the folder is shared.
Promises: a checkpoint is there once it is complete, and not before; the last two are kept. One of another model or of
other data is refused by the name of the key that differs; any number of replicas, ranks and any sharding may load it.
Does not know: how a step is trained.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.optim import Optimizer

from ringattn.errors import InputError, NonFiniteError
from ringattn.launch.documents import Documents
from ringattn.launch.finite import all_finite
from ringattn.launch.mesh import join_process_group
from ringattn.launch.model import Transformer
from ringattn.launch.options import leaves
from ringattn.launch.ranks import restarts_of_torchrun, torchrun_job
from ringattn.launch.train_config import TrainConfig
from ringattn.rank_group import RankGroup

KEPT = 2
RUN = "run.json"
MAY_CHANGE = frozenset({
    "ranks", "replicas", "micro_batch", "sharding", "layout", "schedule", "engine", "transport", "threads_per_rank",
    "recompute", "saved_activations", "chunked_loss_tokens", "steps", "learning_rate", "warmup_steps", "clip_norm",
    "nonfinite", "timeout_s", "tokenizer", "out_dir", "checkpoint_every_steps", "resume", "restarts",
})  # fmt: skip
"""Keys in which a run may differ from the one it goes on with. Whatever is not here is of the model or the data."""


@dataclass
class Curve:
    """What a run has come to, step by step, since its very beginning; as many steps are done as it has losses."""

    losses: list[float | None] = field(default_factory=list)
    grad_norms: list[float | None] = field(default_factory=list)
    """None where the step was skipped."""
    skipped_steps: list[int] = field(default_factory=list)
    """Numbers (from 0) of the steps that were not finite and left the weights as they were."""


def checkpoints_of(everyone: RankGroup, config: TrainConfig, text: Documents) -> Checkpoints | None:
    """The checkpoints of a run, None if it saves none and no rank sees any. All ranks call it together."""
    idle = config.checkpoint_every_steps is None and config.resume in ("auto", "never")
    seen = everyone.told_by_all(str(latest(Path(config.out_dir)) or ""))  # by one machine alone, where it is not shared
    return None if idle and not any(seen) else Checkpoints(everyone, config, text)


def latest(folder: Path) -> Path | None:
    """The newest complete checkpoint in the `out_dir` of a run, or None."""
    complete = _complete(folder / "checkpoints")
    return complete[-1] if complete else None


def _complete(folder: Path) -> list[Path]:
    """The complete checkpoints in a folder of them, the newest last."""
    return sorted((path for path in _named(folder) if (path / RUN).exists()), key=_step_of)


def _named(folder: Path) -> list[Path]:
    """What has the name of a checkpoint there."""
    return [path for path in folder.glob("step-*") if re.fullmatch(r"step-\d+", path.name)]


def _step_of(path: Path) -> int:
    return int(path.name.removeprefix("step-"))


class Checkpoints:
    """The checkpoints of one run. All ranks call its methods together."""

    def __init__(self, everyone: RankGroup, config: TrainConfig, text: Documents) -> None:
        """`text` is what the run learns. Raises `InputError` for ranks that are threads."""
        if everyone.world_size > 1:
            saves = config.checkpoint_every_steps is not None
            join_process_group(everyone, "checkpoint_every_steps" if saves else f"resume={config.resume}")
        self.everyone, self.config = everyone, config
        self.folder = Path(config.out_dir) / "checkpoints"
        # The same text may lie elsewhere, and another under the same name.
        facts = {key: value for key, value, _ in leaves(config) if key not in MAY_CHANGE}
        self.facts = {**facts, "text": text.digest()}

    def save_if_due(self, model: Transformer, optimizer: Optimizer, curve: Curve) -> None:
        """Save every `checkpoint_every_steps` and after the last step."""
        done, every = len(curve.losses), self.config.checkpoint_every_steps
        if every is not None and (done % every == 0 or done == self.config.steps):
            self.save(model, optimizer, curve)

    def save(self, model: Transformer, optimizer: Optimizer, curve: Curve) -> None:
        """Save the state after `len(curve.losses)` steps. A run that is killed meanwhile has the checkpoints before."""
        done = len(curve.losses)
        if not all_finite(self.everyone, model, optimizer):
            raise NonFiniteError(
                f"step {done} of {self.config.steps}: the weights or the optimizer's state after it are not finite, so "
                "they are not saved; the checkpoints before stay: lower learning_rate and resume from the last"
            )
        path = self.folder / f"step-{done:08d}"
        partial = path.with_suffix(".partial")
        if self.everyone.rank == 0:
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir(parents=True)
        self.everyone.barrier()
        with _one_process_is_meant():
            dcp.save(_state(model, optimizer), checkpoint_id=partial)
        if self.everyone.rank == 0:
            with (partial / RUN).open("w", encoding="utf-8") as run:
                json.dump({"facts": self.facts, "job": torchrun_job(), **asdict(curve)}, run)
                run.flush()
                os.fsync(run.fileno())
            if path.exists():  # incomplete, or the run would have gone on from it or from a later one
                shutil.rmtree(path)
            partial.rename(path)
            for old in set(_named(self.folder)).difference(_complete(self.folder)[-KEPT:]):
                shutil.rmtree(old)

    def resume(self, model: Transformer, optimizer: Optimizer) -> Curve:
        """Load what `resume` says into the model and its optimizer; the curve so far, empty for a run that begins.

        Raises `InputError`, with the key first, for a checkpoint that is not there, is of another run or of a later
        step than the last, and where `resume` is not auto and the folder has checkpoints of its own, unless this is a
        restart of the torchrun that saved them.
        """
        path = self._chosen()
        if path is None:
            return Curve()
        run = json.loads((path / RUN).read_text(encoding="utf-8"))
        self._check(path, run["facts"])
        curve = Curve(run["losses"], run["grad_norms"], run["skipped_steps"])
        if len(curve.losses) > self.config.steps:
            raise InputError(f"steps={self.config.steps}: {path} has {len(curve.losses)} steps behind it already")
        state = _state(model, optimizer)
        with _one_process_is_meant():
            dcp.load(state, checkpoint_id=path)
        set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
        return curve

    def _chosen(self) -> Path | None:
        """The checkpoint to go on from, the same on all ranks."""
        resume, own = self.config.resume, latest(Path(self.config.out_dir))
        mine = [str(own), _is_of_this_job(own), (Path(resume) / RUN).exists()]
        told = [json.loads(one) for one in self.everyone.told_by_all(json.dumps(mine))]
        seen = [path for path, _, _ in told]
        if len(set(seen)) > 1:
            raise InputError(
                f"out_dir={self.config.out_dir}: rank 0 sees the checkpoint {seen[0]} and rank {self.everyone.rank} "
                f"{own}; all machines must share this folder"
            )
        if resume == "auto" or told[0][1]:  # rank 0 has saved it
            return own
        if own is not None:
            raise InputError(
                f"resume={resume}: {own} is in out_dir already; resume=auto goes on with it, else choose another "
                "out_dir, or the checkpoints of two runs would lie in one folder"
            )
        if resume == "never":
            return None
        if lacking := [rank for rank, (_, _, there) in enumerate(told) if not there]:
            where = f" on ranks {lacking}" if self.everyone.world_size > 1 else ""
            raise InputError(
                f"resume={resume}: no complete checkpoint is there{where}; name a folder step-N that all machines see"
            )
        return Path(resume)

    def _check(self, path: Path, found: dict[str, Any]) -> None:
        for key in (key for key in sorted({*found, *self.facts}) if found.get(key) != self.facts.get(key)):
            theirs = f"has {found.get(key)}" if key != "text" else "was trained on another text"
            mine = self.config.text if key == "text" else self.facts.get(key)
            raise InputError(f"{key}={mine}: the checkpoint {path} {theirs}; choose another out_dir to begin anew")


def _is_of_this_job(path: Path | None) -> bool:
    """Whether this process is a restart and an earlier life of the same torchrun saved the checkpoint at `path`."""
    if path is None or not restarts_of_torchrun():
        return False
    job = json.loads((path / RUN).read_text(encoding="utf-8")).get("job")
    return job is not None and job == torchrun_job()


@contextmanager
def _one_process_is_meant() -> Iterator[None]:
    """Torch warns where there is no process group, which one process does not need."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield


def _state(model: Transformer, optimizer: Optimizer) -> dict[str, Any]:
    """What is saved and loaded: each rank's own part of it under FSDP, else all of it."""
    of_model, of_optimizer = get_state_dict(model, optimizer)
    return {"model": of_model, "optimizer": of_optimizer}
