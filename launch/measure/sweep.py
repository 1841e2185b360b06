"""`ringattn sweep`: many points, one after another or by Slurm, into one folder that can be resumed and reported.

Guarantees: every point is a line of `points.jsonl`, the failed ones too; a point that is there and ok is not run again;
exit code 0 if all are ok, 1 if some failed, 2 for bad options.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib import resources
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Self

from ringattn.errors import InputError, RingError
from ringattn.launch.config import combinations, load, parse, swept
from ringattn.launch.measure.environment import code_version
from ringattn.launch.measure.jobs import LAUNCHERS, Jobs, SlurmConfig, arrived, opened_jobs
from ringattn.launch.measure.points import Folder, hash_of, opened, read_points
from ringattn.launch.measure.run import DRY_RUN, command_of
from ringattn.launch.measure.run_config import RunConfig, load_run, plain
from ringattn.launch.options import CONF, groups, help_text, leaves, option, presets_of
from ringattn.launch.ranks import place_in_torchrun, threads_for
from ringattn.launch.words import no_such_key, spelled

PURPOSE = """\
Measures every combination of the values given as key=1,2,4; all keys of `ringattn run` can have several. Given again
with the same options it goes on where it stopped. --dry-run prints what would be run.
Example: ringattn sweep out=DIR ranks=1,2,4 schedule=ring,all_gather,direct tokens=4096,8192
Presets: preset=strong (one length, more ranks), preset=weak (one length for each rank); other words change them.
Slurm:   ringattn sweep launcher=slurm slurm.partition=gpu slurm.gpus_per_node=8 ranks=8 nnodes=1,2,4 ..."""

SCALING = "scaling"
"""Folder of the presets; not `preset`, which Hydra would take for a group and hide that plain key of every command."""
LOOK_S = 0.2
"""Seconds between two looks for records that have arrived."""


@dataclass
class SweepConfig:
    """What concerns the whole sweep, and no point."""

    out: str = option("outputs/sweep", "folder of the records; one sweep a folder")
    launcher: str = option("local", "what starts the points", choices=tuple(LAUNCHERS))
    preset: str | None = option(None, "values to start from", choices=tuple(presets_of(SCALING)))
    slurm: SlurmConfig = field(default_factory=SlurmConfig)


class Point(NamedTuple):
    """One point: its configuration, the words that make it, and those of them that vary over the sweep.

    `equal`: where several combinations come to the same work, so that it is done once: what they do not share.
    """

    config: RunConfig
    words: list[str]
    label: str
    equal: tuple[str, ...] = ()


def main(argv: Sequence[str]) -> int:
    """Run or resume the sweep that `argv` describes."""
    words = [word for word in argv if word != DRY_RUN]
    if any(word in ("-h", "--help") for word in words):
        print(help_text("sweep", PURPOSE, SweepConfig), help_text("run", "", RunConfig).split("\n", 4)[4], sep="\n")
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


def described(words: Sequence[str]) -> tuple[SweepConfig, list[Point]]:
    """The sweep's own options, and its points in order, each once. Raises `InputError`, with the key first."""
    own = [leaf for leaf, _, _ in leaves(SweepConfig())]
    known = [*own, *groups(RunConfig), *(leaf for leaf, _, _ in leaves(RunConfig()))]
    words = spelled(words, SweepConfig, RunConfig)
    mine: list[str] = []
    theirs: list[str] = []
    for one in parse(words, known):
        if one.key_or_group not in known:
            raise no_such_key(one.key_or_group, known)
        assert one.input_line is not None
        (mine if one.key_or_group in own else theirs).append(one.input_line)
    options = load(mine, SweepConfig)
    theirs = [*_preset_words(options.preset, theirs), *theirs]
    varying = set(swept(theirs))
    found = []
    for combination in combinations(theirs):
        label = " ".join(word for word in combination if word.partition("=")[0] in varying)
        try:
            found.append(Point(load_run(combination), combination, label))
        except InputError as error:
            raise InputError(f"{error} (in the point {label})" if label else str(error)) from error
    if options.launcher != "slurm":
        found = _equal_threads(found)
    points = _each_once(found)
    if options.launcher == "local" and (far := [point for point in points if point.config.nnodes > 1]):
        raise InputError(f"nnodes={far[0].config.nnodes}: launcher=local knows this machine alone; use launcher=slurm")
    return options, points


def _each_once(points: Sequence[Point]) -> list[Point]:
    """The points without those that do the same work as one before; that one has the words which they have in common.

    On one rank, say, all schedules are the same; it is the baseline of each.
    """
    alike: dict[str, list[Point]] = {}
    for point in points:
        alike.setdefault(hash_of(plain(point.config)), []).append(point)
    found = []
    for same in alike.values():
        labels = [point.label.split(" ") for point in same]
        shared = [word for word in labels[0] if all(word in label for label in labels)]
        rest = (" ".join(word for word in label if word not in shared) for label in labels)
        # The same one, in whatever order the values are given: a sweep is known by the hashes of its points.
        one = min(same, key=lambda point: point.label)
        found.append(one._replace(label=" ".join(shared), equal=tuple(rest) if len(same) > 1 else ()))
    return found


def _equal_threads(points: Sequence[Point]) -> list[Point]:
    """The same points, where a rank has as many threads in each: a share of the cores that all leave to a rank.

    Else one rank alone would have all cores, and more ranks could not be faster.
    """
    threads = threads_for(max(point.config.ranks or 1 for point in points))
    return [
        point if point.config.threads_per_rank else point._replace(
            config=replace(point.config, threads_per_rank=threads), words=[*point.words, f"threads_per_rank={threads}"]
        )
        for point in points
    ]  # fmt: skip


def _preset_words(preset: str | None, given: Sequence[str]) -> list[str]:
    """The words of a preset, but for tokens where the user says how many there are in the other way."""
    if preset is None:
        return []
    from omegaconf import OmegaConf

    text = (resources.files(CONF) / SCALING / f"{preset}.yaml").read_text(encoding="utf-8")
    sizes = [word.partition("=")[0] for word in given if word.startswith(("tokens=", "tokens_per_rank="))]
    values = {str(key): value for key, value in OmegaConf.create(text).items()}
    return [f"{key}={value}" for key, value in values.items() if not (sizes and key.startswith("tokens"))]


def _print_plan(options: SweepConfig, points: Sequence[Point]) -> None:
    for line in equal_points(points):
        print(f"# {line}")
    for point in points:
        config = point.config
        if config.nnodes > 1:  # where they meet is known when Slurm has given the nodes
            config = replace(config, rdzv_endpoint="NODE0:PORT")
        print(f"# {hash_of(config)}  {point.label}\n{command_of(config)}")
    if options.launcher == "slurm":
        jobs = opened_jobs(Path(options.out).resolve(), options.launcher, options.slurm)
        for nodes in sorted({point.config.nnodes for point in points}):
            configs = [point.config for point in points if point.config.nnodes == nodes]
            print(f"\n# sbatch, {len(configs)} points on {nodes} nodes\n{jobs.script(configs)}")


def _run(options: SweepConfig, points: Sequence[Point], words: Sequence[str]) -> int:
    path, code = Path(options.out).resolve(), code_version()
    jobs = opened_jobs(path, options.launcher, options.slurm)
    with opened(path) as folder:
        folder.claim(words, [hash_of(point.config) for point in points], code)
        for record in arrived(path):
            folder.append(record)
        ended = read_points(path)
        todo = [point for point in points if ended.get(hash_of(point.config), {}).get("status") != "ok"]
        print(f"{len(points)} points, {len(points) - len(todo)} of them there already, into {path}", flush=True)
        print("".join(f"{line}\n" for line in equal_points(points)), end="", flush=True)
        try:
            _measure(jobs, folder, todo)
        finally:
            records = read_points(path)
            print(table(points, records))
    failed = [point for point in points if records.get(hash_of(point.config), {}).get("status") != "ok"]
    print(f"{len(points) - len(failed)} of {len(points)} points are ok, in {path}")
    if failed:
        print("the others run again when the same command is given again")
    return 1 if failed else 0


def equal_points(points: Sequence[Point]) -> list[str]:
    """A line for each point that stands for several combinations."""
    return [f"the same work, run once: {point.label or 'all'}, with {'; '.join(point.equal)}"
            for point in points if any(point.equal)]  # fmt: skip


def _measure(jobs: Jobs, folder: Folder, todo: Sequence[Point]) -> None:
    """Run the points; their records are kept as they come, whoever runs them."""
    labels = {hash_of(point.config): point.label for point in todo}
    over = threading.Event()
    with SweepProgress(len(todo)) as progress:

        def take() -> None:
            for record in arrived(folder.path):
                folder.append(record)
                line = f"{record['status']:<8}{labels.get(record['hash'], record['hash'])}  {_figure(record)}"
                progress.done(line, record["wall_s"])

        def watch() -> None:
            while not over.wait(LOOK_S):
                take()
            take()

        watcher = threading.Thread(target=watch)
        watcher.start()
        try:
            jobs.run([point.config for point in todo])
        finally:
            over.set()
            watcher.join()


class SweepProgress:
    """Show progress: on a terminal a bar with the time left, elsewhere a line for each point. A context manager."""

    def __init__(self, points: int) -> None:
        self.points, self.done_points, self._spent_s = points, 0, 0.0
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

        self._console = Console()
        columns = TextColumn("sweep"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[left]}")
        self._bar = Progress(*columns, console=self._console) if self._console.is_terminal else None

    def __enter__(self) -> Self:
        if self._bar is not None:
            self._bar.start()
            self._task = self._bar.add_task("sweep", total=self.points, left="")
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if self._bar is not None:
            self._bar.stop()

    def done(self, line: str, wall_s: float) -> None:
        """One more point has ended after `wall_s` seconds; `line` says which and how."""
        self.done_points += 1
        self._spent_s += wall_s
        left = f"about {self.left_s:.0f} s left"
        if self._bar is None:
            print(f"{self.done_points}/{self.points}  {line}  {left}", flush=True)
            return
        self._bar.console.print(line, markup=False, highlight=False)
        self._bar.update(self._task, completed=self.done_points, left=left)

    @property
    def left_s(self) -> float:
        """Seconds that the other points take if they take as long as those that have ended, on average."""
        return self._spent_s / self.done_points * (self.points - self.done_points)


def table(points: Sequence[Point], records: Mapping[str, Mapping[str, Any]]) -> str:
    """A line a point: what varies, how it ended, times, speed, what it held."""
    rows = [("point", "status", "forward ms", "backward ms", "tokens/s", "peak MiB")]
    for point in points:
        record = records.get(hash_of(point.config))
        if record is None or record["status"] != "ok":
            rows.append((point.label, record["status"] if record else "missing", "", "", "", ""))
            continue
        backward = record["backward_ms"]
        rows.append(
            (
                point.label,
                "ok",
                f"{record['forward_ms']['median']:.3f}",
                f"{backward['median']:.3f}" if backward else "",
                f"{record['tokens_per_s']:,.0f}",
                f"{max(record['peak_bytes']) / 2**20:.1f}",
            )
        )
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)


def _figure(record: Mapping[str, Any]) -> str:
    if record["status"] != "ok":
        return str(record["message"]).splitlines()[0]
    return f"forward {record['forward_ms']['median']:.3f} ms"
