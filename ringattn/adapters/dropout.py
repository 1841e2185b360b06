"""Dropout seeds for attention calls of hosts whose signature has a probability but no seed.

A sequence is activated with `dropout_seed`. The n-th call with dropout derives its seed from that seed and n, so all
ranks have the same seed without communication. Recomputation in backward has to use the seed of the forward call, but
regions are recomputed in any order, so counting does not identify the call. A checkpoint does restore torch's CPU
generator on each rank. Each call therefore draws a number from that generator, its mark. The recomputation draws the
same mark and looks up the seed.

Guarantees: no two calls of a ring share a seed, in one step or in several, unless `DRAWN_SEEDS` other activation seeds
were used in between. A recomputation has the seed of its forward call, or raises.
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
"""Limits per ring: activation seeds whose call counts are kept, and calls whose recomputation may still follow."""

ADVICE = (
    "pass a seed where the sequence is activated, the same on all ranks and a different one at each step: "
    "`with ring.activate(seq, dropout_seed=step):` (context_parallel and update_ring_flash_attn_params take it too)"
)


def seed_from(*numbers: int) -> int:
    """Derive one seed from several numbers, such as an activation's `dropout_seed` and the index of a call in it.

    Args:
        numbers: The numbers.

    Returns:
        A number from 0 to 2**64 - 1: the first eight bytes, little endian, of the SHA-256 of the numbers in decimal,
        separated by spaces.

    Raises:
        Nothing.

    Example:
        second_layers = seed_from(step, 1)
    """
    return int.from_bytes(sha256(" ".join(map(str, numbers)).encode()).digest()[:8], "little")


class _Draws:
    """The seeds drawn for one ring: the number of calls per activation seed, and the seed of each call by its mark."""

    def __init__(self) -> None:
        self.counts: dict[int, int] = {}
        self.seeds_by_mark: dict[int, int | None] = {}
        """None marks an ambiguous entry: two calls drew the same mark."""

    def draw(self, dropout_seed: int, mark: int) -> int:
        """Return the seed of the next call in activations with this `dropout_seed`, and record it under `mark`."""
        # The count continues if the same seed is activated again, so a user who passes one seed gets no repeated mask.
        count = self.counts.pop(dropout_seed, 0)
        self.counts[dropout_seed] = count + 1  # reinserted at the end, so the oldest entry is evicted first
        seed = seed_from(dropout_seed, count)
        # A repeated mark means that the user reset the generator. Recomputations of both calls would draw this mark.
        self.seeds_by_mark[mark] = None if mark in self.seeds_by_mark else seed
        for table, limit in ((self.counts, DRAWN_SEEDS), (self.seeds_by_mark, KEPT_CALLS)):
            if len(table) > limit:
                del table[next(iter(table))]
        return seed


_draws: WeakKeyDictionary[Ring, _Draws] = WeakKeyDictionary()
_default_seeds: WeakKeyDictionary[Ring, int] = WeakKeyDictionary()
_lock = threading.Lock()


def refuse_without_seed(what: str, instead: str) -> None:
    """Raise `InputError` for dropout in a forward pass over a sequence that was activated without a seed.

    `what`: describes the dropout. `instead`: says how to disable it.
    """
    active = activation()
    if not _is_in_backward() and (active is None or active.dropout_seed is None):
        raise InputError(f"{what}, and the active sequence has no dropout_seed: {ADVICE}; or {instead}")


def drawn_seed(ring: Ring) -> int:
    """Return the seed of the next call with dropout over the active sequence. A recomputation gets its forward's seed.

    Raises `InputError` if there is no activation seed, or if the seed of the forward call cannot be determined.
    """
    if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():
        raise InputError("dropout in a CUDA graph would drop the same weights at each replay; capture without dropout")
    # The mark comes from the CPU generator even for CUDA models. This needs no device synchronisation, and a checkpoint
    # restores the CPU generator by default.
    with unseen():
        mark = int(torch.empty((), dtype=torch.int64, device="cpu").random_())
    active = activation()
    # Backward runs in autograd's threads, so the tables are shared between threads.
    with _lock:
        draws = _draws.setdefault(ring, _Draws())
        if not _is_in_backward():
            if active is None or active.dropout_seed is None:
                raise InputError(f"attention with dropout, and the active sequence has no dropout_seed: {ADVICE}")
            return draws.draw(active.dropout_seed, mark)
        seed = draws.seeds_by_mark.get(mark)
        is_recorded = mark in draws.seeds_by_mark
    if seed is None:
        reason = (
            "torch's CPU generator was in the same state at two calls; remove the manual_seed between them"
            if is_recorded else
            "torch's CPU generator is in a state that it had at no call; checkpoint with preserve_rng_state=True, "
            "which is torch's default"
        )  # fmt: skip
        raise InputError(
            f"backward recomputes attention with dropout, and the seed of its forward pass is not known: {reason}"
        )
    return seed


def default_seed(ring: Ring) -> int:
    """Return a seed for activations of `ring` whose host passes none. Always the same for one ring.

    The seed is derived from the state of the first rank's CPU generator and that rank's number. So it follows from the
    seed of the run, and differs if a run resumes with a restored generator. Nothing is drawn from the generator. A
    collective call at its first use, on the host.
    """
    if ring not in _default_seeds:
        process = dist.get_rank() if dist.is_initialized() else 0
        with unseen():
            state = sha256(torch.get_rng_state().numpy().tobytes()).hexdigest()
        first = ring.all_gather_text(json.dumps([int(state, 16), process]))[0]
        _default_seeds[ring] = seed_from(*json.loads(first))
    return _default_seeds[ring]


def _is_in_backward() -> bool:
    # Recomputation runs inside an autograd graph task; a plain forward pass does not.
    return torch._C._current_graph_task_id() != -1
