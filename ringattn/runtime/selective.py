"""Keeps what attention does inside from torch's selective checkpointing, which counts the operators of a region.

A second run does other ones: buffers are bound already, or bound again, and ranks that cannot agree tell each other. To
such a region attention is one step that is computed again; the operators of `adapters.torch_ops` can be saved.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch.utils import checkpoint
from torch.utils._python_dispatch import _disable_current_modes, _get_current_dispatch_mode_stack

_COUNTING = checkpoint._CachingTorchDispatchMode, checkpoint._CachedTorchDispatchMode


def unseen() -> AbstractContextManager[Any]:
    """Inside, no mode of torch's dispatcher is active, where one of them belongs to selective checkpointing."""
    if torch._C._len_torch_dispatch_stack() == 0:
        return nullcontext()
    if not any(isinstance(mode, _COUNTING) for mode in _get_current_dispatch_mode_stack()):
        return nullcontext()
    return _disable_current_modes()
