"""TRL's trainers SFT, DPO, KTO, Reward, GRPO and RLOO over the ranks of a ring.

    trainer = RingSFTTrainer(model=model, args=SFTConfig(packing=True, ...), train_dataset=texts, ring=ringattn.Ring())
    trainer.train()

SFTTrainer's loss is a sum over tokens, so each rank computes its part. The losses of the others compare whole texts.
There, every rank gets the whole batch, the model's calls are sharded, and each token's log-probability is gathered
(RewardTrainer: its last hidden state). So every rank computes TRL's loss of the whole batch with TRL's own code. For
GRPOTrainer and RLOOTrainer, every rank also generates the same texts, from whole prompts.

Guarantees: loss, gradients and TRL's metrics equal those of one process. This holds with `peft_config`, for a reference
model, the disabled adapter as the reference and reference log-probabilities that were computed before; for SFTTrainer,
also for every packing strategy, loss on completions or assistant turns only, label smoothing, and the losses nll and
dft.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from accelerate import DistributedType, PartialState
from accelerate.utils import gather_object
from torch import Tensor
from trl import DPOTrainer, GRPOTrainer, KTOTrainer, RewardTrainer, RLOOTrainer, SFTTrainer

from ringattn.adapters.dropout import seed_from
from ringattn.adapters.host_versions import Host
from ringattn.adapters.local import local_attention
from ringattn.adapters.transformers import prepare
from ringattn.adapters.transformers.batches import whole_calls
from ringattn.adapters.transformers.calls import is_wrapped
from ringattn.adapters.transformers.checks import base_of, declare_outputs
from ringattn.adapters.transformers.loaders import last_turn, share_evaluation
from ringattn.adapters.transformers.memory import refuse_logits
from ringattn.adapters.transformers.trainer import RingTrainerMixin
from ringattn.core.layout import LayoutName
from ringattn.errors import InputError, UnsupportedError
from ringattn.ring import Ring

__all__ = [
    "RingDPOTrainer",
    "RingGRPOTrainer",
    "RingGenerationMixin",
    "RingKTOTrainer",
    "RingPreferenceMixin",
    "RingRLOOTrainer",
    "RingRewardTrainer",
    "RingSFTMixin",
    "RingSFTTrainer",
]

_REVIEWED = {
    "SFTTrainer": {
        "compute_loss": "3a509764",
        "prediction_step": "900fe140",
    },
    "DPOTrainer": {
        "_compute_loss": "4759b788",
        "_precompute_ref_logps": "909c3fbb",
        "compute_ref_log_probs": "dd46ffda",
        "prediction_step": "5528ded3",
    },
    "KTOTrainer": {
        "_compute_loss": "74acef85",
        "_compute_kl_logps": "069df4e6",
        "_precompute_ref_logps": "c50f7a59",
        "compute_ref_log_probs": "b5799a0e",
        "prediction_step": "5528ded3",
    },
    "RewardTrainer": {
        "compute_loss": "2c42a358",
    },
    "GRPOTrainer": {
        "_prepare_inputs": "c9ea730b",
        "_generate_single_turn": "406cf03c",
        "_generate_and_score_completions": "12865689",
        "_calculate_rewards": "6ba9dfe5",
        "_get_per_token_logps_and_entropies": "d79d8e52",
        "_get_train_sampler": "5dea3f6c",
        "_compute_loss": "6eaac87e",
        "prediction_step": "b4cf95fc",
    },
    "RLOOTrainer": {
        "_prepare_inputs": "c9ea730b",
        "_generate_single_turn": "002cbe11",
        "_generate_and_score_completions": "a0a297e3",
        "_calculate_rewards": "9214e50e",
        "_get_per_token_logps_and_entropies": "d79d8e52",
        "_get_train_sampler": "5dea3f6c",
        "_compute_loss": "87359a18",
        "prediction_step": "b4cf95fc",
    },
}
"""By trainer of TRL: the methods whose behaviour the mixins rely on, and the digests of their sources."""

_FUSED_HEAD = {"trl.trainer.utils:add_fused_lm_head": ("2e2a772e",)}

HOSTS = {
    name: Host(
        "trl",
        ("1.16",),
        feature=name,
        sources={
            **{f"trl:{name}.{method}": (digest,) for method, digest in methods.items()},
            **({} if name in ("SFTTrainer", "RewardTrainer") else _FUSED_HEAD),
        },
    )
    for name, methods in _REVIEWED.items()
}


class _RingTRLMixin(RingTrainerMixin):
    """The common part of the mixins for TRL's trainers: metrics, and refused options."""

    def begin_ring(self, ring: Ring, layout: LayoutName | str = "auto") -> None:
        """Set the ring, as `RingTrainerMixin.begin_ring`.

        Args:
            ring: The ring.
            layout: As in `Ring.sequence`.

        Raises:
            UnsupportedError: The Trainer class or the installed TRL is not supported.
        """
        super().begin_ring(ring, layout)
        HOSTS[self._trl_trainer()].require()

    def _trl_trainer(self) -> str:
        """Return the name of TRL's trainer among the base classes."""
        return next(base.__name__ for base in type(self).__mro__ if base.__name__ in HOSTS)

    def _check_options(self) -> None:
        super()._check_options()
        host: Any = self
        name = self._trl_trainer()
        if getattr(host, "_is_vlm", False):
            raise UnsupportedError(f"{name} of a model with images: a rank has only a part of their tokens; train "
                                   "on text only, with the tokenizer as processing_class")  # fmt: skip
        refuse_logits(base_of(host.model), f"{name}, which computes metrics from them,")

    @contextmanager
    def _gathering(self, gather: Callable[[Tensor], Tensor]) -> Iterator[None]:
        """Return a context in which TRL collects its metrics with `gather`.

        accelerate's gather_for_metrics would take each count for one entry per text, and drop some in a last batch.
        """
        accelerator = self.accelerator  # type: ignore[attr-defined]
        # Instance attributes hide the methods, and are deleted afterwards.
        accelerator.gather = accelerator.gather_for_metrics = gather
        try:
            yield
        finally:
            del accelerator.gather, accelerator.gather_for_metrics

    @contextmanager
    def _sharing_metrics(self) -> Iterator[None]:
        """Return a context for the loss of one batch, whose metrics in evaluation are collected from all rings.

        Rings evaluate different batches, and each counts once.
        """
        host: Any = self
        rings, _ = self._rings()
        if rings == 1 or host.model.training:
            yield
            return
        collected, host._metrics["eval"] = host._metrics["eval"], defaultdict(list)
        yield
        local, host._metrics["eval"] = dict(host._metrics["eval"]), collected
        ended = host.accelerator.gradient_state.end_of_dataloader
        # In the last round, some rings repeat a batch of others: only the first `real` rings have a new one.
        real = last_turn(host.callback_handler.eval_dataloader, rings) if ended else rings
        for metrics in gather_object([local])[:: self.ring.world_size][:real]:
            for name, values in metrics.items():
                collected[name] += values


class RingSFTMixin(_RingTRLMixin):
    """Mixin before TRL's SFTTrainer: `RingTrainerMixin`, with the counts and metrics of SFTTrainer."""

    loss_of_shards = True

    def _check_options(self) -> None:
        super()._check_options()
        declare_outputs(base_of(self.model), "loss", "log_probs", "entropy")  # type: ignore[attr-defined]

    def compute_loss(
        self, model: Any, inputs: dict[str, Any], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """Compute the loss like SFTTrainer, with the counts of whole batches.

        Args:
            model: The model.
            inputs: This rank's tokens.
            return_outputs: Return the model's outputs too.
            num_items_in_batch: The number of labels on all ranks.

        Returns:
            The loss, or the loss and the outputs.

        Raises:
            InputError: What the model refuses.
        """
        host: Any = self
        training = host.model.training
        divisor: AbstractContextManager[None] = nullcontext()
        if num_items_in_batch is None:
            if training:
                raise UnsupportedError(
                    f"{type(host.model).__name__} takes no num_items_in_batch, so the labels of all ranks are not "
                    "counted; train another model"
                )
            # In evaluation, Trainer passes no count.
            num_items_in_batch, divisor = self._summed((inputs["shift_labels"] != -100).sum()), self._labels_per_rank()
        elif not host.args.average_tokens_across_devices:  # the count is that of this ring, divided by its ranks
            num_items_in_batch = (num_items_in_batch * self.ring.world_size).round()
            divisor = self._labels_per_rank()
        # The count is among the inputs too, because the model refuses labels of shards without it.
        inputs = {**inputs, "num_items_in_batch": num_items_in_batch}
        gather = host.accelerator.gather if training else self._summed
        with divisor, self._sharing_metrics(), self._gathering(gather), self._averaging_router_losses():
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)  # type: ignore[misc]

    @contextmanager
    def _labels_per_rank(self) -> Iterator[None]:
        """Return a context in which TRL divides its loss by the labels per rank, given those of the ring.

        The losses of ranks are averaged later. TRL gets the whole count, because it raises counts below 1 to 1. It
        multiplies its loss by the number of processes, if that is set, and divides by `get_tp_size`.
        """
        args: Any = self.args  # type: ignore[attr-defined]
        across, args.average_tokens_across_devices = args.average_tokens_across_devices, True
        self._scales_by_ranks = True
        try:
            yield
        finally:
            args.average_tokens_across_devices, self._scales_by_ranks = across, False

    _scales_by_ranks = False

    def get_tp_size(self) -> int:
        """Return the number of processes with the same loss. TRL divides the scale of its loss by it.

        Returns:
            Trainer's number; inside `_labels_per_rank` the number of rings, so that the scale is the ranks of a ring.
        """
        return self._rings()[0] if self._scales_by_ranks else super().get_tp_size()

    def _merge_metrics(self, parts: list[dict[str, Tensor]]) -> None:
        # SFTTrainer adds up tokens, and micro-batches have no padding. Its two other metrics are means over labels.
        labels = [int((part["labels"] != -100).sum()) for part in parts]
        entropy, accuracy = (self._metrics["train"][name] for name in ("entropy", "mean_token_accuracy"))  # type: ignore[attr-defined]
        summed = sum(mean * count for mean, count in zip(entropy[-len(parts) :], labels, strict=True))
        # Rounded to numbers of correct tokens, because SFTTrainer divides them in float32.
        correct = sum(round(mean * count) for mean, count in zip(accuracy[-len(parts) :], labels, strict=True))
        total = max(1, sum(labels))
        entropy[-len(parts) :] = [summed / total]
        accuracy[-len(parts) :] = [(torch.tensor(correct) / total).item()]

    @contextmanager
    def _averaging_router_losses(self) -> Iterator[None]:
        """Return a context for the loss of one batch, whose router loss in evaluation is the mean over ranks."""
        host: Any = self
        if host.model.training or not host.aux_loss_enabled:
            yield
            return
        # TRL divides the router loss by the batches of a step if there is a count of labels, as in training.
        steps, host.current_gradient_accumulation_steps = host.current_gradient_accumulation_steps, 1
        try:
            yield
        finally:
            host.current_gradient_accumulation_steps = steps
        host._metrics["eval"]["aux_loss"][-1] /= self.ring.world_size  # `_summed` has added it up

    def _summed(self, count: Tensor) -> Tensor:
        """Sum a count over the ranks of the ring."""
        count = count.detach().clone()
        self.ring.all_reduce([count])
        return count


class RingPreferenceMixin(_RingTRLMixin):
    """Mixin before TRL's DPOTrainer, KTOTrainer or RewardTrainer, whose losses compare whole texts.

    Every rank computes the loss of the whole batch. The calls of the model, and of a reference model, are sharded.
    """

    supported_trl: tuple[str, ...] = ("DPOTrainer", "KTOTrainer", "RewardTrainer")

    def begin_ring(self, ring: Ring, layout: LayoutName | str = "auto") -> None:
        """Set the ring, as `RingTrainerMixin.begin_ring`.

        Args:
            ring: The ring.
            layout: As in `Ring.sequence`.

        Raises:
            UnsupportedError: The Trainer class or the installed TRL is not supported.
        """
        super().begin_ring(ring, layout)
        self._rewards = self._trl_trainer() == "RewardTrainer"

    def _check_options(self) -> None:
        super()._check_options()
        host: Any = self
        if host.compute_metrics is not None:
            raise UnsupportedError(
                f"compute_metrics of {self._trl_trainer()} gets outputs that are not those of the texts that Trainer "
                "counts; leave it out, and use TRL's own metrics"
            )
        if host.args.torch_compile and self._trl_trainer() == "RewardTrainer":
            raise UnsupportedError(
                "torch_compile of RewardTrainer: the compiler would trace the exchange between the ranks, which is "
                "below the head; leave it out"
            )

    def _prepare_models(self) -> None:
        host: Any = self
        for model in (host.model, getattr(host, "ref_model", None)):
            if model is not None:
                self._prepare_part(model)

    def _prepare_part(self, model: Any) -> Any:
        """Return the prepared part of a model that is called over the ring.

        A head that pools a row is left out, so that every rank computes it from whole hidden states.
        """
        part = base_of(model).base_model if self._rewards else base_of(model)
        if not is_wrapped(part):  # TRL and Liger replace the forward
            prepare(part)
        # TRL's fused head computes these for each of its tokens.
        declare_outputs(part, "loss", "log_probs", "entropy", "log_sum_sq_probs", "mean_logits")
        return part

    def _called_models(self, model: Any, prepared: Any) -> list[tuple[list[Any], Any]]:
        host: Any = self
        if self._rewards:
            return [([prepared], prepared)]
        outers = [model]
        reference = host.ref_model
        # The reference is the model without adapters, and TRL calls it without DDP around it.
        if reference is None and not host.precompute_ref_logps and model is not host.model:
            outers.append(host.model)
        called = [(outers, prepared)]
        if reference is not None and reference is not model:
            called.append(([reference], self._prepare_part(reference)))
        return called

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """Compute TRL's loss of the whole batch, with each ring's texts counted once in the metrics.

        Args:
            model: The model.
            inputs: The whole batch.
            return_outputs: Return the model's outputs too.
            num_items_in_batch: As in Trainer.

        Returns:
            The loss, or the loss and the outputs.

        Raises:
            InputError: The batch cannot be sharded, see `shard_batch`.
        """
        host: Any = self
        gather = partial(self._once_per_ring, host.accelerator.gather)
        # RewardTrainer passes the margins of its loss to the model as well, which ignores them.
        hook = model.register_forward_pre_hook(_without_margin, with_kwargs=True)
        try:
            with self._sharing_metrics(), self._gathering(gather):
                return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)  # type: ignore[misc]
        finally:
            hook.remove()

    def _once_per_ring(self, gather: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        """Gather a tensor from the first rank of every ring. In evaluation, return it: batches are shared later."""
        rings, _ = self._rings()
        if rings == 1 or not self.model.training:  # type: ignore[attr-defined]
            return x
        return gather(x).unflatten(0, (rings, self.ring.world_size, -1))[:, 0].flatten(0, 1)

    def _precompute_ref_logps(self, dataset: Any, *args: Any) -> Any:
        """Compute the reference log-probabilities of all texts on every ring, before the training."""
        host: Any = self
        self._prepare_models()
        model = host.ref_model or host.model
        accelerator = host.accelerator
        prepare_loader = accelerator.prepare
        accelerator.prepare = lambda loader: share_evaluation(prepare_loader(loader), 1, 0)
        try:
            with self._gathering(_unchanged), self._whole_step(model, self._prepare_part(model), seed_from(0, 0)):
                return super()._precompute_ref_logps(dataset, *args)  # type: ignore[misc]
        finally:
            del accelerator.prepare


def _unchanged(x: Any) -> Any:
    return x


def _without_margin(model: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    return args, {name: x for name, x in kwargs.items() if name != "margin"}


class RingGenerationMixin(RingPreferenceMixin):
    """Mixin before TRL's GRPOTrainer or RLOOTrainer, which generate texts and weight them by rewards.

    Every rank generates the same texts, each from whole prompts, and computes the loss of all of them. The calls of
    the models that compute log-probabilities are sharded.
    """

    supported_trl: tuple[str, ...] = ("GRPOTrainer", "RLOOTrainer")

    def _check_options(self) -> None:
        super()._check_options()
        host: Any = self
        name = self._trl_trainer()
        unsupported = {
            "use_vllm": host.args.use_vllm,
            "use_transformers_continuous_batching": host.args.use_transformers_continuous_batching,
            "tools": getattr(host, "tools", None),
            "environment_factory": getattr(host, "environment_factories", None),
            "rollout_func": getattr(host, "rollout_func", None),
            "fsdp": host.is_fsdp_enabled,
        }
        for option, value in unsupported.items():
            if value:
                raise UnsupportedError(f"{option} of {name} was not compared with one process; leave it out")
        rings, _ = self._rings()
        if rings > 1:
            raise UnsupportedError(
                f"{name} over {rings} rings: TRL divides the texts of a prompt by the number of processes; use one "
                "ring of all ranks"
            )
        # TRL multiplies by the number of processes, but all processes of a ring have the same texts.
        texts = host.args.per_device_train_batch_size * host.args.steps_per_generation
        if texts % host.args.num_generations:
            raise InputError(
                f"per_device_train_batch_size * steps_per_generation = {texts} must be divisible by num_generations="
                f"{host.args.num_generations}: the ranks of a ring have the same texts; increase one of the two"
            )
        host.args.generation_batch_size = texts

    @contextmanager
    def _as_one_process(self) -> Iterator[None]:
        """Return a context in which accelerate, and so TRL, sees one process: this one."""
        states = [vars(state) for state in (PartialState(), self.accelerator.state)]  # type: ignore[attr-defined]
        one = {"num_processes": 1, "process_index": 0, "distributed_type": DistributedType.NO}
        before = [{name: state[name] for name in one} for state in states]
        try:
            for state in states:
                state.update(one)
            yield
        finally:
            for state, values in zip(states, before, strict=True):
                state.update(values)

    def _of_first_rank(self, value: Any) -> Any:
        """Return the value of the ring's first rank. A collective call."""
        values = [value]
        if self.ring.world_size > 1:
            dist.broadcast_object_list(values, src=0)
        return values[0]

    def _prepare_inputs(self, batch: Any) -> Any:
        """Generate texts like TRL, with the random numbers of the ring's first rank."""
        state = torch.get_rng_state()
        torch.set_rng_state(state.new_tensor(self._of_first_rank(state.tolist())))
        device: torch.device = self.accelerator.device  # type: ignore[attr-defined]
        if device.type == "cuda":
            state = torch.cuda.get_rng_state(device)
            torch.cuda.set_rng_state(state.new_tensor(self._of_first_rank(state.tolist())), device)
        with self._as_one_process():
            return super()._prepare_inputs(batch)  # type: ignore[misc]

    def _generate_single_turn(self, *args: Any, **kwargs: Any) -> Any:
        """Generate texts on this rank from whole prompts, and return those of the ring's first rank."""
        with local_attention():
            return self._of_first_rank(super()._generate_single_turn(*args, **kwargs))  # type: ignore[misc]

    def _calculate_rewards(self, *args: Any, **kwargs: Any) -> Any:
        """Return the rewards that the ring's first rank computes, because reward functions may be random."""
        rewards = super()._calculate_rewards(*args, **kwargs)  # type: ignore[misc]
        return rewards.new_tensor(self._of_first_rank(rewards.tolist()))

    def _get_per_token_logps_and_entropies(self, model: Any, *args: Any, **kwargs: Any) -> Any:
        """Compute log-probabilities of whole texts, with the calls of the model sharded."""
        host: Any = self
        part = self._prepare_part(host.accelerator.unwrap_model(model))
        seed = seed_from(host.args.seed, 0, host.state.global_step)
        with whole_calls(self.ring, [model], part, self.layout, seed):
            return super()._get_per_token_logps_and_entropies(model, *args, **kwargs)  # type: ignore[misc]

    def _called_models(self, model: Any, prepared: Any) -> list[tuple[list[Any], Any]]:
        return []  # `_get_per_token_logps_and_entropies` makes every call

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """Compute TRL's loss of all texts.

        Args:
            model: The model.
            inputs: The texts, with their advantages.
            return_outputs: Must be False.
            num_items_in_batch: As in Trainer.

        Returns:
            The loss.

        Raises:
            InputError: The batch cannot be sharded, see `shard_batch`.
        """
        with self._as_one_process():
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)

    def prediction_step(
        self, model: Any, inputs: Any, prediction_loss_only: bool, ignore_keys: list[str] | None = None
    ) -> tuple[Tensor | None, Any, Any]:
        """Generate texts for one batch of prompts, and return their loss.

        Args:
            model: The model.
            inputs: The prompts.
            prediction_loss_only: As in Trainer.
            ignore_keys: As in Trainer.

        Returns:
            The loss, the same on every rank; None; None.

        Raises:
            InputError: The batch cannot be sharded, see `shard_batch`.
        """
        # TRL's method, which generates texts, in place of that of `RingTrainerMixin`, which shards a batch.
        return super(RingTrainerMixin, self).prediction_step(model, inputs, prediction_loss_only, ignore_keys)  # type: ignore[misc]


class RingSFTTrainer(RingSFTMixin, SFTTrainer):
    """TRL's SFTTrainer with every batch sharded over `ring`.

    The ranks of a ring get the same batches; different rings get different batches.

    Args:
        args: Arguments of TRL's SFTTrainer.
        ring: The ring. Its ranks are consecutive processes. None: a ring of all processes.
        layout: As in `Ring.sequence`.
        max_tokens_per_rank: As in `RingTrainerMixin`.
        kwargs: Arguments of TRL's SFTTrainer, including `peft_config`.

    Raises:
        UnsupportedError: What `RingTrainerMixin` refuses; images; a TRL other than 1.16.

    Example:
        RingSFTTrainer(model=model, args=SFTConfig(packing=True), train_dataset=texts, ring=ringattn.Ring()).train()
    """


class RingDPOTrainer(RingPreferenceMixin, DPOTrainer):
    """TRL's DPOTrainer with every call of its models sharded over `ring`.

    The ranks of a ring get the same batches; different rings get different batches.

    Args:
        args: Arguments of TRL's DPOTrainer.
        ring: The ring. Its ranks are consecutive processes. None: a ring of all processes.
        layout: As in `Ring.sequence`.
        kwargs: Arguments of TRL's DPOTrainer, including `ref_model` and `peft_config`.

    Raises:
        UnsupportedError: What `RingTrainerMixin` refuses; images; compute_metrics; TRL other than 1.16.

    Example:
        RingDPOTrainer(model=model, args=DPOConfig(), train_dataset=pairs, ring=ringattn.Ring()).train()
    """


class RingKTOTrainer(RingPreferenceMixin, KTOTrainer):
    """TRL's KTOTrainer with every call of its models sharded over `ring`.

    The ranks of a ring get the same batches; different rings get different batches.

    Args:
        args: Arguments of TRL's KTOTrainer.
        ring: The ring. Its ranks are consecutive processes. None: a ring of all processes.
        layout: As in `Ring.sequence`.
        kwargs: Arguments of TRL's KTOTrainer, including `ref_model` and `peft_config`.

    Raises:
        UnsupportedError: What `RingTrainerMixin` refuses; images; compute_metrics; TRL other than 1.16.

    Example:
        RingKTOTrainer(model=model, args=KTOConfig(), train_dataset=texts, ring=ringattn.Ring()).train()
    """


class RingRewardTrainer(RingPreferenceMixin, RewardTrainer):
    """TRL's RewardTrainer with every call of the model below its head sharded over `ring`.

    The ranks of a ring get the same batches; different rings get different batches. Every rank gathers the last hidden
    states of the batch, and computes the rewards of all texts.

    Args:
        args: Arguments of TRL's RewardTrainer.
        ring: The ring. Its ranks are consecutive processes. None: a ring of all processes.
        layout: As in `Ring.sequence`.
        kwargs: Arguments of TRL's RewardTrainer, including `peft_config`.

    Raises:
        UnsupportedError: What `RingTrainerMixin` refuses; images; compute_metrics; TRL other than 1.16.

    Example:
        RingRewardTrainer(model=model, args=RewardConfig(), train_dataset=pairs, ring=ringattn.Ring()).train()
    """


class RingGRPOTrainer(RingGenerationMixin, GRPOTrainer):
    """TRL's GRPOTrainer with the log-probabilities of its texts computed over `ring`, which has all ranks.

    Every rank generates the same texts, from whole prompts.

    Args:
        args: Arguments of TRL's GRPOTrainer.
        ring: The ring of all processes. None: that ring.
        layout: As in `Ring.sequence`.
        kwargs: Arguments of TRL's GRPOTrainer, including `peft_config`.

    Raises:
        UnsupportedError: What `RingTrainerMixin` refuses; images; vLLM, continuous batching, tools,
            environments, rollouts and FSDP; several rings; TRL other than 1.16.
        InputError: The texts of a step are not a multiple of `num_generations`.

    Example:
        RingGRPOTrainer(model=model, args=GRPOConfig(), reward_funcs=reward, train_dataset=prompts, ring=ring).train()
    """


class RingRLOOTrainer(RingGenerationMixin, RLOOTrainer):
    """TRL's RLOOTrainer with the log-probabilities of its texts computed over `ring`, which has all ranks.

    Every rank generates the same texts, from whole prompts.

    Args:
        args: Arguments of TRL's RLOOTrainer.
        ring: The ring of all processes. None: that ring.
        layout: As in `Ring.sequence`.
        kwargs: Arguments of TRL's RLOOTrainer, including `peft_config`.

    Raises:
        UnsupportedError: What `RingTrainerMixin` refuses; images; vLLM, continuous batching, tools,
            environments, rollouts and FSDP; several rings; TRL other than 1.16.
        InputError: The texts of a step are not a multiple of `num_generations`.

    Example:
        RingRLOOTrainer(model=model, args=RLOOConfig(), reward_funcs=reward, train_dataset=prompts, ring=ring).train()
    """
