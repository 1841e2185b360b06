"""Encoders of text beside decoders, each a model of its own: refused in one, exact one after the other."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("transformers", reason="transformers is not installed")

import transformers

from ringattn import Ring
from ringattn.adapters.transformers import prepare
from ringattn.errors import UnsupportedError
from ringattn.testing import run_ranks
from tests.adapters.models import filled
from tests.adapters.ranks import InDouble, gradients

TOKENS = 14
GIVEN, WANTED = torch.randint(3, 64, (2, 2, TOKENS), generator=torch.Generator().manual_seed(1))
BERT = {
    "vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 1, "intermediate_size": 48, "num_attention_heads": 4,
    "max_position_embeddings": 64, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "use_cache": False,
}  # fmt: skip


def two_berts() -> Any:
    encoder, decoder = transformers.BertConfig(**BERT), transformers.BertConfig(**BERT)
    config = transformers.EncoderDecoderConfig.from_encoder_decoder_configs(encoder, decoder)
    return filled(transformers.EncoderDecoderModel(config))


def t5_gemma() -> Any:
    part = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "intermediate_size": 48, "head_dim": 8,
            "num_attention_heads": 4, "num_key_value_heads": 2}  # fmt: skip
    return transformers.T5GemmaForConditionalGeneration(transformers.T5GemmaConfig(encoder=part, decoder=part))


@pytest.mark.parametrize(("make", "named"), [(two_berts, "BertModel"), (t5_gemma, "T5GemmaEncoder")])
def test_an_encoder_with_a_configuration_of_its_own(make: Any, named: str) -> None:
    """Its tokens are this rank's: attending like a tower, it would see no others."""
    advice = "by themselves, .* as encoder_hidden_states"
    with pytest.raises(UnsupportedError, match=f"reads its text with {named}, .* {advice}"):
        prepare(make())


def test_encoder_and_decoder_by_themselves() -> None:
    """What the refusal advises."""
    with InDouble():
        model = two_berts()
        score = model(input_ids=GIVEN, decoder_input_ids=WANTED).logits.sin().sum()
        true = gradients(model, score)

    def body(ring: Ring) -> dict[str, Tensor]:
        with InDouble():
            ours, seq = two_berts(), ring.sequence(TOKENS)
            prepare(ours.encoder)
            prepare(ours.decoder)
            places = {"position_ids": seq.positions()[None]}
            with ring.activate(seq):
                states = ours.encoder(input_ids=seq.shard(GIVEN), **places).last_hidden_state
                seen = {"encoder_hidden_states": states, "encoder_attention_mask": torch.ones(states.shape[:2])}
                logits = ours.decoder(input_ids=seq.shard(WANTED), **places, **seen).logits
            grads = gradients(ours, logits.sin().sum())
        ring.all_reduce(list(grads.values()))
        return grads

    grads = run_ranks(2, body, timeout_s=20.0)[0]
    for name, grad in true.items():
        assert (grads[name] - grad).abs().max() <= 1e-9 * max(1.0, grad.abs().max().item()), name
    assert grads["encoder.embeddings.word_embeddings.weight"].any()
