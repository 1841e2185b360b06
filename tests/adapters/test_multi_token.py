"""Heads for several tokens ahead, over two ranks against one process."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, embedding

from ringattn import InputError, Ring
from ringattn.adapters.loss import count_labels
from ringattn.adapters.multi_token import tokens_ahead
from ringattn.testing import dense_attention, run_ranks
from tests.adapters.processes import worst_error

TOLERANCE = 1e-9
TOKENS, WIDTH, HEADS, VOCABULARY = 26, 16, 2, 11
DOCUMENTS = [0, 4, 5, 7, 18, 26]
LAYOUTS = "zigzag", "contiguous"


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("documents", [None, DOCUMENTS])
def test_tokens_ahead(documents: list[int] | None, layout: str) -> None:
    """The result under a sequence is that for whole rows, and stays inside documents."""
    tokens = torch.arange(1, 2 * TOKENS + 1, dtype=torch.int32).reshape(2, TOKENS)
    positions = torch.cat([torch.arange(stop - start) for start, stop in pairwise(documents or [0, TOKENS])])[None]
    whole = {shift: tokens_ahead(tokens, positions, shift=shift, fill=-7) for shift in (1, 2, 3)}
    ends = torch.tensor((documents or [0, TOKENS])[1:])
    assert bool((whole[1][:, ends - 1] == -7).all()) and int((whole[1] == -7).sum()) == 2 * len(ends)
    real = whole[2] != -7
    assert torch.equal(whole[2][real], tokens.long()[real] + 2)
    torch.testing.assert_close(tokens_ahead(tokens), tokens_ahead(tokens, torch.arange(TOKENS)[None]))

    def body(ring: Ring) -> None:
        seq = ring.sequence(None if documents else TOKENS, cu_seqlens=documents, layout=layout)
        with pytest.raises(InputError, match="no sequence is active"):
            tokens_ahead(seq.shard(tokens))
        with ring.activate(seq):
            for shift, expected in whole.items():
                assert torch.equal(seq.gather(tokens_ahead(seq.shard(tokens), shift=shift, fill=-7)), expected)

    run_ranks(2, body)


class Predictor(nn.Module):
    """A block of attention for the next token, and one for the token after it, without transformers."""

    def __init__(self) -> None:
        super().__init__()
        shapes = {"embed": (VOCABULARY, WIDTH), "first": (WIDTH, 3 * WIDTH), "second": (WIDTH, 3 * WIDTH),
                  "join": (2 * WIDTH, WIDTH)}  # fmt: skip
        generator = torch.Generator().manual_seed(4)
        self.weights = nn.ParameterDict(
            {name: torch.randn(shape, generator=generator, dtype=torch.float64) for name, shape in shapes.items()}
        )

    def losses(self, attend: Any, tokens: Tensor, following: Tensor, labels: tuple[Tensor, Tensor]) -> list[Tensor]:
        """Return the summed losses of both heads, given an attention function and shifted tokens and labels."""
        weights = self.weights

        def block(x: Tensor, name: str) -> Tensor:
            q, k, v = (x @ weights[name]).unflatten(-1, (3 * HEADS, -1)).chunk(3, -2)
            return x + attend(q, k, v).flatten(-2)

        states = block(embedding(tokens, weights["embed"]), "first")
        joined = torch.cat([states, embedding(following, weights["embed"])], -1) @ weights["join"]
        return [
            cross_entropy((x @ weights["embed"].T).flatten(0, 1), y.flatten(), reduction="sum")
            for x, y in zip((states, block(joined, "second")), labels, strict=True)
        ]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("documents", [None, DOCUMENTS])
def test_a_loop_with_labels_that_are_shifted_twice(documents: list[int] | None, layout: str) -> None:
    tokens = torch.randint(VOCABULARY, (2, TOKENS), generator=torch.Generator().manual_seed(1))
    model = Predictor()
    expected = torch.zeros((), dtype=torch.float64)
    cuts = documents or [0, TOKENS]
    counts = [sum(max(0, stop - start - shift) for start, stop in pairwise(cuts)) * len(tokens) for shift in (1, 2)]
    for start, stop in pairwise(cuts):
        part = tokens[:, start:stop]
        labels = tokens_ahead(part), tokens_ahead(part, shift=2)
        parts = model.losses(
            lambda q, k, v: dense_attention(q, k, v, causal=True)[0], part, tokens_ahead(part, fill=0), labels
        )
        expected = expected + parts[0] / counts[0] + 0.3 * parts[1] / counts[1]
    expected.backward()
    true = [expected.detach(), *(weight.grad for weight in model.parameters())]

    def body(ring: Ring) -> list[Tensor]:
        seq, ours = ring.sequence(None if documents else TOKENS, cu_seqlens=documents, layout=layout), Predictor()
        labels = seq.shard_labels(tokens), seq.shard_labels(tokens, shift=2)
        parts = ours.losses(
            lambda q, k, v: ring.attention(q, k, v, seq, causal=True),
            seq.shard(tokens), seq.shard_labels(tokens, ignore_index=0), labels,
        )  # fmt: skip
        loss = parts[0] / count_labels(labels[0], ring) + 0.3 * parts[1] / count_labels(labels[1], ring)
        loss.backward()
        values = [loss.detach(), *(weight.grad for weight in ours.parameters() if weight.grad is not None)]
        ring.all_reduce(values)
        return values

    for values in run_ranks(2, body):
        assert worst_error(zip(values, true, strict=True)) <= TOLERANCE


@pytest.mark.slow
def test_a_head_inside_a_model_of_transformers() -> None:
    pytest.importorskip("transformers", reason="transformers is not installed")
    from tests.adapters.multi_token import multi_token_llama
    from tests.adapters.ranks import batches, far_from_one

    for kind, batch in batches().items():
        for layout in LAYOUTS:
            assert far_from_one(multi_token_llama, batch, layout=layout) <= TOLERANCE, (kind, layout)
