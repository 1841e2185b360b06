"""The masks of `ringattn.masks`: their checks, their texts, and the ways to pass them to a call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
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
    masks.prefix([1, 2]), masks.global_tokens(64), masks.bidirectional_blocks([(5, 9), (9, 12)]),
    masks.slices([(0, 4), (4, 8), (8, 12), (12, 15), (12, 15)], [(0, 4), (0, 3), (5, 9), (4, 9), (0, 3)],
                 ["causal", "causal_from_start", "inverse_causal", "bi_causal", "full"]),
    masks.slices([], []), masks.tree([-1, 0, 1, 1, 0, -1], [1024, 512, 256, 256, 512, 7]), masks.tree([], []),
    masks.by_head([(4, masks.tree([-1], [9])), (2, None), (2, masks.prefix((1, 2)))]),
]  # fmt: skip
DOCUMENTS = [0, 9, 9, 23]
TOLERANCE = 1e-12


@pytest.mark.parametrize("mask", VALUES, ids=lambda mask: mask.text)
def test_a_text_parses_to_the_same_mask(mask: AttentionMask) -> None:
    assert masks.from_text(mask.text) == mask
    assert hash(masks.from_text(mask.text)) == hash(mask)


def test_the_texts_of_masks() -> None:
    assert [mask.text for mask in VALUES] == [
        "chunked:8192", "prefix:0", "prefix:128", "prefix:100,30", "prefix:7,", "prefix:1,2", "global_tokens:64",
        "bidirectional_blocks:5,9,9,12", "slices:0-4x0-4c,4-8x0-3s,8-12x5-9i,12-15x0-3f,12-15x4-9b", "slices:",
        "tree:1024(512(2*256),512),7", "tree:", "by_head:4=tree:9;2=;2=prefix:1,2",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("star:8", r"mask='star:8': 'star' is not a mask; choose one of chunked, prefix, global_tokens, bid"),
        ("tree:8(", r"mask='tree:8\(': expected lengths with the children of a node in brackets"),
        ("tree:(8)", "expected lengths with the children"),
        ("tree:8)9", "expected lengths with the children"),
        ("tree:8(x)", "expected lengths with the children"),
        ("slices:0-4x0-4", r"expected slices such as 0-64x0-32f"),
        ("by_head:tree:4", r"expected groups such as 4=chunked:64;4="),
        ("chunked", r"mask='chunked': expected whole numbers after chunked:"),
        ("prefix:a", r"mask='prefix:a': expected whole numbers after prefix:, as in prefix:128"),
        ("chunked:0", r"masks\.chunked takes whole numbers of tokens from 1 on, got 0"),
        ("chunked:1,2", r"masks\.chunked takes whole numbers of tokens from 1 on, got \(1, 2\)"),
        ("bidirectional_blocks:5", r"masks\.bidirectional_blocks needs blocks in order that do not overlap, got 5"),
        (
            "bidirectional_blocks:5,9,8,12",
            r"masks\.bidirectional_blocks needs blocks in order that do not overlap, got \(5, 9, 8, 12\)",
        ),
        ("bidirectional_blocks:5,9,12", r"masks\.bidirectional_blocks needs blocks in order"),
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


def test_numbers_of_numpy_make_the_masks_of_pythons_numbers() -> None:
    """The numbers have 8 bits, so that a sum over 255 would be wrong if they were kept."""
    lengths, parents = np.array([200, 100, 100], np.uint8), np.array([-1, 0, 0], np.int8)
    assert masks.tree(parents, lengths).tokens == 400
    for mask, expected in (
        (masks.tree(parents, lengths), masks.tree([-1, 0, 0], [200, 100, 100])),
        (masks.chunked(np.uint8(200)), masks.chunked(200)),
        (masks.global_tokens(np.uint8(200)), masks.global_tokens(200)),
        (masks.prefix(np.uint8(200)), masks.prefix(200)),
        (masks.prefix(lengths), masks.prefix([200, 100, 100])),
        (masks.bidirectional_blocks(np.array([[3, 200]], np.uint8)), masks.bidirectional_blocks([(3, 200)])),
        (masks.by_head([(np.uint8(3), None)]), masks.by_head([(3, None)])),
    ):
        assert repr(mask) == repr(expected) and mask == expected


@pytest.mark.parametrize(
    ("blocks", "message"),
    [
        ([], "needs blocks in order"),
        ([(1, 2, 3)], "takes pairs"),
        ([5, 9], r"takes pairs \(first token, token after the last\), got \[5, 9\]"),
        (5, "takes pairs .*, got 5"),
        ([(-1, 2)], "takes whole"),
        ([(0.0, 2)], "takes whole"),
    ],
)
def test_wrong_blocks_are_refused(blocks: list[Any], message: str) -> None:
    with pytest.raises(InputError, match=rf"masks\.bidirectional_blocks {message}"):
        masks.bidirectional_blocks(blocks)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: masks.slices([(0, 4)], [], "full"), r"1 q_ranges, 0 k_ranges and 1 kinds; give one of each per slice"),
        (lambda: masks.slices([(0, 4)], [(0, 4)], "diagonal"), "kind 'diagonal' is not known; choose one of full"),
        (lambda: masks.slices([(4, 0)], [(0, 4)]), r"q_ranges has \(4, 0\), where 0 <= first <= stop is needed"),
        (lambda: masks.slices([(0, 1.0)], [(0, 4)]), "q_ranges are pairs"),
        (
            lambda: masks.slices([(0, 9), (8, 12)], [(0, 9), (3, 9)], ["causal", "full"]),
            r"query 8 attends to key 8 in two slices, q 0\.\.8 k 0\.\.8, distance 0\.\.inf and q 8\.\.11 k 3\.\.8, any",
        ),
        (lambda: masks.tree([0], [4]), "node 0 has the parent 0, which is not on the path"),
        (
            lambda: masks.tree([-1, 0, 0, 1], [1] * 4),
            "node 3 has the parent 1, .*; list the nodes in depth-first order",
        ),
        (lambda: masks.tree([-1], [4, 4]), "1 parents and 2 lengths"),
        (lambda: masks.tree([-1], [-4]), "whole numbers of tokens from 0 on, got -4"),
        (lambda: masks.tree([None], [4]), "the parent of node 0 must be the number of a node, or -1, got None"),
        (lambda: masks.slices([0, 4], [0, 4]), r"q_ranges are pairs .*, got \[0, 4\]"),
        (lambda: masks.tree(-1, [4]), "parents must list one number per node, got -1"),
        (lambda: masks.tree([-1], 4), "lengths must list one number per node, got 4"),
        (lambda: masks.by_head([4, None]), r"takes pairs \(number of heads, mask\), got \[4, None\]"),
        (lambda: masks.by_head([(4, None, None)]), r"takes pairs .*, got \[\(4, None, None\)\]"),
        (lambda: masks.from_text(masks.chunked(4)), r"Chunked\(tokens=4\) is not a text"),
        (lambda: masks.by_head([(0, None)]), "a group needs a number of heads, at least 1, got 0"),
        (lambda: masks.by_head([(1, masks.by_head([(1, None)]))]), "list its groups instead"),
    ],
)
def test_wrong_slices_and_trees_are_refused(make: Callable[[], AttentionMask], message: str) -> None:
    with pytest.raises(InputError, match=message):
        make()


SLICES, TREE = masks.slices([(0, 23)], [(0, 9)]), masks.tree([-1, 0, 0], [9, 7, 7])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"causal": True, "mask": SLICES}, "query 0 attends to the later key 8, which causal excludes"),
        ({"window": (3, 0), "mask": SLICES}, "masks.slices says which pairs are allowed; leave the window out"),
        ({"mask": masks.slices([(0, 24)], [(0, 9)])}, "q_ranges end at 24, and the sequence has 23 tokens"),
        ({"mask": masks.tree([-1], [9])}, "masks.tree has 9 tokens, and the sequence has 23"),
        ({"mask": TREE, "window": (3, 2)}, "masks.tree never looks ahead; use a window with a right side of 0"),
        ({"mask": TREE, "alibi_slopes": [0.5, 0.5]}, "distances in Tree count along paths; leave alibi_slopes out"),
        ({"mask": masks.by_head([(1, TREE)])}, "masks for 1 query heads, and the call has 2"),
        (
            {"mask": masks.by_head([(1, TREE), (1, None)]), "alibi_slopes": [0.5, 0.5]},
            "distances in ByHead count along",
        ),
    ],
)
def test_calls_that_do_not_fit_a_mask_are_refused(options: dict[str, Any], message: str) -> None:
    def body(ring: Ring) -> None:
        seq = ring.sequence(23)
        x = torch.zeros(1, seq.counts[ring.rank], 2, 8)
        for call in (
            lambda: ring.attention(x, x, x, seq, **options),
            lambda: ring.explain(seq, q_heads=2, head_dim=8, **options),
        ):
            with pytest.raises(InputError, match=message):
                call()

    run_ranks(2, body)


def test_documents_and_other_keys_do_not_combine_with_slices_and_trees() -> None:
    def body(ring: Ring) -> None:
        seq, packed = ring.sequence(23), ring.sequence(cu_seqlens=DOCUMENTS)
        x = torch.zeros(1, seq.counts[ring.rank], 2, 8)
        packed_x = torch.zeros(1, packed.counts[ring.rank], 2, 8)
        with pytest.raises(InputError, match=r"masks\.slices needs sequences without documents"):
            ring.attention(packed_x, packed_x, packed_x, packed, mask=SLICES)
        with pytest.raises(InputError, match="a tree may have several roots instead"):
            ring.attention(packed_x, packed_x, packed_x, packed, mask=TREE)
        shorter = ring.sequence(20)
        keys = torch.zeros(1, shorter.counts[ring.rank], 2, 8)
        with pytest.raises(InputError, match=r"masks\.tree needs queries and keys of the same tokens"):
            ring.attention(x, keys, keys, seq, kv_seq=shorter, mask=TREE)

    run_ranks(2, body)


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
