"""accelerate's context parallelism through a ring: a value of a configuration, and no class of a Trainer.

    TrainingArguments(..., parallelism_config=RingParallelismConfig(cp_size=2))

A Trainer that makes its Accelerator with this configuration becomes a `RingTrainerMixin` before its own class, so that
both routes are one, with the same guarantees and refusals.
Checked with accelerate 1.15 and transformers 5.23.
"""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any

import torch.distributed as dist
from accelerate import ParallelismConfig

from ringattn.adapters.groups import ring_of
from ringattn.adapters.hosts import require_checked
from ringattn.adapters.transformers.trainer import RingTrainerMixin
from ringattn.errors import InputError, UnsupportedError

__all__ = ["RingParallelismConfig"]


class RingParallelismConfig(ParallelismConfig):
    """accelerate's ParallelismConfig, whose `cp_size` ranks are a ring.

    Ranks outside of a ring are replicas, unless `dp_shard_size` says otherwise.

    Args:
        dp_replicate_size: Replicas. None: as many as there are rings.
        dp_shard_size: Ranks that shard the weights, apart from those of a ring, with accelerate's FSDP2.
        tp_size: 1.
        cp_size: The ranks of a ring.
        cp_backend: Left out.
        sp_size: 1.
        sp_backend: Left out.
        tp_handler: Left out.
        cp_handler: Left out.
        sp_handler: Left out.

    Raises:
        UnsupportedError: An option would not be honored. Where a Trainer gets it: what `RingTrainerMixin` refuses.

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
                raise UnsupportedError(
                    f"{name}={getattr(self, name)} together with a ring; set cp_size, and leave it at 1"
                )
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
        """Give the Trainer that makes this Accelerator a ring. accelerate calls it, with the Accelerator alone."""
        if self.cp_size == 1:
            return
        host = _trainer_in_the_making(sys._getframe())
        if host is None:
            raise UnsupportedError(
                "RingParallelismConfig is for a Trainer of transformers; in a loop of your own open ringattn.Ring() "
                "and call shard_batch and ring.activate for each batch, see docs/embedding-transformers.md"
            )
        accelerator._prepare_cp = _as_they_are  # in place of torch's context parallelism
        if not isinstance(host, RingTrainerMixin):
            kind = type(host)
            host.__class__ = type(kind.__name__, (RingTrainerMixin, kind), {"__module__": kind.__module__})
        host.begin_ring(ring_of(accelerator.torch_device_mesh["cp"]))


def _as_they_are(*prepared: Any) -> tuple[Any, ...]:
    return prepared


def _trainer_in_the_making(frame: FrameType | None) -> Any:
    """Return the Trainer whose `__init__` is making an Accelerator, the nearest on the stack, or None."""
    from transformers import Trainer  # not above: transformers looks for packages by names that a checkout has, too

    while frame is not None:
        host = frame.f_locals.get("self")
        if frame.f_code.co_name == "create_accelerator_and_postprocess" and isinstance(host, Trainer):
            return host
        frame = frame.f_back
    return None
