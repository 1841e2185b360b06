"""Under torch.autocast, engines choose their own dtypes: a call returns the same bits with and without autocast."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from ringattn import Ring, RingMultiheadAttention
from ringattn.adapters.torch_ops import ring_attention
from ringattn.engine.plain import PlainEngine
from ringattn.testing import run_ranks
from tests.trial import Trial, joined, on_rank

BF16 = torch.bfloat16
TRIAL = Trial(causal=True, heads=(4, 2), sinks=True, lse=True)
CALLS = {
    "plain": ("plain", TRIAL), "default": ("auto", TRIAL),
    "default with softcap": ("auto", TRIAL._replace(softcap=1.5, window=(9, None))),
    "aten": ("aten", TRIAL._replace(dims=(16, 8), window=(9, None))),
}  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, BF16], ids=str)
@pytest.mark.parametrize("schedule", ["ring", "all_to_all"])
@pytest.mark.parametrize("name", CALLS)
def test_a_call_and_its_backward_pass(name: str, schedule: str, dtype: torch.dtype) -> None:
    engine, trial = CALLS[name]

    def body(ring: Ring, enabled: bool) -> Any:
        with torch.autocast("cpu", BF16, enabled=enabled):
            return on_rank(ring, trial, "zigzag", schedule, dtype)

    with_autocast, without_autocast = (
        joined(run_ranks(2, lambda ring, on=on: body(ring, on), engine=engine, poison=True)) for on in (True, False)
    )
    assert all(torch.equal(with_autocast[name], without_autocast[name]) for name in without_autocast)


def test_the_operator_casts_its_inputs_and_nothing_else() -> None:
    """The operator casts as scaled_dot_product_attention does; then it returns the same bits as for bfloat16 inputs."""
    x = torch.randn(1, 26, 4, 8, generator=torch.Generator().manual_seed(1))

    def body(ring: Ring, enabled: bool) -> list[Tensor]:
        seq = ring.sequence(26)
        local = [(seq.shard(x) + n).requires_grad_() for n in range(3)]
        with torch.autocast("cpu", BF16, enabled=enabled):
            out = ring_attention(*(local if enabled else (x.to(BF16) for x in local)), seq, causal=True, softcap=2.0)
            return [out, *torch.autograd.grad(out, local, seq.shard(x).to(BF16))]

    for with_autocast, without_autocast in zip(
        *(run_ranks(2, lambda ring, on=on: body(ring, on)) for on in (True, False)), strict=True
    ):
        assert with_autocast[0].dtype == BF16
        assert all(torch.equal(ours, theirs) for ours, theirs in zip(with_autocast, without_autocast, strict=True))


STAGES = ("begin", "attend", "delta", "begin_grad", "attend_grad")


def recording_engine(seen: dict[str, bool]) -> PlainEngine:
    """Return an engine that records which of its stages were called under autocast."""

    def recorded(name: str) -> Any:
        def stage(self: PlainEngine, *arguments: Any) -> Any:
            seen[name] = seen.get(name, False) or torch.is_autocast_enabled("cpu")
            return getattr(PlainEngine, name)(self, *arguments)

        return stage

    engine: PlainEngine = type("Watching", (PlainEngine,), {name: recorded(name) for name in STAGES})()
    return engine


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_layer_that_projects_while_its_keys_are_sent(ranks: int) -> None:
    """Autocast applies to the projections of the layer, but not to the attention between them."""

    def body(ring: Ring) -> tuple[dict[str, bool], torch.dtype]:
        seen: dict[str, bool] = {}
        engine = recording_engine(seen)
        ring.engine_for = lambda *_: engine  # type: ignore[method-assign]
        seq = ring.sequence(12)
        layer = RingMultiheadAttention(16, 2, causal=True, softcap=2.0)
        with torch.autocast("cpu", BF16):
            out = layer(seq.shard(torch.ones(1, 12, 16)), seq)
            out.sum().backward()
            assert torch.is_autocast_enabled("cpu")
        return seen, out.dtype

    for seen, dtype in run_ranks(ranks, body):
        assert dtype == BF16
        assert seen == dict.fromkeys(STAGES, False)
