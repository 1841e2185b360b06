"""transformers' Trainer over processes, compared with the same training in one process, in float64.

Two processes form one ring, four processes two rings. User-defined losses run with the mixin (`RingTrainerMixin`) and
with the configuration (`RingParallelismConfig`).
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from accelerate import DistributedType, PartialState
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.nn.functional import cross_entropy, kl_div
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, IterableDataset
from transformers import DataCollatorWithFlattening, EvalPrediction, Trainer, TrainerCallback, TrainingArguments

from ringattn import Ring
from ringattn.adapters import auto
from ringattn.adapters.accelerate import RingParallelismConfig
from ringattn.adapters.local import local_attention
from ringattn.adapters.transformers.trainer import RingTrainerMixin
from tests.adapters.hybrids import HYBRIDS, hybrid_model
from tests.adapters.models import tiny_model, with_lora
from tests.adapters.multi_token import multi_token_llama
from tests.adapters.processes import forked, forked_ranks, whole, worst_error
from tests.adapters.ranks import in_double

BY_CONFIGURATION = "by configuration"
"""The end of the name of a case in which a plain Trainer gets its ring from `RingParallelismConfig`."""
BY_SCRIPT = "by script"
"""The end of the name of a case in which `auto.enable` gives a plain Trainer its ring."""


class RingTrainer(RingTrainerMixin, Trainer):
    """transformers' Trainer over a ring."""


# --- data ------------------------------------------------------------------------------------------------------------


class Stream(IterableDataset):
    """An iterable data set without a length."""

    def __init__(self, texts: list[dict[str, list[int]]]) -> None:
        self.texts = texts

    def __iter__(self) -> Iterator[dict[str, list[int]]]:
        return iter(self.texts)


def texts() -> list[dict[str, list[int]]]:
    """Return twelve texts of different lengths."""
    generator = torch.Generator().manual_seed(3)
    return [{"input_ids": torch.randint(3, 64, (9 + 2 * i,), generator=generator).tolist()} for i in range(12)]


def equal_texts() -> list[dict[str, list[int]]]:
    """Return six texts of equal length, so that a mean over texts equals a mean over labels."""
    return [{"input_ids": row["input_ids"][:9]} for row in texts()[:6]]


def padded(rows: list[dict[str, list[int]]]) -> dict[str, Tensor]:
    """Return a batch (texts, tokens), padded on the right."""
    tokens = [torch.tensor(row["input_ids"]) for row in rows]
    batch = {"input_ids": pad_sequence(tokens, True, 0), "labels": pad_sequence(tokens, True, -100)}
    return {**batch, "attention_mask": (batch["labels"] != -100).long()}


def left_padded(rows: list[dict[str, list[int]]]) -> dict[str, Tensor]:
    """Return a batch (texts, tokens), padded on the left, without labels that are predicted from padding."""
    batch = padded([{"input_ids": row["input_ids"][::-1]} for row in rows])
    batch = {name: x.flip(1) for name, x in batch.items()}
    batch["labels"][:, 1:][batch["attention_mask"][:, :-1] == 0] = -100
    return batch


def unpadded(rows: list[dict[str, list[int]]]) -> dict[str, Tensor]:
    """Return a batch of texts of one length, without a mask."""
    tokens = torch.tensor([row["input_ids"] for row in rows])
    return {"input_ids": tokens, "labels": tokens.clone()}


def real(inputs: dict[str, Tensor]) -> Tensor:
    """Return a mask of the positions that predict a label, (rows, tokens)."""
    labels = torch.nn.functional.pad(inputs["labels"], (0, 1), value=-100)[:, 1:]
    return labels != -100


# --- losses and metrics of users -------------------------------------------------------------------------------------


def accuracy(evaluation: EvalPrediction) -> dict[str, float]:
    """Return the fraction of labels that the model predicts correctly."""
    predicted, labels = evaluation.predictions[:, :-1], evaluation.label_ids[:, 1:]
    return {"accuracy": float((predicted == labels)[labels != -100].mean())}


def likeliest(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the most likely token at each position, which takes less memory than the logits."""
    return logits.argmax(-1)


def sum_of_squares(outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
    """Return this batch's part of a loss whose divisor is the label count of the whole step.

    A mean over each batch would differ between one ring and two.
    """
    losses = cross_entropy(outputs.logits[:, :-1].mT, labels[:, 1:], ignore_index=-100, reduction="none")
    return (losses + 0.1 * losses**2).sum() / num_items_in_batch


class Forwards(Trainer):
    """A Trainer whose `compute_loss` only calls that of its base class."""

    def compute_loss(self, *args: Any, **options: Any) -> Any:
        return super().compute_loss(*args, **options)


class UnevenBatches:
    """A user's batch sampler of seven texts, which has only what torch requires."""

    def __iter__(self) -> Iterator[list[int]]:
        return iter([[0, 1], [2, 3, 4], [5], [6]])

    def __len__(self) -> int:
        return 4


class OwnLoader(Trainer):
    """A Trainer that evaluates batches of another size than `per_device_eval_batch_size`."""

    def get_eval_dataloader(self, eval_dataset: Any = None) -> Any:
        return self.accelerator.prepare(DataLoader(self.eval_dataset, collate_fn=self.data_collator, **self.batches()))

    def batches(self) -> dict[str, Any]:
        """Return the arguments of DataLoader that define its batches."""
        return {"batch_size": 4}


class UnevenLoader(OwnLoader):
    """A Trainer that evaluates batches of different sizes."""

    def batches(self) -> dict[str, Any]:
        return {"batch_sampler": UnevenBatches()}


class OwnStep(Trainer):
    """A Trainer with its own step of evaluation."""

    @torch.no_grad()
    def prediction_step(self, model: Any, inputs: Any, prediction_loss_only: bool, ignore_keys: Any = None) -> Any:
        inputs = self._prepare_inputs(inputs)
        if "labels" not in inputs:
            return None, model(**inputs).logits, None
        loss, outputs = self.compute_loss(model, inputs, return_outputs=True)
        return loss, outputs.logits, inputs["labels"]


class MeanOfMeans(Trainer):
    """A Trainer whose loss is the mean over each batch, and then over the batches of a step."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.model_accepts_loss_kwargs = False


class AddsTerm(Trainer):
    """A Trainer that adds a term to the loss."""

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        before = self.before(model, inputs)
        loss, outputs = super().compute_loss(model, inputs, True, num_items_in_batch)
        loss = loss + self.term(outputs, inputs, before)
        return (loss, outputs) if return_outputs else loss

    def before(self, model: Any, inputs: Any) -> Any:
        """Return values for `term` that must be computed before Trainer's loss; None by default."""

    def term(self, outputs: Any, inputs: Any, before: Any) -> Tensor:
        """Return the term to add to the loss."""
        raise NotImplementedError


class ZLoss(AddsTerm):
    def term(self, outputs: Any, inputs: Any, before: Any) -> Tensor:
        return 0.1 * (outputs.logits.logsumexp(-1)[real(inputs)] ** 2).mean()


class Distilled(AddsTerm):
    """Distillation from a teacher that is not prepared for a ring and gets whole texts."""

    def term(self, outputs: Any, inputs: Any, before: Any) -> Tensor:
        teacher = tiny_model("qwen2", "sdpa")
        with torch.no_grad():
            targets = teacher(input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"]).logits
        shown = real(inputs)
        taught = (outputs.logits.float().double() / 2).log_softmax(-1)[shown]
        return kl_div(taught, (targets.flip(-1) / 2).softmax(-1)[shown], reduction="batchmean")


class Twice(AddsTerm):
    """A loss that needs two calls of the model."""

    def before(self, model: Any, inputs: Any) -> Tensor:
        flipped = {"input_ids": inputs["input_ids"].flip(0), "attention_mask": inputs["attention_mask"].flip(0)}
        second: Tensor = model(**flipped).logits.flip(0)
        return second

    def term(self, outputs: Any, inputs: Any, before: Any) -> Tensor:
        return ((outputs.logits.softmax(-1) - before.roll(1, -1).softmax(-1))[real(inputs)] ** 2).mean()


class AddsRouterLoss(AddsTerm):
    """A loss that adds the router loss again."""

    def term(self, outputs: Any, inputs: Any, before: Any) -> Tensor:
        router_loss: Tensor = outputs.aux_loss
        return 0.3 * router_loss**2


class Hidden(Trainer):
    """A loss from the model's squared loss, hidden states and weights. It ignores the number of labels of the step."""

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **others: Any) -> Any:
        outputs = model(**inputs, output_hidden_states=True)
        states = sum((state[real(inputs)] ** 2).mean() for state in outputs.hidden_states)
        loss = outputs.loss**2 + 0.01 * states + 0.01 * self.model.lm_head.weight.square().sum()
        return (loss, outputs) if return_outputs else loss


class Calls(TrainerCallback):
    """A callback that calls the model with a whole text at the end of each step."""

    def __init__(self) -> None:
        self.values: list[float] = []

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **others: Any) -> None:
        self.values += called(model)


@torch.no_grad()
def called(model: Any) -> list[float]:
    """Call the model with a whole text, without the ring. Return the logits, and the prompt with generated tokens."""
    model.eval()
    prompt = torch.tensor([[5, 9, 33, 12]])
    with local_attention():
        logits = model(input_ids=prompt).logits
        more = model.generate(
            input_ids=prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=3, do_sample=False
        )
    model.train()
    return [*logits.flatten().tolist(), *more.flatten().tolist()]


# --- cases -----------------------------------------------------------------------------------------------------------

CHECKPOINTED = {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": False}}
SHARDED = {"fsdp": True, "fsdp_config": {"version": 2, "transformer_layer_cls_to_wrap": "Qwen2DecoderLayer"}}
LOSSES: dict[str, tuple[type[Trainer], dict[str, Any], dict[str, Any]]] = {
    "forwards": (Forwards, {}, {}),
    "forwards, smoothed": (Forwards, {"label_smoothing_factor": 0.1}, {}),
    "z-loss": (ZLoss, {}, {}),
    "z-loss, labels of each process": (ZLoss, {"average_tokens_across_devices": False}, {}),
    "z-loss, checkpointed": (ZLoss, CHECKPOINTED, {}),
    "distilled": (Distilled, {}, {}),
    "hidden states": (Hidden, {}, {}),
    "twice": (Twice, {}, {}),
    "function": (Trainer, {}, {"compute_loss_func": sum_of_squares}),
    "padded on the left": (Trainer, {}, {"data_collator": left_padded}),
    "z-loss, padded on the left": (ZLoss, {}, {"data_collator": left_padded}),
    "routed, own loss": (AddsRouterLoss, {}, {}),
    "z-loss, sharded": (ZLoss, SHARDED, {}),
}
"""Losses that users define: the Trainer, and the TrainingArguments and arguments of Trainer that differ."""
CONFIGURED = (
    "forwards", "forwards, smoothed", "z-loss", "z-loss, labels of each process", "hidden states", "function",
    "z-loss, sharded",
)  # fmt: skip
"""The losses that are also computed with a ring by configuration. The routes differ only in how they find the ring."""
QUICK = ("packed, reentrant", "packed, reentrant by configuration")
_TWO = (
    "packed",
    "made by model_init",
    "streamed",
    "measured",
    "measured, own loader",
    "own step, measured",
    "packed, selecting keys",
    "by configuration",
    "plain by configuration",
    "packed by configuration",
    "packed, checkpointed by configuration",
    "plain, compiled by configuration",
    "plain, compiled, checkpointed by configuration",
    "measured by configuration",
    "streamed by configuration",
    "routed, checkpointed",
    "routed, labels of each process",
    "packed, several tokens ahead",
    *LOSSES,
    *(f"{case} {BY_CONFIGURATION}" for case in CONFIGURED),
    "packed, sharded by configuration",
)
DIVIDED = ("divided", "divided, measured", "divided, qwen3_5_text", "packed, divided, checkpointed",
           "packed, divided, sharded")  # fmt: skip
"""Cases with `max_tokens_per_rank`, compared with whole batches in one process. Weights of the last one are sharded."""
CASES = {
    2: tuple(sorted(_TWO, key=lambda case: "sharded" in case)),
    3: ("packed, unclipped, labels of each process",),
    4: (
        "two rings",
        "two rings, full batches",
        "two rings, measured",
        "two rings, measured, own loader",
        "two rings, measured, uneven loader",
        "two rings by configuration",
        "two rings, measured by configuration",
        "two rings, own loss by configuration",
    ),
}
"""By the number of processes. Sharded weights come last: accelerate remembers them in variables of the process."""


def settings(case: str, rings: int) -> tuple[type[Trainer], dict[str, Any], dict[str, Any]]:
    """Return the Trainer's class, its TrainingArguments and its other arguments.

    `rings`: the number of rings, or 0 for the reference in one process. The last batch of an epoch and of an evaluation
    is not full, unless texts are packed.
    """
    name, kind = case.removesuffix(BY_CONFIGURATION).rstrip(), Trainer
    args: dict[str, Any] = {
        "per_device_train_batch_size": 3, "per_device_eval_batch_size": 3, "num_train_epochs": 2,
        "gradient_accumulation_steps": 2, "learning_rate": 1e-2, "logging_steps": 1, "report_to": [],
        "save_strategy": "no", "disable_tqdm": True, "optim": "sgd", "max_grad_norm": 1.0, "use_cpu": True,
    }  # fmt: skip
    uneven = sorted(texts()[:7], key=lambda row: -len(row["input_ids"]))
    trainer: dict[str, Any] = {"train_dataset": uneven, "eval_dataset": uneven, "data_collator": padded}
    if name in LOSSES:
        kind, options, arguments = LOSSES[name]
        args |= {"max_steps": 2, "max_grad_norm": 0.0, "remove_unused_columns": False, **options}
        trainer |= {"train_dataset": texts(), "eval_dataset": texts()[:4], "callbacks": [Calls()], **arguments}
    elif case.endswith(BY_CONFIGURATION):
        args |= {"include_num_input_tokens_seen": "non_padding"}
    if case.startswith("packed"):
        args |= {"per_device_train_batch_size": 2, "per_device_eval_batch_size": 2, "max_steps": 3}
        trainer = {"train_dataset": texts(), "eval_dataset": texts()[:4], "data_collator": DataCollatorWithFlattening()}
    if case.startswith("routed"):
        args |= {"max_steps": 2}
        trainer |= {"model": tiny_model("mixtral", "eager")}
    if "several tokens ahead" in case:
        trainer |= {"model": multi_token_llama()}
    if "labels of each process" in case:
        args |= {"average_tokens_across_devices": False}
    if case == "packed, labels of each process":
        (first, *others) = texts()
        trainer |= {"train_dataset": [{"input_ids": first["input_ids"][1:]}, *others]}  # an odd number of labels
    if case.startswith("streamed"):
        args |= {"max_steps": 3, "accelerator_config": {"dispatch_batches": False}}
        trainer |= {"train_dataset": Stream(uneven), "eval_dataset": {"some": Stream(uneven), "all": texts()[:7]}}
    if case.removeprefix("divided, ").startswith("measured"):
        args |= {"label_smoothing_factor": 0.1, "include_num_input_tokens_seen": "non_padding", "num_train_epochs": 1}
    if "measured" in case:
        trainer |= {"compute_metrics": accuracy, "preprocess_logits_for_metrics": likeliest}
    if case.startswith("own step"):
        kind = OwnStep
        args |= {"max_steps": 2}
    if case.endswith("loader"):
        kind = UnevenLoader if "uneven" in case else OwnLoader
        args |= {"max_steps": 2, "accelerator_config": {"even_batches": False}}
    if case.startswith("two rings"):
        args |= {"per_device_train_batch_size": 2 if rings else 4}
        trainer |= {"train_dataset": texts()}
    if "own loss" in case:
        args |= {"max_steps": 2, "max_grad_norm": 0.0}
        trainer |= {"compute_loss_func": sum_of_squares, "eval_dataset": equal_texts()[:3]}
    if "selecting" in case:
        args |= {"max_steps": 20, "gradient_accumulation_steps": 1}
        trainer |= {"train_dataset": texts() * 4}
    if case.endswith(BY_CONFIGURATION) and rings:
        args |= {"parallelism_config": RingParallelismConfig(cp_size=2)}
    if case.startswith("plain"):
        trainer |= {"train_dataset": equal_texts(), "eval_dataset": equal_texts(), "data_collator": unpadded}
    if "checkpointed" in case or "reentrant" in case:
        args |= {**CHECKPOINTED, "gradient_checkpointing_kwargs": {"use_reentrant": "reentrant" in case}}
    if "compiled" in case:
        args |= {"max_steps": 2, "gradient_accumulation_steps": 1, "torch_compile_backend": "aot_eager"}
        args |= {"torch_compile": rings > 0}
    if "unclipped" in case:
        args |= {"max_grad_norm": 0.0}
    if "sharded" in case:
        args |= SHARDED if rings else dict.fromkeys(SHARDED)
    if case == "two rings, full batches":
        args |= {"dataloader_drop_last": True, "num_train_epochs": 1}
        trainer |= {"eval_dataset": texts()[:11]}
    if case == "made by model_init":
        trainer |= {"model_init": lambda: tiny_model("qwen2", "eager")}
    elif "compiled" in case:  # saves seconds of compilation
        trainer |= {"model": tiny_model("llama", "eager", num_hidden_layers=1)}
    elif "model" not in trainer:
        trainer |= {"model": tiny_model("deepseek_v32" if "selecting" in case else "qwen2", "eager")}
    if (hybrid := case.removeprefix("divided, ")) in HYBRIDS:
        args |= {"max_steps": 20, "gradient_accumulation_steps": 1, "logging_steps": 5, "learning_rate": 1e-3}
        trainer |= {"model": hybrid_model(hybrid), "train_dataset": texts(), "eval_dataset": texts()[:4]}
    if "divided" in case and rings:  # the longest text has 31 tokens, and a batch up to 87
        trainer |= {"max_tokens_per_rank": 16}
    if "LoRA" in case:
        trainer |= {"model": with_lora(trainer["model"])}
    return kind, args, trainer


# --- runs ------------------------------------------------------------------------------------------------------------


@in_double()
def trained(folder: str, case: str, rings: int = 0) -> tuple[dict[str, Tensor], list[float], dict[str, Any]]:
    """Train `case`. Return the final weights, the losses of all steps and evaluations, and other values to compare."""
    kind, options, data = settings(case, rings)
    args = TrainingArguments(output_dir=folder, **options)
    if args.fsdp:
        as_on_accelerators()
    if rings and case.endswith(BY_SCRIPT):
        auto.enable(args.world_size // rings)  # for all later Trainers of the process too
    elif rings and not case.endswith(BY_CONFIGURATION):
        mesh = init_device_mesh("cpu", (rings, args.world_size // rings), mesh_dim_names=("dp", "cp"))
        with Ring(mesh, timeout_s=60.0) as ring:
            return run(type("Ours", (RingTrainerMixin, kind), {})(args=args, ring=ring, **data))
    return run(kind(args=args, **data))


def run(trainer: Trainer) -> tuple[dict[str, Tensor], list[float], dict[str, Any]]:
    """Train, and return what `trained` returns."""
    trainer.train()
    if trainer.args.fsdp:
        # Some weights are not DTensors: `Calls` leaves those gathered that FSDP2 shards in the model's root group.
        assert any(isinstance(weight, DTensor) for weight in trainer.model.parameters())
    weights = {name: whole(p.detach()) for name, p in trainer.model.named_parameters()}
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    evaluated = trainer.evaluate()
    losses += [evaluated[name] for name in sorted(evaluated) if name.endswith("loss")]
    counted: dict[str, Any] = {"tokens": trainer.state.num_input_tokens_seen}
    for callback in trainer.callback_handler.callbacks:
        if isinstance(callback, Calls):
            counted["called"] = callback.values + called(trainer.model)
    if trainer.args.per_device_train_batch_size != 4 and trainer.args.world_size < 4:  # otherwise the padding differs
        counted["operations"] = trainer.state.total_flos
    if trainer.compute_metrics is not None:
        prediction = trainer.predict(texts()[:4])
        counted |= {"evaluated": evaluated["eval_accuracy"], "predicted": prediction.metrics["test_accuracy"]}
        counted["loss"] = prediction.metrics["test_loss"]
        counted["right"] = prediction.predictions[prediction.label_ids != -100].tolist()
        counted["unlabeled"] = unlabeled(trainer)
    return weights, losses, counted


def as_on_accelerators() -> None:
    """Make accelerate treat this process's CPU as an accelerator, because it shards weights only on accelerators."""
    PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU


def unlabeled(trainer: Trainer) -> float:
    """Return the standard deviation of the logits that `predict` returns for texts without labels."""
    trainer.compute_metrics = trainer.preprocess_logits_for_metrics = None
    trainer.data_collator = lambda rows: {name: x for name, x in padded(rows).items() if name == "input_ids"}
    return float(trainer.predict(equal_texts()[:2]).predictions.std())


def compute_errors(folder: str, world_size: int, cases: list[str]) -> dict[str, Any]:
    """Return for each case the errors of the weights, and pairs of measured and expected losses and counts.

    `world_size` processes, forked from this one, are compared with one; the values are those of the last rank.
    """
    tiny_model("qwen2", "eager")  # imported here, so that no forked process has to
    (expected,) = forked(lambda: {case: trained(folder, case) for case in cases})
    results: dict[str, Any] = forked_ranks(world_size, partial(rank, folder, world_size, expected))[-1]
    return results


def rank(folder: str, world_size: int, expected: dict[str, Any], number: int) -> dict[str, Any]:
    """Return what `compute_errors` returns, of this rank."""
    errors = {}
    for case, (expected_weights, true_losses, truly_counted) in expected.items():
        weights, losses, counted = trained(folder, case, rings=world_size // 2)
        off_by = {name: worst_error([(weights[name], weight)]) for name, weight in expected_weights.items()}
        errors[case] = {"weights": off_by, "losses": [losses, true_losses], "counted": [counted, truly_counted]}
    return errors
