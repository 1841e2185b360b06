"""The Trainer of transformers over the ranks of a ring.

`RingTrainerMixin` overrides the private method of Trainer that shards batches for context parallelism, and refuses a
Trainer in which this method has another signature. Trainer's own loss is computed from each rank's tokens. A loss of
the user (`compute_loss`, `compute_loss_func`) gets the whole batch and whole outputs.

Guarantees: the loss and gradients of one process, also in evaluation. Labels are counted over the whole batch.
Checked with transformers 5.18 to 5.23, accelerate 1.15 and TRL 1.16.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_map_only
from torch.utils.data import BatchSampler, IterableDataset

from ringattn.adapters.dropout import seed_from
from ringattn.adapters.transformers import prepare, prepared_models
from ringattn.adapters.transformers.batches import WholeOutput, shard_batch, whole_calls
from ringattn.adapters.transformers.calls import stands_around
from ringattn.adapters.transformers.checks import base_of
from ringattn.adapters.transformers.memory import refuse_logits
from ringattn.core.layout import LayoutName
from ringattn.errors import InputError, UnsupportedError
from ringattn.ring import Ring
from ringattn.sequence import Sequence

# --- The mixin --------------------------------------------------------------------------------------------------------

__all__ = ["RingTrainerMixin", "check_trainer"]


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
            return tree_map_only(Tensor, Tensor.detach, found)
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


# --- Trainers and options that are refused ----------------------------------------------------------------------------

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
        if isinstance(outputs, WholeOutput):
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


# --- Loaders ----------------------------------------------------------------------------------------------------------
# How the loaders of accelerate deal batches to rings: all ranks of a ring read the same batches.


class RoundRobin(BatchSampler):
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


def is_stream(data: Any) -> bool:
    return isinstance(data, IterableDataset)


def shards_of(loader: Any) -> list[Any]:
    """What of accelerate's loader cuts the data into parts of processes."""
    parts = (getattr(loader, "batch_sampler", None), getattr(loader, "dataset", None))
    return [part for part in parts if hasattr(part, "num_processes") and hasattr(part, "process_index")]


def share_training(loader: Any, rings: int, mine: int) -> Any:
    """The loader, dealing to `rings` of which this process is in the one numbered `mine`."""
    for shard in shards_of(loader):
        shard.num_processes, shard.process_index = rings, mine
        if rings == 1:  # the last batch of an epoch stays as small as it is in one process
            shard.even_batches = False
            if is_stream(shard):
                shard.batch_size = 1
    return loader


def share_evaluation(loader: Any, rings: int, mine: int) -> Any:
    """The same for evaluation, which reads every text once, or at its end twice; of a stream with one ring."""
    for shard in shards_of(loader):
        shard.num_processes, shard.process_index = 1, 0
        if is_stream(shard):
            shard.batch_size = 1
        elif not isinstance(shard.batch_sampler, RoundRobin):  # a loader with persistent workers comes again
            shard.even_batches, shard.batch_sampler = False, RoundRobin(shard.batch_sampler, rings, mine)
    return loader


def last_turn(loader: Any, rings: int) -> int:
    """How many rings have a batch of their own in the last turn of an evaluation."""
    found = [shard.batch_sampler for shard in shards_of(loader) if not is_stream(shard)]
    return (len(found[0].batches) - 1) % rings + 1 if found else rings


def refuse_data(data: Any, host: Any, evaluated_by: int = 1) -> None:
    """Raise `UnsupportedError` for a stream of which accelerate would give each process its own part.

    `evaluated_by`: the rings that evaluate it, which a stream cannot be dealt to.
    """
    if isinstance(data, dict):
        for part in data.values():
            refuse_data(part, host, evaluated_by)
    if not is_stream(data):
        return
    if evaluated_by > 1:
        raise UnsupportedError(
            f"{type(data).__name__} is an IterableDataset and cannot be evaluated over several rings, which cannot "
            "tell how many of its texts are left for each; give evaluate a data set with a length"
        )
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
