"""Positions in models of transformers: RoPE chosen by the whole length, and positions that a model counts itself.

Each test expects the gradients of one process that counts its positions itself, or an error on every rank.
"""

from __future__ import annotations

from contextlib import nullcontext
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from tests.contract.mesh import on_mesh

pytest.importorskip("transformers", reason="transformers is not installed")

import transformers

from ringattn import InputError, Ring
from ringattn.adapters import transformers as adapter
from ringattn.adapters.transformers import shard_batch
from ringattn.adapters.transformers.positions import computes_positions
from ringattn.testing import run_ranks
from tests.adapters.models import ROTARY_TOKENS, filled, rotary, tiny_model
from tests.adapters.ranks import DOCUMENTS, InDouble, far_off, forward, refused, restarting


def ids(tokens: int, rows: int = 2) -> Tensor:
    return torch.randint(6, 64, (rows, tokens), generator=torch.Generator().manual_seed(1))


def padded(tokens: int = 27, pad: int = 1) -> dict[str, Tensor]:
    """Return a batch of three rows: padded on the left, on the right, and not padded."""
    mask = torch.ones(3, tokens, dtype=torch.int64)
    mask[0, :6], mask[1, -9:] = 0, 0
    return {"input_ids": torch.where(mask.bool(), ids(tokens, 3), pad), "attention_mask": mask}


# --- rotary embeddings that depend on the length --------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["longrope", "dynamic"])
@pytest.mark.parametrize("tokens", [ROTARY_TOKENS - 1, ROTARY_TOKENS, ROTARY_TOKENS + 1, 27])
def test_rotary_embeddings_are_chosen_by_the_whole_length(kind: str, tokens: int) -> None:
    for layout in ("contiguous", "zigzag"):
        assert far_off(lambda: rotary(kind), {"input_ids": ids(tokens)}, layout=layout) < 1e-9


@pytest.mark.parametrize("kind", ["longrope", "dynamic"])
@pytest.mark.parametrize("cuts", [[0, 4, 17, 27], [0, 18, 27], [0, 9, 27]])
def test_rotary_embeddings_of_packed_documents(kind: str, cuts: list[int]) -> None:
    """RoPE is chosen by the length of the longest document, whichever rank has the end of that document."""
    whole = {"input_ids": ids(27, 1), "position_ids": restarting(cuts)}
    for layout in ("contiguous", "zigzag"):
        assert far_off(lambda: rotary(kind), whole, layout=layout) < 1e-9


def test_rotary_embeddings_after_a_longer_text() -> None:
    """A second call with the same long text uses the frequencies that `dynamic` keeps."""

    def twice(model: Any, inputs: dict[str, Any]) -> Any:
        model(**inputs)
        return model(**inputs)

    assert far_off(lambda: rotary("dynamic"), {"input_ids": ids(40)}, call=twice) < 1e-9


def test_rotary_embeddings_with_checkpointed_layers() -> None:
    def make() -> Any:
        model = rotary("longrope")
        again = {"use_reentrant": False, "context_fn": lambda: (nullcontext(), InDouble())}
        model.gradient_checkpointing_enable(again)
        return model

    assert far_off(make, {"input_ids": ids(27)}, layout="contiguous") < 1e-9


@pytest.mark.parametrize("reentrant", [False, True])
def test_rotary_embeddings_of_a_checkpointed_model(reentrant: bool) -> None:
    """Recomputation of the whole model is refused: RoPE would be chosen by this rank's tokens."""

    def call(seq: Any) -> None:
        model, inputs = adapter.prepare(rotary("longrope")), {"position_ids": seq.positions()[None]}
        embeds = model.get_input_embeddings()(seq.shard(ids(27)))
        with seq.ring.activate(seq):
            out = checkpoint(lambda x: model(inputs_embeds=x, **inputs).logits, embeds, use_reentrant=reentrant)
            out.sum().backward()

    refused(call, r"recomputes Phi3RotaryEmbedding, .* checkpoint layers")


@pytest.mark.parametrize("kind", ["longrope", "dynamic"])
def test_rotary_embeddings_of_a_model_that_is_not_prepared(kind: str) -> None:
    def call(seq: Any) -> Any:
        model = rotary(kind)
        model.set_attn_implementation("ringattn")
        return forward(seq, model)

    refused(call, rf"rotary embeddings of type {kind}, .*prepare\(model\)")


# --- positions that a model counts by itself ------------------------------------------------------------------------

HEADS = {
    "vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 1, "intermediate_size": 48, "num_attention_heads": 4,
    "max_position_embeddings": 64, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "pad_token_id": 1,
}  # fmt: skip
ESM = {"token_dropout": False, "position_embedding_type": "absolute", "mask_token_id": 62}
COUNTING: dict[str, dict[str, Any]] = {
    "Roberta": {}, "XLMRoberta": {}, "Camembert": {}, "Data2VecText": {}, "RobertaPreLayerNorm": {},
    "XLMRobertaXL": {}, "Esm": ESM, "Xmod": {"languages": ["en"], "default_language": "en"},
}  # fmt: skip
"""Names of models that put their real tokens at pad + 1, pad + 2, ..."""


def counting(name: str, of: str = "Model", **options: Any) -> Any:
    config = getattr(transformers, f"{name}Config")(**{**HEADS, **COUNTING[name], **options})
    return filled(getattr(transformers, name + of)(config))


def opt() -> Any:
    config = transformers.OPTConfig(
        vocab_size=64, hidden_size=32, ffn_dim=48, num_hidden_layers=1, num_attention_heads=4, dropout=0.0,
        max_position_embeddings=64, word_embed_proj_dim=32, use_cache=False, pad_token_id=1,
    )  # fmt: skip
    return filled(transformers.OPTForCausalLM(config))


@pytest.mark.parametrize("name", COUNTING)
def test_places_that_a_model_counts_from_its_padding(name: str) -> None:
    assert far_off(lambda: counting(name), {"input_ids": ids(27)}) < 1e-9
    assert far_off(lambda: counting(name), padded()) < 1e-9
    unmasked = {"input_ids": padded()["input_ids"]}
    assert far_off(lambda: counting(name), unmasked, layout="contiguous") < 1e-9


def test_places_that_a_model_counts_from_its_mask() -> None:
    assert far_off(opt, {"input_ids": ids(27)}) < 1e-9
    for layout in ("zigzag", "contiguous"):
        assert far_off(opt, padded(), layout=layout) < 1e-9


def test_places_of_embeddings_and_of_documents() -> None:
    """Positions are exact for `inputs_embeds`, whose padding is unknown, and restart in each packed document."""
    embeds = torch.randn(2, 27, 32, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    assert far_off(lambda: counting("Roberta"), {"inputs_embeds": embeds}) < 1e-9

    def body(ring: Ring) -> None:
        model, arguments = adapter.prepare(counting("Roberta")), {"input_ids": ids(27, 1)}
        packed = {**arguments, "cu_seq_lens_q": torch.tensor(DOCUMENTS)}
        seq, shards = shard_batch(ring, packed, model=model)
        assert torch.equal(shards["position_ids"], seq.shard(restarting(DOCUMENTS)) + 2)
        again, same = shard_batch(ring, {**packed, "position_ids": restarting(DOCUMENTS) + 2}, model=model)
        assert again == seq and torch.equal(same["position_ids"], shards["position_ids"])
        evaluated = model.eval()
        with torch.no_grad():
            with ring.activate(seq):
                states = evaluated(input_ids=shards["input_ids"], position_ids=shards["position_ids"]).last_hidden_state
            with ring.activate(None):
                parts = [evaluated(arguments["input_ids"][:, a:b]).last_hidden_state for a, b in pairwise(DOCUMENTS)]
        torch.testing.assert_close(seq.gather(states), torch.cat(parts, 1), rtol=0, atol=1e-6)  # eager rounds

    run_ranks(2, body, timeout_s=10.0)


@pytest.mark.parametrize("kind", ["absolute", "rotary"])
def test_embeddings_that_hold_their_places_already(kind: str) -> None:
    """ESM looks up no position for `inputs_embeds`. Its rotary kind rotates queries and keys by positions 0, 1, ...."""

    def make() -> Any:
        return counting("Esm", position_embedding_type=kind)

    embeds = torch.randn(3, 27, 32, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    for batch in ({"inputs_embeds": embeds}, {"inputs_embeds": embeds, "attention_mask": padded()["attention_mask"]}):
        assert far_off(make, batch) < 1e-9
        assert far_off(make, batch, layout="contiguous", pass_model=False) < 1e-9

    def shifted(seq: Any) -> Any:
        with seq.ring.activate(seq):
            return adapter.prepare(make())(inputs_embeds=seq.shard(embeds), position_ids=seq.positions()[None] + 2)

    refused(shifted, "position_ids are")


@pytest.mark.parametrize("name", [*COUNTING, "OPT"])
@pytest.mark.parametrize("prepared", [True, False])
def test_places_from_0_where_the_model_counts_others(name: str, prepared: bool) -> None:
    make = opt if name == "OPT" else lambda: counting(name)

    def call(seq: Any) -> Any:
        model, batch = make(), padded()
        if prepared:
            adapter.prepare(model)
        else:
            model.set_attn_implementation("ringattn")
        places = (seq.positions() if name == "OPT" else seq.positions() + 3)[None].expand(3, -1)
        return forward(seq, model, **{k: seq.shard(x) for k, x in batch.items()}, position_ids=places)

    if prepared:
        refused(
            call, r"position_ids are .* for whole rows .* counts .* shard_batch\(ring, batch, model=model\)", InputError
        )
    else:
        refused(call, r"may count positions from padding or the mask, .*prepare\(model\)")


def test_places_on_one_rank() -> None:
    """On one rank, the batch and the call of several ranks are exact."""
    true = counting("Roberta")(**padded()).last_hidden_state
    with Ring() as ring:
        model = adapter.prepare(counting("Roberta"))
        seq, shards = shard_batch(ring, padded(), model=model)
        with ring.activate(seq):
            actual = model(**shards).last_hidden_state
            with pytest.raises(InputError, match=r"for whole rows .* counts .* model=model"):
                model(**{**shards, "position_ids": shards["position_ids"] + 1})
    real = padded()["attention_mask"].bool()
    torch.testing.assert_close(actual[real], true[real], rtol=0, atol=1e-6)  # eager rounds to float32


def test_a_model_that_cannot_be_asked_for_its_places() -> None:
    class Asking(transformers.RobertaModel):
        def forward(self, input_ids: Any = None, position_ids: Any = None, *, more: Any = None, **others: Any) -> Any:
            return super().forward(input_ids, position_ids=position_ids, token_type_ids=more[input_ids], **others)

    Asking.__module__ = transformers.RobertaModel.__module__

    def call(seq: Any) -> Any:
        model = adapter.prepare(filled(Asking(transformers.RobertaConfig(**HEADS))))
        return forward(seq, model, more=torch.zeros(64, dtype=torch.int64))

    refused(call, "Asking may count positions from padding or the mask, and cannot be probed")


@on_mesh
def test_a_model_of_sharded_embeddings_is_asked_without_their_hooks(mesh: DeviceMesh) -> None:
    """`computes_positions` calls embeddings without their hooks.

    Otherwise FSDP2 would take an embedding that is called first for the root module, and refuse the model's own call.
    """
    model = tiny_model("llama", "eager")
    expected = model(input_ids=ids(9)).logits
    fully_shard(model.model.embed_tokens, mesh=mesh)
    fully_shard(model, mesh=mesh)
    assert not computes_positions(model)
    assert torch.equal(model(input_ids=ids(9)).logits, expected)
    assert isinstance(model.model.embed_tokens.weight, DTensor)  # the hooks are installed again
