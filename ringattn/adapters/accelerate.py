"""accelerate through a ring: its Accelerator for a training loop, and its parallelism configuration for a Trainer.

    accelerator = RingAccelerator()
    TrainingArguments(..., parallelism_config=RingParallelismConfig(cp_size=2))

With `RingAccelerator`, a loop that was written for accelerate keeps its lines: a ring takes the place of a process.
A Trainer that creates its Accelerator with `RingParallelismConfig` gets `RingTrainerMixin` as its first base class. So
it has the same guarantees and refusals as a Trainer written with the mixin.
"""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any

import torch.distributed as dist
from accelerate import Accelerator, ParallelismConfig
from accelerate.scheduler import AcceleratedScheduler
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from ringattn.adapters.deepspeed_config import check_config
from ringattn.adapters.groups import ring_of, ring_of_ranks
from ringattn.adapters.host_versions import Host
from ringattn.adapters.transformers import prepare
from ringattn.adapters.transformers.batches import WholeCalls, seeds_of_calls
from ringattn.adapters.transformers.checks import base_of
from ringattn.adapters.transformers.loaders import (
    refuse_data,
    refuse_lone_processes,
    refuse_split_batches,
    share_training,
)
from ringattn.adapters.transformers.trainer import HOST as TRAINER
from ringattn.adapters.transformers.trainer import RingTrainerMixin
from ringattn.adapters.transformers.trainer_checks import EARLY_CALLBACKS
from ringattn.core.layout import LayoutName
from ringattn.errors import DisagreementError, InputError, UnsupportedError

__all__ = ["RingAccelerator", "RingParallelismConfig"]

# --- Loops ------------------------------------------------------------------------------------------------------------

LOOPS = Host(
    "accelerate",
    ("1.12", "1.13", "1.14", "1.15"),
    feature="RingAccelerator",
    parameters={
        "accelerate:Accelerator.prepare_data_loader": ("data_loader", "device_placement", "slice_fn_for_dispatch"),
        "accelerate:Accelerator.prepare_scheduler": ("scheduler",),
        "accelerate:Accelerator.gather": ("tensor",),
        "accelerate:Accelerator.gather_for_metrics": ("input_data", "use_gather_object"),
        "accelerate:Accelerator.reduce": ("tensor", "reduction", "scale"),
    },
    sources={
        "accelerate.scheduler:AcceleratedScheduler.step": ("e41b9aef",),
        **{path: TRAINER.sources[path] for path in TRAINER.sources if path.startswith("accelerate.")},
    },
)


class RingAccelerator(Accelerator):
    """accelerate's Accelerator, to which a ring of ranks counts as one process.

    The ranks of a ring read the same batches. A prepared model takes whole batches, computes attention over the ring,
    and returns outputs of the whole batch, so a loop needs no change: its loss, gradients, metrics, learning rates and
    number of steps are those of one process, or with several rings of as many processes as there are rings.
    `num_processes` is the number of rings, and `process_index` the index of this rank's ring.

    Args:
        args: Arguments of accelerate's Accelerator.
        cp_size: The ranks of a ring, which are consecutive processes. None: all ranks.
        layout: As in `Ring.sequence`.
        kwargs: Arguments of accelerate's Accelerator.

    Raises:
        InputError: The number of ranks is not a multiple of `cp_size`.
        UnsupportedError: An option would shard batches too, or the installed accelerate differs where this class relies
            on it.

    Example:
        accelerator = RingAccelerator()
        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
        for batch in loader:
            accelerator.backward(model(**batch).loss)
    """

    _ring_size = 1
    """The ranks that count as one process; 1 while accelerate distributes batches over processes."""

    def __init__(
        self, *args: Any, cp_size: int | None = None, layout: LayoutName | str = "auto", **kwargs: Any
    ) -> None:
        LOOPS.require()
        super().__init__(*args, **kwargs)
        for name in ("cp_size", "sp_size", "tp_size"):
            if (size := getattr(self.parallelism_config, name, 1)) not in (1, None):
                raise UnsupportedError(
                    f"{name}={size} of accelerate's ParallelismConfig cannot be combined with RingAccelerator; leave "
                    "it at 1, and pass cp_size to RingAccelerator"
                )
        refuse_split_batches(self)
        self.ring, self.layout = ring_of_ranks(cp_size, self.device.type), layout
        refuse_lone_processes(self, self.ring)
        self._ring_size = self.ring.world_size
        self._outer_models: list[nn.Module] = []

    @property
    def num_processes(self) -> int:
        """The number of rings. Loops count batches and steps of the learning rate by it."""
        return int(self.state.num_processes) // self._ring_size

    @property
    def process_index(self) -> int:
        """The index of this rank's ring."""
        return int(self.state.process_index) // self._ring_size

    def prepare(self, *args: Any, **kwargs: Any) -> Any:
        """Prepare like accelerate. Models are transformers models, and then take whole batches by keyword.

        Args:
            args: As in accelerate.
            kwargs: As in accelerate.

        Returns:
            As in accelerate.

        Raises:
            UnsupportedError: A model is not a transformers model or cannot be prepared, or the data is a stream that
                accelerate would divide among all processes.
        """
        for module in args:
            if isinstance(module, nn.Module):
                if not hasattr(base_of(module), "config"):
                    raise UnsupportedError(
                        f"{type(module).__name__} is not a transformers model; shard its batches in your own loop"
                    )
                prepare(module)
        if self.deepspeed_plugin is not None:
            self._check_deepspeed(self.deepspeed_plugin.deepspeed_config)
        prepared = super().prepare(*args, **kwargs)
        for module, outer in zip(args, prepared if len(args) > 1 else (prepared,), strict=True):
            self._count_rings(outer)  # with DeepSpeed, accelerate creates schedulers without `prepare_scheduler`
            if isinstance(module, nn.Module) and not any(outer is known for known in self._outer_models):
                seeds = seeds_of_calls(self.ring, self.process_index)
                WholeCalls(self.ring, base_of(module), self.layout, seeds).attach(outer)
                self._outer_models.append(outer)
        return prepared

    def _check_deepspeed(self, config: dict[str, Any]) -> None:
        """Refuse unsupported settings, and leave the batch size of all ranks to DeepSpeed."""
        check_config(config)
        # accelerate would multiply the batch size of a rank by the number of rings, and DeepSpeed by that of ranks.
        if config.get("train_batch_size") == "auto":
            del config["train_batch_size"]

    def prepare_data_loader(
        self, data_loader: Any, device_placement: bool | None = None, slice_fn_for_dispatch: Any = None
    ) -> Any:
        """Prepare a loader like accelerate; all ranks of a ring read the same batches.

        Args:
            data_loader: As in accelerate.
            device_placement: As in accelerate.
            slice_fn_for_dispatch: As in accelerate.

        Returns:
            The loader.

        Raises:
            UnsupportedError: The data is a stream that accelerate would divide among all processes.
        """
        refuse_data(data_loader.dataset, self)
        rings, ring_index = self.num_processes, self.process_index
        # accelerate distributes over processes first, because only then it gives shuffled batches a common seed.
        size, self._ring_size = self._ring_size, 1
        try:
            loader = super().prepare_data_loader(data_loader, device_placement, slice_fn_for_dispatch)
        finally:
            self._ring_size = size
        return share_training(loader, rings, ring_index)

    def prepare_scheduler(self, scheduler: Any) -> Any:
        """Prepare a scheduler like accelerate; it advances once for each ring.

        Args:
            scheduler: As in accelerate.

        Returns:
            The scheduler.

        Raises:
            Nothing.
        """
        scheduler = super().prepare_scheduler(scheduler)
        self._count_rings(scheduler)
        return scheduler

    def _count_rings(self, prepared: Any) -> None:
        # accelerate creates the object itself, so the method can only be overridden by changing its class. Schedulers
        # that DeepSpeed advances are of a derived class, and advance once for each update.
        if type(prepared) is AcceleratedScheduler:
            prepared.__class__, prepared.rings = _SchedulerOfRings, self.num_processes

    def gather(self, tensor: Any) -> Any:
        """Gather tensors like accelerate, from the first rank of every ring. A collective call.

        Args:
            tensor: As in accelerate. The ranks of a ring have equal values, as of whole outputs.

        Returns:
            The gathered tensors, which have the values of each ring once.

        Raises:
            Nothing.
        """
        return tree_map_only(Tensor, self._once_per_ring, super().gather(tensor))

    def _once_per_ring(self, rows: Tensor) -> Tensor:
        if self._ring_size == 1:
            return rows
        return rows.unflatten(0, (self.num_processes, self._ring_size, -1))[:, 0].flatten(0, 1)

    def gather_for_metrics(self, input_data: Any, use_gather_object: bool = False) -> Any:
        """Gather tensors like accelerate, each text once. A collective call.

        Args:
            input_data: As in accelerate, with tensors only. The ranks of a ring have equal values.
            use_gather_object: Must be False.

        Returns:
            The gathered tensors.

        Raises:
            UnsupportedError: There are objects other than tensors.
        """
        if use_gather_object or not all(isinstance(leaf, Tensor) for leaf in tree_leaves(input_data)):
            raise UnsupportedError(
                "gather_for_metrics of objects would return those of a ring once for each of its ranks; pass tensors"
            )
        return super().gather_for_metrics(input_data)

    def reduce(self, tensor: Any, reduction: str = "sum", scale: float = 1.0) -> Any:
        """Reduce tensors like accelerate, with the values of each ring once. A collective call.

        Args:
            tensor: As in accelerate. The ranks of a ring have equal values.
            reduction: As in accelerate.
            scale: As in accelerate.

        Returns:
            The reduced tensors.

        Raises:
            DisagreementError: A sum of integers shows that the ranks of a ring have different values.
        """
        reduced = super().reduce(tensor, reduction, scale)
        return reduced if reduction != "sum" else tree_map_only(Tensor, self._divided_by_ring_size, reduced)

    def _divided_by_ring_size(self, total: Tensor) -> Tensor:
        if total.is_floating_point() or total.is_complex():
            return total / self._ring_size
        if (total % self._ring_size).any():
            raise DisagreementError(
                f"reduce: a sum over all processes is not a multiple of {self._ring_size}, so the {self._ring_size} "
                "ranks of a ring have different values; pass the same value on all of them"
            )
        return total // self._ring_size

    def check_trigger(self) -> bool:
        """Return whether any process has called `set_trigger`, and reset the trigger. A collective call.

        Returns:
            Whether the trigger was set.

        Raises:
            Nothing.
        """
        # A single rank of a ring may set the trigger, so sum over all processes.
        size, self._ring_size = self._ring_size, 1
        try:
            return bool(super().check_trigger())
        finally:
            self._ring_size = size


class _SchedulerOfRings(AcceleratedScheduler):
    """Advances a learning rate once for each ring, where accelerate advances it once for each process."""

    rings: int

    def step(self, *args: Any, **kwargs: Any) -> None:
        self.split_batches = True  # so that each call below advances it once
        advances = self.step_with_optimizer and self.gradient_state.sync_gradients
        for _ in range(self.rings if advances else 1):
            # As in accelerate: OneCycleLR raises if it advances further. ReduceLROnPlateau has neither number.
            if not hasattr(self.scheduler, "total_steps") or self.scheduler._step_count <= self.scheduler.total_steps:
                super().step(*args, **kwargs)


# --- Trainers ---------------------------------------------------------------------------------------------------------

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
        # Imported here: transformers probes for packages by names that also exist in a checkout of this project.
        from transformers import Trainer

        if not hasattr(Trainer, "get_cp_size"):  # 4.57, with which accelerate would first set up FSDP
            raise UnsupportedError(EARLY_CALLBACKS)
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
                "RingParallelismConfig is for a Trainer of transformers; in your own loop, use "
                "ringattn.adapters.accelerate.RingAccelerator instead of Accelerator, see docs/embedding-trainers.md"
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
