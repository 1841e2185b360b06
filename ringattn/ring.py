"""A ring: one rank's end of a group of ranks that attend together.

Owns the transport, the pool and the cached plans; everything closes with it.
Does not know: masks, schedules, kernels.
"""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Many
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import asdict
from hashlib import sha256
from types import TracebackType
from typing import Any, Literal, Self, overload

import torch
from torch import Tensor

from ringattn import api
from ringattn.engine.base import Engine
from ringattn.engine.select import ENGINES, engine_named
from ringattn.errors import ClosedError, DisagreementError, InputError, RingError
from ringattn.executor import Counters, Executor, FoldInto
from ringattn.explain import Explanation, explain
from ringattn.layout import make_layout
from ringattn.opening import open_transport
from ringattn.planner.choose import plan_of
from ringattn.pool import Pool
from ringattn.problem import ITEM_BYTES
from ringattn.records import Home
from ringattn.sequence import Sequence, check_documents
from ringattn.transport import collectives
from ringattn.transport.base import Transport
from ringattn.transport.nccl.options import NcclOptions

_active: ContextVar[Sequence | None] = ContextVar("ringattn_active_sequence", default=None)


class Ring:
    """A group of ranks that attend together.

    `group`: a ProcessGroup, a DeviceMesh (its dimension `cp`), or None: the default process group if there is one,
    else torchrun's variables, else this process alone. `transport`: auto (nccl where there is a CUDA device, else
    gloo), nccl, gloo, local (alone only), or a `Transport`. `nccl`: options of that transport, for experts.
    `engine`: auto, aten or plain. `timeout_s`: the deadline of every wait. `dkv_wire_dtype`: what dK and dV travel in,
    None for the accumulator dtype (float32; float64 for float64 inputs).

    A context manager. One thread at a time uses a ring, and all ranks make the same calls in the same order. After a
    failure the ring is dead on every rank and says so.
    """

    def __init__(
        self,
        group: Any = None,
        *,
        transport: str | Transport = "auto",
        engine: str = "auto",
        timeout_s: float = 600.0,
        dkv_wire_dtype: torch.dtype | str | None = None,
        poison: bool = False,
        nccl: NcclOptions | None = None,
    ) -> None:
        """Opens the ring on this rank; returns when all ranks have come. `poison` fills unused memory with NaN."""
        if engine not in ENGINES:
            raise InputError(f"engine={engine!r} is not known; choose one of {', '.join(ENGINES)}")
        if not timeout_s > 0:
            raise InputError(f"timeout_s must be positive, got {timeout_s}")
        self.dkv_wire_dtype = None if dkv_wire_dtype is None else str(dkv_wire_dtype).removeprefix("torch.")
        if self.dkv_wire_dtype is not None and self.dkv_wire_dtype not in ITEM_BYTES:
            raise InputError(f"dkv_wire_dtype={dkv_wire_dtype} is not supported; use one of {', '.join(ITEM_BYTES)}")
        self.engine = engine
        if isinstance(transport, str):
            transport = open_transport(group, transport, timeout_s, nccl)
        self.transport = transport
        self.pool = Pool(self.transport.allocate, poison=poison)
        self._counters = Counters()
        self._executors: dict[tuple[Any, ...], Executor] = {}
        self._calls = 0
        self._agreed: set[bytes] = set()
        self._end: str | None = None

    @property
    def rank(self) -> int:
        """This rank, 0 .. world_size - 1."""
        return self.transport.rank

    @property
    def world_size(self) -> int:
        """Ranks of the ring."""
        return self.transport.world_size

    @property
    def device(self) -> torch.device:
        """Where this rank's tensors live."""
        if self.world_size == 1 and torch.cuda.is_available():
            return torch.device("cuda", torch.cuda.current_device())
        return self.transport.device

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
        return_lse: Literal[False] = False,
    ) -> Tensor: ...

    @overload
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
        return_lse: Literal[True],
    ) -> tuple[Tensor, Tensor]: ...

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
        besides the query, None or -1 for unbounded. `scale`: None for 1/sqrt(d_k). `softcap`: scores become
        softcap * tanh(score / softcap). `sinks`: (q_heads,) logits that take weight and give no value. `schedule`:
        auto, ring, all_gather or direct.

        Returns out (batch, tokens, q_heads, d_v) in q's dtype, and with `return_lse` also lse (batch, q_heads, tokens),
        natural log, accumulator dtype. Rows that see no key give 0 and -inf. Raises `InputError` on every rank when one
        rank refuses or the ranks disagree.
        """
        return api.attention(
            self, q, k, v, seq, causal=causal, window=window, scale=scale, softcap=softcap, sinks=sinks, kv_seq=kv_seq,
            schedule=schedule, return_lse=return_lse,
        )  # fmt: skip

    def explain(self, seq: Sequence, **facts: Any) -> Explanation:
        """Who sends what to whom, when; bytes, balance, memory. See `ringattn.explain.explain` for the arguments."""
        return explain(self, seq, **facts)

    def barrier(self) -> None:
        """Return when every rank has called it."""
        self.agree("barrier", always=True)

    def synchronize(self) -> None:
        """Return when all exchanges have arrived; raises what has failed. Local, not a barrier.

        On a GPU the host runs ahead and hears of a lost peer at a later call: synchronize before results are kept.
        """
        with self.guarded():
            self.transport.drain()

    def all_reduce(self, tensors: Many[Tensor]) -> None:
        """Sum tensors over the ranks, in place; the same bits on every rank."""
        tensors = list(tensors)
        self.agree(f"all_reduce of {_shapes(tensors)}")
        with self.guarded():
            collectives.all_reduce(self.transport, tensors)

    def broadcast(self, tensors: Many[Tensor], src: int = 0) -> None:
        """Copy `src`'s tensors to every rank, in place."""
        tensors = list(tensors)
        refusal = None if 0 <= src < self.world_size else InputError(f"broadcast: there is no rank {src}")
        self.agree(f"broadcast from {src} of {_shapes(tensors)}", refusal)
        with self.guarded():
            collectives.broadcast(self.transport, tensors, src)

    def replay(self, graph: Any) -> None:
        """Replay a `torch.cuda.CUDAGraph` of calls of this ring on the current stream, under one deadline for it all.

        All ranks capture and replay the same calls. Run a call once before capturing it, capture with
        `capture_error_mode="thread_local"`, and drop the graph before the ring is closed.
        """
        self.agree("replay of a captured graph")
        with self.guarded():
            self.transport.replay(graph.replay)

    @contextmanager
    def activate(self, seq: Sequence | None) -> Iterator[None]:
        """Make `seq` what adapters find with `ringattn.active_sequence()`; nests. None asks for local attention."""
        token = _active.set(seq)
        try:
            yield
        finally:
            _active.reset(token)

    def counters(self) -> dict[str, int]:
        """Payload sent since the last reset (`bytes_sent`, `messages`, `passes`) and `pool_high_water_bytes`."""
        return {**asdict(self._counters), "pool_high_water_bytes": self.pool.high_water_bytes}

    def reset_counters(self) -> None:
        """Set all counters to zero."""
        self._counters = Counters()
        self.pool.reset_high_water()

    def memory_info(self) -> dict[str, int]:
        """The ring's own memory: pool size and high water in bytes, and how many plans are kept."""
        return {
            "pool_bytes": self.pool.nbytes,
            "pool_high_water_bytes": self.pool.high_water_bytes,
            "plans": len(self._executors),
        }

    def close(self) -> None:
        """Leave in good order. Idempotent; any later call raises `ClosedError`."""
        self._executors.clear()
        self.pool.release_arena()  # before the transport ends, which gives the memory back
        if self._end is None:
            self._end = "it was closed"
            self.transport.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if error is not None and self._end is None:
            self._end = f"it was aborted: {error}"
            self.transport.abort(error)
        self.close()

    def engine_for(self, softcap: float | None, device: torch.device) -> Engine:
        """The engine of a call: the chosen one, or for auto the fastest that can do it."""
        return engine_named(self.engine, softcap, device)

    def agree(self, summary: str, refusal: InputError | None = None, always: bool = False) -> None:
        """All ranks make the same call or all raise: `refusal` here, `InputError` or `DisagreementError` elsewhere.

        Where the transport itself notices a rank that makes another call, one agreement on a call is enough, unless
        `always`.
        """
        self.check_open()
        if self.world_size == 1:
            if refusal is not None:
                raise refusal
            return
        self._calls += 1
        mine = f"refused {refusal}" if refusal is not None else summary
        digest = sha256(mine.encode()).digest()[:8]
        noticed = self.transport.announce(self._calls, digest, mine)
        if noticed and digest in self._agreed and refusal is None and not always:
            return
        try:
            with self.guarded():
                answers = [answer.decode() for answer in self.transport.agree(f"{self._calls}: {mine}".encode())]
        except RingError:
            if refusal is not None:
                raise refusal from None
            raise
        if refusal is not None:
            raise refusal
        told = [answer.partition(": ")[2] for answer in answers]
        for rank, answer in enumerate(told):
            if answer.startswith("refused "):
                raise InputError(f"rank {rank} refused the call, so all ranks do: {answer.removeprefix('refused ')}")
        if len(set(answers)) > 1:
            listed = "\n".join(f"  rank {rank}: call {answer}" for rank, answer in enumerate(answers))
            raise DisagreementError(f"the ranks do not ask for the same:\n{listed}")
        self._agreed.add(digest)

    def run(self, call: api.Call, fold: FoldInto, home: Home, grads: Home | None = None) -> None:
        """One pass of a call that all ranks agreed on; backward where `grads` is given."""
        self.check_open()
        key = call.problem, call.route, call.softmax, call.engine.name, grads is not None
        with self.guarded():
            if key not in self._executors:
                plan = plan_of(call.problem, call.route, self.rank, grads is not None)
                self._executors[key] = Executor(plan, call.engine, call.softmax)
            executor = self._executors[key]
            if executor.plan.arena_bytes > self.pool.nbytes:  # the old arena is free only when nobody views it
                for bound in self._executors.values():
                    bound.unbind()
            executor.run(self.transport, self.pool, self._counters, fold, home, grads)

    def check_open(self) -> None:
        """Raise `ClosedError` unless the ring is alive."""
        if self._end is not None:
            raise ClosedError(f"rank {self.rank}: this ring cannot be used any more, {self._end}; open a new Ring")

    @contextmanager
    def guarded(self) -> Iterator[None]:
        """Whatever is raised inside ends the ring on every rank, with this rank's error as the cause."""
        self.check_open()
        try:
            yield
        except BaseException as error:
            self._end = f"it was aborted: {error}"
            self.transport.abort(error)
            raise


def active_sequence() -> Sequence | None:
    """The sequence of the innermost `Ring.activate`, or None."""
    return _active.get()


def _shapes(tensors: Many[Tensor]) -> str:
    return ", ".join(f"{tuple(x.shape)} {x.dtype}" for x in tensors[:64]) + f" ({len(tensors)} tensors)"
