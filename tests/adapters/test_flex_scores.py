"""What a score_mod of flex_attention may be over a ring: softcap, ALiBi, or both; all others are refused."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import noop_mask

from ringattn import Ring, UnsupportedError
from ringattn.adapters import flex, flex_functions
from ringattn.adapters.flex import FoundMask, FoundScore, found_score
from tests.adapters.test_flex import CUTS, TOKENS, Mod, block_mask, capped, causal, dense, drawn

HEADS = 4
SLOPES = torch.tensor([0.5, 0.3, 2.0**-8, -0.1])
LEARNED = torch.tensor(3.0, requires_grad=True)
FULL, CAUSAL = FoundMask(False, None, None), FoundMask(True, None, None)


def found(mod: Mod | None, *masks: FoundMask, length: int = TOKENS, heads: int = HEADS) -> FoundScore:
    return found_score(mod, masks or (CAUSAL,), length, heads, torch.device("cpu"))


@pytest.mark.parametrize(
    ("mod", "told"),
    [
        (lambda s, b, h, q, k: s + 0.5 * q * k, "query 1, key 1 .*with its slope between neighbors, 0, makes"),
        (lambda s, b, h, q, k: torch.where(q >= k, s, -torch.inf), "makes -inf at .* Masks go into block_mask"),
        (lambda s, b, h, q, k: 2 * s, "neither the score itself"),
        (lambda s, b, h, q, k: 3.0 * torch.tanh(s / 2.0), "neither the score itself"),
        (lambda s, b, h, q, k: s + torch.ones(8)[h], "neither the score itself"),
        (lambda s, b, h, q, k: 2 * s if int(q) else s, "could not be evaluated"),
        (lambda s, b, h, q, k: LEARNED * torch.tanh(s / LEARNED), "learned parameter"),
        (lambda s, b, h, q, k: s + LEARNED * (k - q), "learned parameter"),
        (lambda s, b, h, q, k: s if s > 0 else 2 * s, "could not be evaluated"),
        (lambda s, b, h, q, k: s - SLOPES[h] * (q - k).abs() * (b + 1), "row 1 of the batch has other slopes"),
        (lambda s, b, h, q, k: s - SLOPES[h] * (q - k).abs() * (1 + (b == 1) * (q == 20)), "of row 1, head 0, where"),
        (lambda s, b, h, q, k: torch.where(q == k, s, -torch.inf), "its slope between neighbors, inf"),
        (lambda s, b, h, q, k: s - SLOPES[h] * (q - k), "query 0, key 1 of row .*, head 0, where ALiBi"),
        (lambda s, b, h, q, k: s + SLOPES[h] * k, "at query 0, key 1"),
        (lambda s, b, h, q, k: s - (SLOPES[h].bfloat16() * (q - k).abs()), "slope between neighbors, 0.30"),
        (lambda s, b, h, q, k: s - SLOPES[h] * (q - k).abs().clamp(max=30), "distance|where ALiBi"),
        (lambda s, b, h, q, k: s - SLOPES[h] * (q - k).abs() - (s > 5.9) * 1e-9 * (q > 0), "where ALiBi"),
        (lambda s, b, h, q, k: 2.5 * torch.tanh((s - SLOPES[h] * (q - k).abs()) / 2.5), "where ALiBi"),
    ],
)  # fmt: skip
def test_other_score_mods_are_refused(mod: Mod, told: str) -> None:
    with pytest.raises(UnsupportedError, match=told) as raised:
        found(mod, FULL, FULL)
    assert r"ALiBi, - slope[head] * abs(query - key)" in str(raised.value)


def test_score_mods_that_are_known() -> None:
    assert found(None) == found(lambda s, b, h, q, k: s) == FoundScore()
    assert found(capped) == FoundScore(2.5)
    assert found(lambda s, b, h, q, k: torch.tanh(s * 0.02) * 50).softcap == pytest.approx(50.0, rel=1e-15)
    assert found(lambda s, b, h, q, k: s + 0 * k) == FoundScore()


def by_formula(score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    """The slopes of the paper, for 4 heads."""
    return score + (k - q) * torch.exp2(-((h + 1) * 8.0 / HEADS))


ALIBI: dict[str, tuple[Mod, FoundMask]] = {
    "symmetric": (lambda s, b, h, q, k: s - SLOPES[h] * (q - k).abs(), FULL),
    "key minus query": (lambda s, b, h, q, k: s + SLOPES[h] * (k - q), CAUSAL),
    "query minus key": (lambda s, b, h, q, k: s - (q - k) * SLOPES[h], CAUSAL),
    "in floating point": (lambda s, b, h, q, k: s + SLOPES[h] * (k.float() - q.float()), CAUSAL),
    "apart": (lambda s, b, h, q, k: s + SLOPES[h].double() * k - SLOPES[h].double() * q, CAUSAL),
    "in a window": (lambda s, b, h, q, k: s - SLOPES[h] * torch.abs(k - q), FoundMask(False, (6, 3), None)),
    "ahead": (lambda s, b, h, q, k: s - SLOPES[h] * (k - q), FoundMask(False, (0, None), None)),
    "as a mask too": (
        lambda s, b, h, q, k: torch.where(q >= k, s + SLOPES[h] * (k - q), -torch.inf),
        FoundMask(True, None, CUTS),
    ),
    "by places in documents": (
        lambda s, b, h, q, k: s + SLOPES[h] * (WITHIN[k] - WITHIN[q]),
        FoundMask(True, None, CUTS),
    ),
    "of one token in each document": (
        lambda s, b, h, q, k: s - SLOPES[h] * (q - k).abs(),
        FoundMask(False, None, (0, 1, 2, TOKENS)),
    ),
}
WITHIN = torch.cat([torch.arange(stop - start) for start, stop in pairwise(CUTS)])


@pytest.mark.parametrize("name", ALIBI)
def test_alibi_is_recognized(name: str) -> None:
    mod, mask = ALIBI[name]
    wanted = tuple(SLOPES.double().tolist())
    assert found(mod, mask, mask) == FoundScore(None, wanted)

    def both(s: Tensor, *place: Tensor) -> Tensor:
        return mod(capped(s, *place), *place)

    assert found(both, mask) == FoundScore(2.5, wanted)


def test_alibi_by_the_formula_of_the_paper_and_without_neighbors() -> None:
    slopes = found(by_formula).alibi_slopes
    assert slopes == tuple(2.0 ** (-2 * (head + 1)) for head in range(HEADS))
    thirds = found(lambda s, b, h, q, k: s - (q - k) / 3 * (h + 1)).alibi_slopes
    assert thirds is not None and thirds == pytest.approx([(head + 1) / 3 for head in range(HEADS)], rel=2**-22)
    alone = FoundMask(False, (0, 0), None)
    assert found(lambda s, b, h, q, k: s + 5 * (q - k), alone) == FoundScore()


@pytest.mark.parametrize("exception", ["distance", "end", "pair", "head"])
def test_all_pairs_are_compared(monkeypatch: pytest.MonkeyPatch, exception: str) -> None:
    """Whatever the sizes of tiles and pieces."""
    monkeypatch.setattr(flex_functions, "TILE_TOKENS", 11)
    monkeypatch.setattr(flex, "TILE_TOKENS", 11)
    monkeypatch.setattr(flex_functions, "PIECE_PAIRS", 300)

    def almost(s: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        odd = {
            "distance": (q - k == 23) & (k > 0),
            "end": (q > 3) & (q < 20) & (k == q),
            "pair": (q == 30) & (k == 17),
            "head": (h == 3) & (q == 30),
        }[exception]
        return s + SLOPES[h] * (k - q) + 0.01 * odd

    if exception == "distance":
        for mod, mask in ALIBI.values():
            assert found(mod, mask).alibi_slopes == tuple(SLOPES.double().tolist())
    with pytest.raises(UnsupportedError, match="where ALiBi with its slope"):
        found(almost)


def test_what_was_found_is_kept_for_each_mask_until_the_slopes_change(monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers with other masks take turns with one score_mod."""
    slopes, calls, (q, k, v, _) = SLOPES.double(), list[object](), drawn(kv_heads=4)

    def counted(*args: Any) -> FoundScore:
        calls.append(args)
        return found_score(*args)

    monkeypatch.setattr(flex, "found_score", counted)

    def mod(s: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return s - slopes[h] * (q - k).abs()

    masks = [block_mask(one) for one in (causal, noop_mask)]
    with Ring() as ring, ring.activate(ring.sequence(TOKENS)):
        for _ in range(2):
            for one in masks:
                flex.flex_attention(q, k, v, mod, one)
        assert len(calls) == 2
        slopes *= 2
        out = flex.flex_attention(q, k, v, mod, masks[0])
        assert len(calls) == 3
    torch.testing.assert_close(out, dense(q, k, v, causal, mod)[0], rtol=1e-12, atol=1e-12)
    assert found_score(mod, (CAUSAL,), 0, HEADS, q.device) == FoundScore()
