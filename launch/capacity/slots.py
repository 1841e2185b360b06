"""How much memory the travelling blocks of one attention call take on the rank that needs most: by the real placement.

Rows travel in slots, and slots grow with the rows of a shard; so a call of many tokens is planned by `planner.choose`
at a few rows a rank, every length cut alike, and its bytes are scaled back.
Guarantees: exact, up to the slots' alignment, where lengths divide; a chain longer than `MOST_RANKS` needs no more.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from ringattn.core.dilation import Dilated
from ringattn.core.layout import make_layout
from ringattn.core.mask import Mask, make_mask
from ringattn.core.problem import ITEM_BYTES, Problem
from ringattn.errors import InputError, one_of
from ringattn.planner.choose import choose_route, plan_of
from ringattn.schedule.routes import route_named

ROWS_PER_RANK = 1024
MOST_RANKS = 16
"""A longer chain is planned as one of so many ranks: its slots do not grow with its length. Where a dilated segment
lies over more, its rows are taken to travel round a ring, whole shards at worst."""

KINDS = ("causal", "full", "window", "dilated")


@dataclass(frozen=True)
class AttentionSetup:
    """Which pairs meet. `window_tokens`: keys before the query, for a causal window; lengths and rates for dilation."""

    kind: str = "causal"
    window_tokens: int = 0
    segment_lengths: tuple[int, ...] = ()
    dilation_rates: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        """Raises `InputError` for an unknown kind, and where its sizes are missing."""
        one_of(self.kind, KINDS, "mask")
        if self.kind == "window" and self.window_tokens < 1:
            raise InputError(f"window_tokens={self.window_tokens}: mask=window needs at least 1")
        if self.kind == "dilated":
            Dilated(self.segment_lengths, self.dilation_rates)

    def pairs(self, length: int) -> float:
        """(query, key) pairs of one head over `length` tokens; dilated: the sum of length * segment / rate ** 2."""
        if self.kind == "full":
            return float(length) ** 2
        if self.kind == "window":
            width = min(self.window_tokens, length - 1)
            return length * (width + 1) - width * (width + 1) / 2
        if self.kind == "causal":
            return length * (length + 1) / 2
        branches = zip(self.segment_lengths, self.dilation_rates, strict=True)
        return sum(length * min(segment, length) / rate**2 / 2 for segment, rate in branches)

    def scaled(self, cut: float, rows: int) -> AttentionSetup:
        """The same with all lengths divided by `cut`, for shards of `rows`; shorter segments become shards."""
        segments = tuple(max(rows, round(length / cut)) for length in self.segment_lengths)
        window = max(1, round(self.window_tokens / cut)) if self.kind == "window" else 0
        return AttentionSetup(self.kind, window, segments, self.dilation_rates)

    def mask(self, length: int, heads: int, kv_heads: int) -> Mask:
        """Over one sequence of `length` tokens."""
        if self.kind == "dilated":
            branches = Dilated(self.segment_lengths, self.dilation_rates, causal=True)
            return branches.mask(length, length, None, None, heads, kv_heads)
        window = (self.window_tokens, 0) if self.kind == "window" else None
        return make_mask(length, length, causal=self.kind != "full", window=window)

    @property
    def layout(self) -> str:
        """The layout that `ring.sequence(layout="auto")` takes."""
        return "zigzag" if self.kind == "causal" else "contiguous"


class StagingBytes(NamedTuple):
    """Bytes of the arena of a forward and of a backward pass, and kept between them for each layer; and the route."""

    forward: float
    backward: float
    kept: float
    route: str

    @property
    def arena(self) -> float:
        """The arena serves both passes and all layers, one after another."""
        return max(self.forward, self.backward)


def staging_bytes(
    attention: AttentionSetup,
    length: int,
    ranks: int,
    batch: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    dtype: str,
    schedule: str = "auto",
) -> StagingBytes:
    """The slots of one call over `length` tokens on the rank that needs most, in bytes."""
    if schedule != "auto":
        route_named(schedule)
    if ranks == 1:
        return StagingBytes(0, 0, 0, "none")
    per_rank = -(-length // ranks)
    if ranks > MOST_RANKS and max(attention.segment_lengths, default=0) > MOST_RANKS * per_rank:
        slots = ring_slots_bytes(per_rank, kv_heads * head_dim, dtype, causal=False)
        return StagingBytes(slots[0] * batch, slots[1] * batch, 0, "ring")
    facts = heads, kv_heads, head_dim, dtype, schedule
    if per_rank <= ROWS_PER_RANK and ranks <= MOST_RANKS:
        planned, grown = _planned(attention, length, ranks, *facts), float(batch)
    else:
        rows, some = min(ROWS_PER_RANK, per_rank), min(ranks, MOST_RANKS)
        cut = per_rank / rows
        planned, grown = _planned(attention.scaled(cut, rows), rows * some, some, *facts), cut * batch
    return StagingBytes(planned.forward * grown, planned.backward * grown, planned.kept * grown, planned.route)


@lru_cache(maxsize=1024)
def _planned(
    attention: AttentionSetup,
    length: int,
    ranks: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    dtype: str,
    schedule: str,
) -> StagingBytes:
    """The greatest arenas of the real plans of all ranks, for a batch of one."""
    layout = make_layout(attention.layout, length, ranks)
    mask = attention.mask(length, heads, kv_heads)
    problem = Problem(layout, layout, mask, 1, heads, kv_heads, head_dim, head_dim, dtype)
    route = choose_route(problem, schedule)
    plans = [[plan_of(problem, route, rank, back) for rank in range(ranks)] for back in (False, True)]
    forward, backward = (max(plan.arena_bytes for plan in both) for both in plans)
    return StagingBytes(forward, backward, max(plan.kept_bytes for plan in plans[0]), route.name)


def ring_slots_bytes(tokens: int, kv_width: int, dtype: str, causal: bool) -> tuple[int, int]:
    """What a ring of at least four ranks takes, in closed form: bytes (forward, backward) for `tokens` rows of a rank.

    M is K and V of a shard. Forward two slots M: one is read or sent while the next arrives. Backward two M and three
    sums (computed, sent, received) in the accumulator's dtype. A causal zigzag sends only what later ranks read, so a
    half of the own shard is packed beside the slots: M / 2 more in both.
    """
    item = ITEM_BYTES[dtype]
    shard, sums = 2 * tokens * kv_width * item, 2 * tokens * kv_width * max(4, item)
    packed = shard // 2 if causal else 0
    return 2 * shard + packed, 2 * shard + packed + 3 * sums
