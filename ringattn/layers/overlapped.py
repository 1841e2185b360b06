"""Attention of tokens that are projected on the way: keys and values first, and queries while they travel.

Where all of a rank's own K and V leave in one message, they are projected straight into it, and copied out of it for
the rank's own use while it travels. Where queries travel too, nothing leaves before they are made.
Guarantees: what projecting first and attending then gives, and its gradients; refusals before anything is sent.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from ringattn.attention import agreed, apply_attention, call_of, check_recordable, check_sinks
from ringattn.core.dilation import Dilated
from ringattn.engine.base import KV
from ringattn.errors import InputError
from ringattn.layers.projection import Backend, check_projection, project_kv, project_q, stored_dtype
from ringattn.layers.rotary import Rope, Rotation
from ringattn.options import AttentionOptions
from ringattn.runtime.records import LocalTensors
from ringattn.runtime.runtime import AttentionCall
from ringattn.sequence import Sequence


class Heads(NamedTuple):
    """Query heads, K/V heads, and elements of each."""

    query: int
    kv: int
    dim: int


def projected_attention(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    seq: Sequence,
    heads: Heads,
    *,
    q_norm: Tensor | None = None,
    k_norm: Tensor | None = None,
    norm_eps: float = 1e-6,
    rope: Rope | None = None,
    backend: Backend = "auto",
    options: AttentionOptions = AttentionOptions(),  # noqa: B008
    dilated: Dilated | None = None,
) -> Tensor:
    """Self-attention (batch, tokens, q_heads, head_dim) of x (batch, tokens, model), this rank's shard of `seq`.

    `weight`, `bias`, `q_norm`, `k_norm`, `norm_eps`, `rope` and `backend` are those of `project_qkv`, with the
    sequence's own positions. `dilated`: the branches of dilated attention. A collective call that raises what
    `project_qkv` and `Ring.attention` raise.
    """
    ring = seq.ring
    turns: list[Rotation | None] = [None, None]

    def described() -> AttentionCall:
        dtype = stored_dtype(x)
        rows = (heads.query + 2 * heads.kv) * heads.dim
        check_shard(x, seq, weight.shape[-1])
        try:
            check_projection(x, weight, bias, (q_norm, k_norm), rows, heads.dim, backend)
        except InputError as error:
            raise InputError(f"rank {ring.rank}: {error}") from error
        check_recordable(f"rank {ring.rank}: ", {"x": x, "weight": weight})
        check_sinks(f"rank {ring.rank}: ", options.sinks, heads.query, x.device)
        if rope is not None:
            turns[:] = rope.turns(seq.positions().to(x.device), heads.dim, dtype, seq.length)
        sizes = x.shape[0], heads.query, heads.kv, heads.dim, heads.dim
        return call_of(ring, seq, None, sizes, dtype, x.device, options, dilated)

    # What q, k and v are made of, after the first message has left.
    inputs = {"x": x, "weight": weight, "bias": bias, "q_norm": q_norm, "k_norm": k_norm, "sinks": options.sinks}
    call = agreed(ring, described, options.sinks, inputs)
    # One split, so that the two gradients are put together by one copy.
    cut = [heads.query * heads.dim, 2 * heads.kv * heads.dim]
    (q_weight, kv_weight), (q_bias, kv_bias) = weight.split(cut), (None, None) if bias is None else bias.split(cut)
    q_turn, k_turn = turns
    made: list[Tensor] = []
    lent = False

    def make(into: KV | None) -> LocalTensors:
        nonlocal lent
        lent, where = into is not None, None if into is None else (into.k, into.v)
        made[:] = project_kv(
            x, kv_weight, kv_bias, heads.dim, norm=k_norm, norm_eps=norm_eps, turn=k_turn, into=where, backend=backend
        )
        return LocalTensors(*(one.detach().transpose(0, 1) for one in made))

    executor = ring.executor_of(call, backward=False)
    if call.problem.batch and executor.begins_with_keys:
        ring.begin(executor, make)
    else:
        make(None)
    q = project_q(x, q_weight, q_bias, heads.dim, norm=q_norm, norm_eps=norm_eps, turn=q_turn, backend=backend)
    k, v = (one.clone() for one in made) if lent else made  # the message is the ring's memory
    return apply_attention(ring, call, q, k, v, options.sinks)[0]


def check_shard(x: Tensor, seq: Sequence, model: int) -> None:
    """Raise `InputError` unless x is this rank's shard of `seq`, of tokens with `model` elements."""
    rank, tokens = seq.ring.rank, seq.counts[seq.ring.rank]
    if x.dim() != 3 or x.shape[1:] != (tokens, model):
        raise InputError(
            f"rank {rank}: x must be (batch, {tokens}, {model}), this rank's shard, got {tuple(x.shape)}; "
            "pass seq.shard(x)"
        )
