"""Lightning: a mixin that gives a LightningModule its ring, its sampler, its shards and its loss.

Use it with `Trainer(strategy="ddp", use_distributed_sampler=False)` and other strategies that average gradients over
all ranks; see docs/embedding-lightning.md. A ring has consecutive ranks. The rings are data-parallel replicas.

Guarantees: weights are updated as if each ring were one process with whole batches. Ranks of a ring that get different
batches raise.
"""

from __future__ import annotations

from collections.abc import Sequence as Many
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import Callback
from torch import Tensor, nn
from torch.utils.data import Dataset, DistributedSampler
from torch.utils.hooks import RemovableHandle

from ringattn.adapters.host_versions import Host
from ringattn.adapters.hosts import check_alike
from ringattn.core.layout import LayoutName
from ringattn.errors import InputError, UnsupportedError
from ringattn.ring import Ring
from ringattn.sequence import Sequence, check_documents

__all__ = ["RingMixin"]

HOST = Host(
    "lightning",
    ("2.5", "2.6"),
    parameters={"lightning.pytorch:Callback.on_exception": ("trainer", "pl_module", "exception")},
)
HOST.require()


class _OnException(Callback):
    """A callback that closes the ring after an exception.

    Lightning then calls neither the module's hooks nor its teardown.
    """

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """End the ring on every rank with this cause, unless it has ended already."""
        ring = getattr(pl_module, "ring", None)
        if isinstance(ring, Ring):
            ring.__exit__(type(exception), exception, exception.__traceback__)


def _refuse_tensor_parallel(strategy: Any) -> None:
    """Raise `UnsupportedError` for tensor parallelism, because it does not average gradients over neighboring ranks."""
    mesh = getattr(strategy, "device_mesh", None)
    if mesh is None or "tensor_parallel" not in (mesh.mesh_dim_names or ()):
        return
    size = mesh["tensor_parallel"].size()
    if size > 1:
        raise UnsupportedError(
            f"tensor_parallel_size={size}: each rank of a ring holds different tokens and all of the weights; use "
            f"ModelParallelStrategy(data_parallel_size={mesh.size()}, tensor_parallel_size=1)"
        )


class RingMixin:
    """A mixin that precedes LightningModule among the base classes. `ring` is open from setup to teardown.

    If an exception ends the trainer, a callback that `setup` adds ends the ring on every rank with this cause.

    Example:
        class Model(RingMixin, LightningModule):
            ring_size = 4
    """

    ring_size: int | None = None
    """The number of ranks of a ring. None: all ranks of the trainer."""
    ring: Ring
    trainer: Any
    _ring_models: tuple[nn.Module, ...] = ()
    _hooks: tuple[RemovableHandle, ...] = ()
    _replica: tuple[int, int]

    def setup(self, stage: str) -> None:
        """Open the ring. A collective call of all ranks of the trainer.

        Args:
            stage: See Lightning.

        Raises:
            InputError: The trainer's ranks do not divide into rings of `ring_size`.
            UnsupportedError: The strategy shards weights by tensor parallelism.
            RingError: What `Ring` raises when it is opened.
        """
        super().setup(stage)  # type: ignore[misc]  # of the LightningModule after this mixin
        _refuse_tensor_parallel(self.trainer.strategy)
        world, rank = self.trainer.world_size, self.trainer.global_rank
        size = self.ring_size or world
        if world % size:
            raise InputError(f"ring_size={size} does not divide the trainer's {world} ranks")
        # Every rank creates the groups of all rings, in the same order: `new_group` is collective over all ranks.
        group = None
        for first in range(0, world, size) if dist.is_initialized() else ():
            ring_group = dist.new_group(range(first, first + size))
            group = ring_group if first <= rank < first + size else group
        # `setup` runs once per stage (fit, validate, test), but the callback is needed once.
        if not any(isinstance(callback, _OnException) for callback in self.trainer.callbacks):
            self.trainer.callbacks.append(_OnException())
        self.ring = Ring(group)
        self._replica = rank // size, world // size
        if self._ring_models:
            from ringattn.adapters.transformers.batches import WholeCalls, seeds_of_calls
            from ringattn.adapters.transformers.checks import base_of

            seeds = seeds_of_calls(self.ring, rank // size)
            self._hooks = tuple(
                hook
                for model in self._ring_models
                for hook in WholeCalls(self.ring, base_of(model), "auto", seeds).attach(model)
            )

    def teardown(self, stage: str) -> None:
        """Close the ring.

        Args:
            stage: See Lightning.

        Raises:
            RingError: What `Ring.close` raises.
        """
        for hook in self._hooks:
            hook.remove()
        self.ring.close()
        super().teardown(stage)  # type: ignore[misc]  # of the LightningModule after this mixin

    def ring_model(self, model: Any) -> Any:
        """Prepare a transformers model, which takes whole batches by keyword while the ring is open.

        The ranks of a ring pass the same batch and get outputs of the whole batch: the loss, and logits that are
        gathered when they are first read. The mean of the gradients over ranks is the gradient of one process.

        Args:
            model: A model of transformers, or a PeftModel around one. It is changed in place.

        Returns:
            The model.

        Raises:
            UnsupportedError: The model cannot be prepared, see `ringattn.adapters.transformers.prepare`.

        Example:
            self.model = self.ring_model(AutoModelForCausalLM.from_pretrained(name))
        """
        # Imported here, because other models need no transformers.
        from ringattn.adapters.transformers import prepare

        self._ring_models = (*self._ring_models, prepare(model))
        return model

    def ring_sampler(self, dataset: Dataset[Any], **options: Any) -> DistributedSampler[Any]:
        """Return a sampler that gives all ranks of a ring the same examples.

        Args:
            dataset: A dataset with a length.
            options: Options of DistributedSampler except num_replicas and rank.

        Returns:
            The sampler.

        Raises:
            TypeError: DistributedSampler has no such option.

        Example:
            loader = DataLoader(data, batch_size=2, sampler=self.ring_sampler(data))
        """
        rank, replicas = self._replica
        return DistributedSampler(dataset, replicas, rank, **options)

    def ring_shard(
        self,
        tokens: Tensor,
        labels: Tensor | None = None,
        layout: LayoutName | str = "auto",
        *,
        cu_seqlens: Many[int] | Tensor | None = None,
    ) -> tuple[Sequence, Tensor, Tensor]:
        """Return the sequence of a batch, and this rank's tokens and labels. A collective call, on the host.

        Args:
            tokens: The whole batch, the same on every rank of the ring.
            labels: Labels already aligned with tokens. None: the next tokens, shifted within the whole sequence or
                within each document.
            layout: As in `Ring.sequence`.
            cu_seqlens: As in `Ring.sequence`: packed documents, which do not attend to each other.

        Shape:
            tokens: (batch, tokens)
            labels: (batch, tokens)

        Returns:
            The sequence, and this rank's tokens and labels, (batch, local tokens) each.

        Raises:
            DisagreementError: The ranks of the ring hold different batches or documents, as with Lightning's default
                sampler; every rank raises.
            InputError: The layout is unknown, labels and tokens differ in length, or the documents do not ascend from 0
                to the length.
            RingError: Other errors of `Ring.all_gather_text`.

        Example:
            seq, tokens, labels = self.ring_shard(batch[0])
        """
        with self.ring.refused_by_all():
            documents = None if cu_seqlens is None else check_documents(cu_seqlens, tokens.shape[1])
        whole = {"tokens": tokens, "labels": labels, "cu_seqlens": documents}
        check_alike(
            self.ring, {name: value for name, value in whole.items() if value is not None},
            "give the Trainer use_distributed_sampler=False and the DataLoader sampler=self.ring_sampler(dataset)",
        )  # fmt: skip
        seq = self.ring.sequence(tokens.shape[1], cu_seqlens=documents, layout=layout)
        return seq, seq.shard(tokens), seq.shard_labels(tokens) if labels is None else seq.shard(labels)

    def ring_mean(self, total: Tensor, count: Tensor | int) -> Tensor:
        """Return the loss for `training_step`, from the sum over this rank's targets. A collective call.

        DDP averages its gradient over all ranks, and `self.log(..., sync_dist=True)` its value. The average is the mean
        over all targets of a ring, averaged over rings. It is 0 for a ring without targets.

        Args:
            total: The sum of the losses of this rank's targets, a scalar.
            count: The number of this rank's targets.

        Returns:
            The loss, a scalar in the dtype of `total`.

        Raises:
            RingError: What `Ring.all_reduce` raises.

        Example:
            loss = self.ring_mean(total, (labels != -100).sum())
        """
        targets = torch.as_tensor(count, dtype=torch.float64, device=total.device).clone()
        self.ring.all_reduce([targets])
        # Each rank returns its part times the ranks, which undoes the average over the ranks of the ring.
        return total * (self.ring.world_size / targets.clamp(min=1)).to(total.dtype)
