"""Local attention on request: a rank processes whole texts while a ring of several ranks is open."""

from __future__ import annotations

from contextlib import AbstractContextManager

from ringattn.runtime.activation import activate

__all__ = ["local_attention"]


def local_attention() -> AbstractContextManager[None]:
    """Make models attend within this process, whatever ring is open or active. `Ring.activate(None)` without a ring.

    For whole inputs: `generate`, evaluation of a text between two steps, or a model after training. Every rank computes
    the same result. With sharded weights (FSDP) every rank has to make the call.

    Returns:
        A context manager.

    Raises:
        Nothing.

    Example:
        with local_attention():
            texts = trainer.model.generate(**prompts)
    """
    return activate(None)
