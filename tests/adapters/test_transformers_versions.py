"""The versions of transformers that the adapter runs with: each does what its column of the table says."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

pytest.importorskip("transformers", reason="transformers is not installed")
pytest.importorskip("accelerate", reason="accelerate is not installed, which Trainer needs")

import torch
from transformers.masking_utils import causal_mask_function, chunked_causal_mask_function

from ringattn import Ring
from ringattn.adapters import hosts
from ringattn.adapters import transformers as adapter
from ringattn.adapters.transformers import attention
from ringattn.adapters.transformers.attention import CHECKED, MaskSpec, mask_spec
from ringattn.errors import UnsupportedError
from tests.adapters.models import tiny_model
from tests.adapters.versions import EVERY_CELL, TOLERANCE, VERSIONS, cells, documented

OTHERS = (
    "Llama", "Llama, packed, `position_ids`", "LoRA of PEFT", "Trainer, 3 steps, packed",
    "TRL's SFTTrainer, 3 steps, packed", "TRL's DPOTrainer", "FSDP2, 2 steps, packed", "gradient checkpointing",
    "Llama 4: chunks, packed",
)  # fmt: skip
"""Of versions that lie between others: without compilation, which takes a third of the time."""
WHOLE = VERSIONS if os.environ.get(EVERY_CELL) else ("4.57.6", "5.18.0")
"""The oldest of each major version; the newest is the one that all other tests run with."""


@pytest.mark.slow
@pytest.mark.parametrize("version", VERSIONS)
def test_a_version_in_an_environment_of_its_own(version: str, tmp_path: Path) -> None:
    actual = cells(version, tmp_path, *(() if version in WHOLE else OTHERS))
    assert not {name: x for name, x in actual.items() if isinstance(x, float) and not x <= TOLERANCE}
    claimed = documented(version)
    assert len(actual) == len(claimed if version in WHOLE else OTHERS)
    assert {name: "refused" if isinstance(x, str) else "exact" for name, x in actual.items()} == {
        name: claimed[name] for name in actual
    }


def test_the_table_of_hosts_has_every_version() -> None:
    rows = json.loads(Path(__file__).with_name("hosts.json").read_text(encoding="utf-8"))
    assert {f"transformers {version}" for version in VERSIONS} <= set(rows)


@pytest.mark.parametrize("version", ["4.56.2", "5.0.0", "5.17.0", "5.24.0", "6.0.0"])
def test_other_versions_are_refused_by_name(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model("llama", "eager")
    monkeypatch.setattr(hosts, "version", lambda package: version)
    with pytest.raises(
        UnsupportedError, match=rf"4\.57, 5\.18, .*5\.23, but {version} is installed.*install a checked"
    ):
        adapter.prepare(model)
    with pytest.raises(UnsupportedError, match=f"but {version} is installed"):
        adapter.register()
    assert model.config._attn_implementation == "eager"


def test_a_mask_of_4_57_tells_the_places_of_its_queries() -> None:
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
    """From 5.23 on each document begins a chunk; before, chunks are those of the row."""
    monkeypatch.setattr(attention, "chunks_begin_with_documents", lambda: by_document)
    function = chunked_causal_mask_function(5, torch.zeros(1, dtype=torch.int64))
    spec = mask_spec(batch_size=1, q_length=17, kv_length=17, mask_function=function, local_size=5)
    with Ring() as ring:
        ((row_seq, rows),) = spec.rows(ring.sequence(cu_seqlens=[0, 4, 17]), lambda rows: None)
    assert list(row_seq.documents or ()) == cuts and rows == (0,)


def test_every_version_has_a_column() -> None:
    assert {version.rpartition(".")[0] for version in VERSIONS} == set(CHECKED)
