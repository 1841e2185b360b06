"""The generator of dropout: its published answers, the definition by another hand, and that it draws as dice would."""

from __future__ import annotations

import pytest
import torch

from ringattn.core.geometry import StridedRange
from ringattn.engine.philox import is_dropped, philox_
from tests import philox as reference

KNOWN = {
    # Of Random123 (Salmon et al.), kat_vectors: philox4x32 10, counter, key, answer.
    (0, 0, 0, 0, 0, 0): (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8),
    (0xFFFFFFFF,) * 6: (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD),
    (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344, 0xA4093822, 0x299F31D0): (
        0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1
    ),
}  # fmt: skip


@pytest.mark.parametrize("given", KNOWN)
def test_known_answers(given: tuple[int, ...]) -> None:
    words = [torch.tensor([word]) for word in (*given[:4], 0)]
    philox_(words, given[4] | given[5] << 32)
    assert tuple(int(word) for word in words[:4]) == KNOWN[given]


def test_places_are_those_of_the_definition() -> None:
    """Positions far from 0 and apart, heads that are not the first, both halves of the key."""
    heads, queries, keys, seed = StridedRange(3, 2, 2), StridedRange(5, 4, 7), StridedRange(2, 9, 3), 2**63 + 12345
    found = torch.empty(2, 2, 4, 9, dtype=torch.bool)
    is_dropped(found, heads, queries, keys, seed, 0.4)
    whole = reference.kept(2, 6, 27, 27, seed, 0.4)[:, 3:6:2, 5:27:7, 2:27:3]
    assert torch.equal(found, whole == 0)


def test_a_position_takes_a_whole_word() -> None:
    """The last positions that are allowed are not those of their lower bits."""
    near, far = (torch.empty(1, 1, 64, 64, dtype=torch.bool) for _ in range(2))
    is_dropped(near, StridedRange(0, 1), StridedRange(2**31 - 64, 64), StridedRange(2**31 - 64, 64), 1, 0.5)
    is_dropped(far, StridedRange(0, 1), StridedRange(2**32 - 64, 64), StridedRange(2**32 - 64, 64), 1, 0.5)
    assert 0.4 < (near != far).double().mean() < 0.6
