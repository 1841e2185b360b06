"""NeMo Automodel: a ring in the place where it plugs MagiAttention and TransformerEngine into transformers models.

NeMo asks a model's `prepare_model_inputs_for_cp` for a `ContextParallelSharder`, which shards each batch and gives the
context of the forward and backward pass; `prepare` gives the model one, see docs/embedding-nemo.md.
Guarantees: NeMo's labels, which are shifted already, are sharded and not shifted again; a batch whose inputs are not
known raises on every rank of `cp`; NeMo's own hooks for context parallelism, which take masks away, are gone.
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
from ringattn.adapters.dropout import told_seed
from ringattn.adapters.groups import ring_of
from ringattn.adapters.hosts import require_checked
from ringattn.adapters.transformers import shard_batch
from ringattn.errors import InputError, UnsupportedError
from ringattn.ring import Ring
from ringattn.sequence import Sequence

__all__ = ["prepare"]

CHECKED = ("0.7",)
_MASKS, _COMPILED = "attach_context_parallel_hooks", "attach_cp_sdpa_hooks"


def prepare(model: Any, device_mesh: DeviceMesh | Ring) -> Any:
    """Lets a transformers model that NeMo Automodel made attend through a ring of the mesh's `cp`.

    To be called after `NeMoAutoModelForCausalLM.from_pretrained`, or after a recipe's `setup`, on every rank. Batches
    are then sharded by the recipe's own `ContextParallelSharder`. With one rank of `cp` the model attends locally.

    Args:
        model: The model; it is changed in place.
        device_mesh: NeMo's, with a dimension `cp`; or an open ring.

    Returns:
        The model.

    Raises:
        UnsupportedError: NeMo or transformers is of a version that was not checked, the model has a way of its own to
            shard batches, or its layers are compiled; or what `ringattn.adapters.transformers.prepare` raises.

    Example:
        recipe.setup()
        prepare(recipe.model_parts[0], recipe.device_mesh)
        recipe.run_train_validation_loop()
    """
    require_checked("nemo-automodel", *CHECKED)
    if getattr(getattr(model, "prepare_model_inputs_for_cp", prepare), "__module__", None) != __name__:
        raise UnsupportedError(
            f"{type(model).__name__} is one of NeMo's own models and shards its batches itself "
            "(prepare_model_inputs_for_cp); a ring takes models of transformers: from_pretrained(force_hf=True)"
        )
    _take_away_hooks(model)
    prepared = transformers.prepare(model)

    def prepare_model_inputs_for_cp(batch: Mapping[str, Any], *, num_chunks: int = 1) -> dict[str, Any]:
        if num_chunks != 1:
            raise UnsupportedError(f"num_chunks={num_chunks}: a ring's batch has no chunks of pipeline stages")
        return {"cp_sharder": _Shards(device_mesh, model).sharder()}

    prepared.prepare_model_inputs_for_cp = prepare_model_inputs_for_cp
    return prepared


class _Shards:
    """How the batch of one step lies over the ranks, in NeMo's words. NeMo asks for one a step."""

    def __init__(self, mesh: DeviceMesh | Ring, model: nn.Module) -> None:
        self._mesh, self._model = mesh, model
        self._seq: Sequence | None = None

    def sharder(self) -> Any:
        """NeMo's `ContextParallelSharder` of the two functions below."""
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
        """The context of the pass, this rank's batch, and what NeMo's functions for tokens ask for afterwards."""
        from nemo_automodel.components.distributed.context_parallel.sharder import ShardLayout

        ring = ring_of(self._mesh)
        with ring.refused_by_all():
            if loss_mask is not None:
                raise InputError("loss_mask: over a ring labels say what is learned; set labels to -100 instead")
            if "labels" not in batch:
                raise InputError("the batch has no labels; NeMo's recipes bring them, shifted")
        given = {name: value for name, value in batch.items() if name != "labels" and value is not None}
        # NeMo's labels stand at the token that predicts them already.
        seq, mine = shard_batch(ring, given | {"shift_labels": batch["labels"]}, model=self._model)
        del mine["shift_labels"]  # the same as labels, which NeMo takes out before it calls the model
        self._seq, seed = seq, told_seed(ring)
        layout = ShardLayout(original_seq_len=seq.length, padded_seq_len=seq.length)
        return lambda: ring.activate(seq, dropout_seed=seed), mine, layout

    def indices(self, cp_mesh: Any, padded_seq_len: int, device: torch.device | None = None) -> Tensor:
        """Positions of this rank's tokens in the whole sequence."""
        seq = self._seq
        if seq is None or padded_seq_len != seq.length:
            known = "no batch was sharded yet" if seq is None else f"the sequence has {seq.length}"
            raise InputError(
                f"NeMo asks for tokens of a sequence of {padded_seq_len} and {known}; to gather, lengths must divide "
                "by the ranks of cp"
            )
        return seq.positions().to(device)


def _take_away_hooks(model: nn.Module) -> None:
    """Remove the hooks by which NeMo takes masks away from attention over ranks: a ring's masks tell of documents.

    Raises `UnsupportedError` for layers that it compiled, and for the hooks that it needs then.
    """
    for module in model.modules():
        hooks = module._forward_pre_hooks
        made_by_all = [getattr(hook, "__qualname__", "").split(".")[0] for hook in hooks.values()]
        if _COMPILED in made_by_all or module._compiled_call_impl is not None:
            raise UnsupportedError("enable_compile: NeMo's compiled layers are not known here; set it to false")
        for handle, made_by in zip(list(hooks), made_by_all, strict=True):
            if made_by == _MASKS:
                del hooks[handle]
                module._forward_pre_hooks_with_kwargs.pop(handle, None)
