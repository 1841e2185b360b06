"""flex_attention over a ring: masks and score_mods that it computes; all others are refused, and torch's own inside."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
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

from ringattn import InputError, Ring, UnsupportedError
from ringattn.adapters import flex, flex_functions
from ringattn.adapters.context_parallel import context_parallel
from ringattn.adapters.flex import FoundMask, flex_attention, found_masks
from ringattn.testing import run_ranks

TOKENS, BLOCK = 37, 8
CUTS = (0, 5, 19, 37)
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
    """Of the first document the first 3 keys, of the second none, of the third all."""
    return documents(CUTS)(b, h, q, k) & ((q >= k) | (k < 3) | (k >= 19))


def sink_tokens(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return (q >= k) & ((k < 2) | (q - k < 8))


def block_mask(mod: Mod, tokens: int = TOKENS, batch: int | None = None, heads: int | None = None, **how: Any) -> Any:
    return create_block_mask(mod, batch, heads, tokens, tokens, device="cpu", **{"BLOCK_SIZE": BLOCK, **how})


def drawn(tokens: int = TOKENS, heads: int = 4, kv_heads: int = 2, batch: int = 2) -> list[Tensor]:
    """q, k, v and the gradient of out."""
    generator = torch.Generator().manual_seed(7)
    each = (heads, kv_heads, kv_heads, heads)
    return [torch.randn(batch, h, tokens, 8, dtype=torch.float64, generator=generator) for h in each]


def dense(
    q: Tensor, k: Tensor, v: Tensor, mod: Mod, score_mod: Mod | None = None, scale: float | None = None
) -> list[Tensor]:
    """Out and lse by the definition, with torch's own table of the mask."""
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
    """The greatest error of out, lse, dq, dk and dv over `ranks` (see tests/fuzz/test_fuzz_hosts.py for many more)."""
    given = drawn()
    leaves = [x.clone().requires_grad_() for x in given[:3]]
    out, lse = dense(leaves[0], leaves[1], leaves[2], mod, score_mod, scale)
    true = [out, lse, *torch.autograd.grad(out, leaves, given[3])]
    mask = block_mask(mod, batch=2 if batched else None)

    def body(ring: Ring) -> list[Tensor]:
        seq = ring.sequence(TOKENS, layout=layout, cu_seqlens=seq_cuts)
        mine = [x.clone().requires_grad_() for x in given[:3]]
        with ring.activate(seq):
            out, aux = flex_attention(
                *(seq.shard(x, 2) for x in mine), score_mod, mask, scale, True, return_aux=AuxRequest(lse=True)
            )
        grads = torch.autograd.grad(out, mine, seq.shard(given[3], 2))
        ring.all_reduce(list(grads))
        return [seq.gather(out.detach(), 2), seq.gather(aux.lse.detach(), 2), *grads]

    found = run_ranks(ranks, body)
    return max(float((x - y).detach().abs().max()) for one in found for x, y in zip(one, true, strict=True))


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
    "once more": (or_masks(causal, and_masks(causal, window)), FoundMask(True, None, None)),
    "partial": (partial(window, left=2, right=0), FoundMask(True, (2, 0), None)),
}


@pytest.mark.parametrize("name", MASKS)
def test_masks_are_recognized(name: str) -> None:
    mod, wanted = MASKS[name]
    for block, separate in ((BLOCK, True), ((3, 5), True), (64, False), (1, True)):
        mask = block_mask(mod, BLOCK_SIZE=block, separate_full_blocks=separate)
        assert found_masks(mask, TOKENS, 2, 4) == (wanted, wanted)


def test_exact() -> None:
    """Out, lse and gradients; also where the sequence has the mask's documents."""
    assert check(MASKS["causal"][0], 2, "zigzag") < 1e-12
    assert check(MASKS["all three"][0], 3, "striped", seq_cuts=[0, 19, 37]) < 1e-12
    assert check(prefixes, 3, "zigzag", seq_cuts=[0, 5, 37]) < 1e-12
    assert check(causal, 2, "zigzag", score_mod=capped, scale=0.7) < 1e-12
    packed = and_masks(causal, documents(CUTS))
    assert check(packed, 3, "contiguous", score_mod=lambda s, *at: capped(s, *at) - (at[2] - at[3]) / 8) < 1e-12


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


@pytest.mark.parametrize(
    ("mod", "told"),
    [
        (sink_tokens, r"would be a causal window \(7, 0\), which has no pair in block \(2, 0\)"),
        (
            lambda b, h, q, k: (q >= k) | (k < 4) & (q != 1),
            "at query 1, key 2 .* would else be causal after a prefix of 4 tokens",
        ),
        (lambda b, h, q, k: (q >= k) | (k < 4) | (k - q == 9) & (q > 5), "causal after a prefix of 4 tokens"),
        (per_head, r"at query 9, key 0 of row 0, head 3, and would else be causal"),
        (padded, "query 30 of row 0 does not see its own key"),
        (scattered, "window"),
        (almost, r"says False at query 30, key 17 of row 0, head 0"),
        (interleaved, "documents cut at 5, 10"),
        (lambda b, h, q, k: ((q - k) % 4 == 0) | (q - k == 1), "window"),
    ],
)
def test_other_masks_are_refused(mod: Mod, told: str) -> None:
    with pytest.raises(UnsupportedError, match=told) as raised:
        found_masks(block_mask(mod), TOKENS, 2, 4)
    assert "full, causal and sliding-window masks" in str(raised.value)


@pytest.mark.parametrize("tile", [3, 5])
def test_a_long_mask_is_compared_in_partial_blocks(monkeypatch: pytest.MonkeyPatch, tile: int) -> None:
    """Whatever the sizes of tiles and pieces."""
    monkeypatch.setattr(flex, "ALL_BLOCKS_TOKENS", 0)
    monkeypatch.setattr(flex_functions, "TILE_TOKENS", tile)
    monkeypatch.setattr(flex_functions, "PIECE_PAIRS", 300)
    for mod, wanted in MASKS.values():
        assert found_masks(block_mask(mod), TOKENS, 1, 4) == (wanted,)

    def a_row_shorter(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return window(b, h, q, k) & ~((q == 20) & (k == 14))

    with pytest.raises(UnsupportedError, match="at query 20, key 14"):
        found_masks(block_mask(a_row_shorter), TOKENS, 1, 4)


def test_tables_that_say_otherwise_are_refused() -> None:
    """mask_mod alone is not the mask: torch's kernels skip it in full blocks, and blocks that are not listed."""
    good = block_mask(causal)
    without = BlockMask.from_kv_blocks(good.kv_num_blocks, good.kv_indices, BLOCK_SIZE=BLOCK, mask_mod=causal,
                                       seq_lengths=(TOKENS, TOKENS))  # fmt: skip
    with pytest.raises(UnsupportedError, match=r"in block \(1, 0\) of 8 queries"):
        found_masks(without, TOKENS, 1, 1)
    full = BlockMask.from_kv_blocks(
        torch.zeros_like(good.kv_num_blocks), good.kv_indices, good.kv_num_blocks, good.kv_indices, BLOCK, causal,
        (TOKENS, TOKENS),
    )  # fmt: skip
    with pytest.raises(UnsupportedError, match=r"some pairs in block \(0, 0\)"):
        found_masks(full, TOKENS, 1, 1)
    twice = BlockMask.from_kv_blocks(
        good.kv_num_blocks, good.kv_indices, good.kv_num_blocks, good.kv_indices, BLOCK, noop_mask, (TOKENS, TOKENS)
    )
    with pytest.raises(UnsupportedError, match="tables of row 0, head 0 say otherwise"):
        found_masks(twice, TOKENS, 1, 1)
    backward = block_mask(causal)
    assert backward.q_num_blocks is not None
    backward.q_num_blocks -= 1
    with pytest.raises(UnsupportedError, match="tables of row 0"):
        found_masks(backward, TOKENS, 1, 1)
    with pytest.raises(UnsupportedError, match="sliced"):
        found_masks(good[:, :, torch.arange(5)], TOKENS, 1, 1)
    assert found_masks(block_mask(causal, 40)._adjust(TOKENS, TOKENS), TOKENS, 1, 1)[0].causal


def test_calls_are_refused_on_all_ranks() -> None:
    """By whichever rank; and the ring lives on."""

    def body(ring: Ring) -> None:
        seq, (q, k, v, _) = ring.sequence(TOKENS), drawn(kv_heads=4)
        q, k, v = (seq.shard(x, 2) for x in (q, k, v))
        cut = ring.sequence(cu_seqlens=list(CUTS), layout="zigzag")
        odd: list[tuple[dict[str, Any], Any, str]] = [
            ({"block_mask": block_mask(sink_tokens)}, seq, "block_mask"),
            ({"block_mask": block_mask(causal, 19)}, seq, r"of 19 queries and 19 keys, the active sequence has 37 tok"),
            ({"block_mask": block_mask(causal, batch=3)}, seq, "the batch has 2 rows"),
            ({"block_mask": block_mask(causal, heads=2)}, seq, "of 2 heads, there are 4"),
            ({"block_mask": causal}, seq, "block_mask is a function"),
            ({"score_mod": lambda s, b, h, q, k: s * 2}, seq, "score_mod '<lambda>'"),
            ({"kernel_options": {"BLOCK_M": 64}}, seq, "kernel_options"),
            ({"return_aux": AuxRequest(max_scores=True)}, seq, "max_scores"),
            ({"block_mask": block_mask(causal)}, cut, "block_mask lets them meet"),
            ({}, cut, "block_mask lets them meet"),
        ]
        for options, over, told in odd:
            with ring.activate(over), pytest.raises(InputError, match=told):
                flex_attention(q, k, v, **options if ring.rank == 1 else {"block_mask": block_mask(documents(CUTS))})
        with ring.activate(seq), pytest.raises(InputError, match="enable_gqa=True groups them"):
            flex_attention(q, k[:, :2], v[:, :2])
        with pytest.raises(InputError, match="no sequence is active"):
            flex_attention(q, k, v)
        with ring.activate(cut):
            assert flex_attention(q, k, v, block_mask=block_mask(documents(CUTS))).shape == q.shape

    run_ranks(2, body, timeout_s=20.0)


# --- kept results ----------------------------------------------------------------------------------------------------


# --- torch's own, and local ------------------------------------------------------------------------------------------


def test_torchs_own_inside_of_context_parallel_is_refused() -> None:
    """As our error, though it is raised inside of the compiler that it brings along (see test_activation too)."""
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
        seq, x = ring.sequence(TOKENS), drawn(kv_heads=4)[0]
        mine = seq.shard(x, 2).requires_grad_()
        with ring.activate(seq):
            out = compiled(mine)
        (grad,) = torch.autograd.grad(out.sin().sum(), mine)
        whole = x.clone().requires_grad_()
        true = 2 * dense(whole.sin(), whole, whole, causal)[0]
        torch.testing.assert_close(seq.gather(out.detach(), 2), true.detach(), rtol=1e-12, atol=1e-12)
        (wanted,) = torch.autograd.grad(true.sin().sum(), whole)
        torch.testing.assert_close(seq.gather(grad, 2), wanted, rtol=1e-12, atol=1e-12)

    run_ranks(2, body)


def test_local_is_torchs_own() -> None:
    def body(ring: Ring) -> None:
        q, k, v, _ = drawn(kv_heads=4)
        mask = block_mask(prefix)
        with ring.activate(ring.sequence(TOKENS)), ring.activate(None):
            found, lse = flex_attention(q, k, v, block_mask=mask, return_lse=True)
        torch.testing.assert_close(found, dense(q, k, v, prefix)[0], rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(lse, dense(q, k, v, prefix)[1], rtol=1e-12, atol=1e-12)

    run_ranks(1, body)
