"""The soak: a short one, the bar that it judges by, and what ranks that are off say."""

from __future__ import annotations

import random
from typing import Any

import pytest

from ringattn.bench import soak, soak_ranks
from ringattn.bench.gate import GateError
from ringattn.bench.soak import GROWTH_MIB, judged, slope_bytes
from ringattn.errors import InputError, RingError
from ringattn.testing import run_ranks


@pytest.mark.slow
def test_a_short_soak_is_flat(tmp_path: Any) -> None:
    words = ["seconds=15", "transport=shm", "ranks=2", "stops_per_minute=30", "stop_s=0.5", f"results={tmp_path}"]
    data = soak.main(words)
    assert data["complaints"] == [] and data["stops"] > 0
    assert [samples[-1]["error"] <= soak_ranks.EXACT for samples in data["samples"]] == [True, True]
    assert "The bar: no more descriptors" in (tmp_path / "soak.md").read_text(encoding="utf-8")


@pytest.mark.slow
def test_a_rank_that_fails_is_an_error() -> None:
    with pytest.raises(RingError, match=r"a rank failed(.|\n)*transport='carrier pigeon' is not known"):
        soak.main(["seconds=1", "transport=carrier pigeon", "ranks=2", "results="])


def test_drawn_calls_are_exact_and_a_wrong_result_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    def body(ring: Any) -> None:
        random_ = random.Random(1)
        for _ in range(10):
            assert soak_ranks.check(ring, soak_ranks.drawn(random_)) <= soak_ranks.EXACT
        attention = type(ring).attention
        monkeypatch.setattr(type(ring), "attention", lambda *args, **options: attention(*args, **options) * (1 + 1e-8))
        with pytest.raises(GateError, match="a result is off by"):
            soak_ranks.check(ring, soak_ranks.drawn(random_))

    run_ranks(1, body)


def samples(**grows: float) -> soak.Samples:
    """Thirty samples in which each number is 100, or rises to that plus its growth after the warm-up."""
    names = ("descriptors", "threads", "maps", "rss_bytes")
    return [
        {"calls": 10.0 * n, **{name: 100 + grows.get(name, 0) * max(n - 10, 0) / 19 for name in names}}
        for n in range(30)
    ]


@pytest.mark.parametrize("name", ["descriptors", "threads", "maps"])
def test_counts_must_not_grow(name: str) -> None:
    assert judged([samples(), samples()]) == []
    assert [words.split(" grew")[0] for words in judged([samples(), samples(**{name: 10})])] == [f"rank 1: {name}"]


def test_memory_must_not_grow_beyond_the_bound() -> None:
    grown = samples(rss_bytes=2 * GROWTH_MIB * 2**20)
    assert judged([grown])[0].startswith("rank 0: memory grew by 16.8 MiB")
    assert judged([samples(rss_bytes=GROWTH_MIB * 2**20)]) == []
    assert slope_bytes(grown) == pytest.approx(1000 * 2 * GROWTH_MIB * 2**20 / 190)
    assert judged([samples()[:2]]) == ["rank 0 has 2 samples, too few to judge"]


def test_options_that_do_not_fit_are_refused() -> None:
    with pytest.raises(InputError, match="ranks at least 2"):
        soak.main(["ranks=1"])
