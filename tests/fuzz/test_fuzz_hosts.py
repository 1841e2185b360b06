"""Random calls of ring-flash-attention's functions, `context_parallel` and flex_attention, compared with the reference.

Ranks are threads, and everything is float64. Each seed defines a case; RINGATTN_FUZZ_SEED replaces the first seed.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from collections.abc import Sequence as Many
from itertools import accumulate, pairwise
from random import Random
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask
from torch.nn.attention.flex_attention import flex_attention as torch_flex_attention
from torch.utils.checkpoint import checkpoint

from ringattn import Ring, Sequence, masks
from ringattn.adapters import flash_attn
from ringattn.adapters.context_parallel import context_parallel, recompute_context
from ringattn.adapters.dropout import seed_from
from ringattn.adapters.flex import flex_attention
from ringattn.testing import run_ranks
from tests import philox
from tests.fuzz import reference, session

SECONDS, WITHIN = 4.0, 1e-10
BATCHED = {"ring_flash_attn": "contiguous", "zigzag_ring_flash_attn": "zigzag", "stripe_flash_attn": "striped"}
VARLEN = {"ring_flash_attn_varlen": "contiguous", "zigzag_ring_flash_attn_varlen": "zigzag"}


def draw_dropout(r: Random) -> tuple[float, int]:
    """Draw a dropout probability, often 0, and a dropout seed."""
    return r.choice([0.0, 0.0, 0.1, 0.5]), r.choice([0, 7, 2**32 + 5, 2**64 - 1])


def part(x: Tensor, layout: str, rank: int, ranks: int) -> Tensor:
    """Return one rank's rows of a document whose length is a multiple of 2 * ranks."""
    if layout == "striped":
        return x[rank::ranks]
    if layout == "contiguous" or ranks == 1:
        return x.chunk(ranks)[rank]
    chunks = x.chunk(2 * ranks)
    return torch.cat([chunks[rank], chunks[2 * ranks - 1 - rank]])


def draw_case(r: Random) -> dict[str, Any]:
    """Draw the settings that all kinds of calls have: ranks, heads, head_dim, `causal` and recomputation."""
    kv_heads, ranks = r.choice([1, 2, 3]), r.choice([1, 2, 2, 3, 4])
    return {"ranks": ranks, "heads": kv_heads * r.choice([1, 1, 2, 3]), "kv_heads": kv_heads,
            "dim": r.choice([1, 4, 8]), "causal": r.random() < 0.6, "again": r.random() < 0.3}  # fmt: skip


def tensors(seed: int, length: int, case: dict[str, Any]) -> list[Tensor]:
    """Return q, k, v and the gradient of out: (length, heads, dim)."""
    generator = torch.Generator().manual_seed(seed)
    heads = case["heads"], case["kv_heads"], case["kv_heads"], case["heads"]
    return [torch.randn(length, h, case["dim"], dtype=torch.float64, generator=generator) for h in heads]


def expected_results(
    inputs: Many[Tensor], cuts: Many[int] | None, case: dict[str, Any], **options: Any
) -> list[Tensor]:
    """Return the reference's out and gradients of q, k and v, for whole tensors."""
    *leaves, dout = (x[None].clone().requires_grad_() for x in inputs)
    length = len(inputs[0])
    pairs = {name: options.pop(name, None) for name in ("window", "mask")}
    counts = reference.plain_counts(length, cuts, length, cuts, case["causal"], **pairs)
    out, _ = reference.attention(*leaves, counts, **options)
    return [x[0].detach() for x in (out, *torch.autograd.grad(out, leaves, dout))]


def compare(case: object, results: Many[Tensor], expected: Many[Tensor]) -> None:
    for name, actual, expected_ in zip(("out", "dq", "dk", "dv"), results, expected, strict=False):
        off = float((actual - expected_).abs().max()) if actual.numel() else 0.0
        assert actual.shape == expected_.shape and off <= WITHIN * max(1.0, float(expected_.abs().max())), (
            f"{case}: {name}: {off}"
        )


def flash(seed: int) -> None:
    """Check one function of ring-flash-attention: separate q, k and v, `_kvpacked`, or `_qkvpacked`."""
    r = Random(seed)
    case, family = draw_case(r), r.choice([*BATCHED, *VARLEN, "llama3_flash_attn_varlen"])
    ranks, form = case["ranks"], r.choice(["", "_kvpacked", "_qkvpacked"])
    if form == "_qkvpacked":
        case["heads"] = case["kv_heads"]
    whole = [2 * ranks * r.randint(1, 9) for _ in range(1 if family in BATCHED else r.randint(1, 4))]
    cuts = [0, *accumulate(whole)]
    if family.startswith("llama3"):
        cuts = sorted({0, cuts[-1], *(r.randint(0, cuts[-1]) for _ in range(r.randint(0, 3)))})
    left, right = r.choice([(-1, -1), (-1, -1), (r.randint(0, 9), r.randint(0, 9)), (r.randint(0, 40), -1)])
    options = {"scale": r.choice([None, 0.3]), "softcap": r.choice([None, None, 2.0])}
    p, dropout_seed = draw_dropout(Random(f"dropout {seed}"))
    inputs = tensors(seed, cuts[-1], case)
    layout = {**BATCHED, **VARLEN}.get(family, "contiguous")
    pieces = [0, cuts[-1]] if family.startswith("llama3") else cuts
    case |= {"seed": seed, "family": family + form, "cuts": cuts, "window": (left, right), "p": p,
             "dropout_seed": dropout_seed, **options}  # fmt: skip

    def body(ring: Ring) -> list[Tensor]:
        rows = torch.cat([part(torch.arange(a, b), layout, ring.rank, ranks) for a, b in pairwise(pieces)])
        *leaves, dout = (x[rows].clone().requires_grad_() for x in inputs)
        lengths: tuple[Any, ...] = ()
        if family in VARLEN:
            lengths = torch.tensor([cut // ranks for cut in cuts], dtype=torch.int32), max(whole) // ranks
        elif family not in BATCHED:
            prepared = flash_attn.llama3_flash_attn_prepare_cu_seqlens(
                torch.tensor(cuts, dtype=torch.int32), case["causal"], ring.rank, ranks
            )
            lengths = (*prepared[:4], 1, prepared[4])
        function: Callable[..., Any] = getattr(flash_attn, f"{family}{form}_func")

        def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            stacked: tuple[Tensor, ...] = (q, k, v) if not form else (q, torch.stack((k, v), -3))
            if form == "_qkvpacked":
                stacked = (torch.stack((q, k, v), -3),)
            batched = [x[None] for x in stacked] if family in BATCHED else stacked
            out: Tensor = function(
                *batched, *lengths, softmax_scale=options["scale"], causal=case["causal"], window_size=(left, right),
                group=ring, softcap=options["softcap"] or 0.0, dropout_p=p, dropout_seed=dropout_seed,
            )  # fmt: skip
            return out[0] if family in BATCHED else out

        out = checkpoint(call, *leaves, use_reentrant=False) if case["again"] else call(*leaves)
        grads = torch.autograd.grad(out, leaves, dout)
        pairs = zip((inputs[0], *inputs[:3]), (out.detach(), *grads), strict=True)
        return [torch.zeros_like(x).index_copy(0, rows, y) for x, y in pairs]

    parts = run_ranks(ranks, body)
    window = (left, 0 if case["causal"] else right)
    kept = philox.kept(1, case["heads"], cuts[-1], cuts[-1], dropout_seed, p) if p else None
    expected = expected_results(inputs, cuts, case, window=window, kept=kept, **options)
    compare(case, [sum(x) for x in zip(*parts, strict=True)], expected)


def parallel(seed: int) -> None:
    """Check SDPA inside `context_parallel`, with q, k and v projected from a buffer that it shards."""
    r = Random(seed)
    case, length = draw_case(r), r.randint(1, 70)
    cuts = sorted({0, length, *(r.randint(0, length) for _ in range(r.randint(0, 3)))}) if r.random() < 0.5 else None
    features = 5
    p, dropout_seed = draw_dropout(Random(f"dropout {seed}"))
    case["again"] &= not p  # threads share the generator whose state a checkpoint saves
    x = torch.randn(length, features, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    weights = [w[:features].flatten(1) for w in tensors(seed + 1, features, case)[:3]]
    dout = tensors(seed + 2, length, case)[3]
    case |= {"seed": seed, "length": length, "cuts": cuts, "p": p, "dropout_seed": dropout_seed}

    def body(ring: Ring) -> list[Tensor]:
        buffer, local_weights = x.clone()[None], [w.clone().requires_grad_() for w in weights]

        def attend(buffer: Tensor, *local_weights: Tensor) -> Tensor:
            q, k, v = ((buffer @ w).unflatten(-1, (-1, case["dim"])).transpose(1, 2) for w in local_weights)
            return F.scaled_dot_product_attention(
                q, k, v, dropout_p=p, is_causal=case["causal"], enable_gqa=case["heads"] != case["kv_heads"]
            ).transpose(1, 2)

        sharding: dict[str, Any] = {"cu_seqlens": cuts, "dropout_seed": dropout_seed}
        with context_parallel(ring, buffers=[buffer], buffer_seq_dims=[1], **sharding) as seq:
            how = {"use_reentrant": False, "context_fn": recompute_context}
            out = checkpoint(attend, buffer, *local_weights, **how) if case["again"] else attend(buffer, *local_weights)
            grads = torch.autograd.grad(out, local_weights, seq.shard(dout[None]))
        ring.all_reduce(grads)
        assert torch.equal(buffer[0], x)  # restored
        return [seq.gather(out.detach())[0], *grads]

    leaves = [w.clone().requires_grad_() for w in weights]
    q, k, v = ((x @ w).unflatten(-1, (-1, case["dim"]))[None] for w in leaves)
    kept = philox.kept(1, case["heads"], length, length, seed_from(dropout_seed, 0), p) if p else None
    counts = reference.plain_counts(length, cuts, length, cuts, case["causal"], None)
    out, _ = reference.attention(q, k, v, counts, kept=kept)
    expected = [out[0].detach(), *torch.autograd.grad(out, leaves, dout[None])]
    for results in run_ranks(case["ranks"], body):
        compare(case, results, expected)


ALIBI: dict[str, Callable[..., Tensor]] = {
    "symmetric": lambda score, slope, q, k: score - slope * (q - k).abs(),
    "key minus query": lambda score, slope, q, k: score + slope * (k - q),
    "query minus key": lambda score, slope, q, k: score - (q - k) * slope,
    "masked": lambda score, slope, q, k: torch.where(q >= k, score - (q - k) * slope, -torch.inf),
}
"""Spellings of ALiBi in a score_mod; all except the first are valid only for keys before the query."""


def draw_slopes(r: Random, heads: int, is_behind: bool) -> tuple[list[float] | None, str]:
    """Draw slopes of ALiBi, or None, and their spelling. `is_behind`: queries attend to no later key."""
    slopes = [r.choice([0.0, 1.0, 0.5, 0.1, 2.0**-8, -0.02, 0.3]) for _ in range(heads)] if r.random() < 0.35 else None
    return slopes, r.choice([*ALIBI]) if is_behind else "symmetric"


def flex(seed: int) -> None:
    """Check flex_attention with a mask of the whole sequence.

    Also compare the reference's output with that of torch's flex_attention, which has no gradients on CPU.
    """
    r = Random(seed)
    case, length = draw_case(r), r.randint(1, 70)
    cuts = sorted({0, length, *(r.randint(0, length) for _ in range(r.randint(0, 4)))}) if r.random() < 0.6 else None
    left, right = r.choice([(None, None), (r.randint(0, 20), None), (r.randint(0, 20), r.randint(0, 5)), (None, 2)])
    right = 0 if case["causal"] else right
    documents = len(cuts or (0, 0)) - 1
    prefix = [Random(f"{seed} {n}").choice([0, 1, 3, 9]) for n in range(documents)] if seed % 3 == 0 else None
    prefix = prefix if case["causal"] and left is None else None
    scale, cap = r.choice([None, 0.3]), r.choice([None, None, 2.0])
    slopes, spelling = draw_slopes(Random(f"alibi {seed}"), case["heads"], case["causal"] and prefix is None)
    layout = r.choice(["zigzag", "contiguous", "striped", *(["per_document"] if cuts else [])])
    documents_of_ring = cuts if cuts and (layout == "per_document" or r.random() < 0.4) else None
    block, separate = r.choice([1, 7, (4, 16), 128]), r.random() < 0.7
    case |= {"seed": seed, "length": length, "cuts": cuts, "window": (left, right), "scale": scale, "softcap": cap,
             "prefix": prefix, "layout": layout, "told": documents_of_ring, "block": block, "separate": separate,
             "slopes": slopes, "spelling": spelling}  # fmt: skip
    ids = torch.bucketize(torch.arange(length), torch.tensor((cuts or [0, length])[1:]), right=True)

    def mod(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        seen = ids[q] == ids[k]
        seen = seen if left is None else seen & (q - k <= left)
        early = torch.tensor(False) if prefix is None else seen & (k - starts[k] < counts[k])
        return early | (seen if right is None else seen & (k - q <= right))

    starts = torch.tensor(cuts or [0])[ids]
    counts = torch.tensor(prefix or [0] * documents)[ids]

    of_heads = torch.tensor(slopes or [0.0], dtype=torch.float64)

    def score_mod(score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        score = score if cap is None else cap * torch.tanh(score / cap)
        return score if slopes is None else ALIBI[spelling](score, of_heads[h], q, k)

    mask = create_block_mask(
        mod, None, None, length, length, device="cpu", BLOCK_SIZE=block, separate_full_blocks=separate
    )
    inputs = tensors(seed, length, case)
    options: dict[str, Any] = {
        "score_mod": score_mod if cap or slopes else None,
        "block_mask": mask,
        "scale": scale,
        "enable_gqa": True,
    }

    def body(ring: Ring) -> list[Tensor]:
        def call(*qkv: Tensor) -> Tensor:
            out = flex_attention(*(x[None].transpose(1, 2) for x in qkv), **options)
            assert isinstance(out, Tensor)
            return out.transpose(1, 2)[0]

        return gather_results(
            ring, ring.sequence(length, layout=layout, cu_seqlens=documents_of_ring), inputs, call, case["again"]
        )

    places = reference.places(length, cuts)
    bias = None if slopes is None else reference.alibi(slopes, places, places)
    mask_text = None if prefix is None else masks.prefix(prefix).text
    expected = expected_results(
        inputs, cuts, case, window=(left, right), mask=mask_text, scale=scale, softcap=cap, bias=bias
    )
    with torch.no_grad():
        torch_out = torch_flex_attention(*(x[None].transpose(1, 2) for x in inputs[:3]), **options)
    for results in [*run_ranks(case["ranks"], body), [torch_out[0].transpose(0, 1)]]:
        compare(case, results, expected)


def gather_results(
    ring: Ring, seq: Sequence, inputs: list[Tensor], call: Callable[..., Tensor], again: bool
) -> list[Tensor]:
    """Call `call` with this rank's shards, and return the whole output and the gradients of q, k and v.

    `inputs`: q, k, v and the gradient of the output. `again`: backward recomputes the call.
    """
    *leaves, dout = (seq.shard(x, 0).clone().requires_grad_() for x in inputs)
    with ring.activate(seq):
        out = checkpoint(call, *leaves, use_reentrant=False) if again else call(*leaves)
    grads = torch.autograd.grad(out, leaves, dout)
    return [seq.gather(x.detach(), 0) for x in (out, *grads)]


@pytest.mark.parametrize("kind", [flash, parallel, pytest.param(flex, marks=pytest.mark.slow)])
def test_fresh_seeds(kind: Callable[[int], None]) -> None:
    start = session.seed_of_commit()
    print(f"RINGATTN_FUZZ_SEED={start}")
    began, seed = time.monotonic(), start
    while seed == start or time.monotonic() - began < SECONDS:
        kind(seed)
        seed += 1
