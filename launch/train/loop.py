"""The training loop of one rank.

Every rank draws its replica's sequences and keeps its own tokens. It sums the loss of these tokens and divides by the
number of labels *of all ranks of all replicas*. Gradients are then summed over all of these ranks. The result is the
gradient of the one-process loss, whatever the layout and however unevenly labels are distributed. A mean of the ranks'
means would be a different loss, although it looks plausible in a log.

Guarantees: the losses are the same, up to rounding, for every number of replicas, ranks and sequences per micro batch.
A rank without labels or tokens takes part in each step.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Many
from dataclasses import asdict, replace
from functools import partial
from math import isfinite
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from ringattn import Ring, Sequence
from ringattn.core.dilation import check
from ringattn.errors import InputError, NonFiniteError, RingError
from ringattn.launch.folders import FolderLock, write_json
from ringattn.launch.memory import PeakMemory
from ringattn.launch.train.checkpoints import Curve, all_finite, checkpoints_of
from ringattn.launch.train.config import ModelConfig, TrainConfig, from_spec
from ringattn.launch.train.data import VOCABULARY, BatchPart, Documents, Draws, drawn
from ringattn.launch.train.mesh import folder_of_run, load_on_all_ranks, opened_mesh, replica_of
from ringattn.launch.train.model import (
    Attend,
    SavedActivations,
    Transformer,
    local_bytes,
    make_optimizer,
    place_model,
    state_bytes,
)
from ringattn.layers.tiled import Tiling, tiled

DTYPES = {"fp32": torch.float32, "fp64": torch.float64, "bf16": torch.bfloat16}
IGNORE = -100
"""The label of positions without a loss, as in torch's cross entropy."""
LINES = 10
"""Lines of progress without a terminal, if steps are fast."""
QUIET_S, QUIET_SHARE = 5.0, 0.02
"""Slow steps print more lines: after this many seconds, or this share of the time so far, whichever is longer."""


def train_rank(spec: Mapping[str, Any]) -> dict[str, Any]:
    """Train each configuration of `spec["runs"]` in turn. This is the entry function of a rank's process.

    Each run opens a mesh of its own. `spec["keeps_result"]` says whether rank 0 writes the result to the folder `out`,
    and `spec["lines"]` is the number of progress lines of a run. Returns {"rank": ..., "runs": [the result of `train`,
    ...]}.
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
    everyone: Ring | None = None,
    keeps_result: bool = False,
) -> dict[str, Any]:
    """Train one model on this rank. This is a collective call of all ranks of all replicas.

    Args:
        ring: The ranks that share this rank's sequences.
        config: The run, the same on all ranks.
        lines: The number of progress lines to print, 0 for none.
        everyone: The ranks of all replicas. None stands for the ranks of `ring`.
        keeps_result: Whether rank 0 writes the result to `out`/result.json.

    Returns:
        The result as plain data for JSON, the same on every rank except `counters` and the times: `config`, `replicas`,
        `ranks` (of one ring), and `tokens_of_rank` (in the first sequence of the last step). For each step since the
        run began, also before a resume: `losses` and `grad_norms`. `damaged_checkpoints`: those that were not loaded.
        `first_step` of this process, `step_s` of each of its steps, and `tokens_per_s` (of the median step without the
        first; 0 if there was no step). `replicated_bytes`: weights, gradients and optimizer state of a rank, or of its
        shard under sharding. `memory_growth_bytes` by rank: these bytes, activations and messages, measured from the
        end of a tiny warm-up. `memory_method` and `counters`.

    Raises:
        InputError: On all ranks, with the key first, for wrong options, if configurations or texts differ between
            ranks, if another run writes to `out`, or at a step without a label.
        NonFiniteError: At a step whose loss or gradient norm is not finite, unless such steps are skipped.
        RingError: If a checkpoint cannot be written, or a step would begin after `limit_s`.
    """
    everyone, ends = everyone or ring, time.monotonic() + config.limit_s
    text = load_on_all_ranks(everyone, ring, config)
    with folder_of_run(everyone, config, keeps_result) as lock:
        result = _trained(ring, everyone, text, config, lines, lock, ends)
        if keeps_result and everyone.rank == 0:
            write_json(Path(config.out) / "result.json", result)
    return result


def _trained(
    ring: Ring, everyone: Ring, text: Documents, config: TrainConfig, lines: int, lock: FolderLock | None,
    ends: float,
) -> dict[str, Any]:  # fmt: skip
    """Train and return the result; see `train`.

    No step begins after the time `ends`. `lock` is the lock of the run's folder on rank 0, None on other ranks.
    """
    replica = replica_of(everyone, ring)
    # Start to measure memory after the warm-up and before the model exists, because its weights count.
    warm_up(ring, everyone, text, config)
    memory = PeakMemory(ring.device)
    ring.reset_counters()
    model, optimizer = make_model(everyone, config, text.vocabulary)
    checkpoints = checkpoints_of(everyone, config, text, lock)
    curve = checkpoints.resume(model, optimizer) if checkpoints else Curve()
    first_step, step_s = len(curve.losses), []
    draws, tokens = Draws(ring, replica, text, config), config.batch * config.tokens
    title = f"{everyone.world_size} x {config.dtype}"
    with TrainingProgress(title, config.steps if lines else 0, lines) as progress:
        for step in range(first_step, config.steps):
            if time.monotonic() > ends:
                raise RingError(
                    f"limit_s={config.limit_s:g}: the time limit is reached, so the run ends after {step} of "
                    f"{config.steps} steps; raise limit_s"
                )
            started = time.perf_counter()
            set_learning_rate(optimizer, config, step)
            name = f"step {step + 1} of {config.steps}"
            ahead = partial(draws.draw_ahead, step + 1)
            loss = backward(ring, everyone, draws.of_step(step), model, config, name, ahead).item()
            norm = clip(model, config)
            if error := nonfinite_step(name, loss, norm):
                skip(everyone, model, optimizer, config, error, name)
                curve.skipped_steps.append(step)
            else:
                update(model, optimizer)
            curve.grad_norms.append(None if error else norm)
            curve.losses.append(None if error else loss)
            step_s.append(time.perf_counter() - started)
            if lines:
                progress.done(step, curve.losses[-1], tokens / step_s[-1], len(curve.skipped_steps))
            if checkpoints:
                checkpoints.save_if_due(model, optimizer, curve)
    if len(curve.skipped_steps) == config.steps:
        raise NonFiniteError(
            f"all {config.steps} steps were skipped, because none was finite; nonfinite=stop reports the cause"
        )
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
        "memory_growth_bytes": [int(size) for size in everyone.all_gather_text(str(memory.growth_bytes()))],
        "memory_method": memory.method,
        "counters": ring.counters(),
    }


def make_model(everyone: Ring, config: TrainConfig, vocabulary: int = VOCABULARY) -> tuple[Transformer, Optimizer]:
    """Make the model and its optimizer on this rank's device. The weights, or their shards, are those of rank 0."""
    model = Transformer(
        config.model, vocabulary, DTYPES[config.dtype], config.seed, config.recompute, config.tiled_mlp_tokens,
        config.head_groups,
    )  # fmt: skip
    place_model(everyone, model, config.sharding, config.timeout_s)
    return model, make_optimizer(config.optimizer, model.parameters(), config.learning_rate, config.weight_decay)


def warm_up(ring: Ring, everyone: Ring, text: Documents, config: TrainConfig) -> None:
    """Run one step of a tiny model on a few tokens of each rank.

    A first step loads code pages, the optimizer's modules and connections. They would otherwise count as memory and
    time of training, and can exceed the needs of a small model.
    """
    tiny = replace(
        config,
        tokens=min(config.tokens, 8 * ring.world_size),
        batch=config.replicas,
        curriculum_start_tokens=None,
        head_groups=1,
        model=ModelConfig(layers=1, dim=16, heads=2, kv_heads=1, hidden_dim=16),
    )
    model, optimizer = make_model(everyone, tiny, text.vocabulary)
    backward(ring, everyone, drawn(ring, replica_of(everyone, ring), text, 0, tiny), model, tiny)
    clip(model, tiny)
    update(model, optimizer)


# --- one step --------------------------------------------------------------------------------------------------------


def set_learning_rate(optimizer: Optimizer, config: TrainConfig, step: int) -> None:
    """Set the learning rate of `step` (counted from 0), which grows linearly from 0 during the warm-up.

    It depends only on the configuration and the step, so a resume with other keys also gets the right rate.
    """
    rate = config.learning_rate * min(1.0, (step + 1) / max(1, config.warmup_steps))
    for group in optimizer.param_groups:
        # torchao's optimizers store the rate in a tensor, which must not be replaced by another object.
        group["lr"] = group["lr"].fill_(rate) if isinstance(group["lr"], Tensor) else rate


def clip(model: Transformer, config: TrainConfig) -> float:
    """Scale the gradients down to the norm `clip_norm`. Return their norm before, which is the same on all ranks."""
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), config.clip_norm)
    return (norm.full_tensor() if isinstance(norm, DTensor) else norm).item()


def update(model: Transformer, optimizer: Optimizer) -> None:
    """Run the optimizer's step, and drop the gradients."""
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)


def nonfinite_step(name: str, loss: float, norm: float) -> NonFiniteError | None:
    """Return the error of the step called `name` if its loss or gradient norm is not finite, else None."""
    values = {"loss": loss, "gradient norm": norm}
    spoiled = [f"{what} is {value}" for what, value in values.items() if not isfinite(value)]
    if not spoiled:
        return None
    return NonFiniteError(
        f"{name}: its {' and its '.join(spoiled)}, so the weights were not changed; lower learning_rate or clip_norm "
        "and resume from the last checkpoint, or skip such steps with nonfinite=skip"
    )


def skip(
    everyone: Ring, model: Transformer, optimizer: Optimizer, config: TrainConfig, error: NonFiniteError, name: str
) -> None:
    """Drop the gradients of a step that is not finite, or raise `error` if the configuration stops at such steps.

    Raises `NonFiniteError` if the weights are not finite either.
    """
    if config.nonfinite == "stop":
        raise error
    if not all_finite(everyone, model):
        raise NonFiniteError(f"{name}: the weights are not finite, which skipping cannot repair; lower learning_rate")
    optimizer.zero_grad(set_to_none=True)


def backward(
    ring: Ring, everyone: Ring, parts: Many[BatchPart], model: Transformer, config: TrainConfig, name: str = "",
    meanwhile: Callable[[], None] | None = None,
) -> Tensor:  # fmt: skip
    """Compute the gradient of the global mean loss in the model's parameters, and return that loss (no dimensions).

    `parts` are the sequences of this replica, in at least one part. They are the same on every rank of `ring`, and
    their number is the same in every replica. The division into parts does not change the result. `everyone` has the
    ranks of all replicas. If `name` is given, it names the step in the `InputError` that all ranks raise if the step
    has no label. `meanwhile` is called before the last part's backward pass, and starts what its kernels can hide.
    """
    labels = [_labels(part, config) for part in parts]
    # Count the labels of all parts and ranks before the first backward, because each part's loss is divided by it.
    valid = torch.stack([(of_part != IGNORE).sum() for of_part in labels]).sum().to(torch.float64)
    everyone.all_reduce([valid])
    if name and not valid:
        raise InputError(
            f"{name}: has no label, because the first token of each document and the first "
            f"prompt_tokens={config.prompt_tokens} tokens have none; use longer documents or another separator, "
            "fewer prompt_tokens, or a larger batch"
        )
    total = torch.zeros_like(valid)
    for number, (part, of_part) in enumerate(zip(parts, labels, strict=True)):
        if config.sharding != "none":
            # Sum gradients over the ranks only after the last part. Until then they are accumulated unsharded.
            model.set_requires_gradient_sync(number == len(parts) - 1)  # type: ignore[operator]
        loss = local_part(part.seq, model, part.seq.shard(part.tokens), of_part, int(valid), config)
        if meanwhile and number == len(parts) - 1:
            meanwhile()
        loss.backward()
        total += loss.detach()
    grads = [weight.grad for weight in model.parameters() if weight.grad is not None]
    if everyone is not ring:
        # Two communicators of one GPU must not be active at the same time.
        ring.synchronize()
    everyone.all_reduce([total, *(grads if config.sharding == "none" else ())])  # FSDP has summed sharded gradients
    return total


def _labels(part: BatchPart, config: TrainConfig) -> Tensor:
    """Return the labels of this rank's tokens, (sequences, tokens)."""
    # Mark the prompt in the whole sequences, because it may end on another rank. `shard_labels` then shifts them.
    learned = part.tokens.clone()
    learned[:, : config.prompt_tokens] = IGNORE
    return part.seq.shard_labels(learned, ignore_index=IGNORE)


def local_part(
    seq: Sequence, model: Transformer, tokens: Tensor, labels: Tensor, valid: int, config: TrainConfig
) -> Tensor:
    """Return this rank's part of the mean loss over the `valid` labels of all ranks.

    `tokens` and `labels` are those of this rank, (sequences, tokens).
    """

    # Leave out weights that FSDP shards, because the model computes with temporary gathered copies of them.
    weights = [weight for weight in model.parameters() if not isinstance(weight, DTensor)]
    narrowest = min(config.model.dim, config.model.hidden_dim)
    saved = SavedActivations(config.saved_activations, weights, labels.numel(), narrowest)
    loss_of = saved.exactly(
        partial(loss_in_chunks, labels=labels, valid=valid, chunk_tokens=config.chunked_loss_tokens)
    )

    def head(hidden: Tensor, norm: nn.Module, unembedding: nn.Module) -> Tensor:
        if config.chunked_loss_tokens is None:
            return loss_of(norm(hidden), unembedding)
        return loss_of(hidden, nn.Sequential(norm, unembedding))

    attend = attention_of(seq, config)
    # Under full recomputation, attention is within an activation checkpoint. There `exactly` would keep tensors that
    # are to be recomputed.
    if config.recompute not in ("full", "offloaded"):
        attend = saved.exactly(attend)
    with saved.packing():
        loss: Tensor = model(tokens, seq.positions(per_document=True), attend, head)
    return loss


def attention_of(seq: Sequence, config: TrainConfig) -> Attend:
    """Return the function that computes causal attention on the ring of `seq`, full or in dilated branches."""
    if config.attention == "dilated":
        branches = check(config.segment_lengths or (), config.dilation_rates or ())
        options: dict[str, Any] = {**branches._asdict(), "causal": True, "schedule": config.schedule}
        return partial(seq.ring.dilated_attention, seq=seq, **options)
    return partial(seq.ring.attention, seq=seq, causal=True, schedule=config.schedule)


def loss_in_chunks(
    hidden: Tensor, logits_of: nn.Module, labels: Tensor, valid: int, chunk_tokens: int | None
) -> Tensor:
    """Return `local_loss` of the logits of `hidden` (batch, tokens, dim), computed in chunks of `chunk_tokens` tokens.

    The logits of a chunk are dropped after its loss, and computed again in backward. If `chunk_tokens` is None, all
    logits are computed at once and kept.
    """
    if chunk_tokens is None:
        return local_loss(logits_of(hidden), labels, valid)

    def loss_of(part: Tensor, of_part: Tensor) -> Tensor:
        return local_loss(logits_of(part)[None], of_part[None], valid)

    return tiled(Tiling(loss_of, chunk_tokens, summed=True), hidden, list(logits_of.parameters()), [labels])


def local_loss(logits: Tensor, labels: Tensor, valid: int) -> Tensor:
    """Return this rank's part of the mean loss over `valid` labels of all ranks; the parts add up to the mean.

    `logits`: (batch, tokens, vocabulary); `labels`: (batch, tokens). Summed in float32, or float64 for float64 logits.
    A rank without labels has a part of 0, with gradients of 0.
    """
    wide = logits.flatten(0, 1).to(torch.promote_types(logits.dtype, torch.float32))
    return F.cross_entropy(wide, labels.flatten(), ignore_index=IGNORE, reduction="sum") / max(1, valid)


# --- progress --------------------------------------------------------------------------------------------------------


class TrainingProgress(Progress):
    """A display of the steps of one run, with `title` at the start of each line.

    It is a live bar on a terminal. Elsewhere it prints plain lines: always for the last step, and if `lines` is more
    than 1 also for the first step, about `lines` steps in between, and more if steps are slow. The caller decides which
    rank shows the progress.
    """

    def __init__(self, title: str, steps: int, lines: int = LINES) -> None:
        self.title, self.steps, self.lines = title, steps, lines
        self._began = self._printed = time.monotonic()
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[figures]}"),
        )
        super().__init__(*columns, TimeRemainingColumn(), disable=not Console().is_terminal)
        self._run = self.add_task(title, total=steps, figures="")

    def done(self, step: int, loss: float | None, tokens_per_s: float, skipped: int = 0) -> None:
        """Show that step number `step` (from 0) has ended; `loss` is None if it was skipped.

        `skipped` is the number of skipped steps so far.
        """
        figures = f"loss {'skipped' if loss is None else f'{loss:.4f}'}  {tokens_per_s:,.0f} tokens/s"
        figures += f"  {skipped} skipped" if skipped else ""
        every = max(1, self.steps // max(1, self.lines))
        now = time.monotonic()
        is_due = now - self._printed >= max(QUIET_S, QUIET_SHARE * (now - self._began))
        if not self.disable:
            self.update(self._run, completed=step + 1, figures=figures)
        elif step == self.steps - 1 or (self.lines > 1 and (step == 0 or (step + 1) % every == 0 or is_due)):
            self._printed = now
            print(f"{self.title}  step {step + 1}/{self.steps}  {figures}", flush=True)
