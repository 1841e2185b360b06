"""Weights that ZeRO 3, FSDP1 or the tensor parallelism of transformers shards, for code that uses them directly.

Options for less memory do not call the projections of a module one by one, so what DeepSpeed and transformers add to
these calls has to happen elsewhere. They also need all weights as parameters.

Guarantees: sharding that is not known here is refused by name.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.distributed import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from ringattn.errors import UnsupportedError

# --- ZeRO 3 ----------------------------------------------------------------------------------------------------------


def gather_for(module: nn.Module, weights: Iterable[nn.Parameter]) -> None:
    """Let ZeRO 3 gather these weights of other modules for calls of `module`, if it shards them.

    `module` has to be part of the model when the engine is created.
    """
    for weight in weights:
        if hasattr(weight, "ds_id"):
            sys.modules["deepspeed"].zero.register_external_parameter(module, weight)


def refuse_partitioned(module: nn.Module, option: str) -> None:
    """Raise `UnsupportedError` if a weight of `module` is not gathered."""
    if any(weight.shape != getattr(weight, "ds_shape", weight.shape) for weight in module.parameters()):
        raise UnsupportedError(
            f"{option}: DeepSpeed's ZeRO 3 has not gathered the weights of {type(module).__name__}; call prepare() "
            "before the engine is created"
        )


def without_hooks(module: nn.Module, option: str) -> nn.Module:
    """Return a copy of `module`, with the same tensors, whose parts are called without the hooks of ZeRO 3.

    Raises `UnsupportedError` if a part has other hooks or a forward that was replaced, which would be ignored.
    """
    parts: dict[str, Any] = {}
    for name, part in module.named_children():
        if _has_hooks(part) or "forward" in vars(part):
            raise UnsupportedError(
                f"{option}: with DeepSpeed's ZeRO 3, a hook or a replaced forward of {name} would be ignored; remove it"
            )
        parts[name] = without_hooks(part, option) if list(part.children()) else part.forward
    view: nn.Module = object.__new__(type(module))
    vars(view).update({name: value for name, value in vars(module).items() if name != "forward"})
    vars(view)["_modules"] = {**module._modules, **parts}
    return view


# --- FSDP1 -----------------------------------------------------------------------------------------------------------


def refuse_hidden(module: nn.Module, option: str, frozen: bool = False) -> None:
    """Raise `UnsupportedError` if FSDP1 hides trained weights of `module`, or with `frozen`, any weights.

    With use_orig_params=False, weights are attributes of a module that are not parameters, so `parameters()` leaves
    them out. FSDP1 marks the modules, because other attributes may be tensors too, such as those of `weight_norm`.
    """
    for part in module.modules():
        if not getattr(part, "_is_fsdp_managed_module", False) or getattr(part, "_fsdp_use_orig_params", True):
            continue
        tensors = [value for value in vars(part).values() if isinstance(value, Tensor)]
        if any(frozen or tensor.requires_grad for tensor in tensors):
            raise UnsupportedError(
                f"{option}: FSDP1 with use_orig_params=False hides the weights of {type(module).__name__}, which "
                f"have to be parameters; pass use_orig_params=True, use FSDP2, or leave {option} out"
            )


# --- tensor parallelism ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class TensorParallel:
    """The ranks over which transformers shards the heads of an attention module."""

    mesh: DeviceMesh

    def replicated(self, x: Tensor) -> Tensor:
        """Return x, which all ranks have. Its gradient is summed over the ranks."""
        same = DTensor.from_local(x, self.mesh, [Replicate()], run_check=False)
        return same.to_local(grad_placements=[Partial()])

    def summed(self, out: Tensor) -> Tensor:
        """Return the sum of the outputs of all ranks."""
        parts = DTensor.from_local(out, self.mesh, [Partial()], run_check=False)
        return parts.redistribute(placements=[Replicate()]).to_local()


def local(weight: Tensor) -> Tensor:
    """Return the part of a weight that this rank has."""
    return weight.to_local() if isinstance(weight, DTensor) else weight


def tensor_parallel_of(columns: Iterable[nn.Module], rows: nn.Module) -> TensorParallel | None:
    """Return the ranks over which transformers shards the outputs of `columns` and the inputs of `rows`, or None."""
    meshes = [_mesh_of(projection, "ColwiseParallel", Replicate(), Shard(-1)) for projection in columns]
    meshes.append(_mesh_of(rows, "RowwiseParallel", Shard(-1), Replicate()))
    mesh = meshes[0]
    return None if mesh is None or any(other != mesh for other in meshes) else TensorParallel(mesh)


def gathers_columns(linear: nn.Module) -> bool:
    """Return whether transformers shards the outputs of `linear`, and a call returns them all."""
    return _mesh_of(linear, "ColwiseParallel", Replicate(), Replicate()) is not None


def refuse_extended(projections: Iterable[nn.Module], option: str) -> None:
    """Raise `UnsupportedError` if a call of a projection does more than a linear layer with a whole weight."""
    for projection in projections:
        if type(projection) is not nn.Linear:
            kind = type(projection).__name__
            raise UnsupportedError(f"{option}: a projection was replaced by a {kind} after prepare(); prepare it later")
        if "forward" in vars(projection) or _has_hooks(projection) or isinstance(projection.weight, DTensor):
            raise UnsupportedError(
                f"{option}: a projection has hooks, a forward that was replaced, or a sharded weight, which would be "
                f"ignored; leave {option} out, or shard weights by FSDP2, ZeRO, or tensor parallelism of transformers"
            )


def _mesh_of(linear: nn.Module, style_name: str, inputs: Placement, outputs: Placement) -> DeviceMesh | None:
    """Return the mesh over which transformers shards a linear layer in a style with these layouts, or None."""
    forward = vars(linear).get("forward")
    if not inspect.isfunction(forward) or _has_hooks(linear):
        return None
    try:
        from transformers.distributed import tensor_parallel
    except ImportError:  # an older version, whose tensor parallelism adds hooks
        return None
    # The functions that replace forwards are closures, which are the only place with the style of a module.
    around: dict[str, Any] = dict(inspect.getclosurevars(forward).nonlocals)
    mesh, inside = around.get("mesh"), around.get("original_forward")
    style: Any = around.get("self")
    if type(style) is not getattr(tensor_parallel, style_name) or not isinstance(mesh, DeviceMesh):
        return None
    is_known = (style.input_layouts, style.output_layouts, style.use_local_output) == (inputs, outputs, True)
    is_plain = getattr(inside, "__func__", None) is nn.Linear.forward
    return mesh if is_known and is_plain and mesh.ndim == 1 else None


def _has_hooks(module: nn.Module) -> bool:
    """Return whether a call of a module runs hooks, other than those that let ZeRO 3 gather its weights."""
    kinds = module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks
    return any(
        not str(getattr(hook, "__module__", "")).startswith("deepspeed.") for hooks in kinds for hook in hooks.values()
    )
