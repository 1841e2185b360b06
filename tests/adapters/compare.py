"""A model of transformers over two ranks (threads) against one process: every parameter's gradient, in float64."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from ringattn import Ring
from ringattn.adapters.transformers import prepare, shard_batch
from ringattn.adapters.transformers.batches import WHOLE
from ringattn.testing import run_ranks
from tests.adapters.processes import worst_error
from tests.adapters.ranks import InDouble, gradients

Score = Callable[[Any], Tensor]
"""A model's output -> one number a token, (rows, tokens) or with more dimensions."""


def logits(out: Any) -> Tensor:
    """The first output that is there."""
    found: Tensor = out[0]
    return found


def far_off(
    make: Callable[[], Any], whole: Mapping[str, Tensor], *, alone: Mapping[str, Any] | None = None,
    score: Score = logits, layout: str = "zigzag", told: bool = True, call: Callable[..., Any] | None = None,
) -> float:  # fmt: skip
    """The greatest difference of a gradient from one process, relative to that parameter's own greatest.

    `whole`: the batch; `alone`: what one process is given besides. `told`: whether `shard_batch` gets the model.
    `call`: how the model is called, (model, inputs) -> output.
    """
    called = call or (lambda model, given: model(**given))
    tokens = next(iter(whole.values())).shape[1]
    mask = whole.get("attention_mask")

    def weights(seq_shard: Callable[[Tensor], Tensor], of: Tensor) -> Tensor:
        """As many random numbers as there are in `of`, the same for a token wherever it lies; 0 for padding."""
        rest = of.shape[2:]
        noise = torch.randn(of.shape[0], tokens, *rest, generator=torch.Generator().manual_seed(3), dtype=of.dtype)
        real = torch.ones(of.shape[0], tokens) if mask is None else mask.expand(of.shape[0], -1)
        return seq_shard(noise * real.to(of.dtype).reshape(*real.shape, *(1 for _ in rest)))

    with InDouble():
        model = make()
        found = score(called(model, {**whole, **(alone or {})}))
        true = gradients(model, (found * weights(lambda x: x, found)).sum())

    def body(ring: Ring) -> dict[str, Tensor]:
        with InDouble():
            ours = prepare(make())
            seq, mine = shard_batch(ring, whole, layout=layout, **({"model": ours} if told else {}))
            with ring.activate(seq):
                states = score(called(ours, mine))
            grads = gradients(ours, (states * weights(seq.shard, states)).sum())
        ring.all_reduce(list(grads.values()))
        return grads

    grads = run_ranks(2, body, timeout_s=20.0)[0]
    assert any(bool(grad.any()) for grad in true.values())
    floor = 1e-3 * max(grad.abs().max().item() for grad in true.values())
    return worst_error(((grads[name], true[name]) for name in true), floor)


def far_from_one(
    make: Callable[[], Any], whole: Mapping[str, Tensor], *, train: Callable[[Any], Any] | None = None,
    layout: str = "zigzag",
) -> float:  # fmt: skip
    """The greatest error of logits, loss and gradients of a step of training, relative to their greatest, at least 1.

    `whole`: the batch, with labels. `train`: what is done to either model before.
    """
    labels = int((whole["labels"][:, 1:] != -100).sum())
    mask = whole.get("attention_mask")
    real = slice(None) if mask is None else mask.bool()
    given = {name: x for name, x in whole.items() if name not in WHOLE}  # eager attention has no use for lengths

    def made() -> Any:
        model = make()
        return model if train is None else train(model)

    def named(model: Any) -> dict[str, Tensor]:
        return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}

    with InDouble():
        model = made()
        out = model(**given, num_items_in_batch=labels)
        out.loss.backward()
        true, theirs = named(model), out

    def body(ring: Ring) -> float:
        with InDouble():
            ours = prepare(made())
            seq, mine = shard_batch(ring, whole, layout=layout, model=ours)
            with ring.activate(seq):
                out = ours(**mine, num_items_in_batch=labels)
            out.loss.backward()
            grads, loss = named(ours), out.loss.detach().clone()
            ring.all_reduce([loss, *grads.values()])
        assert grads.keys() == true.keys()
        pairs = [(seq.gather(out.logits.detach())[real], theirs.logits[real]), (loss, theirs.loss)]
        pairs += [(grads[of], true[of]) for of in true]
        return worst_error(pairs, floor=1.0)

    return max(run_ranks(2, body))


def far_off_compiled(make: Callable[[str], Any], row: Tensor, documents: list[int]) -> float:
    """The greatest relative error of logits and gradients of a compiled model over two ranks.

    One process is not compiled and sees each document alone. `make`: the model of an attention; `row`: (1, tokens).
    """

    def found(model: Any, logits: Tensor) -> dict[str, Tensor]:
        return {"logits": logits.detach(), **gradients(model, logits.sin().sum())}

    alone = make("sdpa")
    true = found(alone, torch.cat([alone(input_ids=row[:, a:b]).logits for a, b in pairwise(documents)], 1))

    def body(ring: Ring) -> dict[str, Tensor]:
        model, seq = prepare(make("eager")), ring.sequence(cu_seqlens=documents)
        with ring.activate(seq):
            compiled = torch.compile(model, backend="aot_eager")
            logits = compiled(input_ids=seq.shard(row), position_ids=seq.positions(per_document=True)[None]).logits
        mine = found(model, logits)
        ring.all_reduce([x for name, x in mine.items() if name != "logits"])
        return {**mine, "logits": seq.gather(mine["logits"])}

    floor = 1e-3 * max(x.abs().max().item() for x in true.values())
    return worst_error(((found[name], true[name]) for found in run_ranks(2, body) for name in true), floor)
