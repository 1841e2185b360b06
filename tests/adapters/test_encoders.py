"""Masked language models and token classification: equal to one process, or refused. Also encoder-decoders."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers", reason="transformers is not installed")
pytest.importorskip("accelerate", reason="accelerate is not installed, which Trainer needs")

import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ringattn import InputError, Ring, UnsupportedError
from ringattn.adapters.transformers import prepare, shard_batch
from ringattn.adapters.transformers.trainer_checks import refuse_options
from ringattn.testing import run_ranks
from tests.adapters.encoder_decoders import LED_OPTIONS, build
from tests.adapters.encoders import CASES, CLASSES, TWO_RINGS, encoder
from tests.adapters.models import bert_config, filled
from tests.adapters.processes import call_in_program, worst_error
from tests.adapters.ranks import InDouble, summed_gradients
from tests.adapters.test_transformers_trainer import RingTrainer, build_trainer
from tests.adapters.test_trl import with_trl
from tests.adapters.trainer import padded, texts

TOLERANCE = 1e-9
ROUTES = ("mixin", "configuration")

# --- Trainers --------------------------------------------------------------------------------------------------------


def check(folder: Path, rings: int, cases: tuple[str, ...], *routes: str, **env: str) -> None:
    """Train cases over rings of two ranks. Check weights, losses and metrics against plain processes."""
    entry = "tests.adapters.encoders:compute_errors"
    answers = call_in_program(entry, str(folder), rings, cases, routes, timeout_s=560.0, **env)
    assert len(answers) == len(cases) * len(routes)
    for case, values in answers.items():
        assert values["weights"] <= TOLERANCE, case
        losses, true = values["losses"]
        assert len(true) == 3 and losses == pytest.approx(true, rel=1e-6), case  # Trainer adds these up in float32
        for name in ("evaluated", "metrics"):
            actual, expected = values[name]
            assert actual == pytest.approx(expected, rel=TOLERANCE), case


_ALONE = tuple(case for case in CASES if "LoRA" not in case)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("route", ROUTES)
def test_one_ring_equals_one_process(route: str, tmp_path: Path) -> None:
    """The routes take turns, because they differ only in how the Trainer finds its ring."""
    check(tmp_path, 1, _ALONE[ROUTES.index(route) :: len(ROUTES)], route)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("route", ROUTES)
def test_two_rings_equal_two_processes(route: str, tmp_path: Path) -> None:
    check(tmp_path, 2, TWO_RINGS[ROUTES.index(route) :: len(ROUTES)], route)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_lora(tmp_path: Path) -> None:
    check(tmp_path, 1, ("bert, LoRA", "bart, LoRA"), *ROUTES, **with_trl())


# --- A custom training loop -------------------------------------------------------------------------------------------


def whole_batch(tags: bool = False) -> dict[str, Tensor]:
    """Return three rows, padded on the right, on the left and on both sides, with labels of few tokens."""
    draw = torch.Generator().manual_seed(2)
    tokens, mask = torch.randint(3, 64, (3, 29), generator=draw), torch.ones(3, 29, dtype=torch.int64)
    mask[0, 20:] = mask[1, :6] = mask[2, :3] = mask[2, 25:] = 0
    labels = tokens % CLASSES if tags else tokens
    labels = torch.where((torch.rand(3, 29, generator=draw) < 0.4) & (mask == 1), labels, -100)
    return {"input_ids": torch.where(mask == 1, tokens, 0), "attention_mask": mask, "labels": labels}


def error(make: Callable[[], Any], ranks: int, call: Callable[..., Any] = lambda model, x: model(**x)) -> float:
    """Return the largest error of the loss, and of each gradient, of a loop over ranks."""
    batch = whole_batch(tags="Token" in type(make()).__name__)
    with InDouble():
        alone = make()
        loss = call(alone, batch).loss
        loss.backward()
    true = {"loss": loss.detach(), **{n: p.grad for n, p in alone.named_parameters() if p.grad is not None}}

    def body(ring: Ring) -> dict[str, Tensor]:
        with InDouble():
            model = prepare(make())
            seq, shards = shard_batch(ring, batch, model=model)
            with ring.activate(seq):
                part = call(model, shards).loss
            total = part.detach().clone()
            ring.all_reduce([total])
            return {"loss": total, **summed_gradients(ring, model, part)}

    floor = 1e-3 * max(float(x.abs().max()) for x in true.values())
    return max(worst_error([(out[n], x) for n, x in true.items()], floor) for out in run_ranks(ranks, body))


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize(
    "of",
    ["BertForMaskedLM", "RobertaForMaskedLM", "ModernBertForMaskedLM", "BertForTokenClassification",
     "ModernBertForTokenClassification", "LlamaForTokenClassification"],
)  # fmt: skip
def test_the_parts_of_ranks_add_up(of: str, ranks: int) -> None:
    options = {"num_labels": CLASSES} if "Token" in of else {}
    assert error(partial(encoder, of, **options), ranks) <= TOLERANCE


def test_ranks_without_labels() -> None:
    """A rank without labels has a loss of 0, where the mean of no labels would not be a number."""
    batch = whole_batch()
    batch["labels"][:, 1:] = -100
    batch["labels"][0, 0] = 9

    def body(ring: Ring) -> float:
        model = prepare(encoder("BertForMaskedLM"))
        seq, shards = shard_batch(ring, batch, model=model)
        with ring.activate(seq):
            loss = model(**shards).loss
        loss.backward()
        assert all(bool(p.grad.isfinite().all()) for p in model.parameters() if p.grad is not None)
        return float(loss.detach())

    losses, true = run_ranks(2, body), encoder("BertForMaskedLM")(**batch).loss.detach()
    assert sorted(losses)[0] == 0.0 and sum(losses) == pytest.approx(float(true))


def test_num_items_in_batch_is_used_like_in_one_process() -> None:
    """ModernBERT divides by it, BERT ignores it."""
    for of in ("ModernBertForMaskedLM", "BertForMaskedLM"):
        assert error(partial(encoder, of), 2, lambda model, x: model(**x, num_items_in_batch=7)) <= TOLERANCE


def test_labels_by_position() -> None:
    """Labels are found among positional arguments too."""

    def call(model: Any, x: dict[str, Tensor]) -> Any:
        positions, none = x.get("position_ids"), None
        return model(x["input_ids"], x["attention_mask"], none, positions, none, none, none, x["labels"])

    assert error(partial(encoder, "BertForMaskedLM"), 2, call) <= TOLERANCE


# --- Losses that are refused -----------------------------------------------------------------------------------------


class Shifted(transformers.BertForMaskedLM):
    def forward(self, input_ids: Any = None, labels: Any = None, **others: Any) -> Any:
        out = super().forward(input_ids, **others)
        out["loss"] = F.cross_entropy(out.logits[:, :-1].mT, labels[:, 1:])
        return out


class Weighted(transformers.BertForMaskedLM):
    def forward(self, input_ids: Any = None, labels: Any = None, **others: Any) -> Any:
        out = super().forward(input_ids, **others)
        out["loss"] = nn.CrossEntropyLoss(weight=torch.ones(64).double())(out.logits.view(-1, 64), labels.view(-1))
        return out


class Squared(transformers.BertForMaskedLM):
    def forward(self, input_ids: Any = None, labels: Any = None, **others: Any) -> Any:
        out = super().forward(input_ids, **others)
        out["loss"] = F.mse_loss(out.logits[..., 0], labels)
        return out


class Doubled(transformers.BertForMaskedLM):
    def forward(self, input_ids: Any = None, labels: Any = None, **others: Any) -> Any:
        out = super().forward(input_ids, labels=labels, **others)
        out["loss"] = 2 * out.loss
        return out


class Summed(transformers.BertForMaskedLM):
    def forward(self, input_ids: Any = None, labels: Any = None, **others: Any) -> Any:
        out = super().forward(input_ids, **others)
        out["loss"] = F.cross_entropy(out.logits.view(-1, 64), labels.view(-1), reduction="sum")
        return out


def step(make: Callable[[], Any], change: Callable[[Ring, dict[str, Any]], object] = lambda *_: None) -> None:
    """Call a model with labels on two ranks."""

    def body(ring: Ring) -> None:
        model = prepare(make())
        seq, shards = shard_batch(ring, whole_batch(), model=model)
        change(ring, shards)
        with ring.activate(seq):
            model(**shards).loss.backward()

    run_ranks(2, body, timeout_s=10.0)


OTHER_LOSSES: dict[str, tuple[type[Any], str]] = {
    "labels that the model shifts": (Shifted, r"Shifted computes its loss in its own way \(an operator on labels\)"),
    "weights of classes": (Weighted, "a weighted cross entropy"),
    "another function": (Squared, r"\(mse_loss\), and a rank has only its own labels"),
    "another factor": (Doubled, "Doubled computed a loss in its own way"),
    "a sum": (Summed, "Summed computed a loss in its own way"),
}


@pytest.mark.parametrize("name", OTHER_LOSSES)
def test_other_losses_of_tokens(name: str) -> None:
    kind, message = OTHER_LOSSES[name]
    # The name of the class would select the loss of causal models.
    config = bert_config(num_labels=1)

    def make() -> Any:
        model = filled(kind(config))
        model.loss_type = "ForMaskedLM"
        return model

    with pytest.raises(UnsupportedError, match=message):
        step(make)


def test_sparse_predictions_of_modernbert() -> None:
    with pytest.raises(UnsupportedError, match=r"own way .*: set config\.sparse_prediction=False"):
        step(partial(encoder, "ModernBertForMaskedLM", sparse_prediction=True))


def test_labels_that_are_shifted_or_padded() -> None:
    bert = partial(encoder, "BertForMaskedLM")

    def shifted(ring: Ring, shards: dict[str, Any]) -> None:
        shards["shift_labels"] = shards["labels"]

    def at_padding(ring: Ring, shards: dict[str, Any]) -> None:
        shards["labels"] = shards["input_ids"]

    with pytest.raises(InputError, match=r"BertForMaskedLM has one label for each token, .* shard_batch\(ring, batch,"):
        step(bert, shifted)
    with pytest.raises(InputError, match="labels at padded positions of attention_mask"):
        step(bert, at_padding)
    batch = whole_batch()
    with Ring() as ring:
        with pytest.raises(InputError, match=r"row 0 .* token 20, whose output is undefined: set the labels of padd"):
            shard_batch(ring, {**batch, "labels": batch["input_ids"]}, model=bert())
        with pytest.raises(InputError, match="BertForMaskedLM has one label for each token, but the batch has shift"):
            shard_batch(ring, {**batch, "shift_labels": batch["labels"]}, model=bert())


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_checkpoint_around_the_whole_model(reentrant: bool) -> None:
    def body(ring: Ring) -> None:
        model = prepare(encoder("BertForMaskedLM"))
        seq, shards = shard_batch(ring, whole_batch(), model=model)
        embeds = model.get_input_embeddings()(shards.pop("input_ids"))
        with ring.activate(seq):
            loss = checkpoint(lambda x: model(inputs_embeds=x, **shards).loss, embeds, use_reentrant=reentrant)
            loss.backward()

    with pytest.raises(InputError, match="backward recomputes BertForMaskedLM with a loss that needs sums"):
        run_ranks(2, body, timeout_s=10.0)


# --- Models that are refused -----------------------------------------------------------------------------------------


@pytest.fixture
def ring() -> Iterator[Ring]:
    with Ring() as ring:
        yield ring


ROWS: dict[str, tuple[str, dict[str, Any]]] = {
    "BertForSequenceClassification": ("BertConfig", {}),
    "BertForQuestionAnswering": ("BertConfig", {}),
    "RobertaForSequenceClassification": ("RobertaConfig", {"pad_token_id": 0}),
    "ModernBertForSequenceClassification": ("ModernBertConfig", {"pad_token_id": 0}),
    "LlamaForSequenceClassification": ("LlamaConfig", {}),
}
_SMALL = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
          "num_attention_heads": 4}  # fmt: skip


@pytest.mark.parametrize("of", ROWS)
def test_losses_of_whole_rows(of: str, tmp_path: Path, ring: Ring) -> None:
    config, options = ROWS[of]
    model = getattr(transformers, of)(getattr(transformers, config)(**{**_SMALL, **options}))
    with pytest.raises(UnsupportedError, match=f"^{of} computes its loss from whole rows .*in one process"):
        build_trainer(tmp_path, ring, model=model)


def test_classes_of_whole_rows_at_the_first_step(tmp_path: Path, ring: Ring) -> None:
    """Their loss has no separate name, so their batches show it."""

    def pooled(rows: list[Any]) -> dict[str, Tensor]:
        return {**padded(rows), "labels": torch.zeros(len(rows), dtype=torch.int64)}

    model = transformers.BertForNextSentencePrediction(bert_config())
    with pytest.raises(InputError, match=r"labels has shape \(8,\) .* compute a loss of whole rows from gathered"):
        build_trainer(tmp_path, ring, model=model, data_collator=pooled).train()


def test_encoder_decoders(tmp_path: Path, ring: Ring) -> None:
    led = transformers.LEDForConditionalGeneration(transformers.LEDConfig(**LED_OPTIONS))
    with pytest.raises(UnsupportedError, match=r"^LEDFor.* is an encoder-decoder of type led, .*without a ring"):
        build_trainer(tmp_path, ring, model=led)
    args = transformers.Seq2SeqTrainingArguments(str(tmp_path), predict_with_generate=True, report_to=[], use_cpu=True)
    with pytest.raises(UnsupportedError, match="predict_with_generate: a cache is not sharded"):
        RingTrainer(model=build("BartForConditionalGeneration"), args=args, train_dataset=texts(), ring=ring)
    of_trl = type(
        "SFTTrainer", (), {"__module__": "trl.trainer.sft_trainer", "model": build("T5ForConditionalGeneration")}
    )
    with pytest.raises(UnsupportedError, match=r"T5For.* is an encoder-decoder, whose losses in TRL were not compared"):
        refuse_options(of_trl())


def test_encoder_decoders_of_two_models(tmp_path: Path, ring: Ring) -> None:
    config = transformers.EncoderDecoderConfig.from_encoder_decoder_configs(bert_config(), bert_config())
    with pytest.raises(UnsupportedError, match=r"EncoderDecoderModel reads its text with BertModel, .* separately"):
        build_trainer(tmp_path, ring, model=transformers.EncoderDecoderModel(config))


def test_a_loss_of_ones_own_over_a_model_of_rows_is_not_refused(tmp_path: Path, ring: Ring) -> None:
    model = transformers.BertForQuestionAnswering(bert_config())
    build_trainer(
        tmp_path, ring, model=model, compute_loss_func=lambda outputs, labels, **_: outputs.start_logits.sum()
    )
