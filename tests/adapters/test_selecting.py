"""Models whose layers select keys or blocks of keys over ranks: equal to one process, or refused.

Unlimited-OCR is here too: its mask selects the prompt and a window of the generated tokens.
"""

from __future__ import annotations

import copy
import dataclasses
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

pytest.importorskip("transformers.models.deepseek_v32", reason="transformers has no models that select keys")

import transformers

from ringattn import Ring, Sequence, UnsupportedError, masks
from ringattn.adapters import host_versions
from ringattn.adapters.transformers import host_masks, prepare, register, selecting, shard_batch
from ringattn.adapters.transformers.checks import refuse_layers
from ringattn.testing import run_ranks
from tests.adapters.models import COMPRESSING, REFERENCE, SELECTING, SELECTING_BLOCKS, tiny_model
from tests.adapters.processes import call_in_program, worst_error
from tests.adapters.ranks import (
    ROW,
    batches,
    far_off_sharded,
    forward,
    gradients,
    in_double,
    one_process,
    over_ranks,
    refused,
    summed_gradients,
)
from tests.covering import covering_cells

EXACT = 1e-9
BATCHES = batches()
BATCHES["padded after"] = {name: x[[1, 3]] for name, x in BATCHES["padded"].items()}
OF_DOCUMENTS = ("per_document", "documents")
OF_BLOCKS = (*SELECTING_BLOCKS, *COMPRESSING)
"""Models that count blocks of tokens from the start of a row, so that batches are plain or padded after the tokens."""
# Reentrant recomputation loses the gradients of latents that layers of Mistral Large 4 share, in one process too.
CELLS = covering_cells([cell for cell in product(
    (*SELECTING, *OF_BLOCKS, *REFERENCE), ("contiguous", "zigzag", "striped", *OF_DOCUMENTS), BATCHES,
    ("stored", "recomputed", "recomputed, reentrant"), (1, 2, 3, 4), ("at once", "in parts"),
) if (cell[2] == "packed" or cell[1] not in OF_DOCUMENTS)
  and (cell[2] in ("plain", "padded after") if cell[0] in OF_BLOCKS else cell[2] != "padded after")
  and (cell[0] != "mistral_large4" or "reentrant" not in cell[3])])  # fmt: skip
HEAVILY = "heavily_compressed_attention"
QUICK = ("deepseek_v32",)
NAMES = [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in SELECTING]


@pytest.mark.parametrize(
    ("name", "layout", "batch", "layers", "ranks", "queries"),
    [pytest.param(*cell, marks=() if cell[0] in QUICK else pytest.mark.slow) for cell in CELLS],
)
@in_double()
def test_selected_keys_over_ranks(
    name: str, layout: str, batch: str, layers: str, ranks: int, queries: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Logits, loss and all gradients equal those of eager attention in one process.

    Five keys are selected: fewer than a rank has, and more than the shortest document has. "in parts": three queries
    or fewer at a time.
    """
    if queries == "in parts":
        monkeypatch.setattr(selecting, "SCORE_BYTES", 3 * 4 * 8 * 27)
        monkeypatch.setattr(selecting, "ROW_BYTES", 1 << 12)

    def model() -> Any:
        eager = tiny_model(name, "eager")
        if layers != "stored":
            eager.gradient_checkpointing_enable({"use_reentrant": "reentrant" in layers})
        return eager

    true = one_process(tiny_model(name, "eager"), BATCHES[batch])
    errors = run_ranks(ranks, lambda ring: over_ranks(ring, prepare(model()), BATCHES[batch], true, layout))
    assert max(errors) <= EXACT


def choices(model: Any, inputs: dict[str, Any], keys: int) -> list[Tensor]:
    """Return what each indexer of the model chooses, as a table (batch, queries, keys)."""
    tables: list[Tensor] = []

    def keep(module: nn.Module, args: Any, indices: Tensor) -> None:
        table = torch.zeros(*indices.shape[:2], keys, dtype=torch.bool)
        tables.append(table.scatter_(-1, indices.long(), True))

    for module in model.modules():
        if type(module).__name__.endswith("Indexer"):
            module.register_forward_hook(keep)
    with torch.no_grad():
        model(**inputs)
    return tables


@pytest.mark.parametrize("name", NAMES)
@in_double()
def test_the_same_keys_are_selected(name: str) -> None:
    """Among the keys that a query may attend to, the indexers choose the same ones as in one process."""
    packed = BATCHES["packed"]
    keys = packed["input_ids"].shape[1]
    true = choices(tiny_model(name, "eager"), {key: packed[key] for key in ("input_ids", "position_ids")}, keys)
    document = (packed["position_ids"][0] == 0).cumsum(0)
    allowed = (document[:, None] == document).tril()

    def body(ring: Ring) -> list[Tensor]:
        seq, shards = shard_batch(ring, packed, layout="striped")
        with ring.activate(seq):
            tables = choices(prepare(tiny_model(name, "eager")), {**shards, "labels": None}, keys)
        return [seq.gather(table) for table in tables]

    for tables in run_ranks(3, body):
        assert len(tables) == len(true) > 0
        for table, expected in zip(tables, true, strict=True):
            assert torch.equal(table & allowed, expected & allowed)
            assert (table & allowed)[0].sum(-1).tolist() == allowed.sum(-1).clamp(max=5).tolist()


@pytest.mark.parametrize("name", ["deepseek_v32", *OF_BLOCKS, "unlimited_ocr"])
@in_double()
def test_local_calls_and_copies(name: str) -> None:
    """Without a ring, a prepared model and its copy give the results of eager attention, also while they generate."""
    eager, ours = tiny_model(name, "eager"), copy.deepcopy(prepare(tiny_model(name, "eager")))
    padded = BATCHES["padded after" if name in OF_BLOCKS else "padded"]
    real = padded["attention_mask"].bool()
    out, true = (model(**padded) for model in (ours, eager))
    torch.testing.assert_close(out.logits[real], true.logits[real], rtol=EXACT, atol=EXACT)
    actual, expected = gradients(ours, out.loss), gradients(eager, true.loss)
    for parameter, grad in expected.items():
        torch.testing.assert_close(actual[parameter], grad, rtol=EXACT, atol=EXACT)
    for cache in ("dynamic",) if name in COMPRESSING else ("dynamic", "static"):
        options = {"max_new_tokens": 4, "do_sample": False, "cache_implementation": cache, "use_cache": True}
        actual_ids, ids = (model.eval().generate(ROW[:, :9], **options) for model in (ours, eager))
        assert torch.equal(actual_ids, ids)

    def body(ring: Ring) -> Tensor:
        model = copy.deepcopy(ours)  # ranks are threads, which must not share a model
        with ring.activate(None), torch.no_grad():
            logits: Tensor = model(**padded).logits
        return logits

    for logits in run_ranks(2, body):
        torch.testing.assert_close(logits[real], true.logits.detach()[real], rtol=EXACT, atol=EXACT)


def test_latents_are_gathered_and_not_the_keys_of_all_heads(monkeypatch: pytest.MonkeyPatch) -> None:
    gathered, gather = [], Sequence.gather

    def counted(self: Sequence, x: Tensor, dim: int = 1) -> Tensor:
        gathered.append(tuple(x.shape[2:]))
        return gather(self, x, dim)

    monkeypatch.setattr(Sequence, "gather", counted)
    run_ranks(2, lambda ring: forward(ring.sequence(27), prepare(tiny_model("deepseek_v32", "eager"))))
    assert sorted(gathered) == [(8,)] * 4 + [(16 + 4,)] * 4  # two ranks, two layers


def test_autocast(monkeypatch: pytest.MonkeyPatch) -> None:
    """With all keys selected, bfloat16 over ranks is as near to one process as bfloat16 is in one process."""
    make = lambda: tiny_model("deepseek_v32", "eager", index_topk=64).float()  # noqa: E731
    true = gradients(model := make(), model(input_ids=ROW).logits.square().mean())

    def body(ring: Ring) -> dict[str, Tensor]:
        seq, model = ring.sequence(27, layout="zigzag"), prepare(make())
        with torch.autocast("cpu", torch.bfloat16):
            logits = forward(seq, model).logits
        grads = gradients(model, logits.float().square().sum() / (27 * 64))
        ring.all_reduce(list(grads.values()))
        return grads

    for grads in run_ranks(2, body):
        for name in true:
            if "self_attn" in name:
                assert (grads[name] - true[name]).norm() <= 0.1 * true[name].norm(), name


class Doubled(nn.Linear):
    """A projection that is not a plain linear layer."""

    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


def other_projection() -> Any:
    model = tiny_model("deepseek_v32", "eager")
    for layer in model.model.layers:
        layer.self_attn.kv_b_proj.__class__ = Doubled
    return model


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (other_projection, "kv_b_proj of DeepseekV32Attention is not a plain linear layer"),
        (lambda: tiny_model("deepseek_v32", "eager", attention_dropout=0.1), "attention dropout is 0.1"),
        (lambda: tiny_model("minimax_m3", "eager", attention_dropout=0.1), "attention dropout is 0.1"),
        (
            lambda: tiny_model("deepseek_v4", "eager", attention_dropout=0.1, layer_types=[HEAVILY] * 3),
            "attention dropout is 0.1",
        ),
    ],
    ids=["projection", "dropout", *OF_BLOCKS],
)
def test_what_is_refused(make: Any, match: str) -> None:
    refused(lambda seq: forward(seq, prepare(make())), match, UnsupportedError)


def test_other_masks_are_refused() -> None:
    def call(seq: Sequence) -> None:
        forward(seq.with_mask(masks.prefix(3)), prepare(tiny_model("deepseek_v32", "eager")))

    refused(call, "DeepseekV32Indexer selects keys, which over a ring is supported for causal", UnsupportedError)


@pytest.mark.parametrize("name", ["deepseek_v32", *OF_BLOCKS])
def test_models_that_were_not_prepared_are_refused(name: str) -> None:
    register()
    refused(lambda seq: forward(seq, tiny_model(name, "ringattn")), r"prepare\(model\) once")

    def alone(ring: Ring) -> None:
        with pytest.raises(UnsupportedError, match=r"keys: call .*prepare\(model\) once"):
            forward(ring.sequence(27), tiny_model(name, "ringattn"))

    run_ranks(1, alone)


@pytest.mark.parametrize("name", ["deepseek_v32", *OF_BLOCKS])
def test_other_code_of_a_model_is_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model(name, "eager")
    indexer = next(type(module) for module in model.modules() if type(module).__name__.endswith("Indexer"))
    monkeypatch.setattr(indexer, "forward", lambda self, *args, **kwargs: None)
    host_versions._require.cache_clear()
    with pytest.raises(UnsupportedError, match=r"keys of \w+ was tested .*Indexer.forward has changed"):
        prepare(model)
    host_versions._require.cache_clear()


@pytest.mark.parametrize(
    ("kind", "options"),
    [("inkling2_text", {}), ("glm5_next_text", {}), ("qwen4_exp_text", {})],
)
def test_other_models_that_select_keys_are_refused_by_name(kind: str, options: dict[str, Any]) -> None:
    config = transformers.AutoConfig.for_model(kind, **options)
    with pytest.raises(UnsupportedError, match=f"{type(config).__name__} has layers that .* choose tokens"):
        refuse_layers(config)


# --- blocks of keys ---------------------------------------------------------------------------------------------------


@in_double()
def test_more_heads_of_blocks_than_of_keys() -> None:
    make = lambda: tiny_model("minimax_m3", "eager", index_n_heads=4)  # noqa: E731
    true = one_process(make(), BATCHES["plain"])
    assert max(run_ranks(2, lambda ring: over_ranks(ring, prepare(make()), BATCHES["plain"], true))) <= EXACT


def test_blocks_of_other_models_are_refused_without_a_ring_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Such a model passes the selected blocks to attention, which must not attend to all keys."""
    monkeypatch.setattr(selecting, "SELECTING_BLOCKS", {})
    with pytest.raises(UnsupportedError, match=r"MiniMaxM3VLAttention selects keys \(block_indices\)"):
        prepare(tiny_model("minimax_m3", "eager"))(input_ids=ROW)


@in_double()
def test_a_model_that_is_recomputed_as_a_whole() -> None:
    make = lambda: tiny_model("minimax_m3", "eager")  # noqa: E731
    true = gradients(model := make(), model(input_ids=ROW).logits.square().sum())

    def body(ring: Ring) -> dict[str, Tensor]:
        seq, model = ring.sequence(27, layout="zigzag"), prepare(make())
        with ring.activate(seq):
            ids, positions = seq.shard(ROW), seq.positions()[None]
            logits = checkpoint(lambda: model(input_ids=ids, position_ids=positions).logits, use_reentrant=False)
        return summed_gradients(ring, model, logits.square().sum())

    for grads in run_ranks(2, body):
        assert worst_error(((grads[name], true[name]) for name in true), floor=1.0) <= EXACT


@pytest.mark.parametrize("name", OF_BLOCKS)
@pytest.mark.parametrize("batch", ["packed", "padded"])
@in_double()
def test_rows_whose_blocks_are_not_counted_like_positions_are_refused(name: str, batch: str) -> None:
    """Packed documents, and padding before the tokens. In one process, such a row gives other results than alone.

    With padding before the tokens, eager attention and SDPA of MiniMax M3 also differ in transformers.
    """
    start, stop = (4, 17) if batch == "packed" else (6, 27)
    row = {name: x[:1] for name, x in BATCHES[batch].items() if name != "labels"}
    model = tiny_model(name, "eager")
    with torch.no_grad():
        logits, alone = (model(**inputs).logits for inputs in (row, {"input_ids": row["input_ids"][:, start:stop]}))
    assert (logits[:, start:stop] - alone).abs().max() > 0.1

    def body(ring: Ring) -> None:
        seq, shards = shard_batch(ring, row)
        with ring.activate(seq), pytest.raises(UnsupportedError, match="give each document its own row, pad after"):
            prepare(tiny_model(name, "eager"))(**shards)
        ring.barrier()

    run_ranks(2, body, timeout_s=20.0)


def test_other_positions_are_refused() -> None:
    """Positions that count from the first real token, although no other token is before it on this rank."""

    def call(seq: Sequence) -> None:
        mask = torch.ones(1, 27, dtype=torch.int64)
        mask[:, -3:] = 0
        ids = seq.positions()[None] * seq.shard(mask)
        forward(seq, prepare(tiny_model("minimax_m3", "eager")), position_ids=ids, attention_mask=seq.shard(mask))

    refused(call, r"pass position_ids=seq.positions\(\)\[None\]")


def test_a_rank_with_one_token_is_refused() -> None:
    """For one query, the model does not compute which compressed keys it may attend to."""

    def body(ring: Ring) -> None:
        seq = ring.sequence(2, layout="contiguous")
        model, inputs = prepare(tiny_model("deepseek_v4", "eager")), {"input_ids": seq.shard(ROW[:, :2])}
        with ring.activate(seq), pytest.raises(UnsupportedError, match="needs two tokens or more on every rank"):
            model(**inputs, position_ids=seq.positions()[None])
        ring.barrier()

    run_ranks(2, body, timeout_s=20.0)


# --- a window of generated tokens -------------------------------------------------------------------------------------


def prefilled(seq: Sequence) -> None:
    """Call Unlimited-OCR with an empty cache, whose prompt ends after three tokens."""
    model = prepare(tiny_model("unlimited_ocr", "eager"))
    with seq.ring.activate(None), torch.no_grad():
        cache = model(input_ids=ROW[:, :1], use_cache=True).past_key_values
    for layer in cache.layers:
        layer.cumulative_length = layer.prefill_cumulative_length = 0
        layer.prefill_keys, layer.prefill_values = (x[..., :0, :] for x in (layer.prefill_keys, layer.prefill_values))
        layer.prefill_length = 3
    forward(seq, model, past_key_values=cache)


def test_a_prompt_that_ended_before_this_call_is_refused() -> None:
    refused(prefilled, "made with .*prefill_overlay")


def test_a_prompt_is_added_to_a_causal_mask_only() -> None:
    from transformers import masking_utils as host
    from transformers.models.unlimited_ocr import modeling_unlimited_ocr as file

    functions: list[Any] = []
    transformers.AttentionMaskInterface.register("kept", lambda mask_function, **_: functions.append(mask_function))
    config = tiny_model("unlimited_ocr", "eager").config.text_config
    config._attn_implementation = "kept"
    file.create_reference_sliding_window_causal_mask(config, torch.zeros(1, 4, 8), None, None)
    causal, prompt = host.causal_mask_function, host_masks._parts(functions[0])[1]
    assert host_masks.causal_without_reference(functions[0]) is causal
    others = ((host.sliding_window_overlay(5), prompt), (host.bidirectional_mask_function, prompt), (causal, causal))
    for parts in others:
        assert host_masks.causal_without_reference(host.or_masks(*parts)) is None


def test_other_code_of_a_mask_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    changed = {"transformers.masking_utils:or_masks": ("00000000",)}
    monkeypatch.setattr(host_masks, "REFERENCE", dataclasses.replace(host_masks.REFERENCE, sources=changed))
    model = tiny_model("unlimited_ocr", "eager")
    refused(lambda seq: forward(seq, prepare(model)), "mask of Unlimited-OCR was tested .*or_masks has changed")


# --- sharded weights --------------------------------------------------------------------------------------------------


def sharded_error() -> float:
    """Return the largest error of twenty steps with FSDP2 over two processes."""
    return far_off_sharded(lambda: tiny_model("deepseek_v32", "eager"), BATCHES["packed"], steps=20)


@pytest.mark.slow
def test_sharded_weights_learn_the_same() -> None:
    assert call_in_program("tests.adapters.test_selecting:sharded_error") <= EXACT
