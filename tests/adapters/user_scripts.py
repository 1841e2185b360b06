"""Training scripts as users write them, without a line about rings: `user_scripts.py KIND FILE`.

`test_script.py` runs them in plain processes and under `ringattn script`, and compares what they save into FILE.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration, set_seed
from torch.utils.data import DataLoader
from transformers import Seq2SeqTrainer, Seq2SeqTrainingArguments, Trainer, TrainingArguments, get_scheduler

from tests.adapters.encoders import (
    encoder,
    encoder_decoder,
    likeliest_of_logits,
    masked,
    translated,
    translations,
)
from tests.adapters.models import tiny_model
from tests.adapters.multi_token import multi_token_llama
from tests.adapters.ranks import in_double
from tests.adapters.trainer import MeanOfMeans, ZLoss, accuracy, padded, texts

Result = tuple[Any, dict[str, list[Any]]]
"""The trained model, and values by name."""


def loop(file: str, scheduled_by_processes: bool = False, of: str = "", name: str = "qwen2") -> Result:
    """Train with accelerate: accumulation, clipping, a learning rate that ends at 0, shuffling, and a metric.

    `of`: train a masked language model or an encoder-decoder of this class. Empty: the causal language model `name`.
    """
    loaders = DataLoaderConfiguration(use_seedable_sampler=True)
    accelerator = Accelerator(gradient_accumulation_steps=2, cpu=True, dataloader_config=loaders)
    set_seed(5)
    data = texts()
    model, collate = (encoder(of), masked()) if "Masked" in of else (tiny_model(name, "eager"), padded)
    if "Conditional" in of:
        model, collate, data = encoder_decoder(of), translations(of), translated(data)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    loader = DataLoader(data[:11], batch_size=2, collate_fn=collate, shuffle=True)
    evaluation = DataLoader(data[:7], batch_size=2, collate_fn=collate)
    if scheduled_by_processes:
        loader, evaluation = accelerator.prepare(loader, evaluation)
        updates = -(-2 * len(loader) // 2)
        scheduler = get_scheduler("linear", optimizer, 0, updates * accelerator.num_processes)
        model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
    else:
        scheduler = get_scheduler("linear", optimizer, 0, -(-2 * len(loader) // 2))
        prepared = accelerator.prepare(model, optimizer, loader, evaluation, scheduler)
        model, optimizer, loader, evaluation, scheduler = prepared
    values: dict[str, list[Any]] = {"losses": [], "rates": [], "counts": []}
    for _ in range(2):
        model.train()
        for batch in loader:
            with accelerator.accumulate(model):
                loss = model(**batch).loss
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            values["losses"] += accelerator.gather(loss.detach().reshape(1)).tolist()
            values["rates"] += scheduler.get_last_lr()
            values["counts"].append(int(accelerator.reduce((batch["labels"] != -100).sum(), "sum")))
        model.eval()
        right = []
        for batch in evaluation:
            with torch.no_grad():
                outputs = model(**batch)
            predicted, labels = outputs.logits.argmax(-1), batch["labels"]
            predicted = predicted == labels if of else predicted[:, :-1] == labels[:, 1:]
            right.append(accelerator.gather_for_metrics(predicted.sum(1)))
            losses = accelerator.gather_for_metrics(outputs.loss.repeat(len(predicted)))
            values["losses"] += losses.tolist()
        values["counts"] += torch.cat(right).tolist()
    return model, values


def trainer(file: str, kind: type[Trainer] = Trainer, of: str = "", model: Any = None, **options: Any) -> Result:
    """Train and evaluate with Trainer, or a class that overrides its loss.

    `of`: the class of an encoder-decoder. `model`: another causal language model.
    """
    args = (Seq2SeqTrainingArguments if of else TrainingArguments)(
        output_dir=os.path.dirname(file), per_device_train_batch_size=2, per_device_eval_batch_size=2, max_steps=4,
        gradient_accumulation_steps=2, learning_rate=1e-2, logging_steps=1, report_to=[], save_strategy="no",
        disable_tqdm=True, optim="sgd", remove_unused_columns=False, **{"use_cpu": True, **options},
    )  # fmt: skip
    model, collate, data = model or tiny_model("qwen2", "eager"), padded, texts()
    if of:
        model, collate, data = encoder_decoder(of), translations(of), translated(data)
    host = kind(
        model=model, args=args, train_dataset=data, eval_dataset=data[:8], data_collator=collate,
        compute_metrics=accuracy, preprocess_logits_for_metrics=likeliest_of_logits,
    )  # fmt: skip
    host.train()
    evaluated = host.evaluate()
    losses = [entry["loss"] for entry in host.state.log_history if "loss" in entry]
    # With several processes, Trainer's own mean of evaluated losses depends on their number.
    if args.world_size == 1 or (hasattr(host, "ring") and host._rings()[0] == 1):
        losses.append(evaluated["eval_loss"])
    return host.model, {"losses": losses, "counts": [evaluated["eval_accuracy"]]}


def further_losses(file: str) -> Result:
    """Train a mixture of experts in a loop, and a model that predicts several tokens ahead with Trainer."""
    experts, values = loop(file, name="mixtral")
    predictor, others = trainer(file, model=multi_token_llama())
    models = torch.nn.ModuleList([getattr(experts, "module", experts), predictor])
    return models, {name: x + others.get(name, []) for name, x in values.items()}


def with_deepspeed(file: str) -> Result:
    """Train and evaluate with Trainer and DeepSpeed."""
    from tests.adapters.deepspeed_ranks import compile_nothing, deepspeed_on_cpus, settings_of

    compile_nothing()
    deepspeed_on_cpus()
    return trainer(file, **settings_of("2"))


def sft(file: str) -> Result:
    """Train packed texts with SFTTrainer, whose model is loaded by its name for attention."""
    from trl import SFTConfig, SFTTrainer

    from tests.adapters.sft import METRICS, data, tokenizer

    folder = os.path.join(os.path.dirname(file), f"model-{os.environ.get('RANK', '0')}")
    tiny_model("llama", "eager").save_pretrained(folder)
    # TRL takes no float64; inside `in_double`, this name stands for it.
    name = "ringattn" if "WORLD_SIZE" in os.environ else "eager"
    args = SFTConfig(
        output_dir=os.path.dirname(file), per_device_train_batch_size=2, max_steps=3, learning_rate=1e-2, optim="sgd",
        gradient_accumulation_steps=2, logging_steps=1, report_to=[], save_strategy="no", disable_tqdm=True,
        use_cpu=True, bf16=False, gradient_checkpointing=False, max_length=40, packing=True,
        lr_scheduler_type="constant", model_init_kwargs={"attn_implementation": name, "dtype": "float32"},
    )  # fmt: skip
    host = SFTTrainer(model=folder, args=args, train_dataset=data("text"), processing_class=tokenizer())
    host.train()
    logged = [entry for entry in host.state.log_history if "entropy" in entry]
    counts = [[entry[metric] for metric in METRICS if metric in entry and metric != "loss"] for entry in logged]
    return host.model, {"losses": [entry["loss"] for entry in logged], "counts": counts}


def of_whole_texts(file: str, kind: str) -> Result:
    """Train with DPOTrainer or GRPOTrainer, which loads the model and its reference by their name."""
    import trl

    from tests.adapters.preferences import data, high_words
    from tests.adapters.sft import tokenizer

    folder = os.path.join(os.path.dirname(file), f"model-{os.environ.get('RANK', '0')}")
    tiny_model("llama", "eager").save_pretrained(folder)
    differs = {"max_length": 40} if kind == "DPO" else {"max_completion_length": 9, "num_generations": 2, "beta": 0.1}
    args = getattr(trl, f"{kind}Config")(
        output_dir=os.path.dirname(file), per_device_train_batch_size=2, max_steps=3, learning_rate=1e-2, optim="sgd",
        gradient_accumulation_steps=2, logging_steps=1, report_to=[], save_strategy="no", disable_tqdm=True,
        use_cpu=True, bf16=False, gradient_checkpointing=False, lr_scheduler_type="constant",
        model_init_kwargs={"dtype": "float32"}, **differs,
    )  # fmt: skip
    host = getattr(trl, f"{kind}Trainer")(
        model=folder, args=args, train_dataset=data(kind), processing_class=tokenizer(),
        **({} if kind == "DPO" else {"reward_funcs": high_words}),
    )  # fmt: skip
    host.train()
    logged = [entry for entry in host.state.log_history if "entropy" in entry]
    metrics = [[entry[name] for name in sorted(entry) if "/" in name or name == "num_tokens"] for entry in logged]
    return host.model, {"losses": [entry["loss"] for entry in logged], "metrics": metrics}


KINDS: dict[str, Callable[[str], Result]] = {
    "loop": loop,
    "loop, scheduled by processes": partial(loop, scheduled_by_processes=True),
    "loop, masked": partial(loop, of="BertForMaskedLM"),
    "loop, translations": partial(loop, of="T5ForConditionalGeneration"),
    "trainer": trainer,
    "trainer, translations": partial(trainer, kind=Seq2SeqTrainer, of="BartForConditionalGeneration"),
    "z-loss": partial(trainer, kind=ZLoss),
    "further losses": further_losses,
    "mean of means": partial(trainer, kind=MeanOfMeans),
    "sft": sft,
    "deepspeed": with_deepspeed,
    "dpo": partial(of_whole_texts, kind="DPO"),
    "grpo": partial(of_whole_texts, kind="GRPO"),
}


def main(kind: str, file: str) -> None:
    """Train, and save the weights and values of the first rank."""
    torch.set_num_threads(1)
    with in_double():
        model, values = KINDS[kind](file)
    if os.environ.get("RANK", "0") == "0":
        weights = {name.removeprefix("module."): p.detach() for name, p in model.named_parameters()}
        torch.save({"weights": weights, "values": values}, file)


if __name__ == "__main__":
    main(*sys.argv[1:])
