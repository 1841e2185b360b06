"""The correctness gate: a case is measured only if it is exact at a small size on the same ranks.

A baseline is any implementation of attention. The gate runs it on small random inputs and compares its output, and its
gradients if it has any, with a dense float64 softmax.
Guarantees: a wrong result, a NaN or a missing row raises `GateError`, and then no number is printed.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from ringattn.errors import RingError

BOUND = {torch.float32: 1e-5, torch.float64: 1e-10}
"""Largest absolute error against the reference, for standard normal inputs."""


class GateError(RingError):
    """The error if the result of a baseline is not exact, so that the baseline must not be measured."""


class Inputs(NamedTuple):
    """The tensors of a whole problem, (1, tokens, heads, dim) each. `dout` is the gradient of the output."""

    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor


class Answer(NamedTuple):
    """A result of attention: the output, and dq, dk and dv if the baseline has a backward pass."""

    out: Tensor
    grads: tuple[Tensor, Tensor, Tensor] | None


class Baseline(Protocol):
    """One implementation of causal attention, on this rank.

    `load` receives a whole problem and keeps this rank's part. Only `forward` and `backward` are timed. `positions` are
    the token positions of the rows of the result, `heads` its query heads, and `kv_heads` its K/V heads. `backward`
    returns None if the baseline has no backward pass.
    """

    name: str
    positions: Tensor
    heads: slice
    kv_heads: slice

    def load(self, inputs: Inputs) -> None: ...

    def forward(self) -> Tensor: ...

    def backward(self) -> tuple[Tensor, Tensor, Tensor] | None: ...


def random_inputs(length: int, heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype, seed: int = 0) -> Inputs:
    """Return a whole problem of standard normal numbers, the same on every rank."""
    generator = torch.Generator().manual_seed(seed)

    def tensor(count: int) -> Tensor:
        return torch.randn(1, length, count, head_dim, generator=generator, dtype=dtype)

    return Inputs(tensor(heads), tensor(kv_heads), tensor(kv_heads), tensor(heads))


def reference(inputs: Inputs) -> Answer:
    """Compute dense causal attention and its gradients in float64, written for clarity."""
    q, k, v = (x.double().requires_grad_() for x in inputs[:3])
    group, tokens = q.shape[2] // k.shape[2], q.shape[1]
    scores = torch.einsum("bnhd,bmhd->bhnm", q, k.repeat_interleave(group, 2)) * q.shape[3] ** -0.5
    weights = scores.masked_fill(torch.ones(tokens, tokens).triu(1).bool(), float("-inf")).softmax(-1)
    out = torch.einsum("bhnm,bmhd->bnhd", weights, v.repeat_interleave(group, 2))
    dq, dk, dv = torch.autograd.grad(out, (q, k, v), inputs.dout.double())
    return Answer(out.detach(), (dq, dk, dv))


def open_gate(baselines: Iterable[Baseline], inputs: Inputs) -> dict[str, float]:
    """Return the largest absolute error of each baseline on this rank. Raises `GateError` if a baseline is wrong."""
    expected = reference(inputs)
    assert expected.grads is not None
    errors = {}
    for baseline in baselines:
        baseline.load(inputs)
        answer = Answer(baseline.forward(), baseline.backward())
        pairs = [("out", answer.out, expected.out[:, baseline.positions, baseline.heads])]
        if answer.grads is not None:
            gradients = zip(("dq", "dk", "dv"), answer.grads, expected.grads, strict=True)
            heads_of = {"dq": baseline.heads, "dk": baseline.kv_heads, "dv": baseline.kv_heads}
            pairs += [
                (name, actual, expected_grad[:, baseline.positions, heads_of[name]])
                for name, actual, expected_grad in gradients
            ]
        errors[baseline.name] = max(_error(f"{baseline.name}: {name}", *pair) for name, *pair in pairs)
    return errors


def _error(name: str, actual: Tensor, expected: Tensor) -> float:
    """Return the largest absolute difference. Raises `GateError` if it exceeds the bound for the dtype of `actual`."""
    if actual.shape != expected.shape:
        raise GateError(
            f"{name} has shape {tuple(actual.shape)}, expected {tuple(expected.shape)}; nothing is measured"
        )
    error = float((actual.double() - expected).abs().max()) if expected.numel() else 0.0
    if not error <= BOUND[actual.dtype]:
        raise GateError(f"{name} is off by {error:.1e}, more than {BOUND[actual.dtype]:.0e}; nothing is measured")
    return error
