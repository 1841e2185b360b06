"""Actors and critics of verl in float64: over rings, with the patch of docs/recipe-verl.md, against one process.

Needs the environment variables and packages that `test_recipes.py` sets.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import verl.utils.model as verl_model
from torch import Tensor
from transformers import AutoModelForTokenClassification
from verl.trainer.config import CheckpointConfig
from verl.utils import tensordict_utils as tu
from verl.workers.config import (
    ActorConfig,
    CriticConfig,
    FSDPEngineConfig,
    FSDPOptimizerConfig,
    HFModelConfig,
    TrainingWorkerConfig,
)
from verl.workers.engine_workers import TrainingWorker
from verl.workers.utils.losses import ppo_loss, value_loss
from verl.workers.utils.padding import left_right_2_no_padding, no_padding_2_padding

from tests.adapters.models import tiny_model
from tests.adapters.processes import forked_ranks, whole, worst_error
from tests.adapters.ranks import in_double
from tests.doc_code import block_of

PROMPT, RESPONSE, TEXTS = 9, 13, 12
CASES: dict[str, dict[str, Any]] = {
    "actor": {},
    "actor, LoRA": {"lora_rank": 4, "enable_gradient_checkpointing": False},
    "critic": {},
}
"""By name, which begins with the role: options of verl's model."""
REFUSED: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "padding": ({}, {"pad_to_length": True, "pad_to_length_bucket": 64}),
    "fused": ({"use_fused_kernels": True, "fused_kernel_options": {"impl_backend": "torch"}}, {}),
}
"""By name: options of verl's model and of its engine that the patch cannot train with."""
Results = dict[str, list[Tensor]]


def rollouts(rows: slice) -> dict[str, Tensor]:
    """Return some of twelve prompts, padded on the left, and responses, padded on the right, with advantages."""
    generator = torch.Generator().manual_seed(5)
    tokens = torch.randint(3, 64, (TEXTS, PROMPT + RESPONSE), generator=generator)
    mask = torch.zeros_like(tokens)
    for row in range(TEXTS):
        mask[row, row % 8 : PROMPT + 2 + row % 11] = 1
    response_mask = mask[:, PROMPT:].clone()
    scores = torch.randn(TEXTS, RESPONSE, generator=generator, dtype=torch.float64) * response_mask
    batch = {
        "input_ids": tokens * mask, "attention_mask": mask, "position_ids": (mask.cumsum(1) - 1).clamp(min=0),
        "prompts": tokens[:, :PROMPT], "responses": tokens[:, PROMPT:], "response_mask": response_mask,
        "advantages": scores, "returns": scores,
    }  # fmt: skip
    return {name: values[rows] for name, values in batch.items()}


def worker(folder: str, case: str, ring_size: int, options: dict[str, Any], **engine: Any) -> TrainingWorker:
    """Return verl's worker of a case, with its loss. `options`, `engine`: options of the model and of the engine."""
    critic = case == "critic"
    config = TrainingWorkerConfig(
        model_type="value_model" if critic else "language_model",
        model_config=HFModelConfig(
            path=f"{folder}/model", load_tokenizer=False, override_config={"attn_implementation": "eager"}, **options
        ),
        engine_config=FSDPEngineConfig(
            strategy="fsdp2", ulysses_sequence_parallel_size=ring_size, use_torch_compile=False,
            use_dynamic_bsz="LoRA" in case, max_token_len_per_gpu=60, infer_max_token_len_per_gpu=60,
            micro_batch_size_per_gpu=2, infer_micro_batch_size_per_gpu=3, mixed_precision={"param_dtype": "fp32"},
            **engine,
        ),
        optimizer_config=FSDPOptimizerConfig(optimizer="SGD", lr=0.1, override_optimizer_config={"momentum": 0.0}),
        checkpoint_config=CheckpointConfig(),
    )  # fmt: skip
    torch.manual_seed(7)
    made = TrainingWorker(config)
    made.reset()
    losses = {"strategy": "fsdp2", "rollout_n": 1, "ppo_micro_batch_size_per_gpu": 2}
    if critic:
        made.set_loss_fn(partial(value_loss, config=CriticConfig(**losses)))
    else:
        actor = ActorConfig(**losses, entropy_coeff=0.01, use_kl_loss=True, kl_loss_coef=0.1)
        made.set_loss_fn(partial(ppo_loss, config=actor))
    return made


def updated(folder: str, case: str, ring_size: int) -> Results:
    """Update a model three times. Return what it predicts before each update, the metrics, and the trained weights."""
    host = worker(folder, case, ring_size, CASES[case])
    ring, rows = dist.get_rank() // ring_size, TEXTS * ring_size // dist.get_world_size()
    own = rollouts(slice(ring * rows, (ring + 1) * rows))
    results: Results = {"predictions": [], "metrics": []}
    names = ("values",) if case == "critic" else ("log_probs", "entropy")
    for step in range(3):
        data = left_right_2_no_padding(tu.get_tensordict(own))
        tu.assign_non_tensor(data, temperature=0.9, calculate_entropy=True, compute_loss=False)
        output = host.infer_batch(data)
        predicted = torch.zeros(len(names), rows, RESPONSE, dtype=torch.float64)
        if output is not None:  # on the first rank of each ring; verl's controller sends it to the others
            predicted = torch.stack([no_padding_2_padding(tu.get(output, name), data) for name in names])
        of_ranks = [torch.zeros_like(predicted) for _ in range(dist.get_world_size())]
        dist.all_gather(of_ranks, predicted)
        results["predictions"].append(torch.cat(of_ranks[::ring_size], 1))
        if step == 0:  # later updates are off-policy
            first = of_ranks[ring * ring_size][0]
            own |= {"values": first} if case == "critic" else {"old_log_probs": first, "ref_log_prob": first}
        data = left_right_2_no_padding(tu.get_tensordict(own))
        sizes = {"global_batch_size": TEXTS, "mini_batch_size": TEXTS}
        tu.assign_non_tensor(data, temperature=0.9, calculate_entropy=True, **sizes)
        output = host.train_mini_batch(data)
        if output is not None:
            metrics = tu.get(output, "metrics")
            results["metrics"] += [
                torch.tensor(metrics[name][0], dtype=torch.float64) for name in ("loss", "grad_norm")
            ]
    results["weights"] = [whole(weight.detach()) for weight in host.engine.module.state_dict().values()]
    return results


def token_classifier(local_path: str, torch_dtype: Any, model_config: Any, trust_remote_code: bool) -> Any:
    """Load a critic as verl does, but without FlashAttention, which verl asks for and CPUs do not have."""
    return AutoModelForTokenClassification.from_pretrained(local_path, dtype=torch_dtype, config=model_config)


@contextmanager
def process_group(patched: bool) -> Iterator[None]:
    """Open a process group. Compute in float64, and in verl with the patch of the page if `patched`."""
    dist.init_process_group("gloo")
    verl_model.load_valuehead_model = token_classifier
    if patched:
        exec(block_of("recipe-verl.md", "notrun"), {"__name__": "patch"})
    torch.set_default_dtype(torch.float64)
    with in_double():
        yield


def errors(folder: str) -> dict[str, dict[str, float]]:
    """Return the largest errors against one process of a ring of three ranks, and of two rings of two, by case."""

    def of_rank(ring_size: int, cases: list[str], rank: int) -> dict[str, Results]:
        with process_group(ring_size > 1):
            return {case: updated(folder, case, ring_size) for case in cases}

    tiny_model("llama", "eager").save_pretrained(f"{folder}/model")
    expected = forked_ranks(1, partial(of_rank, 1, list(CASES)))[0]
    found = {}
    for ranks, size, cases in ((3, 3, list(CASES)), (4, 2, ["actor"])):
        for case, results in forked_ranks(ranks, partial(of_rank, size, cases))[0].items():
            found[f"{case}, {ranks} ranks"] = {
                name: worst_error(zip(values, expected[case][name], strict=True)) for name, values in results.items()
            }
    return found


def refusals(folder: str) -> dict[str, str]:
    """Return the errors of a ring of two ranks with options that the patch cannot train with, by name."""

    def of_rank(rank: int) -> dict[str, str]:
        messages = {}
        with process_group(True):
            for name, (options, engine) in REFUSED.items():
                try:
                    host = worker(folder, "actor", 2, options, **engine)
                    data = left_right_2_no_padding(tu.get_tensordict(rollouts(slice(TEXTS))))
                    tu.assign_non_tensor(data, temperature=0.9, compute_loss=False)
                    host.infer_batch(data)
                    messages[name] = "accepted"
                except Exception as error:
                    messages[name] = f"{type(error).__name__}: {error}"
        return messages

    return forked_ranks(2, of_rank)[0]  # type: ignore[no-any-return]


def errors_and_refusals(folder: str) -> tuple[dict[str, dict[str, float]], dict[str, str]]:
    """Return `errors` and `refusals`."""
    return errors(folder), refusals(folder)
