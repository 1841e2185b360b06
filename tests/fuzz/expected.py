"""The results that the reference requires of a case of attention calls, and their tolerances.

Tolerances follow from rounding. They are 1e-10 for float64 and 1e-5 for float32, relative to a result's largest element
or to the largest product in it. They are multiplied by |score| / 5 if scores are larger than those of unit normal
inputs, because the error of exp(score) grows by that factor. For half precision, and for data rounded on the wire, the
tolerance of a result is a few roundings of each product that the result sums.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from tests import philox
from tests.fuzz import inputs, reference
from tests.fuzz.calls import owned
from tests.fuzz.draw import Case

RELATIVE = {"float64": 1e-10, "float32": 1e-5, "bfloat16": 1e-5, "float16": 1e-5}
ROUNDOFF = {"float64": 0.0, "float32": 2.0**-24, "bfloat16": 2.0**-8, "float16": 2.0**-11}
SMALLEST = {"float64": 0.0, "float32": 0.0, "bfloat16": 0.0, "float16": 2.0**-24}
"""The distance between neighbouring numbers below the smallest normal number."""
ROUNDINGS = 4.0
"""The number of roundings of a product: of P, of out inside delta, of dS, and of the result."""
USUAL_SCORE = 5.0


MASKS = ("causal", "window", "mask")
"""Options of `Ring.attention` that select the pairs."""


class Expected(NamedTuple):
    """A result, the tolerance of each element, and a mask of elements that must be NaN.

    With a mask, the other elements may be NaN too.
    """

    value: Tensor
    tolerance: Tensor
    nan: Tensor | None = None


Results = dict[str, Expected]


class _Call:
    def __init__(self, case: Case, index: int, before: list[_Call]) -> None:
        call = case["calls"][index]
        self.case, self.call, self.values = case, call, inputs.values(case, index)
        if call.get("share"):
            source = before[call["like"]]
            self.leaves, self.sinks, self.tensors = source.leaves, source.sinks, source.tensors
        else:
            inputs_ = [x.double().nan_to_num(nan=0.0) for x in self.values[:3]]
            self.leaves = [x.requires_grad_(name in call["grads"]) for name, x in zip("qkv", inputs_, strict=True)]
            sinks = self.values.sinks
            self.sinks = None if sinks is None else sinks.double().requires_grad_("s" in call["grads"])
            self.tensors = [inputs.as_input(x, call, name) for name, x in zip("qkv", self.leaves, strict=True)]
        if call["chained"]:
            self.tensors = [before[call["like"]].out, *self.tensors[1:]]
        self.counts = counts_of(call)
        options = call["options"]
        self.scale = call["dims"][0] ** -0.5 if options.get("scale") is None else options["scale"]
        self.detached, self.bias = options.get("grad") == "detached", bias_of(call)
        self.out, self.lse = reference.attention(
            *self.tensors, self.counts, self.scale, options.get("softcap"), self.sinks, self.detached, self._rounded(),
            self.bias, dropout_factors_of(call),
        )  # fmt: skip
        self.kept = self.out.detach().clone(), self.lse.detach().clone()
        self.loss = None
        if call["mode"] not in ("inference", "no_grad"):
            out = self.out.clone() if call["in_place"] else self.out
            loss = inputs.loss_of(call, out, self.lse, self.values.dout, self.values.dlse)
            self.loss = loss if loss.requires_grad else None

    def _rounded(self) -> reference.Rounded | None:
        code = self.case["ring"].get("kv_wire_dtype")
        if code is None:
            return None
        dtype = getattr(torch, self.case["dtype"])
        k, v = (reference.eight_bits(x, code, dtype) for x in self.tensors[1:])
        owners = [
            torch.zeros(seq["length"], dtype=torch.int64).index_put_(
                (torch.cat(rows),), torch.repeat_interleave(torch.tensor([len(rank_rows) for rank_rows in rows]))
            )
            for seq in (self.call["seq"], self.call["kv_seq"] or self.call["seq"])
            for rows in [owned(seq, self.case)]
        ]
        return reference.Rounded(k, v, owners[0][:, None] == owners[1])

    def largest_score(self) -> float:
        """Return an upper bound of every scaled score."""
        q, k = (float(x.detach().norm(dim=-1).max()) if x.numel() else 0.0 for x in self.tensors[:2])
        biased = self.bias is not None and self.bias.numel()
        return abs(self.scale) * q * k + (float(self.bias.abs().max()) if biased else 0.0)

    def largest_ds(self) -> tuple[float, float]:
        """Return two upper bounds: of the gradient of any score, and of any element of dout.

        The terms of the gradient are added by magnitude, so that they cannot cancel.
        """
        out, v = self.kept[0], self.tensors[2].detach()
        dout = _dout(self)
        if not out.numel() or not v.numel():
            return 0.0, 0.0
        lse = float(self.values.dlse.abs().max()) if self.call["uses"]["lse"] else 0.0
        return 2 * float(dout.norm(dim=-1).max()) * float(v.norm(dim=-1).max()) + lse, float(dout.max())


def _dout(call: _Call) -> Tensor:
    """Return the magnitude of each element of the gradient of out."""
    uses, doubled = call.call["uses"], 2 if call.call["in_place"] else 1
    dout = call.values.dout.double().abs() * (uses["out"] in ("weighted", "transposed")) + float(uses["out"] == "sum")
    return (dout + (doubled * call.kept[0].abs() if call.call["twice"] else 0.0)) * doubled


def bias_of(call: Case) -> Tensor | None:
    """Return the bias that ALiBi adds to the scores of a call, or None without ALiBi."""
    slopes, seq = call["options"].get("alibi_slopes"), call["seq"]
    if slopes is None:
        return None
    kv = call["kv_seq"] or seq
    return reference.alibi(
        slopes, *(reference.places(sequence["length"], sequence["documents"]) for sequence in (seq, kv))
    )


def dropout_factors_of(call: Case) -> Tensor | None:
    """Return the factors by which dropout multiplies the weights of a call, or None without dropout."""
    options, (batch, heads) = call["options"], (call["batch"], call["heads"][0])
    if not options.get("dropout_p"):
        return None
    tokens = call["seq"]["length"], (call["kv_seq"] or call["seq"])["length"]
    return philox.kept(batch, heads, *tokens, options["dropout_seed"], options["dropout_p"])


def counts_of(call: Case) -> reference.Counts:
    """Return how often each query attends to each key in a call."""
    options, seq = call["options"], call["seq"]
    if call["op"] == "attention":
        kv = call["kv_seq"] or seq
        named = {name: options[name] for name in MASKS if name in options}
        return reference.plain_counts(seq["length"], seq["documents"], kv["length"], kv["documents"], **named)
    named = {key: options[key] for key in ("causal", "offset", "layer", "tail") if key in options}
    branches = options["segment_lengths"], options["dilation_rates"]
    return reference.dilated_counts(seq["length"], seq["documents"], tuple(call["heads"]), *branches, **named)


def expected(case: Case, refused: list[bool]) -> list[Results | None]:
    """Return the expected results of each call, or None for a refused call, which contributes to no loss."""
    calls: list[Any] = []
    for index in range(len(case["calls"])):
        calls.append(None if refused[index] else _Call(case, index, calls))
    losses = [call.loss for call in calls if call is not None and call.loss is not None]
    again = any(call["backward_twice"] for call in case["calls"])
    if losses:
        (sum(losses[1:], losses[0]) * (2 if again else 1)).backward()
    return [None if call is None else _results(case, call, calls, again) for call in calls]


def _results(case: Case, call: _Call, calls: list[Any], again: bool) -> Results:
    """Return the values of a call with their tolerances.

    Gradients of shared leaves belong to the call that created them. `again`: whether the backward passes run twice, so
    that the gradients double.
    """
    values = dict(zip(("out", "lse"), call.kept, strict=True))
    if not call.call.get("share"):
        values |= {f"d{name}": x.grad for name, x in zip("qkv", call.leaves, strict=True) if x.grad is not None}
        if call.sinks is not None and call.sinks.grad is not None:
            values["dsinks"] = call.sinks.grad
    scale, largest = abs(call.scale), max(call_.largest_score() for call_ in calls if call_)
    chained = any(call_ is not None and call_.call["chained"] for call_ in calls)
    relative = RELATIVE[case["dtype"]] * max(1.0, largest / USUAL_SCORE) * (1 + largest if chained else 1)
    relative /= 1 - call.call["options"].get("dropout_p", 0.0)  # kept weights are scaled up
    q, k, v = (float(x.detach().abs().max()) if x.numel() else 0.0 for x in call.tensors)
    ds, dout = call.largest_ds()
    usual = {"out": v, "lse": 1.0, "dq": scale * k * ds, "dk": scale * q * ds, "dv": dout, "dsinks": ds}
    nan = _nan_reach(call) if case.get("nan") else {}
    sums = (
        [_rounding_bounds(call_) for call_ in calls if call_ is not None and call_.leaves is call.leaves]
        if _rounds(case)
        else []
    )
    results: Results = {}
    for name, value in values.items():
        top = float(value.masked_fill(value.isinf(), 0).abs().max()) if value.numel() else 0.0
        smallest = SMALLEST[case["dtype"]] * (1 + _addends(name, call, calls)) / 2  # half a spacing per rounding
        tolerance = torch.full_like(value, relative * max(top, usual[name]) + smallest)
        if sums:
            every = [_rounding_bounds(call)] if name in ("out", "lse") else sums
            bound = sum((call_[name] for call_ in every if name in call_), torch.zeros(()))
            tolerance = tolerance + bound * (2 if again else 1)
        spread = nan.get(name, torch.zeros_like(value, dtype=torch.bool)) if case.get("nan") else None
        results[name] = Expected(value, tolerance, spread)
    return results


def _addends(name: str, call: _Call, calls: list[Any]) -> int:
    """Return how many rounded numbers autograd adds per element of a leaf's gradient.

    Each call that uses the leaf adds one, or one per batch or head to which the leaf is expanded.
    """
    if name not in ("dq", "dk", "dv"):
        return 1
    place = "qkv".index(name[1])
    leaf = call.leaves[place]
    alike = [call_ for call_ in calls if call_ is not None and call_.leaves is call.leaves]
    return sum(call_.tensors[place].numel() // max(leaf.numel(), 1) for call_ in alike)


# --- half dtypes -----------------------------------------------------------------------------------------------------


def _rounds(case: Case) -> bool:
    wires = "dkv_wire_dtype", "out_wire_dtype"
    return case["dtype"] in ("bfloat16", "float16") or any(wire in case["ring"] for wire in wires)


def _rounding_bounds(call: _Call) -> dict[str, Tensor]:
    """Bound the effect of rounding on each result: the roundoff times the sum of the magnitudes of its products."""
    case, (q, k, v) = call.case, (x.detach() for x in call.tensors)
    group, out = call.call["heads"][0] // call.call["heads"][1], call.kept[0].abs()
    keys, values = (x.repeat_interleave(group, 2) for x in (k, v))
    scores = torch.einsum("bnhd,bmhd->bhnm", q, keys) * call.scale
    softcap = call.call["options"].get("softcap")
    scores = scores if softcap is None else softcap * torch.tanh(scores / softcap)
    scores = scores if call.bias is None else scores + call.bias
    lse = call.kept[1].masked_fill(call.kept[1].isinf(), 0.0)[..., None]
    p = call.counts.pairs.sum(0) * torch.exp(torch.minimum(scores - lse, torch.zeros(())))
    p = p / (1 - call.call["options"].get("dropout_p", 0.0))  # kept weights are scaled up
    uses = call.call["uses"]
    dout = _dout(call)
    out_bound = values.abs().amax(1, keepdim=True) if call.detached and values.numel() else out  # bounds branch outputs
    delta = torch.einsum("bnhd,bnhd->bhn", dout, out_bound.expand_as(out)) + (
        call.values.dlse.abs() if uses["lse"] else 0.0
    )
    ds = p * (torch.einsum("bnhd,bmhd->bhnm", dout, values.abs()) + delta[..., None]) * abs(call.scale)
    # Below the smallest normal number of a dtype, the absolute rounding error no longer shrinks. Gradients of scores
    # of 1e-7 in float16 are such numbers.
    least = torch.finfo(getattr(torch, case["dtype"])).tiny
    p, ds = (torch.where(call.counts.pairs.sum(0) > 0, x.clamp(min=least), 0.0) for x in (p, ds))

    def grouped(x: Tensor) -> Tensor:
        return x.unflatten(2, (-1, group)).sum(3)

    sums = {
        "out": torch.einsum("bhnm,bmhd->bnhd", p, values.abs()),
        "dq": torch.einsum("bhnm,bmhd->bnhd", ds, keys.abs()),
        "dk": grouped(torch.einsum("bhnm,bnhd->bmhd", ds, q.abs())),
        "dv": grouped(torch.einsum("bhnm,bnhd->bmhd", p, dout)),
        "dsinks": delta.sum((0, 2)),
    }
    for name, leaf in zip("qkv", call.leaves, strict=True):
        for dim in (0, 2):
            if leaf.shape[dim] != sums[f"d{name}"].shape[dim]:
                sums[f"d{name}"] = sums[f"d{name}"].sum(dim, keepdim=True)
    units = dict.fromkeys(sums, ROUNDINGS * ROUNDOFF[case["dtype"]])
    for option, names in (("dkv_wire_dtype", ("dk", "dv")), ("out_wire_dtype", ("out", "dq", "dk", "dv", "dsinks"))):
        for name in names if option in case["ring"] else ():
            units[name] += (case["ranks"] + 1) * ROUNDOFF[case["ring"][option]]
    return {name: units[name] * value for name, value in sums.items()}


# --- NaN -------------------------------------------------------------------------------------------------------------


def _nan_reach(call: _Call) -> dict[str, Tensor]:
    """Return masks of the elements of each result that must be NaN: those that depend on a pair with a NaN input."""
    group, heads = call.call["heads"][0] // call.call["heads"][1], call.call["heads"][0]
    named = zip("qkv", call.values[:3], strict=True)
    q, k, v = (inputs.as_input(x.isnan(), call.call, name).transpose(1, 2) for name, x in named)
    q, k, v = q.any(-1), k.any(-1).repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    # Detached branches are separate softmaxes: a NaN in the scores of a branch reaches only the keys of that branch.
    # But if the share of a branch is NaN, all shares of the row are.
    pairs = call.counts.pairs if call.detached else call.counts.pairs.sum(0, keepdim=True)
    branches = [(branch > 0).expand(heads, -1, -1)[None] for branch in pairs]
    lse = torch.stack([(attends & (q[..., None] | k[:, :, None])).any(-1) for attends in branches]).any(0)
    outs = [lse[..., None] | (attends[..., None] & v[:, :, None]).any(3) for attends in branches]
    out = torch.stack(outs).any(0)
    reached = {"out": out.transpose(1, 2), "lse": lse}
    if call.loss is not None and call.call["uses"]["out"] in ("weighted", "transposed", "sum"):
        rows = [(branch_out.any(-1), lse) for branch_out in outs]  # rows with NaN in ds, and with NaN in shares times p
        seen = (
            torch.stack(
                [(attends & row[n][..., None]).any(2) for attends, row in zip(branches, rows, strict=True)]
            ).any(0)
            for n in range(2)
        )
        dk, dv = (branch_out.transpose(1, 2).unflatten(2, (-1, group)).any(3)[..., None] for branch_out in seen)
        reached |= {"dq": out.any(-1).transpose(1, 2)[..., None], "dk": dk, "dv": dv}
    for name, leaf in zip(("dq", "dk", "dv"), call.leaves, strict=True):
        for dim in (0, 2):
            if name in reached and leaf.shape[dim] != reached[name].shape[dim]:
                reached[name] = reached[name].any(dim, keepdim=True)
    return reached
