"""`prepare(model, head_groups=...)`: loss, gradients and memory of models of transformers, and refusals by name."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("transformers", reason="transformers is not installed")

from ringattn import Ring
from ringattn.adapters import transformers as adapter
from ringattn.adapters.transformers import shard_batch
from ringattn.bench.storage_meter import StorageMeter
from ringattn.errors import InputError, UnsupportedError
from ringattn.testing import run_ranks
from tests.adapters.models import tiny_model
from tests.adapters.processes import call_in_program, worst_error
from tests.adapters.ranks import batches, far_off_sharded, gradients, labels_of, summed_gradients

EXACT = 1e-12
LOSS = 1e-6
"""transformers sums its loss in float32, and over a ring each rank sums a part."""
BATCHES = batches()
MODELS = ["llama", "qwen2", "qwen3", "mistral", "gemma2", "gemma3_text", "cohere2", "granite", "starcoder2", "smollm3",
          "glm", "mixtral", "qwen3_moe"]  # fmt: skip


def prepared(name: str, groups: int | None, checkpoints: bool = False, **options: Any) -> Any:
    """Return a model in float64 that attends in `groups` groups of heads and uses no cache."""
    model = adapter.prepare(tiny_model(name, "ringattn", **options), head_groups=groups).train()
    model.config.use_cache = False
    if checkpoints:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    return model


def called(model: Any) -> tuple[Tensor, dict[str, Tensor]]:
    """Call the model in one process. Return the loss and all gradients."""
    batch = BATCHES["plain"]
    loss = model(**batch, num_items_in_batch=labels_of(batch)).loss
    return loss, gradients(model, loss)


def worst(actual: dict[str, Tensor], true: dict[str, Tensor]) -> float:
    """Return the largest error, relative to the largest number of its tensor."""
    assert actual.keys() == true.keys()
    return worst_error(((actual[name], true[name]) for name in true), floor=1e-6)


def compare(name: str, world_size: int, checkpoints: bool, batch: dict[str, Any]) -> None:
    """Compare loss and gradients over a ring with those of all heads at once in one process."""
    count = labels_of(batch)
    model = prepared(name, None)
    loss = model(**batch, num_items_in_batch=count).loss
    true = gradients(model, loss)

    def of_rank(ring: Ring) -> tuple[float, float]:
        grouped = prepared(name, 2, checkpoints)
        seq, shards = shard_batch(ring, batch, layout="zigzag")
        with ring.activate(seq):
            part = grouped(**shards, num_items_in_batch=count).loss
        total = part.detach().clone()
        sums = summed_gradients(ring, grouped, part)
        ring.all_reduce([total])
        return worst(sums, true), abs(total.item() / loss.item() - 1)

    for error, loss_error in run_ranks(world_size, of_rank):
        assert error < EXACT and loss_error < LOSS


def test_groups_change_nothing_in_one_process() -> None:
    (loss, true), (grouped, actual) = called(prepared("qwen3", None)), called(prepared("qwen3", 2))
    assert torch.equal(loss, grouped) and worst(actual, true) < EXACT


@pytest.mark.slow
@pytest.mark.parametrize("checkpoints", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_groups_change_nothing(name: str, checkpoints: bool) -> None:
    (loss, true), (grouped, actual) = called(prepared(name, None)), called(prepared(name, 2, checkpoints))
    assert torch.equal(loss, grouped)
    if name == "gemma3_text":  # it multiplies by the weights of these norms in float32, so their gradients are rounded
        norms = {key for key in true if "q_norm" in key or "k_norm" in key}
        assert norms and worst(*({key: of[key] for key in norms} for of in (actual, true))) < 1e-6
        actual, true = ({key: grad for key, grad in of.items() if key not in norms} for of in (actual, true))
    assert worst(actual, true) < EXACT


@pytest.mark.slow
@pytest.mark.parametrize("checkpoints", [False, True])
@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("batch", list(BATCHES))
def test_groups_over_a_ring_change_nothing(batch: str, world_size: int, checkpoints: bool) -> None:
    for name in ("llama", "qwen3"):
        compare(name, world_size, checkpoints, BATCHES[batch])


def sharded_error() -> float:
    """Return the error under FSDP2 with two processes. Needs a process that has not started threads."""
    return far_off_sharded(lambda: prepared("llama", 2, checkpoints=True), BATCHES["plain"])


@pytest.mark.slow
def test_sharded_weights_learn_the_same() -> None:
    assert call_in_program("tests.adapters.test_transformers_head_groups:sharded_error") < EXACT


@pytest.mark.slow
def test_copies_of_a_model_attend_in_groups_too() -> None:
    model = prepared("llama", 2)
    copied = copy.deepcopy(model)
    with torch.no_grad():
        model.model.layers[0].self_attn.q_proj.weight.zero_()
    assert worst(called(copied)[1], called(prepared("llama", None))[1]) < EXACT


@pytest.mark.slow
def test_a_compiled_model_has_the_same_gradients() -> None:
    model, batch = prepared("llama", 2), BATCHES["plain"]
    compiled = torch.compile(model, backend="aot_eager")
    loss = compiled(**batch, num_items_in_batch=labels_of(batch)).loss
    assert worst(gradients(model, loss), called(prepared("llama", None))[1]) < EXACT


@pytest.mark.slow
def test_the_peak_of_memory_is_lower() -> None:
    tokens = torch.arange(512)[None] % 64
    sizes = {"max_position_embeddings": 512, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 32}

    def peak(groups: int | None) -> int:
        model = prepared("llama", groups, checkpoints=True, **sizes).float()
        with StorageMeter() as meter:
            model(input_ids=tokens, labels=tokens).loss.backward()
        return meter.peak_bytes

    # Without groups, at least q, k, v and their gradients of all heads exist at the largest moment.
    assert peak(None) - peak(4) > 2 * 512 * (8 + 2 * 4) * 32 * 4 * 3 / 4


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("deepseek_v3", "DeepseekV3Attention has no plain nn.Linear q_proj"),
        ("phi3", "Phi3Attention has no plain nn.Linear q_proj"),
        ("gpt_oss", "GptOssAttention has the parameter sinks"),
        ("olmo3", "Olmo3Attention has the parameter q_norm.weight"),
    ],
)
def test_models_that_heads_do_not_divide_are_refused(name: str, message: str) -> None:
    with pytest.raises(UnsupportedError, match=rf"^head_groups: {message}"):
        prepared(name, 2)


def test_dropout_of_the_output_is_refused_in_training() -> None:
    tokens = torch.arange(8)[None]
    model, plain = (prepared("starcoder2", groups, residual_dropout=0.1) for groups in (2, None))
    with pytest.raises(UnsupportedError, match=r"^head_groups: Starcoder2Attention has residual_dropout=0\.1, .* set"):
        model(input_ids=tokens)
    logits, true = (part.eval()(input_ids=tokens).logits for part in (model, plain))
    torch.testing.assert_close(logits, true, rtol=EXACT, atol=EXACT)
    module = prepared("llama", 2)
    attention = module.model.layers[1].self_attn
    attention.drop_log, attention.dropped, attention.drop = "a name", True, torch.nn.Dropout(0.0)
    assert module(input_ids=tokens).logits.requires_grad
    attention.drop.p = 0.2
    with pytest.raises(UnsupportedError, match=r"^head_groups: LlamaAttention has drop\.p=0\.2, "):
        module(input_ids=tokens)


def test_wrong_numbers_and_calls_are_refused() -> None:
    with pytest.raises(InputError, match=r"^head_groups=3: must divide the 2 K/V heads"):
        prepared("llama", 3)
    with pytest.raises(InputError, match=r"^head_groups must be a number of groups, at least 1, or None, got 0"):
        prepared("llama", 0)
    model = prepared("llama", 2)
    with pytest.raises(InputError, match=r"^head_groups=1: this model was prepared with head_groups=2"):
        adapter.prepare(model, head_groups=1)
    with pytest.raises(InputError, match=r"^head_groups: a cache keeps .* use_cache=False"):
        model(input_ids=torch.ones(1, 4, dtype=torch.int64), use_cache=True)
    with pytest.raises(UnsupportedError, match=r"^head_groups: attention dropout"):
        prepared("llama", 2, attention_dropout=0.1)(input_ids=torch.ones(1, 4, dtype=torch.int64))
    hooked = prepared("llama", 2)
    hooked.model.layers[1].self_attn.o_proj.register_forward_hook(lambda *_: None)
    with pytest.raises(UnsupportedError, match=r"^head_groups: a projection has hooks, a forward"):
        hooked(input_ids=torch.ones(1, 4, dtype=torch.int64))
    replaced = prepared("llama", 2)
    replaced.model.layers[1].self_attn.q_proj = torch.nn.Sequential(torch.nn.Linear(32, 32))
    with pytest.raises(UnsupportedError, match=r"^head_groups: a projection was replaced by a Sequential after"):
        replaced(input_ids=torch.ones(1, 4, dtype=torch.int64))
