"""Models of transformers with an attention_mask of four dimensions: equal to one process, or refused by name."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

pytest.importorskip("transformers", reason="transformers is not installed")

import torch
import transformers
from torch import Tensor

from ringattn import DisagreementError, InputError, Ring, Sequence, UnsupportedError, masks
from ringattn.adapters import tables
from ringattn.adapters.context import recompute_context
from ringattn.adapters.transformers import prepare, shard_batch
from ringattn.adapters.transformers import table_masks as adapter
from ringattn.testing import run_ranks
from tests.adapters.models import bert_config, filled, tiny_model
from tests.adapters.ranks import TOKENS, batches, forward, gradient_error, in_double, llama
from tests.adapters.ranks import refused as refused_by_all
from tests.adapters.test_transformers_images import batch as batch_of_images
from tests.adapters.test_transformers_images import model as with_images
from tests.oracle import allowed_mask

TREE = masks.tree([-1, 0, 0, -1], [9, 6, 8, 4])
SINKS = masks.slices(
    [(0, 25), (2, 8), (8, 25), (25, 27)], [(0, 2), (2, 8), (3, 25), (25, 27)],
    ["causal_from_start", "causal", "bi_causal", "full"],
)  # fmt: skip
"""Two sink tokens and a window of six tokens, and at the end a block that attends in both directions."""
CAUSAL = masks.slices(
    [(0, 27), (2, 8), (8, 27)], [(0, 2), (2, 8), (3, 27)], ["causal_from_start", "causal", "bi_causal"]
)
"""The same sinks and window, without a key after its query."""
EMPTY = masks.slices([(3, 27)], [(3, 27)], "causal")
"""The first three tokens are padding: they attend to nothing."""
IDS = batches()["plain"]["input_ids"]


def table(*each: masks.AttentionMask) -> Tensor:
    """Return the mask of each row as a table, (rows, 1, tokens, tokens)."""
    return torch.stack([allowed_mask(TOKENS, TOKENS, mask=mask) for mask in each])[:, None]


def depths() -> Tensor:
    """Return the positions along the paths of `TREE`, (tokens,)."""
    return table(TREE)[0, 0].sum(-1) - 1


def inputs(*each: masks.AttentionMask) -> tuple[Tensor, Tensor]:
    """Return a table of two rows, and positions: those of a tree, of real tokens, or of all tokens.

    One mask is one for both rows.
    """
    plain = torch.arange(TOKENS)
    positions = {TREE: depths(), EMPTY: (plain - 3).clamp(min=0)}
    return table(*each), torch.stack([positions.get(mask, plain) for mask in each * (3 - len(each))])


def score(logits: Tensor, real: Tensor, seq: Sequence | None = None) -> Tensor:
    """Return the sum of the logits of real tokens, each with a random weight that is the same in every layout."""
    weights = torch.randn(2, TOKENS, logits.shape[-1], generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    weights = weights * real[:, 0].any(-1)[..., None]
    return (logits * (weights if seq is None else seq.shard(weights))).sum()


def error_of(
    make: Callable[[str], Any], each: tuple[masks.AttentionMask, ...], ranks: int, layout: str, cuts: Any = None,
    carried: bool = False,
) -> float:  # fmt: skip
    """Return the largest error of a gradient against one process with eager attention and the same table.

    `carried`: over the ring, the sequence carries the mask, and the call has no table.
    """
    pairs, positions = inputs(*each)

    def alone(model: Any) -> Tensor:
        added = torch.zeros(pairs.shape, dtype=torch.float64).masked_fill(~pairs, torch.finfo(torch.float64).min)
        return score(model(input_ids=IDS, position_ids=positions, attention_mask=added).logits, pairs)

    def over_ring(ring: Ring, model: Any) -> Tensor:
        seq = ring.sequence(TOKENS if cuts is None else None, cu_seqlens=cuts, layout=layout)
        prepare(model)
        if carried:
            seq = seq.with_mask(each[0])
        with ring.activate(seq):
            out = model(
                input_ids=seq.shard(IDS), position_ids=seq.shard(positions), attention_mask=None if carried else pairs
            )
        return score(out.logits, pairs, seq)

    return gradient_error(partial(make, "eager"), alone, over_ring, ranks)


@pytest.mark.parametrize(
    ("name", "each", "ranks", "layout"),
    [
        ("llama", (TREE, SINKS), 2, "zigzag"),
        ("mistral", (SINKS,), 3, "contiguous"),  # the window of its configuration does not apply, as in one process
        ("gemma2", (TREE, EMPTY), 1, "contiguous"),
        pytest.param("gpt_oss", (TREE, EMPTY), 2, "striped", marks=pytest.mark.slow),
        pytest.param("deepseek_v3", (EMPTY, TREE), 2, "zigzag", marks=pytest.mark.slow),
    ],
)
def test_a_table_equals_one_process(
    name: str, each: tuple[masks.AttentionMask, ...], ranks: int, layout: str
) -> None:  # fmt: skip
    assert error_of(lambda attention: tiny_model(name, attention), each, ranks, layout) <= 1e-9


def test_causal_slices_of_the_sequence_replace_the_mask_of_a_causal_model() -> None:
    assert error_of(lambda attention: tiny_model("llama", attention), (CAUSAL,), 2, "zigzag", carried=True) <= 1e-9


def test_documents_that_the_table_separates() -> None:
    """The sequence may have documents that the table does not connect."""
    documents = masks.slices([(0, 10), (10, 27)], [(0, 10), (10, 27)], "causal")
    assert error_of(lambda attention: tiny_model("llama", attention), (documents,), 2, "zigzag", [0, 10, 27]) <= 1e-9


@pytest.mark.parametrize("reentrant", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_checkpointed_layers_get_the_table_again(reentrant: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers are recomputed after the call of the model. The table is lowered once in each process."""
    lowered = Counter[int]()

    def counted(table: Tensor) -> masks.Slices:
        lowered[int(table.sum())] += 1
        return tables.slices_of(table)

    monkeypatch.setattr(adapter, "slices_of", counted)
    adapter._slices.clear()

    def make(attention: str) -> Any:
        model = tiny_model("llama", attention)
        options: dict[str, Any] = {"use_reentrant": reentrant}
        if not reentrant:
            options["context_fn"] = recompute_context
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=options)
        model.enable_input_require_grads()
        return model

    with in_double():
        assert error_of(make, (TREE, SINKS), 2, "zigzag") <= 1e-9
    # The ranks are threads, and both may lower a table at the same time.
    assert len(lowered) == 2 and max(lowered.values()) <= 2


def test_a_model_that_is_not_prepared() -> None:
    pairs, positions = inputs(SINKS, TREE)
    expected = tiny_model("llama", "sdpa")(input_ids=IDS, position_ids=positions, attention_mask=pairs).logits

    def body(ring: Ring) -> Tensor:
        seq, model = ring.sequence(TOKENS), llama()
        with ring.activate(seq):
            out = model(input_ids=seq.shard(IDS), position_ids=seq.shard(positions), attention_mask=pairs).logits
        return seq.gather(out.detach())

    for logits in run_ranks(2, body):
        torch.testing.assert_close(logits, expected.detach(), rtol=1e-5, atol=1e-5)  # norms round to float32


# --- refusals --------------------------------------------------------------------------------------------------------


def refused(
    match: str, mask: Any, model: Callable[[], Any] = llama, error: type[Exception] = UnsupportedError,
    seq_of: Callable[[Sequence], Sequence] = lambda seq: seq, **others: Any,
) -> None:  # fmt: skip
    """Assert that a prepared model refuses a call with one row on all ranks. A function makes its argument."""

    def call(seq: Sequence) -> None:
        made = {name: x(seq) if callable(x) else x for name, x in {"attention_mask": mask, **others}.items()}
        forward(seq_of(seq), prepare(model()), **made)

    refused_by_all(call, match, error)


def test_tables_that_are_not_of_the_whole_sequence() -> None:
    one = table(SINKS)
    refused(r"has torch.float64 of shape \(1, 1, 27, 27\)", one.double())
    refused(r"torch.bool of shape \(1, 4, 27, 27\)", one.expand(1, 4, -1, -1))
    refused(r"torch.bool of shape \(3, 1, 27, 27\)", one.expand(3, -1, -1, -1))
    refused(r"torch.bool of shape \(1, 1, 1[34], 27\)", lambda seq: seq.shard(one, 2))
    refused("different calls", lambda seq: table(SINKS, TREE)[seq.ring.rank, None], error=DisagreementError)

    def body(ring: Ring) -> None:
        with pytest.raises(InputError, match=r"pass it whole to the model, model\(\*\*shards, attention_mask="):
            shard_batch(ring, {"input_ids": IDS, "attention_mask": one})

    run_ranks(2, body)


def test_slices_of_the_sequence_that_a_causal_model_refuses() -> None:
    def call(seq: Sequence, mask: masks.AttentionMask, name: str) -> None:
        forward(seq.with_mask(mask), prepare(tiny_model(name, "eager")))

    later = r"query 25 attends to the later key 26, .*; pass the pairs as an attention_mask of four dimensions to"
    refused_by_all(lambda seq: call(seq, SINKS, "llama"), later, InputError)
    refused_by_all(lambda seq: call(seq, CAUSAL, "mistral"), "masks.slices .* leave the window out", InputError)


def test_tables_that_do_not_combine(monkeypatch: pytest.MonkeyPatch) -> None:
    refused(r"seq carries mask=tree:.*give only one", table(SINKS), seq_of=lambda seq: seq.with_mask(TREE),
            position_ids=lambda seq: seq.with_mask(TREE).positions(per_document=True)[None])  # fmt: skip
    refused("row 0 connects documents", table(SINKS), error=InputError,
            seq_of=lambda seq: seq.with_documents([0, 9, TOKENS]))  # fmt: skip
    wrong = r"position_ids are .* or, by attention_mask, "
    refused(wrong, table(TREE), error=InputError, position_ids=lambda seq: seq.shard(depths().roll(1)[None]))
    refused("output_router_logits counts the tokens", table(SINKS), partial(tiny_model, "mixtral", "eager"))
    refused("selects or compresses keys", table(SINKS), partial(tiny_model, "deepseek_v32", "eager"))
    roberta = transformers.RobertaConfig(**bert_config().to_dict() | {"is_decoder": True, "use_cache": False})
    refused("RobertaForCausalLM computes its positions itself, also from attention_mask", table(SINKS),
            lambda: filled(transformers.RobertaForCausalLM(roberta)))  # fmt: skip
    whole = {name: x[:1] for name, x in batch_of_images("qwen2_vl", videos=False).items()}
    images = {name: whole[name] for name in ("pixel_values", "image_grid_thw")}
    refused("images only with an attention_mask of two dimensions", table(SINKS), partial(with_images, "qwen2_vl"),
            position_ids=lambda seq: seq.positions().expand(3, 1, -1), **images)  # fmt: skip
    labels = torch.full((1, TOKENS), 5)
    refused("labels at tokens that attend to no key", table(EMPTY), error=InputError, num_items_in_batch=9,
            labels=lambda seq: seq.shard(labels), shift_labels=lambda seq: seq.shard(labels))  # fmt: skip
    adapter._slices.clear()
    monkeypatch.setattr(tables, "MOST_SLICES", 2)
    refused("attention_mask of row 0: the mask needs more than 2 slices", table(SINKS))
