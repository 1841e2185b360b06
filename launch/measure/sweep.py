"""`ringattn sweep`: measure many points and write them to one folder, for reports. A sweep can be resumed.

Each point is composed as in `ringattn run`. Points run one after another on this machine, or as jobs of submitit, which
run on this machine or through Slurm.
Guarantees: each point that ran is a line of `points.jsonl`, even if it failed. A point with the status ok in the folder
is not run again. The exit code is 0 if all points are ok, 1 if some failed, and 2 for bad options.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from importlib import resources
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from ringattn.errors import InputError, RingError
from ringattn.launch.calls import RunConfig, load_run, plain
from ringattn.launch.config import combinations, keys_of, load, parse, swept
from ringattn.launch.measure.environment import code_version
from ringattn.launch.measure.points import hash_of, leave, make_record, opened, read_points, table_of
from ringattn.launch.measure.run import DRY_RUN, attempted, command_of, met_in_job, run_here
from ringattn.launch.options import CONF, help_text, no_such_key, option, presets_of, spelled
from ringattn.launch.ranks import place_in_torchrun, threads_for

if TYPE_CHECKING:
    from submitit import AutoExecutor

PURPOSE = """\
Measures every combination of the values given as key=1,2,4; every key of `ringattn run` can have several values.
If it is run again with the same options, it resumes. --dry-run prints the commands and runs nothing.
Example: ringattn sweep out=DIR ranks=1,2,4 schedule=ring,all_gather,direct tokens=4096,8192
Presets: preset=strong (one length, more ranks), preset=weak (one length for each rank); other options override them.
Slurm:   ringattn sweep launcher=slurm slurm.partition=gpu slurm.gpus_per_node=8 ranks=8 nnodes=1,2,4 ..."""

SCALING = "scaling"
"""Folder of the presets. If it were `preset`, Hydra would read this key of the commands as a group."""
LOOK_S = 0.2
"""Seconds between two checks for new records of jobs."""
LAUNCHERS = ("local", "submitit_local", "slurm")
START_MIN = 5
"""Minutes a job gets in addition to the point's own limit, for imports and for starting ranks."""
SIGNAL_S = 60
"""Seconds between Slurm's warning and the end of a job."""


@dataclass
class SlurmConfig:
    """Options of the Slurm jobs. The points determine the nodes, processes and time of a job."""

    partition: str | None = option(None, "Slurm partition; Slurm's default if not set")
    account: str | None = option(None, "Slurm account that is charged")
    gpus_per_node: int | None = option(None, "GPUs of each node, one for each process", least=1)
    cpus_per_task: int | None = option(None, "cores of each node, shared by its processes", least=1)
    mem_gb: int | None = option(None, "host memory of each node in GB", least=1)
    array_parallelism: int = option(1, "points that may run at the same time", least=1)
    setup: list[str] | None = option(None, "shell lines before a job, for example setup=['module load cuda']")


@dataclass
class SweepConfig:
    """Options of the whole sweep."""

    out: str = option("outputs/sweep", "folder of the records; use one folder per sweep")
    launcher: str = option("local", "launcher of the points", choices=LAUNCHERS)
    preset: str | None = option(None, "preset whose values other options override", choices=tuple(presets_of(SCALING)))
    slurm: SlurmConfig = field(default_factory=SlurmConfig)


class Point(NamedTuple):
    """A configuration, labelled with the `key=value` options that vary over the sweep.

    If several combinations are the same work, one point stands for all of them, and `equal` holds the options of each
    in which they differ.
    """

    config: RunConfig
    label: str
    equal: tuple[str, ...] = ()


def main(argv: Sequence[str]) -> int:
    """Run or resume the sweep that `argv` describes."""
    words = [word for word in argv if word != DRY_RUN]
    if any(word in ("-h", "--help") for word in words):
        print(help_text("sweep", PURPOSE, SweepConfig, RunConfig))
        return 0
    try:
        if place_in_torchrun() is not None:
            raise InputError("started by torchrun, so every rank would run the whole sweep; run it without torchrun")
        options, points = described(words)
        if len(words) < len(argv):
            _print_plan(options, points)
            return 0
        return _run(options, points, words)
    except RingError as error:
        print(f"ringattn sweep: {error}", file=sys.stderr)
        return 2 if isinstance(error, InputError) else 1


# --- points ----------------------------------------------------------------------------------------------------------


def described(words: Sequence[str]) -> tuple[SweepConfig, list[Point]]:
    """Return the options of the sweep, and its points in order, without repeated work.

    Raises `InputError`, with the key first, for wrong words.
    """
    keys, all_keys = keys_of(SweepConfig), keys_of(SweepConfig, RunConfig)
    of_sweep: list[str] = []
    of_points: list[str] = []
    for override in parse(spelled(words, SweepConfig, RunConfig), all_keys):
        if override.key_or_group not in all_keys:
            raise no_such_key(override.key_or_group, all_keys)
        if override.key_or_group == "json":
            raise InputError("json: a sweep writes the records of its points into out; only `ringattn run` has json")
        if override.key_or_group in ("node_rank", "rdzv_endpoint"):
            raise InputError(f"{override.key_or_group}: the launcher of a sweep sets it on each node; leave it out")
        (of_sweep if override.key_or_group in keys else of_points).append(str(override.input_line))
    options = load(of_sweep, SweepConfig)
    of_points = [*_preset_words(options.preset, of_points), *of_points]
    varying = set(swept(of_points))
    points = []
    for combination in combinations(of_points):
        label = " ".join(word for word in combination if word.partition("=")[0] in varying)
        try:
            points.append(Point(load_run(combination), label))
        except InputError as error:
            raise InputError(f"{error} (in the point {label})" if label else str(error)) from error
    if options.launcher != "slurm":
        # Give a rank the same number of threads in every point. Otherwise a single rank would use all cores, and more
        # ranks could not be faster.
        threads = threads_for(max(point.config.ranks or 1 for point in points))
        points = [
            point._replace(config=replace(config, threads_per_rank=config.threads_per_rank or threads))
            for point in points
            for config in [point.config]
        ]
    points = _each_once(points)
    if options.launcher == "local" and (far := [point for point in points if point.config.nnodes > 1]):
        raise InputError(f"nnodes={far[0].config.nnodes}: launcher=local uses this machine only; use launcher=slurm")
    return options, points


def _each_once(points: Sequence[Point]) -> list[Point]:
    """Merge the points that are the same work. The label of a merged point has the words that all of them share.

    For example, all schedules do the same work on one rank, so one point serves as the baseline of each schedule.
    """
    alike: dict[str, list[Point]] = {}
    for point in points:
        alike.setdefault(hash_of(plain(point.config)), []).append(point)
    result = []
    for same in alike.values():
        labels = [point.label.split(" ") for point in same]
        shared = [word for word in labels[0] if all(word in label for label in labels)]
        rest = (" ".join(word for word in label if word not in shared) for label in labels)
        # Choose the point by its label, not by the order of the values, because the hashes of its points identify a
        # sweep.
        kept = min(same, key=lambda point: point.label)
        result.append(kept._replace(label=" ".join(shared), equal=tuple(rest) if len(same) > 1 else ()))
    return result


def _preset_words(preset: str | None, overrides: Sequence[str]) -> list[str]:
    """Return the words of a preset, without its number of tokens if the user sets `tokens` or `tokens_per_rank`."""
    if preset is None:
        return []
    from omegaconf import OmegaConf

    text = (resources.files(CONF) / SCALING / f"{preset}.yaml").read_text(encoding="utf-8")
    sized = any(word.startswith(("tokens=", "tokens_per_rank=")) for word in overrides)
    values = {str(key): value for key, value in OmegaConf.create(text).items()}
    return [f"{key}={value}" for key, value in values.items() if not (sized and key.startswith("tokens"))]


def equal_points(points: Sequence[Point]) -> list[str]:
    """Return a line for each point that stands for several combinations."""
    return [f"run once, because they do the same work: {point.label or 'all'}, with {'; '.join(point.equal)}"
            for point in points if any(point.equal)]  # fmt: skip


def _print_plan(options: SweepConfig, points: Sequence[Point]) -> None:
    for line in equal_points(points):
        print(f"# {line}")
    for point in points:
        config = point.config
        if config.nnodes > 1:  # Slurm determines the address when it allocates the nodes
            config = replace(config, node_rank=0, rdzv_endpoint="NODE0:PORT")
        print(f"# {hash_of(config)}  {point.label}\n{command_of(config)}")
    if options.launcher == "slurm":
        for batch in _batches(options, [point.config for point in points]):
            print(f"\n# sbatch, {len(batch)} points on {batch[0].nnodes} nodes\n{script(options, batch)}")


# --- running ---------------------------------------------------------------------------------------------------------


def _run(options: SweepConfig, points: Sequence[Point], words: Sequence[str]) -> int:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    if options.launcher != "local" and find_spec("submitit") is None:
        raise InputError(f"launcher={options.launcher}: needs submitit; pip install 'ringattn[slurm]'")
    path = Path(options.out).resolve()
    options = replace(options, out=str(path))

    def is_ok(point: Point) -> bool:
        return records.get(hash_of(point.config), {}).get("status") == "ok"

    with opened(path) as folder:
        folder.claim(words, [hash_of(point.config) for point in points], code_version())
        list(folder.collect())
        records = read_points(path)
        todo = [point for point in points if not is_ok(point)]
        print(f"{len(points)} points, {len(points) - len(todo)} of them already measured, in {path}", flush=True)
        print("".join(f"{line}\n" for line in equal_points(points)), end="", flush=True)
        labels, taken_s = {hash_of(point.config): point.label for point in todo}, []
        bar = Progress(TextColumn("sweep"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(),
                       disable=not Console().is_terminal)  # fmt: skip
        task = bar.add_task("sweep", total=len(todo))

        def show() -> None:
            for record in folder.collect():
                taken_s.append(record["wall_s"])
                left_s = sum(taken_s) / len(taken_s) * (len(todo) - len(taken_s))
                line = f"{record['status']:<8}{labels.get(record['hash'], record['hash'])}  {_figure(record)}"
                print(f"{len(taken_s)}/{len(todo)}  {line}  about {left_s:.0f} s left", flush=True)
                bar.update(task, advance=1)

        try:
            with bar:
                _measure(options, [point.config for point in todo], show)
        finally:
            records = read_points(path)
            print(table(points, records))
    failed = sum(not is_ok(point) for point in points)
    print(f"{len(points) - failed} of {len(points)} points are ok, in {path}")
    if failed:
        print("the same command runs the other points again")
    return 1 if failed else 0


def _measure(options: SweepConfig, configs: Sequence[RunConfig], show: Callable[[], None]) -> None:
    """Run the points, whose records are written to the sweep's folder. Call `show` to collect and print new records.

    Raises `RingError` if jobs cannot be submitted.
    """
    job = PointJob(Path(options.out))
    for batch in _batches(options, configs):
        if options.launcher == "local":
            job(batch[0])
            show()
            continue
        try:
            waiting = dict(zip(_executor(options, batch).map_array(job, batch), batch, strict=True))
        except Exception as error:
            raise RingError(
                f"jobs could not be submitted: {error}. Finished points are kept: give the same command again to run "
                f"the missing points. Logs: {options.out}/.submitit") from error  # fmt: skip
        while waiting:
            for ended in [each for each in waiting if each.done()]:
                config = waiting.pop(ended)
                if failure := ended.exception():
                    message = f"the job ended without a result: {failure}; logs: {options.out}/.submitit"
                    leave(job.folder, make_record(config, "error", message, {}, datetime.now(UTC), 0.0))
            show()
            time.sleep(LOOK_S)


@dataclass(frozen=True)
class PointJob:
    """A job that runs one point on new processes and writes its record, even that of a failure, to a sweep's folder."""

    folder: Path

    def __call__(self, config: RunConfig) -> None:
        """Run the point. Only the first node writes the record."""
        if config.nnodes > 1:
            config = met_in_job(config)
        record, _ = attempted(config, lambda: run_here(config, None, quiet=True))
        if config.is_first_node:
            leave(self.folder, record)

    def checkpoint(self, config: RunConfig) -> Any:
        """Return the job to submit again after Slurm has preempted it. submitit calls this method."""
        from submitit.helpers import DelayedSubmission

        return DelayedSubmission(self, config)


def _batches(options: SweepConfig, configs: Sequence[RunConfig]) -> list[list[RunConfig]]:
    """Return the points in batches that start together.

    On this machine each batch is a single point, so that points do not disturb each other. With Slurm, a batch is a job
    array of all points with the same number of nodes.
    """
    if options.launcher != "slurm":
        return [[config] for config in configs]
    return [[config for config in configs if config.nnodes == nodes] for nodes in sorted({c.nnodes for c in configs})]


def parameters(options: SweepConfig, configs: Sequence[RunConfig]) -> dict[str, Any]:
    """Return the parameters of submitit's executor. Time and nodes suffice for the largest of these points."""
    nodes = configs[0].nnodes
    minutes = START_MIN + math.ceil(max(config.limit_s for config in configs) / 60)
    common: dict[str, Any] = {"name": "ringattn", "timeout_min": minutes}
    if options.launcher == "submitit_local":
        return {**common, "tasks_per_node": nodes}
    requested = {key: value for key, value in asdict(options.slurm).items() if value is not None}
    return {**common, "signal_delay_s": SIGNAL_S, "nodes": nodes, "tasks_per_node": 1, **requested}


def _executor(options: SweepConfig, configs: Sequence[RunConfig]) -> AutoExecutor:
    from submitit import AutoExecutor

    cluster = options.launcher.removeprefix("submitit_")
    limits = {} if cluster == "local" else {"slurm_max_num_timeout": 0}  # a point that took too long is a result
    executor = AutoExecutor(f"{options.out}/.submitit/%j", cluster, **limits)
    shared = AutoExecutor._valid_parameters()
    executor.update_parameters(**{
        key if key in shared else f"{cluster}_{key}": value for key, value in parameters(options, configs).items()
    })  # fmt: skip
    return executor


def script(options: SweepConfig, configs: Sequence[RunConfig]) -> str:
    """Return the sbatch script of these points, with a placeholder for the folder of the job."""
    from submitit.slurm.slurm import SlurmExecutor, _convert_mem, _make_sbatch_string

    names = {key: str(name) for key, name in (SlurmExecutor._equivalence_dict() or {}).items()}
    settings = {names.get(key, key): value for key, value in parameters(options, configs).items()}
    if "mem" in settings:
        settings["mem"] = _convert_mem(settings["mem"])
    command = "python -u -m submitit.core._submit JOB_FOLDER"
    folder = Path(options.out).resolve() / ".submitit"
    return str(_make_sbatch_string(command, folder, map_count=len(configs), **settings))


def table(points: Sequence[Point], records: Mapping[str, Mapping[str, Any]]) -> str:
    """Return a table with a line for each point: the options that vary, status, times, speed and peak memory."""
    return table_of([(point.label, records.get(hash_of(point.config), {"status": "missing"})) for point in points])


def _figure(record: Mapping[str, Any]) -> str:
    if record["status"] != "ok":
        return str(record["message"]).splitlines()[0]
    return f"forward {record['forward_ms']['median']:.3f} ms"
