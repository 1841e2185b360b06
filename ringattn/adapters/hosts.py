"""What several adapters share: checked versions, batches of all ranks, heads of tensor parallelism."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from hashlib import sha256
from importlib.metadata import version
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard

from ringattn.errors import DisagreementError, InputError, UnsupportedError
from ringattn.ring import Ring


def require_checked(package: str, *checked: str) -> None:
    """Raise `UnsupportedError` unless the installed `package` is of a minor version ("0.3") among `checked`."""
    installed = version(package)
    if ".".join(installed.split(".")[:2]) not in checked:
        raise UnsupportedError(
            f"this adapter was checked with {package} {', '.join(checked)} and {installed} is installed, whose tensors "
            "may lie otherwise: install one of those, or run the adapter's tests with yours and add it to them"
        )


# --- What the ranks of a ring have in common --------------------------------------------------------------------------


def check_alike(ring: Ring, batch: Mapping[str, Any], advice: str) -> None:
    """Raise `DisagreementError`, which names what differs, on every rank unless all hold the same `batch`.

    Tensors of any dtype are compared bit by bit, with shape and dtype; anything else by its `repr`. A collective call,
    on the host. `advice`: what to do, the end of the message.
    """
    if ring.world_size == 1:
        return
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
    raw = x.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes()
    return f"{x.dtype} {tuple(x.shape)} {sha256(raw).hexdigest()[:16]}"


# --- Tensor parallelism -----------------------------------------------------------------------------------------------
# Queries, keys and values whose heads lie over ranks of tensor parallelism: attention needs only the local ones.


def local_heads(
    tensors: tuple[Tensor, Tensor, Tensor], dim: int
) -> tuple[tuple[Tensor, Tensor, Tensor], Callable[[Tensor], Tensor]]:
    """q, k and v as this rank's tensors, and what makes a result of the same heads into what q was; differentiable.

    `dim`: the dimension of heads. Tensors pass as they are. Raises `InputError` for DTensors beside Tensors, of several
    meshes, or with heads that their mesh does not divide, and `UnsupportedError` for placements other than Shard(dim).
    """
    if not any(isinstance(one, DTensor) for one in tensors):
        return tensors, lambda out: out
    for name, one in zip("qkv", tensors, strict=True):
        _check(name, one, tensors[0], dim)
    mesh, placements = tensors[0].device_mesh, tensors[0].placements  # type: ignore[attr-defined]
    q, k, v = (one.to_local() for one in tensors)  # type: ignore[attr-defined]
    return (q, k, v), lambda out: DTensor.from_local(out, mesh, placements)


def local_sinks(sinks: Tensor, heads: int, name: str = "sinks") -> Tensor:
    """Sinks as this rank's tensor, of as many `heads` as its queries have; differentiable. Tensors pass as they are.

    `name`: what errors call them; slopes of ALiBi are one for each query head, too.

    Raises `InputError` for a DTensor of which this rank has another number of heads.
    """
    if not isinstance(sinks, DTensor):
        return sinks
    local: Tensor = sinks.to_local()
    if local.shape != (heads,) or any(placement.is_partial() for placement in sinks.placements):
        raise InputError(
            f"{name} is a DTensor with placements {sinks.placements}, of which this rank has {tuple(local.shape)}, and "
            f"its queries have {heads} heads; shard it as the heads of q are, or pass {name}.full_tensor()"
        )
    return local


def _check(name: str, one: Tensor, q: Tensor, dim: int) -> None:
    if not isinstance(one, DTensor) or not isinstance(q, DTensor):
        kind, other = type(one).__name__, type(q).__name__
        raise InputError(f"{name} is a {kind} and q is a {other}; make all three DTensors, or none (x.to_local())")
    if one.device_mesh != q.device_mesh:
        raise InputError(f"{name} lies on {one.device_mesh} and q on {q.device_mesh}; all three need the same mesh")
    if any(placement != Shard(dim) for placement in one.placements):
        raise UnsupportedError(
            f"{name} is a DTensor with placements {one.placements}; attention over a ring takes Shard({dim}), heads "
            "over the ranks: redistribute it to that, and shard tokens with seq.shard and not as a DTensor"
        )
    if one.shape[dim] % one.device_mesh.size():
        raise InputError(
            f"{name} has {one.shape[dim]} heads over {one.device_mesh.size()} ranks of tensor parallelism, which "
            "does not come out even, and the heads of q, k and v would not belong together"
        )
