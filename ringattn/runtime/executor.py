"""The executor, which runs a plan, forward or backward, as steps of wait, pack, exchange and compute.

The messages of a step are in flight while its work runs; the next step begins when they have arrived. All buffers are
bound before the pass, so the executor allocates nothing during the pass.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ringattn.core.bounded_cache import held_bytes
from ringattn.core.geometry import StridedRange
from ringattn.engine.base import (
    KV,
    BackwardInputs,
    Engine,
    Output,
    Sizes,
    Softmax,
    SoftmaxState,
    Visit,
    accumulator_dtype,
)
from ringattn.errors import UnsupportedError
from ringattn.observe.memory import is_shortage, out_of_memory_error
from ringattn.observe.spans import (
    END,
    PACK,
    POST,
    PROJECT,
    WAIT,
    WORK,
    Exchange,
    Marks,
    NvtxRanges,
    ProfilerRanges,
    Recording,
    describe_phase,
)
from ringattn.planner.plan import (
    LOCAL,
    ONE,
    Add,
    AttendOp,
    AttendReceivedOp,
    Plan,
    PlanStep,
    record_elements,
    record_layout_of,
)
from ringattn.runtime.records import TORCH_DTYPE, BufferRef, LocalTensors, PackedBuffer, Pool, Rows, add, from_row, pack
from ringattn.schedule.content import HeadRows, size
from ringattn.schedule.ops import Kind
from ringattn.transport.base import Hop, Message, Transport, WorkHandle


@dataclass
class Counters:
    """The counters since the last reset. They count the payload of copies, without control traffic."""

    passes: int = 0
    messages: int = 0
    bytes_sent: int = 0


class _Bound(NamedTuple):
    """The buffers and hops of a plan, bound to the pool. They are valid as long as the pool has `pool_bytes`."""

    pool_bytes: int
    buffers: list[PackedBuffer]
    hops: list[Hop | None]


class Executor:
    """A plan whose tiles are prepared for an engine. Reusable; one pass at a time."""

    def __init__(self, plan: Plan, engine: Engine, softmax: Softmax) -> None:
        """Prepare the tiles of every attention update once."""
        self.plan, self.engine = plan, engine
        items = [item for step in plan.steps for item in step.work]
        updates = [item for item in items if isinstance(item, AttendOp)]
        rows = plan.problem.q_layout.counts[plan.rank]
        # Outputs of other ranks are merged after the last update of this rank, so no update completes a row.
        merged = any(isinstance(item, Add) and plan.buffers[item.part].kind is not Kind.DKV for item in items)
        steps = [tuple(attend.tiles) for attend in updates]
        visits = [Visit(attend.overwrite, attend.last) for attend in updates]
        self.works = engine.prepare(steps, softmax, rows, plan.problem.q_heads, more=merged, visits=visits)
        # By identity: the plan keeps its operations alive at least as long as this dict.
        self._work_of: dict[int, Any] = {id(attend): work for attend, work in zip(updates, self.works, strict=True)}
        # All works on the same received queries share one state, as the updates of the local queries do.
        self._received: dict[int, tuple[Sequence[Any], int]] = {}
        by_queries: dict[int, list[AttendReceivedOp]] = defaultdict(list)
        for item in items:
            if isinstance(item, AttendReceivedOp):
                by_queries[item.q].append(item)
        for queries, ops in by_queries.items():
            # In a fused buffer each (row, head) is a separate row, so there is one query head and one K/V head.
            rows, alone = size(plan.buffers[queries].content), softmax._replace(group=1)
            works = engine.prepare(
                [tuple(op.tiles) for op in ops], alone, rows, 1, more=True, visits=[Visit(op.overwrite) for op in ops]
            )
            for index, op in enumerate(ops):
                self._received[id(op)], self._work_of[id(op)] = (works, index), works[index]
        self._bound: _Bound | None = None
        # Whether `begin` has started a pass that `run` has not yet continued.
        self._begun = False
        self.step: int | None = None
        """The number of the plan step that is running."""
        self.has_sums = False
        """Whether the accumulators of the pass exist."""
        self._exchange: tuple[int, WorkHandle | None] | None = None
        self._watch = PassProfiler(plan, None, None)

    def workspace_bytes(self) -> int:
        """Return the peak of the temporary memory during the pass, in bytes; see `Engine.workspace_bytes`."""
        problem, plan, most = self.plan.problem, self.plan, 0
        # Bytes of the states of received queries, by buffer: they exist from the first work on them to the last.
        carried: dict[int, int] = {}
        dims = problem.head_dim, problem.value_dim, TORCH_DTYPE[problem.dtype]
        local = Sizes(problem.q_layout.counts[plan.rank], problem.batch, problem.q_heads, *dims)
        for item in (item for step in plan.steps for item in step.work):
            if isinstance(item, Add):
                continue
            sizes, received = local, isinstance(item, AttendReceivedOp)
            if isinstance(item, AttendReceivedOp):
                sizes = Sizes(size(plan.buffers[item.q].content), problem.batch, 1, *dims)
                carried[item.q] = serving_bytes(sizes, plan.backward)
            # The delta of received rows arrives as a gradient of its lse, see `arithmetic`.
            dlse = plan.backward and received
            called = self.engine.workspace_bytes(self._work_of[id(item)], sizes, plan.backward, dlse)
            # Updates run one after the other and free what they allocate, so the maximum counts, not the sum.
            most = max(most, sum(carried.values()) + called)
            if isinstance(item, AttendReceivedOp) and item.result != LOCAL:
                del carried[item.q]
        return most

    @property
    def begins_with_keys(self) -> bool:
        """Whether the first step sends only K and V, so that a pass can begin before the queries exist."""
        if not self.plan.steps:
            return False
        packs = self.plan.steps[0].packs
        # A plan that also sends queries in its first step cannot begin before they exist.
        return all(self.plan.buffers[pack.into].kind is Kind.KV for pack in packs)

    def begin(
        self,
        transport: Transport,
        pool: Pool,
        make: Callable[[KV | None], LocalTensors],
        watch: PassProfiler,
    ) -> LocalTensors:
        """Begin a pass early, with the messages of its first step. `run` continues the pass.

        These messages contain the local K and V, which `make` returns. If the first message contains all of K and V
        unchanged, `make` receives views of the message, (rows, batch, kv_heads, dim) each, and must write K and V
        there. Otherwise `make` receives None, and K and V are copied. Only for a plan that `begins_with_keys`.
        """
        # Begin the pass before the buffers are bound: the pool may grow here, and its memory then moves.
        self._begin_pass(transport, pool)
        self._watch = watch
        try:
            watch.begin(PROJECT)
            message = self._local_message()
            buffers = self._buffers(transport, pool)
            local = make(
                None if message is None else buffers[message].part(StridedRange(0, self.plan.problem.kv_heads))
            )
            # `run` continues with the work of this step.
            self._launch(0, {Kind.KV: local}, filled=message)
            watch.project()
        # `run` will not be called, so the pass must end here.
        except BaseException:
            self._end_pass(transport, pool)
            raise
        self._begun = True
        return local

    def run(
        self,
        transport: Transport,
        pool: Pool,
        counters: Counters,
        arithmetic: Arithmetic,
        watch: PassProfiler,
        kept: Tensor | None = None,
        keep: bool = False,
    ) -> Tensor | None:
        """Run one pass. `keep`: return the remote inputs that the backward pass receives as `kept`, or None.

        `watch` records the pass. If `begin` started the pass, the profiler that `begin` received is used instead.
        """
        # Cleared first, so that after a failure below the next pass starts from the beginning.
        begun, self._begun, self.has_sums = self._begun, False, True
        if not begun:
            self._begin_pass(transport, pool)
            self._watch = watch
        watch = self._watch
        try:
            (watch.resume if begun else watch.begin)()
            local, buffers = arithmetic.local, self._buffers(transport, pool)
            # The kept buffers as bytes: copied in before a backward pass, concatenated after a forward pass.
            kept_buffers = [buffers[buffer].flat.view(torch.uint8) for buffer in self.plan.kept]
            # Before any work: step 0 may read the kept inputs.
            if kept is not None:
                for flat, part in zip(kept_buffers, kept.split([flat.numel() for flat in kept_buffers]), strict=True):
                    flat.copy_(part)

            def place(buffer: int, kind: Kind) -> BufferRef:
                return local[kind] if buffer == LOCAL else buffers[buffer]

            for number, step in enumerate(self.plan.steps):
                # If the pass was begun early, the messages of its first step are in flight already.
                if number or not begun:
                    self._launch(number, local)
                # Buffers that live in the same step do not overlap, so this is safe while messages are in flight.
                for zero in step.zeros:
                    buffers[zero.buffer].zero(zero.rows)
                # After the launch, so eight-bit K/V are restored while the messages of this step are in flight.
                for restore in step.restores:
                    pack(buffers[restore.source], buffers[restore.into])
                for item in step.work:
                    if isinstance(item, Add):
                        add(buffers[item.part], place(item.into, self.plan.buffers[item.part].kind), item.overwrite)
                    elif isinstance(item, AttendReceivedOp):
                        # The kind of a buffer is its role; a role that this pass does not have is LOCAL.
                        roles = (item.q, item.kv, item.result, item.inputs, item.dkv)
                        received = {self.plan.buffers[role].kind: buffers[role] for role in roles if role != LOCAL}
                        arithmetic.attend_received(received, *self._received[id(item)])
                    else:
                        kv, dkv = self._read(place(item.kv, Kind.KV), item, item.kv_row, item.kv_step), None
                        if self.plan.backward:
                            dkv = self._read(place(item.dkv, Kind.DKV), item, item.dkv_row, item.dkv_step)
                        arithmetic.attend(kv, dkv, self._work_of[id(item)], item.last)
            # The messages of the last step still use the arena, which the next pass overwrites.
            self._wait()
            # Copied, because the next pass reuses the arena.
            kept = torch.cat(kept_buffers) if keep and kept_buffers else None
            watch.done()
        finally:
            self._end_pass(transport, pool)
        # Past `finally`: a pass that raised is not counted.
        counters.passes += 1
        counters.messages += self.plan.messages
        counters.bytes_sent += self.plan.bytes_sent
        return kept

    @contextmanager
    def accounted(self, pool: Pool, advise: Callable[[], list[str]]) -> Iterator[None]:
        """Raise `OutOfMemoryError` if memory runs out inside the `with`.

        The error lists the memory that the pass held, and the changes that `advise` returns.
        """
        self.step, self.has_sums = None, False
        try:
            yield
        except Exception as error:
            if not is_shortage(error):
                raise
            raise out_of_memory_error(
                error, self.plan, self.step, self.workspace_bytes(), pool.taken_bytes, advise
            ) from error

    def held_bytes(self) -> int:
        """Return the bytes of the plan, the engine's tables and the row lists, without the memory of the pool."""
        bound = self._bound  # another thread may unbind the buffers
        lists = [] if bound is None else [buffer.lists for buffer in bound.buffers]
        return held_bytes((self.plan, self.works, self._received, lists))

    @property
    def bound(self) -> object:
        """The buffers of the last pass, with their row lists, and the hops. They live as long as this object."""
        return self._bound

    def unbind(self) -> None:
        """Release the memory of the pool; the next pass binds the buffers again."""
        self._bound = None

    def _read(self, place: BufferRef, item: AttendOp, row: int, step: int) -> KV:
        """Return K and V of an attention update, or dK and dV: every `step`-th row of `place`, from `row` on.

        The rows of a fused buffer with a single head belong to any head.
        """
        kv = from_row(place.part(item.heads), row, step)
        if item.owner is not None or item.heads != ONE:
            return kv
        heads = self.plan.problem.kv_heads
        # One stored head is read as all K/V heads: an expanded view with stride 0, not a copy.
        return KV(kv.k.expand(-1, -1, heads, -1), kv.v.expand(-1, -1, heads, -1))

    def _launch(self, number: int, local: Mapping[Kind, LocalTensors], filled: int | None = None) -> None:
        """Wait for the messages in flight, pack the messages of this step except the `filled` one, and launch them."""
        self.step = number
        # This step packs or relays rows of those messages, and its buffers may share their memory.
        self._wait()
        assert self._bound is not None
        buffers = self._bound.buffers
        for gather in self.plan.steps[number].packs:
            # `make` wrote the filled message itself.
            if gather.into != filled:
                is_local = gather.source == LOCAL
                source = local[self.plan.buffers[gather.into].kind] if is_local else buffers[gather.source]
                pack(source, buffers[gather.into])
        self._exchange = number, self._watch.depart(number, self._bound.hops[number])

    def _wait(self) -> None:
        """Wait for the messages in flight."""
        # Cleared first, so that a failed exchange is not waited for again.
        exchange, self._exchange = self._exchange, None
        if exchange is not None:
            self._watch.arrive(*exchange)

    def _begin_pass(self, transport: Transport, pool: Pool) -> None:
        # First, because the pool may write to its memory, which a pass on another stream may still be using.
        transport.begin_pass()
        pool.begin_pass(self.plan.arena_bytes)

    def _end_pass(self, transport: Transport, pool: Pool) -> None:
        try:
            pool.end_pass()
        finally:
            transport.end_pass()
        self._watch.leave()

    def _local_message(self) -> int | None:
        """Return the buffer of the first step that packs all local K and V in their dtype, by its number, or None."""
        problem = self.plan.problem
        rows = StridedRange(0, problem.kv_layout.counts[self.plan.rank])
        # Only a message of all rows and heads in the same dtype has the layout of the local tensors.
        whole = (HeadRows(StridedRange(0, problem.kv_heads), (rows,)),)
        for gather in self.plan.steps[0].packs:
            into = self.plan.buffers[gather.into]
            is_local_kv = gather.source == LOCAL and into.kind is Kind.KV
            if is_local_kv and into.content == whole and into.dtype == problem.dtype:
                return gather.into
        return None

    def _buffers(self, transport: Transport, pool: Pool) -> list[PackedBuffer]:
        """Return the buffers of the plan, bound to the memory of the pool."""
        # A pool that has grown has moved, so earlier views are invalid.
        if self._bound is None or self._bound.pool_bytes != pool.nbytes:
            with torch.inference_mode(False):  # training steps use these views, too
                self._bound = self._bind(transport, pool)
        return self._bound.buffers

    def _bind(self, transport: Transport, pool: Pool) -> _Bound:
        """Return the buffers of the plan as views of the pool, and the hops over them."""
        problem, buffers = self.plan.problem, list[PackedBuffer]()
        for buffer in self.plan.buffers:
            form, dtype = record_layout_of(problem, buffer.kind, buffer.dtype), TORCH_DTYPE[buffer.dtype]
            record = record_elements(problem, buffer.dtype, buffer.kind)
            count = size(buffer.content) * record
            if buffer.inside is None:
                # Layouts with scalars (scales, lse) mix dtypes, so their buffer is typed as bytes.
                flat = pool.slot(buffer.offset_bytes, (count,), torch.uint8 if form.scalars else dtype)
            else:
                # A part of a fused buffer is a slice of its flat tensor, counted in records of one row and head.
                start = buffer.inside.row * record
                flat = buffers[buffer.inside.buffer].flat[start : start + count]
            # In the order of the plan, so its indices are valid here; a fused buffer precedes its parts.
            buffers.append(PackedBuffer(flat, buffer.content, problem.batch, form, dtype))
        # A hop is bound once, with its tensors, and started in every pass without reading the plan.
        hops = [
            transport.bind(*self._messages(step, buffers)) if step.sends or step.recvs else None
            for step in self.plan.steps
        ]
        return _Bound(pool.nbytes, buffers, hops)

    def _messages(self, step: PlanStep, buffers: Sequence[PackedBuffer]) -> tuple[list[Message], list[Message]]:
        # Part of every label, so that an error names the pass and the step.
        where = f"{'backward' if self.plan.backward else 'forward'} step {step.number}: "
        sends, recvs = (
            # On either side a message may be a slice of its buffer.
            [Message(part.peer, buffers[part.buffer].flat[part.first : part.first + part.elements], where + part.label)
             for part in messages]
            for messages in (step.sends, step.recvs)
        )  # fmt: skip
        return sends, recvs


# --- the arithmetic of a pass: the computation of its steps, on the tensors of one call by its engine -----------------
#
# Both arithmetic classes have the same interface:
# - `local`: the local tensors by kind: Q and KV; in backward GRAD_OUT and DKV; OUT (in backward DQ) if other ranks add
#   to it.
# - `attend`: attend with the local queries to some keys and values. Backward also adds to their gradients `dkv`, or,
#   with `final`, writes them in the dtype of the inputs.
# - `attend_received`: attend with received queries to received keys, all of them as one head; `index` counts the works
#   on these queries. The first work reads GRAD_OUT, all works add to DKV, and the last fills OUT (in backward DQ).


class ForwardArithmetic:
    """The arithmetic of a forward pass. It updates `state`, the softmax state of the local queries.

    Tensors are row-first, (rows, batch, heads, dim).
    """

    def __init__(
        self,
        engine: Engine,
        works: Sequence[Any],
        q: Tensor,
        local: LocalTensors,
        value_dim: int,
        sinks: Tensor | None,
        dropout_seed: int = 0,
    ) -> None:
        """Begin the forward pass of `works`, which the engine has prepared. `local`: the local K and V."""
        self.engine, self.q, self._dropout_seed = engine, q, dropout_seed
        self.value_dim = value_dim
        # The engine sees all works, so it can find the first and the last launch on each row.
        self.state = engine.begin(works, q, self.value_dim, sinks)._replace(dropout_seed=dropout_seed)
        self._received: dict[int, SoftmaxState] = {}
        self.local = {Kind.Q: LocalTensors(q), Kind.KV: local}
        # Outputs from other ranks are merged into the carried output; without it, none arrive.
        if self.state.out.carried is not None:
            self.local[Kind.OUT] = LocalTensors(self.state.out.carried, scalars=(_row_first(self.state.lse),))

    def attend(self, kv: KV, _: KV | None, work: Any, final: bool = False) -> None:
        """Update the softmax state of the local queries with the tiles of `work`."""
        self.engine.attend(self.q, kv, self.state, work)

    def attend_received(self, received: Mapping[Kind, PackedBuffer], works: Sequence[Any], index: int) -> None:
        """Update the separate softmax state of received queries by works[index].

        The last of the works also fills OUT.
        """
        # Received rows have one head: each (row, head) of a shard is a row here.
        q = _only(received[Kind.Q]).x
        if not index:
            # Without sinks: the owner of the queries counts them, once.
            begun = self.engine.begin(works, q, self.value_dim, None)
            self._received[id(works)] = begun._replace(dropout_seed=self._dropout_seed)
        state = self._received[id(works)]
        self.engine.attend(q, _keys(received[Kind.KV]), state, works[index])
        if Kind.OUT not in received:
            return
        del self._received[id(works)]
        out = _only(received[Kind.OUT])
        assert state.out.carried is not None
        out.x.copy_(state.out.carried)
        # The record of an output contains its lse, which the owner needs to merge.
        out.scalars[0].copy_(_row_first(state.lse))


class BackwardArithmetic:
    """The arithmetic of a backward pass. It computes `dq` of the local queries, and DKV of the local K and V."""

    def __init__(
        self,
        engine: Engine,
        works: Sequence[Any],
        q: Tensor,
        local: LocalTensors,
        inputs: BackwardInputs,
        grads: LocalTensors,
    ) -> None:
        """Begin the backward pass of `works`, which the engine has prepared.

        `local`: the local K and V. `grads`: the accumulators of their gradients, or the gradients themselves if the
        plan needs no accumulators (see `OwnSums`).
        """
        self.engine, self.q, self.inputs = engine, q, inputs
        self.value_dim = inputs.dout.shape[3]
        self.dq: Output = engine.begin_grad(works, q, self.value_dim)
        self._received: dict[int, tuple[BackwardInputs, Output]] = {}
        # lse and delta are sent with dout, so a receiver does not need the output.
        scalars = _row_first(inputs.lse), _row_first(inputs.delta)
        grad_out = LocalTensors(inputs.dout, scalars=scalars)
        self.local = {Kind.Q: LocalTensors(q), Kind.KV: local, Kind.GRAD_OUT: grad_out, Kind.DKV: grads}
        # As in forward: dQ from other ranks is added to the carried dQ.
        if self.dq.carried is not None:
            self.local[Kind.DQ] = LocalTensors(self.dq.carried)

    def attend(self, kv: KV, dkv: KV | None, work: Any, final: bool = False) -> None:
        """Add the gradients of the tiles of `work` to dq and dkv; with `final`, write the results to dkv."""
        sums, result = (None, dkv) if final else (dkv, None)
        self.engine.attend_grad(self.q, kv, self.inputs, self.dq, sums, work, result)

    def attend_received(self, received: Mapping[Kind, PackedBuffer], works: Sequence[Any], index: int) -> None:
        """Add the gradients of works[index] to those of received blocks. The last of the works also fills DQ.

        The output was not received; delta replaces it, see `BackwardInputs`.
        """
        q = _only(received[Kind.Q]).x
        if not index:
            # A separate dQ: these queries belong to another rank, to which it is sent.
            into = self.engine.begin_grad(works, q, self.value_dim)
            inputs = _received_inputs(_only(received[Kind.GRAD_OUT]))._replace(dropout_seed=self.inputs.dropout_seed)
            self._received[id(works)] = inputs, into
        inputs, into = self._received[id(works)]
        self.engine.attend_grad(q, _keys(received[Kind.KV]), inputs, into, _keys(received[Kind.DKV]), works[index])
        if Kind.DQ not in received:
            return
        del self._received[id(works)]
        assert into.carried is not None
        _only(received[Kind.DQ]).x.copy_(into.carried)


def _received_inputs(grad_out: Rows) -> BackwardInputs:
    # Engines need contiguous tensors that outlive the record. `contiguous` would not copy a single row, so clone.
    dout, lse, delta = (
        x.clone(memory_format=torch.contiguous_format)
        for x in (grad_out.x, *(scalar.permute(1, 2, 0) for scalar in grad_out.scalars))
    )
    # delta = sum(dout * out) - dlse: out = 0 and dlse = -delta replace the output, which was not sent.
    return BackwardInputs(dout, torch.zeros_like(dout), lse, -delta, delta)


def serving_bytes(sizes: Sizes, backward: bool) -> int:
    """Return the bytes that `attend_received` holds from the first to the last work on the same received queries.

    In forward it holds a softmax state; in backward it holds copies of the inputs, zeros and dQ. The engine's workspace
    is not included.
    """
    rows, item = sizes.rows * sizes.batch * sizes.heads, accumulator_dtype(sizes.dtype).itemsize
    if not backward:
        # out and lse of each row.
        return rows * (sizes.value_dim + 1) * item
    # dout and zeros in the inputs' dtype; dQ, lse, delta and -delta in the accumulator's.
    return rows * (2 * sizes.value_dim * sizes.dtype.itemsize + (sizes.head_dim + 3) * item)


def _row_first(x: Tensor) -> Tensor:
    """Permute (batch, heads, rows) to (rows, batch, heads)."""
    return x.permute(2, 0, 1)


def _only(records: PackedBuffer) -> Rows:
    """Return the value of records that hold a single value with one head, such as queries."""
    ((value,),) = records.parts.values()
    return value


def _keys(records: PackedBuffer) -> KV:
    """Return K and V of records that hold only these, with one head."""
    ((k, v),) = records.parts.values()
    return KV(k.x, v.x)


Arithmetic = ForwardArithmetic | BackwardArithmetic


# --- recording and profiling of a pass -------------------------------------------------------------------------------


class PassProfiler:
    """The observer of one pass. It marks the phases if there is a recording, and names ranges if a profiler runs."""

    def __init__(self, plan: Plan, recording: Recording | None, ranges: ProfilerRanges | NvtxRanges | None) -> None:
        self._plan, self._recording, self._ranges = plan, recording, ranges
        self._pass = "backward" if plan.backward else "forward"
        self._marks = Marks(plan, [], [])
        self._posted: Exchange | None = None

    def begin(self, phase: str = PACK) -> None:
        """Mark the beginning of the pass, with phase PACK or PROJECT."""
        self._enter(phase, 0)

    def depart(self, number: int, hop: Hop | None) -> WorkHandle | None:
        """Start the messages of plan step `number`, if it has any, and mark the beginning of its work."""
        handle = self._posted = None
        if hop is not None:
            posted = self._enter(POST, number)
            handle = hop.start()
            if self._recording is not None:
                self._posted = Exchange(self._plan.steps[number], posted, self._recording.clock.departed(), None)
        self._enter(WORK, number)
        return handle

    def project(self) -> None:
        """Undo the last mark of `depart`: the messages of the first step have left, but its work has not begun."""
        if self._recording is not None:
            self._marks.moments.pop()
        self._enter(PROJECT, 0)

    def resume(self) -> None:
        """Mark the beginning of the first step's work, after `project`."""
        self._enter(WORK, 0)

    def arrive(self, number: int, handle: WorkHandle | None) -> None:
        """Wait for the messages of step `number`, if it has any, and mark the beginning of the next step's packing."""
        if handle is not None:
            self._enter(WAIT, number)
            handle.wait()
        waited = self._enter(PACK, number + 1)
        if self._posted is not None and self._recording is not None:
            arrival = self._posted.arrival
            if arrival is None:
                arrival = self._recording.clock.arrived(handle)
            self._marks.exchanges.append(self._posted._replace(arrival=arrival, waited=waited))

    def done(self) -> None:
        """Mark the successful end of the pass."""
        if self._recording is not None:
            self._marks.moments.append((END, len(self._plan.steps), self._recording.clock.mark()))
            self._recording.add(self._marks)

    def leave(self) -> None:
        """End the pass, whether it succeeded or not."""
        if self._ranges is not None:
            self._ranges.leave()

    def _enter(self, phase: str, number: int) -> Any:
        """Begin a phase of plan step `number`, and so end the previous phase.

        Return the mark if there is a recording.
        """
        if self._ranges is not None:
            self._ranges.enter(f"ringattn {self._pass} {describe_phase(self._plan, phase, number)[0]}")
        if self._recording is None:
            return None
        mark = self._recording.clock.mark()
        self._marks.moments.append((phase, number, mark))
        return mark


def check_recording(recording: Recording | None) -> None:
    """Raise `UnsupportedError` for a recording while a CUDA graph is captured."""
    if recording is not None and torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
        raise UnsupportedError(
            "a pass cannot be recorded while it is captured into a CUDA graph, because captured events have no times; "
            "leave ring.recording() before the capture, and record a pass that is not captured"
        )


def profiler_of(plan: Plan, recording: Recording | None) -> PassProfiler:
    """Return the profiler of one pass."""
    ranges: ProfilerRanges | NvtxRanges | None = None
    if recording is not None and recording.nvtx:
        ranges = NvtxRanges()
    elif torch.autograd._profiler_enabled():
        ranges = ProfilerRanges()
    return PassProfiler(plan, recording, ranges)
