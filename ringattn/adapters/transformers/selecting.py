"""Layers that select keys: an indexer chooses, for each query, the tokens or blocks of tokens it attends to.

The indexer scores the keys of all tokens, so its keys are gathered. The chosen numbers are those of the whole sequence,
and later layers may use them again. With DeepSeek sparse attention, attention gathers latents and rotary keys, not keys
of all heads. MiniMax M3 chooses blocks for each head of keys, and attention gathers keys and values. Attention reads
only the chosen rows. Both work on some queries at a time, so that no tensor of all queries by all keys is made.

Guarantees: the layout may be any. A chosen token that a query must not attend to (there are fewer others than the
indexer chooses) is left out by its position and its document.
"""

from __future__ import annotations

import inspect
import math
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from ringattn.adapters.attend import UNTRACED, as_autocast
from ringattn.adapters.context import sequence_of
from ringattn.adapters.host_versions import Host
from ringattn.errors import UnsupportedError
from ringattn.gradients import once_differentiable
from ringattn.sequence import Sequence


def _host(path: str, name: str, indexer: tuple[str, ...], attention: tuple[str, ...]) -> Host:
    file = f"transformers.models.{path}.modeling_{path}"
    sources = {f"{file}:{name}Indexer.forward": indexer, f"{file}:{name}Attention.forward": attention}
    return Host("transformers", ("5.23", "5.24"), f"selection of keys of {name}", sources=sources)


_DEEPSEEK, _GLM = ("7abdf152", "853de335"), ("dc667718", "8dbe52e1")
SELECTING = {
    "deepseek_v32": _host("deepseek_v32", "DeepseekV32", _DEEPSEEK, ("af38ea5f", "1cdea6a8")),
    "glm_moe_dsa": _host("glm_moe_dsa", "GlmMoeDsa", _GLM, ("9b67e25f", "4471415a")),
    "axk2": _host("axk2", "AXK2", _DEEPSEEK, ("3630cf45", "7a79b7dc")),
    "hy_v4": _host("hy_v4", "HYV4", ("9f289706", "07aee244"), ("d07b5e71", "53512ac3")),
    "mistral_large4_text": _host(
        "mistral_large4", "MistralLarge4Text", ("f74f64ba", "03df9b51"), ("7b22414e", "c0cb9958")
    ),
    "dots3_note_text": _host("dots3_note", "Dots3NoteText", _GLM, ("98e065d1", "9fa2d327")),
}
"""The models whose layers select tokens, by `config.model_type`, and their reviewed code."""

_MINIMAX = "transformers.models.minimax_m3_vl.modeling_minimax_m3_vl:MiniMaxM3VL"
SELECTING_BLOCKS = {
    "minimax_m3_vl_text": Host(
        "transformers",
        ("5.23", "5.24"),
        "selection of blocks of keys of MiniMaxM3VL",
        sources={
            f"{_MINIMAX}Indexer.forward": ("a64c83e8", "9daf621f"),
            f"{_MINIMAX}Indexer.build_block_mask": ("b5b41fd9",),
            f"{_MINIMAX}Attention.forward": ("e7169977", "969b3a7c"),
        },
    )
}
"""The models whose layers select blocks of tokens, in the same form."""

SCORE_BYTES = 1 << 30
"""The most bytes of the indexer's scores at a time, unless those of one query are more."""

ROW_BYTES = 1 << 28
"""The most bytes of chosen latents and of their scores at a time, unless those of one query are more."""


def selects_keys(config: Any) -> bool:
    """Return whether this is the configuration of a model in `SELECTING`."""
    return getattr(config, "model_type", None) in SELECTING


def selects_blocks(config: Any) -> bool:
    """Return whether this is the configuration of a model in `SELECTING_BLOCKS`."""
    return getattr(config, "model_type", None) in SELECTING_BLOCKS


def select_keys(model: nn.Module) -> None:
    """Make the indexers of a model choose among the keys of all ranks. Idempotent.

    Raises `UnsupportedError` if the code of the model is not the reviewed one.
    """
    for module in model.modules():
        kind = getattr(getattr(module, "config", None), "model_type", None)
        if not isinstance(indexer := getattr(module, "indexer", None), nn.Module):
            continue
        for models, choose in ((SELECTING, choose_keys), (SELECTING_BLOCKS, choose_blocks)):
            if kind in models:
                models[kind].require()
                vars(indexer)["forward"] = MethodType(choose, indexer)


# --- The indexer ------------------------------------------------------------------------------------------------------


class _IndexerKeys:
    """Stands for the cache of an indexer: it keeps the keys that the indexer has computed, and returns others."""

    def __init__(self, others: Tensor | None) -> None:
        self.others = others
        self.computed: Tensor | None = None

    def update_indexer(self, keys: Tensor, layer: int) -> Tensor:
        self.computed = keys
        return keys[:, :0] if self.others is None else self.others


@torch.compiler.disable(reason=UNTRACED)
@torch.no_grad()
def choose_keys(module: Any, *args: Any, **kwargs: Any) -> Tensor:
    """Return the numbers of the chosen tokens in the whole sequence, (batch, queries, chosen). A collective call."""
    forward, arguments, cache = call_of(module, args, kwargs)
    mask = arguments["attention_mask"]
    if isinstance(mask, Tensor):
        return forward(**arguments)
    ranges = mask.key_ranges(module, arguments.get("position_ids"))
    if ranges is None:
        return forward(**arguments | {"attention_mask": mask.local(may_be_none=False)[:, 0]})
    seq, first, last = ranges
    # The indexer computes its own keys in each call. The first call scores no keys, and shows these to the others.
    rows, queries = first.shape
    first_call = _IndexerKeys(None)
    nothing = first.new_empty(rows, queries, 0, dtype=torch.bool)
    forward(**arguments | {"attention_mask": nothing, cache: first_call})
    assert first_call.computed is not None
    keys = _IndexerKeys(seq.gather(first_call.computed.contiguous()))
    numbers = torch.arange(seq.length, device=first.device)
    chosen = []
    for part in _parts(queries, rows * module.n_heads * seq.length * 4, SCORE_BYTES):
        allowed = (first[:, part, None] <= numbers) & (numbers <= last[:, part, None])
        local = {name: _queries_of(value, queries, part) for name, value in arguments.items()}
        chosen.append(forward(**local | {"attention_mask": allowed, cache: keys}))
    return torch.cat(chosen, 1)


def call_of(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any], str]:
    """Return the indexer's own forward, the arguments of a call of it, and the name of the argument for its cache."""
    forward: Any = MethodType(type(module).forward, module)
    signature = inspect.signature(forward)
    cache = "cache" if "cache" in signature.parameters else "past_key_values"  # before transformers 5.24
    return forward, signature.bind(*args, **kwargs).arguments, cache


def _queries_of(value: Any, queries: int, part: slice) -> Any:
    """Return the part of an argument that belongs to some queries: of tensors with tokens in dimension 1."""
    if isinstance(value, tuple):
        return tuple(_queries_of(entry, queries, part) for entry in value)
    is_of_queries = isinstance(value, Tensor) and value.dim() > 1 and value.shape[1] == queries
    return value[:, part] if is_of_queries else value


def _parts(queries: int, query_bytes: int, limit: int) -> Iterator[slice]:
    """Cut the queries into parts that need at most `limit` bytes each."""
    length = max(1, limit // max(1, query_bytes))
    return (slice(start, min(start + length, queries)) for start in range(0, queries, length))


# --- The indexer of blocks --------------------------------------------------------------------------------------------


class _BlockKeys(_IndexerKeys):
    """The same for an indexer of blocks, whose keys are (batch, 1, tokens, dim). It calls a layer of the cache."""

    @property
    def layers(self) -> Mapping[int, _BlockKeys]:
        return defaultdict(lambda: self)

    def update_index(self, keys: Tensor) -> Tensor:
        self.computed = keys
        return keys[:, :, :1] if self.others is None else self.others


@dataclass(frozen=True, eq=False)
class BlockChoice:
    """A call of an indexer of blocks over a ring. It runs in attention, which checks the inputs of all ranks before."""

    indexer: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def refuse(self, seq: Sequence, first: Tensor) -> None:
        """Raise `UnsupportedError` as `refuse_other_rows`."""
        _, arguments, _ = call_of(self.indexer, self.args, self.kwargs)
        refuse_other_rows(self.indexer, arguments["position_ids"], seq, first)

    @torch.no_grad()
    def blocks(self, seq: Sequence) -> Tensor:
        """Return the numbers of the chosen blocks, (batch, indexer heads, queries, chosen), -1 for none.

        A collective call.
        """
        forward, arguments, cache = call_of(self.indexer, self.args, self.kwargs)
        ids = arguments["position_ids"]
        # As in `choose_keys`. The first call scores one key for queries at position 0, so there is one block.
        first_call = _BlockKeys(None)
        forward(**arguments | {"position_ids": torch.zeros_like(ids), cache: first_call})
        assert first_call.computed is not None
        keys = _BlockKeys(seq.gather(first_call.computed.contiguous(), 2))
        rows, queries = ids.shape
        chosen = []
        for part in _parts(queries, rows * self.indexer.num_heads * seq.length * 4, SCORE_BYTES):
            local = {name: _queries_of(value, queries, part) for name, value in arguments.items()}
            chosen.append(forward(**local | {cache: keys}))
        return torch.cat(chosen, 2)


@torch.compiler.disable(reason=UNTRACED)
def choose_blocks(module: Any, *args: Any, **kwargs: Any) -> Tensor | BlockChoice:
    """Return the numbers of the chosen blocks, or over a ring the call that attention makes."""
    if sequence_of() is not None:
        return BlockChoice(module, args, kwargs)
    blocks: Tensor = type(module).forward(module, *args, **kwargs)
    return blocks


# --- Attention --------------------------------------------------------------------------------------------------------


def selected(mask: Any, indices: Tensor, keys: int) -> Tensor:
    """Return the table of a local mask without the keys that were not chosen, (batch, 1, queries, keys)."""
    table: Tensor = mask if isinstance(mask, Tensor) else mask.local(may_be_none=False)
    is_chosen = torch.zeros(*indices.shape[:2], keys, dtype=torch.bool, device=indices.device)
    is_chosen = is_chosen.scatter_(-1, indices.long(), True)[:, None]
    if table.dtype == torch.bool:
        return table[..., :keys] & is_chosen
    return table[..., :keys].masked_fill(~is_chosen, torch.finfo(table.dtype).min)


def selected_blocks(module: Any, mask: Any, blocks: Tensor, keys: int, dtype: torch.dtype) -> Tensor:
    """Return the table of a local mask without the blocks that were not chosen, (batch, heads, queries, keys)."""
    table: Tensor = mask if isinstance(mask, Tensor) else mask.local(may_be_none=False)
    # With a table, the method does not use positions.
    masked: Tensor = module.indexer.build_block_mask(blocks, table[..., :keys], keys, dtype, blocks.device, None)
    return masked


def refuse_other_selection(module: Any, arguments: Mapping[str, Any]) -> None:
    """Raise `UnsupportedError` if a module passes selected keys or blocks to attention, but has no reviewed code."""
    for name, is_known in (("indices", selects_keys), ("block_indices", selects_blocks)):
        if arguments.get(name) is not None and not is_known(getattr(module, "config", None)):
            raise UnsupportedError(
                f"{type(module).__name__} selects keys ({name}) in a way that was not compared with one process; keep "
                "its own attn_implementation, without a ring"
            )


def refuse_other_rows(module: Any, ids: Tensor, seq: Sequence, first: Tensor) -> None:
    """Raise `UnsupportedError` unless `ids` count the tokens of rows without documents and without padding before.

    `module`: reads blocks of tokens. `first`: the first token that each query may attend to, (batch, tokens).
    """
    if first.any() or not torch.equal(ids, seq.positions().to(ids.device).expand_as(ids)):
        raise UnsupportedError(
            f"{type(module).__name__} counts blocks of tokens from the start of the row and compares them with "
            "position_ids: with packed documents, or with padding before the tokens of a row, queries attend to other "
            "documents or to padding, in one process too; give each document its own row, pad after its tokens, and "
            "pass position_ids=seq.positions()[None]"
        )


def refuse_without_latents(module: Any) -> None:
    """Raise `UnsupportedError` for a module whose selected keys cannot be computed from latents."""
    raise UnsupportedError(
        f"the kv_b_proj of {type(module).__name__} is not a plain linear layer, or its weights are sharded inside the "
        "module: over a ring, a layer that selects keys reads them from latents; leave kv_b_proj out of the adapter's "
        "target modules and of tensor parallelism, and shard whole layers by FSDP2"
    )


def refuse_unprepared(module: Any) -> None:
    """Raise `UnsupportedError` for a module of a model that was not prepared."""
    raise UnsupportedError(
        f"{type(module).__name__} selects or compresses keys: call ringattn.adapters.transformers.prepare(model) once"
    )


def refuse_dropout(dropout: float) -> None:
    """Raise `UnsupportedError` for attention dropout of selected keys."""
    if dropout:
        raise UnsupportedError(
            f"attention dropout is {dropout}, but dropout of selected keys is not supported; make the model with "
            "config.attention_dropout=0.0, or call model.eval()"
        )


@torch.compiler.disable(reason=UNTRACED)
def attend_selected(
    module: Any, seq: Sequence, q: Tensor, rotary: Tensor, latents: Tensor, indices: Tensor,
    ranges: tuple[Tensor, Tensor], scale: float, sinks: Tensor | None,
) -> Tensor:  # fmt: skip
    """Return attention of this rank's queries to the chosen tokens. Differentiable. A collective call.

    `ranges`: the first and the last token that each query may attend to, (batch, tokens) each.

    Shape:
        q: (batch, tokens, heads, d_k)
        rotary: (batch, tokens, d_rope)
        latents: (batch, tokens, d_latent)
        indices: (batch, tokens, chosen)
        sinks: (heads,)
        out: (batch, tokens, heads, d_v)
    """
    weight = as_autocast(module.kv_b_proj.weight).unflatten(0, (q.shape[2], -1))
    w_k, w_v = weight.split([module.qk_nope_head_dim, module.v_head_dim], 1)
    rows = seq.gather(as_autocast(torch.cat([latents, rotary], -1)))
    return SelectedRows.apply(as_autocast(q), rows, w_k, w_v, sinks, indices, *ranges, scale, 1)


@torch.compiler.disable(reason=UNTRACED)
def attend_blocks(
    seq: Sequence, q: Tensor, k: Tensor, v: Tensor, choice: BlockChoice, ranges: tuple[Tensor, Tensor], scale: float
) -> Tensor:
    """Return attention of this rank's queries to the chosen blocks of keys. Differentiable. A collective call.

    `ranges`: as in `attend_selected`.

    Shape:
        q: (batch, tokens, q_heads, d_k)
        k: (batch, tokens, kv_heads, d_k)
        v: (batch, tokens, kv_heads, d_v)
        out: (batch, tokens, q_heads, d_v)
    """
    rows, blocks = seq.gather(torch.cat([k, v], -1)), choice.blocks(seq)
    # Heads of queries with the same keys and the same blocks are a group, and groups are rows of the batch.
    groups = math.lcm(k.shape[2], blocks.shape[1])
    by_group = rows.transpose(1, 2).repeat_interleave(groups // k.shape[2], 1).flatten(0, 1)
    blocks = blocks.repeat_interleave(groups // blocks.shape[1], 1).flatten(0, 1)
    queries = q.unflatten(2, (groups, -1)).transpose(1, 2).flatten(0, 1)
    first, last = (x.repeat_interleave(groups, 0) for x in ranges)
    size = choice.indexer.block_size
    out: Tensor = SelectedRows.apply(queries, by_group, None, None, None, blocks, first, last, scale, size)
    return out.unflatten(0, (-1, groups)).transpose(1, 2).flatten(2, 3)


class SelectedRows(torch.autograd.Function):
    """Attention to chosen rows. Backward computes it again, some queries at a time.

    `rows`: (batch, all tokens, features) with latents and rotary keys. If `w_k` and `w_v` are None, with keys and
    values, or with keys that are the values too. `indices`: (batch, queries, chosen) numbers of blocks of `size`
    tokens. Gradients of rows and weights are summed in float32 or wider.
    """

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, rows: Tensor, w_k: Tensor | None, w_v: Tensor | None, sinks: Tensor | None,
        indices: Tensor, first: Tensor, last: Tensor, scale: float, size: int,
    ) -> Tensor:  # fmt: skip
        ctx.scale, ctx.size = scale, size
        ctx.save_for_backward(q, rows, w_k, w_v, sinks, indices, first, last)
        d_v = (rows.shape[2] - q.shape[3] or q.shape[3]) if w_v is None else w_v.shape[1]
        out = q.new_empty(*q.shape[:3], d_v)
        for part in _parts(q.shape[1], _query_bytes(q, rows, indices, size), ROW_BYTES):
            _, values, allowed = _chosen(rows, indices[:, part], first[:, part], last[:, part], size)
            out[:, part] = _attend(q[:, part], values, w_k, w_v, sinks, allowed, scale)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        q, rows, *weights, indices, first, last = ctx.saved_tensors
        wide = torch.promote_types(q.dtype, torch.float32)
        d_q = torch.empty_like(q)
        d_rows = torch.zeros(rows.shape[0] * rows.shape[1], rows.shape[2], dtype=wide, device=rows.device)
        d_weights = [None if x is None else torch.zeros_like(x, dtype=wide) for x in weights]
        for part in _parts(q.shape[1], _query_bytes(q, rows, indices, ctx.size), ROW_BYTES):
            numbers, values, allowed = _chosen(rows, indices[:, part], first[:, part], last[:, part], ctx.size)
            queries, chosen = (x.detach().requires_grad_() for x in (q[:, part], values))
            keys, outputs, sink = (None if x is None else x.detach().requires_grad_() for x in weights)
            with torch.enable_grad():
                out = _attend(queries, chosen, keys, outputs, sink, allowed, ctx.scale)
            inputs = [x for x in (queries, chosen, keys, outputs, sink) if x is not None]
            d_q[:, part], d_values, *of_weights = torch.autograd.grad(out, inputs, grad[:, part])
            d_rows.index_add_(0, numbers.flatten(), d_values.flatten(0, 2).to(wide))
            for total, gradient in zip([x for x in d_weights if x is not None], of_weights, strict=True):
                total += gradient
        in_dtype = (None if total is None else total.to(x.dtype) for total, x in zip(d_weights, weights, strict=True))
        return d_q, d_rows.view_as(rows).to(rows.dtype), *in_dtype, None, None, None, None, None


def _query_bytes(q: Tensor, rows: Tensor, indices: Tensor, size: int) -> int:
    """Return the bytes of one query of each row: of its chosen rows and of their scores and weights."""
    row_bytes = rows.shape[2] * rows.element_size()
    return q.shape[0] * indices.shape[2] * size * (row_bytes + 2 * q.shape[2] * max(4, q.element_size()))


def _chosen(rows: Tensor, indices: Tensor, first: Tensor, last: Tensor, size: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return the chosen rows' numbers in the flattened batch, their values, and which ones a query may attend to."""
    tokens = (indices.long()[..., None] * size + torch.arange(size, device=indices.device)).flatten(-2)
    allowed = (first[..., None] <= tokens) & (tokens <= last[..., None])
    offsets = torch.arange(len(rows), device=rows.device)[:, None, None] * rows.shape[1]
    # A block may end after the last token. The number -1 stands for no block.
    numbers = tokens.clamp(0, rows.shape[1] - 1) + offsets
    return numbers, rows.flatten(0, 1)[numbers], allowed


def _attend(
    q: Tensor, chosen: Tensor, w_k: Tensor | None, w_v: Tensor | None, sinks: Tensor | None, allowed: Tensor,
    scale: float,
) -> Tensor:  # fmt: skip
    """Return attention of some queries to chosen rows, with the weights of keys and values absorbed into q and out."""
    with torch.autocast(q.device.type, enabled=False):
        if w_k is None or w_v is None:
            keys = chosen[..., : q.shape[3]]
            values = chosen[..., q.shape[3] :] if chosen.shape[3] > q.shape[3] else keys
        else:
            keys, values = chosen, chosen[..., : w_v.shape[2]]
            nope, rotary = q.split([w_k.shape[1], q.shape[3] - w_k.shape[1]], -1)
            q = torch.cat([torch.einsum("bshd,hdr->bshr", nope, w_k), rotary], -1)
        wide = torch.promote_types(q.dtype, torch.float32)
        scores = (q @ keys.mT).to(wide) * scale
        scores = scores.masked_fill(~allowed[:, :, None], -torch.inf)
        if sinks is not None:
            column = sinks.to(wide)[:, None].expand(*scores.shape[:3], 1)
            scores = torch.cat([scores, column], -1)
        weights = scores.softmax(-1)[..., : chosen.shape[2]].to(q.dtype)
        out = weights @ values
        return out if w_v is None else torch.einsum("bshr,hdr->bshd", out, w_v)
