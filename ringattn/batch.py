"""A batch of samples over all ranks of a ring: micro-batches of nearly equal predicted time.

Each micro-batch is one packed sequence over all ranks. A short sample stays whole on a rank, a long one is cut over the
ranks that it needs (`core/placement`), so no separate groups for data and context parallelism are needed.

The predicted time of a sample is that of its (query, key) pairs in attention, and of its tokens in all other layers.
The placement divides both evenly among the ranks, so the time of a micro-batch is proportional to the sum over its
samples.

Guarantees: a sample is whole in one micro-batch, and no rank gets more tokens than the limit. The micro-batches depend
only on the arguments, so all ranks form the same ones.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Many
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from itertools import accumulate, count
from numbers import Real
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ringattn.core.areas import causal_pairs
from ringattn.core.geometry import MOST_TOKENS
from ringattn.core.mask import AttentionMask
from ringattn.errors import InputError
from ringattn.integers import whole_number
from ringattn.masks import Tree
from ringattn.planner.cluster import BACKWARD_OVER_FORWARD, FORWARD_FLOPS_PER_DIM, REFERENCE, Cluster
from ringattn.sequence import Sequence

__all__ = ["MicroBatch", "token_pairs"]

FORWARD_FLOPS_PER_WEIGHT, LINEAR_BACKWARD_OVER_FORWARD = 2, 2
"""A weight multiplies and adds once per token in forward. Backward computes the gradients of inputs and of weights."""


def token_pairs(weights: float, *, layers: int, heads: int, head_dim: int, cluster: Cluster = REFERENCE) -> float:
    """Return the time of one token outside of attention, in the time of one (query, key) pair in attention.

    Forward and backward count. Linear layers are assumed to reach the FLOP/s of attention's forward pass.

    Args:
        weights: The number of weights that multiply a token, without the embedding; of experts only the active ones.
        layers: The number of layers with attention to all earlier tokens.
        heads: The number of query heads.
        head_dim: The elements of a head.
        cluster: The machines, whose constants of attention are used, as `ring.machines`.

    Returns:
        The number of pairs.

    Raises:
        Nothing.

    Example:
        pairs = token_pairs(7.5e9, layers=32, heads=32, head_dim=128)  # Llama 3 8B: 24,523
        ring.batch(lengths, max_tokens_per_rank=16384, token_pairs=pairs)
    """
    backward = BACKWARD_OVER_FORWARD * cluster.flops / (cluster.backward_flops or cluster.flops)
    pair = layers * heads * (head_dim + cluster.softmax_dims) * FORWARD_FLOPS_PER_DIM * (1 + backward)
    # A query whose keys end inside a block of the kernel computes half a block more, on average.
    return weights * FORWARD_FLOPS_PER_WEIGHT * (1 + LINEAR_BACKWARD_OVER_FORWARD) / pair + cluster.block_keys / 2


@dataclass(frozen=True, eq=False)
class MicroBatch:
    """Samples that pass through the model together, packed into one sequence. Made by `Ring.batch`.

    Args:
        samples: The indices of the samples, in the order in which they are packed.
        seq: The sequence. `seq.positions(per_document=True)` are positions within samples.
        pairs: The predicted time of all ranks together, in (query, key) pairs.
        lengths: The number of tokens of each sample of the whole batch.

    Raises:
        Nothing.
    """

    samples: tuple[int, ...]
    seq: Sequence[Any]
    pairs: float
    lengths: tuple[int, ...]

    def shard(self, tensors: Many[Tensor]) -> Tensor:
        """Return this rank's tokens of the micro-batch. Local and differentiable.

        Args:
            tensors: One tensor per sample of the whole batch, with the tokens in dimension 0.

        Returns:
            A tensor (1, counts[rank], ...).

        Raises:
            InputError: `tensors` is not a list or tuple of one tensor per sample, a tensor does not have the tokens of
                its sample, or those of the micro-batch differ in dtype, device or their other dimensions.
        """
        return self.seq.shard(self._packed(tensors, "shard"))

    def shard_labels(self, tensors: Many[Tensor], ignore_index: int = -100, *, shift: int = 1) -> Tensor:
        """Return the next-token labels of this rank's tokens: shifted within each sample, then sharded. Local.

        Args:
            tensors: The tokens of each sample of the whole batch, (tokens,), with `ignore_index` for tokens that are
                not to be predicted.
            ignore_index: As in `Sequence.shard_labels`.
            shift: As in `Sequence.shard_labels`.

        Returns:
            int64, (1, counts[rank]).

        Raises:
            InputError: As in `shard` and in `Sequence.shard_labels`; a batch with trees has the labels of `seq.edges`.
        """
        return self.seq.shard_labels(self._packed(tensors, "shard_labels"), 1, ignore_index, shift=shift)

    def _packed(self, tensors: Many[Tensor], what: str) -> Tensor:
        where = f"rank {self.seq.ring.rank}: {what}"
        needed = f"{where} takes a list of one tensor per sample of the whole batch, {len(self.lengths)}"
        if not isinstance(tensors, (list, tuple)):
            raise InputError(f"{needed}, got {type(tensors).__name__}")
        if len(tensors) != len(self.lengths):
            raise InputError(f"{needed}, got {len(tensors)}")
        kinds: dict[tuple[Any, ...], str] = {}
        for sample in self.samples:
            tensor = tensors[sample]
            if not isinstance(tensor, Tensor):
                raise InputError(f"{needed}; sample {sample} is {type(tensor).__name__}")
            shape = tuple(tensor.shape)
            if not shape or shape[0] != self.lengths[sample]:
                raise InputError(
                    f"{where}: sample {sample} has shape {shape}; dimension 0 must have its {self.lengths[sample]} "
                    "tokens"
                )
            kind = tensor.dtype, tensor.device, shape[1:]
            kinds[kind] = f"sample {sample} is {shape}, {tensor.dtype}, {tensor.device}"
        if len(kinds) > 1:
            raise InputError(
                f"{where}: samples differ in dtype, device or dimensions after the first: {'; '.join(kinds.values())}"
            )
        return torch.cat([tensors[sample] for sample in self.samples])[None]


class _Sample(NamedTuple):
    tokens: int
    pairs: int
    tree: Tree | None


def make_batch(
    ring: Any,
    samples: Iterable[int | AttentionMask] | Tensor,
    max_tokens_per_rank: int | None,
    micro_batches: int | None,
    pairs_of_token: float | None,
    schedule: str,
) -> tuple[MicroBatch, ...]:
    """Return the micro-batches; see `Ring.batch`."""
    if pairs_of_token is None:
        pairs_of_token = token_pairs(7.5e9, layers=32, heads=32, head_dim=128, cluster=ring.machines)
    is_number = isinstance(pairs_of_token, Real) and not isinstance(pairs_of_token, bool)
    if not is_number or not 0 <= pairs_of_token <= MOST_TOKENS:
        raise InputError(f"token_pairs must be a number from 0 to 2^50, got {pairs_of_token!r}")
    if max_tokens_per_rank is not None:
        needed = "max_tokens_per_rank must be a positive integer or None"
        max_tokens_per_rank = whole_number(max_tokens_per_rank, needed, 1)
    if micro_batches is not None:
        micro_batches = whole_number(micro_batches, "micro_batches must be a positive integer or None", 1)
    parts = [_sample(index, sample) for index, sample in enumerate(_listed(samples))]
    if not parts:
        raise InputError("batch needs at least one sample")
    lengths = tuple(part.tokens for part in parts)
    if sum(lengths) > MOST_TOKENS:
        raise InputError(f"the samples have {sum(lengths)} tokens together, and a batch takes at most 2^50")
    times = [float(pairs_of_token) * part.tokens + part.pairs for part in parts]
    limit = sum(lengths) if max_tokens_per_rank is None else max_tokens_per_rank * ring.world_size
    groups = _groups(lengths, times, limit, micro_batches, ring.world_size)
    trees = any(part.tree is not None for part in parts)
    return tuple(
        MicroBatch(group, _sequence(ring, [parts[index] for index in group], trees, schedule),
                   sum(times[index] for index in group), lengths)
        for group in groups
    )  # fmt: skip


def _listed(samples: Iterable[int | AttentionMask] | Tensor) -> list[int | AttentionMask]:
    """Return the samples as a list; a tensor is read as a whole. Raises `InputError` if they are not several."""
    if isinstance(samples, Tensor) and samples.dim() == 1:
        return samples.tolist()
    if isinstance(samples, (Tensor, str, bytes, Mapping)) or not isinstance(samples, Iterable):
        raise InputError(
            f"batch takes a list or a tensor (samples,) with the number of tokens of each sample, got {samples!r}"
        )
    return list(samples)


def _sample(index: int, sample: int | AttentionMask) -> _Sample:
    """Return the tokens and pairs of a sample. Raises `InputError` if it is neither a length nor a tree."""
    if isinstance(sample, Tree):
        nodes = zip(sample.depths, sample.lengths, strict=True)
        tokens, pairs, tree = sample.tokens, sum(causal_pairs(depth, depth + length) for depth, length in nodes), sample
    elif isinstance(sample, AttentionMask):
        raise InputError(
            f"sample {index} has the mask {sample.text.partition(':')[0]}: batch takes lengths and masks.tree(...); "
            "give other masks to ring.sequence(mask=..., layout='mask'), one micro-batch at a time"
        )
    else:
        tokens = whole_number(sample, f"sample {index} must be a number of tokens or masks.tree(...)")
        pairs, tree = causal_pairs(0, tokens), None
    if tokens < 1:
        raise InputError(f"sample {index} has {tokens} tokens; leave it out of the batch")
    return _Sample(tokens, pairs, tree)


def _sequence(ring: Any, parts: Many[_Sample], trees: bool, schedule: str) -> Sequence[Any]:
    """Return the packed sequence of samples: documents, or with `trees` a tree with a root for each sample.

    `trees`: whether any sample of the batch is a tree, so that all its micro-batches take the same calls.
    """
    if not trees:
        cu_seqlens = tuple(accumulate((part.tokens for part in parts), initial=0))
        return ring.sequence(cu_seqlens=cu_seqlens, layout="documents", schedule=schedule)
    parents: list[int] = []
    lengths: list[int] = []
    for part in parts:
        tree = part.tree or Tree((-1,), (part.tokens,))
        parents += [parent if parent < 0 else parent + len(lengths) for parent in tree.parents]
        lengths += tree.lengths
    return ring.sequence(mask=Tree(tuple(parents), tuple(lengths)), layout="mask", schedule=schedule)


# --- dividing samples among micro-batches -----------------------------------------------------------------------------


def _groups(
    tokens: Many[int], times: Many[float], limit: int, micro_batches: int | None, ranks: int
) -> list[tuple[int, ...]]:
    """Return the samples of each micro-batch of at most `limit` tokens.

    Raises `InputError` if a sample exceeds the limit, or if the samples are not found to fit into `micro_batches`.
    """
    largest = max(range(len(tokens)), key=tokens.__getitem__)
    if tokens[largest] > limit:
        raise InputError(
            f"sample {largest} has {tokens[largest]} tokens, and the limit of a micro-batch is {limit} on "
            f"{_several(ranks, 'rank')}: raise max_tokens_per_rank to {-(-tokens[largest] // ranks)}, use more ranks, "
            "or shorten the sample"
        )
    if micro_batches is not None and micro_batches > len(tokens):
        raise InputError(f"micro_batches={micro_batches}: the batch has only {_several(len(tokens), 'sample')}")
    for number in count(_fewest(tokens, limit)) if micro_batches is None else (micro_batches,):
        groups = _even_groups(tokens, times, limit, number)
        if groups is not None:
            return groups
    needed = next(number for number in count(_fewest(tokens, limit)) if _even_groups(tokens, times, limit, number))
    raise InputError(
        f"micro_batches={micro_batches}: {sum(tokens)} tokens in samples of up to {tokens[largest]} need {needed} "
        f"micro-batches of at most {limit} tokens on {_several(ranks, 'rank')} as this method packs them (the longest "
        f"sample first, each where the time is least); use {needed}, or raise max_tokens_per_rank"
    )


def _several(number: int, noun: str) -> str:
    """Return "1 rank" or "2 ranks"."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _fewest(tokens: Many[int], limit: int) -> int:
    """Return a number of micro-batches that the samples fit into: the largest first, each where it fits best."""
    rooms: list[int] = []
    for size in sorted(tokens, reverse=True):
        place = bisect_left(rooms, size)
        insort(rooms, (rooms.pop(place) if place < len(rooms) else limit) - size)
    return len(rooms)


def _even_groups(tokens: Many[int], times: Many[float], limit: int, number: int) -> list[tuple[int, ...]] | None:
    """Divide samples into `number` groups of nearly equal time, or return None if one of them finds no room.

    The longest sample comes first. Each goes to the group with the least time among those with room for its tokens.
    """
    groups: list[list[int]] = [[] for _ in range(number)]
    rooms = [limit] * number
    by_time = [(0.0, group) for group in range(number)]
    heapify(by_time)
    for sample in sorted(range(len(times)), key=lambda index: (-times[index], index)):
        full = []
        while by_time and rooms[by_time[0][1]] < tokens[sample]:
            full.append(heappop(by_time))
        if not by_time:
            return None
        time, group = heappop(by_time)
        groups[group].append(sample)
        rooms[group] -= tokens[sample]
        for entry in (*full, (time + times[sample], group)):
            heappush(by_time, entry)
    return [tuple(sorted(group)) for group in groups]
