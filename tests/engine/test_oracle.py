"""The oracle against torch's own attention, hand-made masks and finite differences: it must not share our mistakes."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from tests.oracle import allowed_mask, attention


def inputs(*tokens_heads: tuple[int, int]) -> list[torch.Tensor]:
    torch.manual_seed(0)
    return [torch.randn(2, n, h, 6, dtype=torch.float64, requires_grad=True) for n, h in tokens_heads]


def drawn(mask: torch.Tensor) -> list[str]:
    return ["".join("x" if seen else "." for seen in row) for row in mask.tolist()]


@pytest.mark.parametrize("causal", [False, True])
def test_agrees_with_torch(causal: bool) -> None:
    q, k, v = inputs((9, 4), (9, 2), (9, 2))
    out, lse = attention(q, k, v, allowed_mask(9, 9, causal=causal), 0.4)
    qh, kh, vh = (x.transpose(1, 2) for x in (q, k, v))
    theirs = scaled_dot_product_attention(qh, kh, vh, is_causal=causal, scale=0.4, enable_gqa=True).transpose(1, 2)
    torch.testing.assert_close(out, theirs, rtol=0, atol=1e-13)
    scores = (qh @ kh.repeat_interleave(2, 1).mT * 0.4).masked_fill(
        ~torch.ones(9, 9).tril().bool() if causal else torch.zeros(9, 9).bool(), float("-inf")
    )
    torch.testing.assert_close(lse, scores.logsumexp(-1), rtol=0, atol=1e-13)


def test_masks_by_hand() -> None:
    assert drawn(allowed_mask(3, 4)) == ["xxxx"] * 3
    assert drawn(allowed_mask(3, 4, causal=True)) == ["x...", "xx..", "xxx."]
    assert drawn(allowed_mask(4, 4, window=(1, 0))) == ["x...", "xx..", ".xx.", "..xx"]
    assert drawn(allowed_mask(4, 4, window=(-1, 1))) == ["xx..", "xxx.", "xxxx", "xxxx"]
    assert drawn(allowed_mask(4, 4, causal=True, window=(2, None))) == ["x...", "xx..", "xxx.", ".xxx"]
    assert drawn(allowed_mask(4, 4, cu_seqlens=[0, 1, 4], causal=True)) == ["x...", ".x..", ".xx.", ".xxx"]
    paired = allowed_mask(4, 5, cu_seqlens=[0, 2, 4], kv_cu_seqlens=[0, 3, 5], causal=True)
    assert drawn(paired) == ["x....", "xx...", "...x.", "...xx"]
    assert drawn(allowed_mask(2, 3, cu_seqlens=[0, 0, 2], kv_cu_seqlens=[0, 1, 3])) == [".xx", ".xx"]
