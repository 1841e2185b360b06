"""The reference equals torch and hand-written values. See `tests/core/test_dilated_reference.py` for dilated calls."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from ringattn import masks
from tests import oracle
from tests.fuzz import reference
from tests.fuzz.legal import has_no_layout
from tests.kernels.eight_bits import rounded

EXACT = 1e-12


def _qkv(tokens: int, kv_tokens: int, heads: tuple[int, int], dims: tuple[int, int] = (5, 4)) -> list[torch.Tensor]:
    random = torch.Generator().manual_seed(tokens)
    sizes = (tokens, heads[0], dims[0]), (kv_tokens, heads[1], dims[0]), (kv_tokens, heads[1], dims[1])
    return [torch.randn(2, *size, dtype=torch.float64, generator=random).requires_grad_() for size in sizes]


@pytest.mark.parametrize("tokens", [0, 1])
def test_a_query_without_keys(tokens: int) -> None:
    q, k, v = _qkv(3, tokens, (2, 1))
    out, lse = reference.attention(q, k, v, reference.Counts(torch.zeros(1, 1, 3, tokens).double()))
    assert out.eq(0).all() and lse.isneginf().all()


@pytest.mark.parametrize("code", ["int8", "float8_e4m3fn"])
def test_rounding_follows_its_definition(code: str) -> None:
    x = torch.randn(3, 7, 2, 5, generator=torch.Generator().manual_seed(3))
    assert torch.equal(reference.eight_bits(x.double(), code, torch.float32).float(), rounded(x, code))


def test_shards_by_hand() -> None:
    def shard_lists(*arguments: object) -> list[list[int]]:
        return [rows.tolist() for rows in reference.shards(*arguments)]  # type: ignore[arg-type]

    assert shard_lists("contiguous", 5, 2, None) == [[0, 1, 2], [3, 4]]
    assert shard_lists("striped", 5, 3, None) == [[0, 3], [1, 4], [2]]
    assert shard_lists("zigzag", 9, 2, None) == [[0, 1, 2, 7, 8], [3, 4, 5, 6]]
    assert shard_lists("per_document", 6, 2, [0, 1, 1, 6]) == [[0, 1, 5], [2, 3, 4]]


# --- against torch's own attention -----------------------------------------------------------------------------------


@pytest.mark.parametrize("causal", [False, True])
def test_the_reference_equals_torch(causal: bool) -> None:
    q, k, v = _qkv(9, 9, (4, 2), (6, 6))
    out, lse = oracle.attention(q, k, v, oracle.allowed_mask(9, 9, causal=causal), 0.4)
    qh, kh, vh = (x.transpose(1, 2) for x in (q, k, v))
    theirs = scaled_dot_product_attention(qh, kh, vh, is_causal=causal, scale=0.4, enable_gqa=True).transpose(1, 2)
    torch.testing.assert_close(out, theirs, rtol=0, atol=1e-13)
    hidden = torch.ones(9, 9).triu(1).bool() & causal
    scores = (qh @ kh.repeat_interleave(2, 1).mT * 0.4).masked_fill(hidden, float("-inf"))
    torch.testing.assert_close(lse, scores.logsumexp(-1), rtol=0, atol=1e-13)


MASKS: list[tuple[tuple[int, int], dict[str, Any], str]] = [
    ((3, 4), {}, "xxxx xxxx xxxx"),
    ((3, 4), {"causal": True}, "x... xx.. xxx."),
    ((4, 4), {"window": (1, 0)}, "x... xx.. .xx. ..xx"),
    ((4, 4), {"window": (-1, 1)}, "xx.. xxx. xxxx xxxx"),
    ((4, 4), {"causal": True, "window": (2, None)}, "x... xx.. xxx. .xxx"),
    ((4, 4), {"cu_seqlens": [0, 1, 4], "causal": True}, "x... .x.. .xx. .xxx"),
    ((4, 5), {"cu_seqlens": [0, 2, 4], "kv_cu_seqlens": [0, 3, 5], "causal": True}, "x.... xx... ...x. ...xx"),
    ((2, 3), {"cu_seqlens": [0, 0, 2], "kv_cu_seqlens": [0, 1, 3]}, ".xx .xx"),
]


@pytest.mark.parametrize(("sizes", "options", "picture"), MASKS)
def test_masks_by_hand(sizes: tuple[int, int], options: dict[str, Any], picture: str) -> None:
    rows = oracle.allowed_mask(*sizes, **options).tolist()
    assert " ".join("".join("x" if seen else "." for seen in row) for row in rows) == picture


@pytest.mark.parametrize(
    ("slices", "ends"),
    [("0-0x0-2f", False), ("0-2x1-1c", False), ("0-2x0-1b", False), ("0-1x0-2s", True), ("0-2x0-1f", True)],
)
def test_only_slices_with_pairs_can_end_after_the_sequence(slices: str, ends: bool) -> None:
    described = {"length": 1, "documents": None, "layout": "mask", "for_": "full", "mask": f"slices:{slices}"}
    assert (has_no_layout(described) is not None) == ends
    mask = masks.from_text(f"slices:{slices}")
    assert isinstance(mask, masks.Slices)
    assert (mask.rectangles.array[:, [1, 3]].max(initial=0) > 1) == ends
