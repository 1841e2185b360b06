"""Programs may set torch's default device: calls compute the same, and create their tensors on the devices of inputs.

"meta" stands for a default device that is not the device of the inputs. Its tensors have no values, and torch refuses
most operations of them with tensors on the CPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from ringattn import Ring, RingMultiheadAttention, masks
from ringattn.testing import run_ranks

TOKENS = 33
X = torch.randn(1, TOKENS, 4, 8, generator=torch.Generator().manual_seed(1))
TREE = masks.tree([-1, 0, 0], [15, 11, 7])


def attend(layout: str = "auto", schedule: str = "auto", **options: Any) -> Callable[[Ring], list[Tensor]]:
    """Return a function that attends, and returns this rank's output and gradient."""

    def call(ring: Ring) -> list[Tensor]:
        seq = ring.sequence(TOKENS, layout=layout)
        q = seq.shard(X).requires_grad_()
        out = ring.attention(q, q, q[..., :4], seq, schedule=schedule, **options)
        return [out, *torch.autograd.grad(out.square().sum(), q)]

    return call


def attend_dilated(ring: Ring) -> list[Tensor]:
    seq = ring.sequence(TOKENS)
    q = seq.shard(X)
    tails = ("ragged", "zero_pad")
    return [ring.dilated_attention(q, q, q, seq, segment_lengths=[8], dilation_rates=[2], tail=tail) for tail in tails]


def attend_to_infinity(ring: Ring) -> tuple[Tensor, Tensor]:
    """Attend to keys of -inf, whose rows the engine corrects."""
    seq = ring.sequence(TOKENS)
    q = seq.shard(X).abs() + 1
    out, lse = ring.attention(q, torch.full_like(q, -torch.inf), q, seq, causal=True, return_lse=True)
    return out, lse


def read_sequences(ring: Ring) -> Iterable[Tensor]:
    """Return positions, labels and gathered tensors."""
    tree, packed = ring.sequence(TOKENS).with_mask(TREE), ring.sequence(cu_seqlens=[0, 15, 16, TOKENS])
    for seq in (tree, packed):
        yield from (seq.positions(), seq.positions(per_document=True), seq.gather(seq.shard(X)))
    yield from tree.edges()
    yield packed.shard_labels(X.long(), ignore_index=-1)


def project(layer: RingMultiheadAttention, ring: Ring) -> list[Tensor]:
    seq = ring.sequence(TOKENS).with_mask(TREE)
    out = layer(seq.shard(X.flatten(2)), seq)
    return [out, *torch.autograd.grad(out.sum(), list(layer.parameters()))]


def read_history(ring: Ring) -> tuple[Tensor, Tensor]:
    seq = ring.sequence(TOKENS)
    return ring.halo(seq.shard(X), seq, 3)


def add_and_broadcast(ring: Ring) -> list[Tensor]:
    x = X * ring.rank
    ring.all_reduce([x])
    ring.broadcast([x])
    return [x]


CALLS: dict[str, Callable[[Ring], Iterable[Tensor]]] = {
    "attention": attend(causal=True),
    "striped": attend("striped", causal=True),
    "by the plain engine": attend(causal=True, alibi_slopes=[0.1, 0.2, 0.3, 0.4]),
    "dropout": attend(causal=True, dropout_p=0.2, dropout_seed=1),
    "tree": attend(mask=TREE),
    "packed rows": attend(schedule="ulysses", causal=True),
    "no finite score": attend_to_infinity,
    "dilated": attend_dilated,
    "sequences": read_sequences,
    "layer": partial(project, RingMultiheadAttention(32, 4, rope="neox", sinks=True, causal=True)),
    "halo": read_history,
    "collectives": add_and_broadcast,
}


@pytest.mark.parametrize("name", CALLS)
def test_calls_ignore_the_default_device(name: str) -> None:
    def body(ring: Ring) -> list[Tensor]:
        return list(CALLS[name](ring))

    def with_other_default(ring: Ring) -> list[Tensor]:
        with torch.device("meta"):
            return body(ring)

    for expected, results in zip(run_ranks(2, body), run_ranks(2, with_other_default), strict=True):
        torch.testing.assert_close(results, expected, rtol=0, atol=0, equal_nan=True)
