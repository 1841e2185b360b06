"""Dilated attention as a mask: branches of segments of which each head keeps every r-th position.

LongNet (arXiv 2307.02486): a branch (w, r) cuts the sequence into segments of w positions; a head keeps those that lie
at its offset modulo r, as queries and as keys. Branches are mixed by their softmax denominators, which is one softmax
over the keys of all of them, a key counted once for each branch that has it.
Guarantees: a branch of the mask for each range of heads with one offset, of few integers whatever the length.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import groupby, pairwise

from ringattn.core.geometry import CAUSAL, FULL, StridedRange
from ringattn.core.mask import Branch, Mask, check_causal
from ringattn.core.presets import OFFSETS, Offset, check, head_offsets
from ringattn.errors import InputError


@dataclass(frozen=True)
class Dilated:
    """The mask options of dilated attention. `offset`: the rule that gives a head its offset modulo the rate.

    mod: head % rate (LongNet). block: each ceil(heads / rate) heads share one (torchscale). kv_head: the K/V head %
    rate, so that grouped heads read the same rows. layer_rotated: (head + layer * heads) % rate.
    """

    segment_lengths: tuple[int, ...]
    dilation_rates: tuple[int, ...]
    causal: bool = False
    offset: Offset | str = "mod"
    layer: int | None = None

    def __post_init__(self) -> None:
        """Raises `InputError` for branches, a `causal`, a rule or a layer that make no sense."""
        check(self.segment_lengths, self.dilation_rates)
        check_causal(self.causal)
        if self.offset not in OFFSETS:
            raise InputError(f"offset={self.offset!r} is not known; choose one of {', '.join(OFFSETS)}")
        # Only 'layer_rotated' reads the layer; given to another rule it would be an ignored option.
        if (self.layer is None) == (self.offset == "layer_rotated"):
            raise InputError(f"layer={self.layer} with offset={self.offset!r}: layer goes with 'layer_rotated' only")
        if self.layer is not None and (type(self.layer) is not int or self.layer < 0):
            raise InputError(f"layer must be a whole number from 0 on, got {self.layer!r}")

    def branches(self) -> list[Dilated]:
        """Each branch alone."""
        pairs = zip(self.segment_lengths, self.dilation_rates, strict=True)
        return [Dilated((length,), (rate,), self.causal, self.offset, self.layer) for length, rate in pairs]

    def mask(
        self,
        length: int,
        kv_length: int,
        documents: tuple[int, ...] | None,
        kv_documents: tuple[int, ...] | None,
        q_heads: int,
        kv_heads: int,
    ) -> Mask:
        """The mask over a sequence; segments begin anew in each document. Raises `InputError` for two sequences."""
        if (length, documents) != (kv_length, kv_documents):
            raise InputError("kv_seq: dilated attention is self-attention, over one sequence; leave kv_seq out")
        # Segment 8, rate 2, offsets 0 and 1:
        #    positions   0 1 2 3 4 5 6 7 | 8 9 ...
        #    head 0      x . x . x . x . | x . ...
        #    head 1      . x . x . x . x | . x ...
        bounds = documents or (0, length)
        longest = max((stop - start for start, stop in pairwise(bounds)), default=0)
        band, branches = CAUSAL if self.causal else FULL, []
        for length, rate in zip(self.segment_lengths, self.dilation_rates, strict=True):
            # A segment that no document exceeds cuts nothing: None gives equal masks for equal pairs.
            segment = length if length < longest else None
            offsets = head_offsets(self.offset, rate, q_heads, kv_heads, self.layer or 0)
            # Consecutive heads with one offset share a branch, so a branch needs one range of heads.
            for offset, members in groupby(range(q_heads), offsets.__getitem__):
                heads = list(members)
                # None stands for all heads, as in plain masks.
                run = None if len(heads) == q_heads else StridedRange(heads[0], len(heads))
                branches.append(Branch(bounds, bounds, band, run, segment, rate, offset))
        return Mask(tuple(branches))
