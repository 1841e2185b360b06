"""What models of transformers may ask of a ring, what is refused on all ranks, and what a mask of theirs means."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("transformers", reason="transformers is not installed")

import transformers
from transformers import masking_utils

from ringattn import DisagreementError, InputError, Ring, Sequence
from ringattn.adapters import transformers as adapter
from ringattn.adapters.transformers.attention import mask_spec, refuse_options
from ringattn.errors import UnsupportedError
from ringattn.testing import run_ranks
from tests.adapters.models import bert_config, filled, tiny_model
from tests.adapters.ranks import ROW, TOKENS, forward, llama

adapter.register()


def refused(call: Callable[[Ring, Sequence], Any], match: str, kind: type[Exception] = InputError) -> None:
    """`call` raises this on both of two ranks."""

    def body(ring: Ring) -> None:
        with pytest.raises(kind, match=match):
            call(ring, ring.sequence(TOKENS, layout="contiguous"))

    run_ranks(2, body, timeout_s=10.0)


# --- inputs ---------------------------------------------------------------------------------------------------------


def test_positions_that_look_local() -> None:
    local = torch.arange(14)[None]
    wrong = r"position_ids are 0, 1, 2, 3, 4, 5, ..., this rank's tokens .* have 14, .*seq\.positions\(\)"
    refused(lambda ring, seq: forward(seq, llama(), position_ids=None), wrong)
    refused(lambda ring, seq: forward(seq, adapter.prepare(llama()), position_ids=None), "position_ids are missing")
    refused(lambda ring, seq: forward(seq, adapter.prepare(llama()), position_ids=local[:, : seq.counts[ring.rank]]),
            wrong)  # fmt: skip


def test_positions_of_a_padded_row() -> None:
    """Counted from the first real token they are right, one further they are not."""

    def call(seq: Sequence, shift: int) -> None:
        mask = torch.ones(1, TOKENS, dtype=torch.int64)
        mask[:, :3] = 0
        places = (mask.cumsum(1) - 1).clamp(min=0) + shift
        forward(seq, llama(), attention_mask=seq.shard(mask), position_ids=seq.shard(places))

    run_ranks(2, lambda ring: call(ring.sequence(TOKENS), 0))
    refused(lambda ring, seq: call(seq, 1), "position_ids are")


def test_positions_that_attention_does_not_get() -> None:
    """Llama 4 hands none on; `prepare` does, for one model and one call."""

    def make() -> Any:
        return tiny_model("llama4_text", "ringattn", attn_temperature_tuning=False)

    def call(ring: Ring, seq: Sequence) -> None:
        forward(seq, adapter.prepare(make()))
        forward(seq, make())

    refused(call, r"no position_ids came to Llama4TextAttention.*prepare\(model\)")


def test_documents_that_the_sequence_does_not_know() -> None:
    def packed(seq: Sequence, **others: Any) -> None:
        places = torch.cat([torch.arange(10), torch.arange(17)])[None]
        forward(seq, llama(), position_ids=seq.shard(places), **others)

    refused(lambda ring, seq: packed(seq), r"position_ids are .*ring\.sequence\(cu_seqlens=")
    cuts = torch.tensor([0, 10, 27])
    refused(lambda ring, seq: forward(seq, llama(), cu_seq_lens_q=cuts), r"cu_seq_lens_q cuts at \(0, 10, 27\)")
    run_ranks(2, lambda ring: packed(ring.sequence(cu_seqlens=cuts, layout="zigzag"), cu_seq_lens_q=cuts))


def test_labels_of_which_the_model_would_make_another_loss() -> None:
    def call(seq: Sequence, make: Callable[[], Any] = llama, **others: Any) -> None:
        forward(seq, adapter.prepare(make()), labels=seq.shard_labels(ROW), **others)

    def masked() -> Any:
        return transformers.BertForMaskedLM(bert_config())

    def shifted(seq: Sequence) -> Tensor:
        return seq.shard_labels(ROW)

    refused(lambda ring, seq: call(seq), r"labels without shift_labels.*seq\.shard_labels")
    refused(lambda ring, seq: call(seq, shift_labels=shifted(seq)), "labels without num_items_in_batch make a mean")

    def routed(seq: Sequence, given: bool) -> Any:
        options = {"shift_labels": shifted(seq), "num_items_in_batch": 26}
        if given:
            return call(seq, lambda: experts(False), output_router_logits=True, **options)
        return call(seq, lambda: experts(True), **options)

    for given in (False, True):
        refused(lambda ring, seq, given=given: routed(seq, given), "output_router_logits beside labels: Mixtral")
    refused(lambda ring, seq: call(seq, masked), "BertForMaskedLM would make its loss of this rank's tokens alone")


def experts(routed: bool) -> Any:
    small = tiny_model("llama", "eager").config
    config = transformers.MixtralConfig(
        vocab_size=64, hidden_size=32, intermediate_size=24, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=2, num_local_experts=2, output_router_logits=routed, pad_token_id=small.pad_token_id,
        experts_implementation="eager",
    )  # fmt: skip
    return filled(transformers.MixtralForCausalLM(config))


def test_what_one_rank_alone_gets_wrong() -> None:
    """All ranks raise, none waits for the deadline."""

    def prepared(ring: Ring, seq: Sequence) -> None:
        forward(seq, adapter.prepare(llama()), **({"position_ids": None} if ring.rank else {}))

    def masked(ring: Ring, seq: Sequence) -> None:
        tokens = seq.counts[ring.rank]
        forward(seq, llama(), attention_mask=torch.zeros(1, 1, tokens, tokens) if ring.rank else None)

    def dropped(ring: Ring, seq: Sequence) -> None:
        forward(seq, llama(attention_dropout=0.1 if ring.rank else 0.0))

    refused(prepared, "position_ids are missing")
    refused(masked, "a mask of its own")
    refused(dropped, r"attention dropout is 0\.1")


# --- text or tower ---------------------------------------------------------------------------------------------------


def text_of_siglip(attention: str) -> Any:
    config = transformers.SiglipTextConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        max_position_embeddings=32, projection_size=32,
    )  # fmt: skip
    model = filled(transformers.SiglipTextModel(config))
    model.set_attn_implementation(attention)
    return model


@pytest.mark.parametrize("prepared", ["text", "copied"])
def test_text_whose_name_is_that_of_a_tower_goes_through_the_ring(prepared: str) -> None:
    tokens, places = ROW, torch.arange(TOKENS)[None]
    true = text_of_siglip("eager")(input_ids=tokens, position_ids=places).last_hidden_state

    def body(ring: Ring) -> float:
        model, seq = adapter.prepare(text_of_siglip("ringattn")), ring.sequence(TOKENS)
        model = deepcopy(model) if prepared == "copied" else model
        out = forward(seq, model)
        return (seq.gather(out.last_hidden_state.detach()) - true).abs().max().item()

    assert max(run_ranks(2, body)) < 1e-5  # rounded to float32 in eager attention


def test_what_may_be_text_is_refused_where_it_was_not_prepared() -> None:
    refused(lambda ring, seq: forward(seq, text_of_siglip("ringattn")), r"may be a tower .*prepare\(model\) once")
    lone = torch.tensor([[3, 4, 5]])

    def whole(ring: Ring) -> None:
        model, seq, places = text_of_siglip("ringattn"), ring.sequence(TOKENS), torch.arange(3)[None]
        out = forward(seq, model, input_ids=lone, position_ids=places).last_hidden_state
        alone = text_of_siglip("sdpa")(input_ids=lone, position_ids=places).last_hidden_state
        torch.testing.assert_close(out, alone)
        with pytest.raises(InputError, match="no sequence is active"):
            model(input_ids=lone)

    run_ranks(2, whole, timeout_s=10.0)


def test_masks_that_have_no_form_here() -> None:
    holes, whole = torch.ones(1, TOKENS, dtype=torch.int64), torch.ones(1, TOKENS, dtype=torch.int64)
    holes[:, 5] = 0
    refused(lambda ring, seq: forward(seq, llama(), attention_mask=seq.shard(holes)), "row 0 has holes")
    refused(lambda ring, seq: forward(seq, llama(), attention_mask=whole), "14 queries meet 27 keys|13 queries meet 27")
    four = torch.zeros(1, 1, 14, 14)
    refused(lambda ring, seq: forward(seq, llama(), attention_mask=four), "a mask of its own")

    def one_alone(ring: Ring, seq: Sequence) -> None:
        mask = seq.shard(whole) if ring.rank == 0 else None
        forward(seq, llama(), attention_mask=mask)

    refused(one_alone, "the ranks do not ask for the same", DisagreementError)


def test_a_mask_in_the_arithmetic_of_a_model() -> None:
    """What a model does with a table by itself: refused by name, whatever function it is."""
    spec = mask_spec(q_length=9, kv_length=9, mask_function=masking_utils.causal_mask_function, batch_size=1)
    table: Any = spec
    scores = torch.zeros(1, 2, 9, 9)
    uses: list[Callable[[], Any]] = [
        lambda: scores + table, lambda: table + scores, lambda: torch.cat([table, scores], -1), lambda: 1.0 - table,
        lambda: table * -1e4, lambda: ~table, lambda: scores.masked_fill(table, 0.0),
        lambda: scores * table, lambda: table == 0, lambda: table > 0, lambda: len(table), lambda: bool(table),
        lambda: torch.where(table, scores, 0),
    ]  # fmt: skip
    for number, use in enumerate(uses):
        with pytest.raises(UnsupportedError, match="reads its mask as a table"):
            pytest.fail(f"use {number} gave {use()}")


def test_a_model_that_adds_its_mask_by_itself() -> None:
    """GIT's text, whose tower goes through the interface."""
    small = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4}
    vision = {**small, "image_size": 32, "patch_size": 16}
    kind = transformers.GitForCausalLM  # imported here, and not by two threads at once
    config = transformers.GitConfig(vision_config=vision, vocab_size=64, max_position_embeddings=64, **small,
                                    hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)  # fmt: skip
    refused(lambda ring, seq: forward(seq, adapter.prepare(kind(deepcopy(config)).double())),
            "reads its mask as a table .*keep its own attn_implementation", UnsupportedError)  # fmt: skip


def test_functions_of_a_mask_that_are_not_known() -> None:
    def prefix(batch: Any, head: Any, q: Any, k: Any) -> Any:
        return k < 3

    spec = masking_utils.create_causal_mask(llama().config, torch.zeros(1, 9, 4), None, None, or_mask_function=prefix)
    assert any("prefix" in name for name in spec.unknown)
    with Ring() as ring, pytest.raises(UnsupportedError, match=r"made with .*prefix, .*or_mask, which is neither"):
        spec.rows(ring.sequence(9), lambda rows: None)
    blocks = masking_utils.create_causal_mask(
        llama().config, torch.zeros(1, 9, 4), None, None, block_sequence_ids=torch.zeros(1, 9, dtype=torch.int64)
    )
    assert any("blockwise_overlay" in name for name in blocks.unknown)


def test_options_that_attention_over_ranks_has_not() -> None:
    refused(lambda ring, seq: forward(seq, llama(attention_dropout=0.1)), "attention dropout is 0.1")
    refused(lambda ring, seq: forward(seq, llama(), output_attentions=True), "output_attentions", UnsupportedError)
    bias = torch.zeros(1, 4, 14, 14)
    refused(lambda ring, seq: forward(seq, llama(), position_bias=bias), "adds a bias", UnsupportedError)


@pytest.mark.parametrize(
    ("config", "dropout", "told"),
    [
        (transformers.LlamaConfig(attention_dropout=0.2), 0.2, r"config\.attention_dropout=0\.0, or call model"),
        (transformers.GPT2Config(attn_pdrop=0.1), 0.1, r"config\.attn_pdrop=0\.0, or call model\.eval\(\)"),
        (transformers.BertConfig(attention_probs_dropout_prob=0.3), 0.3, r"config\.attention_probs_dropout_prob=0\.0"),
        (transformers.XGLMConfig(dropout=0.4, attention_dropout=0.0), 0.4, r"config\.dropout=0\.0"),
        (None, 0.5, r"config\.attention_dropout=0\.0"),
    ],
)
def test_the_refusal_of_attention_dropout_says_what_to_set(config: Any, dropout: float, told: str) -> None:
    module = torch.nn.Module()
    module.config = config
    with pytest.raises(
        InputError,
        match=rf"attention dropout is {dropout}, .*activate\(seq, dropout_seed=step\).*; or make the .*{told}",
    ):
        refuse_options(module, dropout, {})


def test_attention_dropout_is_no_matter_in_evaluation() -> None:
    def make(attention: str) -> Any:
        return tiny_model("llama", attention, attention_dropout=0.1).eval()

    tokens = ROW
    true = make("eager")(input_ids=tokens).logits

    def body(ring: Ring) -> float:
        model, seq = adapter.prepare(make("ringattn")), ring.sequence(TOKENS)
        with pytest.raises(InputError, match=r"attention dropout is 0\.1"):
            forward(seq, model.train())
        return (seq.gather(forward(seq, model.eval()).logits.detach()) - true).abs().max().item()

    assert max(run_ranks(2, body)) < 1e-5  # rounded to float32 in eager attention


SMALL = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4}


@pytest.mark.parametrize(
    ("kind", "told"),
    [
        ("bloom", "BloomForCausalLM adds ALiBi to its scores inside of its own attention modules; "),
        ("mpt", "MptForCausalLM adds ALiBi"),
        ("falcon", "FalconForCausalLM adds ALiBi .* and rounds its biases to bfloat16"),
    ],
)
@pytest.mark.parametrize("attention", ["eager", "ringattn"])
def test_models_that_add_alibi_by_themselves(kind: str, told: str, attention: str) -> None:
    """Also those that were made with our name, which they take, and which does not reach their attention."""
    alibi = {"alibi": True} if kind == "falcon" else {}
    config = transformers.AutoConfig.for_model(kind, **SMALL, **alibi)
    if (kind, attention) == ("falcon", "ringattn"):  # transformers has no such class of attention for it
        with pytest.raises(KeyError, match="ringattn"):
            transformers.AutoModelForCausalLM.from_config(config, attn_implementation=attention)
        return
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation=attention)
    with pytest.raises(UnsupportedError, match=told + r".*alibi_slopes=\.\.\."):
        adapter.prepare(model)
    assert model.config._attn_implementation == attention  # as it was
    others = "reads its mask as a table" if attention == "ringattn" else "no attention went over the ring"
    refused(lambda ring, seq: forward(seq, model), others)


def test_layers_that_carry_a_state() -> None:
    refused(lambda ring, seq: forward(seq, tiny_model("qwen3_next", "ringattn")), "linear_attention", UnsupportedError)
    refused(lambda ring, seq: forward(seq, adapter.prepare(tiny_model("llama4_text", "ringattn"))),
            "attn_temperature_tuning=False", UnsupportedError)  # fmt: skip


def test_a_model_whose_attention_cannot_be_set() -> None:
    model = tiny_model("llama", "eager")
    model.set_attn_implementation = lambda *_: None  # what it does, beside a warning, for such a model
    with pytest.raises(UnsupportedError, match="LlamaForCausalLM did not let its attention be set"):
        adapter.prepare(model)


def test_nothing_active_while_ranks_share() -> None:
    def body(ring: Ring) -> None:
        with pytest.raises(InputError, match="no sequence is active"):
            llama()(input_ids=ROW)

    run_ranks(2, body)


# --- masks -----------------------------------------------------------------------------------------------------------


def test_a_mask_takes_no_table() -> None:
    tokens = 1 << 40
    for function in (
        masking_utils.causal_mask_function,
        masking_utils.sliding_window_causal_mask_function(4096),
        masking_utils.bidirectional_mask_function,
    ):
        spec = mask_spec(q_length=tokens, kv_length=tokens, mask_function=function, local_size=4096, batch_size=1)
        assert not spec.unknown
        assert not hasattr(spec, "dtype")
        with pytest.raises(UnsupportedError, match="reads its mask as a table"):
            spec.dtype  # noqa: B018


def dense(spec: Any, seq: Sequence) -> Tensor:
    """(batch, queries, keys) bool: who meets whom after `spec.rows`, from the definition."""
    ahead = torch.arange(seq.length)[None] - torch.arange(seq.length)[:, None]
    band = ahead <= 0 if spec.causal else torch.ones_like(ahead, dtype=torch.bool)
    if spec.window is not None:
        band &= (ahead >= -spec.window[0]) & (ahead <= spec.window[1] if not spec.causal else ahead <= 0)
    met = torch.zeros(spec.arguments["batch_size"], *ahead.shape, dtype=torch.bool)
    for cut, rows in spec.rows(seq, lambda rows: None):
        ends = torch.tensor((cut.documents or (0, seq.length))[1:])
        place = torch.searchsorted(ends, torch.arange(seq.length), right=True)
        met[list(rows)] = band & (place[:, None] == place[None])
    return met


@pytest.mark.parametrize("kind", ["causal", "window", "full", "both ways", "chunks"])
@pytest.mark.parametrize("padded", [False, True])
def test_real_tokens_meet_whom_the_host_lets_them_meet(kind: str, padded: bool) -> None:
    """Against the table that transformers itself makes for sdpa."""
    tokens, batch = 19, 4
    mask = torch.ones(batch, tokens, dtype=torch.bool)
    if padded:
        mask[0, :4], mask[1, -5:], mask[2, :2], mask[2, -1:] = False, False, False, False
    left = (~mask).int().cumprod(1).sum(1)
    function, size = {
        "causal": (masking_utils.causal_mask_function, None),
        "window": (masking_utils.sliding_window_causal_mask_function(4), 4),
        "full": (masking_utils.bidirectional_mask_function, None),
        "both ways": (masking_utils.sliding_window_bidirectional_mask_function(4), 4),
        "chunks": (masking_utils.chunked_causal_mask_function(5, left), 5),
    }[kind]
    spec = mask_spec(
        batch_size=batch, q_length=tokens, kv_length=tokens, mask_function=function, local_size=size,
        attention_mask=mask if padded else None,
    )  # fmt: skip
    with Ring() as ring:
        mine = dense(spec, ring.sequence(tokens))
    theirs = spec.local(may_be_none=False)
    assert theirs is not None
    assert torch.equal(mine[mask], theirs[:, 0][mask])
