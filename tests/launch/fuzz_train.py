"""`python -m tests.launch.fuzz_train`: random training runs, each with one fault.

runs=200     number of runs
seed=N       seed of the first run, counted up from run to run; random by default
kinds=a,b    draw only these kinds of fault, for example kinds="nan,full disk"
failures=1   stop after this number of failures
"""

from __future__ import annotations

import math
import os
import random
import resource
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from secrets import randbelow
from typing import Any
from unittest import mock

# Set before torch loads: the ranks are threads with one intra-op thread each.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from torch import Tensor

from ringattn.errors import InputError, NonFiniteError, RingError
from ringattn.launch.train import checkpoints, loop, mesh
from ringattn.launch.train.checkpoints import RUN, named
from ringattn.launch.train.config import ModelConfig, TrainConfig, check_sizes
from ringattn.launch.train.data import Draws
from ringattn.testing import run_ranks

# --- a case: a training run, how it is spread over ranks, and its fault ----------------------------------------------

KINDS = {
    "undisturbed": 2,
    "stop": 4,
    "flipped": 4,
    "truncated": 3,
    "missing": 3,
    "full disk": 4,
    "nan": 4,
    "nan skipped": 3,
    "second run": 2,
}
"""The kinds of fault, with the weight of each in the draw."""
STOPS = ("draw", "update", "save", "write_run", "rename", "remove")
"""The calls that stop a run: drawing the sequences of a step, updating the weights, and the parts of a save."""


@dataclass(frozen=True)
class Case:
    """A training run and its fault."""

    seed: int
    kind: str
    plain: TrainConfig
    """The run on one rank, with the default layout, recomputation, chunks and micro-batches."""
    spread: TrainConfig
    """The same run on `ranks` ranks, with random settings that must not change what it learns."""
    target: str
    """The key in `TARGETS` of the call that a stop interrupts."""
    count: int
    """The number of that call, from 1."""
    rank: int
    """The rank whose loss or gradient is not finite."""
    again: TrainConfig
    """The run that resumes after the fault."""
    dice: random.Random
    """The generator of everything that the fault draws later."""


def draw(seed: int, kinds: tuple[str, ...] = tuple(KINDS)) -> Case:
    """Draw the case of a seed. Its fault is one of `kinds`."""
    dice = random.Random(seed)
    kind = dice.choices(kinds, [KINDS[name] for name in kinds])[0]
    plain = _run(dice, kind)
    ranks = dice.choice([1, 2, 3]) if kind in ("undisturbed", "nan") else 1
    spread = _spread(dice, plain, ranks)
    check_sizes(spread)
    target = dice.choice(STOPS if kind == "stop" else STOPS[:2])
    every = plain.checkpoint_every_steps or 1
    saves = -(-plain.steps // every)
    if target in ("draw", "update"):
        count = dice.randint(1, plain.steps)
    elif target == "remove":  # a save removes a checkpoint if there are two already
        count = max(1, dice.randint(0, saves - 2))
    else:
        count = dice.randint(1, saves)
    again = _spread(dice, plain, 1) if dice.random() < 0.5 else spread
    return Case(seed, kind, plain, spread, target, count, dice.randrange(ranks), again, dice)


def _run(dice: random.Random, kind: str) -> TrainConfig:
    """Draw the configuration of the run on one rank."""
    start = dice.randint(6, 14)
    curriculum: dict[str, Any] = {}
    length = dice.randint(8, 48)
    if dice.random() < 0.2:
        length = start * dice.choice([2, 4])
        curriculum = {"curriculum_start_tokens": start, "curriculum_steps": dice.randint(1, 4)}
    packing: dict[str, Any] = {}
    if dice.random() < 0.3:
        packing = {"pack_documents": True, "separator": dice.choice(["\n", " ", "\n\n", "."])}
    dilation: dict[str, Any] = {}
    if dice.random() < 0.2:
        dilation = {"attention": "dilated", "segment_lengths": [8, 64], "dilation_rates": [1, dice.choice([2, 3])]}
    heads, kv_heads = dice.choice([(2, 1), (2, 2), (4, 2)])
    optimizers = ["adamw", "sgd"] if kind in ("undisturbed", "nan") else ["adamw", "sgd", "adafactor"]
    return TrainConfig(
        tokens=length, batch=dice.choice([1, 2, 4]), steps=dice.randint(4, 8), dtype="fp64",
        optimizer=dice.choice(optimizers), learning_rate=dice.choice([1e-3, 1e-2]), warmup_steps=dice.randint(0, 4),
        clip_norm=dice.choice([0.1, 1.0, 10.0]), seed=dice.randrange(1000), layout="auto", timeout_s=60.0,
        prompt_tokens=dice.choice([0, 0, 1, 3]), checkpoint_every_steps=dice.randint(1, 3),
        model=ModelConfig(dice.choice([1, 1, 2]), 16, heads, kv_heads, 24, tied=dice.random() < 0.7),
        **curriculum, **packing, **dilation,
    )  # fmt: skip


def _spread(dice: random.Random, plain: TrainConfig, ranks: int) -> TrainConfig:
    """Return the configuration of the same run on `ranks` ranks.

    Draw settings that must not change the losses: layout, recomputation, chunks and micro-batches.
    """
    spread = replace(
        plain,
        ranks=ranks,
        layout=dice.choice(["auto", "contiguous", "zigzag", "striped"]),
        recompute=dice.choice(["none", "selective", "full"]),
        chunked_loss_tokens=dice.choice([None, 1, 5, 16]),
        micro_batch=None if plain.pack_documents else dice.choice([None, 1, 3]),
    )
    if plain.pack_documents and not plain.prompt_tokens and plain.attention == "full":
        limit = dice.choice([None, -(-plain.tokens // ranks), plain.tokens])
        spread = replace(spread, max_tokens_per_rank=limit, layout=spread.layout if limit is None else "auto")
    return spread


# --- the faults: a stop at some call, a loss or gradient that is not finite, a full disk, a damaged file -------------

TARGETS: dict[str, tuple[Any, str]] = {
    "draw": (Draws, "of_step"),
    "update": (loop, "update"),
    "save": (checkpoints.dcp, "save"),
    "write_run": (checkpoints, "write_run"),
    "rename": (Path, "rename"),
    "remove": (checkpoints, "remove"),
}
"""The functions whose calls can be interrupted: the owner and the name of each."""


class StoppedError(BaseException):
    """A simulated stop of the machine. It is not an `Exception`, so that no handler cleans up after it."""


def stop() -> None:
    """Simulate a stop of the machine."""
    raise StoppedError


@contextmanager
def interrupt(target: str, count: int, act: Callable[[], None], after: bool = False) -> Iterator[None]:
    """Call `act` before the `count`-th call of the function `target` in `TARGETS`, or after that call if `after`."""
    owner, name = TARGETS[target]
    original, calls = getattr(owner, name), 0

    def interrupted(*arguments: Any, **keywords: Any) -> Any:
        nonlocal calls
        counts = target != "update" or not _warms_up(arguments)
        if target == "rename":  # count only renames from the temporary to the final name of a checkpoint
            counts = arguments[0].name.endswith(".partial") and not arguments[0].name.startswith("result")
        calls += counts
        now = calls == count and counts
        if now and not after:
            act()
        result = original(*arguments, **keywords)
        if now and after:
            act()
        return result

    with mock.patch.object(owner, name, interrupted):
        yield


def _warms_up(arguments: tuple[Any, ...]) -> bool:
    """Return whether a call of `local_part` or `update` is of the warm-up, whose model has a `hidden_dim` of 16."""
    for argument in arguments:
        config = getattr(argument, "model", None) or getattr(argument, "config", None)
        if config is not None:
            return bool(config.hidden_dim == 16)
    return False


@contextmanager
def spoiled(step: int, rank: int, value: float, what: str) -> Iterator[None]:
    """Spoil step number `step` (from 0) on one rank: add `value`, NaN or infinity, to the loss.

    If `what` is not "loss", multiply the gradient by `value` instead.
    """
    of_step, local_part = Draws.of_step, loop.local_part
    steps: dict[int, int] = {}  # the current step of each rank

    def note_step(draws: Draws, number: int) -> Any:
        parts = of_step(draws, number)
        steps[parts[0].seq.ring.rank] = number
        return parts

    def spoiled_part(seq: Any, *more: Any) -> Tensor:
        loss = local_part(seq, *more)
        if _warms_up(more) or steps[seq.ring.rank] != step or seq.ring.rank != rank:
            return loss
        if what == "loss":
            return torch.where(torch.ones_like(loss, dtype=torch.bool), loss + value, loss)
        loss.register_hook(lambda grad: grad * value)
        return loss * 1.0

    with mock.patch.object(Draws, "of_step", note_step), mock.patch.object(loop, "local_part", spoiled_part):
        yield


@contextmanager
def full_disk(save: int, limit_bytes: int) -> Iterator[None]:
    """Limit the size of every file to `limit_bytes` during save number `save` (from 1), as if the disk were full."""
    original, calls = checkpoints.Checkpoints.save, 0

    def limited(*arguments: Any) -> None:
        nonlocal calls
        calls += 1
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        if calls == save:
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit_bytes, hard))
        try:
            original(*arguments)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))

    with mock.patch.object(checkpoints.Checkpoints, "save", limited):
        yield


def spoil(kind: str, path: Path, dice: random.Random) -> None:
    """Damage a file: delete it ("missing"), truncate it ("truncated") or flip one bit (any other `kind`)."""
    if kind == "missing":
        path.unlink()
    elif kind == "truncated":
        os.truncate(path, dice.randrange(path.stat().st_size))
    else:
        content = bytearray(path.read_bytes())
        content[dice.randrange(len(content))] ^= 1 << dice.randrange(8)
        path.write_bytes(content)


# --- judging a run: it must reach the curve of the undisturbed run, or fail with a clear error -----------------------

REL = 1e-10
"""Relative tolerance of losses and norms in float64 on another number of ranks. On the same number they are equal."""


class WrongError(AssertionError):
    """Raised if a run was lost or silently changed."""


def train(config: TrainConfig, world_size: int = 1) -> dict[str, Any]:
    """Train on threads and return the result. The curves of all ranks must be equal."""
    results = run_ranks(world_size, lambda ring: loop.train(ring, config))
    for result in results:
        _same(result, results[0], 0.0, "ranks differ")
    return results[0]


def judge(case: Case) -> str:
    """Run a case and return its outcome.

    Returns:
        "exact" if the losses are those of the undisturbed run, "reported" if a clear error reported the fault and
        nothing was lost, or "refused" if this configuration cannot be trained at all.

    Raises:
        WrongError: The run was lost or silently changed.
    """
    plain = replace(case.plain, checkpoint_every_steps=None, out="/nonexistent/out")
    try:
        whole = train(plain)
    except InputError as error:
        return _refused(case, error)
    folder = Path(tempfile.mkdtemp(prefix="fuzz-train-"))
    try:
        with mock.patch.object(mesh, "DYING_S", 0.0):
            return JUDGES[case.kind](case, whole, folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _refused(case: Case, error: InputError) -> str:
    """Check that the run of `case.spread` is refused with the same message as the run on one rank."""
    spread = replace(case.spread, checkpoint_every_steps=None)
    spread_error = _raises(InputError, lambda: train(spread, spread.ranks or 1))
    if str(spread_error) != str(error):
        raise WrongError(f"one rank raises {error}, but {spread.ranks} ranks raise {spread_error}")
    return "refused"


def _same(result: dict[str, Any], expected: dict[str, Any], rel: float, what: str) -> None:
    for key in ("losses", "grad_norms"):
        pairs = list(zip(result[key], expected[key], strict=False))
        close = all(a is b is None or (None not in (a, b) and math.isclose(a, b, rel_tol=rel)) for a, b in pairs)
        if not close or len(result[key]) != len(expected[key]):
            raise WrongError(f"{what}: {key} {result[key]} instead of {expected[key]}")


def _raises(kind: type[BaseException], function: Callable[[], Any]) -> BaseException:
    try:
        function()
    except kind as error:
        return error
    raise WrongError(f"no {kind.__name__} was raised")


def _undisturbed(case: Case, whole: dict[str, Any], folder: Path) -> str:
    spread = replace(case.spread, checkpoint_every_steps=None)
    _same(train(spread, spread.ranks or 1), whole, REL, f"{spread.ranks} ranks")
    return "exact"


def _resume(case: Case, whole: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Resume the run in its folder, and check that its losses and gradient norms are those of the undisturbed run."""
    config = replace(case.again, ranks=1, out=str(folder))
    result = train(config)
    _same(result, whole, REL, f"resumed from step {result['first_step']}")
    if left := [path.name for path in (folder / "checkpoints").iterdir() if path.suffix]:
        if result["step_s"]:
            raise WrongError(f"a successful run left {left}")
    return result


def _stopped(case: Case, whole: dict[str, Any], folder: Path) -> str:
    """Stop the run at a call. Check that it resumes from the last complete checkpoint."""
    with interrupt(case.target, case.count, stop, after=case.dice.random() < 0.3):
        _train_until_stopped(case, folder)
    complete = named(folder / "checkpoints")
    result = _resume(case, whole, folder)
    first = int(complete[0].name.removeprefix("step-")) if complete else 0
    if result["first_step"] != first or result["damaged_checkpoints"]:
        raise WrongError(f"resumed from step {result['first_step']} and not from {first}")
    return "exact"


def _train_until_stopped(case: Case, folder: Path) -> None:
    try:
        train(replace(case.spread, out=str(folder)))
    except StoppedError:
        pass


def _spoiled_file(case: Case, whole: dict[str, Any], folder: Path) -> str:
    """Stop the run and damage its newest checkpoint.

    Check that the resumed run reports the damage and resumes from the checkpoint before it, if there is one.
    """
    with interrupt("draw", case.dice.randint(2, case.plain.steps + 1), stop):
        _train_until_stopped(case, folder)
    complete = named(folder / "checkpoints")
    if not complete:
        _resume(case, whole, folder)
        return "exact"
    file = case.dice.choice(sorted(complete[0].iterdir()))
    spoil(case.kind, file, case.dice)
    if len(complete) == 1:
        try:
            _resume(case, whole, folder)
        except InputError as error:
            if str(file) not in str(error):
                raise WrongError(f"{file} was {case.kind}, but the error is {error}") from error
            if named(folder / "checkpoints") != complete:
                raise WrongError("a refused run changed the checkpoints") from error
            return "reported"
        result = {"damaged_checkpoints": []}
    else:
        result = _resume(case, whole, folder)
        warnings = " ".join(result["damaged_checkpoints"])
        if str(file) in warnings and str(complete[1]) in warnings:
            return "exact"
    if file.name == RUN and case.kind == "flipped":  # a flipped bit can leave the value unchanged: 1e-05 to 1E-05
        return "exact"
    raise WrongError(f"{file} was {case.kind}, but the run reports {result['damaged_checkpoints']}")


def _full_disk(case: Case, whole: dict[str, Any], folder: Path) -> str:
    """Let the disk fill up in a save. Check that the run reports it, deletes the partial save and keeps checkpoints."""
    every = case.plain.checkpoint_every_steps or 1
    save = case.dice.randint(1, -(-case.plain.steps // every))
    config, message = replace(case.spread, out=str(folder)), ""
    with full_disk(save, case.dice.randrange(0, 400_000)):
        try:
            _same(train(config), whole, REL, "a save that fits")
        except RingError as error:
            message = str(error)
    if not message:
        return "exact"
    if "could not be written" not in message or "needs about" not in message or str(folder) not in message:
        raise WrongError(f"not the error of a full disk: {message}")
    names = [path.name for path in (folder / "checkpoints").iterdir()] if (folder / "checkpoints").exists() else []
    if sorted(names) != sorted(path.name for path in named(folder / "checkpoints")) or len(names) < min(save - 1, 2):
        raise WrongError(f"after save number {save} failed, the folder contains {names}")
    result = _resume(case, whole, folder)
    if result["first_step"] != (save - 1) * every:
        raise WrongError(f"resumed from step {result['first_step']}, but the save of step {save * every} had failed")
    return "reported"


def _draw_spoiler(case: Case, step: int) -> Callable[[int], Any]:
    """Draw whether the loss or its gradient is spoiled at `step`, and by what value.

    Return a function that takes the rank and returns the context manager `spoiled`.
    """
    value, what = case.dice.choice([math.nan, math.inf]), case.dice.choice(["loss", "gradient"])
    return lambda rank: spoiled(step, rank, value, what)


def _nan(case: Case, whole: dict[str, Any], folder: Path) -> str:
    """Make a step non-finite. Check that all ranks fail and name the step, and that the run then resumes."""
    step = case.dice.randrange(case.plain.steps)
    config = replace(case.spread, out=str(folder))
    if (config.ranks or 1) > 1:
        config = replace(config, checkpoint_every_steps=None)
    with _draw_spoiler(case, step)(case.rank):
        error = _raises(NonFiniteError, lambda: train(config, config.ranks or 1))
    if not str(error).startswith(f"step {step + 1} of {config.steps}: its "):
        raise WrongError(f"step {step + 1} was spoiled, but the error is {error}")
    result = _resume(case, whole, folder)
    every = case.plain.checkpoint_every_steps or 1
    if config.checkpoint_every_steps and result["first_step"] != step // every * every:
        raise WrongError(f"resumed from step {result['first_step']}")
    return "reported"


def _nan_skipped(case: Case, whole: dict[str, Any], folder: Path) -> str:
    """Train with a non-finite step that is skipped, without and with a resume in between.

    Check that both results report the step, and that they have the same losses.
    """
    step, steps = case.dice.randrange(case.plain.steps), case.plain.steps
    config, spoil_rank = replace(case.spread, nonfinite="skip"), _draw_spoiler(case, step)
    with spoil_rank(0):
        expected = train(replace(config, checkpoint_every_steps=None))
    if expected["skipped_steps"] != [step] or expected["losses"][step] is not None:
        raise WrongError(f"step {step} was spoiled, but {expected['skipped_steps']} were skipped")
    stop_at = case.dice.randint(1, steps)
    with spoil_rank(0):
        train(replace(config, out=str(folder), steps=stop_at)) if stop_at > 1 or step else None
        result = train(replace(config, out=str(folder)))
    if result["skipped_steps"] != [step]:
        raise WrongError(f"step {step} was spoiled, but the resumed run reports {result['skipped_steps']}")
    _same(result, expected, 0.0, "resumed")
    _same({key: expected[key][:step] for key in ("losses", "grad_norms")},
          {key: whole[key][:step] for key in ("losses", "grad_norms")}, REL, "before the skipped step")  # fmt: skip
    return "reported"


def _second_run(case: Case, whole: dict[str, Any], folder: Path) -> str:
    """Start a second run in the folder of a running one.

    Check that the error of the second run names the process of the first, and that the first run does not change.
    """
    config, messages = replace(case.spread, out=str(folder)), []

    def start_second() -> None:
        with mock.patch.object(Draws, "of_step", of_step):
            messages.append(str(_raises(InputError, lambda: train(replace(case.again, out=str(folder))))))

    of_step = Draws.of_step
    with interrupt("draw", case.dice.randint(1, case.plain.steps), start_second):
        _same(train(config), whole, REL, "the first run")
    if len(messages) != 1 or "another run is writing there, process " not in messages[0]:
        raise WrongError(f"the errors of the second run are {messages}")
    return "reported"


JUDGES: dict[str, Callable[[Case, dict[str, Any], Path], str]] = {
    "undisturbed": _undisturbed, "stop": _stopped, "flipped": _spoiled_file, "truncated": _spoiled_file,
    "missing": _spoiled_file, "full disk": _full_disk, "nan": _nan, "nan skipped": _nan_skipped,
    "second run": _second_run,
}  # fmt: skip


# --- the command -----------------------------------------------------------------------------------------------------

OPTIONS = ("runs", "seed", "kinds", "failures")


def main(arguments: list[str]) -> int:
    """Run random cases and print their outcomes. Return 1 if a run was lost or silently changed."""
    options = dict(argument.partition("=")[::2] for argument in arguments)
    kinds = tuple(options["kinds"].split(",")) if "kinds" in options else tuple(KINDS)
    if set(options) - set(OPTIONS) or not all(options.values()) or set(kinds) - set(KINDS):
        print(__doc__, "kinds:", ", ".join(KINDS))
        return 2
    first = int(options.get("seed") or randbelow(10**9))
    runs, allowed = int(options.get("runs", 200)), int(options.get("failures", 1))
    counts: Counter[tuple[str, str]] = Counter()
    failures, began, shown = 0, time.monotonic(), 0.0
    print(f"seeds from {first}", flush=True)
    for seed in range(first, first + runs):
        case = draw(seed, kinds)
        try:
            outcome = judge(case)
        except KeyboardInterrupt:
            break
        except BaseException as error:  # torch's checkpoint errors do not derive from Exception
            outcome, failures = "wrong", failures + 1
            print(f"\nseed {seed}, {case.kind}: {type(error).__name__}: {error}\n{case}", flush=True)
        counts[case.kind, outcome] += 1
        elapsed_s = time.monotonic() - began
        if elapsed_s - shown > 10.0:
            shown = elapsed_s
            print(f"{elapsed_s:.0f} s, {counts.total()} runs, {failures} wrong", flush=True)
        if failures >= allowed:
            break
    for (kind, outcome), count in sorted(counts.items()):
        print(f"{kind}: {count} {outcome}")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
