"""Models of transformers that attend through a ring: equal to one process with eager attention, or refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

pytest.importorskip("transformers", reason="transformers is not installed")

import transformers

from ringattn import Ring
from ringattn.adapters import transformers as adapter
from ringattn.adapters.context import recompute_context
from ringattn.errors import UnsupportedError
from ringattn.testing import run_ranks
from tests.adapters.dropout_ranks import CASES, build, reference_values
from tests.adapters.models import MODELS, bert_config, filled, tiny_model
from tests.adapters.processes import call_in_program
from tests.adapters.ranks import (
    ROW,
    TOKENS,
    InDouble,
    batches,
    far_from_one,
    far_off,
    forward,
    llama,
    one_process,
    over_ranks,
)
from tests.doc_code import run_page

TOLERANCE = 1e-9


# --- the same as one process -----------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("kind", batches())
@pytest.mark.parametrize("name", MODELS)
def test_fifteen_architectures(name: str, kind: str) -> None:
    """Logits, loss and every gradient are exact for plain, packed and padded batches over 2 or 4 ranks."""
    ranks, layout = ((2, "zigzag"), (4, "contiguous"))[(len(name) + len(kind)) % 2]
    error = far_from_one(lambda: tiny_model(name, "eager"), batches()[kind], layout=layout, ranks=ranks)
    assert error <= TOLERANCE


@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing(reentrant: bool) -> None:
    """Results are exact although backward recomputes every layer after the sequence was deactivated."""
    runs = []

    def in_double(forward: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap a forward in `InDouble`, which is not active when backward recomputes."""

        def doubled(*args: Any, **kwargs: Any) -> Any:
            runs.append(1)
            with InDouble():
                return forward(*args, **kwargs)

        return doubled

    def train(model: Any) -> Any:
        options: dict[str, Any] = {"use_reentrant": reentrant}
        if not reentrant:
            options["context_fn"] = recompute_context
        for name, part in model.model.layers.named_modules():
            if name.endswith("layernorm"):  # the only recomputed modules that round to float32
                part.forward = in_double(part.forward)
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=options)
        model.enable_input_require_grads()
        return model

    with InDouble():
        true = one_process(tiny_model("mistral", "eager"), batches()["padded"])

    def body(ring: Ring) -> float:
        with InDouble():
            return over_ranks(ring, adapter.prepare(train(tiny_model("mistral", "eager"))), batches()["padded"], true)

    assert max(run_ranks(2, body)) <= TOLERANCE and len(runs) == 2 * 4 * 2  # ranks, norms, runs of each


@pytest.mark.parametrize("kind", ["plain", "packed", "padded"])
def test_chunks_are_documents(kind: str) -> None:
    def make() -> Any:
        return tiny_model("llama4_text", "eager", attn_temperature_tuning=False)

    assert far_from_one(make, batches()[kind], ranks=3) <= TOLERANCE


def test_an_encoder_sees_both_ways_and_no_padding() -> None:
    padded = {name: batches()["padded"][name] for name in ("input_ids", "attention_mask")}

    def make() -> Any:
        return filled(transformers.BertModel(bert_config(), add_pooling_layer=False))

    assert far_off(make, padded, layout="striped") <= TOLERANCE


@pytest.mark.parametrize("attention", ["sdpa", "eager", "ringattn"])
def test_an_image_is_seen_by_a_tower_that_is_not_sharded(attention: str) -> None:
    """The text of a multimodal model is sharded, but its vision tower attends locally to whole images.

    This holds even if the tower's attention implementation is "ringattn".
    """
    config = transformers.CLIPVisionConfig(
        hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2, image_size=8, patch_size=4
    )
    small = transformers.LlavaConfig(vision_config=config, text_config=tiny_model("llama", "eager").config)
    model = filled(transformers.LlavaForConditionalGeneration(small))
    adapter.prepare(model)
    assert model.config.text_config._attn_implementation == "ringattn"
    assert model.config.vision_config._attn_implementation != "ringattn"

    pixels = torch.randn(2, 3, 8, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    tower = model.model.vision_tower
    with torch.no_grad():
        if attention == "eager":  # eager attention has a float32 softmax, also in one process
            model.set_attn_implementation({"vision_config": attention})
        true = tower(pixels)[0]
        model.set_attn_implementation({"vision_config": attention})
    assert model.config.vision_config._attn_implementation == attention

    def body(ring: Ring) -> float:
        seq = ring.sequence(2 * true.shape[1])  # tokens per rank equal the patches of the tower
        with ring.activate(seq), torch.no_grad():
            return (tower(pixels)[0] - true).abs().max().item()

    assert max(run_ranks(2, body)) <= TOLERANCE


def test_autocast_casts_like_sdpa() -> None:
    def body(ring: Ring) -> None:
        model, seq = llama().float(), ring.sequence(TOKENS)
        with torch.autocast("cpu", torch.bfloat16):
            shared = seq.gather(forward(seq, model).logits.detach())
            with ring.activate(None):
                alone = model(input_ids=ROW).logits
        assert shared.dtype == alone.dtype
        scale = alone.abs().max()
        assert (shared - alone).abs().max() <= 4 * torch.finfo(torch.bfloat16).eps * scale

    run_ranks(2, body)


def test_the_page_of_the_docs_runs() -> None:
    run_page("embedding-transformers.md")


@pytest.mark.slow
def test_the_page_of_encoder_decoders_runs() -> None:
    run_page("embedding-encoder-decoder.md")


# --- attention dropout -----------------------------------------------------------------------------------------------


def test_gpt2_that_drops_over_three_ranks() -> None:
    """A step in training mode is exact, and so is the next call in evaluation mode, which drops nothing."""
    batch, step = batches()["packed"], 2**64 - 1
    true = reference_values("gpt2", batch, step)
    with InDouble():
        calm = one_process(build("gpt2", "eager").eval(), batch)

    def body(ring: Ring) -> float:
        with InDouble():
            model = adapter.prepare(build("gpt2", "eager"))
            dropped = over_ranks(ring, model, batch, true, dropout_seed=step)
            return max(dropped, over_ranks(ring, model.eval(), batch, calm))

    assert max(run_ranks(3, body)) <= 1e-10


@pytest.mark.slow
def test_checkpointed_layers_that_drop_over_processes() -> None:
    """Logits, loss and every gradient are exact with reentrant and non-reentrant checkpoints over 2 and 4 ranks."""
    for errors in call_in_program("tests.adapters.dropout_ranks:compute_errors"):
        assert len(errors) == len(CASES) and max(errors) <= 1e-10


# --- attention of one process alone ----------------------------------------------------------------------------------


def test_prefill_goes_through_the_ring_and_decoding_is_refused() -> None:
    true = llama().eval()(input_ids=ROW).logits

    def body(ring: Ring) -> float:
        model, seq = llama().eval(), ring.sequence(TOKENS, layout="contiguous")
        out = forward(seq, model, use_cache=True)
        with pytest.raises(UnsupportedError, match=r"a cache that is sharded over ranks.*ring\.activate\(None\)"):
            forward(seq, model, input_ids=torch.tensor([[5]]), position_ids=torch.tensor([[TOKENS]]),
                    past_key_values=out.past_key_values, use_cache=True)  # fmt: skip
        static = transformers.StaticCache(config=model.config, max_cache_len=64)
        with pytest.raises(UnsupportedError, match="static cache"):
            forward(seq, model, past_key_values=static, use_cache=True)
        return (seq.gather(out.logits) - true).abs().max().item()

    assert max(run_ranks(2, body)) <= 1e-5  # the model rounds to float32 in some places
