"""Which Trainers, and which of their options, make over a ring what they make in one process.

Checked with transformers 5.18 to 5.23, accelerate 1.15 and TRL 1.16.
"""

from __future__ import annotations

import inspect
from typing import Any

from ringattn.adapters.peft import base_of
from ringattn.adapters.transformers_memory import refuse_logits
from ringattn.adapters.transformers_whole import WholeTensor
from ringattn.errors import UnsupportedError

_TRL = {
    "SFTTrainer": "counts its metrics of each rank's tokens: take ringattn.adapters.trl.RingSFTTrainer",
    "DPOTrainer": "makes its loss of the probabilities of whole texts, which are no sums over tokens any more once "
    "they are compared: train in one process, or use RingSFTTrainer",
    "KTOTrainer": "makes its loss of the probabilities of whole texts, and of the whole batch: train without a ring",
    "RewardTrainer": "takes one token of each text, which most ranks do not have: see 'Classes of whole rows' in "
    "docs/embedding-transformers.md",
    "GRPOTrainer": "generates texts and weighs whole ones: train without a ring",
    "RLOOTrainer": "generates texts and weighs whole ones: train without a ring",
}  # fmt: skip


class ShardLoss:
    """A loss of logits and labels of this rank's tokens, labels shifted already, over the labels of all ranks.

    Of whole logits it is the loss itself.
    """

    def __init__(self, loss: Any) -> None:
        self.loss = loss

    def __call__(self, outputs: Any, labels: Any, shift_labels: bool = False, num_items_in_batch: Any = None) -> Any:
        if isinstance(outputs["logits"] if isinstance(outputs, dict) else outputs[0], WholeTensor):
            return self.loss(outputs, labels, shift_labels=shift_labels, num_items_in_batch=num_items_in_batch)
        if num_items_in_batch is None:
            raise UnsupportedError(
                "num_items_in_batch is missing: a rank cannot make its part of a mean without the number of all labels"
            )
        return self.loss(outputs, labels, num_items_in_batch=num_items_in_batch)


def check_trainer(kind: type[Any]) -> None:
    """Refuse a Trainer that does not shard its batches and make its loss where the mixin expects it.

    Args:
        kind: The class, which inherits from `RingTrainerMixin` and then from transformers' Trainer.

    Raises:
        UnsupportedError: It is no such class, its transformers shards batches in another way, or it is a trainer of
            TRL that makes something of whole texts, or a RingSFTTrainer that overrides compute_loss.
    """
    import transformers

    method = getattr(transformers.Trainer, "_prepare_context_parallel_inputs", None)
    if not issubclass(kind, transformers.Trainer):
        raise UnsupportedError(f"{kind.__name__} must inherit from RingTrainerMixin and then from transformers.Trainer")
    is_known = method is not None and list(inspect.signature(method).parameters) == ["self", "model", "inputs"]
    if not is_known or not hasattr(transformers.Trainer, "get_cp_size"):
        raise UnsupportedError(
            f"the Trainer of transformers {transformers.__version__} shards batches in another way than those of 5.18 "
            "to 5.23, which this was checked with; write the loop with shard_batch, or take one of those versions"
        )
    known = getattr(kind, "ring_compute_loss", None)
    if known is None:
        _refuse_trl(kind)
    elif kind.compute_loss is not known:
        raise UnsupportedError(
            f"{kind.__name__} overrides compute_loss of RingSFTTrainer, which gets labels that are shifted already "
            "and logits of this rank alone; leave it out, or override that of a RingTrainerMixin before "
            "transformers.Trainer"
        )


def makes_own_loss(host: Any) -> bool:
    """Whether the user makes the loss: of the whole batch and of whole outputs, on every rank.

    Raises nothing. What a user's function reads cannot be known, so all that it may read is whole.
    """
    from transformers import Trainer

    if hasattr(type(host), "ring_compute_loss"):
        return False
    return (
        host.compute_loss_func is not None or getattr(host.compute_loss, "__func__", None) is not Trainer.compute_loss
    )


def refuse_own_loss(host: Any) -> None:
    """Raise `UnsupportedError` for a loss of the user in a Trainer whose scale of it cannot be set."""
    import transformers

    if makes_own_loss(host) and "get_tp_size" not in transformers.Trainer.compute_loss.__code__.co_names:
        raise UnsupportedError(
            f"compute_loss of {type(host).__name__}, or compute_loss_func: the Trainer of transformers "
            f"{transformers.__version__} would scale a loss that each rank makes whole by the number of ranks; take "
            "transformers 5.20 or later, or leave it out"
        )


def _refuse_trl(kind: type[Any]) -> None:
    """Raise `UnsupportedError`, with the reason, for a trainer of TRL."""
    for base in kind.__mro__:
        if base.__module__.split(".")[0] == "trl" and base.__name__.endswith("Trainer") and base.__name__[0] != "_":
            reason = _TRL.get(base.__name__, "has a loss of its own, which was not compared with one process")
            raise UnsupportedError(f"TRL's {base.__name__} {reason}")


def refuse_parallelism(args: Any) -> None:
    """Raise `UnsupportedError` where accelerate would shard the batches of a Trainer too."""
    config = getattr(args, "parallelism_config", None)
    for name in ("cp_size", "sp_size"):
        if getattr(config, name, 1) not in (1, None):
            raise UnsupportedError(
                f"{name}={getattr(config, name)} of accelerate's ParallelismConfig would shard batches a second time, "
                "and drop every mask; leave it at 1 beside `ring`, or leave `ring` out and pass "
                "ringattn.adapters.accelerate.RingParallelismConfig to a plain Trainer"
            )


def refuse_options(host: Any) -> None:
    """Raise `UnsupportedError` for options of a Trainer that would mean something else on each rank."""
    if not hasattr(base_of(host.model), "config"):
        raise UnsupportedError(
            f"{type(host.model).__name__} is no model of transformers; shard its batches in a loop of your own"
        )
    for name in ("compute_loss_func", "label_smoother", "compute_metrics"):
        if getattr(host, name) is not None:
            refuse_logits(base_of(host.model), name)
    if host.compute_loss_func is not None and hasattr(type(host), "ring_compute_loss"):
        raise UnsupportedError(
            "compute_loss_func in addition to SFTTrainer's own losses; take loss_type, or leave it out"
        )
    if host.label_smoother is not None and not host.model_accepts_loss_kwargs:
        raise UnsupportedError(
            f"label_smoothing_factor: {type(host.model).__name__} takes no num_items_in_batch, so that the labels of "
            "all ranks are not counted; leave it at 0"
        )
    if host.args.neftune_noise_alpha is not None:
        raise UnsupportedError(
            "neftune_noise_alpha: the noise is scaled by the tokens of a row, of which a rank has a part; leave it out"
        )
    if host.args.include_num_input_tokens_seen != "no" and not hasattr(type(host), "_track_num_input_tokens"):
        raise UnsupportedError(
            "include_num_input_tokens_seen would count the tokens of a ring once for each rank; leave it out, or take "
            "transformers 5.23"
        )


def refuse_loaders(host: Any) -> None:
    """Raise `UnsupportedError` for loaders that give each process, also of one ring, its own texts."""
    for name in ("dispatch_batches", "split_batches"):
        if getattr(host.accelerator, name):
            raise UnsupportedError(f"{name} would cut batches among the ranks of a ring; leave it at False")
    if host.args.train_sampling_strategy == "batch_rebalance":
        raise UnsupportedError(
            "train_sampling_strategy='batch_rebalance' deals texts to processes, also those of one ring; take "
            "'group_by_length'"
        )
