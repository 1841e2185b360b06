"""TRL's SFTTrainer and PEFT over two ranks against one process, and refusals of TRL's other trainers.

Needs trl, peft and datasets, which `tests.adapters.environments` installs.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import peft
import torch
import trl
from datasets import Dataset
from peft import LoraConfig, PeftModel, get_peft_model
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer

from ringattn import InputError, Ring, UnsupportedError
from ringattn.adapters.transformers import prepare, shard_batch
from ringattn.adapters.transformers.trainer import RingTrainerMixin, check_trainer
from ringattn.adapters.trl import RingSFTTrainer
from ringattn.testing import run_ranks
from tests.adapters import trainer as plain_trainer
from tests.adapters.models import tiny_model, with_lora
from tests.adapters.processes import forked, forked_ranks, whole, worst_error
from tests.adapters.ranks import (
    DOCUMENTS,
    batches,
    far_from_one,
    far_off_compiled,
    far_off_sharded,
    gradients,
    in_double,
    summed_gradients,
)
from tests.adapters.trainer import as_on_accelerators
from tests.adapters.version_cells import checkpointed, eager

RANKS = 2
LORA = {"r": 4, "target_modules": ["q_proj", "v_proj", "up_proj"], "init_lora_weights": False, "task_type": "CAUSAL_LM"}
SHARDED = {"version": 2, "transformer_layer_cls_to_wrap": "LlamaDecoderLayer"}
COMPILED = {"torch_compile": True, "torch_compile_backend": "aot_eager"}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "padded": ("text", {}),
    "packed": ("text", {"packing": True}),
    "packed, split": ("text", {"packing": True, "packing_strategy": "bfd_split"}),
    "wrapped": ("text", {"packing": True, "packing_strategy": "wrapped"}),
    "padding-free": ("text", {"padding_free": True, "max_length": None}),
    "completions": ("completions", {}),
    "completions, packed": ("completions", {"packing": True}),
    "one label": (
        "ends",
        {
            "per_device_train_batch_size": 1,
            "gradient_accumulation_steps": 1,
            "per_device_eval_batch_size": 1,
            "average_tokens_across_devices": False,
        },
    ),
    "assistants": ("messages", {"assistant_only_loss": True}),
    "dft": ("text", {"loss_type": "dft"}),
    "smoothed": ("text", {"label_smoothing_factor": 0.1}),
    "checkpointed": ("text", {"gradient_checkpointing": True, "packing": True}),
    "reentrant": ("text", {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": True}}),
    "LoRA": ("text", {"packing": True}),
    "LoRA, checkpointed": ("text", {"packing": True, "gradient_checkpointing": True}),
    "compiled": ("text", {"packing": True, "packing_strategy": "wrapped", **COMPILED}),
    "routed": ("text", {}),
    "routed, packed": ("text", {"packing": True, "average_tokens_across_devices": False}),
    "divided": ("completions", {}),
    "divided, packed": ("text", {"packing": True}),
    "divided, LoRA, dft": ("text", {"loss_type": "dft", "gradient_checkpointing": True}),
    "divided, smoothed": ("text", {"label_smoothing_factor": 0.1, "padding_free": True, "max_length": None}),
    "sharded": ("text", {"packing": True, "fsdp": True, "fsdp_config": SHARDED}),
}
"""By name: the data, and the options of SFTConfig that differ from the usual ones."""
OVER_RANKS = "fsdp", "fsdp_config", "torch_compile", "torch_compile_backend"
"""Options that the reference process does not need."""
METRICS = ("loss", "entropy", "mean_token_accuracy", "num_tokens", "aux_loss")
TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'assistant' %}w1 {% generation %}{{ m.content }} w2{% endgeneration %}"
    "{% else %}w3 {{ m.content }} w2{% endif %} {% endfor %}"
)


def tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer whose vocabulary is the 64 words w0, w1, ..., w63."""
    vocabulary = Tokenizer(models.WordLevel({f"w{i}": i for i in range(64)}, unk_token="w3"))
    vocabulary.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=vocabulary, pad_token="w0", bos_token="w1", eos_token="w2", chat_template=TEMPLATE
    )


def data(kind: str) -> Dataset:
    """Return fourteen texts, completions or conversations of different lengths, or prompts with one label each."""
    generator = torch.Generator().manual_seed(3)

    def random_words(count: int) -> str:
        return " ".join(f"w{i}" for i in torch.randint(4, 64, (count,), generator=generator).tolist())

    counts = [5 + 7 * i % 23 for i in range(14)]
    if kind == "text":
        return Dataset.from_list([{"text": random_words(n) + " w2"} for n in counts])
    if kind == "ends":
        return Dataset.from_list([{"prompt": random_words(n), "completion": ""} for n in counts])
    if kind == "completions":
        return Dataset.from_list(
            [{"prompt": random_words(n // 2), "completion": f" {random_words(n)} w2"} for n in counts]
        )
    roles = [("user", 3), ("assistant", 5), ("user", 2)]
    turns = [[{"role": role, "content": random_words(n % 7 + more)} for role, more in roles] for n in counts]
    return Dataset.from_list(
        [{"messages": [*turn, {"role": "assistant", "content": random_words(4)}]} for turn in turns]
    )


def trained(folder: str, case: str, ring: Ring | None) -> tuple[dict[str, Tensor], list[list[float]]]:
    """Train `case` for three steps, on one process if `ring` is None.

    Return the trained weights, and the logged metrics of each step and of an evaluation.
    """
    kind, differs = CASES[case]
    if ring is None:
        differs = {name: x for name, x in differs.items() if name not in OVER_RANKS}
    settings = {
        "per_device_train_batch_size": 2, "per_device_eval_batch_size": 2, "gradient_accumulation_steps": 2,
        "max_steps": 3, "learning_rate": 1e-2, "logging_steps": 1, "report_to": [], "save_strategy": "no",
        "disable_tqdm": True, "optim": "sgd", "use_cpu": True, "bf16": False, "gradient_checkpointing": False,
        "max_length": 40, "lr_scheduler_type": "constant",
    }  # fmt: skip
    arguments: dict[str, Any] = {
        "model": tiny_model("mixtral" if "routed" in case else "llama", "eager"), "processing_class": tokenizer(),
        "train_dataset": data(kind), "eval_dataset": data(kind).select(range(5)),
        "args": SFTConfig(output_dir=f"{folder}/{case}", **{**settings, **differs}),
    }  # fmt: skip
    if "LoRA" in case:
        torch.manual_seed(7)
        arguments["peft_config"] = LoraConfig(**LORA)
    if arguments["args"].fsdp:
        as_on_accelerators()
    if "divided" in case and ring is not None:  # the longest text has 40 tokens, and a batch up to 80
        arguments["max_tokens_per_rank"] = 20
    trainer = SFTTrainer(**arguments) if ring is None else RingSFTTrainer(ring=ring, **arguments)
    trainer.train()
    if arguments["args"].fsdp:
        assert all(isinstance(weight, DTensor) for weight in trainer.model.parameters())
    weights = {name: whole(p.detach()) for name, p in trainer.model.named_parameters() if p.requires_grad}
    trainer.evaluate()
    logged = [
        [entry[name] for name in METRICS if name in entry] for entry in trainer.state.log_history if "loss" in entry
    ]
    evaluations = [entry for entry in trainer.state.log_history if "eval_loss" in entry]
    logged += [[entry[f"eval_{name}"] for name in METRICS if f"eval_{name}" in entry] for entry in evaluations]
    if case == "LoRA" and (ring is None or ring.rank == 0):
        trainer.save_model(f"{folder}/adapter-{0 if ring is None else RANKS}")
    return weights, logged


def rank(train: Callable[..., Any], folder: str, expected: dict[str, Any], number: int) -> dict[str, Any]:
    """Return for each case the largest error of the weights on rank `number`, and the metrics next to the expected.

    `train(folder, case, ring)` returns the weights and the metrics of this rank.
    """
    results: dict[str, Any] = {}
    with Ring(timeout_s=60.0) as ring, in_double():
        for case, (theirs, truly) in expected.items():
            weights, logged = train(folder, case, ring)
            error = worst_error((weights[name], weight) for name, weight in theirs.items())
            results[case] = {"weights": error, "logged": [logged, truly]}
    return results


def train_errors(folder: str, *cases: str) -> dict[str, Any]:
    """Return the errors of two processes against a single process, by case. All are forked from this process."""
    tiny_model("llama", "eager")  # imported here, so that no forked process has to

    def alone() -> dict[str, Any]:
        with in_double():
            return {case: trained(folder, case, None) for case in cases}

    (expected,) = forked(alone)
    results: dict[str, Any] = forked_ranks(RANKS, partial(rank, trained, folder, expected))[0]
    return results


@in_double()
def adapters(folder: str) -> dict[str, Any]:
    """Compare PeftModels over two ranks (threads), prepared before and after PEFT, with one process.

    Return the errors by kind of adapter and order, the difference between adapters that a ring and a single process
    saved, and the refusals.
    """
    answers: dict[str, Any] = {"off by": {}, "saved": 0.0}
    tokens = torch.randint(3, 64, (2, 27), generator=torch.Generator().manual_seed(1))
    batch = {"input_ids": tokens, "labels": tokens.clone()}
    kinds = {
        "LoRA": LoraConfig(**LORA),
        "DoRA": LoraConfig(**LORA, use_dora=True),
        **other_adapters(tokens[0, :3].tolist()),
    }
    for kind, config in kinds.items():

        def wrapped(model: Any, config: Any = config) -> Any:
            torch.manual_seed(7)
            return get_peft_model(model, config).double()

        true_model = wrapped(tiny_model("llama", "eager"))
        true = gradients(true_model, true_model(**batch, num_items_in_batch=(tokens.shape[1] - 1) * 2).loss)
        orders = {"prepare(peft)": lambda: prepare(wrapped(tiny_model("llama", "eager"))),
                  "peft(prepare)": lambda: wrapped(prepare(tiny_model("llama", "eager")))}  # fmt: skip
        for order, make in orders.items():
            models_made = [make(), make()]  # here, since all threads draw random numbers from one generator

            def body(ring: Ring, models_made: list[Any] = models_made) -> dict[str, Tensor]:
                model = models_made[ring.rank]
                seq, shards = shard_batch(ring, batch)
                with ring.activate(seq):
                    loss = model(**shards, num_items_in_batch=(tokens.shape[1] - 1) * 2).loss
                return summed_gradients(ring, model, loss)

            grads = run_ranks(RANKS, body, timeout_s=20.0)[0]
            learned = [name for name, grad in true.items() if grad.any()]
            answers["off by"][f"{kind}: {order}"] = worst_error((grads[name], true[name]) for name in learned)
    single, sharded = (
        PeftModel.from_pretrained(tiny_model("llama", "eager"), f"{folder}/adapter-{n}").double() for n in (0, RANKS)
    )
    answers["saved"] = (single(tokens).logits - sharded(tokens).logits).abs().max().item()
    answers["changed"] = (single(tokens).logits - tiny_model("llama", "eager")(tokens).logits).abs().max().item()
    answers["refused"] = refused(batch)
    return answers


def other_adapters(tokens: list[int]) -> dict[str, Any]:
    """Return the configurations of the supported adapters other than LoRA. `tokens`: those that one of them trains."""
    to = {"target_modules": ["q_proj", "v_proj", "up_proj"], "task_type": "CAUSAL_LM"}
    return {
        "IA3": peft.IA3Config(**to, feedforward_modules=["up_proj"], init_ia3_weights=False),
        "LoHa": peft.LoHaConfig(**to, r=4, init_weights=False),
        "LoKr": peft.LoKrConfig(**to, r=4, init_weights=False),
        "OFT": peft.OFTConfig(**to, oft_block_size=4, init_weights=False),
        "VeRA": peft.VeraConfig(task_type="CAUSAL_LM", target_modules=["q_proj"], r=4, init_weights=False),
        "tokens": peft.TrainableTokensConfig(token_indices=sorted(set(tokens)), target_modules=["embed_tokens"]),
        "LN tuning": peft.LNTuningConfig(target_modules=["norm"], task_type="CAUSAL_LM"),
    }


def refused(batch: dict[str, Tensor]) -> dict[str, str]:
    """Return the refusals of adapters that a ring does not support, from `prepare` and from a call over two ranks."""
    to = {"target_modules": ["q_proj", "v_proj"], "task_type": "CAUSAL_LM"}
    lora = peft.LoraConfig(**to)
    configs = {
        "ADALORA": peft.AdaLoraConfig(**to, total_step=10),
        "PROMPT_TUNING": peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3),
        "PREFIX_TUNING": peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3),
        "alora": peft.LoraConfig(**to, alora_invocation_tokens=[5, 6]),
    }
    messages = {}
    for kind, config in configs.items():
        try:
            prepare(get_peft_model(tiny_model("llama", "eager"), config))
        except UnsupportedError as error:
            messages[kind] = str(error)
        model = get_peft_model(prepare(tiny_model("llama", "eager")), config)  # the adapter is added after `prepare`

        def body(ring: Ring, model: Any = model) -> str:
            seq, shards = shard_batch(ring, batch)
            try:
                with ring.activate(seq):
                    model(**shards, num_items_in_batch=9)
            except InputError as error:
                return str(error)
            return ""

        messages[f"{kind}, later"] = run_ranks(RANKS, body, timeout_s=20.0)[0]
    assert prepare(get_peft_model(tiny_model("llama", "eager"), lora)).peft_config
    return messages


def modes(folder: str) -> dict[str, float]:
    """Return the error of a model with LoRA against one process, by mode (a column of the table of hosts)."""
    trainers = ("packed, LoRA", "packed, LoRA by configuration")
    trained = plain_trainer.compute_errors(folder, RANKS, list(trainers))
    errors = {name: max(trained[name]["weights"].values()) for name in trainers}
    make, packed = eager("llama"), batches()["packed"]
    errors["FSDP2"] = far_off_sharded(lambda: with_lora(make()), packed)
    errors["plain"] = far_from_one(make, batches()["plain"], train=with_lora)
    errors["packed"] = far_from_one(make, packed, train=with_lora)
    errors["checkpointing"] = far_from_one(make, packed, train=lambda model: checkpointed(with_lora(model)))
    errors["compile"] = far_off_compiled(
        lambda attention: with_lora(tiny_model("llama", attention, num_hidden_layers=1)),
        packed["input_ids"][:, :24], [*DOCUMENTS[:-1], 24],
    )  # fmt: skip
    return errors


def compute_errors(folder: str) -> dict[str, Any]:
    """Return the errors of every SFTTrainer case, every kind of adapter and every mode."""
    trained = train_errors(folder, *CASES)
    (answers,) = forked(partial(adapters, folder))
    return {"sft": trained, "adapters": answers, "modes": modes(folder)}


def refused_trainers() -> dict[str, str]:
    """Return how each trainer of TRL is refused before its creation, by name, or "taken" if it is accepted."""
    messages = {}
    for name in sorted(name for name in dir(trl) if name.endswith("Trainer")):
        try:
            check_trainer(type("Ours", (RingTrainerMixin, getattr(trl, name)), {}))
            messages[name] = "taken"
        except UnsupportedError as error:
            messages[name] = str(error)
    return messages
