"""Torch's NCCL process groups beside a ring: whether there are any, and a look for those that are opened after it."""

from __future__ import annotations

from collections.abc import Callable

import torch.distributed as dist
from torch.distributed.distributed_c10d import _world


def nccl_groups() -> bool:
    """Whether torch has an NCCL process group in this process, the default one or another."""
    if not dist.is_initialized():
        return False
    return any("nccl" in str(config) for config in (dist.get_backend_config(), *_world.pg_backend_config.values()))


class LateGroups:
    """Calls `tell` once, at the first `look` after torch has opened an NCCL process group."""

    def __init__(self, tell: Callable[[], None]) -> None:
        self._tell: Callable[[], None] | None = tell
        self._groups = -1

    def look(self) -> None:
        """At each call of a ring: the length of a dict, as long as torch opens no group."""
        if self._tell is None or len(_world.pg_map) == self._groups:
            return
        self._groups = len(_world.pg_map)
        if nccl_groups():
            tell, self._tell = self._tell, None
            tell()
