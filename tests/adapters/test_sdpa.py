"""SDPA over a ring: `ring_sdpa`, and torch's SDPA inside the drop-in for torch's context_parallel."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask
from torch.utils.checkpoint import CheckpointError, checkpoint

from ringattn import InputError, Ring, UnsupportedError
from ringattn.adapters.context_parallel import context_parallel, context_parallel_unshard, recompute_context
from ringattn.adapters.sdpa import ring_sdpa
from ringattn.testing import dense_attention, run_ranks

TOKENS = 13
DOCUMENTS = [0, 5, 13]


def whole(seed: int, heads: int = 4, tokens: int = TOKENS) -> Tensor:
    """Return a random tensor (batch, heads, tokens, head_dim), the same on every rank."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(2, heads, tokens, 8, dtype=torch.float64, generator=generator)


def reference(*qkv: Tensor, **options: Any) -> Tensor:
    return dense_attention(*(x.transpose(1, 2) for x in qkv), **options)[0].transpose(1, 2)


def close(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=1e-11, atol=1e-11)


# --- ring_sdpa -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shapes", "options", "error", "message"),
    [
        ([4, 4], {"attn_mask": torch.ones(6, 6, dtype=torch.bool)}, UnsupportedError, "attn_mask: .*cu_seqlens"),
        ([4, 4], {"dropout_p": 0.1}, InputError, r"dropout_p=0\.1, and .* no dropout_seed"),
        ([4, 2], {}, InputError, "4 heads and key has 2; pass enable_gqa"),
        ([4, 3], {"enable_gqa": True}, InputError, "4 query heads are not a multiple of 3"),
    ],
)
def test_sdpa_refuses_by_name(shapes: list[int], options: Any, error: type[Exception], message: str) -> None:
    def body(ring: Ring) -> None:
        q, k = (whole(0, heads, 6) for heads in shapes)
        with ring.activate(ring.sequence(12)):
            with pytest.raises(error, match=message):
                ring_sdpa(q, k, k, **options)
            with pytest.raises(UnsupportedError, match=r"6 queries and 5 keys on this rank: .*kv_seq"):
                ring_sdpa(q, q[:, :, 1:], q[:, :, 1:])
            with pytest.raises(UnsupportedError, match=r"must be \(batch, heads, tokens, head_dim\)"):
                ring_sdpa(q[0], q[0], q[0])
        with pytest.raises(InputError, match="no sequence is active"):
            ring_sdpa(q, k, k, **options)

    run_ranks(2, body)


def test_local_attention_is_torchs_own() -> None:
    def body(ring: Ring) -> None:
        q, mask = whole(0), torch.rand(TOKENS, TOKENS) > 0.3
        with ring.activate(None):
            close(ring_sdpa(q, q[0], q[0], mask), F.scaled_dot_product_attention(q, q[0], q[0], mask))
            assert ring_sdpa(q, q, q, dropout_p=0.9999).count_nonzero() < q.numel() / 2

    run_ranks(2, body)


# --- context_parallel ------------------------------------------------------------------------------------------------


def test_context_parallel_shards_redirects_and_restores() -> None:
    def body(ring: Ring) -> tuple[Tensor, Tensor, Tensor]:
        x, positions, left = whole(0), torch.arange(TOKENS), torch.arange(2 * TOKENS).view(TOKENS, 2).clone()
        view, place = x[0], x.data_ptr()
        memory = weakref.ref(left.untyped_storage())
        with context_parallel(
            ring,
            buffers=[x, positions, left],
            buffer_seq_dims=[2, -1, 0],
            no_restore_buffers={left},
            cu_seqlens=DOCUMENTS,
        ) as seq:
            assert x.shape[2] == seq.counts[ring.rank] < TOKENS
            assert memory() is None  # the memory of a buffer that is not restored is freed
            assert torch.equal(positions, seq.positions()) and torch.equal(left[:, 0], 2 * positions)
            q = x.clone().requires_grad_()
            out = F.scaled_dot_product_attention(q, q, q, is_causal=True)
            out.sin().sum().backward()
            assert q.grad is not None
            gathered = context_parallel_unshard(ring, [out, q.grad], [2, 2])
        assert torch.equal(x, whole(0)) and x.data_ptr() == place and torch.equal(view, x[0])
        assert torch.equal(positions, torch.arange(TOKENS)) and len(left) == seq.counts[ring.rank]
        (after,) = context_parallel_unshard(ring, [out], [2], seq)
        local = F.scaled_dot_product_attention(x, x, x, is_causal=True)  # SDPA is torch's again
        close(local, reference(x, x, x, causal=True))
        return gathered[0], gathered[1], after

    x = whole(0).requires_grad_()
    expected = reference(x, x, x, causal=True, cu_seqlens=DOCUMENTS)
    expected.sin().sum().backward()
    assert x.grad is not None
    for out, grad, after in run_ranks(2, body):
        close(out, expected.detach())
        close(grad, x.grad)
        assert torch.equal(out, after) and not out.requires_grad


def test_unshard_outside_takes_the_last_sequence() -> None:
    """Outside of the context, unshard uses the last sequence, even if an earlier one had equal tokens per rank."""

    def body(ring: Ring) -> Tensor:
        x = whole(0)
        with pytest.raises(InputError, match="nothing was sharded on this mesh yet"):
            context_parallel_unshard(ring, [x], [2])
        with context_parallel(ring, buffers=[x], buffer_seq_dims=[2]) as zigzag:
            pass
        with context_parallel(ring, buffers=[x], buffer_seq_dims=[2], cu_seqlens=DOCUMENTS) as seq:
            assert seq.counts == zigzag.counts and not torch.equal(seq.positions(), zigzag.positions())
            out = F.scaled_dot_product_attention(x, x, x)
        with pytest.raises(InputError, match="load_balancer must be the sequence"):
            context_parallel_unshard(ring, [out], [2], "headtail")  # type: ignore[arg-type]
        return context_parallel_unshard(ring, [out], [2])[0]

    for out in run_ranks(3, body):
        close(out, reference(*[whole(0)] * 3, cu_seqlens=DOCUMENTS))


def attend(x: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(x.sin(), x, x, is_causal=True)


def test_checkpointed_regions_attend_over_the_ring_again_or_raise() -> None:
    def body(ring: Ring) -> tuple[list[Tensor], int]:
        x, results = whole(0), []
        for late in (False, True):
            q = whole(0).requires_grad_()
            with context_parallel(ring, buffers=[x], buffer_seq_dims=[2]) as seq:
                shard = seq.shard(q, 2)
                total = checkpoint(attend, shard, use_reentrant=False, context_fn=recompute_context).sin().sum()
                silent = checkpoint(attend, x.clone().requires_grad_(), use_reentrant=False).sum()
                with pytest.raises(UnsupportedError, match="under no_grad inside context_parallel"):
                    checkpoint(attend, q, use_reentrant=True)
                if not late:
                    total.backward()
                    with pytest.raises(CheckpointError):
                        silent.backward()
            if late:
                total.backward()
                with pytest.raises(CheckpointError):
                    silent.backward()
            assert q.grad is not None
            results.append(q.grad)
        passes = ring.counters()["passes"]
        with torch.no_grad(), context_parallel(ring, buffers=[x], buffer_seq_dims=[2]):
            attend(x)
        ring.all_reduce(results)
        return results, passes

    x = whole(0).requires_grad_()
    reference(x.sin(), x, x, causal=True).sin().sum().backward()
    assert x.grad is not None
    for grads, passes in run_ranks(2, body):
        for grad in grads:
            close(grad, x.grad)
        assert passes == 2 * (3 + 1)


@pytest.mark.parametrize("training", [True, False])
def test_layers_that_attend_by_themselves_are_refused(training: bool) -> None:
    """Both paths of torch's layers are refused. In evaluation, torch runs a whole layer by a fused operator."""
    layer = torch.nn.TransformerEncoderLayer(8, 2, dropout=0.0, batch_first=True).train(training)
    x = torch.zeros(1, TOKENS, 8)
    for module, arguments in ((layer, (x,)), (layer.self_attn, (x, x, x))):
        with Ring() as ring, torch.set_grad_enabled(training), context_parallel(ring, buffers=[x], buffer_seq_dims=[1]):
            with pytest.raises(UnsupportedError, match="would attend locally; use"):
                module(*arguments)


def test_compiled_code_inside_is_one_graph() -> None:
    def body(ring: Ring) -> Tensor:
        x, run = whole(0), torch.compile(attend, backend="aot_eager", fullgraph=True)
        close(run(x), reference(x.sin(), x, x, causal=True))  # outside of the context, SDPA is torch's
        with context_parallel(ring, buffers=[x], buffer_seq_dims=[2]):
            return context_parallel_unshard(ring, [run(x)], [2])[0]

    torch._dynamo.reset()
    x = whole(0)
    for out in run_ranks(2, body):
        close(out, reference(x.sin(), x, x, causal=True))


def refusals() -> list[tuple[Callable[[], dict[str, Any]], str]]:
    def mask(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return q >= k

    x = torch.zeros(TOKENS, 2)
    return [
        (lambda: {"buffers": [], "buffer_seq_dims": []}, "at least one buffer"),
        (lambda: {"buffers": [x], "buffer_seq_dims": []}, "1 buffers and 0 buffer_seq_dims"),
        (lambda: {"buffers": [x], "buffer_seq_dims": [0], "no_restore_buffers": {x.clone()}}, "not in buffers"),
        (lambda: {"buffers": [x, x[1:].clone()], "buffer_seq_dims": [0, 0]}, "12 tokens in dimension 0"),
        (lambda: {"buffers": [x.clone().requires_grad_()], "buffer_seq_dims": [0]}, "requires a gradient"),
        (
            lambda: {"buffers": [x, create_block_mask(mask, 1, 1, 8, 8, device="cpu")], "buffer_seq_dims": [0, 0]},
            "buffer 1 is a BlockMask",
        ),
    ]


@pytest.mark.parametrize(("make", "message"), refusals())
def test_buffers_are_refused_before_anything_changes(make: Callable[[], dict[str, Any]], message: str) -> None:
    with Ring() as ring:
        options = make()
        with pytest.raises(InputError, match=message), context_parallel(ring, **options):
            pass
        assert all(len(buffer) == TOKENS for buffer in options["buffers"][:1])


# --- autocast --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_autocast_casts_like_sdpa(compiled: bool) -> None:
    """Out and gradients have the dtypes of torch's SDPA, also if q and k are float32 and v is bfloat16.

    Rotary embeddings in float32 produce such inputs. float64 is kept.
    """
    rotary, single, double = [torch.float32] * 2 + [torch.bfloat16], [torch.float32] * 3, [torch.float64] * 3
    torch._dynamo.reset()
    run = torch.compile(ring_sdpa, backend="aot_eager", fullgraph=True) if compiled else ring_sdpa
    for dtypes in (rotary, single, double):
        tensors = [whole(seed).to(dtype) for seed, dtype in enumerate(dtypes)]
        alone = [x.clone().requires_grad_() for x in tensors]
        with torch.autocast("cpu", torch.bfloat16):
            expected = F.scaled_dot_product_attention(*alone, is_causal=True)
        expected.sin().sum().backward()

        def body(ring: Ring, tensors: list[Tensor] = tensors) -> list[Tensor]:
            seq = ring.sequence(TOKENS)
            shards = [seq.shard(x, 2).requires_grad_() for x in tensors]
            with ring.activate(seq), torch.autocast("cpu", torch.bfloat16):
                out = run(*shards, is_causal=True)
            out.sin().sum().backward()
            return [seq.gather(x, 2) for x in (out.detach(), *(x.grad for x in shards if x.grad is not None))]

        bound = 1e-11 if dtypes is double else 0.05
        for actual in run_ranks(2, body):
            for x, y in zip(actual, (expected.detach(), *(x.grad for x in alone)), strict=True):
                assert y is not None
                torch.testing.assert_close(x, y, rtol=bound, atol=bound)  # also compares dtypes


# --- other ways to attend --------------------------------------------------------------------------------------------


class Attends(torch.nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(x, x, x, is_causal=True)


class AttendsByDefinition(torch.nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = torch._scaled_dot_product_attention_math(x, x, x, is_causal=True)[0]
        return out


with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)  # torch.jit is deprecated, but users have scripted modules
    scripted, traced = torch.jit.script(Attends()), torch.jit.trace(AttendsByDefinition(), (whole(0),))

aten = torch.ops.aten


@pytest.mark.parametrize(
    "run",
    [
        lambda x: aten.scaled_dot_product_attention(x, x, x, is_causal=True),
        lambda x: aten.scaled_dot_product_attention.default(x, x, x, None, 0.0, True),
    ],
)
def test_the_operator_by_its_name_attends_over_the_ring(run: Callable[[Tensor], Tensor]) -> None:
    def body(ring: Ring) -> Tensor:
        x = whole(0)
        with context_parallel(ring, buffers=[x], buffer_seq_dims=[2]):
            return context_parallel_unshard(ring, [run(x)], [2])[0]

    x = whole(0)
    for out in run_ranks(2, body):
        close(out, reference(x, x, x, causal=True))


@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize(
    ("run", "name"),
    [
        (scripted, "_scaled_dot_product_flash_attention_for_cpu"),
        (traced, "_safe_softmax"),
        (lambda x: aten._scaled_dot_product_flash_attention_for_cpu(x, x, x, 0.0, True)[0], "flash_attention_for_cpu"),
        (AttendsByDefinition(), "_safe_softmax"),
        (lambda x: aten._scaled_dot_product_attention_math(x, x, x)[0], "_safe_softmax"),
    ],
)
def test_kernels_and_scripts_are_refused_inside(run: Callable[[Tensor], Tensor], name: str, grad: bool) -> None:
    """Kernels and scripts are refused on all ranks, but not under `activate(None)`.

    `Ring.attention` may call the same kernels.
    """

    def body(ring: Ring) -> tuple[str, Tensor]:
        x, alone = whole(0), run(whole(0))
        with pytest.raises(UnsupportedError) as raised, torch.set_grad_enabled(grad):
            with context_parallel(ring, buffers=[x], buffer_seq_dims=[2]):
                run(x)
        with torch.set_grad_enabled(grad), context_parallel(ring, buffers=[x], buffer_seq_dims=[2]) as seq:
            with ring.activate(None):
                assert torch.equal(run(whole(0)), alone)
            rows = x.transpose(1, 2).clone().requires_grad_(grad)
            out = ring.attention(rows, rows, rows, seq, causal=True)
            if grad:
                out.sum().backward()
        return str(raised.value), seq.gather(out.detach()).transpose(1, 2)

    x = whole(0)
    for message, out in run_ranks(2, body, engine="aten", timeout_s=20.0):
        assert name in message and "under an active sequence attends to this rank's tokens only" in message
        close(out, reference(x, x, x, causal=True))


def test_an_exported_module_attends_over_the_ring() -> None:
    def body(ring: Ring) -> Tensor:
        x = whole(0, tokens=12)
        with context_parallel(ring, buffers=[x], buffer_seq_dims=[2]):
            return context_parallel_unshard(ring, [programs[ring.rank](x)], [2])[0]

    programs = [torch.export.export(Attends(), (whole(0, tokens=6),)).module() for _ in range(2)]
    x = whole(0, tokens=12)
    for out in run_ranks(2, body):
        close(out, reference(x, x, x, causal=True))
