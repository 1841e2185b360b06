"""Checkpoints of a training run: save, find, check and load them, with `torch.distributed.checkpoint`.

A checkpoint is a folder `step-N` in the run's `out/checkpoints`. It holds the weights and the optimizer's state, which
all ranks write together, and `run.json`, which is written last. `run.json` names the run and the step, lists every
other file with its bytes and digest, and has a digest of itself. On several machines the folder is shared.

Guarantees: a checkpoint exists only once it is complete. If a file is missing, or has a length or content other than
was written, it is named before anything is loaded. The last two good checkpoints are kept, and a damaged checkpoint is
never loaded. A checkpoint of another model or of other data is refused, and the error names the key that differs. A
checkpoint can be loaded with any number of replicas and ranks and any sharding. Loading runs no code that a checkpoint
holds.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import pathlib
import pickle
import re
import shutil
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint import metadata as dcp_metadata
from torch.distributed.checkpoint._nested_dict import set_element
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, _StorageInfo
from torch.distributed.checkpoint.planner import ReadItem
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from ringattn import Ring
from ringattn.errors import InputError, NonFiniteError, RingError
from ringattn.launch.folders import FolderLock, not_written
from ringattn.launch.options import leaves
from ringattn.launch.ranks import restarts_of_torchrun, torchrun_job
from ringattn.launch.train.config import TrainConfig
from ringattn.launch.train.data import Documents
from ringattn.launch.train.mesh import join_process_group
from ringattn.launch.train.model import Transformer, local_bytes

RUN = "run.json"
KEPT = 2
MAY_CHANGE = frozenset({
    "ranks", "replicas", "micro_batch", "sharding", "layout", "schedule", "engine", "transport", "threads_per_rank",
    "recompute", "saved_activations", "chunked_loss_tokens", "tiled_mlp_tokens", "head_groups", "steps",
    "learning_rate", "warmup_steps", "clip_norm", "nonfinite", "timeout_s", "limit_s", "tokenizer", "out",
    "checkpoint_every_steps", "resume", "restarts", "max_tokens_per_rank",
})  # fmt: skip
"""Keys in which a run may differ from the run that it resumes. All other keys must be equal: they determine the model,
its optimizer or the data."""


@dataclass
class Curve:
    """Losses and gradient norms of all steps since the run began, including those before a resume."""

    losses: list[float | None] = field(default_factory=list)
    grad_norms: list[float | None] = field(default_factory=list)
    """None where the step was skipped."""
    skipped_steps: list[int] = field(default_factory=list)
    """Numbers (from 0) of the steps that did not change the weights, because a loss or gradient was not finite."""


def checkpoints_of(
    everyone: Ring, config: TrainConfig, text: Documents, lock: FolderLock | None = None
) -> Checkpoints | None:
    """Return the checkpoints of a run, None if it saves none and no rank sees any. All ranks call it together."""
    idle = config.checkpoint_every_steps is None and config.resume in ("auto", "never")
    seen = everyone.all_gather_text(
        "".join(map(str, named(Path(config.out) / "checkpoints")))
    )  # a folder that is not shared may exist on one machine only
    return None if idle and not any(seen) else Checkpoints(everyone, config, text, lock)


class Checkpoints:
    """The checkpoints of one run. All ranks call its methods together."""

    def __init__(self, everyone: Ring, config: TrainConfig, text: Documents, lock: FolderLock | None = None) -> None:
        """Open the process group that checkpoints need. Raises `InputError` if the ranks are threads.

        `text`: the text that the run learns. `lock`: the lock of the folder on rank 0, None on other ranks.
        """
        if everyone.world_size > 1:
            saves = config.checkpoint_every_steps is not None
            key = "checkpoint_every_steps" if saves else f"resume={config.resume}"
            join_process_group(everyone, key, config.timeout_s)
        self.everyone, self.config, self.lock = everyone, config, lock
        self.folder = Path(config.out) / "checkpoints"
        self.damaged: list[str] = []
        """A sentence for each checkpoint that was skipped because it is damaged."""
        # Identify the text by its content, because its file may be moved, and another text may have the same path.
        facts = {key: value for key, value, _ in leaves(config) if key not in MAY_CHANGE}
        self.facts = {**facts, "text": text.digest()}

    def save_if_due(self, model: Transformer, optimizer: Optimizer, curve: Curve) -> None:
        """Save after every `checkpoint_every_steps` steps and after the last, unless all steps so far were skipped."""
        done, every = len(curve.losses), self.config.checkpoint_every_steps
        if done == len(curve.skipped_steps):
            # Nothing has changed since the start. Besides, saving now would make torch create the optimizer's state by
            # a step that counts.
            return
        if every is not None and (done % every == 0 or done == self.config.steps):
            self.save(model, optimizer, curve)

    def save(self, model: Transformer, optimizer: Optimizer, curve: Curve) -> None:
        """Save the state after `len(curve.losses)` steps. If the run is killed meanwhile, the earlier checkpoints stay.

        Raises, on all ranks, `NonFiniteError` if weights or optimizer state are not finite, and `RingError` if the
        files cannot be written or this run no longer holds the lock of the folder. The earlier checkpoints stay then,
        too.
        """
        done = len(curve.losses)
        if not all_finite(self.everyone, model, optimizer):
            outlook = "no checkpoint exists yet: lower learning_rate and start again"
            if self._has_checkpoints():
                outlook = "the earlier checkpoints are kept: lower learning_rate and resume from the last one"
            raise NonFiniteError(
                f"step {done} of {self.config.steps}: the weights or the optimizer's state after it are not finite, so "
                f"they are not saved; {outlook}"
            )
        path = self.folder / f"step-{done:08d}"
        partial = path.with_suffix(".partial")
        rank, state = self.everyone.rank, _state(model, optimizer)
        needed = _bytes_of(state) * (self.everyone.world_size if self.config.sharding != "none" else 1)

        def begin() -> None:
            if lost := self.lock and self.lock.lost():
                raise RingError(f"out={self.config.out}: {lost}; no checkpoint is saved there any more")
            # Remove what a save or a removal left when the run was killed.
            for remains in [*self.folder.glob("step-*.partial"), *self.folder.glob("step-*.deleted")]:
                shutil.rmtree(remains)
            partial.mkdir(parents=True)

        def write() -> dict[str, tuple[int, str]]:
            with _without_group_warning():
                dcp.save(state, checkpoint_id=partial)
            # Each rank computes the digests of its own files, so they are computed in parallel.
            return {file.name: described(file) for file in partial.glob(f"__{rank}_*")}

        def end(files: dict[str, tuple[int, str]]) -> None:
            files.update({file.name: described(file) for file in partial.iterdir() if file.name not in files})
            write_run(partial, {"facts": self.facts, "job": torchrun_job(), **asdict(curve)}, files)
            if path.exists():  # damaged: otherwise the run would have resumed from it or a later one
                remove(path)
            partial.rename(path)

        # All ranks confirm each of the three steps. The last one renames the folder to the name of a checkpoint.
        self._on_all_ranks(partial, needed, begin if rank == 0 else None)
        of_ranks = self._on_all_ranks(partial, needed, write)
        files = {name: tuple(facts) for of_rank in of_ranks for name, facts in of_rank.items()}
        self._on_all_ranks(partial, needed, (lambda: end(files)) if rank == 0 else None)
        self._keep_good_ones(path)

    def _on_all_ranks(self, partial: Path, needed_bytes: int, work: Callable[[], Any] | None) -> list[Any]:
        """Run `work`, if any, on each rank and return the results by rank.

        If `work` fails on a rank, the unfinished save is removed and all ranks raise `RingError`. If a signal handler
        raises an error within `work`, the save is removed and the same error is raised.
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
        answers = [json.loads(message) for message in self.everyone.all_gather_text(json.dumps([answer, failure]))]
        failed = [(rank, failure) for rank, (_, failure) in enumerate(answers) if failure]
        if failed:
            if self.everyone.rank == 0:
                shutil.rmtree(partial, ignore_errors=True)
            # Wait until the folder is clean before a rank looks for checkpoints, or raises and ends.
            self.everyone.barrier()
            of_rank = f" (rank {failed[0][0]})" if self.everyone.world_size > 1 else ""
            outlook = "no checkpoint exists yet"
            if self._has_checkpoints():
                outlook = "the earlier checkpoints are kept, and resume=auto resumes from the last one"
            raise RingError(f"{failed[0][1]}; {outlook}{of_rank}")
        return [answer for answer, _ in answers]

    def _has_checkpoints(self) -> bool:
        """Return whether rank 0 sees any checkpoint of this run. All ranks call it together."""
        return bool(json.loads(self.everyone.all_gather_text(json.dumps(bool(named(self.folder))))[0]))

    def _keep_good_ones(self, new: Path) -> None:
        """Remove the checkpoints older than the last `KEPT` good ones. Damaged checkpoints are not counted.

        `new`: the checkpoint that has just been written.
        """
        names = json.loads(self.everyone.all_gather_text(json.dumps([path.name for path in named(self.folder)]))[0])
        good = 0
        for path in (self.folder / name for name in names):
            if good >= KEPT:
                if self.everyone.rank == 0:
                    remove(path)
            else:
                # The new one is good: its digests were computed from its files a moment ago.
                good += path == new or self._damage(path) is None

    def resume(self, model: Transformer, optimizer: Optimizer) -> Curve:
        """Load the checkpoint that the option `resume` selects into the model and its optimizer.

        Return the curve so far, which is empty for a new run. `resume=auto` selects the newest checkpoint that is not
        damaged. Raises `InputError`, with the key first, for a checkpoint that is damaged, might run code, does not
        exist, belongs to another run, or has more steps than `steps`. Also raises it if `resume` is not auto and the
        folder already has checkpoints, unless this is a restart by the torchrun that saved them.
        """
        is_named, candidates = self._chosen()
        if not candidates:
            return Curve()
        path = self._first_good(candidates, is_named)
        run = read_run(path)
        self._check(path, run["facts"])
        curve = Curve(run["losses"], run["grad_norms"], run["skipped_steps"])
        if len(curve.losses) > self.config.steps:
            raise InputError(f"steps={self.config.steps}: {path} was saved after {len(curve.losses)} steps already")
        state = _state(model, optimizer)
        groups = [dict(group) for group in state["optimizer"]["param_groups"]]
        try:
            with _without_group_warning():
                load_checkpoint(self.everyone, state, path)
        except InputError as error:
            raise InputError(f"resume={self.config.resume}: {path}: {error}") from error
        # How the optimizer computes depends on the device, which may be another than that of the checkpoint.
        for saved, group in zip(state["optimizer"]["param_groups"], groups, strict=True):
            saved.update({key: group[key] for key in ("foreach", "fused") if key in group})
        set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
        return curve

    def _first_good(self, candidates: Sequence[Path], is_named: bool) -> Path:
        """Return the newest candidate that is not damaged.

        If the option `resume` names a checkpoint (`is_named`), only this one may be returned. Raises `InputError` if
        the checkpoint or all candidates are damaged.
        """
        damages = []
        for path in candidates:
            damage = self._damage(path)
            if damage is None:
                break
            damages.append(damage)
        else:
            raise InputError(
                f"resume={self.config.resume}: {'; '.join(damages)}; no older checkpoint is undamaged, so the run "
                "cannot resume: restore the file from a copy, or choose another folder with out=PATH to start again"
            )
        if damages and is_named:
            raise InputError(
                f"resume={self.config.resume}: {'; '.join(damages)}; the next older undamaged checkpoint is {path}"
            )
        self.damaged = [f"{damage}; resuming from {path}" for damage in damages]
        if self.everyone.rank == 0:
            for line in self.damaged:
                print(f"ringattn train: {line}", file=sys.stderr, flush=True)
        return path

    def _damage(self, path: Path) -> str | None:
        """Return a text about the first damaged file of a checkpoint, or None. Each rank checks some of the files."""
        damage = ""
        try:
            check_files(path, read_run(path)["files"], self.everyone.rank, self.everyone.world_size)
        except DamagedError as error:
            damage = str(error)
        return next(filter(None, self.everyone.all_gather_text(damage)), None)

    def _chosen(self) -> tuple[bool, list[Path]]:
        """Return whether the option `resume` names a checkpoint, and the candidates, best first.

        The result is the same on all ranks.
        """
        resume, saved = self.config.resume, named(self.folder)
        view = [list(map(str, saved)), _is_of_this_job(saved), (Path(resume) / RUN).exists()]
        views = [json.loads(message) for message in self.everyone.all_gather_text(json.dumps(view))]
        for rank, (paths, _, _) in enumerate(views):
            if paths != views[0][0]:
                raise InputError(
                    f"out={self.config.out}: rank 0 sees the checkpoints {_newest(views[0][0])} and rank "
                    f"{rank} {_newest(paths)}; all machines must share this folder"
                )
        if resume == "auto" or views[0][1]:  # the view of rank 0 decides, because it wrote run.json
            return False, saved
        if saved:
            raise InputError(
                f"resume={resume}: {saved[0]} is in the folder already; use resume=auto to resume from it, or choose "
                "another folder with out=PATH, so that checkpoints of two runs do not share a folder"
            )
        if resume == "never":
            return False, []
        if lacking := [rank for rank, (_, _, exists) in enumerate(views) if not exists]:
            where = f" on ranks {lacking}" if self.everyone.world_size > 1 else ""
            raise InputError(
                f"resume={resume}: it holds no complete checkpoint{where}; name a folder step-N that all machines see"
            )
        path = Path(resume)
        siblings = named(path.parent)
        return True, [path, *(siblings[siblings.index(path) + 1 :] if path in siblings else ())]

    def _check(self, path: Path, theirs: dict[str, Any]) -> None:
        """Raise `InputError` for the first key in which the run of the checkpoint differs from this one."""
        for key in (key for key in sorted({*theirs, *self.facts}) if theirs.get(key) != self.facts.get(key)):
            reason = f"has {theirs.get(key)}" if key != "text" else "was trained on another text"
            value = self.config.text if key == "text" else self.facts.get(key)
            raise InputError(
                f"{key}={value}: the checkpoint {path} {reason}; choose another folder with out=PATH to start again"
            )


def _newest(paths: Sequence[str]) -> str:
    return paths[0] if paths else "none"


def _interrupt(error: BaseException, rank: int) -> BaseException | None:
    """Return the KeyboardInterrupt or SystemExit that torch wrapped in this rank's `CheckpointException`, or None."""
    if not isinstance(error, CheckpointException) or rank not in error.failures:
        return None
    of_rank = error.failures[rank][0]
    return None if isinstance(of_rank, Exception) else of_rank


def _is_of_this_job(saved: Sequence[Path]) -> bool:
    """Return whether this process is a restart by the torchrun whose earlier ranks saved the newest checkpoint."""
    if not restarts_of_torchrun():
        return False
    for path in saved:
        with suppress(DamagedError):
            job = read_run(path)["job"]
            return job is not None and job == torchrun_job()
    return False


def _bytes_of(state: Any) -> int:
    """Return the bytes of this rank's tensors in nested dictionaries."""
    if isinstance(state, dict):
        return sum(map(_bytes_of, state.values()))
    return local_bytes(state) if isinstance(state, Tensor) else 0


@contextmanager
def _without_group_warning() -> Iterator[None]:
    """Silence torch's warning that there is no process group, which one process does not need."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield


def _state(model: Transformer, optimizer: Optimizer) -> dict[str, Any]:
    """Return the state of model and optimizer to save or load. Under FSDP it is this rank's shard."""
    of_model, of_optimizer = get_state_dict(model, optimizer)
    return {"model": of_model, "optimizer": of_optimizer}


def all_finite(everyone: Ring, model: Transformer, optimizer: Optimizer | None = None) -> bool:
    """Return whether the weights and the optimizer's state are finite on all ranks. This is a collective call.

    Without `optimizer`, only the weights are checked.
    """
    tensors: list[Tensor] = [weight.detach() for weight in model.parameters()]
    if optimizer is not None:
        tensors += [part for state in optimizer.state.values() for part in state.values() if isinstance(part, Tensor)]
    spoiled = torch.zeros((), dtype=torch.float64, device=everyone.device)
    for tensor in tensors:
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        if local.is_floating_point():
            spoiled += (~local.isfinite().all()).to(spoiled)
    # Sum over all ranks: under FSDP, one rank may hold the only shard that is not finite.
    everyone.all_reduce([spoiled])
    return not spoiled.item()


# --- folders and digests ---------------------------------------------------------------------------------------------


class DamagedError(Exception):
    """The error if a checkpoint differs from what was written. The message names the file."""


def latest(folder: Path) -> Path | None:
    """Return the newest complete checkpoint of the run with the folder `folder`, or None. Its files are not checked."""
    return next((path for path in named(folder / "checkpoints") if (path / RUN).exists()), None)


def named(folder: Path) -> list[Path]:
    """Return the paths in `folder` that have the name of a checkpoint, the newest first."""
    paths = [path for path in folder.glob("step-*") if re.fullmatch(r"step-\d+", path.name)]
    return sorted(paths, key=lambda path: int(path.name.removeprefix("step-")), reverse=True)


def remove(path: Path) -> None:
    """Remove a checkpoint. It is renamed first, so that a partly removed folder does not have a checkpoint's name."""
    shutil.rmtree(path.rename(path.with_suffix(".deleted")))


def described(path: Path) -> tuple[int, str]:
    """Return the bytes and the digest of a file."""
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16)).hexdigest()
        return file.tell(), digest


def write_run(folder: Path, content: dict[str, Any], files: dict[str, tuple[int, str]]) -> None:
    """Write `run.json`, which completes the checkpoint in `folder`: the facts of the run, and a list of its files."""
    content = {**content, "files": files}
    with (folder / RUN).open("x", encoding="utf-8") as run:
        json.dump({**content, "digest": _digest(content)}, run, allow_nan=False)
        # Flush the file to the disk before the folder is renamed. torch has already flushed the other files.
        run.flush()
        os.fsync(run.fileno())


def read_run(folder: Path) -> dict[str, Any]:
    """Read `run.json`. Raises `DamagedError` if it is missing or differs from what was written."""
    path = folder / RUN
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        digest = content.pop("digest")
    except FileNotFoundError:
        raise DamagedError(f"{path} is missing") from None
    except OSError as error:
        raise DamagedError(f"{path} cannot be read ({error.strerror})") from error
    except (ValueError, KeyError, AttributeError, TypeError):
        raise DamagedError(f"{path} is damaged (truncated, or without a digest)") from None
    if digest != _digest(content):
        raise DamagedError(f"{path} is damaged (its digest differs)")
    return dict(content)


def check_files(folder: Path, files: dict[str, tuple[int, str]], part: int = 0, parts: int = 1) -> None:
    """Raise `DamagedError` for the first file that differs from what was written.

    Of the sorted files, every `parts`-th is checked, beginning with number `part`.
    """
    for name in sorted(files)[part::parts]:
        path, (size, digest) = folder / name, files[name]
        try:
            actual_size, actual_digest = described(path)
        except FileNotFoundError:
            raise DamagedError(f"{path} is missing") from None
        except OSError as error:
            raise DamagedError(f"{path} cannot be read ({error.strerror})") from error
        if actual_size != size:
            kind = "truncated" if actual_size < size else "too long"
            raise DamagedError(f"{path} is {kind} ({actual_size} bytes of {size})")
        if actual_digest != digest:
            raise DamagedError(f"{path} is damaged (its digest differs)")


def _digest(content: dict[str, Any]) -> str:
    return hashlib.blake2b(json.dumps(content, sort_keys=True).encode(), digest_size=16).hexdigest()


# --- loading an untrusted checkpoint runs none of its code ------------------------------------------------------------


INSTANCES = (
    dcp_metadata.Metadata,
    dcp_metadata.MetadataIndex,
    dcp_metadata.TensorStorageMetadata,
    dcp_metadata.BytesStorageMetadata,
    dcp_metadata.ChunkStorageMetadata,
    dcp_metadata.TensorProperties,
    dcp_metadata.StorageMeta,
    _StorageInfo,
)
"""Classes whose attributes `.metadata` may set."""
ALLOWED: dict[tuple[str, str], Any] = {
    **{(each.__module__, each.__name__): each for each in (*INSTANCES, dcp_metadata._MEM_FORMAT_ENCODING)},
    **{("torch", name): value for name, value in vars(torch).items() if isinstance(value, torch.dtype)},
    ("torch", "Size"): torch.Size,
    ("torch.serialization", "_get_layout"): torch.serialization._get_layout,
    **{(module, "PosixPath"): pathlib.PurePosixPath for module in ("pathlib", "pathlib._local")},
}
"""The names that `.metadata` may contain, and their objects. The path in `.metadata`, to which the checkpoint was
saved, is not used."""
REMEDY = "it might run code, and `ringattn train` never writes it: load only checkpoints that you trust"


# torch's reader unpickles `.metadata`, and its planner unpickles every entry that is not a tensor, both with any class.
# The author of a checkpoint could therefore run code in the process that loads it. Here `.metadata` may hold only the
# classes that torch itself writes there, and the entries are loaded with `weights_only=True`.


class MetadataUnpickler(pickle._Unpickler):
    """An unpickler that finds only `ALLOWED` objects. It extends Python's unpickler, whose steps can be overridden."""

    dispatch: ClassVar[dict[int, Any]] = dict(pickle._Unpickler.dispatch)
    stack: list[Any]

    def find_class(self, module: str, name: str) -> Any:
        """Return the object for a name in the pickle. Raises `InputError` if it is not in `ALLOWED`."""
        try:
            return ALLOWED[module, name]
        except KeyError:
            raise InputError(f".metadata names {module}.{name}; {REMEDY}") from None

    def load_build(self) -> None:
        """Set the attributes of an object, which must be one of `INSTANCES`.

        A class or function is refused, because setting its attributes would change it for the whole process.
        """
        if not isinstance(self.stack[-2], INSTANCES):
            raise InputError(f".metadata sets attributes of {self.stack[-2]!r}; {REMEDY}")
        build: Any = pickle._Unpickler.dispatch[pickle.BUILD[0]]
        build(self)

    dispatch[pickle.BUILD[0]] = load_build


class Reader(FileSystemReader):
    """torch's reader, with the unpickler above. Raises `InputError` if `.metadata` names other classes."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        with (path / ".metadata").open("rb") as file:
            self._metadata = MetadataUnpickler(file).load()
        if not isinstance(self._metadata, dcp_metadata.Metadata):
            raise InputError(f".metadata holds a {type(self._metadata).__name__}; {REMEDY}")

    def read_metadata(self, *args: Any, **kwargs: Any) -> dcp_metadata.Metadata:
        """See `FileSystemReader.read_metadata`."""
        # Do what torch's method does after it has unpickled the file.
        self._metadata.storage_meta = self._metadata.storage_meta or dcp_metadata.StorageMeta()
        self._metadata.storage_meta.load_id = self.load_id
        return self._metadata


class Planner(DefaultLoadPlanner):
    """torch's planner, but it loads entries other than tensors with `weights_only=True`, so they cannot run code."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """See `DefaultLoadPlanner.load_bytes`, which loads any class."""
        name = read_item.dest_index.fqn
        try:
            content = torch.load(value, weights_only=True)
        except pickle.UnpicklingError as error:
            matches = re.search(r"(?:GLOBAL|class|function) (\S+)", str(error))
            raise InputError(f"its entry {name} holds {matches[1] if matches else 'no value'}; {REMEDY}") from None
        set_element(self.original_state_dict, self.mappings[name], content)


def load_checkpoint(everyone: Ring, state: dict[str, Any], path: Path) -> None:
    """Load the checkpoint at `path` into the tensors and entries of `state`, on all ranks together.

    Raises `InputError` on all ranks if the checkpoint holds classes that are not allowed, and `RingError` if it cannot
    be loaded.
    """
    reader, refusal = None, None
    try:
        reader = Reader(path)
    except InputError as error:
        refusal = error
    except Exception as error:  # unpickling may raise any error for damaged bytes
        refusal = InputError(f".metadata cannot be read ({type(error).__name__}: {error})")
    # All ranks must refuse together. A rank that entered `dcp.load` alone would wait for the others.
    everyone.check_consistency("which checkpoint to load", refusal, always=True)
    try:
        dcp.load(state, storage_reader=reader, planner=Planner())
    except CheckpointException as error:
        cause = first_failure(error)
        if isinstance(cause, InputError):
            raise cause from error
        raise RingError(f"{path} could not be loaded: {type(cause).__name__}: {cause}") from error


def first_failure(error: BaseException) -> BaseException:
    """Return the error of the first failed rank inside a `CheckpointException`, or `error` if it is not one."""
    if not isinstance(error, CheckpointException):
        return error
    return next((of_rank for of_rank, _ in error.failures.values()), error)
