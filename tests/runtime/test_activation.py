"""A model that attends locally although a sequence is active is refused; it never gives silently wrong results."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.flex_attention import flex_attention
from torch.utils._python_dispatch import _get_current_dispatch_mode
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from ringattn import InputError, Ring, RingMultiheadAttention, UnsupportedError
from ringattn.adapters.attend import attend
from ringattn.adapters.context import attends_locally, sequence_of
from ringattn.adapters.sdpa import ring_sdpa
from ringattn.runtime.activation import Regions, enclosing_regions
from ringattn.testing import dense_attention, run_ranks
from tests.adapters.test_recomputation import DOCUMENTS, Attending, CheckpointFunction, tokens

SDPA = torch.ops.aten.scaled_dot_product_attention


@pytest.fixture(autouse=True)
def _fresh() -> None:
    torch._dynamo.reset()


def heads(tokens: int = 6) -> Tensor:
    """Return a tensor (batch, heads, tokens, head_dim) with the tokens of one rank."""
    return torch.randn(1, 2, tokens, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


def attend_locally(x: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(x, x, x, is_causal=True)


def written_out(x: Tensor) -> Tensor:
    return F.softmax(x @ x.mT, -1) @ x


def softmax_method(x: Tensor) -> Tensor:
    return (x @ x.mT).softmax(dim=-1) @ x


def whole_layer(x: Tensor) -> Tensor:
    layer = nn.MultiheadAttention(8, 2, batch_first=True, dtype=torch.float64)
    out: Tensor = layer(x[0], x[0], x[0])[0]
    return out


def without_weights(x: Tensor) -> Tensor:
    layer = nn.MultiheadAttention(8, 2, batch_first=True, dtype=torch.float64)
    out: Tensor = layer(x[0], x[0], x[0], need_weights=False)[0]
    return out


class Tower(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return attend_locally(x)


@pytest.mark.parametrize(
    ("run", "name"),
    [
        (attend_locally, "_scaled_dot_product_flash_attention_for_cpu"),
        (lambda x: SDPA(x, x, x), "_scaled_dot_product_flash_attention_for_cpu"),
        (lambda x: torch._scaled_dot_product_attention_math(x, x, x)[0], "_safe_softmax"),
        (without_weights, "_scaled_dot_product_flash_attention_for_cpu"),
        (lambda x: flex_attention(x, x, x), "flex_attention"),
        (
            torch.compile(attend_locally, backend="aot_eager", fullgraph=True),
            "_scaled_dot_product_flash_attention_for_cpu",
        ),
    ],
)
def test_a_local_attention_operator_is_refused_under_a_sequence(run: Callable[[Tensor], Tensor], name: str) -> None:
    """A call of torch's local attention is refused on all ranks, even if only one rank makes it.

    The ring stays usable.
    """

    def body(ring: Ring) -> tuple[str, str]:
        x, seq = heads(), ring.sequence(12)
        with ring.activate(None):
            run(x)  # compiles here if the code is compiled
        with pytest.raises(UnsupportedError) as raised, ring.activate(seq):
            run(x)
        with pytest.raises(InputError) as alone, ring.activate(seq):
            run(x) if ring.rank == 1 else ring_sdpa(x, x, x)
        ring.barrier()
        return str(raised.value), str(alone.value)

    for rank, (both, alone) in enumerate(run_ranks(2, body, timeout_s=20.0)):
        assert f"rank {rank}: {name} under an active sequence attends to this rank's tokens only: prepare" in both
        assert f"rank 1: {name} under an active sequence" in alone


@pytest.mark.parametrize("run", [written_out, softmax_method, whole_layer])
def test_a_model_without_ring_attention_is_noticed_at_the_end(run: Callable[[Tensor], Tensor]) -> None:
    def body(ring: Ring) -> None:
        x, seq = heads(), ring.sequence(12)
        with pytest.raises(InputError, match="a model ran inside activate and computed no attention over the ring"):
            with ring.activate(seq):
                run(x)
        with pytest.raises(ZeroDivisionError), ring.activate(seq):  # the model's own error takes precedence
            assert run(x).sum() / (1 // 0)
        with ring.activate(seq), ring.activate(None):
            run(x)
        with ring.activate(seq):
            with ring.activate(ring.sequence(12, layout="striped")):
                ring_sdpa(x, x, x)
            out = run(x)
        assert len(out)

    run_ranks(2, body, timeout_s=20.0)


@pytest.mark.parametrize("attend", [ring_sdpa, lambda q, k, v: q.new_tensor(0)])
def test_operators_are_observed_until_ring_attention_occurs(attend: Callable[..., Tensor]) -> None:
    """Torch's operators are observed, to detect local attention, until the first attention over the ring.

    In the first activation with gradients, and in the first without, they are observed throughout.
    """

    def body(ring: Ring) -> list[bool]:
        x, seq, watched = heads(), ring.sequence(12), []
        for grad in (True, True, False, False):
            with torch.set_grad_enabled(grad), ring.activate(seq):
                watched.append(_get_current_dispatch_mode() is not None)
                attend(x, x, x)
                watched.append(_get_current_dispatch_mode() is not None)
            assert _get_current_dispatch_mode() is None
        return watched

    attends_over_ring = attend is ring_sdpa
    for watched in run_ranks(2, body):
        assert watched == [True, True, True, not attends_over_ring, True, True, True, not attends_over_ring]


def test_steps_of_compiled_code_follow_each_other() -> None:
    """Steps of a compiled model over different sequences give the gradients of the model without a compiler.

    Attention is called between two compiled graphs.
    """

    def model(x: Tensor) -> Tensor:
        x = (x + 1).sin()
        return attend(sequence_of(), x, x, x, causal=True).cos()

    def body(ring: Ring) -> None:
        run = torch.compile(model, backend="eager")
        for documents in (None, [0, 5, 12], None):
            seq, gradients = ring.sequence(12, cu_seqlens=documents), []
            for called in (run, model):
                x = seq.shard(heads(12).transpose(1, 2)).requires_grad_()
                with ring.activate(seq):
                    out = called(x) * 2
                out.sum().backward()
                gradients.append(x.grad)
                assert _get_current_dispatch_mode() is None
            torch.testing.assert_close(*gradients, rtol=1e-12, atol=1e-12)

    run_ranks(2, body)


def test_local_attention_next_to_ring_attention_is_refused_in_the_first_activation() -> None:
    def body(ring: Ring) -> None:
        x = heads()
        with pytest.raises(UnsupportedError, match="under an active sequence"), ring.activate(ring.sequence(12)):
            attend_locally(ring_sdpa(x, x, x))

    run_ranks(2, body, timeout_s=20.0)


def test_attention_declared_local_runs_torchs_kernels() -> None:
    """Attention that is declared local, by `activate(None)` or by a marked module, runs torch's own kernels.

    This holds for nested declarations and in backward too. On a ring of one rank, no declaration is needed.
    """

    def body(ring: Ring) -> None:
        x, seq = heads().requires_grad_(), ring.sequence(12)
        tower = attends_locally(attends_locally(Tower()))
        expected = attend_locally(x)
        with ring.activate(seq):
            with ring.activate(None):
                assert torch.equal(attend_locally(x), expected)
                again = checkpoint(attend_locally, x, use_reentrant=False)
                with ring.activate(ring.sequence(12)), pytest.raises(UnsupportedError):
                    attend_locally(x)
            assert torch.equal(tower(x), expected)
            with pytest.raises(TypeError):
                tower()
            with pytest.raises(UnsupportedError):
                attend_locally(x)
            torch.autograd.backward(again.sum())
            assert isinstance(ring_sdpa(x, x, x), Tensor)
        assert x.grad is not None
        (grad,) = torch.autograd.grad(expected.sum(), x)
        assert torch.equal(x.grad, grad)

    run_ranks(2, body, timeout_s=20.0)
    with Ring() as alone, alone.activate(alone.sequence(6)):
        assert torch.equal(attend_locally(heads()), attend_locally(heads()))


def test_modules_of_a_ring_attend_under_a_sequence() -> None:
    """Layers that attend over the ring are not refused, although their engine calls torch's attention kernels."""

    layer = RingMultiheadAttention(8, 2).double()

    def body(ring: Ring) -> Tensor:
        seq = ring.sequence(12)
        x = torch.linspace(-1, 1, 96, dtype=torch.float64).view(1, 12, 8)
        with ring.activate(seq):
            return seq.gather(layer(seq.shard(x), seq))

    first, second, (alone,) = *run_ranks(2, body, engine="aten"), run_ranks(1, body)
    assert torch.equal(first, second)
    torch.testing.assert_close(first, alone, rtol=1e-12, atol=1e-12)


# --- regions ---------------------------------------------------------------------------------------------------------


def test_nested_regions_are_found_innermost_first_also_in_backward() -> None:
    seen: list[Regions] = []

    def inner(x: Tensor) -> Tensor:
        seen.append(enclosing_regions())
        return x.sin()

    def outer(x: Tensor) -> Any:
        return checkpoint(inner, x, use_reentrant=False)

    assert enclosing_regions() == Regions()
    CheckpointFunction.apply(outer, torch.ones(3, requires_grad=True)).sum().backward()
    forward, recomputed_outer, recomputed_inner = seen
    frame, function = forward.entered
    assert not forward.is_recomputation
    assert recomputed_outer.recomputed is function and recomputed_outer.entered != (frame,)
    (new_frame,) = recomputed_outer.entered
    assert recomputed_inner.recomputed is new_frame and recomputed_inner.entered == ()
    assert len({regions.backward for regions in seen}) == 3


def test_reentrant_checkpoints_of_torch_are_found() -> None:
    seen: list[Regions] = []

    def region(x: Tensor) -> Tensor:
        seen.append(enclosing_regions())
        return x.sin()

    checkpoint(region, torch.ones(3, requires_grad=True), use_reentrant=True).sum().backward()
    forward, recomputation = seen
    assert len(forward.entered) == 1 and recomputation.recomputed is forward.entered[0]


def test_code_that_calls_backward_is_not_part_of_a_recomputation() -> None:
    """If a checkpointed region calls backward itself, hooks of this backward pass run outside the region."""
    seen: list[Regions] = []

    def region(x: Tensor) -> Tensor:
        y = x.detach().requires_grad_()
        y.register_hook(lambda grad: seen.append(enclosing_regions()))
        torch.autograd.grad(y.sin().sum(), y)
        return x.sin()

    checkpoint(region, torch.ones(3, requires_grad=True), use_reentrant=False)
    (regions,) = seen
    assert regions.entered == () and regions.recomputed is None and regions.is_recomputation


# --- selective checkpointing -----------------------------------------------------------------------------------------


def save_products(ctx: object, op: object, *_: object, **__: object) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if op is torch.ops.aten.mul.Tensor else CheckpointPolicy.PREFER_RECOMPUTE


def save_all(ctx: object, op: object, *_: object, **__: object) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE


@pytest.mark.parametrize("engine", ["plain", "aten"])
@pytest.mark.parametrize("policy", [save_products, save_all])
def test_selective_checkpointing_recomputes_attention(policy: Callable[..., Any], engine: str) -> None:
    """Selective checkpointing of three layers recomputes attention and gives the right gradients.

    The backward pass of the last layer needs more memory, so the buffers of the other two are bound again.
    """

    def layers(x: Tensor, run: Callable[[nn.Module, Tensor], Tensor]) -> nn.ModuleList:
        modules = nn.ModuleList(Attending() for _ in range(3))
        for module in modules:
            x = run(module, x)
        x.sum().backward()
        return modules

    def body(ring: Ring) -> list[Tensor]:
        contexts = partial(create_selective_checkpoint_contexts, policy)
        seq = ring.sequence(16, cu_seqlens=DOCUMENTS[0], layout="zigzag")
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
        return dense_attention(h, h, h, causal=True, cu_seqlens=DOCUMENTS[0])[0].flatten(2).sin() + x

    expected = [weight.grad for weight in layers(tokens(), alone).parameters()]
    for grads in run_ranks(2, body, engine=engine):
        for grad, truly in zip(grads, expected, strict=True):
            torch.testing.assert_close(grad, truly, rtol=1e-12, atol=1e-12)


def test_a_refusal_inside_selective_checkpointing_keeps_its_message() -> None:
    """A refusal inside selective checkpointing keeps its message if ranks exchange it in tensors, as over gloo.

    The region has not called the operators of this exchange in forward.
    """

    def body(ring: Ring) -> None:
        agree = ring.transport.all_gather_bytes

        def by_tensors(payload: bytes) -> list[bytes]:
            torch.zeros(4, dtype=torch.uint8).bitwise_not()
            return agree(payload)

        module, options = Attending(), {"causal": True}

        def region(x: Tensor) -> Tensor:
            h = (x * module.weight)[:, :, None]
            return attend(sequence_of(), h, h, h, **options).flatten(2).sin()

        seq = ring.sequence(16, cu_seqlens=DOCUMENTS[0], layout="zigzag")
        contexts = partial(create_selective_checkpoint_contexts, save_products)
        with ring.activate(seq):
            loss = checkpoint(region, seq.shard(tokens()).requires_grad_(), use_reentrant=False, context_fn=contexts)
        ring.transport.all_gather_bytes = by_tensors  # type: ignore[method-assign]
        options["window"] = (-3, 0)
        with pytest.raises(InputError, match=r"window"):
            loss.sum().backward()

    run_ranks(2, body, timeout_s=20.0)
