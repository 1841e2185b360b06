"""The values from which the fuzzer draws ranks, lengths, documents, sequences, schedules and engines."""

from __future__ import annotations

from random import Random
from typing import Any

from ringattn.schedule.routes import ALIASES, NUMBERED, ROUTES

Case = dict[str, Any]

RANKS = [1] * 32 + [2] * 36 + [3] * 16 + [4] * 10 + [5, 5, 6, 7, 8, 8]
LONGEST = 400
"""Tokens of the longest sequence; few are that long."""
OF_DOCUMENTS = ("per_document", "documents")
LAYOUTS = ("contiguous", "zigzag", "striped")
SCHEDULES = [*ROUTES, *ALIASES]
ENGINES = ["auto"] * 7 + ["aten"] * 2 + ["plain"] * 2
STRIDES = ("plain", "transposed", "leaf", "sliced", "every_second", "heads_apart", "one_batch", "one_head")
BATCH_LAST = "batch_last"
"""Batches innermost in memory. Only for heads with one column; other heads are refused."""
MODES = ["train"] * 10 + ["inference", "no_grad", "checkpoint", "reentrant"]
SLOPES = [0.0, 1.0, 0.5, 0.1, 2.0**-8, -0.02, 0.3]


def maybe(r: Random, chance: float) -> bool:
    return r.random() < chance


def divisor(r: Random, ranks: int) -> int:
    """Draw a divisor of the number of ranks."""
    return r.choice([size for size in range(1, ranks + 1) if ranks % size == 0])


def schedule(r: Random, ranks: int) -> str:
    """Draw "auto" or the name of a schedule, for some schedules with their number ("name:2")."""
    if maybe(r, 0.5):
        return "auto"
    name = r.choice([*SCHEDULES, *NUMBERED])
    return f"{name}:{divisor(r, ranks)}" if name in NUMBERED and maybe(r, 0.4) else name


def numbers(r: Random, kind: str) -> Case:
    """Draw the dtype, the engine and the options of the ring."""
    dtype = r.choice(["float64"] * 7 + ["float32"] * 3 + ["bfloat16", "float16"])
    engine, ring = r.choice(ENGINES), {"poison": maybe(r, 0.8)}
    if kind == "triton":
        engine, dtype = "triton", r.choice(["float32", "float32", "float16"])  # the interpreter has no bfloat16
    if maybe(r, 0.1) and kind not in ("nan", "triton", "layers"):
        name, value = r.choice([
            ("dkv_wire_dtype", "bfloat16"), ("dkv_wire_dtype", "float32"), ("out_wire_dtype", "bfloat16"),
            ("out_wire_dtype", "float32"), ("kv_wire_dtype", "int8"), ("kv_wire_dtype", "float8_e4m3fn"),
        ])  # fmt: skip
        ring[name] = value
    autocast = r.choice(["bfloat16", "float16"]) if maybe(r, 0.12) else None
    return {"dtype": dtype, "engine": engine, "ring": ring, "autocast": autocast}


def draw_nodes(r: Random) -> Case:
    """Draw a cluster for schedule="auto": ranks per node, and link speeds that decide which schedule is the fastest.

    `gpu` in the result: the ring must recognise the cluster by these GPUs. None: the ring gets a `Cluster`.
    """
    return {"ranks": r.choice([1, 2, 2, 3, 4]), "bandwidth": r.choice([1e5, 1e7, 1e9]),
            "latency_s": r.choice([1e-6, 1e-4]), "node_bandwidth": r.choice([1e5, 1e6]),
            "gpu": r.choice([None, None, "NVIDIA A100-SXM4-80GB", "NVIDIA B200"])}  # fmt: skip


def _length(r: Random, ranks: int, longest: int) -> int:
    """Draw a length: tiny, near a multiple of the ranks, medium, and sometimes long."""
    choice = r.random() if longest == LONGEST else r.random() * 0.6
    if choice < 0.35:
        return r.randint(0, 9)
    if choice < 0.6:
        return max(0, ranks * r.randint(1, 10) + r.choice([-1, 0, 1]))
    if choice < 0.94:
        return r.randint(10, 48)
    return r.randint(49, 130) if choice < 0.985 else r.randint(131, LONGEST)


def _documents(r: Random, length: int, count: int | None = None) -> list[int]:
    """Draw bounds from 0 to the length; empty documents and documents of a single token are likely."""
    count = r.choice([1, 2, 2, 3, 4, 6]) if count is None else count
    cuts = [r.randint(0, length) for _ in range(count - 1)]
    for index in range(len(cuts)):
        if maybe(r, 0.35):
            cuts[index] = min(length, r.choice([0, *cuts]) + r.choice([0, 1]))
    return [0, *sorted(cuts), length]


def of_documents(r: Random, case: Case) -> Case:
    """Draw a layout that depends on documents; for `documents` also the schedule for which it places them."""
    if maybe(r, 0.5):
        return {"layout": "per_document"}
    # On a known cluster the planner decides for which schedule "auto" places documents. Without a cluster, "auto"
    # places them for schedules that run in steps.
    names = ["all_gather", "all_gather", "ring", *([] if case.get("nodes") else ["auto"])]
    return {"layout": "documents", "schedule": r.choice(names)}


def sequence(r: Random, case: Case, documents: int | None = None, longest: int = LONGEST) -> Case:
    """Draw the arguments of `Ring.sequence`. `documents`: the number of documents, 0 for none, None for any."""
    length = _length(r, case["ranks"], longest)
    cut = maybe(r, 0.35) if documents is None else documents > 0
    cuts = _documents(r, length, documents) if cut else None
    names = [*LAYOUTS, "auto", *(["per_document"] if cut or maybe(r, 0.01) else [])]
    layout = "auto" if maybe(r, 0.35) else r.choice(names)
    placed = of_documents(r, case) if layout == "per_document" else {"layout": layout}
    for_ = r.choice(["causal"] * 5 + ["full", "window", "dilated"])
    return {"length": length, "documents": cuts, "for_": for_} | placed
