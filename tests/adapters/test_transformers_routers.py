"""Router losses of mixtures of experts over two ranks: equal to one process, or refused."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest

pytest.importorskip("transformers", reason="transformers is not installed")

import torch
from torch.utils.checkpoint import checkpoint
from transformers.models.mixtral import modeling_mixtral

from ringattn import InputError, Ring, Sequence
from ringattn.adapters.transformers import prepare, shard_batch
from ringattn.adapters.transformers.batches import whole_calls
from ringattn.errors import UnsupportedError
from ringattn.testing import run_ranks
from tests.adapters.models import ROUTED, tiny_model
from tests.adapters.ranks import ROW, InDouble, batches, far_from_one, forward, refused

TOLERANCE = 1e-9
PADDED = batches()["padded"]


def routed(name: str = "mixtral", **options: Any) -> Any:
    return tiny_model(name, "eager", **options)


def labeled(seq: Sequence) -> dict[str, Any]:
    """Return the arguments of a call with labels for `ROW`."""
    labels = seq.shard_labels(ROW)
    return {"labels": labels, "shift_labels": labels, "num_items_in_batch": ROW.shape[1] - 1}


def test_the_loss_of_padded_rows() -> None:
    assert far_from_one(routed, PADDED) <= TOLERANCE


@pytest.mark.slow
@pytest.mark.parametrize("name", ROUTED)
def test_the_losses_of_packed_and_padded_batches(name: str) -> None:
    batch = batches()
    for kind, layout in (("plain", "zigzag"), ("packed", "zigzag"), ("packed", "contiguous"), ("padded", "contiguous")):
        if (name, kind) != ("routed gpt_oss", "packed"):  # one process passes GPT-OSS a mask of documents
            assert far_from_one(partial(routed, name), batch[kind], layout=layout) <= TOLERANCE, (kind, layout)


@pytest.mark.slow
def test_the_loss_over_four_ranks() -> None:
    assert far_from_one(routed, PADDED, ranks=4) <= TOLERANCE


def test_whole_and_sharded_outputs() -> None:
    """The router losses of ranks add up to that of one process, and a whole output has their sum."""
    batch = {name: x for name, x in PADDED.items() if name != "labels"}
    with InDouble():
        true = float(routed()(**batch).aux_loss.detach())

    def body(ring: Ring) -> tuple[float, float]:
        with InDouble():
            model = prepare(routed())
            seq, shards = shard_batch(ring, batch, model=model)
            with ring.activate(seq):
                part = model(**shards).aux_loss.detach()
            ring.all_reduce([part])
            with whole_calls(ring, [model], model, "auto", 0):
                out = model(**batch)
                with pytest.raises(UnsupportedError, match="router_logits of a model over a ring is not gathered"):
                    out.router_logits[0] + 1
                return float(part), float(out.aux_loss.detach())

    for values in run_ranks(2, body):
        assert values == pytest.approx((true, true), rel=TOLERANCE)


def test_the_chunked_loss_gets_the_router_loss_too() -> None:
    def loss(ring: Ring, **options: int) -> float:
        with InDouble():
            seq = ring.sequence(ROW.shape[1])
            part = forward(seq, prepare(routed(), **options), **labeled(seq)).loss.detach()
        ring.all_reduce([part])
        return float(part)

    (chunked, plain), _ = run_ranks(2, lambda ring: (loss(ring, chunked_loss=5), loss(ring)))
    assert chunked == pytest.approx(plain, rel=TOLERANCE)


# --- Refusals --------------------------------------------------------------------------------------------------------


def test_router_losses_that_are_computed_in_another_way_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def another_loss(*arguments: Any) -> Any:
        return arguments[0][0].square().mean()

    message = "output_router_logits with labels: MixtralForCausalLM .* computes it in its own way"
    prepared = [prepare(routed()) for _ in range(2)]
    # The function is replaced after `prepare` at first, and then before it.
    monkeypatch.setattr(modeling_mixtral, "load_balancing_loss_func", another_loss)
    refused(lambda seq: forward(seq, prepared[seq.ring.rank], **labeled(seq)), message, UnsupportedError)
    refused(lambda seq: forward(seq, prepare(routed()), **labeled(seq)), message, UnsupportedError)
    unrouted = partial(routed, output_router_logits=False)
    refused(lambda seq: forward(seq, prepare(unrouted()), output_router_logits=True, **labeled(seq)), message)


def test_a_checkpoint_around_the_whole_model_is_refused() -> None:
    def body(ring: Ring) -> None:
        model, seq = prepare(routed()), ring.sequence(ROW.shape[1])
        arguments = {"input_ids": seq.shard(ROW), "position_ids": seq.positions()[None], **labeled(seq)}
        with ring.activate(seq):
            loss = checkpoint(lambda: model(**arguments).loss, use_reentrant=False)
            with pytest.raises(InputError, match="backward recomputes MixtralForCausalLM with a loss that needs sums"):
                loss.backward()

    run_ranks(2, body)


def test_a_local_call_computes_the_loss_of_transformers() -> None:
    model = prepare(routed())
    torch.testing.assert_close(model(input_ids=ROW, labels=ROW).loss, routed()(input_ids=ROW, labels=ROW).loss)
