"""`substitute_hf_flash_attn` of ring-flash-attention: models with flash_attention_2 over a ring and on one process."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("transformers", reason="transformers is not installed")

from transformers import AttentionInterface, AttentionMaskInterface

from ringattn import InputError, Ring
from ringattn.adapters import flash_attn
from ringattn.adapters import transformers as adapter
from ringattn.adapters.flash_attn import substitute_hf_flash_attn, update_ring_flash_attn_params, use_ring_attn
from ringattn.testing import run_ranks
from tests.adapters.models import tiny_model
from tests.adapters.ranks import InDouble, gradients, restarting
from tests.doc_code import DOCS

NAME = "flash_attention_2"
CUTS = [0, 5, 17, 28]
TOKENS = torch.randint(3, 64, (1, 28), generator=torch.Generator().manual_seed(1))


@pytest.fixture(autouse=True)
def _registries() -> Iterator[None]:
    """Restore the registries of transformers after each test, because they belong to the process."""
    kept = [(interface, interface._global_mapping[NAME]) for interface in (AttentionInterface, AttentionMaskInterface)]
    yield
    for interface, function in kept:
        interface.register(NAME, function)


def flash_model(name: str, **options: Any) -> Any:
    """Return a model as `from_pretrained(attn_implementation="flash_attention_2")` does if flash-attn is installed."""
    model = tiny_model(name, "eager", **options)
    model.config._attn_implementation = NAME
    return model


def part(x: Tensor, ring: Ring, dim: int = 1) -> Tensor:
    """Return this rank's part of a packed row, cut as users of ring-flash-attention cut it."""
    return x.chunk(ring.world_size, dim)[ring.rank]


def set_documents(ring: Ring, cuts: list[int] | None = None) -> None:
    update_ring_flash_attn_params(torch.tensor(cuts or CUTS, dtype=torch.int32), ring)


@pytest.mark.parametrize(("name", "again"), [("llama", True), ("mistral", False), ("gpt_oss", False)])
def test_packed_documents(name: str, again: bool) -> None:
    """Every gradient is exact, also with windows and sinks, which ring-flash-attention does not support.

    Checkpointed layers recompute over the documents of their batch, although those of the next batch are already set.
    """
    # `InDouble` is not active in backward, so recomputed layers round norms and rotary positions to float32.
    mode, bound = (nullcontext, 1e-5) if again else (InDouble, 1e-9)
    weights = torch.randn(1, 28, 64, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    with mode():
        model = tiny_model(name, "eager")
        spans = [slice(a, b) for a, b in pairwise(CUTS)]
        logits = torch.cat([model(input_ids=TOKENS[:, span]).logits for span in spans], 1)
        true = gradients(model, (logits * weights).sum())

    def body(ring: Ring) -> dict[str, Tensor]:
        with mode():
            substitute_hf_flash_attn(ring, heads_k_stride=1)
            ours = flash_model(name)
            if again:
                ours.gradient_checkpointing_enable({"use_reentrant": False})
            set_documents(ring)
            out = ours(input_ids=part(TOKENS, ring), position_ids=part(restarting(CUTS), ring)).logits
            set_documents(ring, [0, 28])
            grads = gradients(ours, (out * part(weights, ring)).sum())
        ring.all_reduce(list(grads.values()))
        return grads

    floor = 1e-3 * max(grad.abs().max().item() for grad in true.values())
    for grads in run_ranks(2, body, timeout_s=20.0):
        for key, grad in grads.items():
            assert (grad - true[key]).abs().max() <= bound * max(true[key].abs().max().item(), floor), key


def refused(call: Callable[[Ring, Any], Any], match: str, kind: type[Exception] = InputError) -> None:
    def body(ring: Ring) -> None:
        substitute_hf_flash_attn(ring, 1)
        set_documents(ring)
        with pytest.raises(kind, match=match):
            call(ring, flash_model("llama"))
        ring.barrier()

    run_ranks(2, body, timeout_s=20.0)


def run(ring: Ring, model: Any, **inputs: Any) -> Any:
    arguments = {"input_ids": part(TOKENS, ring), "position_ids": part(restarting(CUTS), ring), **inputs}
    return model(**arguments)


def test_positions_that_are_not_those_of_the_part() -> None:
    """Calls without position_ids are refused: the model would count from 0 on every rank.

    ring-flash-attention does not notice this.
    """
    refused(
        lambda ring, model: model(input_ids=part(TOKENS, ring)), "rank 1: position_ids are 0, 1, 2, .*seq.positions"
    )


def test_padding_with_holes_and_dropout() -> None:
    mask = torch.ones(1, 28, dtype=torch.int64)
    mask[0, 3:6] = 0
    refused(lambda ring, model: run(ring, model, attention_mask=part(mask, ring)), "attention_mask of row 0 has holes")

    def dropping(ring: Ring, _: Any) -> Any:
        return run(ring, flash_model("llama", attention_dropout=0.1))

    refused(dropping, r"attention dropout is 0\.1, .*update_ring_flash_attn_params take it too")
    refused(
        lambda ring, _: update_ring_flash_attn_params(torch.tensor(CUTS), ring, dropout_seed=-1), "dropout_seed must"
    )


def test_dropout_is_that_of_the_same_seed_elsewhere() -> None:
    """The model drops the weights that a prepared model drops. Two batches with one seed drop different weights."""

    def body(ring: Ring) -> list[Tensor]:
        substitute_hf_flash_attn(ring, 1)
        model, actual = flash_model("llama", attention_dropout=0.4), []
        for _ in range(2):
            update_ring_flash_attn_params(torch.tensor(CUTS, dtype=torch.int32), ring, dropout_seed=6)
            actual.append(run(ring, model).logits)
        set_documents(ring)
        with pytest.raises(InputError, match="no dropout_seed"):
            run(ring, model)
        return actual

    def prepared(ring: Ring) -> list[Tensor]:
        model = adapter.prepare(tiny_model("llama", "eager", attention_dropout=0.4))
        with ring.activate(ring.sequence(cu_seqlens=CUTS, layout="contiguous"), dropout_seed=6):
            return [run(ring, model).logits for _ in range(2)]

    for actual, expected in zip(run_ranks(2, body), run_ranks(2, prepared), strict=True):
        assert not torch.equal(*actual)
        for x, y in zip(actual, expected, strict=True):
            assert torch.equal(x, y)


def test_calls_out_of_order() -> None:
    def body(ring: Ring) -> None:
        with pytest.raises(InputError, match="not the process_group of substitute_hf_flash_attn"):
            set_documents(ring)
        for stride in (0, True, "2"):
            with pytest.raises(InputError, match="heads_k_stride must be a number of heads"):
                substitute_hf_flash_attn(ring, stride)  # type: ignore[arg-type]
        substitute_hf_flash_attn(ring, 1)
        model = flash_model("llama")
        with pytest.raises(InputError, match="the documents of the batch are not set: call update_ring"):
            run(ring, model)
        with pytest.raises(InputError, match="27 tokens do not divide by 2 ranks"):
            set_documents(ring, [0, 27])
        use_ring_attn(False)
        whole = model(input_ids=TOKENS).logits
        use_ring_attn(True)
        torch.testing.assert_close(whole, tiny_model("llama", "eager")(input_ids=TOKENS).logits, rtol=1e-5, atol=1e-5)
        set_documents(ring)
        assert run(ring, model).logits.shape == (1, 14, 64)

    run_ranks(2, body, timeout_s=20.0)


def test_the_page() -> None:
    """The code block of docs/embedding-flash-attn.md runs, given the names that it expects. Its logits are exact."""
    page = (DOCS / "embedding-flash-attn.md").read_text(encoding="utf-8")
    block = page.partition("```python hf\n")[2].partition("```")[0]

    def body(ring: Ring) -> Tensor:
        batch = {"cu_seqlens": torch.tensor(CUTS), "input_ids": TOKENS, "position_ids": restarting(CUTS)}
        names: dict[str, Any] = {"process_group": ring, "loader": [batch], "ranks": 2, "rank": ring.rank}
        names["model"] = flash_model("llama")
        exec(block, names)
        logits: Tensor = names["logits"]
        return logits

    logits = torch.cat(run_ranks(2, body, timeout_s=20.0), 1)
    true = tiny_model("llama", "eager")(input_ids=TOKENS[:, :5]).logits
    torch.testing.assert_close(logits[:, :5], true, rtol=1e-5, atol=1e-5)


def test_the_names_of_that_package() -> None:
    """The adapter has every function that ring_flash_attn exports, except helpers of its benchmarks."""
    families = ["ring_flash_attn", "ring_flash_attn_varlen", "zigzag_ring_flash_attn", "zigzag_ring_flash_attn_varlen",
                "stripe_flash_attn", "llama3_flash_attn_varlen"]  # fmt: skip
    names = [f"{family}{form}_func" for family in families for form in ("", "_kvpacked", "_qkvpacked")]
    names += ["llama3_flash_attn_prepare_cu_seqlens", "substitute_hf_flash_attn", "update_ring_flash_attn_params"]
    assert all(callable(getattr(flash_attn, name)) for name in names)
