"""Which sequence an adapter's call attends over, also in the calls that backward makes to compute activations again.

In a forward pass it is the one of the innermost `Ring.activate`. Without one the call attends locally, but only while
no ring of several ranks is open: a sharded model must never attend to its own shard by accident.
A checkpointed region runs a second time inside backward, by then outside of the `with`, on a GPU in another thread. So
each forward call is noted, by the module that made it and with the life of its graph, and the second run takes what the
first had. Where the notes leave a choice it raises, and `recompute_context` decides.
Does not know: attention, hosts.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary, ref

import torch
from torch import Tensor

from ringattn.activation import Activation, activation
from ringattn.errors import InputError
from ringattn.ring import shared_ring_is_open
from ringattn.sequence import Sequence

_recomputed: ContextVar[Activation | None] = ContextVar("ringattn_recomputed", default=None)
_lock = threading.Lock()
_KEY = "ringattn"


class _Life:
    """Held by a node of a forward pass's graph, so that it ends with the graph; keeps the sequence as long."""

    def __init__(self) -> None:
        self.sequences: set[Sequence | None] = set()


@dataclass(frozen=True)
class _Note:
    """A forward call: over which sequence (None: local), of how many tokens, whether a graph was made, its life."""

    seq: ref[Sequence] | None
    tokens: int
    graph: bool
    life: ref[_Life] | None

    @property
    def is_alive(self) -> bool:
        return (self.seq is None or self.seq() is not None) and (self.life is None or self.life() is not None)


class _Anyone:
    """Who calls through a function that belongs to no module."""


ANYONE = _Anyone()
COMPILED = _Anyone()
"""Who calls from compiled code, where it cannot be told whether a call belongs to a graph."""
_notes: WeakKeyDictionary[Any, list[_Note]] = WeakKeyDictionary()


def sequence_of(query: Tensor, dim: int, owner: object = ANYONE) -> Sequence | None:
    """The sequence whose shard `query` is, along dimension `dim`; None: attend locally.

    `owner`: the module that attends, or whatever tells its calls from those of others and can be referred to weakly.
    Raises `InputError` where nothing is active and a ring of several ranks is open, where `query` has not as many
    tokens as this rank has of the active sequence, and in backward where it cannot be told which forward pass is
    computed again.
    """
    tokens = query.shape[dim]
    if torch._C._current_graph_task_id() != -1:  # inside backward
        again = _recomputed.get()
        return again[0] if again is not None else _noted(tokens, owner)
    active = activation()
    if active is None and shared_ring_is_open():
        raise InputError(
            "a ring of several ranks is open and no sequence is active, so this model may hold shards: call it inside "
            "`with ring.activate(seq):`, or inside `with ring.activate(None):` for local attention"
        )
    seq = None if active is None else active[0]
    if seq is not None and tokens != seq.counts[seq.ring.rank]:
        raise InputError(
            f"rank {seq.ring.rank}: {tokens} tokens came in, this rank owns {seq.counts[seq.ring.rank]} of the active "
            f"{seq!r}; shard inputs with seq.shard"
        )
    _note(query, seq, tokens, owner)
    return seq


def recompute_context() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """For `torch.utils.checkpoint.checkpoint(..., use_reentrant=False, context_fn=recompute_context)`.

    The region's second run attends over what is active at its first, whatever else is under way.
    """
    return nullcontext(), _recompute_over(activation() or (None,))


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
    note = _Note(None if seq is None else ref(seq), tokens, owner is COMPILED or torch.is_grad_enabled(), life)
    with _lock:
        others = [one for one in _notes.get(owner, ()) if one.is_alive and one != note]
        _notes[owner] = [*others, note]


def _noted(tokens: int, owner: object) -> Sequence | None:
    """The sequence of the only forward pass of `owner` that can be meant."""
    node = torch._C._current_autograd_node()
    # A reentrant checkpoint's first run makes no graph, that of any other region does.
    graph = owner is COMPILED or node is None or "Checkpoint" not in node.name()
    with _lock:
        notes = [note for note in _notes.get(owner, ()) if note.is_alive]
    fits = [note for note in notes if (note.tokens, note.graph) == (tokens, graph)]
    fitting = {None if note.seq is None else note.seq() for note in fits}
    if len(fitting) != 1:
        found = f"{len(fitting)} sequences are" if fitting else "none is"
        raise InputError(
            f"backward computes a region of {tokens} local tokens again and {found} known to fit it; keep sequences "
            "until their backward pass, and where several are under way checkpoint with use_reentrant=False and "
            "context_fn=ringattn.adapters.context.recompute_context, or in compiled code give ring_attention its "
            "sequence"
        )
    return fitting.pop()
