"""What the runtime asks of an engine, and nothing more.

An engine does the arithmetic of one rank: it folds tiles into a partial, and tiles into gradients. All tensors are
*row-first*: (rows, batch, heads, dim), any strides with a contiguous last dimension, so that a user's tensor (a
transposed view) and a received message (rows outermost) look alike.
Does not know: ranks, schedules, transports.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

from torch import Tensor

from ringattn.geometry import Tile


class Softmax(NamedTuple):
    """How scores become weights. `group`: query heads per K/V head (query head h reads K/V head h // group)."""

    scale: float
    group: int = 1
    softcap: float | None = None


class KV(NamedTuple):
    """Keys (rows, batch, heads, d_k) and values (rows, batch, heads, d_v) of K/V heads `first_head` onwards.

    Also carries dK and dV, which have the same shapes in the accumulator dtype.
    """

    k: Tensor
    v: Tensor
    first_head: int = 0


class Seed(NamedTuple):
    """What backward starts from, for the rank's own queries.

    `dout`: (rows, batch, heads, d_v). `out`: the final output, same shape. `lse`: (batch, heads, rows), merged over
    all keys and sinks, accumulator dtype. `dlse`: gradient of `lse`, same shape, or None where nobody used it.
    `delta`: (batch, heads, rows) = sum(dout * out) - dlse, accumulator dtype.
    """

    dout: Tensor
    out: Tensor
    lse: Tensor
    dlse: Tensor | None
    delta: Tensor


class Engine(Protocol):
    """The block kernels of one rank."""

    name: str

    def prepare(self, tiles: Sequence[Tile], softmax: Softmax) -> Any:
        """Turn the tiles of one step into whatever `attend` and `attend_grad` consume. Done once per plan.

        Query rows of the tiles index `q`; key rows index the K/V that the step reads; heads are query heads.
        """
        ...

    def attend(self, q: Tensor, kv: KV, out: Tensor, lse: Tensor, work: Any) -> None:
        """Fold the tiles into the partial (`out` (rows, batch, heads, d_v), `lse` (batch, heads, rows)), in place."""
        ...

    def attend_grad(self, q: Tensor, kv: KV, seed: Seed, dq: Tensor, dkv: KV, work: Any) -> None:
        """Add the tiles' gradients to `dq` (like q, accumulator dtype) and `dkv` (like kv, accumulator dtype)."""
        ...
