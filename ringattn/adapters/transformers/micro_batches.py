"""The micro-batches of a Trainer's batch: its samples, packed over all ranks under a limit of tokens per rank.

The samples are the rows of a padded batch, or the documents of a packed row. `Ring.batch` says which of them pass
through the model together.

Guarantees: each token and each label of the batch is in one micro-batch, without padding. So a loss that is a sum over
labels, divided by their number in the whole step, and its gradients are those of the batch.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ringattn.adapters.hosts import check_alike
from ringattn.adapters.transformers.batches import check_shapes, documents_of, refuse_first_labels
from ringattn.batch import MicroBatch, token_pairs
from ringattn.errors import InputError
from ringattn.planner.cluster import Cluster
from ringattn.ring import Ring

PACKED = ("input_ids", "labels", "token_type_ids")
"""Inputs with one entry per token that micro-batches have too."""
DESCRIPTIONS = (
    "attention_mask", "position_ids", "seq_idx", "cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k",
)  # fmt: skip
"""Inputs that describe the samples of a batch. Micro-batches have `position_ids` and `seq_idx` of their samples."""
WITHOUT_ATTENTION = 2.0**40
"""The time of a token in pairs for a model without attention: samples are then divided by their tokens."""


class Span(NamedTuple):
    """The tokens `start` .. `stop` - 1 of a row: one sample."""

    row: int
    start: int
    stop: int


def micro_batches(
    ring: Ring, batch: Mapping[str, Any], max_tokens_per_rank: int, pairs_of_token: float
) -> list[dict[str, Tensor]]:
    """Return whole micro-batches, the same on every rank, as packed rows. A collective call, on the host.

    `batch`: the inputs of a causal language model, rows padded on the right or one packed row. Raises `InputError` for
    other inputs and for a sample that exceeds the limit, and `DisagreementError` if the batches of the ranks differ.
    """
    check_alike(ring, batch, "every rank of a ring must read the same examples")
    divided, spans = divide(ring, batch, max_tokens_per_rank, pairs_of_token)
    return [packed(batch, [spans[sample] for sample in micro.samples]) for micro in divided]


def divide(
    ring: Ring, batch: Mapping[str, Any], max_tokens_per_rank: int, pairs_of_token: float
) -> tuple[tuple[MicroBatch, ...], list[Span]]:
    """Return the micro-batches of a batch, and its samples. Local. Raises `InputError` as `micro_batches`."""
    unknown = {name for name in batch if batch[name] is not None} - {*PACKED, *DESCRIPTIONS}
    if unknown or "input_ids" not in batch:
        raise InputError(
            f"max_tokens_per_rank divides batches of {', '.join((*PACKED, *DESCRIPTIONS))}, got "
            f"{', '.join(sorted(batch))}; remove other inputs, or train without max_tokens_per_rank"
        )
    spans = samples_of(batch)
    lengths = [span.stop - span.start for span in spans]
    return ring.batch(lengths, max_tokens_per_rank=max_tokens_per_rank, token_pairs=pairs_of_token), spans


def samples_of(batch: Mapping[str, Any]) -> list[Span]:
    """Return the samples of a batch. Raises `InputError` if a label or the padding is not that of whole samples."""
    tokens: Tensor = batch["input_ids"]
    check_shapes(batch, tokens)
    mask, labels = batch.get("attention_mask"), batch.get("labels")
    real = torch.ones_like(tokens, dtype=torch.bool) if mask is None else mask != 0
    cuts = documents_of(batch)
    lengths = real.sum(1)
    columns = torch.arange(tokens.shape[1], device=tokens.device)
    if not torch.equal(real, columns < lengths[:, None]) or (cuts is not None and not real.all()):
        raise InputError(
            "max_tokens_per_rank needs rows that are padded on the right, or one packed row without padding: set "
            'padding_side="right" in the tokenizer, or use DataCollatorWithFlattening of transformers'
        )
    if labels is not None and (labels[~real] != -100).any():
        raise InputError("the padding of a row has labels; set them to -100")
    if cuts is not None:
        if labels is not None:
            refuse_first_labels(labels, tuple(cuts))
        return [Span(0, start, stop) for start, stop in pairwise(cuts)]
    return [Span(row, 0, length) for row, length in enumerate(lengths.tolist()) if length]


def packed(batch: Mapping[str, Any], spans: list[Span]) -> dict[str, Tensor]:
    """Return one row with these samples, (1, tokens), and their positions and documents."""
    inputs = {
        name: torch.cat([batch[name][row, start:stop] for row, start, stop in spans])[None]
        for name in PACKED
        if batch.get(name) is not None
    }
    device = batch["input_ids"].device
    lengths = torch.tensor([span.stop - span.start for span in spans], device=device)
    starts = lengths.cumsum(0) - lengths
    if "labels" in inputs:
        inputs["labels"][0, starts] = -100  # no token of its sample predicts a first label
    samples = torch.arange(len(spans), device=device).repeat_interleave(lengths)
    positions = torch.arange(len(samples), device=device) - starts[samples]
    return {**inputs, "position_ids": positions[None], "seq_idx": samples[None]}


def pairs_per_token(model: Any, cluster: Cluster) -> float:
    """Return `token_pairs` of a causal language model of transformers, from its weights and its configuration.

    Of the experts of a layer, those count that a token passes.
    """
    config = model.config.get_text_config()
    heads = getattr(config, "num_attention_heads", None)
    kinds = getattr(config, "layer_types", None)
    layers = config.num_hidden_layers if kinds is None else sum(kind == "full_attention" for kind in kinds)
    if not heads or not layers:
        return WITHOUT_ATTENTION
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    experts = ("num_experts", "num_local_experts", "n_routed_experts")
    total = next((number for name in experts if (number := getattr(config, name, None))), 1)
    active = (getattr(config, "num_experts_per_tok", None) or total) / total
    weights = 0.0
    for name, weight in model.named_parameters():
        is_lookup = weight is embedding.weight and (head is None or head.weight is not weight)
        if weight.dim() > 1 and not is_lookup:
            weights += weight.numel() * (active if ".experts." in name else 1)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    return token_pairs(weights, layers=layers, heads=heads, head_dim=head_dim, cluster=cluster)
