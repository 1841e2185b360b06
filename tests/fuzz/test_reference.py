"""The fuzzer's reference against what others wrote: the tests' oracles, and torch itself."""

from __future__ import annotations

from random import Random

import pytest
import torch
import torch.nn.functional as F

from tests import oracle
from tests.core.dilated_reference import dilated_reference
from tests.fuzz import reference
from tests.kernels.eight_bits import rounded

EXACT = 1e-12


def _qkv(tokens: int, kv_tokens: int, heads: tuple[int, int], dims: tuple[int, int] = (5, 4)) -> list[torch.Tensor]:
    random = torch.Generator().manual_seed(tokens)
    sizes = (tokens, heads[0], dims[0]), (kv_tokens, heads[1], dims[0]), (kv_tokens, heads[1], dims[1])
    return [torch.randn(2, *size, dtype=torch.float64, generator=random).requires_grad_() for size in sizes]


def _same(found: tuple[torch.Tensor, ...], wanted: tuple[torch.Tensor, ...], leaves: list[torch.Tensor]) -> None:
    for one, other in zip(found, wanted, strict=True):
        assert one.shape == other.shape and torch.equal(one.isinf(), other.isinf())
        assert (one - other).masked_fill(one.isinf(), 0).abs().max() <= EXACT
    grads = [
        torch.autograd.grad(out.sin().sum() + torch.where(lse.isinf(), 0.0, lse).cos().sum(), leaves, allow_unused=True)
        for out, lse in (found, wanted)
    ]
    for one, other in zip(*grads, strict=True):
        assert (one is None) == (other is None)
        assert one is None or (one - other).abs().max() <= EXACT


@pytest.mark.parametrize("seed", range(12))
def test_plain_masks_are_the_oracles(seed: int) -> None:
    r = Random(seed)
    tokens, causal = r.randint(1, 20), r.random() < 0.5
    cuts = [0, *sorted(r.randint(0, tokens) for _ in range(2)), tokens] if seed % 2 else None
    window = (r.choice([None, -1, 0, 3]), r.choice([None, 0] if causal else [None, -1, 0, 2])) if seed % 3 else None
    sinks = torch.randn(4, dtype=torch.float64, requires_grad=True) if seed % 4 == 0 else None
    softcap = 2.0 if seed % 5 == 0 else None
    leaves = _qkv(tokens, tokens, (4, 2))
    counts = reference.plain_counts(tokens, cuts, tokens, cuts, causal, window)
    allowed = oracle.allowed_mask(tokens, tokens, causal=causal, window=window, cu_seqlens=cuts)
    wanted = oracle.attention(*leaves, allowed, 0.3, softcap, sinks)
    found = reference.attention(*leaves, counts, 0.3, softcap, sinks)
    _same(found, wanted, leaves if sinks is None else [*leaves, sinks])


@pytest.mark.parametrize("seed", range(16))
def test_dilated_masks_are_the_references(seed: int) -> None:
    r = Random(seed)
    tokens, count = r.randint(1, 24), r.choice([1, 2, 3])
    offset = ("mod", "block", "kv_head", "layer_rotated")[seed % 4]
    cuts = [0, *sorted(r.randint(0, tokens) for _ in range(2)), tokens] if seed % 2 else None
    options = {
        "segment_lengths": [r.randint(1, 16) for _ in range(count)],
        "dilation_rates": [r.randint(1, 5) for _ in range(count)],
        "causal": r.random() < 0.4, "offset": offset, "layer": 3 if offset == "layer_rotated" else None,
        "tail": r.choice(["ragged", "zero_pad"]),
    }  # fmt: skip
    grad, leaves = r.choice(["exact", "detached"]), _qkv(tokens, tokens, (6, 3))
    counts = reference.dilated_counts(tokens, cuts, (6, 3), **options)
    wanted = dilated_reference(*leaves, **options, documents=cuts, grad=grad)
    _same(reference.attention(*leaves, counts, detached=grad == "detached"), wanted, leaves)


def test_attention_is_torchs() -> None:
    leaves = _qkv(17, 17, (4, 2), (8, 8))
    q, k, v = (x.transpose(1, 2) for x in leaves)
    wanted = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(1, 2)
    found, _ = reference.attention(*leaves, reference.plain_counts(17, None, 17, None, causal=True))
    assert (found - wanted).abs().max() <= EXACT


def test_other_keys_than_queries() -> None:
    leaves = _qkv(6, 11, (2, 1))
    allowed = oracle.allowed_mask(6, 11, causal=True, cu_seqlens=[0, 2, 6], kv_cu_seqlens=[0, 8, 11])
    counts = reference.plain_counts(6, [0, 2, 6], 11, [0, 8, 11], causal=True)
    _same(reference.attention(*leaves, counts, 1.0), oracle.attention(*leaves, allowed, 1.0), leaves)


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
