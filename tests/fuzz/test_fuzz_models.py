"""The walk over the model classes of transformers: each verdict, a few classes with new seeds, and the page."""

from __future__ import annotations

import json
import os
import re
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch

pytest.importorskip("transformers", reason="transformers is not installed")

from ringattn.adapters.transformers import calls
from ringattn.adapters.transformers.host_masks import MaskSpec
from ringattn.runtime.states import PendingStates
from tests.fuzz import session
from tests.fuzz.models import cases, page, tiny
from tests.fuzz.models.cases import cases_of
from tests.fuzz.models.tiny import other_kinds
from tests.fuzz.models.walk import Record, examine

SECONDS = 5.0
PAGE = Path(__file__).parents[2] / "docs" / "embedding-transformers-models.md"


@pytest.fixture(autouse=True)
def _switch_threads_often() -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-3)
    yield
    sys.setswitchinterval(before)


def record_of(name: str, seed: int = 0) -> Record:
    record = examine(name, tiny.classes()[name], seed)
    assert record is not None
    return record


def verdicts(record: Record) -> set[str]:
    return {verdict for verdict, _ in record["cases"].values()}


# --- outcomes -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["LlamaForCausalLM", "PhimoeForCausalLM"])
def test_an_exact_class(name: str) -> None:
    """A class is exact. PhiMoE is compared in evaluation mode, because its routers draw random numbers in training."""
    record = record_of(name)
    assert record["verdict"] == "exact"
    assert verdicts(record) == {"exact", "refused"}
    assert record["cases"]["packed, cu_seq_lens_q"][0] == record["cases"]["padded left"][0] == "exact"
    assert "return_dict" in record["cases"]["return_dict"][1]


@pytest.mark.parametrize(
    ("name", "reason", "verdicts_"),
    [
        pytest.param("Inkling2ForCausalLM", "choose tokens", {"refused"}, marks=pytest.mark.slow),
        ("BertForSequenceClassification", "from a whole row", {"refused"}),
        ("T5GemmaModel", "a separate configuration", set()),
        ("BloomModel", "adds ALiBi", set()),
    ],
)
def test_a_refused_class(name: str, reason: str, verdicts_: set[str]) -> None:
    """A class is refused if every call of it is refused, or if `prepare` refuses it."""
    record = record_of(name)
    assert record["verdict"] == "refused"
    assert reason in record["reason"]
    assert verdicts(record) - {"no reference"} == verdicts_


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("Lfm2Model", "conv"),
        ("MiniMaxM3VLTextModel", "minimax_m3_sparse"),
        ("MiniMaxM3VLTextModel", "dense"),
        ("Qwen3Model", "sliding_attention"),
    ],
)
def test_a_kind_of_layer_missing_from_the_default_configuration(name: str, kind: str, monkeypatch: Any) -> None:
    """A class whose default model is exact is still exact if the model has a layer of another kind."""
    monkeypatch.setattr(cases, "cases_of", lambda *arguments: cases_of(*arguments)[:1])
    monkeypatch.setattr(
        tiny, "other_kinds", lambda model: [extra for extra in other_kinds(model) if extra.kind == kind]
    )
    record = record_of(name)
    assert record["cases"]["plain"][0] == "exact"
    assert record["verdict"] == record["cases"][f"{kind}, plain"][0] == "exact"


def test_a_class_that_cannot_be_built_or_takes_no_text() -> None:
    record = record_of("ReformerModelWithLMHead")
    assert record["verdict"] == "not buildable"
    assert "is_decoder=True" in record["reason"] and not record["cases"]
    assert examine("ViTModel", "vit", 0) is None


# --- faults ---------------------------------------------------------------------------------------------------------


def _heads(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(calls, "_refuse_token_selection", lambda model: None)


def _states(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(PendingStates, "wait", lambda self: torch.zeros_like(self.inputs[0]))


def _masks(patch: pytest.MonkeyPatch) -> None:
    patch.delattr(MaskSpec, "__torch_function__")
    patch.delattr(MaskSpec, "__radd__")


@pytest.mark.parametrize(
    ("fault", "name", "reason", "verdict"),
    [
        (_heads, "SplinterForQuestionAnswering", r"start_logits off by", "refused"),
        (_states, "Qwen3NextModel", r"last_hidden_state off by", "exact"),
        (_masks, "GitModel", r"not refused by name on every rank: TypeError", "refused"),
    ],
)
def test_a_reintroduced_fault_is_found(
    fault: Callable[[pytest.MonkeyPatch], None], name: str, reason: str, verdict: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`verdict`: on the same class without the fault."""
    monkeypatch.setattr(cases, "cases_of", lambda *arguments: cases_of(*arguments)[:3])
    with monkeypatch.context() as patch:
        fault(patch)
        record = record_of(name)
    assert record["verdict"] == "wrong"
    assert re.match(reason, record["reason"])
    assert record["cases"]["plain"][0] == "wrong"
    assert record_of(name)["verdict"] == verdict


# --- fresh classes --------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_fresh_classes() -> None:
    """No class has the verdict "wrong" with a new seed. Models with towers are left out: they take longer to build."""
    seed = session.seed_of_commit()
    records: list[Record] = []
    ends = time.monotonic() + float(os.environ.get("RINGATTN_FUZZ_SECONDS", SECONDS))
    for name in Random(seed).sample(sorted(tiny.classes()), 200):
        if time.monotonic() > ends:
            break
        if _is_of_text(name):
            print(f"python -m tests.fuzz.models only={name} seed={seed}")
            records.append(record_of(name, seed))
    assert records
    assert not [record for record in records if record["verdict"] == "wrong"]


def _is_of_text(name: str) -> bool:
    try:
        kind: Any = tiny.class_of(name)
    except tiny.NotBuilt:
        return False
    return tiny.takes_text(kind) and not kind.config_class.sub_configs


# --- the page -------------------------------------------------------------------------------------------------------


def test_the_page_and_the_data_agree() -> None:
    """The page is generated from the data, which contain no wrong class and only classes of this transformers."""
    results = json.loads((PAGE.parent / "transformers-models.json").read_text(encoding="utf-8"))
    assert PAGE.read_text(encoding="utf-8") == page.text(results)
    assert (PAGE.parent / "transformers-models.json").read_text(encoding="utf-8") == page.dumped(results)
    verdicts = [result["verdict"] for result in results["classes"].values()]
    assert set(verdicts) == {"exact", "refused", "not buildable"} and len(verdicts) > 1000
    assert results["classes"].keys() <= set(tiny.classes())
    assert all(result["reason"] for result in results["classes"].values() if result["verdict"] != "exact")


@pytest.mark.slow
def test_the_data_of_a_walk() -> None:
    """The data and the page of two records, a refused class and one that cannot be built, have the right counts."""
    records: list[Record] = [record_of("Inkling2TextModel"), record_of("ReformerModelWithLMHead")]
    results = page.data(records, 0)
    assert results["classes"]["Inkling2TextModel"]["verdict"] == "refused"
    assert page.topic_of(results["classes"]["Inkling2TextModel"]) == "layers with a state, or that choose tokens"
    assert page.topic_of(results["classes"]["ReformerModelWithLMHead"]) == "the smallest configuration does not work"
    assert sum(results["calls"].values()) == len(records[0]["cases"])
    assert "| refused | 1 |" in page.text(results) and "| not buildable | 1 |" in page.text(results)
