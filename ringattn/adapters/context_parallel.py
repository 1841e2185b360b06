"""A ring behind the interface of `torch.distributed.tensor.experimental.context_parallel`.

Guarantees: arguments and use are those of torch's function, for any length, and also with documents. Nothing in torch
is replaced: SDPA is redirected for calls of one thread inside the `with`. Functions that would still attend locally
raise. Positions made with `torch.arange` of the local length raise too, unless the caller has provided positions.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from collections.abc import Sequence as Many
from contextlib import AbstractContextManager, contextmanager
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed import DeviceMesh
from torch.overrides import TorchFunctionMode

from ringattn.adapters import context
from ringattn.adapters.groups import ring_of
from ringattn.adapters.sdpa import ring_sdpa
from ringattn.core.layout import Layout
from ringattn.errors import InputError, UnsupportedError
from ringattn.options import check_dropout_seed
from ringattn.ring import Ring
from ringattn.runtime.activation import activate, active_sequence
from ringattn.sequence import Sequence

__all__ = ["context_parallel", "context_parallel_unshard", "recompute_context"]

_last: WeakKeyDictionary[Ring, tuple[Layout, tuple[int, ...] | None]] = WeakKeyDictionary()
"""Layout and documents of the last sequence. The sequence itself would keep its ring alive."""


@contextmanager
def context_parallel(
    mesh: DeviceMesh | Ring,
    *,
    buffers: Many[Tensor] | None = None,
    buffer_seq_dims: Many[int] | None = None,
    no_restore_buffers: Iterable[Tensor] | None = None,
    cu_seqlens: Many[int] | None = None,
    dropout_seed: int | None = None,
) -> Iterator[Sequence]:
    """Return a context in which `buffers` hold this rank's tokens and SDPA attends over the tokens of all ranks.

    Buffers are sharded in place without a copy of the whole tensors. Afterwards they get their original memory back. A
    model that uses positions needs global ones: put `torch.arange(length)` among the buffers, or use `seq.positions()`.
    Checkpointed regions need `context_fn=recompute_context`. Without it, torch raises because the recomputation saves
    other tensors than forward did. `use_reentrant=True` is refused.

    Args:
        mesh: A mesh with a dimension `cp` or with one dimension, or an open ring. The ring of a mesh is opened at its
            first use and stays open as long as its process group exists.
        buffers: At least one. Whole tensors, the same on all ranks, with equal numbers of tokens. Shift labels first.
        buffer_seq_dims: The dimension of the tokens, for each buffer.
        no_restore_buffers: The `buffers` that keep their shards afterwards. None: all are restored.
        cu_seqlens: Cumulative document lengths [0, ..., length]. None: one sequence.
        dropout_seed: As in `Ring.activate`. Needed if SDPA is called with dropout_p.

    Returns:
        A context manager that yields the sequence.

    Raises:
        InputError: Before any change: the buffers cannot be sharded, `dropout_seed` is not a seed, or the mesh has
            several dimensions and no dimension `cp`. Inside: `torch.arange` numbers the local tokens from 0 although no
            positions are among the buffers and `seq.positions()` was not called. At the end: what `Ring.activate`
            raises.
        UnsupportedError: A buffer is not a tensor; or, inside, a call would attend to this rank's tokens only.

    Example:
        with context_parallel(mesh, buffers=[x], buffer_seq_dims=[2]):
            out = F.scaled_dot_product_attention(x, x, x, is_causal=True)
    """
    buffers, dims = list(buffers or ()), list(buffer_seq_dims or ())
    kept_ids = {id(buffer) for buffer in no_restore_buffers or ()}
    _check(buffers, dims, kept_ids)
    check_dropout_seed(dropout_seed)
    ring = ring_of(mesh)
    seq = ring.sequence(buffers[0].shape[dims[0]], cu_seqlens=cu_seqlens)
    # Remember the sequence for `context_parallel_unshard` after the `with`. torch's function needs no sequence either.
    _last[ring] = seq.layout, seq.documents
    # All shards are made before any buffer changes, so a failure leaves every buffer whole.
    with torch.no_grad():
        shards = [seq.shard(buffer, dim) for buffer, dim in zip(buffers, dims, strict=True)]
        wholes = [None if id(buffer) in kept_ids else buffer.detach() for buffer in buffers]
        # Buffers change in place, as in torch, because the model holds the same tensors and must see the shards.
        for buffer, shard in zip(buffers, shards, strict=True):
            _set_memory(buffer, shard)
    try:
        ranges = _LocalRanges(seq, buffers, dims) if ring.world_size > 1 else None
        # `throughout`: watch the whole region for attention that would stay local, and not only up to the first call.
        with activate(seq, dropout_seed=dropout_seed, throughout=True), _Redirected(torch.is_grad_enabled(), ranges):
            yield seq
    except RuntimeError as error:
        if _FLEX not in str(error) or isinstance(error, UnsupportedError):
            raise
        with ring.refused_by_all():  # the compiler inside flex_attention wraps our error in its own
            raise UnsupportedError(_FLEX) from error
    finally:
        with torch.no_grad():
            for buffer, whole in zip(buffers, wholes, strict=True):
                if whole is not None:
                    _set_memory(buffer, whole)


@torch.no_grad()
def context_parallel_unshard(
    mesh: DeviceMesh | Ring, buffers: Many[Tensor], seq_dims: Many[int], load_balancer: Sequence | None = None
) -> list[Tensor]:
    """Gather shards into whole tensors, without gradients. A collective call.

    Shards of different sequences with equal token counts look alike, so pass the sequence if there are several.

    Args:
        mesh: As in `context_parallel`.
        buffers: This rank's shards.
        seq_dims: The dimension of the tokens, for each buffer.
        load_balancer: The sequence that `context_parallel` yielded. None: the active sequence, or outside the `with`
            the sequence of the last `context_parallel` on this mesh or ring.

    Returns:
        The whole tensors, tokens in order, on every rank.

    Raises:
        InputError: `load_balancer` is not a sequence, nothing was sharded on this mesh yet, or the length of a shard is
            not this rank's number of tokens.
        ValueError: `seq_dims` and `buffers` differ in length.
        RingError: Other errors of `Sequence.gather`.

    Example:
        (out,) = context_parallel_unshard(mesh, [out], [2], seq)
    """
    if load_balancer is not None and not isinstance(load_balancer, Sequence):
        raise InputError(f"load_balancer must be the sequence that context_parallel returned, got {load_balancer!r}")
    seq = load_balancer or active_sequence()
    if seq is None:
        ring = ring_of(mesh)
        if ring not in _last:
            raise InputError("nothing was sharded on this mesh yet; give the sequence of the shards as load_balancer")
        seq = Sequence(ring, *_last[ring])
    return [seq.gather(shard, dim) for shard, dim in zip(buffers, seq_dims, strict=True)]


def recompute_context() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """Return the contexts for the `context_fn` of a checkpoint inside `context_parallel`.

    torch switches function modes off during backward. The context of the recomputation therefore redirects SDPA again,
    wherever backward is called.

    Returns:
        A context manager for the forward run and one for the recomputation.

    Example:
        out = checkpoint(layer, x, use_reentrant=False, context_fn=recompute_context)
    """
    first, second = context.recompute_context()
    return first, context.Reentered(lambda: _redirected_over(second))


@contextmanager
def _redirected_over(activation: AbstractContextManager[None]) -> Iterator[None]:
    with activation, _Redirected(with_gradients=True):
        yield


class _Redirected(TorchFunctionMode):
    """A mode in which this thread's scaled_dot_product_attention is `ring_sdpa`.

    A function mode is not active inside torch's own functions, so attention below one of them would stay local. Those
    functions (`_ATTEND_THEMSELVES`) are refused.
    """

    def __init__(self, with_gradients: bool, ranges: _LocalRanges | None = None) -> None:
        super().__init__()
        self.with_gradients, self.ranges = with_gradients, ranges

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        # Under a compiler the active sequence is unknown, so refuse there in any case.
        if func in _ATTEND_THEMSELVES and (torch.compiler.is_compiling() or active_sequence() is not None):
            if func is torch.ops.higher_order.flex_attention:
                raise UnsupportedError(_FLEX)
            raise UnsupportedError(
                f"{func.__name__} inside context_parallel would attend locally; use "
                "torch.nn.functional.scaled_dot_product_attention, or ringattn.RingMultiheadAttention"
            )
        if func is torch.arange and self.ranges is not None:
            self.ranges.check(args, kwargs)
        if func not in _SDPA:
            return func(*args, **kwargs)
        if self.with_gradients and not torch.is_grad_enabled():
            # This is what a reentrant checkpoint looks like. Its recomputation, in a backward pass outside the `with`,
            # would attend locally.
            raise UnsupportedError(
                "attention under no_grad inside context_parallel: enter no_grad before context_parallel, or "
                "checkpoint with use_reentrant=False and context_fn=recompute_context of this module"
            )
        return ring_sdpa(*args, **kwargs)


class _LocalRanges:
    """A detector of `torch.arange` calls that number this rank's tokens from 0, as in models that compute positions.

    Other ways to compute local positions go undetected: a slice of a table, or a cumulative sum of ones.
    """

    def __init__(self, seq: Sequence, buffers: list[Tensor], dims: list[int]) -> None:
        self.seq, self.buffers = seq, [x.movedim(dim, -1) for x, dim in zip(buffers, dims, strict=True)]
        self.tokens = seq.counts[seq.ring.rank]

    def check(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Raise `InputError` if a call makes a range over all local tokens and the caller has provided no positions."""
        limits = dict(zip(("end",) if len(args) == 1 else ("start", "end", "step"), args, strict=False)) | kwargs
        is_local = limits.get("start", 0) == 0 and limits.get("step", 1) == 1 and limits.get("end") == self.tokens
        if not is_local or self.tokens < 2:  # a range of one number is too common to mean positions
            return
        # Frame 0 is this method, 1 the mode, 2 the code that calls torch.arange. Calls by torch and ringattn are fine.
        caller = sys._getframe(2)
        module = str(caller.f_globals.get("__name__", ""))
        is_ours = module.partition(".")[0] in ("torch", "ringattn")
        if is_ours or active_sequence() is not self.seq or self._has_positions():
            return
        ring, function = self.seq.ring, f"{module}.{caller.f_code.co_qualname}"
        with ring.refused_by_all():
            raise InputError(
                f"rank {ring.rank}: {function} calls torch.arange({self.tokens}) inside context_parallel, which "
                f"numbers this rank's tokens from 0: add torch.arange({self.seq.length}) to the buffers, and pass it "
                "to the model as the positions of its tokens. If the range is not for positions, adding it is enough"
            )

    def _has_positions(self) -> bool:
        """Return whether positions are among the buffers, or the caller has called `seq.positions()`."""
        # The cache of `seq.positions()`, which is filled by its first call.
        if self.seq._positions is not None:
            return True
        positions = [self.seq.positions(per_document) for per_document in (False, True)]
        self.seq._positions = None  # forget this call: only a call by the caller counts
        return any(bool((x == y.to(x.device)).all()) for x in self.buffers for y in positions)


_FLEX = (
    "torch's flex_attention inside context_parallel would attend locally; use "
    "ringattn.adapters.flex.flex_attention, which has its signature"
)
_SDPA = (
    F.scaled_dot_product_attention, torch.ops.aten.scaled_dot_product_attention,
    torch.ops.aten.scaled_dot_product_attention.default,
)  # fmt: skip
_ATTEND_THEMSELVES = (
    F.multi_head_attention_forward, torch._native_multi_head_attention, torch._transformer_encoder_layer_fwd,
    torch.ops.higher_order.flex_attention,
)  # fmt: skip


def _set_memory(buffer: Tensor, memory: Tensor) -> None:
    buffer.set_(memory)  # type: ignore[call-overload]  # documented, but missing from torch's stubs


def _check(buffers: list[Tensor], dims: list[int], kept_ids: set[int]) -> None:
    if not buffers or len(buffers) != len(dims):
        raise InputError(
            f"{len(buffers)} buffers and {len(dims)} buffer_seq_dims: pass at least one buffer, which defines the "
            "length, and one dimension for each buffer"
        )
    if kept_ids - {id(buffer) for buffer in buffers}:
        raise InputError("no_restore_buffers holds a tensor that is not in buffers")
    for index, buffer in enumerate(buffers):
        if not isinstance(buffer, Tensor):
            raise UnsupportedError(f"buffer {index} is a {type(buffer).__name__}; buffers must be tensors")
        if buffer.requires_grad:
            raise InputError(
                f"buffer {index} requires a gradient and cannot be sharded in place; shard it with seq.shard, which is "
                "differentiable, inside the with"
            )
