"""Checkpoints of a training run, by `torch.distributed.checkpoint`: saved whole, found again, loaded anywhere.

A checkpoint is a folder `step-N` of the run's `out_dir/checkpoints`: the weights and the optimizer's state as all ranks
together wrote them, and `run.json`, which says of what run and step it is. On several machines the folder is shared.
Guarantees: a checkpoint is there once it is complete, and not before; the last two that are good are kept, and a
damaged one is never loaded. One of another model or of other data is refused by the name of the key that differs; any
number of replicas, ranks and any sharding may load it.
"""

from __future__ import annotations

import json
import shutil
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.optim import Optimizer

from ringattn.errors import InputError, NonFiniteError, RingError
from ringattn.launch.folders import FolderLock, not_written
from ringattn.launch.options import leaves
from ringattn.launch.ranks import restarts_of_torchrun, torchrun_job
from ringattn.launch.spelling import ALIASES
from ringattn.launch.train.checkpoint_files import (
    RUN,
    DamagedError,
    check_files,
    described,
    named,
    read_run,
    remove,
    write_run,
)
from ringattn.launch.train.checkpoint_reader import first_failure, load_checkpoint
from ringattn.launch.train.config import TrainConfig
from ringattn.launch.train.documents import Documents
from ringattn.launch.train.finite import all_finite
from ringattn.launch.train.mesh import join_process_group
from ringattn.launch.train.model import Transformer
from ringattn.launch.train.optimizers import local_bytes
from ringattn.runtime.rank_group import RankGroup

KEPT = 2
MAY_CHANGE = frozenset({
    "ranks", "replicas", "micro_batch", "sharding", "layout", "schedule", "engine", "transport", "threads_per_rank",
    "recompute", "saved_activations", "chunked_loss_tokens", "tiled_mlp_tokens", "steps", "learning_rate",
    "warmup_steps", "clip_norm", "nonfinite", "timeout_s", "limit_s", "tokenizer", "out_dir", "checkpoint_every_steps",
    "resume", "restarts",
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


def checkpoints_of(
    everyone: RankGroup, config: TrainConfig, text: Documents, lock: FolderLock | None = None
) -> Checkpoints | None:
    """The checkpoints of a run, None if it saves none and no rank sees any. All ranks call it together."""
    idle = config.checkpoint_every_steps is None and config.resume in ("auto", "never")
    seen = everyone.all_gather_text(
        "".join(map(str, named(Path(config.out_dir) / "checkpoints")))
    )  # by one machine alone, where it is not shared
    return None if idle and not any(seen) else Checkpoints(everyone, config, text, lock)


class Checkpoints:
    """The checkpoints of one run. All ranks call its methods together."""

    def __init__(
        self, everyone: RankGroup, config: TrainConfig, text: Documents, lock: FolderLock | None = None
    ) -> None:
        """`text` is what the run learns; `lock` is rank 0's of the folder. Raises `InputError` for ranks that are
        threads."""
        if everyone.world_size > 1:
            saves = config.checkpoint_every_steps is not None
            key = "checkpoint_every_steps" if saves else f"resume={config.resume}"
            join_process_group(everyone, key, config.timeout_s)
        self.everyone, self.config, self.lock = everyone, config, lock
        self.folder = Path(config.out_dir) / "checkpoints"
        self.damaged: list[str] = []
        """Which checkpoints were passed over, a sentence each."""
        # The same text may lie elsewhere, and another under the same name.
        facts = {key: value for key, value, _ in leaves(config) if key not in MAY_CHANGE}
        self.facts = {**facts, "text": text.digest()}

    def save_if_due(self, model: Transformer, optimizer: Optimizer, curve: Curve) -> None:
        """Save every `checkpoint_every_steps` and after the last step, once a step was not skipped."""
        done, every = len(curve.losses), self.config.checkpoint_every_steps
        if done == len(curve.skipped_steps):
            # The run is where it began; and torch makes an optimizer's state by a step of its own, where it has none.
            return
        if every is not None and (done % every == 0 or done == self.config.steps):
            self.save(model, optimizer, curve)

    def save(self, model: Transformer, optimizer: Optimizer, curve: Curve) -> None:
        """Save the state after `len(curve.losses)` steps. A run that is killed meanwhile has the checkpoints before.

        Raises `NonFiniteError` for weights that are not finite, `RingError` where the disk does not take them or the
        folder is not this run's any more: on all ranks, and the checkpoints before stay.
        """
        done = len(curve.losses)
        if not all_finite(self.everyone, model, optimizer):
            raise NonFiniteError(
                f"step {done} of {self.config.steps}: the weights or the optimizer's state after it are not finite, so "
                "they are not saved; the checkpoints before stay: lower learning_rate and resume from the last"
            )
        path = self.folder / f"step-{done:08d}"
        partial = path.with_suffix(".partial")
        rank, state = self.everyone.rank, _state(model, optimizer)
        needed = _bytes_of(state) * (self.everyone.world_size if self.config.sharding != "none" else 1)

        def begin() -> None:
            if lost := self.lock and self.lock.lost():
                raise RingError(f"out_dir={self.config.out_dir}: {lost}; nothing is saved there any more")
            for remains in [*self.folder.glob("step-*.partial"), *self.folder.glob("step-*.deleted")]:
                shutil.rmtree(remains)
            partial.mkdir(parents=True)

        def write() -> dict[str, tuple[int, str]]:
            with _one_process_is_meant():
                dcp.save(state, checkpoint_id=partial)
            return {file.name: described(file) for file in partial.glob(f"__{rank}_*")}

        def end(files: dict[str, tuple[int, str]]) -> None:
            files.update({file.name: described(file) for file in partial.iterdir() if file.name not in files})
            write_run(partial, {"facts": self.facts, "job": torchrun_job(), **asdict(curve)}, files)
            if path.exists():  # damaged, or the run would have gone on from it or from a later one
                remove(path)
            partial.rename(path)

        self._on_all_ranks(partial, needed, begin if rank == 0 else None)
        files = {
            name: tuple(facts) for told in self._on_all_ranks(partial, needed, write) for name, facts in told.items()
        }
        self._on_all_ranks(partial, needed, (lambda: end(files)) if rank == 0 else None)
        self._keep_good_ones(path)

    def _on_all_ranks(self, partial: Path, needed_bytes: int, work: Callable[[], Any] | None) -> list[Any]:
        """What `work` comes to, by rank; where it fails on one, nothing of the save is left and all ranks raise.

        A signal handler that raises in `work` abandons the save: its own error is raised.
        """
        answer, failure = None, None
        try:
            answer = work() if work else None
        except RingError as error:
            failure = str(error)
        except (OSError, CheckpointException) as error:
            if (interrupt := _interrupt(error, self.everyone.rank)) is not None:
                shutil.rmtree(partial, ignore_errors=True)
                raise interrupt from None
            failure = str(not_written(partial.with_suffix(""), first_failure(error), needed_bytes))
        told = [json.loads(words) for words in self.everyone.all_gather_text(json.dumps([answer, failure]))]
        failed = [(rank, failure) for rank, (_, failure) in enumerate(told) if failure]
        if failed:
            if self.everyone.rank == 0:
                shutil.rmtree(partial, ignore_errors=True)
            self.everyone.barrier()
            of_rank = f" (rank {failed[0][0]})" if self.everyone.world_size > 1 else ""
            raise RingError(f"{failed[0][1]}; the checkpoints before stay, and resume=auto goes on from them{of_rank}")
        return [answer for answer, _ in told]

    def _keep_good_ones(self, new: Path) -> None:
        """Remove what is older than the last `KEPT` that are good: a damaged one must not count as one of them."""
        names = json.loads(self.everyone.all_gather_text(json.dumps([path.name for path in named(self.folder)]))[0])
        good = 0
        for path in (self.folder / name for name in names):
            if good >= KEPT:
                if self.everyone.rank == 0:
                    remove(path)
            else:
                good += path == new or self._damage(path) is None

    def resume(self, model: Transformer, optimizer: Optimizer) -> Curve:
        """Load what `resume` says into the model and its optimizer; the curve so far, empty for a run that begins.

        A damaged checkpoint is passed over for the one before, if `resume` names none. Raises `InputError`, with the
        key first, for a checkpoint that is damaged, might run code, is not there, is of another run or of a later step
        than the last. Also if `resume` is not auto and the folder has checkpoints of its own, unless this is a restart
        of the torchrun that saved them.
        """
        is_named, candidates = self._chosen()
        if not candidates:
            return Curve()
        path = self._first_good(candidates, is_named)
        run = read_run(path)
        self._check(path, run["facts"])
        curve = Curve(run["losses"], run["grad_norms"], run["skipped_steps"])
        if len(curve.losses) > self.config.steps:
            raise InputError(f"steps={self.config.steps}: {path} has {len(curve.losses)} steps behind it already")
        state = _state(model, optimizer)
        try:
            with _one_process_is_meant():
                load_checkpoint(self.everyone, state, path)
        except InputError as error:
            raise InputError(f"resume={self.config.resume}: {path}: {error}") from error
        set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
        return curve

    def _first_good(self, candidates: Sequence[Path], is_named: bool) -> Path:
        """The newest of the candidates that is not damaged; of one that `is_named` only itself."""
        found = []
        for path in candidates:
            damage = self._damage(path)
            if damage is None:
                break
            found.append(damage)
        else:
            raise InputError(
                f"resume={self.config.resume}: {'; '.join(found)}; no older checkpoint is good, so there is nothing to "
                "go on from: bring the file back from a copy, or choose another out_dir to begin anew"
            )
        if found and is_named:
            raise InputError(f"resume={self.config.resume}: {'; '.join(found)}; the next older good one is {path}")
        self.damaged = [f"{damage}; going on from {path}" for damage in found]
        if self.everyone.rank == 0:
            for line in self.damaged:
                print(f"ringattn train: {line}", file=sys.stderr, flush=True)
        return path

    def _damage(self, path: Path) -> str | None:
        """What is wrong with a checkpoint, by the name of the file, None for a good one; each rank reads a part."""
        found = ""
        try:
            check_files(path, read_run(path)["files"], self.everyone.rank, self.everyone.world_size)
        except DamagedError as error:
            found = str(error)
        return next(filter(None, self.everyone.all_gather_text(found)), None)

    def _chosen(self) -> tuple[bool, list[Path]]:
        """Whether `resume` names a checkpoint, and those to go on from, the best first: the same on all ranks."""
        resume, own = self.config.resume, named(self.folder)
        mine = [list(map(str, own)), _is_of_this_job(own), (Path(resume) / RUN).exists()]
        told = [json.loads(one) for one in self.everyone.all_gather_text(json.dumps(mine))]
        for rank, (paths, _, _) in enumerate(told):
            if paths != told[0][0]:
                raise InputError(
                    f"out_dir={self.config.out_dir}: rank 0 sees the checkpoints {_newest(told[0][0])} and rank {rank} "
                    f"{_newest(paths)}; all machines must share this folder"
                )
        if resume == "auto" or told[0][1]:  # rank 0 has saved it
            return False, own
        if own:
            raise InputError(
                f"resume={resume}: {own[0]} is in out_dir already; resume=auto goes on with it, else choose another "
                "out_dir, or the checkpoints of two runs would lie in one folder"
            )
        if resume == "never":
            return False, []
        if lacking := [rank for rank, (_, _, there) in enumerate(told) if not there]:
            where = f" on ranks {lacking}" if self.everyone.world_size > 1 else ""
            raise InputError(
                f"resume={resume}: no complete checkpoint is there{where}; name a folder step-N that all machines see"
            )
        path = Path(resume)
        beside = named(path.parent)
        return True, [path, *(beside[beside.index(path) + 1 :] if path in beside else ())]

    def _check(self, path: Path, found: dict[str, Any]) -> None:
        # Checkpoints of earlier versions have the old spellings.
        found = {key if key in self.facts else ALIASES.get(key, key): value for key, value in found.items()}
        for key in (key for key in sorted({*found, *self.facts}) if found.get(key) != self.facts.get(key)):
            theirs = f"has {found.get(key)}" if key != "text" else "was trained on another text"
            mine = self.config.text if key == "text" else self.facts.get(key)
            raise InputError(f"{key}={mine}: the checkpoint {path} {theirs}; choose another out_dir to begin anew")


def _newest(paths: Sequence[str]) -> str:
    return paths[0] if paths else "none"


def _interrupt(error: BaseException, rank: int) -> BaseException | None:
    """What a signal handler raised on this rank. Torch wraps KeyboardInterrupt and SystemExit in its own error."""
    if not isinstance(error, CheckpointException) or rank not in error.failures:
        return None
    of_rank = error.failures[rank][0]
    return None if isinstance(of_rank, Exception) else of_rank


def _is_of_this_job(own: Sequence[Path]) -> bool:
    """Whether this process is a restart and an earlier life of the same torchrun saved the newest checkpoint."""
    if not restarts_of_torchrun():
        return False
    for path in own:
        with suppress(DamagedError):
            job = read_run(path)["job"]
            return job is not None and job == torchrun_job()
    return False


def _bytes_of(state: Any) -> int:
    """Bytes of this rank's tensors in nested dictionaries."""
    if isinstance(state, dict):
        return sum(map(_bytes_of, state.values()))
    return local_bytes(state) if isinstance(state, Tensor) else 0


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
