"""Whether a drawn run comes to what it should: the curve of the run that nothing happened to, or a named error."""

from __future__ import annotations

import json
import math
import shutil
import signal
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

from ringattn.errors import InputError, NonFiniteError, RingError
from ringattn.launch.processes import Exit, root_cause
from ringattn.launch.train import loop, mesh
from ringattn.launch.train.checkpoints import RUN, named
from ringattn.launch.train.config import TrainConfig
from ringattn.testing import run_ranks
from tests.launch.fuzz_train import faults, ranks
from tests.launch.fuzz_train.draw import OF_PROCESSES, Case

REL = 1e-10
"""Of losses and norms in float64 by another number of ranks; the same number has the same bits."""
END_S = 5.0
"""How long ranks may live on after their command."""


class WrongError(AssertionError):
    """A run was lost, or silently changed."""


def train(config: TrainConfig, ranks_of_run: int = 1) -> dict[str, Any]:
    """The result of a run on threads; all ranks' curves must be the same."""
    results = run_ranks(ranks_of_run, lambda ring: loop.train(ring, config))
    for result in results:
        _same(result, results[0], 0.0, "ranks differ")
    return results[0]


def judge(case: Case) -> str:
    """What it came to, in a word: exact, told (a named error, and nothing was lost) or refused. Raises `WrongError`."""
    plain = replace(case.plain, checkpoint_every_steps=None, out="/nonexistent/out")
    try:
        whole = train(plain)
    except InputError as error:  # what cannot be trained at all
        return _refused(case, error)
    folder = Path(tempfile.mkdtemp(prefix="fuzz-train-"))
    try:
        if case.kind in OF_PROCESSES:
            return _of_processes(case, whole, folder)
        with mock.patch.object(mesh, "DYING_S", 0.0):
            return KINDS[case.kind](case, whole, folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _refused(case: Case, error: InputError) -> str:
    """It is refused spread over ranks as well."""
    spread = replace(case.spread, checkpoint_every_steps=None, replicas=1, sharding="none", transport="auto")
    again = _raises(InputError, lambda: train(spread, spread.ranks or 1))
    if str(again) != str(error):
        raise WrongError(f"one rank refuses {error}, {spread.ranks} refuse {again}")
    return "refused"


def _same(found: dict[str, Any], expected: dict[str, Any], rel: float, what: str) -> None:
    for key in ("losses", "grad_norms"):
        pairs = list(zip(found[key], expected[key], strict=False))
        alike = all(a is b is None or (None not in (a, b) and math.isclose(a, b, rel_tol=rel)) for a, b in pairs)
        if not alike or len(found[key]) != len(expected[key]):
            raise WrongError(f"{what}: {key} {found[key]} instead of {expected[key]}")


def _raises(kind: type[BaseException], do: Callable[[], Any]) -> BaseException:
    try:
        do()
    except kind as error:
        return error
    raise WrongError(f"no {kind.__name__} was raised")


def _undisturbed(case: Case, whole: dict[str, Any], folder: Path) -> str:
    spread = replace(case.spread, checkpoint_every_steps=None)
    _same(train(spread, spread.ranks or 1), whole, REL, f"{spread.ranks} ranks")
    return "exact"


def _goes_on(case: Case, whole: dict[str, Any], folder: Path) -> dict[str, Any]:
    """The run goes on in its folder, to the curve that it would have had."""
    config = replace(case.again, ranks=1, replicas=1, sharding="none", transport="auto", out=str(folder))
    result = train(config)
    _same(result, whole, REL, f"resumed from step {result['first_step']}")
    if left := [path.name for path in (folder / "checkpoints").iterdir() if path.suffix]:
        if result["step_s"]:
            raise WrongError(f"a run that ended well left {left}")
    return result


def _stopped(case: Case, whole: dict[str, Any], folder: Path) -> str:
    """Stopped at any call, it goes on from the last complete checkpoint."""
    with faults.at(case.place, case.count, faults.stop, after=case.dice.random() < 0.3):
        _interrupted(case, folder)
    complete = named(folder / "checkpoints")
    result = _goes_on(case, whole, folder)
    first = int(complete[0].name.removeprefix("step-")) if complete else 0
    if result["first_step"] != first or result["damaged_checkpoints"]:
        raise WrongError(f"went on from step {result['first_step']} and not from {first}")
    return "exact"


def _interrupted(case: Case, folder: Path) -> None:
    try:
        train(replace(case.spread, out=str(folder)))
    except faults.StoppedError:
        pass


def _spoiled_file(case: Case, whole: dict[str, Any], folder: Path) -> str:
    """The newest checkpoint is damaged after a stop: the one before is taken, and it is said."""
    with faults.at("draw", case.dice.randint(2, case.plain.steps + 1), faults.stop):
        _interrupted(case, folder)
    complete = named(folder / "checkpoints")
    if not complete:
        _goes_on(case, whole, folder)
        return "exact"
    file = case.dice.choice(sorted(complete[0].iterdir()))
    faults.spoil(case.kind, file, case.dice)
    if len(complete) == 1:
        try:
            _goes_on(case, whole, folder)
        except InputError as error:
            if str(file) not in str(error):
                raise WrongError(f"{file} was {case.kind}, and {error} was said") from error
            if named(folder / "checkpoints") != complete:
                raise WrongError("a refused run touched the checkpoints") from error
            return "told"
        result = {"damaged_checkpoints": []}
    else:
        result = _goes_on(case, whole, folder)
        told = " ".join(result["damaged_checkpoints"])
        if str(file) in told and str(complete[1]) in told:
            return "exact"
    if file.name == RUN and case.kind == "flipped":  # a bit that changes no value, as 1e-05 and 1E-05
        return "exact"
    raise WrongError(f"{file} was {case.kind}, and {result['damaged_checkpoints']} was said")


def _full_disk(case: Case, whole: dict[str, Any], folder: Path) -> str:
    """A save that the disk does not take is told, removed, and costs no checkpoint."""
    every = case.plain.checkpoint_every_steps or 1
    save = case.dice.randint(1, -(-case.plain.steps // every))
    config, told = replace(case.spread, out=str(folder)), ""
    with faults.full_disk(save, case.dice.randrange(0, 400_000)):
        try:
            _same(train(config), whole, REL, "a save that had room")
        except RingError as error:
            told = str(error)
    if not told:
        return "exact"
    if "could not be written" not in told or "needs about" not in told or str(folder) not in told:
        raise WrongError(f"not the error of a full disk: {told}")
    kept = [path.name for path in (folder / "checkpoints").iterdir()] if (folder / "checkpoints").exists() else []
    if sorted(kept) != sorted(path.name for path in named(folder / "checkpoints")) or len(kept) < min(save - 1, 2):
        raise WrongError(f"after the save number {save} failed there is {kept}")
    result = _goes_on(case, whole, folder)
    if result["first_step"] != (save - 1) * every:
        raise WrongError(f"went on from step {result['first_step']}, and the save of step {save * every} had failed")
    return "told"


def _plant(case: Case, step: int) -> Callable[[int], Any]:
    value, what = case.dice.choice([math.nan, math.inf]), case.dice.choice(["loss", "gradient"])
    return lambda rank: faults.spoiled(step, rank, value, what)


def _nan(case: Case, whole: dict[str, Any], folder: Path) -> str:
    """The first step that is not finite ends the run by name, on all ranks; without it the run goes on."""
    step = case.dice.randrange(case.plain.steps)
    config = replace(case.spread, out=str(folder))
    if (config.ranks or 1) > 1:
        config = replace(config, checkpoint_every_steps=None)
    with _plant(case, step)(case.rank):
        error = _raises(NonFiniteError, lambda: train(config, config.ranks or 1))
    if not str(error).startswith(f"step {step + 1} of {config.steps}: its "):
        raise WrongError(f"step {step + 1} was spoiled, and {error} was said")
    result = _goes_on(case, whole, folder)
    every = case.plain.checkpoint_every_steps or 1
    if config.checkpoint_every_steps and result["first_step"] != step // every * every:
        raise WrongError(f"went on from step {result['first_step']}")
    return "told"


def _nan_skipped(case: Case, whole: dict[str, Any], folder: Path) -> str:
    """A skipped step is counted; stopped and resumed it is the same run."""
    step, steps = case.dice.randrange(case.plain.steps), case.plain.steps
    config, plant = replace(case.spread, nonfinite="skip"), _plant(case, step)
    with plant(0):
        expected = train(replace(config, checkpoint_every_steps=None))
    if expected["skipped_steps"] != [step] or expected["losses"][step] is not None:
        raise WrongError(f"step {step} was spoiled, and {expected['skipped_steps']} were skipped")
    stop_at = case.dice.randint(1, steps)
    with plant(0):
        train(replace(config, out=str(folder), steps=stop_at)) if stop_at > 1 or step else None
        result = train(replace(config, out=str(folder)))
    if result["skipped_steps"] != [step]:
        raise WrongError(f"resumed, it skipped {result['skipped_steps']}")
    _same(result, expected, 0.0, "resumed")
    _same({key: expected[key][:step] for key in ("losses", "grad_norms")},
          {key: whole[key][:step] for key in ("losses", "grad_norms")}, REL, "before the skipped step")  # fmt: skip
    return "told"


def _second_run(case: Case, whole: dict[str, Any], folder: Path) -> str:
    """A second run in the folder is refused, with who holds it, and the first does not notice."""
    config, told = replace(case.spread, out=str(folder)), []

    def second() -> None:
        with mock.patch.object(loop, "drawn", drawn):
            told.append(str(_raises(InputError, lambda: train(replace(case.again, out=str(folder))))))

    drawn = loop.drawn
    with faults.at("draw", case.dice.randint(1, case.plain.steps), second):
        _same(train(config), whole, REL, "the first run")
    if len(told) != 1 or "another run is writing there, process " not in told[0]:
        raise WrongError(f"the second run was told {told}")
    return "told"


KINDS: dict[str, Callable[[Case, dict[str, Any], Path], str]] = {
    "undisturbed": _undisturbed, "stop": _stopped, "flipped": _spoiled_file, "truncated": _spoiled_file,
    "missing": _spoiled_file, "full disk": _full_disk, "nan": _nan, "nan skipped": _nan_skipped,
    "second run": _second_run,
}  # fmt: skip


# --- processes -------------------------------------------------------------------------------------------------------


def _of_processes(case: Case, whole: dict[str, Any], folder: Path) -> str:
    """A signal at a drawn call: the run ends by name or goes on, all of it, and resumed it is as if undisturbed."""
    config = replace(case.spread, out=str(folder))
    pauses = case.kind == "pause a rank"
    fault = {
        "rank": case.rank, "to": "command" if case.kind == "kill the command" else "rank", "place": case.place,
        "count": case.count, "signal": int(signal.SIGSTOP if pauses else signal.SIGKILL), "pause_s": case.dice.random(),
    }  # fmt: skip
    if case.place in ("write_run", "rename", "remove"):  # rank 0 does that
        fault["rank"] = 0
    first = _life(folder, config, fault)
    happened = (folder / "happened").exists()
    if not happened or pauses:
        if first is not None:
            raise WrongError(f"{'paused' if happened else 'nothing happened'}, and it failed: {first}")
        _same(json.loads((folder / "result.json").read_text()), whole, REL, "paused")
        return "exact"
    if first is None:
        raise WrongError("killed, and it ended as if it were not")
    (folder / "happened").unlink()
    if case.again.ranks == 1:
        result = _goes_on(case, whole, folder)
    else:
        if second := _life(folder, replace(case.again, out=str(folder)), None):
            raise WrongError(f"it did not go on: {second}")
        result = json.loads((folder / "result.json").read_text())
        _same(result, whole, REL, f"resumed from step {result['first_step']}")
    if result["damaged_checkpoints"]:
        raise WrongError(f"a kill damaged {result['damaged_checkpoints']}")
    return "exact"


def _life(folder: Path, config: TrainConfig, fault: dict[str, Any] | None) -> str | None:
    """Why a run of processes failed, None for one that did not. None of its processes may be left."""
    job = Path(tempfile.mkdtemp(prefix="job-", dir=folder))
    command = ranks.started(job, config, fault)
    command.join(ranks.LIMIT_S)
    if command.is_alive():
        command.kill()
        raise WrongError(f"the run hangs: {_said(job)}")
    pids = [int(file.read_text()) for file in job.glob("pid-*") if file.read_text()]
    ends = time.monotonic() + END_S
    while any(map(_runs, pids)):
        if time.monotonic() > ends:
            raise WrongError(f"{END_S} s after its command a rank still runs")
        time.sleep(0.02)
    return None if command.exitcode == 0 else _said(job, command.exitcode)


def _said(job: Path, code: int | None = None) -> str:
    exits = [Exit(*json.loads(file.read_text())) for file in job.glob("exit.json")]
    if not exits and not list(job.glob("failure-*.json")):
        return f"exit code {code}: no rank failed"
    return f"exit code {code}: {root_cause(job, exits)}"


def _runs(pid: int) -> bool:
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False
