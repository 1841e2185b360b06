"""A group of ranks that make the same calls together, and what attention runs on: transport, pool, plans, counters.

Guarantees: a call that the ranks do not agree on raises on all of them; after a failure the group is dead on every rank
and says why.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, fields, replace
from types import TracebackType
from typing import Any, Literal, Self
from weakref import WeakSet, finalize

import torch
from torch import Tensor

from ringattn.core.bounded_cache import BoundedCache, bounded
from ringattn.core.problem import Problem
from ringattn.engine.base import KV, Engine, Softmax
from ringattn.engine.select import Choice, choose
from ringattn.errors import ClosedError, DisagreementError, InputError, OutOfMemoryError, RingError
from ringattn.observe.spans import Recording, new_recording
from ringattn.planner.choose import plan_of
from ringattn.planner.cluster import REFERENCE, Cluster, Exchange
from ringattn.planner.plan import placements
from ringattn.runtime.activation import Activation, attended, entered, unseen
from ringattn.runtime.consistency import ComparedCall, ConsistencyCheck, GradientNeeds, Inputs, facts_of, gradient_needs
from ringattn.runtime.executor import Arithmetic, Counters, Executor, profiler_of
from ringattn.runtime.records import LocalTensors, Pool
from ringattn.schedule.routes import Route
from ringattn.transport import collectives
from ringattn.transport.base import FORKED, ProcessBound, Transport, close_dropped
from ringattn.transport.location import Location, links_of, recognise


class RankGroup(ProcessBound):
    """One rank's end of the group. A context manager. A group that is dropped is closed."""

    def __init__(self, transport: Transport) -> None:
        """Owns the transport, which closes with it.

        Args:
            transport: An open transport.

        Raises:
            Nothing.
        """
        self.transport = transport
        self._agreement = ConsistencyCheck(transport)
        # Why the group can no longer be used; None while it can.
        self._end: str | None = None
        # Refers to the transport alone, so nothing of the transport may refer to the group.
        self._if_dropped = finalize(self, close_dropped, transport)
        self._if_dropped.atexit = False

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
        # A ring of one exchanges nothing, so it takes the caller's current device.
        if self.world_size == 1 and torch.cuda.is_available():
            return torch.device("cuda", torch.cuda.current_device())
        return self.transport.device

    @property
    def is_open(self) -> bool:
        """Whether it can still be used: neither closed nor aborted."""
        return self._end is None

    def barrier(self) -> None:
        """Returns when every rank has called it. A collective call.

        Raises:
            DisagreementError: A rank makes another call.
            ClosedError: The ring was closed or has failed.
            TransportError: A peer was lost (PeerLostError) or the deadline passed (DeadlineError).
        """
        self.check_consistency("barrier", always=True)

    def synchronize(self) -> None:
        """Returns when all exchanges have arrived. Local, not a barrier.

        On a GPU the host runs ahead and notices a lost peer at a later call: synchronize before results are kept.

        Raises:
            ClosedError: The ring was closed or has failed.
            TransportError: An exchange failed.
        """
        with self.guarded():
            self.transport.drain()

    def all_reduce(self, tensors: Iterable[Tensor | None]) -> None:
        """Sums tensors over the ranks, in place; the same bits on every rank. A collective call.

        Args:
            tensors: Tensors of any shape, stride and dtype but bool, with the same shapes and dtypes on all ranks.
                Floats of 8 and 16 bits are summed in float32 and rounded once, all others in their own dtype. An entry
                that is None on all ranks, like the gradient of a frozen parameter, is skipped.

        Raises:
            InputError: An entry is neither a tensor nor None, on any rank; or a tensor is bool, which ends the ring.
            DisagreementError: Shapes, dtypes, or which entries are None differ between ranks.
            ClosedError: The ring was closed or has failed.
            TransportError: A message failed, a peer was lost (PeerLostError) or the deadline passed (DeadlineError).

        Example:
            ring.all_reduce([weight.grad for weight in model.parameters()])
        """
        entries: list[Tensor | None] = []

        def described() -> str:
            entries.extend(tensors)
            return f"all_reduce of {collectives.summary(entries)}"

        try:
            self.check_same_call(described)
        except DisagreementError as error:
            if collectives.ARE_NONE not in str(error):
                raise
            raise DisagreementError(
                f"{error}\nall_reduce skips an entry only where it is None on all ranks; on a rank without a gradient "
                "pass torch.zeros_like(parameter)"
            ) from None
        with self.guarded():
            collectives.all_reduce(self.transport, [entry for entry in entries if entry is not None])

    def broadcast(self, tensors: Iterable[Tensor], src: int = 0) -> None:
        """Copies the tensors of one rank to every rank, in place. A collective call.

        Args:
            tensors: Tensors of any shape, stride and dtype, with the same shapes and dtypes on all ranks.
            src: The rank whose tensors are copied.

        Raises:
            InputError: There is no rank `src`, or an entry is not a tensor, on any rank.
            DisagreementError: `src`, shapes or dtypes differ between ranks.
            ClosedError: The ring was closed or has failed.
            TransportError: A message failed, a peer was lost (PeerLostError) or the deadline passed (DeadlineError).
        """
        entries: list[Tensor] = []

        def described() -> str:
            if type(src) is not int or not 0 <= src < self.world_size:
                raise InputError(f"broadcast: there is no rank {src}")
            entries.extend(tensors)
            if missing := [index for index, entry in enumerate(entries) if entry is None]:
                raise InputError(f"broadcast: tensors[{missing[0]}] is None; leave it out on all ranks")
            return f"broadcast from {src} of {collectives.summary(entries)}"

        self.check_same_call(described)
        with self.guarded():
            collectives.broadcast(self.transport, entries, src)

    def replay(self, graph: Any) -> None:
        """Replays a captured CUDA graph of calls of this ring on the current stream, under one deadline for all of it.

        All ranks capture and replay the same calls. Run a call once before capturing it, capture with
        `capture_error_mode="thread_local"`, and drop the graph before the ring is closed.

        Args:
            graph: A `torch.cuda.CUDAGraph`.

        Raises:
            DisagreementError: A rank makes another call.
            ClosedError: The ring was closed or has failed.
            TransportError: An exchange failed, or the deadline passed (DeadlineError).
        """
        self.check_consistency("replay of a captured graph")
        with self.guarded():
            self.transport.replay(graph.replay)

    def check_consistency(
        self,
        summary: str,
        refusal: RingError | None = None,
        always: bool = False,
        backward_of: int | None = None,
        needs: GradientNeeds | None = None,
    ) -> ComparedCall:
        """All ranks make the same call, or all raise. A collective call.

        Where the transport itself notices a rank that makes another call, one check of a call is enough.

        Args:
            summary: The call in words; equal on all ranks.
            refusal: Why this rank refuses the call. None: it does not.
            always: Check also a call that was checked before.
            backward_of: The number of the forward call whose backward pass this is; the same on all ranks. None: no
                backward.
            needs: Which gradients this rank needs. None: the call is not differentiable.

        Returns:
            The number of this call, and whether any rank needs gradients.

        Raises:
            RingError: `refusal`, on the rank that gave it.
            InputError: Another rank refused the call.
            DisagreementError: The ranks make different calls, or a rank cannot take part in the backward pass that
                another one needs.
            ClosedError: The ring was closed or has failed.
        """
        self.check_open()
        if refusal is not None:
            attended()
        needed = needs is not None and bool(needs.inputs)
        # Alone there is nobody to ask.
        if self.world_size == 1:
            if refusal is not None:
                raise refusal
            return ComparedCall(0, needed)
        message = self._agreement.announced(summary, refusal, always, backward_of, needs)
        # Compared before: the transport notices a rank that makes another call.
        if message is None:
            return ComparedCall(self._agreement.calls, needed)
        try:
            with self.guarded(), unseen():
                answers = self._agreement.ask(message, needs)
        except RingError:
            # The own refusal says more than that the check failed.
            if refusal is not None:
                raise refusal from None
            raise
        # Raised after the check, so that the other ranks have been told and do not wait for this one.
        if refusal is not None:
            raise refusal
        graph = self._agreement.settle(summary, backward_of, answers, needs)
        return ComparedCall(self._agreement.calls, graph)

    def check_same_call(
        self, describe: Callable[[], str], inputs: Inputs | GradientNeeds | None = None
    ) -> ComparedCall:
        """`check_consistency` on the call that `describe` describes; an error of `describe` makes all ranks refuse it.

        Args:
            describe: Checks the call and returns it in words.
            inputs: The differentiable inputs, or which of them need a gradient. None: the call is not differentiable.

        Returns:
            The number of this call, and whether any rank needs gradients.

        Raises:
            InputError: `describe` raised, on any rank; every rank raises.
            DisagreementError: The ranks make different calls, or a rank cannot take part in the backward pass that
                another one needs.
            ClosedError: The ring was closed or has failed.
        """
        with self.refused_by_all():
            words = describe()
            needs = gradient_needs(inputs) if isinstance(inputs, Mapping) else inputs
        return self.check_consistency(words, needs=needs)

    @contextmanager
    def refused_by_all(self) -> Iterator[None]:
        """What this rank raises inside is raised by the next call of every rank, so that none waits for this one.

        Inside must be no collective call.

        Returns:
            A context manager.

        Raises:
            InputError: Something that is not a `RingError` was raised inside; it is the cause. A `RingError` stays as
                it is.
        """
        try:
            yield
        except RingError as error:
            if not str(error).startswith("rank "):  # checks of options do not know the rank
                error.args = (f"rank {self.rank}: {error}",)
            self.check_consistency("", error)
        except Exception as error:
            refusal = InputError(f"rank {self.rank}: {type(error).__name__}: {error}")
            refusal.__cause__ = error
            self.check_consistency("", refusal)

    def check_open(self) -> None:
        """Does nothing while the ring can be used.

        Raises:
            ClosedError: The ring was closed or has failed, or belongs to the process that this one was forked from.
        """
        self.check_process()
        if self._end is not None:
            raise ClosedError(f"rank {self.rank}: this ring cannot be used any more, {self._end}; open a new Ring")

    @contextmanager
    def guarded(self) -> Iterator[None]:
        """Whatever is raised inside ends the ring on every rank, with this rank's error as the cause.

        Returns:
            A context manager.

        Raises:
            ClosedError: The ring was closed or has failed.
        """
        self.check_open()
        try:
            yield
        # Also KeyboardInterrupt: peers must not wait for a rank that has left a call half way.
        except BaseException as error:
            self.end(error)
            raise

    def end(self, cause: BaseException) -> None:
        """Ends the group on all ranks.

        Args:
            cause: The error that later calls name.

        Raises:
            Nothing.
        """
        if self.forked:
            return
        # First the reason, then the abort: a call that comes meanwhile already finds it.
        self._end = f"it was aborted: {cause}"
        self._if_dropped.detach()
        self.transport.abort(cause)

    def all_gather_text(self, words: str) -> list[str]:
        """Gathers a text from every rank. A collective call.

        Args:
            words: This rank's text.

        Returns:
            The texts, by rank.

        Raises:
            DisagreementError: A rank makes another call.
            ClosedError: The ring was closed or has failed.
            TransportError: A peer was lost (PeerLostError) or the deadline passed (DeadlineError).
        """
        self.check_consistency("words of all ranks", always=True)
        with self.guarded():
            return [told.decode() for told in self.transport.all_gather_bytes(words.encode())]

    def close(self) -> None:
        """Leave in good order. Idempotent; any later call raises `ClosedError`."""
        if self._end is None:
            self._end = "it was closed"
            self._if_dropped.detach()
            self.transport.close()

    def leave_to_parent(self) -> None:
        """See `ProcessBound`."""
        self._end = FORKED
        self._if_dropped.detach()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        # An error inside `with` may have left peers waiting: abort, where close would wait for them.
        if error is not None and self._end is None:
            self.end(error)
        self.close()


# --- one rank of a ring ----------------------------------------------------------------------------------------------

_open: WeakSet[Runtime] = WeakSet()


@dataclass(frozen=True)
class AttentionCall:
    """Everything about a call but its tensors."""

    problem: Problem
    route: Route
    softmax: Softmax
    engine: Engine
    dropout_seed: int = 0
    """Where there is dropout; no part of a plan, for it is another one at each step."""
    number: int = field(default=0, compare=False)
    """The number that all ranks gave this call when they compared it: its backward pass names it."""
    graph: bool = field(default=False, compare=False)
    """Whether the outputs carry a graph on every rank, because some rank needs gradients."""

    def summary(self, *extra: str) -> str:
        """Return what all ranks must have in common: a readable line, then a line for each fact, see `facts_of`.

        Every field is compared, also of the route and of what else plans are made from. Only engines may differ between
        ranks: messages and results are the same with every engine.
        """
        parts = [part.name for part in fields(self) if part.compare and part.name != "engine"]
        facts = (fact for name in parts for fact in _facts(getattr(self, name), FACT_NAMES.get(name, name)))
        return "\n".join((f"{self.route.name} attention of {self.problem.q_layout.length} tokens", *extra, *facts))


FACT_NAMES = {"problem": "", "softmax": "", "route": "schedule"}
"""How facts of these fields begin in an error; those of others begin with the field's name."""


@bounded
def _facts(part: Hashable, name: str) -> tuple[str, ...]:
    return tuple(facts_of(part, name))


class Runtime(RankGroup):
    """One rank's end of a group of ranks that attend together. `Ring` is its public face and says what options mean.

    One thread at a time uses it, and all ranks make the same calls in the same order.
    """

    def __init__(
        self,
        transport: Transport,
        *,
        engine: str | Engine,
        dkv_wire_dtype: str | None,
        kv_wire_dtype: str | None,
        out_wire_dtype: str | None,
        poison: bool,
        cluster: Cluster | Literal["auto"] | None = None,
    ) -> None:
        """Owns the transport, which closes with it. Dtypes are names, checked. `cluster`: see `Ring`."""
        super().__init__(transport)
        self.engine = engine
        self.dkv_wire_dtype, self.kv_wire_dtype, self.out_wire_dtype = dkv_wire_dtype, kv_wire_dtype, out_wire_dtype
        self.links = links_of(transport.locations) if transport.locations else None
        if cluster == "auto":
            cluster, self.cluster_from = recognise(self.locations, self.links, transport.name)
        else:
            self.cluster_from = f"named: {cluster.name}" if cluster else "not looked for: cluster=None"
        # Unless links are told, where ranks are is known better here than by whoever described machines like these.
        self.cluster = replace(cluster, links=cluster.links or self.links) if cluster else REFERENCE.joined(self.links)
        self.cluster.check_ranks(transport.world_size)
        self.exchange = Exchange(transport.name, transport.sm_margin)
        self.machines = self.exchange.on(self.cluster) if cluster else self.cluster
        self.pool = Pool(self.transport.allocate, poison=poison)
        self._counters = Counters()
        # With other documents in each step there is no end to plans.
        self._executors: BoundedCache[tuple[Any, ...], Executor] = BoundedCache(lambda key, each: each.held_bytes())
        self._recording: Recording | None = None
        self._margin_told = False
        _open.add(self)

    @property
    def locations(self) -> tuple[Location, ...]:
        """Where each rank runs, by rank; empty where the transport was given open and does not tell."""
        return self.transport.locations

    def counters(self) -> dict[str, int]:
        """What this rank sent since the last reset.

        Returns:
            `bytes_sent` (payload), `messages`, `passes` and `pool_high_water_bytes`.
        """
        return {**asdict(self._counters), "pool_high_water_bytes": self.pool.high_water_bytes}

    def reset_counters(self) -> None:
        """Set all counters to zero."""
        self._counters = Counters()
        self.pool.reset_high_water()

    @contextmanager
    def recording(self, *, nvtx: bool = False) -> Iterator[Recording]:
        """A recording of what the passes inside of the `with` do on this rank, backward included. Local.

        On a GPU it waits for the device once, before the first pass; passes are refused while they are captured into a
        graph.

        Args:
            nvtx: Also name the passes for NVIDIA's tools.

        Returns:
            A context manager that gives the `Recording`, see `ringattn.observe.spans`.

        Raises:
            InputError: The ring is being recorded already.
            ClosedError: The ring was closed or has failed.
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
        """The ring's own memory, which all layers share. Local.

        Returns:
            `world_size`; `plans` that are cached; of the largest plan `slots` (buffers) and `pool_gap_bytes`;
            `kept_bytes`, the most that one forward pass keeps for its backward; `pool_bytes` now,
            `pool_high_water_bytes` of the largest pass, and `pool_reuses`, passes that needed no new memory.
        """
        plans = [executor.plan for executor in self._executors.values()]
        return {"world_size": self.world_size, **placements(plans), **self.pool.report()}

    def close(self) -> None:
        """Leave in good order. Idempotent; any later call raises `ClosedError`."""
        if self.forked:
            return
        self._let_go()  # before the transport ends, which gives the memory back
        super().close()

    def end(self, cause: BaseException) -> None:
        """Ends the group on all ranks; the ring's memory is let go of.

        Args:
            cause: The error that later calls name.

        Raises:
            Nothing.
        """
        super().end(cause)
        if not self.forked:
            self._let_go()

    def _let_go(self) -> None:
        """Let go of the arena, whoever still holds an executor."""
        for executor in self._executors.values():
            executor.unbind()
        self._executors.clear()
        self.pool.release_arena()

    def choice(
        self, device: torch.device, dtype: torch.dtype, head_dim: int, value_dim: int, softmax: Softmax | None
    ) -> Choice:
        """The engine of a call with such inputs.

        Args:
            device: Of the inputs.
            dtype: Of the inputs.
            head_dim: Elements of a query and a key.
            value_dim: Elements of a value.
            softmax: Of the call; None for one without options.

        Returns:
            The engine, and one sentence that says why it is taken.

        Raises:
            UnsupportedError: The engine that was asked for does not compute such a call.
        """
        if not isinstance(self.engine, str):
            return Choice(self.engine, f"{self.engine.name}: given as an object")
        sm_margin = self.transport.sm_margin if device.type == "cuda" else 0
        return choose(self.engine, device, dtype, head_dim, value_dim, softmax, sm_margin)

    def engine_for(self, *facts: Any) -> Engine:
        """The engine of `choice`.

        Args:
            facts: The arguments of `choice`.

        Returns:
            The engine.

        Raises:
            UnsupportedError: The engine that was asked for does not compute such a call.
        """
        engine = self.choice(*facts).engine
        self._tell_margin(engine, facts[0])
        return engine

    def _tell_margin(self, engine: Engine, device: torch.device) -> None:
        """Warn once a ring where an exchange shares the GPU with kernels that leave it no multiprocessor."""
        margin = self.transport.sm_margin
        if self._margin_told or device.type != "cuda" or not margin or engine.sm_margin:
            return
        self._margin_told = True
        if self.rank == 0:
            warnings.warn(
                f"engine {engine.name!r} leaves no multiprocessor free, so that an exchange may wait until the kernels "
                f"that fill the GPU end: engine='fa3' and engine='triton' leave sm_margin={margin}, and "
                "NcclOptions(sm_margin=0) accepts it",
                stacklevel=2,
            )

    def executor_of(self, call: AttentionCall, backward: bool) -> Executor:
        """This rank's plan of a call that all ranks agreed on, ready to run; made at its first use.

        Args:
            call: The call.
            backward: Of its backward pass.

        Returns:
            The executor, which the ring keeps.

        Raises:
            ClosedError: The ring was closed or has failed.
        """
        self.check_open()
        key = call.problem, call.route, call.softmax, call.engine, backward

        def make() -> Executor:
            with self.guarded(), torch.inference_mode(False):  # what it keeps serves training steps too
                return Executor(plan_of(call.problem, call.route, self.rank, backward), call.engine, call.softmax)

        executor = self._executors.get(key, make)
        if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():
            self._executors.keep(key)  # a graph has the addresses of its row lists
        return executor

    def begin(self, executor: Executor, make: Callable[[KV | None], LocalTensors]) -> LocalTensors:
        """Begins a pass that `run` continues; see `Executor.begin`. The ring makes no other call between the two.

        Args:
            executor: Of the pass.
            make: Makes keys and values, in the message that is given where there is one.

        Returns:
            The keys and values.

        Raises:
            ClosedError: The ring was closed or has failed.
            TransportError: A message failed.
            OutOfMemoryError: This rank had no memory for the pass.
        """
        watch = profiler_of(executor.plan, self._recording)
        with self.guarded(), self.accounted(executor), unseen():
            self._make_room(executor)
            return executor.begin(self.transport, self.pool, make, watch)

    def run(
        self, executor: Executor, arithmetic: Arithmetic, kept: Tensor | None = None, keep: bool = False
    ) -> Tensor | None:
        """One pass; see `Executor.run`. Inside `accounted`.

        Args:
            executor: Of the pass.
            arithmetic: What its steps compute.
            kept: What the forward pass kept for this backward pass. None: nothing.
            keep: Keep what a backward pass can begin with.

        Returns:
            What was kept, or None.

        Raises:
            ClosedError: The ring was closed or has failed.
            TransportError: A message failed.
            OutOfMemoryError: This rank had no memory for the pass.
        """
        watch = profiler_of(executor.plan, self._recording)
        with self.guarded():
            self._make_room(executor)
            return executor.run(self.transport, self.pool, self._counters, arithmetic, watch, kept, keep)

    @contextmanager
    def accounted(self, executor: Executor) -> Iterator[None]:
        """Where memory runs out inside, ends the ring with the account of this pass; see `Executor.accounted`.

        Args:
            executor: Of the pass.

        Returns:
            A context manager.

        Raises:
            OutOfMemoryError: Memory ran out inside.
        """
        try:
            # Operators that the engine calls attend to blocks, which is not the local attention that is refused.
            with executor.accounted(self.pool), entered(Activation(None), outside_regions=True):
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
