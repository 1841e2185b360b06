"""Attention over a ring as PyTorch operators, which compilers treat as opaque and checkpointing policies can name.

An operator takes tensors, numbers and texts only. So a number (the handle) stands for the sequence and is resolved when
the operator runs. Another number (the ticket) leads from the backward pass to the call that forward agreed on
(docs/internals/decisions/0012).

Guarantees: `torch.compile(fullgraph=True)` traces it without a break and without running it. Compiled code runs every
attention of the traced code, also if no result is used. A policy of selective checkpointing may name the operators
`torch.ops.ringattn.attention` and `attention_backward`.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, Unpack
from weakref import WeakKeyDictionary, WeakValueDictionary, ref

import torch
from torch import Tensor
from torch.fx.node import has_side_effect

from ringattn import attention as calls
from ringattn.adapters.attend import as_autocast, lone_sequence
from ringattn.adapters.context import sequence_of
from ringattn.adapters.hosts import local_heads, local_sinks
from ringattn.engine.base import accumulator_dtype
from ringattn.errors import ClosedError, InputError
from ringattn.gradients import once_differentiable
from ringattn.masks import from_text
from ringattn.options import AttentionKeywords, AttentionOptions, check_names, takes_options
from ringattn.ring import Ring
from ringattn.runtime.activation import attended
from ringattn.runtime.consistency import GradientNeeds, anchor, gradient_needs
from ringattn.runtime.runtime import AttentionCall
from ringattn.sequence import Sequence, sequence_with

__all__ = ["ring_attention"]

ACTIVE = 0
"""The handle for the sequence that is active when the operator runs."""

TICKET = HALF = 1 << 32

OPTIONS = tuple(
    (option.name, str(option.type), option.default) for option in fields(AttentionOptions) if option.name != "sinks"
)
"""Name, type and default of each option except sinks, which have a gradient and so are an input of the operator."""
TENSORS = tuple(option.name for option in fields(AttentionOptions) if str(option.type).startswith("Tensor"))
FORMS = {
    "bool": "bool {}", "float": "float {}", "float | None": "float? {}", "str": "str {}",
    "Tensor | None": "Tensor? {}", "Tensor | Many[float] | None": "Tensor? {}",
    # The two sides of the window, where -1 is unbounded, or None for both.
    "Window": "SymInt? {}_left, SymInt? {}_right",
    # The text of the mask. An empty text means no mask.
    "AttentionMask | None": "str {}",
    # A seed has 64 bits and no sign, but an int of a schema is signed. So a seed is passed as upper * HALF + lower.
    "int | None": "SymInt? {}_upper, SymInt? {}_lower",
}  # fmt: skip
"""For each type of option, the arguments of the operator that carry it."""
SCHEMA = (
    "(Tensor q, Tensor k, Tensor v, Tensor? sinks, SymInt handle, str gradients, "
    + ", ".join(FORMS[kind].replace("{}", name) for name, kind, _ in OPTIONS)
    + ") -> (Tensor, Tensor, Tensor)"
)


@dataclass(frozen=True, eq=False)
class _Kept:
    """A call that ran forward. The ring keeps this object alive, but the object refers to the ring weakly."""

    ticket: int
    ring: ref[Ring]
    call: AttentionCall


KEPT_CALLS = 1024
"""Limit, per ring, of recent calls whose backward pass may still run. Calls differ, for example, in documents."""
GRAPH = 2
"""The index, in a ticket, of the flag that some rank needs gradients."""
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
    """Compute attention of this rank's shards as one operator, compiled or not; differentiable.

    Backward receives the blocks of other ranks again, because forward keeps none of them. Under torch.autocast, q, k
    and v are cast as scaled_dot_product_attention casts its inputs.

    Code is recompiled for a second sequence, mask or dropout_seed that is passed as an argument. Without these
    arguments, it is not recompiled for another active sequence (or its mask) with the same number of local tokens.
    The options sinks and alibi_slopes may be DTensors that are sharded by head, Shard(0). Unlike in `Ring.attention`,
    alibi_slopes must be a tensor.

    Args:
        q: Queries, this rank's shard, or a DTensor of it with sharded heads.
        k: Keys, like q.
        v: Values, like q.
        seq: The sequence. None: the result of `adapters.context.sequence_of` when the operator runs.
        options: See `ringattn.options.AttentionOptions`.

    Shape:
        q: (batch, tokens, q_heads, d_k)
        k: (batch, tokens, kv_heads, d_k)
        v: (batch, tokens, kv_heads, d_v)
        sinks: (q_heads,)
        alibi_slopes: (q_heads,)

    Returns:
        (batch, tokens, q_heads, d_v) in q's dtype, or autocast's where that is on; a DTensor if q is one.

    Raises:
        InputError: What `Ring.attention` and `sequence_of` raise, or the heads of DTensors do not match.
        UnsupportedError: A DTensor has other placements than sharded heads, or the engine does not compute this call.
        RingError: Other errors of `Ring.attention`.

    Example:
        compiled = torch.compile(lambda q: ring_attention(q, q, q, causal=True), fullgraph=True)
        with ring.activate(seq):
            out = compiled(q)
    """
    (q, k, v), whole = local_heads((q, k, v), 2)
    q, k, v = as_autocast(q), as_autocast(k), as_autocast(v)
    check_names(options)
    arguments: dict[str, Any] = {**options}
    if not torch.compiler.is_compiling():
        if seq is None:
            seq = sequence_of() or lone_sequence(q.shape[1])
        with seq.ring.refused_by_all():
            for name in TENSORS:
                if arguments.get(name) is not None:
                    arguments[name] = _local_tensor(name, arguments[name], q.shape[2])
            # Validate here, so that all ranks raise: the operator's schema would raise on this rank only, or convert.
            AttentionOptions.of(arguments)
    sinks = arguments.get("sinks")
    # An operator takes no objects, so the sequence, the mask and other options are passed as plain values.
    out, lse, ticket = attention(
        q, k, v, sinks, ACTIVE if seq is None else seq.handle, _needs_text(q, k, v, sinks), *_serialised(arguments)
    )
    if not torch.compiler.is_compiling():
        attended()  # not inside the operator, because a caller's dispatch mode cannot be exited there
        if torch.is_grad_enabled() and not out.requires_grad and ticket[GRAPH]:
            # Only other ranks need gradients. This rank has to take part in their backward pass all the same.
            out = _Anchored.apply(anchor(True), q, k, v, sinks, out, lse, ticket)
    return whole(out)


def _local_tensor(name: str, value: object, heads: int) -> Tensor:
    """Return this rank's part of an option with a value per query head. Raises InputError if it is not a tensor."""
    if not isinstance(value, Tensor):
        raise InputError(f"{name} cannot be a {type(value).__name__}; give a tensor of shape (q_heads,)")
    return local_sinks(value, heads, name)


def _serialised(options: Mapping[str, Any]) -> list[Any]:
    """Return the options except sinks in the order of `OPTIONS`, in the form that the operator takes (see `FORMS`).

    A compiler traces this function, so it must not look into tensors.
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
    """Rebuild the options from the sinks and the values of `_serialised`. Raises InputError for wrong values."""
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
    """Return `GradientNeeds` as a text: the names of the inputs, or "!" and the obstacle."""
    # Under a compiler, `requires_grad` is all that is known: the graph of this call does not exist yet.
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
    """Return out (batch, tokens, q_heads, d_v), lse (batch, q_heads, tokens) and the call's ticket, int64 on the host.

    The ticket is three numbers: the key of the kept call, times `TICKET`, plus the call's number on the ring; the bits
    of its dropout seed; and, at index `GRAPH`, whether any rank needs gradients.

    `handle`: the handle of a living sequence, or `ACTIVE`. `gradients`: see `_needs_text`. `values`: see `_serialised`.
    Raises what `Ring.attention` raises.
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
        # A compiler needs the sizes of all outputs while it traces, but only the plan knows how much is kept. Keep
        # none.
        return replace(call, route=call.route.keeping_nothing())

    obstacle = gradients.removeprefix("!") if gradients.startswith("!") else ""
    needs = GradientNeeds(() if obstacle else tuple(gradients.split()), obstacle)
    # All ranks compare their calls here, on the host, before any tensor moves.
    call = calls.agreed(ring, described, sinks, needs)
    out, lse, _ = calls.forward_pass(ring, call, q, k, v, sinks, keep=False)
    # int64 has no room for an unsigned 64-bit seed: store its two's complement.
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
    """Return the gradients of q, k, v and sinks, the last one empty without sinks. Raises like `Ring.attention`."""
    key_and_number, signed, _ = ticket.tolist()
    key, number = divmod(key_and_number, TICKET)
    kept = _kept.get(key)
    ring = None if kept is None else kept.ring()
    if kept is None or ring is None:
        raise ClosedError(
            "the ring of this forward pass no longer exists, or the call was evicted; keep the ring open until "
            f"backward is done, with fewer than {KEPT_CALLS} calls over other sequences in between"
        )
    # `_kept` has one entry for calls that differ only in their numbers and seeds. The ticket restores both.
    call = replace(kept.call, number=number, dropout_seed=signed % HALF**2)
    dq, dk, dv, dsinks = calls.backward_pass(ring, call, q, k, v, sinks, out, lse, None, dout, dlse)
    return _row_first(dq), dk.contiguous(), dv.contiguous(), q.new_empty(0) if dsinks is None else dsinks


def _ticket(ring: Ring, call: AttentionCall) -> int:
    """Keep the call for backward, and return its key. The least recently made call is evicted first."""
    # Seeds differ at every call but plans do not, so calls are kept without their seeds.
    calls, call = _kept_of.setdefault(ring, {}), replace(call, dropout_seed=0)
    kept = calls.pop(call, None)
    if kept is None:
        kept = _Kept(next(_tickets), ref(ring), call)
        _kept[kept.ticket] = kept
    calls[call] = kept  # reinserted at the end
    if len(calls) > KEPT_CALLS:
        del calls[next(iter(calls))]
    return kept.ticket


def _row_first(x: Tensor) -> Tensor:
    """Return `x` with tokens outermost in memory.

    The fake operators below promise these strides to the compiler. The engines' tensors have them already, so this
    rarely copies.
    """
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
    # An absent gradient stays None, so that backward does not compute with zeros for lse.
    ctx.set_materialize_grads(False)


@once_differentiable
def _gradients(ctx: Any, dout: Tensor | None, dlse: Tensor | None, _: None) -> tuple[Tensor | None, ...]:
    *saved, out, lse, ticket = ctx.saved_tensors
    dq, dk, dv, dsinks = attention_backward(*saved, out, lse, ticket, dout, dlse)
    rest = [None] * (len(ctx.needs_input_grad) - 4)
    return dq, dk, dv, None if saved[3] is None else dsinks, *rest


attention.register_autograd(_gradients, setup_context=_save)

# Compilers remove pure operators without a used result. A rank that does not use a result takes part all the same,
# because other ranks may use theirs. torch's effect tokens would also keep the order of the operators, but torch 2.13
# cannot combine them with activation checkpoints.
has_side_effect(torch.ops.ringattn.attention.default)
has_side_effect(torch.ops.ringattn.attention_backward.default)


class _Anchored(torch.autograd.Function):
    """The output of an eager call for which only other ranks need gradients; see `anchor`."""

    @staticmethod
    def forward(ctx: Any, _: Tensor, *saved: Tensor | None) -> Tensor:
        ctx.save_for_backward(*saved)
        out = saved[4]
        assert out is not None
        return out.detach()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor) -> tuple[None, ...]:
        attention_backward(*ctx.saved_tensors, dout, None)
        return (None,) * 8
