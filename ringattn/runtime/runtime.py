"""What attention runs on: one rank's transport, memory pool, plans that are ready to run, counters and recordings."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any, Literal
from weakref import WeakSet

import torch
from torch import Tensor

from ringattn.core.bounded_cache import BoundedCache, bounded
from ringattn.core.problem import Problem
from ringattn.engine.base import KV, Engine, Softmax
from ringattn.engine.select import Choice, choose
from ringattn.errors import InputError, OutOfMemoryError
from ringattn.observe.spans import Recording, new_recording
from ringattn.planner.choose import plan_of
from ringattn.planner.cluster import REFERENCE, Cluster, Exchange
from ringattn.planner.plan import placements
from ringattn.runtime.activation import Activation, entered, unseen
from ringattn.runtime.consistency import facts_of
from ringattn.runtime.executor import Arithmetic, Counters, Executor, profiler_of
from ringattn.runtime.pool import Pool
from ringattn.runtime.rank_group import RankGroup
from ringattn.runtime.records import LocalTensors
from ringattn.schedule.routes import Route
from ringattn.transport.base import Transport
from ringattn.transport.location import Location, links_of, recognise

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
