"""What attends without a call of torch's Python function: inside of context_parallel it is redirected, or refused."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from ringattn import Ring, UnsupportedError
from ringattn.adapters.context_parallel import context_parallel, context_parallel_unshard
from ringattn.testing import run_ranks
from tests.adapters.test_sdpa import close, reference, whole


class Attends(torch.nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(x, x, x, is_causal=True)


class AttendsByDefinition(torch.nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = torch._scaled_dot_product_attention_math(x, x, x, is_causal=True)[0]
        return out


with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)  # torch.jit is, and people have its modules
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
    """On all ranks, and not in a tower; attention of a ring's own calls the same kernels."""

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
    for words, out in run_ranks(2, body, engine="aten", timeout_s=20.0):
        assert name in words and "under an active sequence attends to this rank's tokens only" in words
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
