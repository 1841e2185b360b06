"""Multi-head layers on the ranks, and the results that the reference requires of them."""

from __future__ import annotations

from collections.abc import Callable
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
from tests.fuzz.expected import USUAL_SCORE, Expected

LayerResult = dict[str, Any]
Rounded = Callable[[Tensor], Tensor]


def layer_of(case: Case) -> Any:
    """Return the layer, with weights from the seed."""
    options, dtype = dict(case["options"]), getattr(torch, case["dtype"])
    if "segment_lengths" in options:
        branches = options.pop("segment_lengths"), options.pop("dilation_rates")
        layer = getattr(ringattn, case["layer"])(case["embed_dim"], case["heads"], *branches, **options)
    else:
        layer = getattr(ringattn, case["layer"])(case["embed_dim"], case["heads"], **options)
    random = torch.Generator().manual_seed(case["seed"] * 16 + 1)
    with torch.no_grad():
        for name, weight in layer.named_parameters():
            values = torch.randn(weight.shape, generator=random, dtype=torch.float64)
            weight.copy_(values / weight.shape[-1] ** 0.5 if weight.dim() == 2 else values + ("norm" in name))
    return layer.to(dtype)


def tensors(case: Case) -> tuple[Tensor, Tensor]:
    """Return x and the weights of the loss, (batch, tokens, embed_dim)."""
    random = torch.Generator().manual_seed(case["seed"] * 16)
    shape = case["batch"], case["seq"]["length"], case["embed_dim"]
    x, dout = (torch.randn(shape, generator=random, dtype=torch.float64) for _ in range(2))
    return x.to(getattr(torch, case["dtype"])), dout


def on_rank(ring: ringattn.Ring, case: Case) -> LayerResult:
    """Run the layer. Return this rank's shards of out and dx and its part of the weights' gradients, or the refusal."""
    try:
        layer = layer_of(case)
        seq = sequence(ring, case["seq"], False).with_mask(None)
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
    result: LayerResult = {"out": out.detach().double(), "rows": rows, "dtype": out.dtype}
    if out.requires_grad:
        result["dx"] = None if x.grad is None else x.grad.double()
        for name, weight in layer.named_parameters():
            result[f"weight {name}"] = None if weight.grad is None else weight.grad.double()
    return result


STAGES = 6
"""Projection, norm, rotation, attention, norm, projection: each rounds once. Roundings of the terms of a sum go up as
often as down, so they grow with the square root of their number."""
SPREAD = 4
"""How much larger the worst error of one random draw of roundings may be than that of another."""


def unit(case: Case) -> float:
    """Return the relative error that a stage may have.

    It is one rounding in half precision (of the case's dtype or of its autocast), otherwise the kernels' tolerance.
    """
    rounding = {"float64": 1e-10, "float32": 1e-5, "bfloat16": 2.0**-8, "float16": 2.0**-11}[case["dtype"]]
    if case["autocast"] and case["dtype"] != "float64":
        rounding = max(rounding, 2.0**-8 if case["autocast"] == "bfloat16" else 2.0**-11)
    return rounding


def expected(case: Case) -> dict[str, Expected]:
    """Return the expected out and, in training modes, the gradients of x and of the weights, summed over the steps."""
    exact, largest = _results(case, lambda x: x)
    random = torch.Generator().manual_seed(case["seed"] * 16 + 2)

    def rounded(x: Tensor) -> Tensor:
        return x * (1 + unit(case) * (2 * torch.rand(x.shape, generator=random, dtype=x.dtype) - 1))

    # A norm divides by the size of a row, so rounding a small row has a large effect. Random roundings of the same size
    # in the reference show how large the effect is.
    rounded_results, _ = _results(case, rounded)
    expected_results = {}
    for name, value in exact.items():
        terms = case["batch"] * case["seq"]["length"] * case["heads"] if name.startswith("weight ") else 1
        top = max(float(value.abs().max()), 1.0) if value.numel() else 0.0
        plain = unit(case) * STAGES * max(terms, 1) ** 0.5 * max(1.0, largest / USUAL_SCORE) * top
        magnified = SPREAD * float((rounded_results[name] - value).abs().max()) if value.numel() else 0.0
        expected_results[name] = Expected(value, torch.full_like(value, max(plain, magnified)))
    return expected_results


def _results(case: Case, rounded: Rounded) -> tuple[dict[str, Tensor], float]:
    """Return the results with `rounded` applied after every stage, and the largest score."""
    layer = layer_of(case).double()
    x, dout = (value.double() for value in tensors(case))
    weights = dict(layer.named_parameters())
    trains = case["mode"] not in ("inference", "no_grad")
    with nullcontext() if trains else torch.no_grad():
        out, largest = _reference(case, weights, x.requires_grad_(), rounded)
    results = {"out": out.detach()}
    if trains:
        ((out * dout).sum() * case["steps"]).backward()
        results |= {"dx": x.grad} | {f"weight {name}": weight.grad for name, weight in weights.items()}
    return {name: value for name, value in results.items() if value is not None}, largest


def _reference(case: Case, weights: dict[str, Any], x: Tensor, rounded: Rounded) -> tuple[Tensor, float]:
    """Compute the layer by its definition in float64; return out and an upper bound of the scaled scores."""
    options, heads, dim = case["options"], case["heads"], case["options"]["head_dim"]
    kv_heads, length, documents = options["num_kv_heads"], case["seq"]["length"], case["seq"]["documents"]
    projected = rounded(F.linear(rounded(x), rounded(weights["in_proj_weight"]), weights.get("in_proj_bias")))
    q, k, v = projected.unflatten(2, (-1, dim)).split([heads, kv_heads, kv_heads], 2)
    if options["qk_norm"]:
        q, k = (rounded(reference.rms_norm(x_, weights[f"{name}_norm"], 1e-6)) for x_, name in ((q, "q"), (k, "k")))
    if options["rope"]:
        turn = options["rope"], options.get("rope_base", 10_000.0), options.get("xpos_scale")
        q, k = rounded(reference.rotary(q, *turn)), rounded(reference.rotary(k, *turn, key=True))
    if "segment_lengths" in options:
        names = ("segment_lengths", "dilation_rates", "causal", "offset", "layer", "tail")
        named = {name: options[name] for name in names if name in options}
        counts = reference.dilated_counts(length, documents, (heads, kv_heads), **named)
    else:
        mask = options["causal"], options.get("window")
        counts = reference.plain_counts(length, documents, length, documents, *mask)
    detached = options.get("grad") == "detached"
    softmax = options.get("scale"), options.get("softcap"), weights.get("attention.sinks"), detached
    attended = rounded(reference.attention(q, k, v, counts, *softmax)[0].flatten(2))
    if options.get("layer_norm"):
        affine = weights["layer_norm.weight"], weights["layer_norm.bias"]
        attended = rounded(F.layer_norm(attended, attended.shape[-1:], *affine))
    largest = [float(x_.detach().norm(dim=-1).max()) if x_.numel() else 0.0 for x_ in (q, k)]
    scale = abs(dim**-0.5 if options.get("scale") is None else options["scale"])
    out = F.linear(attended, rounded(weights["out_proj.weight"]), weights.get("out_proj.bias"))
    return out, largest[0] * largest[1] * scale
