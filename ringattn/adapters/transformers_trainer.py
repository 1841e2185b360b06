"""The Trainer of transformers over the ranks of a ring.

`RingTrainerMixin` overrides one private method of Trainer, the one that shards batches for context parallelism, and
refuses a Trainer that has it in another form.
Promises: the loss and gradients of one process; labels are counted whole.
Does not know: attention, models, how a batch lies over ranks.
Checked with transformers 5.23 and accelerate 1.15.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from ringattn.adapters.transformers import prepare
from ringattn.adapters.transformers_batches import shard_batch
from ringattn.errors import UnsupportedError
from ringattn.ring import Ring

__all__ = ["RingTrainerMixin", "check_trainer", "shard_batch"]


class RingTrainerMixin:
    """Put before transformers' Trainer: `class RingTrainer(RingTrainerMixin, Trainer)`; every batch lies over `ring`.

    `ring`: its ranks follow each other in the order of processes. Ranks of one ring get the same batches, rings other
    ones. `layout`: as in `Ring.sequence`. Raises `UnsupportedError` for a Trainer of another form and for
    `compute_metrics`, since no rank has all logits. accelerate's cp_size and sp_size stay 1.
    """

    def __init__(self, *args: Any, ring: Ring, layout: str = "auto", **kwargs: Any) -> None:
        check_trainer(type(self))
        self.ring, self.layout = ring, layout
        super().__init__(*args, **kwargs)
        host: Any = self
        if host.compute_metrics is not None:
            raise UnsupportedError("compute_metrics needs logits of whole texts, which no rank has; leave it out")
        prepare(host.model)

    def get_cp_size(self) -> int:
        """Processes that share a batch: what Trainer divides its counts of labels and of batches by."""
        return self.ring.world_size

    def get_train_dataloader(self) -> Any:
        """Trainer's own, which all ranks of a ring read alike."""
        return self._read_alike(super().get_train_dataloader())  # type: ignore[misc]

    def get_eval_dataloader(self, eval_dataset: Any = None) -> Any:
        """Trainer's own, which all ranks of a ring read alike."""
        return self._read_alike(super().get_eval_dataloader(eval_dataset))  # type: ignore[misc]

    def _read_alike(self, loader: Any) -> Any:
        host: Any = self
        if host.args.world_size > 1:
            shards: tuple[Any, ...] = (getattr(loader, "batch_sampler", None), getattr(loader, "dataset", None))
            for shard in shards:
                if hasattr(shard, "num_processes") and hasattr(shard, "process_index"):
                    shard.num_processes = host.args.world_size // self.ring.world_size
                    shard.process_index = host.args.process_index // self.ring.world_size
        return loader

    def _prepare_context_parallel_inputs(
        self, model: Any, inputs: Mapping[str, Any]
    ) -> tuple[Callable[[], Any], dict[str, Any]]:
        seq, mine = shard_batch(self.ring, inputs, self.layout)
        return partial(self.ring.activate, seq), mine


def check_trainer(kind: type) -> None:
    """Raise `UnsupportedError` unless this Trainer shards its batches where the mixin expects it."""
    import transformers

    method = getattr(transformers.Trainer, "_prepare_context_parallel_inputs", None)
    if not issubclass(kind, transformers.Trainer):
        raise UnsupportedError(f"{kind.__name__} must inherit from RingTrainerMixin and then from transformers.Trainer")
    if method is None or list(inspect.signature(method).parameters) != ["self", "model", "inputs"]:
        raise UnsupportedError(
            f"the Trainer of transformers {transformers.__version__} shards batches in another way than that of 5.23, "
            "which this was checked with; write the loop with shard_batch, or take that version"
        )
