"""Which sequence an adapter's call attends over, also in the calls that backward makes to compute activations again.

In a forward pass it is the one of the innermost `Ring.activate`. Without one the call attends locally, but only while
no ring of several ranks is open: a sharded model must never attend to its own shard by accident.
A checkpointed region runs a second time inside backward, by then outside of the `with`, on a GPU in another thread. So
each forward call is noted, by the module that made it and with the life of its graph, and the second run takes what the
first had. A call without a graph (of a reentrant checkpoint, of compiled code, of queries that need no gradient) has no
end that could be seen: its note stays. Where the notes leave a choice, on one rank or on all, the ranks of the ring
raise, and `recompute_context` decides.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar
from weakref import WeakKeyDictionary, ref

import torch
from torch import Tensor, nn

from ringattn.adapters.alike import refused_by_all
from ringattn.core.layout import Layout
from ringattn.errors import InputError
from ringattn.ring import Ring
from ringattn.runtime.activation import Activation, activate, activation
from ringattn.runtime.runtime import shared_ring_is_open
from ringattn.sequence import Sequence

__all__ = ["attends_locally", "recompute_context", "sequence_of"]

_recomputed: ContextVar[Activation | None] = ContextVar("ringattn_recomputed", default=None)
_towers: ContextVar[tuple[tuple[nn.Module, AbstractContextManager[None]], ...]] = ContextVar(
    "ringattn_towers", default=()
)
_lock = threading.Lock()
_KEY = "ringattn"
_LOCAL = "ringattn_local"
_Module = TypeVar("_Module", bound=nn.Module)


class _Life:
    """Held by a node of a forward pass's graph, so that it ends with the graph; keeps the sequence as long."""

    def __init__(self) -> None:
        self.sequences: set[Sequence | None] = set()


_Value = tuple[ref[Ring], Layout, tuple[int, ...] | None] | None
"""What makes two sequences the same; None: local."""


@dataclass(frozen=True)
class _Note:
    """A forward call: over which sequence, of how many tokens, in which thread, with a graph or not, and its life."""

    value: _Value
    tokens: int
    thread: ref[threading.Thread]
    graph: bool
    life: ref[_Life] | None
    seq: ref[Sequence] | None = field(compare=False)

    @property
    def is_alive(self) -> bool:
        ring = None if self.value is None else self.value[0]()
        can_attend = self.value is None or (ring is not None and ring.is_open)
        return can_attend and (self.life is None or self.life() is not None)

    def may_be(self, other: _Note) -> bool:
        """Whether the two differ in their sequence only, and have no life that would tell them apart."""
        mine, theirs = (replace(one, value=None) for one in (self, other))
        return self.life is None and mine == theirs


class _Anyone:
    """Who calls through a function that belongs to no module."""


ANYONE = _Anyone()
COMPILED = _Anyone()
"""Who calls from compiled code, where it cannot be told whether a call belongs to a graph."""
_notes: WeakKeyDictionary[Any, list[_Note]] = WeakKeyDictionary()


@torch.compiler.disable
def sequence_of(query: Tensor, dim: int, owner: object = ANYONE) -> Sequence | None:
    """The sequence whose shard `query` is; None: attend locally.

    It is the one of the innermost `Ring.activate`. In backward it is that of the forward pass which is computed again.
    Whether these are as many tokens as this rank owns is checked by `Ring.attention`, which tells the other ranks.

    Args:
        query: Queries of this rank, of any shape.
        dim: The dimension of the tokens.
        owner: The module that attends, or whatever tells its calls from those of others and can be referred to weakly.

    Returns:
        The sequence, or None.

    Raises:
        InputError: Nothing is active and a ring of several ranks is open; or, in backward, it cannot be told which
            forward pass is computed again. The other ranks raise for the latter too, unless several rings may be meant.

    Example:
        out = attend(sequence_of(q, dim=1, owner=self), q, k, v, causal=True)
    """
    tokens = query.shape[dim]
    if torch._C._current_graph_task_id() != -1:  # inside backward
        again = _recomputed.get()
        return again.seq if again is not None else _noted(tokens, owner)
    active = activation()
    if active is None and shared_ring_is_open():
        raise InputError(
            "a ring of several ranks is open and no sequence is active, so this model may hold shards: call it inside "
            "`with ring.activate(seq):`, or inside `with ring.activate(None):` for local attention"
        )
    seq = None if active is None else active.seq
    _note(query, seq, tokens, owner)
    return seq


def recompute_context() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """The `context_fn` of a checkpoint whose region attends over a sequence.

    The region's second run attends over what is active at its first, whatever else is under way.

    Returns:
        The context managers of the first and of the second run.

    Example:
        with ring.activate(seq):
            out = checkpoint(layer, x, use_reentrant=False, context_fn=recompute_context)
    """
    return nullcontext(), _recompute_over(activation() or Activation(None))


def attends_locally(module: _Module) -> _Module:
    """Every call of `module` is made inside `Ring.activate(None)` from now on. Idempotent.

    For a tower, whose input every rank has whole; copies of the module keep it.

    Args:
        module: The module. It is changed in place.

    Returns:
        The module.

    Raises:
        Nothing.

    Example:
        model.vision = attends_locally(model.vision)
    """
    if not getattr(module, _LOCAL, False):
        setattr(module, _LOCAL, True)
        module.register_forward_pre_hook(_enter_tower)
        module.register_forward_hook(_leave_tower, always_call=True)
    return module


@torch.compiler.disable
def _enter_tower(module: nn.Module, args: object) -> None:
    local = activate(None)
    local.__enter__()
    _towers.set((*_towers.get(), (module, local)))


@torch.compiler.disable
def _leave_tower(module: nn.Module, args: object, out: object) -> None:
    *outer, (entered, local) = _towers.get() or ((None, nullcontext()),)
    if entered is module:
        _towers.set(tuple(outer))
        local.__exit__(None, None, None)


@contextmanager
def _recompute_over(active: Activation) -> Iterator[None]:
    token = _recomputed.set(active)
    try:
        yield
    finally:
        _recomputed.reset(token)


def _note(query: Tensor, seq: Sequence | None, tokens: int, owner: object) -> None:
    life = None
    if query.grad_fn is not None:
        metadata: dict[str, Any] = query.grad_fn.metadata  # type: ignore[assignment]  # a property, whatever torch says
        kept = metadata.setdefault(_KEY, _Life())
        kept.sequences.add(seq)
        life = ref(kept)
    graph = owner is COMPILED or torch.is_grad_enabled()
    value = None if seq is None else (ref(seq.ring), seq.layout, seq.documents)
    note = _Note(value, tokens, ref(threading.current_thread()), graph, life, None if seq is None else ref(seq))
    with _lock:
        others = [one for one in _notes.get(owner, ()) if one.is_alive and one != note]
        if sum(note.may_be(one) for one in others) < 2:  # two leave a choice already, and there may be no end to them
            others.append(note)
        _notes[owner] = others


def _noted(tokens: int, owner: object) -> Sequence | None:
    """The sequence of the only forward pass of `owner` that can be meant."""
    node = torch._C._current_autograd_node()
    # A reentrant checkpoint's first run makes no graph, that of any other region does.
    graph = owner is COMPILED or node is None or "Checkpoint" not in node.name()
    with _lock:
        notes = [note for note in _notes.get(owner, ()) if note.is_alive]
    # Ranks that are threads share modules, and functions; a thread of autograd's has no notes of its own. Threads are
    # compared, not their numbers: a new one may have that of one that has ended.
    here = [note for note in notes if note.thread() is threading.current_thread()] or notes
    fits = {note.value: note for note in here if (note.tokens, note.graph) == (tokens, graph)}
    if len(fits) == 1:
        (note,) = fits.values()
        seq = None if note.seq is None else note.seq()
        if note.value is None or seq is not None:
            return seq
    found = "the sequence that fits it is gone" if len(fits) == 1 else f"{len(fits)} sequences are known to fit it"
    # Other ranks may own other numbers of tokens of the same sequences, and go on.
    rings = {ring for note in fits.values() or here if note.value is not None and (ring := note.value[0]()) is not None}
    with refused_by_all(rings.pop() if len(rings) == 1 else None):
        raise InputError(
            f"backward computes a region of {tokens} local tokens again and {found}; keep sequences until their "
            "backward pass, and where a module attends over several checkpoint with use_reentrant=False and "
            "context_fn=ringattn.adapters.context.recompute_context, or in compiled code give ring_attention its "
            "sequence"
        )
