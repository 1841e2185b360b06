"""NeMo Automodel: a ring behind the hook that NeMo uses for MagiAttention and TransformerEngine.

NeMo calls a model's `prepare_model_inputs_for_cp` to get a `ContextParallelSharder`. The sharder shards each batch and
returns the context of the forward and backward pass. `prepare` adds this method to the model; see
docs/embedding-nemo.md.

Guarantees: NeMo's labels, which are already shifted, are sharded but not shifted again. A batch with unknown inputs
raises on every rank of `cp`. NeMo's hooks for context parallelism, which remove masks, are removed.
Not covered: the loss, which NeMo divides by the labels of the whole batch and sums over `cp`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import DeviceMesh

from ringattn.adapters import transformers
from ringattn.adapters.dropout import default_seed
from ringattn.adapters.groups import ring_of
from ringattn.adapters.host_versions import Host
from ringattn.adapters.transformers import shard_batch
from ringattn.errors import InputError, UnsupportedError
from ringattn.ring import Ring
from ringattn.sequence import Sequence

__all__ = ["prepare"]

_CP = "nemo_automodel.components.distributed.context_parallel"
HOST = Host(
    "nemo-automodel",
    ("0.7",),
    parameters={
        f"{_CP}:ContextParallelSharder": ("shard_batch", "local_token_global_indices"),
        f"{_CP}.sharder:ShardLayout": ("original_seq_len", "padded_seq_len"),
    },
)
_MASKS, _COMPILED = "attach_context_parallel_hooks", "attach_cp_sdpa_hooks"


def prepare(model: Any, device_mesh: DeviceMesh | Ring) -> Any:
    """Make a transformers model from NeMo Automodel attend through a ring over the mesh's `cp`.

    Call it on every rank after `NeMoAutoModelForCausalLM.from_pretrained`, or after a recipe's `setup`. The recipe then
    shards batches by its `ContextParallelSharder`. If `cp` has one rank, the model attends locally.

    Args:
        model: The model; it is changed in place.
        device_mesh: NeMo's mesh, with a dimension `cp`; or an open ring.

    Returns:
        The model.

    Raises:
        UnsupportedError: NeMo or transformers differ where the adapter relies on them, the model shards batches
            itself, or its layers are compiled. Also what `ringattn.adapters.transformers.prepare` raises.

    Example:
        recipe.setup()
        prepare(recipe.model_parts[0], recipe.device_mesh)
        recipe.run_train_validation_loop()
    """
    HOST.require()
    if getattr(getattr(model, "prepare_model_inputs_for_cp", prepare), "__module__", None) != __name__:
        raise UnsupportedError(
            f"{type(model).__name__} is a custom model of NeMo and shards its batches itself "
            "(prepare_model_inputs_for_cp); a ring needs a transformers model: from_pretrained(force_hf=True)"
        )
    _remove_mask_hooks(model)
    prepared = transformers.prepare(model)

    def prepare_model_inputs_for_cp(batch: Mapping[str, Any], *, num_chunks: int = 1) -> dict[str, Any]:
        if num_chunks != 1:
            raise UnsupportedError(f"num_chunks={num_chunks}: a ring does not support chunks for pipeline stages")
        return {"cp_sharder": _BatchSharder(device_mesh, model).sharder()}

    # NeMo finds the method by name on the model, as it does for its custom models.
    prepared.prepare_model_inputs_for_cp = prepare_model_inputs_for_cp
    return prepared


class _BatchSharder:
    """The sharder of the batch of one step. NeMo requests a new one at each step."""

    def __init__(self, mesh: DeviceMesh | Ring, model: nn.Module) -> None:
        self._mesh, self._model = mesh, model
        self._seq: Sequence | None = None

    def sharder(self) -> Any:
        """Return NeMo's `ContextParallelSharder` with the methods `shard_batch` and `indices`."""
        from nemo_automodel.components.distributed.context_parallel import ContextParallelSharder

        return ContextParallelSharder(shard_batch=self.shard_batch, local_token_global_indices=self.indices)

    def shard_batch(
        self,
        cp_mesh: Any,
        tp_mesh: Any,
        batch: dict[str, Any],
        *,
        loss_mask: Tensor | None = None,
        padding_token_id: int = 0,
    ) -> tuple[Callable[[], AbstractContextManager[Any]], dict[str, Any], Any]:
        """Return the context of the pass, this rank's batch, and the lengths that NeMo needs to gather tokens later."""
        from nemo_automodel.components.distributed.context_parallel.sharder import ShardLayout

        ring = ring_of(self._mesh)
        with ring.refused_by_all():
            if loss_mask is not None:
                raise InputError("loss_mask is not supported over a ring; set labels to -100 instead")
            if "labels" not in batch:
                raise InputError("the batch has no labels; NeMo's recipes provide shifted labels")
        inputs = {name: value for name, value in batch.items() if name != "labels" and value is not None}
        # In NeMo, a label is already at the token that predicts it.
        seq, shards = shard_batch(ring, inputs | {"shift_labels": batch["labels"]}, model=self._model)
        del shards["shift_labels"]  # equal to labels, which NeMo removes before it calls the model
        self._seq, seed = seq, default_seed(ring)
        # The ring pads nothing, so both lengths are equal. NeMo uses them to gather tokens.
        layout = ShardLayout(original_seq_len=seq.length, padded_seq_len=seq.length)
        return lambda: ring.activate(seq, dropout_seed=seed), shards, layout

    def indices(self, cp_mesh: Any, padded_seq_len: int, device: torch.device | None = None) -> Tensor:
        """Return the positions of this rank's tokens in the whole sequence."""
        seq = self._seq
        if seq is None or padded_seq_len != seq.length:
            reason = "no batch was sharded yet" if seq is None else f"the sequence has {seq.length}"
            raise InputError(
                f"NeMo gathers a sequence of {padded_seq_len} tokens, but {reason}; to gather, lengths must divide by "
                "the ranks of cp"
            )
        return seq.positions().to(device)


def _remove_mask_hooks(model: nn.Module) -> None:
    """Remove the hooks by which NeMo drops masks under context parallelism. A ring needs the masks for documents.

    Raises `UnsupportedError` for compiled layers, and for the hooks that NeMo adds for them.
    """
    for module in model.modules():
        hooks = module._forward_pre_hooks
        # The hooks are closures: the first part of the qualified name is the function of NeMo that made them.
        makers = [getattr(hook, "__qualname__", "").split(".")[0] for hook in hooks.values()]
        if _COMPILED in makers or module._compiled_call_impl is not None:
            raise UnsupportedError("enable_compile: compiled layers of NeMo are not supported; set it to false")
        for handle, maker in zip(list(hooks), makers, strict=True):
            if maker == _MASKS:
                del hooks[handle]
                module._forward_pre_hooks_with_kwargs.pop(handle, None)
