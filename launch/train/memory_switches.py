"""Which switches trade memory for time in a training run, and which of them do not go together."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ringattn.errors import InputError

if TYPE_CHECKING:
    from ringattn.launch.train.config import TrainConfig

RECOMPUTE = ("none", "selective", "full", "offloaded")
SAVED_ACTIVATIONS = ("keep", "offload", "int8", "fp8")
SHARDING = ("none", "zero2", "zero3")
OPTIMIZERS = ("adamw", "sgd", "adafactor", "lion", "adamw8bit")


def check_switches(config: TrainConfig, device_type: str) -> None:
    """Raise `InputError`, with the key first, for switches that contradict each other or the device (cpu, cuda)."""
    if config.saved_activations == "offload" and device_type == "cpu":
        raise InputError(
            "saved_activations=offload: moves activations from a GPU to host memory, and this run is on a CPU; "
            "use int8 or fp8, or recompute=full"
        )
    if config.recompute == "offloaded":
        from ringattn.layers.offload import check_device

        check_device(device_type, "recompute=offloaded")
        if config.saved_activations != "keep":
            raise InputError(
                f"saved_activations={config.saved_activations}: of a layer nothing is saved but its input, which "
                "recompute=offloaded moves to host memory; leave one of the two out"
            )
    if config.optimizer == "adamw8bit":
        from ringattn.launch.train.optimizers import eight_bit_adamw

        eight_bit_adamw()
        if config.dtype == "fp64":
            raise InputError("optimizer=adamw8bit: steps in float32 and would round dtype=fp64; use adamw")
    if config.sharding != "none" and config.optimizer in ("adafactor", "adamw8bit"):
        raise InputError(
            f"optimizer={config.optimizer}: takes statistics across a whole weight, of which a rank under "
            f"sharding={config.sharding} has a part; use adamw, lion or sgd"
        )
