"""Draws a case from a seed: a dictionary of plain values that prints readably and contains everything that a run needs.

Guarantees: a seed always gives the same case, whichever kinds are selected. Cases are drawn from all options of the
public API, including combinations that are refused.
"""

from __future__ import annotations

from random import Random

from tests.fuzz.choices import MODES, RANKS, Case, draw_nodes, maybe, numbers, schedule, sequence
from tests.fuzz.draw_calls import branches, call, draw_activation, draw_frozen, next_call, odd
from tests.fuzz.draw_functions import draw_functions
from tests.fuzz.draw_idle import draw_idle
from tests.fuzz.draw_states import draw_states

KINDS = {
    "attention": 30,
    "dilated": 30,
    "layers": 15,
    "sequences": 8,
    "idle": 5,
    "order": 5,
    "disagree": 4,
    "nan": 3,
    "processes": 3,
    "triton": 2,
    "states": 5,
}
"""Weight of each kind."""
LATER = {"functions": 0.06}
"""Kinds that take a part of the seeds of all others. The other seeds keep their cases."""
USUAL = tuple(kind for kind in (*KINDS, *LATER) if kind != "triton")
"""Kinds of a run that names none; the others need Triton's interpreter."""
FEW_RANKS = {
    "processes": [2, 2, 3, 4], "order": [2, 2, 3, 4], "disagree": [2, 2, 3, 4], "triton": [1, 2, 2, 3],
}  # fmt: skip


def kind_of(seed: int) -> str:
    """Return the kind of this seed's case."""
    r = Random(f"kind {seed}")
    kind = r.choices(list(KINDS), list(KINDS.values()))[0]
    return next((later for later, part in LATER.items() if maybe(r, part)), kind)


def draw(seed: int) -> Case:
    """Return the case of this seed."""
    r, kind = Random(f"case {seed}"), kind_of(seed)
    case: Case = {"seed": seed, "kind": kind, "ranks": r.choice(FEW_RANKS.get(kind, RANKS))}
    if kind == "sequences":
        return case | {"seq": sequence(r, case), "cut_later": maybe(r, 0.2), "tensors": _tensors(r)}
    if kind == "idle":
        return draw_idle(r, case)
    if kind == "states":
        return draw_states(r, case)
    if kind == "functions":
        return draw_functions(r, case)
    case |= numbers(r, kind)
    if kind in ("attention", "dilated", "processes", "nan") and maybe(r, 0.25):
        case["nodes"] = draw_nodes(r)
    if kind == "processes":
        case["transport"] = r.choice(["gloo", "shm"])
    elif kind in ("attention", "dilated", "disagree") and case["ranks"] <= 4:
        case["transport"] = r.choice(["local"] * 4 + ["nccl"])
    if kind == "layers":
        return case | _layer(r, case)
    calls = [call(r, case)]
    if kind == "order":
        calls[0] |= {"grads": "qkv", "mode": "train", "uses": {"out": "weighted", "lse": False}, "bad": None}
        calls[0] |= {"in_place": False}
        calls += [calls[0] | {"like": 0} for _ in range(r.choice([1, 1, 2]))]
        order = list(range(len(calls)))
        odd_order = r.sample(order, len(order))
        while odd_order == order:
            r.shuffle(odd_order)
        case |= {"order": order, "odd": {"rank": r.randrange(case["ranks"]), "order": odd_order}}
        return case | ({"seq": sequence(r, case, 0), "options": {}} if maybe(r, 0.2) else {"calls": calls})
    if kind == "disagree":
        case["calls"] = [calls[0], calls[0] | {"bad": None, "like": 0}]
        return case | {"order": None, "odd": odd(r, case, calls[0])}
    if kind == "nan":
        calls[0] |= {"mode": "train", "bad": None, "twice": False}
        nan_positions = [(r.choice("qqqkv"), r.random(), r.random(), r.random()) for _ in range(r.choice([1, 1, 2]))]
        return case | {"calls": calls, "order": None, "nan": nan_positions}
    if kind != "triton":
        for _ in range(r.choice([0, 0, 0, 0, 1, 1, 2])):
            calls.append(next_call(r, case, calls))
    case |= {"calls": calls, "order": None if maybe(r, 0.5) else r.sample(range(len(calls)), len(calls))}
    if kind != "triton":
        draw_activation(r, case)
        draw_frozen(r, case)
    return case


def _layer(r: Random, case: Case) -> Case:
    """Draw a multi-head layer, its options, and how a run uses it: mode, steps and autocast."""
    over_rings = "RingMultiheadAttention", "RingMultiheadDilatedAttention"
    name = r.choice([*over_rings * 2, "MultiheadDilatedAttention"])
    kv_heads = r.choice([1, 1, 2, 3])
    heads = kv_heads * r.choice([1, 1, 2, 4])
    rope = r.choice(["neox", "interleaved"]) if maybe(r, 0.5) else None
    dim = r.choice([4, 8, 8, 6] if rope else [4, 8, 3, 5])
    options: Case = {
        "num_kv_heads": kv_heads, "head_dim": dim, "bias": maybe(r, 0.5), "qk_norm": maybe(r, 0.3),
        "rope": rope, "causal": maybe(r, 0.6), "schedule": schedule(r, case["ranks"]),
    }  # fmt: skip
    if rope and maybe(r, 0.3):
        options["rope_base"] = r.choice([100.0, 500_000.0])
    if maybe(r, 0.15):
        options["scale"] = r.choice([0.0, -0.5, 1.0, 0.05])
    if maybe(r, 0.1):
        options["softcap"] = r.choice([1.0, 10.0])
    seq = sequence(r, case)
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
    layer: Case = {
        "layer": name, "seq": seq, "batch": r.choice([1, 1, 2]), "embed_dim": r.choice([8, 12, 5]), "heads": heads,
        "options": options, "mode": r.choice(MODES), "steps": r.choice([1, 1, 2]),
        "between": r.choice([None, None, "inference"]),
    }  # fmt: skip
    if name == "MultiheadDilatedAttention":
        layer |= {"ranks": 1, "engine": "auto", "ring": {}, "seq": seq | {"documents": None, "layout": "auto"}}
        options["schedule"] = "auto" if ":" in options["schedule"] else options["schedule"]
    if case["dtype"] in ("bfloat16", "float16"):  # autocast is for wide weights: torch's norms refuse half precision
        layer["autocast"] = None
    return layer


def _tensors(r: Random) -> list[Case]:
    """Draw tensors for `shard`, `gather` and `shard_labels`."""
    integers = ["uint8", "int8", "int16", "int32", "int64", "bool"]
    tensors = []
    for _ in range(r.choice([1, 2])):
        dims = r.choice([1, 2, 3])
        dim = r.randrange(dims)
        tensors.append({
            "shape": [r.choice([1, 2, 3]) for _ in range(dims)], "dim": r.choice([dim, dim - dims]),
            "dtype": r.choice(integers * 2 + ["float64", "float32", "float64", "bfloat16"]),
            "ignore_index": r.choice([None, None, None, -1, 0, 7]), "wrong": r.choice([0, 0, 0, 0, 0, 1, -1]),
        })  # fmt: skip
    return tensors
