"""TRL's trainers DPO, KTO, Reward, GRPO and RLOO over two ranks against one process.

Needs trl, peft and datasets, which `tests.adapters.environments` installs.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import torch
from accelerate import PartialState
from datasets import Dataset, load_from_disk
from peft import LoraConfig, get_peft_model
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import AutoModelForSequenceClassification
from trl import (
    DPOConfig,
    DPOTrainer,
    GRPOConfig,
    GRPOTrainer,
    KTOConfig,
    KTOTrainer,
    RewardConfig,
    RewardTrainer,
    RLOOConfig,
    RLOOTrainer,
)

from ringattn import Ring, UnsupportedError
from ringattn.adapters.groups import ring_of_ranks
from ringattn.adapters.transformers import prepare
from ringattn.adapters.trl import RingDPOTrainer, RingGRPOTrainer, RingKTOTrainer, RingRewardTrainer, RingRLOOTrainer
from tests.adapters.models import filled, tiny_model
from tests.adapters.processes import forked, forked_ranks, whole
from tests.adapters.ranks import in_double
from tests.adapters.sft import COMPILED, LORA, OVER_RANKS, SHARDED, rank, tokenizer
from tests.adapters.trainer import as_on_accelerators

RANKS = 2
TRAINERS: dict[str, tuple[Any, Any, Any]] = {
    "DPO": (DPOConfig, DPOTrainer, RingDPOTrainer),
    "KTO": (KTOConfig, KTOTrainer, RingKTOTrainer),
    "Reward": (RewardConfig, RewardTrainer, RingRewardTrainer),
    "GRPO": (GRPOConfig, GRPOTrainer, RingGRPOTrainer),
    "RLOO": (RLOOConfig, RLOOTrainer, RingRLOOTrainer),
}
CASES: dict[str, dict[str, Any]] = {
    "DPO": {},
    "DPO, losses": {"loss_type": ["ipo", "aot", "sft", "sigmoid_norm"], "loss_weights": [1.0, 0.5, 0.3, 0.7]},
    "DPO, weighted": {"use_weighting": True, "ld_alpha": 0.4, "f_divergence_type": "js_divergence"},
    "DPO, precomputed": {"precompute_ref_log_probs": True, "precompute_ref_batch_size": 3},
    "DPO, LoRA": {},
    "DPO, LoRA, trained before": {},
    "DPO, LoRA, precomputed": {"precompute_ref_log_probs": True},
    "DPO, synced": {"sync_ref_model": True, "ref_model_sync_steps": 1},
    "DPO, checkpointed": {"gradient_checkpointing": True, "truncation_mode": "keep_end", "max_length": 14},
    "DPO, reentrant": {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": True}},
    "DPO, sharded": {"fsdp": True, "fsdp_config": SHARDED},
    "DPO, compiled": COMPILED,
    "DPO, routed": {"router_aux_loss_coef": 0.3},
    "KTO": {},
    "KTO, unpaired": {"loss_type": "apo_zero_unpaired", "undesirable_weight": 0.6},
    "KTO, precomputed": {"precompute_ref_log_probs": True},
    "KTO, LoRA": {"gradient_checkpointing": True},
    "KTO, sharded": {"fsdp": True, "fsdp_config": SHARDED},
    "KTO, compiled": COMPILED,
    "Reward": {"center_rewards_coefficient": 0.1},
    "Reward, margin": {},
    "Reward, LoRA": {},
    "Reward, checkpointed": {"gradient_checkpointing": True},
    "Reward, sharded": {"fsdp": True, "fsdp_config": SHARDED},
    "GRPO": {"beta": 0.1},
    "GRPO, reused": {
        "num_iterations": 2,
        "steps_per_generation": 4,
        "loss_type": "grpo",
        "scale_rewards": "batch",
        "importance_sampling_level": "sequence",
    },
    "GRPO, routed": {"router_aux_loss_coef": 0.3},
    "GRPO, LoRA": {
        "beta": 0.1,
        "loss_type": "dr_grpo",
        "top_entropy_quantile": 0.5,
        "gradient_checkpointing": True,
        "mask_truncated_completions": True,
    },
    "GRPO, compiled": COMPILED,
    "RLOO": {"num_iterations": 2},
    "RLOO, LoRA": {"normalize_advantages": True},
}
"""By name, which begins with the trainer: the options that differ."""


def generates(case: str) -> bool:
    return case.startswith(("GRPO", "RLOO"))


def high_words(completions: list[str], **others: Any) -> list[float]:
    """Reward each completion by the mean number of its words: w63 is the best."""
    numbers = [[int(word[1:]) for word in text.split()] for text in completions]
    return [sum(words) / (63 * max(1, len(words))) for words in numbers]


def length(completions: list[str], **others: Any) -> list[float]:
    """Reward long completions."""
    return [len(text.split()) / 9 for text in completions]


def data(case: str) -> Dataset:
    """Return fourteen prompts of different lengths with completions, for the trainer of a case."""
    generator = torch.Generator().manual_seed(3)

    def random_words(count: int) -> str:
        return " ".join(f"w{i}" for i in torch.randint(4, 64, (count,), generator=generator).tolist())

    rows: list[dict[str, Any]] = []
    for i in range(14):
        prompt = random_words(3 + 5 * i % 11)
        if generates(case):
            rows.append({"prompt": prompt})
            continue
        if case.startswith("KTO"):
            rows.append(
                {"prompt": prompt, "completion": f" {random_words(2 + 7 * i % 13)} w2", "label": i % 3 > 0 or i > 11}
            )
            continue
        rows.append(
            {"prompt": prompt, "chosen": f" {random_words(2 + 7 * i % 13)} w2", "rejected": f" {random_words(4 + i)}"}
        )
        if "margin" in case:
            rows[-1]["margin"] = 0.1 * i
    return Dataset.from_list(rows)


def model(case: str) -> Any:
    """Return the model of a case."""
    policy = tiny_model("mixtral" if "routed" in case else "llama", "eager")
    if case.startswith("Reward"):
        config = policy.config
        config.num_labels = 1
        return filled(AutoModelForSequenceClassification.from_config(config, attn_implementation="eager"))
    return policy


def reference(case: str) -> Any:
    """Return a model that differs a little from the one that is trained."""
    other = model(case)
    torch.manual_seed(9)
    for parameter in other.parameters():
        parameter.data += 0.05 * torch.randn_like(parameter)
    return other


def trained(folder: str, case: str, ring: Ring | None) -> tuple[dict[str, Tensor], list[dict[str, float]]]:
    """Train `case` for three steps, on one process if `ring` is None.

    Return the trained weights, and the logged metrics of each step and of an evaluation.
    """
    config, plain, over_ring = TRAINERS[case.split(",")[0]]
    differs = CASES[case]
    if ring is None:
        differs = {name: x for name, x in differs.items() if name not in OVER_RANKS}
    settings = {
        "per_device_train_batch_size": 2, "per_device_eval_batch_size": 2, "gradient_accumulation_steps": 2,
        "max_steps": 3, "learning_rate": 1e-2, "logging_steps": 1, "report_to": [], "save_strategy": "no",
        "disable_tqdm": True, "optim": "sgd", "use_cpu": True, "bf16": False, "gradient_checkpointing": False,
        "max_length": 24, "lr_scheduler_type": "constant",
    }  # fmt: skip
    if generates(case):
        del settings["max_length"]
        settings |= {"max_completion_length": 9, "num_generations": 2, "temperature": 0.9}
    rows = load_from_disk(f"{folder}/data of {case}, {1 if ring is None else RANKS}")
    policy = model(case)
    arguments: dict[str, Any] = {
        "model": policy, "processing_class": tokenizer(),
        "train_dataset": rows, "eval_dataset": rows.select(range(5)),
        "args": config(output_dir=f"{folder}/{case}", **{**settings, **differs}),
    }  # fmt: skip
    if generates(case):
        arguments["reward_funcs"] = [high_words, length]
        if "LoRA" not in case:  # TRL loads the reference from the model's path, which is that of nothing here
            policy.config._name_or_path = f"{folder}/model"
    if "LoRA" in case:
        torch.manual_seed(7)
        lora = LoraConfig(**LORA) if config is not RewardConfig else LoraConfig(**{**LORA, "task_type": "SEQ_CLS"})
        if "trained before" in case:
            arguments["model"] = get_peft_model(policy, lora).double()
        else:
            arguments["peft_config"] = lora
    elif config not in (RewardConfig, GRPOConfig, RLOOConfig) and case != "DPO, precomputed":
        arguments["ref_model"] = reference(case)
    if arguments["args"].fsdp:
        as_on_accelerators()
    trainer = plain(**arguments) if ring is None else over_ring(ring=ring, **arguments)
    trainer.train()
    if arguments["args"].fsdp:
        assert all(isinstance(weight, DTensor) for weight in trainer.model.parameters())
    weights = {name: whole(p.detach()) for name, p in trainer.model.named_parameters() if p.requires_grad}
    trainer.evaluate()
    untimed = [
        {name: x for name, x in entry.items() if not any(word in name for word in ("time", "per_second"))}
        for entry in trainer.state.log_history
        if "train_runtime" not in entry
    ]
    return weights, untimed


def train_errors(folder: str, trainer: str, *cases: str) -> dict[str, Any]:
    """Return the errors of two processes against a single process, for all cases of a trainer, or those in `cases`.

    All processes are forked from this one.
    """
    tiny_model("llama", "eager")  # imported here, so that no forked process has to
    cases = cases or tuple(case for case in CASES if case.split(",")[0] == trainer)
    for case in cases:
        for count in (1, RANKS):  # TRL keeps reference log-probabilities in a file next to the data
            data(case).save_to_disk(f"{folder}/data of {case}, {count}")

    tiny_model("llama", "eager").save_pretrained(f"{folder}/model")

    def alone() -> dict[str, Any]:
        with in_double():
            return {case: trained(folder, case, None) for case in cases}

    (expected,) = forked(alone)
    results: dict[str, Any] = forked_ranks(RANKS, partial(rank, trained, folder, expected))[0]
    return results


def evaluated(folder: str, trainer: str, ring: Ring | None) -> dict[str, float]:
    """Return the metrics of an evaluation without training, of five texts in batches of two, and of `predict`."""
    config, plain, over_ring = TRAINERS[trainer]
    args = config(
        output_dir=f"{folder}/{trainer}", per_device_eval_batch_size=2, report_to=[], disable_tqdm=True, use_cpu=True,
        bf16=False, gradient_checkpointing=False, max_length=24,
    )  # fmt: skip
    rows = data(trainer).select(range(5))
    arguments = {"model": model(trainer), "args": args, "train_dataset": rows, "eval_dataset": rows,
                 "processing_class": tokenizer()}  # fmt: skip
    if trainer in ("DPO", "KTO"):
        arguments["ref_model"] = reference(trainer)
    host = plain(**arguments) if ring is None else over_ring(ring=ring, **arguments)
    metrics = host.evaluate()
    prediction = host.predict(host.eval_dataset)
    metrics |= prediction.metrics
    metrics |= {"predicted": float(len(prediction.predictions)), "labels": float(np.sum(prediction.label_ids))}
    return {name: x for name, x in metrics.items() if not any(word in name for word in ("time", "per_second"))}


def evaluation_over_two_rings(folder: str, *trainers: str) -> dict[str, list[dict[str, float]]]:
    """Return the metrics of an evaluation by two rings of two ranks, and by one process, by trainer."""

    def alone() -> dict[str, dict[str, float]]:
        with in_double():
            return {trainer: evaluated(folder, trainer, None) for trainer in trainers}

    def of_rank(number: int) -> dict[str, dict[str, float]]:
        PartialState(cpu=True)  # opens the process group
        with ring_of_ranks(2, "cpu") as ring, in_double():
            return {trainer: evaluated(folder, trainer, ring) for trainer in trainers}

    tiny_model("llama", "eager")  # imported here, so that no forked process has to
    (truly,) = forked(alone)
    over_rings = forked_ranks(4, of_rank)
    return {trainer: [over_rings[3][trainer], truly[trainer]] for trainer in trainers}


def refused_options(folder: str) -> dict[str, str]:
    """Return the refusals of options, by option."""
    chunked = prepare(tiny_model("llama", "eager"), chunked_loss=8)
    wrong: dict[str, tuple[str, Any, dict[str, Any]]] = {
        "metrics": ("Reward", model("Reward"), {"compute_metrics": print}),
        "compiled": ("Reward", model("Reward"), {}),
        "chunked": ("KTO", chunked, {"ref_model": tiny_model("llama", "eager")}),
        "rollout": ("GRPO", model("GRPO"), {"reward_funcs": length, "rollout_func": print}),
    }
    messages = {}
    with Ring() as ring:
        for name, (kind, policy, options) in wrong.items():
            config, _, over_ring = TRAINERS[kind]
            args = config(
                output_dir=folder, report_to=[], use_cpu=True, bf16=False, gradient_checkpointing=False,
                **(COMPILED if name == "compiled" else {}),
            )  # fmt: skip
            try:
                over_ring(model=policy, args=args, train_dataset=data(kind), processing_class=tokenizer(), ring=ring,
                          **options)  # fmt: skip
                messages[name] = "accepted"
            except UnsupportedError as error:
                messages[name] = str(error)
    return messages
