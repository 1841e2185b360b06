"""Attention over a ring as PyTorch operators, which compilers and checkpointing policies can name and leave alone.

Guarantees: `torch.compile(fullgraph=True)` traces it without a break and without running it; the operators
`torch.ops.ringattn.attention` and `attention_backward` may stand in a policy of selective checkpointing.
An operator takes tensors and numbers only. A number stands for the sequence, found when the operator runs, and one for
the agreed call, from its forward to its backward pass (docs/internals/decisions/0012).
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from types import NoneType
from typing import Any
from weakref import WeakKeyDictionary, WeakValueDictionary, ref

import torch
from torch import Tensor

from ringattn import attention as calls
from ringattn.adapters.attend import as_autocast, lone_sequence
from ringattn.adapters.context import sequence_of
from ringattn.adapters.tensor_parallel import local_heads, local_sinks
from ringattn.core.mask import make_mask
from ringattn.engine.softmax_state import accumulator_dtype
from ringattn.errors import ClosedError, InputError
from ringattn.masks import AttentionMask, from_text, refuse_removed
from ringattn.ring import Ring
from ringattn.runtime.activation import attended
from ringattn.runtime.consistency import GradientNeeds, anchor, gradient_needs
from ringattn.runtime.runtime import AttentionCall
from ringattn.runtime.spec import AttentionSpec, Window
from ringattn.sequence import Sequence, sequence_with

__all__ = ["ring_attention"]

ACTIVE = 0
"""The handle that stands for the sequence that `Ring.activate` names when the operator runs."""


@dataclass(frozen=True, eq=False)
class _Kept:
    """A call that ran forward; its ring keeps it, and it does not keep its ring."""

    ticket: int
    ring: ref[Ring]
    call: AttentionCall


KEPT_CALLS = 1024
"""Different calls of a ring, those made last, whose backward pass may still come; there is no end to documents."""
TICKET = HALF = 1 << 32
GRAPH = 2
COMPILED_WITHOUT_GRAPH = "!its compiled code has no input that needs a gradient; call x.requires_grad_() on one"
_tickets = itertools.count()
_kept: WeakValueDictionary[int, _Kept] = WeakValueDictionary()
_kept_of: WeakKeyDictionary[Ring, dict[AttentionCall, _Kept]] = WeakKeyDictionary()


def ring_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    seq: Sequence | None = None,
    *,
    causal: bool = False,
    window: Window = None,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    mask: AttentionMask | None = None,
    dropout_p: float = 0.0,
    dropout_seed: int | None = None,
    schedule: str = "auto",
    **removed: Any,
) -> Tensor:
    """Attention of this rank's shards as one operator, compiled or not; differentiable.

    Keeps nothing that came from other ranks for backward. Under torch.autocast q, k and v are cast as
    scaled_dot_product_attention casts its own. With a sequence given, compiled code is compiled once more at the second
    sequence; with None it is not compiled again for another one with as many local tokens.

    Args:
        q: Queries, this rank's shard, or a DTensor of it with sharded heads.
        k: Keys, like q.
        v: Values, like q.
        seq: The sequence. None: the active one, by the rule of `adapters.context.sequence_of`, found at run time.
        causal: As in `Ring.attention`, and so are the other options.
        window: (left, right) keys besides the query. None or -1: unbounded.
        scale: Factor of the scores. None: 1 / sqrt(d_k).
        softcap: Scores become softcap * tanh(score / softcap). None: no cap.
        sinks: Logits that take weight and give no value, one for each query head, or a DTensor with Shard(0).
        alibi_slopes: ALiBi, a tensor of one number for each query head, or a DTensor with Shard(0). None: no bias.
        mask: A mask of `ringattn.masks` besides causal and window, of which compiled code is a constant. None: that of
            the sequence (`Sequence.with_mask`), found at run time; compiled code is not compiled again for another one.
        dropout_p: Each weight is dropped with this probability.
        dropout_seed: With dropout_p: what is dropped follows from it and from the places of pairs. Where it is an
            argument of the compiled function, the second one is compiled once more, and those after it are not.
        schedule: How blocks travel.
        removed: Options that masks have replaced: refused, with the line to write instead.

    Shape:
        q: (batch, tokens, q_heads, d_k)
        k: (batch, tokens, kv_heads, d_k)
        v: (batch, tokens, kv_heads, d_v)
        sinks: (q_heads,)
        alibi_slopes: (q_heads,)

    Returns:
        (batch, tokens, q_heads, d_v) in q's dtype, under autocast in its; a DTensor where q is one.

    Raises:
        InputError: What `Ring.attention` and `sequence_of` raise, or the heads of DTensors do not fit each other.
        UnsupportedError: A DTensor has other placements than sharded heads, or the engine does not compute this call.
        RingError: What else `Ring.attention` raises.

    Example:
        compiled = torch.compile(lambda q: ring_attention(q, q, q, causal=True), fullgraph=True)
        with ring.activate(seq):
            out = compiled(q)
    """
    (q, k, v), whole = local_heads((q, k, v), 2)
    q, k, v = as_autocast(q), as_autocast(k), as_autocast(v)
    if not torch.compiler.is_compiling():
        if seq is None:
            seq = sequence_of() or lone_sequence(q.shape[1])
        with seq.ring.refused_by_all():
            refuse_removed(removed)
            _check_options(scale=scale, softcap=softcap, sinks=sinks, alibi_slopes=alibi_slopes, dropout_p=dropout_p,
                           dropout_seed=dropout_seed, schedule=schedule)  # fmt: skip
            make_mask(seq.length, seq.length, causal=causal, window=window, mask=mask, documents=seq.documents,
                      kv_documents=seq.documents)  # fmt: skip
            sinks = None if sinks is None else local_sinks(sinks, q.shape[2])
            if alibi_slopes is not None:
                alibi_slopes = local_sinks(alibi_slopes, q.shape[2], "alibi_slopes")
                AttentionSpec(alibi_slopes=alibi_slopes)  # refuses those that want a gradient
    left, right = (None, None) if window is None else (-1 if bound is None else bound for bound in window)
    # A seed has 64 bits and no sign, a schema's number 63 and one.
    upper, lower = (None, None) if dropout_seed is None else (dropout_seed // HALF, dropout_seed % HALF)
    out, lse, ticket = attention(
        q, k, v, sinks, alibi_slopes, ACTIVE if seq is None else seq.handle, causal, left, right,
        "" if mask is None else mask.text, scale, softcap, dropout_p, upper, lower, schedule,
        _needs_text(q, k, v, sinks),
    )  # fmt: skip
    if not torch.compiler.is_compiling():
        attended()  # beneath the operator no mode can be left
        if torch.is_grad_enabled() and not out.requires_grad and ticket[GRAPH]:
            out = _Anchored.apply(anchor(True), q, k, v, sinks, out, lse, ticket)
    return whole(out)


def _needs_text(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None) -> str:
    """`GradientNeeds` as an operator takes it: names after each other, or "!" and the obstacle."""
    if torch.compiler.is_compiling() and torch.is_grad_enabled():
        inputs = [
            name for name, x in (("q", q), ("k", k), ("v", v), ("sinks", sinks)) if x is not None and x.requires_grad
        ]
        return " ".join(inputs) if inputs else COMPILED_WITHOUT_GRAPH
    needs = gradient_needs({"q": q, "k": k, "v": v, "sinks": sinks})
    return f"!{needs.obstacle}" if needs.obstacle else " ".join(needs.inputs)


def _check_options(**options: Any) -> None:
    """Raise `InputError` for what the operator's schema would refuse, on this rank alone, or take for a number."""
    number: Any = (int, float)
    kinds: dict[str, Any] = {"dropout_p": number, "dropout_seed": (int, NoneType), "schedule": str}
    kinds |= dict.fromkeys(("scale", "softcap"), (*number, NoneType))
    kinds |= dict.fromkeys(("sinks", "alibi_slopes"), (Tensor, NoneType))
    for name, given in options.items():
        if isinstance(given, bool) or not isinstance(given, kinds[name]):
            raise InputError(f"{name} cannot be a {type(given).__name__}")


@torch.library.custom_op("ringattn::attention", mutates_args=())
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor | None,
    alibi_slopes: Tensor | None,
    handle: int,
    causal: bool,
    left: int | None,
    right: int | None,
    mask: str,
    scale: float | None,
    softcap: float | None,
    dropout_p: float,
    upper_seed: int | None,
    lower_seed: int | None,
    schedule: str,
    gradients: str,
) -> tuple[Tensor, Tensor, Tensor]:
    """Out (batch, tokens, q_heads, d_v), lse (batch, q_heads, tokens) and the ticket of the call, int64 on the host.

    The ticket is three numbers: that under which the call is kept here, times `TICKET`, plus its number on the ring;
    the bits of the seed of its dropout; and, at `GRAPH`, whether any rank needs gradients.

    `handle`: of a living sequence, or `ACTIVE`. `left`, `right`: the window, -1 for unbounded, None for none.
    `mask`: the text of a mask, empty for none. `upper_seed`, `lower_seed`: the seed is the first times `HALF` plus the
    second. `gradients`: see `_needs_text`. Raises what `Ring.attention` raises.
    """
    if handle == ACTIVE:
        seq = sequence_of() or lone_sequence(q.shape[1])
    else:
        seq = sequence_with(handle)
    ring = seq.ring
    spec = AttentionSpec.banded(
        causal, None if left is None else (left, right), sinks=sinks, mask=from_text(mask) if mask else None,
        scale=scale, softcap=softcap, alibi_slopes=alibi_slopes, dropout_p=dropout_p,
        dropout_seed=None if upper_seed is None or lower_seed is None else upper_seed * HALF + lower_seed,
        schedule=schedule,
    )  # fmt: skip

    def described() -> AttentionCall:
        call = calls.checked_call(ring, q, k, v, seq, None, spec)
        # What is kept for backward has a size that only the plan knows, and a compiler asks for sizes before.
        return replace(call, route=call.route.keeping_nothing())

    obstacle = gradients.removeprefix("!") if gradients.startswith("!") else ""
    needs = GradientNeeds(() if obstacle else tuple(gradients.split()), obstacle)
    call = calls.agreed(ring, described, sinks, needs)
    out, lse, _ = calls.forward_pass(ring, call, q, k, v, sinks, keep=False)
    signed = call.dropout_seed - (HALF**2 if call.dropout_seed >= HALF**2 // 2 else 0)
    ticket = torch.tensor([_ticket(ring, call) * TICKET + call.number, signed, call.graph])
    return _row_first(out).detach(), lse.contiguous(), ticket


@torch.library.custom_op("ringattn::attention_backward", mutates_args=())
def attention_backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor | None,
    out: Tensor,
    lse: Tensor,
    ticket: Tensor,
    dout: Tensor | None,
    dlse: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The gradients of q, k, v and sinks, the last of no elements without sinks. Raises what backward raises."""
    place_and_number, signed, _ = ticket.tolist()
    place, number = divmod(place_and_number, TICKET)
    kept = _kept.get(place)
    ring = None if kept is None else kept.ring()
    if kept is None or ring is None:
        raise ClosedError(
            "the ring of this forward pass is gone; keep it open until backward is done, with fewer than "
            f"{KEPT_CALLS} calls over other sequences in between"
        )
    # `_kept` has one for all calls that are alike but for their seeds.
    call = replace(kept.call, number=number, dropout_seed=signed % HALF**2)
    dq, dk, dv, dsinks = calls.backward_pass(ring, call, q, k, v, sinks, out, lse, None, dout, dlse)
    return _row_first(dq), dk.contiguous(), dv.contiguous(), q.new_empty(0) if dsinks is None else dsinks


def _ticket(ring: Ring, call: AttentionCall) -> int:
    calls, call = _kept_of.setdefault(ring, {}), replace(call, dropout_seed=0)
    kept = calls.pop(call, None)
    if kept is None:
        kept = _Kept(next(_tickets), ref(ring), call)
        _kept[kept.ticket] = kept
    calls[call] = kept  # the last one now
    if len(calls) > KEPT_CALLS:
        del calls[next(iter(calls))]
    return kept.ticket


def _row_first(x: Tensor) -> Tensor:
    """With the memory of (tokens, batch, heads, dim), which the compiler is told; the engines' tensors have it."""
    return x.transpose(0, 1).contiguous().transpose(0, 1)


@attention.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *options: object) -> tuple[Tensor, Tensor, Tensor]:
    batch, tokens, heads, _ = q.shape
    out = q.new_empty(tokens, batch, heads, v.shape[3]).transpose(0, 1)
    lse = q.new_empty(batch, heads, tokens, dtype=accumulator_dtype(q.dtype))
    return out, lse, torch.empty(3, dtype=torch.int64)


@attention_backward.register_fake
def _(
    q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, out: Tensor, lse: Tensor, ticket: Tensor,
    dout: Tensor | None, dlse: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    batch, tokens, heads, dim = q.shape
    dq = q.new_empty(tokens, batch, heads, dim).transpose(0, 1)
    return dq, k.new_empty(k.shape), v.new_empty(v.shape), q.new_empty(0) if sinks is None else sinks.new_empty(heads)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    q, k, v, sinks, *_ = inputs
    ctx.save_for_backward(q, k, v, sinks, *output)
    ctx.mark_non_differentiable(output[2])
    ctx.set_materialize_grads(False)


def _gradients(ctx: Any, dout: Tensor | None, dlse: Tensor | None, _: None) -> tuple[Tensor | None, ...]:
    *saved, out, lse, ticket = ctx.saved_tensors
    dq, dk, dv, dsinks = attention_backward(*saved, out, lse, ticket, dout, dlse)
    options = [None] * (len(ctx.needs_input_grad) - 4)
    return dq, dk, dv, None if saved[3] is None else dsinks, *options


attention.register_autograd(_gradients, setup_context=_save)


class _Anchored(torch.autograd.Function):
    """The output of an eager call in which other ranks alone need gradients; see `anchor`."""

    @staticmethod
    def forward(ctx: Any, _: Tensor, *saved: Tensor | None) -> Tensor:
        ctx.save_for_backward(*saved)
        out = saved[4]
        assert out is not None
        return out.detach()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dout: Tensor) -> tuple[None, ...]:
        attention_backward(*ctx.saved_tensors, dout, None)
        return (None,) * 8
