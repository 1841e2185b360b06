"""Draws recurrences over rows with history, on every CPU transport."""

from __future__ import annotations

from random import Random

from tests.fuzz.choices import Case, maybe, sequence
from tests.fuzz.draw_idle import PROCESSES

TRANSPORTS = ("local",) * 4 + ("shm", "gloo")


def draw_states(r: Random, case: Case) -> Case:
    """Draw one to three recurrences, each over the outputs of the one before."""
    transport = r.choice(TRANSPORTS)
    ranks = r.choice([1, 2, 3, 4, 4, 5, 6, 9, 12]) if transport == "local" else r.choice([2, 3, PROCESSES])
    case |= {"ranks": ranks, "transport": transport, "engine": "plain", "ring": {}, "autocast": None}
    if maybe(r, 0.3):  # doubling runs within nodes first
        case["nodes"] = {"ranks": r.choice([1, 2, 3, 4]), "bandwidth": 1e9, "latency_s": 1e-6, "node_bandwidth": 1e6,
                         "gpu": None}  # fmt: skip
    seq = sequence(r, case, longest=60)
    if maybe(r, 0.8):  # few in the layout striped, which is refused
        of_documents = ["per_document", "documents"] if seq["documents"] else []
        seq |= {"layout": r.choice(["contiguous", "zigzag", *of_documents]), "schedule": "auto"}
    steps = [
        {"width": r.choice([0, 1, 2, 3, 7]), "matrix": maybe(r, 0.5), "overlap": maybe(r, 0.5),
         "decay": r.choice([0.0, 0.5, 0.9, 1.0])}
        for _ in range(r.choice([1, 1, 1, 2, 3]))
    ]  # fmt: skip
    return case | {
        "seq": seq, "batch": r.choice([1, 2]), "dims": [r.choice([1, 2, 3]), r.choice([1, 2, 4])], "steps": steps,
        "mode": r.choice(["train"] * 6 + ["no_grad", "checkpoint", "reentrant"]),
        "dtype": r.choice(["float64", "float64", "float32"]),
    }  # fmt: skip
