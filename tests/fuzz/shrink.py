"""Makes a failing case smaller, step by step, as long as it fails in the same way."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from typing import Any

from tests.fuzz.draw import Case
from tests.fuzz.judge import error_of

USUAL: Case = {
    "kv_seq": None, "cut_later": False, "batch": 1, "sinks": None, "grads": "qkv", "strides": ["plain"] * 3,
    "size": 1.0, "uses": {"out": "weighted", "lse": False}, "twice": False, "in_place": False, "backward_twice": False,
    "mode": "train", "via": "ring", "autocast": None, "nodes": None, "ring": {}, "dtype": "float64", "order": None,
    "steps": 1, "documents": None, "layout": "contiguous", "schedule": "auto", "dims": [2, 2],
    "batched": False,
}  # fmt: skip
"""The simplest value of each key."""
DOWN_TO_ONE = ("ranks", "length")
HEADS = [[1, 1], [2, 1], [2, 2], [4, 4]]
BRANCHES = ("segment_lengths", "dilation_rates")


def kind_of_fault(error: str) -> str:
    """Return the error's text with N for each number."""
    return re.sub(r"-?\d[\d.e+-]*", "N", error)


def shrink(case: Case, error: str, seconds: float) -> Case | None:
    """Return a smaller case with the same kind of fault, or None if none is found in time."""
    deadline_s, best = time.monotonic() + seconds, None
    candidates = simpler(case)
    while (smaller := next(candidates, None)) is not None and time.monotonic() < deadline_s:
        try:
            failed = error_of(smaller)
        except Exception:  # not a valid case
            continue
        if failed and kind_of_fault(failed) == kind_of_fault(error):
            best, candidates = smaller, simpler(smaller)
    return best


def simpler(value: Any, key: str = "") -> Iterator[Any]:
    """Yield values that are one step simpler than `value`, which is the case or its entry `key`.

    Some of them do not make a valid case.
    """
    if key in USUAL and value not in (None, USUAL[key]):
        yield USUAL[key]
    if key in DOWN_TO_ONE and value > 1:
        yield from (value // 2, value - 1)
    if key == "heads" and isinstance(value, list):
        yield from (heads for heads in HEADS if heads[0] < value[0])
    if key == "calls":
        yield from _simpler_calls(value)
    elif isinstance(value, dict):
        yield from _simpler_dict(value, key)


def _simpler_dict(value: Case, key: str) -> Iterator[Case]:
    """Yield the dictionary without one option, without one branch, with fewer tokens, or with one entry simplified."""
    if key == "options":
        yield from ({name: part for name, part in value.items() if name != left_out} for left_out in value)
        for index in range(len(value.get(BRANCHES[0], ()))):
            yield value | {name: [*value[name][:index], *value[name][index + 1 :]] for name in BRANCHES}
    if value.get("documents"):
        for length in (value["length"] // 2, value["length"] - 1):
            yield value | {"length": length, "documents": [min(cut, length) for cut in value["documents"]]}
    for name, part in value.items():
        yield from (value | {name: new} for new in simpler(part, name))


def _simpler_calls(calls: list[Case]) -> Iterator[list[Case]]:
    """Yield the calls without the last one, or with one call simplified. Equal calls stay equal."""
    if len(calls) > 1:
        yield calls[:-1]
    for call in calls:
        for new in simpler(call):
            changed = {name: part for name, part in new.items() if part != call[name]}
            yield [
                other_call | {n: part for n, part in changed.items() if other_call[n] == call[n]}
                for other_call in calls
            ]
