"""Attention over latent keys and values (MLA), which travel as latents and are expanded where they are used."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor

from ringattn.attention import (
    agreed,
    attend,
    backward_pass,
    check_last_dimension,
    check_sinks,
    dropout_seed_of,
    forward_pass,
    make_problem,
    softmax_of,
    uncast,
)
from ringattn.core.problem import Problem
from ringattn.engine.base import accumulator_dtype
from ringattn.engine.latent import LatentEngine, expand
from ringattn.errors import InputError
from ringattn.gradients import once_differentiable
from ringattn.options import AttentionOptions
from ringattn.planner.choose import choose_route, latents_are_faster
from ringattn.runtime.activation import unseen
from ringattn.runtime.call import AttentionCall
from ringattn.runtime.consistency import anchor, check_kinds
from ringattn.runtime.runtime import Runtime
from ringattn.sequence import Sequence, check_device, check_sequences

Wire = Literal["auto", "latents", "keys"]


def attend_latents(
    ring: Runtime,
    q: Tensor,
    rotary: Tensor,
    latents: Tensor,
    w_k: Tensor,
    w_v: Tensor,
    seq: Sequence,
    wire: str,
    options: AttentionOptions,
) -> tuple[Tensor, Tensor]:
    """Return (out, lse); see `Ring.latent_attention`."""
    tensors = {"q": q, "rotary": rotary, "latents": latents, "w_k": w_k, "w_v": w_v}
    with ring.refused_by_all():
        _check(ring, tensors, seq, options.sinks)
        if wire not in ("auto", "latents", "keys"):
            raise InputError(f"wire={wire!r} is not known; choose auto, latents or keys")
        problem = _problem(ring, seq, tensors, options)
        sends_latents = wire == "latents" or (
            wire == "auto" and latents_are_faster(problem, _expanded_problem(problem), options.schedule, ring.machines)
        )
    if not sends_latents:
        with uncast(q):
            keys, values = expand(latents, rotary, w_k, w_v)
        return attend(ring, q, keys, values, seq, None, options)

    def described() -> AttentionCall:
        softmax = softmax_of(options, q.shape[3], q.shape[2], 1)
        engine = ring.engine_for(q.device, q.dtype, q.shape[3], w_v.shape[1], softmax._replace(group=1))
        route = choose_route(problem, options.schedule, ring.machines)
        return AttentionCall(problem, route, softmax, LatentEngine(engine), dropout_seed_of(options, problem))

    call = agreed(ring, described, options.sinks, {**tensors, "sinks": options.sinks})
    inputs = q, rotary, latents, w_k, w_v, options.sinks
    return _LatentAttention.apply(*inputs, anchor(call.graph, *inputs), ring, call)


def _check(ring: Runtime, tensors: dict[str, Tensor], seq: Sequence, sinks: Tensor | None) -> None:
    """Raise `InputError` unless the tensors fit each other and are this rank's shards of `seq`."""
    check_sequences(ring, seq, None)
    check_kinds(tensors | {"sinks": sinks})
    q, rotary, latents, _, w_v = tensors.values()
    for name, dims in (("q", 4), ("rotary", 3), ("latents", 3), ("w_k", 3), ("w_v", 3)):
        x = tensors[name]
        check_device(ring, name, x)
        if x.dim() != dims or x.dtype != q.dtype or x.device != q.device:
            raise InputError(
                f"{name} must have {dims} dimensions and be {q.dtype} on {q.device}, as q is; got {x.dtype} of "
                f"{tuple(x.shape)} on {x.device}"
            )
    batch, _, heads, head_dim = q.shape
    tokens, latent_dim, rope = seq.counts[ring.rank], latents.shape[2], rotary.shape[2]
    expected = {
        "q": (batch, tokens, heads, head_dim),
        "rotary": (batch, tokens, rope),
        "latents": (batch, tokens, latent_dim),
        "w_k": (heads, head_dim - rope, latent_dim),
        "w_v": (heads, w_v.shape[1], latent_dim),
    }
    for name, shape in expected.items():
        if tuple(tensors[name].shape) != shape:
            raise InputError(f"{name} must have the shape {shape}, got {tuple(tensors[name].shape)}")
    check_last_dimension("", "q", q)
    if ring.kv_wire_dtype is not None:
        raise InputError(f"kv_wire_dtype={ring.kv_wire_dtype} rounds K and V; latents are sent in their own dtype only")
    check_sinks("", sinks, heads, q.device)


def _problem(ring: Runtime, seq: Sequence, tensors: dict[str, Tensor], options: AttentionOptions) -> Problem:
    """Return the problem in which latents are sent."""
    q, rotary, latents, _, w_v = tensors.values()
    name = str(q.dtype).removeprefix("torch.")
    sizes = q.shape[0], q.shape[2], 1, q.shape[3], w_v.shape[1]
    problem = make_problem(ring, seq, None, *sizes, name, options.pairs)
    return replace(problem, latent_dims=(rotary.shape[2], latents.shape[2]))


def _expanded_problem(problem: Problem) -> Problem:
    """Return the same problem with K and V of all heads on the wire."""
    return replace(problem, kv_heads=problem.q_heads, latent_dims=None)


class _LatentAttention(torch.autograd.Function):
    """The autograd function from (q, rotary, latents, w_k, w_v, sinks) to (out, lse). Every rank calls its backward."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        rotary: Tensor,
        latents: Tensor,
        w_k: Tensor,
        w_v: Tensor,
        sinks: Tensor | None,
        _: Tensor | None,
        ring: Runtime,
        call: AttentionCall,
    ) -> tuple[Tensor, Tensor]:
        assert isinstance(call.engine, LatentEngine)
        engine = LatentEngine(call.engine.engine, w_k.detach(), w_v.detach())
        with unseen():
            out, lse, kept = forward_pass(
                ring, call, q, rotary[:, :, None], latents[:, :, None], sinks, call.graph, engine
            )
        ctx.ring, ctx.call = ring, call
        ctx.save_for_backward(q, rotary, latents, w_k, w_v, sinks, out, lse, kept)
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Tensor | None, ...]:
        with ctx.ring.refused_by_all():  # autograd raises here if a saved tensor was changed in place or freed
            q, rotary, latents, w_k, w_v, sinks, out, lse, kept = ctx.saved_tensors
        sums = tuple(torch.zeros_like(w, dtype=accumulator_dtype(w.dtype)) for w in (w_k, w_v))
        engine = LatentEngine(ctx.call.engine.engine, w_k, w_v, sums=sums)
        dq, d_rotary, d_latents, d_sinks = backward_pass(
            ctx.ring, ctx.call, q, rotary[:, :, None], latents[:, :, None], sinks, out, lse, kept, dout, dlse, engine
        )
        d_weights = (x.to(q.dtype) for x in sums)
        return dq, d_rotary[:, :, 0], d_latents[:, :, 0], *d_weights, d_sinks, None, None, None
