"""Models of transformers over ranks against one process: batches, float64 throughout, and the largest error of a step.

Everything is computed in float64, also where a model rounds to float32 on the way (norms, rotary positions, eager's
softmax, routers, the loss), on both sides alike: rounding would hide errors below 1e-7.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from functools import partial
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.overrides import TorchFunctionMode
from transformers.masking_utils import create_masks_for_generate

from ringattn import InputError, Ring, Sequence
from ringattn.adapters.transformers import prepare, register, shard_batch
from ringattn.adapters.transformers.batches import WHOLE
from ringattn.adapters.transformers.checks import base_of
from ringattn.testing import run_ranks
from tests.adapters.models import tiny_model
from tests.adapters.processes import forked_ranks, worst_error
from tests.adapters.processes import whole as whole_tensor

register()
TOKENS = 27
DOCUMENTS = [0, 4, 17, 27]
Batch = dict[str, Tensor]
"""Inputs of a model by name, whole: input_ids, labels (-100 where there is none) and others."""


class InDouble(TorchFunctionMode):
    """No tensor becomes float32: whoever asks for it gets float64."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        wide = {torch.float32: torch.float64}
        if func is Tensor.float:
            return args[0].double()
        args = tuple(wide.get(a, a) if isinstance(a, torch.dtype) else a for a in args)
        kwargs = {k: wide.get(a, a) if isinstance(a, torch.dtype) else a for k, a in (kwargs or {}).items()}
        return func(*args, **kwargs)


@contextmanager
def in_double() -> Iterator[None]:
    """The same where layers are computed again in backward, which knows no modes."""
    found = torch.float32, Tensor.float
    torch.float32 = torch.float = torch.float64  # type: ignore[misc, assignment]
    Tensor.float = Tensor.double  # type: ignore[assignment, method-assign]
    try:
        yield
    finally:  # torch.load and torch.save compare dtypes with those of storages
        torch.float32 = torch.float = found[0]  # type: ignore[misc]
        Tensor.float = found[1]  # type: ignore[method-assign]


def restarting(documents: list[int]) -> Tensor:
    """Positions that count from 0 in every document, (1, tokens)."""
    return torch.cat([torch.arange(stop - start) for start, stop in pairwise(documents)])[None]


def batches() -> dict[str, Batch]:
    """Two plain rows, a row of packed documents, and rows with padding before, after and on both sides."""
    tokens = torch.randint(3, 64, (4, TOKENS), generator=torch.Generator().manual_seed(1))
    packed = tokens[:1].clone()
    packed[:, DOCUMENTS[:-1]] = -100
    mask = torch.ones_like(tokens)
    mask[0, :6], mask[1, -9:], mask[2, :3], mask[2, -2:] = 0, 0, 0, 0
    real = mask.bool()
    padded = {"input_ids": torch.where(real, tokens, 0), "labels": torch.where(real & real.roll(1, 1), tokens, -100)}
    return {
        "plain": {"input_ids": tokens[:2], "labels": tokens[:2].clone()},
        "packed": {"input_ids": tokens[:1], "labels": packed, "position_ids": restarting(DOCUMENTS)},
        "padded": {**padded, "attention_mask": mask},
    }


ROW = batches()["plain"]["input_ids"][:1]


def labels_of(batch: Mapping[str, Tensor]) -> int:
    """How many labels count."""
    return int((batch["labels"][:, 1:] != -100).sum())


def forward(seq: Sequence, model: Any, **inputs: Any) -> Any:
    """One row over ranks, with other inputs where they are given."""
    given = {"input_ids": seq.shard(ROW), "position_ids": seq.positions()[None], **inputs}
    with seq.ring.activate(seq):
        return model(**given)


def llama(**other: Any) -> Any:
    """A small model that attends through the ring, its inputs not checked."""
    return tiny_model("llama", "ringattn", **other)


def refused(call: Callable[[Sequence], Any], match: str, error: type[Exception] = InputError) -> None:
    """`call` raises this on both of two ranks, and none waits for the deadline."""

    def body(ring: Ring) -> None:
        with pytest.raises(error, match=match):
            call(ring.sequence(TOKENS, layout="contiguous"))
        ring.barrier()

    run_ranks(2, body, timeout_s=20.0)


def gradients(model: Any, loss: Tensor) -> dict[str, Tensor]:
    """Every parameter's gradient, zeros where there is none."""
    model.zero_grad()
    loss.backward()
    return {name: torch.zeros_like(p) if p.grad is None else p.grad.clone() for name, p in model.named_parameters()}


def summed_gradients(ring: Ring, model: Any, loss: Tensor) -> dict[str, Tensor]:
    """Every parameter's gradient, summed over the ranks."""
    grads = gradients(model, loss)
    ring.all_reduce(list(grads.values()))
    return grads


def step(
    model: Any, given: Mapping[str, Any], labels: int, seq: Sequence | None = None, dropout_seed: int | None = None
) -> dict[str, Tensor]:
    """Logits, the loss over `labels` and all gradients, whole; `seq`: of which `given` are this rank's inputs."""
    with nullcontext() if seq is None else seq.ring.activate(seq, dropout_seed=dropout_seed):
        out = model(**given, num_items_in_batch=labels)
    if dropout_seed is not None:
        torch.rand(5)  # the generator goes on between forward and backward
    logits, found = out.logits.detach(), {"loss": out.loss.detach().clone(), **gradients(model, out.loss)}
    if seq is not None:
        logits = seq.gather(logits)
        seq.ring.all_reduce(list(found.values()))
    return {"logits": logits, **found}


def one_process(model: Any, whole: Mapping[str, Any]) -> dict[str, Tensor]:
    """`step` of one process."""
    given = {name: x for name, x in whole.items() if name not in WHOLE}  # eager attention has no use for lengths
    if "position_ids" in whole and model.config.model_type == "gpt_oss":  # alone it makes masks without positions
        embeds = whole["input_ids"][..., None].double()
        given["attention_mask"] = create_masks_for_generate(model.config, embeds, None, None, whole["position_ids"])
    return step(model, given, labels_of(whole))


def over_ranks(
    ring: Ring, model: Any, whole: Mapping[str, Any], true: Mapping[str, Tensor], layout: str = "zigzag",
    dropout_seed: int | None = None,
) -> float:  # fmt: skip
    """The largest error of a step over ranks, relative to the largest number of its tensor, at least 1.

    What a model returns at padded tokens is not compared.
    """
    seq, mine = shard_batch(ring, whole, layout=layout, model=model)
    found, mask = step(model, mine, labels_of(whole), seq, dropout_seed), whole.get("attention_mask")
    assert found.keys() == true.keys()
    real = slice(None) if mask is None else mask.bool()
    pairs = [(found[name][real], true[name][real]) if name == "logits" else (found[name], true[name]) for name in true]
    return worst_error(pairs, floor=1.0)


def far_from_one(
    make: Callable[[], Any], whole: Mapping[str, Tensor], *, train: Callable[[Any], Any] = lambda model: model,
    layout: str = "zigzag", ranks: int = 2,
) -> float:  # fmt: skip
    """See `over_ranks`. `whole`: the batch, with labels. `train`: what is done to either model before."""
    with InDouble():
        true = one_process(train(make()), whole)

    def body(ring: Ring) -> float:
        with InDouble():
            return over_ranks(ring, prepare(train(make())), whole, true, layout)

    return max(run_ranks(ranks, body))


def logits(out: Any) -> Tensor:
    """The first output that is there."""
    found: Tensor = out[0]
    return found


def far_off(
    make: Callable[[], Any], whole: Mapping[str, Tensor], *, score: Callable[[Any], Tensor] = logits,
    layout: str = "zigzag", told: bool = True, call: Callable[..., Any] = lambda model, given: model(**given),
) -> float:  # fmt: skip
    """The largest difference of a gradient from one process, relative to that parameter's own largest.

    `score`: a model's output to one number a token, (rows, tokens) or with more dimensions. `told`: whether
    `shard_batch` gets the model. `call`: how the model is called, (model, inputs) -> output.
    """
    tokens = next(iter(whole.values())).shape[1]
    mask = whole.get("attention_mask")

    def weights(seq_shard: Callable[[Tensor], Tensor], of: Tensor) -> Tensor:
        """As many random numbers as there are in `of`, the same for a token wherever it lies; 0 for padding."""
        rest = of.shape[2:]
        noise = torch.randn(of.shape[0], tokens, *rest, generator=torch.Generator().manual_seed(3), dtype=of.dtype)
        real = torch.ones(of.shape[0], tokens) if mask is None else mask.expand(of.shape[0], -1)
        return seq_shard(noise * real.to(of.dtype).reshape(*real.shape, *(1 for _ in rest)))

    def alone(model: Any) -> Tensor:
        states = score(call(model, whole))
        return (states * weights(lambda x: x, states)).sum()

    def over_ring(ring: Ring, model: Any) -> Tensor:
        prepare(model)
        seq, mine = shard_batch(ring, whole, layout=layout, **({"model": model} if told else {}))
        with ring.activate(seq):
            states = score(call(model, mine))
        return (states * weights(seq.shard, states)).sum()

    return gradient_error(make, alone, over_ring)


def gradient_error(
    make: Callable[[], Any], alone: Callable[[Any], Tensor], over_ring: Callable[[Ring, Any], Tensor]
) -> float:
    """The largest error of a gradient over two ranks, relative to the largest of that parameter or 0.001 of all.

    Args:
        make: The model, which attends locally.
        alone: A model to its loss on one process.
        over_ring: A ring and a model to this rank's part of the loss.
    """
    with InDouble():
        model = make()
        expected = gradients(model, alone(model))

    def body(ring: Ring) -> dict[str, Tensor]:
        with InDouble():
            model = make()
            return summed_gradients(ring, model, over_ring(ring, model))

    found = run_ranks(2, body, timeout_s=20.0)[0]
    assert any(bool(grad.any()) for grad in expected.values())
    floor = 1e-3 * max(grad.abs().max().item() for grad in expected.values())
    return worst_error(((found[name], expected[name]) for name in expected), floor)


def far_off_compiled(make: Callable[[str], Any], row: Tensor, documents: list[int]) -> float:
    """The largest relative error of logits and gradients of a compiled model over two ranks.

    One process is not compiled and sees each document alone. `make`: the model of an attention; `row`: (1, tokens).
    """
    alone = make("sdpa")
    found = torch.cat([alone(input_ids=row[:, a:b]).logits for a, b in pairwise(documents)], 1)
    true = {"logits": found.detach(), **gradients(alone, found.sin().sum())}

    def body(ring: Ring) -> dict[str, Tensor]:
        model, seq = prepare(make("eager")), ring.sequence(cu_seqlens=documents)
        with ring.activate(seq):
            compiled = torch.compile(model, backend="aot_eager")
            logits = compiled(input_ids=seq.shard(row), position_ids=seq.positions(per_document=True)[None]).logits
        grads = summed_gradients(ring, model, logits.sin().sum())
        return {**grads, "logits": seq.gather(logits.detach())}

    floor = 1e-3 * max(x.abs().max().item() for x in true.values())
    return worst_error(((found[name], true[name]) for found in run_ranks(2, body) for name in true), floor)


# --- weights that FSDP2 shards ---------------------------------------------------------------------------------------

SHARDED_STEPS = 2


def far_off_sharded(make: Callable[[], Any], whole: Mapping[str, Tensor], parts: tuple[str, ...] = ()) -> float:
    """The greatest relative error of losses, gradients and weights of two steps over two processes.

    They are forked from this one, which has no threads yet. `whole`: the batch, with labels. `parts`: submodules that
    are sharded besides layers.
    """
    return float(forked_ranks(2, partial(_sharded_rank, make, whole, parts))[0])


def _sharded_rank(make: Callable[[], Any], whole: Mapping[str, Tensor], parts: tuple[str, ...], number: int) -> float:
    """Return how far this process is from one alone."""
    labels = labels_of(whole)
    dist.init_process_group("gloo")
    with in_double():
        true = _steps(make(), lambda model: model(**whole, num_items_in_batch=labels).loss)
    with Ring(init_device_mesh("cpu", (2,)), timeout_s=60.0) as ring, in_double():
        ours = prepare(make())
        for part in (*base_of(ours).model.layers, *map(ours.get_submodule, parts), ours):
            fully_shard(part, mesh=init_device_mesh("cpu", (2,)))

        def part_of_loss(model: Any) -> Tensor:
            seq, mine = shard_batch(ring, whole, model=model)
            with ring.activate(seq):  # FSDP averages over the ranks
                loss: Tensor = model(**mine, num_items_in_batch=labels).loss * 2
            return loss

        mine = _steps(ours, part_of_loss)
        for name, found in mine.items():
            if name.startswith("loss"):
                ring.all_reduce([found])
                found /= 2
    assert mine.keys() == true.keys() and len(true) > SHARDED_STEPS + 2
    dist.destroy_process_group()
    return worst_error((mine[name], true[name]) for name in true)


def _steps(model: Any, loss_of: Callable[[Any], Tensor]) -> dict[str, Tensor]:
    """Losses of steps, the first one's gradients, and the weights at the end; whole."""
    learned = {name: p for name, p in model.named_parameters() if p.requires_grad}
    optimizer, found = torch.optim.SGD(learned.values(), lr=1e-2), {}
    for step in range(SHARDED_STEPS):
        optimizer.zero_grad()
        loss = loss_of(model)
        loss.backward()
        found[f"loss of step {step}"] = loss.detach().clone()
        if step == 0:
            found |= {f"gradient of {name}": whole_tensor(p.grad) for name, p in learned.items()}
        optimizer.step()
    return found | {name: whole_tensor(p.detach()) for name, p in learned.items()}
