"""Batches that share prefixes, merged into a tree: one copy of each prefix, exact against the batch that is not merged.

Example::

    merged = tree_of(sequences)                       # many answers to a few prompts
    seq = ring.sequence(len(merged.ids)).with_mask(merged.mask)
    with ring.activate(seq):
        logits = model(seq.shard(merged.ids[None]), position_ids=seq.positions(per_document=True)[None]).logits
    log_probs = edge_log_probs(logits, merged.ids, seq)
    loss = -sum(log_probs[places[1:]].sum() for places in merged.places)

Layers with dropout draw a shared token once, not once per sequence; without dropout, the loss and all gradients equal
those of the batch.
"""

from __future__ import annotations

from collections.abc import Sequence as Many
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ringattn.adapters.hosts import check_alike
from ringattn.adapters.loss import LabelLogProbs, SumOverRanks, first_outside, int64_labels
from ringattn.errors import InputError
from ringattn.masks import Tree
from ringattn.sequence import Sequence

__all__ = ["TreeCollator", "edge_log_probs", "tree_of"]


@dataclass(frozen=True)
class Merged:
    """A batch of sequences as a tree."""

    mask: Tree
    """The tree, for `Sequence.with_mask`."""
    ids: Tensor
    """(tokens,) the ids of the tree's tokens."""
    places: tuple[Tensor, ...]
    """For each sequence, the positions of its tokens in `ids`, in order."""

    def weights(self, weights: Many[Tensor] | None = None) -> Tensor:
        """Return the weight of each token's loss: the sum over all sequences that contain the token.

        Args:
            weights: For each sequence, a weight for each of its tokens; 0 leaves the token out of the loss. None: 1 for
                every token.

        Returns:
            (tokens,), float32, or the dtype of `weights`. The mean loss of the batch is the weighted sum divided by the
            sum of the weights of all tokens that are not the first of their sequence.

        Raises:
            InputError: A sequence has another number of weights than tokens.

        Example:
            loss = -(merged.weights() * edge_log_probs(logits, merged.ids, seq)).sum()
        """
        values = [torch.ones(len(places)) for places in self.places] if weights is None else list(weights)
        lengths = [len(places) for places in self.places]
        if [len(value) for value in values] != lengths:
            raise InputError(f"weights have lengths {[len(value) for value in values]}, the sequences {lengths}")
        total = torch.zeros(len(self.ids), dtype=values[0].dtype if values else torch.float32)
        for places, value in zip(self.places, values, strict=True):
            total.index_add_(0, places, value)
        return total


def tree_of(sequences: Many[Tensor | Many[int]]) -> Merged:
    """Merge sequences of token ids into a tree, in which sequences with an equal beginning share its tokens.

    Args:
        sequences: Token ids of each sequence, (tokens,). A sequence may be equal to another, or begin another.

    Returns:
        The tree. Its branches are in ascending order of ids.

    Raises:
        InputError: There is no sequence, or one is not a list of whole numbers.

    Example:
        merged = tree_of([[5, 7, 1], [5, 7, 2, 3], [9]])  # nodes 5 7 | 1 | 2 3 | 9
    """
    rows = [_ids(sequence) for sequence in sequences]
    if not rows:
        raise InputError("tree_of: there is no sequence")
    # In lexical order, the sequences below a node are consecutive, and share the most tokens with their neighbours. The
    # order of big-endian bytes is lexical.
    order = sorted(range(len(rows)), key=lambda index: rows[index].astype(">i8").tobytes())
    ordered = [rows[index] for index in order]
    shared = np.array([_shared(*pair) for pair in pairwise(ordered)], np.int64)
    parents: list[int] = []
    pieces: list[np.ndarray] = []
    paths: list[list[np.ndarray]] = [[] for _ in rows]
    tokens = 0
    groups = [(0, len(ordered), 0, -1)]  # sequences first .. stop - 1, whose first `depth` tokens are in ancestors
    while groups:
        first, stop, depth, parent = groups.pop()
        common = int(shared[first : stop - 1].min(initial=len(ordered[first])))
        if common > depth:
            pieces.append(ordered[first][depth:common])
            for index in order[first:stop]:
                paths[index].append(np.arange(tokens, tokens + common - depth))
            tokens += common - depth
            parents.append(parent)
            parent = len(parents) - 1
        if stop - first > 1:
            borders = first + 1 + np.flatnonzero(shared[first : stop - 1] == common)
            parts = [*pairwise([first, *borders.tolist(), stop])]
            groups += [(*part, common, parent) for part in parts[::-1] if len(ordered[part[0]]) > common]
    mask = Tree(tuple(parents), tuple(map(len, pieces)))
    places = (torch.from_numpy(np.concatenate([np.empty(0, np.int64), *path])) for path in paths)
    return Merged(mask, torch.from_numpy(np.concatenate([np.empty(0, np.int64), *pieces])), tuple(places))


def edge_log_probs(logits: Tensor, ids: Tensor, seq: Sequence) -> Tensor:
    """Return the log-probability of each token of a tree under its parent's logits, on all ranks. A collective call.

    Compute the same loss from the result on every rank. The gradients of a rank are then its tokens' part of the
    gradient of one process: sum them over ranks, or multiply the loss by `ring.world_size` if they are averaged. The
    softmax of a row of logits is computed once, however many children the token has.

    Args:
        logits: This rank's logits.
        ids: The ids of all tokens of the tree (`Merged.ids`).
        seq: The sequence with the mask of the tree.

    Shape:
        logits: (1, tokens of this rank, vocabulary)
        ids: (tokens,)

    Returns:
        (tokens,), float32 or float64, differentiable; 0 for the first tokens of roots. The log-probabilities of a
        sequence are `result[places[1:]]`, with its positions from `Merged.places`.

    Raises:
        InputError: On all ranks: the shapes do not fit the sequence, or it has no tree; or the ids are not integers, or
            that of a token other than the first of a root is negative or not less than the vocabulary.
        DisagreementError: The ids differ between ranks; every rank raises.
        RingError: What `Ring.all_reduce` raises.

    Example:
        log_probs = edge_log_probs(logits, merged.ids, seq)
    """
    ring, local = seq.ring, seq.counts[seq.ring.rank]
    with ring.refused_by_all():
        rows, tokens = seq.edges()
        if logits.dim() != 3 or logits.shape[:2] != (1, local) or ids.shape != (seq.length,):
            raise InputError(
                f"rank {ring.rank}: logits {tuple(logits.shape)} and ids {tuple(ids.shape)} must be (1, {local}, "
                f"vocabulary) and ({seq.length},)"
            )
        labels = int64_labels("ids", ids).to(logits.device)[tokens]
        index = first_outside(labels, logits.shape[2], None)
        if index is not None:
            raise InputError(
                f"rank {ring.rank}: id {int(labels[index])} of token {int(tokens[index])} of the tree is not in the "
                f"vocabulary of {logits.shape[2]} tokens; leave padding out of the sequences that tree_of merges"
            )
    check_alike(ring, {"ids": ids}, "every rank of a ring must merge the same sequences")
    values: Tensor = LabelLogProbs.apply(logits[0], labels, None, rows)
    whole = values.new_zeros(seq.length).index_add(0, tokens, values)
    result: Tensor = SumOverRanks.apply(whole, ring)
    return result


@dataclass(frozen=True)
class TreeCollator:
    """Collate a batch of prompts with their answers into one tree, for `torch.utils.data.DataLoader`.

    Args:
        prompt: The key of the prompt's ids in a sample. None: `answer` is the whole sequence.
        answer: The key of the answer's ids. Its tokens have weight 1 in the loss, those of the prompt 0.

    Raises:
        Nothing.

    Example:
        loader = DataLoader(samples, batch_size=64, collate_fn=TreeCollator("prompt_ids", "completion_ids"))
        for merged, weights in loader:
            seq = ring.sequence(len(merged.ids)).with_mask(merged.mask)
    """

    prompt: str | None = "prompt_ids"
    answer: str = "completion_ids"

    def __call__(self, samples: Many[dict[str, Any]]) -> tuple[Merged, Tensor]:
        """Return the tree of all samples, and the weight of each of its tokens."""
        prompts = [_ids(sample[self.prompt] if self.prompt else []) for sample in samples]
        answers = [_ids(sample[self.answer]) for sample in samples]
        merged = tree_of([np.concatenate(pair).tolist() for pair in zip(prompts, answers, strict=True)])
        weights = [
            torch.cat([torch.zeros(len(prompt)), torch.ones(len(answer))])
            for prompt, answer in zip(prompts, answers, strict=True)
        ]
        return merged, merged.weights(weights)


def _ids(sequence: Tensor | Many[int]) -> np.ndarray:
    """Return a sequence as an int64 array."""
    array = sequence.cpu().numpy() if isinstance(sequence, Tensor) else np.asarray(sequence)
    if array.ndim != 1 or (array.size and not np.issubdtype(array.dtype, np.integer)):
        raise InputError(f"tree_of takes sequences of whole numbers, got {array.dtype} of shape {array.shape}")
    return array.astype(np.int64)


def _shared(first: np.ndarray, second: np.ndarray) -> int:
    """Return the number of tokens with which both sequences begin."""
    length = min(len(first), len(second))
    differing = np.flatnonzero(first[:length] != second[:length])
    return int(differing[0]) if len(differing) else length
