"""The state of a ring on one rank (transport, pool, cached plans, counters) and the checks around every call.

Guarantees: a call that the ranks do not agree on raises on all of them; after a failure the ring is dead on every rank
and says why.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Literal
from weakref import WeakSet, finalize

import torch
from torch import Tensor

from ringattn.core.bounded_cache import BoundedCache
from ringattn.engine.base import KV, Engine, Softmax
from ringattn.engine.select import Choice, choose
from ringattn.errors import ClosedError, InputError, RingError
from ringattn.observe.memory import free_bytes
from ringattn.observe.spans import Recording
from ringattn.planner.choose import plan_of
from ringattn.planner.cluster import REFERENCE, Cluster, Exchange
from ringattn.planner.memory import standing_bytes
from ringattn.runtime.activation import Activation, attended, entered, unseen
from ringattn.runtime.call import AttentionCall
from ringattn.runtime.consistency import (
    ComparedCall,
    ConsistencyCheck,
    GradientNeeds,
    Inputs,
    check_kinds,
    gradient_needs,
)
from ringattn.runtime.executor import Arithmetic, Counters, Executor, check_recording, profiler_of
from ringattn.runtime.records import LocalTensors, Pool
from ringattn.runtime.shortage import advice
from ringattn.transport.base import FORKED, ProcessBound, Transport, close_dropped
from ringattn.transport.location import Location, links_of, recognise

_open: WeakSet[Runtime] = WeakSet()


MOST_PASSES = 64
"""The most passes of a step that are planned ahead."""


class Runtime(ProcessBound):
    """The state of a ring on this rank, and the methods that run its calls. `Ring` documents the options for users.

    One thread at a time uses it, and all ranks make the same calls in the same order. A runtime that is garbage
    collected is closed.
    """

    def __init__(
        self,
        transport: Transport,
        *,
        engine: str | Engine,
        dkv_wire_dtype: str | None,
        kv_wire_dtype: str | None,
        out_wire_dtype: str | None,
        keep_received: bool,
        poison: bool,
        cluster: Cluster | Literal["auto"] | None = None,
    ) -> None:
        """Take over an open transport, and close it at the end.

        The dtypes are names that have been checked. `cluster`: see `Ring`.
        """
        self.transport = transport
        self._agreement = ConsistencyCheck(transport)
        # Why the ring can no longer be used; None while it can.
        self._end: str | None = None
        # Refers to the transport alone, so nothing of the transport may refer to the ring.
        self._if_dropped = finalize(self, close_dropped, transport)
        self._if_dropped.atexit = False
        self.engine = engine
        self.dkv_wire_dtype, self.kv_wire_dtype, self.out_wire_dtype = dkv_wire_dtype, kv_wire_dtype, out_wire_dtype
        self.keep_received = keep_received
        self.links = links_of(transport.locations) if transport.locations else None
        if cluster == "auto":
            cluster, self.cluster_from = recognise(self.locations, self.links, transport.name)
        else:
            self.cluster_from = f"named: {cluster.name}" if cluster else "not determined, because cluster=None"
        # Use the links that were detected between the ranks, unless the description of the cluster has links.
        self.cluster = replace(cluster, links=cluster.links or self.links) if cluster else REFERENCE.joined(self.links)
        self.cluster.check_ranks(transport.world_size)
        self.exchange = Exchange(transport.name, transport.sm_margin)
        self.machines = self.exchange.on(self.cluster) if cluster else self.cluster
        self.pool = Pool(self.transport.allocate, poison=poison)
        self._counters = Counters()
        self._runs = 0
        # Bounded: with new documents in each step, the number of plans has no limit.
        self._executors: BoundedCache[tuple[Any, ...], Executor] = BoundedCache(lambda key, each: each.held_bytes())
        # The buffers of captured passes by `id`. A graph has their addresses even if the pool has grown since.
        self._captured: dict[int, object] = {}
        # The passes since `recent_passes` was called, and those that it returned; None before its first call.
        self._passes: dict[tuple[Hashable, bool], None] | None = None
        self._passes_before: tuple[tuple[Hashable, bool], ...] = ()
        self._recording: Recording | None = None
        self._has_warned_of_margin = False
        _open.add(self)

    @property
    def locations(self) -> tuple[Location, ...]:
        """The location of each rank; empty if the caller passed an open transport that has no locations."""
        return self.transport.locations

    @property
    def rank(self) -> int:
        """This rank, 0 .. world_size - 1."""
        return self.transport.rank

    @property
    def world_size(self) -> int:
        """The number of ranks of the ring."""
        return self.transport.world_size

    @property
    def device(self) -> torch.device:
        """The device of this rank's tensors."""
        # A ring of one rank exchanges nothing, so it uses the caller's current device.
        if self.world_size == 1 and torch.cuda.is_available():
            return torch.device("cuda", torch.cuda.current_device())
        return self.transport.device

    @property
    def is_open(self) -> bool:
        """Whether the ring can still be used: it is neither closed nor aborted."""
        return self._end is None

    def check_consistency(
        self,
        summary: str,
        refusal: RingError | None = None,
        always: bool = False,
        backward_of: int | None = None,
        needs: GradientNeeds | None = None,
    ) -> ComparedCall:
        """Raise on all ranks unless they all make the same call. A collective call.

        If the transport itself notices a rank that makes another call, each call is compared only once.

        Args:
            summary: A description of the call, equal on all ranks.
            refusal: The error with which this rank refuses the call. None: it does not refuse it.
            always: Also compare a call that was compared before.
            backward_of: The number of the forward call whose backward pass this is; the same on all ranks. None: the
                call is not a backward pass.
            needs: Which gradients this rank needs. None: the call is not differentiable.

        Returns:
            The number of this call, and whether any rank needs gradients.

        Raises:
            RingError: `refusal`, on the rank that gave it.
            InputError: Another rank refused the call.
            DisagreementError: The ranks make different calls, or a rank cannot take part in the backward pass that
                another rank needs.
            ClosedError: The ring was closed or has failed.
        """
        self.check_open()
        if refusal is not None:
            attended()
        needed = needs is not None and bool(needs.inputs)
        if self.world_size == 1:
            if refusal is not None:
                raise refusal
            return ComparedCall(0, needed)
        message = self._agreement.announced(summary, refusal, always, backward_of, needs)
        # The call was compared before, and the transport notices a rank that makes another one.
        if message is None:
            return ComparedCall(self._agreement.calls, needed)
        try:
            with self.guarded(), unseen():
                answers = self._agreement.ask(message, needs)
        except RingError:
            # The refusal of this rank says more than that the comparison failed.
            if refusal is not None:
                raise refusal from None
            raise
        # Raised after the comparison, so that the other ranks have received the refusal and do not wait for this rank.
        if refusal is not None:
            raise refusal
        graph = self._agreement.settle(summary, backward_of, answers, needs)
        return ComparedCall(self._agreement.calls, graph)

    def check_same_call(
        self, describe: Callable[[], str], inputs: Inputs | GradientNeeds | None = None
    ) -> ComparedCall:
        """Compare the call that `describe` returns, see `check_consistency`. If `describe` raises, all ranks refuse it.

        Args:
            describe: Checks the call and returns a description of it.
            inputs: The differentiable inputs, or which of them need a gradient. None: the call is not differentiable.

        Returns:
            The number of this call, and whether any rank needs gradients.

        Raises:
            InputError: `describe` raised or an input is sparse or a DTensor, on any rank; every rank raises.
            DisagreementError: The ranks make different calls, or a rank cannot take part in the backward pass that
                another rank needs.
            ClosedError: The ring was closed or has failed.
        """
        with self.refused_by_all():
            if isinstance(inputs, Mapping):
                check_kinds(inputs)
            summary = describe()
            needs = gradient_needs(inputs) if isinstance(inputs, Mapping) else inputs
        return self.check_consistency(summary, needs=needs)

    @contextmanager
    def refused_by_all(self) -> Iterator[None]:
        """Raise on all ranks if an error is raised inside the `with` on this rank.

        The other ranks receive the error in their next call, which raises it too, so no rank waits for this rank. There
        must be no collective call inside.

        Returns:
            A context manager.

        Raises:
            InputError: An error other than a `RingError` was raised inside; it is the cause. A `RingError` is raised
                unchanged.
        """
        try:
            yield
        except RingError as error:
            if not str(error).startswith("rank "):  # the checks of options do not know the rank
                error.args = (f"rank {self.rank}: {error}",)
            self.check_consistency("", error)
        except Exception as error:
            refusal = InputError(f"rank {self.rank}: {type(error).__name__}: {error}")
            refusal.__cause__ = error
            self.check_consistency("", refusal)

    def check_open(self) -> None:
        """Raise unless the ring can be used.

        Raises:
            ClosedError: The ring was closed or has failed, or belongs to the process that this one was forked from.
        """
        self.check_process()
        if self._end is not None:
            raise ClosedError(
                f"rank {self.rank}: this ring cannot be used any more because {self._end}; open a new Ring"
            )

    @contextmanager
    def guarded(self) -> Iterator[None]:
        """End the ring on every rank if an error is raised inside the `with`. That error is the cause.

        Returns:
            A context manager.

        Raises:
            ClosedError: The ring was closed or has failed.
        """
        self.check_open()
        try:
            yield
        # Also KeyboardInterrupt: peers must not wait for a rank that has left a call halfway.
        except BaseException as error:
            self.end(error)
            raise

    def end(self, cause: BaseException) -> None:
        """End the ring on all ranks and free its memory.

        Args:
            cause: The error that later calls name.

        Raises:
            Nothing.
        """
        if self.forked:
            return
        # The reason is set before the abort, so that a call of another thread during the abort already reports it.
        self._end = f"it was aborted: {cause}"
        self._if_dropped.detach()
        self.transport.abort(cause)
        self._release_memory()

    def leave_to_parent(self) -> None:
        """See `ProcessBound`."""
        self._end = FORKED
        self._if_dropped.detach()

    def _release_memory(self) -> None:
        """Release the arena, even if an executor is still referenced elsewhere."""
        for executor in self._executors.values():
            executor.unbind()
        self._executors.clear()
        self._captured.clear()
        self.pool.release_arena()

    def all_gather_text(self, text: str) -> list[str]:
        """Gather a text from every rank. A collective call.

        Args:
            text: The text of this rank.

        Returns:
            The texts, by rank.

        Raises:
            DisagreementError: A rank makes another call.
            ClosedError: The ring was closed or has failed.
            TransportError: A peer was lost (PeerLostError) or the deadline passed (DeadlineError).
        """
        self.check_consistency("words of all ranks", always=True)
        with self.guarded():
            return [each.decode() for each in self.transport.all_gather_bytes(text.encode())]

    def choice(
        self, device: torch.device, dtype: torch.dtype, head_dim: int, value_dim: int, softmax: Softmax | None
    ) -> Choice:
        """Choose the engine of a call.

        Args:
            device: The device of the inputs.
            dtype: The dtype of the inputs.
            head_dim: The size of a query and of a key.
            value_dim: The size of a value.
            softmax: The softmax of the call. None: no softmax options.

        Returns:
            The engine, and one sentence that gives the reason.

        Raises:
            UnsupportedError: The requested engine does not compute such a call.
        """
        if not isinstance(self.engine, str):
            return Choice(self.engine, f"{self.engine.name}: passed as an object")
        sm_margin = self.transport.sm_margin if device.type == "cuda" else 0
        return choose(self.engine, device, dtype, head_dim, value_dim, softmax, sm_margin)

    def engine_for(self, *facts: Any) -> Engine:
        """Return the engine of `choice`, and warn if it leaves exchanges no multiprocessor.

        Args:
            facts: The arguments of `choice`.

        Returns:
            The engine.

        Raises:
            UnsupportedError: The requested engine does not compute such a call.
        """
        engine = self.choice(*facts).engine
        self._warn_of_margin(engine, facts[0])
        return engine

    def _warn_of_margin(self, engine: Engine, device: torch.device) -> None:
        """Warn once per ring if exchanges share the GPU with kernels that leave them no multiprocessor."""
        margin = self.transport.sm_margin
        if self._has_warned_of_margin or device.type != "cuda" or not margin or engine.sm_margin:
            return
        self._has_warned_of_margin = True
        if self.rank == 0:
            warnings.warn(
                f"engine {engine.name!r} leaves no multiprocessor free, so an exchange may wait until a kernel that "
                f"fills the GPU has ended. engine='fa3' and engine='triton' leave sm_margin={margin} free; "
                "NcclOptions(sm_margin=0) accepts the wait and silences this warning",
                stacklevel=2,
            )

    def executor_of(self, call: AttentionCall, backward: bool) -> Executor:
        """Return the executor of a call that all ranks agreed on. It is made at its first use and cached.

        Args:
            call: The call.
            backward: Whether it is for the backward pass.

        Returns:
            The executor, which belongs to the ring.

        Raises:
            ClosedError: The ring was closed or has failed.
        """
        self.check_open()
        if self._passes is not None and call.facts is not None and len(self._passes) < MOST_PASSES:
            self._passes[call.facts, backward] = None
        key = call.problem, call.route, call.softmax, call.engine, backward

        def make() -> Executor:
            with self.guarded():
                return self._new_executor(call, backward)

        executor = self._executors.get(key, make)
        if is_capturing():
            self._executors.keep(key)  # the captured graph contains the addresses of its tables
        return executor

    def prepare(self, call: AttentionCall, backward: bool) -> None:
        """Make the executor of a call before its first use. Local; any thread may do this. A failure has no effect.

        Args:
            call: The call.
            backward: Whether it is for the backward pass.

        Raises:
            ClosedError: The ring was closed or has failed.
        """
        self.check_open()
        key = call.problem, call.route, call.softmax, call.engine, backward
        self._executors.get(key, lambda: self._new_executor(call, backward))

    def _new_executor(self, call: AttentionCall, backward: bool) -> Executor:
        with torch.inference_mode(False):  # training steps use its tensors, too
            return Executor(plan_of(call.problem, call.route, self.rank, backward), call.engine, call.softmax)

    def recent_passes(self) -> tuple[tuple[Hashable, bool], ...]:
        """Return the passes since the last call of this method, or if there are none, the result of that call.

        Returns:
            The facts of each call, and whether the pass was backward. The first call of this method returns none.

        Raises:
            ClosedError: The ring was closed or has failed.
        """
        self.check_open()
        if self._passes:
            self._passes_before = tuple(self._passes)
        self._passes = {}
        return self._passes_before

    @contextmanager
    def begun(
        self, executor: Executor, call: AttentionCall, make: Callable[[KV | None], LocalTensors]
    ) -> Iterator[None]:
        """Make the keys and values, and send them if the pass can begin with them, see `Executor.begin`.

        Inside the `with`, `run` continues the pass. The ring makes no other call there, and an error before the end of
        `run` ends the ring.

        Args:
            executor: The executor of the pass.
            call: The call.
            make: Returns the keys and values. If it receives views of the first message, it must write them there.

        Returns:
            A context manager.

        Raises:
            ClosedError: The ring was closed or has failed.
            TransportError: A message failed.
            OutOfMemoryError: This rank had no memory for the pass.
        """
        check_recording(self._recording)
        if not call.problem.batch:  # no pass runs, so no rank waits for this one
            make(None)
            yield
            return
        runs = self._runs
        try:
            if executor.begins_with_keys:
                with self.accounted(executor, call), unseen():
                    self._make_room(executor)
                    watch = profiler_of(executor.plan, self._recording)
                    executor.begin(self.transport, self.pool, make, watch)
            else:
                self.check_open()
                make(None)
            yield
        except BaseException as error:
            # After `run`, no rank waits: a checkpoint stops its recomputation there by an error of torch.
            if self._runs == runs:
                self.end(error)
            raise

    def run(
        self, executor: Executor, arithmetic: Arithmetic, kept: Tensor | None = None, keep: bool = False
    ) -> Tensor | None:
        """Run one pass, see `Executor.run`. To be called inside `accounted`.

        Args:
            executor: The executor of the pass.
            arithmetic: The computation of its steps.
            kept: The remote inputs that the forward pass kept for this backward pass. None: it kept none.
            keep: Keep remote inputs for the backward pass.

        Returns:
            The remote inputs that were kept, or None.

        Raises:
            ClosedError: The ring was closed or has failed.
            TransportError: A message failed.
            OutOfMemoryError: This rank had no memory for the pass.
        """
        self._runs += 1
        watch = profiler_of(executor.plan, self._recording)
        with self.guarded():
            self._make_room(executor)
            received = executor.run(self.transport, self.pool, self._counters, arithmetic, watch, kept, keep)
            if is_capturing():
                self._captured[id(executor.bound)] = executor.bound
            return received

    @contextmanager
    def accounted(self, executor: Executor, call: AttentionCall) -> Iterator[None]:
        """End the ring if an error is raised inside the `with`. For a lack of memory, see `Executor.accounted`.

        Args:
            executor: The executor of the pass.
            call: The call, for which the error advises what to change.

        Returns:
            A context manager.

        Raises:
            ClosedError: The ring was closed or has failed.
            UnsupportedError: The pass would be recorded while it is captured into a CUDA graph. The ring stays open.
            OutOfMemoryError: Memory ran out inside.
        """
        check_recording(self._recording)

        def advise() -> list[str]:
            held_bytes = self.pool.taken_bytes + standing_bytes(executor.plan, executor.has_sums)
            return advice(call, self.rank, free_bytes(self.device) + held_bytes, self.machines)

        # The engine's operators attend to blocks of the ring, so they must not be refused as local attention.
        with self.guarded(), executor.accounted(self.pool, advise), entered(Activation(None), outside_regions=True):
            yield

    def _make_room(self, executor: Executor) -> None:
        if executor.plan.arena_bytes > self.pool.nbytes:  # the old arena is freed only when no executor views it
            for bound in self._executors.values():
                bound.unbind()


def is_capturing() -> bool:
    """Return whether the current stream is being captured into a CUDA graph."""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


def shared_ring_is_open() -> bool:
    """Return whether this process has an open ring of several ranks."""
    return any(ring.world_size > 1 and ring.is_open for ring in tuple(_open))
