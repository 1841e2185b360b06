"""Models of transformers over ranks, compared with one process: batches, float64, and the largest error of a step.

Both sides compute everything in float64, even where a model rounds to float32 (norms, rotary positions, eager softmax,
routers, the loss). Rounding would hide errors below 1e-7.
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
from ringattn.adapters.transformers.positions import IMAGE_INPUTS
from ringattn.testing import run_ranks
from tests.adapters.models import tiny_model
from tests.adapters.processes import forked_ranks, worst_error
from tests.adapters.processes import whole as whole_tensor

register()
TOKENS = 27
DOCUMENTS = [0, 4, 17, 27]
Batch = dict[str, Tensor]
"""Whole inputs of a model by name: input_ids, labels (-100: no label) and others."""


class InDouble(TorchFunctionMode):
    """A torch function mode that replaces float32 by float64 in the arguments of every call."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        wide = {torch.float32: torch.float64}
        if func is Tensor.float:
            return args[0].double()
        args = tuple(wide.get(a, a) if isinstance(a, torch.dtype) else a for a in args)
        kwargs = {k: wide.get(a, a) if isinstance(a, torch.dtype) else a for k, a in (kwargs or {}).items()}
        return func(*args, **kwargs)


@contextmanager
def in_double() -> Iterator[None]:
    """Patch torch with the effect of `InDouble`, for layers that backward recomputes: no mode is active there."""
    replaced = torch.float32, Tensor.float
    torch.float32 = torch.float = torch.float64  # type: ignore[misc, assignment]
    Tensor.float = Tensor.double  # type: ignore[assignment, method-assign]
    try:
        yield
    finally:  # torch.load and torch.save compare dtypes with those of storages
        torch.float32 = torch.float = replaced[0]  # type: ignore[misc]
        Tensor.float = replaced[1]  # type: ignore[method-assign]


def restarting(documents: list[int]) -> Tensor:
    """Return positions that count from 0 in every document, (1, tokens)."""
    return torch.cat([torch.arange(stop - start) for start, stop in pairwise(documents)])[None]


def batches() -> dict[str, Batch]:
    """Return three batches by name: plain rows, a row of packed documents, and padded rows.

    Of the padded rows, one is padded on the left, one on the right, one on both sides, and one not at all.
    """
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
    """Return the number of labels that enter the loss: not the first of a row, nor ignored ones (-100)."""
    return int((batch["labels"][:, 1:] != -100).sum())


def forward(seq: Sequence, model: Any, **inputs: Any) -> Any:
    """Call the model with one row over ranks. `inputs` replace the defaults."""
    arguments = {"input_ids": seq.shard(ROW), "position_ids": seq.positions()[None], **inputs}
    with seq.ring.activate(seq):
        return model(**arguments)


def llama(**options: Any) -> Any:
    """Return a small model that attends through the ring, without checks of its inputs."""
    return tiny_model("llama", "ringattn", **options)


def refused(call: Callable[[Sequence], Any], match: str, error: type[Exception] = InputError) -> None:
    """Assert that `call` raises this error on both ranks, and that no rank waits for the deadline."""

    def body(ring: Ring) -> None:
        with pytest.raises(error, match=match):
            call(ring.sequence(TOKENS, layout="contiguous"))
        ring.barrier()

    run_ranks(2, body, timeout_s=20.0)


def gradients(model: Any, loss: Tensor) -> dict[str, Tensor]:
    """Run backward from `loss`. Return every parameter's gradient, zeros for a parameter without one."""
    model.zero_grad()
    loss.backward()
    return {name: torch.zeros_like(p) if p.grad is None else p.grad.clone() for name, p in model.named_parameters()}


def summed_gradients(ring: Ring, model: Any, loss: Tensor) -> dict[str, Tensor]:
    """Run backward from `loss`. Return every parameter's gradient, summed over the ranks."""
    grads = gradients(model, loss)
    ring.all_reduce(list(grads.values()))
    return grads


def step(
    model: Any, inputs: Mapping[str, Any], labels: int, seq: Sequence | None = None, dropout_seed: int | None = None
) -> dict[str, Tensor]:
    """Return the logits of all tokens, the loss and all gradients.

    `labels`: the number of labels, by which the loss is divided. `seq`: the sequence, if the inputs are a shard.
    """
    with nullcontext() if seq is None else seq.ring.activate(seq, dropout_seed=dropout_seed):
        out = model(**inputs, num_items_in_batch=labels)
    if dropout_seed is not None:
        torch.rand(5)  # the generator advances between forward and backward
    logits, values = out.logits.detach(), {"loss": out.loss.detach().clone(), **gradients(model, out.loss)}
    if seq is not None:
        logits = seq.gather(logits)
        seq.ring.all_reduce(list(values.values()))
    return {"logits": logits, **values}


def one_process(model: Any, whole: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return the result of `step` in one process, which gets the whole batch."""
    lengths = {*WHOLE} - {*IMAGE_INPUTS}  # eager attention does not use them
    inputs = {name: x for name, x in whole.items() if name not in lengths}
    # In one process, GPT-OSS makes its masks without positions.
    if "position_ids" in whole and model.config.model_type == "gpt_oss":
        embeds = whole["input_ids"][..., None].double()
        inputs["attention_mask"] = create_masks_for_generate(model.config, embeds, None, None, whole["position_ids"])
    return step(model, inputs, labels_of(whole))


def over_ranks(
    ring: Ring, model: Any, whole: Mapping[str, Any], true: Mapping[str, Tensor], layout: str = "zigzag",
    dropout_seed: int | None = None,
) -> float:  # fmt: skip
    """Return the largest error of a step over ranks against the values `true` of one process.

    Each error is relative to the largest number of the tensor in `true`, or to 1 if that is larger. Logits of padded
    tokens are not compared.
    """
    seq, shards = shard_batch(ring, whole, layout=layout, model=model)
    actual, mask = step(model, shards, labels_of(whole), seq, dropout_seed), whole.get("attention_mask")
    assert actual.keys() == true.keys()
    real = slice(None) if mask is None else mask.bool()
    actual["logits"], expected = actual["logits"][real], {**true, "logits": true["logits"][real]}
    return worst_error(((actual[name], expected[name]) for name in true), floor=1.0)


def far_from_one(
    make: Callable[[], Any], whole: Mapping[str, Tensor], *, train: Callable[[Any], Any] = lambda model: model,
    layout: str = "zigzag", ranks: int = 2,
) -> float:  # fmt: skip
    """Return the largest error of a step over ranks against one process, as `over_ranks` defines it.

    `whole`: the batch, with labels. `train`: prepares both models for training, for example adds LoRA.
    """
    with InDouble():
        true = one_process(train(make()), whole)

    def body(ring: Ring) -> float:
        with InDouble():
            return over_ranks(ring, prepare(train(make())), whole, true, layout)

    return max(run_ranks(ranks, body))


def logits(out: Any) -> Tensor:
    """Return the first output of a model, its logits or hidden states."""
    first: Tensor = out[0]
    return first


def far_off(
    make: Callable[[], Any], whole: Mapping[str, Tensor], *, score: Callable[[Any], Tensor] = logits,
    layout: str = "zigzag", pass_model: bool = True, call: Callable[..., Any] = lambda model, inputs: model(**inputs),
    ranks: int = 2, **options: Any,
) -> float:  # fmt: skip
    """Return the largest error of a gradient against one process, relative to that parameter's largest gradient.

    `score`: maps a model's output to numbers per token, (rows, tokens, ...). `pass_model`: pass the model to
    `shard_batch`. `call`: calls the model, (model, inputs) -> output. `options`: those of `prepare`.
    """
    tokens = next(iter(whole.values())).shape[1]
    mask = whole.get("attention_mask")

    def weights(seq_shard: Callable[[Tensor], Tensor], of: Tensor) -> Tensor:
        """Return random weights in the shape of `of`, the same for a token in every layout, and 0 for padding."""
        rest = of.shape[2:]
        noise = torch.randn(of.shape[0], tokens, *rest, generator=torch.Generator().manual_seed(3), dtype=of.dtype)
        real = torch.ones(of.shape[0], tokens) if mask is None else mask.expand(of.shape[0], -1)
        return seq_shard(noise * real.to(of.dtype).reshape(*real.shape, *(1 for _ in rest)))

    def alone(model: Any) -> Tensor:
        states = score(call(model, whole))
        return (states * weights(lambda x: x, states)).sum()

    def over_ring(ring: Ring, model: Any) -> Tensor:
        prepare(model, **options)
        seq, shards = shard_batch(ring, whole, layout=layout, **({"model": model} if pass_model else {}))
        with ring.activate(seq):
            states = score(call(model, shards))
        return (states * weights(seq.shard, states)).sum()

    return gradient_error(make, alone, over_ring, ranks)


def gradient_error(
    make: Callable[[], Any], alone: Callable[[Any], Tensor], over_ring: Callable[[Ring, Any], Tensor], ranks: int = 2
) -> float:
    """Return the largest error of a gradient over ranks against one process.

    Each error is relative to the parameter's largest gradient, or to 0.001 of the largest gradient of all parameters
    if that is larger.

    Args:
        make: Returns a new model, which attends locally.
        alone: Returns the loss of a model on one process.
        over_ring: Returns this rank's part of the loss, given a ring and a model.
        ranks: The number of ranks.
    """
    with InDouble():
        model = make()
        expected = gradients(model, alone(model))

    def body(ring: Ring) -> dict[str, Tensor]:
        with InDouble():
            model = make()
            return summed_gradients(ring, model, over_ring(ring, model))

    actual = run_ranks(ranks, body, timeout_s=20.0)[0]
    assert any(bool(grad.any()) for grad in expected.values())
    floor = 1e-3 * max(grad.abs().max().item() for grad in expected.values())
    return worst_error(((actual[name], expected[name]) for name in expected), floor)


def far_off_compiled(make: Callable[[str], Any], row: Tensor, documents: list[int]) -> float:
    """Return the largest relative error of logits and gradients of a compiled model over two ranks.

    The reference is not compiled, and runs each document separately. `make`: returns a model with the given attention
    implementation. `row`: token ids, (1, tokens).
    """
    alone = make("sdpa")
    reference = torch.cat([alone(input_ids=row[:, a:b]).logits for a, b in pairwise(documents)], 1)
    true = {"logits": reference.detach(), **gradients(alone, reference.sin().sum())}

    def body(ring: Ring) -> dict[str, Tensor]:
        model, seq = prepare(make("eager")), ring.sequence(cu_seqlens=documents)
        with ring.activate(seq):
            compiled = torch.compile(model, backend="aot_eager")
            logits = compiled(input_ids=seq.shard(row), position_ids=seq.positions(per_document=True)[None]).logits
        grads = summed_gradients(ring, model, logits.sin().sum())
        return {**grads, "logits": seq.gather(logits.detach())}

    floor = 1e-3 * max(x.abs().max().item() for x in true.values())
    return worst_error(((actual[name], true[name]) for actual in run_ranks(2, body) for name in true), floor)


# --- weights that FSDP2 shards ---------------------------------------------------------------------------------------

SHARDED_STEPS = 2


def far_off_sharded(
    make: Callable[[], Any],
    whole: Mapping[str, Tensor],
    parts: tuple[str, ...] = (),
    steps: int = SHARDED_STEPS,
    rate: float = 1e-2,
    compiled: bool = False,
    **options: Any,
) -> float:
    """Return the largest relative error of losses, gradients and weights after steps with FSDP2 over two processes.

    The processes are forked from the caller, which must not have started threads. `whole`: the batch, with labels.
    `parts`: submodules to shard in addition to the layers. `rate`: the learning rate. `compiled`: use torch.compile.
    `options`: those of `prepare`.
    """
    return float(forked_ranks(2, partial(_sharded_rank, make, whole, parts, steps, rate, compiled, options))[0])


def _sharded_rank(
    make: Callable[[], Any],
    whole: Mapping[str, Tensor],
    parts: tuple[str, ...],
    steps: int,
    rate: float,
    compiled: bool,
    options: dict[str, Any],
    number: int,
) -> float:
    """Return the largest error of rank `number` against one process that has the whole batch and weights."""
    labels = labels_of(whole)
    dist.init_process_group("gloo")
    with in_double():
        true = _steps(make(), lambda model: model(**whole, num_items_in_batch=labels).loss, steps, rate)
    with Ring(init_device_mesh("cpu", (2,)), timeout_s=60.0) as ring, in_double():
        ours = prepare(make(), **options)
        base = base_of(ours).model
        for part in (*getattr(base, "language_model", base).layers, *map(ours.get_submodule, parts), ours):
            fully_shard(part, mesh=init_device_mesh("cpu", (2,)))
        run = torch.compile(ours, backend="aot_eager") if compiled else ours

        def part_of_loss(model: Any) -> Tensor:
            seq, shards = shard_batch(ring, whole, model=model)
            with ring.activate(seq):  # FSDP averages over the ranks
                loss: Tensor = run(**shards, num_items_in_batch=labels).loss * 2
            return loss

        actual = _steps(ours, part_of_loss, steps, rate)
        for name, value in actual.items():
            if name.startswith("loss"):
                ring.all_reduce([value])
                value /= 2
    assert actual.keys() == true.keys() and len(true) > steps + 2
    dist.destroy_process_group()
    return worst_error((actual[name], true[name]) for name in true)


def _steps(model: Any, loss_of: Callable[[Any], Tensor], steps: int, rate: float) -> dict[str, Tensor]:
    """Return the losses of all steps, the gradients of the first step, and the final weights, gathered from shards."""
    learned = {name: p for name, p in model.named_parameters() if p.requires_grad}
    optimizer, values = torch.optim.SGD(learned.values(), lr=rate), {}
    for step in range(steps):
        optimizer.zero_grad()
        loss = loss_of(model)
        loss.backward()
        values[f"loss of step {step}"] = loss.detach().clone()
        if step == 0:
            grads = {name: p.grad for name, p in learned.items() if p.grad is not None}
            values |= {f"gradient of {name}": whole_tensor(grad) for name, grad in grads.items()}
        optimizer.step()
    return values | {name: whole_tensor(p.detach()) for name, p in learned.items()}
