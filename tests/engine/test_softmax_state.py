"""The merge of softmax states: the laws that let steps come in any order, and rows that have seen nothing."""

from __future__ import annotations

import torch
from torch import Tensor

from ringattn.engine.base import by_row, identity, merge_, weights

Partial = tuple[Tensor, Tensor]
NEG_INF = float("-inf")


def partial(seed: int, blind: float = 0.3) -> Partial:
    """A random partial of 6 rows, 2 batches, 3 heads, dim 4, in which some rows have seen nothing."""
    generator = torch.Generator().manual_seed(seed)
    out = torch.randn(6, 2, 3, 4, generator=generator, dtype=torch.float64)
    lse = 5 * torch.randn(2, 3, 6, generator=generator, dtype=torch.float64)
    unseen = torch.rand(2, 3, 6, generator=generator) < blind
    return out.masked_fill(by_row(unseen), 0.0), lse.masked_fill(unseen, NEG_INF)


def merged(into: Partial, *parts: Partial) -> Partial:
    out, lse = into[0].clone(), into[1].clone()
    for part in parts:
        merge_(out, lse, *part)
    return out, lse


def test_merge_is_the_softmax_over_both_sets_of_keys() -> None:
    scores, values = torch.randn(2, 3, 6, 10, dtype=torch.float64), torch.randn(2, 3, 10, 4, dtype=torch.float64)

    def over(keys: slice) -> Partial:
        out = torch.softmax(scores[..., keys], -1) @ values[:, :, keys]
        return out.permute(2, 0, 1, 3), scores[..., keys].logsumexp(-1)

    torch.testing.assert_close(merged(over(slice(0, 3)), over(slice(3, 10))), over(slice(0, 10)), rtol=0, atol=1e-14)


def test_identity_changes_no_bit_on_either_side() -> None:
    part = partial(1)
    empty = identity(6, 2, 3, 4, part[0])
    for both in (merged(part, empty), merged(empty, part)):
        assert all(torch.equal(x, y) for x, y in zip(both, part, strict=True))


def test_rows_that_nobody_saw_stay_blind() -> None:
    out, lse = merged(partial(1, blind=1.0), partial(2, blind=1.0))
    assert not out.any() and lse.isneginf().all()


def test_merge_writes_in_place_into_strided_views() -> None:
    held = torch.full((2, 8, 3, 4), 7.0, dtype=torch.float64)
    out, part = held.transpose(0, 1)[1:-1], partial(1)
    out.zero_()
    merge_(out, torch.full_like(part[1], NEG_INF), *part)
    assert torch.equal(held.transpose(0, 1)[1:-1], part[0])
    assert (held[:, 0] == 7.0).all() and (held[:, -1] == 7.0).all()


def test_weights_of_an_unseen_part_are_zero() -> None:
    assert weights(torch.tensor(NEG_INF), torch.tensor(NEG_INF)) == 0.0
    assert weights(torch.tensor(NEG_INF), torch.tensor(1.0)) == 0.0
