"""accelerate's context parallelism through a ring: a value of a configuration, and no class of a Trainer.

    TrainingArguments(..., parallelism_config=RingParallelismConfig(cp_size=2))

accelerate builds the mesh and deals the data, Trainer counts labels: both know `cp_size`. What accelerate does with a
model and a batch for torch's own context parallelism is replaced on the Accelerator that gets this configuration.
Guarantees: loss and gradients of one process, also in evaluation; what would be made of a rank's logits is refused.
Checked with accelerate 1.15 and transformers 5.23.
"""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Many
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from accelerate import ParallelismConfig
from torch import Tensor, nn

from ringattn.adapters.dropout import told_seed
from ringattn.adapters.groups import ring_of
from ringattn.adapters.hosts import require_checked
from ringattn.adapters.peft import base_of
from ringattn.adapters.transformers import prepare
from ringattn.adapters.transformers_batches import shard_batch
from ringattn.errors import InputError, UnsupportedError
from ringattn.ring import Ring
from ringattn.sequence import Sequence

__all__ = ["RingParallelismConfig"]

_OTHER = "take ringattn.adapters.transformers_trainer.RingTrainerMixin, or ringattn.adapters.trl.RingSFTTrainer"


@dataclass
class _Step:
    """What happens inside of one `maybe_context_parallel`."""

    ring: Ring
    active: ExitStack
    seqs: list[Sequence] = field(default_factory=list)


_step: ContextVar[_Step | None] = ContextVar("ringattn_accelerate_step", default=None)


class RingParallelismConfig(ParallelismConfig):
    """accelerate's ParallelismConfig, whose `cp_size` ranks are a ring.

    Ranks beside those of a ring are replicas, unless `dp_shard_size` says otherwise.

    Args:
        dp_replicate_size: Replicas. None: as many as there are ranks beside the rings.
        dp_shard_size: Ranks that shard the weights beside those of a ring, with accelerate's FSDP2.
        tp_size: 1.
        cp_size: The ranks of a ring.
        cp_backend: Left out.
        sp_size: 1.
        sp_backend: Left out.
        tp_handler: Left out.
        cp_handler: Left out.
        sp_handler: Left out.

    Raises:
        UnsupportedError: An option would not be honored.

    Example:
        args = TrainingArguments(..., parallelism_config=RingParallelismConfig(cp_size=8))
        Trainer(model=model, args=args, train_dataset=texts).train()
    """

    def __post_init__(self) -> None:
        require_checked("accelerate", "1.15")
        for name in ("cp_handler", "sp_handler", "tp_handler", "cp_backend", "sp_backend"):
            if getattr(self, name) is not None:
                raise UnsupportedError(f"{name} is of another context parallelism than a ring; leave it out")
        super().__post_init__()
        for name in ("sp_size", "tp_size"):
            if getattr(self, name) != 1:
                raise UnsupportedError(f"{name}={getattr(self, name)} beside a ring; set cp_size, and leave it at 1")
        self.cp_backend = "ringattn"  # accelerate and Trainer do for "torch" what they do for torch's attention

    def build_device_mesh(self, device_type: str) -> Any:
        """The mesh of all ranks; those of a ring follow each other.

        Args:
            device_type: Of the ranks' devices.

        Returns:
            The mesh, or None of one rank.

        Raises:
            InputError: The ranks are no multiple of `cp_size`.
        """
        ranks = dist.get_world_size() if dist.is_initialized() else 1
        if ranks % self.total_size:
            raise InputError(f"{ranks} ranks are no multiple of cp_size and the other sizes, {self.total_size}")
        if ranks > self.total_size:
            self._set_size("dp_replicate", self.dp_replicate_size * ranks // self.total_size)
        return super().build_device_mesh(device_type)

    def _validate_accelerator(self, accelerator: Any) -> None:
        """Called by accelerate with the Accelerator that it configures."""
        if self.cp_size == 1:
            return
        ring = ring_of(accelerator.torch_device_mesh["cp"])
        inner = accelerator.prepare_model
        accelerator._prepare_cp = partial(_prepare_all, ring)
        accelerator.prepare_model = lambda model, *args, **kwargs: inner(_prepared(model, ring), *args, **kwargs)
        accelerator.maybe_context_parallel = partial(_sharding, ring)
        accelerator.gather_for_metrics = partial(_gather_losses, accelerator, self.cp_size)


def _prepare_all(ring: Ring, *args: Any) -> tuple[Any, ...]:
    for one in args:
        if isinstance(one, nn.Module):
            _prepared(one, ring)
    return args


SHARDS = "ringattn_shards_batches"
"""Marks a model that shards what it is called with."""


def _prepared(model: Any, ring: Ring) -> Any:
    """The model, which shards the batches of a step inside of `maybe_context_parallel`."""
    if not hasattr(base_of(model), "config"):
        raise UnsupportedError(f"{type(model).__name__} is no model of transformers; shard its batches in your loop")
    prepare(model)
    if not getattr(model, SHARDS, False):
        setattr(model, SHARDS, True)
        model.register_forward_pre_hook(_shard_call, with_kwargs=True, prepend=True)
    return model


@torch.compiler.disable
def _shard_call(model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    step = _step.get()
    if step is None or torch._C._current_graph_task_id() != -1:
        return None
    if args:
        raise InputError("inputs without names: call the model with keywords, as Trainer does")
    if kwargs.get("labels") is None:
        raise UnsupportedError(
            "no labels came to the model, so that its loss is made of its logits, of which a rank has a part "
            f"(label_smoothing_factor, compute_loss_func or a loop's own loss): leave that out, or {_OTHER}"
        )
    base = base_of(model)
    if model.training and getattr(base.get_input_embeddings(), "neftune_noise_alpha", None) is not None:
        raise UnsupportedError(
            "neftune_noise_alpha: the noise is scaled by the tokens of a row, of which a rank has a part; leave it out"
        )
    batch = {name: x for name, x in kwargs.items() if isinstance(x, Tensor)}
    seq, mine = shard_batch(step.ring, batch, model=base)
    step.seqs.append(seq)
    active = step.ring.activate(seq, dropout_seed=told_seed(step.ring))
    step.active.enter_context(active)  # to the end of the step, backward included
    return args, {**kwargs, **mine}


@contextmanager
def _sharding(
    ring: Ring, buffers: Many[Tensor] | None = None, buffer_seq_dims: Many[int] | None = None,
    no_restore_buffers: set[Tensor] | None = None,
) -> Iterator[None]:  # fmt: skip
    """accelerate's maybe_context_parallel: one call of the model is sharded, and then the buffers, in place."""
    with ExitStack() as active:
        step = _Step(ring, active)
        token = _step.set(step)
        try:
            yield
        finally:
            _step.reset(token)
    if len(step.seqs) != 1:
        raise UnsupportedError(
            f"a step called the model {len(step.seqs)} times: a batch is sharded where a model that accelerate has "
            "prepared is called with it, once"
        )
    kept = {id(one) for one in no_restore_buffers or ()}
    with torch.no_grad():
        for one, dim in zip(buffers or (), buffer_seq_dims or (), strict=True):
            if id(one) in kept:  # Trainer counts the tokens of these
                one.set_(step.seqs[0].shard(one, dim).contiguous())  # type: ignore[call-overload]


def _gather_losses(accelerator: Any, ranks: int, losses: Any, use_gather_object: bool = False) -> Tensor:
    """Losses (texts of a batch,) of all replicas: of a ring the mean over its ranks, and none for texts read twice."""
    if use_gather_object or not isinstance(losses, Tensor) or losses.dim() != 1 or not losses.is_floating_point():
        raise UnsupportedError(
            "gather_for_metrics of other numbers than losses: logits and counts are those of a rank's own tokens "
            f"(compute_metrics, predict, SFTTrainer): {_OTHER}"
        )
    found: Tensor = accelerator.gather(losses).unflatten(0, (-1, ranks, len(losses))).mean(1).flatten()
    state = accelerator.gradient_state
    return found[: state.remainder] if state.end_of_dataloader and state.remainder > 0 else found
