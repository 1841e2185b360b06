"""Batches merged into a tree, compared with the batch that is not merged: loss, log-probabilities and all gradients."""

from __future__ import annotations

import copy
from random import Random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

from ringattn import Ring, masks
from ringattn.adapters.loss import token_log_probs
from ringattn.adapters.trees import TreeCollator, edge_log_probs, tree_of
from ringattn.errors import DisagreementError, InputError, UnsupportedError
from ringattn.testing import run_ranks
from tests.adapters.processes import worst_error

SEQUENCES = st.lists(st.lists(st.integers(0, 2), max_size=7), min_size=1, max_size=9)


@given(SEQUENCES)
def test_a_tree_has_each_prefix_once(sequences: list[list[int]]) -> None:
    merged = tree_of(sequences)
    parents = merged.mask.parent_tokens()
    assert len(merged.ids) == len({tuple(s[: n + 1]) for s in sequences for n in range(len(s))}) == merged.mask.tokens
    for sequence, places in zip(sequences, merged.places, strict=True):
        assert merged.ids[places].tolist() == sequence
        assert parents[places.numpy()].tolist() == [-1, *places.tolist()][: len(places)]
    assert merged.weights().sum() == sum(map(len, sequences))


@given(SEQUENCES, st.sampled_from(["contiguous", "zigzag", "striped"]), st.integers(1, 4))
def test_every_token_but_roots_is_one_edge(sequences: list[list[int]], layout: str, ranks: int) -> None:
    merged = tree_of(sequences)
    parents = merged.mask.parent_tokens()

    def body(ring: Ring) -> list[tuple[int, int]]:
        seq = ring.sequence(len(merged.ids), layout=layout).with_mask(merged.mask)
        rows, tokens = seq.edges()
        assert rows.tolist() == sorted(rows.tolist())
        return list(zip(seq.positions()[rows].tolist(), tokens.tolist(), strict=True))

    edges = sorted(edge for of_rank in run_ranks(ranks, body) for edge in of_rank)
    assert edges == sorted((int(parent), token) for token, parent in enumerate(parents) if parent >= 0)


def rotated(x: Tensor, positions: Tensor) -> Tensor:
    """Return `x`, (1, tokens, heads, dim), with rotary embeddings of these positions."""
    angles = positions[:, None].double() * 0.3 ** torch.arange(x.shape[-1] // 2)
    first, second = x.chunk(2, -1)
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]
    return torch.cat([first * cos - second * sin, first * sin + second * cos], -1)


class Model(nn.Module):
    """A causal transformer of two layers with rotary embeddings and grouped heads."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.embed = nn.Embedding(5, 16)
        self.layers = nn.ModuleList(nn.Linear(16, 4 * 8 + 2 * 2 * 8) for _ in range(2))
        self.mixes = nn.ModuleList(nn.Linear(32, 16) for _ in range(2))
        self.head = nn.Linear(16, 5)
        self.double()

    def forward(self, ids: Tensor, positions: Tensor, attend) -> Tensor:
        """Return logits (1, tokens, 5). `attend(q, k, v)` computes causal attention."""
        x = self.embed(ids)[None]
        for layer, mix in zip(self.layers, self.mixes, strict=True):
            q, k, v = layer(x).split([32, 16, 16], -1)
            q, k, v = (each.unflatten(-1, (-1, 8)) for each in (q, k, v))
            x = x + mix(attend(rotated(q, positions), rotated(k, positions), v).flatten(2)).tanh()
        return self.head(x)


def dense(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Return causal attention of one sequence, by torch."""
    q, k, v = (each.transpose(1, 2) for each in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(1, 2)


def objective(log_probs: list[Tensor]) -> Tensor:
    """Return a loss that is not linear in log-probabilities: clipped ratios, and squares of sums over sequences."""
    return sum((each.exp().clamp(max=0.25) * 3).sum() - 0.1 * each.sum() ** 2 for each in log_probs)  # type: ignore[return-value]


@pytest.mark.parametrize(("layout", "ranks"), [("contiguous", 1), ("zigzag", 2), ("striped", 3), ("zigzag", 4)])
def test_a_merged_batch_equals_the_batch(layout: str, ranks: int) -> None:
    random = Random(ranks)
    prompts = [[random.randrange(5) for _ in range(n)] for n in (9, 6)]
    sequences = [prompts[n % 2] + [random.randrange(5) for _ in range(random.randint(0, 6))] for n in range(7)]
    sequences += [sequences[0], sequences[1][:4]]
    model = Model()
    expected = []
    for sequence in sequences:
        ids = torch.tensor(sequence)
        logits = model(ids, torch.arange(len(ids)), dense)[0]
        expected.append(logits[:-1].log_softmax(-1).gather(1, ids[1:, None])[:, 0])
    loss = objective(expected)
    gradients = torch.autograd.grad(loss, list(model.parameters()))
    merged = tree_of(sequences)
    assert len(merged.ids) < sum(map(len, sequences)) / 1.5

    def body(ring: Ring) -> tuple[Tensor, list[Tensor]]:
        local = copy.deepcopy(model)
        seq = ring.sequence(len(merged.ids), layout=layout).with_mask(merged.mask)
        positions = seq.positions(per_document=True)
        logits = local(seq.shard(merged.ids, dim=0), positions, lambda q, k, v: ring.attention(q, k, v, seq))
        edges = edge_log_probs(logits, merged.ids, seq)
        value = objective([edges[places[1:]] for places in merged.places])
        summed = [gradient.clone() for gradient in torch.autograd.grad(value, list(local.parameters()))]
        ring.all_reduce(summed)
        return value.detach(), summed

    for value, summed in run_ranks(ranks, body, poison=True):
        assert worst_error([(value, loss.detach())]) <= 1e-12
        assert worst_error(list(zip(summed, gradients, strict=True))) <= 1e-11


def test_weights_give_the_mean_loss_of_the_batch() -> None:
    samples = [{"prompt_ids": [1, 2, 3], "completion_ids": ids} for ids in ([4, 1], [4, 2, 2], [0])]
    merged, weights = TreeCollator()(samples)
    assert merged.mask.text == "tree:3(1,1(1,2))" and weights.tolist() == [0, 0, 0, 1, 2, 1, 1, 1]
    model = Model()
    logits = model(merged.ids, torch.zeros(len(merged.ids)), lambda q, k, v: v.repeat_interleave(2, 2))  # per token
    total = torch.zeros((), dtype=torch.float64)
    for sample in samples:
        ids = torch.tensor(sample["prompt_ids"] + sample["completion_ids"])
        row = model(ids, torch.zeros(len(ids)), lambda q, k, v: v.repeat_interleave(2, 2))[0]
        total -= row[2:-1].log_softmax(-1).gather(1, ids[3:, None]).sum()

    def body(ring: Ring) -> Tensor:
        seq = ring.sequence(len(merged.ids)).with_mask(merged.mask)
        log_probs = edge_log_probs(seq.shard(logits.detach()), merged.ids, seq)
        return -(weights * log_probs).sum()

    for loss in run_ranks(2, body):
        assert worst_error([(loss, total.detach())]) <= 1e-12
    with pytest.raises(InputError, match=r"weights have lengths \[3\], the sequences \[5, 6, 4\]"):
        merged.weights([torch.ones(3)])


def test_a_row_with_several_labels_has_the_gradient_of_all() -> None:
    """In bfloat16 the gradient of a row is summed before it is rounded."""
    logits = torch.randn(1, 2, 7, generator=torch.Generator().manual_seed(4)).bfloat16()
    ids = torch.tensor([0, 3, 5, 5, 2])
    tree = masks.tree([-1, 0, 0, 0, 0], [1, 1, 1, 1, 1])

    def body(ring: Ring) -> Tensor:
        leaf = torch.cat([logits[:, :1], logits[:, 1:].expand(-1, 4, -1)], 1).requires_grad_()
        edge_log_probs(leaf, ids, ring.sequence(5).with_mask(tree)).sum().backward()
        return leaf.grad[0]

    grad = run_ranks(1, body)[0]
    exact = logits[0, 0].double().requires_grad_()
    exact.log_softmax(-1)[ids[1:]].sum().backward()
    assert (grad[0].double() - exact.grad).abs().max() <= 2.0**-8 * exact.grad.abs().max()
    assert not grad[1:].any()


def test_what_a_tree_cannot_do_is_refused() -> None:
    tree = masks.tree([-1, 0, 0], [3, 2, 3])

    def body(ring: Ring) -> None:
        plain = ring.sequence(8, layout="contiguous")
        seq = plain.with_mask(tree)
        local = seq.counts[ring.rank]
        with pytest.raises(InputError, match=r"a label per child; use seq\.edges\(\)"):
            seq.shard_labels(torch.zeros(1, 8, dtype=torch.int64))
        with pytest.raises(InputError, match=r"edges needs the mask of a tree: seq\.with_mask"):
            plain.edges()
        with pytest.raises(InputError, match=r"must be \(1, 4, vocabulary\) and \(8,\)"):
            edge_log_probs(torch.zeros(1, local, 5), torch.zeros(4, dtype=torch.int64), seq)
        with pytest.raises(DisagreementError, match="ids differ; every rank of a ring must merge the same sequences"):
            edge_log_probs(torch.zeros(1, local, 5), torch.full((8,), ring.rank), seq)
        for call in (
            lambda: ring.halo(torch.zeros(1, local), seq, 1),
            lambda: ring.scan_states(torch.ones(1, 1), torch.ones(1, 1), seq),
        ):
            with pytest.raises(UnsupportedError, match="a node of a tree continues its parent instead"):
                call()

    run_ranks(2, body)
    with pytest.raises(InputError, match="there is no sequence"):
        tree_of([])
    with pytest.raises(InputError, match="sequences of whole numbers, got float64"):
        tree_of([[0.5]])


@pytest.mark.parametrize("wrong_id", [-2, -100, 8])
@pytest.mark.parametrize("rank", [0, 1])
def test_an_id_outside_the_vocabulary_is_refused_on_all_ranks(wrong_id: int, rank: int) -> None:
    """Only the rank whose logits predict the token has the wrong label."""
    ids = torch.tensor([9, 7, 2, 3, 1, 6])  # the first token of a root is not predicted
    tree = masks.tree([-1, 0, 0], [4, 1, 1])

    def body(ring: Ring) -> None:
        seq = ring.sequence(6, layout="contiguous").with_mask(tree)
        logits = torch.zeros(1, 3, 8)
        assert edge_log_probs(logits, ids, seq)[0] == 0
        token = (2, 4)[rank]
        wrong_ids = ids.index_fill(0, torch.tensor(token), wrong_id)
        with pytest.raises(InputError, match=f"rank {rank}: id {wrong_id} of token {token} .* vocabulary of 8 tokens"):
            edge_log_probs(logits, wrong_ids, seq)

    run_ranks(2, body, timeout_s=10.0)


def test_ids_of_one_byte_are_ids() -> None:
    """As an index, torch would take uint8 for a mask."""
    tree = masks.tree([-1, 0, 0, 0], [1, 1, 1, 1])
    ids = torch.tensor([0, 3, 1, 2])
    logits = torch.randn(1, 4, 4, generator=torch.Generator().manual_seed(0))
    with Ring() as ring:
        seq = ring.sequence(4).with_mask(tree)
        expected = edge_log_probs(logits, ids, seq)
        assert torch.equal(edge_log_probs(logits, ids.to(torch.uint8), seq), expected)
        with pytest.raises(InputError, match=r"rank 0: ids must be integers, got torch\.bool"):
            edge_log_probs(logits, ids.bool(), seq)


def test_positions_count_along_the_path() -> None:
    tree = masks.tree([-1, 0, 1, 0, -1], [3, 0, 2, 2, 2])

    def body(ring: Ring) -> Tensor:
        seq = ring.sequence(9, layout="striped").with_mask(tree)
        return seq.gather(seq.positions(per_document=True)[None])[0]

    assert run_ranks(2, body)[0].tolist() == [0, 1, 2, 3, 4, 3, 4, 0, 1]


def test_ignored_labels_and_rows_keep_their_log_probs() -> None:
    """Labels that repeat over rows, and rows that are ignored, as without trees."""
    logits = torch.randn(1, 6, 5, dtype=torch.float64, requires_grad=True)
    labels = torch.tensor([[1, -100, 1, 4, -100, 0]])
    values = run_ranks(1, lambda ring: token_log_probs(logits, labels, ring.sequence(6)))[0]
    counted = labels[0] != -100
    expected = torch.zeros(6, dtype=torch.float64)
    expected[counted] = logits.detach()[0].log_softmax(-1)[counted, labels[0][counted]]
    assert worst_error([(values[0].detach(), expected)]) <= 1e-14
