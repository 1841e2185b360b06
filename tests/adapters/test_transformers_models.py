"""Models and inputs of transformers that do not fit a ring: refused on all ranks, never silently local."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("transformers", reason="transformers is not installed")

import transformers

from ringattn import InputError, Ring, Sequence
from ringattn.adapters import transformers as adapter
from ringattn.errors import UnsupportedError
from ringattn.testing import run_ranks
from tests.adapters.hosts import record
from tests.adapters.models import bert_config, filled, tiny_model
from tests.adapters.ranks import ROW, TOKENS, far_off_compiled, forward, llama, restarting

SMALL = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2}
HEADS = {**SMALL, "intermediate_size": 48, "num_attention_heads": 4}
BART = {
    "vocab_size": 64, "d_model": 32, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "max_position_embeddings": 64,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "use_cache": False, "dropout": 0.0,
}  # fmt: skip

adapter.register()


def made(of: str, config: str, **options: Any) -> Any:
    return filled(getattr(transformers, of)(getattr(transformers, config)(**options)))


def refused(call: Callable[[Sequence], Any], match: str, kind: type[Exception] = UnsupportedError) -> None:
    """`call` raises this on every rank, and none waits for the deadline."""

    def body(ring: Ring) -> None:
        with pytest.raises(kind, match=match):
            call(ring.sequence(TOKENS))

    run_ranks(2, body, timeout_s=10.0)


def with_labels(seq: Sequence, model: Any, **inputs: Any) -> Any:
    labels = seq.shard_labels(ROW)
    return forward(seq, adapter.prepare(model), labels=labels, shift_labels=labels, num_items_in_batch=26, **inputs)


# --- what mixes tokens ----------------------------------------------------------------------------------------------


def mamba() -> Any:
    return made("MambaForCausalLM", "MambaConfig", **SMALL, state_size=8, use_cache=False)


def fnet() -> Any:
    return made("FNetForMaskedLM", "FNetConfig", **SMALL, intermediate_size=48)


def test_models_without_attention() -> None:
    refused(lambda seq: forward(seq, adapter.prepare(fnet())), "no attention of FNet.* went through the ring")
    refused(lambda seq: forward(seq, adapter.prepare(mamba())), "MambaConfig has layers that carry a state")


def test_after_a_refusal_the_same_ring_and_model_go_on() -> None:
    def body(ring: Ring) -> None:
        seq, other, model = ring.sequence(TOKENS), adapter.prepare(fnet()), adapter.prepare(llama())
        before = forward(seq, model).logits
        for _ in range(2):
            with pytest.raises(UnsupportedError, match="no attention of FNet"):
                forward(seq, other)
        assert torch.equal(forward(seq, model).logits, before)

    run_ranks(2, body, timeout_s=10.0)


def test_models_that_choose_tokens_by_their_mask() -> None:
    latent = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 6}
    experts = {"n_routed_experts": 4, "n_group": 2, "topk_group": 1, "num_experts_per_tok": 2}

    def make() -> Any:
        return made("DeepseekV32ForCausalLM", "DeepseekV32Config", **HEADS, **latent, **experts, head_dim=4,
                    num_key_value_heads=4, moe_intermediate_size=24, index_topk=4, index_head_dim=8,
                    index_n_heads=2, first_k_dense_replace=2, use_cache=False)  # fmt: skip

    refused(lambda seq: forward(seq, adapter.prepare(make())), r"choose tokens \(indexed_attention\)")
    with pytest.raises(UnsupportedError, match="keep its own attn_implementation"):
        adapter.prepare(make())(input_ids=ROW)


def test_embeddings_scaled_by_the_mask_tokens_of_a_rank() -> None:
    options = {"pad_token_id": 1, "mask_token_id": 62, "token_dropout": True, "position_embedding_type": "rotary",
               "attention_probs_dropout_prob": 0.0, "hidden_dropout_prob": 0.0}  # fmt: skip
    refused(lambda seq: forward(seq, adapter.prepare(made("EsmForMaskedLM", "EsmConfig", **HEADS, **options))),
            r"config\.token_dropout=False")  # fmt: skip


def test_embeddings_of_neighbors() -> None:
    def make() -> Any:
        return made("MobileBertModel", "MobileBertConfig", **HEADS, intra_bottleneck_size=32,
                    attention_probs_dropout_prob=0.0, hidden_dropout_prob=0.0)  # fmt: skip

    refused(lambda seq: forward(seq, adapter.prepare(make())), r"config\.trigram_input=False")


def hybrid() -> Any:
    return tiny_model("qwen3_next", "eager", layer_types=["linear_attention", "full_attention"])


def test_layers_of_another_kind_before_the_first_attention() -> None:
    """They run first, and would make errors of their own out of packed documents."""
    cuts = torch.tensor([0, 10, TOKENS])
    refused(lambda seq: forward(seq.with_documents(tuple(cuts.tolist())), adapter.prepare(hybrid()), cu_seq_lens_q=cuts,
                                position_ids=seq.shard(restarting(cuts.tolist()))),
            r"Qwen3NextConfig has layers that carry a state .*linear_attention")  # fmt: skip


def test_a_head_that_picks_tokens_by_their_places() -> None:
    """Splinter's compares every token with the one of the question, which one rank has."""
    calm = {"attention_probs_dropout_prob": 0.0, "hidden_dropout_prob": 0.0}

    def make() -> Any:
        return made("SplinterForQuestionAnswering", "SplinterConfig", **HEADS, **calm, question_token_id=5)

    refused(lambda seq: forward(seq, adapter.prepare(make())),
            r"SplinterForQuestionAnswering takes question_positions.* pick .*seq\.gather")  # fmt: skip
    refused(lambda seq: forward(seq, adapter.prepare(make()), question_positions=torch.tensor([[3]])), "pick")


# --- places ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("prepared", [True, False])
def test_models_that_count_places_by_themselves(prepared: bool) -> None:
    """BART hands position_ids to its attention, and embeds the places 0, 1, ... of a shard."""

    def call(seq: Sequence) -> Any:
        model = made("BartForCausalLM", "BartConfig", **BART)
        if prepared:
            return forward(seq, adapter.prepare(model))
        model.set_attn_implementation("ringattn")
        return forward(seq, model)

    refused(call, "models of BartAttention take no position_ids")


@pytest.mark.parametrize(
    ("prepared", "wrong", "named"),
    [
        (True, ["input_ids", "position_ids"], "input_ids"),
        (True, ["input_ids"], "input_ids"),
        (True, ["position_ids"], "position_ids"),
        (False, ["input_ids", "position_ids"], "attention"),
    ],
)
def test_tokens_that_one_rank_did_not_shard(prepared: bool, wrong: list[str], named: str) -> None:
    whole = {"input_ids": ROW, "position_ids": torch.arange(TOKENS)[None]}

    def call(seq: Sequence) -> Any:
        inputs = {name: whole[name] for name in wrong} if seq.ring.rank else {}
        return forward(seq, adapter.prepare(llama()) if prepared else llama(), **inputs)

    refused(call, rf"{named} has 27 tokens, this rank has 1[34] of .*pass seq\.shard", InputError)


@pytest.mark.parametrize("prepared", [True, False])
def test_a_text_shorter_than_the_ring(prepared: bool) -> None:
    def body(ring: Ring) -> None:
        seq, model = ring.sequence(3), adapter.prepare(llama()) if prepared else llama()
        if not prepared and not seq.counts[ring.rank]:
            return  # transformers itself cannot be called there; the others must not wait for it
        with ring.activate(seq), pytest.raises(InputError, match="rank 3 has no token"):
            model(input_ids=seq.shard(ROW[:, :3]), position_ids=seq.positions()[None])

    run_ranks(4, body, timeout_s=10.0)


# --- losses and outputs ---------------------------------------------------------------------------------------------


def whisper() -> Any:
    return made("WhisperForCausalLM", "WhisperConfig", **BART, num_mel_bins=8, max_target_positions=64,
                decoder_start_token_id=1, suppress_tokens=None, begin_suppress_tokens=None)  # fmt: skip


def sorted_by_llama() -> Any:
    return made("LlamaForSequenceClassification", "LlamaConfig", **HEADS, pad_token_id=0)


def sorted_by_bert() -> Any:
    return made("BertForSequenceClassification", "BertConfig", **HEADS, hidden_dropout_prob=0.0,
                attention_probs_dropout_prob=0.0)  # fmt: skip


def test_losses_that_a_model_makes_by_itself() -> None:
    refused(lambda seq: with_labels(seq, whisper()), "WhisperForCausalLM made its loss by itself, .*leave labels out")


@pytest.mark.parametrize("make", [sorted_by_llama, sorted_by_bert])
def test_logits_of_whole_rows(make: Callable[[], Any]) -> None:
    refused(lambda seq: forward(seq, adapter.prepare(make())),
            r"ForSequenceClassification makes logits of a whole row, .* pool seq\.gather")  # fmt: skip
    refused(lambda seq: with_labels(seq, make()), "would make its loss of this rank's tokens alone")


def test_what_was_pooled_of_one_rank_is_left_out() -> None:
    def make() -> Any:
        return transformers.BertModel(bert_config()).double().eval()

    def body(ring: Ring) -> None:
        model, seq = filled(adapter.prepare(make())), ring.sequence(TOKENS)
        out = forward(seq, model)
        assert out.pooler_output is None and "pooler_output" not in out and len(out.to_tuple()) == 1
        with pytest.raises(InputError, match="return_dict=False"):
            forward(seq, model, return_dict=False)
        with ring.activate(None):
            assert model(input_ids=ROW).pooler_output is not None

    run_ranks(2, body, timeout_s=10.0)


# --- local attention ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt_oss"])
@pytest.mark.parametrize("kind", ["added", "bool"])
def test_a_table_as_mask_where_attention_is_local(name: str, kind: str) -> None:
    seen = torch.ones(1, 1, 9, 9, dtype=torch.bool).tril().triu(-3)
    added = torch.zeros(seen.shape, dtype=torch.float64).masked_fill(~seen, torch.finfo(torch.float64).min)
    true = tiny_model(name, "eager")(input_ids=ROW[:, :9], attention_mask=added).logits
    mine = tiny_model(name, "ringattn")(input_ids=ROW[:, :9], attention_mask=added if kind == "added" else seen).logits
    assert (mine - true).abs().max() < 1e-5 * true.abs().max()  # eager attention rounds to float32


# --- compiled -------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_compiled_model_takes_other_documents() -> None:
    """Attention and its checks are left out of the graph."""
    cuts = [[0, 10, 27], [0, 19, 27], [0, 10, 27]]

    def step(model: Any, seq: Sequence, documents: list[int]) -> tuple[Tensor, Tensor]:
        model.zero_grad()
        with seq.ring.activate(seq):
            logits = model(input_ids=seq.shard(ROW), position_ids=seq.shard(restarting(documents))).logits
        logits.sin().sum().backward()
        (first, *_) = model.parameters()
        return logits.detach(), first.grad.clone()

    with Ring() as ring:
        plain, model = adapter.prepare(tiny_model("qwen2", "eager")), adapter.prepare(tiny_model("qwen2", "eager"))
        compiled = torch.compile(model, backend="aot_eager")
        for documents in cuts:
            seq = ring.sequence(cu_seqlens=documents)
            for mine, true in zip(step(compiled, seq, documents), step(plain, seq, documents), strict=True):
                torch.testing.assert_close(mine, true, rtol=1e-5, atol=1e-5)  # rotary positions in float32


@pytest.mark.slow
def test_a_compiled_model_over_two_ranks_equals_one_process() -> None:
    worst = far_off_compiled(partial(tiny_model, "llama", num_hidden_layers=1), ROW, [0, 10, 27])
    assert worst <= 1e-10
    words = "logits and gradients of packed documents, compiled, float64"
    record("transformers", transformers.__version__, "compile", "exact", ranks=2, worst=worst, words=words)
