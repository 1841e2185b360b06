"""Outputs of a transformers model over a ring: per token or per row, losses, caches, encoders."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed import DeviceMesh
from torch.distributed.tensor import Shard, distribute_tensor

from tests.contract.mesh import on_mesh

pytest.importorskip("transformers", reason="transformers is not installed")

import transformers

from ringattn import InputError, Ring, Sequence
from ringattn.adapters import transformers as adapter
from ringattn.adapters.torch_ops import ring_attention
from ringattn.testing import run_ranks
from tests.adapters import test_transformers_images as images
from tests.adapters.models import build_model, tiny_model
from tests.adapters.ranks import far_off, gradient_error, llama, refused
from tests.adapters.test_transformers_refusals import HEADS

ROWS = torch.randint(3, 64, (2, 28), generator=torch.Generator().manual_seed(1))
TOKENS = ROWS.shape[1]
CALM = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "max_position_embeddings": 64}
BERT = {**HEADS, **CALM}
GPT2 = {"vocab_size": 64, "n_embd": 32, "n_layer": 1, "n_head": 4, "n_positions": 64, "resid_pdrop": 0.0,
        "embd_pdrop": 0.0, "attn_pdrop": 0.0, "use_cache": False}  # fmt: skip
CLIP = {**HEADS, "max_position_embeddings": 64, "projection_dim": 24}


def call(seq: Sequence, model: Any, **inputs: Any) -> Any:
    arguments = {"input_ids": seq.shard(ROWS), "position_ids": seq.positions()[None].expand(2, -1), **inputs}
    with seq.ring.activate(seq):
        return adapter.prepare(model)(**arguments)


def refuses(make: Callable[[], Any], match: str, **inputs: Any) -> None:
    """Check that two ranks refuse a call of the model with `inputs`, which every rank passes whole."""
    refused(lambda seq: call(seq.ring.sequence(TOKENS), make(), **inputs), match)


# --- outputs --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("of", "config", "options", "named"),
    [
        ("BertForPreTraining", "BertConfig", BERT, "seq_relationship_logits"),
        ("CLIPTextModelWithProjection", "CLIPTextConfig", CLIP, "text_embeds"),
        ("DPRQuestionEncoder", "DPRConfig", BERT, "pooler_output"),
        ("BertForNextSentencePrediction", "BertConfig", BERT, "logits"),
        ("LlamaForSequenceClassification", "LlamaConfig", {**HEADS, "pad_token_id": 0, "num_labels": 14}, "logits"),
        ("CLIPTextModelWithProjection", "CLIPTextConfig", {**CLIP, "projection_dim": 14}, "text_embeds"),
    ],
)
def test_outputs_of_whole_rows(of: str, config: str, options: dict[str, Any], named: str) -> None:
    """Outputs computed from whole rows are refused, also if the number of classes equals the tokens of a rank."""

    refuses(lambda: build_model(of, config, **options), rf"{of} computes {named} from a whole row")


def test_outputs_of_several_choices() -> None:
    def body(seq: Sequence) -> None:
        model = adapter.prepare(build_model("GPT2DoubleHeadsModel", "GPT2Config", **GPT2))
        ids, places = seq.shard(ROWS[:, None], 2), seq.positions()[None]
        with seq.ring.activate(seq):
            model(input_ids=ids, position_ids=places, mc_token_ids=torch.zeros(2, 1, dtype=torch.int64))

    refused(
        lambda seq: body(seq.ring.sequence(TOKENS)),
        "GPT2DoubleHeadsModel computes mc_logits from a whole",
        InputError,
    )


@pytest.mark.parametrize(
    ("of", "config"),
    [("ElectraForPreTraining", "ElectraConfig"), ("ElectraForMaskedLM", "ElectraConfig"),
     ("BertForTokenClassification", "BertConfig"), ("BertForQuestionAnswering", "BertConfig")],
)  # fmt: skip
def test_outputs_of_tokens(of: str, config: str) -> None:
    """Outputs per token are exact, also those of shape (rows, tokens)."""
    assert far_off(lambda: build_model(of, config, **BERT), {"input_ids": ROWS}) < 1e-9


def test_losses_that_other_inputs_than_labels_ask_for() -> None:
    spans = {"start_positions": torch.tensor([3, 20]), "end_positions": torch.tensor([9, 27])}
    refuses(lambda: build_model("BertForQuestionAnswering", "BertConfig", **BERT),
            r"BertForQuestionAnswering computed a loss in its own way, .*start_positions", **spans)  # fmt: skip


# --- what is kept or left out ---------------------------------------------------------------------------------------


def test_a_cache_that_was_filled_under_a_sequence() -> None:
    def body(ring: Ring) -> None:
        model, seq = tiny_model("llama", "ringattn", use_cache=True).eval(), ring.sequence(TOKENS)
        cache, passed = call(seq, model).past_key_values, transformers.DynamicCache()
        call(seq, model, past_key_values=passed)
        more = {"input_ids": ROWS[:, :1], "position_ids": torch.full((2, 1), TOKENS)}
        with ring.activate(None), torch.no_grad():
            for kept in (cache, passed):
                with pytest.raises(InputError, match="cache holds only this rank's tokens"):
                    model(**more, past_key_values=kept)
            cache.reset() if hasattr(cache, "reset") else None
            whole = model(input_ids=ROWS).past_key_values
            kept = model(**more, past_key_values=whole).logits
            alone = model(input_ids=torch.cat([ROWS, ROWS[:, :1]], 1)).logits[:, -1:]
        torch.testing.assert_close(kept, alone, rtol=1e-5, atol=1e-5)  # rotary positions in float32

    run_ranks(2, body, timeout_s=10.0)


@pytest.mark.parametrize("kept", [1, torch.tensor([0, 3])])
def test_logits_of_some_tokens(kept: Any) -> None:
    refuses(llama, "logits_to_keep would keep the last logits of each rank's shard", logits_to_keep=kept)


def test_logits_of_all_tokens() -> None:
    def body(ring: Ring) -> None:
        model, seq = llama(), ring.sequence(TOKENS)
        assert torch.equal(call(seq, model, logits_to_keep=0).logits, call(seq, model).logits)

    run_ranks(2, body, timeout_s=10.0)


@pytest.mark.parametrize("cache", ["static", "static, compiled", "dynamic"])
@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt_oss"])
def test_generation_on_every_rank_alike(name: str, cache: str) -> None:
    """Every rank generates the same tokens from whole prompts under `activate(None)`, after a call over a ring.

    On a GPU, a static cache makes transformers compile the model.
    """
    prompt, mask = ROWS[:, :9], torch.ones(2, 9, dtype=torch.int64)
    mask[0, :3] = 0
    options: dict[str, Any] = {"max_new_tokens": 3, "do_sample": False, "attention_mask": mask, "use_cache": True,
                               "cache_implementation": cache.split(",")[0]}  # fmt: skip
    if "compiled" in cache:
        options["compile_config"] = transformers.CompileConfig(backend="eager", mode=None)
        options["compile_config"]._compile_all_devices = True
    model = tiny_model(name, "eager").float().eval()  # with float64, eager attention returns NaN for padding
    true = model.generate(prompt, **{**options, "compile_config": None})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "compile", lambda call, **_: call)  # the inputs of compiled code matter here, not the code

        def body(ring: Ring) -> None:
            ours, seq = tiny_model(name, "ringattn"), ring.sequence(TOKENS)
            call(seq, ours)
            with ring.activate(None):
                assert torch.equal(ours.float().eval().generate(prompt, **options), true)

        run_ranks(2, body, timeout_s=30.0)


# --- encoders -------------------------------------------------------------------------------------------------------


def crossing(name: str) -> Any:
    if name == "Bert":
        return build_model(
            "BertModel", "BertConfig", **BERT, is_decoder=True, add_cross_attention=True, use_cache=False
        )
    return build_model("GPT2LMHeadModel", "GPT2Config", **GPT2, add_cross_attention=True)


STATES = torch.randn(2, TOKENS, 32, generator=torch.Generator().manual_seed(7), dtype=torch.float64)


@pytest.mark.parametrize("name", ["Bert", "GPT2"])
def test_cross_attention_to_as_many_tokens(name: str) -> None:
    def over_ring(ring: Ring, model: Any) -> Tensor:
        seq, ones = ring.sequence(TOKENS), torch.ones(2, TOKENS // 2, dtype=torch.int64)
        states: Tensor = call(seq, model, encoder_hidden_states=seq.shard(STATES), encoder_attention_mask=ones)[0]
        return states.sin().sum()

    def alone(model: Any) -> Tensor:
        states: Tensor = model(input_ids=ROWS, encoder_hidden_states=STATES)[0]
        return states.sin().sum()

    assert gradient_error(lambda: crossing(name), alone, over_ring) <= 1e-9


@pytest.mark.parametrize(("name", "prepared"), [("Bert", True), ("Bert", False), ("GPT2", True)])
def test_cross_attention_with_padding_of_the_encoder(name: str, prepared: bool) -> None:
    mask = torch.ones(2, TOKENS, dtype=torch.int64)
    mask[0, -3:] = 0  # only one rank has padding

    def body(seq: Sequence) -> None:
        model = crossing(name)
        model.set_attn_implementation("ringattn")
        arguments = {"encoder_hidden_states": seq.shard(STATES), "encoder_attention_mask": seq.shard(mask),
                 "input_ids": seq.shard(ROWS), "position_ids": seq.positions()[None].expand(2, -1)}  # fmt: skip
        with seq.ring.activate(seq):
            (adapter.prepare(model) if prepared else model)(**arguments)

    refused(lambda seq: body(seq.ring.sequence(TOKENS)), "cross attention to an encoder with padding")


@pytest.mark.parametrize("name", ["Bert", "GPT2"])
def test_cross_attention_of_packed_documents(name: str) -> None:
    def body(seq: Sequence) -> None:
        packed = seq.ring.sequence(cu_seqlens=[0, 11, TOKENS])
        call(packed, crossing(name), encoder_hidden_states=packed.shard(STATES))

    refused(body, "cross attention to an encoder .* documents")


# --- positions of more than one number ------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", ["(rows, tokens)", "(3, rows, tokens)", "(4, rows, tokens)"])
def test_positions_of_text_in_a_model_for_images(shape: str) -> None:
    def sharded_loss(ring: Ring, model: Any, shift: int = 0) -> Tensor:
        seq = ring.sequence(TOKENS)
        places = seq.positions()[None].expand(2, -1) + shift
        places = places if shape == "(rows, tokens)" else places.expand(int(shape[1]), -1, -1)
        logits: Tensor = call(seq, model, position_ids=places).logits
        return logits.sin().sum()

    make = partial(images.model, "qwen2_5_vl")
    assert gradient_error(make, lambda model: model(input_ids=ROWS).logits.sin().sum(), sharded_loss) <= 1e-9
    refused(lambda seq: sharded_loss(seq.ring, make(), 1), "position_ids are")


# --- sinks ----------------------------------------------------------------------------------------------------------


@on_mesh
def test_sinks_that_lie_over_ranks_of_tensor_parallelism(mesh: DeviceMesh) -> None:
    """The local part of sinks that are DTensors belongs to the local heads. A different number of sinks is refused."""
    q = torch.zeros(1, 6, 4, 8)
    fewer = distribute_tensor(torch.zeros(3), mesh, [Shard(0)])
    with pytest.raises(InputError, match=r"sinks is a DTensor with placements .* \(3,\) .* has 4 query heads"):
        ring_attention(q, q, q, sinks=fewer)
    model = tiny_model("gpt_oss", "ringattn")
    true = model(input_ids=ROWS).logits
    for layer in model.model.layers:
        sharded = distribute_tensor(layer.self_attn.sinks.detach(), mesh, [Shard(0)])
        layer.self_attn.sinks = torch.nn.Parameter(sharded)
    with Ring() as ring:
        assert torch.equal(call(ring.sequence(TOKENS), model).logits.argmax(-1), true.argmax(-1))
    assert torch.equal(model(input_ids=ROWS).logits, true)
