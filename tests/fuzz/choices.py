"""The values from which the fuzzer draws ranks, lengths, documents, sequences, schedules and engines."""

from __future__ import annotations

from itertools import pairwise
from random import Random
from typing import Any

from ringattn import masks
from ringattn.errors import InputError
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
    engine, ring = r.choice(ENGINES), {"poison": maybe(r, 0.8), "keep_received": maybe(r, 0.3)}
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
    return {"layout": "documents", "schedule": _placed_for(r, case)}


def _placed_for(r: Random, case: Case) -> str:
    """Draw the schedule for which tokens are placed.

    On a known cluster the planner decides for which schedule "auto" places tokens. Without a cluster, "auto" places
    them for schedules that run in steps.
    """
    return r.choice(["all_gather", "node_gather", "ring", *([] if case.get("nodes") else ["auto"])])


def by_mask(r: Random, case: Case, seq: Case, mask: str | None = None) -> Case:
    """Draw the arguments of a placement for `mask`, or for a drawn mask of the sequence."""
    length, whole = seq["length"], seq["documents"] is None
    if mask is None:
        texts = [f"chunked:{r.choice([1, 3, 8, 16])}", f"prefix:{r.choice([0, 2, 9])}"]
        texts += [slices_text(r, length, length), *(tree_text(r, length) for _ in range(3))] if whole else []
        mask = r.choice(texts) if maybe(r, 0.97) else r.choice([None, "global_tokens:2"])
    for_ = r.choice(["causal"] * 8 + ["full"] * 3 + ["window"])
    return {"layout": "mask", "mask": mask, "for_": for_, "schedule": _placed_for(r, case)}


def slices_text(r: Random, length: int, kv_length: int, causal: bool = False) -> str:
    """Return the text of some slices; those that overlap earlier ones are left out.

    `causal`: no query attends to a later key.
    """
    items: list[str] = []
    for _ in range(r.randint(0, 6)):
        (q, q_stop), (k, k_stop) = (sorted(r.randint(0, end) for _ in range(2)) for end in (length, kv_length))
        kind = r.choice("fcsib")
        if causal:  # all keys before the first query, or the keys at the queries
            square = maybe(r, 0.5) and q_stop <= kv_length
            k, k_stop = (q, q_stop) if square else sorted(r.randint(0, min(q, kv_length)) for _ in range(2))
            kind = r.choice("csb") if square else kind
        item = f"{q}-{q_stop}x{k}-{k_stop}{kind}"
        try:
            masks.from_text("slices:" + ",".join([*items, item]))
        except InputError:
            continue
        items.append(item)
    return "slices:" + ",".join(items)


def tree_text(r: Random, length: int) -> str:
    """Return the text of a tree of some tokens: deep or wide, with empty nodes and several roots."""
    edges = [0, *sorted(r.randint(0, length) for _ in range(r.choice([0, 1, 2, 3, 5, 8]))), length]
    parents, path = [], [-1]
    for node in range(len(edges) - 1):
        del path[len(path) if maybe(r, 0.4) else r.randint(1, len(path)) :]
        parents.append(path[-1])
        path.append(node)
    return masks.tree(parents, [stop - start for start, stop in pairwise(edges)]).text


def sequence(r: Random, case: Case, documents: int | None = None, longest: int = LONGEST) -> Case:
    """Draw the arguments of `Ring.sequence`. `documents`: the number of documents, 0 for none, None for any."""
    length = _length(r, case["ranks"], longest)
    cut = maybe(r, 0.35) if documents is None else documents > 0
    cuts = _documents(r, length, documents) if cut else None
    names = [*LAYOUTS, "auto", *(["per_document"] if cut or maybe(r, 0.01) else [])]
    layout = "auto" if maybe(r, 0.35) else r.choice(names)
    placed = of_documents(r, case) if layout == "per_document" else {"layout": layout}
    for_ = r.choice(["causal"] * 5 + ["full", "window", "dilated"])
    seq = {"length": length, "documents": cuts, "for_": for_} | placed
    return seq | by_mask(r, case, seq) if maybe(r, 0.08) else seq
