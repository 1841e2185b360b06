"""The implementations that the speed benchmark compares, all on torch's own CPU flash kernel.

`OurRing` is this package. `one_process` computes the whole problem in one call on rank 0, while the other ranks wait.
`independent` is the upper bound: each rank computes its share of the heads of the whole problem without any
communication. If it is slower than a perfect split, the cause is the machine and not the ring.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor.experimental._context_parallel import _attention as peer

from ringattn.bench.gate import Inputs
from ringattn.ring import Ring

flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward

ALL = slice(None)
NO_TOKENS = torch.empty(0, dtype=torch.int64)


class OurRing:
    """Causal `Ring.attention`, named after its schedule."""

    def __init__(self, ring: Ring, layout: str = "zigzag", schedule: str = "ring", backward: bool = True) -> None:
        """Store the settings. With `backward=False`, gradients are not required, so forward caches nothing for them."""
        self.ring, self.layout, self.schedule = ring, layout, schedule
        self.name = f"ringattn {schedule}"
        self.heads = self.kv_heads = ALL
        self._with_backward = backward

    def load(self, inputs: Inputs) -> None:
        """Shard the inputs for this rank."""
        self._seq = self.ring.sequence(inputs.q.shape[1], layout=self.layout)
        self.positions = self._seq.positions()
        self._qkv = tuple(self._seq.shard(x).requires_grad_(self._with_backward) for x in inputs[:3])
        self._dout = self._seq.shard(inputs.dout) if self._with_backward else None

    def forward(self) -> Tensor:
        """Compute attention and return the output, whose autograd graph is kept for `backward`."""
        q, k, v = self._qkv
        self._out = self.ring.attention(q, k, v, self._seq, causal=True, schedule=self.schedule)
        return self._out.detach()

    def backward(self) -> tuple[Tensor, Tensor, Tensor] | None:
        """Return the gradients of the last forward pass."""
        if not self._with_backward:
            return None
        dq, dk, dv = torch.autograd.grad(self._out, self._qkv, self._dout)
        return dq, dk, dv


class Flash:
    """A baseline that computes some heads of the whole problem in one call of the kernel. It is idle without heads."""

    def __init__(self, name: str, heads: slice, kv_heads: slice) -> None:
        """Store the name, and this rank's query heads `heads` and K/V heads `kv_heads`."""
        self.name, self.heads, self.kv_heads = name, heads, kv_heads

    def load(self, inputs: Inputs) -> None:
        """Store this rank's heads as (batch, heads, tokens, dim) views."""
        idle = self.heads == slice(0, 0)
        self.positions = NO_TOKENS if idle else torch.arange(inputs.q.shape[1])
        (q, k, v, dout), empty = inputs, inputs.q[:, :0, :0]
        local = (q[:, :, self.heads], k[:, :, self.kv_heads], v[:, :, self.kv_heads], dout[:, :, self.heads])
        self._idle, self._empty = idle, empty
        self._q, self._k, self._v, self._dout = (x.transpose(1, 2) for x in local)

    def forward(self) -> Tensor:
        """Call the forward kernel once, or not at all if idle. Return the output of this rank's heads."""
        if self._idle:
            return self._empty
        self._out, self._lse = flash(self._q, self._k, self._v, 0.0, True)
        return self._out.transpose(1, 2)

    def backward(self) -> tuple[Tensor, Tensor, Tensor]:
        """Call the backward kernel once, or not at all if idle. Return the gradients of this rank's heads."""
        if self._idle:
            return self._empty, self._empty, self._empty
        grads = flash_backward(self._dout, self._q, self._k, self._v, self._out, self._lse, 0.0, True)
        dq, dk, dv = (grad.transpose(1, 2) for grad in grads)
        return dq, dk, dv


def one_process(rank: int) -> Flash:
    """Return the baseline that computes the whole problem on rank 0."""
    return Flash("one process", ALL, ALL) if rank == 0 else Flash("one process", slice(0, 0), slice(0, 0))


def independent(rank: int, ranks: int, heads: int, kv_heads: int) -> Flash | None:
    """Return the baseline that gives each rank an equal share of the heads, or None if the heads do not divide."""
    if kv_heads % ranks:
        return None
    local_heads, local_kv_heads = (slice(rank * n // ranks, (rank + 1) * n // ranks) for n in (heads, kv_heads))
    return Flash("no exchange", local_heads, local_kv_heads)


# --- the ring of torch ------------------------------------------------------------------------------------------------


def _forward_op(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> tuple[Tensor, ...]:
    return flash(query, key, value, 0.0, options["is_causal"], scale=options["scale"])


def _backward_op(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> tuple[Tensor, ...]:
    saved = options["out"], options["logsumexp"]
    return flash_backward(
        options["grad_out"], query, key, value, *saved, 0.0, options["is_causal"], scale=options["scale"]
    )


class TorchRing:
    """torch's load-balanced ring on the default gloo process group.

    `rotate` is how torch passes K and V on: alltoall or allgather.
    """

    heads = kv_heads = ALL

    def __init__(self, ring: Ring, rotate: str) -> None:
        """Initialise torch's default process group if it does not exist yet."""
        if not dist.is_initialized():
            dist.init_process_group("gloo")
        self.name = f"torch ring ({rotate})"
        self._ring, self._rotate = ring, rotate
        self._group: Any = dist.group.WORLD

    def load(self, inputs: Inputs) -> None:
        """Store this rank's two chunks as contiguous (batch, heads, tokens, dim) tensors, as torch's ring requires."""
        assert inputs.q.shape[1] % (2 * self._ring.world_size) == 0, "torch's ring needs even chunks"
        seq = self._ring.sequence(inputs.q.shape[1], layout="zigzag")  # the same order for even lengths
        self.positions = seq.positions()
        self._q, self._k, self._v, self._dout = (seq.shard(x).transpose(1, 2).contiguous() for x in inputs)
        self._scale = inputs.q.shape[3] ** -0.5

    def forward(self) -> Tensor:
        """Call torch's `_templated_ring_attention` and return the output."""
        self._configure()
        results = peer._templated_ring_attention(
            self._group, 2, _forward_op, self._q, self._k, self._v, is_causal=True, scale=self._scale
        )
        self._out, self._lse = results[:2]
        return self._out.transpose(1, 2)

    def backward(self) -> tuple[Tensor, Tensor, Tensor]:
        """Call torch's `_templated_ring_attention_backward` and return the gradients."""
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
