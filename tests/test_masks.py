"""The masks of `ringattn.masks`: their checks, their texts, and the ways to pass them to a call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from ringattn import Ring, RingAttention, masks
from ringattn.adapters.sdpa import ring_sdpa
from ringattn.adapters.torch_ops import ring_attention
from ringattn.errors import InputError
from ringattn.masks import AttentionMask
from ringattn.testing import dense_attention, run_ranks
from tests.doc_code import example

VALUES = [
    masks.chunked(8192), masks.prefix(0), masks.prefix(128), masks.prefix((100, 30)), masks.prefix((7,)),
    masks.prefix([1, 2]), masks.global_tokens(64),
]  # fmt: skip
DOCUMENTS = [0, 9, 9, 23]
TOLERANCE = 1e-12


@pytest.mark.parametrize("mask", VALUES, ids=lambda mask: mask.text)
def test_a_text_parses_to_the_same_mask(mask: AttentionMask) -> None:
    assert masks.from_text(mask.text) == mask
    assert hash(masks.from_text(mask.text)) == hash(mask)


def test_the_texts_of_masks() -> None:
    assert [mask.text for mask in VALUES] == [
        "chunked:8192", "prefix:0", "prefix:128", "prefix:100,30", "prefix:7,", "prefix:1,2", "global_tokens:64"
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("tree:8", r"mask='tree:8': 'tree' is not a mask; choose one of chunked, prefix, global_tokens"),
        ("chunked", r"mask='chunked': expected whole numbers after chunked:"),
        ("prefix:a", r"mask='prefix:a': expected whole numbers after prefix:, as in prefix:128"),
        ("chunked:0", r"masks\.chunked takes whole numbers of tokens from 1 on, got 0"),
        ("chunked:1,2", r"masks\.chunked takes whole numbers of tokens from 1 on, got \(1, 2\)"),
        ("prefix:-1", r"masks\.prefix takes whole numbers of tokens from 0 on, got -1"),
    ],
)
def test_other_texts_are_refused(text: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        masks.from_text(text)


@pytest.mark.parametrize(
    ("make", "number", "least"),
    [(masks.chunked, 0, 1), (masks.chunked, 2.0, 1), (masks.chunked, True, 1), (masks.prefix, -1, 0),
     (masks.prefix, (1.0,), 0), (masks.prefix, True, 0), (masks.global_tokens, 0, 1), (masks.global_tokens, None, 1)],
)  # fmt: skip
def test_wrong_numbers_are_refused(make: Callable[[Any], AttentionMask], number: Any, least: int) -> None:
    value = number[0] if isinstance(number, tuple) else number
    with pytest.raises(InputError, match=rf"masks\.{make.__name__} takes whole .* from {least} on, got {value}"):
        make(number)


def attend_and_gather(attend: Callable[..., Tensor], seq: Any, *inputs: Tensor) -> tuple[Tensor, ...]:
    """Return the whole output and gradients of `attend(q, k, v)` on this rank's shards."""
    leaves = [seq.shard(x).clone().requires_grad_() for x in inputs]
    out = attend(*leaves)
    grads = torch.autograd.grad(out.sin().sum(), leaves)
    return tuple(seq.gather(x.detach()) for x in (out, *grads))


def test_the_mask_of_a_sequence_reaches_every_call() -> None:
    q, k, v = torch.randn(3, 1, 23, 2, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    mask = masks.prefix((4, 3, 6))
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    out = dense_attention(*leaves, causal=True, mask=mask, cu_seqlens=DOCUMENTS)[0]
    expected = (out.detach(), *torch.autograd.grad(out.sin().sum(), leaves))

    def heads_first(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return ring_sdpa(*(x.transpose(1, 2) for x in (q, k, v)), is_causal=True).transpose(1, 2)

    def body(ring: Ring) -> list[tuple[Tensor, ...]]:
        plain = ring.sequence(cu_seqlens=DOCUMENTS)
        seq = plain.with_mask(mask)
        assert seq.mask == mask and seq != plain and seq.with_mask(None) == plain
        assert seq.with_documents(DOCUMENTS) == seq and hash(seq.with_mask(mask)) == hash(seq)
        layer = RingAttention(causal=True)
        calls: list[Callable[..., Tensor]] = [
            lambda *x: ring.attention(*x, seq, causal=True),
            lambda *x: ring.attention(*x, plain, causal=True, mask=mask),
            lambda *x: layer(*x, seq),
            lambda *x: ring_attention(*x, seq, causal=True),
        ]
        results = [attend_and_gather(call, seq, q, k, v) for call in calls]
        with ring.activate(seq):
            return [*results, attend_and_gather(heads_first, seq, q, k, v)]

    for results in run_ranks(2, body, poison=True):
        for call, results_of_call in enumerate(results):
            for name, actual, expected_value in zip(("out", "dq", "dk", "dv"), results_of_call, expected, strict=True):
                assert (actual - expected_value).abs().max() < TOLERANCE, (call, name)


def test_the_example_of_a_new_mask_is_exact() -> None:
    halves = example("Halves")["Halves"]
    x = torch.randn(1, 23, 2, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(9))
    expected = dense_attention(x, x, x, causal=True, cu_seqlens=[0, 4, 9, 9, 16, 23])[0]

    def body(ring: Ring) -> Tensor:
        seq = ring.sequence(cu_seqlens=DOCUMENTS)
        local = seq.shard(x)
        return seq.gather(ring.attention(local, local, local, seq, causal=True, mask=halves()))

    for out in run_ranks(3, body, poison=True):
        assert (out - expected).abs().max() < TOLERANCE


def test_two_masks_are_refused() -> None:
    def body(ring: Ring) -> None:
        plain = ring.sequence(8)
        seq = plain.with_mask(masks.chunked(4))
        x = torch.zeros(1, 4, 2, 8, dtype=torch.float64)
        with pytest.raises(InputError, match=r"seq carries mask=chunked:4, and mask=chunked:2 is given too"):
            ring.attention(x, x, x, seq, mask=masks.chunked(2))
        with pytest.raises(InputError, match=r"kv_seq carries mask=chunked:4; give the mask to seq"):
            ring.attention(x, x, x, plain, kv_seq=seq)
        with pytest.raises(InputError, match=r"seq carries mask=chunked:4, and dilated attention takes no mask"):
            ring.dilated_attention(x, x, x, seq, segment_lengths=[4], dilation_rates=[2])
        with pytest.raises(InputError, match=r"mask=4 is not a mask; make one with ringattn\.masks"):
            plain.with_mask(4)  # type: ignore[arg-type]

    run_ranks(2, body)


def test_compiled_code_uses_the_mask_of_another_step_without_recompiling() -> None:
    from torch._dynamo.testing import CompileCounterWithBackend

    x = torch.randn(1, 12, 2, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(5))

    def body(ring: Ring) -> int:
        counter = CompileCounterWithBackend("eager")
        run = torch.compile(lambda q: ring_attention(q, q, q, causal=True), backend=counter, fullgraph=True)
        plain = ring.sequence(12)
        for tokens in (1, 3, 5, 8):
            seq = plain.with_mask(masks.prefix(tokens))
            with ring.activate(seq):
                out = seq.gather(run(seq.shard(x)))
            expected = dense_attention(x, x, x, causal=True, mask=masks.prefix(tokens))[0]
            assert (out - expected).abs().max() < TOLERANCE
        return counter.frame_count

    assert run_ranks(1, body) == [1]


def test_masks_are_constants_of_compiled_code() -> None:
    """Compiled code is exact with masks that it receives and with masks that it creates, with varying numbers."""
    x = torch.randn(1, 12, 2, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(5))

    def body(ring: Ring) -> None:
        seq = ring.sequence(12)
        calls = [
            torch.compile(lambda q, mask: ring_attention(q, q, q, causal=True, mask=mask), backend="eager"),
            torch.compile(
                lambda q, mask: ring_attention(q, q, q, causal=True, mask=masks.chunked(mask.tokens)), backend="eager"
            ),
        ]
        with ring.activate(seq):
            for call in calls:
                for tokens in (3, 4, 5, 7):
                    out = seq.gather(call(seq.shard(x), masks.chunked(tokens)))
                    expected = dense_attention(x, x, x, causal=True, mask=masks.chunked(tokens))[0]
                    assert (out - expected).abs().max() < TOLERANCE

    run_ranks(1, body)
