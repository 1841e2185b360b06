"""Encoder-decoders over a ring, with a sharded or replicated encoder: equal to one process, or refused."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest

pytest.importorskip("transformers", reason="transformers is not installed")

import torch
import transformers
from torch import Tensor

from ringattn import DisagreementError, InputError, Ring, UnsupportedError
from ringattn.adapters.transformers import prepare, shard_batch
from ringattn.testing import run_ranks
from tests.adapters.encoder_decoders import BART_OPTIONS, LED_OPTIONS, MODELS, T5_OPTIONS, build
from tests.adapters.models import tiny_model
from tests.adapters.processes import worst_error
from tests.adapters.ranks import in_double, summed_gradients

TOLERANCE = 1e-9
Batch = dict[str, Tensor]


@pytest.fixture(autouse=True)
def double() -> Iterator[None]:
    """Compute everything in float64, also the norms of T5 that backward recomputes."""
    with in_double():
        yield


def whole_batch(of: str, is_padded: bool) -> Batch:
    """Return three rows. If padded, texts are padded on the right, on the left and on both sides, and targets right."""
    draw = torch.Generator().manual_seed(2)
    source, target = (torch.randint(3, 64, (3, tokens), generator=draw) for tokens in (23, 17))
    inputs: Batch = {"input_ids": source}
    if of.startswith("Whisper"):
        inputs = {"input_features": torch.randn(3, 8, 40, generator=draw, dtype=torch.float64)}
    elif is_padded:
        mask = torch.ones_like(source)
        mask[0, 15:] = mask[1, :6] = mask[2, :3] = mask[2, 20:] = 0
        inputs = {"input_ids": torch.where(mask == 1, source, 0), "attention_mask": mask}
    if is_padded:
        target[0, 12:] = target[2, 5:] = -100
    return {**inputs, "labels": target}


def step(model: Any, batch: Batch) -> Batch:
    """Return the loss and all gradients of one process."""
    out = model(**batch)
    out.loss.backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {"loss": out.loss.detach(), "logits": out.logits.detach(), **gradients}


def ring_step(ring: Ring, model: Any, batch: Batch, layout: str, **options: Any) -> Batch:
    """Return the loss, the logits and all gradients of a ring."""
    model = prepare(model, **options)
    seq, shards = shard_batch(ring, batch, layout, model=model)
    with ring.activate(seq):
        out = model(**shards)
    total = out.loss.detach().clone()
    ring.all_reduce([total])
    logits = seq.gather(out.logits.detach())
    return {"loss": total, "logits": logits, **summed_gradients(ring, model, out.loss)}


def error(true: Batch, actual: Batch) -> float:
    """Return the largest error of a step, relative to the largest number of each value."""
    floor = 1e-3 * max(float(x.abs().max()) for x in true.values())
    return worst_error([(actual[name], x) for name, x in true.items()], floor)


def errors_of(of: str, ranks: int, layout: str, batch: Batch, *ways: str, **options: Any) -> dict[str, float]:
    """Return the largest error of a step with each way of running the encoder, over all ranks."""
    true = step(build(of, **options), batch)

    def body(ring: Ring) -> list[float]:
        return [error(true, ring_step(ring, build(of, **options), batch, layout, encoder=encoder)) for encoder in ways]

    return {way: max(errors) for way, errors in zip(ways, zip(*run_ranks(ranks, body), strict=True), strict=True)}


@pytest.mark.slow
@pytest.mark.parametrize("of", MODELS)
def test_a_step_equals_one_process(of: str) -> None:
    ways = ["replicated"] if of.startswith("Whisper") else ["sharded", "replicated"]
    for ranks, layout, is_padded in ((2, "zigzag", True), (3, "contiguous", False)):
        errors = errors_of(of, ranks, layout, whole_batch(of, is_padded), *ways)
        assert max(errors.values()) <= TOLERANCE, (ranks, errors)


@pytest.mark.slow
def test_other_inputs_and_checkpoints() -> None:
    """Embeddings as inputs, padded decoders, checkpointed layers and copies of prepared models."""

    def embedded(model: Any, batch: Batch) -> Batch:
        tables = model.get_encoder().embed_tokens, model.get_decoder().embed_tokens
        ids, targets = batch["input_ids"], model.prepare_decoder_input_ids_from_labels(batch["labels"])
        embeds = {"inputs_embeds": tables[0](ids).detach(), "decoder_inputs_embeds": tables[1](targets).detach()}
        return {"attention_mask": batch["attention_mask"], "labels": batch["labels"], **embeds}

    for of in ("BartForConditionalGeneration", "T5ForConditionalGeneration"):
        batch = whole_batch(of, is_padded=True)
        mask = torch.ones_like(batch["labels"])
        mask[0, :4] = mask[2, 5:] = 0
        padded = {**batch, "decoder_attention_mask": mask, "labels": torch.where(mask == 1, batch["labels"], -100)}
        by_case = {"embedded": embedded(build(of), batch), "padded decoder": padded, "checkpointed": batch}
        true = {case: step(build(of), inputs) for case, inputs in by_case.items()}

        def body(ring: Ring, of: str = of, by_case: Any = by_case, true: Any = true, mask: Tensor = mask) -> None:
            for case, inputs in by_case.items():
                for encoder in ("sharded", "replicated"):
                    model = copy.deepcopy(prepare(build(of), encoder=encoder))
                    if case == "checkpointed":
                        model.gradient_checkpointing_enable({"use_reentrant": False})
                    actual = ring_step(ring, model, inputs, "striped")
                    if case == "padded decoder":  # the logits at padding are undefined
                        actual["logits"] = torch.where(mask[..., None] == 1, actual["logits"], true[case]["logits"])
                    assert error(true[case], actual) <= TOLERANCE, (of, case, encoder)

        run_ranks(2, body)


@pytest.mark.slow
def test_attention_dropout_does_not_depend_on_the_ranks() -> None:
    def dropping(of: str) -> Any:
        model = build(of)
        for module in model.modules():
            if type(module).__name__ in ("BartAttention", "T5Attention"):
                module.dropout = 0.3
        return model

    def body(ring: Ring, of: str, encoder: str) -> Batch:
        model = prepare(dropping(of), encoder=encoder)
        seq, shards = shard_batch(ring, whole_batch(of, is_padded=True), "zigzag", model=model)
        with ring.activate(seq, dropout_seed=3):
            loss = model(**shards).loss
        total = loss.detach().clone()
        ring.all_reduce([total])
        return {"loss": total, **summed_gradients(ring, model, loss)}

    for of in ("BartForConditionalGeneration", "T5ForConditionalGeneration"):
        (single,) = run_ranks(1, partial(body, of=of, encoder="sharded"))
        assert abs(float(single["loss"]) - float(step(build(of), whole_batch(of, is_padded=True))["loss"])) > 1e-5
        for shared in run_ranks(2, partial(body, of=of, encoder="sharded")):
            assert error(single, shared) <= TOLERANCE


@pytest.mark.slow
def test_without_a_ring_a_prepared_model_is_unchanged() -> None:
    for of in ("BartForConditionalGeneration", "T5ForConditionalGeneration", "WhisperForConditionalGeneration"):
        batch = whole_batch(of, is_padded=True)
        assert error(step(build(of), batch), step(prepare(build(of)), batch)) <= TOLERANCE
        inputs = {name: x for name, x in batch.items() if name != "labels"}
        if of.startswith("Whisper"):
            continue
        alone = build(of).eval().generate(**inputs, max_new_tokens=6, num_beams=2)

        def body(ring: Ring, of: str = of, inputs: Batch = inputs, alone: Tensor = alone) -> None:
            with ring.activate(None):
                tokens = prepare(build(of)).eval().generate(**inputs, max_new_tokens=6, num_beams=2)
            assert torch.equal(tokens, alone)

        run_ranks(2, body)


# --- Refusals ---------------------------------------------------------------------------------------------------------


def refused(match: str, call: Callable[[Ring], Any], error: type[Exception] = InputError) -> None:
    """Assert that `call` raises this error on both ranks, and that no rank waits for the deadline."""

    def body(ring: Ring) -> None:
        with pytest.raises(error, match=match):
            call(ring)
        ring.barrier()

    run_ranks(2, body, timeout_s=20.0)


def test_calls_that_are_refused() -> None:
    of = "BartForConditionalGeneration"
    batch = whole_batch(of, is_padded=False)

    def call(ring: Ring, change: Callable[[Any, Batch], Any], encoder: str = "sharded", **options: Any) -> None:
        model = prepare(build(of, **options), encoder=encoder)
        seq, shards = shard_batch(ring, batch, model=model)
        seq = change(seq, shards) or seq
        with ring.activate(seq):
            model(**shards)

    def passing(**inputs: Any) -> Callable[[Any, Batch], None]:
        return lambda seq, shards: shards.update(inputs)

    def whole_mask(seq: Any, shards: Batch) -> None:
        shards["attention_mask"] = torch.ones(3, 23)

    def own_tokens(seq: Any, shards: Batch) -> None:
        shards["input_ids"] = shards["input_ids"] + seq.ring.rank

    nothing = passing()
    refused("has no encoder", partial(call, change=lambda seq, shards: seq.with_encoder(None)))
    refused("has an encoder", partial(call, change=lambda seq, _: seq.with_encoder(seq), encoder="replicated"))
    refused("hold different batches, input_ids", partial(call, change=own_tokens, encoder="replicated"),
            DisagreementError)  # fmt: skip
    refused("attention_mask has 23 tokens", partial(call, change=whole_mask))
    refused("decoder_input_ids are missing", partial(call, change=passing(decoder_input_ids=None)))
    refused(
        "encoder_outputs: .* leave it out", partial(call, change=passing(encoder_outputs=(torch.zeros(3, 12, 32),)))
    )
    refused("packed documents", partial(call, change=lambda seq, _: seq.with_documents([0, 5, 17])))
    refused("encoder_layerdrop: in training", partial(call, change=nothing, encoder_layerdrop=0.5))
    refused("attention dropout is 0.1", partial(call, change=nothing, attention_dropout=0.1))
    refused("output_attentions", partial(call, change=passing(output_attentions=True)))
    refused("is prepared and called as a whole, .*generate", generate_over)


def generate_over(ring: Ring) -> None:
    """Generate under an active sequence, which has no cache over ranks."""
    model = prepare(build("BartForConditionalGeneration"))
    seq, shards = shard_batch(ring, whole_batch("Bart", is_padded=False), model=model)
    with ring.activate(seq):
        model.generate(input_ids=shards["input_ids"], max_new_tokens=3)


def test_models_that_are_refused() -> None:
    for of, config, options, match in (
        ("LEDForConditionalGeneration", "LEDConfig", LED_OPTIONS, "LEDFor.* is an encoder-decoder of type led"),
        ("BartForSequenceClassification", "BartConfig", BART_OPTIONS, "does not predict the tokens of a decoder"),
        ("T5ForQuestionAnswering", "T5Config", T5_OPTIONS, "does not predict the tokens of a decoder"),
    ):
        with pytest.raises(UnsupportedError, match=match):
            prepare(getattr(transformers, of)(getattr(transformers, config)(**options)))
    bart_model = build("BartForConditionalGeneration")
    with pytest.raises(UnsupportedError, match="were not compared with one process for BartFor"):
        prepare(bart_model, chunked_loss=8)
    with pytest.raises(InputError, match="must be 'sharded' or 'replicated'"):
        prepare(bart_model, encoder="both")
    prepare(bart_model, encoder="replicated")
    with pytest.raises(InputError, match="was prepared with encoder='replicated'"):
        prepare(bart_model, encoder="sharded")
    assert prepare(bart_model) is bart_model
    with pytest.raises(UnsupportedError, match="reads sound with convolutions"):
        prepare(build("WhisperForConditionalGeneration"), encoder="sharded")
    with pytest.raises(InputError, match="LlamaForCausalLM is not an encoder-decoder"):
        prepare(tiny_model("llama", "eager"), encoder="sharded")
