"""A case from a seed: a dictionary of plain values, which prints readably and is all that a run needs.

Guarantees: a seed gives one case, whatever kinds are asked for; a case is drawn from the options that the public face
has, refused combinations included.
"""

from __future__ import annotations

from random import Random

from tests.fuzz.choices import (
    MODES,
    NEW_SCHEDULES,
    OF_DOCUMENTS,
    RANKS,
    SCHEDULES,
    Case,
    draw_nodes,
    grid_schedule,
    maybe,
    numbers,
    sequence,
)
from tests.fuzz.draw_calls import (
    branches,
    call,
    draw_activation,
    draw_alibi,
    draw_dropout,
    draw_frozen,
    draw_grids,
    draw_mask,
    draw_memory,
    next_call,
    odd,
)
from tests.fuzz.draw_idle import draw_idle

KINDS = {
    "attention": 30,
    "dilated": 30,
    "layers": 15,
    "sequences": 8,
    "order": 5,
    "disagree": 4,
    "nan": 3,
    "processes": 3,
    "triton": 2,
}
"""How often each kind is drawn, in a hundred."""
IDLE, IDLE_SHARE = "idle", 0.05
"""Ranks without keys, queries or heads. Drawn before the others, and not by old seeds."""
USUAL = (*(kind for kind in KINDS if kind != "triton"), IDLE)
"""Kinds of a run that names none: all but the one that needs Triton's interpreter."""


OLD_SEEDS = 1000
"""Seeds below draw as they did before there were `NEW_SCHEDULES`: many are kept as cases that once failed."""

LATER_SEEDS = 10**8
"""Seeds below draw no frozen parts, no numbers of a schedule that differ, and no transport but threads and gloo."""


def kind_of(seed: int) -> str:
    """The kind of this seed's case."""
    if seed >= OLD_SEEDS and maybe(Random(f"idle {seed}"), IDLE_SHARE):
        return IDLE
    return Random(f"kind {seed}").choices(list(KINDS), list(KINDS.values()))[0]


def draw(seed: int) -> Case:
    """The case of this seed; some of its schedules by name are the newer ones, and so are some masks and layouts."""
    if seed < OLD_SEEDS:
        return _case(seed)
    if kind_of(seed) == IDLE:
        return draw_idle(seed)
    case, r, grids = _case(seed), Random(f"rings {seed}"), Random(f"grids {seed}")
    for holder in (*case.get("calls", ()), case):
        options = holder.get("options", {})
        if options.get("schedule", "auto") != "auto" and maybe(r, 0.4):
            options["schedule"] = r.choice(NEW_SCHEDULES)
        if options.get("schedule", "auto") != "auto" and maybe(grids, 0.3):
            options["schedule"] = grid_schedule(grids, case["ranks"])
        for seq in (holder.get("seq"), holder.get("kv_seq")):
            if seq and seq["layout"] == "per_document":
                seq["layout"] = Random(f"documents {seed}").choice(OF_DOCUMENTS)
    if case["kind"] in ("attention", "dilated", "processes", "nan") and maybe(r, 0.25):
        case["nodes"] = draw_nodes(r)
    for seq in (one for holder in (*case.get("calls", ()), case) for one in (holder.get("seq"), holder.get("kv_seq"))):
        if seq and seq["layout"] == "documents":
            # On known machines what "auto" places for is the planner's own affair; without, it is for steps.
            names = ["all_gather", "all_gather", "ring", *([] if case.get("nodes") else ["auto"])]
            seq["schedule"] = Random(f"placed {seed}").choice(names)
    if case["kind"] in ("attention", "processes", "nan"):
        for call in case["calls"]:
            draw_mask(Random(f"masks {seed}"), call)
    if case["kind"] in ("attention", "dilated", "processes", "nan", "triton"):
        for call in case["calls"]:
            draw_alibi(Random(f"alibi {seed}"), call)
            draw_memory(Random(f"memory {seed}"), call)
            if case["kind"] != "nan":
                draw_dropout(Random(f"dropout {seed}"), call)
    if case["kind"] in ("attention", "dilated", "processes"):
        draw_activation(Random(f"activation {seed}"), case)
    if seed < LATER_SEEDS:
        return case
    if case["kind"] in ("attention", "dilated", "processes"):
        draw_frozen(Random(f"frozen {seed}"), case)
    if case["kind"] == "disagree":
        draw_grids(Random(f"odd grids {seed}"), case)
    if case["kind"] == "processes" or (case["kind"] in ("attention", "dilated", "disagree") and case["ranks"] <= 4):
        names = ["gloo", "shm"] if case["kind"] == "processes" else ["local"] * 4 + ["nccl"]
        case["transport"] = Random(f"transport {seed}").choice(names)
    return case


def _case(seed: int) -> Case:
    r, kind = Random(f"case {seed}"), kind_of(seed)
    case: Case = {"seed": seed, "kind": kind, "ranks": r.choice(RANKS)}
    if kind == "sequences":
        return case | {"seq": sequence(r, case["ranks"]), "cut_later": maybe(r, 0.2), "tensors": _tensors(r)}
    if kind == "processes":
        case["ranks"] = r.choice([2, 2, 3, 4])
    elif kind in ("order", "disagree"):
        case["ranks"] = r.choice([2, 2, 3, 4])
    elif kind == "triton":
        case["ranks"] = r.choice([1, 2, 2, 3])
    case |= numbers(r, kind)
    if kind == "layers":
        return case | _layer(r, case)
    calls = [call(r, case)]
    if kind == "order":
        calls[0] |= {"grads": "qkv", "mode": "train", "uses": {"out": "weighted", "lse": False}, "bad": None}
        calls[0] |= {"in_place": False}
        calls += [calls[0] | {"like": 0} for _ in range(r.choice([1, 1, 2]))]
        order = list(range(len(calls)))
        other = r.sample(order, len(order))
        while other == order:
            r.shuffle(other)
        case |= {"order": order, "odd": {"rank": r.randrange(case["ranks"]), "order": other}}
        return case | ({"seq": sequence(r, case["ranks"], 0), "options": {}} if maybe(r, 0.2) else {"calls": calls})
    if kind == "disagree":
        good = calls[0] | {"bad": None, "like": 0}
        return case | {"calls": [calls[0], good], "order": None, "odd": odd(r, case, calls[0])}
    if kind == "nan":
        calls[0] |= {"mode": "train", "bad": None, "twice": False}
        at = [(r.choice("qqqkv"), r.random(), r.random(), r.random()) for _ in range(r.choice([1, 1, 2]))]
        return case | {"calls": calls, "order": None, "nan": at}
    if kind != "triton":
        for _ in range(r.choice([0, 0, 0, 0, 1, 1, 2])):
            calls.append(next_call(r, case, calls))
    order = None if maybe(r, 0.5) else r.sample(range(len(calls)), len(calls))
    return case | {"calls": calls, "order": order}


def _layer(r: Random, case: Case) -> Case:
    """A multi-head layer, its options and what is done with it."""
    over_rings = "RingMultiheadAttention", "RingMultiheadDilatedAttention"
    name = r.choice([*over_rings * 2, "MultiheadDilatedAttention"])
    kv_heads = r.choice([1, 1, 2, 3])
    heads = kv_heads * r.choice([1, 1, 2, 4])
    rope = r.choice(["neox", "interleaved"]) if maybe(r, 0.5) else None
    dim = r.choice([4, 8, 8, 6] if rope else [4, 8, 3, 5])
    options: Case = {
        "num_kv_heads": kv_heads, "head_dim": dim, "bias": maybe(r, 0.5), "qk_norm": maybe(r, 0.3),
        "rope": rope, "causal": maybe(r, 0.6), "schedule": r.choice(SCHEDULES),
    }  # fmt: skip
    if rope and maybe(r, 0.3):
        options["rope_base"] = r.choice([100.0, 500_000.0])
    if maybe(r, 0.15):
        options["scale"] = r.choice([0.0, -0.5, 1.0, 0.05])
    if maybe(r, 0.1):
        options["softcap"] = r.choice([1.0, 10.0])
    seq = sequence(r, case["ranks"])
    if name == "RingMultiheadAttention":
        if maybe(r, 0.25):
            right = [None, 0] if options["causal"] else [None, 0, 3]
            options["window"] = (r.choice([None, 0, 1, 5, 20]), r.choice(right))
        options["sinks"] = maybe(r, 0.2)
    else:
        like = {"seq": seq, "heads": [heads, kv_heads]}
        options |= branches(r, like)
        heads = like["heads"][0]
        options["layer_norm"] = maybe(r, 0.3)
        if rope and options["causal"] and maybe(r, 0.2):
            options["xpos_scale"] = 512.0
    found: Case = {
        "layer": name, "seq": seq, "batch": r.choice([1, 1, 2]), "embed_dim": r.choice([8, 12, 5]), "heads": heads,
        "options": options, "mode": r.choice(MODES), "steps": r.choice([1, 1, 2]),
        "between": r.choice([None, None, "inference"]),
    }  # fmt: skip
    if name == "MultiheadDilatedAttention":
        found |= {"ranks": 1, "engine": "auto", "ring": {}}
        seq["documents"] = None
        seq["layout"] = "auto"
    if case["dtype"] in ("bfloat16", "float16"):  # autocast is for wide weights: torch's own norms refuse half ones
        found["autocast"] = None
    return found


def _tensors(r: Random) -> list[Case]:
    """Tensors to shard, gather and label."""
    integers = ["uint8", "int8", "int16", "int32", "int64", "bool"]
    found = []
    for _ in range(r.choice([1, 2])):
        dims = r.choice([1, 2, 3])
        at = r.randrange(dims)
        shape = [r.choice([1, 2, 3]) for _ in range(dims)]
        floats = ["float64", "float32", "float64", "bfloat16"]
        found.append({
            "shape": shape, "dim": r.choice([at, at - dims]), "dtype": r.choice(integers * 2 + floats),
            "ignore_index": r.choice([None, None, None, -1, 0, 7]), "wrong": r.choice([0, 0, 0, 0, 0, 1, -1]),
        })  # fmt: skip
    return found
