"""The training loop of one rank.

Every rank draws its replica's sequences, keeps its own tokens, and sums its own loss over them, divided by the number
of labels *of all ranks of all replicas*; gradients are then summed over all of these. That is the gradient of the
one-process loss, whatever the layout and however unevenly labels fall. A mean of the ranks' means is another loss, and
looks fine in a log.
Guarantees: the same losses for every number of replicas, ranks and sequences at once, up to rounding; a rank without
labels or tokens takes part.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from collections.abc import Sequence as Many
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from ringattn import Ring, Sequence
from ringattn.core.presets import check
from ringattn.errors import InputError, NonFiniteError, RingError
from ringattn.launch.folders import FolderLock, write_json
from ringattn.launch.memory import PeakMemory
from ringattn.launch.train.alike import folder_of_run, load_alike
from ringattn.launch.train.batches import BatchPart, drawn
from ringattn.launch.train.checkpoints import Curve, checkpoints_of
from ringattn.launch.train.config import TrainConfig, from_spec
from ringattn.launch.train.documents import Documents
from ringattn.launch.train.finite import all_finite, nonfinite_step
from ringattn.launch.train.mesh import opened_mesh, replica_of
from ringattn.launch.train.model import Attend, ModelConfig, Transformer
from ringattn.launch.train.optimizers import local_bytes, make_optimizer, set_learning_rate, state_bytes
from ringattn.launch.train.progress import TrainingProgress
from ringattn.launch.train.saved_activations import SavedActivations
from ringattn.launch.train.text import VOCABULARY
from ringattn.layers.tiled import Tiling, tiled
from ringattn.runtime.rank_group import RankGroup

DTYPES = {"fp32": torch.float32, "fp64": torch.float64, "bf16": torch.bfloat16}
IGNORE = -100
LINES = 10
"""The label that does not count, as in torch's cross entropy."""


def train_rank(spec: Mapping[str, Any]) -> dict[str, Any]:
    """Entry of a rank's process: train each configuration of `spec["runs"]` in turn, each over a mesh of its own.

    `spec["keeps_result"]`: whether rank 0 writes the result into `out_dir`; `spec["lines"]`: of progress of each run.
    Returns {"rank": ..., "runs": [the result of `train`, ...]}.
    """
    configs = [from_spec(run) for run in spec["runs"]]
    if configs[0].threads_per_rank is not None:
        torch.set_num_threads(configs[0].threads_per_rank)
    results = []
    for config in configs:
        with opened_mesh(config) as (ring, everyone):
            keeps = bool(spec.get("keeps_result"))
            lines = int(spec.get("lines", LINES)) if everyone.rank == 0 else 0
            results.append(train(ring, config, lines, everyone, keeps))
            rank = everyone.rank
    return {"rank": rank, "runs": results}


def train(
    ring: Ring,
    config: TrainConfig,
    lines: int = 0,
    everyone: RankGroup | None = None,
    keeps_result: bool = False,
) -> dict[str, Any]:
    """Train one model on this rank; all ranks of all replicas call it together.

    `ring`: the ranks that share this rank's sequences. `everyone`: those of all replicas; the ring if None.
    `lines`: of progress, 0 for none. `keeps_result`: rank 0 writes the result to `out_dir`/result.json.
    Returns a JSON-ready result, the same on every rank but for `counters` and the times: config, replicas, ranks (of a
    ring), tokens per rank (of the last step's first sequence), per step `losses` and `grad_norms` since the run began,
    in whatever process; `damaged_checkpoints` that were passed over; `first_step` of this process, `step_s` from there,
    and `tokens_per_s` (median, without the first step; 0 if none was left), `replicated_bytes` (weights, gradients and
    optimizer state that every rank has; its own part under sharding), `memory_growth_bytes` (by rank: these,
    activations and messages, counted from after a tiny warm-up), `memory_method` and `counters`. Raises `InputError`,
    with the key first, on all ranks: also where they have other configurations or texts than each other, where another
    run writes to `out_dir`, and at a step without a label; `NonFiniteError` at a step whose loss or gradient norm is
    not finite, unless it is skipped; `RingError` where a checkpoint cannot be written, and where a step would begin
    after `limit_s`.
    """
    everyone, ends = everyone or ring, time.monotonic() + config.limit_s
    text = load_alike(everyone, ring, config)
    with folder_of_run(everyone, config, keeps_result) as lock:
        result = _trained(ring, everyone, text, config, lines, lock, ends)
        if keeps_result and everyone.rank == 0:
            write_json(Path(config.out_dir) / "result.json", result)
    return result


def _trained(
    ring: Ring, everyone: RankGroup, text: Documents, config: TrainConfig, lines: int, lock: FolderLock | None,
    ends: float,
) -> dict[str, Any]:  # fmt: skip
    """The result of `train`, which ends at the time `ends`; `lock` is rank 0's of the folder it saves to."""
    replica = replica_of(everyone, ring)
    warm_up(ring, everyone, text, config)
    memory = PeakMemory(ring.device)
    ring.reset_counters()
    model, optimizer = make_model(everyone, config, text.vocabulary)
    checkpoints = checkpoints_of(everyone, config, text, lock)
    curve = checkpoints.resume(model, optimizer) if checkpoints else Curve()
    first_step, step_s = len(curve.losses), []
    tokens = config.batch * config.tokens
    title = f"{everyone.world_size} x {config.dtype}"
    with TrainingProgress(title, config.steps if lines else 0, lines) as progress:
        for step in range(first_step, config.steps):
            if time.monotonic() > ends:
                raise RingError(
                    f"limit_s={config.limit_s:g}: that long the run has had, so it is ended after {step} of "
                    f"{config.steps} steps; raise limit_s"
                )
            started = time.perf_counter()
            told = f"step {step + 1} of {config.steps}"
            loss = backward(ring, everyone, drawn(ring, replica, text, step, config), model, config, told).item()
            norm = clip(model, config)
            if error := nonfinite_step(told, loss, norm):
                skip(everyone, model, optimizer, config, error, told)
                curve.skipped_steps.append(step)
            else:
                set_learning_rate(optimizer, config.learning_rate * min(1.0, (step + 1) / max(1, config.warmup_steps)))
                update(model, optimizer)
            curve.grad_norms.append(None if error else norm)
            curve.losses.append(None if error else loss)
            step_s.append(time.perf_counter() - started)
            if lines:
                progress.done(step, curve.losses[-1], tokens / step_s[-1], len(curve.skipped_steps))
            if checkpoints:
                checkpoints.save_if_due(model, optimizer, curve)
    if len(curve.skipped_steps) == config.steps:
        raise NonFiniteError(f"all {config.steps} steps were skipped, none was finite; see what nonfinite=stop says")
    return {
        "config": asdict(config),
        "replicas": config.replicas,
        "ranks": ring.world_size,
        "tokens_of_rank": list(drawn(ring, replica, text, config.steps - 1, config)[0].seq.counts),
        **asdict(curve),
        "damaged_checkpoints": checkpoints.damaged if checkpoints else [],
        "first_step": first_step,
        "step_s": step_s,
        "tokens_per_s": tokens / median(step_s[1:] or step_s) if step_s else 0.0,
        "replicated_bytes": 2 * sum(map(local_bytes, model.parameters())) + state_bytes(optimizer),
        "memory_growth_bytes": by_rank(everyone, memory.growth_bytes()),
        "memory_method": memory.method,
        "counters": ring.counters(),
    }


def make_model(everyone: RankGroup, config: TrainConfig, vocabulary: int = VOCABULARY) -> tuple[Transformer, Optimizer]:
    """The model on this rank's device, with rank 0's weights on every rank, or dealt out to them, and its optimizer."""
    model = Transformer(
        config.model, vocabulary, DTYPES[config.dtype], config.seed, config.recompute, config.tiled_mlp_tokens
    )
    model.to(everyone.device)
    everyone.broadcast([weight.data for weight in model.parameters()], src=0)
    if config.sharding != "none":
        # Only here: FSDP takes half a second to import.
        from ringattn.launch.train.sharding import shard_model

        shard_model(everyone, model, config.sharding, config.timeout_s)
    return model, make_optimizer(config.optimizer, model.parameters(), config.learning_rate, config.weight_decay)


def warm_up(ring: Ring, everyone: RankGroup, text: Documents, config: TrainConfig) -> None:
    """One step of a tiny model on a few tokens of each rank.

    Whatever a first step loads (code pages, the optimizer's modules, connections) would otherwise count as memory and
    time of training, and can exceed what a small model needs.
    """
    tiny = replace(
        config,
        tokens=min(config.tokens, 8 * ring.world_size),
        batch=config.replicas,
        curriculum_start_tokens=None,
        model=ModelConfig(layers=1, dim=16, heads=2, kv_heads=1, hidden_dim=16),
    )
    model, optimizer = make_model(everyone, tiny, text.vocabulary)
    backward(ring, everyone, drawn(ring, replica_of(everyone, ring), text, 0, tiny), model, tiny)
    clip(model, tiny)
    update(model, optimizer)


def clip(model: Transformer, config: TrainConfig) -> float:
    """Scale the gradients down to `clip_norm`. Returns their norm before, which all ranks share."""
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), config.clip_norm)
    return (norm.full_tensor() if isinstance(norm, DTensor) else norm).item()


def update(model: Transformer, optimizer: Optimizer) -> None:
    """Step, and drop the gradients."""
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)


def skip(
    everyone: RankGroup, model: Transformer, optimizer: Optimizer, config: TrainConfig, error: NonFiniteError, told: str
) -> None:
    """Drop the gradients of a step that is not finite; raises `error` unless the configuration skips such steps."""
    if config.nonfinite == "stop":
        raise error
    if not all_finite(everyone, model):
        raise NonFiniteError(f"{told}: the weights are not finite, which skipping cannot mend; lower learning_rate")
    optimizer.zero_grad(set_to_none=True)


def backward(
    ring: Ring, everyone: RankGroup, parts: Many[BatchPart], model: Transformer, config: TrainConfig, told: str = ""
) -> Tensor:
    """Leave the gradient of the global mean loss in the model's parameters, and return that loss (no dimensions).

    `parts`: the sequences of this replica, at least one part, the same on every rank of `ring`, and as many in every
    replica; how they are cut into parts changes nothing. `everyone` are the ranks of all replicas. `told`: the step in
    words, if it must have a label; raises `InputError` on all ranks if it has none.
    """
    labels = [_labels(part, config) for part in parts]
    valid = torch.stack([(some != IGNORE).sum() for some in labels]).sum().to(torch.float64)
    everyone.all_reduce([valid])
    if told and not valid:
        raise InputError(
            f"{told}: no label is counted, so there is nothing to learn: the first token of each document and those "
            f"before prompt_tokens={config.prompt_tokens} are read only; use longer documents or another separator, "
            "fewer prompt_tokens, or a greater batch"
        )
    total = torch.zeros_like(valid)
    for number, (part, of_part) in enumerate(zip(parts, labels, strict=True)):
        if config.sharding != "none":
            # Gradients of earlier parts wait whole, in the weights' gathered form, and are summed over the ranks once.
            model.set_requires_gradient_sync(number == len(parts) - 1)  # type: ignore[operator]
        loss = local_part(part.seq, model, part.seq.shard(part.tokens), of_part, int(valid), config)
        loss.backward()
        total += loss.detach()
    grads = [weight.grad for weight in model.parameters() if weight.grad is not None]
    if everyone is not ring:
        # Two communicators of one GPU must not be at work at the same time.
        ring.synchronize()
    everyone.all_reduce([total, *(grads if config.sharding == "none" else ())])  # FSDP has summed those it sharded
    return total


def _labels(part: BatchPart, config: TrainConfig) -> Tensor:
    """The labels of this rank's tokens, (sequences, tokens)."""
    learned = part.tokens.clone()
    learned[:, : config.prompt_tokens] = IGNORE
    return part.seq.shard_labels(learned, ignore_index=IGNORE)


def local_part(
    seq: Sequence, model: Transformer, tokens: Tensor, labels: Tensor, valid: int, config: TrainConfig
) -> Tensor:
    """This rank's part of the loss over `valid` labels of all ranks: of its `tokens` and `labels` (batch, tokens)."""

    def head(hidden: Tensor, logits_of: nn.Module) -> Tensor:
        return loss_in_chunks(hidden, logits_of, labels, valid, config.chunked_loss_tokens)

    # FSDP gathers the weights that it shards elsewhere, for a while.
    weights = [weight for weight in model.parameters() if not isinstance(weight, DTensor)]
    least = min(config.model.dim, config.model.hidden_dim)
    saved = SavedActivations(config.saved_activations, weights, labels.numel(), least)
    attend = attention_of(seq, config)
    if config.recompute not in ("full", "offloaded"):
        attend = saved.exactly(attend)
    with saved.packing():
        loss: Tensor = model(tokens, seq.positions(per_document=True), attend, saved.exactly(head))
    return loss


def attention_of(seq: Sequence, config: TrainConfig) -> Attend:
    """Causal attention over the ring of `seq`, to all keys before a query or in dilated branches."""
    if config.attention == "dilated":
        branches = check(config.segment_lengths or (), config.dilation_rates or ())
        options: dict[str, Any] = {**branches._asdict(), "causal": True, "schedule": config.schedule}
        return partial(seq.ring.dilated_attention, seq=seq, **options)
    return partial(seq.ring.attention, seq=seq, causal=True, schedule=config.schedule)


def loss_in_chunks(
    hidden: Tensor, logits_of: nn.Module, labels: Tensor, valid: int, chunk_tokens: int | None
) -> Tensor:
    """`local_loss` of the logits of `hidden` (batch, tokens, dim), at most `chunk_tokens` of them at a time.

    A chunk's logits are dropped once its loss is known, and computed again in backward. None: all at once, kept.
    """
    if chunk_tokens is None:
        return local_loss(logits_of(hidden), labels, valid)

    def loss_of(part: Tensor, of_part: Tensor) -> Tensor:
        return local_loss(logits_of(part)[None], of_part[None], valid)

    return tiled(Tiling(loss_of, chunk_tokens, summed=True), hidden, list(logits_of.parameters()), [labels])


def local_loss(logits: Tensor, labels: Tensor, valid: int) -> Tensor:
    """This rank's part of the mean loss over `valid` labels of all ranks; the parts add up to the mean.

    `logits`: (batch, tokens, vocabulary); `labels`: (batch, tokens). Summed in float32, or float64 for float64 logits.
    Without a label of its own the rank's part is 0 and has gradients of 0.
    """
    wide = logits.flatten(0, 1).to(torch.promote_types(logits.dtype, torch.float32))
    return F.cross_entropy(wide, labels.flatten(), ignore_index=IGNORE, reduction="sum") / max(1, valid)


def by_rank(everyone: RankGroup, number: int) -> list[int]:
    """Every rank's `number`, by rank, on every rank."""
    slots = torch.zeros(everyone.world_size, dtype=torch.float64, device=everyone.device)
    slots[everyone.rank] = number
    everyone.all_reduce([slots])
    return [int(slot) for slot in slots]
