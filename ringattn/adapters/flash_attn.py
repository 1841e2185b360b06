"""The functions of ring-flash-attention, over a ring: a user of that package changes one import.

    from ringattn.adapters.flash_attn import zigzag_ring_flash_attn_func

Names, orders of arguments and layouts are those of `CHECKED`; `softcap`, which flash_attn has and that package has not,
and `dropout_seed`, which `dropout_p` needs, are by keyword only. Every function takes one rank's equal part: (batch,
tokens, heads, head_dim), or packed (tokens, heads, head_dim) for varlen; `*_kvpacked_func` and `*_qkvpacked_func` take
k and v, or all three, stacked before the heads. It returns out, and with `return_attn_probs` (out, lse, None), lse
being (batch, heads, tokens) or (heads, tokens). `group`: a ProcessGroup, DeviceMesh or Ring, None for the default
group; see `groups.ring_of` for its ring.
`deterministic` asks for nothing more: what a ring adds repeats its bits, and so do its own kernels; in backward on
CUDA, torch's and flash-attn's (engines `aten`, `flash`) do only under `torch.use_deterministic_algorithms(True)`.
Guarantees: every mask is exact in every layout, windows across ranks included, and so is ALiBi by slopes
(heads,); dropout follows from its seed and the places of pairs; slopes of each row of a batch raise `InputError`.
`substitute_hf_flash_attn` is the way into Hugging Face models.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import KW_ONLY, dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from ringattn.adapters import transformers as adapter
from ringattn.adapters.groups import ring_of
from ringattn.adapters.transformers.attention import mask_spec
from ringattn.core.layout import Layout, make_layout
from ringattn.errors import InputError
from ringattn.options import check_dropout_seed
from ringattn.ring import Ring
from ringattn.runtime.activation import Activation, entered
from ringattn.sequence import Sequence, check_documents

CHECKED = "zhuzilin/ring-flash-attention, commit 8996282 (2025-08-04)"

Function = Callable[..., Tensor | tuple[Tensor, Tensor, None]]


@dataclass(frozen=True)
class _Options:
    """What all functions take last."""

    dropout_p: float = 0.0
    softmax_scale: float | None = None
    causal: bool = False
    window_size: tuple[int, int] = (-1, -1)
    alibi_slopes: Tensor | None = None
    deterministic: bool = False
    return_attn_probs: bool = False
    group: Any = None
    _: KW_ONLY
    softcap: float = 0.0
    dropout_seed: int | None = None

    def __post_init__(self) -> None:
        if self.dropout_p and self.dropout_seed is None:
            raise InputError(
                f"dropout_p={self.dropout_p}: pass dropout_seed=..., a number that is the same on all ranks, another "
                "one for each layer and step, and the same again where a checkpoint computes the call again; or 0.0"
            )


@dataclass(frozen=True)
class KeySlice:
    """The keys that a rank needs, and the documents that they were computed from.

    Args:
        start: The first key.
        stop: The key after the last one.
        documents: Cumulative lengths, of all ranks.

    Raises:
        Nothing.
    """

    start: int
    stop: int
    documents: tuple[int, ...]


def llama3_flash_attn_prepare_cu_seqlens(
    cu_seqlens: Tensor, causal: bool, rank: int, world_size: int
) -> tuple[Tensor, Tensor, int, int, KeySlice]:
    """Return the arguments of `llama3_flash_attn_varlen_func` that describe the part of one rank.

    Args:
        cu_seqlens: Cumulative lengths of the documents, of all ranks.
        causal: As in the call that follows.
        rank: The rank.
        world_size: The ranks.

    Returns:
        cu_seqlens_q and cu_seqlens_k of its queries and of the keys that they need, the longest of each in tokens, and
        which keys those are.

    Raises:
        InputError: The tokens do not divide by `world_size`, or the cuts do not ascend from 0.
    """
    cuts = check_documents(cu_seqlens, None)
    if cuts[-1] % world_size:
        raise InputError(f"cu_seqlens: {cuts[-1]} tokens do not divide by {world_size} ranks; pad the last document")
    *both, first, last = _local_cuts(cuts, causal, rank, world_size)
    q, k = (cu_seqlens.new_tensor(one) for one in both)
    return q, k, int(q.diff().max()), int(k.diff().max()), KeySlice(first, last, cuts)


def _local_cuts(
    cuts: tuple[int, ...], causal: bool, rank: int, world_size: int
) -> tuple[list[int], list[int], int, int]:
    """Cuts of a rank's queries and of the keys that they need, both from 0, and which keys those are, (start, stop)."""
    count = cuts[-1] // world_size
    start, stop = rank * count, (rank + 1) * count
    inner = [cut for cut in cuts if start < cut < stop]
    first = max(cut for cut in cuts if cut <= start)
    last = stop if causal else min(cut for cut in cuts if cut >= stop)
    q, k = [0, *(cut - start for cut in inner), count], [cut - first for cut in (first, *inner, last)]
    return q, k, first, last


def _batched(layout: str) -> Callable[..., Sequence]:
    def sequence(ring: Ring, tokens: int) -> Sequence:
        """Attention of a batch of sequences."""
        _check_halves(layout, [tokens], ring.world_size)
        return ring.sequence(tokens * ring.world_size, layout=layout)

    return sequence


def _varlen(layout: str) -> Callable[..., Sequence]:
    def sequence(ring: Ring, tokens: int, cu_seqlens: Tensor, max_seqlen: int) -> Sequence:
        """Attention of packed documents."""
        cuts = check_documents(cu_seqlens, tokens)
        _check_halves(layout, [stop - start for start, stop in pairwise(cuts)], ring.world_size)
        documents = tuple(cut * ring.world_size for cut in cuts)
        return Sequence(ring, Layout(layout, documents[-1], ring.world_size, documents), documents)

    return sequence


def _llama3(
    ring: Ring,
    tokens: int,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    heads_k_stride: int,
    local_k_slice: KeySlice,
) -> Sequence:
    """Attention of packed documents, cut into equal parts wherever that cuts them."""
    if not isinstance(local_k_slice, KeySlice):
        raise InputError("local_k_slice must come from llama3_flash_attn_prepare_cu_seqlens of this module")
    documents = local_k_slice.documents
    given = (_numbers(cu_seqlens_q), _numbers(cu_seqlens_k), local_k_slice.start, local_k_slice.stop)
    if all(given != _local_cuts(documents, causal, ring.rank, ring.world_size) for causal in (False, True)):
        raise InputError(
            f"rank {ring.rank}: cu_seqlens_q {given[0]}, cu_seqlens_k {given[1]} and keys {given[2]} to {given[3]} are "
            f"not those of this rank's part of documents {documents}; pass what llama3_flash_attn_prepare_cu_seqlens "
            "gave for this rank, and cut documents there"
        )
    return Sequence(ring, make_layout("contiguous", documents[-1], ring.world_size), documents)


def _numbers(cuts: object) -> object:
    return cuts.tolist() if isinstance(cuts, Tensor) else cuts


def _check_halves(layout: str, tokens: list[int], world_size: int) -> None:
    """Raise `InputError` unless parts of so many tokens are two equal chunks each; one rank has no chunks."""
    if world_size > 1 and layout in ("zigzag", "per_document") and any(count % 2 for count in tokens):
        raise InputError(f"a rank's part of a zigzag sequence is two equal chunks, got parts of {tokens} tokens")


_ARGUMENTS = {
    "q": "Queries of this rank's part.",
    "k": "Keys, like q.",
    "v": "Values, like q.",
    "kv": "Keys and values, stacked before the heads.",
    "qkv": "Queries, keys and values, stacked before the heads.",
    "cu_seqlens": "Where this rank's parts of the documents start, the same on all ranks.",
    "max_seqlen": "Ignored: cu_seqlens contains it.",
    "cu_seqlens_q": "From `llama3_flash_attn_prepare_cu_seqlens`, as the next four.",
    "cu_seqlens_k": "Where the keys' documents start.",
    "max_seqlen_q": "Ignored: cu_seqlens_q contains it.",
    "max_seqlen_k": "Ignored: cu_seqlens_k contains it.",
    "heads_k_stride": "Ignored: the schedule chooses.",
    "local_k_slice": "The keys that this rank needs.",
    "dropout_p": "Each weight is dropped with this probability; needs dropout_seed.",
    "softmax_scale": "Factor of the scores. None: 1 / sqrt(head_dim).",
    "causal": "A query attends to no later keys.",
    "window_size": "Keys before and after each query; -1: unbounded.",
    "alibi_slopes": "Slopes of ALiBi, (heads,).",
    "deterministic": "Has no further effect, see the module.",
    "return_attn_probs": "Return (out, lse, None).",
    "group": "The ranks: a ProcessGroup, DeviceMesh or Ring. None: the default group.",
    "softcap": "Scores become softcap * tanh(score / softcap). 0: as they are.",
    "dropout_seed": "The same on all ranks, another one for each layer and step.",
}


def _documented(sequence: Callable[..., Sequence], signature: inspect.Signature) -> str:
    arguments = "".join(f"    {name}: {_ARGUMENTS[name]}\n" for name in signature.parameters)
    return (
        f"{sequence.__doc__}\n\nArgs:\n{arguments}\n"
        "Returns:\n    out, or with return_attn_probs (out, lse, None).\n\n"
        "Raises:\n    InputError: An argument or a shape is refused, on all ranks.\n"
    )


def _family(name: str, sequence: Callable[..., Sequence]) -> list[Function]:
    """The three functions over the sequence that `sequence` makes of a ring, local tokens and what else they take."""
    return [
        _function(f"{name}{form}_func", sequence, tensors)
        for form, tensors in (("", "q k v"), ("_kvpacked", "q kv"), ("_qkvpacked", "qkv"))
    ]


def _function(name: str, sequence: Callable[..., Sequence], tensors: str) -> Function:
    stacks = [inspect.Parameter(x, inspect.Parameter.POSITIONAL_OR_KEYWORD) for x in tensors.split()]
    told = list(inspect.signature(sequence).parameters.values())[2:]
    signature = inspect.Signature([*stacks, *told, *inspect.signature(_Options).parameters.values()])

    def function(*args: Any, **kwargs: Any) -> Tensor | tuple[Tensor, Tensor, None]:
        given = signature.bind(*args, **kwargs).arguments
        stacked = {p.name: given.pop(p.name) for p in stacks}
        facts = [given.pop(p.name) for p in told]
        ring, packed = ring_of(given.get("group")), bool(told)
        with ring.refused_by_all():
            q, k, v = (x for p, stack in stacked.items() for x in _unstacked(name, p, stack, packed))
            o = _Options(**given)
            seq = sequence(ring, q.shape[0 if packed else 1], *facts)
        left, right = o.window_size
        q, k, v = (x[None] if packed else x for x in (q, k, v))
        out, lse = ring.attention(
            q, k, v, seq, causal=o.causal, scale=o.softmax_scale,
            # flash_attn takes a causal window to end at the query, whatever its right side is.
            window=(left, 0 if o.causal else right), softcap=o.softcap or None,
            alibi_slopes=o.alibi_slopes, dropout_p=o.dropout_p, dropout_seed=o.dropout_seed, return_lse=True,
        )  # fmt: skip
        out, lse = (out[0], lse[0]) if packed else (out, lse)
        return (out, lse, None) if o.return_attn_probs else out

    function.__name__ = function.__qualname__ = name
    function.__doc__ = _documented(sequence, signature)
    function.__signature__ = signature  # type: ignore[attr-defined]
    return function


def _unstacked(function: str, name: str, x: Tensor, packed: bool) -> tuple[Tensor, ...]:
    """The tensors that are stacked in the argument `name`. Raises `InputError` for other dimensions."""
    count = len(name)
    stack = [str(count)] if count > 1 else []
    dims = ["tokens" if packed else "batch, tokens", *stack, "heads", "head_dim"]
    is_tensor = isinstance(x, Tensor)
    if not is_tensor or x.dim() != 4 - packed + len(stack) or (stack and x.shape[-3] != count):
        got = tuple(x.shape) if is_tensor else f"a {type(x).__name__}"
        why = "; a varlen function takes packed tokens without a batch dimension" if packed else ""
        raise InputError(f"{function}: {name} must be ({', '.join(dims)}), got {got}{why}")
    return x.unbind(-3) if stack else (x,)


ring_flash_attn_func, ring_flash_attn_kvpacked_func, ring_flash_attn_qkvpacked_func = _family(
    "ring_flash_attn", _batched("contiguous")
)

zigzag_ring_flash_attn_func, zigzag_ring_flash_attn_kvpacked_func, zigzag_ring_flash_attn_qkvpacked_func = _family(
    "zigzag_ring_flash_attn", _batched("zigzag")
)

stripe_flash_attn_func, stripe_flash_attn_kvpacked_func, stripe_flash_attn_qkvpacked_func = _family(
    "stripe_flash_attn", _batched("striped")
)

ring_flash_attn_varlen_func, ring_flash_attn_varlen_kvpacked_func, ring_flash_attn_varlen_qkvpacked_func = _family(
    "ring_flash_attn_varlen", _varlen("contiguous")
)

(
    zigzag_ring_flash_attn_varlen_func,
    zigzag_ring_flash_attn_varlen_kvpacked_func,
    zigzag_ring_flash_attn_varlen_qkvpacked_func,
) = _family("zigzag_ring_flash_attn_varlen", _varlen("per_document"))

llama3_flash_attn_varlen_func, llama3_flash_attn_varlen_kvpacked_func, llama3_flash_attn_varlen_qkvpacked_func = (
    _family("llama3_flash_attn_varlen", _llama3)
)


# --- Models of Hugging Face -------------------------------------------------------------------------------------------
# What that package only asserts, or has no argument for, is computed or refused as `adapters.transformers` does:
# windows, softcap, sinks, positions that are not those of a rank's part. Only the two registries of attention and of
# masks in transformers are changed.

HF_NAME = "flash_attention_2"

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
    AttentionInterface.register(HF_NAME, _forward)
    AttentionMaskInterface.register(HF_NAME, mask_spec)


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
