"""The Trainer of transformers over the ranks of a ring.

`RingTrainerMixin` overrides one private method of Trainer, the one that shards batches for context parallelism, and
refuses a Trainer that has it in another form.
Guarantees: the loss and gradients of one process, also in evaluation; labels are counted whole.
Checked with transformers 5.20 to 5.23 and accelerate 1.15.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

from torch import Tensor
from torch.utils.data import BatchSampler, IterableDataset

from ringattn.adapters.transformers import prepare, prepared_models
from ringattn.adapters.transformers_batches import shard_batch
from ringattn.core.layout import LayoutName
from ringattn.errors import InputError, UnsupportedError
from ringattn.ring import Ring

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
        UnsupportedError: The Trainer is of another form; something makes a loss or metrics of logits, since no rank has
            all of them; ranks of a ring would not read the data alike; the model cannot be prepared.

    Example:
        class RingTrainer(RingTrainerMixin, Trainer):
            pass

        RingTrainer(model=model, args=args, train_dataset=texts, ring=ringattn.Ring()).train()
    """

    def __init__(self, *args: Any, ring: Ring, layout: LayoutName | str = "auto", **kwargs: Any) -> None:
        check_trainer(type(self))
        self.ring, self.layout = ring, layout
        super().__init__(*args, **kwargs)
        host: Any = self
        _refuse_logits(host)
        _refuse_loaders(host)
        for data in (host.train_dataset, host.eval_dataset):
            self._refuse_data(data)
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
        return None if found is None else found / self.ring.world_size

    def get_train_dataloader(self) -> Any:
        """Trainer's own, which all ranks of a ring read alike.

        Returns:
            The loader, as accelerate prepared it.

        Raises:
            UnsupportedError: The data is a stream of which accelerate would give each process its own part.
        """
        self._refuse_data(self.train_dataset)  # type: ignore[attr-defined]
        loader = super().get_train_dataloader()  # type: ignore[misc]
        rings, mine = self._rings()
        for shard in _shards(loader):
            shard.num_processes, shard.process_index = rings, mine
            if rings == 1:  # the last batch of an epoch stays as small as it is in one process
                shard.even_batches = False
                if _is_stream(shard):
                    shard.batch_size = 1
        return loader

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
        self._refuse_data(host.eval_dataset[data] if isinstance(data, str) else data)
        loader = super().get_eval_dataloader(eval_dataset)  # type: ignore[misc]
        rings, mine = self._rings()
        for shard in _shards(loader):
            shard.num_processes, shard.process_index = 1, 0
            if _is_stream(shard):
                if rings > 1:
                    raise UnsupportedError(
                        "an IterableDataset cannot be evaluated over several rings, which cannot tell how many of its "
                        "texts are left for each; give evaluate a data set with a length"
                    )
                shard.batch_size = 1
            elif not isinstance(shard.batch_sampler, _RoundRobin):  # a loader with persistent workers comes again
                shard.even_batches, shard.batch_sampler = False, _RoundRobin(shard.batch_sampler, rings, mine)
        return loader

    def evaluation_loop(self, dataloader: Any, *args: Any, **kwargs: Any) -> Any:
        """Trainer's own, in which each text's loss counts once, on however many ranks.

        Args:
            dataloader: What `get_eval_dataloader` gave.
            args: Those of transformers' Trainer.
            kwargs: Those of transformers' Trainer.

        Returns:
            What Trainer returns: an EvalLoopOutput.

        Raises:
            UnsupportedError: More than the loss is asked for.
        """
        self.gather_function = partial(self._gather_losses, dataloader)
        return super().evaluation_loop(dataloader, *args, **kwargs)  # type: ignore[misc]

    def prediction_step(
        self, model: Any, inputs: Mapping[str, Any], prediction_loss_only: bool, ignore_keys: list[str] | None = None
    ) -> tuple[Tensor | None, None, None]:
        """The loss of one batch, the mean over its labels, the same on every rank of the ring.

        Args:
            model: The model.
            inputs: The whole batch, by name.
            prediction_loss_only: True.
            ignore_keys: As in Trainer.

        Returns:
            The loss, or None without labels; None for logits and None for labels.

        Raises:
            UnsupportedError: `prediction_loss_only` is False.
            InputError: The batch cannot be sharded, see `shard_batch`.
        """
        if not prediction_loss_only:
            raise UnsupportedError("no rank has the logits of whole texts; ask for the loss only, as evaluate does")
        args = self.args  # type: ignore[attr-defined]
        across = args.average_tokens_across_devices
        args.average_tokens_across_devices = False  # other rings have other batches, whose labels do not count here
        try:
            loss, _, _ = super().prediction_step(model, inputs, True, ignore_keys)  # type: ignore[misc]
        finally:
            args.average_tokens_across_devices = across
        if loss is not None:
            loss = loss.clone()
            self.ring.all_reduce([loss])
            loss /= self.ring.world_size
        return loss, None, None

    def predict(self, *args: Any, **kwargs: Any) -> Any:
        """Refused: it gives the logits of whole texts, which no rank has.

        Args:
            args: Not read.
            kwargs: Not read.

        Returns:
            Nothing; it always raises.

        Raises:
            UnsupportedError: Always; call evaluate for the loss.
        """
        raise UnsupportedError(
            "predict gives the logits of whole texts, which no rank has; call evaluate for the loss, or predict with a "
            "plain Trainer in one process from the saved model"
        )

    def _rings(self) -> tuple[int, int]:
        """How many rings there are, and which this process belongs to."""
        args = self.args  # type: ignore[attr-defined]
        return max(1, args.world_size // self.ring.world_size), args.process_index // self.ring.world_size

    def _refuse_data(self, data: Any) -> None:
        """Raise `UnsupportedError` for a stream of which accelerate would give each process its own part."""
        host: Any = self
        if isinstance(data, dict):
            for one in data.values():
                self._refuse_data(one)
        if not _is_stream(data):
            return
        if (shards := getattr(data, "n_shards", 0)) >= host.args.world_size > 1:
            raise UnsupportedError(
                f"accelerate deals the {shards} shards of {type(data).__name__} to processes, also those of one ring; "
                "wrap it in a torch.utils.data.IterableDataset of your own, or pass a data set with a length"
            )
        if host.accelerator.dispatch_batches is not False:
            raise UnsupportedError(
                f"{type(data).__name__} is an IterableDataset, whose batches accelerate would cut among the ranks of a "
                'ring; pass TrainingArguments(accelerator_config={"dispatch_batches": False}), with which every rank '
                "reads it, or a data set with a length"
            )

    def _gather_losses(self, loader: Any, losses: Tensor) -> Tensor:
        """Losses (texts of a batch,) of every ring, (texts,): once for each ring, and none for texts read twice."""
        from transformers.trainer_utils import has_length

        host: Any = self
        rings, _ = self._rings()
        found: Tensor = host.accelerator.gather(losses)
        found = found.unflatten(0, (rings, -1, len(losses)))[:, 0].flatten(0, 1)
        if not has_length(loader.dataset):
            return found
        texts = len(loader.dataset)
        if host.args.dataloader_drop_last:
            texts -= texts % len(losses)
        rest = texts % len(found)
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
        seq, mine = shard_batch(self.ring, inputs, self.layout, model=prepared)
        return partial(self.ring.activate, seq), mine


class _RoundRobin(BatchSampler):
    """Batches given to rings in turn, as many to each: where the last turn ends early, the last batch is repeated."""

    def __init__(self, batches: Any, rings: int, mine: int) -> None:
        self.batches, self.rings, self.mine = batches, rings, mine
        self.sampler, self.batch_size, self.drop_last = batches.sampler, batches.batch_size, batches.drop_last

    def __len__(self) -> int:
        return -(-len(self.batches) // self.rings)

    def __iter__(self) -> Iterator[list[int]]:
        count, batch = 0, []
        for batch in self.batches:
            if count % self.rings == self.mine:
                yield batch
            count += 1
        if 0 < count % self.rings <= self.mine:
            yield batch


def _shards(loader: Any) -> list[Any]:
    """What of accelerate's loader cuts the data into parts of processes."""
    parts = (getattr(loader, "batch_sampler", None), getattr(loader, "dataset", None))
    return [part for part in parts if hasattr(part, "num_processes") and hasattr(part, "process_index")]


def _is_stream(data: Any) -> bool:
    return isinstance(data, IterableDataset)


def _refuse_logits(host: Any) -> None:
    """Raise `UnsupportedError` for a Trainer that makes something of logits."""
    if host.compute_metrics is not None:
        raise UnsupportedError("compute_metrics needs logits of whole texts, which no rank has; leave it out")
    shifts = "would shift labels that are shifted already, and needs labels whose neighbors this rank has not"
    if host.args.label_smoothing_factor != 0:
        raise UnsupportedError(f"label_smoothing_factor {shifts}; leave it at 0")
    if host.compute_loss_func is not None:
        raise UnsupportedError(
            f"compute_loss_func {shifts}; leave it out, or write the loop with shard_batch and make the loss of "
            "shift_labels"
        )


def _refuse_loaders(host: Any) -> None:
    """Raise `UnsupportedError` for loaders that give each process, also of one ring, its own texts."""
    for name in ("dispatch_batches", "split_batches"):
        if getattr(host.accelerator, name):
            raise UnsupportedError(f"{name} would cut batches among the ranks of a ring; leave it at False")
    if host.args.train_sampling_strategy == "batch_rebalance":
        raise UnsupportedError(
            "train_sampling_strategy='batch_rebalance' deals texts to processes, also those of one ring; take "
            "'group_by_length'"
        )


def check_trainer(kind: type[Any]) -> None:
    """Refuse a Trainer that does not shard its batches and make its loss where the mixin expects it.

    Args:
        kind: The class, which inherits from `RingTrainerMixin` and then from transformers' Trainer.

    Raises:
        UnsupportedError: It is no such class, its transformers shards batches in another way, or it overrides
            compute_loss.
    """
    import transformers

    method = getattr(transformers.Trainer, "_prepare_context_parallel_inputs", None)
    if not issubclass(kind, transformers.Trainer):
        raise UnsupportedError(f"{kind.__name__} must inherit from RingTrainerMixin and then from transformers.Trainer")
    is_known = method is not None and list(inspect.signature(method).parameters) == ["self", "model", "inputs"]
    if not is_known or not hasattr(transformers.Trainer, "get_cp_size"):
        raise UnsupportedError(
            f"the Trainer of transformers {transformers.__version__} shards batches in another way than those of 5.20 "
            "to 5.23, which this was checked with; write the loop with shard_batch, or take one of those versions"
        )
    if kind.compute_loss is not transformers.Trainer.compute_loss:
        raise UnsupportedError(
            f"{kind.__name__} overrides compute_loss, which gets labels that are shifted already and logits of this "
            "rank alone; leave it out, or write the loop with shard_batch and make the loss of shift_labels"
        )
