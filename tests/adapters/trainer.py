"""transformers' Trainer over processes, against the same in one process: `python -m tests.adapters.trainer FOLDER`.

Two ranks of one ring, then two rings of two ranks.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from accelerate import DistributedType, PartialState
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.nn.functional import cross_entropy
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import IterableDataset
from transformers import DataCollatorWithFlattening, EvalPrediction, Trainer, TrainingArguments

from ringattn import Ring
from ringattn.adapters.accelerate import RingParallelismConfig
from ringattn.adapters.transformers.trainer import RingTrainerMixin
from tests.adapters.models import tiny_model, with_lora
from tests.adapters.processes import forked, forked_ranks, worst_error
from tests.adapters.ranks import InDouble, in_double

CASES = {
    2: (
        "packed",
        "made by model_init",
        "streamed",
        "measured",
        "by configuration",
        "plain by configuration",
        "packed by configuration",
        "packed, checkpointed by configuration",
        "plain, compiled by configuration",
        "measured by configuration",
        "streamed by configuration",
        "packed, sharded by configuration",
    ),
    4: (
        "two rings",
        "two rings, full batches",
        "two rings, measured",
        "two rings by configuration",
        "two rings, measured by configuration",
        "two rings, own loss by configuration",
    ),
}
"""By the number of processes. Sharded weights come last: accelerate remembers them in variables of the process."""


class RingTrainer(RingTrainerMixin, Trainer):
    """Trainer over a ring."""


class Stream(IterableDataset):
    """Texts without a length."""

    def __init__(self, texts: list[dict[str, list[int]]]) -> None:
        self.texts = texts

    def __iter__(self) -> Iterator[dict[str, list[int]]]:
        return iter(self.texts)


def texts() -> list[dict[str, list[int]]]:
    """Twelve texts of other lengths."""
    generator = torch.Generator().manual_seed(3)
    return [{"input_ids": torch.randint(3, 64, (9 + 2 * i,), generator=generator).tolist()} for i in range(12)]


def equal_texts() -> list[dict[str, list[int]]]:
    """Six texts of one length, so that means of texts are means of labels."""
    return [{"input_ids": row["input_ids"][:9]} for row in texts()[:6]]


def padded(rows: list[dict[str, list[int]]]) -> dict[str, Tensor]:
    """A batch (texts, tokens), padded on the right."""
    tokens = [torch.tensor(row["input_ids"]) for row in rows]
    batch = {"input_ids": pad_sequence(tokens, True, 0), "labels": pad_sequence(tokens, True, -100)}
    return {**batch, "attention_mask": (batch["labels"] != -100).long()}


def unpadded(rows: list[dict[str, list[int]]]) -> dict[str, Tensor]:
    """A batch of texts of one length, without a mask."""
    tokens = torch.tensor([row["input_ids"] for row in rows])
    return {"input_ids": tokens, "labels": tokens.clone()}


def accuracy(found: EvalPrediction) -> dict[str, float]:
    """How many of the labels are what the model would say next."""
    said, labels = found.predictions[:, :-1], found.label_ids[:, 1:]
    return {"accuracy": float((said == labels)[labels != -100].mean())}


def squared(outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
    """A loss of a user, (), over the labels of a step: a mean of each batch would be another for two rings."""
    losses = cross_entropy(outputs.logits[:, :-1].mT, labels[:, 1:], ignore_index=-100, reduction="none")
    return (losses**2).sum() / num_items_in_batch


def likeliest(logits: Tensor, labels: Tensor) -> Tensor:
    """What the model would say next, which is less to keep than its logits."""
    return logits.argmax(-1)


def settings(case: str, rings: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """Of TrainingArguments and of Trainer; of one process where `rings` is 0.

    The last batch of an epoch and of an evaluation is not full, except where texts are packed.
    """
    args: dict[str, Any] = {
        "per_device_train_batch_size": 3, "per_device_eval_batch_size": 3, "num_train_epochs": 2,
        "gradient_accumulation_steps": 2, "learning_rate": 1e-2, "logging_steps": 1, "report_to": [],
        "save_strategy": "no", "disable_tqdm": True, "optim": "sgd", "max_grad_norm": 1.0, "use_cpu": True,
    }  # fmt: skip
    uneven = sorted(texts()[:7], key=lambda row: -len(row["input_ids"]))
    trainer: dict[str, Any] = {"train_dataset": uneven, "eval_dataset": uneven, "data_collator": padded}
    if case.startswith("packed"):
        args |= {"per_device_train_batch_size": 2, "per_device_eval_batch_size": 2, "max_steps": 3}
        trainer = {"train_dataset": texts(), "eval_dataset": texts()[:4], "data_collator": DataCollatorWithFlattening()}
    if case == "packed, labels of each process":
        (first, *others) = texts()
        args |= {"average_tokens_across_devices": False}
        trainer |= {"train_dataset": [{"input_ids": first["input_ids"][1:]}, *others]}  # an odd number of labels
    if case.startswith("streamed"):
        args |= {"max_steps": 3, "accelerator_config": {"dispatch_batches": False}}
        trainer |= {"train_dataset": Stream(uneven), "eval_dataset": {"some": Stream(uneven), "all": texts()[:7]}}
    if case.startswith("measured"):
        args |= {"label_smoothing_factor": 0.1, "include_num_input_tokens_seen": "non_padding", "num_train_epochs": 1}
    if "measured" in case:
        trainer |= {"compute_metrics": accuracy, "preprocess_logits_for_metrics": likeliest}
    if case.startswith("two rings"):
        args |= {"per_device_train_batch_size": 2 if rings else 4}
        trainer |= {"train_dataset": texts()}
    if "own loss" in case:
        args |= {"max_steps": 2, "max_grad_norm": 0.0}
        trainer |= {"compute_loss_func": squared, "eval_dataset": equal_texts()[:3]}
    if case.endswith("by configuration"):
        args |= {"include_num_input_tokens_seen": "non_padding"}
    if case.endswith("by configuration") and rings:
        args |= {"parallelism_config": RingParallelismConfig(cp_size=2)}
    if case.startswith("plain"):
        trainer |= {"train_dataset": equal_texts(), "eval_dataset": equal_texts(), "data_collator": unpadded}
    if "checkpointed" in case:
        args |= {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": False}}
    if "compiled" in case:
        args |= {"max_steps": 2, "gradient_accumulation_steps": 1, "torch_compile_backend": "aot_eager"}
        args |= {"torch_compile": rings > 0}
    if "sharded" in case and rings:
        args |= {"fsdp": True, "fsdp_config": {"version": 2, "transformer_layer_cls_to_wrap": "Qwen2DecoderLayer"}}
    if case == "two rings, full batches":
        args |= {"dataloader_drop_last": True, "num_train_epochs": 1}
        trainer |= {"eval_dataset": texts()[:11]}
    if case == "made by model_init":
        trainer |= {"model_init": lambda: tiny_model("qwen2", "eager")}
    elif "compiled" in case:  # for seconds
        trainer |= {"model": tiny_model("llama", "eager", num_hidden_layers=1)}
    else:
        trainer |= {"model": tiny_model("qwen2", "eager")}
    if "LoRA" in case:
        trainer |= {"model": with_lora(trainer["model"])}
    return args, trainer


def trained(folder: Path, case: str, rings: int = 0) -> tuple[dict[str, Tensor], list[float], dict[str, Any]]:
    """Weights after a few steps, all losses, of the steps and of evaluations, and whatever else was counted."""
    with in_double() if "checkpointed" in case or "compiled" in case else InDouble():
        options, given = settings(case, rings)
        args = TrainingArguments(output_dir=str(folder), **options)
        if args.fsdp:
            as_on_accelerators()
        if rings and not case.endswith("by configuration"):
            mesh = init_device_mesh("cpu", (rings, args.world_size // rings), mesh_dim_names=("dp", "cp"))
            with Ring(mesh, timeout_s=60.0) as ring:
                return run(RingTrainer(args=args, ring=ring, **given))
        return run(Trainer(args=args, **given))


def run(trainer: Trainer) -> tuple[dict[str, Tensor], list[float], dict[str, Any]]:
    """`trained`, of a trainer."""
    trainer.train()
    if trainer.args.fsdp:
        assert all(isinstance(weight, DTensor) for weight in trainer.model.parameters())
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    found = trainer.evaluate()
    losses += [found[name] for name in sorted(found) if name.endswith("loss")]
    counted: dict[str, Any] = {"tokens": trainer.state.num_input_tokens_seen}
    if trainer.args.per_device_train_batch_size != 4 and trainer.args.world_size < 4:  # others pad otherwise
        counted["operations"] = trainer.state.total_flos
    if trainer.compute_metrics is not None:
        said = trainer.predict(texts()[:4])
        counted |= {"evaluated": found["eval_accuracy"], "said": said.metrics["test_accuracy"]}
        counted["loss"] = said.metrics["test_loss"]
        counted["right"] = said.predictions[said.label_ids != -100].tolist()
        counted["unlabeled"] = unlabeled(trainer)
    return {name: whole(p.detach()) for name, p in trainer.model.named_parameters()}, losses, counted


def as_on_accelerators() -> None:
    """From now on accelerate takes this process's CPU for an accelerator: it shards weights on no other devices."""
    PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU


def whole(x: Tensor) -> Tensor:
    """A copy, of all ranks' parts."""
    return x.full_tensor() if isinstance(x, DTensor) else x.clone()


def unlabeled(trainer: Trainer) -> float:
    """Of the logits of texts without labels."""
    trainer.compute_metrics = trainer.preprocess_logits_for_metrics = None
    trainer.data_collator = lambda rows: {name: x for name, x in padded(rows).items() if name == "input_ids"}
    return float(trainer.predict(equal_texts()[:2]).predictions.std())


def alone(folder: Path, *cases: str) -> None:
    """Save what one process does."""
    torch.save({case: trained(folder, case) for case in cases}, folder / "alone.pt")


def rank(folder: Path, world_size: int, cases: tuple[str, ...], number: int) -> dict[str, Any]:
    """Return how far the weights and losses of one of several processes are from those of one process."""
    true = torch.load(folder / "alone.pt")
    found = {}
    for case in cases:
        mine, losses, counted = trained(folder, case, rings=world_size // 2)
        theirs, true_losses, truly_counted = true[case]
        errors = {name: worst_error([(mine[name], weight)]) for name, weight in theirs.items()}
        found[case] = {"weights": errors, "losses": [losses, true_losses], "counted": [counted, truly_counted]}
    return found


def over_processes(folder: Path, world_size: int, *cases: str) -> dict[str, Any]:
    """Save and return what the last of these processes returns; `alone` has run."""
    found: dict[str, Any] = forked_ranks(world_size, partial(rank, folder, world_size, cases))[-1]
    (folder / f"trainer-{world_size}.json").write_text(json.dumps(found), encoding="utf-8")
    return found


if __name__ == "__main__":
    torch.set_num_threads(1)
    folder = Path(sys.argv[1])
    tiny_model("qwen2", "eager")
    forked(partial(alone, folder, *(case for cases in CASES.values() for case in cases)))
    for world_size, cases in CASES.items():
        over_processes(folder, world_size, *cases)
