"""TRL's SFTTrainer over the ranks of a ring.

    trainer = RingSFTTrainer(model=model, args=SFTConfig(packing=True, ...), train_dataset=texts, ring=ringattn.Ring())
    trainer.train()

Guarantees: loss, gradients and TRL's own metrics (entropy, mean_token_accuracy, num_tokens) of one process, with every
packing strategy, completions or assistants alone, `peft_config`, smoothed labels, and the losses nll and dft.
Checked with TRL 1.16, PEFT 0.21 and transformers 5.23.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from trl import SFTTrainer

from ringattn.adapters.hosts import require_checked
from ringattn.adapters.transformers.checks import base_of, know_outputs
from ringattn.adapters.transformers.memory import refuse_logits
from ringattn.adapters.transformers.trainer import RingTrainerMixin, last_turn
from ringattn.errors import UnsupportedError

__all__ = ["RingSFTTrainer"]


class RingSFTTrainer(RingTrainerMixin, SFTTrainer):
    """TRL's SFTTrainer, every batch of which lies over `ring`.

    Ranks of one ring get the same batches, rings other ones.

    Args:
        args: Those of TRL's SFTTrainer.
        ring: The ring. Its ranks follow each other in the order of processes.
        layout: As in `Ring.sequence`.
        kwargs: Those of TRL's SFTTrainer, `peft_config` among them.

    Raises:
        UnsupportedError: What `RingTrainerMixin` refuses; images; a loss of routers; a TRL other than 1.16.

    Example:
        RingSFTTrainer(model=model, args=SFTConfig(packing=True), train_dataset=texts, ring=ringattn.Ring()).train()
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        require_checked("trl", "1.16")
        super().__init__(*args, **kwargs)
        host: Any = self
        if host._is_vlm:
            raise UnsupportedError("SFTTrainer of a model that sees images: a rank has a part of their tokens; train "
                                   "on text alone, with the tokenizer as processing_class")  # fmt: skip
        if host.aux_loss_enabled:
            raise UnsupportedError(
                "router_aux_loss_coef: the loss of routers is made of whole texts, of which a rank has a part; set it "
                "to 0.0"
            )
        refuse_logits(base_of(host.model), "SFTTrainer, whose metrics are made of them,")
        know_outputs(base_of(host.model), "loss", "log_probs", "entropy")

    def compute_loss(
        self, model: Any, inputs: dict[str, Any], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """SFTTrainer's own, whose counts are those of whole batches.

        Args:
            model: The model.
            inputs: This rank's tokens.
            return_outputs: Whether the model's outputs are returned too.
            num_items_in_batch: The labels of all ranks.

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
                    f"{type(host.model).__name__} takes no num_items_in_batch, so that the labels of all ranks are not "
                    "counted; train another model"
                )
            num_items_in_batch = self._summed((inputs["shift_labels"] != -100).sum()) / self.ring.world_size
        # the fused head makes a loss of its own too, which has to be this rank's part
        inputs = {**inputs, "num_items_in_batch": num_items_in_batch}
        with self._counting(host.accelerator.gather if training else self._summed):
            found = super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        if not training:
            self._share(host._metrics["eval"])
        return found

    @contextmanager
    def _counting(self, gather: Callable[[Tensor], Tensor]) -> Iterator[None]:
        """Inside, SFTTrainer adds up its counts by `gather`.

        accelerate's gather_for_metrics takes them for one entry a text, and drops some of a last batch.
        """
        accelerator: Any = self.accelerator
        accelerator.gather_for_metrics = gather
        try:
            yield
        finally:
            del accelerator.gather_for_metrics

    def _summed(self, count: Tensor) -> Tensor:
        """A count of this rank's tokens, of those of the ring."""
        count = count.detach().clone()
        self.ring.all_reduce([count])
        return count

    def _share(self, metrics: dict[str, list[float]]) -> None:
        """Rings evaluate other batches: the metrics of each are listed once on all."""
        rings, _ = self._rings()
        if rings == 1:
            return
        host: Any = self
        ended = host.accelerator.gradient_state.end_of_dataloader
        real = last_turn(host.callback_handler.eval_dataloader, rings) if ended else rings
        for name, values in metrics.items():
            if name != "num_tokens":
                own = torch.tensor([values.pop()], dtype=torch.float64, device=host.accelerator.device)
                found = host.accelerator.gather(own).unflatten(0, (rings, -1))[:real, 0]
                values.extend(found.tolist())


RingSFTTrainer.shards_evaluation = False  # SFTTrainer evaluates without Trainer's way to shard
RingSFTTrainer.ring_compute_loss = RingSFTTrainer.compute_loss
