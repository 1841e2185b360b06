"""Attention in groups of heads: values, gradients, passes of the ring, and memory.

The reference is dense attention of one process in float64, written out below. Ranks are threads.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ringattn import Ring, Sequence
from ringattn.bench.storage_meter import StorageMeter
from ringattn.errors import InputError
from ringattn.layers import head_groups
from ringattn.layers.head_groups import HeadGroups, check_head_groups, in_head_groups
from ringattn.testing import run_ranks

DIM, HEADS, KV_HEADS, HEAD = 12, 8, 4, 6
DOCUMENTS = (0, 5, 6, 19, 23)


class Layer(nn.Module):
    """Projections with biases, attention, and an output projection with a bias."""

    def __init__(self, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        torch.manual_seed(0)
        columns = (HEADS * HEAD, KV_HEADS * HEAD, KV_HEADS * HEAD)
        self.q, self.k, self.v = (nn.Linear(DIM, count, dtype=dtype) for count in columns)
        self.out = nn.Linear(HEADS * HEAD, DIM, dtype=dtype)

    def dense(self, x: Tensor) -> Tensor:
        """Return causal attention within documents, one head after another."""
        q, k, v = (part(x).unflatten(-1, (-1, HEAD)) for part in (self.q, self.k, self.v))
        position = torch.arange(x.shape[1])
        document = torch.bucketize(position, torch.tensor(DOCUMENTS), right=True)
        allowed = (position[:, None] >= position) & (document[:, None] == document)
        heads = []
        for head in range(HEADS):
            kv = head * KV_HEADS // HEADS
            scores = (q[:, :, head] @ k[:, :, kv].mT / HEAD**0.5).masked_fill(~allowed, float("-inf"))
            heads.append(scores.softmax(-1) @ v[:, :, kv])
        return self.out(torch.cat(heads, -1))

    def ring(self, x: Tensor, seq: Sequence, groups: int) -> Tensor:
        """Return the same of a shard, in groups of heads."""

        def attention(x: Tensor, group: int) -> Tensor:
            q, k, v = (
                F.linear(x, part.weight.chunk(groups)[group], part.bias.chunk(groups)[group]).unflatten(-1, (-1, HEAD))
                for part in (self.q, self.k, self.v)
            )
            return seq.ring.attention(q, k, v, seq, causal=True).flatten(2)

        weights = [weight for part in (self.q, self.k, self.v) for weight in part.parameters()]
        return in_head_groups(HeadGroups(attention, groups), x, weights, self.out.weight, self.out.bias)


def compare(world_size: int, groups: int, again: bool, batch: int = 2, frozen: tuple[str, ...] = ()) -> None:
    """Compare values, gradients and the number of passes with the reference."""
    layer, generator = Layer(), torch.Generator().manual_seed(groups)
    x, weight = (torch.randn(batch, DOCUMENTS[-1], DIM, generator=generator, dtype=torch.float64) for _ in range(2))
    for name, parameter in layer.named_parameters():
        parameter.requires_grad_(not name.startswith(frozen))
    needs_x = "x" not in frozen
    shared = copy.deepcopy(layer)
    x.requires_grad_(needs_x)
    expected = layer.dense(x)
    (expected * weight).sum().backward()

    def of_rank(ring: Ring) -> tuple[Any, ...]:
        part, seq = copy.deepcopy(shared), ring.sequence(DOCUMENTS[-1], cu_seqlens=DOCUMENTS)
        shard = seq.shard(x.detach()).requires_grad_(needs_x)

        def run(x: Tensor) -> Tensor:
            return part.ring(x, seq, groups)

        ring.reset_counters()
        out = checkpoint(run, shard, use_reentrant=False) if again else run(shard)
        (out * seq.shard(weight)).sum().backward()
        grads = {name: parameter.grad for name, parameter in part.named_parameters() if parameter.grad is not None}
        ring.all_reduce(list(grads.values()))
        dx = seq.gather(shard.grad) if needs_x else None
        return seq.gather(out.detach()), dx, grads, ring.counters()["passes"]

    reference = {name: parameter.grad for name, parameter in layer.named_parameters() if parameter.grad is not None}
    for out, dx, grads, passes in run_ranks(world_size, of_rank):
        torch.testing.assert_close(out, expected.detach(), rtol=1e-12, atol=1e-13)
        torch.testing.assert_close(dx, x.grad, rtol=1e-12, atol=1e-12)
        assert grads.keys() == reference.keys()
        for name, grad in grads.items():
            torch.testing.assert_close(grad, reference[name], rtol=1e-12, atol=1e-12)
        # A forward and a backward pass for each group; a checkpoint around the layer repeats forward once.
        assert passes == groups * (3 if again else 2)


def test_groups_equal_dense_attention() -> None:
    compare(2, 4, again=True)
    compare(1, 2, again=False, frozen=("x",))


def test_the_output_projection_is_trained_alone() -> None:
    compare(2, 2, again=False, frozen=("x", "q", "k", "v"))


@pytest.mark.slow
@pytest.mark.parametrize("again", [False, True])
@pytest.mark.parametrize("groups", [1, 2, 4])
@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_every_number_of_groups_equals_dense_attention(world_size: int, groups: int, again: bool) -> None:
    for frozen in ((), ("x",), ("q",), ("k.bias",), ("out",), ("x", "q", "k", "v")):
        compare(world_size, groups, again, frozen=frozen)


def test_the_output_projection_in_tiles_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(head_groups, "PRODUCT_ROWS", 5)
    compare(2, 2, again=False, batch=1)


@pytest.mark.parametrize("trained", ["none", "out"])
def test_a_rank_without_gradients_of_heads_takes_part_in_the_backward_passes(trained: str) -> None:
    layer = Layer()

    def of_rank(ring: Ring) -> int:
        part, seq = copy.deepcopy(layer), ring.sequence(16)
        for name, parameter in part.named_parameters():
            parameter.requires_grad_(ring.rank == 0 or name.startswith(trained))
        out = part.ring(torch.ones(1, 8, DIM, dtype=torch.float64), seq, 2)
        out.sum().backward()
        return ring.counters()["passes"]

    assert run_ranks(2, of_rank) == [4, 4]


def test_without_gradients_nothing_is_kept() -> None:
    def of_rank(ring: Ring) -> None:
        with torch.no_grad():
            assert Layer().ring(torch.ones(1, 8, DIM, dtype=torch.float64), ring.sequence(8), 2).grad_fn is None

    run_ranks(1, of_rank)


@pytest.mark.parametrize(("groups", "message"), [(3, "must divide the 4 K/V heads"), (0, "at least 1"), ("2", "at le")])
def test_wrong_numbers_of_groups_are_refused(groups: Any, message: str) -> None:
    with pytest.raises(InputError, match=f"^head_groups.*{message}"):
        check_head_groups(groups, 4)


def test_hooks_of_weights_run_once_with_the_sum_of_all_groups() -> None:
    layer, x = Layer(), torch.ones(1, DOCUMENTS[-1], DIM, dtype=torch.float64).cumsum(1) / DOCUMENTS[-1]
    grouped = copy.deepcopy(layer)
    for part in (layer, grouped):
        for weight in part.parameters():
            weight.register_hook(lambda grad: grad.clamp(-0.1, 0.1))
    layer.dense(x).sum().backward()

    def of_rank(ring: Ring) -> None:
        grouped.ring(x, ring.sequence(DOCUMENTS[-1], cu_seqlens=DOCUMENTS), 2).sum().backward()

    run_ranks(1, of_rank)
    assert layer.v.weight.grad is not None and layer.v.weight.grad.abs().max() == 0.1
    for weight, reference in zip(grouped.parameters(), layer.parameters(), strict=True):
        torch.testing.assert_close(weight.grad, reference.grad, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("frozen", [False, True])
def test_weights_changed_between_forward_and_backward_are_refused(frozen: bool) -> None:
    def of_rank(ring: Ring) -> None:
        layer = Layer()
        layer.q.weight.requires_grad_(not frozen)
        out = layer.ring(torch.ones(1, 8, DIM, dtype=torch.float64), ring.sequence(8), 2)
        with torch.no_grad():
            layer.q.weight.mul_(2)
        with pytest.raises(RuntimeError, match="a weight has changed in place"):
            out.sum().backward()

    run_ranks(1, of_rank)


def test_the_tensors_of_heads_exist_for_one_group() -> None:
    tokens = 512

    def peak_bytes(groups: int) -> int:
        def of_rank(ring: Ring) -> int:
            layer, seq = Layer(torch.float32), ring.sequence(tokens)
            x = torch.ones(1, tokens, DIM).requires_grad_()
            layer.ring(x, seq, groups).sum().backward()
            with StorageMeter() as storages:
                layer.ring(x, seq, groups).sum().backward()
            return storages.peak_bytes

        return run_ranks(1, of_rank)[0]

    # All heads at once have, at the largest moment, at least q, k, v and dq, dk, dv in float32. Each further group
    # saves its share of them.
    whole = 2 * tokens * (HEADS + 2 * KV_HEADS) * HEAD * 4
    assert peak_bytes(1) - peak_bytes(2) >= whole / 2
    assert peak_bytes(1) - peak_bytes(4) >= whole * 3 / 4
