"""The engine on this project's own Triton kernels.

Promises one launch a step forward and two backward, whatever tiles the step has; partials and gradients in float32 from
the first step to the last; softcap, any head dimensions to 256, any strides; the same bits for the same calls; and no
allocation in a pass but the block tables, which the first pass on a device makes and keeps.
Needs a CUDA device, or Triton's interpreter.
Does not know: ranks, schedules, float64 (refused).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import TypedDict

import torch
import triton
from torch import Tensor

from ringattn.engine.base import KV, Seed, Softmax
from ringattn.engine.blocks import Blocks, key_blocks, query_blocks
from ringattn.errors import UnsupportedError
from ringattn.geometry import Tile
from ringattn.kernels.attention_backward import grad_kv, grad_q
from ringattn.kernels.attention_forward import forward
from ringattn.kernels.configs import ARCHITECTURES, DIMS, Configs, configs_for
from ringattn.kernels.launch_call import Config, Table

DTYPES = (torch.float32, torch.float16, torch.bfloat16)


class TritonWork:
    """The tiles of one step with the block tables that were made of them so far."""

    def __init__(self, tiles: Sequence[Tile], softmax: Softmax) -> None:
        self.tiles, self.softmax = tuple(tiles), softmax
        self._tables: dict[tuple[str, int, int, torch.device], Table] = {}

    def by_query(self, config: Config, device: torch.device) -> Table:
        """Query blocks of `config.block_m` rows that meet key blocks of `config.block_n`."""
        return self._kept("query", query_blocks, config.block_m, config.block_n, device)

    def by_key(self, config: Config, device: torch.device) -> Table:
        """Key blocks of `config.block_n` rows that meet query blocks of `config.block_m`."""
        make = partial(key_blocks, group=self.softmax.group)
        return self._kept("key", make, config.block_n, config.block_m, device)

    def _kept(self, side: str, make: Callable[..., Blocks], own: int, other: int, device: torch.device) -> Table:
        key = (side, own, other, device)
        if key not in self._tables:
            made = make(self.tiles, own_rows=own, other_rows=other)
            blocks, entries = (torch.from_numpy(x).to(device) for x in (made.blocks, made.entries))
            self._tables[key] = Table(blocks, entries, made.slots)
        return self._tables[key]


class TritonEngine:
    """Attention by the kernels of this project."""

    name = "triton"

    def __init__(self, configs: Configs | None = None) -> None:
        """`configs`: block sizes for every call; by default the table's for its device, dtype and head dimensions."""
        self._configs = configs

    def prepare(self, tiles: Sequence[Tile], softmax: Softmax) -> TritonWork:
        """Keep the tiles; their block tables are made for the first call, which brings the dtype and the device."""
        return TritonWork(tiles, softmax)

    def attend(self, q: Tensor, kv: KV, out: Tensor, lse: Tensor, work: TritonWork) -> None:
        """Fold the tiles into the partial, in place. Raises UnsupportedError for float64 and head dimensions > 256."""
        config = self._configs_for(q, kv).forward
        table = work.by_query(config, q.device)
        with torch.cuda.device_of(q):
            forward(q, kv.k, kv.v, out, lse, table, config, **_facts(kv, work)).run()

    def attend_grad(self, q: Tensor, kv: KV, seed: Seed, dq: Tensor, dkv: KV, work: TritonWork) -> None:
        """Add the tiles' gradients to `dq` and `dkv`, in place, `dq` first. Raises as `attend` does."""
        configs = self._configs_for(q, kv)
        operands = (q, kv.k, kv.v, seed.dout, seed.lse, seed.delta)
        by_query, by_key = work.by_query(configs.grad_q, q.device), work.by_key(configs.grad_kv, q.device)
        with torch.cuda.device_of(q):
            grad_q(*operands, dq, by_query, configs.grad_q, **_facts(kv, work)).run()
            grad_kv(*operands, dkv.k, dkv.v, by_key, configs.grad_kv, **_facts(kv, work)).run()

    def _configs_for(self, q: Tensor, kv: KV) -> Configs:
        dim = max(q.shape[3], kv.v.shape[3])
        if q.dtype not in DTYPES:
            raise UnsupportedError(f"engine 'triton' does not support {q.dtype}; use engine='plain'")
        if dim > DIMS[-1]:
            raise UnsupportedError(
                f"engine 'triton' takes head dimensions to {DIMS[-1]}, not {dim}; use engine='plain'"
            )
        return self._configs or configs_for(architecture(q.device), q.dtype, dim)


class _Facts(TypedDict):
    """What a kernel is told beside tensors."""

    scale: float
    softcap: float | None
    group: int
    first_kv_head: int


def _facts(kv: KV, work: TritonWork) -> _Facts:
    scale, group, softcap = work.softmax
    return _Facts(scale=scale, softcap=softcap, group=group, first_kv_head=kv.first_head)


@cache
def architecture(device: torch.device) -> int:
    """The architecture with block sizes that `device` runs: 10 * major + minor, the nearest that is not above its own.

    The interpreter takes the oldest. Raises UnsupportedError for a GPU older than that.
    """
    if device.type != "cuda":
        return ARCHITECTURES[0]
    major, minor = torch.cuda.get_device_capability(device)
    found = max((one for one in ARCHITECTURES if one <= 10 * major + minor), default=None)
    if found is None:
        raise UnsupportedError(
            f"engine='triton' needs a GPU from sm_{ARCHITECTURES[0]} on, not sm_{major}{minor}; use engine='plain'"
        )
    return found


def missing(device: torch.device) -> str | None:
    """Why this engine cannot run on `device`, or None."""
    if device.type == "cuda" or triton.knobs.runtime.interpret:
        return None
    return f"engine='triton' needs a CUDA device, not {device}; use engine='auto' or engine='plain'"
