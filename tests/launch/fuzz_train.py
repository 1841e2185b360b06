"""`python -m tests.launch.fuzz_train`: drawn training runs with a fault each.

runs=200     how many
seed=N       the first seed, each run has the next; else a fresh one
kinds=a,b    of these faults only, as kinds="nan,full disk"
failures=1   stop after so many
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

# Before torch loads: ranks are threads with one intra-op thread each.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from torch import Tensor

from ringattn.errors import InputError, NonFiniteError, RingError
from ringattn.launch.train import checkpoints, loop, mesh
from ringattn.launch.train.checkpoints import RUN, named
from ringattn.launch.train.config import ModelConfig, TrainConfig, check_sizes
from ringattn.testing import run_ranks

# --- what a seed draws: a training run, how it is spread, what befalls it and when -----------------------------------

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
"""Kinds of fault, and how often each is drawn."""
PLACES = ("draw", "update", "save", "write_run", "rename", "remove")
"""Where a run is stopped: before it draws a step's sequences, before its weights change, in the parts of a save."""


@dataclass(frozen=True)
class Case:
    """One run and its fault."""

    seed: int
    kind: str
    plain: TrainConfig
    """The run on one rank, without anything that should change nothing."""
    spread: TrainConfig
    """The same with all that: ranks, layout, recomputation."""
    place: str
    """Where it happens."""
    count: int
    """The call there at which it happens, from 1; or the step, from 0."""
    rank: int
    """To which rank."""
    again: TrainConfig
    """How the run goes on after the fault."""
    dice: random.Random
    """For what only the fault itself can draw."""


def draw(seed: int, kinds: tuple[str, ...] = tuple(KINDS)) -> Case:
    """The case of a seed, among `kinds`."""
    dice = random.Random(seed)
    kind = dice.choices(kinds, [KINDS[one] for one in kinds])[0]
    plain = _run(dice, kind)
    ranks = dice.choice([1, 2, 3]) if kind in ("undisturbed", "nan") else 1
    spread = _spread(dice, plain, ranks)
    check_sizes(spread)
    # Some faults come in a save: the first is at the step `checkpoint_every_steps`.
    place = dice.choice(PLACES if kind == "stop" else PLACES[:2])
    every = plain.checkpoint_every_steps or 1
    saves = -(-plain.steps // every)
    if place in ("draw", "update"):
        count = dice.randint(1, plain.steps)
    elif place == "remove":
        count = max(1, dice.randint(0, saves - 2))
    else:
        count = dice.randint(1, saves)
    again = _spread(dice, plain, 1) if dice.random() < 0.5 else spread
    return Case(seed, kind, plain, spread, place, count, dice.randrange(ranks), again, dice)


def _run(dice: random.Random, kind: str) -> TrainConfig:
    """What is trained, by one rank."""
    start = dice.randint(6, 14)
    grows: dict[str, Any] = {}
    length = dice.randint(8, 48)
    if dice.random() < 0.2:
        length = start * dice.choice([2, 4])
        grows = {"curriculum_start_tokens": start, "curriculum_steps": dice.randint(1, 4)}
    packs: dict[str, Any] = {}
    if dice.random() < 0.3:
        packs = {"pack_documents": True, "separator": dice.choice(["\n", " ", "\n\n", "."])}
    dilates: dict[str, Any] = {}
    if dice.random() < 0.2:
        dilates = {"attention": "dilated", "segment_lengths": [8, 64], "dilation_rates": [1, dice.choice([2, 3])]}
    heads, kv_heads = dice.choice([(2, 1), (2, 2), (4, 2)])
    optimizers = ["adamw", "sgd"] if kind in ("undisturbed", "nan") else ["adamw", "sgd", "adafactor"]
    return TrainConfig(
        tokens=length, batch=dice.choice([1, 2, 4]), steps=dice.randint(4, 8), dtype="fp64",
        optimizer=dice.choice(optimizers), learning_rate=dice.choice([1e-3, 1e-2]), warmup_steps=dice.randint(0, 4),
        clip_norm=dice.choice([0.1, 1.0, 10.0]), seed=dice.randrange(1000), layout="auto", timeout_s=60.0,
        prompt_tokens=dice.choice([0, 0, 1, 3]), checkpoint_every_steps=dice.randint(1, 3),
        model=ModelConfig(dice.choice([1, 1, 2]), 16, heads, kv_heads, 24, tied=dice.random() < 0.7),
        **grows, **packs, **dilates,
    )  # fmt: skip


def _spread(dice: random.Random, plain: TrainConfig, ranks: int) -> TrainConfig:
    """The same run with other switches, none of which may change what it learns."""
    return replace(
        plain,
        ranks=ranks,
        layout=dice.choice(["auto", "contiguous", "zigzag", "striped"]),
        recompute=dice.choice(["none", "selective", "full"]),
        chunked_loss_tokens=dice.choice([None, 1, 5, 16]),
        micro_batch=None if plain.pack_documents else dice.choice([None, 1, 3]),
    )


# --- what befalls a run: the trainer stops, fails or is spoiled at a drawn call; files are spoiled -------------------

TARGETS: dict[str, tuple[Any, str]] = {
    "draw": (loop, "drawn"),
    "update": (loop, "update"),
    "save": (checkpoints.dcp, "save"),
    "write_run": (checkpoints, "write_run"),
    "rename": (Path, "rename"),
    "remove": (checkpoints, "remove"),
}


class StoppedError(BaseException):
    """The machine stopped: nothing is tidied up after it."""


def stop() -> None:
    """Stop the machine."""
    raise StoppedError


@contextmanager
def at(place: str, count: int, act: Callable[[], None], after: bool = False) -> Iterator[None]:
    """`act` before, or after, the `count`-th call of the trainer at `place`; calls of the warm-up do not count."""
    owner, name = TARGETS[place]
    kept, calls = getattr(owner, name), 0

    def acts(*arguments: Any, **named: Any) -> Any:
        nonlocal calls
        warms_up = place in ("draw", "update") and not _is_of_the_run(arguments)
        if place == "rename":  # of a checkpoint that gets its name
            warms_up = not arguments[0].name.endswith(".partial") or arguments[0].name.startswith("result")
        calls += not warms_up
        now = calls == count and not warms_up
        if now and not after:
            act()
        answer = kept(*arguments, **named)
        if now and after:
            act()
        return answer

    with mock.patch.object(owner, name, acts):
        yield


def _is_of_the_run(arguments: tuple[Any, ...]) -> bool:
    """Whether a call of `drawn` or `update` is not that of the warm-up, whose model is 16 wide inside."""
    for one in arguments:
        config = getattr(one, "model", None) or getattr(one, "config", None)
        if config is not None:
            return bool(config.hidden_dim != 16)
    return True


@contextmanager
def spoiled(step: int, rank: int, value: float, what: str) -> Iterator[None]:
    """The loss, or a gradient alone, of one step (from 0) of one rank is `value`."""
    drawn, local_part = loop.drawn, loop.local_part
    now: dict[int, int] = {}

    def drawn_now(ring: Any, replica: int, text: Any, number: int, config: Any) -> Any:
        now[ring.rank] = number if _is_of_the_run((config,)) else -1
        return drawn(ring, replica, text, number, config)

    def part(seq: Any, *more: Any) -> Tensor:
        loss = local_part(seq, *more)
        if now[seq.ring.rank] != step or seq.ring.rank != rank:
            return loss
        if what == "loss":
            return torch.where(torch.ones_like(loss, dtype=torch.bool), loss + value, loss)
        loss.register_hook(lambda grad: grad * value)
        return loss * 1.0

    with mock.patch.object(loop, "drawn", drawn_now), mock.patch.object(loop, "local_part", part):
        yield


@contextmanager
def full_disk(save: int, limit_bytes: int) -> Iterator[None]:
    """In the `save`-th save no file takes more than `limit_bytes`: real writes fail, at any byte."""
    kept, calls = checkpoints.Checkpoints.save, 0

    def limited(*arguments: Any) -> None:
        nonlocal calls
        calls += 1
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        if calls == save:
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit_bytes, hard))
        try:
            kept(*arguments)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))

    with mock.patch.object(checkpoints.Checkpoints, "save", limited):
        yield


def spoil(kind: str, path: Path, dice: random.Random) -> None:
    """Flip a bit of a file, cut it, or take it away."""
    if kind == "missing":
        path.unlink()
    elif kind == "truncated":
        os.truncate(path, dice.randrange(path.stat().st_size))
    else:
        content = bytearray(path.read_bytes())
        content[dice.randrange(len(content))] ^= 1 << dice.randrange(8)
        path.write_bytes(content)


# --- whether a run comes to the curve of an undisturbed one, or to a named error -------------------------------------

REL = 1e-10
"""Of losses and norms in float64 by another number of ranks; the same number has the same bits."""


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
        with mock.patch.object(mesh, "DYING_S", 0.0):
            return JUDGES[case.kind](case, whole, folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _refused(case: Case, error: InputError) -> str:
    """It is refused spread over ranks as well."""
    spread = replace(case.spread, checkpoint_every_steps=None)
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
    config = replace(case.again, ranks=1, out=str(folder))
    result = train(config)
    _same(result, whole, REL, f"resumed from step {result['first_step']}")
    if left := [path.name for path in (folder / "checkpoints").iterdir() if path.suffix]:
        if result["step_s"]:
            raise WrongError(f"a run that ended well left {left}")
    return result


def _stopped(case: Case, whole: dict[str, Any], folder: Path) -> str:
    """Stopped at any call, it goes on from the last complete checkpoint."""
    with at(case.place, case.count, stop, after=case.dice.random() < 0.3):
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
    except StoppedError:
        pass


def _spoiled_file(case: Case, whole: dict[str, Any], folder: Path) -> str:
    """The newest checkpoint is damaged after a stop: the one before is taken, and it is said."""
    with at("draw", case.dice.randint(2, case.plain.steps + 1), stop):
        _interrupted(case, folder)
    complete = named(folder / "checkpoints")
    if not complete:
        _goes_on(case, whole, folder)
        return "exact"
    file = case.dice.choice(sorted(complete[0].iterdir()))
    spoil(case.kind, file, case.dice)
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
    with full_disk(save, case.dice.randrange(0, 400_000)):
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
    return lambda rank: spoiled(step, rank, value, what)


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
    with at("draw", case.dice.randint(1, case.plain.steps), second):
        _same(train(config), whole, REL, "the first run")
    if len(told) != 1 or "another run is writing there, process " not in told[0]:
        raise WrongError(f"the second run was told {told}")
    return "told"


JUDGES: dict[str, Callable[[Case, dict[str, Any], Path], str]] = {
    "undisturbed": _undisturbed, "stop": _stopped, "flipped": _spoiled_file, "truncated": _spoiled_file,
    "missing": _spoiled_file, "full disk": _full_disk, "nan": _nan, "nan skipped": _nan_skipped,
    "second run": _second_run,
}  # fmt: skip


# --- the command -----------------------------------------------------------------------------------------------------

OPTIONS = ("runs", "seed", "kinds", "failures")


def main(words: list[str]) -> int:
    """The exit code: 1 where a run was lost or silently changed."""
    given = dict(word.partition("=")[::2] for word in words)
    kinds = tuple(given["kinds"].split(",")) if "kinds" in given else tuple(KINDS)
    if set(given) - set(OPTIONS) or not all(given.values()) or set(kinds) - set(KINDS):
        print(__doc__, "kinds:", ", ".join(KINDS))
        return 2
    first = int(given.get("seed") or randbelow(10**9))
    runs, allowed = int(given.get("runs", 200)), int(given.get("failures", 1))
    counts: Counter[tuple[str, str]] = Counter()
    failures, began, shown = 0, time.monotonic(), 0.0
    print(f"seeds from {first}", flush=True)
    for seed in range(first, first + runs):
        case = draw(seed, kinds)
        try:
            outcome = judge(case)
        except KeyboardInterrupt:
            break
        except BaseException as error:  # torch's own of checkpoints are no Exceptions
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
