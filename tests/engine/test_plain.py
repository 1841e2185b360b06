"""The plain engine obeys the engine contract in bounded memory. Softmax states merge, and dropout draws, correctly."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from ringattn.core.geometry import StridedRange
from ringattn.engine import plain
from ringattn.engine.base import by_row, identity, merge_, weights
from ringattn.engine.philox import is_dropped, philox_
from ringattn.engine.plain import PlainEngine
from tests import philox as reference
from tests.contract.engine_contract import EngineContract
from tests.contract.engine_scenarios import SCENARIOS
from tests.contract.engine_trial import Trial


class TestPlain(EngineContract):
    """The tests of the engine contract for the plain engine, with ALiBi and dropout."""

    places = True

    def engine(self) -> PlainEngine:
        return PlainEngine()


@pytest.mark.parametrize("name", ["causal", "window", "dilated", "blind", "softcap", "alibi"])
def test_chunks_of_rows_make_no_difference(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Results are right if the engine computes the scores of only seven rows at a time.

    Chunks of rows then begin and end inside every band.
    """
    scenario = SCENARIOS[name]
    keys = scenario.steps[0].tiles[0].k.rows.count
    monkeypatch.setattr(plain, "SCORES_BYTES", 7 * 8 * keys * scenario.batch * scenario.heads)
    trial = Trial(scenario, torch.float64, True)
    trial.check(trial.run(PlainEngine()), 1e-10)


def recorded_scores(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Record the bytes of every score matrix that the engine makes from now on."""
    sizes: list[int] = []
    scores = plain._scores

    def recording(*operands: Any) -> Any:
        result = scores(*operands)
        sizes.append(result[0].nbytes)
        return result

    monkeypatch.setattr(plain, "_scores", recording)
    return sizes


def test_score_matrices_of_all_heads_and_batches_stay_in_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    limit = 20_000
    monkeypatch.setattr(plain, "SCORES_BYTES", limit)
    sizes = recorded_scores(monkeypatch)
    Trial(SCENARIOS["mqa"], torch.float32, False).run(PlainEngine())
    assert limit // 2 < max(sizes) <= limit


def test_tiles_without_a_pair_cost_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """No score matrix is made for a tile without a pair, here the second tile, whose keys are after all queries."""
    sizes = recorded_scores(monkeypatch)
    Trial(SCENARIOS["blind"], torch.float32, False).run(PlainEngine())
    assert len(sizes) == 2


# --- merge of softmax states -----------------------------------------------------------------------------------------


Partial = tuple[Tensor, Tensor]
NEG_INF = float("-inf")


def partial(seed: int, blind: float = 0.3) -> Partial:
    """Return a random state of 6 rows, 2 batches, 3 heads, dim 4, in which some rows have attended to no key yet."""
    generator = torch.Generator().manual_seed(seed)
    out = torch.randn(6, 2, 3, 4, generator=generator, dtype=torch.float64)
    lse = 5 * torch.randn(2, 3, 6, generator=generator, dtype=torch.float64)
    unseen = torch.rand(2, 3, 6, generator=generator) < blind
    return out.masked_fill(by_row(unseen), 0.0), lse.masked_fill(unseen, NEG_INF)


def merge_all(into: Partial, *parts: Partial) -> Partial:
    out, lse = into[0].clone(), into[1].clone()
    for part in parts:
        merge_(out, lse, *part)
    return out, lse


def test_merge_is_the_softmax_over_both_sets_of_keys() -> None:
    scores, values = torch.randn(2, 3, 6, 10, dtype=torch.float64), torch.randn(2, 3, 10, 4, dtype=torch.float64)

    def over(keys: slice) -> Partial:
        out = torch.softmax(scores[..., keys], -1) @ values[:, :, keys]
        return out.permute(2, 0, 1, 3), scores[..., keys].logsumexp(-1)

    torch.testing.assert_close(merge_all(over(slice(0, 3)), over(slice(3, 10))), over(slice(0, 10)), rtol=0, atol=1e-14)


def test_identity_changes_no_bit_on_either_side() -> None:
    part = partial(1)
    empty = identity(6, 2, 3, 4, part[0])
    for both in (merge_all(part, empty), merge_all(empty, part)):
        assert all(torch.equal(x, y) for x, y in zip(both, part, strict=True))


def test_rows_unseen_on_both_sides_stay_unseen() -> None:
    out, lse = merge_all(partial(1, blind=1.0), partial(2, blind=1.0))
    assert not out.any() and lse.isneginf().all()


def test_merge_writes_in_place_into_strided_views() -> None:
    buffer = torch.full((2, 8, 3, 4), 7.0, dtype=torch.float64)
    out, part = buffer.transpose(0, 1)[1:-1], partial(1)
    out.zero_()
    merge_(out, torch.full_like(part[1], NEG_INF), *part)
    assert torch.equal(buffer.transpose(0, 1)[1:-1], part[0])
    assert (buffer[:, 0] == 7.0).all() and (buffer[:, -1] == 7.0).all()


def test_weights_of_an_unseen_part_are_zero() -> None:
    assert weights(torch.tensor(NEG_INF), torch.tensor(NEG_INF)) == 0.0
    assert weights(torch.tensor(NEG_INF), torch.tensor(1.0)) == 0.0


# --- random numbers of dropout ---------------------------------------------------------------------------------------


ANSWERS = {
    # From Random123 (Salmon et al.), kat_vectors: philox4x32 10, counter, key, answer.
    (0, 0, 0, 0, 0, 0): (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8),
    (0xFFFFFFFF,) * 6: (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD),
    (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344, 0xA4093822, 0x299F31D0): (
        0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1
    ),
}  # fmt: skip


@pytest.mark.parametrize("counter_and_key", ANSWERS)
def test_published_answers(counter_and_key: tuple[int, ...]) -> None:
    state = [torch.tensor([value]) for value in (*counter_and_key[:4], 0)]
    philox_(state, counter_and_key[4] | counter_and_key[5] << 32)
    assert tuple(int(value) for value in state[:4]) == ANSWERS[counter_and_key]


def test_dropped_pairs_follow_the_definition() -> None:
    """Dropout drops the pairs that the reference drops.

    Heads and positions are strided and do not start at 0, and the seed fills both words of the key.
    """
    heads, queries, keys, seed = StridedRange(3, 2, 2), StridedRange(5, 4, 7), StridedRange(2, 9, 3), 2**63 + 12345
    dropped = torch.empty(2, 2, 4, 9, dtype=torch.bool)
    is_dropped(dropped, heads, queries, keys, seed, 0.4)
    whole = reference.kept(2, 6, 27, 27, seed, 0.4)[:, 3:6:2, 5:27:7, 2:27:3]
    assert torch.equal(dropped, whole == 0)


def test_a_position_uses_all_32_bits_of_its_word() -> None:
    """The largest allowed positions get other random numbers than positions with the same lower 31 bits."""
    near, far = (torch.empty(1, 1, 64, 64, dtype=torch.bool) for _ in range(2))
    is_dropped(near, StridedRange(0, 1), StridedRange(2**31 - 64, 64), StridedRange(2**31 - 64, 64), 1, 0.5)
    is_dropped(far, StridedRange(0, 1), StridedRange(2**32 - 64, 64), StridedRange(2**32 - 64, 64), 1, 0.5)
    assert 0.4 < (near != far).double().mean() < 0.6
