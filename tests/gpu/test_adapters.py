"""On one GPU with one rank, adapters find the sequence in autograd's separate thread and inside compiled code.

`make gpu-first` runs the tests. Attention within documents gives other gradients than attention over all local tokens,
even on one rank. So the gradients show whether the adapter found the sequence.
"""

from __future__ import annotations

import threading
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ringattn import Ring
from ringattn.adapters.attend import attend
from ringattn.adapters.context import recompute_context, sequence_of
from ringattn.adapters.torch_ops import ring_attention
from ringattn.layers import tiled
from ringattn.testing import dense_attention

pytestmark = pytest.mark.gpu
DOCUMENTS = [0, 100, 333, 517]


class Attending(nn.Module):
    """Attention of x (batch, tokens, dim) to itself, with one head."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(0.5, 1.5, 64, dtype=torch.float64, device="cuda"))
        self.threads: list[int] = []

    def forward(self, x: Tensor) -> Tensor:
        self.threads.append(threading.get_ident())
        h = (x * self.weight)[:, :, None]
        return attend(sequence_of(), h, h, h, causal=True).flatten(2).sin()


def tokens() -> Tensor:
    x = torch.randn(2, 517, 64, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    return x.cuda().requires_grad_()


def reference() -> Tensor:
    module = Attending()
    h = (tokens() * module.weight)[:, :, None]
    dense_attention(h, h, h, causal=True, cu_seqlens=DOCUMENTS)[0].flatten(2).sin().sum().backward()
    assert module.weight.grad is not None
    return module.weight.grad


@pytest.mark.parametrize(
    "options",
    [{"use_reentrant": True}, {"use_reentrant": False}, {"use_reentrant": False, "context_fn": recompute_context}],
)
def test_recomputation_in_autograds_thread_finds_the_sequence(options: dict[str, Any]) -> None:
    module = Attending()
    with Ring() as ring:
        seq = ring.sequence(cu_seqlens=DOCUMENTS)
        with ring.activate(seq):
            loss = checkpoint(module, tokens(), **options).sum()
        loss.backward()
    first, again = module.threads
    assert first == threading.get_ident() != again  # otherwise the test shows nothing
    torch.testing.assert_close(module.weight.grad, reference(), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_compiled_attention_equals_eager_attention(backend: str, dtype: torch.dtype) -> None:
    projection = nn.Linear(64, 3 * 64, device="cuda", dtype=dtype)
    x = tokens().detach().to(dtype)

    def block(x: Tensor) -> Tensor:
        q, k, v = projection(x).unflatten(-1, (3, 4, 16)).unbind(2)
        return ring_attention(q, k, v, causal=True).flatten(2) + x

    with Ring() as ring, ring.activate(ring.sequence(cu_seqlens=DOCUMENTS)):
        results = []
        for function in (block, torch.compile(block, backend=backend, fullgraph=True)):
            projection.zero_grad()
            out = function(x)
            out.square().sum().backward()
            results.append((out, projection.weight.grad.clone()))
    bound = 2e-2 if dtype == torch.bfloat16 else 1e-5
    for eager, compiled in zip(*results, strict=True):
        assert (eager - compiled).norm() <= bound * eager.norm()


@pytest.mark.parametrize("prefetches", [True, False])
def test_inputs_on_the_host_return_unchanged(prefetches: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not prefetches:
        monkeypatch.setattr(tiled, "PREFETCH_BYTES", 0)
    layers = nn.ModuleList(nn.Linear(512, 512, device="cuda") for _ in range(12))
    x = torch.randn(16384, 512, device="cuda", requires_grad=True)

    def gradients(on_host: bool) -> list[Tensor]:
        h = x
        for layer in layers:
            with tiled.inputs_on_host() if on_host else nullcontext():
                h = checkpoint(layer, h.sin(), use_reentrant=False)
        return list(torch.autograd.grad(h.square().sum(), [x, *layers.parameters()]))

    expected = gradients(on_host=False)
    # Several passes, so that memory is used again while copies run.
    for _ in range(5):
        assert all(map(torch.equal, gradients(on_host=True), expected))
