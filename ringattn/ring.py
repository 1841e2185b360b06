"""A ring: one rank's end of a group of ranks that attend together.

Owns the transport, the pool and the cached plans; everything closes with it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Many
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from ringattn import attention as attention_module
from ringattn import dilated, explain
from ringattn.core.layout import make_layout
from ringattn.core.problem import EIGHT_BIT, FLOATS, wire_name
from ringattn.engine.base import Engine
from ringattn.engine.select import ENGINES
from ringattn.errors import InputError
from ringattn.observe.memory import Action, Level, MemoryMonitor, Profile
from ringattn.runtime.activation import activate
from ringattn.runtime.runtime import Runtime
from ringattn.sequence import Sequence, check_documents
from ringattn.transport.base import Transport
from ringattn.transport.nccl.options import NcclOptions
from ringattn.transport.rendezvous import open_transport


class Ring(Runtime):
    """A group of ranks that attend together.

    `group`: a ProcessGroup, a DeviceMesh (its dimension `cp`), or None: the default process group if there is one,
    else torchrun's variables, else this process alone. `transport`: auto (nccl where there is a CUDA device, else
    gloo), nccl, gloo, local (alone only), or a `Transport`. `nccl`: options of that transport, for experts.
    `engine`: auto, aten, plain, triton, fa3, fa4, or an `Engine`. `timeout_s`: the deadline of every wait.
    `dkv_wire_dtype`: what dK and dV travel in, None for the accumulator dtype (float32; float64 for float64 inputs).
    `out_wire_dtype`: the same for the outputs that the schedule all_to_all returns to their owners.
    `kv_wire_dtype`: None for the dtype of K and V; int8 or float8_e4m3fn halves what bf16 K and V cost on the wire and
    rounds what other ranks sent, a rank's own K and V never; gradients are those of the rounded values. Relative errors
    of out, dq, dk, dv, for unit normal inputs of head_dim 64, causal, 4 ranks: 0.5, 0.7, 0.6, 0.3 % in int8 and 2.1,
    3.1, 2.4, 1.6 % in float8_e4m3fn; docs/internals/decisions/0006 has bounds.

    A context manager. One thread at a time uses a ring, and all ranks make the same calls in the same order. After a
    failure the ring is dead on every rank and says so.
    """

    def __init__(
        self,
        group: Any = None,
        *,
        transport: str | Transport = "auto",
        engine: str | Engine = "auto",
        timeout_s: float = 600.0,
        dkv_wire_dtype: torch.dtype | str | None = None,
        kv_wire_dtype: torch.dtype | str | None = None,
        out_wire_dtype: torch.dtype | str | None = None,
        poison: bool = False,
        nccl: NcclOptions | None = None,
    ) -> None:
        """Opens the ring on this rank; returns when all ranks have come. `poison` fills unused memory with NaN."""
        if isinstance(engine, str) and engine not in ENGINES:
            raise InputError(f"engine={engine!r} is not known; choose one of {', '.join(ENGINES)}")
        if not timeout_s > 0:
            raise InputError(f"timeout_s must be positive, got {timeout_s}")
        wires = {
            "dkv_wire_dtype": wire_name("dkv_wire_dtype", dkv_wire_dtype, FLOATS),
            "kv_wire_dtype": wire_name("kv_wire_dtype", kv_wire_dtype, EIGHT_BIT),
            "out_wire_dtype": wire_name("out_wire_dtype", out_wire_dtype, FLOATS),
        }
        if isinstance(transport, str):
            transport = open_transport(group, transport, timeout_s, nccl)
        super().__init__(transport, engine=engine, poison=poison, **wires)

    def sequence(
        self,
        length: int | None = None,
        *,
        cu_seqlens: Many[int] | Tensor | None = None,
        layout: str = "auto",
        for_: str = "causal",
    ) -> Sequence:
        """How `length` tokens, or the documents `cu_seqlens` = [0, ..., length], lie over the ranks.

        `layout`: contiguous, zigzag, striped, per_document, or auto, which suits `for_` (causal, full, window,
        dilated). Uneven counts are normal: the first ranks or chunks take the extra tokens.
        """
        documents = None if cu_seqlens is None else check_documents(cu_seqlens, length)
        if length is None:
            if documents is None:
                raise InputError("sequence needs a length in tokens, or cu_seqlens=[0, ..., length]")
            length = documents[-1]
        if isinstance(length, bool) or not isinstance(length, int) or length < 0:
            raise InputError(f"length must be a number of tokens, got {length!r}")
        return Sequence(self, make_layout(layout, length, self.world_size, documents, for_), documents)

    attention = attention_module.attention
    dilated_attention = dilated.dilated_attention
    explain = explain.explain

    def activate(self, seq: Sequence | None) -> AbstractContextManager[None]:
        """Make `seq` what adapters find with `ringattn.active_sequence()`; nests. None asks for local attention.

        Raises `InputError` for a sequence of another ring. Under a sequence of several ranks an operator that attends
        to a shard alone raises `UnsupportedError` where it is called, and at the end `InputError` is raised where a
        model ran of which no attention went over a ring. Operators are watched in a ring's first activation, with
        gradients and without, and in later ones until the first attention over a ring.
        """
        if seq is not None and (not isinstance(seq, Sequence) or seq.ring is not self):
            raise InputError(f"rank {self.rank}: activate takes a sequence of this ring, got {seq!r}")
        return activate(seq)

    def memory_monitor(
        self,
        profile: str | Profile = "balanced",
        *,
        actions: Mapping[Level, Iterable[Action]] | None = None,
        capacity_bytes: int | None = None,
    ) -> MemoryMonitor:
        """A watch over the memory of all ranks; see `ringattn.observe.memory.MemoryMonitor` for the options."""
        gather = self.told_by_all
        return MemoryMonitor(self.pool, self.device, self.rank, gather, profile, actions, capacity_bytes)
