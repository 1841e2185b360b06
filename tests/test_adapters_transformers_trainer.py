"""The Trainer of transformers over a ring: equal to one process, or refused."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("transformers", reason="transformers is not installed")

import transformers
from transformers.utils import is_accelerate_available

from ringattn import Ring
from ringattn.adapters.transformers_trainer import RingTrainerMixin, check_trainer
from ringattn.errors import UnsupportedError
from tests.adapter_ranks import llama


def test_a_trainer_of_another_form(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    class Ours(RingTrainerMixin, transformers.Trainer):
        pass

    check_trainer(Ours)
    with pytest.raises(UnsupportedError, match=r"must inherit from RingTrainerMixin and then"):
        check_trainer(RingTrainerMixin)
    monkeypatch.setattr(transformers.Trainer, "_prepare_context_parallel_inputs", lambda self, inputs: None)
    with Ring() as ring, pytest.raises(UnsupportedError, match=r"in another way than that of 5\.23.*shard_batch"):
        Ours(ring=ring)
    monkeypatch.undo()
    if is_accelerate_available():
        args = transformers.TrainingArguments(output_dir=str(tmp_path), use_cpu=True, report_to=[])
        with Ring() as ring, pytest.raises(UnsupportedError, match="compute_metrics needs logits of whole texts"):
            Ours(model=llama(), args=args, ring=ring, compute_metrics=lambda found: {})
