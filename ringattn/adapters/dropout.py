"""The seed of each attention call with dropout that a host makes, whose signature has a probability and no seed.

A sequence is activated with `dropout_seed`, and its calls draw their own from it by counting, so that all ranks know
them without a word. In backward a checkpointed region has to find the seed that it had. The ranks count alike, but a
second run begins anywhere. What a checkpoint does restore is torch's generator on the CPU, of each rank: a call takes a
number from it, its mark, and by the same mark the second run finds the seed of the first.
Guarantees: no two calls of a ring share a seed, in one step or in several, unless `DRAWN_SEEDS` other ones lie between;
a second run has the seed of the first, or raises.
"""

from __future__ import annotations

import json
import threading
from hashlib import sha256
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from ringattn.errors import InputError
from ringattn.ring import Ring
from ringattn.runtime.activation import activation, unseen

__all__ = ["seed_from"]

DRAWN_SEEDS = KEPT_CALLS = 1 << 16
"""Seeds of a ring of which it is known how often they were drawn from, and its calls whose second run may come."""

ADVICE = (
    "name a seed where the sequence becomes active, the same on all ranks and another one at each step: "
    "`with ring.activate(seq, dropout_seed=step):` (context_parallel and update_ring_flash_attn_params take it too)"
)


def seed_from(*numbers: int) -> int:
    """One seed of several numbers: of an activation's `dropout_seed` and the number of a call in it, from 0.

    Args:
        numbers: The numbers.

    Returns:
        From 0 to 2**64 - 1: the first eight bytes, little endian, of SHA-256 of the numbers in decimal, with spaces
        between.

    Raises:
        Nothing.

    Example:
        second_layers = seed_from(step, 1)
    """
    return int.from_bytes(sha256(" ".join(map(str, numbers)).encode()).digest()[:8], "little")


class _Draws:
    """Of one ring: how many calls each seed has had, and by their marks the seeds of calls."""

    def __init__(self) -> None:
        self.counts: dict[int, int] = {}
        self.kept: dict[int, int | None] = {}

    def fresh(self, dropout_seed: int, mark: int) -> int:
        count = self.counts.pop(dropout_seed, 0)
        self.counts[dropout_seed] = count + 1  # the last one now
        seed = seed_from(dropout_seed, count)
        # Somebody has set the generator back: the second run of either call would have this mark.
        self.kept[mark] = None if mark in self.kept else seed
        for known, most in ((self.counts, DRAWN_SEEDS), (self.kept, KEPT_CALLS)):
            if len(known) > most:
                del known[next(iter(known))]
        return seed


_draws: WeakKeyDictionary[Ring, _Draws] = WeakKeyDictionary()
_told: WeakKeyDictionary[Ring, int] = WeakKeyDictionary()
_lock = threading.Lock()


def refuse_without_seed(what: str, instead: str) -> None:
    """Raise `InputError` for dropout in a forward pass over a sequence that was activated without a seed.

    `what`: the dropout. `instead`: how to do without it.
    """
    active = activation()
    if not _is_in_backward() and (active is None or active.dropout_seed is None):
        raise InputError(f"{what}, and the active sequence has no dropout_seed: {ADVICE}; or {instead}")


def drawn_seed(ring: Ring) -> int:
    """The seed of the next call with dropout over the active sequence, or in backward that of the call's first run.

    Raises `InputError` where it cannot be told.
    """
    if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():
        raise InputError("dropout in a CUDA graph would drop the same at each replay; capture the model without it")
    with unseen():
        mark = int(torch.empty((), dtype=torch.int64, device="cpu").random_())
    active = activation()
    with _lock:
        draws = _draws.setdefault(ring, _Draws())
        if not _is_in_backward():
            if active is None or active.dropout_seed is None:
                raise InputError(f"attention with dropout, and the active sequence has no dropout_seed: {ADVICE}")
            return draws.fresh(active.dropout_seed, mark)
        seed = draws.kept.get(mark)
        is_known = mark in draws.kept
    if seed is None:
        found = (
            "torch's generator on the CPU was in the same state at two calls; leave out the manual_seed between them"
            if is_known else
            "torch's generator on the CPU is not as it was at any call; checkpoint with preserve_rng_state=True, "
            "which is torch's default"
        )  # fmt: skip
        raise InputError(
            f"backward computes attention with dropout again, and what its first run dropped is not known: {found}"
        )
    return seed


def told_seed(ring: Ring) -> int:
    """A seed for activations of `ring` whose host knows none: of its first rank's generator on the CPU, and that rank.

    A collective call at its first use, on the host. It follows from the seed of a run, and is another one where a run
    is resumed with the generator as it was. Nothing is drawn.
    """
    if ring not in _told:
        process = dist.get_rank() if dist.is_initialized() else 0
        with unseen():
            state = sha256(torch.get_rng_state().numpy().tobytes()).hexdigest()
        first = ring.all_gather_text(json.dumps([int(state, 16), process]))[0]
        _told[ring] = seed_from(*json.loads(first))
    return _told[ring]


def _is_in_backward() -> bool:
    return torch._C._current_graph_task_id() != -1
