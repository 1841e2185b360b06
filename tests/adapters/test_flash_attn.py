"""The functions of ring-flash-attention: arguments, refusals, and what tests/fuzz/test_fuzz_hosts.py does not draw."""

from __future__ import annotations

import inspect
from collections.abc import Callable
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

TAIL = "dropout_p softmax_scale causal window_size alibi_slopes deterministic return_attn_probs group softcap".split()
TAIL.append("dropout_seed")
LLAMA3 = "cu_seqlens_q cu_seqlens_k max_seqlen_q max_seqlen_k heads_k_stride local_k_slice".split()
BATCHED = ("ring_flash_attn", "zigzag_ring_flash_attn", "stripe_flash_attn")
VARLEN = ("ring_flash_attn_varlen", "zigzag_ring_flash_attn_varlen", "llama3_flash_attn_varlen")


def function_named(name: str) -> Callable[..., Any]:
    function: Callable[..., Any] = getattr(flash_attn, f"{name}_func")
    return function


# --- signatures ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", [*BATCHED, *VARLEN])
def test_arguments_stand_in_the_order_of_that_package(family: str) -> None:
    middle = LLAMA3 if "llama3" in family else ["cu_seqlens", "max_seqlen"] if "varlen" in family else []
    for form, tensors in (("", ["q", "k", "v"]), ("_kvpacked", ["q", "kv"]), ("_qkvpacked", ["qkv"])):
        function = function_named(family + form)
        parameters = inspect.signature(function).parameters
        assert list(parameters) == [*tensors, *middle, *TAIL]
        assert all(parameters[name].kind is inspect.Parameter.KEYWORD_ONLY for name in TAIL[-2:])
        defaults = [parameters[name].default for name in TAIL[:4]]
        assert defaults == [0.0, None, False, (-1, -1)]
        assert function.__name__ == f"{family}{form}_func" and function.__doc__
        with pytest.raises(TypeError, match="unexpected keyword argument 'dropout'"):
            function(*[None] * (len(tensors) + len(middle)), dropout=0.0)


# --- values ----------------------------------------------------------------------------------------------------------


def inputs() -> list[Tensor]:
    """Return q, k and v, (1, 5, heads, 8)."""
    generator = torch.Generator().manual_seed(7)
    return [torch.randn(1, 5, heads, 8, dtype=torch.float64, generator=generator) for heads in (4, 2, 2)]


def test_probabilities_and_slopes() -> None:
    """`return_attn_probs` and ALiBi are exact on one rank. Fuzz tests compare one rank with several."""
    (q, k, v), cuts, slopes = inputs(), torch.tensor([0, 2, 5]), torch.linspace(0.1, 0.5, 4)
    with Ring() as ring:
        ring_result = function_named("ring_flash_attn")(q, k, v, causal=True, return_attn_probs=True, group=ring)
        flat = [x[0] for x in (q, k, v)]
        packed = function_named("ring_flash_attn_varlen")(
            *flat, cuts, 3, causal=True, return_attn_probs=True, group=ring
        )
        biased = function_named("stripe_flash_attn")(q, k, v, causal=True, alibi_slopes=slopes, group=ring)
    assert ring_result[2] is None and packed[2] is None
    mask = oracle.allowed_mask(5, 5, causal=True)
    reference, _ = oracle.attention(q, k, v, mask, 8**-0.5, bias=oracle.alibi(slopes.tolist(), 5, 5))
    torch.testing.assert_close(biased, reference, rtol=1e-12, atol=1e-12)
    for actual, true in (
        (ring_result, dense_attention(q, k, v, causal=True)),
        ([x[None] for x in packed[:2]], dense_attention(q, k, v, causal=True, cu_seqlens=[0, 2, 5])),
    ):
        for x, y in zip(actual[:2], true, strict=True):
            torch.testing.assert_close(x, y, rtol=1e-12, atol=1e-12)


def test_llama3_preparation_as_that_package_has_it() -> None:
    """The function returns the values that ring-flash-attention's function returned for these documents."""
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


# --- refusals and rings ----------------------------------------------------------------------------------------------


def test_what_is_refused() -> None:
    q = torch.zeros(1, 5, 1, 8)
    flat = q[0]
    with Ring() as ring:
        with pytest.raises(InputError, match=r"dropout_p=0\.1: pass dropout_seed=\.\.\., a number"):
            function_named("ring_flash_attn")(q, q, q, 0.1, group=ring)
        with pytest.raises(InputError, match=r"alibi_slopes must be a tensor of shape \(q_heads,\) .* alike for all"):
            function_named("ring_flash_attn")(q, q, q, alibi_slopes=torch.ones(1, 1), group=ring)
        with pytest.raises(InputError, match="cu_seqlens ends at 4, the sequence has 5 tokens"):
            function_named("ring_flash_attn_varlen")(flat, flat, flat, torch.tensor([0, 4]), 4, group=ring)
        with pytest.raises(InputError, match="must come from llama3_flash_attn_prepare_cu_seqlens"):
            function_named("llama3_flash_attn_varlen")(flat, flat, flat, None, None, 5, 5, 1, slice(0, 5), group=ring)


def test_zigzag_parts_of_odd_lengths() -> None:
    """Odd lengths are exact on one rank. Several ranks refuse them, because zigzag needs two equal chunks per rank."""
    q, k, v = inputs()
    flat, cuts = [x[0] for x in (q, k, v)], torch.tensor([0, 2, 5])
    with Ring() as ring:
        out = function_named("zigzag_ring_flash_attn")(q, k, v, causal=True, group=ring)
        assert torch.allclose(out, dense_attention(q, k, v, causal=True)[0], atol=1e-12)
        out = function_named("zigzag_ring_flash_attn_varlen")(*flat, cuts, 3, causal=True, group=ring)
        assert torch.allclose(out, dense_attention(q, k, v, causal=True, cu_seqlens=[0, 2, 5])[0][0], atol=1e-12)

    def body(ring: Ring) -> None:
        with pytest.raises(InputError, match=r"two equal chunks, got parts of \[5\] tokens"):
            function_named("zigzag_ring_flash_attn")(q, k, v, group=ring)
        with pytest.raises(InputError, match=r"two equal chunks, got parts of \[2, 3\] tokens"):
            function_named("zigzag_ring_flash_attn_varlen")(*flat, cuts, 3, group=ring)

    run_ranks(2, body, timeout_s=10.0)


@pytest.mark.parametrize("form", ["", "_kvpacked", "_qkvpacked"])
@pytest.mark.parametrize("family", ["ring_flash_attn_varlen", "zigzag_ring_flash_attn_varlen"])
def test_varlen_functions_take_no_batch_dimension(family: str, form: str) -> None:
    """If only rank 1 passes a batch dimension, the error on all ranks names the argument and its expected shape."""
    names = {"": ["q", "k", "v"], "_kvpacked": ["q", "kv"], "_qkvpacked": ["qkv"]}[form]

    def body(ring: Ring) -> None:
        shapes = [(6, *([len(name)] if len(name) > 1 else []), 1, 8) for name in names]
        tensors = [torch.zeros(1, *shape) if ring.rank else torch.zeros(shape) for shape in shapes]
        stack = f"{len(names[0])}, " if len(names[0]) > 1 else ""
        message = rf"rank 1: {family}{form}_func: {names[0]} must be \(tokens, {stack}heads, head_dim\), got \(1, 6, "
        with pytest.raises(InputError, match=message + ".*takes packed tokens without a batch dimension"):
            function_named(f"{family}{form}")(*tensors, torch.tensor([0, 2, 6]), 4, group=ring)

    run_ranks(2, body, timeout_s=10.0)


def test_other_dimensions_are_refused_by_name() -> None:
    with Ring() as ring:
        flat, stacked = torch.zeros(6, 1, 8), torch.zeros(1, 6, 3, 1, 8)
        with pytest.raises(InputError, match=r"ring_flash_attn_func: q must be \(batch, tokens, heads, head_dim\)"):
            function_named("ring_flash_attn")(flat, flat, flat, group=ring)
        with pytest.raises(
            InputError, match=r"kv must be \(batch, tokens, 2, heads, head_dim\), got \(1, 6, 3, 1, 8\)"
        ):
            function_named("ring_flash_attn_kvpacked")(flat[None], stacked, group=ring)
        with pytest.raises(InputError, match=r"k must be \(batch, tokens, heads, head_dim\), got a list"):
            function_named("ring_flash_attn")(flat[None], [1.0], flat[None], group=ring)


def test_what_one_rank_alone_gets_wrong() -> None:
    """If one rank passes wrong arguments, all ranks raise, and none waits for the deadline."""

    def body(ring: Ring) -> None:
        cuts = torch.tensor([0, 2, 6 if ring.rank else 5])
        flat, batch = torch.zeros(6, 1, 8), torch.zeros(1, 5 + ring.rank, 1, 8)
        with pytest.raises(InputError, match="cu_seqlens ends at 5"):
            function_named("ring_flash_attn_varlen")(flat, flat, flat, cuts, 4, group=ring)
        with pytest.raises(InputError, match="two equal chunks"):
            function_named("zigzag_ring_flash_attn")(batch, batch, batch, group=ring)
        with pytest.raises(InputError, match="dropout_p"):
            function_named("ring_flash_attn")(flat[None], flat[None], flat[None], 0.1 * ring.rank, group=ring)

    run_ranks(2, body, timeout_s=10.0)


def test_llama3_cuts_that_are_not_those_of_the_slice() -> None:
    flat = torch.zeros(6, 1, 8)

    def body(ring: Ring) -> None:
        prepare = flash_attn.llama3_flash_attn_prepare_cu_seqlens
        q, k, *longest, keys = prepare(torch.tensor([0, 4, 12]), True, ring.rank, 2)
        others = prepare(torch.tensor([0, 4, 12]), True, 1 - ring.rank, 2)[-1]
        for wrong in ((torch.tensor([0, 6]), torch.tensor([0, 6]), keys), (q, k, others), (q, None, keys)):
            with pytest.raises(InputError, match="are not those of this rank's part of documents"):
                function_named("llama3_flash_attn_varlen")(
                    flat, flat, flat, *wrong[:2], *longest, 1, wrong[2], causal=True, group=ring
                )

    run_ranks(2, body, timeout_s=10.0)


def test_no_group_inside_of_a_ring_of_threads() -> None:
    q = torch.ones(1, 4, 1, 8)

    def body(ring: Ring) -> None:
        with pytest.raises(InputError, match=r"group=None is a ring of this process only.*pass that ring as group"):
            function_named("ring_flash_attn")(q, q, q)
        ring.barrier()  # keep both rings open until all ranks have raised

    run_ranks(2, body, timeout_s=10.0)
    function_named("ring_flash_attn")(q, q, q)
    ring = ring_of()
    assert ring_of() is ring and ring_of(ring) is ring and ring.is_open
    close_rings()
    with pytest.raises(ClosedError):
        ring.barrier()
