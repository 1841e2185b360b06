"""One class after another, in processes that may die: what became of each of its cases.

Guarantees: a class that kills or hangs its process is reported by name; the same seed gives the same cases.
"""

from __future__ import annotations

import copy
import multiprocessing
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection, wait
from typing import Any

HANG_S = 150.0
"""A class that takes longer hangs; waits of ranks for each other end before."""

BUILD_S = 20.0
"""No other model of a class is tried after so long."""

WORST_FIRST = ("wrong", "refused", "exact", "not buildable")
"""Verdicts on models of one class: the first of these counts."""

Record = dict[str, Any]
"""What is written of a class: class, type, verdict, reason, cases, seconds, not_given."""


def examined(name: str, model_type: str, seed: int) -> Record | None:
    """Everything about one class, or None where it takes no text."""
    from tests.fuzz.models import tiny

    began = time.monotonic()
    record: Record = {"class": name, "type": model_type, "verdict": "not buildable", "reason": "", "cases": {}}
    try:
        kind = tiny.class_of(name)
        if not tiny.takes_text(kind):
            return None
        _judge(kind, record, seed)
    except tiny.NotBuilt as error:
        record["reason"] = str(error)
    record["seconds"] = round(time.monotonic() - began, 2)
    return record


def _judge(kind: type[Any], record: Record, seed: int) -> None:
    """Judge the usual model of a class, then one for each other kind of layer that its file knows; the worst counts."""
    from tests.fuzz.models import tiny
    from tests.fuzz.models.cases import not_given

    record["not_given"] = not_given(kind)
    made_usual = made(kind, seed)
    others = tiny.other_kinds(made_usual[0])
    verdicts = [_verdict(*made_usual, record, "")]
    for extra in others:
        try:
            verdicts.append(_verdict(*made(kind, seed, extra), record, f"{extra.kind}, "))
        except tiny.NotBuilt as error:
            record.setdefault("kinds_not_built", {})[extra.kind] = str(error)
    worst = min(verdicts, key=lambda verdict: WORST_FIRST.index(verdict[0]))
    record["verdict"], record["reason"] = worst


def _verdict(reference: Any, copies: list[Any], cases: list[Any], record: Record, prefix: str) -> tuple[str, str]:
    """The verdict of one model and its reason. What became of each case goes into the record, under this prefix."""
    from ringattn.adapters.transformers import prepare
    from ringattn.errors import InputError
    from tests.fuzz.models import tiny
    from tests.fuzz.models.judge import judge

    try:
        for model in copies:
            prepare(model)
    except InputError as error:
        return "refused", tiny.line(error, 600)
    found = {case.name: judge(reference, copies, case) for case in cases}
    record["cases"] |= {prefix + name: list(verdict) for name, verdict in found.items()}
    for what in ("wrong", "exact", "refused"):
        first = next((verdict for verdict in found.values() if verdict.what == what), None)
        if first is not None:
            return what, "" if what == "exact" else first.why
    return "not buildable", found[cases[0].name].why


def made(kind: type[Any], seed: int, extra: Any = None) -> tuple[Any, list[Any], list[Any]]:
    """The smallest model that runs, with a layer of the kind `extra`, two copies and its cases. Raises `NotBuilt`."""
    from tests.fuzz.models import tiny
    from tests.fuzz.models.cases import ALWAYS, cases_of
    from tests.fuzz.models.judge import in_double

    reasons, began = [], time.monotonic()
    for profile in tiny.PROFILES:
        if time.monotonic() - began > BUILD_S:
            break
        try:
            with in_double():
                reference = tiny.build(kind.__name__, profile, extra)
                copies = [copy.deepcopy(reference) for _ in range(2)]
        except Exception as error:
            reasons.append(tiny.line(error))
            continue
        for always in ALWAYS:
            try:
                with in_double():
                    cases = cases_of(kind, reference, seed, always)
                    reference(**cases[0].batch, **cases[0].beside, **cases[0].rest)
                return reference, copies, cases
            except Exception as error:
                reasons.append(tiny.line(error))
    raise tiny.NotBuilt(reasons[0])


def walk(
    names: dict[str, str], seed: int, jobs: int, seconds: float, cases: int | None, told: Callable[[Record], None]
) -> None:
    """Give each record to `told` as it comes. `cases`: how many classes at most."""
    context, began = multiprocessing.get_context("spawn"), time.monotonic()
    left = iter(list(names.items())[:cases])
    workers: dict[Connection, _Worker] = {}
    for _ in range(jobs):
        _give(_Worker(context), left, seed, workers)
    while workers:
        for pipe in wait(list(workers), timeout=0.5):
            worker = workers.pop(pipe)  # type: ignore[call-overload]
            record, is_alive = worker.report()
            if record is not None:
                told(record)
            worker = worker if is_alive else _Worker(context)
            _give(worker, left if time.monotonic() - began < seconds else iter(()), seed, workers)
        for worker in [one for one in workers.values() if time.monotonic() - one.since > HANG_S]:
            del workers[worker.pipe]
            told(worker.lost(f"no end after {HANG_S:.0f} s"))
            _give(_Worker(context), left, seed, workers)


def _give(worker: _Worker, left: Iterator[tuple[str, str]], seed: int, workers: dict[Connection, _Worker]) -> None:
    try:
        worker.give(*next(left), seed)
    except StopIteration:
        worker.end()
        return
    workers[worker.pipe] = worker


class _Worker:
    """A process that examines one class after another."""

    def __init__(self, context: Any) -> None:
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=_serve, args=(theirs,), daemon=True)
        self.process.start()
        theirs.close()
        self.name, self.kind, self.since = "", "", time.monotonic()

    def give(self, name: str, kind: str, seed: int) -> None:
        """The next class."""
        self.name, self.kind, self.since = name, kind, time.monotonic()
        self.pipe.send((name, kind, seed))

    def report(self) -> tuple[Record | None, bool]:
        """What was found, and whether the process lives on."""
        try:
            return self.pipe.recv(), True
        except (EOFError, ConnectionResetError):
            self.process.join(10)
            return self.lost(f"the process ended with {self.process.exitcode}"), False

    def lost(self, why: str) -> Record:
        """What is written of a class that took its process with it."""
        self.process.kill()
        self.process.join()
        return {"class": self.name, "type": self.kind, "verdict": "wrong", "reason": why, "cases": {}, "seconds": 0.0}

    def end(self) -> None:
        """No more classes."""
        self.pipe.close()
        self.process.join(30)
        if self.process.exitcode is None:
            self.process.kill()


def _serve(pipe: Connection) -> None:
    """The life of a worker."""
    import torch
    import transformers

    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    sys.setswitchinterval(1e-3)  # ranks that are threads wait for each other all the time
    transformers.logging.set_verbosity(transformers.logging.CRITICAL)
    while True:
        try:
            given = pipe.recv()
        except EOFError:
            return
        try:
            record = examined(*given)
        except Exception as error:
            name, kind, _ = given
            why = f"the harness failed: {type(error).__name__}: {error}"
            record = {"class": name, "type": kind, "verdict": "wrong", "reason": why, "cases": {}, "seconds": 0.0}
        pipe.send(record)
