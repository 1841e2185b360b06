"""`ringattn run`: measure one attention call, on ranks that the command starts or that torchrun has started.

If all words are key=value, one point is measured and no file is written. If one of them is a flag of Hydra or begins
with `hydra.`, `+`, `++` or `~`, the command runs as Hydra's own application, see `config.run_application`.
Guarantees: exit code 0 for a measured point, 1 for ranks that failed, 2 for bad options or a call that was refused.
"""

from __future__ import annotations

import shlex
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from datetime import UTC, datetime
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ringattn.errors import InputError, RingError
from ringattn.launch.calls import AUTOMATIC, RunConfig, check_nodes, load_run, resolved, words_of
from ringattn.launch.config import composed_as, is_for_hydra, keys_of, run_application, swept
from ringattn.launch.folders import STANDARD_OUTPUT, json_output
from ringattn.launch.measure.points import Folder, leave, make_record
from ringattn.launch.nodes import Nodes
from ringattn.launch.options import help_text, spelled
from ringattn.launch.processes import RanksError
from ringattn.launch.ranks import (
    Place,
    agreed_ranks,
    place_in_torchrun,
    run_ranks_in_processes,
    threads_for,
    torchrun_command,
)

if TYPE_CHECKING:
    from omegaconf import DictConfig

PURPOSE = """\
Checks that one attention call is exact, then measures it: times of the slowest rank, bytes, memory, error, prediction.
Starts the ranks as processes of this machine, or uses the ranks of torchrun. --dry-run prints the command.
Example: ringattn run ranks=4 tokens=16384 schedule=ring window=[511,0]
Nodes:   ringattn run ranks=8 nnodes=2 node_rank=0 rdzv_endpoint=node0:29400    (on the other node: node_rank=1)
Hydra:   ringattn run -m tokens=4096,8192; --cfg job, --config-dir DIR, hydra/launcher=..., +, ++, ~ (--hydra-help)"""

ENTRY = "ringattn.launch.measure.point:on_rank"
DRY_RUN = "--dry-run"
OOM_KINDS = ("OutOfMemoryError", "MemoryError")
FIRST_PORT, PORTS = 20_000, 12_000
"""Ports where the nodes of a Slurm job connect, below those that Linux assigns (net.ipv4.ip_local_port_range)."""


def main(argv: Sequence[str]) -> int:
    """Measure the point that the overrides `argv` (key=value) describe, or print the command with --dry-run."""
    overrides = [word for word in argv if word != DRY_RUN]
    if any(word in ("-h", "--help") for word in overrides):
        print(help_text("run", PURPOSE, RunConfig))
        return 0
    place = place_in_torchrun()
    leads = place is None or place.rank == 0
    try:
        if is_for_hydra(overrides):
            if len(overrides) < len(argv):
                raise InputError(f"{DRY_RUN}: cannot be combined with Hydra's flags; --cfg job shows what would be run")
            from ringattn.launch.measure.multirun import print_multirun

            try:
                run_application(overrides, RunConfig, "run", measured)
            finally:
                print_multirun()
            return 0
        config = load_here(overrides, place)
        if len(overrides) < len(argv):
            print(command_of(config))
            return 0
        run_and_print(config, place)
    except RingError as error:
        if leads or not isinstance(error, InputError):  # all ranks refuse bad options; only the first prints it
            print(f"ringattn run: {error}", file=sys.stderr)
        refused = isinstance(error, InputError) or (isinstance(error, RanksError) and error.refused)
        return 2 if refused else 1
    return 0


def load_here(overrides: Sequence[str], place: Place | None) -> RunConfig:
    """Return the run that `overrides` describe. Under torchrun, its ranks are those that torchrun started."""
    overrides = spelled(overrides, RunConfig)
    if keys := swept(overrides, keys_of(RunConfig)):
        how = (
            "run `ringattn sweep` instead, or give -m"
            if place is None
            else "run `ringattn sweep` instead, without torchrun, because it starts its own ranks"
        )
        raise InputError(f"{keys[0]}: one value at a time; {how}")
    config = load_run(overrides)
    if place is None:
        _check_meeting(config)
        return config
    named = any(word.startswith(("ranks=", "nnodes=")) for word in overrides)
    ranks = agreed_ranks(config.world_size if named else None, "ranks")
    return load_run([*overrides, f"ranks={ranks}", "nnodes=1", "node_rank=null", "rdzv_endpoint="])


def measured(composed: DictConfig) -> float:
    """Measure a point for Hydra and print it. Return the milliseconds of its passes, which a sweeper can minimise."""
    from hydra.core.hydra_config import HydraConfig
    from hydra.types import RunMode

    config, place = composed_as(RunConfig, composed), place_in_torchrun()
    check_nodes(config)
    if place is not None:
        if HydraConfig.get().mode == RunMode.MULTIRUN:
            raise InputError("--multirun: started by torchrun, so every rank would run all points; leave torchrun out")
        named = config.ranks is not None or config.nnodes > 1
        ranks = agreed_ranks((config.ranks or 1) * config.nnodes if named else None, "ranks")
        config = replace(config, ranks=ranks, nnodes=1, node_rank=None, rdzv_endpoint="")
    elif config.nnodes > 1 and not config.rdzv_endpoint and in_job():
        config = met_in_job(config)
    config = resolved(config)
    _check_meeting(config)
    hydra = HydraConfig.get()
    folders = [Path(hydra.runtime.output_dir)]
    if hydra.mode == RunMode.MULTIRUN:
        folders.append(Path(hydra.sweep.dir).absolute())
    record = run_and_print(config, place, folders)
    return sum(float(record[name]["median"]) for name in ("forward_ms", "backward_ms") if record[name])


def run_and_print(config: RunConfig, place: Place | None, folders: Sequence[Path] = ()) -> dict[str, Any]:
    """Measure a point, print it and return its record.

    The record, also that of a failure, is written to the first of `folders`, which is that of the job. If there is a
    second one, that of the multirun, the record is left there for `Folder.collect`.
    """
    leads = (place is None or place.rank == 0) and config.is_first_node
    with json_output(config.json if leads else "") as write:
        # The ranks' processes inherit the real standard output, so they must be quiet if JSON is written to it.
        quiet = place is None and config.json == STANDARD_OUTPUT
        record, failure = attempted(config, lambda: run_here(config, place, quiet))
        if leads:
            for folder in folders[:1]:
                Folder(folder).append(record)
            for folder in folders[1:]:
                leave(folder, record)
        if failure is not None:
            raise failure
        if leads:
            print(table(config, record), flush=True)
            write(record)
    return record


def attempted(config: RunConfig, run: Callable[[], dict[str, Any]]) -> tuple[dict[str, Any], Exception | None]:
    """Call `run` to measure a point. Return the point's record, and the error if `run` raised one, else None."""
    started, begin = datetime.now(UTC), time.perf_counter()
    facts: dict[str, Any] = {}
    status, message = "ok", ""
    failure: Exception | None = None
    try:
        facts = run()
    except RanksError as error:
        status = "oom" if error.kind in OOM_KINDS else "timeout" if error.kind == "timeout" else "error"
        message, failure = str(error), error
    except Exception as error:
        status, message, failure = "error", str(error) if isinstance(error, RingError) else repr(error), error
    return make_record(config, status, message, facts, started, time.perf_counter() - begin), failure


def _check_meeting(config: RunConfig) -> None:
    """Raise `InputError` if there are several nodes and `node_rank` or `rdzv_endpoint` is missing."""
    missing = [key for key, value in (("node_rank", config.node_rank), ("rdzv_endpoint", config.rdzv_endpoint))
               if value in (None, "")]  # fmt: skip
    if config.nnodes == 1 or not missing:
        return
    of_node_0 = replace(config, node_rank=0, rdzv_endpoint=config.rdzv_endpoint or "HOST:PORT")
    command = shlex.join(["ringattn", "run", *words_of(of_node_0)])
    raise InputError(
        f"nnodes={config.nnodes}: {' and '.join(missing)} {'is' if len(missing) == 1 else 'are'} missing. "
        "Each node has its own node_rank; all have the same rdzv_endpoint, a host and a free port of node 0. Run on "
        f"node 0: `{command}`, and on each other node the same command with "
        f"{'node_rank=1' if config.nnodes == 2 else f'node_rank=1 to node_rank={config.nnodes - 1}'}"
    )


def in_job() -> bool:
    """Return whether submitit started this process."""
    if find_spec("submitit") is None:
        return False
    from submitit import JobEnvironment

    try:
        return bool(JobEnvironment().activated())
    except RuntimeError:
        return False


def met_in_job(config: RunConfig) -> RunConfig:
    """Return `config` with the number of this node and the endpoint of node 0, within a submitit job.

    The job has one task per node.
    """
    from submitit import JobEnvironment

    job = JobEnvironment()
    host = "127.0.0.1" if job.name() == "local" else job.hostnames[0]
    port = FIRST_PORT + int("".join(filter(str.isdecimal, job.job_id))) % PORTS
    return replace(config, node_rank=job.global_rank, rdzv_endpoint=f"{host}:{port}")


def run_here(config: RunConfig, place: Place | None, quiet: bool = False) -> dict[str, Any]:
    """Measure a point and return its facts (see `point.measure`).

    Under torchrun this process is a rank of the point; otherwise new processes are started.
    """
    spec = {"config": asdict(config), "quiet": quiet}
    if place is not None:
        from ringattn.launch.measure.point import on_rank  # imports torch, which a parent process does not need

        return on_rank(spec)
    assert config.ranks is not None
    return run_ranks_in_processes(ENTRY, spec, config.ranks, config.limit_s, config.threads_per_rank, nodes_of(config))[
        0
    ]


def nodes_of(config: RunConfig) -> Nodes:
    """Return the nodes of a run and the address where they connect."""
    return Nodes(config.nnodes, config.node_rank or 0, config.rdzv_endpoint, config.timeout_s)


def command_of(config: RunConfig) -> str:
    """Return the shell command that starts this run's ranks on this node with torchrun."""
    assert config.ranks is not None
    command = [*torchrun_command(config.ranks, nodes_of(config)), "-m", "ringattn", "run", *words_of(config)]
    return f"OMP_NUM_THREADS={config.threads_per_rank or threads_for(config.ranks)} {shlex.join(command)}"


def table(config: RunConfig, facts: Mapping[str, Any]) -> str:
    """Return the results of a point as text, one line per figure."""
    rows = [("ranks", f"{config.world_size}"), ("tokens", f"{config.tokens}"), ("call", call_text(config, facts))]
    for name in ("forward", "backward"):
        if spread := facts[f"{name}_ms"]:
            rows.append((name, f"{spread['median']:.3f} ms, p10 {spread['p10']:.3f}, p90 {spread['p90']:.3f}"))
            if predicted := facts["predicted"]:
                rows.append(("  predicted", f"{predicted[f'{name}_ms']:.3g} ms on {predicted['cluster']}"))
    if not facts["predicted"]:
        rows.append(("predicted", facts["not_predicted"]))
    rows += [
        (
            "tokens/s",
            f"{facts['tokens_per_s']:,.0f}, both passes together"
            if facts["backward_ms"]
            else f"{facts['tokens_per_s']:,.0f}",
        ),
        ("TFLOP/s", f"{facts['tflops']:.4g} of all ranks, counting the pairs that the mask allows"),
        ("sent", f"{_mib(facts['bytes_sent'])} MiB by rank, in {facts['messages']} messages"),
        ("peak memory", f"{_mib(facts['peak_bytes'])} MiB by rank" + _reused(facts)),
        ("  staging", f"{_mib(facts['pool_bytes'])} MiB by rank, for keys and values of other ranks"),
        ("error", ", ".join(f"{name} {error:.1e}" for name, error in facts["error"].items()) + " at a small size"),
    ]
    exposed = [f"{name} {max(by_rank):.3g} ms" for name, by_rank in facts["exposed_ms"].items() if by_rank]
    rows.append(("exposed", f"{', '.join(exposed)} on the rank that waits longest"))
    if config.world_size > 1:
        sign = "" if facts["arrivals_known"] else "at most "
        why = "" if facts["arrivals_known"] else ": this transport does not report when hidden messages arrive"
        rows.append(("overlap", f"{sign}{facts['overlap']:.0%} of the communication is hidden{why}"))
    return "\n".join(f"{name:<12}  {figure}" for name, figure in rows)


def call_text(config: RunConfig, facts: Mapping[str, Any]) -> str:
    """Return the schedule, layout, engine and transport of a measured call, marking those that `auto` chose."""
    ran = facts["resolved"]
    parts = [f"{key} {ran[key]}{' (auto)' if getattr(config, key) == 'auto' else ''}" for key in AUTOMATIC]
    return ", ".join([*parts, *([f"sm_margin {ran['sm_margin']}"] if ran["sm_margin"] else [])])


def _reused(facts: Mapping[str, Any]) -> str:
    """Return a note if a rank's peak is less than its staging buffers, which needs an explanation; else no text."""
    low = any(peak < slots for peak, slots in zip(facts["peak_bytes"], facts["pool_bytes"], strict=True))
    return ", less than the staging buffers below because memory of the exactness check was reused" if low else ""


def _mib(sizes_bytes: Sequence[int]) -> str:
    return " ".join(f"{size / 2**20:.1f}" for size in sizes_bytes)
