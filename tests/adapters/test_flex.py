"""flex_attention over a ring: supported masks and score_mods, refusals of all others, functions whose values change."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from inspect import signature
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention.flex_attention import (
    AuxRequest,
    BlockMask,
    and_masks,
    create_block_mask,
    create_mask,
    noop_mask,
    or_masks,
)
from torch.nn.attention.flex_attention import flex_attention as torchs_own

from ringattn import InputError, Ring, UnsupportedError, masks
from ringattn.adapters import flex, pair_functions, tables
from ringattn.adapters.context_parallel import context_parallel
from ringattn.adapters.flex import FoundMask, FoundScore, flex_attention, recognise_masks, recognise_score
from ringattn.adapters.pair_functions import PairFunction, record
from ringattn.testing import run_ranks
from tests.oracle import allowed_mask

TOKENS, BLOCK = 37, 8
WITHOUT_FULL_BLOCKS: dict[str, Any] = (
    {"separate_full_blocks": False} if "separate_full_blocks" in signature(create_block_mask).parameters else {}
)
"""Masks without full blocks, which torch can make from 2.13 on."""
CUTS = (0, 5, 19, 37)
CPU = torch.device("cpu")
Mod = Callable[..., Tensor]


def causal(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return q >= k


def window(b: Tensor, h: Tensor, q: Tensor, k: Tensor, left: int = 6, right: int = 3) -> Tensor:
    return (q - k <= left) & (k - q <= right)


def documents(cuts: tuple[int, ...]) -> Mod:
    ids = torch.repeat_interleave(torch.arange(len(cuts) - 1), torch.tensor(cuts).diff())

    def same(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return ids[q] == ids[k]

    return same


def chunks(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return q // 10 == k // 10


def prefix(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return (k < 4) | (q >= k)


def prefixes(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    """Return True for pairs of a causal mask with prefixes.

    The prefixes are the first 3 keys of the first document, no key of the second, and every key of the third.
    """
    return documents(CUTS)(b, h, q, k) & ((q >= k) | (k < 3) | (k >= 19))


def sink_tokens(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return (q >= k) & ((k < 2) | (q - k < 8))


def block_mask(mod: Mod, tokens: int = TOKENS, batch: int | None = None, heads: int | None = None, **how: Any) -> Any:
    return create_block_mask(mod, batch, heads, tokens, tokens, device="cpu", **{"BLOCK_SIZE": BLOCK, **how})


def drawn(tokens: int = TOKENS, heads: int = 4, kv_heads: int = 2, batch: int = 2) -> list[Tensor]:
    """Return q, k, v and the gradient of out."""
    generator = torch.Generator().manual_seed(7)
    each = (heads, kv_heads, kv_heads, heads)
    return [torch.randn(batch, h, tokens, 8, dtype=torch.float64, generator=generator) for h in each]


def dense(
    q: Tensor, k: Tensor, v: Tensor, mod: Mod, score_mod: Mod | None = None, scale: float | None = None
) -> list[Tensor]:
    """Compute out and lse by the definition. `torch.create_mask` turns `mod` into a dense mask."""
    seen = create_mask(mod, q.shape[0], q.shape[1], q.shape[2], k.shape[2], device="cpu")
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    scores = q @ k.mT * (q.shape[-1] ** -0.5 if scale is None else scale)
    if score_mod is not None:
        scores = score_mod(scores, *torch.meshgrid(*(torch.arange(n) for n in scores.shape), indexing="ij"))
    scores = scores.masked_fill(~seen, -torch.inf)
    return [scores.softmax(-1) @ v, scores.logsumexp(-1)]


def check(
    mod: Mod, ranks: int, layout: str, *, score_mod: Mod | None = None, batched: bool = False,
    scale: float | None = None, seq_cuts: list[int] | None = None,
) -> float:  # fmt: skip
    """Return the largest error of out, lse, dq, dk, dv over `ranks` (tests/fuzz/test_fuzz_hosts.py has more cases)."""
    tensors = drawn()
    leaves = [x.clone().requires_grad_() for x in tensors[:3]]
    out, lse = dense(leaves[0], leaves[1], leaves[2], mod, score_mod, scale)
    true = [out, lse, *torch.autograd.grad(out, leaves, tensors[3])]
    mask = block_mask(mod, batch=2 if batched else None)

    def body(ring: Ring) -> list[Tensor]:
        seq = ring.sequence(TOKENS, layout=layout, cu_seqlens=seq_cuts)
        leaf_tensors = [x.clone().requires_grad_() for x in tensors[:3]]
        with ring.activate(seq):
            out, aux = flex_attention(
                *(seq.shard(x, 2) for x in leaf_tensors), score_mod, mask, scale, True, return_aux=AuxRequest(lse=True)
            )
        grads = torch.autograd.grad(out, leaf_tensors, seq.shard(tensors[3], 2))
        ring.all_reduce(list(grads))
        return [seq.gather(out.detach(), 2), seq.gather(aux.lse.detach(), 2), *grads]

    by_rank = run_ranks(ranks, body)
    return max(float((x - y).detach().abs().max()) for results in by_rank for x, y in zip(results, true, strict=True))


MASKS: dict[str, tuple[Mod, FoundMask]] = {
    "full": (noop_mask, FoundMask(False, None, None)),
    "causal": (causal, FoundMask(True, None, None)),
    "window": (window, FoundMask(False, (6, 3), None)),
    "causal window": (and_masks(causal, window), FoundMask(True, (6, 0), None)),
    "documents": (documents(CUTS), FoundMask(False, None, CUTS)),
    "causal documents": (and_masks(causal, documents(CUTS)), FoundMask(True, None, CUTS)),
    "all three": (and_masks(causal, window, documents(CUTS)), FoundMask(True, (6, 0), CUTS)),
    "chunks": (and_masks(causal, chunks), FoundMask(True, None, (0, 10, 20, 30, 37))),
    "prefix": (prefix, FoundMask(True, None, None, (4,))),
    "prefixes of documents": (prefixes, FoundMask(True, None, CUTS, (3, 1, 18))),
    "prefix of a shorter document": (
        lambda b, h, q, k: (q >= k) & ((q < 19) == (k < 19)) | (k < 4) & (q < 19),
        FoundMask(True, None, (0, 19, 37), (4, 1)),
    ),
    "prefix in chunks": (
        lambda b, h, q, k: (q // 10 == k // 10) & ((q >= k) | (k % 10 < 3)),
        FoundMask(True, None, (0, 10, 20, 30, 37), (3, 3, 3, 3)),
    ),
    "a window ahead": (lambda b, h, q, k: k - q <= 5, FoundMask(False, (None, 5), None)),
    "itself": (lambda b, h, q, k: q == k, FoundMask(False, (0, 0), None)),
    "what follows": (lambda b, h, q, k: q <= k, FoundMask(False, (0, None), None)),
    "joined twice": (or_masks(causal, and_masks(causal, window)), FoundMask(True, None, None)),
    "partial": (partial(window, left=2, right=0), FoundMask(True, (2, 0), None)),
}


@pytest.mark.parametrize("name", MASKS)
def test_masks_are_recognized(name: str) -> None:
    mod, expected = MASKS[name]
    for options in ({}, {"BLOCK_SIZE": (3, 5)}, {"BLOCK_SIZE": 64, **WITHOUT_FULL_BLOCKS}, {"BLOCK_SIZE": 1}):
        mask = block_mask(mod, **options)
        assert recognise_masks(mask, TOKENS, 2, 4) == (expected, expected)


def test_exact() -> None:
    """Out, lse and gradients are exact, also if the sequence has the documents of the mask."""
    assert check(MASKS["causal"][0], 2, "zigzag") < 1e-12
    assert check(MASKS["all three"][0], 3, "striped", seq_cuts=[0, 19, 37]) < 1e-12
    assert check(prefixes, 3, "zigzag", seq_cuts=[0, 5, 37]) < 1e-12
    assert check(causal, 2, "zigzag", score_mod=capped, scale=0.7) < 1e-12
    packed = and_masks(causal, documents(CUTS))
    assert (
        check(
            packed, 3, "contiguous", score_mod=lambda s, *indices: capped(s, *indices) - (indices[2] - indices[3]) / 8
        )
        < 1e-12
    )


def test_rows_with_documents_of_their_own() -> None:
    rows = torch.stack([torch.arange(TOKENS) // 11, torch.arange(TOKENS) // 20])

    def packed(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return (rows[b, q] == rows[b, k]) & (q >= k)

    assert check(packed, 2, "contiguous", batched=True) < 1e-12


def capped(score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return 2.5 * torch.tanh(score / 2.5)


# --- refusals --------------------------------------------------------------------------------------------------------


def per_head(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return (q >= k) & ((h < 3) | (q - k < 9))


def padded(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return (q < 30) & (k < 30)


def scattered(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return q % 3 == k % 3


def almost(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return (q >= k) & ~((q == 30) & (k == 17))


def interleaved(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return (q // 5) % 2 == (k // 5) % 2


def torn(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    """Return a pattern without long runs, in which every query attends to its own key."""
    return (q == k) | ((q * q * 7 + k * k * 13 + q * k) % 11 < 5)


OTHERS: list[tuple[Mod, str]] = [
    (sink_tokens, r"could only be a causal window \(7, 0\), which has no pair in block \(2, 0\)"),
    (
        lambda b, h, q, k: (q >= k) | (k < 4) & (q != 1),
        "at query 1, key 2 .* could only be causal after a prefix of 4 tokens",
    ),
    (lambda b, h, q, k: (q >= k) | (k < 4) | (k - q == 9) & (q > 5), "causal after a prefix of 4 tokens"),
    (per_head, r"at query 9, key 0 of row 0, head 3, but could only be causal"),
    (padded, "query 30 of row 0 does not attend to its own key"),
    (scattered, "window"),
    (almost, r"returns False at query 30, key 17 of row 0, head 0"),
    (interleaved, "documents cut at 5, 10"),
    (lambda b, h, q, k: ((q - k) % 4 == 0) | (q - k == 1), "window"),
    (torn, "window"),
]


@pytest.fixture
def no_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    """Set limits with which no mask is a few slices."""
    monkeypatch.setattr(tables, "MOST_SLICES", 0)


@pytest.mark.usefixtures("no_slices")
@pytest.mark.parametrize(("mod", "message"), OTHERS)
def test_masks_that_need_too_many_slices_are_refused(mod: Mod, message: str) -> None:
    with pytest.raises(UnsupportedError, match=message) as raised:
        recognise_masks(block_mask(mod), TOKENS, 2, 4)
    assert "full, causal and sliding-window masks" in str(raised.value)
    reason = "head 3 has another mask than head 0" if mod is per_head else "the mask needs"
    assert f"it is not a few slices either: {reason}" in str(raised.value)


@pytest.mark.parametrize("mod", [mod for mod, _ in OTHERS if mod is not per_head])
def test_other_masks_are_slices(monkeypatch: pytest.MonkeyPatch, mod: Mod) -> None:
    """The table of the slices is that of the mask, also if few pairs are evaluated at a time."""
    expected = create_mask(mod, None, None, TOKENS, TOKENS, device="cpu")[0, 0]
    for pieces, options in ((1 << 20, {"BLOCK_SIZE": (3, 5)}), (100, {"BLOCK_SIZE": 64, **WITHOUT_FULL_BLOCKS})):
        monkeypatch.setattr(pair_functions, "PIECE_PAIRS", pieces)
        first, second = recognise_masks(block_mask(mod, **options), TOKENS, 2, 4)
        assert first == second and first.slices is not None
        assert torch.equal(allowed_mask(TOKENS, TOKENS, mask=first.slices), expected)


def tree_of_answers(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    """Return a prompt of 9 tokens and three answers."""
    nodes = torch.repeat_interleave(torch.arange(4), torch.tensor([9, 10, 8, 10]))
    return (q >= k) & ((nodes[k] == 0) | (nodes[q] == nodes[k]))


def test_slices_are_exact() -> None:
    """Out, lse and gradients are exact: sinks, a tree, rows with different masks, documents, and a softcap."""
    assert check(sink_tokens, 2, "zigzag") < 1e-12
    assert check(tree_of_answers, 3, "striped", score_mod=capped) < 1e-12
    assert (
        check(lambda b, h, q, k: sink_tokens(b, h, q, k) & ((b == 0) | (q - k != 5)), 2, "zigzag", batched=True) < 1e-12
    )
    assert check(and_masks(sink_tokens, documents(CUTS)), 2, "contiguous", seq_cuts=[0, 19, 37]) < 1e-12


def test_queries_that_attend_to_nothing() -> None:
    """They get zeros and a log-sum-exp of -inf, as in torch, and have no gradient."""
    mask, (q, k, v, grad) = block_mask(padded), drawn(kv_heads=4)
    out, aux = torchs_own(q, k, v, block_mask=mask, return_aux=AuxRequest(lse=True))
    leaves = [x[:, :, :30].clone().requires_grad_() for x in (q, k, v)]
    true = torch.autograd.grad(dense(leaves[0], leaves[1], leaves[2], noop_mask)[0], leaves, grad[:, :, :30])

    def body(ring: Ring) -> None:
        seq, local = ring.sequence(TOKENS), [x.clone().requires_grad_() for x in (q, k, v)]
        with ring.activate(seq):
            part, lse = flex_attention(*(seq.shard(x, 2) for x in local), block_mask=mask, return_lse=True)
        grads = [*torch.autograd.grad(part, local, seq.shard(grad, 2))]
        ring.all_reduce(grads)
        whole = [seq.gather(part.detach(), 2), seq.gather(lse.detach(), 2)]
        assert (whole[1][..., 30:] == -torch.inf).all()
        expected = [out, aux.lse, *(F.pad(x, (0, 0, 0, TOKENS - 30)) for x in true)]
        for each, of_torch in zip([*whole, *grads], expected, strict=True):
            torch.testing.assert_close(each, of_torch, rtol=1e-10, atol=1e-10)

    run_ranks(2, body)


def test_what_slices_do_not_combine_with(monkeypatch: pytest.MonkeyPatch) -> None:
    by_head = block_mask(lambda b, h, q, k: sink_tokens(b, h, q, k) & ((b == 0) | (q - k != 5)))
    (first, second) = recognise_masks(by_head, TOKENS, 2, 4)
    with pytest.raises(UnsupportedError, match=r"reads positions, rows or heads, .*leave score_mod out"):
        recognise_score(lambda s, b, h, q, k: s - (q - k).abs() / 8, (CAUSAL, second), TOKENS, 4, CPU)
    assert recognise_score(capped, (first, second), TOKENS, 4, CPU).softcap == 2.5
    monkeypatch.setattr(pair_functions, "MOST_PAIRS", 2 * TOKENS**2 - 1)
    with pytest.raises(UnsupportedError, match="reads rows or heads, so there are 2,738 values to evaluate"):
        recognise_masks(by_head, TOKENS, 2, 4)
    tokens = 1 << 20  # a table of all pairs would not fit in memory
    whole = BlockMask.from_kv_blocks(
        torch.ones(1, 1, 1, dtype=torch.int32), torch.zeros(1, 1, 1, 1, dtype=torch.int32), BLOCK_SIZE=tokens,
        mask_mod=lambda b, h, q, k: q < 5, seq_lengths=(tokens, tokens),
    )  # fmt: skip
    with pytest.raises(UnsupportedError, match=r"query 5 .*; it is not a few slices either: a mask of 1048576 queries"):
        recognise_masks(whole, tokens, 1, 4)


@pytest.mark.usefixtures("no_slices")
@pytest.mark.parametrize("tile", [3, 5])
def test_a_long_mask_is_compared_in_partial_blocks(monkeypatch: pytest.MonkeyPatch, tile: int) -> None:
    """Masks are recognised, and a hole is found, with small tiles and few pairs per evaluation."""
    monkeypatch.setattr(flex, "ALL_BLOCKS_TOKENS", 0)
    monkeypatch.setattr(pair_functions, "TILE_TOKENS", tile)
    monkeypatch.setattr(pair_functions, "PIECE_PAIRS", 300)
    for mod, expected in MASKS.values():
        assert recognise_masks(block_mask(mod), TOKENS, 1, 4) == (expected,)

    def a_row_shorter(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return window(b, h, q, k) & ~((q == 20) & (k == 14))

    with pytest.raises(UnsupportedError, match="at query 20, key 14"):
        recognise_masks(block_mask(a_row_shorter), TOKENS, 1, 4)


def test_tables_that_say_otherwise_are_refused() -> None:
    """Block tables that contradict mask_mod are refused.

    torch's kernels do not call mask_mod in full blocks, and skip blocks that the tables do not list.
    """
    good = block_mask(causal)
    without = BlockMask.from_kv_blocks(good.kv_num_blocks, good.kv_indices, BLOCK_SIZE=BLOCK, mask_mod=causal,
                                       seq_lengths=(TOKENS, TOKENS))  # fmt: skip
    with pytest.raises(UnsupportedError, match=r"in block \(1, 0\) of 8 queries"):
        recognise_masks(without, TOKENS, 1, 1)
    full = BlockMask.from_kv_blocks(
        torch.zeros_like(good.kv_num_blocks), good.kv_indices, good.kv_num_blocks, good.kv_indices, BLOCK, causal,
        (TOKENS, TOKENS),
    )  # fmt: skip
    with pytest.raises(UnsupportedError, match=r"some pairs in block \(0, 0\)"):
        recognise_masks(full, TOKENS, 1, 1)
    twice = BlockMask.from_kv_blocks(
        good.kv_num_blocks, good.kv_indices, good.kv_num_blocks, good.kv_indices, BLOCK, noop_mask, (TOKENS, TOKENS)
    )
    with pytest.raises(UnsupportedError, match="tables of row 0, head 0 differ"):
        recognise_masks(twice, TOKENS, 1, 1)
    backward = block_mask(causal)
    assert backward.q_num_blocks is not None
    backward.q_num_blocks -= 1
    with pytest.raises(UnsupportedError, match="tables of row 0"):
        recognise_masks(backward, TOKENS, 1, 1)
    with pytest.raises(UnsupportedError, match=r"sliced|the mask of the whole sequence"):
        recognise_masks(good[:, :, torch.arange(5)], TOKENS, 1, 1)
    adjusted = block_mask(causal, 40)._adjust(TOKENS, TOKENS)
    if adjusted.seq_lengths == (TOKENS, TOKENS):  # before torch 2.13, it ends with a whole block
        assert recognise_masks(adjusted, TOKENS, 1, 1)[0].causal
    else:
        with pytest.raises(UnsupportedError, match="has 40 queries and 40 keys, the active sequence has 37 tokens"):
            recognise_masks(adjusted, TOKENS, 1, 1)


def test_calls_are_refused_on_all_ranks() -> None:
    """A wrong call of one rank is refused on all ranks, and the ring stays usable."""

    def body(ring: Ring) -> None:
        seq, (q, k, v, _) = ring.sequence(TOKENS), drawn(kv_heads=4)
        q, k, v = (seq.shard(x, 2) for x in (q, k, v))
        cut = ring.sequence(cu_seqlens=list(CUTS), layout="zigzag")
        odd: list[tuple[dict[str, Any], Any, str]] = [
            ({"block_mask": block_mask(per_head)}, seq, "head 3 has another mask than head 0"),
            ({"block_mask": block_mask(causal, 19)}, seq, r"has 19 queries and 19 keys, the active sequence has 37"),
            ({"block_mask": block_mask(causal, batch=3)}, seq, "the batch has 2 rows"),
            ({"block_mask": block_mask(causal, heads=2)}, seq, "has 2 heads, but there are 4"),
            ({"block_mask": causal}, seq, "block_mask is a function"),
            ({"score_mod": lambda s, b, h, q, k: s * 2}, seq, "score_mod '<lambda>'"),
            ({"kernel_options": {"BLOCK_M": 64}}, seq, "kernel_options"),
            ({"return_aux": AuxRequest(max_scores=True)}, seq, "max_scores"),
            ({"block_mask": block_mask(causal)}, cut, "block_mask connects them"),
            ({"block_mask": block_mask(sink_tokens)}, cut, "block_mask connects them"),
            ({}, cut, "block_mask connects them"),
        ]
        for options, over, message in odd:
            with ring.activate(over), pytest.raises(InputError, match=message):
                flex_attention(q, k, v, **options if ring.rank == 1 else {"block_mask": block_mask(documents(CUTS))})
        with ring.activate(seq), pytest.raises(InputError, match="pass enable_gqa=True to group them"):
            flex_attention(q, k[:, :2], v[:, :2])
        with pytest.raises(InputError, match="no sequence is active"):
            flex_attention(q, k, v)
        with ring.activate(cut):
            assert flex_attention(q, k, v, block_mask=block_mask(documents(CUTS))).shape == q.shape

    run_ranks(2, body, timeout_s=20.0)


# --- torch's own, and local ------------------------------------------------------------------------------------------


def test_torchs_own_inside_of_context_parallel_is_refused() -> None:
    """torch's flex_attention raises our error, although it runs inside torch.compile (see also test_activation)."""
    torch._dynamo.reset()

    def body(ring: Ring) -> None:
        x = drawn(kv_heads=4)[0]
        entered = context_parallel(ring, buffers=[x], buffer_seq_dims=[2])
        with pytest.raises(UnsupportedError, match=r"ringattn\.adapters\.flex\.flex_attention"), entered:
            torchs_own(x, x, x, block_mask=block_mask(causal, x.shape[2]))
        ring.barrier()

    run_ranks(2, body, timeout_s=20.0)


@pytest.mark.slow
def test_compiled_code_breaks_its_graph_here() -> None:
    torch._dynamo.reset()
    mask = block_mask(causal)
    compiled = torch.compile(lambda x: 2 * flex_attention(x.sin(), x, x, block_mask=mask), backend="aot_eager")

    def body(ring: Ring) -> None:
        seq = ring.sequence(TOKENS)
        shard = seq.shard(drawn(kv_heads=4)[0], 2).requires_grad_()
        with ring.activate(seq):
            outs = compiled(shard), 2 * flex_attention(shard.sin(), shard, shard, block_mask=mask)
        for actual, expected in zip(
            *([out, *torch.autograd.grad(out.sin().sum(), shard)] for out in outs), strict=True
        ):
            torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)

    run_ranks(2, body)


def test_local_is_torchs_own() -> None:
    def body(ring: Ring) -> None:
        q, k, v, _ = drawn(kv_heads=4)
        mask = block_mask(prefix)
        with ring.activate(ring.sequence(TOKENS)), ring.activate(None):
            actual, lse = flex_attention(q, k, v, block_mask=mask, return_lse=True)
        torch.testing.assert_close(actual, dense(q, k, v, prefix)[0], rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(lse, dense(q, k, v, prefix)[1], rtol=1e-12, atol=1e-12)

    run_ranks(1, body)


# --- score_mods -------------------------------------------------------------------------------------------------------

HEADS = 4
SLOPES = torch.tensor([0.5, 0.3, 2.0**-8, -0.1])
LEARNED = torch.tensor(3.0, requires_grad=True)
FULL, CAUSAL = FoundMask(False, None, None), FoundMask(True, None, None)


def recognised(mod: Mod | None, *masks: FoundMask, length: int = TOKENS, heads: int = HEADS) -> FoundScore:
    return recognise_score(mod, masks or (CAUSAL,), length, heads, CPU)


@pytest.mark.parametrize(
    ("mod", "message"),
    [
        (lambda s, b, h, q, k: s + 0.5 * q * k, "query 1, key 1 .*with its slope between neighbors, 0, would give"),
        (lambda s, b, h, q, k: torch.where(q >= k, s, -torch.inf), "into -inf at .* Put masks into block_mask"),
        (lambda s, b, h, q, k: 2 * s, "neither the score itself"),
        (lambda s, b, h, q, k: s.clamp(max=100.0) + 0 * q, "neither the score itself"),
        (lambda s, b, h, q, k: torch.where(q > 0, s.clamp(max=100.0), s), "but ALiBi"),
        (lambda s, b, h, q, k: 3.0 * torch.tanh(s / 2.0), "neither the score itself"),
        (lambda s, b, h, q, k: s + torch.ones(8)[h], "neither the score itself"),
        (lambda s, b, h, q, k: 2 * s if int(q) else s, "could not be evaluated"),
        (lambda s, b, h, q, k: LEARNED * torch.tanh(s / LEARNED), "learned parameter"),
        (lambda s, b, h, q, k: s + LEARNED * (k - q), "learned parameter"),
        (lambda s, b, h, q, k: s if s > 0 else 2 * s, "could not be evaluated"),
        (lambda s, b, h, q, k: s - SLOPES[h] * (q - k).abs() * (b + 1), "row 1 of the batch has other slopes"),
        (lambda s, b, h, q, k: s - SLOPES[h] * (q - k).abs() * (1 + (b == 1) * (q == 20)), "of row 1, head 0, but"),
        (lambda s, b, h, q, k: torch.where(q == k, s, -torch.inf), "its slope between neighbors, inf"),
        (lambda s, b, h, q, k: s - SLOPES[h] * (q - k), "query 0, key 1 of row .*, head 0, but ALiBi"),
        (lambda s, b, h, q, k: s + SLOPES[h] * k, "at query 0, key 1"),
        (lambda s, b, h, q, k: s - (SLOPES[h].bfloat16() * (q - k).abs()), "slope between neighbors, 0.30"),
        (lambda s, b, h, q, k: s - SLOPES[h] * (q - k).abs().clamp(max=30), "distance|but ALiBi"),
        (lambda s, b, h, q, k: s - SLOPES[h] * (q - k).abs() - (s > 5.9) * 1e-9 * (q > 0), "but ALiBi"),
        (lambda s, b, h, q, k: 2.5 * torch.tanh((s - SLOPES[h] * (q - k).abs()) / 2.5), "but ALiBi"),
    ],
)  # fmt: skip
def test_other_score_mods_are_refused(mod: Mod, message: str) -> None:
    with pytest.raises(UnsupportedError, match=message) as raised:
        recognised(mod, FULL, FULL)
    assert r"ALiBi, - slope[head] * abs(query - key)" in str(raised.value)


def test_score_mods_that_are_known() -> None:
    assert recognised(None) == recognised(lambda s, b, h, q, k: s) == FoundScore()
    assert recognised(capped) == FoundScore(2.5)
    assert recognised(lambda s, b, h, q, k: torch.tanh(s * 0.02) * 50).softcap == pytest.approx(50.0, rel=1e-15)
    assert recognised(lambda s, b, h, q, k: s + 0 * k) == FoundScore()


def by_formula(score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    """Return the score with ALiBi, whose slopes for 4 heads are computed by the formula of the paper."""
    return score + (k - q) * torch.exp2(-((h + 1) * 8.0 / HEADS))


ALIBI: dict[str, tuple[Mod, FoundMask]] = {
    "symmetric": (lambda s, b, h, q, k: s - SLOPES[h] * (q - k).abs(), FULL),
    "key minus query": (lambda s, b, h, q, k: s + SLOPES[h] * (k - q), CAUSAL),
    "query minus key": (lambda s, b, h, q, k: s - (q - k) * SLOPES[h], CAUSAL),
    "in floating point": (lambda s, b, h, q, k: s + SLOPES[h] * (k.float() - q.float()), CAUSAL),
    "apart": (lambda s, b, h, q, k: s + SLOPES[h].double() * k - SLOPES[h].double() * q, CAUSAL),
    "in a window": (lambda s, b, h, q, k: s - SLOPES[h] * torch.abs(k - q), FoundMask(False, (6, 3), None)),
    "ahead": (lambda s, b, h, q, k: s - SLOPES[h] * (k - q), FoundMask(False, (0, None), None)),
    "as a mask too": (
        lambda s, b, h, q, k: torch.where(q >= k, s + SLOPES[h] * (k - q), -torch.inf),
        FoundMask(True, None, CUTS),
    ),
    "by places in documents": (
        lambda s, b, h, q, k: s + SLOPES[h] * (WITHIN[k] - WITHIN[q]),
        FoundMask(True, None, CUTS),
    ),
    "of one token in each document": (
        lambda s, b, h, q, k: s - SLOPES[h] * (q - k).abs(),
        FoundMask(False, None, (0, 1, 2, TOKENS)),
    ),
}
WITHIN = torch.cat([torch.arange(stop - start) for start, stop in pairwise(CUTS)])


@pytest.mark.parametrize("name", ALIBI)
def test_alibi_is_recognized(name: str) -> None:
    mod, mask = ALIBI[name]
    expected = tuple(SLOPES.double().tolist())
    assert recognised(mod, mask, mask) == FoundScore(None, expected)

    def both(s: Tensor, *place: Tensor) -> Tensor:
        return mod(capped(s, *place), *place)

    assert recognised(both, mask) == FoundScore(2.5, expected)


def test_alibi_by_the_formula_of_the_paper_and_without_neighbors() -> None:
    slopes = recognised(by_formula).alibi_slopes
    assert slopes == tuple(2.0 ** (-2 * (head + 1)) for head in range(HEADS))
    thirds = recognised(lambda s, b, h, q, k: s - (q - k) / 3 * (h + 1)).alibi_slopes
    assert thirds is not None and thirds == pytest.approx([(head + 1) / 3 for head in range(HEADS)], rel=2**-22)
    alone = FoundMask(False, (0, 0), None)
    assert recognised(lambda s, b, h, q, k: s + 5 * (q - k), alone) == FoundScore()


@pytest.mark.parametrize("exception", ["distance", "end", "pair", "head"])
def test_all_pairs_are_compared(monkeypatch: pytest.MonkeyPatch, exception: str) -> None:
    """A deviation from ALiBi at any pair is found, with small tiles and few pairs per evaluation."""
    monkeypatch.setattr(pair_functions, "TILE_TOKENS", 11)
    monkeypatch.setattr(pair_functions, "PIECE_PAIRS", 300)

    def almost(s: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        odd = {
            "distance": (q - k == 23) & (k > 0),
            "end": (q > 3) & (q < 20) & (k == q),
            "pair": (q == 30) & (k == 17),
            "head": (h == 3) & (q == 30),
        }[exception]
        return s + SLOPES[h] * (k - q) + 0.01 * odd

    if exception == "distance":
        for mod, mask in ALIBI.values():
            assert recognised(mod, mask).alibi_slopes == tuple(SLOPES.double().tolist())
    with pytest.raises(UnsupportedError, match="but ALiBi with its slope"):
        recognised(almost)


def test_what_was_found_is_kept_for_each_mask_until_the_slopes_change(monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers that alternate between two masks with one score_mod analyse it once per mask and once per change."""
    slopes, calls, (q, k, v, _) = SLOPES.double(), list[object](), drawn(kv_heads=4)

    def counted(*args: Any) -> FoundScore:
        calls.append(args)
        return recognise_score(*args)

    monkeypatch.setattr(flex, "recognise_score", counted)

    def mod(s: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return s - slopes[h] * (q - k).abs()

    masks = [block_mask(mask) for mask in (causal, noop_mask)]
    with Ring() as ring, ring.activate(ring.sequence(TOKENS)):
        for _ in range(2):
            for mask in masks:
                flex_attention(q, k, v, mod, mask)
        assert len(calls) == 2
        slopes *= 2
        out = flex_attention(q, k, v, mod, masks[0])
        assert len(calls) == 3
    torch.testing.assert_close(out, dense(q, k, v, causal, mod)[0], rtol=1e-12, atol=1e-12)
    assert recognise_score(mod, (CAUSAL,), 0, HEADS, q.device) == FoundScore()


Variable = tuple[Callable[[], Any], Callable[[float], None]]

# --- what a function reads -------------------------------------------------------------------------------------------


def closure() -> Variable:
    value = 3.0

    def write(new: float) -> None:
        nonlocal value
        value = new

    return lambda: value, write


def numpy_memory() -> Variable:
    array = np.full(1, 3.0)
    tensor = torch.from_numpy(array)
    return lambda: tensor[0], lambda new: array.fill(new)


def written_data() -> Variable:
    tensor = torch.tensor(3.0, dtype=torch.float64)

    def write(new: float) -> None:
        tensor.data.fill_(new)

    return lambda: {"values": (tensor,)}["values"][0], write


def inference_tensor() -> Variable:
    with torch.inference_mode():
        tensor = torch.tensor(3.0, dtype=torch.float64)

    def write(new: float) -> None:
        with torch.inference_mode():
            tensor.fill_(new)

    return lambda: tensor, write


VARIABLES = [closure, numpy_memory, written_data, inference_tensor]
"""A number, and tensors that change while their version counter does not."""


class Counted:
    """A counter of the analyses of masks and score_mods."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count = 0
        for name in ("recognise_masks", "recognise_score"):
            monkeypatch.setattr(flex, name, self.counted(getattr(flex, name)))

    def counted(self, analyse: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            self.count += arguments[0] is not None
            return analyse(*arguments)

        return call


@pytest.fixture
def active() -> Iterator[None]:
    with Ring() as ring, ring.activate(ring.sequence(TOKENS)):
        yield


def check_local(mask_mod: Mod, score_mod: Mod | None, mask: BlockMask) -> None:
    q, k, v, _ = drawn(kv_heads=4)
    out = flex_attention(q, k, v, score_mod, mask)
    torch.testing.assert_close(out, dense(q, k, v, mask_mod, score_mod)[0], rtol=1e-12, atol=1e-12)


@pytest.mark.usefixtures("active")
@pytest.mark.parametrize("variable", VARIABLES)
def test_a_changed_value_is_read(variable: Callable[[], Variable], monkeypatch: pytest.MonkeyPatch) -> None:
    """Changes of a mask_mod's window and of a score_mod's softcap and slope take effect.

    Without a change, nothing is analysed again.
    """
    (left, set_left), (cap, set_cap), (slope, set_slope) = variable(), variable(), variable()
    changes = [(set_left, 7.0), (set_cap, 0.5), (set_slope, 0.25), (set_left, 2.0)]
    counted = Counted(monkeypatch)

    def window(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return (q >= k) & (q - k <= left())

    def capped(s: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return torch.tanh(s / cap()) * cap() - slope() * (q - k).abs()

    mask = block_mask(window, BLOCK_SIZE=64)  # its only block stays partial, so its table stays right
    for write, value in [(set_left, 3.0), *changes]:
        write(value)
        check_local(window, capped, mask)
        count = counted.count
        check_local(window, capped, mask)
        assert counted.count == count


class Bias:
    """An ALiBi score_mod as a method and as a callable object."""

    def __init__(self, slope: float) -> None:
        self.slope = slope

    def method(self, s: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return s - self.slope * (q - k).abs()

    def __call__(self, s: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return self.method(s, b, h, q, k)


@pytest.mark.usefixtures("active")
def test_methods_objects_and_compiled_functions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each slope of two layers is analysed once, if the layers alternate and share the code of their method."""
    layers, mask, counted = [Bias(0.5), Bias(0.25)], block_mask(causal), Counted(monkeypatch)
    compiled = [torch.compile(layer.method, backend="eager") for layer in layers]
    for slope in (0.5, 2.0):
        layers[0].slope = slope
        for _ in range(2):
            mods: list[Mod] = [*layers, *(layer.method for layer in layers), *compiled]
            for mod in mods:
                check_local(causal, mod, mask)
    # Analysed are the mask and, of objects, methods and compiled functions, both layers' slopes and the changed slope
    # of the first layer. Dynamo may compile a method again, with the slope as an input. Its operators change then, and
    # each of the two compiled functions is analysed again.
    assert 1 + 3 * 3 <= counted.count <= 1 + 3 * 3 + 2


@pytest.mark.usefixtures("active")
def test_a_slope_that_now_requires_a_gradient_is_refused() -> None:
    slope, (q, k, v, _) = torch.tensor(0.5), drawn(kv_heads=4)

    def mod(s: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return s - slope * (q - k).abs()

    flex_attention(q, k, v, mod)
    slope.requires_grad_()
    with pytest.raises(UnsupportedError, match="learned parameter"):
        flex_attention(q, k, v, mod)


@pytest.mark.usefixtures("active")
def test_replaced_tables_and_mask_mod_are_read() -> None:
    q, k, v, _ = drawn(kv_heads=4)
    mask = block_mask(causal)
    flex_attention(q, k, v, block_mask=mask)
    mask.kv_num_blocks.data.zero_()
    with pytest.raises(UnsupportedError, match="tables of row 0"):
        flex_attention(q, k, v, block_mask=mask)
    whole = block_mask(causal, BLOCK_SIZE=64)
    check_local(causal, None, whole)
    whole.mask_mod = lambda b, h, q, k: (q >= k) & (q - k < 5)
    check_local(whole.mask_mod, None, whole)


def test_compiled_code_that_a_function_calls_is_recorded() -> None:
    table = torch.arange(7.0)
    recordings = []
    for factor in (2, 3):
        compiled = torch.compile(lambda x, factor=factor: x * factor, backend="aot_eager")
        compiled(table)
        recordings.append(record(lambda s, b, h, q, k, compiled=compiled: s * compiled(table)[q], CPU, True))
        recordings.append(record(torch.compile(lambda s, b, h, q, k, factor=factor: s * factor), CPU, True))
    closure_2, function_2, closure_3, function_3 = (recording for recording in recordings if recording is not None)
    assert closure_2.is_same(closure_2) and not closure_2.is_same(closure_3)
    assert function_2.is_same(function_2) and not function_2.is_same(function_3)


def test_what_cannot_be_recorded() -> None:
    """Functions with custom operators, random numbers or branches on a position are analysed at each call."""
    state = SimpleNamespace(value=3.0)

    @torch.library.custom_op("ringattn_tests::scaled", mutates_args=())
    def scaled(x: Tensor) -> Tensor:
        return x * state.value

    torch.library.register_vmap(scaled, lambda info, dims, x: (scaled(x), dims[0]))
    table, generator = torch.ones(3), torch.Generator()
    opaque: list[Mod] = [
        lambda s, b, h, q, k: scaled(s),
        lambda s, b, h, q, k: s * torch.empty(1).normal_(generator=generator),
        lambda s, b, h, q, k: s * int(q),
    ]
    for mod in opaque:
        assert record(mod, CPU, True) is None

    def swallows(s: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        try:
            return scaled(s)
        except Exception:
            return s

    assert record(swallows, CPU, True) is None

    def hides_row(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        try:
            return q >= k + b
        except Exception:
            return q >= k

    assert PairFunction(hides_row, CPU, UnsupportedError).reads(0)
    assert not PairFunction(hides_row, CPU, UnsupportedError).reads(1)
    assert record(lambda s, b, h, q, k: s * table[q], CPU, True) is not None


# --- holes -----------------------------------------------------------------------------------------------------------


def with_hole(mod: Mod, query: int, key: int, queries: int = 8) -> Mod:
    return lambda b, h, q, k: mod(b, h, q, k) & ~((q >= query) & (q < query + queries) & (k == key))


@pytest.mark.usefixtures("no_slices")
@pytest.mark.parametrize(
    ("tokens", "query", "key", "how"),
    [
        (1500, 1001, 500, {}),
        (1500, 1001, 500, WITHOUT_FULL_BLOCKS),
        (1500, 1001, 990, {"BLOCK_SIZE": 4096}),
    ],
)
def test_a_hole_is_refused(tokens: int, query: int, key: int, how: dict[str, Any]) -> None:
    """A key hidden from eight queries is found: in a full block, without full blocks, and in a single large block."""
    mask = create_block_mask(with_hole(causal, query, key), None, None, tokens, tokens, device="cpu", **how)
    with pytest.raises(UnsupportedError, match=rf"returns False at query {query}, key {key} of row 0, head 0"):
        recognise_masks(mask, tokens, 1, 4)
    mask = create_block_mask(causal, None, None, tokens, tokens, device="cpu", **how)
    assert recognise_masks(mask, tokens, 1, 4) == (CAUSAL,)


def test_a_hole_is_lowered_to_slices() -> None:
    mod = with_hole(causal, 1001, 500)
    (mask,) = recognise_masks(create_block_mask(mod, None, None, 1500, 1500, device="cpu"), 1500, 1, 4)
    expected = masks.slices(
        [(0, 1001), (1001, 1009), (1001, 1009), (1009, 1500)], [(0, 1001), (0, 500), (501, 1009), (0, 1500)],
        ["causal", "full", "causal", "causal"],
    )  # fmt: skip
    assert mask.slices == expected


@pytest.mark.usefixtures("no_slices")
@pytest.mark.parametrize("where", ["row", "head"])
@pytest.mark.parametrize("has_tables", [True, False])
def test_a_hole_in_a_single_row_or_head_is_refused(where: str, has_tables: bool) -> None:
    """A hole in one row or head is found, even if the block tables cover only the first row and head."""

    def mod(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return (q >= k) & ((q != 1400) | (k != 1200) | ((b if where == "row" else h) != 2))

    batch, heads = (3, 4) if has_tables else (None, None)
    mask = create_block_mask(mod, batch, heads, 1500, 1500, device="cpu", BLOCK_SIZE=1500)
    place = "row 2, head 0" if where == "row" else "row 0, head 2"
    with pytest.raises(UnsupportedError, match=f"returns False at query 1400, key 1200 of {place}"):
        recognise_masks(mask, 1500, 3, 4)


POSITIONS = torch.arange(4096)
OTHER_SLOPES = torch.tensor([0.5, 0.3, 2.0**-8, -0.1], dtype=torch.float64)


def by_table(s: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return s - OTHER_SLOPES[h] * (POSITIONS[q] - POSITIONS[k]).abs()


def test_a_hole_in_a_bias_is_refused() -> None:
    def mod(s: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return by_table(s, b, h, q, k) + 0.01 * ((h == 3) & (q == 1403) & (k == 77))

    with pytest.raises(UnsupportedError, match="at query 1403, key 77 of row 0, head 3"):
        recognise_score(mod, (CAUSAL,), 1500, 4, CPU)
    assert recognise_score(mod, (FoundMask(True, (1000, 0), None),), 1500, 4, CPU).alibi_slopes is not None


# --- too many pairs --------------------------------------------------------------------------------------------------


def test_distances_are_enough_where_nothing_else_is_read() -> None:
    def alibi(s: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return torch.where(q >= k, s - OTHER_SLOPES[h] * (q - k), -torch.inf)

    expected = FoundScore(None, tuple(OTHER_SLOPES.tolist()))
    assert recognise_score(alibi, (CAUSAL, FoundMask(True, None, (0, 700, 100_000))), 100_000, 4, CPU) == expected
    others: list[Mod] = [
        lambda s, b, h, q, k: alibi(s, b, h, q, k) - 1.0 * (q - k == 99_999),
        lambda s, b, h, q, k: alibi(s, b, h, q, k) - 1.0 * (q - k == 70_001) * (h == 3),
    ]
    for mod in others:
        with pytest.raises(UnsupportedError, match="but ALiBi"):
            recognise_score(mod, (CAUSAL,), 100_000, 4, CPU)
    read_more: list[Mod] = [
        lambda s, b, h, q, k: s - torch.sub(q, k, alpha=2),
        lambda s, b, h, q, k: s - (q - k) * (q > 5),
        lambda s, b, h, q, k: s - (POSITIONS[q] - POSITIONS[k]),
        lambda s, b, h, q, k: s - torch.stack([q, k]).sum(),
        lambda s, b, h, q, k: q,
    ]
    for mod in read_more:
        recording = record(mod, CPU, True)
        assert recording is not None and not recording.is_of_distance()


@pytest.mark.usefixtures("active")
def test_more_pairs_than_the_limit_need_trust(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pair_functions, "MOST_PAIRS", 3 * TOKENS**2)
    monkeypatch.setattr(pair_functions, "SAMPLED_PAIRS", 3 * TOKENS**2)
    monkeypatch.setattr(pair_functions, "TILE_TOKENS", 4)
    q, k, v, _ = drawn(kv_heads=4)

    def of_all_heads(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return (q >= k) & (h >= 0)

    mask = block_mask(of_all_heads, BLOCK_SIZE=64)
    expected = dense(q, k, v, causal)[0]
    for trust in (False, True, False):  # a result of trust=True is not reused without it
        if trust:
            out = flex_attention(q, k, v, block_mask=mask, trust=True)
            torch.testing.assert_close(out, expected, rtol=1e-12, atol=1e-12)
            continue
        with pytest.raises(
            UnsupportedError, match=r"at 6,400 pairs of query and key, the limit is 4,107: .*trust=True"
        ):
            flex_attention(q, k, v, block_mask=mask)
    check_local(causal, None, block_mask(causal, BLOCK_SIZE=64))  # this mask_mod does not depend on the head

    with pytest.raises(UnsupportedError, match=r"score_mod 'by_table' would have to be evaluated at .*trust=True"):
        flex_attention(q, k, v, by_table)
    out = flex_attention(q, k, v, by_table, mask, trust=True)
    torch.testing.assert_close(out, dense(q, k, v, causal, by_table)[0], rtol=1e-12, atol=1e-12)
    with pytest.raises(UnsupportedError, match="but ALiBi"):
        flex_attention(q, k, v, lambda s, b, h, q, k: s - q * k, trust=True)
