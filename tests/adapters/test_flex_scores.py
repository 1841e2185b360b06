"""What a score_mod of flex_attention may be over a ring: the score itself, or a softcap; all others are refused."""

from __future__ import annotations

import pytest
import torch

from ringattn import UnsupportedError
from ringattn.adapters.flex_masks import found_softcap
from tests.adapters.test_flex import Mod, capped

LEARNED = torch.tensor(3.0, requires_grad=True)


@pytest.mark.parametrize(
    ("mod", "told"),
    [
        (lambda s, b, h, q, k: s + 0.5 * (q - k), "biases such as ALiBi"),
        (lambda s, b, h, q, k: torch.where(q >= k, s, -torch.inf), "reads the place.* Masks go into block_mask"),
        (lambda s, b, h, q, k: 2 * s, "neither the score itself"),
        (lambda s, b, h, q, k: 3.0 * torch.tanh(s / 2.0), "neither the score itself"),
        (lambda s, b, h, q, k: s + torch.ones(8)[h], "reads the place"),
        (lambda s, b, h, q, k: s if int(q) else 2 * s, "reads the place"),
        (lambda s, b, h, q, k: LEARNED * torch.tanh(s / LEARNED), "learned parameter"),
        (lambda s, b, h, q, k: s if s > 0 else 2 * s, "could not be evaluated"),
    ],
)
def test_other_score_mods_are_refused(mod: Mod, told: str) -> None:
    with pytest.raises(UnsupportedError, match=told):
        found_softcap(mod)


def test_score_mods_that_are_known() -> None:
    assert found_softcap(None) is None and found_softcap(lambda s, b, h, q, k: s) is None
    assert found_softcap(capped) == 2.5
    assert found_softcap(lambda s, b, h, q, k: torch.tanh(s * 0.02) * 50) == pytest.approx(50.0, rel=1e-15)
