"""A case from a seed: a dictionary of plain values, which prints readably and is all that a run needs.

Guarantees: a seed gives one case, whatever kinds are asked for; a case is drawn from the options that the public face
has, refused combinations included.
"""

from __future__ import annotations

from random import Random
from typing import Any

Case = dict[str, Any]

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
USUAL = tuple(kind for kind in KINDS if kind != "triton")
"""Kinds of a run that names none: all but the one that needs Triton's interpreter."""

RANKS = [1] * 32 + [2] * 36 + [3] * 16 + [4] * 10 + [5, 5, 6, 7, 8, 8]
LONGEST = 400
"""Tokens of a sequence; few are so long."""
LAYOUTS = ("auto", "contiguous", "zigzag", "striped", "per_document")
SCHEDULES = ["auto"] * 6 + ["ring", "all_gather", "direct", "sub_rings", "all_to_all"]
ENGINES = ["auto"] * 7 + ["aten"] * 2 + ["plain"] * 2
STRIDES = ("plain", "transposed", "leaf", "sliced", "every_second", "heads_apart", "one_batch", "one_head")
MODES = ["train"] * 10 + ["inference", "no_grad", "checkpoint", "reentrant"]


def kind_of(seed: int) -> str:
    """The kind of this seed's case."""
    return Random(f"kind {seed}").choices(list(KINDS), list(KINDS.values()))[0]


def draw(seed: int) -> Case:
    """The case of this seed."""
    r, kind = Random(f"case {seed}"), kind_of(seed)
    case: Case = {"seed": seed, "kind": kind, "ranks": r.choice(RANKS)}
    if kind == "sequences":
        return case | {"seq": _sequence(r, case["ranks"]), "cut_later": _maybe(r, 0.2), "tensors": _tensors(r)}
    if kind == "processes":
        case["ranks"] = r.choice([2, 2, 3, 4])
    elif kind in ("order", "disagree"):
        case["ranks"] = r.choice([2, 2, 3, 4])
    elif kind == "triton":
        case["ranks"] = r.choice([1, 2, 2, 3])
    case |= _numbers(r, kind)
    if kind == "layers":
        return case | _layer(r, case)
    calls = [_call(r, case)]
    if kind == "order":
        calls[0] |= {"grads": "qkv", "mode": "train", "uses": {"out": "weighted", "lse": False}, "bad": None}
        calls[0] |= {"in_place": False}
        calls += [calls[0] | {"like": 0} for _ in range(r.choice([1, 1, 2]))]
        order = list(range(len(calls)))
        other = r.sample(order, len(order))
        while other == order:
            r.shuffle(other)
        return case | {"calls": calls, "order": order, "odd": {"rank": r.randrange(case["ranks"]), "order": other}}
    if kind == "disagree":
        good = calls[0] | {"bad": None, "like": 0}
        return case | {"calls": [calls[0], good], "order": None, "odd": _odd(r, case, calls[0])}
    if kind == "nan":
        calls[0] |= {"mode": "train", "bad": None, "twice": False}
        at = [(r.choice("qqqkv"), r.random(), r.random(), r.random()) for _ in range(r.choice([1, 1, 2]))]
        return case | {"calls": calls, "order": None, "nan": at}
    if kind != "triton":
        for _ in range(r.choice([0, 0, 0, 0, 1, 1, 2])):
            calls.append(_next_call(r, case, calls))
    order = None if _maybe(r, 0.5) else r.sample(range(len(calls)), len(calls))
    return case | {"calls": calls, "order": order}


# --- numbers, sequences ----------------------------------------------------------------------------------------------


def _maybe(r: Random, chance: float) -> bool:
    return r.random() < chance


def _numbers(r: Random, kind: str) -> Case:
    """The dtype, the engine and the ring's options."""
    dtype = r.choice(["float64"] * 7 + ["float32"] * 3 + ["bfloat16", "float16"])
    engine, ring = r.choice(ENGINES), {"poison": _maybe(r, 0.8)}
    if kind == "triton":
        engine, dtype = "triton", r.choice(["float32", "float32", "float16"])  # the interpreter has no bfloat16
    if _maybe(r, 0.1) and kind not in ("nan", "triton", "layers"):
        name, value = r.choice([
            ("dkv_wire_dtype", "bfloat16"), ("dkv_wire_dtype", "float32"), ("out_wire_dtype", "bfloat16"),
            ("out_wire_dtype", "float32"), ("kv_wire_dtype", "int8"), ("kv_wire_dtype", "float8_e4m3fn"),
        ])  # fmt: skip
        ring[name] = value
    autocast = r.choice(["bfloat16", "float16"]) if _maybe(r, 0.12) else None
    return {"dtype": dtype, "engine": engine, "ring": ring, "autocast": autocast}


def _length(r: Random, ranks: int, longest: int) -> int:
    """Tiny, beside a multiple of the ranks, medium, and a few long ones."""
    how = r.random() if longest == LONGEST else r.random() * 0.6
    if how < 0.35:
        return r.randint(0, 9)
    if how < 0.6:
        return max(0, ranks * r.randint(1, 10) + r.choice([-1, 0, 1]))
    if how < 0.94:
        return r.randint(10, 48)
    if how < 0.985:
        return r.randint(49, 130)
    return r.randint(131, LONGEST)


def _documents(r: Random, length: int, count: int | None = None) -> list[int]:
    """Bounds from 0 to the length; empty documents and ones of a single token are likely."""
    count = r.choice([1, 2, 2, 3, 4, 6]) if count is None else count
    cuts = [r.randint(0, length) for _ in range(count - 1)]
    for index in range(len(cuts)):
        if _maybe(r, 0.35):
            cuts[index] = min(length, r.choice([0, *cuts]) + r.choice([0, 1]))
    return [0, *sorted(cuts), length]


def _sequence(r: Random, ranks: int, documents: int | None = None, longest: int = LONGEST) -> Case:
    """The arguments of `Ring.sequence`. `documents`: how many; 0 for none."""
    length = _length(r, ranks, longest)
    cut = _maybe(r, 0.35) if documents is None else documents > 0
    cuts = _documents(r, length, documents) if cut else None
    names = LAYOUTS if cut or _maybe(r, 0.01) else LAYOUTS[:-1]
    layout = "auto" if _maybe(r, 0.35) else r.choice(names)
    return {"length": length, "documents": cuts, "layout": layout, "for_": r.choice(
        ["causal"] * 5 + ["full", "window", "dilated"])}  # fmt: skip


# --- calls -----------------------------------------------------------------------------------------------------------


def _call(r: Random, case: Case) -> Case:
    """One call of `Ring.attention` or `Ring.dilated_attention`, by itself or as a layer, and what is done with it."""
    kind = case["kind"]
    dilated = kind == "dilated" or (kind not in ("attention", "triton") and _maybe(r, 0.4))
    kv_heads = r.choice([1, 1, 2, 2, 3, 4])
    heads = kv_heads * r.choice([1, 1, 1, 2, 3]) if _maybe(r, 0.98) else kv_heads
    dims = [r.choice([8, 8, 4, 16, 1, 2, 3, 5, 7, 20])] * 2
    if _maybe(r, 0.2):
        dims[1] = r.choice([8, 1, 3, 12, 16])
    call: Case = {
        "op": "dilated" if dilated else "attention",
        "seq": _sequence(r, case["ranks"], longest=LONGEST if kind != "triton" else 32),
        "kv_seq": None,
        "cut_later": False,
        "batch": r.choice([1, 1, 1, 2, 3]) if _maybe(r, 0.99) else 0,
        "heads": [heads, kv_heads],
        "dims": dims,
        "options": {"schedule": r.choice(SCHEDULES), "causal": _maybe(r, 0.6)},
        "sinks": r.choice([1.0, 1.0, 20.0]) if _maybe(r, 0.15) else None,
        "grads": r.choice(["qkv"] * 6 + ["q", "k", "v", "qk", "kv", "qv", ""]),
        "strides": [r.choice(STRIDES) if _maybe(r, 0.35) else "plain" for _ in range(3)],
        "size": r.choice([1.0] * 8 + [0.1, 3.0]),
        "uses": {
            "out": r.choice(["weighted"] * 4 + ["sum", "transposed", "none"]), "lse": _maybe(r, 0.3)},
        "twice": _maybe(r, 0.1),
        "in_place": _maybe(r, 0.05),
        "backward_twice": _maybe(r, 0.04),
        "mode": r.choice(MODES) if kind != "triton" else "train",
        "via": "ring",
        "like": None,
        "chained": False,
        "bad": None,
    }  # fmt: skip
    options = call["options"]
    if _maybe(r, 0.3):
        options["scale"] = r.choice([0.0, 0, -0.3, -1.0, 1.0, 2, 1e-3, 1e-8, 4.0, 30.0])
    if _maybe(r, 0.15):
        options["softcap"] = r.choice([0.5, 2.0, 5, 30.0])
    if call["sinks"] and _maybe(r, 0.7):
        call["grads"] += "s"
    documents = call["seq"]["documents"]
    if dilated:
        options |= _branches(r, call)
        if _maybe(r, 0.4):  # shards of several runs, as in training
            call["seq"]["layout"] = "zigzag" if documents is None else "per_document"
    else:
        if _maybe(r, 0.35):
            side = [None, -1, 0, 0, 1, 2, 3, r.randint(0, 40)]
            options["window"] = (r.choice(side), r.choice([None, -1, 0] if options["causal"] else side))
        if _maybe(r, 0.15):
            call["kv_seq"] = _sequence(r, case["ranks"], 0 if documents is None else len(documents) - 1)
            if "window" in options and _maybe(r, 0.8):
                del options["window"]
    if documents is not None and call["seq"]["layout"] not in ("per_document", "auto"):
        call["cut_later"] = _maybe(r, 0.3)
    _maybe_bad(r, call)
    plain = not call["bad"] and not call["kv_seq"] and not call["sinks"]
    if plain and _maybe(r, 0.12):
        own = dilated and case["ranks"] == 1 and documents is None and case["engine"] == "auto"
        call["via"] = "alone" if own and "kv_wire_dtype" not in case["ring"] else "module"
        call["uses"]["lse"] = False
    elif plain and not dilated and not case["autocast"] and set(options) <= {"causal", "scale", "schedule"}:
        if _maybe(r, 0.3):
            call["via"], call["uses"]["lse"] = "sdpa", False
            del options["schedule"]
    if call["via"] != "ring" and call["uses"]["out"] == "none":
        call["uses"]["out"] = "weighted"
    return call


def _branches(r: Random, call: Case) -> Case:
    """The options of dilated attention alone."""
    length, count = call["seq"]["length"], r.choice([1, 1, 2, 2, 3, 4])
    heads = r.choice([call["heads"][0], 4, 4, 6, 8, 8, 12])
    if heads % call["heads"][1] == 0:
        call["heads"][0] = heads
    if _maybe(r, 0.4):  # as LongNet's: both grow by one ratio
        base, ratio = r.choice([2, 4, 5, 8, 8, 16, 16, 32]), r.choice([2, 2, 2, 3, 4])
        lengths, rates = [base * ratio**i for i in range(count)], [ratio**i for i in range(count)]
    else:
        several = [1, 2, 4, 8, 16, 16, 32, 64, 128, r.randint(1, 50), max(1, length), max(1, length), length // 2 + 1]
        lengths = [r.choice(several) for _ in range(count)]
        rates = [r.choice([1, 1, 2, 2, 2, 2, 3, 3, 4, 4, 6, 8, r.randint(1, 12)]) for _ in range(count)]
    if length > 48:  # many small segments are many small blocks, and slow
        lengths = [max(w, length // 12) for w in lengths]
    found: Case = {"segment_lengths": lengths, "dilation_rates": rates}
    if _maybe(r, 0.4):
        found["offset"] = r.choice(["mod", "block", "kv_head", "layer_rotated"])
        if found["offset"] == "layer_rotated":
            found["layer"] = r.randint(0, 5)
    if _maybe(r, 0.15):
        found["tail"] = "zero_pad"
    if _maybe(r, 0.12):
        found["grad"] = "detached"
    return found


def _maybe_bad(r: Random, call: Case) -> None:
    """Rarely an option that every rank must refuse."""
    if not _maybe(r, 0.02):
        return
    bad: list[Case] = [
        {"scale": float("nan")}, {"scale": float("inf")}, {"softcap": 0.0}, {"softcap": -1.0},
        {"softcap": float("inf")}, {"softcap": float("nan")}, {"schedule": "star"}, {"causal": "no"},
    ]  # fmt: skip
    if call["op"] == "attention":
        bad += [{"window": (-2, 0)}, {"window": (1.5, 0)}, {"window": 3}, {"causal": True, "window": (4, 1)}]
    else:
        bad += [{"dilation_rates": [0]}, {"segment_lengths": []}, {"offset": "none"}, {"grad": "half"}, {"layer": -1}]
    call["bad"] = r.choice(bad)


def _next_call(r: Random, case: Case, calls: list[Case]) -> Case:
    """Another call on the same ring: new, alike, alike on the same inputs, or one that takes another's output."""
    how, base = r.random(), len(calls) - 1
    last = calls[base]
    if how < 0.3 or last["bad"]:
        return _call(r, case)
    new = dict(last, like=base, mode=r.choice(MODES))
    if how < 0.5:
        return new
    if how < 0.75:
        return new | {"share": True}
    rounds = case["dtype"] in ("bfloat16", "float16") or len(case["ring"]) > 1
    trains = last["mode"] == "train" and not last["in_place"] and "s" not in last["grads"]
    if rounds or not trains or last["dims"][0] != last["dims"][1]:
        return new
    return new | {"chained": True, "mode": "train", "strides": ["plain", *last["strides"][1:]]}


def _odd(r: Random, case: Case, call: Case) -> Case:
    """What one rank does otherwise than the others, which all ranks must refuse."""
    options, rank = call["options"], r.randrange(case["ranks"])
    scale = options.get("scale")
    scale = call["dims"][0] ** -0.5 if scale is None else scale
    changes: list[Case] = [
        {"scale": scale + 0.25},
        {"scale": scale * (1 + 1e-9) + 1e-13},
        {"softcap" if call["via"] != "sdpa" else "scale": options.get("softcap", scale) + 3.0},
        {"causal": "a tensor"},
        {"seq": call["seq"] | {"length": call["seq"]["length"] + case["ranks"], "documents": None, "layout": "auto"}},
        {"dtype": "float32" if case["dtype"] == "float64" else "float64"},
        {"tokens": 1},
    ]
    if call["op"] == "attention" and not options.get("window"):
        changes += [{"causal": not options["causal"]}] * 2
    return {"rank": rank, "change": r.choice(changes)}


# --- layers, sequences -----------------------------------------------------------------------------------------------


def _layer(r: Random, case: Case) -> Case:
    """A multi-head layer, its options and what is done with it."""
    over_rings = "RingMultiheadAttention", "RingMultiheadDilatedAttention"
    name = r.choice([*over_rings * 2, "MultiheadDilatedAttention"])
    kv_heads = r.choice([1, 1, 2, 3])
    heads = kv_heads * r.choice([1, 1, 2, 4])
    rope = r.choice(["neox", "interleaved"]) if _maybe(r, 0.5) else None
    dim = r.choice([4, 8, 8, 6] if rope else [4, 8, 3, 5])
    options: Case = {
        "num_kv_heads": kv_heads, "head_dim": dim, "bias": _maybe(r, 0.5), "qk_norm": _maybe(r, 0.3),
        "rope": rope, "causal": _maybe(r, 0.6), "schedule": r.choice(SCHEDULES),
    }  # fmt: skip
    if rope and _maybe(r, 0.3):
        options["rope_base"] = r.choice([100.0, 500_000.0])
    if _maybe(r, 0.15):
        options["scale"] = r.choice([0.0, -0.5, 1.0, 0.05])
    if _maybe(r, 0.1):
        options["softcap"] = r.choice([1.0, 10.0])
    seq = _sequence(r, case["ranks"])
    if name == "RingMultiheadAttention":
        if _maybe(r, 0.25):
            right = [None, 0] if options["causal"] else [None, 0, 3]
            options["window"] = (r.choice([None, 0, 1, 5, 20]), r.choice(right))
        options["sinks"] = _maybe(r, 0.2)
    else:
        like = {"seq": seq, "heads": [heads, kv_heads]}
        options |= _branches(r, like)
        heads = like["heads"][0]
        options["layer_norm"] = _maybe(r, 0.3)
        if rope and options["causal"] and _maybe(r, 0.2):
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
