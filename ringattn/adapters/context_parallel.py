"""Context parallelism in the shape of `torch.distributed.tensor.experimental.context_parallel`, through a ring.

Guarantees: same arguments and same use, for any length, and with documents. Nothing in torch is replaced: SDPA is
redirected for the calls that one thread makes inside of the `with`, and what would still attend locally raises.
Positions that code makes with `torch.arange` of the local length raise too, unless the caller has provided positions.
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
"""Layout and documents of the last sequence; without the sequence, which would keep its ring."""


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
    """Inside, `buffers` hold this rank's tokens, and SDPA attends over all ranks' tokens.

    Buffers are sharded in place without a copy of the whole, and given their old memory back afterwards. A model that
    uses positions needs them: `torch.arange(length)` among the buffers, or `seq.positions()`. Checkpointed regions need
    `context_fn=recompute_context`: without it torch's comparison of what was saved raises, and `use_reentrant=True` is
    refused.

    Args:
        mesh: A mesh with a dimension `cp` or with one dimension, whose ring is opened at its first use and stays open
            as long as its process group; or an open ring.
        buffers: Whole tensors, alike on all ranks, with equally many tokens. Labels are shifted before. At least one.
        buffer_seq_dims: The dimension of the tokens, for each buffer.
        no_restore_buffers: Those of `buffers` that keep their shards afterwards. None: none.
        cu_seqlens: Cumulative document lengths [0, ..., length]. None: one sequence.
        dropout_seed: As in `Ring.activate`, where SDPA is called with dropout_p.

    Returns:
        A context manager that gives the sequence.

    Raises:
        InputError: The buffers cannot be sharded, or `dropout_seed` is none, before anything has changed; the mesh has
            several dimensions and none called cp; inside, `torch.arange` numbers the local tokens from 0 although no
            positions are among the buffers and `seq.positions()` was not called; or what `Ring.activate` raises at its
            end.
        UnsupportedError: A buffer is no tensor; or, inside, a call would attend to this rank's tokens alone.

    Example:
        with context_parallel(mesh, buffers=[x], buffer_seq_dims=[2]):
            out = F.scaled_dot_product_attention(x, x, x, is_causal=True)
    """
    buffers, dims = list(buffers or ()), list(buffer_seq_dims or ())
    kept = {id(one) for one in no_restore_buffers or ()}
    _check(buffers, dims, kept)
    check_dropout_seed(dropout_seed)
    ring = ring_of(mesh)
    seq = ring.sequence(buffers[0].shape[dims[0]], cu_seqlens=cu_seqlens)
    _last[ring] = seq.layout, seq.documents
    with torch.no_grad():
        shards = [seq.shard(one, dim) for one, dim in zip(buffers, dims, strict=True)]
        wholes = [None if id(one) in kept else one.detach() for one in buffers]
        for one, shard in zip(buffers, shards, strict=True):
            _hold(one, shard)
    try:
        ranges = _LocalRanges(seq, buffers, dims) if ring.world_size > 1 else None
        with activate(seq, dropout_seed=dropout_seed, throughout=True), _Redirected(torch.is_grad_enabled(), ranges):
            yield seq
    except RuntimeError as error:
        if _FLEX not in str(error) or isinstance(error, UnsupportedError):
            raise
        with ring.refused_by_all():  # raised inside of the compiler that flex_attention brings along
            raise UnsupportedError(_FLEX) from error
    finally:
        with torch.no_grad():
            for one, whole in zip(buffers, wholes, strict=True):
                if whole is not None:
                    _hold(one, whole)


@torch.no_grad()
def context_parallel_unshard(
    mesh: DeviceMesh | Ring, buffers: Many[Tensor], seq_dims: Many[int], load_balancer: Sequence | None = None
) -> list[Tensor]:
    """The whole tensors of sharded ones; without gradients. A collective call.

    Shards of another sequence with as many tokens a rank cannot be told, so name theirs.

    Args:
        mesh: As in `context_parallel`.
        buffers: This rank's shards.
        seq_dims: The dimension of the tokens, for each buffer.
        load_balancer: The sequence that `context_parallel` gave. None: the active one, and outside of the `with` that
            of the last `context_parallel` on this mesh or ring.

    Returns:
        The whole tensors, tokens in order, on every rank.

    Raises:
        InputError: `load_balancer` is no sequence, nothing was sharded on this mesh yet, or shards have other lengths.
        ValueError: There are not as many `seq_dims` as `buffers`.
        RingError: What else `Sequence.gather` raises.

    Example:
        (out,) = context_parallel_unshard(mesh, [out], [2], seq)
    """
    if load_balancer is not None and not isinstance(load_balancer, Sequence):
        raise InputError(f"load_balancer must be the sequence that context_parallel gave, got {load_balancer!r}")
    seq = load_balancer or active_sequence()
    if seq is None:
        ring = ring_of(mesh)
        if ring not in _last:
            raise InputError("nothing was sharded on this mesh yet; give the sequence of the shards as load_balancer")
        seq = Sequence(ring, *_last[ring])
    return [seq.gather(one, dim) for one, dim in zip(buffers, seq_dims, strict=True)]


def recompute_context() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """The `context_fn` of a checkpoint inside of `context_parallel`.

    The region's second run is redirected as its first, wherever backward is called: torch calls backward passes with
    the redirection off.

    Returns:
        The context managers of the first and of the second run.

    Example:
        out = checkpoint(layer, x, use_reentrant=False, context_fn=recompute_context)
    """
    first, second = context.recompute_context()
    return first, context.Reentered(lambda: _redirected_over(second))


@contextmanager
def _redirected_over(over: AbstractContextManager[None]) -> Iterator[None]:
    with over, _Redirected(with_gradients=True):
        yield


class _Redirected(TorchFunctionMode):
    """Inside, this thread's scaled_dot_product_attention is `ring_sdpa`; not below another function of torch's."""

    def __init__(self, with_gradients: bool, ranges: _LocalRanges | None = None) -> None:
        super().__init__()
        self.with_gradients, self.ranges = with_gradients, ranges

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _ATTEND_THEMSELVES and (torch.compiler.is_compiling() or active_sequence() is not None):
            if func is torch.ops.higher_order.flex_attention:
                raise UnsupportedError(_FLEX)
            raise UnsupportedError(
                f"{func.__name__} inside of context_parallel would attend locally; use "
                "torch.nn.functional.scaled_dot_product_attention, or ringattn.RingMultiheadAttention"
            )
        if func is torch.arange and self.ranges is not None:
            self.ranges.check(args, kwargs)
        if func not in _SDPA:
            return func(*args, **kwargs)
        if self.with_gradients and not torch.is_grad_enabled():
            # A reentrant checkpoint looks like this, and its second run, in a backward outside, would attend locally.
            raise UnsupportedError(
                "attention under no_grad inside of context_parallel: enter no_grad before context_parallel, or "
                "checkpoint with use_reentrant=False and context_fn=recompute_context of this module"
            )
        return ring_sdpa(*args, **kwargs)


class _LocalRanges:
    """Calls of `torch.arange` that number the tokens of this rank from 0, as models do that make positions themselves.

    Only such calls are noticed: not a slice of a table of positions, nor a cumulative sum of ones.
    """

    def __init__(self, seq: Sequence, buffers: list[Tensor], dims: list[int]) -> None:
        self.seq, self.buffers = seq, [x.movedim(dim, -1) for x, dim in zip(buffers, dims, strict=True)]
        self.tokens = seq.counts[seq.ring.rank]

    def check(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Raise `InputError` for a range of all local tokens, unless the caller has provided positions."""
        limits = dict(zip(("end",) if len(args) == 1 else ("start", "end", "step"), args, strict=False)) | kwargs
        is_local = limits.get("start", 0) == 0 and limits.get("step", 1) == 1 and limits.get("end") == self.tokens
        if not is_local or self.tokens < 2:  # a range of one number is too common to mean anything
            return
        caller = sys._getframe(2)
        module = str(caller.f_globals.get("__name__", ""))
        is_ours = module.partition(".")[0] in ("torch", "ringattn")
        if is_ours or active_sequence() is not self.seq or self._has_positions():
            return
        ring, function = self.seq.ring, f"{module}.{caller.f_code.co_qualname}"
        with ring.refused_by_all():
            raise InputError(
                f"rank {ring.rank}: {function} calls torch.arange({self.tokens}) inside of context_parallel, which "
                f"numbers this rank's tokens from 0: add torch.arange({self.seq.length}) to the buffers, and give it "
                "to the model as the positions of its tokens. If the range stands for something else, adding it is "
                "enough"
            )

    def _has_positions(self) -> bool:
        """Whether positions are among the buffers, or the caller has asked the sequence for them."""
        if self.seq._positions is not None:
            return True
        positions = [self.seq.positions(per_document) for per_document in (False, True)]
        self.seq._positions = None  # asked for here, and not by the caller
        return any(bool((x == y.to(x.device)).all()) for x in self.buffers for y in positions)


_FLEX = (
    "torch's flex_attention inside of context_parallel would attend locally; use "
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


def _hold(one: Tensor, memory: Tensor) -> None:
    one.set_(memory)  # type: ignore[call-overload]  # documented, and missing from torch's stubs


def _check(buffers: list[Tensor], dims: list[int], kept: set[int]) -> None:
    if not buffers or len(buffers) != len(dims):
        raise InputError(
            f"{len(buffers)} buffers and {len(dims)} buffer_seq_dims: context_parallel needs at least one buffer, for "
            "the length, and a dimension for each"
        )
    if kept - {id(one) for one in buffers}:
        raise InputError("no_restore_buffers holds a tensor that is not in buffers")
    for index, one in enumerate(buffers):
        if not isinstance(one, Tensor):
            raise UnsupportedError(f"buffer {index} is a {type(one).__name__}; buffers must be tensors")
        if one.requires_grad:
            raise InputError(
                f"buffer {index} requires a gradient and cannot be sharded in place; shard it with seq.shard, which is "
                "differentiable, inside of the with"
            )
