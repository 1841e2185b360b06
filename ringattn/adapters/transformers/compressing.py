"""Compressed keys of DeepSeek V4: a query attends to a window of tokens, and to compressed keys of blocks of tokens.

A compressor turns each block into one key, which is its value too. In some layers, an indexer chooses some of these
keys for each query. Over a ring, the projections of all tokens are gathered, and the model's own compressors compute
all compressed keys on every rank. Window and compressed keys have one softmax.

Guarantees: the layout may be any. Documents and padding before the tokens are refused: in one process too, a block may
mix documents.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from ringattn.adapters.attend import UNTRACED, as_autocast
from ringattn.adapters.host_versions import Host
from ringattn.adapters.transformers.selecting import (
    SelectedRows,
    call_of,
    refuse_other_rows,
    refuse_unprepared,
)
from ringattn.errors import UnsupportedError
from ringattn.sequence import Sequence

_FILE = "transformers.models.deepseek_v4.modeling_deepseek_v4:DeepseekV4"
COMPRESSING = {
    "deepseek_v4": Host(
        "transformers",
        ("5.23", "5.24"),
        "compression of keys of DeepseekV4",
        sources={
            f"{_FILE}HCACompressor.forward": ("29b3e728", "1d3adbdd"),
            f"{_FILE}CSACompressor.forward": ("ec8d4a58", "6ac409e4"),
            f"{_FILE}Indexer.forward": ("a0e36b41", "760f720b"),
            f"{_FILE}Attention.forward": ("5ab82a63", "be9e5019"),
        },
    )
}
"""The models whose layers compress keys, by `config.model_type`, and their reviewed code."""

_CALL = "_ringattn_compression"


def compresses_keys(config: Any) -> bool:
    """Return whether this is the configuration of a model in `COMPRESSING`."""
    return getattr(config, "model_type", None) in COMPRESSING


def compress_keys(model: nn.Module) -> None:
    """Make the compressors of a model leave their calls to attention. Idempotent.

    Raises `UnsupportedError` if the code of the model is not the reviewed one.
    """
    for module in model.modules():
        config: Any = getattr(module, "config", None)
        if isinstance(compressor := getattr(module, "compressor", None), nn.Module) and compresses_keys(config):
            COMPRESSING[config.model_type].require()
            vars(compressor)["forward"] = MethodType(_leave_call, compressor)


class _Gathered:
    """Stands for the cache of a compressor: it returns the projections of all tokens in whole blocks of `size`."""

    def __init__(self, seq: Sequence, size: int) -> None:
        self.seq, self.size = seq, size

    @property
    def layers(self) -> Mapping[int, _Gathered]:
        return defaultdict(lambda: self)

    def store_compression_weights(self, name: str, kv: Tensor, gate: Tensor) -> tuple[Tensor, Tensor, int]:
        rows = self.seq.gather(torch.cat([kv, gate], -1))[:, : self.seq.length // self.size * self.size]
        return rows[..., : kv.shape[2]], rows[..., kv.shape[2] :], 0

    def update_overlap_state(self, name: str, kv: Tensor, gate: Tensor, dim: int) -> tuple[None, None]:
        return None, None

    def update_compressor_states(self, name: str, compressed: Tensor) -> Tensor:
        return compressed


@dataclass(frozen=True, eq=False)
class Compression:
    """A call of a compressor. It runs in attention, which checks the inputs of all ranks before."""

    compressor: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def refuse(self, seq: Sequence, first: Tensor) -> None:
        """Raise `UnsupportedError` as `refuse_other_rows`, and for ranks with one token.

        For one query, the model does not compute which compressed keys it may attend to.
        """
        _, arguments, _ = call_of(self.compressor, self.args, self.kwargs)
        refuse_other_rows(self.compressor, arguments["position_ids"], seq, first)
        if seq.ring.world_size > 1 and min(seq.counts) < 2:
            raise UnsupportedError(
                f"{type(self.compressor).__name__} needs two tokens or more on every rank; {seq!r} has {seq.counts}: "
                "use longer texts or fewer ranks"
            )

    def keys(self, seq: Sequence | None) -> tuple[Tensor, Tensor | None]:
        """Return the compressed keys, (batch, 1, blocks, dim), and their bias, (batch, 1, queries, blocks).

        The bias is 0 for keys that a query attends to, and negative infinity for others. None: it attends to all.
        With a sequence, this is a collective call.
        """
        forward, arguments, cache = call_of(self.compressor, self.args, self.kwargs)
        if seq is not None:
            arguments = {**arguments, cache: _Gathered(seq, self.compressor.compress_rate)}
        keys: tuple[Tensor, Tensor | None] = forward(**arguments)
        return keys


@torch.compiler.disable(reason=UNTRACED)
def _leave_call(module: Any, hidden_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, None]:
    """Keep the call for `compression_of`, and return no keys."""
    vars(module)[_CALL] = Compression(module, (hidden_states, *args), kwargs)
    return hidden_states.new_empty(len(hidden_states), 1, 0, module.head_dim), None


def compression_of(module: Any) -> Compression | None:
    """Return the call that the compressor of an attention module has left, and forget it. None: it has none.

    Raises `UnsupportedError` if the model was not prepared.
    """
    compressor = getattr(module, "compressor", None)
    if compressor is None or not compresses_keys(getattr(module, "config", None)):
        return None
    if _CALL not in vars(compressor):
        refuse_unprepared(module)
    call: Compression = vars(compressor).pop(_CALL)
    return call


def with_compressed_keys(compression: Compression, keys: Tensor, mask: Any) -> tuple[Tensor, Tensor]:
    """Return local keys and the table of their mask with the compressed keys after them."""
    table: Tensor = mask if isinstance(mask, Tensor) else mask.local(may_be_none=False)
    table = table[..., : keys.shape[2]]
    if table.dtype == torch.bool:
        table = torch.zeros_like(table, dtype=keys.dtype).masked_fill(~table, torch.finfo(keys.dtype).min)
    compressed, bias = compression.keys(None)
    if bias is None:
        bias = table.new_zeros(len(table), 1, table.shape[2], compressed.shape[2])
    return torch.cat([keys, compressed.to(keys.dtype)], 2), torch.cat([table, bias.to(table.dtype)], -1)


@torch.compiler.disable(reason=UNTRACED)
def attend_compressed(
    seq: Sequence, q: Tensor, k: Tensor, compression: Compression, window: int, scale: float, sinks: Tensor | None
) -> Tensor:
    """Return attention of this rank's queries to tokens and compressed keys. Differentiable. A collective call.

    `window`: the number of earlier tokens that a query attends to.

    Shape:
        q: (batch, tokens, heads, dim)
        k: (batch, tokens, dim)
        sinks: (heads,)
        out: (batch, tokens, heads, dim)
    """
    compressed, bias = compression.keys(seq)
    rows = torch.cat([seq.gather(k), as_autocast(compressed[:, 0])], 1)
    last = seq.positions()
    # Negative numbers stand for no row: tokens before the first one, and keys that a query does not attend to.
    chosen = (last[:, None] - torch.arange(window + 1, device=last.device)).expand(len(q), -1, -1)
    if bias is not None:
        allowed = bias[:, 0] == 0
        numbers = torch.arange(seq.length, rows.shape[1], device=q.device).where(allowed, -1)
        chosen = torch.cat([chosen, numbers.topk(int(allowed.sum(-1).max()), -1).values], -1)
    first = chosen.new_zeros(chosen.shape[:2])
    out: Tensor = SelectedRows.apply(q, rows, None, None, sinks, chosen, first, first + rows.shape[1], scale, 1)
    return out
