"""DeepSpeed as the host of rings: its engine for whole batches, and the check of its settings.

To DeepSpeed, all ranks are one data-parallel group: it averages gradients over them and partitions weights, gradients
and optimizer states among them (ZeRO). A ring needs nothing else, so its ranks are ordinary ranks of that group.
Trainers, `RingAccelerator` and `initialize` call `check_config` themselves.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch.distributed as dist
from torch.utils.data import DistributedSampler

from ringattn.adapters.deepspeed_config import check_config
from ringattn.adapters.groups import ring_of_ranks
from ringattn.adapters.host_versions import Host
from ringattn.adapters.transformers import prepare
from ringattn.adapters.transformers.batches import WholeCalls, seeds_of_calls
from ringattn.adapters.transformers.checks import base_of
from ringattn.core.layout import LayoutName
from ringattn.errors import UnsupportedError

__all__ = ["check_config", "initialize"]

_ENGINE = "deepspeed.runtime.engine:DeepSpeedEngine"
HOST = Host(
    "deepspeed",
    ("0.19",),
    feature="initialize",
    parameters={
        "deepspeed:initialize": (
            "args", "model", "training_data", "collate_fn", "mpu", "mesh_param", "config", "config_params",
        ),
        "deepspeed:load_ds_config": ("config",),
        f"{_ENGINE}.deepspeed_io": ("dataset", "route", "data_sampler"),
        f"{_ENGINE}.backward": ("loss",),
    },
)  # fmt: skip


def initialize(
    *args: Any, cp_size: int | None = None, layout: LayoutName | str = "auto", **kwargs: Any
) -> tuple[Any, Any, Any, Any]:
    """Call `deepspeed.initialize` for an engine to which a ring of ranks counts as one process. A collective call.

    The engine takes whole batches by keyword, the same on the ranks of a ring, and returns outputs of the whole batch.
    So a loop needs no change: its losses and weights are those of as many processes as there are rings. Loaders of
    `training_data` and `engine.deepspeed_io` distribute batches over rings. `train_batch_size` counts rings.

    Args:
        args: Arguments of `deepspeed.initialize`. The model is a transformers model.
        cp_size: The ranks of a ring, which are consecutive processes. None: all ranks.
        layout: As in `Ring.sequence`.
        kwargs: Arguments of `deepspeed.initialize`.

    Returns:
        As `deepspeed.initialize`: the engine, the optimizer, the loader of `training_data` and the scheduler.

    Raises:
        InputError: The number of ranks is not a multiple of `cp_size`.
        UnsupportedError: See `check_config`; the model is not a transformers model or cannot be prepared; `mpu` or
            `mesh_param` is given; or the installed DeepSpeed differs where this function relies on it.

    Example:
        engine, optimizer, loader, _ = initialize(model=model, training_data=texts, config=config)
        for batch in loader:
            engine.backward(engine(**batch).loss)
            engine.step()
    """
    # Imported here: DeepSpeed looks for compilers when it is imported, and Trainers need `check_config` only.
    import deepspeed

    HOST.require()
    bound = inspect.signature(deepspeed.initialize).bind(*args, **kwargs).arguments
    for name in ("mpu", "mesh_param"):
        if bound.get(name) is not None:
            raise UnsupportedError(f"{name} would divide the ranks of a ring among other groups; leave it out")
    model = bound.get("model")
    if not hasattr(base_of(model), "config"):
        raise UnsupportedError(
            f"{type(model).__name__} is not a transformers model; shard its batches in your own loop"
        )
    deepspeed.init_distributed()
    size = cp_size or dist.get_world_size()
    arguments: Any = bound.get("args")
    training_data = bound.pop("training_data", None)
    named = getattr(arguments, "deepspeed_config", None)
    config = bound.pop("config", None) or bound.pop("config_params", None) or named
    if config is not None:
        config = dict(config if isinstance(config, Mapping) else deepspeed.load_ds_config(config))
        check_config(config)
        if "train_batch_size" in config:  # DeepSpeed divides it by the number of ranks
            config["train_batch_size"] *= size
    prepare(model)
    try:
        if named is not None:  # DeepSpeed refuses a second configuration
            arguments.deepspeed_config = None
        engine, optimizer, _, scheduler = deepspeed.initialize(**bound, config=config)
    finally:
        if named is not None:
            arguments.deepspeed_config = named
    # After DeepSpeed has selected this rank's device.
    ring = ring_of_ranks(cp_size, engine.device.type)
    rings, ring_index = dist.get_world_size() // size, dist.get_rank() // size
    engine.deepspeed_io = partial(_loader_over_rings, engine.deepspeed_io, rings, ring_index)
    if training_data is not None:
        engine.training_dataloader = engine.deepspeed_io(training_data)
    WholeCalls(ring, base_of(model), layout, seeds_of_calls(ring, ring_index)).attach(engine)
    return engine, optimizer, engine.training_dataloader, scheduler


def _loader_over_rings(create: Any, rings: int, ring_index: int, *args: Any, **kwargs: Any) -> Any:
    """Return the engine's loader, `create(*args, **kwargs)`, with batches of this ring instead of this rank."""
    bound = inspect.signature(create).bind(*args, **kwargs)
    if bound.arguments.get("data_sampler") is None:
        is_shuffled = bound.arguments.get("route", "train") == "train"  # as by DeepSpeed
        dataset = bound.arguments["dataset"]
        bound.arguments["data_sampler"] = DistributedSampler(dataset, rings, ring_index, shuffle=is_shuffled)
    return create(**bound.arguments)
