"""Draws calls of `Ring.attention` and `Ring.dilated_attention`, and how their results are used."""

from __future__ import annotations

from itertools import pairwise
from random import Random

from ringattn import masks
from ringattn.schedule.routes import NUMBERED
from tests.fuzz.choices import (
    BATCH_LAST,
    LAYOUTS,
    LONGEST,
    MODES,
    SLOPES,
    STRIDES,
    Case,
    by_mask,
    divisor,
    maybe,
    of_documents,
    schedule,
    sequence,
    slices_text,
    tree_text,
)


def call(r: Random, case: Case) -> Case:
    """Draw a call of `Ring.attention` or `Ring.dilated_attention`, directly or through another API, and its loss."""
    kind = case["kind"]
    dilated = kind == "dilated" or (kind not in ("attention", "triton") and maybe(r, 0.4))
    kv_heads = r.choice([1, 1, 2, 2, 3, 4])
    heads = kv_heads * r.choice([1, 1, 1, 2, 3]) if maybe(r, 0.98) else kv_heads
    dims = [r.choice([8, 8, 4, 16, 1, 2, 3, 5, 7, 20])] * 2
    if maybe(r, 0.2):
        # The eight-bit reference computes its scale from the values of a head, so a head must have at least one.
        dims[1] = r.choice([8, 1, 3, 12, 16, *([] if "kv_wire_dtype" in case["ring"] else [0])])
    call: Case = {
        "op": "dilated" if dilated else "attention",
        "seq": sequence(r, case, longest=LONGEST if kind != "triton" else 32),
        "kv_seq": None,
        "cut_later": False,
        "batch": r.choice([1, 1, 1, 2, 3]) if maybe(r, 0.99) else 0,
        "heads": [heads, kv_heads],
        "dims": dims,
        "options": {"schedule": schedule(r, case["ranks"]), "causal": maybe(r, 0.6)},
        "sinks": r.choice([1.0, 1.0, 20.0]) if maybe(r, 0.15) else None,
        "grads": r.choice(["qkv"] * 6 + ["q", "k", "v", "qk", "kv", "qv", ""]),
        "strides": [_strides(r, dim) for dim in (dims[0], *dims)],
        "size": r.choice([1.0] * 8 + [0.1, 3.0]),
        "uses": {
            "out": r.choice(["weighted"] * 4 + ["sum", "transposed", "none"]), "lse": maybe(r, 0.3)},
        "twice": maybe(r, 0.1),
        "in_place": maybe(r, 0.05),
        "backward_twice": maybe(r, 0.04),
        "mode": r.choice(MODES) if kind != "triton" else "train",
        "via": "ring",
        "like": None,
        "chained": False,
        "bad": None,
    }  # fmt: skip
    options = call["options"]
    if maybe(r, 0.3):
        options["scale"] = r.choice([0.0, 0, -0.3, -1.0, 1.0, 2, 1e-3, 1e-8, 4.0, 30.0])
    if maybe(r, 0.15):
        options["softcap"] = r.choice([0.5, 2.0, 5, 30.0])
    if call["sinks"] and maybe(r, 0.7):
        call["grads"] += "s"
    documents = call["seq"]["documents"]
    if dilated:
        options |= branches(r, call)
        if maybe(r, 0.4):  # zigzag shards have several token ranges, as in training
            call["seq"] |= {"layout": "zigzag"} if documents is None else of_documents(r, case)
    else:
        if maybe(r, 0.35):
            options["window"] = window(r, options["causal"])
        if maybe(r, 0.15):
            call["kv_seq"] = sequence(r, case, 0 if documents is None else len(documents) - 1)
    if documents is not None and call["seq"]["layout"] in LAYOUTS:
        call["cut_later"] = maybe(r, 0.3)
    _maybe_bad(r, call)
    plain = not call["bad"] and not call["kv_seq"] and not call["sinks"]
    if plain and maybe(r, 0.12):
        can_be_alone = dilated and case["ranks"] == 1 and documents is None and case["engine"] == "auto"
        call["via"] = "alone" if can_be_alone and "kv_wire_dtype" not in case["ring"] else "module"
        call["uses"]["lse"] = False
    elif plain and not dilated and not case["autocast"] and set(options) <= {"causal", "scale", "schedule"}:
        if maybe(r, 0.3):
            call["via"], call["uses"]["lse"] = "sdpa", False
            del options["schedule"]
    if plain and not dilated and not case["autocast"] and call["via"] == "ring" and maybe(r, 0.12):
        call["via"], call["uses"]["lse"] = "operator", False
    if call["via"] != "ring" and call["uses"]["out"] == "none":
        call["uses"]["out"] = "weighted"
    if kind in ("attention", "processes", "nan"):
        draw_mask(r, case, call)
    if kind not in ("order", "disagree") and call["via"] != "sdpa" and maybe(r, 0.15):
        options["alibi_slopes"] = [r.choice(SLOPES) for _ in range(call["heads"][0])]
    small = call["via"] in ("ring", "operator") and call["seq"]["length"] <= 100  # modules draw their own seed
    if kind not in ("order", "disagree", "nan") and small and maybe(r, 0.12):
        options |= {"dropout_p": r.choice([0.1, 0.5]), "dropout_seed": r.choice([0, 1, 2**32 + 5, 2**64 - 1])}
    return call


def window(r: Random, causal: bool) -> tuple[int | None, int | None]:
    """Draw a window that is valid with `causal`."""
    side = [None, -1, 0, 0, 1, 2, 3, r.randint(0, 40)]
    return r.choice(side), r.choice([None, -1, 0] if causal else side)


def _strides(r: Random, dim: int) -> str:
    """Draw the memory layout of a tensor."""
    if dim == 1 and maybe(r, 0.35):
        return BATCH_LAST
    return r.choice(STRIDES) if maybe(r, 0.35) else "plain"


def branches(r: Random, call: Case) -> Case:
    """Draw the options that only dilated attention has."""
    length, count = call["seq"]["length"], r.choice([1, 1, 2, 2, 3, 4])
    heads = r.choice([call["heads"][0], 4, 4, 6, 8, 8, 12])
    if heads % call["heads"][1] == 0:
        call["heads"][0] = heads
    if maybe(r, 0.4):  # as in LongNet: both grow by the same ratio
        base, ratio = r.choice([2, 4, 5, 8, 8, 16, 16, 32]), r.choice([2, 2, 2, 3, 4])
        lengths, rates = [base * ratio**i for i in range(count)], [ratio**i for i in range(count)]
    else:
        several = [1, 2, 4, 8, 16, 16, 32, 64, 128, r.randint(1, 50), max(1, length), max(1, length), length // 2 + 1]
        lengths = [r.choice(several) for _ in range(count)]
        rates = [r.choice([1, 1, 2, 2, 2, 2, 3, 3, 4, 4, 6, 8, r.randint(1, 12)]) for _ in range(count)]
    if length > 48:  # many small segments mean many small blocks, which are slow
        lengths = [max(w, length // 12) for w in lengths]
    options: Case = {"segment_lengths": lengths, "dilation_rates": rates}
    if maybe(r, 0.4):
        options["offset"] = r.choice(["mod", "block", "kv_head", "layer_rotated"])
        if options["offset"] == "layer_rotated":
            options["layer"] = r.randint(0, 5)
    if maybe(r, 0.15):
        options["tail"] = "zero_pad"
    if maybe(r, 0.12):
        options["grad"] = "detached"
    return options


def _maybe_bad(r: Random, call: Case) -> None:
    """In a few calls, set an option that every rank must refuse."""
    if not maybe(r, 0.02):
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


def draw_mask(r: Random, case: Case, call: Case) -> None:
    """Draw a mask for some calls: chunks, prefixes, global tokens, blocks, slices, a tree, or a mask per head.

    Some calls with a mask get a sequence that is placed for it.
    """
    options = call["options"]
    if call["op"] != "attention" or call["via"] == "sdpa":
        return
    sizes = [1, 2, 3, 4, 8, 16, r.randint(1, 60)]
    length = call["seq"]["length"]
    kv_length = length if call["kv_seq"] is None else call["kv_seq"]["length"]
    whole = call["seq"]["documents"] is None and not options.get("alibi_slopes")
    looks_ahead = options.get("window") and options["window"][1] not in (None, -1, 0)
    if whole and "window" not in options and maybe(r, 0.15 if options["causal"] else 0.3):
        options["mask"] = slices_text(r, length, kv_length, options["causal"] and maybe(r, 0.9))
    elif whole and call["kv_seq"] is None and not looks_ahead and maybe(r, 0.15):
        options["mask"] = tree_text(r, length)
    elif whole and call["kv_seq"] is None and not looks_ahead and maybe(r, 0.1):
        first = r.randint(0, call["heads"][0])
        last = r.choice(["", f"chunked:{r.choice(sizes)}"])
        groups = [(first, tree_text(r, length)), (call["heads"][0] - first, last)]
        options["mask"] = "by_head:" + ";".join(f"{heads}={mask}" for heads, mask in groups if heads)
    elif maybe(r, 0.2):
        options["mask"] = f"chunked:{r.choice(sizes)}"
    elif options["causal"] and maybe(r, 0.4):
        documents = call["seq"]["documents"]
        several = documents is not None and maybe(r, 0.5)
        tokens = tuple(r.choice([0, *sizes]) for _ in documents[1:]) if several else r.choice([0, *sizes])
        options["mask"] = masks.prefix(tokens).text
    elif "window" in options and maybe(r, 0.4):
        options["mask"] = f"global_tokens:{r.choice(sizes)}"
    elif options["causal"] and call["kv_seq"] is None and maybe(r, 0.3):
        edges = []
        for start, stop in pairwise(call["seq"]["documents"] or (0, call["seq"]["length"])):
            edges += sorted(r.randint(start, stop) for _ in range(r.choice([0, 2, 4, 6])))
        options["mask"] = masks.BidirectionalBlocks(tuple(edges or (0, 0))).text
    if "mask" in options and not call["cut_later"] and maybe(r, 0.35):
        call["seq"] |= by_mask(r, case, call["seq"], options["mask"])


def draw_frozen(r: Random, case: Case) -> None:
    """Draw for each rank which inputs of a call need gradients, as if some ranks had frozen a part of the model.

    A reentrant checkpoint runs no backward on a rank where none of its inputs needs a gradient. NCCL does not compare
    equal calls again, of which one may need gradients on all ranks and another on some. In both cases, at least one
    input needs a gradient on each rank.
    """
    calls = case["calls"]
    repeats = case.get("transport") == "nccl" and any(call["like"] is not None for call in calls)
    min_grads = int(repeats or any(call["mode"] == "reentrant" for call in calls))
    if case["ranks"] == 1 or not maybe(r, 0.35):
        return
    for call in calls:
        if call["like"] is not None:
            call["grads_of"], call["grads"] = calls[call["like"]]["grads_of"], calls[call["like"]]["grads"]
            continue
        names = "qkvs" if call["sinks"] else "qkv"
        several = [names[index] for index in range(len(names)) if maybe(r, 0.7)] or ["k"]
        call["grads_of"] = [
            "".join(r.sample(several, r.randint(min(min_grads, len(several)), len(several))))
            for _ in range(case["ranks"])
        ]
        call["grads"] = "".join(name for name in names if any(name in grads for grads in call["grads_of"]))


def next_call(r: Random, case: Case, calls: list[Case]) -> Case:
    """Draw another call on the same ring.

    It is independent, or equal to the last call: on new inputs, on the same inputs, or with the last output as its q.
    """
    choice, base = r.random(), len(calls) - 1
    last = calls[base]
    if choice < 0.3 or last["bad"]:
        return call(r, case)
    new = dict(last, like=base, mode=r.choice(MODES))
    if choice < 0.5:
        return new
    if choice < 0.75:
        return new | {"share": True}
    rounds = case["dtype"] in ("bfloat16", "float16") or len(case["ring"]) > 1
    trains = last["mode"] == "train" and not last["in_place"] and "s" not in last["grads"]
    if rounds or not trains or last["dims"][0] != last["dims"][1]:
        return new
    return new | {"chained": True, "mode": "train", "strides": ["plain", *last["strides"][1:]]}


def odd(r: Random, case: Case, call: Case) -> Case:
    """Draw a rank and a change of the call on that rank only, which all ranks must refuse."""
    options, rank, ranks = call["options"], r.randrange(case["ranks"]), case["ranks"]
    if call["via"] != "sdpa" and not call["bad"] and maybe(r, 0.35):  # change only the number of the schedule
        name, usual = r.choice(NUMBERED), divisor(r, ranks)
        others = [size for size in range(1, ranks + 1) if ranks % size == 0 and size != usual]
        for call_ in case["calls"]:
            call_["options"]["schedule"] = f"{name}:{usual}"
        return {"rank": rank, "change": {"schedule": f"{name}:{r.choice(others)}"}}
    scale = options.get("scale")
    scale = call["dims"][0] ** -0.5 if scale is None else scale
    changes: list[Case] = [
        {"scale": scale + 0.25},
        {"scale": scale * (1 + 1e-9) + 1e-13},
        {"softcap" if call["via"] != "sdpa" else "scale": options.get("softcap", scale) + 3.0},
        {"causal": "a tensor" if call["via"] != "module" else not options["causal"]},  # a constructor refuses a tensor
        {"seq": call["seq"] | {"length": call["seq"]["length"] + ranks, "documents": None, "layout": "auto"}},
        {"dtype": "float32" if case["dtype"] == "float64" else "float64"},
        {"tokens": 1},
    ]
    if call["op"] == "attention" and not options.get("window"):
        changes += [{"causal": not options["causal"]}] * 2
    return {"rank": rank, "change": r.choice(changes)}


def draw_activation(r: Random, case: Case) -> None:
    """Draw whether SDPA's sequence is activated around or inside the checkpointed region.

    For some cases also draw a call whose sequence is active during the backward passes.
    """
    for call in case["calls"]:
        if call["via"] == "sdpa":
            call["active"] = r.choice(["around", "inside"])
            if maybe(r, 0.5):
                call["mode"] = r.choice(["checkpoint", "reentrant"])
    if maybe(r, 0.3):
        case["active_in_backward"] = r.randrange(len(case["calls"]))
