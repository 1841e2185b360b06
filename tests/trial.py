"""One attention call with its gradients, computed by the oracle and by a ring of threads.

Not covered: schedules, tiles, and tolerances.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

import ringattn
from ringattn.masks import AttentionMask
from ringattn.testing import run_ranks
from tests import oracle, philox
from tests.poison import unset_is_nan

NAMES = ("out", "lse", "dq", "dk", "dv", "dsinks")
SEED = 0x5EED_0000_0007
"""The seed of dropout; both halves of the key are used."""
Results = dict[str, Tensor]
"""Whole tensors by name: out, lse, dq, dk, dv, and dsinks if there are sinks."""


class Trial(NamedTuple):
    """The settings of a call on random inputs.

    `lse`: the loss also uses lse. `strided`: q, k and v are views into larger tensors.
    """

    tokens: int = 37
    causal: bool = False
    window: tuple[int | None, int | None] | None = None
    documents: tuple[int, ...] | None = None
    batch: int = 1
    heads: tuple[int, int] = (2, 2)
    dims: tuple[int, int] = (8, 8)
    scale: float | None = None
    softcap: float | None = None
    sinks: bool = False
    lse: bool = False
    strided: bool = False
    within: AttentionMask | None = None
    kv_tokens: int | None = None
    kv_documents: tuple[int, ...] | None = None
    kv_layout: str = "contiguous"
    alibi: bool = False
    dropout: float = 0.0

    @property
    def cross(self) -> bool:
        """Whether K and V belong to another sequence than Q."""
        return self.kv_tokens is not None

    @property
    def options(self) -> dict[str, Any]:
        """The keyword arguments of `Ring.attention` except tensors and sequences."""
        alibi = {"alibi_slopes": torch.tensor(self.slopes, dtype=torch.float64)} if self.alibi else {}
        dropout = {"dropout_p": self.dropout, "dropout_seed": SEED} if self.dropout else {}
        return {**self.pairs, "scale": self.scale, "softcap": self.softcap, **alibi, **dropout}

    @property
    def slopes(self) -> list[float]:
        """Slopes of ALiBi, different for each head. That of head 1 is negative and so favours distant keys."""
        return [0.3 / (1 + head) if head != 1 else -0.05 for head in range(self.heads[0])]

    @property
    def pairs(self) -> dict[str, Any]:
        """The options that select which queries attend to which keys. A mask is included only if there is one."""
        mask = {} if self.within is None else {"mask": self.within}
        return {"causal": self.causal, "window": self.window, **mask}


class Inputs(NamedTuple):
    """Whole tensors of a trial: unit normal numbers, rounded to one dtype."""

    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor
    dlse: Tensor
    sinks: Tensor | None


@lru_cache
def inputs(trial: Trial, dtype: torch.dtype) -> Inputs:
    """Return the inputs of a trial. They are the same at every call and, up to rounding, in every dtype."""
    generator = torch.Generator().manual_seed(7)
    q_tokens, k_tokens = trial.tokens, trial.tokens if trial.kv_tokens is None else trial.kv_tokens
    (q_heads, kv_heads), (d_k, d_v) = trial.heads, trial.dims

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, dtype=torch.float64, generator=generator).to(dtype)

    batch = trial.batch
    return Inputs(
        normal(batch, q_tokens, q_heads, d_k),
        normal(batch, k_tokens, kv_heads, d_k),
        normal(batch, k_tokens, kv_heads, d_v),
        normal(batch, q_tokens, q_heads, d_v),
        normal(batch, q_heads, q_tokens),
        normal(q_heads) if trial.sinks else None,
    )


@lru_cache
def reference(trial: Trial, dtype: torch.dtype) -> Results:
    """Compute the results with the oracle in float64, from inputs rounded to `dtype`."""
    trial_inputs = inputs(trial, dtype)
    leaves = [x.double().clone().requires_grad_() for x in (trial_inputs.q, trial_inputs.k, trial_inputs.v)]
    sinks = None if trial_inputs.sinks is None else trial_inputs.sinks.double().clone().requires_grad_()
    lists = [None if cuts is None else list(cuts) for cuts in (trial.documents, trial.kv_documents)]
    allowed = oracle.allowed_mask(
        trial_inputs.q.shape[1], trial_inputs.k.shape[1], cu_seqlens=lists[0], kv_cu_seqlens=lists[1], **trial.pairs
    )
    scale = trial.dims[0] ** -0.5 if trial.scale is None else trial.scale
    bias = oracle.alibi(trial.slopes, trial_inputs.q.shape[1], trial_inputs.k.shape[1], *lists) if trial.alibi else None
    kept = None
    if trial.dropout:
        kept = philox.kept(
            trial.batch, trial.heads[0], trial_inputs.q.shape[1], trial_inputs.k.shape[1], SEED, trial.dropout
        )
    out, lse = oracle.attention(*leaves, allowed, scale, trial.softcap, sinks, bias, kept)
    _loss(trial, out, lse, trial_inputs.dout.double(), trial_inputs.dlse.double()).backward()
    results = {"out": out.detach(), "lse": lse.detach()}
    results |= {name: x.grad for name, x in zip(("dq", "dk", "dv"), leaves, strict=True)}
    if sinks is not None:
        results["dsinks"] = sinks.grad
    return results


def _loss(trial: Trial, out: Tensor, lse: Tensor, dout: Tensor, dlse: Tensor) -> Tensor:
    if trial.strided:  # a gradient whose last dimension is not contiguous
        out, dout = out.transpose(1, 3), dout.transpose(1, 3).contiguous()
    loss = (out * dout).sum()
    return loss + (torch.where(lse.isinf(), 0, lse) * dlse).sum() if trial.lse else loss


def on_rank(
    ring: ringattn.Ring, trial: Trial, layout: str, schedule: str, dtype: torch.dtype, placed_for: str | None = None
) -> Results:
    """Run the trial on this rank. Return its shards of the results, and the token order of the concatenated shards.

    `placed_for`: the schedule for which the layout places tokens; None: the default.
    """
    trial_inputs = inputs(trial, dtype)
    length = None if trial.documents else trial.tokens
    placed, options = {} if placed_for is None else {"schedule": placed_for}, trial.options
    if layout == "mask":
        placed |= {"mask": options.pop("mask"), "for_": "causal" if trial.causal else "full"}
    seq = ring.sequence(length, cu_seqlens=trial.documents, layout=layout, **placed)
    kv_seq = None
    if trial.cross:
        kv_seq = ring.sequence(trial.kv_tokens, cu_seqlens=trial.kv_documents, layout=trial.kv_layout)
    owners = seq, kv_seq or seq, kv_seq or seq
    leaves = [
        _leaf(owner.shard(x), trial.strided)
        for owner, x in zip(owners, (trial_inputs.q, trial_inputs.k, trial_inputs.v), strict=True)
    ]
    sinks = None if trial_inputs.sinks is None else trial_inputs.sinks.clone().requires_grad_()
    out, lse = ring.attention(*leaves, seq, kv_seq=kv_seq, schedule=schedule, sinks=sinks, return_lse=True, **options)
    assert out.dtype == dtype and lse.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    _loss(trial, out, lse, seq.shard(trial_inputs.dout), seq.shard(trial_inputs.dlse, dim=2)).backward()
    results = {"out": out.detach(), "lse": lse.detach()}
    results |= {name: x.grad for name, x in zip(("dq", "dk", "dv"), leaves, strict=True)}
    assert all(x.grad.dtype == dtype for x in leaves)
    if sinks is not None:
        results["dsinks"] = sinks.grad
    order = {name: torch.from_numpy(owner.layout.order()) for name, owner in zip(("q", "k", "v"), owners, strict=True)}
    return results | order


def _leaf(x: Tensor, strided: bool) -> Tensor:
    """Return a leaf that requires a gradient: a copy, or a view with gaps and with tokens before batches."""
    if not strided:
        return x.clone().requires_grad_()
    batch, tokens, heads, dim = x.shape
    larger = x.new_full((tokens, batch, heads + 1, dim + 3), float("nan"))
    view = larger.transpose(0, 1)[:, :, 1:, :dim]
    view.copy_(x)
    return view.detach().requires_grad_()


def joined(parts: list[Results]) -> Results:
    """Join the shards of all ranks to whole tensors in token order; sum the gradient of the sinks.

    `parts`: the results of each rank.
    """
    results = {}
    for name, rows, dim in (("out", "q", 1), ("lse", "q", 2), ("dq", "q", 1), ("dk", "k", 1), ("dv", "v", 1)):
        shards = torch.cat([part[name] for part in parts], dim)
        results[name] = torch.empty_like(shards).index_copy_(dim, parts[0][rows], shards)
    if "dsinks" in parts[0]:
        results["dsinks"] = torch.stack([part["dsinks"] for part in parts]).sum(0)
    return results


def run(
    trial: Trial, ranks: int, layout: str, schedule: str, dtype: torch.dtype = torch.float64, **options: Any
) -> Results:
    """Run the trial on a ring of threads, with poisoned memory. Return the whole results."""
    options = {"engine": "plain", "timeout_s": 30.0, "poison": True, **options}
    with unset_is_nan():
        return joined(run_ranks(ranks, lambda ring: on_rank(ring, trial, layout, schedule, dtype), **options))


def greatest_error(results: Results, expected: Results) -> float:
    """Return the largest absolute error of all results.

    It is infinite if shapes differ, if a result is NaN, or if only one of two values is infinite.
    """
    worst = 0.0
    for name, x in results.items():
        blind = expected[name].isinf()
        if not torch.equal(blind, x.isinf()) or x.isnan().any() or x.shape != expected[name].shape:
            return float("inf")
        difference = (x.double() - expected[name]).abs().masked_fill(blind, 0)
        worst = max(worst, float(difference.max()) if x.numel() else 0.0)
    return worst


def relative_error(actual: Tensor, expected: Tensor) -> float:
    """Return the Frobenius norm of the error divided by that of the reference."""
    return float((actual.double() - expected).norm() / expected.norm())
