"""Rotary positions with XPos: its definition, distances only, and where its factors would overflow."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from ringattn.errors import InputError
from ringattn.layers.rotary import Rope, rotate, rotation

DIM = 8
POSITIONS = torch.tensor([0, 3, 17, 100, 511])


def random(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
@pytest.mark.parametrize("style", ["neox", "interleaved"])
def test_without_xpos_both_turns_are_the_rotation(style: str, dtype: torch.dtype) -> None:
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    plain = rotation(POSITIONS, DIM, 500.0, wide, style == "interleaved")
    for turn in Rope(style, 500.0).turns(POSITIONS, DIM, dtype):
        assert torch.equal(turn.cos, plain.cos) and torch.equal(turn.sin, plain.sin)
        assert turn.cos.dtype == wide and turn.interleaved == plain.interleaved


@pytest.mark.parametrize("style", ["neox", "interleaved"])
def test_xpos_is_its_definition(style: str) -> None:
    x, length, scale = random(1, len(POSITIONS), 1, DIM, seed=1), 512, 64.0
    turns = Rope(style, 500.0, scale).turns(POSITIONS, DIM, torch.float64, length)
    for sign, turn in zip((1, -1), turns, strict=True):
        turned = rotate(x, *turn)
        for at, position in enumerate(POSITIONS.tolist()):
            for j in range(DIM // 2):
                low, high = (j, j + DIM // 2) if style == "neox" else (2 * j, 2 * j + 1)
                zeta = (2 * j / DIM + 0.4) / 1.4
                factor = zeta ** (sign * (position - (length - 1) / 2) / scale)
                angle = position * 500.0 ** (-2 * j / DIM)
                pair = complex(x[0, at, 0, low], x[0, at, 0, high])
                expected = pair * factor * complex(math.cos(angle), math.sin(angle))
                got = complex(turned[0, at, 0, low], turned[0, at, 0, high])
                assert got == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("style", ["neox", "interleaved"])
def test_xpos_scores_depend_on_distances_only(style: str) -> None:
    q, k = random(2, 1, 1, 1, DIM, seed=2)

    def score(of_q: int, of_k: int, length: int) -> float:
        positions = torch.tensor([of_q, of_k])
        of_queries, of_keys = Rope(style, xpos_scale=64.0).turns(positions, DIM, torch.float64, length)
        pair = torch.cat((q, k), 1)
        return (rotate(pair, *of_queries)[:, 0] * rotate(pair, *of_keys)[:, 1]).sum().item()

    near = score(45, 5, 64)
    assert score(1003, 963, 2048) == pytest.approx(near, rel=1e-9)
    assert score(45, 5, 2048) == pytest.approx(near, rel=1e-9), "the center cancels"
    assert score(46, 5, 64) != pytest.approx(near, rel=1e-3)


def test_xpos_fades_by_the_tokens_of_its_scale() -> None:
    ones, positions = torch.ones(1, 2, 1, 2, dtype=torch.float64), torch.tensor([0, 640])
    of_queries, of_keys = Rope("neox", base=1.0, xpos_scale=64.0).turns(positions, 2, torch.float64, 1000)
    scores = [(rotate(ones, *of_queries)[0, at, 0] * rotate(ones, *of_keys)[0, 0, 0]).sum().item() for at in (0, 1)]
    turned = math.cos(640)  # base 1: the only pair turns by one radian a token
    assert scores[1] / scores[0] == pytest.approx(turned * (0.4 / 1.4) ** (640 / 64), rel=1e-9)


@pytest.mark.parametrize(
    ("dtype", "bits", "told"), [(torch.float64, 60, 62), (torch.bfloat16, 60, 62), (torch.float16, 10, 370)]
)
def test_xpos_refuses_factors_that_overflow(dtype: torch.dtype, bits: int, told: int) -> None:
    length, positions = 4095, torch.tensor([0, 4094])
    bound = 2047 * math.log2(3.5) / bits  # scale at which the first pair's factor is 2**bits at both ends
    assert math.ceil(bound) == told
    with pytest.raises(InputError, match=rf"4095 tokens leave 2\*\*-{bits} .*use an xpos_scale of at least {told}"):
        Rope(xpos_scale=bound * 0.999).turns(positions, DIM, dtype, length)
    for turn in Rope("neox", xpos_scale=bound * 1.001).turns(positions, DIM, dtype, length):
        factors = torch.hypot(turn.cos, turn.sin)
        assert factors.log2().abs().max().item() == pytest.approx(bits / 1.001, rel=1e-5)
    Rope(xpos_scale=told).turns(positions, DIM, dtype, length)


def test_xpos_needs_the_length() -> None:
    with pytest.raises(InputError, match="give its length in tokens"):
        Rope(xpos_scale=64.0).turns(POSITIONS, DIM, torch.float64)


@pytest.mark.parametrize("scale", [0, -512.0, math.inf, math.nan, "512"])
def test_an_xpos_scale_that_is_none(scale: Any) -> None:
    with pytest.raises(InputError, match="xpos_scale must be a positive number of tokens or None"):
        Rope(xpos_scale=scale).check(DIM)
