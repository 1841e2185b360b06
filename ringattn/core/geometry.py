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
"""Most tokens of a sequence: more than any text has, and sums over all pairs of ranks stay inside int64."""


class StridedRange(NamedTuple):
    """The integers start, start + stride, ... (`count` of them, ascending; `stride` >= 1)."""

    start: int
    count: int  # type: ignore[assignment]  # ranges count members, not occurrences
    stride: int = 1

    @property
    def last(self) -> int:
        """The largest member; only meaningful for a range that is not empty."""
        return self.start + (self.count - 1) * self.stride

    @property
    def stop(self) -> int:
        """One past the largest member of a range that is not empty; `start` of an empty range."""
        # An empty range has last = start - stride, so last + 1 would be wrong for any stride except 1.
        return self.last + 1 if self.count else self.start

    def members(self) -> range:
        """Return the members, in order."""
        return range(self.start, self.start + self.count * self.stride, self.stride)

    def pick(self, indices: StridedRange) -> StridedRange:
        """Return the range of the members at `indices`."""
        return StridedRange(self.start + indices.start * self.stride, indices.count, self.stride * indices.stride)

    def between(self, lo: int, hi: int) -> StridedRange:
        """Return the *indices* of the members m with lo <= m <= hi."""
        # -((a - b) // s) is (b - a) / s rounded up: the first index with start + index * stride >= lo.
        first = max(0, -((self.start - lo) // self.stride))
        end = min(self.count, (hi - self.start) // self.stride + 1)
        return StridedRange(first, max(0, end - first))

    def intersect(self, other: StridedRange) -> StridedRange:
        """Return the common members as a strided range (Chinese remainder); `StridedRange(0, 0)` if there are none."""
        # start + i * stride = other.start + j * other.stride has a solution only if gcd divides the starts' difference.
        step = gcd(self.stride, other.stride)
        if not (self.count and other.count) or (other.start - self.start) % step:
            return StridedRange(0, 0)
        stride = lcm(self.stride, other.stride)
        # Divide by the gcd; the strides are then coprime and i = difference * stride^-1 modulo (other.stride / gcd).
        modulus = other.stride // step
        index = (other.start - self.start) // step * pow(self.stride // step, -1, modulus) % modulus
        common = self.start + index * self.stride
        # `common` is a member of both progressions but may be before other.start; common members repeat every lcm.
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
        """Return the band of the same pairs after every q position has grown by `by`."""
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
    """The queries or the keys of a tile: their positions, and the buffer rows that hold them (equal counts)."""

    positions: StridedRange
    rows: StridedRange

    def pick(self, indices: StridedRange) -> TokenRange:
        """Return the members at `indices`."""
        return TokenRange(self.positions.pick(indices), self.rows.pick(indices))


class Tile(NamedTuple):
    """A rectangle of work: the pairs of two token ranges inside a band, for a range of query heads.

    `heads` are heads of the buffer that holds the queries; its head 0 is query head `first_head` of the call.
    """

    q: TokenRange
    k: TokenRange
    band: Band
    heads: StridedRange
    first_head: int = 0

    def area(self) -> int:
        """Return the allowed (q, k) pairs times query heads: the unit of all costs and balances."""
        return self.heads.count * count_pairs(self.q.positions, self.k.positions, self.band)

    def index_band(self) -> Band:
        """Return the band in terms of indices: lo <= i - j <= hi for the i-th query and the j-th key.

        The tile must be aligned (equal position strides, or full; see `aligned`). Bounds are clipped to the tile, so
        they are always finite.
        """
        q, k = self.q.positions, self.k.positions
        # A full tile has all pairs, whatever its strides: return the widest band of indices.
        if self.is_full():
            return Band(1 - k.count, q.count - 1)
        # q - k = offset + (i - j) * stride; a side with a single member has no stride.
        offset, stride = q.start - k.start, k.stride if k.count > 1 else q.stride
        lo = -((offset - self.band.lo) // stride)
        hi = (self.band.hi - offset) // stride
        return Band(max(lo, 1 - k.count), min(hi, q.count - 1))

    def aligned(self) -> Iterator[Tile]:
        """Yield tiles that together have the same pairs as this tile.

        Each has equal position strides on both sides, unless it is full or one side has a single member.
        """
        q, k = self.q.positions, self.k.positions
        if q.stride == k.stride or q.count == 1 or k.count == 1 or self.is_full():
            yield self
            return
        # Cut into residue classes modulo the lcm, so that both sides of each pair of classes have the same stride.
        stride = lcm(q.stride, k.stride)
        for q_part in _residues(self.q, stride):
            for k_part in _residues(self.k, stride):
                tile = self._replace(q=q_part, k=k_part)
                if count_pairs(q_part.positions, k_part.positions, self.band):
                    yield tile

    def is_full(self) -> bool:
        """Return whether the band allows every pair of the two token ranges."""
        q, k = self.q.positions, self.k.positions
        # Compare the smallest and the largest difference of the two ranges.
        return q.start - k.last >= self.band.lo and q.last - k.start <= self.band.hi


def count_pairs(q: StridedRange, k: StridedRange, band: Band) -> int:
    """Return the number of pairs of q x k inside `band`, in O(log) steps for any strides."""
    if not (q.count and k.count) or band.lo > band.hi:
        return 0
    # [lo, hi] is [lo, infinity) without [hi + 1, infinity).
    return _pairs_at_least(q, k, band.lo) - _pairs_at_least(q, k, band.hi + 1)


def _pairs_at_least(q: StridedRange, k: StridedRange, lo: int) -> int:
    """Return the number of pairs with q - k >= lo: for each q the keys up to q - lo, summed in closed form."""
    # Queries before `part` have no key; queries from `full` on have every key.
    part = min(q.count, max(0, -((q.start - lo - k.start) // q.stride)))
    full = min(q.count, max(part, -((q.start - lo - k.last) // q.stride)))
    # Query i between the two has floor((q_i - lo - k.start) / k.stride) + 1 keys.
    #    keys    0 0 0 | 1 2 4 5 | n n n
    #    query   0     part      full
    between = _floor_sum(full - part, k.stride, q.stride, q.start + part * q.stride - lo - k.start) + (full - part)
    return between + (q.count - full) * k.count


def _floor_sum(n: int, m: int, a: int, b: int) -> int:
    """Return the sum of floor((a * i + b) / m) for i in range(n), by Euclid's algorithm."""
    total = 0
    while n > 0:
        # The whole parts of a / m and b / m sum in closed form.
        total += n * (n - 1) // 2 * (a // m) + n * (b // m)
        a, b = a % m, b % m
        # The rest counts lattice points under a line of slope a / m < 1: swap the axes and continue with m / a.
        top = a * n + b
        if top < m:
            break
        n, b, m, a = top // m, top % m, a, m
    return total


def _residues(tokens: TokenRange, stride: int) -> Iterator[TokenRange]:
    """Yield the parts of a token range with position stride `stride`, which is a multiple of the range's stride."""
    step = stride // tokens.positions.stride
    for first in range(min(step, tokens.positions.count)):
        yield tokens.pick(StridedRange(first, (tokens.positions.count - first + step - 1) // step, step))
