"""The training loop of one rank.

Every rank draws the same batch, keeps its own tokens, and sums its own loss over them, divided by the number of
labels *of all ranks*; gradients are then summed over the ranks. That is the gradient of the one-process loss, whatever
the layout and however unevenly labels fall. A mean of the ranks' means is another loss, and looks fine in a log.
Promises: the same losses at every world size, up to rounding; a rank without labels or tokens takes part.
Does not know: processes, files.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.utils.checkpoint import checkpoint

from ringattn import Ring, Sequence
from ringattn.launch.memory import PeakMemory
from ringattn.launch.memory_switches import check_switches
from ringattn.launch.model import ModelConfig, Transformer
from ringattn.launch.optimizers import local_bytes, make_optimizer, set_learning_rate, state_bytes
from ringattn.launch.progress import TrainingProgress
from ringattn.launch.saved_activations import SavedActivations
from ringattn.launch.text import VOCABULARY, load_text, windows
from ringattn.launch.train_config import TrainConfig, from_spec

DTYPES = {"fp32": torch.float32, "fp64": torch.float64, "bf16": torch.bfloat16}
IGNORE = -100
"""The label that does not count, as in torch's cross entropy."""


def train_rank(spec: Mapping[str, Any]) -> dict[str, Any]:
    """Entry of a rank's process: train each configuration of `spec["runs"]` in turn, in one ring.

    Returns {"rank": ..., "runs": [the result of `train`, ...]}.
    """
    configs = [from_spec(run) for run in spec["runs"]]
    first = configs[0]
    if first.threads_per_rank is not None:
        torch.set_num_threads(first.threads_per_rank)
    with Ring(transport=first.transport, engine=first.engine, timeout_s=min(600.0, first.timeout_s)) as ring:
        return {"rank": ring.rank, "runs": [train(ring, config, verbose=ring.rank == 0) for config in configs]}


def train(ring: Ring, config: TrainConfig, verbose: bool = False) -> dict[str, Any]:
    """Train one model on this rank; all ranks of the ring call it together.

    Returns a JSON-ready result, the same on every rank but for `counters` and the times: config, ranks, tokens per
    rank, per step `losses`, `grad_norms`, `step_s`, and `tokens_per_s` (median, without the first step),
    `replicated_bytes` (weights, gradients and optimizer state that every rank has; its own part under sharding),
    `memory_growth_bytes` (by rank: these, activations and messages, counted from after a tiny warm-up),
    `memory_method` and `counters`.
    """
    check_switches(config, ring.device.type)
    text = load_text(config.text)
    warm_up(ring, text, config)
    seq = ring.sequence(config.length_tokens, layout=config.layout)
    memory = PeakMemory(ring.device)
    ring.reset_counters()
    model, optimizer = make_model(ring, config)
    losses, grad_norms, step_s = [], [], []
    tokens = config.batch * config.length_tokens
    with TrainingProgress(f"{ring.world_size} x {config.dtype}", config.steps if verbose else 0) as progress:
        for step in range(config.steps):
            started = time.perf_counter()
            batch = windows(text, step, config.batch, config.length_tokens, config.seed).to(ring.device)
            loss = backward(ring, seq, model, batch, config)
            set_learning_rate(optimizer, config.learning_rate * min(1.0, (step + 1) / max(1, config.warmup_steps)))
            grad_norms.append(update(model, optimizer, config))
            losses.append(loss.item())
            step_s.append(time.perf_counter() - started)
            if verbose:
                progress.done(step, losses[-1], tokens / step_s[-1])
    return {
        "config": asdict(config),
        "ranks": ring.world_size,
        "tokens_of_rank": list(seq.counts),
        "losses": losses,
        "grad_norms": grad_norms,
        "step_s": step_s,
        "tokens_per_s": tokens / median(step_s[1:] or step_s),
        "replicated_bytes": 2 * sum(map(local_bytes, model.parameters())) + state_bytes(optimizer),
        "memory_growth_bytes": by_rank(ring, memory.growth_bytes()),
        "memory_method": memory.method,
        "counters": ring.counters(),
    }


def make_model(ring: Ring, config: TrainConfig) -> tuple[Transformer, Optimizer]:
    """The model on the ring's device, with rank 0's weights on every rank, or dealt out to them, and its optimizer."""
    model = Transformer(config.model, VOCABULARY, DTYPES[config.dtype], config.seed, config.recompute).to(ring.device)
    ring.broadcast([weight.data for weight in model.parameters()], src=0)
    if config.sharding != "none":
        # Only here: FSDP takes half a second to import.
        from ringattn.launch.sharding import shard_model

        shard_model(ring, model, config.sharding)
    return model, make_optimizer(config.optimizer, model.parameters(), config.learning_rate, config.weight_decay)


def warm_up(ring: Ring, text: Tensor, config: TrainConfig) -> None:
    """One step of a tiny model on a few tokens of each rank.

    Whatever a first step loads (code pages, the optimizer's modules, connections) would otherwise count as memory and
    time of training, and can exceed what a small model needs.
    """
    tiny = replace(
        config,
        length_tokens=min(config.length_tokens, 8 * ring.world_size),
        batch=1,
        model=ModelConfig(layers=1, dim=16, heads=2, kv_heads=1, hidden_dim=16),
    )
    seq = ring.sequence(tiny.length_tokens, layout=tiny.layout)
    model, optimizer = make_model(ring, tiny)
    backward(ring, seq, model, windows(text, 0, 1, tiny.length_tokens, tiny.seed).to(ring.device), tiny)
    update(model, optimizer, tiny)


def update(model: Transformer, optimizer: Optimizer, config: TrainConfig) -> float:
    """Clip the gradients, step, and drop them. Returns their norm before clipping, which all ranks share."""
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), config.clip_norm)
    if isinstance(norm, DTensor):
        norm = norm.full_tensor()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return norm.item()


def backward(ring: Ring, seq: Sequence, model: Transformer, batch: Tensor, config: TrainConfig) -> Tensor:
    """Leave the gradient of the global mean loss in the model's parameters, and return that loss (no dimensions).

    `batch`: int64 (batch, length_tokens), the same on every rank.
    """
    learned = batch.clone()
    learned[:, : config.prompt_tokens] = IGNORE
    labels = seq.shard_labels(learned, ignore_index=IGNORE)
    valid = (labels != IGNORE).sum().to(torch.float64)
    ring.all_reduce([valid])

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = ring.attention(q, k, v, seq, causal=True, schedule=config.schedule)
        assert isinstance(out, Tensor)
        return out

    def head(hidden: Tensor, logits_of: Callable[[Tensor], Tensor]) -> Tensor:
        return loss_in_chunks(hidden, logits_of, labels, int(valid), config.chunked_loss_tokens)

    # FSDP gathers the weights that it shards elsewhere, for a while.
    weights = [weight for weight in model.parameters() if not isinstance(weight, DTensor)]
    least = min(config.model.dim, config.model.hidden_dim)
    saved = SavedActivations(config.saved_activations, weights, labels.numel(), least)
    if config.recompute != "full":
        attend = saved.exactly(attend)
    with saved.packing():
        loss: Tensor = model(seq.shard(batch), seq.positions(), attend, saved.exactly(head))
    loss.backward()
    total = loss.detach().to(torch.float64)
    grads = [weight.grad for weight in model.parameters() if weight.grad is not None]
    ring.all_reduce([total, *(grads if config.sharding == "none" else ())])  # FSDP has summed those it sharded
    return total


def loss_in_chunks(
    hidden: Tensor, logits_of: Callable[[Tensor], Tensor], labels: Tensor, valid: int, chunk_tokens: int | None
) -> Tensor:
    """`local_loss` of the logits of `hidden` (batch, tokens, dim), at most `chunk_tokens` of them at a time.

    A chunk's logits are dropped once its loss is known, and computed again in backward. None: all at once, kept.
    """
    if chunk_tokens is None:
        return local_loss(logits_of(hidden), labels, valid)

    def loss_of(part: Tensor, of_part: Tensor) -> Tensor:
        return local_loss(logits_of(part), of_part, valid)

    chunks, of_chunks = hidden.flatten(0, 1).split(chunk_tokens), labels.flatten().split(chunk_tokens)
    losses = [
        checkpoint(loss_of, part[None], of_part[None], use_reentrant=False, preserve_rng_state=False)
        for part, of_part in zip(chunks, of_chunks, strict=True)
    ]
    return torch.stack(losses).sum()


def local_loss(logits: Tensor, labels: Tensor, valid: int) -> Tensor:
    """This rank's part of the mean loss over `valid` labels of all ranks; the parts add up to the mean.

    `logits`: (batch, tokens, vocabulary); `labels`: (batch, tokens). Summed in float32, or float64 for float64 logits.
    Without a label of its own the rank's part is 0 and has gradients of 0.
    """
    wide = logits.flatten(0, 1).to(torch.promote_types(logits.dtype, torch.float32))
    return F.cross_entropy(wide, labels.flatten(), ignore_index=IGNORE, reduction="sum") / max(1, valid)


def by_rank(ring: Ring, number: int) -> list[int]:
    """Every rank's `number`, by rank, on every rank."""
    slots = torch.zeros(ring.world_size, dtype=torch.float64, device=ring.device)
    slots[ring.rank] = number
    ring.all_reduce([slots])
    return [int(slot) for slot in slots]
