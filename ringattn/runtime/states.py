"""Rows of history and states for layers that read a document in token order, such as convolutions and recurrences.

A rank computes its fragments (`core.fragments`) by itself, each from an empty state, and continues them afterwards:
`halo` gives each fragment the rows before it, `scan_states` the state in which its document is when it starts.
Guarantees: both are collective, differentiable and exact; every wait has the ring's deadline; calls that differ
between ranks are refused before anything is sent; results do not depend on the order in which messages arrive.
All arithmetic on states is in their dtype, float32 or float64, also under torch.autocast.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from ringattn.core.bounded_cache import bounded
from ringattn.core.fragments import Halo, Ints, Part, Scan, Update, halo_of, scan_of
from ringattn.core.layout import Layout
from ringattn.errors import InputError, UnsupportedError
from ringattn.gradients import once_differentiable
from ringattn.integers import whole_number
from ringattn.masks import Tree
from ringattn.runtime.activation import attended, unseen
from ringattn.runtime.consistency import facts_of
from ringattn.runtime.runtime import Runtime
from ringattn.sequence import Sequence, check_device, check_sequences, dimension_of
from ringattn.transport.base import Message, WorkHandle


def halo(ring: Runtime, x: Tensor, seq: Sequence, width: int, dim: int) -> tuple[Tensor, Tensor]:
    """See `Ring.halo`."""

    axis, rows = 0, 0

    def described() -> str:
        nonlocal axis, rows
        check_sequences(ring, seq, None)
        rows = whole_number(width, "halo: width must be a number of rows", 0)
        axis = dimension_of(x, dim, "halo")
        check_device(ring, "x", x)
        if x.shape[axis] != seq.counts[ring.rank]:
            raise InputError(
                f"halo: dimension {axis} of a tensor of shape {tuple(x.shape)} must have this rank's "
                f"{seq.counts[ring.rank]} tokens"
            )
        _check_order(seq)
        halo_of(seq.layout, seq.bounds, rows, ring.rank)
        rest = [size for index, size in enumerate(x.shape) if index != axis]
        return "\n".join((f"halo of {rows} rows of {rest}, {x.dtype}", _facts(seq.layout, seq.bounds)))

    call = ring.check_same_call(described, {"x": x})
    attended()
    plan = halo_of(seq.layout, seq.bounds, rows, ring.rank)
    padded = _Halo.apply(x.movedim(axis, 0), call.anchor(x), ring, plan, call.number)
    return padded.movedim(0, axis), _on(x, plan.local).clone()  # the plan is cached, and the caller may change the rows


def _check_order(seq: Sequence) -> None:
    """Raise `UnsupportedError` for a tree, whose child nodes do not continue the token before them."""
    if isinstance(seq.mask, Tree):
        raise UnsupportedError(
            "layers with a state read a document in token order, and a node of a tree continues its parent instead; "
            "give each path its own document"
        )


@contextmanager
def started_scan(
    ring: Runtime, transitions: Tensor, states: Tensor, seq: Sequence, matrix: bool
) -> Iterator[PendingStates]:
    """Start the first exchange of `Ring.scan_states`. Inside the `with`, compute something else, and then call `wait`.

    The ring makes no other call before `wait`, and an error before its end ends the ring. The backward pass is
    overlapped too: its first exchange starts when the gradients of the initial states are known, and ends after the
    backward pass of what was computed before `wait`. Collective, like `Ring.scan_states`.
    """

    def described() -> str:
        check_sequences(ring, seq, None)
        _check_order(seq)
        check_device(ring, "states", states)
        check_device(ring, "transitions", transitions)
        local = _plan_of_scan(ring, seq, reverse=False).local
        if states.dtype not in (torch.float32, torch.float64) or transitions.dtype != states.dtype:
            raise InputError(
                f"scan_states: states and transitions must both be float32 or both float64, because rounded states "
                f"accumulate errors; got {states.dtype} and {transitions.dtype}"
            )
        if states.dim() == 0 or states.shape[0] != local or transitions.shape[:1] != states.shape[:1]:
            raise InputError(
                f"scan_states: this rank has {local} fragments that are parts of documents (`is_part` in "
                f"seq.fragments()), but states and transitions have the shapes {tuple(states.shape)} and "
                f"{tuple(transitions.shape)}"
            )
        kind = "matrix" if matrix else "factor"
        size = states.shape[-2] if matrix and states.dim() > 2 else 0
        expected = (*states.shape[:-2], size, size)
        fits = transitions.shape == expected if matrix else _broadcasts(transitions.shape, states.shape)
        if not fits or (matrix and states.dim() < 3):
            wanted = f"must have the shape {expected}" if matrix else "must broadcast to the states"
            raise InputError(
                f"scan_states: transitions of shape {tuple(transitions.shape)}, {'matrices' if matrix else 'factors'} "
                f"of states of shape {tuple(states.shape)}, {wanted}"
            )
        shapes = f"{tuple(states.shape[1:])} and transitions {tuple(transitions.shape[1:])} ({kind})"
        return "\n".join((f"scan of states {shapes}, {states.dtype}", _facts(seq.layout, seq.bounds)))

    call = ring.check_same_call(described, {"transitions": transitions, "states": states})
    attended()
    scan = PendingStates(ring, seq, matrix, call.number)
    started = _StartScan.apply(transitions, states, call.anchor(transitions, states), scan)
    scan.inputs = started, transitions.detach()
    try:
        yield scan
    except BaseException as error:
        # After `wait`, all ranks have the states: a checkpoint stops its recomputation there by an error of torch.
        if scan.running is not None:
            ring.end(error)
        raise


class PendingStates:
    """A scan whose first exchange has started. In the backward pass, the scan from the last fragment to the first."""

    def __init__(self, ring: Runtime, seq: Sequence, matrix: bool, number: int) -> None:
        self.ring, self.seq, self.matrix, self.number = ring, seq, matrix, number
        self.inputs: tuple[Tensor, Tensor] | None = None
        self.running: _RunningScan | None = None

    def wait(self) -> Tensor:
        """Return the initial states of this rank's fragments. To be called once."""
        if self.inputs is None:
            raise InputError("wait was called before; a scan has one result")
        inputs, self.inputs = self.inputs, None
        return _FinishScan.apply(*inputs, self)

    def begin(self, transitions: Tensor, states: Tensor, reverse: bool) -> None:
        """Start a scan in one direction."""
        with self.ring.guarded(), unseen(), _uncast(states):
            self.running = _RunningScan(self, transitions, states, reverse)

    def end(self) -> Tensor:
        """Complete the running scan, and return the state before each fragment in its direction."""
        assert self.running is not None
        running, self.running = self.running, None
        with self.ring.guarded(), unseen(), _uncast(running.states):
            return running.finish()


class _RunningScan:
    """One scan in one direction: a table of transitions and states, and the exchanges and updates of its plan."""

    def __init__(self, scan: PendingStates, transitions: Tensor, states: Tensor, reverse: bool) -> None:
        self.transport, self.matrix = scan.ring.transport, scan.matrix
        self.plan = _plan_of_scan(scan.ring, scan.seq, reverse)
        self.transitions, self.states = (
            torch.cat([values.detach(), values.new_empty(self.plan.entries - len(values), *values.shape[1:])])
            for values in (transitions, states)
        )
        self.started = self._start(0)

    def finish(self) -> Tensor:
        """Complete the exchanges and updates, and return the state before each local fragment."""
        for index, each in enumerate(self.plan.rounds):
            handle, received = self._start(index) if index else self.started
            handle.wait()
            for part, message in zip(each.receives, received, strict=True):
                self._unpack(part, message)
            for update in each.updates:
                self._update(update)
        initial = _on(self.states, self.plan.initial)
        before = self.states.new_zeros(self.plan.local, *self.states.shape[1:])
        known = (initial >= 0).nonzero()[:, 0]  # a fragment at the start of its document has no state before it
        before[known] = self.states[initial[known]]
        return before

    def _start(self, index: int) -> tuple[WorkHandle, list[Tensor]]:
        """Start an exchange. Return it with the buffers of the received parts."""
        each = self.plan.rounds[index]
        label = f"states, exchange {index + 1} of {len(self.plan.rounds)}"
        sends = [Message(part.peer, self._packed(part), label) for part in each.sends]
        received = [self.states.new_empty(self._numbers(part)) for part in each.receives]
        receives = [Message(part.peer, buffer, label) for part, buffer in zip(each.receives, received, strict=True)]
        return self.transport.exchange(sends, receives), received

    def _numbers(self, part: Part) -> int:
        """Return how many numbers a message has."""
        return len(part.transitions) * self.transitions[0].numel() + len(part.states) * self.states[0].numel()

    def _packed(self, part: Part) -> Tensor:
        """Return a message: transitions, then states."""
        tables = (self.transitions, part.transitions), (self.states, part.states)
        return torch.cat([table[_on(table, entries)].flatten() for table, entries in tables])

    def _unpack(self, part: Part, message: Tensor) -> None:
        """Write a received message to the table."""
        middle = len(part.transitions) * self.transitions[0].numel()
        for table, entries, values in (
            (self.transitions, part.transitions, message[:middle]),
            (self.states, part.states, message[middle:]),
        ):
            table[_on(table, entries)] = values.view(len(entries), *table.shape[1:])

    def _update(self, update: Update) -> None:
        left, right = _on(self.states, update.left), _on(self.states, update.right)
        transitions, states = self.transitions[right], self.states[right]
        states += self._product(transitions, self.states[left])
        if update.whole.any():
            whole = _on(self.states, update.whole.nonzero()[0])
            self.transitions[right[whole]] = self._product(transitions[whole], self.transitions[left[whole]])
        self.states[right] = states

    def _product(self, transitions: Tensor, values: Tensor) -> Tensor:
        return transitions @ values if self.matrix else transitions * values


class _StartScan(torch.autograd.Function):
    """Start the forward scan. In the backward pass, complete the scan that `_FinishScan` started."""

    @staticmethod
    def forward(ctx: Any, transitions: Tensor, states: Tensor, _: Tensor | None, scan: PendingStates) -> Tensor:
        ctx.scan, ctx.ring, ctx.shape = scan, scan.ring, transitions.shape
        scan.begin(transitions, states, reverse=False)
        return torch.empty_like(states)  # stands for the initial states, which `_FinishScan` computes

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, before: Tensor) -> tuple[Tensor, Tensor, None, None]:
        d_states = ctx.scan.end()
        if ctx.scan.matrix:
            return d_states @ before.mT, d_states, None, None
        return (d_states * before).sum_to_size(ctx.shape), d_states, None, None


class _FinishScan(torch.autograd.Function):
    """Complete the forward scan. In the backward pass, start the scan in the other direction.

    S is the state before a fragment, with S[p + 1] = M[p] S[p] + B[p]. The gradient of B[p] is that of S[p + 1]:
    dB[p] = dS[p + 1] + M[p + 1]^T dB[p + 1]. That is a scan from the last fragment to the first. The gradient of M[p]
    is dB[p] S[p]^T. `_StartScan` computes it, and gets S in place of a gradient.
    """

    @staticmethod
    def forward(ctx: Any, started: Tensor, transitions: Tensor, scan: PendingStates) -> Tensor:
        ctx.scan, ctx.ring = scan, scan.ring
        before = scan.end()
        ctx.save_for_backward(transitions, before)
        return before.detach()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        scan = ctx.scan
        with scan.ring.refused_by_all():  # autograd raises here if a saved tensor was changed in place or freed
            transitions, before = ctx.saved_tensors
        scan.ring.check_consistency("scan of states", backward_of=scan.number)
        scan.begin(transitions.mT if scan.matrix else transitions, grad, reverse=True)
        return before, None, None


class _Halo(torch.autograd.Function):
    """The rows of each fragment behind their history. Backward returns the gradients of history to its owners."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, _: Tensor | None, ring: Runtime, plan: Halo, number: int) -> Tensor:
        ctx.ring, ctx.plan, ctx.number = ring, plan, number
        with unseen():
            padded = x.new_zeros(plan.rows, *x.shape[1:])
            padded[_on(x, plan.local)] = x.detach()
            for rows, received in _exchanged(ring, x.detach(), plan.sends, plan.receives, "rows of history"):
                padded[rows] = received
        return padded

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None, None]:
        ring, plan = ctx.ring, ctx.plan
        ring.check_consistency("halo", backward_of=ctx.number)
        with unseen():
            wide = torch.promote_types(grad.dtype, torch.float32)
            total = grad[_on(grad, plan.local)].to(wide)
            label = "gradients of rows of history"
            for rows, received in _exchanged(ring, grad, plan.receives, plan.sends, label):
                total.index_put_((rows,), received.to(wide), accumulate=True)  # rows may occur several times
        return total.to(grad.dtype), None, None, None, None


def _exchanged(
    ring: Runtime, x: Tensor, sends: Mapping[int, Ints], receives: Mapping[int, Ints], label: str
) -> list[tuple[Tensor, Tensor]]:
    """Send rows of `x` to each rank of `sends`. Return (indices, rows) for each rank of `receives`."""
    packed = {peer: x[_on(x, rows)] for peer, rows in sends.items()}
    received = {peer: x.new_empty(len(rows), *x.shape[1:]) for peer, rows in receives.items()}
    if ring.rank in packed:
        received[ring.rank] = packed[ring.rank]
    with ring.guarded():
        ring.transport.exchange(
            [Message(peer, rows, label) for peer, rows in packed.items() if peer != ring.rank],
            [Message(peer, rows, label) for peer, rows in received.items() if peer != ring.rank],
        ).wait()
    return [(_on(x, receives[peer]), received[peer]) for peer in sorted(received)]


class _Reach(torch.autograd.Function):
    """Return the first input. The second one gets a gradient of zeros, so its backward pass runs."""

    @staticmethod
    def forward(ctx: Any, out: Tensor, states: Tensor) -> Tensor:
        ctx.like = states.new_empty(0), states.shape
        return out.view_as(out)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        empty, shape = ctx.like
        return grad, empty.new_zeros(shape)


def reach(out: Tensor, states: Tensor) -> Tensor:
    """Return `out`. Its backward pass reaches `states`, although `out` does not depend on them.

    Backward passes of scans are collective, so a rank needs this whose fragments all start a document.
    """
    return _Reach.apply(out, states)


def nodes_of(ring: Runtime) -> tuple[int, ...]:
    """Return the node of each rank, by which scans are ordered; all on one node if the ring does not know."""
    return ring.links.nodes if ring.links else (0,) * ring.world_size


def _plan_of_scan(ring: Runtime, seq: Sequence, reverse: bool) -> Scan:
    return scan_of(seq.layout, seq.bounds, nodes_of(ring), ring.rank, reverse)


@bounded
def _facts(layout: Layout, documents: tuple[int, ...]) -> str:
    """Return what the ranks compare of a sequence."""
    return "\n".join((*facts_of(layout, "layout"), *facts_of(documents, "documents")))


def _on(like: Tensor, rows: Ints) -> Tensor:
    """Return indices on the device of a tensor."""
    return torch.from_numpy(rows).to(like.device)


def _uncast(like: Tensor) -> torch.autocast:
    """Return a context that disables the caller's torch.autocast."""
    return torch.autocast(like.device.type, enabled=False)


def _broadcasts(shape: torch.Size, to: torch.Size) -> bool:
    return len(shape) == len(to) and all(size in (1, full) for size, full in zip(shape, to, strict=True))
