"""Attention inside of torch's selective checkpointing is one step, computed again, and refused in our own words."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from ringattn import InputError, Ring
from ringattn.adapters.attend import attend
from ringattn.adapters.context import sequence_of
from ringattn.testing import dense_attention, run_ranks
from tests.adapters.test_context import DOCUMENTS, Attending, tokens


def saves_products(ctx: object, op: object, *_: object, **__: object) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if op is torch.ops.aten.mul.Tensor else CheckpointPolicy.PREFER_RECOMPUTE


def saves_all(ctx: object, op: object, *_: object, **__: object) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE


@pytest.mark.parametrize("engine", ["plain", "aten"])
@pytest.mark.parametrize("policy", [saves_products, saves_all])
def test_selective_checkpointing_computes_attention_again(policy: Callable[..., Any], engine: str) -> None:
    """Three regions: the backward pass of the last needs more memory, so that the others' buffers are bound again."""

    def layers(x: Tensor, run: Callable[[nn.Module, Tensor], Tensor]) -> nn.ModuleList:
        modules = nn.ModuleList(Attending() for _ in range(3))
        for module in modules:
            x = run(module, x)
        x.sum().backward()
        return modules

    def body(ring: Ring) -> list[Tensor]:
        contexts = partial(create_selective_checkpoint_contexts, policy)
        seq = ring.sequence(16, cu_seqlens=DOCUMENTS, layout="zigzag")
        with ring.activate(seq):
            modules = layers(
                seq.shard(tokens()).requires_grad_(),
                lambda module, x: checkpoint(module, x, use_reentrant=False, context_fn=contexts),
            )
        grads = [weight.grad for weight in modules.parameters() if weight.grad is not None]
        ring.all_reduce(grads)
        return grads

    def alone(module: Any, x: Tensor) -> Tensor:
        h = (x * module.weight)[:, :, None]
        return dense_attention(h, h, h, causal=True, cu_seqlens=DOCUMENTS)[0].flatten(2).sin()

    expected = [weight.grad for weight in layers(tokens(), alone).parameters()]
    for grads in run_ranks(2, body, engine=engine):
        for grad, truly in zip(grads, expected, strict=True):
            torch.testing.assert_close(grad, truly, rtol=1e-12, atol=1e-12)


def test_a_refusal_inside_selective_checkpointing_keeps_its_message() -> None:
    """Ranks exchange the refusal in tensors, as over gloo, whose operators the region has not called in forward."""

    def body(ring: Ring) -> None:
        agree = ring.transport.all_gather_bytes

        def by_tensors(payload: bytes) -> list[bytes]:
            torch.zeros(4, dtype=torch.uint8).bitwise_not()
            return agree(payload)

        module, options = Attending(), {"causal": True}

        def region(x: Tensor) -> Tensor:
            h = (x * module.weight)[:, :, None]
            return attend(sequence_of(), h, h, h, **options).flatten(2).sin()

        seq = ring.sequence(16, cu_seqlens=DOCUMENTS, layout="zigzag")
        contexts = partial(create_selective_checkpoint_contexts, saves_products)
        with ring.activate(seq):
            loss = checkpoint(region, seq.shard(tokens()).requires_grad_(), use_reentrant=False, context_fn=contexts)
        ring.transport.all_gather_bytes = by_tensors  # type: ignore[method-assign]
        options["window"] = (-3, 0)
        with pytest.raises(InputError, match=r"window"):
            loss.sum().backward()

    run_ranks(2, body, timeout_s=20.0)
