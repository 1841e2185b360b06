"""Encoders in transformers' Trainer over processes, compared with plain processes, in float64.

Two processes form one ring, which is compared with one process. Four form two rings, which are compared with two.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.utils.rnn import pad_sequence
from transformers import (
    DataCollatorForLanguageModeling,
    DataCollatorForSeq2Seq,
    DataCollatorForTokenClassification,
    EvalPrediction,
    PreTrainedTokenizerFast,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    Trainer,
    TrainingArguments,
)

from ringattn import Ring
from ringattn.adapters.accelerate import RingParallelismConfig
from ringattn.adapters.transformers import prepare
from ringattn.adapters.transformers.trainer import RingTrainerMixin
from tests.adapters.encoder_decoders import build
from tests.adapters.models import bert_config, filled, tiny_model
from tests.adapters.processes import forked, forked_ranks, whole, worst_error
from tests.adapters.ranks import in_double
from tests.adapters.trainer import CHECKPOINTED, likeliest, texts

Batch = dict[str, Tensor]
Rows = list[dict[str, Any]]

# --- Models and data -------------------------------------------------------------------------------------------------

CLASSES = 5
_SMALL = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "pad_token_id": 0}
_ROBERTA = {"num_hidden_layers": 2, "max_position_embeddings": 64, "hidden_dropout_prob": 0.0, "type_vocab_size": 2,
            "attention_probs_dropout_prob": 0.0, "bos_token_id": 1, "eos_token_id": 2}  # fmt: skip
_MODERN = {"num_hidden_layers": 3, "global_attn_every_n_layers": 3, "local_attention": 8, "bos_token_id": 1,
           "eos_token_id": 2, "cls_token_id": 1, "sep_token_id": 2, "max_position_embeddings": 64}  # fmt: skip


def encoder(of: str, **options: Any) -> Any:
    """Return a small model of a class, with random weights."""
    if of.startswith("Bert"):
        config: Any = bert_config(**options)
    elif of.startswith("Roberta"):
        config = transformers.RobertaConfig(**{**_SMALL, **_ROBERTA, **options})
    elif of.startswith("Modern"):
        config = transformers.ModernBertConfig(**{**_SMALL, **_MODERN, **options})
    else:
        config = tiny_model("llama", "eager", classifier_dropout=0.0, **options).config
    config._attn_implementation = "eager"
    return filled(getattr(transformers, of)(config))


def encoder_decoder(of: str, encoder: Any = None) -> Any:
    """Return a small encoder-decoder. `encoder`: prepare it for an encoder that runs like this."""
    model = build(of)
    return model if encoder is None else prepare(model, encoder=encoder)


def translations(of: str) -> Callable[[Rows], Batch]:
    """Return a collator that pads texts and targets, and makes the inputs of the decoder."""
    return DataCollatorForSeq2Seq(tokenizer(), model=build(of))


def of_equal_length(rows: Rows) -> Rows:
    """Return the texts, all of nine tokens: a compiled model with other lengths is compiled again, which takes long."""
    return [{**row, "input_ids": row["input_ids"][:9]} for row in rows]


def translated(rows: Rows) -> Rows:
    """Return texts with targets of other lengths."""
    return [{**row, "labels": [token % 61 + 3 for token in row["input_ids"][::2]] + [5, 2]} for row in rows]


def sounds(rows: Rows) -> Rows:
    """Return sounds of equal length with targets."""
    draw = torch.Generator().manual_seed(5)
    return [{"input_features": torch.randn(8, 40, generator=draw).tolist(), "labels": row["labels"]}
            for row in translated(rows)]  # fmt: skip


def padded_sounds(rows: Rows) -> Batch:
    """Return a batch of sounds, whose targets are padded on the right."""
    labels = [torch.tensor(row["labels"]) for row in rows]
    return {"input_features": torch.tensor([row["input_features"] for row in rows], dtype=torch.float64),
            "labels": pad_sequence(labels, batch_first=True, padding_value=-100)}  # fmt: skip


def tokenizer(padding_side: str = "right") -> PreTrainedTokenizerFast:
    """Return a tokenizer of 64 words, whose tokens 0 and 1 are padding and the mask."""
    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(64)}, unk_token="w2"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="w0", mask_token="w1", unk_token="w2", padding_side=padding_side
    )


def masked(padding_side: str = "right", **options: Any) -> Callable[[Rows], Batch]:
    """Return a collator that pads texts and masks some of their tokens."""
    return DataCollatorForLanguageModeling(tokenizer(padding_side), mlm=True, mlm_probability=0.3, **options)


class Centered:
    """A collator that pads rows on both sides."""

    def __init__(self, collator: Callable[[Rows], Batch]) -> None:
        self.collator = collator

    def __call__(self, rows: Rows) -> Batch:
        batch = self.collator(rows)
        pads = (batch["attention_mask"] == 0).sum(1) // 2
        return {
            name: torch.stack([row.roll(int(n)) for row, n in zip(x, pads, strict=True)]) for name, x in batch.items()
        }


def pairs(rows: Rows) -> Rows:
    """Return texts of two segments each."""
    return [{**row, "token_type_ids": [int(3 * i > n) for i in range(n)]}
            for row in rows for n in [len(row["input_ids"])]]  # fmt: skip


def tagged(rows: Rows) -> Rows:
    """Return texts with a label for each token, some of which are ignored."""
    return [{**row, "labels": [-100 if token % 7 == 0 else token % CLASSES for token in row["input_ids"]]}
            for row in rows]  # fmt: skip


def accuracy(evaluation: EvalPrediction) -> dict[str, float]:
    """Return the fraction of labels that the model predicts, and their number."""
    labels = evaluation.label_ids
    return {"accuracy": float((evaluation.predictions == labels)[labels != -100].mean()),
            "labels": float((labels != -100).sum())}  # fmt: skip


def likeliest_of_logits(logits: Any, labels: Tensor) -> Tensor:
    """Return predicted tokens. An encoder-decoder also returns the states of its encoder."""
    return likeliest(logits[0] if isinstance(logits, tuple) else logits, labels)


class Focal(Trainer):
    """A Trainer with a loss of its own, from whole logits and labels that are not shifted."""

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **others: Any) -> Any:
        outputs = model(**inputs)
        shown = inputs["labels"] != -100
        likely = outputs.logits.log_softmax(-1)[shown].gather(1, inputs["labels"][shown][:, None])
        loss = outputs.loss - (likely * (1 - likely.exp()) ** 2).mean()
        return (loss, outputs) if return_outputs else loss


# --- Cases -----------------------------------------------------------------------------------------------------------

BART, T5, WHISPER = (f"{name}ForConditionalGeneration" for name in ("Bart", "T5", "Whisper"))
TAGS = {"num_labels": CLASSES}
NER = DataCollatorForTokenClassification
Case = tuple[Callable[[], Any], Callable[[], Callable[[Rows], Batch]], Callable[[Rows], Rows], dict[str, Any]]


def with_lora(model: Any) -> Any:
    """Add LoRA adapters to the projections of a model, and train the classifier of an encoder."""
    from peft import LoraConfig, TaskType, get_peft_model

    torch.manual_seed(0)
    of_tokens = "Token" in type(model).__name__
    kind = TaskType.TOKEN_CLS if of_tokens else TaskType.SEQ_2_SEQ_LM
    names = ["query", "value"] if of_tokens else ["q_proj", "v_proj"]
    return get_peft_model(model, LoraConfig(kind, r=2, target_modules=names))


CASES: dict[str, Case] = {
    "bert": (partial(encoder, "BertForMaskedLM"), masked, pairs, {"gradient_accumulation_steps": 2}),
    "bert, both sides": (partial(encoder, "BertForMaskedLM"), lambda: Centered(masked(seed=3)), pairs, {}),
    "bert, tags": (partial(encoder, "BertForTokenClassification", **TAGS), lambda: NER(tokenizer()), tagged, {}),
    "bert, smoothed": (partial(encoder, "BertForMaskedLM"), masked, list, {"label_smoothing_factor": 0.1}),
    "bert, labels of each process": (
        partial(encoder, "BertForMaskedLM"), masked, list, {"average_tokens_across_devices": False}
    ),
    "bert, checkpointed": (partial(encoder, "BertForMaskedLM"), masked, list, CHECKPOINTED),
    "bert, compiled": (
        partial(encoder, "BertForMaskedLM"), masked, list, {"torch_compile": True, "torch_compile_backend": "aot_eager"}
    ),
    "bert, LoRA": (
        lambda: with_lora(encoder("BertForTokenClassification", **TAGS)), lambda: NER(tokenizer()), tagged, {}
    ),
    "bert, own loss": (partial(encoder, "BertForMaskedLM"), masked, list, {}),
    "roberta": (partial(encoder, "RobertaForMaskedLM"), partial(masked, "left"), pairs, {}),
    "roberta, both sides": (partial(encoder, "RobertaForMaskedLM"), lambda: Centered(masked()), list, {}),
    "roberta, tags": (
        partial(encoder, "RobertaForTokenClassification", **TAGS), lambda: NER(tokenizer("left")), tagged, {}
    ),
    "modernbert": (
        partial(encoder, "ModernBertForMaskedLM"), masked, list, {"gradient_accumulation_steps": 2}
    ),
    "modernbert, both sides": (partial(encoder, "ModernBertForMaskedLM"), lambda: Centered(masked()), list, {}),
    "modernbert, tags": (
        partial(encoder, "ModernBertForTokenClassification", **TAGS), lambda: NER(tokenizer("left")), tagged, {}
    ),
    "modernbert, compiled": (
        partial(encoder, "ModernBertForMaskedLM"), masked, of_equal_length,
        {"torch_compile": True, "torch_compile_backend": "aot_eager"},
    ),
    "bart": (
        partial(encoder_decoder, BART), partial(translations, BART), translated, {"gradient_accumulation_steps": 2}
    ),
    "bart, replicated": (
        partial(encoder_decoder, BART, "replicated"), partial(translations, BART), translated, CHECKPOINTED
    ),
    "bart, own loss": (partial(encoder_decoder, BART), partial(translations, BART), translated, {}),
    "bart, LoRA": (
        lambda: with_lora(encoder_decoder(BART)), partial(translations, BART), translated, {}
    ),
    "whisper": (partial(encoder_decoder, WHISPER), lambda: padded_sounds, sounds, {}),
    "t5, compiled": (
        partial(build, T5, num_layers=1, num_decoder_layers=1), partial(translations, T5),
        lambda rows: translated(of_equal_length(rows)),
        {"torch_compile": True, "torch_compile_backend": "aot_eager"},
    ),
    "t5": (partial(encoder_decoder, T5), partial(translations, T5), translated, {"label_smoothing_factor": 0.1}),
    "llama, tags": (partial(encoder, "LlamaForTokenClassification", **TAGS), lambda: NER(tokenizer()), tagged, {}),
}  # fmt: skip
"""By name: the model, the collator, a function of the texts, and TrainingArguments."""
TWO_RINGS = (
    "bert", "bert, both sides", "bert, tags", "bert, labels of each process", "roberta, tags", "modernbert",
    "modernbert, tags", "bart",
)  # fmt: skip


def trained(folder: str, case: str, route: str = "") -> dict[str, Any]:
    """Train three steps and evaluate. Return weights, losses and metrics.

    `route`: "mixin" or "configuration" over rings of two ranks, or empty for plain processes.
    """
    with in_double():
        make, collator, of_texts, options = CASES[case]
        kind: Any = Focal if "own loss" in case else Trainer
        arguments: Any = TrainingArguments
        if case == "bart":
            kind, arguments = Seq2SeqTrainer, Seq2SeqTrainingArguments
        data = of_texts(texts())
        if not route:
            options = {name: value for name, value in options.items() if "compile" not in name}
        parallel = {"parallelism_config": RingParallelismConfig(cp_size=2)} if route == "configuration" else {}
        # Clipping would hide a wrong scale of the gradients.
        args = arguments(
            output_dir=folder, per_device_train_batch_size=2, per_device_eval_batch_size=2, max_steps=3, seed=7,
            learning_rate=1e-2, logging_steps=1, report_to=[], save_strategy="no", disable_tqdm=True, optim="sgd",
            use_cpu=True, max_grad_norm=0.0, **parallel, **options,
        )  # fmt: skip
        given = {"model": make(), "args": args, "train_dataset": data, "eval_dataset": data[:8],
                 "data_collator": collator(), "compute_metrics": accuracy,
                 "preprocess_logits_for_metrics": likeliest_of_logits}  # fmt: skip
        if route != "mixin":
            return run(kind(**given))
        mesh = init_device_mesh("cpu", (args.world_size // 2, 2), mesh_dim_names=("dp", "cp"))
        with Ring(mesh, timeout_s=60.0) as ring:
            return run(type("Ours", (RingTrainerMixin, kind), {})(ring=ring, **given))


def run(trainer: Trainer) -> dict[str, Any]:
    """Train and evaluate, and return weights, losses and metrics."""
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    # Otherwise Trainer multiplies evaluated losses of several processes by their number if the model ignores its count
    # of labels. The loss over rings is that of one process, with and without this option.
    trainer.args.average_tokens_across_devices &= isinstance(trainer, RingTrainerMixin)
    evaluated = trainer.evaluate()
    predicted = trainer.predict(trainer.eval_dataset)
    labeled = predicted.label_ids != -100  # elsewhere, outputs may be those of padding
    return {
        "weights": {name: whole(p.detach()) for name, p in trainer.model.named_parameters()},
        "losses": losses,
        "evaluated": [evaluated["eval_loss"], predicted.metrics["test_loss"]],
        "metrics": [evaluated["eval_accuracy"], evaluated["eval_labels"], *predicted.predictions[labeled].tolist()],
    }


def compute_errors(folder: str, rings: int, cases: list[str], routes: list[str]) -> dict[str, Any]:
    """Return the error of the weights, and the values with those expected, by case and route."""
    encoder("BertForMaskedLM")  # imported here, so that no forked process has to
    if rings == 1:
        (expected,) = forked(lambda: {case: trained(folder, case) for case in cases})
    else:
        expected = forked_ranks(rings, lambda number: {case: trained(folder, case) for case in cases})[0]
    actual = forked_ranks(2 * rings, lambda number: {
        route: {case: trained(folder, case, route) for case in cases} for route in routes
    })[-1]  # fmt: skip
    results: dict[str, Any] = {}
    for route in routes:
        for case, true in expected.items():
            values = actual[route][case]
            error = worst_error((values["weights"][name], weight) for name, weight in true["weights"].items())
            results[f"{case}, by {route}"] = {
                "weights": error,
                **{name: [values[name], true[name]] for name in ("losses", "evaluated", "metrics")},
            }
    return results
