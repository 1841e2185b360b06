"""In-place changes of results behave as for torch's fused scaled_dot_product_attention.

That function saves its output for backward. Its caller may change the output if autograd records nothing; otherwise
autograd's version counter raises in backward.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

from ringattn import InputError, Ring, masks
from ringattn.adapters.sdpa import ring_sdpa
from ringattn.adapters.torch_ops import ring_attention
from ringattn.testing import run_ranks
from tests.face import TOKENS, X, attend, errors

CHANGES: dict[str, Callable[[Tensor], Tensor]] = {
    "mul_": lambda out: out.mul_(2),
    "a view": lambda out: out.transpose(1, 2).mul_(2).transpose(1, 2),
    "a copy": lambda out: out.clone().mul_(2),
}
CALLS: dict[str, Callable[[Ring, Tensor], Tensor]] = {
    "attention": lambda ring, x: ring.attention(x, x, x, ring.sequence(TOKENS)),
    "lse": lambda ring, x: ring.attention(x, x, x, ring.sequence(TOKENS), return_lse=True)[1],
    "dilated": lambda ring, x: ring.dilated_attention(
        x, x, x, ring.sequence(TOKENS), segment_lengths=[12], dilation_rates=[1]
    ),
    "operator": lambda ring, x: ring_attention(x, x, x, ring.sequence(TOKENS)),
}


def sdpa(x: Tensor) -> Tensor:
    x = x.transpose(1, 2)
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        return F.scaled_dot_product_attention(x, x, x).transpose(1, 2)


def outcome_of(call: Callable[[], Any]) -> str:
    """Return "works", or "raises in backward" if autograd reports the change; otherwise the text of the error."""
    try:
        call()
    except RuntimeError as error:
        return "raises in backward" if "modified by an inplace operation" in str(error) else str(error)
    return "works"


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("call", CALLS)
def test_in_place_changes_behave_as_for_sdpa(call: str, change: str) -> None:
    changed = CHANGES[change]
    whole = X.clone().requires_grad_()
    expected = changed(sdpa(whole))
    verdict = outcome_of(lambda: expected.sum().backward())
    assert verdict == ("works" if change == "a copy" else "raises in backward")

    def body(ring: Ring) -> None:
        local = ring.sequence(TOKENS).shard(X)
        x = local.clone().requires_grad_()
        with torch.no_grad():
            out = CALLS[call](ring, local)
            before = out.clone()
            assert torch.equal(changed(out), changed(before))
        result = changed(CALLS[call](ring, x))  # raises nothing yet
        assert outcome_of(lambda: result.sum().backward()) == verdict
        assert attend(ring).isfinite().all()

    run_ranks(2, body, engine="plain")


@pytest.mark.parametrize("change", CHANGES)
def test_a_gathered_tensor_may_be_changed(change: str) -> None:
    """A gathered tensor may be changed in place, because the backward of gather does not need it."""
    whole = X.clone().requires_grad_()
    (expected,) = torch.autograd.grad(CHANGES[change](whole * 1).sum(), whole)

    def body(ring: Ring) -> None:
        seq = ring.sequence(TOKENS)
        x = seq.shard(X).requires_grad_()
        (gradient,) = torch.autograd.grad(CHANGES[change](seq.gather(x)).sum(), x)
        assert torch.equal(gradient, ring.world_size * seq.shard(expected))

    run_ranks(2, body, engine="plain")


@pytest.mark.parametrize("ranks", [1, 2])
def test_tensors_of_a_sequence_may_be_changed(ranks: int) -> None:
    """The sequence, and the plans that rings keep, do not share memory with results, and neither do the inputs."""
    ids, tree = torch.arange(TOKENS)[None], masks.tree([-1, 0, 0], [TOKENS - 5, 2, 3])

    def body(ring: Ring) -> None:
        plain, packed = ring.sequence(TOKENS, layout="contiguous"), ring.sequence(cu_seqlens=[0, 5, TOKENS])
        merged = packed.with_documents(None).with_mask(tree)
        local = plain.shard(X)

        def results() -> list[Tensor]:
            positions = [seq.positions(by_document) for seq in (plain, packed, merged) for by_document in (False, True)]
            shards = [plain.shard(X), plain.shard_labels(ids), packed.shard_labels(ids), plain.gather(local)]
            return [*positions, *shards, *merged.edges(), *ring.halo(local, plain, 3)]

        expected = [result.clone() for result in results()]
        for result in results():
            result += 1
        assert all(map(torch.equal, results(), expected))

    run_ranks(ranks, body)


def test_a_result_changed_on_one_rank_is_refused_by_all() -> None:
    def body(ring: Ring) -> None:
        x = ring.sequence(TOKENS).shard(X).requires_grad_()
        out = CALLS["attention"](ring, x)
        try:
            (out.mul_(2) if ring.rank == 1 else out).sum().backward()
        finally:
            assert attend(ring).isfinite().all()

    for error in errors(body):
        assert isinstance(error, InputError)
        assert "rank 1: " in str(error) and "modified by an inplace operation" in str(error)


@pytest.mark.parametrize("reentrant", [True, False])
def test_in_place_changes_of_a_checkpointed_call_behave_as_for_sdpa(reentrant: bool) -> None:
    def gradient(attend: Callable[..., Tensor]) -> Tensor:
        x = X.double().transpose(1, 2).clone().requires_grad_()
        out = checkpoint(attend, x, x, x, use_reentrant=reentrant)
        (out.mul_(2) if reentrant else out * 2).square().sum().backward()
        assert x.grad is not None
        return x.grad

    def body(ring: Ring) -> Tensor:
        with ring.activate(ring.sequence(TOKENS)):
            return gradient(ring_sdpa)

    torch.testing.assert_close(run_ranks(1, body)[0], gradient(F.scaled_dot_product_attention), rtol=1e-10, atol=1e-10)
