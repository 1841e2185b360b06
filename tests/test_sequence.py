"""Sequences: shards, positions, labels, and the gradients of shard and gather."""

from __future__ import annotations

from itertools import count, islice, pairwise
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from ringattn import DisagreementError, InputError, Ring, masks, sequence
from ringattn.core.geometry import MOST_TOKENS
from ringattn.core.layout import LAYOUTS
from ringattn.testing import run_ranks
from tests.face import TOKENS, X, errors
from tests.fuzz.draw import draw, kind_of
from tests.fuzz.judge import error_of

CUTS = [0, 5, 5, 6, 14]


SEEDS = list(islice((seed for seed in count() if kind_of(seed) == "sequences"), 40))


def test_the_drawn_sequences_cover_every_layout_and_number_of_ranks() -> None:
    cases = [draw(seed) for seed in SEEDS]
    assert {case["seq"]["layout"] for case in cases} == {"auto", "mask", *LAYOUTS}
    assert {case["ranks"] for case in cases} >= {1, 2, 3, 4}
    assert {tensor["wrong"] for case in cases for tensor in case["tensors"]} == {-1, 0, 1}


@pytest.mark.parametrize("seed", SEEDS)
def test_shards_positions_gathers_gradients_and_labels(seed: int) -> None:
    assert error_of(draw(seed)) is None


@pytest.mark.parametrize("range_bytes", [1, 1 << 16], ids=["a message per range", "a message per rank"])
@pytest.mark.parametrize("dim", [0, 1])
def test_gathers_and_gradients_of_many_ranges(dim: int, range_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sequence, "RANGE_BYTES", range_bytes)
    full = torch.arange(2 * 40 * 3, dtype=torch.float64).view(2, 40, 3).movedim(1, dim).contiguous()

    def body(ring: Ring) -> list[tuple[Tensor, Tensor, Tensor]]:
        results = []
        for layout in LAYOUTS:
            seq = ring.sequence(cu_seqlens=[0, 3, 4, 9, 20, 33, 40], layout=layout)
            x = full.clone().requires_grad_()
            part = seq.shard(x, dim)
            (of_shard,) = torch.autograd.grad(part, x, seq.shard(full, dim))
            gathered = seq.gather(part, dim)
            (of_part,) = torch.autograd.grad(gathered, part, (ring.rank + 1) * full)
            results.append((gathered.detach(), of_shard, of_part - 6 * seq.shard(full, dim)))
        return results

    by_rank = run_ranks(3, body)
    for gathered, _, difference in (result for results in by_rank for result in results):
        assert torch.equal(gathered, full) and not difference.any()
    for gradients in zip(*([of_shard for _, of_shard, _ in results] for results in by_rank), strict=True):
        assert torch.equal(sum(gradients), full)  # each rank has the gradient at its tokens and zeros elsewhere


INTEGERS = (torch.bool, torch.uint8, torch.int8, torch.uint16, torch.int16, torch.uint32, torch.int32, torch.int64)


@pytest.mark.parametrize("dtype", INTEGERS, ids=str)
def test_labels_are_exact_for_tokens_of_every_integer_type(dtype: torch.dtype) -> None:
    """Labels are int64, because `ignore_index` fits in no unsigned type: in uint8, -100 would be the byte 156."""
    high = 1 if dtype == torch.bool else torch.iinfo(dtype).max
    wide = torch.tensor([0, high, 1, high, 0])
    tokens = wide.to(dtype)

    def body(ring: Ring) -> tuple[Tensor, Tensor]:
        seq = ring.sequence(cu_seqlens=[0, 2, 5])
        return seq.shard_labels(tokens, 0), seq.positions()

    for labels, positions in run_ranks(2, body):
        assert labels.dtype == torch.int64
        assert torch.equal(labels, torch.tensor([high, -100, high, 0, -100])[positions])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex64, torch.uint64], ids=str)
def test_tokens_that_cannot_be_labels_are_refused(dtype: torch.dtype) -> None:
    with Ring() as ring, pytest.raises(InputError, match=rf"rank 0: shard_labels.*{dtype}.*tokens\.long\(\)"):
        ring.sequence(5).shard_labels(torch.zeros(1, 5).to(dtype))


@pytest.mark.parametrize("ignore_index", [-100.5, None, True, "-100", 2**63])
def test_an_ignore_index_that_is_no_label_is_refused(ignore_index: Any) -> None:
    with Ring() as ring, pytest.raises(InputError, match=r"ignore_index must be an integer"):
        ring.sequence(5).shard_labels(torch.zeros(1, 5, dtype=torch.int64), ignore_index=ignore_index)


@pytest.mark.parametrize("shift", [0, -1, 1.0, True, None])
def test_a_shift_that_is_no_positive_integer_is_refused(shift: Any) -> None:
    with Ring() as ring, pytest.raises(InputError, match=r"shift must be a positive integer"):
        ring.sequence(5).shard_labels(torch.zeros(1, 5, dtype=torch.int64), shift=shift)


@pytest.mark.parametrize("shift", [1, 2, 3, 9])
@pytest.mark.parametrize("cuts", [None, [0, 1, 3, 9], [0, 9, 9]])
def test_labels_of_later_tokens_stay_in_their_document(shift: int, cuts: list[int] | None) -> None:
    tokens = torch.arange(9)[None] + 20
    bounds = cuts or [0, 9]
    expected = [
        20 + token + shift if token + shift < stop else -1
        for start, stop in pairwise(bounds)
        for token in range(start, stop)
    ]

    def body(ring: Ring) -> list[int]:
        seq = ring.sequence(9, cu_seqlens=cuts, layout="zigzag")
        labels: list[int] = seq.gather(seq.shard_labels(tokens, ignore_index=-1, shift=shift))[0].tolist()
        return labels

    assert run_ranks(2, body) == [expected] * 2


@pytest.mark.parametrize("tokens", [0, TOKENS - 1, TOKENS + 1])
def test_labels_of_a_wrong_length_are_refused(tokens: int) -> None:
    wrong = torch.zeros(1, tokens, dtype=torch.int64)
    for rank, error in enumerate(errors(lambda ring: ring.sequence(TOKENS).shard_labels(wrong))):
        assert isinstance(error, InputError)
        assert f"rank {rank}: shard_labels got {tokens} tokens in dimension 1 of (1, {tokens}), " in str(error)


def test_wrong_lengths_are_refused() -> None:
    for rank, error in enumerate(errors(lambda ring: ring.sequence(TOKENS).shard(X[:, 1:]))):
        assert isinstance(error, InputError)
        assert f"rank {rank}: shard got 11 tokens in dimension 1 of (1, 11, 4, 8), the sequence has 12" in str(error)

    def gather_too_many(ring: Ring) -> None:
        seq = ring.sequence(TOKENS)
        seq.gather(X if ring.rank == 2 else seq.shard(X))

    for rank, error in enumerate(errors(gather_too_many)):
        assert isinstance(error, InputError)
        assert "rank 2: gather got 12 tokens in dimension 1 of (1, 12, 4, 8), this rank has 4" in str(error)
        assert str(error).startswith("rank 2 refused") == (rank != 2)
    for error in errors(lambda ring: ring.sequence(TOKENS).shard_labels(X[0, :, 0, 0].long(), dim=1)):
        assert isinstance(error, InputError) and "dim=1 does not exist" in str(error)


WHOLE = torch.arange(TOKENS)[None]
MISTAKES: list[tuple[Any, Any, str]] = [
    (WHOLE.tolist(), 1, "takes a tensor, got list"),
    (iter(WHOLE), 1, "takes a tensor, got"),
    (WHOLE.numpy(), 1, "takes a tensor, got ndarray"),
    *((WHOLE, dim, "dim must be the number of a dimension, got ") for dim in ("a", None, 1.0, True)),
]


def test_no_tensors_and_no_dimensions_are_refused() -> None:
    with Ring() as ring:
        seq = ring.sequence(TOKENS)
        for name in ("shard", "gather", "shard_labels"):
            method = getattr(seq, name)
            for x, dim, message in MISTAKES:
                with pytest.raises(InputError, match=f"rank 0: {name}:? {message}"):
                    method(x, dim)
            assert torch.equal(method(WHOLE, np.int64(-1)), method(WHOLE, 1))


def test_integers_of_numpy_are_integers() -> None:
    with Ring() as ring:
        seq = ring.sequence(np.int64(TOKENS))
        assert seq == ring.sequence(TOKENS) and type(seq.length) is int
        cuts = ring.sequence(cu_seqlens=np.array([0, 5, TOKENS], np.uint8))
        assert cuts.bounds == (0, 5, TOKENS) and {type(cut) for cut in cuts.bounds} == {int}
        labels = seq.shard_labels(WHOLE, shift=np.int64(2), ignore_index=np.int32(-7))
        assert torch.equal(labels, seq.shard_labels(WHOLE, shift=2, ignore_index=-7))
        copied = [WHOLE.clone()]
        ring.broadcast(copied, src=np.int64(0))  # type: ignore[arg-type]
        x = WHOLE[..., None].double()
        padded = [ring.halo(x, seq, width)[0] for width in (2, np.int64(2))]  # type: ignore[arg-type]
        assert torch.equal(*padded)
        for length in (np.True_, np.float64(4), torch.tensor(True), torch.tensor(4.0)):
            with pytest.raises(InputError, match="length must be a number of tokens, got"):
                ring.sequence(length)


def test_a_gather_with_different_dtypes_is_refused() -> None:
    def body(ring: Ring) -> None:
        seq = ring.sequence(TOKENS)
        seq.gather(seq.shard(X.double() if ring.rank == 0 else X))

    for error in errors(body):
        assert isinstance(error, DisagreementError) and "rank 0" in str(error) and "float64" in str(error)


def test_a_sequence_computes_its_positions_on_demand() -> None:
    def body(ring: Ring) -> None:
        with torch.inference_mode():
            seq = ring.sequence(MOST_TOKENS)
            cut = seq.with_documents([0, 7, MOST_TOKENS])
            small = ring.sequence(13, layout="striped")
            inside = small.positions()
        assert seq.counts == cut.counts == (MOST_TOKENS // 2,) * 2
        assert inside.tolist() == small.positions().tolist() == list(range(ring.rank, 13, 2))
        weight = torch.ones(len(inside), requires_grad=True)
        (weight * inside).sum().backward()
        assert weight.grad is not None and torch.equal(weight.grad, inside.float())

    run_ranks(2, body)


def test_positions_and_shards_within_a_compiled_region() -> None:
    with Ring() as ring:
        seq = ring.sequence(cu_seqlens=[0, 5, 11])

        @torch.compile(backend="eager", fullgraph=True)
        def turned(x: torch.Tensor) -> torch.Tensor:
            return seq.shard(x, 0) * seq.positions() + seq.positions(per_document=True)

        x = torch.linspace(-1, 1, 11)
        first, document_positions = turned(x), seq.positions(per_document=True)
        assert torch.equal(first, x * torch.arange(11) + document_positions) and torch.equal(turned(x), first)
        assert document_positions.tolist() == [*range(5), *range(6)]


def test_a_sequence_keeps_its_encoder() -> None:
    def body(ring: Ring) -> None:
        plain, encoder = ring.sequence(9), ring.sequence(14)
        seq = plain.with_encoder(encoder)
        assert seq.encoder == encoder and seq != plain and seq.with_encoder(None) == plain
        assert seq.with_documents([0, 4, 9]).encoder is encoder and seq.with_mask(None).encoder is encoder
        assert hash(seq) == hash(plain.with_encoder(ring.sequence(14)))
        with pytest.raises(InputError, match="with_encoder takes a sequence of this ring, got 14"):
            plain.with_encoder(14)  # type: ignore[arg-type]

    run_ranks(2, body)


@pytest.mark.parametrize("tokens", [9, 99])
def test_a_tree_of_another_number_of_tokens_is_refused(tokens: int) -> None:
    with Ring() as ring:
        seq, mask = ring.sequence(20), masks.tree([-1], [tokens])
        for make in (lambda: ring.sequence(20, mask=mask), lambda: seq.with_mask(mask)):
            with pytest.raises(InputError, match=f"masks.tree has {tokens} tokens, and the sequence has 20"):
                make()
