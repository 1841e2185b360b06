"""Latent attention, layers with a state and masks by head, on the ranks and by their definitions on one process."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import ringattn
from ringattn import masks
from tests.fuzz import recurrences, reference, states
from tests.fuzz.calls import modes, sequence
from tests.fuzz.choices import Case
from tests.fuzz.draw_functions import ATTENTION
from tests.fuzz.expected import Expected
from tests.fuzz.legal import has_no_layout

Result = dict[str, Any]
Tensors = dict[str, Tensor]
RELATIVE = 1e-9
"""The tolerance of a result, relative to its largest element, or to 1 if that is larger."""


def must_refuse(case: Case) -> str | None:
    """Return why the case must be refused, or None."""
    return has_no_layout(case["seq"]) if case["function"] in ATTENTION else states.must_refuse(case)


def tensors(case: Case) -> Tensors:
    """Return the whole tensors (batch, tokens, ...) and weights by name. Decays are negative, and keys normalized."""
    random, leading = torch.Generator().manual_seed(case["seed"] * 16), (case["batch"], case["seq"]["length"])
    shapes = {name: (*leading, *shape) for name, shape in case["shapes"].items()} | case["weights"]
    drawn = {name: torch.randn(*shape, generator=random, dtype=torch.float64) for name, shape in shapes.items()}
    for name in drawn.keys() & {"g", "A"}:
        drawn[name] = -drawn[name].abs()
    if case["function"] == "gated_delta_rule":
        drawn |= {"k": F.normalize(drawn["k"], dim=-1), "beta": drawn["beta"].sigmoid()}
    return drawn


def loss_of(out: Tensor, lse: Tensor | None, rows: Tensor) -> Tensor:
    """Return a loss of the output of `rows` of the sequence. An lse of -inf has no part in it."""
    places = torch.arange(out.shape[2:].numel()).view(out.shape[2:])
    loss = (out * torch.cos(rows.view(-1, *[1] * places.dim()) + places)).sum()
    return loss if lse is None else loss + lse.masked_fill(lse.isneginf(), 0.0).sin().sum()


def results_of(case: Case, out: Tensor, lse: Tensor | None, inputs: Tensors) -> Tensors:
    """Return the results and gradients by name, with the tokens in dimension 1 except for "weight ..."."""
    results = {"out": out.detach()} | ({} if lse is None else {"lse": lse.detach().transpose(1, 2)})
    if case["mode"] != "no_grad":
        for name in case["needs"]:
            grad, result = inputs[name].grad, f"weight {name}" if name in case["weights"] else f"d{name}"
            results[result] = torch.zeros_like(inputs[name]) if grad is None else grad
    return results


# --- on the ranks ----------------------------------------------------------------------------------------------------


def on_rank(ring: ringattn.Ring, case: Case) -> Result:
    """Run the function. Return this rank's shards of the output and of the gradients, or the refusal."""
    try:
        return _on_rank(ring, case)
    except ringattn.InputError as error:
        return {"refused": f"{type(error).__name__}: {error}"}


def _on_rank(ring: ringattn.Ring, case: Case) -> Result:
    described, mask = case["seq"], case["options"].get("mask")
    if case["batched"]:
        (micro_batch,) = ring.batch([stop - start for start, stop in pairwise(described["documents"])])
        seq = micro_batch.seq
    else:
        seq = sequence(ring, described, False).with_mask(None)
    if case.get("mask_of") == "sequence":
        seq = seq.with_mask(masks.from_text(mask))
    inputs = {name: seq.shard(x) if name in case["shapes"] else x.clone() for name, x in tensors(case).items()}
    for name in case["needs"]:
        inputs[name] = inputs[name].detach().requires_grad_()

    def run(*values: Tensor) -> Any:
        return _CALLS[case["function"]](ring, seq, case, **dict(zip(inputs, values, strict=True)))

    with modes(case, case["mode"]):
        if case["mode"] in ("checkpoint", "reentrant"):
            returned = checkpoint(run, *inputs.values(), use_reentrant=case["mode"] == "reentrant")
        else:
            returned = run(*inputs.values())
    out, lse = returned if isinstance(returned, tuple) else (returned, None)
    loss = loss_of(out, lse, seq.positions())
    if case["mode"] != "no_grad":
        loss.backward()
    return results_of(case, out, lse, inputs) | {"rows": seq.positions()}


def _options(case: Case) -> Case:
    options = dict(case["options"])
    if case.get("mask_of") == "sequence":
        del options["mask"]
    elif "mask" in options:
        options["mask"] = masks.from_text(options["mask"])
    return options


def _latent_attention(ring: ringattn.Ring, seq: ringattn.Sequence, case: Case, **inputs: Any) -> Any:
    return ring.latent_attention(**inputs, seq=seq, return_lse=True, **_options(case))


def _by_head(ring: ringattn.Ring, seq: ringattn.Sequence, case: Case, **inputs: Any) -> Any:
    return ring.attention(**inputs, seq=seq, return_lse=True, **_options(case))


def _gated_delta_rule(ring: ringattn.Ring, seq: ringattn.Sequence, case: Case, **inputs: Tensor) -> Tensor:
    return ringattn.GatedDeltaRule(**case["options"])(**inputs, seq=seq)


def _selective_state(ring: ringattn.Ring, seq: ringattn.Sequence, case: Case, **inputs: Tensor) -> Tensor:
    return ringattn.SelectiveState(**case["options"])(**inputs, seq=seq)


def _short_convolution(ring: ringattn.Ring, seq: ringattn.Sequence, case: Case, x: Tensor, **weights: Tensor) -> Tensor:
    layer = ringattn.ShortConvolution(
        x.shape[2], weights["weight"].shape[2], bias="bias" in weights, dtype=x.dtype, **case["options"]
    )
    return torch.func.functional_call(layer, weights, (x, seq))


_CALLS: dict[str, Callable[..., Any]] = {
    "latent_attention": _latent_attention, "by_head": _by_head, "gated_delta_rule": _gated_delta_rule,
    "selective_state": _selective_state, "short_convolution": _short_convolution,
}  # fmt: skip


# --- by their definitions --------------------------------------------------------------------------------------------


def expected(case: Case) -> dict[str, Expected]:
    """Compute the output and the gradients on one process in float64."""
    inputs = tensors(case)
    for name in case["needs"]:
        inputs[name].requires_grad_()
    if case["function"] in ATTENTION:
        out, lse = _attention(case, inputs)
    else:
        out, lse = _recurrence(case, inputs), None
    loss = loss_of(out, lse, torch.arange(case["seq"]["length"]))
    if case["mode"] != "no_grad" and loss.requires_grad:
        loss.backward()
    tolerances = {
        name: (x, RELATIVE * max([1.0, *x[x.isfinite()].abs().flatten().tolist()]))
        for name, x in results_of(case, out, lse, inputs).items()
    }
    return {name: Expected(x, torch.full_like(x, tolerance), None) for name, (x, tolerance) in tolerances.items()}


def _attention(case: Case, inputs: Tensors) -> tuple[Tensor, Tensor]:
    seq, options = case["seq"], case["options"]
    selecting = {name: options[name] for name in ("causal", "window", "mask") if name in options}
    counts = reference.plain_counts(seq["length"], seq["documents"], seq["length"], seq["documents"], **selecting)
    if case["function"] == "by_head":
        q, k, v = (inputs[name] for name in "qkv")
    else:
        q, w_k = inputs["q"], inputs["w_k"]
        rotary = inputs["rotary"][:, :, None].repeat(1, 1, q.shape[2], 1)
        k = torch.cat([torch.einsum("btl,hkl->bthk", inputs["latents"], w_k), rotary], -1)
        v = torch.einsum("btl,hvl->bthv", inputs["latents"], inputs["w_v"])
    return reference.attention(q, k, v, counts, options.get("scale"), options.get("softcap"), inputs.get("sinks"))


def _recurrence(case: Case, inputs: Tensors) -> Tensor:
    """Return the outputs of the documents, each from an empty state."""
    function, seq, parts = _REFERENCES[case["function"]], case["seq"], []
    for start, stop in pairwise(seq["documents"] or (0, seq["length"])):
        cut = {name: x[:, start:stop] if name in case["shapes"] else x for name, x in inputs.items()}
        parts.append(function(**cut, **case["options"]))
    return torch.cat(parts, 1)


_REFERENCES: dict[str, Callable[..., Tensor]] = {
    "gated_delta_rule": recurrences.gated_delta_rule, "selective_state": recurrences.selective_state,
    "short_convolution": recurrences.short_convolution,
}  # fmt: skip
