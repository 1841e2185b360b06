"""Points of a sweep as jobs: one after another here, or by Hydra's launchers of submitit, here or by Slurm.

A job of submitit finds its point, and leaves its record, as a file among the sweep's, whoever waits for it; so a sweep
that was killed while Slurm worked finds what was measured meanwhile.
Guarantees: a point that fails is a record, and the jobs after it run.
"""

from __future__ import annotations

import json
import math
import shlex
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ringattn.errors import InputError, RingError
from ringattn.launch.config import composed_as, run_application
from ringattn.launch.measure.environment import code_version
from ringattn.launch.measure.points import hash_of, make_record
from ringattn.launch.measure.run import met_in_job, run_here
from ringattn.launch.measure.run_config import RunConfig, from_spec, spec_of, words_of
from ringattn.launch.options import option
from ringattn.launch.processes import RanksError
from ringattn.observe.files import write_file

if TYPE_CHECKING:
    from omegaconf import DictConfig

LAUNCHERS = {"local": None, "submitit_local": "submitit_local", "slurm": "submitit_slurm"}
"""Ours to Hydra's; local needs none."""
ARRIVALS = "jobs"
"""Folder of points that jobs are to measure, and of records that nobody has taken yet."""
OOM_KINDS = ("OutOfMemoryError", "MemoryError")
START_MIN = 5
"""Minutes a job gets beside the point's own timeout, for imports and for starting ranks."""
SIGNAL_S = 60
"""Seconds between Slurm's warning and the end of a job."""


@dataclass
class SlurmConfig:
    """What Slurm is asked for; nodes, processes and time follow from the points."""

    partition: str | None = option(None, "of Slurm; its default if not set")
    account: str | None = option(None, "of Slurm, that pays")
    gpus_per_node: int | None = option(None, "GPUs of each node, for as many processes", least=1)
    cpus_per_task: int | None = option(None, "cores of each node, for all its processes", least=1)
    mem_gb: int | None = option(None, "host memory of each node in GB", least=1)
    array_parallelism: int = option(1, "points that may run at the same time", least=1)
    setup: list[str] | None = option(None, "shell lines before a job, as setup=['module load cuda']")


@dataclass
class JobConfig:
    """What a job of submitit is told."""

    folder: str = option("", "of the sweep")
    point: str = option("", "hash of the point, whose options are a file in the sweep's folder")


def point_record(config: RunConfig) -> dict[str, Any] | None:
    """Run one point on processes of its own; its record, whatever happens. None on other nodes than the first."""
    started, begin, facts = datetime.now(UTC), time.perf_counter(), {}
    status, message = "ok", ""
    try:
        facts = run_here(config, None, quiet=True)
    except RanksError as error:
        status = "oom" if error.kind in OOM_KINDS else "timeout" if error.kind == "timeout" else "error"
        message = str(error)
    except RingError as error:
        status, message = "error", str(error)
    if config.node_rank:
        return None
    wall_s = time.perf_counter() - begin
    return make_record(config, status, message, facts, started, wall_s, code_version(), _again(config))


def _again(config: RunConfig) -> str:
    """The command that repeats a point; on several nodes it lacks where they meet."""
    return shlex.join(["ringattn", "run", *words_of(replace(config, node_rank=0, rdzv_endpoint=""))])


def run_job(composed: DictConfig) -> None:
    """Hydra's task: one point, whose record it leaves in the sweep's folder."""
    job = composed_as(JobConfig, composed)
    folder = Path(job.folder)
    config = from_spec(json.loads(_asked(folder, job.point).read_text(encoding="utf-8")))
    if config.nnodes > 1:
        config = met_in_job(config)
    record = point_record(config)
    if record is not None:
        leave(folder, record)


def _asked(folder: Path, point: str) -> Path:
    """The options of a point, for its job."""
    return folder / ARRIVALS / f"{point}.point"


def leave(folder: Path, record: dict[str, Any]) -> None:
    """Put a record where `arrived` finds it, all of it or nothing."""
    (folder / ARRIVALS).mkdir(exist_ok=True)
    write_file(folder / ARRIVALS / f"{record['hash']}.json", json.dumps(record))


def arrived(folder: Path) -> Iterator[dict[str, Any]]:
    """The records that jobs have left, in the order in which they ended; each file goes once its record was used."""
    for file in sorted((folder / ARRIVALS).glob("*.json"), key=lambda file: file.stat().st_mtime_ns):
        yield json.loads(file.read_text(encoding="utf-8"))
        file.unlink()


class Jobs:
    """Starts jobs in a sweep's folder; made by `opened_jobs`."""

    def __init__(self, folder: Path, launcher: str, slurm: SlurmConfig) -> None:
        self.folder, self.launcher, self.slurm = folder, launcher, slurm

    def run(self, configs: Sequence[RunConfig]) -> None:
        """Run all points; return when every job has ended.

        Raises `RingError` if a job itself failed, which leaves no record of its point.
        """
        for batch in self._batches(configs):
            try:
                self._run_batch(batch)
            except (RingError, KeyboardInterrupt):
                raise
            except Exception as error:
                if len(batch) > 1:
                    raise RingError(
                        f"a job of Slurm failed ({error}); others may still run, and what they leave is kept: give the "
                        f"same command again to take it in and to repeat what is missing. Logs: {self.folder}/.submitit"
                    ) from error
                message = f"the job ended without an answer: {error}; logs: {self.folder}/.submitit"
                record = make_record(
                    batch[0], "error", message, {}, datetime.now(UTC), 0.0, code_version(), _again(batch[0])
                )
                leave(self.folder, record)

    def parameters(self, configs: Sequence[RunConfig]) -> dict[str, Any]:
        """What submitit is asked for, by its own names: enough for the largest of these points."""
        nodes = configs[0].nnodes
        minutes = START_MIN + math.ceil(max(config.limit_s for config in configs) / 60)
        asked: dict[str, Any] = {"name": "ringattn", "timeout_min": minutes}
        if self.launcher == "submitit_local":
            return {**asked, "tasks_per_node": nodes}
        asked["signal_delay_s"] = SIGNAL_S
        given = {key: value for key, value in asdict(self.slurm).items() if value is not None}
        return {**asked, "nodes": nodes, "tasks_per_node": 1, **given}

    def script(self, configs: Sequence[RunConfig]) -> str:
        """What sbatch would get for these points, but for the job's own folder."""
        from submitit.slurm.slurm import SlurmExecutor, _convert_mem, _make_sbatch_string

        names = {key: str(name) for key, name in (SlurmExecutor._equivalence_dict() or {}).items()}
        asked = {names.get(key, key): value for key, value in self.parameters(configs).items()}
        if "mem" in asked:
            asked["mem"] = _convert_mem(asked["mem"])
        command = "python -u -m submitit.core._submit JOB_FOLDER"
        return str(_make_sbatch_string(command, self.folder / ".submitit", map_count=len(configs), **asked))

    def _batches(self, configs: Sequence[RunConfig]) -> Iterator[list[RunConfig]]:
        """What is started at once: here one point, so that none disturbs another; by Slurm one array a node count."""
        if self.launcher != "slurm":
            yield from ([config] for config in configs)
            return
        for nodes in sorted({config.nnodes for config in configs}):
            yield [config for config in configs if config.nnodes == nodes]

    def _run_batch(self, batch: Sequence[RunConfig]) -> None:
        if self.launcher == "local":
            for config in batch:
                if record := point_record(config):
                    leave(self.folder, record)
            return
        (self.folder / ARRIVALS).mkdir(exist_ok=True)
        asked = {hash_of(config): config for config in batch}
        for name, config in asked.items():
            write_file(_asked(self.folder, name), json.dumps(spec_of(config)))
        run_application(["--multirun", *self._overrides(batch, list(asked))], JobConfig, JobConfig.__name__, run_job)
        for name in asked:
            _asked(self.folder, name).unlink()

    def _overrides(self, configs: Sequence[RunConfig], names: Sequence[str]) -> list[str]:
        """What Hydra is told for jobs in this folder."""
        given: dict[str, Any] = {
            "sweep.dir": str(self.folder / ARRIVALS), "sweep.subdir": ".", "output_subdir": None,
            "launcher.submitit_folder": f"{self.folder}/.submitit/%j",
            **{f"launcher.{key}": value for key, value in self.parameters(configs).items()},
        }  # fmt: skip
        return [
            f"folder={_in_hydra(str(self.folder))}",
            f"point={','.join(map(_in_hydra, names))}",
            *(f"hydra/launcher={LAUNCHERS[self.launcher]}", "hydra/hydra_logging=none", "hydra/job_logging=none"),
            *(f"hydra.{key}={_in_hydra(value)}" for key, value in given.items()),
        ]


def _in_hydra(value: Any) -> str:
    """A value in Hydra's grammar of overrides, text in quotes whatever it holds."""
    if isinstance(value, str):
        quoted = value.replace("\\", "\\\\").replace("'", "\\'")
        return f"'{quoted}'"
    if isinstance(value, list):
        return f"[{','.join(map(_in_hydra, value))}]"
    return "null" if value is None else str(value)


def opened_jobs(folder: Path, launcher: str, slurm: SlurmConfig) -> Jobs:
    """Jobs in `folder`, an absolute path. Raises `InputError` if the launcher is not installed."""
    if launcher != "local" and find_spec("hydra_plugins.hydra_submitit_launcher") is None:
        raise InputError(f"launcher={launcher}: needs submitit; pip install 'ringattn[slurm]'")
    return Jobs(folder, launcher, slurm)
