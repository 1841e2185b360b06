"""The functions of ring-flash-attention: their arguments, their layouts, and the reference in float64."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from ringattn import InputError, Ring
from ringattn.adapters import flash_attn
from ringattn.adapters.groups import close_rings, ring_of
from ringattn.errors import ClosedError
from ringattn.testing import dense_attention, run_ranks
from tests import oracle

WORLD = 3
HEADS, KV_HEADS, DIM = 4, 2, 8
TAIL = "dropout_p softmax_scale causal window_size alibi_slopes deterministic return_attn_probs group softcap".split()
TAIL.append("dropout_seed")
LLAMA3 = "cu_seqlens_q cu_seqlens_k max_seqlen_q max_seqlen_k heads_k_stride local_k_slice".split()
VARLEN = ("ring_flash_attn_varlen", "zigzag_ring_flash_attn_varlen", "llama3_flash_attn_varlen")
CUTS = [0, 6, 18, 36]
"""Documents whose parts on three ranks are even."""

# How that package's own tests deal tokens out: dimension, rank.


def contiguous(x: Tensor, rank: int) -> Tensor:
    return x.chunk(WORLD)[rank]


def zigzag(x: Tensor, rank: int) -> Tensor:
    chunks = x.chunk(2 * WORLD)
    return torch.cat([chunks[rank], chunks[2 * WORLD - 1 - rank]])


def striped(x: Tensor, rank: int) -> Tensor:
    return x[rank::WORLD]


LAYOUTS = {"ring_flash_attn": contiguous, "zigzag_ring_flash_attn": zigzag, "stripe_flash_attn": striped}


def inputs(*shape: int) -> list[Tensor]:
    """q, k, v and a gradient of out."""
    generator = torch.Generator().manual_seed(7)
    heads = (HEADS, KV_HEADS, KV_HEADS, HEADS)
    return [torch.randn(*shape, h, DIM, dtype=torch.float64, generator=generator) for h in heads]


def told(name: str) -> Callable[..., Any]:
    function: Callable[..., Any] = getattr(flash_attn, f"{name}_func")
    return function


def check_on_ranks(
    call: Callable[..., Any], part: Callable[[Tensor, int], Tensor], dim: int, reference: dict[str, Any], **options: Any
) -> None:
    """Out, lse and gradients of `call(rank, q, k, v, ...)` on every rank against dense attention with `reference`."""
    whole = [x.requires_grad_() for x in (inputs(2, 36) if dim else inputs(36))]
    q, k, v, dout = whole
    batched = [x if dim else x[None] for x in whole]
    out, lse = dense_attention(*batched[:3], **reference)
    wanted = torch.autograd.grad(out, (q, k, v), batched[3])

    def cut(x: Tensor, rank: int) -> Tensor:
        return part(x.detach().movedim(dim, 0), rank).movedim(0, dim)

    def body(ring: Ring) -> None:
        mine = [cut(x, ring.rank).clone().requires_grad_() for x in (q, k, v)]
        o, l, none = call(ring.rank, *mine, return_attn_probs=True, group=ring, **options)
        grads = torch.autograd.grad(o, mine, cut(dout, ring.rank))
        assert none is None
        torch.testing.assert_close(o, cut(out if dim else out[0], ring.rank), rtol=1e-10, atol=1e-10)
        places = cut(lse.movedim(2, 1) if dim else lse[0].T, ring.rank)
        torch.testing.assert_close(l, places.movedim(-1, 1) if dim else places.T, rtol=1e-10, atol=1e-10)
        for found, expected in zip(grads, wanted, strict=True):
            torch.testing.assert_close(found, cut(expected, ring.rank), rtol=1e-10, atol=1e-10)

    run_ranks(WORLD, body)


# --- signatures ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", [*LAYOUTS, *VARLEN])
def test_arguments_stand_in_the_order_of_that_package(family: str) -> None:
    middle = LLAMA3 if "llama3" in family else ["cu_seqlens", "max_seqlen"] if "varlen" in family else []
    for form, tensors in (("", ["q", "k", "v"]), ("_kvpacked", ["q", "kv"]), ("_qkvpacked", ["qkv"])):
        function = told(family + form)
        parameters = inspect.signature(function).parameters
        assert list(parameters) == [*tensors, *middle, *TAIL]
        assert all(parameters[name].kind is inspect.Parameter.KEYWORD_ONLY for name in TAIL[-2:])
        defaults = [parameters[name].default for name in TAIL[:4]]
        assert defaults == [0.0, None, False, (-1, -1)]
        assert function.__name__ == f"{family}{form}_func" and function.__doc__
        with pytest.raises(TypeError, match="unexpected keyword argument 'dropout'"):
            function(*[None] * (len(tensors) + len(middle)), dropout=0.0)


# --- values ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", LAYOUTS)
@pytest.mark.parametrize(
    ("options", "reference"),
    [
        ({"causal": True}, {"causal": True}),
        ({"softmax_scale": 0.3}, {"scale": 0.3}),
        ({"causal": True, "window_size": (5, 3)}, {"causal": True, "window": (5, 0)}),
        ({"window_size": (4, 2)}, {"window": (4, 2)}),
    ],
)
def test_batches(family: str, options: dict[str, Any], reference: dict[str, Any]) -> None:
    def call(rank: int, *args: Any, **kwargs: Any) -> Any:
        return told(family)(*args, **kwargs)

    check_on_ranks(call, LAYOUTS[family], 1, reference, **options)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("family", ["ring_flash_attn", "zigzag_ring_flash_attn"])
def test_documents_that_are_each_cut(family: str, causal: bool) -> None:
    local = torch.tensor(CUTS) // WORLD

    def part(x: Tensor, rank: int) -> Tensor:
        return torch.cat([LAYOUTS[family](x[a:b], rank) for a, b in pairwise(CUTS)])

    def call(rank: int, q: Tensor, k: Tensor, v: Tensor, **kwargs: Any) -> Any:
        return told(f"{family}_varlen_kvpacked")(q, torch.stack([k, v], 1), local, 6, 0.0, None, causal, **kwargs)

    check_on_ranks(call, part, 0, {"causal": causal, "cu_seqlens": CUTS})


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("cuts", [[0, 6, 18, 36], [0, 36], [0, 12, 13, 24, 36]])
def test_llama3_documents_that_ranks_cut(cuts: list[int], causal: bool) -> None:
    def call(rank: int, q: Tensor, k: Tensor, v: Tensor, **kwargs: Any) -> Any:
        prepared = flash_attn.llama3_flash_attn_prepare_cu_seqlens(torch.tensor(cuts), causal, rank, WORLD)
        *facts, where = prepared
        return told("llama3_flash_attn_varlen")(q, k, v, *facts, 1, where, causal=causal, **kwargs)

    check_on_ranks(call, contiguous, 0, {"causal": causal, "cu_seqlens": cuts})


def test_llama3_preparation_as_that_package_has_it() -> None:
    """Values written down from its own function, run on these documents."""
    cuts = torch.tensor([0, 5, 14, 24], dtype=torch.int32)
    expected = {
        (True, 0): ([0, 5, 8], [0, 5, 8], 5, 5, 0, 8),
        (True, 1): ([0, 6, 8], [0, 9, 11], 6, 9, 5, 16),
        (True, 2): ([0, 8], [0, 10], 8, 10, 14, 24),
        (False, 0): ([0, 5, 8], [0, 5, 14], 5, 9, 0, 14),
        (False, 1): ([0, 6, 8], [0, 9, 19], 6, 10, 5, 24),
        (False, 2): ([0, 8], [0, 10], 8, 10, 14, 24),
    }
    for (causal, rank), facts in expected.items():
        q, k, longest_q, longest_k, keys = flash_attn.llama3_flash_attn_prepare_cu_seqlens(cuts, causal, rank, 3)
        assert (q.tolist(), k.tolist(), longest_q, longest_k, keys.start, keys.stop) == facts
        assert q.dtype == k.dtype == torch.int32
    with pytest.raises(InputError, match="24 tokens do not divide by 5 ranks"):
        flash_attn.llama3_flash_attn_prepare_cu_seqlens(cuts, True, 0, 5)


def test_stacked_tensors_alone() -> None:
    q, _, _, _ = inputs(2, 6)
    qkv = torch.stack([q, q + 1, q - 1], 2)
    alone = told("stripe_flash_attn_qkvpacked")(qkv, causal=True)
    assert torch.allclose(alone, dense_attention(q, q + 1, q - 1, causal=True)[0], atol=1e-12)
    capped = told("stripe_flash_attn")(q, q + 1, q - 1, causal=True, softcap=0.5)
    assert not torch.allclose(alone, capped, atol=1e-3)
    slopes = torch.linspace(0.1, 0.5, q.shape[2])
    biased = told("stripe_flash_attn")(q, q + 1, q - 1, causal=True, alibi_slopes=slopes)
    mask = oracle.allowed_mask(q.shape[1], q.shape[1], causal=True)
    scale, bias = q.shape[3] ** -0.5, oracle.alibi(slopes.tolist(), q.shape[1], q.shape[1])
    wanted, _ = oracle.attention(q, q + 1, q - 1, mask, scale, bias=bias)
    assert torch.allclose(biased, wanted, atol=1e-12)
    close_rings()


# --- refusals and rings ----------------------------------------------------------------------------------------------


def test_what_is_refused() -> None:
    q = torch.zeros(1, 5, 1, 8)
    flat = q[0]
    with Ring() as ring:
        with pytest.raises(InputError, match=r"dropout_p=0\.1: pass dropout_seed=\.\.\., a number"):
            told("ring_flash_attn")(q, q, q, 0.1, group=ring)
        with pytest.raises(InputError, match=r"alibi_slopes must be a tensor of shape \(q_heads,\) .* alike for all"):
            told("ring_flash_attn")(q, q, q, alibi_slopes=torch.ones(1, 1), group=ring)
        with pytest.raises(InputError, match="cu_seqlens ends at 4, the sequence has 5 tokens"):
            told("ring_flash_attn_varlen")(flat, flat, flat, torch.tensor([0, 4]), 4, group=ring)
        with pytest.raises(InputError, match="must come from llama3_flash_attn_prepare_cu_seqlens"):
            told("llama3_flash_attn_varlen")(flat, flat, flat, None, None, 5, 5, 1, slice(0, 5), group=ring)


def test_zigzag_parts_of_odd_lengths() -> None:
    """One rank has them whole; several cannot cut them into two equal chunks."""
    q, k, v, _ = inputs(1, 5)
    flat, cuts = [x[0] for x in (q, k, v)], torch.tensor([0, 2, 5])
    with Ring() as ring:
        out = told("zigzag_ring_flash_attn")(q, k, v, causal=True, group=ring)
        assert torch.allclose(out, dense_attention(q, k, v, causal=True)[0], atol=1e-12)
        out = told("zigzag_ring_flash_attn_varlen")(*flat, cuts, 3, causal=True, group=ring)
        assert torch.allclose(out, dense_attention(q, k, v, causal=True, cu_seqlens=[0, 2, 5])[0][0], atol=1e-12)

    def body(ring: Ring) -> None:
        with pytest.raises(InputError, match=r"two equal chunks, got parts of \[5\] tokens"):
            told("zigzag_ring_flash_attn")(q, k, v, group=ring)
        with pytest.raises(InputError, match=r"two equal chunks, got parts of \[2, 3\] tokens"):
            told("zigzag_ring_flash_attn_varlen")(*flat, cuts, 3, group=ring)

    run_ranks(2, body, timeout_s=10.0)


@pytest.mark.parametrize("form", ["", "_kvpacked", "_qkvpacked"])
@pytest.mark.parametrize("family", ["ring_flash_attn_varlen", "zigzag_ring_flash_attn_varlen"])
def test_varlen_functions_take_no_batch_dimension(family: str, form: str) -> None:
    """Rank 1 alone has one; the message names the argument and what it must be, on all ranks."""
    names = {"": ["q", "k", "v"], "_kvpacked": ["q", "kv"], "_qkvpacked": ["qkv"]}[form]

    def body(ring: Ring) -> None:
        shapes = [(6, *([len(name)] if len(name) > 1 else []), 1, 8) for name in names]
        tensors = [torch.zeros(1, *shape) if ring.rank else torch.zeros(shape) for shape in shapes]
        stack = f"{len(names[0])}, " if len(names[0]) > 1 else ""
        message = rf"rank 1: {family}{form}_func: {names[0]} must be \(tokens, {stack}heads, head_dim\), got \(1, 6, "
        with pytest.raises(InputError, match=message + ".*takes packed tokens without a batch dimension"):
            told(f"{family}{form}")(*tensors, torch.tensor([0, 2, 6]), 4, group=ring)

    run_ranks(2, body, timeout_s=10.0)


def test_other_dimensions_are_refused_by_name() -> None:
    with Ring() as ring:
        flat, stacked = torch.zeros(6, 1, 8), torch.zeros(1, 6, 3, 1, 8)
        with pytest.raises(InputError, match=r"ring_flash_attn_func: q must be \(batch, tokens, heads, head_dim\)"):
            told("ring_flash_attn")(flat, flat, flat, group=ring)
        with pytest.raises(
            InputError, match=r"kv must be \(batch, tokens, 2, heads, head_dim\), got \(1, 6, 3, 1, 8\)"
        ):
            told("ring_flash_attn_kvpacked")(flat[None], stacked, group=ring)
        with pytest.raises(InputError, match=r"k must be \(batch, tokens, heads, head_dim\), got a list"):
            told("ring_flash_attn")(flat[None], [1.0], flat[None], group=ring)


def test_what_one_rank_alone_gets_wrong() -> None:
    """All ranks raise, none waits for the deadline."""

    def body(ring: Ring) -> None:
        cuts = torch.tensor([0, 2, 6 if ring.rank else 5])
        flat, batch = torch.zeros(6, 1, 8), torch.zeros(1, 5 + ring.rank, 1, 8)
        with pytest.raises(InputError, match="cu_seqlens ends at 5"):
            told("ring_flash_attn_varlen")(flat, flat, flat, cuts, 4, group=ring)
        with pytest.raises(InputError, match="two equal chunks"):
            told("zigzag_ring_flash_attn")(batch, batch, batch, group=ring)
        with pytest.raises(InputError, match="dropout_p"):
            told("ring_flash_attn")(flat[None], flat[None], flat[None], 0.1 * ring.rank, group=ring)

    run_ranks(2, body, timeout_s=10.0)


def test_llama3_cuts_that_are_not_those_of_the_slice() -> None:
    flat = torch.zeros(6, 1, 8)

    def body(ring: Ring) -> None:
        prepare = flash_attn.llama3_flash_attn_prepare_cu_seqlens
        q, k, *longest, keys = prepare(torch.tensor([0, 4, 12]), True, ring.rank, 2)
        others = prepare(torch.tensor([0, 4, 12]), True, 1 - ring.rank, 2)[-1]
        for wrong in ((torch.tensor([0, 6]), torch.tensor([0, 6]), keys), (q, k, others), (q, None, keys)):
            with pytest.raises(InputError, match="are not those of this rank's part of documents"):
                told("llama3_flash_attn_varlen")(
                    flat, flat, flat, *wrong[:2], *longest, 1, wrong[2], causal=True, group=ring
                )

    run_ranks(2, body, timeout_s=10.0)


def test_no_group_inside_of_a_ring_of_threads() -> None:
    q = torch.ones(1, 4, 1, 8)

    def body(ring: Ring) -> None:
        with pytest.raises(InputError, match=r"group=None is this process alone here.*pass that ring as group"):
            told("ring_flash_attn")(q, q, q)
        ring.barrier()  # open until all have asked

    run_ranks(2, body, timeout_s=10.0)
    close_rings()


def test_a_ring_is_opened_once_and_closed_when_told() -> None:
    q = torch.ones(1, 4, 1, 8)
    told("ring_flash_attn")(q, q, q)
    ring = ring_of()
    assert ring_of() is ring and ring_of(ring) is ring and ring.is_open
    close_rings()
    with pytest.raises(ClosedError):
        ring.barrier()
    assert ring_of() is not ring
    close_rings()
