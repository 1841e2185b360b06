"""Log-probabilities of a shard's tokens, sums per document, and preference losses as in DPO, against one process."""

from __future__ import annotations

import random
from collections.abc import Callable
from itertools import accumulate, pairwise
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from ringattn import InputError, Ring
from ringattn.adapters import loss
from ringattn.adapters.loss import count_labels, sum_documents, token_log_probs
from ringattn.testing import run_ranks

IGNORED = -7


def dense_log_probs(logits: Tensor, labels: Tensor) -> Tensor:
    """Return log-probabilities of whole rows by torch's log_softmax; 0 for ignored labels."""
    picked = F.log_softmax(logits, -1).gather(-1, labels.clamp(min=0)[..., None])[..., 0]
    return torch.where(labels == IGNORED, torch.zeros_like(picked), picked)


def preference(sums: Tensor) -> Tensor:
    """Return a loss that sums over all pairs of rows and documents, similar to DPO's loss of one pair."""
    return F.softplus(sums.flatten()[:, None] - 0.3 * sums.flatten()[None].sin()).sum()


@pytest.mark.parametrize("seed", range(12))
def test_a_preference_loss_and_its_gradients_equal_one_process(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    draw = random.Random(seed)
    tokens, batch, vocabulary = draw.randint(1, 40), draw.randint(1, 3), draw.randint(2, 9)
    cuts = sorted({0, *draw.sample(range(1, tokens), min(draw.randint(0, 3), tokens - 1)), tokens})
    documents = None if len(cuts) == 2 and draw.random() < 0.5 else cuts
    ranks, layout = draw.randint(1, 4), draw.choice(["zigzag", "contiguous", "striped"])
    monkeypatch.setattr(loss, "ROWS_AT_A_TIME", draw.randint(1, 7))
    generator = torch.Generator().manual_seed(seed)
    logits = 3 * torch.randn(batch, tokens, vocabulary, dtype=torch.float64, generator=generator)
    text = torch.randint(vocabulary, (batch, tokens), generator=generator)

    def body(ring: Ring) -> tuple[Tensor, Tensor, Tensor]:
        seq = ring.sequence(tokens, layout=layout, cu_seqlens=documents)
        labels = seq.shard_labels(text, ignore_index=IGNORED)
        shard = seq.shard(logits).detach().requires_grad_()
        log_probs = token_log_probs(shard, labels, seq, ignore_index=IGNORED)
        sums = sum_documents(log_probs, seq)
        preference(sums).backward()
        return seq.gather(log_probs.detach()), sums.detach(), seq.gather(shard.grad)

    whole = logits.clone().requires_grad_()
    with Ring() as ring:
        labels = ring.sequence(tokens, cu_seqlens=documents).shard_labels(text, ignore_index=IGNORED)
    expected = dense_log_probs(whole, labels)
    expected_sums = torch.stack([expected[:, start:stop].sum(1) for start, stop in pairwise(cuts)], 1)
    preference(expected_sums).backward()
    for log_probs, sums, grad in run_ranks(ranks, body, timeout_s=20.0):
        torch.testing.assert_close(log_probs, expected.detach(), rtol=0, atol=1e-12)
        torch.testing.assert_close(sums, expected_sums.detach(), rtol=0, atol=1e-11)
        torch.testing.assert_close(grad, whole.grad, rtol=0, atol=1e-11)


@pytest.mark.slow  # 5 s
def test_a_hand_written_dpo_loss_of_a_model_equals_one_process() -> None:
    """Pairs are documents of one row, so no rank has whole texts, and only sums over texts are reduced."""
    pytest.importorskip("transformers", reason="transformers is not installed")
    from ringattn.adapters.transformers import prepare
    from tests.adapters.models import tiny_model
    from tests.adapters.ranks import InDouble

    lengths, prompts, beta = [9, 12, 5, 7], [4, 4, 2, 2], 0.3  # chosen, rejected, chosen, rejected
    generator = torch.Generator().manual_seed(5)
    texts = [torch.randint(3, 64, (1, length), generator=generator) for length in lengths]
    cuts = [0, *accumulate(lengths)]
    completions = torch.cat([torch.arange(n) >= prompt for n, prompt in zip(lengths, prompts, strict=True)])[None]
    row = torch.cat(texts, 1)
    labels = row.masked_fill(~completions, -100)

    def reference_of(model: Any) -> Any:
        with torch.no_grad():
            for number, parameter in enumerate(model.parameters()):
                parameter *= 1 + 0.01 * (number % 7)
        return model

    def dpo(policy: Tensor, reference: Tensor) -> Tensor:
        margins = beta * (policy - reference).view(-1, 2)
        return -F.logsigmoid(margins[:, 0] - margins[:, 1]).mean()

    models = [(tiny_model("llama", "eager"), reference_of(tiny_model("llama", "eager"))) for _ in range(3)]

    def body(ring: Ring) -> tuple[Tensor, list[Tensor]]:
        policy, reference = (prepare(model) for model in models[ring.rank])
        seq = ring.sequence(cu_seqlens=cuts)
        inputs = {"input_ids": seq.shard(row), "position_ids": seq.positions(per_document=True)[None]}
        targets = seq.shard_labels(labels)
        with InDouble(), ring.activate(seq):
            with torch.no_grad():
                fixed = sum_documents(token_log_probs(reference(**inputs).logits, targets, seq), seq)
            sums = sum_documents(token_log_probs(policy(**inputs).logits, targets, seq), seq)
        loss = dpo(sums[0], fixed[0])
        loss.backward()
        grads = [parameter.grad for parameter in policy.parameters()]
        ring.all_reduce(grads)
        return loss.detach(), grads

    results = run_ranks(2, body, timeout_s=20.0)
    policy, reference = models[2]

    def sums_of(model: Any) -> Tensor:
        sums = []
        for text, prompt in zip(texts, prompts, strict=True):
            log_probs = model(input_ids=text).logits.log_softmax(-1)[:, :-1].gather(2, text[:, 1:, None])[..., 0]
            sums.append(log_probs[:, prompt - 1 :].sum())
        return torch.stack(sums)

    with InDouble():
        loss = dpo(sums_of(policy), sums_of(reference).detach())
    loss.backward()
    for actual, grads in results:
        torch.testing.assert_close(actual, loss.detach(), rtol=1e-12, atol=0)
        for grad, parameter in zip(grads, policy.parameters(), strict=True):
            torch.testing.assert_close(grad, parameter.grad, rtol=0, atol=1e-9 * float(parameter.grad.abs().max()))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_low_precision_logits_are_summed_in_float32(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(1)
    logits = (4 * torch.randn(1, 6, 500, generator=generator)).to(dtype)
    labels = torch.randint(500, (1, 6), generator=generator)
    labels[0, 2] = IGNORED
    weights = torch.randn(1, 6, generator=generator)
    with Ring() as ring:
        shard = logits.clone().requires_grad_()
        log_probs = token_log_probs(shard, labels, ring.sequence(6), ignore_index=IGNORED)
        (log_probs * weights).sum().backward()
    exact = logits.double().requires_grad_()
    expected = dense_log_probs(exact, labels)
    (expected * weights).sum().backward()
    assert log_probs.dtype == torch.float32 and shard.grad.dtype == dtype
    torch.testing.assert_close(log_probs.double(), expected, rtol=0, atol=4e-6)
    # The gradient is rounded once, to the dtype of the logits.
    bound = torch.finfo(dtype).eps / 2 * exact.grad.abs() + 1e-6
    assert ((shard.grad.double() - exact.grad).abs() <= bound).all()


def test_logits_of_ignored_labels_do_not_matter() -> None:
    logits = torch.randn(1, 4, 5, dtype=torch.float64)
    logits[0, 1], logits[0, 3] = torch.nan, torch.inf
    labels = torch.tensor([[2, IGNORED, 0, IGNORED]])
    with Ring() as ring:
        shard = logits.clone().requires_grad_()
        log_probs = token_log_probs(shard, labels, ring.sequence(4), ignore_index=IGNORED)
        log_probs.sum().backward()
    assert log_probs[0, [1, 3]].tolist() == [0.0, 0.0] and shard.grad[0, [1, 3]].count_nonzero() == 0
    torch.testing.assert_close(log_probs[0, [0, 2]], F.log_softmax(logits[0, [0, 2]], -1)[[0, 1], [2, 0]])


Call = Callable[[Ring], object]
WRONG: dict[str, Call] = {
    "labels": lambda ring: token_log_probs(torch.zeros(1, 4, 5), torch.zeros(1, 3).long(), ring.sequence(8)),
    "logits": lambda ring: token_log_probs(torch.zeros(4, 5), torch.zeros(4).long(), ring.sequence(8)),
    "tokens": lambda ring: token_log_probs(torch.zeros(1, 8, 5), torch.zeros(1, 8).long(), ring.sequence(8)),
    "values": lambda ring: sum_documents(torch.zeros(1, 8), ring.sequence(8)),
}


@pytest.mark.parametrize("name", WRONG)
def test_shapes_that_are_not_those_of_a_shard_are_refused(name: str) -> None:
    def body(ring: Ring) -> str:
        with pytest.raises(InputError) as error:
            WRONG[name](ring)
        return str(error.value)

    for rank, message in enumerate(run_ranks(2, body, timeout_s=10.0)):
        assert message.startswith(f"rank {rank}: ") and "this rank's 4 tokens" in message


@pytest.mark.parametrize(
    ("label", "ignore_index"), [(-100, 0), (-1, -100), (128, -100), (2**40, -100), (-(2**63), 0)], ids=str
)
@pytest.mark.parametrize("wrong_rank", [0, 1])
def test_a_label_outside_the_vocabulary_on_one_rank_is_refused_by_both(
    label: int, ignore_index: int, wrong_rank: int
) -> None:
    def body(ring: Ring) -> str:
        seq = ring.sequence(8, layout="contiguous", cu_seqlens=[0, 5, 8])
        labels = torch.tensor([[3, ignore_index, 127, 1], [2, 4, 6, ignore_index]])
        if ring.rank == wrong_rank:
            labels[1, 2] = label
        with pytest.raises(InputError) as error:
            sum_documents(token_log_probs(torch.zeros(2, 4, 128), labels, seq, ignore_index=ignore_index), seq)
        return str(error.value)

    position = 4 * wrong_rank + 2
    for message in run_ranks(2, body, timeout_s=10.0):
        assert f"rank {wrong_rank}: label {label} of row 1, position {position}," in message
        assert f"neither in the vocabulary of 128 tokens nor ignore_index={ignore_index}; pass" in message


def test_labels_of_shard_labels_need_the_same_ignore_index() -> None:
    """The label -100 must not be read as the token at index vocabulary - 100."""

    def body(ring: Ring) -> Tensor:
        seq = ring.sequence(8)
        logits = torch.zeros(1, 4, 128)
        labels = seq.shard_labels(torch.tensor([[3, 5, 2, 7, 9, 1, 0, 0]]))
        with pytest.raises(InputError, match=r"rank 0: label -100 of row 0, position 7, .* ignore_index=0"):
            sum_documents(token_log_probs(logits, labels, seq, ignore_index=0), seq)
        return seq.gather(token_log_probs(logits, labels, seq))

    for log_probs in run_ranks(2, body, timeout_s=10.0):
        assert log_probs[0, -1] == 0
        torch.testing.assert_close(log_probs[0, :-1], torch.full((7,), 1 / 128).log())


def test_labels_may_be_integers_of_any_size() -> None:
    """As an index, torch would take uint8 for a mask; and it compares uint8 with -100 as if it were 156."""
    logits = torch.randn(1, 4, 4, generator=torch.Generator().manual_seed(0))
    labels = torch.tensor([[2, 3, 1, 1]])
    with Ring() as ring:
        seq = ring.sequence(4)
        expected = token_log_probs(logits, labels, seq)
        for dtype in (torch.uint8, torch.int8, torch.int16, torch.int32):
            assert torch.equal(token_log_probs(logits, labels.to(dtype), seq), expected)
        assert token_log_probs(torch.zeros(1, 4, 256), labels.to(torch.uint8) + 154, seq).all()
        assert count_labels(labels.to(torch.uint8) + 154, ring) == 4
        for dtype in (torch.bool, torch.float32):
            with pytest.raises(InputError, match=f"rank 0: labels must be integers, got {dtype}"):
                token_log_probs(logits, labels.to(dtype), seq)
