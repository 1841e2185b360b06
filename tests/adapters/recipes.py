"""Three steps of LLaMA-Factory in float64: `recipes.py FOLDER` writes the trained model into FOLDER/PROCESSES.

`test_recipes.py` runs this program in one process, and under `ringattn script` on two.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import torch
from llamafactory.train.tuner import run_exp

from tests.adapters.models import tiny_model
from tests.adapters.ranks import in_double
from tests.adapters.sft import tokenizer


def write_inputs(folder: Path) -> None:
    """Write a model, its tokenizer and twelve questions with answers into `folder`."""
    tiny_model("llama", "eager").save_pretrained(folder / "model")
    tokenizer().save_pretrained(folder / "model")
    rows = [
        {
            "instruction": f"w{4 + i} w{5 + i}",
            "input": "",
            "output": " ".join(f"w{4 + (7 * i + j) % 60}" for j in range(9 + i)),
        }
        for i in range(12)
    ]
    (folder / "questions.json").write_text(json.dumps(rows), encoding="utf-8")
    listed = {"questions": {"file_name": "questions.json"}}
    (folder / "dataset_info.json").write_text(json.dumps(listed), encoding="utf-8")


def main(folder: str) -> None:
    """Train the model in `folder` on batches of two texts, two batches a step. One process writes that model first."""
    torch.set_num_threads(1)
    out = os.path.join(folder, os.environ.get("WORLD_SIZE", "1"))
    with in_double():
        if "RANK" not in os.environ:
            write_inputs(Path(folder))
        run_exp(
            {
                "model_name_or_path": f"{folder}/model", "stage": "sft", "do_train": True, "finetuning_type": "full",
                "template": "alpaca", "dataset": "questions", "dataset_dir": folder, "cutoff_len": 64,
                "output_dir": out, "per_device_train_batch_size": 2, "gradient_accumulation_steps": 2,
                "max_steps": 3, "learning_rate": 1e-2, "lr_scheduler_type": "constant", "optim": "sgd",
                "logging_steps": 1, "save_strategy": "no", "report_to": "none", "use_cpu": True,
                "disable_tqdm": True, "do_eval": True, "eval_dataset": "questions", "per_device_eval_batch_size": 2,
            }
        )  # fmt: skip


if __name__ == "__main__":
    main(sys.argv[1])
