"""Scenarios of the engine contract: attend calls with tiles over small buffers, hand-made and random."""

from __future__ import annotations

from random import Random
from typing import NamedTuple

from ringattn.core.geometry import CAUSAL, FULL, Band, StridedRange, Tile, TokenRange


class Step(NamedTuple):
    """One attend call: its tiles, and the number of rows and the K/V heads (`held`) of its K/V buffer."""

    tiles: tuple[Tile, ...]
    k_rows: int
    held: StridedRange


class Scenario(NamedTuple):
    """Several attend calls that update one softmax state.

    Head 0 of the q buffer is query head `first_head` of the whole attention call; ALiBi and dropout depend on this
    number. `memory`: the memory layout of the buffers, see `laid_out`. `starts`: see `Softmax`.
    """

    steps: tuple[Step, ...]
    q_rows: int
    kv_heads: int
    group: int = 1
    d_k: int = 16
    d_v: int = 16
    batch: int = 1
    softcap: float | None = None
    memory: str = "tokens"
    alibi: bool = False
    first_head: int = 0
    starts: tuple[tuple[int, int], ...] = ()
    dropout_p: float | None = None

    @property
    def heads(self) -> int:
        return self.kv_heads * self.group


def strip(start: int, count: int, stride: int = 1, row: int = 0, row_stride: int = 1) -> TokenRange:
    return TokenRange(StridedRange(start, count, stride), StridedRange(row, count, row_stride))


def simple(
    tiles: tuple[tuple[TokenRange, TokenRange, Band], ...],
    heads: StridedRange,
    kv_heads: int,
    held: StridedRange | None = None,
    **facts: object,
) -> Scenario:
    """Return a scenario with one step per tile. The buffers end two rows after the rows of the tiles."""
    first = facts.get("first_head", 0)
    steps = tuple(
        Step((Tile(q, k, band, heads, first),), k.rows.stop + 2, held or StridedRange(0, kv_heads))  # type: ignore[arg-type]
        for q, k, band in tiles
    )
    return Scenario(steps, max(q.rows.stop for q, _, _ in tiles) + 2, kv_heads, **facts)  # type: ignore[arg-type]


ZIGZAG = ((strip(0, 24), strip(0, 24), CAUSAL), (strip(72, 24, row=24), strip(0, 48), CAUSAL))
WINDOW = ((strip(40, 50), strip(40, 50), Band(0, 11)), (strip(40, 50), strip(20, 20), Band(0, 11)))
STRIPED = ((strip(1, 30, 4), strip(1, 30, 4), CAUSAL), (strip(1, 30, 4), strip(2, 30, 4), CAUSAL))
DILATED = ((strip(3, 20, 6), strip(1, 33, 4), Band(-9, 50)), (strip(0, 30, 2, 1, 2), strip(0, 20, 3, 0, 2), CAUSAL))
BOTH_SIDES = ((strip(0, 60), strip(0, 60), Band(-7, 9)), (strip(60, 30), strip(0, 70), Band(-3, 1 << 60)))
BLIND = ((strip(0, 20), strip(12, 20), CAUSAL), (strip(0, 20), strip(100, 20), CAUSAL))
DOCUMENTS = ((strip(3, 17), strip(0, 30), FULL), (strip(20, 25, row=17), strip(31, 19), Band(-40, 9)))
DENSE = ((strip(0, 96), strip(0, 96), CAUSAL),)


def whole(
    steps: tuple[tuple[tuple[TokenRange, TokenRange, Band], ...], ...],
    q_rows: int,
    heads: int,
    group: int,
    **facts: object,
) -> Scenario:
    """Return a scenario whose steps together have every query row of every head, as in a rank's own pass."""
    steps = tuple(
        Step(
            tuple(Tile(*tile, StridedRange(0, heads)) for tile in tiles),
            max(k.rows.stop for _, k, _ in tiles) + 2,
            StridedRange(0, heads // group),
        )
        for tiles in steps
    )
    return Scenario(steps, q_rows, heads // group, group, **facts)  # type: ignore[arg-type]


def last_heads(kv_heads: int, count: int, group: int) -> Scenario:
    """Return a scenario with one step, in which two tiles of the last `count` K/V heads have the same keys.

    The K/V buffer contains all heads.
    """
    heads = StridedRange((kv_heads - count) * group, count * group)
    tiles = tuple(Tile(strip(60, 30, row=row), strip(0, 70), CAUSAL, heads) for row in (0, 30))
    return Scenario((Step(tiles, 72, StridedRange(0, kv_heads)),), 62, kv_heads, group, batch=2)


LOW, HIGH = strip(0, 32), strip(96, 32, row=32)
ZIGZAG_PASS = (
    ((LOW, strip(0, 32), CAUSAL), (HIGH, strip(0, 32), CAUSAL), (HIGH, strip(96, 32, row=32), CAUSAL)),
    ((HIGH, strip(32, 32), CAUSAL), (HIGH, strip(64, 32, row=32), CAUSAL)),
)
RING_PASS = tuple(((strip(60, 30), strip(start, 30), CAUSAL),) for start in (60, 30, 0))

SCENARIOS = {
    "full": simple(((strip(0, 33), strip(50, 45), FULL),), StridedRange(0, 2), 2, batch=2),
    "causal": simple(DENSE, StridedRange(0, 2), 2, batch=2, memory="heads"),
    "causal-long": simple(((strip(0, 260), strip(0, 260), CAUSAL),), StridedRange(0, 1), 1, d_k=32, d_v=32),
    "causal-more-queries": simple(((strip(0, 50), strip(0, 20), CAUSAL),), StridedRange(0, 2), 1, group=2),
    "causal-more-keys": simple(((strip(30, 20), strip(0, 50), CAUSAL),), StridedRange(0, 2), 1, group=2),
    "zigzag": simple(ZIGZAG, StridedRange(0, 4), 2, group=2, memory="records"),
    "window": simple(WINDOW, StridedRange(0, 4), 2, group=2, batch=2),
    "striped": simple(STRIPED, StridedRange(0, 2), 2, memory="records"),
    "dilated": simple(DILATED, StridedRange(0, 2), 1, group=2, batch=2, memory="heads"),
    "both-sides": simple(BOTH_SIDES, StridedRange(0, 2), 2),
    "blind": simple(BLIND, StridedRange(0, 2), 2, batch=2),
    "mqa": simple(ZIGZAG, StridedRange(0, 5), 1, group=5, batch=2),
    "part-of-the-heads": simple(ZIGZAG, StridedRange(5, 9), 4, StridedRange(1, 3), group=4, batch=2),
    "last-head": last_heads(3, 1, 2),
    "last-heads": last_heads(4, 2, 3),
    "one-head-of-a-group": simple(WINDOW, StridedRange(6, 1), 3, StridedRange(1, 1), group=4),
    "every-other-head": simple(ZIGZAG, StridedRange(1, 6, 2), 3, group=4),
    "wider-keys": simple(WINDOW, StridedRange(0, 4), 2, group=2, d_k=24, d_v=8, batch=2),
    "wider-values": simple(ZIGZAG, StridedRange(0, 4), 2, group=2, d_k=8, d_v=20, memory="records"),
    "one-pair": simple(((strip(5, 1), strip(5, 1), CAUSAL),), StridedRange(0, 1), 1),
    "whole-pass": whole(RING_PASS, 30, 4, 2, batch=2, memory="records"),
    "whole-zigzag-pass": whole(ZIGZAG_PASS, 64, 3, 3, batch=2, d_v=20),
    "whole-call": whole((((strip(0, 40), strip(0, 40), CAUSAL),),), 40, 2, 1, softcap=1.5),
    "alibi": simple(DILATED, StridedRange(0, 4), 2, group=2, batch=2, softcap=1.5, alibi=True),
    "alibi-documents": simple(
        DOCUMENTS, StridedRange(1, 3), 2, group=2, batch=2, alibi=True, first_head=2, starts=((0, 0), (20, 31))
    ),
    "dropout": simple(WINDOW, StridedRange(0, 2), 1, group=2, batch=2, first_head=3, dropout_p=0.3),
    "dropout-apart": simple(
        DILATED, StridedRange(1, 2), 2, group=2, batch=2, softcap=1.5, alibi=True, first_head=1, dropout_p=0.5
    ),
    "softcap": simple(WINDOW, StridedRange(0, 4), 2, group=2, softcap=1.5, batch=2),
}


def random_scenario(seed: int, places: bool = False) -> Scenario:
    """Return a scenario with steps of overlapping tiles that have random token ranges, bands and heads.

    A pair of query and key that is in two tiles counts twice. `places`: half of the scenarios also have ALiBi slopes,
    and half of these dropout too. Their first head need not be head 0 of the call, and their keys may start at another
    position than their queries.
    """
    rng = Random(seed)
    group, kv_heads, q_rows = rng.choice((1, 2, 3)), rng.randint(1, 3), rng.randint(1, 70)
    steps = []
    for _ in range(rng.randint(1, 3)):
        k_rows, first = rng.randint(1, 70), rng.randrange(kv_heads)
        held = StridedRange(first, rng.randint(1, kv_heads - first))
        tiles = tuple(_random_tile(rng, q_rows, k_rows, held, group) for _ in range(rng.randint(1, 3)))
        steps.append(Step(tiles, k_rows, held))
    dims = (rng.choice((8, 16, 17)), rng.choice((8, 16)))
    memory = rng.choice(("tokens", "heads", "records"))
    drawn = Scenario(tuple(steps), q_rows, kv_heads, group, *dims, rng.randint(1, 2), None, memory)
    rng = Random(f"alibi {seed}")
    if not places or rng.random() < 0.5:
        return drawn
    first, starts = rng.randint(0, 3), rng.choice(((), ((0, rng.randint(0, 60)),)))
    steps = [step._replace(tiles=tuple(tile._replace(first_head=first) for tile in step.tiles)) for step in drawn.steps]
    return drawn._replace(
        steps=tuple(steps), alibi=True, first_head=first, starts=starts, softcap=rng.choice((None, 2.0)),
        dropout_p=rng.choice((None, 0.4)),
    )  # fmt: skip


def _random_tile(rng: Random, q_rows: int, k_rows: int, held: StridedRange, group: int) -> Tile:
    lo = rng.choice((FULL.lo, 0, rng.randint(-60, 60)))
    band = Band(lo, rng.choice((FULL.hi, max(lo, -60) + rng.randint(0, 60))))
    first = held.start * group + rng.randrange(group * held.count)
    heads = StridedRange(first, rng.randint(1, (held.start + held.count) * group - first))
    return Tile(_random_strip(rng, q_rows), _random_strip(rng, k_rows), band, heads)


def _random_strip(rng: Random, buffer_rows: int) -> TokenRange:
    stride = rng.choice((1, 1, 2, 3))
    start = rng.randrange(buffer_rows)
    count = rng.randint(1, (buffer_rows - start + stride - 1) // stride)
    return strip(rng.randint(0, 80), count, rng.choice((1, 1, 2, 3)), start, stride)
