"""A ring: one rank's end of a group of ranks that attend together.

Owns the transport, the pool and the cached plans; everything closes with it.
Does not know: masks, schedules, kernels.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from collections.abc import Sequence as Many
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict
from typing import Any, Literal, Unpack, overload
from weakref import WeakSet

import torch
from torch import Tensor

from ringattn import api
from ringattn.activation import activate
from ringattn.dilated import dilated_attention
from ringattn.engine.base import KV, Engine
from ringattn.engine.select import ENGINES, Choice, choose
from ringattn.errors import InputError, OutOfMemoryError
from ringattn.executor import Arithmetic, Counters, Executor
from ringattn.explain import Explanation, explain
from ringattn.layout import make_layout
from ringattn.observe.marks import new_recording
from ringattn.observe.memory import MemoryMonitor, Profile
from ringattn.observe.spans import Recording
from ringattn.opening import open_transport
from ringattn.planner.account import placements
from ringattn.planner.choose import plan_of
from ringattn.pool import Pool
from ringattn.problem import EIGHT_BIT, FLOATS, wire_name
from ringattn.rank_group import RankGroup
from ringattn.records import Home
from ringattn.selective import unseen
from ringattn.sequence import Sequence, check_documents
from ringattn.transport.base import Transport
from ringattn.transport.nccl.options import NcclOptions
from ringattn.watch import watch_of

_open: WeakSet[Ring] = WeakSet()
KEPT_PLANS = 256
"""Plans that a ring keeps ready, those used last; with other documents in each step there is no end to them."""


class Ring(RankGroup):
    """A group of ranks that attend together.

    `group`: a ProcessGroup, a DeviceMesh (its dimension `cp`), or None: the default process group if there is one,
    else torchrun's variables, else this process alone. `transport`: auto (nccl where there is a CUDA device, else
    gloo), nccl, gloo, local (alone only), or a `Transport`. `nccl`: options of that transport, for experts.
    `engine`: auto, aten, plain, triton, fa3, fa4, or an `Engine`. `timeout_s`: the deadline of every wait.
    `dkv_wire_dtype`: what dK and dV travel in, None for the accumulator dtype (float32; float64 for float64 inputs).
    `out_wire_dtype`: the same for the outputs that the schedule all_to_all sends home.
    `kv_wire_dtype`: None for the dtype of K and V; int8 or float8_e4m3fn halves what bf16 K and V cost on the wire and
    rounds what other ranks sent, a rank's own K and V never; gradients are those of the rounded values. Relative errors
    of out, dq, dk, dv, for unit normal inputs of head_dim 64, causal, 4 ranks: 0.5, 0.7, 0.6, 0.3 % in int8 and 2.1,
    3.1, 2.4, 1.6 % in float8_e4m3fn; docs/decisions/0006 has bounds.

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
        self.dkv_wire_dtype = wire_name("dkv_wire_dtype", dkv_wire_dtype, FLOATS)
        self.kv_wire_dtype = wire_name("kv_wire_dtype", kv_wire_dtype, EIGHT_BIT)
        self.out_wire_dtype = wire_name("out_wire_dtype", out_wire_dtype, FLOATS)
        self.engine = engine
        if isinstance(transport, str):
            transport = open_transport(group, transport, timeout_s, nccl)
        super().__init__(transport)
        self.pool = Pool(self.transport.allocate, poison=poison)
        self._counters = Counters()
        self._executors: dict[tuple[Any, ...], Executor] = {}
        self._captured: list[Executor] = []
        self._recording: Recording | None = None
        _open.add(self)

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

    @overload
    def attention(
        self, q: Tensor, k: Tensor, v: Tensor, seq: Sequence, *, return_lse: Literal[False] = False,
        **options: Unpack[api.Options],
    ) -> Tensor: ...  # fmt: skip

    @overload
    def attention(
        self, q: Tensor, k: Tensor, v: Tensor, seq: Sequence, *, return_lse: Literal[True],
        **options: Unpack[api.Options],
    ) -> tuple[Tensor, Tensor]: ...  # fmt: skip

    def attention(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        seq: Sequence,
        *,
        causal: bool = False,
        window: api.Window = None,
        scale: float | None = None,
        softcap: float | None = None,
        sinks: Tensor | None = None,
        kv_seq: Sequence | None = None,
        schedule: str = "auto",
        return_lse: bool = False,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Exact attention of this rank's queries to the keys of all ranks; differentiable.

        `q`: (batch, tokens, q_heads, d_k), `k`: (batch, tokens, kv_heads, d_k), `v`: (batch, tokens, kv_heads, d_v),
        this rank's shards of `seq` (of `kv_seq` for k and v in cross attention). `window` = (left, right) tokens
        besides the query, None or -1 for unbounded. `scale`: any finite number, None for 1/sqrt(d_k). `softcap`: scores
        become softcap * tanh(score / softcap). `sinks`: (q_heads,) logits of any float dtype that take weight and give
        no value. `schedule`: auto, ring, all_gather, direct, sub_rings or all_to_all. torch.autocast changes nothing
        here: out is in q's dtype, and engines compute as they do without.

        Returns out (batch, tokens, q_heads, d_v) in q's dtype, and with `return_lse` also lse (batch, q_heads, tokens),
        natural log, accumulator dtype. Rows that see no key give 0 and -inf, as do those whose scores are all -inf; a
        NaN in a query makes its row NaN. Backward needs them, as that of torch's scaled_dot_product_attention does, and
        raises where they were changed in place. Raises `InputError` on every rank when one rank refuses or the ranks
        disagree.
        """
        return api.attention(
            self, q, k, v, seq, causal=causal, window=window, scale=scale, softcap=softcap, sinks=sinks, kv_seq=kv_seq,
            schedule=schedule, return_lse=return_lse,
        )  # fmt: skip

    def dilated_attention(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        seq: Sequence,
        *,
        segment_lengths: Many[int],
        dilation_rates: Many[int],
        causal: bool = False,
        offset: str = "mod",
        grad: str = "exact",
        tail: str = "ragged",
        layer: int | None = None,
        scale: float | None = None,
        softcap: float | None = None,
        sinks: Tensor | None = None,
        schedule: str = "auto",
        return_lse: bool = False,
    ) -> Any:
        """LongNet's dilated attention (arXiv 2307.02486), exact: one softmax over the keys of all branches.

        Branch i cuts the sequence, or each document, into segments of `segment_lengths[i]` tokens; in each a head's
        queries meet the keys at its `offset` modulo `dilation_rates[i]` (see `ringattn.dilation`). A pair that several
        branches have counts once for each. `grad`: exact, or detached, which takes the branches' shares as constants,
        as torchscale does. `tail`: ragged, or zero_pad, which lets queries see the zero keys with which torchscale
        fills short segments. `layer`: for offset="layer_rotated". The rest, what is returned (out, and with
        `return_lse` lse) and what is raised are those of `attention`; an lse beside detached carries no gradient.
        """
        return dilated_attention(
            self, q, k, v, seq, segment_lengths=segment_lengths, dilation_rates=dilation_rates,
            causal=causal, offset=offset, grad=grad, tail=tail, layer=layer, scale=scale, softcap=softcap, sinks=sinks,
            schedule=schedule, return_lse=return_lse,
        )  # fmt: skip

    def explain(self, seq: Sequence, **facts: Any) -> Explanation:
        """Who sends what to whom, when; bytes, balance, memory. See `ringattn.explain.explain` for the arguments."""
        return explain(self, seq, **facts)

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

    def counters(self) -> dict[str, int]:
        """Payload sent since the last reset (`bytes_sent`, `messages`, `passes`) and `pool_high_water_bytes`."""
        return {**asdict(self._counters), "pool_high_water_bytes": self.pool.high_water_bytes}

    def reset_counters(self) -> None:
        """Set all counters to zero."""
        self._counters = Counters()
        self.pool.reset_high_water()

    @contextmanager
    def recording(self, *, nvtx: bool = False) -> Iterator[Recording]:
        """Record what the passes inside do on this rank, see `ringattn.observe.spans`; local, backward included.

        `nvtx`: also name them for NVIDIA's tools. Raises `InputError` inside another recording of this ring. On a GPU
        it waits for the device once, before the first pass; passes are refused while they are captured into a graph.
        """
        self.check_open()
        if self._recording is not None:
            raise InputError("this ring is being recorded already; recordings do not nest")
        self._recording = new_recording(self.rank, self.world_size, self.device, self.transport.stream, nvtx)
        try:
            yield self._recording
        finally:
            self._recording = None

    def memory_info(self) -> dict[str, int]:
        """The ring's own memory, which all layers share: see `Pool.report` and `planner.account.placements`."""
        plans = [executor.plan for executor in self._executors.values()]
        return {"world_size": self.world_size, **placements(plans), **self.pool.report()}

    def memory_monitor(self, profile: str | Profile = "balanced", **options: Any) -> MemoryMonitor:
        """A watch over the memory of all ranks; see `ringattn.observe.memory` for the options and for actions."""
        return MemoryMonitor(self.pool, self.device, self.rank, self.told_by_all, profile, **options)

    def close(self) -> None:
        """Leave in good order. Idempotent; any later call raises `ClosedError`."""
        self._executors.clear()
        self._captured.clear()
        self.pool.release_arena()  # before the transport ends, which gives the memory back
        super().close()

    def choice(
        self, device: torch.device, dtype: torch.dtype, head_dim: int, value_dim: int, softcap: float | None
    ) -> Choice:
        """The engine of a call with such inputs, and why it is taken."""
        if not isinstance(self.engine, str):
            return Choice(self.engine, f"{self.engine.name}: given as an object")
        spare = self.transport.spare if device.type == "cuda" else 0
        return choose(self.engine, device, dtype, head_dim, value_dim, softcap, spare)

    def engine_for(self, *facts: Any) -> Engine:
        """The engine of `choice`."""
        return self.choice(*facts).engine

    def executor_of(self, call: api.Call, backward: bool) -> Executor:
        """This rank's plan of a call that all ranks agreed on, ready to run; made at its first use."""
        self.check_open()
        key = call.problem, call.route, call.softmax, call.engine, backward
        executor = self._executors.pop(key, None)
        if executor is None:
            with self.guarded(), torch.inference_mode(False):  # what it keeps serves training steps too
                executor = Executor(plan_of(call.problem, call.route, self.rank, backward), call.engine, call.softmax)
        self._executors[key] = executor  # the last one now
        if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():
            self._captured.append(executor)  # a graph has the addresses of its row lists
        if len(self._executors) > KEPT_PLANS:
            del self._executors[next(iter(self._executors))]
        return executor

    def begin(self, executor: Executor, make: Callable[[KV | None], Home]) -> Home:
        """Begin a pass that `run` goes on with; see `Executor.begin`. The ring makes no other call between the two."""
        watch = watch_of(executor.plan, self._recording)
        with self.guarded(), self.accounted(executor), unseen():
            self._make_room(executor)
            return executor.begin(self.transport, self.pool, make, watch)

    def run(
        self, executor: Executor, arithmetic: Arithmetic, kept: Tensor | None = None, keep: bool = False
    ) -> Tensor | None:
        """One pass; see `Executor.run`."""
        watch = watch_of(executor.plan, self._recording)
        with self.guarded(), self.accounted(executor):
            self._make_room(executor)
            return executor.run(self.transport, self.pool, self._counters, arithmetic, kept, keep, watch)

    @contextmanager
    def accounted(self, executor: Executor) -> Iterator[None]:
        """Where memory runs out inside, ends the ring with the account of this pass; see `Executor.accounted`."""
        try:
            with executor.accounted(self.pool), activate(None):  # the engine's kernels attend to blocks, as they should
                yield
        except OutOfMemoryError as error:
            self.end(error)
            raise

    def _make_room(self, executor: Executor) -> None:
        if executor.plan.arena_bytes > self.pool.nbytes:  # the old arena is free only when nobody views it
            for bound in self._executors.values():
                bound.unbind()


def shared_ring_is_open() -> bool:
    """Whether this process has a ring of several ranks that can still attend."""
    return any(ring.world_size > 1 and ring.is_open for ring in tuple(_open))
