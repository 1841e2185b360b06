"""ring-flash-attention's way into Hugging Face models: `flash_attention_2` over a ring, told of each batch's documents.

    from ringattn.adapters.flash_attn import substitute_hf_flash_attn, update_ring_flash_attn_params

Names and arguments are those of `flash_attn.CHECKED`. What that package only asserts, or has no place for, is computed
or refused as `adapters.transformers` does: windows, softcap, sinks, positions that are not those of a rank's part.
Guarantees: of transformers the two registries of attention and of masks are told, and nothing in it is replaced.
"""

from __future__ import annotations

from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, nn

from ringattn.adapters import transformers as adapter
from ringattn.adapters.groups import ring_of
from ringattn.adapters.transformers.attention import mask_spec
from ringattn.core.layout import make_layout
from ringattn.errors import InputError
from ringattn.options import check_dropout_seed
from ringattn.ring import Ring
from ringattn.runtime.activation import Activation, entered
from ringattn.sequence import Sequence, check_documents

__all__ = ["substitute_hf_flash_attn", "update_ring_flash_attn_params", "use_ring_attn"]

NAME = "flash_attention_2"

_ring: ContextVar[Ring | None] = ContextVar("ringattn_flash_hf_ring", default=None)
_told: ContextVar[Activation | None] = ContextVar("ringattn_flash_hf_sequence", default=None)
_is_on: ContextVar[bool] = ContextVar("ringattn_flash_hf_is_on", default=True)


def substitute_hf_flash_attn(process_group: Any, heads_k_stride: int) -> None:
    """Lets every model with `attn_implementation="flash_attention_2"` attend over the ring of `process_group`.

    From here on, in this process. flash-attn itself is not called.

    Args:
        process_group: The ranks that share a sequence: a ProcessGroup, a DeviceMesh, a Ring, or None for all.
        heads_k_stride: How many key heads that package gathers at once, a number from 1. The schedule chooses here.

    Raises:
        InputError: `heads_k_stride` is no such number.
        RingError: What `Ring` raises when it is opened.

    Example:
        substitute_hf_flash_attn(group, heads_k_stride=1)
    """
    from transformers import AttentionInterface, AttentionMaskInterface

    if isinstance(heads_k_stride, bool) or not isinstance(heads_k_stride, int) or heads_k_stride < 1:
        raise InputError(f"heads_k_stride must be a number of heads from 1, got {heads_k_stride!r}")
    adapter.register()
    _ring.set(ring_of(process_group))
    _told.set(None)
    AttentionInterface.register(NAME, _forward)
    AttentionMaskInterface.register(NAME, mask_spec)


def update_ring_flash_attn_params(cu_seqlens: Tensor, process_group: Any, *, dropout_seed: int | None = None) -> None:
    """Names the documents of the batch that comes next; every rank holds its equal, contiguous part of the packed row.

    Holds until the next call, in this thread. Checkpointed layers that backward computes again keep the documents that
    they had.

    Args:
        cu_seqlens: Cumulative lengths [0, ..., tokens of all ranks].
        process_group: That of `substitute_hf_flash_attn`.
        dropout_seed: As in `Ring.activate`, for models that train with attention dropout. That package has no such
            argument.

    Raises:
        InputError: The tokens do not divide by the ranks, the cuts do not ascend from 0, the group is another one, or
            `dropout_seed` is none.

    Example:
        update_ring_flash_attn_params(cu_seqlens, group)
        ids, places = (x.chunk(ranks, 1)[rank] for x in (input_ids, position_ids))
        logits = model(input_ids=ids, position_ids=places).logits
    """
    ring, known = ring_of(process_group), _ring.get()
    if known is not ring:
        raise InputError(
            "update_ring_flash_attn_params: this is not the process_group of substitute_hf_flash_attn, which has to be "
            "called first, in the same thread"
        )
    check_dropout_seed(dropout_seed)
    cuts = check_documents(cu_seqlens, None)
    if cuts[-1] % ring.world_size:
        raise InputError(
            f"rank {ring.rank}: cu_seqlens: {cuts[-1]} tokens do not divide by {ring.world_size} ranks; "
            "pad the last document"
        )
    _told.set(Activation(Sequence(ring, make_layout("contiguous", cuts[-1], ring.world_size), cuts), dropout_seed))


def use_ring_attn(flag: bool) -> None:
    """Whether attention goes over the ring from here on, in this thread; else each rank attends to what it is given.

    Args:
        flag: True: over the ring.

    Raises:
        Nothing.

    Example:
        use_ring_attn(False)  # for an evaluation in which every rank has whole rows
    """
    _is_on.set(flag)


@torch.compiler.disable
def _forward(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, dropout: float = 0.0,
    scaling: float | None = None, **kwargs: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    """An attention function of transformers; see `adapters.transformers.attention_forward`."""
    given = (module, query, key, value, attention_mask, dropout, scaling)
    if torch._C._current_graph_task_id() != -1:  # a layer is computed again, over what it attended over before
        return adapter.attention_forward(*given, **kwargs)
    told = _told.get() if _is_on.get() else Activation(None)
    if told is None:
        raise InputError(
            "no documents are known: call update_ring_flash_attn_params(cu_seqlens, process_group) before the model, "
            "in the same thread, or use_ring_attn(False) for local attention"
        )
    with entered(told, outside_regions=True):  # recomputation does not come here again
        return adapter.attention_forward(*given, **kwargs)
