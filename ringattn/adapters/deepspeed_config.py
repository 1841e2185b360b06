"""The settings of DeepSpeed with which a ring has the gradients of one process."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ringattn.errors import UnsupportedError

# Settings that tests compare with one process, and settings without an effect on numbers.
_COMPARED = frozenset((
    "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping",
    "optimizer", "scheduler", "zero_optimization", "zero_allow_untested_optimizer", "zero_force_ds_cpu_optimizer",
))  # fmt: skip
_PRECISION = frozenset(("fp16", "bf16", "communication_data_type", "data_types"))
_WITHOUT_EFFECT = frozenset((
    "steps_per_print", "wall_clock_breakdown", "memory_breakdown", "dump_state", "log_level", "timers",
    "flops_profiler", "comms_logger", "tensorboard", "wandb", "csv_monitor", "comet", "checkpoint", "aio", "nebula",
    "disable_python_gc", "activation_checkpointing",
))  # fmt: skip
_REASONS = {
    "gradient_allreduce_op": "only the mean of gradients over all ranks is that of one process",
    "sequence_parallel_size": "the ring shards the sequence already",
    "data_parallel_size": "all ranks are one data-parallel group, including those of a ring",
    "tensor_parallel": "its ranks would have to be outside the ring",
    "data_efficiency": "it chooses other data and layers on each rank of a ring",
    "zero_optimization.zero_quantized_weights": "it rounds weights",
    "zero_optimization.zero_quantized_nontrainable_weights": "it rounds weights",
    "zero_optimization.zero_quantized_gradients": "it rounds gradients",
    "zero_optimization.zenflow": "it delays a part of the updates",
}
_ZERO_REFUSED = (
    "zero_quantized_weights", "zero_quantized_nontrainable_weights", "zero_quantized_gradients", "zenflow",
    "zero_hpz_partition_size", "mics_shard_size",
)  # fmt: skip
_ROUNDING_OPTIMIZERS = "onebit", "zeroone"


def check_config(config: Mapping[str, Any]) -> None:
    """Refuse a configuration of DeepSpeed with which training over rings was not compared with one process.

    Args:
        config: The configuration, as for `deepspeed.initialize`.

    Raises:
        UnsupportedError: The configuration has an unsupported setting, which is not off.

    Example:
        check_config(config)
        engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    """
    known = _COMPARED | _PRECISION | _WITHOUT_EFFECT
    zero = config.get("zero_optimization", {})
    settings = {name: value for name, value in config.items() if name not in known}
    settings |= {f"zero_optimization.{name}": zero[name] for name in _ZERO_REFUSED if name in zero}
    for name, value in settings.items():
        if not _is_off(value):
            raise UnsupportedError(
                f"{name}={value} of DeepSpeed's configuration is not supported over a ring: "
                f"{_REASONS.get(name, 'it was not compared with one process')}; leave it out"
            )
    optimizer = str(config.get("optimizer", {}).get("type", ""))
    if optimizer.lower().startswith(_ROUNDING_OPTIMIZERS):
        raise UnsupportedError(
            f"DeepSpeed's optimizer {optimizer} rounds gradients to one bit, so a ring would train another model than "
            "one process; use another optimizer"
        )


def _is_off(value: Any) -> bool:
    if isinstance(value, Mapping):
        return value.get("enabled") is False or all(map(_is_off, value.values()))
    # These are the defaults: no other operation than the mean, and groups of one rank or, for `mics_shard_size`, none.
    return value in (None, False, 0, 1, -1, "mean") and value is not True
