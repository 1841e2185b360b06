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


def test_softcap_is_c_tanh_of_s_over_c() -> None:
    q, k, v = inputs((3, 1), (1, 1), (1, 1))
    _, lse = attention(q, k, v, torch.ones(3, 1).bool(), 2.0, softcap=1.5)
    s = 2.0 * torch.einsum("bnhd,bmhd->bhn", q, k)
    torch.testing.assert_close(lse, 1.5 * torch.tanh(s / 1.5), rtol=0, atol=1e-13)


def test_a_sink_is_a_key_without_a_value() -> None:
    q, k, v = inputs((4, 2), (5, 2), (5, 2))
    sinks = torch.tensor([0.3, -2.0])
    out, lse = attention(q, k, v, torch.ones(4, 5).bool(), 0.4, sinks=sinks)
    plain_out, plain_lse = attention(q, k, v, torch.ones(4, 5).bool(), 0.4)
    wanted = torch.logaddexp(plain_lse, sinks.double()[None, :, None].expand_as(plain_lse))
    torch.testing.assert_close(lse, wanted, rtol=0, atol=1e-13)
    share = torch.exp(plain_lse - wanted).transpose(1, 2).unsqueeze(-1)
    torch.testing.assert_close(out, plain_out * share, rtol=0, atol=1e-13)


@pytest.mark.parametrize("sinks", [None, torch.tensor([0.3, -2.0], dtype=torch.float64)])
def test_blind_queries_give_zero_and_finite_gradients(sinks: torch.Tensor | None) -> None:
    q, k, v = inputs((4, 2), (5, 2), (5, 2))
    allowed = torch.ones(2, 4, 5, dtype=torch.bool)
    allowed[:, 1] = allowed[0, 3] = False
    out, lse = attention(q, k, v, allowed, 0.4, sinks=sinks)
    assert not out[:, 1].any() and not out[:, 3, 0].any() and out[:, 3, 1].all()
    assert (lse[:, 0, 1] == (float("-inf") if sinks is None else 0.3)).all()
    (out.sum() + lse[lse.isfinite()].sum()).backward()
    assert all(x.grad is not None and x.grad.isfinite().all() for x in (q, k, v))
    assert torch.autograd.gradcheck(lambda a, b, c: attention(a, b, c, allowed, 0.4, 1.5, sinks)[0], (q, k, v))


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
