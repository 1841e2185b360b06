"""The fuzzer runs a few seconds of new cases, and cases that once failed."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterable
from pathlib import Path

import pytest

from tests.fuzz import session
from tests.fuzz.choices import Case
from tests.fuzz.draw import draw, kind_of
from tests.fuzz.judge import error_of
from tests.fuzz.legal import must_refuse
from tests.fuzz.workers import answers

QUICK_S, SLOW_S = 3.0, 20.0
FAILED = Path(__file__).parents[1] / "golden" / "fuzz_failed.json"
CALLS = ("attention", "dilated", "nan")
OTHERS = ("layers", "sequences", "order", "disagree", "processes", "idle", "states", "functions")


@pytest.mark.parametrize("default_s", [QUICK_S, pytest.param(SLOW_S, marks=pytest.mark.slow)])
@pytest.mark.parametrize("kinds", [CALLS, OTHERS], ids=",".join)
def test_fresh_seeds(kinds: tuple[str, ...], default_s: float) -> None:
    seconds = float(os.environ.get("RINGATTN_FUZZ_SECONDS", default_s))
    start = session.seed_of_commit()
    print(f"python -m tests.fuzz start={start} kinds={','.join(kinds)} seconds={seconds:.0f}")
    tally = session.run(seconds, start=start, kinds=kinds)
    print(tally)
    assert tally.cases
    assert not tally.failures, "\n".join(map(str, tally.failures))


# What these cases contain. Calls: causal dilated squares, a negative scale, autocast (2), inference mode between calls,
# a hidden NaN, an empty batch, softcap=inf, a NaN in one detached branch, a reentrant region with two candidate
# sequences, float16 below its normal numbers, heads of one column with batches innermost (2).
# Other kinds: backward in another order, a plan without steps, labels (2), inference mode between steps, float64 under
# autocast, a scale that differs in the last bits, a tensor as causal= on one rank.
@pytest.mark.parametrize("case", json.loads(FAILED.read_text(encoding="utf-8")), ids=lambda case: str(case["seed"]))
def test_a_case_that_once_failed(case: Case) -> None:
    """A case that once failed passes now. The golden file has whole cases, because what a seed generates may change."""
    assert error_of(case) is None


def features(case: Case) -> set[tuple[str, str, str]]:
    """Return the drawn choices of all calls that are not refused, each together with the operation and the engine."""
    result = set()
    for call in case["calls"]:
        options, length = call["options"], call["seq"]["length"]
        if must_refuse(case, call):
            continue
        values = {name: name in options for name in ("softcap", "alibi_slopes", "window", "scale", "dropout_p")}
        values |= {name: options.get(name) for name in ("offset", "tail", "grad", "causal")}
        values |= {name: case.get(name) for name in ("dtype", "autocast", "transport", "ranks", "ring")}
        values |= {name: call[name] is None for name in ("kv_seq", "sinks")}
        values |= {name: call[name] for name in ("grads", "mode", "via", "batch", "chained", "twice", "in_place",
                                                 "backward_twice", "cut_later")}  # fmt: skip
        values |= {
            "schedule": options.get("schedule", "auto").partition(":")[0], "nodes": "nodes" in case,
            "mask": options.get("mask", "").partition(":")[0], "layout": call["seq"]["layout"],
            "documents": call["seq"]["documents"] is None, "groups": call["heads"][0] > call["heads"][1],
            "frozen": "grads_of" in call, "narrow": call["dims"][0] > call["dims"][1],
            "wide": call["dims"][0] < call["dims"][1], "no values": call["dims"][1] == 0,
            "out": call["uses"]["out"], "lse": call["uses"]["lse"],
            "tail of documents": (options.get("tail"), options["causal"], len(set(call["seq"]["documents"] or ())) > 2),
            "length": length if length < 2 else length < case["ranks"],
        }  # fmt: skip
        result |= {
            (name, str(value), with_) for name, value in values.items() for with_ in (call["op"], case["engine"])
        }
    return result


def covering_cases(seeds: Iterable[int]) -> list[Case]:
    """Return a small subset of the seeds' cases that covers every feature of all of them."""
    cases = [draw(seed) for seed in seeds if kind_of(seed) in CALLS]
    has = [features(case) for case in cases]
    missing, chosen = set().union(*has), []
    while missing:
        best = max(range(len(cases)), key=lambda index: len(has[index] & missing))
        chosen.append(cases[best])
        missing -= has[best]
    return chosen


@pytest.mark.parametrize("case", covering_cases(range(1200)), ids=lambda case: str(case["seed"]))
def test_every_choice(case: Case) -> None:
    """Each option, mask, layout, schedule, dtype, transport and use of results holds. Every run has the same cases."""
    assert error_of(case) is None


def misbehave(behaviour: str) -> str:
    """Exit, hang, raise or return, depending on `behaviour`."""
    if behaviour == "dies":
        os._exit(3)
    if behaviour == "hangs":
        time.sleep(60)
    if behaviour == "raises":
        raise KeyError(behaviour)
    return behaviour


def test_a_job_that_kills_or_hangs_its_process_is_reported() -> None:
    jobs = [(behaviour,) for behaviour in ("returns", "dies", "hangs", "raises", "returns")]
    outcomes = {job: (answer, reason) for job, answer, reason in answers(misbehave, iter(jobs), 1, 2.0)}
    assert outcomes["returns",] == ("returns", "")
    assert outcomes["dies",] == (None, "the process ended with 3") and outcomes["hangs",] == (None, "no end after 2 s")
    assert "KeyError: 'raises'" in outcomes["raises",][1]
