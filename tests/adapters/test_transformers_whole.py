"""Whole batches and whole outputs of a sharded model, for losses that were written for one process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

pytest.importorskip("transformers", reason="transformers is not installed")

from ringattn import InputError, Ring, Sequence, UnsupportedError
from ringattn.adapters.local import local_attention
from ringattn.adapters.transformers import prepare
from ringattn.adapters.transformers.batches import WholeOutput, whole_calls
from ringattn.testing import run_ranks
from tests.adapters.models import tiny_model
from tests.adapters.ranks import in_double

TOKENS = torch.randint(3, 64, (2, 13), generator=torch.Generator().manual_seed(1))
BATCH = {"input_ids": TOKENS, "labels": TOKENS.clone()}
TOLERANCE = 1e-10
Loss = Callable[[Any], Tensor]


def gradients(model: Any) -> dict[str, Tensor]:
    return {name: p.grad for name, p in model.named_parameters()}


def over_ranks(make_loss: Loss, ranks: int = 2, **options: Any) -> list[tuple[Tensor, dict[str, Tensor]]]:
    """Return the loss of every rank, and the mean over ranks of each gradient."""
    models = [prepare(tiny_model("llama", "eager")) for _ in range(ranks)]

    def body(ring: Ring) -> tuple[Tensor, dict[str, Tensor]]:
        model = models[ring.rank]
        with whole_calls(ring, [model], model, "auto", 0):
            loss = make_loss(model(**BATCH, **options))
            loss.backward()
        grads = gradients(model)
        ring.all_reduce(list(grads.values()))
        return loss.detach(), {name: grad / ring.world_size for name, grad in grads.items()}

    return run_ranks(ranks, body, timeout_s=20.0)


def in_loss(outputs: Any) -> Tensor:
    return outputs.loss.square() + outputs.loss


def in_logits(outputs: Any) -> Tensor:
    return outputs.loss + 0.1 * outputs.logits.logsumexp(-1).square().mean()


def in_views(outputs: Any) -> Tensor:
    """Return a loss computed through views, one of which is changed in place."""
    logits = outputs.logits[:, :-1]
    logits = logits.masked_fill(logits > 2.0, 0.5)
    rest = outputs["logits"].clone()
    rest[:, ::3] *= 2.0
    return cross_entropy(logits.flatten(0, 1), TOKENS[:, 1:].flatten()) + rest.sin().sum()


def in_place(outputs: Any) -> Tensor:
    """Return a loss of logits changed in place, directly and through a view.

    The logits are first read under `no_grad`.
    """
    with torch.no_grad():
        first = outputs.logits.std()
    shifted = outputs.logits[:, :-1]
    shifted[..., 3] = 0.7
    shifted.mul_(1.5)
    outputs.logits[1] *= first
    outputs["logits"].clamp_(-3.0, 3.0)
    return shifted.sin().sum() + outputs.logits.square().mean() + outputs.logits.mT[0].sum()


def in_states(outputs: Any) -> Tensor:
    states = [*outputs.hidden_states, *outputs.hidden_states[1:], dict(outputs.items())["logits"]]
    return outputs.loss + sum(state.pow(3).mean() for state in states)


class Doubled(torch.autograd.Function):
    """A custom autograd function that doubles its input."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return 2 * x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return 2 * grad


def in_function(outputs: Any) -> Tensor:
    return Doubled.apply(outputs.logits).cos().mean()


@pytest.mark.parametrize(
    ("make_loss", "ranks"),
    [(in_loss, 2), (in_logits, 3), (in_views, 2), (in_place, 3), (in_states, 3), (in_function, 2)],
)
@in_double()
def test_a_loss_of_whole_outputs_is_that_of_one_process(make_loss: Loss, ranks: int) -> None:
    options = {"output_hidden_states": True} if make_loss is in_states else {}
    model = tiny_model("llama", "eager")
    true = make_loss(model(**BATCH, num_items_in_batch=24, **options))
    true.backward()
    for loss, grads in over_ranks(make_loss, ranks, **options):
        torch.testing.assert_close(loss, true.detach(), rtol=TOLERANCE, atol=TOLERANCE)
        for name, grad in gradients(model).items():
            torch.testing.assert_close(grads[name], grad, rtol=TOLERANCE, atol=TOLERANCE)


def test_logits_are_gathered_only_where_they_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    gathered, gather = [], Sequence.gather

    def seen(self: Sequence, x: Tensor, dim: int = 1) -> Tensor:
        gathered.append(tuple(x.shape))
        return gather(self, x, dim)

    monkeypatch.setattr(Sequence, "gather", seen)

    over_ranks(lambda outputs: outputs["loss"] + outputs[0] + outputs.get("loss"))
    assert not gathered
    over_ranks(lambda outputs: outputs.loss + outputs.hidden_states[-1].sum(), output_hidden_states=True)
    assert len(gathered) == 2
    gathered.clear()
    over_ranks(lambda outputs: outputs.logits.sum() + outputs.logits.mean())
    assert gathered in ([(2, 7, 64), (2, 6, 64)], [(2, 6, 64), (2, 7, 64)])


@pytest.mark.parametrize(
    ("make_loss", "options", "says"),
    [
        (
            lambda out: out.loss + out.past_key_values[0][0].sum(),
            {"use_cache": True},
            "past_key_values of a model over",
        ),
        (lambda out: out.loss + out.past_key_values.get_seq_length(), {"use_cache": True}, "past_key_values of a mod"),
        (lambda out: out.loss * out.past_key_values, {"use_cache": True}, "past_key_values of a model over a ring is"),
        (lambda out: torch.stack([out.past_key_values]), {"use_cache": True}, "past_key_values of a model over a ring"),
    ],
)
def test_outputs_that_are_not_made_whole(make_loss: Loss, options: dict[str, Any], says: str) -> None:
    with pytest.raises(UnsupportedError, match=says):
        over_ranks(make_loss, **options)


def test_logits_of_a_model_that_makes_none() -> None:
    models = [prepare(tiny_model("llama", "eager"), chunked_loss=4) for _ in range(2)]

    def body(ring: Ring) -> None:
        model = models[ring.rank]
        with whole_calls(ring, [model], model, "auto", 0):
            outputs = model(**BATCH)
        assert outputs.loss > 0
        with pytest.raises(UnsupportedError, match="logits of a model over a ring is not gathered"):
            outputs.logits.float()

    run_ranks(2, body, timeout_s=20.0)


def test_calls_that_cannot_be_made_whole() -> None:
    models = [prepare(tiny_model("llama", "eager")) for _ in range(2)]

    def body(ring: Ring) -> None:
        model = models[ring.rank]
        with whole_calls(ring, [model], model, "auto", 0):
            with pytest.raises(InputError, match="positional inputs: call the model with keywords"):
                model(TOKENS)
            with pytest.raises(InputError, match="return_dict=False"):
                model(**BATCH, return_dict=False)
            assert isinstance(model(**BATCH), WholeOutput)  # the failed calls have left no sequence active
        with pytest.raises(InputError, match="no sequence is active"):
            model(**BATCH)
        with local_attention():
            assert model(**BATCH).logits.shape == (2, 13, 64)

    run_ranks(2, body, timeout_s=20.0)
