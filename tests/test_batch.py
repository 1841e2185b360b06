"""Batches over all ranks: loss and gradients of one process, and micro-batches of even time within the limit."""

from __future__ import annotations

import random
import time
from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from ringattn import InputError, MicroBatch, Ring, masks
from ringattn.adapters.loss import loss_scale
from ringattn.batch import make_batch, token_pairs
from ringattn.core.layout import causal_documents
from ringattn.core.problem import Problem
from ringattn.planner.choose import choose_route, plan_of
from ringattn.planner.cluster import REFERENCE
from ringattn.testing import run_ranks

VOCABULARY, WIDTH, HEADS, PLACES = 23, 8, 2, 17
TOLERANCE = 1e-12
"""Of float64 sums over some thousand tokens, relative to the norm."""


# --- one layer, over a ring and in one process -----------------------------------------------------------------------


class Trained(NamedTuple):
    """The loss of a batch, and the gradients of all weights."""

    loss: Tensor
    gradients: list[Tensor]


def weights() -> list[Tensor]:
    """Return embeddings of tokens and of positions, and the weights of q, k, v and of the output."""
    generator = torch.Generator().manual_seed(1)
    shapes = (VOCABULARY, WIDTH), (PLACES, WIDTH), (WIDTH, 3 * WIDTH), (WIDTH, WIDTH)
    return [torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_() for shape in shapes]


def logits(of: list[Tensor], tokens: Tensor, positions: Tensor, attend: Any) -> Tensor:
    """Return (tokens, vocabulary). `attend` takes q, k and v, (1, tokens, heads, head_dim)."""
    tokens_in, places, project, out = of
    x = tokens_in[tokens] + places[positions % PLACES]
    q, k, v = (part.unflatten(-1, (HEADS, -1))[None] for part in (x @ project).chunk(3, -1))
    return (x + attend(q, k, v)[0].flatten(1) @ out) @ tokens_in.T


def dense(allowed: Tensor) -> Any:
    """Return attention to the keys that are `allowed`, (queries, keys), with a matrix of scores."""

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = torch.einsum("bqhd,bkhd->bhqk", q, k) / q.shape[-1] ** 0.5
        return torch.einsum("bhqk,bkhd->bqhd", scores.masked_fill(~allowed, -torch.inf).softmax(-1), v)

    return attend


def one_process(texts: list[Tensor], labels: list[Tensor], parents: list[list[int]]) -> Trained:
    """Return the results of the mean loss over the whole batch, each sample in a separate call.

    `parents`: for each token the token before it, -1 for the first. A text without branches has one label per token.
    """
    of = weights()
    losses = []
    for text, targets, before in zip(texts, labels, parents, strict=True):
        allowed = torch.eye(len(text), dtype=torch.bool)
        depths: list[int] = []
        for token, parent in enumerate(before):
            depths.append(0 if parent < 0 else depths[parent] + 1)
            if parent >= 0:
                allowed[token] |= allowed[parent]
        result = logits(of, text, torch.tensor(depths), dense(allowed))
        edges = [(parent, token) for token, parent in enumerate(before) if parent >= 0 and targets[token] != -100]
        if edges:
            sources, targets_at = torch.tensor(edges).T
            losses.append(cross_entropy(result[sources], targets[targets_at], reduction="none"))
    loss = torch.cat(losses).mean()
    loss.backward()
    return Trained(loss.detach(), [weight.grad for weight in of])


def over_ring(ring: Ring, texts: list[Tensor], labels: list[Tensor], samples: list[Any], **options: Any) -> Trained:
    """Return the results of the same loss with `ring.batch`, summed over ranks."""
    batch = ring.batch(samples, **options)
    trees = any(isinstance(sample, masks.Tree) for sample in samples)
    edges = [micro.seq.edges() if trees else None for micro in batch]
    targets = [
        torch.cat([labels[sample] for sample in micro.samples])[edge[1]] if edge else micro.shard_labels(labels)
        for micro, edge in zip(batch, edges, strict=True)
    ]
    scale = loss_scale(targets, ring, gradients="sum")
    of, total = weights(), torch.zeros((), dtype=torch.float64)
    for micro, edge, target in zip(batch, edges, targets, strict=True):
        seq = micro.seq

        def attend(q: Tensor, k: Tensor, v: Tensor, seq: Any = seq) -> Tensor:
            return ring.attention(q, k, v, seq, causal=True)

        result = logits(of, micro.shard(texts)[0], seq.positions(per_document=True), attend)
        result = result if edge is None else result[edge[0]]
        loss = cross_entropy(result, target.flatten(), ignore_index=-100, reduction="sum") * scale
        loss.backward()
        total += loss.detach()
    ring.all_reduce([total, *(weight.grad for weight in of)])
    return Trained(total, [weight.grad for weight in of])


def check(ranks: int, samples: list[Any], generator: random.Random, **options: Any) -> None:
    """Compare `ring.batch` of random texts with one process. A tenth of the labels is left out."""
    parents = [chain(sample) if isinstance(sample, int) else path(sample) for sample in samples]
    tokens = torch.Generator().manual_seed(generator.randrange(2**31))
    texts = [torch.randint(VOCABULARY, (len(before),), generator=tokens) for before in parents]
    labels = [text.where(torch.rand(len(text), generator=tokens) > 0.1, -100) for text in texts]
    expected = one_process(texts, labels, parents)
    for result in run_ranks(ranks, lambda ring: over_ring(ring, texts, labels, samples, **options)):
        assert abs(result.loss - expected.loss) <= TOLERANCE * expected.loss
        for gradient, true in zip(result.gradients, expected.gradients, strict=True):
            assert (gradient - true).norm() <= TOLERANCE * true.norm()


def chain(tokens: int) -> list[int]:
    """Return the parent of each token of a text without branches."""
    return list(range(-1, tokens - 1))


def path(tree: masks.Tree) -> list[int]:
    """Return the parent of each token of a tree without empty nodes, from its nodes."""
    parents: list[int] = []
    ends: list[int] = []
    for parent, length in zip(tree.parents, tree.lengths, strict=True):
        parents += [ends[parent] if parent >= 0 else -1, *range(len(parents), len(parents) + length - 1)]
        ends.append(len(parents) - 1)
    return parents


@pytest.mark.parametrize("ranks", [3, *(pytest.param(ranks, marks=pytest.mark.slow) for ranks in (1, 2, 4))])
def test_loss_and_gradients_are_those_of_one_process(ranks: int) -> None:
    generator = random.Random(ranks)
    samples = [generator.randint(1, 60) for _ in range(9)] + [1, 2, 61]
    check(ranks, samples, generator, max_tokens_per_rank=-(-150 // ranks), token_pairs=7.0)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(12))
def test_loss_and_gradients_of_long_samples_are_those_of_one_process(seed: int) -> None:
    """Lengths are from 1 to thousands; each number of ranks comes with a limit, with a count, and with neither."""
    generator = random.Random(100 + seed)
    ranks = 1 + seed % 4
    samples = [min(3000, int(generator.lognormvariate(4.5, 1.8)) + 1) for _ in range(generator.randint(8, 30))]
    options: dict[str, Any] = {"token_pairs": generator.choice([None, 0.0, 50.0])}
    if seed // 4 == 0:
        options["max_tokens_per_rank"] = -(-max(samples) // ranks) + generator.randint(0, 500)
    elif seed // 4 == 1:
        options["micro_batches"] = generator.randint(1, 5)
    check(ranks, samples, generator, **options)


@pytest.mark.parametrize("ranks", [1, pytest.param(3, marks=pytest.mark.slow)])
def test_trees_and_lengths_in_one_batch(ranks: int) -> None:
    samples = [masks.tree([-1, 0, 0, 2, 0], [9, 5, 4, 3, 6]), 13, masks.tree([-1, -1, 1], [3, 4, 8]), 1, 20]
    check(ranks, samples, random.Random(ranks), micro_batches=2, token_pairs=3.0)


def test_a_micro_batch_without_trees_has_edges_too_if_the_batch_has_a_tree() -> None:
    samples = [masks.tree([-1, 0, 0], [2, 2, 2]), 7]
    assert {micro.samples for micro in planned(2, samples, micro_batches=2)} == {(0,), (1,)}
    check(2, samples, random.Random(1), micro_batches=2)


# --- how samples are divided -----------------------------------------------------------------------------------------


def planned(ranks: int, samples: Any, most: Any = None, **options: Any) -> tuple[MicroBatch, ...]:
    """Return the micro-batches of many ranks, which need not exist."""
    ring = SimpleNamespace(world_size=ranks, rank=0, machines=REFERENCE)
    ring.sequence = lambda **arguments: Ring.sequence(ring, **arguments)  # type: ignore[arg-type]
    arguments = {"micro_batches": None, "pairs_of_token": None, "schedule": "auto", **options}
    return make_batch(ring, samples, most, **arguments)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(24))
def test_times_are_even_and_no_rank_exceeds_the_limit(seed: int) -> None:
    """If a tenth of the limit is free, the largest time is at most 1.05 times the mean, or is that of one sample."""
    generator = random.Random(seed)
    ranks, count = generator.choice([2, 8, 32]), generator.choice([40, 300])
    center = generator.choice([6, 8])
    samples = [min(1 << 17, int(generator.lognormvariate(center, 1.5)) + 1) for _ in range(count)]
    most = max(generator.choice([2048, 8192]), -(-max(samples) // ranks))
    # 24,523 pairs per token are the FLOPs of Llama 3 8B: 6 per weight, and 14 per pair, head and dimension.
    times = [6 * 7.5e9 / (14 * 32 * 32 * 128) * length + length * (length + 1) / 2 for length in samples]
    fewest = planned(ranks, samples, most)
    more = planned(ranks, samples, most, micro_batches=-(-11 * len(fewest) // 10))
    ratios = []
    for batch in (fewest, more):
        ratios.append(max(micro.pairs for micro in batch) / max(sum(times) / len(batch), *times))
        assert sorted(sample for micro in batch for sample in micro.samples) == list(range(count))
        for micro in batch:
            assert max(micro.seq.counts) <= most
            assert micro.pairs == pytest.approx(sum(times[sample] for sample in micro.samples), rel=1e-9)
            lengths = [stop - start for start, stop in pairwise(micro.seq.documents or ())]
            assert lengths == [samples[sample] for sample in micro.samples]
    print("largest time over the bound: {:.4f} with as few as possible, {:.4f} with a tenth more".format(*ratios))
    assert ratios[1] <= 1.05


def test_the_number_of_micro_batches() -> None:
    assert len(planned(4, [10, 20, 30])) == 1
    assert len(planned(4, [10, 20, 30], 15)) == 1
    assert len(planned(4, [10, 20, 30], 14)) == 2
    assert len(planned(4, [10, 20, 30], micro_batches=3)) == 3
    # The longest samples of 41 tokens are in different micro-batches.
    assert [micro.samples for micro in planned(1, [41, 41, 41, 39, 39, 39], 80)] == [(0, 3), (1, 4), (2, 5)]
    # Two micro-batches fit as 3 + 3 and 2 + 2 + 2 only, which are less even than three.
    assert len(planned(1, [3, 3, 2, 2, 2], 6)) == 3


@pytest.mark.slow
def test_a_batch_of_thousands_of_samples_on_a_thousand_ranks_is_planned_in_seconds() -> None:
    generator = random.Random(1)
    samples = [min(1 << 20, int(generator.lognormvariate(8.0, 1.6)) + 1) for _ in range(4096)]
    started = time.process_time()
    batch = planned(1024, samples, 4096)
    seconds = time.process_time() - started
    print(f"{sum(samples)} tokens, {len(batch)} micro-batches, {seconds:.2f} s of processor time")
    assert seconds < 10
    started = time.process_time()
    for micro in batch:
        layout, mask = micro.seq.layout, causal_documents(micro.seq.documents or ())
        problem = Problem(layout, layout, mask, 1, 32, 8, 128, 128, "bfloat16")
        route = choose_route(problem, "auto", REFERENCE)
        assert all(plan_of(problem, route, 0, backward).steps for backward in (False, True))
    seconds = (time.process_time() - started) / len(batch)
    print(f"attention of a micro-batch: {seconds:.2f} s to choose the schedule and to plan a rank")
    assert seconds < 10


def test_the_time_of_a_token() -> None:
    facts: dict[str, Any] = {"layers": 3, "heads": 2, "head_dim": 5}
    assert token_pairs(700, **facts) == pytest.approx(6 * 700 / (14 * 3 * 2 * 5))
    slower = replace(REFERENCE, backward_flops=REFERENCE.flops / 2, block_keys=64, softmax_dims=5.0)
    assert token_pairs(700, **facts, cluster=slower) == pytest.approx(6 * 700 / (24 * 3 * 2 * 10) + 32)


# --- what is refused -------------------------------------------------------------------------------------------------

REFUSED: dict[str, tuple[Any, dict[str, Any], str]] = {
    "too long": ([5, 90, 7], {"max_tokens_per_rank": 40},
                 r"sample 1 has 90 tokens, and the limit of a micro-batch is 80 on 2 ranks: raise max_tokens_per"),
    "too few": ([60, 60, 60], {"max_tokens_per_rank": 30, "micro_batches": 2},
                r"micro_batches=2: 180 tokens in samples of up to 60 need 3 micro-batches of at most 60 tokens"),
    "not found": ([8, 16, 5, 10, 10, 18, 7, 4], {"max_tokens_per_rank": 13, "micro_batches": 3},
                  r"need 4 micro-batches of at most 26 tokens on 2 ranks as this method packs them"),
    "too many": ([60, 60], {"micro_batches": 3}, r"micro_batches=3: the batch has only 2 samples"),
    "too many for one": ([60], {"micro_batches": 3}, r"the batch has only 1 sample$"),
    "no list": (5, {}, r"batch takes a list or a tensor \(samples,\) with the number of tokens of each sample, got 5"),
    "nothing": (None, {}, r"batch takes a list .*, got None"),
    "a text": ("345", {}, r"batch takes a list .*, got '345'"),
    "of two dimensions": (torch.ones(2, 2, dtype=torch.int64), {}, r"batch takes a list or a tensor \(samples,\)"),
    "longer than a sequence": ([3, 10**30], {}, r"have 10{29}3 tokens together, and a batch takes at most 2\^50"),
    "none": ([], {}, r"batch needs at least one sample"),
    "empty": ([3, 0], {}, r"sample 1 has 0 tokens; leave it out"),
    "a word": ([3, "4"], {}, r"sample 1 must be a number of tokens or masks\.tree\(\.\.\.\), got '4'"),
    "true": ([True], {}, r"sample 0 must be a number of tokens .*, got True"),
    "another mask": ([masks.chunked(8)], {}, r"sample 0 has the mask chunked: batch takes lengths and masks\.tree"),
    "no limit": ([3], {"max_tokens_per_rank": 0}, r"max_tokens_per_rank must be a positive integer or None, got 0"),
    "no count": ([3], {"micro_batches": 1.5}, r"micro_batches must be a positive integer or None, got 1\.5"),
    "no time": ([3], {"token_pairs": float("nan")}, r"token_pairs must be a number from 0 to 2\^50, got nan"),
    "a word for a time": ([3], {"token_pairs": "x"}, r"token_pairs must be a number from 0 to 2\^50, got 'x'"),
    "too large a time": ([3], {"token_pairs": 10**400}, r"token_pairs must be a number from 0 to 2\^50, got 1000"),
    "no schedule": ([3], {"schedule": "rings"}, r"rings"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_batches_that_are_refused(case: str) -> None:
    samples, options, message = REFUSED[case]

    def body(ring: Ring) -> None:
        with pytest.raises(InputError, match=message):
            ring.batch(samples, **options)

    run_ranks(2, body)


def test_tensors_that_do_not_fit_the_batch() -> None:
    texts = [torch.zeros(length, dtype=torch.int64) for length in (3, 5, 2)]
    with Ring() as ring:
        first, second = ring.batch(torch.tensor([3, 5, 2]), micro_batches=2)
        assert (first.samples, second.samples) == ((1,), (0, 2))
        with pytest.raises(InputError, match=r"rank 0: shard takes a list of one tensor per .* batch, 3, got 2"):
            first.shard(texts[:2])
        with pytest.raises(InputError, match=r"rank 0: shard_labels: sample 2 has shape \(3,\); dimension 0 must"):
            second.shard_labels([texts[0], texts[1], torch.zeros(3, dtype=torch.int64)])
        (tree,) = ring.batch([masks.tree([-1, 0, 0], [1, 1, 1])])
        with pytest.raises(InputError, match=r"shard_labels: in a tree .* use seq\.edges"):
            tree.shard_labels([texts[0]])
        refused: list[tuple[Any, str]] = [
            (torch.zeros(3, 8), r"batch, 3, got Tensor"),
            (iter(texts), r"batch, 3, got list_iterator"),
            ([text.tolist() for text in texts], r"batch, 3; sample 0 is list"),
            ([*texts[:2], texts[2][:, None]], r"sample 0 is \(3,\), .*; sample 2 is \(2, 1\),"),
            ([*texts[:2], torch.zeros(2)], r"sample 0 is .* torch\.int64, cpu; sample 2 is .* torch\.float32, cpu"),
        ]
        for tensors, message in refused:
            with pytest.raises(InputError, match=rf"rank 0: shard.*{message}"):
                second.shard(tensors)


def test_numbers_of_numpy_make_the_batch_of_pythons_numbers() -> None:
    samples = [30, 20, 40, 10]
    expected = planned(2, samples, 30, micro_batches=2)
    # 8-bit numbers, whose sum is larger than 255.
    batch = planned(2, np.array(samples, np.uint8), np.int64(30), micro_batches=np.int32(2))
    assert [(micro.samples, micro.lengths) for micro in batch] == [(micro.samples, micro.lengths) for micro in expected]
    assert all(type(length) is int for micro in batch for length in micro.lengths)
    many = planned(2, [np.uint8(200)] * 3, pairs_of_token=np.float32(0.5))
    assert many[0].seq.length == 600 and many[0].pairs == 3 * (100 + 200 * 201 / 2)
