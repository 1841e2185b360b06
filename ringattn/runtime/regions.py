"""The checkpointed regions that enclose the current call, found on the Python call stack.

A checkpointed region is code that runs in forward and again during backward to recompute its activations. Both runs can
reach one object that lives exactly as long as the region's graph, the *region*:

- For an autograd function that runs code in its `forward(ctx, ...)` and again in its `backward(ctx, ...)`, it is `ctx`.
  This covers torch's reentrant checkpoint, those of Megatron and DeepSpeed, and compiled code whose backward
  recomputes.
- For torch's non-reentrant checkpoint it is the checkpoint's frame: a local variable of the suspended generator in
  forward, and a variable of the unpack hook in backward. Neither name is public. `tests/runtime/test_regions.py` fails
  if torch renames them, and recomputation is then refused.

Not found are autograd functions with a separate `setup_context`, checkpoints that other libraries build on saved-tensor
hooks, compiled autograd, and the forward run of torch's composable `checkpoint`.
"""

from __future__ import annotations

import sys
from types import FrameType, GeneratorType
from typing import Any, NamedTuple

import torch
from torch.autograd.function import FunctionCtx
from torch.utils import checkpoint as torch_checkpoint

_CHECKPOINT_FILE = torch_checkpoint.__file__
_ENGINE_CALLS = (torch.autograd.backward.__code__, torch.autograd.grad.__code__)
_RECOMPUTES = frozenset({"backward", "vjp", "unpack_hook"})
_NAMES = _RECOMPUTES | {"forward", "checkpoint"} | {code.co_name for code in _ENGINE_CALLS}


class Regions(NamedTuple):
    """The regions around a call, outward to the innermost running backward pass.

    Attributes:
        entered: Regions in their forward run, innermost first. Inside a recomputation: those within it.
        recomputed: The innermost region that is being recomputed, or None.
        backward: The number of the running backward pass, -1 outside backward.
    """

    entered: tuple[Any, ...] = ()
    recomputed: Any = None
    backward: int = -1

    @property
    def is_recomputation(self) -> bool:
        """Whether the call is made during backward, whether or not its region was found."""
        return self.recomputed is not None or self.backward != -1

    def shares_recomputation(self, other: Regions) -> bool:
        """Whether both were taken in the same recomputation of the same region."""
        return self.recomputed is other.recomputed and self.backward == other.backward


def enclosing_regions() -> Regions:
    """Return the regions around the caller. Costs a few microseconds: it walks the call stack."""
    entered: list[Any] = []
    backward = torch._C._current_graph_task_id()
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        if code.co_name in _NAMES:
            if code in _ENGINE_CALLS:
                break  # the code that called backward is not part of what backward recomputes
            region = _region_of(frame)
            if region is not None:
                if code.co_name in _RECOMPUTES:
                    return Regions(tuple(entered), region, backward)
                entered.append(region)
        frame = frame.f_back
    return Regions(tuple(entered), None, backward)


def _region_of(frame: FrameType) -> Any:
    """Return the region that this stack frame runs, or None."""
    code = frame.f_code
    if code.co_filename == _CHECKPOINT_FILE and code.co_name in ("checkpoint", "unpack_hook"):
        if code.co_name == "unpack_hook":
            return frame.f_locals.get("frame")
        # `checkpoint` calls the function while its generator is suspended; reentrant calls have no generator.
        generator = frame.f_locals.get("gen")
        suspended = generator.gi_frame if isinstance(generator, GeneratorType) else None
        return None if suspended is None else suspended.f_locals.get("new_frame")
    # Most frames of this name are module methods. Reading the local variables is the expensive step.
    if not code.co_argcount or code.co_varnames[0] == "self":
        return None
    first_argument = frame.f_locals.get(code.co_varnames[0])
    return first_argument if isinstance(first_argument, FunctionCtx) else None
