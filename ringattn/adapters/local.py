"""Local attention on request: a rank processes whole texts while a ring of several ranks is open."""

from __future__ import annotations

from contextlib import AbstractContextManager

from ringattn.runtime.activation import activate

__all__ = ["local_attention"]


def local_attention() -> AbstractContextManager[None]:
    """Return a context in which models attend within this process, whatever ring is open or active.

    It is like `Ring.activate(None)`, but needs no ring. Use it for whole inputs: `generate`, evaluation of a text
    between two steps, or a model after training. Every rank computes the same result. With sharded weights (FSDP),
    every rank has to make the call.

    Returns:
        A context manager.

    Raises:
        Nothing.

    Example:
        with local_attention():
            texts = trainer.model.generate(**prompts)
    """
    return activate(None)
