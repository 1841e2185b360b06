"""Local attention on request: whole texts on one rank, while a ring of several ranks is open."""

from __future__ import annotations

from contextlib import AbstractContextManager

from ringattn.runtime.activation import activate

__all__ = ["local_attention"]


def local_attention() -> AbstractContextManager[None]:
    """Let models attend within this process, whatever ring is open or active; `Ring.activate(None)` without a ring.

    For whole inputs: `generate`, a look at some text between two steps, a model that a Trainer has trained. Every rank
    computes the same, and sharded weights (FSDP) need every rank to call.

    Returns:
        A context manager.

    Raises:
        Nothing.

    Example:
        with local_attention():
            texts = trainer.model.generate(**prompts)
    """
    return activate(None)
