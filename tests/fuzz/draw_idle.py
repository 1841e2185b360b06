"""Draws calls in which some ranks have no queries, no keys that are read, or no heads, on every CPU transport."""

from __future__ import annotations

from random import Random

from tests.fuzz.choices import Case, draw_nodes, maybe, numbers, schedule
from tests.fuzz.draw_calls import call, draw_mask, window

TRANSPORTS = ("local", "shm", "shm", "gloo")
MOVING_QUERIES = ["ulysses", "ulysses_ring", "pass_q", "balanced"]
PROCESSES = 4
"""Largest number of ranks of a case that runs in processes."""


def draw_idle(r: Random, case: Case) -> Case:
    """Draw a case of one call, or of two equal calls on different tensors."""
    transport = r.choice(TRANSPORTS)
    ranks = r.choice([2, 3, 4, 4, 5, 6, 8]) if transport == "local" else r.choice([2, 3, 3, PROCESSES, PROCESSES])
    case |= {"ranks": ranks, "transport": transport} | numbers(r, "idle")
    if maybe(r, 0.15):
        case["nodes"] = draw_nodes(r)
    calls = [_call(r, case)]
    if maybe(r, 0.3):  # the same shapes again, on other tensors
        calls.append(calls[0] | {"like": 0})
    return case | {"calls": calls, "order": None if maybe(r, 0.5) else r.sample(range(len(calls)), len(calls))}


def _call(r: Random, case: Case) -> Case:
    """Draw a call in which some ranks are likely to be idle. Most calls have a backward pass."""
    call_, ranks = call(r, case | {"kind": r.choice(["attention"] * 4 + ["dilated"])}), case["ranks"]
    call_ |= {"bad": None, "in_place": False, "cut_later": False, "via": "ring", "batch": r.choice([1, 1, 2])}
    call_ |= {"mode": r.choice(["train"] * 8 + ["checkpoint", "no_grad"])}
    options = call_["options"]
    options["schedule"] = r.choice(MOVING_QUERIES) if maybe(r, 0.4) else schedule(r, ranks)
    call_["seq"] = _sequence(r, r.randint(0, ranks + 2))
    if call_["op"] == "dilated":
        return call_
    call_["kv_seq"] = None
    call_["heads"] = r.choice([[1, 1], [1, 1], [2, 1], [2, 2], [3, 3], [4, 2]])
    if "alibi_slopes" in options:
        options["alibi_slopes"] = (options["alibi_slopes"] * 4)[: call_["heads"][0]]
    for name in ("window", "mask"):
        options.pop(name, None)
    choice = r.choice(["few", "longer", "longer", "shorter", "documents", "window"])
    if choice in ("longer", "shorter"):  # if causal, queries read only the first keys, or the last queries read all
        length = r.randint(1, 12)
        keys = (
            r.randint(0, 3) if choice == "shorter" else r.choice([r.randint(0, 40), length * ranks, length * ranks + 3])
        )
        call_["seq"], call_["kv_seq"] = _sequence(r, length), _sequence(r, keys)
        options["causal"] = maybe(r, 0.85)
    elif choice == "documents":  # some queries have no keys, and some keys no queries
        count = r.choice([2, 3, 4])
        call_["seq"], call_["kv_seq"] = (_documents(r, count) for _ in range(2))
    elif choice == "window":  # some windows contain no key, and some keys are in no window
        call_["seq"], call_["kv_seq"] = _sequence(r, r.randint(1, 12)), _sequence(r, r.randint(1, 24))
        options["window"] = r.choice([(0, 0), (2, 0), (None, 0), (0, None if not options["causal"] else 0)])
    if call_["kv_seq"] and choice != "window" and maybe(r, 0.6):
        options["window"] = window(r, options["causal"])
    draw_mask(r, case, call_)
    return call_


def _sequence(r: Random, length: int) -> Case:
    layout = r.choice(["contiguous", "contiguous", "contiguous", "zigzag", "striped", "auto"])
    return {"length": length, "documents": None, "layout": layout, "for_": "causal"}


def _documents(r: Random, count: int) -> Case:
    lengths = [r.choice([0, 0, 1, 2, r.randint(1, 12)]) for _ in range(count)]
    cuts = [sum(lengths[:document]) for document in range(count + 1)]
    layout = r.choice(["contiguous", "contiguous", "per_document", "auto"])
    return {"length": cuts[-1], "documents": cuts, "layout": layout, "for_": "causal"}
