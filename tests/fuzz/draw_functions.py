"""Draws latent attention, layers with a state and masks by head, over drawn sequences and micro-batches."""

from __future__ import annotations

from itertools import pairwise
from random import Random

from tests.fuzz.choices import ENGINES, Case, maybe, schedule, sequence, slices_text, tree_text
from tests.fuzz.draw_calls import window

FUNCTIONS = ("latent_attention",) * 2 + ("gated_delta_rule", "selective_state", "short_convolution", "by_head")
ATTENTION = ("latent_attention", "by_head")
SEND_KEYS = ("auto", "auto", "ring", "all_gather", "direct", "double_ring", "node_gather")


def draw_functions(r: Random, case: Case) -> Case:
    """Draw a function, the sizes of its tensors by name, its options, and which tensors need gradients."""
    name, ranks = r.choice(FUNCTIONS), r.choice([1, 2, 2, 3, 4])
    case |= {"ranks": ranks, "transport": "local", "engine": r.choice(ENGINES), "autocast": None, "dtype": "float64"}
    case |= {"ring": {"poison": maybe(r, 0.8)}, "function": name}
    seq = sequence(r, case, longest=60)
    documents = seq["documents"]
    case["batched"] = bool(documents) and all(start < stop for start, stop in pairwise(documents)) and maybe(r, 0.5)
    if case["batched"]:
        seq |= {"layout": "documents", "schedule": "auto"}
    elif name not in ATTENTION and maybe(r, 0.8):  # few in the layout striped, which is refused
        of_documents = ["per_document", "documents"] if documents else []
        seq |= {"layout": r.choice(["contiguous", "zigzag", *of_documents]), "schedule": "auto"}
    case |= {"seq": seq, "batch": r.choice([1, 1, 1, 2, 2, 3, 0])} | _DRAWN[name](r, case | {"seq": seq})
    names = [*case["shapes"], *case["weights"]]
    needs = [name for name in names if maybe(r, 0.8)] or names[:1]
    mode = r.choice(["train"] * 6 + ["no_grad", "checkpoint", "reentrant"])
    return case | {"needs": needs, "mode": mode}


def _attention_options(r: Random) -> Case:
    options: Case = {"causal": maybe(r, 0.7)}
    if maybe(r, 0.3):
        options["window"] = window(r, options["causal"])
    if maybe(r, 0.2):
        options["scale"] = r.choice([0.0, -0.5, 1.0, 0.05])
    return options


def _latent_attention(r: Random, case: Case) -> Case:
    heads, nope, rope = r.choice([1, 2, 3]), r.choice([1, 4, 6]), r.choice([0, 2, 4])
    latent, value = r.choice([1, 1, 2, 5, 8]), r.choice([1, 3, 8, nope + rope, nope + rope])
    options = _attention_options(r) | {"wire": r.choice(["auto", "latents", "latents", "keys"])}
    options["schedule"] = r.choice(SEND_KEYS) if options["wire"] == "latents" else schedule(r, case["ranks"])
    if case["engine"] != "aten" and maybe(r, 0.2):
        options["softcap"] = r.choice([1.0, 10.0])
    if maybe(r, 0.2):
        options["mask"] = f"prefix:{r.choice([0, 3])}" if options["causal"] and maybe(r, 0.5) else "chunked:5"
    weights = {"w_k": [heads, nope, latent], "w_v": [heads, value, latent]}
    if maybe(r, 0.2):
        weights["sinks"] = [heads]
    return {
        "shapes": {"q": [heads, nope + rope], "rotary": [rope], "latents": [latent]}, "weights": weights,
        "options": options,
    }  # fmt: skip


def _by_head(r: Random, case: Case) -> Case:
    kv_heads, dim, options = r.choice([1, 2]), r.choice([1, 4, 5]), _attention_options(r)
    heads, seq = kv_heads * r.choice([1, 2, 3]), case["seq"]
    masks = ["", "", f"chunked:{r.choice([1, 3, 8])}"]
    if options["causal"]:
        masks += [f"prefix:{r.choice([0, 3])}", f"prefix:{r.choice([1, 9])}"]
    if "window" in options:
        masks.append(f"global_tokens:{r.choice([1, 3])}")
    if seq["documents"] is None and "window" not in options:
        masks += [tree_text(r, seq["length"]), slices_text(r, seq["length"], seq["length"], options["causal"])]
    groups, left = [], heads
    while left:
        size = r.randint(1, left)
        groups.append(f"{size}={r.choice(masks)}")
        left -= size
    options |= {"mask": "by_head:" + ";".join(groups), "schedule": schedule(r, case["ranks"])}
    weights = {"sinks": [heads]} if maybe(r, 0.2) else {}
    return {
        "shapes": {"q": [heads, dim], "k": [kv_heads, dim], "v": [kv_heads, r.choice([dim, dim, 3])]},
        "weights": weights, "options": options, "mask_of": r.choice(["call", "sequence"]),
    }  # fmt: skip


def _gated_delta_rule(r: Random, case: Case) -> Case:
    heads, d_k, d_v = r.choice([1, 2]), r.choice([1, 3, 4]), r.choice([1, 2, 5])
    v_heads = heads * r.choice([1, 2])
    gate = [v_heads, d_k] if maybe(r, 0.4) else [v_heads]
    shapes = {"q": [heads, d_k], "k": [heads, d_k], "v": [v_heads, d_v], "g": gate, "beta": [v_heads]}
    return {"shapes": shapes, "weights": {}, "options": {"scale": r.choice([None, 0.7, 0.0])}}


def _selective_state(r: Random, case: Case) -> Case:
    groups, dim, state = r.choice([1, 2]), r.choice([1, 3]), r.choice([1, 4])
    heads = groups * r.choice([1, 2])
    shapes = {"x": [heads, dim], "dt": [heads], "B": [groups, state], "C": [groups, state]}
    weights = {"A": [heads]}
    if maybe(r, 0.6):
        weights["D"] = r.choice([[heads], [heads, dim]])
    if maybe(r, 0.6):
        weights["dt_bias"] = [heads]
    return {
        "shapes": shapes, "weights": weights,
        "options": {"dt_softplus": maybe(r, 0.7), "dt_limit": r.choice([[0.0, float("inf")], [0.1, 1.0]])},
    }  # fmt: skip


def _short_convolution(r: Random, case: Case) -> Case:
    channels, taps = r.choice([1, 3]), r.choice([1, 2, 4, 9])
    weights = {"weight": [channels, 1, taps]} | ({"bias": [channels]} if maybe(r, 0.5) else {})
    return {"shapes": {"x": [channels]}, "weights": weights, "options": {"activation": r.choice([None, "silu"])}}


_DRAWN = {
    "latent_attention": _latent_attention, "by_head": _by_head, "gated_delta_rule": _gated_delta_rule,
    "selective_state": _selective_state, "short_convolution": _short_convolution,
}  # fmt: skip
