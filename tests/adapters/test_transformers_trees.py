"""Models of transformers on batches merged into a tree: equal to one process with the batch, or refused."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

pytest.importorskip("transformers", reason="transformers is not installed")

import torch
import transformers
from torch import Tensor

from ringattn import InputError, Ring, Sequence, UnsupportedError, masks
from ringattn.adapters.transformers import prepare, shard_batch
from ringattn.adapters.transformers.encoder_decoder import attend_with_bias
from ringattn.adapters.trees import Merged, TreeCollator, edge_log_probs
from ringattn.testing import run_ranks
from tests.adapters.models import bert_config, build_model, filled, tiny_model
from tests.adapters.processes import worst_error
from tests.adapters.ranks import InDouble, gradients, summed_gradients
from tests.adapters.test_transformers_images import batch as batch_of_images
from tests.adapters.test_transformers_images import model as model_with_images

TOLERANCE = 1e-9
Samples = list[dict[str, list[int]]]
Objective = Callable[[list[Tensor]], Tensor]


def rollouts(seed: int, answers: int = 5) -> Samples:
    """Return answers to a prompt of 9 tokens. Every second answer has its first three tokens from the one before."""
    draw = torch.Generator().manual_seed(seed)
    prompt, *samples = [torch.randint(3, 64, (n,), generator=draw).tolist() for n in (9, *range(4, 4 + answers))]
    for first, second in zip(samples[::2], samples[1::2], strict=False):
        second[:3] = first[:3]
    return [{"prompt_ids": prompt, "completion_ids": answer} for answer in samples]


def of_answers(samples: Samples, log_probs: list[Tensor]) -> list[Tensor]:
    """Return the log-probabilities of the answers, from those of all tokens except the first."""
    return [each[len(sample["prompt_ids"]) - 1 :] for sample, each in zip(samples, log_probs, strict=True)]


def clipped(log_probs: list[Tensor]) -> Tensor:
    """Return a loss that is not linear in log-probabilities: clipped ratios with one advantage per answer."""
    ratios = ((each - each.detach().roll(1)).exp() for each in log_probs)
    parts = [(ratio.clamp(0.3, 1.5) * (number - 1.7)).mean() for number, ratio in enumerate(ratios)]
    return -torch.stack(parts).mean()


def alone(model: Any, samples: Samples) -> list[Tensor]:
    """Return the log-probabilities of each sequence's tokens except the first, each from its own row."""
    log_probs = []
    for sample in samples:
        ids = torch.tensor(sample["prompt_ids"] + sample["completion_ids"])
        logits = model(input_ids=ids[None], use_cache=False).logits[0, :-1]
        log_probs.append(logits.log_softmax(-1).gather(1, ids[1:, None])[:, 0])
    return log_probs


def merged_log_probs(ring: Ring, model: Any, merged: Merged, layout: str = "auto") -> list[Tensor]:
    """Return the same as `alone`, from the tree of the samples over the ring."""
    seq = ring.sequence(len(merged.ids), layout=layout).with_mask(merged.mask)
    with ring.activate(seq):
        out = model(input_ids=seq.shard(merged.ids[None]), position_ids=seq.positions(per_document=True)[None])
    values = edge_log_probs(out.logits, merged.ids, seq)
    return [values[places[1:]] for places in merged.places]


def model_of(name: str) -> Any:
    """Return a tiny model. GPTBigCode does not pass its positions to attention."""
    if name != "gpt_bigcode":
        return tiny_model(name, "eager")
    sizes = {"vocab_size": 64, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}
    dropout = {"attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0}
    return build_model("GPTBigCodeForCausalLM", "GPTBigCodeConfig", **sizes, **dropout, bos_token_id=1, eos_token_id=2)


@pytest.mark.parametrize(
    ("name", "ranks", "layout"),
    [
        ("llama", 2, "zigzag"), ("gemma2", 1, "contiguous"), ("mistral", 3, "striped"),
        ("gpt_bigcode", 1, "contiguous"),
        pytest.param("deepseek_v3", 2, "contiguous", marks=pytest.mark.slow),
        pytest.param("gpt_oss", 2, "zigzag", marks=pytest.mark.slow),
    ],
)  # fmt: skip
def test_a_tree_equals_its_sequences(name: str, ranks: int, layout: str) -> None:
    """Plain causal layers, windows along the path, softcaps, sinks and latents, on merged answers."""
    samples = rollouts(1)
    merged, _ = TreeCollator()(samples)
    with InDouble():
        model = model_of(name)
        expected = alone(model, samples)
        loss = clipped(of_answers(samples, expected))
        true = {"loss": loss.detach(), **gradients(model, loss)}

    def body(ring: Ring) -> dict[str, Tensor]:
        with InDouble():
            model = prepare(model_of(name))
            log_probs = merged_log_probs(ring, model, merged, layout)
            loss = clipped(of_answers(samples, log_probs))
            sums = summed_gradients(ring, model, loss)
        assert worst_error([*zip(map(Tensor.detach, log_probs), expected, strict=True)]) <= TOLERANCE
        return {"loss": loss.detach(), **sums}

    for values in run_ranks(ranks, body, poison=True):
        assert worst_error(((values[key], true[key]) for key in true), floor=1.0) <= TOLERANCE


def trained(
    model: Any, step_loss: Callable[[Any, int], Tensor], sum_up: Callable[[list[Tensor]], None]
) -> list[Tensor]:
    """Train a model for 20 steps of AdamW. Return the loss of each step, and the weights afterwards.

    `step_loss`: returns the loss of a step. `sum_up`: sums the gradients over ranks in place.
    """
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for step in range(20):
        optimizer.zero_grad()
        loss = step_loss(model, step)
        loss.backward()
        sum_up([parameter.grad for parameter in model.parameters()])
        optimizer.step()
        losses.append(loss.detach())
    return [torch.stack(losses), *(parameter.detach() for parameter in model.parameters())]


@pytest.mark.slow
def test_training_on_merged_rollouts_equals_training_on_rows() -> None:
    """20 steps of AdamW, with other rollouts in each step: the losses and the final weights.

    The measured error is 3.4e-15 of the largest loss or of a parameter's largest weight.
    """
    batches = [rollouts(seed, answers=4 + seed % 3) for seed in range(20)]
    trees = [TreeCollator()(samples)[0] for samples in batches]
    assert all(len(tree.mask.lengths) > len(samples) + 1 for tree, samples in zip(trees, batches, strict=True))

    def loss_of_rows(model: Any, step: int) -> Tensor:
        return clipped(of_answers(batches[step], alone(model, batches[step])))

    with InDouble():
        first = tiny_model("llama", "eager")
        untrained = [parameter.detach().clone() for parameter in first.parameters()]
        expected = trained(first, loss_of_rows, lambda gradients: None)
    assert worst_error([*zip(untrained, expected[1:], strict=True)]) > 1e-2

    def body(ring: Ring) -> float:
        def loss_of_tree(model: Any, step: int) -> Tensor:
            return clipped(of_answers(batches[step], merged_log_probs(ring, model, trees[step])))

        with InDouble():
            values = trained(prepare(tiny_model("llama", "eager")), loss_of_tree, ring.all_reduce)
        return worst_error([*zip(values, expected, strict=True)])

    assert max(run_ranks(2, body)) <= TOLERANCE


# --- refusals --------------------------------------------------------------------------------------------------------

TREE = masks.tree([-1, 0, 0, -1], [9, 6, 8, 4])
TOKENS = TREE.tokens


def refused(
    match: str, make: Callable[[], Any] = lambda: tiny_model("llama", "eager"), *, seq_of: Any = None, ranks: int = 2,
    error: type[Exception] = InputError, ids_of: Callable[[Sequence], Tensor | None] | None = None, **inputs: Any,
) -> None:  # fmt: skip
    """Assert that a prepared model raises this error on all ranks.

    `seq_of`: makes the sequence from a ring; by default it has `TREE`. `ids_of`: makes the position_ids; by default
    they are those of the tree. `inputs`: other arguments; a function makes its argument from the sequence.
    """

    def body(ring: Ring) -> None:
        seq = ring.sequence(TOKENS, layout="contiguous").with_mask(TREE) if seq_of is None else seq_of(ring)
        ids = seq.positions(per_document=True)[None] if ids_of is None else ids_of(seq)
        others = {name: x(seq) if callable(x) else x for name, x in inputs.items()}
        with pytest.raises(error, match=match), ring.activate(seq):
            prepare(make())(input_ids=seq.shard(torch.full((1, TOKENS), 5)), position_ids=ids, **others)
        ring.barrier()

    run_ranks(ranks, body, timeout_s=20.0)


@pytest.mark.parametrize("ranks", [1, 2])
def test_positions_that_are_not_those_of_the_tree(ranks: int) -> None:
    by_depth = r"position_ids=seq\.positions\(per_document=True\)\[None\]"
    refused(rf"along the paths of its tree; pass {by_depth}", ranks=ranks, ids_of=lambda seq: seq.positions()[None])
    of_documents = torch.cat([torch.arange(n) for n in TREE.lengths])[None]
    refused("along the paths of its tree", ranks=ranks, ids_of=lambda seq: seq.shard(of_documents))
    refused(rf"pass {by_depth}", partial(model_of, "gpt_bigcode"), ranks=ranks, ids_of=lambda seq: None)


def test_positions_of_a_tree_without_the_tree() -> None:
    """They restart like those of packed documents, but not at 0."""
    depths = run_ranks(1, lambda ring: ring.sequence(TOKENS).with_mask(TREE).positions(per_document=True))[0][None]
    for cuts in (None, [0, 9, 15, 23, 27]):
        refused(r"position_ids are .*seq\.with_mask\(tree\)", ids_of=lambda seq: seq.shard(depths),
                seq_of=lambda ring, cuts=cuts: ring.sequence(cu_seqlens=cuts or [0, TOKENS]))  # fmt: skip

    def body(ring: Ring) -> None:
        with pytest.raises(InputError, match=r"merged into a tree.*with_mask\(tree\)"):
            shard_batch(ring, {"input_ids": torch.full((1, TOKENS), 5), "position_ids": depths})

    run_ranks(2, body)


def test_masks_that_a_tree_does_not_combine_with() -> None:
    padding = torch.ones(1, TOKENS, dtype=torch.int64)
    padding[:, :2] = 0
    refused(r"cut row 0 at \(0, 2, 27\)", attention_mask=lambda seq: seq.shard(padding))
    refused("documents cut row 0", seq_of=lambda ring: ring.sequence(cu_seqlens=[0, 23, TOKENS]).with_mask(TREE))
    refused("model without chunked", partial(tiny_model, "llama4_text", "eager", attn_temperature_tuning=False))
    refused("attends in both directions", lambda: filled(transformers.BertModel(bert_config())),
            error=UnsupportedError)  # fmt: skip
    refused("give the sequence one tree", error=UnsupportedError,
            seq_of=lambda ring: ring.sequence(TOKENS).with_mask(masks.by_head([(2, TREE), (2, None)])))  # fmt: skip

    def body(ring: Ring) -> None:
        seq = ring.sequence(TOKENS).with_mask(TREE)
        q, k, v = torch.zeros(3, 1, seq.counts[ring.rank], 2, 8)
        bias = torch.zeros(1, 2, seq.counts[ring.rank], TOKENS)
        with pytest.raises(UnsupportedError, match=r"seq carries mask=tree:.* adds a position bias"):
            attend_with_bias(seq, q, k, v, bias=bias, causal=True, scale=None, dropout_p=0.0, dropout_seed=None)

    run_ranks(2, body)


@pytest.mark.parametrize("ranks", [1, 2])
def test_losses_that_a_model_would_compute(ranks: int) -> None:
    labels = torch.full((1, TOKENS), 5)
    refused(r"labels in a tree: .*edge_log_probs", ranks=ranks, labels=lambda seq: seq.shard(labels))
    refused("output_router_logits in a tree", partial(tiny_model, "mixtral", "eager"), ranks=ranks,
            error=UnsupportedError)  # fmt: skip


def test_models_that_compute_positions_in_packed_order() -> None:
    config = transformers.RobertaConfig(**bert_config().to_dict() | {"is_decoder": True, "use_cache": False})
    packed = torch.arange(2, TOKENS + 2)[None]
    refused("RobertaForCausalLM computes its positions itself", error=UnsupportedError,
            make=lambda: filled(transformers.RobertaForCausalLM(config)),
            ids_of=lambda seq: seq.shard(packed))  # fmt: skip
    whole = {name: x[:1] for name, x in batch_of_images("qwen2_vl", videos=False).items()}
    images = {"pixel_values": whole["pixel_values"], "image_grid_thw": whole["image_grid_thw"]}
    refused("positions of images in packed order", partial(model_with_images, "qwen2_vl"), error=UnsupportedError,
            ids_of=lambda seq: seq.positions(per_document=True).expand(3, 1, -1), **images)  # fmt: skip
    # A text without images has three rows of equal positions, which also count along the path.
    refused("not those of this rank's tokens of a text", partial(model_with_images, "qwen2_vl"),
            ids_of=lambda seq: seq.positions().expand(3, 1, -1))  # fmt: skip
    refused("along the paths of its tree", partial(model_with_images, "qwen2_vl"), ranks=1,
            ids_of=lambda seq: seq.positions().expand(3, 1, -1))  # fmt: skip
