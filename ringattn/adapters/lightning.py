"""Lightning: a mixin that gives a LightningModule its ring, its sampler, its shards and its loss.

For `Trainer(strategy="ddp", use_distributed_sampler=False)` and other strategies that average gradients over all ranks;
see docs/embedding-lightning.md. Ranks of a ring are neighbors, rings are replicas of each other.
Guarantees: weights go the way that one process for each ring would make them go, which sees its batches whole; ranks of
a ring that were given different batches raise.
"""

from __future__ import annotations

from collections.abc import Sequence as Many
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import Callback
from torch import Tensor
from torch.utils.data import Dataset, DistributedSampler

from ringattn.adapters.hosts import check_alike, require_checked
from ringattn.core.layout import LayoutName
from ringattn.errors import InputError, UnsupportedError
from ringattn.ring import Ring
from ringattn.sequence import Sequence, check_documents

__all__ = ["RingMixin"]

CHECKED = ("2.6",)
require_checked("lightning", *CHECKED)


class _OnException(Callback):
    """Lightning tells callbacks of an exception, and modules neither that nor teardown."""

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Ends the ring on every rank, with this cause, where none has yet."""
        ring = getattr(pl_module, "ring", None)
        if isinstance(ring, Ring):
            ring.__exit__(type(exception), exception, exception.__traceback__)


def _refuse_tensor_parallel(strategy: Any) -> None:
    """Raise `UnsupportedError` where neighbors share a token's work, and gradients are not averaged over them."""
    mesh = getattr(strategy, "device_mesh", None)
    if mesh is None or "tensor_parallel" not in (mesh.mesh_dim_names or ()):
        return
    size = mesh["tensor_parallel"].size()
    if size > 1:
        raise UnsupportedError(
            f"tensor_parallel_size={size}: the ranks of a ring hold other tokens each, and all of the weights; take "
            f"ModelParallelStrategy(data_parallel_size={mesh.size()}, tensor_parallel_size=1)"
        )


class RingMixin:
    """Stands before LightningModule. `ring` lives from setup to teardown.

    An exception that ends the trainer ends the ring too, on every rank and with this cause; `setup` sees to it.

    Example:
        class Model(RingMixin, LightningModule):
            ring_size = 4
    """

    ring_size: int | None = None
    """Ranks of a ring; None for all ranks of the trainer."""
    ring: Ring
    trainer: Any
    _replica: tuple[int, int]

    def setup(self, stage: str) -> None:
        """Opens the ring. A collective call of all ranks of the trainer.

        Args:
            stage: As in Lightning.

        Raises:
            InputError: The trainer's ranks do not divide into rings of `ring_size`.
            UnsupportedError: The strategy shards weights by tensor parallelism.
            RingError: What `Ring` raises when it is opened.
        """
        super().setup(stage)  # type: ignore[misc]  # of the LightningModule that this stands before
        _refuse_tensor_parallel(self.trainer.strategy)
        world, rank = self.trainer.world_size, self.trainer.global_rank
        size = self.ring_size or world
        if world % size:
            raise InputError(f"ring_size={size} does not divide the trainer's {world} ranks")
        group = None
        for first in range(0, world, size) if dist.is_initialized() else ():
            one = dist.new_group(range(first, first + size))  # a call of all ranks, members or not
            group = one if first <= rank < first + size else group
        if not any(isinstance(callback, _OnException) for callback in self.trainer.callbacks):
            self.trainer.callbacks.append(_OnException())
        self.ring = Ring(group)
        self._replica = rank // size, world // size

    def teardown(self, stage: str) -> None:
        """Closes the ring.

        Args:
            stage: As in Lightning.

        Raises:
            RingError: What `Ring.close` raises.
        """
        self.ring.close()
        super().teardown(stage)  # type: ignore[misc]  # of the LightningModule that this stands before

    def ring_sampler(self, dataset: Dataset[Any], **options: Any) -> DistributedSampler[Any]:
        """A sampler that gives all ranks of a ring the same examples.

        Args:
            dataset: The data, with a length.
            options: Those of DistributedSampler but num_replicas and rank.

        Returns:
            The sampler.

        Raises:
            TypeError: An option is not known to DistributedSampler.

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
        """The sequence of a batch, and this rank's tokens and labels. A collective call, on the host.

        Args:
            tokens: The whole batch, the same on every rank of the ring.
            labels: Aligned with tokens already. None: the next tokens, shifted over the whole sequence, or over each
                document.
            layout: As in `Ring.sequence`.
            cu_seqlens: As in `Ring.sequence`: packed documents, which do not see each other.

        Shape:
            tokens: (batch, tokens)
            labels: (batch, tokens)

        Returns:
            The sequence, and this rank's tokens and labels, (batch, local tokens) each.

        Raises:
            DisagreementError: The ring's ranks hold different batches, as under Lightning's own sampler, or other
                documents; every rank raises.
            InputError: The layout is not known, labels have another length than tokens, or the documents do not ascend
                from 0 to the length.
            RingError: What else `Ring.all_gather_text` raises.

        Example:
            seq, tokens, labels = self.ring_shard(batch[0])
        """
        with self.ring.refused_by_all():
            documents = None if cu_seqlens is None else check_documents(cu_seqlens, tokens.shape[1])
        whole = {"tokens": tokens, "labels": labels, "cu_seqlens": documents}
        check_alike(
            self.ring, {name: one for name, one in whole.items() if one is not None},
            "give the Trainer use_distributed_sampler=False and the DataLoader sampler=self.ring_sampler(dataset)",
        )  # fmt: skip
        seq = self.ring.sequence(tokens.shape[1], cu_seqlens=documents, layout=layout)
        return seq, seq.shard(tokens), seq.shard_labels(tokens) if labels is None else seq.shard(labels)

    def ring_mean(self, total: Tensor, count: Tensor | int) -> Tensor:
        """The loss to return, of sums over this rank's targets. A collective call.

        Averaged over all ranks, as DDP does with its gradient and `self.log(..., sync_dist=True)` with its value, it is
        the mean over all targets of a ring, averaged over rings. 0 where a ring has no target.

        Args:
            total: The sum of the losses of this rank's targets, a scalar.
            count: How many targets this rank has.

        Returns:
            The loss, a scalar in the dtype of `total`.

        Raises:
            RingError: What `Ring.all_reduce` raises.

        Example:
            loss = self.ring_mean(total, (labels != -100).sum())
        """
        targets = torch.as_tensor(count, dtype=torch.float64, device=total.device).clone()
        self.ring.all_reduce([targets])
        return total * (self.ring.world_size / targets.clamp(min=1)).to(total.dtype)
