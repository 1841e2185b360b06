"""Multi-head layers on the ranks, and what they have to give by the reference."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import ringattn
from tests.fuzz import reference
from tests.fuzz.calls import modes, sequence
from tests.fuzz.draw import Case

Found = dict[str, Any]


def layer_of(case: Case) -> Any:
    """The layer, with weights from the seed."""
    options, dtype = dict(case["options"]), getattr(torch, case["dtype"])
    if "segment_lengths" in options:
        branches = options.pop("segment_lengths"), options.pop("dilation_rates")
        layer = getattr(ringattn, case["layer"])(case["embed_dim"], case["heads"], *branches, **options)
    else:
        layer = getattr(ringattn, case["layer"])(case["embed_dim"], case["heads"], **options)
    random = torch.Generator().manual_seed(case["seed"] * 16 + 1)
    with torch.no_grad():
        for name, weight in layer.named_parameters():
            drawn = torch.randn(weight.shape, generator=random, dtype=torch.float64)
            weight.copy_(drawn / weight.shape[-1] ** 0.5 if weight.dim() == 2 else drawn + ("norm" in name))
    return layer.to(dtype)


def tensors(case: Case) -> tuple[Tensor, Tensor]:
    """x and the weights of the loss, (batch, tokens, embed_dim)."""
    random = torch.Generator().manual_seed(case["seed"] * 16)
    shape = case["batch"], case["seq"]["length"], case["embed_dim"]
    x, dout = (torch.randn(shape, generator=random, dtype=torch.float64) for _ in range(2))
    return x.to(getattr(torch, case["dtype"])), dout


def on_rank(ring: ringattn.Ring, case: Case) -> Found:
    """This rank's shards of out and of dx, and its part of the weights' gradients; or what it was refused with."""
    try:
        layer = layer_of(case)
        seq = sequence(ring, case["seq"], False)
    except ringattn.InputError as error:
        return {"refused": f"{type(error).__name__}: {error}"}
    whole, dout = tensors(case)
    alone = not case["layer"].startswith("Ring")
    rows = torch.arange(case["seq"]["length"]) if alone else seq.positions()
    x = whole[:, rows].requires_grad_()
    arguments = (x,) if alone else (x, seq)
    try:
        for step in range(case["steps"]):
            if step and case["between"]:
                with modes(case, case["between"]):
                    layer(*arguments)
            with modes(case, case["mode"]):
                if case["mode"] in ("checkpoint", "reentrant"):
                    out = checkpoint(layer, *arguments, use_reentrant=case["mode"] == "reentrant")
                else:
                    out = layer(*arguments)
            if out.requires_grad:
                (out.double() * dout[:, rows]).sum().backward()
    except ringattn.InputError as error:
        return {"refused": f"{type(error).__name__}: {error}"}
    found: Found = {"out": out.detach().double(), "rows": rows, "dtype": out.dtype}
    if out.requires_grad:
        found["dx"] = None if x.grad is None else x.grad.double()
        for name, weight in layer.named_parameters():
            found[f"weight {name}"] = None if weight.grad is None else weight.grad.double()
    return found


STAGES = 6
"""Projection, norm, rotation, attention, norm, projection: each rounds once more. Roundings of the terms of a sum go up
as often as down, so they grow with the root of their number."""
NORM_EPS = 1e-5
"""`torch.nn.LayerNorm` magnifies what has no variance by the root of its inverse."""


def relative(case: Case, name: str) -> float:
    """How far a result may be off, of its largest element and at least of 1."""
    unit = {"float64": 1e-10, "float32": 1e-5, "bfloat16": 2.0**-8, "float16": 2.0**-11}[case["dtype"]]
    if case["autocast"] and case["dtype"] != "float64":
        unit = max(unit, 2.0**-8 if case["autocast"] == "bfloat16" else 2.0**-11)
    terms = case["batch"] * case["seq"]["length"] * case["heads"] if name.startswith("weight ") else 1
    magnified = NORM_EPS**-0.5 if case["options"].get("layer_norm") else 1
    return unit * STAGES * magnified * max(terms, 1) ** 0.5


def expected(case: Case) -> tuple[dict[str, Tensor], float]:
    """out, and with a backward the gradients of x and of the weights, summed over the steps; and the largest score."""
    layer = layer_of(case).double()
    x, dout = (one.double() for one in tensors(case))
    weights = dict(layer.named_parameters())
    trains = case["mode"] not in ("inference", "no_grad")
    with nullcontext() if trains else torch.no_grad():
        out, largest = _reference(case, weights, x.requires_grad_())
    found = {"out": out.detach()}
    if trains:
        ((out * dout).sum() * case["steps"]).backward()
        found |= {"dx": x.grad} | {f"weight {name}": weight.grad for name, weight in weights.items()}
    return {name: one for name, one in found.items() if one is not None}, largest


def _reference(case: Case, weights: dict[str, Any], x: Tensor) -> tuple[Tensor, float]:
    """The layer by its definition, in float64; and what no scaled score exceeds."""
    options, heads, dim = case["options"], case["heads"], case["options"]["head_dim"]
    kv_heads, length, documents = options["num_kv_heads"], case["seq"]["length"], case["seq"]["documents"]
    made = F.linear(x, weights["in_proj_weight"], weights.get("in_proj_bias"))
    q, k, v = made.unflatten(2, (-1, dim)).split([heads, kv_heads, kv_heads], 2)
    if options["qk_norm"]:
        q, k = (reference.rms_norm(one, weights[f"{name}_norm"], 1e-6) for one, name in ((q, "q"), (k, "k")))
    if options["rope"]:
        turn = options["rope"], options.get("rope_base", 10_000.0), options.get("xpos_scale")
        q, k = reference.rotary(q, *turn), reference.rotary(k, *turn, key=True)
    if "segment_lengths" in options:
        names = ("segment_lengths", "dilation_rates", "causal", "offset", "layer", "tail")
        named = {name: options[name] for name in names if name in options}
        counts = reference.dilated_counts(length, documents, (heads, kv_heads), **named)
    else:
        mask = options["causal"], options.get("window")
        counts = reference.plain_counts(length, documents, length, documents, *mask)
    detached = options.get("grad") == "detached"
    softmax = options.get("scale"), options.get("softcap"), weights.get("attention.sinks"), detached
    attended = reference.attention(q, k, v, counts, *softmax)[0].flatten(2)
    if options.get("layer_norm"):
        attended = F.layer_norm(attended, attended.shape[-1:], weights["layer_norm.weight"], weights["layer_norm.bias"])
    largest = [float(one.detach().norm(dim=-1).max()) if one.numel() else 0.0 for one in (q, k)]
    scale = abs(dim**-0.5 if options.get("scale") is None else options["scale"])
    out = F.linear(attended, weights["out_proj.weight"], weights.get("out_proj.bias"))
    return out, largest[0] * largest[1] * scale
