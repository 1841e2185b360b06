"""Models with latent attention (MLA): latents travel where the model expands them plainly, with the same results."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ringattn.adapters.transformers import prepare, register
from ringattn.ring import Ring
from ringattn.testing import run_ranks
from tests.adapters.models import tiny_model

IDS = torch.arange(48).view(2, 24) % 64


class Doubled(nn.Linear):
    """A projection that is not a plain linear layer."""

    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


def doubled(model: Any) -> Any:
    for layer in model.model.layers:
        layer.self_attn.kv_b_proj.__class__ = Doubled
    return model


def reloaded(model: Any) -> Any:
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    return prepare(torch.load(buffer, weights_only=False))


@pytest.mark.parametrize(
    ("change", "prepared", "latent_calls"),
    [
        (lambda model: model, lambda model: model, 2),
        (lambda model: model, copy.deepcopy, 2),
        (lambda model: model, reloaded, 2),
        (doubled, lambda model: model, 0),
    ],
    ids=["plain", "copied", "reloaded", "other projection"],
)
def test_latents_travel_if_the_model_expands_them_plainly(
    change: Callable[[Any], Any],
    prepared: Callable[[Any], Any],
    latent_calls: int,
    monkeypatch: pytest.MonkeyPatch,
):
    register()
    calls: list[int] = []
    attention = Ring.latent_attention
    monkeypatch.setattr(
        Ring, "latent_attention", lambda self, *args, **options: calls.append(1) or attention(self, *args, **options)
    )
    model = change(tiny_model("deepseek_v3", "eager"))
    logits = model(input_ids=IDS).logits
    logits.square().mean().backward()
    expected = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]

    def body(ring: Ring) -> tuple[Tensor, Tensor, list[Tensor]]:
        model = prepared(prepare(change(tiny_model("deepseek_v3", "ringattn"))))
        seq = ring.sequence(24, layout="zigzag")
        with ring.activate(None), torch.no_grad():
            local = model(input_ids=IDS).logits
        with ring.activate(seq):
            out = model(input_ids=seq.shard(IDS), position_ids=seq.positions()[None]).logits
            (out.square().sum() / logits.numel()).backward()
        grads = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
        ring.all_reduce(grads)
        return seq.gather(out.detach()), local, grads

    for out, local, grads in run_ranks(2, body):
        for actual in (out, local):  # norms of the model are in float32
            torch.testing.assert_close(actual, logits.detach(), rtol=1e-5, atol=1e-5)
        for grad, reference in zip(grads, expected, strict=True):
            assert (grad - reference).abs().max() <= 1e-5 * reference.abs().max()
    assert len(calls) == 2 * latent_calls  # two ranks
