"""Attention over a ring as PyTorch operators, which compilers and checkpointing policies can name and leave alone.

Guarantees: `torch.compile(fullgraph=True)` traces it without a break and without running it; the operators
`torch.ops.ringattn.attention` and `attention_backward` may stand in a policy of selective checkpointing.
An operator takes tensors and numbers only. A number stands for the sequence, found when the operator runs, and one for
the agreed call, from its forward to its backward pass (docs/internals/decisions/0012).
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, Unpack
from weakref import WeakKeyDictionary, WeakValueDictionary, ref

import torch
from torch import Tensor

from ringattn import attention as calls
from ringattn.adapters.attend import as_autocast, lone_sequence
from ringattn.adapters.context import sequence_of
from ringattn.adapters.hosts import local_heads, local_sinks
from ringattn.engine.base import accumulator_dtype
from ringattn.errors import ClosedError, InputError
from ringattn.masks import from_text
from ringattn.options import AttentionKeywords, AttentionOptions, check_names, takes_options
from ringattn.ring import Ring
from ringattn.runtime.activation import attended
from ringattn.runtime.consistency import GradientNeeds, anchor, gradient_needs
from ringattn.runtime.runtime import AttentionCall
from ringattn.sequence import Sequence, sequence_with

__all__ = ["ring_attention"]

ACTIVE = 0
"""The handle that stands for the sequence that `Ring.activate` names when the operator runs."""

TICKET = HALF = 1 << 32

OPTIONS = tuple(
    (option.name, str(option.type), option.default) for option in fields(AttentionOptions) if option.name != "sinks"
)
"""Name, type and default of each option but sinks, which have a gradient and are an input of the operator."""
TENSORS = tuple(option.name for option in fields(AttentionOptions) if str(option.type).startswith("Tensor"))
FORMS = {
    "bool": "bool {}", "float": "float {}", "float | None": "float? {}", "str": "str {}",
    "Tensor | None": "Tensor? {}", "Tensor | Many[float] | None": "Tensor? {}",
    # (left, right), -1 for unbounded, or twice None.
    "Window": "SymInt? {}_left, SymInt? {}_right",
    # The text of the mask, empty for none.
    "AttentionMask | None": "str {}",
    # A seed has 64 bits and no sign, a schema's number 63 and one: the seed is the first times `HALF` plus the second.
    "int | None": "SymInt? {}_upper, SymInt? {}_lower",
}  # fmt: skip
"""The arguments of the operator for an option of each type."""
SCHEMA = (
    "(Tensor q, Tensor k, Tensor v, Tensor? sinks, SymInt handle, str gradients, "
    + ", ".join(FORMS[kind].replace("{}", name) for name, kind, _ in OPTIONS)
    + ") -> (Tensor, Tensor, Tensor)"
)


@dataclass(frozen=True, eq=False)
class _Kept:
    """A call that ran forward; its ring keeps it, and it does not keep its ring."""

    ticket: int
    ring: ref[Ring]
    call: AttentionCall


KEPT_CALLS = 1024
"""Different calls of a ring, those made last, whose backward pass may still come; there is no end to documents."""
GRAPH = 2
COMPILED_WITHOUT_GRAPH = "!its compiled code has no input that needs a gradient; call x.requires_grad_() on one"
_tickets = itertools.count()
_kept: WeakValueDictionary[int, _Kept] = WeakValueDictionary()
_kept_of: WeakKeyDictionary[Ring, dict[AttentionCall, _Kept]] = WeakKeyDictionary()


@takes_options()
def ring_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    seq: Sequence | None = None,
    **options: Unpack[AttentionKeywords],
) -> Tensor:
    """Attention of this rank's shards as one operator, compiled or not; differentiable.

    Backward receives the blocks of other ranks again: forward keeps none of them. Under torch.autocast q, k and v are
    cast as scaled_dot_product_attention casts its own.

    Compiled code is compiled once more for a second sequence, a second mask or a second dropout_seed that is given as
    an argument. Without a sequence (or a mask) it is not compiled again for another active sequence (or the mask of
    that sequence) with the same number of local tokens. sinks and alibi_slopes may be DTensors with Shard(0), and
    alibi_slopes must be a tensor.

    Args:
        q: Queries, this rank's shard, or a DTensor of it with sharded heads.
        k: Keys, like q.
        v: Values, like q.
        seq: The sequence. None: the active one, by the rule of `adapters.context.sequence_of`, found at run time.
        options: See `ringattn.options.AttentionOptions`.

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
    check_names(options)
    given: dict[str, Any] = {**options}
    if not torch.compiler.is_compiling():
        if seq is None:
            seq = sequence_of() or lone_sequence(q.shape[1])
        with seq.ring.refused_by_all():
            for name in TENSORS:
                if given.get(name) is not None:
                    given[name] = _local_tensor(name, given[name], q.shape[2])
            # What the schema of the operator would refuse on this rank alone, or take for a number, is refused here.
            AttentionOptions.of(given)
    sinks = given.get("sinks")
    out, lse, ticket = attention(
        q, k, v, sinks, ACTIVE if seq is None else seq.handle, _needs_text(q, k, v, sinks), *_serialised(given)
    )
    if not torch.compiler.is_compiling():
        attended()  # beneath the operator no mode can be left
        if torch.is_grad_enabled() and not out.requires_grad and ticket[GRAPH]:
            out = _Anchored.apply(anchor(True), q, k, v, sinks, out, lse, ticket)
    return whole(out)


def _local_tensor(name: str, value: object, heads: int) -> Tensor:
    """Return this rank's part of an option with a value per query head. Raises InputError if it is not a tensor."""
    if not isinstance(value, Tensor):
        raise InputError(f"{name} cannot be a {type(value).__name__}; give a tensor of shape (q_heads,)")
    return local_sinks(value, heads, name)


def _serialised(options: Mapping[str, Any]) -> list[Any]:
    """Return the options but sinks as the operator takes them: a tensor, numbers and texts, in the order of `OPTIONS`.

    A compiler traces this. See `SCHEMA` for the form of each type.
    """
    values: list[Any] = []
    for name, kind, default in OPTIONS:
        value = options.get(name, default)
        if kind == "Window":
            values += (None, None) if value is None else tuple(-1 if bound is None else bound for bound in value)
        elif kind == "int | None":
            values += (None, None) if value is None else (value // HALF, value % HALF)
        elif kind == "AttentionMask | None":
            values.append("" if value is None else value.text)
        else:
            values.append(value)
    return values


def _options_from(sinks: Tensor | None, values: tuple[Any, ...]) -> AttentionOptions:
    """Return the options that `_serialised` gave, with the sinks. Raises InputError for wrong values."""
    rest = iter(values)
    options: dict[str, Any] = {"sinks": sinks}
    for name, kind, _ in OPTIONS:
        value = next(rest)
        if kind == "Window":
            options[name] = (value, right) if (right := next(rest)) is not None else None
        elif kind == "int | None":
            lower = next(rest)
            options[name] = None if value is None else value * HALF + lower
        elif kind == "AttentionMask | None":
            options[name] = from_text(value) if value else None
        else:
            options[name] = value
    return AttentionOptions(**options)


def _needs_text(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None) -> str:
    """`GradientNeeds` as an operator takes it: names after each other, or "!" and the obstacle."""
    if torch.compiler.is_compiling() and torch.is_grad_enabled():
        inputs = [
            name for name, x in (("q", q), ("k", k), ("v", v), ("sinks", sinks)) if x is not None and x.requires_grad
        ]
        return " ".join(inputs) if inputs else COMPILED_WITHOUT_GRAPH
    needs = gradient_needs({"q": q, "k": k, "v": v, "sinks": sinks})
    return f"!{needs.obstacle}" if needs.obstacle else " ".join(needs.inputs)


@torch.library.custom_op("ringattn::attention", mutates_args=(), schema=SCHEMA)
def attention(
    q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, handle: int, gradients: str, *values: Any
) -> tuple[Tensor, Tensor, Tensor]:
    """Out (batch, tokens, q_heads, d_v), lse (batch, q_heads, tokens) and the ticket of the call, int64 on the host.

    The ticket is three numbers: that under which the call is kept here, times `TICKET`, plus its number on the ring;
    the bits of the seed of its dropout; and, at `GRAPH`, whether any rank needs gradients.

    `handle`: of a living sequence, or `ACTIVE`. `gradients`: see `_needs_text`. `values`: see `_serialised`. Raises
    what `Ring.attention` raises.
    """
    if handle == ACTIVE:
        seq = sequence_of() or lone_sequence(q.shape[1])
    else:
        seq = sequence_with(handle)
    ring = seq.ring
    with ring.refused_by_all():
        options = _options_from(sinks, values)

    def described() -> AttentionCall:
        call = calls.checked_call(ring, q, k, v, seq, None, options)
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
def _(q: Tensor, k: Tensor, v: Tensor, *rest: object) -> tuple[Tensor, Tensor, Tensor]:
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
    rest = [None] * (len(ctx.needs_input_grad) - 4)
    return dq, dk, dv, None if saved[3] is None else dsinks, *rest


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
