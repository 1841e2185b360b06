"""The page of memory claims: what it says follows from its formulas, and it is the page that lies in docs."""

from __future__ import annotations

import pytest

from ringattn.bench.claims import MODELS, PATH, guides, memory_analysis, page, rings
from ringattn.bench.claims_arithmetic import (
    GIB,
    fitted_tokens,
    gathered_mib,
    partitioned_mib,
    seen_by_checkpointing,
    stored_without_checkpointing,
    tiled_mib,
    zero_gb,
)


def test_the_page_is_what_the_program_writes() -> None:
    assert PATH.read_text(encoding="utf-8") == page()


def test_claims_are_named_once() -> None:
    names = [claim.name for claim in (*memory_analysis(), *rings(), *guides())]
    assert len(names) == len(set(names)) > 30


@pytest.mark.parametrize(
    ("name", "params", "plain", "checkpointed"),
    [("125M", 123_334_656, 265_000, 1_760_000), ("350M", 353_189_888, 95_000, 910_000),
     ("1.3B", 1_310_359_552, 38_000, 370_000)],
)  # fmt: skip
def test_capacity_by_hand(name: str, params: int, plain: int, checkpointed: int) -> None:
    """80 GiB less 16 bytes a parameter, by the bytes of a token: 34 L d + 4 d, or 2 L d + 38 d."""
    model = MODELS[name]
    assert model.params(50_000) == params
    room = 80 * GIB - 16 * params
    assert room / stored_without_checkpointing(model) == pytest.approx(plain, rel=0.02)
    assert room / seen_by_checkpointing(model) == pytest.approx(checkpointed, rel=0.02)


def test_rings_by_hand() -> None:
    # 3 x 8 heads x 8192 x 4096 x 4 bytes are 3072 MiB of scores; 8.07 x 8192 x 512 x 4 bytes are 129.1.
    assert gathered_mib(8192) == pytest.approx(3072 + 129.12)
    assert partitioned_mib(8192) == pytest.approx(1536 + 64.56)
    assert tiled_mib(8192) == pytest.approx(64.56)
    assert 9.1 + 0.0262 * fitted_tokens(24) + 6.30e-5 * fitted_tokens(24) ** 2 == pytest.approx(24 * 1024)


def test_zero_shards_the_optimizer_first() -> None:
    assert [zero_gb(7, 12, stage, 8) for stage in range(4)] == [112, 38.5, 26.25, 14]
