"""The Trainer of transformers over the ranks of a ring.

`RingTrainerMixin` overrides one private method of Trainer, the one that shards batches for context parallelism, and
refuses a Trainer that has it in another form. Trainer's own loss is made of each rank's tokens; a loss of the user's
(`compute_loss`, `compute_loss_func`) gets the whole batch and whole outputs.
Guarantees: the loss and gradients of one process, also in evaluation; labels are counted whole.
Checked with transformers 5.18 to 5.23 and accelerate 1.15.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_map_only

from ringattn.adapters.dropout import seed_from
from ringattn.adapters.peft import base_of
from ringattn.adapters.transformers import prepare, prepared_models
from ringattn.adapters.transformers_batches import shard_batch
from ringattn.adapters.transformers_forward import stands_around
from ringattn.adapters.transformers_loaders import refuse_data, share_evaluation, share_training
from ringattn.adapters.transformers_memory import refuse_logits
from ringattn.adapters.transformers_trainer_checks import (
    ShardLoss,
    check_trainer,
    makes_own_loss,
    refuse_loaders,
    refuse_options,
    refuse_own_loss,
    refuse_parallelism,
)
from ringattn.adapters.transformers_whole import whole, whole_calls
from ringattn.core.layout import LayoutName
from ringattn.errors import InputError, UnsupportedError
from ringattn.ring import Ring
from ringattn.sequence import Sequence

__all__ = ["RingTrainerMixin", "check_trainer", "shard_batch"]


class RingTrainerMixin:
    """Put before transformers' Trainer; every batch lies over `ring`.

    Ranks of one ring get the same batches, rings other ones. accelerate's cp_size and sp_size stay 1.

    Args:
        args: Those of transformers' Trainer.
        ring: The ring. Its ranks follow each other in the order of processes.
        layout: As in `Ring.sequence`.
        kwargs: Those of transformers' Trainer.

    Raises:
        UnsupportedError: The Trainer is of another form; an option would mean something else on each rank; ranks of a
            ring would not read the data alike; the model cannot be prepared.

    Example:
        class RingTrainer(RingTrainerMixin, Trainer):
            pass

        RingTrainer(model=model, args=args, train_dataset=texts, ring=ringattn.Ring()).train()
    """

    shards_evaluation = True
    """Whether the host's prediction_step shards batches with labels, as that of Trainer does."""

    def __init__(self, *args: Any, ring: Ring, layout: LayoutName | str = "auto", **kwargs: Any) -> None:
        self.begin_ring(ring, layout)
        self._checks_with_callbacks = False  # but after `__init__`, in which a subclass may set options
        for given in (*args, *kwargs.values()):
            refuse_parallelism(given)
        super().__init__(*args, **kwargs)
        refuse_parallelism(self.accelerator)  # type: ignore[attr-defined]  # the environment may say so too
        self._check_options()

    def begin_ring(self, ring: Ring, layout: LayoutName | str = "auto") -> None:
        """Set the ring, before Trainer's `__init__` or inside of it.

        Args:
            ring: The ring.
            layout: As in `Ring.sequence`.

        Raises:
            UnsupportedError: The Trainer is of another form.
        """
        check_trainer(type(self))
        self.ring, self.layout = ring, layout
        self._seq: Sequence | None = None
        self._gathers_losses = False
        self._checks_with_callbacks = True

    def add_callback(self, callback: Any) -> None:
        """As Trainer does. Its `__init__` adds one when its options are set, and a ring begun inside checks them then.

        Args:
            callback: As in Trainer.

        Raises:
            UnsupportedError: See `RingTrainerMixin`.
        """
        super().add_callback(callback)  # type: ignore[misc]
        if self._checks_with_callbacks:
            self._checks_with_callbacks = False
            self._check_options()

    def _check_options(self) -> None:
        """Refuse options, and let the loss of smoothed labels know that labels are shifted already."""
        host: Any = self
        if host.label_smoother is not None and not isinstance(host.label_smoother, ShardLoss):
            host.label_smoother = ShardLoss(host.label_smoother)
        rings = self._rings()[0]
        refuse_options(host)
        refuse_own_loss(host)
        refuse_loaders(host)
        refuse_data(host.train_dataset, host)
        refuse_data(host.eval_dataset, host, evaluated_by=rings)
        prepare(host.model)

    def call_model_init(self, trial: Any = None) -> Any:
        """A model from `model_init`, prepared: `train` begins with another one than `__init__`.

        Args:
            trial: What `model_init` gets of a search of hyperparameters. None: nothing.

        Returns:
            The model.

        Raises:
            UnsupportedError: The model cannot be prepared.
        """
        return prepare(super().call_model_init(trial))  # type: ignore[misc]

    def get_cp_size(self) -> int:
        """Processes that share a batch: what Trainer divides its counts of labels and of batches by.

        Returns:
            The ranks of the ring.
        """
        return 1 if self._is_counting else self.ring.world_size

    _is_counting = False

    def _get_num_items_in_batch(self, *args: Any, **kwargs: Any) -> Any:
        """Labels of all ranks, each once: before 5.23 Trainer rounds down as it divides by `get_cp_size`."""
        self._is_counting = True
        try:
            found = super()._get_num_items_in_batch(*args, **kwargs)  # type: ignore[misc]
        finally:
            self._is_counting = False
        host: Any = self
        if found is None or (makes_own_loss(host) and not host.args.average_tokens_across_devices):
            return found
        return found / self.ring.world_size

    def get_tp_size(self) -> int:
        """Processes that make the same loss, by whose number Trainer divides its scale of a loss.

        Returns:
            Trainer's number; times the ranks of the ring while a loss is made that each of them makes whole.
        """
        size: int = super().get_tp_size()  # type: ignore[misc]
        return size * self.ring.world_size if self._is_making_whole_loss else size

    _is_making_whole_loss = False

    def get_train_dataloader(self) -> Any:
        """Trainer's own, which all ranks of a ring read alike.

        Returns:
            The loader, as accelerate prepared it.

        Raises:
            UnsupportedError: The data is a stream of which accelerate would give each process its own part.
        """
        refuse_data(self.train_dataset, self)  # type: ignore[attr-defined]
        return share_training(super().get_train_dataloader(), *self._rings())  # type: ignore[misc]

    def get_eval_dataloader(self, eval_dataset: Any = None) -> Any:
        """Trainer's own, which all ranks of a ring read alike.

        Args:
            eval_dataset: The data, or its name among those that Trainer has. None: Trainer's own.

        Returns:
            The loader, as accelerate prepared it.

        Raises:
            UnsupportedError: The data is a stream and there are several rings, or accelerate would give each process
                its own part of it.
        """
        host: Any = self
        data = host.eval_dataset if eval_dataset is None else eval_dataset
        data = host.eval_dataset[data] if isinstance(data, str) else data
        refuse_data(data, self, evaluated_by=self._rings()[0])
        return share_evaluation(super().get_eval_dataloader(eval_dataset), *self._rings())  # type: ignore[misc]

    def get_test_dataloader(self, test_dataset: Any) -> Any:
        """Trainer's own, which all ranks of a ring read alike.

        Args:
            test_dataset: The data.

        Returns:
            The loader, as accelerate prepared it.

        Raises:
            UnsupportedError: As `get_eval_dataloader`.
        """
        refuse_data(test_dataset, self, evaluated_by=self._rings()[0])
        return share_evaluation(super().get_test_dataloader(test_dataset), *self._rings())  # type: ignore[misc]

    def evaluation_loop(self, dataloader: Any, *args: Any, **kwargs: Any) -> Any:
        """Trainer's own, in which each text counts once, on however many ranks.

        Args:
            dataloader: What `get_eval_dataloader` or `get_test_dataloader` gave.
            args: Those of transformers' Trainer.
            kwargs: Those of transformers' Trainer.

        Returns:
            What Trainer returns: an EvalLoopOutput.

        Raises:
            UnsupportedError: The model returns what cannot be gathered.
        """
        self.gather_function = partial(self._gather_once, dataloader)
        return super().evaluation_loop(dataloader, *args, **kwargs)  # type: ignore[misc]

    def prediction_step(
        self, model: Any, inputs: Mapping[str, Any], prediction_loss_only: bool, ignore_keys: list[str] | None = None
    ) -> tuple[Tensor | None, Any, Any]:
        """The loss of one batch, the mean over its labels, and its logits and labels, whole and alike on every rank.

        Logits are gathered, so every rank holds those of the whole batch, as one process would.

        Args:
            model: The model.
            inputs: The whole batch, by name.
            prediction_loss_only: Whether logits and labels are left out.
            ignore_keys: As in Trainer.

        Returns:
            The loss, or None without labels; logits and labels, or None.

        Raises:
            UnsupportedError: The model returns what cannot be gathered.
            InputError: The batch cannot be sharded, see `shard_batch`.
        """
        host: Any = self
        if not prediction_loss_only and inputs.get("labels") is not None:
            refuse_logits(base_of(host.model), "prediction")
        active: Callable[[], Any] = nullcontext
        args, whole = host.args, inputs
        if inputs.get("labels") is None or not self.shards_evaluation:
            active, inputs = self._prepare_context_parallel_inputs(model, host._prepare_inputs(inputs))
        across = args.average_tokens_across_devices
        args.average_tokens_across_devices = False  # other rings have other batches, whose labels do not count here
        try:
            with active():
                found = super().prediction_step(model, inputs, prediction_loss_only, ignore_keys)  # type: ignore[misc]
        finally:
            args.average_tokens_across_devices = across
        loss, logits, labels = found
        if labels is not None:
            labels = whole["labels"]
        if loss is not None:
            loss = loss.clone()
            self.ring.all_reduce([loss])
            loss /= self.ring.world_size
        self._gathers_losses = loss is not None
        return loss, self._gather_tokens(logits), labels

    def floating_point_ops(self, inputs: Any) -> Any:
        """This rank's part of Trainer's estimate, which it adds up over ranks.

        Args:
            inputs: The whole batch.

        Returns:
            The number of operations.

        Raises:
            Nothing.
        """
        return super().floating_point_ops(inputs) / self.ring.world_size  # type: ignore[misc]

    def _track_num_input_tokens(self, inputs: Any) -> None:
        """Trainer adds up the tokens of all processes, and those of a ring have the same."""
        state: Any = self.state  # type: ignore[attr-defined]
        before = state.num_input_tokens_seen
        super()._track_num_input_tokens(inputs)  # type: ignore[misc]
        state.num_input_tokens_seen = before + (state.num_input_tokens_seen - before) // self.ring.world_size

    def _rings(self) -> tuple[int, int]:
        """How many rings there are, and which this process belongs to."""
        args = self.args  # type: ignore[attr-defined]
        return max(1, args.world_size // self.ring.world_size), args.process_index // self.ring.world_size

    def _gather_tokens(self, found: Any) -> Any:
        """Outputs of this rank's tokens, (rows, tokens, ...), of the whole sequence."""
        if found is None or self._seq is None:
            return whole(found)
        if isinstance(found, list | tuple):
            return type(found)(self._gather_tokens(one) for one in found)
        tokens = self._seq.counts[self.ring.rank]
        if not isinstance(found, Tensor) or found.dim() < 2 or found.shape[1] != tokens:
            raise UnsupportedError(
                f"the model returns {tuple(found.shape) if isinstance(found, Tensor) else type(found).__name__} beside "
                f"logits, which is not of this rank's {tokens} tokens; name it in ignore_keys, or leave it out"
            )
        return self._seq.gather(found, dim=1)

    def _gather_once(self, loader: Any, found: Any) -> Any:
        """What Trainer gathers over processes, of the texts of all rings: each text once.

        Losses are gathered from one ring, too, whose last batch Trainer fills up; all else is whole on each rank.
        """
        is_loss, self._gathers_losses = self._gathers_losses, False
        if self._rings()[0] == 1 and not is_loss:
            return found
        return tree_map_only(Tensor, partial(self._gather_texts, loader), found)

    def _gather_texts(self, loader: Any, found: Tensor) -> Tensor:
        """Rows (texts of a batch, ...) of every ring, (texts, ...): once for each ring, without texts read twice."""
        from transformers.trainer_utils import has_length

        host: Any = self
        rings, _ = self._rings()
        found = host.accelerator.pad_across_processes(found, dim=0)  # a ring's last batch may be smaller
        found = host.accelerator.gather(found.contiguous())
        found = found.unflatten(0, (rings, self.ring.world_size, -1))[:, 0].flatten(0, 1)
        if not has_length(loader.dataset):
            return found
        texts, size = len(loader.dataset), host.args.eval_batch_size
        if host.args.dataloader_drop_last:
            texts -= texts % size
        rest = texts % (rings * size)
        return found[:rest] if rest and host.accelerator.gradient_state.end_of_dataloader else found

    def _prepare_context_parallel_inputs(
        self, model: Any, inputs: Mapping[str, Any]
    ) -> tuple[Callable[[], Any], dict[str, Any]]:
        prepared = next((part for part in model.modules() if part in prepared_models), None)
        if prepared is None:
            host: Any = self
            raise InputError(
                f"{type(host.accelerator.unwrap_model(model)).__name__}, which is not the model that the Trainer began "
                "with, would attend to this rank's tokens alone; call ringattn.adapters.transformers.prepare(model)"
            )
        if not stands_around(prepared):
            prepare(prepared)  # Trainer applies Liger's kernels when training begins
        # Batches of one step draw on from its seed, and a run that is resumed goes on with that of its step.
        host = self
        seed = seed_from(host.args.seed, self._rings()[1], host.state.global_step)
        if makes_own_loss(host):
            refuse_own_loss(host)
            self._seq = None
            return partial(self._whole_step, model, prepared, seed), dict(inputs)
        self._seq, mine = shard_batch(self.ring, inputs, self.layout, model=prepared)
        return partial(self.ring.activate, self._seq, dropout_seed=seed), mine

    @contextmanager
    def _whole_step(self, model: Any, prepared: Any, seed: int) -> Iterator[None]:
        """Inside, a loss is made of the whole batch and of whole outputs, on every rank."""
        self._is_making_whole_loss = True
        try:
            with whole_calls(self.ring, model, prepared, self.layout, seed):
                yield
        finally:
            self._is_making_whole_loss = False
