"""A baseline: torch's own internal ring attention, given the same CPU flash block that this package uses.

The public `context_parallel` has no rule for that block on CPU, so its two inner functions are called directly, through
adapters. They are private to torch: this file is the only one that names them, and it is tried against torch 2.13.
Tokens are balanced head to tail (chunk r and chunk 2P-1-r of 2P), and lengths must divide evenly.
"""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor.experimental._context_parallel import _attention as peer

from ringattn.bench.baselines import ALL, flash, flash_backward
from ringattn.bench.gate import Inputs
from ringattn.ring import Ring


def _forward_op(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> tuple[Tensor, ...]:
    return flash(query, key, value, 0.0, options["is_causal"], scale=options["scale"])


def _backward_op(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> tuple[Tensor, ...]:
    saved = options["out"], options["logsumexp"]
    return flash_backward(
        options["grad_out"], query, key, value, *saved, 0.0, options["is_causal"], scale=options["scale"]
    )


class TorchRing:
    """torch's balanced ring over its own default gloo group. `rotate`: alltoall or allgather."""

    heads = kv_heads = ALL

    def __init__(self, ring: Ring, rotate: str) -> None:
        """Opens torch's default process group where there is none."""
        if not dist.is_initialized():
            dist.init_process_group("gloo")
        self.name = f"torch ring ({rotate})"
        self._ring, self._rotate = ring, rotate
        self._group: Any = dist.group.WORLD

    def load(self, inputs: Inputs) -> None:
        """Keep this rank's two chunks as contiguous (batch, heads, tokens, dim) tensors, as torch's ring wants them."""
        assert inputs.q.shape[1] % (2 * self._ring.world_size) == 0, "torch's ring needs even chunks"
        seq = self._ring.sequence(inputs.q.shape[1], layout="zigzag")  # for even lengths the same order
        self.positions = seq.positions()
        self._q, self._k, self._v, self._dout = (seq.shard(x).transpose(1, 2).contiguous() for x in inputs)
        self._scale = inputs.q.shape[3] ** -0.5

    def forward(self) -> Tensor:
        """`_templated_ring_attention`."""
        self._configure()
        results = peer._templated_ring_attention(
            self._group, 2, _forward_op, self._q, self._k, self._v, is_causal=True, scale=self._scale
        )
        self._out, self._lse = results[:2]
        return self._out.transpose(1, 2)

    def backward(self) -> tuple[Tensor, Tensor, Tensor]:
        """`_templated_ring_attention_backward`."""
        self._configure()
        grads: Any = peer._templated_ring_attention_backward(
            self._group, 2, _backward_op, self._dout, "grad_out", self._q, self._k, self._v, self._out, self._lse,
            is_causal=True, scale=self._scale,
        )  # fmt: skip
        dq, dk, dv = (grad.transpose(1, 2) for grad in grads[:3])
        return dq, dk, dv

    def _configure(self) -> None:
        peer._cp_options.enable_load_balance = True
        peer.set_rotate_method(self._rotate)
