"""One attention call over a ring: its checks, the agreement of all ranks on the call, and the autograd function."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ringattn.core.dilation import Dilated
from ringattn.core.mask import Banded
from ringattn.core.problem import FLOATS, Problem
from ringattn.engine.base import OPTIONAL, BackwardInputs, Engine, Softmax, accumulator_dtype
from ringattn.engine.philox import MOST_TOKENS
from ringattn.errors import InputError, UnsupportedError
from ringattn.gradients import once_differentiable
from ringattn.options import AttentionOptions
from ringattn.planner.choose import choose_route
from ringattn.planner.plan import OwnSums
from ringattn.runtime.activation import attended, unseen
from ringattn.runtime.call import AttentionCall
from ringattn.runtime.consistency import GradientNeeds, Inputs, anchor
from ringattn.runtime.executor import BackwardArithmetic, ForwardArithmetic
from ringattn.runtime.records import LocalTensors
from ringattn.runtime.runtime import Runtime
from ringattn.sequence import Sequence, check_device, check_sequences


def attend(
    ring: Runtime,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    seq: Sequence,
    kv_seq: Sequence | None,
    options: AttentionOptions,
) -> tuple[Tensor, Tensor]:
    """Return (out, lse) of attention with these options; see `Ring.attention`."""
    results, sinks = _results.get(), options.sinks
    if results is not None and results.is_recomputation:
        attended()
        call, result = results.next()
        return apply_attention(ring, call, q, k, v, sinks, result)
    inputs = {"q": q, "k": k, "v": v, "sinks": sinks} if results is None else NEEDED
    call = agreed(ring, lambda: checked_call(ring, q, k, v, seq, kv_seq, options), sinks, inputs)
    if results is None:
        return apply_attention(ring, call, q, k, v, sinks)
    with unseen():
        result = PassResult(*forward_pass(ring, call, q, k, v, sinks, keep=call.graph))
    results.add(call, result)
    return result.out, result.lse


def apply_attention(
    ring: Runtime, call: AttentionCall, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None,
    result: PassResult | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return (out, lse) of a call that all ranks agreed on. They carry a graph if any rank needs gradients.

    `result`: the result of the forward pass. None: the pass runs here.
    """
    out, lse = AttentionFunction.apply(q, k, v, sinks, anchor(call.graph, q, k, v, sinks), ring, call, result)
    return out, lse


# --- results of calls, kept for a recomputation -----------------------------------------------------------------------


class PassResult(NamedTuple):
    """The result of `forward_pass`."""

    out: Tensor
    lse: Tensor
    kept: Tensor | None


NEEDED = GradientNeeds(("q", "k", "v"))
"""The gradient needs of a call whose results are kept: it runs without a graph, but its recomputation has one."""


class KeptResults:
    """The results of the calls of `attend` in a function that runs twice: without a graph, and again in backward.

    In the second run, each call returns the results of the first and sends nothing. It carries a graph, so its backward
    pass runs as usual. Both runs make the same calls in the same order.
    """

    def __init__(self) -> None:
        self.calls: list[AttentionCall] = []
        self.tensors: list[Tensor | None] = []
        """Three tensors for each call, see `PassResult`. An autograd function may save them, and set them again."""
        self.is_recomputation = False
        self._next = 0

    def add(self, call: AttentionCall, result: PassResult) -> None:
        """Append the result of a call of the first run."""
        self.calls.append(call)
        self.tensors += result

    def next(self) -> tuple[AttentionCall, PassResult]:
        """Return the next call of the first run and its result."""
        number = self._next
        self._next += 1
        out, lse, kept = self.tensors[3 * number : 3 * number + 3]
        assert out is not None and lse is not None
        return self.calls[number], PassResult(out, lse, kept)

    @contextmanager
    def keeping(self) -> Iterator[None]:
        """Return the context of the first run, in which no graph is recorded."""
        token = _results.set(self)
        try:
            with torch.no_grad():
                yield
        finally:
            _results.reset(token)

    @contextmanager
    def returning(self) -> Iterator[None]:
        """Return the context of the second run, in which a graph is recorded. It may be entered repeatedly."""
        self.is_recomputation, self._next = True, 0
        token = _results.set(self)
        try:
            with torch.enable_grad():
                yield
        finally:
            _results.reset(token)


_results: ContextVar[KeptResults | None] = ContextVar("ringattn_kept_results", default=None)


def checked_call(
    ring: Runtime,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    seq: Sequence,
    kv_seq: Sequence | None,
    options: AttentionOptions,
    dilated: Dilated | None = None,
) -> AttentionCall:
    """Return the call with these tensors. Raises InputError if a tensor, a sequence or an option is wrong."""
    check_tensors(ring, q, k, v, seq, kv_seq, options.sinks)
    sizes = q.shape[0], q.shape[2], k.shape[2], q.shape[3], v.shape[3]
    return call_of(ring, seq, kv_seq, sizes, q.dtype, q.device, options, dilated)


def agreed(
    ring: Runtime,
    describe: Callable[[], AttentionCall],
    sinks: Tensor | None,
    inputs: Inputs | GradientNeeds,
    *facts: str,
) -> AttentionCall:
    """Return the checked call of `describe` after all ranks have agreed on it. Raises on all ranks if they do not.

    `inputs`: see `Runtime.check_same_call`. `facts`: further facts that must be equal on all ranks.
    """
    attended()
    calls: list[AttentionCall] = []

    def described() -> str:
        calls.append(describe())
        return calls[0].summary("sinks" if sinks is not None else "no sinks", *facts)

    number, graph = ring.check_same_call(described, inputs)
    return replace(calls[0], number=number, graph=graph)


def call_of(
    ring: Runtime,
    seq: Sequence,
    kv_seq: Sequence | None,
    sizes: tuple[int, int, int, int, int],
    dtype: torch.dtype,
    device: torch.device,
    options: AttentionOptions,
    dilated: Dilated | None = None,
) -> AttentionCall:
    """Return the call with tensors of these `sizes`: batch, query heads, K/V heads, head_dim, value_dim.

    `dilated`: the branches of dilated attention, which replace causal, window and mask of the options.
    """
    facts = None
    if kv_seq is None:  # without what is not part of a plan
        seed = None if options.dropout_seed is None else 0
        facts = sizes, dtype, device, replace(options, sinks=None, dropout_seed=seed), dilated
    name = str(dtype).removeprefix("torch.")
    problem = make_problem(ring, seq, kv_seq, *sizes, name, dilated or options.pairs)
    check_distances(seq, options)
    documents = () if kv_seq is None else (seq.documents or (), kv_seq.documents or ())
    softmax = softmax_of(options, sizes[3], sizes[1], sizes[2], *documents)
    engine = ring.engine_for(device, dtype, sizes[3], sizes[4], softmax)
    route = choose_route(problem, options.schedule, ring.machines)
    return AttentionCall(problem, route, softmax, engine, dropout_seed_of(options, problem), facts=facts)


def plan_passes(ring: Runtime, seq: Sequence, passes: Iterable[tuple[Any, bool]]) -> None:
    """Plan these passes, see `Runtime.recent_passes`, over another sequence. Local; any thread may do this.

    A pass that is refused for this sequence is left out: if the call is made, it is refused on all ranks.
    """
    for (sizes, dtype, device, options, dilated), backward in passes:
        with suppress(InputError, UnsupportedError):
            call = call_of(ring, seq, None, sizes, dtype, device, options, dilated)
            call.summary()
            ring.prepare(call, backward)


def make_problem(
    ring: Runtime,
    seq: Sequence,
    kv_seq: Sequence | None,
    batch: int,
    q_heads: int,
    kv_heads: int,
    head_dim: int,
    value_dim: int,
    dtype: str,
    pairs: Banded | Dilated,
) -> Problem:
    """Return the facts of a call. Raises InputError for options that contradict each other."""
    keys = seq if kv_seq is None else kv_seq
    mask = _with_mask_of(seq, kv_seq, pairs).mask(
        seq.length, keys.length, seq.documents, keys.documents, q_heads, kv_heads
    )
    wires = ring.dkv_wire_dtype, ring.kv_wire_dtype, ring.out_wire_dtype
    return Problem(
        seq.layout, keys.layout, mask, batch, q_heads, kv_heads, head_dim, value_dim, dtype, *wires,
        keep_received=ring.keep_received,
    )  # fmt: skip


def check_distances(seq: Sequence, options: AttentionOptions) -> None:
    """Raise InputError for slopes of ALiBi with a mask whose distances are not those of packed positions."""
    mask = options.mask or seq.mask
    if mask is not None and mask.by_depth and options.alibi_slopes is not None:
        raise InputError(
            f"alibi_slopes multiply distances of packed positions, and distances in {type(mask).__name__} count along "
            "paths; leave alibi_slopes out, or use rotary positions"
        )


def _with_mask_of(seq: Sequence, kv_seq: Sequence | None, pairs: Banded | Dilated) -> Banded | Dilated:
    """Return `pairs` with the mask that `seq` carries, if any. Raises InputError if two masks are given."""
    if kv_seq is not None and kv_seq.mask is not None:
        raise InputError(f"kv_seq carries mask={kv_seq.mask.text}; give the mask to seq, whose queries it is for")
    if seq.mask is None:
        return pairs
    if isinstance(pairs, Dilated):
        raise InputError(f"seq carries mask={seq.mask.text}, and dilated attention takes no mask")
    if pairs.within is not None:
        raise InputError(
            f"seq carries mask={seq.mask.text}, and mask={pairs.within.text} is given too; give only one of them"
        )
    return replace(pairs, within=seq.mask)


def softmax_of(
    options: AttentionOptions,
    head_dim: int,
    q_heads: int,
    kv_heads: int,
    documents: tuple[int, ...] = (),
    kv_documents: tuple[int, ...] = (),
) -> Softmax:
    """Return the softmax options of the call in the form that engines read.

    `documents`, `kv_documents`: the bounds of documents if queries and keys belong to two sequences. Raises InputError
    if `alibi_slopes` is not one number per query head.
    """
    slopes = options.alibi_slopes
    if slopes is not None and len(slopes) != q_heads:
        raise InputError(f"alibi_slopes must be {q_heads} numbers, one for each query head, got {len(slopes)}")
    scale = 1 / math.sqrt(head_dim) if options.scale is None else options.scale
    starts: tuple[tuple[int, int], ...] = ()
    if slopes is not None and documents != kv_documents:
        starts = tuple(zip(documents[:-1], kv_documents[:-1], strict=True))
    # An option that is off is None here, whatever its default is.
    values = {name: getattr(options, name) or None for name in OPTIONAL}
    return Softmax(scale, q_heads // kv_heads, starts=starts, **values)


def dropout_seed_of(options: AttentionOptions, problem: Problem) -> int:
    """Return the seed of dropout, 0 without dropout. Raises InputError if it is missing or a sequence is too long."""
    if not options.dropout_p:
        return 0
    if options.dropout_seed is None:
        raise InputError(
            f"dropout_p={options.dropout_p} needs a dropout_seed, the same on all ranks and different at each call, so "
            "that the dropped weights do not depend on the number of ranks"
        )
    if max(problem.q_layout.length, problem.kv_layout.length) > MOST_TOKENS:
        raise InputError(f"dropout_p={options.dropout_p}: dropout supports sequences of at most 2**32 tokens")
    return options.dropout_seed


class AttentionFunction(torch.autograd.Function):
    """The autograd function from (q, k, v, sinks) to (out, lse). Every rank calls its backward.

    The fifth input is the result of `anchor`. With the `result` of an earlier forward pass, no pass runs.
    """

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sinks: Tensor | None,
        _: Tensor | None,
        ring: Runtime,
        call: AttentionCall,
        result: PassResult | None,
    ) -> tuple[Tensor, Tensor]:
        if result is None:
            with unseen():
                out, lse, kept = forward_pass(ring, call, q, k, v, sinks, keep=call.graph)
        else:
            out, lse, kept = result.out.detach(), result.lse.detach(), result.kept
        ctx.ring, ctx.call = ring, call
        ctx.save_for_backward(q, k, v, sinks, out, lse, kept)
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Tensor | None, ...]:
        with ctx.ring.refused_by_all():  # autograd raises here if a saved tensor was changed in place or freed
            q, k, v, sinks, out, lse, kept = ctx.saved_tensors
        return (*backward_pass(ctx.ring, ctx.call, q, k, v, sinks, out, lse, kept, dout, dlse), *4 * (None,))


def forward_pass(
    ring: Runtime,
    call: AttentionCall,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor | None,
    keep: bool,
    engine: Engine | None = None,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return (out, lse, kept) of a call that all ranks agreed on. kept: with `keep`, the remote inputs for backward.

    `engine`: an engine equal to that of the call, which also has tensors of this pass. None: the engine of the call.
    The memory order of out is (tokens, batch, heads, dim), whatever the strides of q. If the batch is empty, nothing
    is sent.
    """
    batch, tokens, heads, _ = q.shape
    value_dim = call.problem.value_dim
    if not batch:
        lse = q.new_empty((batch, heads, tokens), dtype=accumulator_dtype(q.dtype))
        return q.new_empty((batch, tokens, heads, value_dim)), lse, None
    rows_q, local = q.detach().transpose(0, 1), LocalTensors(k.detach().transpose(0, 1), v.detach().transpose(0, 1))
    executor = ring.executor_of(call, backward=False)
    logits = None if sinks is None else sinks.detach().contiguous()
    with ring.accounted(executor, call), uncast(q):
        arithmetic = ForwardArithmetic(
            engine or call.engine, executor.works, rows_q, local, value_dim, logits, call.dropout_seed
        )
        kept = ring.run(executor, arithmetic, keep=keep)
        out = arithmetic.state.out.finalized(q.dtype).transpose(0, 1)
        # Detach, so that the outputs are not views: autograd forbids in-place changes of a function's view outputs.
        return out.detach(), arithmetic.state.lse.detach(), kept


def backward_pass(
    ring: Runtime,
    call: AttentionCall,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor | None,
    out: Tensor,
    lse: Tensor,
    kept: Tensor | None,
    dout: Tensor | None,
    dlse: Tensor | None,
    engine: Engine | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Return the gradients of q, k, v and the sinks, from the inputs and outputs of `forward_pass`."""
    ring.check_consistency(call.summary(), backward_of=call.number)
    if not q.shape[0]:
        no_sinks = None if sinks is None else torch.zeros_like(sinks)
        return torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v), no_sinks
    if dout is None:
        dout = torch.zeros_like(out)
    executor = ring.executor_of(call, backward=True)
    with ring.accounted(executor, call), uncast(q):
        inputs = _backward_inputs(call.engine, dout.transpose(0, 1), out.transpose(0, 1), lse, dlse)
        inputs = inputs._replace(dropout_seed=call.dropout_seed)
        sums = executor.plan.own_sums
        dtype, make = accumulator_dtype(q.dtype), torch.zeros if sums is OwnSums.ZEROED else torch.empty
        dk, dv = (make(x.shape, dtype=x.dtype if sums is OwnSums.NONE else dtype, device=x.device) for x in (k, v))
        rows_q = q.detach().transpose(0, 1)
        local, grads = (LocalTensors(*(x.detach().transpose(0, 1) for x in pair)) for pair in ((k, v), (dk, dv)))
        arithmetic = BackwardArithmetic(engine or call.engine, executor.works, rows_q, local, inputs, grads)
        ring.run(executor, arithmetic, kept)
        dq = arithmetic.dq.finalized(q.dtype).transpose(0, 1)
        # Free each accumulator before the next result is allocated.
        del arithmetic, grads
        dk = dk.to(k.dtype)
        dv = dv.to(v.dtype)
        dsinks = None if sinks is None else _sinks_grad(sinks, inputs)
    return dq, dk, dv, dsinks


def uncast(like: Tensor) -> torch.autocast:
    """Return a context that disables the caller's torch.autocast, because engines and the merge choose their dtypes."""
    return torch.autocast(like.device.type, enabled=False)


def _backward_inputs(engine: Engine, dout: Tensor, out: Tensor, lse: Tensor, dlse: Tensor | None) -> BackwardInputs:
    """Return the inputs of the backward pass; `dout` and `out` are row-first."""
    dout = dout if dout.stride(-1) == 1 else dout.contiguous()
    if dlse is not None:
        dlse = torch.where(lse.isinf(), 0.0, dlse.to(lse.dtype))
    return BackwardInputs(dout, out, lse, dlse, engine.delta(dout, out, dlse))


def _sinks_grad(sinks: Tensor, inputs: BackwardInputs) -> Tensor:
    """Return this rank's part of the gradient of the sinks, (heads,): -sum(weight of the sink * delta)."""
    weight = torch.exp(sinks.detach().to(inputs.lse.dtype)[None, :, None] - inputs.lse)
    return -(torch.where(inputs.lse.isinf(), 0.0, weight) * inputs.delta).sum((0, 2)).to(sinks.dtype)


def check_tensors(
    ring: Runtime, q: Tensor, k: Tensor, v: Tensor, seq: Sequence, kv_seq: Sequence | None, sinks: Tensor | None
) -> None:
    """Raise `InputError` unless the tensors are this rank's shards of `seq` and `kv_seq`."""
    where = f"rank {ring.rank}: "
    check_sequences(ring, seq, kv_seq)
    keys = ("seq", seq) if kv_seq is None else ("kv_seq", kv_seq)
    for name, x, (label, owner) in (("q", q, ("seq", seq)), ("k", k, keys), ("v", v, keys)):
        if not isinstance(x, Tensor) or x.dim() != 4:
            got = tuple(x.shape) if isinstance(x, Tensor) else type(x).__name__
            raise InputError(where + f"{name} must be a (batch, tokens, heads, head_dim) tensor, got {got}")
        if x.shape[1] != owner.counts[ring.rank]:
            raise InputError(
                where + f"{name} has {x.shape[1]} tokens, this rank owns {owner.counts[ring.rank]} of {owner.length}; "
                f"pass {label}.shard({name}), not the full tensor"
            )
        if x.dtype != q.dtype:
            raise InputError(where + f"{name} is {x.dtype} and q is {q.dtype}; q, k and v must have the same dtype")
        if x.shape[0] != q.shape[0]:
            raise InputError(where + f"{name} has batch {x.shape[0]} and q has batch {q.shape[0]}; they must be equal")
        check_device(ring, name, x)
        if x.device != q.device:
            raise InputError(where + f"{name} is on {x.device} and q is on {q.device}; they must be equal")
        check_last_dimension(where, name, x)
    if k.shape[2] != v.shape[2]:
        raise InputError(where + f"k has {k.shape[2]} heads and v has {v.shape[2]} heads; they must be equal")
    if q.shape[3] != k.shape[3]:
        raise InputError(where + f"q has head_dim {q.shape[3]} and k has head_dim {k.shape[3]}; they must be equal")
    check_recordable(where, {"q": q, "k": k, "v": v, "sinks": sinks})
    check_sinks(where, sinks, q.shape[2], q.device)


def check_last_dimension(where: str, name: str, x: Tensor) -> None:
    """Raise `InputError` unless the last dimension of `x` is contiguous, as engines need it.

    `where`: the words with which the error begins.
    """
    if x.stride(-1) != 1 and x.shape[-1] > 1 and x.numel():
        raise InputError(where + f"the last dimension of {name} must be contiguous; call {name}.contiguous()")


def check_sinks(where: str, sinks: Tensor | None, heads: int, device: torch.device) -> None:
    """Raise `InputError` unless `sinks` is None or has one number per query head, in a supported dtype.

    `where`: the words with which the error begins.
    """
    if sinks is None:
        return
    if not isinstance(sinks, Tensor) or tuple(sinks.shape) != (heads,):
        got = tuple(sinks.shape) if isinstance(sinks, Tensor) else type(sinks).__name__
        raise InputError(where + f"sinks must be a tensor of shape ({heads},), one per query head, got {got}")
    if str(sinks.dtype).removeprefix("torch.") not in FLOATS:
        raise InputError(where + f"sinks are {sinks.dtype}; use one of {', '.join(FLOATS)}")
    if sinks.device != device:
        raise InputError(where + f"sinks are on {sinks.device} and q is on {device}")


def check_recordable(where: str, tensors: Mapping[str, Tensor | None]) -> None:
    """Raise `InputError` if autograd would have to save one of these tensors and cannot: an inference tensor.

    `where`: the words with which the error begins.
    """
    present = {name: x for name, x in tensors.items() if isinstance(x, Tensor)}
    if torch.is_grad_enabled() and any(x.requires_grad for x in present.values()):
        for name, x in present.items():
            if x.is_inference():
                raise InputError(
                    f"{where}{name} was created under torch.inference_mode, but backward needs it; pass "
                    f"{name}.clone(), or create it under torch.no_grad"
                )
