"""Models and inputs of transformers that do not fit a ring: refused on all ranks, never silently local."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("transformers", reason="transformers is not installed")

import transformers
from transformers import masking_utils

from ringattn import DisagreementError, InputError, Ring, Sequence
from ringattn.adapters.transformers import prepare
from ringattn.adapters.transformers.attention import refuse_options
from ringattn.adapters.transformers.host_masks import mask_spec
from ringattn.errors import UnsupportedError
from ringattn.testing import run_ranks
from tests.adapters.hybrids import hybrid_model
from tests.adapters.models import bert_config, build_model, filled, tiny_model
from tests.adapters.ranks import (
    ROW,
    TOKENS,
    batches,
    far_off,
    far_off_compiled,
    forward,
    gradient_error,
    llama,
    refused,
    restarting,
)

SMALL = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2}
HEADS = {**SMALL, "intermediate_size": 48, "num_attention_heads": 4}
CALM = {"attention_probs_dropout_prob": 0.0, "hidden_dropout_prob": 0.0}
BART = {
    "vocab_size": 64, "d_model": 32, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "max_position_embeddings": 64,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "use_cache": False, "dropout": 0.0,
}  # fmt: skip
ESM = {"pad_token_id": 1, "mask_token_id": 62, "token_dropout": True, "position_embedding_type": "rotary", **CALM}


def fnet() -> Any:
    return build_model("FNetForMaskedLM", "FNetConfig", **SMALL, intermediate_size=48)


def two_berts() -> Any:
    parts = [bert_config(use_cache=False) for _ in range(2)]
    config = transformers.EncoderDecoderConfig.from_encoder_decoder_configs(*parts)
    return filled(transformers.EncoderDecoderModel(config))


def changed(kind: str) -> Any:
    """Return a model whose mixers have another class, as if their code was not reviewed."""
    model = hybrid_model(kind)
    for module in model.modules():
        if type(module).__name__ in ("MambaMixer", "Qwen3NextGatedDeltaNet"):
            module.__class__ = type("Changed", (type(module),), {})
    return model


# --- models ----------------------------------------------------------------------------------------------------------

MIXING: dict[str, tuple[Callable[[], Any], str]] = {
    "no attention": (fnet, "no attention of FNet.* used the ring"),
    "a state": (partial(changed, "mamba"), "MambaConfig has layers that carry a state"),
    "a state before attention": (
        partial(changed, "qwen3_next"), "Qwen3NextConfig has layers that carry a state .*linear_attention",
    ),
    "mask tokens": (partial(build_model, "EsmForMaskedLM", "EsmConfig", **HEADS, **ESM),
                    r"config\.token_dropout=False"),
    "neighbors": (partial(build_model, "MobileBertModel", "MobileBertConfig", **HEADS, **CALM,
                          intra_bottleneck_size=32),
                  r"config\.trigram_input=False"),
    "scaled queries": (partial(tiny_model, "llama4_text", "ringattn"), "attn_temperature_tuning=False"),
    "places of a shard": (partial(build_model, "BartForCausalLM", "BartConfig", **BART),
                          "models of BartAttention take no position_ids"),
    "a picked token": (
        partial(build_model, "SplinterForQuestionAnswering", "SplinterConfig", **HEADS, **CALM, question_token_id=5),
        r"SplinterForQuestionAnswering takes question_positions.* select .*seq\.gather",
    ),
    "classes": (partial(build_model, "LlamaForSequenceClassification", "LlamaConfig", **HEADS, pad_token_id=0),
                r"ForSequenceClassification computes logits from a whole row, .* pool seq\.gather"),
}  # fmt: skip


@pytest.mark.parametrize("what", MIXING)
def test_models_that_mix_tokens_otherwise(what: str) -> None:
    make, match = MIXING[what]
    refused(lambda seq: forward(seq, prepare(make())), match)


def test_models_that_are_not_prepared() -> None:
    def call(seq: Sequence, model: Any) -> None:
        model.set_attn_implementation("ringattn")
        forward(seq, model)

    refused(lambda seq: call(seq, MIXING["places of a shard"][0]()), "models of BartAttention take no position_ids")
    refused(lambda seq: call(seq, hybrid_model("qwen3_next")), "linear_attention")


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("bloom", "BloomForCausalLM adds ALiBi to its scores inside its attention modules; "),
        ("mpt", "MptForCausalLM adds ALiBi"),
        ("falcon", "FalconForCausalLM adds ALiBi .* and rounds its biases to bfloat16"),
    ],
)
def test_models_that_add_alibi_by_themselves(kind: str, message: str) -> None:
    """Models with ALiBi inside their modules are refused, also Bloom created with "ringattn", which it ignores."""
    alibi = {"alibi": True} if kind == "falcon" else {}
    attention = "ringattn" if kind == "bloom" else "eager"
    config = transformers.AutoConfig.for_model(kind, **SMALL, num_attention_heads=4, **alibi)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation=attention)
    with pytest.raises(UnsupportedError, match=message + r".*alibi_slopes=\.\.\."):
        prepare(model)
    assert model.config._attn_implementation == attention  # unchanged
    others = "reads its mask as a table" if attention == "ringattn" else "computed no attention over the ring"
    refused(lambda seq: forward(seq, model), others)


def test_a_model_whose_attention_cannot_be_set() -> None:
    model = tiny_model("llama", "eager")
    model.set_attn_implementation = lambda *_: None  # transformers only warns for such a model
    with pytest.raises(UnsupportedError, match="attention of LlamaForCausalLM cannot be set"):
        prepare(model)


def test_encoder_and_decoder_by_themselves() -> None:
    """The refusal advises to run a prepared encoder and to pass its states to a prepared decoder."""
    targets = ROW.flip(1)

    def alone(model: Any) -> Tensor:
        logits: Tensor = model(input_ids=ROW, decoder_input_ids=targets).logits
        return logits.sin().sum()

    def over_ring(ring: Ring, model: Any) -> Tensor:
        seq = ring.sequence(TOKENS)
        prepare(model.encoder)
        prepare(model.decoder)
        places = {"position_ids": seq.positions()[None]}
        with ring.activate(seq):
            states = model.encoder(input_ids=seq.shard(ROW), **places).last_hidden_state
            seen = {"encoder_hidden_states": states, "encoder_attention_mask": torch.ones(states.shape[:2])}
            logits: Tensor = model.decoder(input_ids=seq.shard(targets), **places, **seen).logits
        return logits.sin().sum()

    with pytest.raises(UnsupportedError, match=r"reads its text with BertModel, .* as encoder_hidden_states"):
        prepare(two_berts())
    assert gradient_error(two_berts, alone, over_ring) <= 1e-9


# --- inputs ----------------------------------------------------------------------------------------------------------


def test_positions_that_look_local() -> None:
    local = torch.arange(14)[None]
    wrong = r"position_ids are 0, 1, 2, 3, 4, 5, ..., this rank's tokens .* have 14, .*seq\.positions\(\)"
    refused(lambda seq: forward(seq, llama(), position_ids=None), wrong)
    refused(lambda seq: forward(seq, prepare(llama()), position_ids=None), "position_ids are missing")
    refused(lambda seq: forward(seq, prepare(llama()), position_ids=local[:, : seq.counts[seq.ring.rank]]), wrong)


def test_positions_of_a_padded_row() -> None:
    """Positions that start at the first real token are accepted; positions shifted by one are refused."""

    def call(seq: Sequence, shift: int) -> None:
        mask = torch.ones(1, TOKENS, dtype=torch.int64)
        mask[:, :3] = 0
        places = (mask.cumsum(1) - 1).clamp(min=0) + shift
        forward(seq, llama(), attention_mask=seq.shard(mask), position_ids=seq.shard(places))

    run_ranks(2, lambda ring: call(ring.sequence(TOKENS), 0))
    refused(lambda seq: call(seq, 1), "position_ids are")


def test_positions_that_attention_does_not_get() -> None:
    """Llama 4 does not pass positions to attention. `prepare` passes them, but only in calls of the prepared model."""

    def call(seq: Sequence) -> None:
        models = [tiny_model("llama4_text", "ringattn", attn_temperature_tuning=False) for _ in range(2)]
        forward(seq, prepare(models[0]))
        forward(seq, models[1])

    refused(call, r"Llama4TextAttention got no position_ids.*prepare\(model\)")


def test_documents_that_the_sequence_does_not_know() -> None:
    cuts = torch.tensor([0, 10, 27])

    def packed(seq: Sequence, **others: Any) -> None:
        forward(seq, llama(), position_ids=seq.shard(restarting(cuts.tolist())), **others)

    refused(packed, r"position_ids are .*ring\.sequence\(cu_seqlens=")
    refused(lambda seq: forward(seq, llama(), cu_seq_lens_q=cuts), r"cu_seq_lens_q cuts at \(0, 10, 27\)")
    run_ranks(2, lambda ring: packed(ring.sequence(cu_seqlens=cuts, layout="zigzag"), cu_seq_lens_q=cuts))


@pytest.mark.parametrize(
    ("prepared", "wrong", "named"),
    [
        (True, ["input_ids", "position_ids"], "input_ids"),
        (True, ["position_ids"], "position_ids"),
        (False, ["input_ids", "position_ids"], "attention"),
    ],
)
def test_tokens_that_one_rank_did_not_shard(prepared: bool, wrong: list[str], named: str) -> None:
    whole = {"input_ids": ROW, "position_ids": torch.arange(TOKENS)[None]}

    def call(seq: Sequence) -> Any:
        inputs = {name: whole[name] for name in wrong} if seq.ring.rank else {}
        return forward(seq, prepare(llama()) if prepared else llama(), **inputs)

    refused(call, rf"{named} has 27 tokens, this rank has 1[34] of .*pass seq\.shard")


@pytest.mark.parametrize("prepared", [True, False])
def test_a_text_shorter_than_the_ring(prepared: bool) -> None:
    def body(ring: Ring) -> None:
        seq, model = ring.sequence(3), prepare(llama()) if prepared else llama()
        if not prepared and not seq.counts[ring.rank]:
            return  # transformers fails without tokens; the other ranks must not wait for this rank
        with ring.activate(seq), pytest.raises(InputError, match="rank 3 has no token"):
            model(input_ids=seq.shard(ROW[:, :3]), position_ids=seq.positions()[None])

    run_ranks(4, body, timeout_s=10.0)


def test_labels_of_which_the_model_would_make_another_loss() -> None:
    def call(seq: Sequence, model: Any, *without: str, **others: Any) -> None:
        shifted = seq.shard_labels(ROW)
        arguments = {"labels": shifted, "shift_labels": shifted, "num_items_in_batch": 26, **others}
        forward(seq, prepare(model), **{name: x for name, x in arguments.items() if name not in without})

    needed = ["shift_labels", "num_items_in_batch"]
    refused(lambda seq: call(seq, llama(), *needed), r"labels without shift_labels.*seq\.shard_labels")
    refused(lambda seq: call(seq, llama(), *needed[1:]), "labels without num_items_in_batch give a mean")
    whisper = partial(build_model, "WhisperForCausalLM", "WhisperConfig", **BART, num_mel_bins=8,
                      max_target_positions=64, decoder_start_token_id=1, suppress_tokens=None,
                      begin_suppress_tokens=None)  # fmt: skip
    refused(lambda seq: call(seq, whisper()), "WhisperForCausalLM computed a loss in its own way, .*leave labels out")
    alone = "would compute its loss from this rank's tokens only"
    refused(lambda seq: call(seq, transformers.BertForMaskedLM(bert_config())),
            "BertForMaskedLM has one label for each token, but got labels that were shifted")  # fmt: skip
    refused(lambda seq: call(seq, MIXING["classes"][0]()), alone)


def test_what_one_rank_alone_gets_wrong() -> None:
    """If one rank passes wrong inputs, all ranks raise, and none waits for the deadline."""

    def masked(seq: Sequence) -> None:
        tokens = seq.counts[seq.ring.rank]
        forward(seq, llama(), attention_mask=torch.zeros(1, 1, tokens, tokens) if seq.ring.rank else None)

    refused(lambda seq: forward(seq, prepare(llama()), **({"position_ids": None} if seq.ring.rank else {})),
            "position_ids are missing")  # fmt: skip
    refused(masked, "attention_mask of four dimensions has torch.float32")
    refused(lambda seq: forward(seq, llama(attention_dropout=0.1 * seq.ring.rank)), r"attention dropout is 0\.1")


def test_options_that_attention_over_ranks_has_not() -> None:
    refused(lambda seq: forward(seq, llama(), output_attentions=True), "output_attentions")
    refused(lambda seq: forward(seq, llama(), position_bias=torch.zeros(1, 4, 14, 14)), "adds a position bias")


@pytest.mark.parametrize(
    ("config", "dropout", "advice"),
    [
        (transformers.LlamaConfig(attention_dropout=0.2), 0.2, r"config\.attention_dropout=0\.0, or call model"),
        (transformers.GPT2Config(attn_pdrop=0.1), 0.1, r"config\.attn_pdrop=0\.0, or call model\.eval\(\)"),
        (transformers.XGLMConfig(dropout=0.4, attention_dropout=0.0), 0.4, r"config\.dropout=0\.0"),
        (None, 0.5, r"config\.attention_dropout=0\.0"),
    ],
)
def test_the_refusal_of_attention_dropout_says_what_to_set(config: Any, dropout: float, advice: str) -> None:
    module = torch.nn.Module()
    module.config = config
    says = rf"attention dropout is {dropout}, .*activate\(seq, dropout_seed=step\).*; or make the .*{advice}"
    with pytest.raises(InputError, match=says):
        refuse_options(module, dropout, {})


def test_nothing_active_while_ranks_share() -> None:
    refused(lambda seq: llama()(input_ids=ROW), "no sequence is active")


def test_what_was_pooled_of_one_rank_is_left_out() -> None:
    def body(ring: Ring) -> None:
        model, seq = filled(prepare(transformers.BertModel(bert_config()).double().eval())), ring.sequence(TOKENS)
        out = forward(seq, model)
        assert out.pooler_output is None and "pooler_output" not in out and len(out.to_tuple()) == 1
        with pytest.raises(InputError, match="return_dict=False"):
            forward(seq, model, return_dict=False)
        with ring.activate(None):
            assert model(input_ids=ROW).pooler_output is not None

    run_ranks(2, body, timeout_s=10.0)


# --- text or tower ---------------------------------------------------------------------------------------------------


def text_of_siglip(attention: str) -> Any:
    model = build_model("SiglipTextModel", "SiglipTextConfig", **HEADS, max_position_embeddings=32, projection_size=32)
    model.set_attn_implementation(attention)
    return model


@pytest.mark.parametrize("prepared", ["text", "copied"])
def test_text_whose_name_is_that_of_a_tower_goes_through_the_ring(prepared: str) -> None:
    places = torch.arange(TOKENS)[None]
    true = text_of_siglip("eager")(input_ids=ROW, position_ids=places).last_hidden_state

    def body(ring: Ring) -> float:
        model, seq = prepare(text_of_siglip("ringattn")), ring.sequence(TOKENS)
        out = forward(seq, deepcopy(model) if prepared == "copied" else model)
        return (seq.gather(out.last_hidden_state.detach()) - true).abs().max().item()

    assert max(run_ranks(2, body)) < 1e-5  # rounded to float32 in eager attention


def test_what_may_be_text_is_refused_where_it_was_not_prepared() -> None:
    refused(lambda seq: forward(seq, text_of_siglip("ringattn")), r"may be a tower .*prepare\(model\) once")
    lone = {"input_ids": torch.tensor([[3, 4, 5]]), "position_ids": torch.arange(3)[None]}

    def whole(ring: Ring) -> None:
        out = forward(ring.sequence(TOKENS), text_of_siglip("ringattn"), **lone).last_hidden_state
        torch.testing.assert_close(out, text_of_siglip("sdpa")(**lone).last_hidden_state)

    run_ranks(2, whole, timeout_s=10.0)


# --- masks -----------------------------------------------------------------------------------------------------------


def test_masks_that_have_no_form_here() -> None:
    holes, whole = torch.ones(1, TOKENS, dtype=torch.int64), torch.ones(1, TOKENS, dtype=torch.int64)
    holes[:, 5] = 0
    refused(lambda seq: forward(seq, llama(), attention_mask=seq.shard(holes)), "row 0 has holes")
    refused(lambda seq: forward(seq, llama(), attention_mask=whole), "14 queries and 27 keys|13 queries and 27")
    refused(lambda seq: forward(seq, llama(), attention_mask=torch.zeros(1, 1, 14, 14)), r"shape \(1, 1, 14, 14\)")

    def one_alone(seq: Sequence) -> None:
        forward(seq, llama(), attention_mask=seq.shard(whole) if seq.ring.rank == 0 else None)

    refused(one_alone, "the ranks made different calls", DisagreementError)


def test_a_mask_in_the_arithmetic_of_a_model() -> None:
    """A model that reads its mask as a table is refused, whichever operation reads it."""
    tokens = 1 << 40  # no table is made
    table: Any = mask_spec(
        q_length=tokens, kv_length=tokens, mask_function=masking_utils.causal_mask_function, batch_size=1
    )
    scores = torch.zeros(1, 2, 9, 9)
    uses: list[Callable[[], Any]] = [
        lambda: scores + table, lambda: table + scores, lambda: torch.cat([table, scores], -1), lambda: 1.0 - table,
        lambda: table * -1e4, lambda: ~table, lambda: scores.masked_fill(table, 0.0),
        lambda: scores * table, lambda: table == 0, lambda: table > 0, lambda: len(table), lambda: bool(table),
        lambda: torch.where(table, scores, 0), lambda: table.dtype,
    ]  # fmt: skip
    for number, use in enumerate(uses):
        with pytest.raises(UnsupportedError, match="reads its mask as a table"):
            pytest.fail(f"use {number} gave {use()}")
    assert not hasattr(table, "dtype")


def test_functions_of_a_mask_that_are_not_known() -> None:
    def prefix(batch: Any, head: Any, q: Any, k: Any) -> Any:
        return k < 3

    spec = masking_utils.create_causal_mask(llama().config, torch.zeros(1, 9, 4), None, None, or_mask_function=prefix)
    with Ring() as ring, pytest.raises(UnsupportedError, match=r"made with .*prefix, .*or_mask, which is neither"):
        spec.rows(ring.sequence(9), lambda rows: None)
    blocks = masking_utils.create_causal_mask(
        llama().config, torch.zeros(1, 9, 4), None, None, block_sequence_ids=torch.zeros(1, 9, dtype=torch.int64)
    )
    assert any("blockwise_overlay" in name for name in blocks.unknown)


def test_a_window_to_both_sides_with_padding() -> None:
    rope = {"sliding_attention": {"rope_type": "default", "rope_theta": 10000.0}}
    rope["full_attention"] = rope["sliding_attention"]
    options = {**HEADS, "local_attention": 8, "pad_token_id": 0, "rope_parameters": rope,
               "layer_types": ["sliding_attention"] * 2}  # fmt: skip
    padded = {name: batches()["padded"][name] for name in ("input_ids", "attention_mask")}
    assert (
        far_off(partial(build_model, "ModernBertModel", "ModernBertConfig", **options), padded, layout="striped") < 1e-9
    )


@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt_oss"])
@pytest.mark.parametrize("kind", ["added", "bool"])
def test_a_table_as_mask_where_attention_is_local(name: str, kind: str) -> None:
    seen = torch.ones(1, 1, 9, 9, dtype=torch.bool).tril().triu(-3)
    added = torch.zeros(seen.shape, dtype=torch.float64).masked_fill(~seen, torch.finfo(torch.float64).min)
    true = tiny_model(name, "eager")(input_ids=ROW[:, :9], attention_mask=added).logits
    actual = tiny_model(name, "ringattn")(
        input_ids=ROW[:, :9], attention_mask=added if kind == "added" else seen
    ).logits
    assert (actual - true).abs().max() < 1e-5 * true.abs().max()  # eager attention rounds to float32


# --- compiled --------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_compiled_model_over_two_ranks_equals_one_process() -> None:
    """Results are exact. Attention and its checks run outside of the compiled graph."""
    assert far_off_compiled(partial(tiny_model, "llama", num_hidden_layers=1), ROW, [0, 10, 27]) <= 1e-10
