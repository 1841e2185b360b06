"""Trainers, losses and options of transformers' Trainer that are refused over the ranks of a ring.

Guarantees: a Trainer that would compute another loss or other gradients than one process is refused before it trains.
"""

from __future__ import annotations

import inspect
from functools import cache
from typing import Any

from ringattn.adapters.deepspeed_config import check_config
from ringattn.adapters.host_versions import source_digest
from ringattn.adapters.transformers.calls import adds_router_loss
from ringattn.adapters.transformers.checks import base_of
from ringattn.adapters.transformers.encoder_decoder import encoder_of, has_one_configuration
from ringattn.adapters.transformers.loaders import refuse_split_batches
from ringattn.adapters.transformers.memory import refuse_logits
from ringattn.adapters.transformers.token_labels import LOSSES, loss_name, shifts_labels
from ringattn.errors import UnsupportedError

EARLY_CALLBACKS = (
    "RingParallelismConfig needs transformers 5.2 or later: an earlier Trainer adds callbacks before it has set its "
    "options, so they cannot be checked; derive from RingTrainerMixin and pass `ring`"
)

_TRL = {
    f"{name}Trainer": f"needs more than RingTrainerMixin: use ringattn.adapters.trl.Ring{name}Trainer"
    for name in ("SFT", "DPO", "KTO", "Reward", "GRPO", "RLOO")
}


def has_custom_loss(host: Any) -> bool:
    """Return whether the loss is a function of the user. Never raises.

    Such a function may read anything, so it gets the whole batch and whole outputs, on every rank.
    """
    from transformers import Trainer

    if host.loss_of_shards:
        return False
    if host.compute_loss_func is not None or "compute_loss" in vars(host):
        return True
    classes = type(host).__mro__
    return not all(_only_forwards(kind, host) for kind in classes[: classes.index(Trainer)])


FORWARDING: dict[str, tuple[tuple[str, ...], str]] = {
    "axolotl.core.trainers.base:AxolotlTrainer": (("68c157dd",), "args.orpo_alpha"),
    "llamafactory.train.sft.trainer:CustomSeq2SeqTrainer": (("9322a2c3",), "finetuning_args.use_asft_loss"),
    "llamafactory.train.pt.trainer:CustomTrainer": (("1e189a7d",), ""),
}
"""Trainer classes whose `compute_loss` was reviewed: it returns the result of Trainer's, called with the same inputs.

The values are the digests of the reviewed sources, and an option of the trainer that selects another loss.
"""


def _only_forwards(kind: type[Any], host: Any) -> bool:
    """Return whether a class leaves the loss to its base class. Never raises."""
    if "compute_loss" not in vars(kind):
        return True
    digests, option = FORWARDING.get(f"{kind.__module__}:{kind.__qualname__}", ((), ""))
    if not digests or _digest(vars(kind)["compute_loss"]) not in digests:
        return False
    owner, _, name = option.partition(".")
    return not option or not getattr(getattr(host, owner, None), name, False)


@cache
def _digest(function: Any) -> str:
    """Return the digest of a function, or an empty string if its source cannot be read."""
    try:
        return source_digest(function)
    except (OSError, TypeError):
        return ""


def takes_means(host: Any) -> bool:
    """Return whether the loss is the mean over each batch, because a class switched off `model_accepts_loss_kwargs`.

    False if the model itself cannot take the number of labels: `prepare` then refuses the labels.
    """
    if host.model_accepts_loss_kwargs or host.label_smoother is not None or host.loss_of_shards:
        return False
    base = base_of(host.model)
    parameters = inspect.signature(type(base).forward).parameters.values()
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)
    return takes_any and getattr(base, "accepts_loss_kwargs", True)


def scales_by_tp_size() -> bool:
    """Return whether Trainer divides the scale of its loss by `get_tp_size`: from transformers 5.19 on."""
    import transformers

    return "get_tp_size" in transformers.Trainer.compute_loss.__code__.co_names


def refuse_custom_loss(host: Any) -> None:
    """Raise `UnsupportedError` for a loss of the user that may scale itself by the number of processes."""
    import transformers

    loss = getattr(host.compute_loss, "__func__", None)
    if has_custom_loss(host) and loss is not transformers.Trainer.compute_loss and _reads(loss, "num_processes"):
        raise UnsupportedError(
            f"compute_loss of {type(host).__name__} reads num_processes, so it may scale the loss by the number of "
            "processes; a ring counts as one: override it, and divide its loss by self.ring.world_size"
        )


def _reads(function: Any, name: str) -> bool:
    """Return whether the code of a function reads an attribute."""
    code = getattr(function, "__code__", None)
    return code is not None and name in code.co_names


def refuse_loss_of_rows(host: Any) -> None:
    """Raise `UnsupportedError` if the loss is that of a model which is neither a language model nor labels tokens."""
    loss = loss_name(base_of(host.model))
    if loss in ("", "ForCausalLMLoss", *LOSSES) or has_custom_loss(host) or host.label_smoother is not None:
        return
    raise UnsupportedError(
        f"{type(base_of(host.model)).__name__} computes its loss from whole rows ({loss}), of which a rank has a part: "
        "train it in one process, or in your own loop from gathered states, see 'Classes of whole rows' in "
        "docs/embedding-transformers.md"
    )


def refuse_trl(kind: type[Any]) -> None:
    """Raise `UnsupportedError`, with the reason, for a trainer of TRL."""
    for base in kind.__mro__:
        if base.__module__.split(".")[0] != "trl" or base.__name__ in kind.supported_trl:
            continue
        if base.__name__.endswith("Trainer") and base.__name__[0] != "_":
            reason = _TRL.get(base.__name__, "has a custom loss, which was not compared with one process")
            raise UnsupportedError(f"TRL's {base.__name__} {reason}")


def refuse_parallelism(args: Any) -> None:
    """Raise `UnsupportedError` if accelerate would shard the batches of a Trainer too."""
    config = getattr(args, "parallelism_config", None)
    for name in ("cp_size", "sp_size"):
        if getattr(config, name, 1) not in (1, None):
            raise UnsupportedError(
                f"{name}={getattr(config, name)} of accelerate's ParallelismConfig would shard batches a second time, "
                "and drop every mask; leave it at 1 when you pass `ring`, or leave `ring` out and pass "
                "ringattn.adapters.accelerate.RingParallelismConfig to a plain Trainer"
            )


def refuse_options(host: Any) -> None:
    """Raise `UnsupportedError` for options of a Trainer that would have another effect on shards."""
    from transformers import Trainer

    if not hasattr(base_of(host.model), "config"):
        raise UnsupportedError(
            f"{type(host.model).__name__} is not a transformers model; shard its batches in your own loop"
        )
    of_trl = any(kind.__module__.split(".")[0] == "trl" for kind in type(host).__mro__)
    if of_trl and has_one_configuration(base_of(host.model).config):
        raise UnsupportedError(
            f"{type(base_of(host.model)).__name__} is an encoder-decoder, whose losses in TRL were not compared with "
            "one process; use Trainer or Seq2SeqTrainer"
        )
    for name in ("compute_loss_func", "label_smoother", "compute_metrics"):
        if getattr(host, name) is not None:
            refuse_logits(base_of(host.model), name)
    if host.compute_loss_func is not None and host.loss_of_shards:
        raise UnsupportedError(
            "compute_loss_func is not supported with SFTTrainer's losses; use loss_type, or leave it out"
        )
    if host.label_smoother is not None and not host.model_accepts_loss_kwargs:
        raise UnsupportedError(
            f"label_smoothing_factor: {type(host.model).__name__} takes no num_items_in_batch, so the labels of all "
            "ranks are not counted; leave it at 0"
        )
    smoother = getattr(host.label_smoother, "loss", None)
    if smoother is not None and "num_items_in_batch" not in inspect.signature(smoother).parameters:
        raise UnsupportedError(
            "label_smoothing_factor: this version of transformers divides the smoothed loss by the labels of one rank; "
            "leave it at 0, or use transformers 5.15 or later"
        )
    if getattr(host.args, "predict_with_generate", False):
        raise UnsupportedError(
            "predict_with_generate: a cache is not sharded over ranks; leave it out, and generate inside "
            "`with ring.activate(None):`"
        )
    if host.args.neftune_noise_alpha is not None:
        raise UnsupportedError(
            "neftune_noise_alpha: the noise is scaled by the tokens of a row, but a rank has a part; leave it out"
        )
    counts = host.args.include_num_input_tokens_seen not in ("no", False)
    if counts and not hasattr(Trainer, "_track_num_input_tokens"):  # `RingTrainerMixin` corrects this method
        raise UnsupportedError(
            "include_num_input_tokens_seen would count the tokens of a ring once per rank; leave it out, or use "
            "transformers 5.3 or later"
        )


def refuse_deepspeed(host: Any) -> None:
    """Raise `UnsupportedError` for settings of DeepSpeed with which gradients would not be those of one process."""
    plugin = host.accelerator.state.deepspeed_plugin
    if plugin is None:
        return
    check_config(plugin.deepspeed_config)
    # The Trainer then passes the model's own loss to DeepSpeed, which divides its gradients by the batches of a step
    # although it is asked not to.
    if (
        plugin.zero_stage == 0
        and host.args.gradient_accumulation_steps > 1
        and not host.args.average_tokens_across_devices
    ):
        raise UnsupportedError(
            "average_tokens_across_devices=False with gradient_accumulation_steps: DeepSpeed without ZeRO divides "
            "gradients by the number of batches of a step a second time; leave it at True, or use a ZeRO stage"
        )


def refuse_division(host: Any) -> None:
    """Raise `UnsupportedError` if `max_tokens_per_rank` would change the loss, or does not fit another option."""
    if host.max_tokens_per_rank is None:
        return
    base, rings = base_of(host.model), host._rings()[0]
    reason = ""
    if rings > 1:
        reason = f"there are {rings} rings, whose micro-batches would differ in number; pass a ring of all processes"
    elif host.layout not in ("auto", "documents"):
        reason = f"places samples by layout='documents', but layout={host.layout!r} was passed; leave layout out"
    elif has_custom_loss(host):
        reason = "the loss is not that of Trainer, and may not be a sum over samples; leave the loss or the limit out"
    elif encoder_of(base) is not None or not shifts_labels(base):
        reason = f"{type(base).__name__} is not a causal language model; leave it out"
    elif not host.model_accepts_loss_kwargs:
        reason = "the loss is the mean over each batch, because model_accepts_loss_kwargs is False; leave it out"
    elif adds_router_loss(base, {}):
        reason = (
            "a router loss is that of a whole batch; set output_router_logits=False, of SFTConfig "
            "router_aux_loss_coef=0, or leave the limit out"
        )
    elif host.accelerator.state.deepspeed_plugin is not None:
        reason = "DeepSpeed steps once per call of backward; leave it out, and use smaller batches"
    if reason:
        raise UnsupportedError(f"max_tokens_per_rank={host.max_tokens_per_rank}: {reason}")


def refuse_loaders(host: Any) -> None:
    """Raise `UnsupportedError` for loaders that give each process different texts, even within a ring."""
    refuse_split_batches(host.accelerator)
    if getattr(host.args, "train_sampling_strategy", "") == "batch_rebalance":  # from transformers 5.2 on
        raise UnsupportedError(
            "train_sampling_strategy='batch_rebalance' distributes texts over the processes of a ring; use "
            "'group_by_length'"
        )
