"""Strided ranges, diagonal bands and the tiles they bound.

*Positions* are global token indices, *rows* are indices into a buffer. Everything here is a small immutable tuple of
integers: hashable, comparable, printable.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import gcd, lcm
from typing import NamedTuple

UNBOUNDED = 1 << 60
"""Stands for infinity in a `Band`; far above any token index, and sums of two stay inside int64."""

MOST_TOKENS = 2**50
"""Of a sequence: more than any text has; sums over all pairs of ranks stay inside int64."""


class StridedRange(NamedTuple):
    """The integers start, start + stride, ... (`count` of them, ascending; `stride` >= 1)."""

    start: int
    count: int  # type: ignore[assignment]  # ranges count members, not occurrences
    stride: int = 1

    @property
    def last(self) -> int:
        """The greatest member; only meaningful for a range that is not empty."""
        return self.start + (self.count - 1) * self.stride

    @property
    def stop(self) -> int:
        """One past the greatest member of a range that is not empty; `start` of an empty range."""
        # An empty range has last = start - stride, so last + 1 would be wrong for any stride but 1.
        return self.last + 1 if self.count else self.start

    def members(self) -> range:
        """The members, in order."""
        return range(self.start, self.start + self.count * self.stride, self.stride)

    def pick(self, indices: StridedRange) -> StridedRange:
        """The range of the members at `indices`."""
        return StridedRange(self.start + indices.start * self.stride, indices.count, self.stride * indices.stride)

    def between(self, lo: int, hi: int) -> StridedRange:
        """The *indices* of the members m with lo <= m <= hi."""
        # -((a - b) // s) is (b - a) / s rounded up: the first index with start + index * stride >= lo.
        first = max(0, -((self.start - lo) // self.stride))
        end = min(self.count, (hi - self.start) // self.stride + 1)
        return StridedRange(first, max(0, end - first))

    def intersect(self, other: StridedRange) -> StridedRange:
        """The members of both, again a strided range (Chinese remainder). An empty result is `StridedRange(0, 0)`."""
        # start + i * stride = other.start + j * other.stride has a solution only if gcd divides the starts' difference.
        step = gcd(self.stride, other.stride)
        if not (self.count and other.count) or (other.start - self.start) % step:
            return StridedRange(0, 0)
        stride = lcm(self.stride, other.stride)
        # Divide by the gcd; the strides are then coprime and i = difference * stride^-1 modulo (other.stride / gcd).
        modulus = other.stride // step
        index = (other.start - self.start) // step * pow(self.stride // step, -1, modulus) % modulus
        common = self.start + index * self.stride
        # `common` is a member of both progressions but may lie before other.start; common members repeat every lcm.
        #    0  3  6  9  12  15  18     start 0, stride 3
        #      2   6   10  14   18     start 2, stride 4
        #          6            18     common, stride 12
        floor = max(self.start, other.start)
        start = common + -((common - floor) // stride) * stride
        count = (min(self.last, other.last) - start) // stride + 1
        return StridedRange(start, count, stride) if count > 0 else StridedRange(0, 0)

    def __str__(self) -> str:
        if self.count == 1:
            return f"{self.start}"
        tail = f":{self.stride}" if self.stride != 1 else ""
        return f"{self.start}..{self.last}{tail}" if self.count else "none"


class Band(NamedTuple):
    """The pairs with lo <= q_position - k_position <= hi. Full by default; causal is (0, UNBOUNDED)."""

    lo: int = -UNBOUNDED
    hi: int = UNBOUNDED

    def shifted(self, by: int) -> Band:
        """The band of the same pairs when every q position grows by `by`."""
        # An unbounded side stays the same constant, so that equal bands compare equal.
        lo = self.lo if self.lo == -UNBOUNDED else self.lo + by
        hi = self.hi if self.hi == UNBOUNDED else self.hi + by
        return Band(lo, hi)

    def __str__(self) -> str:
        lo = "-inf" if self.lo <= -UNBOUNDED else str(self.lo)
        hi = "inf" if self.hi >= UNBOUNDED else str(self.hi)
        return f"{lo}..{hi}"


FULL = Band()
CAUSAL = Band(0, UNBOUNDED)


class TokenRange(NamedTuple):
    """Which positions a tile covers on one side, and which rows of the held buffer hold them (equal counts)."""

    positions: StridedRange
    rows: StridedRange

    def pick(self, indices: StridedRange) -> TokenRange:
        """The members at `indices`."""
        return TokenRange(self.positions.pick(indices), self.rows.pick(indices))


class Tile(NamedTuple):
    """A rectangle of work: the pairs of two token ranges inside a band, for a range of query heads.

    `heads` are those of the buffer that holds the queries; its head 0 is query head `first_head` of the call.
    """

    q: TokenRange
    k: TokenRange
    band: Band
    heads: StridedRange
    first_head: int = 0

    def area(self) -> int:
        """Allowed (q, k) pairs times query heads: the unit of every cost and balance figure."""
        return self.heads.count * count_pairs(self.q.positions, self.k.positions, self.band)

    def index_band(self) -> Band:
        """The band in terms of indices: lo <= i - j <= hi for the i-th query and the j-th key.

        Takes a tile as `aligned` makes them: equal position strides, or full. Bounds are clipped to the tile, so they
        are always finite.
        """
        q, k = self.q.positions, self.k.positions
        # Full: all pairs, whatever the strides; the widest band of indices says so.
        if self.is_full():
            return Band(1 - k.count, q.count - 1)
        # q - k = offset + (i - j) * stride; a side with one member has no stride of its own.
        offset, stride = q.start - k.start, k.stride if k.count > 1 else q.stride
        lo = -((offset - self.band.lo) // stride)
        hi = (self.band.hi - offset) // stride
        return Band(max(lo, 1 - k.count), min(hi, q.count - 1))

    def aligned(self) -> Iterator[Tile]:
        """This tile as tiles whose two sides have equal position strides, together the same pairs."""
        q, k = self.q.positions, self.k.positions
        if q.stride == k.stride or q.count == 1 or k.count == 1 or self.is_full():
            yield self
            return
        # Residue classes modulo the lcm: both sides of each pair of classes then have the same stride.
        stride = lcm(q.stride, k.stride)
        for q_part in _residues(self.q, stride):
            for k_part in _residues(self.k, stride):
                tile = self._replace(q=q_part, k=k_part)
                if count_pairs(q_part.positions, k_part.positions, self.band):
                    yield tile

    def is_full(self) -> bool:
        """Whether the band allows every pair of the two token ranges."""
        q, k = self.q.positions, self.k.positions
        # The least and the greatest difference of the two ranges.
        return q.start - k.last >= self.band.lo and q.last - k.start <= self.band.hi


def count_pairs(q: StridedRange, k: StridedRange, band: Band) -> int:
    """The number of pairs of q x k inside `band`, in O(log) steps whatever the strides."""
    if not (q.count and k.count) or band.lo > band.hi:
        return 0
    # [lo, hi] is [lo, infinity) without [hi + 1, infinity).
    return _pairs_at_least(q, k, band.lo) - _pairs_at_least(q, k, band.hi + 1)


def _pairs_at_least(q: StridedRange, k: StridedRange, lo: int) -> int:
    """Pairs with q - k >= lo: for each q the keys up to q - lo, summed in closed form."""
    # Queries before `some` see no key, queries from `all_` on see every key.
    some = min(q.count, max(0, -((q.start - lo - k.start) // q.stride)))
    all_ = min(q.count, max(some, -((q.start - lo - k.last) // q.stride)))
    # Query i between the two sees floor((q_i - lo - k.start) / k.stride) + 1 keys.
    #    keys seen   0 0 0 | 1 2 4 5 | n n n
    #    query       0     some      all_
    between = _floor_sum(all_ - some, k.stride, q.stride, q.start + some * q.stride - lo - k.start) + (all_ - some)
    return between + (q.count - all_) * k.count


def _floor_sum(n: int, m: int, a: int, b: int) -> int:
    """Sum of floor((a * i + b) / m) for i in range(n), by Euclid's algorithm."""
    total = 0
    while n > 0:
        # The whole parts of a / m and b / m sum in closed form.
        total += n * (n - 1) // 2 * (a // m) + n * (b // m)
        a, b = a % m, b % m
        # The rest counts lattice points under a line of slope a / m < 1: exchange the axes and go on with m / a.
        top = a * n + b
        if top < m:
            break
        n, b, m, a = top // m, top % m, a, m
    return total


def _residues(tokens: TokenRange, stride: int) -> Iterator[TokenRange]:
    """The token range cut into ones of the given position stride (a multiple of its own)."""
    step = stride // tokens.positions.stride
    for first in range(min(step, tokens.positions.count)):
        yield tokens.pick(StridedRange(first, (tokens.positions.count - first + step - 1) // step, step))
