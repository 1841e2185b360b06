"""Recurrences over rows with history, on the ranks and token by token on one process."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import ringattn
from ringattn.runtime.states import reach, started_scan
from tests.fuzz import reference
from tests.fuzz.calls import modes, sequence
from tests.fuzz.choices import Case
from tests.fuzz.expected import Expected
from tests.fuzz.legal import has_no_layout

StateResult = dict[str, Any]


def must_refuse(case: Case) -> str | None:
    """Return why the case must be refused, or None."""
    seq = case["seq"]
    if reason := has_no_layout(seq):
        return reason
    layout = reference.layout_of(seq["layout"], seq["for_"], seq["documents"])
    if layout == "striped" and 1 < case["ranks"] < seq["length"]:
        return "a rank has every n-th token"
    return None


def tensors(case: Case) -> dict[str, Tensor]:
    """Return inputs (tokens, batch, d, e), the gates of each step, and the weights of the loss."""
    random = torch.Generator().manual_seed(case["seed"] * 16)
    tokens, (d, e) = case["seq"]["length"], case["dims"]

    def drawn(*shape: int) -> Tensor:
        return torch.randn(tokens, case["batch"], *shape, generator=random, dtype=torch.float64)

    result = {"x": drawn(d, e), "weights": drawn(d, e)}
    for number, step in enumerate(case["steps"]):
        gates = drawn(d, d) / (2 * d) if step["matrix"] else drawn(d, 1).sigmoid()
        result[f"gates {number}"] = gates * step["decay"]
    return result


def recurrence(gates: Tensor, x: Tensor, before: Tensor, matrix: bool) -> tuple[Tensor, Tensor]:
    """Return the states after each token, and the product of all gates, later ones on the left."""
    state, states = before, []
    product = torch.eye(gates.shape[-1], dtype=gates.dtype) if matrix else torch.ones_like(before[..., :1])
    product = product.expand(*before.shape[:-2], *product.shape[-2:])
    for gate, value in zip(gates, x, strict=True):
        state = (gate @ state if matrix else gate * state) + value
        product = gate @ product if matrix else gate * product
        states.append(state)
    return torch.stack(states), product


def taps(padded: Tensor, rows: Tensor, width: int) -> Tensor:
    """Return the weighted sum of each row and its history."""
    return sum((padded[rows - tap] / (tap + 1) for tap in range(width + 1)), torch.zeros_like(padded[rows]))


def expected(case: Case) -> dict[str, Expected]:
    """Compute the output and the gradients on one process, document by document."""
    given = {name: x.requires_grad_(name != "weights") for name, x in tensors(case).items()}
    out = given["x"]
    for number, step in enumerate(case["steps"]):
        parts, gates = [out[:0]], given[f"gates {number}"]
        for start, stop in pairwise(case["seq"]["documents"] or (0, case["seq"]["length"])):
            if stop > start:
                padded = torch.cat([out.new_zeros(step["width"], *out.shape[1:]), out[start:stop]])
                inputs = taps(padded, torch.arange(step["width"], len(padded)), step["width"])
                before = torch.zeros_like(inputs[0])
                parts.append(recurrence(gates[start:stop], inputs, before, step["matrix"])[0])
        out = torch.cat(parts)
    leaves = {name: x for name, x in given.items() if name != "weights"}
    results = {"out": out.detach()}
    if case["mode"] != "no_grad":
        grads = torch.autograd.grad((out * given["weights"]).sum(), list(leaves.values()), allow_unused=True)
        results |= {name: torch.zeros_like(x) if grad is None else grad
                    for (name, x), grad in zip(leaves.items(), grads, strict=True)}  # fmt: skip
    relative = 1e-11 if case["dtype"] == "float64" else 3e-5
    return {
        name: Expected(x, torch.full_like(x, relative * max(1.0, float(x.abs().max()) if x.numel() else 1.0)), None)
        for name, x in results.items()
    }


def on_rank(ring: ringattn.Ring, case: Case) -> StateResult:
    """Run the recurrences. Return this rank's shards of the output and of the gradients, or the refusal."""
    try:
        seq = sequence(ring, case["seq"], False).with_mask(None)
        seq.fragments()
    except ringattn.InputError as error:
        return {"refused": f"{type(error).__name__}: {error}"}
    dtype = getattr(torch, case["dtype"])
    local = {name: seq.shard(x.to(dtype), 0) for name, x in tensors(case).items()}
    weights = local.pop("weights")
    leaves = [x.requires_grad_() for x in local.values()]

    def run(x: Tensor, *gates: Tensor) -> Tensor:
        for step, gate in zip(case["steps"], gates, strict=True):
            x = _step(ring, seq, step, x, gate)
        return x

    with modes(case, case["mode"]):
        if case["mode"] in ("checkpoint", "reentrant"):
            out = checkpoint(run, *leaves, use_reentrant=case["mode"] == "reentrant")
        else:
            out = run(*leaves)
    result = {"out": out.detach(), "rows": seq.positions()}
    if case["mode"] != "no_grad":
        (out * weights).sum().backward()
        result |= {name: torch.zeros_like(x) if x.grad is None else x.grad for name, x in local.items()}
    return result


def _step(ring: ringattn.Ring, seq: ringattn.Sequence, step: Case, x: Tensor, gates: Tensor) -> Tensor:
    """Compute one recurrence over rows with history."""
    padded, rows = ring.halo(x, seq, step["width"], dim=0)
    inputs, matrix = taps(padded, rows, step["width"]), step["matrix"]
    zeros = inputs[:1].sum(0) * 0
    tokens = {each: (gates[each.start : each.stop], inputs[each.start : each.stop]) for each in seq.fragments()}
    parts = [each for each in tokens if each.is_part]
    ends = [recurrence(*tokens[each], zeros, matrix) for each in parts]
    transitions = torch.stack([gates[:1].sum(0), *(product for _, product in ends)])[1:]
    states = torch.stack([zeros, *(states[-1] for states, _ in ends)])[1:] + inputs.sum() * 0
    if step["overlap"]:
        with started_scan(ring, transitions, states, seq, matrix) as scan:
            before = scan.wait()
    else:
        before = ring.scan_states(transitions, states, seq, matrix=matrix)
    initial = dict(zip(parts, before, strict=True))
    outs = [recurrence(*tokens[each], initial.get(each, zeros), matrix)[0] for each in tokens]
    return reach(torch.cat([inputs[:0], *outs]), before)
