"""The functions of ring-flash-attention, over a ring: a user of that package changes one import.

    from ringattn.adapters.flash_attn import zigzag_ring_flash_attn_func

Names, argument orders and layouts are those of `CHECKED`. Two keyword-only arguments are added: `softcap`, which
flash_attn has, and `dropout_seed`, which `dropout_p` needs. Every function takes one rank's equal part: (batch, tokens,
heads, head_dim), or packed (tokens, heads, head_dim) for varlen. `*_kvpacked_func` and `*_qkvpacked_func` take k and v,
or all three, stacked before the heads. A function returns out, or with `return_attn_probs` (out, lse, None), where lse
is (batch, heads, tokens) or (heads, tokens). `group` is a ProcessGroup, DeviceMesh or Ring, or None for the default
group; see `groups.ring_of` for its ring. `substitute_hf_flash_attn` connects Hugging Face models.

`deterministic` changes nothing: a ring adds in a fixed order, and its own kernels are deterministic. The backward
kernels of torch and flash-attn on CUDA (engines `aten`, `fa3`, `fa4`) are deterministic only under
`torch.use_deterministic_algorithms(True)`.

Guarantees: every mask is exact in every layout, including windows across ranks, and so is ALiBi with slopes (heads,).
Dropout depends only on its seed and the global positions of a pair. Slopes per row of the batch raise `InputError`.
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
from ringattn.adapters.transformers.host_masks import mask_spec
from ringattn.core.layout import Layout, make_layout
from ringattn.errors import InputError
from ringattn.integers import whole_number
from ringattn.options import check_dropout_seed
from ringattn.ring import Ring
from ringattn.runtime.activation import Activation, entered
from ringattn.sequence import Sequence, check_documents

CHECKED = "zhuzilin/ring-flash-attention, commit 8996282 (2025-08-04)"

Function = Callable[..., Tensor | tuple[Tensor, Tensor, None]]


@dataclass(frozen=True)
class _Options:
    """The arguments that end the signature of every function."""

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
                f"dropout_p={self.dropout_p}: pass dropout_seed=..., a number that is the same on all ranks, different "
                "for each layer and step, and unchanged when a checkpoint recomputes the call; or set dropout_p=0.0"
            )


@dataclass(frozen=True)
class KeySlice:
    """The range of keys that a rank's queries attend to, and the documents that it was computed from.

    Args:
        start: The first key.
        stop: The key after the last one.
        documents: Cumulative lengths over all ranks.

    Raises:
        Nothing.
    """

    start: int
    stop: int
    documents: tuple[int, ...]


def llama3_flash_attn_prepare_cu_seqlens(
    cu_seqlens: Tensor, causal: bool, rank: int, world_size: int
) -> tuple[Tensor, Tensor, int, int, KeySlice]:
    """Return the arguments of `llama3_flash_attn_varlen_func` for one rank's part.

    Args:
        cu_seqlens: Cumulative lengths of the documents over all ranks.
        causal: As in the following call.
        rank: The rank.
        world_size: The number of ranks.

    Returns:
        cu_seqlens_q of the rank's queries, cu_seqlens_k of the keys that they attend to, the longest document of each
        in tokens, and the range of these keys.

    Raises:
        InputError: The tokens do not divide by `world_size`, or the cuts do not ascend from 0.
    """
    cuts = check_documents(cu_seqlens, None)
    if cuts[-1] % world_size:
        raise InputError(f"cu_seqlens: {cuts[-1]} tokens do not divide by {world_size} ranks; pad the last document")
    *cuts_qk, first, last = _local_cuts(cuts, causal, rank, world_size)
    q, k = (cu_seqlens.new_tensor(local_cuts) for local_cuts in cuts_qk)
    return q, k, int(q.diff().max()), int(k.diff().max()), KeySlice(first, last, cuts)


def _local_cuts(
    cuts: tuple[int, ...], causal: bool, rank: int, world_size: int
) -> tuple[list[int], list[int], int, int]:
    """Return the cuts of a rank's queries and of their keys, both starting at 0, and the range (start, stop) of the
    keys.

    As in ring-flash-attention, keys begin with the first query's document, and end with the last query if causal.
    """
    count = cuts[-1] // world_size
    start, stop = rank * count, (rank + 1) * count
    inner = [cut for cut in cuts if start < cut < stop]
    # Keys start with the document of the first query, because earlier documents are never attended to.
    first = max(cut for cut in cuts if cut <= start)
    last = stop if causal else min(cut for cut in cuts if cut >= stop)
    q, k = [0, *(cut - start for cut in inner), count], [cut - first for cut in (first, *inner, last)]
    return q, k, first, last


def _batched(layout: str) -> Callable[..., Sequence]:
    def sequence(ring: Ring, tokens: int) -> Sequence:
        """Compute attention of a batch of sequences."""
        _check_halves(layout, [tokens], ring.world_size)
        return ring.sequence(tokens * ring.world_size, layout=layout)

    return sequence


def _varlen(layout: str) -> Callable[..., Sequence]:
    def sequence(ring: Ring, tokens: int, cu_seqlens: Tensor, max_seqlen: int) -> Sequence:
        """Compute attention of packed documents."""
        cuts = check_documents(cu_seqlens, tokens)
        _check_halves(layout, [stop - start for start, stop in pairwise(cuts)], ring.world_size)
        # cu_seqlens describes one rank's parts. Every document is split evenly over the ranks.
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
    """Compute attention of packed documents that are split into equal contiguous parts, regardless of document ends."""
    if not isinstance(local_k_slice, KeySlice):
        raise InputError("local_k_slice must come from llama3_flash_attn_prepare_cu_seqlens of this module")
    documents = local_k_slice.documents
    # The arguments describe one rank's part. Comparing them detects a call with the arguments of another rank.
    arguments = (_numbers(cu_seqlens_q), _numbers(cu_seqlens_k), local_k_slice.start, local_k_slice.stop)
    if all(arguments != _local_cuts(documents, causal, ring.rank, ring.world_size) for causal in (False, True)):
        raise InputError(
            f"rank {ring.rank}: cu_seqlens_q {arguments[0]}, cu_seqlens_k {arguments[1]} and keys {arguments[2]} to "
            f"{arguments[3]} are not those of this rank's part of documents {documents}; pass the result of "
            "llama3_flash_attn_prepare_cu_seqlens for this rank, unchanged"
        )
    return Sequence(ring, make_layout("contiguous", documents[-1], ring.world_size), documents)


def _numbers(cuts: object) -> object:
    return cuts.tolist() if isinstance(cuts, Tensor) else cuts


def _check_halves(layout: str, tokens: list[int], world_size: int) -> None:
    """Raise `InputError` unless a zigzag layout can cut each part into two equal chunks. One rank needs no chunks."""
    if world_size > 1 and layout in ("zigzag", "per_document") and any(count % 2 for count in tokens):
        raise InputError(f"a rank's part of a zigzag sequence must be two equal chunks, got parts of {tokens} tokens")


_ARGUMENTS = {
    "q": "Queries of this rank's part.",
    "k": "Keys, like q.",
    "v": "Values, like q.",
    "kv": "Keys and values, stacked before the heads.",
    "qkv": "Queries, keys and values, stacked before the heads.",
    "cu_seqlens": "Where this rank's parts of the documents start, the same on all ranks.",
    "max_seqlen": "Ignored: cu_seqlens contains it.",
    "cu_seqlens_q": "From `llama3_flash_attn_prepare_cu_seqlens`, like the next four.",
    "cu_seqlens_k": "Where the keys' documents start.",
    "max_seqlen_q": "Ignored: cu_seqlens_q contains it.",
    "max_seqlen_k": "Ignored: cu_seqlens_k contains it.",
    "heads_k_stride": "Ignored: the schedule decides.",
    "local_k_slice": "The keys that this rank's queries attend to.",
    "dropout_p": "Probability of dropping each weight; requires dropout_seed.",
    "softmax_scale": "Factor of the scores. None: 1 / sqrt(head_dim).",
    "causal": "A query attends to no later keys.",
    "window_size": "Keys before and after each query; -1: unbounded.",
    "alibi_slopes": "Slopes of ALiBi, (heads,).",
    "deterministic": "No effect, see the module.",
    "return_attn_probs": "Return (out, lse, None).",
    "group": "The ranks: a ProcessGroup, DeviceMesh or Ring. None: the default group.",
    "softcap": "Scores become softcap * tanh(score / softcap). 0: unchanged.",
    "dropout_seed": "The same on all ranks, different for each layer and step.",
}


def _documented(sequence: Callable[..., Sequence], signature: inspect.Signature) -> str:
    arguments = "".join(f"    {name}: {_ARGUMENTS[name]}\n" for name in signature.parameters)
    return (
        f"{sequence.__doc__}\n\nArgs:\n{arguments}\n"
        "Returns:\n    out, or with return_attn_probs (out, lse, None).\n\n"
        "Raises:\n    InputError: An argument or a shape is refused, on all ranks.\n"
    )


def _family(name: str, sequence: Callable[..., Sequence]) -> list[Function]:
    """Return the three functions (q k v, kv-packed, qkv-packed) of one layout.

    `sequence` makes the sequence from the ring, the local tokens and the arguments that are specific to the layout.
    """
    return [
        _function(f"{name}{form}_func", sequence, tensors)
        for form, tensors in (("", "q k v"), ("_kvpacked", "q kv"), ("_qkvpacked", "qkv"))
    ]


def _function(name: str, sequence: Callable[..., Sequence], tensors: str) -> Function:
    stacks = [inspect.Parameter(x, inspect.Parameter.POSITIONAL_OR_KEYWORD) for x in tensors.split()]
    # The parameters of `sequence` after ring and tokens become part of the public signature.
    specific = list(inspect.signature(sequence).parameters.values())[2:]
    signature = inspect.Signature([*stacks, *specific, *inspect.signature(_Options).parameters.values()])

    def function(*args: Any, **kwargs: Any) -> Tensor | tuple[Tensor, Tensor, None]:
        arguments = signature.bind(*args, **kwargs).arguments
        stacked = {p.name: arguments.pop(p.name) for p in stacks}
        specific_values = [arguments.pop(p.name) for p in specific]
        # Only varlen functions have specific arguments, and only they take packed tokens.
        ring, is_packed = ring_of(arguments.get("group")), bool(specific)
        with ring.refused_by_all():
            q, k, v = (x for p, stack in stacked.items() for x in _unstacked(name, p, stack, is_packed))
            o = _Options(**arguments)
            seq = sequence(ring, q.shape[0 if is_packed else 1], *specific_values)
        left, right = o.window_size
        q, k, v = (x[None] if is_packed else x for x in (q, k, v))
        out, lse = ring.attention(
            q, k, v, seq, causal=o.causal, scale=o.softmax_scale,
            # In flash_attn, a causal window ends at the query, whatever its right side is.
            window=(left, 0 if o.causal else right), softcap=o.softcap or None,
            alibi_slopes=o.alibi_slopes, dropout_p=o.dropout_p, dropout_seed=o.dropout_seed, return_lse=True,
        )  # fmt: skip
        out, lse = (out[0], lse[0]) if is_packed else (out, lse)
        return (out, lse, None) if o.return_attn_probs else out

    function.__name__ = function.__qualname__ = name
    function.__doc__ = _documented(sequence, signature)
    function.__signature__ = signature  # type: ignore[attr-defined]
    return function


def _unstacked(function: str, name: str, x: Tensor, packed: bool) -> tuple[Tensor, ...]:
    """Unstack the argument `name` ("q", "kv" or "qkv"). Raises `InputError` if its shape is wrong."""
    count = len(name)
    stack = [str(count)] if count > 1 else []
    dims = ["tokens" if packed else "batch, tokens", *stack, "heads", "head_dim"]
    is_tensor = isinstance(x, Tensor)
    if not is_tensor or x.dim() != 4 - packed + len(stack) or (stack and x.shape[-3] != count):
        got = tuple(x.shape) if is_tensor else f"a {type(x).__name__}"
        hint = "; a varlen function takes packed tokens without a batch dimension" if packed else ""
        raise InputError(f"{function}: {name} must be ({', '.join(dims)}), got {got}{hint}")
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
# Calls go to `adapters.transformers`. It computes or refuses windows, softcap, sinks, and positions that are not those
# of a rank's part. ring-flash-attention only asserts these, or has no argument for them. Nothing in transformers is
# patched: its two registries of attention and mask functions get new entries.

HF_NAME = "flash_attention_2"

_ring: ContextVar[Ring | None] = ContextVar("ringattn_flash_hf_ring", default=None)

_activation: ContextVar[Activation | None] = ContextVar("ringattn_flash_hf_sequence", default=None)

_is_on: ContextVar[bool] = ContextVar("ringattn_flash_hf_is_on", default=True)


def substitute_hf_flash_attn(process_group: Any, heads_k_stride: int) -> None:
    """Make every model with `attn_implementation="flash_attention_2"` attend over the ring of `process_group`.

    The change applies to this process and stays. flash-attn is not called.

    Args:
        process_group: The ranks that share a sequence: a ProcessGroup, a DeviceMesh, a Ring, or None for all.
        heads_k_stride: The key heads that ring-flash-attention gathers at once, at least 1. It is ignored, because the
            schedule decides.

    Raises:
        InputError: `heads_k_stride` is not an integer of at least 1.
        RingError: What `Ring` raises when it is opened.

    Example:
        substitute_hf_flash_attn(group, heads_k_stride=1)
    """
    from transformers import AttentionInterface, AttentionMaskInterface

    whole_number(heads_k_stride, "heads_k_stride must be a number of heads, at least 1", 1)
    # `register` checks the version of transformers first. The two names below replace transformers' own entries.
    adapter.register()
    _ring.set(ring_of(process_group))
    _activation.set(None)
    AttentionInterface.register(HF_NAME, _forward)
    AttentionMaskInterface.register(HF_NAME, mask_spec)


def update_ring_flash_attn_params(cu_seqlens: Tensor, process_group: Any, *, dropout_seed: int | None = None) -> None:
    """Set the documents of the next batch. Every rank holds an equal, contiguous part of the packed row.

    The setting holds in this thread until the next call. Checkpointed layers that backward recomputes keep the
    documents of their forward pass.

    Args:
        cu_seqlens: Cumulative lengths [0, ..., tokens of all ranks].
        process_group: The group that `substitute_hf_flash_attn` got.
        dropout_seed: As in `Ring.activate`, for models that train with attention dropout. ring-flash-attention has no
            such argument.

    Raises:
        InputError: The tokens do not divide by the ranks, the cuts do not ascend from 0, `process_group` is not the
            group of `substitute_hf_flash_attn`, or `dropout_seed` is not a seed.

    Example:
        update_ring_flash_attn_params(cu_seqlens, group)
        ids, positions = (x.chunk(ranks, 1)[rank] for x in (input_ids, position_ids))
        logits = model(input_ids=ids, position_ids=positions).logits
    """
    ring = ring_of(process_group)
    if _ring.get() is not ring:
        raise InputError(
            "update_ring_flash_attn_params: this is not the process_group of substitute_hf_flash_attn, which must be "
            "called first, in the same thread"
        )
    check_dropout_seed(dropout_seed)
    cuts = check_documents(cu_seqlens, None)
    if cuts[-1] % ring.world_size:
        raise InputError(
            f"rank {ring.rank}: cu_seqlens: {cuts[-1]} tokens do not divide by {ring.world_size} ranks; "
            "pad the last document"
        )
    _activation.set(
        Activation(Sequence(ring, make_layout("contiguous", cuts[-1], ring.world_size), cuts), dropout_seed)
    )


def use_ring_attn(flag: bool) -> None:
    """Turn attention over the ring on or off in this thread. While it is off, attention is local.

    Args:
        flag: True: attend over the ring.

    Raises:
        Nothing.

    Example:
        use_ring_attn(False)  # for an evaluation with whole rows on every rank
    """
    _is_on.set(flag)


@torch.compiler.disable
def _forward(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, dropout: float = 0.0,
    scaling: float | None = None, **kwargs: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    """Compute attention for transformers; see `adapters.transformers.attention_forward`."""
    arguments = (module, query, key, value, attention_mask, dropout, scaling)
    if torch._C._current_graph_task_id() != -1:  # recomputation in backward, over the sequence of the forward pass
        return adapter.attention_forward(*arguments, **kwargs)
    active = _activation.get() if _is_on.get() else Activation(None)
    if active is None:
        raise InputError(
            "the documents of the batch are not set: call update_ring_flash_attn_params(cu_seqlens, process_group) "
            "before the model, in the same thread, or use_ring_attn(False) for local attention"
        )
    # Recomputation takes the branch above, so checkpointed regions have to record this activation from outside.
    with entered(active, outside_regions=True):
        return adapter.attention_forward(*arguments, **kwargs)
