"""Dropout of layers: in training mode, by the seed of the call, alike for any number of ranks."""

from __future__ import annotations

from copy import deepcopy

import pytest
import torch
from torch import Tensor

from ringattn import Ring, RingAttention, RingDilatedAttention, RingMultiheadAttention
from ringattn.errors import InputError
from ringattn.testing import run_ranks

EMBED, HEADS = 16, 4


def test_dropout_in_training_mode_with_the_seed_of_the_call() -> None:
    x = torch.randn(1, 12, EMBED, dtype=torch.float64)
    # Made once: ranks are threads here, and draw from one generator.
    made = RingMultiheadAttention(EMBED, HEADS, dropout=0.4, causal=True).double()

    def body(ring: Ring) -> list[Tensor]:
        seq, layer = ring.sequence(12), deepcopy(made)
        mine, found = seq.shard(x), []
        for seed in (5, 5, 6):
            found.append(layer(mine, seq, dropout_seed=seed))
        with pytest.raises(InputError, match=r"dropout_p=0\.4 needs a dropout_seed, the same on all ranks"):
            layer(mine, seq)
        core = RingAttention(causal=True, dropout_p=0.4)
        q = mine.unflatten(2, (HEADS, -1))
        found += [core(q, q, q, seq, dropout_seed=5), ring.attention(q, q, q, seq, causal=True, dropout_p=0.4,
                                                                     dropout_seed=5)]  # fmt: skip
        layer.eval(), core.eval()
        found += [layer(mine, seq), core(q, q, q, seq), ring.attention(q, q, q, seq, causal=True)]
        return [seq.gather(one.detach().flatten(2)) for one in found]

    alone, shared = run_ranks(1, body)[0], run_ranks(3, body)[0]
    for one, other in zip(alone, shared, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-12)
    first, again, another, core, call, off, core_off, call_off = alone
    assert torch.equal(first, again) and not torch.allclose(first, another) and not torch.allclose(first, off)
    assert torch.equal(core, call) and torch.equal(core_off, call_off) and not torch.allclose(core, core_off)


def test_a_seed_belongs_to_a_call() -> None:
    with pytest.raises(InputError, match="dropout_seed: it belongs to a call"):
        RingAttention(dropout_p=0.1, dropout_seed=1)
    with pytest.raises(InputError, match="this layer calls it dropout"):
        RingMultiheadAttention(EMBED, HEADS, dropout_p=0.1)
    with pytest.raises(InputError, match=r"this layer has no dropout; call ring\.dilated_attention"):
        RingDilatedAttention([4], [1], dropout_p=0.1)
