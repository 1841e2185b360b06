"""What the ranks of a ring have to have in common before they attend: their batches, and their refusals."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from hashlib import sha256
from typing import Any

import torch
from torch import Tensor

from ringattn.errors import DisagreementError, InputError
from ringattn.ring import Ring


@contextmanager
def refused_by_all(ring: Ring | None) -> Iterator[None]:
    """An `InputError` that this rank alone raises inside is raised by the next call of every rank of `ring`.

    Inside must be no collective call: its refusals are those of all ranks already. None: nobody else has to hear.
    """
    try:
        yield
    except InputError as error:
        if ring is not None and ring.is_open:
            ring.check_consistency("", error)
        raise


def check_alike(ring: Ring, batch: Mapping[str, Any], advice: str) -> None:
    """Raise `DisagreementError`, which names what differs, on every rank unless all hold the same `batch`.

    Tensors of any dtype are compared bit by bit, with shape and dtype; anything else by its `repr`. A collective call,
    on the host. `advice`: what to do, the end of the message.
    """
    if ring.world_size == 1:
        return
    told = [json.loads(words) for words in ring.all_gather_text(json.dumps({k: _digest(x) for k, x in batch.items()}))]
    names = sorted({name for one in told for name in one})
    if other := [name for name in names if len({one.get(name) for one in told}) > 1]:
        raise DisagreementError(
            f"rank {ring.rank}: the ranks of a ring hold different batches, {', '.join(other)} differ; {advice}"
        )


def _digest(x: Any) -> str:
    if not isinstance(x, Tensor):
        return repr(x)
    raw = x.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes()
    return f"{x.dtype} {tuple(x.shape)} {sha256(raw).hexdigest()[:16]}"
