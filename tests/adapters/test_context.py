"""Which sequence an adapter's call attends over: activation, the rule of local attention, recomputation in backward."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import ringattn
from ringattn import InputError, Ring, Sequence
from ringattn.adapters.attend import attend
from ringattn.adapters.context import recompute_context, sequence_of
from ringattn.testing import dense_attention, run_ranks

DOCUMENTS = [0, 3, 12, 16]
"""Cuts of 16 tokens."""


class Attending(nn.Module):
    """Attends to itself: x (batch, tokens, dim), one head."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(0.5, 1.5, 8, dtype=torch.float64))
        self.seen: list[Sequence | None] = []

    def forward(self, x: Tensor) -> Tensor:
        h = (x * self.weight)[:, :, None]
        seq = sequence_of()
        self.seen.append(seq)
        return attend(seq, h, h, h, causal=True).flatten(2).sin()


def tokens(seed: int = 0) -> Tensor:
    return torch.randn(1, 16, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def reference(x: Tensor, documents: list[int] | None = None) -> Tensor:
    """The gradient of the weight, by one process."""
    module = Attending()
    h = (x * module.weight)[:, :, None]
    dense_attention(h, h, h, causal=True, cu_seqlens=documents)[0].flatten(2).sin().sum().backward()
    assert module.weight.grad is not None
    return module.weight.grad


def summed(ring: Ring, module: nn.Module) -> Tensor:
    (grad,) = [weight.grad for weight in module.parameters()]
    assert grad is not None
    ring.all_reduce([grad])
    return grad


def checkpointed(kind: str) -> Callable[[nn.Module, Tensor], Tensor]:
    options: dict[str, Any] = {
        "reentrant": {"use_reentrant": True},
        "other": {"use_reentrant": False},
        "told": {"use_reentrant": False, "context_fn": recompute_context},
    }[kind]
    return lambda module, x: checkpoint(module, x, **options)


# --- forward ---------------------------------------------------------------------------------------------------------


def test_nothing_active_is_local_only_while_no_ring_is_shared() -> None:
    assert sequence_of() is None
    with Ring() as alone:
        assert sequence_of() is None
        with alone.activate(alone.sequence(5)) as _:
            assert sequence_of() is ringattn.active_sequence() is not None

    def body(ring: Ring) -> Sequence | None:
        with pytest.raises(InputError, match=r"no sequence is active.*ring\.activate\(seq\)"):
            sequence_of()
        with ring.activate(None):
            return sequence_of()

    assert run_ranks(2, body) == [None, None]
    assert sequence_of() is None  # those rings are closed


def test_activate_refuses_a_sequence_of_another_ring() -> None:
    with Ring() as one, Ring() as two, pytest.raises(InputError, match="activate takes a sequence of this ring"):
        one.activate(two.sequence(4))


def test_alone_every_option_is_kept() -> None:
    q, k = tokens()[:, :, None], tokens(1)[:, :, None]
    for options in ({"causal": True}, {"window": (2, 0), "causal": True}, {"scale": 0.3}, {}):
        assert torch.allclose(attend(None, q, k, k, **options), dense_attention(q, k, k, **options)[0], atol=1e-12)
    capped = attend(None, q, k, k, softcap=0.5)
    assert not torch.allclose(capped, attend(None, q, k, k), atol=1e-3)
    few = attend(None, q[:, :3], k, k)
    assert torch.allclose(few, dense_attention(q, k, k)[0][:, :3], atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_autocast_casts_alone_and_over_a_ring(dtype: torch.dtype) -> None:
    def body(ring: Ring) -> None:
        seq = ring.sequence(16)
        q = seq.shard(tokens())[:, :, None].to(dtype)
        v = q.to(torch.bfloat16 if dtype == torch.float32 else dtype)
        with torch.autocast("cpu", torch.bfloat16):
            for where in (seq, None):
                for options in ({}, {"softcap": 2.0}):  # alone that is torch's function, and a ring of one rank
                    assert attend(where, q, q, v, **options).dtype == v.dtype
            like = q.to("meta")
            assert attend(None, like, like, like).dtype == dtype  # autocast has no meta device

    run_ranks(2, body)


# --- recomputation ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["reentrant", "other", "told"])
def test_the_graph_keeps_the_sequence_of_a_region_and_frees_it(kind: str) -> None:
    def body(ring: Ring) -> Tensor:
        module, x = Attending(), ring.sequence(16, layout="zigzag").shard(tokens()).requires_grad_()
        seq = ring.sequence(16, cu_seqlens=DOCUMENTS, layout="zigzag")
        freed = weakref.ref(seq)
        with ring.activate(seq):
            loss = checkpointed(kind)(module, x).sum()
        module.seen.clear()
        del seq
        gc.collect()
        loss.backward()
        module.seen.clear()
        del loss
        gc.collect()
        assert freed() is None
        return summed(ring, module)

    for grad in run_ranks(2, body):
        torch.testing.assert_close(grad, reference(tokens(), DOCUMENTS), rtol=1e-12, atol=1e-12)


def test_local_attention_is_found_again_too() -> None:
    def body(ring: Ring) -> tuple[Tensor, list[Sequence | None]]:
        module = Attending()
        with ring.activate(None):
            loss = checkpointed("other")(module, tokens().requires_grad_()).sum()
        loss.backward()
        assert module.weight.grad is not None
        return module.weight.grad, module.seen

    for grad, seen in run_ranks(2, body):
        assert seen == [None, None]
        torch.testing.assert_close(grad, reference(tokens()), rtol=1e-12, atol=1e-12)


# --- sequences -------------------------------------------------------------------------------------------------------


def test_the_same_tokens_cut_otherwise() -> None:
    def body(ring: Ring) -> None:
        seq = ring.sequence(16, layout="striped")
        cut = seq.with_documents(DOCUMENTS)
        assert torch.equal(cut.positions(), seq.positions()) and cut.documents == tuple(DOCUMENTS) and cut != seq
        assert cut.with_documents(None) == seq and hash(cut.with_documents(None)) == hash(seq)
        with pytest.raises(InputError, match="ends at 12, the sequence has 16 tokens"):
            seq.with_documents([0, 12])

    run_ranks(2, body)
