"""One run of a user's training script, observed in its own process.

Hooks record what each optimizer step reads and writes: the loss that the script passes to `backward`, the gradient and
the weight of every parameter by its name, the labels that enter cross entropy, and the indices that embeddings read.
Guarantees: the script is not changed, and hooks do not change what it computes. The exceptions are the options: a seed
before the script starts, float64, and the rounding of the second run on one process (`rounding`).
"""

from __future__ import annotations

import gc
import os
import random
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from functools import wraps
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.modules.module import register_module_forward_hook
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from ringattn.errors import InputError
from ringattn.launch.script import Program
from ringattn.launch.verify.rounding import RoundsOtherwise, in_double

MOST_VALUES = 2**20
"""Values that are kept of a tensor. A larger tensor is sampled at equal distances, and its norm is over all values."""
WRAPPERS = ("module", "_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")
"""Names of the submodule in which DDP, torch.compile, FSDP and checkpoint wrappers keep a module."""
PEFT = "base_model.model."
POSITIONS = ("position_ids", "positions", "cache_position")
"""Keyword arguments of modules that are positions of tokens."""

Sample = dict[str, Any]
"""A tensor: its sampled `values`, the `norm` of all values, their number `numel`, and its `shape`."""


class StopTraining(BaseException):
    """Ends the script after its last observed step. Not an Exception, so that scripts do not catch it."""


def run(spec: Mapping[str, Any]) -> dict[str, Any]:
    """Run the script that `spec` describes, and save the records of its steps into its folder, as a file per rank.

    Returns:
        The number of recorded steps.

    Raises:
        InputError: The script ended before its first optimizer step, or created nothing that trains over a ring.
    """
    os.dup2(2, 1)  # the standard output is the command's
    program, rank = Program(list(spec["words"]), spec["is_module"]), int(os.environ["RANK"])
    if spec["ring"]:
        from ringattn.adapters import auto

        auto.enable()
    _seed(spec["seed"])
    observer = Observer(spec["steps"])
    with ExitStack() as modes:
        if spec["double"]:
            modes.enter_context(in_double())
        if spec["rounds_otherwise"]:
            observer.rounding = modes.enter_context(RoundsOtherwise(spec["seed"]))
        modes.enter_context(observer)
        try:
            program.run()
        except StopTraining:
            pass
        except SystemExit as ended:
            if ended.code not in (None, 0):
                raise RuntimeError(f"the script ended with exit code {ended.code}") from ended
    if not observer.records:
        raise InputError(f"{program.words[0]} ended without a step of a torch.optim.Optimizer")
    if dist.is_initialized():
        dist.barrier()  # a rank that ends early closes connections that others may still use
    torch.save(observer.records, Path(spec["folder"]) / f"{spec['name']}-{rank}.pt")
    return {"steps": len(observer.records)}


def _seed(seed: int) -> None:
    random.seed(seed)
    torch.manual_seed(seed)
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed(seed)


class Observer:
    """The hooks, as a context manager, and their records: a dictionary for each optimizer step."""

    def __init__(self, steps: int) -> None:
        self.steps = steps
        self.records: list[dict[str, Any]] = []
        self.rounding: RoundsOtherwise | None = None
        self._names: dict[int, str] = {}
        self._before: dict[str, Sample] = {}
        self._gradients: dict[str, Sample] = {}
        self._undo: list[Callable[[], None]] = []
        self._clear()

    def _clear(self) -> None:
        """Forget what was observed since the last step."""
        self._unclipped: dict[int, Sample] = {}
        self._local: dict[int, Tensor] = {}
        self._reads: dict[int | str, Tensor] = {}
        self._losses: list[float] = []
        self._labels: list[int] = []

    def __enter__(self) -> Observer:
        hooks = (
            register_optimizer_step_pre_hook(self._before_step),
            register_optimizer_step_post_hook(self._after_step),
            register_module_forward_hook(self._after_forward, with_kwargs=True),
        )
        self._undo += [hook.remove for hook in hooks]
        self._observe(Tensor, "backward", self._see_loss)
        self._observe(nn.functional, "cross_entropy", self._see_labels)
        self._observe(nn.utils, "clip_grad_norm_", self._see_unclipped)
        self._observe(Optimizer, "add_param_group", self._see_parameters)
        return self

    def __exit__(self, *error: object) -> None:
        for undo in reversed(self._undo):
            undo()

    def _observe(self, owner: Any, name: str, see: Callable[..., Any]) -> None:
        """Replace a function by one that first passes its arguments to `see`, which may return the first one anew."""
        original, is_inside = getattr(owner, name), False

        @wraps(original)
        def observed(*args: Any, **kwargs: Any) -> Any:
            nonlocal is_inside
            if is_inside:  # a mode of torch, as that of float64, calls the function again
                return original(*args, **kwargs)
            with torch.no_grad():
                first = see(*args, **kwargs)
            is_inside = True
            try:
                return original(*args, **kwargs) if first is None else original(first, *args[1:], **kwargs)
            finally:
                is_inside = False

        setattr(owner, name, observed)
        self._undo.append(lambda: setattr(owner, name, original))

    # --- between steps ---

    def _see_loss(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        if loss.numel() == 1:
            self._losses.append(float(loss))

    def _see_labels(self, logits: Tensor, labels: Tensor, *args: Any, **kwargs: Any) -> None:
        ignored = kwargs.get("ignore_index", args[2] if len(args) > 2 else -100)
        if logits.requires_grad and not labels.is_floating_point():
            self._labels.append(int((labels != ignored).sum()))

    def _see_unclipped(self, parameters: Any, *args: Any, **kwargs: Any) -> Any:
        """Keep gradients as they are before clipping, which would hide a constant factor."""
        parameters = [parameters] if isinstance(parameters, Tensor) else list(parameters)  # may be a generator
        for parameter in parameters:
            if parameter.grad is not None:
                self._unclipped[id(parameter)] = self._sample(parameter.grad)
        return parameters

    def _see_parameters(self, optimizer: Optimizer, group: Any, *args: Any, **kwargs: Any) -> None:
        """Add up each rank's own gradients in backward, before they are reduced over ranks."""
        if not isinstance(group["params"], (Tensor, set)):
            group["params"] = list(group["params"])  # may be a generator
        for entry in [group["params"]] if isinstance(group["params"], Tensor) else group["params"]:
            parameter = entry[1] if isinstance(entry, tuple) else entry
            if parameter.requires_grad and parameter.is_leaf and not isinstance(parameter, DTensor):
                key = id(parameter)

                def add(grad: Tensor, key: int = key) -> None:
                    part = sampled(grad.detach()).clone()
                    self._local[key] = self._local[key] + part if key in self._local else part

                parameter.register_hook(add)

    def _after_forward(self, module: nn.Module, args: Any, kwargs: dict[str, Any], output: Any) -> None:
        """Count the indices that embeddings read, and the positions that modules receive."""
        if not torch.is_grad_enabled():
            return
        if isinstance(module, nn.Embedding) and args:
            self._count(id(module), args[0])
        for name in POSITIONS:
            if kwargs.get(name) is not None:
                self._count(name, kwargs[name])

    def _count(self, key: int | str, indices: Any) -> None:
        if not isinstance(indices, Tensor) or indices.is_floating_point() or isinstance(indices, DTensor):
            return
        with torch.no_grad():
            counts = torch.bincount(indices.detach().flatten().cpu().clamp_min(0))
        before = self._reads.get(key, counts.new_zeros(0))
        size = max(len(counts), len(before))
        self._reads[key] = sum(nn.functional.pad(x, (0, size - len(x))) for x in (counts, before))  # type: ignore[assignment]

    # --- steps ---

    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        pairs = list(self._named(optimizer))
        if not self.records:
            self._before = {name: self._sample(parameter) for name, parameter in pairs}
        self._gradients = {
            name: self._unclipped.get(id(parameter)) or self._sample(parameter.grad)
            for name, parameter in pairs
            if parameter.grad is not None
        }

    def _after_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        pairs = list(self._named(optimizer))
        reads = {self._names.get(key, "?") if isinstance(key, int) else key: x for key, x in self._reads.items()}
        self.records.append(
            {
                "before": self._before,
                "gradients": self._gradients,
                "weights": {name: self._sample(parameter) for name, parameter in pairs},
                "local": {name: self._local[id(p)] for name, p in pairs if id(p) in self._local},
                "reads": reads,
                "loss": sum(self._losses) if self._losses else None,
                "labels": sum(self._labels) if self._labels else None,
                "rates": [float(group["lr"]) for group in optimizer.param_groups if "lr" in group],
            }
        )
        self._before = {}
        self._clear()
        if len(self.records) >= self.steps:
            raise StopTraining

    @torch.no_grad()
    def _sample(self, x: Tensor) -> Sample:
        """Return a sample of a tensor. A collective call for a DTensor."""
        rounding = self.rounding
        if rounding is not None:
            rounding.paused = True
        try:
            x = x.detach()
            x = x.full_tensor() if isinstance(x, DTensor) else x
            norm = float(torch.linalg.vector_norm(x, dtype=torch.float64)) if x.is_floating_point() else 0.0
            values = sampled(x).to("cpu", copy=True)
            return {"values": values, "norm": norm, "numel": x.numel(), "shape": tuple(x.shape)}
        finally:
            if rounding is not None:
                rounding.paused = False

    def _named(self, optimizer: Optimizer) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield the parameters of an optimizer with their names; parameters without a module are numbered."""
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        if any(id(parameter) not in self._names for parameter in parameters):
            self._names = names_of_modules()
        for number, parameter in enumerate(parameters):
            yield self._names.get(id(parameter), f"parameter {number}"), parameter


def sampled(x: Tensor) -> Tensor:
    """Return the kept values of a tensor, flattened."""
    flat = x.reshape(-1)
    return flat[:: -(-flat.numel() // MOST_VALUES)] if flat.numel() > MOST_VALUES else flat


def names_of_modules() -> dict[int, str]:
    """Return the names of all parameters and modules of this process, by their id, from the outermost modules."""
    # The garbage collector knows every module. A hook in forward would also be called in compiled code.
    modules = [found for found in gc.get_objects() if issubclass(type(found), nn.Module)]
    inner = {id(child) for module in modules for child in module.__dict__.get("_modules", {}).values()}
    names: dict[int, str] = {}
    for module in modules:
        if id(module) not in inner:
            for name, part in (*module.named_modules(), *module.named_parameters(remove_duplicate=False)):
                names.setdefault(id(part), plain_name(name))
    return names


def plain_name(name: str) -> str:
    """Return a parameter's name without the names that wrappers add."""
    parts = [part for part in name.split(".") if part not in WRAPPERS]
    return ".".join(parts).removeprefix(PEFT)
