"""TRL's SFTTrainer over the ranks of a ring.

    trainer = RingSFTTrainer(model=model, args=SFTConfig(packing=True, ...), train_dataset=texts, ring=ringattn.Ring())
    trainer.train()

Guarantees: loss, gradients and TRL's metrics (entropy, mean_token_accuracy, num_tokens) equal those of one process.
This holds for every packing strategy, for loss on completions or assistant turns only, with `peft_config`, with label
smoothing, and for the losses nll and dft.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from trl import SFTTrainer

from ringattn.adapters.host_versions import Host
from ringattn.adapters.transformers.checks import base_of, declare_outputs
from ringattn.adapters.transformers.memory import refuse_logits
from ringattn.adapters.transformers.trainer import RingTrainerMixin, last_turn
from ringattn.core.layout import LayoutName
from ringattn.errors import UnsupportedError
from ringattn.ring import Ring

__all__ = ["RingSFTMixin", "RingSFTTrainer"]

HOST = Host(
    "trl",
    ("1.16",),
    sources={
        "trl:SFTTrainer.compute_loss": ("3a509764",),
        "trl:SFTTrainer.prediction_step": ("900fe140",),
    },
)


class RingSFTMixin(RingTrainerMixin):
    """Mixin before TRL's SFTTrainer: `RingTrainerMixin`, with the counts and metrics of SFTTrainer."""

    shards_evaluation = False  # SFTTrainer's prediction_step does not call the sharding method of Trainer
    loss_of_shards = True

    def begin_ring(self, ring: Ring, layout: LayoutName | str = "auto") -> None:
        """Set the ring, as `RingTrainerMixin.begin_ring`.

        Args:
            ring: The ring.
            layout: As in `Ring.sequence`.

        Raises:
            UnsupportedError: The Trainer class or the installed TRL is not supported.
        """
        HOST.require()
        super().begin_ring(ring, layout)

    def _check_options(self) -> None:
        super()._check_options()
        host: Any = self
        if host._is_vlm:
            raise UnsupportedError("SFTTrainer of a model with images: a rank has only a part of their tokens; train "
                                   "on text only, with the tokenizer as processing_class")  # fmt: skip
        # SFTTrainer sets `aux_loss_enabled` from these two after Trainer's `__init__`, when this may already run.
        text = base_of(host.model).config.get_text_config()
        if getattr(text, "output_router_logits", None) is not None and host.args.router_aux_loss_coef != 0.0:
            raise UnsupportedError(
                "router_aux_loss_coef: the router loss is computed from whole texts, but a rank has a part; set it to "
                "0.0"
            )
        refuse_logits(base_of(host.model), "SFTTrainer, which computes metrics from them,")
        declare_outputs(base_of(host.model), "loss", "log_probs", "entropy")

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
        if num_items_in_batch is None:
            if training:
                raise UnsupportedError(
                    f"{type(host.model).__name__} takes no num_items_in_batch, so the labels of all ranks are not "
                    "counted; train another model"
                )
            # In evaluation, Trainer passes no count. The count is divided by the ranks, because the losses of ranks are
            # averaged later.
            num_items_in_batch = self._summed((inputs["shift_labels"] != -100).sum()) / self.ring.world_size
        # The count is among the inputs too, because a fused head computes the loss inside the model, and that loss has
        # to be this rank's part.
        inputs = {**inputs, "num_items_in_batch": num_items_in_batch}
        with self._counting(host.accelerator.gather if training else self._summed):
            result = super().compute_loss(  # type: ignore[misc]
                model, inputs, return_outputs, num_items_in_batch
            )
        if not training:
            self._share(host._metrics["eval"])
        return result

    @contextmanager
    def _counting(self, gather: Callable[[Tensor], Tensor]) -> Iterator[None]:
        """Return a context in which SFTTrainer sums its counts with `gather`.

        accelerate's gather_for_metrics would take each count for one entry per text, and drop some in a last batch.
        """
        accelerator = self.accelerator  # type: ignore[attr-defined]
        accelerator.gather_for_metrics = gather  # an instance attribute hides the method, and is deleted afterwards
        try:
            yield
        finally:
            del accelerator.gather_for_metrics

    def _summed(self, count: Tensor) -> Tensor:
        """Sum a count over the ranks of the ring."""
        count = count.detach().clone()
        self.ring.all_reduce([count])
        return count

    def _share(self, metrics: dict[str, list[float]]) -> None:
        """Collect the metrics of all rings on every rank. Rings evaluate different batches, and each counts once."""
        rings, _ = self._rings()
        if rings == 1:
            return
        host: Any = self
        ended = host.accelerator.gradient_state.end_of_dataloader
        # In the last round, some rings repeat a batch of others: only the first `real` rings have a new one.
        real = last_turn(host.callback_handler.eval_dataloader, rings) if ended else rings
        for name, values in metrics.items():
            if name != "num_tokens":
                local = torch.tensor([values.pop()], dtype=torch.float64, device=host.accelerator.device)
                by_ring = host.accelerator.gather(local).unflatten(0, (rings, -1))[:real, 0]
                values.extend(by_ring.tolist())


class RingSFTTrainer(RingSFTMixin, SFTTrainer):
    """TRL's SFTTrainer with every batch sharded over `ring`.

    The ranks of a ring get the same batches; different rings get different batches.

    Args:
        args: Arguments of TRL's SFTTrainer.
        ring: The ring. Its ranks are consecutive processes.
        layout: As in `Ring.sequence`.
        kwargs: Arguments of TRL's SFTTrainer, including `peft_config`.

    Raises:
        UnsupportedError: What `RingTrainerMixin` refuses; images; a router loss; a TRL other than 1.16.

    Example:
        RingSFTTrainer(model=model, args=SFTConfig(packing=True), train_dataset=texts, ring=ringattn.Ring()).train()
    """
