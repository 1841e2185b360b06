"""Golden results of torchscale's dilated attention: those of its published algorithm on one device, with its faults.

Source: microsoft/torchscale at 4d1e0e8, `DilatedAttention` in torchscale/component/dilated_attention.py, between its
projections, with dense float64 attention in place of its flash kernel. Each golden entry has its settings, and its
tensors as flat row-major lists. The results include four faults of that algorithm. Queries attend to the zero rows that
fill a segment, unless a causal mask hides them. Rows that fill the last stride of a segment shift every later segment.
A row whose lse is exactly 0 counts as unattended. The weights that mix the branches carry no gradient.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

GOLDENS = Path(__file__).parent / "golden" / "torchscale_dilated.json"


class Case(NamedTuple):
    """The settings of one golden entry. `shape`: (batch, tokens, heads, dim)."""

    shape: tuple[int, int, int, int]
    segment_lengths: list[int]
    dilation_rates: list[int]
    causal: bool


def _case(golden: dict[str, Any]) -> Case:
    return Case(tuple(golden["shape"]), *(golden[name] for name in Case._fields[1:]))


CASES = {golden["name"]: _case(golden) for golden in json.loads(GOLDENS.read_text(encoding="utf-8"))}


def inputs(shape: tuple[int, ...]) -> list[Tensor]:
    """Return q, k, v and dout of a case.

    Their elements are 1.5 sin(c n^2) with n = 1, 2, ... in row-major order, and c = 0.3, 0.5, 0.7 and 1.1.
    """
    squares = torch.arange(1, torch.Size(shape).numel() + 1, dtype=torch.float64).reshape(shape) ** 2
    return [1.5 * torch.sin(c * squares) for c in (0.3, 0.5, 0.7, 1.1)]
