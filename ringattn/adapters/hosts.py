"""Helpers of several adapters: comparison of batches across ranks, heads under tensor parallelism."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from hashlib import sha256
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard

from ringattn.errors import DisagreementError, InputError, UnsupportedError
from ringattn.ring import Ring

# --- Comparison of batches --------------------------------------------------------------------------------------------


def check_alike(ring: Ring, batch: Mapping[str, Any], advice: str) -> None:
    """Raise `DisagreementError` on every rank, naming the entries that differ, unless all ranks hold the same `batch`.

    Tensors of any dtype are compared bit by bit, with shape and dtype. Anything else is compared by its `repr`. A
    collective call, on the host. `advice`: the end of the message, which says what to do.
    """
    if ring.world_size == 1:
        return
    # Ranks exchange hashes instead of tensors, so the message stays small for any batch. The names of the entries may
    # differ between ranks too.
    digests = json.dumps({name: _digest(x) for name, x in batch.items()})
    ranks = [json.loads(text) for text in ring.all_gather_text(digests)]
    names = sorted({name for rank in ranks for name in rank})
    if different := [name for name in names if len({rank.get(name) for rank in ranks}) > 1]:
        raise DisagreementError(
            f"rank {ring.rank}: the ranks of a ring hold different batches, {', '.join(different)} differ; {advice}"
        )


def _digest(x: Any) -> str:
    if not isinstance(x, Tensor):
        return repr(x)
    # The bytes are hashed, because numpy has no bfloat16, and because NaNs of equal bits must compare equal.
    raw = x.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes()
    return f"{x.dtype} {tuple(x.shape)} {sha256(raw).hexdigest()[:16]}"


# --- Tensor parallelism -----------------------------------------------------------------------------------------------
# Heads of queries, keys and values may be sharded over ranks of tensor parallelism. Attention treats each head by
# itself, so a rank computes its local heads only.


def local_heads(
    tensors: tuple[Tensor, Tensor, Tensor], dim: int
) -> tuple[tuple[Tensor, Tensor, Tensor], Callable[[Tensor], Tensor]]:
    """Return q, k and v as local tensors, and a function that turns a result into the kind of tensor that q was.

    Differentiable. `dim`: the dimension of heads. Plain tensors are returned unchanged. Raises `InputError` if DTensors
    and plain tensors are mixed, if DTensors have different meshes, or if a mesh does not divide the heads. Raises
    `UnsupportedError` for placements other than Shard(dim).
    """
    if not any(isinstance(x, DTensor) for x in tensors):
        return tensors, lambda out: out
    for name, x in zip("qkv", tensors, strict=True):
        _check(name, x, tensors[0], dim)
    mesh, placements = tensors[0].device_mesh, tensors[0].placements  # type: ignore[attr-defined]
    q, k, v = (x.to_local() for x in tensors)  # type: ignore[attr-defined]
    # `from_local` assumes that all ranks have equal local shapes. `_check` has refused uneven heads.
    return (q, k, v), lambda out: DTensor.from_local(out, mesh, placements)


def local_sinks(sinks: Tensor, heads: int, name: str = "sinks") -> Tensor:
    """Return sinks as a local tensor with one value per local query head; differentiable.

    Plain tensors are returned unchanged. `heads`: this rank's query heads. `name`: the option's name in errors, because
    ALiBi slopes also have one value per query head.

    Raises `InputError` if this rank's part of a DTensor does not have `heads` values.
    """
    if not isinstance(sinks, DTensor):
        return sinks
    local: Tensor = sinks.to_local()
    if local.shape != (heads,) or any(placement.is_partial() for placement in sinks.placements):
        raise InputError(
            f"{name} is a DTensor with placements {sinks.placements}: this rank holds {tuple(local.shape)} of it, but "
            f"has {heads} query heads; shard it like the heads of q, or pass {name}.full_tensor()"
        )
    return local


def _check(name: str, x: Tensor, q: Tensor, dim: int) -> None:
    if not isinstance(x, DTensor) or not isinstance(q, DTensor):
        raise InputError(
            f"{name} is a {type(x).__name__} and q is a {type(q).__name__}; make all three DTensors, or all three "
            "plain tensors with x.to_local()"
        )
    if x.device_mesh != q.device_mesh:
        raise InputError(f"{name} is on {x.device_mesh} and q on {q.device_mesh}; all three need the same mesh")
    if any(placement != Shard(dim) for placement in x.placements):
        raise UnsupportedError(
            f"{name} is a DTensor with placements {x.placements}; attention over a ring takes Shard({dim}), heads over "
            "ranks: redistribute it, and shard tokens with seq.shard, not as a DTensor"
        )
    if x.shape[dim] % x.device_mesh.size():
        # Uneven heads: this rank's query heads would not match its key heads.
        raise InputError(
            f"{name} has {x.shape[dim]} heads over {x.device_mesh.size()} ranks of tensor parallelism; the heads of q, "
            "k and v must divide evenly"
        )
