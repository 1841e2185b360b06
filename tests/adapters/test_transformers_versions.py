"""The versions of transformers: each does what its row of docs/host-versions.md says."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

pytest.importorskip("transformers", reason="transformers is not installed")
pytest.importorskip("accelerate", reason="accelerate is not installed, which Trainer needs")

import torch
from transformers import masking_utils
from transformers.masking_utils import causal_mask_function, chunked_causal_mask_function

from ringattn import Ring
from ringattn.adapters import host_versions
from ringattn.adapters import transformers as adapter
from ringattn.adapters.host_versions import VARIABLE, UntestedHostWarning
from ringattn.adapters.transformers import host_masks, trainer
from ringattn.adapters.transformers.host_masks import MaskSpec, mask_spec
from ringattn.errors import UnsupportedError
from tests.adapters.host_table import EXACT, PAGE, REFUSED, WRONG, outcome, page, read, span
from tests.adapters.models import tiny_model
from tests.adapters.versions import EVERY_CELL, VERSIONS, cells

ENDS = (next(iter(VERSIONS)), "5.0.0", next(reversed(VERSIONS)))
"""The oldest of each major version, and the newest."""


@pytest.mark.slow
@pytest.mark.parametrize("version", VERSIONS if os.environ.get(EVERY_CELL) else ENDS)
def test_a_version_in_a_separate_environment(version: str, tmp_path: Path) -> None:
    actual, recorded = cells(version, tmp_path), read().transformers[version]
    wrong = {name: verdict for name, verdict in actual.items() if outcome(verdict) == WRONG}
    assert not wrong
    assert {name: outcome(verdict) for name, verdict in actual.items()} == {
        name: outcome(verdict) for name, verdict in recorded.items()
    }


def test_the_page_of_versions_shows_the_results_of_all_of_them() -> None:
    results = read().transformers
    assert list(results) == list(VERSIONS) and PAGE.read_text(encoding="utf-8") == page(read())
    assert {outcome(verdict) for row in results.values() for verdict in row.values()} == {EXACT, REFUSED}
    assert len({tuple(row) for row in results.values()}) == 1
    minors = [version.rpartition(".")[0] for version in VERSIONS]
    assert minors == list(host_masks.HOST.tested) == list(trainer.HOST.tested)


def test_a_difference_above_the_tolerance_or_a_nan_is_wrong() -> None:
    assert [outcome(verdict) for verdict in (0.0, 1e-9, 2e-9, math.nan, "leave it out")] == [
        EXACT, EXACT, WRONG, WRONG, REFUSED
    ]  # fmt: skip


def test_neighbouring_versions_are_one_range() -> None:
    every = ["1.0", "1.1", "1.2", "2.0"]
    assert span(every, every) == "all" and span(["1.1"], every) == "1.1"
    assert span(["1.0", "1.1", "2.0"], every) == "1.0 to 1.1, 2.0"


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], None]]:
    """Yield a function that sets the version of transformers that seems to be installed, and clears cached checks."""

    def set_version(version: str) -> None:
        monkeypatch.setattr(host_versions, "version", lambda package: version)
        host_versions._require.cache_clear()

    yield set_version
    host_versions._require.cache_clear()


def test_prepare_and_register_run_with_an_untested_version_after_a_warning(
    installed: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    installed("6.0.0")
    model = tiny_model("llama", "eager")
    with pytest.warns(UntestedHostWarning, match=r"5\.24, not with transformers 6\.0\.0; all 12 functions"):
        adapter.prepare(model)
    assert model.config._attn_implementation == "ringattn"
    monkeypatch.setenv(VARIABLE, "error")
    with pytest.raises(UnsupportedError, match=r"transformers 6\.0\.0 is installed.*allows tested versions only"):
        adapter.register()


@pytest.mark.parametrize("version", ["5.23.0", "6.0.0"])
def test_a_mask_function_with_another_meaning_is_refused_by_name(
    version: str, installed: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    def sliding_window_overlay(sliding_window: int) -> Callable[..., object]:
        return lambda batch, head, query, key: key > query - sliding_window - 1

    installed(version)
    monkeypatch.setattr(masking_utils, "sliding_window_overlay", sliding_window_overlay)
    model = tiny_model("llama", "eager")
    with pytest.raises(UnsupportedError, match=r"masking_utils:sliding_window_overlay has changed") as error:
        adapter.prepare(model)
    assert "chunked_overlay" not in str(error.value) and model.config._attn_implementation == "eager"


def test_a_mask_of_4_57_has_the_positions_of_its_queries() -> None:
    def spec_at(first: int) -> MaskSpec:
        return mask_spec(
            batch_size=1, cache_position=torch.arange(first, 9), kv_length=9, mask_function=causal_mask_function
        )

    assert (spec_at(0).queries, spec_at(0).keys, spec_at(0).is_offset) == (9, 9, False)
    assert (spec_at(8).queries, spec_at(8).keys, spec_at(8).is_offset) == (1, 9, True)
    with pytest.raises(UnsupportedError, match="1 queries and 9 keys"):
        spec_at(8).refuse()


@pytest.mark.parametrize(("by_document", "cuts"), [(True, [0, 4, 9, 14, 17]), (False, [0, 4, 5, 10, 15, 17])])
def test_chunks_of_packed_documents(by_document: bool, cuts: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """From 5.23 on, each document begins a new chunk. Earlier versions count chunks from the start of the row."""
    monkeypatch.setattr(host_masks, "chunks_begin_with_documents", lambda: by_document)
    function = chunked_causal_mask_function(5, torch.zeros(1, dtype=torch.int64))
    spec = mask_spec(batch_size=1, q_length=17, kv_length=17, mask_function=function, local_size=5)
    with Ring() as ring:
        ((row_seq, rows),) = spec.rows(ring.sequence(cu_seqlens=[0, 4, 17]), lambda rows: None)
    assert list(row_seq.documents or ()) == cuts and rows == (0,)
