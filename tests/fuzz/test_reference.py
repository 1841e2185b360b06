"""The reference by hand, where `tests/engine/test_oracle.py` and `tests/core/test_dilated_reference.py` do not."""

from __future__ import annotations

import pytest
import torch

from tests.fuzz import reference
from tests.kernels.eight_bits import rounded

EXACT = 1e-12


def _qkv(tokens: int, kv_tokens: int, heads: tuple[int, int], dims: tuple[int, int] = (5, 4)) -> list[torch.Tensor]:
    random = torch.Generator().manual_seed(tokens)
    sizes = (tokens, heads[0], dims[0]), (kv_tokens, heads[1], dims[0]), (kv_tokens, heads[1], dims[1])
    return [torch.randn(2, *size, dtype=torch.float64, generator=random).requires_grad_() for size in sizes]


@pytest.mark.parametrize("tokens", [0, 1])
def test_nothing_to_see(tokens: int) -> None:
    q, k, v = _qkv(3, tokens, (2, 1))
    out, lse = reference.attention(q, k, v, reference.Counts(torch.zeros(1, 1, 3, tokens).double()))
    assert out.eq(0).all() and lse.isneginf().all()


@pytest.mark.parametrize("code", ["int8", "float8_e4m3fn"])
def test_rounding_is_that_of_the_definition(code: str) -> None:
    x = torch.randn(3, 7, 2, 5, generator=torch.Generator().manual_seed(3))
    assert torch.equal(reference.eight_bits(x.double(), code, torch.float32).float(), rounded(x, code))


def test_shards_by_hand() -> None:
    def listed(*arguments: object) -> list[list[int]]:
        return [one.tolist() for one in reference.shards(*arguments)]  # type: ignore[arg-type]

    assert listed("contiguous", 5, 2, None) == [[0, 1, 2], [3, 4]]
    assert listed("striped", 5, 3, None) == [[0, 3], [1, 4], [2]]
    assert listed("zigzag", 9, 2, None) == [[0, 1, 2, 7, 8], [3, 4, 5, 6]]
    assert listed("per_document", 6, 2, [0, 1, 1, 6]) == [[0, 1, 5], [2, 3, 4]]
