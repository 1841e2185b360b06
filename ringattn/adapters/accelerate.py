"""accelerate's context parallelism through a ring: a configuration object instead of a Trainer subclass.

    TrainingArguments(..., parallelism_config=RingParallelismConfig(cp_size=2))

A Trainer that creates its Accelerator with this configuration gets `RingTrainerMixin` as its first base class. So it
has the same guarantees and refusals as a Trainer written with the mixin.
"""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any

import torch.distributed as dist
from accelerate import ParallelismConfig

from ringattn.adapters.groups import ring_of
from ringattn.adapters.host_versions import Host
from ringattn.adapters.transformers.trainer import RingTrainerMixin
from ringattn.errors import InputError, UnsupportedError

__all__ = ["RingParallelismConfig"]

_CONFIG = "accelerate.parallelism_config:ParallelismConfig"
HOST = Host(
    "accelerate",
    ("1.12", "1.14", "1.15"),
    parameters={f"{_CONFIG}._validate_accelerator": ("accelerator",), "accelerate:Accelerator._prepare_cp": ("args",)},
    sources={
        f"{_CONFIG}.__post_init__": ("055e48e6", "681f54a6"),
        f"{_CONFIG}.build_device_mesh": ("5774b698", "9ebbb8e7"),
    },
)


class RingParallelismConfig(ParallelismConfig):
    """accelerate's ParallelismConfig in which `cp_size` ranks form a ring.

    The rings are replicas of each other, unless `dp_shard_size` is set.

    Args:
        dp_replicate_size: The number of replicas. None: the number of rings.
        dp_shard_size: The ranks that shard the weights in addition to a ring's ranks, with accelerate's FSDP2.
        tp_size: Must be 1.
        cp_size: The number of ranks of a ring.
        cp_backend: Must not be set.
        sp_size: Must be 1.
        sp_backend: Must not be set.
        tp_handler: Must not be set.
        cp_handler: Must not be set.
        sp_handler: Must not be set.

    Raises:
        UnsupportedError: An option would have no effect. A Trainer that gets this configuration also raises this error
            for everything that `RingTrainerMixin` refuses.

    Example:
        args = TrainingArguments(..., parallelism_config=RingParallelismConfig(cp_size=8))
        Trainer(model=model, args=args, train_dataset=texts).train()
    """

    def __post_init__(self) -> None:
        HOST.require()
        for name in ("cp_handler", "sp_handler", "tp_handler", "cp_backend", "sp_backend"):
            if getattr(self, name) is not None:
                raise UnsupportedError(f"{name} belongs to another form of parallelism than a ring; leave it out")
        super().__post_init__()
        for name in ("sp_size", "tp_size"):
            if getattr(self, name) != 1:
                raise UnsupportedError(
                    f"{name}={getattr(self, name)} cannot be combined with a ring; set cp_size, and leave it at 1"
                )
        # With the backend "torch", accelerate and Trainer would set up torch's context parallel attention.
        self.cp_backend = "ringattn"

    @property
    def non_data_parallel_size(self) -> int:
        """Always 1. Before transformers 5.19, Trainer divides its label count by this size.

        `RingTrainerMixin` has already divided that count.
        """
        return 1

    def build_device_mesh(self, device_type: str) -> Any:
        """Build the mesh of all ranks. The ranks of a ring are consecutive.

        Args:
            device_type: The type of the ranks' devices.

        Returns:
            The mesh, or None for one rank.

        Raises:
            InputError: The number of ranks is not a multiple of `cp_size`.
        """
        ranks = dist.get_world_size() if dist.is_initialized() else 1
        if ranks % self.total_size:
            raise InputError(f"{ranks} ranks are not a multiple of cp_size and the other sizes, {self.total_size}")
        if ranks > self.total_size:
            # All other ranks form replicas, so that the user need not compute the number of replicas.
            self._set_size("dp_replicate", self.dp_replicate_size * ranks // self.total_size)
        return super().build_device_mesh(device_type)

    def _validate_accelerator(self, accelerator: Any) -> None:
        """Give a ring to the Trainer that creates this Accelerator.

        accelerate calls this method with the Accelerator only, so the Trainer is found on the call stack.
        """
        if self.cp_size == 1:
            return
        host = _find_trainer(sys._getframe())
        if host is None:
            raise UnsupportedError(
                "RingParallelismConfig is for a Trainer of transformers; in your own loop, open ringattn.Ring() and "
                "call shard_batch and ring.activate for each batch, see docs/embedding-transformers.md"
            )
        accelerator._prepare_cp = _return_unchanged  # instead of setting up torch's context parallelism
        if not isinstance(host, RingTrainerMixin):
            kind = type(host)
            # The object exists already, so the mixin can only be added by changing its class.
            host.__class__ = type(kind.__name__, (RingTrainerMixin, kind), {"__module__": kind.__module__})
        host.begin_ring(ring_of(accelerator.torch_device_mesh["cp"]))


def _return_unchanged(*prepared: Any) -> tuple[Any, ...]:
    return prepared


def _find_trainer(frame: FrameType | None) -> Any:
    """Return the nearest Trainer on the stack whose `__init__` is creating an Accelerator, or None."""
    # Imported here: transformers probes for packages by names that also exist in a checkout of this project.
    from transformers import Trainer

    while frame is not None:
        host = frame.f_locals.get("self")
        if frame.f_code.co_name == "create_accelerator_and_postprocess" and isinstance(host, Trainer):
            return host
        frame = frame.f_back
    return None
