"""transformers' Trainer over two ranks, against the same in one process: `python -m tests.adapter_trainer FOLDER`.

Does not know: what error is small enough.
"""

from __future__ import annotations

import json
import os
import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed import TCPStore
from transformers import DataCollatorWithFlattening, Trainer, TrainingArguments

from ringattn import Ring
from ringattn.adapters.transformers_trainer import RingTrainerMixin
from tests.adapter_models import tiny_model
from tests.adapter_ranks import InDouble, forked

STEPS = 3


class RingTrainer(RingTrainerMixin, Trainer):
    """Trainer over a ring."""


def texts() -> list[dict[str, Tensor]]:
    """Texts of other lengths, each with its labels; the start of a text has none once it is packed."""
    generator = torch.Generator().manual_seed(3)
    return [{"input_ids": torch.randint(3, 64, (9 + 2 * i,), generator=generator).tolist()} for i in range(12)]


def trained(folder: Path, kind: type[Trainer], **more: Any) -> tuple[dict[str, Tensor], list[float]]:
    """Weights and losses after a few steps of two packed batches each."""
    model = tiny_model("qwen2", "eager")
    with InDouble():
        args = TrainingArguments(
            output_dir=str(folder), use_cpu=True, max_steps=STEPS, per_device_train_batch_size=2,
            gradient_accumulation_steps=2, learning_rate=1e-2, logging_steps=1, report_to=[], save_strategy="no",
            disable_tqdm=True, optim="sgd", max_grad_norm=1.0, per_device_eval_batch_size=2,
        )  # fmt: skip
        if issubclass(kind, RingTrainerMixin):
            more["ring"] = Ring(timeout_s=60.0)
        trainer = kind(
            model=model, args=args, train_dataset=texts(), eval_dataset=texts()[:4],
            data_collator=DataCollatorWithFlattening(), **more,
        )  # fmt: skip
        trainer.train()
        losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
        losses.append(trainer.evaluate()["eval_loss"])
    return {name: p.detach().clone() for name, p in model.named_parameters()}, losses


def alone(folder: Path) -> None:
    """Save what one process does."""
    torch.save(trained(folder, Trainer), folder / "alone.pt")


def rank(folder: Path, number: int) -> None:
    """One of two ranks; rank 0 saves how far its weights and losses are from one process's."""
    os.environ |= {"RANK": str(number), "LOCAL_RANK": str(number), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    weights, losses = trained(folder, RingTrainer)
    true, true_losses = torch.load(folder / "alone.pt")
    if number == 0:
        errors = {of: ((weights[of] - true[of]).abs().max() / true[of].abs().max()).item() for of in true}
        found = {"weights": errors, "losses": [losses, true_losses]}
        (folder / "trainer.json").write_text(json.dumps(found), encoding="utf-8")


if __name__ == "__main__":
    torch.set_num_threads(1)
    folder = Path(sys.argv[1])
    tiny_model("qwen2", "eager")
    forked(partial(alone, folder))
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    forked(partial(rank, folder, 0), partial(rank, folder, 1))
