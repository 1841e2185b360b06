"""The correctness gate: before a case is timed or weighed, it answers right at a small size on the same ranks.

A baseline is anything that attends; the gate gives it small random inputs and compares what it returns, and its
gradients where it has them, with a dense float64 softmax.
Guarantees: a wrong answer, a NaN or a missing row raises `GateError`, and then no number is printed.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from ringattn.errors import RingError

BOUND = {torch.float32: 1e-5, torch.float64: 1e-10}
"""Greatest absolute error against the reference, for standard normal inputs."""


class GateError(RingError):
    """A baseline's answer is not exact, so it must not be measured."""


class Inputs(NamedTuple):
    """A whole problem: (1, tokens, heads, dim) tensors; `dout` is the gradient that comes from above."""

    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor


class Answer(NamedTuple):
    """Of attention: the output, and the three gradients where there are any."""

    out: Tensor
    grads: tuple[Tensor, Tensor, Tensor] | None


class Baseline(Protocol):
    """One way to attend causally, on this rank.

    `load` takes a whole problem and keeps this rank's part; `forward` and `backward` work on it, and nothing else is
    timed. `positions`: which tokens the answer holds, in its order; `heads`: which query heads, `kv_heads`: which K/V
    heads. A baseline without `backward` returns None from it.
    """

    name: str
    positions: Tensor
    heads: slice
    kv_heads: slice

    def load(self, inputs: Inputs) -> None: ...

    def forward(self) -> Tensor: ...

    def backward(self) -> tuple[Tensor, Tensor, Tensor] | None: ...


def random_inputs(length: int, heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype, seed: int = 0) -> Inputs:
    """A whole problem of standard normal numbers, the same on every rank."""
    generator = torch.Generator().manual_seed(seed)

    def tensor(count: int) -> Tensor:
        return torch.randn(1, length, count, head_dim, generator=generator, dtype=dtype)

    return Inputs(tensor(heads), tensor(kv_heads), tensor(kv_heads), tensor(heads))


def reference(inputs: Inputs) -> Answer:
    """Dense causal attention and its gradients in float64, written for clarity: scores, softmax, weighted sum."""
    q, k, v = (x.double().requires_grad_() for x in inputs[:3])
    group, tokens = q.shape[2] // k.shape[2], q.shape[1]
    scores = torch.einsum("bnhd,bmhd->bhnm", q, k.repeat_interleave(group, 2)) * q.shape[3] ** -0.5
    weights = scores.masked_fill(torch.ones(tokens, tokens).triu(1).bool(), float("-inf")).softmax(-1)
    out = torch.einsum("bhnm,bmhd->bnhd", weights, v.repeat_interleave(group, 2))
    dq, dk, dv = torch.autograd.grad(out, (q, k, v), inputs.dout.double())
    return Answer(out.detach(), (dq, dk, dv))


def open_gate(baselines: Iterable[Baseline], inputs: Inputs) -> dict[str, float]:
    """The greatest absolute error of each baseline on this rank. Raises `GateError` at the first wrong one."""
    want = reference(inputs)
    assert want.grads is not None
    errors = {}
    for one in baselines:
        one.load(inputs)
        got = Answer(one.forward(), one.backward())
        pairs = [("out", got.out, want.out[:, one.positions, one.heads])]
        if got.grads is not None:
            wanted = zip(("dq", "dk", "dv"), got.grads, want.grads, strict=True)
            at = {"dq": one.heads, "dk": one.kv_heads, "dv": one.kv_heads}
            pairs += [(name, mine, right[:, one.positions, at[name]]) for name, mine, right in wanted]
        errors[one.name] = max(_error(f"{one.name}: {name}", *pair) for name, *pair in pairs)
    return errors


def _error(what: str, got: Tensor, want: Tensor) -> float:
    """The greatest absolute difference. Raises `GateError` if it is beyond the bound of `got`'s dtype."""
    if got.shape != want.shape:
        raise GateError(f"{what} has shape {tuple(got.shape)}, expected {tuple(want.shape)}; nothing is measured")
    error = float((got.double() - want).abs().max()) if want.numel() else 0.0
    if not error <= BOUND[got.dtype]:
        raise GateError(f"{what} is off by {error:.1e}, more than {BOUND[got.dtype]:.0e}; nothing is measured")
    return error
