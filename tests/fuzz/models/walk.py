"""Examines one class after another in processes that may die, and records the outcome of each case.

Guarantees: a class that kills or hangs its process is reported by name; the same seed gives the same cases.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

import transformers

from ringattn.adapters.transformers import prepare
from ringattn.errors import InputError
from tests.fuzz.models import cases, tiny
from tests.fuzz.models.judge import in_double, judge
from tests.fuzz.workers import answers

HANG_S = 150.0
"""A class that takes longer has hung, because waits of ranks for each other end earlier."""

BUILD_S = 20.0
"""After this time no other model of a class is tried."""

WORST_FIRST = ("wrong", "refused", "exact", "not buildable")
"""Verdicts on the models of one class; the first of these that occurs counts."""

Record = dict[str, Any]
"""The record of a class: class, type, verdict, reason, cases, seconds, not_given."""


def examine(name: str, model_type: str, seed: int) -> Record | None:
    """Examine one class; return its record, or None if its `forward` takes no `input_ids`."""
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
    """Judge the usual model of a class, and one model per other kind of layer. Record the worst verdict."""
    record["not_given"] = cases.not_given(kind)
    usual = make_model(kind, seed)
    others = tiny.other_kinds(usual[0])
    verdicts = [_verdict(*usual, record, "")]
    for extra in others:
        try:
            verdicts.append(_verdict(*make_model(kind, seed, extra), record, f"{extra.kind}, "))
        except tiny.NotBuilt as error:
            record.setdefault("kinds_not_built", {})[extra.kind] = str(error)
    worst = min(verdicts, key=lambda verdict: WORST_FIRST.index(verdict[0]))
    record["verdict"], record["reason"] = worst


def _verdict(reference: Any, copies: list[Any], calls: list[Any], record: Record, prefix: str) -> tuple[str, str]:
    """Return the verdict on one model and its reason. Record the outcome of each case, its name after `prefix`."""
    try:
        for model in copies:
            prepare(model)
    except InputError as error:
        return "refused", tiny.line(error, 600)
    verdicts = {case.name: judge(reference, copies, case) for case in calls}
    record["cases"] |= {prefix + name: list(verdict) for name, verdict in verdicts.items()}
    for what in ("wrong", "exact", "refused"):
        first = next((verdict for verdict in verdicts.values() if verdict.what == what), None)
        if first is not None:
            return what, "" if what == "exact" else first.why
    return "not buildable", verdicts[calls[0].name].why


def make_model(kind: type[Any], seed: int, extra: Any = None) -> tuple[Any, list[Any], list[Any]]:
    """Return the smallest model that runs, two copies of it, and its cases. `extra`: the kind of an additional layer.

    Raises `NotBuilt` if no such model runs.
    """
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
        for always in cases.ALWAYS:
            try:
                with in_double():
                    calls = cases.cases_of(kind, reference, seed, always)
                    reference(**calls[0].batch, **calls[0].beside, **calls[0].rest)
                return reference, copies, calls
            except Exception as error:
                reasons.append(tiny.line(error))
    raise tiny.NotBuilt(reasons[0])


def walk(
    names: dict[str, str], seed: int, jobs: int, seconds: float, most: int | None, report: Callable[[Record], None]
) -> None:
    """Examine classes in `jobs` processes, and pass each record to `report` immediately.

    `names`: model types by class. `most`: the largest number of classes, None for all.
    """

    def classes() -> Iterator[tuple[str, str, int]]:
        began = time.monotonic()
        for name, model_type in islice(names.items(), most):
            if time.monotonic() - began >= seconds:
                return
            yield name, model_type, seed

    for (name, model_type, _), record, reason in answers(_examine_quietly, classes(), jobs, HANG_S):
        if reason:
            record = {
                "class": name,
                "type": model_type,
                "verdict": "wrong",
                "reason": reason,
                "cases": {},
                "seconds": 0.0,
            }
        if record is not None:
            report(record)


def _examine_quietly(name: str, model_type: str, seed: int) -> Record | None:
    transformers.logging.set_verbosity(transformers.logging.CRITICAL)
    return examine(name, model_type, seed)
