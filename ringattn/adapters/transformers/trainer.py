"""The Trainer of transformers over the ranks of a ring.

`RingTrainerMixin` overrides the private method of Trainer that shards batches for context parallelism. It refuses a
Trainer whose methods around it differ from the reviewed ones (`HOST`). Trainer's default loss is computed from each
rank's tokens. A loss of the user (`compute_loss`, `compute_loss_func`) gets the whole batch and whole outputs.

Guarantees: the loss and gradients of one process, also in evaluation. Labels are counted over the whole batch.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager, nullcontext
from copy import copy
from functools import partial
from typing import Any

import torch
from accelerate import PartialState
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_map_only

from ringattn.adapters.dropout import seed_from
from ringattn.adapters.groups import ring_of_ranks
from ringattn.adapters.host_versions import ABSENT, Host
from ringattn.adapters.transformers import prepare, prepared_models
from ringattn.adapters.transformers.batches import WholeOutput, documents_of, shard_batch, whole_calls
from ringattn.adapters.transformers.calls import adds_router_loss, check_router_loss, is_wrapped
from ringattn.adapters.transformers.checks import base_of
from ringattn.adapters.transformers.encoder_decoder import encoder_of
from ringattn.adapters.transformers.host_masks import HOST as MODELS
from ringattn.adapters.transformers.loaders import (
    NewestBatch,
    keep_newest,
    last_turn,
    refuse_data,
    refuse_lone_processes,
    share_evaluation,
    share_training,
)
from ringattn.adapters.transformers.memory import refuse_logits
from ringattn.adapters.transformers.micro_batches import divide, micro_batches, pairs_per_token
from ringattn.adapters.transformers.positions import computes_positions
from ringattn.adapters.transformers.token_labels import scaled_means
from ringattn.adapters.transformers.trainer_checks import (
    EARLY_CALLBACKS,
    has_custom_loss,
    refuse_custom_loss,
    refuse_deepspeed,
    refuse_division,
    refuse_loaders,
    refuse_loss_of_rows,
    refuse_options,
    refuse_parallelism,
    refuse_trl,
    scales_by_tp_size,
    takes_means,
)
from ringattn.batch import MicroBatch
from ringattn.core.layout import LayoutName
from ringattn.errors import InputError, UnsupportedError
from ringattn.ring import Ring
from ringattn.sequence import Sequence

__all__ = ["RingTrainerMixin", "check_trainer"]

_TRAINER = "transformers.trainer:Trainer"
HOST = Host(
    "transformers",
    MODELS.tested,
    feature="Trainer",
    parameters={
        f"{_TRAINER}.call_model_init": ("trial",),
        f"{_TRAINER}.get_eval_dataloader": ("eval_dataset",),
        f"{_TRAINER}.get_test_dataloader": ("test_dataset",),
        f"{_TRAINER}.add_callback": ("callback",),
        f"{_TRAINER}.floating_point_ops": ("inputs",),
    },
    # Where Trainer counts labels, scales the loss, and calls the methods that the mixin overrides.
    sources={
        f"{_TRAINER}._prepare_context_parallel_inputs": ("db19292b", "56658a92", "b9348e70"),
        f"{_TRAINER}.get_cp_size": (ABSENT, "b4ad013c"),
        f"{_TRAINER}.get_tp_size": ("a0371918", "b2c58d10"),
        f"{_TRAINER}._get_num_items_in_batch": ("ce232ae7", "1ce7abfb", "24e2ec7e", "b72882a3", "b4468acb"),
        f"{_TRAINER}.compute_loss": ("dbc2017c", "dba7291c", "ce3a1d59", "d9ea8329", "713fc665", "193ec826"),
        f"{_TRAINER}.training_step": ("f642173d", "8dcc0731", "5c1cfc86", "ae8a8211", "f5504bae"),
        f"{_TRAINER}.prediction_step": ("b2d39016", "773e7e87", "a8cb154d", "1b088cd7", "53896179"),
        "accelerate.data_loader:BatchSamplerShard.__init__": ("7fc1a43d", "3f4359df"),
        "accelerate.data_loader:BatchSamplerShard.__iter__": ("549f7723",),
        "accelerate.data_loader:IterableDatasetShard.__iter__": ("566f63ea",),
    },
)  # fmt: skip

# --- The mixin --------------------------------------------------------------------------------------------------------


class RingTrainerMixin:
    """A mixin that precedes transformers' Trainer among the base classes, and shards every batch over `ring`.

    The ranks of a ring get the same batches; different rings get different batches. accelerate's cp_size and sp_size
    must stay 1.

    Args:
        args: Arguments of transformers' Trainer.
        ring: The ring. Its ranks are consecutive processes. None: a ring of all processes.
        layout: As in `Ring.sequence`.
        max_tokens_per_rank: Divide each training batch among micro-batches with at most this number of tokens on a
            rank, as `Ring.batch` does; the ring has all processes. None: each batch passes through the model at once.
        kwargs: Arguments of transformers' Trainer.

    Raises:
        UnsupportedError: The Trainer class is not supported, an option would have another effect on shards, the ranks
            of a ring would not read the same data, or the model cannot be prepared.

    Example:
        class RingTrainer(RingTrainerMixin, Trainer):
            pass

        RingTrainer(model=model, args=args, train_dataset=texts, ring=ringattn.Ring()).train()
    """

    loss_of_shards = False
    """Whether the class overrides `compute_loss` with a loss of this rank's tokens, instead of the whole batch."""

    supported_trl: tuple[str, ...] = ()
    """Trainers of TRL whose custom loss is supported."""

    max_tokens_per_rank: int | None = None
    """The most tokens of a rank in a micro-batch of training; None: batches are not divided."""

    def __init__(
        self,
        *args: Any,
        ring: Ring | None = None,
        layout: LayoutName | str = "auto",
        max_tokens_per_rank: int | None = None,
        **kwargs: Any,
    ) -> None:
        self.max_tokens_per_rank = max_tokens_per_rank
        arguments = (*args, *kwargs.values())
        with self.created_over(ring_of_arguments(arguments) if ring is None else ring, layout, arguments):
            super().__init__(*args, **kwargs)

    @contextmanager
    def created_over(self, ring: Ring, layout: LayoutName | str, arguments: Iterable[Any]) -> Iterator[None]:
        """Return a context for Trainer's `__init__`: it sets the ring before, and checks the options afterwards.

        Args:
            ring: The ring.
            layout: As in `Ring.sequence`.
            arguments: The arguments of `__init__`.

        Returns:
            A context manager.

        Raises:
            UnsupportedError: See `RingTrainerMixin`.
        """
        self.begin_ring(ring, layout)
        self._checks_with_callbacks = False  # options are checked below, after subclasses have set them
        for argument in arguments:
            refuse_parallelism(argument)
        yield
        refuse_parallelism(self.accelerator)  # type: ignore[attr-defined]  # environment variables can set it too
        refuse_lone_processes(self.accelerator, self.ring)  # type: ignore[attr-defined]
        self._check_options()

    def begin_ring(self, ring: Ring, layout: LayoutName | str = "auto") -> None:
        """Set the ring, before Trainer's `__init__` or during it.

        Args:
            ring: The ring.
            layout: As in `Ring.sequence`.

        Raises:
            UnsupportedError: The Trainer class is not supported.
        """
        check_trainer(type(self))
        self.ring, self.layout = ring, layout
        self._seq: Sequence | None = None
        self._checks_with_callbacks = True

    def add_callback(self, callback: Any) -> None:
        """Add a callback like Trainer. For a ring that was set during `__init__`, the first call checks the options.

        Trainer's `__init__` adds a callback after it has set its options, and calls no later hook.

        Args:
            callback: As in Trainer.

        Raises:
            UnsupportedError: See `RingTrainerMixin`.
        """
        super().add_callback(callback)  # type: ignore[misc]
        if self._checks_with_callbacks:
            if not hasattr(self, "label_smoother"):
                raise UnsupportedError(EARLY_CALLBACKS)
            self._checks_with_callbacks = False
            self._check_options()

    def _check_options(self) -> None:
        """Refuse unsupported options and data, wrap the label smoother for shifted labels, and prepare the model."""
        host: Any = self
        if host.label_smoother is not None and not isinstance(host.label_smoother, ShardLoss):
            host.label_smoother = ShardLoss(host.label_smoother)
        rings = self._rings()[0]
        refuse_options(host)
        refuse_custom_loss(host)
        refuse_loss_of_rows(host)
        refuse_loaders(host)
        refuse_deepspeed(host)
        refuse_division(host)
        refuse_data(host.train_dataset, host.accelerator)
        refuse_data(host.eval_dataset, host.accelerator, evaluated_by=rings)
        self._prepare_models()
        base = base_of(host.model)
        if base in prepared_models and adds_router_loss(base, {}):
            check_router_loss(base)

    def _prepare_models(self) -> None:
        """Prepare the models that a step calls, again if a patch has replaced their forward since."""
        prepare(self.model)  # type: ignore[attr-defined]

    _is_in_loss = False
    """The loss is being computed. Before its end, ranks have only parts of its gradients."""
    _newest: NewestBatch | None = None
    """The collate function of the training loader, if it runs in this process."""
    _upcoming: Iterator[Any] = iter(())
    """The batches after the current one that have been read."""
    _next: Any = None
    """The batch that is planned when the forward pass of the current one has ended."""
    _planned: Future[Any] | None = None
    """The result of the thread that plans a batch."""

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """Train like Trainer. No thread of this method outlives it.

        Args:
            args: As in Trainer.
            kwargs: As in Trainer.

        Returns:
            Trainer's TrainOutput.

        Raises:
            UnsupportedError: See `RingTrainerMixin`.
            InputError: See `training_step`.
        """
        try:
            return super().train(*args, **kwargs)  # type: ignore[misc]
        finally:
            self._await_plans()

    def get_batch_samples(self, *args: Any, **kwargs: Any) -> tuple[list[Any], Any]:
        """Return the batches of an update and the number of their labels, like Trainer.

        Args:
            args: As in Trainer.
            kwargs: As in Trainer.

        Returns:
            The batches and the number.

        Raises:
            Nothing.
        """
        samples, labels = super().get_batch_samples(*args, **kwargs)  # type: ignore[misc]
        first_of_next_update = None if self._newest is None else self._newest.batch
        self._upcoming = iter([*samples[1:], first_of_next_update])
        return samples, labels

    @contextmanager
    def compute_loss_context_manager(self) -> Iterator[None]:
        """Return Trainer's context of the loss. At its end, a thread begins to plan the next batch of training.

        Backward's kernels hide the thread's work. Before the first layer, the thread would delay that layer.

        Returns:
            A context manager.

        Raises:
            ClosedError: The ring was closed or has failed.
        """
        with super().compute_loss_context_manager():  # type: ignore[misc]
            self._is_in_loss = True
            try:
                yield
            finally:
                self._is_in_loss = False
        batch, self._next = self._next, None
        base = base_of(self.model)  # type: ignore[attr-defined]
        # The positions of some models are computed by running a copy of them, which is not done in a thread.
        # `plan_ahead` plans no calls with two sequences, as those of an encoder-decoder. The losses of TRL's trainers
        # other than SFTTrainer call the model with other batches than those of the loader.
        if batch is None or self.supported_trl or encoder_of(base) is not None or computes_positions(base):
            return
        self._planned = self.ring.plan_ahead(partial(self._sequences, batch))

    def _sequences(self, batch: Mapping[str, Any]) -> Sequence | tuple[MicroBatch, ...]:
        """Return what the step of a batch will place. Local. Raises what that step will raise on all ranks."""
        if self.max_tokens_per_rank is not None:
            return divide(self.ring, batch, self.max_tokens_per_rank, self._pairs_per_token)[0]
        tokens = batch["inputs_embeds" if "input_ids" not in batch else "input_ids"].shape[1]
        return self.ring.sequence(tokens, cu_seqlens=documents_of(batch), layout=self.layout)

    def _await_plans(self) -> None:
        """Wait until the next batch is planned. A failure is left to the step of that batch, which plans it again."""
        planned, self._planned = self._planned, None
        if planned is not None:
            planned.exception()

    def training_step(self, model: Any, inputs: Mapping[str, Any], *args: Any, **kwargs: Any) -> Tensor:
        """Return the loss of a batch, and add its gradients. With `max_tokens_per_rank`, in micro-batches.

        Args:
            model: The model.
            inputs: The whole batch, by name.
            args: As in Trainer.
            kwargs: As in Trainer.

        Returns:
            This rank's part of the loss.

        Raises:
            InputError: The batch cannot be sharded, see `shard_batch`, or a sample exceeds `max_tokens_per_rank`.
            UnsupportedError: A weight was thawed after DDP was made.
        """
        self._refuse_thawed(model)
        self._await_plans()
        self._next = next(self._upcoming, None)
        if self.max_tokens_per_rank is None:
            return super().training_step(model, inputs, *args, **kwargs)  # type: ignore[misc]
        host: Any = self
        self._pairs_per_token = pairs_per_token(base_of(host.model), self.ring.machines)
        parts = micro_batches(self.ring, inputs, self.max_tokens_per_rank, self._pairs_per_token)
        losses, layout = [], self.layout
        self.layout = "documents"
        try:
            for number, part in enumerate(parts):
                # Reduce gradients over ranks only after the last part, as Trainer does for accumulated batches.
                is_last = number == len(parts) - 1
                with nullcontext() if is_last else host.accelerator.no_sync(model):
                    losses.append(super().training_step(model, part, *args, **kwargs))  # type: ignore[misc]
        finally:
            self.layout = layout
        self._merge_metrics(parts)
        return torch.stack(losses).sum()

    _reduced: tuple[Any, set[str]] = (None, set())
    """A model in DDP, and the names of the weights whose gradients DDP averages over ranks."""

    def _refuse_thawed(self, model: Any) -> None:
        """Raise `UnsupportedError` if a weight needs a gradient, but had none when DDP was made."""
        wrapper = getattr(model, "_orig_mod", model)  # of a compiled model
        if not isinstance(wrapper, DistributedDataParallel):
            return
        learned = {name for name, weight in wrapper.module.named_parameters() if weight.requires_grad}
        learned -= wrapper.parameters_to_ignore
        if self._reduced[0] is not wrapper:
            # Callbacks run between the creation of DDP and the first step.
            reduced = wrapper._get_ddp_logging_data().get("num_parameter_tensors", len(learned))
            self._reduced = (wrapper, learned if len(learned) <= reduced else set())
        if thawed := sorted(learned - self._reduced[1]):
            raise UnsupportedError(
                f"a weight{f' ({thawed[0]})' if self._reduced[1] else ''} was thawed after training began, and DDP "
                "would not average its gradient over the ranks; set requires_grad of every weight that will be trained "
                "before the training, and freeze some of them in a callback, or create another Trainer after the change"
            )

    def _merge_metrics(self, parts: list[dict[str, Tensor]]) -> None:
        """Replace the metrics of a batch's micro-batches, `parts`, by those of the batch. Trainer has none."""

    def call_model_init(self, trial: Any = None) -> Any:
        """Return a prepared model from `model_init`, because `train` creates a new model.

        Args:
            trial: The argument of `model_init` in a hyperparameter search. None: no argument.

        Returns:
            The model.

        Raises:
            UnsupportedError: The model cannot be prepared.
        """
        return prepare(super().call_model_init(trial))  # type: ignore[misc]

    def get_cp_size(self) -> int:
        """Return the number of processes that share a batch. Trainer divides its counts of labels and batches by it.

        Returns:
            The ranks of the ring.
        """
        return 1 if self._is_counting else self.ring.world_size

    _is_counting = False
    _evaluated: Mapping[str, Any] | None = None
    """The whole batch of an evaluation whose step gets only this rank's shard; its labels are counted."""

    def _get_num_items_in_batch(self, batch_samples: Any, *args: Any, **kwargs: Any) -> Any:
        """Count the labels of all ranks, each once.

        Before 5.23, Trainer rounds down when it divides by `get_cp_size`, so the division is done here.
        """
        # Every rank of a ring counts the same whole batch. Summed over processes (average_tokens_across_devices), the
        # count has each label once per rank, and the division corrects it. Otherwise the result is the labels per rank:
        # each rank divides its part of the sum by it, and the average over ranks by DDP or FSDP is the mean.
        self._is_counting = True
        try:
            whole = batch_samples if self._evaluated is None else [self._evaluated]
            labels = super()._get_num_items_in_batch(whole, *args, **kwargs)  # type: ignore[misc]
        finally:
            self._is_counting = False
        host: Any = self
        # Every rank computes a loss of the user from the whole batch, so the count of one process is right for it.
        if labels is None or (has_custom_loss(host) and not host.args.average_tokens_across_devices):
            return labels
        return labels_per_rank(labels, self.ring.world_size, host.model)

    def get_tp_size(self) -> int:
        """Return the number of processes with the same loss. Trainer divides the scale of its loss by it.

        Returns:
            Trainer's number, times the ranks of the ring while every rank computes the whole loss.
        """
        size: int = super().get_tp_size()  # type: ignore[misc]
        return size * self.ring.world_size if self._computes_whole_loss else size

    _computes_whole_loss = False

    def get_total_train_batch_size(self, args: Any) -> int:
        """Return the number of texts of an update, by which Trainer counts the steps of an epoch.

        Args:
            args: As in Trainer.

        Returns:
            Trainer's number, in which the ranks of a ring count once. Trainer of 4.57 has no `get_cp_size`.

        Raises:
            Nothing.
        """
        size: int = super().get_total_train_batch_size(args)  # type: ignore[misc]
        return size if hasattr(super(), "get_cp_size") else size // self.ring.world_size

    def get_train_dataloader(self, *args: Any, **kwargs: Any) -> Any:
        """Return Trainer's loader, set up so that all ranks of a ring read the same batches.

        Args:
            args: Arguments of the host's method. That of transformers' Trainer has none.
            kwargs: Arguments of the host's method.

        Returns:
            The loader, as accelerate prepared it.

        Raises:
            UnsupportedError: The data is a stream that accelerate would divide among all processes.
        """
        refuse_data(self.train_dataset, self.accelerator)  # type: ignore[attr-defined]
        loader = super().get_train_dataloader(*args, **kwargs)  # type: ignore[misc]
        self._newest = keep_newest(loader)
        return share_training(loader, *self._rings())

    def get_eval_dataloader(self, eval_dataset: Any = None) -> Any:
        """Return Trainer's loader, set up so that all ranks of a ring read the same batches.

        Args:
            eval_dataset: The data, or its name among Trainer's evaluation datasets. None: Trainer's dataset.

        Returns:
            The loader, as accelerate prepared it.

        Raises:
            UnsupportedError: The data is a stream, and there are several rings or accelerate would divide it among all
                processes.
        """
        host: Any = self
        data = host.eval_dataset if eval_dataset is None else eval_dataset
        data = host.eval_dataset[data] if isinstance(data, str) else data
        refuse_data(data, host.accelerator, evaluated_by=self._rings()[0])
        return share_evaluation(super().get_eval_dataloader(eval_dataset), *self._rings())  # type: ignore[misc]

    def get_test_dataloader(self, test_dataset: Any) -> Any:
        """Return Trainer's loader, set up so that all ranks of a ring read the same batches.

        Args:
            test_dataset: The data.

        Returns:
            The loader, as accelerate prepared it.

        Raises:
            UnsupportedError: See `get_eval_dataloader`.
        """
        refuse_data(test_dataset, self.accelerator, evaluated_by=self._rings()[0])  # type: ignore[attr-defined]
        return share_evaluation(super().get_test_dataloader(test_dataset), *self._rings())  # type: ignore[misc]

    def evaluation_loop(self, dataloader: Any, *args: Any, **kwargs: Any) -> Any:
        """Run Trainer's loop so that each text counts once, for any number of ranks.

        Args:
            dataloader: The result of `get_eval_dataloader` or `get_test_dataloader`.
            args: Arguments of transformers' Trainer.
            kwargs: Arguments of transformers' Trainer.

        Returns:
            Trainer's EvalLoopOutput.

        Raises:
            UnsupportedError: An output of the model cannot be gathered.
        """
        self.gather_function = partial(tree_map_only, Tensor, partial(self._gather_texts, dataloader))
        return super().evaluation_loop(dataloader, *args, **kwargs)  # type: ignore[misc]

    def prediction_step(
        self, model: Any, inputs: Mapping[str, Any], prediction_loss_only: bool, ignore_keys: list[str] | None = None
    ) -> tuple[Tensor | None, Any, Any]:
        """Return the loss of one batch (the mean over its labels), logits and labels, whole on every rank.

        Logits are gathered, so every rank holds the logits of the whole batch, like one process.

        Args:
            model: The model.
            inputs: The whole batch, by name.
            prediction_loss_only: Leave out logits and labels.
            ignore_keys: As in Trainer.

        Returns:
            The loss, or None without labels; logits and labels, or None.

        Raises:
            UnsupportedError: An output of the model cannot be gathered.
            InputError: The batch cannot be sharded, see `shard_batch`.
        """
        host: Any = self
        if not prediction_loss_only and inputs.get("labels") is not None:
            refuse_logits(base_of(host.model), "prediction")
        # If Trainer's step does not call the sharding method, shard here.
        active: Callable[[], Any] = nullcontext
        args, whole = host.args, inputs
        if not self._step_shards_evaluation(inputs):
            active, inputs = self._prepare_context_parallel_inputs(model, host._prepare_inputs(inputs))
            self._evaluated = whole if self._seq is not None else None
        across = args.average_tokens_across_devices
        args.average_tokens_across_devices = False  # labels of other rings' batches must not count
        try:
            with active():
                result = super().prediction_step(model, inputs, prediction_loss_only, ignore_keys)  # type: ignore[misc]
        finally:
            args.average_tokens_across_devices, self._evaluated = across, None
        loss, logits, labels = result
        if labels is not None and self._seq is not None:
            # The host's labels are shifted, and those of this rank.
            labels = tuple(whole.get(name) for name in host.label_names)
            labels = labels[0] if len(labels) == 1 else labels
        if loss is not None:
            # Each rank divides its sum by the labels per rank (see `_get_num_items_in_batch`), so the loss is an
            # average.
            loss = loss.clone()
            self.ring.all_reduce([loss])
            loss /= self.ring.world_size
        if encoder_of(base_of(host.model)) is not None:
            return loss, self._gather_parts(logits), labels
        return loss, self._gather_tokens(logits), labels

    def _step_shards_evaluation(self, inputs: Mapping[str, Any]) -> bool:
        """Return whether the host's prediction_step calls the sharding method for this batch."""
        host: Any = self
        names, returns_loss = host.label_names, inputs.get("return_loss")
        missing = [name for name in names if inputs.get(name) is None]
        if missing and inputs.get("labels") is not None:
            raise InputError(
                f"label_names: the batch has labels but no {', '.join(missing)}, so Trainer would evaluate no loss; "
                'pass label_names=["labels"] to TrainingArguments'
            )
        # As in Trainer's prediction_step.
        has_loss = not missing if names else host.can_return_loss if returns_loss is None else returns_loss
        return has_loss and not takes_shards(type(self))

    def floating_point_ops(self, inputs: Any) -> Any:
        """Return this rank's part of Trainer's estimate, which Trainer sums over ranks.

        Args:
            inputs: The whole batch.

        Returns:
            The number of operations.

        Raises:
            Nothing.
        """
        return super().floating_point_ops(inputs) / self.ring.world_size  # type: ignore[misc]

    def _track_num_input_tokens(self, inputs: Any) -> None:
        """Count input tokens once per ring. Trainer sums over processes, but those of a ring have the same batch."""
        state: Any = self.state  # type: ignore[attr-defined]
        before = state.num_input_tokens_seen
        super()._track_num_input_tokens(inputs)  # type: ignore[misc]
        state.num_input_tokens_seen = before + (state.num_input_tokens_seen - before) // self.ring.world_size

    def _rings(self) -> tuple[int, int]:
        """Return the number of rings and the index of this process's ring."""
        args = self.args  # type: ignore[attr-defined]
        return max(1, args.world_size // self.ring.world_size), args.process_index // self.ring.world_size

    def _gather_tokens(self, output: Any) -> Any:
        """Gather outputs of this rank's tokens, (rows, tokens, ...), to outputs of the whole sequence."""
        if output is None or self._seq is None:
            return tree_map_only(Tensor, Tensor.detach, output)
        if isinstance(output, list | tuple):
            return type(output)(self._gather_tokens(part) for part in output)
        tokens = self._seq.counts[self.ring.rank]
        if not isinstance(output, Tensor) or output.dim() < 2 or output.shape[1] != tokens:
            raise UnsupportedError(
                "next to logits, the model returns a "
                f"{tuple(output.shape) if isinstance(output, Tensor) else type(output).__name__}, which does not have "
                f"this rank's {tokens} tokens; name it in ignore_keys, or leave it out"
            )
        return self._seq.gather(output, dim=1)

    def _gather_parts(self, outputs: Any) -> Any:
        """Gather the logits of an encoder-decoder, and the last states of its encoder if Trainer returns them."""
        if self._seq is None or not isinstance(outputs, tuple):
            return self._gather_tokens(outputs)
        logits, *others = outputs
        if len(others) != 1:
            raise UnsupportedError(
                f"next to logits, the model returns {len(others)} outputs instead of the encoder's last states; name "
                "the others in ignore_keys"
            )
        states, encoder = others[0], self._seq.encoder
        return self._gather_tokens(logits), states if encoder is None else encoder.gather(states)

    def _gather_texts(self, loader: Any, rows: Tensor) -> Tensor:
        """Gather rows, (texts of a batch, ...), from one rank of every ring, without repeated texts."""
        accelerator: Any = self.accelerator  # type: ignore[attr-defined]
        state, (rings, _) = accelerator.gradient_state, self._rings()
        rows = torch.atleast_1d(rows)
        parts = [rows]  # whole on every rank of a ring
        if rings > 1:
            # Processes are ordered by ring, then by rank in the ring. All ranks of a ring have the same texts, so keep
            # those of the first rank. Rings may have batches of different sizes.
            sizes = accelerator.gather(torch.tensor([len(rows)], device=rows.device))[:: self.ring.world_size]
            rows = accelerator.gather(accelerator.pad_across_processes(rows, dim=0).contiguous())
            padded = rows.unflatten(0, (rings, self.ring.world_size, -1))[:, 0]
            new = last_turn(loader, rings) if state.end_of_dataloader else rings
            parts = [part[:size] for part, size in zip(padded, sizes.tolist(), strict=True)][:new]
        # Trainer repeats each loss `per_device_eval_batch_size` times, and accelerate shortens the last entries like
        # this in one process. It knows the batch size of the loader, which may be another.
        if state.end_of_dataloader and state.remainder > 0:
            parts[-1] = parts[-1][: state.remainder]
        return torch.cat(parts)

    def _prepare_context_parallel_inputs(
        self, model: Any, inputs: Mapping[str, Any]
    ) -> tuple[Callable[[], Any], dict[str, Any]]:
        """Return the context of a step and its inputs. Trainer calls this method for every batch.

        The inputs are this rank's shard, or the whole batch if the loss is a function of the user.
        """
        # Trainer may pass the model wrapped by DDP, FSDP or a compiler.
        prepared = next((part for part in model.modules() if part in prepared_models), None)
        if prepared is None:
            host: Any = self
            raise InputError(
                f"{type(host.accelerator.unwrap_model(model)).__name__} is not the model that the Trainer was created "
                "with, and would attend to this rank's tokens only; call ringattn.adapters.transformers.prepare(model)"
            )
        if not is_wrapped(prepared):
            prepare(prepared)  # again: Trainer applies Liger's kernels when training begins
        # One seed per step: the batches of a step count on from it, and a resumed run continues with the same seeds.
        # The index of the ring is part of it: rings have different texts, and the ranks of a ring need the same seed.
        host = self
        seed = seed_from(host.args.seed, self._rings()[1], host.state.global_step)
        if has_custom_loss(host):
            refuse_custom_loss(host)
            # Outputs are whole already, so `_gather_tokens` has nothing to gather.
            self._seq = None
            whole: Any = copy(inputs)
            return partial(self._whole_step, model, prepared, seed), whole
        self._seq, shards = shard_batch(self.ring, inputs, self.layout, model=prepared)
        if "shift_labels" in shards and (host.model_accepts_loss_kwargs or takes_means(host)):
            # Every rank divides its part of the sum by the labels per rank, see `_get_num_items_in_batch`. If Trainer
            # has counted labels, it replaces this number.
            labels = inputs["labels"][:, 1:] if inputs.get("shift_labels") is None else inputs["shift_labels"]
            shards["num_items_in_batch"] = labels_per_rank((labels != -100).sum(), self.ring.world_size, prepared)
        return partial(self._sharded_step, self._seq, seed), shards

    @contextmanager
    def _sharded_step(self, seq: Sequence, seed: int) -> Iterator[None]:
        """Return a context in which every rank computes its part of the loss from its tokens."""
        host: Any = self
        # A mean over labels, and a router loss, are not divided by Trainer's count of labels, so they get the factor
        # that this count has: gradients are averaged over the ranks, and Trainer multiplies the loss by their number
        # only in this case. SFTTrainer adds its router loss after the multiplication.
        is_multiplied = (
            host.args.average_tokens_across_devices and host.model_accepts_loss_kwargs and not host.loss_of_shards
        )
        with scaled_means(1 if is_multiplied else self.ring.world_size), self.ring.activate(seq, dropout_seed=seed):
            yield

    def _called_models(self, model: Any, prepared: Any) -> list[tuple[list[Any], Any]]:
        """Return the models that a custom loss may call: the modules that it calls, and the prepared model in them."""
        return [([model], prepared)]

    @contextmanager
    def _whole_step(self, model: Any, prepared: Any, seed: int) -> Iterator[None]:
        """Return a context in which every rank computes the loss from the whole batch and whole outputs."""
        self._computes_whole_loss = True
        state = self.accelerator.state  # type: ignore[attr-defined]
        processes = state.num_processes
        if not scales_by_tp_size():  # Trainer multiplies its loss by the number of processes; a ring counts as one
            state.num_processes = processes // self.ring.world_size
        try:
            with ExitStack() as stack:
                for outers, part in self._called_models(model, prepared):
                    stack.enter_context(
                        whole_calls(self.ring, outers, part, self.layout, seed, lambda: self._is_in_loss)
                    )
                yield
        finally:
            self._computes_whole_loss, state.num_processes = False, processes


def labels_per_rank(labels: Tensor | int, ranks: int, model: Any) -> Tensor | float:
    """Return the number of labels divided by the ranks, in float64 for a float64 model and otherwise in float32.

    A loss is divided by it. torch would divide an integer in its default dtype; float64 would be the dtype of the loss.
    """
    if isinstance(labels, Tensor):
        labels = labels.to(torch.promote_types(torch.float32, base_of(model).dtype))
    return labels / ranks


def ring_of_arguments(arguments: Iterable[Any], cp_size: int | None = None) -> Ring:
    """Return this rank's ring of `cp_size` processes, or of all, for a Trainer with these arguments of `__init__`."""
    from transformers import TrainingArguments

    options = next((argument for argument in arguments if isinstance(argument, TrainingArguments)), None)
    # Reading the device initialises the process group, as the arguments say.
    device = PartialState().device if options is None else options.device
    return ring_of_ranks(cp_size, device.type)


def takes_shards(kind: type[Any]) -> bool:
    """Return whether prediction_step of a Trainer computes the loss of the inputs that it gets, so they must be shards.

    Trainer's own step calls the sharding method from transformers 5.16 on. A step of the user that calls
    `local_attention` expects whole inputs.

    Args:
        kind: A class with `RingTrainerMixin`. The steps after the mixin are examined.
    """
    classes = kind.__mro__
    for base in classes[classes.index(RingTrainerMixin) + 1 :]:
        if "prediction_step" not in vars(base):
            continue
        names = set(inspect.unwrap(vars(base)["prediction_step"]).__code__.co_names)
        if "prediction_step" not in names:  # otherwise it calls that of its base class
            return "compute_loss" in names and not names & {"_prepare_context_parallel_inputs", "local_attention"}
    return False


class ShardLoss:
    """A loss for a rank's logits and shifted labels, divided by the number of labels on all ranks.

    It wraps another loss, which is called unchanged for whole outputs.
    """

    def __init__(self, loss: Any) -> None:
        self.loss = loss

    def __call__(self, outputs: Any, labels: Any, shift_labels: bool = False, num_items_in_batch: Any = None) -> Any:
        if isinstance(outputs, WholeOutput):
            return self.loss(outputs, labels, shift_labels=shift_labels, num_items_in_batch=num_items_in_batch)
        # Trainer sets shift_labels for causal models. Labels of a shard are shifted already, so the flag is dropped.
        if num_items_in_batch is None:
            raise UnsupportedError(
                "num_items_in_batch is missing: a rank needs the number of all labels for its part of the mean; pass it"
            )
        return self.loss(outputs, labels, num_items_in_batch=num_items_in_batch)


def check_trainer(kind: type[Any]) -> None:
    """Refuse a Trainer class that does not shard batches and compute its loss where the mixin expects it.

    Args:
        kind: The class, which inherits from `RingTrainerMixin` and then from transformers' Trainer.

    Raises:
        UnsupportedError: The class does not inherit like this, the installed Trainer differs where the mixin relies on
            it, it is a trainer of TRL whose loss needs whole texts, or it is a RingSFTTrainer that overrides
            compute_loss.
    """
    import transformers

    if not issubclass(kind, transformers.Trainer):
        raise UnsupportedError(f"{kind.__name__} must inherit from RingTrainerMixin and then from transformers.Trainer")
    HOST.require()
    if kind.supported_trl and not scales_by_tp_size():
        raise UnsupportedError(
            f"{kind.__name__} was compared with one process for transformers 5.19 and later, and "
            f"{transformers.__version__} is installed; install a later version"
        )
    losses = [base for base in kind.__mro__ if "compute_loss" in vars(base)]
    if not kind.loss_of_shards:
        refuse_trl(kind)
    # The mixin's compute_loss calls that of TRL: no other class may come before or between them.
    elif "loss_of_shards" not in vars(losses[0]) or losses[1].__module__.split(".")[0] != "trl":
        raise UnsupportedError(
            f"{kind.__name__} overrides compute_loss of RingSFTTrainer, which gets shifted labels and only this rank's "
            "logits; leave it out, or override compute_loss in a class with RingTrainerMixin and transformers.Trainer"
        )
