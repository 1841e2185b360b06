"""Losses of a user over two ranks against one process: `python -m tests.adapters.own_losses FOLDER`.

Both routes: the mixin and the configuration. One process runs transformers' Trainer with eager attention, in float64.
"""

from __future__ import annotations

import json
import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, kl_div
from transformers import Trainer, TrainerCallback, TrainingArguments

from ringattn import Ring
from ringattn.adapters.accelerate import RingParallelismConfig
from ringattn.adapters.local import local_attention
from ringattn.adapters.transformers.trainer import RingTrainerMixin
from tests.adapters.models import tiny_model
from tests.adapters.processes import forked, forked_ranks, worst_error
from tests.adapters.ranks import in_double
from tests.adapters.trainer import as_on_accelerators, padded, texts, whole

RANKS = 2
ROUTES = ("mixin", "configuration")
SHARDED = {"version": 2, "transformer_layer_cls_to_wrap": "Qwen2DecoderLayer"}


def real(inputs: dict[str, Tensor]) -> Tensor:
    """Which positions predict a label, (rows, tokens)."""
    labels = torch.nn.functional.pad(inputs["labels"], (0, 1), value=-100)[:, 1:]
    return labels != -100


class Forwards(Trainer):
    """Changes nothing."""

    def compute_loss(self, *args: Any, **options: Any) -> Any:
        return super().compute_loss(*args, **options)


class AddsTerm(Trainer):
    """Adds a term to Trainer's loss."""

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        loss, outputs = super().compute_loss(model, inputs, True, num_items_in_batch)
        loss = loss + self.term(outputs, inputs)
        return (loss, outputs) if return_outputs else loss

    def term(self, outputs: Any, inputs: Any) -> Tensor:
        """What is added."""
        raise NotImplementedError


class ZLoss(AddsTerm):
    def term(self, outputs: Any, inputs: Any) -> Tensor:
        return 0.1 * (outputs.logits.logsumexp(-1)[real(inputs)] ** 2).mean()


class Distilled(AddsTerm):
    """Its teacher is no prepared model and sees whole texts, before and after the student."""

    def term(self, outputs: Any, inputs: Any) -> Tensor:
        teacher = tiny_model("qwen2", "sdpa")
        with torch.no_grad():
            targets = teacher(input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"]).logits
        shown = real(inputs)
        taught = (outputs.logits.float().double() / 2).log_softmax(-1)[shown]
        return kl_div(taught, (targets.flip(-1) / 2).softmax(-1)[shown], reduction="batchmean")


class Hidden(Trainer):
    """Hidden states and weights, and the loss of one batch, squared; the number of labels is not handed on."""

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **others: Any) -> Any:
        outputs = model(**inputs, output_hidden_states=True)
        states = sum((state[real(inputs)] ** 2).mean() for state in outputs.hidden_states)
        loss = outputs.loss**2 + 0.01 * states + 0.01 * self.model.lm_head.weight.square().sum()
        return (loss, outputs) if return_outputs else loss


class Twice(Trainer):
    """Two calls of the model for one loss."""

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        flipped = {"input_ids": inputs["input_ids"].flip(0), "attention_mask": inputs["attention_mask"].flip(0)}
        second = model(**flipped).logits.flip(0)
        loss, outputs = super().compute_loss(model, inputs, True, num_items_in_batch)
        loss = loss + ((outputs.logits.softmax(-1) - second.roll(1, -1).softmax(-1))[real(inputs)] ** 2).mean()
        return (loss, outputs) if return_outputs else loss


class Calls(TrainerCallback):
    """Calls the model with whole texts at the end of each step."""

    def __init__(self) -> None:
        self.logits: list[Tensor] = []

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **others: Any) -> None:
        self.logits.append(called(model))


@torch.no_grad()
def called(model: Any) -> Tensor:
    """What a model says of a text, and after it, on every rank: logits, and tokens that it generates."""
    model.eval()
    prompt = torch.tensor([[5, 9, 33, 12]])
    with local_attention():
        logits = model(input_ids=prompt).logits
        more = model.generate(
            input_ids=prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=3, do_sample=False
        )
    model.train()
    return torch.cat([logits.flatten(), more.flatten()])


def left_padded(rows: list[dict[str, list[int]]]) -> dict[str, Tensor]:
    """A batch (texts, tokens), padded on the left, without labels that are predicted from padding."""
    batch = padded([{"input_ids": row["input_ids"][::-1]} for row in rows])
    batch = {name: x.flip(1) for name, x in batch.items()}
    batch["labels"][:, 1:][batch["attention_mask"][:, :-1] == 0] = -100
    return batch


def sum_of_squares(outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
    """A `compute_loss_func`: cross entropy and a term, over the labels of the whole step."""
    logits = outputs.logits[:, :-1]
    losses = cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten(), ignore_index=-100, reduction="none")
    return (losses + 0.1 * losses**2).sum() / num_items_in_batch


CASES: dict[str, tuple[type[Trainer], dict[str, Any], dict[str, Any]]] = {
    "forwards": (Forwards, {}, {}),
    "forwards, smoothed": (Forwards, {"label_smoothing_factor": 0.1}, {}),
    "z-loss": (ZLoss, {}, {}),
    "z-loss, labels of each process": (ZLoss, {"average_tokens_across_devices": False}, {}),
    "z-loss, checkpointed": (
        ZLoss,
        {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": False}},
        {},
    ),
    "distilled": (Distilled, {}, {}),
    "hidden states": (Hidden, {}, {}),
    "twice": (Twice, {}, {}),
    "function": (Trainer, {}, {"compute_loss_func": sum_of_squares}),
    "padded on the left": (Trainer, {}, {"data_collator": left_padded}),
    "z-loss, padded on the left": (ZLoss, {}, {"data_collator": left_padded}),
    "z-loss, sharded": (ZLoss, {"fsdp": True, "fsdp_config": SHARDED}, {}),
}
"""By name: the Trainer, and what differs of TrainingArguments and of Trainer's arguments.

Sharded weights come last: accelerate remembers them in variables of the process.
"""
OVER_RANKS = "fsdp", "fsdp_config"
"""Options that are left out in one process."""


def trained(folder: Path, case: str, route: str | None) -> dict[str, Any]:
    """Weights after two steps of two batches, the losses of steps and of an evaluation; `route` None: one process."""
    kind, differs, given = CASES[case]
    options: dict[str, Any] = {
        "per_device_train_batch_size": 3, "per_device_eval_batch_size": 3, "max_steps": 2, "use_cpu": True,
        "gradient_accumulation_steps": 2, "learning_rate": 1e-2, "logging_steps": 1, "report_to": [],
        "save_strategy": "no", "disable_tqdm": True, "optim": "sgd", "max_grad_norm": 0.0,
        "remove_unused_columns": False, "lr_scheduler_type": "constant",
    }  # fmt: skip
    if route is None:
        differs = {name: x for name, x in differs.items() if name not in OVER_RANKS}
    if route == "configuration":
        differs = {**differs, "parallelism_config": RingParallelismConfig(cp_size=RANKS)}
    args = TrainingArguments(output_dir=str(folder), **options | differs)
    if args.fsdp:
        as_on_accelerators()
    data = {"train_dataset": texts(), "eval_dataset": texts()[:4], "data_collator": padded, **given}
    with in_double():
        model = tiny_model("qwen2", "eager")
        if route == "mixin":
            with Ring(timeout_s=60.0) as ring:
                ours = type("Ours", (RingTrainerMixin, kind), {})
                return run(ours(model=model, args=args, ring=ring, **data))
        return run(kind(model=model, args=args, **data))


def run(trainer: Trainer) -> dict[str, Any]:
    """`trained`, of a trainer."""
    calls = Calls()
    trainer.add_callback(calls)
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    weights = {name: whole(p.detach()) for name, p in trainer.model.named_parameters()}
    evaluated = trainer.evaluate()["eval_loss"]
    texts_called = torch.stack([*calls.logits, called(trainer.model)])
    return {"weights": weights, "losses": losses, "evaluated": evaluated, "called": texts_called}


def alone(folder: Path) -> None:
    """Save what one process does."""
    torch.save({case: trained(folder, case, None) for case in CASES}, folder / "alone.pt")


def rank(folder: Path, number: int) -> dict[str, Any]:
    """Return how far one of two processes is from one process, by case and route."""
    true = torch.load(folder / "alone.pt")
    results: dict[str, Any] = {}
    for case in CASES:
        for route in ROUTES:
            ours, theirs = trained(folder, case, route), true[case]
            pairs = [(ours["weights"][name], weight) for name, weight in theirs["weights"].items()]
            results[f"{case} by {route}"] = {
                "weights": worst_error(pairs),
                "called": float((ours["called"] - theirs["called"]).abs().max()),
                "losses": [ours["losses"], theirs["losses"]],
                "evaluated": [ours["evaluated"], theirs["evaluated"]],
            }
    return results


if __name__ == "__main__":
    torch.set_num_threads(1)
    folder = Path(sys.argv[1])
    CASES = {name: CASES[name] for name in sys.argv[2:] or CASES}
    tiny_model("qwen2", "eager")  # imported here, so that no process that is forked has to
    forked(partial(alone, folder))
    results = forked_ranks(RANKS, partial(rank, folder))[-1]
    (folder / "own-losses.json").write_text(json.dumps(results), encoding="utf-8")
