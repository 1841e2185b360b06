"""accelerate's configuration of a ring: what a step has to be, and what is refused; tests.adapters.trainer trains."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("transformers", reason="transformers is not installed")
pytest.importorskip("accelerate", reason="accelerate is not installed")

from ringattn import InputError, Ring, UnsupportedError
from ringattn.adapters.accelerate import RingParallelismConfig, _gather_losses, _prepared, _sharding
from ringattn.testing import run_ranks
from tests.adapters.models import tiny_model

TOKENS = torch.arange(3, 17)[None]


@pytest.fixture
def ring() -> Iterator[Ring]:
    with Ring() as ring:
        yield ring


@pytest.mark.parametrize("name", ["sp_size", "tp_size"])
def test_other_sizes(name: str) -> None:
    with pytest.raises(UnsupportedError, match=f"{name}=2 beside a ring; set cp_size"):
        RingParallelismConfig(cp_size=1, **{name: 2})


def test_ways_to_send() -> None:
    with pytest.raises(UnsupportedError, match="cp_backend is of another context parallelism"):
        RingParallelismConfig(cp_size=2, cp_backend="torch")
    config = RingParallelismConfig(cp_size=3)
    assert config.cp_enabled and config.cp_backend != "torch"  # which Trainer and accelerate act upon
    with pytest.raises(InputError, match="1 ranks are no multiple of cp_size and the other sizes, 3"):
        config.build_device_mesh("cpu")


def test_a_step_is_one_call_of_a_model_with_labels(ring: Ring) -> None:
    model = _prepared(tiny_model("llama", "eager"), ring)
    given = {"input_ids": TOKENS, "labels": TOKENS.clone(), "num_items_in_batch": torch.tensor(13)}
    with pytest.raises(
        UnsupportedError, match=r"no labels came to the model.*label_smoothing_factor.*RingTrainerMixin"
    ):
        with _sharding(ring):
            model(input_ids=TOKENS)
    with pytest.raises(InputError, match="inputs without names"), _sharding(ring):
        model(TOKENS)
    for calls in (0, 2):
        with pytest.raises(UnsupportedError, match=f"a step called the model {calls} times"), _sharding(ring):
            [model(**given) for _ in range(calls)]
    model.get_input_embeddings().neftune_noise_alpha = 5.0
    with pytest.raises(UnsupportedError, match="neftune_noise_alpha: the noise is scaled"), _sharding(ring):
        model(**given)
    with pytest.raises(UnsupportedError, match="Linear is no model of transformers"):
        _prepared(torch.nn.Linear(2, 2), ring)


def test_buffers_keep_their_shards() -> None:
    """As accelerate says of its own: Trainer counts the tokens of them."""
    models = [tiny_model("llama", "eager") for _ in range(2)]
    true = models[0](input_ids=TOKENS, labels=TOKENS, num_items_in_batch=13).loss.detach()

    def body(ring: Ring) -> tuple[int, torch.Tensor]:
        model, tokens, labels = _prepared(models[ring.rank], ring), TOKENS.clone(), TOKENS.clone()
        with _sharding(ring, [tokens, labels], [1, 1], {tokens}):
            loss = model(input_ids=tokens, labels=labels, num_items_in_batch=torch.tensor(13)).loss.detach()
            whole = tokens.shape[1]
        assert (whole, labels.shape[1]) == (14, 14)
        ring.all_reduce([loss])
        return tokens.shape[1], loss

    for tokens, loss in run_ranks(2, body):
        assert tokens == 7
        torch.testing.assert_close(loss, true)


def test_steps_drop_by_seeds_of_their_own() -> None:
    """Alike on both ranks, or the ring would raise."""

    def body(ring: Ring) -> list[float]:
        model, found = _prepared(tiny_model("llama", "eager", attention_dropout=0.4), ring), []
        for _ in range(2):
            with _sharding(ring):
                loss = model(input_ids=TOKENS, labels=TOKENS.clone(), num_items_in_batch=torch.tensor(13)).loss.detach()
            ring.all_reduce([loss])
            found.append(loss.item())
        return found

    first, other = run_ranks(2, body)
    assert first == other and first[0] != first[1]


def test_only_losses_are_gathered() -> None:
    state = SimpleNamespace(end_of_dataloader=True, remainder=1)
    whole = torch.tensor([1.0, 1.0, 3.0, 3.0, 5.0, 5.0, 7.0, 7.0])  # of two replicas of two ranks, two texts each
    host = SimpleNamespace(gather=lambda _: whole, gradient_state=state)
    assert _gather_losses(host, 2, torch.tensor([1.0, 1.0])).tolist() == [2.0]
    state.end_of_dataloader = False
    assert _gather_losses(host, 2, torch.tensor([1.0, 1.0])).tolist() == [2.0, 2.0, 6.0, 6.0]
    for other in (torch.ones(2, 3), torch.tensor(3), [torch.ones(2)]):
        with pytest.raises(UnsupportedError, match=r"gather_for_metrics of other numbers than losses.*RingSFTTrainer"):
            _gather_losses(host, 2, other)
